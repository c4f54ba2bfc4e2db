// Gradients that read and write each number once: sums over rows, norms, activations. Also moves and conversions by vectors of 16 bytes.
#pragma once
#include "nodes_training.cuh"

constexpr int ROWS_COLUMNS = 128; // of a thread block of rowsSums
constexpr int ROWS_VECTORS = 8;   // of four elements, the most of a row that a thread of rowsNorm has

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 operator-(float4 a, float4 b) { return {a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w}; }
__device__ __forceinline__ float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ __forceinline__ float4 four(float x) { return {x, x, x, x}; }
__device__ __forceinline__ float sumOfLanes(float v) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}
__device__ __forceinline__ float sumOf(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Adds the sums of the warps, in the order of the warps, and stores up to four columns.
__device__ __forceinline__ void rowsFold(float4 sum, float4 (&sums)[TRAINING_THREADS / 32][32], float* to, int most) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || most <= 0) return;
  for (int w = 1; w < TRAINING_THREADS / 32; w++) sum = sum + sums[w][lane];
  to[0] = sum.x;
  if (most > 1) to[1] = sum.y;
  if (most > 2) to[2] = sum.z;
  if (most > 3) to[3] = sum.w;
}

struct RowsSumsParams {
  const float *x, *times; // rows x n; times may be null
  float* y;               // parts x n
  int rows, n, each;      // each: rows of a part
  int aligned;            // x and times are read by four elements
};

// y: for each part of the rows, the sums of x, or of x times `times`, over the rows of the part. A warp adds every eighth row of a part. The
// sums of the warps are added in the order of the warps.
__device__ __forceinline__ void rowsSums(const RowsSumsParams& p) {
  constexpr int WARPS = TRAINING_THREADS / 32;
  __shared__ float4 sums[WARPS][32];
  const int tiles = (p.n + ROWS_COLUMNS - 1) / ROWS_COLUMNS, part = blockIdx.x / tiles, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x % tiles * ROWS_COLUMNS + lane * 4, most = p.n - column, first = part * p.each, end = min(p.rows, first + p.each);
  beginTraining();
  float4 sum = four(0.f);
  // The loop has no branches, so loads of several rows are in flight together.
  const auto add = [&](auto load) {
#pragma unroll 8
    for (int r = first + warp; r < end; r += WARPS) sum = sum + load((long long)r * p.n + column);
  };
  const auto few = [&](const float* from) { return float4{from[0], most > 1 ? from[1] : 0.f, most > 2 ? from[2] : 0.f, most > 3 ? from[3] : 0.f}; };
  if (most > 0 && p.aligned && p.times == nullptr) add([&](long long at) { return *(const float4*)(p.x + at); });
  else if (most > 0) add([&](long long at) { return p.times == nullptr ? few(p.x + at) : few(p.x + at) * few(p.times + at); });
  rowsFold(sum, sums, p.y + (long long)part * p.n + column, most);
}

__device__ __forceinline__ float4 slopesOf(int f, float4 x) { return {slopeOf(f, x.x), slopeOf(f, x.y), slopeOf(f, x.z), slopeOf(f, x.w)}; }

struct RowsRoundParams {
  const void* x;       // rows x n, n a multiple of 4, of float32; with dim of y's type: (rows/tokens, n/dim, tokens, dim), dim a multiple of 4
  const float* before; // as x without dim; may be null
  void* y;                 // as x, in an element type of 16 bits, in rows that begin `step` elements apart
  float* sums;             // parts x n; may be null
  int rows, n, each, type, activation, step, tokens, dim;
};

