// Rotary embeddings: cosines and sines of how far pairs of elements are turned.
#pragma once
#include "types.cuh"

constexpr int ROTARY_PAIRS = 128; // that a rotary embedding has at most

// Cosine and sine of so many 2^32nd parts of a turn: those of an eighth of a turn at most, by their
// series, and as many quarters as there are besides.
__device__ __forceinline__ float2 cosSin(int part) {
  const u32 quarters = ((u32)part + (1u << 29)) >> 30;
  const float x = (float)(int)((u32)part - (quarters << 30)) * 1.46291808e-9f, z = x * x; // 2 pi/2^32
  const float s = x + x * z * (-1.f / 6 + z * (1.f / 120 + z * (-1.f / 5040 + z * (1.f / 362880))));
  const float c = 1.f + z * (-0.5f + z * (1.f / 24 + z * (-1.f / 720 + z * (1.f / 40320 - z * (1.f / 3628800)))));
  const float2 t = quarters & 1 ? make_float2(-s, c) : make_float2(c, s);
  return quarters & 2 ? make_float2(-t.x, -t.y) : t;
}

// What a pair is turned by at a position, of `turn` 2^64th parts of a turn at each. Whole turns are what overflows of the
// product, so a late position loses no digits.
__device__ __forceinline__ float2 turnedBy(u64 turn, long long position, float factor) {
  const float2 t = cosSin((int)((turn * (u64)position) >> 32));
  return make_float2(factor * t.x, factor * t.y);
}
