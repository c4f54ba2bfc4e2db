// The Variant of attention's gradients that has everything: changes of scores, masks other than causal, attention sinks, dropout.
// Which of them a launch has is known at run time. A score x, of query head h at place p with key j, becomes
//
//	x = cap tanh(x / cap)
//	x = x + slope(h) (j - p)
//	x = x + bias(sequence, h, position, j)
//
// in this order. With t = tanh(x / cap), gradients of products have the factor 1 - t t. With dropout, dv is a sum of p z dO, and
// dS = p (z dO v - D), where z is 0 or 1/keep.
//
// A window hides key blocks from query blocks: the two do not meet. A query block meets key blocks [lowest, last], and those of sink
// tokens before them. Sums of dq have the order of all of these, from the last to the first.
#pragma once
#include "attn_backward.cuh"
#include "attn_variant.cuh"

// The parameters of the Variant: lists have a number for each query head.
struct BackwardScores {
  const float* slopes;        // of ALiBi; null: none
  const float* sinks;         // attention sinks; null: none
  const void* bias;           // of the type of queries; null: none
  void* biasGrad;             // as bias
  float* sinkGrad;
  float* sinkTerms;           // one for each row of query blocks, as rows; null: not wanted
  long long biasSequence, biasHead, biasRow; // strides of the bias, in elements; 0: shared
  float cap, reciprocal;      // soft cap and its reciprocal; cap 0: none
  float biasFactor;
  int window;                 // keys that a query sees at most, up to its own; 0: no window
  int sinkTokens;             // the first keys, which it sees besides
  u32 seedLow, seedHigh;      // of dropout
  u32 below;                  // weights whose number of 16 bits is less are dropped; 0: no dropout
  float factor;               // on kept weights
  int rows;                   // of the query blocks of a head
};
// They lie right behind BackwardParams.
__device__ __forceinline__ const BackwardScores& scoreOf(const BackwardParams& p) { return *(const BackwardScores*)(&p + 1); }

struct BackwardScoredParams {
  BackwardParams p;
  BackwardScores score;
};

// The first key that the query at a place sees, besides sink tokens.
__device__ __forceinline__ int firstKey(const BackwardScores& score, int place) { return score.window == 0 ? 0 : max(place - score.window + 1, 0); }

