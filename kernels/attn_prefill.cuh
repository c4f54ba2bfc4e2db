// Prefill: attention of many query rows, as prompts have them, on GPUs of compute capability 9.0. The
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
#include "attn_prefill_rows.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// As PrefillRows, of GROUPS consumer warp groups.
template <class T, class V, int D, int GROUPS, int KEYS, int STAGES, bool PRECISE = false, bool ANY = PRECISE> struct Prefill : PrefillRows<T, V, D, GROUPS * 64, KEYS, PRECISE, ANY> {
  using Rows = PrefillRows<T, V, D, GROUPS * 64, KEYS, PRECISE, ANY>;
  using typename Rows::Math, typename Rows::Operand, typename Rows::Range, typename Rows::Scores, typename Rows::Softmax, typename Rows::Store, typename Rows::Tile;
  using Rows::BLOCKS, Rows::FACTORS, Rows::PARTS, Rows::QUERY, Rows::SCORED, Rows::STAGE;
  static constexpr int ROWS = GROUPS * 64;                // of an output tile
  static constexpr int PLACES = D <= 128 ? 2 : 1;         // for queries: there is room for so many
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
      if (p.beside == 0) Rows::writeFullyMasked(p, threadIdx.x - 128, GROUPS * 128);
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
        const int key = t.keyOf(c), at = stage.index, row = rowOf(key + lane * p.box);
        if (KV_PRODUCERS == 1 || warp == 0) bring(sh.keys + at * STAGE, &p.keyMap, key, row, sh.keyFull + at * 8, sh.keyEmpty + at * 8);
        if (KV_PRODUCERS == 1 || warp == 1) bring(sh.values + at * STAGE, &p.valueMap, key, row, sh.valueFull + at * 8, sh.valueEmpty + at * 8);
        stage.next(STAGES);
      }
    }
  }

  __device__ static __forceinline__ void produceQueries(const PrefillParams& p, const Shared& sh, const Range& range, int thread) {
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      barrierWait(sh.queryEmpty + placeOf(n) * 8, parityOf(n) ^ 1);
      Rows::template bringQueries<QUERY_PRODUCERS>(p, t, sh.query + placeOf(n) * QUERY, thread);
      copyCommit();
      copyWait<0>();
      fenceAsync();
      barrierArrive(sh.queryFull + placeOf(n) * 8);
    }
  }

  __device__ static __forceinline__ void produceParts(const PrefillParams& p, const Shared& sh, const Range& range, int thread) {
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      barrierWait(sh.queryEmpty + placeOf(n) * 8, parityOf(n) ^ 1);
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
    PipelineState stage;
    Tile t;
    for (int n = 0; t.load(p, range, n); n++) {
      if (t.first + group * 64 >= t.rows) {
        pass(p, sh, t, n, stage, lane, thread + group * 128, waitToIssue, [&] { letIssue(next); });
        continue;
      }
      const auto seen = [&](int row) { return p.causal ? min(t.s.keys, t.s.keys - t.s.queries + (t.first + row) / p.group + 1) : t.s.keys; };
      const int sees[2] = {seen(row), seen(row + 8)}, all = seen(group * 64); // all: keys that every row of the consumer sees
      float o[D / 8][4] = {}, s[KEYS / 8][4];
      float more[ROUNDED ? D / 8 : 1][4]; // what a step adds to o
      u32 w[PARTS][KEYS / 16][4];
      Softmax m = Rows::softmaxOf(p);
      float by[2] = {p.scale, p.scale}; // that makes scores of products, where they are changed

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
      const Scores modified(p, t, row, group * 64 + 63); // what becomes of products or scores
      const Quiet quiet = modified.quiet(all);
      const auto limit = [&](int key) {
        if (key + KEYS > all) {
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              if (key + j * 8 + lane % 4 * 2 + (e & 1) >= sees[e >> 1]) s[j][e] = -LEAN_INF;
        }
      };
      const auto weigh = [&](int c) {
        const int key = t.keyOf(c);
        if constexpr (SCORED) {
          if (!quiet.has(key)) { // one test for all that is rare
            clearUnseen(p, sh, stage, t, c, thread + group * 128);
            modified.apply(s, by, key, sees, lane);
            limit(key);
          }
        } else {
          limit(key);
        }
        m.weigh(s);
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

      barrierWait(sh.queryFull + placeOf(n) * 8, parityOf(n));
      if (t.begin < t.end) {
        if constexpr (PRECISE) {
          const u32 factors = sh.factors + placeOf(n) * FACTORS;
          Rows::multiply(p, by, m.scale, loadShared(factors + row * 4), loadShared(factors + row * 4 + 32));
        }
        int c = t.end - 1;
        barrierWait(sh.keyFull + stage.index * 8, stage.parity);
        waitToIssue();
        scores();
        letIssue(next);
        wgmmaWait<0>();
        pinned(s);
        release(sh.keyEmpty + stage.index * 8);
        PipelineState before = stage;
        if constexpr (SCORED) {
          // What becomes of scores is long, so its code is there once: for the first step, too.
          const int first = c;
#pragma unroll
          for (int j = 0; j < (ROUNDED ? D / 8 : 1); j++) more[j][0] = more[j][1] = more[j][2] = more[j][3] = 0.f;
#pragma unroll 1
          for (;;) {
            const float shrink[2] = {m.shrink[0], m.shrink[1]};
            weigh(c);
            wgmmaWait<0>();
            add(shrink);
            if (c < first) release(sh.valueEmpty + before.index * 8);
            pack();
            if constexpr (!ROUNDED)
#pragma unroll
              for (int j = 0; j < D / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[j][e] *= m.shrink[e / 2];
            before = stage;
            stage.next(STAGES);
            if (--c < t.begin) break;
            barrierWait(sh.keyFull + stage.index * 8, stage.parity);
            waitToIssue();
            scores();
            values(before);
            letIssue(next);
            wgmmaWait<1>();
            pinned(s);
            release(sh.keyEmpty + stage.index * 8);
          }
        } else {
          clearUnseen(p, sh, stage, t, c, thread + group * 128);
          weigh(c);
          pack();
          stage.next(STAGES);
        }
#pragma unroll 1
        for (c--; !SCORED && c >= t.begin; c--) {
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
      if (Rows::merged(p, t, o, m, group * 128 + thread)) Rows::epilogue(p, t, o, m, row, lane);
    }
    if (group == 0) waitToIssue(); // the last one has let it
  }

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
    for (int i = thread; i < (to - from) * (D / 8); i += GROUPS * 128) {
      const int r = from + i / (D / 8), c = i % (D / 8);
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(sh.values + stage.index * STAGE + c / 8 * (KEYS * 128) + swizzled(r, c % 8 * 16)), "r"(0) : "memory");
    }
    fenceAsync();
    ThreadGroup{0, GROUPS * 4, CLEARED}.sync();
  }
};
#endif
