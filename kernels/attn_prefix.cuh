// Keys that several sequences share are attended to once, by the rows of all of them: a prefix.
// Attention to prefixes and to what sequences have of their own leaves states, normalised and in
// float32. Here rows come together before, and states merge behind it.
#pragma once
#include "attn_state.cuh"
#include "copy.cuh"

constexpr int PREFIX_THREADS = 256;

struct PrefixGatherParams {
  const void* query;
  void* to;        // rows one behind the other, head by head
  const int* rows; // how many, and of each the row of queries
  long long queryRow, queryHead; // bytes, multiples of 8
  int heads, width;              // width: bytes of a head, a multiple of 8
};

// The rows of queries that attend to prefixes. A block has one row after another.
__device__ __forceinline__ void prefixGather(const PrefixGatherParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const int rows = *p.rows, pieces = p.width / 8, all = p.heads * pieces;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const char* from = (const char*)p.query + p.rows[1 + row] * p.queryRow;
    uint2* to = (uint2*)p.to + (long long)row * all;
    for (int i = threadIdx.x; i < all; i += PREFIX_THREADS) {
      const int head = i / pieces;
      to[i] = *(const uint2*)(from + head * p.queryHead + (i - head * pieces) * 8);
    }
  }
}

// f over the values of all lanes of a warp, for all of them.
template <class F> __device__ __forceinline__ float foldWarp(float v, F f) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v = f(v, __shfl_xor_sync(~0u, v, i));
  return v;
}

struct PrefixMergeParams {
  const float *own, *ownLse;       // of each row of queries
  const float *prefix, *prefixLse; // of each gathered row
  const int *starts, *slots;       // of each row of queries: where its gathered rows begin in slots, and the last one's end
  void* out;
  float* lse; // or null
  long long outRow, outHead, lseRow, lseHead;
  int rows, heads, dim, outType;
  const float* slopes; // of ALiBi, of each head, to base 4; null: none
  const int* shifts;   // with slopes, of each gathered row: its LSE is more by its slope times this
};

// out and lse of the states (O_i, LSE_i) of a row and head:
//
//	LSE = ln sum e^LSE_i,   O = sum e^(LSE_i - LSE) O_i
//
// in the order of the prefixes, own keys last. A state of no key has LSE_i = -Inf and no weight. Where states are is known
// before attention has ended: it is in the plan, and what has brought that there has ended before the launch ahead lets this
// one start.
__device__ __forceinline__ void prefixMerge(const PrefixMergeParams& p) {
  constexpr float LOG2E = 1.4426950408889634f, LN4 = 1.3862943611198906f;
  const int warps = gridDim.x * (PREFIX_THREADS / 32), lane = threadIdx.x % 32;
  const long long all = (long long)p.rows * p.heads;
  int row = 0, head = 0, begin = 0, count = 0, mine = 0; // mine: the lane's of the first 32 slots
  const auto find = [&](long long at) {
    if (at >= all) return;
    row = (int)(at / p.heads), head = (int)(at - (long long)row * p.heads);
    begin = p.starts[row], count = p.starts[row + 1] - begin; // own keys are number count
    mine = lane < count ? p.slots[begin + lane] : 0;
  };
  long long at = blockIdx.x * (PREFIX_THREADS / 32) + threadIdx.x / 32;
  find(at);
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  for (; at < all; find(at += warps)) {
    // A lane has one of 32 states at a time: where it is, and its log-sum-exp.
    long long slot = 0;
    float lse = 0.f;
    const auto open = [&](int first) {
      const int i = first + lane, number = first == 0 ? mine : i < count ? p.slots[begin + i] : 0;
      slot = i < count ? (long long)number * p.heads + head : at;
      lse = i < count ? p.prefixLse[slot] : i == count ? p.ownLse[at] : -LEAN_INF;
      if (p.slopes != nullptr && i < count) lse = __fmaf_rn(p.slopes[head] * LN4, (float)p.shifts[number], lse);
    };
    float top = -LEAN_INF, sum = 0.f;
    for (int first = 0; first <= count; first += 32) open(first), top = fmaxf(top, lse);
    top = foldWarp(top, [](float x, float y) { return fmaxf(x, y); });
    const float base = top == -LEAN_INF ? 0.f : top;
    const auto weight = [&] { return exp2_((lse - base) * LOG2E); };
    for (int first = 0; first <= count; first += 32) {
      if (count >= 32) open(first);
      sum += weight();
    }
    sum = foldWarp(sum, [](float x, float y) { return x + y; });
    const float f = sum == 0.f ? 0.f : 1.f / sum;
    for (int c = lane * 4; c - lane * 4 < p.dim; c += 128) { // all lanes: each has the weight of a state
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int first = 0; first <= count; first += 32) {
        if (count >= 32) open(first);
        const float w = weight() * f;
#pragma unroll 4
        for (int i = 0; i < min(32, count + 1 - first); i++) {
          const float wi = __shfl_sync(~0u, w, i);
          const long long si = __shfl_sync(~0u, slot, i);
          if (c >= p.dim) continue;
          const float4 x = *(const float4*)((first + i < count ? p.prefix : p.own) + si * p.dim + c);
          o = make_float4(__fmaf_rn(wi, x.x, o.x), __fmaf_rn(wi, x.y, o.y), __fmaf_rn(wi, x.z, o.z), __fmaf_rn(wi, x.w, o.w));
        }
      }
      if (c < p.dim) withStore(p.outType, [&](auto s) { decltype(s)::store4(p.out, row * p.outRow + head * p.outHead + c, o); });
    }
    if (p.lse != nullptr && lane == 0) p.lse[row * p.lseRow + head * p.lseHead] = sum == 0.f ? -LEAN_INF : finite(__fmaf_rn(log2_(sum), LN2, base));
  }
}
