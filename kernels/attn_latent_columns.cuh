// Decode attention to latents of E4M3, with keys as rows of products, for output tiles of up to 32 rows. The first 512 elements of a key
// are the values, in groups of 128 that share a scale. The other 64 elements are bfloat16. Compute capability 9.0 alone.
//
// Products have the keys of a chunk (or the columns of its values) as rows, and the rows of queries as columns. N is the number
// of columns. Keys come to registers, once for each product, and elements of E4M3 become float16 there, which is exact.
//
//   - Scores: a lane has two keys. Sums over a group of 128 elements are multiplied by the keys' scales.
//   - Weights are written once for each group, multiplied by the key's scale. A running power of two, which no scale exceeds, keeps weights
//     in the range of float16. Outputs are multiplied by the power when they leave.
//
// A chunk lies in four pieces of 16 keys. Warp groups, chunks, ranges of LeanTiles and partials are as in attn_latent.cuh, except that a
// warp group reads all weights from shared memory.
#pragma once
#include "attn_latent.cuh"
#include "attn_latent_products.cuh"

struct LatentColumnsParams {
  TensorMap keyMap, restMap; // of values, and of the keys' other elements: boxes of `box` rows of 128 bytes
  Params p;
  MeetParams meet;
  const float* scales; // of groups of elements, a key's side by side
  int whole;           // a box has all blocks of 128 bytes of its rows, else one
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int N> struct LatentColumns {
  using Math = MmaF16; // of all elements but the keys' last 64
  using Operand = typename Math::Operand;
  using Base = Latent<AsBF16, 576, 512, false>; // states leave without the lift of float16: they may have values that float16 has not
  using R = typename Base::R;
  using Place = typename Base::Place;
  static constexpr int WARPS = Base::WARPS, KEYS = 64, D = Base::D, KEY_DIM = Base::KEY_DIM;
  static constexpr int PIECES = 4, GROUPS = 4;                   // of a chunk; of values, each with weights of its own
  static constexpr int VALUES = 4, BLOCKS = VALUES + 1;          // blocks of 128 bytes of a key
  static constexpr int BLOCK = KEYS / PIECES * 128, ROW = 128;   // bytes from a block to the next one, and from a key to the next one
  static constexpr int PIECE = BLOCKS * BLOCK;                   // bytes
  static constexpr int QUERY = N * 128, QUERIES = KEY_DIM / 64 * QUERY, WEIGHTS = N * 128; // bytes of 64 columns of queries, of all, and of a chunk's weights for one group
  static constexpr int TILES = N / 8, OWN = N / 4;               // of a lane: tiles of sums, and columns
  static constexpr int EACH = OWN > 8 ? OWN / 8 : 1;             // columns that a lane sums up
  static constexpr int SHARE = D / 2, STRIDE = D + 8;            // columns of a group, and floats between rows of outputs in shared memory
  static constexpr int OUTPUTS = QUERIES + 2 * GROUPS * WEIGHTS; // bytes
  static_assert(N * STRIDE * 4 <= OUTPUTS, "the outputs do not fit where queries and weights were");
  static_assert(N <= 32, "registers do not suffice for sums of two groups beside those of all");
  static constexpr int PRODUCER = Base::PRODUCER, COUNTER = Base::COUNTER;
  // Named barriers: from TAKEN on: the other group has used the weights of a group's chunk.
  enum : int { READY = Base::READY, BEGUN = Base::BEGUN, WEIGHED = Base::WEIGHED, TAKEN = WEIGHED + 2 };

  struct Shared {
    u32 ring, query, weights, full, empty, begun;
    int pieces;              // places in the ring
    float *outputs, *scales; // outputs: where queries and weights are; scales: of the ring's keys
    float *largest, *shrink; // of each row, by the group that has had a chunk, as Latent has them
    float *factor;           // of each row: makes scores of sums
    float *most, *sums;      // of each row, by warp
    float* ratio;            // by group: the factor of outputs, since scales are greater than before
    int* exponent;           // by group: of the power of two that no scale exceeds
    typename R::Shared reduce;
    __device__ __forceinline__ Shared(const Params& p, char* memory) {
      pieces = p.slots;
      ring = sharedAddress(memory), query = ring + pieces * PIECE, weights = query + QUERIES;
      outputs = (float*)(memory + pieces * PIECE);
      largest = (float*)(memory + pieces * PIECE + OUTPUTS), shrink = largest + 2 * N, factor = shrink + 2 * N, most = factor + N, sums = most;
      scales = most + 8 * N;
      ratio = scales + pieces * KEYS / PIECES * GROUPS, exponent = (int*)(ratio + 2), reduce.last = exponent + 2;
      begun = sharedAddress(reduce.last + 4), full = begun + 16, empty = full + pieces * 8;
    }
  };

  // Where the pieces of a chunk are in the ring: the first one and the parity of its phase.
  struct Ring {
    int first;
    u32 phase;
    __device__ __forceinline__ void next(const Shared& sh) {
      if ((first += PIECES) >= sh.pieces) first -= sh.pieces, phase ^= 1;
    }
    __device__ __forceinline__ int slot(const Shared& sh, int k) const { return first + k < sh.pieces ? first + k : first + k - sh.pieces; }
    __device__ __forceinline__ u32 parity(const Shared& sh, int k) const { return first + k < sh.pieces ? phase : phase ^ 1; }
    __device__ __forceinline__ void wait(const Shared& sh) const {
      const int k = threadIdx.x % 32;
      if (k < PIECES) barrierWait(sh.full + slot(sh, k) * 8, parity(sh, k));
      __syncwarp();
    }
    // Where key number `key` of the chunk is; and its scales.
    __device__ __forceinline__ u32 row(const Shared& sh, int key) const { return sh.ring + slot(sh, key / 16) * PIECE + key % 16 * ROW; }
    __device__ __forceinline__ float4 scales(const Shared& sh, int key) const { return ((const float4*)sh.scales)[slot(sh, key / 16) * 16 + key % 16]; }
  };

  // The producer warp.
  __device__ static __forceinline__ void produce(const LatentColumnsParams& a, const Work* range, const Shared& sh, int lane) {
    constexpr int OUTSIDE = 0x7ffffff0, EACH = KEYS / PIECES; // a box outside of the array is zeros
    const Params& p = a.p;
    const int boxes = KEYS / p.box, perPiece = EACH / p.box;
    const u64 policy = p.streamed ? readOnce() : readAgain();
    int slot = 0;
    u32 parity = 1;
    bool waited = false;
    Place at;
    at.begin(p, range);
    do {
      const int head = at.head * p.headRows, old = p.early ? at.s.keys - at.s.queries : 0;
      const auto find = [&](int c, int (&rows)[2]) { // of boxes `lane` and lane + 32 of a chunk
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int b = lane + 32 * i, key = c * KEYS + b * p.box;
          rows[i] = OUTSIDE;
          if (b >= boxes || key >= at.s.keys) continue;
          if (p.pages == nullptr) {
            rows[i] = at.s.pages * p.pageRows + head + key;
          } else {
            const int page = key / p.pageTokens;
            rows[i] = p.pages[at.s.pages + page] * p.pageRows + head + key - page * p.pageTokens;
          }
        }
      };
      int rows[2], next[2];
      find(at.chunk, next);
#pragma unroll 1
      for (int c = at.chunk; c < at.end; c++) {
        rows[0] = next[0], rows[1] = next[1];
        if (c + 1 < at.end) find(c + 1, next);
        if (!waited && (c + 1) * KEYS > old) waitForEarlier(), waited = true;
#pragma unroll 1
        for (int k = 0; k < PIECES; k++) {
          const u32 bar = sh.full + slot * 8, to = sh.ring + slot * PIECE;
          const int live = max(min(at.s.keys - c * KEYS - k * EACH, EACH), 0);
          barrierWait(sh.empty + slot * 8, parity);
          __syncwarp();
          if (lane == 0) barrierExpect(bar, PIECE + live * 16);
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int b = lane + 32 * i - k * perPiece, first = b * p.box;
            if (b < 0 || b >= perPiece) continue;
            if (a.whole) {
              copyBox(to, &a.keyMap, 0, rows[i], 0, bar, policy);
            } else {
#pragma unroll 1
              for (int g = 0; g < VALUES; g++) copyBox(to + g * BLOCK + first * 128, &a.keyMap, 0, rows[i], g, bar, policy);
            }
            copyBox(to + VALUES * BLOCK + first * 128, &a.restMap, 0, rows[i], 0, bar, policy);
            if (first < live)
              asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(sharedAddress(sh.scales) + (slot * EACH + first) * 16),
                           "l"(a.scales + (long long)rows[i] * GROUPS), "r"(min(p.box, live - first) * 16), "r"(bar), "l"(policy)
                           : "memory");
          }
          __syncwarp();
          if (++slot == sh.pieces) slot = 0, parity ^= 1;
        }
      }
    } while (at.next(p));
    if (!waited) waitForEarlier();
  }

  // Brings an output tile's queries to shared memory. A row is multiplied by a power of two that makes the row's largest element 2^8 to 2^9,
  // and its scores by the inverse. Columns of values are in the order in which lanes have elements of keys: of 16 columns, 4t and 4t + 1 are
  // numbers 2t and 2t + 1, and 4t + 2 and 4t + 3 are numbers 2t + 8 and 2t + 9.
  __device__ static __forceinline__ u32 packed(float a, float b, bool value) { return value ? Operand::pack(a, b) : BFloat16::pack(a, b); }
  __device__ static __forceinline__ void loadQueries(const Params& p, const Place& w, const Shared& sh, int warp, int lane) {
    constexpr int PARTS = (KEY_DIM + 127) / 128, SIDE = N / WARPS < 4 ? N / WARPS : 4; // rows on their way together
    const int rows = w.rows(p);
#pragma unroll 1
    for (int begin = warp; begin < N; begin += SIDE * WARPS) {
      float4 x[SIDE][PARTS];
      withStore(p.queryType, [&](auto s) {
#pragma unroll
        for (int k = 0; k < SIDE; k++) {
          const int r = begin + k * WARPS;
          const long long at = Base::queryOf(p, w, r < rows ? r : 0) + lane * 4;
#pragma unroll
          for (int i = 0; i < PARTS; i++) {
            x[k][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (r < rows && i * 128 + lane * 4 < KEY_DIM) x[k][i] = decltype(s)::load4(p.query, at + i * 128);
          }
        }
      });
#pragma unroll
      for (int k = 0; k < SIDE; k++) {
        const int r = begin + k * WARPS;
        float top = 0.f, factor = p.scale;
#pragma unroll
        for (int i = 0; i < PARTS; i++) top = fmaxf(fmaxf(top, fmaxf(fabsf(x[k][i].x), fabsf(x[k][i].y))), fmaxf(fabsf(x[k][i].z), fabsf(x[k][i].w)));
#pragma unroll
        for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        const int e = max((int)(__float_as_uint(top) >> 23) - 127 - 8, -118);
        const float up = __int_as_float((127 - e) << 23);
        factor *= __int_as_float((127 + e) << 23);
        if (lane == 0) sh.factor[r] = factor;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          const int c = i * 128 + lane * 4;
          if (c >= KEY_DIM) continue;
          const float v[4] = {x[k][i].x * up, x[k][i].y * up, x[k][i].z * up, x[k][i].w * up};
          const bool value = c < D;
          const u32 two[2] = {packed(v[0], v[1], value), packed(v[2], v[3], value)};
          const u32 block = sh.query + c / 64 * QUERY, column = c % 64 / 16 * 32, t = c % 16 / 4;
#pragma unroll
          for (int j = 0; j < 2; j++)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(block + swizzled(r, column + (value ? t * 4 + j * 16 : t * 8 + j * 4))), "r"(two[j]) : "memory");
        }
      }
    }
  }

  __device__ static __forceinline__ void zero(float (&d)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.f;
  }

  // A warp group's half of the outputs, transposed, and a lane's part of the sums of weights.
  struct State {
    float o[4][TILES][4], l[EACH]; // o: of 64 columns each
    __device__ __forceinline__ void empty() {
#pragma unroll
      for (int e = 0; e < EACH; e++) l[e] = 0.f;
#pragma unroll
      for (int b = 0; b < 4; b++) zero(o[b]);
    }
  };

  // The key, of a warp's 16, that is row r of a product: rows that are read together are in different banks, in both products.
  __device__ static __forceinline__ int keyOf(int r) { return r < 8 ? r : 8 + (r - 8 ^ 4); }

  // The scores of a chunk.
  __device__ static __forceinline__ void scores(const Shared& sh, const Ring& at, float (&s)[TILES][4], int lane) {
    const int warp = threadIdx.x / 32 % 4, matrix = lane >> 3, key = keyOf((lane & 7) + (matrix & 1) * 8);
    const u32 row = at.row(sh, warp * 16 + key), half = (matrix >> 1) * 16;
    const u32 turn = (u32)(key & 7) << 4; // of a swizzled block
    u32 a[2][4][4]; // operands of products under way
    at.wait(sh);
    zero(s);
    const u64 queries = rowOperand(sh.query);
    const auto add = [&](float (&d)[TILES][4], int b) {
      pinned(d);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const u64 query = behind(queries, b * QUERY + k * 32);
        if (b == KEY_DIM / 64 - 1) addRows<MmaBF16>(d, a[b % 2][k], query);
        else addRows<Math>(d, a[b % 2][k], query);
      }
      wgmmaCommit();
    };
    const float4 low = at.scales(sh, warp * 16 + keyOf(lane >> 2)), high = at.scales(sh, warp * 16 + keyOf((lane >> 2) + 8));
    const float scales[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    float x[2][TILES][4]; // sums of a group
    const auto sum = [&](int g) {
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] += x[g % 2][j][i] * scales[i / 2][g];
    };
    u32 raw[2][2][4]; // elements of the next product come while operands are made
    const auto fetch = [&](int b) {
#pragma unroll
      for (int k = 0; k < 2; k++) loadMatrix(raw[b % 2][k], row + b / 2 * BLOCK + (b % 2 * 64 + k * 32 + half ^ turn));
    };
    fetch(0);
