// Entry points of linear layers with gates, and with the activations that those of decoder.cu
// and matrix.cu have not: gated_linear_<element>, gated_<element>_<rows of x that a thread
// block has>, and gated_batch_<element>_<rows>, with _wide as there.
//
// Needed by: decoders with gated linear units, as most have them since Llama, and models with GELU by tanh or SiLU.
#include "gemm_skinny.cuh"
#include "gemm_tiled.cuh"

#define LINEAR(name, T) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ LinearParams p) { Gemv<T, true>::run(p); }
#if __CUDA_ARCH__ >= 900
#define MATRIX(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(GEMM_THREADS, 1) name(const __grid_constant__ GemmParams p) { TiledGemm<T, ROWS, true>::run(p); }
#else // there gated_linear_<element> reads the weights again
#define MATRIX(name, T, ROWS) extern "C" __global__ void name(const __grid_constant__ GemmParams p) {}
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(skinnyThreads(ROWS), BLOCKS) name(const __grid_constant__ SkinnyParams p) { SkinnyGemm<T, KEYS, ROWS, FEW, true>::run(p); }
#else // there the others take these rows
#define BATCH(name, T, KEYS, ROWS, FEW, BLOCKS) extern "C" __global__ void name(const __grid_constant__ SkinnyParams p) {}
#endif

LINEAR(gated_linear_f16, AsF16)
LINEAR(gated_linear_bf16, AsBF16)
LINEAR(gated_linear_f32, AsF32)

MATRIX(gated_f16_32, AsF16, 32)
MATRIX(gated_f16_64, AsF16, 64)
MATRIX(gated_f16_128, AsF16, 128)
MATRIX(gated_bf16_32, AsBF16, 32)
MATRIX(gated_bf16_64, AsBF16, 64)
MATRIX(gated_bf16_128, AsBF16, 128)

BATCH(gated_batch_f16_8, AsF16, Float16, 8, 8, 2)
BATCH(gated_batch_f16_8_wide, AsF16, Float16, 8, 16, 1)
BATCH(gated_batch_f16_16, AsF16, Float16, 16, 8, 2)
BATCH(gated_batch_f16_16_wide, AsF16, Float16, 16, 16, 1)
BATCH(gated_batch_f16_32, AsF16, Float16, 32, 4, 2)
BATCH(gated_batch_f16_32_wide, AsF16, Float16, 32, 8, 1)
BATCH(gated_batch_f16_64, AsF16, Float16, 64, 4, 1)
BATCH(gated_batch_f16_64_wide, AsF16, Float16, 64, 1, 1)
BATCH(gated_batch_bf16_8, AsBF16, BFloat16, 8, 8, 2)
BATCH(gated_batch_bf16_8_wide, AsBF16, BFloat16, 8, 16, 1)
BATCH(gated_batch_bf16_16, AsBF16, BFloat16, 16, 8, 2)
BATCH(gated_batch_bf16_16_wide, AsBF16, BFloat16, 16, 16, 1)
BATCH(gated_batch_bf16_32, AsBF16, BFloat16, 32, 4, 2)
BATCH(gated_batch_bf16_32_wide, AsBF16, BFloat16, 32, 8, 1)
BATCH(gated_batch_bf16_64, AsBF16, BFloat16, 64, 4, 1)
BATCH(gated_batch_bf16_64_wide, AsBF16, BFloat16, 64, 1, 1)
