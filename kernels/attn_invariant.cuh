// Batch invariance: the bits of a row follow from its query, and the keys and values that it sees, alone.
//
// LeanTiles begin at multiples of their size in the sequence. Of each a thread block makes a state: its chunks
// are shared out among the consumer warps by their places in it, and the warps' states are merged as ever. A row's
// states are merged one by one, in the order of the sequence: by the block as they come if it has the whole output tile,
// else by the last one to arrive, from the workspace. A LeanTile that a row sees nothing of changes no bit. So neither other
// rows nor other sequences matter, nor who has which LeanTiles. Products are in one mode for all numbers of rows (Mode).
#pragma once
#include "attn_reduce.cuh"
#include "attn_variant.cuh"

// The LeanTiles of a thread block.
template <class S> struct InvariantTiles {
  using R = Reduce<S>;
  using Place = typename S::Place;
  using Shared = typename R::Shared;
  using Tile = typename R::Tile;
  using Shares = typename R::Shares;
  static constexpr int D = S::D, RECORD = D + 4; // floats of a row's state in the workspace: o, m, l

  Tile first;      // the output tile of the block's first LeanTile
  int firstTiles;  // its LeanTiles
  bool whole;      // the block has all of the output tile at hand
  __device__ __forceinline__ InvariantTiles(const Params& p, const Place& w) : first(p, w), firstTiles(w.tiles), whole(false) {}

  // The workspace: of each block the state that a thread goes on with, for each four columns of a row, and then those of
  // LeanTiles of output tiles that blocks share, one behind the other. The host says which of these an output tile has.
  __device__ static __forceinline__ float* mine(const Params& p, int i) { return p.partials + ((long long)blockIdx.x * p.rows * (D / 4) + i) * 8; }
  __device__ static __forceinline__ float* record(const Params& p, int slot, int r) {
    return p.partials + (long long)gridDim.x * p.rows * (2 * D) + ((long long)slot * p.rows + r) * RECORD;
  }

  // A state of a row, of which a thread has some columns. The order of all that is rounded is said: places that do the
  // same have to have the same bits.
  template <int N> struct State {
    float m, l;
    float4 o[N];
    __device__ __forceinline__ void empty() {
      m = -LEAN_INF, l = 0.f;
#pragma unroll
      for (int i = 0; i < N; i++) o[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    __device__ __forceinline__ void merge(float m2, float l2, const float4 (&o2)[N]) {
      if (m2 == -LEAN_INF) return;
      if (m == -LEAN_INF) {
        m = m2, l = l2;
#pragma unroll
        for (int i = 0; i < N; i++) o[i] = o2[i];
        return;
      }
      const float top = fmaxf(m, m2);
      const Merge both(top);
      const float f = both.weight(m), f2 = both.weight(m2);
      const auto sum = [&](float x, float y) { return __fmaf_rn(x, f, __fmul_rn(y, f2)); };
      m = top, l = sum(l, l2);
#pragma unroll
      for (int i = 0; i < N; i++) o[i].x = sum(o[i].x, o2[i].x), o[i].y = sum(o[i].y, o2[i].y), o[i].z = sum(o[i].z, o2[i].z), o[i].w = sum(o[i].w, o2[i].w);
    }
  };

  // Stores four columns of row r, from c on, with the row's attention sink if there is one.
  __device__ static __forceinline__ void store(const Params& p, const Tile& tile, int r, int c, State<1> s) {
    const typename R::Destination to(p, tile, -1, r, c, nullptr);
    const float* const sinks = scoreOf(p).sinks;
    const bool empty = s.m == -LEAN_INF;
    float sink = -LEAN_INF;
    if (sinks != nullptr) {
      const int i = tile.block * ROWS + r;
      sink = sinks[tile.head * p.group + i - positionOf(p, i) * p.group];
      constexpr float ONE = S::Math::lift > 0 ? 1 << (int)S::Math::lift : 1;
      const float4 none[1] = {make_float4(0.f, 0.f, 0.f, 0.f)};
      if (!empty && sink != -LEAN_INF) s.merge(sinkOf(sink), ONE, none);
    }
    R::store(p, to, s.o[0], s.m, s.l);
    if (empty && to.statistics != nullptr) *to.statistics = sink;
  }

  // Merges the warps' states of a LeanTile, and puts the result where its row's states are.
  __device__ __forceinline__ void combine(const Params& p, const ThreadGroup& workers, const Place& w, const Tile& tile, const Shared& sh) {
    if (w.tile == 0) whole = w.left >= w.tiles;
    const int slot = whole ? 0 : statesOf(w) + w.tile;
#pragma unroll 1
    for (int i = workers.thread; i < tile.rows * (D / 4); i += workers.threads()) {
      const int r = i / (D / 4), c = i % (D / 4) * 4;
      const float4 m = sh.m[r], l = sh.l[r];
      float4 x[R::STATES];
#pragma unroll
      for (int k = 0; k < R::STATES; k++) {
        x[k] = *(const float4*)(sh.o + (min(k, sh.warps - 1) * p.rows + r) * S::WIDTH + c);
        if (EPILOGUE_WARPS == 0 && k >= sh.warps) x[k] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
      float top, sum;
      float4 o[1];
      mergeStates(m, l, x, top, sum, o[0]);
      if (!whole) {
        float* const to = record(p, slot, r);
        __stcg((float4*)(to + c), o[0]);
        if (c == 0) __stcg((float2*)(to + D), make_float2(top, sum));
        continue;
      }
      float* const kept = mine(p, i);
      State<1> s;
      s.empty();
      if (w.tile > 0) {
        const float2 ml = __ldcg((const float2*)(kept + 4));
        s.o[0] = __ldcg((const float4*)kept), s.m = ml.x, s.l = ml.y;
      }
      s.merge(top, sum, o);
      if (w.tile + 1 == w.tiles) {
        store(p, tile, r, c, s);
      } else {
        __stcg((float4*)kept, s.o[0]), __stcg((float2*)(kept + 4), make_float2(s.m, s.l));
      }
    }
  }

  // Where the states of a shared output tile begin: Work says it of the block's first one and of its last one.
  __device__ __forceinline__ int statesOf(const Place& w) const {
    const Work* const range = w.work;
    const bool begun = range->tile > 0 && w.seq == range->seq && w.head == range->head && w.block == range->block;
    return begun ? range->wholeHead : range->wholeBlock;
  }

  // When all of a block's states are written: tells the blocks that share its output tiles, and merges what is complete.
  __device__ __forceinline__ void settle(const Params& p, const ThreadGroup& workers, const Shares& shares, const Place& w, const Tile& last, const Shared& sh) const {
    if (!R::arriveAll(p, workers, shares, sh)) return;
    Tile tile = first;
    int states = w.work->wholeHead, count = firstTiles;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      if (sh.last[k]) merge(p, workers, tile, states, count);
      tile = last, states = w.work->wholeBlock, count = w.tiles;
    }
  }

  // The output of an output tile that blocks share: a warp has whole rows, and some states of one on their way together.
  __device__ static __forceinline__ void merge(const Params& p, const ThreadGroup& workers, const Tile& tile, int states, int count) {
    constexpr int EACH = (D / 4 + 31) / 32, BATCH = 8 / EACH;
    const int lane = workers.thread % 32;
#pragma unroll 1
    for (int r = workers.thread / 32; r < tile.rows; r += workers.warps) {
      State<EACH> s;
      s.empty();
#pragma unroll 1
      for (int k = 0; k < count; k += BATCH) {
        float2 ml[BATCH];
        float4 o[BATCH][EACH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const float* const from = record(p, states + min(k + b, count - 1), r);
          ml[b] = __ldcg((const float2*)(from + D));
#pragma unroll
          for (int e = 0; e < EACH; e++) o[b][e] = __ldcg((const float4*)(from + min((lane + 32 * e) * 4, D - 4)));
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++)
          if (k + b < count) s.merge(ml[b].x, ml[b].y, o[b]);
      }
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int c = (lane + 32 * e) * 4;
        State<1> columns = {s.m, s.l, {s.o[e]}};
        if (c < D) store(p, tile, r, c, columns);
      }
    }
  }
};
