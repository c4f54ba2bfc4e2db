package nn

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Quantised is a matrix of weights of 8 or fewer bits as it is stored. Its Value is the value of a node: the w of a [Linear], [Linears],
// [GatedLinear] or [HeadLinear], or the table of an [Embedding].
type Quantised struct {
	// Format is how rows are stored: in blocks of elements, or as elements of a byte.
	//
	//   - Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K: blocks of GGUF files, by ggml's names.
	//   - int4_32, int4_64, int4_128: groups of so many elements, scale * (integer - zero). A block is the scale, a float16 of two bytes;
	//     the zero, a byte of at most 16; and 16 bytes for each 32 elements: the lower 4 bits of byte i are integer i, and the upper 4
	//     bits integer 16+i. GPTQ and AWQ have such groups in other orders.
	//   - e4m3: numbers of leanattention.E4M3, without NaN, times Scales.
	Format string

	Rows, Columns int

	// Data has the rows, one after the other, each of whole blocks or elements. Data is not copied and must not change. Data may be of a mapped file.
	Data []byte

	// Scales are those of e4m3, in row-major order: one for each row or, if Group is not 0, for each Group elements of a row and for the
	// rest. Group is a multiple of 128. Scales are not copied and must not change.
	Scales []float32
	Group  int

	// Order, if not nil, has the column of each element of a row: element i of every row is the weight of x[Order[i]]. Order has every
	// column once, and must not change. GPTQ has such an order with desc_act. An Order is for formats in blocks.
	Order []int32
}

// Value returns the value of a node.
//
//   - The value has no gradient. The value is for CPUs, and [device.GPU.UploadWeight] makes the value for a GPU.
//   - x is float32. Products are products of the decoded numbers in float32. With [WithMixedPrecision], CPUs round x to 8 bits, but for
//     e4m3.
//   - CPUs with AVX2, with AVX-512 and VNNI, and with NEON have kernels for all formats. With AVX-512 alone, those of AVX2 compute.
//     NEON without FEAT_DotProd has slower products of integers, most of all for several rows. Without assembly, Go computes, which
//     takes several times as long. With AMX for int8, tile registers multiply 64 and more rows of rounded x, but not by Q6_K.
//   - Errors: ErrUnsupported (another format; an Order, Scales or a Group that the format has not), ErrShape, ErrOption (a zero above 16;
//     an Order that lacks a column; NaN; a scale that makes an infinite number).
//
// The value's Dtype method returns the element type of the node, which stands for the format.
func (q Quantised) Value() (w G.Value, err error) {
	const name = "Quantised"
	defer errs.RecoverTo(prefix+name, &err)
	f := weight.Format(weight.Formats)
	for other := range f {
		if other.String() == q.Format && isStored(other) {
			f = other
		}
	}
	switch {
	case !f.Known():
		return nil, errorf(name, errs.ErrUnsupported, "Format is %q, want %s", q.Format, weight.Names(isStored))
	case q.Order != nil && !inBlocks(f):
		return nil, errorf(name, errs.ErrUnsupported, "an Order of columns of %v, want a format in blocks", f)
	case (q.Scales != nil || q.Group != 0) && inBlocks(f):
		return nil, errorf(name, errs.ErrUnsupported, "%d Scales and a Group of %d of %v, which has scales in its blocks", len(q.Scales), q.Group, f)
	}
	size, fits := 0, q.Rows > 0 && q.Columns > 0 && q.Columns%f.Block() == 0
	if fits {
		size, fits = operand.Product(q.Rows, q.Columns/f.Block(), f.Bytes())
	}
	if !fits || size != len(q.Data) {
		return nil, errorf(name, errs.ErrShape, "%d bytes of %s, want %d rows of %d elements in blocks of %d elements and %d bytes", len(q.Data), q.Format, q.Rows, q.Columns, f.Block(), f.Bytes())
	}
	if at, zero := f.BadZero(q.Data); at >= 0 {
		return nil, errorf(name, errs.ErrOption, "block %d of row %d has the zero %d, want at most %d", at%(q.Columns/f.Block()), at/(q.Columns/f.Block()), zero, weight.MaxInt4Zero)
	}
	if !inBlocks(f) {
		return q.scaled(f)
	}
	if q.Order != nil {
		if len(q.Order) != q.Columns {
			return nil, errorf(name, errs.ErrShape, "Order has %d columns, want %d", len(q.Order), q.Columns)
		}
		seen := make([]bool, q.Columns)
		for i, column := range q.Order {
			if column < 0 || int(column) >= q.Columns || seen[column] {
				return nil, errorf(name, errs.ErrOption, "Order[%d] is %d, want each of %d columns once", i, column, q.Columns)
			}
			seen[column] = true
		}
	}
	return operand.NewBlocks(f, q.Data, q.Rows, q.Columns, q.Order), nil
}

