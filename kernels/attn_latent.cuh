// Decode attention to keys whose first elements are the values: the latents of multi-head latent attention (MLA), one row
// for all heads. Compute capability 9.0 alone.
//
// An output tile has up to 64 rows: query positions x heads. A chunk is 64 keys. Products have the keys as rows and the
// queries as columns,
//
//	scores = keys x queries,   output = values x weights (both transposed),
//
// so few heads take few products. A chunk lies in shared memory once, as blocks of 64 columns of its keys. Both products
// read the same blocks.
//
// Two warp groups compute. The groups take turns: the group whose turn it is computes the scores of a chunk, their
// weights, and what outputs are multiplied by if the largest score has changed. Then both groups add values, each for
// half of the columns. One warp brings keys, block by block.
//
// PRECISE: queries and weights are sums of two parts, which are columns side by side. Then 64 rows take two passes over
// the keys, with half of the rows each.
//
// Ranges of LeanTiles, partials and their merging are those of attn_lean.cuh.
#pragma once
#include "attn_reduce.cuh"
#include "wgmma.cuh"

// Launch parameters.
struct LatentParams {
  TensorMap map; // of keys, boxes of `box` rows of 64 columns
  Params p;
  MeetParams meet;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// T is the Format of keys, D_ their width, VALUES that of values, BLOCK_ROWS the rows of an output tile.
template <class T, int D_, int VALUES, int BLOCK_ROWS, bool PRECISE_> struct LatentShape {
  using Store = typename T::Store;
  using Math = typename T::Math;
  struct Variant : Plain {
    enum : int { ROWS = BLOCK_ROWS };
  };
  using Place = Walk<64, Variant>;
  enum : int { MERGE_WARPS = 8, IN_FLIGHT = 16 }; // of Reduce
  static_assert(T::ready && Math::Operand::bytes == 2, "what is in shared memory is multiplied as it is");
  static constexpr bool PRECISE = PRECISE_;
  static constexpr int KEYS = 64, KEY_DIM = D_, D = VALUES, WIDTH = D; // D: of an output
  static constexpr int BLOCK = KEYS * 128;                             // bytes of 64 columns of a chunk
  static constexpr int BLOCKS = KEY_DIM / 64, VALUE_BLOCKS = D / 64;
  static_assert(KEY_DIM % 64 == 0 && D % 128 == 0, "each warp group has whole blocks of values");
  static constexpr int PARTS = PRECISE ? 2 : 1;
  static constexpr int COLUMNS = BLOCK_ROWS * PARTS < 64 ? BLOCK_ROWS * PARTS : 64; // of a product
  static constexpr int ROWS = COLUMNS / PARTS, PASSES = BLOCK_ROWS / ROWS;         // rows of a pass over the keys
  static constexpr int QUERY = BLOCKS * COLUMNS * 128;                             // bytes
};

template <class T, int D_, int VALUES, int BLOCK_ROWS, bool PRECISE_> struct Latent : LatentShape<T, D_, VALUES, BLOCK_ROWS, PRECISE_> {
  using S = LatentShape<T, D_, VALUES, BLOCK_ROWS, PRECISE_>;
  using typename S::Math, typename S::Place;
  using Operand = typename Math::Operand;
  using S::BLOCK, S::BLOCKS, S::COLUMNS, S::D, S::KEYS, S::KEY_DIM, S::PASSES, S::PRECISE, S::QUERY, S::ROWS, S::VALUE_BLOCKS;
  static constexpr int WARPS = 8;              // that compute: two warp groups
  static constexpr int HALF = VALUE_BLOCKS / 2; // blocks of a group
  static constexpr int PRODUCER = WARPS, COUNTER = WARPS + 1;
  static constexpr int TILES = COLUMNS / 8;        // columns of a product, by eight
  static constexpr int EACH = PRECISE ? 1 : 2;     // rows that a lane has of eight columns
  static constexpr int WEIGHTS = KEYS * 128;       // bytes of a chunk's weights: rows of 64 columns
  using R = Reduce<S>;
  static_assert(S::MERGE_WARPS == WARPS, "all warps that compute merge");
  // Named barriers: 1 of both groups; FREE: a chunk's weights are not needed any more; a group's own from GROUP on.
  enum : int { READY = 1, FREE = 2, GROUP = 3, BEGUN = 5 };

  // What lies in shared memory behind the ring of `slots` blocks.
  struct Shared {
    u32 ring, query, weights, full, empty, begun;
    float* largest; // of each row, by the group that has had a chunk
    float* shrink;  // the same: what outputs are multiplied by
    float* factor;  // of each row: makes scores of products
    float* perWarp; // of each warp, a number for each row
    int* shrinks;   // of each group two: whether some output is multiplied
    float* outputs; // where the queries are
    typename R::Shared reduce;
    __device__ __forceinline__ Shared(char* memory, int slots) {
      ring = sharedAddress(memory), query = ring + slots * BLOCK, weights = query + QUERY;
      outputs = (float*)(memory + slots * BLOCK);
      char* rest = memory + slots * BLOCK + QUERY + WEIGHTS;
      perWarp = (float*)rest, largest = perWarp + WARPS * ROWS, shrink = largest + 2 * ROWS, factor = shrink + 2 * ROWS;
      shrinks = (int*)(factor + ROWS), reduce.last = shrinks + 4;
      begun = sharedAddress(reduce.last + 4), full = begun + 16, empty = full + slots * 8;
    }
  };

  // Of a group's warps.
  __device__ static __forceinline__ void syncGroup(int group) {
    if (group == 0) ThreadGroup{0, 4, GROUP}.sync();
    else ThreadGroup{0, 4, GROUP + 1}.sync();
  }

  // A place in the ring: the first block of a chunk.
  struct Cursor {
    int slot = 0;
    u32 parity;
    __device__ __forceinline__ explicit Cursor(u32 parity) : parity(parity) {}
    __device__ __forceinline__ void next(int slots, int blocks) {
      if ((slot += blocks) >= slots) slot -= slots, parity ^= 1;
    }
    // Block b behind it.
    __device__ __forceinline__ Cursor at(int b, int slots) const {
      Cursor c = *this;
      c.next(slots, b);
      return c;
    }
  };

  // The producer warp.
  __device__ static __forceinline__ void produce(const Params& p, const TensorMap* map, const Work* range, const Shared& sh, int lane) {
    constexpr int OUTSIDE = 0x7ffffff0; // a box outside of the array is zeros
    const u64 policy = p.streamed && PASSES == 1 ? readOnce() : readAgain();
    const int boxes = KEYS / p.box, slots = p.slots;
    Cursor to(1);
    bool waited = false;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      Place at;
      at.begin(p, range);
      do {
        const int head = at.head * p.headRows, old = p.early ? at.s.keys - at.s.queries : 0;
        // A lane has boxes `lane` and lane + 32 of a chunk: the row of keys where each begins.
        const auto find = [&](int c, int (&rows)[2]) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int b = lane + 32 * i, key = c * KEYS + b * p.box;
            rows[i] = OUTSIDE;
            if (b >= boxes) continue;
            if (p.pages == nullptr) {
              rows[i] = at.s.pages * p.pageRows + head + key;
            } else if (key < at.s.keys) {
              const int n = key / p.pageTokens;
              rows[i] = p.pages[at.s.pages + n] * p.pageRows + head + key - n * p.pageTokens;
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
          for (int b = 0; b < BLOCKS; b++) {
            const u32 bar = sh.full + to.slot * 8, block = sh.ring + to.slot * BLOCK;
            barrierWait(sh.empty + to.slot * 8, to.parity);
            __syncwarp();
            if (lane == 0) barrierExpect(bar, BLOCK);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; i++)
              if (lane + 32 * i < boxes) copyBox(block + (lane + 32 * i) * p.box * 128, map, 0, rows[i], b, bar, policy);
            __syncwarp();
            to.next(slots, 1);
          }
        }
      } while (at.next(p));
    }
    if (!waited) waitForEarlier();
  }

  // The query of row r of an output tile's rows begins there, in elements.
  __device__ static __forceinline__ long long queryOf(const Params& p, const Place& w, int r) {
    const int i = w.block * Place::ROWS + r, n = positionOf(p, i);
    return (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + i - n * p.group) * p.queryHead;
  }

  // Brings the queries of a pass to shared memory. A warp has whole rows, some of them on their way together.
  __device__ static __forceinline__ void loadQueries(const Params& p, const Place& w, const Shared& sh, int first, int warp, int lane) {
    constexpr int PIECES = (KEY_DIM + 127) / 128, TOGETHER = ROWS / WARPS < 4 ? ROWS / WARPS : 4; // pieces: four elements of a lane
    const int rows = w.rows(p) - first;
#pragma unroll 1
    for (int begin = warp; begin < ROWS; begin += TOGETHER * WARPS) {
      float4 x[TOGETHER][PIECES];
      withStore(p.queryType, [&](auto s) {
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
          const int r = begin + k * WARPS;
          const long long at = queryOf(p, w, first + (r < rows ? r : 0)) + lane * 4;
#pragma unroll
          for (int i = 0; i < PIECES; i++) {
            x[k][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (r < rows && i * 128 + lane * 4 < KEY_DIM) x[k][i] = decltype(s)::load4(p.query, at + i * 128);
          }
        }
      });
#pragma unroll
      for (int k = 0; k < TOGETHER; k++) putQuery(p, sh, x[k], begin + k * WARPS, lane);
    }
  }
  // Row r. Where operands have few exponents and there are two parts, the row is multiplied by a power of two that makes its
  // largest element 2^8 to 2^9, and its scores by another that undoes it.
  template <int PIECES> __device__ static __forceinline__ void putQuery(const Params& p, const Shared& sh, float4 (&x)[PIECES], int r, int lane) {
    float up = 1.f, factor = p.scale;
    if constexpr (PRECISE && Math::narrow) {
      float top = 0.f;
#pragma unroll
      for (int i = 0; i < PIECES; i++) top = fmaxf(fmaxf(top, fmaxf(fabsf(x[i].x), fabsf(x[i].y))), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
#pragma unroll
      for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      const int e = max((int)(__float_as_uint(top) >> 23) - 127 - 8, -118);
      up = __int_as_float((127 - e) << 23), factor *= __int_as_float((127 + e) << 23);
    }
    if (lane == 0) sh.factor[r] = factor;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int c = i * 128 + lane * 4;
      if (c >= KEY_DIM) continue;
      const float v[4] = {x[i].x * up, x[i].y * up, x[i].z * up, x[i].w * up};
      const u32 lead[2] = {Operand::pack(v[0], v[1]), Operand::pack(v[2], v[3])};
      const u32 block = sh.query + c / 64 * (COLUMNS * 128), column = c % 64 * 2;
      const auto put = [&](int row, u32 a, u32 b) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(block + swizzled(row, column)), "r"(a), "r"(b) : "memory"); };
      if constexpr (PRECISE) {
        put(2 * r, lead[0], lead[1]);
        put(2 * r + 1, Operand::pack(v[0] - Operand::low(lead[0]), v[1] - Operand::high(lead[0])), Operand::pack(v[2] - Operand::low(lead[1]), v[3] - Operand::high(lead[1])));
      } else {
        put(r, lead[0], lead[1]);
      }
    }
  }

  // The row of a lane's column e of eight columns number j.
  __device__ static __forceinline__ int rowOf(int j, int e, int lane) { return PRECISE ? 4 * j + (lane & 3) : 8 * j + 2 * (lane & 3) + e; }

  // Numbers of a lane's rows among eight columns number j.
  struct Rows {
    float of[EACH];
    __device__ __forceinline__ Rows(const float* all, int j, int lane) {
      if constexpr (PRECISE) {
        of[0] = all[rowOf(j, 0, lane)];
      } else {
        const float2 two = *(const float2*)(all + rowOf(j, 0, lane));
        of[0] = two.x, of[1] = two.y;
      }
    }
  };

  // A group's part of the outputs of an output tile, and a lane's part of the sums of weights.
  struct State {
    float o[HALF][TILES][4], l[TILES][EACH];
    __device__ __forceinline__ void empty() {
#pragma unroll
      for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int e = 0; e < EACH; e++) l[j][e] = 0.f;
#pragma unroll
        for (int b = 0; b < HALF; b++) o[b][j][0] = o[b][j][1] = o[b][j][2] = o[b][j][3] = 0.f;
      }
    }
  };

  // The scores of a chunk, block by block as they come. Products that add to the same numbers are slow one behind the other, so
  // several sums take turns.
  __device__ static __forceinline__ void scores(const Shared& sh, const Cursor& from, float (&s)[TILES][4], int slots) {
    constexpr int SUMS = 64 / COLUMNS; // of 64 columns there are no registers for more
    float sums[SUMS][TILES][4];
#pragma unroll
    for (int n = 0; n < SUMS; n++)
#pragma unroll
      for (int j = 0; j < TILES; j++) sums[n][j][0] = sums[n][j][1] = sums[n][j][2] = sums[n][j][3] = 0.f;
    Cursor at = from;
#pragma unroll 1
    for (int b = 0; b < BLOCKS; b++) {
      barrierWait(sh.full + at.slot * 8, at.parity);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<COLUMNS>::template shared<Math>(sums[k % SUMS], rowOperand(sh.ring + at.slot * BLOCK + k * 32), rowOperand(sh.query + b * (COLUMNS * 128) + k * 32), 1);
      wgmmaCommit();
      at.next(slots, 1);
    }
    wgmmaWait<0>();
#pragma unroll
    for (int n = 0; n < SUMS; n++) pinned(sums[n]);
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[j][i] = sums[0][j][i];
        if (SUMS > 1) s[j][i] += sums[1 % SUMS][j][i];
        if (SUMS > 2) s[j][i] += sums[2 % SUMS][j][i] + sums[3 % SUMS][j][i];
      }
  }

  // The weights of a chunk, which go to shared memory. The chunk begins with key number `key`.
  __device__ static __forceinline__ void weigh(const Params& p, const Place& w, const Shared& sh, const Cursor& from, State& st, int first, int key, bool masked, int group, int lane) {
    const int warp = threadIdx.x / 32 % 4, g = lane >> 2, slots = p.slots;
    float s[TILES][4];
    scores(sh, from, s, slots);
#pragma unroll 1
    for (int b = VALUE_BLOCKS; b < BLOCKS; b++) // nothing else reads these
      if (lane == 0) barrierArrive(sh.empty + from.at(b, slots).slot * 8);

    float x[TILES][EACH][2]; // of keys g and g + 8 of the warp's
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const float factor = PRECISE ? sh.factor[rowOf(j, 0, lane)] : p.scale;
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int i = 0; i < 2; i++) x[j][e][i] = (PRECISE ? s[j][2 * i] + s[j][2 * i + 1] : s[j][2 * i + e]) * factor;
    }
    if (masked) {
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          int limit = w.s.keys - key;
          if (p.causal) limit = min(limit, limit - w.s.queries + positionOf(p, w.block * Place::ROWS + first + rowOf(j, e, lane)) + 1);
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (warp * 16 + i * 8 + g >= limit) x[j][e][i] = -LEAN_INF;
        }
    }
    // The largest of the warp's 16 keys. Where lanes have several rows, they share them out: each keeps half of the rows at a step.
    float top[TILES * EACH];
    int mine = 0; // number of the first row that the lane has kept
