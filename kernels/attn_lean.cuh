// LeanAttention for decode: attention on contiguous or paged keys and values in
// one launch (Sanovar et al., arXiv:2405.10480, algorithm 2).
//
// The keys of every output tile (a sequence, a KV head and at most 16 rows:
// query positions x heads of the group) are cut into LeanTiles, in the order
// sequence -> KV head -> block of rows -> context. A thread block takes one
// range of that list, which the host computed for it (struct Work), and walks
// it. Its consumer warps share the range: chunk i (a few keys) belongs to warp
// i mod warps. Chunks come through a ring in shared memory, which from sm_90 on
// producer warps fill by the copy engine (TMA); before, every warp fills its part
// itself. Whoever fills it goes on across the ends of output tiles, so reading
// never stops there.
//
// A warp's attention state (O, m, l) stays in registers until the end of the
// output tile; then the states of the warps are merged in shared memory, and
// what is not the whole output tile goes to the workspace as a partial. The
// block that arrives last merges the partials in the order of the blocks: the
// result does not depend on which one that is, nobody waits, and counters are
// zero again afterwards. A block's range may be followed by one of whole output
// tiles: then it merges while these are on their way. On compute capability 9.0
// epilogue warps do all that comes after the last key of an output tile; and
// where no whole output tiles follow, the blocks of one merge it together
// (Reduce::mergeTogether).
#pragma once
#include "attn_reduce.cuh"
#include "attn_ring.cuh"
#include "attn_tile.cuh"

// Of a Variant that has scores: a unit whose kernels have one includes attn_invariant.cuh.
template <class S> struct InvariantTiles;
struct NoTiles {
  template <class... X> __device__ __forceinline__ NoTiles(const X&...) {}
};

