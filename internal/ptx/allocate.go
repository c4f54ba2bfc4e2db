package ptx

import (
	"cmp"
	"math/bits"
	"slices"
)

// PTX has a register for every value: tens of thousands in a large kernel, which is megabytes per warp.
// Registers whose lifetimes do not overlap share a slot, as in the hardware's assembler. A warp's registers
// then fit into the CPU's caches.

// usage lists the registers of an instruction, numbered as in [compiler.spans]. reads are read, or may keep
// their value. sets are set in all threads that execute the instruction. keeps may be read again later.
type usage struct{ reads, sets, keeps []int }

// setters are the non-arithmetic instructions whose first operand is the result.
var setters = map[string]bool{"ld": true, "atom": true, "ldmatrix": true, "movmatrix": true, "mma": true, "shfl": true, "vote": true, "redux": true, "elect": true, "createpolicy": true}

// use returns the registers of the statement that is being compiled.
func (c *compiler) use() (u usage) {
	s := c.s
	if s == nil {
		return u
	}
	for i := range s.args {
		to := &u.reads
		switch {
		case i == 0 && s.guard == "" && !s.args[0].memory && (setters[s.op[0]] || operands[s.op[0]] > 0):
			to = &u.sets
		case i == 1 && s.op[0] == "wgmma" && len(s.args[1].list) > 0: // compared when the product is waited for
			to = &u.keeps
		}
		c.named(&s.args[i], to)
	}
	return u
}

// named appends the registers that an operand names.
func (c *compiler) named(o *operand, to *[]int) {
	switch s := c.find(o.word); {
	case s == nil || s.v != nil:
	case s.width == 32:
		*to = append(*to, 2*int(s.reg))
	case s.width == 64:
		*to = append(*to, 2*int(s.reg)+1)
	}
	for i := range o.list {
		c.named(&o.list[i], to)
	}
}

// span is the range of instructions in which a register is live.
type span struct{ first, last int }

func (s *span) cover(i int) { s.first, s.last = min(s.first, i), max(s.last, i) }

// places assigns each 32-bit and 64-bit register its slot, and returns the number of slots of each kind.
func (c *compiler) places() (of [2][]register, n [2]int) {
	spans := c.spans()
	for kind, count := range []int{c.n32, c.n64} {
		of[kind] = make([]register, count)
		order := make([]int, count)
		for i := range order {
			order[i] = i
		}
		at := func(i int) *span { return &spans[2*i+kind] }
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(at(a).first, at(b).first) })
		var free []register
		ends := map[int][]register{} // slots by the last instruction that needs the slot
		done := 0                    // slots of earlier instructions are free again
		for _, i := range order {
			s := at(i)
			if s.first > s.last {
				continue // unused
			}
			for ; done < s.first; done++ { // excludes the instruction itself, which may set a register before it has read all of its operands
				free = append(free, ends[done]...)
			}
			if len(free) == 0 {
				free = append(free, register(n[kind]))
				n[kind]++
			}
			r := free[len(free)-1]
			free = free[:len(free)-1]
			of[kind][i] = r
			ends[s.last] = append(ends[s.last], r)
		}
		n[kind] = max(n[kind], 1)
	}
	return of, n
}

// stretch is a basic block: instructions without a jump into or out of the middle.
type stretch struct {
	first, end int
	next       []int    // successors
	in, sets   []uint64 // in: registers that are live at the start; sets: registers that the block sets
}

