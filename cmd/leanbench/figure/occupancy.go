package figure

import "gorgonia.org/leanattention/internal/attn"

// Step is a decode step in float16 on a GPU with a number of multiprocessors.
type Step struct {
	Heads, KVHeads, Dim int
	Lengths             []int
	Multiprocessors     int
}

// Occupancy returns the share of the multiprocessors' time that a schedule fills with LeanTiles. policyName
// is a name from -policy of leanbench schedule. splits is the number of splits of fixed-split, and 0 means as
// many as the multiprocessors can run at the same time.
func Occupancy(policyName string, splits int, s Step) (float64, error) {
	p := &problem{heads: s.Heads, kvHeads: s.KVHeads, dim: s.Dim, lengths: s.Lengths, workers: s.Multiprocessors, dtype: attn.Float16}
	x, err := policy{name: policyName, splits: splits}.schedule(p)
	if err != nil {
		return 0, err
	}
	return x.occupancy(), nil
}
