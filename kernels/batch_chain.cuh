// Linear layers of the rows of a batch (batch.cuh), one behind the other in a launch.
//
// All thread blocks are there at once, each cluster with its tiles of every layer, and
// the weights of the next layer are on their way while the last sums of this one are.
// A block waits for its slice of x alone: each tile of y has a counter of those that
// have finished a part of it. Counters are never cleared: they stand at a multiple of
// the number of runs.
#pragma once
#include "batch.cuh"

constexpr int BATCH_LAYERS = 4;  // of a launch, at most
constexpr int BATCH_STAGES = 14; // of its ring, at most

// Linear layers one behind the other. The ring of weights takes what a layer's x, which
// ends at the same place in all layers, leaves of the memory before it.
struct BatchChainParams {
  BatchParams layers[BATCH_LAYERS];
  u32* ready[BATCH_LAYERS]; // counters of a layer's tiles; null: no layer reads what it makes
  u32* need[BATCH_LAYERS];  // those of its x, one for each 64 columns; null: x was there before
  u32* run;                 // the number of the last run, and how many thread blocks are done
  BatchKeep keep;           // of the last layer; without slots there is nothing to keep
  int count;
  int end;                  // bytes up to the end of x
  int affine;               // columns that a block has of gamma and beta, at most
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ u32 loadAcquire(const u32* at) {
  u32 a;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(at) : "memory");
  return a;
}

