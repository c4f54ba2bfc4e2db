// Gradients of activations, gates and norms, and conversions between element types.
#pragma once
#include "gemm_training.cuh"

#include "gemm_activation.cuh"

constexpr int TRAINING_EACH = 4; // elements of a thread of trainingSlopes and trainingConvert

struct TrainingSlopeParams {
  const float *dy, *x, *times; // times may be null: ones
  float *dx, *dtimes;          // dtimes may be null
  long long n;                 // elements of dy
  long long width, step;       // all but dy have rows of width elements, and their rows begin step elements apart
  int activation;
};

// The derivative of v s(u), with the sigmoid s and the derivative du of u.
__device__ __forceinline__ float sigmoidSlope(float v, float u, float du) {
  const float e = exp2_(-1.44269504f * fabsf(u)), s = 1.f / (1.f + e);
  return (u < 0.f ? e * s : s) + (e > 0.f ? v * du * e * s * s : 0.f); // where e is 0, v may be infinite
}

__device__ __forceinline__ float slopeOf(int activation, float v) {
  switch (activation) {
    case RELU: return v > 0.f ? 1.f : v * 0.f; // NaN of NaN
    case GELU: {
      const float p = exp2_(-0.72134752f * v * v);
      return 0.5f * (1.f + erff(0.70710678f * v)) + (p > 0.f ? 0.39894228f * v * p : 0.f);
    }
    case GELU_TANH: return sigmoidSlope(v, v * (1.59576912f + 0.0713548163f * v * v), 1.59576912f + 0.2140644489f * v * v);
    case SILU: return sigmoidSlope(v, v, 1.f);
  }
  return 1.f;
}

// dx = dy times f'(x), dtimes = dy f(x).
__device__ __forceinline__ void trainingSlopes(const TrainingSlopeParams& p) {
  beginTraining();
  const long long first = (long long)blockIdx.x * (TRAINING_THREADS * TRAINING_EACH) + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < TRAINING_EACH; i++) {
    const long long n = first + i * TRAINING_THREADS;
    if (n >= p.n) return;
    const long long at = n / p.width * p.step + n % p.width;
    const float x = p.x[at], dy = p.dy[n];
    p.dx[at] = (p.times == nullptr ? dy : dy * p.times[at]) * slopeOf(p.activation, x);
    if (p.dtimes != nullptr) p.dtimes[at] = dy * activatedAny(p.activation, x);
  }
}

struct TrainingNormParams {
  const float *x, *gamma, *dy; // gamma may be null
  float* dx;
  int n, rms; // elements of a row; a norm by the root mean square
  float eps, offset; // offset is added to gamma
};

// With xh = (x - mean) r, r = 1/sqrt(variance + eps) and g = dy (gamma + offset):
//
//	dx = r (g - mean(g) - xh mean(g xh))
//
// By the root mean square, the means of x and g count as 0. A thread block has a row.
__device__ __forceinline__ void trainingNorm(const TrainingNormParams& p) {
  __shared__ float scratch[8];
  beginTraining();
  const long long at = (long long)blockIdx.x * p.n;
  const float *const x = p.x + at, *const dy = p.dy + at;
  const auto meanOf = [&](auto f) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < p.n; i += TRAINING_THREADS) sum += f(i);
    return foldBlock(sum, scratch, [](float a, float b) { return a + b; }) / p.n;
  };
  const auto g = [&](int i) { return p.gamma == nullptr ? dy[i] : dy[i] * (p.gamma[i] + p.offset); };
  const float mean = p.rms ? 0.f : meanOf([&](int i) { return x[i]; });
  const float r = 1.f / sqrtf(meanOf([&](int i) { return (x[i] - mean) * (x[i] - mean); }) + p.eps);
  const float ofG = p.rms ? 0.f : meanOf(g), ofBoth = meanOf([&](int i) { return g(i) * ((x[i] - mean) * r); });
  for (int i = threadIdx.x; i < p.n; i += TRAINING_THREADS) p.dx[at + i] = r * (g(i) - ofG - (x[i] - mean) * r * ofBoth);
}

struct TrainingConvertParams {
  const void* x;
  void* y;
  long long n;
  int xType, yType;
};

// y = x, rounded to nearest, in another element type.
__device__ __forceinline__ void trainingConvert(const TrainingConvertParams& p) {
  beginTraining();
  const long long first = (long long)blockIdx.x * (TRAINING_THREADS * TRAINING_EACH) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < TRAINING_EACH; i++) {
    const long long at = first + i * TRAINING_THREADS;
    if (at < p.n) storeAs(p.y, at, p.yType, loadAs(p.x, at, p.xType));
  }
}

struct TrainingTransposeParams {
  const float* x; // rows x columns, which begin `step` elements apart
  void* y;        // columns x wide, zeros behind the first `rows` elements of a row
  int rows, columns, step, wide, type;
};

// y = the transpose of x, rounded to nearest in another element type.
__device__ __forceinline__ void trainingTranspose(const TrainingTransposeParams& p) {
  constexpr int TILE = 64;
  __shared__ float tile[TILE][TILE + 1];
  const int across = (p.columns + TILE - 1) / TILE, row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE;
  beginTraining();
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE * TILE; i += TRAINING_THREADS) {
    const int r = i / TILE, c = i % TILE;
    tile[c][r] = row + r < p.rows && column + c < p.columns ? p.x[(long long)(row + r) * p.step + column + c] : 0.f;
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE * TILE; i += TRAINING_THREADS) {
    const int c = i / TILE, r = i % TILE;
    if (column + c < p.columns && row + r < p.wide) storeAs(p.y, (long long)(column + c) * p.wide + row + r, p.type, tile[c][r]);
  }
}
