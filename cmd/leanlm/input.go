package main

import (
	"context"
	"fmt"
	"io"
	"os"
)

// maxText bounds the texts that a command reads. Tests lower the bound.
var maxText int64 = 64 << 20

// readText reads the file of a flag; "-" is standard input.
func readText(name string, in io.Reader) (string, error) {
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, maxText+1))
	if err == nil && int64(len(data)) > maxText {
		if name == "-" {
			name = "standard input"
		}
		err = fmt.Errorf("%s has more than %d bytes", name, maxText)
	}
	return string(data), err
}

// interruptible is a reader that returns when a context is done. A goroutine may then still wait for the source, until the source
// has input.
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
