// Decode attention to keys and values of 4 bits with windows, sink tokens, trees, attention sinks, soft caps and ALiBi:
// q4_<head dim>_variant. Which of these a launch has is known at run time.
//
// Needed by: layers with masks or score modifications on caches of Q4: kernels without them are faster.
// No images for: sm_86, sm_89.
#include "attn_narrow_variant.cuh"
#include "attn_q4.cuh"

NARROW_ENTRY(q4_64_variant, NarrowScoredParams, FourBits, 64, NarrowScored)
NARROW_ENTRY(q4_128_variant, NarrowScoredParams, FourBits, 128, NarrowScored)
