// The rows of prefill kernels, for the Variant that has scores (attn_variant.cuh).
#pragma once
#include "attn_variant.cuh"

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

// Steps that need a softmax and nothing else: those whose first key is in [from, to].
struct Quiet {
  int from, to;
  __device__ __forceinline__ bool has(int key) const { return from <= key && key <= to; }
};

// Replaces products x by scores cap tanh(by[i] x / cap) if all scores of the warp are below 0.3 of the cap, as most are. Otherwise nothing
// changes, and false is returned. tanh(t)/t is a polynomial in t^2, to 2^-24 where |t| < 0.3, and the scale is a part of the coefficients.
// The polynomial of capScores, for scores up to 0.65 of the cap, is longer.
template <class Each> __device__ __forceinline__ bool capProducts(const ScoreParams& score, const float (&by)[2], const Each& each) {
  float most[2] = {0.f, 0.f};
  each([&](float x, int i, int) {
    most[i] = fmaxf(most[i], fabsf(x));
    return x;
  });
  const float t[2] = {by[0] * score.reciprocal, by[1] * score.reciprocal};
  if (!__all_sync(~0u, fmaxf(fabsf(most[0] * t[0]), fabsf(most[1] * t[1])) < 0.3f)) return false;
  const float a[2] = {-0.333332861f * by[0], -0.333332861f * by[1]}, b[2] = {0.133238735f * by[0], 0.133238735f * by[1]}, c[2] = {-0.0511326762f * by[0], -0.0511326762f * by[1]};
  each([&](float x, int i, int) {
    const float w = x * t[i], z = w * w;
    return x * __fmaf_rn(__fmaf_rn(__fmaf_rn(c[i], z, b[i]), z, a[i]), z, by[i]);
  });
  return true;
}

// What becomes of the scores of a lane's rows, `row` and row+8 of an output tile. P and Tile are those of
// attn_prefill_rows.cuh.
template <int KEYS, class P, class Tile> struct PrefillScores {
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
  // The steps in which no score changes and no key is hidden from a row. All rows of the consumer see the keys before `all`.
  // These steps have no values to clear, either: clearUnseen clears what all rows of the output tile don't see.
  __device__ __forceinline__ Quiet quiet(int all) const { return {scoreOf(p).changes ? 0x7fffffff : narrow, min(all, fresh) - KEYS}; }
  // Row number i of the lane's among those of the sequence: the last one in place of what is behind it.
  __device__ __forceinline__ int packed(int i) const { return min(t.first + row + 8 * i, t.rows - 1); }
  __device__ __forceinline__ int headOf(int i) const { return t.head * p.group + packed(i) - position[i] * p.group; }

  // The rows as modifyScores wants them. Rows see keys below their limits.
  struct Step {
    static constexpr bool MANY = true;
    const PrefillScores& of;
    const int (&limits)[2];
    __device__ __forceinline__ int sequence() const { return of.t.seq; }
    __device__ __forceinline__ int position(int i) const { return of.position[i]; }
    __device__ __forceinline__ int head(int i) const { return of.headOf(i); }
    __device__ __forceinline__ float slope(int i) const { return scoreOf(of.p).slopes[of.headOf(i)]; }
    __device__ __forceinline__ int place(int i) const { return of.before + of.position[i]; }
    __device__ __forceinline__ int limit(int i) const { return limits[i]; }
    __device__ __forceinline__ int window() const { return windowOf(scoreOf(of.p), of.t.s); }
    __device__ __forceinline__ int narrow() const { return of.narrow; }
    __device__ __forceinline__ int fresh() const { return of.fresh; }
  };
  // The scores x of a lane. Keys are counted from the lane's first one on: their numbers are constants then.
  struct Each {
    float (&x)[KEYS / 8][4];
    template <class F> __device__ __forceinline__ void operator()(const F& f) const {
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[j][e] = f(x[j][e], e >> 1, j * 8 + (e & 1));
    }
    // Where f is long and rare: its code is there for a quarter of the scores, which take turns at these registers.
    template <class F> __device__ __forceinline__ void inTurn(const F& f) const {
      constexpr int N = KEYS / 32;
#pragma unroll 1
      for (int turn = 0; turn < 4; turn++) {
        float first[N][4];
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) first[j][e] = f(x[j][e]);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) x[j][e] = j + N < KEYS / 8 ? x[j + N][e] : first[j + N - KEYS / 8][e];
      }
    }
  };
  // Makes scores of products x with the keys of a step, of which the first is number `key`, by factors of the rows, and masks
  // these. Where scores are not changed, products are masked.
  __device__ __forceinline__ void apply(float (&x)[KEYS / 8][4], const float (&by)[2], int key, const int (&limits)[2], int lane) const {
    const Each each{x};
    const ScoreParams& score = scoreOf(p);
    const Step rows{*this, limits};
    const int first = key + lane % 4 * 2;
    if (score.changes) {
      ScoreParams rest = score;
      if (score.cap != 0.f && capProducts(score, by, each)) rest.cap = 0.f; // other changes follow
      else each([&](float s, int i, int) { return s * by[i]; });
      modifyScores(rest, rows, first, each);
    }
    maskScores<KEYS>(score, rows, first, each);
  }
};

// Where there are none.
struct NoPrefillScores {
  template <class P, class Tile> __device__ __forceinline__ NoPrefillScores(const P&, const Tile&, int, int) {}
  __device__ __forceinline__ Quiet quiet(int) const { return {}; }
};
