// Gradients of attention for operands of float32, with all that attn_backward_variant.cuh has but dropout. Tensor cores multiply numbers as sums of
// two parts of 11 bits each, both rounded: products lose 2^-23 or so.
//
// One kernel has head dims up to D: products and copies end behind the head dim. The scheme is that of Backward (attn_backward.cuh), with rows of shared memory that are 4 numbers longer than the head dim. Sums of
// products with weights have another order of rows: a lane has weights of rows 2i and 2i+1, which take the places i and i+4 of a product.
#pragma once
#include "attn_backward_variant.cuh"

// A number as a sum of two.
struct Two {
  u32 lead, rest;
  __device__ __forceinline__ Two(float x) {
    lead = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    rest = (__float_as_uint(x - __uint_as_float(lead)) + 0x1000u) & 0xffffe000u;
  }
};
struct TwoLeft {
  u32 lead[4], rest[4];
  __device__ __forceinline__ TwoLeft(float a, float b, float c, float d) {
    const Two x[4] = {a, b, c, d};
#pragma unroll
    for (int i = 0; i < 4; i++) lead[i] = x[i].lead, rest[i] = x[i].rest;
  }
};
__device__ __forceinline__ void multiplyTwo(float (&c)[4], const TwoLeft& a, float b0, float b1) {
  const Two x(b0), y(b1);
  MmaTF32::mma(c, a.rest, x.lead, y.lead);
  MmaTF32::mma(c, a.lead, x.rest, y.rest);
  MmaTF32::mma(c, a.lead, x.lead, y.lead);
}

