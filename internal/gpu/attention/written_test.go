package attention

import (
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// putTensors copies the variant's tensors to the machine, as floats of the queries' type and ints of 32 bits.
func (p *problem) putTensors(m *machine, t testing.TB) {
	if p.Variant == nil {
		return
	}
	p.geometry.Variant, p.geometry.QueryType = p.Variant, p.query
	for i := range p.Tensors {
		x := &p.Tensors[i]
		data := gpu.BytesOf(x.I32)
		to := Tensor{Shape: x.Shape}
		to.Memory.DType = attn.Float32
		if x.F64 != nil {
			to.Memory.DType, data = p.query, make([]byte, len(x.F64)*p.query.Size())
			for k, f := range x.F64 {
				enginetest.Put(data, k, p.query, f)
				x.F64[k] = enginetest.Get(data, k, p.query)
			}
		}
		to.Memory = m.Put(t, data, to.Memory.DType)
		p.tensors = append(p.tensors, to)
	}
}

// testWritten runs variants of the gallery, n of them, with random shapes, layouts, schedules, and other masks and changes of scores.
func testWritten(t *testing.T, m *machine, n, each, longest int) {
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	order := rng.Perm(len(reftest.Gallery))
	order = slices.DeleteFunc(order, func(i int) bool { return reftest.Gallery[i].Unnormalised })
	for turn, i := range order[:min(n, len(order))] {
		kv, dim := gpu.Types[(turn+i)%3], enginetest.Pick(rng, 64, 128)
		causal, window := rng.IntN(3) == 0, enginetest.Pick(rng, 0, 0, 1, 17, 100)
		for k := range each {
			s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: causal, Window: window}}
			s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 2, 3, 8, 17)
			for range enginetest.Pick(rng, 1, 2, 4) {
				s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 2, 5, 1+rng.IntN(20)))
				s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 17, 64, 130, rng.IntN(longest)))
			}
			s = s.Varied(rng, i)
			p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), options{shape: &s, kv: kv, dense: k%2 == 0})
			p.randomSchedule()
			p.geometry.Unfused = false
			m.run(t, plan, p)
			if !strings.HasPrefix(plan.form.kernel.entries[0], "written_") {
				t.Fatalf("%v goes to %v", p, plan.form.kernel.entries)
			}
			if p.check(t); t.Failed() {
				t.Fatalf("%s: %v, schedule %+v", reftest.Gallery[i].Name, p, p.geometry)
			}
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

