package gpu

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const (
	tableLayer = "A layer of a decode step of 12, keys and values in float16 in pages of 64, the rest in float32"

	layerCount = 12
	layerPage  = 64
	layerChunk = 512 // tokens of a prompt that are appended at once
)

// layerShapes are small: what a layer costs beyond its kernels does not grow
// with the context.
func layerShapes() []Shape {
	return []Shape{EvenShape(1, 32, 8, 1024, 128), EvenShape(1, 32, 8, 16384, 128), EvenShape(16, 32, 8, 1024, 128)}
}

// layers measures what a layer costs between layers whose tensors are in host
// memory or on the GPU, through the package and with the driver alone.
func (b *Bench) layers() (err error) {
	size := int64(0)
	for _, s := range layerShapes() {
		size = max(size, layerCount*s.Region())
	}
	if err := b.Device.Fill(size, ArenaPeriod); err != nil {
		return err
	}
	device, err := device.Open(b.Options.device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, device.Close()) }()
	b.Note("a step is Set, %d layers and Rollback; nodes are called as a machine would, without one", layerCount)
	b.Report.WriteHead(b.Stdout)
	for _, s := range layerShapes() {
		fmt.Fprintln(b.Stderr, s)
		if err := b.measureLayer(s, device); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
		if err := b.save(); err != nil {
			return err
		}
	}
	b.Report.WriteTable(b.Stdout, tableLayer)
	return nil
}

func (b *Bench) measureLayer(s Shape, device *device.GPU) (err error) {
	floor, err := b.Device.layerFloor(s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, floor.close()) }()
	bench, err := newLayerStep(s, device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bench.cache.Close()) }()
	contenders := []measure.Contender{
		{Name: "kernels, in a graph", Run: floor.kernels},
		{Name: floorOf + "neighbours on the GPU", Run: measure.Timed(floor.there)},
		{Name: ours + ", neighbours on the GPU", Run: measure.Timed(func() error { return bench.step(true) })},
		{Name: floorOf + "neighbours on the host", Run: measure.Timed(floor.here)},
		{Name: ours + ", neighbours on the host", Run: measure.Timed(func() error { return bench.step(false) })},
		{Name: "of it Set and Rollback", Run: measure.Timed(bench.setOnly)},
	}
	all, err := measure.Alternate(measure.Pace{Rounds: 9, Turn: 20 * time.Millisecond}, contenders)
	if err != nil {
		return err
	}
	b.judgeLayer(s.String(), contenders, all)
	return nil
}

const floorOf = "driver alone, "

// judgeLayer takes figures of a layer down; the kernels' come first, and a
// floor right before what stands on it.
func (b *Bench) judgeLayer(is string, contenders []measure.Contender, all []measure.Samples) {
	for i, c := range contenders {
		us := func(s measure.Samples) float64 { return 1e6 * s.Median() / layerCount }
		r := b.Report.Row(tableLayer, is, c.Name)
		r.Add(measure.LayerMicros, us(all[i]), nil)
		if i == 0 || i == len(contenders)-1 {
			continue
		}
		r.Add(measure.BeyondKernels, us(all[i])-us(all[0]), nil)
		if strings.HasPrefix(c.Name, ours) {
			r.Add(measure.BeyondFloor, us(all[i])-us(all[i-1]), nil)
		}
	}
}

// layerStep is a decode step through the package.
type layerStep struct {
	cache   *la.Cache
	device  *device.GPU
	decode  *la.Step
	appends []la.Append
	in      [2][]G.Value // of the host, and of the GPU
	ops     [2][]G.Op
}

// newLayerStep makes sequences that are one token short of the shape's.
func newLayerStep(s Shape, device *device.GPU) (r *layerStep, err error) {
	r = &layerStep{device: device}
	r.cache, err = la.NewCache(la.CacheConfig{
		Layers: layerCount, KVHeads: s.kvHeads, HeadDim: s.dim, DType: la.Float16, PageSize: layerPage,
		Pages: int(s.pages(layerPage)), Device: device,
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.cache.Close())
		}
	}()
	for range s.lengths {
		seq, err := r.cache.NewSequence()
		if err != nil {
			return nil, err
		}
		r.appends = append(r.appends, la.Append{Seq: seq, Tokens: 1})
	}
	if err := r.prompt(s); err != nil {
		return nil, err
	}
	if r.decode, err = r.cache.NewStep(s.batch()); err != nil {
		return nil, err
	}
	for there := range r.ops {
		if r.ops[there], r.in[there], err = r.layers(r.decode, s.batch(), s.heads, s, there == 1); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// layers are the nodes of a step, and the operands that all of them get.
func (r *layerStep) layers(step *la.Step, rows, heads int, s Shape, there bool) (ops []G.Op, in []G.Value, err error) {
	g := G.NewGraph()
	var nodes [3]*G.Node
	for i, h := range []int{heads, s.kvHeads, s.kvHeads} {
		data := make([]float32, rows*h*s.dim)
		for j := range data {
			data[j] = float32(j*7919%1000)/500 - 1
		}
		x := tensor.New(tensor.WithShape(rows, h*s.dim), tensor.WithBacking(data))
		nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, h*s.dim), G.WithName(fmt.Sprint("x", i)))
		if !there {
			in = append(in, x)
			continue
		}
		y, err := r.device.Upload(x)
		if err != nil {
			return nil, nil, err
		}
		in = append(in, y)
	}
	for l := range layerCount {
		n, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(l), la.WithCausal())
		if err != nil {
			return nil, nil, err
		}
		ops = append(ops, n.Op())
	}
	return ops, in, nil
}