template <int D, int ROWS_> struct BackwardWide {
  using Format = AsF32;
  using V = BackwardScored;
  static constexpr int WARPS = 4, TILES = 1, MINE = 16, ROWS = ROWS_, THREADS = WARPS * 32, KEYS = WARPS * MINE;
  static constexpr int WIDE = D + 4, SLOPE = ROWS + 8; // numbers of a row of matrices, and of dS, whose rows are keys
  static constexpr int KEY = KEYS * WIDE, ROW = ROWS * WIDE, SHARED = (2 * KEY + 2 * ROW + ROWS * 2 + KEYS * SLOPE + 4) * 4;
  static constexpr int GROUPS = ROWS / 16, COLUMNS = D / (WARPS / GROUPS); // dq: a warp has 16 rows and so many columns
  static constexpr float LOG2E = 1.4426950408889634f;
  using Numbers = float[1][ROWS / 8][4];

  struct Memory {
    float *keys, *values, *rows, *grads, *logs, *slopes;
    __device__ __forceinline__ Memory(float* m) : keys(m), values(m + KEY), rows(m + 2 * KEY), grads(rows + ROW), logs(grads + ROW), slopes(logs + ROWS * 2) {}
  };

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const Memory m((float*)memory);
    int* const ticket = (int*)(m.slopes + KEYS * SLOPE);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) *ticket = atomicAdd(p.counters, 1);
    __syncthreads();
    const int keyBlocks = (p.keys + KEYS - 1) / KEYS, kvHead = *ticket / keyBlocks, block = keyBlocks - 1 - *ticket % keyBlocks, key = block * KEYS;
    const BackwardSeq s(p, kvHead / p.kvHeads);
    const int behind = s.keys - s.queries, mine = key + warp * MINE;
    int end = key < s.keys ? (s.queries + ROWS - 1) / ROWS : 0;
    const int begin = min(max(s.first, p.causal ? key - behind : 0) / ROWS, end);
    end = V::endOf<BackwardWide>(p, behind, key, begin, end);
    const int steps = (end - begin) * p.group;
    if (steps > 0) bringKeys(p, s, m, kvHead, key);

    float dk[D / 8][4], dv[D / 8][4];
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int h = 0; h < 4; h++) dk[j][h] = dv[j][h] = 0.f;
    u32* added = nullptr; // as in Backward
    int adds = 0;
    const auto release = [&] {
      if (added != nullptr && threadIdx.x == 32) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(added), "r"(adds) : "memory");
    };
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int head = kvHead * p.group + step / (end - begin), i = begin + step % (end - begin), row = i * ROWS; // head: of all sequences
      __syncthreads();
      release();
      bringRows(p, s, m, head, i);
      copyWait<0>();
      __syncthreads();
      const int lastRow = min(row + ROWS, s.queries) - 1, seen = p.causal ? min(s.keys, behind + lastRow + 1) : s.keys, most = min(seen, key + KEYS);
      const long long number = (long long)head * p.blocks + i;
      u32* const counter = p.counters + 1 + 3 * p.batch * p.kvHeads + number;
      int before = 0, least = key;
      bool ends = false;
      V::place<BackwardWide>(p, behind + row, block, (seen - 1) / KEYS, before, least, ends);
      if (mine < most && mine + MINE > least) {
        Numbers x, y;
        BackwardScored::Scores<BackwardWide> scores(p, s, kvHead / p.kvHeads, head % (p.kvHeads * p.group), row, mine);
        multiply(x, m.keys + warp * MINE * WIDE, m.rows, p.dim);
        scores.weigh(x, sharedAddress(m.logs), 0.f);
        add(dv, x, m.grads, p.dim);
        multiply(y, m.values + warp * MINE * WIDE, m.grads, p.dim);
        slopes(x, y, m.logs);
        scores.chain(x);
        add(dk, x, m.rows, p.dim);
        scores.each([&](int t, int j, int h, int r, int k) { m.slopes[(k - key) * SLOPE + r - row] = x[t][j][h]; });
      }
      if (before > 0 && threadIdx.x == 0) {
        u32 have;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(have) : "l"(counter) : "memory");
        while (have != before);
      }
      __syncthreads();

      const int group = warp % GROUPS, part = warp / GROUPS, c = lane % 4, r = lane / 4;
      float4* const sum = p.sums + number * (ROWS * D / 4) + threadIdx.x;
      float dq[COLUMNS / 8][4];
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) dq[j][0] = dq[j][1] = dq[j][2] = dq[j][3] = 0.f;
#pragma unroll 1
      for (int k = (least - key) / 16 * 16; k < (most - key + 15) / 16 * 16; k += 8) {
        const float* const a = m.slopes + (k + c) * SLOPE + group * 16 + r;
        const float* const b = m.keys + (k + c) * WIDE + part * COLUMNS + r;
        const TwoLeft of(a[0], a[8], a[4 * SLOPE], a[4 * SLOPE + 8]);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
          if (part * COLUMNS + j * 8 < p.dim) multiplyTwo(dq[j], of, b[j * 8], b[j * 8 + 4 * WIDE]);
      }
      if (before > 0) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
          const float4 had = __ldcg(sum + j * THREADS);
          dq[j][0] += had.x, dq[j][1] += had.y, dq[j][2] += had.z, dq[j][3] += had.w;
        }
      }
      added = nullptr;
      if (!ends) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) __stcg(sum + j * THREADS, make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]));
        added = counter, adds = before + 1;
      } else {
        store(p.dq, dq, (long long)head * p.queries, row + group * 16 + r, s.queries, part * COLUMNS + c * 2, p.dim, p.scale);
      }
    }
    __syncthreads();
    release();
    store(p.dk, dk, (long long)kvHead * p.keys, mine + lane / 4, p.keys, lane % 4 * 2, p.dim, p.scale);
    if (p.dv != nullptr) store(p.dv, dv, (long long)kvHead * p.keys, mine + lane / 4, p.keys, lane % 4 * 2, p.dim, 1.f);
  }

  // dS of weights x and dO v.
  __device__ static __forceinline__ void slopes(Numbers& x, const Numbers& y, const float* logs) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
      for (int h = 0; h < 4; h++) x[0][j][h] *= y[0][j][h] - logs[(j * 8 + threadIdx.x % 4 * 2 + h % 2) * 2 + 1];
  }

  __device__ static __forceinline__ void bringKeys(const BackwardParams& p, const BackwardSeq& s, const Memory& m, int kvHead, int key) {
    const long long at = (long long)kvHead * p.keys * p.dim;
    copyRows<KEYS>(p, m.keys, p.k, at, key, V::hidden(p, s), s.keys, V::sinkTokens(p));
    copyRows<KEYS>(p, m.values, p.v, at, key, V::hidden(p, s), s.keys, V::sinkTokens(p));
  }
  __device__ static __forceinline__ void bringRows(const BackwardParams& p, const BackwardSeq& s, const Memory& m, int head, int i) {
    const long long at = (long long)head * p.queries * p.dim;
    copyRows<ROWS>(p, m.rows, p.q, at, i * ROWS, s.first, s.queries, 0);
    copyRows<ROWS>(p, m.grads, p.outGrad, at, i * ROWS, s.first, s.queries, 0);
    if (threadIdx.x < ROWS / 2) copy16(sharedAddress(m.logs) + threadIdx.x * 16, p.rows + ((long long)head * p.blocks + i) * ROWS + threadIdx.x * 2, true);
    copyCommit();
  }
  // As Backward has it.
  template <int N> __device__ static __forceinline__ void copyRows(const BackwardParams& p, float* slot, const void* matrix, long long begin, int first, int from, int to, int front) {
#pragma unroll 4
    for (int i = threadIdx.x; i < N * (D / 4); i += THREADS) {
      const int r = i / (D / 4), column = i % (D / 4) * 4, row = first + r;
      if (column >= p.dim) continue;
      const bool there = matrix != nullptr && (row >= from || row < front) && row < to;
      copy16(sharedAddress(slot + r * WIDE + column), there ? (const float*)matrix + begin + (long long)row * p.dim + column : p.q, there);
    }
  }

  // Products of a warp's 16 rows of a matrix and all of one of ROWS rows.
  __device__ static __forceinline__ void multiply(Numbers& x, const float* of, const float* by, int dim) {
    const int c = threadIdx.x % 4, r = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) x[0][j][0] = x[0][j][1] = x[0][j][2] = x[0][j][3] = 0.f;
