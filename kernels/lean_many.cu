// Attention of output tiles of more than eight rows: lean_<element>_128_many. Eight rows is what
// consumer warps merge in their registers (HELPED in attn_reduce.cuh).
//
// Needed by: steps of several new tokens, and large groups, with heads of 128: their merge has code of its own.
#include "attn_lean.cuh"

VARIANT(lean_f16_128_many, AsF16, 128, true)
VARIANT(lean_bf16_128_many, AsBF16, 128, true)
