// Products of 16-bit operands with more than 128 rows, on compute capability 9.0: c = f(a b^T + bias) + plus, with sums of float32.
//
// a has M rows and b N rows of K elements. In memory an operand is row-major, or its transpose is (ACROSS): tensor cores read both from shared
// memory, so gradients need no transposes. A tile is 128 rows of a by 192 of b. Two thread blocks are a cluster, which walks pairs of tiles
// with the same rows of b: each block copies half of the rows for both.
//
// In a layer, x is a, and the weights are b. With SWAPPED, the weights are a, and x is b: a pair of tiles then has 192 rows of x instead of 256,
// so fewer rows of tiles are empty with, for example, 150 or 350 rows of x.
//
// A producer warp copies steps of 64 elements of k to a ring. Each of two consumer warp groups has tiles of its own, every second one: while
// one multiplies, the other one stores its sums.
//
// If tiles do not fill the GPU, k is cut into slices. All tiles have a slice before the next slice begins, so thread blocks that run at a
// time read the same part of k. Each slice has a matrix of sums. One more launch, hopperAdd, adds the matrices in the order of the slices.
// Bits are the same in each run.
#pragma once
#include "gemm_tiled.cuh"

constexpr int HOPPER_THREADS = 384;
constexpr int HOPPER_ROWS = 128, HOPPER_COLUMNS = 192; // of a tile: rows of a and of b
constexpr int HOPPER_PAIR = 2;                         // thread blocks of a cluster
constexpr int HOPPER_GROUP = 8;                        // pairs of tiles with consecutive rows of a, for which clusters walk all rows of b
constexpr int HOPPER_STAGE = (HOPPER_ROWS + HOPPER_COLUMNS) * 128, HOPPER_STAGES = 5;

struct HopperParams {
  GemmParams of;   // keep, split, beside and stages are not read; early is read with SWAPPED
  long long apart; // floats between the sums of two slices
  int slices;      // of k. With several slices, y is where the sums of the first slice go: with GATES, the gate's to y[0], the other part's to y[1]
};

constexpr int HOPPER_EACH = 4; // runs of eight elements of a thread of hopperRound
constexpr int HOPPER_LISTS = 4;
static_assert(HOPPER_LISTS == LINEAR_PARTS + 1, "x and all weights");

struct HopperRoundParams {
  const float* x[HOPPER_LISTS];
  void* y[HOPPER_LISTS];
  long long ends[HOPPER_LISTS]; // in runs of eight elements, up to the end of each list
};

// y = x, rounded to nearest.
template <class S> __device__ __forceinline__ void hopperRound(const HopperRoundParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const long long first = (long long)blockIdx.x * (256 * HOPPER_EACH) + threadIdx.x;
  float4 v[HOPPER_EACH][2];
  void* to[HOPPER_EACH];
#pragma unroll
  for (int i = 0; i < HOPPER_EACH; i++) {
    const long long n = first + i * 256;
    to[i] = nullptr;
    if (n >= p.ends[HOPPER_LISTS - 1]) continue;
    int list = 0;
#pragma unroll
    for (int l = 0; l < HOPPER_LISTS - 1; l++) list += n >= p.ends[l];
    const long long at = (n - (list > 0 ? p.ends[list - 1] : 0)) * 8;
    v[i][0] = *(const float4*)(p.x[list] + at), v[i][1] = *(const float4*)(p.x[list] + at + 4);
    to[i] = (u16*)p.y[list] + at;
  }
#pragma unroll
  for (int i = 0; i < HOPPER_EACH; i++)
    if (to[i] != nullptr) *(uint4*)to[i] = make_uint4(S::pack(v[i][0].x, v[i][0].y), S::pack(v[i][0].z, v[i][0].w), S::pack(v[i][1].x, v[i][1].y), S::pack(v[i][1].z, v[i][1].w));
}

struct HopperAddParams {
  const float* sums[LINEAR_PARTS]; // of the first slice; of a gated unit, those of the gate and of the other part
  const float* b[LINEAR_PARTS];    // may be null
  float* y[LINEAR_PARTS];
  const float* residual; // may be null
  long long apart;       // floats between the sums of two slices
  int out[LINEAR_PARTS], rows, slices, activation, blocks; // thread blocks of each part
};