// Which of the keys 8 octet to 8 octet + 7 of a row are dropped, a bit for each: Philox4x32-7, as internal/dropout has it.
__device__ __forceinline__ u32 droppedOf(const BackwardScores& score, u32 octet, u32 query, u32 head, u32 sequence) {
  u32 a = octet, b = query, c = head, d = sequence, k0 = score.seedLow, k1 = score.seedHigh;
#pragma unroll
  for (int i = 0; i < 7; i++) {
    const u64 x = (u64)a * 0xd2511f53u, y = (u64)c * 0xcd9e8d57u;
    a = (u32)(y >> 32) ^ b ^ k0, b = (u32)y, c = (u32)(x >> 32) ^ d ^ k1, d = (u32)x;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
  const u32 words[4] = {a, b, c, d}, n = score.below;
  u32 dropped = 0;
#pragma unroll
  for (int i = 7; i >= 0; i--) dropped = __funnelshift_l((i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff) - n, dropped, 1); // the sign
  return dropped;
}

struct BackwardScored {
  static constexpr bool scores = true;
  __device__ static __forceinline__ float factor(const BackwardParams& p) { return scoreOf(p).factor; }
  __device__ static __forceinline__ int hidden(const BackwardParams& p, const BackwardSeq& s) { return firstKey(scoreOf(p), s.keys - s.queries); }
  __device__ static __forceinline__ int sinkTokens(const BackwardParams& p) { return scoreOf(p).sinkTokens; }

  // What a row adds to the gradient of its head's sink.
  __device__ static __forceinline__ void sinkTerm(const BackwardParams& p, long long row, int head, float lse, float d) {
    const BackwardScores& score = scoreOf(p);
    if (score.sinkTerms == nullptr) return;
    const float sink = score.sinks[head];
    score.sinkTerms[row] = sink == -LEAN_INF ? 0.f : -d * exp2_(notPositive(sink - lse) * 1.4426950408889634f);
  }

  // The end of the query blocks from `begin` on that meet a key block.
  template <class B> __device__ static __forceinline__ int endOf(const BackwardParams& p, int behind, int key, int begin, int end) {
    const BackwardScores& score = scoreOf(p);
    if (score.window == 0 || key < score.sinkTokens) return end;
    const int rows = key + B::KEYS + score.window - 1 - behind; // they see one of the keys, or keys behind it
    return max(begin, min(end, (max(rows, 0) + B::ROWS - 1) / B::ROWS));
  }

  // Of a query block whose first row is at a place: how many key blocks add before a key block, its first key that some row sees, and
  // whether it is the last to add.
  template <class B> __device__ static __forceinline__ void place(const BackwardParams& p, int place, int block, int last, int& before, int& least, bool& ends) {
    const BackwardScores& score = scoreOf(p);
    const int first = firstKey(score, place), lowest = first / B::KEYS;
    const int sinks = min((score.sinkTokens + B::KEYS - 1) / B::KEYS, lowest); // key blocks of sink tokens alone
    before = last - block - (block < lowest ? lowest - sinks : 0);
    ends = block == (sinks > 0 ? 0 : lowest);
    if (block * B::KEYS >= score.sinkTokens) least = max(least, first);
  }

  // The scores of a warp, in B's layout: a lane has keys key, key+8, ... and rows first, first+1, first+8, ...
  template <class B> struct Scores {
    static constexpr int TILES = B::TILES, ROWS = B::ROWS;
    using Numbers = float[TILES][ROWS / 8][4];
    static_assert(TILES * ROWS / 2 <= 32, "a lane has a bit for each score");
    const BackwardParams& p;
    const BackwardSeq& s;
    const int seq, head, row, mine; // head: of the sequence; row and mine: the first of the block, and of the warp's keys
    Numbers slope;                  // with a soft cap
    u32 dropped;                    // with dropout, of score [t][j][h] bit 4 (t ROWS/8 + j) + h % 2 * 2 + h / 2

    __device__ __forceinline__ Scores(const BackwardParams& p, const BackwardSeq& s, int seq, int head, int row, int mine) : p(p), s(s), seq(seq), head(head), row(row), mine(mine) {}

    // f(t, j, h, row, key) of all scores.
    template <class F> __device__ __forceinline__ void each(const F& f) const {
      const int lane = threadIdx.x % 32, key = mine + lane / 4, first = row + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
          for (int h = 0; h < 4; h++) f(t, j, h, first + j * 8 + h % 2, key + t * 16 + h / 2 * 8);
    }

    // Turns products into weights times 2^lift. `logs` has the log-sum-exps of the rows.
    __device__ __forceinline__ void weigh(Numbers& x, u32 logs, float lift) {
      const BackwardScores& score = scoreOf(p);
      const int behind = s.keys - s.queries;
      each([&](int t, int j, int h, int, int) { x[t][j][h] *= p.scale; });
      if (score.cap != 0.f) {
        each([&](int t, int j, int h, int, int) {
          const float y = tanh_(x[t][j][h] * score.reciprocal);
          x[t][j][h] = score.cap * y, slope[t][j][h] = __fmaf_rn(-y, y, 1.f);
        });
      }
      if (score.slopes != nullptr) {
        const float by = score.slopes[head];
        each([&](int t, int j, int h, int row, int key) { x[t][j][h] = __fmaf_rn(by, (float)(key - behind - row), x[t][j][h]); });
      }
      if (score.bias != nullptr) {
        const long long at = seq * score.biasSequence + head * score.biasHead;
        each([&](int t, int j, int h, int row, int key) {
          if (row < s.queries && key < s.keys) x[t][j][h] = __fmaf_rn(B::Format::Store::load(score.bias, at + row * score.biasRow + key), score.biasFactor, x[t][j][h]);
        });
      }
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        float of[4];
        B::loadFour(of, logs + (j * 8 + threadIdx.x % 4 * 2) * 8);
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int h = 0; h < 4; h++) x[t][j][h] = exp2_(__fmaf_rn(notPositive(x[t][j][h] - of[h % 2 * 2]), B::LOG2E, lift));
      }
      const auto end = [&](int row) { return p.causal ? min(s.keys, behind + row + 1) : s.keys; };
      if (mine + B::MINE > end(row) || mine < firstKey(score, behind + row + ROWS - 1)) {
        each([&](int t, int j, int h, int row, int key) {
          if (key >= end(row) || key < firstKey(score, behind + row) && key >= score.sinkTokens) x[t][j][h] = 0.f;
        });
      }
      if (score.below != 0) drawDropped();
    }

    // Eight lanes have the same rows, and a key of each of two octets. A lane draws the numbers of an eighth of the octets, and gets the bits of
    // its keys from the others.
    __device__ __forceinline__ void drawDropped() {
      const int lane = threadIdx.x % 32, n = lane / 4;
      u32 own = 0;
#pragma unroll
      for (int m = 0; m < TILES * ROWS / 16; m++) {
        const int j = 2 * m + n / 4, t = j / (ROWS / 8);
        own |= droppedOf(scoreOf(p), mine / 8 + 2 * t + n % 2, row + lane % 4 * 2 + j % (ROWS / 8) * 8 + n / 2 % 2, head, seq) << 8 * m;
      }
      dropped = 0;
#pragma unroll
      for (int k = 0; k < 8; k++) dropped |= (__shfl_sync(~0u, own, k * 4 + lane % 4) >> n & 0x01010101) << k;
    }
    __device__ __forceinline__ bool drops(int t, int j, int h) const { return dropped >> 4 * (t * (ROWS / 8) + j) + h % 2 * 2 + h / 2 & 1; }

    // The weights that are kept, as operands.
    __device__ __forceinline__ void keep(u32 (&w)[TILES][ROWS / 16][4], const Numbers& x) const {
      if (scoreOf(p).below == 0) {
        B::operands(w, x);
        return;
      }
      Numbers kept;
      each([&](int t, int j, int h, int, int) { kept[t][j][h] = drops(t, j, h) ? 0.f : x[t][j][h]; });
      B::operands(w, kept);
    }
    // dO v of weights, times z.
    __device__ __forceinline__ void drop(Numbers& y) const {
      const BackwardScores& score = scoreOf(p);
      if (score.below != 0) each([&](int t, int j, int h, int, int) { y[t][j][h] = drops(t, j, h) ? 0.f : y[t][j][h] * score.factor; });
    }
    // Turns gradients of scores into those of products.
    __device__ __forceinline__ void chain(Numbers& x) const {
      if (scoreOf(p).cap != 0.f) each([&](int t, int j, int h, int, int) { x[t][j][h] *= slope[t][j][h]; });
    }
  };
};