// prompt appends all tokens but the last to every sequence, through nodes of as
// few heads as can be.
func (r *layerStep) prompt(s Shape) error {
	step, err := r.cache.NewStep(layerChunk)
	if err != nil {
		return err
	}
	ops, in, err := r.layers(step, layerChunk, s.kvHeads, s, true)
	if err != nil {
		return err
	}
	for i, a := range r.appends {
		for left := s.lengths[i] - 1; left > 0; left -= layerChunk {
			err := step.Run([]la.Append{{Seq: a.Seq, Tokens: min(left, layerChunk)}}, func() error {
				for _, op := range ops {
					if _, err := op.Do(in...); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return r.device.Synchronize()
}

// step is a decode step, which leaves the sequences as they are.
func (r *layerStep) step(there bool) error {
	where := 0
	if there {
		where = 1
	}
	if err := r.decode.Set(r.appends); err != nil {
		return err
	}
	for _, op := range r.ops[where] {
		if _, err := op.Do(r.in[where]...); err != nil {
			return err
		}
	}
	if err := r.device.Synchronize(); err != nil {
		return err
	}
	return r.decode.Rollback()
}

// setOnly is the part of a step that is done once for all layers.
func (r *layerStep) setOnly() error {
	if err := r.decode.Set(r.appends); err != nil {
		return err
	}
	return r.decode.Rollback()
}

// layerFloor is the same step with the driver alone: one copy there, the kernels,
// one copy back and one wait a layer, or the kernels alone.
type layerFloor struct {
	d       *gpuDevice
	plan    *attention.Plan
	graph   *cuda.Graph
	up      *cuda.Host
	down    *cuda.Host
	in, out *cuda.Buffer
	from    []byte // what goes up, as a neighbour has it
	to      []byte
	p       gpuProblem
	closers []func() error
}

func (d *gpuDevice) layerFloor(s Shape) (_ *layerFloor, err error) {
	f := &layerFloor{d: d, p: layOut(s, layerPage, d.rng), plan: d.engine.NewPlan()}
	f.closers = append(f.closers, f.plan.Close)
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if err := f.plan.Build(f.p.geometry, f.p.seqs, s.batch()); err != nil {
		return nil, err
	}
	if err := f.plan.Upload(d.stream); err != nil {
		return nil, err
	}
	rows := s.batch() * s.dim * 4
	f.from, f.to = make([]byte, rows*(s.heads+2*s.kvHeads)), make([]byte, rows*s.heads)
	if f.up, err = d.dev.NewHost(len(f.from)); err != nil {
		return nil, err
	}
	f.closers = append(f.closers, f.up.Close)
	if f.down, err = d.dev.NewHost(len(f.to)); err != nil {
		return nil, err
	}
	f.closers = append(f.closers, f.down.Close)
	if f.in, err = d.dev.NewBuffer(int64(len(f.from))); err != nil {
		return nil, err
	}
	f.closers = append(f.closers, f.in.Close)
	if f.out, err = d.dev.NewBuffer(int64(len(f.to))); err != nil {
		return nil, err
	}
	f.closers = append(f.closers, f.out.Close)
	if err := f.in.Set(0, 0, f.in.Len()); err != nil {
		return nil, err
	}
	f.graph, err = d.stream.Capture(func() error { return f.launch(0, layerCount) })
	if err != nil {
		return nil, err
	}
	f.closers = append(f.closers, f.graph.Close)
	return f, nil
}

func (f *layerFloor) close() (err error) {
	for i := len(f.closers) - 1; i >= 0; i-- {
		err = errors.Join(err, f.closers[i]())
	}
	return err
}

// launch queues the kernels of layers.
func (f *layerFloor) launch(from, to int) error {
	batch := f.p.batch()
	q := gpu.Memory{Buffer: f.in, DType: attn.Float32, Len: batch * f.p.heads * f.p.dim}
	newK := gpu.Memory{Buffer: f.in, Offset: int64(4 * q.Len), DType: attn.Float32, Len: batch * f.p.kvHeads * f.p.dim}
	newV := newK
	newV.Offset += int64(4 * newK.Len)
	out := q
	out.Buffer = f.out
	for l := from; l < to; l++ {
		k := gpu.Memory{Buffer: f.d.keys, Offset: int64(l) * f.p.Region(), DType: attn.Float16, Len: int(f.p.elements)}
		v := k
		v.Offset += 2 * f.p.elements
		if err := f.plan.Append(f.d.stream, attn.InPlanes(k, v), newK, newV); err != nil {
			return err
		}
		if err := f.plan.Run(f.d.stream, &attention.Operands{Q: q, Out: out, Pages: attn.InPlanes(k, v)}); err != nil {
			return err
		}
	}
	return nil
}

func (f *layerFloor) kernels(n int) (sum time.Duration, err error) {
	for n > 0 {
		times, err := f.d.replay(f.graph, 1, n)
		if err != nil {
			return 0, err
		}
		for _, t := range times {
			sum += time.Duration(t * float64(time.Second))
		}
		n -= len(times)
	}
	return sum, nil
}

func (f *layerFloor) there() error {
	if err := f.launch(0, layerCount); err != nil {
		return err
	}
	return f.d.stream.Synchronize()
}

func (f *layerFloor) here() error {
	for l := range layerCount {
		if err := f.up.Write(0, f.from); err != nil {
			return err
		}
		if err := f.d.stream.Upload(f.in, 0, f.up, 0, len(f.from)); err != nil {
			return err
		}
		if err := f.launch(l, l+1); err != nil {
			return err
		}
		if err := f.d.stream.Download(f.down, 0, f.out, 0, len(f.to)); err != nil {
			return err
		}
		if err := f.d.stream.Synchronize(); err != nil {
			return err
		}
		copy(f.to, f.down.Bytes())
	}
	return nil
}
