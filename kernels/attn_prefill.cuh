// Prefill: attention of many query rows, as prompts have them, on GPUs of compute capability 9.0. The
// pipeline is FlashAttention-3's (Shah et al., arXiv:2407.08608, section 3).
//
// An output tile is a sequence, a KV head and GROUPS*64 rows: query positions x heads of the
// group. A thread block takes one output tile after the other, or, where these are too few for all
// blocks, parts of them: some of the keys. It has a producer warp group
// and GROUPS consumer warp groups, of 64 rows each. The producer's first warps bring keys and
// values, KEYS of them at a time, through a ring of STAGES; its other warps bring the queries
// of the next output tile. A consumer issues the scores of the next KEYS keys, and the product
// of the last weights with their values, and makes weights of the scores while these run. The first scores of the next output
// tile are issued beside the last values of an output tile, whose epilogue follows.
// Consumers take turns at issuing products, so that one has the tensor cores while another
// computes exponentials.
//
// Matrix descriptors are made of numbers that one lane gives to all (uniform). The compiler keeps those in uniform
// registers, and issues products one behind the other.
//
// What blocks have of an output tile with several parts goes to memory, and who comes last merges it,
// in the order of the parts: the result does not depend on who that is. Warps do so each
// for its own 16 rows, so that nobody waits.
//
// The keys are walked from the last to the first: only the first steps have to mask, and with a window
// the last ones. Those in front of it are left out but for sink tokens. What becomes of scores otherwise
// (SCORED, attn_prefill_variant.cuh) is in kernels of its own.
//
// A launch may run beside the one ahead of it, which attends to the sequences of few rows by a decode kernel and leaves
// multiprocessors to this one (p.beside). It does not wait for that. That one lets it start when it
// has waited for all work before, so that this work is done here, too. Block 0 waits for it at the
// end, and lets the next launch start no sooner: so what follows has both behind it.
//
// Where queries or outputs have more bits than operands of products, these are sums of two
// parts (PRECISE). Queries are taken apart on their way to shared memory, weights in registers,
// and both parts are multiplied. What values come to in a step is then added to the output
// by an instruction that rounds: products cut off, which thousands of steps would show.
#pragma once
#include "attn_prefill_weights.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// As PrefillRows, of GROUPS consumer warp groups. Values and outputs have DV columns. TOGETHER: see PrefillWeights.
template <class T, class V, int D, int GROUPS, int KEYS, int STAGES, bool PRECISE = false, bool ANY = PRECISE, int DV = D, bool TOGETHER = false> struct Prefill : PrefillRows<T, V, D, GROUPS * 64, KEYS, PRECISE, ANY> {
  using Rows = PrefillRows<T, V, D, GROUPS * 64, KEYS, PRECISE, ANY>;
  using typename Rows::Math, typename Rows::Operand, typename Rows::Range, typename Rows::Scores, typename Rows::Softmax, typename Rows::Store, typename Rows::Tile;
  using Rows::BLOCKS, Rows::FACTORS, Rows::PARTS, Rows::QUERY, Rows::SCORED, Rows::STAGE;
  using Out = PrefillRows<T, V, DV, GROUPS * 64, KEYS, PRECISE, ANY>;
  static constexpr int VALUES = Out::STAGE;               // bytes of a step's values
  static constexpr int ROWS = GROUPS * 64;                // of an output tile
  static constexpr int PLACES = D <= 128 ? 2 : 1;         // for queries: there is room for so many
  static constexpr bool ROUNDED = PRECISE && D <= 128;    // what a step adds to outputs has registers of its own
  static constexpr bool CHAINS = !SCORED && !ANY && PLACES > 1; // an output tile begins beside the last values of the one before
  using Weights = PrefillWeights<Rows, KEYS, ROUNDED, TOGETHER>;
  static constexpr int THREADS = (GROUPS + 1) * 128;
  static constexpr int KV_PRODUCERS = PRECISE ? 1 : 2;         // warps that bring keys and values: a step in two parts takes twice as long, and one can
  static constexpr int QUERY_PRODUCERS = 128 - KV_PRODUCERS * 32; // threads
  static constexpr int PRODUCER_REGISTERS = GROUPS == 2 ? 40 : 32, CONSUMER_REGISTERS = GROUPS == 2 ? 232 : 160; // registers of a lane
  static constexpr int CLEARED = 1, MAY_ISSUE = 2;        // named barriers: of all consumers, and each one's

  // Addresses in shared memory, and those of barriers.
  struct Shared {
    u32 query, keys, values, factors, tiles;
    u32 queryFull, queryEmpty, keyFull, keyEmpty, valueFull, valueEmpty;
  };

  __device__ static __forceinline__ void run(const PrefillParams& p) {
    extern __shared__ __align__(1024) char memory[];
    Shared sh;
    sh.query = sharedAddress(memory), sh.keys = sh.query + PLACES * PARTS * QUERY, sh.values = sh.keys + STAGES * STAGE;
    sh.factors = sh.values + STAGES * VALUES, sh.queryFull = sh.factors + PLACES * FACTORS, sh.queryEmpty = sh.queryFull + 16;
    sh.keyFull = sh.queryEmpty + 16, sh.keyEmpty = sh.keyFull + 8 * STAGES, sh.valueFull = sh.keyEmpty + 8 * STAGES, sh.valueEmpty = sh.valueFull + 8 * STAGES;
    sh.tiles = sh.valueEmpty + 8 * STAGES;
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
      if (p.beside == 0) Out::writeFullyMasked(p, threadIdx.x - 128, GROUPS * 128);
      if (isLast(p) && threadIdx.x == 128) waitForEarlier(), letNextStart();
    }
  }

  // Whether this block ends a launch beside another one: what follows waits for this launch alone.
  __device__ static __forceinline__ bool isLast(const PrefillParams& p) { return p.beside != 0 && blockIdx.x == 0; }

  // Where output tile number n has its queries, and the parity of that place's barriers.
  __device__ static __forceinline__ int placeOf(int n) { return n & (PLACES - 1); }
  __device__ static __forceinline__ u32 parityOf(int n) { return n >> (PLACES - 1) & 1; }

  // Descriptions of output tiles lie in shared memory beside the queries: loads from global memory would take longer than some steps.
  // There are four places, since a consumer reads the description of the output tile before this one, too.
  static constexpr int KNOWN = 64; // bytes
  __device__ static __forceinline__ u32 knownOf(const Shared& sh, int n) { return sh.tiles + (n & 3) * KNOWN; }
  __device__ static __forceinline__ void put(u32 to, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
  __device__ static __forceinline__ void get(u32 from, int& a, int& b, int& c, int& d) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
  }
  __device__ static __forceinline__ void tell(const PrefillParams& p, const Shared& sh, const Tile& t, int n) {
    const u32 to = knownOf(sh, n);
    put(to, t.s.row, t.s.queries, t.s.keys, t.s.pages);
    put(to + 16, t.head, t.first, t.rows, t.index);
    put(to + 32, t.begin, t.end, p.tiles[t.index].parts, 0);
  }
  __device__ static __forceinline__ int learn(const PrefillParams& p, const Shared& sh, const Range& range, Tile& t, int n) {
    if constexpr (SCORED) {
      t.load(p, range, n);
      return 0;
    }
    const u32 from = knownOf(sh, n);
    int parts, none;
    get(from, t.s.row, t.s.queries, t.s.keys, t.s.pages);
    get(from + 16, t.head, t.first, t.rows, t.index);
    get(from + 32, t.begin, t.end, parts, none);
    return parts;
  }

  template <int N> struct Constant {
    static constexpr int value = N;
  };
  // KEYS rows, of which each lane knows where a box begins: the boxes [first, first + 32) of
  // `boxes`.
  template <int DIM> __device__ static __forceinline__ void copyRows(const PrefillParams& p, u32 to, const TensorMap* map, int row, int first, int boxes, u32 bar, u64 policy) {
    for (int b = 0; b < min(boxes - first, 32); b++) {
      const int r = __shfl_sync(~0u, row, b);
      if (elected())
#pragma unroll
        for (int j = 0; j < (DIM * Store::bytes + 127) / 128; j++) {
          constexpr bool WHOLE = DIM * Store::bytes % 128 == 0; // else there are zeros behind the last column
          copyBox(to + j * KEYS * 128 + (first + b) * p.box * 128, map, WHOLE ? 0 : j * (128 / Store::bytes), r, WHOLE ? j : 0, bar, policy);
        }
    }
  }

  // One warp brings keys and values, or the first keys and the second values: small pages
  // take many copies.
  __device__ static __forceinline__ void produceKeys(const PrefillParams& p, const Shared& sh, const Range& range, int warp, int lane) {
    constexpr int OUTSIDE = 0x7ffffff0; // of the array: zeros
    const u64 policy = p.streamed ? readOnce() : readAgain();
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
      const auto bring = [&](auto dim, u32 to, const TensorMap* map, int key, int row, u32 full, u32 empty) {
        constexpr int DIM = decltype(dim)::value;
        barrierWait(empty, stage.parity ^ 1);
        __syncwarp();
        if (lane == 0) barrierExpect(full, KEYS * ((DIM * Store::bytes + 127) / 128) * 128);
        __syncwarp();
        copyRows<DIM>(p, to, map, row, 0, boxes, full, policy);
        for (int first = 32; first < boxes; first += 32) copyRows<DIM>(p, to, map, rowOf(key + (first + lane) * p.box), first, boxes, full, policy);
      };
#pragma unroll 1
      for (int c = t.end - 1; c >= t.begin; c--) {
        const int key = t.keyOf(c), at = stage.index, row = rowOf(key + lane * p.box);
        if (KV_PRODUCERS == 1 || warp == 0) bring(Constant<D>(), sh.keys + at * STAGE, &p.keyMap, key, row, sh.keyFull + at * 8, sh.keyEmpty + at * 8);
        if (KV_PRODUCERS == 1 || warp == 1) bring(Constant<DV>(), sh.values + at * VALUES, &p.valueMap, key, row, sh.valueFull + at * 8, sh.valueEmpty + at * 8);
        stage.next(STAGES);
      }
    }
  }

  __device__ static __forceinline__ void produceQueries(const PrefillParams& p, const Shared& sh, const Range& range, int thread) {
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      barrierWait(sh.queryEmpty + placeOf(n) * 8, parityOf(n) ^ 1);
      if (!SCORED && thread == 0) tell(p, sh, t, n);
      bringQueries(p, t, sh.query + placeOf(n) * QUERY, thread);
      copyCommit();
      copyWait<0>();
      fenceAsync();
      barrierArrive(sh.queryFull + placeOf(n) * 8);
    }
  }

  // Queries of the operands' type, of consecutive rows: a thread copies one piece of every STEP-th row.
  __device__ static __forceinline__ void bringQueries(const PrefillParams& p, const Tile& t, u32 to, int thread) {
    constexpr int PIECES = D / 8, STEP = QUERY_PRODUCERS / PIECES; // of a row; rows
    if (ANY || p.rows != nullptr || QUERY_PRODUCERS % PIECES != 0) return Rows::template bringQueries<QUERY_PRODUCERS>(p, t, to, thread);
    const int first = thread / PIECES, column = thread % PIECES, position = (t.first + first) / p.group;
    int head = t.first + first - position * p.group;
    const u16* from = (const u16*)p.query + (t.s.row + position) * p.queryRow + (t.head * p.group + head) * p.queryHead + column * 8;
    const int heads = STEP % p.group;
    const long long step = STEP / p.group * p.queryRow + heads * p.queryHead, wrap = p.queryRow - p.group * p.queryHead;
    to += column / 8 * (ROWS * 128);
#pragma unroll 4
    for (int r = first; r < ROWS; r += STEP) {
      const bool there = t.first + r < t.rows;
      copy16(to + swizzled(r, column % 8 * 16), there ? (const void*)from : p.query, there);
      from += step, head += heads;
      if (head >= p.group) head -= p.group, from += wrap;
    }
  }

  __device__ static __forceinline__ void produceParts(const PrefillParams& p, const Shared& sh, const Range& range, int thread) {
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      barrierWait(sh.queryEmpty + placeOf(n) * 8, parityOf(n) ^ 1);
      if (!SCORED && thread == 0) tell(p, sh, t, n);
      Rows::template bringParts<QUERY_PRODUCERS>(p, t, sh.query + placeOf(n) * (2 * QUERY), sh.factors + placeOf(n) * FACTORS, thread);
      fenceAsync();
      barrierArrive(sh.queryFull + placeOf(n) * 8);
    }
  }

  __device__ static __forceinline__ void consume(const PrefillParams& p, const Shared& sh, const Range& range, int group, int thread) {
    const int lane = thread % 32, row = group * 64 + thread / 32 * 16 + lane / 4; // the lane's, and row + 8
    // A consumer waits until it may issue products, and the one before it lets it.
    const auto waitToIssue = [&] { ThreadGroup{0, 8, MAY_ISSUE + group}.sync(); };
    const auto letIssue = [&](int to) { ThreadGroup{0, 8, MAY_ISSUE + to}.arrive(); };
    const int next = group + 1 == GROUPS ? 0 : group + 1;
    if (next == 0) letIssue(0);
    const HeadGroups groups(p.group);
    PipelineState stage;
    Tile t;
    for (int n = 0; range.begin + n < range.end; n++) {
      barrierWait(sh.queryFull + placeOf(n) * 8, parityOf(n));
      int parts = learn(p, sh, range, t, n);
      if (t.first + group * 64 >= t.rows) {
        pass(p, sh, t, n, stage, lane, thread + group * 128, waitToIssue, [&] { letIssue(next); });
        continue;
      }
      const auto seen = [&](int row) { return p.causal ? min(t.s.keys, t.s.keys - t.s.queries + (int)groups(t.first + row) + 1) : t.s.keys; };
      int sees[2], all; // all: keys that every row of the consumer sees
      float o[DV / 8][4], s[KEYS / 8][4];
      float more[ROUNDED ? DV / 8 : 1][4]; // what a step adds to o
      u32 w[PARTS][KEYS / 16][4];
      Weights m;
      float by[2]; // that makes scores of products, where they are changed
      const auto begin = [&] {
        sees[0] = seen(row), sees[1] = seen(row + 8), all = seen(group * 64);
        m = Weights(Rows::softmaxOf(p)), by[0] = by[1] = p.scale;
        if constexpr (PRECISE) {
          const u32 factors = sh.factors + placeOf(n) * FACTORS;
          Rows::multiply(p, by, m.scale, loadShared(factors + row * 4), loadShared(factors + row * 4 + 32));
        }
      };

      const auto clearOutput = [&] {
#pragma unroll
        for (int j = 0; j < DV / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
      };
      // Products of queries of output tile number n with a step's keys.
      const auto scores = [&](int n) {
        const u64 keys = rowOperand(sh.keys + stage.index * STAGE);
        u64 query = rowOperand(sh.query + uniform(placeOf(n)) * (PARTS * QUERY) + group * 64 * 128);
        if constexpr (PRECISE) asm volatile("" : "+l"(query)); // else the descriptors of all parts are kept in registers
        pinned(s);
        wgmmaFence();
#pragma unroll
        for (int part = PARTS - 1; part >= 0; part--) // the small ones first
#pragma unroll
          for (int k = 0; k < D / 16; k++)
            Wgmma<KEYS>::template shared<Math>(s, query + (part * QUERY + k / 4 * (ROWS * 128) + k % 4 * 32) / 16, keys + (k / 4 * (KEYS * 128) + k % 4 * 32) / 16, part < PARTS - 1 || k > 0);
        wgmmaCommit();
      };
      const auto values = [&](const PipelineState& of) {
        barrierWait(sh.valueFull + of.index * 8, of.parity);
        const u64 v = columnOperand(sh.values + of.index * VALUES, KEYS * 128);
        if constexpr (ROUNDED) {
          pinned(more);
          wgmmaFence();
          valuesOf<0>(more, w[1][0], v);
#pragma unroll
          for (int k = 1; k < 2 * (KEYS / 16); k++) valuesOf<1>(more, w[k < KEYS / 16][k % (KEYS / 16)], v + k % (KEYS / 16) * 128);
        } else {
          pinned(o);
          wgmmaFence();
#pragma unroll
          for (int part = PARTS - 1; part >= 0; part--)
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) valuesOf<1>(o, w[part][k], v + k * 128);
        }
        wgmmaCommit();
      };
      // o, when values have come; shrink: what weights before those of these values have become.
      const auto add = [&](const float (&shrink)[2]) {
        if constexpr (ROUNDED) {
          pinned(more);
#pragma unroll
          for (int j = 0; j < DV / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[j][e] = __fmaf_rn(o[j][e], shrink[e / 2], more[j][e]);
        } else {
          pinned(o);
        }
      };
      const Scores modified(p, t, row, group * 64 + 63); // what becomes of products or scores
      const auto limit = [&](int key) {
        if (key + KEYS > all) {
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              if (key + j * 8 + lane % 4 * 2 + (e & 1) >= sees[e >> 1]) s[j][e] = -LEAN_INF;
        }
      };
      const auto pack = [&] {
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float x = s[2 * k + e / 2][e % 2 * 2], y = s[2 * k + e / 2][e % 2 * 2 + 1];
            if constexpr (PRECISE) Rows::splitOf(x, y, w[0][k][e], w[1][k][e]);
            else w[0][k][e] = Operand::pack(x, y);
          }
      };
      const auto release = [&](u32 empty) {
        if (lane == 0) barrierArrive(empty);
      };

      stage.index = uniform(stage.index);
      begin();
      clearOutput();
      const Quiet quiet = modified.quiet(all);
      if (t.begin < t.end) {
        barrierWait(sh.keyFull + stage.index * 8, stage.parity);
        waitToIssue();
        scores(n);
        letIssue(next);
        wgmmaWait<0>();
        PipelineState before = stage;
        float shrink[2], top[2], sum[2], scale[2]; // top, sum, scale: of the output tile before this one
        int late = 0;                              // the output tile before this one is not written yet
#pragma unroll
        for (int j = 0; j < (ROUNDED ? DV / 8 : 1); j++) more[j][0] = more[j][1] = more[j][2] = more[j][3] = 0.f;
        const auto rescale = [&] {
          if (!ROUNDED && m.changed)
#pragma unroll
            for (int j = 0; j < DV / 8; j++)
#pragma unroll
              for (int e = 0; e < 4; e++) o[j][e] *= m.shrink[e / 2];
        };
#pragma unroll 1
        for (;;) {
          int c = t.end - 1;
          pinned(s);
          release(sh.keyEmpty + stage.index * 8);
          if constexpr (SCORED) {
            // The code behind the scores is long, so there is one copy of it, for the first step, too.
            const int first = c;
#pragma unroll 1
            for (;;) {
              shrink[0] = m.shrink[0], shrink[1] = m.shrink[1];
              if (!quiet.has(t.keyOf(c))) { // one test for all that is rare
                clearUnseen(p, sh, stage, t, c, thread + group * 128);
                modified.apply(s, by, t.keyOf(c), sees, lane);
                limit(t.keyOf(c));
              }
              m.weigh(s);
              wgmmaWait<0>();
              add(shrink);
              if (c < first) release(sh.valueEmpty + before.index * 8);
              pack();
              rescale();
              before = stage;
              stage.next(STAGES), stage.index = uniform(stage.index);
              if (--c < t.begin) break;
              barrierWait(sh.keyFull + stage.index * 8, stage.parity);
              waitToIssue();
              scores(n);
              values(before);
              letIssue(next);
              wgmmaWait<1>();
              pinned(s);
              release(sh.keyEmpty + stage.index * 8);
            }
          } else {
            clearUnseen(p, sh, stage, t, c, thread + group * 128);
            limit(t.keyOf(c));
            m.weigh(s);
            asm volatile("" : "+r"(late));
            if (late) {
              wgmmaWait<0>();
              add(shrink);
              release(sh.valueEmpty + before.index * 8);
              pinned(s);
              Tile old;
              parts = learn(p, sh, range, old, n - 1);
              Softmax of = m;
              of.top[0] = top[0], of.top[1] = top[1], of.sum[0] = sum[0], of.sum[1] = sum[1], of.scale[0] = scale[0], of.scale[1] = scale[1];
              if (parts == 1 || merged(p, old, o, of, group * 128 + thread)) epilogue(p, old, o, of, row, lane, groups);
              clearOutput();
              pinned(s), pinned(o);
            }
            pack();
            before = stage;
            stage.next(STAGES), stage.index = uniform(stage.index);
          }
#pragma unroll 1
          for (c--; !SCORED && c >= t.begin; c--) {
            barrierWait(sh.keyFull + stage.index * 8, stage.parity);
            waitToIssue();
            scores(n);
            values(before);
            letIssue(next);
            wgmmaWait<1>();
            pinned(s);
            release(sh.keyEmpty + stage.index * 8);
            limit(t.keyOf(c));
            shrink[0] = m.shrink[0], shrink[1] = m.shrink[1];
            m.weigh(s);
            wgmmaWait<0>();
            add(shrink);
            release(sh.valueEmpty + before.index * 8);
            pack();
            rescale();
            before = stage;
            stage.next(STAGES), stage.index = uniform(stage.index);
          }
          shrink[0] = m.shrink[0], shrink[1] = m.shrink[1];
          if constexpr (PRECISE) __syncwarp(); // all lanes have their rows' factors
          release(sh.queryEmpty + placeOf(n) * 8);
          // The first scores of the next output tile come beside the last values of this one.
          if (!CHAINS || range.begin + n + 1 >= range.end) break;
          barrierWait(sh.queryFull + placeOf(n + 1) * 8, parityOf(n + 1));
          learn(p, sh, range, t, n + 1);
          if (t.first + group * 64 >= t.rows || t.begin >= t.end) break;
          n++, late = 1;
          barrierWait(sh.keyFull + stage.index * 8, stage.parity);
          waitToIssue();
          scores(n);
          values(before);
          letIssue(next);
          top[0] = m.top[0], top[1] = m.top[1], sum[0] = m.sum[0], sum[1] = m.sum[1], scale[0] = m.scale[0], scale[1] = m.scale[1];
          begin();
          wgmmaWait<1>();
        }
        values(before);
        parts = learn(p, sh, range, t, n);
        wgmmaWait<0>();
        add(shrink);
        release(sh.valueEmpty + before.index * 8);
      } else {
        __syncwarp(); // all lanes have their rows' factors
        release(sh.queryEmpty + placeOf(n) * 8);
      }
      if (parts == 1 || merged(p, t, o, m, group * 128 + thread)) epilogue(p, t, o, m, row, lane, groups);
    }
    if (group == 0) waitToIssue(); // the last one has let it
  }

  // As PrefillRows::merged.
  __device__ static __forceinline__ bool merged(const PrefillParams& p, const Tile& t, float (&o)[DV / 8][4], Softmax& m, int thread) {
    if constexpr (DV == D) {
      return Rows::merged(p, t, o, m, thread);
    } else {
      typename Out::Tile of;
      typename Out::Softmax x;
      of.index = t.index;
#pragma unroll
      for (int h = 0; h < 2; h++) x.top[h] = m.top[h], x.sum[h] = m.sum[h], x.scale[h] = m.scale[h];
      const bool all = Out::merged(p, of, o, x, thread);
#pragma unroll
      for (int h = 0; h < 2; h++) m.top[h] = x.top[h], m.sum[h] = x.sum[h];
      return all;
    }
  }

  // Writes a lane's two rows.
  __device__ static __forceinline__ void epilogue(const PrefillParams& p, const Tile& t, float (&o)[DV / 8][4], const Softmax& m, int row, int lane, const HeadGroups& groups) {
    if constexpr (ANY || SCORED) return Out::epilogue(p, t, o, m, row, lane);
    const int quarter = lane % 4;
    float f[2];
    u16* to[2];
    bool there[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = m.sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      f[h] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
      const int r = t.first + row + h * 8, position = groups(r), head = t.head * p.group + r - position * p.group;
      there[h] = r < t.rows;
      if (p.lse != nullptr && there[h] && quarter == 0) {
        const float lse = sum == 0.f ? -LEAN_INF : finite(__fmaf_rn(m.top[h], p.natural, (log2_(sum) - Math::lift) * LN2));
        p.lse[(t.s.row + position) * p.lseRow + head * p.lseHead] = lse;
      }
      to[h] = (u16*)p.out + (t.s.row + position) * p.outRow + head * p.outHead;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int j = DV / 32 * 4; j < DV / 8; j++) {
        const u32 x = Operand::pack(o[j][2 * h] * f[h], o[j][2 * h + 1] * f[h]);
        if (there[h]) *(u32*)(to[h] + j * 8 + quarter * 2) = x;
      }
#pragma unroll
      for (int j = 0; j < DV / 32 * 4; j += 4) {
        // Four lanes have two of each eight columns; each gets eight of one.
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = Operand::pack(o[j + e][2 * h] * f[h], o[j + e][2 * h + 1] * f[h]);
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (e & step) continue;
            const u32 got = __shfl_xor_sync(~0u, quarter & step ? x[e] : x[e | step], step);
            (quarter & step ? x[e] : x[e | step]) = got;
          }
        if (there[h]) *(uint4*)(to[h] + (j + quarter) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }

  __device__ static __forceinline__ u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

  // What a consumer does with an output tile that has no rows for it: it gives back what the others
  // still wait for.
  template <class Wait, class Let> __device__ static __forceinline__ void pass(const PrefillParams& p, const Shared& sh, const Tile& t, int n, PipelineState& stage, int lane, int thread, const Wait& waitToIssue, const Let& letIssue) {
    const auto giveBack = [&](u32 full, u32 empty, u32 parity) {
      barrierWait(full, parity);
      __syncwarp();
      if (lane == 0) barrierArrive(empty);
    };
    giveBack(sh.queryFull + placeOf(n) * 8, sh.queryEmpty + placeOf(n) * 8, parityOf(n));
#pragma unroll 1
    for (int c = t.end - 1; c >= t.begin; c--) {
      waitToIssue();
      letIssue();
      giveBack(sh.keyFull + stage.index * 8, sh.keyEmpty + stage.index * 8, stage.parity);
      if (SCORED || c == t.end - 1) clearUnseen(p, sh, stage, t, c, thread);
      giveBack(sh.valueFull + stage.index * 8, sh.valueEmpty + stage.index * 8, stage.parity);
      stage.next(STAGES);
    }
  }

  // Weights of 16 keys times their values. No instruction has columns of one block and a
  // part of the next.
  template <int MORE> __device__ static __forceinline__ void valuesOf(float (&o)[DV / 8][4], const u32 (&w)[4], u64 v) {
    constexpr int REST = DV % 64;
    if constexpr (REST == 0) {
      Wgmma<DV>::template registers<Math, MORE>(o, w, v);
    } else {
      static_assert(DV / 64 == 1, "the first block, and a part of another one");
      Wgmma<64>::template registers<Math, MORE>((float (&)[8][4])o, w, v);
      Wgmma<REST>::template registers<Math, MORE>((float (&)[REST / 8][4])o[8], w, v + KEYS * 128 / 16);
    }
  }

  // Values that no row of an output tile sees become zeros, whatever is in memory: no weight of 0 makes a
  // number of what is none. In its first step they are behind the last key; with a window they are in front of the window, too, in
  // steps that it begins in or sink tokens end in.
  __device__ static __forceinline__ void clearUnseen(const PrefillParams& p, const Shared& sh, const PipelineState& stage, const Tile& t, int c, int thread) {
    int from = t.s.keys - t.keyOf(c), to = KEYS;
    if constexpr (SCORED) {
#pragma unroll 1
      for (int side = 0; side < 2; side++) {
        clear(sh, stage, from, to, thread);
        from = t.hiddenFrom(scoreOf(p), t.keyOf(c)), to = t.hiddenTo(t.keyOf(c));
      }
    } else {
      clear(sh, stage, from, to, thread);
    }
  }
  // The values of keys [from, to) of a step.
  __device__ static __forceinline__ void clear(const Shared& sh, const PipelineState& stage, int from, int to, int thread) {
    if (from >= to) return;
    barrierWait(sh.valueFull + stage.index * 8, stage.parity);
    for (int i = thread; i < (to - from) * (DV / 8); i += GROUPS * 128) {
      const int r = from + i / (DV / 8), c = i % (DV / 8);
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(sh.values + stage.index * VALUES + c / 8 * (KEYS * 128) + swizzled(r, c % 8 * 16)), "r"(0) : "memory");
    }
    fenceAsync();
    ThreadGroup{0, GROUPS * 4, CLEARED}.sync();
  }
};
#endif
