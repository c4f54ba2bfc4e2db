// Entry points of the same with gates, as gated.cu has them: gated_batch_<element>_<rows>_rounded,
// with _wide as there, and gated_<element>_<rows>_rounded.
//
// Needed by: the same prompts and steps of decoders with gated linear units.
#include "gemm_ready.cuh"
#include "gemm_skinny.cuh"
#include "gemm_tiled.cuh"

#if __CUDA_ARCH__ >= 900
#define MATRIX(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) name(const __grid_constant__ GemmParams p) { TiledGemm<T, ROWS, true, 1>::run(p); }
#else // there x is not rounded
#define MATRIX(name, T, ROWS) extern "C" __global__ void name(const __grid_constant__ GemmParams p) {}
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(skinnyThreads(ROWS), BLOCKS) name(const __grid_constant__ SkinnyParams p) { SkinnyGemm<T, KEYS, ROWS, FEW, true, 1>::run(p); }
#else // there the others take these rows
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) extern "C" __global__ void name(const __grid_constant__ SkinnyParams p) {}
#endif

MATRIX(gated_f16_32_rounded, AsF16, 32)
MATRIX(gated_f16_64_rounded, AsF16, 64)
MATRIX(gated_f16_128_rounded, AsF16, 128)
MATRIX(gated_bf16_32_rounded, AsBF16, 32)
MATRIX(gated_bf16_64_rounded, AsBF16, 64)
MATRIX(gated_bf16_128_rounded, AsBF16, 128)

BATCH(gated_batch_f16_32_rounded, AsF16, Float16, 32, 4, 2)
BATCH(gated_batch_f16_32_wide_rounded, AsF16, Float16, 32, 8, 1)
READY(gated_batch_f16_64_rounded, AsF16, Float16, true)
BATCH(gated_batch_bf16_32_rounded, AsBF16, BFloat16, 32, 4, 2)
BATCH(gated_batch_bf16_32_wide_rounded, AsBF16, BFloat16, 32, 8, 1)
READY(gated_batch_bf16_64_rounded, AsBF16, BFloat16, true)
