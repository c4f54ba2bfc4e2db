package leanattention_test

import (
	"slices"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Forks that share pages are attended to at once on a GPU, in recordings, too, whatever the following steps share.
func TestGPUForks(t *testing.T) {
	la.UseEagerEngine(t)
	testRecordedForks(t, devicetest.Open(t), 2)
}

// Sharded by heads, by context, and by both.
func TestGPUsForks(t *testing.T) {
	la.UseEagerEngine(t)
	t.Run("heads", func(t *testing.T) { testRecordedForks(t, devicetest.OpenSome(t, 2), 2) })
	t.Run("context", func(t *testing.T) { testRecordedForks(t, devicetest.OpenSome(t, 2), 1) })
	if reftest.Every(t) {
		t.Run("both", func(t *testing.T) { testRecordedForks(t, devicetest.OpenSome(t, 4), 2) })
	}
}

func testRecordedForks(t *testing.T, gpu *device.GPU, kvHeads int) {
	rng := reftest.Rand(t)
	const heads, dim, rows, prompt = 4, 64, 6, 70
	opts := []la.Option{la.WithCausal()}
	if len(gpu.Members()) <= kvHeads { // those by context know none of these
		switch rng.IntN(4) {
		case 0:
			opts = append(opts, la.WithRotary(rope.Config{}))
		case 1:
			opts = append(opts, la.WithWindow(prompt-10*rng.IntN(2))) // hides keys of more and more sequences
			if rng.IntN(2) == 0 {
				opts = append(opts, la.WithSinkTokens(3))
			}
		case 2:
			opts = append(opts, la.WithALiBi([]float64{0.5, 0.25, 0.01, -0.1}))
		}
	}
	here, there := newForkedDecoder(t, nil, heads, kvHeads, dim, rows, opts), newForkedDecoder(t, gpu, heads, kvHeads, dim, rows, opts)
	decoders := []*forkedDecoder{here, there}
	random := func() (in [3][]float64) {
		c := reftest.New(rng, reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Queries: []int{rows}, Keys: []int{rows}}, reftest.Normal, reftest.Float32, reftest.Float16)
		return [3][]float64{c.Q, c.K, c.V}
	}
	// A step of some sequences, each of which gets tokens.
	turn := func(tokens map[int]int, how func(d *forkedDecoder) error) {
		t.Helper()
		in := random()
		for _, d := range decoders {
			d.set(t, tokens, in)
			do := how
			if d == here {
				do = (*forkedDecoder).run
			}
			if err := do(d); err != nil {
				t.Fatal(err)
			}
			if err := d.step.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		if err := reftest.Compare(there.result(t), here.result(t), slices.Repeat([]float64{2e-3}, rows*heads*dim), rows, heads*dim); err != nil {
			t.Fatalf("%v: %v", tokens, err)
		}
	}
	fork := func(i, of int) {
		t.Helper()
		for _, d := range decoders {
			d.fork(t, i, of)
		}
	}
	for done := 0; done < prompt; done += rows {
		turn(map[int]int{0: min(rows, prompt-done)}, (*forkedDecoder).run)
	}
	for i := 1; i < rows; i++ {
		fork(i, 0)
	}
	all := func() map[int]int {
		m := map[int]int{}
		for i := range rows {
			m[i] = 1
		}
		return m
	}
	turn(all(), (*forkedDecoder).run)
	if kernels := la.KernelsOf(there.step); !slices.Contains(kernels, "prefix_merge") {
		t.Errorf("forks are attended to by %v", kernels)
	}
	var recording *device.Recording
	turn(all(), func(d *forkedDecoder) (err error) {
		if recording, err = gpu.Record(d.run); err == nil {
			err = recording.Replay()
		}
		return err
	})
	replay := func(*forkedDecoder) error { return recording.Replay() }
	for i := range 24 {
		tokens := all()
		for j := range rows {
			if rng.IntN(4) == 0 {
				delete(tokens, j)
			}
		}
		if len(tokens) == 0 || i == 7 {
			tokens = map[int]int{2: 1} // nobody shares anything
		}
		turn(tokens, replay)
		fork(1+rng.IntN(rows-1), rng.IntN(rows))
	}
	if err := recording.Close(); err != nil {
		t.Fatal(err)
	}
}

// forkedDecoder is a layer on a cache, on the host or on a GPU.
type forkedDecoder struct {
	cache  *la.Cache
	step   *la.Step
	gpu    *device.GPU
	seqs   []*la.Sequence
	in     [3]*device.Tensor
	nodes  [3]*G.Node
	widths [3]int
	out    G.Value
	vm     G.VM
}

func newForkedDecoder(t *testing.T, gpu *device.GPU, heads, kvHeads, dim, rows int, opts []la.Option) *forkedDecoder {
	d := &forkedDecoder{gpu: gpu, widths: [3]int{heads * dim, kvHeads * dim, kvHeads * dim}, seqs: make([]*la.Sequence, rows)}
	d.cache = graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: kvHeads, HeadDim: dim, DType: la.Float16, PageSize: 16, Pages: 80, Device: gpu})
	var err error
	if d.step, err = d.cache.NewStep(rows); err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	for i, width := range d.widths {
		var v G.Value = graphtest.TensorOf(tensor.Float32, make([]float64, rows*width), rows, width)
		if gpu != nil {
			d.in[i] = graphtest.Upload(t, gpu, v.(*tensor.Dense))
			v = d.in[i]
		}
		d.nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]), G.WithValue(v))
	}
	node, err := la.CachedAttention(d.nodes[0], d.nodes[1], d.nodes[2], d.step.Layer(0), opts...)
	if err != nil {
		t.Fatal(err)
	}
	G.Read(node, &d.out)
	d.vm = graphtest.NewTapeMachine(g)
	t.Cleanup(func() { d.vm.Close() })
	if d.seqs[0], err = d.cache.NewSequence(); err != nil {
		t.Fatal(err)
	}
	return d
}

// set gives sequences tokens, in their order.
func (d *forkedDecoder) set(t *testing.T, tokens map[int]int, in [3][]float64) {
	t.Helper()
	var appends []la.Append
	for i, s := range d.seqs {
		if n := tokens[i]; n > 0 {
			appends = append(appends, la.Append{Seq: s, Tokens: n})
		}
	}
	if err := d.step.Set(appends); err != nil {
		t.Fatal(err)
	}
	for i, x := range in {
		v := graphtest.TensorOf(tensor.Float32, x, len(x)/d.widths[i], d.widths[i])
		var err error
		if d.gpu != nil {
			err = d.in[i].CopyFrom(v)
		} else {
			err = G.Let(d.nodes[i], v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (d *forkedDecoder) run() error {
	defer d.vm.Reset()
	return d.vm.RunAll()
}

// fork makes sequence i a fork of another one, or of itself as it was.
func (d *forkedDecoder) fork(t *testing.T, i, of int) {
	t.Helper()
	s, err := d.seqs[of].Fork()
	if err == nil && d.seqs[i] != nil {
		err = d.seqs[i].Release()
	}
	if err != nil {
		t.Fatal(err)
	}
	d.seqs[i] = s
}

func (d *forkedDecoder) result(t *testing.T) []float64 {
	t.Helper()
	if d.gpu != nil {
		return graphtest.Floats(t, graphtest.Download(t, d.out))
	}
	return graphtest.Floats(t, d.out)
}
