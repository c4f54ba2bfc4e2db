// Gradients of attention by products of warp groups: Backward of attn_backward.cuh, on compute capability 9.0 alone. Head dims
// are up to D, and nothing changes scores.
//
// A thread block takes KEYS keys after another. Each of two consumer warp groups has half of them: dk and dv stay in registers. Scores are
// transposed, so p and dS are left operands of products as they are. dS also goes to shared memory, and each group multiplies
// the dS of both by the keys: half of dq. A group issues the scores of the next step before its last products of this one,
// so tensor cores work while exponentials are computed.
//
// A producer warp group has a warp for queries, one for dO, and one for each half of dq. The latter add to sums in memory by bulk
// reductions. Sums have a fixed order, from the first key block to the last: the first stores. A counter for each half of a query
// block says how many have added. Thread blocks draw numbers, and lower numbers have lower key blocks, so a thread block waits only
// for what others work on. With a causal mask lower key blocks have more steps: the last ones are short. All walk the query blocks
// from the last one down, so key blocks that begin together wait a step each at first, and then no more.
//
// BackwardSums writes dq afterwards.
#pragma once
#include "attn_backward.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct HopperPlain : BackwardPlain {
  static constexpr bool many = false;  // whether scores take so many registers that fewer products run beside their arithmetic
  static constexpr bool drops = false; // whether there may be dropout
  static constexpr bool tiles = false; // whether each step has a tile of a bias, which waits where the gradients of scores go
  static constexpr int PARAMS = 0;     // bytes of shared memory for parameters
  __device__ static __forceinline__ const BackwardParams& paramsOf(const BackwardParams& p, char*) { return p; }
  template <class B> struct Changes {
    __device__ __forceinline__ Changes(const BackwardParams&, const BackwardSeq&, int, int, int, int) {}
  };
  // How many key blocks add to a query block, whose first row is at a place, before a key block.
  template <class B> __device__ static __forceinline__ int before(const BackwardParams&, int, int block) { return block; }
};

// d = a b + d, or a b without `more`: a is 16 x 64 and b 16 x 64 in shared memory, whose rows are what is summed over.
template <class Math> __device__ __forceinline__ void columnsBy(float (&d)[8][4], u64 a, u64 b, int more) {
  if constexpr (same<typename Math::Operand, Float16>) {
    WGMMA_SHARED("64", "f16.f16", WGMMA_NAMES8, WGMMA_SUMS8, "32", "33", "34", "1, 1");
  } else {
    WGMMA_SHARED("64", "bf16.bf16", WGMMA_NAMES8, WGMMA_SUMS8, "32", "33", "34", "1, 1");
  }
}

