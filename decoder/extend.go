package decoder

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// extendAll continues the texts whose tokens have all been read. Several goroutines choose the next tokens. The caller's goroutine chooses
// those of texts with a Constraint, since a Constraint is the user's code.
func (s *scheduler) extendAll(todo []work, r *results) {
	all, early := s.choices[:0], 0
	for i, w := range todo {
		if t := w.text; t.seq.Len() == len(t.tokens) {
			c := choice{text: t, row: i, early: t.sampler.bounds == nil && !r.has(t)}
			if all = append(all, c); c.early {
				early++
			}
		}
	}
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < len(all); i = int(next.Add(1)) - 1 {
			if c := &all[i]; c.early {
				c.token, c.err = c.text.sampler.next(s.logits(r, c.row))
			}
		}
	}
	var wait sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), early) - 1 {
		wait.Go(work)
	}
	work()
	wait.Wait()
	for _, c := range all {
		if c.early {
			c.text.add(c.token, c.err)
			c.text.publish()
		} else {
			s.extend(c.text, r, c.row)
		}
	}
	clear(all)
	s.choices = all
}

// choice is the next token of a text.
type choice struct {
	text  *Text
	row   int  // of the results
	early bool // another goroutine may choose the token: token and err are set before the text is continued
	token Token
	err   error
}

// has reports whether a GPU chose the next token of a text.
func (r *results) has(t *Text) bool {
	return r.chosen != nil && (t.sampler.plain() || r.drawn && t.sampler.choice != nil)
}

// logits returns a row of the results.
func (s *scheduler) logits(r *results, row int) []float32 {
	return r.logits[row*s.vocab : (row+1)*s.vocab]
}

// extend continues a text by a row of the results.
func (s *scheduler) extend(t *Text, r *results, row int) {
	if r.has(t) {
		t.take(r.chosen[row])
		return
	}
	t.extend(s.logits(r, row))
}
