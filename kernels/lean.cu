// Entry points of plain attention by decode kernels: lean_<element>_<head dim>, since registers and shared memory are laid
// out for the pair.
//
// Needed by: every decode.
#include "attn_lean.cuh"
#include "attn_row.cuh"

#define HEAD_DIMS(name, T)     \
  ATTENTION(name##_64, T, 64)   \
  ATTENTION(name##_80, T, 80)   \
  ATTENTION(name##_96, T, 96)   \
  ATTENTION(name##_128, T, 128) \
  ATTENTION(name##_256, T, 256)

HEAD_DIMS(lean_f16, AsF16)
HEAD_DIMS(lean_bf16, AsBF16)
HEAD_DIMS(lean_f32, AsF32)

// Output tiles of more than eight rows. Eight rows is what consumer warps merge in their registers (HELPED in
// attn_reduce.cuh).
HOPPER_ATTENTION(lean_f16_128_many, AsF16, 128, true)
HOPPER_ATTENTION(lean_bf16_128_many, AsBF16, 128, true)

// Pages of a power of two of tokens: producer warps walk the block table.
HOPPER_ATTENTION(lean_f16_64_paged, AsF16, 64, false, true)
HOPPER_ATTENTION(lean_bf16_64_paged, AsBF16, 64, false, true)
HOPPER_ATTENTION(lean_f16_128_paged, AsF16, 128, false, true)
HOPPER_ATTENTION(lean_bf16_128_paged, AsBF16, 128, false, true)

// Output tiles of one row in long launches: these draw 4% less power, at the same speed.
ROW_ATTENTION(lean_f16_64_row, AsF16, false)
ROW_ATTENTION(lean_bf16_64_row, AsBF16, false)
ROW_ATTENTION(lean_f16_64_row_paged, AsF16, true)
ROW_ATTENTION(lean_bf16_64_row_paged, AsBF16, true)
