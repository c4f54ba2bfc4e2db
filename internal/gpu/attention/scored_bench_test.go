package attention

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/variant"
)

// benchStep is a step of equal sequences. If page is 0, a sequence is one page.
type benchStep struct{ batch, queries, heads, kv, keys, dim, page int }

// benchVariant is a benchStep with other features.
type benchVariant struct {
	name  string
	keys  int
	spoil func(g *attn.Problem)
	few   bool // by the decode kernel alone
	wide  bool // float32 queries and outputs
}

// BenchmarkGPUScores compares decode with masks and score modifications to plain decode, alternating: the median of 15
// graphs of 8 launches each. of-plain is the speed relative to plain decode.
func BenchmarkGPUScores(b *testing.B) {
	m := realGPU(b)
	for _, c := range []benchStep{
		{1, 1, 32, 8, 1024, 64, 0}, {1, 1, 32, 8, 8192, 128, 0}, {16, 1, 32, 8, 1024, 128, 0}, {6, 1, 48, 48, 16384, 64, 0}, {16, 1, 32, 8, 8192, 128, 0},
		{64, 1, 64, 8, 4096, 128, 0}, {8, 1, 32, 8, 65536, 128, 16}, {8, 1, 32, 8, 65536, 64, 16}, {16, 1, 32, 32, 4096, 128, 16},
		{1, 16, 32, 8, 8192, 128, 0}, {8, 16, 32, 8, 8192, 128, 16},
	} {
		m.benchmarkVariants(b, c, []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(g *attn.Problem) {}},
			{name: "window of all", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = c.keys }},
			{name: "cap", keys: c.keys, spoil: func(g *attn.Problem) { g.Cap = 30 }},
			{name: "ALiBi", keys: c.keys, spoil: func(g *attn.Problem) { g.Slopes = attn.NewSlopes(slices.Repeat([]float64{0.25}, c.heads)) }},
			{name: "bias", keys: c.keys, spoil: func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: c.keys} }},
			{name: "tree", keys: c.keys, spoil: func(g *attn.Problem) { g.Tree = true }},
			{name: "sinks", keys: c.keys, spoil: func(g *attn.Problem) { g.Sinks = true }},
			{name: "1024 keys", keys: 1024, spoil: func(g *attn.Problem) {}},
			{name: "window 1024", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = 1024 }},
			{name: "window 1020, 4 sink tokens", keys: c.keys, spoil: func(g *attn.Problem) { g.Window, g.SinkTokens = 1020, 4 }},
		})
	}
}

// BenchmarkGPUWritten compares variants of a user with built-in changes and masks, and with plain attention: decode, prompts and chunks.
func BenchmarkGPUWritten(b *testing.B) {
	nvrtc.ForTest(b)
	m := realGPU(b)
	written := func(score, visible string) func(g *attn.Problem) {
		v, err := variant.New(variant.Source{Score: score, Visible: visible, Params: map[string]float64{"cap": 30, "slope": 0.25, "window": 1024}})
		noError(b, err)
		return func(g *attn.Problem) { g.Variant, g.QueryType = v, attn.Float16 }
	}
	window := func(g *attn.Problem) { g.Window = 1024 }
	notCausal := func(spoil func(g *attn.Problem)) func(g *attn.Problem) {
		return func(g *attn.Problem) { spoil(g); g.Causal = false }
	}
	for _, c := range []benchStep{
		{1, 1, 32, 8, 8192, 128, 0}, {16, 1, 32, 8, 8192, 128, 0}, {6, 1, 48, 48, 16384, 64, 0}, {8, 1, 32, 8, 65536, 128, 16}, {1, 16, 32, 8, 8192, 128, 0},
		{16, 1024, 32, 8, 1024, 128, 0}, {4, 4096, 32, 8, 4096, 128, 0}, {1, 16384, 32, 8, 16384, 128, 0}, {4, 4096, 32, 32, 4096, 64, 0}, {1, 512, 32, 8, 32768, 128, 16},
	} {
		m.benchmarkVariants(b, c, []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(g *attn.Problem) {}},
			{name: "cap", keys: c.keys, spoil: func(g *attn.Problem) { g.Cap = 30 }},
			{name: "cap, written", keys: c.keys, spoil: written("cap*tanh(score/cap)", "")},
			{name: "ALiBi", keys: c.keys, spoil: func(g *attn.Problem) { g.Slopes = attn.NewSlopes(slices.Repeat([]float64{0.25}, c.heads)) }},
			{name: "ALiBi, written", keys: c.keys, spoil: written("score + slope*(key-query)", "")},
			{name: "window", keys: c.keys, spoil: window},
			{name: "window, written", keys: c.keys, spoil: notCausal(written("", "key <= query && query-key < window"))},
			{name: "causal, written", keys: c.keys, spoil: notCausal(written("", "key <= query"))},
			{name: "half of the blocks, written", keys: c.keys, spoil: written("", "div(key, 256) % 2 == 0")},
		})
	}
}

