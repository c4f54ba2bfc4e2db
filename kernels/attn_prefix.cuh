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

struct PrefixMergeParams {
  const float *own, *ownLse;       // of each row of queries
  const float *prefix, *prefixLse; // of each gathered row
  const int *starts, *slots;       // of each row of queries: where its gathered rows begin in slots, and the last one's end
  void* out;
  float* lse; // or null
  long long outRow, outHead, lseRow, lseHead;
  int rows, heads, dim, outType;
};

// out and lse of the states (O_i, LSE_i) of a row and head:
//
//	LSE = ln sum e^LSE_i,   O = sum e^(LSE_i - LSE) O_i
//
// in the order of the prefixes, own keys last. A state of no key has LSE_i = -Inf and no weight.
__device__ __forceinline__ void prefixMerge(const PrefixMergeParams& p) {
  constexpr float LOG2E = 1.4426950408889634f;
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const int warps = gridDim.x * (PREFIX_THREADS / 32), lane = threadIdx.x % 32;
  for (long long at = blockIdx.x * (PREFIX_THREADS / 32) + threadIdx.x / 32; at < (long long)p.rows * p.heads; at += warps) {
    const int row = (int)(at / p.heads), head = (int)(at - (long long)row * p.heads);
    const int begin = p.starts[row], end = p.starts[row + 1];
    const auto slotOf = [&](int i) { return (long long)p.slots[i] * p.heads + head; };
    float top = p.ownLse[at];
    for (int i = begin; i < end; i++) top = fmaxf(top, p.prefixLse[slotOf(i)]);
    const float base = top == -LEAN_INF ? 0.f : top;
    const auto weightOf = [&](float lse) { return exp2_((lse - base) * LOG2E); };
    float sum = weightOf(p.ownLse[at]);
    for (int i = begin; i < end; i++) sum += weightOf(p.prefixLse[slotOf(i)]);
    const float f = sum == 0.f ? 0.f : 1.f / sum;
    for (int c = lane * 4; c < p.dim; c += 128) {
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
      const auto add = [&](const float* states, const float* lses, long long slot) {
        const float w = weightOf(lses[slot]) * f;
        const float4 x = *(const float4*)(states + slot * p.dim + c);
        o = make_float4(__fmaf_rn(w, x.x, o.x), __fmaf_rn(w, x.y, o.y), __fmaf_rn(w, x.z, o.z), __fmaf_rn(w, x.w, o.w));
      };
      for (int i = begin; i < end; i++) add(p.prefix, p.prefixLse, slotOf(i));
      add(p.own, p.ownLse, at);
      withStore(p.outType, [&](auto s) { decltype(s)::store4(p.out, row * p.outRow + head * p.outHead + c, o); });
    }
    if (p.lse != nullptr && lane == 0) p.lse[row * p.lseRow + head * p.lseHead] = sum == 0.f ? -LEAN_INF : finite(__fmaf_rn(log2_(sum), LN2, base));
  }
}
