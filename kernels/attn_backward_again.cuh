// Scores and the products of values with dO once more, by warp groups (9.0): gradients of a variant's tensors are sums over them.
//
// A thread block takes an item: some query blocks of some heads and sequences, for KEYS keys. Four producer warps bring a tile each, of
// keys, queries, values and dO. The ring has pairs of tiles: keys and queries, then values and dO. Two consumer warp groups have half of the
// keys each, and multiply one half of the rows after the other. Scores are transposed: a lane has keys key and key+8, and rows first,
// first+1, first+8, ...
//
// A Job chooses the items and uses the products.
#pragma once
#include "attn_backward_hopper_variant.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The query blocks of an item: of sequences [seq, seqEnd), of heads [head0, headEnd) of each sequence, and of blocks [from, to) all that see one of the keys.
template <class B> struct AgainWalk {
  const BackwardParams& p;
  int seq, head; // head: of the sequence
  const int seqEnd, head0, headEnd, key, from, to;
  int i, begin, end;
  BackwardSeq s;
  __device__ __forceinline__ AgainWalk(const BackwardParams& p, int seq, int seqEnd, int head, int headEnd, int key, int from, int to)
      : p(p), seq(seq), head(head), seqEnd(seqEnd), head0(head), headEnd(headEnd), key(key), from(from), to(to), i(0), begin(0), end(0), s(p, seq) {
    enter();
  }
  __device__ __forceinline__ bool there() const { return seq < seqEnd; }
  __device__ __forceinline__ int all() const { return seq * p.kvHeads * p.group + head; } // the head, of all sequences
  __device__ __forceinline__ int kvHead() const { return all() / p.group; }
  __device__ __forceinline__ void next() {
    if (++i < end) return;
    i = begin;
    if (++head < headEnd) return;
    head = head0, seq++;
    enter();
  }
  __device__ __forceinline__ void enter() { // the first sequence from this one on that has query blocks
    for (; seq < seqEnd; seq++) {
      s = BackwardSeq(p, seq);
      const int behind = s.keys - s.queries, blocks = key < s.keys ? (s.queries + B::ROWS - 1) / B::ROWS : 0;
      begin = min(max(s.first, p.causal ? key - behind : 0) / B::ROWS, blocks);
      end = min(BackwardScored::endOf<B>(p, behind, key, begin, blocks), to), begin = max(begin, from);
      i = begin;
      if (begin < end) return;
    }
  }
};

// PADDED divides the number of rows of a head that have log-sum-exps.
template <class Format_, int D, int STAGES, int PADDED, class Job> struct BackwardAgain {
  using Format = Format_;
  using Math = typename Format::Math;
  using Operand = typename Math::Operand;
  using Hopper = BackwardHopper<Format, D, 8192 / D, 3, HopperScored>;
  static constexpr int KEYS = 128, ROWS = 128, MINE = 16, STATISTICS = ROWS * 8, TILE = 128 * D * 2, PAIR = 2 * TILE + STATISTICS;
  static constexpr int OWN = Job::BYTES, SHARED = STAGES * PAIR + OWN + 16 * STAGES;
  using Walk = AgainWalk<BackwardAgain>;
  // Half of the rows: the block of a product.
  struct Half {
    using Format = Format_;
    using Math = typename Format::Math;
    using Operand = typename Math::Operand;
    using Numbers = float[8][4];
    static constexpr int ROWS = 64, MINE = 16;
    static constexpr float LOG2E = 1.4426950408889634f;
    __device__ static __forceinline__ void loadFour(float (&x)[4], u32 at) { Hopper::loadFour(x, at); }
    __device__ static __forceinline__ void storeShared(u32 at, u32 x) { Hopper::storeShared(at, x); }
  };

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const u32 ring = sharedAddress(memory), full = ring + STAGES * PAIR + OWN, empty = full + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) barrierInit(full + i * 8, 64), barrierInit(empty + i * 8, 256);
      opened();
    }
    __syncthreads();
    if (warp < 4) {
      fewerRegisters<24>();
      int n = warp / 2; // of pairs
#pragma unroll 1
      for (Walk w = Job::template walk<BackwardAgain>(p); w.there(); w.next()) {
        const u32 stage = n % STAGES, at = ring + stage * PAIR + warp % 2 * TILE;
        barrierWait(empty + stage * 8, n / STAGES & 1 ^ 1);
        if (warp % 2 == 0) {
          Hopper::template copyRows<KEYS>(p, at, warp == 0 ? p.k : p.v, (long long)w.kvHead() * p.keys * p.dim, w.key, BackwardScored::hidden(p, w.s), w.s.keys, lane, BackwardScored::sinkTokens(p));
        } else {
          Hopper::template copyRows<ROWS>(p, at, warp == 1 ? p.q : p.outGrad, (long long)w.all() * p.queries * p.dim, w.i * ROWS, w.s.first, w.s.queries, lane);
          if (warp == 1) {
            const int padded = p.blocks * PADDED;
#pragma unroll
            for (int k = lane; k < ROWS / 2; k += 32) {
              const int row = w.i * ROWS + k * 2;
              copy16(at + TILE + k * 16, p.rows + (long long)w.all() * padded + (row < padded ? row : 0), row < padded);
            }
          }
        }
        copyCommit();
        copyWait<0>();
        fenceAsync();
        barrierArrive(full + stage * 8);
        n += 2;
      }
    } else {
      moreRegisters<240>();
      const int group = warp / 4 - 1;
      Job job(memory + STAGES * PAIR);
      int n = 0;
      Walk w = Job::template walk<BackwardAgain>(p);
      const int mine = w.key + group * 64 + warp % 4 * 16;
      job.template begin<BackwardAgain>(p, mine);
#pragma unroll 1
      for (; w.there(); w.next(), n += 2) {
        const u32 stage = n % STAGES, other = (n + 1) % STAGES, at = ring + stage * PAIR, by = ring + other * PAIR;
        barrierWait(full + stage * 8, n / STAGES & 1);
        barrierWait(full + other * 8, (n + 1) / STAGES & 1);
        // Products of the second half are on their way while the Job takes the first one. Rows that are none are zeros.
        typename Half::Numbers x, y;
        const u32 keys = at + group * 64 * 128, values = by + group * 64 * 128, logs = at + 2 * TILE;
        const int row = w.i * ROWS;
        multiply(x, keys, at + TILE);
        multiply(y, values, by + TILE);
        typename Half::Numbers x1, y1;
        multiply(x1, keys, at + TILE + 64 * 128);
        multiply(y1, values, by + TILE + 64 * 128);
        wgmmaWait<2>();
        pinned(x), pinned(y);
        job.template take<Half>(p, w, row, x, y, logs, mine);
        wgmmaWait<0>();
        pinned(x1), pinned(y1);
        if (row + 64 < w.s.queries) job.template take<Half>(p, w, row + 64, x1, y1, logs + 64 * 8, mine);
        job.flush(p, ROWS);
        barrierArrive(empty + stage * 8), barrierArrive(empty + other * 8); // all lanes: they have read log-sum-exps
      }
      job.template end<BackwardAgain>(p);
    }
  }
  __device__ static __forceinline__ void multiply(typename Half::Numbers& to, u32 of, u32 by) {
    pinned(to);
    wgmmaFence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) Wgmma<64>::template shared<Math>(to, rowOperand(of + k / 4 * (KEYS * 128) + k % 4 * 32), rowOperand(by + k / 4 * (ROWS * 128) + k % 4 * 32), k > 0);
    wgmmaCommit();
  }
};
#endif
