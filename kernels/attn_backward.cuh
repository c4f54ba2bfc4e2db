// Gradients of attention (FlashAttention-2: Dao, arXiv:2307.08691, algorithm 2), by products of single warps. With
// p = exp(scale q k - lse):
//
//	D  = dO O - dLSE           dS = p (dO v - D)
//	dq = scale sum dS k        dk = scale sum dS q        dv = sum p dO
//
// BackwardRows computes D in a launch of its own. In the launch of Backward, a thread block has KEYS keys of a KV head and a
// sequence. It walks the query blocks that see one of the keys, for one query head of the group after the other. A warp
// has 16 of the keys, or 32: its parts of dk and dv stay in registers, and its scores are transposed, so that p and dS are the left
// operands of products as they are. dS also goes to shared memory, and all warps multiply it by the keys.
//
// Sums of dq have a fixed order, from the last key block to the first: a block adds to a query block after the key block
// behind its own has. Thread blocks draw numbers when they begin. Within a head, higher key blocks have lower numbers, so a
// block waits only for blocks that have begun. The first block stores, and the last one writes dq. With a causal mask key block
// k comes to query block q in its step q-k: blocks that began together never wait.
//
// float16 has few exponents. So p is multiplied by 2^lift, and dS by a power of two that follows from the largest values and
// gradients of the KV head: |dO v - D| <= 2 max|v| max sum|dO| + max|dLSE|.
#pragma once
#include "copy.cuh"

struct BackwardParams {
  const void *q, *k, *v, *out, *outGrad; // of whole batches, row-major. outGrad null: 0; v, out and dv are null then
  const float *lse, *lseGrad;            // lseGrad null: 0
  void *dq, *dk, *dv;
  const int2* lengths; // queries and keys of each sequence; null: all
  u32* counters;       // zero: tickets; for each KV head what Bound is of; for each query block of a head, how many key blocks have added
  float2* rows;        // log-sum-exps and D of the rows of query blocks
  float4* sums;        // of dq: for each query block of a head ROWS x D numbers
  int batch, kvHeads, group, queries, keys, dim;
  int blocks; // query blocks
  int causal;
  float scale;
};

// The rows and keys of a sequence that matter: rows [first, queries) see keys.
struct BackwardSeq {
  int queries, keys, first;
  __device__ __forceinline__ BackwardSeq(const BackwardParams& p, int b) : queries(p.queries), keys(p.keys) {
    if (p.lengths != nullptr) queries = p.lengths[b].x, keys = p.lengths[b].y;
    first = keys == 0 ? queries : p.causal ? max(queries - keys, 0) : 0;
  }
};

// Three numbers of a KV head, as bits, whose order is that of the numbers.
struct BackwardBound {
  u32* const at;
  __device__ __forceinline__ BackwardBound(const BackwardParams& p, int kvHead) : at(p.counters + 1 + 3 * kvHead) {}
  __device__ __forceinline__ void rowSum(float x) const { atomicMax(at, __float_as_uint(x)); }
  __device__ __forceinline__ void lseGrad(float x) const { atomicMax(at + 1, __float_as_uint(x)); }
  __device__ __forceinline__ void value(float x) const { atomicMax(at + 2, __float_as_uint(x)); }
  // An exponent e: dS * 2^e is less than 2^15.
  __device__ __forceinline__ int exponent(float factor) const {
    const float most = (2.f * __uint_as_float(__ldcg(at)) * __uint_as_float(__ldcg(at + 2)) + __uint_as_float(__ldcg(at + 1))) * factor;
    return most == 0.f ? 0 : max(min(14 + 127 - (int)(__float_as_uint(most) >> 23), 100), -100);
  }
};