#pragma unroll 2
    for (int k = 0; k < dim; k += 8) {
      const float* const a = of + r * WIDE + k + c;
      const TwoLeft left(a[0], a[8 * WIDE], a[4], a[8 * WIDE + 4]);
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        const float* const b = by + (j * 8 + r) * WIDE + k + c;
        multiplyTwo(x[0][j], left, b[0], b[4]);
      }
    }
  }

  // Adds the products of weights and a matrix of ROWS rows. Sums of a step are added by an instruction that rounds.
  __device__ static __forceinline__ void add(float (&to)[D / 8][4], const Numbers& w, const float* rows, int dim) {
    const int c = threadIdx.x % 4, r = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      if (n * 8 >= dim) break;
      float sum[4] = {};
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        const TwoLeft left(w[0][j][0], w[0][j][2], w[0][j][1], w[0][j][3]);
        const float* const b = rows + (j * 8 + c * 2) * WIDE + n * 8 + r;
        multiplyTwo(sum, left, b[0], b[WIDE]);
      }
#pragma unroll
      for (int h = 0; h < 4; h++) to[n][h] += sum[h];
    }
  }

  template <int N> __device__ static __forceinline__ void store(void* to, const float (&x)[N][4], long long begin, int row, int rows, int column, int dim, float f) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < N; j++)
        if (row + h * 8 < rows && column + j * 8 < dim) Float32::store2(to, (begin + row + h * 8) * dim + column + j * 8, make_float2(x[j][2 * h] * f, x[j][2 * h + 1] * f));
  }
  __device__ static __forceinline__ void loadFour(float (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
  }
};

// The gradient of the bias, as BackwardBias has it.
template <class B> struct BackwardWideBias {
  static constexpr int KEYS = B::KEYS, ROWS = B::ROWS;

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const typename B::Memory m((float*)memory);
    const BackwardScores& score = scoreOf(p);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kvHeads * p.group;
    const int keyBlocks = (p.keys + KEYS - 1) / KEYS, parts = score.biasRow == 0 ? 1 : p.blocks, biasHeads = score.biasHead == 0 ? 1 : heads;
    const int key = blockIdx.x % keyBlocks * KEYS, mine = key + warp * B::MINE, piece = blockIdx.x / keyBlocks;
    const int part = piece % parts, head0 = piece / parts % biasHeads, seq0 = piece / parts / biasHeads;
    float sums[ROWS / 8][4] = {};
#pragma unroll 1
    for (int seq = seq0; seq < (score.biasSequence == 0 ? p.batch : seq0 + 1); seq++) {
      const BackwardSeq s(p, seq);
      const int behind = s.keys - s.queries;
      int end = key < s.keys ? (s.queries + ROWS - 1) / ROWS : 0, begin = min(max(s.first, p.causal ? key - behind : 0) / ROWS, end);
      end = BackwardScored::endOf<B>(p, behind, key, begin, end);
      if (score.biasRow != 0) begin = max(begin, part), end = min(end, part + 1);
#pragma unroll 1
      for (int head = head0; head < (score.biasHead == 0 ? heads : head0 + 1); head++)
#pragma unroll 1
        for (int i = begin; i < end; i++) {
          __syncthreads(); // all warps have read
          if (i == begin) B::bringKeys(p, s, m, (seq * heads + head) / p.group, key);
          B::bringRows(p, s, m, seq * heads + head, i);
          copyWait<0>();
          __syncthreads();
          typename B::Numbers x, y;
          BackwardScored::Scores<B> scores(p, s, seq, head, i * ROWS, mine);
          B::multiply(x, m.keys + warp * B::MINE * B::WIDE, m.rows, p.dim);
          scores.weigh(x, sharedAddress(m.logs), 0.f);
          B::multiply(y, m.values + warp * B::MINE * B::WIDE, m.grads, p.dim);
          B::slopes(x, y, m.logs);
#pragma unroll
          for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int h = 0; h < 4; h++) sums[j][h] += x[0][j][h];
        }
    }
    float* const to = (float*)score.biasGrad + seq0 * score.biasSequence + head0 * score.biasHead;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int k = mine + lane / 4 + h * 8;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int r = part * ROWS + j * 8 + lane % 4 * 2 + e;
          if (score.biasRow == 0) sum += sums[j][2 * h + e];
          else if (r < p.queries && k < p.keys) to[r * score.biasRow + k] = sums[j][2 * h + e] * score.biasFactor;
        }
      if (score.biasRow != 0) continue;
      sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0 && k < p.keys) to[k] = sum * score.biasFactor;
    }
  }
};
