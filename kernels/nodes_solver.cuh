// A step of a solver for many weights in one launch: the launch is queued whole or not at all.
//
// All operations are rounded one by one, so the bits are those of the same operations in host memory.
#pragma once
#include "gemm_training.cuh"

constexpr int SOLVER_PIECE = 8192; // elements of a weight, of a thread block

struct SolverWeight {
  float* w;
  const float* g;
  float* a;          // sum of earlier gradients, to which g is added; null without them
  float *m, *v;      // moments; null without them
  long long n;
  long long first;   // piece among those of all weights
};

struct SolverParams {
  const SolverWeight* weights;
  double* sums; // of each piece, and behind them their sum
  int count;    // of weights
  int moments;  // 0: there are none
  int fresh;    // of solverAdd: 1 if a has arbitrary content
  float scale;  // of g
  float beta1, rest1, beta2, rest2; // rest1 is 1 - beta1
  float correct1, correct2;         // factors of the moments
  float epsilon, rate, decay;
  int pieces;
};

// Elements that a thread reads and writes together.
struct SolverOne {
  static constexpr int N = 1;
  float v[1];
  __device__ __forceinline__ void load(const float* from) { v[0] = *from; }
  __device__ __forceinline__ void store(float* to) const { *to = v[0]; }
};

struct SolverFour {
  static constexpr int N = 4;
  alignas(16) float v[4];
  __device__ __forceinline__ void load(const float* from) { *(float4*)v = *(const float4*)from; }
  __device__ __forceinline__ void store(float* to) const { *(float4*)to = *(const float4*)v; }
};

// Calls f for a thread's elements of the block's piece, four at a time where FOURS and all memory begins at a multiple of 16 bytes.
template <bool FOURS, class F> __device__ __forceinline__ void solverEach(const SolverParams& p, F f) {
  int low = 0, high = p.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.weights[middle].first <= blockIdx.x) low = middle;
    else high = middle;
  }
  const SolverWeight x = p.weights[low];
  const long long from = (blockIdx.x - x.first) * SOLVER_PIECE, end = x.n < from + SOLVER_PIECE ? x.n : from + SOLVER_PIECE;
  if constexpr (FOURS) if (end - from == SOLVER_PIECE && ((u64)x.w | (u64)x.g | (u64)x.a | (u64)x.m | (u64)x.v) % 16 == 0) {
#pragma unroll 2
    for (int i = threadIdx.x * 4; i < SOLVER_PIECE; i += TRAINING_THREADS * 4) f(x, from + i, SolverFour());
    return;
  }
#pragma unroll 8
  for (long long i = from + threadIdx.x; i < end; i += TRAINING_THREADS) f(x, i, SolverOne());
}

// An element of a gradient.
__device__ __forceinline__ float solverGradient(const SolverWeight& x, long long i) {
  return x.a ? __fadd_rn(x.a[i], x.g[i]) : x.g[i];
}

// a = a + g, or a = g.
__device__ __forceinline__ void solverAdd(const SolverParams& p) {
  beginTraining();
  solverEach<false>(p, [&](const SolverWeight& x, long long i, SolverOne) { x.a[i] = p.fresh ? x.g[i] : solverGradient(x, i); });
}

// Adds what the threads have: thread i gets that of i+n, for n of 128, 64, ..., 1.
__device__ __forceinline__ double solverFold(double sum) {
  __shared__ double sums[TRAINING_THREADS];
  sums[threadIdx.x] = sum;
  for (int step = TRAINING_THREADS / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  return sums[0]; // of thread 0
}

// The sum of the squares of a piece of the gradients.
__device__ __forceinline__ void solverSquares(const SolverParams& p) {
  beginTraining();
  double sum = 0;
  solverEach<false>(p, [&](const SolverWeight& x, long long i, SolverOne) {
    const double g = solverGradient(x, i);
    sum = __fma_rn(g, g, sum); // g*g has no rounding
  });
  sum = solverFold(sum);
  if (threadIdx.x == 0) p.sums[blockIdx.x] = sum;
}

// The sum of the sums of all pieces goes behind them. A thread block does it: thread i has every 256th from i on.
__device__ __forceinline__ void solverTotal(const SolverParams& p) {
  beginTraining();
  double sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < p.pieces; i += TRAINING_THREADS) sum += p.sums[i];
  sum = solverFold(sum);
  if (threadIdx.x == 0) p.sums[p.pieces] = sum;
}

// With h = scale (a + g):
//
//	m = beta1 m + rest1 h,   v = beta2 v + rest2 h h,   u = correct1 m / (sqrt(correct2 v) + epsilon), without moments u = h
//	w = w - rate (u + decay w)
__device__ __forceinline__ void solverUpdate(const SolverParams& p) {
  beginTraining();
  solverEach<true>(p, [&](const SolverWeight& x, long long i, auto w) {
    decltype(w) g, more, m, v;
    w.load(x.w + i), g.load(x.g + i);
    if (x.a) more.load(x.a + i);
    if (p.moments) m.load(x.m + i), v.load(x.v + i);
#pragma unroll
    for (int e = 0; e < w.N; e++) {
      float u = __fmul_rn(p.scale, x.a ? __fadd_rn(more.v[e], g.v[e]) : g.v[e]);
      if (p.moments) {
        m.v[e] = __fadd_rn(__fmul_rn(p.beta1, m.v[e]), __fmul_rn(p.rest1, u));
        v.v[e] = __fadd_rn(__fmul_rn(p.beta2, v.v[e]), __fmul_rn(p.rest2, __fmul_rn(u, u)));
        u = __fdiv_rn(__fmul_rn(p.correct1, m.v[e]), __fadd_rn(__fsqrt_rn(__fmul_rn(p.correct2, v.v[e])), p.epsilon));
      }
      w.v[e] = __fsub_rn(w.v[e], __fmul_rn(p.rate, __fadd_rn(u, __fmul_rn(p.decay, w.v[e]))));
    }
    if (p.moments) m.store(x.m + i), v.store(x.v + i);
    w.store(x.w + i);
  });
}
