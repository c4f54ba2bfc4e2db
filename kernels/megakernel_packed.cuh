// Layers of the megakernel (megakernel.cuh) whose weights have 8 or 4 bits, in the order of internal/weight/packed.go.
//
// A slot of a warp's ring has up to 4096 bytes of 16 rows of W: a few blocks of 128 columns. Copies bring the scales of these rows
// and columns, and their zeros or minima, to memory behind the rings. In layers of Llama's
// shape, a warp multiplies integers with digits of x (digits.cuh). In other layers, a warp turns a block into left operands (gemm_narrow.cuh).
// The sums of each group are multiplied by its scale, so that nothing is rounded. A row's own scale is that of a group that all of its blocks
// have.
#pragma once
#include "digits.cuh"
#include "megakernel_operands.cuh"

#if __CUDA_ARCH__ >= 900
// Maps of a part: of elements, and of scales with zeros or minima behind them; the same again of a last tile that has fewer than 256 rows.
constexpr int PACKED_MAPS = 2;

struct DecodePackedFeed : DecodeFeed {
  u16 full[LINEAR_PARTS]; // tiles of 256 rows of each part
  u16 deep;               // blocks of a slot; 0: the weights are not packed
  u16 bytes;              // of a slot's copies
  u16 all;                // groups of a row of W
  u16 pitch;              // bytes of a slot's scales, in all layers
  char chunks, groups; // of a block; groups 0: a row's scale

  __device__ __forceinline__ void enter(const TensorMap*& map, int& row, int part) const {
    map = maps + part * 2 * PACKED_MAPS;
    if (row / NARROW_TILE >= full[part]) map += PACKED_MAPS, row %= NARROW_TILE;
  }
  __device__ __forceinline__ void copy(const TensorMap* map, int row, int block, u32 to, u32 scales, u32 bar, u64 policy) const {
    const int strip = row % NARROW_TILE / DECODE_TILE, tile = row / NARROW_TILE;
    barrierExpect(bar, bytes);
    copyBox(to, map, strip * (NARROW_CHUNK / 4), block * chunks, tile, bar, policy);
    copyBox(scales, map + 1, strip * DECODE_TILE, tile * all + block * groups, 0, bar, policy);
  }
};
static_assert(sizeof(DecodePackedFeed) == 48, "");

struct DecodePacked : DecodeLinear {
  int deep;
  int runs;   // log2 of the 32 columns of a group, at most 2
  int factor; // bytes of a scale
  int plane;  // bytes of a block's scales; 0: a row's scale
  int behind; // where zeros or minima are behind a slot's scales
  int kind, zero; // as NarrowParams has them
  int e4m3;
  u32 magic;
};
static_assert(sizeof(DecodePacked) <= DECODE_BODY, "");

// Decoders, as weights of layers.
struct PackedFour {
  using Math = MmaF16;
  static constexpr int CHUNKS = 2; // of a block
  static constexpr bool zeros = true;
  __device__ static __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int half, const u32 (&less)[2], u32 magic, bool e4m3) { NarrowInt4::decode(a, w, half, less, magic); }
};
struct PackedEight {
  using Math = MmaF16;
  static constexpr int CHUNKS = 4;
  static constexpr bool zeros = false;
  __device__ static __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int half, const u32 (&less)[2], u32 magic, bool e4m3) {
    if (e4m3) NarrowE4M3::decode(a, w, half, less, magic);
    else NarrowInt8::decode(a, w, half, less, magic);
  }
};

// Integers, which are multiplied with digits of x. HIGH: sums of rows lane/4+8 are so many times too large.
struct IntegerFour {
  using Math = MmaF16;
  using Element = NarrowInt4;
  static constexpr int CHUNKS = 2, HIGH = 16;
  static constexpr bool zeros = true;
};
struct IntegerEight {
  using Math = MmaF16;
  using Element = NarrowInt8;
  static constexpr int CHUNKS = 4, HIGH = 1;
  static constexpr bool zeros = false;
};

// Makes digits of x, in place of DecodeOperands, which makes parts of float16.
struct DigitOperands {
  // Factors of the elements of a row that a warp has at once: elements times `up` become integers, and sums times `down` are results.
  struct Scale {
    float2 up, down;
    template <int N> __device__ __forceinline__ Scale(const float2 (&v)[N]) {
      const u32 top = topOf(v);
      up = powersOf(-digitExponent(top)), down = digitFactors(top, 0);
    }
  };

