// The Variant of attention that has everything: score modifications, masks other than causal, attention sinks and batch
// invariance. Which of them a launch has is known at run time. A score x of base 4, of query head h at place p with key j,
// becomes
//
//	x = cap tanh(x / cap)
//	x = x + slope(h) (j - p)
//	x = x + bias(sequence, h, position, j)
//
// in this order, as internal/attn has it, and then -Inf where a window or a tree hides the key. An attention sink is one more
// score in the softmax of its head, with a value of 0: the state that keys are merged into begins with the sink.
//
// A new score change is a parameter in ScoreParams and a step of modifyScores. Decode kernels (attn_lean_variant.cuh) and
// prefill kernels (attn_prefill_variant.cuh) call modifyScores with what they know of a lane's rows.
#pragma once
#include "attn_work.cuh"

// A sequence's number among those of the bias, and its first place in trees; -1: it has no tree.
struct SeqDetail {
  int number, tree;
};

// The parameters of the Variant.
struct ScoreParams {
  const float* slopes;        // of ALiBi, one for each query head, times log4(e); null: none
  const float* sinks;         // attention sinks, one for each query head; null: none
  const void* bias;           // null: none
  const u64* trees;           // which of a sequence's new tokens each of them sees, a bit for each; null: all before it
  const SeqDetail* details;   // of each sequence, where there is a bias or a tree
  const int* cuts;            // of each sequence, at its first row of queries: its window is so many keys narrower, since these were cut out of what the window holds; null: none
  long long biasSequence, biasHead, biasRow; // strides of the bias, in elements; 0: shared
  float cap, reciprocal;      // soft cap, times log4(e), and its reciprocal; cap 0: none
  float biasFactor;           // on the bias, times log4(e)
  int biasType;
  int window;                 // keys that a query sees at most, up to its own; 0: no window
  int sinkTokens;             // the first keys, which it sees besides
  int changes;                // 0: there are masks alone, so prefill kernels leave the scale to the softmax
  int invariant;              // the bits of a row depend on nothing but the row: attn_invariant.cuh
};
// They lie right behind Params.
__device__ __forceinline__ const ScoreParams& scoreOf(const Params& p) { return *(const ScoreParams*)(&p + 1); }

struct ScoredLaunchParams { // of decode kernels
  TensorMap keyMap, valueMap;
  Params p;
  ScoreParams score;
  MeetParams meet;
  const int* prefetched;
};

// An attention sink as a score of base 4.
__device__ __forceinline__ float sinkOf(float x) { return x * 0.72134752044448170f; } // log4(e)

// Attention sinks as log-sum-exps of rows that see no key.
struct Sinks {
  const float* of; // of query heads; null: none
  __device__ __forceinline__ float operator()(int head) const { return of == nullptr ? -LEAN_INF : of[head]; }
};

// The window of a sequence, if there is one. What it hides is the same with what was cut out and without: places behind the cut
// are as many keys nearer to the first one as the window is narrower.
__device__ __forceinline__ int windowOf(const ScoreParams& score, const Seq& s) { return score.cuts == nullptr ? score.window : score.window - score.cuts[s.row]; }

// The first key that the query at a place of the keys sees besides sink tokens. A window that begins before their end,
// or right behind it, leaves no key out.
__device__ __forceinline__ int firstInWindow(const ScoreParams& score, const Seq& s, int place) {
  if (score.window == 0) return 0;
  const int window = windowOf(score, s), first = window > place ? 0 : place - window + 1;
  return first <= score.sinkTokens ? 0 : first;
}

template <class S> struct RowScores; // attn_lean_variant.cuh

// The Variant, as Plain describes what a Variant has.
struct Scored {
  static constexpr bool scores = true;
  enum : int { ROWS = ::ROWS };
  // Of an output tile the chunks of a sequence's keys that have sink tokens, and those from the first key on that the tile's first
  // row sees.
  struct Chunks {
    int front, gap; // chunks of sink tokens, and how many behind these are left out
    int hidden;     // no row sees a key before this one, but for sink tokens
    int skipped;    // with batch invariance: chunks of the LeanTile that are left out, since no row sees them
    __device__ __forceinline__ int chunkAt(int c) const { return c < front ? c : c + gap; }
    __device__ __forceinline__ int numberOf(int c) const { return c < front ? c : c - gap; } // the other way round
    __device__ __forceinline__ int sinkTokens(const Params& p) const { return scoreOf(p).sinkTokens; }
    __device__ __forceinline__ bool hides(const Params& p, int key) const { return key < hidden && key >= scoreOf(p).sinkTokens; } // from all rows
    // The gap of an output tile whose first row is at a place of the keys.
    template <int CHUNK> __device__ __forceinline__ int leaveOut(const Params& p, const Seq& s, int place) {
      const ScoreParams& score = scoreOf(p);
      hidden = firstInWindow(score, s, place);
      front = (min(score.sinkTokens, hidden) + CHUNK - 1) / CHUNK;
      gap = max(hidden / CHUNK - front, 0);
      if (score.invariant) gap &= -(1 << p.tileShift); // whole LeanTiles
      return gap;
    }
  };
  template <class S> using Rows = RowScores<S>;
  __device__ static __forceinline__ bool invariant(const Params& p) { return scoreOf(p).invariant != 0; }
};

// tanh, to 2^-22 or so of it. Where it is small 1 less a number near 1 would lose bits.
__device__ __forceinline__ float tanh_(float x) {
  const float x2 = x * x, e = exp2_(fabsf(x) * 2.8853900817779268f); // e^2|x|
  const float small = __fmaf_rn(__fmaf_rn(__fmaf_rn(x2, -0.05396825f, 0.13333333f), x2, -0.33333333f), x2 * x, x);
  return fabsf(x) < 0.25f ? small : copysignf(1.f - __fdividef(2.f, e + 1.f), x);
}

