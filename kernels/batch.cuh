// Linear layers of the rows of a batch, more than linear.cuh is good at and few
// enough that a slice of x stays in shared memory, on GPUs of compute capability 9.0:
//
//	y = f(norm(x) W^T + b) + residual,   f(v) = max(v, 0) or v
//
// A cluster of thread blocks has some tiles of 64 rows of W, and each of its blocks
// a slice of their columns, which it streams tile by tile. So a block makes operands
// of its slice of x once, in place: each element as two 16-bit parts, which are rows
// of one right operand. Two warp groups multiply, each every second tile. Their sums
// go into the shared memory of the block that finishes the rows of W (of a cluster's
// blocks each has its part of a tile), where a warp adds them up in the order of the
// blocks while the others are at the next tile: bits do not vary from run to run, and
// nobody meets.
#pragma once
#include "matrix.cuh"

constexpr int BATCH_TILE = 64;                    // rows of W
constexpr int BATCH_STAGE = 2 * BATCH_TILE * 128; // bytes: two column blocks of a tile
constexpr int BATCH_WARPS = 8;                    // that multiply; one more copies, one for each group of them finishes
constexpr int BATCH_THREADS = (BATCH_WARPS + 3) * 32;

// What a layer makes may be a step's new keys and values: where its parts go in the
// cache besides, in the type of the weights.
struct BatchKeep {
  void* cache[LINEAR_PARTS]; // null: the part is nothing of the sort
  const int* slots;          // of each row, the row of keys of head 0 that it becomes; -1: none
  const int* ahead;          // pages of the cache that are worth having in the L2 cache then: how many, and which
  int headRows, dim;         // rows of keys from a head to the next; elements of one, a multiple of 4
  int pageBytes;
};

