package layers

import (
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// The shares of all members are each column of y once, in memory of their own, whatever the features are dealt out
// as.
func TestShares(t *testing.T) {
	rng := reftest.Rand(t)
	for range 500 {
		members := 2 + rng.IntN(3)
		o := &Sharded{Linear: Linear{Rows: 1 + rng.IntN(2)*rng.IntN(30), In: 8 * (1 + rng.IntN(9))}}
		all := &o.Linear
		if rng.IntN(2) == 0 {
			all.Norm = &Norm{RMS: rng.IntN(2) == 0}
		}
		o.Shards = make([][]Shard, members)
		for range 1 + rng.IntN(mostParts) {
			part := LinearPart{Out: members + rng.IntN(50)}
			part.Y.Len = all.Rows * part.Out
			all.Parts = append(all.Parts, part)
			at := 0
			for i := range members {
				end := (i + 1) * part.Out / members
				o.Shards[i] = append(o.Shards[i], Shard{First: at, Out: end - at, W: gpu.Memory{DType: attn.Float16}})
				at = end
			}
		}
		for i := range all.Parts {
			made := make([]int, all.Rows*all.Parts[i].Out)
			for member := range members {
				s := o.share(member)
				part := &s.linear.Parts[i]
				switch {
				case o.direct():
					at := int(part.Y.Offset) / 4
					for j := range part.Out {
						made[at+j]++
					}
					if at%4 != 0 || len(s.after) > 0 || part.Y.Len != part.Out {
						t.Fatalf("%+v: written at %d", o.Shards, at)
					}
				default:
					m := &s.after[i].Move
					ones := make([]int, m.Extent(&m.From))
					for j := range ones {
						ones[j] = 1
					}
					to := make([]int, len(made))
					attn.MoveElements(m, to, ones)
					for j := range to {
						made[j] += to[j]
					}
					if part.Y.Offset%16 != 0 || part.Y.Len != all.Rows*part.Out || len(ones) != part.Y.Len {
						t.Fatalf("%+v: %+v", o.Shards, part)
					}
				}
			}
			for j, n := range made {
				if n != 1 {
					t.Fatalf("rows %d, %+v: element %d of part %d is made %d times", all.Rows, o.Shards, j, i, n)
				}
			}
		}
		// What lies between has places of its own, and all of it fits.
		for member := range members {
			s := o.share(member)
			used := make([]bool, s.used)
			take := func(m gpu.Memory) {
				for j := range m.Len {
					if used[int(m.Offset)/4+j] {
						t.Fatalf("member %d: element %d has two uses", member, int(m.Offset)/4+j)
					}
					used[int(m.Offset)/4+j] = true
				}
			}
			if member > 0 || all.Norm != nil {
				take(s.linear.X)
			}
			if !o.direct() {
				for _, p := range s.linear.Parts {
					take(p.Y)
				}
			}
		}
	}
}
