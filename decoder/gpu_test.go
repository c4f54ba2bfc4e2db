package decoder

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// fanWeights has random numbers that depend on the name, of a size that keeps the sums of a linear layer near 1.
type fanWeights struct{}

func (fanWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	data := goldenValues(name, tensor.Shape(shape).TotalSize())
	for i, x := range data {
		if data[i] = x * float32(math.Sqrt(3/float64(shape[len(shape)-1]))); len(shape) == 1 {
			data[i] = 1 + x/2
		}
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// stepsAgainstCPU computes steps of several texts on the CPU and on the GPU: first prompts of different lengths, then tokens one by
// one, of which the third and later ones are of a recording. The difference of a row's logits must be at most bound times as long
// as the CPU's row. (A bound of single logits would be a bound of the largest of many random errors.)
func stepsAgainstCPU(t *testing.T, make func(o Options) (*Engine, error), o Options, texts, steps int, bound float64) {
	t.Helper()
	rng := reftest.Rand(t)
	seed := rng.Uint64()
	var all [2][][]float32
	for i, at := range []*device.GPU{nil, o.Device} {
		o := o
		if o.Device, o.Batch, o.Context, o.Tokens = at, texts, 64, texts*64; at == nil {
			o.Exact = true
		}
		e, err := make(o)
		if err != nil {
			t.Fatal(err)
		}
		vocab, ids := e.network.Sizes().Vocab, rand.New(rand.NewPCG(seed, 1))
		var seqs []*la.Sequence
		for range texts {
			s, err := e.newSequence()
			if err != nil {
				t.Fatal(err)
			}
			seqs = append(seqs, s)
		}
		for step := range steps {
			var appends []la.Append
			var tokens []int
			for j, s := range seqs {
				n := 1
				if step == 0 {
					n = 2 + j%5*3
				}
				for range n {
					tokens = append(tokens, ids.IntN(vocab))
				}
				appends = append(appends, la.Append{Seq: s, Tokens: n})
			}
			var draws []draw
			if step%2 == 1 && e.draws() {
				for j := range texts {
					draws = append(draws, draw{nn.Choice{Temperature: float64(j % 3), TopK: j % 7, TopP: 0.9}, rng.Float64()})
				}
			}
			r, err := e.run(appends, tokens, false, true, draws)
			if err != nil {
				t.Fatal(err)
			}
			for j := range seqs {
				row := slices.Clone(r.logits[j*vocab : (j+1)*vocab])
				all[i] = append(all[i], row)
				switch {
				case r.chosen == nil:
				case r.drawn != (draws != nil):
					t.Fatalf("step %d: drawn is %v", step, r.drawn)
				case r.drawn:
					if want := draws[j].Choose(row, draws[j].random); r.chosen[j] != want {
						t.Errorf("step %d, text %d: token %d is drawn by %+v, want %d", step, j, r.chosen[j], draws[j], want)
					}
				case row[r.chosen[j]] != slices.Max(row):
					t.Errorf("step %d, text %d: token %d is chosen, with the logit %v of %v", step, j, r.chosen[j], row[r.chosen[j]], slices.Max(row))
				}
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
	for i, row := range all[0] {
		var length, diff float64
		for j, x := range row {
			length, diff = math.Hypot(length, float64(x)), math.Hypot(diff, float64(all[1][i][j])-float64(x))
		}
		if !(diff <= bound*length) {
			t.Fatalf("row %d: the logits differ from the CPU's by %v, which are %v long", i, diff, length)
		}
	}
}

// stepNetwork returns a network as small as one may be whose steps are one launch on a GPU.
func stepNetwork(t *testing.T, headDim int) Network {
	t.Helper()
	n, err := ReadNetwork(fmt.Appendf(nil, `{"model_type":"llama","vocab_size":50,"hidden_size":128,"intermediate_size":384,"num_hidden_layers":2,
		"num_attention_heads":%d,"num_key_value_heads":%d,"head_dim":%d,"rms_norm_eps":1e-5,"rope_theta":10000}`, 256/headDim, 128/headDim, headDim), 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestGPUSampledTexts: texts whose tokens the GPU draws are those that the CPU draws, alone, and beside texts with the most likely
// tokens and texts whose tokens the host draws.
func TestGPUSampledTexts(t *testing.T) { testSampledTexts(t, devicetest.Open(t)) }

func TestGPUsSampledTexts(t *testing.T) { testSampledTexts(t, devicetest.OpenSome(t, 2)) }

func testSampledTexts(t *testing.T, gpu *device.GPU) {
	n, prompt := 40, []int{2, 7, 9, 11}
	m := openCheckpoint(t, "../tiny")
	engine := func(o Options) *Engine { return modelEngine(t, m, o) }
	if testing.Short() { // an emulated GPU is slow
		n = 6
		small := stepNetwork(t, 64)
		engine = func(o Options) *Engine { return networkEngine(t, small, fanWeights{}, o) }
	} else {
		prompt = encode(t, m, "Once upon a time", false)
	}
	var requests []Request
	for i, c := range []Sampling{
		{Temperature: 1}, {Temperature: 0.7, TopK: 20, TopP: 0.9}, {}, {Temperature: 1.5, TopP: 0.8}, {Temperature: 0.9, MinP: 0.05}, {Temperature: 0.8, RepetitionPenalty: 1.2},
	} {
		c.Seed = uint64(i + 7)
		requests = append(requests, Request{Prompt: prompt[:3+i%2], Tokens: n, Ends: []int{}, Sampling: c})
	}
	o := Options{Context: 60, Tokens: 1000, Batch: len(requests), Exact: true, Weights: tensor.Float32}
	here := engine(o)
	o.Device, o.Chunk = gpu, 8
	there := engine(o)
	var want [][]int
	for _, r := range requests {
		want = append(want, alone(t, here, r))
	}
	for i, r := range requests[:2] {
		if got := alone(t, there, r); !slices.Equal(got, want[i]) {
			t.Errorf("%+v: %v, want %v", r.Sampling, got, want[i])
		}
	}
	for _, some := range []int{4, 6} { // without and with texts of the host
		texts, err := there.StartAll(context.Background(), requests[:some]...)
		if err != nil {
			t.Fatal(err)
		}
		for i, text := range texts {
			if got, err := ids(text); err != nil || !slices.Equal(got, want[i]) {
				t.Errorf("beside %d others: %+v: %v, %v, want %v", len(texts)-1, requests[i].Sampling, got, err, want[i])
			}
		}
	}
}

// TestGPUSteps: steps of one and two texts, which are single launches if the GPU has kernels for them, and steps of more texts have
// the logits of the CPU.
func TestGPUSteps(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, headDim := range []int{64, 128} {
		n := stepNetwork(t, headDim)
		make := func(o Options) (*Engine, error) { return NewEngine(n, fanWeights{}, o) }
		for _, texts := range []int{1, 2, 4} {
			t.Run(fmt.Sprintf("%d/%d", headDim, texts), func(t *testing.T) {
				stepsAgainstCPU(t, make, Options{Device: gpu, Exact: true, Weights: la.Float16, Cache: la.Float16}, texts, 6, 0.004)
			})
		}
	}
}

// TestGPUBatches: steps of the shipped model, of all sizes that a GPU has kernels for, have the logits of the CPU.
func TestGPUBatches(t *testing.T) { testGPUBatches(t, devicetest.Open(t), []int{2, 6, 16}) }

func TestGPUsBatches(t *testing.T) { testGPUBatches(t, devicetest.OpenSome(t, 2), []int{1, 6}) }

func testGPUBatches(t *testing.T, gpu *device.GPU, sizes []int) {
	m := openCheckpoint(t, "../tiny")
	if testing.Short() {
		sizes = sizes[:2]
	}
	for _, texts := range sizes {
		stepsAgainstCPU(t, m.Engine, Options{Device: gpu, Exact: true, Weights: la.Float16, Cache: la.Float16}, texts, 4, 0.003)
	}
	if !testing.Short() {
		stepsAgainstCPU(t, m.Engine, Options{Device: gpu, Weights: la.Float16, Cache: la.Float16}, 17, 4, 0.03)
	}
}

// TestGPUTypes: with matrices, keys and values of float16, which have other kernels, a GPU has the logits of the CPU. In mixed
// precision, and with keys and values of 8 and 4 bits, they are nearly the same.
func TestGPUTypes(t *testing.T) {
	gpu := devicetest.Open(t)
	for _, m := range goldenOn(t, gpu) {
		if testing.Short() && !slices.Contains([]string{"llama3", "qwen2", "qwen3", "mistral", "gemma2"}, m.Name) {
			continue // an emulated GPU is slow
		}
		t.Run(m.Name, func(t *testing.T) {
			n := m.network(t)
			make := func(o Options) (*Engine, error) {
				return NewEngine(n, goldenWeights{&m, n.(*transformer).norm == unitRMSNorm, tensor.Dtype{}}, o)
			}
			for _, mixed := range []bool{false, true} {
				bound := map[bool]float64{false: 3e-3, true: 3e-2}[mixed]
				stepsAgainstCPU(t, make, Options{Device: gpu, Exact: !mixed, Weights: la.Float16, Cache: la.Float16}, 2, 4, bound)
			}
			types := map[string][]tensor.Dtype{"llama3": {la.E4M3, tensor.Int8, la.Q4}, "gemma2": {la.E4M3, la.Q4}, "gemma3": {tensor.Int8, la.Q4}, "mistral": {la.E4M3, la.Q4}}
			for _, cache := range types[m.Name] { // elements may round to neighbours
				stepsAgainstCPU(t, make, Options{Device: gpu, Exact: true, Weights: la.Float16, Cache: cache}, 2, 4, 0.1)
			}
		})
	}
}

// TestGPUMemory: engines come and go, texts wait and shift, and the GPU's memory is as it was.
func TestGPUMemory(t *testing.T) {
	gpu := devicetest.Open(t)
	used := func() int64 {
		runtime.GC() // a step's schedule is freed when it is garbage
		runtime.GC()
		// An allocation that fails gives the pool's memory back.
		if x, err := gpu.NewTensor(tensor.Float32, 1<<(strconv.IntSize-21)); err == nil {
			err = x.Free()
			t.Log("nothing is given back:", err)
		}
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Used
	}
	n, tokens := stepNetwork(t, 64), 100
	if testing.Short() {
		tokens = 4 // an emulated GPU is slow
	}
	var after int64
	for i := range 3 {
		e, err := NewEngine(n, fanWeights{}, Options{Device: gpu, Weights: la.Float16, Cache: la.Float16, Context: 64, Tokens: 128, Batch: 3})
		if err != nil {
			t.Fatal(err)
		}
		var texts []*Text
		for j := range 4 {
			texts = append(texts, start(t, e, Request{Prompt: []int{5, 6 + j}, Tokens: tokens, Shift: true, Ends: []int{}}))
		}
		for _, text := range texts {
			if got, err := ids(text); len(got) != tokens || err != nil {
				t.Errorf("%d tokens, %v", len(got), err)
			}
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			after = used()
		}
	}
	now := used()
	for began := time.Now(); now > after+after/10 && time.Since(began) < 10*time.Second; now = used() {
		time.Sleep(20 * time.Millisecond) // finalizers run in a goroutine
	}
	if now > after+after/10 {
		t.Errorf("%d bytes are used after a third engine, %d after the second", now, after)
	}
}

// TestGPUsMemory: each of two GPUs has its part of the weights, and of the others only the norms, the biases and the tables.
func TestGPUsMemory(t *testing.T) {
	gpus := devicetest.OpenSome(t, 2)
	m := openCheckpoint(t, "../tiny")
	var all, split int64 // bytes of matrices in float16, and of all weights that are split
	sums, err := (&placement{gpu: gpus}).check(m.Network())
	if err != nil || !sums {
		t.Fatal(sums, err)
	}
	for w := range m.Network().Weights() {
		bytes := int64(4 * tensor.Shape(w.Shape).TotalSize())
		if len(w.Shape) > 1 {
			bytes /= 2
		}
		if all += bytes; w.Split.Axis != Whole {
			split += bytes
		}
	}
	var before [2]int64
	for i := range before {
		free, err := gpus.Memory(i)
		if err != nil {
			t.Fatal(err)
		}
		before[i] = free.Used
	}
	weights, free, err := load(m.Network(), m.files, placement{gpu: gpus, as: la.Float16}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := range before {
		now, err := gpus.Memory(i)
		if err != nil {
			t.Fatal(err)
		}
		// Buffers are up to a quarter larger, and of 256 bytes at least. The table of tokens is the head, too.
		least := split / 2
		most := (all-split/2)*5/4 + int64(len(weights))*256
		if bytes := now.Used - before[i]; bytes < least || bytes > most {
			t.Errorf("GPU %d: %d bytes, not in [%d, %d] of %d", i, bytes, least, most, all)
		}
	}
	if err := free(); err != nil {
		t.Error(err)
	}
}

// TestGPURepeat: the logits of a prompt do not depend on the prompts that the engine computed before.
func TestGPURepeat(t *testing.T) {
	rng := reftest.Rand(t)
	e, err := NewEngine(stepNetwork(t, 64), fanWeights{}, Options{Device: devicetest.OpenSome(t, 1), Weights: la.Float16, Cache: la.Float16, Context: 40, Batch: 2, Tokens: 256})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	logits := func(tokens int) []float32 {
		t.Helper()
		s, err := e.newSequence()
		if err != nil {
			t.Fatal(err)
		}
		all := []int{3, 14, 15, 9, 26, 5, 35, 8, 9, 7}
		r, err := e.run([]la.Append{{Seq: s, Tokens: tokens}}, slices.Repeat(all, 4)[:tokens], false, true, nil)
		if err := errors.Join(err, s.Release()); err != nil {
			t.Fatal(err)
		}
		return slices.Clone(r.logits[:e.network.Sizes().Vocab])
	}
	const few = 5
	first := logits(few)
	for _, most := range []int{few, 8, 32, 40} {
		logits(few + rng.IntN(most-few+1))
		if !slices.Equal(first, logits(few)) {
			t.Fatalf("other logits after a prompt of at most %d tokens", most)
		}
	}
}

// TestGPUsRepeat: three GPUs compute the same bits again.
func TestGPUsRepeat(t *testing.T) {
	gpus := devicetest.OpenSome(t, 3)
	n, err := ReadNetwork([]byte(`{"model_type":"opt","vocab_size":61,"hidden_size":192,"word_embed_proj_dim":192,"ffn_dim":48,"num_hidden_layers":1,
		"num_attention_heads":3,"max_position_embeddings":40}`), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, shard := range []la.Shard{la.ShardHeads, la.ShardContext} {
		var first [][]float32
		for range 2 {
			e, err := NewEngine(n, fanWeights{}, Options{Device: gpus, Weights: la.Float16, Cache: la.Float16, Shard: shard, Batch: 2, Tokens: 256, Exact: true})
			if err != nil {
				t.Fatal(err)
			}
			var appends []la.Append
			for _, tokens := range []int{9, 1} {
				s, err := e.newSequence()
				if err != nil {
					t.Fatal(err)
				}
				appends = append(appends, la.Append{Seq: s, Tokens: tokens})
			}
			var logits [][]float32
			tokens := []int{5, 6, 7, 8, 9, 10, 11, 12, 13, 14}
			for i := range 5 {
				r, err := e.run(appends, tokens, false, true, nil)
				if err != nil {
					t.Fatal(err)
				}
				logits = append(logits, slices.Clone(r.logits[:2*61]))
				appends[0].Tokens, tokens = 1, []int{15 + i, 20 + i}
			}
			if err := e.Close(); err != nil {
				t.Error(err)
			}
			for i := range first {
				if !slices.Equal(first[i], logits[i]) {
					t.Errorf("%v, step %d: other logits", shard, i)
				}
			}
			first = logits
		}
	}
}