  // Returns the sum of 16 lanes' digits. A lane has two digits of two elements; second digits count 256 times.
  __device__ static __forceinline__ int sumOf(u32 w) {
    int sum = (signed char)w + (signed char)(w >> 16) + ((signed char)(w >> 8) + (signed char)(w >> 24)) * 256;
#pragma unroll
    for (int k = 8; k > 0; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
    return sum;
  }

  // Puts the digits of 64 elements of a row, half a box, to `to`: 16 words for each digit. A lane has two elements. The lanes with columns 2q and
  // 2q+8 exchange two digits each. `sums` asks for sums of 32 columns: four of digits 0 and 1, and behind them four of digits 2 and 3.
  __device__ static __forceinline__ void put(float* to, int half, float2 v, const Scale& scale, int lane, bool sums) {
    const u32 first = digitsOf(v.x, scale.up), second = digitsOf(v.y, scale.up);
    const u32 low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const bool later = lane & 4;
    const u32 mine = later ? high : low, other = __shfl_xor_sync(~0u, later ? low : high, 4);
    const u32 a = later ? other : mine, b = later ? mine : other;
    u32* const at = (u32*)to + half * 64 + (later ? 32 : 0) + (lane & 3) * 4 + (lane >> 4) * 2 + (lane >> 3 & 1);
    at[0] = __byte_perm(a, b, 0x6240), at[16] = __byte_perm(a, b, 0x7351);
    if (sums) {
      const int of = sumOf(low), more = sumOf(high);
      if (lane % 16 == 0) to[DECODE_SUMS + half * 2 + lane / 16] = __int_as_float(of), to[DECODE_SUMS + 4 + half * 2 + lane / 16] = __int_as_float(more);
    }
    if (half == 0 && lane == 0) *(float2*)(to + DECODE_COLUMNS) = scale.down;
  }
};

template <class W> __device__ __forceinline__ bool needsSums(const DecodePacked& o) { return o.kind == MINIMA || integers<W> && W::zeros; }

// The place of a warp in a slot of its ring, which has `deep` blocks.
struct SlotBlocks {
  const int deep;
  int in = 0; // blocks of the slot that are used up
  __device__ __forceinline__ bool begins() const { return in == 0; }
  // Goes on to the next block; returns whether the slot is used up.
  __device__ __forceinline__ bool next(bool last) {
    if (++in < deep && !last) return false;
    in = 0;
    return true;
  }
};

// Products of the blocks of a warp's slots.
template <class W> struct PackedBlocks : SlotBlocks {
  static constexpr int RUNS = 4; // of 32 columns, of a block
  const int shift, factor, plane, second, kind;
  const u32 scales, pitch; // of the warp's slots
  const u32 magic;
  const int lane, t;
  const bool e4m3;
  u32 less[2] = {};

  __device__ __forceinline__ PackedBlocks(const DecodePacked& o, u32 scales, u32 pitch, int lane)
      : SlotBlocks{o.deep}, shift(o.runs), factor(o.factor), plane(o.plane), second(o.behind), kind(o.kind), scales(scales + (lane >> 2) * o.factor), pitch(pitch), magic(o.magic), lane(lane), t(lane & 3), e4m3(o.e4m3) {
    if constexpr (W::zeros) NarrowInt4::less(less, o.zero, o.zero);
  }

  // Adds products of a block. v are right operands, f their factors; x has the sums of rows of x, of which there are `columns`.
  __device__ __forceinline__ void multiply(float (&sum)[4], const uint4 (&v)[RUNS], const float (&f)[2], u32 memory, int slot, const float* x, int columns) {
    const u32 at = memory + in * (W::CHUNKS * NARROW_CHUNK) + lane * 16, first = scales + slot * pitch + in * plane;
    if (shift == 2) {
      products<1>(sum, v, f, at, first);
    } else {
      products<RUNS>(sum, v, f, at, first);
    }
    if (kind != MINIMA) return;
#pragma unroll
    for (int i = 0; i < RUNS; i++) {
      const u32 from = first + second + (i >> shift) * (DECODE_TILE * factor);
      const float least[2] = {factorAt(from, 0), factorAt(from, 8)};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float all = t < 2 ? x[min(2 * t + (e & 1), columns - 1) * DECODE_STRIDE + DECODE_SUMS + i] : 0.f; // columns 4 to 7 are the rows' other parts
        sum[e] += all * f[e & 1] * least[e >> 1];
      }
    }
  }

  __device__ __forceinline__ float factorAt(u32 from, int row) const { return loadFactor(from, row, W::zeros ? 2 : factor); }

