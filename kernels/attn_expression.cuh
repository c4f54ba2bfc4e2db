// Parameters and functions of a user's printed expressions (internal/variant).
#pragma once
#include "attn_variant.cuh"

constexpr int WRITTEN_TENSORS = 4;
constexpr int WRITTEN_SIZES = 16;
constexpr int WRITTEN_NUMBERS = 192;

// A block of rows, which is an output tile of each KV head.
struct alignas(16) WrittenBlock {
  int begin, count; // its LeanTiles in `tiles`; begin -1: those of all keys, one after the other
  int from, to;     // keys [from, to), of LeanTiles that are not left out: the expression hides them from no row
};

// The parameters of the expressions, and the LeanTiles that are not left out. They lie behind ScoreParams.
struct WrittenParams {
  float2* sums; // of measured weights, as MeasureParams (attn_measured.cuh) has them
  int chunks;
  const void* tensors[WRITTEN_TENSORS];
  const int* lists;           // of each sequence the number of its first block of rows in `blocks`
  const WrittenBlock* blocks; // null: no key is hidden by an expression or a window
  const int* tiles;           // LeanTiles of a sequence's keys, in ascending order
  int sizes[WRITTEN_SIZES]; // of four axes of each of WRITTEN_TENSORS
  u32 numbers[WRITTEN_NUMBERS]; // floats and ints
};
template <class P> __device__ __forceinline__ const WrittenParams& writtenOf(const P& p) { return *(const WrittenParams*)(&scoreOf(p) + 1); }
template <class P> __device__ __forceinline__ const WrittenBlock* blockOf(const P& p, int seq, int block) {
  const WrittenParams& written = writtenOf(p);
  return written.blocks == nullptr ? nullptr : written.blocks + written.lists[seq] + block;
}

// Keys that an expression hides from no row of an output tile: [from, to).
struct SeenByAll {
  int from, to;
  template <class P> __device__ __forceinline__ SeenByAll(const P& p, bool hides, int seq, int block) : from(0), to(hides ? 0 : 0x7fffffff) {
    if (!hides) return;
    const WrittenBlock* const x = blockOf(p, seq, block);
    if (x != nullptr) from = x->from, to = x->to;
  }
  __device__ __forceinline__ bool has(int key, int keys) const { return from <= key && key + keys <= to; }
};

// Evaluates the expressions E for scores of a lane's two rows. each(f) is as modifyScores has it, with natural scores x; `row` says
// what E wants to know of them. seen: no key is hidden from the rows.
struct WrittenRow {
  int head[2], place[2], limit[2]; // limit: keys from the lane's first one on that the row may see
  int key, sequence;               // the lane's first key
};
template <class E, class Each> __device__ __forceinline__ void evaluate(const WrittenParams& p, const WrittenRow& row, bool seen, const Each& each) {
  const auto behind = [&](int i, int n) { return E::reads && n >= row.limit[i]; };
  const auto score = [&](float x, int i, int n) { return E::score(p, x, row.place[i], row.key + n, row.head[i], row.sequence); };
  const auto sees = [&](float x, int i, int n) { return E::sees(p, x, row.place[i], row.key + n, row.head[i], row.sequence); };
  if constexpr (E::judges) {
    each([&](float x, int i, int n) { return behind(i, n) ? x : sees(x, i, n) ? score(x, i, n) : -LEAN_INF; });
  } else {
    if constexpr (E::scores) each([&](float x, int i, int n) { return behind(i, n) ? x : score(x, i, n); });
    if (E::hides && !seen) each([&](float x, int i, int n) { return behind(i, n) || sees(x, i, n) ? x : -LEAN_INF; });
  }
}

// Functions of the expressions, as internal/variant has them: ints wrap around, quotients of ints are rounded down, and the
// least and the largest of NaN and a number are NaN.
__device__ __forceinline__ int divided(int x, int y) { return x / y - (x % y < 0); }
__device__ __forceinline__ int remaining(int x, int y) {
  const int r = x % y;
  return r < 0 ? r + y : r;
}
__device__ __forceinline__ int sum(int x, int y) { return (int)((u32)x + (u32)y); }
__device__ __forceinline__ int difference(int x, int y) { return (int)((u32)x - (u32)y); }
__device__ __forceinline__ int product(int x, int y) { return (int)((u32)x * (u32)y); }
__device__ __forceinline__ int absolute(int x) { return x < 0 ? difference(0, x) : x; }
__device__ __forceinline__ int least(int x, int y) { return min(x, y); }
__device__ __forceinline__ int largest(int x, int y) { return max(x, y); }
__device__ __forceinline__ float sum(float x, float y) { return x + y; }
__device__ __forceinline__ float difference(float x, float y) { return x - y; }
__device__ __forceinline__ float product(float x, float y) { return x * y; }
__device__ __forceinline__ float absolute(float x) { return fabsf(x); }
__device__ __forceinline__ float least(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float largest(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
// e^x: x times log2(e) as a sum of two floats. Beyond +-200 nothing changes.
__device__ __forceinline__ float exponential(float x) {
  x = least(largest(x, -200.f), 200.f);
  const float y = x * 1.4426950408889634f, rest = __fmaf_rn(x, 1.9259629911266175e-8f, __fmaf_rn(x, 1.4426950408889634f, -y));
  return exp2_(y) * __fmaf_rn(rest, LN2, 1.f);
}
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }
// log(1 + e^x). The quotient restores the bits of t that 1 + t loses.
__device__ __forceinline__ float softplus(float x) {
  const float t = exponential(-fabsf(x)), y = 1.f + t;
  return largest(x, 0.f) + (y == 1.f ? t : logf(y) * __fdividef(t, y - 1.f));
}
template <class T> __device__ __forceinline__ T elementOf(const void* p, int i) { return ((const T*)p)[i]; }
