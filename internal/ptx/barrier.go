package ptx

import (
	"fmt"
	"math/bits"
)

// mbarrier is a barrier in shared memory.
type mbarrier struct {
	at             uint64
	arrivals, left int // arrivals per phase, and pending arrivals of this phase
	bytes          int // pending bytes of this phase
	phase          uint32
}

func (b *mbarrier) settle() {
	if b.left == 0 && b.bytes == 0 {
		b.phase++
		b.left = b.arrivals
	}
}

// arrive counts n arrivals of a lane.
func (b *mbarrier) arrive(w *warp, n int) {
	if b.left -= n; b.left < 0 {
		w.fail("more arrivals than %d", b.arrivals)
	}
	b.settle()
}

func (b *block) mbarrier(at uint64) *mbarrier {
	b.inShared(at, 8)
	o := b.recent[at/8%uint64(len(b.recent))]
	if o == nil || o.at != at {
		if o = b.objects[uint32(at)]; o == nil {
			panic(fault{fmt.Sprintf("there is no barrier at %#x", at-sharedStart)})
		}
		b.recent[at/8%uint64(len(b.recent))] = o
	}
	return o
}

// complete records that n bytes have arrived.
func (b *block) complete(at uint64, n int) {
	o := b.mbarrier(at)
	o.bytes -= n
	o.settle()
}

// mbarriers compiles the mbarrier instructions.
func (c *compiler) mbarriers(s *statement) func(w *warp, m uint32) {
	each := func(w *warp, m uint32, a *address, f func(l int, o *mbarrier)) {
		for l := range lanes {
			if m>>l&1 != 0 {
				b, at := w.of(a.at(w, l))
				f(l, b.mbarrier(at))
			}
		}
		w.m.events++
	}
	switch s.part(1) {
	case "init":
		if s.spaceOf() != sharedSpace {
			return nil
		}
		c.need(2)
		a, n := c.address(&s.args[0], s.spaceOf()), c.src32(&s.args[1])
		return func(w *warp, m uint32) {
			for l := range lanes {
				if m>>l&1 != 0 {
					at := a.at(w, l)
					w.at(a.space, at, l, 8)
					count := int(w.d(n)[l])
					if count < 1 || count > 1<<20-1 {
						w.fail("a barrier of %d arrivals", count)
					}
					o := &mbarrier{at: at, arrivals: count, left: count}
					w.objects[uint32(at)], w.recent[at/8%uint64(len(w.recent))] = o, o
				}
			}
			w.m.events++
		}
	case "arrive":
		c.least(2)
		expect := s.has("expect_tx")
		if s.args[0].word != "_" || s.has("noComplete") || expect && len(s.args) != 3 {
			return nil
		}
		a := c.address(&s.args[1], s.spaceOf())
		n := c.constant32(1) // arrivals, or bytes
		if len(s.args) > 2 {
			n = c.src32(&s.args[2])
		}
		return func(w *warp, m uint32) {
			each(w, m, &a, func(l int, o *mbarrier) {
				count := int(w.d(n)[l])
				if expect {
					o.bytes += count
					count = 1
				} else if count == 0 {
					w.fail("no arrival")
				}
				o.arrive(w, count)
			})
		}
	case "try_wait", "test_wait":
		if !s.has("parity") {
			return nil
		}
		c.least(3)
		p, a, parity := c.predicate(&s.args[0]), c.address(&s.args[1], s.spaceOf()), c.src32(&s.args[2])
		return func(w *warp, m uint32) {
			for rest := m; rest != 0; rest &= rest - 1 {
				l := bits.TrailingZeros32(rest)
				o := w.mbarrier(a.at(w, l))
				if (o.phase^w.d(parity)[l])&1 != 0 {
					w.p[p] |= 1 << l
				} else {
					w.p[p] &^= 1 << l
					w.yield = true
				}
			}
		}
	}
	return nil
}

// blockBarrier is one of a block's numbered barriers.
type blockBarrier struct {
	arrived, phase int
	all            bool // threads that have arrived wait for all threads of the block
}

// release ends phases that waited only for threads which have exited.
func (b *block) release() {
	for i := range b.barriers {
		if bar := &b.barriers[i]; bar.all && bar.arrived > 0 && bar.arrived == b.threads-b.exited {
			bar.arrived = 0
			bar.phase++
		}
	}
}

// barriers compiles the barriers of blocks and of clusters.
func (c *compiler) barriers(s *statement) (in instruction, ok bool) {
	in.kind = barrier
	if s.op[0] == "barrier" && s.part(1) == "cluster" {
		switch s.part(2) {
		case "arrive":
			in.wait = func(w *warp, m uint32) func() bool {
				for l := range lanes {
					if m>>l&1 != 0 {
						w.phases[l] = w.cluster.phase
						w.cluster.arrived++
						if w.here>>l&1 != 0 {
							w.fail("a second arrival")
						}
					}
				}
				w.here |= m
				w.m.events++
				w.cluster.settle()
				return nil
			}
		case "wait":
			in.wait = func(w *warp, m uint32) func() bool {
				phase, cluster := -1, w.cluster
				for l := range lanes {
					if m>>l&1 != 0 {
						if w.here>>l&1 == 0 || phase >= 0 && phase != w.phases[l] {
							w.fail("no arrival before")
						}
						phase = w.phases[l]
					}
				}
				w.here &^= m
				return func() bool { return cluster.phase > phase }
			}
		}
		return in, in.wait != nil
	}
	waits := s.part(1) == "sync"
	if !waits && (s.part(1) != "arrive" || len(s.args) != 2) {
		return in, false
	}
	c.least(1)
	number, count := c.src32(&s.args[0]), register(-1)
	if len(s.args) > 1 {
		count = c.src32(&s.args[1])
	}
	in.wait = func(w *warp, m uint32) func() bool {
		b, first := w.block, bits.TrailingZeros32(m)
		which := w.d(number)[first]
		if which >= 16 {
			w.fail("barrier %d", which)
		}
		need := b.threads - b.exited
		if count >= 0 {
			need = int(w.d(count)[first])
			if need%lanes != 0 || need == 0 || need > b.threads {
				w.fail("a barrier of %d threads", need)
			}
		}
		bar := &b.barriers[which]
		bar.all = count < 0 && (bar.all || bar.arrived == 0)
		bar.arrived += bits.OnesCount32(m)
		phase := bar.phase
		w.m.events++
		if bar.arrived > need {
			w.fail("%d threads at barrier %d of %d", bar.arrived, which, need)
		}
		if bar.arrived == need {
			bar.arrived = 0
			bar.phase++
		}
		if !waits {
			return nil
		}
		return func() bool { return bar.phase > phase }
	}
	return in, true
}

// settle ends a phase of the cluster's barrier when all live threads have arrived.
func (c *cluster) settle() {
	if c.arrived > 0 && c.arrived+c.exited == c.threads {
		c.arrived = 0
		c.phase++
	}
}
