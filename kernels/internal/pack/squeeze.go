package pack

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
)

// Images of a unit repeat each other: the same kernel for two architectures or
// two element types has long runs in common, megabytes apart. DEFLATE looks back
// 32 KB. So long repeats are taken out first, however far back they are, and
// DEFLATE packs what is left. An archive is a DEFLATE stream of
//
//	length of the steps | steps | literals
//
// where a step is three numbers: how many literals come next, how many bytes
// are then copied, and from how far back, as the difference to the step before.
// Literals that no step takes come last.

const (
	shortest = 24 // bytes worth a step; shorter ones are left to DEFLATE
	hashed   = 8  // bytes that find candidates
	hashBits = 20 // at most
	tries    = 64
	enough   = 4096 // a repeat that is not improved on
)

// squeeze packs data. Equal data give equal bytes, with the same version of Go.
func squeeze(data []byte) ([]byte, error) {
	var steps, literals []byte
	start, distance := 0, 0
	f := newFinder(data)
	for at := 0; at < len(data); {
		from, n := f.find(at, distance)
		if n == 0 {
			f.add(at, 1)
			at++
			continue
		}
		steps = binary.AppendUvarint(steps, uint64(at-start))
		steps = binary.AppendUvarint(steps, uint64(n))
		steps = binary.AppendVarint(steps, int64(at-from-distance))
		literals = append(literals, data[start:at]...)
		distance = at - from
		f.add(at, n)
		at += n
		start = at
	}
	literals = append(literals, data[start:]...)

	var out bytes.Buffer
	w, err := flate.NewWriter(&out, flate.BestCompression)
	if err != nil {
		return nil, err
	}
	for _, part := range [][]byte{binary.AppendUvarint(nil, uint64(len(steps))), steps, literals} {
		if _, err := w.Write(part); err != nil {
			return nil, err
		}
	}
	err = w.Close()
	return out.Bytes(), err
}

// finder finds repeats: chains of the places where eight bytes have one hash.
type finder struct {
	data []byte
	last []int32 // place of a hash, -1 if there is none
	prev []int32 // place of the same hash before that
	bits int     // of a hash
}

func newFinder(data []byte) *finder {
	f := &finder{data: data, prev: make([]int32, len(data)), bits: min(hashBits, bits.Len(uint(len(data))))}
	f.last = make([]int32, 1<<f.bits)
	for i := range f.last {
		f.last[i] = -1
	}
	return f
}

func (f *finder) hash(at int) uint64 {
	return binary.LittleEndian.Uint64(f.data[at:]) * 0x9e3779b97f4a7c15 >> (64 - f.bits)
}

// add enters n places from at on.
func (f *finder) add(at, n int) {
	for ; n > 0 && at+hashed <= len(f.data); at, n = at+1, n-1 {
		h := f.hash(at)
		f.prev[at], f.last[h] = f.last[h], int32(at)
	}
}

// find looks for what is at this place: as far back as last time, for which
// half the length will do since the step is short, and then anywhere.
func (f *finder) find(at, distance int) (from, n int) {
	if distance > 0 {
		if n = f.equal(at-distance, at); n >= shortest/2 {
			from = at - distance
		} else {
			n = 0
		}
	}
	if at+hashed > len(f.data) {
		return from, n
	}
	place := f.last[f.hash(at)]
	for try := 0; try < tries && place >= 0 && n < enough; try++ {
		if m := f.equal(int(place), at); m >= shortest && m > n+3 {
			from, n = int(place), m
		}
		place = f.prev[place]
	}
	return from, n
}

// equal is how many bytes at a are also at b, which comes later.
func (f *finder) equal(a, b int) (n int) {
	for b+n < len(f.data) && f.data[a+n] == f.data[b+n] {
		n++
	}
	return n
}

// unsqueeze is the data of this size that was packed.
func unsqueeze(packed []byte, size int) ([]byte, error) {
	// Ten bytes a number are the most; a step makes shortest/2 bytes at least.
	limit := int64(size) + 30*(int64(size)/(shortest/2)+1) + binary.MaxVarintLen64
	in, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), limit))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	n, k := binary.Uvarint(in)
	if k <= 0 || n > uint64(len(in)-k) {
		return nil, fmt.Errorf("%d bytes of steps among %d: %w", n, len(in), ErrCorrupt)
	}
	steps, literals := in[k:k+int(n)], in[k+int(n):]

	data := make([]byte, 0, size)
	distance := 0
	for len(steps) > 0 {
		s, err := nextStep(&steps)
		if err != nil {
			return nil, err
		}
		if s.literals > uint64(len(literals)) || s.literals > uint64(size-len(data)) {
			return nil, fmt.Errorf("%d literals, %d are left: %w", s.literals, len(literals), ErrCorrupt)
		}
		data = append(data, literals[:s.literals]...)
		literals = literals[s.literals:]
		if s.further < -int64(distance) || s.further > int64(len(data)-distance) {
			return nil, fmt.Errorf("copy from %+d of %d bytes back, at %d: %w", s.further, distance, len(data), ErrCorrupt)
		}
		distance += int(s.further)
		if distance == 0 || s.copied > uint64(size-len(data)) {
			return nil, fmt.Errorf("%d bytes copied from %d back, at %d of %d: %w", s.copied, distance, len(data), size, ErrCorrupt)
		}
		for left := int(s.copied); left > 0; {
			m := min(left, distance) // beyond that it repeats itself
			data = append(data, data[len(data)-distance:][:m]...)
			left -= m
		}
	}
	if len(data)+len(literals) != size {
		return nil, fmt.Errorf("%d bytes, want %d: %w", len(data)+len(literals), size, ErrCorrupt)
	}
	return append(data, literals...), nil
}

type step struct {
	literals, copied uint64
	further          int64
}

func nextStep(steps *[]byte) (s step, err error) {
	in := *steps
	k := [3]int{}
	s.literals, k[0] = binary.Uvarint(in)
	if k[0] > 0 {
		s.copied, k[1] = binary.Uvarint(in[k[0]:])
	}
	if k[1] > 0 {
		s.further, k[2] = binary.Varint(in[k[0]+k[1]:])
	}
	if k[2] <= 0 {
		return s, fmt.Errorf("%d bytes are no step: %w", len(in), ErrCorrupt)
	}
	*steps = in[k[0]+k[1]+k[2]:]
	return s, nil
}
