package main

import (
	"sync"

	"golang.org/x/term"
)

// rawTerminal is a terminal that hands on every key at once, or is as it was before.
type rawTerminal struct {
	fd int

	mu     sync.Mutex
	before *term.State // to return to; nil: the terminal is as it was
}

// enter makes the terminal hand on every key.
func (r *rawTerminal) enter() (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before, err = term.MakeRaw(r.fd)
	return err
}

// leave puts back what there was.
func (r *rawTerminal) leave() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.before == nil {
		return nil
	}
	err := term.Restore(r.fd, r.before)
	r.before = nil
	return err
}

// again is enter behind a time in which others had the terminal; it stays as it is if it was left.
func (r *rawTerminal) again() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.before == nil {
		return nil
	}
	_, err := term.MakeRaw(r.fd)
	return err
}
