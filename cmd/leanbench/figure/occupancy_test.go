package figure

import (
	"slices"
	"strings"
	"testing"
)

func TestOccupancy(t *testing.T) {
	// One sequence with 56 heads on an H100: figure 3 of the paper.
	s := Step{Heads: 56, KVHeads: 56, Dim: 64, Lengths: []int{1 << 16}, Multiprocessors: 132}
	for _, c := range []struct {
		policy string
		splits int
		want   float64
	}{
		{perHead, 0, 56.0 / 132},
		{fixedSplit, 2, 112.0 / 132},
		{fixedSplit, 4, 224.0 / 264}, // two waves
		{streamK, 0, 14336.0 / (132 * 109)},
	} {
		if got, err := Occupancy(c.policy, c.splits, s); err != nil || got < c.want-1e-9 || got > c.want+1e-9 {
			t.Errorf("%s, %d splits: %v (%v), want %v", c.policy, c.splits, got, err, c.want)
		}
	}
	if got, err := Occupancy(gpuEngine, 0, s); err != nil || got < 0.95 || got > 1 {
		t.Errorf("%v (%v)", got, err)
	}
	s.Dim, s.Lengths = 264, slices.Repeat([]int{5}, 3)
	if _, err := Occupancy(gpuEngine, 0, s); err == nil || !strings.Contains(err.Error(), "head dim 264") {
		t.Errorf("error %v", err)
	}
}
