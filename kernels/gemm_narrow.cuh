// Linear layers whose weights have 8 or 4 bits, in the order of internal/weight/packed.go. Weights become numbers of 16 bits in
// registers, without rounding. W is the left operand of the products, and x, in one or two parts of float16, the right one.
#pragma once
#include "gemm_gemv.cuh"

constexpr int NARROW_THREADS = 256;
constexpr int NARROW_TILE = 256;      // rows of W
constexpr int NARROW_CHUNK = 512;     // bytes of 16 rows of W: 32 columns of 8 bits, or 64 of 4 bits
constexpr int NARROW_CHUNKS = 2;      // of a unit, the columns of a stage
constexpr int NARROW_STRIPS = NARROW_TILE / 16;
constexpr int NARROW_WEIGHTS = NARROW_CHUNKS * NARROW_STRIPS * NARROW_CHUNK; // bytes of a stage
constexpr int NARROW_PLANE = 2048;    // bytes of a stage's scales, and of its zeros or minima

enum : int { NO_SECOND = 0, ZEROS = 1, MINIMA = 2 }; // what the second plane has

// A launch for one block of rows. Blocks of threads share out the units of all tiles evenly, so a tile may have several blocks.
struct NarrowParams {
  const char *w, *scales, *second;
  const char* x;      // operands, as narrowOperands makes them; of a launch by clusters, float32
  const int* order;   // of the columns of x, for a launch by clusters; nullptr: columns are in order
  const float* sums;  // of x, for minima
  const float* down;  // a factor of each row
  const float *bias, *residual;
  float *y, *y2;      // y2 has the outputs from `split` on
  float* partials;
  u32* counters;      // of tiles: blocks that have stored their sums
  int blocks;         // of threads
  int rows, parts;
  int columns;        // of operands: rows times parts, and 0 up to a multiple of 8
  int out, split;
  int chunks, units;  // of a tile
  int group, groups;  // group: 32 columns each, 0: a row
  int fresh, full;    // bits of the 32 columns of a unit with which a group begins, and with which it ends
  int shift;          // log2 of the 32 columns of a group, at most those of a unit
  int kind, zero;     // zero: of all weights, without a plane
  int factor;         // bytes of a scale, and of a minimum: 4 or 2
  int stages, stage;  // stage: bytes
  int in, ranks;      // of a launch by clusters. ranks: thread blocks of a cluster
  int activation, early;
  u32 magic;          // of decoders
  int ahead, late;    // stages behind the ring that come to the L2 cache early; stages before the end where the next launch may start
};

// Two products and sums of float16.
__device__ __forceinline__ u32 fma2(u32 x, u32 y, u32 z) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(z));
  return r;
}

// Decoders turn a lane's 16 bytes of a chunk into the left operands of 32 columns. An integer n below 1024 is the float16 number 1024+n
// without its leading bits, which are `magic`, a parameter: of two constants of an instruction, one must be in a register.

struct NarrowInt8 { // integers + 128
  static constexpr int K32 = 2; // 32 columns each, of a unit
  static constexpr bool zeros = false;
  __device__ static __forceinline__ void two(u32& even, u32& odd, u32 w, u32 magic) {
    constexpr u32 ONE = 0x3c003c00, LESS = 0xe480e480; // -1152
    even = fma2((w & 0x00ff00ff) | magic, ONE, LESS);
    odd = fma2((w >> 8 & 0x00ff00ff) | magic, ONE, LESS);
  }
  __device__ static __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int, const u32 (&)[2], u32 magic) {
    two(a[0][0], a[0][1], w.x, magic), two(a[0][2], a[0][3], w.y, magic);
    two(a[1][0], a[1][1], w.z, magic), two(a[1][2], a[1][3], w.w, magic);
  }
};

struct NarrowE4M3 { // times 2^-8
  static constexpr int K32 = 2;
  static constexpr bool zeros = false;
  __device__ static __forceinline__ u32 wide(u32 w) { return (w & 0x7f007f00) >> 1 | (w & 0x80008000); }
  __device__ static __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int, const u32 (&)[2], u32) {
    a[0][0] = wide(w.x << 8), a[0][1] = wide(w.x), a[0][2] = wide(w.y << 8), a[0][3] = wide(w.y);
    a[1][0] = wide(w.z << 8), a[1][1] = wide(w.z), a[1][2] = wide(w.w << 8), a[1][3] = wide(w.w);
  }
};

