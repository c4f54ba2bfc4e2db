package ptx

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
)

const (
	lanes = 32
	all   = ^uint32(0)
)

// space is a memory space.
type space uint8

const (
	genericSpace space = iota
	globalSpace
	sharedSpace  // of this block
	clusterSpace // of any block of the cluster
	paramSpace   // parameters of the kernel
	frameSpace   // parameters of functions, per thread
)

const (
	sharedStart = 1024    // address of a block's shared memory; 0 is no address
	sharedIn    = 1 << 56 // bits of generic addresses of shared memory and of parameters
	paramsIn    = 1 << 57 //
	rankShift   = 24      // position of rank + 1 in a shared address of a cluster
	windowMask  = 1<<56 - 1
)

// Memory is the global memory that a launch may access: ranges in ascending order that do not overlap.
type Memory []Range

// Range is host memory at an address.
type Range struct {
	Address uint64
	Bytes   int64
	Peer    bool // memory of another GPU; stores to it arrive late, see [Kernel.Run]
}

func (m Memory) peers() bool { return slices.ContainsFunc(m, func(r Range) bool { return r.Peer }) }

// Launch holds the parameters of a launch.
type Launch struct {
	Grid, Block int // number of blocks and of threads per block, in one dimension
	Cluster     int // blocks per cluster; 0: 1
	Shared      int // bytes of dynamic shared memory
	Params      []byte
	Resident    int // approximate number of blocks that run at the same time; 0: all
	Seed        uint64
	Ahead       int    // instructions by which threads of a warp may sometimes run ahead of the other threads
	Most        int64  // limit of warp instructions; 0: 1<<30
	Clock       *int64 // value of %globaltimer, in nanoseconds; nil: the launch has its own clock

	// Before is the trace of the previous launch, if this launch may start before the end of that launch
	// (programmatic dependent launch). Before griddepcontrol.wait, this launch may neither read memory that
	// the previous launch writes, nor write memory that it reads or writes. Run fills Trace.
	Before, Trace *Trace
}

// machine runs one launch.
type machine struct {
	*Kernel
	Launch
	memory  Memory
	last    [2]Range // the last two ranges used, the latest first
	rng     *rand.Rand
	pending []pending
	warps   []*warp
	steps   int64
	events  int64 // events that threads may wait for
	exited  int   // blocks
	waited  bool  // some block has waited for the previous launch

	behindWait bool // some block allowed the next launch to start, or ended, after it had waited

	order    []int // clusters that have not started
	resident int   // running blocks
	turns    []int // order of the warps
	peers    bool  // some memory belongs to another GPU
	flights  []flight
	flying   map[uint64]int // flights per aligned 4-byte word, keyed by address / 4
}

// pending is an operation that may happen at any time, and the instruction that started it.
type pending struct {
	block *block
	warp  int
	in    *instruction
	do    func()
}

// cluster is a set of blocks that share access to their shared memory.
type cluster struct {
	blocks          []*block
	threads         int
	arrived, exited int // threads at the cluster's barrier
	phase           int
}

// block is a thread block.
type block struct {
	m        *machine
	cluster  *cluster
	index    int
	rank     int
	shared   []byte
	threads  int
	exited   int
	more     int // registers of a lane of all warps, beyond those that the block began with
	barriers [16]blockBarrier
	objects  map[uint32]*mbarrier
	recent   [64]*mbarrier // cache of objects, by address
	waited   bool          // for the previous launch
	lets     bool          // has allowed the next launch to start
}

// group is the threads of a warp that are at the same instruction.
type group struct {
	mask uint32
	pc   int
	wait func() bool // reports whether the threads may continue; nil: they may
	gone bool        // has yielded: other groups that can run go first
}

