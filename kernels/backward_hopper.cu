// Entry points of gradients of attention for compute capability 9.0, for head dims up to one: backward_hopper_<element>_<head dim>, and the
// launch after it backward_hopper_sums_<element>_<head dim>. The launch before it is backward_rows_<element>_64 of unit backward.
//
// Needed by: training: gradients of attention on a GPU of 9.0.
#include "attn_backward_hopper.cuh"

#define HEADS_64 64, 128, 3
#define HEADS_128 128, 64, 3

#define ELEMENT(element, T)                                      \
  BACKWARD_HOPPER(backward_hopper_##element##_64, T, HEADS_64)   \
  BACKWARD_HOPPER(backward_hopper_##element##_128, T, HEADS_128) \
  BACKWARD_SUMS(backward_hopper_sums_##element##_64, T, HEADS_64)   \
  BACKWARD_SUMS(backward_hopper_sums_##element##_128, T, HEADS_128)

ELEMENT(f16, AsF16)
ELEMENT(bf16, AsBF16)
