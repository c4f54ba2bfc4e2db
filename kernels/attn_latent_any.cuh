// Decode attention to keys whose first elements are the values, on every GPU, for all element types, widths, masks and score
// changes (attn_variant.cuh). attn_latent.cuh has a faster kernel for few of these. With APART, values lie apart from keys: heads of
// widths that no other kernel has.
//
// An output tile has up to 32 rows: query positions x heads. A chunk is 16 keys. Eight warps compute:
//
//  1. Warps share the columns of keys. A warp multiplies its columns of queries, which stay in registers, by its columns of a
//     chunk, and leaves these parts of scores in shared memory.
//  2. Warps share the rows. A warp adds the parts of its rows' scores in the order of the warps, and makes weights of scores.
//  3. Warps share the columns of values. A warp adds its columns, multiplied by the weights, to outputs in registers.
//
// A chunk is read from shared memory once for each of both products. Ranges of LeanTiles and partials are those of
// attn_lean.cuh. The last thread block to arrive merges partials, in the order of the blocks.
#pragma once
#include "attn_reduce.cuh"
#include "attn_variant.cuh"

// Launch parameters. ScoreParams lie behind Params: see scoreOf.
struct LatentAnyParams {
  Params p;
  ScoreParams score;
  const void* rest;    // rows of a key's elements behind the value, if they are in a plane of their own
  const float* scales; // of groups of elements of a value; null: none
  int dim, value;      // elements of a key and of a value: multiples of 8
  int stages;          // chunks in shared memory, 1 to 6
  int precise;         // queries and weights of 16 bits are sums of two parts
};

// E4M3 in groups of LATENT_GROUP elements with a scale, and the rest of the key in bfloat16.
struct GroupedFloat8 {
  static constexpr int type = 4, bytes = 1;
  static constexpr bool scaled = true;
};
constexpr int LATENT_GROUP = 128;

// Rows in shared memory: STORED has the Store of operands, WIDENED says that elements become operands there.
template <class Store> struct LatentRows {
  using Operand = Store;
  static constexpr bool WIDENED = false;
};
template <> struct LatentRows<GroupedFloat8> {
  using Operand = BFloat16; // has all numbers of E4M3
  static constexpr bool WIDENED = true;
};

template <class Store_, class Math_, bool APART_> struct LatentAnyShape {
  using Store = Store_;
  using Math = Math_;
  struct Variant : Scored {
    enum : int { ROWS = 32 }; // of an output tile
  };
  static constexpr int KEYS = 16;
  using Place = Walk<KEYS, Variant>;
  enum : int { MERGE_WARPS = 8, IN_FLIGHT = 8 }; // of Reduce
  static constexpr bool APART = APART_;
  static constexpr int D = APART ? 256 : 512, WIDTH = D; // most elements of a value
  static constexpr int MOST_DIM = APART ? 256 : 576;     // and of a key
};

