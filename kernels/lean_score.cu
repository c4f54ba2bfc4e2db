// Attention with a window of keys and sink tokens beside it, and with scores that are capped or have slopes (ALiBi):
// lean_<element>_<head dim>_score, and with _paged as in lean_paged.cu.
//
// Needed by: layers with windows, soft caps or ALiBi: in one kernel with others, what they take would make these slower.
#include "attn_lean.cuh"
#include "attn_lean_score.cuh"

#define HEAD_DIMS(name, T)                       \
  SCORED_ATTENTION(name##_64_score, T, 64, false)   \
  SCORED_ATTENTION(name##_80_score, T, 80, false)   \
  SCORED_ATTENTION(name##_96_score, T, 96, false)   \
  SCORED_ATTENTION(name##_128_score, T, 128, false) \
  SCORED_ATTENTION(name##_256_score, T, 256, false)

HEAD_DIMS(lean_f16, AsF16)
HEAD_DIMS(lean_bf16, AsBF16)
HEAD_DIMS(lean_f32, AsF32)

SCORED_VARIANT(lean_f16_64_score_paged, AsF16, 64, true)
SCORED_VARIANT(lean_f16_128_score_paged, AsF16, 128, true)
SCORED_VARIANT(lean_bf16_64_score_paged, AsBF16, 64, true)
SCORED_VARIANT(lean_bf16_128_score_paged, AsBF16, 128, true)
