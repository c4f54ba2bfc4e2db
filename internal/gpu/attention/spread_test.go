//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// Every element of a row is in the kernel's row once where it counts, and the copy engine reads nothing behind the row.
func TestSpreadOver(t *testing.T) {
	for _, kv := range []attn.DType{attn.Float16, attn.BFloat16, attn.Float32} {
		var not []int
		for dim := 1; dim <= 264; dim++ {
			var widths int
			for _, width := range headDims {
				c, ok := spreadOver(dim, width, kv)
				if !ok {
					continue
				}
				widths++
				seen := make([]int, dim)
				for at := range width {
					block, x := at/int(c.block), at%int(c.block)
					if x >= int(c.taken) || block > 0 && x < int(c.taken-c.step) {
						continue
					}
					seen[block*int(c.step)+x]++
				}
				if slices.ContainsFunc(seen, func(n int) bool { return n != 1 }) || c.taken > c.block {
					t.Errorf("%v, %d of %d: %+v has elements %v times", kv, dim, width, c, seen)
				}
			}
			if dim%8 == 0 && dim <= 256 && widths == 0 {
				not = append(not, dim)
			}
		}
		want := []int{216, 240, 248}
		if kv == attn.Float32 {
			want = []int{120, 152, 176, 184, 208, 216, 232, 240, 248}
		}
		if !slices.Equal(not, want) {
			t.Errorf("%v: heads of %v elements are not spread, and should be %v", kv, not, want)
		}
	}
}

