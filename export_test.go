package leanattention

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/kvstore"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/pages"
	"gorgonia.org/leanattention/internal/reftest"

	"go.uber.org/goleak"
	G "gorgonia.org/gorgonia"
)

// PendingLSE is the number of log-sum-exps that an attention node's op keeps.
func PendingLSE(n *G.Node) int {
	s := &n.Op().(*attentionOp).lse
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.of)
}

// LayerRuns is the number of runs of the step's CachedAttention nodes.
func LayerRuns(s *Step) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.layers
}

// Slabs is a copy of all memory that c keeps keys and values in.
func Slabs(c *Cache) []byte {
	var all []byte
	c.eachSlab(func(_ attn.DType, bytes []byte) { all = append(all, bytes...) })
	return all
}

// PoisonFree writes NaN to every slot of the pages that nobody holds.
func PoisonFree(c *Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	free, _ := c.pool.Lists()
	c.eachSlab(func(t attn.DType, bytes []byte) {
		page := len(bytes) / c.config.Pages
		for _, p := range free {
			poison(t, bytes[int(p)*page:(int(p)+1)*page])
		}
	})
}

// ZeroPages writes 0 to all memory of c.
func ZeroPages(c *Cache) {
	d, ok := c.store.(*kvstore.DevicePages)
	if !ok {
		c.eachSlab(func(_ attn.DType, bytes []byte) { clear(bytes) })
		return
	}
	for _, p := range d.Parts {
		for _, b := range slabsOf(p.Layers) { // gigabytes, in benchmarks
			if err := b.Set(0, 0, b.Len()); err != nil {
				panic(err)
			}
		}
	}
}

// slabsOf are the keys and values of all layers.
func slabsOf(layers []attn.Memory[*cuda.Buffer]) (all []*cuda.Buffer) {
	for i := range layers {
		all = append(all, layers[i][0].Data, layers[i][1].Data)
	}
	return all
}

