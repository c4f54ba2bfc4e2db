package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/rewrite"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// gpt2 is the size of a model like GPT-2, and of its batches.
type gpt2 struct{ layers, width, heads, vocabulary, context, batch int }

// gpt2Step is a training step of such a model with random weights and tokens, as a recording: embeddings of tokens, which are also the
// weights of the logits, and of positions; layers with biases, a layer norm before attention and before GELU; a loss in nats a token.
type gpt2Step struct {
	graph     *G.ExprGraph
	weights   G.Nodes
	loss      *G.Node
	machine   G.VM
	recording *device.Recording
	solver    *AdamW
	rows      int
}

func newGPT2Step(t testing.TB, gpu *device.GPU, s gpt2, seed uint64, share, recompute bool) *gpt2Step {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 0))
	m := &gpt2Step{graph: G.NewGraph(), rows: s.batch * s.context}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		noErrors(t, err)
		return n
	}
	input := func(name string, x any, shape ...int) *G.Node {
		v := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
		there, err := gpu.Upload(v)
		noErrors(t, err)
		return G.NewTensor(m.graph, v.Dtype(), len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(there))
	}
	weight := func(name string, deviation, mean float64, shape ...int) *G.Node {
		x := make([]float32, tensor.Shape(shape).TotalSize())
		for i := range x {
			if x[i] = float32(mean); deviation > 0 {
				x[i] += float32(rng.NormFloat64() * deviation)
			}
		}
		n := input(name, x, shape...)
		m.weights = append(m.weights, n)
		return n
	}
	var data [3][]int32 // the token, the next one and the position of each row
	for i := range data {
		data[i] = make([]int32, m.rows)
	}
	scale := make([]float32, m.rows)
	for row := range scale {
		data[0][row], data[2][row], scale[row] = int32(rng.IntN(s.vocabulary)), int32(row%s.context), 1
		data[1][max(row-1, 0)] = data[0][row]
	}
	mixed, deep := WithMixedPrecision(la.BFloat16), 0.02/math.Sqrt(float64(2*s.layers))
	norm := func(name string) Option {
		return WithNorm(weight(name+" gamma", 0, 1, s.width), weight(name+" beta", 0, 0, s.width), 1e-5)
	}
	tokens := weight("tokens", 0.02, 0, s.vocabulary, s.width)
	x := must(Embedding(weight("positions", 0.01, 0, s.context, s.width), input("places", data[2], m.rows), nil))
	x = must(Embedding(tokens, input("seen", data[0], m.rows), x))
	for l := range s.layers {
		from := x
		at := func(name string) string { return fmt.Sprintf("%d %s", l, name) }
		var w, b G.Nodes
		for _, name := range []string{"query", "key", "value"} {
			w, b = append(w, weight(at(name), 0.02, 0, s.width, s.width)), append(b, weight(at(name+" bias"), 0, 0, s.width))
		}
		qkv, err := Linears(x, w, b, mixed, norm(at("norm 1")))
		noErrors(t, err)
		for i, y := range qkv {
			qkv[i] = must(SplitHeads(must(Reshape(must(Convert(y, la.BFloat16)), s.batch, s.context, s.width)), s.heads))
		}
		y := must(MergeHeads(must(la.Attention(qkv[0], qkv[1], qkv[2], la.WithCausal()))))
		y = must(Convert(must(Reshape(y, m.rows, s.width)), tensor.Float32))
		x = must(Linear(y, weight(at("output"), deep, 0, s.width, s.width), weight(at("output bias"), 0, 0, s.width), mixed, WithResidual(x)))
		y = must(Linear(x, weight(at("up"), 0.02, 0, 4*s.width, s.width), weight(at("up bias"), 0, 0, 4*s.width), mixed, norm(at("norm 2"))))
		y = must(Activate(y, GELUTanh))
		x = must(Linear(y, weight(at("down"), deep, 0, s.width, 4*s.width), weight(at("down bias"), 0, 0, s.width), mixed, WithResidual(x)))
		if recompute {
			x = must(Recompute(from, x))
		}
	}
	x = must(LayerNorm(x, weight("norm gamma", 0, 1, s.width), weight("norm beta", 0, 0, s.width), 1e-5))
	m.loss = must(CrossEntropy(x, tokens, nil, input("next", data[1], m.rows), mixed))
	_, err := Backpropagate(G.Nodes{m.loss}, G.Nodes{input("scale", scale, m.rows)}, m.weights)
	noErrors(t, err, rewrite.Check(m.graph))
	if share {
		noErrors(t, rewrite.ShareMemory(m.graph, m.loss))
	}
	m.solver = &AdamW{Rate: 6e-4, Beta1: 0.9, Beta2: 0.95, Epsilon: 1e-8, Decay: 0.1, Clip: 1, Rows: m.rows}
	m.machine = G.NewTapeMachine(m.graph)
	t.Cleanup(func() { noErrors(t, m.machine.Close(), m.recording.Close()) })
	return m
}

