package gguf

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// Speeds are bytes of output per second, on one core. The output, 128 MB, exceeds all caches.
func BenchmarkDecode(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	const rows, columns = 8192, 4096
	dst := make([]float32, rows*columns)
	from := make([]float32, rows*columns)
	for i := range from {
		from[i] = float32(i)
	}
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(4 * rows * columns)
		for b.Loop() {
			copy(dst, from)
		}
	})
	half := make([]uint16, rows*columns)
	for _, typ := range []Type{F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K} {
		x := rowsOf(b, r, typ, rows, columns)
		for i := range x.data { // the scales are 2^-9 to 2^-7
			switch at := i % x.layout.bytes; {
			case typ == F32 && at == 3 || typ == BF16 && at == 1:
				x.data[i] &= 0x3f
			case typ == F16 && at == 1, typ == Q6_K && at == 209, typ != F32 && typ != BF16 && typ != Q6_K && (at == 1 || at == 3 && typ != Q8_0 && typ != Q4_0 && typ != Q5_0):
				x.data[i] = x.data[i]&0x83 | 0x18
			}
		}
		for name, f := range map[string]func(from, to int) error{
			"float32":  func(from, to int) error { return x.Float32(dst[from*columns:to*columns], from, to) },
			"float16":  func(from, to int) error { return x.Float16(half[from*columns:to*columns], from, to) },
			"bfloat16": func(from, to int) error { return x.BFloat16(half[from*columns:to*columns], from, to) },
		} {
			b.Run(fmt.Sprint(typ, "/", name), func(b *testing.B) {
				size := int64(4)
				if name != "float32" {
					size = 2
				}
				b.SetBytes(size * rows * columns)
				for b.Loop() {
					for i := 0; i < rows; i += 16 { // one worker decodes 16 rows
						if err := f(i, i+16); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}
