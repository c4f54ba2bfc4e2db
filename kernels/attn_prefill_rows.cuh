// What prefill kernels have in common, whatever they multiply with
// (attn_prefill.cuh, attn_prefill_mma.cuh): output tiles, queries on their way to shared memory, the
// softmax of rows, parts of output tiles, and the output.
#pragma once
#include "attn_prefill_variant.cuh"

// An output tile, or a part of one: some of its keys.
struct alignas(16) PrefillTile {
  int seq, head, block; // KV head, and the rows [block, block+1) * ROWS
  int first, end;       // keys; the first one is a multiple of any KEYS, the last one is seen by some row
  int host, part, parts; // blocks host, host+1, ... have parts 0, 1, ... of so many: host its last tile, the others their first
};

struct PrefillParams {
  TensorMap keyMap, valueMap; // boxes of 64 columns, where the copy engine brings keys and values
  const void* query;
  void* out;
  float* lse; // may be null
  const Seq* seqs;
  const int* pages;         // the block table; null where pages hold whole sequences
  const int* masked;        // fully masked rows, which see no key: how many, and which
  const int* starts;        // where each block's tiles begin, and the last one's end
  const PrefillTile* tiles; // of one block after the other, in the order in which it takes them
  float4* partials;         // of parts of output tiles: two for each block
  u32* counters;            // of warps that have written a part: for each block and its consumer warps, zero
  long long queryRow, queryHead, outRow, outHead, lseRow, lseHead; // strides, in elements
  int pageRows, headRows;   // of keys: key j of head h in page p is row p*pageRows + h*headRows + j
  int pageTokens;
  int box;                  // keys that are copied at once: a power of two that divides KEYS and a page
  int heads, group;         // KV heads, and query heads of each
  int causal;
  int queryType, outType;
  float scale;              // of scores, to base 2; more than 0
  float natural;            // of scores, to base e
  int beside;               // the launch ahead is the decode kernel (attn_lean.cuh), of the same step: see attn_prefill.cuh, which alone is told so
  const void *keys, *values; // where threads bring them
  const int* rows;           // of each row of a sequence, the row of queries; null: the same
  int streamed;              // keys and values don't fit in the L2 cache, and one output tile alone reads each of them
};

// Of kernels whose Variant has scores. If scores change, p.scale is for scores of base 4.
struct ScoredPrefillParams {
  PrefillParams p;
  ScoreParams score;
};
__device__ __forceinline__ const ScoreParams& scoreOf(const PrefillParams& p) { return *(const ScoreParams*)(&p + 1); }

