// Masks other than causal, and score modifications. A score x of base 4, of query head h at
// place p with key j, becomes
//
//	x = cap tanh(x / cap)
//	x = x + slope(h) (j - p)
//	x = x + bias(sequence, h, position, j)
//
// in this order, as internal/attn has it, and then -Inf where a window or a tree hides the key. An attention sink is a
// score more in the softmax of its head, whose value is 0: the state that keys are merged into begins with it.
//
// Here is what output tiles of few rows (attn_lean_score.cuh) and of many (attn_prefill_score.cuh) have in common.
#pragma once
#include "attn_work.cuh"

// A sequence's number among those of the bias, and its first place in trees; -1: it has no tree.
struct SeqDetail {
  int number, tree;
};

// What the kernels for masks and score modifications are told besides.
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
};
// They lie right behind Params then.
__device__ __forceinline__ const ScoreParams& scoreOf(const Params& p) { return *(const ScoreParams*)(&p + 1); }

struct ScoredLaunchParams { // of the kernels for few rows
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

// Of an output tile those chunks of a sequence's keys that have sink tokens, and those from the first one on that its first
// row sees.
template <> struct Chunks<true> {
  int front, gap; // chunks of sink tokens, and how many behind these are left out
  int hidden;     // no row sees a key before this one, but for sink tokens
  __device__ __forceinline__ int chunkAt(int c) const { return c < front ? c : c + gap; }
  __device__ __forceinline__ int numberOf(int c) const { return c < front ? c : c - gap; } // the other way round
  __device__ __forceinline__ int sinkTokens(const Params& p) const { return scoreOf(p).sinkTokens; }
  __device__ __forceinline__ bool hides(const Params& p, int key) const { return key < hidden && key >= scoreOf(p).sinkTokens; } // from all rows
  // The gap of an output tile whose first row is at a place of the keys.
  template <int CHUNK, bool ALONE> __device__ __forceinline__ int leaveOut(const Params& p, const Seq& s, int place) {
    const ScoreParams& score = scoreOf(p);
    hidden = firstInWindow(score, s, place);
    front = ALONE ? 0 : (min(score.sinkTokens, hidden) + CHUNK - 1) / CHUNK;
    gap = max(hidden / CHUNK - front, 0);
    if constexpr (ALONE) gap &= -(1 << p.tileShift); // whole LeanTiles
    return gap;
  }
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
    each([&](float x, int, int) { return cap * tanh_(x * reciprocal); });
  }
}

// Where the bias of a query position and a key is, and which new tokens the position sees in a sequence that has a tree.
__device__ __forceinline__ long long biasAt(const ScoreParams& score, int seq, int head, int position, int key) {
  return score.details[seq].number * score.biasSequence + head * score.biasHead + position * score.biasRow + key;
}
__device__ __forceinline__ u64 tokensOf(const ScoreParams& score, int seq, int position) { return score.trees[score.details[seq].tree + position]; }

// What becomes of scores of a lane's two rows and KEYS keys, of which the first is number `key` of the sequence: with CHANGED all
// of the above, else masks alone. each has f(x, i, n) take the place of every score x, of row number i of the lane's and key number n. Rows
// knows these rows: MANY, whether there are many scores, slope(i), place(i) among the keys, window(), addBias(score, each),
// hideByTree(score, each), narrow(), which keys are before that are hidden from some row, and fresh(), the first new token, where
// there is a tree: it hides only keys from there on. Each of what follows is by itself, so that what it needs is in registers only then.
template <int KEYS, bool CHANGED, class Rows, class Each> __device__ __forceinline__ void modifyScores(const ScoreParams& score, const Rows& of, int key, const Each& each) {
  if constexpr (CHANGED) {
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
    if (score.bias != nullptr) of.addBias(score, each);
  }
  if (key < of.narrow()) {
    const int window = of.window(), sinks = score.sinkTokens - key; // these are at the chunk's beginning, if any are in it
    const int first[2] = {of.place(0) - window + 1 - key, of.place(1) - window + 1 - key}; // that rows see besides
    each([&](float x, int i, int n) { return n < first[i] && n >= sinks ? -LEAN_INF : x; });
  }
  if (key + KEYS > of.fresh()) of.hideByTree(score, each);
}