#pragma unroll
    for (int k = 0; k < TILES * EACH; k++) top[k] = fmaxf(x[k / EACH][k % EACH][0], x[k / EACH][k % EACH][1]);
    constexpr int KEPT = TILES * EACH < 8 ? 1 : TILES * EACH / 8;
#pragma unroll
    for (int i = 4, count = TILES * EACH; i < 32; i *= 2) {
      const bool halves = count > 1, upper = halves && lane & i;
      if (halves) count /= 2, mine += upper ? count : 0;
#pragma unroll
      for (int k = 0; k < TILES * EACH / 2; k++) {
        if (k >= count) continue;
        const float low = top[k], high = halves ? top[k + count] : low;
        top[k] = fmaxf(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, i));
      }
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) sh.perWarp[warp * ROWS + rowOf((mine + k) / EACH, (mine + k) % EACH, lane)] = top[k];
    syncGroup(group);
    // The largest scores are those of all warps, and of the other group, which had the chunk before.
    if (warp * 32 < ROWS) {
      const int r = threadIdx.x % 128 % ROWS;
      const float before = sh.largest[(group ^ 1) * ROWS + r], now = fmaxf(fmaxf(fmaxf(sh.perWarp[r], sh.perWarp[ROWS + r]), fmaxf(sh.perWarp[2 * ROWS + r], sh.perWarp[3 * ROWS + r])), before);
      sh.largest[group * ROWS + r] = now, sh.shrink[group * ROWS + r] = Merge(now).weight(before);
      const int shrinks = __any_sync(~0u, now != before);
      if (lane == 0) sh.shrinks[group * 2 + warp] = shrinks;
    }
    ThreadGroup{0, WARPS, FREE}.sync(); // the last chunk's weights, too
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const Rows top(sh.largest + group * ROWS, j, lane), shrink(sh.shrink + group * ROWS, j, lane);
      float v[EACH][2];
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const RowWeights<Math> weights(top.of[e]);
        v[e][0] = weights.of(x[j][e][0]), v[e][1] = weights.of(x[j][e][1]);
        st.l[j][e] = st.l[j][e] * shrink.of[e] + (v[e][0] + v[e][1]);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 pair = PRECISE ? Operand::pack(v[0][i], v[0][i] - Operand::low(Operand::pack(v[0][i], 0.f))) : Operand::pack(v[0][i], v[EACH - 1][i]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(sh.weights + swizzled(warp * 16 + i * 8 + g, j * 16 + (lane & 3) * 4)), "r"(pair) : "memory");
      }
    }
    fenceAsync();
  }

  // Multiplies a group's outputs, and its sums of weights unless it has done that. whose: of the group that had the chunk.
  __device__ static __forceinline__ void scale(const Shared& sh, State& st, int whose, bool sums, int lane) {
    const int2 shrinks = *(const int2*)(sh.shrinks + whose * 2);
    if ((shrinks.x | shrinks.y) == 0) return;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
      const Rows shrink(sh.shrink + whose * ROWS, j, lane);
      if (!__any_sync(~0u, shrink.of[0] != 1.f || shrink.of[EACH - 1] != 1.f)) continue;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        if (sums) st.l[j][e] *= shrink.of[e];
#pragma unroll
        for (int b = 0; b < HALF; b++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            st.o[b][j][2 * i + e] *= shrink.of[e];
            if (PRECISE) st.o[b][j][2 * i + 1] *= shrink.of[e];
          }
      }
    }
  }

  // Adds values, multiplied by weights, to a group's columns. `live` keys of the chunk are there.
  __device__ static __forceinline__ void add(const Params& p, const Shared& sh, const Cursor& from, State& st, int live, int group, int lane) {
    const int slots = p.slots;
    Cursor at[HALF] = {from, from, from, from};
#pragma unroll
    for (int b = 0; b < HALF; b++) {
      at[b] = from.at(group * HALF + b, slots); // the keys are there: the scores are made of them
    }
    if (live < KEYS) { // what lies behind may be anything, and 0 times NaN is NaN
#pragma unroll
      for (int b = 0; b < HALF; b++)
        for (int i = live * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
          asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(sh.ring + at[b].slot * BLOCK + i * 16), "r"(0) : "memory");
      fenceAsync();
      syncGroup(group);
    }
    const auto multiply = [&](float (&to)[TILES][4], int b, int k) {
      Wgmma<COLUMNS>::template columns<Math>(to, columnOperand(sh.ring + at[b].slot * BLOCK + k * 2048, 1024), columnOperand(sh.weights + k * 2048, 1024));
    };
    const auto release = [&](int b) {
      if (lane == 0) barrierArrive(sh.empty + at[b].slot * 8);
    };
    if constexpr (PRECISE) { // added by an instruction that rounds: products cut off
#pragma unroll
      for (int b = 0; b < HALF; b++) {
        float sum[TILES][4];
#pragma unroll
        for (int j = 0; j < TILES; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.f;
        wgmmaFence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) multiply(sum, b, k);
        wgmmaCommit();
        wgmmaWait<0>();
        pinned(sum);
        release(b);
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) st.o[b][j][i] += sum[j][i];
      }
    } else {
#pragma unroll
      for (int b = 0; b < HALF; b++) pinned(st.o[b]);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int b = 0; b < HALF; b++) multiply(st.o[b], b, k);
      wgmmaCommit();
      wgmmaWait<0>();