#pragma unroll
    for (int b = 0; b < 8; b++) { // 64 columns at a time
      if (b < 7) fetch(b + 1);
      if (b >= 2) {
        wgmmaWait<1>();
        held(a[b % 2]);
        if (b % 2 == 1) pinned(x[(b - 3) / 2 % 2]), sum((b - 3) / 2);
      }
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const u32(&r)[4] = raw[b % 2][k];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int j = 0; j < 2; j++) a[b % 2][2 * k + i][j] = halvesOf(r[2 * i + j]), a[b % 2][2 * k + i][2 + j] = halvesOf(r[2 * i + j] >> 16);
      }
      if (b % 2 == 0) zero(x[b / 2 % 2]);
      add(x[b / 2 % 2], b);
    }
    wgmmaWait<0>();
    held(a[0]), held(a[1]);
    pinned(x[1]);
    sum(3);
#pragma unroll
    for (int k = 0; k < 4; k++) loadMatrix(a[0][k], row + VALUES * BLOCK + (k * 32 + half ^ turn)); // of bfloat16, as they are
    add(s, 8);
    wgmmaWait<0>();
    held(a[0]);
    pinned(s);
  }

  // Combines the values of the lanes that have the same columns: EACH of a lane's OWN numbers are left, from column columnOf(lane) on.
  template <int BIT = 16, int M = OWN / 2, class F> __device__ static __forceinline__ void across(float (&v)[OWN], int lane, const F& f) {
    if constexpr (M > 0) {
      const bool up = lane & BIT;
#pragma unroll
      for (int i = 0; i < M; i++) {
        float a = v[i], b = v[i + M], keep, give;
        asm("{.reg .pred p; setp.ne.s32 p, %4, 0; selp.f32 %0, %2, %3, p; selp.f32 %1, %3, %2, p;}" : "=f"(keep), "=f"(give) : "f"(b), "f"(a), "r"((int)up)); // of v[up ? i : i + M] the compiler would make addresses
        v[i] = f(keep, __shfl_xor_sync(~0u, give, BIT));
      }
    } else {
      v[0] = f(v[0], __shfl_xor_sync(~0u, v[0], BIT));
    }
    if constexpr (BIT > 4) across<BIT / 2, M / 2>(v, lane, f);
  }
  __device__ static __forceinline__ int columnOf(int lane) {
    int i = 0;
#pragma unroll
    for (int bit = 16, m = OWN / 2; bit >= 4; bit /= 2, m /= 2) i += lane & bit ? m : 0;
    return i / 2 * 8 + (lane & 3) * 2 + i % 2;
  }

  // Makes weights of the scores of a chunk, whose first key is number `key`, and gives them to both groups.
  __device__ static __forceinline__ void weigh(const Params& p, const Place& w, const Shared& sh, State& st, const float (&s)[TILES][4], const Ring& at, int key, bool masked, bool again, int group, int lane) {
    const int warp = threadIdx.x / 32 % 4, g = lane >> 2, t = lane & 3, mine[2] = {warp * 16 + keyOf(g), warp * 16 + keyOf(g + 8)}, live = w.s.keys - key;
    float x[TILES][4], v[OWN], by[2][4];
    // Memory of scales behind the last key may have anything.
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    const float4 low = mine[0] < live ? at.scales(sh, mine[0]) : none, high = mine[1] < live ? at.scales(sh, mine[1]) : none;
    const float4 all[2] = {lane < live ? at.scales(sh, lane) : none, lane + 32 < live ? at.scales(sh, lane + 32) : none};
    float greatest = fmaxf(fmaxf(fmaxf(all[0].x, all[0].y), fmaxf(all[0].z, all[0].w)), fmaxf(fmaxf(all[1].x, all[1].y), fmaxf(all[1].z, all[1].w)));
#pragma unroll
    for (int i = 1; i < 32; i *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, i));
    const int before = sh.exponent[group ^ 1], exponent = max(before, min((int)((__float_as_uint(greatest) + 0x7fffff) >> 23), 253));
    const float down = __int_as_float((254 - exponent) << 23);
    by[0][0] = low.x * down, by[0][1] = low.y * down, by[0][2] = low.z * down, by[0][3] = low.w * down;
    by[1][0] = high.x * down, by[1][1] = high.y * down, by[1][2] = high.z * down, by[1][3] = high.w * down;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const float2 f = *(const float2*)(sh.factor + j * 8 + t * 2);