// V: a Variant, with what the order of sums needs: HopperPlain, or the one of attn_backward_hopper_variant.cuh.
template <class Format_, int D, int ROWS_, int Q_STAGES, class V = HopperPlain> struct BackwardHopper {
  using Format = Format_;
  using Math = typename Format::Math;
  using Operand = typename Math::Operand;
  static constexpr int ROWS = ROWS_, KEYS = 128, THREADS = 384, O_STAGES = 2, BLOCKS = D / 64;
  static constexpr int KEY = KEYS * D * 2, ROW = ROWS * D * 2, SLOPE = KEYS * ROWS * 2, SUM = 64 * 64 * 4; // bytes
  static constexpr int STATISTICS = ROWS * 8;
  static constexpr int MINE = 16; // keys of a warp
  static constexpr bool LATE = ROWS == 64 && !V::many; // there are registers for the slopes of a step while the next step's weights are made
  static constexpr int SHARED = 2 * KEY + Q_STAGES * (ROW + STATISTICS) + O_STAGES * ROW + 2 * SLOPE + 2 * SUM + 8 * 32 + V::PARAMS;
  static constexpr float LOG2E = 1.4426950408889634f;
  static constexpr int PRODUCER = 24, CONSUMER = 240; // registers of a lane
  static_assert(PRODUCER + 2 * CONSUMER <= 65536 / THREADS / 8 * 8 * 3, "a warp group would wait for registers forever");
  static_assert(ROWS * D == 2 * 64 * 64 && Format::ready, "halves of dq are 64 x 64");

  struct Shared {
    u32 keys, values, queries, grads, slopes, sums, statistics;
    u32 queryFull, queryEmpty, gradFull, gradEmpty, slopeFull, sumFull, sumEmpty, keysEmpty, ticketFull, ticketEmpty, tickets;
    char* params;
    __device__ __forceinline__ Shared(char* memory) {
      keys = sharedAddress(memory), values = keys + KEY, queries = values + KEY, grads = queries + Q_STAGES * ROW;
      slopes = grads + O_STAGES * ROW, sums = slopes + 2 * SLOPE, statistics = sums + 2 * SUM;
      queryFull = statistics + Q_STAGES * STATISTICS, queryEmpty = queryFull + 8 * Q_STAGES, gradFull = queryEmpty + 8 * Q_STAGES;
      gradEmpty = gradFull + 8 * O_STAGES, slopeFull = gradEmpty + 8 * O_STAGES, sumFull = slopeFull + 16, sumEmpty = sumFull + 16;
      keysEmpty = sumEmpty + 16, ticketFull = keysEmpty + 8, ticketEmpty = ticketFull + 16, tickets = ticketEmpty + 16;
      params = memory + SHARED - V::PARAMS;
    }
  };

  // What a thread block does: query blocks from end-1 down to begin.
  struct Place {
    BackwardSeq s;
    int kvHead, block, behind, begin, end, steps;
    __device__ __forceinline__ Place(const BackwardParams& p, int ticket) : s(p, ticket % (p.batch * p.kvHeads) / p.kvHeads) {
      kvHead = ticket % (p.batch * p.kvHeads), block = ticket / (p.batch * p.kvHeads);
      behind = s.keys - s.queries;
      end = key() < s.keys ? (s.queries + ROWS - 1) / ROWS : 0;
      begin = min(max(s.first, p.causal ? key() - behind : 0) / ROWS, end);
      if constexpr (V::scores) end = V::template endOf<BackwardHopper>(p, behind, key(), begin, end);
      steps = (end - begin) * p.group;
    }
    __device__ __forceinline__ int key() const { return block * KEYS; }
    __device__ __forceinline__ void next(int& i, int& head) const {
      if (--i < begin) i = end - 1, head++;
    }
    __device__ __forceinline__ int sees(const BackwardParams& p, int row) const { return p.causal ? min(s.keys, behind + row + 1) : s.keys; }
  };

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const Shared sh(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < Q_STAGES; i++) barrierInit(sh.queryFull + i * 8, 32), barrierInit(sh.queryEmpty + i * 8, 8);
      for (int i = 0; i < O_STAGES; i++) barrierInit(sh.gradFull + i * 8, 32), barrierInit(sh.gradEmpty + i * 8, 8);
      for (int i = 0; i < 2; i++) barrierInit(sh.slopeFull + i * 8, 8), barrierInit(sh.sumFull + i * 8, 4), barrierInit(sh.sumEmpty + i * 8, 1);
      for (int i = 0; i < 2; i++) barrierInit(sh.ticketFull + i * 8, 1), barrierInit(sh.ticketEmpty + i * 8, 12);
      barrierInit(sh.keysEmpty, 8);
      if constexpr (V::many) V::copy(p, sh.params);
      opened();
    }
    __syncthreads();
    waitForEarlier();
    if (warp < 4) {
      fewerRegisters<PRODUCER>();
      if (warp == 0) bring<true>(p, sh, lane);
      else if (warp == 1) bring<false>(p, sh, lane);
      else if (lane == 0) sum(p, sh, warp - 2);
    } else {
      moreRegisters<CONSUMER>();
      consume(p, sh, warp / 4 - 1, warp % 4, lane);
    }
  }

  // The number of the n-th key block of this thread block, which all its warps draw together: the first lane of the first warp asks.
  __device__ static __forceinline__ int draw(const BackwardParams& p, const Shared& sh, int n, int lane, bool asks) {
    const u32 full = sh.ticketFull + n % 2 * 8, empty = sh.ticketEmpty + n % 2 * 8, at = sh.tickets + n % 2 * 4;
    if (asks && lane == 0) {
      barrierWait(empty, n / 2 & 1 ^ 1);
      storeShared(at, atomicAdd(p.counters, 1));
      barrierArrive(full);
    }
    barrierWait(full, n / 2 & 1);
    u32 ticket;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(ticket) : "r"(at) : "memory");
    return ticket;
  }
  __device__ static __forceinline__ int keyBlocks(const BackwardParams& p) { return p.batch * p.kvHeads * ((p.keys + KEYS - 1) / KEYS); }

  // Rows [first, first+N) of a matrix, zeros outside of [0, front) and [from, to), behind the head dim, and without a matrix.
  template <int N> __device__ static __forceinline__ void copyRows(const BackwardParams& p, u32 slot, const void* matrix, long long begin, int first, int from, int to, int lane, int front = 0) {
    const int r = lane / 8, c = lane % 8 * 8;
#pragma unroll 4
    for (int i = r; i < N; i += 4) {
      const int row = first + i;
      const bool inside = matrix != nullptr && (row >= from || V::scores && row < front) && row < to;
      const u16* const at = (const u16*)matrix + begin + (long long)row * p.dim + c;
#pragma unroll
      for (int j = 0; j < BLOCKS; j++) {
        const bool there = inside && j * 64 + c < p.dim;
        copy16(slot + j * (N * 128) + swizzled(i, c * 2), there ? at + j * 64 : (const u16*)p.q, there);
      }
    }
  }

  // A warp that brings keys and queries, or values and dO.
  template <bool QUERIES> __device__ static __forceinline__ void bring(const BackwardParams& p, const Shared& sh, int lane) {
    PipelineState stage;
    u32 others = 1; // parity of who has used the keys and values before these
#pragma unroll 1
    for (int n = 0;; n++) {
      const int ticket = draw(p, sh, n, lane, QUERIES);
      arriveWarp(sh.ticketEmpty + n % 2 * 8, lane);
      if (ticket >= keyBlocks(p)) break;
      const Place w(p, ticket);
      if (w.steps == 0) continue;
      barrierWait(sh.keysEmpty, others);
      others ^= 1;
      copyRows<KEYS>(p, QUERIES ? sh.keys : sh.values, QUERIES ? p.k : p.v, (long long)w.kvHead * p.keys * p.dim, w.key(), V::hidden(p, w.s), w.s.keys, lane, V::sinkTokens(p));
      int head = w.kvHead * p.group, i = w.end - 1;
#pragma unroll 1
      for (int step = 0; step < w.steps; step++) {
        const u32 full = (QUERIES ? sh.queryFull : sh.gradFull) + stage.index * 8, empty = (QUERIES ? sh.queryEmpty : sh.gradEmpty) + stage.index * 8;
        barrierWait(empty, stage.parity ^ 1);
        copyRows<ROWS>(p, (QUERIES ? sh.queries : sh.grads) + stage.index * ROW, QUERIES ? p.q : p.outGrad, (long long)head * p.queries * p.dim, i * ROWS, w.s.first, w.s.queries, lane);
        if (QUERIES)
          for (int k = lane; k < ROWS / 2; k += 32) copy16(sh.statistics + stage.index * STATISTICS + k * 16, p.rows + ((long long)head * p.blocks + i) * ROWS + k * 2, true);
        copyCommit();
        copyWait<0>();
        fenceAsync();
        barrierArrive(full);
        stage.next(QUERIES ? Q_STAGES : O_STAGES);
        w.next(i, head);
      }
    }
  }

  // A thread that adds a half of dq.
  __device__ static __forceinline__ void sum(const BackwardParams& p, const Shared& sh, int half) {
    const u32 from = sh.sums + half * SUM;
    u32 parity = 0;
#pragma unroll 1
    for (int n = 0;; n++) {
      const int ticket = draw(p, sh, n, 0, false);
      barrierArrive(sh.ticketEmpty + n % 2 * 8);
      if (ticket >= keyBlocks(p)) break;
      const Place w(p, ticket);
      int head = w.kvHead * p.group, i = w.end - 1;
#pragma unroll 1
      for (int step = 0; step < w.steps; step++) {
        const int number = (head * p.blocks + i) * 2 + half;
        float* const to = (float*)p.sums + (long long)number * (SUM / 4);
        u32* const counter = p.counters + 1 + 3 * p.batch * p.kvHeads + number;
        barrierWait(sh.sumFull + half * 8, parity);
        parity ^= 1;
        const int earlier = V::template before<BackwardHopper>(p, w.behind + i * ROWS, w.block);
        if (earlier > 0) {
          u32 have;
          do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(have) : "l"(counter) : "memory");
          while (have != earlier);
          asm volatile("fence.proxy.async;" ::: "memory");
          asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "n"(SUM) : "memory");
        } else {
          asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "n"(SUM) : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        barrierArrive(sh.sumEmpty + half * 8);
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(earlier + 1) : "memory");
        w.next(i, head);
      }
    }
  }

  __device__ static __forceinline__ void arriveWarp(u32 bar, int lane) {
    __syncwarp();
    if (lane == 0) barrierArrive(bar);
  }

  __device__ static __forceinline__ void consume(const BackwardParams& p, const Shared& sh, int group, int warp, int lane) {
    PipelineState query, grad; // of this step
    int before = 0;            // steps of earlier key blocks
#pragma unroll 1
    for (int n = 0;; n++) {
      const int ticket = draw(p, sh, n, lane, false);
      arriveWarp(sh.ticketEmpty + n % 2 * 8, lane);
      if (ticket >= keyBlocks(p)) break;
      const Place w(p, ticket);
      consume(p, sh, w, query, grad, before, group, warp, lane);
      before += w.steps;
    }
  }
  __device__ static __forceinline__ void consume(const BackwardParams& p, const Shared& sh, const Place& w, PipelineState& query, PipelineState& grad, int before, int group, int warp, int lane) {
    int e = 0;
    if constexpr (Math::narrow) e = BackwardBound(p, w.kvHead).exponent(V::factor(p));
    const float factor = powerOf2(e - (int)Math::lift), back = p.scale * powerOf2(-e);
    const int mine = w.key() + group * 64 + warp * 16 + lane / 4; // the lane's key, and 8 more
    float dk[D / 8][4], dv[D / 8][4], x[ROWS / 8][4];
    u32 weights[ROWS / 16][4], slopes[ROWS / 16][4];
#pragma unroll
    for (int j = 0; j < D / 8; j++)
#pragma unroll
      for (int h = 0; h < 4; h++) dk[j][h] = dv[j][h] = 0.f;
    const u32 keys = sh.keys + group * 64 * 128, values = sh.values + group * 64 * 128;
    const auto multiply = [&](float (&to)[ROWS / 8][4], u32 of, u32 by) {
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < D / 16; k++) Wgmma<ROWS>::template shared<Math>(to, rowOperand(of + k / 4 * (KEYS * 128) + k % 4 * 32), rowOperand(by + k / 4 * (ROWS * 128) + k % 4 * 32), k > 0);
      wgmmaCommit();
    };
    const auto add = [&](float (&to)[D / 8][4], const u32 (&a)[ROWS / 16][4], u32 by) {
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < ROWS / 16; k++) Wgmma<D>::template registers<Math>(to, a[k], columnOperand(by + k * 2048, ROWS * 128));
      wgmmaCommit();
    };
    int i = w.end - 1, head = w.kvHead * p.group, step = 0;
    const auto finish = [&] { // the step before's part of dk
      if constexpr (!LATE) wgmmaWait<0>();
      pinned(dk);
      keep(slopes);
      if (step > 0) arriveWarp(sh.queryEmpty + (query.index == 0 ? Q_STAGES - 1 : query.index - 1) * 8, lane);
    };
    // The warp copies its part of a step's tile of the bias over the gradients of scores of two steps before, which all warps have read.
    const auto bringTile = [&](int i, int head, int step) {
      if constexpr (V::tiles) {
        V::template bring<BackwardHopper>(p, w.s, w.kvHead, head, i * ROWS, mine - lane / 4, sh.slopes + (before + step & 1) * SLOPE + (group * 64 + warp * 16) * 128, lane);
        copyCommit();
      }
    };
    // What becomes of a step's scores. Nothing is under way behind it.
    const auto weigh = [&] {
      if constexpr (V::tiles) {
        copyWait<0>();
        __syncwarp();
      }
      const int row = i * ROWS;
      const u32 grads = sh.grads + grad.index * ROW, statistics = sh.statistics + query.index * STATISTICS + lane % 4 * 16;
      u32 slope = sh.slopes + (before + step & 1) * SLOPE + swizzled(group * 64 + warp * 16 + lane / 4, lane % 4 * 4);
      asm volatile("" : "+r"(slope)); // one register, and not one for each place
      const auto slopeAt = [&](int j, int h) { return (slope ^ j % 8 * 16) + j / 8 * (KEYS * 128) + h * 1024; };
      barrierWait(sh.gradFull + grad.index * 8, grad.parity);
      pinned(x);
      float y[ROWS / 8][4]; // without a value: what is there before is not read
      if constexpr (!V::many) multiply(y, values, grads);
      typename V::template Changes<BackwardHopper> scores(V::paramsOf(p, sh.params), w.s, w.kvHead, head, row, mine - lane / 4);
      if constexpr (V::scores) {
        scores.weigh(weights, x, statistics - lane % 4 * 16, slopeAt);
      } else {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
          float of[4];
          loadFour(of, statistics + j * 64);
#pragma unroll
          for (int h = 0; h < 4; h++) x[j][h] = exp2_(__fmaf_rn(notPositive(__fmaf_rn(x[j][h], p.scale, -of[h % 2 * 2])), LOG2E, Math::lift));
        }
        if (w.key() + group * 64 + 64 > w.sees(p, row)) {
#pragma unroll
          for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int h = 0; h < 4; h++)
              if (mine + h / 2 * 8 >= w.sees(p, row + j * 8 + lane % 4 * 2 + h % 2)) x[j][h] = 0.f;
        }
        operands(weights, x);
      }
      if constexpr (V::many) multiply(y, values, grads); // there are no registers for the products beside the scores
      pinned(dv);
      add(dv, weights, grads);
      wgmmaWait<V::many ? 0 : 1>();
      pinned(y);
      if constexpr (V::many) {
        pinned(dv);
        keep(weights);
      }
      if constexpr (LATE) finish();
      if constexpr (V::drops) scores.drop(y);
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        float of[4];
        loadFour(of, statistics + j * 64);
