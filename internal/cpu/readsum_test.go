package cpu

import (
	"encoding/binary"
	"errors"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestReadSum(t *testing.T) {
	rng := reftest.Rand(t)
	for _, n := range []int{0, 1, 7, 8, 63, 64, 511, 512, 513, 4096, 8192 - 8, 8192 + 72, 100_003, 1 << 20} {
		mem, free := cputest.Guarded(t, (n+7)/8*8)
		b := unsafe.Slice((*byte)(mem), n)
		var want uint64
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		for _, w := range unsafe.Slice((*uint64)(mem), n/8) {
			want += w
		}
		if got, err := ReadSum(Default(), b); err != nil || got != want {
			t.Errorf("%v, %d bytes: %d, want %d, error %v", InUse(), n, got, want, err)
		}
		free()
	}
	words := [][]byte{make([]byte, 800), nil, make([]byte, 16), make([]byte, 9<<20+24)}
	var want uint64
	for _, b := range words {
		for i := range len(b) / 8 {
			v := rng.Uint64()
			binary.NativeEndian.PutUint64(b[8*i:], v)
			want += v
		}
	}
	if got, err := ReadSum(Default(), words...); err != nil || got != want {
		t.Errorf("%v, several: %d, want %d, error %v", InUse(), got, want, err)
	}
	if got, err := ReadSum(Default()); err != nil || got != 0 {
		t.Errorf("%v, none: %d, error %v", InUse(), got, err)
	}
	if _, err := ReadSum(Default(), make([]byte, 100)[1:]); !errors.Is(err, attn.ErrShape) {
		t.Errorf("bytes from an odd address: error %v", err)
	}
}

// Pieces are no larger than what threads wait for each other at the end may cost, and small tensors are a piece each.
func TestReadSumPieces(t *testing.T) {
	for threads := 1; threads <= 64; threads++ {
		for _, words := range []int{1, 100, 1 << 10, 12 * 1024 * 64, 1<<20 + 17, 1 << 25, 1 << 28} {
			most, share := pieceOf(words, threads), (words-1)/threads+1
			if most > max(share, sumWords) {
				t.Errorf("%d words, %d threads: a piece has %d", words, threads, most)
			}
			if share >= 8*pieceWords && most > share/8+1 {
				t.Errorf("%d words, %d threads: a piece has %d of a thread's %d", words, threads, most, share)
			}
			if most < min(share, pieceWords) {
				t.Errorf("%d words, %d threads: a piece has only %d", words, threads, most)
			}
		}
	}
	var r sumRun
	r.cut(pieceOf(1<<24, 16), make([]uint64, 1000)) // a bias among matrices
	if len(r.pieces) != 1 {
		t.Errorf("1000 words are %d pieces", len(r.pieces))
	}
}