// testWrittenPrefill runs variants of the gallery, and random ones, n in all, by prefill kernels, alone or beside decode kernels.
func testWrittenPrefill(t *testing.T, m *machine, take choice, n, longest int) {
	nvrtc.ForTest(t)
	m.engine.choice = take
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	parts, both, turn := 0, 0, rng.IntN(len(reftest.Gallery))
	beside := take == takeBoth && m.runsBeside()
	for i := range reftest.AtLeast(n, func() bool { return parts > 0 && (both > 0 || !beside) }) {
		m.engine.Eager = i%4 < 3 // short output tiles are cut, too
		group := enginetest.Pick(rng, 1, 2, 3)
		shape := reftest.Shape{KVHeads: 1, Heads: group, Dim: enginetest.Pick(rng, headDims...), Mask: attn.Mask{Causal: rng.IntN(2) == 0, Window: enginetest.Pick(rng, 0, 0, 0, 17, 100)}}
		shape.ValueDim, shape.SoftCap = shape.Dim, enginetest.Pick(rng, 0, 0, 0, 3.)
		for _, rows := range []int{prefillRows + rng.IntN(150), enginetest.Pick(rng, 0, 1, 2, 20)} {
			shape.Queries, shape.Keys = append(shape.Queries, (rows+group-1)/group), append(shape.Keys, enginetest.Pick(rng, 0, 64, 129, 256, 256+rng.IntN(longest), rng.IntN(longest), rows))
		}
		if i%2 == 0 {
			turn++
			shape = shape.Varied(rng, turn%len(reftest.Gallery))
		} else {
			p, err := variant.New(reftest.RandomVariant(rng, false, 1+rng.IntN(2)))
			if err != nil {
				continue // too many operations
			}
			shape.Variant, shape.Tensors = p, reftest.RandomTensors(rng, p)
		}
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), options{shape: &shape, kv: enginetest.Pick(rng, attn.Float16, attn.BFloat16), dense: rng.IntN(2) == 0, mixed: rng.IntN(4) == 0})
		if shape.Variant.Unnormalised {
			noError(t, p.lse.Buffer.Close())
			p.lse.Buffer = nil
		}
		m.run(t, plan, p)
		if k := plan.kernelOf(p.operands(), false); k.parts == 0 || k.needs != attn.Varied {
			t.Fatalf("%v goes to %v", p, k.entries)
		}
		if slices.ContainsFunc(plan.prefilling.data, func(t prefillTile) bool { return t.parts > 1 }) {
			parts++
		}
		if plan.form.both {
			both++
		}
		if shape.Variant.Unnormalised {
			p.checkOutputs(t, p.Reference(p.precision()), enginetest.Read(t, &p.o))
		} else {
			p.check(t)
		}
		if t.Failed() {
			t.Fatalf("case %d, %v: %v, inputs %+v", i, shape.Variant, p, p.geometry)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testWrittenBuiltIns: built-in masks and changes of scores, and the same as variants, give the same results but for rounding, by decode and
// prefill kernels.
func testWrittenBuiltIns(t *testing.T, m *machine, n int) {
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for _, i := range rng.Perm(len(reftest.BuiltIns))[:min(n, len(reftest.BuiltIns))] {
		for _, queries := range []int{1 + rng.IntN(4), prefillRows + rng.IntN(100)} {
			m.engine.choice = takePrefill
			s := reftest.Shape{Heads: 3, KVHeads: 3, Dim: 64, ValueDim: 64, Queries: []int{queries}, Keys: []int{queries + rng.IntN(150)}}
			p := m.newProblem(t, rng, reftest.Normal, options{shape: &s, kv: enginetest.Pick(rng, attn.Float16, attn.BFloat16), dense: true}) // keys that are hidden are finite
			builtIn, varied := p.BuiltIn(rng, i)
			p.Shape = builtIn
			plain := p.geometry
			p.geometry.Mask, p.geometry.Score = p.Mask, attn.Score{Cap: p.SoftCap, Slopes: attn.NewSlopes(p.Slopes)}
			for range 2 {
				m.Poison(t, &p.o)
				m.Poison(t, &p.lse)
				m.run(t, plan, p)
				if k := plan.kernelOf(p.operands(), false); (k.parts > 0) != (queries >= prefillRows) || (k.needs != 0) != (p.geometry.Reduced().Variant != nil) {
					t.Fatalf("%d queries go to %v", queries, k.entries)
				}
				if p.check(t); t.Failed() {
					t.Fatalf("%s: %+v", reftest.BuiltIns[i].Name, p.geometry)
				}
				p.Shape, p.geometry = varied, plain
				p.putTensors(m, t)
				p.Shape = builtIn // of the reference
			}
			p.close(t)
		}
	}
	noError(t, plan.Close())
}

// testWrittenSteps: prefill kernels leave out steps that no query sees, which may hold NaN, and ask no expression about steps that all see.
func testWrittenSteps(t *testing.T, m *machine) {
	nvrtc.ForTest(t)
	m.engine.choice = takePrefill
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	compiled := map[[2]attn.DType]*kernel{}
	cases := []struct {
		width, n int
		keys     int32 // of steps that are not left out
		from, to int32 // of steps that all see
	}{{256, 1000, 444, 0, 768}, {256, 300, 256, 0, 256}, {128, 1000, 384, 0, 640}, {1280, 640, 640, 0, 640}, {64, 1000, 700, 640, 768}, {64, 0, 0, 0, 0}}
	rng.Shuffle(len(cases), func(i, j int) { cases[i], cases[j] = cases[j], cases[i] })
	if m.Few(t) {
		cases = cases[:2]
	}
	for _, x := range cases {
		v, err := variant.New(variant.Source{Visible: "div(key, w) % 2 == 0 && key < n", Params: map[string]float64{"w": float64(x.width), "n": float64(x.n)}})
		noError(t, err)
		s := reftest.Shape{Heads: 1, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{40}, Keys: []int{700}, Variant: v}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &s, kv: attn.Float16, dense: true})
		for j := 0; j < 700; j++ {
			if first := j - j%cutKeys; slices.ContainsFunc([]int{first, first + 64, first + 127}, func(j int) bool { return j/x.width%2 == 0 && j < x.n }) {
				continue
			}
			for _, hidden := range []gpu.Memory{p.k, p.v} {
				hidden.Offset += int64(j * 64 * 2)
				hidden.Len = 64
				m.Poison(t, &hidden)
			}
		}
		m.run(t, plan, p)
		keys := int32(0)
		for _, o := range plan.prefilling.data {
			keys += o.end - o.first
		}
		if b := plan.written.many.blocks.data[0]; keys != x.keys || b.from != x.from || b.to != x.to {
			t.Errorf("%+v: %d keys, %+v", x, keys, b)
		}
		types := [2]attn.DType{p.query, p.out}
		if k := plan.kernelOf(p.operands(), false); compiled[types] != nil && k != compiled[types] {
			t.Errorf("%+v: another kernel", x)
		} else {
			compiled[types] = k
		}
		p.check(t)
		p.close(t)
	}
	noError(t, plan.Close())
}

