// Linear layers of more rows than gemm_gemv.cuh keeps in shared memory, as prompts and
// large batches have them:
//
//	y = f(x W^T + b) + residual,   f(v) = v, max(v, 0) or gelu(v)
//
// or with GATES as gemm_gemv.cuh has it.
//
// First, a launch makes operands of x (of its norm, if that is wanted): each
// element as two 16-bit parts, rows scaled by powers of two where the type has few
// exponents; or as one part, x rounded to the weights' type. Then thread blocks compute tiles of y: 128 rows of W by 32 to 128 of
// x. A producer warp brings both through a ring, in steps of 64 columns; eight
// consumer warps multiply. Where there are fewer tiles than multiprocessors, the thread
// blocks of a cluster share a tile's columns out, and add their sums up in the
// order of the blocks: bits do not vary from run to run. A cluster may have several tiles
// side by side, whose blocks with the same columns bring x for each other. Of a gated unit half of a tile's rows of W
// are the gate's, and the other half are of what it is for.
#pragma once
#include "gemm_gemv.cuh"
#include "wgmma.cuh"

constexpr int GEMM_WARPS = 8;                    // consumers; one more is the producer
constexpr int GEMM_THREADS = (GEMM_WARPS + 1) * 32;
constexpr int GEMM_TILE = 128;                   // rows of W
constexpr int GEMM_STEP = 64;                    // columns: 128 bytes
constexpr int GEMM_WIDTH = GEMM_TILE + 4;        // floats between rows of a tile's sums

struct OperandParams {
  const float *x, *gamma, *beta; // gamma and beta may be null
  u32* lead;                     // rows x n/2 pairs, and behind them the other parts
  float* factors;                // of each row, what its products are multiplied by
  int n, rows, norm;
  int parts; // 1 or 2: how many of each element are made
  float eps, offset; // of the norm, as LinearParams has them
};

// The fused append. What a layer makes may be a step's new keys and values: where its parts
// go in the cache besides, as its Store has them.
struct FusedAppend {
  void* cache[LINEAR_PARTS]; // null: the part is nothing of the sort
  const int* slots;          // of each row, the row of keys of head 0 that it becomes; -1: none
  const int* ahead;          // pages of the cache that are worth having in the L2 cache then: how many, and which
  int headRows, dim;         // rows of keys from a head to the next; elements of one, a multiple of 4
  int pageBytes;
};

struct GemmParams {
  TensorMap maps[LINEAR_PARTS]; // of the weights; several layers of one x
  TensorMap x;                  // both parts of the operands
  const float* factors;
  const float* b[LINEAR_PARTS]; // may be null
  float* y[LINEAR_PARTS];       // rows x out
  const float* residual;        // rows x out of part 0; may be null
  FusedAppend keep;             // without slots there is nothing to keep
  int out[LINEAR_PARTS];
  int tiles[LINEAR_PARTS]; // up to the end of each part
  int rows, in;
  int split;  // thread blocks of a cluster that share the columns of a tile
  int beside; // tiles of a cluster, of the same rows of x
  int stages; // of the ring
  int activation;
  int early; // the weights may be read before the launch before this one has ended
};

#if __CUDA_ARCH__ >= 900
// A row of operands, a thread block each. Threads keep the first KEPT fours that they have of it, so that these are
// read once: of few rows that is faster, and many have more blocks of fewer registers.
template <class Math, int KEPT> __device__ __forceinline__ void operands(const OperandParams& p) {
  __shared__ float scratch[8];
  if (threadIdx.x == 0) letNextStart(); // its weights need not wait for x
  waitForEarlier();
  const float* x = p.x + (long long)blockIdx.x * p.n;
  constexpr int STRIDE = 1024;
  float4 kept[KEPT > 0 ? KEPT : 1];
#pragma unroll
  for (int k = 0; k < KEPT; k++)
    if (const int i = threadIdx.x * 4 + k * STRIDE; i < p.n) kept[k] = *(const float4*)(x + i);
  float mean = 0.f, f = 1.f;
  const auto normed = [&](int i, float4 v) {
    v.x = (v.x - mean) * f, v.y = (v.y - mean) * f, v.z = (v.z - mean) * f, v.w = (v.w - mean) * f;
    if (p.gamma != nullptr) {
      const float4 g = *(const float4*)(p.gamma + i);
      v.x *= g.x + p.offset, v.y *= g.y + p.offset, v.z *= g.z + p.offset, v.w *= g.w + p.offset;
    }
    if (p.beta != nullptr) {
      const float4 b = *(const float4*)(p.beta + i);
      v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
    }
    return v;
  };
  bool done = false; // what is kept has its norm
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < KEPT; k++)
      if (const int i = threadIdx.x * 4 + k * STRIDE; i < p.n) f(i, kept[k]);