struct BatchParams {
  TensorMap x; // its rows, 32 floats of each
  LinearParams p;
  BatchKeep keep; // without slots there is nothing to keep
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Two floats, or `bytes` from here, to another thread block of the cluster, and word
// of them to a barrier there.
__device__ __forceinline__ void send2(u32 to, u32 bar, float a, float b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(a), "f"(b), "r"(bar) : "memory");
}
__device__ __forceinline__ void sendBlock(u32 to, u32 bar, u32 from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void barrierArriveRemote(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// clusterArrive where no memory has to be seen.
__device__ __forceinline__ void clusterArriveRelaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

template <class T, int ROWS> struct Batch {
  static constexpr int BLOCK = 64;                       // columns of a column block: 128 bytes
  static constexpr int X = 2 * ROWS * 128;               // bytes of a column block of x
  static constexpr int UNIT = 8 * ROWS;                  // floats: the sums of 8 rows of W
  static constexpr int PARTIALS = BATCH_TILE / 8 * UNIT; // that a block sends of a tile, and is sent
  static constexpr int N = 2 * ROWS / 8;                 // products side by side
  static constexpr int MOMENTS = 8 * 2 * ROWS;           // floats: mean and sum of squares of each row, of each block of a cluster

  struct Block {
    int warp, lane, rank, split;
    int all, from, blocks; // column blocks: of x, and from where on how many are this block's
    int t0, t1;
    u32 ring, full, empty;          // full and empty: barriers of each stage
    u32 there, taken, merged, came; // of the partials' two places, of the moments, and of x
    char* x;
    float *partials, *mine, *factors; // partials of all blocks, and the block's own, in two places each
    float *moments, *affine;          // of the norm, where `mine` will be
    int most;                         // column blocks that a block of the cluster has at most
  };

  // The next stage of the ring, and the parity of its phase.
  struct Turn {
    int at;
    u32 parity;
    __device__ __forceinline__ void next(int stages) {
      if (++at == stages) at = 0, parity ^= 1;
    }
  };

  __device__ static __forceinline__ void run(const BatchParams& params) {
    const LinearParams& p = params.p;
    extern __shared__ __align__(1024) char memory[];
    Block b;
    b.warp = __shfl_sync(~0u, threadIdx.x / 32, 0), b.lane = threadIdx.x % 32;
    b.split = p.split, b.rank = blockIdx.x % b.split;
    const int cluster = blockIdx.x / b.split, clusters = gridDim.x / b.split, tiles = p.tiles[LINEAR_PARTS - 1];
    b.all = (p.in + BLOCK - 1) / BLOCK, b.from = b.rank * b.all / b.split, b.blocks = (b.rank + 1) * b.all / b.split - b.from;
    b.t0 = (int)((long long)cluster * tiles / clusters), b.t1 = (int)((long long)(cluster + 1) * tiles / clusters);
    b.most = (b.all + b.split - 1) / b.split;
    b.ring = sharedAddress(memory);
    b.x = memory + p.stages * BATCH_STAGE;
    b.partials = (float*)(b.x + b.most * X);
    b.mine = b.partials + 2 * PARTIALS;
    b.moments = b.mine; // of each block of the cluster: mean and sum of squares of each row
    b.affine = b.moments + 8 * 2 * ROWS;
    b.factors = b.mine + max(2 * PARTIALS, p.norm ? 8 * 2 * ROWS + 2 * b.most * BLOCK : 0);
    b.full = sharedAddress(b.factors + ROWS);
    b.empty = b.full + p.stages * 8, b.there = b.empty + p.stages * 8, b.taken = b.there + 16, b.merged = b.taken + 16, b.came = b.merged + 8;
    // The copying thread makes all barriers, and begins: only who sends to other blocks
    // waits until these have theirs.
    Copies copies{b.t0, 0, 0, {0, 1}};
    if (b.warp == BATCH_WARPS && b.lane == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(b.full + s * 8, 1), barrierInit(b.empty + s * 8, BATCH_WARPS);
      for (int i = 0; i < 2; i++) barrierInit(b.there + i * 8, 1 + max(BATCH_TILE / 16 / b.split, 1) * 32), barrierInit(b.taken + i * 8, b.split);
      barrierInit(b.merged, 1), barrierInit(b.came, 1);
      opened();
      barrierExpect(b.merged, b.split * p.rows * 8);
      if (p.early)
        for (int s = 0; s < p.stages; s++) copies.next(p, b);
    }
    __syncwarp();
    clusterArriveRelaxed();
    __syncthreads();
    if (b.warp == BATCH_WARPS) {
      if (b.lane == 0) {
        waitForEarlier();
        letNextStart();
        barrierExpect(b.came, b.blocks * X);
        for (int c = 0; c < b.blocks * 2; c++) copyBox(sharedAddress(b.x) + c * (X / 2), &params.x, b.from * BLOCK + c * (BLOCK / 2), 0, 0, b.came, readAgain());
        while (copies.tile < b.t1) copies.next(p, b);
      }
    } else if (b.warp > BATCH_WARPS) {
      if (b.warp == BATCH_WARPS + 1) fetchPages(params.keep, b.lane);
      waitForEarlier();
      clusterWait();
      finishAll(p, params.keep, b);
      // Copies out of this block's memory end when they have come. Who has left counts
      // as here.
      clusterArriveRelaxed();
      clusterWait();
    } else {
      Turn turn{0, 0};
      prepare(p, b);
      multiplyAll(p, b, turn);
    }
  }

  // The block's share of the pages that attention reads next: the memory has nothing to
  // do while x is waited for, and when the last weights have come.
  __device__ static __forceinline__ void fetchPages(const BatchKeep& keep, int lane) {
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

  // All that the block reads of the weights: which stage is next.
  struct Copies {
    int tile, part, block;
    Turn turn; // parity 1: of a ring that is empty

    __device__ __forceinline__ void next(const LinearParams& p, const Block& b) {
      if (tile >= b.t1) return;
      while (part < LINEAR_PARTS - 1 && tile >= p.tiles[part]) part++;
      const int row = (tile - (part > 0 ? p.tiles[part - 1] : 0)) * BATCH_TILE;
      if (block < b.blocks) {
        barrierWait(b.empty + turn.at * 8, turn.parity);
        const bool two = block + 1 < b.blocks;
        const u32 to = b.ring + turn.at * BATCH_STAGE, bar = b.full + turn.at * 8;
        const u64 policy = readOnce();
        barrierExpect(bar, two ? BATCH_STAGE : BATCH_STAGE / 2);
        copyBox(to, &p.maps[part], (b.from + block) * BLOCK, row, 0, bar, policy);
        if (two) copyBox(to + BATCH_STAGE / 2, &p.maps[part], (b.from + block + 1) * BLOCK, row, 0, bar, policy);
        turn.next(p.stages);
      }
      if ((block += 2) >= b.blocks) block = 0, tile++;
    }
  };

  // Eight elements of a row of x, as floats, are 32 bytes: the first half of a column
  // block has one line of 128 bytes for each row, the second another. As operands they
  // are 16 bytes of each part, which takes the same two lines.
  __device__ static __forceinline__ float4* floats(const Block& b, int m, int eight, int half) {
    return (float4*)(b.x + eight / 8 * X + swizzled(eight % 8 / 4 * ROWS + m, eight % 4 * 32 + half * 16));
  }
  __device__ static __forceinline__ uint4* operand(const Block& b, int m, int eight, int part) {
    return (uint4*)(b.x + eight / 8 * X + swizzled(part * ROWS + m, eight % 8 * 16));
  }

  // Makes operands of the block's slice of x, or of its layer norm, each row scaled by
  // a power of two where the type has few exponents. A warp has whole rows of the slice.
  // Everybody waits for this, and its code is executed once: what is unrolled costs more
  // to fetch than it saves.
  __device__ static __forceinline__ void prepare(const LinearParams& p, const Block& b) {
    constexpr int R = ROWS / BATCH_WARPS; // of a warp
    const int first = b.from * BLOCK, live = max(min(b.blocks * BLOCK, p.in - first), 0); // a multiple of 8
    const float part = 1.f / max(live, 1), whole = 1.f / p.in;
    float count = 0.f; // of a row's elements, the slice of block `lane`
    if (b.lane < b.split) {
      const int begin = b.lane * b.all / b.split * BLOCK, end = (b.lane + 1) * b.all / b.split * BLOCK;
      count = max(min(end, p.in) - begin, 0);
    }
    if (p.norm) {
      if (!p.early) waitForEarlier();
#pragma unroll 1
      for (int k = 0; k < 2; k++) { // gamma and beta
        const float* const src = k ? p.beta : p.gamma;
        float* const to = b.affine + k * b.most * BLOCK;
#pragma unroll 1
        for (int c = threadIdx.x * 4; c < live; c += BATCH_WARPS * 128) {
          if (src != nullptr) {
            copy16(sharedAddress(to + c), src + first + c, true);
          } else {
            *(float4*)(to + c) = k ? make_float4(0.f, 0.f, 0.f, 0.f) : make_float4(1.f, 1.f, 1.f, 1.f);
          }
        }
      }
    }
    copyCommit();
    clusterWait();
    copyWait<0>();
    if (b.blocks > 0) barrierWait(b.came, 0);
    // f of eight elements of each of the warp's rows, a lane.
    const auto each = [&](auto f) {
#pragma unroll 1
      for (int g = b.lane; g < live / 8; g += 32)
#pragma unroll
        for (int r = 0; r < R; r++) {
          float4 *const u = floats(b, b.warp + r * BATCH_WARPS, g, 0), *const v = floats(b, b.warp + r * BATCH_WARPS, g, 1);
          f(r, g, u, v, *u, *v);
        }
    };
    const auto top8 = [](float4 u, float4 v) { return fmaxf(fmaxf(fmaxf(fabsf(u.x), fabsf(u.y)), fmaxf(fabsf(u.z), fabsf(u.w))), fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)))); };
    float top[R] = {};
    if (p.norm) {
      float mean[R] = {}, squares[R] = {};
      each([&](int r, int, float4*, float4*, float4 u, float4 v) { mean[r] += ((u.x + u.y) + (u.z + u.w)) + ((v.x + v.y) + (v.z + v.w)); });
#pragma unroll
      for (int r = 0; r < R; r++) mean[r] = sumOfWarp(mean[r]) * part;
      each([&](int r, int, float4*, float4*, float4 u, float4 v) {
        const auto square4 = [&](float4 v) { return ((v.x - mean[r]) * (v.x - mean[r]) + (v.y - mean[r]) * (v.y - mean[r])) + ((v.z - mean[r]) * (v.z - mean[r]) + (v.w - mean[r]) * (v.w - mean[r])); };
        squares[r] += square4(u) + square4(v);
      });
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int m = b.warp + r * BATCH_WARPS;
        squares[r] = sumOfWarp(squares[r]);
        if (m < p.rows && b.lane < b.split) send2(remoteAddress(sharedAddress(b.moments + (b.rank * ROWS + m) * 2), b.lane), remoteAddress(b.merged, b.lane), mean[r], squares[r]);
      }
      syncWarps(BATCH_WARPS); // gamma and beta are there
      barrierWait(b.merged, 0);
      // Means and sums of squares of the slices merge into the row's.
      float f[R];
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int m = b.warp + r * BATCH_WARPS;
        const float2 of = m < p.rows && b.lane < b.split ? *(const float2*)(b.moments + (b.lane * ROWS + m) * 2) : make_float2(0.f, 0.f);
        mean[r] = sumOfWarp(count * of.x) * whole;
        const float d = of.x - mean[r];
        f[r] = rsqrtf(sumOfWarp(of.y + count * d * d) * whole + p.eps);
      }
      each([&](int r, int g, float4* toU, float4* toV, float4 u, float4 v) {
        const float4* const gamma = (const float4*)(b.affine + g * 8);
        const float4* const beta = gamma + b.most * (BLOCK / 4);
        const auto normed = [&](float4 v, float4 g, float4 b) { return make_float4((v.x - mean[r]) * f[r] * g.x + b.x, (v.y - mean[r]) * f[r] * g.y + b.y, (v.z - mean[r]) * f[r] * g.z + b.z, (v.w - mean[r]) * f[r] * g.w + b.w); };
        u = normed(u, gamma[0], beta[0]), v = normed(v, gamma[1], beta[1]);
        *toU = u, *toV = v;
        top[r] = fmaxf(top[r], top8(u, v));
      });
    } else if constexpr (T::narrow) {
      each([&](int r, int, float4*, float4*, float4 u, float4 v) { top[r] = fmaxf(top[r], top8(u, v)); });
    }
    float up[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      up[r] = 1.f;
      if constexpr (T::narrow) {
#pragma unroll
        for (int i = 16; i > 0; i /= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], i));
        up[r] = powerOf(-exponentOf(top[r]));
      }
      if (b.lane == 0) b.factors[b.warp + r * BATCH_WARPS] = T::narrow ? powerOf(exponentOf(top[r])) : 1.f;
    }
    // Eight lanes have a row of a column block: all have read it before any writes.
