// Linear layers of a batch whose weights have 8 or 4 bits, by warp groups (9.0). Producer warps fill the ring. Four warp groups decode
// weights to left operands in registers, and multiply them by x in shared memory. Blocks divide the units as those of NarrowGemm do.
#pragma once
#include "gemm_narrow.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int NARROW_GROUP_WARPS = NARROW_STRIPS; // that multiply; four more load
constexpr int NARROW_GROUP_THREADS = (NARROW_GROUP_WARPS + 4) * 32;

// d += a b: a is 64 x 16, in registers, and b N x 16, in shared memory; without MORE d begins with 0.
template <int MORE> __device__ __forceinline__ void multiplyRows(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" WGMMA_NAMES4 "}, {%16, %17, %18, %19}, %20, %21, 1, 1, 0;" : WGMMA_SUMS4(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MORE));
}
template <int MORE> __device__ __forceinline__ void multiplyRows(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_NAMES8 "}, {%32, %33, %34, %35}, %36, %37, 1, 1, 0;" : WGMMA_SUMS8(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MORE));
}

// N columns of operands.
template <class D, int N> struct NarrowGroups : NarrowGemm<D, N / 8, 1> {
  using Base = NarrowGemm<D, N / 8, 1>;
  using Base::acc;
  using Base::g;
  using Base::lane;
  using Base::p;
  using Base::part;
  using Base::q;
  using Base::ring;
  using Base::warp;
  static constexpr int X = D::K32 * N * 64; // bytes of a stage's operands
  const u32 full, empty;                    // a barrier for each slot of the ring
  const int factors;                        // groups of a unit

  // A warp has 16 of its group's 64 rows.
  __device__ __forceinline__ NarrowGroups(const NarrowParams& p, u32 ring)
      : Base(p, ring, threadIdx.x / 32 * 16, 0), full(ring + p.stages * p.stage + 16), empty(full + p.stages * 8), factors(p.group == 0 ? 0 : D::K32 >> p.shift) {}

  __device__ __forceinline__ int stripsOf(int tile) const { return min(NARROW_STRIPS, (p.out - tile * NARROW_TILE + 15) / 16); }
  __device__ __forceinline__ u32 weightsOf(int slot) const { return ring + slot * p.stage + X; }
  __device__ __forceinline__ int planeBytes(int strips) const { return factors * strips * 16 * p.factor; }

  // The producer's copies of a unit.
  __device__ __forceinline__ void loadWeights(int unit, int slot, u64 policy) const {
    const int tile = unit / p.units, of = unit - tile * p.units, strips = stripsOf(tile);
    const int chunks = min(NARROW_CHUNKS, p.chunks - of * NARROW_CHUNKS), bytes = chunks * strips * NARROW_CHUNK;
    const int group = of / max(1, p.group / D::K32) * factors, there = min(factors, p.groups - group), plane = there * strips * 16 * p.factor;
    const u32 to = weightsOf(slot), bar = full + slot * 8;
    barrierExpect(bar, bytes + X + (p.kind == NO_SECOND ? plane : 2 * plane) + (p.kind == MINIMA ? D::K32 * N * 4 : 0));
    copyBulk(to, p.w + (long long)tile * p.chunks * (NARROW_STRIPS * NARROW_CHUNK) + (long long)of * NARROW_CHUNKS * strips * NARROW_CHUNK, bytes, bar, policy);
    if (plane == 0) return;
    const long long at = ((long long)tile * NARROW_TILE * p.groups + (long long)group * strips * 16) * p.factor;
    copyBulk(to + NARROW_WEIGHTS, p.scales + at, plane, bar, policy);
    if (p.kind != NO_SECOND) copyBulk(to + NARROW_WEIGHTS + planeBytes(NARROW_STRIPS), p.second + at, plane, bar, policy);
  }
  __device__ __forceinline__ void loadOperands(int unit, int slot, u64 policy) const {
    const int of = unit % p.units;
    const u32 bar = full + slot * 8;
    copyBulk(ring + slot * p.stage, p.x + (long long)of * X, X, bar, policy);
    if (p.kind == MINIMA) copyBulk(weightsOf(slot) + NARROW_WEIGHTS + 2 * planeBytes(NARROW_STRIPS), (const char*)(p.sums + of * D::K32 * N), D::K32 * N * 4, bar, policy);
  }
  // The copies of every fourth unit, from number `which` on: a warp alone would be slower than memory.
  __device__ __forceinline__ void produce(int begin, int end, int which) const {
    const u64 once = readOnce(), again = readAgain();
    if (!p.early) waitForEarlier();
    const int ahead = min(p.stages, end - begin);
    int i = which;
    for (; i < ahead; i += 4) loadWeights(begin + i, i, once);
    for (int k = i; k < min(ahead + p.ahead, end - begin); k += 4) {
      const int unit = begin + k, tile = unit / p.units, of = unit - tile * p.units, strips = stripsOf(tile), chunks = min(NARROW_CHUNKS, p.chunks - of * NARROW_CHUNKS);
      fetchAhead(p.w + (long long)tile * p.chunks * (NARROW_STRIPS * NARROW_CHUNK) + (long long)of * NARROW_CHUNKS * strips * NARROW_CHUNK, chunks * strips * NARROW_CHUNK);
    }
    if (p.early) waitForEarlier();
    for (int k = which; k < ahead; k += 4) loadOperands(begin + k, k, again);
#pragma unroll 1
    for (; i < end - begin; i += 4) {
      const int turn = i / p.stages, slot = i - turn * p.stages;
      barrierWait(empty + slot * 8, ~turn & 1);
      loadWeights(begin + i, slot, once);
      loadOperands(begin + i, slot, again);
    }
    letNextStart();
  }

  // The products of a unit. FLUSH: a group ends after so many times 32 columns; 0: it is the row.
  template <int FLUSH> __device__ __forceinline__ void multiply(int slot, int strips, int groups) {
    const u32 x = ring + slot * p.stage, weights = weightsOf(slot), plane = weights + NARROW_WEIGHTS, second = plane + planeBytes(NARROW_STRIPS), sums = second + planeBytes(NARROW_STRIPS) + q * 8;
    const int of = min(warp, strips - 1), row = of * 16 + g;
    u32 less[2] = {};
    if constexpr (D::zeros) D::less(less, p.zero, p.zero);
    constexpr int HALVES = D::K32 / NARROW_CHUNKS;
    u32 a[2][2][4];
    uint4 w;
#pragma unroll
    for (int K = 0; K < D::K32; K++) {
      const int group = min(K >> p.shift, groups - 1) * strips * 16; // columns without a group are 0
      if (K % HALVES == 0) w = loadShared16(weights + (K / HALVES * strips + of) * NARROW_CHUNK + lane * 16);
      if constexpr (D::zeros)
        if (p.kind == ZEROS && (FLUSH == 1 || K == 0)) D::less(less, loadShared2(second + (group + row) * 2), loadShared2(second + (group + row + 8) * 2));
      if (FLUSH != 1 && K >= 2) wgmmaWait<1>();
      D::decode(a[K % 2], w, K % HALVES, less, p.magic);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const u64 b = rowOperand(x + K / 2 * (N * 128) + K % 2 * 64 + k * 32);
        if (FLUSH != 0 && k == 0 && K % max1(FLUSH) == 0) multiplyRows<0>(part[0], a[K % 2][k], b);
        else multiplyRows<1>(part[0], a[K % 2][k], b);
      }
      wgmmaCommit();
      if (FLUSH == 0 || (K + 1) % max1(FLUSH) != 0) continue;
      wgmmaWait<0>();
      addGroup(plane, second, group + row, sums + K * N * 4);
    }
    if (FLUSH == 0) {
      wgmmaWait<0>();
      pinned(part[0]);
    }
  }
  __device__ static constexpr int max1(int x) { return x < 1 ? 1 : x; }

  __device__ __forceinline__ void addGroup(u32 plane, u32 second, int row, u32 sums) {
    pinned(part[0]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float scale = loadFactor(plane, row + i * 8, p.factor);
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++) acc[0][n][e] += scale * part[0][n][e];
    }
    if (p.kind != MINIMA) return; // of groups of 32 columns
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float least = loadFactor(second, row + i * 8, p.factor);
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) acc[0][n][2 * i + e] += least * loadShared(sums + n * 32 + e * 4);
    }
  }

  template <int FLUSH> __device__ __forceinline__ void consume(int begin, int end) {
    int slot = 0, first = begin, tile = begin / p.units, left = p.units - (begin - tile * p.units);
    u32 parity = 0;
    this->clear();
#pragma unroll 1
    for (int unit = begin; unit < end; unit++) {
      barrierWait(full + slot * 8, parity);
      multiply<FLUSH>(slot, stripsOf(tile), FLUSH == 1 ? min(factors, p.groups - (p.units - left) * factors) : 1);
      releaseStage(empty + slot * 8, lane);
      if (++slot == p.stages) slot = 0, parity ^= 1;
      if (--left == 0 || unit + 1 == end) {
        this->template finish<true>(tile++, first, unit + 1);
        first = unit + 1, left = p.units;
      }
    }
  }

  __device__ static __forceinline__ void run(const NarrowParams& p) {
    extern __shared__ __align__(1024) char aligned[];
    NarrowGroups me(p, sharedAddress(aligned));
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(me.full + s * 8, 1), barrierInit(me.empty + s * 8, NARROW_GROUP_WARPS);
      opened();
    }
    __syncthreads();
    const int begin = me.beginOf(blockIdx.x), end = me.beginOf(blockIdx.x + 1);
    if (me.warp >= NARROW_GROUP_WARPS) {
      fewerRegisters<32>();
      if (elected()) me.produce(begin, end, me.warp - NARROW_GROUP_WARPS);
      return;
    }
    moreRegisters<112>();
    waitForEarlier();
    if constexpr (!D::zeros) // integers of 4 bits have groups
      if (p.group == 0) return me.template consume<0>(begin, end);
    if constexpr (!same<D, NarrowInt8>) // INT8 has a scale for a row, or for 32 columns
      if (D::K32 == 1 << p.shift) return me.template consume<D::K32>(begin, end);
    me.template consume<1>(begin, end);
  }
};

