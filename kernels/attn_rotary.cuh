// The queries, keys and values of a step's new tokens, of which a rotary embedding turns the first two: keys and values go
// into the cache, and queries to where attention reads them.
#pragma once
#include "attn_append.cuh"
#include "rotary.cuh"

struct RotaryAppendParams {
  AppendParams append;
  const void* query;
  void* turned; // takes queries, and lies as they do
  const long long* positions; // of each row
  long long queryRow, queryHead; // strides, in elements
  int queryHeads, queryType;
  int pairs, interleaved;
  float factor;
  int each; // so many thread blocks share a row
  int first; // the first element of a head that is turned
  u64 turns[ROTARY_PAIRS];
};

// Elements e to e+3 of a head whose elements begin with number `at`, turned.
template <class Store> __device__ __forceinline__ float4 turned4(const RotaryAppendParams& r, const float2* turned, const void* from, long long at, int e) {
  const float4 x = Store::load4(from, at + e);
  const int from0 = e - r.first; // among the elements that are turned
  if (from0 <= -4 || from0 >= 2 * r.pairs) return x;
  float v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = from0 + i;
    if (n < 0 || n >= 2 * r.pairs) continue;
    const bool second = r.interleaved ? n & 1 : n >= r.pairs;
    const float other = Store::load(from, at + e + i + (r.interleaved ? second ? -1 : 1 : second ? -r.pairs : r.pairs));
    const float2 t = turned[r.interleaved ? n / 2 : second ? n - r.pairs : n];
    v[i] = second ? v[i] * t.x + other * t.y : v[i] * t.x - other * t.y;
  }
  return make_float4(v[0], v[1], v[2], v[3]);
}

// The same, from one type to another.
__device__ __forceinline__ void turn4(const RotaryAppendParams& r, const float2* turned, void* to, long long toAt, int type, const void* from, long long at, int fromType, int e) {
  const float4 x = withStore(fromType, [&](auto s) { return turned4<decltype(s)>(r, turned, from, at, e); });
  withStore(type, [&](auto s) { decltype(s)::store4(to, toAt + e, x); });
}

// Some thread blocks a row of new tokens.
__device__ __forceinline__ void appendTurned(const RotaryAppendParams& r) {
  __shared__ float2 turned[ROTARY_PAIRS]; // cosines and sines
  const AppendParams& p = r.append;
  const int row = blockIdx.x / r.each, first = blockIdx.x - row * r.each;
  const int slot = p.slots[row]; // -1: the key is stored elsewhere; this and the position are there before the launch ahead has ended
  const long long position = r.positions[row]; // -1: a row without a token
  if (position >= 0) {
    for (int i = threadIdx.x; i < r.pairs; i += blockDim.x) turned[i] = turnedBy(r.turns[i], position, r.factor);
  }
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  if (position < 0) return;
  __syncthreads();
  const int quarter = p.dim / 4, keys = r.queryHeads * quarter, values = keys + p.heads * quarter;
  const int end = slot < 0 ? keys : p.values == nullptr ? values : values + p.heads * quarter;
  for (int i = first * blockDim.x + threadIdx.x; i < end; i += r.each * blockDim.x) {
    const int all = i / quarter, e = (i - all * quarter) * 4; // the head, of all of the row
    if (i < keys) {
      const long long at = row * r.queryRow + all * r.queryHead;
      turn4(r, turned, r.turned, at, r.queryType, r.query, at, r.queryType, e);
      continue;
    }
    const int head = all - r.queryHeads - (i < values ? 0 : p.heads);
    const long long from = (long long)row * p.row + head * p.dim, to = (slot + (long long)head * p.headRows) * p.dim;
    if (i < values) {
      turn4(r, turned, p.keys, to, p.type, p.newKeys, from, p.newType, e);
    } else {
      append4(p.values, to + e, p.type, p.newValues, from + e, p.newType);
    }
  }
}
