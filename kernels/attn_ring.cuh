// The rings of chunks in shared memory, and who fills them.
#pragma once
#include "attn_work.cuh"
#include "copy.cuh"

// The layout that follows from a Format of keys and values and a head dim.
// LINKED: attention is a layer of the megakernel, see megakernel_attention.cuh. PAGED:
// keys and values lie in pages of a power of two of tokens, so that a page is some chunks, or
// a chunk some pages; or, with a Variant that has scores, may lie in such pages.
template <class T_, int D_, bool LINKED_ = false, bool PAGED_ = false, class V_ = Plain> struct Shape {
  using T = T_;
  using V = V_;
  using Store = typename T::Store;
  using Math = typename T::Math;
  static constexpr int D = D_;
  static constexpr bool LINKED = LINKED_, PAGED = PAGED_;
  // Keys of a chunk: where shared memory is large, as many products' worth of
  // them as make a slot of 16 KB, so that there is much to do between two waits.
#if __CUDA_ARCH__ >= 900
  static constexpr int MORE = LINKED ? 1 : 2; // in the megakernel the way to the end of a part is what counts
#else
  static constexpr int MORE = 1;
#endif
  static constexpr int KEYS = D * Store::bytes <= 128 ? 2 * MORE * Math::depth : D * Store::bytes <= 256 ? MORE * Math::depth : Math::depth;
  static constexpr int BLOCK = KEYS * 128;                       // bytes of a column block of a chunk
  static constexpr int BLOCKS = (D * Store::bytes + 127) / 128;  // column blocks
  static constexpr int SLOT = 2 * BLOCKS * BLOCK;                // bytes of a chunk's keys and values
  static constexpr int STEPS = D / Math::depth;                  // products in a score
  static constexpr int TILES = D / 8;                            // products in an output
  static constexpr int WIDTH = D + 8;                            // floats between rows of a state in shared memory
  static constexpr bool SHARED_QUERY = D * Math::Operand::bytes > 256; // too many registers otherwise
  static constexpr int QUERY = SHARED_QUERY ? STEPS * 32 * 16 * (Math::wide ? 1 : 2) : 0;
  static constexpr bool EVEN = D * Store::bytes % 128 == 0;      // every column block is full
  enum : int { MERGE_WARPS = EPILOGUE_WARPS, IN_FLIGHT = 4 }; // of Reduce
  using Place = Walk<KEYS, V>;
};

