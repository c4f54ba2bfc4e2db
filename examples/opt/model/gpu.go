package model

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// gpuWeights are a model's weights in the memory of a GPU, or of several. All decoders there share them.
type gpuWeights struct {
	once    sync.Once
	err     error
	tensors map[string]*device.Tensor
}

// onGPU returns the weights on a GPU, copied at first use.
func (w *Weights) onGPU(gpu *device.GPU) (*gpuWeights, error) {
	w.gpus.Lock()
	if w.gpus.of == nil {
		w.gpus.of = make(map[*device.GPU]*gpuWeights)
	}
	g := w.gpus.of[gpu]
	if g == nil {
		g = &gpuWeights{}
		w.gpus.of[gpu] = g
	}
	w.gpus.Unlock()
	g.once.Do(func() { g.tensors, g.err = w.upload(gpu) })
	if g.err != nil { // another try may find memory
		w.gpus.Lock()
		if w.gpus.of[gpu] == g {
			delete(w.gpus.of, gpu)
		}
		w.gpus.Unlock()
	}
	return g, g.err
}

// upload copies all weights, or none if they don't fit.
func (w *Weights) upload(gpu *device.GPU) (tensors map[string]*device.Tensor, err error) {
	gpus := len(gpu.Members())
	if err := checkFree(gpu, func(i int) (int64, string) {
		n := w.bytesOn(i, gpus)
		return n, fmt.Sprintf("%d MB of weights", n>>20)
	}); err != nil {
		return nil, err
	}
	tensors = make(map[string]*device.Tensor)
	for p := range placing(w.config, w.world, gpus) {
		if w.tensors[p.from] == nil { // another rank's weight
			continue
		}
		t, err := w.place(gpu, &p)
		if err != nil {
			for _, t := range tensors {
				err = errors.Join(err, t.Free())
			}
			return nil, err
		}
		tensors[p.name] = t
	}
	return tensors, nil
}

// input makes a weight an input of a graph.
func (g *gpuWeights) input(b *builder, name string) (*G.Node, error) {
	t, ok := g.tensors[name]
	if !ok {
		return nil, fmt.Errorf("model: no weight %q", name)
	}
	return deviceInput(b.g, name, t), nil
}

func deviceInput(g *G.ExprGraph, name string, t *device.Tensor) *G.Node {
	return G.NewTensor(g, t.Dtype(), len(t.Shape()), G.WithShape(t.Shape()...), G.WithName(name), G.WithValue(t))
}

// gpuGraph is the state of a graph whose values are on a GPU.
type gpuGraph struct {
	gpu    *device.GPU
	inputs []gpuInput
	often  bool    // the graph runs often and is recorded
	chosen *G.Node // a token for each row of the logits; nil: not wanted

	// How tokens are chosen, if not as the most likely ones.
	choices  []nn.Choice
	randoms  []float64
	settings [2]gpuSetting // the same on the GPU

	runs      int
	recording *device.Recording
	result    *device.Tensor // of the last run
}

// gpuInput is indices in host memory and on the GPU.
type gpuInput struct {
	data  []int
	short *tensor.Dense // the same indices as int32
	there *device.Tensor
}

// indices adds an input with the values of data at the time of a run.
func (g *gpuGraph) indices(b *builder, name string, data []int) *G.Node {
	return b.do(func() (*G.Node, error) {
		short := tensor.New(tensor.Of(tensor.Int32), tensor.WithShape(len(data)))
		there, err := g.gpu.UploadReplicated(short)
		if err != nil {
			return nil, err
		}
		g.inputs = append(g.inputs, gpuInput{data, short, there})
		return deviceInput(b.g, name, there), nil
	})
}

// gpuSetting is a tensor that is copied to the GPU after a change.
type gpuSetting struct {
	last  []int32
	there *device.Tensor
}

func (s *gpuSetting) put(t *tensor.Dense) error {
	now := t.Data().([]int32)
	if slices.Equal(now, s.last) {
		return nil
	}
	if err := s.there.CopyFrom(t); err != nil {
		return err
	}
	s.last = now
	return nil
}

// choose adds the choice of a token for each row of logits: the most likely token, or a random one.
func (g *gpuGraph) choose(b *builder, logits *G.Node, random bool) {
	g.chosen = b.do(func() (*G.Node, error) {
		if !random {
			return nn.ArgMax(logits)
		}
		rows := logits.Shape()[0]
		g.choices, g.randoms = make([]nn.Choice, rows), make([]float64, rows)
		var in [2]*G.Node
		for i, t := range []*tensor.Dense{nn.Choices(g.choices), nn.Randoms(g.randoms)} {
			there, err := g.gpu.UploadReplicated(t) // every GPU chooses the same
			if err != nil {
				return nil, err
			}
			g.settings[i] = gpuSetting{t.Data().([]int32), there}
			in[i] = deviceInput(b.g, []string{"choices", "randoms"}[i], there)
		}
		return nn.Sample(logits, in[0], in[1])
	})
}

