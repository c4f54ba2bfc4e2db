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
  double* sums; // of each piece
  int count;    // of weights
  int moments;  // 0: there are none
  int fresh;    // of solverAdd: 1 if a has arbitrary content
  float scale;  // of g
  float beta1, rest1, beta2, rest2; // rest1 is 1 - beta1
  float correct1, correct2;         // factors of the moments
  float epsilon, rate, decay;
};

// Calls f for a thread's elements of the block's piece.
template <class F> __device__ __forceinline__ void solverEach(const SolverParams& p, F f) {
  int low = 0, high = p.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.weights[middle].first <= blockIdx.x) low = middle;
    else high = middle;
  }
  const SolverWeight x = p.weights[low];
  const long long from = (blockIdx.x - x.first) * SOLVER_PIECE, end = x.n < from + SOLVER_PIECE ? x.n : from + SOLVER_PIECE;
  for (long long i = from + threadIdx.x; i < end; i += TRAINING_THREADS) f(x, i);
}

// An element of a gradient.
__device__ __forceinline__ float solverGradient(const SolverWeight& x, long long i) {
  return x.a ? __fadd_rn(x.a[i], x.g[i]) : x.g[i];
}

// a = a + g, or a = g.
__device__ __forceinline__ void solverAdd(const SolverParams& p) {
  beginTraining();
  solverEach(p, [&](const SolverWeight& x, long long i) { x.a[i] = p.fresh ? x.g[i] : solverGradient(x, i); });
}

// The sum of the squares of a piece of the gradients.
__device__ __forceinline__ void solverSquares(const SolverParams& p) {
  __shared__ double sums[TRAINING_THREADS];
  beginTraining();
  double sum = 0;
  solverEach(p, [&](const SolverWeight& x, long long i) {
    const double g = solverGradient(x, i);
    sum = __fma_rn(g, g, sum); // g*g has no rounding
  });
  sums[threadIdx.x] = sum;
  for (int step = TRAINING_THREADS / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
  }
  if (threadIdx.x == 0) p.sums[blockIdx.x] = sums[0];
}

// With h = scale (a + g):
//
//	m = beta1 m + rest1 h,   v = beta2 v + rest2 h h,   u = correct1 m / (sqrt(correct2 v) + epsilon), without moments u = h
//	w = w - rate (u + decay w)
__device__ __forceinline__ void solverUpdate(const SolverParams& p) {
  beginTraining();
  solverEach(p, [&](const SolverWeight& x, long long i) {
    float u = __fmul_rn(p.scale, solverGradient(x, i));
    if (p.moments) {
      const float m = __fadd_rn(__fmul_rn(p.beta1, x.m[i]), __fmul_rn(p.rest1, u));
      const float v = __fadd_rn(__fmul_rn(p.beta2, x.v[i]), __fmul_rn(p.rest2, __fmul_rn(u, u)));
      x.m[i] = m, x.v[i] = v;
      u = __fdiv_rn(__fmul_rn(p.correct1, m), __fadd_rn(__fsqrt_rn(__fmul_rn(p.correct2, v)), p.epsilon));
    }
    const float w = x.w[i];
    x.w[i] = __fsub_rn(w, __fmul_rn(p.rate, __fadd_rn(u, __fmul_rn(p.decay, w))));
  });
}
