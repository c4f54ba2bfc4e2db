// Entry points of the same for many rows on compute capability 9.0, as gemm.cu has them:
// gated_gemm_<element>_<rows of W that a tile has>, and with _rounded as there.
//
// Needed by: prompts of the same decoders.
#include "gemm_persistent.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define GEMM(name, ...) \
  extern "C" __global__ void __launch_bounds__(PERSISTENT_THREADS, 1) name(const __grid_constant__ GemmParams p) { PersistentGemm<__VA_ARGS__, true>::run(p); }
#else // there gated_<element>_128 has these rows
#define GEMM(name, ...) extern "C" __global__ void name(const __grid_constant__ GemmParams p) {}
#endif

GEMM(gated_gemm_f16_128, AsF16, 2, 128)
GEMM(gated_gemm_f16_256, AsF16, 2, 256)
GEMM(gated_gemm_f16_128_rounded, AsF16, 1, 128)
GEMM(gated_gemm_f16_256_rounded, AsF16, 1, 256)
GEMM(gated_gemm_bf16_128, AsBF16, 2, 128)
GEMM(gated_gemm_bf16_256, AsBF16, 2, 256)
GEMM(gated_gemm_bf16_128_rounded, AsBF16, 1, 128)
GEMM(gated_gemm_bf16_256_rounded, AsBF16, 1, 256)