  // The products, of one group or of as many as runs.
  template <int GROUPS> __device__ __forceinline__ void products(float (&sum)[4], const uint4 (&v)[RUNS], const float (&f)[2], u32 at, u32 first) const {
    constexpr int SUMS = GROUPS == 1 ? 2 : RUNS, EACH = RUNS / W::CHUNKS;
    const int group = DECODE_TILE * (W::zeros ? 2 : factor); // bytes
    uint4 w[W::CHUNKS];
#pragma unroll
    for (int c = 0; c < W::CHUNKS; c++) w[c] = loadShared16(at + c * NARROW_CHUNK);
    u32 zeros[GROUPS][2] = {};
    if constexpr (W::zeros) {
#pragma unroll
      for (int i = 0; i < GROUPS; i++) zeros[i][0] = less[0], zeros[i][1] = less[1];
      if (kind == ZEROS)
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
          const u32 from = first + second + (GROUPS == 1 ? 0 : i >> shift) * group;
          NarrowInt4::less(zeros[i], loadShared2(from), loadShared2(from + 16));
        }
    }
    float scale[GROUPS][2];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) scale[i][r] = factorAt(first + (GROUPS == 1 ? 0 : i >> shift) * group, r * 8);
    float acc[SUMS][4] = {};
#pragma unroll
    for (int i = 0; i < RUNS; i++) {
      u32 a[2][4];
      W::decode(a, w[i / EACH], i % EACH, zeros[GROUPS == 1 ? 0 : i], magic, e4m3);
      if (GROUPS == 1) { // two chains of products
        MmaF16::mma(acc[0], a[0], v[i].x, v[i].y);
        MmaF16::mma(acc[SUMS - 1], a[1], v[i].z, v[i].w);
      } else {
        MmaF16::mma(acc[i % SUMS], a[0], v[i].x, v[i].y);
        MmaF16::mma(acc[i % SUMS], a[1], v[i].z, v[i].w);
      }
    }
    if (GROUPS == 1) {
#pragma unroll
      for (int e = 0; e < 4; e++) sum[e] += (acc[0][e] + acc[SUMS - 1][e]) * (f[e & 1] * scale[0][e >> 1]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float all = 0.f;
#pragma unroll
        for (int i = 0; i < RUNS; i++) all += acc[i % SUMS][e] * scale[i % GROUPS][e >> 1];
        sum[e] += all * f[e & 1];
      }
    }
  }
};

