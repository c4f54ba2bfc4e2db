// Entry points of products with more than 128 rows for compute capability 9.0.
//
//   hopper_<element>_<layouts of a and b>   r: row-major; a: the transpose; gated: of a gated unit; swapped: the weights are a
//   hopper_round_<element>                  rounds float32 to operands
//   hopper_add                              adds the sums of slices
//
// Needed by: prompts and training: products of hundreds of rows in mixed precision.
#include "gemm_hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER(name, ...) \
  extern "C" __global__ void __launch_bounds__(HOPPER_THREADS, 1) name(const __grid_constant__ HopperParams p) { HopperGemm<__VA_ARGS__>::run(p); }
#define HOPPER_ROUND(name, S) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ HopperRoundParams p) { hopperRound<S>(p); }
#define HOPPER_ADD(name) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ HopperAddParams p) { hopperAdd(p); }
#else // other units have these products
#define HOPPER(name, ...) extern "C" __global__ void name(const __grid_constant__ HopperParams p) {}
#define HOPPER_ROUND(name, S) extern "C" __global__ void name(const __grid_constant__ HopperRoundParams p) {}
#define HOPPER_ADD(name) extern "C" __global__ void name(const __grid_constant__ HopperAddParams p) {}
#endif

HOPPER(hopper_bf16_rr, AsBF16, false, false)
HOPPER(hopper_bf16_ra, AsBF16, false, true)
HOPPER(hopper_bf16_aa, AsBF16, true, true)
HOPPER(hopper_f16_rr, AsF16, false, false)
HOPPER(hopper_bf16_gated, AsBF16, false, false, true)
HOPPER(hopper_f16_gated, AsF16, false, false, true)
HOPPER(hopper_bf16_swapped, AsBF16, false, false, false, true)
HOPPER(hopper_f16_swapped, AsF16, false, false, false, true)
HOPPER(hopper_bf16_gated_swapped, AsBF16, false, false, true, true)
HOPPER(hopper_f16_gated_swapped, AsF16, false, false, true, true)
HOPPER_ROUND(hopper_round_bf16, BFloat16)
HOPPER_ROUND(hopper_round_f16, Float16)
HOPPER_ADD(hopper_add)