template <class T, int ROWS> struct BatchChain {
  using B = Batch<T, ROWS, true>;
  using Block = typename B::Block;
  using Copies = typename B::Copies;
  using Turn = typename B::Turn;
  static constexpr int BLOCK = B::BLOCK, X = B::X, PARTIALS = B::PARTIALS, MOMENTS = B::MOMENTS;

  // Each layer but the first reads what the one before it makes. What orders them,
  // besides the counters that a block waits for:
  //
  //   - A block's x is asked for when its tiles of the layer before are finished: all
  //     its products have read the x that was there, and the factors.
  //   - Any part of layer l+1 that is finished has needed all of x, and so all of layer
  //     l, in all blocks. So who sends moments of layer l+2 may send them to the place of
  //     those of layer l, where everybody has had them. Layers with norms are not next
  //     to each other.
  __device__ static __forceinline__ void run(const BatchChainParams& c) {
    extern __shared__ __align__(1024) char memory[];
    Block b;
    b.warp = __shfl_sync(~0u, threadIdx.x / 32, 0), b.lane = threadIdx.x % 32;
    b.split = c.layers[0].p.split, b.rank = blockIdx.x % b.split;
    b.ring = sharedAddress(memory);
    b.partials = (float*)(memory + c.end);
    b.mine = b.partials + 2 * PARTIALS;
    float* const moments = b.mine + 2 * PARTIALS; // of every second norm
    b.width = c.affine, b.affine = moments + 2 * MOMENTS;
    b.factors = b.affine + 2 * c.affine;
    b.full = sharedAddress(b.factors + ROWS);
    b.empty = b.full + BATCH_STAGES * 8, b.there = b.empty + BATCH_STAGES * 8, b.taken = b.there + 16, b.merged = b.taken + 16, b.came = b.merged + 8;
    volatile int* const done = (volatile int*)(memory + (b.came + 8 - b.ring)); // layers that this block is done with
    // Goes through the layers that the cluster has tiles of.
    const auto each = [&](auto f) {
      const int cluster = blockIdx.x / b.split, clusters = gridDim.x / b.split;
      const auto first = [&](int layer, int cluster) { return cluster * c.layers[layer].p.tiles[LINEAR_PARTS - 1] / clusters; };
      b.finished = b.normed = 0, b.more = 0;
      int norms = 0;
      for (int i = 0; i < c.count; i++) {
        const int n = first(i, cluster + 1) - first(i, cluster);
        b.more += n, norms += n > 0 && c.layers[i].p.norm;
      }
#pragma unroll 1
      for (int i = 0; i < c.count; i++) {
        const LinearParams& p = c.layers[i].p;
        b.all = (p.in + BLOCK - 1) / BLOCK, b.from = b.rank * b.all / b.split, b.blocks = (b.rank + 1) * b.all / b.split - b.from;
        b.most = (b.all + b.split - 1) / b.split;
        b.x = memory + c.end - b.most * X;
        b.t0 = first(i, cluster), b.t1 = first(i, cluster + 1);
        b.more -= b.t1 - b.t0;
        b.moments = moments + (b.normed & 1) * MOMENTS;
        b.again = b.normed + 1 < norms;
        b.ready = c.ready[i];
        b.keep = i == c.count - 1 && c.keep.slots != nullptr ? &c.keep : nullptr;
        if (b.t0 < b.t1) f(i, p);
        b.finished += b.t1 - b.t0, b.normed += b.t0 < b.t1 && p.norm;
      }
    };
    if (b.warp == BATCH_WARPS && b.lane == 0) {
      const LinearParams& p = c.layers[0].p;
      for (int s = 0; s < BATCH_STAGES; s++) barrierInit(b.full + s * 8, 1), barrierInit(b.empty + s * 8, BATCH_WARPS);
      for (int i = 0; i < 2; i++) barrierInit(b.there + i * 8, 1 + max(BATCH_TILE / 16 / b.split, 1) * 32), barrierInit(b.taken + i * 8, b.split);
      barrierInit(b.merged, 1), barrierInit(b.came, 1);
      *done = 0;
      opened();
      barrierExpect(b.merged, b.split * p.rows * 8);
    }
    __syncwarp();
    clusterArriveRelaxed();
    __syncthreads();
    if (b.warp == BATCH_WARPS) {
      if (b.lane != 0) return;
      Turn turn{0, ~0u};
      each([&](int layer, const LinearParams& p) {
        if (!p.early) waitForEarlier();
        Copies copies{b.t0, 0, 0, turn};
        copies.turn.begin(p.stages);
        // Other stages lie where the layers before have their x.
        int before = p.stages;
        for (int i = 0; i < layer; i++) before = min(before, c.layers[i].p.stages);
        while (copies.tile < b.t1) {
          if (copies.turn.at >= before) {
            while (*done < layer) {}
            before = p.stages;
          }
          copies.next(p, b);
        }
        turn = copies.turn;
      });
    } else if (b.warp > BATCH_WARPS) {
      waitForEarlier();
      if (b.lane == 0) letNextStart();
      const u32 number = *(volatile u32*)c.run + 1;
      clusterWait();
      each([&](int layer, const LinearParams& p) {
        if (b.lane == 0) *done = layer; // and with those before that it has no tiles of
        __syncwarp();
        // Who has no columns of x waits for all of it: what is said of the order of
        // layers, above, holds for everybody.
        const u32* const need = c.need[layer];
        if (need != nullptr) {
          const int from = b.blocks > 0 ? b.from : 0, n = b.blocks > 0 ? b.blocks : b.all;
          for (int i = b.lane; i < n; i += 32)
            while ((int)(loadAcquire(need + from + i) - number * b.split) < 0) {}
          asm volatile("fence.proxy.async.global;" ::: "memory");
          __syncwarp();
        }
        if (b.lane == 0) {
          barrierExpect(b.came, b.blocks * X);
          for (int i = 0; i < b.blocks * 2; i++) copyBox(sharedAddress(b.x) + i * (X / 2), &c.layers[layer].x, b.from * BLOCK + i * (BLOCK / 2), 0, 0, b.came, readAgain());
        }
        B::finishAll(p, b);
      });
      if (b.lane == 0) {
        u32 before;
        asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(c.run + 1), "r"(gridDim.x - 1) : "memory");
        if (before == gridDim.x - 1) *c.run = number;
      }
      __syncwarp();
      clusterArriveRelaxed();
      clusterWait();
    } else {
      clusterWait();
      Turn turn{0, 0};
      u32 came = 0;
      each([&](int layer, const LinearParams& p) {
        turn.begin(p.stages);
        B::prepare(p, b, came);
        came ^= 1;
        B::multiplyAll(p, b, turn);
      });
    }
  }
};
#endif