// SILU or GELU_TANH.
__device__ __forceinline__ float bySigmoidOf(int activation, float v) { return bySigmoid(v, activation == SILU ? v : v * (1.59576912f + 0.0713548163f * v * v)); }

// y = f(sums of all slices + b) + residual. A thread has two output features of a row.
__device__ __forceinline__ void hopperAdd(const HopperAddParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const int part = blockIdx.x / p.blocks, out = p.out[part];
  const long long at = ((long long)(blockIdx.x % p.blocks) * 256 + threadIdx.x) * 2;
  if (at >= (long long)p.rows * out) return;
  const bool gated = p.activation & GATED;
  const float2 more = p.residual != nullptr ? *(const float2*)(p.residual + at) : make_float2(0.f, 0.f);
  float2 sums[2];
#pragma unroll
  for (int g = 0; g < 2; g++) {
    if (g == 1 && !gated) break;
    const float* const from = p.sums[part + g] + at;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int s = 0; s < p.slices; s++) {
      const float2 v = __ldcg((const float2*)(from + s * p.apart));
      sum.x += v.x, sum.y += v.y;
    }
    if (p.b[part + g] != nullptr) sum.x += p.b[part + g][at % out], sum.y += p.b[part + g][at % out + 1];
    sums[g] = sum;
  }
  float2 y = sums[0];
  if (p.activation == RELU) y.x = y.x < 0.f ? 0.f : y.x, y.y = y.y < 0.f ? 0.f : y.y; // NaN of NaN
  if (gated) y.x = bySigmoidOf(p.activation & ~GATED, y.x) * sums[1].x, y.y = bySigmoidOf(p.activation & ~GATED, y.y) * sums[1].y;
  *(float2*)(p.y[part] + at) = make_float2(y.x + more.x, y.y + more.y);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA_SUMS24(j) WGMMA_SUMS16(j), WGMMA_SUMS8(j + 16)
#define WGMMA_NAMES24 WGMMA_NAMES16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define HOPPER_PRODUCT(TYPES, WHICH) WGMMA_SHARED("192", TYPES, WGMMA_NAMES24, WGMMA_SUMS24, "96", "97", "98", WHICH)
#define HOPPER_PRODUCTS(TYPES) \
  if constexpr (!A_ACROSS && !B_ACROSS) { \
    HOPPER_PRODUCT(TYPES, "0, 0"); \
  } else if constexpr (!A_ACROSS) { \
    HOPPER_PRODUCT(TYPES, "0, 1"); \
  } else { \
    static_assert(B_ACROSS, "there is no such product"); \
    HOPPER_PRODUCT(TYPES, "1, 1"); \
  }

