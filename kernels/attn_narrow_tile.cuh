// The arithmetic of keys and values of 8 bits with scales, in float16.
//
// Elements become float16 in registers, exactly. Keys are left operands of S^T = K Q^T, and values of O^T = V^T P^T: eight
// rows of an output tile are the columns of a product, and sixteen rows are two sets of them. Scales of keys multiply
// scores. Scales of values multiply weights, relative to a power of two that is larger than all of them, so that weights fit
// float16. Queries that are not float16, and weights, are sums of two parts.
#pragma once
#include "attn_lean.cuh"

__device__ __forceinline__ float part(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
__device__ __forceinline__ float4 loadShared4(u32 addr) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(addr) : "memory");
  return x;
}
// A float; 0 where there is nothing to read.
__device__ __forceinline__ void copyScale(u32 to, const float* from, bool there) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0) : "memory"); }

#if __CUDA_ARCH__ >= 900
// An arrival of the lane when its copies so far are there. The barrier counts it.
__device__ __forceinline__ void arriveCopied(u32 bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory"); }
#endif

// Stores of 8 bits have
//
//   widen     elements 0 and 2 of a register as float16, and elements 1 and 3, divided by `unit`
//   split     as widen; with `pairs` elements 0 and 1, and elements 2 and 3. Keys are read so.
//   nan       not 0 if one of a register's elements is NaN
//   finds     whether nan must be asked, since widen makes numbers of NaN, unless a scale is NaN, too
//   infinite  whether widen makes infinities of NaN
//   with      a function of the Store: of Eights, which has two, that of a type

template <class Store> struct OneEight {
  __device__ static __forceinline__ float unitOf(int) { return Store::unit; }
  __device__ static __forceinline__ bool pairsOf(int) { return Store::pairs; }
  template <class F> __device__ static __forceinline__ void with(int, const F& f) { f(Store{}); }
};

struct Float8 : OneEight<Float8> { // E4M3
  static constexpr int type = 4, bytes = 1;
  static constexpr bool scaled = true;
#if __CUDA_ARCH__ >= 890
  static constexpr bool finds = false, infinite = false, pairs = true;
  static constexpr float unit = 1;
  __device__ static __forceinline__ void split(u32 w, u32& first, u32& second) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}" : "=r"(first), "=r"(second) : "r"(w));
  }
  __device__ static __forceinline__ void widen(u32 w, u32& even, u32& odd) {
    split(__byte_perm(w, 0, 0x3120), even, odd); // 0 2 1 3
  }
  __device__ static __forceinline__ u32 nan(u32) { return 0; }
#else
  static constexpr bool finds = true, infinite = false, pairs = false;
  static constexpr float unit = 256; // sign and seven bits in their places of float16
  __device__ static __forceinline__ void widen(u32 w, u32& even, u32& odd) {
    even = (w & 0x007f007f) << 7 | (w & 0x00800080) << 8;
    odd = (w & 0x7f007f00) >> 1 | (w & 0x80008000);
  }
  __device__ static __forceinline__ void split(u32 w, u32& even, u32& odd) { widen(w, even, odd); }
  __device__ static __forceinline__ u32 nan(u32 w) { return ((w & 0x7f7f7f7f) + 0x01010101) & 0x80808080; }
#endif
};

struct Integer8 : OneEight<Integer8> {
  static constexpr int type = 5, bytes = 1;
  static constexpr bool scaled = true, finds = false, infinite = true, pairs = false;
  static constexpr float unit = 0x1p-5f;
  // 57344 + 32(127 - x) is a float16 whose last bits are those of 127 - x. The largest one, of -128, is NaN: 32 more are an infinity.
  __device__ static __forceinline__ u32 number(u32 x) {
    u32 y;
    asm("sub.rn.f16x2 %0, %1, %2; sub.rn.f16x2 %0, %3, %0;" : "=&r"(y) : "r"(x), "r"(0xd000d000), "r"(0x7b807b80)); // less -32
    return y;
  }
  __device__ static __forceinline__ void widen(u32 w, u32& even, u32& odd) {
    const u32 x = w ^ 0x7f7f7f7f;
    even = number(__byte_perm(x, 0x7b7b7b7b, 0x4240)), odd = number(__byte_perm(x, 0x7b7b7b7b, 0x4341));
  }
  __device__ static __forceinline__ void split(u32 w, u32& even, u32& odd) { widen(w, even, odd); }
  __device__ static __forceinline__ u32 nan(u32) { return 0; }
};

