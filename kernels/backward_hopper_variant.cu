// Entry points of gradients of attention with changes of scores, masks, sinks and dropout for compute capability 9.0, as those of unit
// backward_hopper: backward_hopper_<changes>_<element>_<head dim>. All take masks, ALiBi and sinks, and besides
//
//   masked   nothing
//   capped   a soft cap
//   biased   a bias whose rows begin at multiples of 16 bytes
//   dropped  dropout
//   scored   everything, in any combination
//
// backward_hopper_scored_sums_<element>_<head dim> writes dq for all.
//
// Needed by: training: gradients of attention on a GPU of 9.0 with windows, soft caps, ALiBi, biases, sinks or dropout.
#include "attn_backward_hopper_variant.cuh"

#define HEADS_64 64, 128, 3
#define HEADS_128 128, 64, 3

#define KERNELS(element, T, dim, ...)                                                                   \
  BACKWARD_HOPPER_SCORED(backward_hopper_scored_##element##_##dim, T, __VA_ARGS__, HopperScored)    \
  BACKWARD_HOPPER_SCORED(backward_hopper_masked_##element##_##dim, T, __VA_ARGS__, HopperMasked)    \
  BACKWARD_HOPPER_SCORED(backward_hopper_capped_##element##_##dim, T, __VA_ARGS__, HopperFew<HOPPER_CAP>)    \
  BACKWARD_HOPPER_SCORED(backward_hopper_biased_##element##_##dim, T, __VA_ARGS__, HopperFew<HOPPER_BIAS>)    \
  BACKWARD_HOPPER_SCORED(backward_hopper_dropped_##element##_##dim, T, __VA_ARGS__, HopperFew<HOPPER_DROPOUT>)    \
  BACKWARD_SUMS_SCORED(backward_hopper_scored_sums_##element##_##dim, T, __VA_ARGS__, HopperScored)
#define KERNELS_OF(...) KERNELS(__VA_ARGS__)

KERNELS_OF(f16, AsF16, 64, HEADS_64)
KERNELS_OF(f16, AsF16, 128, HEADS_128)
KERNELS_OF(bf16, AsBF16, 64, HEADS_64)
KERNELS_OF(bf16, AsBF16, 128, HEADS_128)
