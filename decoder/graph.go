package decoder

import (
	"errors"
	"fmt"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// graph is the network for a number of rows, with its inputs and its machine. A graph in host memory computes the rows of a
// step alone. A recorded graph on a GPU computes all rows.
type graph struct {
	step   *la.Step
	all    bool // logits of all rows; else of the last row of each append
	tokens indices
	last   *indices
	at     []position
	logits *G.Node
	chosen *G.Node        // the most likely token of each row of the logits; nil: the host chooses
	drawer *drawer        // chooses by random numbers; nil: the host does so
	newest *device.Tensor // the tokens of the last step of ahead
	vm     interface {
		G.VM
		Close() error
	}

	gpu       *device.GPU
	recorded  bool
	runs      int
	recording *device.Recording
	history   *device.Tensor // the tokens that the steps of ahead choose; nil: not needed yet
}

// results are what a run computes for each row, or for the last row of each append.
type results struct {
	logits []float32 // nil: not wanted
	chosen []int     // tokens that a GPU chose, or -1 for logits that have none; nil: the host chooses
	drawn  bool      // chosen by draws; else the most likely tokens
}

// indices is an input of row numbers.
type indices struct {
	data  []int
	short *tensor.Dense  // the same numbers as int32, for a GPU
	there *device.Tensor // nil: host memory
}

// position is an input of positions.
type position struct {
	indices
	offset int
}

// graphConfig has the properties in which the graphs of an engine differ.
type graphConfig struct {
	rows     int
	appends  int  // most appends of a step
	all      bool // logits of all rows
	recorded bool
	prompts  bool // texts have no cached tokens
}

// newGraph builds a graph. Gorgonia distinguishes nodes by hashes of 32 bits, so in one of some thousand graphs of this size
// two nodes are merged. newGraph detects the merge, and another name for the tokens gives all nodes other hashes.
func (e *Engine) newGraph(c graphConfig) (g *graph, err error) {
	for _, tokens := range []string{"tokens", "tokens'", "tokens\""} {
		if g, err = e.buildGraph(tokens, c); err == nil || !errors.Is(err, la.ErrGraph) {
			return g, err
		}
	}
	return nil, err
}

func (e *Engine) buildGraph(name string, c graphConfig) (g *graph, err error) {
	o := &e.options
	g = &graph{all: c.all, gpu: o.Device, recorded: c.recorded}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
		}
	}()
	if g.step, err = e.cache.NewStep(c.rows); err != nil {
		return g, err
	}
	sizes := e.network.Sizes()
	expressions := G.NewGraph()
	b := &Builder{graph: expressions, step: g.step, weights: e.weights, inputs: map[string]*G.Node{}, windows: sizes.Windows, prompts: c.prompts, quantises: o.QuantisedRows}
	if o.several() {
		b.ranks = o.Ranks
	}
	if o.TPLA != nil {
		b.slice = e.slice
	}
	b.attention = []la.Option{la.WithCausal(), la.WithSchedule(o.Schedule), la.WithWorkers(o.Workers)}
	if o.BatchInvariant {
		b.attention = append(b.attention, la.WithBatchInvariance())
		if o.Device == nil {
			b.linear = append(b.linear, nn.WithBatchInvariance())
		}
	}
	if !o.Exact {
		b.attention = append(b.attention, la.WithMixedPrecision())
		b.linear = append(b.linear, nn.WithMixedPrecision())
	}
	// used returns the rows that a run computes.
	used := func(n *G.Node) *G.Node {
		if c.recorded {
			return n
		}
		return b.Node(func() (*G.Node, error) { return g.step.Rows(n) })
	}
	b.positions = func(offset int) (*G.Node, error) {
		g.at = append(g.at, position{offset: offset})
		n, err := g.at[len(g.at)-1].input(expressions, fmt.Sprint("positions", offset), c.rows, g.gpu)
		if err != nil || c.recorded {
			return n, err
		}
		return g.step.Rows(n)
	}
	tokens := b.Node(func() (*G.Node, error) { return g.tokens.input(expressions, name, c.rows, g.gpu) })
	h := e.network.Hidden(b, used(tokens))
	if !c.all {
		g.last = new(indices)
		last := used(b.Node(func() (*G.Node, error) { return g.last.input(expressions, "last", c.appends, g.gpu) }))
		h = b.Node(func() (*G.Node, error) { return nn.Embedding(h, last, nil) })
	}
	g.logits = b.same(e.network.Logits(b, h))
	var keep []*G.Node
	if o.Device != nil && sizes.Vocab <= mostChosen {
		g.chosen, keep = b.Node(func() (*G.Node, error) { return nn.ArgMax(g.logits) }), []*G.Node{g.logits}
		rows := c.rows
		if !c.all {
			rows = c.appends
		}
		if sizes.LogitCap == 0 { // the host applies it
			if g.drawer, err = newDrawer(o.Device, rows, sizes.Vocab); err != nil {
				return g, err
			}
		}
	}
	if b.err != nil {
		return g, b.err
	}
	if o.QuantisedRows && b.quantised == 0 {
		return g, fmt.Errorf("decoder: Options.QuantisedRows, and no linear layer has weights of int8 or leanattention.E4M3: set Options.Weights, or leave it out: %w", ErrUnsupported)
	}
	if err := rewrite.Check(expressions); err != nil {
		return g, err
	}
	if !c.recorded { // a recording's values keep their memory
		if err := rewrite.ShareMemory(expressions, keep...); err != nil {
			return g, err
		}
	}
	g.vm = G.NewTapeMachine(expressions)
	return g, nil
}

