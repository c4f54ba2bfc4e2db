// Linear layers of 129 rows and more whose weights have 8 or 4 bits (9.0), in the order of internal/weight/packed.go:
//
//   y[row][o] = f(sum over k of x[row][k] W[o][k], times the scales of the row and of the channel, + b[o]) + residual[row][o]
//
// A launch ahead makes operands of x: rows of float16, in one or two parts, or rows of the type of weights of 8 bits, each with a scale
// (narrowRowOperands). Two thread blocks are a cluster, which walks tiles of 256 channels: each block has 128 of the channels, and both have the
// same rows of x, of which each copies half for both. A producer warp fills the ring with steps of 128 bytes of a row of x. Two warp groups have
// 64 channels each. Weights are left operands in registers; a step of x is the right operand, in shared memory.
//
// Sums of integers are exact. Tensor cores keep about 14 bits of sums of E4M3, so sums of 128 columns are added in registers, times the scale
// of their group of columns. Sums of float16 are added in registers if columns have scales in groups.
#pragma once
#include "gemm_narrow.cuh"
#include "gemm_tiled.cuh"

constexpr int NARROW_ROWS_THREADS = 384;           // two warp groups that multiply, and one whose first warp copies
constexpr int NARROW_ROWS_WARPS = 8;               // that multiply
constexpr int NARROW_ROWS_STEP = 128;              // bytes of a row of x, of a step: four products of 32 bytes
constexpr int NARROW_ROWS_STRIPS = 8;              // of a block's channels
constexpr int NARROW_ROWS_SCALES = 2048;           // bytes of a step: scales of two groups, and zeros from byte 1024 on
constexpr int NARROW_ROWS_RING = 192 << 10;        // bytes
constexpr int NARROW_ROWS_GROUP = 2048;            // rows of x that tiles of all channels are walked with

struct NarrowRowsPart {
  const char *w, *scales, *second; // second: zeros, or null
  const float* b;          // may be null
  float *y, *y2;           // y2 has the channels from `split` on
  int all;                 // rows of the packed matrix
  int first, out, split;   // the part's channels: the first row of the packed matrix, and their number
  int tiles;               // up to the end of the part
  int group, groups;       // group: columns of a scale, in steps of bytes or 32 columns of float16; 0: a row
  int zero, factor;        // zero: of all weights, without a plane. factor: bytes of a scale
};

struct NarrowRowsParams {
  TensorMap x;
  NarrowRowsPart parts[LINEAR_PARTS]; // of a gated unit, the gate and the other part
  const float *factors, *residual;    // factors: scales of rows. residual may be null
  int rows, chunks, steps;            // steps: of all parts of x
  int deep;                           // steps of a part. Rows of a second part follow those of the first
  int activation, early;
  u32 magic;                          // of decoders
};

