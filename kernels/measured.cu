// Attention by decode kernels that measures its weights: lean_<element>_<head dim>_measured, and the launch behind it.
//
// Needed by: entropies and attention mass of a GPU's attention: other kernels do not have the sums, and would be slower with them.
// No images for: sm_86, sm_89.
#include "attn_measured.cuh"

// Heads may lie in pages of a power of two of tokens, as in lean.cu.
#define HEAD_DIMS(name, T, PAGED)                                \
  MEASURED_ATTENTION(name##_64_measured, T, 64, false, PAGED)    \
  MEASURED_ATTENTION(name##_128_measured, T, 128, false, PAGED)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
HEAD_DIMS(lean_f16, AsF16, true)
HEAD_DIMS(lean_bf16, AsBF16, true)
#else
HEAD_DIMS(lean_f16, AsF16, false)
HEAD_DIMS(lean_bf16, AsBF16, false)
#endif
HEAD_DIMS(lean_f32, AsF32, false)