// Adds the sums of the blocks that share a tile, in their order, and finishes the tile. A block has eight columns of half of the rows.
template <int NT> __device__ __forceinline__ void narrowMerge(const NarrowParams& p) {
  letNextStart();
  waitForEarlier();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x / (2 * NT), i = blockIdx.x % (2 * NT);
  NarrowGemm<NarrowInt8, NT, 1> me(p, 0); // for its units and its outputs
  const int from = me.blockOf(tile * p.units), to = me.blockOf((tile + 1) * p.units - 1);
  if (from == to) return;
  float sum[4] = {};
#pragma unroll 8
  for (int block = from; block <= to; block++) {
    const float4 v = __ldcg(me.partialOf(block, block == from, tile) + i * NARROW_THREADS);
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  const int column = i / 2 * 8 + lane % 4 * 2, o = tile * NARROW_TILE + (i % 2 * 8 + warp) * 16 + lane / 4;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    if (p.parts == 2) {
      me.store(o + e * 4, column / 2, sum[e] + sum[e + 1]);
    } else {
      me.store(o + e * 4, column, sum[e]);
      me.store(o + e * 4, column + 1, sum[e + 1]);
    }
  }
}
#define NARROW_MANY(name, D, NT) \
  extern "C" __global__ void __launch_bounds__(NARROW_GROUP_THREADS, 1) name(const __grid_constant__ NarrowParams p) { NarrowGroups<D, NT * 8>::run(p); }
#define NARROW_MERGE(name, NT) \
  extern "C" __global__ void __launch_bounds__(NARROW_THREADS) name(const __grid_constant__ NarrowParams p) { narrowMerge<NT>(p); }
#else // other GPUs have no products of warp groups
#define NARROW_MANY(name, D, NT) extern "C" __global__ void name(const __grid_constant__ NarrowParams p) {}
#define NARROW_MERGE(name, NT) extern "C" __global__ void name(const __grid_constant__ NarrowParams p) {}
#endif
