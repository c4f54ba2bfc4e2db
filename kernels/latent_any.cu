// Entry points of decode attention to keys that hold the values, for what latent.cu does not take: latent_any_<element>; and of
// the kernel that stores new keys of E4M3.
//
// Needed by: caches with ValuesInKeys on GPUs other than 9.0, of other widths or types, or with masks and score changes.
#include "attn_latent_any.cuh"
#include "attn_latent_append.cuh"

LATENT_ANY(latent_any_f16, Float16, MmaF16)
LATENT_ANY(latent_any_bf16, BFloat16, MmaBF16)
LATENT_ANY(latent_any_f32, Float32, MmaTF32)
LATENT_ANY(latent_any_e4m3, GroupedFloat8, MmaBF16)

extern "C" __global__ void __launch_bounds__(256) append_latent(const __grid_constant__ LatentAppendParams p) { appendLatent(p); }