// x or 0: a weight is at most 1, however large the score is whose rounding the log-sum-exp has. NaN stays.
__device__ __forceinline__ float notPositive(float x) {
  float y;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float powerOf2(int e) { return __int_as_float((127 + e) << 23); }

__device__ __forceinline__ float sumOfWarp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// A Variant says how attention differs from softmax(scale q K^T) V over all keys, or causal ones. Plain does not differ. The other
// one is in attn_backward_variant.cuh.
struct BackwardPlain {
  static constexpr bool scores = false;
  __device__ static __forceinline__ constexpr float factor(const BackwardParams&) { return 1.f; } // on weights that dropout keeps
  // No row sees a key before this one, but for sink tokens.
  __device__ static __forceinline__ constexpr int hidden(const BackwardParams&, const BackwardSeq&) { return 0; }
  __device__ static __forceinline__ constexpr int sinkTokens(const BackwardParams&) { return 0; }
  template <class B> struct Scores {
    __device__ __forceinline__ Scores(const BackwardParams&, const BackwardSeq&, int, int, int, int) {}
  };
};

// A warp for each row of a query block, and with few exponents one for each key, too.
template <class Format, int ROWS, class V = BackwardPlain> struct BackwardRows {
  using Store = typename Format::Store;
  static constexpr int THREADS = 256;

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    const int lane = threadIdx.x % 32, heads = p.kvHeads * p.group, padded = p.blocks * ROWS;
    const long long warp = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32, rows = (long long)p.batch * heads * padded;
    if (warp >= rows) {
      if constexpr (Format::Math::narrow) largestValue(p, warp - rows, lane);
      return;
    }
    const int row = warp % padded, head = warp / padded, b = head / heads; // head: of all sequences
    const BackwardSeq s(p, b);
    const long long at = (long long)head * p.queries + row, mine = at * p.dim + lane * 4;
    const bool wide = lane * 4 < p.dim;
    float2 x = make_float2(LEAN_INF, 0.f); // weights of 0
    const bool sees = row >= s.first && row < s.queries;
    if (sees || V::scores && row < s.queries) {
      float d = 0.f, sum = 0.f;
      if (p.outGrad != nullptr && wide) {
        const float4 o = Store::load4(p.out, mine), g = Store::load4(p.outGrad, mine);
        d = g.x * o.x + g.y * o.y + g.z * o.z + g.w * o.w, sum = fabsf(g.x) + fabsf(g.y) + fabsf(g.z) + fabsf(g.w);
      }
      d = sumOfWarp(d);
      const float lse = p.lse[at], more = p.lseGrad == nullptr ? 0.f : p.lseGrad[at];
      if constexpr (V::scores) {
        if (lane == 0) V::sinkTerm(p, warp, head % heads, lse, d - more);
      }
      if (lse != -LEAN_INF && sees) x = make_float2(lse, d - more);
      if constexpr (Format::Math::narrow) if (sees) {
        sum = sumOfWarp(sum);
        const BackwardBound bound(p, head / p.group);
        if (lane == 0) bound.rowSum(sum), bound.lseGrad(fabsf(more));
      }
    }
    if (!sees && row < p.queries && wide) {
      Store::store4(p.dq, mine, make_float4(0.f, 0.f, 0.f, 0.f));
    }
    if (lane == 0) p.rows[warp] = x;
  }

  __device__ static __forceinline__ void largestValue(const BackwardParams& p, long long row, int lane) {
    const int head = row / p.keys, key = row % p.keys;
    if (p.v == nullptr || head >= p.batch * p.kvHeads || key >= BackwardSeq(p, head / p.kvHeads).keys) return;
    if (V::scores && key < V::hidden(p, BackwardSeq(p, head / p.kvHeads)) && key >= V::sinkTokens(p)) return;
    float most = 0.f;
    if (lane * 4 < p.dim) {
      const float4 v = Store::load4(p.v, row * p.dim + lane * 4);
      most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    if (lane == 0) BackwardBound(p, head).value(most);
  }
};

// Head dims up to D: what is missing is zero in shared memory.
template <class Format_, int D, int WARPS, int TILES_, int ROWS_, int STAGES, class V = BackwardPlain> struct Backward {
  using Format = Format_;
  using Math = typename Format::Math;
  using Operand = typename Math::Operand;
  static constexpr int TILES = TILES_, ROWS = ROWS_, THREADS = WARPS * 32, MINE = TILES * 16, KEYS = WARPS * MINE, BLOCKS = D / 64;
  static constexpr int KEY = KEYS * D * 2, ROW = ROWS * D * 2, SLOPE = KEYS * 128; // bytes of matrices: keys or values, rows, dS
  static constexpr int STAGE = 2 * ROW + ROWS * 8;                                 // q, dO, and for each row its log-sum-exp and D
  static constexpr int SHARED = 2 * KEY + SLOPE + STAGES * STAGE + 16;
  static constexpr int GROUPS = ROWS / 16, COLUMNS = D / (WARPS / GROUPS); // dq: a warp has 16 rows and so many columns
  static_assert(D % 64 == 0 && (ROWS == 64 || ROWS == 32) && WARPS % GROUPS == 0 && COLUMNS % 16 == 0 && (STAGES == 1 || STAGES == 2) && Format::ready);

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const u32 keys = sharedAddress(memory), values = keys + KEY, slopes = values + KEY, stages = slopes + SLOPE;
    int* const ticket = (int*)(memory + 2 * KEY + SLOPE + STAGES * STAGE);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) *ticket = atomicAdd(p.counters, 1);
    __syncthreads();
    const int keyBlocks = (p.keys + KEYS - 1) / KEYS, kvHead = *ticket / keyBlocks, block = keyBlocks - 1 - *ticket % keyBlocks, key = block * KEYS;
    const BackwardSeq s(p, kvHead / p.kvHeads);
    const int behind = s.keys - s.queries; // with a causal mask, row r sees keys up to behind + r
    const auto sees = [&](int row) { return p.causal ? min(s.keys, behind + row + 1) : s.keys; };
    // The query blocks [begin, end) of a head have rows that see some key.
    int end = key < s.keys ? (s.queries + ROWS - 1) / ROWS : 0;
    const int begin = min(max(s.first, p.causal ? key - behind : 0) / ROWS, end);
    if constexpr (V::scores) end = V::template endOf<Backward>(p, behind, key, begin, end);
    const int steps = (end - begin) * p.group;

    const auto headOf = [&](int head) { return kvHead * p.group + head; }; // of all sequences
    const auto bring = [&](int head, int i, u32 stage) {
      const long long at = (long long)headOf(head) * p.queries * p.dim;
      copyRows<ROWS>(p, stage, p.q, at, i * ROWS, s.first, s.queries);
      copyRows<ROWS>(p, stage + ROW, p.outGrad, at, i * ROWS, s.first, s.queries);
      if (threadIdx.x < ROWS / 2) copy16(stage + 2 * ROW + threadIdx.x * 16, p.rows + ((long long)headOf(head) * p.blocks + i) * ROWS + threadIdx.x * 2, true);
      copyCommit();
    };
    const long long first = (long long)kvHead * p.keys * p.dim;
    if (steps > 0) {
      copyRows<KEYS>(p, keys, p.k, first, key, V::hidden(p, s), s.keys, V::sinkTokens(p));
      copyRows<KEYS>(p, values, p.v, first, key, V::hidden(p, s), s.keys, V::sinkTokens(p));
      bring(0, begin, stages);
    }

    int e = 0;
    if constexpr (Math::narrow) e = BackwardBound(p, kvHead).exponent(V::factor(p));
    const float factor = powerOf2(e - (int)Math::lift), back = p.scale * powerOf2(-e);
    // Where the lane has a row of the matrices that it loads: of left operands and of transposed right ones, of right
    // operands, and of dS as a left operand, where it is transposed.
    const u32 left = swizzled(lane % 16, lane / 16 * 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
    const int group = warp % GROUPS, part = warp / GROUPS;
    const u32 slope = slopes + swizzled(lane % 8 + lane / 16 * 8, group * 32 + lane / 8 % 2 * 16);

    float dk[TILES][D / 8][4], dv[TILES][D / 8][4];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int h = 0; h < 4; h++) dk[t][j][h] = dv[t][j][h] = 0.f;
    u32 stage = stages, other = STAGES == 2 ? stages + STAGE : stages;
    int head = 0, i = begin;
    u32* added = nullptr; // the counter of the step before, if others wait for it
    int adds = 0;
    // After a barrier behind all stores. The thread waits for the stores, so it is of another warp than the one that polls.
    const auto release = [&] {
      if (added != nullptr && threadIdx.x == 32) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(added), "r"(adds) : "memory");
    };
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int nextHead = i + 1 < end ? head : head + 1, next = i + 1 < end ? i + 1 : begin;
      copyWait<0>();
      __syncthreads();
      release();
      if (STAGES == 2 && step + 1 < steps) bring(nextHead, next, other);
      const int row = i * ROWS, seen = sees(min(row + ROWS, s.queries) - 1), most = min(seen, key + KEYS), mine = key + warp * MINE; // keys that some row sees
      const long long number = (long long)headOf(head) * p.blocks + i;
      u32* const counter = p.counters + 1 + 3 * p.batch * p.kvHeads + number;
      int before = (seen - 1) / KEYS - block, least = key; // key blocks that add before this one; no row sees a key before this one
      bool ends = block == 0;                              // no key block adds after this one
      if constexpr (V::scores) V::template place<Backward>(p, behind + row, block, (seen - 1) / KEYS, before, least, ends);
      if (mine < most && (!V::scores || mine + MINE > least)) {
        float x[TILES][ROWS / 8][4], y[TILES][ROWS / 8][4];
        u32 w[TILES][ROWS / 16][4];
        typename V::template Scores<Backward> scores(p, s, kvHead / p.kvHeads, headOf(head) % (p.kvHeads * p.group), row, mine);
        multiply(x, keys + warp * (MINE * 128) + left, stage + right);
        if constexpr (V::scores) {
          scores.weigh(x, stage + 2 * ROW, Math::lift);
          scores.keep(w, x);
        } else {
#pragma unroll
          for (int j = 0; j < ROWS / 8; j++) {
            float of[4];
            loadFour(of, stage + 2 * ROW + (j * 8 + lane % 4 * 2) * 8);
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
              for (int h = 0; h < 4; h++) x[t][j][h] = exp2_(__fmaf_rn(notPositive(__fmaf_rn(x[t][j][h], p.scale, -of[h % 2 * 2])), LOG2E, Math::lift));
          }
          if (mine + MINE > sees(row)) {
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
              for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
                for (int h = 0; h < 4; h++)
                  if (mine + t * 16 + lane / 4 + h / 2 * 8 >= sees(row + j * 8 + lane % 4 * 2 + h % 2)) x[t][j][h] = 0.f;
          }
          operands(w, x);
        }
        add(dv, w, stage + ROW + left);
        multiply(y, values + warp * (MINE * 128) + left, stage + ROW + right);
        if constexpr (V::scores) scores.drop(y);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
          float of[4];
          loadFour(of, stage + 2 * ROW + (j * 8 + lane % 4 * 2) * 8);
#pragma unroll
          for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int h = 0; h < 4; h++) {
              const float d = y[t][j][h] - of[h % 2 * 2 + 1];
              x[t][j][h] *= Math::narrow ? d * factor : d;
            }
        }
        if constexpr (V::scores) scores.chain(x);
        operands(w, x);
        add(dk, w, stage + left);
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
          for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) storeShared(slopes + swizzled(warp * MINE + t * 16 + lane / 4 + h * 8, j * 16 + lane % 4 * 4), w[t][j / 2][j % 2 * 2 + h]);
      }
      if (before > 0 && threadIdx.x == 0) {
        u32 have;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(have) : "l"(counter) : "memory");
        while (have != before);
      }
      __syncthreads();
      if (STAGES == 1 && step + 1 < steps) bring(nextHead, next, other);

      float4* const sum = p.sums + number * (ROWS * D / 4) + threadIdx.x;
      float dq[COLUMNS / 8][4];
      float4 had[COLUMNS / 8];
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) {
        dq[j][0] = dq[j][1] = dq[j][2] = dq[j][3] = 0.f;
        had[j] = before > 0 ? __ldcg(sum + j * THREADS) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
      const int live = (most - key + 15) / 16;
#pragma unroll 2
      for (int k = V::scores ? (least - key) / 16 : 0; k < live; k++) {
        u32 a[4];
        loadMatrixTransposed(a, slope + k * (16 * 128));
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
          const int n = part * (COLUMNS / 16) + j;
          u32 b[4];
          loadMatrixTransposed(b, ((keys + left) ^ n % 4 * 32) + n / 4 * (KEYS * 128) + k * (16 * 128));
          Math::mma(dq[2 * j], a, b[0], b[1]);
          Math::mma(dq[2 * j + 1], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++) dq[j][0] += had[j].x, dq[j][1] += had[j].y, dq[j][2] += had[j].z, dq[j][3] += had[j].w;
      added = nullptr;
      if (V::scores ? !ends : block > 0) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) __stcg(sum + j * THREADS, make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]));
        added = counter, adds = before + 1;
      } else {
        store(p.dq, dq, (long long)headOf(head) * p.queries, row + group * 16 + lane / 4, s.queries, part * COLUMNS + lane % 4 * 2, p.dim, back);
      }
      const u32 was = stage;
      stage = other, other = was, head = nextHead, i = next;
    }
    __syncthreads();
    release();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const int mine = key + warp * MINE + t * 16 + lane / 4;
      store(p.dk, dk[t], (long long)kvHead * p.keys, mine, p.keys, lane % 4 * 2, p.dim, back);
      if (p.dv != nullptr) store(p.dv, dv[t], (long long)kvHead * p.keys, mine, p.keys, lane % 4 * 2, p.dim, powerOf2(-(int)Math::lift) * V::factor(p));
    }
  }

  static constexpr float LOG2E = 1.4426950408889634f;

  // Rows [first, first+N) of a matrix that begins at an element; zeros outside of [0, front) and [from, to), behind the head dim, and without a
  // matrix.
  template <int N> __device__ static __forceinline__ void copyRows(const BackwardParams& p, u32 slot, const void* matrix, long long begin, int first, int from, int to, int front = 0) {
    const int r = threadIdx.x / 8, c = threadIdx.x % 8 * 8;
#pragma unroll
    for (int i = 0; i < N; i += THREADS / 8)
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) {
        const int row = first + i + r, column = j * 64 + c;
        const bool there = matrix != nullptr && (row >= from || V::scores && row < front) && row < to && column < p.dim;
        copy16(slot + j * (N * 128) + swizzled(i + r, c * 2), there ? (const u16*)matrix + begin + (long long)row * p.dim + column : p.q, there);
      }
  }

  // Products of MINE rows of a matrix of KEYS rows and all of one of ROWS rows.
  __device__ static __forceinline__ void multiply(float (&x)[TILES][ROWS / 8][4], u32 of, u32 by) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) x[t][j][0] = x[t][j][1] = x[t][j][2] = x[t][j][3] = 0.f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 a[TILES][4];