#pragma unroll
      for (int i = 0; i < 4; i++) x[j][i] = s[j][i] * (i % 2 ? f.y : f.x);
    }
    if (masked) {
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int limit = live;
          if (p.causal) limit = min(limit, limit - w.s.queries + positionOf(p, w.block * Place::ROWS + j * 8 + t * 2 + e) + 1);
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (mine[i] >= limit) x[j][2 * i + e] = -LEAN_INF;
        }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) v[i] = fmaxf(x[i / 2][i % 2], x[i / 2][2 + i % 2]);
    across(v, lane, [](float a, float b) { return fmaxf(a, b); });
    float* const most = sh.most + group * 4 * N;
    if (OWN >= 8 || (lane & 4) == 0)
#pragma unroll
      for (int e = 0; e < EACH; e++) most[warp * N + columnOf(lane) + e] = v[e];
    again ? ThreadGroup{0, WARPS, TAKEN + group}.sync() : Base::syncGroup(group); // the group's warps meet at either
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const int c = j * 8 + t * 2;
      const float2 old = *(const float2*)(sh.largest + (group ^ 1) * N + c);
      float top[2] = {old.x, old.y};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float2 m = *(const float2*)(most + k * N + c);
        top[0] = fmaxf(top[0], m.x), top[1] = fmaxf(top[1], m.y);
      }
      if (j % 4 == warp && g == 0) {
        *(float2*)(sh.largest + group * N + c) = make_float2(top[0], top[1]);
        *(float2*)(sh.shrink + group * N + c) = make_float2(Merge(top[0]).weight(old.x), Merge(top[1]).weight(old.y));
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const RowWeights<Math> weights(top[e]);
        const float a = weights.of(x[j][e]), b = weights.of(x[j][2 + e]);
        v[2 * j + e] = a + b;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
          const u32 two = Operand::pack(a * by[0][k], b * by[1][k]);
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(sh.weights + (group * GROUPS + k) * WEIGHTS + swizzled(c + e, warp * 32 + g * 4)), "r"(two) : "memory");
        }
      }
    }
    if (threadIdx.x % 128 == 0) sh.exponent[group] = exponent, sh.ratio[group] = __int_as_float(max(127 + before - exponent, 0) << 23);
    fenceAsync();
    ThreadGroup{0, WARPS, WEIGHED + group}.arrive();
    across(v, lane, [](float a, float b) { return a + b; });
    Base::syncGroup(group);
