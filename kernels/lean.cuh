// LeanAttention for decode: attention on contiguous or paged keys and values in
// one launch (Sanovar et al., arXiv:2405.10480, algorithm 2).
//
// The keys of every output tile (a sequence, a KV head and at most 16 rows:
// query positions x heads of the group) are cut into LeanTiles, in the order
// sequence -> KV head -> block of rows -> context. A thread block takes one
// range of that list, which the host computed for it (struct Work), and walks
// it. Its warps take turns: chunk i of the range (a few keys) belongs to warp
// i mod warps. Chunks come through a ring in shared memory, which from sm_90 on
// warps of their own fill by the copy engine; before, every warp fills its part
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
// warps of their own do all that comes after the last key of an output tile.
#pragma once
#include "attention.cuh"
#include "reduce.cuh"
#include "ring.cuh"

template <class T, int D, bool LINKED = false> struct Lean {
  using S = Shape<T, D, LINKED>;
  using A = Attention<S>;
  using R = Reduce<S>;
  using Place = typename S::Place;
  static constexpr int KEYS = S::KEYS;
  static constexpr bool APART = FINISHERS > 0 && !LINKED; // warps of their own finish output tiles

#if __CUDA_ARCH__ >= 900
  // The keys and values of a sequence's new token for one head, in a chain: lane i has
  // elements 4i to 4i+3.
  struct Fresh {
    float k[4], v[4];
    // Waits for them.
    __device__ __forceinline__ void fetch(const Params& p, const Links& links, u32 run, const Place& w, int lane) {
      const long long from = ((long long)w.s.row * p.heads + w.head) * D + min(lane * 4, D - 4);
      bool late;
      do {
        late = !loadTagged2(links.newKeys + from, run, k[0], k[1]);
        late |= !loadTagged2(links.newKeys + from + 2, run, k[2], k[3]);
        late |= !loadTagged2(links.newValues + from, run, v[0], v[1]);
        late |= !loadTagged2(links.newValues + from + 2, run, v[2], v[3]);
      } while (__any_sync(~0u, late));
    }
    // Puts them where the copy engine has left what was in the cache before, as key
    // `row` of the chunk at `at`, and into the cache, unless `slot` is negative: a row
    // of keys there. A sequence has one block of rows, so nobody else has the chunk.
    __device__ __forceinline__ void append(const Params& p, const Place& w, int row, int slot, u32 at, int lane) const {
      const int i = lane * 4;
      if (i < D) {
        const uint2 keys = make_uint2(T::pack(k[0], k[1]), T::pack(k[2], k[3])), values = make_uint2(T::pack(v[0], v[1]), T::pack(v[2], v[3]));
        const u32 to = at + i * T::bytes / 128 * S::BLOCK + swizzled(row, i * T::bytes % 128);
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(keys.x), "r"(keys.y) : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to + S::SLOT / 2), "r"(values.x), "r"(values.y) : "memory");
        if (slot >= 0) {
          const long long place = (slot + (long long)w.head * p.headRows) * D + i;
          *(uint2*)((u16*)p.keys + place) = keys;
          *(uint2*)((u16*)p.values + place) = values;
        }
      }
      written();
      __syncwarp();
    }
  };
