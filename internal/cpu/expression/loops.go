package expression

import (
	"math"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/variant"
)

func fill[T any](x []T, to T) {
	x[0] = to
	for n := 1; n < len(x); n *= 2 {
		copy(x[n:], x[:n])
	}
}

func take[T, U cpu.Real | int32 | int64](dst []T, src []U, index []int32) {
	for k, at := range index {
		dst[k] = T(src[at])
	}
}

func pick[T any](dst []T, c []int32, x, y []T) {
	x, y, c = x[:len(dst)], y[:len(dst)], c[:len(dst)]
	for k := range dst {
		if dst[k] = y[k]; c[k] != 0 {
			dst[k] = x[k]
		}
	}
}

func ofFloats[F cpu.Real](op variant.Op, dst, x []F) {
	x = x[:len(dst)]
	switch op {
	case variant.Negate:
		for k := range dst {
			dst[k] = -x[k]
		}
	case variant.Abs:
		for k := range dst {
			dst[k] = F(math.Abs(float64(x[k])))
		}
	default:
		n := variant.Node{Op: op}
		for k := range dst {
			dst[k] = F(n.Of(float64(x[k]), 0, 0))
		}
	}
}

func ofInts(op variant.Op, dst, x []int32) {
	for k, x := range x {
		switch op {
		case variant.Negate:
			dst[k] = -x
		case variant.Abs:
			dst[k] = max(x, -x)
		case variant.Not:
			dst[k] = 1 - x
		}
	}
}

func arithmetic[T cpu.Real | int32](op variant.Op, dst, x, y []T) {
	x, y = x[:len(dst)], y[:len(dst)]
	switch op {
	case variant.Add:
		for k := range dst {
			dst[k] = x[k] + y[k]
		}
	case variant.Subtract:
		for k := range dst {
			dst[k] = x[k] - y[k]
		}
	case variant.Multiply:
		for k := range dst {
			dst[k] = x[k] * y[k]
		}
	case variant.Divide:
		for k := range dst {
			dst[k] = x[k] / y[k]
		}
	case variant.Min:
		for k := range dst {
			dst[k] = min(x[k], y[k])
		}
	case variant.Max:
		for k := range dst {
			dst[k] = max(x[k], y[k])
		}
	}
}

func divide(op variant.Op, dst, x []int32, by int32) {
	for k, x := range x {
		q, r := x/by, x%by
		if r < 0 {
			q, r = q-1, r+by
		}
		if dst[k] = q; op == variant.Remainder {
			dst[k] = r
		}
	}
}

func logic(op variant.Op, dst, x, y []int32) {
	x, y = x[:len(dst)], y[:len(dst)]
	if op == variant.And {
		for k := range dst {
			dst[k] = x[k] & y[k]
		}
		return
	}
	for k := range dst {
		dst[k] = x[k] | y[k]
	}
}

func compare[T cpu.Real | int32](op variant.Op, dst []int32, x, y []T) {
	x, y = x[:len(dst)], y[:len(dst)]
	truth := func(b bool) int32 {
		if b {
			return 1
		}
		return 0
	}
	switch op {
	case variant.Less:
		for k := range dst {
			dst[k] = truth(x[k] < y[k])
		}
	case variant.LessEqual:
		for k := range dst {
			dst[k] = truth(x[k] <= y[k])
		}
	case variant.Equal:
		for k := range dst {
			dst[k] = truth(x[k] == y[k])
		}
	}
}

func widen[F cpu.Real](dst []F, x []int32) {
	x = x[:len(dst)]
	for k := range dst {
		dst[k] = F(x[k])
	}
}

func shiftRight(dst, x, by []int32) {
	x, by = x[:len(dst)], by[:len(dst)]
	for k := range dst {
		dst[k] = x[k] >> by[k]
	}
}

// hideScores copies scores, and -Inf where sees is 0.
func hideScores[F cpu.Real](dst, scores []F, sees []int32) {
	scores, sees = scores[:len(dst)], sees[:len(dst)]
	for k := range dst {
		if dst[k] = scores[k]; sees[k] == 0 {
			dst[k] = F(math.Inf(-1))
		}
	}
}
