// Linear layers of many rows on GPUs of compute capability 9.0, as prompts have them:
//
//	y = f(x W^T + b) + residual,   f(v) = v, max(v, 0) or gelu(v)
//
// or with GATES as gemm_gemv.cuh has it.
//
// The operands launch of gemm_tiled.cuh comes first. It gives each element of x in one part
// (x rounded to the weights' type) or in two (which add up to it): of two, each step
// multiplies both with the same tile of the weights. As many thread blocks as there are
// multiprocessors walk the tiles of y, 128 rows of x by 128 or 256 of W. Two blocks may be a
// cluster, which walks pairs of tiles with the same rows of W: each brings half of these
// for both. A producer warp
// brings steps of 64 columns through a ring, and goes on with the next tile while the
// consumers, two warp groups of 64 rows of x each, finish this one. Tiles are numbered so
// that those under way at a time share rows of x and of W: both come from the L2 cache.
//
// A consumer warp's sums go through shared memory of its own, so that it reads and writes
// rows of 64 floats. No sum is split: bits do not vary from run to run. Of a gated unit half of
// a tile's rows of W are the gate's, and a lane has the sums of what these are for besides.
#pragma once
#include "gemm_tiled.cuh"

constexpr int PERSISTENT_THREADS = (GEMM_WARPS + 4) * 32;                        // the producer is one of four warps, which give their registers to the others
constexpr int PERSISTENT_ROWS = 128;                                    // of x, of a tile
constexpr int PERSISTENT_GROUP = 16;                                    // tiles of x's rows that tiles of W are walked with
constexpr int PERSISTENT_RING = 192 << 10;                              // bytes
constexpr int PERSISTENT_CHUNK = 64;                                    // columns of y that a warp finishes at a time
constexpr int PERSISTENT_STAGING = 16 * PERSISTENT_CHUNK * 4;           // bytes, for each consumer warp
constexpr int PERSISTENT_BARS = PERSISTENT_RING + GEMM_WARPS * PERSISTENT_STAGING; // where barriers are

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// T is the Format of the weights, PARTS those of x's elements; a tile has COLUMNS rows of W.
template <class T, int PARTS, int COLUMNS, bool GATES = false> struct PersistentGemm {
  using Math = typename T::Math;
  static_assert(T::ready && Math::Operand::bytes == 2, "weights are operands as they are");
  static constexpr int X = PERSISTENT_ROWS * 128; // bytes of a part of x in a stage
  static constexpr int STAGE = PARTS * X + COLUMNS * 128;
  static constexpr int STAGES = PERSISTENT_RING / STAGE;
  static constexpr int N = COLUMNS / 8;

  static constexpr int HALF = COLUMNS / 2;
  __device__ static __forceinline__ bool gated(const GemmParams& p) { return GATES && (p.activation & GATED); }
  __device__ static __forceinline__ int tilesOf(const GemmParams& p) { return p.tiles[gated(p) ? 0 : LINEAR_PARTS - 1]; }

  struct Tile { int part, row, first; }; // the first rows of W and of x
  // How many a cluster's blocks walk together, of which each has the one of its rank.
  __device__ static __forceinline__ int below(const GemmParams& p) { return (p.rows + PERSISTENT_ROWS * p.split - 1) / (PERSISTENT_ROWS * p.split); }
  __device__ static __forceinline__ Tile tileAt(const GemmParams& p, int i) {
    const int beside = tilesOf(p), most = PERSISTENT_GROUP / p.split;
    const int group = i / (most * beside) * most, wide = min(most, below(p) - group);
    const int of = i - group * beside, tile = of / wide;
    const int part = gated(p) ? 0 : (tile >= p.tiles[0]) + (tile >= p.tiles[1]);
    return {part, (tile - (part > 0 ? p.tiles[part - 1] : 0)) * (gated(p) ? HALF : COLUMNS), ((group + of % wide) * p.split + (int)blockIdx.x % p.split) * PERSISTENT_ROWS};
  }

  __device__ static __forceinline__ void run(const GemmParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int tiles = tilesOf(p) * below(p), steps = (p.in + GEMM_STEP - 1) / GEMM_STEP;
    const u32 ring = sharedAddress(memory), full = ring + PERSISTENT_BARS, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; s++) barrierInit(full + s * 8, 1), barrierInit(empty + s * 8, GEMM_WARPS * p.split);
      opened();
    }
    p.split > 1 ? clusterSync() : __syncthreads();
    if (warp >= GEMM_WARPS) {
      fewerRegisters<40>();
      if (warp == GEMM_WARPS && lane == 0) produce(p, tiles, steps, ring, full, empty);
      __syncwarp();
    } else {
      moreRegisters<232>();
      waitForEarlier();
      if (threadIdx.x == 0) letNextStart();
      consume(p, tiles, steps, (float*)(memory + PERSISTENT_RING + warp * PERSISTENT_STAGING), ring, full, empty, warp, lane);
    }
    if (p.split > 1) clusterSync(); // the other block may still bring something, or give it back
  }

  // One thread asks for all that the block reads.
  __device__ static __forceinline__ void produce(const GemmParams& p, int tiles, int steps, u32 ring, u32 full, u32 empty) {
    const int cluster = blockIdx.x / p.split, clusters = gridDim.x / p.split, rank = blockIdx.x % p.split;
    Tile t = tileAt(p, cluster);
    const auto weights = [&](int s, int at) {
      const u32 w = ring + at * STAGE + PARTS * X;
      barrierExpect(full + at * 8, STAGE);
      if (gated(p) && p.split > 1) {
        copyBoxToEach(w + rank * (HALF * 128), &p.maps[rank], s * GEMM_STEP, t.row, 0, full + at * 8, readAgain(), 3);
      } else if (p.split == 1) {
        copyBox(w, &p.maps[t.part], s * GEMM_STEP, t.row, 0, full + at * 8, readAgain());
        if (gated(p)) copyBox(w + HALF * 128, &p.maps[1], s * GEMM_STEP, t.row, 0, full + at * 8, readAgain());
      } else {
        copyBoxToEach(w + rank * (HALF * 128), &p.maps[t.part], s * GEMM_STEP, t.row + rank * HALF, 0, full + at * 8, readAgain(), 3);
      }
    };
    const auto x = [&](int s, int at) { copyBox(ring + at * STAGE, &p.x, s * GEMM_STEP, t.first, 0, full + at * 8, readAgain()); };
    const int ahead = min(STAGES, steps); // of the first tile
    if (p.early)
      for (int s = 0; s < ahead; s++) weights(s, s);
    waitForEarlier();
    for (int s = 0; s < ahead; s++) {
      if (!p.early) weights(s, s);
      x(s, s);
    }
    PipelineState at;
    for (int s = 0; s < ahead; s++) at.next(STAGES);
    int s = ahead;
#pragma unroll 1
    for (int i = cluster; i < tiles; i += clusters, s = 0) {
      if (i != cluster) t = tileAt(p, i);
#pragma unroll 1
      for (; s < steps; s++) {
        barrierWait(empty + at.index * 8, at.parity ^ 1); // a stage that was never used counts as given back
        weights(s, at.index), x(s, at.index);
        at.next(STAGES);
      }
    }
  }

  // A stage is given back when the products of the next one are on their way.
  __device__ static __forceinline__ void consume(const GemmParams& p, int tiles, int steps, float* staging, u32 ring, u32 full, u32 empty, int warp, int lane) {
    PipelineState at;
    float sums[N][4];
    const u32 given = remoteAddress(empty, min(lane, p.split - 1)); // to each block that brings something here
    const bool gives = lane < p.split;
#pragma unroll 1
    for (int i = blockIdx.x / p.split; i < tiles; i += gridDim.x / p.split) {
      int before = -1;
#pragma unroll
      for (int j = 0; j < N; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.f;
#pragma unroll 1
      for (int s = 0; s < steps; s++) {
        barrierWait(full + at.index * 8, at.parity);
        const u32 x = ring + at.index * STAGE + warp / 4 * (64 * 128), w = ring + at.index * STAGE + PARTS * X;
        wgmmaFence();
#pragma unroll
        for (int k = 0; k < GEMM_STEP / 16; k++)
#pragma unroll
          for (int q = 0; q < PARTS; q++) Wgmma<COLUMNS>::template shared<Math>(sums, rowOperand(x + q * X + k * 32), rowOperand(w + k * 32), 1);
        wgmmaCommit();
        wgmmaWait<1>();
        if (before >= 0 && gives) barrierArriveRemote(given + before * 8);
        before = at.index;
        at.next(STAGES);
      }
      wgmmaWait<0>();
      pinned(sums);
      if (gives) barrierArriveRemote(given + before * 8);
      const Tile t = tileAt(p, i);
      if constexpr (GATES) gate(p, t, t.first + warp * 16, sums, lane);
      finish(p, t, t.first + warp * 16, staging, sums, lane);
    }
  }

  // With GATES all but the residual is done where the sums are: a lane has two columns in eight of
  // two rows, and the same ones of a gate and of what it is for.
  __device__ static __forceinline__ void gate(const GemmParams& p, const Tile& t, int first, float (&sums)[N][4], int lane) {
    const int out = p.out[t.part], f = p.activation & ~GATED, m = first + lane / 4;
    const bool two = gated(p);
    const float down[2] = {m < p.rows ? p.factors[m] : 0.f, m + 8 < p.rows ? p.factors[m + 8] : 0.f};
    const auto bias = [&](int part, int n) { return p.b[part] != nullptr && n < out ? p.b[part][n] : 0.f; };
#pragma unroll
    for (int j = 0; j < N; j++) {
      if (j >= N / 2 && two) break;
      const int n = t.row + j * 8 + lane % 4 * 2;
      const float b[2] = {bias(t.part, n), bias(t.part, n + 1)};
#pragma unroll
      for (int e = 0; e < 4; e++) sums[j][e] = activatedAny(f, sums[j][e] * down[e / 2] + b[e % 2]);
      if (two && j < N / 2) {
        const float up[2] = {bias(1, n), bias(1, n + 1)};
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] *= sums[(j + N / 2) % N][e] * down[e / 2] + up[e % 2];
      }
    }
  }

  // The 16 rows of a warp, some columns at a time: the sums of a lane are of two columns in
  // eight, and what it finishes are four beside each other, of every second row. What it
  // needs from memory it asks for before the sums change hands.
  __device__ static __forceinline__ void finish(const GemmParams& p, const Tile& t, int first, float* staging, float (&sums)[N][4], int lane) {
    constexpr int EIGHTS = PERSISTENT_CHUNK / 8, EACH = 16 / 2; // rows of a lane
    const int out = p.out[t.part], r = lane >> 2, h = lane / 16;
    // Four columns are stored at once, and by code that is there for all rows, but where a
    // row may begin anywhere, or an activation is long.
    const bool even = out % 4 == 0, plain = GATES ? even : even && p.activation != GELU;
    const int rows = max(min(p.rows - first - h + 1, 16), 0) / 2; // of these, those that there are
    const float* const residual = even ? p.residual : nullptr;
    const float factor = !GATES && plain && first + lane % 16 < p.rows ? p.factors[first + lane % 16] : 1.f; // of a row; lanes pass them on
#pragma unroll
    for (int c = 0; c < N / EIGHTS; c++) {
      if (gated(p) && c >= N / EIGHTS / 2) break;
      const int n = t.row + c * PERSISTENT_CHUNK + lane % 16 * 4, there = n < out ? rows : 0;
      const auto mine = [&](int i) { return (float4*)(staging + (2 * i + h) * PERSISTENT_CHUNK + ((lane % 16 / 2) ^ ((2 * i + h) & 7)) * 8 + lane % 2 * 4); };
      const auto place = [&](int i) { return (long long)(first + 2 * i + h) * out + n; };
      float b[4] = {0.f, 0.f, 0.f, 0.f};
      if (!GATES && plain && n < out && p.b[t.part] != nullptr)
#pragma unroll
        for (int e = 0; e < 4; e++) b[e] = p.b[t.part][n + e];
      float4 more[EACH];
      const auto ask = [&] {
#pragma unroll
        for (int i = 0; i < EACH; i++) more[i] = residual != nullptr && i < there ? *(const float4*)(residual + place(i)) : make_float4(0.f, 0.f, 0.f, 0.f);
      };
      if (c > 0) ask();
      __syncwarp(); // the columns before these are read
#pragma unroll
      for (int j = 0; j < EIGHTS; j++)
#pragma unroll
        for (int b = 0; b < 2; b++)
          *(float2*)(staging + (r + b * 8) * PERSISTENT_CHUNK + (j ^ r) * 8 + lane % 4 * 2) = make_float2(sums[c * EIGHTS + j][b * 2], sums[c * EIGHTS + j][b * 2 + 1]);
      if (c == 0) ask(); // there are no registers for it before
      __syncwarp();
      if (!plain)
#pragma unroll 1
        for (int i = 0; i < there; i++) {
          const float4 s = *mine(i);
          float v[4] = {s.x, s.y, s.z, s.w};
          if constexpr (!GATES) finish4(p, t.part, first + 2 * i + h, n, v);
          even ? (void)(*mine(i) = make_float4(v[0], v[1], v[2], v[3])) : store4(p, t.part, first + 2 * i + h, n, v, p.residual);
        }
      if (!even) continue;
      const auto last = [&](float s, float down, float b, float more) {
        if constexpr (GATES) return s + more;
        s = s * down + b;
        return (plain ? activated(p.activation == RELU ? RELU : NO_ACTIVATION, s) : s) + more;
      };
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const float4 s = *mine(i), m = more[i];
        const float down = __shfl_sync(~0u, factor, 2 * i + h);
        if (i < there) *(float4*)(p.y[t.part] + place(i)) = make_float4(last(s.x, down, b[0], m.x), last(s.y, down, b[1], m.y), last(s.z, down, b[2], m.z), last(s.w, down, b[3], m.w));
      }
    }
  }
};
#endif