#pragma unroll
        for (int h = 0; h < 4; h++) {
          const float d = y[j][h] - of[h % 2 * 2 + 1];
          x[j][h] *= Math::narrow ? d * factor : d;
        }
      }
      if constexpr (V::scores) scores.chain(x, slopeAt);
      operands(slopes, x);
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) storeShared(slopeAt(j, h), slopes[j / 2][j % 2 * 2 + h]);
      fenceAsync();
      arriveWarp(sh.slopeFull + (before + step & 1) * 8, lane);
      if constexpr (!V::many) {
        wgmmaWait<0>();
        pinned(dv);
        keep(weights);
      }
      arriveWarp(sh.gradEmpty + grad.index * 8, lane);
    };
    if (w.steps > 0) {
      bringTile(i, head, 0);
      barrierWait(sh.queryFull + query.index * 8, query.parity);
      pinned(x);
      multiply(x, keys, sh.queries + query.index * ROW);
      wgmmaWait<0>();
      if constexpr (LATE) weigh();
    }
#pragma unroll 1
    while (step < w.steps) {
      if constexpr (!LATE) weigh();
      const u32 queries = sh.queries + query.index * ROW, slope = sh.slopes + (before + step & 1) * SLOPE;
      query.next(Q_STAGES), grad.next(O_STAGES);
      if (step + 1 < w.steps) barrierWait(sh.queryFull + query.index * 8, query.parity);
      pinned(x);
      multiply(x, keys, sh.queries + query.index * ROW); // after the last step of what is there
      barrierWait(sh.slopeFull + (before + step & 1) * 8, before + step >> 1 & 1);
      if (V::tiles && step + 1 < w.steps) {
        int after = i, of = head;
        w.next(after, of);
        bringTile(after, of, step + 1);
      }
      float z[8][4];
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++)
        columnsBy<Math>(z, columnOperand(slope + (ROWS > 64 ? group * (KEYS * 128) : 0) + k * 2048, 0), columnOperand(sh.keys + (D > 64 ? group * (KEYS * 128) : 0) + k * 2048, 0), k > 0);
      wgmmaCommit();
      pinned(dk);
      add(dk, slopes, queries);
      wgmmaWait<1>();
      pinned(x), pinned(z);
      barrierWait(sh.sumEmpty + group * 8, before + step & 1 ^ 1);
