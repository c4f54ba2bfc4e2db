// Attention with dropout (FlashAttention-2: Dao, arXiv:2307.08691, algorithm 1), by products of single warps, for training: dense
// operands, changes of scores and masks as the Variant of gradients has them (attn_backward_variant.cuh).
//
// A thread block has ROWS rows of a query head, 16 for each warp. It walks the key blocks that some row sees, KEYS keys each. The sum of
// weights is that of all; dropped ones are left out of products with values alone.
#pragma once
#include "attn_backward_variant.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "attn_backward_hopper_variant.cuh"
#endif

struct DropoutParams {
  BackwardParams p; // the problem: no gradients, out and log-sum-exps
  BackwardScores score;
  void* out;
  float* lse; // null: not wanted
};
__device__ __forceinline__ const DropoutParams& dropoutOf(const BackwardParams& p) { return *(const DropoutParams*)&p; }

template <class Format, int D> struct Dropout {
  static constexpr int WARPS = 8, ROWS = WARPS * 16, KEYS = 64;
  using B = Backward<Format, D, WARPS, 1, KEYS, 2, BackwardScored>; // what copies
  using Math = typename Format::Math;
  using Operand = typename Math::Operand;
  static constexpr int THREADS = B::THREADS, QUERY = ROWS * D * 2, KEY = KEYS * D * 2, STAGE = 2 * KEY, SHARED = QUERY + 2 * STAGE;
  static_assert(KEYS / 2 <= 32, "a lane has a bit for each score");

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const BackwardScores& score = scoreOf(p);
    const u32 query = sharedAddress(memory), stages = query + QUERY;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kvHeads * p.group, all = p.batch * heads;
    // The last rows of all heads come first: with a causal mask they see the most keys.
    const int number = blockIdx.x % all, seq = number / heads, head = number % heads, first = (p.blocks - 1 - blockIdx.x / all) * ROWS;
    const BackwardSeq s(p, seq);
    const int behind = s.keys - s.queries, mine = first + warp * 16, last = min(first + ROWS, s.queries) - 1;
    const auto sees = [&](int row) { return row >= s.queries ? 0 : p.causal ? min(s.keys, behind + row + 1) : s.keys; };
    // Key blocks: those of sink tokens, and [lowest, end).
    const int lowest = firstKey(score, behind + first) / KEYS, sinks = min((score.sinkTokens + KEYS - 1) / KEYS, lowest);
    const int end = first < s.queries ? (max(sees(last), 0) + KEYS - 1) / KEYS : 0, steps = max(end - lowest, 0) + min(sinks, end);
    const auto keyOf = [&](int step) { return (step < sinks ? step : step - sinks + lowest) * KEYS; };
    const long long keys = (long long)(number / p.group) * p.keys * p.dim;
    const auto bring = [&](int step, u32 stage) {
      B::template copyRows<KEYS>(p, stage, p.k, keys, keyOf(step), BackwardScored::hidden(p, s), s.keys, score.sinkTokens);
      B::template copyRows<KEYS>(p, stage + KEY, p.v, keys, keyOf(step), BackwardScored::hidden(p, s), s.keys, score.sinkTokens);
      copyCommit();
    };
    if (steps > 0) {
      B::template copyRows<ROWS>(p, query, p.q, (long long)number * p.queries * p.dim, first, s.first, s.queries);
      bring(0, stages);
    }

    const u32 left = swizzled(lane % 16, lane / 16 * 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
    float o[D / 8][4], most[2], sum[2]; // of the lane's rows: outputs, maxima and sums of its weights times 2^lift
#pragma unroll
    for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
    most[0] = most[1] = score.sinks == nullptr ? -LEAN_INF : score.sinks[head];
    sum[0] = sum[1] = most[0] > -LEAN_INF && lane % 4 == 0 ? exp2_(Math::lift) : 0.f;
    u32 stage = stages, other = stages + STAGE;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int key = keyOf(step);
      copyWait<0>();
      __syncthreads();
      if (step + 1 < steps) bring(step + 1, other);
      if (key < sees(min(mine + 15, last)) && mine <= last && (key + KEYS > firstKey(score, behind + mine) || key < score.sinkTokens)) {
        float x[KEYS / 8][4];
        products(x, query + warp * (16 * 128) + left, stage + right);
        change(x, p, s, seq, head, mine, key);
        if (key + KEYS > sees(mine) || mine + 15 > last || key < firstKey(score, behind + mine + 15)) {
          each(mine, key, [&](int j, int h, int row, int key) {
            if (key >= sees(row) || key < firstKey(score, behind + row) && key >= score.sinkTokens) x[j][h] = -LEAN_INF;
          });
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float m = most[i];
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++) m = fmaxf(m, fmaxf(x[j][2 * i], x[j][2 * i + 1]));
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
          const float base = m == -LEAN_INF ? 0.f : m, shrink = exp2_((most[i] - base) * B::LOG2E);
          most[i] = m, sum[i] *= shrink;
#pragma unroll
          for (int j = 0; j < D / 8; j++) o[j][2 * i] *= shrink, o[j][2 * i + 1] *= shrink;
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              float& y = x[j][2 * i + e];
              y = exp2_(__fmaf_rn(y - base, B::LOG2E, Math::lift)), sum[i] += y;
            }
        }
        if (score.below != 0) drop(x, score, seq, head, mine, key);
        u32 w[KEYS / 16][4];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
          for (int h = 0; h < 4; h++) w[k][h] = Operand::pack(x[2 * k + h / 2][h % 2 * 2], x[2 * k + h / 2][h % 2 * 2 + 1]);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
          for (int n = 0; n < D / 16; n++) {
            u32 b[4];
            loadMatrixTransposed(b, ((stage + KEY + left) ^ n % 4 * 32) + n / 4 * (KEYS * 128) + k * 16 * 128);
            Math::mma(o[2 * n], w[k], b[0], b[1]), Math::mma(o[2 * n + 1], w[k], b[2], b[3]);
          }
      }
      const u32 was = stage;
      stage = other, other = was;
    }
    store(p, o, most, sum, number, mine);
  }

  // Writes outputs and log-sum-exps of a lane's rows, of head `number` of all sequences.
  __device__ static __forceinline__ void store(const BackwardParams& p, const float (&o)[D / 8][4], const float (&most)[2], float (&sum)[2], int number, int mine) {
    const BackwardScores& score = scoreOf(p);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = mine + lane / 4 + i * 8;
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1), sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      if (row >= p.queries) continue;
      const long long at = (long long)number * p.queries + row;
      const float by = sum[i] > 0.f ? score.factor / sum[i] : 0.f;
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        const int column = j * 8 + lane % 4 * 2;
        if (column < p.dim) Format::Store::store2(dropoutOf(p).out, at * p.dim + column, make_float2(o[j][2 * i] * by, o[j][2 * i + 1] * by));
      }
      if (lane % 4 == 0 && dropoutOf(p).lse != nullptr) dropoutOf(p).lse[at] = sum[i] > 0.f ? most[i] + logf(sum[i] * exp2_(-Math::lift)) : -LEAN_INF;
    }
  }

  // f(j, h, row, key) of a lane's scores: rows row and row+8, keys key, key+1, key+8, ...
  template <class F> __device__ static __forceinline__ void each(int mine, int key, const F& f) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
      for (int h = 0; h < 4; h++) f(j, h, mine + lane / 4 + h / 2 * 8, key + j * 8 + lane % 4 * 2 + h % 2);
  }

  __device__ static __forceinline__ void products(float (&x)[KEYS / 8][4], u32 query, u32 keys) {
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[4];
      loadMatrix(a, (query ^ k % 4 * 32) + k / 4 * (ROWS * 128));
#pragma unroll
      for (int j = 0; j < KEYS / 8; j += 2) {
        u32 b[4];
        loadMatrix(b, (keys ^ k % 4 * 32) + k / 4 * (KEYS * 128) + j * 8 * 128);
        Math::mma(x[j], a, b[0], b[1]), Math::mma(x[j + 1], a, b[2], b[3]);
      }
    }
  }

  // Turns products into scores.
  __device__ static __forceinline__ void change(float (&x)[KEYS / 8][4], const BackwardParams& p, const BackwardSeq& s, int seq, int head, int mine, int key) {
    const BackwardScores& score = scoreOf(p);
    each(mine, key, [&](int j, int h, int, int) { x[j][h] *= p.scale; });
    if (score.cap != 0.f) each(mine, key, [&](int j, int h, int, int) { x[j][h] = score.cap * tanh_(x[j][h] * score.reciprocal); });
    if (score.slopes != nullptr) {
      const float by = score.slopes[head];
      const int behind = s.keys - s.queries;
      each(mine, key, [&](int j, int h, int row, int key) { x[j][h] = __fmaf_rn(by, (float)(key - behind - row), x[j][h]); });
    }
    if (score.bias != nullptr) {
      const long long at = seq * score.biasSequence + head * score.biasHead;
      each(mine, key, [&](int j, int h, int row, int key) {
        if (row < s.queries && key < s.keys) x[j][h] = __fmaf_rn(Format::Store::load(score.bias, at + row * score.biasRow + key), score.biasFactor, x[j][h]);
      });
    }
  }

  // Makes dropped weights 0. Four lanes have the keys of an octet, of two rows. A lane draws the numbers of a fourth of the octets, and gets the
  // bits of its keys from the others.
  __device__ static __forceinline__ void drop(float (&x)[KEYS / 8][4], const BackwardScores& score, int seq, int head, int mine, int key) {
    const int lane = threadIdx.x % 32, n = lane % 4;
    u32 own = 0, dropped = 0; // dropped: of score [j][h] bit 4j + h
#pragma unroll
    for (int m = 0; m < KEYS / 16; m++) own |= droppedOf(score, key / 8 + 2 * m + n / 2, mine + lane / 4 + n % 2 * 8, head, seq) << 8 * m;
#pragma unroll
    for (int k = 0; k < 4; k++) dropped |= (__shfl_sync(~0u, own, (lane & ~3) | k) >> 2 * n & 0x03030303) << 2 * k;
    each(mine, key, [&](int j, int h, int, int) {
      if (dropped >> 4 * j + h & 1) x[j][h] = 0.f;
    });
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The same by products of warp groups (9.0). Two consumer warp groups have 64 rows each, and four producer warps copy halves of keys and of
// values to a ring. One group's products run beside the exponentials and random numbers of the other group.
template <class Format, int D> struct DropoutHopper {
  using One = Dropout<Format, D>; // what becomes of 64 keys
  using Hopper = BackwardHopper<Format, D, 8192 / D, 3, HopperScored>;
  using Math = typename Format::Math;
  using Operand = typename Math::Operand;
  static constexpr int ROWS = 128, KEYS = 128, STAGES = 2, QUERY = ROWS * D * 2, KEY = KEYS * D * 2, SHARED = QUERY + 2 * STAGES * KEY + 8 * (1 + 4 * STAGES);
  static constexpr float LOG2E = 1.4426950408889634f;
  using Numbers = float[KEYS / 8][4];

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const BackwardScores& score = scoreOf(p);
    const u32 query = sharedAddress(memory), ring = query + QUERY, queryFull = ring + 2 * STAGES * KEY, full = queryFull + 8, empty = full + 16 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, heads = p.kvHeads * p.group, all = p.batch * heads;
    if (threadIdx.x == 0) {
      barrierInit(queryFull, 128);
      for (int i = 0; i < 2 * STAGES; i++) barrierInit(full + i * 8, 64), barrierInit(empty + i * 8, 8);
      opened();
    }
    __syncthreads();
    // The last rows of all heads come first: with a causal mask they see the most keys.
    const int number = blockIdx.x % all, seq = number / heads, head = number % heads, first = (p.blocks - 1 - blockIdx.x / all) * ROWS;
    const BackwardSeq s(p, seq);
    const int behind = s.keys - s.queries, last = min(first + ROWS, s.queries) - 1;
    const auto sees = [&](int row) { return row >= s.queries ? 0 : p.causal ? min(s.keys, behind + row + 1) : s.keys; };
    // Key blocks: those of sink tokens, and [lowest, end).
    const int lowest = firstKey(score, behind + first) / KEYS, sinks = min((score.sinkTokens + KEYS - 1) / KEYS, lowest);
    const int end = first < s.queries ? (max(sees(last), 0) + KEYS - 1) / KEYS : 0, steps = max(end - lowest, 0) + min(sinks, end);
    const auto keyOf = [&](int step) { return (step < sinks ? step : step - sinks + lowest) * KEYS; };
    if (warp < 4) {
      fewerRegisters<24>();
      if (steps > 0) {
        copyPart<32, ROWS>(p, query, p.q, (long long)number * p.queries * p.dim, first, warp * 32, s.first, s.queries, 0, lane);
        copyCommit();
        copyWait<0>();
        fenceAsync();
        barrierArrive(queryFull);
      }
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        const int slot = 2 * (step % STAGES) + warp / 2, half = warp % 2 * 64;
        barrierWait(empty + slot * 8, step / STAGES & 1 ^ 1);
        copyPart<64, KEYS>(p, ring + slot * KEY, warp < 2 ? p.k : p.v, (long long)(number / p.group) * p.keys * p.dim, keyOf(step), half, BackwardScored::hidden(p, s), s.keys, score.sinkTokens, lane);
        copyCommit();
        copyWait<0>();
        fenceAsync();
        barrierArrive(full + slot * 8);
      }
      return;
    }
    moreRegisters<240>();
    const int group = warp / 4 - 1, mine = first + group * 64 + warp % 4 * 16, groupLast = min(first + group * 64 + 63, last);
    float o[D / 8][4], most[2], sum[2]; // of the lane's rows: outputs, maxima and sums of its weights times 2^lift
#pragma unroll
    for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
    most[0] = most[1] = score.sinks == nullptr ? -LEAN_INF : score.sinks[head];
    sum[0] = sum[1] = most[0] > -LEAN_INF && lane % 4 == 0 ? exp2_(Math::lift) : 0.f;
    if (steps > 0) barrierWait(queryFull, 0);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int key = keyOf(step), stage = step % STAGES;
      const u32 keys = ring + 2 * stage * KEY, values = keys + KEY;
      // Whether some row of the group sees some of the keys.
      const bool live = first + group * 64 < s.queries && key < sees(groupLast) && (key + KEYS > firstKey(score, behind + first + group * 64) || key < score.sinkTokens);
      barrierWait(full + stage * 16, step / STAGES & 1);
      Numbers x;
      if (live) {
        wgmmaFence();
        pinned(x);
#pragma unroll
        for (int k = 0; k < D / 16; k++)
          Wgmma<KEYS>::template shared<Math>(x, rowOperand(query + group * 64 * 128 + k / 4 * (ROWS * 128) + k % 4 * 32), rowOperand(keys + k / 4 * (KEYS * 128) + k % 4 * 32), k > 0);
        wgmmaCommit();
        wgmmaWait<0>();
        pinned(x);
      }
      Hopper::arriveWarp(empty + stage * 16, lane);
      u32 w[KEYS / 16][4];
      if (live) {
        float (&low)[8][4] = *(float (*)[8][4])&x[0], (&high)[8][4] = *(float (*)[8][4])&x[8];
        One::change(low, p, s, seq, head, mine, key), One::change(high, p, s, seq, head, mine, key + 64);
        if (key + KEYS > sees(mine) || mine + 15 > last || key < firstKey(score, behind + mine + 15)) {
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int h = 0; h < 4; h++) {
              const int row = mine + lane / 4 + h / 2 * 8, k = key + j * 8 + lane % 4 * 2 + h % 2;
              if (k >= sees(row) || k < firstKey(score, behind + row) && k >= score.sinkTokens) x[j][h] = -LEAN_INF;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float m = most[i];
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++) m = fmaxf(m, fmaxf(x[j][2 * i], x[j][2 * i + 1]));
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 1)), m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
          const float base = m == -LEAN_INF ? 0.f : m, shrink = exp2_((most[i] - base) * LOG2E);
          most[i] = m, sum[i] *= shrink;
