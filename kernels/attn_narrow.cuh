// Decode where keys and values have 8 bits and scales (attn_narrow_tile.cuh). The schedule, the partials and the epilogue
// are those of Lean (attn_lean.cuh).
//
// Scales lie beside the ring, some for each slot. From sm_90 on the lanes of producer warps copy them behind the copies of a
// chunk, and arrive at the slot's barrier when their copies are there.
#pragma once
#include "attn_narrow_tile.cuh"

struct NarrowParams {
  const float *keyScales, *valueScales;
  int scales; // which elements share a scale: SCALES_BY_HEAD, SCALES_BY_PAGE, SCALES_BY_TOKEN
  int type;   // of elements, for kernels of both
};

// Of kernels with scores: struct NarrowScoredParams (attn_narrow_variant.cuh).
struct NarrowLaunchParams {
  TensorMap keyMap, valueMap; // from sm_90 on: lines of 128 bytes, each a key, or two, or half of one
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

template <class S> struct NarrowRows; // of a Variant that has scores: attn_narrow_variant.cuh

// The arithmetic of a Shape.
template <class S> struct TileOf {
  using type = NarrowTile<S>;
};

template <class Store, int D, class V = Plain> struct NarrowLean {
  using L = Lean<Narrow<Store>, V, D>;
  using S = typename L::S;
  using R = typename L::R;
  using A = typename TileOf<S>::type;
  using Place = typename S::Place;
  static constexpr int KEYS = S::KEYS;
  static constexpr bool APART = L::APART, SCORED = V::scores;
  static constexpr int EACH = KEYS / 32; // keys of a lane
  // Where warps pass registers on, two consumer warps share chunks: one computes while the other waits. Each has half of the keys, and
  // one merges the state of the other; or, of more than eight rows, each has all keys, and some rows.
  static constexpr int SHARERS = APART ? 2 : 1, CONSUMERS = SHARERS * CONSUMER_WARPS;
  enum : int { PAIRS = 9, COMPUTES = 160, COPIES = 40, MERGES = 152 }; // the first of the pairs' named barriers; registers of a lane
  static_assert(!APART || CONSUMERS * COMPUTES + PRODUCER_WARPS * COPIES + EPILOGUE_WARPS * MERGES <= (CONSUMERS + PRODUCER_WARPS + EPILOGUE_WARPS) * 128);

  struct NoRows {
    __device__ __forceinline__ NoRows(const Params&, const Place&, typename A::Mode, int, int, int) {}
  };
  template <bool, class X> struct RowsOf {
    using type = NarrowRows<X>;
  };
  template <class X> struct RowsOf<false, X> {
    using type = NoRows;
  };
  using Rows = typename RowsOf<SCORED, S>::type;

  // Entries of a sequence's block table: 32 of them from number `base` on, one a lane, and the next 32, which are on their way.
  struct Table {
    int base, have, ahead;
    __device__ __forceinline__ int entry(const Params& p, const Seq& s, int n) const { return (long long)n * p.pageTokens < s.keys ? p.pages[s.pages + n] : 0; }
    __device__ __forceinline__ void open(const Params& p, const Seq& s, int n, int lane) { base = n, have = entry(p, s, n + lane), ahead = entry(p, s, n + 32 + lane); }
    // Goes on to entry n, the first of a chunk. many: a chunk has more than 33 of them.
    __device__ __forceinline__ void reach(const Params& p, const Seq& s, int n, bool many, int lane) {
      if (n < base + (many ? 1 : 32)) return;
      if (many || n >= base + 64) open(p, s, n, lane);
      else base += 32, have = ahead, ahead = entry(p, s, base + 32 + lane);
    }
    // The lane's entry n, of a chunk whose last one is `last`.
    __device__ __forceinline__ int at(int n, int last) const {
      int x = __shfl_sync(~0u, have, n - base & 31);
      if (last >= base + 32) {
        const int y = __shfl_sync(~0u, ahead, n - base & 31);
        if (n >= base + 32) x = y;
      }
      return x;
    }
  };

  // Keys lane, lane+32, ... of a chunk: numbers of their pages, and their places there.
  struct Keys {
    int n[EACH], in[EACH];
    // A tensor without pages is a page for each sequence.
    __device__ static __forceinline__ int tokens(const Params& p) { return p.pages == nullptr ? 1 << 30 : p.pageTokens; }
    __device__ static __forceinline__ int pageOf(int key, int tokens) { return (tokens & tokens - 1) == 0 ? key >> (31 - __clz(tokens)) : key / tokens; }
    __device__ __forceinline__ void begin(int tokens, int c, int lane) {
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        const int key = c * KEYS + u * 32 + lane;
        n[u] = pageOf(key, tokens), in[u] = key - n[u] * tokens;
      }
    }
    __device__ __forceinline__ void advance(int tokens, int pages, int more) {
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        n[u] += pages, in[u] += more;
        if (in[u] >= tokens) in[u] -= tokens, n[u]++;
      }
    }
  };
  // Where the scales of a chunk are. Those by token lie as keys do.
  struct Scales {
    const NarrowParams& of;
    int ofPage, ofHead, ofKey;
    __device__ __forceinline__ Scales(const Params& p, const NarrowParams& n) : of(n) {
      ofPage = n.scales == SCALES_BY_HEAD ? 0 : n.scales == SCALES_BY_PAGE ? p.heads : p.pageRows;
      ofHead = n.scales == SCALES_BY_TOKEN ? p.headRows : 1, ofKey = n.scales == SCALES_BY_TOKEN ? ~0 : 0;
    }
    // Copies the scales of a chunk's keys and values to a slot. page -1: behind the last key.
    __device__ __forceinline__ void copy(u32 to, const int (&page)[EACH], int head, const Keys& keys, int lane) const {
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        const bool there = page[u] >= 0;
        const int at = there ? page[u] * ofPage + head * ofHead + (keys.in[u] & ofKey) : 0;
        copyScale(to + A::scaleAt(u * 32 + lane), of.keyScales + at, there);
        copyScale(to + KEYS * 4 + A::scaleAt(u * 32 + lane), of.valueScales + at, there);
      }
    }
  };