// T is the Format of keys and values, V the Variant.
template <class T, class V, int D, bool MANY = false, bool PAGED = false> struct Lean {
  using S = Shape<T, D, false, PAGED, V>;
  using A = Attention<S>;
  using R = Reduce<S, MANY>;
  using Place = typename S::Place;
  struct NoScores {
    __device__ __forceinline__ NoScores(const Params&, const Place&, typename A::Mode, int, int) {}
  };
  template <class Variant> struct ScoresOf {
    using type = typename Variant::template Rows<S>;
  };
  template <class Variant> struct NoScoresOf {
    using type = NoScores;
  };
  static constexpr bool SCORED = V::scores;
  using Scores = typename Either<SCORED, ScoresOf<V>, NoScoresOf<V>>::type::type;
  using States = typename Either<SCORED, InvariantTiles<S>, NoTiles>::type; // with batch invariance
  static constexpr int KEYS = S::KEYS;
  static constexpr bool APART = EPILOGUE_WARPS > 0; // there are epilogue warps

#if __CUDA_ARCH__ >= 900
  // Makes the barriers of a ring's slots, and of the buffers behind them. Each takes tens of
  // clocks in a loop, and nobody asks for keys before: a ring that is as large as it can
  // be has them one behind the other, before the block's range has come. (Where a row of keys
  // is more than one column block, rings have twelve slots: there that is nothing, 0.1%.)
  static constexpr int MOST = 8; // slots of such a ring
  static constexpr bool EARLY = S::BLOCKS == 1;
  __device__ static __forceinline__ void openBarriers(u32 bars, int warps, int slots) {
    const u32 bufferBars = bars + 16 * slots, empty = bars + slots * 8;
    if (EARLY && slots == MOST) {
#pragma unroll
      for (int s = 0; s < MOST; s++) Ring<S>::openSlot(bars, empty, s);
    } else {
      for (int s = 0; s < slots; s++) Ring<S>::openSlot(bars, empty, s);
    }
    if (APART)
      for (int r = 0; r < 2; r++) barrierInit(bufferBars + 8 * r, warps * 32), barrierInit(bufferBars + 16 + 8 * r, EPILOGUE_WARPS * 32);
    opened();
  }
#endif

  __device__ static __forceinline__ void writeFullyMasked(const Params& p, int masked) {
    if constexpr (SCORED) R::writeFullyMasked(p, masked, Scores::sinksOf(p));
    else R::writeFullyMasked(p, masked);
  }

  // `memory` is shared, at a multiple of 1024 bytes.
  __device__ static __forceinline__ void run(const Params& p, const MeetParams& meet, const int* prefetched, const TensorMap* maps, char* memory) {
    const Work* const range = p.work + blockIdx.x;
#if __CUDA_ARCH__ >= 900
    const int producers = APART ? CONSUMER_WARPS : p.warps; // the first one
    if (threadIdx.x == producers * 32) prefetchMap(maps), prefetchMap(maps + 1);
#endif
    int entry = 0; // the lane's entry of the block table: asked for beside the range, not behind it
    if (PAGED && (!SCORED || prefetched != nullptr) && threadIdx.x >= CONSUMER_WARPS * 32) entry = prefetched[blockIdx.x * PREFETCHED_ENTRIES + threadIdx.x % PREFETCHED_ENTRIES];
    const Work work = *range;
    // Where there are epilogue warps, consumers have the time to ask for it at the end: a register less.
    const int masked = APART ? 0 : *p.masked;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int warps = p.warps, slots = p.slots;
#if __CUDA_ARCH__ >= 900
    if (EARLY && warp == producers && lane == 0) openBarriers(sharedAddress(memory + slots * S::SLOT), warps, slots);
#endif
    if (work.tiles == 0) {
      waitForEarlier();
      if (warp < warps) writeFullyMasked(p, *p.masked);
      if (work.wholeSeq == TOGETHER && warp == 0) R::pass(meet);
      return;
    }

    u64* bars = (u64*)(memory + slots * S::SLOT); // a full and an empty one for each slot
    u64* bufferBars = bars + 2 * slots; // two for each buffer: its states are there, and they are not needed any more
    char* rest = (char*)(bufferBars + 6);
    typename R::Shared sh;
    sh.warps = warps, sh.buffers = p.buffers;
    sh.last = (int*)(bufferBars + 4); // two
    sh.o = (float*)(rest + S::QUERY);
    sh.m = (float4*)(sh.o + sh.buffers * warps * p.rows * S::WIDTH);
    sh.l = sh.m + sh.buffers * ROWS;
    const u32 ring = sharedAddress(memory);

#if __CUDA_ARCH__ >= 900
    const u32 full = sharedAddress(bars), empty = full + slots * 8;
    if (!EARLY && warp == producers && lane == 0) openBarriers(full, warps, slots);
    if constexpr (APART) {
      if (warp >= producers + PRODUCER_WARPS) {
        moreRegisters<EPILOGUE_REGISTERS>();
        waitForEarlier();
        runEpilogue(p, meet, range, typename R::Shares(work), sh, bufferBars, ThreadGroup{(int)threadIdx.x - (producers + PRODUCER_WARPS) * 32, EPILOGUE_WARPS, 4});
        return;
      }
    }
    if (warp >= producers) {
      if (APART) fewerRegisters<PRODUCER_REGISTERS>();
      const int producer = warp - producers, values = producer & 1;
      const TensorMap* map = maps + values;
      producer == 0 ? ringIsReady(warps) : waitForRing(3, PRODUCER_WARPS);
      const Work& known = PAGED ? work : *range; // others' registers would be dealt out anew, for nothing
      Place begin;
      begin.begin(p, range, known);
      Ring<S>::produce(p, begin, map, ring + values * (S::SLOT / 2), full, empty, producer >> 1, producer >> 1, 1, lane, known.wholeTiles, entry, prefetched != nullptr);
      if (APART && producer == PRODUCER_WARPS - 1 && range->wholeSeq == TOGETHER) R::look(meet, typename R::Shares(*range), sh, lane);
      return;
    }
    if (APART) moreRegisters<CONSUMER_REGISTERS>();
    if (APART && warp >= warps) return;
    int slot = warp;
    u32 parity = 0;
#else
    typename Ring<S>::Reader reader;
    const int stages = slots / warps;
    const u32 mine = ring + warp * stages * S::SLOT;
    reader.begin(p, range, mine, stages, warp);
    for (int s = 0; s < stages; s++) reader.issue(p, lane, warps);
    u32 next = 0;
#endif
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();

    R::clear(sh);
    const ThreadGroup workers{(int)threadIdx.x, warps, 1};
    // Queries and outputs of the operands' type need no second parts.
    constexpr int OPERAND = S::Math::Operand::type;
    const bool precise = V::invariant(p) || p.queryType != OPERAND || p.outType != OPERAND;
    Place w;
    w.begin(p, range);
    States states(p, w);
    int turn = 0; // of the warp that has the first chunk of this part
    int part = 0;
    bool more = true;
    typename A::Queries q;
    // With scores queries are loaded in the loop: its code is there once. With batch invariance those of an output tile stay.
    if constexpr (!SCORED) A::load(p, w, q, precise, rest, warp, warps, lane);
#if __CUDA_ARCH__ >= 900
    if constexpr (!SCORED) waitForRing(2, warps + 1);
#endif
    while (more) {
      if constexpr (SCORED) {
        if (part == 0 || !V::invariant(p) || w.tile == 0) A::load(p, w, q, precise, rest, warp, warps, lane);
#if __CUDA_ARCH__ >= 900
        if (part == 0) waitForRing(2, warps + 1);
#endif
      }
      typename A::State st;
      st.empty();
      const int rows = w.rows(p);
      const typename A::Mode mode = A::modeOf(p, rows, precise);
      // Products of zeros draw less: what is no row has queries of zeros, and a maximum beside which
      // its weights are 0.
      if constexpr (APART && A::NARROWS && !SCORED) {
        if (mode == A::NARROW) {
          if (lane >> 3 >= rows) {
#pragma unroll
            for (int k = 0; k < S::STEPS; k++) q.hi[k][0] = q.hi[k][1] = 0;
          }
          if ((lane & 3) >= rows) st.m[0] = 1e30f;
        }
      }
      int sees[2];        // keys that a lane's rows see
      int all = w.s.keys; // keys that every row sees
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = w.block * ROWS + A::rowOf(mode, lane, i);
        sees[i] = p.causal ? min(w.s.keys, w.s.keys - w.s.queries + positionOf(p, r) + 1) : w.s.keys;
      }
      if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * ROWS) + 1;

      const Scores scores(p, w, mode, rows, lane);
      int first = warp - turn;
      if (first < 0) first += warps;
      if constexpr (SCORED) {
        if (!V::invariant(p) && Scores::sinksOf(p).of != nullptr && first == 0 && w.tile == 0) Scores::sink(p, w, mode, rows, lane, st);
      }
      for (int n = w.chunk + first; n < w.end; n += warps) {
        int c = n; // where it is among the sequence's
        if constexpr (SCORED) c = w.chunkAt(n);
#if __CUDA_ARCH__ >= 900
        const u32 at = ring + slot * S::SLOT;
        barrierWait(full + slot * 8, parity);
        const int live = w.s.keys - c * KEYS;
        if (live < KEYS) {
          A::clearBehind(at, live, lane);
          fenceAsync();
          __syncwarp();
        }
        if constexpr (SCORED) {
          if (c * KEYS < w.hidden) {
            A::clearBetween(at, w.sinkTokens(p) - c * KEYS, w.hidden - c * KEYS, lane);
            fenceAsync();
            __syncwarp();
          }
        }
#else
        const u32 at = mine + next * S::SLOT;
        switch (stages) { // groups that may still be on their way
          case 2: copyWait<1>(); break;
          case 3: copyWait<2>(); break;
          case 4: copyWait<3>(); break;
          case 5: copyWait<4>(); break;
          case 6: copyWait<5>(); break;
          default: copyWait<0>();
        }
        __syncwarp();
#endif
        const int limit[2] = {sees[0] - c * KEYS, sees[1] - c * KEYS};
        const bool masked = (c + 1) * KEYS > all;
        if constexpr (SCORED) {
          A::merge(mode, st, q, rest, at, lane, masked, limit, typename Scores::Chunk{p, w, scores, mode, rows, lane, c * KEYS, limit});
        } else {
          A::merge(mode, st, q, rest, at, lane, masked, limit);
        }
#if __CUDA_ARCH__ >= 900
        releaseStage(empty + slot * 8, lane);
        slot += warps;
        if (slot >= slots) slot -= slots, parity ^= 1;
#else
        __syncwarp();
        reader.issue(p, lane, warps);
        if (++next == stages) next = 0;
#endif
      }
      // The warps' states, side by side in the order of their chunks, so that the
      // result does not depend on what the block did before. Where there is room
      // for two output tiles' states, nobody waits for who merges them.
      const typename R::Shared mine = sh.of(part, p.rows);
      if (mode == A::FOLDED) st.unfold();
#if __CUDA_ARCH__ >= 900
      if (APART && part >= sh.buffers) barrierWait(sharedAddress(bufferBars + 2) + sh.buffer(part) * 8, ~sh.round(part) & 1);
#endif
      if constexpr (SCORED) { // with batch invariance by the chunk's place in its LeanTile
        first += w.skipped;
        while (first >= warps) first -= warps;
      }
      st.leave(mode, rows, lane, mine.o + first * p.rows * S::WIDTH, mine.m, mine.l, first);
#if __CUDA_ARCH__ >= 900
      if (APART) barrierArrive(sharedAddress(bufferBars) + sh.buffer(part) * 8); // before anything else: it is waited for
#endif
      turn = (turn + w.end - w.chunk) % warps;
      const Place done = w;
      more = w.next(p);
      part++;
#if __CUDA_ARCH__ >= 900
      if constexpr (APART) {
        if (S::SHARED_QUERY) syncWarps(warps);
        if (!SCORED && more) A::load(p, w, q, precise, rest, warp, warps, lane);
        continue;
      }
#endif
      if (!SCORED && more && !S::SHARED_QUERY) A::load(p, w, q, precise, rest, warp, warps, lane);
      syncWarps(warps);
      const typename R::Tile tile(p, done);
      if constexpr (SCORED) {
        if (V::invariant(p)) {
          states.combine(p, workers, done, tile, mine);
          if (sh.buffers == 1) syncWarps(warps);
          if (done.endsParts()) states.settle(p, workers, typename R::Shares(*range), done, tile, mine);
          continue;
        }
      }
      R::combine(p, workers, tile, mine, R::slotOf(done), typename R::Item(p, workers, tile, R::slotOf(done), part, nullptr), nullptr, 0, tile.rows);
      if (sh.buffers == 1) syncWarps(warps);
      if (done.endsParts()) R::settle(p, workers, typename R::Shares(*range), typename R::Tile(p, range), tile, mine);
      if (!SCORED && more && S::SHARED_QUERY) A::load(p, w, q, precise, rest, warp, warps, lane);
    }
