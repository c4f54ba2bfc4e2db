// Decode where keys and values have 8 bits and scales (attn_narrow_tile.cuh). The schedule, the partials and the epilogue
// are those of Lean (attn_lean.cuh).
//
// Scales lie beside the ring, some for each slot. From sm_90 on producer warps load a chunk's scales while they wait for
// its slot, and store the scales behind the copies of the chunk. So a full slot has four arrivals: copies and scales, of
// keys and of values.
#pragma once
#include "attn_narrow_tile.cuh"

struct NarrowParams {
  const float *keyScales, *valueScales;
  int scales; // which elements share a scale: SCALES_BY_HEAD, SCALES_BY_PAGE, SCALES_BY_TOKEN
};

struct NarrowLaunchParams {
  TensorMap keyMap, valueMap; // from sm_90 on: lines of 128 bytes, each a key or two
  Params p;
  MeetParams meet;
  const int* prefetched;
  NarrowParams narrow;
};

// The numbers are the host's (Scales of internal/attn).
enum : int { SCALES_BY_HEAD = 1, SCALES_BY_PAGE = 2, SCALES_BY_TOKEN = 3 };

// The scale of a key (or value): `in` is its place in the page.
__device__ __forceinline__ int scaleIndex(int scales, int heads, int tokens, int page, int head, int in) {
  if (scales == SCALES_BY_HEAD) return head;
  const int i = page * heads + head;
  return scales == SCALES_BY_PAGE ? i : i * tokens + in;
}

template <class Store, int D> struct NarrowLean {
  using L = Lean<Narrow<Store>, Plain, D>;
  using S = typename L::S;
  using R = typename L::R;
  using A = NarrowTile<S>;
  using Place = typename S::Place;
  static constexpr int KEYS = S::KEYS;
  static constexpr bool APART = L::APART;
  static constexpr int EACH = KEYS / 32; // keys of a lane

  // Where a lane's keys lane, lane+32, ... of a chunk are: pages, and places there. page -1: behind the last key.
  struct Keys {
    int page[EACH], in[EACH];
    // entry: the lane's of some entries of the block table, from number `first` on, which lane%PREFETCHED_ENTRIES has; those before
    // number `end` are there.
    __device__ __forceinline__ void find(const Params& p, const Place& at, int c, int lane, int entry = 0, int first = 0, int end = 0) {
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        const int key = c * KEYS + u * 32 + lane;
        const int n = p.pages == nullptr ? 0 : key / p.pageTokens;
        const int known = __shfl_sync(~0u, entry, (n - first) % PREFETCHED_ENTRIES & (PREFETCHED_ENTRIES - 1));
        page[u] = -1, in[u] = key - n * p.pageTokens;
        if (c >= at.end || key >= at.s.keys) continue;
        page[u] = p.pages == nullptr ? at.s.pages : n < end ? known : p.pages[at.s.pages + n];
      }
    }
    __device__ __forceinline__ int row(const Params& p, int head, int u) const { return page[u] * p.pageRows + head * p.headRows + in[u]; }
    __device__ __forceinline__ const float* scale(const Params& p, const NarrowParams& n, const float* of, int head, int u) const { return of + scaleIndex(n.scales, p.heads, p.pageTokens, page[u], head, in[u]); }
  };