// y = x times f'(before), rounded to nearest, and the sums over the rows of each part, as rowsSums computes them. Without before, y = x.
__device__ __forceinline__ void rowsRound(const RowsRoundParams& p) {
  constexpr int WARPS = TRAINING_THREADS / 32;
  __shared__ float4 sums[WARPS][32];
  const int tiles = (p.n + ROWS_COLUMNS - 1) / ROWS_COLUMNS, part = blockIdx.x / tiles, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x % tiles * ROWS_COLUMNS + lane * 4, most = p.n - column, first = part * p.each, end = min(p.rows, first + p.each);
  beginTraining();
  float4 sum = four(0.f);
  if (most > 0) withStore(p.type, [&](auto s) {
    using Store = decltype(s);
    if constexpr (Store::bytes == 2) {
      const float* const x = (const float*)p.x;
      const auto put = [&](int r, float4 v, uint2 few) {
        *(uint2*)((u16*)p.y + (long long)r * p.step + column) = few;
        sum = sum + v;
      };
      const auto round = [&](int r, float4 v) {
        alignas(8) u16 few[4];
        Store::store(few, 0, v.x), Store::store(few, 1, v.y), Store::store(few, 2, v.z), Store::store(few, 3, v.w);
        put(r, v, *(const uint2*)few);
      };
      if (p.dim > 0) {
        const int head = column / p.dim, heads = p.n / p.dim;
#pragma unroll 8
        for (int r = first + warp; r < end; r += WARPS) {
          const int sequence = r / p.tokens;
          const long long at = ((long long)(sequence * heads + head) * p.tokens + (r - sequence * p.tokens)) * p.dim + (column - head * p.dim);
          const uint2 few = *(const uint2*)((const u16*)p.x + at);
          put(r, float4{Store::low(few.x), Store::high(few.x), Store::low(few.y), Store::high(few.y)}, few);
        }
      } else if (p.before == nullptr) {
#pragma unroll 8
        for (int r = first + warp; r < end; r += WARPS) {
          round(r, *(const float4*)(x + (long long)r * p.n + column));
        }
      } else {
#pragma unroll 2
        for (int r = first + warp; r < end; r += WARPS) {
          const long long at = (long long)r * p.n + column;
          round(r, *(const float4*)(x + at) * slopesOf(p.activation, *(const float4*)(p.before + at)));
        }
      }
    }
  });
  if (p.sums != nullptr) rowsFold(sum, sums, p.sums + (long long)part * p.n + column, most);
}

struct RowsNormParams {
  const float *x, *gamma, *dy; // gamma may be null
  float *dx, *sums;            // sums, of each thread block: the sums over its rows of dy xh, and of dy; null: not wanted
  int rows, n, rms;
  float eps, offset;
};

// The results of trainingNorm, and sums for the gradients of gamma and beta. A warp, or with WIDE a thread block, keeps a row in
// registers. n is a multiple of 4.
template <bool WIDE> __device__ __forceinline__ void rowsNorm(const RowsNormParams& p) {
  constexpr int SHARERS = WIDE ? TRAINING_THREADS : 32, WARPS = TRAINING_THREADS / 32;
  __shared__ float scratch[8];
  __shared__ float4 partial[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = WIDE ? threadIdx.x : lane;
  const auto mean = [&](float v) {
    if constexpr (WIDE) return foldBlock(v, scratch, [](float a, float b) { return a + b; }) / p.n;
    else return sumOfLanes(v) / p.n;
  };
  beginTraining();
  float4 ofGamma[ROWS_VECTORS], ofBeta[ROWS_VECTORS];
#pragma unroll
  for (int i = 0; i < ROWS_VECTORS; i++) ofGamma[i] = ofBeta[i] = four(0.f);
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < ROWS_VECTORS; i++) {
      const int at = (i * SHARERS + member) * 4;
      if (at < p.n) f(i, at);
    }
  };
  const long long first = WIDE ? blockIdx.x : blockIdx.x * WARPS + warp, step = WIDE ? gridDim.x : gridDim.x * WARPS;
  float4 nextX[ROWS_VECTORS], nextDY[ROWS_VECTORS]; // loaded while a row is computed
  const auto bring = [&](long long row) {
    if (row < p.rows) each([&](int i, int at) { nextX[i] = *(const float4*)(p.x + row * p.n + at), nextDY[i] = *(const float4*)(p.dy + row * p.n + at); });
  };
  bring(first);
