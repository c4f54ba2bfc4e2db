package llama

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Decoder is a model that reads and writes texts, several in each step.
type Decoder struct {
	cache  *la.Cache
	vocab  int
	cap    float64 // soft cap of logits; 0: none
	gpu    *device.GPU
	greedy bool
	graphs []*graph // the smallest first
}

// Options says where a decoder computes, and how much it holds.
type Options struct {
	// Rows is the numbers of rows of the graphs, at least one; a step takes the smallest graph with enough rows. A
	// graph of few rows is for decode, one of many rows for prompts.
	Rows []int
	// Tokens is the largest number of tokens of all texts together. If all layers have a window, as in Mistral,
	// tokens before the window do not count, and a text has no limit.
	Tokens int
	// KV is the type of keys and values in the cache: tensor.Float32, which is also the default, Float16 or BFloat16.
	KV tensor.Dtype
	// Device is a GPU; nil: the CPU.
	Device *device.GPU
	// Mixed allows rounding operands to the type of 16-bit weights and keys if that is faster: see WithMixedPrecision
	// of both packages.
	Mixed bool
	// Schedule is the schedule of attention; the zero value is stream-K.
	Schedule la.Schedule
	// Greedy makes a step choose the most likely tokens where it computes logits: Next and Continue replace Step. On
	// a GPU only a few bytes are downloaded then, and the host waits for no token.
	Greedy bool
}

// Text is tokens that a step reads for a sequence.
type Text struct {
	Seq *la.Sequence
	IDs []int
}

const pageSize = 16

// check returns the error of invalid options, with the field.
func (o *Options) check(c *Config, weights Weights) error {
	type number struct {
		name string
		n    int
	}
	positive := []number{
		{"Config.Vocab", c.Vocab}, {"Config.Hidden", c.Hidden}, {"Config.Inner", c.Inner}, {"Config.Layers", c.Layers},
		{"Config.Heads", c.Heads}, {"Config.KVHeads", c.KVHeads}, {"Config.Rotary.HeadDim", c.Rotary.HeadDim}, {"Options.Tokens", o.Tokens},
	}
	for i, n := range o.Rows {
		positive = append(positive, number{fmt.Sprintf("Options.Rows[%d]", i), n})
	}
	for _, x := range positive {
		if x.n < 1 {
			return fmt.Errorf("llama: %s is %d, less than 1: %w", x.name, x.n, la.ErrOption)
		}
	}
	for _, x := range []struct {
		name string
		x    float64
	}{{"QueryScalar", c.QueryScalar}, {"ScoreCap", c.ScoreCap}, {"LogitCap", c.LogitCap}} {
		if !(x.x >= 0) || math.IsInf(x.x, 1) {
			return fmt.Errorf("llama: Config.%s is %v, neither 0 nor a finite number above: %w", x.name, x.x, la.ErrOption)
		}
	}
	for i, n := range c.Windows {
		if n < 0 {
			return fmt.Errorf("llama: Config.Windows[%d] is %d, less than 0: %w", i, n, la.ErrOption)
		}
	}
	switch {
	case len(o.Rows) == 0:
		return fmt.Errorf("llama: Options.Rows is empty: it has the rows of each graph, and a decoder needs one graph at least: %w", la.ErrOption)
	case weights == nil:
		return fmt.Errorf("llama: weights is nil: %w", la.ErrOption)
	case c.Windows != nil && len(c.Windows) != c.Layers:
		return fmt.Errorf("llama: Config.Windows is of %d layers, and Config.Layers %d: %w", len(c.Windows), c.Layers, la.ErrOption)
	case c.Heads%c.KVHeads != 0:
		return fmt.Errorf("llama: Config.Heads is %d, no multiple of Config.KVHeads, %d: %w", c.Heads, c.KVHeads, la.ErrOption)
	}
	return nil
}