// testWrittenTiles: LeanTiles that no query sees are not scheduled and may hold NaN, and other numbers compile nothing.
func testWrittenTiles(t *testing.T, m *machine) {
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	var compiled *kernel
	for _, x := range []struct{ width, n, tiles int }{{128, 1000, 6}, {128, 300, 3}, {64, 1000, 5}, {640, 640, 10}, {64, 0, 0}} {
		v, err := variant.New(variant.Source{Visible: "div(key, w) % 2 == 0 && key < n", Params: map[string]float64{"w": float64(x.width), "n": float64(x.n)}})
		noError(t, err)
		s := reftest.Shape{Heads: 4, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{3}, Keys: []int{640}, Variant: v}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &s, kv: attn.Float16, dense: true})
		p.geometry.TileTokens, p.geometry.Workers = 64, enginetest.Pick(rng, 0, 1, 3)
		for j := 0; j < 640; j += 64 {
			if j/x.width%2 == 0 && j < x.n {
				continue
			}
			for _, hidden := range []gpu.Memory{p.k, p.v} {
				hidden.Offset += int64(j * 64 * 2)
				hidden.Len = 64 * 64
				m.Poison(t, &hidden)
			}
		}
		m.run(t, plan, p)
		if got := plan.sched.Tiles(); got != int64(x.tiles) {
			t.Errorf("%+v: %d LeanTiles", x, got)
		}
		if k := plan.form.kernel; compiled != nil && k != compiled {
			t.Errorf("%+v: another kernel", x)
		} else {
			compiled = k
		}
		p.check(t)
		p.close(t)
	}
	noError(t, plan.Close())
}

func TestGPUWrittenTiles(t *testing.T) { testWrittenTiles(t, realGPU(t)) }

func TestGPUWrittenPrefill(t *testing.T) {
	m := realGPU(t)
	testWrittenPrefill(t, m, takePrefill, 200, 2000)
	testWrittenPrefill(t, m, takeBoth, 40, 2000)
	testWrittenSteps(t, m)
	testWrittenBuiltIns(t, m, len(reftest.BuiltIns))
}

func TestGPUWritten(t *testing.T) { testWritten(t, realGPU(t), 12, 20, 3000) }