// The gradient of the bias, from scores that are computed once more. A thread block has a key block and a query block of a head of a
// sequence of the bias, or all query blocks where they share a row. It goes through all heads and sequences that share the numbers.
// Every number of the gradient is written once.
template <class B> struct BackwardBias {
  static constexpr int KEYS = B::KEYS, ROWS = B::ROWS, SHARED = 2 * B::KEY + 2 * B::ROW + ROWS * 8;

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const BackwardScores& score = scoreOf(p);
    const u32 keys = sharedAddress(memory), values = keys + B::KEY, stage = values + B::KEY;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kvHeads * p.group;
    const u32 left = swizzled(lane % 16, lane / 16 * 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
    const int keyBlocks = (p.keys + KEYS - 1) / KEYS, parts = score.biasRow == 0 ? 1 : p.blocks, biasHeads = score.biasHead == 0 ? 1 : heads;
    int number = blockIdx.x;
    const int block = number % keyBlocks, key = block * KEYS, mine = key + warp * B::MINE;
    number /= keyBlocks;
    const int part = number % parts, head0 = number / parts % biasHeads, seq0 = number / parts / biasHeads;
    const int seqs = score.biasSequence == 0 ? p.batch : seq0 + 1, headEnd = score.biasHead == 0 ? heads : head0 + 1;

    float sums[ROWS / 8][4];
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.f;
    int have = -1; // the KV head whose keys and values are there
#pragma unroll 1
    for (int seq = seq0; seq < seqs; seq++) {
      const BackwardSeq s(p, seq);
      const int behind = s.keys - s.queries;
      int end = key < s.keys ? (s.queries + ROWS - 1) / ROWS : 0, begin = min(max(s.first, p.causal ? key - behind : 0) / ROWS, end);
      end = BackwardScored::endOf<B>(p, behind, key, begin, end);
      if (score.biasRow != 0) begin = max(begin, part), end = min(end, part + 1);
#pragma unroll 1
      for (int head = head0; head < headEnd; head++)
#pragma unroll 1
        for (int i = begin; i < end; i++) {
          const int all = seq * heads + head, kvHead = all / p.group, row = i * ROWS; // of all sequences
          __syncthreads(); // all warps have read
          if (kvHead != have) {
            const long long first = (long long)kvHead * p.keys * p.dim;
            B::template copyRows<KEYS>(p, keys, p.k, first, key, BackwardScored::hidden(p, s), s.keys, score.sinkTokens);
            B::template copyRows<KEYS>(p, values, p.v, first, key, BackwardScored::hidden(p, s), s.keys, score.sinkTokens);
            have = kvHead;
          }
          const long long at = (long long)all * p.queries * p.dim;
          B::template copyRows<ROWS>(p, stage, p.q, at, row, s.first, s.queries);
          B::template copyRows<ROWS>(p, stage + B::ROW, p.outGrad, at, row, s.first, s.queries);
          if (threadIdx.x < ROWS / 2) copy16(stage + 2 * B::ROW + threadIdx.x * 16, p.rows + ((long long)all * p.blocks + i) * ROWS + threadIdx.x * 2, true);
          copyCommit();
          copyWait<0>();
          __syncthreads();
          float x[1][ROWS / 8][4], y[1][ROWS / 8][4];
          BackwardScored::Scores<B> scores(p, s, seq, head, row, mine);
          B::multiply(x, keys + warp * (B::MINE * 128) + left, stage + right);
          scores.weigh(x, stage + 2 * B::ROW, 0.f);
          B::multiply(y, values + warp * (B::MINE * 128) + left, stage + B::ROW + right);
          scores.drop(y);
#pragma unroll
          for (int j = 0; j < ROWS / 8; j++) {
            float of[4];
            B::loadFour(of, stage + 2 * B::ROW + (j * 8 + lane % 4 * 2) * 8);
#pragma unroll
            for (int h = 0; h < 4; h++) sums[j][h] = __fmaf_rn(x[0][j][h], y[0][j][h] - of[h % 2 * 2 + 1], sums[j][h]);
          }
        }
    }
    const long long at = seq0 * score.biasSequence + head0 * score.biasHead;
    if (score.biasRow == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) sum += sums[j][2 * h] + sums[j][2 * h + 1];
        sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
        const int k = mine + lane / 4 + h * 8;
        if (lane % 4 == 0 && k < p.keys) B::Format::Store::store(score.biasGrad, at + k, sum * score.biasFactor);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
      for (int h = 0; h < 4; h++) {
        const int r = part * ROWS + j * 8 + lane % 4 * 2 + h % 2, k = mine + lane / 4 + h / 2 * 8;
        if (r < p.queries && k < p.keys) B::Format::Store::store(score.biasGrad, at + r * score.biasRow + k, sums[j][h] * score.biasFactor);
      }
  }
};

// The gradients of sinks: a thread block for each query head adds the terms of all its rows.
struct BackwardSinks {
  static constexpr int THREADS = 256;

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    __shared__ float scratch[THREADS / 32];
    const int heads = p.kvHeads * p.group, head = blockIdx.x;
    float sum = 0.f;
#pragma unroll 1
    for (int b = 0; b < p.batch; b++) {
      const float* const terms = scoreOf(p).sinkTerms + (long long)(b * heads + head) * scoreOf(p).rows;
      const int queries = BackwardSeq(p, b).queries;
#pragma unroll 1
      for (int r = threadIdx.x; r < queries; r += THREADS) sum += terms[r];
    }
    sum = foldBlock(sum, scratch, [](float x, float y) { return x + y; });
    if (threadIdx.x == 0) scoreOf(p).sinkGrad[head] = sum;
  }
};
