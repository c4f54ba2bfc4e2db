package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"gorgonia.org/leanattention/examples/opt/files"
)

// Limits of prompts, and of the text of -perplexity. A model reads some KB of each prompt.
const (
	maxPrompts = 64 << 20
	maxText    = 128 << 20
)

// readBounded reads a file, or standard input if its name is "-".
func readBounded(name string, stdin io.Reader, most int64) (string, error) {
	var data []byte
	var err error
	if name == "-" {
		name = "standard input"
		data, err = files.AtMost(stdin, most)
	} else {
		data, err = files.Stream(name, most)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return string(data), nil
}

// source is a source of prompts as in the flags.
type source struct {
	text  string // the prompt, or the name of a file
	lines bool   // each line of the file is a prompt
}

// readPrompts reads the sources of -prompt and -prompts.
func (o *options) readPrompts(stdin io.Reader) error {
	for _, s := range o.sources {
		switch {
		case s.lines:
			text, err := readBounded(s.text, stdin, maxPrompts)
			if err != nil {
				return fmt.Errorf("-prompts: %w", err)
			}
			for line := range strings.Lines(text) {
				if line = trimNewline(line); line != "" {
					o.prompts = append(o.prompts, line)
				}
			}
		case s.text == "-":
			text, err := readBounded("-", stdin, maxPrompts)
			if err != nil {
				return fmt.Errorf("-prompt: %w", err)
			}
			o.prompts = append(o.prompts, trimNewline(text))
		default:
			o.prompts = append(o.prompts, s.text)
		}
	}
	if len(o.prompts) == 0 && len(o.sources) > 0 {
		return fmt.Errorf("-prompts: no line of %s has a text", o.sources[0].text)
	}
	if o.promptCache != "" && len(o.prompts) > 1 {
		return usagef("-prompt-cache is for one prompt, and there are %d", len(o.prompts))
	}
	return nil
}

// trimNewline removes one line ending.
func trimNewline(s string) string {
	return strings.TrimSuffix(strings.TrimSuffix(s, "\n"), "\r")
}

// interruptible is a reader that gives up when a context is done. A goroutine may then still wait for the source,
// until the source has input.
type interruptible struct {
	ctx  context.Context
	from io.Reader
}

func (r interruptible) Read(p []byte) (int, error) {
	type result struct {
		n   int
		err error
	}
	done, buffer := make(chan result, 1), make([]byte, len(p))
	go func() {
		n, err := r.from.Read(buffer)
		done <- result{n, err}
	}()
	select {
	case <-r.ctx.Done():
		return 0, r.ctx.Err()
	case got := <-done:
		copy(p, buffer[:got.n])
		return got.n, got.err
	}
}
