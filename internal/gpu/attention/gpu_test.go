package attention

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpuattention "gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/kernels"
)

func realGPU(t testing.TB) *machine { return machineOf(t, enginetest.Real(t)) }

func machineOf(t testing.TB, d *enginetest.Device) *machine {
	t.Helper()
	e, err := New(d.Dev)
	if errors.Is(err, kernels.ErrNoImage) {
		t.Skipf("no kernels: %v", err)
	}
	noError(t, err)
	return &machine{Device: d, engine: e}
}

func TestGPUScores(t *testing.T) {
	testScores(t, realGPU(t), enginetest.OrShort(300, 30), options{work: enginetest.OrShort(3e7, 2e6), longest: enginetest.OrShort(8000, 2000)})
}

func TestGPUParts(t *testing.T) { testParts(t, realGPU(t), enginetest.OrShort(300, 30)) }

func TestGPUInvariant(t *testing.T) {
	testInvariant(t, realGPU(t), enginetest.OrShort(200, 20), enginetest.OrShort(9000, 2000))
}

func TestGPUInvariantBatches(t *testing.T) {
	testInvariantBatches(t, realGPU(t), []int{4096, 8192, 5000}, math.MaxInt)
}

func TestGPUInvariantGraph(t *testing.T) {
	testInvariantGraph(t, realGPU(t), 5, 6000)
}

func TestGPUTrees(t *testing.T) {
	testTrees(t, realGPU(t), enginetest.OrShort(300, 30), options{work: enginetest.OrShort(3e5, 5e4), longest: enginetest.OrShort(8000, 2000)})
}

func TestGPURandom(t *testing.T) {
	testRandom(t, realGPU(t), enginetest.OrShort(150, 24), options{work: enginetest.OrShort(3e7, 2e6), longest: enginetest.OrShort(8000, 2000)})
}

func TestGPUShort(t *testing.T) {
	testRandom(t, realGPU(t), enginetest.OrShort(600, 60), options{work: enginetest.OrShort(2e6, 2e5), longest: 300})
}

func TestGPUPrefill(t *testing.T) {
	m := realGPU(t)
	testPrefill(t, m, takePrefill, enginetest.OrShort(300, 20), enginetest.OrShort(3000, 500), false)
	testPrefillPrecision(t, m, enginetest.OrShort(16384, 2000))
	testPrefillGrowing(t, m)
}

func TestGPUPrefillScores(t *testing.T) {
	m := realGPU(t)
	testPrefill(t, m, takePrefill, enginetest.OrShort(400, 40), enginetest.OrShort(3000, 500), true)
	testHiddenSteps(t, m)
}

func TestGPUMixed(t *testing.T) {
	m := realGPU(t)
	if !m.runsBeside() {
		t.Skip("no kernels here run beside each other")
	}
	testMixed(t, m, enginetest.OrShort(200, 20), enginetest.OrShort(3000, 500))
	for _, scored := range []bool{false, true} {
		testPrefill(t, m, takeBoth, enginetest.OrShort(100, 20), enginetest.OrShort(3000, 500), scored)
	}
	testPrefillInstead(t, m, takeBoth, enginetest.OrShort(1000, 3), enginetest.OrShort(3000, 500))
}

func TestGPUPrefillInstead(t *testing.T) {
	m := realGPU(t)
	testPrefillInstead(t, m, takePrefill, 1000, enginetest.OrShort(3000, 500))
}

func TestGPUSchedules(t *testing.T) { testSchedules(t, realGPU(t), 3000) }

func TestGPUPages(t *testing.T) { testPages(t, realGPU(t), 5000) }

func TestGPURepeats(t *testing.T) { testRepeats(t, realGPU(t), 100, 1e8, 20000) }

func TestGPULargeQueries(t *testing.T) { testLargeQueries(t, realGPU(t)) }

func TestGPUManyTiles(t *testing.T) { testManyTiles(t, realGPU(t)) }

func TestGPUManyRows(t *testing.T) {
	testManyRows(t, realGPU(t), enginetest.OrShort(20000, 3000), manyRows...)
}