#pragma unroll(KEPT > 0 ? 1 : 4)
    for (int i = threadIdx.x * 4 + KEPT * STRIDE; i < p.n; i += STRIDE) {
      float4 v = *(const float4*)(x + i);
      if (done) v = normed(i, v);
      f(i, v);
    }
  };
  const auto plus = [](float a, float b) { return a + b; };
  if (p.norm) {
    float sum = 0.f;
    if (p.norm == LAYER_NORM) {
      each([&](int, float4& v) { sum += (v.x + v.y) + (v.z + v.w); });
      mean = foldBlock(sum, scratch, plus) / p.n;
      sum = 0.f;
    }
    each([&](int, float4& v) { sum += ((v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean)) + ((v.z - mean) * (v.z - mean) + (v.w - mean) * (v.w - mean)); });
    f = 1.f / sqrtf(foldBlock(sum, scratch, plus) / p.n + p.eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++)
      if (const int i = threadIdx.x * 4 + k * STRIDE; i < p.n) kept[k] = normed(i, kept[k]);
    done = true;
  }
  float up = 1.f, down = 1.f;
  if constexpr (Math::narrow) {
    float top = 0.f;
    each([&](int, float4& v) {
      top = fmaxf(top, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    });
    const int e = exponentOf(foldBlock(top, scratch, [](float a, float b) { return fmaxf(a, b); }));
    up = powerOf(-e), down = powerOf(e);
  }
  if (threadIdx.x == 0) p.factors[blockIdx.x] = down;
  u32* const lead = p.lead + (long long)blockIdx.x * (p.n / 2);
  u32* const rest = lead + (long long)p.rows * (p.n / 2);
  each([&](int i, float4& v) {
    if constexpr (Math::narrow) v.x *= up, v.y *= up, v.z *= up, v.w *= up;
    const u32 a = Math::pack(v.x, v.y), b = Math::pack(v.z, v.w);
    *(uint2*)(lead + i / 2) = make_uint2(a, b);
    if (p.parts == 2) *(uint2*)(rest + i / 2) = make_uint2(Math::pack(v.x - Math::low(a), v.y - Math::high(a)), Math::pack(v.z - Math::low(b), v.w - Math::high(b)));
  });
}

// What a layer makes of its sums for row m of x and rows n to n+3 of W, of which there may
// be fewer; without the residual.
__device__ __forceinline__ void finish4(const GemmParams& p, int part, int m, int n, float (&v)[4]) {
  const float down = p.factors[m];
  const float* const bias = p.b[part];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (n + e >= p.out[part]) break;
    v[e] *= down;
    if (bias != nullptr) v[e] += bias[n + e];
    v[e] = activated(p.activation, v[e]);
  }
}
// The block's share of the pages that attention reads next: the memory has nothing to
// do while x is waited for, and when the last weights have come.
__device__ __forceinline__ void fetchPages(const FusedAppend& keep, int lane) {
  constexpr int PIECE = 4096;
  if (keep.slots == nullptr) return;
  const int per = (keep.pageBytes + PIECE - 1) / PIECE, n = keep.ahead[0] * per;
  for (int i = blockIdx.x + lane * gridDim.x; i < n; i += 32 * gridDim.x) {
    const int in = i % per * PIECE;
    const long long at = (long long)keep.ahead[1 + i / per] * keep.pageBytes + in;
#pragma unroll
    for (int k = 0; k < LINEAR_PARTS; k++)
      if (keep.cache[k] != nullptr) fetchAhead((const char*)keep.cache[k] + at, min(PIECE, keep.pageBytes - in));
  }
}

