// Decode attention to keys and values of 8 bits, of either type, with windows, sink tokens, trees, attention sinks, soft caps and
// ALiBi: narrow_<head dim>_variant. Which of these a launch has is known at run time. The kernel for heads of 256, with or without
// these, is for 9.0: elsewhere two sets of rows take more registers than there are.
//
// Needed by: layers with masks or score modifications on caches of E4M3 and int8: kernels without them are faster.
// No images for: sm_86, sm_89.
#include "attn_narrow_variant.cuh"

NARROW_SCORED_ATTENTION(narrow_64_variant, 64)
NARROW_SCORED_ATTENTION(narrow_128_variant, 128)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
NARROW_SCORED_ATTENTION(narrow_256_variant, 256)
#else
extern "C" __global__ void narrow_256_variant(const __grid_constant__ NarrowScoredParams p) {}
#endif
