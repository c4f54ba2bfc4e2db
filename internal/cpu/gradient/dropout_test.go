package gradient

import (
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestBackwardGradDropout(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 8, 30)
	if reftest.RaceEnabled {
		n = 20
	}
	for i := range n {
		s := reftest.RandomDropout(rng, reftest.RandomShape(rng))
		if i%2 == 0 {
			s = reftest.RandomScoreMods(rng, s)
		}
		if i%5 == 0 {
			s = cputest.Long(t, rng, s, 300, 600)
		}
		verifyBackwardSomehow(t, rng, s, i%4 < 2)
	}
}

// Without a seed the bits of gradients are those without dropout, and with one they are the same for any number of workers.
func TestBackwardDropoutBits(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 24, ValueDim: 16, Queries: []int{90, 90}, Keys: []int{150, 77}, Mask: attn.Mask{Causal: true, Window: 70}}
	b := newBackward[float32](rng, s, reftest.Normal, ofBoth, 0)
	run := func(p float64, seed int64, workers int) []float32 {
		b.shape.Dropout, b.ops.Seed, b.shape.Workers = p, seed, workers
		b.poison()
		if err := Run(cpu.Default(), &b.shape, &b.ops); err != nil {
			t.Fatal(err)
		}
		return slices.Concat(b.ops.DQ, b.ops.DK, b.ops.DV)
	}
	plain := run(0, 0, 1)
	if !slices.Equal(run(0.3, 0, 1), plain) || !slices.Equal(run(0, 9, 1), plain) {
		t.Error("without a seed there are other bits")
	}
	dropped := run(0.3, 9, 1)
	if slices.Equal(dropped, plain) || slices.Equal(run(0.3, 10, 1), dropped) {
		t.Error("a seed changes nothing")
	}
	for _, workers := range []int{2, 3, 7} {
		if !slices.Equal(run(0.3, 9, workers), dropped) {
			t.Errorf("%d workers give other bits", workers)
		}
	}
}
