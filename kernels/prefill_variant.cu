// Attention by prefill kernels with windows, sink tokens, trees, attention sinks, soft caps, ALiBi and biases:
// prefill_<element>_<head dim>_variant, and with _precise, as in prefill.cu. Which of these a launch has is known at run time.
// Queries and outputs may have any type.
//
// Needed by: prompts of layers with masks or score modifications: decode kernels take several times as long.
#include "attn_prefill.cuh"
#include "attn_prefill_mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(Prefill<T, Scored, __VA_ARGS__>::THREADS, 1) name(const __grid_constant__ ScoredPrefillParams p) { Prefill<T, Scored, __VA_ARGS__>::run(p.p); }

// Tiles as in prefill.cu, but for heads of 64: three consumer warp groups would not have the registers.
#define HEAD_DIMS(name, T)                                          \
  PREFILL(name##_64_variant, T, 64, 2, 128, 4, false, true)         \
  PREFILL(name##_80_variant, T, 80, 2, 128, 2, false, true)         \
  PREFILL(name##_96_variant, T, 96, 2, 128, 2, false, true)         \
  PREFILL(name##_128_variant, T, 128, 2, 128, 2, false, true)       \
  PREFILL(name##_256_variant, T, 256, 2, 64, 2, false, true)        \
  PREFILL(name##_64_precise_variant, T, 64, 2, 64, 6, true)         \
  PREFILL(name##_80_precise_variant, T, 80, 2, 64, 3, true)         \
  PREFILL(name##_96_precise_variant, T, 96, 2, 64, 3, true)         \
  PREFILL(name##_128_precise_variant, T, 128, 2, 64, 3, true)       \
  PREFILL(name##_256_precise_variant, T, 256, 2, 32, 3, true)
#else
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(PrefillMma<T, Scored, __VA_ARGS__>::THREADS, PrefillMma<T, Scored, __VA_ARGS__>::TOGETHER) name(const __grid_constant__ ScoredPrefillParams p) { PrefillMma<T, Scored, __VA_ARGS__>::run(p.p); }

// Tiles as in prefill.cu.
#define HEAD_DIMS(name, T)                                             \
  PREFILL(name##_64_variant, T, 64, 4, 2, 64, 4, false, true)          \
  PREFILL(name##_80_variant, T, 80, 4, 2, STEP, false, true)           \
  PREFILL(name##_96_variant, T, 96, 4, 2, STEP, false, true)           \
  PREFILL(name##_128_variant, T, 128, 4, 2, STEP, false, true)         \
  PREFILL(name##_256_variant, T, 256, 4, 1, 32, 3, false, true)        \
  PREFILL(name##_64_precise_variant, T, 64, 8, 1, 64, 4, true)         \
  PREFILL(name##_80_precise_variant, T, 80, 8, 1, 32, 4, true)         \
  PREFILL(name##_96_precise_variant, T, 96, 8, 1, 32, 4, true)         \
  PREFILL(name##_128_precise_variant, T, 128, 8, 1, 32, 4, true)       \
  PREFILL(name##_256_precise_variant, T, 256, 4, 1, 32, 2, true)
#endif

HEAD_DIMS(prefill_f16, AsF16)
HEAD_DIMS(prefill_bf16, AsBF16)
