// Which of some tokens is the most likely one, by their logits.
#pragma once
#include "types.cuh"

// The order of floats as that of unsigned integers, the zeros alike. NaN is the
// greatest, so that whoever looks for the greatest logit finds it.
__device__ __forceinline__ u32 keyOf(float x) {
  const u32 b = __float_as_uint(x + 0.f); // -0 becomes 0
  return x != x ? ~0u : b ^ ((u32)((int)b >> 31) | 0x80000000u);
}
__device__ __forceinline__ float logitOf(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
constexpr u32 NOTHING = 0x007fffffu;  // the key of -Inf
constexpr u32 INFINITE = 0xff800000u; // the key of +Inf

// Of all lanes of a warp. Shuffles, not redux: the assembler of CUDA 12.4 takes a
// wrong register where the results of two redux meet in one number.
template <class F> __device__ __forceinline__ u64 warpFold(u64 x, F f) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

// A token among others: the greatest number is the most likely one, and of equals the one
// with the lowest id.
__device__ __forceinline__ u64 tokenOf(u32 key, u32 id) { return (u64)key << 32 | (u32)~id; }
// The best of a warp.
__device__ __forceinline__ u64 warpBest(u64 token) {
  return warpFold(token, [](u64 a, u64 b) { return a > b ? a : b; });
}
__device__ __forceinline__ u64 warpBest(u32 key, u32 id) { return warpBest(tokenOf(key, id)); }

// The id of a best token, -1 if it has no logit that others can be compared with.
__device__ __forceinline__ int idOf(u64 best) {
  const u32 key = (u32)(best >> 32);
  return key > NOTHING && key < INFINITE ? (int)~(u32)best : -1;
}
