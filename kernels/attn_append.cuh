// The keys and values of a step's new tokens, on their way into the cache.
#pragma once
#include "copy.cuh"

struct AppendParams {
  const void *newKeys, *newValues; // rows of heads*dim elements
  void *keys, *values; // values: null if they are in keys
  const int* slots; // of each row, the row of keys of head 0 that it becomes; -1: none
  int headRows;     // rows of keys from a head to the next
  int heads, dim;   // dim is a multiple of 4
  int newType, type;
  int row; // elements from a row of new keys, or values, to the next
};

// Four elements on their way from one type to another.
__device__ __forceinline__ void append4(void* to, long long at, int type, const void* from, long long i, int newType) {
  const float4 x = withStore(newType, [&](auto s) { return decltype(s)::load4(from, i); });
  withStore(type, [&](auto s) { decltype(s)::store4(to, at, x); });
}

// One thread block a row of new tokens.
__device__ __forceinline__ void append(const AppendParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const int slot = p.slots[blockIdx.x];
  if (slot < 0) return;
  const int width = p.heads * p.dim;
  for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
    const long long from = (long long)blockIdx.x * p.row + i;
    const int head = i / p.dim;
    const long long to = (slot + (long long)head * p.headRows) * p.dim + i - head * p.dim;
    append4(p.keys, to, p.type, p.newKeys, from, p.newType);
    if (p.values != nullptr) append4(p.values, to, p.type, p.newValues, from, p.newType);
  }
}
