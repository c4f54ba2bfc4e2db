package ptx

import (
	"math/bits"
	"strings"
)

// instruction compiles a statement.
func (c *compiler) instruction(s *statement) {
	in := instruction{guard: -1, mask: -1}
	if s.guard != "" {
		in.guard, in.negated = c.predicate(&operand{word: s.guard}), s.negated
	}
	switch s.op[0] {
	case "bra":
		c.need(1)
		t := c.find(s.args[0].word)
		if t == nil || t.label == 0 {
			c.fail("there is no such label")
		}
		in.kind, in.target = branch, t.label-1
	case "ret", "exit":
		in.kind = ret
	case "call":
		c.call(s, &in)
	case "barrier", "bar":
		if s.op[1] == "warp" {
			in.kind, in.mask = together, c.src32(&s.args[0])
			in.do = func(w *warp, m uint32) {}
			break
		}
		b, ok := c.barriers(s)
		if !ok {
			c.fail("no such instruction here")
		}
		in.kind, in.wait = b.kind, b.wait
	case "shfl", "vote", "redux", "match", "elect":
		in.kind = together
		in.do, in.mask = c.exchange(s)
	case "ldmatrix", "mma", "wgmma":
		in.kind = together
		in.do = c.product(s)
	case "ld", "st":
		switch {
		case s.has("async"):
			in.do = c.storeAsync(s)
		default:
			in.do = c.loadStore(s)
		}
	case "atom", "red":
		in.do = c.atomic(s)
	case "cp":
		if s.op[1] == "async" && len(s.op) > 2 && s.op[2] == "bulk" {
			in.do = c.bulk(s)
		} else {
			in.do = c.async(s)
		}
	case "mbarrier":
		in.do = c.mbarriers(s)
	case "fence", "membar", "griddepcontrol", "prefetch", "setmaxnreg", "nanosleep": // every write is seen at once, and launches do not overlap
		in.do = func(w *warp, m uint32) {}
	case "createpolicy":
		d := c.dst(&s.args[0], 64)
		in.do = func(w *warp, m uint32) { w.r64[d] = [lanes]uint64{} }
	case "trap":
		in.do = func(w *warp, m uint32) { w.fail("a trap") }
	default:
		in.do = c.arithmetic(s)
	}
	if in.do == nil && (in.kind == plain || in.kind == together) {
		c.fail("no such instruction here")
	}
	if in.kind == ret && in.guard >= 0 && c.f.entry != (c.f.name == c.name) {
		c.fail("a return of some")
	}
	c.emit(in)
}

// call compiles a call: arguments move between the callers' and the function's places.
func (c *compiler) call(s *statement, in *instruction) {
	args := s.args
	var results, given []operand
	if len(args[0].list) > 0 {
		results, args = args[0].list, args[1:]
	}
	f := c.m.functions[args[0].word]
	if f == nil {
		c.fail("there is no function %s", args[0].word)
	}
	if len(args) > 1 {
		given = args[1].list
	}
	g := c.function(f)
	if len(given) != len(g.params) || len(results) > len(g.results) {
		c.fail("%d parameters and %d results", len(given), len(results))
	}
	type move struct{ to, from, n int }
	var moves []move
	for i := range given {
		v := c.symbol(&given[i])
		moves = append(moves, move{g.params[i].at, v.at, min(v.v.bytes, g.params[i].v.bytes)})
	}
	in.kind, in.target = call, g.label
	in.do = func(w *warp, m uint32) {
		for l := range lanes {
			if m>>l&1 != 0 {
				frame := w.frame[l*w.m.frame:]
				for _, v := range moves {
					copy(frame[v.to:v.to+v.n], frame[v.from:])
				}
			}
		}
	}
	if len(results) == 0 {
		return
	}
	// What comes back moves when the threads are here again.
	c.emit(*in)
	var back []move
	for i := range results {
		v := c.symbol(&results[i])
		back = append(back, move{v.at, g.results[i].at, min(v.v.bytes, g.results[i].v.bytes)})
	}
	*in = instruction{guard: -1, mask: -1, do: func(w *warp, m uint32) {
		for l := range lanes {
			if m>>l&1 != 0 {
				frame := w.frame[l*w.m.frame:]
				for _, v := range back {
					copy(frame[v.to:v.to+v.n], frame[v.from:])
				}
			}
		}
	}}
}

