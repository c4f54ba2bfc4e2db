package ptx

import (
	"math/bits"
	"slices"
	"strings"
	"unsafe"
)

// asyncCopies holds a thread's cp.async copies. open has no group yet.
type asyncCopies struct {
	open   []asyncCopy
	groups [][]asyncCopy
}

type asyncCopy struct {
	to, from uint64
	n, live  int // n is 0 after the copy is done
}

func (a *asyncCopies) any() bool {
	return len(a.open) > 0 || slices.ContainsFunc(a.groups, func(g []asyncCopy) bool { return len(g) > 0 })
}

// wait completes all groups except the last n.
func (a *asyncCopies) wait(w *warp, lane, n int) {
	for len(a.groups) > n {
		for _, c := range a.groups[0] {
			if c.n > 0 {
				c.do(w, lane)
			}
		}
		a.groups = a.groups[1:]
	}
}

func (c *asyncCopy) do(w *warp, lane int) {
	to := w.at(sharedSpace, c.to, lane, c.n)
	clear(unsafe.Slice((*byte)(to), c.n))
	if c.live > 0 {
		copy(unsafe.Slice((*byte)(to), c.live), unsafe.Slice((*byte)(w.m.find(c.from, c.live)), c.live))
	}
}

// async compiles a thread's cp.async.
func (c *compiler) async(s *statement) func(w *warp, m uint32) {
	each := func(m uint32, f func(l int)) {
		for ; m != 0; m &= m - 1 {
			f(bits.TrailingZeros32(m))
		}
	}
	commit := func(w *warp, l int) {
		a := &w.copies[l]
		a.groups = append(a.groups, a.open)
		a.open = nil
	}
	switch kind := s.part(2); kind {
	case "commit_group":
		return func(w *warp, m uint32) {
			each(m, func(l int) { commit(w, l) })
		}
	case "wait_group", "wait_all":
		n, every := 0, kind == "wait_all"
		if !every {
			n = c.constantArgument(0)
		}
		return func(w *warp, m uint32) {
			each(m, func(l int) {
				if every {
					commit(w, l)
				}
				w.copies[l].wait(w, l, n)
			})
			w.m.events++
		}
	case "mbarrier": // an arrival when the thread's copies are complete
		if s.part(3) != "arrive" || s.part(4) != "noinc" || s.spaceOf() != sharedSpace {
			return nil
		}
		c.need(1)
		a := c.address(&s.args[0], sharedSpace)
		return func(w *warp, m uint32) {
			each(m, func(l int) {
				commit(w, l)
				w.copies[l].wait(w, l, 0)
				w.mbarrier(a.at(w, l)).arrive(w, 1)
			})
			w.m.events++
		}
	case "ca", "cg":
		n := c.constantArgument(2)
		to, from := c.address(&s.args[0], sharedSpace), c.address(&s.args[1], globalSpace)
		if n != 16 && (kind == "cg" || n != 4 && n != 8) || s.part(3) != "shared" && s.part(3) != "shared::cta" || s.part(4) != "global" {
			return nil
		}
		live := c.constant32(uint32(n))
		if len(s.args) > 3 {
			live = c.src32(&s.args[3])
		}
		return func(w *warp, m uint32) {
			each(m, func(l int) {
				p := asyncCopy{to.at(w, l), from.at(w, l), n, int(w.d(live)[l])}
				if p.from%uint64(n) != 0 || p.live > n {
					w.fail("%d bytes, %d of them from %#x", n, p.live, p.from)
				}
				w.at(sharedSpace, p.to, l, n)
				if p.live > 0 {
					w.m.find(p.from, p.live)
					w.touch(p.from, p.live, false)
				}
				if w.m.rng.IntN(2) == 0 { // immediately, or at the wait
					p.do(w, l)
					p.n = 0
				}
				w.copies[l].open = append(w.copies[l].open, p)
			})
			w.m.events++
		}
	}
	return nil
}

// destination returns the block and the offset that a copy writes to, and the offset of the barrier that the
// copy completes. Both must be in the same block.
func (w *warp) destination(to, bar uint64) (b *block, place, barrier uint64) {
	b, place = w.of(to)
	of, barrier := w.of(bar)
	if of.mbarrier(barrier); of != b {
		w.fail("a barrier of another block")
	}
	return b, place, barrier
}

// blocksOf returns the blocks of the cluster whose bits are set in a mask.
func (w *warp) blocksOf(ranks uint32) (all []*block) {
	if ranks == 0 || bits.Len32(ranks) > len(w.cluster.blocks) {
		w.fail("a copy to blocks %#b of a cluster of %d", ranks, len(w.cluster.blocks))
	}
	for ; ranks != 0; ranks &= ranks - 1 {
		all = append(all, w.cluster.blocks[bits.TrailingZeros32(ranks)])
	}
	return all
}