// Stores them, and adds the residual if there is one.
__device__ __forceinline__ void store4(const GemmParams& p, int part, int m, int n, float (&v)[4], const float* residual) {
  const int out = p.out[part];
  const long long place = (long long)m * out + n;
  if (out % 4 == 0) {
    if (residual != nullptr) {
      const float4 r = *(const float4*)(residual + place);
      v[0] += r.x, v[1] += r.y, v[2] += r.z, v[3] += r.w;
    }
    *(float4*)(p.y[part] + place) = make_float4(v[0], v[1], v[2], v[3]);
  } else {
    for (int e = 0; e < 4 && n + e < out; e++) p.y[part][place + e] = v[e] + (residual != nullptr ? residual[place + e] : 0.f);
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// copyBox into several thread blocks of a cluster, a bit of `ranks` for each: to the same
// place of each, and word of it to the same barrier.
__device__ __forceinline__ void copyBoxToEach(u32 dst, const TensorMap* map, int x, int y, int z, u32 bar, u64 policy, u16 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "h"(ranks), "l"(policy) : "memory");
}
#endif

// T is the Format of the weights, PARTS those of x's elements.
template <class T, int ROWS, bool GATES = false, int PARTS = 2> struct TiledGemm {
  using Math = typename T::Math;
  static_assert(T::ready && Math::Operand::bytes == 2 && GEMM_STEP * T::Store::bytes == 128, "a step's columns are one column block of operands");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr bool GROUPS = true; // two warp groups, of 64 rows of W each
#else
  static constexpr bool GROUPS = false;
#endif
  // The warps' parts of a tile: BESIDE of them share the rows of W out, the others x's.
  static constexpr int BESIDE = GROUPS ? 8 : ROWS >= 128 ? 2 : 4, BELOW = GEMM_WARPS / BESIDE;
  static constexpr int A = GEMM_TILE / BESIDE / 16, B = ROWS / BELOW / 8; // products: of 16 rows of W, and 8 of x
  static constexpr int PART = ROWS * 128;                                   // bytes of a part of x in a stage
  static constexpr int STAGE = GEMM_TILE * 128 + PARTS * PART;
  static_assert(B % 2 == 0, "x is loaded 16 rows at a time");

  static constexpr int HALF = GEMM_TILE / 2; // rows of a gate, and of what it is for
  __device__ static __forceinline__ bool gated(const GemmParams& p) { return GATES && (p.activation & GATED); }

  __device__ static __forceinline__ void run(const GemmParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = p.split, beside = GROUPS ? p.beside : 1, rank = blockIdx.x % split, below = (p.rows + ROWS - 1) / ROWS;
    const int place = blockIdx.x / split % beside, cluster = blockIdx.x / split / beside; // of the tiles of a cluster
    // Blocks that run at the same time have the same rows of W, as far as there are several.
    const int at = cluster / below * beside + place, tiles = p.tiles[gated(p) ? 0 : LINEAR_PARTS - 1], first = cluster % below * ROWS; // of x
    const int tile = min(at, tiles - 1); // who has none brings x all the same
    const int part = gated(p) ? 0 : (tile >= p.tiles[0]) + (tile >= p.tiles[1]), row = gated(p) ? tile * HALF : (tile - (part > 0 ? p.tiles[part - 1] : 0)) * GEMM_TILE;
    const int steps = (p.in + GEMM_STEP - 1) / GEMM_STEP, s0 = rank * steps / split, s1 = (rank + 1) * steps / split;
    u64* bars = (u64*)(memory + p.stages * STAGE); // a full and an empty one for each stage
    const u32 ring = sharedAddress(memory), full = sharedAddress(bars), empty = full + p.stages * 8;
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(full + s * 8, 1), barrierInit(empty + s * 8, GEMM_WARPS * beside);
      opened();
    }
    __syncwarp();
    if (beside > 1) clusterArrive();
    __syncthreads();
    float sums[A][B][4];
    if (warp == GEMM_WARPS) {
      Producer producer{p, part, row, first, s0, s1, place, ring, full, empty};
      if (lane == 0 && p.early) producer.begin();
      __syncwarp();
      fetchPages(p.keep, lane);
      waitForEarlier();
      if (beside > 1) clusterWait(); // all have their barriers
      if (lane == 0) producer.run();
      __syncwarp();
    } else {
      waitForEarlier();
      if (threadIdx.x == 0) letNextStart();
      __syncwarp();
      if (beside > 1) clusterWait();
      Epilogue end(p, part, row, first, rank);
#pragma unroll
      for (int i = 0; i < A * B; i++) sums[i / B][i % B][0] = sums[i / B][i % B][1] = sums[i / B][i % B][2] = sums[i / B][i % B][3] = 0.f;
      if constexpr (GROUPS) {
        consumeGroups(p, s1 - s0, ring, full, empty, sums[0], warp, lane);
      } else {
        consume(p.stages, s1 - s0, ring, full, empty, sums, warp, lane);
      }
      end.ask(end.from);
      syncWarps(GEMM_WARPS); // the ring is used up
      float* const mine = (float*)memory;
      const int n = warp % BESIDE * (A * 16) + (lane >> 2), m = warp / BESIDE * (B * 8) + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < A; i++)
#pragma unroll
        for (int j = 0; j < B; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) mine[(m + j * 8 + (e & 1)) * GEMM_WIDTH + n + i * 16 + (e >> 1) * 8] = sums[i][j][e];
      split > 1 ? clusterSync() : syncWarps(GEMM_WARPS);
      if (at == tile) end.run(mine, place * split);
    }
    if (split > 1 && warp == GEMM_WARPS) clusterSync();
    if (split * beside > 1) clusterSync(); // others may still read this block's memory, or give back stages
  }

  // One thread asks for all that the block reads, and for its share of x for the blocks beside it.
  struct Producer {
    const GemmParams& p;
    int part, row, first, s0, s1, place;
    u32 ring, full, empty;
    __device__ __forceinline__ int ahead() const { return min(p.stages, s1 - s0); }
    __device__ __forceinline__ void weights(int s, int at) const {
      // They are read once where one tile has all rows.
      const u64 policy = p.rows <= ROWS ? readOnce() : readAgain();
      barrierExpect(full + at * 8, STAGE);
      copyBox(ring + at * STAGE, &p.maps[part], s * GEMM_STEP, row, 0, full + at * 8, policy);
      if (gated(p)) copyBox(ring + at * STAGE + HALF * 128, &p.maps[1], s * GEMM_STEP, row, 0, full + at * 8, policy);
    }
    __device__ __forceinline__ void x(int s, int at) const {
      const u32 to = ring + at * STAGE + GEMM_TILE * 128, bar = full + at * 8;
      if (!GROUPS || p.beside == 1) {
        copyBox(to, &p.x, s * GEMM_STEP, first, 0, bar, readAgain());
        return;
      }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      const int rows = ROWS / p.beside;
      u32 ranks = 0; // of the blocks that have these columns
      for (int i = 0; i < p.beside; i++) ranks |= 1u << (i * p.split);
      ranks <<= blockIdx.x % p.split;
#pragma unroll
      for (int q = 0; q < PARTS; q++) copyBoxToEach(to + q * PART + place * rows * 128, &p.x, s * GEMM_STEP, first + place * rows, q, bar, readAgain(), (u16)ranks);
#endif
    }
    // What depends on nothing.
    __device__ __forceinline__ void begin() const {
      for (int i = 0; i < ahead(); i++) weights(s0 + i, i);
    }
    __device__ __forceinline__ void run() const {
      const int n = ahead();
      for (int i = 0; i < n; i++) {
        if (!p.early) weights(s0 + i, i);
        x(s0 + i, i);
      }
      int at = 0;
      u32 parity = 0;
#pragma unroll 1
      for (int s = s0 + n; s < s1; s++) {
        barrierWait(empty + at * 8, parity);
        weights(s, at), x(s, at);
        if (++at == p.stages) at = 0, parity ^= 1;
      }
    }
  };

  // By warp groups: a stage is given back when the products of the next one are on
  // their way.
  __device__ static __forceinline__ void consumeGroups(const GemmParams& p, int steps, u32 ring, u32 full, u32 empty, float (&sums)[B][4], int warp, int lane) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const int stages = p.stages;
    // Each lane tells one of the blocks beside this one.
    const bool gives = lane < p.beside;
    const u32 given = remoteAddress(empty, min(lane, p.beside - 1) * p.split + blockIdx.x % p.split);
    int at = 0, before = -1;
    u32 parity = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
      barrierWait(full + at * 8, parity);
      const u32 w = ring + at * STAGE + warp / 4 * (64 * 128), x = ring + at * STAGE + GEMM_TILE * 128;
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < GEMM_STEP / 16; k++)
#pragma unroll
        for (int q = 0; q < PARTS; q++) Wgmma<ROWS>::template shared<Math>(sums, rowOperand(w + k * 32), rowOperand(x + q * PART + k * 32), 1);
      wgmmaCommit();
      wgmmaWait<1>();
      if (before >= 0 && gives) barrierArriveRemote(given + before * 8);
      before = at;
      if (++at == stages) at = 0, parity ^= 1;
    }
    wgmmaWait<0>();
    pinned(sums);
