//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/term"
)

// stops has Ctrl-Z stop the process group, as shells expect, with the terminal as it was. When the process goes on, after
// that or after any other stop, the terminal hands on every key again, and redraw is called. The function that it returns
// ends that.
//
// SIGTSTP itself is not caught: package os/signal can't give a signal its default action back, which is what stops a
// process where a shell can let it go on and no other one.
func (r *rawTerminal) stops(keys *keyboard, redraw func()) (end func()) {
	stop, again := make(chan struct{}, 1), make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGCONT)
	keys.onSuspend(func() {
		select {
		case stop <- struct{}{}:
		default: // it is about to
		}
	})
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			case <-stop:
				r.suspend(again)
			case <-again:
			}
			if r.again() == nil {
				redraw()
			}
		}
	}()
	return func() {
		keys.onSuspend(nil)
		signal.Stop(again)
		close(done)
		<-ended
	}
}

// suspend stops the process group, with the terminal as it was before, until a SIGCONT.
func (r *rawTerminal) suspend(again chan os.Signal) {
	r.mu.Lock() // the session does not end meanwhile
	defer r.mu.Unlock()
	if r.before == nil || term.Restore(r.fd, r.before) != nil {
		return
	}
	select {
	case <-again: // an old one
	default:
	}
	syscall.Kill(0, syscall.SIGTSTP) // the others of a pipeline stop, too
	// The signal may come to another thread a little later. Where no shell could let the process go on the system
	// ignores it, and no SIGCONT comes.
	select {
	case <-again:
	case <-time.After(100 * time.Millisecond):
	}
}