template <class S> struct Ring : S {
  using Store = typename S::Store;
  using Place = typename S::Place;
  using S::BLOCK, S::BLOCKS, S::D, S::EVEN, S::KEYS, S::SLOT;
  static constexpr bool SCORED = S::V::scores;

  // Chunks that are on their way at a time: 64 KB, and more where a block has more LeanTiles
  // than MANY, so that a few microseconds do not count. Pages lie anywhere, and the memory
  // is the faster the more of them it can choose from: 128 KB, from 2.6 MB of a block on.
  // Even, with more LeanTiles, too. Two warps fill slots in turn, so a warp waits for chunks of its own alone: of a chunk of the other warp, the next one in
  // the same slot may have come too, and a wait for a parity would then last for ever (TestPace).
  static constexpr int even(int n) { return n + n % 2; }
  static constexpr int PACE = even((64 << 10) / SLOT);
  // So many pages of a chunk are asked for behind one another, four copies or two. Each looked up
  // behind the copy of the one before, they come later than the memory could bring them.
  static constexpr int BURST = BLOCKS == 1 ? 4 : 1;

  // The pages of a sequence, 32 entries of the block table at a time and the
  // next 32 on their way. (These kernels as Entries below: contiguous keys were 1% slower.)
  struct Pages {
    int base, have, ahead;
    __device__ __forceinline__ int entry(const Params& p, const Seq& s, int n) const {
      return (long long)n * p.pageTokens < s.keys ? p.pages[s.pages + n] : -1;
    }
    __device__ __forceinline__ void open(const Params& p, const Seq& s, int n, int lane) {
      base = n;
      have = entry(p, s, n + lane);
      ahead = entry(p, s, n + 32 + lane);
    }
    // Entry n, not before the one of the last call.
    __device__ __forceinline__ int at(const Params& p, const Seq& s, int n, int lane) {
      while (n >= base + 32) {
        base += 32;
        have = ahead;
        ahead = entry(p, s, base + 32 + lane);
      }
      return get(n);
    }
    __device__ __forceinline__ int get(int n) const { return __shfl_sync(~0u, have, n - base); }
  };

  // 32 entries of the block table, one a lane. The next ones are not on their way: who takes an
  // entry waits for all loads of entries, so that they would be waited for at once.
  struct Entries {
    int base, have;
    // The lane's: entry n + lane, or -1 behind the last one. n never decreases, until forget.
    __device__ __forceinline__ int at(const Params& p, const Seq& s, int n, int lane) {
      if (n >= base + 32) {
        base = n;
        const int mine = n + lane;
        have = mine <= (s.keys - 1) >> (31 - __clz(p.pageTokens)) ? p.pages[s.pages + mine] : -1;
      }
      return __shfl_sync(~0u, have, n - base + lane);
    }
    __device__ __forceinline__ void forget() { base = -(1 << 30); }
  };

#if __CUDA_ARCH__ >= 900
  // All keys (or values) of a chunk, from a row on.
  __device__ static __forceinline__ void copyChunk(u32 to, const TensorMap* map, int row, u32 bar, u64 policy) {
    if constexpr (EVEN) {
      copyBox(to, map, 0, row, 0, bar, policy);
    } else {
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) copyBox(to + j * BLOCK, map, j * (128 / Store::bytes), row, 0, bar, policy);
    }
  }

  // Whether a producer warp has chunks in front of some that are left out, and the next one behind them.
  __device__ static __forceinline__ bool leaps(const Place& at, int c) { return c < at.front && at.front <= c + 2; }

  // Makes the barriers of a slot. Each is filled with keys by one warp and with values by another.
  __device__ static __forceinline__ void openSlot(u32 full, u32 empty, int slot) { barrierInit(full + slot * 8, 2), barrierInit(empty + slot * 8, 1); }

  // A producer warp: it fills every second slot of the ring, with keys or with
  // values, and walks the whole range from `at` on without regard to where output tiles
  // end: beginning with chunk `first`, which goes to `slot`, whose barrier has that parity.
  // PAGED: `entry` is the lane's, of the block table's entries from those of `at` on; with scores, where `paged`.
  __device__ static __forceinline__ void produce(const Params& p, Place at, const TensorMap* map, u32 ring, u32 full, u32 empty, int first, int slot, u32 parity, int lane, int wholeTiles, int entry = 0, bool paged = true) {
    const bool paging = S::PAGED && (!SCORED || paged);
    const int LONG_PACE = paging ? 2 * PACE : even((64 << 10) / SLOT * 3 / 2), MANY = paging ? 160 / BLOCKS : 160;
    int skip = first;
    const u64 policy = p.streamed ? readOnce() : readAgain();
    // In the megakernel by a division: any change deals its registers out anew, and with a shift it
    // has not been measured.
    const int boxes = S::LINKED ? KEYS / p.box : KEYS >> (31 - __clz(p.box)), pageRows = p.pageRows, pageTokens = p.pageTokens, slots = p.slots, pace = min(at.left + wholeTiles > MANY ? LONG_PACE : PACE, slots);
    const int* table = p.pages;
    // Chunk c's first page, where a chunk is 2^morePages of them or a page 2^moreChunks chunks.
    const int morePages = 31 - __clz(boxes), moreChunks = boxes == 1 ? __clz(KEYS) - __clz(pageTokens) : 0;
    const auto pageOf = [&](int c) { return c << morePages >> moreChunks; };
    int begin = at.chunk;
    if constexpr (SCORED) begin = at.chunkAt(begin);
    Entries entries = {pageOf(begin) - (32 - PREFETCHED_ENTRIES), entry}; // the last lanes' are the first
    bool waited = S::LINKED, again = false; // again: the ring has been filled once
    // The memory serves what it was asked for first: where more is on its way than keeps it
    // busy, queries wait behind keys, and some multiprocessors behind others.
    const auto keepPace = [&] {
      if (S::LINKED) return;
      const int before = slot - pace;
      if (before >= 0) {
        barrierWait(full + before * 8, parity ^ 1);
      } else if (again) {
        barrierWait(full + (before + slots) * 8, parity);
      }
    };
    const auto claim = [&](u32 bar) {
      barrierWait(empty + slot * 8, parity);
      __syncwarp(); // no lane is a round ahead of another
      if (elected()) barrierExpect(bar, SLOT / 2);
    };
    const auto nextSlot = [&] {
      if ((slot += 2) >= slots) slot -= slots, parity ^= 1, again = true;
    };
    do {
      // What the launch before may write is waited for: all keys, or those that were
      // appended just now. The block table is there. Between the wait and the copy there is
      // nothing that could be done before.
      const int head = at.head * p.headRows, old = p.early ? at.s.keys - at.s.queries : 0;
      const auto beforeChunk = [&](int c) {
        if (!waited && (c + 1) * KEYS > old) waitForEarlier(), waited = true;
      };
      int c = at.chunk + skip;
      // A box outside of the array is zeros.
      const auto copyKeys = [&](u32 to, u32 bar, int b, int row) {
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) copyBox(to + j * BLOCK + b * p.box * 128, map, EVEN ? 0 : j * (128 / Store::bytes), row, EVEN ? j : 0, bar, policy);
      };
      constexpr int OUTSIDE = 0x7ffffff0;
      const auto fillPaged = [&] {
#pragma unroll 1
        for (; c < at.end; c += 2) {
          int k = c; // where it is among the sequence's
          if constexpr (SCORED) k = at.chunkAt(c);
          const u32 bar = full + slot * 8, to = ring + slot * SLOT;
          const int page = entries.at(p, at.s, pageOf(k), lane); // the chunk's page number `lane`
          const int row = page < 0 ? OUTSIDE : page * pageRows + head + (k * KEYS & (pageTokens - 1));
          int rows[BURST];
          const auto find = [&](int b) {
#pragma unroll
            for (int i = 0; i < BURST; i++) rows[i] = __shfl_sync(~0u, row, b + i);
          };
          find(0);
          keepPace();
          claim(bar);
          beforeChunk(k);
          if (boxes == 1) {
            if (elected()) copyChunk(to, map, rows[0], bar, policy);
          } else {
            for (int b = 0;;) {
              if (elected()) {
#pragma unroll
                for (int i = 0; i < BURST; i++)
                  if (i < 2 || i < boxes) copyKeys(to, bar, b + i, rows[i]); // there are two at least
              }
              if ((b += BURST) >= boxes) break;
              find(b);
            }
          }
          nextSlot();
        }
        entries.forget();
      };
      if (paging) {
        fillPaged();
      } else if (table == nullptr) {
        int k = c; // where the first one is among the sequence's
        if constexpr (SCORED) k = at.chunkAt(c);
        int row = at.s.pages * pageRows + head + k * KEYS;
#pragma unroll 1
        for (; c < at.end; c += 2, row += 2 * KEYS) {
          const u32 bar = full + slot * 8, to = ring + slot * SLOT;
          keepPace();
          barrierWait(empty + slot * 8, parity);
          __syncwarp(); // no lane is a round ahead of another
          if constexpr (SCORED) k = at.chunkAt(c);
          beforeChunk(SCORED ? k : c);
          if (lane == 0) {
            barrierExpect(bar, SLOT / 2);
            copyChunk(to, map, row, bar, policy);
          }
          if constexpr (SCORED) {
            if (leaps(at, c)) row += at.gap * KEYS;
          }
          nextSlot();
        }
      } else if (c < at.end) {
        int k = c; // where the first one is among the sequence's
        if constexpr (SCORED) k = at.chunkAt(c);
        int n = k * KEYS / pageTokens, in = k * KEYS - n * pageTokens;
        Pages pages;
        pages.open(p, at.s, n, lane);
        int page = pages.get(n);
#pragma unroll 1
        for (; c < at.end; c += 2) {
          const u32 bar = full + slot * 8, to = ring + slot * SLOT;
          if (boxes <= 2) keepPace(); // smaller ones are slow to ask for, and so late enough
          claim(bar);
          if constexpr (SCORED) k = at.chunkAt(c);
          beforeChunk(SCORED ? k : c);
          if (boxes == 1) {
            const int row = page * pageRows + head + in;
            if (elected()) copyChunk(to, map, row, bar, policy);
            in += KEYS;
          } else {
#pragma unroll 1
            for (int b = 0; b < boxes; b++) {
              const int row = page < 0 ? OUTSIDE : page * pageRows + head + in;
              if (elected()) copyKeys(to, bar, b, row);
              if ((in += p.box) >= pageTokens) {
                in = 0;
                page = pages.at(p, at.s, ++n, lane);
              }
            }
          }
          in += KEYS; // the other warp's
          if (in >= pageTokens) {
            do in -= pageTokens, n++;
            while (in >= pageTokens);
            page = pages.at(p, at.s, n, lane);
          }
          if constexpr (SCORED) {
            if (leaps(at, c)) {
              k = at.chunkAt(c + 2);
              n = k * KEYS / pageTokens, in = k * KEYS - n * pageTokens;
              pages.open(p, at.s, n, lane);
              page = pages.get(n);
            }
          }
          nextSlot();
        }
      }
      skip = c - at.end; // 0 or 1, or what a short part leaves
    } while (at.next(p));
    if (!waited) waitForEarlier();
  }