// exchange compiles what threads of a warp tell each other.
func (c *compiler) exchange(s *statement) (do func(w *warp, m uint32), mask register) {
	args := s.args
	mask = c.src32(&args[len(args)-1])
	// Who takes part must be named by all who do.
	part := func(w *warp, m uint32) uint32 {
		members := w.d(mask)[bits.TrailingZeros32(m)]
		if m&^members != 0 {
			w.fail("threads %08x are not among %08x", m&^members, members)
		}
		return members
	}
	switch name := strings.Join(s.op, "."); {
	case s.op[0] == "shfl" && s.kind() == "b32":
		d, p := c.dst(&args[0], 32), register(-1)
		if args[0].pipe != "" {
			p = c.predicate(&operand{word: args[0].pipe})
		}
		a, b, clamp := c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3])
		mode := s.op[2]
		return func(w *warp, m uint32) {
			part(w, m)
			a := *w.d(a)
			for l := range lanes {
				if m>>l&1 == 0 {
					continue
				}
				b, cl := int(w.d(b)[l]&31), int(w.d(clamp)[l])
				segment := cl >> 8 & 31
				last := l&segment | cl&31&^segment
				from, ok := l, false
				switch mode {
				case "up":
					from = l - b
					ok = from >= last
				case "down":
					from = l + b
					ok = from <= last
				case "bfly":
					from = l ^ b
					ok = from <= last
				case "idx":
					from = l&segment | b&^segment
					ok = from <= last
				default:
					w.fail("no such mode")
				}
				if !ok {
					from = l
				}
				if m>>from&1 == 0 {
					w.fail("thread %d asks thread %d, which does not take part", l, from)
				}
				w.d(d)[l] = a[from]
				if p >= 0 {
					w.p[p] &^= 1 << l
					if ok {
						w.p[p] |= 1 << l
					}
				}
			}
		}, mask
	case name == "vote.sync.any.pred", name == "vote.sync.all.pred", name == "vote.sync.ballot.b32":
		negated := strings.HasPrefix(args[1].word, "!")
		a := c.predicate(&operand{word: strings.TrimPrefix(args[1].word, "!")})
		d := register(0)
		if s.op[2] == "ballot" {
			d = c.dst(&args[0], 32)
		} else {
			d = c.predicate(&args[0])
		}
		return func(w *warp, m uint32) {
			part(w, m)
			x := w.p[a]
			if negated {
				x = ^x
			}
			x &= m
			switch s.op[2] {
			case "any":
				w.p[d] &^= m
				if x != 0 {
					w.p[d] |= m
				}
			case "all":
				w.p[d] &^= m
				if x == m {
					w.p[d] |= m
				}
			default:
				for l := range lanes {
					if m>>l&1 != 0 {
						w.d(d)[l] = x
					}
				}
			}
		}, mask
	case s.op[0] == "redux":
		d, a := c.dst(&args[0], 32), c.src32(&args[1])
		f := binary32[s.op[2]+"."+s.kind()]
		if f == nil {
			f = binary32[s.op[2]]
		}
		if s.op[2] == "add" {
			f = func(a, b uint32) uint32 { return a + b }
		}
		if f == nil {
			return nil, mask
		}
		return func(w *warp, m uint32) {
			part(w, m)
			first := bits.TrailingZeros32(m)
			x := w.d(a)[first]
			for l := first + 1; l < lanes; l++ {
				if m>>l&1 != 0 {
					x = f(x, w.d(a)[l])
				}
			}
			for l := range lanes {
				if m>>l&1 != 0 {
					w.d(d)[l] = x
				}
			}
		}, mask
	}
	return nil, mask
}
