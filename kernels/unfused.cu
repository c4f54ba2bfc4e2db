// Entry points of attention in three launches: one for each element type, where keys
// or values are read.
//
// Needed by: comparisons: attention as graphs have it without this library.
#include "attn_unfused.cuh"

#define UNFUSED(name, T)                                                                                                                                              \
  extern "C" __global__ void __launch_bounds__(UNFUSED_THREADS) unfused_scores_##name(const __grid_constant__ UnfusedParams u) { unfusedScores<T>(u); } \
  extern "C" __global__ void __launch_bounds__(UNFUSED_THREADS) unfused_sum_##name(const __grid_constant__ UnfusedParams u) { unfusedSum<T>(u); }

UNFUSED(f16, Float16)
UNFUSED(bf16, BFloat16)
UNFUSED(f32, Float32)

extern "C" __global__ void __launch_bounds__(UNFUSED_THREADS) unfused_softmax(const __grid_constant__ UnfusedParams u) { unfusedSoftmax(u); }
