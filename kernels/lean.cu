// Entry points of attention on a GPU: lean_<element>_<head dim>, since registers and shared
// memory are laid out for the pair. lean_many.cu and lean_paged.cu have variants.
//
// Needed by: every decode.
#include "attn_append.cuh"
#include "attn_lean.cuh"

#define HEAD_DIMS(name, T)     \
  ATTENTION(name##_64, T, 64)   \
  ATTENTION(name##_80, T, 80)   \
  ATTENTION(name##_96, T, 96)   \
  ATTENTION(name##_128, T, 128) \
  ATTENTION(name##_256, T, 256)

HEAD_DIMS(lean_f16, AsF16)
HEAD_DIMS(lean_bf16, AsBF16)
HEAD_DIMS(lean_f32, AsF32)

extern "C" __global__ void __launch_bounds__(256) lean_append(const __grid_constant__ AppendParams p) { append(p); }