// The same with digits of x. Lane 4g+t has operands 2t and 2t+1, two digits of row t/2 of x.
template <class W> struct IntegerBlocks : SlotBlocks {
  static constexpr int RUNS = PackedBlocks<W>::RUNS;
  const int shift, factor, plane, second, kind, zero;
  const u32 scales, pitch; // of the warp's slots
  const int lane, t;

  __device__ __forceinline__ IntegerBlocks(const DecodePacked& o, u32 scales, u32 pitch, int lane)
      : SlotBlocks{o.deep}, shift(o.runs), factor(o.factor), plane(o.plane), second(o.behind), kind(o.kind), zero(o.zero), scales(scales), pitch(pitch), lane(lane), t(lane & 3) {}

  // Adds the products of one, two or four blocks to the sums of rows g and g+8 of W. More blocks at once have more independent products. x has
  // the digits of `columns` rows, for `left` blocks. Returns how many blocks follow the first one.
  __device__ __forceinline__ int multiply(float (&sum)[4], u32 memory, int slot, const float* x, int columns, int left) {
    left = min(left, deep - in);
    if (W::zeros && shift == 2 && left >= 4) return several<4>(sum, memory, slot, x, columns);
    return left >= 2 ? several<2>(sum, memory, slot, x, columns) : several<1>(sum, memory, slot, x, columns);
  }
  template <int B> __device__ __forceinline__ int several(float (&sum)[4], u32 memory, int slot, const float* x, int columns) {
    const u32 at = memory + in * (W::CHUNKS * NARROW_CHUNK) + lane * 16, first = scales + slot * pitch + in * plane;
    if constexpr (B == 4) {
      group<B>(sum, at, first, x, columns);
    } else {
      if (shift == 2) group<B>(sum, at, first, x, columns);
      else runs<B>(sum, at, first, x, columns);
    }
    in += B - 1;
    return B - 1;
  }

  // What B blocks need: left operands w, right operands v of 64 columns each, sums of x of 32 columns each, and two factors of sums.
  template <int B> struct Operands {
    uint4 w[B][W::CHUNKS], v[B][2];
    int4 of[B];
    float2 f[B];
    __device__ __forceinline__ Operands(u32 at, const float* x, int columns, int lane, bool sums) {
      const int g = lane >> 2, t = lane & 3;
      const float* const digits = x + (g >> 2) * DECODE_STRIDE + (g & 3) * 16 + t * 4;
      const float* const row = x + min(t >> 1, columns - 1) * DECODE_STRIDE;
#pragma unroll
      for (int b = 0; b < B; b++) {
        const int to = b * columns * DECODE_STRIDE;
#pragma unroll
        for (int c = 0; c < W::CHUNKS; c++) w[b][c] = loadShared16(at + (b * W::CHUNKS + c) * NARROW_CHUNK);
#pragma unroll
        for (int h = 0; h < 2; h++) v[b][h] = g >> 2 < columns ? *(const uint4*)(digits + to + h * 64) : make_uint4(0, 0, 0, 0);
        of[b] = sums ? *(const int4*)(row + to + DECODE_SUMS + (t & 1) * RUNS) : make_int4(0, 0, 0, 0);
        f[b] = *(const float2*)(row + to + DECODE_COLUMNS);
      }
    }
    __device__ __forceinline__ void product(int (&part)[4], bool fresh, int b, int i) const {
      u32 a[4];
      integersOf(typename W::Element(), a, w[b][i * W::CHUNKS / RUNS], i % 2);
      multiplyIntegers<W::zeros>(fresh, part, a, i % 2 ? v[b][i / 2].z : v[b][i / 2].x, i % 2 ? v[b][i / 2].w : v[b][i / 2].y);
    }
  };

  // Adds B blocks of which each has one scale: its group's, or the row's.
  template <int B> __device__ __forceinline__ void group(float (&sum)[4], u32 at, u32 first, const float* x, int columns) const {
    const Operands<B> o(at, x, columns, lane, W::zeros);
    float scale[B][2];
    int zeros[B][2];
#pragma unroll
    for (int b = 0; b < B; b++)
#pragma unroll
      for (int i = 0; i < 2; i++) scale[b][i] = loadFactor(first + b * plane, (lane >> 2) + i * 8, W::zeros ? 2 : factor), zeros[b][i] = zero;
    if (W::zeros && kind == ZEROS)
#pragma unroll
      for (int b = 0; b < B; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) zeros[b][i] = loadShared2(first + second + b * plane + ((lane >> 2) + i * 8) * 2);
    int part[B][2][4]; // a block has two chains of products
#pragma unroll
    for (int i = 0; i < RUNS; i++)
#pragma unroll
      for (int b = 0; b < B; b++) o.product(part[b][i % 2], i < 2, b, i);
#pragma unroll
    for (int b = 0; b < B; b++) {
#pragma unroll
      for (int e = 0; e < 4; e++) part[b][0][e] += part[b][1][e];
      const int less = -(o.of[b].x + o.of[b].y + o.of[b].z + o.of[b].w);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sum[i] += scale[b][i] * digitSum(part[b][0], i, W::zeros ? zeros[b][i] * (less * (i ? W::HIGH : 1)) : 0) * o.f[b].x * o.f[b].y;
      }
    }
  }

  // Adds B blocks with groups of 32 or 64 columns. A run is 32 columns. A register has the scales of two runs, or their zeros or minima.
  template <int B> __device__ __forceinline__ void runs(float (&sum)[4], u32 at, u32 first, const float* x, int columns) const {
    const Operands<B> o(at, x, columns, lane, W::zeros || kind == MINIMA);
    u32 scale[B][4], more[B][4];
#pragma unroll
    for (int b = 0; b < B; b++) {
      const u32 from = first + b * plane + ((lane >> 4) * 2 + (lane & 1) >> shift) * (DECODE_TILE * 2) + (lane >> 3 & 1) * 16;
      loadMatrixTransposed(scale[b], from);
      if (kind != NO_SECOND) {
        loadMatrixTransposed(more[b], from + second);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) more[b][i] = zero * 0x10001;
      }
    }
#pragma unroll
    for (int b = 0; b < B; b++) {
      int part[RUNS][4];
#pragma unroll
      for (int i = 0; i < RUNS; i++) o.product(part[i], true, b, i);
      const int of[RUNS] = {o.of[b].x, o.of[b].y, o.of[b].z, o.of[b].w};
      float all[2] = {};
      if (kind == MINIMA) {
#pragma unroll
        for (int i = 0; i < RUNS; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) all[r] += halfOf(scale[b][i / 2 * 2 + r], i % 2) * digitSum(part[i], r) + halfOf(more[b][i / 2 * 2 + r], i % 2) * (float)(of[i] * (r ? W::HIGH : 1));
      } else {
#pragma unroll
        for (int i = 0; i < RUNS; i++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const u32 pair = more[b][i / 2 * 2 + r];
            all[r] += halfOf(scale[b][i / 2 * 2 + r], i % 2) * digitSum(part[i], r, W::zeros ? (int)(i % 2 ? pair >> 16 : pair & 0xffff) * (of[i] * -(r ? W::HIGH : 1)) : 0);
          }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) sum[r] += all[r] * o.f[b].x * o.f[b].y;
    }
  }
};
#endif
