// New keys and values on their way into pages of 8 bits with scales, with the bits that the CPU engine stores: divisions
// are IEEE divisions, and rounding is to even. A rotary embedding turns queries and keys before.
#pragma once
#include "attn_narrow.cuh"
#include "attn_rotary.cuh"

struct NarrowAppendParams {
  RotaryAppendParams rotary; // pairs 0: no embedding, and no queries
  float *keyScales, *valueScales;
  int scales; // SCALES_BY_HEAD and its like
  int pageTokens;
};

// The largest number of a type, and the largest element that a page can store over that of the page's first token.
__device__ __forceinline__ float mostOf(int type) { return type == Float8::type ? 448.f : 127.f; }
__device__ __forceinline__ float headroomOf(int type) { return type == Float8::type ? 16.f : 4.f; }

// The scale that makes the largest magnitude the largest number.
__device__ __forceinline__ float scaleTo(float largest, float most) {
  if (largest != largest) return __int_as_float(0x7fc00000);
  return fmaxf(__fdiv_rn(fminf(largest, __int_as_float(0x7f7fffff)), most), 0x1p-126f);
}

// The nearest number of a type, ties to even; beyond the largest number that number.
__device__ __forceinline__ u32 narrowed(int type, float x) {
  const u32 bits = __float_as_uint(x), b = bits & 0x7fffffff;
  if (type == Float8::type) {
    const u32 sign = bits >> 24 & 0x80;
    if (b > 0x7f800000) return sign | 0x7f;
    if (b >= 0x43e00000) return sign | 0x7e;
    if (b >= 0x3c800000) return sign | (b + 0x7ffff + (b >> 20 & 1) - 0x3c000000) >> 20; // 2^-6, the least normal number
    return sign | (__float_as_uint(__fadd_rn(__uint_as_float(b), 0x1p14f)) - 0x46800000);
  }
  if (x >= 127.f) return 127;
  if (x <= -127.f) return 0x81;
  if (x != x) return 0x80;
  return __float_as_uint(__fadd_rn(x, 0x1.8p23f)) & 0xff;
}

// The largest magnitude of a warp's rows. NaN is the largest, or, with `numbers`, does not count.
__device__ __forceinline__ float magnitude(float4 x, bool numbers) {
  u32 most = 0;
  const float all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) most = max(most, numbers && all[i] != all[i] ? 0 : __float_as_uint(all[i]) & 0x7fffffff);
#pragma unroll
  for (int i = 16; i > 0; i /= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
  return __uint_as_float(most);
}

// A warp takes a head's row at a time, four elements a lane, or eight: PIECES times four.
__device__ __forceinline__ void appendNarrow(const NarrowAppendParams& n) {
  __shared__ float2 turned[2][ROTARY_PAIRS]; // of the row, and of the first token of its page
  const RotaryAppendParams& r = n.rotary;
  const AppendParams& p = r.append;
  const int row = blockIdx.x / r.each, first = blockIdx.x - row * r.each;
  const int slot = p.slots[row], in = max(slot, 0) % n.pageTokens, page = max(slot, 0) / (p.heads * n.pageTokens);
  // The row of the page's first token, if this launch stores it.
  const int begins = n.scales == SCALES_BY_PAGE && in <= row && slot >= 0 && p.slots[row - in] == slot - in ? row - in : -1;
  if (slot >= 0 && r.pairs > 0) {
    for (int i = threadIdx.x; i < r.pairs; i += blockDim.x) {
      turned[0][i] = turnedBy(r.turns[i], r.positions[row], r.factor);
      if (begins >= 0) turned[1][i] = turnedBy(r.turns[i], r.positions[begins], r.factor);
    }
  }
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  if (slot < 0) return;
  __syncthreads();
  constexpr int PIECES = 2;
  const int warps = blockDim.x / 32, e = threadIdx.x % 32 * 4;
  const auto isThere = [&](int piece) { return e + 128 * piece < p.dim; };
  for (int i = first * warps + threadIdx.x / 32; i < r.queryHeads + 2 * p.heads; i += r.each * warps) {
    if (i < r.queryHeads) {
      const long long at = row * r.queryRow + i * r.queryHead;
#pragma unroll
      for (int k = 0; k < PIECES; k++)
        if (isThere(k)) turn4(r, turned[0], r.turned, at, r.queryType, r.query, at, r.queryType, e + 128 * k);
      continue;
    }
    const bool values = i >= r.queryHeads + p.heads;
    const int head = i - r.queryHeads - (values ? p.heads : 0);
    const auto load = [&](float4 (&x)[PIECES], int row, const float2* by) {
      const long long from = (long long)row * p.row + head * p.dim;
#pragma unroll
      for (int k = 0; k < PIECES; k++) {
        x[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (isThere(k)) x[k] = withStore(p.newType, [&](auto s) { return values ? decltype(s)::load4(p.newValues, from + e + 128 * k) : turned4<decltype(s)>(r, by, p.newKeys, from, e + 128 * k); });
      }
    };
    const auto largestOf = [](const float4 (&x)[PIECES], bool numbers) { return __uint_as_float(max(__float_as_uint(magnitude(x[0], numbers)), __float_as_uint(magnitude(x[1], numbers)))); };
    float4 x[PIECES];
    load(x, row, turned[0]);
    float* const to = (values ? n.valueScales : n.keyScales) + scaleIndex(n.scales, p.heads, n.pageTokens, page, head, in);
    float scale;
    if (n.scales == SCALES_BY_TOKEN) {
      scale = scaleTo(largestOf(x, false), mostOf(p.type));
    } else if (begins >= 0) {
      float4 first[PIECES];
      load(first, begins, turned[in > 0]);
      const float largest = largestOf(first, true);
      scale = largest == 0.f ? 1.f : scaleTo(largest, mostOf(p.type) / headroomOf(p.type));
    } else {
      scale = *to;
    }
    if (e == 0 && n.scales != SCALES_BY_HEAD && (n.scales == SCALES_BY_TOKEN || in == 0)) *to = scale;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      if (!isThere(piece)) continue;
      const float all[4] = {x[piece].x, x[piece].y, x[piece].z, x[piece].w};
      u32 word = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) word |= narrowed(p.type, __fdiv_rn(all[k], scale)) << 8 * k;
      *(u32*)((char*)(values ? p.values : p.keys) + (slot + (long long)head * p.headRows) * p.dim + e + 128 * piece) = word;
    }
  }
}
