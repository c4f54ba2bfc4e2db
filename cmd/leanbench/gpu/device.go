package gpu

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/kernels"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// Device is an open GPU, and memory on it with numbers that are known.
type gpuDevice struct {
	driver *cuda.Driver
	dev    *cuda.Device
	engine *attention.Engine
	stream *cuda.Stream
	marks  []*cuda.Event // between the replays of a turn
	rng    *rand.Rand
	keys   *cuda.Buffer // the arena: host, again and again
	host   []half.Float16
	sink   *cuda.Buffer

	unchecked bool // for tests: nothing computes, so outputs are not compared
}

// prepare is a variable for tests, which have other modules.
var prepare = func(*cuda.Device) error { return nil }

// UseDriver has tests' devices be of another driver, until what it returns is called.
func UseDriver(load func() (*cuda.Driver, error), prep func(*cuda.Device) error) (restore func()) {
	l, p := LoadDriver, prepare
	LoadDriver, prepare = load, prep
	return func() { LoadDriver, prepare = l, p }
}

// gpuMarks is one more than there are replays in a turn.
const gpuMarks = 33

func OpenDevice(driver *cuda.Driver, ordinal int, rng *rand.Rand) (_ *gpuDevice, err error) {
	d := &gpuDevice{driver: driver, rng: rng}
	if d.dev, err = driver.Open(ordinal); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if err := prepare(d.dev); err != nil {
		return nil, err
	}
	if d.engine, err = attention.New(d.dev); err != nil {
		return nil, err
	}
	if d.stream, err = d.dev.NewStream(); err != nil {
		return nil, err
	}
	for range gpuMarks {
		e, err := d.dev.NewEvent(true)
		if err != nil {
			return nil, err
		}
		d.marks = append(d.marks, e)
	}
	d.sink, err = d.dev.NewBuffer(int64(4 * 32 * readerWarps * d.dev.Info().Multiprocessors))
	return d, err
}

// Close gives everything back: the device knows what there is.
func (d *gpuDevice) Close() error { return d.dev.Close() }

// ArenaPeriod is after how many bytes numbers repeat. Keys and their values are
// never a multiple of it apart, so they differ. It is a multiple of the longest
// row.
const ArenaPeriod = 61<<20 + 512

// Fill takes the arena, and fills it with random numbers.
func (d *gpuDevice) Fill(bytes, period int64) (err error) {
	if d.keys != nil { // of an earlier measurement
		if err := d.keys.Close(); err != nil {
			return err
		}
		d.keys = nil
	}
	if d.keys, err = d.dev.NewBuffer(bytes); err != nil {
		return err
	}
	period = min(period, bytes/512*512)
	words := measure.NewArena(measure.StoreF16, int(period), d.rng).Words
	d.host = unsafe.Slice((*half.Float16)(unsafe.Pointer(unsafe.SliceData(words))), period/2)
	block := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), period)
	if err := d.keys.Upload(0, block); err != nil {
		return err
	}
	for have := period; have < bytes; have *= 2 {
		if err := d.stream.Copy(d.keys, have, d.keys, 0, min(have, bytes-have)); err != nil {
			return err
		}
	}
	return d.stream.Synchronize()
}

// row is the arena's numbers from an element on.
func (d *gpuDevice) row(element int64, n int) []half.Float16 {
	at := element % int64(len(d.host))
	return d.host[at : at+int64(n)]
}

// Contender is one of several programs for the same launches.
type Contender struct {
	Name string
	// Replay launches a graph, which is not counted, and then n times, each right
	// behind the one before. It returns the seconds of a launch in each.
	Replay func(n int) ([]float64, error)
	close  func() error
}

