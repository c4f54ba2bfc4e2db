package measure

import (
	"math"
	"math/rand/v2"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// Storage is an element type of keys and values.
type Storage struct {
	Name  string // name in tables and in questions to the PyTorch workers
	Dtype tensor.Dtype
	Size  int
}

var (
	StoreF32  = Storage{"f32", tensor.Float32, 4}
	StoreF16  = Storage{"f16", la.Float16, 2}
	StoreBF16 = Storage{"bf16", la.BFloat16, 2}
	Storages  = []Storage{StoreF32, StoreF16, StoreBF16}
)

// Arena is memory filled with random numbers of one element type in (-1, 1). No number is zero: some
// libraries skip zeros, and some machines do not store zeros.
type Arena struct {
	Storage Storage
	Words   []uint64
}

func NewArena(s Storage, bytes int, rng *rand.Rand) *Arena {
	a := &Arena{s, make([]uint64, (bytes+7)/8)}
	uniform := func(bits uint64) float32 { return float32(int32(bits)|1) / (1 << 31) }
	if s == StoreF32 {
		for i := range a.Words {
			r := rng.Uint64()
			low, high := math.Float32bits(uniform(r)), math.Float32bits(uniform(r>>32))
			a.Words[i] = uint64(high)<<32 | uint64(low)
		}
		return a
	}
	var table [1 << 16]uint64
	for i := range table {
		if f := uniform(rng.Uint64()); s == StoreF16 {
			table[i] = uint64(half.FromFloat32(f))
		} else {
			table[i] = uint64(half.BFromFloat32(f))
		}
	}
	for i := range a.Words {
		r := rng.Uint64()
		a.Words[i] = table[r&0xffff] | table[r>>16&0xffff]<<16 | table[r>>32&0xffff]<<32 | table[r>>48]<<48
	}
	return a
}
