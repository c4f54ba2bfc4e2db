// The arithmetic: queries as operands of the tensor core, and the merging of a
// chunk of keys and values into an attention state.
#pragma once
#include "attn_work.cuh"
#include "copy.cuh"

// Operands of products from a chunk in shared memory, at `keys` or `values`: how its elements
// lie there is known here alone. This is for Formats whose elements are operands as they are.
// Those of another Store are unpacked by a specialisation.
template <class S, bool READY = S::T::ready> struct ChunkOperands {
  static_assert(READY, "elements of this Store are not unpacked to operands of this Math yet");
  static constexpr int BLOCK = S::BLOCK;

  // 16 elements, from number 16k on, of keys 8n to 8n+15 as two right operands: b[0], b[1] and b[2], b[3].
  __device__ static __forceinline__ void keysRight(u32 (&b)[4], u32 keys, int n, int k, int lane) {
    const u32 row = (lane & 7) + (lane >> 4) * 8, half = ((lane >> 3) & 1) * 16; // four 8x8 matrices
    loadMatrix(b, keys + k / 4 * BLOCK + swizzled(row + n * 8, k % 4 * 32 + half));
  }
  // The same of 16 keys, from number 16i on, as a left operand.
  __device__ static __forceinline__ void keysLeft(u32 (&a)[4], u32 keys, int i, int k, int lane) {
    const u32 row = lane & 15, half = (lane >> 4) * 16;
    loadMatrix(a, keys + k / 4 * BLOCK + swizzled(row + i * 16, k % 4 * 32 + half));
  }
  // Columns 8n to 8n+15 of 16 values, from number 8k on, as two right operands.
  __device__ static __forceinline__ void valuesRight(u32 (&b)[4], u32 values, int n, int k, int lane) {
    const u32 row = lane & 15, half = (lane >> 4) * 16;
    loadMatrixTransposed(b, values + n / 8 * BLOCK + swizzled(row + k * 8, n % 8 * 16 + half));
  }
  // Columns 16n to 16n+15 of 16 values, from number 16i on, as a left operand.
  __device__ static __forceinline__ void valuesLeft(u32 (&a)[4], u32 values, int n, int i, int lane) {
    const u32 row = (lane & 7) + (lane >> 4) * 8, side = ((lane >> 3) & 1) * 16;
    loadMatrixTransposed(a, values + n / 4 * BLOCK + swizzled(row + i * 16, n % 4 * 32 + side));
  }

  // Of float32: elements 8k to 8k+15 of keys 8n to 8n+7, two steps of a right operand.
  __device__ static __forceinline__ void keysWide(u32 (&b)[4], u32 keys, int n, int k, int lane) {
    const u32 row = lane & 7, part = (lane >> 3) * 16; // four 8x4 matrices
    loadMatrix(b, keys + k / 4 * BLOCK + swizzled(row + n * 8, k % 4 * 32 + part));
  }
  // And column 8n + lane/4 of values number 8k + 2t and 8k + 2t + 1, t = lane%4.
  __device__ static __forceinline__ float2 valuesWide(u32 values, int n, int k, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 column = n % 4 * 32 + g * 4, block = values + n / 4 * BLOCK;
    const float x = loadShared(block + swizzled(k * 8 + 2 * t, column));
    return make_float2(x, loadShared(block + swizzled(k * 8 + 2 * t + 1, column)));
  }
};

