package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"gorgonia.org/leanattention/internal/plural"
)

// progress shows on one line how many tokens of the prompts were read.
type progress struct {
	w           io.Writer
	what        string // what is read
	total, done int
	live        bool // w shows a line that will be overwritten
	ended       bool
	resting     bool // a text is being written, perhaps on the same terminal
	began       time.Time
	first, took time.Duration // time until a first prompt was read, and until the last one
}

// show reports further tokens, the last of a prompt if ready is set.
func (p *progress) show(tokens int, ready bool) {
	if p.done += tokens; tokens > 0 {
		p.took = time.Since(p.began)
	}
	if ready && p.first == 0 {
		p.first = p.took
	}
	switch {
	case p.resting:
	case p.done == p.total:
		p.end()
	case p.live:
		fmt.Fprintf(p.w, "\r%s: %d of %d tokens", p.what, p.done, p.total)
	}
}

// rest pauses the output for texts: the rest is written by end.
func (p *progress) rest() {
	if p.live && !p.ended {
		fmt.Fprintln(p.w)
	}
	p.resting = true
}

// end writes the final state, once.
func (p *progress) end() {
	if p.ended {
		return
	}
	p.ended = true
	if p.live {
		fmt.Fprint(p.w, "\r")
	}
	fmt.Fprint(p.w, plural.Mend(fmt.Sprintf("%s: %d of %d tokens in %.2f s\n", p.what, p.done, p.total, p.took.Seconds())))
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
