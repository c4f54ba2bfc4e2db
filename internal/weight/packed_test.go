package weight

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// packedElement reads element k of a row as the description of the order has it, lane after lane: register r of lane 4g+q has row g, or
// g+8 if r is odd, and columns 2q and 2q+1, or 2q+8 and 2q+9 if r is 2 or 3.
func packedElement(p *Packed, b []byte, row, k int) (v float64, ok bool) {
	tile := row / 256
	rows := min(256, (p.Rows-256*tile+15)/16*16)
	in := row % 256
	chunk := b[256*tile*p.Chunks*32+k/p.Width()*rows*32:]
	for lane := range 32 {
		words := chunk[in/16*512+lane*16:][:16]
		for deep := range p.Width() / 16 { // 16 columns each
			for r := range 4 {
				for e := range 2 {
					if lane/4+8*(r%2) != in%16 || k%p.Width() != 16*deep+2*(lane%4)+8*(r/2)+e {
						continue
					}
					if p.Width() == 64 {
						v, ok = float64(binary.LittleEndian.Uint32(words[4*deep:])>>(4*(r+4*e))&15), true
					} else {
						x := words[8*deep+4*(r/2)+r%2+2*e]
						if v, ok = float64(x)-128, true; p.Format == E4M3 {
							v = float64(half.E4M3(x).Float32()) / 256
						}
					}
				}
			}
		}
	}
	group := 0
	if p.Group > 0 {
		group = k / p.Group
	}
	place := func(group int) int { return 256*tile*p.Groups + group*rows + in }
	at := place(group)
	number := func(plane int) float64 {
		return float64(half.Float16(binary.LittleEndian.Uint16(b[plane+2*at:])).Float32())
	}
	zero := float64(p.Zero)
	if p.Kind == PackedZeros {
		zero = float64(binary.LittleEndian.Uint16(b[p.Second+2*at:]))
	}
	if p.Factor == 4 {
		return v * float64(math.Float32frombits(binary.LittleEndian.Uint32(b[p.Scales+4*at:]))), ok
	}
	if p.Super {
		wide := func(group int) float64 {
			return float64(half.Float16(binary.LittleEndian.Uint16(b[p.Second+2*place(group):])).Float32())
		}
		pair := b[p.Scales+2*at:]
		if p.Kind == PackedRuns {
			return v * wide(group&^1) * float64(int8(pair[k/16%2])), ok
		}
		return v*wide(group&^1)*float64(pair[0]) - wide(group|1)*float64(pair[1]), ok
	}
	v = (v - zero) * number(p.Scales)
	if p.Kind == PackedMinima {
		v += number(p.Second)
	}
	return v, ok
}

// TestPack: each lane's registers have the elements that they should have, and packed weights take at most a tenth more memory.
func TestPack(t *testing.T) {
	rng := reftest.Rand(t)
	for f := range Format(Formats) {
		if !CanPack(f) {
			continue
		}
		for range 6 {
			rows, columns := 1+rng.IntN(600), f.Block()*(1+rng.IntN(3))
			if f.Block() == 1 {
				columns = 1 + rng.IntN(300)
			}
			m := Matrix{Format: f, Len: rows * columns}
			data := make([]byte, f.Size(m.Len))
			for i := range data {
				if data[i] = byte(rng.Uint32()); f.Block() > 1 && i%2 == 1 || f == E4M3 && data[i]&0x7f == 0x7f {
					data[i] &= 0x3b // scales and minima are numbers
				}
			}
			for at := 0; f >= Int4_32 && f <= Int4_128 && at < len(data); at += f.Bytes() {
				data[at+1] &= 0x3b
				data[at+2] %= MaxInt4Zero + 1
			}
			m.Ptr = unsafe.Pointer(&data[0])
			if f == E4M3 {
				m.Group = 128 * rng.IntN(3)
			}
			if f.HasScales() {
				for range rows * m.Groups(columns) {
					m.Scales = append(m.Scales, float32(rng.NormFloat64()))
				}
			} else if rng.IntN(2) == 0 {
				for _, i := range rng.Perm(columns) {
					m.Order = append(m.Order, int32(i))
				}
			}
			p, err := Packing(&m, columns)
			if err != nil {
				t.Fatal(err)
			}
			packed := make([]byte, p.Bytes)
			p.Pack(packed, &m)
			wide, scratch := make([]float32, columns), make([]float32, columns)
			for range 40 {
				row, k := rng.IntN(rows), rng.IntN(columns)
				m.Row(wide, row, scratch)
				column := k
				if m.Order != nil {
					column = int(binary.LittleEndian.Uint32(packed[p.Order+4*k:]))
				}
				got, ok := packedElement(&p, packed, row, k)
				if want := float64(wide[column]); !ok || math.Abs(got-want) > 1e-6*(1+math.Abs(want)) {
					t.Fatalf("%v, %d x %d: row %d, element %d is %v, %v, want %v", f, rows, columns, row, k, got, ok, want)
				}
			}
		}
		columns := 4096
		m := Matrix{Format: f, Len: 4096 * columns, Group: map[Format]int{E4M3: 128}[f]}
		p, err := Packing(&m, columns)
		stored := f.Size(m.Len)
		if f.HasScales() {
			stored += 4 * 4096 * m.Groups(columns)
		}
		most := 1.12 // padding, and factors of super-blocks for each group; integers of 5 and 6 bits become bytes
		switch f {
		case Q5_0, Q5_1, Q5_K:
			most = 1.65
		case Q6_K:
			most = 1.38
		}
		if err != nil || float64(p.Bytes) > most*float64(stored) {
			t.Errorf("%v: %d bytes become %d, %v", f, stored, p.Bytes, err)
		}
	}
	for name, c := range map[string]struct {
		m       Matrix
		columns int
		want    error
	}{
		"a format without kernels": {Matrix{Format: Float16, Len: 256}, 256, attn.ErrUnsupported},
		"a part of a row":          {Matrix{Format: Int8, Len: 100}, 64, attn.ErrShape},
		"no columns":               {Matrix{Format: Int8}, 0, attn.ErrShape},
		"a part of a block":        {Matrix{Format: Q5_K, Len: 2 * 1056}, 1056, attn.ErrShape},
		"too many rows":            {Matrix{Format: Int8, Len: math.MaxInt32}, 1, attn.ErrShape},
	} {
		if _, err := Packing(&c.m, c.columns); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
