package attn

import (
	"fmt"
	"iter"
	"math/bits"
)

// Tree says which of a sequence's new tokens each of them sees, where they are guesses of which some follow
// each other and others stand beside each other: bit j of Tree[i] is set where token i sees token j. All keys
// before the new tokens are seen by all of them. nil is no tree: each token sees those before it.
type Tree []uint64

// MaxTree is how many tokens a tree has at most.
const MaxTree = 64

// Check reports what is wrong with a tree of so many new tokens.
func (t Tree) Check(tokens int) error {
	if len(t) != tokens {
		return fmt.Errorf("a tree of %d tokens for %d", len(t), tokens)
	}
	if tokens > MaxTree {
		return fmt.Errorf("a tree of %d tokens: %d are the most", tokens, MaxTree)
	}
	for i, seen := range t {
		if seen>>i&1 == 0 {
			return fmt.Errorf("token %d of a tree does not see itself: mask %#x", i, seen)
		}
		if last := bits.Len64(seen) - 1; last > i {
			return fmt.Errorf("token %d of a tree sees token %d, which comes after it: mask %#x", i, last, seen)
		}
	}
	return nil
}

// Sees says whether token i sees token j.
func (t Tree) Sees(i, j int) bool { return t[i]>>j&1 != 0 }

// Depth returns how many new tokens lie between the sequence and token i: those that it sees besides itself.
func (t Tree) Depth(i int) int { return bits.OnesCount64(t[i]) - 1 }

// Seen returns the token that token i sees as number n of those that it sees, the nearest to the sequence being number 0.
func (t Tree) Seen(i, n int) int {
	seen := t[i]
	for range n {
		seen &= seen - 1
	}
	return bits.TrailingZeros64(seen)
}

// Chain says whether each token sees all before it, as without a tree.
func (t Tree) Chain() bool {
	for i := range t {
		if t.Depth(i) != i {
			return false
		}
	}
	return true
}

// Runs are the tokens of [first, end) that token i sees, as ranges [from, to) that are as long as can be.
func (t Tree) Runs(i, first, end int) iter.Seq2[int, int] {
	return func(yield func(from, to int) bool) {
		seen := t[i] >> first << first
		for seen != 0 {
			from := bits.TrailingZeros64(seen)
			to := from + bits.TrailingZeros64(^(seen >> from))
			if from >= end || !yield(from, min(to, end)) {
				return
			}
			seen = seen >> to << to
		}
	}
}

// CheckParents reports what is wrong with the parents of so many new tokens.
func CheckParents(parents []int, tokens int) error {
	if len(parents) != tokens {
		return fmt.Errorf("%d parents of %d tokens", len(parents), tokens)
	}
	if tokens > MaxTree {
		return fmt.Errorf("a tree of %d tokens: %d are the most", tokens, MaxTree)
	}
	for i, parent := range parents {
		if parent < -1 || parent >= i {
			return fmt.Errorf("the parent of token %d is %d, outside [-1, %d)", i, parent, i)
		}
	}
	return nil
}

// AppendTree appends the tree of checked parents to dst: parents[i] is the token that token i follows, -1 for the sequence itself.
func AppendTree(dst []uint64, parents []int) []uint64 {
	at := len(dst)
	for i, parent := range parents {
		seen := uint64(1) << i
		if parent >= 0 {
			seen |= dst[at+parent]
		}
		dst = append(dst, seen)
	}
	return dst
}

// TreeOf returns the tree of parents.
func TreeOf(parents []int) (Tree, error) {
	if err := CheckParents(parents, len(parents)); err != nil {
		return nil, err
	}
	return AppendTree(nil, parents), nil
}