// scaled returns the value of elements of a byte, whose number is right.
func (q *Quantised) scaled(f weight.Format) (G.Value, error) {
	const name = "Quantised"
	m := weight.Matrix{Group: q.Group}
	if q.Group < 0 || q.Group%128 != 0 {
		return nil, errorf(name, errs.ErrUnsupported, "Group is %d, want a multiple of 128, or 0 for rows", q.Group)
	}
	if want := q.Rows * m.Groups(q.Columns); len(q.Scales) != want {
		return nil, errorf(name, errs.ErrShape, "%d Scales, want %d for %d rows of %d elements and a Group of %d", len(q.Scales), want, q.Rows, q.Columns, q.Group)
	}
	if at := weight.BadE4M3(q.Data); at >= 0 {
		return nil, errorf(name, errs.ErrOption, "element %d of row %d is NaN", at%q.Columns, at/q.Columns)
	}
	if at := weight.BadE4M3Scale(q.Scales); at >= 0 {
		return nil, errorf(name, errs.ErrOption, "Scales[%d] is %v, want magnitudes below %v", at, q.Scales[at], math.MaxFloat32/448)
	}
	return operand.NewScaled(f, q.Data, q.Scales, q.Rows, q.Columns, q.Group), nil
}

func inBlocks(f weight.Format) bool { return f.Block() > 1 }

// isStored reports whether f is a format of [Quantised].
func isStored(f weight.Format) bool { return inBlocks(f) || f == weight.E4M3 }

// Int4 stands for INT4 in [Rounded], and for int4_32 of [Quantised].
var Int4 = operand.WeightType(weight.Int4_32)

// Rounded returns a matrix of weights that are rounded to fewer bits, as [Quantised] does.
//
//   - to: tensor.Int8: a row has a scale, the row's largest magnitude / 127, and the integers nearest to the elements / scale.
//     leanattention.E4M3: a row has a scale, the row's largest magnitude / 448, and the numbers nearest to the elements / scale.
//     [Int4]: groups of 32 elements of a row, each with a scale, a zero and integers of 4 bits, which together have about the least
//     squared error.
//   - read writes rows [from, to) to dst. Rounded calls read for some rows after the other, so memory is that of the result.
//   - Errors: those of read; ErrUnsupported (another type); ErrShape (with Int4, also columns that are not whole groups); ErrOption for
//     an element that is not finite or, with Int4, a group whose scale is beyond float16.
func Rounded(to tensor.Dtype, rows, columns int, read func(dst []float32, from, to int) error) (w G.Value, err error) {
	const name = "Rounded"
	defer errs.RecoverTo(prefix+name, &err)
	n, ok := operand.Product(max(rows, 0), max(columns, 0))
	f, known := operand.WeightFormat(to)
	switch {
	case !known || to != tensor.Int8 && to != operand.E4M3 && to != Int4:
		return nil, errorf(name, errs.ErrUnsupported, "to is %v, want %v, %v or %v", to, tensor.Int8, operand.E4M3, Int4)
	case !ok || n == 0 || columns%f.Block() != 0:
		return nil, errorf(name, errs.ErrShape, "%d rows of %d elements, want whole groups of %d", rows, columns, f.Block())
	}
	data, scales := dense.Memory[byte](rows*f.Size(columns)), make([]float32, rows)
	block := min(rows, max(1, roundedBlock/columns))
	wide := make([]float32, block*columns)
	for from := 0; from < rows; from += block {
		to := min(from+block, rows)
		if err := read(wide[:(to-from)*columns], from, to); err != nil {
			return nil, fmt.Errorf("leanattention: %s%s: rows [%d, %d): %w", prefix, name, from, to, err)
		}
		good := make([]bool, to-from)
		eachRow(to-from, columns, func(i int) {
			scales[from+i], good[i] = weight.Round(f, data[(from+i)*f.Size(columns):][:f.Size(columns)], wide[i*columns:][:columns])
		})
		for i, good := range good {
			if !good {
				return nil, errorf(name, errs.ErrOption, "row %d has an element that is not finite, or beyond the numbers of %v", from+i, f)
			}
		}
	}
	if inBlocks(f) {
		return operand.NewBlocks(f, data, rows, columns, nil), nil
	}
	return operand.NewScaled(f, data, scales, rows, columns, 0), nil
}

// roundedBlock is the number of elements that are rounded at a time.
const roundedBlock = 1 << 19
