package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
)

// The kernels by tier and by type of keys and values, for float32 and for float64 queries.
var (
	kernels32 = attendTiers32([attn.DTypes]kernel{
		attn.Float32:  attendF32F32,
		attn.Float64:  attendF32F64,
		attn.Float16:  attendF32F16,
		attn.BFloat16: attendF32BF16,
		attn.E4M3:     attendF32E4M3,
		attn.Int8:     attendF32Int8,
		attn.Q4:       attendF32Q4,
	})
	kernels64 = attendTiers64([attn.DTypes]kernel{
		attn.Float32:  attendF64F32,
		attn.Float64:  attendF64F64,
		attn.Float16:  attendF64F16,
		attn.BFloat16: attendF64BF16,
	})
)

// allTiers returns the same kernels for every tier.
func allTiers(kernels [attn.DTypes]kernel) (t [cpu.Tiers][attn.DTypes]kernel) {
	for i := range t {
		t[i] = kernels
	}
	return t
}

// kernelFor returns the kernel for queries of type F on keys and values of type d, in the current tier.
func kernelFor[F cpu.Real](d attn.DType) kernel {
	if unsafe.Sizeof(F(0)) == 4 {
		return kernels32[cpu.InUse()][d]
	}
	return kernels64[cpu.InUse()][d]
}
