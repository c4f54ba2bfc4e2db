// The next token of every row of logits, so that nothing but ids leaves the GPU.
//
// With x a token's logit and T the temperature, its weight is exp((x - max)/T) in
// fixed point: ONE for the most likely token. Sums of integers are exact, so no
// number of threads and no order changes a bit of them, and what is chosen is the
// same on every run. Tokens of less than 2^-44 of the most likely one have weight
// 0 and are never chosen.
//
// A row's logits are cut into as many parts as its team has warps, in the order
// of ids. A team is a cluster of thread blocks where there are clusters (from
// sm_90 on), else one block. What the warps find goes to every block of the team
// by shared memory, and every block adds it up.
//
// Which tokens can be chosen is a matter of two cuts: the least logit of which,
// with all greater ones, there are K tokens, and the least with which weights
// reach P of what the first cut left. Both are found by bisection over the order
// of float bits, in at most 16 looks each at the row, which the caches hold. Of
// equal logits at a cut the lower ids are kept. The one that is chosen is where
// the running sum of the kept weights, in the order of ids, passes u of the total.
#pragma once
#include "copy.cuh"
#include "sample_argmax.cuh"

struct SampleSetting {
  double temperature; // 0: greedy; less: a row of nobody, which gets -1
  double topP;        // 1 or more: all tokens
  int topK;           // 0 or less: all tokens
};

struct SampleParams {
  const float* logits;
  const SampleSetting* settings; // of each row
  const double* random;          // of each row, in [0, 1)
  int* ids;                      // of each row; -1: no token is the most likely
  long long stride;              // logits from a row to the next
  int vocab;                     // at most 2^19, so that weights add up to less than 2^64
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int teamRank() {
  int r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ int teamSize() {
  int r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void teamArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void teamWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores into the shared memory of a block of the team, where p is in this one.
__device__ __forceinline__ void teamStore(u64* p, int rank, u64 x) {
  asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.u64 [a], %2;}" ::"r"(sharedAddress(p)), "r"(rank), "l"(x) : "memory");
}
#else
__device__ __forceinline__ int teamRank() { return 0; }
__device__ __forceinline__ int teamSize() { return 1; }
__device__ __forceinline__ void teamArrive() {}
__device__ __forceinline__ void teamWait() { __syncthreads(); }
__device__ __forceinline__ void teamStore(u64* p, int, u64 x) { *p = x; }
#endif

__device__ __forceinline__ u64 warpSum(u64 x) {
  return warpFold(x, [](u64 a, u64 b) { return a + b; });
}

// Sums of the lanes before this one and this one.
__device__ __forceinline__ u64 warpScan(u64 x, int lane) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const u64 y = __shfl_up_sync(~0u, x, i);
    if (lane >= i) x += y;
  }
  return x;
}

// The warps that have a row together.
struct Team {
  static constexpr int MOST = 128; // warps
  static constexpr int VALUES = 3; // that a warp tells at once
  typedef u64 Board[2][VALUES][MOST];

  int rank, size;  // of thread blocks
  int warp, warps; // of the team
  int lane, turn;
  u64(*board)[VALUES][MOST];

  const float* base; // the row, from the last multiple of 16 bytes on
  int skip, end;     // its first logit is base[skip], base[end] is behind the last
  int from, to;      // this warp's part: base[4*from] up to base[4*to]

  // The blocks of a team start at any time: none may store into another before
  // teamWait.
  __device__ __forceinline__ void begin(Board& shared) {
    rank = teamRank(), size = teamSize();
    const int own = blockDim.x / 32;
    warp = rank * own + __shfl_sync(~0u, threadIdx.x / 32, 0), warps = size * own;
    lane = threadIdx.x % 32, turn = 0;
    board = shared;
    teamArrive();
  }

