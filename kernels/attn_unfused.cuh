// Attention as graphs have it without this library, to be compared with: scores,
// their softmax, and the sum of the values that it weighs, in three launches with
// the scores in memory between them. Every query head reads keys and values for
// itself, and no context is split.
#pragma once
#include "attn_work.cuh"

struct UnfusedParams {
  Params p;
  float* scores; // of each row, query head and key of its sequence, one behind the other
  int dim, kind; // of keys and values
};

constexpr int UNFUSED_THREADS = 256, UNFUSED_WARPS = UNFUSED_THREADS / 32;
constexpr int UNFUSED_KEYS = 256; // whose scores a thread block computes at once
constexpr int UNFUSED_EACH = 8;   // keys that a warp has on their way together
constexpr int UNFUSED_PAIRS = 4;  // of elements that a lane has, at most: of 256

// A row and query head of a sequence.
struct UnfusedRow {
  const Seq* s;
  int query, head, visible; // keys that it sees
  long long scores;         // where its own begin

  __device__ __forceinline__ UnfusedRow(const UnfusedParams& u, const Seq* s_, long long first, int number) {
    const int heads = u.p.heads * u.p.group;
    s = s_, query = number / heads, head = number - query * heads;
    visible = u.p.causal ? s->keys - s->queries + query + 1 : s->keys;
    scores = first + (long long)number * s->keys;
  }
  // Where key j is, in elements.
  __device__ __forceinline__ long long key(const UnfusedParams& u, int j) const {
    long long row;
    if (u.p.pages == nullptr) {
      row = (long long)s->pages * u.p.pageRows + j;
    } else {
      const int n = j / u.p.pageTokens;
      row = (long long)u.p.pages[s->pages + n] * u.p.pageRows + j - n * u.p.pageTokens;
    }
    return (row + (long long)(head / u.p.group) * u.p.headRows) * u.dim;
  }
};

// Gives the thread blocks the rows of all sequences, each in `parts` of a sequence, in turn.
template <class Parts, class Run> __device__ __forceinline__ void eachRow(const UnfusedParams& u, const Parts& parts, const Run& run) {
  const int heads = u.p.heads * u.p.group;
  long long first = 0, task = blockIdx.x;
  for (const Seq* s = u.p.seqs; s->queries > 0; s++) { // one without queries is behind the last
    const int each = parts(*s);
    const long long all = (long long)s->queries * heads * each;
    for (; task < all; task += gridDim.x) run(UnfusedRow(u, s, first, (int)(task / each)), (int)(task % each));
    task -= all;
    first += (long long)s->queries * heads * s->keys;
  }
}

// scores = scale * q K^T, of base 4.
template <class Store> __device__ __forceinline__ void unfusedScores(const UnfusedParams& u) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  eachRow(u, [](const Seq& s) { return (s.keys + UNFUSED_KEYS - 1) / UNFUSED_KEYS; }, [&](const UnfusedRow& r, int part) {
    float2 q[UNFUSED_PAIRS];
    const long long from = (long long)(r.s->row + r.query) * u.p.queryRow + r.head * u.p.queryHead;
#pragma unroll
    for (int c = 0; c < UNFUSED_PAIRS; c++) {
      const int i = c * 64 + lane * 2;
      q[c] = i < u.dim ? make_float2(loadAs(u.p.query, from + i, u.p.queryType), loadAs(u.p.query, from + i + 1, u.p.queryType)) : make_float2(0.f, 0.f);
    }
    const int begin = part * UNFUSED_KEYS + warp * (UNFUSED_KEYS / UNFUSED_WARPS), end = min(begin + UNFUSED_KEYS / UNFUSED_WARPS, r.visible);
    for (int j = begin; j < end; j += UNFUSED_EACH) {
      float sum[UNFUSED_EACH];
#pragma unroll
      for (int k = 0; k < UNFUSED_EACH; k++) {
        const long long at = r.key(u, min(j + k, end - 1));
        sum[k] = 0.f;
#pragma unroll
        for (int c = 0; c < UNFUSED_PAIRS; c++) {
          const int i = c * 64 + lane * 2;
          const float2 x = i < u.dim ? Store::load2(u.p.keys, at + i) : make_float2(0.f, 0.f);
          sum[k] += q[c].x * x.x + q[c].y * x.y;
        }
      }
      float mine = 0.f;
#pragma unroll
      for (int k = 0; k < UNFUSED_EACH; k++) {
#pragma unroll
        for (int i = 16; i > 0; i /= 2) sum[k] += __shfl_xor_sync(~0u, sum[k], i);
        if (lane == k) mine = sum[k];
      }
      if (lane < UNFUSED_EACH && j + lane < end) u.scores[r.scores + j + lane] = mine * u.p.scale;
    }
  });
}