// States leave the tile unlifted.
struct MmaNarrow : MmaF16 {
  static constexpr float lift = 0;
};
template <class Store_> struct Narrow {
  using Store = Store_;
  using Math = MmaNarrow;
  static constexpr bool ready = false;
};

template <class Store_, int D_, class V_> struct Shape<Narrow<Store_>, D_, false, false, V_> {
  static_assert(D_ == 64 || D_ == 128 || D_ == 256);
  using T = Narrow<Store_>;
  using V = V_;
  using Store = Store_;
  using Math = MmaNarrow;
  static constexpr int D = D_;
  static constexpr bool LINKED = false, PAGED = false, SHARED_QUERY = false, EVEN = true, PACKED = false; // PACKED: as attn_q4.cuh
#if __CUDA_ARCH__ >= 900
  static constexpr int KEYS = 64, PITCH = D, RING = 192 << 10; // bytes from a key to the next, and of the largest ring
#else
  static constexpr int KEYS = 32, PITCH = 128, RING = 128 << 10;
#endif
  static constexpr int BLOCKS = PITCH < D ? D / PITCH : 1, BLOCK = KEYS * PITCH;
  static constexpr int SLOT = 2 * BLOCKS * BLOCK;
  static constexpr int SCALES = 2 * KEYS * 4; // bytes beside a slot
  static constexpr int QUERY = RING / SLOT * SCALES; // bytes of the scales of all slots
  static constexpr int STEPS = D / 16, TILES = D / 8, WIDTH = D + 8;
  enum : int { MERGE_WARPS = EPILOGUE_WARPS, IN_FLIGHT = 4 };
  using Place = Walk<KEYS, V>;
};

