// The Variant that has scores (attn_variant.cuh) for keys and values of 8 bits: all of it but biases, which no cache has, and batch
// invariance, since the scales of other rows' values decide how weights are rounded.
#pragma once
#include "attn_invariant.cuh"
#include "attn_lean_variant.cuh"
#include "attn_narrow.cuh"

struct NarrowScoredParams {
  TensorMap keyMap, valueMap;
  Params p;
  ScoreParams score;
  MeetParams meet;
  const int* prefetched;
  NarrowParams narrow;
};

// The type of either, as a launch says: what is beside conversions is in the kernel once.
struct Eights {
  static constexpr int bytes = 1;
  static constexpr bool scaled = true, finds = Float8::finds, infinite = true;
  __device__ static __forceinline__ float unitOf(int type) { return type == Float8::type ? Float8::unit : Integer8::unit; }
  __device__ static __forceinline__ bool pairsOf(int type) { return type == Float8::type && Float8::pairs; }
  template <class F> __device__ static __forceinline__ void with(int type, const F& f) {
    if (type == Float8::type) f(Float8{});
    else f(Integer8{});
  }
};

struct NarrowScored : Scored {
  __device__ static __forceinline__ constexpr bool invariant(const Params&) { return false; }
};

// The rows of a lane, two of each set: RowScores of other decode kernels has two in all.
template <class S> struct NarrowRows {
  using A = NarrowTile<S>;
  using Place = typename S::Place;
  static constexpr int SETS = A::SETS;
  const Params& p;
  const Place& w;
  int rows, above, lane;
  float slope[SETS][2];
  int narrow, fresh; // as RowScores

  // The packed row that is number j of the lane's in a set.
  __device__ __forceinline__ int packed(int set, int j) const {
    const int of = above + 8 * set + 2 * (lane & 3) + j;
    return w.block * ROWS + (of < rows ? of : 0);
  }
  __device__ __forceinline__ int headOf(int r) const { return w.head * p.group + r - positionOf(p, r) * p.group; }
  __device__ __forceinline__ NarrowRows(const Params& p, const Place& w, typename A::Mode, int rows, int above, int lane) : p(p), w(w), rows(rows), above(above), lane(lane) {
    const ScoreParams& score = scoreOf(p);
    const int before = w.s.keys - w.s.queries;
#pragma unroll
    for (int i = 0; i < 2 * SETS; i++) slope[i >> 1][i & 1] = score.slopes != nullptr ? score.slopes[headOf(packed(i >> 1, i & 1))] : 0.f;
    narrow = firstInWindow(score, w.s, before + positionOf(p, w.block * ROWS + rows - 1));
    fresh = score.trees != nullptr && score.details[w.seq].tree >= 0 ? before : 0x7fffffff;
  }
  // The state that begins with the sinks of the lane's rows.
  __device__ __forceinline__ void sink(typename A::State& st) const {
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      const float x[2] = {sinkOf(scoreOf(p).sinks[headOf(packed(set, 0))]), sinkOf(scoreOf(p).sinks[headOf(packed(set, 1))])};
      st.sink(lane, set, x);
    }
  }

  // The rows of a set as maskScores wants them, with a unit whose first key is number `first`.
  struct Set {
    const NarrowRows& of;
    int set, first;
    __device__ __forceinline__ int sequence() const { return of.w.seq; }
    __device__ __forceinline__ int position(int i) const { return positionOf(of.p, of.packed(set, i)); }
    __device__ __forceinline__ int place(int i) const { return of.w.s.keys - of.w.s.queries + position(i); }
    __device__ __forceinline__ int window() const { return windowOf(scoreOf(of.p), of.w.s); }
    __device__ __forceinline__ int narrow() const { return of.narrow; }
    __device__ __forceinline__ int fresh() const { return of.fresh; }
  };
  struct Unit {
    const NarrowRows& of;
    int first;
    // `own`: the lane's first key, from `first` on.
    template <class Each> __device__ __forceinline__ void apply(int set, int own, const Each& each) const {
      const Set rows{of, set, first};
      const ScoreParams& score = scoreOf(of.p);
      if (score.cap != 0.f) each([&](float x, int, int) { return score.cap * tanh_(x * score.reciprocal); });
      if (score.slopes != nullptr) {
        const float from[2] = {(float)(first + own - rows.place(0)), (float)(first + own - rows.place(1))};
        each([&](float x, int i, int n) { return __fmaf_rn(of.slope[set][i], from[i] + (float)n, x); });
      }
      maskScores<A::UNIT>(score, rows, first + own, each);
    }
  };
};

#define NARROW_SCORED_ATTENTION(name, D) NARROW_ENTRY(name, NarrowScoredParams, Eights, D, NarrowScored)