// runGPU is run on a GPU. The first run is node by node and allocates the nodes' memory. The second run of a graph
// that runs often is recorded, and later runs replay the recording.
func (gr *graph) runGPU(chooses bool) (logits []float32, chosen []int, err error) {
	g := gr.gpu
	if err := g.compute(gr, false); err != nil {
		return nil, nil, err
	}
	// Waits for the run.
	t, err := g.result.Download()
	if err != nil {
		return nil, nil, err
	}
	if !chooses {
		return t.Data().([]float32), nil, nil
	}
	for _, id := range t.Data().([]int32) {
		chosen = append(chosen, int(id))
	}
	return nil, chosen, nil
}

// compute queues a run. With follow its tokens are those that the last run chose, which the host does not wait for.
func (g *gpuGraph) compute(gr *graph, follow bool) error {
	for i := range g.inputs {
		in := &g.inputs[i]
		if i == 0 && follow { // the tokens are the first input
			if err := in.there.CopyFrom(g.result); err != nil {
				return err
			}
			continue
		}
		short := in.short.Data().([]int32)
		for j, x := range in.data {
			short[j] = int32(x)
		}
		if err := in.there.CopyFrom(in.short); err != nil {
			return err
		}
	}
	if g.choices != nil {
		if err := errors.Join(g.settings[0].put(nn.Choices(g.choices)), g.settings[1].put(nn.Randoms(g.randoms))); err != nil {
			return err
		}
	}
	if g.recording != nil {
		err := g.recording.Replay()
		if !errors.Is(err, la.ErrState) {
			return err
		}
		// The cache has other memory now.
		if err := g.recording.Close(); err != nil {
			return err
		}
		g.recording, g.runs = nil, 0
	}
	g.runs++
	defer gr.vm.Reset()
	if !g.often || g.runs == 1 {
		return g.keep(gr, gr.machine())
	}
	recording, err := g.gpu.Record(gr.machine)
	if err := g.keep(gr, err); err != nil {
		return errors.Join(err, recording.Close())
	}
	g.recording = recording
	return recording.Replay()
}

// keep stores the wanted value after a run.
func (g *gpuGraph) keep(gr *graph, err error) error {
	if err != nil {
		return err
	}
	want := gr.logits
	if g.chosen != nil {
		want = g.chosen
	}
	var ok bool
	if g.result, ok = want.Value().(*device.Tensor); !ok {
		return fmt.Errorf("model: the result is a %T", want.Value())
	}
	return nil
}

// continueGPU is Continue on a GPU: the steps are queued one after the other, and the chosen tokens are downloaded at
// the end.
func (d *Decoder) continueGPU(tokens [][]int, steps int) (chosen [][]int, err error) {
	p, batch := d.next, len(d.lengths)
	g := p.graph.gpu
	history, err := g.gpu.NewTensor(tensor.Int32, steps*batch)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, history.Free()) }()
	for i := range p.counts {
		p.counts[i] = 1
	}
	for step := range steps {
		for i := range d.lengths {
			d.draw(i)
		}
		err := d.turn(p, func() error {
			d.fill(p, tokens)
			if err := g.compute(p.graph, step > 0); err != nil {
				return err
			}
			row, err := history.Rows(step*batch, (step+1)*batch)
			if err != nil {
				return err
			}
			return row.CopyFrom(g.result)
		})
		if err != nil {
			return nil, err
		}
	}
	began := time.Now()
	t, err := history.Download()
	if err != nil {
		return nil, err
	}
	p.phase.Time += time.Since(began)
	ids := t.Data().([]int32)
	for step := range steps {
		now := make([]int, batch)
		for i := range now {
			now[i] = int(ids[step*batch+i])
		}
		chosen = append(chosen, now)
	}
	copy(d.chosen, chosen[steps-1])
	return chosen, nil
}

func (g *gpuGraph) close() error {
	errs := []error{g.recording.Close()}
	free := func(t *device.Tensor) {
		if t == nil {
			return
		}
		if err := t.Free(); err != nil && !errors.Is(err, la.ErrClosed) {
			errs = append(errs, err)
		}
	}
	for _, in := range g.inputs {
		free(in.there)
	}
	for _, s := range g.settings {
		free(s.there)
	}
	return errors.Join(errs...)
}