// One row of x for each thread block.
struct NarrowRowOperandParams {
  const float *x, *gamma, *beta; // gamma and beta may be null
  char* bytes;                   // rows of `wide` bytes
  float* factors;
  int n, wide, norm;
  float eps, offset;             // of the norm, as LinearParams has them
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Sums of integers.
#define NARROW_ROWS_SUMS1(j) "+r"(d[j][0]), "+r"(d[j][1]), "+r"(d[j][2]), "+r"(d[j][3])
#define NARROW_ROWS_SUMS2(j) NARROW_ROWS_SUMS1(j), NARROW_ROWS_SUMS1(j + 1)
#define NARROW_ROWS_SUMS4(j) NARROW_ROWS_SUMS2(j), NARROW_ROWS_SUMS2(j + 2)
#define NARROW_ROWS_SUMS8(j) NARROW_ROWS_SUMS4(j), NARROW_ROWS_SUMS4(j + 4)
#define NARROW_ROWS_SUMS16(j) NARROW_ROWS_SUMS8(j), NARROW_ROWS_SUMS8(j + 8)
#define NARROW_ROWS_OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MORE)

// d += a b: a has 64 rows of 32 bytes, in registers, and b N rows, in shared memory; without MORE d begins with 0.
struct MultiplyE4M3 {
  template <int MORE> __device__ static __forceinline__ void multiply(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_NAMES8 "}, {%32, %33, %34, %35}, %36, %37, 1, 1;" : WGMMA_SUMS8(0) : NARROW_ROWS_OPERANDS);
  }
};
struct MultiplyInt8 {
  template <int MORE> __device__ static __forceinline__ void multiply(int (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" WGMMA_NAMES16 "}, {%64, %65, %66, %67}, %68, %69;" : NARROW_ROWS_SUMS16(0) : NARROW_ROWS_OPERANDS);
  }
};
struct MultiplyF16 {
  template <int MORE> __device__ static __forceinline__ void multiply(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" WGMMA_NAMES8 "}, {%32, %33, %34, %35}, %36, %37, 1, 1, 0;" : WGMMA_SUMS8(0) : NARROW_ROWS_OPERANDS);
  }
  template <int MORE> __device__ static __forceinline__ void multiply(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" WGMMA_NAMES16 "}, {%64, %65, %66, %67}, %68, %69, 1, 1, 0;" : WGMMA_SUMS16(0) : NARROW_ROWS_OPERANDS);
  }
};
template <int N> __device__ __forceinline__ void pinned(int (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i][0]), "+r"(d[i][1]), "+r"(d[i][2]), "+r"(d[i][3])::"memory");
}
#else
struct MultiplyE4M3 {};
struct MultiplyInt8 {};
struct MultiplyF16 {};
#endif

// Formats of operands: WIDE rows of x of a piece of sums, CHUNKS of weights of a step. FLUSH: how often in a step sums are added in registers, 0:
// never. GROUPED: scales come with the weights.

// A lane's left operands of a chunk: four bytes of row lane/4, four of row lane/4+8, and the same for the other 16 columns.
__device__ __forceinline__ void bytesOf(u32 (&a)[4], const uint4& w) {
  a[0] = __byte_perm(w.x, w.y, 0x6420), a[1] = __byte_perm(w.x, w.y, 0x7531);
  a[2] = __byte_perm(w.z, w.w, 0x6420), a[3] = __byte_perm(w.z, w.w, 0x7531);
}
struct RowsInt8 : MultiplyInt8 {
  using Sum = int;
  static constexpr bool EXACT = true, GROUPED = false, zeros = false;
  static constexpr int WIDE = 128, CHUNKS = 4, FLUSH = 0;
  static constexpr float most = 127.f, least = 0x1p-80f, factor = 1.f;
  __device__ static __forceinline__ u32 byteOf(float v) { return (u32)__float2int_rn(v) & 0xff; }
  __device__ static __forceinline__ u32 two(float a, float b) { return byteOf(a) | byteOf(b) << 8; }
  __device__ static __forceinline__ void decode(u32 (&a)[4][4], const uint4& w, int chunk, const u32 (&)[2][2], u32) {
    bytesOf(a[chunk], w);
#pragma unroll
    for (int i = 0; i < 4; i++) a[chunk][i] ^= 0x80808080; // 128 was added
  }
};
struct RowsE4M3 : MultiplyE4M3 {
  using Sum = float;
  static constexpr bool EXACT = false, GROUPED = false, zeros = false;
  static constexpr int WIDE = 64, CHUNKS = 4, FLUSH = 1;
  static constexpr float most = 448.f, least = 0x1p-80f, factor = 0x1p-8f; // scales are for numbers times 2^-8
  __device__ static __forceinline__ u32 two(float a, float b) {
#if __CUDA_ARCH__ >= 900
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
#else
    return 0;
#endif
  }
  __device__ static __forceinline__ void decode(u32 (&a)[4][4], const uint4& w, int chunk, const u32 (&)[2][2], u32) { bytesOf(a[chunk], w); }
};
// Weights D times rows of float16. FLUSH: 0, or how many scales 64 columns may have.
template <class D, int FLUSH_> struct RowsF16 : MultiplyF16 {
  using Sum = float;
  static constexpr bool EXACT = false, GROUPED = FLUSH_ > 0, zeros = D::zeros;
  static constexpr int WIDE = GROUPED ? 64 : 128, CHUNKS = 4 / D::K32, FLUSH = FLUSH_;
  static constexpr float factor = 1.f;
  __device__ static __forceinline__ void decode(u32 (&a)[4][4], const uint4& w, int chunk, const u32 (&less)[2][2], u32 magic) {
#pragma unroll
    for (int half = 0; half < 2 / CHUNKS; half++) D::decode((u32(&)[2][4])a[(chunk * 2 / CHUNKS + half) * 2], w, half, less[FLUSH == 2 ? half : 0], magic);
  }
  __device__ static __forceinline__ void lessOf(u32 (&less)[2], u32 low, u32 high) {
    if constexpr (zeros) D::less(less, low, high);
  }
};