// warp is 32 threads.
type warp struct {
	*block
	id     int // number in the block
	live   uint32
	groups []group
	yield  bool // the other warps go first
	ran    int  // instructions since the warp last waited or yielded
	r32    [][lanes]uint32
	r64    [][lanes]uint64
	p      []uint32
	some32 [lanes]uint32 // scratch for results of which only some are kept
	some64 [lanes]uint64
	frame  []byte // frames of all lanes, one after the other
	depth  [lanes]int
	back   [lanes][4]int // return addresses of calls
	phases [lanes]int    // phase of the cluster's barrier at the last arrival
	here   uint32        // lanes that have arrived in the barrier's current phase
	copies [lanes]asyncCopies
	stores [lanes]bulkStores
	asked  int // registers of a lane, see ask
	groupProducts
	in *instruction // current instruction
}

func (w *warp) d(r register) *[lanes]uint32 {
	if r >= constant {
		return &w.m.c32[r-constant]
	}
	return &w.r32[r]
}

func (w *warp) q(r register) *[lanes]uint64 {
	if r >= constant {
		return &w.m.c64[r-constant]
	}
	return &w.r64[r]
}

func (w *warp) fail(format string, args ...any) {
	panic(fault{fmt.Sprintf(format, args...)})
}

// machine checks a launch and returns a machine that runs it.
func (s *Start) machine() (*machine, error) {
	k, l := s.Kernel, s.Launch
	if l.Cluster == 0 {
		l.Cluster = 1
	}
	if l.Most == 0 {
		l.Most = 1 << 30
	}
	if l.Resident == 0 {
		l.Resident = l.Grid
	}
	if l.Grid < 1 || l.Block < 1 || l.Block > 1024 || l.Cluster < 1 || l.Cluster > 16 || l.Shared < 0 || k.dynamic+l.Shared > 1<<rankShift || l.Resident < 0 || l.Ahead < 0 || l.Most < 0 {
		return nil, fmt.Errorf("ptx: %s: no such launch: %d blocks of %d threads in clusters of %d, %d bytes of shared memory, %d blocks at once, %d instructions", k.name, l.Grid, l.Block, l.Cluster, l.Shared, l.Resident, l.Most)
	}
	if len(l.Params) != k.params {
		return nil, fmt.Errorf("ptx: %s takes %d bytes of parameters, not %d", k.name, k.params, len(l.Params))
	}
	if l.Grid%l.Cluster != 0 || l.Block%lanes != 0 {
		return nil, fmt.Errorf("ptx: %s: %d blocks of %d threads in clusters of %d", k.name, l.Grid, l.Block, l.Cluster)
	}
	m := &machine{Kernel: k, Launch: l, memory: s.Memory, rng: rand.New(rand.NewPCG(l.Seed, 0))}
	m.peers = s.Memory.peers()
	if m.Clock == nil {
		m.Clock = new(int64)
	}
	m.order = m.rng.Perm(l.Grid / l.Cluster)
	return m, nil
}

// round runs every warp once. It reports whether there was progress: an event that threads may wait for has
// happened, or may still happen.
func (m *machine) round() (progress bool, err error) {
	var running *warp
	defer func() {
		if r := recover(); r != nil {
			f, ok := r.(fault)
			if !ok {
				panic(r)
			}
			err = fmt.Errorf("ptx: %s: %w", m.name, f)
			if running != nil && running.in != nil {
				err = fmt.Errorf("ptx: %s: %s: %w", m.name, running.where(), f)
			}
		}
	}()
	for len(m.order) > 0 && (m.resident == 0 || m.resident+m.Cluster <= m.Resident) {
		m.start(m.order[0])
		m.order = m.order[1:]
		m.resident += m.Cluster
	}
	*m.Clock += 100
	before, events, busy := m.exited, m.events, false
	m.turns = m.shuffled(m.turns, len(m.warps))
	for _, i := range m.turns {
		w := m.warps[i]
		if w.live == 0 {
			continue
		}
		running = w
		busy = w.slice(10+m.rng.IntN(300)) || busy
		running = nil
		if len(m.pending) > 0 && m.rng.IntN(4) == 0 {
			m.happen(m.rng.IntN(len(m.pending)))
		}
		m.arriveSome()
	}
	if m.exited > before {
		m.resident -= m.exited - before
		m.warps = slices.DeleteFunc(m.warps, func(w *warp) bool {
			if w.live == 0 && w.block.exited == w.block.threads {
				m.spare.Put(w)
				if w.id == 0 {
					shared := w.shared
					spareShared.Put(&shared)
				}
				return true
			}
			return false
		})
	}
	if m.steps > m.Most {
		return false, fmt.Errorf("ptx: %s: %d instructions, and no end: %s", m.name, m.steps, m.where())
	}
	if busy || m.events > events {
		return true, nil
	}
	if n := len(m.pending); n > 0 { // threads may wait for a pending operation
		if m.rng.IntN(2) == 0 {
			m.happen(m.rng.IntN(n))
		}
		return true, nil
	}
	return len(m.flights) > 0, nil
}