// FillPages writes a block of bytes to all memory of a cache on GPUs, again and again.
func FillPages(c *Cache, block []byte) error {
	d := c.store.(*kvstore.DevicePages)
	for _, p := range d.Parts {
		s, err := p.GPU.Dev.NewStream()
		if err != nil {
			return err
		}
		for _, b := range slabsOf(p.Layers) {
			n := min(b.Len(), int64(len(block)))
			if err := b.Upload(0, block[:n]); err != nil {
				return err
			}
			for ; n < b.Len(); n *= 2 {
				if err := s.Copy(b, n, b, 0, min(n, b.Len()-n)); err != nil {
					return err
				}
			}
		}
		if err := errors.Join(s.Synchronize(), s.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cache) eachSlab(visit func(attn.DType, []byte)) {
	if host, ok := c.store.(*kvstore.HostPages); ok {
		for i := range host.Layers {
			format, _ := c.config.format(i)
			for s := range format.Slabs {
				visit(s.DType, slabBytes(*host.Layers[i].At(s)))
			}
		}
		return
	}
	v := c.testView()
	for i := range v.keys {
		for _, b := range [...]cpu.Buffer{v.keys[i], v.values[i]} {
			visit(b.DType, slabBytes(b))
		}
	}
	v.flush()
	d, ok := c.store.(*kvstore.DevicePages)
	if !ok || len(d.Parts) > 1 {
		return
	}
	for _, p := range d.Parts { // the scales
		for i := range p.Layers {
			format, _ := c.config.format(i)
			for s := range format.Slabs {
				if b := *p.Layers[i].At(s); s.Scales {
					scales := make([]byte, b.Len())
					if err := b.Download(scales, 0); err != nil {
						panic(err)
					}
					visit(s.DType, scales)
					if err := b.Upload(0, scales); err != nil {
						panic(err)
					}
				}
			}
		}
	}
}

// Lengthen gives a sequence n tokens more, of whatever lies in free pages.
func Lengthen(s *Sequence, n int) {
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if s.table.Pages, err = c.pool.Take(s.table.Pages, c.pool.For(s.table.Tokens-c.pool.Shift(&s.table)+n)-len(s.table.Pages)); err != nil {
		panic(err)
	}
	s.table.Tokens += n
	c.tokens += n
}

// testView is the memory of a cache as tests see it: the very memory of the host,
// or a copy of what is on a GPU.
type testView struct {
	*Cache
	keys, values []cpu.Buffer
}

func (c *Cache) testView() *testView {
	v := &testView{Cache: c}
	switch s := c.store.(type) {
	case *kvstore.HostPages:
		for _, l := range s.Layers {
			v.keys, v.values = append(v.keys, l[0].Data), append(v.values, l[1].Data)
		}
	case *kvstore.DevicePages:
		for i := range c.config.Layers {
			v.keys, v.values = append(v.keys, v.slab(s, i, 0)), append(v.values, v.slab(s, i, 1))
		}
	}
	return v
}

// flush puts what was changed in a view back on the GPU.
func (v *testView) flush() {
	s, ok := v.store.(*kvstore.DevicePages)
	if !ok {
		return
	}
	for i := range v.keys {
		v.copy(s, i, 0, v.keys[i], (*cuda.Buffer).Upload)
		if !v.config.ValuesInKeys {
			v.copy(s, i, 1, v.values[i], (*cuda.Buffer).Upload)
		}
	}
}

// slab is a copy of a layer's keys, or values.
func (v *testView) slab(s *kvstore.DevicePages, layer, plane int) cpu.Buffer {
	if plane > 0 && v.config.ValuesInKeys {
		return cpu.Buffer{}
	}
	format, _ := v.config.format(layer)
	b := operand.NewBuffer(format.Planes[plane].DType, v.config.Pages*v.config.KVHeads*v.config.PageSize*format.Planes[plane].Elements())
	v.copy(s, layer, plane, b, func(from *cuda.Buffer, at int64, to []byte) error { return from.Download(to, at) })
	return b
}

// copy copies between a slab and the GPUs, when they are done. Here it is known how heads and pages are dealt out: heads
// of a page to one group of members after the other, and pages round the members of a group.
func (v *testView) copy(s *kvstore.DevicePages, layer, plane int, slab cpu.Buffer, do func(*cuda.Buffer, int64, []byte) error) {
	if err := s.GPU.Synchronize(); err != nil {
		panic(err)
	}
	bytes := slabBytes(slab)
	page, copied := len(bytes)/v.config.Pages, 0
	for i, p := range s.Parts {
		b := p.Layers[layer][plane].Data
		places := s.Shards()
		groups := len(s.Parts) / places
		first, end, copies := i/places*v.config.KVHeads/groups, (i/places+1)*v.config.KVHeads/groups, 1
		if v.config.ValuesInKeys && groups > v.config.KVHeads { // each head to several members
			copies = groups / v.config.KVHeads
			first, end = i/copies, i/copies+1
		}
		mine, own := (end-first)*page/v.config.KVHeads, 0
		part := make([]byte, b.Len()) // one transfer for all pages of a member
		each := func(copy func(page, part []byte)) {
			own = 0
			for n := i % places; n < v.config.Pages; n += places {
				copy(bytes[n*page+first*page/v.config.KVHeads:][:mine], part[own*mine:][:mine])
				own++
			}
		}
		each(func(page, part []byte) { copy(part, page) })
		if int64(own*mine) != b.Len() {
			panic(fmt.Sprintf("member %d has %d bytes for %d pages of %d", i, b.Len(), own, mine))
		}
		if err := do(b, 0, part); err != nil {
			panic(err)
		}
		each(func(page, part []byte) { copy(page, part) })
		if i%copies == 0 {
			copied += own * mine
		}
	}
	if copied != len(bytes) {
		panic(fmt.Sprintf("the members have %d bytes of %d", copied, len(bytes)))
	}
}

func slabBytes(b cpu.Buffer) []byte {
	return unsafe.Slice((*byte)(b.Ptr), b.Len*b.DType.Size())
}

// poison fills memory with the NaN of an element type, little-endian.
func poison(t attn.DType, bytes []byte) {
	nan := map[attn.DType][]byte{
		attn.Float32:  {0, 0, 0xc0, 0x7f},
		attn.Float16:  {0, 0x7e},
		attn.BFloat16: {0xc0, 0x7f},
		attn.E4M3:     {0x7f},
		attn.Int8:     {0x80},
		attn.Q4:       {16: 0xc0, 17: 0x7f},
	}[t]
	for i := range bytes {
		bytes[i] = nan[i%len(nan)]
	}
}

// UseDriver takes the CUDA driver from another library until the test ends.
func UseDriver(t testing.TB, path string) {
	ongpu.LoadDriver = func() (*cuda.Driver, error) { return cuda.LoadFrom(path) }
	t.Cleanup(func() { ongpu.LoadDriver = cuda.Load })
}

// No test may leave a goroutine behind: the engine's helpers end by themselves,
// and so do Gorgonia's machines when they are closed, but for a lisp machine
// whose run failed, as one that asks for a gradient does, and those that compute
// on a GPU by themselves.
func TestMain(m *testing.M) {
	reftest.PoisonOutputs()
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("gorgonia.org/gorgonia.(*lispMachine).runall"),
		goleak.IgnoreTopFunction("gorgonia.org/gorgonia.(*ExternMetadata).collectWork")) // under the tag cuda
}

// FakeGPU is a GPU that needs none: the driver is a library of the tests, and
// attention is computed by the CPU engine on what that driver calls its memory.
// When the test ends, the GPU is closed if it still is open, and nothing may be
// left of it.
func FakeGPU(t testing.TB) (*device.GPU, *fakedriver.Library) {
	t.Helper()
	return FakeGPUs(t, 1)
}

// FakeGPUs is so many of them, opened as one.
func FakeGPUs(t testing.TB, n int) (*device.GPU, *fakedriver.Library) {
	t.Helper()
	lib := fakedriver.New(t)
	lib.State().Devices = int32(max(n, 2))
	lib.State().Total, lib.State().SMs, lib.State().Shared = 1<<36, 8, 232448
	lib.State().Argument("megakernel_", 8) // its name looks like sizes of arguments
	UseDriver(t, lib.Path)
	UseFakeEngine(t)
	t.Cleanup(func() {
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed", lib.Live(), lib.Defects())
		}
	})
	ordinals := make([]int, n)
	for i := range ordinals {
		ordinals[i] = i
	}
	gpu, err := device.Open(ordinals...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gpu.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
	return gpu, lib
}

// KernelsOf are the entry points of attention that a step's layers launch on a GPU, as it is set.
func KernelsOf(s *Step) (names []string) {
	for _, p := range s.plans {
		d, ok := p.plan.(*kvstore.DevicePlan)
		if !ok {
			continue
		}
		for _, p := range d.Plans() {
			if plan, ok := p.(*attention.Plan); ok {
				names = append(names, plan.Kernels()...)
			}
		}
	}
	return names
}

var errFakeSupport = errors.New("the fake engine has no head dim 13")

// SharePrefixes has new plans of caches in host memory attend to keys that sequences have in common once, however few.
func SharePrefixes(t testing.TB) {
	kvstore.PrefixBytes = 1
	t.Cleanup(func() { kvstore.PrefixBytes = 0 })
}

// Check looks for inconsistencies: of free pages, page tables and reservations, of the numbers of their holders, and of
// sequences, open steps and counts.
func (c *Cache) Check() (err error) {
	const op = "Check"
	if err := c.made(op); err != nil {
		return err
	}
	defer errs.RecoverTo(op, &err)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errs.Errorf(op, ErrClosed, "cache")
	}
	if err := c.check(); err != nil {
		return errs.Errorf(op, ErrInternal, "%v", err)
	}
	return nil
}

