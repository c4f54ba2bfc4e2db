package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// prefillShape draws a shape with many rows, around the borders of output tiles and steps.
func prefillShape(rng *rand.Rand, longest int) reftest.Shape {
	s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: enginetest.Pick(rng, headDims...), Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
	s.ValueDim = s.Dim
	s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 1, 2, 3, 8)
	for range enginetest.Pick(rng, 1, 1, 2, 4) {
		rows := enginetest.Pick(rng, 0, 1, 17, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300)
		s.Queries = append(s.Queries, min((rows+s.Heads/s.KVHeads-1)/(s.Heads/s.KVHeads), longest))
		s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, rng.IntN(longest), s.Queries[len(s.Queries)-1]))
	}
	return s
}

// prefillScores adds to a shape at least one mask other than causal or score modification.
func prefillScores(rng *rand.Rand, s reftest.Shape) reftest.Shape {
	switch rng.IntN(4) {
	case 0:
		s = reftest.RandomSinkTokens(rng, s)
	case 1:
		s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1)
	case 2:
		s = reftest.RandomTrees(rng, s)
	default:
		s = reftest.RandomWindowCapSlopes(rng, s)
	}
	if s.Window == 0 && rng.IntN(3) == 0 {
		s.SoftCap = 2
	}
	if rng.IntN(3) == 0 {
		s = reftest.RandomSinks(rng, s)
	}
	return s
}

// testPrefill runs the prefill kernels on supported problems, alone or beside decode kernels. scored: the kernels for
// masks and score modifications.
func testPrefill(t *testing.T, m *machine, take choice, n, longest int, scored bool) {
	m.engine.choice = take
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	taken, parts, both := 0, 0, 0
	inParts, beside := m.engine.blocks > 2, take == takeBoth && m.runsBeside()
	for i := range reftest.AtLeast(n, func() bool { return taken > 0 && (parts > 0 || !inParts) && (both > 0 || !beside) }) {
		m.engine.Eager = i%4 > 0 // short output tiles are cut, too
		shape := prefillShape(rng, longest)
		if scored {
			shape = prefillScores(rng, shape)
		}
		in := enginetest.Pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, options{shape: &shape, kv: enginetest.Pick(rng, attn.Float16, attn.BFloat16), dense: rng.IntN(2) == 0, mixed: rng.IntN(3) == 0})
		m.run(t, plan, p)
		if k := plan.kernelOf(p.operands(), false); k.parts > 0 {
			rounded := k == plan.form.prefill.rounded // kernels with masks also round
			if modified := k.features & scoredFeatures; scored != (modified != 0) && !rounded || modified == maskFeatures && p.geometry.Features()&changeFeatures != 0 {
				t.Errorf("%v by %s", p, k.entries[0])
			}
			if other := p.query != p.kv || p.out != p.kv; k.parts != 2 && other && !p.geometry.Mixed || k.parts != 1 && !other {
				t.Errorf("%v by %s", p, k.entries[0])
			}
			taken++
			if slices.ContainsFunc(plan.prefilling.data, func(t prefillTile) bool { return t.parts > 1 }) {
				parts++
			}
			if plan.form.both {
				both++
			}
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v", i, in, p)
		}
		p.close(t)
	}
	if taken == 0 || inParts && parts == 0 || beside != (both > 0) {
		t.Errorf("%d problems were computed by a prefill kernel, %d in parts, %d beside a decode kernel", taken, parts, both)
	}
	noError(t, plan.Close())
}

