// What a launch is told, and the walk through a thread block's range of LeanTiles.
#pragma once
#include "attn_state.cuh"
#include "copy.cuh"
#include "tagged.cuh"

struct alignas(16) Seq {
  int row;     // its first row of queries
  int queries; // rows
  int keys;    // live keys
  int pages;   // its first entry of the block table; the page itself where pages hold whole sequences
};

// A thread block's LeanTiles: a range of them, and then one of whole output tiles.
struct alignas(16) Work {
  int seq, head, block, tile; // the first: its output tile, and its place there
  int tiles;                  // in the range; 0: nothing to do
  int host, sharers;          // of the first output tile: the block that has its LeanTile 0, and how many have a part
  int guests;                 // how many have a part of the range's last output tile, if this block hosts it
  Seq first;                  // sequence number seq
  int wholeSeq, wholeHead, wholeBlock; // the first of the whole ones
  int wholeTiles;                      // of all of them; 0: there are none. With batch invariance: the three before are those of StatesOf
  Seq firstWhole;                      // sequence number wholeSeq
};
// In wholeSeq of all thread blocks: none has whole output tiles behind its range, and those
// that share an output tile merge it together (Reduce::mergeTogether), instead of the last one to
// arrive.
constexpr int TOGETHER = -1;

struct Params {
  const void *keys, *values;
  const void* query;
  void* out;
  float* lse; // may be null
  const Work* work;
  const Seq* seqs;
  const int* pages;  // the block table; null where pages hold whole sequences
  const int* masked; // fully masked rows, which see no key: how many, and which
  float* partials;   // 2*blocks of (rows, D) and then of (rows, 2)
  u32* counters;     // one a block, zero
  long long queryRow, queryHead, outRow, outHead, lseRow, lseHead; // strides, in elements
  int pageRows, headRows; // of keys: key j of head h in page p is row p*pageRows + h*headRows + j
  int pageTokens;
  int heads, group;      // KV heads, and query heads of each
  int tileShift;         // a LeanTile has 2^tileShift chunks
  int box;               // keys that are copied at once: a power of two that divides a chunk and a page
  int rows;              // at most so many rows in an output tile: min(16, group*queries)
  int warps;             // consumers; from sm_90 on others are producers, and epilogue warps
  int slots;             // of the ring, in chunks; a multiple of warps
  int buffers;           // buffers of states in shared memory: 2, or 1 where more do not fit
  int parts;             // log2 of the warps that share a row's partials: 2^parts*rows <= warps, or 0
  int causal;
  int queryType, outType;
  int early;    // keys and values of earlier steps may be read before the launch before this one has ended
  int streamed; // keys and values don't fit in the L2 cache
  float scale;  // times log4(e)
  float perGroup; // 1/group
};

// What thread blocks have that merge output tiles together.
struct MeetParams {
  u64* tagged; // their partials as LL protocol words: 2*blocks of (rows, D+2)
  u32* runs;   // of each block, how often it did so; and then who has begun: one for each block, twice, zero
  int count;   // there is a place for so many words
};

struct LaunchParams {
  TensorMap keyMap, valueMap; // from sm_90 on: rows x head dim, box: `box` rows of 128 bytes
  Params p;
  MeetParams meet;
  const int* prefetched; // page entries: of each thread block PREFETCHED_ENTRIES of the block table, those that its range begins with. For the kernels for pages alone
};

constexpr int PREFETCHED_ENTRIES = 16; // of what is on its way at first: 64 KB in pages of 16 tokens

// The query position that row r of an output tile's rows belongs to: r/group.
__device__ __forceinline__ int positionOf(const Params& p, int r) { return (int)(((float)r + 0.5f) * p.perGroup); }

constexpr int ROWS = 16; // rows of a tensor core product

constexpr int CONSUMER_WARPS = 4; // at most; they compute
constexpr int PRODUCER_WARPS = 4; // they copy keys and values of even and odd chunks
// They finish what consumers have computed. Warps are so many only where consumers can have
// the registers of the others.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int EPILOGUE_WARPS = 4;
#else
constexpr int EPILOGUE_WARPS = 0;
#endif
// Registers of a lane then. A block has what its threads begin with, 168 each: warps that
// want more than others leave wait forever.
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 80, EPILOGUE_REGISTERS = 184;
static_assert(CONSUMER_REGISTERS + PRODUCER_REGISTERS + EPILOGUE_REGISTERS <= 3 * 168);

// Who makes the ring's barriers says that they are made, and waits for nobody: named barriers
// 2, 3 and 5 are those of consumers, producers and epilogue warps.
__device__ __forceinline__ void ringIsReady(int warps) {
  asm volatile("bar.arrive 2, %0;" ::"r"((warps + 1) * 32) : "memory");
  asm volatile("bar.arrive 3, %0;" ::"r"(PRODUCER_WARPS * 32) : "memory");
  if (EPILOGUE_WARPS > 0) asm volatile("bar.arrive 5, %0;" ::"n"((EPILOGUE_WARPS + 1) * 32) : "memory");
}
__device__ __forceinline__ void waitForRing(int barrier, int warps) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * 32) : "memory"); }

// The log-sum-exp of a row that sees no key, of a query head.
struct NoSink {
  __device__ __forceinline__ float operator()(int) const { return -LEAN_INF; }
};

