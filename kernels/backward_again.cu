// Entry points of gradients of a bias for compute capability 9.0, for head dims up to one: backward_again_<element>_<head dim>.
//
// Needed by: training: gradients of a bias of attention on a GPU of 9.0.
#include "attn_backward_again.cuh"

// Head dim, pairs of tiles in the ring, and rows of a query block of the kernels before (unit backward_hopper_variant).
#define AGAIN_64 64, 5, 128
#define AGAIN_128 128, 3, 64

#define ELEMENT(element, T)                                               \
  BACKWARD_AGAIN(backward_again_##element##_64, T, AGAIN_64, AgainBias)   \
  BACKWARD_AGAIN(backward_again_##element##_128, T, AGAIN_128, AgainBias)

ELEMENT(f16, AsF16)
ELEMENT(bf16, AsBF16)
