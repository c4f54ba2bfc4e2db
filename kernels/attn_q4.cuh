// Decode where keys and values have 4 bits: half.Q4, elements of 18 bytes for 32 numbers. Rows lie in shared memory as in pages, one
// behind the other, and parts of pages are copied as bytes. The rest is that of 8 bits (attn_narrow.cuh).
//
// An index becomes an integer of the table, as a float16: products are exact. Scales of keys multiply the sums of 32 products. Scales of
// values multiply weights. Keys are mixed (half.MixQ4), so queries are mixed when they are loaded.
//
// Two indices, in a byte, become a register. On 9.0 a table in shared memory has the registers of all bytes, once for each lane, so that
// no two lanes read one bank. Elsewhere, where shared memory is smaller, permutations of bytes look the integers up.
#pragma once
#include "attn_narrow.cuh"

struct FourBits : OneEight<FourBits> {
  static constexpr int type = 6, bytes = 1, columns = 32, element = 18, indices = 16; // element: bytes; indices: bytes of them
  static constexpr bool scaled = false, finds = false, infinite = false, pairs = false;
  static constexpr float unit = 1;
  static constexpr u32 INTEGERS[4] = {0x3e2e1a01, 0x74675b4d, 0xa79a8d80, 0xefd8c6b6}; // of the indices, plus 128
  static constexpr bool LOOKED_UP = EPILOGUE_WARPS > 0;
  static constexpr int ROW = 256, BYTES = LOOKED_UP ? 256 * ROW : 0; // of the table: of a byte, and of all

  // The integers of four nibbles, each plus 128.
  __device__ static __forceinline__ u32 bytesOf(u32 nibbles) {
    const u32 low = nibbles & 0x7777, from = (nibbles >> 1 & 0x4444) | 0x3210; // from: from the upper half of the integers
    return __byte_perm(__byte_perm(INTEGERS[0], INTEGERS[1], low), __byte_perm(INTEGERS[2], INTEGERS[3], low), from);
  }
  // Two of these bytes as a register: SELECT has 4, which is zero, behind each.
  template <int SELECT> __device__ static __forceinline__ u32 pairOf(u32 bytes) {
    u32 y; // 1024 and a byte, less 1152
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(__byte_perm(bytes, 0x64646464, SELECT)), "r"(0x64806480));
    return y;
  }
  // Registers of the bytes of w.
  __device__ static __forceinline__ void widen(u32 table, u32 w, u32 (&x)[4]) {
    if constexpr (LOOKED_UP) {
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = entry(table, w, i);
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 bytes = bytesOf(w >> 16 * i);
        x[2 * i] = pairOf<0x4140>(bytes), x[2 * i + 1] = pairOf<0x4342>(bytes);
      }
    }
  }
  // Registers of the nibbles of two halfwords: 0, 1, 2 and 3 of each.
  __device__ static __forceinline__ void widen(u32 table, u32 w, u32 v, u32 (&x)[4]) {
    if constexpr (LOOKED_UP) {
      const u32 both = w | v << 16, even = (both & 0x0f0f) | (both >> 12 & 0xf0f0), odd = (both >> 4 & 0x0f0f) | (both >> 16 & 0xf0f0);
      x[0] = entry(table, even, 0), x[1] = entry(table, odd, 0), x[2] = entry(table, even, 1), x[3] = entry(table, odd, 1);
    } else {
      const u32 both = __byte_perm(w, v, 0x5140);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 bytes = bytesOf(both >> 16 * i);
        x[2 * i] = pairOf<0x4240>(bytes), x[2 * i + 1] = pairOf<0x4341>(bytes);
      }
    }
  }
  // The register of byte i of w. Bytes of an address are those of 4 lane, of the byte, and of zeros.
  __device__ static __forceinline__ u32 entry(u32 table, u32 w, int i) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(table + __byte_perm(w, threadIdx.x % 32 * 4, 0x7704 | i << 4)) : "memory");
    return x;
  }
  // Some warps make the table.
  __device__ static __forceinline__ void makeTable(u32 table, int warp, int warps) {
#pragma unroll 4
    for (u32 i = warp; i < 256; i += warps)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(table + i * ROW + threadIdx.x % 32 * 4), "r"(pairOf<0x4140>(bytesOf(i))) : "memory");
  }
};