template <class S> struct NarrowTile {
  using Store = typename S::Store;
  using Weights = RowWeights<MmaF16>; // lifted
  using Place = typename S::Place;
  static constexpr int KEYS = S::KEYS, STEPS = S::STEPS;
  static constexpr int UNIT = 32, GROUPS = UNIT / 16; // UNIT: keys that a warp merges at a time
  static constexpr float LOWER = 0x1p-15f; // undoes the lift

  // Which rows the columns of products are: FEW: both parts of a row side by side, of up to 4 rows. EIGHT, SIXTEEN: a
  // row each, in one set of columns or two, and a product for each part. Where two warps share chunks, each has one set.
  // ONE: all rows have the largest mode, so the kernel has its code once.
  enum Mode { FEW, EIGHT, SIXTEEN };
  static constexpr int SETS = EPILOGUE_WARPS > 0 ? 1 : 2;
  static constexpr bool ONE = S::V::scores || S::PACKED;
  __device__ static __forceinline__ Mode modeOf(int rows) {
    if (ONE) return SETS == 1 ? EIGHT : SIXTEEN;
    return rows <= 4 ? FEW : rows <= 8 || SETS == 1 ? EIGHT : SIXTEEN;
  }
  // Whether queries need their second parts.
  __device__ static __forceinline__ bool isPrecise(const Params& p) { return p.queryType == Float32::type; }
  // A lane's row number j of a set.
  __device__ static __forceinline__ int rowOf(Mode mode, int lane, int set, int j) { return mode == FEW ? lane & 3 : 8 * set + 2 * (lane & 3) + j; }

  // 16 bytes of a row, from column 16*piece on. The copy engine copies lines of 128 bytes, which may be two rows, and swizzles
  // by addresses.
  __device__ static __forceinline__ u32 place(int row, int piece) {
    const u32 at = S::BLOCKS > 1 ? piece / 8 * S::BLOCK + row * S::PITCH + piece % 8 * 16 : row * S::PITCH + piece * 16;
    return at ^ (at >> 3 & 0x70);
  }
  __device__ static __forceinline__ u32 placeOf(int group, int step, int lane) { return place(group * 16 + (lane & 15), step + (lane >> 4)); }

  // Where the scale of a key (or value) lies: those of keys g, g+8, g+16, ... follow each other.
  __device__ static __forceinline__ int scaleAt(int key) { return (key % 8 * (KEYS / 8) + key / 8) * 4; }

  // Right operands: elements 4t and 4t+2, 4t+1 and 4t+3 (or pairs: 4t and 4t+1, 4t+2 and 4t+3) of each 16 of row g, t = lane%4,
  // g = lane/4. That is how keys lie.
  // FEW: of row g/2, the first parts if g is even, else the second ones.
  struct Queries {
    u32 hi[SETS][STEPS][2], lo[SETS][STEPS][2];
    float factor[SETS][2]; // that makes scores of products
  };

  // Of the output tile's rows from number `above` on.
  __device__ static __forceinline__ void load(const Params& p, const Place& w, Queries& q, int above, int lane, int type) {
    const int rows = w.rows(p) - above, t = lane & 3, g = lane >> 2;
    const Mode mode = modeOf(w.rows(p));
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      if (!ONE && set * 8 >= rows) break;
      const int r = mode == FEW ? g / 2 : 8 * set + g;
      float4 x[STEPS] = {};
      if (r < rows) {
        const int i = w.block * ROWS + above + r, n = positionOf(p, i);
        const long long at = (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + i - n * p.group) * p.queryHead + 4 * t;
        withStore(p.queryType, [&](auto query) {
#pragma unroll
          for (int k = 0; k < STEPS; k++) x[k] = decltype(query)::load4(p.query, at + k * 16);
        });
      }
      float up = 1, factor = p.scale * Store::unitOf(type);
      if (p.queryType != Float16::type) {
        float top = 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) top = fmaxf(fmaxf(top, fmaxf(fabsf(x[k].x), fabsf(x[k].y))), fmaxf(fabsf(x[k].z), fabsf(x[k].w)));
        Attention<S>::scaleOf(top, up, factor);
      }
      const bool second = mode == FEW && g % 2 > 0;
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        u32 (&hi)[2] = q.hi[set][k], (&lo)[2] = q.lo[set][k];
        const bool pairs = Store::pairsOf(type);
        const float y = pairs ? x[k].y : x[k].z, z = pairs ? x[k].z : x[k].y;
        parts(x[k].x * up, y * up, hi[0], lo[0]);
        parts(z * up, x[k].w * up, hi[1], lo[1]);
        if (second) hi[0] = p.queryType == Float16::type ? 0 : lo[0], hi[1] = p.queryType == Float16::type ? 0 : lo[1];
      }