#if __CUDA_ARCH__ >= 900
  // A warp makes all barriers, a slot's a lane.
  __device__ static __forceinline__ void openBarriers(u32 bars, int warps, int slots, int lane) {
    const u32 bufferBars = bars + 16 * slots;
    if (lane < slots) barrierInit(bars + lane * 8, S::PACKED ? 1 : 33), barrierInit(bars + (slots + lane) * 8, SHARERS);
    if (APART && lane < 2) barrierInit(bufferBars + 8 * lane, warps * 32), barrierInit(bufferBars + 16 + 8 * lane, EPILOGUE_WARPS * 32);
    opened();
    __syncwarp();
  }

  // A producer warp: it fills slots `first`, first+step, ... and walks the whole range from `at` on without regard to where output
  // tiles end. Keys and values lie in the same places of pages.
  template <class Launch> __device__ static __forceinline__ void produce(const Launch& all, Place at, u32 ring, u32 scales, u32 full, u32 empty, int first, int step, int lane, int wholeTiles, int entry) {
    // As in Ring: a warp waits for chunks of its own alone, or of a warp that waits for it (TestPace).
    constexpr int PACE = S::PACKED ? ((64 << 10) / S::SLOT + PRODUCER_WARPS - 1) / PRODUCER_WARPS * PRODUCER_WARPS : (64 << 10) / S::SLOT, OUTSIDE = S::PACKED ? 0 : D > 128 ? 0x3ffffff0 : 0x7ffffff0;
    const Params& p = all.p;
    const u64 policy = p.streamed ? readOnce() : readAgain();
    const int slots = p.slots, box = p.box, pace = min(at.left + wholeTiles > 160 * 128 / D ? 2 * PACE : PACE, slots);
    int slot = first, skip = first;
    u32 parity = 1;
    bool waited = false, again = false, known = all.prefetched != nullptr; // again: the ring has been filled once
    const Scales scalesOf(p, all.narrow);
    const int tokens = Keys::tokens(p), pages = Keys::pageOf(step * KEYS, tokens), more = step * KEYS - pages * tokens; // to the warp's next chunk
    const int span = Keys::pageOf(KEYS, tokens) + 1;                                                                   // entries behind a chunk's first one, at most
    do {
      const int head = at.head, old = p.early ? at.s.keys - at.s.queries : 0;
      int c = at.chunk + skip, k = at.chunkAt(c); // k: where it is among the sequence's
      Keys keys;
      keys.begin(tokens, k, lane);
      Table table;
      int n = Keys::pageOf(k * KEYS, tokens), in = k * KEYS - n * tokens; // of the chunk's first key
      if (p.pages != nullptr && c < at.end) {
        if (known) {
          const int front = Keys::pageOf(at.chunkAt(at.chunk) * KEYS, tokens) - PREFETCHED_ENTRIES;
          table = {front, entry, table.entry(p, at.s, front + 32 + lane)}; // the last lanes' are the first
        } else {
          table.open(p, at.s, n, lane);
        }
      }
      known = false;
#pragma unroll 1
      for (; c < at.end; c += step) {
        int page[EACH], row[EACH];
        if (p.pages != nullptr) table.reach(p, at.s, n, tokens == 1, lane);
#pragma unroll
        for (int u = 0; u < EACH; u++) {
          page[u] = p.pages == nullptr ? at.s.pages : table.at(keys.n[u], n + span);
          if (k * KEYS + u * 32 + lane >= at.s.keys) page[u] = -1;
          row[u] = page[u] < 0 ? OUTSIDE : page[u] * p.pageRows + head * p.headRows + keys.in[u]; // a box outside of the array is zeros
          if constexpr (SCORED) {
            if (at.hides(p, k * KEYS + u * 32 + lane)) page[u] = -1; // its scales may be anything
          }
        }
        const u32 bar = full + slot * 8, to = ring + slot * S::SLOT;
        const auto lineOf = [](int row) { return S::PACKED ? row : D > 128 ? row * (D / 128) : row / (128 / min(D, 128)); };
        const auto rowOf = [&](int key) { return lineOf(__shfl_sync(~0u, row[key / 32 % EACH], key % 32)); };
        const auto copy = [&](int key, int y) {
          if constexpr (S::PACKED) {
            A::copy(p, to, key, y, box, bar, policy);
            return;
          }
          copyBox(to + key * S::PITCH, &all.keyMap, 0, y, 0, bar, policy);
          copyBox(to + S::SLOT / 2 + key * S::PITCH, &all.valueMap, 0, y, 0, bar, policy);
        };
        const int rows[4] = {rowOf(0), rowOf(16), rowOf(32), rowOf(48)}; // of four boxes, or fewer, as they are as a rule
        const int before = slot - pace; // what was asked for first is there: see Ring::produce
        if (before >= 0) barrierWait(full + before * 8, parity ^ 1);
        else if (again) barrierWait(full + (before + slots) * 8, parity);
        barrierWait(empty + slot * 8, parity);
        __syncwarp(); // no lane is a round ahead of another
        if (!waited && (k + 1) * KEYS > old) waitForEarlier(), waited = true;
        if (elected()) {
          barrierExpect(bar, S::SLOT);
          if (box >= 16) copy(0, rows[0]);
          if (box == 16) copy(16, rows[1]), copy(48, rows[3]);
          if (box == 16 || box == 32) copy(32, rows[2]);
        }
        if (box < 16) {
#pragma unroll 1
          for (int key = 0; key < 32; key += box) {
#pragma unroll
            for (int u = 0; u < EACH; u++) {
              const int y = lineOf(__shfl_sync(~0u, row[u], key));
              if (elected()) copy(u * 32 + key, y);
            }
          }
        }
        if constexpr (!S::PACKED) {
          scalesOf.copy(scales + slot * S::SCALES, page, head, keys, lane);
          arriveCopied(bar);
        }
        bool leaps = false; // to behind what is left out
        if constexpr (SCORED) leaps = c < at.front && c + step >= at.front;
        if (leaps) {
          k = at.chunkAt(c + step);
          keys.begin(tokens, k, lane);
          n = Keys::pageOf(k * KEYS, tokens), in = k * KEYS - n * tokens;
        } else {
          k += step;
          keys.advance(tokens, pages, more);
          n += pages, in += more;
          if (in >= tokens) in -= tokens, n++;
        }
        if ((slot += step) >= slots) slot -= slots, parity ^= 1, again = true;
      }
      skip = c - at.end; // less than step, or what a short part leaves
    } while (at.next(p));
    if (!waited) waitForEarlier();
  }