template <int D_, class V_> struct Shape<Narrow<FourBits>, D_, false, false, V_> {
  static_assert(D_ == 64 || D_ == 128 || D_ == 256);
  using T = Narrow<FourBits>;
  using V = V_;
  using Store = FourBits;
  using Math = MmaNarrow;
  static constexpr int D = D_;
  static constexpr bool LINKED = false, PAGED = false, SHARED_QUERY = false, EVEN = true, PACKED = true;
#if __CUDA_ARCH__ >= 900
  static constexpr int KEYS = 64;
#else
  static constexpr int KEYS = 32;
#endif
  static constexpr int PITCH = D / FourBits::columns * FourBits::element, RING = FourBits::LOOKED_UP ? (D > 128 ? 144 : 80) << 10 : 128 << 10;
  static constexpr int BLOCKS = 1, BLOCK = KEYS * PITCH, SLOT = 2 * BLOCK, SCALES = 0, QUERY = FourBits::BYTES;
  static constexpr int STEPS = D / 16, TILES = D / 8, WIDTH = D + 8;
  enum : int { MERGE_WARPS = EPILOGUE_WARPS, IN_FLIGHT = 4 };
  using Place = Walk<KEYS, V>;
};

__device__ __forceinline__ u32 loadWord(u32 addr) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}
__device__ __forceinline__ u32 loadHalf(u32 addr) {
  u32 x;
  asm volatile("{.reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(x) : "r"(addr) : "memory");
  return x;
}

// Sums and differences of 32 numbers, half.MixQ4: numbers 4t to 4t+3, and these plus 16, of lanes t of four.
__device__ __forceinline__ void mix(float (&v)[8], int lane) {
  const auto both = [&](int i, int j) {
    const float x = v[i], y = v[j];
    v[i] = __fadd_rn(x, y), v[j] = __fsub_rn(x, y);
  };
#pragma unroll
  for (int i = 0; i < 8; i += 2) both(i, i + 1);
#pragma unroll
  for (int i = 0; i < 8; i += 4) both(i, i + 2), both(i + 1, i + 3);
#pragma unroll
  for (int h = 1; h < 4; h *= 2)
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float other = __shfl_xor_sync(~0u, v[i], h);
      v[i] = lane & h ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
    }
#pragma unroll
  for (int i = 0; i < 4; i++) both(i, i + 4);
}

template <class S> struct FourTile : NarrowTile<S> {
  using Base = NarrowTile<S>;
  using Place = typename S::Place;
  using Mode = typename Base::Mode;
  using Queries = typename Base::Queries;
  using State = typename Base::State;
  using Weights = typename Base::Weights;
  using Base::SIXTEEN, Base::SETS, Base::STEPS, Base::GROUPS, Base::UNIT, Base::SMALLER;
  static constexpr int ELEMENTS = S::D / FourBits::columns, PITCH = S::PITCH;
  enum : int { KEPT = ELEMENTS <= 4 }; // scales of values are in registers until they multiply weights

  // Whether queries, which mixing makes sums, and weights need their second parts.
  __device__ static __forceinline__ bool isPrecise(const Params& p) { return p.queryType == Float32::type || p.outType == Float32::type; }

#if __CUDA_ARCH__ >= 900
  // `box` keys and values from a row on.
  __device__ static __forceinline__ void copy(const Params& p, u32 to, int key, int row, int box, u32 bar, u64 policy) {
    const long long from = (long long)row * PITCH;
    const auto bytes = [&](u32 dst, const void* src) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"((const char*)src + from), "r"(box * PITCH), "r"(bar), "l"(policy) : "memory");
    };
    bytes(to + key * PITCH, p.keys), bytes(to + S::BLOCK + key * PITCH, p.values);
  }