// contender captures launches in a graph.
func (d *gpuDevice) contender(name string, launches int, launch func(i int) error, closers ...func() error) (*Contender, error) {
	graph, err := d.stream.Capture(func() error {
		for i := range launches {
			if err := launch(i); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	c := &Contender{Name: name, Replay: func(n int) ([]float64, error) { return d.replay(graph, launches, n) }}
	c.close = func() (err error) {
		for _, f := range append([]func() error{graph.Close}, closers...) {
			err = errors.Join(err, f())
		}
		return err
	}
	return c, nil
}

func (d *gpuDevice) replay(graph *cuda.Graph, launches, n int) ([]float64, error) {
	n = min(n, gpuMarks-1)
	if err := d.stream.Launch(graph); err != nil {
		return nil, err
	}
	for i := range n {
		if err := d.stream.Record(d.marks[i]); err != nil {
			return nil, err
		}
		if err := d.stream.Launch(graph); err != nil {
			return nil, err
		}
	}
	if err := d.stream.Record(d.marks[n]); err != nil {
		return nil, err
	}
	if err := d.stream.Synchronize(); err != nil {
		return nil, err
	}
	times := make([]float64, n)
	for i := range times {
		t, err := d.marks[i+1].Since(d.marks[i])
		if err != nil {
			return nil, err
		}
		// A clock that stood still would make a speed of infinity.
		times[i] = max(t.Seconds(), 1e-9) / float64(launches)
	}
	return times, nil
}

// ceilingParams is what read_ceiling takes.
type ceilingParams struct {
	from          uint64
	bytes         int64
	piece, stages int32
	sink          uint64
}

// Ceilings read the same bytes as attention does, and do nothing else: the best
// of them is the ceiling. There are none before compute capability 9.0.
func (d *gpuDevice) Ceilings(s Shape) (all []*Contender, err error) {
	info := d.dev.Info()
	if info.Capability < 90 {
		return nil, nil
	}
	module, err := d.ceilingModule()
	if err != nil {
		return nil, err
	}
	f, err := module.Function("read_ceiling")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, CloseAll(all))
		}
	}()
	for _, c := range []struct{ piece, stages int }{{16384, 6}, {32768, 3}} {
		shared := c.piece*c.stages + 1024
		if err := f.SetDynamicShared(shared); err != nil {
			return all, err
		}
		var args cuda.Args
		grid := cuda.Grid{Blocks: [3]int{info.Multiprocessors}, Threads: [3]int{32}, Shared: shared}
		one, err := d.contender(fmt.Sprintf("%s, %d x %d KB", measure.ReadCeiling, c.stages, c.piece>>10), s.Launches(), func(i int) error {
			args.Reset()
			cuda.Struct(&args, &ceilingParams{
				from: d.keys.Address() + uint64(d.set(s, i)), bytes: s.Bytes() / int64(c.piece) * int64(c.piece),
				piece: int32(c.piece), stages: int32(c.stages), sink: d.sink.Address(),
			})
			args.Hold(d.keys)
			args.Hold(d.sink)
			return f.Launch(d.stream, grid, &args)
		})
		if err != nil {
			return all, err
		}
		all = append(all, one)
	}
	return all, nil
}

// ceilingModule has the kernels that only read.
func (d *gpuDevice) ceilingModule() (*cuda.Module, error) {
	return d.dev.Module("ceiling", func() ([]byte, error) { return kernels.Image("ceiling", d.dev.Info().Capability) })
}

func CloseAll(contenders []*Contender) (err error) {
	for _, c := range contenders {
		err = errors.Join(err, c.close())
	}
	return err
}

// set is where in the arena the operands of launch i begin, in bytes.
func (d *gpuDevice) set(s Shape, i int) int64 { return int64(i%s.Sets()) * s.Region() }

// gpuProblem is a shape laid out: page tokens of 0 are contiguous keys, as
// tensors (batch, KV heads, keys, dim) have them.
type gpuProblem struct {
	Shape
	geometry attn.Problem
	seqs     []attn.Sequence
	elements int64 // of keys, and of values behind them
}