#pragma unroll
      for (int t = 0; t < TILES; t++) loadMatrix(a[t], (of ^ k % 4 * 32) + k / 4 * (KEYS * 128) + t * 16 * 128);
#pragma unroll
      for (int j = 0; j < ROWS / 8; j += 2) {
        u32 b[4];
        loadMatrix(b, (by ^ k % 4 * 32) + k / 4 * (ROWS * 128) + j * 8 * 128);
#pragma unroll
        for (int t = 0; t < TILES; t++) Math::mma(x[t][j], a[t], b[0], b[1]), Math::mma(x[t][j + 1], a[t], b[2], b[3]);
      }
    }
  }

  __device__ static __forceinline__ void operands(u32 (&w)[TILES][ROWS / 16][4], const float (&x)[TILES][ROWS / 8][4]) {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int k = 0; k < ROWS / 16; k++)
#pragma unroll
        for (int h = 0; h < 4; h++) w[t][k][h] = Operand::pack(x[t][2 * k + h / 2][h % 2 * 2], x[t][2 * k + h / 2][h % 2 * 2 + 1]);
  }

  // Adds the products of w and a matrix of ROWS rows.
  __device__ static __forceinline__ void add(float (&to)[TILES][D / 8][4], const u32 (&w)[TILES][ROWS / 16][4], u32 rows) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        u32 b[4];
        loadMatrixTransposed(b, (rows ^ n % 4 * 32) + n / 4 * (ROWS * 128) + k * 16 * 128);
#pragma unroll
        for (int t = 0; t < TILES; t++) Math::mma(to[t][2 * n], w[t][k], b[0], b[1]), Math::mma(to[t][2 * n + 1], w[t][k], b[2], b[3]);
      }
  }

  // Writes rows row and row+8 of x, those below `rows`, times f.
  template <int N> __device__ static __forceinline__ void store(void* to, const float (&x)[N][4], long long begin, int row, int rows, int column, int dim, float f) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < N; j++)
        if (row + h * 8 < rows && column + j * 8 < dim) Format::Store::store2(to, (begin + row + h * 8) * dim + column + j * 8, make_float2(x[j][2 * h] * f, x[j][2 * h + 1] * f));
  }

  __device__ static __forceinline__ void loadFour(float (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
  }
  __device__ static __forceinline__ void storeShared(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
};
