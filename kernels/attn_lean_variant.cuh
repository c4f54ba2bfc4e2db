// The rows of decode kernels, for the Variant that has scores (attn_variant.cuh).
#pragma once
#include "attn_variant.cuh"
#include "attn_tile.cuh"

// What becomes of the scores of an output tile. A lane has two rows of them.
template <class S> struct RowScores {
  using A = Attention<S>;
  using Place = typename S::Place;
  float slope[2];
  int place[2]; // of the rows among the keys
  int narrow;   // keys before that are hidden from some row
  int fresh;    // the first new token, where there is a tree: it hides only keys from there on

  // The packed row that is number i of a lane's.
  __device__ static __forceinline__ int packed(const Place& w, typename A::Mode mode, int rows, int lane, int i) {
    const int of = A::rowOf(mode, lane, i);
    return w.block * ROWS + (of < rows ? of : 0);
  }
  __device__ __forceinline__ RowScores(const Params& p, const Place& w, typename A::Mode mode, int rows, int lane) {
    const ScoreParams& score = scoreOf(p);
    const int before = w.s.keys - w.s.queries;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = packed(w, mode, rows, lane, i), n = positionOf(p, r);
      place[i] = before + n;
      slope[i] = score.slopes != nullptr ? score.slopes[w.head * p.group + r - n * p.group] : 0.f;
    }
    narrow = firstInWindow(score, w.s, before + positionOf(p, w.block * ROWS + rows - 1));
    fresh = score.trees != nullptr && score.details[w.seq].tree >= 0 ? before : 0x7fffffff;
  }
  __device__ static __forceinline__ Sinks sinksOf(const Params& p) { return {scoreOf(p).sinks}; }
  // The state that begins with the sinks of the lane's rows.
  __device__ static __forceinline__ void sink(const Params& p, const Place& w, typename A::Mode mode, int rows, int lane, typename A::State& st) {
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = packed(w, mode, rows, lane, i), n = positionOf(p, r);
      x[i] = sinkOf(scoreOf(p).sinks[w.head * p.group + r - n * p.group]);
    }
    st.sink(mode, lane, x);
  }

  // The rows as modifyScores wants them, with a chunk whose first key is number `first`.
  struct Chunk {
    static constexpr bool MANY = false;
    const Params& p;
    const Place& w;
    const RowScores& of;
    typename A::Mode mode;
    int rows, lane, first;
    const int (&limits)[2]; // from `first` on

    // `own`: the lane's first key, from `first` on.
    template <class Each> __device__ __forceinline__ void apply(int own, const Each& each) const {
      modifyScores(scoreOf(p), *this, first + own, each);
      maskScores<S::KEYS>(scoreOf(p), *this, first + own, each);
    }
    __device__ __forceinline__ int sequence() const { return w.seq; }
    __device__ __forceinline__ int row(int i) const { return packed(w, mode, rows, lane, i); }
    __device__ __forceinline__ int position(int i) const { return positionOf(p, row(i)); }
    __device__ __forceinline__ int head(int i) const { return w.head * p.group + row(i) - position(i) * p.group; }
    __device__ __forceinline__ float slope(int i) const { return of.slope[i]; }
    __device__ __forceinline__ int place(int i) const { return of.place[i]; }
    __device__ __forceinline__ int limit(int i) const { return first + limits[i]; }
    __device__ __forceinline__ int window() const { return windowOf(scoreOf(p), w.s); }
    __device__ __forceinline__ int narrow() const { return of.narrow; }
    __device__ __forceinline__ int fresh() const { return of.fresh; }
  };
};