// BenchmarkGPUPrefillScores is BenchmarkGPUScores for prompts and chunks, by the chosen kernel and by the decode
// kernel.
func BenchmarkGPUPrefillScores(b *testing.B) {
	m := realGPU(b)
	for _, c := range []benchStep{
		{16, 1024, 32, 8, 1024, 128, 0}, {4, 4096, 32, 8, 4096, 128, 0}, {1, 16384, 32, 8, 16384, 128, 0}, {4, 4096, 32, 32, 4096, 64, 0}, {4, 4096, 16, 8, 4096, 256, 0},
		{1, 512, 32, 8, 32768, 128, 16}, {8, 16, 32, 8, 8192, 128, 16},
	} {
		variants := []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(g *attn.Problem) {}},
			{name: "window of all", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = c.keys }},
			{name: "cap", keys: c.keys, spoil: func(g *attn.Problem) { g.Cap = 30 }},
			{name: "ALiBi", keys: c.keys, spoil: func(g *attn.Problem) { g.Slopes = attn.NewSlopes(slices.Repeat([]float64{0.25}, c.heads)) }},
			{name: "bias", keys: c.keys, spoil: func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: c.keys} }},
			{name: "sinks", keys: c.keys, spoil: func(g *attn.Problem) { g.Sinks = true }},
			{name: "window 1024", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = 1024 }},
			{name: "window 1020, 4 sink tokens", keys: c.keys, spoil: func(g *attn.Problem) { g.Window, g.SinkTokens = 1020, 4 }},
			{name: "queries of float32, rounded", keys: c.keys, wide: true, spoil: func(g *attn.Problem) { g.Mixed = true }},
			{name: "queries of float32, rounded, window of all", keys: c.keys, wide: true, spoil: func(g *attn.Problem) { g.Mixed, g.Window = true, c.keys }},
			{name: "queries of float32, cap", keys: c.keys, wide: true, spoil: func(g *attn.Problem) { g.Cap = 30 }},
			{name: "queries of float32", keys: c.keys, wide: true, spoil: func(g *attn.Problem) {}},
		}
		if c.queries <= attn.MaxTree {
			variants = append(variants, benchVariant{name: "tree", keys: c.keys, spoil: func(g *attn.Problem) { g.Tree = true }})
		}
		for _, v := range variants[1:8] {
			v.name, v.few = v.name+", decode kernel", true
			variants = append(variants, v)
		}
		m.benchmarkVariants(b, c, variants)
	}
}

