package cpu

import "unsafe"

// The kernels by tier and by dtype of the keys and values, for queries of float32 and of float64.
var (
	kernels32 = attendTiers([dtypes]kernel{
		Float32:  attendF32F32,
		Float64:  attendF32F64,
		Float16:  attendF32F16,
		BFloat16: attendF32BF16,
	})
	kernels64 = [dtypes]kernel{
		Float32:  attendF64F32,
		Float64:  attendF64F64,
		Float16:  attendF64F16,
		BFloat16: attendF64BF16,
	}
)

// kernelFor returns the kernel in use for queries of type F on keys and values of type d.
func kernelFor[F real](d DType) kernel {
	if unsafe.Sizeof(F(0)) == 4 {
		return kernels32[inUse][d]
	}
	return kernels64[d]
}
