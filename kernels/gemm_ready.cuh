// A skinny GEMM (gemm_skinny.cuh) of 64 rows of x, with the operands that a launch of gemm_tiled.cuh has made, in one part. The copy engine
// copies operands to their place in shared memory. So weights fill the whole ring before the operands exist: floats of x would take half of the ring.
#pragma once
#include "gemm_skinny.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int READY_ROWS = 64;

// The parameter gamma is the factors of rows, and the tensor map x is that of the operands.
template <class T, class Keys, bool GATES> struct ReadyGemm : SkinnyGemm<T, Keys, READY_ROWS, 1, GATES, 1> {
  using Base = SkinnyGemm<T, Keys, READY_ROWS, 1, GATES, 1>;
  using Block = typename Base::Block;

  __device__ static __forceinline__ void run(const SkinnyParams& params) {
    const LinearParams& p = params.p;
    extern __shared__ __align__(1024) char memory[];
    Block b;
    b.warp = __shfl_sync(~0u, threadIdx.x / 32, 0), b.lane = threadIdx.x % 32;
    b.split = p.split, b.log = 31 - __clz(b.split), b.rank = blockIdx.x & (b.split - 1);
    const u32 cluster = blockIdx.x >> b.log, clusters = gridDim.x >> b.log, tiles = p.tiles[LINEAR_PARTS - 1];
    b.all = (p.in + Base::BLOCK - 1) / Base::BLOCK, b.from = b.begin(b.rank), b.blocks = b.begin(b.rank + 1) - b.from;
    const u32 below = (p.rows + READY_ROWS - 1) / READY_ROWS; // clusters with the same rows of W
    b.gated = GATES && (p.activation & GATED);
    b.first = cluster / below, b.step = clusters / below, b.tiles = b.gated ? tiles / 2 : tiles;
    b.row = cluster % below * READY_ROWS, b.rows = min(p.rows - b.row, READY_ROWS);
    b.most = (b.all + b.split - 1) >> b.log;
    b.full = sharedAddress(memory);
    b.empty = b.full + SKINNY_STAGES * 8, b.there = b.empty + SKINNY_STAGES * 8, b.taken = b.there + 16, b.merged = b.taken + 16, b.came = b.merged + 8;
    b.factors = (float*)(memory + 2 * SKINNY_STAGES * 8 + 48);
    b.ring = b.full + SKINNY_FIXED;
    b.x = memory + SKINNY_FIXED + p.stages * SKINNY_STAGE;
    b.partials = (float*)(b.x + b.most * Base::X);
    b.mine = b.partials + 2 * Base::PARTIALS;
    typename Base::WeightProducer producer{b.first, 0, 0, {0, 1}};
    if (b.warp == SKINNY_WARPS && b.lane == 0) {
#pragma unroll
      for (int s = 0; s < SKINNY_STAGES; s++) barrierInit(b.full + s * 8, 1), barrierInit(b.empty + s * 8, SKINNY_WARPS);
      for (int i = 0; i < 2; i++) barrierInit(b.there + i * 8, 1 + (b.units() + 1) / 2 * 32), barrierInit(b.taken + i * 8, min(b.split, Base::UNITS) * Base::EPILOGUES);
      barrierInit(b.came, 1);
      opened();
    }
    __syncwarp();
    clusterArriveRelaxed();
    __syncthreads();
    if (b.warp == SKINNY_WARPS) {
      if (b.lane == 0) {
        const int ahead = p.early ? min(p.stages, b.count() * ((b.blocks + 1) / 2)) : 0;
#pragma unroll 1
        for (int s = 0; s < ahead; s++) producer.next(params, b);
        letNextStart();
        waitForEarlier();
        while (producer.tile < b.tiles) producer.next(params, b);
      }
    } else if (b.warp > SKINNY_WARPS) {
      if (b.warp == SKINNY_WARPS + 1) fetchPages(params.keep, b.lane);
      waitForEarlier();
      if (b.warp == SKINNY_WARPS + 1 && b.lane == 0) {
        barrierExpect(b.came, b.blocks * Base::X);
#pragma unroll 4
        for (int c = 0; c < b.blocks; c++) copyBox(sharedAddress(b.x) + c * Base::X, &params.x, (b.from + c) * Base::BLOCK, b.row, 0, b.came, readAgain());
      }
      __syncwarp();
      clusterWait();
      Base::runEpilogue(p, params.keep, b);
    } else {
      const typename Base::Sums sums(b);
      waitForEarlier();
      if (threadIdx.x < READY_ROWS) b.factors[threadIdx.x] = threadIdx.x < b.rows ? p.gamma[b.row + threadIdx.x] : 0.f;
      syncWarps(SKINNY_WARPS);
      barrierWait(b.came, 0);
      clusterWait();
      Base::consume(p, b, sums);
    }
  }
};
#define READY(name, T, KEYS, GATES) \
  extern "C" __global__ void __launch_bounds__(skinnyThreads(64), 1) name(const __grid_constant__ SkinnyParams p) { ReadyGemm<T, KEYS, GATES>::run(p); }
#else // other kernels take 64 rows
#define READY(name, T, KEYS, GATES) extern "C" __global__ void name(const __grid_constant__ SkinnyParams p) {}
#endif
