// Products of 16-bit operands with hundreds of rows and more, on compute capability 9.0: c = f(a b^T + bias) + plus, with sums of float32.
//
// a has M rows and b N rows of K elements. In memory an operand is row-major, or its transpose is (ACROSS): tensor cores read both from
// shared memory, so gradients need no transposes. A tile is 128 rows of a by 192 of b. Two thread blocks are a cluster, which walks pairs
// of tiles with the same rows of b: each block copies half of the rows for both.
//
// A producer warp copies steps of 64 elements of k to a ring. Each of two consumer warp groups has tiles of its own, every second one: while
// one multiplies, the other one stores its sums.
//
// If tiles do not fill the GPU, k is cut into slices. All tiles have a slice before the next slice begins, so thread blocks that run at
// a time read the same part of k. The thread block of the last slice adds the sums of the others in their order. Bits are the same in
// each run.
#pragma once
#include "gemm_tiled.cuh"

constexpr int HOPPER_THREADS = 384;
constexpr int HOPPER_ROWS = 128, HOPPER_COLUMNS = 192; // of a tile: rows of a and of b
constexpr int HOPPER_PAIR = 2;                         // thread blocks of a cluster
constexpr int HOPPER_GROUP = 8;                        // pairs of tiles with consecutive rows of a, for which clusters walk all rows of b
constexpr int HOPPER_STAGE = (HOPPER_ROWS + HOPPER_COLUMNS) * 128, HOPPER_STAGES = 5;
constexpr int HOPPER_PARTIAL = HOPPER_ROWS * HOPPER_COLUMNS; // floats

struct HopperParams {
  GemmParams of;   // a is x, and b are the weights; keep, split, beside, stages and early are not read
  float* partials; // HOPPER_PARTIAL for each slice of a tile but the last one, and each thread block of a cluster
  u32* flags;      // one for each partial tile, 0 at first
  int slices;      // of k
};

constexpr int HOPPER_EACH = 4; // runs of eight elements of a thread of hopperRound
constexpr int HOPPER_LISTS = 4;
static_assert(HOPPER_LISTS == LINEAR_PARTS + 1, "x and all weights");

struct HopperRoundParams {
  const float* x[HOPPER_LISTS];
  void* y[HOPPER_LISTS];
  long long ends[HOPPER_LISTS]; // in runs of eight elements, up to the end of each list
  u32* flags; // may be null
  int flagged;
};

// y = x, rounded to nearest, and flags = 0.
template <class S> __device__ __forceinline__ void hopperRound(const HopperRoundParams& p) {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < p.flagged; i += 256) p.flags[i] = 0;
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

