package attention

import (
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// prefillShape draws one with many rows, around the edges of output tiles and steps.
func prefillShape(rng *rand.Rand, longest int) reftest.Shape {
	s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: testgpu.Pick(rng, 64, 128), Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
	s.ValueDim = s.Dim
	s.Heads = s.KVHeads * testgpu.Pick(rng, 1, 1, 2, 3, 8)
	for range testgpu.Pick(rng, 1, 1, 2, 4) {
		rows := testgpu.Pick(rng, 0, 1, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300)
		s.Queries = append(s.Queries, min((rows+s.Heads/s.KVHeads-1)/(s.Heads/s.KVHeads), longest))
		s.Keys = append(s.Keys, testgpu.Pick(rng, 0, 1, 31, 127, 128, 129, 255, 256, 257, rng.IntN(longest), s.Queries[len(s.Queries)-1]))
	}
	return s
}

// testPrefill: the kernels for many rows, on what they can do.
func testPrefill(t *testing.T, m *machine, n, longest int) {
	m.engine.alwaysPrefill = true
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	taken := 0
	for i := range n {
		shape := prefillShape(rng, longest)
		in := testgpu.Pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, options{shape: &shape, kv: testgpu.Pick(rng, attn.Float16, attn.BFloat16), dense: rng.IntN(2) == 0})
		m.run(t, plan, p)
		if plan.kernelOf(p.operands()).way == &prefillWay {
			taken++
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v", i, in, p)
		}
		p.close(t)
	}
	if taken < n/8 {
		t.Errorf("%d of %d problems were computed by a kernel for many rows", taken, n)
	}
	noError(t, plan.Close())
}