template <class Store_, class Math_, bool APART_ = false> struct LatentAny : LatentAnyShape<Store_, Math_, APART_> {
  using S = LatentAnyShape<Store_, Math_, APART_>;
  using typename S::Math, typename S::Place, typename S::Store;
  using Rows = LatentRows<Store>;
  using Operand = typename Rows::Operand;
  using R = Reduce<S>;
  using S::APART, S::KEYS, S::MOST_DIM;
  static constexpr bool WIDE = Math::wide, WIDENED = Rows::WIDENED;
  static constexpr int ROWS = Place::ROWS, TILES = ROWS / 16, WARPS = 8, THREADS = WARPS * 32;
  static constexpr int BLOCK = KEYS * 128;     // bytes of a block of columns of a chunk
  static constexpr int STEPS = (MOST_DIM * Operand::bytes / 32 + WARPS - 1) / WARPS; // a warp's steps of a product with keys: 32 bytes of columns each
  static constexpr int PAIRS = S::D / 16 / WARPS; // a warp's pairs of 8 columns of values, at most
  static constexpr int PITCH = KEYS + 8;       // floats between rows of scores
  static constexpr int PARTS = WARPS * ROWS * PITCH * 4, WEIGHTS = ROWS * PITCH * 4; // bytes
  static constexpr int GROUPS = S::D / LATENT_GROUP;
  static constexpr int EACH = 2;               // rows of a lane, where warps share rows
  static_assert(KEYS == 16 && ROWS == WARPS * 2 * EACH, "half a warp has a row's keys");

  // What lies in shared memory, and the sizes that depend on the widths.
  struct Shared {
    char* ring;
    int slot;                     // bytes of a stage
    u32 operands;                 // WIDENED: the values of a chunk as operands
    float *parts, *weights, *shrink, *factor;
    float2* statistics;
    typename R::Shared reduce;
    enum : int { FRONT = 1024 }; // bytes ahead of the ring
    static_assert(ROWS * 16 + 16 <= FRONT, "rows have more");
    __device__ __forceinline__ Shared(const LatentAnyParams& a, char* memory) : ring(memory + FRONT) {
      statistics = (float2*)memory, shrink = (float*)(statistics + ROWS), factor = shrink + ROWS, reduce.last = (int*)(factor + ROWS);
      slot = WIDENED ? KEYS * a.value + blocksOf(a.dim - a.value) * BLOCK + KEYS * GROUPS * 4 : (blocksOf(a.dim) + (APART ? blocksOf(a.value) : 0)) * BLOCK;
      char* at = ring + a.stages * slot;
      operands = sharedAddress(at);
      if (WIDENED) at += blocksOf(a.value) * BLOCK;
      parts = (float*)at, weights = parts + PARTS / 4;
    }
    __device__ __forceinline__ char* stage(int i) const { return ring + i * slot; }
    __device__ __forceinline__ char* restOf(const LatentAnyParams& a, int i) const { return stage(i) + KEYS * a.value; }
    __device__ __forceinline__ float* scalesOf(const LatentAnyParams& a, int i) const { return (float*)(stage(i) + slot - KEYS * GROUPS * 4); }
    // Block b of the columns of a chunk in stage i.
    __device__ __forceinline__ u32 block(const LatentAnyParams& a, int i, int b) const {
      if constexpr (!WIDENED) return sharedAddress(stage(i)) + b * BLOCK;
      const int values = a.value / 64;
      return b < values ? operands + b * BLOCK : sharedAddress(restOf(a, i)) + (b - values) * BLOCK;
    }
    // The same of values.
    __device__ __forceinline__ u32 values(const LatentAnyParams& a, int i, int b) const { return block(a, i, APART ? blocksOf(a.dim) + b : b); }
  };
  __device__ static __forceinline__ int blocksOf(int elements) { return (elements * Operand::bytes + 127) / 128; }

  // Where the row of a thread's key of chunk c is; -1: no row of queries sees the key, and its memory may be anything.
  __device__ static __forceinline__ int find(const Params& p, const Place& w, int n) {
    if (n >= w.end) return -1;
    const int key = w.chunkAt(n) * KEYS + threadIdx.x / 16;
    if (key >= w.s.keys || w.hides(p, key)) return -1;
    const int head = w.head * p.headRows;
    if (p.pages == nullptr) return w.s.pages * p.pageRows + head + key;
    const int page = key / p.pageTokens;
    return p.pages[w.s.pages + page] * p.pageRows + head + key - page * p.pageTokens;
  }

  // Starts the copy of a chunk to a stage. A thread copies pieces of one key. Keys that are not there become zeros.
  __device__ static __forceinline__ void issue(const LatentAnyParams& a, const Shared& sh, int stage, int row) {
    const Params& p = a.p;
    const int key = threadIdx.x / 16, i = threadIdx.x % 16;
    const bool there = row >= 0;
    const long long at = there ? row : 0;
    const auto swizzle = [&](u32 to, const void* from, int elements) { // a row, with zeros up to the end of a block
      const int bytes = elements * Operand::bytes;
#pragma unroll 1
      for (int piece = i; piece < blocksOf(elements) * 8; piece += 16) {
        const bool some = there && piece * 16 < bytes;
        copy16(to + piece / 8 * BLOCK + swizzled(key, piece % 8 * 16), (const char*)from + (some ? at * bytes + piece * 16 : 0), some);
      }
    };
    if constexpr (!WIDENED) {
      swizzle(sharedAddress(sh.stage(stage)), p.keys, a.dim);
      if constexpr (APART) swizzle(sharedAddress(sh.stage(stage)) + blocksOf(a.dim) * BLOCK, p.values, a.value);
    } else {
#pragma unroll 1
      for (int piece = i * 16; piece < a.value; piece += 256)
        copy16(sharedAddress(sh.stage(stage)) + key * a.value + piece, (const char*)p.keys + (there ? at * a.value + piece : 0), there);
      if (a.dim > a.value) swizzle(sharedAddress(sh.restOf(a, stage)), a.rest, a.dim - a.value);
      const int groups = a.value / LATENT_GROUP;
      if (i < groups) {
        float* const to = sh.scalesOf(a, stage) + key * GROUPS + i;
        if (there) copyFew<4>(to, a.scales + at * groups + i);
        else *to = 0.f;
      }
    }
  }

  // Makes operands of the values of a chunk.
  __device__ static __forceinline__ void widen(const LatentAnyParams& a, const Shared& sh, int stage) {
    const int key = threadIdx.x / 16;
#pragma unroll 1
    for (int piece = threadIdx.x % 16; piece < a.value / 16; piece += 16) {
      const uint4 x = *(const uint4*)(sh.stage(stage) + key * a.value + piece * 16);
      const u32 words[4] = {x.x, x.y, x.z, x.w};
      u32 to[8];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { // sign and seven bits in their places of float32, which lacks 2^120
          const u32 b = words[k] >> 8 * j;
          v[j] = __uint_as_float((b & 0x80) << 24 | (b & 0x7f) << 20) * 0x1p120f;
        }
        to[2 * k] = BFloat16::pack(v[0], v[1]), to[2 * k + 1] = BFloat16::pack(v[2], v[3]);
      }
      const u32 block = sh.operands + piece / 4 * BLOCK;
#pragma unroll
      for (int k = 0; k < 2; k++)
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(block + swizzled(key, piece % 4 * 32 + k * 16)), "r"(to[4 * k]), "r"(to[4 * k + 1]), "r"(to[4 * k + 2]), "r"(to[4 * k + 3]) : "memory");
    }
  }

  // A warp's columns of an output tile's queries: of step number i columns from 32 (warp + WARPS i) bytes on.
  struct Queries {
    u32 lead[STEPS][TILES][4], rest[WIDE ? 1 : STEPS][TILES][4]; // WIDE: numbers of float32 in lead
  };
  __device__ static __forceinline__ long long queryOf(const Params& p, const Place& w, int r) {
    const int i = w.block * ROWS + r, n = positionOf(p, i);
    return (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + i - n * p.group) * p.queryHead;
  }
  // Queries come as rows of float32, eight at a time, through the memory of the parts of scores. float16 has few exponents, so rows
  // in two parts are multiplied by powers of two, as attn_tile.cuh has it.
  __device__ static __forceinline__ void load(const LatentAnyParams& a, const Place& w, const Shared& sh, Queries& q, int warp, int lane) {
    constexpr int PIECES = (MOST_DIM + 127) / 128, COLUMNS = 32 / Operand::bytes; // of a step
    static_assert(WARPS * (MOST_DIM + 8) * 4 <= PARTS, "the parts of scores have no room for rows of queries");
    const Params& p = a.p;
    const int rows = w.rows(p), g = lane >> 2, t = lane & 3, pitch = a.dim + 8;
    float4 x[ROWS / WARPS][PIECES]; // of row warp + WARPS k
    withStore(p.queryType, [&](auto s) {
#pragma unroll
      for (int k = 0; k < ROWS / WARPS; k++) {
        const int r = warp + WARPS * k;
        const long long at = queryOf(p, w, r < rows ? r : 0) + lane * 4;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          x[k][i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (r < rows && i * 128 + lane * 4 < a.dim) x[k][i] = decltype(s)::load4(p.query, at + i * 128);
        }
      }
    });
#pragma unroll
    for (int k = 0; k < ROWS / WARPS; k++) {
      float up = 1.f, factor = p.scale;
      if (Math::narrow && a.precise) {
        float top = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; i++) top = fmaxf(fmaxf(fmaxf(top, fabsf(x[k][i].x)), fmaxf(fabsf(x[k][i].y), fabsf(x[k][i].z))), fabsf(x[k][i].w));
#pragma unroll
        for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        const int e = max((int)(__float_as_uint(top) >> 23) - 127 - 8, -118);
        up = __int_as_float((127 - e) << 23), factor *= __int_as_float((127 + e) << 23);
      }
      if (lane == 0) sh.factor[warp + WARPS * k] = factor;
      syncWarps(WARPS);
#pragma unroll
      for (int i = 0; i < PIECES; i++)
        if (i * 128 + lane * 4 < a.dim) *(float4*)(sh.parts + warp * pitch + i * 128 + lane * 4) = make_float4(x[k][i].x * up, x[k][i].y * up, x[k][i].z * up, x[k][i].w * up);
      syncWarps(WARPS);
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) { // the first and the second half of columns
          const int c = (warp + WARPS * i) * COLUMNS + h * (COLUMNS / 2) + t * (COLUMNS / 8), m = k / 2, j = 2 * h + k % 2;
          const float* const from = sh.parts + g * pitch + c;
          if constexpr (WIDE) {
            q.lead[i][m][j] = __float_as_uint(c < a.dim ? *from : 0.f);
          } else {
            const float2 two = c < a.dim ? *(const float2*)from : make_float2(0.f, 0.f);
            const u32 lead = Math::pack(two.x, two.y);
            q.lead[i][m][j] = lead;
            q.rest[i][m][j] = a.precise ? Math::pack(two.x - Math::low(lead), two.y - Math::high(lead)) : 0;
          }
        }
    }
    syncWarps(WARPS);
  }

  // d += x y, of numbers of float32 in two parts each.
  __device__ static __forceinline__ void multiplyWide(float (&d)[4], const u32 (&x)[4], float y0, float y1) {
    u32 lead[4], rest[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 both = x[j];
      asm volatile("" : "+r"(both)); // else the compiler keeps the parts of all queries, and has no registers for them
      lead[j] = Math::lead(__uint_as_float(both)), rest[j] = Math::rest(__uint_as_float(both));
    }
    Math::mma(d, lead, Math::rest(y0), Math::rest(y1));
    Math::mma(d, rest, Math::lead(y0), Math::lead(y1));
    Math::mma(d, lead, Math::lead(y0), Math::lead(y1));
  }

  // The warp's part of a chunk's scores, of `tiles` times 16 rows.
  __device__ static __forceinline__ void scores(const LatentAnyParams& a, const Shared& sh, const Queries& q, int stage, int tiles, int warp, int lane) {
    const int steps = (a.dim * Operand::bytes + 31) / 32, t = lane & 3;
    const u32 row = (lane & 7) + (lane >> 4) * 8, half = ((lane >> 3) & 1) * 16; // four matrices of 8 keys and 16 bytes
    float s[TILES][2][4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int step = warp + WARPS * i;
      if (step >= steps) continue;
      u32 b[4];
      loadMatrix(b, sh.block(a, stage, step / 4) + swizzled(row, step % 4 * 32 + half));
      const bool scaled = WIDENED && step * 16 < a.value;
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        if (m >= tiles) continue;
        if constexpr (WIDE) {
#pragma unroll
          for (int n = 0; n < 2; n++) multiplyWide(s[m][n], q.lead[i][m], __uint_as_float(b[2 * n]), __uint_as_float(b[2 * n + 1]));
          continue;
        } else {
          float x[2][4] = {};
          float(&to)[2][4] = WIDENED ? x : s[m];
#pragma unroll
          for (int n = 0; n < 2; n++) Math::mma(to[n], q.lead[i][m], b[2 * n], b[2 * n + 1]);
          if (a.precise)
#pragma unroll
            for (int n = 0; n < 2; n++) Math::mma(to[n], q.rest[i][m], b[2 * n], b[2 * n + 1]);
          if constexpr (WIDENED) {
            const float* const scales = sh.scalesOf(a, stage) + 2 * t * GROUPS + step * 16 / LATENT_GROUP;
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
              for (int j = 0; j < 4; j++) s[m][n][j] += scaled ? x[n][j] * scales[(n * 8 + (j & 1)) * GROUPS] : x[n][j];
          }
        }
      }
    }
    float* const to = sh.parts + (warp * ROWS + (lane >> 2)) * PITCH + 2 * t;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      if (m >= tiles) continue;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) *(float2*)(to + (m * 16 + e * 8) * PITCH + n * 8) = make_float2(s[m][n][2 * e], s[m][n][2 * e + 1]);
    }
  }

  // A lane's rows, where warps share rows: half a warp has a row, a lane one key of each chunk.
  struct Mine {
    static constexpr bool MANY = false;
    const Params& p;
    const Place& w;
    int first;       // row number of the lane's first one
    int narrowed;    // keys before that are hidden from some row
    int firstFresh;
    int n[EACH], sees[EACH]; // positions, and how many keys rows see
    float m[EACH], l[EACH];  // the largest score, and the lane's part of the sum of weights
    __device__ __forceinline__ Mine(const Params& p, const Place& w, int warp, int lane) : p(p), w(w), first(warp * 2 * EACH + lane / 16) {
      const ScoreParams& score = scoreOf(p);
      const int rows = w.rows(p), before = w.s.keys - w.s.queries;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        n[i] = positionOf(p, packed(i)), sees[i] = p.causal ? min(w.s.keys, before + n[i] + 1) : w.s.keys;
        m[i] = -LEAN_INF, l[i] = 0.f;
        if (score.sinks == nullptr || w.tile > 0) continue;
        m[i] = sinkOf(score.sinks[head(i)]);
        if (lane % 16 == 0 && m[i] != -LEAN_INF) l[i] = Math::lift > 0 ? 1 << (int)Math::lift : 1;
      }
      narrowed = firstInWindow(score, w.s, before + positionOf(p, w.block * ROWS + rows - 1));
      firstFresh = score.trees != nullptr && score.details[w.seq].tree >= 0 ? before : 0x7fffffff;
    }
    __device__ __forceinline__ int row(int i) const { return first + 2 * i; } // of the output tile
    __device__ __forceinline__ bool there(int i) const { return row(i) < w.rows(p); }
    __device__ __forceinline__ int packed(int i) const { return w.block * ROWS + (there(i) ? row(i) : 0); }
    // As modifyScores wants them.
    __device__ __forceinline__ int sequence() const { return w.seq; }
    __device__ __forceinline__ int position(int i) const { return n[i]; }
    __device__ __forceinline__ int head(int i) const { return w.head * p.group + packed(i) - n[i] * p.group; }
    __device__ __forceinline__ float slope(int i) const { return scoreOf(p).slopes[head(i)]; }
    __device__ __forceinline__ int place(int i) const { return w.s.keys - w.s.queries + n[i]; }
    __device__ __forceinline__ int limit(int i) const { return sees[i]; }
    __device__ __forceinline__ int window() const { return windowOf(scoreOf(p), w.s); }
    __device__ __forceinline__ int narrow() const { return narrowed; }
    __device__ __forceinline__ int fresh() const { return firstFresh; }

    // Makes weights of the scores of chunk c.
    __device__ __forceinline__ void weigh(const Shared& sh, int c, int lane) {
      const int own = lane % 16, key = c * KEYS + own;
      float x[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        x[i] = 0.f;
        if (!there(i)) continue;
        const float* const from = sh.parts + row(i) * PITCH + own;
#pragma unroll
        for (int k = 0; k < WARPS; k++) x[i] += from[k * ROWS * PITCH];
        x[i] *= sh.factor[row(i)];
      }
      const auto each = [&](const auto& f) {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = f(x[i], i, 0);
      };
      modifyScores(scoreOf(p), *this, key, each);
      maskScores<1>(scoreOf(p), *this, key, each);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (key >= sees[i]) x[i] = -LEAN_INF;
        float top = x[i];
#pragma unroll
        for (int k = 1; k < 16; k *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, k));
        top = fmaxf(top, m[i]);
        const RowWeights<Math> of(top);
        const float shrink = of.weight(m[i]), weight = of.of(x[i]);
        m[i] = top, l[i] = l[i] * shrink + weight;
        sh.weights[row(i) * PITCH + own] = there(i) ? weight : 0.f;
        if (own == 0) sh.shrink[row(i)] = there(i) ? shrink : 1.f;
      }
    }
    // The rows' statistics.
    __device__ __forceinline__ void leave(const Shared& sh, int lane) {
#pragma unroll
      for (int i = 0; i < EACH; i++) {
#pragma unroll
        for (int k = 1; k < 16; k *= 2) l[i] += __shfl_xor_sync(~0u, l[i], k);
        if (lane % 16 == 0) sh.statistics[row(i)] = make_float2(m[i], l[i]);
      }
    }
  };

  // A warp's columns of values: pairs of 8, from `first` on.
  struct Columns {
    int first, pairs;
    __device__ __forceinline__ Columns(int value, int warp) {
      const int each = (value + WARPS * 16 - 1) / (WARPS * 16) * 16;
      first = warp * each, pairs = (min(value - first, each) + 15) / 16;
    }
  };
  using Sums = float[TILES][PAIRS][2][4]; // outputs: of 16 rows, two times 8 columns

  // Adds a chunk's values, multiplied by weights.
  __device__ static __forceinline__ void add(const LatentAnyParams& a, const Shared& sh, Sums& o, const Columns& of, int stage, int tiles, int lane) {
    const int g = lane >> 2, t = lane & 3;
    bool same = true;
    float shrink[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int e = 0; e < 2; e++) shrink[m][e] = sh.shrink[m * 16 + e * 8 + g], same = same && shrink[m][e] == 1.f;
    if (!__all_sync(~0u, same)) {
#pragma unroll
      for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int k = 0; k < PAIRS * 2; k++)
#pragma unroll
          for (int j = 0; j < 4; j++) o[m][k / 2][k % 2][j] *= shrink[m][j >> 1];
    }
    // Weights of rows g and g+8 and keys 2t and 2t+1 of each eight.
    float2 w[TILES][2][2];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < 2; e++) w[m][h][e] = *(const float2*)(sh.weights + (m * 16 + e * 8 + g) * PITCH + h * 8 + 2 * t);
    if constexpr (WIDE) {
#pragma unroll
      for (int k = 0; k < PAIRS; k++) {
        if (k >= of.pairs) continue;
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int c = of.first + k * 16 + n * 8;
          const u32 block = sh.values(a, stage, c / 32), column = c % 32 * 4 + g * 4;
#pragma unroll
          for (int h = 0; h < 2; h++) { // column t of weights is key 2t, column t+4 key 2t+1
            const float y0 = loadShared(block + swizzled(h * 8 + 2 * t, column)), y1 = loadShared(block + swizzled(h * 8 + 2 * t + 1, column));
#pragma unroll
            for (int m = 0; m < TILES; m++) {
              if (m >= tiles) continue;
              const u32 x[4] = {__float_as_uint(w[m][h][0].x), __float_as_uint(w[m][h][1].x), __float_as_uint(w[m][h][0].y), __float_as_uint(w[m][h][1].y)};
              multiplyWide(o[m][k][n], x, y0, y1);
            }
          }
        }
      }
    } else {
      u32 lead[TILES][4], rest[TILES][4];
      const auto pack = [&](int group) { // group: of scales
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float2 f = make_float2(1.f, 1.f);
          if constexpr (WIDENED) {
            const float* const scales = sh.scalesOf(a, stage) + (h * 8 + 2 * t) * GROUPS + group;
            f = make_float2(scales[0], scales[GROUPS]);
          }
#pragma unroll
          for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              float2 x = w[m][h][e];
              if constexpr (WIDENED) x.x *= f.x, x.y *= f.y;
              const u32 both = Math::pack(x.x, x.y);
              lead[m][2 * h + e] = both, rest[m][2 * h + e] = Math::pack(x.x - Math::low(both), x.y - Math::high(both));
            }
        }
      };
      int group = -1;
      if constexpr (!WIDENED) pack(0);