// New makes a decoder. An invalid argument is an error that names its field.
func New(c Config, weights Weights, o Options) (d *Decoder, err error) {
	if err := o.check(&c, weights); err != nil {
		return nil, err
	}
	d = &Decoder{vocab: c.Vocab, cap: c.LogitCap, gpu: o.Device, greedy: o.Greedy}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
			d = nil
		}
	}()
	d.cache, err = la.NewCache(la.CacheConfig{
		Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.Rotary.HeadDim, DType: o.KV, Device: o.Device,
		PageSize: pageSize, Pages: (o.Tokens-1)/pageSize + 1, Window: c.window(),
		Shard: la.ShardHeads, // of several GPUs: layers have WithRotary, which a cache by context lacks
	})
	if err != nil {
		return d, err
	}
	for i, rows := range slices.Sorted(slices.Values(o.Rows)) {
		g, err := newGraph(c, weights, d.cache, rows, i == 0, o)
		if err != nil {
			return d, err
		}
		d.graphs = append(d.graphs, g)
	}
	return d, nil
}

// window returns the largest window of all layers; 0: some layer sees all keys.
func (c *Config) window() int {
	if len(c.Windows) == 0 || slices.Min(c.Windows) == 0 {
		return 0
	}
	return slices.Max(c.Windows)
}

// Close frees all resources.
func (d *Decoder) Close() (err error) {
	for _, g := range d.graphs {
		err = errors.Join(err, g.recording.Close(), g.machine.Close())
	}
	if d.cache != nil {
		err = errors.Join(err, d.cache.Close())
	}
	return err
}

// NewSequence returns an empty text.
func (d *Decoder) NewSequence() (*la.Sequence, error) { return d.cache.NewSequence() }

// Step reads tokens of texts, and returns the logits after each token: for each text and token, Vocab numbers.
func (d *Decoder) Step(texts ...Text) (logits [][][]float32, err error) {
	if d.greedy {
		return nil, fmt.Errorf("llama: a step of a greedy decoder has no logits: %w", la.ErrOption)
	}
	all, err := d.run(texts)
	if err != nil {
		return nil, err
	}
	rows := all.([]float32)
	for _, t := range texts {
		var own [][]float32
		for range t.IDs {
			d.softCap(rows[:d.vocab])
			own, rows = append(own, rows[:d.vocab]), rows[d.vocab:]
		}
		logits = append(logits, own)
	}
	return logits, nil
}

// run runs a step, and returns the graph's result for the rows of all texts in order.
func (d *Decoder) run(texts []Text) (rows any, err error) {
	var appends []la.Append
	var ids []int
	for _, t := range texts {
		appends = append(appends, la.Append{Seq: t.Seq, Tokens: len(t.IDs)})
		ids = append(ids, t.IDs...)
	}
	g, err := d.graph(len(ids))
	if err != nil {
		return nil, err
	}
	return g.run(appends, ids)
}

// graph returns the smallest graph with enough rows.
func (d *Decoder) graph(rows int) (*graph, error) {
	for _, g := range d.graphs {
		if rows <= g.step.Tokens() {
			return g, nil
		}
	}
	most := d.graphs[len(d.graphs)-1].step.Tokens()
	return nil, fmt.Errorf("llama: a step of %d tokens, and the largest graph of Options.Rows has %d rows: %w", rows, most, la.ErrShape)
}

// softCap bounds logits: x becomes cap tanh(x/cap). It runs on the host, since there is no tanh node on a GPU. A
// greedy graph needs no cap, which keeps the order of logits.
func (d *Decoder) softCap(logits []float32) {
	if d.cap == 0 {
		return
	}
	for i, x := range logits {
		logits[i] = float32(d.cap * math.Tanh(float64(x)/d.cap))
	}
}

