// Entry points of decode attention for heads of widths that no other kernel has: any_<element>. From 9.0 on, the copy engine spreads such
// heads over kernels of a larger width (attn_spread.cuh).
//
// Needed by: heads of other widths than 64, 80, 96, 128 and 256 on GPUs before 9.0.
#include "attn_latent_any.cuh"

#if __CUDA_ARCH__ < 900
LATENT_ANY(any_f16, Float16, MmaF16, true)
LATENT_ANY(any_bf16, BFloat16, MmaBF16, true)
LATENT_ANY(any_f32, Float32, MmaTF32, true)
#else
#define NO_ANY(name) \
  extern "C" __global__ void name(const __grid_constant__ LatentAnyParams p) {}
NO_ANY(any_f16)
NO_ANY(any_bf16)
NO_ANY(any_f32)
#endif
