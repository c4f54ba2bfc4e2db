// The keys and values of a step's new tokens, on their way into the cache.
#pragma once
#include "copy.cuh"

struct AppendParams {
  const void *newKeys, *newValues; // row i: heads*dim elements
  void *keys, *values;
  const int* slots; // of each row, the row of keys of head 0 that it becomes; -1: none
  int headRows;     // rows of keys from a head to the next
  int heads, dim;   // dim is a multiple of 4
  int newType, type;
};

__device__ __forceinline__ void load4(const void* p, long long i, int type, float (&x)[4]) {
  if (type == F32) {
    float4 v = *(const float4*)((const float*)p + i);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else {
    uint2 v = *(const uint2*)((const u16*)p + i);
    x[0] = type == F16 ? Float16::low(v.x) : BFloat16::low(v.x), x[1] = type == F16 ? Float16::high(v.x) : BFloat16::high(v.x);
    x[2] = type == F16 ? Float16::low(v.y) : BFloat16::low(v.y), x[3] = type == F16 ? Float16::high(v.y) : BFloat16::high(v.y);
  }
}

__device__ __forceinline__ void store4(void* p, long long i, int type, const float (&x)[4]) {
  if (type == F32) {
    *(float4*)((float*)p + i) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    *(uint2*)((u16*)p + i) = type == F16 ? make_uint2(Float16::pack(x[0], x[1]), Float16::pack(x[2], x[3]))
                                         : make_uint2(BFloat16::pack(x[0], x[1]), BFloat16::pack(x[2], x[3]));
  }
}

// One thread block a row of new tokens.
__device__ __forceinline__ void append(const AppendParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const int slot = p.slots[blockIdx.x];
  if (slot < 0) return;
  const int width = p.heads * p.dim;
  for (int i = threadIdx.x * 4; i < width; i += blockDim.x * 4) {
    const long long from = (long long)blockIdx.x * width + i;
    const int head = i / p.dim;
    const long long to = (slot + (long long)head * p.headRows) * p.dim + i - head * p.dim;
    float x[4];
    load4(p.newKeys, from, p.newType, x);
    store4(p.keys, to, p.type, x);
    load4(p.newValues, from, p.newType, x);
    store4(p.values, to, p.type, x);
  }
}
