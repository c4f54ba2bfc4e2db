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
  float* loss;        // of each row: wanted without dy, else known, or null
  long long size;     // of the vocabulary
  long long step;
  void* rounded;      // where gradients of 16 bits go in place of the logits, in rows of `step` elements, with zeros behind the vocabulary; may be null
  int type;           // of them
};

// The loss of a row of logits, or dy (softmax - 1 at the target). A target outside of the vocabulary gives NaN. A thread block has a row.
__device__ __forceinline__ void lossOfRow(const LossParams& p) {
  __shared__ float scratch[8];
  beginTraining();
  const int row = blockIdx.x, target = p.targets[row];
  float* const logits = p.logits + row * p.step;
  if (target < 0 || target >= p.size) {
    const float v = target == -1 ? 0.f : __int_as_float(0x7fffffff);
    if (p.dy != nullptr && p.rounded != nullptr)
      for (long long i = threadIdx.x; i < p.step; i += TRAINING_THREADS) storeAs(p.rounded, row * p.step + i, p.type, i < p.size ? v : 0.f);
    else if (p.dy != nullptr)
      for (long long i = threadIdx.x; i < p.size; i += TRAINING_THREADS) logits[i] = v;
    else if (threadIdx.x == 0) p.loss[row] = v;
    return;
  }
  const bool fours = p.step % 4 == 0 && ((u64)p.logits | (u64)p.bias) % 16 == 0;
  // Calls f for a thread's logits, four at a time where they lie so, and stores what f returns true for.
  const auto each = [&](auto f) {
    const long long end = fours ? p.size / 4 * 4 : 0;
#pragma unroll 2
    for (long long i = threadIdx.x * 4; i < end; i += TRAINING_THREADS * 4) {
      alignas(16) float v[4], b[4] = {};
      *(float4*)v = *(const float4*)(logits + i);
      if (p.bias != nullptr) *(float4*)b = *(const float4*)(p.bias + i);
#pragma unroll
      for (int e = 0; e < 4; e++) v[e] += b[e];
      if (f(v, i, 4)) *(float4*)(logits + i) = *(const float4*)v;
    }
#pragma unroll 4
    for (long long i = end + threadIdx.x; i < p.size; i += TRAINING_THREADS) {
      float v[4] = {p.bias == nullptr ? logits[i] : logits[i] + p.bias[i], -LEAN_INF, -LEAN_INF, -LEAN_INF};
      if (f(v, i, 1)) logits[i] = v[0];
    }
  };
  // The sum of exponentials below the largest logit so far. A thread adds hundreds of exponentials: rest is what the sum has lost by
  // rounding.
  float most = -LEAN_INF, sum = 0.f, rest = 0.f;
  const bool known = p.dy != nullptr && p.loss != nullptr;
  if (!known) each([&](float (&v)[4], long long, int n) {
    const float next = fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), most);
    if (next > most) {
      const float by = lossExponential(most - next);
      sum *= by, rest *= by, most = next;
    }
    const float base = most == -LEAN_INF ? 0.f : most;
    float terms[4];
#pragma unroll
    for (int e = 0; e < 4; e++) terms[e] = e < n ? lossExponential(v[e] - base) : 0.f;
    const float term = (terms[0] + terms[1]) + (terms[2] + terms[3]) - rest, more = sum + term;
    rest = (more - sum) - term, sum = more;
    return false;
  });
  float top = foldBlock(most, scratch, [](float a, float b) { return fmaxf(a, b); });
  sum = most == -LEAN_INF ? sum : sum * lossExponential(most - top);
  sum = foldBlock(sum, scratch, [](float a, float b) { return a + b; });
  if (p.dy == nullptr) {
    if (threadIdx.x == 0) p.loss[row] = (top - (p.bias == nullptr ? logits[target] : logits[target] + p.bias[target])) + logf(sum);
    return;
  }
  if (known) { // the log-sum-exp. The logits are read before any is overwritten.
    top = p.loss[row] + (p.bias == nullptr ? logits[target] : logits[target] + p.bias[target]), sum = 1.f;
    __syncthreads();
  }
  const float by = p.dy[row], share = by / sum;
  each([&](float (&v)[4], long long i, int n) {
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = lossExponential(v[e] - top) * share - (i + e == target ? by : 0.f);
    if (p.rounded == nullptr) return true;
    withStore(p.type, [&](auto s) {
      using Store = decltype(s);
      char* const to = (char*)p.rounded + (row * p.step + i) * Store::bytes;
      alignas(8) char few[4 * Store::bytes];
#pragma unroll
      for (int e = 0; e < 4; e++) Store::store(few, e, v[e]);
      if (n == 4 && Store::bytes == 2) *(uint2*)to = *(const uint2*)few;
      else for (int e = 0; e < n; e++) Store::store(to, e, v[e]);
    });
    return false;
  });
  if (p.rounded != nullptr)
    for (long long i = p.size + threadIdx.x; i < p.step; i += TRAINING_THREADS) storeAs(p.rounded, row * p.step + i, p.type, 0.f);
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
