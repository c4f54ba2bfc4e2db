package weight

import (
	"encoding/binary"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// A packed matrix is weights in the order in which GPU kernels read them (kernels/gemm_narrow.cuh). Its planes are one after the other:
//
//   - Elements: tiles of 256 rows, the last of fewer, of strips of 16 rows. A tile has chunks of 32 columns of 8 bits or 64 columns of 4
//     bits; a chunk has its strips; a strip has 16 bytes for each lane of a warp, which are left operands of tensor cores. Lane 4g+q has
//     columns 2q, 2q+1, 2q+8 and 2q+9 of each 16 columns, of rows g and g+8. Integers of 8 bits are stored with 128 added.
//   - Scales: for each tile, groups of columns, each with the scales of its rows: float32 if the format has scales, or else float16.
//   - The zeros of INT4 groups, as integers of 16 bits, or the minima of runs, as float16. They lie as the scales do.
//   - With Q4_K, Q5_K and Q6_K, a group has two bytes in the plane of scales: the scales of two runs, or a scale and a minimum. The second
//     plane has the float16 factors of the bytes: in even groups the factor of scales; in odd groups that of minima, if there are minima.
//   - The order of columns, of int32.
//
// Columns that fill the last chunk, and rows that fill the last strip, have the scale 0 or are multiplied by 0.

const (
	packedTile  = 256 // rows
	packedStrip = 16
)

// PackedKind is what a packed matrix has for each group besides a scale.
type PackedKind int32

const (
	PackedScales PackedKind = iota
	PackedZeros
	PackedMinima
	PackedRuns // scales of two runs
)

// packings has a line for each format that can be packed.
var packings = [Formats]struct {
	kernels string // name of the elements in kernels: int8, e4m3 or int4
	columns int    // of a chunk
	group   int    // columns of a group; 0: a row, or Matrix.Group
	kind    PackedKind
	zero    int32 // of all elements, if they have no plane of zeros
	super   bool  // scales are bytes, which factors of 256 columns multiply
}{
	Int8:     {kernels: "int8", columns: 32},
	E4M3:     {kernels: "e4m3", columns: 32},
	Int4_32:  {kernels: "int4", columns: 64, group: 32, kind: PackedZeros},
	Int4_64:  {kernels: "int4", columns: 64, group: 64, kind: PackedZeros},
	Int4_128: {kernels: "int4", columns: 64, group: 128, kind: PackedZeros},
	Q8_0:     {kernels: "int8", columns: 32, group: 32},
	Q4_0:     {kernels: "int4", columns: 64, group: 32, zero: 8},
	Q4_1:     {kernels: "int4", columns: 64, group: 32, kind: PackedMinima},
	Q5_0:     {kernels: "int8", columns: 32, group: 32},
	Q5_1:     {kernels: "int8", columns: 32, group: 32, kind: PackedMinima},
	Q4_K:     {kernels: "int4", columns: 64, group: 32, kind: PackedMinima, super: true},
	Q5_K:     {kernels: "int8", columns: 32, group: 32, kind: PackedMinima, super: true},
	Q6_K:     {kernels: "int8", columns: 32, group: 32, kind: PackedRuns, super: true},
}

// CanPack reports whether matrices of a format can be packed.
func CanPack(f Format) bool { return f.Known() && packings[f].columns > 0 }

// Packed describes a packed matrix.
type Packed struct {
	Format        Format
	Rows, Columns int

	Kernels string // of the elements
	Chunks  int    // of a row
	Group   int    // columns of a group; 0: a row
	Groups  int    // of a row
	Kind    PackedKind
	Zero    int32
	Factor  int  // bytes of a scale
	Super   bool // scales are bytes, which factors of 256 columns multiply

	Scales, Second, Order int // offsets in bytes; 0: there is none
	Bytes                 int // a multiple of 16
}

// Packing describes the packed form of a matrix.
func Packing(m *Matrix, columns int) (p Packed, err error) {
	const op = "weights on a GPU"
	if !CanPack(m.Format) {
		return p, attn.Errorf(op, attn.ErrUnsupported, "weights of %v, want %s", m.Format, Names(CanPack))
	}
	if columns < 1 || m.Len < columns || m.Len%columns != 0 {
		return p, attn.Errorf(op, attn.ErrShape, "%d elements in rows of %d", m.Len, columns)
	}
	if block := m.Format.Block(); columns%block != 0 {
		return p, attn.Errorf(op, attn.ErrShape, "rows of %d elements of %v, want a multiple of %d", columns, m.Format, block)
	}
	l := &packings[m.Format]
	p = Packed{Format: m.Format, Rows: m.Len / columns, Columns: columns, Kernels: l.kernels, Chunks: attn.Ceil(columns, l.columns), Group: l.group, Groups: 1, Kind: l.kind, Zero: l.zero, Factor: 2, Super: l.super}
	if m.Format.HasScales() {
		p.Group, p.Factor = m.Group, 4
	}
	if p.Group > 0 {
		p.Groups = attn.Ceil(columns, p.Group)
	}
	rows := attn.Ceil(p.Rows, packedStrip) * packedStrip
	if rows > math.MaxInt32/4/max(p.Groups, 1) || columns > math.MaxInt32/8 || rows > math.MaxInt/32/columns {
		return p, attn.Errorf(op, attn.ErrShape, "%d rows of %d elements", p.Rows, columns)
	}
	plane := rows * p.Groups * p.Factor
	p.Scales = rows * p.Chunks * 32 // 16 bytes for a lane, which has two rows of a strip and a quarter of their columns
	p.Bytes = p.Scales + plane
	if p.Kind != PackedScales {
		p.Second, p.Bytes = p.Bytes, p.Bytes+plane
	}
	if m.Order != nil {
		p.Order, p.Bytes = p.Bytes, p.Bytes+4*columns
	}
	p.Bytes = attn.Ceil(p.Bytes, 16) * 16
	return p, nil
}

// Width returns the columns of a chunk.
func (p *Packed) Width() int { return packings[p.Format].columns }

// Pack writes a matrix in the order that p describes. dst has p.Bytes bytes, all of them 0.
func (p *Packed) Pack(dst []byte, m *Matrix) {
	tiles := attn.Ceil(p.Rows, packedTile)
	workers := min(runtime.GOMAXPROCS(0), tiles)
	var wait sync.WaitGroup
	for i := range workers {
		wait.Add(1)
		go func() {
			defer wait.Done()
			w := packer{p: p, m: m, dst: dst, q: make([]int8, p.Columns), u: make([]byte, p.Chunks*p.Width())}
			w.scales, w.minima = make([]float32, p.Columns/16+1), make([]float32, p.Columns/16+1)
			for row := i * tiles / workers * packedTile; row < min(p.Rows, (i+1)*tiles/workers*packedTile); row++ {
				w.row(row)
			}
		}()
	}
	wait.Wait()
	for i, column := range m.Order {
		binary.LittleEndian.PutUint32(dst[p.Order+4*i:], uint32(column))
	}
}

// packer packs rows.
type packer struct {
	p              *Packed
	m              *Matrix
	dst            []byte
	q              []int8
	u              []byte    // q as it is stored, and 0 up to whole chunks
	scales, minima []float32 // of the row
}

// row packs a row.
func (w *packer) row(row int) {
	p, n := w.p, w.p.Columns
	tile, in := row/packedTile, row%packedTile
	rows := min(packedTile, attn.Ceil(p.Rows-tile*packedTile, packedStrip)*packedStrip) // of the tile
	from := w.m.Rows(row, 1, n)
	src := unsafe.Slice((*byte)(from.Ptr), p.Format.Size(n))
	place := func(group int) int { return tile*packedTile*p.Groups + group*rows + in }
	switch {
	case p.Factor == 4:
		for g, scale := range from.Scales {
			if p.Format == E4M3 { // kernels read the numbers times 2^-8
				scale *= 256
			}
			binary.LittleEndian.PutUint32(w.dst[p.Scales+4*place(g):], math.Float32bits(scale))
		}
	case p.Super:
		for g := range p.Groups {
			w.factors(src[g/8*p.Format.Bytes():][:p.Format.Bytes()], g%8, 2*place(g))
		}
		Unpack(p.Format, w.q, w.scales, w.minima, src)
	default:
		for g := range p.Groups {
			block := src[g*p.Format.Bytes():]
			to := 2 * place(g)
			copy(w.dst[p.Scales+to:][:2], block[:2])
			switch p.Kind {
			case PackedZeros:
				w.dst[p.Second+to] = block[2]
			case PackedMinima:
				copy(w.dst[p.Second+to:][:2], block[2:4])
			}
		}
		Unpack(p.Format, w.q, w.scales, w.minima, src)
	}
	w.stored(src, place)
	at := tile*packedTile*p.Chunks*32 + in/packedStrip*512 + in%8*64
	high := in % packedStrip / 8
	order := binary.LittleEndian
	if p.Width() == 32 {
		high *= 8
		for k := 0; k < len(w.u); k += 16 {
			u, to := (*[16]byte)(w.u[k:]), (*[64]byte)(w.dst[at+k/32*rows*32:])
			for q := range 4 {
				for half := range 2 {
					word, v := to[16*q+k%32/16*8+4*half:], u[2*q+8*half:]
					order.PutUint32(word, order.Uint32(word)|(uint32(v[0])|uint32(v[1])<<16)<<high)
				}
			}
		}
		return
	}
	high *= 4
	for k := 0; k < len(w.u); k += 16 {
		u, to := (*[16]byte)(w.u[k:]), (*[64]byte)(w.dst[at+k/64*rows*32:])
		for q := range 4 {
			word := to[16*q+k%64/16*4:]
			v := uint32(u[2*q]) | uint32(u[2*q+1])<<16 | uint32(u[2*q+8])<<8 | uint32(u[2*q+9])<<24
			order.PutUint32(word, order.Uint32(word)|v<<high)
		}
	}
}

// factors writes the bytes of a group of a super-block, and their factor.
func (w *packer) factors(block []byte, group, to int) {
	scales, second := w.dst[w.p.Scales+to:][:2], w.dst[w.p.Second+to:][:2]
	if w.p.Kind == PackedRuns {
		copy(scales, block[192+2*group:])
		copy(second, block[208:])
		return
	}
	scales[0], scales[1] = sixBitsOf((*[16]byte)(block), group)
	copy(second, block[group%2*2:])
}

// stored writes the integers of a row as they are packed, without a sign, to w.u. place has the place of a group in a plane.
func (w *packer) stored(src []byte, place func(group int) int) {
	p, q := w.p, w.q
	u := w.u[:len(q)]
	switch {
	case p.Format == E4M3:
		copy(u, src)
	case p.Format == Int8:
		for k, v := range src {
			u[k] = v + 128
		}
	case p.Width() == 32:
		for k, v := range q {
			u[k] = byte(v) + 128
		}
	case p.Kind == PackedZeros:
		for g := range p.Groups {
			zero := w.dst[p.Second+2*place(g)]
			for k, v := range q[g*p.Group:][:p.Group] {
				u[g*p.Group+k] = byte(v) + zero
			}
		}
	default:
		for k, v := range q {
			u[k] = byte(v) + byte(p.Zero)
		}
	}
}