#else
  // Starts to fill the next slot of a warp's part of the ring: scales, and then keys and values.
  __device__ static __forceinline__ void issue(const Params& p, const NarrowParams& narrow, typename Ring<S>::Reader& reader, u32 scales, int lane, int warps) {
    if constexpr (S::PACKED) {
      A::issue(p, reader, lane, warps);
      return;
    }
    if (reader.more) {
      Keys keys;
      int page[EACH];
      keys.begin(Keys::tokens(p), reader.at.chunk, lane);
#pragma unroll
      for (int u = 0; u < EACH; u++) {
        const int key = reader.at.chunk * KEYS + u * 32 + lane;
        bool there = key < reader.at.s.keys;
        if constexpr (SCORED) there = there && !reader.at.hides(p, key); // its scales may be anything
        page[u] = !there ? -1 : p.pages == nullptr ? reader.at.s.pages : p.pages[reader.at.s.pages + keys.n[u]];
      }
      const u32 to = scales + reader.slot * S::SCALES;
      Scales(p, narrow).copy(to, page, reader.at.head, keys, lane);
    }
    reader.issue(p, lane, warps);
  }
#endif

  // `memory` is shared, at a multiple of 1024 bytes.
  template <class Launch> __device__ static __forceinline__ void run(const Launch& all, char* memory) {
    const Params& p = all.p;
    const MeetParams& meet = all.meet;
    const NarrowParams& narrow = all.narrow;
    const Work* const range = p.work + blockIdx.x;
#if __CUDA_ARCH__ >= 900
    const int producers = APART ? CONSUMERS : p.warps; // the first one
    if (threadIdx.x == producers * 32) prefetchMap(&all.keyMap), prefetchMap(&all.valueMap);
    int entry = 0; // asked for beside the range, not behind it
    if (all.prefetched != nullptr && threadIdx.x >= producers * 32) entry = all.prefetched[blockIdx.x * PREFETCHED_ENTRIES + threadIdx.x % PREFETCHED_ENTRIES];
#endif
    const Work work = *range;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int warps = p.warps, slots = p.slots;
#if __CUDA_ARCH__ >= 900
    if (warp == producers) openBarriers(sharedAddress(memory + slots * S::SLOT), warps, slots, lane); // beside the range, too
#endif
    if (work.tiles == 0) {
      waitForEarlier();
      if (warp < warps) L::writeFullyMasked(p, *p.masked);
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
    const int consumers = SHARERS * warps;
    if constexpr (APART) {
      if (warp >= producers + PRODUCER_WARPS) {
        moreRegisters<MERGES>();
        waitForEarlier();
        L::runEpilogue(p, meet, range, typename R::Shares(work), sh, bufferBars, ThreadGroup{(int)threadIdx.x - (producers + PRODUCER_WARPS) * 32, EPILOGUE_WARPS, 4});
        return;
      }
    }
    if (warp >= producers) {
      if (APART) fewerRegisters<COPIES>();
      const int producer = warp - producers, step = slots % PRODUCER_WARPS == 0 ? PRODUCER_WARPS : 2; // a slot is always filled by one warp
      producer == 0 ? ringIsReady(consumers) : waitForRing(3, PRODUCER_WARPS);
      Place begin;
      begin.begin(p, range, work);
      if (producer < step) produce(all, begin, ring, scales, full, empty, producer, step, lane, work.wholeTiles, entry);
      if (APART && producer == PRODUCER_WARPS - 1 && range->wholeSeq == TOGETHER) R::look(meet, typename R::Shares(*range), sh, lane);
      return;
    }
    if (APART) moreRegisters<COMPUTES>();
    if (APART && warp >= consumers) return;
    if constexpr (S::PACKED && S::QUERY > 0) A::Store::makeTable(scales, warp, consumers);
    int slot = warp % warps;
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

    const int half = warp / warps, pair = warp - half * warps; // pair: of those that share chunks
    const auto meetPair = [&] { ThreadGroup{0, 2, PAIRS + pair}.sync(); };
    if (half == 0) R::clear(sh);
    const ThreadGroup workers{(int)threadIdx.x, warps, 1};
    Place w;
    w.begin(p, range);
    int turn = 0; // of the warp that has the first chunk of this part
    int part = 0;
    bool more = true;
    typename A::Queries q;
    const auto load = [&] { A::load(p, w, q, A::SETS == 1 && w.rows(p) > 8 ? half * 8 : 0, lane, narrow.type); };
    load();
#if __CUDA_ARCH__ >= 900
    waitForRing(2, consumers + 1);
#endif
    while (more) {
      typename A::State st;
      st.empty();
      const int rows = w.rows(p);
      const typename A::Mode mode = A::modeOf(rows);
      const bool both = A::SETS == 1 && rows > 8; // warps share rows, not keys
      const int above = both ? half * 8 : 0, firstUnit = APART && !both ? half : 0, units = APART && !both ? half + 1 : KEYS / A::UNIT;
      int sees[A::SETS][2]; // keys that a lane's rows see
      int all = w.s.keys; // keys that every row sees
#pragma unroll
      for (int i = 0; i < 2 * A::SETS; i++) {
        const int r = w.block * ROWS + above + A::rowOf(mode, lane, i >> 1, i & 1);
        sees[i >> 1][i & 1] = p.causal ? min(w.s.keys, w.s.keys - w.s.queries + positionOf(p, r) + 1) : w.s.keys;
      }
      if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * ROWS) + 1;
      int first = pair - turn;
      if (first < 0) first += warps;
      const Rows view(p, w, mode, rows, above, lane);
      if constexpr (SCORED) {
        if (L::Scores::sinksOf(p).of != nullptr && first == 0 && w.tile == 0 && (both || half == 0)) view.sink(st);
      }
      for (int i = w.chunk + first; i < w.end; i += warps) {
        const int c = w.chunkAt(i); // where it is among the sequence's
#if __CUDA_ARCH__ >= 900
        const u32 at = ring + slot * S::SLOT, scale = scales + slot * S::SCALES;
        barrierWait(full + slot * 8, parity);
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
        const bool precise = A::isPrecise(p), look = A::Store::finds && narrow.scales != SCALES_BY_TOKEN;
#pragma unroll 1
        for (int unit = firstUnit; unit < units; unit++) {
          const int before = c * KEYS + unit * A::UNIT, live = w.s.keys - before;
          if (live <= 0) break;
          const u32 keys = at + unit * A::UNIT * S::PITCH, values = keys + S::SLOT / 2;
#if __CUDA_ARCH__ >= 900
          if (live < A::UNIT) {
            if (!both || half == 0) A::clearBehind(values, live, lane);
            fenceAsync();
            both ? meetPair() : __syncwarp();
          }
          if constexpr (SCORED) {
            if (before < w.hidden) { // and what no row sees
              if (!both || half == 0) A::clear(values, max(w.sinkTokens(p) - before, 0), min(w.hidden - before, A::UNIT), lane);
              fenceAsync();
              both ? meetPair() : __syncwarp();
            }
          }
#else
          if constexpr (S::PACKED) { // others are copied as zeros
            if (live < A::UNIT) A::clearBehind(values, live, lane);
            if constexpr (SCORED) {
              if (before < w.hidden) A::clear(values, max(w.sinkTokens(p) - before, 0), min(w.hidden - before, A::UNIT), lane);
            }
            __syncwarp();
          }
#endif
          int limit[A::SETS][2];
#pragma unroll
          for (int i = 0; i < 2 * A::SETS; i++) limit[i >> 1][i & 1] = sees[i >> 1][i & 1] - before;
          const bool masked = before + A::UNIT > all;
          const u32 scaleAt = scale + (S::PACKED ? 0 : unit * 16);
          if constexpr (SCORED) A::template merge<A::SETS == 1 ? A::EIGHT : A::SIXTEEN>(st, q, keys, values, scaleAt, lane, masked, limit, precise, look, narrow.type, typename Rows::Unit{view, before});
          else if constexpr (A::ONE) A::template merge<A::SETS == 1 ? A::EIGHT : A::SIXTEEN>(st, q, keys, values, scaleAt, lane, masked, limit, precise, look, narrow.type);
          else if (mode == A::FEW) A::template merge<A::FEW>(st, q, keys, values, scaleAt, lane, masked, limit, precise, look, narrow.type);
          else if (mode == A::EIGHT) A::template merge<A::EIGHT>(st, q, keys, values, scaleAt, lane, masked, limit, precise, look, narrow.type);
          else if constexpr (A::SETS == 2) A::template merge<A::SIXTEEN>(st, q, keys, values, scaleAt, lane, masked, limit, precise, look, narrow.type);
        }
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
      const bool last = !APART || half == 0;
      if (APART && last) meetPair(); // the other warp's state is there
      st.leave(mode, rows - above, lane, mine.o + (first * p.rows + above) * S::WIDTH, mine.m + above, mine.l + above, first, APART && last && !both, narrow.type);
      if (!last) meetPair();
#if __CUDA_ARCH__ >= 900
      if (APART && last) barrierArrive(sharedAddress(bufferBars) + sh.buffer(part) * 8);
#endif
      turn = (turn + w.end - w.chunk) % warps;
      const Place done = w;
      more = w.next(p);
      part++;
      if (more) load();
#if __CUDA_ARCH__ >= 900
      if constexpr (APART) continue;
#endif
      syncWarps(warps);
      const typename R::Tile tile(p, done);
      R::combine(p, workers, tile, mine, R::slotOf(done), typename R::Item(p, workers, tile, R::slotOf(done), part, nullptr), nullptr, 0, tile.rows);
      if (sh.buffers == 1) syncWarps(warps);
      if (done.endsParts()) R::settle(p, workers, typename R::Shares(*range), typename R::Tile(p, range), tile, mine);
    }
    if (half == 0) L::writeFullyMasked(p, *p.masked);
  }
};

#define NARROW_ENTRY(name, P, ...) \
  extern "C" __global__ void __launch_bounds__((NarrowLean<__VA_ARGS__>::CONSUMERS + PRODUCER_WARPS + EPILOGUE_WARPS) * 32, 1) name(const __grid_constant__ P p) { \
    extern __shared__ __align__(1024) char memory[]; \
    NarrowLean<__VA_ARGS__>::run(p, memory); \
  }
#define NARROW_ATTENTION(name, Store, D) NARROW_ENTRY(name, NarrowLaunchParams, Store, D)
