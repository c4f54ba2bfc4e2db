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
// order of the blocks: bits do not vary from run to run. Of a gated unit half of a tile's rows of W
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

struct GemmParams {
  TensorMap maps[LINEAR_PARTS]; // of the weights; several layers of one x
  TensorMap x;                  // both parts of the operands
  const float* factors;
  const float* b[LINEAR_PARTS]; // may be null
  float* y[LINEAR_PARTS];       // rows x out
  const float* residual;        // rows x out of part 0; may be null
  int out[LINEAR_PARTS];
  int tiles[LINEAR_PARTS]; // up to the end of each part
  int rows, in;
  int split;  // thread blocks of a cluster
  int stages; // of the ring
  int activation;
  int early; // the weights may be read before the launch before this one has ended
};

#if __CUDA_ARCH__ >= 900
// A row of operands, a thread block each.
template <class Math> __device__ __forceinline__ void operands(const OperandParams& p) {
  __shared__ float scratch[8];
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const float* x = p.x + (long long)blockIdx.x * p.n;
  const auto each = [&](auto f) {
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < p.n; i += 1024) f(i, *(const float4*)(x + i));
  };
  const auto plus = [](float a, float b) { return a + b; };
  float mean = 0.f, f = 1.f;
  if (p.norm) {
    float sum = 0.f;
    if (p.norm == LAYER_NORM) {
      each([&](int, float4 v) { sum += (v.x + v.y) + (v.z + v.w); });
      mean = foldBlock(sum, scratch, plus) / p.n;
      sum = 0.f;
    }
    each([&](int, float4 v) { sum += ((v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean)) + ((v.z - mean) * (v.z - mean) + (v.w - mean) * (v.w - mean)); });
    f = 1.f / sqrtf(foldBlock(sum, scratch, plus) / p.n + p.eps);
  }
  const auto normed = [&](int i, float4 v) {
    if (!p.norm) return v;
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
  float up = 1.f, down = 1.f;
  if constexpr (Math::narrow) {
    float top = 0.f;
    each([&](int i, float4 v) {
      v = normed(i, v);
      top = fmaxf(top, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    });
    const int e = exponentOf(foldBlock(top, scratch, [](float a, float b) { return fmaxf(a, b); }));
    up = powerOf(-e), down = powerOf(e);
  }
  if (threadIdx.x == 0) p.factors[blockIdx.x] = down;
  u32* const lead = p.lead + (long long)blockIdx.x * (p.n / 2);
  u32* const rest = lead + (long long)p.rows * (p.n / 2);
  each([&](int i, float4 v) {
    v = normed(i, v);
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
// The same with GATES: of a gated unit `up` is the sums of what the gate is for.
__device__ __forceinline__ void finishAny4(const GemmParams& p, int part, int m, int n, float (&v)[4], const float (&up)[4]) {
  const float down = p.factors[m];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    if (n + e >= p.out[part]) break;
    v[e] *= down;
    if (p.b[part] != nullptr) v[e] += p.b[part][n + e];
    v[e] = activatedAny(p.activation & ~GATED, v[e]);
    if (p.activation & GATED) v[e] *= up[e] * down + (p.b[1] != nullptr ? p.b[1][n + e] : 0.f);
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
    const int split = p.split, rank = blockIdx.x % split, below = (p.rows + ROWS - 1) / ROWS;
    // Blocks that run at the same time have the same rows of W, as far as there are several.
    const int tile = blockIdx.x / split / below, first = blockIdx.x / split % below * ROWS; // of x
    const int part = gated(p) ? 0 : (tile >= p.tiles[0]) + (tile >= p.tiles[1]), row = gated(p) ? tile * HALF : (tile - (part > 0 ? p.tiles[part - 1] : 0)) * GEMM_TILE;
    const int steps = (p.in + GEMM_STEP - 1) / GEMM_STEP, s0 = rank * steps / split, s1 = (rank + 1) * steps / split;
    u64* bars = (u64*)(memory + p.stages * STAGE); // a full and an empty one for each stage
    const u32 ring = sharedAddress(memory), full = sharedAddress(bars), empty = full + p.stages * 8;
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(full + s * 8, 1), barrierInit(empty + s * 8, GEMM_WARPS);
      opened();
    }
    __syncthreads();
    float sums[A][B][4];
    if (warp == GEMM_WARPS) {
      if (lane == 0) produce(p, part, row, first, s0, s1, ring, full, empty);
      __syncwarp();
    } else {
      waitForEarlier();
      if (threadIdx.x == 0) letNextStart();
#pragma unroll
      for (int i = 0; i < A * B; i++) sums[i / B][i % B][0] = sums[i / B][i % B][1] = sums[i / B][i % B][2] = sums[i / B][i % B][3] = 0.f;
      if constexpr (GROUPS) {
        consumeGroups(p.stages, s1 - s0, ring, full, empty, sums[0], warp, lane);
      } else {
        consume(p.stages, s1 - s0, ring, full, empty, sums, warp, lane);
      }
      syncWarps(GEMM_WARPS); // the ring is used up
      float* const mine = (float*)memory;
      const int n = warp % BESIDE * (A * 16) + (lane >> 2), m = warp / BESIDE * (B * 8) + (lane & 3) * 2;
#pragma unroll
      for (int i = 0; i < A; i++)
#pragma unroll
        for (int j = 0; j < B; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) mine[(m + j * 8 + (e & 1)) * GEMM_WIDTH + n + i * 16 + (e >> 1) * 8] = sums[i][j][e];
    }
    split > 1 ? clusterSync() : __syncthreads();
    if (warp < GEMM_WARPS) runEpilogue(p, (const float*)memory, part, row, first, rank);
    if (split > 1) clusterSync(); // others may still read this block's memory
  }

  // One thread asks for all that the block reads.
  __device__ static __forceinline__ void produce(const GemmParams& p, int part, int row, int first, int s0, int s1, u32 ring, u32 full, u32 empty) {
    // Weights are read once where one tile has all rows.
    const u64 policy = p.rows <= ROWS ? readOnce() : readAgain();
    const TensorMap* const map = &p.maps[part];
    const auto weights = [&](int s, int at) {
      barrierExpect(full + at * 8, STAGE);
      copyBox(ring + at * STAGE, map, s * GEMM_STEP, row, 0, full + at * 8, policy);
      if (gated(p)) copyBox(ring + at * STAGE + HALF * 128, &p.maps[1], s * GEMM_STEP, row, 0, full + at * 8, policy);
    };
    const auto x = [&](int s, int at) { copyBox(ring + at * STAGE + GEMM_TILE * 128, &p.x, s * GEMM_STEP, first, 0, full + at * 8, readAgain()); };
    const int ahead = min(p.stages, s1 - s0);
    if (p.early)
      for (int i = 0; i < ahead; i++) weights(s0 + i, i);
    waitForEarlier();
    for (int i = 0; i < ahead; i++) {
      if (!p.early) weights(s0 + i, i);
      x(s0 + i, i);
    }
    int at = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int s = s0 + ahead; s < s1; s++) {
      barrierWait(empty + at * 8, parity);
      weights(s, at), x(s, at);
      if (++at == p.stages) at = 0, parity ^= 1;
    }
  }

  // By warp groups: a stage is given back when the products of the next one are on
  // their way.
  __device__ static __forceinline__ void consumeGroups(int stages, int steps, u32 ring, u32 full, u32 empty, float (&sums)[B][4], int warp, int lane) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
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
      if (before >= 0 && lane == 0) barrierArrive(empty + before * 8);
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

  // Four sums beside each other, of all blocks of a cluster.
  __device__ static __forceinline__ void sumOf(float (&v)[4], const float* at, int split) {
    if (split == 1) {
      const float4 s = *(const float4*)at;
      v[0] = s.x, v[1] = s.y, v[2] = s.z, v[3] = s.w;
    } else {
      float4 s[8];
#pragma unroll
      for (int r = 0; r < 8; r++) s[r] = r < split ? remote4(at, r) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int r = 0; r < 8; r++) v[0] += s[r].x, v[1] += s[r].y, v[2] += s[r].z, v[3] += s[r].w;
    }
  }

  // The sums of a cluster's blocks, of which each finishes every split-th four.
  __device__ static __forceinline__ void runEpilogue(const GemmParams& p, const float* sums, int part, int row, int first, int rank) {
    const int out = p.out[part], split = p.split, wide = gated(p) ? HALF : GEMM_TILE;
    for (int i = threadIdx.x * split + rank; i < ROWS * (wide / 4); i += GEMM_WARPS * 32 * split) {
      const int m = i / (wide / 4), c = i % (wide / 4) * 4, n = row + c;
      if (first + m >= p.rows || n >= out) continue;
      const float* const at = sums + m * GEMM_WIDTH + c;
      float v[4] = {};
      sumOf(v, at, split);
      if constexpr (GATES) {
        float up[4] = {};
        if (gated(p)) sumOf(up, at + HALF, split);
        finishAny4(p, part, first + m, n, v, up);
      } else {
        finish4(p, part, first + m, n, v);
      }
      store4(p, part, first + m, n, v, p.residual);
    }
  }
};
#endif
