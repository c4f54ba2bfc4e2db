package ptx

import (
	"fmt"
	"math/bits"
	"sort"
	"unsafe"
)

func (r *Range) has(address uint64, n int) bool {
	return address >= r.Address && int64(n) <= r.Bytes && address-r.Address <= uint64(r.Bytes-int64(n))
}

// find returns the host memory of a global address.
func (m *machine) find(address uint64, n int) unsafe.Pointer {
	if !m.last[0].has(address, n) {
		if m.last[0], m.last[1] = m.last[1], m.last[0]; !m.last[0].has(address, n) {
			m.last[0] = m.rangeOf(address, n)
		}
	}
	return *(*unsafe.Pointer)(unsafe.Pointer(&address))
}

func (m *machine) rangeOf(address uint64, n int) Range {
	i := sort.Search(len(m.memory), func(i int) bool { return m.memory[i].Address > address }) - 1
	if i < 0 || !m.memory[i].has(address, n) {
		panic(fault{fmt.Sprintf("%d bytes at %#x are in no buffer", n, address)})
	}
	return m.memory[i]
}

// inShared returns memory of a block's shared memory.
func (b *block) inShared(address uint64, n int) unsafe.Pointer {
	at := address - sharedStart
	if address < sharedStart || n > len(b.shared) || at > uint64(len(b.shared)-n) {
		panic(fault{fmt.Sprintf("%d bytes at %#x of %d bytes of shared memory", n, at, len(b.shared))})
	}
	if b.exited == b.threads {
		panic(fault{fmt.Sprintf("shared memory of block %d, which has ended", b.index)})
	}
	return unsafe.Pointer(&b.shared[at])
}

// of returns the block that a cluster address belongs to, and the address in the block.
func (b *block) of(address uint64) (*block, uint64) {
	rank := int(address>>rankShift) - 1
	if rank < 0 {
		return b, address
	}
	if rank >= len(b.cluster.blocks) {
		panic(fault{fmt.Sprintf("block %d of a cluster of %d", rank, len(b.cluster.blocks))})
	}
	return b.cluster.blocks[rank], address & (1<<rankShift - 1)
}

// at returns n consecutive bytes of memory at an address. n is a power of two.
func (w *warp) at(where space, address uint64, lane, n int) unsafe.Pointer {
	if address&uint64(n-1) != 0 {
		panic(fault{fmt.Sprintf("%d bytes at %#x", n, address)})
	}
	switch where {
	case sharedSpace:
		return w.inShared(address, n)
	case genericSpace:
		switch {
		case address>>56 == 0:
			return w.at(globalSpace, address, lane, n)
		case address>>56 == sharedIn>>56:
			return w.inShared(address&windowMask, n)
		case address>>56 == paramsIn>>56:
			return w.at(paramSpace, address&windowMask, lane, n)
		}
		panic(fault{fmt.Sprintf("%#x is in no space", address)})
	case globalSpace:
		p := w.m.find(address, n)
		w.touch(address, n, w.in.writes)
		return p
	case clusterSpace:
		b, at := w.of(address)
		return b.inShared(at, n)
	case paramSpace:
		if n > len(w.m.Params) || address > uint64(len(w.m.Params)-n) {
			panic(fault{fmt.Sprintf("%d bytes at %#x of %d bytes of parameters", n, address, len(w.m.Params))})
		}
		return unsafe.Pointer(&w.m.Params[address])
	}
	if n > w.m.frame || address > uint64(w.m.frame-n) {
		panic(fault{fmt.Sprintf("%d bytes at %#x of %d bytes of parameters", n, address, w.m.frame)})
	}
	return unsafe.Pointer(&w.frame[lane*w.m.frame+int(address)])
}

// spaceOf returns the memory space in the instruction's name: .global, .shared or .shared::cluster.
func (s *statement) spaceOf() space {
	for _, p := range s.op {
		switch p {
		case "global":
			return globalSpace
		case "shared", "shared::cta":
			return sharedSpace
		case "shared::cluster":
			return clusterSpace
		case "param":
			return paramSpace
		}
	}
	return genericSpace
}

// load and store move one element of n bytes.
func load(p unsafe.Pointer, n int) uint64 {
	switch n {
	case 1:
		return uint64(*(*uint8)(p))
	case 2:
		return uint64(*(*uint16)(p))
	case 4:
		return uint64(*(*uint32)(p))
	}
	return *(*uint64)(p)
}

func store(p unsafe.Pointer, n int, x uint64) {
	switch n {
	case 1:
		*(*uint8)(p) = uint8(x)
	case 2:
		*(*uint16)(p) = uint16(x)
	case 4:
		*(*uint32)(p) = uint32(x)
	default:
		*(*uint64)(p) = x
	}
}

// parts returns the registers of an operand, {a, b} or a.
func parts(o *operand) []operand {
	if len(o.list) > 0 {
		return o.list
	}
	return []operand{*o}
}

// elements returns the number of elements in the instruction's name.
func (s *statement) elements() int {
	switch {
	case s.has("v2"):
		return 2
	case s.has("v4"):
		return 4
	}
	return 1
}