// testSpread runs heads of widths that no kernel has, and values of other widths than keys: decode and prompts, with masks and
// changes of scores. GPUs without a copy engine have kernels for them.
func testSpread(t *testing.T, m *machine, n int, o options) {
	older := !slices.ContainsFunc(m.engine.kernels, func(k kernel) bool { return k.spreads })
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	types, prompts, packed, rest := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}, 0, 0, 0
	defer func() { m.engine.choice = takeFastest }()
	for i := range reftest.AtLeast(n, func() bool { return prompts > 0 && packed > 0 && rest > 0 || !m.runsBeside() || older || n < 9 }) {
		m.engine.choice = enginetest.Pick(rng, takeFastest, takePrefill)
		o.kv, o.dense, o.scored = types[i%3], rng.IntN(3) == 0, i%2 == 1
		var s reftest.Shape
		for {
			s = randomShape(rng, o)
			s.Dim, s.ValueDim = 8*(1+rng.IntN(32)), 0
			if s.ValueDim = s.Dim; rng.IntN(3) == 0 {
				s.ValueDim = 8 * (1 + rng.IntN(32))
			}
			if i < 9 {
				s.Dim = []int{72, 112, 160, 192, 216, 192, 48, 248, 40}[i]
				s.ValueDim = []int{72, 112, 160, 192, 216, 128, 48, 72, 40}[i]
			}
			g := attn.Problem{Dim: s.Dim, ValueDim: s.ValueDim, Pages: attn.Separate(o.kv, s.Dim, s.ValueDim, attn.PageStrides{}, attn.PageStrides{})}
			if of := spreadsOf(&g); isAny(&g) && (older || !of.on() || m.widthFits(o.kv, of.width)) {
				break
			} else if i < 9 {
				o.kv = attn.Float16
			}
		}
		o.shape, o.apart = &s, s.Dim != s.ValueDim
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.AllInputs...), o)
		if !o.scored {
			p.randomSchedule()
			p.geometry.Unfused = false
		}
		m.run(t, plan, p)
		switch of := spreadsOf(&p.geometry); {
		case plan.form.kernel.packed:
			packed++
		case older || !of.on():
			rest++
		}
		kernel := plan.form.kernel
		if any := kernel.unit == anyUnit; !any && plan.form.spread.width < max(s.Dim, s.ValueDim) && kernel.unit != packedUnit(kernel.kv) || older && !any {
			t.Fatalf("%v: %+v, %v", p, plan.form.spread, plan.form.kernel.entries)
		}
		if plan.form.prefill.first() != nil {
			prompts++
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d: %v, schedule %+v", i, p, p.geometry)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testDirect runs prompts with the widths of the kernels that have values of another width than keys: also where other kernels run, by
// the operands' types.
func testDirect(t *testing.T, m *machine, n, longest int) {
	if !slices.ContainsFunc(m.engine.kernels, func(k kernel) bool { return k.isDirect() }) {
		t.Skip("the GPU has no prefill kernel with values of another width than keys")
	}
	m.engine.choice = takePrefill
	defer func() { m.engine.choice = takeFastest }()
	rng := reftest.Rand(t)
	plan, direct := m.engine.NewPlan(), 0
	for i := range reftest.AtLeast(n, func() bool { return direct >= 2 }) {
		m.engine.Eager = i%4 > 0 // short output tiles are cut, too
		shape := prefillShape(rng, longest)
		shape.Dim, shape.ValueDim = 192, 128
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.AllInputs...), options{shape: &shape, kv: enginetest.Pick(rng, attn.Float16, attn.BFloat16), dense: rng.IntN(2) == 0, apart: true})
		m.run(t, plan, p)
		if plan.directKernel(p.query == p.kv && p.out == p.kv) != nil {
			direct++
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d: %v", i, p)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

func TestGPUDirect(t *testing.T) {
	testDirect(t, realGPU(t), enginetest.OrShort(100, 20), enginetest.OrShort(3000, 500))
}

// widthFits reports whether a decode kernel of a head dim fits into the GPU's shared memory.
func (m *machine) widthFits(kv attn.DType, width int) bool {
	_, ok := m.engine.configure(m.engine.shape(kv, width), BlockRows)
	return ok
}

// Unfused attention refuses head dims by name, and so do kernels of unit any.
func TestSpreadRefused(t *testing.T) {
	for _, c := range []struct {
		capability int
		spoil      func(g *attn.Problem)
		text       string
	}{
		{86, func(g *attn.Problem) { setDims(g, 264, 264) }, "head dim 264 with values of 264 is not supported: kernels have multiples of 8 up to 256"},
		{80, func(g *attn.Problem) { setDims(g, 64, 68) }, "head dim 64 with values of 68"},
		{80, func(g *attn.Problem) { g.Invariant = true }, "with keys of 72 elements and values of 72: batch invariance"},
		{89, func(g *attn.Problem) { g.Unfused = true }, "with keys of 72 elements and values of 72: unfused"},
		{86, func(g *attn.Problem) { g.Query.Row = 74 }, "must be multiples of 4"},
		{90, func(g *attn.Problem) { g.Unfused = true }, "head dim 72"},
		{100, func(g *attn.Problem) { setDims(g, 264, 264) }, "head dim 264 with values of 264 is not supported: kernels have multiples of 8 up to 256"},
		{90, func(g *attn.Problem) { setDims(g, 216, 216); g.Invariant = true }, "with keys of 216 elements and values of 216: batch invariance"},
		{90, func(g *attn.Problem) { g.Query.Row = 74 }, "must be multiples of 4"},
		{90, func(g *attn.Problem) { g.Out.Head = 71 }, "must be multiples of 4"},
	} {
		g := paged(4, 2, 72)
		noError(t, supports("op", &g, kernelsOf(90)))
		c.spoil(&g)
		g.Pages = g.Pages.Packed(2, 16)
		wantError(t, c.text, supports("op", &g, kernelsOf(c.capability)), attn.ErrUnsupported, c.text)
	}
}

// TestGPUAnyHeads: the kernels of GPUs without a copy engine, whose PTX a driver of 9.0 compiles (see emulated.Images).
func TestGPUAnyHeads(t *testing.T) {
	m := otherGPU(t, anyUnit, func(k kernel) bool { return k.unit == anyUnit || k.spreads || k.packed })
	testSpread(t, m, enginetest.OrShort(300, 30), options{work: 3e6, longest: 3000})
}

func TestGPUSpread(t *testing.T) {
	testSpread(t, realGPU(t), enginetest.OrShort(300, 30), options{work: 3e6, longest: 3000})
}

// BenchmarkGPUSpread measures decode with heads of many widths beside a kernel that only reads as many bytes, in turn: the medians of 15
// graphs of 8 launches.
func BenchmarkGPUSpread(b *testing.B) {
	m := realGPU(b)
	type shape struct{ batch, heads, kv, keys, page, dim, value int }
	shapes := []shape{{16, 32, 8, 8192, 16, 112, 112}, {16, 32, 8, 8192, 64, 192, 128}, {6, 48, 48, 16384, 64, 40, 40}, {1, 32, 8, 8192, 64, 112, 112}, {16, 8, 1, 65536, 64, 128, 128}, {16, 32, 1, 65536, 64, 128, 128}, {16, 32, 1, 16384, 64, 128, 128}}
	for _, dim := range []int{128, 48, 72, 80, 96, 112, 144, 160, 176, 192, 208, 216, 224, 240, 248, 256} {
		shapes = append(shapes, shape{16, 32, 8, 8192, 64, dim, dim})
	}
	for _, c := range shapes {
		b.Run(fmt.Sprintf("b%d_h%d_%d_n%d_p%d_d%d_%d", c.batch, c.heads, c.kv, c.keys, c.page, c.dim, c.value), func(b *testing.B) {
			g := attn.Problem{
				Heads: c.heads, KVHeads: c.kv, Dim: c.dim, ValueDim: c.value, PageTokens: c.page, Scale: 0.09, Mask: attn.Mask{Causal: true},
				Pages: attn.Separate(attn.Float16, c.dim, c.value, attn.PageStrides{}, attn.PageStrides{}).Packed(c.kv, c.page),
				Query: attn.PackedRows(c.heads, c.dim), Out: attn.PackedRows(c.heads, c.value), LSE: attn.PackedRows(c.heads, 1),
			}
			rng := rand.New(rand.NewPCG(1, 2))
			memory := func(n int) gpu.Memory {
				x := m.noise(b, rng, n, attn.Float16)
				b.Cleanup(func() { noError(b, x.Buffer.Close()) })
				return x
			}
			tokens := c.batch * c.keys * c.kv
			pages := attn.InPlanes(memory(tokens*c.dim), memory(tokens*c.value))
			all := memory(tokens * (c.dim + c.value))
			var seqs []attn.Sequence
			order := rng.Perm(c.batch * c.keys / c.page)
			for i := range c.batch {
				s := attn.Sequence{Row: i, Queries: 1, Keys: c.keys}
				for j := range c.keys / c.page {
					s.Pages = append(s.Pages, int32(order[i*c.keys/c.page+j]))
				}
				seqs = append(seqs, s)
			}
			o := Operands{Q: memory(c.batch * c.heads * c.dim), Out: memory(c.batch * c.heads * c.value), Pages: pages}
			plan := m.engine.NewPlan()
			noError(b, plan.Build(g, seqs, c.batch))
			noError(b, plan.Upload(m.Stream))
			b.Cleanup(func() { noError(b, plan.Close()) })
			read := m.Ceiling(b, all, memory(2048))
			runs := []func() time.Duration{m.timed(b, 8, func(int) error { return plan.Run(m.Stream, &o) }), m.timed(b, 8, func(int) error { return read() })}
			took := make([][]time.Duration, len(runs))
			for range 15 {
				for i, run := range runs {
					took[i] = append(took[i], run())
				}
			}
			slices.Sort(took[0])
			slices.Sort(took[1])
			mine, ceiling := took[0][7], took[1][7]
			fmt.Printf("%-40s %8.2f us %5.0f GB/s, ceiling %8.2f us: %.3f\n", b.Name(), mine.Seconds()*1e6, float64(2*tokens*(c.dim+c.value))/float64(mine.Nanoseconds()), ceiling.Seconds()*1e6, ceiling.Seconds()/mine.Seconds())
			b.ReportMetric(0, "ns/op")
		})
	}
}