#pragma unroll 1
  for (long long row = first; row < p.rows; row += step) {
    float4 x[ROWS_VECTORS], dy[ROWS_VECTORS];
    each([&](int i, int) { x[i] = nextX[i], dy[i] = nextDY[i]; });
    bring(row + step);
    if (!p.rms) {
      float sum = 0.f;
      each([&](int i, int) { sum += sumOf(x[i]); });
      const float4 middle = four(mean(sum));
      each([&](int i, int) { x[i] = x[i] - middle; });
    }
    float squares = 0.f;
    each([&](int i, int) { squares += sumOf(x[i] * x[i]); });
    const float r = 1.f / sqrtf(mean(squares) + p.eps);
    float g = 0.f, both = 0.f;
    each([&](int i, int at) {
      x[i] = x[i] * four(r);
      ofGamma[i] = ofGamma[i] + dy[i] * x[i], ofBeta[i] = ofBeta[i] + dy[i];
      if (p.gamma != nullptr) dy[i] = dy[i] * (*(const float4*)(p.gamma + at) + four(p.offset));
      g += sumOf(dy[i]), both += sumOf(dy[i] * x[i]);
    });
    g = p.rms ? 0.f : mean(g), both = mean(both);
    each([&](int i, int at) { *(float4*)(p.dx + row * p.n + at) = four(r) * (dy[i] - four(g) - x[i] * four(both)); });
  }
  if (p.sums == nullptr) return;
  float* const to = p.sums + blockIdx.x * 2ll * p.n;
  if (WIDE) {
    each([&](int i, int at) { *(float4*)(to + at) = ofGamma[i], *(float4*)(to + p.n + at) = ofBeta[i]; });
    return;
  }
  const auto fold = [&](float4 v, int at, float* to) {
    __syncthreads();
    partial[warp][lane] = v;
    __syncthreads();
    if (warp > 0 || at >= p.n) return;
    for (int w = 1; w < WARPS; w++) v = v + partial[w][lane];
    *(float4*)(to + at) = v;
  };
#pragma unroll
  for (int i = 0; i < ROWS_VECTORS; i++) {
    const int at = (i * 32 + lane) * 4;
    if (i * 128 >= p.n) break;
    fold(ofGamma[i], at, to), fold(ofBeta[i], at, to + p.n);
  }
}

// Stores four numbers of 16 bits.
__device__ __forceinline__ void storeFour(u16* to, int type, float4 v) {
  alignas(8) u16 few[4];
  withStore(type, [&](auto s) {
    using Store = decltype(s);
    if constexpr (Store::bytes == 2) Store::store(few, 0, v.x), Store::store(few, 1, v.y), Store::store(few, 2, v.z), Store::store(few, 3, v.w);
  });
  *(uint2*)to = *(const uint2*)few;
}

struct RowsLayerNormParams {
  const float *x, *gamma, *beta; // gamma and beta may be null
  void* y;
  int rows, n;
  float eps;
  int type; // of y: float32, or rounded to 16 bits
};

// y = (x - mean) / sqrt(variance + eps) * gamma + beta. A warp keeps a row in registers. n is a multiple of 4, at most 1024.
__device__ __forceinline__ void rowsLayerNorm(const RowsLayerNormParams& p) {
  const int lane = threadIdx.x % 32;
  const long long row = blockIdx.x * (TRAINING_THREADS / 32) + threadIdx.x / 32;
  beginTraining();
  if (row >= p.rows) return;
  float4 x[ROWS_VECTORS];
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < ROWS_VECTORS; i++) {
      const int at = (i * 32 + lane) * 4;
      if (at < p.n) f(i, at);
    }
  };
  float sum = 0.f, squares = 0.f;
  each([&](int i, int at) { x[i] = *(const float4*)(p.x + row * p.n + at); });
  each([&](int i, int) { sum += sumOf(x[i]); });
  const float4 mean = four(sumOfLanes(sum) / p.n);
  each([&](int i, int) { x[i] = x[i] - mean, squares += sumOf(x[i] * x[i]); });
  const float4 r = four(1.f / sqrtf(sumOfLanes(squares) / p.n + p.eps));
  each([&](int i, int at) {
    float4 y = x[i] * r;
    if (p.gamma != nullptr) y = y * *(const float4*)(p.gamma + at);
    if (p.beta != nullptr) y = y + *(const float4*)(p.beta + at);
    if (p.type == 0) *(float4*)((float*)p.y + row * p.n + at) = y;
    else storeFour((u16*)p.y + row * p.n + at, p.type, y);
  });
}

