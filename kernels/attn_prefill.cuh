// Attention of many query rows, as prompts have them, on GPUs of compute capability 9.0. The
// pipeline is FlashAttention-3's (Shah et al., arXiv:2407.08608, section 3).
//
// An output tile is a sequence, a KV head and GROUPS*64 rows: query positions x heads of the
// group. A thread block takes one output tile after the other, or, where these are too few for all
// blocks, parts of them: some of the keys. It has a producer warp group
// and GROUPS consumer warp groups, of 64 rows each. The producer's first warps bring keys and
// values, KEYS of them at a time, through a ring of STAGES; its other warps bring the queries
// of the next output tile. A consumer issues the scores of the next KEYS keys, and the product
// of the last weights with their values, and makes weights of the scores while these run.
// Consumers take turns at issuing products, so that one has the tensor cores while another
// computes exponentials.
//
// What blocks have of an output tile with several parts goes to memory, and who comes last merges it,
// in the order of the parts: the result does not depend on who that is. Warps do so each
// for its own 16 rows, so that nobody waits.
//
// The keys are walked from the last to the first: only the first steps have to mask.
//
// A launch may run beside the one ahead of it, which attends to the sequences of few rows and leaves
// multiprocessors to this one (p.beside). It does not wait for that. That one lets it start when it
// has waited for all work before, so that this work is done here, too. Block 0 waits for it at the
// end, and lets the next launch start no sooner: so what follows has both behind it.
//
// Where queries or outputs have more bits than operands of products, these are sums of two
// parts (PRECISE). Queries are taken apart on their way to shared memory, weights in registers,
// and both parts are multiplied. What values come to in a step is then added to the output
// by an instruction that rounds: products cut off, which thousands of steps would show.
#pragma once
#include "attn_work.cuh"
#include "wgmma.cuh"

// An output tile, or a part of one: some of its keys.
struct alignas(16) PrefillTile {
  int seq, head, block; // KV head, and the rows [block, block+1) * ROWS
  int first, end;       // keys; the first one is a multiple of any KEYS, the last one is seen by some row
  int host, part, parts; // blocks host, host+1, ... have parts 0, 1, ... of so many: host its last tile, the others their first
};