#else
  // The producing side of a warp: it runs ahead of the consuming side by the length of the ring.
  struct Reader {
    Place at; // at.chunk is the sequence's
    bool more;
    int page; // of chunk at.chunk
    u32 slot, stages, ring;

    __device__ __forceinline__ void begin(const Params& p, const Work* work, u32 ring_, int stages_, int warp) {
      at.begin(p, work);
      if constexpr (SCORED) at.chunk = at.chunkAt(at.chunk);
      more = true;
      slot = 0;
      ring = ring_, stages = stages_;
      advance(p, warp);
    }
    // Goes n chunks on.
    __device__ __forceinline__ void advance(const Params& p, int n) {
      if constexpr (SCORED) at.chunk = at.numberOf(at.chunk);
      at.chunk += n;
      while (more && at.chunk >= at.end) {
        int over = at.chunk - at.end;
        more = at.next(p);
        at.chunk += over;
      }
      if constexpr (SCORED) at.chunk = at.chunkAt(at.chunk);
      if (more && p.box == KEYS) page = p.pages == nullptr ? at.s.pages : p.pages[at.s.pages + at.chunk * KEYS / p.pageTokens];
    }
    // The row of keys of the chunk's key i.
    __device__ __forceinline__ long long rowOf(const Params& p, int i) const {
      int of = page, in = at.chunk * KEYS + i;
      if (p.pages != nullptr) {
        int n = in / p.pageTokens;
        in -= n * p.pageTokens;
        if (p.box != KEYS) of = p.pages[at.s.pages + n];
      }
      return (long long)of * p.pageRows + at.head * p.headRows + in;
    }
    // Starts to fill the next slot, or does nothing at the end of the range.
    __device__ __forceinline__ void issue(const Params& p, int lane, int warps) {
      if (more) {
        constexpr int PIECES = D * Store::bytes / 16; // of a row
        const u32 base = ring + slot * SLOT;
        const int live = at.s.keys - at.chunk * KEYS;
        const long long row0 = p.box == KEYS ? rowOf(p, 0) : 0;
#pragma unroll
        for (int i = lane; i < KEYS * PIECES; i += 32) {
          int r = i / PIECES, column = i % PIECES * 16;
          bool there = r < live; // what lies behind the live keys is zeros, whatever is in memory
          if constexpr (SCORED) there = there && !at.hides(p, at.chunk * KEYS + r); // and what nobody sees
          long long from = 0;
          if (there) from = (p.box == KEYS ? row0 + r : rowOf(p, r)) * (D * Store::bytes) + column;
          u32 to = base + column / 128 * BLOCK + swizzled(r, column % 128);
          copy16(to, (const char*)p.keys + from, there);
          copy16(to + BLOCKS * BLOCK, (const char*)p.values + from, there);
        }
      }
      copyCommit();
      if (++slot == stages) slot = 0;
      if (more) advance(p, warps);
    }
  };
#endif
};