#pragma unroll
          for (int j = 0; j < D / 8; j++) o[j][2 * i] *= shrink, o[j][2 * i + 1] *= shrink;
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              float& y = x[j][2 * i + e];
              y = exp2_(__fmaf_rn(y - base, LOG2E, Math::lift)), sum[i] += y;
            }
        }
        if (score.below != 0) One::drop(low, score, seq, head, mine, key), One::drop(high, score, seq, head, mine, key + 64);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
          for (int h = 0; h < 4; h++) w[k][h] = Operand::pack(x[2 * k + h / 2][h % 2 * 2], x[2 * k + h / 2][h % 2 * 2 + 1]);
      }
      barrierWait(full + stage * 16 + 8, step / STAGES & 1);
      if (live) {
        wgmmaFence();
        pinned(o);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) Wgmma<D>::template registers<Math>(o, w[k], columnOperand(values + k * 2048, KEYS * 128));
        wgmmaCommit();
        wgmmaWait<0>();
        pinned(o);
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) asm volatile("" : "+r"(w[k][0]), "+r"(w[k][1]), "+r"(w[k][2]), "+r"(w[k][3])::"memory");
      }
      Hopper::arriveWarp(empty + stage * 16 + 8, lane);
    }
    One::store(p, o, most, sum, number, mine);
  }

  // A warp copies N rows, from number `part` on, of the ROWS_ rows of a matrix that begin with `first`; zeros outside of [0, front) and [from, to).
  template <int N, int ROWS_> __device__ static __forceinline__ void copyPart(const BackwardParams& p, u32 slot, const void* matrix, long long begin, int first, int part, int from, int to, int front, int lane) {
    const int r = lane / 8, c = lane % 8 * 8;
#pragma unroll 4
    for (int i = part + r; i < part + N; i += 4) {
      const int row = first + i;
      const bool inside = (row >= from || row < front) && row < to;
      const u16* const at = (const u16*)matrix + begin + (long long)row * p.dim + c;
#pragma unroll
      for (int j = 0; j < D / 64; j++) {
        const bool there = inside && j * 64 + c < p.dim;
        copy16(slot + j * (ROWS_ * 128) + swizzled(i, c * 2), there ? at + j * 64 : (const u16*)p.q, there);
      }
    }
  }
};
#endif