#pragma unroll
      for (int k = 0; k < PAIRS; k++) {
        if (k >= of.pairs) continue;
        const int c = of.first + k * 16;
        if (WIDENED && c / LATENT_GROUP != group) group = c / LATENT_GROUP, pack(group);
        u32 b[4];
        loadMatrixTransposed(b, sh.values(a, stage, c / 64) + swizzled(lane & 15, c % 64 * 2 + (lane >> 4) * 16));
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          if (m >= tiles) continue;
#pragma unroll
          for (int n = 0; n < 2; n++) Math::mma(o[m][k][n], lead[m], b[2 * n], b[2 * n + 1]);
          if (a.precise)
#pragma unroll
            for (int n = 0; n < 2; n++) Math::mma(o[m][k][n], rest[m], b[2 * n], b[2 * n + 1]);
        }
      }
    }
  }

  // Partials: rows of a.value floats, and behind them all rows' statistics.
  __device__ static __forceinline__ float2* statisticsOf(const LatentAnyParams& a) { return (float2*)(a.p.partials + (long long)2 * gridDim.x * a.p.rows * a.value); }

  // Writes an output tile, or a part of one to a slot of the partials. Rows of outputs go through shared memory, where chunks and
  // scores were.
  __device__ static __forceinline__ void leave(const LatentAnyParams& a, const typename R::Tile& tile, const Shared& sh, const Sums& o, const Columns& of, int slot, int warp, int lane) {
    const Params& p = a.p;
    const int g = lane >> 2, t = lane & 3, pitch = a.value + 8;
    float* const rows = (float*)sh.ring;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int k = 0; k < PAIRS * 2; k++) {
          const int c = of.first + k * 8 + 2 * t;
          if (k / 2 < of.pairs && c < a.value) *(float2*)(rows + (m * 16 + e * 8 + g) * pitch + c) = make_float2(o[m][k / 2][k % 2][2 * e], o[m][k / 2][k % 2][2 * e + 1]);
        }
    syncWarps(WARPS);
