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

func TestGPUWritten(t *testing.T) { testWritten(t, realGPU(t), 12, 20, 3000) }