// Soft caps: cap tanh(x/cap) in place of every score x, for many of them. Scores that are small beside the cap, as most are, need no
// exponential and no quotient: tanh(t)/t - 1 is a polynomial in t^2, to 2^-24 where |t| < 0.65.
template <class Each> __device__ __forceinline__ void capScores(float cap, float reciprocal, const Each& each) {
  float most = 0.f;
  each([&](float x, int, int) {
    most = fmaxf(most, fabsf(x));
    return x;
  });
  if (__all_sync(~0u, most * reciprocal < 0.65f)) {
    each([&](float x, int, int) {
      const float t = x * reciprocal, z = t * t;
      const float f = __fmaf_rn(__fmaf_rn(__fmaf_rn(__fmaf_rn(-0.00592372613f, z, 0.0208734609f), z, -0.0538237579f), z, 0.13332583f), z, -0.333333284f);
      return __fmaf_rn(x * z, f, x);
    });
  } else {
    each.inTurn([&](float x) { return cap * tanh_(x * reciprocal); });
  }
}

// Where the bias of a query position and a key is, and which new tokens the position sees in a sequence that has a tree.
__device__ __forceinline__ long long biasAt(const ScoreParams& score, int seq, int head, int position, int key) {
  return score.details[seq].number * score.biasSequence + head * score.biasHead + position * score.biasRow + key;
}
__device__ __forceinline__ u64 tokensOf(const ScoreParams& score, int seq, int position) { return score.trees[score.details[seq].tree + position]; }

// Adds a bias to scores of a lane's two rows, of which number i sees keys before limit(i). The type is around all scores, so that
// their loads are on their way together.
template <class Rows, class Each> __device__ __forceinline__ void addBias(const ScoreParams& score, const Rows& of, int key, const Each& each) {
  long long at[2];
  int limit[2];
#pragma unroll
  for (int i = 0; i < 2; i++) at[i] = biasAt(score, of.sequence(), of.head(i), of.position(i), key), limit[i] = of.limit(i) - key;
  withStore(score.biasType, [&](auto b) { each([&](float x, int i, int n) { return n < limit[i] ? __fmaf_rn(decltype(b)::load(score.bias, at[i] + n), score.biasFactor, x) : x; }); });
}

// Hides what a tree hides of KEYS keys from the lane's first one on, number `key` of the sequence: new tokens alone.
template <int KEYS, class Rows, class Each> __device__ __forceinline__ void hideByTree(const ScoreParams& score, const Rows& of, int key, const Each& each) {
  u32 hidden[2][4]; // a bit for each key: in front of the new tokens there are none
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u64 tokens = ~tokensOf(score, of.sequence(), of.position(i));
    const int by = of.fresh() - key; // less than KEYS
    const u64 low = by >= 64 ? 0 : by >= 0 ? tokens << by : by > -64 ? tokens >> -by : 0, high = KEYS <= 64 ? 0 : by >= 64 ? tokens << (by - 64) : by > 0 ? tokens >> (64 - by) : 0;
    hidden[i][0] = (u32)low, hidden[i][1] = (u32)(low >> 32), hidden[i][2] = (u32)high, hidden[i][3] = (u32)(high >> 32);
  }
  each([&](float x, int i, int n) { return hidden[i][n / 32] >> n % 32 & 1 ? -LEAN_INF : x; });
}

// What becomes of scores of a lane's two rows, of keys of which the lane's first is number `key` of the sequence.
// each(f) has f(x, i, n) take the place of every score x, of row number i of the lane's and key number n, a constant. Rows knows
// these rows:
//
//	MANY                               whether there are many scores
//	sequence(), head(i), position(i)   whose they are
//	place(i)                           of the row among the keys
//	slope(i), window(), limit(i)       ALiBi's slope, keys of the window, the first key behind those that the row sees
//	narrow(), fresh()                  keys before `narrow` are hidden from some row; from `fresh` on a tree hides keys
//
// Each step is by itself, so that what it needs is in registers only then.
template <class Rows, class Each> __device__ __forceinline__ void modifyScores(const ScoreParams& score, const Rows& of, int key, const Each& each) {
  if (score.cap != 0.f) {
    const float cap = score.cap, reciprocal = score.reciprocal;
    if constexpr (Rows::MANY) capScores(cap, reciprocal, each);
    else each([&](float x, int, int) { return cap * tanh_(x * reciprocal); });
  }
  if (score.slopes != nullptr) {
    const float slope[2] = {of.slope(0), of.slope(1)};
    const float from[2] = {(float)(key - of.place(0)), (float)(key - of.place(1))}; // distances are whole numbers: nothing is rounded but their product
    each([&](float x, int i, int n) { return __fmaf_rn(slope[i], from[i] + (float)n, x); });
  }
  if (score.bias != nullptr) addBias(score, of, key, each);
}

// Hides keys from the same rows, of KEYS keys from the lane's first one on.
template <int KEYS, class Rows, class Each> __device__ __forceinline__ void maskScores(const ScoreParams& score, const Rows& of, int key, const Each& each) {
  if (key < of.narrow()) {
    const int window = of.window(), sinks = score.sinkTokens - key; // these are at the chunk's beginning, if any are in it
    const int first[2] = {of.place(0) - window + 1 - key, of.place(1) - window + 1 - key}; // that rows see besides
    each([&](float x, int i, int n) { return n < first[i] && n >= sinks ? -LEAN_INF : x; });
  }
  if (key + KEYS > of.fresh()) hideByTree<KEYS>(score, of, key, each);
}