template <class S> struct Attention {
  using Math = typename S::Math;
  using Operand = typename Math::Operand;
  using Chunk = ChunkOperands<S>;
  using Place = typename S::Place;
  static constexpr int D = S::D, KEYS = S::KEYS, BLOCK = S::BLOCK, STEPS = S::STEPS, TILES = S::TILES;
  static constexpr bool WIDE = Math::wide;
  static constexpr bool SHARED = S::SHARED_QUERY;
  static constexpr int EACH = WIDE ? 4 : 8; // elements of a lane in a step

  // How numbers of float32 go through products of 16-bit ones. PLAIN: rounded, as they
  // are operands anyway. BOTH: in two parts, with twice the products. FOLDED:
  // in two parts where an output tile has no more than 8 rows: the second parts are the
  // operand's rows 8 to 15, so there are as many products as of one part.
  // What an output tile has depends on nothing but itself.
  // NARROW: where it has no more than 4, keys and values are the left operands, and the two
  // parts of a row columns side by side of the right ones. That is half of the products.
  enum Mode { PLAIN, BOTH, FOLDED, NARROW };
  static constexpr bool NARROWS = !WIDE && !SHARED;
  static constexpr int NARROW_ROWS = 4;
  // With batch invariance there is one for all.
  __device__ static __forceinline__ Mode modeOf(const Params& p, int rows, bool precise) {
    if (Place::Variant::invariant(p)) return BOTH;
    if (NARROWS && rows <= NARROW_ROWS) return NARROW;
    return !WIDE && rows <= 8 ? FOLDED : precise ? BOTH : PLAIN;
  }
  // A lane's row number i of an output tile, where it has scores of two of them: g and g+8,
  // g = lane/4. NARROW it has scores of one: lane%4.
  __device__ static __forceinline__ int rowOf(Mode mode, int lane, int i) { return mode == NARROW ? lane & 3 : (lane >> 2) + 8 * i; }

  // The queries of an output tile as left operands, and rows g = lane/4 and g+8 of it.
  struct Queries {
    u32 hi[SHARED ? 1 : STEPS][4], lo[SHARED ? 1 : STEPS][4];
    float factor[2]; // that makes scores of products
  };

  // All loads together, so that they are on their way at the same time.
  template <class Query> __device__ static __forceinline__ void fetch(const void* q, const long long (&at)[2], int t, float (&x)[STEPS][EACH]) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int j = 0; j < 4; j++) { // row j%2, first or second half of the columns
        const int i = j & 1;
        if constexpr (WIDE) {
          x[s][j] = Query::load(q, at[i] + s * 8 + (j >> 1) * 4 + t);
        } else {
          float2 v = Query::load2(q, at[i] + s * 16 + (j >> 1) * 8 + 2 * t);
          x[s][2 * j] = v.x, x[s][2 * j + 1] = v.y;
        }
      }
  }

  __device__ static __forceinline__ void load(const Params& p, const Place& w, Queries& q, bool precise, char* shared, int warp, int warps, int lane) {
    const int g = lane >> 2, t = lane & 3, rows = w.rows(p);
    const Mode mode = modeOf(p, rows, precise);
    if constexpr (NARROWS) {
      if (mode == NARROW) {
        loadNarrow(p, w, q, precise, lane);
        return;
      }
    }
    long long at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      // A row that is not there is computed like the first, and not used.
      const int of = mode == FOLDED ? g : g + 8 * i, r = w.block * ROWS + (of < rows ? of : 0), n = positionOf(p, r);
      at[i] = (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + r - n * p.group) * p.queryHead;
    }
    if constexpr (!WIDE && !SHARED) {
      if (!precise) { // the queries are operands as they are, and have no second parts
        static_assert(Operand::bytes == 2, "a register has two of them");
        q.factor[0] = q.factor[1] = p.scale;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
          for (int j = 0; j < 4; j++) q.hi[s][j] = mode == FOLDED && (j & 1) ? 0 : *(const u32*)((const u16*)p.query + at[j & 1] + s * 16 + (j >> 1) * 8 + 2 * t);
        return;
      }
    }
    float x[STEPS][EACH];
    withStore(p.queryType, [&](auto query) { fetch<decltype(query)>(p.query, at, t, x); });
    operandsOf(p, x, q, mode, shared, warp, warps, lane);
  }

  // The same, NARROW. A lane has the first part of row g/2 if g is even, else the second one.
  __device__ static __forceinline__ void loadNarrow(const Params& p, const Place& w, Queries& q, bool precise, int lane) {
    const int g = lane >> 2, t = lane & 3, r = w.block * ROWS + (g / 2 < w.rows(p) ? g / 2 : 0), n = positionOf(p, r);
    const long long at = (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + r - n * p.group) * p.queryHead + 2 * t;
    if (!precise) {
      q.factor[0] = p.scale;
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 2; j++) q.hi[s][j] = g % 2 == 0 ? *(const u32*)((const u16*)p.query + at + s * 16 + j * 8) : 0;
      return;
    }
    float2 x[STEPS][2];
    withStore(p.queryType, [&](auto query) { fetchNarrow<decltype(query)>(p.query, at, x); });
    operandsOfNarrow(p, x, q, lane);
  }
  template <class Query> __device__ static __forceinline__ void fetchNarrow(const void* q, long long at, float2 (&x)[STEPS][2]) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int j = 0; j < 2; j++) x[s][j] = Query::load2(q, at + s * 16 + j * 8);
  }
  __device__ static __forceinline__ void operandsOfNarrow(const Params& p, float2 (&x)[STEPS][2], Queries& q, int lane) {
    float factor = p.scale;
    if constexpr (Math::narrow) {
      float top = 0.f, up;
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 2; j++) top = fmaxf(top, fmaxf(fabsf(x[s][j].x), fabsf(x[s][j].y)));
      scaleOf(top, up, factor);
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 2; j++) x[s][j].x *= up, x[s][j].y *= up;
    }
    q.factor[0] = __shfl_sync(~0u, factor, (lane & 3) * 8); // of the row whose scores the lane has
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 hi = Math::pack(x[s][j].x, x[s][j].y);
        q.hi[s][j] = (lane >> 2) % 2 == 0 ? hi : Math::pack(x[s][j].x - Math::low(hi), x[s][j].y - Math::high(hi));
      }
  }

  // What a row is multiplied by where the type has few exponents, by the largest element
  // that a lane has of it, and the factor of its scores.
  __device__ static __forceinline__ void scaleOf(float top, float& up, float& factor) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    int e = (int)((__float_as_uint(top) >> 23) & 255) - 127 - 8;
    e = max(e, -118); // 127 - e and 127 + e are exponents of float32, whatever the queries
    up = __int_as_float((127 - e) << 23);
    factor *= __int_as_float((127 + e) << 23);
  }

  // Of numbers of float32. float16 has few exponents, so there rows are scaled by powers of
  // two, which `factor` undoes.
  __device__ static __forceinline__ void operandsOf(const Params& p, float (&x)[STEPS][EACH], Queries& q, Mode mode, char* shared, int warp, int warps, int lane) {
    q.factor[0] = q.factor[1] = p.scale;
    if constexpr (Math::narrow) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float top = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
          for (int j = 0; j < EACH; j++)
            if (((j >> 1) & 1) == i) top = fmaxf(top, fabsf(x[s][j]));
        float up;
        scaleOf(top, up, q.factor[i]);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
          for (int j = 0; j < EACH; j++)
            if (((j >> 1) & 1) == i) x[s][j] *= up;
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      u32 hi[4], lo[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if constexpr (WIDE) {
          hi[j] = Math::lead(x[s][j]), lo[j] = Math::rest(x[s][j]);
        } else {
          hi[j] = Math::pack(x[s][2 * j], x[s][2 * j + 1]);
          lo[j] = Math::pack(x[s][2 * j] - Math::low(hi[j]), x[s][2 * j + 1] - Math::high(hi[j]));
        }
        if (!WIDE && mode == FOLDED && (j & 1)) hi[j] = lo[j];
        if constexpr (!SHARED) q.hi[s][j] = hi[j], q.lo[s][j] = lo[j];
      }
      if constexpr (SHARED) {
        if (s % warps != warp) continue;
        if constexpr (WIDE) {
          ((float4*)shared)[s * 32 + lane] = make_float4(x[s][0], x[s][1], x[s][2], x[s][3]);
        } else {
          ((uint4*)shared)[s * 32 + lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
          ((uint4*)shared)[(STEPS + s) * 32 + lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        }
      }
    }
    if constexpr (SHARED) syncWarps(warps);
  }

  // The operands of step k.
  template <bool LO> __device__ static __forceinline__ void operand(const Queries& q, const char* shared, int k, int lane, u32 (&x)[4]) {
    if constexpr (!SHARED) {
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = LO ? q.lo[k][j] : q.hi[k][j];
    } else if constexpr (WIDE) {
      float4 f = ((const float4*)shared)[k * 32 + lane];
      x[0] = LO ? Math::rest(f.x) : Math::lead(f.x), x[1] = LO ? Math::rest(f.y) : Math::lead(f.y);
      x[2] = LO ? Math::rest(f.z) : Math::lead(f.z), x[3] = LO ? Math::rest(f.w) : Math::lead(f.w);
    } else {
      uint4 v = ((const uint4*)shared)[((LO ? STEPS : 0) + k) * 32 + lane];
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
  }

  // The state of 16 rows, as the lanes hold it: m and l of rows g and g+8 (l is
  // this lane's part of it), o of columns 8n+2t and 8n+2t+1. NARROW: of up to 4, m[0] and
  // l[0] of row t, and half of o, as mergeNarrow says.
  struct State {
    float m[2], l[2], o[TILES][4];
    __device__ __forceinline__ void empty() {
      m[0] = m[1] = -LEAN_INF;
      l[0] = l[1] = 0.f;
#pragma unroll
      for (int n = 0; n < TILES; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    }
    // The state of a score more, whose value is 0: instead of empty, where the output tile begins.
    __device__ __forceinline__ void sink(Mode mode, int lane, const float (&x)[2]) {
      constexpr float ONE = Math::lift > 0 ? 1 << (int)Math::lift : 1;
      const bool mine = mode == NARROW ? lane >> 2 == 0 : (lane & 3) == 0; // lanes have parts of l
#pragma unroll
      for (int i = 0; i < 2; i++) m[i] = x[i], l[i] = mine && x[i] != -LEAN_INF ? ONE : 0.f;
    }
    // Rows g of what was FOLDED.
    __device__ __forceinline__ void unfold() {
#pragma unroll
      for (int n = 0; n < TILES; n++) o[n][0] += o[n][2], o[n][1] += o[n][3];
    }
    // When all chunks are merged: puts it into shared memory, o as rows of S::WIDTH floats,
    // and as number `state` of those of each row m and l.
    __device__ __forceinline__ void leave(Mode mode, int rows, int lane, float* to, float4* ms, float4* ls, int state) {
      const int g = lane >> 2, t = lane & 3;
      if constexpr (NARROWS) {
        if (mode == NARROW) {
#pragma unroll
          for (int i = 4; i < 32; i *= 2) l[0] += __shfl_xor_sync(~0u, l[0], i);
          if (t >= rows) return;
          float* const at = to + t * S::WIDTH + g;
#pragma unroll
          for (int n = 0; n < TILES / 2; n++) at[16 * n] = o[n][0] + o[n][1], at[16 * n + 8] = o[n][2] + o[n][3];
          if (g == 0) ((float*)(ms + t))[state] = m[0], ((float*)(ls + t))[state] = l[0];
          return;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        const int r = g + 8 * i;
        if (r >= rows) continue;
        float* const at = to + r * S::WIDTH + 2 * t;
#pragma unroll
        for (int n = 0; n < TILES; n++) *(float2*)(at + 8 * n) = make_float2(o[n][2 * i], o[n][2 * i + 1]);
        if (t == 0) ((float*)(ms + r))[state] = m[i], ((float*)(ls + r))[state] = l[i];
      }
    }
  };

  static constexpr int N = KEYS / 8; // products in a chunk's scores

  // Scores: products of queries with 8 keys each.
  template <Mode MODE> __device__ static __forceinline__ void scores(const Queries& q, const char* shared, u32 slot, int lane, float (&s)[N][4]) {
    float s2[N][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) s[n][j] = s2[n][j] = 0.f;
    if constexpr (!WIDE) {
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        u32 hi[4], lo[4];
        operand<false>(q, shared, k, lane, hi);
        if constexpr (MODE == BOTH) operand<true>(q, shared, k, lane, lo);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          u32 b[4];
          Chunk::keysRight(b, slot, n, k, lane);
          Math::mma(s[n], hi, b[0], b[1]);
          Math::mma(s[n + 1], hi, b[2], b[3]);
          if constexpr (MODE == BOTH) {
            Math::mma(s2[n], lo, b[0], b[1]);
            Math::mma(s2[n + 1], lo, b[2], b[3]);
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < STEPS; k += 2) {
        u32 hi[2][4], lo[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          operand<false>(q, shared, k + j, lane, hi[j]);
          operand<true>(q, shared, k + j, lane, lo[j]);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
          u32 b[4];
          Chunk::keysWide(b, slot, n, k, lane);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float x = __uint_as_float(b[2 * j]), y = __uint_as_float(b[2 * j + 1]);
            Math::mma(s[n], hi[j], Math::lead(x), Math::lead(y));
            Math::mma(s2[n], hi[j], Math::rest(x), Math::rest(y));
            Math::mma(s2[n], lo[j], Math::lead(x), Math::lead(y));
          }
        }
      }
    }
    if constexpr (MODE == FOLDED) {
#pragma unroll
      for (int n = 0; n < N; n++) s[n][0] += s[n][2], s[n][1] += s[n][3];
    } else if constexpr (MODE == BOTH || WIDE) {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) s[n][j] += s2[n][j];
    }
  }

  // Adds probabilities x values to the output.
  template <Mode MODE> __device__ static __forceinline__ void weigh(State& st, const float (&s)[N][4], u32 values, int lane) {
    if constexpr (!WIDE) {
#pragma unroll
      for (int k = 0; k < N; k += 2) {
        u32 hi[4], lo[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = MODE == FOLDED ? 0 : j & 1;
          float x = s[k + (j >> 1)][i * 2], y = s[k + (j >> 1)][i * 2 + 1];
          hi[j] = Math::pack(x, y);
          if constexpr (MODE != PLAIN) lo[j] = Math::pack(x - Math::low(hi[j]), y - Math::high(hi[j]));
          if (MODE == FOLDED && (j & 1)) hi[j] = lo[j];
        }
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
          u32 b[4];
          Chunk::valuesRight(b, values, n, k, lane);
          Math::mma(st.o[n], hi, b[0], b[1]);
          Math::mma(st.o[n + 1], hi, b[2], b[3]);
          if constexpr (MODE == BOTH) {
            Math::mma(st.o[n], lo, b[0], b[1]);
            Math::mma(st.o[n + 1], lo, b[2], b[3]);
          }
        }
      }
    } else {
      // Column t of the probabilities is key 2t, column t+4 key 2t+1: that is how the scores lie.
#pragma unroll
      for (int k = 0; k < N; k++) {
        u32 hi[4], lo[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float x = s[k][(j & 1) * 2 + (j >> 1)];
          hi[j] = Math::lead(x), lo[j] = Math::rest(x);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
          const float2 v = Chunk::valuesWide(values, n, k, lane);
          const float x = v.x, y = v.y;
          Math::mma(st.o[n], hi, Math::lead(x), Math::lead(y));
          Math::mma(st.o[n], hi, Math::rest(x), Math::rest(y));
          Math::mma(st.o[n], lo, Math::lead(x), Math::lead(y));
        }
      }
    }
  }

  // What lies behind the live values of a chunk may be anything, and 0 times NaN is NaN.
  __device__ static __forceinline__ void clearBehind(u32 slot, int live, int lane) {
    for (int i = lane; i < (KEYS - live) * S::BLOCKS * 8; i += 32) {
      int r = live + i / (S::BLOCKS * 8), b = i % (S::BLOCKS * 8);
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(slot + S::SLOT / 2 + b / 8 * BLOCK + r * 128 + b % 8 * 16), "r"(0) : "memory");
    }
  }

  // And keys from number `from` on, before number `to`, that nobody sees.
  __device__ static __forceinline__ void clearBetween(u32 slot, int from, int to, int lane) {
    for (int i = max(from, 0) * S::BLOCKS * 8 + lane; i < min(to, KEYS) * S::BLOCKS * 8; i += 32) {
      int r = i / (S::BLOCKS * 8), b = i % (S::BLOCKS * 8);
      asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(slot + S::SLOT / 2 + b / 8 * BLOCK + r * 128 + b % 8 * 16), "r"(0) : "memory");
    }
  }

  // Merges one chunk into the state. The weights, and with them o and l, are
  // lifted where the type has few exponents: a weight of 2^-15 would lose bits.
  // Rows g and g+8 see `limit` keys, from the chunk's first on; `masked` if some
  // row does not see them all. `view`, if there is one: what becomes of scores before,
  // with the lane's first key.
  template <Mode MODE, class... View> __device__ static __forceinline__ void merge(Mode mode, State& st, const Queries& q, const char* shared, u32 slot, int lane, bool masked, const int (&limit)[2], const View&... view) {
    constexpr int MINE = MODE == FOLDED ? 1 : 2; // rows that a lane has
    const int t = lane & 3;
    // What is around products is there once for BOTH and PLAIN, where there is much of it.
    constexpr bool EITHER = sizeof...(View) > 0 && MODE == BOTH && !WIDE;
    float s[N][4];
    if (EITHER && mode == PLAIN) scores<PLAIN>(q, shared, slot, lane, s);
    else scores<MODE>(q, shared, slot, lane, s);
    float top[2] = {-LEAN_INF, -LEAN_INF};
    if constexpr (sizeof...(View) > 0) {
      const auto each = [&](const auto& f) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
          for (int j = 0; j < 2 * MINE; j++) s[n][j] = f(s[n][j], j >> 1, n * 8 + (j & 1));
      };
      each([&](float x, int i, int) { return x * q.factor[i]; });
      (view.apply(2 * t, each), ...);
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int j = 0; j < 2 * MINE; j++) {
        const int i = j >> 1;
        if constexpr (sizeof...(View) == 0) s[n][j] *= q.factor[i];
        if (masked && n * 8 + 2 * t + (j & 1) >= limit[i]) s[n][j] = -LEAN_INF;
        top[i] = fmaxf(top[i], s[n][j]);
      }
    float shrink[2];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], 2));
      top[i] = fmaxf(top[i], st.m[i]);
      const RowWeights<Math> weights(top[i]);
      shrink[i] = weights.weight(st.m[i]);
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) s[n][2 * i + j] = weights.of(s[n][2 * i + j]);
    }
    if (__any_sync(~0u, top[0] != st.m[0] || (MINE > 1 && top[1] != st.m[1]))) {
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        st.l[i] *= shrink[i];
        st.m[i] = top[i];
      }
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        st.o[n][0] *= shrink[0], st.o[n][1] *= shrink[0];
        st.o[n][2] *= shrink[MINE - 1], st.o[n][3] *= shrink[MINE - 1];
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      st.l[0] += s[n][0] + s[n][1];
      if (MINE > 1) st.l[1] += s[n][2] + s[n][3];
    }
    if (EITHER && mode == PLAIN) weigh<PLAIN>(st, s, slot + S::SLOT / 2, lane);
    else weigh<MODE>(st, s, slot + S::SLOT / 2, lane);
  }

  // By the mode of the output tile.
  template <class... View> __device__ static __forceinline__ void merge(Mode mode, State& st, const Queries& q, const char* shared, u32 slot, int lane, bool masked, const int (&limit)[2], const View&... view) {
    if constexpr (NARROWS) {
      if (mode == NARROW) {
        mergeNarrow(st, q, slot, lane, masked, limit[0], view...);
        return;
      }
    }
    if (!WIDE && mode == FOLDED) {
      merge<FOLDED>(mode, st, q, shared, slot, lane, masked, limit, view...);
    } else if (sizeof...(View) > 0 || mode == BOTH) {
      merge<BOTH>(mode, st, q, shared, slot, lane, masked, limit, view...);
    } else {
      merge<PLAIN>(mode, st, q, shared, slot, lane, masked, limit, view...);
    }
  }

  // The same, NARROW. A lane has the scores of keys g and g+8 of each 16. Weights become
  // right operands by a matrix's transposition, both parts of one in one register; so
  // o[n] is columns 16n+g and 16n+g+8, each as the sums of both parts.
  template <class... View> __device__ static __forceinline__ void mergeNarrow(State& st, const Queries& q, u32 slot, int lane, bool masked, int limit, const View&... view) {
    constexpr int GROUPS = KEYS / 16; // of keys
    const int g = lane >> 2;
    float s[GROUPS][4];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        u32 a[4];
        Chunk::keysLeft(a, slot, i, k, lane);
        Math::mma(s[i], a, q.hi[k][0], q.hi[k][1]);
      }
    float x[GROUPS][2], top = -LEAN_INF;
    if constexpr (sizeof...(View) > 0) {
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) x[i][j] = (s[i][2 * j] + s[i][2 * j + 1]) * q.factor[0];
      (view.apply(g, [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) x[i][j] = f(x[i][j], 0, i * 16 + j * 8);
      }), ...);
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        if constexpr (sizeof...(View) == 0) x[i][j] = (s[i][2 * j] + s[i][2 * j + 1]) * q.factor[0];
        if (masked && i * 16 + j * 8 + g >= limit) x[i][j] = -LEAN_INF;
        top = fmaxf(top, x[i][j]);
      }
#pragma unroll
    for (int i = 4; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
    top = fmaxf(top, st.m[0]);
    const RowWeights<Math> weights(top);
    if (__any_sync(~0u, top != st.m[0])) {
      const float shrink = weights.weight(st.m[0]);
      st.l[0] *= shrink, st.m[0] = top;
#pragma unroll
      for (int n = 0; n < D / 16; n++) st.o[n][0] *= shrink, st.o[n][1] *= shrink, st.o[n][2] *= shrink, st.o[n][3] *= shrink;
    }
    u32 w[GROUPS][2];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float v = weights.of(x[i][j]);
        st.l[0] += v;
        w[i][j] = transposed(Math::pack(v, v - Math::low(Math::pack(v, 0.f))));
      }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        u32 a[4];
        Chunk::valuesLeft(a, slot + S::SLOT / 2, n, i, lane);
        Math::mma(st.o[n], a, w[i][0], w[i][1]);
      }
  }
};
