package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"
)

// ownGroup gives a process a group of its own, where there are such: Ctrl-Z stops the group.
var ownGroup = func(*exec.Cmd) {}

// terminal is a process of the command on a pseudo-terminal.
type terminal struct {
	t       *testing.T
	keys    *os.File // what is written is typed
	tty     *os.File
	process *exec.Cmd
	exited  chan error

	mu   sync.Mutex
	text []byte // that was written and not waited for yet
	more chan struct{}
}

func newTerminal(t *testing.T, args ...string) *terminal {
	t.Helper()
	keys, tty, err := pty.Open()
	if errors.Is(err, pty.ErrUnsupported) {
		t.Skipf("no pseudo-terminals here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 50, Cols: 1000}); err != nil { // lines are not broken
		t.Fatal(err)
	}
	x := &terminal{t: t, keys: keys, tty: tty, exited: make(chan error, 1), more: make(chan struct{}, 1)}
	x.process = exec.Command(os.Args[0], append([]string{"-i"}, args...)...)
	x.process.Env = append(os.Environ(), asCommand+"=1")
	ownGroup(x.process)
	x.process.Stdin, x.process.Stdout, x.process.Stderr = tty, tty, tty
	if err := x.process.Start(); err != nil {
		t.Fatal(err)
	}
	var reading sync.WaitGroup
	reading.Go(x.read)
	go func() { x.exited <- x.process.Wait() }()
	t.Cleanup(func() {
		x.process.Process.Kill() // if it has not ended
		tty.Close()
		keys.Close()
		reading.Wait()
	})
	return x
}

func (x *terminal) read() {
	buffer := make([]byte, 4096)
	for {
		n, err := x.keys.Read(buffer)
		if err != nil {
			return
		}
		x.mu.Lock()
		x.text = append(x.text, buffer[:n]...)
		x.mu.Unlock()
		select {
		case x.more <- struct{}{}:
		default:
		}
	}
}

func (x *terminal) typed(keys string) {
	x.t.Helper()
	if _, err := io.WriteString(x.keys, keys); err != nil {
		x.t.Fatal(err)
	}
}

// until is what is written up to a text and with it.
func (x *terminal) until(end string) string {
	x.t.Helper()
	late := time.After(2 * time.Minute)
	for {
		x.mu.Lock()
		if i := bytes.Index(x.text, []byte(end)); i >= 0 {
			text := string(x.text[:i+len(end)])
			x.text = append(x.text[:0], x.text[i+len(end):]...)
			x.mu.Unlock()
			return strings.ReplaceAll(text, "\r\n", "\n")
		}
		x.mu.Unlock()
		select {
		case <-x.more:
		case err := <-x.exited:
			x.exited <- err
			x.t.Fatalf("it ended (%v) before %q was written, and wrote %q", err, end, x.text)
		case <-late:
			x.t.Fatalf("%q is not written; it wrote %q", end, x.text)
		}
	}
}

// line types a line, and returns what is written up to the next prompt.
func (x *terminal) line(text string) string {
	x.t.Helper()
	x.typed(text + "\r")
	x.until(text + "\r\n") // the echo
	out := x.until("\n> ")
	return strings.TrimSuffix(out, "> ")
}

// ends waits for the end of the process, and says whether the terminal is as it was.
func (x *terminal) ends(before *term.State) error {
	x.t.Helper()
	select {
	case err := <-x.exited:
		after, e := term.GetState(int(x.tty.Fd()))
		if e != nil || *after != *before {
			x.t.Errorf("the terminal is not as it was: %v", e)
		}
		return err
	case <-time.After(time.Minute):
		x.t.Fatal("it does not end")
		return nil
	}
}

// A session: lines are put behind the text and continued, only new tokens are read,
// and what was taken back or forked away leaves no trace.
func TestSessionOnTerminal(t *testing.T) {
	plain := func(n int) string {
		_, text, _ := command(t, "-prompt", "Once upon a time", "-n", fmt.Sprint(n))
		return strings.TrimSuffix(text, "\n")
	}
	x := newTerminal(t, "-n", "12", "-stats")
	before, err := term.GetState(int(x.tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	x.until("\n> ")
	now, err := term.GetState(int(x.tty.Fd()))
	if err != nil || *now == *before {
		t.Errorf("a line is not edited: %v", err)
	}

	// The last token that was chosen is read with the next line.
	if got, want := x.line("Once upon a time"), plain(12)+"\nopt: read 5 tokens, added 12; 17 of 2048\n"; got != want {
		t.Errorf("first line: %q, want %q", got, want)
	}
	if got, want := x.line(""), strings.TrimPrefix(plain(24), plain(12))+"\nopt: read 1 token, added 12; 29 of 2048\n"; got != want {
		t.Errorf("empty line: %q, want %q", got, want)
	}
	dog := x.line(" The dog")
	if !strings.HasSuffix(dog, "\nopt: read 3 tokens, added 12; 43 of 2048\n") {
		t.Errorf("third line: %q", dog)
	}
	if got := x.line("/undo"); got != "opt: 29 tokens\n" {
		t.Errorf("/undo: %q", got)
	}
	// Undone, the tokens before are still there, but that the last one's logits are not.
	if got := x.line(" The dog"); got != dog && got != strings.Replace(dog, "read 3", "read 2", 1) {
		t.Errorf("after /undo: %q, want %q", got, dog)
	}
	x.line("/undo")
	if got := x.line("/fork"); got != "opt: fork 1, of 29 tokens\n" {
		t.Errorf("/fork: %q", got)
	}
	if got := x.line(` A cat\nand`); got == dog || !strings.Contains(got, "opt: read ") {
		t.Errorf("another line: %q", got)
	}
	if got := x.line("/back"); got != "opt: 29 tokens, as at fork 1\n" {
		t.Errorf("/back: %q", got)
	}
	if got, _, _ := strings.Cut(x.line(" The dog"), "opt:"); !strings.HasPrefix(dog, got) {
		t.Errorf("after /back: %q, want %q", got, dog)
	}

	for line, want := range map[string]string{
		"/back":   "opt: /back: there is no fork\n",
		"/redo":   `opt: "/redo" is none of /undo, /fork, /back, /quit, /help` + "\n",
		"/help":   sessionHelp,
		"/undo":   "opt: 29 tokens\n",
		"/fork x": `opt: "/fork x" is none of /undo, /fork, /back, /quit, /help` + "\n",
	} {
		if got := x.line(line); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
	// Ctrl-C empties a line.
	x.typed("/quit\x03")
	if got := x.line("/back"); got != "opt: /back: there is no fork\n" {
		t.Errorf("a line after another that was given up: %q", got)
	}
	x.typed("\x04")
	if err := x.ends(before); err != nil {
		t.Errorf("Ctrl-D: %v", err)
	}
	// What -stats tells at the end.
	if got := x.until("runs of the graph"); !strings.Contains(got, "prefill") {
		t.Errorf("statistics: %q", got)
	}
}

// Ctrl-C ends a text and not the session, and what was typed beside a text is the
// next line.
func TestSessionInterrupt(t *testing.T) {
	x := newTerminal(t, "-n", "1900", "-stats")
	before, err := term.GetState(int(x.tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	x.until("\n> ")
	x.typed("In the morning\r")
	x.until("In the morning\r\n")
	first := x.until(" ")
	x.typed("thrown away\x03")
	rest := x.until("\n> ")
	var read, added int
	_, told, _ := strings.Cut(rest, "opt: ")
	if _, err := fmt.Sscanf(told, "read %d tokens, added %d", &read, &added); err != nil || added < 1 || added >= 1900 {
		t.Fatalf("%q %q: %v", first, rest, err)
	}
	text, _, _ := strings.Cut(first+rest, "opt: ")
	_, all, _ := command(t, "-prompt", "In the morning", "-n", fmt.Sprint(added))
	if text != all {
		t.Errorf("%q, want %q", text, all)
	}
	// It goes on where it ended.
	x.typed("\r")
	x.until("\r\n")
	x.until(" ")
	x.typed("\x03/undo\r")
	if got := x.until("tokens\r\n"); !strings.Contains(got, "/undo") {
		t.Errorf("typed beside a text: %q", got)
	}
	x.line("/quit-not")
	x.typed("/quit\r")
	if err := x.ends(before); err != nil {
		t.Errorf("/quit: %v", err)
	}
}

// A full context is an error line: what is there can be taken back, and other texts
// go on.
func TestSessionFull(t *testing.T) {
	dir := writeModel(t, nil) // 64 positions, a token for each byte
	x := newTerminal(t, "-model", dir, "-n", "100", "-stats")
	x.until("\n> ")
	const ended = "\nopt: the text ended early: the context is full, the model has 64 positions; /undo makes room"
	if got := x.line("abc"); !strings.HasSuffix(got, ended+"\nopt: read 4 tokens, added 61; 64 of 64\n") {
		t.Errorf("to the last position: %q", got)
	}
	for line, want := range map[string]string{
		"x": "opt: the line has no room: it has 1 token, and 64 of the model's 64 positions are taken; /undo makes room\n",
		"":  "opt: the context is full: the model has 64 positions; /undo makes room\n",
	} {
		if got := x.line(line); got != want {
			t.Errorf("%q in a full context: %q, want %q", line, got, want)
		}
	}
	if got := x.line("/undo"); got != "opt: 0 tokens\n" {
		t.Errorf("/undo: %q", got)
	}
	if got := x.line(strings.Repeat("y", 64)); !strings.HasPrefix(got, "opt: the line has no room: it has 65 tokens, and 0 of the model's 64 positions are taken; shorten it") {
		t.Errorf("a line longer than the model: %q", got)
	}
	if got := x.line("/undo"); got != "opt: /undo: there is no line to take back\n" {
		t.Errorf("/undo of nothing: %q", got)
	}
	if got := x.line("abcd"); !strings.HasSuffix(got, ended+"\nopt: read 5 tokens, added 60; 64 of 64\n") {
		t.Errorf("another text: %q", got)
	}
	x.typed(strings.Repeat("z", 5000) + "\r")
	x.until("opt: a line has less than 4096 characters")
	x.until("\n> ")
	x.typed("\x04")
	if err := <-x.exited; err != nil {
		t.Error(err)
	}
	x.exited <- nil
}
