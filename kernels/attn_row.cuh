// Attention of output tiles of one row, where a thread block reads so much that what it draws
// counts more than where it begins: from compute capability 9.0 on, with heads of 64 elements of
// 16 bits. All but the consumers is Lean's (attn_lean.cuh).
//
// Consumer warps multiply as a warp group, keys and values as they lie in shared memory, and not
// each chunk by a warp of its own: what passes through no registers draws less. They take
// TOGETHER chunks at a time: so tensor cores are busy for a short time, and then idle, which
// draws less than to be used now and then (docs/lab/attention.md).
//
// The left operands are 64 keys, or the 64 columns of their values. The right ones have eight
// columns. Of queries the first two are the two parts of the row, and the others 0. Of weights
// each warp has two columns, for both parts: those of its keys, and 0 of others'. So a warp
// has a maximum of its own, as in Lean, and what is summed up is four states, of 16 keys of
// each 64.
#pragma once
#include "attn_lean.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <class T, bool PAGED> struct LeanRow {
  static constexpr int D = 64;
  using L = Lean<T, Plain, D, false, PAGED>;
  using S = typename L::S;
  using A = typename L::A;
  using R = typename L::R;
  using Math = typename S::Math;
  using Place = typename S::Place;
  static constexpr int KEYS = S::KEYS, SLOT = S::SLOT, WARPS = CONSUMER_WARPS;
  static_assert(KEYS == 64 && S::BLOCKS == 1 && WARPS == 4, "a chunk is the 64 rows of a product of a warp group");
  static constexpr int TOGETHER = 4;                    // chunks: half of the ring
  static constexpr int PARTS = 8;                       // columns of right operands
  static constexpr int QUERY = PARTS * D * 2;           // bytes of queries: a row of 128 for each column
  static constexpr int WEIGHTS = KEYS * PARTS * 2;      // of the weights of a chunk: 16 of each key
  static constexpr int OPERANDS = QUERY + 2 * TOGETHER * WEIGHTS + 2 * WARPS * 4; // and what warps' states are multiplied by; all but queries twice

  // d += a b, 64 x 8, of operands in shared memory: rows of which are those of d (or its columns), or,
  // TRANSPOSED, what is summed over. Without `more` d begins with 0.
  template <int TRANSPOSED> __device__ static __forceinline__ void multiply(float (&d)[4], u64 a, u64 b, int more) {
    if constexpr (same<typename Math::Operand, Float16>) {
      asm volatile("{.reg .pred p; setp.ne.b32 p, %6, 0;\n"
                   "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %7;}"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(more), "n"(TRANSPOSED));
    } else {
      static_assert(same<typename Math::Operand, BFloat16>, "there is no such product");
      asm volatile("{.reg .pred p; setp.ne.b32 p, %6, 0;\n"
                   "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, %7;}"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b), "r"(more), "n"(TRANSPOSED));
    }
  }
  // The descriptor of weights, whose rows of 16 bytes follow each other.
  __device__ static __forceinline__ u64 weightOperand(u32 at) { return (u64)((at & 0x3ffff) >> 4) | (u64)(128 >> 4) << 16 | (u64)(128 >> 4) << 32; }

  // The state of the warps' keys: a lane has rows (columns of values) 16 warp + lane/4, and 8 behind it, of the two columns that warp
  // lane%4 has weights in. m is the warp's own, l a lane's part.
  struct State {
    float m, l, o[4];
    __device__ __forceinline__ void empty() { m = -LEAN_INF, l = o[0] = o[1] = o[2] = o[3] = 0.f; }
  };

  // Where the consumers are, and what they have in shared memory.
  struct Consumers {
    u32 ring, full, empty, query, weights, shrinks; // addresses
    int slots, warp, lane;
    int slot;   // of the next chunk
    u32 parity; // of its barriers' phase
    int turn;   // of weights and of what states are multiplied by
  };

  // Merges N chunks into the state; `live` keys are there from the first one on.
  template <int N> __device__ static __forceinline__ void merge(State& st, Consumers& c, float factor, int live) {
    u32 at[N], empty[N];
    int slot = c.slot;
    u32 parity = c.parity;
    u32 full[N], phase[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
      at[j] = c.ring + slot * SLOT, full[j] = c.full + slot * 8, empty[j] = c.empty + slot * 8, phase[j] = parity;
      if (++slot == c.slots) slot = 0, parity ^= 1;
    }
    c.slot = slot, c.parity = parity;
    // The last one first: the others are there then, as a rule.
#pragma unroll
    for (int j = N - 1; j >= 0; j--) barrierWait(full[j], phase[j]);
    const bool some = live < N * KEYS; // not all of the last chunk's
    if (some && c.warp == 0) A::clearBehind(at[N - 1], live - (N - 1) * KEYS, c.lane);

    float s[N][4];
    wgmmaFence();
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int k = 0; k < D / 16; k++) multiply<0>(s[j], rowOperand(at[j]) + k * 2, rowOperand(c.query) + k * 2, k > 0);
    wgmmaCommit();
    wgmmaWait<0>();
    pinned(s);

    // Lanes 0, 4, ... have the scores of keys lane/4 and 8 behind it of the warp's 16 of each chunk. What the others have is of
    // columns of zeros.
    const int g = c.lane >> 2, mine = 16 * c.warp + g;
    float x[N][2], top = -LEAN_INF;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) x[j][i] = (s[j][2 * i] + s[j][2 * i + 1]) * factor;
    if (some) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        if ((N - 1) * KEYS + 8 * i + mine >= live) x[N - 1][i] = -LEAN_INF; // the last chunk, of which some key is there
    }