// Fully masked rows: zeros, which `zero` writes at a place of the output, and what `sink` says of a head where there
// is a log-sum-exp. `count` of them are shared out among the thread blocks, and in a block
// among `threads`, of which this is number `thread`. P is Params or what has the same names.
template <class P, class Zero, class Sink = NoSink> __device__ __forceinline__ void writeFullyMasked(const P& p, int count, int dim, float* lse, int thread, int threads, const Zero& zero, const Sink& sink = Sink()) {
  const int heads = p.heads * p.group;
#pragma unroll 1
  for (int b = blockIdx.x; b < count; b += gridDim.x) {
    const long long row = p.masked[1 + b];
#pragma unroll 1
    for (int i = thread; i < heads * dim; i += threads) zero(row * p.outRow + i / dim * p.outHead + i % dim);
    if (lse != nullptr)
#pragma unroll 1
      for (int h = thread; h < heads; h += threads) lse[row * p.lseRow + h * p.lseHead] = sink(h);
  }
}

// A Variant says how attention differs from softmax(scale q K^T) V over all keys, or causal ones. It is a struct with
//
//   scores      whether it differs at all
//   ROWS        rows of an output tile, at most
//   Chunks      which chunks of a sequence's keys an output tile has
//   invariant   whether the bits of a row depend on nothing but the row
//   Rows<S>     with scores: what a lane of decode kernels of a Shape knows of its rows
//
// Kernels with scores read the Variant's parameters, which lie behind the others. Plain does not differ, so kernels of Plain
// have no code for variants. The other Variant is in attn_variant.cuh.
struct Plain {
  static constexpr bool scores = false;
  enum : int { ROWS = ::ROWS };
  struct Chunks {
    enum : int { gap = 0 };
    // Where number c of the output tile's chunks is among those of the sequence.
    __device__ __forceinline__ int chunkAt(int c) const { return c; }
  };
  // Whether the bits of a row depend on nothing but the row.
  __device__ static __forceinline__ constexpr bool invariant(const Params&) { return false; }
};

// A place in a thread block's LeanTiles: output tile after output tile, some chunks of each. With batch invariance, which has no
// sink tokens: LeanTile after LeanTile, which begin at multiples of their size.
template <int CHUNK, class V = Plain> struct Walk : V::Chunks {
  using Variant = V;
  enum : int { ROWS = V::ROWS };
  using V::Chunks::gap;
  const Work* work;
  Seq s;
  int seq, head, block, tile;
  int left;      // tiles of the range, from here on
  bool parted;   // this is not yet the range of whole output tiles
  int take;      // of them in this output tile
  int tiles;     // of this output tile
  int chunk, end; // the chunks of this part, numbers among those of the output tile
  int visible;   // keys that some row sees

  __device__ __forceinline__ int rows(const Params& p) const { return min(s.queries * p.group - block * ROWS, ROWS); }

  __device__ __forceinline__ int count(const Params& p) {
    visible = s.keys;
    if (p.causal) {
      int last = min((block + 1) * ROWS, s.queries * p.group) - 1;
      visible = max(s.keys - s.queries + positionOf(p, last) + 1, 0);
    }
    int chunks = (visible + CHUNK - 1) / CHUNK;
    if constexpr (V::scores) chunks = max(chunks - this->template leaveOut<CHUNK>(p, s, s.keys - s.queries + positionOf(p, block * ROWS)), 0);
    return (chunks + (1 << p.tileShift) - 1) >> p.tileShift;
  }
  __device__ __forceinline__ void open(const Params& p) {
    take = min(left, V::invariant(p) ? 1 : tiles - tile);
    chunk = tile << p.tileShift;
    end = min((tile + take) << p.tileShift, (visible + CHUNK - 1) / CHUNK - gap);
    if constexpr (V::scores) {
      this->skipped = V::invariant(p) ? max(this->hidden / CHUNK - gap - chunk, 0) : 0;
      chunk += this->skipped;
    }
  }
  // At the beginning of *w, which is in memory; `known` is it, or a copy in registers.
  __device__ __forceinline__ void begin(const Params& p, const Work* w, const Work& known) {
    work = w, s = known.first, seq = known.seq, head = known.head, block = known.block, tile = known.tile, left = known.tiles, parted = true;
    tiles = count(p);
    open(p);
  }
  __device__ __forceinline__ void begin(const Params& p, const Work* w) { begin(p, w, *w); }
  // Whether this is the last of those that may be parts of output tiles.
  __device__ __forceinline__ bool endsParts() const { return parted && left <= take; }
  // To the next output tile; false behind the last one.
  __device__ __forceinline__ bool next(const Params& p) {
    left -= take;
    if constexpr (V::scores) {
      if (V::invariant(p) && left > 0 && ++tile < tiles) {
        open(p);
        return true;
      }
    }
    tile = 0;
    if (left <= 0) {
      if (!parted || work->wholeTiles == 0) return false;
      s = work->firstWhole, seq = work->wholeSeq, head = work->wholeHead, block = work->wholeBlock, left = work->wholeTiles, parted = false;
      tiles = count(p);
      open(p);
      return true;
    }
    do {
      if (++block * ROWS >= s.queries * p.group) {
        block = 0;
        if (++head == p.heads) {
          head = 0;
          s = p.seqs[++seq];
        }
      }
      tiles = count(p);
    } while (tiles == 0);
    open(p);
    return true;
  }
};

