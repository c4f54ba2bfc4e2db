package ptx

import "fmt"

// Trace is what a launch has done that matters to one that overlaps with it: what it
// has written, and whether it has let the next one start before its end.
type Trace struct {
	words  map[uint64]uint64 // 64 words of 4 bytes, by their address: a bit for each that was written
	lets   bool
	behind *Trace // of the launch before it, if it let the next one start before it had waited for that
}

func (t *Trace) each(address uint64, n int, f func(of, bit uint64)) {
	for word := address / 4; word*4 < address+uint64(n); word++ {
		f(word/64, 1<<(word%64))
	}
}

func (t *Trace) wrote(address uint64, n int) (is bool) {
	t.each(address, n, func(of, bit uint64) { is = is || t.words[of]&bit != 0 })
	return is
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
		if t.words == nil {
			t.words = map[uint64]uint64{}
		}
		t.each(address, n, func(of, bit uint64) { t.words[of] |= bit })
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