  __device__ __forceinline__ void row(const SampleParams& p, int i) {
    const float* x = p.logits + i * p.stride;
    skip = (int)((u64)x / 4 % 4), end = skip + p.vocab;
    base = x - skip;
    const int groups = (end + 3) / 4, each = (groups + warps - 1) / warps;
    from = min(warp * each, groups), to = min(from + each, groups);
  }

  // Four logits; -Inf where the row or this warp's part has none.
  __device__ __forceinline__ float4 load(int group) const {
    float4 v = make_float4(-LEAN_INF, -LEAN_INF, -LEAN_INF, -LEAN_INF);
    if (group >= to) return v;
    const int i = group * 4;
    if (i >= skip && i + 4 <= end) return *(const float4*)(base + i);
    if (i >= skip && i < end) v.x = base[i];
    if (i + 1 >= skip && i + 1 < end) v.y = base[i + 1];
    if (i + 2 >= skip && i + 2 < end) v.z = base[i + 2];
    if (i + 3 >= skip && i + 3 < end) v.w = base[i + 3];
    return v;
  }

  // Calls f with this lane's logits and their ids, which grow. BATCH loads of four
  // are on their way at once; f is in the code 4*BATCH times.
  template <int BATCH, class F> __device__ __forceinline__ void each(F f) const {
#pragma unroll 1
    for (int g = from + lane; g < to; g += 32 * BATCH) {
      float4 v[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++) v[j] = load(g + 32 * j);
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const int id = (g + 32 * j) * 4 - skip;
        f(v[j].x, id), f(v[j].y, id + 1), f(v[j].z, id + 2), f(v[j].w, id + 3);
      }
    }
  }

  // The most likely token of this lane's part of the row, then of the warp's. A
  // logit of -Inf is none.
  __device__ __forceinline__ u64 best() const {
    u32 key = NOTHING, id = ~0u;
    each<4>([&](float x, int i) {
      const u32 k = keyOf(x);
      if (k > key) key = k, id = i;
    });
    return warpBest(key, id);
  }

  // Tells all blocks of the team what each of its warps has found; all lanes of a
  // warp say the same. There are two boards: who is still reading the one before
  // has not arrived here yet.
  template <int N> __device__ __forceinline__ void tell(const u64 (&x)[N]) {
    turn ^= 1;
    if (lane < size)
#pragma unroll
      for (int i = 0; i < N; i++) teamStore(&board[turn][i][warp], lane, x[i]);
    teamArrive();
    teamWait();
  }

  // The sum of what the first n warps told as number i.
  __device__ __forceinline__ u64 told(int i, int n) const {
    u64 x = 0;
#pragma unroll
    for (int j = 0; j < MOST; j += 32)
      if (j + lane < n) x += board[turn][i][j + lane];
    return warpSum(x);
  }

  // The least key of the bests that all warps told.
  __device__ __forceinline__ u32 leastTold() const {
    u32 x = ~0u;
#pragma unroll 1
    for (int j = lane; j < warps; j += 32) x = min(x, (u32)(board[turn][0][j] >> 32));
    return (u32)warpFold(x, [](u64 a, u64 b) { return a < b ? a : b; });
  }

  // The best of what all warps told.
  __device__ __forceinline__ u64 bestTold() const {
    u64 x = 0;
#pragma unroll 1
    for (int j = lane; j < warps; j += 32) x = max(x, board[turn][0][j]);
    return warpBest((u32)(x >> 32), ~(u32)x);
  }
};

// Every row's most likely token.
__device__ __forceinline__ void sampleGreedy(const SampleParams& p) {
  __shared__ Team::Board shared;
  Team team;
  team.begin(shared);
  const int row = blockIdx.x / team.size;
  team.row(p, row);
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const u64 best = team.best();
  teamWait();
  if (team.lane == 0) teamStore(&shared[0][0][team.warp], 0, best); // the first block alone needs it
  teamArrive();
  teamWait();
  if (team.warp != 0) return;
  const int id = idOf(team.bestTold());
  if (team.lane == 0) p.ids[row] = id;
}