#pragma unroll 1
    for (int g0 = 0; g0 < b.blocks * 8; g0 += 32) {
      const int g = g0 + b.lane;
      u32 lead[R][4], rest[R][4];
#pragma unroll
      for (int r = 0; r < R; r++) {
        if (g >= b.blocks * 8) break;
        const float4 u = *floats(b, b.warp + r * BATCH_WARPS, g, 0), v = *floats(b, b.warp + r * BATCH_WARPS, g, 1);
        const float x[8] = {u.x * up[r], u.y * up[r], u.z * up[r], u.w * up[r], v.x * up[r], v.y * up[r], v.z * up[r], v.w * up[r]};
#pragma unroll
        for (int i = 0; i < 4; i++) lead[r][i] = T::pack(x[2 * i], x[2 * i + 1]), rest[r][i] = T::pack(x[2 * i] - T::low(lead[r][i]), x[2 * i + 1] - T::high(lead[r][i]));
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < R; r++) {
        if (g >= b.blocks * 8) break;
        *operand(b, b.warp + r * BATCH_WARPS, g, 0) = make_uint4(lead[r][0], lead[r][1], lead[r][2], lead[r][3]);
        *operand(b, b.warp + r * BATCH_WARPS, g, 1) = make_uint4(rest[r][0], rest[r][1], rest[r][2], rest[r][3]);
      }
    }
    written();
    syncWarps(BATCH_WARPS);
  }

  // The products of a stage's column block, which is one of x's too.
  __device__ static __forceinline__ void multiply(float (&sums)[N][4], u32 w, u32 x) {
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) Group<2 * ROWS>::template product<T>(sums, operandAt(w + k * 32), operandAt(x + k * 32));
  }
  // Ends a stage's products, and waits for all but so many stages' products.
  template <int MORE> __device__ static __forceinline__ void multiplied() {
    if (MORE > 0) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MORE) : "memory");
  }

  // All tiles: the sums of this block's columns go to who finishes them. A stage is
  // given back when the products of the next one are on their way.
  __device__ static __forceinline__ void multiplyAll(const LinearParams& p, const Block& b, Turn& turn) {
    const int group = b.warp / 4, t = b.lane & 3, units = BATCH_TILE / 8 / b.split; // that a block finishes
    const u32 x = sharedAddress(b.x);
    float down[ROWS / 8][2]; // what the sums of rows 2t and 2t+1 of eight of x are multiplied by
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) down[j][0] = b.factors[j * 8 + 2 * t], down[j][1] = b.factors[j * 8 + 2 * t + 1];
    // The warp's two units of sums: where they are written, and for a lane of each where
    // they are sent. Those that this block finishes are in their place at once. A group
    // has a place of its own for them, there as here.
    float* mine[2];
    bool here = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int unit = b.warp % 4 * 2 + h;
      here = here || unit / units == b.rank;
      mine[h] = unit / units == b.rank ? b.partials + group * PARTIALS + (b.rank * units + unit % units) * UNIT : b.mine + (b.warp * 2 + h) * UNIT;
    }
    const int unit = b.warp % 4 * 2 + (b.lane & 1), owner = unit / units;
    const u32 from = sharedAddress(b.mine + (b.warp * 2 + (b.lane & 1)) * UNIT), there = b.there + group * 8, taken = b.taken + group * 8;
    const u32 bar = remoteAddress(there, owner), to = remoteAddress(sharedAddress(b.partials + group * PARTIALS + (b.rank * units + unit % units) * UNIT), owner);