// spans returns the live range of each register: index 2i for 32-bit register i, index 2i+1 for 64-bit
// register i.
func (c *compiler) spans() []span {
	total := 2 * max(c.n32, c.n64)
	spans := make([]span, total)
	for i := range spans {
		spans[i] = span{len(c.code), -1}
	}
	for i, u := range c.usage {
		for _, list := range [][]int{u.reads, u.sets, u.keeps} {
			for _, r := range list {
				spans[r].cover(i)
			}
		}
	}
	stretches, of := c.stretches()
	// A register that is used in one block only, and set there first, is live nowhere else.
	number := make([]int, total)
	var across []int // registers that are live across blocks
	set := make([]bool, total)
	for _, u := range c.usage {
		for _, r := range append(slices.Clone(u.reads), u.keeps...) {
			if number[r] == 0 && (!set[r] || of[spans[r].first] != of[spans[r].last]) {
				across = append(across, r)
				number[r] = len(across)
			}
		}
		for _, r := range u.sets {
			set[r] = true
		}
	}
	words := (len(across) + 63) / 64
	for i := range stretches {
		s := &stretches[i]
		s.in, s.sets = make([]uint64, words), make([]uint64, words)
		for _, u := range c.usage[s.first:s.end] {
			for _, r := range append(slices.Clone(u.reads), u.keeps...) {
				if n := number[r] - 1; n >= 0 && s.sets[n/64]>>(n%64)&1 == 0 {
					s.in[n/64] |= 1 << (n % 64)
				}
			}
			for _, r := range u.sets {
				if n := number[r] - 1; n >= 0 {
					s.sets[n/64] |= 1 << (n % 64)
				}
			}
		}
	}
	out := make([]uint64, words)
	for changed := true; changed; {
		changed = false
		for i := len(stretches) - 1; i >= 0; i-- {
			s := &stretches[i]
			s.after(stretches, out)
			for j, x := range out {
				if more := x &^ s.sets[j] &^ s.in[j]; more != 0 {
					s.in[j] |= more
					changed = true
				}
			}
		}
	}
	for i := range stretches {
		s := &stretches[i]
		each(s.in, func(n int) { spans[across[n]].cover(s.first) })
		s.after(stretches, out)
		each(out, func(n int) { spans[across[n]].cover(s.end - 1) })
	}
	for _, u := range c.usage {
		for _, r := range u.keeps {
			spans[r] = span{0, len(c.code)}
		}
	}
	return spans
}

// after sets out to the registers that are live at the start of a successor.
func (s *stretch) after(stretches []stretch, out []uint64) {
	clear(out)
	for _, n := range s.next {
		for j, x := range stretches[n].in {
			out[j] |= x
		}
	}
}

func each(set []uint64, f func(n int)) {
	for j, x := range set {
		for ; x != 0; x &= x - 1 {
			f(64*j + bits.TrailingZeros64(x))
		}
	}
}

// stretches returns the basic blocks in order, and the block of each instruction.
func (c *compiler) stretches() (all []stretch, of []int) {
	begins := make([]bool, len(c.code)+1)
	back := map[int][]int{} // return points of calls, keyed by the first instruction of the function
	for i := range c.code {
		switch in := &c.code[i]; in.kind {
		case branch, call:
			begins[c.labels[in.target]], begins[i+1] = true, true
			if in.kind == call {
				back[c.labels[in.target]] = append(back[c.labels[in.target]], i+1)
			}
		case ret:
			begins[i+1] = true
		}
	}
	of = make([]int, len(c.code))
	for i := range c.code {
		if i == 0 || begins[i] {
			all = append(all, stretch{first: i})
		}
		of[i] = len(all) - 1
		all[len(all)-1].end = i + 1
	}
	for i := range all {
		s := &all[i]
		in := &c.code[s.end-1]
		falls := in.guard >= 0
		switch in.kind {
		case branch, call:
			s.next = append(s.next, of[c.labels[in.target]])
		case ret:
			for _, j := range back[c.labels[c.ownerAt(s.end-1).label]] {
				s.next = append(s.next, of[j])
			}
		default:
			falls = true
		}
		if falls && s.end < len(c.code) {
			s.next = append(s.next, i+1)
		}
	}
	return all, of
}

// ownerAt returns the function that contains an instruction.
func (c *compiler) ownerAt(i int) *compiled {
	owner := c.order[0]
	for _, f := range c.order {
		if c.labels[f.label] <= i {
			owner = f
		}
	}
	return owner
}
