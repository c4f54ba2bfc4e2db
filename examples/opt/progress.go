package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"gorgonia.org/leanattention/internal/plural"
)

// progress tells on one line how far the prompts are.
type progress struct {
	w           io.Writer
	what        string // is read
	total, done int
	live        bool // w shows a line that is written over
	ended       bool
	resting     bool // a text is being written, perhaps on the same terminal
	began       time.Time
	first, took time.Duration // until a first prompt was read, and until the last one
}

// show tells that some more tokens were read, the last of a prompt if ready.
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

// rest makes room for texts: what is not written yet waits for end.
func (p *progress) rest() {
	if p.live && !p.ended {
		fmt.Fprintln(p.w)
	}
	p.resting = true
}

// end writes how far it came, once.
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