#if __CUDA_ARCH__ >= 900
  __device__ static __forceinline__ void openBarriers(u32 bars, int warps, int slots) {
    const u32 bufferBars = bars + 16 * slots;
    for (int s = 0; s < slots; s++) barrierInit(bars + s * 8, 4), barrierInit(bars + (slots + s) * 8, 1);
    if (APART)
      for (int r = 0; r < 2; r++) barrierInit(bufferBars + 8 * r, warps * 32), barrierInit(bufferBars + 16 + 8 * r, EPILOGUE_WARPS * 32);
    opened();
  }

  // A producer warp: it fills every second slot, from slot `first` on, with keys or with values, and walks the whole
  // range from `at` on without regard to where output tiles end. `scales` is where its scales of slot 0 go.
  __device__ static __forceinline__ void produce(const Params& p, const NarrowParams& narrow, Place at, const TensorMap* map, const float* from, u32 ring, u32 scales, u32 full, u32 empty, int first, int lane, int wholeTiles, int entry, bool prefetched) {
    constexpr int PACE = (64 << 10) / S::SLOT, OUTSIDE = 0x7ffffff0;
    const u64 policy = p.streamed ? readOnce() : readAgain();
    const int slots = p.slots, box = p.box, pace = min(at.left + wholeTiles > 160 * 128 / D ? 2 * PACE : PACE, slots);
    int slot = first, skip = first;
    const int page = prefetched ? at.chunk * KEYS / p.pageTokens : 0;
    int end = prefetched ? page + PREFETCHED_ENTRIES : 0;
    u32 parity = 1;
    bool waited = false, again = false; // again: the ring has been filled once
    // A chunk's scales are stored when the copies of the warp's next chunk are on their way. A ring has four slots at least, and
    // so has what is on its way: nobody waits for scales that come behind a wait.
    float scale[EACH];
    int pending = -1; // the slot
    const auto storeScales = [&] {
      if (pending < 0) return;
#pragma unroll
      for (int u = 0; u < EACH; u++) storeShared(scales + pending * S::SCALES + (u * 32 + lane) * 4, scale[u]);
      __syncwarp();
      if (elected()) barrierArrive(full + pending * 8);
    };
    do {
      const int head = at.head, old = p.early ? at.s.keys - at.s.queries : 0;
      int c = at.chunk + skip;
      Keys keys;
      keys.find(p, at, c, lane, entry, page, end);
#pragma unroll 1
      for (; c < at.end; c += 2) {
        const Keys now = keys;
        keys.find(p, at, c + 2, lane, entry, page, end); // on its way beside this chunk
        if (!waited && (c + 1) * KEYS > old) waitForEarlier(), waited = true;
        float next[EACH];
        int row[EACH];
#pragma unroll
        for (int u = 0; u < EACH; u++) {
          next[u] = 0.f, row[u] = OUTSIDE; // a box outside of the array is zeros
          if (now.page[u] >= 0) next[u] = *now.scale(p, narrow, from, head, u), row[u] = now.row(p, head, u);
        }
        const u32 bar = full + slot * 8, to = ring + slot * S::SLOT;
        const int before = slot - pace; // what was asked for first is there: see Ring::produce
        if (before >= 0) barrierWait(full + before * 8, parity ^ 1);
        else if (again) barrierWait(full + (before + slots) * 8, parity);
        barrierWait(empty + slot * 8, parity);
        __syncwarp(); // no lane is a round ahead of another
        if (elected()) barrierExpect(bar, S::SLOT / 2);
#pragma unroll 4
        for (int key = 0; key < KEYS; key += box) {
          int y = __shfl_sync(~0u, row[0], key);
          if (EACH > 1 && key >= 32) y = __shfl_sync(~0u, row[EACH - 1], key);
          if (elected()) copyBox(to + key * S::PITCH, map, 0, y / (128 / D), 0, bar, policy);
        }
        storeScales();
        pending = slot;
#pragma unroll
        for (int u = 0; u < EACH; u++) scale[u] = next[u];
        if ((slot += 2) >= slots) slot -= slots, parity ^= 1, again = true;
      }
      skip = c - at.end; // 0 or 1, or what a short part leaves
      end = 0;
    } while (at.next(p));
    storeScales();
    if (!waited) waitForEarlier();
  }
#else
  // Starts to fill the next slot of a warp's part of the ring: scales, and then keys and values.
  __device__ static __forceinline__ void issue(const Params& p, const NarrowParams& narrow, typename Ring<S>::Reader& reader, u32 scales, int lane, int warps) {
    if (reader.more) {
      Keys keys;
      keys.find(p, reader.at, reader.at.chunk, lane);
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        const u32 to = scales + reader.slot * S::SCALES + (u * 32 + lane) * 4;
        const bool there = keys.page[u] >= 0;
        copyScale(to, there ? keys.scale(p, narrow, narrow.keyScales, reader.at.head, u) : narrow.keyScales, there);
        copyScale(to + KEYS * 4, there ? keys.scale(p, narrow, narrow.valueScales, reader.at.head, u) : narrow.valueScales, there);
      }
    }
    reader.issue(p, lane, warps);
  }
