package nn

import (
	"fmt"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Blocks returns a matrix of weights in the blocks of a GGUF file, as the value of a node: the w of a [Linear], [Linears],
// [GatedLinear] or [HeadLinear], or the table of an [Embedding].
//
//   - format is ggml's name: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K.
//   - data has the rows, one after the other, each of whole blocks. data is not copied and must not change. data may be of a mapped
//     file.
//   - The value is for CPUs, and has no gradient. x is float32. Its products are those of the numbers that the blocks mean, in
//     float32; with [WithMixedPrecision], those of an x of 8 bits.
//   - CPUs with AVX2, and with AVX-512 and VNNI, have kernels for all formats. With AVX-512 alone, those of AVX2 compute. With NEON
//     and without assembly, Go computes, which takes several times as long.
//   - Errors: ErrUnsupported (another format), ErrShape.
//
// The value's Dtype method returns the element type of the node, which stands for the format.
func Blocks(format string, data []byte, rows, columns int) (w G.Value, err error) {
	const name = "Blocks"
	defer errs.RecoverTo(prefix+name, &err)
	inBlocks := func(f weight.Format) bool { return f.Block() > 1 }
	for f := range weight.Format(weight.Formats) {
		if f.String() != format || !inBlocks(f) {
			continue
		}
		size, fits := 0, rows > 0 && columns > 0 && columns%f.Block() == 0
		if fits {
			size, fits = operand.Product(rows, columns/f.Block(), f.Bytes())
		}
		if !fits || size != len(data) {
			return nil, errorf(name, errs.ErrShape, "%d bytes of %s, want %d rows of %d elements in blocks of %d elements and %d bytes", len(data), format, rows, columns, f.Block(), f.Bytes())
		}
		return operand.NewBlocks(f, data, rows, columns), nil
	}
	return nil, errorf(name, errs.ErrUnsupported, "format is %q, want %s", format, weight.Names(inBlocks))
}

// Int8 returns a matrix of weights of 8 bits, as [Blocks] does. A row has a scale, the row's largest magnitude / 127, and the integers
// nearest to the elements / scale.
//
//   - read writes rows [from, to) to dst. Int8 calls read for some rows after the other, so memory is that of the result.
//   - Errors: those of read; ErrShape; ErrOption for an element that is not finite.
func Int8(rows, columns int, read func(dst []float32, from, to int) error) (w G.Value, err error) {
	const name = "Int8"
	defer errs.RecoverTo(prefix+name, &err)
	n, ok := operand.Product(max(rows, 0), max(columns, 0))
	if !ok || n == 0 {
		return nil, errorf(name, errs.ErrShape, "%d rows of %d elements", rows, columns)
	}
	q, scales := dense.Memory[int8](n), make([]float32, rows)
	block := min(rows, max(1, int8Block/columns))
	wide := make([]float32, block*columns)
	for from := 0; from < rows; from += block {
		to := min(from+block, rows)
		if err := read(wide[:(to-from)*columns], from, to); err != nil {
			return nil, fmt.Errorf("leanattention: %s%s: rows [%d, %d): %w", prefix, name, from, to, err)
		}
		bad := make([]bool, to-from)
		eachRow(to-from, columns, func(i int) {
			row := wide[i*columns:][:columns]
			scale, finite := weight.RoundInt8(q[(from+i)*columns:], row)
			scales[from+i], bad[i] = scale, !finite
		})
		for i, bad := range bad {
			if bad {
				return nil, errorf(name, errs.ErrOption, "row %d has an element that is not finite", from+i)
			}
		}
	}
	return &operand.Weight{Of: weight.Int8, Elements: tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(q)),
		Scales: tensor.New(tensor.WithShape(rows), tensor.WithBacking(scales))}, nil
}

// int8Block is the number of elements that are rounded at a time.
const int8Block = 1 << 19
