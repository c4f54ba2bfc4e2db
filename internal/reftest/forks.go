package reftest

import "math/rand/v2"

// Fork describes the start of a sequence: the first Pages pages of sequence Of.
type Fork struct{ Of, Pages int }

// RandomForks draws a tree of forks among the sequences of c, with pages of page tokens. It copies keys and
// values of the parent's first pages to the fork. Shared pages are full. They hold keys before all queries
// or, if all is set, any keys.
func (c *Case) RandomForks(rng *rand.Rand, page int, all bool) []Fork {
	forks := make([]Fork, len(c.Keys))
	whole := func(i int) int {
		if all {
			return c.Keys[i] / page
		}
		return max(c.Keys[i]-c.Queries[i], 0) / page
	}
	for i := 1; i < len(forks); i++ {
		of := rng.IntN(i)
		if most := min(whole(i), whole(of)); most > 0 && rng.IntN(5) > 0 {
			forks[i] = Fork{of, 1 + rng.IntN(most)}
			c.fork(i, of, forks[i].Pages*page)
		}
	}
	return forks
}

// fork copies the first keys of sequence j to sequence i.
func (c *Case) fork(i, j, keys int) {
	for key := range keys {
		for h := range c.KVHeads {
			copy(c.Key(i, key, h), c.Key(j, key, h))
			copy(c.Value(i, key, h), c.Value(j, key, h))
		}
	}
}