#endif
  // As Ring's Reader: the same of a chunk, 16 bytes a lane.
  template <class Reader> __device__ static __forceinline__ void issue(const Params& p, Reader& reader, int lane, int warps) {
    const u32 to = reader.ring + reader.slot * S::SLOT;
#pragma unroll 1
    for (int key = 0; reader.more && key < S::KEYS; key += p.box) {
      const int in = reader.at.chunk * S::KEYS + key;
      const bool there = in < reader.at.s.keys;
      long long from = 0;
      if (there) {
        const int n = p.pages == nullptr ? 0 : in / p.pageTokens, page = p.pages == nullptr ? reader.at.s.pages : p.pages[reader.at.s.pages + n];
        from = ((long long)page * p.pageRows + reader.at.head * p.headRows + in - n * p.pageTokens) * PITCH;
      }
#pragma unroll 1
      for (int i = lane * 16; i < p.box * PITCH; i += 512) {
        const u32 at = to + key * PITCH + i;
        copy16(at, (const char*)p.keys + from + i, there), copy16(at + S::BLOCK, (const char*)p.values + from + i, there);
      }
    }
    copyCommit();
    if (++reader.slot == reader.stages) reader.slot = 0;
    if (reader.more) reader.advance(p, warps);
  }

  // Values that no row sees may be anything: their scales become 0.
  __device__ static __forceinline__ void clear(u32 values, int from, int to, int lane) {
    for (int i = lane; i < (to - from) * ELEMENTS; i += 32)
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(values + (from + i / ELEMENTS) * PITCH + i % ELEMENTS * FourBits::element + FourBits::indices), "h"((u16)0) : "memory");
  }
  __device__ static __forceinline__ void clearBehind(u32 values, int live, int lane) { clear(values, live, UNIT, lane); }

  // As NarrowTile's, of mixed queries. Of each even element, a lane's operands are those of its bytes 4t to 4t+3, as keys have them. Of
  // each odd one, which begins between two words, they are those of bytes 4t-2 to 4t+1; of lane 0, bytes 14, 15, 0 and 1.
  __device__ static __forceinline__ void load(const Params& p, const Place& w, Queries& q, int above, int lane, int) {
    const int rows = w.rows(p) - above, t = lane & 3, g = lane >> 2;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      const int r = 8 * set + g;
      float v[ELEMENTS][8] = {};
      if (r < rows) {
        const int i = w.block * ROWS + above + r, n = positionOf(p, i);
        const long long at = (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + i - n * p.group) * p.queryHead + 4 * t;
        withStore(p.queryType, [&](auto query) {
#pragma unroll
          for (int k = 0; k < 2 * ELEMENTS; k++) {
            const float4 x = decltype(query)::load4(p.query, at + k * 16);
            float (&to)[8] = v[k / 2];
            to[k % 2 * 4] = x.x, to[k % 2 * 4 + 1] = x.y, to[k % 2 * 4 + 2] = x.z, to[k % 2 * 4 + 3] = x.w;
          }
        });
      }
      float up = 1, factor = p.scale, top = 0;
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++) {
        mix(v[e], lane);
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[e][i]));
      }
      Attention<S>::scaleOf(top, up, factor);
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++) {
        u32 hi[4], lo[4]; // of byte 4t+i
#pragma unroll
        for (int i = 0; i < 4; i++) Base::parts(v[e][i] * up, v[e][4 + i] * up, hi[i], lo[i]);
        if (e % 2 > 0) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int before = lane & ~3 | (t + 3 & 3);
            const u32 x = __shfl_sync(~0u, hi[2 + i], before), y = __shfl_sync(~0u, lo[2 + i], before);
            hi[2 + i] = hi[i], lo[2 + i] = lo[i], hi[i] = x, lo[i] = y;
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) q.hi[set][2 * e + i / 2][i % 2] = hi[i], q.lo[set][2 * e + i / 2][i % 2] = lo[i];
      }