// BenchmarkGPUInvariant compares steps with and without batch invariance, alternating, with several sizes of LeanTiles.
func BenchmarkGPUInvariant(b *testing.B) {
	m := realGPU(b)
	invariant := func(tile int) func(g *attn.Problem) {
		return func(g *attn.Problem) { g.Invariant, g.TileTokens = true, tile }
	}
	for _, c := range []benchStep{
		{1, 1, 32, 8, 1024, 128, 16}, {1, 1, 32, 8, 16384, 128, 16}, {1, 1, 32, 8, 17000, 128, 16}, {1, 1, 32, 8, 65536, 128, 16}, {1, 1, 32, 8, 131072, 128, 16},
		{8, 1, 32, 8, 1024, 128, 16}, {8, 1, 32, 8, 16384, 128, 16}, {8, 1, 32, 8, 65536, 128, 16}, {64, 1, 32, 8, 4096, 128, 16}, {64, 1, 32, 8, 16384, 128, 16},
		{8, 1, 32, 8, 16384, 128, 0}, {8, 1, 64, 8, 16384, 128, 16}, {8, 1, 8, 8, 16384, 128, 16}, {8, 1, 12, 12, 16384, 64, 16}, {8, 4, 32, 8, 16384, 128, 16}, {1, 512, 32, 8, 4096, 128, 16},
	} {
		m.benchmarkVariants(b, c, []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(g *attn.Problem) {}},
			{name: "with masks", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = c.keys }},
			{name: "invariant", keys: c.keys, spoil: invariant(0)},
			{name: "invariant, 128", keys: c.keys, spoil: invariant(128)},
			{name: "invariant, 512", keys: c.keys, spoil: invariant(512)},
			{name: "invariant, 1024", keys: c.keys, spoil: invariant(1024)},
		})
	}
}

// benchmarkVariants runs variants of a step, alternating, and compares them with the first.
func (m *machine) benchmarkVariants(b *testing.B, c benchStep, variants []benchVariant) {
	b.Run(fmt.Sprintf("b%d_q%d_h%d_%d_n%d_d%d_p%d", c.batch, c.queries, c.heads, c.kv, c.keys, c.dim, c.page), func(b *testing.B) {
		page := c.page
		if page == 0 {
			page = c.keys
		}
		d := c.dim
		g := attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: d, ValueDim: d, Pages: attn.Separate(attn.Float16, d, d, attn.PageStrides{Page: c.kv * page * d, Head: page * d, Row: d}, attn.PageStrides{}), PageTokens: page, Scale: 0.1, Mask: attn.Mask{Causal: true},
			Query: attn.Strides{Row: c.heads * d, Head: d}, Out: attn.Strides{Row: c.heads * d, Head: d}, LSE: attn.Strides{Row: c.heads, Head: 1},
		}
		g.Pages.Planes[1].At = g.Pages.Planes[0].At
		tree := make(attn.Tree, min(c.queries, attn.MaxTree)) // with branches of two
		for i := range tree {
			if tree[i] = 1 << i; i > 0 {
				tree[i] |= tree[(i-1)/2]
			}
		}
		sequences := func(keys int, trees bool) (seqs []attn.Sequence) {
			for i := range c.batch {
				s := attn.Sequence{Row: i * c.queries, Queries: c.queries, Keys: keys}
				if trees {
					s.Tree = tree
				}
				for j := range attn.Ceil(keys, page) {
					s.Pages = append(s.Pages, int32(j*c.batch+i))
				}
				seqs = append(seqs, s)
			}
			return seqs
		}
		rng := rand.New(rand.NewPCG(1, 2))
		memory := func(n int, dtype attn.DType) gpu.Memory { return m.noise(b, rng, n, dtype) }
		rows := c.batch * c.queries
		all := c.batch * attn.Ceil(c.keys, page) * page * c.kv * d
		o := Operands{Q: memory(rows*c.heads*d, attn.Float16), Out: memory(rows*c.heads*d, attn.Float16), Pages: attn.InPlanes(memory(all, attn.Float16), memory(all, attn.Float16)), Bias: memory(c.keys, attn.Float32), Sinks: memory(c.heads, attn.Float32)}
		wide := [2]gpu.Memory{memory(rows*c.heads*d, attn.Float32), memory(rows*c.heads*d, attn.Float32)} // queries and outputs
		took := make([][]time.Duration, len(variants))
		var runs []func() time.Duration
		for _, v := range variants {
			g := g
			if g.QueryType = attn.Float16; v.wide {
				g.QueryType = attn.Float32
			}
			v.spoil(&g)
			plan := m.engine.NewPlan()
			noError(b, plan.Build(g, sequences(v.keys, g.Tree), rows))
			if v.few {
				plan.form.prefill = prefillKernels{}
			}
			noError(b, plan.Upload(m.Stream))
			o := o
			if v.wide {
				o.Q, o.Out = wide[0], wide[1]
			}
			if g.Measures {
				o.Entropy = memory(rows*c.heads, attn.Float32)
				if g.TileTokens > 0 {
					o.Places = attn.Ceil(c.keys, g.TileTokens)
					o.Mass = memory(rows*c.heads*o.Places, attn.Float32)
				}
				b.Cleanup(func() {
					for _, x := range [...]gpu.Memory{o.Entropy, o.Mass} {
						if x.Buffer != nil {
							noError(b, x.Buffer.Close())
						}
					}
				})
			}
			b.Cleanup(func() { noError(b, plan.Close()) })
			runs = append(runs, m.timed(b, 8, func(int) error { return plan.Run(m.Stream, &o) }))
		}
		for range 15 {
			for i, run := range runs {
				took[i] = append(took[i], run())
			}
		}
		median := func(i int) float64 {
			slices.Sort(took[i])
			return float64(took[i][len(took[i])/2].Nanoseconds()) / 1e3
		}
		for i, v := range variants {
			fmt.Printf("%s: %s %.2f us, %.1f%% of plain\n", b.Name(), v.name, median(i), 100*median(0)/median(i))
		}
		for _, x := range []*gpu.Memory{&o.Q, &o.Out, &o.Pages[0].Data, &o.Pages[1].Data, &o.Bias, &o.Sinks, &wide[0], &wide[1]} {
			noError(b, x.Buffer.Close())
		}
		b.ReportMetric(0, "ns/op")
	})
}

