//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/term"
)

func init() {
	ownGroup = func(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
}

// stopped waits until a process is stopped, or goes on.
func (x *terminal) stopped(want bool) {
	x.t.Helper()
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(5 * time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", x.process.Process.Pid))
		if err != nil {
			x.t.Fatal(err)
		}
		if _, state, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(state, "T") == want {
			return
		}
	}
	x.t.Fatalf("stopped is never %v", want)
}

// state waits for a state of the terminal: that of before, or another one.
func (x *terminal) state(before *term.State, same bool) {
	x.t.Helper()
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		now, err := term.GetState(int(x.tty.Fd()))
		if err != nil {
			x.t.Fatal(err)
		}
		if (*now == *before) == same {
			return
		}
		if time.Since(began) > time.Minute {
			x.t.Fatalf("the terminal is as before: %v", !same)
		}
	}
}

// Ctrl-Z stops the process with the terminal as it was, while a line is typed and while a text is written; when it goes on
// so do the line and the text. After other stops the terminal is set again, too.
func TestSessionStops(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("/proc tells whether a process is stopped")
	}
	x := newTerminal(t, "-n", "12")
	before, err := term.GetState(int(x.tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	x.until("\n> ")
	signal := func(s syscall.Signal) {
		t.Helper()
		if err := syscall.Kill(-x.process.Process.Pid, s); err != nil {
			t.Fatal(err)
		}
	}
	x.typed("Once upon")
	x.until("Once upon")
	for range 3 {
		x.typed("\x1a")
		x.stopped(true)
		x.state(before, true)
		signal(syscall.SIGCONT)
		x.stopped(false)
		x.state(before, false)
		x.until("> Once upon") // the line is there again
	}
	for _, stop := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGTSTP} {
		signal(stop)
		x.stopped(true)
		if err := term.Restore(int(x.tty.Fd()), before); err != nil { // as a shell does
			t.Fatal(err)
		}
		signal(syscall.SIGCONT)
		x.state(before, false)
		x.until("> Once upon")
	}
	_, text, _ := command(t, "-prompt", "Once upon a time", "-n", "12")
	x.typed(" a time\r")
	x.until(" a time\r\n")
	if got := x.until("\n> "); strings.TrimSuffix(got, "> ") != text {
		t.Errorf("%q, want %q", got, text)
	}
	x.typed("\x04")
	if err := x.ends(before); err != nil {
		t.Error(err)
	}

	// While a text is written.
	x = newTerminal(t, "-n", "400")
	x.until("\n> ")
	x.typed("In the morning\r")
	x.until("In the morning\r\n")
	first := x.until(" ")
	x.typed("\x1a")
	x.stopped(true)
	x.state(before, true)
	signal(syscall.SIGCONT)
	_, text, _ = command(t, "-prompt", "In the morning", "-n", "400")
	if got := first + x.until("\n> "); strings.TrimSuffix(got, "> ") != text {
		t.Errorf("%q, want %q", got, text)
	}
	x.typed("\x04")
	if err := x.ends(before); err != nil {
		t.Error(err)
	}
}
