package ptx

import "fmt"

// Trace records the effects of a launch that matter to an overlapping launch: the memory that it has read and
// written, and whether it has allowed the next launch to start before its end.
type Trace struct {
	reads, writes words
	lets          bool
	behind        *Trace // trace of the previous launch, if all blocks allowed the next launch to start before they had waited for the previous launch
}

// words is a set of 4-byte words of memory.
type words struct {
	sets   map[uint64]*wordSet // keyed by address
	last   *wordSet            // the set used last, and its address
	lastAt uint64
}

// wordSet has one bit per word.
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
		some := min(end-word, 64-word%64) // bits in one uint64
		w.last[word%setWords/64] |= ^uint64(0) >> (64 - some) << (word % 64)
		word += some
	}
}

// overlapping returns the trace of the previous launch if that launch may still be running, and otherwise
// nil.
func (l *Launch) overlapping() *Trace {
	if l.Before != nil && l.Before.lets {
		return l.Before
	}
	return nil
}

// touch checks an access to global memory and records it.
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

// let records that the block allows the next launch to start. The next launch starts when all blocks have
// allowed it or have ended.
func (b *block) let() {
	if b.lets {
		return
	}
	b.lets = true
	b.m.behindWait = b.m.behindWait || b.waited
}

// ends completes the trace.
func (m *machine) ends() {
	// If all blocks allow the next launch to start before they wait, more than two launches may run at the
	// same time.
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