#pragma unroll 1
    for (int r = warp; r < tile.rows; r += WARPS) {
      const float2 s = sh.statistics[r];
      const long long at = (long long)slot * p.rows + r;
#pragma unroll 1
      for (int c = lane * 4; c < a.value; c += 128) {
        const float4 x = *(const float4*)(rows + r * pitch + c);
        if (slot < 0) {
          R::store(p, typename R::Destination(p, tile, -1, r, c, nullptr), x, s.x, s.y);
        } else {
          __stcg((float4*)(p.partials + at * a.value + c), x);
          if (c == 0) __stcg(statisticsOf(a) + at, s);
        }
      }
    }
  }

  // Merges the partials of an output tile, four columns of a row at a time.
  __device__ static __forceinline__ void merge(const LatentAnyParams& a, const typename R::Tile& tile, int host, int sharers) {
    constexpr int TOGETHER = 4; // partials on their way
    const Params& p = a.p;
    const int perRow = a.value / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < tile.rows * perRow; i += THREADS) {
      const int r = i / perRow, c = (i - r * perRow) * 4;
      float m = -LEAN_INF, l = 0.f;
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int k = 0; k < sharers; k += TOGETHER) {
        float2 s[TOGETHER];
        float4 x[TOGETHER];
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
          const long long at = R::placeOf(p, host, min(k + j, sharers - 1), r);
          s[j] = __ldcg(statisticsOf(a) + at), x[j] = __ldcg((const float4*)(p.partials + at * a.value + c));
          if (k + j >= sharers) s[j] = make_float2(-LEAN_INF, 0.f), x[j] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
          const float top = fmaxf(m, s[j].x);
          const Merge both(top);
          const float f = both.weight(m), by = both.weight(s[j].x);
          m = top, l = l * f + s[j].y * by, o.x = o.x * f + x[j].x * by, o.y = o.y * f + x[j].y * by, o.z = o.z * f + x[j].z * by, o.w = o.w * f + x[j].w * by;
        }
      }
      R::store(p, typename R::Destination(p, tile, -1, r, c, nullptr), o, m, l);
    }
  }

  __device__ static __forceinline__ void waitForStage(int stages) { // groups that may still be on their way
    switch (stages) {
      case 2: copyWait<0>(); break;
      case 3: copyWait<1>(); break;
      case 4: copyWait<2>(); break;
      case 5: copyWait<3>(); break;
      default: copyWait<4>();
    }
  }

  __device__ static __forceinline__ void run(const LatentAnyParams& a, char* memory) {
    const Params& p = a.p;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    if (p.work[blockIdx.x].tiles > 0) attend(a, memory, warp, lane);
    ::writeFullyMasked(p, *p.masked, a.value, p.lse, threadIdx.x, THREADS, [&](long long at) { storeAs(p.out, at, p.outType, 0.f); }, Sinks{a.score.sinks});
  }

  // The output tiles of a thread block's range.
  __device__ static __forceinline__ void attend(const LatentAnyParams& a, char* memory, int warp, int lane) {
    const Params& p = a.p;
    const int stages = a.stages;
    const Work* const range = p.work + blockIdx.x;
    const Shared sh(a, memory);
    const ThreadGroup workers{(int)threadIdx.x, WARPS, 1};
    const typename R::Shares shares(*range);
    const typename R::Tile begin(p, range);
    const Columns of(a.value, warp);
    Place w;
    w.begin(p, range);
    bool more = true;
#pragma unroll 1
    while (more) {
      const int tiles = w.rows(p) > 16 ? 2 : 1;
      int issued = w.chunk, to = 0, row = find(p, w, issued); // the next chunk to copy, its stage and the thread's row of it
      const auto copyNext = [&] {
        if (issued < w.end) {
          issue(a, sh, to, row);
          row = find(p, w, ++issued);
          if (++to == stages) to = 0;
        }
        copyCommit();
      };
#pragma unroll 1
      for (int i = 1; i < stages; i++) copyNext();
      Queries q;
      load(a, w, sh, q, warp, lane);
      Mine mine(p, w, warp, lane);
      Sums o = {};
      int stage = 0;
#pragma unroll 1
      for (int n = w.chunk; n < w.end; n++) {
        waitForStage(stages);
        workers.sync();
        copyNext();
        if (stages == 1) {
          copyWait<0>();
          workers.sync();
        }
        if constexpr (WIDENED) {
          widen(a, sh, stage);
          workers.sync();
        }
        scores(a, sh, q, stage, tiles, warp, lane);
        workers.sync();
        mine.weigh(sh, w.chunkAt(n), lane);
        workers.sync();
        add(a, sh, o, of, stage, tiles, lane);
        if (++stage == stages) stage = 0;
      }
      copyWait<0>();
      mine.leave(sh, lane);
      workers.sync();
      const Place done = w;
      more = w.next(p);
      const typename R::Tile tile(p, done);
      leave(a, tile, sh, o, of, R::slotOf(done), warp, lane);
      if (done.endsParts() && R::arriveAll(p, workers, shares, sh.reduce)) {
        typename R::Tile of = begin;
        int host = shares.host, sharers = shares.sharers;
#pragma unroll 1
        for (int k = 0; k < 2; k++) {
          if (sh.reduce.last[k]) merge(a, of, host, sharers);
          of = tile, host = blockIdx.x, sharers = shares.guests;
        }
      }
      workers.sync(); // the statistics, and what tells which output tiles are complete
    }
  }
};

#define LATENT_ANY(name, ...) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ LatentAnyParams p) { \
    extern __shared__ __align__(1024) char memory[]; \
    LatentAny<__VA_ARGS__>::run(p, memory); \
  }
