// Scores and the products of values with dO once more, by warp groups (9.0): gradients of biases and of a variant's tensors are sums over
// them.
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
        // Products of the second half are on their way while a Job with registers for BOTH takes the first one. Rows that are none are zeros.
        typename Half::Numbers x, y;
        const u32 keys = at + group * 64 * 128, values = by + group * 64 * 128, logs = at + 2 * TILE;
        const int row = w.i * ROWS;
        multiply(x, keys, at + TILE);
        multiply(y, values, by + TILE);
        if constexpr (Job::BOTH) {
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
        } else {
          wgmmaWait<1>();
          pinned(x);
          job.template weigh<Half, 0>(p, w, row, x, logs, mine);
          wgmmaWait<0>();
          pinned(y);
          job.template take<Half, 0>(p, w, row, x, y, logs, mine);
          if (row + 64 < w.s.queries) {
            multiply(x, keys, at + TILE + 64 * 128);
            multiply(y, values, by + TILE + 64 * 128);
            wgmmaWait<1>();
            pinned(x);
            job.template weigh<Half, 1>(p, w, row + 64, x, logs + 64 * 8, mine);
            wgmmaWait<0>();
            pinned(y);
            job.template take<Half, 1>(p, w, row + 64, x, y, logs + 64 * 8, mine);
          }
        }
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

// The Job that makes the gradient of the bias. An item is a key block and a query block of a head and a sequence of the bias, or all query
// blocks if they share a row of the bias. The item covers all heads and sequences that share the bias. Every number of the gradient is written once.
struct AgainBias {
  static constexpr bool BOTH = false; // whether there are registers for the products of both halves
  __device__ __forceinline__ AgainBias(char*) {}
  static constexpr int BYTES = 0; // of shared memory

  struct Place {
    int block, part, head, seq;
    template <class B> __device__ static __forceinline__ int parts(const BackwardParams& p) { return scoreOf(p).biasRow == 0 ? 1 : (p.queries + B::ROWS - 1) / B::ROWS; }
    __device__ static __forceinline__ int heads(const BackwardParams& p) { return scoreOf(p).biasHead == 0 ? 1 : p.kvHeads * p.group; }
    __device__ __forceinline__ Place(const BackwardParams& p, int number, int keyBlocks, int parts) {
      block = number % keyBlocks, number /= keyBlocks;
      part = number % parts, number /= parts;
      head = number % heads(p), seq = number / heads(p);
    }
  };
  template <class B> __device__ static __forceinline__ Place place(const BackwardParams& p) { return Place(p, blockIdx.x, (p.keys + B::KEYS - 1) / B::KEYS, Place::parts<B>(p)); }
  template <class B> __device__ static __forceinline__ typename B::Walk walk(const BackwardParams& p) {
    const BackwardScores& score = scoreOf(p);
    const Place at = place<B>(p);
    const bool rows = score.biasRow != 0;
    return typename B::Walk(p, at.seq, score.biasSequence == 0 ? p.batch : at.seq + 1, at.head, score.biasHead == 0 ? p.kvHeads * p.group : at.head + 1,
        at.block * B::KEYS, rows ? at.part : 0, rows ? at.part + 1 : 0x7fffffff);
  }

  float sums[16][4];
  u32 bias[16][2]; // of rows first and first+1, ..., for the key and the one 8 behind it
  long long from;  // of the numbers of the head and sequence
  int first, key;  // the lane's

