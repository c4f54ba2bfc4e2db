// The same as prefill_score.cu by products of single warps: prefill_mma_<element>_<head dim>_score, and with _precise.
//
// Needed by: prompts of layers with windows, soft caps, ALiBi, biases, attention sinks or trees, on GPUs without products of warp groups.
#include "attn_prefill_mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // has those of prefill_score.cu
#define PREFILL(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ ScoredPrefillParams p) {}
#else
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(PrefillMma<Scored<T>, __VA_ARGS__>::THREADS, PrefillMma<Scored<T>, __VA_ARGS__>::TOGETHER) name(const __grid_constant__ ScoredPrefillParams p) { PrefillMma<Scored<T>, __VA_ARGS__>::run(p.p); }
#endif

// Tiles as in prefill_mma.cu.
#if __CUDA_ARCH__ == 800
#define STEP 64, 3
#else
#define STEP 32, 2
#endif

#define HEAD_DIMS(name, T)                                       \
  PREFILL(name##_64_score, T, 64, 4, 2, 64, 4, false, true)      \
  PREFILL(name##_80_score, T, 80, 4, 2, STEP, false, true)       \
  PREFILL(name##_96_score, T, 96, 4, 2, STEP, false, true)       \
  PREFILL(name##_128_score, T, 128, 4, 2, STEP, false, true)     \
  PREFILL(name##_256_score, T, 256, 4, 1, 32, 3, false, true)    \
  PREFILL(name##_64_precise_score, T, 64, 8, 1, 64, 4, true)     \
  PREFILL(name##_80_precise_score, T, 80, 8, 1, 32, 4, true)     \
  PREFILL(name##_96_precise_score, T, 96, 8, 1, 32, 4, true)     \
  PREFILL(name##_128_precise_score, T, 128, 8, 1, 32, 4, true)   \
  PREFILL(name##_256_precise_score, T, 256, 4, 1, 32, 2, true)

HEAD_DIMS(prefill_mma_f16, AsF16)
HEAD_DIMS(prefill_mma_bf16, AsBF16)
