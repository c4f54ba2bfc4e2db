package gguf

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"gorgonia.org/leanattention/decoder/internal/mapped"
)

// Tensor is a tensor of a file. Its last dimension is the length of a row.
type Tensor struct {
	file    string // the file's path, for errors
	name    string
	typ     Type
	layout  layout
	shape   []int
	rows    int
	columns int
	offset  uint64 // in the data section; used while the file is opened
	size    uint64 // in bytes; used while the file is opened
	data    []byte
	use     *use
	mapping *mapped.File // of data; nil: data is memory of the caller

	// Tensors of File.Weights may have these fields set.
	source func(row int) int // maps a row of the tensor to a row of data; nil: the same row
	add    float32           // added to each element
}

// Name returns the tensor's name in the file.
func (t *Tensor) Name() string { return t.name }

// Type returns the type of the elements.
func (t *Tensor) Type() Type { return t.typ }

// Shape returns the dimensions in row-major order: the last is the length of a row. The file has the reverse order.
func (t *Tensor) Shape() []int { return slices.Clone(t.shape) }

// Rows returns the number of rows: the product of all dimensions but the last.
func (t *Tensor) Rows() int { return t.rows }

// Columns returns the number of elements in a row.
func (t *Tensor) Columns() int { return t.columns }

// Bytes returns the tensor's size in the file.
func (t *Tensor) Bytes() int { return len(t.data) }

// RowBytes returns the size of a row in the file.
func (t *Tensor) RowBytes() int { return t.columns / t.layout.elements * t.layout.bytes }

// Float32 decodes rows [from, to) into dst. For F16 and BF16 tensors, the conversion is exact. For all other types, the
// result has ggml's bits. Several goroutines decode in parallel.
func (t *Tensor) Float32(dst []float32, from, to int) error {
	return widen(t, dst, from, to, binary16)
}

// Float16 is like Float32, and rounds to IEEE 754 binary16 numbers, to nearest, ties to even. ErrRange is returned for
// a finite number that rounds to infinity. The contents of dst are then undefined.
func (t *Tensor) Float16(dst []uint16, from, to int) error {
	if t.typ == F16 && t.add == 0 {
		return copy16(t, dst, from, to)
	}
	return widen(t, dst, from, to, binary16)
}

// BFloat16 is like Float16, for bfloat16 numbers. A bfloat16 number is the upper half of a float32 number.
func (t *Tensor) BFloat16(dst []uint16, from, to int) error {
	if t.typ == BF16 && t.add == 0 {
		return copy16(t, dst, from, to)
	}
	return widen(t, dst, from, to, bfloat16)
}

// HasBlocks reports whether the rows of a matrix are stored in blocks that have the values of the tensor.
func (t *Tensor) HasBlocks() bool { return t.layout.elements > 1 && t.add == 0 && len(t.shape) == 2 }

// Blocks returns rows [from, to) as they are stored. HasBlocks must be true. If the file has the rows one after the other, the result
// is the file's own memory: it must not be written, and is valid until Close, or longer with File.Hold. Otherwise the result is a copy.
//
// If another program cuts a mapped file, reading the lost bytes ends the process.
func (t *Tensor) Blocks(from, to int) (data []byte, err error) {
	if err := t.check(from, to, (to-from)*t.columns); err != nil {
		return nil, err
	}
	size := t.RowBytes()
	err = t.use.do(t.file, func() error {
		if t.source == nil {
			data = t.data[from*size : to*size : to*size]
			return nil
		}
		data = make([]byte, 0, (to-from)*size)
		for row := from; row < to; row++ {
			data = append(data, t.data[t.source(row)*size:][:size]...)
		}
		return nil
	})
	if t.source != nil && t.mapping != nil {
		t.drop()
	}
	return data, err
}

const (
	// piece is the number of elements that are decoded at once before rounding. It is a multiple of all block sizes.
	piece = 2048
	// share is the minimum number of elements for which a goroutine pays off.
	share = 1 << 16
)

// check returns an error if the tensor does not have the rows, or if dst is not their number of elements.
func (t *Tensor) check(from, to, dst int) error {
	if from < 0 || to < from || to > t.rows {
		return fail(ErrShape, t.file, "tensor %s has %d rows; rows %d to %d are wanted", quote(t.name), t.rows, from, to)
	}
	if n := (to - from) * t.columns; dst != n {
		return fail(ErrShape, t.file, "tensor %s: rows %d to %d have %d elements, and their destination has %d", quote(t.name), from, to, n, dst)
	}
	return nil
}