// T is the Format of the operands. With GATES, half of a tile's rows of the weights are a gate's, and half are the other part's.
template <class T, bool A_ACROSS, bool B_ACROSS, bool GATES = false, bool SWAPPED = false> struct HopperGemm {
  using Math = typename T::Math;
  using Operand = typename Math::Operand;
  static constexpr int A = HOPPER_ROWS * 128, EIGHTS = HOPPER_COLUMNS / 8, HALVES = HOPPER_ROWS / 64;
  static constexpr int COLUMNS = (SWAPPED ? HOPPER_ROWS : HOPPER_COLUMNS) / (GATES ? 2 : 1); // of c, of a tile
  static constexpr u16 EACH = (1 << HOPPER_PAIR) - 1;                                        // thread blocks of a cluster
  static constexpr int SHARE = HOPPER_COLUMNS / HOPPER_PAIR;                                 // rows of b that a block copies
  static_assert(!GATES || !B_ACROSS, "each block brings rows of one part");
  static_assert(!SWAPPED || !A_ACROSS && !B_ACROSS, "layers alone are swapped");

  // d = a b + d.
  __device__ static __forceinline__ void product(float (&d)[EIGHTS][4], u64 a, u64 b) {
    const int more = 1;
    if constexpr (same<Operand, Float16>) {
      HOPPER_PRODUCTS("f16.f16")
    } else {
      static_assert(same<Operand, BFloat16>, "there is no such product");
      HOPPER_PRODUCTS("bf16.bf16")
    }
  }
  // Descriptors of the operands of a stage. What lies `bytes` behind has bytes/16 more.
  __device__ static __forceinline__ u64 left(u32 at) { return A_ACROSS ? columnOperand(at, 8192) : rowOperand(at); }
  __device__ static __forceinline__ u64 right(u32 at) { return B_ACROSS ? columnOperand(at, 8192) : rowOperand(at); }
  static constexpr int LEFT = (A_ACROSS ? 2048 : 32) / 16, RIGHT = (B_ACROSS ? 2048 : 32) / 16; // 16 of k

  // A slice of a tile: some steps.
  struct Work { int tile, slice, begin, end; };

  struct Walk {
    const HopperParams& p;
    int steps, cluster, clusters, below, tiles, all;
    __device__ __forceinline__ Walk(const HopperParams& p) : p(p) {
      constexpr int EACH = SWAPPED ? HOPPER_COLUMNS : HOPPER_ROWS * HOPPER_PAIR;
      steps = (p.of.in + GEMM_STEP - 1) / GEMM_STEP, cluster = blockIdx.x / HOPPER_PAIR, clusters = gridDim.x / HOPPER_PAIR;
      below = (p.of.rows + EACH - 1) / EACH;
      tiles = p.of.tiles[LINEAR_PARTS - 1] * below, all = tiles * p.slices;
    }
    // The cluster's work number i; without steps if there is none.
    __device__ __forceinline__ Work at(int i) const {
      const int work = cluster + i * clusters, slice = work / tiles;
      return work < all ? Work{work - slice * tiles, slice, steps * slice / p.slices, steps * (slice + 1) / p.slices} : Work{0, 0, 0, 0};
    }
  };

  struct Tile { int part, row, first; }; // the first rows of b and of a
  __device__ static __forceinline__ Tile tileAt(const GemmParams& p, int below, int i) {
    const int beside = p.tiles[LINEAR_PARTS - 1], group = i / (HOPPER_GROUP * beside) * HOPPER_GROUP, wide = min(HOPPER_GROUP, below - group);
    const int of = i - group * beside, tile = of / wide, part = GATES ? 0 : (tile >= p.tiles[0]) + (tile >= p.tiles[1]);
    const int column = tile - (part > 0 ? p.tiles[part - 1] : 0), row = group + of % wide, rank = blockIdx.x % HOPPER_PAIR;
    if (SWAPPED) return {part, row * HOPPER_COLUMNS, (column * HOPPER_PAIR + rank) * COLUMNS};
    return {part, column * COLUMNS, (row * HOPPER_PAIR + rank) * HOPPER_ROWS};
  }

  __device__ static __forceinline__ void run(const HopperParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 ring = sharedAddress(memory), full = ring + HOPPER_STAGES * HOPPER_STAGE, empty = full + HOPPER_STAGES * 8;
    if (threadIdx.x == 0) {
      for (int s = 0; s < HOPPER_STAGES; s++) barrierInit(full + s * 8, 1), barrierInit(empty + s * 8, 4 * HOPPER_PAIR);
      opened();
    }
    clusterSync();
    const Walk walk(p);
    if (warp >= GEMM_WARPS) {
      fewerRegisters<24>();
      if (warp == GEMM_WARPS && lane == 0) produce(p, walk, ring, full, empty);
      __syncwarp();
    } else {
      moreRegisters<240>();
      waitForEarlier();
      if (threadIdx.x == 0) letNextStart();
      consume(p, walk, ring, full, empty, warp, lane);
    }
    clusterSync(); // the other block may still copy to this one, or signal a barrier here
  }

  // The copies of a block to one stage of the ring.
  struct Stage {
    const HopperParams& p;
    const Tile& t;
    u32 a, bar;
    int k;
    __device__ __forceinline__ void copyA() const {
      if constexpr (SWAPPED && GATES) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) copyBox(a + h * 8192, &p.of.maps[h], k, t.first, 0, bar, readAgain());
      } else if constexpr (SWAPPED) {
        copyBox(a, &p.of.maps[t.part], k, t.first, 0, bar, readAgain());
      } else if constexpr (A_ACROSS) {
#pragma unroll
        for (int h = 0; h < HALVES; h++) copyBox(a + h * 8192, &p.of.x, t.first + h * 64, k, 0, bar, readAgain());
      } else {
        copyBox(a, &p.of.x, k, t.first, 0, bar, readAgain());
      }
    }
    __device__ __forceinline__ void copyB() const {
      constexpr int DEEP = GEMM_STEP / HOPPER_PAIR;
      const int rank = blockIdx.x % HOPPER_PAIR;
      const u32 b = a + A;
      if constexpr (SWAPPED) {
        copyBoxToEach(b + rank * (SHARE * 128), &p.of.x, k, t.row + rank * SHARE, 0, bar, readAgain(), EACH);
      } else if constexpr (B_ACROSS) {
#pragma unroll
        for (int g = 0; g < HOPPER_COLUMNS / 64; g++) copyBoxToEach(b + g * 8192 + rank * (DEEP * 128), &p.of.maps[t.part], t.row + g * 64, k + rank * DEEP, 0, bar, readAgain(), EACH);
      } else if constexpr (GATES) {
        copyBoxToEach(b + rank * (SHARE * 128), &p.of.maps[rank / (HOPPER_PAIR / 2)], k, t.row + rank % (HOPPER_PAIR / 2) * SHARE, 0, bar, readAgain(), EACH);
      } else {
        copyBoxToEach(b + rank * (SHARE * 128), &p.of.maps[t.part], k, t.row + rank * SHARE, 0, bar, readAgain(), EACH);
      }
    }
  };

  // One thread issues all copies of the block. The weights of the first stages may come before earlier launches end.
  __device__ static __forceinline__ void produce(const HopperParams& p, const Walk& walk, u32 ring, u32 full, u32 empty) {
    PipelineState at;
    int early = 0;
    if constexpr (SWAPPED) {
      const Work work = walk.at(0);
      const Tile t = tileAt(p.of, walk.below, work.tile);
      if (p.of.early) early = min(HOPPER_STAGES, work.end - work.begin);
      for (int s = 0; s < early; s++) {
        barrierExpect(full + s * 8, HOPPER_STAGE);
        Stage{p, t, ring + s * HOPPER_STAGE, full + s * 8, (work.begin + s) * GEMM_STEP}.copyA();
      }
    }
    waitForEarlier();
#pragma unroll 1
    for (int i = 0;; i++) {
      const Work work = walk.at(i);
      if (work.end == 0) break;
      const Tile t = tileAt(p.of, walk.below, work.tile);
#pragma unroll 1
      for (int s = work.begin; s < work.end; s++) {
        const Stage stage{p, t, ring + at.index * HOPPER_STAGE, full + at.index * 8, s * GEMM_STEP};
        if (!SWAPPED || early == 0) {
          barrierWait(empty + at.index * 8, at.parity ^ 1); // a stage that was never used counts as given back
          barrierExpect(stage.bar, HOPPER_STAGE);
          stage.copyA();
        } else {
          early--;
        }
        stage.copyB();
        at.next(HOPPER_STAGES);
      }
    }
  }

  // A warp group waits here until the other one has begun its last products: a warp group that is further ahead in the ring would mistake
  // the parity of an earlier round for that of its own.
  __device__ static __forceinline__ ThreadGroup turn(int group) { return {0, GEMM_WARPS, 3 + group}; }

  // A stage is given back when the products of the next one are on their way.
  __device__ static __forceinline__ void consume(const HopperParams& p, const Walk& walk, u32 ring, u32 full, u32 empty, int warp, int lane) {
    const int group = warp / 4;
    int index = 0;
    u32 parity = 0;
    float sums[HALVES][EIGHTS][4];
    const u32 given = remoteAddress(empty, min(lane, HOPPER_PAIR - 1));
    const bool gives = lane < HOPPER_PAIR;
#pragma unroll 1
    for (int i = 0;; i++) {
      const Work work = walk.at(i);
      if (work.end == 0) break;
      if (i % 2 != group) { // the tile is the other group's
        const int to = index + work.end - work.begin;
        index = to % HOPPER_STAGES, parity ^= to / HOPPER_STAGES & 1;
        continue;
      }
      if (i > 0) turn(group).sync();
      int before = -1;
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) sums[h][j][0] = sums[h][j][1] = sums[h][j][2] = sums[h][j][3] = 0.f;
#pragma unroll 1
      for (int s = work.begin; s < work.end; s++) {
        barrierWait(full + index * 8, parity);
        const u64 a = left(ring) + index * (HOPPER_STAGE / 16), b = right(ring + A) + index * (HOPPER_STAGE / 16);
        wgmmaFence();
#pragma unroll
        for (int k = 0; k < GEMM_STEP / 16; k++)
#pragma unroll
          for (int h = 0; h < HALVES; h++) product(sums[h], a + (h * (8192 / 16) + k * LEFT), b + k * RIGHT);
        wgmmaCommit();
        wgmmaWait<1>();
        if (before >= 0 && gives) barrierArriveRemote(given + before * 8);
        before = index;
        if (++index == HOPPER_STAGES) index = 0, parity ^= 1;
      }
      if (walk.at(i + 1).end > 0) turn(1 - group).arrive();
      wgmmaWait<0>();
#pragma unroll
      for (int h = 0; h < HALVES; h++) pinned(sums[h]);
      if (gives) barrierArriveRemote(given + before * 8);
      const Tile t = tileAt(p.of, walk.below, work.tile);
      if constexpr (SWAPPED) {
        finishSwapped(p, t, work.slice, warp % 4 * 16 + lane / 4, lane % 4 * 2, sums);
      } else {
        finish(p, t, work.slice, warp % 4 * 16 + lane / 4, lane % 4 * 2, sums);
      }
    }
  }

  // Stores a tile. A lane has two columns beside each other in each eight, of rows m, m+8 and so on.
  __device__ static __forceinline__ void finish(const HopperParams& of, const Tile& t, int slice, int m, int n, float (&sums)[HALVES][EIGHTS][4]) {
    constexpr int TOGETHER = 2, UP = EIGHTS / 2;
    const GemmParams& p = of.of;
    float* const to = p.y[t.part] + slice * of.apart;
    float* const to2 = GATES && of.slices > 1 ? p.y[1] + slice * of.apart : nullptr; // sums of the other part
    const int out = p.out[t.part];
    const float least = p.activation == RELU ? 0.f : -LEAN_INF;
    const float* const bias = p.b[t.part];
    const long long from = (long long)(t.first + m) * out + t.row + n;
    float down[HALVES][2];
    bool there[HALVES][2];
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        there[h][e] = t.first + m + h * 64 + e * 8 < p.rows;
        if constexpr (Math::narrow) down[h][e] = there[h][e] ? p.factors[t.first + m + h * 64 + e * 8] : 0.f;
      }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += TOGETHER) {
      float2 b[TOGETHER], up[TOGETHER], more[TOGETHER][HALVES][2];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const bool inside = t.row + n + (j + i) * 8 < out;
        b[i] = make_float2(0.f, 0.f);
        if (bias != nullptr && inside) b[i] = make_float2(bias[t.row + n + (j + i) * 8], bias[t.row + n + (j + i) * 8 + 1]);
        if constexpr (GATES) {
          const float* const other = p.b[1];
          up[i] = make_float2(0.f, 0.f);
          if (other != nullptr && inside) up[i] = make_float2(other[t.row + n + (j + i) * 8], other[t.row + n + (j + i) * 8 + 1]);
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            more[i][h][e] = make_float2(0.f, 0.f);
            if (p.residual != nullptr && inside && there[h][e]) more[i][h][e] = *(const float2*)(p.residual + from + (long long)(h * 64 + e * 8) * out + (j + i) * 8);
          }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        if (t.row + n + (j + i) * 8 >= out) continue;
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float x = sums[h][j + i][e * 2], y = sums[h][j + i][e * 2 + 1];
            if constexpr (Math::narrow) x *= down[h][e], y *= down[h][e];
            if constexpr (GATES) {
              float u = sums[h][j + i + UP][e * 2], v = sums[h][j + i + UP][e * 2 + 1];
              if constexpr (Math::narrow) u *= down[h][e], v *= down[h][e];
              if (to2 == nullptr) {
                x = gate(p, x + b[i].x) * (u + up[i].x) + more[i][h][e].x, y = gate(p, y + b[i].y) * (v + up[i].y) + more[i][h][e].y;
              } else if (there[h][e]) {
                *(float2*)(to2 + from + (long long)(h * 64 + e * 8) * out + (j + i) * 8) = make_float2(u, v);
              }
            } else {
              x = relu(x + b[i].x, least) + more[i][h][e].x, y = relu(y + b[i].y, least) + more[i][h][e].y;
            }
            if (there[h][e]) *(float2*)(to + from + (long long)(h * 64 + e * 8) * out + (j + i) * 8) = make_float2(x, y);
          }
      }
    }
  }
  // Stores a tile of SWAPPED. Of each eight rows of x, a lane has rows n and n+1, of output features m, m+8 and so on.
  __device__ static __forceinline__ void finishSwapped(const HopperParams& of, const Tile& t, int slice, int m, int n, float (&sums)[HALVES][EIGHTS][4]) {
    constexpr int EACH = GATES ? 1 : HALVES;
    const GemmParams& p = of.of;
    float* const to2 = GATES && of.slices > 1 ? p.y[1] + slice * of.apart : nullptr; // sums of the other part
    const int out = p.out[t.part];
    const float least = p.activation == RELU ? 0.f : -LEAN_INF;
    float b[EACH][2], up[2];
    bool there[EACH][2];
#pragma unroll
    for (int h = 0; h < EACH; h++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int feature = t.first + m + h * 64 + e * 8;
        there[h][e] = feature < out;
        b[h][e] = p.b[t.part] != nullptr && there[h][e] ? p.b[t.part][feature] : 0.f;
        if constexpr (GATES) up[e] = p.b[1] != nullptr && there[h][e] ? p.b[1][feature] : 0.f;
      }
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
      float more[2][EACH][2], down[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int row = t.row + n + j * 8 + c;
        const bool inside = row < p.rows;
        if constexpr (Math::narrow) down[c] = inside ? p.factors[row] : 0.f;
#pragma unroll
        for (int h = 0; h < EACH; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) more[c][h][e] = p.residual != nullptr && inside && there[h][e] ? p.residual[(long long)row * out + t.first + m + h * 64 + e * 8] : 0.f;
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int row = t.row + n + j * 8 + c;
        if (row >= p.rows) continue;
        const long long from = (long long)row * out + t.first + m;
        float* const y = p.y[t.part] + slice * of.apart + from;
#pragma unroll
        for (int h = 0; h < EACH; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float x = sums[h][j][e * 2 + c];
            if constexpr (Math::narrow) x *= down[c];
            if constexpr (GATES) {
              float u = sums[1][j][e * 2 + c];
              if constexpr (Math::narrow) u *= down[c];
              if (to2 == nullptr) {
                x = gate(p, x + b[h][e]) * (u + up[e]);
              } else if (there[h][e]) {
                to2[from + e * 8] = u;
              }
            } else {
              x = relu(x + b[h][e], least);
            }
            if (there[h][e]) y[h * 64 + e * 8] = x + more[c][h][e];
          }
      }
    }
  }
  __device__ static __forceinline__ float gate(const GemmParams& p, float v) { return bySigmoidOf(p.activation & ~GATED, v); }
  __device__ static __forceinline__ float relu(float x, float least) { return x < least ? least : x; } // NaN of NaN
};
#endif
