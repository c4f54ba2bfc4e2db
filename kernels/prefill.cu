// Entry points of plain attention by prefill kernels: prefill_<element>_<head dim>, of queries and outputs of the type of keys,
// with _rounded of any type, which rounds queries to that of keys, and with _precise, which has queries in two parts. GPUs of
// compute capability 9.0 have products of warp groups, others products of single warps.
//
// On 9.0, code that rounds makes a launch up to 1 us longer, so other kernels than those of equal types have it. For head dims
// other than 64 and 128 the kernels of prefill_variant.cu round, which have the same output tiles. On other GPUs one kernel
// does both.
//
// Needed by: prompts: prefill kernels have output tiles of 64 rows and more.
#include "attn_prefill.cuh"
#include "attn_prefill_mma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(Prefill<T, Plain, __VA_ARGS__>::THREADS, 1) name(const __grid_constant__ PrefillParams p) { Prefill<T, Plain, __VA_ARGS__>::run(p); }

// Three consumer warp groups fit where heads of 64 leave them registers, and are up to 10% faster than two there. Two parts of
// queries and weights leave registers for weights of half as many keys.
#define HEAD_DIMS(name, T)                                    \
  PREFILL(name##_64, T, 64, 3, 128, 4, false, false, 64, true) \
  PREFILL(name##_80, T, 80, 2, 128, 2)                        \
  PREFILL(name##_96, T, 96, 2, 128, 2)                        \
  PREFILL(name##_128, T, 128, 2, 128, 2)                      \
  PREFILL(name##_256, T, 256, 2, 64, 2)                       \
  PREFILL(name##_192_128, T, 192, 2, 128, 2, false, false, 128) \
  PREFILL(name##_64_rounded, T, 64, 3, 128, 4, false, true)   \
  PREFILL(name##_128_rounded, T, 128, 2, 128, 2, false, true) \
  PREFILL(name##_64_precise, T, 64, 3, 64, 6, true)           \
  PREFILL(name##_80_precise, T, 80, 2, 64, 3, true)           \
  PREFILL(name##_96_precise, T, 96, 2, 64, 3, true)           \
  PREFILL(name##_128_precise, T, 128, 2, 64, 3, true)         \
  PREFILL(name##_256_precise, T, 256, 2, 32, 3, true)
#else
#define NO_PREFILL(name) extern "C" __global__ void name(const __grid_constant__ PrefillParams p) {}
#define PREFILL(name, T, ...) \
  extern "C" __global__ void __launch_bounds__(PrefillMma<T, Plain, __VA_ARGS__>::THREADS, PrefillMma<T, Plain, __VA_ARGS__>::TOGETHER) name(const __grid_constant__ PrefillParams p) { PrefillMma<T, Plain, __VA_ARGS__>::run(p); }

// Two parts of queries and weights: twice the products for each matrix that is loaded, so that 16 rows of a warp are enough.
#define HEAD_DIMS(name, T)                                    \
  PREFILL(name##_64, T, 64, 4, 2, 64, 4, false, true)         \
  PREFILL(name##_80, T, 80, 4, 2, STEP, false, true)          \
  PREFILL(name##_96, T, 96, 4, 2, STEP, false, true)          \
  PREFILL(name##_128, T, 128, 4, 2, STEP, false, true)        \
  PREFILL(name##_256, T, 256, 4, 1, 32, 3, false, true)       \
  NO_PREFILL(name##_192_128)                                  \
  NO_PREFILL(name##_64_rounded)                               \
  NO_PREFILL(name##_128_rounded)                              \
  PREFILL(name##_64_precise, T, 64, 8, 1, 64, 4, true)        \
  PREFILL(name##_80_precise, T, 80, 8, 1, 32, 4, true)        \
  PREFILL(name##_96_precise, T, 96, 8, 1, 32, 4, true)        \
  PREFILL(name##_128_precise, T, 128, 8, 1, 32, 4, true)      \
  PREFILL(name##_256_precise, T, 256, 4, 1, 32, 2, true)
#endif

HEAD_DIMS(prefill_f16, AsF16)
HEAD_DIMS(prefill_bf16, AsBF16)