// end checks the state at the end of a launch.
func (m *machine) end() error {
	m.arriveAll(nil)
	if len(m.pending) > 0 { // the memory may no longer exist
		return fmt.Errorf("ptx: %s: %d copies that nobody has waited for", m.name, len(m.pending))
	}
	if m.overlapping() != nil && !m.waited {
		return fmt.Errorf("ptx: %s: it ends without having waited for the launch before", m.name)
	}
	m.ends()
	return nil
}

// shuffled returns the first n integers in random order.
func (m *machine) shuffled(to []int, n int) []int {
	if len(to) != n {
		to = to[:0]
		for i := range n {
			to = append(to, i)
		}
	}
	m.rng.Shuffle(n, func(i, j int) { to[i], to[j] = to[j], to[i] })
	return to
}

// where describes the positions of all threads.
func (m *machine) where() string {
	text, n := "", 0
	for _, w := range m.warps {
		for _, g := range w.groups {
			in := &m.code[min(g.pc, len(m.code)-1)]
			if n++; n <= 12 {
				text += fmt.Sprintf("\n\tblock %d warp %d threads %08x: line %d: %s", w.index, w.id, g.mask, in.line, in.text)
			}
		}
	}
	return text
}

// where describes the position of a warp.
func (w *warp) where() string {
	return w.block.where(w.id, w.in)
}

func (b *block) where(warp int, in *instruction) string {
	return fmt.Sprintf("block %d of %d, warp %d, line %d: %s", b.index, b.m.Grid, warp, in.line, in.text)
}

// later schedules an operation that happens at any time from now on.
func (w *warp) later(do func()) {
	w.m.pending = append(w.m.pending, pending{w.block, w.id, w.in, do})
}

// ask changes the registers of a warp's lanes (setmaxnreg). A block has no more than it began with: for each lane an equal part of a
// multiprocessor's 65536, at most.
func (w *warp) ask(n int) {
	if w.asked == 0 {
		w.asked = min(65536/w.block.threads/8*8, 255)
	}
	w.block.more += n - w.asked
	w.asked = n
}

// happen performs pending operation i.
func (m *machine) happen(i int) {
	p := m.pending[i]
	last := len(m.pending) - 1 // the operations have no order
	m.pending[i], m.pending[last] = m.pending[last], pending{}
	m.pending = m.pending[:last]
	defer func() {
		r := recover()
		if f, ok := r.(fault); ok {
			r = fault{p.block.where(p.warp, p.in) + ": " + f.text}
		}
		if r != nil {
			panic(r)
		}
	}()
	p.do()
	m.events++
}

// start makes the blocks of a cluster.
func (m *machine) start(index int) {
	c := &cluster{threads: m.Block * m.Cluster}
	for rank := range m.Cluster {
		b := &block{m: m, cluster: c, index: index*m.Cluster + rank, rank: rank, threads: m.Block, objects: map[uint32]*mbarrier{}}
		n := m.static
		if m.Shared > 0 {
			n = m.dynamic - sharedStart + m.Shared
		}
		b.shared = sharedMemory(n)
		c.blocks = append(c.blocks, b)
		for id := range m.Block / lanes {
			var w *warp
			if w, _ = m.spare.Get().(*warp); w != nil {
				*w = warp{r32: w.r32, r64: w.r64, p: w.p, frame: w.frame, groups: w.groups[:0]}
			} else {
				w = &warp{r32: make([][lanes]uint32, m.n32), r64: make([][lanes]uint64, m.n64), p: make([]uint32, m.np), frame: make([]byte, m.frame*lanes)}
			}
			w.block, w.id, w.live = b, id, all
			w.groups = append(w.groups, group{mask: all})
			m.warps = append(m.warps, w)
		}
	}
}

