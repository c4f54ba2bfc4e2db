package main

import (
	"sync"

	"golang.org/x/term"
)

// rawTerminal is a terminal that delivers every key at once, or is in its earlier mode.
type rawTerminal struct {
	fd int

	mu     sync.Mutex
	before *term.State // the earlier mode; nil: the terminal is in it
}

// enter makes the terminal deliver every key.
func (r *rawTerminal) enter() (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before, err = term.MakeRaw(r.fd)
	return err
}

// leave restores the earlier mode.
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

// again is enter after other programs had the terminal; after leave it does nothing.
func (r *rawTerminal) again() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.before == nil {
		return nil
	}
	_, err := term.MakeRaw(r.fd)
	return err
}