#pragma unroll
    for (int e = 0; e < EACH; e++) st.l[e] = st.l[e] * sh.shrink[group * N + columnOf(lane) + e] + v[e];
  }

  // Adds a group's columns of a chunk's values, multiplied by the weights that group `by` has made. Values behind `live` keys are cleared:
  // the memory may have anything, and 0 times NaN is NaN.
  __device__ static __forceinline__ void add(const Shared& sh, State& st, const Ring& at, int by, int live, int group, int lane) {
    constexpr int HALF = VALUES / 2; // blocks of a group
    const int warp = threadIdx.x / 32 % 4, matrix = lane >> 3, r = lane & 7;
    bool one = true;
    float2 f[TILES];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      f[j] = *(const float2*)(sh.shrink + by * N + j * 8 + (lane & 3) * 2);
      f[j].x *= sh.ratio[by], f[j].y *= sh.ratio[by];
      one = one && f[j].x == 1.f && f[j].y == 1.f;
    }
    if (!__all_sync(~0u, one)) {
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) st.o[b][j][i] *= i % 2 ? f[j].y : f[j].x;
    }
    if (live < KEYS) {
#pragma unroll 1
      for (int i = live * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
#pragma unroll
        for (int b = 0; b < HALF; b++)
          asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(at.row(sh, i / 8) + (group * HALF + b) * BLOCK + i % 8 * 16), "r"(0) : "memory");
      fenceAsync(); // before the copy engine's next chunk
      Base::syncGroup(group);
    }
    // Column 2i of weights is row i of keyOf, and column 2i + 1 row i + 8. A lane gets the elements of two keys and two columns: its
    // matrices are of the columns' 8 weights, twice, of two pieces.
    const int key = keyOf((matrix & 1) * 4 + r / 2 + (r & 1) * 8);
    const u32 turn = (u32)(key & 7) << 4;
    const u64 weights = rowOperand(sh.weights + (by * GROUPS + group * 2) * WEIGHTS);
    u32 a[2][4][4], rows[2], raw[2][2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) rows[h] = at.row(sh, (h * 2 + matrix / 2) * 16) + key * ROW + group * HALF * BLOCK;
    const auto fetch = [&](int b) {
      const u32 from = b / 2 * BLOCK + (b % 2 * 64 + warp * 16 ^ turn);
#pragma unroll
      for (int h = 0; h < 2; h++) loadMatrixTransposed(raw[b % 2][h], rows[h] + from);
    };
    fetch(0);
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (b < 3) fetch(b + 1);
      if (b >= 2) {
        wgmmaWait<1>();
        held(a[b % 2]);
      }
      u32(&to)[4][4] = a[b % 2];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 y = __byte_perm(raw[b % 2][h][i], 0, 0x3120);
          to[2 * h + i / 2][i % 2 * 2] = halvesOf(y), to[2 * h + i / 2][i % 2 * 2 + 1] = halvesOf(y >> 16);
        }
      pinned(st.o[b]);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; k++) addRows<Math>(st.o[b], to[k], behind(weights, b / 2 * WEIGHTS + k * 32));
      wgmmaCommit();
    }
    // Products have the loads' results, so the copy engine cannot overtake a load.
    __syncwarp();
    if (lane < PIECES) barrierArrive(sh.empty + at.slot(sh, lane) * 8);
    wgmmaWait<0>();