#pragma unroll
    for (int j = 0; j < N; j++) top = fmaxf(top, fmaxf(x[j][0], x[j][1]));
#pragma unroll
    for (int i = 4; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
    top = fmaxf(st.m, __shfl_sync(~0u, top, 0));
    const RowWeights<Math> weights(top);
    float shrink = 1.f;
    if (top != st.m) shrink = weights.weight(st.m), st.l *= shrink, st.m = top;
    const u32 to = c.weights + c.turn * (TOGETHER * WEIGHTS), shrinks = c.shrinks + c.turn * (WARPS * 4);
    if ((c.lane & 3) == 0) {
#pragma unroll
      for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float v = weights.of(x[j][i]);
          st.l += v;
          const u32 both = Math::pack(v, v - Math::low(Math::pack(v, 0.f)));
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + j * WEIGHTS + (8 * i + mine) * 16 + c.warp * 4), "r"(both) : "memory");
        }
      if (c.lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(shrinks + c.warp * 4), "f"(shrink) : "memory");
    }
    fenceAsync();
    syncWarps(WARPS);
    const float less = loadShared(shrinks + (c.lane & 3) * 4);
    if (__any_sync(~0u, less != 1.f)) {
#pragma unroll
      for (int i = 0; i < 4; i++) st.o[i] *= less;
    }
    wgmmaFence();
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) multiply<1>(st.o, columnOperand(at[j] + SLOT / 2, 0) + k * (16 * 128 >> 4), weightOperand(to) + j * (WEIGHTS >> 4) + k * (256 >> 4), 1);
    wgmmaCommit();
    wgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+f"(st.o[i])::"memory");
    c.turn ^= 1;
    if (c.lane == 0) {
#pragma unroll
      for (int j = 0; j < N; j++) barrierArrive(empty[j]);
    }
  }

  // The consumer warps.
  __device__ static __forceinline__ void consume(const Params& p, const Work* range, const typename R::Shared& sh, u64* bufferBars, char* operands, Consumers c) {
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    R::clear(sh);
    for (int i = threadIdx.x; i < (QUERY + 2 * TOGETHER * WEIGHTS) / 16; i += WARPS * 32) ((uint4*)operands)[i] = make_uint4(0, 0, 0, 0);
    const bool precise = p.queryType != Math::Operand::type || p.outType != Math::Operand::type;
    Place w;
    w.begin(p, range);
    const int g = c.lane >> 2, t = c.lane & 3;
    bool more = true;
    typename A::Queries q;
    A::loadNarrow(p, w, q, precise, c.lane);
    syncWarps(WARPS);
    waitForRing(2, WARPS + 1);
    for (int part = 0; more; part++) {
      // Nobody multiplies by the queries of the output tile before: all have met behind those products.
      if (c.warp == 0 && g < 2) {
#pragma unroll
        for (int s = 0; s < D / 16; s++)
#pragma unroll
          for (int j = 0; j < 2; j++) asm volatile("st.shared.u32 [%0], %1;" ::"r"(c.query + swizzled(g, s * 32 + j * 16 + 4 * t)), "r"(q.hi[s][j]) : "memory");
      }
      fenceAsync();
      syncWarps(WARPS);
      State st;
      st.empty();
      int n = w.chunk;
#pragma unroll 1
      for (; n + TOGETHER <= w.end; n += TOGETHER) merge<TOGETHER>(st, c, q.factor[0], w.s.keys - n * KEYS);
#pragma unroll 1
      for (; n < w.end; n++) merge<1>(st, c, q.factor[0], w.s.keys - n * KEYS);
#pragma unroll
      for (int i = 4; i < 32; i *= 2) st.l += __shfl_xor_sync(~0u, st.l, i);
      const typename R::Shared mine = sh.of(part, p.rows);
      if (part >= sh.buffers) barrierWait(sharedAddress(bufferBars + 2) + sh.buffer(part) * 8, ~sh.round(part) & 1);
      float* const to = mine.o + t * p.rows * S::WIDTH + 16 * c.warp + g;
      to[0] = st.o[0] + st.o[1], to[8] = st.o[2] + st.o[3];
      if (c.lane == 0) ((float*)mine.m)[c.warp] = st.m, ((float*)mine.l)[c.warp] = st.l;
      barrierArrive(sharedAddress(bufferBars) + sh.buffer(part) * 8);
      more = w.next(p);
      if (more) A::loadNarrow(p, w, q, precise, c.lane);
    }
    L::writeFullyMasked(p, *p.masked);
  }

  // Lean::run, with other consumers. The host launches four of them, see configure.
  __device__ static __forceinline__ void run(const Params& p, const MeetParams& meet, const int* prefetched, const TensorMap* maps, char* memory) {
    const Work* const range = p.work + blockIdx.x;
    if (threadIdx.x == WARPS * 32) prefetchMap(maps), prefetchMap(maps + 1);
    int entry = 0;
    if (PAGED && threadIdx.x >= WARPS * 32) entry = prefetched[blockIdx.x * PREFETCHED_ENTRIES + threadIdx.x % PREFETCHED_ENTRIES];
    const Work work = *range;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    char* const operands = memory + p.slots * SLOT; // behind the ring, since queries lie as keys do
    u64* const bars = (u64*)(operands + OPERANDS);
    u64* const bufferBars = bars + 2 * p.slots;
    const u32 full = sharedAddress(bars), empty = full + p.slots * 8;
    if (warp == WARPS && lane == 0) {
      for (int s = 0; s < p.slots; s++) barrierInit(full + s * 8, 2), barrierInit(empty + s * 8, WARPS);
      for (int r = 0; r < 2; r++) barrierInit(sharedAddress(bufferBars + r), WARPS * 32), barrierInit(sharedAddress(bufferBars + 2 + r), EPILOGUE_WARPS * 32);
      opened();
    }
    if (work.tiles == 0) {
      waitForEarlier();
      if (warp < WARPS) L::writeFullyMasked(p, *p.masked);
      if (work.wholeSeq == ::TOGETHER && warp == 0) R::pass(meet);
      return;
    }
    typename R::Shared sh;
    sh.warps = WARPS, sh.buffers = p.buffers;
    sh.last = (int*)(bufferBars + 4);
    sh.o = (float*)(bufferBars + 6);
    sh.m = (float4*)(sh.o + sh.buffers * WARPS * p.rows * S::WIDTH);
    sh.l = sh.m + sh.buffers * ROWS;
    const u32 ring = sharedAddress(memory);
    if (warp >= WARPS + PRODUCER_WARPS) {
      moreRegisters<EPILOGUE_REGISTERS>();
      waitForEarlier();
      L::runEpilogue(p, meet, range, typename R::Shares(work), sh, bufferBars, ThreadGroup{(int)threadIdx.x - (WARPS + PRODUCER_WARPS) * 32, EPILOGUE_WARPS, 4});
      return;
    }
    if (warp >= WARPS) {
      fewerRegisters<PRODUCER_REGISTERS>();
      const int producer = warp - WARPS, values = producer & 1;
      producer == 0 ? ringIsReady(WARPS) : waitForRing(3, PRODUCER_WARPS);
      const Work& known = PAGED ? work : *range;
      Place begin;
      begin.begin(p, range, known);
      Ring<S>::produce(p, begin, maps + values, ring + values * (SLOT / 2), full, empty, producer >> 1, producer >> 1, 1, lane, known.wholeTiles, entry);
      if (producer == PRODUCER_WARPS - 1 && range->wholeSeq == ::TOGETHER) R::look(meet, typename R::Shares(*range), sh, lane);
      return;
    }
    moreRegisters<CONSUMER_REGISTERS>();
    const u32 at = sharedAddress(operands);
    consume(p, range, sh, bufferBars, operands, Consumers{ring, full, empty, at, at + QUERY, at + QUERY + 2 * TOGETHER * WEIGHTS, p.slots, warp, lane, 0, 0, 0});
  }
};

#define ROW_ATTENTION(name, T, PAGED) \
  extern "C" __global__ void __launch_bounds__((CONSUMER_WARPS + PRODUCER_WARPS + EPILOGUE_WARPS) * 32, 1) name(const __grid_constant__ LaunchParams p) { \
    extern __shared__ __align__(1024) char memory[]; \
    LeanRow<T, PAGED>::run(p.p, p.meet, p.prefetched, &p.keyMap, memory); \
  }
#else // there the others take what it is for
#define ROW_ATTENTION(name, ...) extern "C" __global__ void name(const __grid_constant__ LaunchParams p) {}
#endif
