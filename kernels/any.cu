// Entry points of decode attention for heads of widths that no other kernel has: any_<element>. From 9.0 on, the copy engine spreads most
// such heads over kernels of a larger width (attn_spread.cuh), and these kernels have the rest, as 216 elements of 16 bits.
//
// No images for: sm_86, sm_89.
//
// Needed by: heads of other widths than 64, 80, 96, 128 and 256.
#include "attn_latent_any.cuh"

LATENT_ANY(any_f16, Float16, MmaF16, true)
LATENT_ANY(any_bf16, BFloat16, MmaBF16, true)
LATENT_ANY(any_f32, Float32, MmaTF32, true)
