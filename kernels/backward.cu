// Entry points of gradients of attention: backward_<element>_<head dim>, for head dims up to that one, and for the launch before
// it backward_rows_<element>_<rows of a query block>. With heads of 64, a multiprocessor has two thread blocks. With heads of 128
// it has one, and query blocks are half as large on GPUs with 100 KB of shared memory.
//
// Needed by: training: gradients of attention on a GPU.
#include "attn_backward.cuh"

#if __CUDA_ARCH__ == 800 || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define STEP 64, 2
#else
#define STEP 32, 1
#endif

#define BACKWARD(name, T, TOGETHER, ...) \
  extern "C" __global__ void __launch_bounds__(Backward<T, __VA_ARGS__>::THREADS, TOGETHER) name(const __grid_constant__ BackwardParams p) { Backward<T, __VA_ARGS__>::run(p); }
#define BACKWARD_ROWS(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(BackwardRows<T, ROWS>::THREADS) name(const __grid_constant__ BackwardParams p) { BackwardRows<T, ROWS>::run(p); }

#define HEAD_DIMS(element, T)                           \
  BACKWARD_ROWS(backward_rows_##element##_32, T, 32)    \
  BACKWARD_ROWS(backward_rows_##element##_64, T, 64)    \
  BACKWARD(backward_##element##_64, T, 2, 64, 8, 32, 2) \
  BACKWARD(backward_##element##_128, T, 1, 128, 8, STEP)

HEAD_DIMS(f16, AsF16)
HEAD_DIMS(bf16, AsBF16)
