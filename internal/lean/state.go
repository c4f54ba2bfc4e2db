package lean

import (
	"math"
	"unsafe"
)

// Log4E converts natural scores to base 4, and Ln4 converts them back.
const (
	Log4E = math.Log2E / 2
	Ln4   = 2 * math.Ln2
)

// Exp4 returns 4^x. It is computed in float64, since 2x may overflow an F where the result does not.
func Exp4[F Float](x F) F { return F(math.Exp2(2 * float64(x))) }

// Float is the element type of a State.
type Float interface{ ~float32 | ~float64 }

// State is the result of attending with one query row to a set J of keys:
//
//	M = max s_j           (j in J)
//	L = sum 4^(s_j-M)
//	O = sum 4^(s_j-M) v_j
//
// where s_j = scale*log4(e) * q.k_j are scores of base 4. O is not normalised: the attention output is O/L, which
// Normalize returns. Base 4 costs as much as base 2. log4(e) is less than 1, so every finite score, and M, stays
// finite.
//
// The empty set has M = -Inf, L = 0 and O = 0. It is the identity of Merge: merging two empty states gives an empty
// state, and no step computes (-Inf) - (-Inf). If M is -Inf, the methods read neither L nor O, so an empty partial
// needs no cleared O. A score of NaN makes the state NaN.
//
// O is a slice header, so that a State can refer to any row of a larger buffer without a copy.
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

// Merge makes s the state of the union of its keys and the keys of t. The two sets must be disjoint.
//
//	m = max(s.M, t.M)
//	O = 4^(s.M-m) s.O + 4^(t.M-m) t.O
//	L = 4^(s.M-m) s.L + 4^(t.M-m) t.L
//
// Merge is the softmax re-scaling operation f(x, y) of section IV-A. It is associative and commutative in exact
// arithmetic, and within rounding in floating point, so partials are always merged in worker order. t.O must be at
// least as long as s.O, and is only read. t and s must not overlap.
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

// Sink adds a score without a value, an attention sink of base 4, to s. It equals a Merge with the state
// M = score, L = 1, O = 0. A score of -Inf is no sink.
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

// Normalize writes the attention output to dst and returns the log-sum-exp of the scores:
//
//	dst = O / L
//	LSE = ln sum e^(s_j ln 4) = ln 4 * M + ln L
//
// The empty state gives dst = 0 and returns -Inf. dst must be at least as long as O and may be O itself. (Algorithm 2,
// lines 38 and 39.)
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

// LSE returns the natural logarithm of the sum of the exponentials of the scores, ln 4 * M + ln L, and -Inf for the
// empty state. It is computed in float64 and rounded once, since M may be large relative to ln L. For finite scores LSE
// is finite: it saturates at the largest F, since -Inf means that there is no key.
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