// bulk compiles the bulk copies, which complete at a barrier.
func (c *compiler) bulk(s *statement) func(w *warp, m uint32) {
	if s.part(3) == "prefetch" {
		return c.prefetchBulk(s)
	}
	if s.has("bulk_group") || s.part(3) == "commit_group" || s.part(3) == "wait_group" {
		return c.bulkStore(s)
	}
	several := s.has("multicast::cluster")
	if !s.has("mbarrier::complete_tx::bytes") || several && !s.has("tensor") {
		return nil
	}
	if s.has("tensor") {
		c.least(3)
		var ranks register
		if several {
			c.least(4)
			ranks = c.src32(&s.args[3])
		}
		to, box, bar := c.address(&s.args[0], clusterSpace), s.args[1], c.address(&s.args[2], clusterSpace)
		if !strings.HasPrefix(strings.Join(s.op, "."), "cp.async.bulk.tensor.3d.shared::cluster.global.") || len(box.list) != 1 || len(box.list[0].list) != 3 {
			return nil
		}
		coordinates := make([]register, 3)
		for i := range coordinates {
			coordinates[i] = c.src32(&box.list[0].list[i])
		}
		box.list = nil
		from := c.address(&box, genericSpace)
		return func(w *warp, m uint32) {
			for rest := m; rest != 0; rest &= rest - 1 {
				l := bits.TrailingZeros32(rest)
				t := readTensor(w, from.at(w, l), l)
				var at [3]int
				for i, r := range coordinates {
					at[i] = int(int32(w.d(r)[l]))
				}
				b, place, barrier := w.destination(to.at(w, l), bar.at(w, l))
				if place%128 != 0 {
					w.fail("a box at %#x", place)
				}
				t.touch(w.block, at)
				blocks := []*block{b}
				if several {
					blocks = w.blocksOf(w.d(ranks)[l] & (1<<16 - 1))
				}
				for _, b := range blocks {
					b.inShared(place, t.bytes())
					w.later(func() {
						t.copy(w.m, unsafe.Slice((*byte)(b.inShared(place, t.bytes())), t.bytes()), place, at)
						b.complete(barrier, t.bytes())
					})
				}
			}
			w.m.events++
		}
	}
	c.least(4)
	if s.part(3) != "shared::cluster" {
		return nil
	}
	to, n, bar := c.address(&s.args[0], clusterSpace), c.src32(&s.args[2]), c.address(&s.args[3], clusterSpace)
	fromSpace := globalSpace
	if s.has("shared::cta") {
		fromSpace = sharedSpace
	} else if !s.has("global") {
		return nil
	}
	from := c.address(&s.args[1], fromSpace)
	return func(w *warp, m uint32) {
		for l := range lanes {
			if m>>l&1 == 0 {
				continue
			}
			b, place, barrier := w.destination(to.at(w, l), bar.at(w, l))
			src, bytes := from.at(w, l), int(w.d(n)[l])
			if bytes%16 != 0 || place%16 != 0 || src%16 != 0 || bytes == 0 {
				w.fail("%d bytes from %#x to %#x", bytes, src, place)
			}
			if fromSpace == sharedSpace && b == w.block {
				w.fail("a copy within a block")
			}
			mine := w.block
			read := func() unsafe.Pointer {
				if fromSpace == sharedSpace {
					return mine.inShared(src, bytes)
				}
				return mine.m.find(src, bytes)
			}
			read()
			if fromSpace == globalSpace {
				w.touch(src, bytes, false)
			}
			b.inShared(place, bytes)
			w.later(func() {
				copy(unsafe.Slice((*byte)(b.inShared(place, bytes)), bytes), unsafe.Slice((*byte)(read()), bytes))
				b.complete(barrier, bytes)
			})
		}
		w.m.events++
	}
}

// prefetchBulk compiles a prefetch into the L2 cache. It only checks that the memory exists.
func (c *compiler) prefetchBulk(s *statement) func(w *warp, m uint32) {
	c.least(2)
	from, n := c.address(&s.args[0], globalSpace), c.src32(&s.args[1])
	if strings.Join(s.op, ".") != "cp.async.bulk.prefetch.L2.global" {
		return nil
	}
	return func(w *warp, m uint32) {
		for l := range lanes {
			if m>>l&1 == 0 {
				continue
			}
			src, bytes := from.at(w, l), int(w.d(n)[l])
			if bytes%16 != 0 || src%16 != 0 || bytes == 0 {
				w.fail("%d bytes from %#x", bytes, src)
			}
			w.m.find(src, bytes)
		}
	}
}

