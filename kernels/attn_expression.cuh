// Parameters and functions of a user's printed expressions (internal/variant).
#pragma once
#include "attn_variant.cuh"

constexpr int WRITTEN_TENSORS = 4;
constexpr int WRITTEN_SIZES = 16;
constexpr int WRITTEN_NUMBERS = 192;

// The parameters of the expressions, and the LeanTiles that are not left out. They lie behind ScoreParams.
struct WrittenParams {
  const void* tensors[WRITTEN_TENSORS];
  const int* lists;  // of each sequence the number of its first block of rows in `starts`, or -1: all its LeanTiles are scheduled; null: those of all are
  const int* starts; // of each block of rows where its list begins in `tiles`; behind the last one the end
  const int* tiles;  // LeanTiles of a sequence's keys, in ascending order
  int sizes[WRITTEN_SIZES]; // of four axes of each of WRITTEN_TENSORS
  u32 numbers[WRITTEN_NUMBERS]; // floats and ints
};
__device__ __forceinline__ const WrittenParams& writtenOf(const Params& p) { return *(const WrittenParams*)(&scoreOf(p) + 1); }

// Functions of the expressions, as internal/variant has them: ints wrap around, quotients of ints are rounded down, and the
// least and the largest of NaN and a number are NaN.
__device__ __forceinline__ int divided(int x, int y) { return x / y - (x % y < 0); }
__device__ __forceinline__ int remaining(int x, int y) {
  const int r = x % y;
  return r < 0 ? r + y : r;
}
__device__ __forceinline__ int sum(int x, int y) { return (int)((u32)x + (u32)y); }
__device__ __forceinline__ int difference(int x, int y) { return (int)((u32)x - (u32)y); }
__device__ __forceinline__ int product(int x, int y) { return (int)((u32)x * (u32)y); }
__device__ __forceinline__ int absolute(int x) { return x < 0 ? difference(0, x) : x; }
__device__ __forceinline__ int least(int x, int y) { return min(x, y); }
__device__ __forceinline__ int largest(int x, int y) { return max(x, y); }
__device__ __forceinline__ float sum(float x, float y) { return x + y; }
__device__ __forceinline__ float difference(float x, float y) { return x - y; }
__device__ __forceinline__ float product(float x, float y) { return x * y; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ float least(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float largest(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
// e^x: x times log2(e) as a sum of two floats. Beyond +-200 nothing changes.
__device__ __forceinline__ float exponential(float x) {
  x = least(largest(x, -200.f), 200.f);
  const float y = x * 1.4426950408889634f, rest = __fmaf_rn(x, 1.9259629911266175e-8f, __fmaf_rn(x, 1.4426950408889634f, -y));
  return exp2_(y) * __fmaf_rn(rest, LN2, 1.f);
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }
// log(1 + e^x). The quotient restores the bits of t that 1 + t loses.
__device__ __forceinline__ float softplus(float x) {
  const float t = exponential(-fabsf(x)), y = 1.f + t;
  return largest(x, 0.f) + (y == 1.f ? t : logf(y) * __fdividef(t, y - 1.f));
}
template <class T> __device__ __forceinline__ T elementOf(const void* p, int i) { return ((const T*)p)[i]; }