#pragma unroll
      for (int b = 0; b < HALF; b++) pinned(st.o[b]), release(b);
    }
  }
  static_assert(HALF == 4, "a group has four blocks of values");

  // Writes a pass's rows of an output tile, or of a part of one. `largest` has the rows' largest scores. The outputs, which are
  // columns of products, go through the memory of the queries, half of them at a time.
  static constexpr int STRIDE = 260; // floats between rows there, of half a group's columns beside half of the other's
  static_assert(ROWS * STRIDE * 4 <= QUERY, "the outputs do not fit into the memory of the queries");
  __device__ static __forceinline__ void leave(const Params& p, const typename R::Tile& tile, const Shared& sh, State& st, const float* largest, int slot, u64* tagged, u32 run, int first, int group, int lane) {
    const int warp = threadIdx.x / 32, g = lane >> 2;
    const ThreadGroup workers{0, WARPS, READY};
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        float l = st.l[j][e];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) l += __shfl_xor_sync(~0u, l, i);
        if (g == 0) sh.perWarp[warp * ROWS + rowOf(j, e, lane)] = l;
      }
    workers.sync();
    float* const sums = sh.shrink; // of each row, of all warps
    if (threadIdx.x < ROWS) {
      float l = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) l += sh.perWarp[i * ROWS + threadIdx.x];
      sums[threadIdx.x] = l;
    }
    const int rows = max(min(tile.rows - first, ROWS), 0), part = threadIdx.x / 32 % 2; // a warp has 128 columns of each fourth row
    const float* const from = sh.outputs + part * 128 + lane * 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half > 0) workers.sync();
