//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"errors"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// testLatentNarrow runs random problems of latents of E4M3 with queries of bfloat16: all numbers of rows, pages and schedules.
func testLatentNarrow(t *testing.T, m *machine, count, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	heads := []int{16, 64, 5, 20, 1, 128, 32}
	for i := range count {
		s := randomLatent(rng, heads[i%len(heads)], i < len(heads), longest) // first tiles of each number of heads alone
		in := enginetest.Pick(rng, reftest.Normal, reftest.Peaked, reftest.Extreme, reftest.Constant)
		p := m.newGrouped(t, rng, in, s, enginetest.Pick(rng, 1, 3, 8, 12, 16, 64, 128), attn.BFloat16)
		p.geometry.QueryType = p.query
		p.randomSchedule()
		p.geometry.Unfused = false
		p.run(t, m, plan)
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, schedule %+v", i, in, p, p.geometry)
		}
		if k := plan.Kernels(); slices.Contains(k, "latent_any_e4m3") {
			t.Fatalf("%v ran", k)
		}
		p.free(t)
	}
	s := reftest.Shape{Heads: 20, KVHeads: 1, Dim: latentDim, ValueDim: latentValue, Queries: []int{1, 0, 2, 1}, Keys: []int{longest, 30, longest / 2, 0}, Mask: attn.Mask{Causal: true}}
	p := m.newGrouped(t, rng, reftest.Peaked, s, 16, attn.BFloat16)
	p.geometry.QueryType = p.query
	for _, policy := range []lean.Policy{{}, {Kind: lean.PerHead}, {Kind: lean.FixedSplit, Splits: 3}, {Kind: lean.FixedSplit, Splits: 100}} {
		p.geometry.Policy = policy
		m.Poison(t, &p.o)
		m.Poison(t, &p.lse)
		p.run(t, m, plan)
		if p.check(t); t.Failed() {
			t.Fatalf("%v, %+v", p, policy)
		}
	}
	o := p.operands()
	o.Pages, o.Q.DType = p.pages(), attn.Float16
	if err := plan.Run(m.Stream, o); !errors.Is(err, attn.ErrDType) {
		t.Errorf("queries of another type than the plan's: %v", err)
	}
	p.free(t)
	noError(t, plan.Close())
}

func TestGPULatentColumns(t *testing.T) {
	m := realGPU(t)
	if !m.engine.hasEpilogue() {
		t.Skip("kernels for latents as rows of products are those of 9.0")
	}
	testLatentNarrow(t, m, enginetest.OrShort(200, 40), 20000)
}