#pragma unroll
    for (int b = 0; b < 4; b++) held(a[b % 2]), pinned(st.o[b]);
  }

  // Waits for the weights that the other group makes.
  __device__ static __forceinline__ void await(const Shared& sh, State& st, int group, int lane) {
    ThreadGroup{0, WARPS, WEIGHED + (group ^ 1)}.sync();
#pragma unroll
    for (int e = 0; e < EACH; e++) st.l[e] *= sh.shrink[(group ^ 1) * N + columnOf(lane) + e];
  }
  // Adds the values of the chunk whose weights the other group has made.
  __device__ static __forceinline__ void take(const Shared& sh, State& st, const Ring& at, int live, int group, int lane) {
    at.wait(sh);
    add(sh, st, at, group ^ 1, live, group, lane);
    ThreadGroup{0, WARPS, TAKEN + (group ^ 1)}.arrive();
  }

  // Computes the chunks of an output tile's part. n: the number of the first chunk, which is at `at`. A group makes weights before it adds the values
  // of the chunk before, so that the groups wait for each other's weights alone.
  __device__ static __forceinline__ void chunks(const Params& p, const Place& w, const Shared& sh, Ring& at, State& st, int n, int group, int lane) {
    int all = w.s.keys; // keys that every row sees
    if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * Place::ROWS) + 1;
    Ring before = at;
    if ((n & 1) != group) at.next(sh);
    const int begin = w.chunk + ((n & 1) != group);
