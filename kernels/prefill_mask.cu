// Attention of many query rows with masks other than causal, and attention sinks: prefill_<element>_<head dim>_mask, of queries and
// outputs of any type, which rounds queries to that of keys.
//
// Needed by: prompts of layers with windows, sink tokens, trees or attention sinks alone: the kernels that change scores, too, take up to twice as long.
#include "attn_prefill.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(Prefill<Masked<T>, __VA_ARGS__>::THREADS, 1) name(const __grid_constant__ ScoredPrefillParams p) { Prefill<Masked<T>, __VA_ARGS__>::run(p.p); }
#else // there is no such kernel
#define PREFILL(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ ScoredPrefillParams p) {}
#endif

// Tiles as in prefill_score.cu: a plan has one list of output tiles for these and for those with queries in two parts.
#define HEAD_DIMS(name, T)                                 \
  PREFILL(name##_64_mask, T, 64, 2, 128, 4, false, true)   \
  PREFILL(name##_80_mask, T, 80, 2, 128, 2, false, true)   \
  PREFILL(name##_96_mask, T, 96, 2, 128, 2, false, true)   \
  PREFILL(name##_128_mask, T, 128, 2, 128, 2, false, true) \
  PREFILL(name##_256_mask, T, 256, 2, 64, 2, false, true)

HEAD_DIMS(prefill_f16, AsF16)
HEAD_DIMS(prefill_bf16, AsBF16)
