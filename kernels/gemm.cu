// Entry points of linear layers of many rows on compute capability 9.0:
// gemm_<element>_<rows of W that a tile has>, and with _rounded where x is taken as the
// weights' type has it. The operands are those of matrix.cu, whose kernels other GPUs have.
//
// Needed by: prompts: products of hundreds of rows have tiles that fill the registers of a multiprocessor.
#include "gemm_persistent.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define GEMM(name, ...) \
  extern "C" __global__ void __launch_bounds__(PERSISTENT_THREADS, 1) name(const __grid_constant__ GemmParams p) { PersistentGemm<__VA_ARGS__>::run(p); }
#else // there matrix_<element>_128 has these rows
#define GEMM(name, ...) extern "C" __global__ void name(const __grid_constant__ GemmParams p) {}
#endif

GEMM(gemm_f16_128, AsF16, 2, 128)
GEMM(gemm_f16_256, AsF16, 2, 256)
GEMM(gemm_f16_128_rounded, AsF16, 1, 128)
GEMM(gemm_f16_256_rounded, AsF16, 1, 256)
GEMM(gemm_bf16_128, AsBF16, 2, 128)
GEMM(gemm_bf16_256, AsBF16, 2, 256)
GEMM(gemm_bf16_128_rounded, AsBF16, 1, 128)
GEMM(gemm_bf16_256_rounded, AsBF16, 1, 256)
