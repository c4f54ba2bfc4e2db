// Package weight has the formats of weights: how the numbers of a linear layer's matrix, or of a table of embeddings, are stored.
// Engines key their tables of kernels by [Format], so a format is a line here and a line in the table of each engine that has
// kernels for the format. A format without a line in such a table is an error there.
package weight

import (
	"fmt"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
)

// Format is how weights are stored.
type Format uint8

const (
	Float32 Format = iota
	Float64
	Float16
	BFloat16
	Int8 // signed bytes, and a scale of each row

	// Blocks of GGUF files: see blocks.go.
	Q8_0
	Q4_0
	Q4_1
	Q5_0
	Q5_1
	Q4_K
	Q5_K
	Q6_K

	// Groups of integers of 4 bits: see int4.go.
	Int4_32
	Int4_64
	Int4_128

	E4M3 // bytes, and a scale of each row, or of each group of a row

	Formats = iota // how many there are
)

// formats has a line for each format.
var formats = [Formats]struct {
	name    string
	bytes   int        // of an element, or of a block
	sums    attn.DType // of x and y, and of what elements are multiplied in
	dense   bool       // elements are numbers of type element, without scales
	element attn.DType
	scales  bool   // each row has a float32 factor
	kernels string // name of the format in GPU kernels; "": there are none
	blocks  layout // the zero layout: elements are stored one by one
}{
	Float32:  {name: "float32", bytes: 4, sums: attn.Float32, dense: true, element: attn.Float32, kernels: "f32"},
	Float64:  {name: "float64", bytes: 8, sums: attn.Float64, dense: true, element: attn.Float64},
	Float16:  {name: "float16", bytes: 2, sums: attn.Float32, dense: true, element: attn.Float16, kernels: "f16"},
	BFloat16: {name: "bfloat16", bytes: 2, sums: attn.Float32, dense: true, element: attn.BFloat16, kernels: "bf16"},
	Int8:     {name: "int8", bytes: 1, sums: attn.Float32, scales: true},
	Q8_0:     {name: "Q8_0", bytes: 2 + 32, sums: attn.Float32, blocks: layout{elements: 32, run: 32}},
	Q4_0:     {name: "Q4_0", bytes: 2 + 16, sums: attn.Float32, blocks: layout{elements: 32, run: 32}},
	Q4_1:     {name: "Q4_1", bytes: 2 + 2 + 16, sums: attn.Float32, blocks: layout{elements: 32, run: 32, minima: true}},
	Q5_0:     {name: "Q5_0", bytes: 2 + 4 + 16, sums: attn.Float32, blocks: layout{elements: 32, run: 32}},
	Q5_1:     {name: "Q5_1", bytes: 2 + 2 + 4 + 16, sums: attn.Float32, blocks: layout{elements: 32, run: 32, minima: true}},
	Q4_K:     {name: "Q4_K", bytes: 2 + 2 + 12 + 128, sums: attn.Float32, blocks: layout{elements: 256, run: 32, minima: true}},
	Q5_K:     {name: "Q5_K", bytes: 2 + 2 + 12 + 32 + 128, sums: attn.Float32, blocks: layout{elements: 256, run: 32, minima: true}},
	Q6_K:     {name: "Q6_K", bytes: 128 + 64 + 16 + 2, sums: attn.Float32, blocks: layout{elements: 256, run: 16}},
	Int4_32:  {name: "int4_32", bytes: 2 + 1 + 16, sums: attn.Float32, blocks: layout{elements: 32, run: 32}},
	Int4_64:  {name: "int4_64", bytes: 2 + 1 + 32, sums: attn.Float32, blocks: layout{elements: 64, run: 32}},
	Int4_128: {name: "int4_128", bytes: 2 + 1 + 64, sums: attn.Float32, blocks: layout{elements: 128, run: 32}},
	E4M3:     {name: "e4m3", bytes: 1, sums: attn.Float32, scales: true},
}