struct PrefillParams {
  TensorMap keyMap, valueMap; // boxes of 64 columns
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
  int beside;               // the launch ahead is the kernel for few rows (attn_lean.cuh), of the same step: see above
  int queryType, outType;
  float scale;              // of scores, to base 2; more than 0
  float natural;            // of scores, to base e
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// T is the Format of keys and values. Queries and outputs are of its operands' type, or, ANY,
// of any: rounded to that, or, PRECISE, in two parts of it.
template <class T, int D, int GROUPS, int KEYS, int STAGES, bool PRECISE = false, bool ANY = PRECISE> struct Prefill { // KEYS: of a step
  using Store = typename T::Store;
  using Math = typename T::Math;
  using Operand = typename Math::Operand;
  static_assert(T::ready && Operand::bytes == 2, "warp groups multiply what is in shared memory as it is");
  static constexpr int ROWS = GROUPS * 64;                // of an output tile
  static constexpr int PARTS = PRECISE ? 2 : 1;           // of a query, and of a weight
  static constexpr int BLOCKS = (D * Store::bytes + 127) / 128; // column blocks of 128 bytes; of the last one there may be less
  static constexpr int PLACES = D <= 128 ? 2 : 1;         // for queries: there is room for so many
  static constexpr int QUERY = ROWS * BLOCKS * 128;       // bytes of an output tile's queries, of one part
  static constexpr int FACTORS = PRECISE ? ROWS * 4 : 0;  // bytes of what its rows' scores are multiplied by
  static constexpr int STAGE = KEYS * BLOCKS * 128;       // bytes of a step's keys, or values
  static constexpr bool ROUNDED = PRECISE && D <= 128;    // what a step adds to outputs has registers of its own
  static constexpr int THREADS = (GROUPS + 1) * 128;
  static constexpr int KV_PRODUCERS = PRECISE ? 1 : 2;         // warps that bring keys and values: a step in two parts takes twice as long, and one can
  static constexpr int QUERY_PRODUCERS = 128 - KV_PRODUCERS * 32; // threads
  static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32, CONSUMER_REGISTERS = GROUPS == 2 ? 232 : 160; // registers of a lane
  static constexpr int CLEARED = 1, MAY_ISSUE = 2;        // named barriers: of all consumers, and each one's

  // Addresses in shared memory, and those of barriers.
  struct Shared {
    u32 query, keys, values, factors;
    u32 queryFull, queryEmpty, keyFull, keyEmpty, valueFull, valueEmpty;
  };

  // The output tiles of this block, in p.tiles.
  struct Range {
    int begin, end;
  };
  // Number n of them.
  struct Tile {
    Seq s;
    int index, head, first, rows, begin, end; // first: row of the sequence's rows. begin, end: steps
    __device__ __forceinline__ bool load(const PrefillParams& p, const Range& range, int n) {
      index = range.begin + n;
      if (index >= range.end) return false;
      const PrefillTile t = p.tiles[index];
      s = p.seqs[t.seq], head = t.head, first = t.block * ROWS, rows = s.queries * p.group, begin = t.first / KEYS, end = (t.end + KEYS - 1) / KEYS;
      return true;
    }
  };

  __device__ static __forceinline__ void run(const PrefillParams& p) {
    extern __shared__ __align__(1024) char memory[];
    Shared sh;
    sh.query = sharedAddress(memory), sh.keys = sh.query + PLACES * PARTS * QUERY, sh.values = sh.keys + STAGES * STAGE;
    sh.factors = sh.values + STAGES * STAGE, sh.queryFull = sh.factors + PLACES * FACTORS, sh.queryEmpty = sh.queryFull + 16;
    sh.keyFull = sh.queryEmpty + 16, sh.keyEmpty = sh.keyFull + 8 * STAGES, sh.valueFull = sh.keyEmpty + 8 * STAGES, sh.valueEmpty = sh.valueFull + 8 * STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < PLACES; i++) barrierInit(sh.queryFull + i * 8, QUERY_PRODUCERS), barrierInit(sh.queryEmpty + i * 8, GROUPS * 4);
      for (int i = 0; i < STAGES; i++) {
        barrierInit(sh.keyFull + i * 8, 1), barrierInit(sh.keyEmpty + i * 8, GROUPS * 4);
        barrierInit(sh.valueFull + i * 8, 1), barrierInit(sh.valueEmpty + i * 8, GROUPS * 4);
      }
      opened();
      prefetchMap(&p.keyMap), prefetchMap(&p.valueMap);
    }
    __syncthreads();
    if (p.beside == 0) waitForEarlier();
    if (threadIdx.x == 0 && !isLast(p)) letNextStart();
    const Range range = {p.starts[blockIdx.x], p.starts[blockIdx.x + 1]};
    if (warp < 4) {
      fewerRegisters<PRODUCER_REGISTERS>();
      if (warp < KV_PRODUCERS) produceKeys(p, sh, range, warp, lane);
      else if constexpr (PRECISE) produceParts(p, sh, range, threadIdx.x - KV_PRODUCERS * 32);
      else produceQueries(p, sh, range, threadIdx.x - KV_PRODUCERS * 32);
    } else {
      moreRegisters<CONSUMER_REGISTERS>();
      consume(p, sh, range, warp / 4 - 1, threadIdx.x % 128);
      if (p.beside == 0) writeFullyMasked(p, *p.masked, D, p.lse, threadIdx.x - 128, GROUPS * 128, [&](long long at) { storeAs(p.out, at, ANY ? p.outType : Operand::type, 0.f); });
      if (isLast(p) && threadIdx.x == 128) waitForEarlier(), letNextStart();
    }
  }

  // Whether this block ends a launch beside another one: what follows waits for this launch alone.
  __device__ static __forceinline__ bool isLast(const PrefillParams& p) { return p.beside != 0 && blockIdx.x == 0; }

  // Where output tile number n has its queries, and the parity of that place's barriers.
  __device__ static __forceinline__ int placeOf(int n) { return n & (PLACES - 1); }
  __device__ static __forceinline__ u32 parityOf(int n) { return n >> (PLACES - 1) & 1; }

  // KEYS rows, of which each lane knows where a box begins: the boxes [first, first + 32) of
  // `boxes`.
  __device__ static __forceinline__ void copyRows(const PrefillParams& p, u32 to, const TensorMap* map, int row, int first, int boxes, u32 bar, u64 policy) {
    for (int b = 0; b < min(boxes - first, 32); b++) {
      const int r = __shfl_sync(~0u, row, b);
      if (elected())
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
          constexpr bool WHOLE = D * Store::bytes % 128 == 0; // else there are zeros behind the last column
          copyBox(to + j * KEYS * 128 + (first + b) * p.box * 128, map, WHOLE ? 0 : j * (128 / Store::bytes), r, WHOLE ? j : 0, bar, policy);
        }
    }
  }

  // One warp brings keys and values, or the first keys and the second values: small pages
  // take many copies.
  __device__ static __forceinline__ void produceKeys(const PrefillParams& p, const Shared& sh, const Range& range, int warp, int lane) {
    constexpr int OUTSIDE = 0x7ffffff0; // of the array: zeros
    const u64 policy = readAgain();
    const int boxes = KEYS >> (31 - __clz(p.box));
    PipelineState stage;
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      const auto rowOf = [&](int key) {
        const int head = t.head * p.headRows;
        if (p.pages == nullptr) return t.s.pages * p.pageRows + head + key;
        if (key >= t.s.keys) return OUTSIDE;
        const int page = key / p.pageTokens;
        return p.pages[t.s.pages + page] * p.pageRows + head + key - page * p.pageTokens;
      };
      const auto bring = [&](u32 to, const TensorMap* map, int key, int row, u32 full, u32 empty) {
        barrierWait(empty, stage.parity ^ 1);
        __syncwarp();
        if (lane == 0) barrierExpect(full, STAGE);
        __syncwarp();
        copyRows(p, to, map, row, 0, boxes, full, policy);
        for (int first = 32; first < boxes; first += 32) copyRows(p, to, map, rowOf(key + (first + lane) * p.box), first, boxes, full, policy);
      };
#pragma unroll 1
      for (int c = t.end - 1; c >= t.begin; c--) {
        const int key = c * KEYS, at = stage.index, row = rowOf(key + lane * p.box);
        if (KV_PRODUCERS == 1 || warp == 0) bring(sh.keys + at * STAGE, &p.keyMap, key, row, sh.keyFull + at * 8, sh.keyEmpty + at * 8);
        if (KV_PRODUCERS == 1 || warp == 1) bring(sh.values + at * STAGE, &p.valueMap, key, row, sh.valueFull + at * 8, sh.valueEmpty + at * 8);
        stage.next(STAGES);
      }
    }
  }

  __device__ static __forceinline__ void produceQueries(const PrefillParams& p, const Shared& sh, const Range& range, int thread) {
    constexpr int PIECES = D / 8; // of a row, 16 bytes each
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      const u32 to = sh.query + placeOf(n) * QUERY;
      barrierWait(sh.queryEmpty + placeOf(n) * 8, parityOf(n) ^ 1);
#pragma unroll 4
      for (int i = thread; i < ROWS * PIECES; i += QUERY_PRODUCERS) {
        const int r = i / PIECES, c = i % PIECES, row = t.first + r, position = row / p.group;
        const bool there = row < t.rows; // else zeros
        const long long from = (t.s.row + position) * p.queryRow + (t.head * p.group + row - position * p.group) * p.queryHead + c * 8;
        const u32 at = to + c / 8 * (ROWS * 128) + swizzled(r, c % 8 * 16);
        if constexpr (ANY) putRounded(p, at, from, there);
        else copy16(at, (const u16*)p.query + (there ? from : 0), there);
      }
      copyCommit();
      copyWait<0>();
      fenceAsync();
      barrierArrive(sh.queryFull + placeOf(n) * 8);
    }
  }

  // Eight elements of a query of another type, rounded.
  __device__ static __forceinline__ void putRounded(const PrefillParams& p, u32 at, long long from, bool there) {
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
    if (there) withStore(p.queryType, [&](auto s) { a = decltype(s)::load4(p.query, from), b = decltype(s)::load4(p.query, from + 4); });
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(Operand::pack(a.x, a.y)), "r"(Operand::pack(a.z, a.w)), "r"(Operand::pack(b.x, b.y)), "r"(Operand::pack(b.z, b.w)) : "memory");
  }

  // The same of queries of any type, in two parts. Where operands have few exponents a row is
  // multiplied by a power of two that makes its largest element 2^8 to 2^9, as by scaleOf
  // (attn_tile.cuh), and its scores by another that undoes it.
  __device__ static __forceinline__ void produceParts(const PrefillParams& p, const Shared& sh, const Range& range, int thread) {
    constexpr int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32; // that have a row, eight elements each
    constexpr int ROUND = QUERY_PRODUCERS / LANES, TOGETHER = 2;
    const int c = thread % LANES;
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      const u32 to = sh.query + placeOf(n) * (2 * QUERY), factors = sh.factors + placeOf(n) * FACTORS;
      barrierWait(sh.queryEmpty + placeOf(n) * 8, parityOf(n) ^ 1);
#pragma unroll 1
      for (int first = thread / LANES; first < ROWS; first += TOGETHER * ROUND) {
        float4 x[TOGETHER][2];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
          const int row = t.first + first + i * ROUND, position = row / p.group;
          x[i][0] = x[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (row >= t.rows || c * 8 >= D) continue;
          const long long from = (t.s.row + position) * p.queryRow + (t.head * p.group + row - position * p.group) * p.queryHead + c * 8;
          withStore(p.queryType, [&](auto s) { x[i][0] = decltype(s)::load4(p.query, from), x[i][1] = decltype(s)::load4(p.query, from + 4); });
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
          if (first + i * ROUND < ROWS) putParts(to, factors, x[i], first + i * ROUND, c); // a warp's rows are there together
      }
      fenceAsync();
      barrierArrive(sh.queryFull + placeOf(n) * 8);
    }
  }
  // Eight elements of row r, from number 8c on.
  template <int LANES = D <= 64 ? 8 : D <= 128 ? 16 : 32> __device__ static __forceinline__ void putParts(u32 to, u32 factors, float4 (&x)[2], int r, int c) {
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

  __device__ static __forceinline__ void consume(const PrefillParams& p, const Shared& sh, const Range& range, int group, int thread) {
    const int lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4; // the lane's, and row + 8
    // A consumer waits until it may issue products, and the one before it lets it.
    const auto waitToIssue = [&] { ThreadGroup{0, 8, MAY_ISSUE + group}.sync(); };
    const auto letIssue = [&](int to) { ThreadGroup{0, 8, MAY_ISSUE + to}.arrive(); };
    const int next = group + 1 == GROUPS ? 0 : group + 1;
    if (next == 0) letIssue(0);
    PipelineState stage;
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      const auto seen = [&](int row) { return p.causal ? min(t.s.keys, t.s.keys - t.s.queries + (t.first + row) / p.group + 1) : t.s.keys; };
      const int sees[2] = {seen(row), seen(row + 8)}, all = seen(group * 64); // all: keys that every row of the consumer sees
      float o[D / 8][4] = {}, s[KEYS / 8][4];
      float more[ROUNDED ? D / 8 : 1][4]; // what a step adds to o
      u32 w[PARTS][KEYS / 16][4];
      Softmax m(p.scale);

      const auto scores = [&] {
        const u32 keys = sh.keys + stage.index * STAGE;
        u32 query = sh.query + placeOf(n) * (PARTS * QUERY) + group * 64 * 128;
        if constexpr (PRECISE) asm volatile("" : "+r"(query)); // else the descriptors of all parts are kept in registers
        pinned(s);
        wgmmaFence();
#pragma unroll
        for (int part = PARTS - 1; part >= 0; part--) // the small ones first
#pragma unroll
          for (int k = 0; k < D / 16; k++)
            Wgmma<KEYS>::template shared<Math>(s, rowOperand(query + part * QUERY + k / 4 * (ROWS * 128) + k % 4 * 32), rowOperand(keys + k / 4 * (KEYS * 128) + k % 4 * 32), part < PARTS - 1 || k > 0);
        wgmmaCommit();
      };
      const auto values = [&](const PipelineState& of) {
        barrierWait(sh.valueFull + of.index * 8, of.parity);
        const u32 v = sh.values + of.index * STAGE;
        if constexpr (ROUNDED) {
          pinned(more);
          wgmmaFence();
          valuesOf<0>(more, w[1][0], v);
#pragma unroll
          for (int k = 1; k < 2 * (KEYS / 16); k++) valuesOf<1>(more, w[k < KEYS / 16][k % (KEYS / 16)], v + k % (KEYS / 16) * 16 * 128);
        } else {
          pinned(o);
          wgmmaFence();
#pragma unroll
          for (int part = PARTS - 1; part >= 0; part--)
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) valuesOf<1>(o, w[part][k], v + k * 16 * 128);
        }
        wgmmaCommit();
      };
      // o, when values have come; shrink: what weights before those of these values have become.
      const auto add = [&](const float (&shrink)[2]) {
        if constexpr (ROUNDED) {
          pinned(more);
#pragma unroll
          for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[j][e] = __fmaf_rn(o[j][e], shrink[e / 2], more[j][e]);
        } else {
          pinned(o);
        }
      };
      const auto weigh = [&](int c) {
        if ((c + 1) * KEYS > all) {
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              if (c * KEYS + j * 8 + lane % 4 * 2 + (e & 1) >= sees[e >> 1]) s[j][e] = -LEAN_INF;
        }
        m.weigh(s);
      };
      const auto pack = [&] {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float x = s[2 * k + e / 2][e % 2 * 2], y = s[2 * k + e / 2][e % 2 * 2 + 1];
            if constexpr (PRECISE) splitOf(x, y, w[0][k][e], w[1][k][e]);
            else w[0][k][e] = Operand::pack(x, y);
          }
      };
      const auto release = [&](u32 empty) {
        if (lane == 0) barrierArrive(empty);
      };

      barrierWait(sh.queryFull + placeOf(n) * 8, parityOf(n));
      if (t.begin < t.end) {
        if constexpr (PRECISE) {
          const u32 factors = sh.factors + placeOf(n) * FACTORS;
          m.scale[0] *= loadShared(factors + row * 4), m.scale[1] *= loadShared(factors + row * 4 + 32);
        }
        int c = t.end - 1;
        barrierWait(sh.keyFull + stage.index * 8, stage.parity);
        waitToIssue();
        scores();
        letIssue(next);
        wgmmaWait<0>();
        pinned(s);
        release(sh.keyEmpty + stage.index * 8);
        clearBehind(sh, stage, t.s.keys - c * KEYS, thread + group * 128);
        weigh(c);
        pack();
        PipelineState before = stage;
        stage.next(STAGES);
#pragma unroll 1
        for (c--; c >= t.begin; c--) {
          barrierWait(sh.keyFull + stage.index * 8, stage.parity);
          waitToIssue();
          scores();
          values(before);
          letIssue(next);
          wgmmaWait<1>();
          pinned(s);
          release(sh.keyEmpty + stage.index * 8);
          const float shrink[2] = {m.shrink[0], m.shrink[1]};
          weigh(c);
          wgmmaWait<0>();
          add(shrink);
          release(sh.valueEmpty + before.index * 8);
          pack();
          if constexpr (!ROUNDED)
#pragma unroll
            for (int j = 0; j < D / 8; j++)
#pragma unroll
              for (int e = 0; e < 4; e++) o[j][e] *= m.shrink[e / 2];
          before = stage;
          stage.next(STAGES);
        }
        if constexpr (PRECISE) __syncwarp(); // all lanes have their rows' factors
        release(sh.queryEmpty + placeOf(n) * 8);
        values(before);
        wgmmaWait<0>();
        add(m.shrink);
        release(sh.valueEmpty + before.index * 8);
      } else {
        release(sh.queryEmpty + placeOf(n) * 8);
      }
      if (merged(p, t, o, m, group * 128 + thread)) epilogue(p, t, o, m, row, lane);
    }
    if (group == 0) waitToIssue(); // the last one has let it
  }

  // Weights of 16 keys times their values. No instruction has columns of one block and a
  // part of the next.
  template <int MORE> __device__ static __forceinline__ void valuesOf(float (&o)[D / 8][4], const u32 (&w)[4], u32 v) {
    constexpr int REST = D % 64;
    if constexpr (REST == 0) {
      Wgmma<D>::template registers<Math, MORE>(o, w, columnOperand(v, KEYS * 128));
    } else {
      static_assert(D / 64 == 1, "the first block, and a part of another one");
      Wgmma<64>::template registers<Math, MORE>((float (&)[8][4])o, w, columnOperand(v, KEYS * 128));
      Wgmma<REST>::template registers<Math, MORE>((float (&)[REST / 8][4])o[8], w, columnOperand(v + KEYS * 128, KEYS * 128));
    }
  }

  // Values behind the last key become zeros, whatever is in memory: no weight of 0 makes a
  // number of what is none.
  __device__ static __forceinline__ void clearBehind(const Shared& sh, const PipelineState& stage, int live, int thread) {
    if (live >= KEYS) return;
    barrierWait(sh.valueFull + stage.index * 8, stage.parity);
    for (int i = thread; i < (KEYS - live) * (D / 8); i += GROUPS * 128) {
      const int r = live + i / (D / 8), c = i % (D / 8);
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(sh.values + stage.index * STAGE + c / 8 * (KEYS * 128) + swizzled(r, c % 8 * 16)), "r"(0) : "memory");
    }
    fenceAsync();
    ThreadGroup{0, GROUPS * 4, CLEARED}.sync();
  }

  // Whether o and m are all of the output tile: the parts of one become so for the warp that comes last.
  __device__ static __forceinline__ bool merged(const PrefillParams& p, const Tile& t, float (&o)[D / 8][4], Softmax& m, int thread) {
    constexpr int LANES = GROUPS * 128, SLOT = (D / 8 + 1) * LANES; // a lane's numbers are LANES apart
    const PrefillTile& tile = p.tiles[t.index];
    const int parts = tile.parts, host = tile.host, lane = thread % 32;
    if (parts == 1) return true;
    const auto slotOf = [&](int part) { return p.partials + (long long)(2 * (host + part) + (part == 0)) * SLOT + thread; };
    float4* const to = slotOf(tile.part);
#pragma unroll
    for (int j = 0; j < D / 8; j++) __stcg(to + j * LANES, make_float4(o[j][0], o[j][1], o[j][2], o[j][3]));
    __stcg(to + D / 8 * LANES, make_float4(m.top[0], m.top[1], m.sum[0], m.sum[1]));
    __syncwarp();
    u32* const counter = p.counters + host * (GROUPS * 4) + thread / 32;
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
      const float4 x = __ldcg(slotOf(i) + D / 8 * LANES);
      top[0] = fmaxf(top[0], x.x), top[1] = fmaxf(top[1], x.y);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) m.top[h] = top[h], m.sum[h] = 0.f;