#pragma unroll 1
    for (int tile = b.t0; tile < b.t1; tile++) {
      const int i = tile - b.t0;
      if ((i & 1) != group) { // the other group's: this one keeps pace, so that no barrier is a round ahead of it
#pragma unroll 1
        for (int c = 0; c < b.blocks; c += 2) {
          barrierWait(b.full + turn.at * 8, turn.parity);
          __syncwarp(); // no lane is a round ahead of another
          if (b.lane == 0) barrierArrive(b.empty + turn.at * 8);
          turn.next(p.stages);
        }
        continue;
      }
      float sums[N][4];
#pragma unroll
      for (int i = 0; i < N; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
      int before = -1;
#pragma unroll 1
      for (int c = 0; c < b.blocks; c += 2) {
        barrierWait(b.full + turn.at * 8, turn.parity);
        const u32 w = b.ring + turn.at * BATCH_STAGE;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(sums, w, x + c * X);
        if (c + 1 < b.blocks) multiply(sums, w + BATCH_STAGE / 2, x + (c + 1) * X);
        multiplied<1>();
        if (before >= 0 && b.lane == 0) barrierArrive(b.empty + before * 8);
        before = turn.at;
        turn.next(p.stages);
      }
      multiplied<0>();
#pragma unroll
      for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])::"memory"); // they are there from here on
      if (before >= 0 && b.lane == 0) barrierArrive(b.empty + before * 8);
      if (i >= 2) barrierWait(taken, (i / 2 - 1) & 1);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
          for (int k = 0; k < 2; k++) mine[h][(j * 8 + k * 4 + t) * 8 + b.lane / 4] = (sums[j][2 * h + k] + sums[j + N / 2][2 * h + k]) * down[j][k];
      written();
      __syncwarp();
      if (b.lane < 2 && owner != b.rank) sendBlock(to, bar, from, UNIT * 4);
      if (here) barrierArrive(there);
    }
  }

  // Row `at` of a unit is row m of x: the order in which lanes of different m write to
  // different banks.
  __device__ static __forceinline__ int rowAt(int at) { return at / 8 * 8 + at % 4 * 2 + at / 4 % 2; }

  // What is next for the warp that finishes: some of a tile's rows, two fours of them
  // a lane. What is added to them is asked for long before it is needed: a bias comes
  // from memory.
  struct Piece {
    static constexpr int FOURS = 2;
    int tile, part, begin; // begin: of the tile's fours
    float4 bias[FOURS], residual[FOURS];

    __device__ __forceinline__ int at(int k, const Block& b) const { return begin + k * 32 + b.lane; }
    __device__ __forceinline__ int first(const LinearParams& p, const Block& b) const {
      return (tile - (part > 0 ? p.tiles[part - 1] : 0)) * BATCH_TILE + b.rank * (BATCH_TILE / b.split);
    }
    __device__ __forceinline__ void fetch(const LinearParams& p, const Block& b, int fours) {
      while (part < LINEAR_PARTS - 1 && tile >= p.tiles[part]) part++;
      const int out = p.out[part];
      const bool even = out % 4 == 0;
#pragma unroll
      for (int k = 0; k < FOURS; k++) {
        const int m = rowAt(at(k, b) % ROWS), n = first(p, b) + at(k, b) / ROWS * 4;
        bias[k] = residual[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (at(k, b) >= fours || m >= p.rows) continue;
        if (p.b[part] != nullptr) bias[k] = load4(p.b[part], n, out, even);
        if (p.residual != nullptr) residual[k] = load4(p.residual + (long long)m * out, n, out, even);
      }
    }
  };

  // Adds up what the cluster's blocks have sent of the rows that are this block's, of
  // the tiles of one group: how long y is on its way to memory holds up nothing else.
  __device__ static __forceinline__ void finishAll(const LinearParams& p, const BatchKeep& keep, const Block& b) {
    const int per = BATCH_TILE / b.split, fours = ROWS * per / 4, group = b.warp - BATCH_WARPS - 1;
    const int m = rowAt(b.lane % ROWS); // of x: a lane has the same in all pieces
    const int slot = keep.slots != nullptr && m < p.rows ? keep.slots[m] : -1;
    Piece next{b.t0 + group, 0, 0};
    if (next.tile < b.t1) next.fetch(p, b, fours);
#pragma unroll 1
    while (next.tile < b.t1) {
      const Piece now = next;
      if ((next.begin += 32 * Piece::FOURS) >= fours) next.begin = 0, next.tile += 2;
      if (next.tile < b.t1) next.fetch(p, b, fours);
      const int out = p.out[now.part];
      if (now.begin == 0) {
        if (b.lane == 0) barrierExpect(b.there + group * 8, PARTIALS * 4 / b.split * (b.split - 1)); // the others' part
        __syncwarp();
        barrierWait(b.there + group * 8, (now.tile - b.t0) / 2 & 1);
      }
      float4 v[Piece::FOURS];
#pragma unroll
      for (int k = 0; k < Piece::FOURS; k++) {
        const int at = now.at(k, b), c = at / ROWS * 4;
        v[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (at >= fours) continue;
        const float* const from = b.partials + group * PARTIALS + c / 8 * UNIT + at % ROWS * 8 + c % 8;
#pragma unroll 4
        for (int r = 0; r < b.split; r++) {
          const float4 u = *(const float4*)(from + r * (per / 8) * UNIT);
          v[k].x += u.x, v[k].y += u.y, v[k].z += u.z, v[k].w += u.w;
        }
      }
      // The place is free before y is written. Nobody waits for a group's last
      // place, and who would be told may be gone.
      __syncwarp();
      if (next.begin == 0 && now.tile + 2 < b.t1 && b.lane < b.split) barrierArriveRemote(remoteAddress(b.taken + group * 8, b.lane));
#pragma unroll
      for (int k = 0; k < Piece::FOURS; k++) {
        const int at = now.at(k, b), n = now.first(p, b) + at / ROWS * 4;
        if (at >= fours || m >= p.rows) continue;
        const float4 &a = now.bias[k], &r = now.residual[k];
        const float4 u = make_float4(finished(p, v[k].x, a.x, r.x), finished(p, v[k].y, a.y, r.y), finished(p, v[k].z, a.z, r.z), finished(p, v[k].w, a.w, r.w));
        store4(p.y[now.part] + (long long)m * out, n, out, out % 4 == 0, u);
        if (slot < 0 || keep.cache[now.part] == nullptr || n >= out) continue;
        const int head = n / keep.dim;
        const long long place = (slot + (long long)head * keep.headRows) * keep.dim + n - head * keep.dim;
        *(uint2*)((u16*)keep.cache[now.part] + place) = make_uint2(T::pack(u.x, u.y), T::pack(u.z, u.w));
      }
    }
  }

  // Four elements of a row of `out`, as far as they are there; even: all or none are.
  __device__ static __forceinline__ float4 load4(const float* row, int n, int out, bool even) {
    if (even) return n < out ? *(const float4*)(row + n) : make_float4(0.f, 0.f, 0.f, 0.f);
    return make_float4(n < out ? row[n] : 0.f, n + 1 < out ? row[n + 1] : 0.f, n + 2 < out ? row[n + 2] : 0.f, n + 3 < out ? row[n + 3] : 0.f);
  }
  __device__ static __forceinline__ void store4(float* row, int n, int out, bool even, float4 v) {
    if (even && n < out) {
      *(float4*)(row + n) = v;
    } else if (!even) {
      if (n < out) row[n] = v.x;
      if (n + 1 < out) row[n + 1] = v.y;
      if (n + 2 < out) row[n + 2] = v.z;
      if (n + 3 < out) row[n + 3] = v.w;
    }
  }
};
#endif
