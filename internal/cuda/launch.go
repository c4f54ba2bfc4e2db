package cuda

import (
	"fmt"
	"math"
	"unsafe"
)

// Args is the argument list of a kernel, filled in the kernel's order. Reset empties the list and keeps its memory,
// so that filling and launching again allocates nothing. The driver copies the values at the launch. An Args is not
// safe for use by several goroutines at once.
type Args struct {
	data    []uint64 // every value starts a new word
	starts  []int
	params  []unsafe.Pointer // pointers into data, made at the launch
	buffers []*Buffer
	config  launchConfig
	attrs   [3]launchAttribute
}

// Reset empties the list.
func (a *Args) Reset() {
	clear(a.buffers) // hold no buffer longer than needed
	a.data, a.starts, a.buffers = a.data[:0], a.starts[:0], a.buffers[:0]
}

func (a *Args) word(bits uint64) {
	a.starts = append(a.starts, len(a.data))
	a.data = append(a.data, bits)
}

// The platforms with a driver are little-endian: a narrow value is the first bytes of its word.

func (a *Args) Int32(v int32)     { a.word(uint64(uint32(v))) }
func (a *Args) Uint32(v uint32)   { a.word(uint64(v)) }
func (a *Args) Int64(v int64)     { a.word(uint64(v)) }
func (a *Args) Uint64(v uint64)   { a.word(v) }
func (a *Args) Float32(v float32) { a.word(uint64(math.Float32bits(v))) }
func (a *Args) Float64(v float64) { a.word(math.Float64bits(v)) }

// Null appends a null pointer.
func (a *Args) Null() { a.word(0) }

// Buffer appends a pointer to b's memory at an offset. A launch with a closed buffer is refused. An offset past the
// end of b is [ErrRange].
func (a *Args) Buffer(b *Buffer, offset int64) error {
	if err := inside("a buffer", offset, 0, b.bytes); err != nil {
		return err
	}
	a.buffers = append(a.buffers, b)
	a.word(uint64(b.id) + uint64(offset))
	return nil
}

// Hold makes a launch refuse a closed b. Hold is for memory whose address is in a struct: see [Buffer.Address].
func (a *Args) Hold(b *Buffer) { a.buffers = append(a.buffers, b) }

// Struct appends a struct that the kernel takes by value, as its bytes in Go, which must have the layout of C. The
// struct must hold no Go pointer.
func Struct[T any](a *Args, v *T) {
	size := int(unsafe.Sizeof(*v))
	start := len(a.data)
	a.starts = append(a.starts, start)
	for range max(1, (size+7)/8) {
		a.data = append(a.data, 0)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&a.data[start])), size), unsafe.Slice((*byte)(unsafe.Pointer(v)), size))
}

// Grid is the shape of a launch. A size of 0 counts as 1.
type Grid struct {
	Blocks  [3]int
	Threads [3]int // threads of a block
	Shared  int    // bytes of a block's dynamic shared memory

	// Cluster is the shape of a thread block cluster; all 0: none. Clusters need compute capability 9.0.
	Cluster [3]int

	// Cooperative launches run all blocks at once, or fail.
	Cooperative bool

	// Overlap lets the kernel start as soon as the previous kernel of the stream allows
	// (griddepcontrol.launch_dependents). The kernel itself waits for the previous kernel's writes
	// (griddepcontrol.wait). Overlap needs compute capability 9.0.
	Overlap bool

	// Waits promises that the kernel waits before it reads or writes anything, and lets no other kernel start before.
	// Such a kernel may overlap copies as well, see [Stream.PutOff].
	Waits bool
}

// launchConfig is CUlaunchConfig. launchAttribute is CUlaunchAttribute.
type launchConfig struct {
	blocks, threads [3]uint32
	shared          uint32
	stream          uintptr
	attrs           uintptr
	n               uint32
}

type launchAttribute struct {
	id    uint32
	_     uint32
	value [16]uint32
}

const (
	attributeCooperative = 2
	attributeCluster     = 4
	attributeOverlap     = 6 // programmatic stream serialization
)

// Launch queues the kernel. Launch returns errors of the launch; a later call returns errors of the running kernel.
func (f *Function) Launch(s *Stream, g Grid, a *Args) error {
	m := f.module
	if err := f.check(&g); err != nil {
		return err
	}
	if err := enterAll(&m.handle, &s.handle); err != nil {
		return err
	}
	defer leaveAll(&m.handle, &s.handle)
	for i, b := range a.buffers {
		err := b.enter()
		if err == nil && !m.dev.reaches(b.dev) {
			b.leave()
			err = ErrOtherDevice
		}
		if err != nil {
			leaveBuffers(a.buffers[:i])
			return fmt.Errorf("%s: buffer argument %d: %w", f.name, i, err)
		}
	}
	defer leaveBuffers(a.buffers)

	s.off.Lock()
	defer s.off.Unlock()
	if err := s.settle(); err != nil {
		return err
	}
	g.Overlap = g.Overlap && s.off.mayOverlap(&g)
	if err := f.queue(s, &g, a); err != nil {
		return err
	}
	s.off.launched()
	return nil
}

