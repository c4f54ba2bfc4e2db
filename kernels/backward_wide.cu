// Entry points of gradients of attention for operands of float32: those of unit backward_variant, with f32 in place of the element,
// for all head dims up to 128.
//
// Needed by: training: gradients of attention of float32 on a GPU.
#include "attn_backward_wide.cuh"

#define KERNEL(name, THREADS, ...) \
  extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ BackwardScoredParams p) { __VA_ARGS__; }

KERNEL(backward_scored_rows_f32_16, 256, BackwardRows<AsF32, 16, BackwardScored>::run(p.p))
KERNEL(backward_scored_f32_128, 128, BackwardWide<128, 16>::run(p.p))
KERNEL(backward_bias_f32_128, 128, BackwardWideBias<BackwardWide<128, 16>>::run(p.p))
KERNEL(backward_sinks, 256, BackwardSinks::run(p.p))
