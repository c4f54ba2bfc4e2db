package expression

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/variant"
)

// stepCode is an operation of vectors of float32 or int32.
type stepCode uint64

const (
	noStep stepCode = iota
	addF
	subtractF
	multiplyF
	divideF
	lessF
	lessEqualF
	equalF
	addI
	subtractI
	multiplyI
	minI
	maxI
	lessI
	lessEqualI
	equalI
	and
	or
	not
	negateF
	absF
	negateI
	absI
	toFloat
	shift  // a >> b
	choose // c != 0 ? a : b
	hide   // b != 0 ? a : -Inf
	spread // *a
	gather // a[b], of elements of 4 bytes
)

// codes are the operations of floats, and of ints and bools, by the kind of their arguments.
var codes = [...]map[variant.Op]stepCode{
	variant.Float: {
		variant.Add: addF, variant.Subtract: subtractF, variant.Multiply: multiplyF, variant.Divide: divideF,
		variant.Less: lessF, variant.LessEqual: lessEqualF, variant.Equal: equalF, variant.Negate: negateF, variant.Abs: absF,
	},
	variant.Int: {
		variant.Add: addI, variant.Subtract: subtractI, variant.Multiply: multiplyI, variant.Min: minI, variant.Max: maxI,
		variant.Less: lessI, variant.LessEqual: lessEqualI, variant.Equal: equalI, variant.Negate: negateI, variant.Abs: absI, variant.ToFloat: toFloat,
	},
	variant.Bool: {variant.And: and, variant.Or: or, variant.Not: not},
}

// stepGo computes an operation for n elements, a multiple of 8. Operands that the operation does not have are not read. dst may be an operand.
func stepGo(code uint64, dst, a, b, c *uint32, n int) {
	f := func(p *uint32) []float32 { return unsafe.Slice((*float32)(unsafe.Pointer(p)), n) }
	i := func(p *uint32) []int32 { return unsafe.Slice((*int32)(unsafe.Pointer(p)), n) }
	for kind, of := range codes {
		for op, is := range of {
			switch {
			case is != stepCode(code):
			case is == toFloat:
				widen(f(dst), i(a))
			case is == negateF || is == absF:
				ofFloats(op, f(dst), f(a))
			case is == negateI || is == absI || is == not:
				ofInts(op, i(dst), i(a))
			case is == and || is == or:
				logic(op, i(dst), i(a), i(b))
			case is >= lessF && is <= equalF:
				compare(op, i(dst), f(a), f(b))
			case is >= lessI && is <= equalI:
				compare(op, i(dst), i(a), i(b))
			case variant.Kind(kind) == variant.Float:
				arithmetic(op, f(dst), f(a), f(b))
			default:
				arithmetic(op, i(dst), i(a), i(b))
			}
		}
	}
	switch stepCode(code) {
	case shift:
		shiftRight(i(dst), i(a), i(b))
	case choose:
		pick(i(dst), i(c), i(a), i(b))
	case hide:
		hideScores(f(dst), f(a), i(b))
	case spread:
		fill(i(dst), *(*int32)(unsafe.Pointer(a)))
	case gather:
		for k, at := range i(b) {
			i(dst)[k] = *(*int32)(unsafe.Add(unsafe.Pointer(a), 4*int(at)))
		}
	}
}

// stepFor returns the fastest function of the tier with the contract of stepGo. It is nil if Go's loops are the fastest.
func stepFor[F cpu.Real]() func(code uint64, dst, a, b, c *uint32, n int) {
	if unsafe.Sizeof(F(0)) != 4 {
		return nil
	}
	return steps[cpu.InUse()]
}