#pragma unroll
      for (int j = 0; j < 2; j++) q.factor[set][j] = __shfl_sync(~0u, factor, mode == FEW ? t * 8 : (2 * t + j) * 4); // of the rows whose scores the lane has
    }
  }
  __device__ static __forceinline__ void parts(float x, float y, u32& hi, u32& lo) {
    hi = MmaF16::pack(x, y), lo = MmaF16::pack(x - MmaF16::low(hi), y - MmaF16::high(hi));
  }

  // The state of an output tile: m and l of the lane's rows (l is this lane's part of it), and of o columns 16n+2g and
  // 16n+2g+1 of these rows, or FEW as sums of both parts, in units of 2^(exponent-127) values.
  struct State {
    float m[SETS][2], l[SETS][2], o[SETS][STEPS][4];
    int exponent;
    __device__ __forceinline__ void empty() {
      exponent = 1;
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        m[set][0] = m[set][1] = -LEAN_INF, l[set][0] = l[set][1] = 0.f;
#pragma unroll
        for (int n = 0; n < STEPS; n++) o[set][n][0] = o[set][n][1] = o[set][n][2] = o[set][n][3] = 0.f;
      }
    }
    // As Attention's State.
    __device__ __forceinline__ void sink(int lane, int set, const float (&x)[2]) {
#pragma unroll
      for (int j = 0; j < 2; j++) m[set][j] = x[j], l[set][j] = lane < 4 && x[j] != -LEAN_INF ? 1 / LOWER : 0.f;
    }
    // When all chunks are merged: as Attention's State. merges: with the state that is there.
    __device__ __forceinline__ void leave(Mode mode, int rows, int lane, float* to, float4* ms, float4* ls, int state, bool merges, int type) {
      const float LEFT = LOWER * Store::unitOf(type) / SMALLER;
      const int g = lane >> 2;
      const float unit = __int_as_float(exponent << 23);
      if (mode == FEW) {
#pragma unroll
        for (int n = 0; n < STEPS; n++) o[0][n][0] += o[0][n][1], o[0][n][2] += o[0][n][3];
      }
#pragma unroll
      for (int set = 0; set < SETS; set++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float sum = l[set][j], top = m[set][j], mine = 1, other = 0;
#pragma unroll
          for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
          sum *= LOWER;
          const int r = rowOf(mode, lane, set, j);
          const bool there = r < rows && !(mode == FEW && set + j > 0);
          float* const at = to + r * S::WIDTH + 2 * g, * const theM = (float*)(ms + r) + state, * const theL = (float*)(ls + r) + state;
          if (merges && there) {
            const float theirs = *theM;
            top = fmaxf(top, theirs);
            const Merge merge(top);
            mine = merge.weight(m[set][j]), other = merge.weight(theirs), sum = sum * mine + *theL * other;
          }
          if (merges) __syncwarp(); // all lanes of a row have read
          if (!there) continue;
#pragma unroll
          for (int n = 0; n < STEPS; n++) {
            float2* const pair = (float2*)(at + 16 * n);
            const int x0 = S::PACKED ? n & ~1 : n, x1 = S::PACKED ? n | 1 : n, i = S::PACKED && n % 2 > 0 ? 2 : 0;
            float2 x = make_float2(number(o[set][x0][i + j]) * LEFT * unit, number(o[set][x1][(S::PACKED ? i : 2) + j]) * LEFT * unit);
            if (merges) x = make_float2(x.x * mine + pair->x * other, x.y * mine + pair->y * other);
            *pair = x;
          }
          if (g == 0) *theM = top, *theL = sum;
        }
    }
  };
  // NaN for an infinity, of Stores that make these of NaN.
  __device__ static __forceinline__ float number(float x) { return Store::infinite ? fmaf(x, 0.f, x) : x; }
  static constexpr float SMALLER = 0x1p-3f; // scales of values are multiplied by it: so `unit` is finite

  // What lies behind the live values of a unit may be anything, and 0 times NaN is NaN.
  __device__ static __forceinline__ void clearBehind(u32 values, int live, int lane) { clear(values, live, UNIT, lane); }
  // Values from number `from` on, before number `to`.
  __device__ static __forceinline__ void clear(u32 values, int from, int to, int lane) {
    constexpr int PIECES = S::D / 16;
    for (int i = lane; i < (to - from) * PIECES; i += 32)
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(values + place(from + i / PIECES, i % PIECES)), "r"(0) : "memory");
  }

  // Whether some of a warp's keys (or values) are NaN, for Stores that make numbers of these (where a chunk is a unit).
  template <class Store> __device__ static __forceinline__ bool findNaN(u32 block, int lane) {
    u32 bad = 0;
#pragma unroll 4
    for (int i = lane * 16; i < UNIT * S::PITCH * S::BLOCKS; i += 512) {
      u32 x[4];
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(block + i) : "memory");
      bad |= Store::nan(x[0]) | Store::nan(x[1]) | Store::nan(x[2]) | Store::nan(x[3]);
    }
    return __any_sync(~0u, bad != 0);
  }
  // Of keys that have an element that is NaN, scores are NaN.
  template <class Store, int SETS> __device__ static __forceinline__ void spoilScores(float (&s)[GROUPS][SETS][4], u32 keys, int lane) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      u32 bad[2] = {0, 0};
