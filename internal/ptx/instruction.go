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
	in.writes = s.op[0] == "st" || s.op[0] == "atom" || s.op[0] == "red"
	switch s.op[0] {
	case "bra":
		c.need(1)
		t := c.find(s.args[0].word)
		if t == nil || t.label == 0 {
			c.fail("there is no such label")
		}
		in.kind, in.target = branch, t.label-1
	case "ret", "exit":
		c.need(0)
		in.kind = ret
		if s.op[0] == "exit" {
			in.do = func(w *warp, m uint32) { // pending calls are dropped
				for l := range lanes {
					if m>>l&1 != 0 {
						w.depth[l] = 0
					}
				}
			}
		}
	case "call":
		c.call(s, &in)
	case "barrier", "bar":
		if s.part(1) == "warp" {
			c.need(1)
			mask := c.src32(&s.args[0])
			in.kind, in.mask = together, mask
			in.do = func(w *warp, m uint32) { w.members(mask, m) }
			break
		}
		b, ok := c.barriers(s)
		if !ok {
			c.fail("no such instruction here")
		}
		in.kind, in.wait = b.kind, b.wait
	case "shfl", "vote", "redux", "elect":
		in.kind = together
		in.do, in.mask = c.exchange(s)
	case "ldmatrix", "movmatrix", "mma", "wgmma":
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
		switch {
		case s.part(1) == "reduce":
			in.do = c.bulkStore(s)
		case s.part(1) != "async":
		case s.part(2) == "bulk":
			in.do = c.bulk(s)
		default:
			in.do = c.async(s)
		}
	case "mbarrier":
		in.do = c.mbarriers(s)
	case "fence", "membar":
		in.do = c.fence(s)
	case "setmaxnreg":
		n := c.constantArgument(0)
		in.do = func(w *warp, m uint32) { w.ask(n) }
	case "prefetch", "nanosleep":
		in.do = func(w *warp, m uint32) {}
	case "griddepcontrol":
		in.do = c.dependency(s)
	case "createpolicy":
		c.least(1)
		d := c.dst(&s.args[0], 64)
		in.do = func(w *warp, m uint32) {
			for l := range lanes {
				if m>>l&1 != 0 {
					w.r64[d][l] = 0
				}
			}
		}
	case "trap":
		in.do = func(w *warp, m uint32) { w.fail("a trap") }
	default:
		in.do = c.arithmetic(s)
	}
	if in.do == nil && (in.kind == plain || in.kind == together) {
		c.fail("no such instruction here")
	}
	c.emit(in)
}

// call compiles a call. Arguments and results are copied between the frames of the caller and of the
// function.
func (c *compiler) call(s *statement, in *instruction) {
	c.least(1)
	args := s.args
	var results, given []operand
	if len(args) > 1 && len(args[0].list) > 0 {
		results, args = args[0].list, args[1:]
	}
	f := c.m.functions[args[0].word]
	if f == nil || f.entry {
		c.fail("there is no function %s", args[0].word)
	}
	if len(args) > 1 {
		given = args[1].list
	}
	g := c.function(f)
	c.f.calls = append(c.f.calls, g)
	if len(given) != len(g.params) || len(results) > len(g.results) {
		c.fail("%d parameters and %d results", len(given), len(results))
	}
	var moves []frameMove
	param := func(o *operand) *symbol {
		v := c.symbol(o)
		if v.space != frameSpace {
			c.fail("%s is no parameter", o.word)
		}
		return v
	}
	for i := range given {
		v := param(&given[i])
		moves = append(moves, frameMove{g.params[i].at, v.at, min(v.v.bytes, g.params[i].v.bytes)})
	}
	in.kind, in.target = call, g.label
	in.do = moveInFrames(moves)
	if len(results) == 0 {
		return
	}
	// The results are copied when the threads return to this instruction.
	c.emit(*in)
	var back []frameMove
	for i := range results {
		v := param(&results[i])
		back = append(back, frameMove{v.at, g.results[i].at, min(v.v.bytes, g.results[i].v.bytes)})
	}
	*in = instruction{guard: -1, mask: -1, do: moveInFrames(back)}
}