#pragma unroll 1
    for (int c = begin; c < w.end; c += 2) {
      float s[TILES][4];
      scores(sh, at, s, lane);
      if (c > w.chunk) await(sh, st, group, lane);
      weigh(p, w, sh, st, s, at, c * KEYS, (c + 1) * KEYS > all, c > begin, group, lane);
      if (c > w.chunk) take(sh, st, before, w.s.keys - (c - 1) * KEYS, group, lane);
      add(sh, st, at, group, w.s.keys - c * KEYS, group, lane);
      at.next(sh), before = at, at.next(sh);
    }
    if (((n + w.end - w.chunk) & 1) == group) { // the other group's chunk is the last one
      await(sh, st, group, lane);
      take(sh, st, before, w.s.keys - (w.end - 1) * KEYS, group, lane);
    } else {
      at = before;
    }
    if (begin < w.end) ThreadGroup{0, WARPS, TAKEN + group}.sync();
  }

  // Writes an output tile, or a part of an output tile. by: the group that has had the last chunk.
  __device__ static __forceinline__ void leave(const Params& p, const typename R::Tile& tile, const Shared& sh, const State& st, int by, int slot, int group, int lane) {
    const int warp = threadIdx.x / 32, g = lane >> 2, t = lane & 3;
    const ThreadGroup workers{0, WARPS, READY};
    const float lifted = 0x1p-15f, power = __int_as_float(sh.exponent[by] << 23);
    static_assert(Math::lift == 15, "lifted undoes the lift");
    workers.sync(); // the outputs' memory: queries, weights and maxima have been used
    if (OWN >= 8 || (lane & 4) == 0)
#pragma unroll
      for (int e = 0; e < EACH; e++) sh.sums[warp * N + columnOf(lane) + e] = st.l[e] * lifted;
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float(&o)[4] = st.o[b][j];
          float* const to = sh.outputs + (j * 8 + t * 2 + e) * STRIDE + group * SHARE + b * 64 + warp % 4 * 16;
          const float2 two = make_float2(o[e] * lifted * power, o[2 + e] * lifted * power);
          *(float2*)(to + g * 2) = two;
        }
    workers.sync();
