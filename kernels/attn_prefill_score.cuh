// Masks other than causal, and score modifications (attn_score.cuh), in output tiles of many rows.
#pragma once
#include "attn_score.cuh"

// A Format with masks other than causal, and attention sinks, but without what changes scores: for kernels of their own, which
// are nearly as fast as those with causal masks alone.
template <class F> struct Masked : F {};
template <class F> struct Modified<Masked<F>> : Modified<Scored<F>> {};
template <class T> struct Changed {
  enum : bool { scores = false };
};
template <class F> struct Changed<Scored<F>> {
  enum : bool { scores = true };
};

// Output tiles are cut, and keys left out, in multiples of so many: cutKeys of internal/gpu/attention.
constexpr int CUT_KEYS = 128;

// The steps of an output tile, KEYS keys each. With a window those between the sink tokens and what its first row sees
// are left out.
template <int KEYS, bool SCORED> struct KeySteps {
  // The first key of step number c.
  __device__ __forceinline__ int keyOf(int c) const { return c * KEYS; }
};
template <int KEYS> struct KeySteps<KEYS, true> {
  int seq;        // whose keys these are
  int front, gap; // steps with sink tokens, and how many behind these are left out
  int hidden;     // no row sees a key before this one, but for sink tokens
  __device__ __forceinline__ int keyOf(int c) const { return (c < front ? c : c + gap) * KEYS; }
  // place: that of the first row among the keys.
  __device__ __forceinline__ void leaveOut(const ScoreParams& score, const Seq& s, int of, int place) {
    seq = of, hidden = firstInWindow(score, s, place);
    const int sinks = (min(score.sinkTokens, hidden) + CUT_KEYS - 1) / CUT_KEYS;
    front = sinks * (CUT_KEYS / KEYS), gap = max(hidden / CUT_KEYS - sinks, 0) * (CUT_KEYS / KEYS);
  }
  // The keys of a step that no row sees, [from, to) of them, where its first one is number `key`. Their values may be
  // anything, and no weight of 0 makes a number of what is none.
  __device__ __forceinline__ int hiddenFrom(const ScoreParams& score, int key) const { return max(score.sinkTokens - key, 0); }
  __device__ __forceinline__ int hiddenTo(int key) const { return min(hidden - key, KEYS); }
};

// What becomes of the scores of a lane's rows, `row` and row+8 of an output tile. P and Tile are those of
// attn_prefill_rows.cuh.
template <int KEYS, class P, class Tile, bool CHANGED> struct PrefillScores {
  const P& p;
  const Tile& t;
  int row, before;      // before: keys in front of that of query position 0
  int position[2];      // of the lane's rows
  int narrow, fresh;    // see modifyScores

  // last: of the rows of an output tile that `narrow` is to be for.
  __device__ __forceinline__ PrefillScores(const P& p, const Tile& t, int row, int last) : p(p), t(t), row(row), before(t.s.keys - t.s.queries) {
    const ScoreParams& score = scoreOf(p);
    position[0] = packed(0) / p.group, position[1] = packed(1) / p.group; // the quotients take as long as some of what is done in a step
    narrow = firstInWindow(score, t.s, before + min(t.first + last, t.rows - 1) / p.group);
    fresh = score.trees != nullptr && score.details[t.seq].tree >= 0 ? before : 0x7fffffff;
  }
  // Row number i of the lane's among those of the sequence: the last one in place of what is behind it.
  __device__ __forceinline__ int packed(int i) const { return min(t.first + row + 8 * i, t.rows - 1); }
  __device__ __forceinline__ int headOf(int i) const { return t.head * p.group + packed(i) - position[i] * p.group; }

  // The rows as modifyScores wants them.
  struct Step {
    static constexpr bool MANY = true;
    const PrefillScores& of;
    const int (&limits)[2];
    int key;
    __device__ __forceinline__ float slope(int i) const { return scoreOf(of.p).slopes[of.headOf(i)]; }
    __device__ __forceinline__ int place(int i) const { return of.before + of.position[i]; }
    __device__ __forceinline__ int window() const { return windowOf(scoreOf(of.p), of.t.s); }
    __device__ __forceinline__ int narrow() const { return of.narrow; }
    __device__ __forceinline__ int fresh() const { return of.fresh; }
    template <class Each> __device__ __forceinline__ void addBias(const ScoreParams& score, const Each& each) const {
      long long at[2];
#pragma unroll
      for (int i = 0; i < 2; i++) at[i] = biasAt(score, of.t.seq, of.headOf(i), of.position[i], key);
      const int limit[2] = {limits[0] - key, limits[1] - key};
      // Around all elements, so that their loads do not wait for each other.
      withStore(score.biasType, [&](auto b) { each([&](float x, int i, int n) { return n < limit[i] ? __fmaf_rn(decltype(b)::load(score.bias, at[i] + n), score.biasFactor, x) : x; }); });
    }
    template <class Each> __device__ __forceinline__ void hideByTree(const ScoreParams& score, const Each& each) const {
      u32 hidden[2][4]; // a bit for each key from the lane's first one on: in front of the new tokens there are none
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u64 tokens = ~tokensOf(score, of.t.seq, of.position[i]);
        const int by = of.fresh - key; // less than KEYS
        u64 low = by >= 64 ? 0 : by >= 0 ? tokens << by : by > -64 ? tokens >> -by : 0, high = by >= 64 ? tokens << (by - 64) : by > 0 ? tokens >> (64 - by) : 0;
        hidden[i][0] = (u32)low, hidden[i][1] = (u32)(low >> 32), hidden[i][2] = (u32)high, hidden[i][3] = (u32)(high >> 32);
      }
      each([&](float x, int i, int n) { return hidden[i][n / 32] >> n % 32 & 1 ? -LEAN_INF : x; });
    }
  };
  // Makes scores of products x with the keys of a step, of which the first is number `key`, by factors of the rows, and masks these.
  // Where scores are not changed, products are masked. Rows see keys below their limits.
  __device__ __forceinline__ void apply(float (&x)[KEYS / 8][4], const float (&by)[2], int key, const int (&limits)[2], int lane) const {
    // Keys are counted from the lane's first one on: their numbers are constants then.
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[j][e] = f(x[j][e], e >> 1, j * 8 + (e & 1));
    };
    if constexpr (CHANGED) each([&](float s, int i, int) { return s * by[i]; });
    const int first = key + lane % 4 * 2;
    modifyScores<KEYS, CHANGED>(scoreOf(p), Step{*this, limits, first}, first, each);
  }
};

// Where there are none.
struct NoPrefillScores {
  template <class P, class Tile> __device__ __forceinline__ NoPrefillScores(const P&, const Tile&, int, int) {}
};