#endif

  // `memory` is shared, at a multiple of 1024 bytes.
  __device__ static __forceinline__ void run(const Params& p, const TensorMap* maps, char* memory) { run(p, maps, memory, p.work + blockIdx.x, p.blind, nullptr, nullptr, 0); }

  // The same of a chain's layer, where this block's Work and the number of blind rows
  // are in shared memory: `number` is that of the run. Computing warps return how
  // many chunks have gone through the ring.
  __device__ static __forceinline__ int run(const Params& p, const TensorMap* maps, char* memory, const Work* range, const int* blind, const Links* links, const Round* round, const u32 number) {
#if __CUDA_ARCH__ >= 900
    const int copiers = APART ? COMPUTERS : p.warps; // the first one
    if (threadIdx.x == copiers * 32) prefetchMap(maps), prefetchMap(maps + 1);
#endif
    const Work work = *range;
    const int blinds = *blind;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int warps = p.warps, slots = p.slots;
    if (work.tiles == 0) {
      if (!LINKED) waitForEarlier();
      if (warp < warps) R::writeBlind(p, links, number, blinds);
      return 0;
    }

    char* rest = memory + slots * S::SLOT;
    typename R::Shared sh;
    sh.warps = warps, sh.rooms = p.rooms;
    sh.o = (float*)(rest + S::QUERY);
    sh.m = (float4*)(sh.o + sh.rooms * warps * p.rows * S::WIDTH);
    sh.l = sh.m + sh.rooms * ROWS;
    u64* bars = LINKED ? round->bars : (u64*)(sh.l + sh.rooms * ROWS); // a full and an empty one for each slot
    u64* rooms = bars + 2 * slots; // two for each room: its states are there, and they are not needed any more
    sh.last = (int*)(rooms + 4);   // two; none of these in a chain
    const u32 ring = sharedAddress(memory);

#if __CUDA_ARCH__ >= 900
    const u32 full = sharedAddress(bars), empty = full + slots * 8;
    if (!LINKED && warp == copiers && lane == 0) {
      for (int s = 0; s < slots; s++) openSlot(full, empty, s);
      if (APART)
        for (int r = 0; r < 2; r++) barrierInit(sharedAddress(rooms + r), warps * 32), barrierInit(sharedAddress(rooms + 2 + r), FINISHERS * 32);
      opened();
    }
    if constexpr (APART) {
      if (warp >= copiers + COPIERS) {
        moreRegisters<FINISHING>();
        waitForEarlier();
        waitForRing(5, FINISHERS + 1);
        finishAll(p, range, sh, rooms, Crew{(int)threadIdx.x - (copiers + COPIERS) * 32, FINISHERS, 4});
        return 0;
      }
    }
    if (warp >= copiers) {
      if (APART) fewerRegisters<COPYING>();
      const int copier = warp - copiers, values = copier & 1;
      const TensorMap* map = maps + values;
      if (!LINKED) copier == 0 ? ringIsReady(warps) : waitForRing(3, COPIERS);
      Ring<S>::copyAll(p, range, map, ring + values * (S::SLOT / 2), full, empty, copier >> 1, LINKED ? round->before : 0, lane);
      return 0;
    }
    if (APART) moreRegisters<COMPUTING>();
    if (APART && warp >= warps) return 0;
    int slot = warp;
    u32 parity = 0;
    if constexpr (LINKED) slot = Ring<S>::slotOf(round->before + warp, slots, parity), parity &= 1;
#else
    typename Ring<S>::Reader reader;
    const int stages = slots / warps;
    const u32 mine = ring + warp * stages * S::SLOT;
    reader.begin(p, range, mine, stages, warp);
    for (int s = 0; s < stages; s++) reader.issue(p, lane, warps);
    u32 next = 0;
#endif
    if (!LINKED) {
      waitForEarlier();
      if (threadIdx.x == 0) letNextStart();
    }

    R::clear(sh);
    const Crew crew{(int)threadIdx.x, warps, 1};
    // Queries and outputs of the keys' type need no second parts.
    const bool precise = LINKED || p.queryType != S::T::type || p.outType != S::T::type;
    Place w;
    w.begin(p, range);
    int turn = 0; // of the warp that has the first chunk of this part
    int part = 0;
    int passed = 0; // chunks
    bool more = true;
    typename A::Queries q;
    if (!LINKED) A::load(p, links, number, w, q, precise, rest, warp, warps, lane);
#if __CUDA_ARCH__ >= 900
    if (!LINKED) waitForRing(2, warps + 1);
#endif
    while (more) {
      const int newest = LINKED ? links->slots[w.s.row] : -1;
      if (LINKED) A::load(p, links, number, w, q, precise, rest, warp, warps, lane); // in one place: the code of a chain is long
      typename A::State st;
      st.empty();
      const int rows = w.rows(p);
      const typename A::Mode mode = A::modeOf(rows, precise);
      int sees[2];        // keys that a lane's rows see
      int all = w.s.keys; // keys that every row sees
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int r = w.block * ROWS + (lane >> 2) + 8 * i;
        sees[i] = p.causal ? min(w.s.keys, w.s.keys - w.s.queries + positionOf(p, r) + 1) : w.s.keys;
      }
      if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * ROWS) + 1;

      int first = warp - turn;
      if (first < 0) first += warps;
      for (int c = w.chunk + first; c < w.end; c += warps) {
#if __CUDA_ARCH__ >= 900
        const u32 at = ring + slot * S::SLOT;
        const bool last = LINKED && (c + 1) * KEYS >= w.s.keys;
        Fresh fresh;
        if constexpr (LINKED) {
          if (last) fresh.fetch(p, *links, number, w, lane);
        }
        barrierWait(full + slot * 8, parity);
        // What lies behind the live values may be anything, and 0 times NaN is NaN.
        const int live = w.s.keys - c * KEYS;
        if (live < KEYS) {
          for (int i = lane; i < (KEYS - live) * S::BLOCKS * 8; i += 32) {
            int r = live + i / (S::BLOCKS * 8), b = i % (S::BLOCKS * 8);
            asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at + S::SLOT / 2 + b / 8 * S::BLOCK + r * 128 + b % 8 * 16), "r"(0) : "memory");
          }
          written();
          __syncwarp();
        }
        if constexpr (LINKED) {
          if (last) fresh.append(p, w, w.s.keys - 1 - c * KEYS, newest, at, lane);
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
        if (!A::WIDE && mode == A::FOLDED) {
          A::template merge<A::FOLDED>(st, q, rest, at, lane, masked, limit);
        } else if (mode == A::BOTH) {
          A::template merge<A::BOTH>(st, q, rest, at, lane, masked, limit);
        } else if (!LINKED) {
          A::template merge<A::PLAIN>(st, q, rest, at, lane, masked, limit);
        }
        __syncwarp();
#if __CUDA_ARCH__ >= 900
        if (lane == 0) barrierArrive(empty + slot * 8);
        slot += warps;
        if (slot >= slots) slot -= slots, parity ^= 1;
#else
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
      if (APART && part >= sh.rooms) barrierWait(sharedAddress(rooms + 2) + sh.room(part) * 8, ~sh.round(part) & 1);
#endif
#pragma unroll
      for (int i = 0; i < 2; i++) {
        st.l[i] += __shfl_xor_sync(~0u, st.l[i], 1);
        st.l[i] += __shfl_xor_sync(~0u, st.l[i], 2);
        int r = (lane >> 2) + 8 * i;
        if (r >= rows) continue;
        float* o = mine.o + (first * p.rows + r) * S::WIDTH + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < S::TILES; n++) *(float2*)(o + 8 * n) = make_float2(st.o[n][2 * i], st.o[n][2 * i + 1]);
        if ((lane & 3) == 0) ((float*)(mine.m + r))[first] = st.m[i], ((float*)(mine.l + r))[first] = st.l[i];
      }
