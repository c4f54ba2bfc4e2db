package main

import (
	"context"
	"io"
	"sync"
)

// keyboard reads a terminal that delivers every key at once, also while a text is written. Then Ctrl-C ends the text,
// and other keys wait for the next line. While a line is typed, Ctrl-C empties the line. Ctrl-Z stops the process, if
// a shell can continue it.
//
// The reading goroutine ends with its input, or with the process.
type keyboard struct {
	ctx context.Context

	mu        sync.Mutex
	changed   sync.Cond
	keys      []byte // typed and not read yet
	err       error  // the error that ended reading
	interrupt func() // called by Ctrl-C; nil: a line is being typed
	suspend   func() // called by Ctrl-Z; nil: no function
}

const (
	ctrlC     = 3
	ctrlZ     = 26
	emptyLine = "\x05\x15" // Ctrl-E moves to the end of a line, Ctrl-U deletes all before it
	mostKeys  = 1 << 20    // most keys that wait; later keys are lost
)

// newKeyboard reads from a terminal until ctx is done.
func newKeyboard(ctx context.Context, from io.Reader) *keyboard {
	k := &keyboard{ctx: ctx}
	k.changed.L = &k.mu
	context.AfterFunc(ctx, func() {
		k.mu.Lock() // so that no reader is between the check and the wait
		defer k.mu.Unlock()
		k.changed.Broadcast()
	})
	go func() {
		var keys [256]byte
		for {
			n, err := from.Read(keys[:])
			k.typed(keys[:n], err)
			if err != nil {
				return
			}
		}
	}()
	return k
}

func (k *keyboard) typed(keys []byte, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		switch {
		case key == ctrlC && k.interrupt != nil:
			k.interrupt()
			k.keys = k.keys[:0]
		case key == ctrlC:
			k.keys = append(k.keys[:0], emptyLine...)
		case key == ctrlZ:
			if k.suspend != nil {
				k.suspend()
			}
		case len(k.keys) < mostKeys:
			k.keys = append(k.keys, key)
		}
	}
	k.err = err
	k.changed.Broadcast()
}

// Read waits for keys.
func (k *keyboard) Read(p []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for len(k.keys) == 0 {
		switch {
		case k.ctx.Err() != nil:
			return 0, k.ctx.Err()
		case k.err != nil:
			return 0, k.err
		}
		k.changed.Wait()
	}
	n := copy(p, k.keys)
	k.keys = append(k.keys[:0], k.keys[n:]...)
	return n, nil
}

// onSuspend sets the function of Ctrl-Z.
func (k *keyboard) onSuspend(suspend func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.suspend = suspend
}

// until sets the function of Ctrl-C, until stop is called.
func (k *keyboard) until(interrupt func()) (stop func()) {
	set := func(f func()) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.interrupt = f
	}
	set(interrupt)
	return func() { set(nil) }
}
