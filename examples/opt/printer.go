package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// printer writes the texts of a batch, which grow together, one after the other: the first unfinished text as it
// grows, the others in turn. With several texts each has a line with its prompt above it.
type printer struct {
	w     io.Writer
	texts []text
	turn  int // the text that is being written
	err   error
}

type text struct {
	title   string // empty: none
	waiting strings.Builder
	done    bool
}

func newPrinter(w io.Writer, prompts []string) *printer {
	p := &printer{w: w, texts: make([]text, len(prompts))}
	if len(prompts) > 1 {
		for i, prompt := range prompts {
			p.texts[i].title = fmt.Sprintf("[%d] %s\n", i+1, shorten(prompt))
		}
		p.write(p.texts[0].title)
	}
	return p
}

// shorten returns a short line of a prompt.
func shorten(prompt string) string {
	const most = 60
	line := strings.Join(strings.Fields(prompt), " ")
	if utf8.RuneCountInString(line) <= most {
		return line
	}
	return strings.TrimSpace(string([]rune(line)[:most])) + "..."
}

func (p *printer) write(s string) {
	if p.err == nil && s != "" {
		_, p.err = io.WriteString(p.w, s)
	}
}

// add continues text i.
func (p *printer) add(i int, s string) error {
	if i == p.turn {
		p.write(s)
	} else {
		p.texts[i].waiting.WriteString(s)
	}
	return p.err
}

// end ends text i. If it was being written, the texts after it are written, up to one that still grows.
func (p *printer) end(i int) error {
	p.texts[i].done = true
	for p.turn < len(p.texts) && p.texts[p.turn].done {
		p.write("\n")
		if p.turn++; p.turn < len(p.texts) {
			next := &p.texts[p.turn]
			p.write("\n" + next.title + next.waiting.String())
		}
	}
	return p.err
}
