package gpu

import (
	"errors"
	"fmt"
	"math"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const tableMLAGPUs = "Attention of a decode step to latent vectors in bfloat16, with the values' weights, the output projection and the sum, on several GPUs, recorded"

// mlaLayer is a shape on GPUs, the model's width, and how many times as fast two GPUs should be by context and with TPLA; 0: no bar.
type mlaLayer struct {
	mlaShape
	width         int
	context, tpla float64
}

func mlaLayers(quick bool) []mlaLayer {
	deepSeek := mlaShape{8, 32768, 128, 512, 64, 128}
	all := []mlaLayer{{deepSeek, 7168, 1.75, 1.7}}
	if quick {
		return all
	}
	one, few := deepSeek, deepSeek
	one.batch, one.keys, few.heads = 1, 262144, 16
	return append(all, mlaLayer{one, 7168, 1.75, 1.7}, mlaLayer{mlaShape: few, width: 2048})
}

// measureMLAGPUs measures latent attention on several GPUs of this process against one of them, in the ways of measureMLA.
func (s *scaling) measureMLAGPUs(cases []mlaLayer) (err error) {
	gpus, err := s.open()
	defer func() { err = errors.Join(err, closeGPUs(gpus)) }()
	if err != nil {
		return err
	}
	s.report.WriteHead(s.stdout)
	for _, c := range cases {
		if !s.asked(c.String()) {
			continue
		}
		fmt.Fprintln(s.stderr, c)
		if err := s.mlaLayerCase(c, gpus); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		if err := s.save(); err != nil {
			return err
		}
	}
	s.report.WriteTable(s.stdout, tableMLAGPUs)
	s.report.WriteVerdict(s.stdout)
	return nil
}

// mlaWaysOnGPUs are the ways of several GPUs. Each GPU has some tokens of the context, or a part of each latent vector, or all latent vectors
// and some heads.
var mlaWaysOnGPUs = []string{"context over %d GPUs", "TPLA over %d GPUs", "heads over %d GPUs"}

const (
	byContext = iota
	byLatents
	byHeads
)

// mlaLayerCase has one GPU and several GPUs take turns, several in all ways.
func (s *scaling) mlaLayerCase(c mlaLayer, gpus []*device.GPU) (err error) {
	var contenders []measure.Contender
	var bars []float64
	for _, g := range gpus {
		n := len(g.Members())
		for way, bar := range []float64{c.context, c.tpla, 0} {
			name := gpusName(1)
			switch {
			case n == 1 && way > 0:
				continue
			case n > 1:
				name = fmt.Sprintf(mlaWaysOnGPUs[way], n)
			}
			r, err := newMLALayers(c, g, way)
			defer func() { err = errors.Join(err, r.close()) }()
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			contenders, bars = append(contenders, measure.Contender{Name: name, Run: replays(r.gpu, r.recording)}), append(bars, bar*float64(n)/2)
		}
	}
	times, err := measure.Alternate(s.pace, contenders)
	if err != nil {
		return err
	}
	for i, t := range times {
		row := s.report.Row(tableMLAGPUs, c.String(), contenders[i].Name)
		row.Add(measure.LayerMicros, 1e6*t.Median()/recordedLayers, nil)
		if i > 0 {
			row.Add(measure.OverOneGPU, t.Faster(times[0]), measure.Only(bars[i] > 0, measure.AtLeast(bars[i])))
		}
	}
	return nil
}

// recordedLayers is the layers of a recording: as in a model, GPUs fork and join once for several layers.
const recordedLayers = 4

// mlaLayerStep is recorded layers of a decode step. With TPLA, the parts of latent vectors are KV heads, one on each GPU.
type mlaLayerStep struct {
	gpu       *device.GPU
	cache     *la.Cache
	step      *la.Step
	tensors   []*device.Tensor
	vms       []G.VM
	out       *G.Node
	recording *device.Recording
}

func newMLALayers(c mlaLayer, gpu *device.GPU, way int) (r *mlaLayerStep, err error) {
	r = &mlaLayerStep{gpu: gpu}
	const (
		page, chunk = 64, 2048
		replicated  = -1
	)
	// Queries are where a model's layers leave them: each GPU has those of its heads or, with TPLA, those of all heads to its part of latent
	// vectors.
	parts, shard, axis := 1, []la.Shard{la.ShardContext, la.ShardHeads, la.ShardHeads}[way], replicated
	if n := len(gpu.Members()); way == byLatents {
		if c.latent%n != 0 {
			return r, fmt.Errorf("%d elements of a latent vector over %d GPUs: want a divisor", c.latent, n)
		}
		parts, axis = n, 1
	}
	latent := c.latent / parts
	dim := latent + c.rope
	r.cache, err = la.NewCache(la.CacheConfig{Layers: recordedLayers, KVHeads: parts, HeadDim: dim, ValueDim: latent, ValuesInKeys: true, DType: la.BFloat16, PageSize: page,
		Pages: c.batch * (c.keys/page + 2*len(gpu.Members())), Device: gpu, Shard: shard})
	if err != nil {
		return r, err
	}
	there := func(g *G.ExprGraph, name string, as tensor.Dtype, axis, rows, columns int) (*G.Node, error) {
		upload := gpu.UploadReplicated
		if axis != replicated {
			upload = func(x tensor.Tensor) (*device.Tensor, error) { return gpu.UploadSharded(x, axis) }
		}
		d, err := upload(periodic(as, rows, columns))
		if err != nil {
			return nil, err
		}
		r.tensors = append(r.tensors, d)
		return G.NewTensor(g, as, 2, G.WithShape(rows, columns), G.WithName(name), G.WithValue(d)), nil
	}
	// attention returns the attention of rows with some heads for each KV head, of all layers.
	attention := func(rows, heads, queries int) (step *la.Step, all []*G.Node, err error) {
		if step, err = r.cache.NewStep(rows); err != nil {
			return nil, nil, err
		}
		g := G.NewGraph()
		q, err := there(g, "q", tensor.Float32, queries, rows, parts*heads*dim)
		if err != nil {
			return nil, nil, err
		}
		k, err := there(g, "k", tensor.Float32, axis, rows, parts*dim)
		if err != nil {
			return nil, nil, err
		}
		for i := range recordedLayers {
			y, err := la.CachedAttention(q, k, nil, step.Layer(i), la.WithCausal(), la.WithScale(1/math.Sqrt(192)), la.WithMixedPrecision())
			if err != nil {
				return nil, nil, err
			}
			all = append(all, y)
		}
		return step, all, nil
	}
	appends := make([]la.Append, c.batch)
	for i := range appends {
		if appends[i].Seq, err = r.cache.NewSequence(); err != nil {
			return r, err
		}
	}
	fill, all, err := attention(chunk, len(gpu.Members())/parts, []int{replicated, 1, 1}[way])
	if err != nil {
		return r, err
	}
	run := r.runs(all[0].Graph())
	for _, a := range appends {
		for a.Seq.Len() < c.keys {
			if err := fill.Run([]la.Append{{Seq: a.Seq, Tokens: min(chunk, c.keys-a.Seq.Len())}}, run); err != nil {
				return r, err
			}
		}
	}
	for i := range appends {
		appends[i].Tokens = 1
	}
	if r.step, all, err = attention(c.batch, c.heads, 1); err != nil {
		return r, err
	}
	for i, y := range all {
		values, err := there(y.Graph(), fmt.Sprint("values", i), la.BFloat16, 0, parts*c.heads*c.value, latent)
		if err != nil {
			return r, err
		}
		if y, err = nn.HeadLinear(y, values, parts*c.heads, nn.WithMixedPrecision()); err != nil {
			return r, err
		}
		if parts > 1 {
			if y, err = nn.SumParts(y, parts); err != nil {
				return r, err
			}
		}
		project, err := there(y.Graph(), fmt.Sprint("project", i), la.BFloat16, 1, c.width, c.heads*c.value)
		if err != nil {
			return r, err
		}
		options := []nn.Option{nn.WithMixedPrecision()}
		if i > 0 {
			options = append(options, nn.WithResidual(r.out))
		}
		if r.out, err = nn.Linear(y, project, nil, options...); err != nil {
			return r, err
		}
	}
	if err := r.step.Set(appends); err != nil {
		return r, err
	}
	run = r.runs(r.out.Graph())
	if err := run(); err != nil { // nodes have their memory
		return r, err
	}
	r.recording, err = gpu.Record(run)
	return r, err
}

// runs returns the run of a graph.
func (r *mlaLayerStep) runs(g *G.ExprGraph) func() error {
	vm := G.NewTapeMachine(g)
	r.vms = append(r.vms, vm)
	return func() error {
		defer vm.Reset()
		return la.Cause(vm.RunAll())
	}
}

func (r *mlaLayerStep) close() (err error) {
	err = r.recording.Close()
	if r.step != nil {
		err = errors.Join(err, r.step.Rollback())
	}
	for _, vm := range r.vms {
		err = errors.Join(err, vm.Close())
	}
	if r.cache != nil {
		err = errors.Join(err, r.cache.Close())
	}
	for _, d := range r.tensors {
		err = errors.Join(err, d.Free())
	}
	return err
}

// periodic returns a matrix of numbers of about 1/sqrt(columns) or, in float32, about 1.
func periodic(as tensor.Dtype, rows, columns int) *tensor.Dense {
	at := func(i int) float32 { return float32(i*7919%scalePeriod)/500 - 1 }
	if as == tensor.Float32 {
		x := make([]float32, rows*columns)
		for i := range x {
			x[i] = at(i)
		}
		return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))
	}
	x, scale := make([]la.BF16, rows*columns), float32(1/math.Sqrt(float64(columns)))
	for i := range min(len(x), scalePeriod) {
		x[i] = half.BFromFloat64(float64(scale * at(i)))
	}
	for n := scalePeriod; n < len(x); n *= 2 {
		copy(x[n:], x[:n])
	}
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(x))
}