// The results of trainingSlopes, by four elements: widths, steps and addresses are multiples of four elements.
__device__ __forceinline__ void rowsSlopes(const TrainingSlopeParams& p) {
  const long long n = ((long long)blockIdx.x * TRAINING_THREADS + threadIdx.x) * 4;
  beginTraining();
  if (n >= p.n) return;
  const long long at = p.width == p.step ? n : n / p.width * p.step + n % p.width;
  const float4 x = *(const float4*)(p.x + at), dy = *(const float4*)(p.dy + n);
  const float4 slope = slopesOf(p.activation, x);
  *(float4*)(p.dx + at) = (p.times == nullptr ? dy : dy * *(const float4*)(p.times + at)) * slope;
  if (p.dtimes != nullptr)
    *(float4*)(p.dtimes + at) = dy * float4{activatedAny(p.activation, x.x), activatedAny(p.activation, x.y), activatedAny(p.activation, x.z), activatedAny(p.activation, x.w)};
}

// The results of trainingConvert between types of different sizes, by eight elements. Addresses are multiples of 16 bytes.
__device__ __forceinline__ void rowsConvert(const TrainingConvertParams& p) {
  const long long at = ((long long)blockIdx.x * TRAINING_THREADS + threadIdx.x) * 8;
  beginTraining();
  withStore(p.xType, [&](auto from) {
    withStore(p.yType, [&](auto to) {
      using X = decltype(from);
      using Y = decltype(to);
      if constexpr (X::bytes != Y::bytes) {
        alignas(16) char x[8 * X::bytes], y[8 * Y::bytes];
        if (p.n - at < 8) {
          for (long long i = at; i < p.n; i++) Y::store(p.y, i, X::load(p.x, i));
          return;
        }
#pragma unroll
        for (int i = 0; i < X::bytes / 2; i++) ((uint4*)x)[i] = ((const uint4*)((const char*)p.x + at * X::bytes))[i];
#pragma unroll
        for (int i = 0; i < 8; i++) Y::store(y, i, X::load(x, i));
#pragma unroll
        for (int i = 0; i < Y::bytes / 2; i++) ((uint4*)((char*)p.y + at * Y::bytes))[i] = ((const uint4*)y)[i];
      }
    });
  });
}

struct RowsMoveParams {
  const void* x;
  void* y;
  int from[3], to[3];              // distances along the axes but the last, in units
  int count, second, third, n;     // units; lengths of the axes behind the first
  int type;                        // of elements of x, for rowsWiden
};

// The place of a thread's unit number `at` of a move.
struct RowsMoved {
  u32 from, to;
  __device__ __forceinline__ RowsMoved(const RowsMoveParams& p, u32 at) {
    const u32 e = at % p.n, row = at / p.n, c = row % p.third, rest = row / p.third, b = rest % p.second, a = rest / p.second;
    from = a * p.from[0] + b * p.from[1] + c * p.from[2] + e, to = a * p.to[0] + b * p.to[1] + c * p.to[2] + e;
  }
};

// y takes elements of x of 16 bits as float32, EACH of them a unit.
template <int EACH> __device__ __forceinline__ void rowsWiden(const RowsMoveParams& p) {
  const u32 at = blockIdx.x * TRAINING_THREADS + threadIdx.x;
  beginTraining();
  if (at >= p.count) return;
  const RowsMoved unit(p, at);
  withStore(p.type, [&](auto s) {
    using Store = decltype(s);
    if constexpr (Store::bytes == 2) {
      alignas(16) u16 x[EACH];
      alignas(16) float y[EACH];
      if constexpr (EACH == 8) *(uint4*)x = ((const uint4*)p.x)[unit.from];
      else x[0] = ((const u16*)p.x)[unit.from];
#pragma unroll
      for (int i = 0; i < EACH; i++) y[i] = Store::load(x, i);
      if constexpr (EACH == 8) ((float4*)p.y)[2ll * unit.to] = *(const float4*)y, ((float4*)p.y)[2ll * unit.to + 1] = *(const float4*)(y + 4);
      else ((float*)p.y)[unit.to] = y[0];
    }
  });
}

// y takes elements of x, as `move` does, of any size.
template <class T> __device__ __forceinline__ void rowsMove(const RowsMoveParams& p) {
  const u32 first = blockIdx.x * (TRAINING_THREADS * TRAINING_EACH) + threadIdx.x;
  beginTraining();
#pragma unroll
  for (int i = 0; i < TRAINING_EACH; i++) {
    const u32 at = first + i * TRAINING_THREADS;
    if (at >= p.count) return;
    const RowsMoved unit(p, at);
    ((T*)p.y)[unit.to] = ((const T*)p.x)[unit.from];
  }
}