// loadStore compiles ld and st.
func (c *compiler) loadStore(s *statement) func(w *warp, m uint32) {
	c.need(2)
	size, ok := sizes[s.kind()]
	if !ok {
		c.fail("elements of type %s", s.kind())
	}
	loads := s.op[0] == "ld"
	value, where := &s.args[0], &s.args[1]
	if !loads {
		value, where = where, value
	}
	a := c.address(where, s.spaceOf())
	all := parts(value)
	n := len(all)
	if n != s.elements() {
		c.fail("%d elements", n)
	}
	if !loads && a.space == paramSpace {
		c.fail("the kernel's parameters are read only")
	}
	signed := s.kind()[0] == 's'
	order := s.strength()
	again := s.has("relaxed") || s.has("volatile") || s.has("acquire") // the thread may be polling
	// A register may be wider than the element.
	wide := size == 8
	if o := &all[0]; o.word != "_" && !wide {
		v := c.find(o.word)
		wide = v != nil && v.width == 64
	}
	regs := make([]register, n)
	for i := range all {
		switch {
		case loads && all[i].word == "_":
			regs[i] = -1
		case loads && wide:
			regs[i] = c.dst(&all[i], 64)
		case loads:
			regs[i] = c.dst(&all[i], 32)
		case wide:
			regs[i] = c.src64(&all[i])
		default:
			regs[i] = c.src32(&all[i])
		}
	}
	extend := func(x uint64) uint64 { return x }
	if signed && size < 8 {
		extend = func(x uint64) uint64 { return uint64(int64(x<<(64-8*size)) >> (64 - 8*size)) }
	}
	if loads {
		word := size == 4 && !wide // the most common case
		return func(w *warp, m uint32) {
			for rest := m; rest != 0; rest &= rest - 1 {
				l := bits.TrailingZeros32(rest)
				at := a.at(w, l)
				p := w.at(a.space, at, l, size*n)
				if w.m.peer(a.space, at) {
					w.ordered(order)
					w.m.arriveAt(at, size*n)
				}
				if word {
					for i, r := range regs {
						if r >= 0 {
							w.r32[r][l] = *(*uint32)(unsafe.Add(p, 4*i))
						}
					}
					continue
				}
				for i, r := range regs {
					switch x := extend(load(unsafe.Add(p, i*size), size)); {
					case r < 0:
					case wide:
						w.r64[r][l] = x
					default:
						w.r32[r][l] = uint32(x)
					}
				}
			}
			w.yield = w.yield || again
		}
	}
	return func(w *warp, m uint32) {
		w.publish(order)
		for rest := m; rest != 0; rest &= rest - 1 {
			l := bits.TrailingZeros32(rest)
			at := a.at(w, l)
			if a.space == genericSpace && at>>56 == paramsIn>>56 {
				w.fail("the kernel's parameters are read only")
			}
			p := w.at(a.space, at, l, size*n)
			if w.m.peer(a.space, at) {
				w.ordered(order)
				for i, r := range regs {
					x := uint64(0)
					if wide {
						x = w.q(r)[l]
					} else {
						x = uint64(w.d(r)[l])
					}
					w.send(at+uint64(i*size), size, x)
				}
				continue
			}
			for i, r := range regs {
				if wide {
					store(unsafe.Add(p, i*size), size, w.q(r)[l])
				} else {
					store(unsafe.Add(p, i*size), size, uint64(w.d(r)[l]))
				}
			}
		}
		w.m.events++
	}
}

// atomic compiles atom and red: for 32 bits, and for 64 bits the operations that the kernels use.
func (c *compiler) atomic(s *statement) func(w *warp, m uint32) {
	switch s.kind() {
	case "u32", "s32", "b32":
		return atomicOf(c, s, 32, c.src32, (*warp).d)
	case "u64", "b64":
		return atomicOf(c, s, 64, c.src64, (*warp).q)
	}
	return nil
}

// atomicOf compiles an atomic operation on words of the given width. in returns a register of the warp.
func atomicOf[T uint32 | uint64](c *compiler, s *statement, width int, source func(*operand) register, in func(*warp, register) *[lanes]T) func(w *warp, m uint32) {
	args := s.args
	d := register(-1)
	if s.op[0] == "atom" {
		c.need(3)
		d = c.dst(&args[0], width)
		args = args[1:]
	} else {
		c.need(2)
	}
	a, b := c.address(&args[0], s.spaceOf()), source(&args[1])
	signed := s.kind() == "s32"
	order := s.strength()
	order.strong = true
	var f func(old, b T) T
	switch {
	case s.has("add"):
		f = func(old, b T) T { return old + b }
	case s.has("exch"):
		f = func(old, b T) T { return b }
	case s.has("inc") && width == 32:
		f = func(old, b T) T {
			if old >= b {
				return 0
			}
			return old + 1
		}
	case s.has("max") && !signed:
		f = func(old, b T) T { return max(old, b) }
	case s.has("min") && !signed:
		f = func(old, b T) T { return min(old, b) }
	}
	if f == nil {
		return nil
	}
	return func(w *warp, m uint32) {
		w.publish(order)
		for l := range lanes {
			if m>>l&1 == 0 {
				continue
			}
			at := a.at(w, l)
			p := (*T)(w.at(a.space, at, l, width/8))
			if w.m.peer(a.space, at) {
				w.ordered(order)
				w.m.arriveAt(at, width/8)
			}
			old := *p
			*p = f(old, in(w, b)[l])
			if d >= 0 {
				in(w, d)[l] = old
			}
		}
		w.m.events++
		w.yield = true
	}
}
