package model

import (
	"context"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/dense"

	"gorgonia.org/tensor"
)

// cheap is a Source of numbers that cost little to make, in pages as those of a
// file.
type cheap struct {
	config hf.Config
	memory *arena
}

func newCheap(c hf.Config) cheap {
	size := 0
	for p := range c.Weights() {
		size += lines(4 * tensor.Shape(p.Shape).TotalSize())
	}
	memory := make(arena, size)
	dense.LargePages(memory)
	return cheap{c, &memory}
}

func (c cheap) Config() hf.Config { return c.config }

func (c cheap) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	data, x := take[float32](c.memory, tensor.Shape(shape).TotalSize()), uint32(len(name))
	for i := range data {
		x = 1664525*x + 1013904223
		data[i] = (float32(x>>8)/(1<<24) - 0.5) / 16
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// BenchmarkOPTStep is one token of one sequence, behind 512 to 1023 others, with
// the shipped model, whose weights are float16, and with one of OPT-125m's shape
// in float32; lean-f16 rounds its weights to float16. MB/s counts the weights and
// the live keys and values. The default attention reads its whole capacity, which
// is 1024 tokens here.
func BenchmarkOPTStep(b *testing.B) {
	for _, m := range []struct {
		name string
		load func() (Source, error)
	}{
		{"shipped", func() (Source, error) { return hf.OpenFS("shipped", tiny.Files) }},
		{"125m", func() (Source, error) {
			return newCheap(hf.Config{
				VocabSize: 50272, HiddenSize: 768, WordEmbedProjDim: 768, FFNDim: 3072, Layers: 12, Heads: 12, MaxPositions: 2048,
				DoLayerNormBefore: true, EnableBias: true, LayerNormElementwiseAffine: true, TieWordEmbeddings: true, Activation: "relu",
			}), nil
		}},
	} {
		source, err := m.load()
		if err != nil {
			b.Fatal(err)
		}
		w, err := Load(source)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(m.name+"/lean", func(b *testing.B) { benchmarkStep(b, w, Options{Attention: Lean}) })
		if m.name != "shipped" {
			again, err := m.load() // a source's memory is for one model
			if err != nil {
				b.Fatal(err)
			}
			short, err := LoadAs(again, la.Float16)
			if err != nil {
				b.Fatal(err)
			}
			b.Run(m.name+"/lean-f16", func(b *testing.B) { benchmarkStep(b, short, Options{Attention: Lean}) })
		}
		b.Run(m.name+"/stock-linear", func(b *testing.B) { benchmarkStep(b, w, Options{Linear: StockLinear}) })
		b.Run(m.name+"/default", func(b *testing.B) { benchmarkStep(b, w, Options{Attention: Default, Linear: StockLinear}) })
	}
}

func benchmarkStep(b *testing.B, w *Weights, o Options) {
	const before, capacity = 512, 1024
	o.Capacity = []int{capacity}
	c := w.Config()
	prompt := make([]int, before)
	for i := range prompt {
		prompt[i] = 7 * i % c.VocabSize
	}
	fresh := func() *Decoder {
		d, err := w.NewDecoder(o)
		if err != nil {
			b.Fatal(err)
		}
		if err := d.Prefill(context.Background(), [][]int{prompt}, nil); err != nil {
			b.Fatal(err)
		}
		return d
	}
	d := fresh()
	defer func() { d.Close() }()
	b.ReportAllocs()
	var tokens, attention, total float64
	for b.Loop() {
		if d.Len(0) == capacity {
			b.StopTimer()
			d.Close()
			d = fresh()
			b.StartTimer()
		}
		tokens += float64(d.Len(0) + 1)
		was := d.Stats().Decode
		if err := d.Step([]int{3}); err != nil {
			b.Fatal(err)
		}
		now := d.Stats().Decode
		attention += (now.Attention - was.Attention).Seconds()
		total += (now.Time - was.Time).Seconds()
	}
	perToken := float64(2 * 4 * c.Layers * c.HiddenSize)
	b.SetBytes(w.Bytes() + int64(perToken*tokens/float64(b.N)))
	b.ReportMetric(100*attention/total, "%attention")
}
