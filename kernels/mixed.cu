// Entry points of linear layers of several rows in mixed precision, as matrix.cu has them in two
// parts: batch_<element>_<rows>_rounded, with _wide as there, and matrix_<element>_<rows>_rounded.
// x is rounded to the weights' type, so there is half as much to multiply and to keep.
//
// Needed by: prompts and steps of 17 sequences and more in mixed precision: products in two parts take as long as their weights take to come.
#include "gemm_ready.cuh"
#include "gemm_skinny.cuh"
#include "gemm_tiled.cuh"

#if __CUDA_ARCH__ >= 900
#define MATRIX(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) name(const __grid_constant__ GemmParams p) { TiledGemm<T, ROWS, false, 1>::run(p); }
#else // there x is not rounded
#define MATRIX(name, T, ROWS) extern "C" __global__ void name(const __grid_constant__ GemmParams p) {}
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(skinnyThreads(ROWS), BLOCKS) name(const __grid_constant__ SkinnyParams p) { SkinnyGemm<T, KEYS, ROWS, FEW, false, 1>::run(p); }
#else // there the others take these rows
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) extern "C" __global__ void name(const __grid_constant__ SkinnyParams p) {}
#endif

MATRIX(matrix_f16_32_rounded, AsF16, 32)
MATRIX(matrix_f16_64_rounded, AsF16, 64)
MATRIX(matrix_f16_128_rounded, AsF16, 128)
MATRIX(matrix_bf16_32_rounded, AsBF16, 32)
MATRIX(matrix_bf16_64_rounded, AsBF16, 64)
MATRIX(matrix_bf16_128_rounded, AsBF16, 128)

BATCH(batch_f16_32_rounded, AsF16, Float16, 32, 4, 2)
BATCH(batch_f16_32_wide_rounded, AsF16, Float16, 32, 8, 1)
READY(batch_f16_64_rounded, AsF16, Float16, false)
BATCH(batch_bf16_32_rounded, AsBF16, BFloat16, 32, 4, 2)
BATCH(batch_bf16_32_wide_rounded, AsBF16, BFloat16, 32, 8, 1)
READY(batch_bf16_64_rounded, AsBF16, BFloat16, false)