// testHiddenSteps runs prompts whose scores are all near the lowest float32 number, with a window that hides whole steps of keys from a
// warp's rows: the window's keys come first, and the hidden ones next.
func testHiddenSteps(t *testing.T, m *machine) {
	m.engine.choice = takePrefill
	defer func() { m.engine.choice = takeFastest }()
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i := range 8 {
		s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64 << (i / 2 % 2), Queries: []int{20}, Keys: []int{127}, Mask: attn.Mask{Causal: i >= 4, Window: 17}}
		s.ValueDim = s.Dim
		p := m.newProblem(t, rng, reftest.Huge, options{shape: &s, kv: gpu.Halves[i%2], dense: true})
		for slices.Max(p.K) > 0 {
			p.close(t)
			p = m.newProblem(t, rng, reftest.Huge, options{shape: &s, kv: gpu.Halves[i%2], dense: true})
		}
		m.run(t, plan, p)
		if plan.form.prefill.first() == nil {
			t.Errorf("%v: not by a prefill kernel", p)
		}
		if p.check(t); t.Failed() {
			t.Fatalf("case %d: %v", i, p)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// runsBeside reports whether steps use both kinds of kernels.
func (m *machine) runsBeside() bool {
	return slices.ContainsFunc(m.engine.kernels, func(k kernel) bool { return k.parts > 0 && k.runsBeside() })
}

// testPrefillInstead runs n of the decode kernels' tests with more than one row, by prefill kernels where possible, or
// by both kinds.
func testPrefillInstead(t *testing.T, m *machine, take choice, n, longest int) {
	m.engine.choice = take
	tests := map[string]func(t *testing.T){
		"random":        func(t *testing.T) { testRandom(t, m, 12, options{work: 1e5, longest: longest}) },
		"schedules":     func(t *testing.T) { testSchedules(t, m, longest) },
		"pages":         func(t *testing.T) { testPages(t, m, longest) },
		"repeats":       func(t *testing.T) { testRepeats(t, m, 4, 1e5, longest) },
		"large queries": func(t *testing.T) { testLargeQueries(t, m) },
		"many rows":     func(t *testing.T) { testManyRows(t, m, longest, 20) },
		"graph":         func(t *testing.T) { testGraph(t, m, 3, 0, longest, 4) },
		"streams":       func(t *testing.T) { testStreams(t, m, 2, 10, options{kv: attn.Float16, work: 1e5, longest: longest}) },
	}
	var names []string
	for name := range tests {
		names = append(names, name)
	}
	slices.Sort(names)
	rng := reftest.Rand(t)
	rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for _, name := range names[:min(n, len(names))] {
		t.Run(name, tests[name])
	}
}

// testPrefillGrowing runs prompts whose scores grow or fall from step to step, by up to 2^200: kernels keep a row's reference while
// scores grow little (kernels/attn_prefill_weights.cuh).
func testPrefillGrowing(t *testing.T, m *machine) {
	m.engine.choice = takePrefill
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i, growth := range []float64{0.5, 5, 12, 200} { // of a step's scores, to base 2
		for j, kv := range []attn.DType{attn.Float16, attn.BFloat16} {
			if m.Few(t) && j != []int{0, 1, 1, 0}[i] {
				continue
			}
			dim, keys := []int{128, 64}[i/3], 400+rng.IntN(200)
			shape := reftest.Shape{Heads: 2, KVHeads: 1, Dim: dim, ValueDim: dim, Queries: []int{40}, Keys: []int{keys}, Mask: attn.Mask{Causal: true}}
			c := reftest.New(rng, shape, reftest.Normal, enginetest.Format(kv), enginetest.Format(kv))
			for k := range keys {
				at := growth * float64(keys-k) / cutKeys / c.Scale * math.Ln2 // of a query whose first element is 1
				c.K[k*dim] = enginetest.Format(kv).Round(at)
			}
			p := &problem{Case: c, rng: rng, kv: kv, query: kv, out: kv, dense: true}
			p.geometry = attn.Problem{Heads: 2, KVHeads: 1, Dim: dim, ValueDim: dim, QueryType: kv, Pages: attn.Separate(kv, dim, dim, attn.PageStrides{}, attn.PageStrides{}), Scale: p.Scale, Mask: p.Mask}
			p.layDense(m, t)
			p.o.DType, p.lse.DType = p.out, attn.Float32
			m.Poison(t, &p.o)
			m.Poison(t, &p.lse)
			m.run(t, plan, p)
			if k := plan.kernelOf(p.operands(), false); k.parts != 1 || k.scored {
				t.Fatalf("%v: another kernel", p)
			}
			if p.check(t); t.Failed() {
				t.Fatalf("scores that grow by 2^%g: %v", growth, p)
			}
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

// testPrefillPrecision: with float32 queries and outputs, the error over keys of float16 is at most twice the error of
// sums in float32. Over keys of bfloat16, whose two parts have 16 bits, it is at most about 2^-15 of the values.
func testPrefillPrecision(t *testing.T, m *machine, keys int) {
	m.engine.choice = takePrefill
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for _, dim := range headDims {
		turn := rng.IntN(2)
		for i, kv := range []attn.DType{attn.Float16, attn.BFloat16} {
			for j, off := range []float64{0, 1} { // offset of the values
				if m.Few(t) && (turn+i+j)%2 == 0 { // of each dim both types and both offsets remain
					continue
				}
				shape := reftest.Shape{Heads: 1, KVHeads: 1, Dim: dim, ValueDim: dim, Queries: []int{32}, Keys: []int{keys}, Mask: attn.Mask{Causal: true}}
				c := reftest.New(rng, shape, reftest.Normal, reftest.Float32, enginetest.Format(kv))
				for i := range c.V {
					c.V[i] = enginetest.Format(kv).Round(c.V[i] + off)
				}
				p := &problem{Case: c, rng: rng, kv: kv, query: attn.Float32, out: attn.Float32, dense: true}
				p.geometry = attn.Problem{Heads: 1, KVHeads: 1, Dim: dim, ValueDim: dim, Pages: attn.Separate(kv, dim, dim, attn.PageStrides{}, attn.PageStrides{}), Scale: p.Scale, Mask: p.Mask}
				p.layDense(m, t)
				p.o.DType, p.lse.DType = p.out, attn.Float32
				m.Poison(t, &p.o)
				m.Poison(t, &p.lse)
				m.run(t, plan, p)
				if k := plan.kernelOf(p.operands(), false); k.parts != 2 || k.scored {
					t.Fatalf("%v: another kernel", p)
				}
				p.check(t)
				want, out := p.Reference(p.precision()), enginetest.Read(t, &p.o)
				var ours, plain, most float64
				for row := range shape.Queries[0] {
					sums := float32Attention(c, row)
					for i, x := range want.O[row*dim : (row+1)*dim] {
						d := enginetest.Get(out, row*dim+i, attn.Float32) - x
						ours += d * d
						most = max(most, math.Abs(d))
						d = float64(sums[i]) - x
						plain += d * d
					}
				}
				n := float64(shape.Queries[0] * dim)
				ours, plain = math.Sqrt(ours/n), math.Sqrt(plain/n)
				t.Logf("%v of %d, %d keys, values around %g: error %.3g (most %.3g), of float32 %.3g: %.2f times", kv, dim, keys, off, ours, most, plain, ours/plain)
				// With heads of 256 there are no registers for separate sums of steps.
				if limit := 2 * plain; kv == attn.Float16 && dim <= 128 && ours > limit || ours > 0x1p-15 {
					t.Errorf("more than %g", limit)
				}
				p.close(t)
			}
		}
	}
	noError(t, plan.Close())
}

// float32Attention returns a row of a case with one head, by sums of float32 over blocks of 128 keys.
func float32Attention(c *reftest.Case, row int) []float32 {
	q, n := c.Query(0, row, 0), c.Visible(0, row)
	scores, top := make([]float32, n), float32(math.Inf(-1))
	for j := range scores {
		var sum float32
		for i, x := range c.Key(0, j, 0) {
			sum += float32(q[i]) * float32(x)
		}
		scores[j] = sum * float32(c.Scale)
		top = max(top, scores[j])
	}
	out, block, total := make([]float32, c.ValueDim), make([]float32, c.ValueDim), float32(0)
	for j, s := range scores {
		w := float32(math.Exp(float64(s - top)))
		total += w
		for i, x := range c.Value(0, j, 0) {
			block[i] += w * float32(x)
		}
		if j%128 == 127 || j == n-1 {
			for i, x := range block {
				out[i] += x
			}
			clear(block)
		}
	}
	for i := range out {
		out[i] /= total
	}
	return out
}

// BenchmarkGPUPrefill measures attention of chunks after earlier tokens by each method, in us and TFLOP/s. The fastest
// method is what divide and cutPrefill should choose.
func BenchmarkGPUPrefill(b *testing.B) { benchmarkPrefills(b, realGPU(b)) }

func benchmarkPrefills(b *testing.B, m *machine) {
	for _, c := range []struct{ batch, queries, behind, heads, kv, dim int }{
		{1, 512, 32768, 32, 8, 128}, {8, 128, 8192, 32, 8, 128}, {1, 128, 8192, 32, 32, 128}, {1, 128, 8192, 32, 8, 128}, {1, 128, 1024, 32, 32, 64}, {1, 128, 0, 32, 32, 64},
		{1, 512, 1024, 32, 32, 128}, {1, 64, 32768, 32, 8, 128}, {1, 16, 32768, 32, 8, 128}, {1, 2048, 0, 32, 32, 128}, {1, 1024, 0, 8, 8, 128}, {4, 33, 4096, 32, 8, 128},
		{16, 1024, 0, 32, 32, 64}, {4, 4096, 0, 32, 32, 64}, {1, 16384, 0, 32, 32, 64}, {16, 1024, 0, 32, 32, 128}, {4, 4096, 0, 32, 32, 128}, {1, 16384, 0, 32, 32, 128}, {4, 4096, 0, 32, 32, 256},
	} {
		for _, query := range []attn.DType{attn.Float16, attn.Float32} {
			for _, way := range []string{"few", "whole", "parts", "chosen"} {
				b.Run(fmt.Sprintf("%dx%d_behind_%d_h%d/%d_d%d_%v_%s", c.batch, c.queries, c.behind, c.heads, c.kv, c.dim, query, way), func(b *testing.B) {
					m.benchmarkPrefill(b, c.batch, c.queries, c.behind, c.heads, c.kv, c.dim, query, way)
				})
			}
		}
	}
}

func (m *machine) benchmarkPrefill(b *testing.B, batch, queries, behind, heads, kv, dim int, query attn.DType, way string) {
	keys := behind + queries
	g := attn.Problem{Heads: heads, KVHeads: kv, Dim: dim, ValueDim: dim, Pages: attn.Separate(attn.Float16, dim, dim, attn.PageStrides{Page: kv * keys * dim, Head: keys * dim, Row: dim}, attn.PageStrides{}), PageTokens: keys, Scale: 0.1, Mask: attn.Mask{Causal: true}, QueryType: query,
		Query: attn.Strides{Row: heads * dim, Head: dim}, Out: attn.Strides{Row: heads * dim, Head: dim},
	}
	g.Pages.Planes[1].At = g.Pages.Planes[0].At
	var seqs []attn.Sequence
	for i := range batch {
		seqs = append(seqs, attn.Sequence{Row: i * queries, Queries: queries, Keys: keys, Pages: []int32{int32(i)}})
	}
	rng := reftest.Rand(b)
	memory := func(n int, t attn.DType) gpu.Memory {
		x := make([]byte, n*t.Size())
		for i := range min(n, 1<<18) {
			enginetest.Put(x, i, t, rng.NormFloat64())
		}
		for have := (1 << 18) * t.Size(); have < len(x); have *= 2 {
			copy(x[have:], x[:have])
		}
		return m.Put(b, x, t)
	}
	rows := batch * queries * heads * dim
	o := &Operands{Q: memory(rows, query), Out: memory(rows, query), Pages: attn.InPlanes(memory(batch*g.Pages.Planes[0].At.Page, attn.Float16), memory(batch*g.Pages.Planes[0].At.Page, attn.Float16))}
	if way == "whole" || way == "parts" {
		m.engine.choice = takePrefill
	}
	defer func() { m.engine.choice = takeFastest }()
	plan := m.engine.NewPlan()
	noError(b, plan.Build(g, seqs, batch*queries))
	switch way {
	case "few":
		plan.form.prefill = prefillKernels{}
	case "whole":
		plan.dealPrefill()
	case "parts":
		noError(b, plan.memory.reserve(m.engine, nil, workspaceSize{tileRows: BlockRows, dim: dim, parts: m.engine.partBytes(plan.form.prefill.first())}))
		plan.partPrefill(plan.prefillGrid)
	}
	noError(b, plan.Upload(m.Stream))
	graph, err := m.Stream.Capture(func() error {
		for range 10 {
			if err := plan.Run(m.Stream, o); err != nil {
				return err
			}
		}
		return nil
	})
	noError(b, err)
	for range 3 {
		noError(b, m.Stream.Launch(graph))
	}
	noError(b, m.Stream.Synchronize())
	for b.Loop() {
		noError(b, m.Stream.Launch(graph))
		noError(b, m.Stream.Synchronize())
	}
	us := float64(b.Elapsed().Nanoseconds()) / 1e3 / float64(10*b.N)
	b.ReportMetric(us, "us/launch")
	b.ReportMetric(4*float64(batch*queries*heads*dim)*(float64(behind)+float64(queries)/2)/us/1e6, "TFLOP/s")
	if k := plan.kernelOf(o, false); way == "chosen" && b.N > 1 {
		b.Logf("%s, %d output tiles, %d with parts", k.entries[0], len(plan.outputs), len(plan.prefilling.data))
	}
	noError(b, graph.Close())
	noError(b, plan.Close())
	for _, x := range []gpu.Memory{o.Q, o.Out, o.Pages[0].Data, o.Pages[1].Data} {
		noError(b, x.Buffer.Close())
	}
}