func noErrors(t testing.TB, all ...error) {
	t.Helper()
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

// run runs the graph on the machine.
func (m *gpt2Step) run() error {
	m.machine.Reset()
	return la.Cause(m.machine.RunAll())
}

// record runs the graph once, and keeps a second run as a recording.
func (m *gpt2Step) record(t testing.TB, gpu *device.GPU) {
	t.Helper()
	noErrors(t, m.run())
	var err error
	m.recording, err = gpu.Record(m.run)
	noErrors(t, err)
}

// train trains the weights by the gradients of the last run.
func (m *gpt2Step) train() error { return m.solver.Step(G.NodesToValueGrads(m.weights)) }

// lossNow returns the mean loss of the last run.
func (m *gpt2Step) lossNow(t testing.TB) float64 {
	t.Helper()
	v, err := m.loss.Value().(*device.Tensor).Download()
	noErrors(t, err)
	sum := 0.0
	for _, x := range v.Data().([]float32) {
		sum += float64(x)
	}
	return sum / float64(m.rows)
}

// TestGPUStep: a recorded step whose values share memory trains as steps of the machine do, to the bit. So does a step that computes layers
// again.
func TestGPUStep(t *testing.T) {
	gpu := devicetest.Open(t)
	s := gpt2{layers: 2, width: 32, heads: 1, vocabulary: 40, context: 16, batch: 2}
	var losses [3][]float64
	for i := range losses {
		m := newGPT2Step(t, gpu, s, 1, i > 0, i > 1)
		if i > 0 {
			m.record(t, gpu)
		}
		for range 3 {
			if i == 0 {
				noErrors(t, m.run())
			} else {
				noErrors(t, m.recording.Replay())
			}
			losses[i] = append(losses[i], m.lossNow(t))
			noErrors(t, m.train())
		}
	}
	if a, b, c := losses[0], losses[1], losses[2]; !slices.Equal(a, b) || !slices.Equal(a, c) || !(math.Abs(a[0]-math.Log(40)) < 0.5) || !(a[2] < a[0]) {
		t.Errorf("losses %v, of a recording %v, with layers computed again %v", a, b, c)
	}
}

// BenchmarkGPUStep is a training step of GPT-2 125M, 8 sequences of 1024 tokens, everything on the GPU: gradients, clipping by the global
// norm, AdamW. Steps follow each other, or (alone) each waits for the GPU. GiB are what the step takes of the GPU's memory. Values of layers
// stay for the backward pass, or layers are computed again.
func BenchmarkGPUStep(b *testing.B) {
	if os.Getenv("LEANATTENTION_GPU") != "" {
		b.Skip("an emulated GPU needs days")
	}
	b.Run("kept", func(b *testing.B) { benchmarkGPUStep(b, false) })
	b.Run("again", func(b *testing.B) { benchmarkGPUStep(b, true) })
}

func benchmarkGPUStep(b *testing.B, recompute bool) {
	gpu := devicetest.Open(b)
	before, err := gpu.Memory()
	noErrors(b, err)
	begin := time.Now()
	s := gpt2{layers: 12, width: 768, heads: 12, vocabulary: 50257, context: 1024, batch: 8}
	m := newGPT2Step(b, gpu, s, 1, true, recompute)
	built := time.Since(begin)
	m.record(b, gpu)
	step := func(wait bool) {
		noErrors(b, m.recording.Replay(), m.train())
		if wait {
			noErrors(b, gpu.Synchronize())
		}
	}
	step(true)
	first := m.lossNow(b)
	step(true)
	const steps = 20
	start := time.Now()
	for i := range steps {
		step(i == steps-1)
	}
	together := time.Since(start).Seconds() / steps
	var took []float64 // of steps that each wait for the GPU
	for range steps {
		start := time.Now()
		step(true)
		took = append(took, time.Since(start).Seconds())
	}
	slices.Sort(took)
	after, err := gpu.Memory()
	noErrors(b, err)
	b.Logf("built in %.1f s, recorded after %.1f s, loss %.4f and %.4f", built.Seconds(), time.Since(begin).Seconds(), first, m.lossNow(b))
	b.ReportMetric(together*1e3, "ms")
	b.ReportMetric(took[len(took)/2]*1e3, "ms-alone")
	b.ReportMetric(float64(before.Free-after.Free)/(1<<30), "GiB")
	b.ReportMetric(0, "ns/op")
}
