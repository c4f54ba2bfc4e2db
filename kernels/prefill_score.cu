// Attention of many query rows with masks other than causal and score modifications: prefill_<element>_<head dim>_score, of queries and
// outputs of any type, which rounds queries to that of keys, and with _precise, which has them in two parts.
//
// Needed by: prompts of layers with windows, soft caps, ALiBi, biases, attention sinks or trees: by the kernels for few rows they take several times as long.
#include "attn_prefill.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(Prefill<Scored<T>, __VA_ARGS__>::THREADS, 1) name(const __grid_constant__ ScoredPrefillParams p) { Prefill<Scored<T>, __VA_ARGS__>::run(p.p); }
#else // there is no such kernel
#define PREFILL(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ ScoredPrefillParams p) {}
#endif

// Tiles as in prefill.cu, but for heads of 64: three consumer warp groups would not have the registers.
#define HEAD_DIMS(name, T)                                   \
  PREFILL(name##_64_score, T, 64, 2, 128, 4, false, true)    \
  PREFILL(name##_80_score, T, 80, 2, 128, 2, false, true)    \
  PREFILL(name##_96_score, T, 96, 2, 128, 2, false, true)    \
  PREFILL(name##_128_score, T, 128, 2, 128, 2, false, true)  \
  PREFILL(name##_256_score, T, 256, 2, 64, 2, false, true)   \
  PREFILL(name##_64_precise_score, T, 64, 2, 64, 6, true)    \
  PREFILL(name##_80_precise_score, T, 80, 2, 64, 3, true)    \
  PREFILL(name##_96_precise_score, T, 96, 2, 64, 3, true)    \
  PREFILL(name##_128_precise_score, T, 128, 2, 64, 3, true)  \
  PREFILL(name##_256_precise_score, T, 256, 2, 32, 3, true)

HEAD_DIMS(prefill_f16, AsF16)
HEAD_DIMS(prefill_bf16, AsBF16)