// noise returns new memory with random numbers, since zeros take less power.
func (m *machine) noise(b *testing.B, rng *rand.Rand, n int, dtype attn.DType) gpu.Memory {
	buffer, err := m.Dev.NewBuffer(int64(n * dtype.Size()))
	noError(b, err)
	noise := make([]byte, 1<<20)
	for i := range len(noise) / dtype.Size() {
		enginetest.Put(noise, i, dtype, rng.NormFloat64())
	}
	for at := int64(0); at < buffer.Len(); at += int64(len(noise)) {
		noError(b, buffer.Upload(at, noise[:min(int64(len(noise)), buffer.Len()-at)]))
	}
	return gpu.Memory{Buffer: buffer, DType: dtype, Len: n}
}

// timed returns a function that runs a graph of so many launches, once to warm up and once measured. The function returns the time of
// a launch.
func (m *machine) timed(b *testing.B, launches int, launch func(i int) error) func() time.Duration {
	graph, err := m.Stream.Capture(func() error {
		for i := range launches {
			if err := launch(i); err != nil {
				return err
			}
		}
		return nil
	})
	noError(b, err)
	b.Cleanup(func() { noError(b, graph.Close()) })
	begin, err := m.Dev.NewEvent(true)
	noError(b, err)
	end, err := m.Dev.NewEvent(true)
	noError(b, err)
	return func() time.Duration {
		noError(b, m.Stream.Launch(graph))
		noError(b, m.Stream.Record(begin))
		noError(b, m.Stream.Launch(graph))
		noError(b, m.Stream.Record(end))
		noError(b, m.Stream.Synchronize())
		t, err := end.Since(begin)
		noError(b, err)
		return t / time.Duration(launches)
	}
}

// BenchmarkGPUVariants measures every mask and score change in output tiles of all numbers of rows, by decode kernels and
// by prefill kernels (docs/lab/variants-h200.json).
func BenchmarkGPUVariants(b *testing.B) {
	m := realGPU(b)
	b.Run("decode", m.benchmarkDecodeVariants)
	b.Run("prefill", m.benchmarkPrefillVariants)
}