// check is Check with the mu held, which guards what is looked at in steps, too.
func (c *Cache) check() error {
	var tables []*pages.Table
	var open []*pages.Reservation
	sequences, tokens := 0, 0
	for s, counted := range c.holders {
		if err := c.checkSequence(s, counted); err != nil {
			return fmt.Errorf("sequence of %d tokens: %w", s.table.Tokens, err)
		}
		tables = append(tables, &s.table)
		if counted {
			sequences, tokens = sequences+1, tokens+s.table.Tokens
		}
	}
	for s := range c.open {
		if err := c.checkStep(s); err != nil {
			return fmt.Errorf("step of %d rows: %w", s.tokens, err)
		}
		for i := range s.reservations {
			open = append(open, &s.reservations[i].Reservation)
		}
	}
	if sequences != c.sequences || tokens != c.tokens {
		return fmt.Errorf("%d sequences have %d tokens, and %d with %d are counted", sequences, tokens, c.sequences, c.tokens)
	}
	return c.pool.Check(tables, open)
}

func (c *Cache) checkSequence(s *Sequence, counted bool) error {
	config, gap := &c.config, s.table.Gap
	if s.cache != c || s.released || s.mark.Problem("", "") != "" {
		return errors.New("it is of another cache, released or a copy")
	}
	if s.step != nil {
		of := func(r reservation) bool { return r.seq == s }
		if !counted || !c.open[s.step] || !slices.ContainsFunc(s.step.reservations, of) {
			return errors.New("it is in a step that is not open or does not have it")
		}
	}
	if gap == (pages.Gap{}) {
		return nil
	}
	if config.Window == 0 || gap.First != config.SinkTokens || gap.End > s.table.Tokens-config.Window+1 {
		return fmt.Errorf("tokens [%d, %d) were given back, and the cache keeps a Window of %d and %d SinkTokens", gap.First, gap.End, config.Window, config.SinkTokens)
	}
	return nil
}

func (c *Cache) checkStep(s *Step) error {
	if s.cache != c || !s.open || len(s.sequences) != len(s.reservations) {
		return fmt.Errorf("it is of another cache or not open, or has %d reservations for %d sequences", len(s.reservations), len(s.sequences))
	}
	row := 0
	for i := range s.reservations {
		r, seq := &s.reservations[i], &s.sequences[i]
		if !c.holders[r.seq] || r.seq.step != s || !r.Of(&r.seq.table, r.tokens) {
			return fmt.Errorf("append %d has a sequence that is not in the step, or the reservation of another one", i)
		}
		gone := c.pool.Shift(&r.seq.table)
		if seq.Row != row || seq.Queries != r.tokens || seq.Before != gone || seq.Keys != r.seq.table.Tokens-gone+r.tokens || !slices.Equal(seq.Pages, r.Pages) {
			return fmt.Errorf("append %d is computed in rows [%d, %d) with %d keys in pages %v, and has %d tokens from row %d on behind %d, %d of which were given back, in pages %v",
				i, seq.Row, seq.Row+seq.Queries, seq.Keys, seq.Pages, r.tokens, row, r.seq.table.Tokens, gone, r.Pages)
		}
		row += r.tokens
	}
	if row > s.tokens {
		return fmt.Errorf("%d rows are given to sequences", row)
	}
	return nil
}