// spareShared holds the shared memory of blocks that have ended.
var spareShared sync.Pool

// sharedMemory returns n bytes that read as NaN.
func sharedMemory(n int) []byte {
	var b []byte
	if p, _ := spareShared.Get().(*[]byte); p != nil && cap(*p) >= n {
		b = (*p)[:n]
	} else {
		b = make([]byte, n)
	}
	if n > 0 {
		b[0] = 0xff
	}
	for i := 1; i < n; i *= 2 {
		copy(b[i:], b[:i])
	}
	return b
}

// choose returns a group that can run, and the number of instructions that it may run ahead. It prefers the
// group that is furthest behind, and sometimes chooses any group. Groups that poll in a loop alternate with
// the other groups.
func (w *warp) choose() (best, ahead int) {
	best, n := -1, 0
	draw := len(w.groups) > 1 && w.m.rng.IntN(8) == 0
	for i := range w.groups {
		g := &w.groups[i]
		if g.wait != nil {
			if !g.wait() {
				continue
			}
			g.wait = nil
		}
		in := &w.m.code[g.pc]
		if in.kind == together && w.ready(in, g.mask) == 0 {
			continue
		}
		n++
		switch {
		case best < 0, draw && w.m.rng.IntN(n) == 0:
			best = i
		case draw:
		case g.gone != w.groups[best].gone:
			if !g.gone {
				best = i
			}
		case g.pc < w.groups[best].pc:
			best = i
		}
	}
	if best >= 0 && w.groups[best].gone { // all groups have yielded
		for i := range w.groups {
			w.groups[i].gone = false
		}
	}
	if draw {
		ahead = w.m.rng.IntN(w.m.Ahead + 1)
	}
	return best, ahead
}

// ready returns the threads of mask that can execute an instruction together: threads with the same member
// mask, whose members are all present.
func (w *warp) ready(in *instruction, mask uint32) uint32 {
	if in.mask < 0 {
		if w.live&^mask != 0 {
			return 0
		}
		return mask
	}
	members := w.d(in.mask)
	for rest := mask; rest != 0; {
		need, same := members[bits.TrailingZeros32(rest)], uint32(0)
		for l := range lanes {
			if rest>>l&1 != 0 && members[l] == need {
				same |= 1 << l
			}
		}
		if need&w.live&^mask == 0 || same&^need != 0 { // the second condition is an error, which the instruction reports
			return same
		}
		rest &^= same
	}
	return 0
}

// members checks that the executing threads are exactly the live threads that their member mask names.
func (w *warp) members(mask register, m uint32) {
	named := w.d(mask)[bits.TrailingZeros32(m)]
	if m&^named != 0 {
		w.fail("threads %08x are not among %08x", m&^named, named)
	}
	if named&w.live&^m != 0 {
		w.fail("threads %08x are at it with others than %08x", named&w.live&^m, named)
	}
}

// meet merges groups that are at the same instruction.
func (w *warp) meet() {
	for i := 0; i < len(w.groups); i++ {
		for j := len(w.groups) - 1; j > i; j-- {
			if w.groups[i].pc == w.groups[j].pc && w.groups[i].wait == nil && w.groups[j].wait == nil {
				w.groups[i].mask |= w.groups[j].mask
				w.groups[i].gone = w.groups[i].gone && w.groups[j].gone
				w.groups = slices.Delete(w.groups, j, j+1)
			}
		}
	}
}

