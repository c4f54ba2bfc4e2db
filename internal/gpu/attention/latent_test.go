package attention

import (
	"fmt"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// testLatent runs random problems of keys that hold the values: all types, numbers of rows, pages and schedules.
func testLatent(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	ran := map[string]bool{}
	heads := []int{16, 64, 5, 32, 128, 1, 20}
	for i := range n {
		s := reftest.Shape{Heads: heads[i%len(heads)], KVHeads: 1, Dim: 576, ValueDim: 512, Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
		for range enginetest.Pick(rng, 1, 2, 3, 5) {
			if i < 2*len(heads) { // each number of heads goes to the kernel for its rows
				s.Queries = append(s.Queries, 1)
			} else {
				s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 2, 4))
			}
			s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 15, 63, 64, 65, 127, 128, 129, rng.IntN(longest)))
		}
		o := options{kv: []attn.DType{attn.Float16, attn.BFloat16}[i/len(heads)%2], dense: rng.IntN(4) == 0, mixed: rng.IntN(5) == 0, shape: &s}
		in := enginetest.Pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, o)
		p.randomSchedule()
		p.geometry.Unfused = false
		m.run(t, plan, p)
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, schedule %+v", i, in, p, p.geometry)
		}
		for _, k := range plan.Kernels() {
			ran[k] = true
		}
		p.close(t)
	}
	noError(t, plan.Close())
	for _, name := range []string{"16", "32", "64"} {
		if k := fmt.Sprintf("latent_f16_%s", name); n >= 2*len(heads) && !ran[k] {
			t.Errorf("no problem went to %s, but to %v", k, ran)
		}
	}
}

// testLatentSchedules: every schedule of one problem is correct.
func testLatentSchedules(t *testing.T, m *machine, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i, kv := range []attn.DType{attn.Float16, attn.BFloat16} {
		shape := reftest.Shape{Heads: 16 << i, KVHeads: 1, Dim: 576, ValueDim: 512, Queries: []int{1, 0, 2, 1}, Keys: []int{longest, 30, longest / 2, 0}, Mask: attn.Mask{Causal: true}}
		p := m.newProblem(t, rng, reftest.Peaked, options{shape: &shape, kv: kv})
		for _, policy := range []lean.Policy{{}, {Kind: lean.PerHead}, {Kind: lean.FixedSplit, Splits: 3}, {Kind: lean.FixedSplit, Splits: 100}} {
			for _, workers := range []int{0, 1, 3} {
				p.geometry.Policy, p.geometry.Workers = policy, workers
				m.Poison(t, &p.o)
				m.Poison(t, &p.lse)
				m.run(t, plan, p)
				p.check(t)
				if t.Failed() {
					t.Fatalf("%v, %+v, %d workers", p, policy, workers)
				}
			}
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// testLatentPasses: output tiles of few rows beside those of many, with queries in two parts, which take two passes over the keys.
func testLatentPasses(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	m.engine.Eager = true // parts of output tiles
	defer func() { m.engine.Eager = false }()
	plan, precise := m.engine.NewPlan(), 0
	for range reftest.AtLeast(2, func() bool { return precise > 0 }) {
		shape := reftest.Shape{Heads: 20, KVHeads: 1, Dim: 576, ValueDim: 512, Queries: []int{4, 1}, Keys: []int{500 + rng.IntN(64), 70}, Mask: attn.Mask{Causal: true}}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float16})
		m.run(t, plan, p)
		if p.check(t); p.query != p.kv {
			precise++
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

func TestGPULatent(t *testing.T) {
	m := realGPU(t)
	if !m.engine.hasEpilogue() {
		t.Skip("kernels for values in keys are those of 9.0")
	}
	testLatent(t, m, enginetest.OrShort(300, 60), 20000)
	testLatentSchedules(t, m, 3000)
	testLatentPasses(t, m)
}