#endif
  }

  __device__ static __forceinline__ void consume(int stages, int steps, u32 ring, u32 full, u32 empty, float (&sums)[A][B][4], int warp, int lane) {
    // Four matrices of 8 rows and 16 bytes: of W rows 0-7 and 8-15, then the next 16
    // bytes of them; of x rows 0-7, the next 16 bytes of them, and so rows 8-15.
    const u32 a = warp % BESIDE * (A * 16) + (lane & 7) + ((lane >> 3) & 1) * 8, halfA = (lane >> 4) * 16;
    const u32 b = warp / BESIDE * (B * 8) + (lane & 7) + (lane >> 4) * 8, halfB = ((lane >> 3) & 1) * 16;
    int at = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int s = 0; s < steps; s++) {
      barrierWait(full + at * 8, parity);
      const u32 w = ring + at * STAGE, x = w + GEMM_TILE * 128;
#pragma unroll
      for (int k = 0; k < GEMM_STEP / 16; k++) {
        u32 left[A][4], right[PARTS][B / 2][4];
#pragma unroll
        for (int i = 0; i < A; i++) WeightOperands<T>::load(left[i], w + swizzled(a + i * 16, k * 32 + halfA));
#pragma unroll
        for (int q = 0; q < PARTS; q++)
#pragma unroll
          for (int j = 0; j < B / 2; j++) loadMatrix(right[q][j], x + q * PART + swizzled(b + j * 16, k * 32 + halfB));
#pragma unroll
        for (int q = 0; q < PARTS; q++)
#pragma unroll
          for (int i = 0; i < A; i++)
#pragma unroll
            for (int j = 0; j < B; j++) Math::mma(sums[i][j], left[i], right[q][j / 2][j % 2 * 2], right[q][j / 2][j % 2 * 2 + 1]);
      }
      releaseStage(empty + at * 8, lane);
      if (++at == stages) at = 0, parity ^= 1;
    }
  }

  // The end of a tile: a lane has four columns, the same ones in all its rows, of which the blocks that share
  // the tile have some each. What comes from memory is asked for ahead: the bias before there are sums, and
  // residuals some rows at a time.
  struct Epilogue {
    static constexpr int EACH = 4; // rows
    const GemmParams& p;
    int part, c, n, first, from, step; // n: the first column of y, c of the tile; rows of the tile from `from` on
    bool even;                         // four columns are all there or none, and beside each other in memory
    float bias[4], upBias[4], down[EACH];
    float4 residual[EACH];
    using Keys = typename Math::Operand;
    typename Keys::Element* kept; // null: the cache has nothing of these columns
    int slots[EACH];

    __device__ __forceinline__ Epilogue(const GemmParams& p, int part, int row, int first, int rank) : p(p), part(part), first(first) {
      const int lanes = (gated(p) ? HALF : GEMM_TILE) / 4, rows = GEMM_WARPS * 32 / lanes;
      c = threadIdx.x % lanes * 4, n = row + c, from = rank * rows + threadIdx.x / lanes, step = p.split * rows;
      even = p.out[part] % 4 == 0;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const bool there = n + e < p.out[part];
        bias[e] = there && p.b[part] != nullptr ? p.b[part][n + e] : 0.f;
        if constexpr (GATES) upBias[e] = there && gated(p) && p.b[1] != nullptr ? p.b[1][n + e] : 0.f;
      }
      kept = nullptr;
      if (p.keep.slots != nullptr && p.keep.cache[part] != nullptr) kept = (typename Keys::Element*)p.keep.cache[part] + (long long)(n / p.keep.dim) * p.keep.headRows * p.keep.dim + n % p.keep.dim;
    }
    __device__ __forceinline__ bool has(int m) const { return m < ROWS && first + m < p.rows && n < p.out[part]; }
    __device__ __forceinline__ long long place(int m) const { return (long long)(first + m) * p.out[part] + n; }
    __device__ __forceinline__ void ask(int m) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        down[i] = has(m + i * step) ? p.factors[first + m + i * step] : 0.f;
        slots[i] = has(m + i * step) && kept != nullptr ? p.keep.slots[first + m + i * step] : -1;
        residual[i] = has(m + i * step) && even && p.residual != nullptr ? *(const float4*)(p.residual + place(m + i * step)) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
    // The sums of EACH rows, of all blocks that share the tile, from `base` on in the cluster.
    __device__ __forceinline__ void sumsOf(float4 (&v)[EACH], const float* sums, int m, int base) const {
      const float* at[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) at[i] = sums + min(m + i * step, ROWS - 1) * GEMM_WIDTH; // something, of rows that there are not
      if (p.split == 1) {
#pragma unroll
        for (int i = 0; i < EACH; i++) v[i] = *(const float4*)at[i];
        return;
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
      for (int r = 0; r < p.split; r++)
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const float4 s = remote4(at[i], base + r);
          v[i].x += s.x, v[i].y += s.y, v[i].z += s.z, v[i].w += s.w;
        }
    }
    __device__ __forceinline__ float finished(float v, float down, float up, int e) const {
      v = v * down + bias[e];
      if constexpr (GATES) {
        v = activatedAny(p.activation & ~GATED, v);
        return gated(p) ? v * (up * down + upBias[e]) : v;
      } else {
        return activated(p.activation, v);
      }
    }
    __device__ __forceinline__ void run(const float* sums, int base) {
#pragma unroll 1
      for (int m = from; m < ROWS; m += EACH * step) {
        float4 v[EACH], up[EACH];
        sumsOf(v, sums + c, m, base);
        if constexpr (GATES)
          if (gated(p)) sumsOf(up, sums + c + HALF, m, base);
        float factors[EACH];
        float4 more[EACH];
        int to[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) factors[i] = down[i], more[i] = residual[i], to[i] = slots[i];
        ask(m + EACH * step);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          if (!has(m + i * step)) continue;
          const float4 u = GATES ? up[i] : v[i];
          float f[4] = {finished(v[i].x, factors[i], u.x, 0), finished(v[i].y, factors[i], u.y, 1), finished(v[i].z, factors[i], u.z, 2), finished(v[i].w, factors[i], u.w, 3)};
          if (even) {
            const float4 all = make_float4(f[0] + more[i].x, f[1] + more[i].y, f[2] + more[i].z, f[3] + more[i].w);
            *(float4*)(p.y[part] + place(m + i * step)) = all;
            if (to[i] >= 0) Keys::store4(kept + (long long)to[i] * p.keep.dim, 0, all);
          } else {
            store4(p, part, first + m + i * step, n, f, p.residual);
          }
        }
      }
    }
  };
};
#endif