// A row's scale is the row's largest magnitude / most, and a byte is the number nearest to an element / the scale. A row of smaller numbers
// than `least` has scale and bytes 0; a row with a number that is not finite has the scale NaN. Each 16 columns have the order of the weights:
// word q has columns 2q, 2q+1, 2q+8 and 2q+9.
template <class D> __device__ __forceinline__ void narrowRowOperands(const NarrowRowOperandParams& p) {
  __shared__ float scratch[8];
  constexpr int KEPT = 4, STRIDE = 1024;
  if (threadIdx.x == 0) letNextStart();
  waitForEarlier();
  const float* const x = p.x + (long long)blockIdx.x * p.n;
  const bool even = p.n % 4 == 0;
  const auto four = [&](const float* from, int i, float other) { // columns behind the last are 0
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (even) {
      if (i < p.n) v = from == nullptr ? make_float4(other, other, other, other) : *(const float4*)(from + i);
      return v;
    }
    if (i < p.n) v.x = from == nullptr ? other : from[i];
    if (i + 1 < p.n) v.y = from == nullptr ? other : from[i + 1];
    if (i + 2 < p.n) v.z = from == nullptr ? other : from[i + 2];
    if (i + 3 < p.n) v.w = from == nullptr ? other : from[i + 3];
    return v;
  };
  float mean = 0.f, by = 1.f;
  const auto normed = [&](int i, float4 v) {
    const float4 g = four(p.gamma, i, 1.f - p.offset), b = four(p.beta, i, 0.f);
    const auto one = [&](float v, float g, float b, int e) { return i + e < p.n ? (v - mean) * by * (g + p.offset) + b : 0.f; };
    return make_float4(one(v.x, g.x, b.x, 0), one(v.y, g.y, b.y, 1), one(v.z, g.z, b.z, 2), one(v.w, g.w, b.w, 3));
  };
  float4 kept[KEPT];
#pragma unroll
  for (int k = 0; k < KEPT; k++) kept[k] = four(x, threadIdx.x * 4 + k * STRIDE, 0.f);
  bool done = p.norm == NO_NORM;
  const auto each = [&](auto f) {
#pragma unroll
    for (int k = 0; k < KEPT; k++)
      if (k * STRIDE < p.wide) f(threadIdx.x * 4 + k * STRIDE, kept[k]);
#pragma unroll 4
    for (int begin = KEPT * STRIDE; begin < p.wide; begin += STRIDE) {
      const int i = begin + threadIdx.x * 4;
      float4 v = four(x, i, 0.f);
      if (done && p.norm != NO_NORM) v = normed(i, v);
      f(i, v);
    }
  };
  const auto plus = [](float a, float b) { return a + b; };
  if (p.norm != NO_NORM) {
    float sum = 0.f;
    if (p.norm == LAYER_NORM) {
      each([&](int, const float4& v) { sum += (v.x + v.y) + (v.z + v.w); });
      mean = foldBlock(sum, scratch, plus) / p.n;
      sum = 0.f;
    }
    each([&](int i, const float4& v) {
      const auto square = [&](float v, int e) { return i + e < p.n ? (v - mean) * (v - mean) : 0.f; };
      sum += (square(v.x, 0) + square(v.y, 1)) + (square(v.z, 2) + square(v.w, 3));
    });
    by = 1.f / sqrtf(foldBlock(sum, scratch, plus) / p.n + p.eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) kept[k] = normed(threadIdx.x * 4 + k * STRIDE, kept[k]);
    done = true;
  }
  u32 top = 0; // bits of magnitudes have the order of magnitudes, with NaN behind infinity
  const auto bits = [](float v) { return __float_as_uint(v) & 0x7fffffff; };
  each([&](int, const float4& v) { top = max(max(top, max(bits(v.x), bits(v.y))), max(bits(v.z), bits(v.w))); });
  const float largest = foldBlock(__uint_as_float(top), scratch, [](float a, float b) { return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b))); });
  const bool finite = __float_as_uint(largest) < 0x7f800000, some = finite && largest >= D::least;
  const float scale = some ? __fdiv_rn(largest, D::most) : 0.f;
  if (threadIdx.x == 0) p.factors[blockIdx.x] = finite ? scale : __int_as_float(0x7fffffff);
  // v / scale. Quotients of 2^-10 and more are rounded correctly (P. Markstein, IBM Journal of Research and Development 34, 1990, p. 111), and
  // smaller quotients become 0 in 8 bits. The remainder is exact, since the scale is above 2^-90.
  const float inverse = some ? __frcp_rn(scale) : 0.f;
  const auto quotient = [&](float v) {
    const float q = __fmul_rn(v, inverse);
    return __fmaf_rn(__fmaf_rn(-q, scale, v), inverse, q);
  };
  char* const to = p.bytes + (long long)blockIdx.x * p.wide;
  const bool upper = threadIdx.x & 2; // columns 8 to 15 of their 16
  each([&](int i, const float4& v) {
    u32 low = 0, high = 0;
    if (some) low = D::two(quotient(v.x), quotient(v.y)), high = D::two(quotient(v.z), quotient(v.w));
    const u32 other = __shfl_xor_sync(~0u, upper ? low : high, 2);
    if (i < p.wide) *(u32*)(to + i / 16 * 16 + (i % 8 / 2 + upper) * 4) = upper ? other | high << 16 : low | other << 16;
  });
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// N rows of x in a tile. With GATES a tile has two sets of channels.
template <class D, int N, bool GATES> struct NarrowRows {
  using Sum = typename D::Sum;
  static constexpr bool EXACT = D::EXACT, GROUPED = D::GROUPED;
  static constexpr int SETS = GATES ? 2 : 1, CHUNKS = D::CHUNKS, FLUSH = D::FLUSH;
  static constexpr int WIDE = D::WIDE, BESIDE = N / WIDE, PIECES = SETS * BESIDE, EIGHTS = WIDE / 8;
  static constexpr int WEIGHTS = CHUNKS * NARROW_ROWS_STRIPS * NARROW_CHUNK, SCALES = GROUPED ? NARROW_ROWS_SCALES : 0;
  static constexpr int X = N * 128, STAGE = SETS * WEIGHTS + X + SCALES, STAGES = NARROW_ROWS_RING / STAGE; // bytes
  static constexpr bool AHEAD = FLUSH == 0 || !GATES; // registers suffice for the operands of two steps
  static_assert(!GATES || !GROUPED, "scales of one set");
  static constexpr int BARS = NARROW_ROWS_RING;
  static constexpr int BELOW = NARROW_ROWS_GROUP / N;

  struct Tile { int part, tile, first; }; // tile: of the part; first: row of x
  struct Walk {
    const NarrowRowsParams& p;
    int below, beside, all;
    __device__ __forceinline__ Walk(const NarrowRowsParams& p) : p(p) {
      below = (p.rows + N - 1) / N, beside = p.parts[GATES ? 0 : LINEAR_PARTS - 1].tiles, all = below * beside;
    }
    __device__ __forceinline__ Tile at(int i) const {
      const int group = i / (BELOW * beside) * BELOW, wide = min(BELOW, below - group), of = i - group * beside, tile = of / wide;
      const int part = GATES ? 0 : (tile >= p.parts[0].tiles) + (tile >= p.parts[1].tiles);
      return {part, tile - (part > 0 ? p.parts[part - 1].tiles : 0), (group + of % wide) * N};
    }
  };

  // The block's channels of a part's tile, as strips of the packed matrix.
  struct Strips {
    int tile, from, of, n; // of: strips of the packed tile. n: strips of the block within the matrix
    __device__ __forceinline__ Strips(const NarrowRowsPart& part, int tile_) {
      const int row = part.first + tile_ * NARROW_TILE + blockIdx.x % 2 * (NARROW_ROWS_STRIPS * 16);
      tile = row / NARROW_TILE, from = row % NARROW_TILE / 16;
      of = min(NARROW_STRIPS, (part.all - tile * NARROW_TILE + 15) / 16);
      n = max(0, min(NARROW_ROWS_STRIPS, of - from));
    }
    // The place in a plane of a group of the block's first channel.
    __device__ __forceinline__ long long scaleAt(const NarrowRowsPart& part, int group) const { return (long long)tile * NARROW_TILE * part.groups + (group * of + from) * 16; }
  };

  __device__ static __forceinline__ void run(const NarrowRowsParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 ring = sharedAddress(memory), full = ring + BARS, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; s++) barrierInit(full + s * 8, 1), barrierInit(empty + s * 8, 2 * NARROW_ROWS_WARPS);
      opened();
    }
    clusterSync();
    const Walk walk(p);
    if (warp >= NARROW_ROWS_WARPS) {
      fewerRegisters<24>();
      if (warp == NARROW_ROWS_WARPS && elected()) produce(p, walk, ring, full, empty);
      __syncwarp();
    } else {
      moreRegisters<240>();
      waitForEarlier();
      if (threadIdx.x == 0) letNextStart();
      consume(p, walk, ring, full, empty, warp, lane);
    }
    clusterSync(); // the other block may still copy to this one, or signal a barrier here
  }

  // One thread issues all copies of the block. Weights of the first steps may come before earlier launches end.
  __device__ static __forceinline__ void produce(const NarrowRowsParams& p, const Walk& walk, u32 ring, u32 full, u32 empty) {
    const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, rank = blockIdx.x % 2;
    const u64 policy = readAgain();
    PipelineState at;
    int early = p.early && cluster < walk.all ? min(STAGES, p.steps) : 0;
    const auto weights = [&](const Tile& t, int s, int slot) {
      s %= p.deep;
      const int chunks = min(CHUNKS, p.chunks - s * CHUNKS);
      const u32 bar = full + slot * 8;
      int bytes = X;
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        const NarrowRowsPart& part = p.parts[t.part + set];
        const int n = Strips(part, t.tile).n;
        bytes += n * chunks * NARROW_CHUNK;
        if (GROUPED) bytes += n * 16 * (part.factor + (part.second != nullptr ? 2 : 0)) * FLUSH;
      }
      barrierExpect(bar, bytes);
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        const NarrowRowsPart& part = p.parts[t.part + set];
        const Strips strips(part, t.tile);
        if (strips.n == 0) continue;
        const char* from = part.w + ((long long)strips.tile * p.chunks * NARROW_STRIPS + (long long)s * CHUNKS * strips.of + strips.from) * NARROW_CHUNK;
        u32 to = ring + slot * STAGE + X + set * WEIGHTS;
        for (int c = 0; c < chunks; c++, from += strips.of * NARROW_CHUNK, to += NARROW_ROWS_STRIPS * NARROW_CHUNK) copyBulk(to, from, strips.n * NARROW_CHUNK, bar, policy);
        if constexpr (GROUPED) {
          const u32 scales = ring + slot * STAGE + X + SETS * WEIGHTS;
#pragma unroll
          for (int g = 0; g < FLUSH; g++) {
            const long long at = strips.scaleAt(part, min((s * 2 + g) / part.group, part.groups - 1));
            copyBulk(scales + g * 512, part.scales + at * part.factor, strips.n * 16 * part.factor, bar, policy);
            if (part.second != nullptr) copyBulk(scales + 1024 + g * 256, part.second + at * 2, strips.n * 16 * 2, bar, policy);
          }
        }
      }
    };
    for (int s = 0; s < early; s++) weights(walk.at(cluster), s, s);
    waitForEarlier();