// graph is the decoder for a number of rows.
type graph struct {
	step    *la.Step
	machine interface {
		G.VM
		Close() error
	}
	ids       []int // tokens: the memory of the input on the host
	there     *device.Tensor
	out       *G.Node // logits, or tokens of a greedy decoder
	gpu       *device.GPU
	often     bool           // it is recorded
	result    *device.Tensor // of the last run on the GPU
	recording *device.Recording
}

// newGraph builds a graph for a number of rows. A graph that runs often is recorded on a GPU. Other graphs share
// memory there, since many rows take much.
func newGraph(c Config, weights Weights, cache *la.Cache, rows int, often bool, o Options) (gr *graph, err error) {
	gpu := o.Device
	gr = &graph{gpu: gpu, often: often}
	if gr.step, err = cache.NewStep(rows); err != nil {
		return nil, err
	}
	g := G.NewGraph()
	var tokens *G.Node
	if gr.ids = make([]int, rows); gpu == nil {
		tokens = input(g, "tokens", tensor.New(tensor.WithShape(rows), tensor.WithBacking(gr.ids)))
		if tokens, err = gr.step.Rows(tokens); err != nil { // a run computes the rows of texts alone
			return nil, err
		}
	} else {
		if gr.there, err = gpu.NewTensor(tensor.Int32, rows); err != nil {
			return nil, err
		}
		tokens = input(g, "tokens", gr.there)
	}
	b := &builder{c: c, weights: weights, g: g, step: gr.step, mixed: o.Mixed, schedule: o.Schedule}
	if gr.out, err = b.logits(tokens); err != nil {
		return nil, err
	}
	if o.Greedy {
		if gr.out, err = nn.ArgMax(gr.out); err != nil {
			return nil, err
		}
	}
	if err := rewrite.Check(g); err != nil {
		return nil, err
	}
	if !often {
		if err := rewrite.ShareMemory(g); err != nil {
			return nil, err
		}
	}
	gr.machine = G.NewTapeMachine(g)
	return gr, nil
}

// run runs a step and returns the result for its rows.
func (gr *graph) run(appends []la.Append, ids []int) (rows any, err error) {
	err = gr.step.Run(appends, func() (err error) {
		rows, err = gr.compute(ids)
		return err
	})
	return rows, err
}

func (gr *graph) compute(ids []int) (rows any, err error) {
	clear(gr.ids) // unassigned rows have token 0
	copy(gr.ids, ids)
	if gr.gpu == nil {
		defer gr.machine.Reset()
		if err := la.Cause(gr.machine.RunAll()); err != nil {
			return nil, err
		}
		return gr.out.Value().Data(), nil
	}
	if err := gr.put(gr.ids); err != nil {
		return nil, err
	}
	if err := gr.queue(); err != nil {
		return nil, err
	}
	t, err := gr.result.Download() // waits for the run
	if err != nil {
		return nil, err
	}
	return t.Data(), nil
}

// put copies tokens to the GPU.
func (gr *graph) put(ids []int) error {
	short := make([]int32, len(ids))
	for i, id := range ids {
		short[i] = int32(id)
	}
	return gr.there.CopyFrom(tensor.New(tensor.WithShape(len(short)), tensor.WithBacking(short)))
}

// queue queues a run on the GPU. The first run of a graph that runs often is node by node and allocates the nodes'
// memory. The second run is recorded, and later runs replay the recording.
func (gr *graph) queue() (err error) {
	run := func() error {
		defer gr.machine.Reset()
		err := la.Cause(gr.machine.RunAll())
		if err == nil {
			gr.result = gr.out.Value().(*device.Tensor)
		}
		return err
	}
	if gr.result == nil || !gr.often {
		return run()
	}
	if gr.recording == nil {
		if gr.recording, err = gr.gpu.Record(run); err != nil {
			return err
		}
	}
	err = gr.recording.Replay()
	if errors.Is(err, la.ErrState) { // the schedule has another shape
		err = errors.Join(gr.recording.Close(), run())
		gr.recording = nil
	}
	return err
}