#if __CUDA_ARCH__ >= 900
      if (APART) barrierArrive(sharedAddress(rooms) + sh.room(part) * 8); // before anything else: it is waited for
#endif
      turn = (turn + w.end - w.chunk) % warps;
      if (LINKED) passed += w.end - w.chunk;
      const Place done = w;
      more = w.next(p);
      part++;
#if __CUDA_ARCH__ >= 900
      if constexpr (APART) {
        if (S::SHARED_QUERY) syncWarps(warps);
        if (more) A::load(p, links, number, w, q, precise, rest, warp, warps, lane);
        continue;
      }
#endif
      if (more && !S::SHARED_QUERY && !LINKED) A::load(p, links, number, w, q, precise, rest, warp, warps, lane);
      syncWarps(warps);
      R::combine(p, links, number, crew, done, mine, rows, R::slotOf(done), typename R::Item(p, crew, done, R::slotOf(done), part));
      if (sh.rooms == 1) syncWarps(warps);
      if (done.endsParts()) R::settle(p, links, number, crew, range, done, mine);
      if (more && S::SHARED_QUERY && !LINKED) A::load(p, links, number, w, q, precise, rest, warp, warps, lane);
    }
    R::writeBlind(p, links, number, blinds);
    return passed;
  }

#if __CUDA_ARCH__ >= 900
  // The warps that finish output tiles, or parts of them, while others compute the next.
  __device__ static __forceinline__ void finishAll(const Params& p, const Work* range, const typename R::Shared& sh, u64* rooms, const Crew& crew) {
    Place w;
    w.begin(p, range);
    bool more = true;
#pragma unroll 1
    for (int part = 0; more; part++) {
      const Place done = w;
      more = w.next(p);
      const u32 bar = sharedAddress(rooms) + sh.room(part) * 8;
      const typename R::Shared mine = sh.of(part, p.rows);
      const int slot = R::slotOf(done), rows = done.rows(p);
      const typename R::Item item(p, crew, done, slot, part);
      barrierWait(bar, sh.round(part) & 1);
      __syncwarp();
      R::combine(p, nullptr, 0, crew, done, mine, rows, slot, item);
      if (done.endsParts()) R::settle(p, nullptr, 0, crew, range, done, mine);
      barrierArrive(bar + 16);
    }
  }

  // Makes the barriers of a slot. Each is filled with keys by one warp and with values by another.
  __device__ static __forceinline__ void openSlot(u32 full, u32 empty, int slot) { barrierInit(full + slot * 8, 2), barrierInit(empty + slot * 8, 1); }
#endif
};