#pragma unroll
    for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
#pragma unroll 1
    for (int i = 0; i < parts; i++) {
      const float4* const from = slotOf(i);
      const float4 x = __ldcg(from + D / 8 * LANES);
      // A part in which a row sees nothing has no weight.
      const float f = x.x == -LEAN_INF ? 0.f : exp2_((x.x - top[0]) * m.scale[0]), g = x.y == -LEAN_INF ? 0.f : exp2_((x.y - top[1]) * m.scale[1]);
      m.sum[0] = __fmaf_rn(f, x.z, m.sum[0]), m.sum[1] = __fmaf_rn(g, x.w, m.sum[1]);
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        const float4 y = __ldcg(from + j * LANES);
        o[j][0] = __fmaf_rn(f, y.x, o[j][0]), o[j][1] = __fmaf_rn(f, y.y, o[j][1]);
        o[j][2] = __fmaf_rn(g, y.z, o[j][2]), o[j][3] = __fmaf_rn(g, y.w, o[j][3]);
      }
    }
    return true;
  }

  // Writes a lane's two rows.
  __device__ static __forceinline__ void epilogue(const PrefillParams& p, const Tile& t, float (&o)[D / 8][4], const Softmax& m, int row, int lane) {
    const int quarter = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = m.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float f = sum == 0.f ? 0.f : 1.f / sum;
      const int r = t.first + row + h * 8, position = r / p.group, head = t.head * p.group + r - position * p.group;
      const bool there = r < t.rows;
      const float natural = PRECISE ? p.natural * (m.scale[h] / p.scale) : p.natural; // the quotient is a power of two
      if (there && p.lse != nullptr && quarter == 0)
        p.lse[(t.s.row + position) * p.lseRow + head * p.lseHead] = sum == 0.f ? -LEAN_INF : finite(__fmaf_rn(m.top[h], natural, (log2_(sum) - Math::lift) * LN2));
      const long long at = (t.s.row + position) * p.outRow + head * p.outHead;
      if constexpr (ANY) {
        if (!there) continue;
        withStore(p.outType, [&](auto s) {
#pragma unroll
          for (int j = 0; j < D / 8; j++) decltype(s)::store2(p.out, at + j * 8 + quarter * 2, make_float2(o[j][2 * h] * f, o[j][2 * h + 1] * f));
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
#endif