// Scores become weights, and leave their log-sum-exp.
__device__ __forceinline__ void unfusedSoftmax(const UnfusedParams& u) {
  __shared__ float scratch[UNFUSED_WARPS];
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  eachRow(u, [](const Seq&) { return 1; }, [&](const UnfusedRow& r, int) {
    if (r.visible <= 0) return;
    float* const x = u.scores + r.scores;
    float top = -LEAN_INF, sum = 0.f;
    for (int j = threadIdx.x; j < r.visible; j += UNFUSED_THREADS) top = fmaxf(top, x[j]);
    top = foldBlock(top, scratch, [](float a, float b) { return fmaxf(a, b); });
    const RowWeights<MmaTF32> weights(top);
    for (int j = threadIdx.x; j < r.visible; j += UNFUSED_THREADS) {
      const float e = weights.of(x[j]);
      sum += e, x[j] = e;
    }
    sum = foldBlock(sum, scratch, [](float a, float b) { return a + b; });
    const float f = sum == 0.f ? 0.f : 1.f / sum;
    for (int j = threadIdx.x; j < r.visible; j += UNFUSED_THREADS) x[j] *= f;
    if (threadIdx.x == 0 && u.p.lse != nullptr)
      u.p.lse[(r.s->row + r.query) * u.p.lseRow + r.head * u.p.lseHead] = sum == 0.f ? -LEAN_INF : logSum(top, log2_(sum));
  });
}

// out = weights V, and what rows get that see no key.
template <class Store> __device__ __forceinline__ void unfusedSum(const UnfusedParams& u) {
  __shared__ float2 scratch[UNFUSED_WARPS][UNFUSED_PAIRS * 32];
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const Params& p = u.p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  eachRow(u, [](const Seq&) { return 1; }, [&](const UnfusedRow& r, int) {
    if (r.visible <= 0) return;
    float2 sum[UNFUSED_PAIRS];
#pragma unroll
    for (int c = 0; c < UNFUSED_PAIRS; c++) sum[c] = make_float2(0.f, 0.f);
    for (int j = warp * UNFUSED_EACH; j < r.visible; j += UNFUSED_THREADS / 32 * UNFUSED_EACH) {
#pragma unroll
      for (int k = 0; k < UNFUSED_EACH; k++) {
        const bool there = j + k < r.visible; // 0 times what lies behind may be NaN
        const float w = there ? u.scores[r.scores + j + k] : 0.f;
        const long long at = r.key(u, there ? j + k : j);
#pragma unroll
        for (int c = 0; c < UNFUSED_PAIRS; c++) {
          const int i = c * 64 + lane * 2;
          const float2 x = there && i < u.dim ? Store::load2(p.values, at + i) : make_float2(0.f, 0.f);
          sum[c].x += w * x.x, sum[c].y += w * x.y;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < UNFUSED_PAIRS; c++) scratch[warp][c * 32 + lane] = sum[c];
    __syncthreads();
    const long long to = (r.s->row + r.query) * p.outRow + r.head * p.outHead;
    for (int i = threadIdx.x; i < u.dim / 2; i += UNFUSED_THREADS) {
      float2 x = scratch[0][i];
      for (int w = 1; w < UNFUSED_WARPS; w++) x.x += scratch[w][i].x, x.y += scratch[w][i].y;
      storeAs(p.out, to + 2 * i, p.outType, x.x), storeAs(p.out, to + 2 * i + 1, p.outType, x.y);
    }
    __syncthreads();
  });
  writeFullyMasked(p, *p.masked, u.dim, p.lse, threadIdx.x, UNFUSED_THREADS, [&](long long at) { storeAs(p.out, at, p.outType, 0.f); });
}
