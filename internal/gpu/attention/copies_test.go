package attention

import (
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUCopiesBefore(t *testing.T) {
	testCopiesBefore(t, realGPU(t), enginetest.OrShort(300, 30), options{work: 1e6, longest: 3000})
}

// testCopiesBefore: a plan that is uploaded together with other data is complete when overlapping launches begin.
func testCopiesBefore(t *testing.T, m *machine, n int, o options) {
	rng := reftest.Rand(t)
	noError(t, gpu.PutOffCopies(m.Stream))
	other, err := m.Dev.NewBuffer(512)
	noError(t, err)
	plan := m.engine.NewPlan()
	for i := range n {
		o.kv, o.dense = enginetest.Pick(rng, attn.Float16, attn.BFloat16, attn.Float32), rng.IntN(3) == 0
		in := enginetest.Pick(rng, reftest.AllInputs...)
		p := m.newProblem(t, rng, in, o)
		p.randomSchedule()
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		plan.spoil(t)
		noError(t, plan.memory.table.Set(0, 0xff, plan.memory.table.Len()))
		noError(t, m.Stream.Copy(other, 0, other, 256, 64))
		noError(t, plan.Upload(m.Stream))
		m.queue(t, plan, p)
		m.Settle(t)
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v", i, in, p)
		}
		p.close(t)
	}
	noError(t, plan.Close())
	noError(t, other.Close())
}
