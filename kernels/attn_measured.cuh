// Decode attention that measures its weights: entropies of rows, and attention mass, the sums of weights over some keys. Beside outputs,
// a launch leaves two numbers of each row and chunk of keys. A launch behind it makes the results of them, and clears them: between
// launches all are zero.
#pragma once
#include "attn_lean.cuh"
#include "attn_lean_variant.cuh"

// Of the weights of a chunk's keys among themselves: the log-sum-exp of the scores, to base 4, and the entropy to this base, negated. -0 is an
// entropy of 0. Where the second number has no bit, no key was seen.
struct MeasureParams {
  float2* sums; // `chunks` for each log-sum-exp
  int chunks;
};
// They lie behind ScoreParams.
__device__ __forceinline__ const MeasureParams& measureOf(const Params& p) { return *(const MeasureParams*)(&scoreOf(p) + 1); }

struct MeasuredLaunchParams {
  TensorMap keyMap, valueMap;
  Params p;
  ScoreParams score;
  MeasureParams measure;
  MeetParams meet;
  const int* prefetched;
};

// InvariantTiles (attn_invariant.cuh) of launches that have none.
template <class S> struct InvariantTiles {
  template <class... X> __device__ __forceinline__ InvariantTiles(const X&...) {}
  template <class... X> __device__ __forceinline__ void combine(const X&...) {}
  template <class... X> __device__ __forceinline__ void settle(const X&...) {}
};

template <class S> struct MeasuredRows;

// The Variant, as Plain describes what a Variant has.
struct Measured : Scored {
  template <class S> using Rows = MeasuredRows<S>;
  __device__ static __forceinline__ constexpr bool invariant(const Params&) { return false; }
};

template <class S> struct MeasuredRows : RowScores<S> {
  using Base = RowScores<S>;
  using typename Base::A, typename Base::Place;
  using Base::Base;
  struct Chunk : Base::Chunk {
    template <class... X> __device__ __forceinline__ Chunk(const X&... x) : Base::Chunk{x...} {}
    template <class Each> __device__ __forceinline__ void apply(int own, const Each& each) const {
      Base::Chunk::apply(own, each);
      measure(own, each);
    }
    // f of all lanes that have scores of the lane's row.
    template <class F> __device__ __forceinline__ float ofRow(float x, const F& f) const {
      const bool narrow = this->mode == A::NARROW;
      for (int i = narrow ? 4 : 1; i < (narrow ? 32 : 4); i *= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
      return x;
    }
    template <class Each> __device__ __forceinline__ void measure(int own, const Each& each) const {
      const int seen[2] = {this->limits[0] - own, this->limits[1] - own}; // the row sees so many keys, from the lane's first one on
      float top[2] = {-LEAN_INF, -LEAN_INF}, base[2], l[2] = {0.f, 0.f}, t[2] = {0.f, 0.f};
      each([&](float x, int i, int n) {
        if (n < seen[i]) top[i] = fmaxf(top[i], x);
        return x;
      });
#pragma unroll
      for (int i = 0; i < 2; i++) {
        top[i] = ofRow(top[i], [](float x, float y) { return fmaxf(x, y); });
        base[i] = top[i] == -LEAN_INF ? 0.f : top[i];
      }
      each([&](float x, int i, int n) {
        const float y = x - base[i], w = n < seen[i] ? exp4_(y) : 0.f;
        l[i] += w;
        if (w > 0.f) t[i] = __fmaf_rn(w, y, t[i]); // the score of a hidden key is -Inf
        return x;
      });
      const MeasureParams& m = measureOf(this->p);
      const auto sum = [](float x, float y) { return x + y; };
      const bool writes = this->mode == A::NARROW ? this->lane < 4 : this->lane % 4 == 0;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (i > 0 && this->mode == A::NARROW) break;
        l[i] = ofRow(l[i], sum), t[i] = ofRow(t[i], sum);
        if (!writes || A::rowOf(this->mode, this->lane, i) >= this->rows || l[i] == 0.f) continue;
        const float log4l = 0.5f * log2f(l[i]);
        const long long at = (this->w.s.row + this->position(i)) * this->p.lseRow + this->head(i) * this->p.lseHead;
        m.sums[at * m.chunks + this->first / S::KEYS] = make_float2(top[i] + log4l, -fmaxf(log4l - t[i] / l[i], 0.f));
      }
    }
  };
};

