// Attention over pages of a power of two of tokens: lean_<element>_<head dim>_paged. Producer
// warps walk the block table.
//
// Needed by: caches with small pages: the walk of their block table has code of its own.
#include "attn_lean.cuh"

VARIANT(lean_f16_64_paged, AsF16, 64, false, true)
VARIANT(lean_bf16_64_paged, AsBF16, 64, false, true)
VARIANT(lean_f16_128_paged, AsF16, 128, false, true)
VARIANT(lean_bf16_128_paged, AsBF16, 128, false, true)
