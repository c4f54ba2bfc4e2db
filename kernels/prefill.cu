// Entry points of attention of many query rows: prefill_<element>_<head dim>. Queries and
// outputs are of the keys' type. Three consumer warp groups fit where heads of 64 leave them
// registers, and are up to 10% faster than two there.
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

PREFILL(prefill_f16_64, AsF16, 64, 3, 4)
PREFILL(prefill_f16_128, AsF16, 128, 2, 2)
PREFILL(prefill_bf16_64, AsBF16, 64, 3, 4)
PREFILL(prefill_bf16_128, AsBF16, 128, 2, 2)