#pragma unroll
      for (int j = 0; j < TILES; j++)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          float* const to = sh.outputs + rowOf(j, e, lane) * STRIDE + group * 128 + warp % 4 * 16 + g;
#pragma unroll
          for (int b = 0; b < 2; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const float* const o = st.o[half * 2 + b][j] + 2 * i;
              to[b * 64 + i * 8] = PRECISE ? o[0] + o[1] : o[e];
            }
        }
      workers.sync();
      const int c = part * (D / 2) + half * 128 + lane * 4;
      if (slot >= 0 && tagged != nullptr) {
        u64* const row = tagged + ((long long)slot * p.rows + first) * (D + 2);
#pragma unroll 4
        for (int r = warp / 2; r < rows; r += WARPS / 2) {
          const float4 o = *(const float4*)(from + r * STRIDE);
          u64* const to = row + r * (D + 2) + c;
          storeTagged2(to, run, o.x, o.y), storeTagged2(to + 2, run, o.z, o.w);
        }
        if (half == 0 && threadIdx.x < rows) storeTagged2(row + threadIdx.x * (D + 2) + D, run, largest[threadIdx.x], sums[threadIdx.x]);
        continue;
      }
#pragma unroll 1
      for (int r = warp / 2; r < rows; r += WARPS / 2) {
        const float4 o = *(const float4*)(from + r * STRIDE);
        const typename R::Destination to(p, tile, slot, first + r, c, nullptr);
        if (slot < 0) {
          R::store(p, to, o, largest[r], sums[r]);
        } else {
          __stcg((float4*)to.to, o);
          if (to.statistics != nullptr) __stcg((float2*)to.statistics, make_float2(largest[r], sums[r]));
        }
      }
    }
  }

  // Merges every so many of the pieces of an output tile that few thread blocks share: 128 columns of a row. EACH partials are on
  // their way together.
  template <int EACH> __device__ static __forceinline__ void mergePieces(const Params& p, const u64* tagged, const typename R::Tile& tile, u32 run, int host, int sharers, int from, int step) {
    constexpr int PIECES = D / 128;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int piece = from; piece < tile.rows * PIECES; piece += step) {
      const int r = piece / PIECES, c = piece % PIECES * 128 + lane * 4;
      float m = -LEAN_INF, l = 0.f;
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int k = 0; k < sharers; k += EACH) {
        float m2[EACH], l2[EACH];
        float4 o2[EACH];
        bool missing;
        do {
          missing = false;
#pragma unroll
          for (int i = 0; i < EACH; i++) {
            const u64* const words = tagged + (long long)R::placeOf(p, host, min(k + i, sharers - 1), r) * (D + 2);
            missing |= !loadTagged2(words + D, run, m2[i], l2[i]);
            missing |= !loadTagged2(words + c, run, o2[i].x, o2[i].y);
            missing |= !loadTagged2(words + c + 2, run, o2[i].z, o2[i].w);
          }
        } while (__any_sync(~0u, missing));
        float top = m;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          if (k + i >= sharers) m2[i] = -LEAN_INF, l2[i] = 0.f, o2[i] = make_float4(0.f, 0.f, 0.f, 0.f);
          top = fmaxf(top, m2[i]);
        }
        const Merge all(top);
        const float before = all.weight(m);
        m = top, l *= before, o.x *= before, o.y *= before, o.z *= before, o.w *= before;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const float f = all.weight(m2[i]);
          l += f * l2[i], o.x += f * o2[i].x, o.y += f * o2[i].y, o.z += f * o2[i].z, o.w += f * o2[i].w;
        }
      }
      R::store(p, typename R::Destination(p, tile, -1, r, c, nullptr), o, m, l);
    }
  }

  // As Reduce::mergeTogether. FEW sharers have so many pieces each that all warps are busy.
  __device__ static __forceinline__ void mergeTogether(const Params& p, const u64* tagged, const ThreadGroup& workers, const typename R::Shares& shares, typename R::Tile tile, const typename R::Tile& last, const typename R::Shared& sh, u32 run) {
    constexpr int FEW = 16;
    R::LOOKED.sync();
    int host = shares.host, sharers = shares.sharers;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      const int does = sh.last[k];
      if (does != R::NOTHING_OF_IT) {
        const bool all = does == R::ALL_OF_IT;
        const int from = (all ? 0 : (int)blockIdx.x - host) * workers.warps + workers.thread / 32, step = (all ? 1 : sharers) * workers.warps;
        if (sharers <= 2) mergePieces<2>(p, tagged, tile, run, host, sharers, from, step);
        else if (sharers <= FEW) mergePieces<8>(p, tagged, tile, run, host, sharers, from, step);
        else R::mergeColumns(p, tagged, tile, run, host, sharers, from, step);
      }
      tile = last, host = blockIdx.x, sharers = shares.guests;
    }
  }

  // Merges all partials of an output tile, in the order of the blocks. A warp has whole rows.
  __device__ static __forceinline__ void mergeAll(const Params& p, const ThreadGroup& workers, const typename R::Tile& tile, int host, int sharers) {
    constexpr int PIECES = D / 128;
    const int lane = workers.thread % 32;
#pragma unroll 1
    for (int r = workers.thread / 32; r < tile.rows; r += workers.warps) {
      float m = -LEAN_INF, l = 0.f;
      float4 o[PIECES];
#pragma unroll
      for (int i = 0; i < PIECES; i++) o[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
      for (int k = 0; k < sharers; k++) {
        const long long at = R::placeOf(p, host, k, r);
        const float2 s = __ldcg((const float2*)R::statistics(p) + at);
        const float top = fmaxf(m, s.x);
        const Merge both(top);
        const float before = both.weight(m), now = both.weight(s.x);
        m = top, l = l * before + s.y * now;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const float4 x = __ldcg((const float4*)(p.partials + at * D) + i * 32 + lane);
          o[i].x = o[i].x * before + x.x * now, o[i].y = o[i].y * before + x.y * now, o[i].z = o[i].z * before + x.z * now, o[i].w = o[i].w * before + x.w * now;
        }
      }
#pragma unroll
      for (int i = 0; i < PIECES; i++) R::store(p, typename R::Destination(p, tile, -1, r, i * 128 + lane * 4, nullptr), o[i], m, l);
    }
  }

  // As Reduce::settle.
  __device__ static __forceinline__ void settle(const Params& p, const ThreadGroup& workers, const typename R::Shares& shares, typename R::Tile tile, const typename R::Tile& last, const typename R::Shared& sh) {
    int host = shares.host, sharers = shares.sharers;
    if (!R::arriveAll(p, workers, shares, sh)) return;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      if (sh.last[k]) mergeAll(p, workers, tile, host, sharers);
      tile = last, host = blockIdx.x, sharers = shares.guests;
    }
  }

  __device__ static __forceinline__ void run(const LatentParams& a) {
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
    const Shared sh(memory, p.slots);
    if (threadIdx.x == 0) {
      prefetchMap(&a.map);
      for (int s = 0; s < p.slots; s++) barrierInit(sh.full + s * 8, 1), barrierInit(sh.empty + s * 8, 4);
      barrierInit(sh.begun, WARPS);
      opened();
    }
    __syncthreads();
    const typename R::Shares shares(*range);
    if (warp >= WARPS) {
      fewerRegisters<24>();
      if (warp == PRODUCER) {
        produce(p, &a.map, range, sh, lane);
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
    if (lane == 0) barrierArrive(sh.begun); // the other warp counts
    u64* const tagged = together ? a.meet.tagged : nullptr;
    const ThreadGroup workers{(int)threadIdx.x, WARPS, READY};
    const int group = warp / 4;
    Cursor from(0);
    int turn = 0; // of the group that has the next chunk
    const typename R::Tile begin(p, range);
    State st;
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
      const int first = pass * ROWS;
      Place w;
      w.begin(p, range);
      bool more = true;
#pragma unroll 1
      while (more) {
        workers.sync(); // the last output tile's queries and statistics
        loadQueries(p, w, sh, first, warp, lane);
        if (threadIdx.x < 4) sh.shrinks[threadIdx.x] = 0;
        if (threadIdx.x < 2 * ROWS) sh.largest[threadIdx.x] = -LEAN_INF;
        st.empty();
        fenceAsync();
        workers.sync();
        int all = w.s.keys; // keys that every row sees
        if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * Place::ROWS + first) + 1;
#pragma unroll 1
        for (int c = w.chunk; c < w.end; c++, turn ^= 1) {
          if (turn == group) {
            weigh(p, w, sh, from, st, first, c * KEYS, (c + 1) * KEYS > all, group, lane);
          } else {
            ThreadGroup{0, WARPS, FREE}.arrive();
          }
          workers.sync(); // weights are there
          scale(sh, st, turn, turn != group, lane);
          add(p, sh, from, st, w.s.keys - c * KEYS, group, lane);
          from.next(p.slots, BLOCKS);
        }
        const Place done = w;
        more = w.next(p);
        const typename R::Tile tile(p, done);
        leave(p, tile, sh, st, sh.largest + (turn ^ 1) * ROWS, R::slotOf(done), tagged, run, first, group, lane);
        if (pass == PASSES - 1 && done.endsParts()) together ? mergeTogether(p, tagged, workers, shares, begin, tile, sh.reduce, run) : settle(p, workers, shares, begin, tile, sh.reduce);
      }
    }
    R::writeFullyMasked(p, *p.masked);
  }
};
#define LATENT_ATTENTION(name, ...) \
  extern "C" __global__ void __launch_bounds__(12 * 32, 1) name(const __grid_constant__ LatentParams p) { Latent<__VA_ARGS__>::run(p); }
#else // other GPUs have no products of warp groups
#define LATENT_ATTENTION(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ LatentParams p) {}
#endif