func layOut(s Shape, pageTokens int, rng *rand.Rand) gpuProblem {
	p := gpuProblem{Shape: s}
	tokens, pages := pageTokens, int64(s.batch())
	var order []int
	if pageTokens == 0 {
		tokens = s.lengths[0] // even shapes only
	} else {
		pages = s.pages(tokens)
		order = rng.Perm(int(pages)) // pages lie anywhere
	}
	p.elements = pages * int64(s.kvHeads*tokens*s.dim)
	rows := attn.Strides{Row: s.heads * s.dim, Head: s.dim}
	key := attn.PageStrides{Page: s.kvHeads * tokens * s.dim, Head: tokens * s.dim, Row: s.dim}
	p.geometry = attn.Problem{
		Heads: s.heads, KVHeads: s.kvHeads, Dim: s.dim, ValueDim: s.dim, Pages: attn.Separate(attn.Float16, s.dim, s.dim, key, key), Query: rows, Out: rows,
		PageTokens: tokens, Scale: 1 / math.Sqrt(float64(s.dim)),
	}
	for i, n := range s.lengths {
		seq := attn.Sequence{Row: i, Queries: 1, Keys: n}
		if pageTokens == 0 {
			seq.Pages = []int32{int32(i)}
		}
		for j := 0; pageTokens > 0 && j < n; j += tokens {
			seq.Pages, order = append(seq.Pages, int32(order[0])), order[1:]
		}
		p.seqs = append(p.seqs, seq)
	}
	return p
}

// attention is ours. Its output is compared before anything is timed.
func (d *gpuDevice) attention(name string, p *gpuProblem) (c *Contender, err error) {
	plan := d.engine.NewPlan()
	closers := []func() error{plan.Close}
	defer func() {
		if err == nil {
			return
		}
		c, err = nil, fmt.Errorf("%s: %w", name, err)
		for _, f := range closers {
			err = errors.Join(err, f())
		}
	}()
	if err := plan.Build(p.geometry, p.seqs, p.batch()); err != nil {
		return nil, err
	}
	if err := plan.Upload(d.stream); err != nil {
		return nil, err
	}
	n := p.batch() * p.heads * p.dim
	queries := make([]half.Float16, n)
	for i := range queries {
		queries[i] = half.FromFloat32(float32(3 * d.rng.NormFloat64()))
	}
	memory := func() (gpu.Memory, error) {
		b, err := d.dev.NewBuffer(int64(2 * n))
		if err == nil {
			closers = append(closers, b.Close)
		}
		return gpu.Memory{Buffer: b, DType: attn.Float16, Len: n}, err
	}
	q, err := memory()
	if err != nil {
		return nil, err
	}
	out, err := memory()
	if err != nil {
		return nil, err
	}
	if err := q.Buffer.Upload(0, unsafe.Slice((*byte)(unsafe.Pointer(&queries[0])), 2*n)); err != nil {
		return nil, err
	}
	c, err = d.contender(name, p.Launches(), func(i int) error {
		k := gpu.Memory{Buffer: d.keys, Offset: d.set(p.Shape, i), DType: attn.Float16, Len: int(p.elements)}
		v := k
		v.Offset += 2 * p.elements
		return plan.Run(d.stream, &attention.Operands{Q: q, Out: out, Pages: attn.InPlanes(k, v)})
	}, closers...)
	if err != nil {
		return nil, err
	}
	closers = []func() error{c.close} // those of before are in it
	return c, d.verify(c, p, queries, out.Buffer)
}

// Times are the seconds of a launch: of every replay, and the medians of
// the rounds.
type Times struct {
	Replays []float64
	Rounds  measure.Samples
}

// gpuTurn is how long replays go on before it is the next one's turn.
const gpuTurn = 6 * time.Millisecond

// Alternate lets contenders take turns, as measure.Alternate does.
func Alternate(rounds, launches int, contenders []*Contender) ([]Times, error) {
	counts := make([]int, len(contenders))
	for i, c := range contenders {
		t, err := c.Replay(1)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.Name, err)
		}
		counts[i] = max(1, min(gpuMarks-1, int(gpuTurn.Seconds()/(t[0]*float64(launches)))))
	}
	all := make([]Times, len(contenders))
	for range rounds {
		for i, c := range contenders {
			t, err := c.Replay(counts[i])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.Name, err)
			}
			all[i].Replays = append(all[i].Replays, t...)
			all[i].Rounds = append(all[i].Rounds, measure.Median(t))
		}
	}
	return all, nil
}