// input makes an input of n indices.
func (in *indices) input(g *G.ExprGraph, name string, n int, gpu *device.GPU) (*G.Node, error) {
	in.data = make([]int, n)
	if gpu == nil {
		return input(g, name, tensor.New(tensor.WithShape(n), tensor.WithBacking(in.data))), nil
	}
	in.short = tensor.New(tensor.Of(tensor.Int32), tensor.WithShape(n))
	var err error
	if in.there, err = gpu.UploadReplicated(in.short); err != nil {
		return nil, err
	}
	return input(g, name, in.there), nil
}

// put copies the indices to the GPU.
func (in *indices) put() error {
	if in.there == nil {
		return nil
	}
	short := in.short.Data().([]int32)
	for i, x := range in.data {
		short[i] = int32(x)
	}
	return in.there.CopyFrom(in.short)
}

// run appends tokens to sequences in one step: as many as each append says, in order. A GPU leaves logits that are not
// wanted where they are, and chooses by a draw for each row of the logits; draws may be nil. Logits are valid until the next run.
// After an error the sequences are unchanged.
func (g *graph) run(appends []la.Append, tokens []int, wanted bool, draws []draw) (r results, err error) {
	err = g.step.Run(appends, func() error {
		g.fill(tokens)
		if g.gpu == nil {
			defer g.vm.Reset()
			if err := la.Cause(g.vm.RunAll()); err != nil {
				return err
			}
			r.logits, err = elements[float32](g.logits.Value())
			return err
		}
		if err := g.queue(true); err != nil {
			return err
		}
		if g.chosen != nil {
			chosen, err := g.choose(draws)
			if err != nil {
				return err
			}
			r.drawn = draws != nil
			if r.chosen, err = download(chosen); err != nil {
				return err
			}
		}
		if wanted || g.chosen == nil {
			t, err := there(g.logits)
			if err != nil {
				return err
			}
			all, err := t.Download() // waits for the run
			if err != nil {
				return err
			}
			r.logits, err = elements[float32](all)
			return err
		}
		return nil
	})
	return r, err
}

// choose returns the tokens that a run has chosen, after it has queued their choice by draws.
func (g *graph) choose(draws []draw) (*device.Tensor, error) {
	if draws == nil {
		return there(g.chosen)
	}
	logits, err := there(g.logits)
	if err != nil {
		return nil, err
	}
	return g.drawer.draw(logits, draws)
}

// fill sets the inputs of a step.
func (g *graph) fill(tokens []int) {
	clear(g.tokens.data) // unassigned rows have token 0
	copy(g.tokens.data, tokens)
	var at []int
	if g.at != nil {
		at = g.step.Positions()
	}
	for i := range g.at {
		for j, x := range at {
			g.at[i].data[j] = x + g.at[i].offset
		}
	}
	if g.last != nil {
		clear(g.last.data)
		copy(g.last.data, g.step.Last())
	}
}