// Decode converts elements at src to float32, without the scales of rows. Decode is for formats whose sums are float32. Of a format in
// blocks, src and dst are whole blocks.
func Decode(f Format, dst []float32, src unsafe.Pointer) {
	switch n := len(dst); f {
	case Float32:
		copy(dst, unsafe.Slice((*float32)(src), n))
	case Float16:
		half.DecodeFloat16(dst, unsafe.Slice((*uint16)(src), n))
	case BFloat16:
		half.DecodeBFloat16(dst, unsafe.Slice((*uint16)(src), n))
	case Int8:
		for i, v := range unsafe.Slice((*int8)(src), n) {
			dst[i] = float32(v)
		}
	case E4M3:
		half.DecodeE4M3(dst, unsafe.Slice((*uint8)(src), n))
	default:
		if f.Block() > 1 {
			decodeBlocks(f, dst, unsafe.Slice((*byte)(src), f.Size(n)))
			return
		}
		panic(fmt.Sprintf("weights of %v as float32", f))
	}
}

// Known reports whether f is one of the constants.
func (f Format) Known() bool { return f < Formats }

// String returns the name of f.
func (f Format) String() string {
	if !f.Known() {
		return fmt.Sprintf("Format(%d)", uint8(f))
	}
	return formats[f].name
}

// Bytes returns the size of an element, or of a block if f has blocks; 0 if f is unknown.
func (f Format) Bytes() int {
	if !f.Known() {
		return 0
	}
	return formats[f].bytes
}

// Block returns the number of elements of a block, 1 if f has none. Rows of a matrix are whole blocks.
func (f Format) Block() int {
	if !f.Known() {
		return 1
	}
	return max(1, formats[f].blocks.elements)
}

// Size returns the size of n elements, which are whole blocks.
func (f Format) Size(n int) int { return n / f.Block() * f.Bytes() }

// Sums returns the type of the numbers that weights are multiplied with, and of their sums.
func (f Format) Sums() attn.DType { return formats[f].sums }

// HasScales reports whether each row has a scale.
func (f Format) HasScales() bool { return formats[f].scales }

// Kernels returns the name of f in the names of GPU kernels, "" if there are no kernels for f.
func (f Format) Kernels() string {
	if !f.Known() {
		return ""
	}
	return formats[f].kernels
}

// Dense returns the format whose elements are numbers of type d and have no scales; [Formats], which is unknown, if there is
// none.
func Dense(d attn.DType) Format {
	for f := range Format(Formats) {
		if formats[f].dense && formats[f].element == d {
			return f
		}
	}
	return Formats
}

// Matrix is weights in host memory, row after row. Whoever makes a Matrix keeps the memory alive while it is used.
type Matrix struct {
	Format Format
	Ptr    unsafe.Pointer // the first element, aligned to the size of one unless the format has blocks; nil only if Len is 0
	Len    int            // elements

	Scales []float32 // a factor of each row, or of each group of each row; nil: there are none
	Group  int       // elements of a group of E4M3, but for the last of a row; 0: a row is a group

	// Order has the column of the matrix for each element of a row: element i of each row is the weight of x[Order[i]]. It has every
	// column once. nil: elements are in the order of the columns.
	Order []int32
}

// At returns a pointer to element i, which begins a block.
func (m *Matrix) At(i int) unsafe.Pointer { return unsafe.Add(m.Ptr, m.Format.Size(i)) }

// Rows returns n rows of so many columns, from one row on.
func (m *Matrix) Rows(from, n, columns int) Matrix {
	rows := Matrix{Format: m.Format, Ptr: m.At(from * columns), Len: n * columns, Order: m.Order}
	if m.Scales != nil {
		each := m.Groups(columns)
		rows.Scales, rows.Group = m.Scales[from*each:][:n*each], m.Group
	}
	return rows
}

