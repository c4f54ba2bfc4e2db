package llama

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// benchModels are shapes of checkpoints, by their config.json.
var benchModels = []struct {
	name   string
	config Config
}{
	{"Llama-3.2-1B", Config{
		Vocab: 128256, Hidden: 2048, Inner: 8192, Layers: 16, Heads: 32, KVHeads: 8, Eps: 1e-5, Tied: true, Gate: nn.SiLU,
		Rotary: rope.Config{HeadDim: 64, Base: 5e5, Scaling: rope.Llama3{Factor: 32, LowFrequency: 1, HighFrequency: 4, Context: 8192}},
	}},
	{"Llama-3-8B", Config{
		Vocab: 128256, Hidden: 4096, Inner: 14336, Layers: 32, Heads: 32, KVHeads: 8, Eps: 1e-5, Gate: nn.SiLU,
		Rotary: rope.Config{HeadDim: 128, Base: 5e5},
	}},
}

// BenchmarkGPUStep is a decode step of models of Llama's shapes with random weights of float16: a token of each of 1
// and 16 texts of 1024 tokens. us/step is a recorded step in a row of steps, without the download of its
// logits; `share` is the part of the read ceiling that its weights, keys and values make of it. Give it
// -test.benchtime 1x.
func BenchmarkGPUStep(b *testing.B) {
	ceiling := enginetest.Real(b).ReadSpeed(b, 2<<30)
	gpu := devicetest.Open(b)
	for _, m := range benchModels {
		there := map[string]G.Value{}
		weights, read := randomWeights(gpu, m.config, there)
		for _, batch := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/batch=%d", m.name, batch), func(b *testing.B) {
				benchmarkStep(b, m.config, weights, read, gpu, batch, 1024, 256, 50, ceiling)
			})
		}
		for _, w := range there {
			if err := w.(*device.Tensor).Free(); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// randomWeights are weights that are made when they are asked for first; read is how many bytes of them a step
// reads. Matrices of a shape have the same numbers, each in memory of its own.
func randomWeights(gpu *device.GPU, c Config, there map[string]G.Value) (weights Weights, read *int) {
	read = new(int)
	rng := rand.New(rand.NewPCG(1, 2))
	made := map[string]*tensor.Dense{}
	return func(name string, shape ...int) (G.Value, error) {
		if there[name] != nil {
			return there[name], nil
		}
		key := fmt.Sprint(shape)
		if made[key] == nil {
			f := make([]float32, tensor.Shape(shape).TotalSize())
			var backing any = f
			if len(shape) == 1 {
				for i := range f {
					f[i] = 1
				}
			} else {
				block := f[:min(len(f), 1<<16)]
				for i := range block {
					block[i] = float32(rng.NormFloat64() / math.Sqrt(float64(shape[1])))
				}
				for at := len(block); at < len(f); at += len(block) {
					copy(f[at:], block)
				}
				short := make([]la.F16, len(f))
				half.EncodeFloat16(short, f)
				backing = short
			}
			made[key] = tensor.New(tensor.WithShape(shape...), tensor.WithBacking(backing))
		}
		v := made[key]
		t, err := gpu.Upload(v)
		if err != nil {
			return nil, err
		}
		there[name] = t
		if c.Tied || !strings.Contains(name, "embed_tokens") { // of a table some rows are read
			*read += v.Size() * int(v.Dtype().Size())
		}
		return t, nil
	}, read
}

func benchmarkStep(b *testing.B, c Config, weights Weights, read *int, gpu *device.GPU, batch, context, chunk, steps int, ceiling float64) {
	d, err := New(c, weights, Options{Rows: []int{batch, chunk}, Tokens: batch * (context + 2*pageSize), KV: la.Float16, Device: gpu})
	if err != nil {
		b.Fatal(err)
	}
	check := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	var appends []la.Append
	for range batch {
		s, err := d.NewSequence()
		check(err)
		ids := make([]int, chunk)
		for at := 0; at < context; at += chunk {
			for i := range ids {
				ids[i] = (at + 7*i) % c.Vocab
			}
			_, err := d.Step(Text{s, ids})
			check(err)
		}
		appends = append(appends, la.Append{Seq: s, Tokens: 1})
	}
	gr, ids := d.graphs[0], make([]int32, batch)
	tokens := tensor.New(tensor.WithShape(batch), tensor.WithBacking(ids))
	step := func() {
		check(gr.step.Set(appends))
		check(gr.there.CopyFrom(tokens))
		check(gr.queue())
		check(gr.step.Rollback())
	}
	for range 3 { // the first is node by node, and the second is recorded
		step()
	}
	var took time.Duration
	for b.Loop() {
		check(gpu.Synchronize())
		begin := time.Now()
		for range steps {
			step()
		}
		check(gpu.Synchronize())
		took = time.Since(begin) / time.Duration(steps)
	}
	logits, err := gr.result.Download()
	check(err)
	for _, v := range logits.Data().([]float32)[:c.Vocab] {
		if math.IsNaN(float64(v)) {
			b.Fatal("logits are NaN")
		}
	}
	bytes := *read + batch*context*c.Layers*2*c.KVHeads*c.Rotary.HeadDim*2
	b.ReportMetric(took.Seconds()*1e6, "us/step")
	b.ReportMetric(float64(bytes)/1e6, "MB/step")
	b.ReportMetric(float64(bytes)/took.Seconds()/1e9, "GB/s")
	b.ReportMetric(float64(bytes)/took.Seconds()/ceiling, "share")
	b.ReportMetric(0, "ns/op")
	check(d.Close())
}