#pragma unroll
      for (int j = 0; j < 8; j++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(sh.sums + group * SUM + (j * 128 + warp * 32 + lane) * 16), "f"(z[j][0]), "f"(z[j][1]), "f"(z[j][2]), "f"(z[j][3]) : "memory");
      fenceAsync();
      arriveWarp(sh.sumFull + group * 8, lane);
      w.next(i, head);
      if (++step == w.steps) {
        wgmmaWait<0>();
        pinned(dk);
        arriveWarp(sh.queryEmpty + (query.index == 0 ? Q_STAGES - 1 : query.index - 1) * 8, lane);
        if (lane == 0) barrierArrive(sh.keysEmpty);
        break;
      }
      if constexpr (LATE) weigh();
      else finish();
    }
    wgmmaWait<0>();
    pinned(dk), pinned(dv);
    keep(slopes);
    store(p, p.dk, dk, (long long)w.kvHead * p.keys, mine, 0, p.keys, 0, lane, back);
    if (p.dv != nullptr) store(p, p.dv, dv, (long long)w.kvHead * p.keys, mine, 0, p.keys, 0, lane, powerOf2(-(int)Math::lift) * V::factor(p));
  }

  // Registers that products read until here.
  __device__ static __forceinline__ void keep(u32 (&x)[ROWS / 16][4]) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) asm volatile("" : "+r"(x[k][0]), "+r"(x[k][1]), "+r"(x[k][2]), "+r"(x[k][3])::"memory");
  }

  template <int N> __device__ static __forceinline__ void operands(u32 (&w)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; k++)
