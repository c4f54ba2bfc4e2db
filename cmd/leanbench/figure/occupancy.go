package figure

import "gorgonia.org/leanattention/internal/attn"

// Step is a decode step in float16, and what it runs on.
type Step struct {
	Heads, KVHeads, Dim int
	Lengths             []int
	Multiprocessors     int
}

// Occupancy is the share of the multiprocessors' time in which they have LeanTiles, by a
// schedule as -policy of leanbench schedule names it. splits are those of fixed-split; 0: as many as there
// are multiprocessors for at once.
func Occupancy(policyName string, splits int, s Step) (float64, error) {
	p := &problem{heads: s.Heads, kvHeads: s.KVHeads, dim: s.Dim, lengths: s.Lengths, workers: s.Multiprocessors, dtype: attn.Float16}
	x, err := policy{name: policyName, splits: splits}.schedule(p)
	if err != nil {
		return 0, err
	}
	return x.occupancy(), nil
}
