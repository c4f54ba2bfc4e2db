package ptx

import "fmt"

// Trace is what a launch has done that matters to one that overlaps with it: what it
// has written, and whether it has let the next one start before its end.
type Trace struct {
	words  map[uint64]*written // by address
	last   *written            // of words, and its address
	lastAt uint64
	lets   bool
	behind *Trace // of the launch before it, if it let the next one start before it had waited for that
}

// written has a bit for each of so many words of 4 bytes.
type written [writtenWords / 64]uint64

const writtenWords = 4096

func (t *Trace) wrote(address uint64, n int) (is bool) {
	for word := address / 4; word*4 < address+uint64(n); word++ {
		if o := t.words[word/writtenWords]; o != nil && o[word%writtenWords/64]>>(word%64)&1 != 0 {
			return true
		}
	}
	return false
}

// write keeps that something was written.
func (t *Trace) write(address uint64, n int) {
	for word := address / 4; word*4 < address+uint64(n); word++ {
		if at := word / writtenWords; t.last == nil || t.lastAt != at {
			if t.words == nil {
				t.words = map[uint64]*written{}
			}
			if t.words[at] == nil {
				t.words[at] = new(written)
			}
			t.last, t.lastAt = t.words[at], at
		}
		t.last[word%writtenWords/64] |= 1 << (word % 64)
	}
}

// overlapping is the trace of the launch before this one, if that may still be running.
func (l *Launch) overlapping() *Trace {
	if l.Before != nil && l.Before.lets {
		return l.Before
	}
	return nil
}

// touch checks an access to global memory, and keeps that something was written.
func (b *block) touch(address uint64, n int, writes bool) {
	if before := b.m.overlapping(); before != nil && !b.waited {
		if writes {
			panic(fault{fmt.Sprintf("%d bytes at %#x are written before griddepcontrol.wait", n, address)})
		}
		for ; before != nil; before = before.behind {
			if before.wrote(address, n) {
				panic(fault{fmt.Sprintf("%d bytes at %#x, which a launch before writes, are read before griddepcontrol.wait", n, address)})
			}
		}
	}
	if t := b.m.Trace; t != nil && writes {
		t.write(address, n)
	}
}

// dependency compiles griddepcontrol.
func (c *compiler) dependency(s *statement) func(w *warp, m uint32) {
	switch s.part(1) {
	case "wait":
		return func(w *warp, m uint32) { w.waited, w.m.waited = true, true }
	case "launch_dependents":
		return func(w *warp, m uint32) {
			if t := w.m.Trace; t != nil {
				t.lets = true
				if !w.waited { // then more than two launches may run at once
					t.behind = w.m.overlapping()
				}
			}
		}
	}
	return nil
}
