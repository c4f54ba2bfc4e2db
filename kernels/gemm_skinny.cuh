// A skinny GEMM: linear layers of the rows of a batch, more than gemm_gemv.cuh is good at
// and few enough that a slice of x stays in shared memory, on GPUs of compute capability 9.0:
//
//	y = f(norm(x) W^T + b) + residual,   f(v) = v, max(v, 0) or gelu(v)
//
// or with GATES as gemm_gemv.cuh has it.
//
// A cluster of thread blocks has every so many tiles of 64 rows of W, and each of its
// blocks a slice of their columns, which it streams tile by tile. So a block makes operands
// of its slice of x once: each element as two 16-bit parts, which are rows of one right
// operand, or as one (x rounded to the weights' type). Where slices are short its lanes bring x and keep it in registers until then,
// else the copy engine brings it to where the operands will be. Two warp groups multiply,
// each every second tile. Their sums go into the shared memory of the block that finishes
// the rows of W (of a cluster's blocks each has its part of a tile), where a warp for each
// 16 rows of x adds them up in the order of the blocks while the others are at the next
// tile: bits do not vary from run to run, and nobody meets. Of more rows of x than a cluster
// takes another one has the rest, with the same tiles at the same time.
//
// Of a gated unit a tile of the gate comes before the tile of what it is for, and a warp group
// has both: an epilogue warp keeps the gate until it has the other.
#pragma once
#include "gemm_tiled.cuh"

constexpr int SKINNY_TILE = 64;                     // rows of W
constexpr int SKINNY_STAGE = 2 * SKINNY_TILE * 128; // bytes: two column blocks of a tile
constexpr int SKINNY_STAGES = 10;                   // of the ring, at most
constexpr int SKINNY_PACE = 4;                      // of these are on their way at a time before x is
constexpr int SKINNY_FIXED = 1024;                  // bytes of what lies before the ring
constexpr int SKINNY_WARPS = 8;                     // consumers; one more is the producer
// Epilogue warps of each of the two groups: one has 16 rows of x.
constexpr int skinnyEpilogues(int rows) { return rows > 16 ? rows / 16 : 1; }
constexpr int skinnyThreads(int rows) { return (SKINNY_WARPS + 1 + 2 * skinnyEpilogues(rows)) * 32; }

struct SkinnyParams {
  TensorMap x; // its rows, 32 floats of each
  LinearParams p;
  FusedAppend keep; // without slots there is nothing to keep
  int pairs;         // a box of W is two column blocks: all slices have an even number of them
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ float reciprocal(int n) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"((float)n));
  return r;
}