// storeAsync compiles st.async of floats to another block.
func (c *compiler) storeAsync(s *statement) func(w *warp, m uint32) {
	c.need(3)
	a, bar, values := c.address(&s.args[0], clusterSpace), c.address(&s.args[2], clusterSpace), parts(&s.args[1])
	if sizes[s.kind()] != 4 || len(values) != s.elements() || !s.has("shared::cluster") || !s.has("mbarrier::complete_tx::bytes") {
		return nil
	}
	var regs []register
	for i := range values {
		regs = append(regs, c.src32(&values[i]))
	}
	return func(w *warp, m uint32) {
		for l := range lanes {
			if m>>l&1 == 0 {
				continue
			}
			b, place, barrier := w.destination(a.at(w, l), bar.at(w, l))
			var x [4]uint32
			for i, r := range regs {
				x[i] = w.d(r)[l]
			}
			w.at(clusterSpace, a.at(w, l), l, 4*len(regs))
			w.later(func() {
				for i := range regs {
					store(b.inShared(place+uint64(4*i), 4), 4, uint64(x[i]))
				}
				b.complete(barrier, 4*len(regs))
			})
		}
		w.m.events++
	}
}

// tensor is the content of the fake driver's tensor map.
type tensor struct {
	address   uint64
	element   int // in bytes
	dims, box [3]int
	strides   [2]int
	swizzle   bool
}

// elementBytes is the element size of each type of a tensor map.
var elementBytes = [...]int{1, 2, 4, 4, 8, 8, 2, 4, 8, 2}

func readTensor(w *warp, address uint64, lane int) (t tensor) {
	if address%64 != 0 {
		w.fail("a tensor map at %#x", address)
	}
	var x [16]uint64
	*(*[8]uint64)(x[:8]) = *(*[8]uint64)(w.at(genericSpace, address, lane, 64))
	*(*[8]uint64)(x[8:]) = *(*[8]uint64)(w.at(genericSpace, address+64, lane, 64))
	t.address = x[0]
	if x[1] < uint64(len(elementBytes)) {
		t.element = elementBytes[x[1]]
	}
	for i := range 3 {
		if x[2+i]-1 >= 1<<32 || x[7+i]-1 >= 256 {
			w.fail("no tensor map: %d", x)
		}
		t.dims[i], t.box[i] = int(x[2+i]), int(x[7+i])
	}
	t.strides = [2]int{int(x[5]), int(x[6])}
	t.swizzle = x[11] == 3
	if t.element == 0 || x[10] != 0 || x[11] != 0 && x[11] != 3 || x[13] != 0 || t.box[0]*t.element%16 != 0 || t.swizzle && t.box[0]*t.element != 128 {
		w.fail("no tensor map: %d", x)
	}
	return t
}

func (t *tensor) bytes() int { return t.element * t.box[0] * t.box[1] * t.box[2] }

// line returns the part of a box's line that is inside the array: its address, its offset in the line, and
// its length n in bytes. n is 0 if the line is outside the array.
func (t *tensor) line(at [3]int, y, z int) (address uint64, skip, n int) {
	x0, x1 := max(at[0], 0), min(at[0]+t.box[0], t.dims[0])
	if y, z := at[1]+y, at[2]+z; y >= 0 && y < t.dims[1] && z >= 0 && z < t.dims[2] && x0 < x1 {
		return t.address + uint64(z*t.strides[1]+y*t.strides[0]+x0*t.element), (x0 - at[0]) * t.element, (x1 - x0) * t.element
	}
	return 0, 0, 0
}

// touch checks the accesses to all memory that a box is read from.
func (t *tensor) touch(b *block, at [3]int) {
	for z := range t.box[2] {
		for y := range t.box[1] {
			if address, _, n := t.line(at, y, z); n > 0 {
				b.touch(address, n, false)
			}
		}
	}
}

// copy copies a box to shared memory. Elements outside the array become 0.
func (t *tensor) copy(m *machine, to []byte, address uint64, at [3]int) {
	row := t.box[0] * t.element
	for z := range t.box[2] {
		for y := range t.box[1] {
			line := (z*t.box[1] + y) * row
			from0, skip, n := t.line(at, y, z)
			var from []byte
			if n > 0 {
				from = unsafe.Slice((*byte)(m.find(from0, n)), n)
			}
			for i := 0; i < row; i += 16 { // unit of the swizzle
				place := line + i
				if t.swizzle {
					place = int(swizzled(address+uint64(place)) - address)
				}
				if k := i - skip; k >= 0 && k+16 <= len(from) {
					*(*[16]byte)(to[place:]) = [16]byte(from[k:])
					continue
				}
				for j := range 16 {
					var x byte
					if k := i + j - skip; k >= 0 && k < len(from) {
						x = from[k]
					}
					to[place+j] = x
				}
			}
		}
	}
}

// swizzled returns the swizzled address of a 16-byte unit.
func swizzled(address uint64) uint64 { return address ^ address>>7&7<<4 }
