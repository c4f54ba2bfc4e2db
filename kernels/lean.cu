// Entry points of attention on a GPU: lean_<element>_<head dim>. One for each
// pair, since registers and shared memory are laid out for it; and on compute capability 9.0
// with _many for output tiles of more than eight rows, and with _paged for pages of a power of
// two of tokens: in one kernel with others what these do would make short launches of others
// up to 4% slower.
//
// Needed by: every decode.
#include "attn_append.cuh"
#include "attn_lean.cuh"

// Eight warps, four consumers and four producers, leave each lane the most
// registers. More are there where warps can pass registers on.
#define ATTENTION(name, T, ...) \
  extern "C" __global__ void __launch_bounds__((CONSUMER_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS) * 32, 1) name(const __grid_constant__ LaunchParams p) { \
    extern __shared__ __align__(1024) char memory[];                                              \
    Lean<T, __VA_ARGS__>::run(p.p, p.meet, p.prefetched, &p.keyMap, memory);                                                      \
  }

#define HEAD_DIMS(name, T)     \
  ATTENTION(name##_64, T, 64)   \
  ATTENTION(name##_80, T, 80)   \
  ATTENTION(name##_96, T, 96)   \
  ATTENTION(name##_128, T, 128) \
  ATTENTION(name##_256, T, 256)

HEAD_DIMS(lean_f16, AsF16)
HEAD_DIMS(lean_bf16, AsBF16)
HEAD_DIMS(lean_f32, AsF32)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
ATTENTION(lean_f16_128_many, AsF16, 128, true)
ATTENTION(lean_bf16_128_many, AsBF16, 128, true)
ATTENTION(lean_f16_64_paged, AsF16, 64, false, true)
ATTENTION(lean_bf16_64_paged, AsBF16, 64, false, true)
ATTENTION(lean_f16_128_paged, AsF16, 128, false, true)
ATTENTION(lean_bf16_128_paged, AsBF16, 128, false, true)
#else // there the others take them
extern "C" __global__ void lean_f16_128_many(const __grid_constant__ LaunchParams p) {}
extern "C" __global__ void lean_bf16_128_many(const __grid_constant__ LaunchParams p) {}
extern "C" __global__ void lean_f16_64_paged(const __grid_constant__ LaunchParams p) {}
extern "C" __global__ void lean_bf16_64_paged(const __grid_constant__ LaunchParams p) {}
extern "C" __global__ void lean_f16_128_paged(const __grid_constant__ LaunchParams p) {}
extern "C" __global__ void lean_bf16_128_paged(const __grid_constant__ LaunchParams p) {}
#endif

extern "C" __global__ void __launch_bounds__(256) lean_append(const __grid_constant__ AppendParams p) { append(p); }