func (m *machine) benchmarkDecodeVariants(b *testing.B) {
	for _, c := range []benchStep{
		{1, 1, 32, 32, 1024, 128, 0}, {1, 1, 32, 8, 1024, 64, 0}, {1, 1, 32, 8, 8192, 128, 0}, {8, 1, 32, 8, 8192, 128, 16}, {16, 1, 32, 8, 1024, 64, 16},
		{1, 1, 64, 8, 4096, 128, 0}, {8, 2, 64, 8, 2048, 64, 16}, {1, 4, 32, 8, 8192, 128, 0}, {1, 4, 32, 8, 8192, 64, 0}, {4, 4, 32, 8, 4096, 128, 16},
	} {
		variants := []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(*attn.Problem) {}},
			{name: "window of all", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = c.keys }},
			{name: "window 512", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = 512 }},
			{name: "window 1020, 4 sink tokens", keys: c.keys, spoil: func(g *attn.Problem) { g.Window, g.SinkTokens = 1020, 4 }},
			{name: "tree", keys: c.keys, spoil: func(g *attn.Problem) { g.Tree = true }},
			{name: "sinks", keys: c.keys, spoil: func(g *attn.Problem) { g.Sinks = true }},
			{name: "cap", keys: c.keys, spoil: func(g *attn.Problem) { g.Cap = 30 }},
			{name: "ALiBi", keys: c.keys, spoil: func(g *attn.Problem) { g.Slopes = attn.NewSlopes(slices.Repeat([]float64{0.25}, c.heads)) }},
		}
		m.benchmarkVariants(b, c, variants)
	}
}

func (m *machine) benchmarkPrefillVariants(b *testing.B) {
	for _, c := range []benchStep{
		{16, 1024, 32, 8, 1024, 128, 0}, {1, 128, 32, 32, 128, 64, 0}, {8, 16, 32, 8, 8192, 128, 16}, {1, 16, 32, 8, 8192, 128, 0}, {1, 512, 32, 32, 1536, 128, 0},
		{4, 1024, 32, 32, 1024, 64, 0}, {1, 4096, 32, 8, 4096, 128, 0}, {1, 2048, 16, 8, 2048, 256, 0}, {4, 512, 32, 8, 512, 80, 0},
	} {
		variants := []benchVariant{
			{name: "plain", keys: c.keys, spoil: func(*attn.Problem) {}},
			{name: "window of all", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = c.keys }},
			{name: "window 512", keys: c.keys, spoil: func(g *attn.Problem) { g.Window = 512 }},
			{name: "window 1020, 4 sink tokens", keys: c.keys, spoil: func(g *attn.Problem) { g.Window, g.SinkTokens = 1020, 4 }},
			{name: "sinks", keys: c.keys, spoil: func(g *attn.Problem) { g.Sinks = true }},
			{name: "cap", keys: c.keys, spoil: func(g *attn.Problem) { g.Cap = 30 }},
			{name: "rounded", keys: c.keys, wide: true, spoil: func(g *attn.Problem) { g.Mixed = true }},
			{name: "rounded, window of all", keys: c.keys, wide: true, spoil: func(g *attn.Problem) { g.Mixed, g.Window = true, c.keys }},
			{name: "two parts", keys: c.keys, wide: true, spoil: func(*attn.Problem) {}},
			{name: "two parts, window of all", keys: c.keys, wide: true, spoil: func(g *attn.Problem) { g.Window = c.keys }},
		}
		if c.queries <= attn.MaxTree {
			variants = append(variants, benchVariant{name: "tree", keys: c.keys, spoil: func(g *attn.Problem) { g.Tree = true }},
				benchVariant{name: "cap, decode kernel", keys: c.keys, few: true, spoil: func(g *attn.Problem) { g.Cap = 30 }},
				benchVariant{name: "window of all, decode kernel", keys: c.keys, few: true, spoil: func(g *attn.Problem) { g.Window = c.keys }})
		}
		m.benchmarkVariants(b, c, variants)
	}
}
