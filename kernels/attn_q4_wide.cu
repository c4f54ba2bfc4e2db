// Decode attention to keys and values of 4 bits with heads of 256, with and without masks and score changes, as in attn_q4_variant. The
// kernel is for 9.0: elsewhere two sets of rows take more registers than there are.
//
// No images for: sm_80, sm_86, sm_89.
//
// Needed by: caches of Q4 with heads of 256 on GPUs of 9.0.
#include "attn_narrow_variant.cuh"
#include "attn_q4.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
NARROW_ENTRY(q4_256_variant, NarrowScoredParams, FourBits, 256, NarrowScored)
#else
extern "C" __global__ void q4_256_variant(const __grid_constant__ NarrowScoredParams p) {}
#endif