  template <class B> __device__ __forceinline__ void begin(const BackwardParams& p, int mine) {
    const BackwardScores& score = scoreOf(p);
    const Place at = place<B>(p);
    from = at.seq * score.biasSequence + at.head * score.biasHead;
    first = at.part * B::ROWS + threadIdx.x % 4 * 2, key = mine + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      u16 x[4];
#pragma unroll
      for (int h = 0; h < 4; h++) {
        sums[j][h] = 0.f;
        const int r = min(first + j * 8 + h % 2, p.queries - 1), k = min(key + h / 2 * 8, p.keys - 1); // others are masked
        x[h] = ((const u16*)score.bias)[from + r * score.biasRow + k];
      }
#pragma unroll
      for (int h = 0; h < 2; h++) bias[j][h] = x[2 * h] | (u32)x[2 * h + 1] << 16;
    }
  }

  // Turns products into weights.
  template <class B, int H, class Walk> __device__ __forceinline__ void weigh(const BackwardParams& p, const Walk& w, int row, typename B::Numbers& x, u32 logs, int mine) const {
    const BackwardScores& score = scoreOf(p);
    typename HopperScored::Changes<B> scores(p, w.s, w.kvHead(), w.all(), row, mine);
    const bool some = scores.masked() || row + B::ROWS > w.s.queries; // a bias may be NaN where there is no row
    const float by = score.slopes == nullptr ? 0.f : score.slopes[w.head];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float of[4];
      B::loadFour(of, logs + (j * 8 + threadIdx.x % 4 * 2) * 8);
#pragma unroll
      for (int h = 0; h < 4; h++) x[j][h] *= p.scale;
      if (score.cap != 0.f) {
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] = score.cap * tanh_(x[j][h] * score.reciprocal);
      }
#pragma unroll
      for (int h = 0; h < 4; h++) {
        const float z = __fmaf_rn(by, scores.away(j, h), x[j][h]), add = h % 2 ? B::Operand::high(bias[H * 8 + j][h / 2]) : B::Operand::low(bias[H * 8 + j][h / 2]);
        x[j][h] = exp2_(notPositive(__fmaf_rn(add, score.biasFactor, z) - of[h % 2 * 2]) * B::LOG2E);
      }
      if (some) {
        scores.mask(x[j], j);
#pragma unroll
        for (int h = 0; h < 4; h++)
          if (row + (int)threadIdx.x % 4 * 2 + j * 8 + h % 2 >= w.s.queries) x[j][h] = 0.f;
      }
    }
  }
  template <class B, int H, class Walk> __device__ __forceinline__ void take(const BackwardParams& p, const Walk& w, int row, const typename B::Numbers& x, typename B::Numbers& y, u32 logs, int mine) {
    if (scoreOf(p).below != 0) {
      typename HopperScored::Changes<B> scores(p, w.s, w.kvHead(), w.all(), row, mine);
      scores.draw(), scores.drop(y);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float of[4];
      B::loadFour(of, logs + (j * 8 + threadIdx.x % 4 * 2) * 8);
#pragma unroll
      for (int h = 0; h < 4; h++) sums[H * 8 + j][h] = __fmaf_rn(x[j][h], y[j][h] - of[h % 2 * 2 + 1], sums[H * 8 + j][h]);
    }
  }

  template <class B> __device__ __forceinline__ void end(const BackwardParams& p) {
    using Store = typename B::Format::Store;
    const BackwardScores& score = scoreOf(p);
    if (score.biasRow == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 16; j++) sum += sums[j][2 * h] + sums[j][2 * h + 1];
        sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
        if (threadIdx.x % 4 == 0 && key + h * 8 < p.keys) Store::store(score.biasGrad, from + key + h * 8, sum * score.biasFactor);
      }
      return;
    }
    // Transposed, a lane has two keys of a row.
    const int lane = threadIdx.x % 32, r0 = first - lane % 4 * 2 + lane / 4, k0 = key - lane / 4 + lane % 4 * 2;
    const bool pairs = score.biasRow % 2 == 0 && (u64)score.biasGrad % 4 == 0; // and so is `from` even
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 two = transposed(B::Operand::pack(sums[j][2 * h] * score.biasFactor, sums[j][2 * h + 1] * score.biasFactor));
        const int r = r0 + j * 8, k = k0 + h * 8;
        u16* const to = (u16*)score.biasGrad + from + r * score.biasRow + k;
        if (r >= p.queries) continue;
        if (pairs && k + 1 < p.keys) {
          *(u32*)to = two;
        } else {
          if (k < p.keys) to[0] = (u16)two;
          if (k + 1 < p.keys) to[1] = two >> 16;
        }
      }
  }
};
#define BACKWARD_AGAIN(name, ...) \
  extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ BackwardScoredParams p) { BackwardAgain<__VA_ARGS__>::run(p.p); }
#else
#define BACKWARD_AGAIN(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ BackwardScoredParams p) {}
#endif