struct NarrowInt4 {
  static constexpr int K32 = 4;
  static constexpr bool zeros = true;
  // What is added for the zeros of rows lane/4 and lane/4+8: -1024 - low, and -64 - high.
  __device__ static __forceinline__ void less(u32 (&to)[2], u32 low, u32 high) { to[0] = 0xe400e400 + low * 0x00010001, to[1] = 0xd400d400 + high * 0x00100010; }
  __device__ static __forceinline__ void one(u32 (&a)[4], u32 w, const u32 (&less)[2], u32 magic) {
    constexpr u32 ONE = 0x3c003c00, SIXTEENTH = 0x2c002c00;
    a[0] = fma2((w & 0x000f000f) | magic, ONE, less[0]);
    a[1] = fma2((w & 0x00f000f0) | magic, SIXTEENTH, less[1]);
    a[2] = fma2((w >> 8 & 0x000f000f) | magic, ONE, less[0]);
    a[3] = fma2((w >> 8 & 0x00f000f0) | magic, SIXTEENTH, less[1]);
  }
  __device__ static __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int half, const u32 (&less)[2], u32 magic) {
    one(a[0], half ? w.z : w.x, less, magic);
    one(a[1], half ? w.w : w.y, less, magic);
  }
};

__device__ __forceinline__ uint4 loadShared16(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr) : "memory");
  return v;
}
__device__ __forceinline__ u32 loadShared2(u32 addr) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(addr) : "memory");
  return v;
}
// The scale at an index of a plane of numbers of 2 or 4 bytes.
__device__ __forceinline__ float loadFactor(u32 plane, int i, int bytes) { return bytes == 4 ? loadShared(plane + i * 4) : Float16::low(loadShared2(plane + i * 2)); }

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copyBulk(u32 dst, const char* src, int bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
#endif

// NT blocks of eight columns. A warp has so many strips of W.
template <class D, int NT, int STRIPS = 2> struct NarrowGemm {
  static constexpr int THREADS = NARROW_STRIPS / STRIPS * 32; // that have sums
  const NarrowParams& p;
  const u32 ring;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
  const int firstRow, rowStep; // of the warp's strips
  float acc[STRIPS][NT][4], part[STRIPS][NT][4];

  __device__ __forceinline__ NarrowGemm(const NarrowParams& p, u32 ring) : NarrowGemm(p, ring, threadIdx.x / 32 * 32, 16) {}
  __device__ __forceinline__ NarrowGemm(const NarrowParams& p, u32 ring, int firstRow, int rowStep) : p(p), ring(ring), firstRow(firstRow), rowStep(rowStep) {
    const int all = (p.out + NARROW_TILE - 1) / NARROW_TILE * p.units;
    each = all / p.blocks, more = all - each * p.blocks;
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < STRIPS * NT * 4; i++) (&acc[0][0][0])[i] = 0.f, (&part[0][0][0])[i] = 0.f;
  }

  __device__ __forceinline__ u32 planes(int slot) const { return ring + slot * p.stage + NARROW_WEIGHTS; }
  __device__ __forceinline__ u32 operands(int slot) const { return planes(slot) + (p.group == 0 ? 0 : p.kind == NO_SECOND ? NARROW_PLANE : 2 * NARROW_PLANE); }

  // What the next unit's copies read. Each lane copies the weights that it multiplies; other threads copy scales.
  int loadTile, loadUnit;           // unit: of the tile
  const char *loadW, *loadScales;   // of the thread; loadScales: nullptr for threads that copy none
  const char* loadX;
  int strips, loadGroup, loadPlace; // groups up to the thread's, and its place in the stage
  int turn;                         // units of a group that have been copied

  __device__ __forceinline__ void seek(int unit) {
    loadTile = unit / p.units;
    loadUnit = unit - loadTile * p.units;
    enterTile();
  }
  __device__ __forceinline__ void enterTile() {
    strips = min(NARROW_STRIPS, (p.out - loadTile * NARROW_TILE + 15) / 16);
    loadW = p.w + (long long)loadTile * p.chunks * (NARROW_STRIPS * NARROW_CHUNK) + ((long long)loadUnit * NARROW_CHUNKS * strips + warp * 2) * NARROW_CHUNK + lane * 16;
    loadScales = nullptr;
    if (p.group == 0) return;
    const int pieces = strips * p.factor; // of 16 bytes, of a group
    const int i = threadIdx.x % 128, of = i / pieces, piece = i - of * pieces;
    const bool second = threadIdx.x >= 128;
    if (of >= (D::K32 >> p.shift) || second && p.kind == NO_SECOND) return;
    const int each = max(1, p.group / D::K32); // units of a group
    turn = loadUnit % each;
    loadGroup = (loadUnit / each) * (D::K32 >> p.shift) + of;
    loadPlace = (second ? NARROW_PLANE : 0) + of * NARROW_TILE * p.factor + piece * 16;
    loadScales = (second ? p.second : p.scales) + ((long long)loadTile * NARROW_TILE * p.groups + loadGroup * strips * 16) * p.factor + piece * 16;
  }

  // Begins the copies of a unit's weights and scales. advance goes on to the next unit.
  __device__ __forceinline__ void loadWeights(int slot) {
    const u32 to = ring + slot * p.stage, mine = to + warp * (2 * NARROW_CHUNK) + lane * 16;
    const int chunk = strips * NARROW_CHUNK;
    static_assert(NARROW_CHUNKS == 2, "a unit has two chunks");
    if (strips == NARROW_STRIPS && loadUnit * NARROW_CHUNKS + 1 < p.chunks) {
      copy16(mine, loadW, true);
      copy16(mine + NARROW_CHUNK, loadW + NARROW_CHUNK, true);
      copy16(mine + NARROW_STRIPS * NARROW_CHUNK, loadW + NARROW_STRIPS * NARROW_CHUNK, true);
      copy16(mine + (NARROW_STRIPS + 1) * NARROW_CHUNK, loadW + (NARROW_STRIPS + 1) * NARROW_CHUNK, true);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool there = loadUnit * NARROW_CHUNKS + i / 2 < p.chunks && warp * 2 + i % 2 < strips;
        copy16(mine + (i / 2 * NARROW_STRIPS + i % 2) * NARROW_CHUNK, there ? loadW + i / 2 * chunk + i % 2 * NARROW_CHUNK : p.w, there);
      }
    }
    loadW += NARROW_CHUNKS * chunk;
    if (loadScales == nullptr) return;
    const bool there = loadGroup < p.groups;
    copy16(to + NARROW_WEIGHTS + loadPlace, there ? loadScales : p.scales, there);
    if (++turn * D::K32 < p.group) return;
    turn = 0;
    loadGroup += D::K32 >> p.shift;
    loadScales += (D::K32 >> p.shift) * strips * 16 * p.factor;
  }

  // Begins the copies of the operands of a unit of any tile.
  __device__ __forceinline__ void loadOperands(int unit, int slot) {
    const u32 to = operands(slot) + threadIdx.x * 16;
    const int n = D::K32 * p.columns;
    if (unit == 0) loadX = p.x + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < (D::K32 * NT * 32 + NARROW_THREADS - 1) / NARROW_THREADS; i++)
      if (i * NARROW_THREADS + threadIdx.x < n * 4) copy16(to + i * (NARROW_THREADS * 16), loadX + i * (NARROW_THREADS * 16), true);
    loadX += n * 64;
    if (p.kind == MINIMA && threadIdx.x < n) // a unit has at most as many columns of operands as threads
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + n * 64 - threadIdx.x * 12), "l"(p.sums + unit * n + threadIdx.x) : "memory");
  }
  __device__ __forceinline__ void advance() {
    if (++loadUnit < p.units) return;
    loadUnit = 0, loadTile++;
    if (loadTile * NARROW_TILE < p.out) enterTile();
  }

  // Adds the sums of a group times its scale: those of rows g and g+8 of both strips.
  __device__ __forceinline__ void addPart(const float (&scale)[STRIPS][2]) {
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[s][n][i] += scale[s][i / 2] * part[s][n][i], part[s][n][i] = 0.f;
  }

  // The products with 32 columns, number K of a unit. x is the lane's first operand of them, and plane its first scale.
  template <int K> __device__ __forceinline__ void multiplyDeep(const uint4 (&w)[2], u32 (&less)[2][2], u32 x, u32 plane, u32 sums) {
    const int row = (K >> p.shift) * NARROW_TILE;
    if constexpr (D::zeros)
      if (p.kind == ZEROS && (p.fresh >> K & 1))
#pragma unroll
        for (int s = 0; s < 2; s++) D::less(less[s], loadShared2(plane + NARROW_PLANE + row * 2 + s * 32), loadShared2(plane + NARROW_PLANE + row * 2 + s * 32 + 16));
    u32 a[2][2][4];
    D::decode(a[0], w[0], K % (D::K32 / NARROW_CHUNKS), less[0], p.magic);
    D::decode(a[1], w[1], K % (D::K32 / NARROW_CHUNKS), less[1], p.magic);
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (n <= NT / 2 || n * 8 < p.columns) { // fewer have another kernel
        const uint4 b = loadShared16(x + n * 512);
#pragma unroll
        for (int s = 0; s < 2; s++) MmaF16::mma(part[s][n], a[s][0], b.x, b.y);
#pragma unroll
        for (int s = 0; s < 2; s++) MmaF16::mma(part[s][n], a[s][1], b.z, b.w);
      }
    if (!(p.full >> K & 1)) return;
    float scale[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) scale[i / 2][i % 2] = loadFactor(plane + row * p.factor, i * 8, p.factor);
    addPart(scale);
    if (p.kind != MINIMA) return; // of groups of 32 columns
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float least = loadFactor(plane + NARROW_PLANE + row * p.factor, i * 8, p.factor);
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (n <= NT / 2 || n * 8 < p.columns)
#pragma unroll
          for (int e = 0; e < 2; e++) acc[i / 2][n][i % 2 * 2 + e] += least * loadShared(sums + n * 32 + e * 4);
    }
  }

  __device__ __forceinline__ void multiply(int slot) {
    const u32 weights = ring + slot * p.stage + warp * (2 * NARROW_CHUNK) + lane * 16, plane = planes(slot) + (warp * 32 + g) * p.factor;
    const u32 deep = p.columns * 64, x = operands(slot) + g * 64 + q * 16, sums = operands(slot) + D::K32 * deep + q * 8;
    u32 less[2][2] = {};
    if constexpr (D::zeros) D::less(less[0], p.zero, p.zero), D::less(less[1], p.zero, p.zero);
#define NARROW_CHUNK_OF(c) {loadShared16(weights + (c) * (NARROW_STRIPS * NARROW_CHUNK)), loadShared16(weights + (c) * (NARROW_STRIPS * NARROW_CHUNK) + NARROW_CHUNK)}
    const uint4 first[2] = NARROW_CHUNK_OF(0), second[2] = NARROW_CHUNK_OF(1);
#undef NARROW_CHUNK_OF
    multiplyDeep<0>(first, less, x, plane, sums);
    if constexpr (D::K32 == 2) {
      multiplyDeep<1>(second, less, x + deep, plane, sums + p.columns * 4);
    } else {
      multiplyDeep<1>(first, less, x + deep, plane, sums + p.columns * 4);
      multiplyDeep<2>(second, less, x + 2 * deep, plane, sums + 2 * p.columns * 4);
      multiplyDeep<3>(second, less, x + 3 * deep, plane, sums + 3 * p.columns * 4);
    }
  }

  __device__ __forceinline__ void store(int o, int row, float v) const {
    if (o >= p.out || row >= p.rows) return;
    v *= p.down[row];
    if (p.bias != nullptr) v += p.bias[o];
    v = activated(p.activation, v);
    if (p.residual != nullptr) v += p.residual[(long long)row * p.out + o];
    if (o < p.split) p.y[(long long)row * p.split + o] = v;
    else p.y2[(long long)row * (p.out - p.split) + o - p.split] = v;
  }

  __device__ __forceinline__ void storeTile(int tile) const {
    const bool pairs = p.parts == 2; // a row has two columns
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int column = n * 8 + 2 * q;
#pragma unroll
      for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int o = tile * NARROW_TILE + firstRow + s * rowStep + i * 8 + g;
          const float a = acc[s][n][2 * i], b = acc[s][n][2 * i + 1];
          store(o, pairs ? column / 2 : column, pairs ? a + b : a);
          if (!pairs) store(o, column + 1, b);
        }
    }
  }

  // A block has `each` units or, of the first `more` blocks, one more.
  int each, more;
  __device__ __forceinline__ int beginOf(int block) const { return block * each + min(block, more); }
  __device__ __forceinline__ int blockOf(int unit) const { return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each; }
  // The place of a block's sums of a tile. A block has parts of two tiles at most: of the tile that it begins in, and of the tile that it
  // ends in. first: the block has the first unit of `tile`; other blocks begin in `tile`.
  __device__ __forceinline__ float4* partialOf(int block, bool first, int tile) const {
    return (float4*)p.partials + (long long)(2 * block + (first && beginOf(block) < tile * p.units)) * (2 * NT * NARROW_THREADS) + threadIdx.x;
  }

  // Ends the block's part of a tile, from unit `first` up to unit `end`. The last block of a tile adds the sums of all, in their order, or
  // with LATER a launch behind does.
  template <bool LATER = false> __device__ __forceinline__ void finish(int tile, int first, int end) {
    if (p.group == 0) {
      float scale[STRIPS][2];
#pragma unroll
      for (int i = 0; i < 2 * STRIPS; i++) {
        const int o = tile * NARROW_TILE + firstRow + i / 2 * rowStep + i % 2 * 8 + g;
        scale[i / 2][i % 2] = o < p.out ? ((const float*)p.scales)[o] : 0.f;
      }
      addPart(scale);
    }
    if constexpr (LATER) {
      if (end - first < p.units) return storeSums(partialOf(blockIdx.x, (int)blockIdx.x == blockOf(tile * p.units), tile));
    } else {
      if (end - first < p.units && !gather(tile)) return;
    }
    storeTile(tile);
    clear();
  }

  __device__ __forceinline__ void storeSums(float4* to) {
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int n = 0; n < NT; n++) to[(s * NT + n) * THREADS] = make_float4(acc[s][n][0], acc[s][n][1], acc[s][n][2], acc[s][n][3]);
    clear();
  }

  // Stores the block's sums of a part of a tile. The last block gets the sums of all, in their order; the others get false.
  __device__ __forceinline__ bool gather(int tile) {
    const int from = blockOf(tile * p.units), to = blockOf((tile + 1) * p.units - 1);
    storeSums(partialOf(blockIdx.x, (int)blockIdx.x == from, tile));
    __threadfence();
    const u32 word = ring + p.stages * p.stage;
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 before;
      asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p.counters + tile) : "memory");
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(word), "r"(before) : "memory");
    }
    __syncthreads();
    if (__float_as_int(loadShared(word)) != to - from) return false;
    __threadfence();
    constexpr int TOGETHER = NT < 8 ? 8 / NT : 1; // blocks whose sums are on their way together