func TestGPURow(t *testing.T) {
	m := realGPU(t)
	if !m.engine.hasEpilogue() {
		t.Skip("kernels for rows are those of 9.0")
	}
	testRow(t, m, enginetest.OrShort(60, 10), 60000)
}

func TestGPUNeighbours(t *testing.T) { testNeighbours(t, realGPU(t)) }

func TestGPUAppend(t *testing.T) { testAppend(t, realGPU(t)) }

func TestGPUGraph(t *testing.T) {
	testGraph(t, realGPU(t), enginetest.OrShort(20, 4), 0, enginetest.OrShort(4000, 600), 4)
}

func TestGPURuns(t *testing.T) { testRuns(t, realGPU(t), 20000) }

func TestGPUManyUploads(t *testing.T) { testManyUploads(t, realGPU(t), 300) }

func TestGPUManyLaunches(t *testing.T) { testManyLaunches(t, realGPU(t), 200) }

func TestGPUStreams(t *testing.T) {
	m := realGPU(t)
	testStreams(t, m, 2, 20, options{kv: attn.Float16, work: 1e7, longest: 2000})
	for range 2 {
		shape := reftest.Shape{Heads: 12, KVHeads: 4, Dim: 128, ValueDim: 128, Queries: []int{1, 1}, Keys: []int{5000, 9000}, Mask: attn.Mask{Causal: true}}
		testStreams(t, m, 6, enginetest.OrShort(300, 30), options{shape: &shape, kv: attn.Float16})
	}
}

// TestGPULong has contexts that many thread blocks share.
func TestGPULong(t *testing.T) {
	m := realGPU(t)
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for _, kv := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
		for _, dim := range headDims {
			shape := reftest.Shape{Heads: 4, KVHeads: 1, Dim: dim, ValueDim: dim, Queries: []int{1, 2}, Keys: []int{40000 + rng.IntN(100), 17000 + rng.IntN(100)}, Mask: attn.Mask{Causal: true}}
			p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), options{shape: &shape, kv: kv, dense: rng.IntN(2) == 0})
			m.run(t, plan, p)
			p.check(t)
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