// slice runs the warp for at most the given number of instructions, until it waits or yields. It reports
// whether the warp has run long without waiting or yielding, and so is computing.
func (w *warp) slice(most int) (busy bool) {
	budget := most
	code := w.m.code
	w.yield = false
	for most > 0 && w.live != 0 && !w.yield {
		if len(w.groups) > 1 {
			w.meet()
		}
		at, ahead := w.choose()
		if at < 0 {
			return false
		}
		g := &w.groups[at]
		mask, pc := g.mask, g.pc
		alone := len(w.groups) == 1
	run:
		for most > 0 && !w.yield {
			in := &code[pc]
			w.in = in
			m := mask
			if in.guard >= 0 {
				p := w.p[in.guard]
				if in.negated {
					p = ^p
				}
				m &= p
			}
			most--
			w.m.steps++
			switch in.kind {
			case plain:
				if m != 0 {
					in.do(w, m)
				}
				pc++
			case together:
				if m != mask {
					w.fail("only threads %08x of %08x take part", m, mask)
				}
				if m = w.ready(in, mask); m == 0 {
					break run
				}
				if m != mask { // the other threads name another mask
					w.groups = append(w.groups, group{mask: mask &^ m, pc: pc})
					g = &w.groups[at]
					mask, alone = m, false
				}
				in.do(w, m)
				pc++
			case branch:
				switch m {
				case mask:
					pc = in.target
				case 0:
					pc++
				default:
					w.groups = append(w.groups, group{mask: m, pc: in.target})
					g = &w.groups[at]
					mask &^= m
					pc++
					break run
				}
			case call:
				if m != mask {
					w.fail("only threads %08x of %08x call", m, mask)
				}
				in.do(w, m)
				for l := range lanes {
					if m>>l&1 != 0 {
						if w.depth[l] == len(w.back[l]) {
							w.fail("calls within calls")
						}
						w.back[l][w.depth[l]] = pc + 1
						w.depth[l]++
					}
				}
				pc = in.target
			case ret:
				mask &^= m
				if in.do != nil && m != 0 {
					in.do(w, m)
				}
				w.ret(m)
				g = &w.groups[at]
				if mask == 0 {
					w.groups = slices.Delete(w.groups, at, at+1)
					goto next
				}
				pc++
				break run
			case barrier:
				if m != mask {
					w.fail("only threads %08x of %08x take part", m, mask)
				}
				wait := in.wait(w, m)
				pc++
				if wait != nil && !wait() {
					g.wait = wait
					break run
				}
			}
			if !alone {
				if ahead == 0 {
					break // another group may be behind, or at the same instruction
				}
				ahead--
			}
		}
		g.mask, g.pc, g.gone = mask, pc, w.yield
	next:
	}
	if most > 0 || w.yield {
		w.ran = 0
		return false
	}
	w.ran += budget
	return w.ran > 2000
}

// ret returns from calls, or ends threads.
func (w *warp) ret(m uint32) {
	for l := range lanes {
		if m>>l&1 == 0 {
			continue
		}
		if w.depth[l] > 0 {
			w.depth[l]--
			pc, found := w.back[l][w.depth[l]], false
			for i := range w.groups {
				if g := &w.groups[i]; g.pc == pc && g.wait == nil && g.mask&m == 0 {
					g.mask |= 1 << l
					found = true
					break
				}
			}
			if !found {
				w.groups = append(w.groups, group{mask: 1 << l, pc: pc})
			}
			continue
		}
		if w.copies[l].any() || w.stores[l].any() {
			w.fail("thread %d ends with copies that it has not waited for", l)
		}
		if w.groupProducts.any() {
			w.fail("thread %d ends with products that it has not waited for", l)
		}
		w.live &^= 1 << l
		w.m.events++
		w.block.exited++
		w.block.release()
		w.cluster.exited++
		if w.here>>l&1 != 0 && w.phases[l] == w.cluster.phase {
			w.cluster.arrived--
		}
	}
	if w.block.exited == w.block.threads {
		if w.block.more > 0 {
			w.fail("lanes of the block's warps have asked for %d registers more than there are: warps would wait forever", w.block.more)
		}
		w.m.exited++
		w.let()
	}
	w.cluster.settle()
}