#pragma unroll 1
    for (int r = warp; r < tile.rows; r += WARPS) {
      float l = 0.f;
#pragma unroll
      for (int k = 0; k < WARPS; k++) l += sh.sums[k * N + r];
      const float m = sh.largest[by * N + r];
#pragma unroll
      for (int i = lane * 4; i < 2 * SHARE; i += 128) {
        const int c = i / SHARE * SHARE + i % SHARE; // column i % SHARE of group i / SHARE
        const float4 o = *(const float4*)(sh.outputs + r * STRIDE + i);
        const typename R::Destination to(p, tile, slot, r, c, nullptr);
        if (slot < 0) {
          R::store(p, to, o, m, l);
        } else {
          __stcg((float4*)to.to, o);
          if (to.statistics != nullptr) __stcg((float2*)to.statistics, make_float2(m, l));
        }
      }
    }
  }

  __device__ static __forceinline__ void run(const LatentColumnsParams& a) {
    extern __shared__ __align__(1024) char memory[];
    const Params& p = a.p;
    const Work* const range = p.work + blockIdx.x;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool together = range->wholeSeq == TOGETHER;
    if (range->tiles == 0) {
      waitForEarlier();
      if (warp < WARPS) R::writeFullyMasked(p, *p.masked);
      if (together && warp == 0) R::pass(a.meet);
      return;
    }
    const Shared sh(p, memory);
    if (threadIdx.x == 0) {
      prefetchMap(&a.restMap), prefetchMap(&a.keyMap);
      for (int s = 0; s < sh.pieces; s++) barrierInit(sh.full + s * 8, 1), barrierInit(sh.empty + s * 8, WARPS);
      barrierInit(sh.begun, WARPS);
      opened();
    }
    __syncthreads();
    const typename R::Shares shares(*range);
    if (warp >= WARPS) {
      fewerRegisters<24>();
      if (warp == PRODUCER) {
        produce(a, range, sh, lane);
        if (together) R::look(a.meet, shares, sh.reduce, lane);
      } else if (warp == COUNTER && together) {
        waitForEarlier();
        barrierWait(sh.begun, 0); // all have read the launch's number
        R::begin(a.meet, ThreadGroup{lane, 1, BEGUN}, shares, sh.reduce);
      }
      return;
    }
    moreRegisters<240>();
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    const u32 run = together ? R::nextRun(a.meet) : 0;
    __syncwarp();
    if (lane == 0) barrierArrive(sh.begun); // the COUNTER warp goes on then
    const ThreadGroup workers{(int)threadIdx.x, WARPS, READY};
    const int group = warp / 4;
    int n = 0; // chunks of the output tiles before
    Ring at = {0, 0};
    const typename R::Tile begin(p, range);
    State st;
    Place w;
    w.begin(p, range);
    bool more = true;
#pragma unroll 1
    while (more) {
      workers.sync(); // the last output tile's outputs and statistics
      loadQueries(p, w, sh, warp, lane);
      if (threadIdx.x < 2 * N) sh.largest[threadIdx.x] = -LEAN_INF;
      if (threadIdx.x < 2) sh.exponent[threadIdx.x] = 1;
      st.empty();
      fenceAsync();
      workers.sync();
      chunks(p, w, sh, at, st, n, group, lane);
      n += w.end - w.chunk;
      const Place done = w;
      more = w.next(p);
      const typename R::Tile tile(p, done);
      leave(p, tile, sh, st, n - 1 & 1, R::slotOf(done), group, lane);
      if (together && R::slotOf(done) >= 0) Base::Merging::publish(a.meet.tagged, workers, R::slotOf(done), run);
      if (done.endsParts()) together ? Base::Merging::mergeTogether(p, a.meet.tagged, workers, shares, begin, tile, sh.reduce, run, lane) : Base::Merging::settle(p, workers, shares, begin, tile, sh.reduce, lane);
    }
    R::writeFullyMasked(p, *p.masked);
  }
};
#define LATENT_COLUMNS(name, ...) \
  extern "C" __global__ void __launch_bounds__(12 * 32, 1) name(const __grid_constant__ LatentColumnsParams p) { LatentColumns<__VA_ARGS__>::run(p); }
#else // other GPUs have no products of warp groups
#define LATENT_COLUMNS(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ LatentColumnsParams p) {}
#endif
