// Entry points of plain decode attention for heads whose rows are no whole column blocks: packed_<element>_<head dim>. Kernels of larger
// head dims read such heads, too, at 0.5 to 0.85 of this speed, and with a launch before and one after (attn_spread.cuh).
//
// No images for: sm_80, sm_86, sm_89.
//
// Needed by: decode of models with such heads on GPUs of 9.0.
#include "attn_packed.cuh"

#define HEAD_DIMS(name, T)             \
  PACKED_ATTENTION(name##_32, T, 32)   \
  PACKED_ATTENTION(name##_48, T, 48)   \
  PACKED_ATTENTION(name##_80, T, 80)   \
  PACKED_ATTENTION(name##_112, T, 112) \
  PACKED_ATTENTION(name##_160, T, 160) \
  HOPPER_ATTENTION(name##_192, T, 192) /* three column blocks */ \
  PACKED_ATTENTION(name##_240, T, 240)

HEAD_DIMS(packed_f16, AsF16)
HEAD_DIMS(packed_bf16, AsBF16)