// ahead queues steps that append a token to each sequence: the first step the given tokens, or, if tokens is nil, those that the
// step before chose on the GPU; each other step the tokens that the step before chose. draws has the draws of all steps, one step
// after the other, or is nil. wait waits for these steps alone, and returns the tokens that each step chose. It must be called
// once. After an error some of the steps may be done.
func (g *graph) ahead(appends []la.Append, tokens []int, steps int, draws []draw) (wait func() ([]int, error), err error) {
	n := len(appends)
	if g.history == nil {
		if g.history, err = g.gpu.NewTensor(tensor.Int32, mostAhead*g.step.Tokens()); err != nil {
			return nil, err
		}
	}
	for i := range steps {
		given := i == 0 && tokens != nil
		err := g.step.Run(appends, func() error {
			g.fill(tokens)
			if !given {
				if err := copyRows(g.tokens.there, 0, g.newest, n); err != nil {
					return err
				}
			}
			if err := g.queue(given); err != nil {
				return err
			}
			var own []draw
			if draws != nil {
				own = draws[i*n : (i+1)*n]
			}
			var err error
			if g.newest, err = g.choose(own); err != nil {
				return err
			}
			return copyRows(g.history, i*n, g.newest, n)
		})
		if err != nil {
			return nil, err
		}
	}
	download, err := g.history.QueueDownload()
	if err != nil {
		return nil, err
	}
	return func() ([]int, error) {
		all, err := download()
		if err != nil {
			return nil, err
		}
		chosen, err := integers(all)
		return chosen[:min(len(chosen), steps*n)], err
	}, nil
}

// copyRows copies the first n rows of a tensor to the rows of another from at on.
func copyRows(to *device.Tensor, at int, from *device.Tensor, n int) error {
	src, err := from.Rows(0, n)
	if err != nil {
		return err
	}
	dst, err := to.Rows(at, at+n)
	if err != nil {
		return err
	}
	return dst.CopyFrom(src)
}

// there returns the value of a node on a GPU.
func there(n *G.Node) (*device.Tensor, error) { return onGPU(n.Value()) }

// onGPU returns a value on a GPU.
func onGPU(v G.Value) (*device.Tensor, error) {
	t, ok := v.(*device.Tensor)
	if !ok {
		return nil, fmt.Errorf("decoder: the result is a %T: %w", v, ErrUnsupported)
	}
	return t, nil
}

// download waits for the run, and returns the integers of a tensor.
func download(t *device.Tensor) ([]int, error) {
	all, err := t.Download()
	if err != nil {
		return nil, err
	}
	return integers(all)
}

func integers(v G.Value) (all []int, err error) {
	short, err := elements[int32](v)
	for _, x := range short {
		all = append(all, int(x))
	}
	return all, err
}

// elements returns the numbers of a value.
func elements[T any](v G.Value) ([]T, error) {
	x, ok := v.Data().([]T)
	if !ok {
		return nil, fmt.Errorf("decoder: the result is %T, not %T: %w", v.Data(), x, ErrUnsupported)
	}
	return x, nil
}

// queue queues a run on the GPU, which reads the tokens of the host or those that the GPU has. The first run of a recorded
// graph is node by node and allocates the nodes' memory. The second run is recorded, and later runs replay the recording.
func (g *graph) queue(tokens bool) error {
	var inputs []*indices
	if tokens {
		inputs = append(inputs, &g.tokens)
	}
	if g.last != nil {
		inputs = append(inputs, g.last)
	}
	for _, in := range append(inputs, positionsOf(g.at)...) {
		if err := in.put(); err != nil {
			return err
		}
	}
	run := func() error {
		defer g.vm.Reset()
		return la.Cause(g.vm.RunAll())
	}
	if g.recording != nil {
		err := g.recording.Replay()
		if !errors.Is(err, la.ErrState) {
			return err
		}
		if err := g.recording.Close(); err != nil { // the cache has other memory now
			return err
		}
		g.recording, g.runs = nil, 0
	}
	if g.runs++; !g.recorded || g.runs == 1 {
		return run()
	}
	var err error
	if g.recording, err = g.gpu.Record(run); err != nil {
		return err
	}
	return g.recording.Replay()
}

// close frees the machine and the inputs.
func (g *graph) close() error {
	errs := []error{g.recording.Close(), g.drawer.close()}
	if g.vm != nil {
		errs = append(errs, g.vm.Close())
	}
	memory := []*device.Tensor{g.history}
	for _, in := range slices.Concat([]*indices{&g.tokens, g.last}, positionsOf(g.at)) {
		if in != nil {
			memory = append(memory, in.there)
		}
	}
	for _, t := range memory {
		if t == nil {
			continue
		}
		if err := t.Free(); err != nil && !errors.Is(err, la.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func positionsOf(at []position) (all []*indices) {
	for i := range at {
		all = append(all, &at[i].indices)
	}
	return all
}
