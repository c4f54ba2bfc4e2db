package ptx

import "fmt"

// Trace is what a launch has done that matters to one that overlaps with it: what it
// has read and written, and whether it has let the next one start before its end.
type Trace struct {
	reads, writes words
	lets          bool
	behind        *Trace // of the launch before it, if all blocks let the next one start before they had waited for that
}

// words are some words of 4 bytes of memory.
type words struct {
	sets   map[uint64]*wordSet // by address
	last   *wordSet            // of these, and its address
	lastAt uint64
}

// wordSet has a bit for each of so many words.
type wordSet [setWords / 64]uint64

const setWords = 4096

func (w *words) has(address uint64, n int) bool {
	for word := address / 4; word*4 < address+uint64(n); word++ {
		if s := w.sets[word/setWords]; s != nil && s[word%setWords/64]>>(word%64)&1 != 0 {
			return true
		}
	}
	return false
}

func (w *words) add(address uint64, n int) {
	for word, end := address/4, (address+uint64(n)+3)/4; word < end; {
		if at := word / setWords; w.last == nil || w.lastAt != at {
			if w.sets == nil {
				w.sets = map[uint64]*wordSet{}
			}
			if w.sets[at] == nil {
				w.sets[at] = new(wordSet)
			}
			w.last, w.lastAt = w.sets[at], at
		}
		some := min(end-word, 64-word%64) // in one number
		w.last[word%setWords/64] |= ^uint64(0) >> (64 - some) << (word % 64)
		word += some
	}
}

// overlapping is the trace of the launch before this one, if that may still be running.
func (l *Launch) overlapping() *Trace {
	if l.Before != nil && l.Before.lets {
		return l.Before
	}
	return nil
}

// touch checks an access to global memory, and keeps it.
func (b *block) touch(address uint64, n int, writes bool) {
	if before := b.m.overlapping(); before != nil && !b.waited {
		for ; before != nil; before = before.behind {
			switch {
			case before.writes.has(address, n) && !writes:
				panic(fault{fmt.Sprintf("%d bytes at %#x, which a launch before writes, are read before griddepcontrol.wait", n, address)})
			case writes && (before.writes.has(address, n) || before.reads.has(address, n)):
				panic(fault{fmt.Sprintf("%d bytes at %#x, which a launch before reads or writes, are written before griddepcontrol.wait", n, address)})
			}
		}
	}
	switch t := b.m.Trace; {
	case t == nil:
	case writes:
		t.writes.add(address, n)
	default:
		t.reads.add(address, n)
	}
}

// let has the launch let the next one start, as far as the block is concerned: none starts before
// all blocks have, or have ended.
func (b *block) let() {
	if b.lets {
		return
	}
	b.lets = true
	b.m.behindWait = b.m.behindWait || b.waited
}

// ends completes the trace.
func (m *machine) ends() {
	// If all blocks let the next one start before, more than two launches may run at once.
	if t := m.Trace; t != nil && !m.behindWait {
		t.behind = m.overlapping()
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
			}
			w.let()
		}
	}
	return nil
}
