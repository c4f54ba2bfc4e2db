package reftest

import "math/rand/v2"

// Fork says how a sequence begins: with so many pages of one before it.
type Fork struct{ Of, Pages int }

// RandomForks draws a tree of forks among the sequences of c, in pages of so many tokens: keys and values of a
// sequence's first pages become those of the one that it was forked from. What is shared is full of keys before
// all queries, or with all of any keys.
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

// fork makes sequence i begin with so many keys of sequence j.
func (c *Case) fork(i, j, keys int) {
	for key := range keys {
		for h := range c.KVHeads {
			copy(c.Key(i, key, h), c.Key(j, key, h))
			copy(c.Value(i, key, h), c.Value(j, key, h))
		}
	}
}
