// Products of warp groups for latent attention, and the elements of keys.
#pragma once
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The descriptor of an operand that lies `bytes` behind another operand: one addition, where a new descriptor takes five instructions that
// wait for each other.
__device__ __forceinline__ u64 behind(u64 operand, int bytes) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"((u32)operand + bytes / 16), "r"((u32)(operand >> 32)));
  return d;
}
// d += a b: a is 64 x 16 in shared memory, with the rows of d, and b 16 x N, whose rows are summed over.
template <class Math> __device__ __forceinline__ void addColumns(float (&d)[16][4], u64 a, u64 b) {
  const int more = 1;
  if constexpr (same<typename Math::Operand, Float16>) {
    WGMMA_SHARED("128", "f16.f16", WGMMA_NAMES16, WGMMA_SUMS16, "64", "65", "66", "0, 1");
  } else {
    static_assert(same<typename Math::Operand, BFloat16>, "there is no such product");
    WGMMA_SHARED("128", "bf16.bf16", WGMMA_NAMES16, WGMMA_SUMS16, "64", "65", "66", "0, 1");
  }
}
template <class Math> __device__ __forceinline__ void addColumns(float (&d)[8][4], u64 a, u64 b) {
  const int more = 1;
  if constexpr (same<typename Math::Operand, Float16>) {
    WGMMA_SHARED("64", "f16.f16", WGMMA_NAMES8, WGMMA_SUMS8, "32", "33", "34", "0, 1");
  } else {
    static_assert(same<typename Math::Operand, BFloat16>, "there is no such product");
    WGMMA_SHARED("64", "bf16.bf16", WGMMA_NAMES8, WGMMA_SUMS8, "32", "33", "34", "0, 1");
  }
}

// d += a b: a is 64 x 16, in registers, and b N x 16, in shared memory.
#define ADD_ROWS(N, TILES, NAMES, SUMS, A0, A1, A2, A3, B) \
  template <class Math> __device__ __forceinline__ void addRows(float (&d)[TILES][4], const u32 (&a)[4], u64 b) { \
    if constexpr (same<typename Math::Operand, Float16>) { \
      ADD_ROWS_OF(N, "f16.f16", NAMES, SUMS, A0, A1, A2, A3, B); \
    } else { \
      static_assert(same<typename Math::Operand, BFloat16>, "there is no such product"); \
      ADD_ROWS_OF(N, "bf16.bf16", NAMES, SUMS, A0, A1, A2, A3, B); \
    } \
  }
#define ADD_ROWS_OF(N, TYPES, NAMES, SUMS, A0, A1, A2, A3, B) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPES " {" NAMES "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", 1, 1, 1, 0;" : SUMS(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
ADD_ROWS("16", 2, WGMMA_NAMES2, WGMMA_SUMS2, "8", "9", "10", "11", "12")
ADD_ROWS("32", 4, WGMMA_NAMES4, WGMMA_SUMS4, "16", "17", "18", "19", "20")
ADD_ROWS("64", 8, WGMMA_NAMES8, WGMMA_SUMS8, "32", "33", "34", "35", "36")
// What products read is in use up to here.
__device__ __forceinline__ void held(const u32 (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) asm volatile("" ::"r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]) : "memory");
}
// Two numbers of E4M3 as float16.
__device__ __forceinline__ u32 halvesOf(u32 two) {
  u32 r;
  asm("{.reg .b16 x; cvt.u16.u32 x, %1; cvt.rn.f16x2.e4m3x2 %0, x;}" : "=r"(r) : "r"(two));
  return r;
}
#endif
