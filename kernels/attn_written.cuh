// The Variant of attention that a user has written (docs/variants.md). A generated unit has the user's expressions as
//
//	struct Expression {
//	  static constexpr bool changes = ..., windows = ..., measures = ..., scores = ..., hides = ..., judges = ..., reads = ..., large = ...;
//	  static float score(const WrittenParams& p, float score, int query, int key, int head, int sequence);
//	  static bool sees(...); // of the same
//	};
//
//	changes   whether there are changes of scores before, as Scored has them
//	windows   whether windows hide keys, too
//	measures  whether weights are measured: then attn_measured.cuh is included before
//	scores    whether `score` is not its argument
//	hides     whether `sees` may be false
//	judges    whether `sees` depends on the score
//	reads     whether the expressions read tensors: then these are called for keys of the sequence alone
//	large     whether code for each score of a lane is long
//	score     the changed score, a natural one
//	sees      whether a key is not hidden
//
// and one WRITTEN_ATTENTION.
#pragma once
#include "attn_expression.cuh"
#include "attn_lean.cuh"
#include "attn_lean_variant.cuh"

struct WrittenLaunchParams {
  TensorMap keyMap, valueMap;
  Params p;
  ScoreParams score;
  WrittenParams written;
  MeetParams meet;
  const int* prefetched;
};

#ifndef MEASURED_ATTENTION // attn_measured.cuh has both
// InvariantTiles (attn_invariant.cuh) of launches that have none.
template <class S> struct InvariantTiles {
  template <class... X> __device__ __forceinline__ InvariantTiles(const X&...) {}
  template <class... X> __device__ __forceinline__ void combine(const X&...) {}
  template <class... X> __device__ __forceinline__ void settle(const X&...) {}
};
template <class S> struct MeasuredRows;
#endif

template <class E, class S> struct WrittenRows;

// The Variant, as Plain describes what a Variant has. E is an Expression.
template <class E> struct Written {
  static constexpr bool scores = true;
  enum : int { ROWS = ::ROWS };

  // The chunks of the LeanTiles of an output tile's list. Rings ask chunkAt(c) and then whether the chunk behind the next
  // one does not follow: whether c < front && front <= c + 2. If so, `gap` chunks lie between.
  struct Chunks {
    mutable int front, gap;
    mutable int number; // of the chunk that chunkAt was last asked for
    int hidden;         // no row sees a key before this one
    int skipped;
    const int* list; // null: all LeanTiles
    int listed, shift;

    __device__ __forceinline__ int placeOf(int c) const { return (list[min(c >> shift, listed - 1)] << shift) + (c & ((1 << shift) - 1)); }
    __device__ __forceinline__ int chunkAt(int c) const {
      number = c, front = c;
      if (list == nullptr) return c;
      const int at = placeOf(c);
      gap = placeOf(c + 2) - at - 2;
      if (gap != 0) front = c + 1;
      return at;
    }
    __device__ __forceinline__ int numberOf(int) const { return number; }
    __device__ __forceinline__ int sinkTokens(const Params&) const { return 0; }
    __device__ __forceinline__ bool hides(const Params&, int key) const { return key < hidden; }
    // How many chunks of an output tile are left out.
    template <int CHUNK> __device__ __forceinline__ int leaveOut(const Params& p, const Seq& s, int place) {
      const auto& at = *static_cast<const Walk<CHUNK, Written>*>(this);
      hidden = E::windows ? firstInWindow(scoreOf(p), s, place) : 0;
      shift = p.tileShift, list = nullptr, gap = 0;
      const WrittenBlock* const block = blockOf(p, at.seq, at.block);
      if (block == nullptr || block->begin < 0) return 0;
      const int chunks = (at.visible + CHUNK - 1) / CHUNK;
      listed = block->count;
      if (listed == 0) return gap = chunks;
      list = writtenOf(p).tiles + block->begin;
      const int last = list[listed - 1];
      return gap = chunks - ((listed - 1) << shift) - min(chunks - (last << shift), 1 << shift);
    }
  };
  template <class S> using Rows = WrittenRows<E, S>;
  __device__ static __forceinline__ constexpr bool invariant(const Params&) { return false; }
};

template <class E, class S> struct WrittenRows : Either<E::measures, MeasuredRows<S>, RowScores<S>>::type {
  using Base = typename Either<E::measures, MeasuredRows<S>, RowScores<S>>::type;
  using typename Base::A, typename Base::Place;
  SeenByAll seen;
  __device__ __forceinline__ WrittenRows(const Params& p, const Place& w, typename A::Mode mode, int rows, int lane) : Base(p, w, mode, rows, lane), seen(p, E::hides, w.seq, w.block) {}
  struct Chunk : Base::Chunk {
    template <class... X> __device__ __forceinline__ Chunk(const X&... x) : Base::Chunk{x...} {}
    template <class Each> __device__ __forceinline__ void apply(int own, const Each& each) const {
      const int key = this->first + own;
      if constexpr (E::changes) modifyScores(scoreOf(this->p), *this, key, each);
      WrittenRow row;
      row.key = key, row.sequence = scoreOf(this->p).details[this->w.seq].number;
#pragma unroll
      for (int i = 0; i < 2; i++) row.head[i] = this->head(i), row.place[i] = this->place(i), row.limit[i] = E::reads ? this->limit(i) - key : 0;
      const bool all = static_cast<const WrittenRows&>(this->of).seen.has(this->first, S::KEYS);
      // Scores are of base 4.
      evaluate<E>(writtenOf(this->p), row, all, [&](const auto& f) {
        each([&](float x, int i, int n) { return f(x * 1.3862943611198906f, i, n) * 0.72134752044448170f; }); // ln 4, log4(e)
      });
      if constexpr (E::windows) maskScores<S::KEYS>(scoreOf(this->p), *this, key, each);
      if constexpr (E::measures) this->measure(own, each);
    }
  };
};

#define WRITTEN_ATTENTION(name, T, D) LEAN_ENTRY(name, WrittenLaunchParams, T, Written<Expression>, D)

// Weights that are not divided by their sum: attention writes outputs and log-sum-exps in float32, and outputs times the sums are
// the result.
struct RestoreParams {
  const float *from, *logs;
  void* out;
  const Seq* seqs;
  long long outRow, outHead, lseRow, lseHead; // strides, in elements
  int sequences, rows; // rows 0: the rows of the sequences
  int heads, dim, outType;
};

__device__ __forceinline__ void restoreRow(const RestoreParams& p, long long row) {
  for (int i = threadIdx.x; i < p.heads * p.dim; i += blockDim.x) {
    const int head = i / p.dim;
    const long long at = row * p.outRow + head * p.outHead + i % p.dim;
    storeAs(p.out, at, p.outType, p.from[at] * exponential(p.logs[row * p.lseRow + head * p.lseHead]));
  }
}
__device__ __forceinline__ void restore(const RestoreParams& p) {
  const int count = p.rows > 0 ? p.rows : p.sequences;
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const int first = p.rows > 0 ? i : p.seqs[i].row, n = p.rows > 0 ? 1 : p.seqs[i].queries;
    for (int k = 0; k < n; k++) restoreRow(p, first + k);
  }
}

#define WRITTEN_RESTORE(name) \
  extern "C" __global__ void name(const __grid_constant__ RestoreParams p) { restore(p); }