struct Weights {
  static constexpr u64 ONE = 1ull << 44;
  static constexpr int LEAST = -45; // log2 of a weight that is 0
  double top;  // the greatest logit
  double perT; // makes the weight's binary logarithm, 32 bits of it behind the point, of a difference of logits

  // 1/T may be infinite, and times 0 must be 0.
  __device__ __forceinline__ Weights(float top, double temperature) : top(top), perT(fmin(4294967296. * 1.4426950408889634 / temperature, 1e300)) {}

  // Right to 1e-9 of itself. Three operations are in float64, of which many GPUs
  // do few at once; the power of two is in integers.
  __device__ __forceinline__ u64 of(float x) const {
    const long long t = __double2ll_rn(((double)x - top) * perT);
    if (t <= (long long)LEAST * (1ll << 32)) return 0;
    const u32 f = (u32)t; // the power is 2^(t >> 32) times 2^f
    u32 r = 0x15bd3;      // (2^f - 1)/f, a polynomial through its Chebyshev nodes
    r = __umulhi(r, f) + 0x99317;
    r = __umulhi(r, f) + 0x57bf1a;
    r = __umulhi(r, f) + 0x2763464;
    r = __umulhi(r, f) + 0xe3589f8;
    r = __umulhi(r, f) + 0x3d7f7ba6;
    r = __umulhi(r, f) + 0xb17217f9;
    return (ONE | (u64)__umulhi(r, f) << 12) >> -(int)(t >> 32);
  }
};

// The tokens that can be chosen: those with greater keys, and some with this one.
struct Cut {
  u32 key;
  u64 ties;   // how many of equal logits are kept, those with the lowest ids
  u64 weight; // of each of them

  // The weight of tokens with greater keys that weigh `above` and n with this one.
  __device__ __forceinline__ u64 kept(u64 above, u64 n) const { return above + min(n, ties) * weight; }
};

// The least key with which tokens of this and of greater keys are worth `target`
// or more, and in `above` what those of greater keys are worth: a token is worth
// its weight, or 1. They are worth as much at lo, and nothing at hi. If those
// from some key on are worth just `target`, it is the key below that.
template <bool WEIGHTS> __device__ __forceinline__ u32 bisect(Team& team, const Weights& w, u32 lo, u32 hi, u64 target, u64& above) {
  above = 0;
  while (hi - lo > 1) {
    const u32 width = hi - lo, step = (width + 3) / 4;
    u64 x[3] = {0, 0, 0}; // what the keys in [lo + step, hi), [lo + 2 step, hi) and [lo + 3 step, hi) are worth
    team.each<WEIGHTS ? 1 : 4>([&](float logit, int) {
      const u32 d = keyOf(logit) - lo;
      if (d >= width || d < step) return; // keys below lo are beyond width
      const u64 worth = WEIGHTS ? w.of(logit) : 1;
      x[0] += worth;
      if (d >= 2 * step) x[1] += worth;
      if (d >= 3 * step) x[2] += worth;
    });
#pragma unroll
    for (int i = 0; i < 3; i++) x[i] = warpSum(x[i]);
    team.tell(x);
#pragma unroll
    for (int i = 0; i < 3; i++) x[i] = above + team.told(i, team.warps);
    const u32 start = lo;
#pragma unroll
    for (int i = 2; i >= 0 && lo == start; i--) {
      const u32 key = start + (i + 1) * step; // it is hi or more where there are fewer keys than steps
      if (x[i] == target) {
        above = x[i];
        return key - 1;
      }
      if (x[i] > target) {
        lo = key;
      } else {
        hi = min(hi, key), above = x[i];
      }
    }
  }
  return lo;
}

