// Masks other than causal, and score modifications (attn_score.cuh), in output tiles of few rows.
#pragma once
#include "attn_score.cuh"
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

  // The rows as modifyScores wants them, with a chunk whose first key is number `key`.
  struct Chunk {
    static constexpr bool MANY = false;
    const Params& p;
    const Place& w;
    const RowScores& of;
    typename A::Mode mode;
    int rows, lane, key;
    const int (&limit)[2];

    template <class Each> __device__ __forceinline__ void apply(const Each& each) const { modifyScores<S::KEYS, true>(scoreOf(p), *this, key, each); }
    __device__ __forceinline__ float slope(int i) const { return of.slope[i]; }
    __device__ __forceinline__ int place(int i) const { return of.place[i]; }
    __device__ __forceinline__ int window() const { return windowOf(scoreOf(p), w.s); }
    __device__ __forceinline__ int narrow() const { return of.narrow; }
    __device__ __forceinline__ int fresh() const { return of.fresh; }
    template <class Each> __device__ __forceinline__ void addBias(const ScoreParams& score, const Each& each) const {
      long long at[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = packed(w, mode, rows, lane, i), n = positionOf(p, r);
        at[i] = biasAt(score, w.seq, w.head * p.group + r - n * p.group, n, key);
      }
      each([&](float x, int i, int n) { return n < limit[i] ? __fmaf_rn(loadAs(score.bias, at[i] + n, score.biasType), score.biasFactor, x) : x; });
    }
    template <class Each> __device__ __forceinline__ void hideByTree(const ScoreParams& score, const Each& each) const {
      u64 seen[2];
#pragma unroll
      for (int i = 0; i < 2; i++) seen[i] = tokensOf(score, w.seq, positionOf(p, packed(w, mode, rows, lane, i)));
      each([&](float x, int i, int n) {
        const int token = key + n - of.fresh;
        return token >= 0 && (seen[i] >> min(token, 63) & 1) == 0 ? -LEAN_INF : x;
      });
    }
  };
};