#if __CUDA_ARCH__ >= 900
    if (MANY && p.rows > R::HELPED) R::combineRest(p, sh, meet.tagged, bufferBars);
#endif
    writeFullyMasked(p, APART ? *p.masked : masked);
  }

#if __CUDA_ARCH__ >= 900
  // The epilogue warps: they finish output tiles, or parts of them, while consumers are at the next.
  __device__ static __forceinline__ void runEpilogue(const Params& p, const MeetParams& meet, const Work* range, const typename R::Shares& shares, const typename R::Shared& sh, u64* bufferBars, const ThreadGroup& workers) {
    const bool together = range->wholeSeq == TOGETHER;
    const u32 run = together ? R::begin(meet, workers, shares, sh) : 0;
    waitForRing(5, EPILOGUE_WARPS + 1); // not before: that this block has begun is what others wait for
    u64* const tagged = together ? meet.tagged : nullptr;
    Place w;
    w.begin(p, range);
    const typename R::Tile first(p, w);
    States states(p, w);
    bool more = true;
#pragma unroll 1
    for (int part = 0; more; part++) {
      const Place done = w;
      more = w.next(p);
      const u32 bar = sharedAddress(bufferBars) + sh.buffer(part) * 8;
      const typename R::Shared mine = sh.of(part, p.rows);
      const int slot = R::slotOf(done);
      const typename R::Tile tile(p, done);
      if constexpr (SCORED) {
        if (V::invariant(p)) {
          barrierWait(bar, sh.round(part) & 1);
          __syncwarp();
          states.combine(p, workers, done, tile, mine);
          if (done.endsParts()) states.settle(p, workers, shares, done, tile, mine);
          barrierArrive(bar + 16);
          continue;
        }
      }
      const typename R::Item item(p, workers, tile, slot, part, tagged);
      int rows = tile.rows;
      if (MANY && p.rows > R::HELPED && !more) {
        const bool some = together && rows > R::HELPED && slot >= 0;
        R::leaveRest(p, workers, sh, some, slot, rows, part, run);
        if (some) rows = R::HELPED;
      }
      barrierWait(bar, sh.round(part) & 1);
      __syncwarp();
      R::combine(p, workers, tile, mine, slot, item, tagged, run, rows);
      if (done.endsParts()) together ? R::mergeTogether(p, tagged, workers, shares, first, tile, sh, run) : R::settle(p, workers, shares, first, tile, mine);
      barrierArrive(bar + 16);
    }
  }
#endif
};

// An entry point, of a Format and a Variant. Eight warps, four consumers and four producers, leave each lane the most
// registers. More are there where warps can pass registers on.
#define LEAN_ENTRY(name, P, ...) \
  extern "C" __global__ void __launch_bounds__((CONSUMER_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS) * 32, 1) name(const __grid_constant__ P p) { \
    extern __shared__ __align__(1024) char memory[]; \
    Lean<__VA_ARGS__>::run(p.p, p.meet, p.prefetched, &p.keyMap, memory); \
  }
#define ATTENTION(name, T, ...) LEAN_ENTRY(name, LaunchParams, T, Plain, __VA_ARGS__)
#define SCORED_ATTENTION(name, T, ...) LEAN_ENTRY(name, ScoredLaunchParams, T, Scored, __VA_ARGS__)

// A kernel that compute capability 9.0 alone has: in one kernel with others, what it does
// would make short launches of these up to 4% slower.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_ATTENTION(...) ATTENTION(__VA_ARGS__)
#else // there the others take what it is for
#define HOPPER_ATTENTION(name, ...) extern "C" __global__ void name(const __grid_constant__ LaunchParams p) {}
#endif
