// Entry points of linear layers of many rows: matrix_operands_<element>, with _few for up to 128 rows, and
// matrix_<element>_<rows of x that a thread block has>; and of a batch's rows:
// batch_<element>_<rows>, and with _wide where a block's slice of x is so wide that it has a
// multiprocessor for itself, and the registers. There may be twice as many rows as 32 or 64.
//
// Needed by: prompts, and steps of three sequences and more: their products have other tiles than a GEMV.
#include "gemm_skinny.cuh"
#include "gemm_tiled.cuh"

#if __CUDA_ARCH__ >= 900
#define OPERANDS(name, MATH, KEPT) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ OperandParams p) { operands<MATH, KEPT>(p); }
#define MATRIX(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) name(const __grid_constant__ GemmParams p) { TiledGemm<T, ROWS>::run(p); }
#else // there linear_<element> reads the weights again
#define OPERANDS(name, MATH, KEPT) extern "C" __global__ void name(const __grid_constant__ OperandParams p) {}
#define MATRIX(name, T, ROWS) extern "C" __global__ void name(const __grid_constant__ GemmParams p) {}
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(skinnyThreads(ROWS), BLOCKS) name(const __grid_constant__ SkinnyParams p) { SkinnyGemm<T, KEYS, ROWS, FEW>::run(p); }
#else // there matrix_ and linear_<element> take these rows
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) extern "C" __global__ void name(const __grid_constant__ SkinnyParams p) {}
#endif

OPERANDS(matrix_operands_f16, MmaF16, 0)
OPERANDS(matrix_operands_bf16, MmaBF16, 0)
OPERANDS(matrix_operands_f16_few, MmaF16, 16)
OPERANDS(matrix_operands_bf16_few, MmaBF16, 16)

MATRIX(matrix_f16_32, AsF16, 32)
MATRIX(matrix_f16_64, AsF16, 64)
MATRIX(matrix_f16_128, AsF16, 128)
MATRIX(matrix_bf16_32, AsBF16, 32)
MATRIX(matrix_bf16_64, AsBF16, 64)
MATRIX(matrix_bf16_128, AsBF16, 128)

BATCH(batch_f16_8, AsF16, Float16, 8, 8, 2)
BATCH(batch_f16_8_wide, AsF16, Float16, 8, 16, 1)
BATCH(batch_f16_16, AsF16, Float16, 16, 8, 2)
BATCH(batch_f16_16_wide, AsF16, Float16, 16, 16, 1)
BATCH(batch_f16_32, AsF16, Float16, 32, 4, 2)
BATCH(batch_f16_32_wide, AsF16, Float16, 32, 8, 1)
BATCH(batch_f16_64, AsF16, Float16, 64, 4, 1)
BATCH(batch_f16_64_wide, AsF16, Float16, 64, 1, 1)
BATCH(batch_bf16_8, AsBF16, BFloat16, 8, 8, 2)
BATCH(batch_bf16_8_wide, AsBF16, BFloat16, 8, 16, 1)
BATCH(batch_bf16_16, AsBF16, BFloat16, 16, 8, 2)
BATCH(batch_bf16_16_wide, AsBF16, BFloat16, 16, 16, 1)
BATCH(batch_bf16_32, AsBF16, BFloat16, 32, 4, 2)
BATCH(batch_bf16_32_wide, AsBF16, BFloat16, 32, 8, 1)
BATCH(batch_bf16_64, AsBF16, BFloat16, 64, 4, 1)
BATCH(batch_bf16_64_wide, AsBF16, BFloat16, 64, 1, 1)
