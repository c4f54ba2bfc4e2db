// Entry points of attention of many query rows: prefill_<element>_<head dim>, of queries and
// outputs of the keys' type; of any type with _rounded, which rounds queries to that, and with
// _precise, which has them in two parts. Three consumer warp groups fit where heads of 64 leave them registers, and are up to 10% faster
// than two there.
//
// Needed by: prompts: attention of many query rows has tiles of 64 rows a warp group.
#include "attn_prefill.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PREFILL(name, ...) \
  extern "C" __global__ void __launch_bounds__(Prefill<__VA_ARGS__>::THREADS, 1) name(const __grid_constant__ PrefillParams p) { Prefill<__VA_ARGS__>::run(p); }
#else // there is no such kernel
#define PREFILL(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ PrefillParams p) {}
#endif

PREFILL(prefill_f16_64, AsF16, 64, 3, 128, 4)
PREFILL(prefill_f16_80, AsF16, 80, 2, 128, 2)
PREFILL(prefill_f16_96, AsF16, 96, 2, 128, 2)
PREFILL(prefill_f16_128, AsF16, 128, 2, 128, 2)
PREFILL(prefill_f16_256, AsF16, 256, 2, 64, 2)
PREFILL(prefill_bf16_64, AsBF16, 64, 3, 128, 4)
PREFILL(prefill_bf16_80, AsBF16, 80, 2, 128, 2)
PREFILL(prefill_bf16_96, AsBF16, 96, 2, 128, 2)
PREFILL(prefill_bf16_128, AsBF16, 128, 2, 128, 2)
PREFILL(prefill_bf16_256, AsBF16, 256, 2, 64, 2)

// Queries are rounded on their way.
PREFILL(prefill_f16_64_rounded, AsF16, 64, 3, 128, 4, false, true)
PREFILL(prefill_f16_80_rounded, AsF16, 80, 2, 128, 2, false, true)
PREFILL(prefill_f16_96_rounded, AsF16, 96, 2, 128, 2, false, true)
PREFILL(prefill_f16_128_rounded, AsF16, 128, 2, 128, 2, false, true)
PREFILL(prefill_f16_256_rounded, AsF16, 256, 2, 64, 2, false, true)
PREFILL(prefill_bf16_64_rounded, AsBF16, 64, 3, 128, 4, false, true)
PREFILL(prefill_bf16_80_rounded, AsBF16, 80, 2, 128, 2, false, true)
PREFILL(prefill_bf16_96_rounded, AsBF16, 96, 2, 128, 2, false, true)
PREFILL(prefill_bf16_128_rounded, AsBF16, 128, 2, 128, 2, false, true)
PREFILL(prefill_bf16_256_rounded, AsBF16, 256, 2, 64, 2, false, true)

// Two parts of queries and weights: there are registers for weights of half as many keys.
PREFILL(prefill_f16_64_precise, AsF16, 64, 3, 64, 6, true)
PREFILL(prefill_f16_80_precise, AsF16, 80, 2, 64, 3, true)
PREFILL(prefill_f16_96_precise, AsF16, 96, 2, 64, 3, true)
PREFILL(prefill_f16_128_precise, AsF16, 128, 2, 64, 3, true)
PREFILL(prefill_f16_256_precise, AsF16, 256, 2, 32, 3, true)
PREFILL(prefill_bf16_64_precise, AsBF16, 64, 3, 64, 6, true)
PREFILL(prefill_bf16_80_precise, AsBF16, 80, 2, 64, 3, true)
PREFILL(prefill_bf16_96_precise, AsBF16, 96, 2, 64, 3, true)
PREFILL(prefill_bf16_128_precise, AsBF16, 128, 2, 64, 3, true)
PREFILL(prefill_bf16_256_precise, AsBF16, 256, 2, 32, 3, true)