#pragma unroll 1
    for (int block = from; block <= to; block += TOGETHER) {
      float4 v[TOGETHER][2 * NT];
#pragma unroll
      for (int b = 0; b < TOGETHER; b++) {
        const float4* const other = partialOf(min(block + b, to), block + b == from, tile);
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) v[b][i] = block + b <= to ? __ldcg(other + i * NARROW_THREADS) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
      for (int b = 0; b < TOGETHER; b++)
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
          float(&sum)[4] = acc[i / NT][i % NT];
          sum[0] += v[b][i].x, sum[1] += v[b][i].y, sum[2] += v[b][i].z, sum[3] += v[b][i].w;
        }
    }
    return true;
  }

  __device__ static __forceinline__ void run(const NarrowParams& p) {
    extern __shared__ __align__(128) char shared[];
    NarrowGemm me(p, sharedAddress(shared));
    const int begin = me.beginOf(blockIdx.x), end = me.beginOf(blockIdx.x + 1), ahead = p.stages - 1;
    if (!p.early) waitForEarlier();
    me.seek(begin);
    const int firstUnit = me.loadUnit;
    for (int i = 0; i < ahead && begin + i < end; i++) me.loadWeights(i), me.advance();
    if (p.early) waitForEarlier();
    letNextStart();
    int loaded = firstUnit; // the unit of its tile whose operands come next
    me.loadX = p.x + (long long)firstUnit * D::K32 * p.columns * 64 + threadIdx.x * 16;
    for (int i = 0; i < ahead; i++) {
      if (begin + i < end) {
        me.loadOperands(loaded, i);
        if (++loaded == p.units) loaded = 0;
      }
      copyCommit();
    }
    int slot = 0, next = ahead, first = begin, left = p.units - firstUnit, tile = begin / p.units;
    for (int unit = begin; unit < end; unit++) {
      switch (p.stages) {
      case 2: copyWait<0>(); break;
      case 3: copyWait<1>(); break;
      case 4: copyWait<2>(); break;
      case 5: copyWait<3>(); break;
      default: copyWait<4>();
      }
      __syncthreads(); // all have read what comes into the next slot
      if (unit + ahead < end) {
        me.loadOperands(me.loadUnit, next);
        me.loadWeights(next);
        me.advance();
      }
      copyCommit();
      if (++next == p.stages) next = 0;
      me.multiply(slot);
      if (++slot == p.stages) slot = 0;
      if (--left == 0 || unit + 1 == end) {
        me.finish(tile++, first, unit + 1);
        first = unit + 1, left = p.units;
      }
    }
  }
};

