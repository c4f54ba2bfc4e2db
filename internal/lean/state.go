package lean

import "math"

// Float is the type in which a State is accumulated.
type Float interface{ ~float32 | ~float64 }

// State is the result of attending with one query row to a set of keys J:
//
//	M = max s_j           (j in J)
//	L = sum 2^(s_j-M)
//	O = sum 2^(s_j-M) v_j
//
// where s_j = scale*log2(e) * q.k_j are base-2 scores. O is un-scaled: the
// attention output is O/L, which Normalize gives.
//
// The empty set has M = -Inf, L = 0 and O = 0. It is the identity of Merge,
// merging two empty states gives an empty state, and no step on the way makes a
// NaN out of (-Inf) - (-Inf). Where M is -Inf the methods read neither L nor O,
// so a partial of nothing need not have its O cleared before it is merged. A
// score that is NaN makes the state NaN, for good.
//
// O is a slice header, so that a State can be laid over any row of a larger
// buffer without copying.
type State[F Float] struct {
	O    []F
	M, L F
}

// Reset makes s the state of the empty set of keys.
func (s *State[F]) Reset() {
	clear(s.O)
	s.M = F(math.Inf(-1))
	s.L = 0
}

// Empty reports whether s is the state of the empty set of keys.
func (s *State[F]) Empty() bool { return s.M == F(math.Inf(-1)) }

// Merge makes s the state of the union of its keys and those of t, which must
// have none in common:
//
//	m = max(s.M, t.M)
//	O = 2^(s.M-m) s.O + 2^(t.M-m) t.O
//	L = 2^(s.M-m) s.L + 2^(t.M-m) t.L
//
// It is the softmax re-scaling operation f(x, y) of section IV-A. In exact
// arithmetic it is associative and commutative; in floating point it is so
// within rounding, which is why partials are always merged in worker order.
// t.O must be at least as long as s.O, and is only read; t may be s's own
// memory neither in whole nor in part.
func (s *State[F]) Merge(t State[F]) {
	to := t.O[:len(s.O)]
	if t.Empty() {
		return
	}
	if s.Empty() {
		copy(s.O, to)
		s.M, s.L = t.M, t.L
		return
	}
	m := max(s.M, t.M)
	a := F(math.Exp2(float64(s.M - m)))
	b := F(math.Exp2(float64(t.M - m)))
	for i, x := range s.O {
		s.O[i] = a*x + b*to[i]
	}
	s.M = m
	s.L = a*s.L + b*t.L
}

// Normalize writes the attention output and returns the log-sum-exp of the
// scores:
//
//	dst = O / L
//	LSE = ln sum e^(s_j ln 2) = ln 2 * (M + log2 L)
//
// The empty state gives dst = 0 and -Inf. dst must be at least as long as O and
// may be O itself. (Algorithm 2, lines 38 and 39.)
func (s *State[F]) Normalize(dst []F) F {
	dst = dst[:len(s.O)]
	if s.Empty() {
		clear(dst)
		return s.M
	}
	for i, x := range s.O {
		dst[i] = x / s.L
	}
	return s.LSE()
}

// LSE returns the natural logarithm of the sum of the exponentials of the
// scores, ln 2 * (M + log2 L), and -Inf for the empty state. It is computed in
// float64 and rounded once: M may be large beside log2 L.
func (s *State[F]) LSE() F {
	if s.Empty() {
		return s.M
	}
	return F(math.Ln2 * (float64(s.M) + math.Log2(float64(s.L))))
}