#endif

  // `memory` is shared, at a multiple of 1024 bytes.
  __device__ static __forceinline__ void run(const NarrowLaunchParams& all, char* memory) {
    const Params& p = all.p;
    const MeetParams& meet = all.meet;
    const NarrowParams& narrow = all.narrow;
    const Work* const range = p.work + blockIdx.x;
#if __CUDA_ARCH__ >= 900
    const int producers = APART ? CONSUMER_WARPS : p.warps; // the first one
    if (threadIdx.x == producers * 32) prefetchMap(&all.keyMap), prefetchMap(&all.valueMap);
#endif
#if __CUDA_ARCH__ >= 900
    int entry = 0; // asked for beside the range, not behind it
    if (all.prefetched != nullptr && threadIdx.x >= producers * 32) entry = all.prefetched[blockIdx.x * PREFETCHED_ENTRIES + threadIdx.x % PREFETCHED_ENTRIES];
#endif
    const Work work = *range;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int warps = p.warps, slots = p.slots;
    if (work.tiles == 0) {
      waitForEarlier();
      if (warp < warps) R::writeFullyMasked(p, *p.masked);
      if (work.wholeSeq == TOGETHER && warp == 0) R::pass(meet);
      return;
    }

    u64* bars = (u64*)(memory + slots * S::SLOT); // a full and an empty one for each slot
    u64* bufferBars = bars + 2 * slots;           // two for each buffer
    char* rest = (char*)(bufferBars + 6);
    typename R::Shared sh;
    sh.warps = warps, sh.buffers = p.buffers;
    sh.last = (int*)(bufferBars + 4); // two
    sh.o = (float*)(rest + S::QUERY);
    sh.m = (float4*)(sh.o + sh.buffers * warps * p.rows * S::WIDTH);
    sh.l = sh.m + sh.buffers * ROWS;
    const u32 ring = sharedAddress(memory), scales = sharedAddress(rest);

#if __CUDA_ARCH__ >= 900
    const u32 full = sharedAddress(bars), empty = full + slots * 8;
    if (warp == producers && lane == 0) openBarriers(full, warps, slots);
    if constexpr (APART) {
      if (warp >= producers + PRODUCER_WARPS) {
        moreRegisters<EPILOGUE_REGISTERS>();
        waitForEarlier();
        L::runEpilogue(p, meet, range, typename R::Shares(work), sh, bufferBars, ThreadGroup{(int)threadIdx.x - (producers + PRODUCER_WARPS) * 32, EPILOGUE_WARPS, 4});
        return;
      }
    }
    if (warp >= producers) {
      if (APART) fewerRegisters<PRODUCER_REGISTERS>();
      const int producer = warp - producers, values = producer & 1;
      producer == 0 ? ringIsReady(warps) : waitForRing(3, PRODUCER_WARPS);
      Place begin;
      begin.begin(p, range);
      produce(p, narrow, begin, values ? &all.valueMap : &all.keyMap, values ? narrow.valueScales : narrow.keyScales, ring + values * (S::SLOT / 2), scales + values * (S::SCALES / 2), full, empty, producer >> 1, lane, range->wholeTiles, entry, all.prefetched != nullptr);
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
    const u32 mine = ring + warp * stages * S::SLOT, myScales = scales + warp * stages * S::SCALES;
    reader.begin(p, range, mine, stages, warp);
    for (int s = 0; s < stages; s++) issue(p, narrow, reader, myScales, lane, warps);
    u32 next = 0;
#endif
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();

    R::clear(sh);
    const ThreadGroup workers{(int)threadIdx.x, warps, 1};
    Place w;
    w.begin(p, range);
    int turn = 0; // of the warp that has the first chunk of this part
    int part = 0;
    bool more = true;
    typename A::Queries q;
    A::load(p, w, q, lane);
#if __CUDA_ARCH__ >= 900
    waitForRing(2, warps + 1);
#endif
    while (more) {
      typename A::State st;
      st.empty();
      const int rows = w.rows(p);
      const typename A::Mode mode = A::modeOf(rows);
      int sees[2][2];     // keys that a lane's rows see
      int all = w.s.keys; // keys that every row sees
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = w.block * ROWS + A::rowOf(mode, lane, i >> 1, i & 1);
        sees[i >> 1][i & 1] = p.causal ? min(w.s.keys, w.s.keys - w.s.queries + positionOf(p, r) + 1) : w.s.keys;
      }
      if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * ROWS) + 1;
      int first = warp - turn;
      if (first < 0) first += warps;
      for (int c = w.chunk + first; c < w.end; c += warps) {
#if __CUDA_ARCH__ >= 900
        const u32 at = ring + slot * S::SLOT, scale = scales + slot * S::SCALES;
        barrierWait(full + slot * 8, parity);
        const int live = w.s.keys - c * KEYS;
        if (live < KEYS) {
          A::clearBehind(at, live, lane);
          fenceAsync();
          __syncwarp();
        }
#else
        const u32 at = mine + next * S::SLOT, scale = myScales + next * S::SCALES;
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
        const int limit[2][2] = {{sees[0][0] - c * KEYS, sees[0][1] - c * KEYS}, {sees[1][0] - c * KEYS, sees[1][1] - c * KEYS}};
        const bool masked = (c + 1) * KEYS > all, precise = p.queryType == Float32::type, look = narrow.scales != SCALES_BY_TOKEN;
        if (mode == A::FEW) A::template merge<A::FEW>(st, q, at, scale, lane, masked, limit, precise, look);
        else if (mode == A::EIGHT) A::template merge<A::EIGHT>(st, q, at, scale, lane, masked, limit, precise, look);
        else A::template merge<A::SIXTEEN>(st, q, at, scale, lane, masked, limit, precise, look);
#if __CUDA_ARCH__ >= 900
        releaseStage(empty + slot * 8, lane);
        slot += warps;
        if (slot >= slots) slot -= slots, parity ^= 1;
#else
        __syncwarp();
        issue(p, narrow, reader, myScales, lane, warps);
        if (++next == stages) next = 0;
#endif
      }
      const typename R::Shared mine = sh.of(part, p.rows); // the warps' states, in the order of their chunks
#if __CUDA_ARCH__ >= 900
      if (APART && part >= sh.buffers) barrierWait(sharedAddress(bufferBars + 2) + sh.buffer(part) * 8, ~sh.round(part) & 1);
#endif
      st.leave(mode, rows, lane, mine.o + first * p.rows * S::WIDTH, mine.m, mine.l, first);
#if __CUDA_ARCH__ >= 900
      if (APART) barrierArrive(sharedAddress(bufferBars) + sh.buffer(part) * 8);
#endif
      turn = (turn + w.end - w.chunk) % warps;
      const Place done = w;
      more = w.next(p);
      part++;
      if (more) A::load(p, w, q, lane);
#if __CUDA_ARCH__ >= 900
      if constexpr (APART) continue;
#endif
      syncWarps(warps);
      const typename R::Tile tile(p, done);
      R::combine(p, workers, tile, mine, R::slotOf(done), typename R::Item(p, workers, tile, R::slotOf(done), part, nullptr), nullptr, 0, tile.rows);
      if (sh.buffers == 1) syncWarps(warps);
      if (done.endsParts()) R::settle(p, workers, typename R::Shares(*range), typename R::Tile(p, range), tile, mine);
    }
    R::writeFullyMasked(p, *p.masked);
  }
};

#define NARROW_ATTENTION(name, Store, D) \
  extern "C" __global__ void __launch_bounds__((CONSUMER_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS) * 32, 1) name(const __grid_constant__ NarrowLaunchParams p) { \
    extern __shared__ __align__(1024) char memory[]; \
    NarrowLean<Store, D>::run(p, memory); \
  }
