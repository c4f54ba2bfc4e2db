// Entry points of attention of many query rows by products of single warps:
// prefill_mma_<element>_<head dim>, of queries and outputs of the keys' type; of any type with _rounded,
// which rounds queries to that, and with _precise, which has them in two parts.
//
// Needed by: prompts: attention of many query rows on GPUs without products of warp groups has tiles of 128 rows.
#include "attn_prefill_mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // has those of prefill.cu
#define PREFILL(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ PrefillParams p) {}
#else
#define PREFILL(name, ...) \
  extern "C" __global__ void __launch_bounds__(PrefillMma<__VA_ARGS__>::THREADS, PrefillMma<__VA_ARGS__>::TOGETHER) name(const __grid_constant__ PrefillParams p) { PrefillMma<__VA_ARGS__>::run(p); }
#endif

// Keys of a step and stages, where queries of two thread blocks take 64 KB: multiprocessors of 8.0 have 164 KB of shared
// memory, those of 8.6, 8.9 and 12.0 have 100.
#if __CUDA_ARCH__ == 800
#define STEP 64, 3
#else
#define STEP 32, 2
#endif

PREFILL(prefill_mma_f16_64, AsF16, 64, 4, 2, 64, 4)
PREFILL(prefill_mma_f16_80, AsF16, 80, 4, 2, STEP)
PREFILL(prefill_mma_f16_96, AsF16, 96, 4, 2, STEP)
PREFILL(prefill_mma_f16_128, AsF16, 128, 4, 2, STEP)
PREFILL(prefill_mma_f16_256, AsF16, 256, 4, 1, 32, 3)
PREFILL(prefill_mma_bf16_64, AsBF16, 64, 4, 2, 64, 4)
PREFILL(prefill_mma_bf16_80, AsBF16, 80, 4, 2, STEP)
PREFILL(prefill_mma_bf16_96, AsBF16, 96, 4, 2, STEP)
PREFILL(prefill_mma_bf16_128, AsBF16, 128, 4, 2, STEP)
PREFILL(prefill_mma_bf16_256, AsBF16, 256, 4, 1, 32, 3)

// Queries are rounded on their way.
PREFILL(prefill_mma_f16_64_rounded, AsF16, 64, 4, 2, 64, 4, false, true)
PREFILL(prefill_mma_f16_80_rounded, AsF16, 80, 4, 2, STEP, false, true)
PREFILL(prefill_mma_f16_96_rounded, AsF16, 96, 4, 2, STEP, false, true)
PREFILL(prefill_mma_f16_128_rounded, AsF16, 128, 4, 2, STEP, false, true)
PREFILL(prefill_mma_f16_256_rounded, AsF16, 256, 4, 1, 32, 3, false, true)
PREFILL(prefill_mma_bf16_64_rounded, AsBF16, 64, 4, 2, 64, 4, false, true)
PREFILL(prefill_mma_bf16_80_rounded, AsBF16, 80, 4, 2, STEP, false, true)
PREFILL(prefill_mma_bf16_96_rounded, AsBF16, 96, 4, 2, STEP, false, true)
PREFILL(prefill_mma_bf16_128_rounded, AsBF16, 128, 4, 2, STEP, false, true)
PREFILL(prefill_mma_bf16_256_rounded, AsBF16, 256, 4, 1, 32, 3, false, true)

// Two parts of queries and weights: twice the products for each matrix that is loaded, so that 16 rows of a warp
// are enough.
PREFILL(prefill_mma_f16_64_precise, AsF16, 64, 8, 1, 64, 4, true)
PREFILL(prefill_mma_f16_80_precise, AsF16, 80, 8, 1, 32, 4, true)
PREFILL(prefill_mma_f16_96_precise, AsF16, 96, 8, 1, 32, 4, true)
PREFILL(prefill_mma_f16_128_precise, AsF16, 128, 8, 1, 32, 4, true)
PREFILL(prefill_mma_f16_256_precise, AsF16, 256, 4, 1, 32, 2, true)
PREFILL(prefill_mma_bf16_64_precise, AsBF16, 64, 8, 1, 64, 4, true)
PREFILL(prefill_mma_bf16_80_precise, AsBF16, 80, 8, 1, 32, 4, true)
PREFILL(prefill_mma_bf16_96_precise, AsBF16, 96, 8, 1, 32, 4, true)
PREFILL(prefill_mma_bf16_128_precise, AsBF16, 128, 8, 1, 32, 4, true)
PREFILL(prefill_mma_bf16_256_precise, AsBF16, 256, 4, 1, 32, 2, true)