#pragma unroll
      for (int k = 0; k < STEPS; k += 2) {
        u32 x[4];
        loadMatrix(x, keys + placeOf(i, k, lane));
        bad[0] |= Store::nan(x[0]) | Store::nan(x[2]), bad[1] |= Store::nan(x[1]) | Store::nan(x[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bad[h] |= __shfl_xor_sync(~0u, bad[h], 1);
        bad[h] |= __shfl_xor_sync(~0u, bad[h], 2);
        if (bad[h] == 0) continue;
#pragma unroll
        for (int set = 0; set < SETS; set++) s[i][set][2 * h] = s[i][set][2 * h + 1] = __int_as_float(0x7fffffff);
      }
    }
  }
  // Of values that have an element that is NaN, the column is NaN.
  template <class Store, int SETS> __device__ static __forceinline__ void spoilColumns(State& st, u32 values, int lane) {
#pragma unroll
    for (int n = 0; n < STEPS; n += 2) {
      u32 bad[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        u32 x[4];
        loadMatrixTransposed(x, values + placeOf(i, n, lane));
        bad[0] |= Store::nan(x[0]) | Store::nan(x[1]), bad[1] |= Store::nan(x[2]) | Store::nan(x[3]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bad[h] |= __shfl_xor_sync(~0u, bad[h], 1);
        bad[h] |= __shfl_xor_sync(~0u, bad[h], 2);
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (bad[h] & (j < 2 ? 0x00ff00ff : 0xff00ff00)) st.o[set][n + h][j] = __int_as_float(0x7fffffff);
      }
    }
  }

  // Merges the keys of a unit into the state. Rows see `limit` of them; `masked` if some row does not see all. look: there may be NaN
  // that Store makes numbers of. `view`, if there is one: what becomes of a set's scores before. Neighbouring products have different
  // sums, so that none waits.
  template <Mode MODE, class... View> __device__ static __forceinline__ void merge(State& st, const Queries& q, u32 keys, u32 values, u32 scales, int lane, bool masked, const int (&limit)[NarrowTile::SETS][2], bool precise, bool look, int type, const View&... view) {
    constexpr int SETS = MODE == SIXTEEN ? 2 : 1, MINE = MODE == FEW ? 1 : 2; // MINE: of a set, rows of a lane
    const int g = lane >> 2;
    constexpr int AT_ONCE = SETS == 1 ? 4 : 2; // steps that are in registers together
    float s[GROUPS][SETS][4];                  // of keys g (0, 1) and g+8 (2, 3) of each 16, and the lane's rows
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int set = 0; set < SETS; set++) s[i][set][0] = s[i][set][1] = s[i][set][2] = s[i][set][3] = 0.f;
    Store::with(type, [&](auto of) {
      using Store = decltype(of);
#pragma unroll
      for (int k = 0; k < STEPS; k += 2) {
        u32 x[GROUPS][4];
#pragma unroll
        for (int i = 0; i < GROUPS; i++) loadMatrix(x[i], keys + placeOf(i, k, lane));
#pragma unroll
        for (int h = 0; h < 2; h++) {
          u32 a[GROUPS][4];
#pragma unroll
          for (int i = 0; i < GROUPS; i++) Store::split(x[i][2 * h], a[i][0], a[i][2]), Store::split(x[i][2 * h + 1], a[i][1], a[i][3]);
          const auto multiply = [&](const u32 (&of)[NarrowTile::SETS][STEPS][2]) {
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
              for (int i = 0; i < GROUPS; i++) MmaF16::mma(s[i][set], a[i], of[set][k + h][0], of[set][k + h][1]);
          };
          multiply(q.hi);
          if (MODE != FEW && precise) multiply(q.lo);
        }
      }
      if (Store::finds && look && findNaN<Store>(keys, lane)) spoilScores<Store, SETS>(s, keys, lane);
    });

    float top[SETS][MINE], scale[GROUPS][2], most = 0.f;
    const float4 keyScales = loadShared4(scales + scaleAt(g)), valueScales = loadShared4(scales + KEYS * 4 + scaleAt(g));
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int j = 0; j < MINE; j++) top[set][j] = -LEAN_INF;
    if constexpr (sizeof...(View) > 0) {
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        const auto each = [&](const auto& f) {
#pragma unroll
          for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
              for (int j = 0; j < 2; j++) s[i][set][2 * h + j] = f(s[i][set][2 * h + j], j, i * 16 + h * 8);
        };
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int j = 0; j < 2; j++) s[i][set][2 * h + j] = number(s[i][set][2 * h + j]) * (q.factor[set][j] * part(keyScales, 2 * i + h));
        (view.apply(set, g, each), ...);
      }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int key = i * 16 + h * 8 + g;
        const float of = part(keyScales, 2 * i + h);
        scale[i][h] = part(valueScales, 2 * i + h) * SMALLER;
        most = fmaxf(most, scale[i][h]);
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
          for (int j = 0; j < MINE; j++) {
            float& x = s[i][set][2 * h + j];
            if (MODE == FEW) x += s[i][set][2 * h + 1];
            if (sizeof...(View) == 0) x = number(x) * (q.factor[set][j] * of);
            if (masked && key >= limit[set][j]) x = -LEAN_INF;
            top[set][j] = fmaxf(top[set][j], x);
          }
      }
