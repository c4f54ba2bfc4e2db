// Entry points of gradients of attention with changes of scores, masks, sinks and dropout: as those of unit backward, with
// backward_bias_<element>_<head dim> for gradients of biases and backward_sinks for those of sinks. A lane has more numbers than
// without, so tiles are smaller: a thread block on a multiprocessor. GPUs of 9.0 have unit backward_hopper_variant in place of the
// first kernels.
//
// Needed by: training: gradients of attention on a GPU with windows, soft caps, ALiBi, biases, sinks or dropout.
#include "attn_backward_variant.cuh"

// Head dim, warps, matrices of 16 keys of a warp, rows of a query block, stages.
#define HEADS_64 64, 8, 1, 64, 2
#if __CUDA_ARCH__ == 800 || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HEADS_128 128, 8, 1, 32, 2
#else
#define HEADS_128 128, 8, 1, 32, 1
#endif

#define KERNEL(name, THREADS, ...) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ BackwardScoredParams p) { __VA_ARGS__; }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SCORED(...)
#else
#define SCORED(T, ...) Backward<T, __VA_ARGS__, BackwardScored>::run(p.p)
#endif
#define BACKWARD(element, T, dim, ...)                                                                          \
  KERNEL(backward_scored_##element##_##dim, 256, SCORED(T, __VA_ARGS__))                                           \
  KERNEL(backward_bias_##element##_##dim, 256, BackwardBias<Backward<T, __VA_ARGS__, BackwardScored>>::run(p.p))
#define BACKWARD_OF(...) BACKWARD(__VA_ARGS__)
#define ELEMENT(element, T)                                                                                       \
  KERNEL(backward_scored_rows_##element##_32, 256, BackwardRows<T, 32, BackwardScored>::run(p.p))                  \
  KERNEL(backward_scored_rows_##element##_64, 256, BackwardRows<T, 64, BackwardScored>::run(p.p))                  \
  BACKWARD_OF(element, T, 64, HEADS_64)                                                                           \
  BACKWARD_OF(element, T, 128, HEADS_128)

ELEMENT(f16, AsF16)
ELEMENT(bf16, AsBF16)
KERNEL(backward_sinks, 256, BackwardSinks::run(p.p))