// T is the Format of the operands. With GATES half of a tile's rows of b are a gate's, and half are of what the gate is for.
template <class T, bool A_ACROSS, bool B_ACROSS, bool GATES = false> struct HopperGemm {
  using Math = typename T::Math;
  using Operand = typename Math::Operand;
  static constexpr int A = HOPPER_ROWS * 128, EIGHTS = HOPPER_COLUMNS / 8, HALVES = HOPPER_ROWS / 64;
  static constexpr u16 EACH = (1 << HOPPER_PAIR) - 1; // thread blocks of a cluster
  static constexpr int COLUMNS = GATES ? HOPPER_COLUMNS / 2 : HOPPER_COLUMNS; // of c, of a tile
  static_assert(!GATES || !B_ACROSS, "each block brings rows of one part");

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
      steps = (p.of.in + GEMM_STEP - 1) / GEMM_STEP, cluster = blockIdx.x / HOPPER_PAIR, clusters = gridDim.x / HOPPER_PAIR;
      below = (p.of.rows + HOPPER_ROWS * HOPPER_PAIR - 1) / (HOPPER_ROWS * HOPPER_PAIR);
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
    return {part, (tile - (part > 0 ? p.tiles[part - 1] : 0)) * COLUMNS, ((group + of % wide) * HOPPER_PAIR + (int)blockIdx.x % HOPPER_PAIR) * HOPPER_ROWS};
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

  // One thread issues all copies of the block.
  __device__ static __forceinline__ void produce(const HopperParams& p, const Walk& walk, u32 ring, u32 full, u32 empty) {
    constexpr int SHARE = HOPPER_COLUMNS / HOPPER_PAIR, DEEP = GEMM_STEP / HOPPER_PAIR;
    const int rank = blockIdx.x % HOPPER_PAIR;
    PipelineState at;
    waitForEarlier();
#pragma unroll 1
    for (int i = 0;; i++) {
      const Work work = walk.at(i);
      if (work.end == 0) break;
      const Tile t = tileAt(p.of, walk.below, work.tile);
#pragma unroll 1
      for (int s = work.begin; s < work.end; s++) {
        barrierWait(empty + at.index * 8, at.parity ^ 1); // a stage that was never used counts as given back
        const u32 a = ring + at.index * HOPPER_STAGE, b = a + A, bar = full + at.index * 8;
        const int k = s * GEMM_STEP;
        barrierExpect(bar, HOPPER_STAGE);
        if (A_ACROSS) {
#pragma unroll
          for (int h = 0; h < HALVES; h++) copyBox(a + h * 8192, &p.of.x, t.first + h * 64, k, 0, bar, readAgain());
        } else {
          copyBox(a, &p.of.x, k, t.first, 0, bar, readAgain());
        }
        if (B_ACROSS) {
#pragma unroll
          for (int g = 0; g < HOPPER_COLUMNS / 64; g++) copyBoxToEach(b + g * 8192 + rank * (DEEP * 128), &p.of.maps[t.part], t.row + g * 64, k + rank * DEEP, 0, bar, readAgain(), EACH);
        } else if (GATES) {
          copyBoxToEach(b + rank * (SHARE * 128), &p.of.maps[rank / (HOPPER_PAIR / 2)], k, t.row + rank % (HOPPER_PAIR / 2) * SHARE, 0, bar, readAgain(), EACH);
        } else {
          copyBoxToEach(b + rank * (SHARE * 128), &p.of.maps[t.part], k, t.row + rank * SHARE, 0, bar, readAgain(), EACH);
        }
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
      if (work.slice < p.slices - 1) {
        put(p, work, sums, group);
        continue;
      }
      if (p.slices > 1) add(p, work, sums);
      const Tile t = tileAt(p.of, walk.below, work.tile);
      finish(p.of, t, warp % 4 * 16 + lane / 4, lane % 4 * 2, sums);
    }
  }

  // Where this thread block has the sums of a slice.
  __device__ static __forceinline__ int slot(const HopperParams& p, int tile, int slice) { return (tile * (p.slices - 1) + slice) * HOPPER_PAIR + blockIdx.x % HOPPER_PAIR; }
  __device__ static __forceinline__ float4* partial(const HopperParams& p, int slot) { return (float4*)(p.partials + (long long)slot * HOPPER_PARTIAL) + threadIdx.x % 128; }

  // Hands the sums to the thread block that has the last slice.
  __device__ static __forceinline__ void put(const HopperParams& p, const Work& work, float (&sums)[HALVES][EIGHTS][4], int group) {
    const int at = slot(p, work.tile, work.slice);
    float4* const to = partial(p, at);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int j = 0; j < EIGHTS; j++) to[(h * EIGHTS + j) * 128] = make_float4(sums[h][j][0], sums[h][j][1], sums[h][j][2], sums[h][j][3]);
    __threadfence();
    ThreadGroup{0, 4, 1 + group}.sync();
    if (threadIdx.x % 128 == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.flags + at), "r"(1) : "memory");
  }

  // Adds the sums of the other slices, which thread blocks have begun before.
  __device__ static __forceinline__ void add(const HopperParams& p, const Work& work, float (&sums)[HALVES][EIGHTS][4]) {
#pragma unroll 1
    for (int slice = 0; slice < work.slice; slice++) {
      const int at = slot(p, work.tile, slice);
      u32 there;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(p.flags + at) : "memory");
      while (there == 0);
      const float4* const from = partial(p, at);
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
          const float4 v = __ldcg(from + (h * EIGHTS + j) * 128);
          sums[h][j][0] += v.x, sums[h][j][1] += v.y, sums[h][j][2] += v.z, sums[h][j][3] += v.w;
        }
    }
  }

  // Stores a tile. A lane has two columns beside each other in each eight, of rows m, m+8 and so on.
  __device__ static __forceinline__ void finish(const GemmParams& p, const Tile& t, int m, int n, float (&sums)[HALVES][EIGHTS][4]) {
    constexpr int TOGETHER = 2, UP = EIGHTS / 2;
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
              x = gate(p, x + b[i].x) * (u + up[i].x) + more[i][h][e].x, y = gate(p, y + b[i].y) * (v + up[i].y) + more[i][h][e].y;
            } else {
              x = relu(x + b[i].x, least) + more[i][h][e].x, y = relu(y + b[i].y, least) + more[i][h][e].y;
            }
            if (there[h][e]) *(float2*)(p.y[t.part] + from + (long long)(h * 64 + e * 8) * out + (j + i) * 8) = make_float2(x, y);
          }
      }
    }
  }
  // SILU or GELU_TANH.
  __device__ static __forceinline__ float gate(const GemmParams& p, float v) {
    return bySigmoid(v, (p.activation & ~GATED) == SILU ? v : v * (1.59576912f + 0.0713548163f * v * v));
  }
  __device__ static __forceinline__ float relu(float x, float least) { return x < least ? least : x; } // NaN of NaN
};
#endif
