package lean

import (
	"math"
	"unsafe"
)

// Log4E is the factor that makes natural scores base-4 ones, and Ln4 the one that
// makes them natural again.
const (
	Log4E = math.Log2E / 2
	Ln4   = 2 * math.Ln2
)

// Exp4 returns 4^x. (2x may be too large for an F, not only for the result.)
func Exp4[F Float](x F) F { return F(math.Exp2(2 * float64(x))) }

// Float is the type in which a State is accumulated.
type Float interface{ ~float32 | ~float64 }

// State is the result of attending with one query row to a set of keys J:
//
//	M = max s_j           (j in J)
//	L = sum 4^(s_j-M)
//	O = sum 4^(s_j-M) v_j
//
// where s_j = scale*log4(e) * q.k_j are base-4 scores. O is un-scaled: the
// attention output is O/L, which Normalize gives. Base 4 costs what base 2 does,
// and log4(e) is less than 1: a score that is finite stays so, and M with it.
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
//	O = 4^(s.M-m) s.O + 4^(t.M-m) t.O
//	L = 4^(s.M-m) s.L + 4^(t.M-m) t.L
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
	a, b := Exp4(s.M-m), Exp4(t.M-m)
	for i, x := range s.O {
		s.O[i] = a*x + b*to[i]
	}
	s.M = m
	s.L = a*s.L + b*t.L
}

// Sink adds to the keys of s a score that has no value, an attention sink of base 4: what Merge makes of a state with
// M = score, L = 1 and O = 0. A score of -Inf is none.
func (s *State[F]) Sink(score F) {
	if score == F(math.Inf(-1)) {
		return
	}
	if s.Empty() {
		clear(s.O)
		s.M, s.L = score, 1
		return
	}
	m := max(s.M, score)
	if a := Exp4(s.M - m); a != 1 {
		for i := range s.O {
			s.O[i] *= a
		}
		s.L *= a
	}
	s.M = m
	s.L += Exp4(score - m)
}

// Normalize writes the attention output and returns the log-sum-exp of the
// scores:
//
//	dst = O / L
//	LSE = ln sum e^(s_j ln 4) = ln 4 * M + ln L
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
// scores, ln 4 * M + ln L, and -Inf for the empty state. It is computed in
// float64 and rounded once: M may be large beside ln L. The state of finite
// scores has a finite one, the largest number there is where rounding leads
// beyond that: -Inf says that there is no key.
func (s *State[F]) LSE() F {
	if s.Empty() {
		return s.M
	}
	lse := F(Ln4*float64(s.M) + math.Log(float64(s.L)))
	if math.IsInf(float64(lse), 0) && !math.IsInf(float64(s.M), 0) {
		return F(math.Copysign(largest[F](), float64(lse)))
	}
	return lse
}

func largest[F Float]() float64 {
	if unsafe.Sizeof(F(0)) == 4 {
		return math.MaxFloat32
	}
	return math.MaxFloat64
}
