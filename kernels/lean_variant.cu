// Attention by decode kernels with windows, sink tokens, trees, attention sinks, soft caps, ALiBi, biases and batch invariance:
// lean_<element>_<head dim>_variant. Which of these a launch has is known at run time.
//
// Needed by: layers with masks or score modifications, and callers who want batch invariance: kernels without them are faster.
#include "attn_invariant.cuh"
#include "attn_lean.cuh"
#include "attn_lean_variant.cuh"

// Heads of 64 and 128 may lie in pages of a power of two of tokens, as in lean.cu.
#define HEAD_DIMS(name, T, PAGED)                                    \
  SCORED_ATTENTION(name##_64_variant, T, 64, false, PAGED)           \
  SCORED_ATTENTION(name##_80_variant, T, 80)                         \
  SCORED_ATTENTION(name##_96_variant, T, 96)                         \
  SCORED_ATTENTION(name##_128_variant, T, 128, false, PAGED)         \
  SCORED_ATTENTION(name##_256_variant, T, 256)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
HEAD_DIMS(lean_f16, AsF16, true)
HEAD_DIMS(lean_bf16, AsBF16, true)
#else
HEAD_DIMS(lean_f16, AsF16, false)
HEAD_DIMS(lean_bf16, AsBF16, false)
#endif
HEAD_DIMS(lean_f32, AsF32, false)
