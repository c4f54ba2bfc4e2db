// Linear layers by heads, of few rows, in one launch: a head's rows of x have a matrix of their own, as in multi-head latent attention.
//
// A warp has EACH output features of a head and up to ROWS rows of x. Lanes share the input features, four at a time, and at last add up
// what they have. x is float32 and stays so: tensor cores would need it in parts, and these layers read more than they compute.
#pragma once
#include "copy.cuh"

constexpr int HEADS_THREADS = 128, HEADS_ROWS = 8, HEADS_EACH = 8;

// Elements of x: row r of head h begins at xRow*r + xHead*h, and has `in` elements, and `rest` behind them that are copied behind the
// head's outputs. The same of y.
struct HeadLinearParams {
  const float* x;
  const void* w; // (heads*out, in)
  float* y;
  int rows, heads, in, out, rest; // in is a multiple of 4
  int xRow, xHead, yRow, yHead;
  int blocks; // of output features
};

// A lane keeps N of its 2 N sums, gives the others to another lane, and adds what that has of those it keeps. mine: the number of the first.
template <int N> __device__ __forceinline__ void halve(float (&sums)[HEADS_ROWS * HEADS_EACH], int& mine, int lane) {
  const bool high = lane & (N / 2);
  mine += high ? N : 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float give = high ? sums[i] : sums[i + N], keep = high ? sums[i + N] : sums[i];
    sums[i] = keep + __shfl_xor_sync(~0u, give, N / 2);
  }
}

template <class Store> __device__ __forceinline__ void headLinear(const HeadLinearParams& p) {
  constexpr int ROWS = HEADS_ROWS, EACH = HEADS_EACH, WARPS = HEADS_THREADS / 32, STEP = 128, TILE = 512; // input features: of a warp's step, and in shared memory
  __shared__ __align__(16) float x[ROWS][TILE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = (p.rows + ROWS - 1) / ROWS, item = blockIdx.x / blocks, row = (blockIdx.x - item * blocks) * ROWS; // neighbours have the same weights
  const int head = item / p.blocks, block = item - head * p.blocks, first = (block * WARPS + warp) * EACH;
  const int rows = min(ROWS, p.rows - row);
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const float* const from = p.x + (long long)row * p.xRow + head * p.xHead;
  float* const to = p.y + (long long)row * p.yRow + head * p.yHead;
  float sums[ROWS * EACH];
#pragma unroll
  for (int i = 0; i < ROWS * EACH; i++) sums[i] = 0.f;
#pragma unroll 1
  for (int begin = 0; begin < p.in; begin += TILE) {
    const int width = min(TILE, p.in - begin);
    __syncthreads(); // the last tile
#pragma unroll 1
    for (int r = 0; r < ROWS; r++)
#pragma unroll 4
      for (int i = threadIdx.x; i < width; i += HEADS_THREADS) x[r][i] = r < rows ? from[(long long)r * p.xRow + begin + i] : 0.f;
    __syncthreads();
#pragma unroll 1
    for (int k = lane * 4; k < width; k += STEP) {
      float4 w[EACH];
#pragma unroll
      for (int f = 0; f < EACH; f++) {
        w[f] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (first + f < p.out) w[f] = Store::load4(p.w, ((long long)head * p.out + first + f) * p.in + begin + k);
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float4 v = *(const float4*)&x[r][k];
#pragma unroll
        for (int f = 0; f < EACH; f++) {
          float& s = sums[r * EACH + f];
          s = fmaf(v.x, w[f].x, s), s = fmaf(v.y, w[f].y, s), s = fmaf(v.z, w[f].z, s), s = fmaf(v.w, w[f].w, s);
        }
      }
    }
  }
  int mine = 0;
  halve<32>(sums, mine, lane), halve<16>(sums, mine, lane), halve<8>(sums, mine, lane), halve<4>(sums, mine, lane), halve<2>(sums, mine, lane);
  static_assert(ROWS * EACH == 64, "two sums remain");
  const int r = mine / EACH, f = first + mine % EACH;
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (r < rows && f + i < p.out) to[(long long)r * p.yRow + f + i] = sums[i];
  if (block > 0) return;
  for (int i = threadIdx.x; i < rows * p.rest; i += HEADS_THREADS) {
    const int n = i / p.rest, c = i - n * p.rest;
    to[(long long)n * p.yRow + p.out + c] = from[(long long)n * p.xRow + p.in + c];
  }
}

#define HEAD_LINEAR(name, Store) \
  extern "C" __global__ void __launch_bounds__(HEADS_THREADS, 3) name(const __grid_constant__ HeadLinearParams p) { headLinear<Store>(p); }