// Columns returns a copy of n columns from column `from` on. The matrix has `columns` columns. Errors: a block or a group that has columns
// outside of the part, and an order of columns, which belongs to the whole row.
func (m *Matrix) Columns(from, n, columns int) (part Matrix, err error) {
	block, rows := m.Format.Block(), m.Len/columns
	switch group := max(m.Group, 1); {
	case m.Order != nil:
		return part, fmt.Errorf("columns [%d, %d) of %v in an order of columns", from, from+n, m.Format)
	case from%block != 0 || n%block != 0:
		return part, fmt.Errorf("columns [%d, %d) of %v, want blocks of %d", from, from+n, m.Format, block)
	case from%group != 0 || n%group != 0 && from+n < columns:
		return part, fmt.Errorf("columns [%d, %d) of %v, want groups of %d", from, from+n, m.Format, group)
	}
	each, row := m.Format.Size(n), m.Format.Size(columns)
	data := make([]byte, rows*each)
	part = Matrix{Format: m.Format, Ptr: unsafe.Pointer(unsafe.SliceData(data)), Len: rows * n, Group: m.Group}
	all := unsafe.Slice((*byte)(m.Ptr), rows*row)
	for r := range rows {
		copy(data[r*each:][:each], all[r*row+m.Format.Size(from):])
	}
	if m.Scales != nil && m.Group == 0 {
		part.Scales = m.Scales
	} else if m.Scales != nil {
		groups := m.Groups(columns)
		for r := range rows {
			part.Scales = append(part.Scales, m.Scales[r*groups+from/m.Group:][:m.Groups(n)]...)
		}
	}
	return part, nil
}

// Groups returns the number of scales of a row of so many columns.
func (m *Matrix) Groups(columns int) int {
	if m.Group == 0 || columns == 0 {
		return 1
	}
	return (columns-1)/m.Group + 1
}

// Row decodes a row to float32, with its scales, in the order of the columns. scratch is as long as dst.
func (m *Matrix) Row(dst []float32, row int, scratch []float32) {
	n := len(dst)
	Decode(m.Format, dst, m.At(row*n))
	if m.Scales != nil {
		group, scales := m.Group, m.Scales[row*m.Groups(n):]
		if group == 0 {
			group = n
		}
		for i := range dst {
			dst[i] *= scales[i/group]
		}
	}
	if m.Order != nil {
		copy(scratch, dst)
		for i, column := range m.Order {
			dst[column] = scratch[i]
		}
	}
}

// Check reports whether the matrix is well formed.
func (m *Matrix) Check(op, name string) error {
	size := m.Format.Bytes()
	switch {
	case size == 0:
		return attn.Errorf(op, attn.ErrDType, "%s is of %v", name, m.Format)
	case m.Len < 0 || m.Len > 0 && m.Ptr == nil:
		return attn.Errorf(op, attn.ErrShape, "%s has %d elements at %v", name, m.Len, m.Ptr)
	case m.Len%m.Format.Block() != 0:
		return attn.Errorf(op, attn.ErrShape, "%s is of %v and has %d elements, want blocks of %d", name, m.Format, m.Len, m.Format.Block())
	case m.Format.Block() == 1 && uintptr(m.Ptr)%uintptr(size) != 0:
		return attn.Errorf(op, attn.ErrShape, "%s at %v is not aligned to its %d-byte elements", name, m.Ptr, size)
	case m.Len > 0 && m.Format.HasScales() && m.Scales == nil:
		return attn.Errorf(op, attn.ErrShape, "%s is of %v and has no scales", name, m.Format)
	case m.Group < 0 || m.Group > 0 && m.Format != E4M3:
		return attn.Errorf(op, attn.ErrUnsupported, "%s is of %v and has groups of %d, which are for %v", name, m.Format, m.Group, E4M3)
	case m.Order != nil && m.Format.Block() == 1:
		return attn.Errorf(op, attn.ErrUnsupported, "%s is of %v and has an order of columns, which is for formats in blocks", name, m.Format)
	case m.Scales != nil && m.Format.Sums() != attn.Float32:
		return attn.Errorf(op, attn.ErrUnsupported, "%s is of %v and has scales, which are for sums of float32", name, m.Format)
	}
	return nil
}

// Names returns the formats for which pick is true, as errors list them: "float32, float16 or bfloat16".
func Names(pick func(Format) bool) string {
	var text string
	var last string
	for f := range Format(Formats) {
		if !pick(f) {
			continue
		}
		switch {
		case last == "":
		case text == "":
			text = last
		default:
			text += ", " + last
		}
		last = f.String()
	}
	if text == "" {
		return last
	}
	return text + " or " + last
}