#pragma unroll
      for (int j = 0; j < 2; j++) q.factor[set][j] = __shfl_sync(~0u, factor, (2 * t + j) * 4); // of the rows whose scores the lane has
    }
  }

  // Scores become weights, in a state that is scaled for them. Returns what makes scales of values less than 1.
  template <int SETS> __device__ static __forceinline__ float weigh(State& st, float (&s)[GROUPS][SETS][4], float (&top)[SETS][2], float most) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) {
      most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
#pragma unroll
      for (int set = 0; set < SETS; set++)
#pragma unroll
        for (int j = 0; j < 2; j++) top[set][j] = fmaxf(top[set][j], __shfl_xor_sync(~0u, top[set][j], i));
    }
    float shrink = 1; // of o
    const int exponent = __float_as_int(most) >> 23;
    if (exponent >= st.exponent) {
      shrink = st.exponent + 126 > exponent ? __int_as_float((st.exponent + 126 - exponent) << 23) : 0.f;
      st.exponent = exponent + 1;
    }
    bool rises = shrink != 1;
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        top[set][j] = fmaxf(top[set][j], st.m[set][j]);
        rises |= top[set][j] != st.m[set][j];
      }
    rises = __any_sync(~0u, rises);
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const Weights weights(top[set][j]);
        if (rises) {
          const float by = weights.weight(st.m[set][j]);
          st.l[set][j] *= by, st.m[set][j] = top[set][j];
#pragma unroll
          for (int n = 0; n < STEPS; n++) {
            st.o[set][n][j] *= by * shrink, st.o[set][n][2 + j] *= by * shrink;
          }
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float& x = s[i][set][2 * h + j];
            x = weights.of(x), st.l[set][j] += x;
          }
      }
    return __int_as_float((254 - st.exponent) << 23);
  }

  // As NarrowTile's.
  template <Mode MODE, class... View> __device__ static __forceinline__ void merge(State& st, const Queries& q, u32 keys, u32 values, u32 table, int lane, bool masked, const int (&limit)[Base::SETS][2], bool precise, bool, int, const View&... view) {
    constexpr int SETS = MODE == SIXTEEN ? 2 : 1;
    constexpr float UNMIXED = FourBits::unit / FourBits::columns;
    const int g = lane >> 2, t = lane & 3;
    float s[GROUPS][SETS][4]; // of keys g (0, 1) and g+8 (2, 3) of each 16, and the lane's rows
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int set = 0; set < SETS; set++) s[i][set][0] = s[i][set][1] = s[i][set][2] = s[i][set][3] = 0.f;
    const u32 around = t == 0 ? 0x3254 : 0x3210;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e += 2)
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        u32 x[2][2][4]; // of two elements, and keys g and g+8
        float scale[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) { // two elements are nine words
          const u32 at = keys + (i * 16 + h * 8 + g) * PITCH + e * FourBits::element;
          const u32 middle = loadWord(at + 16), last = loadWord(at + 32);
          FourBits::widen(table, loadWord(at + 4 * t), x[0][h]);
          FourBits::widen(table, __byte_perm(loadWord(at + 16 + 4 * t), last, around), x[1][h]);
          scale[0][h] = __uint_as_float(middle << 16), scale[1][h] = __uint_as_float(last & 0xffff0000);
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++)
#pragma unroll
          for (int set = 0; set < SETS; set++) {
            float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int k = 0; k < 2; k++) {
              const u32 a[4] = {x[odd][0][2 * k], x[odd][1][2 * k], x[odd][0][2 * k + 1], x[odd][1][2 * k + 1]};
              const int step = 2 * (e + odd) + k;
              MmaF16::mma(sum, a, q.hi[set][step][0], q.hi[set][step][1]);
              if (precise) MmaF16::mma(sum, a, q.lo[set][step][0], q.lo[set][step][1]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][set][j] = __fmaf_rn(sum[j], scale[odd][j / 2], s[i][set][j]);
          }
      }

    float top[SETS][2], scale[GROUPS][2][KEPT ? ELEMENTS : 1], most = 0.f;
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int j = 0; j < 2; j++) top[set][j] = -LEAN_INF;
    const auto scored = [&](float x, int set, int j) { return x * q.factor[set][j] * UNMIXED; }; // in this order: neither factor may be a number's undoing
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
        each([&](float x, int j, int) { return scored(x, set, j); });
        (view.apply(set, g, each), ...);
      }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int key = i * 16 + h * 8 + g;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e += 2) {
          const u32 at = values + key * PITCH + e * FourBits::element;
          if constexpr (KEPT) {
            scale[i][h][e] = __uint_as_float(loadWord(at + 16) << 16) * SMALLER, scale[i][h][e + 1] = __uint_as_float(loadWord(at + 32) & 0xffff0000) * SMALLER;
            most = fmaxf(most, fmaxf(fabsf(scale[i][h][e]), fabsf(scale[i][h][e + 1])));
          } else {
            most = fmaxf(most, fmaxf(fabsf(__uint_as_float(loadWord(at + 16) << 16)), fabsf(__uint_as_float(loadWord(at + 32) & 0xffff0000))) * SMALLER);
          }
        }
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float& x = s[i][set][2 * h + j];
            if (sizeof...(View) == 0) x = scored(x, set, j);
            if (masked && key >= limit[set][j]) x = -LEAN_INF;
            top[set][j] = fmaxf(top[set][j], x);
          }
      }
    const float up = weigh<SETS>(st, s, top, most);

#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int e = 0; e < ELEMENTS; e++) {
        u32 hi[SETS][2], lo[SETS][2], x[2][4];
#pragma unroll
        for (int set = 0; set < SETS; set++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float by;
            if constexpr (KEPT) by = scale[i][h][e] * up;
            else by = __uint_as_float(loadHalf(values + (i * 16 + h * 8 + g) * PITCH + e * FourBits::element + FourBits::indices) << 16) * SMALLER * up;
            const float x = s[i][set][2 * h] * by, y = s[i][set][2 * h + 1] * by;
            hi[set][h] = MmaF16::pack(x, y);
            if (precise) lo[set][h] = transposed(MmaF16::pack(x - MmaF16::low(hi[set][h]), y - MmaF16::high(hi[set][h])));
            hi[set][h] = transposed(hi[set][h]);
          }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 at = values + (i * 16 + h * 8 + 2 * t) * PITCH + e * FourBits::element + 2 * g;
          FourBits::widen(table, loadHalf(at), loadHalf(at + PITCH), x[h]);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const u32 a[4] = {x[0][2 * k], x[0][2 * k + 1], x[1][2 * k], x[1][2 * k + 1]};
#pragma unroll
          for (int set = 0; set < SETS; set++) {
            MmaF16::mma(st.o[set][2 * e + k], a, hi[set][0], hi[set][1]);
            if (precise) MmaF16::mma(st.o[set][2 * e + k], a, lo[set][0], lo[set][1]);
          }
        }
      }
  }
};

template <int D, class V> struct TileOf<Shape<Narrow<FourBits>, D, false, false, V>> {
  using type = FourTile<Shape<Narrow<FourBits>, D, false, false, V>>;
};

#define FOUR_ATTENTION(name, D) NARROW_ENTRY(name, NarrowLaunchParams, FourBits, D)