#pragma unroll
    for (int i = 4; i < 32; i *= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
#pragma unroll
      for (int set = 0; set < SETS; set++)
#pragma unroll
        for (int j = 0; j < MINE; j++) top[set][j] = fmaxf(top[set][j], __shfl_xor_sync(~0u, top[set][j], i));
    }
    float shrink = 1; // of o
    const int exponent = __float_as_int(most) >> 23;
    if (exponent >= st.exponent) {
      shrink = st.exponent + 126 > exponent ? __int_as_float((st.exponent + 126 - exponent) << 23) : 0.f;
      st.exponent = exponent + 1;
    }
    const float up = __int_as_float((254 - st.exponent) << 23);
    bool rises = shrink != 1;
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        top[set][j] = fmaxf(top[set][j], st.m[set][j]);
        rises |= top[set][j] != st.m[set][j];
      }
    rises = __any_sync(~0u, rises);
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        const Weights weights(top[set][j]);
        if (rises) {
          const float by = weights.weight(st.m[set][j]);
          st.l[set][j] *= by, st.m[set][j] = top[set][j];
#pragma unroll
          for (int n = 0; n < STEPS; n++) {
            st.o[set][n][j] *= by * shrink, st.o[set][n][2 + j] *= by * shrink;
            if (MODE == FEW) st.o[set][n][1] *= by * shrink, st.o[set][n][3] *= by * shrink;
          }
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float& x = s[i][set][2 * h + j];
            x = weights.of(x);
            st.l[set][j] += x;
            x *= scale[i][h] * up;
          }
      }

    Store::with(type, [&](auto of) {
      using Store = decltype(of);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        u32 hi[SETS][2], lo[SETS][2];
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float x = s[i][set][2 * h], y = MODE == FEW ? x - MmaF16::low(MmaF16::pack(x, 0.f)) : s[i][set][2 * h + 1];
            parts(x, y, hi[set][h], lo[set][h]);
            hi[set][h] = transposed(hi[set][h]);
            if (MODE != FEW) lo[set][h] = transposed(lo[set][h]);
          }
#pragma unroll
        for (int n = 0; n < STEPS; n += AT_ONCE) {
          u32 a[AT_ONCE][4];
#pragma unroll
          for (int h = 0; h < AT_ONCE; h += 2) {
            u32 x[4];
            loadMatrixTransposed(x, values + placeOf(i, n + h, lane));
            Store::widen(x[0], a[h][0], a[h][1]), Store::widen(x[1], a[h][2], a[h][3]);
            Store::widen(x[2], a[h + 1][0], a[h + 1][1]), Store::widen(x[3], a[h + 1][2], a[h + 1][3]);
          }
          const auto weigh = [&](const u32 (&of)[SETS][2]) {
#pragma unroll
            for (int set = 0; set < SETS; set++)
#pragma unroll
              for (int h = 0; h < AT_ONCE; h++) MmaF16::mma(st.o[set][n + h], a[h], of[set][0], of[set][1]);
          };
          weigh(hi);
          if (MODE != FEW) weigh(lo);
        }
      }
      if (Store::finds && look && findNaN<Store>(values, lane)) spoilColumns<Store, SETS>(st, values, lane);
    });
  }
};
