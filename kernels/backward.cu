// Entry points of gradients of attention: backward_<element>_<head dim>, for head dims up to that one, and for the launch before
// it backward_rows_<element>_<rows of a query block>. GPUs with at most 100 KB of shared memory have a thread block on a
// multiprocessor. Others have two with heads of 64, whose warps have 32 keys each: right operands then serve twice as many products.
// GPUs of 9.0 have the kernels of unit backward_hopper, and only the rows' here.
//
// Needed by: training: gradients of attention on a GPU.
#include "attn_backward.cuh"

// Thread blocks on a multiprocessor; head dim, warps, matrices of 16 keys of a warp, rows of a query block, stages.
#if __CUDA_ARCH__ == 800
#define HEADS_64 2, 64, 4, 2, 32, 2
#define HEADS_128 1, 128, 8, 1, 64, 2
#else
#define HEADS_64 1, 64, 8, 1, 64, 2
#define HEADS_128 1, 128, 8, 1, 32, 1
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define BACKWARD(name, T, SHAPE) extern "C" __global__ void name(const __grid_constant__ BackwardParams p) {}
#else
#define BACKWARD(name, T, SHAPE) BACKWARD_OF(name, T, SHAPE)
#endif
#define BACKWARD_OF(name, T, TOGETHER, ...) \
  extern "C" __global__ void __launch_bounds__(Backward<T, __VA_ARGS__>::THREADS, TOGETHER) name(const __grid_constant__ BackwardParams p) { Backward<T, __VA_ARGS__>::run(p); }
#define BACKWARD_ROWS(name, T, ROWS) \
  extern "C" __global__ void __launch_bounds__(BackwardRows<T, ROWS>::THREADS) name(const __grid_constant__ BackwardParams p) { BackwardRows<T, ROWS>::run(p); }

#define HEAD_DIMS(element, T)                        \
  BACKWARD_ROWS(backward_rows_##element##_32, T, 32) \
  BACKWARD_ROWS(backward_rows_##element##_64, T, 64) \
  BACKWARD(backward_##element##_64, T, HEADS_64)     \
  BACKWARD(backward_##element##_128, T, HEADS_128)

HEAD_DIMS(f16, AsF16)
HEAD_DIMS(bf16, AsBF16)
