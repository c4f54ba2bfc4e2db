// Attention with batch invariance, with masks and score modifications as in lean_score.cu:
// lean_<element>_<head dim>_invariant, and with _paged as in lean_paged.cu.
//
// Needed by: callers who want the bits of a row to depend on nothing but the row: what fixes them would make other kernels slower.
#include "attn_invariant.cuh"
#include "attn_lean.cuh"
#include "attn_lean_score.cuh"

#define HEAD_DIMS(name, T)                                \
  INVARIANT_ATTENTION(name##_64_invariant, T, 64, false)   \
  INVARIANT_ATTENTION(name##_80_invariant, T, 80, false)   \
  INVARIANT_ATTENTION(name##_96_invariant, T, 96, false)   \
  INVARIANT_ATTENTION(name##_128_invariant, T, 128, false) \
  INVARIANT_ATTENTION(name##_256_invariant, T, 256, false)

HEAD_DIMS(lean_f16, AsF16)
HEAD_DIMS(lean_bf16, AsBF16)
HEAD_DIMS(lean_f32, AsF32)

INVARIANT_VARIANT(lean_f16_64_invariant_paged, AsF16, 64, true)
INVARIANT_VARIANT(lean_f16_128_invariant_paged, AsF16, 128, true)
INVARIANT_VARIANT(lean_bf16_64_invariant_paged, AsBF16, 64, true)
INVARIANT_VARIANT(lean_bf16_128_invariant_paged, AsBF16, 128, true)