// T is the Format of keys and values, V the Variant. Queries and outputs are of its operands' type, or, ANY,
// of any: rounded to that, or, PRECISE, in two parts of it. ROWS are those of an output tile, KEYS
// those of a step.
template <class T, class V, int D, int ROWS, int KEYS, bool PRECISE, bool ANY> struct PrefillRows {
  using Store = typename T::Store;
  using Math = typename T::Math;
  using Operand = typename Math::Operand;
  static_assert(T::ready && Operand::bytes == 2, "what is in shared memory is multiplied as it is");
  static constexpr bool SCORED = V::scores;
  static constexpr int PARTS = PRECISE ? 2 : 1;                 // of a query, and of a weight
  static constexpr int BLOCKS = (D * Store::bytes + 127) / 128; // column blocks of 128 bytes; of the last one there may be less
  static constexpr int QUERY = ROWS * BLOCKS * 128;             // bytes of an output tile's queries, of one part
  static constexpr int FACTORS = PRECISE ? ROWS * 4 : 0;        // bytes of what its rows' scores are multiplied by
  static constexpr int STAGE = KEYS * BLOCKS * 128;             // bytes of a step's keys, or values
  static constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32; // that have a row of queries in two parts, eight elements each

  // The output tiles of this block, in p.tiles.
  struct Range {
    int begin, end;
  };
  // One of them.
  struct Tile : KeySteps<KEYS, SCORED> {
    Seq s;
    int index, head, first, rows, begin, end; // first: row of the sequence's rows. begin, end: steps
    __device__ __forceinline__ void open(const PrefillParams& p, int number) {
      index = number;
      const PrefillTile t = p.tiles[index];
      s = p.seqs[t.seq], head = t.head, first = t.block * ROWS, rows = s.queries * p.group, begin = t.first / KEYS, end = (t.end + KEYS - 1) / KEYS;
      if constexpr (SCORED) this->leaveOut(scoreOf(p), s, t.seq, s.keys - s.queries + first / p.group);
    }
    // Number n of them, if there is one.
    __device__ __forceinline__ bool load(const PrefillParams& p, const Range& range, int n) {
      if (range.begin + n >= range.end) return false;
      open(p, range.begin + n);
      return true;
    }
  };

  // Where the query of a row of a sequence's rows begins, in elements.
  __device__ static __forceinline__ long long queryOf(const PrefillParams& p, const Tile& t, int row) {
    const int position = row / p.group, at = t.s.row + position;
    return (p.rows == nullptr ? at : p.rows[at]) * p.queryRow + (t.head * p.group + row - position * p.group) * p.queryHead;
  }

  // What `THREADS` threads do to bring the queries of an output tile to shared memory, of which this is number `thread`.
  // Those of the operands' type are on their way then (copyCommit).
  static constexpr int PIECES = D / 8; // of a row, eight elements each
  template <int THREADS> __device__ static __forceinline__ void bringQueries(const PrefillParams& p, const Tile& t, u32 to, int thread) {
    if constexpr (ANY) {
      if (p.queryType != Operand::type) {
        withStore(p.queryType, [&](auto s) { bringRounded<THREADS, decltype(s)>(p, t, to, thread); });
        return;
      }
    }
#pragma unroll 4
    for (int i = thread; i < ROWS * PIECES; i += THREADS) {
      const Piece piece(p, t, to, i);
      copy16(piece.to, (const u16*)p.query + (piece.there ? piece.from : 0), piece.there);
    }
  }
  // Eight elements of a query, and where they go.
  struct Piece {
    u32 to;
    bool there; // else zeros
    long long from;
    __device__ __forceinline__ Piece(const PrefillParams& p, const Tile& t, u32 query, int i) {
      const int r = i / PIECES, c = i % PIECES, row = t.first + r;
      there = row < t.rows;
      from = queryOf(p, t, there ? row : t.first) + c * 8;
      to = query + c / 8 * (ROWS * 128) + swizzled(r, c % 8 * 16);
    }
  };
  // Those of another type, Of: rounded. A thread has some pieces on their way at once.
  template <int THREADS, class Of> __device__ static __forceinline__ void bringRounded(const PrefillParams& p, const Tile& t, u32 to, int thread) {
    constexpr int TOGETHER = 2;
#pragma unroll 1
    for (int first = thread; first < ROWS * PIECES; first += TOGETHER * THREADS) {
      float4 x[TOGETHER][2];
      u32 at[TOGETHER];
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) {
        const Piece piece(p, t, to, min(first + n * THREADS, ROWS * PIECES - 1));
        at[n] = piece.to;
        x[n][0] = x[n][1] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (piece.there) x[n][0] = Of::load4(p.query, piece.from), x[n][1] = Of::load4(p.query, piece.from + 4);
      }
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) {
        const float4 a = x[n][0], b = x[n][1];
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at[n]), "r"(Operand::pack(a.x, a.y)), "r"(Operand::pack(a.z, a.w)), "r"(Operand::pack(b.x, b.y)), "r"(Operand::pack(b.z, b.w)) : "memory");
      }
    }
  }

  // The same of queries of any type, in two parts. Where operands have few exponents a row is
  // multiplied by a power of two that makes its largest element 2^8 to 2^9, as by scaleOf
  // (attn_tile.cuh), and its scores by another that undoes it.
  template <int THREADS> __device__ static __forceinline__ void bringParts(const PrefillParams& p, const Tile& t, u32 to, u32 factors, int thread) {
    constexpr int ROUND = THREADS / LANES, TOGETHER = 2;
    const int c = thread % LANES;
#pragma unroll 1
    for (int first = thread / LANES; first < ROWS; first += TOGETHER * ROUND) {
      float4 x[TOGETHER][2];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        const int row = t.first + first + i * ROUND;
        x[i][0] = x[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (row >= t.rows || c * 8 >= D) continue;
        const long long from = queryOf(p, t, row) + c * 8;
        withStore(p.queryType, [&](auto s) { x[i][0] = decltype(s)::load4(p.query, from), x[i][1] = decltype(s)::load4(p.query, from + 4); });
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (first + i * ROUND < ROWS) putParts(to, factors, x[i], first + i * ROUND, c); // a warp's rows are there together
    }
  }

  // Eight elements of row r, from number 8c on.
  __device__ static __forceinline__ void putParts(u32 to, u32 factors, float4 (&x)[2], int r, int c) {
    float* const f = &x[0].x;
    float factor = 1.f;
    if constexpr (Math::narrow) {
      float top = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(f[i]));
#pragma unroll
      for (int i = 1; i < LANES; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      const int e = max((int)(__float_as_uint(top) >> 23) - 127 - 8, -118);
      const float up = __int_as_float((127 - e) << 23);
      factor = __int_as_float((127 + e) << 23);
#pragma unroll
      for (int i = 0; i < 8; i++) f[i] *= up;
    }
    if (c * 8 < D) {
      u32 lead[4], rest[4];
#pragma unroll
      for (int i = 0; i < 4; i++) splitOf(f[2 * i], f[2 * i + 1], lead[i], rest[i]);
      const u32 at = to + c / 8 * (ROWS * 128) + swizzled(r, c % 8 * 16);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(lead[0]), "r"(lead[1]), "r"(lead[2]), "r"(lead[3]) : "memory");
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + QUERY), "r"(rest[0]), "r"(rest[1]), "r"(rest[2]), "r"(rest[3]) : "memory");
    }
    if (c == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(factors + r * 4), "f"(factor) : "memory");
  }
  // Two numbers as sums of two operands each.
  __device__ static __forceinline__ void splitOf(float x, float y, u32& lead, u32& rest) {
    lead = Operand::pack(x, y);
    rest = Operand::pack(x - Operand::low(lead), y - Operand::high(lead));
  }

  // A lane's two rows of an output tile: the weights of a step's scores, the largest score, the
  // sum of weights, and what outputs are multiplied by when the largest score has changed.
  struct Softmax {
    static constexpr float LARGE = 4096.f;
    float scale[2];
    float top[2], base[2], sum[2], shrink[2]; // base: top*scale - Math::lift, rounded

    Softmax() = default;
    __device__ __forceinline__ explicit Softmax(float of) {
#pragma unroll
      for (int h = 0; h < 2; h++) top[h] = base[h] = -LEAN_INF, sum[h] = shrink[h] = 0.f, scale[h] = of;
    }
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 8][4]) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most = top[h];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float next = most == -LEAN_INF ? 0.f : most * scale[h]; // nothing seen yet: no NaN from -Inf - -Inf
        float minus = Math::lift - next;
        shrink[h] = exp2_(base[h] + minus);
        base[h] = most == -LEAN_INF ? -LEAN_INF : -minus;
        if (__any_sync(~0u, fabsf(next) > LARGE)) {
          // next is rounded by more than what is lost of a weight: the largest score is taken
          // off before scores are multiplied.
          const float off = most == -LEAN_INF ? 0.f : most;
          shrink[h] = exp2_((top[h] - off) * scale[h]);
          minus = Math::lift;
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++) s[j][2 * h] -= off, s[j][2 * h + 1] -= off;
        }
        top[h] = most;
        float more = 0.f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) more += s[j][e] = exp2_(__fmaf_rn(s[j][e], scale[h], minus));
        sum[h] = sum[h] * shrink[h] + more;
      }
    }
  };

  using Scores = typename Either<SCORED, PrefillScores<KEYS, PrefillParams, Tile>, NoPrefillScores>::type;
  // Whether scores change by more than masks. Those have been multiplied by the scale: they are of base 4.
  __device__ static __forceinline__ bool changes(const PrefillParams& p) {
    if constexpr (SCORED) return scoreOf(p).changes != 0;
    return false;
  }
  // Multiplies what makes scores of products by factors of a lane's rows.
  __device__ static __forceinline__ void multiply(const PrefillParams& p, float (&by)[2], float (&scale)[2], float f, float g) {
    if (changes(p)) by[0] *= f, by[1] *= g;
    else scale[0] *= f, scale[1] *= g;
  }
  // The softmax of a lane's rows, before there are keys.
  __device__ static __forceinline__ Softmax softmaxOf(const PrefillParams& p) { return Softmax(changes(p) ? 2.f : p.scale); }

  // Whether o and m are all of 16 rows of the output tile: the parts become so for the warp that comes
  // last. `thread` is a lane's number among those of all rows, 32 for each 16.
  __device__ static __forceinline__ bool merged(const PrefillParams& p, const Tile& t, float (&o)[D / 8][4], Softmax& m, int thread) {
    constexpr int APART = ROWS * 2, SLOT = (D / 8 + 1) * APART; // a lane's numbers are APART from each other
    const PrefillTile& tile = p.tiles[t.index];
    const int parts = tile.parts, host = tile.host, lane = thread % 32;
    if (parts == 1) return true;
    const auto slotOf = [&](int part) { return p.partials + (long long)(2 * (host + part) + (part == 0)) * SLOT + thread; };
    float4* const to = slotOf(tile.part);
#pragma unroll
    for (int j = 0; j < D / 8; j++) __stcg(to + j * APART, make_float4(o[j][0], o[j][1], o[j][2], o[j][3]));
    __stcg(to + D / 8 * APART, make_float4(m.top[0], m.top[1], m.sum[0], m.sum[1]));
    __syncwarp();
    u32* const counter = p.counters + host * (ROWS / 16) + thread / 32;
    int last = 0;
    if (lane == 0) {
      u32 before; // releases what the warp has written, and acquires what others have
      asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
      last = before == parts - 1;
      if (last) *counter = 0;
    }
    if (!__shfl_sync(~0u, last, 0)) return false;
    float top[2] = {-LEAN_INF, -LEAN_INF};
#pragma unroll 1
    for (int i = 0; i < parts; i++) {
      const float4 x = __ldcg(slotOf(i) + D / 8 * APART);
      top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) m.top[h] = top[h], m.sum[h] = 0.f;
#pragma unroll
    for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
#pragma unroll 1
    for (int i = 0; i < parts; i++) {
      const float4* const from = slotOf(i);
      const float4 x = __ldcg(from + D / 8 * APART);
      // A part in which a row sees nothing has no weight.
      const float f = x.x == -LEAN_INF ? 0.f : exp2_((x.x - top[0]) * m.scale[0]), g = x.y == -LEAN_INF ? 0.f : exp2_((x.y - top[1]) * m.scale[1]);
      m.sum[0] = __fmaf_rn(f, x.z, m.sum[0]), m.sum[1] = __fmaf_rn(g, x.w, m.sum[1]);
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        const float4 y = __ldcg(from + j * APART);
        o[j][0] = __fmaf_rn(f, y.x, o[j][0]), o[j][1] = __fmaf_rn(f, y.y, o[j][1]);
        o[j][2] = __fmaf_rn(g, y.z, o[j][2]), o[j][3] = __fmaf_rn(g, y.w, o[j][3]);
      }
    }
    return true;
  }

  static constexpr float LOG2E = 1.4426950408889634f;
  // An attention sink is a score more, whose value is 0. lse and f are those of a row with it: its log-sum-exp, and what its output is
  // multiplied by. top is its largest score, sum that of weights beside that one.
  __device__ static __forceinline__ void addSink(float sink, float top, float sum, float& lse, float& f) {
    constexpr float DOWN = 1.f / (1 << (int)Math::lift);
    const float most = fmaxf(top, sink);
    if (most == -LEAN_INF) return;
    const float own = exp2_((top - most) * LOG2E) * DOWN, all = __fmaf_rn(own, sum, exp2_((sink - most) * LOG2E));
    f = own / all, lse = finite(__fmaf_rn(log2_(all), LN2, most));
  }

  // Fully masked rows.
  __device__ static __forceinline__ void writeFullyMasked(const PrefillParams& p, int thread, int threads) {
    const auto zero = [&](long long at) { storeAs(p.out, at, ANY ? p.outType : Operand::type, 0.f); };
    if constexpr (SCORED) ::writeFullyMasked(p, *p.masked, D, p.lse, thread, threads, zero, Sinks{scoreOf(p).sinks});
    else ::writeFullyMasked(p, *p.masked, D, p.lse, thread, threads, zero);
  }

  // Writes a lane's two rows.
  __device__ static __forceinline__ void epilogue(const PrefillParams& p, const Tile& t, float (&o)[D / 8][4], const Softmax& m, int row, int lane) {
    const int quarter = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = m.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float f = sum == 0.f ? 0.f : 1.f / sum;
      const int r = t.first + row + h * 8, position = r / p.group, head = t.head * p.group + r - position * p.group;
      const bool there = r < t.rows;
      const float natural = PRECISE && !changes(p) ? p.natural * (m.scale[h] / p.scale) : p.natural; // the quotient is a power of two
      float lse = sum == 0.f ? -LEAN_INF : finite(__fmaf_rn(m.top[h], natural, (log2_(sum) - Math::lift) * LN2));
      if constexpr (SCORED)
        if (there && scoreOf(p).sinks != nullptr) addSink(scoreOf(p).sinks[head], m.top[h] * natural, sum, lse, f);
      if (there && p.lse != nullptr && quarter == 0) p.lse[(t.s.row + position) * p.lseRow + head * p.lseHead] = lse;
      const long long at = (t.s.row + position) * p.outRow + head * p.outHead;
      bool any = ANY; // what is long has one code for all types
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      if constexpr (ANY && !PRECISE) any = p.outType != Operand::type; // stores of 16 bytes are faster
#else
      if constexpr (ANY && !PRECISE && !SCORED) any = p.outType != Operand::type;
#endif
      if (any) {
        withStore(p.outType, [&](auto s) {
#pragma unroll
          for (int j = 0; j < D / 8; j++)
            if (there) decltype(s)::store2(p.out, at + j * 8 + quarter * 2, make_float2(o[j][2 * h] * f, o[j][2 * h + 1] * f));
        });
        continue;
      }
      u16* const to = (u16*)p.out + at;
#pragma unroll
      for (int j = D / 32 * 4; j < D / 8; j++) {
        const u32 x = Operand::pack(o[j][2 * h] * f, o[j][2 * h + 1] * f);
        if (there) *(u32*)(to + j * 8 + quarter * 2) = x;
      }
#pragma unroll
      for (int j = 0; j < D / 32 * 4; j += 4) {
        // Four lanes have two of each eight columns; each gets eight of one.
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = Operand::pack(o[j + e][2 * h] * f, o[j + e][2 * h + 1] * f);
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (e & step) continue;
            const u32 got = __shfl_xor_sync(~0u, quarter & step ? x[e] : x[e | step], step);
            (quarter & step ? x[e] : x[e | step]) = got;
          }
        if (there) *(uint4*)(to + (j + quarter) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
};