#define MEASURED_ATTENTION(name, T, ...) LEAN_ENTRY(name, MeasuredLaunchParams, T, Measured, __VA_ARGS__)

// The launch that makes the results. A result is where the log-sum-exp of a row is, for Mass with `places` LeanTiles of `each` chunks.
struct MeasuredRowsParams {
  float2* sums;
  const Seq* seqs;
  const float* sinks; // null: none
  float *mass, *entropy; // null: not wanted
  long long lseRow, lseHead; // strides, in elements
  int sequences, rows; // rows 0: the rows of the sequences
  int heads, chunks, each, places;
};

template <class F> __device__ __forceinline__ float ofWarp(float x, const F& f) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
  return x;
}

// By a warp.
__device__ __forceinline__ void measureRow(const MeasuredRowsParams& p, long long at, int head, int lane) {
  float2* const sums = p.sums + at * p.chunks;
  const auto seen = [](float2 x) { return __float_as_uint(x.y) != 0; };
  const auto sum = [](float x, float y) { return x + y; };
  const float sink = p.sinks == nullptr ? -LEAN_INF : sinkOf(p.sinks[head]);
  float top = sink, l = 0.f, entropy = 0.f;
  for (int c = lane; c < p.chunks; c += 32) {
    const float2 x = sums[c];
    if (seen(x)) top = fmaxf(top, x.x);
  }
  top = ofWarp(top, [](float x, float y) { return fmaxf(x, y); });
  const float base = top == -LEAN_INF ? 0.f : top;
  for (int c = lane; c < p.chunks; c += 32) {
    const float2 x = sums[c];
    if (seen(x)) l += exp2f(2.f * (x.x - base));
  }
  l = ofWarp(l, sum) + exp2f(2.f * (sink - base));
  const float log4l = 0.5f * log2f(l);
  if (p.entropy != nullptr) {
    for (int c = lane; c < p.chunks; c += 32) {
      const float2 x = sums[c];
      const float own = x.x - base, w = seen(x) ? exp2f(2.f * own) / l : 0.f;
      if (w != 0.f) entropy = __fmaf_rn(w, log4l - own - x.y, entropy);
    }
    entropy = ofWarp(entropy, sum);
    if (lane == 0) p.entropy[at] = entropy * 1.3862943611198906f; // ln 4
  }
  if (p.mass != nullptr)
    for (int i = lane; i < p.places; i += 32) {
      float mass = 0.f;
      for (int c = i * p.each; c < min((i + 1) * p.each, p.chunks); c++) {
        const float2 x = sums[c];
        if (seen(x)) mass += exp2f(2.f * (x.x - base)) / l;
      }
      p.mass[at * p.places + i] = mass;
    }
  __syncwarp();
  for (int c = lane; c < p.chunks; c += 32)
    if (seen(sums[c])) sums[c] = make_float2(0.f, 0.f);
}

// A warp has a row and a head, or a thread block a sequence and a head.
extern "C" __global__ void measured_rows(const __grid_constant__ MeasuredRowsParams p) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const auto measure = [&](int row, int head) { measureRow(p, row * p.lseRow + head * p.lseHead, head, lane); };
  if (p.rows > 0) {
    for (int n = blockIdx.x * warps + warp; n < p.rows * p.heads; n += gridDim.x * warps) measure(n / p.heads, n % p.heads);
    return;
  }
  for (int n = blockIdx.x; n < p.sequences * p.heads; n += gridDim.x) {
    const Seq s = p.seqs[n / p.heads];
    for (int k = warp; k < s.queries; k += warps) measure(s.row + k, n % p.heads);
  }
}