#pragma unroll 1
    for (int i = cluster; i < walk.all; i += clusters) {
      const Tile t = walk.at(i);
#pragma unroll 1
      for (int s = 0; s < p.steps; s++) {
        if (early == 0) {
          barrierWait(empty + at.index * 8, at.parity ^ 1); // a stage that was never used counts as given back
          weights(t, s, at.index);
        } else {
          early--;
        }
        copyBoxToEach(ring + at.index * STAGE + rank * (X / 2), &p.x, s % p.deep * (NARROW_ROWS_STEP / 2), t.first + rank * (N / 2) + (s < p.deep ? 0 : p.rows), 0, full + at.index * 8, policy, 3);
        at.next(STAGES);
      }
    }
  }

  // Scales of the channels lane/4 and lane/4+8 of the warp, for the columns of a step.
  __device__ static __forceinline__ void scalesOf(const NarrowRowsPart& part, const Strips& strips, int warp, int lane, int s, float (&scale)[2]) {
    const float* const from = (const float*)part.scales + strips.scaleAt(part, part.group == 0 ? 0 : s / part.group) + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) scale[i] = warp < strips.n ? from[i * 8] * D::factor : 0.f;
  }

  __device__ static __forceinline__ void consume(const NarrowRowsParams& p, const Walk& walk, u32 ring, u32 full, u32 empty, int warp, int lane) {
    PipelineState at;
    const u32 given = remoteAddress(empty, lane % 2); // to each block that copies x to this one
    Sum sums[PIECES][EIGHTS][4];
#pragma unroll 1
    for (int i = blockIdx.x / 2; i < walk.all; i += gridDim.x / 2) {
      const Tile t = walk.at(i);
      constexpr int HELD = GROUPED ? FLUSH : SETS;
      float scale[HELD][2]; // of sets, or of groups of the step
      if constexpr (!GROUPED)
#pragma unroll
        for (int set = 0; set < SETS; set++) scalesOf(p.parts[t.part + set], Strips(p.parts[t.part + set], t.tile), warp, lane, 0, scale[set]);
#pragma unroll
      for (int j = 0; j < PIECES * EIGHTS * 4; j++) (&sums[0][0][0])[j] = 0;
      // With AHEAD, a step's operands are made while the products of the step before are under way.
      u32 a[2][SETS][4][4];
      float factor[HELD][2];                    // scale, of the step whose operands were made last
      int before = -1;
      const auto release = [&] {
        fenceAsync();
        __syncwarp();
        if (lane < 2 && before >= 0) barrierArriveRemote(given + before * 8);
      };
      const auto make = [&](int s, u32 (&a)[SETS][4][4]) {
        barrierWait(full + at.index * 8, at.parity);
        const u32 weights = ring + at.index * STAGE + X + warp * NARROW_CHUNK + lane * 16;
        const int chunks = p.chunks - s % p.deep * CHUNKS;
        u32 less[2][2] = {};
        if constexpr (GROUPED) {
          const NarrowRowsPart& of = p.parts[t.part];
          const u32 scales = ring + at.index * STAGE + X + SETS * WEIGHTS;
          const int row = warp * 16 + lane / 4;
#pragma unroll
          for (int g = 0; g < FLUSH; g++) {
#pragma unroll
            for (int i = 0; i < 2; i++) factor[g][i] = loadFactor(scales + g * 512, row + i * 8, of.factor);
            if constexpr (D::zeros) {
              const bool plane = of.second != nullptr;
              D::lessOf(less[g], plane ? loadShared2(scales + 1024 + g * 256 + row * 2) : of.zero, plane ? loadShared2(scales + 1024 + g * 256 + row * 2 + 16) : of.zero);
            }
          }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
          for (int c = 0; c < CHUNKS; c++) {
            D::decode(a[set], loadShared16(weights + set * WEIGHTS + c * (NARROW_ROWS_STRIPS * NARROW_CHUNK)), c, less, p.magic);
            if (CHUNKS > 1 && c >= chunks)
#pragma unroll
              for (int k = c * (4 / CHUNKS); k < (c + 1) * (4 / CHUNKS); k++) a[set][k][0] = a[set][k][1] = a[set][k][2] = a[set][k][3] = 0;
          }
      };
      constexpr int TURNS = FLUSH * PIECES, EACH = FLUSH > 0 ? 4 / FLUSH : 4;
      const auto multiply = [&](int s, u32 (&a)[SETS][4][4], u32 (&next)[SETS][4][4]) {
        const u32 x = ring + at.index * STAGE;
        const int slot = at.index;
        if constexpr (FLUSH == 0) {
          wgmmaFence();
#pragma unroll
          for (int k = 0; k < 4; k++)
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) D::template multiply<1>(sums[piece], a[piece / BESIDE][k], rowOperand(x + piece % BESIDE * (WIDE * 128) + k * 32));
          wgmmaCommit();
          wgmmaWait<1>();
          release();
          before = slot;
          at.next(STAGES);
          if (s + 1 < p.steps) make(s + 1, next);
        } else {
          float part[2][EIGHTS][4]; // sums of a turn
          const auto add = [&](int turn) {
            pinned(part[turn % 2]);
            const int piece = turn % PIECES, of = GROUPED ? turn / PIECES : piece / BESIDE;
#pragma unroll
            for (int j = 0; j < EIGHTS; j++)
#pragma unroll
              for (int e = 0; e < 4; e++) sums[piece][j][e] += scale[of][e / 2] * part[turn % 2][j][e];
          };
          if constexpr (GROUPED) {
#pragma unroll
            for (int g = 0; g < HELD; g++) scale[g][0] = factor[g][0], scale[g][1] = factor[g][1];
          }
#pragma unroll
          for (int turn = 0; turn < TURNS; turn++) {
            wgmmaFence();
#pragma unroll
            for (int k = 0; k < EACH; k++) {
              const int piece = turn % PIECES, product = turn / PIECES * EACH + k;
              const u64 b = rowOperand(x + piece % BESIDE * (WIDE * 128) + product * 32);
              if (k == 0) D::template multiply<0>(part[turn % 2], a[piece / BESIDE][product], b);
              else D::template multiply<1>(part[turn % 2], a[piece / BESIDE][product], b);
            }
            wgmmaCommit();
            if (turn == 0) continue;
            wgmmaWait<1>();
            add(turn - 1);
          }
          before = slot;
          at.next(STAGES);
          if (AHEAD && s + 1 < p.steps) make(s + 1, next);
          wgmmaWait<0>();
          add(TURNS - 1);
          release();
          if constexpr (!GROUPED)
#pragma unroll
            for (int set = 0; set < SETS; set++)
              if (const NarrowRowsPart& of = p.parts[t.part + set]; of.group > 0 && s + 1 < p.steps && (s + 1) % of.group == 0) scalesOf(of, Strips(of, t.tile), warp, lane, s + 1, scale[set]);
        }
      };
      if constexpr (AHEAD) make(0, a[0]);
#pragma unroll 1
      for (int s = 0; s < p.steps; s += 1 + AHEAD) {
        if constexpr (!AHEAD) make(s, a[0]);
        multiply(s, a[0], a[1]);
        if (AHEAD && s + 1 < p.steps) multiply(s + 1, a[1], a[0]);
      }
      if constexpr (FLUSH == 0) {
        wgmmaWait<0>();
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) pinned(sums[piece]);
        release();
      }
      finish(p, t, warp, lane, scale, sums);
    }
  }

  // A lane has two channels, of rows 2 (lane%4) and 2 (lane%4) + 1 of each eight rows of x.
  __device__ static __forceinline__ void finish(const NarrowRowsParams& p, const Tile& t, int warp, int lane, const float (&scale)[GROUPED ? FLUSH : SETS][2], const Sum (&sums)[PIECES][EIGHTS][4]) {
    const NarrowRowsPart& part = p.parts[t.part];
    const int o = t.tile * NARROW_TILE + blockIdx.x % 2 * (NARROW_ROWS_STRIPS * 16) + warp * 16 + lane / 4;
    const float least = p.activation == RELU ? 0.f : -LEAN_INF;
    const bool biased = p.parts[t.part].b != nullptr, residual = p.residual != nullptr;
    const int row = t.first + lane % 4 * 2;
    float b[SETS][2];
    int rows[2], apart[2]; // rows of x behind `row`, of each channel
    float* to[2];
    const float* more[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int c = min(o + i * 8, part.out - 1); // a channel of the part
      rows[i] = o + i * 8 < part.out ? p.rows - row : 0;
      apart[i] = c < part.split ? part.split : part.out - part.split;
      to[i] = (c < part.split ? part.y + c : part.y2 + (c - part.split)) + (long long)row * apart[i];
      more[i] = p.residual + c;
#pragma unroll
      for (int set = 0; set < SETS; set++) b[set][i] = p.parts[t.part + set].b != nullptr ? p.parts[t.part + set].b[c] : 0.f;
    }
    const auto value = [&](int piece, int j, int e, float factor) {
      const int set = piece / BESIDE, i = e / 2;
      float v = (float)sums[piece][j][e];
      if constexpr (FLUSH == 0) v = __fmul_rn(v, scale[set][i]);
      v = __fmul_rn(v, factor);
      return biased || SETS > 1 ? __fadd_rn(v, b[set][i]) : v;
    };
    constexpr int TOGETHER = GATES ? 2 : 4; // blocks of eight rows whose factors and residuals are loaded together
#pragma unroll
    for (int piece = 0; piece < BESIDE; piece++)
#pragma unroll
      for (int first = 0; first < EIGHTS; first += TOGETHER) {
        float factor[TOGETHER][2], plus[TOGETHER][2][2];
        const int at = piece * WIDE + first * 8; // of rows behind `row`
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
#pragma unroll
          for (int c = 0; c < 2; c++) factor[j][c] = p.factors[min(row + at + j * 8 + c, p.rows - 1)];
        if (residual)
#pragma unroll
          for (int j = 0; j < TOGETHER; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
              for (int i = 0; i < 2; i++) plus[j][c][i] = more[i][(long long)min(row + at + j * 8 + c, p.rows - 1) * part.out];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
#pragma unroll
          for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              float v = value(piece, first + j, i * 2 + c, factor[j][c]);
              if constexpr (GATES) {
                v = bySigmoid(v, p.activation == SILU ? v : v * (1.59576912f + 0.0713548163f * v * v)) * value(piece + BESIDE, first + j, i * 2 + c, factor[j][c]);
              } else {
                v = v < least ? least : v; // NaN of NaN
              }
              if (residual) v = __fadd_rn(v, plus[j][c][i]);
              if (at + j * 8 + c < rows[i]) to[i][(long long)(at + j * 8 + c) * apart[i]] = v;
            }
      }
  }
};
#define NARROW_ROWS(name, D, N, GATES) \
  extern "C" __global__ void __launch_bounds__(NARROW_ROWS_THREADS, 1) name(const __grid_constant__ NarrowRowsParams p) { NarrowRows<D, N, GATES>::run(p); }
#define NARROW_ROW_OPERANDS(name, D) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ NarrowRowOperandParams p) { narrowRowOperands<D>(p); }
#else // other GPUs have no products of warp groups
#define NARROW_ROWS(name, D, N, GATES) extern "C" __global__ void name(const __grid_constant__ NarrowRowsParams p) {}
#define NARROW_ROW_OPERANDS(name, D) extern "C" __global__ void name(const __grid_constant__ NarrowRowOperandParams p) {}
#endif