#pragma unroll
      for (int h = 0; h < 4; h++) w[k][h] = Operand::pack(x[2 * k + h / 2][h % 2 * 2], x[2 * k + h / 2][h % 2 * 2 + 1]);
  }

  // Writes rows row and row+8 of x, those in [from, to), times f. The lane's columns are the first of N eights, and two there. Lanes side by
  // side exchange what they have of four eights, so that each writes one.
  template <int N> __device__ static __forceinline__ void store(const BackwardParams& p, void* matrix, const float (&x)[N][4], long long begin, int row, int from, int to, int column, int lane, float f) {
    const int q = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = Operand::pack(x[j + i][2 * h] * f, x[j + i][2 * h + 1] * f);
#pragma unroll
        for (int by = 1; by <= 2; by *= 2)
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int i = by == 1 ? 2 * k : k;
            const u32 other = __shfl_xor_sync(~0u, q & by ? a[i] : a[i + by], by);
            if (q & by) a[i] = other;
            else a[i + by] = other;
          }
        const int r = row + h * 8;
        if (r >= from && r < to && column + (j + q) * 8 < p.dim) *(uint4*)((u16*)matrix + (begin + r) * p.dim + column + (j + q) * 8) = make_uint4(a[0], a[1], a[2], a[3]);
      }
  }

  __device__ static __forceinline__ void loadFour(float (&x)[4], u32 at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at) : "memory");
  }
  __device__ static __forceinline__ void storeShared(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }

  // A thread block of 128 threads writes a half of a query block's dq.
  __device__ static __forceinline__ void writeSums(const BackwardParams& p) {
    waitForEarlier();
    const int half = blockIdx.x % 2, i = blockIdx.x / 2 % p.blocks, head = blockIdx.x / 2 / p.blocks, kvHead = head / p.group;
    const BackwardSeq s(p, kvHead / p.kvHeads);
    if (i * ROWS >= s.queries || (i + 1) * ROWS <= s.first) return;
    int e = 0;
    if constexpr (Math::narrow) e = BackwardBound(p, kvHead).exponent(V::factor(p));
    const float back = p.scale * powerOf2(-e);
    const float4* const from = p.sums + blockIdx.x * (long long)(SUM / 16) + threadIdx.x;
    float x[8][4];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float4 y = __ldcs(from + j * 128);
      x[j][0] = y.x, x[j][1] = y.y, x[j][2] = y.z, x[j][3] = y.w;
    }
    const int row = i * ROWS + (ROWS > 64 ? half * 64 : 0) + threadIdx.x / 4 % 8 + threadIdx.x / 32 * 16;
    store(p, p.dq, x, (long long)head * p.queries, row, s.first, s.queries, D > 64 ? half * 64 : 0, threadIdx.x % 32, back);
  }
};
#define BACKWARD_HOPPER(name, ...) \
  extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ BackwardParams p) { BackwardHopper<__VA_ARGS__>::run(p); }
#define BACKWARD_SUMS(name, ...) \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ BackwardParams p) { BackwardHopper<__VA_ARGS__>::writeSums(p); }
#else // other GPUs have no products of warp groups
#define BACKWARD_HOPPER(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ BackwardParams p) {}
#define BACKWARD_SUMS(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ BackwardParams p) {}
#endif
