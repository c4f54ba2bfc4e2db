// Linear layers by heads in one launch: each head has a matrix of its own, as in multi-head latent attention.
//
// A thread block has a head and up to ROWS rows of x, in shared memory. A warp computes EACH output features at a time. Its lanes divide
// the input features, four at a time, and add their sums in the end. x stays float32: tensor cores would need x in two parts, and these
// layers take longer to read than to compute.
#pragma once
#include "copy.cuh"

constexpr int HEADS_THREADS = 128, HEADS_ROWS = 8, HEADS_EACH = 4;

// Row r of head h begins at element xRow*r + xHead*h of x. The row has `in` elements, and `rest` elements that are copied to y behind the
// head's outputs. A row of y begins at yRow*r + yHead*h.
struct HeadLinearParams {
  const float* x;
  const void* w; // (heads*out, in)
  float* y;
  int rows, heads, in, out, rest; // in is a multiple of 4
  int xRow, xHead, yRow, yHead;
  int sharers; // thread blocks that share a head's output features
};

// A lane keeps N of its 2 N sums, the first of which has number `mine`. A partner gets the other N, and gives its own N sums of the same
// numbers, which the lane adds.
template <int N> __device__ __forceinline__ void halve(float (&sums)[HEADS_ROWS * HEADS_EACH], int& mine, int lane) {
  const bool high = lane & N;
  mine += high ? N : 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float give = high ? sums[i] : sums[i + N], keep = high ? sums[i + N] : sums[i];
    sums[i] = keep + __shfl_xor_sync(~0u, give, N);
  }
}

template <class Store> __device__ __forceinline__ void headLinear(const HeadLinearParams& p) {
  constexpr int ROWS = HEADS_ROWS, EACH = HEADS_EACH, WARPS = HEADS_THREADS / 32, STEP = 128, TILE = HEADS_THREADS * 4; // input features: of a warp's step, and in shared memory
  __shared__ __align__(16) float x[ROWS][TILE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = (p.rows + ROWS - 1) / ROWS, item = blockIdx.x / blocks, row = (blockIdx.x - item * blocks) * ROWS; // consecutive thread blocks have the same weights
  const int head = item / p.sharers, share = item - head * p.sharers, rows = min(ROWS, p.rows - row);
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const float* const from = p.x + (long long)row * p.xRow + head * p.xHead;
  float* const to = p.y + (long long)row * p.yRow + head * p.yHead;
  const bool wide = (((u64)from | (u64)p.xRow * 4) & 15) == 0;
  const auto bring = [&](int begin) { // a tile of x: all of a thread's loads are on their way together
    const int k = begin + threadIdx.x * 4;
    float4 v[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float* const at = from + (long long)r * p.xRow + k;
      v[r] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (r < rows && k < p.in) v[r] = wide ? *(const float4*)at : make_float4(at[0], at[1], at[2], at[3]);
    }
    __syncthreads(); // the last tile
#pragma unroll
    for (int r = 0; r < ROWS; r++) *(float4*)&x[r][threadIdx.x * 4] = v[r];
    __syncthreads();
  };
  const auto weights = [&](float4 (&w)[EACH], int first, int k) {
#pragma unroll
    for (int f = 0; f < EACH; f++) {
      w[f] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (k < p.in && first + f < p.out) w[f] = Store::load4(p.w, ((long long)head * p.out + first + f) * p.in + k);
    }
  };
  float4 w[EACH];
  weights(w, (share * WARPS + warp) * EACH, lane * 4);
  if (p.in <= TILE) bring(0);
#pragma unroll 1
  for (int at = share * WARPS; at * EACH < p.out; at += p.sharers * WARPS) {
    const int first = (at + warp) * EACH;
    float sums[ROWS * EACH];
#pragma unroll
    for (int i = 0; i < ROWS * EACH; i++) sums[i] = 0.f;
#pragma unroll 1
    for (int begin = 0; begin < p.in; begin += TILE) {
      if (p.in > TILE) bring(begin);
      const int end = min(begin + TILE, p.in);
#pragma unroll 1
      for (int k = begin; k < end; k += STEP) {
        float4 next[EACH];
        const bool more = k + STEP < p.in; // else the next features' weights
        weights(next, more ? first : first + p.sharers * WARPS * EACH, (more ? k + STEP : 0) + lane * 4);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const float4 v = *(const float4*)&x[r][k - begin + lane * 4];
#pragma unroll
          for (int f = 0; f < EACH; f++) {
            float& s = sums[r * EACH + f];
            s = fmaf(v.x, w[f].x, s), s = fmaf(v.y, w[f].y, s), s = fmaf(v.z, w[f].z, s), s = fmaf(v.w, w[f].w, s);
          }
        }
#pragma unroll
        for (int f = 0; f < EACH; f++) w[f] = next[f];
      }
    }
    int mine = 0;
    halve<16>(sums, mine, lane), halve<8>(sums, mine, lane), halve<4>(sums, mine, lane), halve<2>(sums, mine, lane), halve<1>(sums, mine, lane);
    static_assert(ROWS * EACH == 32, "a sum remains");
    const int r = mine / EACH, f = first + mine % EACH;
    if (r < rows && f < p.out) to[(long long)r * p.yRow + f] = sums[0];
  }
  if (share > 0) return;
  for (int i = threadIdx.x; i < rows * p.rest; i += HEADS_THREADS) {
    const int n = i / p.rest, c = i - n * p.rest;
    to[(long long)n * p.yRow + p.out + c] = from[(long long)n * p.xRow + p.in + c];
  }
}

#define HEAD_LINEAR(name, Store) \
  extern "C" __global__ void __launch_bounds__(HEADS_THREADS, 4) name(const __grid_constant__ HeadLinearParams p) { headLinear<Store>(p); }
