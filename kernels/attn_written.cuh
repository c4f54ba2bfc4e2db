// The Variant of attention that a user has written (docs/variants.md). A generated unit has the user's expressions as
//
//	struct Expression {
//	  static constexpr bool changes = ..., windows = ..., reads = ...;
//	  static float of(const WrittenParams& p, float score, int query, int key, int head, int sequence);
//	};
//
//	changes   whether there are changes of scores before, as Scored has them
//	windows   whether windows hide keys, too
//	reads     whether the expressions read tensors: then `of` is called for keys of the sequence alone
//	of        the changed score, a natural one; -Inf for a hidden key
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

// InvariantTiles (attn_invariant.cuh) of launches that have none.
template <class S> struct InvariantTiles {
  template <class... X> __device__ __forceinline__ InvariantTiles(const X&...) {}
  template <class... X> __device__ __forceinline__ void combine(const X&...) {}
  template <class... X> __device__ __forceinline__ void settle(const X&...) {}
};

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
      const WrittenParams& written = writtenOf(p);
      hidden = E::windows ? firstInWindow(scoreOf(p), s, place) : 0;
      shift = p.tileShift, list = nullptr, gap = 0;
      const int first = written.lists != nullptr ? written.lists[at.seq] : -1;
      if (first < 0) return 0;
      const int begin = written.starts[first + at.block], chunks = (at.visible + CHUNK - 1) / CHUNK;
      listed = written.starts[first + at.block + 1] - begin;
      if (listed == 0) return gap = chunks;
      list = written.tiles + begin;
      const int last = list[listed - 1];
      return gap = chunks - ((listed - 1) << shift) - min(chunks - (last << shift), 1 << shift);
    }
  };
  template <class S> using Rows = WrittenRows<E, S>;
  __device__ static __forceinline__ constexpr bool invariant(const Params&) { return false; }
};

template <class E, class S> struct WrittenRows : RowScores<S> {
  using RowScores<S>::RowScores;
  struct Chunk : RowScores<S>::Chunk {
    template <class... X> __device__ __forceinline__ Chunk(const X&... x) : RowScores<S>::Chunk{x...} {}
    template <class Each> __device__ __forceinline__ void apply(int own, const Each& each) const {
      const int key = this->first + own;
      if constexpr (E::changes) modifyScores(scoreOf(this->p), *this, key, each);
      const WrittenParams& written = writtenOf(this->p);
      const int sequence = scoreOf(this->p).details[this->w.seq].number;
      int head[2], place[2], limit[2];
#pragma unroll
      for (int i = 0; i < 2; i++) head[i] = this->head(i), place[i] = this->place(i), limit[i] = E::reads ? this->limit(i) - key : 0;
      each([&](float x, int i, int n) {
        if (E::reads && n >= limit[i]) return x; // behind the keys that the row sees
        return E::of(written, x * 1.3862943611198906f, place[i], key + n, head[i], sequence) * 0.72134752044448170f; // ln 4, log4(e)
      });
      if constexpr (E::windows) maskScores<S::KEYS>(scoreOf(this->p), *this, key, each);
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
