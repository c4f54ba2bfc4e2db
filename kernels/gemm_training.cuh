// Products of gradients: c = a b + plus in float32, where a or its transpose is in memory. All matrices are row-major, of any size.
//
// A thread block has a tile of c and walks all of k, so the order of sums is fixed. Tensor cores multiply numbers in two parts
// (MmaTF32): at most 2^-18 of a product is lost. Tensor cores truncate sums to float32.
#pragma once
#include "copy.cuh"

constexpr int TRAINING_THREADS = 256;
constexpr int TRAINING_TILE = 128; // rows and columns of c of a thread block
constexpr int TRAINING_STEP = 16;  // of k, in shared memory at a time

__device__ __forceinline__ void beginTraining() {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
}

struct TrainingParams {
  const float *a, *b, *plus; // m x k or its transpose k x m, k x n, m x n; plus may be null, or c
  float* c;
  int m, n, k;
};

// A part of a matrix in shared memory. The stride between rows gives lanes of a fragment different banks.
template <int ROWS, int COLUMNS> struct TrainingPart {
  static constexpr int STRIDE = COLUMNS + (COLUMNS == TRAINING_STEP ? 4 : 8), WORDS = ROWS * STRIDE;

  // Begins copies of the part from (row, column) on, of a matrix of rows x columns. Outside of the matrix there are zeros.
  __device__ static __forceinline__ void bring(float* to, const float* from, int row, int column, int rows, int columns) {
    const bool aligned = columns % 4 == 0 && (u64)from % 16 == 0;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * COLUMNS / 4; i += TRAINING_THREADS) {
      const int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4, inside = row + r < rows ? columns - column - c : 0;
      float* const at = to + r * STRIDE + c;
      const float* const source = from + (long long)(row + r) * columns + column + c;
      if (aligned) {
        copy16(sharedAddress(at), inside > 0 ? source : from, inside > 0);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (e < inside) copyFew<4>(at + e, source + e);
        else at[e] = 0.f;
      }
    }
  }
};

template <bool TRANSPOSED> struct TrainingProduct {
  using A = TrainingPart<TRANSPOSED ? TRAINING_STEP : TRAINING_TILE, TRANSPOSED ? TRAINING_TILE : TRAINING_STEP>;
  using B = TrainingPart<TRAINING_STEP, TRAINING_TILE>;
  static constexpr int ROWS = 64, COLUMNS = 32; // of c, of a warp

  __device__ static __forceinline__ void run(const TrainingParams& p) {
    __shared__ __align__(16) float memory[2][A::WORDS + B::WORDS];
    const int tiles = (p.n + TRAINING_TILE - 1) / TRAINING_TILE, row = blockIdx.x / tiles * TRAINING_TILE, column = blockIdx.x % tiles * TRAINING_TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int mine = warp / (TRAINING_TILE / COLUMNS) * ROWS + lane / 4, beside = warp % (TRAINING_TILE / COLUMNS) * COLUMNS;
    const auto bring = [&](float* to, int k) {
      if (TRANSPOSED) A::bring(to, p.a, k, row, p.k, p.m);
      else A::bring(to, p.a, row, k, p.m, p.k);
      B::bring(to + A::WORDS, p.b, k, column, p.k, p.n);
      copyCommit();
    };
    float sums[ROWS / 16][COLUMNS / 8][4] = {};
    beginTraining();
    bring(memory[0], 0);
    int stage = 0;
#pragma unroll 1
    for (int k = 0; k < p.k; k += TRAINING_STEP, stage ^= 1) {
      copyWait<0>();
      __syncthreads();
      if (k + TRAINING_STEP < p.k) bring(memory[stage ^ 1], k + TRAINING_STEP);
      const float *const a = memory[stage], *const b = a + A::WORDS;
#pragma unroll 1
      for (int deep = lane % 4; deep < TRAINING_STEP; deep += 8) {
        u32 right[COLUMNS / 8][2], rightRest[COLUMNS / 8][2];
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) split(b[(deep + h * 4) * B::STRIDE + beside + j * 8 + lane / 4], right[j][h], rightRest[j][h]);
#pragma unroll
        for (int i = 0; i < ROWS / 16; i++) {
          u32 left[4], leftRest[4];
#pragma unroll
          for (int h = 0; h < 4; h++) {
            const int r = mine + i * 16 + h % 2 * 8, d = deep + h / 2 * 4;
            split(a[TRANSPOSED ? d * A::STRIDE + r : r * A::STRIDE + d], left[h], leftRest[h]);
          }
#pragma unroll
          for (int j = 0; j < COLUMNS / 8; j++) {
            MmaTF32::mma(sums[i][j], left, rightRest[j][0], rightRest[j][1]);
            MmaTF32::mma(sums[i][j], leftRest, right[j][0], right[j][1]);
            MmaTF32::mma(sums[i][j], left, right[j][0], right[j][1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++)
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int h = 0; h < 4; h++) {
          const int r = row + mine + i * 16 + h / 2 * 8, c = column + beside + j * 8 + lane % 4 * 2 + h % 2;
          if (r >= p.m || c >= p.n) continue;
          const long long at = (long long)r * p.n + c;
          p.c[at] = p.plus == nullptr ? sums[i][j][h] : p.plus[at] + sums[i][j][h];
        }
  }

  __device__ static __forceinline__ void split(float x, u32& lead, u32& rest) { lead = MmaTF32::lead(x), rest = MmaTF32::rest(x); }
};

struct TrainingSumsParams {
  const float *x, *times; // rows x n, which begin `step` elements apart; times may be null
  float* y;               // n
  int rows, n, step;
};

// y = sums over rows of x times. A warp has every eighth row of 32 columns, and the warps' sums are added in their order.
__device__ __forceinline__ void trainingSums(const TrainingSumsParams& p) {
  constexpr int WARPS = TRAINING_THREADS / 32;
  __shared__ float sums[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  beginTraining();
  float sum = 0.f;
  if (column < p.n) {
#pragma unroll 4
    for (int r = warp; r < p.rows; r += WARPS) {
      const long long at = (long long)r * p.step + column;
      sum += p.times == nullptr ? p.x[at] : p.x[at] * p.times[at];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= p.n) return;
  for (int w = 1; w < WARPS; w++) sum += sums[w][lane];
  p.y[column] = sum;
}