// A token of every row, as its setting says.
__device__ __forceinline__ void sampleRandom(const SampleParams& p) {
  __shared__ Team::Board shared;
  Team team;
  team.begin(shared);
  const int row = blockIdx.x / team.size;
  team.row(p, row);
  const bool first = team.warp == 0 && team.lane == 0; // who says what takes no search
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
  const SampleSetting s = p.settings[row];
  const double u = p.random[row];
  teamWait();
  if (!(s.temperature >= 0)) {
    if (first) p.ids[row] = -1;
    return;
  }
  const u64 mine[1] = {team.best()};
  team.tell(mine);
  const u64 best = team.bestTold();
  const int id = idOf(best);
  if (id < 0 || s.temperature == 0) {
    if (first) p.ids[row] = id;
    return;
  }

  const u32 top = (u32)(best >> 32);
  const Weights w(logitOf(top), s.temperature);
  Cut cut = {NOTHING, 0, 0};
  if (s.topK > 0 && s.topK < p.vocab) {
    // Every warp has a token as likely as its best; and there are that many tokens
    // if those of -Inf count.
    const u32 least = s.topK <= team.warps ? team.leastTold() : NOTHING;
    u64 above;
    cut.key = bisect<false>(team, w, least, top + 1, s.topK, above);
    cut.ties = s.topK - above;
    if (cut.ties > 0 && cut.key > NOTHING) cut.weight = w.of(logitOf(cut.key));
  }

  u64 sum[2]; // of this warp's part: the weight of greater keys, and how many tokens have the cut's
  u64 total;
#pragma unroll 1
  for (bool last = !(s.topP < 1);; last = true) {
    sum[0] = sum[1] = 0;
    team.each<1>([&](float x, int) {
      const u32 k = keyOf(x);
      if (k > cut.key) sum[0] += w.of(x);
      if (k == cut.key) sum[1]++;
    });
    sum[0] = warpSum(sum[0]), sum[1] = warpSum(sum[1]);
    team.tell(sum);
    total = cut.kept(team.told(0, team.warps), team.told(1, team.warps));
    if (last) break;
    // The most likely token is kept whatever P is.
    const u64 target = min(max((u64)__double2ull_ru(s.topP * (double)total), 1ull), total);
    u64 above;
    cut.key = bisect<true>(team, w, cut.key, top + 1, target, above);
    cut.ties = cut.weight = 0;
    if (above < target) {
      cut.weight = w.of(logitOf(cut.key));
      cut.ties = (target - above + cut.weight - 1) / cut.weight;
    }
  }

  // One warp has the token where the running sum passes the target.
  const u64 target = min((u64)__double2ull_rd(u * (double)total), total - 1);
  u64 above = team.told(0, team.warp), ties = team.told(1, team.warp);
  if (target < cut.kept(above, ties) || target >= cut.kept(above + sum[0], ties + sum[1])) return;
  for (int g = team.from; g < team.to; g += 32) {
    const float4 v = team.load(g + team.lane);
    const float x[4] = {v.x, v.y, v.z, v.w};
    u64 more[4], equal[4];
    u64 ownAbove = 0, ownTies = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 k = keyOf(x[j]);
      ownAbove += more[j] = k > cut.key ? w.of(x[j]) : 0;
      ownTies += equal[j] = k == cut.key;
    }
    const u64 a = warpScan(ownAbove, team.lane), t = warpScan(ownTies, team.lane);
    u64 beforeAbove = above + a - ownAbove, beforeTies = ties + t - ownTies;
    if (target >= cut.kept(beforeAbove, beforeTies) && target < cut.kept(above + a, ties + t)) {
      int j = 0; // the last whose sum reaches the target's place
      for (; j < 3; j++) {
        beforeAbove += more[j], beforeTies += equal[j];
        if (target < cut.kept(beforeAbove, beforeTies)) break;
      }
      p.ids[row] = (g + team.lane) * 4 + j - team.skip;
    }
    above += __shfl_sync(~0u, a, 31), ties += __shfl_sync(~0u, t, 31);
  }
}
