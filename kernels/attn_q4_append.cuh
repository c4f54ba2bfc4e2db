// New keys and values on their way into pages of 4 bits, with the bits that the CPU engine stores (half.EncodeQ4). Keys are mixed before
// (half.MixQ4). A rotary embedding turns queries and keys before.
#pragma once
#include "attn_q4.cuh"
#include "attn_rotary.cuh"

// The index of the integer nearest to y; of two the smaller index. Integers are sums of two neighbours, which 2y is compared with.
__device__ __forceinline__ u32 indexOf(float y) {
  constexpr int BETWEEN[15] = {-229, -184, -148, -117, -88, -62, -37, -12, 13, 39, 65, 93, 124, 158, 199};
  const float twice = 2 * fminf(fmaxf(y, -127.f), 127.f);
  u32 n = 0;
#pragma unroll
  for (int i = 0; i < 15; i++) n += twice > (float)BETWEEN[i];
  return n;
}

// A warp takes a head's row at a time. Four lanes have 32 numbers: numbers 4t to 4t+3, and these plus 16.
__device__ __forceinline__ void appendFour(const RotaryAppendParams& r) {
  __shared__ float2 turned[ROTARY_PAIRS];
  const AppendParams& p = r.append;
  const int row = blockIdx.x / r.each, first = blockIdx.x - row * r.each;
  const int slot = p.slots[row];
  if (slot >= 0) {
    for (int i = threadIdx.x; i < r.pairs; i += blockDim.x) turned[i] = turnedBy(r.turns[i], r.positions[row], r.factor);
  }
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  if (slot < 0) return;
  __syncthreads();
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32, t = lane % 4, e = lane / 4 * FourBits::columns + 4 * t;
  const bool there = e < p.dim;
  for (int i = first * warps + threadIdx.x / 32; i < r.queryHeads + 2 * p.heads; i += r.each * warps) {
    if (i < r.queryHeads) {
      const long long at = row * r.queryRow + i * r.queryHead;
      if (there) turn4(r, turned, r.turned, at, r.queryType, r.query, at, r.queryType, e), turn4(r, turned, r.turned, at, r.queryType, r.query, at, r.queryType, e + 16);
      continue;
    }
    const bool values = i >= r.queryHeads + p.heads;
    const int head = i - r.queryHeads - (values ? p.heads : 0);
    float x[8] = {};
    if (there) {
      const long long from = (long long)row * p.row + head * p.dim;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4 y = withStore(p.newType, [&](auto s) { return values ? decltype(s)::load4(p.newValues, from + e + 16 * h) : turned4<decltype(s)>(r, turned, p.newKeys, from, e + 16 * h); });
        x[4 * h] = y.x, x[4 * h + 1] = y.y, x[4 * h + 2] = y.z, x[4 * h + 3] = y.w;
      }
    }
    bool nan = false;
#pragma unroll
    for (int k = 0; k < 8; k++) nan |= x[k] != x[k];
    if (!values) {
#pragma unroll
      for (int k = 0; k < 8; k++) x[k] = fminf(fmaxf(x[k], -0x1p122f), 0x1p122f); // sums are finite
      mix(x, lane);
    }
    float least = x[0], most = x[0];
#pragma unroll
    for (int k = 1; k < 8; k++) least = fminf(least, x[k]), most = fmaxf(most, x[k]);
#pragma unroll
    for (int h = 1; h < 4; h *= 2) least = fminf(least, __shfl_xor_sync(~0u, least, h)), most = fmaxf(most, __shfl_xor_sync(~0u, most, h)), nan |= __shfl_xor_sync(~0u, (int)nan, h) != 0;
    constexpr float LARGEST = 0x1p127f, LEAST = 0x1p-126f;
    least = fmaxf(least, -LARGEST), most = fminf(most, LARGEST);
    float scale = __fdiv_rn(-least >= most ? least : most, -127.f);
    if (scale < LEAST && scale > -LEAST) scale = copysignf(LEAST, scale);
    const u32 bits = __float_as_uint(scale), shorter = nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    scale = __uint_as_float(shorter << 16);
    u32 word = 0x88888888;
    if (!nan) {
      word = 0;
#pragma unroll
      for (int k = 0; k < 8; k++) word |= indexOf(__fdiv_rn(fminf(fmaxf(x[k], -LARGEST), LARGEST), scale)) << (k % 4 * 8 + k / 4 * 4);
    }
    if (!there) continue;
    u16* const to = (u16*)((char*)(values ? p.values : p.keys) + (slot + (long long)head * p.headRows) * (p.dim / FourBits::columns * FourBits::element) + lane / 4 * FourBits::element);
    to[2 * t] = (u16)word, to[2 * t + 1] = (u16)(word >> 16);
    if (t == 0) to[FourBits::indices / 2] = (u16)shorter;
  }
}