// widen decodes rows into dst: a []float32, or a []uint16 in format f.
func widen[T float32 | uint16](t *Tensor, dst []T, from, to int, f format) error {
	return t.parallel(len(dst), from, to, func(src []byte, row, at, n int) error {
		switch out := any(dst[at : at+n]).(type) {
		case []float32:
			t.decode(out, src)
		case []uint16:
			if bad, x := t.round(out, src, f); bad >= 0 {
				return fail(ErrRange, t.file, "tensor %s has %g at row %d, column %d, more than 16 bits of the requested type can be: use another type",
					quote(t.name), x, row+bad/t.columns, bad%t.columns)
			}
		}
		return nil
	})
}

// decode decodes whole blocks.
func (t *Tensor) decode(dst []float32, src []byte) {
	t.layout.decode(dst, src)
	if t.add != 0 {
		for i := range dst {
			dst[i] += t.add
		}
	}
}

var pieces = sync.Pool{New: func() any { return new([piece]float32) }}

// round decodes whole blocks and rounds the elements. It returns the index and the value of the first finite element
// that rounds to infinity, or -1.
func (t *Tensor) round(dst []uint16, src []byte, f format) (int, float32) {
	x := pieces.Get().(*[piece]float32)
	defer pieces.Put(x)
	buffer := x[:]
	for done := 0; done < len(dst); done += piece {
		n := min(piece, len(dst)-done)
		blocks := src[:n/t.layout.elements*t.layout.bytes]
		src = src[len(blocks):]
		t.decode(buffer[:n], blocks)
		if bad := f.round(dst[done:done+n], buffer[:n]); bad >= 0 {
			return done + bad, buffer[bad]
		}
	}
	return -1, 0
}

// copy16 copies rows whose stored type is the requested 16-bit type.
func copy16(t *Tensor, dst []uint16, from, to int) error {
	return t.parallel(len(dst), from, to, func(src []byte, _, at, n int) error {
		out := dst[at : at+n]
		if littleEndian && n > 0 {
			copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(out))), 2*n), src)
			return nil
		}
		for i := range out {
			out[i] = uint16(src[2*i]) | uint16(src[2*i+1])<<8
		}
		return nil
	})
}

// parallel calls f for runs of rows from several goroutines. f gets the bytes of the run, its first row, and the offset
// and number of its elements in dst. parallel returns the error of the earliest run that failed.
func (t *Tensor) parallel(dst, from, to int, f func(src []byte, row, at, n int) error) error {
	if err := t.check(from, to, dst); err != nil {
		return err
	}
	if t.mapping != nil {
		defer t.drop()
	}
	rows := max(1, share/t.columns)
	parts := (to - from + rows - 1) / rows
	run := func(i int) error {
		first := from + i*rows
		last := min(first+rows, to)
		return t.use.do(t.file, func() error { return t.runs(first, last, (first-from)*t.columns, f) })
	}
	workers := min(runtime.GOMAXPROCS(0), parts)
	if workers <= 1 {
		for i := range parts {
			if err := run(i); err != nil {
				return err
			}
		}
		return nil
	}
	var (
		next  atomic.Int64
		wg    sync.WaitGroup
		mu    sync.Mutex
		first = parts
		err   error
	)
	for range workers {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= parts {
					return
				}
				if e := run(i); e != nil {
					next.Store(int64(parts))
					mu.Lock()
					if i < first {
						first, err = i, e
					}
					mu.Unlock()
					return
				}
			}
		})
	}
	wg.Wait()
	return err
}

// drop releases the memory of the mapped data, of which the caller has a copy.
func (t *Tensor) drop() {
	t.use.RLock()
	defer t.use.RUnlock()
	if !t.use.closed {
		t.mapping.Drop(t.data)
	}
}

// runs calls f for each run of rows that are adjacent in the file.
func (t *Tensor) runs(from, to, at int, f func(src []byte, row, at, n int) error) error {
	size := t.RowBytes()
	if t.source == nil {
		return f(t.data[from*size:to*size], from, at, (to-from)*t.columns)
	}
	for row := from; row < to; row++ {
		i := t.source(row) * size
		if err := f(t.data[i:i+size], row, at, t.columns); err != nil {
			return err
		}
		at += t.columns
	}
	return nil
}