// The CPU engine and the GPU engine agree if both compute in float32.
func TestGPUAgainstCPU(t *testing.T) {
	m := realGPU(t)
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for range 20 {
		p := m.newProblem(t, rng, reftest.Normal, options{kv: attn.Float32, dense: true, work: 1e7, longest: 2000})
		if p.query != attn.Float32 || p.out != attn.Float32 {
			p.close(t)
			continue
		}
		m.run(t, plan, p)
		var c cpuattention.Plan
		noError(t, c.Build(p.geometry, p.seqs))
		floats := func(x gpu.Memory) []float32 {
			b := enginetest.Read(t, &x)
			f := make([]float32, x.Len)
			for i := range f {
				f[i] = float32(enginetest.Get(b, i, attn.Float32))
			}
			return f
		}
		k, v := floats(p.k), floats(p.v)
		buffer := func(x []float32) cpu.Buffer {
			return cpu.Buffer{DType: attn.Float32, Ptr: enginetest.PointerOf(x), Len: len(x)}
		}
		o := cpuattention.Operands[float32]{Q: floats(p.q), Out: make([]float32, p.o.Len), LSE: make([]float32, p.lse.Len), Pages: attn.InPlanes(buffer(k), buffer(v))}
		noError(t, cpuattention.Run(cpu.Default(), &c, &o))
		ref := p.Reference(p.precision())
		g := &p.geometry
		// Twice the bound: each engine may reach it.
		for i := range ref.OBound {
			ref.OBound[i] *= 2
		}
		got := floats(p.o)
		i := 0
		for s := range p.Queries {
			for pos := range p.Queries[s] {
				for h := range p.Heads {
					for c := range p.Dim {
						at := (p.seqs[s].Row+pos)*g.Out.Row + h*g.Out.Head + c
						if d := float64(got[at] - o.Out[at]); !(d <= ref.OBound[i] && -d <= ref.OBound[i]) {
							t.Fatalf("%v: element %d: GPU %v, CPU %v", p, at, got[at], o.Out[at])
						}
						i++
					}
				}
			}
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// BenchmarkGPUAttend measures attention of one decode step, in GB/s of keys and values.
func BenchmarkGPUAttend(b *testing.B) {
	m := realGPU(b)
	for _, c := range []struct {
		batch, heads, kv, keys, page int
		policy                       lean.Policy
	}{
		{1, 32, 8, 65536, 16, lean.Policy{}},
		{1, 32, 8, 65536, 16, lean.Policy{Kind: lean.PerHead}},
		{16, 32, 8, 8192, 16, lean.Policy{}},
		{64, 32, 8, 1024, 16, lean.Policy{}},
		{1, 32, 32, 4096, 16, lean.Policy{}},
	} {
		b.Run(fmt.Sprintf("b%d_h%d/%d_n%d_p%d_%v", c.batch, c.heads, c.kv, c.keys, c.page, c.policy.Kind), func(b *testing.B) {
			const dim = 128
			g := attn.Problem{Heads: c.heads, KVHeads: c.kv, Dim: dim, ValueDim: dim, Pages: attn.Separate(attn.Float16, dim, dim, attn.PageStrides{Page: c.kv * c.page * dim, Head: c.page * dim, Row: dim}, attn.PageStrides{}), PageTokens: c.page, Scale: 0.1, Policy: c.policy,
				Query: attn.Strides{Row: c.heads * dim, Head: dim}, Out: attn.Strides{Row: c.heads * dim, Head: dim},
			}
			g.Pages.Planes[1].At = g.Pages.Planes[0].At
			pages := c.keys / c.page
			var seqs []attn.Sequence
			for i := range c.batch {
				s := attn.Sequence{Row: i, Queries: 1, Keys: c.keys}
				for j := range pages {
					s.Pages = append(s.Pages, int32(j*c.batch+i))
				}
				seqs = append(seqs, s)
			}
			memory := func(n int) gpu.Memory {
				buffer, err := m.Dev.NewBuffer(int64(n) * 2)
				noError(b, err)
				noError(b, buffer.Set(0, 0, buffer.Len()))
				return gpu.Memory{Buffer: buffer, DType: attn.Float16, Len: n}
			}
			o := &Operands{Q: memory(c.batch * c.heads * dim), Out: memory(c.batch * c.heads * dim), Pages: attn.InPlanes(memory(c.batch*pages*g.Pages.Planes[0].At.Page), memory(c.batch*pages*g.Pages.Planes[0].At.Page))}
			plan := m.engine.NewPlan()
			noError(b, plan.Build(g, seqs, c.batch))
			noError(b, plan.Upload(m.Stream))
			noError(b, plan.Run(m.Stream, o))
			b.SetBytes(20 * 2 * 2 * int64(c.batch*c.keys*c.kv*dim))
			for b.Loop() {
				for range 20 {
					noError(b, plan.Run(m.Stream, o))
				}
				noError(b, m.Stream.Synchronize())
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(20*b.N), "us/launch")
			noError(b, plan.Close())
			for _, x := range []gpu.Memory{o.Q, o.Out, o.Pages[0].Data, o.Pages[1].Data} {
				noError(b, x.Buffer.Close())
			}
		})
	}
}

// BenchmarkGPUQueue measures the host's time for a launch.
func BenchmarkGPUQueue(b *testing.B) { benchmarkQueue(b, realGPU(b)) }

// BenchmarkGPUBuild measures the host's time for a step's plan.
func BenchmarkGPUBuild(b *testing.B) { benchmarkBuild(b, realGPU(b)) }

func TestGPUCutPrefixes(t *testing.T) {
	m := realGPU(t)
	m.engine.Eager = true
	testCutPrefixes(t, m, enginetest.OrShort(60, 10))
}

func TestGPUPrefixes(t *testing.T) {
	m := realGPU(t)
	m.engine.Eager = true
	testPrefixes(t, m, enginetest.OrShort(200, 40), 3000, true)
	testPrefixWindows(t, m, enginetest.OrShort(60, 10), 2000)
	testPrefixesRecorded(t, m, 6, 2000, false)
	testPrefixesRecorded(t, m, 6, 2000, true)
}
