// Entry points of linear layers of many rows: matrix_operands_<element>, and
// matrix_<element>_<rows of x that a thread block has>; and of a batch's rows:
// batch_<element>_<rows>, and with _wide where a block's slice of x is so wide that it has a
// multiprocessor for itself, and the registers.
#include "batch.cuh"
#include "matrix.cuh"

#if __CUDA_ARCH__ >= 900
#define OPERANDS(name, T) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ OperandParams p) { operands<T>(p); }
#define MATRIX(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(MATRIX_THREADS, 1) name(const __grid_constant__ MatrixParams p) { Matrix<T, ROWS>::run(p); }
#else // there linear_<element> reads the weights again
#define OPERANDS(name, T) extern "C" __global__ void name(const __grid_constant__ OperandParams p) {}
#define MATRIX(name, T, ROWS) extern "C" __global__ void name(const __grid_constant__ MatrixParams p) {}
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BATCH(name, T, ROWS, FEW, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(BATCH_THREADS, BLOCKS) name(const __grid_constant__ BatchParams p) { Batch<T, ROWS, FEW>::run(p); }
#else // there matrix_ and linear_<element> take these rows
#define BATCH(name, T, ROWS, FEW, BLOCKS) extern "C" __global__ void name(const __grid_constant__ BatchParams p) {}
#endif

OPERANDS(matrix_operands_f16, Half)
OPERANDS(matrix_operands_bf16, Brain)

MATRIX(matrix_f16_32, Half, 32)
MATRIX(matrix_f16_64, Half, 64)
MATRIX(matrix_f16_128, Half, 128)
MATRIX(matrix_bf16_32, Brain, 32)
MATRIX(matrix_bf16_64, Brain, 64)
MATRIX(matrix_bf16_128, Brain, 128)

BATCH(batch_f16_8, Half, 8, 8, 2)
BATCH(batch_f16_8_wide, Half, 8, 16, 1)
BATCH(batch_f16_16, Half, 16, 8, 2)
BATCH(batch_f16_16_wide, Half, 16, 16, 1)
BATCH(batch_bf16_8, Brain, 8, 8, 2)
BATCH(batch_bf16_8_wide, Brain, 8, 16, 1)
BATCH(batch_bf16_16, Brain, 16, 8, 2)
BATCH(batch_bf16_16_wide, Brain, 16, 16, 1)