// FEW: fours of x that a lane keeps in registers, where there are no more. T is the Format of
// the weights, and Keys the Store of the cache's keys and values. Of elements of x there are PARTS.
template <class T, class Keys, int ROWS, int FEW, bool GATES = false, int PARTS = 2> struct SkinnyGemm {
  using Math = typename T::Math;
  static_assert(T::ready && Math::Operand::bytes == 2, "warp groups multiply what is in shared memory as it is");
  static constexpr int BLOCK = 64;                       // columns of a column block: 128 bytes
  static constexpr int X = PARTS * ROWS * 128;           // bytes of a column block of x
  static constexpr int FLOATS = 2 * ROWS * 128;          // of one as floats
  static constexpr bool ROUNDED = PARTS == 1;            // floats take more than operands: see Block::lent
  static constexpr int UNIT = 8 * ROWS;                  // floats: the sums of 8 rows of W
  static constexpr int UNITS = SKINNY_TILE / 8;          // of a tile
  static constexpr int PARTIALS = UNITS * UNIT;          // that a block sends of a tile, and is sent of a group's
  static constexpr int N = PARTS * ROWS / 8;             // products side by side
  static constexpr int MOST = 16;                        // blocks of a cluster
  static constexpr int MOMENTS = MOST * 2 * ROWS;        // floats: mean and sum of squares of each row, of each block of a cluster
  static constexpr int LANES = ROWS < 16 ? SKINNY_WARPS * 32 / ROWS : 16; // that have a row of the block's slice of x: fours of elements, in turn
  static constexpr int BESIDE = SKINNY_WARPS * 32 / LANES;                // rows that all lanes have side by side
  static constexpr int EACH = ROWS / BESIDE;                              // rows of a lane, so many apart
  static constexpr bool MANY_ROWS = ROWS > 16;                            // there may be more than ROWS
  static constexpr int EPILOGUES = skinnyEpilogues(ROWS);                 // warps of a group
  static constexpr int PIECES = ROWS * (UNITS / 2) * 2 / (32 * EPILOGUES); // of a tile, that an epilogue warp has at most

  struct Block {
    int warp, lane, rank, split, log; // log: of split, a power of two; what divides by it would take longer than a product
    int all, from, blocks; // column blocks: of x, and from where on how many are this block's
    int first, step, tiles;         // the cluster's first tile, from one to the next, and where all end; of a gated unit a tile is two
    bool gated;
    int row, rows;                  // of x: the cluster's first, and how many it has
    u32 ring, full, empty;          // full and empty: barriers of each stage
    u32 there, taken, merged, came; // of the partials' two places, of the moments, and of x
    u32 returned;                   // ROUNDED: of what was lent
    char* x;
    float *partials, *mine, *factors; // partials of all blocks, and the block's own, in two places each
    float *moments, *affine;          // of the norm, where `mine` will be; affine: gamma and beta
    float* bounds;                    // two: what no element of the slice's norm exceeds
    int most;                         // column blocks that a block of the cluster has at most
    // Blocks share out the rows of a tile by units. Of more blocks than units, half have
    // those of one group's tiles, half of the other's.
    __device__ __forceinline__ int units() const { return max(UNITS >> log, 1); } // that a block has
    __device__ __forceinline__ int owner(int group, int unit) const { return split > UNITS ? group * UNITS + unit : unit * split / UNITS; }
    __device__ __forceinline__ bool finishes(int group) const { return split <= UNITS || rank / UNITS == group; }
    __device__ __forceinline__ int unit() const { return rank % UNITS * units(); } // its first
    // Where the partials of a group's tiles come.
    __device__ __forceinline__ float* place(int group) const { return partials + (split > UNITS ? 0 : group * PARTIALS); }
    // The first column block of block `rank`.
    __device__ __forceinline__ int begin(int rank) const { return rank * all >> log; }
    __device__ __forceinline__ int count() const { return ((tiles - 1 - first) / step + 1) * (gated ? 2 : 1); } // of the cluster's tiles
    // Slices are so small that registers hold them.
    __device__ __forceinline__ bool few() const { return most * (BLOCK / 4) <= FEW * LANES; }
    // Stages at the end of the ring that are lent to x until it is operands: of one part these
    // are half as large as floats are.
    __device__ __forceinline__ int lent() const { return few() ? 0 : (most * (FLOATS - X) + SKINNY_STAGE - 1) / SKINNY_STAGE; }
    __device__ __forceinline__ char* floats() const { return x - most * (FLOATS - X); }
  };

  __device__ static __forceinline__ void run(const SkinnyParams& params) {
    const LinearParams& p = params.p;
    extern __shared__ __align__(1024) char memory[];
    Block b;
    b.warp = __shfl_sync(~0u, threadIdx.x / 32, 0), b.lane = threadIdx.x % 32;
    b.split = p.split, b.log = 31 - __clz(b.split), b.rank = blockIdx.x & (b.split - 1);
    const u32 cluster = blockIdx.x >> b.log, clusters = gridDim.x >> b.log, tiles = p.tiles[LINEAR_PARTS - 1];
    b.all = (p.in + BLOCK - 1) / BLOCK, b.from = b.begin(b.rank), b.blocks = b.begin(b.rank + 1) - b.from;
    // Rows of x that are more than a cluster takes are other clusters', side by side with the
    // same tiles: who is first brings these to the L2 cache.
    const u32 below = MANY_ROWS ? (p.rows + ROWS - 1) / ROWS : 1;
    b.gated = GATES && (p.activation & GATED);
    b.first = cluster / below, b.step = clusters / below, b.tiles = b.gated ? tiles / 2 : tiles;
    b.row = MANY_ROWS ? cluster % below * ROWS : 0, b.rows = MANY_ROWS ? min(p.rows - b.row, ROWS) : p.rows;
    b.most = (b.all + b.split - 1) >> b.log;
    // What has a place of its own comes first: nothing is asked for before there are
    // barriers, and to find them takes as long as to make some.
    b.full = sharedAddress(memory);
    b.empty = b.full + SKINNY_STAGES * 8, b.there = b.empty + SKINNY_STAGES * 8, b.taken = b.there + 16, b.merged = b.taken + 16, b.came = b.merged + 8;
    b.factors = (float*)(memory + 2 * SKINNY_STAGES * 8 + 48), b.bounds = b.factors + ROWS;
    b.returned = b.came + 8 + (ROWS + 2) * 4;
    static_assert(2 * SKINNY_STAGES * 8 + 48 + (ROWS + 2) * 4 + 8 <= SKINNY_FIXED);
    b.ring = b.full + SKINNY_FIXED;
    b.x = memory + SKINNY_FIXED + p.stages * SKINNY_STAGE;
    b.partials = (float*)(b.x + b.most * X);
    b.mine = b.partials + 2 * PARTIALS;
    b.moments = b.mine; // of each block of the cluster: mean and sum of squares of each row
    b.affine = b.moments + MOMENTS;
    // The producer makes all barriers: only who sends to other blocks waits until
    // these have theirs.
    WeightProducer producer{b.first, 0, 0, {0, 1}};
    if (b.warp == SKINNY_WARPS && b.lane == 0) {
      // Of all stages that there can be: one behind the other they take less than those of
      // fewer in a loop, and every launch waits for it.
#pragma unroll
      for (int s = 0; s < SKINNY_STAGES; s++) barrierInit(b.full + s * 8, 1), barrierInit(b.empty + s * 8, SKINNY_WARPS);
      for (int i = 0; i < 2; i++) barrierInit(b.there + i * 8, 1 + (b.units() + 1) / 2 * 32), barrierInit(b.taken + i * 8, min(b.split, UNITS) * EPILOGUES);
      barrierInit(b.merged, 1), barrierInit(b.came, 1);
      if constexpr (ROUNDED) barrierInit(b.returned, 1);
      opened();
      if (p.norm) barrierExpect(b.merged, b.split * b.rows * 8);
    }
    __syncwarp();
    clusterArriveRelaxed();
    __syncthreads();
    if (b.warp == SKINNY_WARPS) {
      if (b.lane == 0) {
        producer.begin(params, b);
        waitForEarlier();
        if constexpr (ROUNDED) producer.untilReturned(params, b);
        while (producer.tile < b.tiles) producer.next(params, b);
      }
    } else if (b.warp > SKINNY_WARPS) {
      if (b.warp == SKINNY_WARPS + 1) fetchPages(params.keep, b.lane);
      if (p.norm && b.warp <= SKINNY_WARPS + 2) bringAffine(p, b);
      waitForEarlier();
      if (!b.few() && b.warp <= SKINNY_WARPS + 2 && b.lane == 0) bringX(params, b);
      __syncwarp();
      clusterWait();
      runEpilogue(p, params.keep, b);
    } else {
      const Sums sums(b); // before x is waited for
      prepare(p, b);
      consume(p, b, sums);
    }
  }

  // Who reads gamma and beta, and who brings them.
  static constexpr ThreadGroup AFFINE{0, SKINNY_WARPS + 2, 2};

  // Float16 of gamma and beta each, and what no element of a norm exceeds that is of that
  // half: none of n is further than sqrt(n) deviations from their mean, nor than sqrt(n) of their
  // root mean squares from 0.
  __device__ static __forceinline__ void bringAffine(const LinearParams& p, const Block& b) {
    if (!p.early) waitForEarlier();
    const int half = b.warp - SKINNY_WARPS - 1, live = min(b.blocks * BLOCK, p.in - b.from * BLOCK);
    float top[2] = {0.f, 0.f};
#pragma unroll 2
    for (int c = (half * 32 + b.lane) * 4; c < live; c += 256)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float* const src = k ? p.beta : p.gamma;
        float4 v = k ? make_float4(0.f, 0.f, 0.f, 0.f) : make_float4(1.f, 1.f, 1.f, 1.f);
        if (src != nullptr) {
          v = *(const float4*)(src + b.from * BLOCK + c);
          if (k == 0) v.x += p.offset, v.y += p.offset, v.z += p.offset, v.w += p.offset;
        }
        *(float4*)(b.affine + k * b.most * BLOCK + c) = v;
        top[k] = fmaxf(top[k], fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
      }
    if constexpr (Math::narrow) {
#pragma unroll
      for (int i = 16; i > 0; i /= 2)
#pragma unroll
        for (int k = 0; k < 2; k++) top[k] = fmaxf(top[k], __shfl_xor_sync(~0u, top[k], i));
      if (b.lane == 0) b.bounds[half] = top[0] * sqrtf(p.in) + top[1];
    }
    AFFINE.arrive();
  }

  // Float16 of what the copy engine is asked for of x.
  __device__ static __forceinline__ void bringX(const SkinnyParams& params, const Block& b) {
    const int half = b.warp - SKINNY_WARPS - 1;
    if (half == 0) barrierExpect(b.came, b.blocks * FLOATS);
#pragma unroll 4
    for (int c = half; c < b.blocks * 2; c += 2) copyBox(sharedAddress(ROUNDED ? b.floats() : b.x) + c * (FLOATS / 2), &params.x, b.from * BLOCK + c * (BLOCK / 2), b.row, 0, b.came, readAgain());
  }

  // The producer: it asks for all that the block reads of the weights, stage after stage.
  struct WeightProducer {
    int tile, part, block;
    PipelineState stage; // parity 1: of a ring that is empty

    // Asks for what the ring has room for, if it depends on nothing. The memory serves
    // what it was asked for first: at a pace, x does not wait behind all of it, and the
    // block's other warps do not wait for that at all.
    __device__ __forceinline__ void begin(const SkinnyParams& params, const Block& b) {
      const LinearParams& p = params.p;
      const int n = p.early ? min(ROUNDED ? p.stages - b.lent() : p.stages, b.count() * ((b.blocks + 1) / 2)) : 0;
#pragma unroll 1
      for (int s = 0; s < n; s++) {
        if (s >= SKINNY_PACE) barrierWait(b.full + (s - SKINNY_PACE) * 8, 0);
        next(params, b);
      }
      letNextStart();
    }

    // Asks for what there is room for beside what is lent, and waits for that.
    __device__ __forceinline__ void untilReturned(const SkinnyParams& params, const Block& b) {
      const int lent = b.lent();
      if (lent == 0) return;
#pragma unroll 1
      while (tile < b.tiles && stage.index < params.p.stages - lent) next(params, b);
      barrierWait(b.returned, 0);
    }

    __device__ __forceinline__ void next(const SkinnyParams& params, const Block& b) {
      const LinearParams& p = params.p;
      while (!b.gated && part < LINEAR_PARTS - 1 && tile >= p.tiles[part]) part++;
      const int row = b.gated ? tile * SKINNY_TILE : (tile - (part > 0 ? p.tiles[part - 1] : 0)) * SKINNY_TILE;
      if (block < b.blocks) {
        barrierWait(b.empty + stage.index * 8, stage.parity);
        const u32 to = b.ring + stage.index * SKINNY_STAGE, bar = b.full + stage.index * 8;
        const u64 policy = MANY_ROWS && p.rows > ROWS ? readAgain() : readOnce();
        if (params.pairs) {
          barrierExpect(bar, SKINNY_STAGE);
          copyBox(to, &p.maps[part], 0, row, b.from + block, bar, policy);
        } else {
          const bool two = block + 1 < b.blocks;
          barrierExpect(bar, two ? SKINNY_STAGE : SKINNY_STAGE / 2);
          copyBox(to, &p.maps[part], (b.from + block) * BLOCK, row, 0, bar, policy);
          if (two) copyBox(to + SKINNY_STAGE / 2, &p.maps[part], (b.from + block + 1) * BLOCK, row, 0, bar, policy);
        }
        stage.next(p.stages);
      }
      if ((block += 2) >= b.blocks) {
        block = 0;
        if (b.gated) part ^= 1;
        if (!b.gated || part == 0) tile += b.step;
      }
    }
  };

  // A lane's share of the block's slice of x: every so many fours of a row's elements.
  // As floats, a column block has two lines of 128 bytes for each row, one of each half
  // of its columns; as operands, one of each part: two take the same two lines. The
  // next of a lane's fours is STEP bytes on, or as a float NEXT, and the next of its rows BELOW.
  struct Share {
    static constexpr int STEP = LANES / (BLOCK / 4) * X, NEXT = LANES / (BLOCK / 4) * FLOATS, BELOW = BESIDE * 128;
    int row, four, fours, capacity; // its first row; its first four, the end of those that are there and of those that there is a place for
    char *floats, *lead, *rest; // of the first four, as floats and as both parts of operands
    __device__ __forceinline__ Share(const LinearParams& p, const Block& b) {
      row = b.warp * (32 / LANES) + b.lane / LANES, four = b.lane % LANES;
      fours = max(min(b.blocks * BLOCK, p.in - b.from * BLOCK), 0) / 4, capacity = b.blocks * (BLOCK / 4);
      const u32 in = four % (BLOCK / 4);
      char* const block = b.x + four / (BLOCK / 4) * X;
      floats = (ROUNDED ? b.floats() + four / (BLOCK / 4) * FLOATS : block) + swizzled(in / 8 * ROWS + row, in % 8 * 16);
      lead = block + swizzled(row, in * 8), rest = block + swizzled(ROWS + row, in * 8);
    }
    __device__ __forceinline__ bool has(int i) const { return four + i * LANES < fours; }
    // Makes operands of number i of the fours of row r of the lane's.
    __device__ __forceinline__ void pack(int r, int i, float4 v, float up) const {
      v.x *= up, v.y *= up, v.z *= up, v.w *= up;
      const u32 a = Math::pack(v.x, v.y), b = Math::pack(v.z, v.w);
      *(uint2*)(lead + r * BELOW + i * STEP) = make_uint2(a, b);
      if constexpr (!ROUNDED) *(uint2*)(rest + r * BELOW + i * STEP) = make_uint2(Math::pack(v.x - Math::low(a), v.y - Math::high(a)), Math::pack(v.z - Math::low(b), v.w - Math::high(b)));
    }
  };

  // A lane's fours in registers: it brings them itself, all at once, which is faster than
  // to ask the copy engine for them. What is unrolled ends at the last that there is a place
  // for: each jump costs as much as a four.
  struct Few : Share {
    using Share::Share;
    static constexpr int UNROLL = EACH;
    float4 x[EACH][FEW];
    __device__ __forceinline__ bool ends(int i) const { return i * LANES >= this->capacity; }
    __device__ __forceinline__ void bring(const LinearParams& p, const Block& b) {
      const float* const from = p.x + (long long)(b.row + this->row) * p.in + b.from * BLOCK + this->four * 4;
      waitForEarlier();
#pragma unroll
      for (int i = 0; i < FEW; i++) {
        if (ends(i)) break;
#pragma unroll
        for (int r = 0; r < EACH; r++) {
          x[r][i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (this->row + r * BESIDE < b.rows && this->has(i)) x[r][i] = *(const float4*)(from + (long long)r * BESIDE * p.in + i * LANES * 4);
        }
      }
    }
    // f of the number of each four of row r of the lane's, and the four; and whether it is
    // there: it is zeros if not.
    template <class F> __device__ __forceinline__ void each(int r, F f) const {
#pragma unroll
      for (int i = 0; i < FEW; i++) {
        if (ends(i)) break;
        f(i, x[r][i], this->has(i));
      }
    }
    // Makes operands of f of each.
    template <class F> __device__ __forceinline__ void pack(int r, float up, F f) const {
#pragma unroll
      for (int i = 0; i < FEW; i++) {
        if (ends(i)) break;
        const float4 v = f(i, x[r][i], this->has(i));
        if (this->four + i * LANES < this->capacity) Share::pack(r, i, v, up);
      }
    }
  };

  // The same in shared memory, where the copy engine has left them.
  struct Many : Share {
    using Share::Share;
    static constexpr int UNROLL = 1; // rows of a lane
    __device__ __forceinline__ void bring(const LinearParams& p, const Block& b) { barrierWait(b.came, 0); }
    __device__ __forceinline__ float4 at(int r, int i) const { return *(const float4*)(this->floats + r * Share::BELOW + i * Share::NEXT); }
    template <class F> __device__ __forceinline__ void each(int r, F f) const {
#pragma unroll 4
      for (int i = 0; this->has(i); i++) f(i, at(r, i), true);
    }
    // The lanes that have a row of a column block have all read it before any writes. Operands of
    // one part begin behind half of the floats, so the last come first: then what they are written
    // over has been read.
    template <class F> __device__ __forceinline__ void pack(int r, float up, F f) const {
#pragma unroll 4
      for (int n = 0; n * LANES < this->capacity; n++) {
        const int i = ROUNDED ? (this->capacity - 1) / LANES - n : n;
        const bool there = this->four + i * LANES < this->capacity;
        float4 v;
        if (there) v = f(i, at(r, i), this->has(i));
        __syncwarp();
        if (there) Share::pack(r, i, v, up);
      }
    }
  };

  // What all lanes of a row have together; or MANY lanes side by side.
  template <int MANY = LANES, class F> __device__ static __forceinline__ float ofRow(float x, F f) {
#pragma unroll
    for (int i = MANY / 2; i > 0; i /= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
    return x;
  }

  __device__ static __forceinline__ void prepare(const LinearParams& p, const Block& b) {
    if (b.few()) {
      prepare<Few>(p, b);
    } else {
      prepare<Many>(p, b);
    }
    fenceAsync();
    syncWarps(SKINNY_WARPS);
    if constexpr (ROUNDED)
      if (threadIdx.x == 0) barrierArrive(b.returned);
  }

  // Makes operands of the block's slice of x, or of its norm, each row scaled by
  // a power of two where the type has few exponents. Everybody waits for this, and most
  // of it is executed once: it takes as long as its instructions take to come. So a warp
  // has rows side by side, and what does not depend on x is done before it is there.
  template <class Source> __device__ static __forceinline__ void prepare(const LinearParams& p, const Block& b) {
    Source x(p, b);
    const auto plus = [](float a, float b) { return a + b; };
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto largest = [](float4 v) { return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))); };
    const int other = b.lane % MOST; // a block of the cluster, whose moments the lane has
    const float part = p.norm == RMS_NORM ? 0.f : reciprocal(max(x.fours * 4, 1)), whole = reciprocal(p.in); // part 0: the norm is about 0, not about a mean
    const float count = other < b.split ? max(min(b.begin(other + 1) * BLOCK, p.in) - b.begin(other) * BLOCK, 0) : 0; // of a row's elements, its slice
    const bool sends = b.lane % LANES < b.split;
    const u32 to = other & (b.split - 1), moments = remoteAddress(sharedAddress(b.moments + (b.rank * ROWS + x.row) * 2), to), merged = remoteAddress(b.merged, to);
    const float2* const from = (const float2*)(b.moments + (other * ROWS + x.row) * 2);
    const float4 *const gamma = (const float4*)b.affine + x.four, *const beta = gamma + b.most * (BLOCK / 4);
    x.bring(p, b);
    float bound = 0.f; // nothing of a norm is larger
    if (p.norm) {
      AFFINE.sync();
      if constexpr (Math::narrow) bound = fmaxf(b.bounds[0], b.bounds[1]);
      clusterWait();
#pragma unroll Source::UNROLL
      for (int r = 0; r < EACH; r++) {
        float mean = 0.f, squares = 0.f;
        x.each(r, [&](int, float4 v, bool) { mean += (v.x + v.y) + (v.z + v.w); });
        mean = ofRow(mean, plus) * part;
        x.each(r, [&](int, float4 v, bool there) {
          const float m = there ? mean : 0.f;
          squares += ((v.x - m) * (v.x - m) + (v.y - m) * (v.y - m)) + ((v.z - m) * (v.z - m) + (v.w - m) * (v.w - m));
        });
        squares = ofRow(squares, plus);
        if (sends && x.row + r * BESIDE < b.rows) send2(moments + r * BESIDE * 8, merged, mean, squares);
      }
      barrierWait(b.merged, 0);
    }
#pragma unroll Source::UNROLL
    for (int r = 0; r < EACH; r++) {
      float mean = 0.f, f = 0.f, top = bound;
      const bool live = x.row + r * BESIDE < b.rows;
      if (p.norm) {
        // Means and sums of squares of the slices merge into the row's, by their distance
        // from the first mean.
        const float2 of = live && other < b.split ? from[r * BESIDE] : make_float2(0.f, 0.f);
        const float base = live ? from[r * BESIDE - other * ROWS].x : 0.f, d = of.x - base, sum = ofRow<MOST>(count * d, plus);
        const float squares = ofRow<MOST>(of.y + count * d * d, plus);
        mean = base + sum * whole, f = rsqrtf(fmaxf(squares - sum * (sum * whole), 0.f) * whole + p.eps);
      } else if constexpr (Math::narrow) {
        x.each(r, [&](int, float4 v, bool) { top = fmaxf(top, largest(v)); });
        top = ofRow(top, larger);
      }
      const int exponent = Math::narrow ? exponentOf(top) : 0;
      if (b.lane % LANES == 0) b.factors[x.row + r * BESIDE] = powerOf(exponent);
      if (p.norm) {
        x.pack(r, powerOf(-exponent), [&](int i, float4 v, bool there) {
          if (!there) return v;
          const float4 g = gamma[i * LANES], b = beta[i * LANES];
          return make_float4((v.x - mean) * f * g.x + b.x, (v.y - mean) * f * g.y + b.y, (v.z - mean) * f * g.z + b.z, (v.w - mean) * f * g.w + b.w);
        });
      } else {
        x.pack(r, powerOf(-exponent), [&](int, float4 v, bool) { return v; });
      }
    }
    if (!p.norm) clusterWait();
  }

  // The products of a stage's column block, which is one of x's too.
  __device__ static __forceinline__ void multiply(float (&sums)[N][4], u64 w, u64 x) {
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) Wgmma<PARTS * ROWS>::template shared<Math>(sums, w + k * 2, x + k * 2, 1); // 32 bytes on
  }
  // Ends a stage's products, and waits for all but so many stages' products.
  template <int MORE> __device__ static __forceinline__ void multiplied() {
    if (MORE > 0) wgmmaCommit();
    wgmmaWait<MORE>();
  }

  // Where a warp's two units of sums are written, and for a lane of each where they are
  // sent. Those that this block finishes are in their place at once. A group has a place
  // of its own for them, there as here.
  struct Sums {
    float* mine[2];
    bool here;
    int owner;                // of the lane's unit
    u32 from, bar, to, taken; // bar and to are the owner's
    __device__ __forceinline__ explicit Sums(const Block& b) {
      const int group = b.warp / 4, units = b.units();
      const auto slot = [&](int unit) { return (b.rank * units + (unit & (units - 1))) * UNIT; }; // in the owner's place
      here = false;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int unit = b.warp % 4 * 2 + h;
        const bool own = b.owner(group, unit) == b.rank;
        mine[h] = (own ? b.place(group) + slot(unit) : b.mine + (b.warp * 2 + h) * UNIT) + b.lane % 4 * 8 + b.lane / 4;
        here = here || own;
      }
      const int unit = b.warp % 4 * 2 + (b.lane & 1);
      owner = b.owner(group, unit), taken = b.taken + group * 8;
      from = sharedAddress(b.mine + (b.warp * 2 + (b.lane & 1)) * UNIT), bar = remoteAddress(b.there + group * 8, owner);
      to = remoteAddress(sharedAddress(b.place(group) + slot(unit)), owner);
    }
  };

  // All tiles: the sums of this block's columns go to who finishes them. A stage is
  // given back when the products of the next one are on their way.
  __device__ static __forceinline__ void consume(const LinearParams& p, const Block& b, const Sums& to) {
    const int group = b.warp / 4, t = b.lane & 3;
    PipelineState stage{0, 0};
    const u64 ring = rowOperand(b.ring), x = rowOperand(sharedAddress(b.x)); // each 16 bytes more are one more
    float down[ROWS / 8][2];                                              // what the sums of rows 2t and 2t+1 of eight of x are multiplied by
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) down[j][0] = b.factors[j * 8 + 2 * t], down[j][1] = b.factors[j * 8 + 2 * t + 1];
#pragma unroll 1
    for (int nth = 0, count = b.count(); nth < count; nth++) {
      if (((b.gated ? nth / 2 : nth) & 1) != group) { // the other group's: this one keeps pace, so that no barrier is a round ahead of it
#pragma unroll 1
        for (int c = 0; c < b.blocks; c += 2) {
          barrierWait(b.full + stage.index * 8, stage.parity);
          __syncwarp(); // no lane is a round ahead of another
          if (b.lane == 0) barrierArrive(b.empty + stage.index * 8);
          stage.next(p.stages);
        }
        continue;
      }
      float sums[N][4];
#pragma unroll
      for (int i = 0; i < N; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.f;
      int before = -1;
#pragma unroll 1
      for (int c = 0; c < b.blocks; c += 2) {
        barrierWait(b.full + stage.index * 8, stage.parity);
        const u64 w = ring + stage.index * (SKINNY_STAGE / 16);
        wgmmaFence();
        multiply(sums, w, x + c * (X / 16));
        if (c + 1 < b.blocks) multiply(sums, w + SKINNY_STAGE / 32, x + (c + 1) * (X / 16));
        multiplied<1>();
        if (before >= 0 && b.lane == 0) barrierArrive(b.empty + before * 8);
        before = stage.index;
        stage.next(p.stages);
      }
      multiplied<0>();
      pinned(sums);
      if (before >= 0 && b.lane == 0) barrierArrive(b.empty + before * 8);
      const int earlier = b.gated ? nth / 4 * 2 + (nth & 1) : nth / 2; // tiles of the group before this one
      if (b.gated ? earlier > 0 : nth >= 2) barrierWait(to.taken, (earlier - 1) & 1);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
          for (int k = 0; k < 2; k++) to.mine[h][(j * 8 + k * 4) * 8] = (ROUNDED ? sums[j][2 * h + k] : sums[j][2 * h + k] + sums[j + N / 2][2 * h + k]) * down[j][k];
      fenceAsync();
      __syncwarp();
      if (b.lane < 2 && to.owner != b.rank) sendBlock(to.to, to.bar, to.from, UNIT * 4);
      if (to.here) barrierArrive(b.there + group * 8);
    }
  }

  // Row `at` of a unit is row m of x: the order in which lanes of different m write to
  // different banks.
  __device__ static __forceinline__ int rowAt(int at) { return at / 8 * 8 + at % 4 * 2 + at / 4 % 2; }

  // What is next for an epilogue warp: some of a tile's rows, four elements of y
  // a lane. Where they go and what is added to them is found out long before it is
  // needed: a bias comes from memory.
  struct Piece {
    int tile, part, begin; // begin: of the tile's fours
    bool even;             // all or none of a four are there
    int there;             // elements of the lane's four
    const float* from;     // the first block's part of them
    float* to;
    typename Keys::Element* kept; // null: the cache has nothing of it
    float4 bias, residual;

    // A lane's fours are of the same row m of x in all pieces, which is kept in `slot`.
    __device__ __forceinline__ void fetch(const LinearParams& p, const FusedAppend& keep, const Block& b, const float* partials, int m, int slot) {
      while (!b.gated && part < LINEAR_PARTS - 1 && tile >= p.tiles[part]) part++;
      const int c = (begin + b.lane) / ROWS * 4; // of the block's part of the tile
      const int out = p.out[part], n = (b.gated ? tile : tile - (part > 0 ? p.tiles[part - 1] : 0)) * SKINNY_TILE + b.unit() * 8 + c;
      even = out % 4 == 0;
      there = c < b.units() * 8 && m < b.rows ? min(out - n, 4) : 0;
      from = partials + (there > 0 ? c / 8 * UNIT + c % 8 : 0);
      const long long place = (long long)(b.row + m) * out + n;
      to = p.y[b.gated ? 0 : part] + place, kept = nullptr;
      bias = residual = make_float4(0.f, 0.f, 0.f, 0.f);
      if (there <= 0) return;
      if (p.b[part] != nullptr) bias = load4(p.b[part] + n, there, even);
      if (p.residual != nullptr && (!b.gated || part == 1)) residual = load4(p.residual + place, there, even);
      if (slot < 0 || keep.cache[part] == nullptr) return;
      const int head = n / keep.dim;
      kept = (typename Keys::Element*)keep.cache[part] + (slot + (long long)head * keep.headRows) * keep.dim + n - head * keep.dim;
    }
  };

  // The sum of four elements that each of so many blocks has sent; a tile's units are
  // what all of them have sent together.
  template <int BLOCKS> __device__ static __forceinline__ float4 sumOf(const float* from) {
    float4 u[BLOCKS];
#pragma unroll
    for (int r = 0; r < BLOCKS; r++) u[r] = *(const float4*)(from + r * (UNITS / BLOCKS) * UNIT);
#pragma unroll
    for (int r = 1; r < BLOCKS; r++) u[0].x += u[r].x, u[0].y += u[r].y, u[0].z += u[r].z, u[0].w += u[r].w;
    return u[0];
  }
  __device__ static __forceinline__ float4 sumOf(const float* from, int split) {
    if (split == 2) return sumOf<2>(from);
    if (split == 4) return sumOf<4>(from);
    float4 u = sumOf<8>(from);
    if (split == MOST) {
      const float4 v = sumOf<8>(from + 8 * UNIT);
      u.x += v.x, u.y += v.y, u.z += v.z, u.w += v.w;
    }
    return u;
  }

  // Adds up what the cluster's blocks have sent of the rows that are this block's, of
  // the tiles of one group: how long y is on its way to memory holds up nothing else.
  __device__ static __forceinline__ void runEpilogue(const LinearParams& p, const FusedAppend& keep, const Block& b) {
    const int fours = ROWS * b.units() * 2, warp = b.warp - SKINNY_WARPS - 1, group = warp & 1;
    const int begin = warp / 2 * 32, at = (begin + b.lane) % ROWS, m = rowAt(at); // a group's warps have 32 of the fours in turn
    const int slot = keep.slots != nullptr && m < b.rows ? keep.slots[b.row + m] : -1;
    const float* const partials = b.place(group) + at * 8;
    const u32 there = b.there + group * 8, others = (b.split - 1) * b.units() * UNIT * 4; // bytes of the others' parts
    Piece next{b.finishes(group) ? b.first + group * b.step : b.tiles, 0, begin};
    u32 parity = 0;
    float4 gates[PIECES] = {}; // of a gated unit, until the rest of it is there
    if (next.tile < b.tiles) {
      next.fetch(p, keep, b, partials, m, slot);
    } else {
      clusterArriveRelaxed();
    }
#pragma unroll 1
    while (next.tile < b.tiles) {
      const Piece now = next;
      if ((next.begin += 32 * EPILOGUES) >= fours) next.begin = begin, next.tile += b.gated && (next.part ^= 1) ? 0 : 2 * b.step;
      const auto more = [&] { return now.tile + 2 * b.step < b.tiles || (b.gated && now.part == 0); }; // the group has a tile behind it
      if (next.tile < b.tiles) next.fetch(p, keep, b, partials, m, slot);
      if (now.begin == begin) {
        if (begin == 0 && b.lane == 0) barrierExpect(there, others);
        __syncwarp();
        barrierWait(there, parity);
        parity ^= 1;
        // Copies out of a block's memory end when they have come: then it may leave. Who has left counts as here.
        __syncwarp();
        if (!more()) clusterArriveRelaxed();
      }
      const float4 v = sumOf(now.from, b.split);
      // The place is free before y is written. Nobody waits for a group's last
      // place, and who would be told may be gone.
      fenceAsync();
      __syncwarp();
      if (next.begin == begin && more() && b.lane < b.split) barrierArriveRemote(remoteAddress(b.taken + group * 8, b.lane));
      if (now.there <= 0) continue;
      const float4 &a = now.bias, &r = now.residual;
      if constexpr (GATES) {
        float4 u = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
        const float4 up = u;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          if (!b.gated || now.begin != begin + i * 32 * EPILOGUES) continue;
          if (now.part == 0) gates[i] = u;
          u = gates[i];
        }
        if (b.gated && now.part == 0) continue;
        const int f = p.activation & ~GATED;
        u = make_float4(activatedAny(f, u.x), activatedAny(f, u.y), activatedAny(f, u.z), activatedAny(f, u.w));
        if (b.gated) u.x *= up.x, u.y *= up.y, u.z *= up.z, u.w *= up.w;
        store4(now.to, now.there, now.even, make_float4(u.x + r.x, u.y + r.y, u.z + r.z, u.w + r.w));
        continue;
      }
      const float4 u = make_float4(finished(p, v.x, a.x, r.x), finished(p, v.y, a.y, r.y), finished(p, v.z, a.z, r.z), finished(p, v.w, a.w, r.w));
      store4(now.to, now.there, now.even, u);
      if (now.kept != nullptr) Keys::store4(now.kept, 0, u);
    }
    clusterWait();
  }

  // Four elements of a row, as many of them as are there; even: that is all.
  __device__ static __forceinline__ float4 load4(const float* from, int there, bool even) {
    if (even) return *(const float4*)from;
    return make_float4(from[0], there > 1 ? from[1] : 0.f, there > 2 ? from[2] : 0.f, there > 3 ? from[3] : 0.f);
  }
  __device__ static __forceinline__ void store4(float* to, int there, bool even, float4 v) {
    if (even) {
      *(float4*)to = v;
    } else {
      to[0] = v.x;
      if (there > 1) to[1] = v.y;
      if (there > 2) to[2] = v.z;
      if (there > 3) to[3] = v.w;
    }
  }
};
#endif
