package ptx

import (
	"slices"
	"strings"
	"unsafe"
)

// bulkStores holds a thread's bulk copies and additions to global memory. open has no group yet.
type bulkStores struct {
	open   []bulkStore
	groups [][]bulkStore
}

// A bulkStore reads shared memory and writes or adds to global memory, at any times before they are waited for.
type bulkStore struct {
	from, to uint64
	n        int
	add      bool // floats
	data     []byte
	done     bool
}

func (b *bulkStores) any() bool {
	return len(b.open) > 0 || slices.ContainsFunc(b.groups, func(g []bulkStore) bool { return len(g) > 0 })
}

func (b *bulkStore) read(w *warp) {
	if b.data == nil {
		b.data = slices.Clone(unsafe.Slice((*byte)(w.block.inShared(b.from, b.n)), b.n))
	}
}

func (b *bulkStore) write(w *warp) {
	if b.done {
		return
	}
	b.read(w)
	b.done = true
	to := w.m.find(b.to, b.n)
	if !b.add {
		copy(unsafe.Slice((*byte)(to), b.n), b.data)
		return
	}
	sums := unsafe.Slice((*float32)(to), b.n/4)
	for i, x := range unsafe.Slice((*float32)(unsafe.Pointer(&b.data[0])), b.n/4) {
		sums[i] += x
	}
}

// bulkStore compiles bulk copies and additions from shared to global memory, and the instructions that wait for them.
func (c *compiler) bulkStore(s *statement) func(w *warp, m uint32) {
	each := func(f func(w *warp, b *bulkStores, l int)) func(w *warp, m uint32) {
		return func(w *warp, m uint32) {
			for l := range lanes {
				if m>>l&1 != 0 {
					f(w, &w.stores[l], l)
				}
			}
			w.m.events++
		}
	}
	switch name := strings.Join(s.op, "."); name {
	case "cp.async.bulk.commit_group":
		return each(func(_ *warp, b *bulkStores, _ int) {
			b.groups, b.open = append(b.groups, b.open), nil
		})
	case "cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read":
		n, read := c.constantArgument(0), s.has("read")
		return each(func(w *warp, b *bulkStores, _ int) {
			for i := range max(len(b.groups)-n, 0) {
				for j := range b.groups[i] {
					if x := &b.groups[i][j]; read {
						x.read(w)
					} else {
						x.write(w)
					}
				}
			}
			if !read {
				b.groups = b.groups[max(len(b.groups)-n, 0):]
			}
		})
	case "cp.async.bulk.global.shared::cta.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32":
		c.least(3)
		to, from, n, add := c.address(&s.args[0], globalSpace), c.address(&s.args[1], sharedSpace), c.src32(&s.args[2]), s.op[1] == "reduce"
		return each(func(w *warp, b *bulkStores, l int) {
			x := bulkStore{from: from.at(w, l), to: to.at(w, l), n: int(w.d(n)[l]), add: add}
			if x.n%16 != 0 || x.from%16 != 0 || x.to%16 != 0 || x.n == 0 {
				w.fail("%d bytes from %#x to %#x", x.n, x.from, x.to)
			}
			w.block.inShared(x.from, x.n)
			w.m.find(x.to, x.n)
			w.touch(x.to, x.n, true)
			switch w.m.rng.IntN(3) { // what is not done now is done at the waits
			case 0:
				x.write(w)
			case 1:
				x.read(w)
			}
			b.open = append(b.open, x)
		})
	}
	return nil
}