// Operands of some rows of x, the scratch of NarrowParams.
struct NarrowOperandParams {
  const float* x;
  const int* order; // nullptr: columns are in order
  uint4* operands;
  float *sums, *down;
  u32* counters;
  int rows, in;
  int deep;         // of 32 columns; columns behind `in` are 0
  int parts, tiles;
  int columns;      // with those that are 0
  int blocks;       // of a row
  int swizzled;     // for warp groups: see below
};

// operands[i][column][q] has the elements of columns 32 i + 2q + {0, 1, 8, 9, 16, 17, 24, 25} of x, times a power of two that brings
// the row's largest magnitude near 2^8. A thread makes one at a time. A row's parts, of which there may be two, are neighbours. Warp groups
// have matrices of 64 columns of x in swizzled rows of 128 bytes, a row for a column of operands.
__device__ __forceinline__ void narrowOperands(const NarrowOperandParams& p) {
  __shared__ float scratch[8];
  letNextStart();
  waitForEarlier();
  const int row = blockIdx.x / p.blocks, first = blockIdx.x % p.blocks, q = threadIdx.x % 4, columns = p.columns;
  const float* const x = p.x + (long long)row * p.in;
  float top = 0.f;
  if (p.in % 4 == 0) {
#pragma unroll 8
    for (int k = threadIdx.x * 4; k < p.in; k += NARROW_THREADS * 4) {
      const float4 v = *(const float4*)(x + k);
      top = fmaxf(top, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
  } else {
    for (int k = threadIdx.x; k < p.in; k += NARROW_THREADS) top = fmaxf(top, fabsf(x[k]));
  }
  const int e = exponentOf(foldBlock(top, scratch, [](float a, float b) { return fmaxf(a, b); }));
  const float up = powerOf(-e);
  if (first == 0) {
    if (threadIdx.x == 0) p.down[row] = powerOf(e);
    if (row == 0)
      for (int t = threadIdx.x; t < p.tiles; t += NARROW_THREADS) p.counters[t] = 0;
  }
#pragma unroll 1
  for (int begin = first * (NARROW_THREADS / 4); begin < p.deep; begin += p.blocks * (NARROW_THREADS / 4)) {
    const int i = begin + threadIdx.x / 4;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int k = i * 32 + j / 2 * 8 + 2 * q + j % 2;
      v[j] = k < p.in ? x[p.order != nullptr ? p.order[k] : k] * up : 0.f;
    }
    for (int part = 0; part < p.parts; part++) {
      u32 w[4];
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        w[j] = Float16::pack(v[2 * j], v[2 * j + 1]);
        const float a = Float16::low(w[j]), b = Float16::high(w[j]);
        sum += a + b, v[2 * j] -= a, v[2 * j + 1] -= b;
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (i >= p.deep) continue;
      const int column = row * p.parts + part;
      if (p.swizzled) {
        char* const to = (char*)p.operands + ((long long)(i / 2) * columns + column) * 128;
#pragma unroll
        for (int j = 0; j < 4; j++) *(u32*)(to + ((i % 2 * 64 + j * 16 + q * 4) ^ (column % 8 * 16))) = w[j];
      } else {
        p.operands[((long long)i * columns + column) * 4 + q] = make_uint4(w[0], w[1], w[2], w[3]);
      }
      if (q == 0 && p.sums != nullptr) p.sums[(long long)i * columns + column] = sum;
    }
    if (row + 1 < p.rows || i >= p.deep) continue;
    for (int column = p.rows * p.parts; column < columns; column++) {
      p.operands[p.swizzled ? ((long long)(i / 2) * columns + column) * 8 + i % 2 * 4 + q : ((long long)i * columns + column) * 4 + q] = make_uint4(0, 0, 0, 0);
      if (q == 0 && p.sums != nullptr) p.sums[(long long)i * columns + column] = 0.f;
    }
  }
}

// y[i] = table[ids[i]] + residual[i]. A row with an id outside of the table is NaN.
struct NarrowGatherParams {
  const char *w, *scales, *second;
  const int *order, *ids;
  const float* residual;
  float* y;
  int n, out, chunks, group, groups, kind, zero, factor, format; // group: 32 columns each
};

enum : int { NARROW_INT8 = 0, NARROW_E4M3 = 1, NARROW_INT4 = 2 };

__device__ __forceinline__ void narrowGather(const NarrowGatherParams& p) {
  waitForEarlier();
  letNextStart();
  const int id = p.ids[blockIdx.x];
  const bool there = id >= 0 && id < p.out;
  const int row = there ? id : 0, tile = row / NARROW_TILE, r = row % NARROW_TILE;
  const int strips = min(NARROW_STRIPS, (p.out - tile * NARROW_TILE + 15) / 16), width = p.format == NARROW_INT4 ? 64 : 32;
  const char* const w = p.w + (long long)tile * p.chunks * (NARROW_STRIPS * NARROW_CHUNK) + r / 16 * NARROW_CHUNK + r % 8 * 64;
  for (int i = threadIdx.x; i < p.n; i += NARROW_THREADS) {
    const int k = i % 16, of = i % width / 16, high = r % 16 / 8;
    const unsigned char* const at = (const unsigned char*)w + (long long)(i / width) * strips * NARROW_CHUNK + k % 8 / 2 * 16;
    const int group = p.group == 0 ? 0 : i / (32 * p.group);
    const long long place = (long long)tile * NARROW_TILE * p.groups + (long long)group * strips * 16 + r;
    float v;
    if (p.format == NARROW_INT4) {
      const u32 word = *(const u32*)(at + of * 4);
      int zero = p.zero;
      if (p.kind == ZEROS) zero = ((const u16*)p.second)[place];
      v = (float)((int)(word >> ((k / 8 * 2 + high + k % 2 * 4) * 4) & 15) - zero);
    } else {
      const u32 byte = at[of * 8 + k / 8 * 4 + high + k % 2 * 2];
      v = p.format == NARROW_INT8 ? (float)((int)byte - 128) : Float16::low((byte & 0x80) << 8 | (byte & 0x7f) << 7);
    }
    const float scale = p.factor == 4 ? ((const float*)p.scales)[place] : Float16::load(p.scales, place);
    v = __fmul_rn(v, scale);
    if (p.kind == MINIMA) v = __fadd_rn(v, Float16::load(p.second, place));
    const long long to = (long long)blockIdx.x * p.n + (p.order != nullptr ? p.order[i] : i);
    if (!there) v = __int_as_float(0x7fffffff);
    p.y[to] = p.residual != nullptr ? v + p.residual[to] : v;
  }
}
