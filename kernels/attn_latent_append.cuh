// New keys that hold the values, on their way into pages of E4M3 in groups of elements with a scale and a rest in bfloat16, with
// the bits that the CPU engine stores. A rotary embedding turns queries and keys before.
#pragma once
#include "attn_latent_any.cuh"
#include "attn_narrow_append.cuh"

struct LatentAppendParams {
  RotaryAppendParams rotary; // pairs 0: no embedding, and no queries
  void* rest;    // rows of elements behind the value
  float* scales; // of each group of LATENT_GROUP elements
  int value;     // elements of a value
};

// A warp takes a head's row at a time, four elements a lane.
__device__ __forceinline__ void appendLatent(const LatentAppendParams& n) {
  __shared__ float2 turned[ROTARY_PAIRS];
  const RotaryAppendParams& r = n.rotary;
  const AppendParams& p = r.append;
  const int row = blockIdx.x / r.each, first = blockIdx.x - row * r.each, slot = p.slots[row]; // -1: the key is stored elsewhere
  const bool token = slot >= 0 || r.pairs > 0 && r.positions[row] >= 0;
  if (token)
    for (int i = threadIdx.x; i < r.pairs; i += blockDim.x) turned[i] = turnedBy(r.turns[i], r.positions[row], r.factor);
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  if (!token) return;
  __syncthreads();
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (int i = first * warps + threadIdx.x / 32; i < r.queryHeads + (slot < 0 ? 0 : p.heads); i += r.each * warps) {
    const int head = i - r.queryHeads;
    const long long query = row * r.queryRow + i * r.queryHead, from = (long long)row * p.row + head * p.dim, to = slot + (long long)head * p.headRows;
#pragma unroll 1
    for (int begin = 0; begin < p.dim; begin += LATENT_GROUP) { // all lanes have a group
      const int e = begin + lane * 4;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      if (e < p.dim) x = withStore(head < 0 ? r.queryType : p.newType, [&](auto s) { return turned4<decltype(s)>(r, turned, head < 0 ? r.query : p.newKeys, head < 0 ? query : from, e); });
      if (head < 0) {
        if (e < p.dim) withStore(r.queryType, [&](auto s) { decltype(s)::store4(r.turned, query + e, x); });
        continue;
      }
      if (begin >= n.value) {
        if (e < p.dim) BFloat16::store4(n.rest, to * (p.dim - n.value) + e - n.value, x);
        continue;
      }
      const float scale = scaleTo(magnitude(x, false), mostOf(GroupedFloat8::type)), all[4] = {x.x, x.y, x.z, x.w};
      u32 word = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) word |= narrowed(GroupedFloat8::type, __fdiv_rn(all[k], scale)) << 8 * k;
      *(u32*)((char*)p.keys + to * n.value + e) = word;
      if (lane == 0) n.scales[(to * n.value + begin) / LATENT_GROUP] = scale;
    }
  }
}
