//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/term"
)

// stops makes Ctrl-Z stop the process group, as shells expect, with the terminal in its earlier mode. When the
// process continues, after this or any other stop, the terminal delivers every key again, and redraw is called. end
// ends that.
//
// SIGTSTP itself is not caught: package os/signal can't restore a signal's default action, which stops a process only
// if a shell can continue it.
func (r *rawTerminal) stops(keys *keyboard, redraw func()) (end func()) {
	stop, again := make(chan struct{}, 1), make(chan os.Signal, 1)
	signal.Notify(again, syscall.SIGCONT)
	keys.onSuspend(func() {
		select {
		case stop <- struct{}{}:
		default: // a signal is already waiting
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

// suspend stops the process group, with the terminal in its earlier mode, until a SIGCONT.
func (r *rawTerminal) suspend(again chan os.Signal) {
	r.mu.Lock() // the session does not end meanwhile
	defer r.mu.Unlock()
	if r.before == nil || term.Restore(r.fd, r.before) != nil {
		return
	}
	select {
	case <-again: // drop an earlier signal
	default:
	}
	syscall.Kill(0, syscall.SIGTSTP) // the other processes of a pipeline stop, too
	// The signal may reach another thread a little later. If no shell could continue the process, the system ignores
	// the signal, and no SIGCONT comes.
	select {
	case <-again:
	case <-time.After(100 * time.Millisecond):
	}
}