// frameMove is a copy of n bytes within a thread's frame.
type frameMove struct{ to, from, n int }

func moveInFrames(moves []frameMove) func(w *warp, m uint32) {
	return func(w *warp, m uint32) {
		for l := range lanes {
			if m>>l&1 != 0 {
				frame := w.frame[l*w.m.frame:]
				for _, v := range moves {
					copy(frame[v.to:v.to+v.n], frame[v.from:])
				}
			}
		}
	}
}

// exchange compiles the exchange of values between threads of a warp.
func (c *compiler) exchange(s *statement) (do func(w *warp, m uint32), mask register) {
	args := s.args
	n := map[string]int{"shfl": 5, "vote": 3, "redux": 3, "elect": 2}[s.op[0]]
	if n == 0 || s.part(1) != "sync" {
		return nil, -1
	}
	c.need(n)
	mask = c.src32(&args[n-1])
	switch name := strings.Join(s.op, "."); {
	case name == "shfl.sync.up.b32", name == "shfl.sync.down.b32", name == "shfl.sync.bfly.b32", name == "shfl.sync.idx.b32":
		d, p := c.dst(&args[0], 32), register(-1)
		if args[0].pipe != "" {
			p = c.predicate(&operand{word: args[0].pipe})
		}
		a, b, clamp := c.src32(&args[1]), c.src32(&args[2]), c.src32(&args[3])
		mode := s.op[2][0]
		return func(w *warp, m uint32) {
			w.members(mask, m)
			a, d, each, clamps := *w.d(a), w.d(d), w.d(b), w.d(clamp)
			for rest := m; rest != 0; rest &= rest - 1 {
				l := bits.TrailingZeros32(rest) & (lanes - 1)
				b, cl := int(each[l]&31), int(clamps[l])
				segment := cl >> 8 & 31
				last := l&segment | cl&31&^segment
				from, ok := l, false
				switch mode {
				case 'u': // up
					from = l - b
					ok = from >= last
				case 'd': // down
					from = l + b
					ok = from <= last
				case 'b': // bfly
					from = l ^ b
					ok = from <= last
				case 'i': // idx
					from = l&segment | b&^segment
					ok = from <= last
				}
				if !ok {
					from = l
				}
				if m>>from&1 == 0 {
					w.fail("thread %d asks thread %d, which does not take part", l, from)
				}
				d[l] = a[from]
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
			w.members(mask, m)
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
	case name == "elect.sync":
		d, p := register(-1), c.predicate(&operand{word: args[0].pipe})
		if args[0].word != "_" {
			d = c.dst(&args[0], 32)
		}
		return func(w *warp, m uint32) {
			w.members(mask, m)
			// PTX does not say which thread is elected, only that the choice is the same for equal masks. A
			// GPU elects the first thread. The last thread is elected here, to reveal dependence on the
			// choice.
			leader := lanes - 1 - bits.LeadingZeros32(m)
			w.p[p] = w.p[p]&^m | 1<<leader
			for l := range lanes {
				if d >= 0 && m>>l&1 != 0 {
					w.d(d)[l] = uint32(leader)
				}
			}
		}, mask
	case s.op[0] == "redux":
		d, a := c.dst(&args[0], 32), c.src32(&args[1])
		var f func(a, b uint32) uint32
		switch strings.TrimPrefix(name, "redux.sync.") {
		case "and.b32", "or.b32", "xor.b32":
			f = binary32[s.op[2]]
		case "min.s32", "min.u32", "max.s32", "max.u32":
			f = binary32[s.op[2]+"."+s.kind()]
		case "add.s32", "add.u32":
			f = func(a, b uint32) uint32 { return a + b }
		default:
			return nil, mask
		}
		return func(w *warp, m uint32) {
			w.members(mask, m)
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
