// Layers of the megakernel (megakernel.cuh) whose weights have 8 or 4 bits, in the order of internal/weight/packed.go.
//
// A slot of a warp's ring has up to 4096 bytes of 16 rows of W: a few blocks of 128 columns. Copies bring the scales of these rows
// and columns, and their zeros or minima, to memory behind the rings. A warp turns a block into left operands in registers (gemm_narrow.cuh).
// The sums of each group are multiplied by its scale, so that nothing is rounded. A row's own scale is that of a group that all of its blocks
// have.
#pragma once
#include "gemm_narrow.cuh"
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

__device__ __forceinline__ bool hasMinima(const DecodePacked& o) { return o.kind == MINIMA; }

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

// A warp's way through the blocks of its slots.
template <class W> struct PackedBlocks {
  static constexpr int RUNS = 4; // of 32 columns, of a block
  const int deep, shift, factor, plane, second, kind;
  const u32 scales, pitch; // of the warp's slots
  const u32 magic;
  const int lane, t;
  const bool e4m3;
  u32 less[2] = {};
  int in = 0; // of the slot

  __device__ __forceinline__ PackedBlocks(const DecodePacked& o, u32 scales, u32 pitch, int lane)
      : deep(o.deep), shift(o.runs), factor(o.factor), plane(o.plane), second(o.behind), kind(o.kind), scales(scales + (lane >> 2) * o.factor), pitch(pitch), magic(o.magic), lane(lane), t(lane & 3), e4m3(o.e4m3) {
    if constexpr (W::zeros) NarrowInt4::less(less, o.zero, o.zero);
  }
  __device__ __forceinline__ bool begins() const { return in == 0; }
  // Goes on to the next block; returns whether the slot is used up.
  __device__ __forceinline__ bool next(bool last) {
    if (++in < deep && !last) return false;
    in = 0;
    return true;
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
#endif