// queue is Launch after the checks, with all handles entered.
func (f *Function) queue(s *Stream, g *Grid, a *Args) error {
	m := f.module
	a.point()
	return m.dev.with(func() error {
		var r result
		call := &m.dev.drv.fn.launchKernel
		if g.Cooperative || g.Overlap || g.Cluster[0] != 0 {
			call = &m.dev.drv.fn.launchKernelEx
			r = f.launchEx(s, g, a)
		} else {
			r = call.call11(f.id,
				uintptr(g.Blocks[0]), uintptr(g.Blocks[1]), uintptr(g.Blocks[2]),
				uintptr(g.Threads[0]), uintptr(g.Threads[1]), uintptr(g.Threads[2]),
				uintptr(g.Shared), s.id, uintptr(unsafe.Pointer(unsafe.SliceData(a.params))), 0)
		}
		if r != 0 {
			return m.dev.drv.failed(r, call, "%s, blocks %v, threads %v, %d bytes of shared memory", f.name, g.Blocks, g.Threads, g.Shared)
		}
		return nil
	})
}

// point makes params point to the arguments.
func (a *Args) point() {
	a.params = a.params[:0]
	for _, at := range a.starts {
		a.params = append(a.params, unsafe.Pointer(&a.data[at]))
	}
}

// check fills in omitted sizes.
func (f *Function) check(g *Grid) error {
	cluster := g.Cluster != [3]int{}
	for i := range 3 {
		for _, n := range []*int{&g.Blocks[i], &g.Threads[i], &g.Cluster[i]} {
			if !fits(*n) {
				return fmt.Errorf("%s: launch of %+v: %w", f.name, *g, ErrRange)
			}
			if *n == 0 && (cluster || n != &g.Cluster[i]) {
				*n = 1
			}
		}
	}
	if !fits(g.Shared) {
		return fmt.Errorf("%s: launch of %+v: %w", f.name, *g, ErrRange)
	}
	return nil
}

func (f *Function) launchEx(s *Stream, g *Grid, a *Args) result {
	a.configure(g, s.id)
	return f.module.dev.drv.fn.launchKernelEx.call4(uintptr(unsafe.Pointer(&a.config)), f.id, uintptr(unsafe.Pointer(unsafe.SliceData(a.params))), 0)
}

// configure writes a's config. The driver reads the config by its address: a is on the heap.
func (a *Args) configure(g *Grid, stream uintptr) {
	c := &a.config
	c.shared, c.stream, c.n = uint32(g.Shared), stream, 0
	for i := range 3 {
		c.blocks[i], c.threads[i] = uint32(g.Blocks[i]), uint32(g.Threads[i])
	}
	if g.Cooperative {
		a.attrs[c.n] = launchAttribute{id: attributeCooperative, value: [16]uint32{1}}
		c.n++
	}
	if g.Cluster[0] != 0 {
		a.attrs[c.n] = launchAttribute{id: attributeCluster, value: [16]uint32{uint32(g.Cluster[0]), uint32(g.Cluster[1]), uint32(g.Cluster[2])}}
		c.n++
	}
	if g.Overlap {
		a.attrs[c.n] = launchAttribute{id: attributeOverlap, value: [16]uint32{1}}
		c.n++
	}
	c.attrs = uintptr(unsafe.Pointer(&a.attrs))
}

// Clusters returns how many thread block clusters of such a launch can run at once, 0 if none can. The launch needs
// compute capability 9.0.
func (f *Function) Clusters(g Grid) (n int, err error) {
	if err := f.check(&g); err != nil {
		return 0, err
	}
	a := new(Args)
	a.configure(&g, 0)
	err = f.with(func(d *Driver) error {
		var most int32
		switch r := d.fn.clusters.call(uintptr(unsafe.Pointer(&most)), f.id, uintptr(unsafe.Pointer(&a.config))); r {
		case 0, resultInvalidClusterSize:
		default:
			return d.failed(r, &d.fn.clusters, "%s, clusters of %v", f.name, g.Cluster)
		}
		n = int(most)
		return nil
	})
	return n, err
}

func leaveBuffers(bs []*Buffer) {
	for _, b := range bs {
		b.leave()
	}
}
