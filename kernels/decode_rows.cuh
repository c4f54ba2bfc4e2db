// Nodes that touch each row once: layer norm, and the embedding gather.
#pragma once
#include "gemm_gemv.cuh"

// The sum of f(row[i]) over a row that the lanes of `sharers` warps share; `scratch`
// has a float for each warp. All threads of the block call it.
template <class F> __device__ __forceinline__ float sumOfRow(const float* row, int n, int member, int sharers, int first, float* scratch, F f) {
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
#pragma unroll 8
  for (int i = member * 32 + lane; i < n; i += sharers * 32) sum += f(row[i]);
  sum = sumOfWarp(sum);
  if (lane == 0) scratch[first + member] = sum;
  __syncthreads();
  sum = 0.f;
  for (int i = 0; i < sharers; i++) sum += scratch[first + i];
  __syncthreads();
  return sum;
}

struct NormParams {
  const float *x, *gamma, *beta; // gamma and beta may be null
  float* y;
  int n;
  float eps;
};

// y = (x - mean) / sqrt(variance + eps) * gamma + beta, a thread block a row.
__device__ __forceinline__ void norm(const NormParams& p) {
  __shared__ float scratch[8];
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const float* x = p.x + (long long)blockIdx.x * p.n;
  float* y = p.y + (long long)blockIdx.x * p.n;
  const float mean = sumOfRow(x, p.n, threadIdx.x / 32, 8, 0, scratch, [](float v) { return v; }) / p.n;
  const float variance = sumOfRow(x, p.n, threadIdx.x / 32, 8, 0, scratch, [=](float v) { return (v - mean) * (v - mean); }) / p.n;
  const float f = 1.f / sqrtf(variance + p.eps);
  for (int i = threadIdx.x; i < p.n; i += 256) {
    float v = (x[i] - mean) * f;
    if (p.gamma != nullptr) v *= p.gamma[i];
    if (p.beta != nullptr) v += p.beta[i];
    y[i] = v;
  }
}

struct GatherParams {
  const void* table;     // rows x n
  const int* ids;        // one for each row of y
  const float* residual; // may be null
  float* y;
  const void* second; // another table; may be null
  const int* secondIDs;
  float* sum;
  int n, rows, type; // of a table: elements of a row, rows, and their type
  int secondRows, secondType;
};

// A row of a table. What the host cannot check is made plain: a row of an id outside of
// the table is NaN.
struct TableRow {
  const void* table;
  long long from;
  int type;
  bool there;
  // That of row `row` of y.
  __device__ __forceinline__ TableRow(const void* table, const int* ids, int row, int n, int rows, int type) : table(table), type(type) {
    const int id = table == nullptr ? 0 : ids[row];
    there = id >= 0 && id < rows, from = (long long)(there ? id : 0) * n;
  }
  __device__ __forceinline__ float operator[](int i) const {
    const float v = loadAs(table, from + i, type);
    return there ? v : __int_as_float(0x7fffffff);
  }
};

// y = table[ids] + residual, a thread block a row, and sum = second[secondIDs] + y.
__device__ __forceinline__ void gather(const GatherParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const TableRow row(p.table, p.ids, blockIdx.x, p.n, p.rows, p.type), other(p.second, p.secondIDs, blockIdx.x, p.n, p.secondRows, p.secondType);
  const long long to = (long long)blockIdx.x * p.n;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.n; i += 256) {
    float v = row[i];
    const float w = p.second == nullptr ? 0.f : other[i];
    if (p.residual != nullptr) v += p.residual[to + i];
    p.y[to + i] = v;
    if (p.second != nullptr) p.sum[to + i] = w + v;
  }
}
