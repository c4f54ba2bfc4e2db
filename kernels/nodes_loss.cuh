// The loss of a language model from its logits, and gradients of the logits and of an embedding's table.
#pragma once
#include "gemm_training.cuh"

constexpr int LOSS_COLUMNS = 4 * TRAINING_THREADS; // of a table's gradient, of a thread block

// e^x of x <= 0, within 4 units in the last place: lost is what rounding takes from x log2(e).
__device__ __forceinline__ float lossExponential(float x) {
  const float to = x * 1.44269504f, lost = __fmaf_rn(x, 1.44269504f, -to) + x * 1.92596303e-8f, e = exp2_(to);
  return to < -150.f ? 0.f : __fmaf_rn(e, lost * 0.69314718f, e); // lost may be NaN of -Inf
}

struct LossParams {
  float* logits;      // rows x size, which begin `step` elements apart, without the bias; the gradient overwrites them
  const float* bias;  // may be null
  const int* targets; // of each row; -1: the row does not count
  const float* dy;    // of each row, the loss's gradient; null: the loss is wanted
  float* loss;        // of each row
  long long size;     // of the vocabulary
  long long step;
};

// The loss of a row of logits, or dy (softmax - 1 at the target). A target outside of the vocabulary gives NaN. A thread block has a row.
__device__ __forceinline__ void lossOfRow(const LossParams& p) {
  __shared__ float scratch[8];
  beginTraining();
  const int row = blockIdx.x, target = p.targets[row];
  float* const logits = p.logits + row * p.step;
  if (target < 0 || target >= p.size) {
    const float v = target == -1 ? 0.f : __int_as_float(0x7fffffff);
    if (p.dy != nullptr)
      for (long long i = threadIdx.x; i < p.size; i += TRAINING_THREADS) logits[i] = v;
    else if (threadIdx.x == 0) p.loss[row] = v;
    return;
  }
  const auto logit = [&](long long i) { return p.bias == nullptr ? logits[i] : logits[i] + p.bias[i]; };
  float top = -LEAN_INF;
  for (long long i = threadIdx.x; i < p.size; i += TRAINING_THREADS) top = fmaxf(top, logit(i));
  top = foldBlock(top, scratch, [](float a, float b) { return fmaxf(a, b); });
  // A thread adds hundreds of exponentials: rest is what the sum has lost by rounding.
  float sum = 0.f, rest = 0.f;
  for (long long i = threadIdx.x; i < p.size; i += TRAINING_THREADS) {
    const float e = lossExponential(logit(i) - top) - rest, more = sum + e;
    rest = (more - sum) - e, sum = more;
  }
  sum = foldBlock(sum, scratch, [](float a, float b) { return a + b; });
  if (p.dy == nullptr) {
    if (threadIdx.x == 0) p.loss[row] = (top - logit(target)) + logf(sum);
    return;
  }
  const float by = p.dy[row], each = by / sum;
  for (long long i = threadIdx.x; i < p.size; i += TRAINING_THREADS) logits[i] = lossExponential(logit(i) - top) * each - (i == target ? by : 0.f);
}

// y += sums over rows of x, with first: y = these sums. A lane adds what it has written itself.
struct LossSumsParams {
  TrainingSumsParams sums;
  int first;
};

__device__ __forceinline__ void lossSums(const LossSumsParams& p) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const bool adds = !p.first && threadIdx.x < 32 && column < p.sums.n;
  beginTraining();
  const float before = adds ? p.sums.y[column] : 0.f;
  trainingSums(p.sums);
  if (adds) p.sums.y[column] += before;
}

struct TableGradientParams {
  const int* ids;  // of each row
  const float* dy; // rows x n
  float* table;    // tableRows x n, zeros before
  int rows, n, tableRows;
};

// A row of the table's gradient is the sum of the rows of dy with its id, in their order. The block of the first of these rows has it.
__device__ __forceinline__ void tableGradient(const TableGradientParams& p) {
  constexpr int WARPS = TRAINING_THREADS / 32;
  __shared__ u32 same[WARPS];
  beginTraining();
  const int tiles = (p.n + LOSS_COLUMNS - 1) / LOSS_COLUMNS, first = blockIdx.x / tiles, id = p.ids[first], column = blockIdx.x % tiles * LOSS_COLUMNS + threadIdx.x;
  if (id < 0 || id >= p.tableRows) return;
  // Which of TRAINING_THREADS rows have the id, 32 a word.
  const auto find = [&](int from, int end) {
    const int row = from + threadIdx.x;
    const u32 mask = __ballot_sync(~0u, row < end && p.ids[row] == id);
    __syncthreads();
    if (threadIdx.x % 32 == 0) same[threadIdx.x / 32] = mask;
    __syncthreads();
  };
  for (int from = 0; from < first; from += TRAINING_THREADS) {
    find(from, first);
    u32 any = 0;
    for (int w = 0; w < WARPS; w++) any |= same[w];
    if (any != 0) return;
  }
  float sums[LOSS_COLUMNS / TRAINING_THREADS] = {};
  for (int from = first; from < p.rows; from += TRAINING_THREADS) {
    find(from, p.rows);
    for (int w = 0; w < WARPS; w++) {
      for (u32 mask = same[w]; mask != 0; mask &= mask - 1) {
        const float* const dy = p.dy + (long long)(from + w * 32 + __popc((mask & -mask) - 1)) * p.n;
#pragma unroll
        for (int i = 0; i < LOSS_COLUMNS / TRAINING_THREADS; i++)
          if (column + i * TRAINING_THREADS < p.n) sums[i] += dy[column + i * TRAINING_THREADS];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < LOSS_COLUMNS / TRAINING_THREADS; i++)
    if (column + i * TRAINING_THREADS < p.n) p.table[(long long)id * p.n + column + i * TRAINING_THREADS] = sums[i];
}
