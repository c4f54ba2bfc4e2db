// Decode attention to keys whose first elements are the values: the latents of multi-head latent attention (MLA), one row
// for all heads. Compute capability 9.0 alone.
//
// An output tile has up to 64 rows: query positions x heads. A chunk is 64 keys. Products have the queries as rows, so the
// maxima and sums of a row's scores stay in four lanes. A chunk lies in shared memory once, as blocks of 64 columns of its
// keys. Both products read the same blocks.
//
// Two warp groups compute. They take turns with chunks: a group computes the scores and the weights of each second chunk, its
// scores while the other group makes weights. Outputs are split by columns: each group has half of them, and adds the values
// of all chunks. One warp brings keys: two blocks of values at a time, and the block without values.
//
// PRECISE: queries and weights are sums of two parts, which are rows side by side. A pass over the keys then has 32 rows.
//
// Ranges of LeanTiles, partials and their merging are as in attn_lean.cuh.
#pragma once
#include "attn_latent_merge.cuh"
#include "attn_latent_products.cuh"

// Launch parameters.
struct LatentParams {
  TensorMap map; // of keys, boxes of `box` rows of 64 columns
  Params p;
  MeetParams meet;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// T is the Format of keys, D_ the width of keys, VALUES the width of values, ROWS_ the rows of output tiles.
template <class T, int D_, int VALUES, bool PRECISE_, int ROWS_ = 64> struct LatentShape {
  using Store = typename T::Store;
  using Math = typename T::Math;
  struct Variant : Plain {
    enum : int { ROWS = 64 }; // of an output tile
  };
  // If a range without whole output tiles has a wholeHead, wholeHead is the number of sequences. Then the first output tiles of all sequences
  // come first, then all second ones, and so on: thread blocks read the keys of a sequence's output tiles at the same time.
  struct Place : Walk<64, Variant> {
    __device__ __forceinline__ bool next(const Params& p) {
      const int sequences = this->work->wholeTiles > 0 ? 0 : this->work->wholeHead;
      if (sequences == 0) return Walk<64, Variant>::next(p);
      this->tile = 0;
      if ((this->left -= this->take) <= 0) return false;
      do {
        if (++this->seq == sequences) this->seq = 0, this->block++;
        this->s = p.seqs[this->seq];
        this->tiles = this->block * Variant::ROWS < this->s.queries * p.group ? this->count(p) : 0;
      } while (this->tiles == 0);
      this->open(p);
      return true;
    }
  };
  enum : int { MERGE_WARPS = 8, IN_FLIGHT = 16 }; // of Reduce
  static_assert(T::ready && Math::Operand::bytes == 2, "what is in shared memory is multiplied as it is");
  static constexpr bool PRECISE = PRECISE_;
  static constexpr int KEYS = 64, KEY_DIM = D_, D = VALUES, WIDTH = D; // D: of an output
  static constexpr int BLOCK = KEYS * 128;                             // bytes of 64 columns of a chunk
  static constexpr int BLOCKS = KEY_DIM / 64, VALUE_BLOCKS = D / 64;
  static_assert(BLOCKS == VALUE_BLOCKS + 1 && (D == 512 || D == 256), "a chunk is a block without values, and two blocks of values for each unit");
  static constexpr int ROWS = PRECISE ? 32 : ROWS_;      // of a pass over the keys
  static constexpr int QUERY = (PRECISE ? 64 : ROWS) * 128; // bytes of 64 columns of queries
  static constexpr int QUERIES = BLOCKS * QUERY, WEIGHTS = (PRECISE ? 64 : ROWS) * 128; // bytes: of all, and of a chunk's weights
  // The ring has units of two blocks of values, and beside it one of blocks without values.
  static constexpr int UNITS = VALUE_BLOCKS / 2; // of a chunk
  static constexpr int STATISTICS = 2048;        // bytes behind the ring, at most
  static constexpr int BEHIND = (64 - (PRECISE ? 64 : ROWS)) * 128; // bytes behind the queries, which products read as further rows
  static constexpr int FITTING = (227 * 1024 - WEIGHTS - QUERIES - BEHIND - STATISTICS) / BLOCK;
  static constexpr int RESTS = FITTING / BLOCKS + (FITTING - FITTING / BLOCKS) % 2, SLOTS = (FITTING - RESTS) / 2;
  static_assert(RESTS >= 2 && SLOTS >= 2 * UNITS, "a chunk of each warp group");
};

template <class T, int D_, int VALUES, bool PRECISE_, int ROWS_ = 64>
struct Latent : LatentShape<T, D_, VALUES, PRECISE_, ROWS_> {
  using S = LatentShape<T, D_, VALUES, PRECISE_, ROWS_>;
  using typename S::Math, typename S::Place;
  using Operand = typename Math::Operand;
  using S::BLOCK, S::BLOCKS, S::D, S::KEYS, S::KEY_DIM, S::PRECISE, S::QUERIES, S::QUERY, S::RESTS, S::ROWS, S::SLOTS, S::UNITS, S::VALUE_BLOCKS, S::WEIGHTS;
  static constexpr int WARPS = 8;               // of the two warp groups that compute
  static constexpr int HALF = VALUE_BLOCKS / 2; // blocks of a group
  static constexpr int PRODUCER = WARPS, COUNTER = WARPS + 1;
  static constexpr int EACH = PRECISE ? 1 : 2; // rows that a lane has
  static constexpr int EARLY = UNITS / 2; // units of a chunk whose products come before the last chunk's values: the products take about as long as weights
  using R = Reduce<S>;
  using Merging = LatentMerge<R, D>;
  static_assert(S::MERGE_WARPS == WARPS, "all warps that compute merge");
  // Named barriers: 1 of both groups; a group's own from GROUP on; from WEIGHED on: the weights of a group's chunk are there.
  enum : int { READY = 1, GROUP = 2, BEGUN = 4, WEIGHED = 8 };

  // How often the keys are read.
  __device__ static __forceinline__ int passes(const Params& p) { return PRECISE && p.rows > ROWS ? 2 : 1; }

  // The contents of shared memory. Products have 64 rows. Behind fewer rows of queries or weights, products read whatever follows: no
  // warp reads these rows of sums.
  struct Shared {
    u32 query, weights, ring, rests, full, empty, fullRests, emptyRests, begun;
    float* largest; // of each row, by the group that has had a chunk
    float* shrink;  // the same: the factor of outputs
    float* factor;  // of each row: makes scores of products
    float* sums;    // of each row's weights, by group
    float* outputs; // where the queries are
    typename R::Shared reduce;
    __device__ __forceinline__ Shared(char* memory) {
      weights = sharedAddress(memory), query = weights + WEIGHTS, ring = query + QUERIES + S::BEHIND, rests = ring + SLOTS * 2 * BLOCK;
      outputs = (float*)(memory + WEIGHTS);
      largest = (float*)(memory + WEIGHTS + QUERIES + S::BEHIND + (2 * SLOTS + RESTS) * BLOCK), shrink = largest + 2 * ROWS, sums = shrink + 2 * ROWS, factor = sums + 2 * ROWS;
      reduce.last = (int*)(factor + ROWS);
      begun = sharedAddress(reduce.last + 4), full = begun + 16, empty = full + SLOTS * 8, fullRests = empty + SLOTS * 8, emptyRests = fullRests + RESTS * 8;
    }
  };
  static_assert(7 * ROWS * 4 + 32 + 16 * (SLOTS + RESTS) <= S::STATISTICS, "statistics and barriers do not fit");

  // Where chunk number n of a thread block is in the rings: the slots of the chunk's units and of its block without values, and the
  // parities of the phases of both slots.
  struct Ring {
    static constexpr bool EVEN = SLOTS % UNITS == 0;
    u32 n;
    __device__ __forceinline__ int slot(int k) const { return EVEN ? n * UNITS % SLOTS + k : (n * UNITS + k) % SLOTS; }
    __device__ __forceinline__ u32 parity(int k) const { return (n * UNITS + (EVEN ? 0 : k)) / SLOTS & 1; }
    __device__ __forceinline__ int rest() const { return n % RESTS; }
    __device__ __forceinline__ u32 restParity() const { return n / RESTS & 1; }
  };
  // Where block b of a group's values is.
  __device__ static __forceinline__ u32 valuesOf(const Shared& sh, const Ring& at, int b, int group) {
    const int of = group * HALF + b;
    return sh.ring + at.slot(of / 2) * (2 * BLOCK) + of % 2 * BLOCK;
  }

  // A warp gives back a slot that it has read.
  __device__ static __forceinline__ void release(u32 empty, int slot, int lane) {
    if (lane == 0) barrierArrive(empty + slot * 8);
  }

  // Lets a group's warps meet.
  __device__ static __forceinline__ void syncGroup(int group) {
    if (group == 0) ThreadGroup{0, 4, GROUP}.sync();
    else ThreadGroup{0, 4, GROUP + 1}.sync();
  }

  // The producer warp.
  __device__ static __forceinline__ void produce(const Params& p, const TensorMap* map, const Work* range, const Shared& sh, int lane) {
    constexpr int OUTSIDE = 0x7ffffff0; // a box outside of the array is zeros
    const int boxes = KEYS / p.box, times = passes(p);
    const u64 policy = p.streamed && times == 1 ? readOnce() : readAgain();
    Ring to = {0};
    bool waited = false;
#pragma unroll 1
    for (int pass = 0; pass < times; pass++) {
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
        // COUNT blocks of the chunk, from number `block` on, come to a slot.
        const auto fill = [&](auto count, int block, u32 memory, u32 full, u32 empty, int slot, u32 parity) {
          constexpr int COUNT = sizeof(count);
          const u32 bar = full + slot * 8, place = memory + slot * (COUNT * BLOCK);
          barrierWait(empty + slot * 8, parity);
          __syncwarp();
          if (lane == 0) barrierExpect(bar, COUNT * BLOCK);
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (lane + 32 * i < boxes)
#pragma unroll
              for (int b = 0; b < COUNT; b++) copyBox(place + b * BLOCK + (lane + 32 * i) * p.box * 128, map, 0, rows[i], block + b, bar, policy);
          __syncwarp();
        };
#pragma unroll 1
        for (int c = at.chunk; c < at.end; c++) {
          rows[0] = next[0], rows[1] = next[1];
          if (c + 1 < at.end) find(c + 1, next);
          if (!waited && (c + 1) * KEYS > old) waitForEarlier(), waited = true;
          fill(char(), VALUE_BLOCKS, sh.rests, sh.fullRests, sh.emptyRests, to.rest(), to.restParity() ^ 1);
#pragma unroll 1
          for (int u = 0; u < UNITS; u++) fill(short(), 2 * u, sh.ring, sh.full, sh.empty, to.slot(u), to.parity(u) ^ 1);
          to.n++;
        }
      } while (at.next(p));
    }
    if (!waited) waitForEarlier();
  }

  // The element at which the query of row r of an output tile begins.
  __device__ static __forceinline__ long long queryOf(const Params& p, const Place& w, int r) {
    const int i = w.block * Place::ROWS + r, n = positionOf(p, i);
    return (long long)(w.s.row + n) * p.queryRow + (w.head * p.group + i - n * p.group) * p.queryHead;
  }

  // Brings the queries of a pass to shared memory. A warp has whole rows, some of them on their way together.
  __device__ static __forceinline__ void loadQueries(const Params& p, const Place& w, const Shared& sh, int first, int warp, int lane) {
    constexpr int PIECES = (KEY_DIM + 127) / 128, TOGETHER = ROWS / WARPS < 4 ? ROWS / WARPS : 4; // pieces: four elements of a lane
    const int rows = w.rows(p) - first;
    if constexpr (!PRECISE) {
      if (p.queryType == Operand::type && (((u64)p.query | p.queryRow * 2 | p.queryHead * 2) & 15) == 0) { // operands as they are
        const int live = min(rows, ROWS);
#pragma unroll 2
        for (int r = warp; r < live; r += WARPS) {
          const char* const from = (const char*)p.query + queryOf(p, w, first + r) * 2;
#pragma unroll
          for (int c = lane * 16; c < KEY_DIM * 2; c += 512) copy16(sh.query + c / 128 * QUERY + swizzled(r, c % 128), from + c, true);
        }
#pragma unroll 1
        for (int i = live * 8 + threadIdx.x; i < ROWS * 8; i += WARPS * 32) // the other rows are computed, too
#pragma unroll
          for (int b = 0; b < BLOCKS; b++) asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(sh.query + b * QUERY + i * 16), "r"(0) : "memory");
        copyCommit();
        copyWait<0>();
        return;
      }
    }
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
  // Stores row r. Where operands are float16 in two parts, the row is multiplied by a power of two that makes the row's largest element
  // 2^8 to 2^9, and its scores by the inverse.
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
    if (PRECISE && lane == 0) sh.factor[r] = factor;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int c = i * 128 + lane * 4;
      if (c >= KEY_DIM) continue;
      const float v[4] = {x[i].x * up, x[i].y * up, x[i].z * up, x[i].w * up};
      const u32 lead[2] = {Operand::pack(v[0], v[1]), Operand::pack(v[2], v[3])};
      const u32 block = sh.query + c / 64 * QUERY, column = c % 64 * 2;
      const auto put = [&](int row, u32 a, u32 b) { asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(block + swizzled(row, column)), "r"(a), "r"(b) : "memory"); };
      if constexpr (PRECISE) {
        put(r / 8 * 16 + r % 8, lead[0], lead[1]);
        put(r / 8 * 16 + 8 + r % 8, Operand::pack(v[0] - Operand::low(lead[0]), v[1] - Operand::high(lead[0])), Operand::pack(v[2] - Operand::low(lead[1]), v[3] - Operand::high(lead[1])));
      } else {
        put(r, lead[0], lead[1]);
      }
    }
  }

  // A lane's row number e. PRECISE: the parts of a row are rows g and g + 8 of a warp's 16 rows of a product.
  __device__ static __forceinline__ int rowOf(int e, int lane) {
    const int warp = threadIdx.x / 32 % 4;
    return PRECISE ? warp * 8 + (lane >> 2) : warp * 16 + e * 8 + (lane >> 2);
  }

  // A group's part of the outputs of an output tile, and a lane's part of the sums of weights.
  struct State {
    float o[2][HALF * 4][4], l[EACH]; // o: of two blocks of columns each
    __device__ __forceinline__ void empty() {
#pragma unroll
      for (int e = 0; e < EACH; e++) l[e] = 0.f;
#pragma unroll
      for (int j = 0; j < HALF * 8; j++) o[j & 1][j / 2][0] = o[j & 1][j / 2][1] = o[j & 1][j / 2][2] = o[j & 1][j / 2][3] = 0.f;
    }
  };

  // Begins the products with the block without values of a chunk, with FROM = -1, and with the chunk's units [FROM, TO), as the units arrive.
  template <int FROM, int TO> __device__ static __forceinline__ void scores(const Shared& sh, const Ring& at, float (&s)[8][4]) {
    const auto multiply = [&](int block, u32 keys) {
      const u64 left = rowOperand(sh.query + block * QUERY), right = rowOperand(keys);
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<64>::template shared<Math>(s, behind(left, k * 32), behind(right, k * 32), 1);
    };
    pinned(s);
    if constexpr (FROM < 0) {
      barrierWait(sh.fullRests + at.rest() * 8, at.restParity());
      wgmmaFence();
      multiply(VALUE_BLOCKS, sh.rests + at.rest() * BLOCK);
      wgmmaCommit();
    }
#pragma unroll
    for (int u = FROM < 0 ? 0 : FROM; u < TO; u++) {
      const u32 keys = sh.ring + at.slot(u) * (2 * BLOCK);
      barrierWait(sh.full + at.slot(u) * 8, at.parity(u));
      wgmmaFence();
#pragma unroll
      for (int b = 0; b < 2; b++) multiply(2 * u + b, keys + b * BLOCK);
      wgmmaCommit();
    }
  }

  // How far the largest score may be above the base of weights, as a power of four. Lifted weights have no range to spare.
  static constexpr float SLACK = Math::lift > 0 ? 0.f : 4.f;

  // Makes weights, as operands in registers, of the scores of a chunk whose first key is number `key`. The rows' statistics go to
  // shared memory, and the factors of outputs also to `shrinks`.
  __device__ static __forceinline__ void weigh(const Params& p, const Place& w, const Shared& sh, State& st, const float (&s)[8][4], u32 (&weights)[4][4], float (&shrinks)[2], int first, int key, bool masked, int group, int lane) {
    constexpr int NUMBERS = EACH == 2 ? 2 : 1;
    float x[NUMBERS][16], top[NUMBERS];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const float factor = PRECISE ? sh.factor[rowOf(e, lane)] : p.scale;
#pragma unroll
      for (int i = 0; i < 16; i++) x[e][i] = (PRECISE ? s[i / 2][i % 2] + s[i / 2][2 + i % 2] : s[i / 2][2 * e + i % 2]) * factor;
    }
    if (masked) {
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        int limit = w.s.keys - key;
        if (p.causal) limit = min(limit, limit - w.s.queries + positionOf(p, w.block * Place::ROWS + first + rowOf(e, lane)) + 1);
#pragma unroll
        for (int i = 0; i < 16; i++)
          if (i / 2 * 8 + (lane & 3) * 2 + i % 2 >= limit) x[e][i] = -LEAN_INF;
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      float four[4]; // chains that take turns
#pragma unroll
      for (int i = 0; i < 16; i++) four[i % 4] = i < 4 ? x[e][i] : fmaxf(four[i % 4], x[e][i]);
      top[e] = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
      top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], 1));
      top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], 2));
      const int r = rowOf(e, lane);
      const float before = sh.largest[(group ^ 1) * ROWS + r];
      // The base of weights follows the largest score only if the score is far above the base: outputs are seldom multiplied.
      top[e] = top[e] - before <= SLACK ? before : fmaxf(top[e], before);
      const float shrink = Merge(top[e]).weight(before);
      shrinks[e] = shrinks[1] = shrink;
      if ((lane & 3) == 0) sh.largest[group * ROWS + r] = top[e], sh.shrink[group * ROWS + r] = shrink;
      const RowWeights<Math> of(top[e]);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        x[e][i] = of.of(x[e][i]);
        four[i % 4] = i < 4 ? x[e][i] : four[i % 4] + x[e][i];
      }
      st.l[e] = st.l[e] * shrink + ((four[0] + four[1]) + (four[2] + four[3]));
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float *const a = x[0] + 4 * k + 2 * i, *const b = x[NUMBERS - 1] + 4 * k + 2 * i;
        const u32 lead = Operand::pack(a[0], a[1]);
        weights[k][2 * i] = lead;
        weights[k][2 * i + 1] = PRECISE ? Operand::pack(a[0] - Operand::low(lead), a[1] - Operand::high(lead)) : Operand::pack(b[0], b[1]);
      }
  }

  // Gives the weights to the other group.
  __device__ static __forceinline__ void hand(const Shared& sh, const u32 (&weights)[4][4], bool idle, int group, int lane) {
    const int warp = threadIdx.x / 32 % 4;
    if (!idle)
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(sh.weights + swizzled(warp * 16 + i % 2 * 8 + (lane >> 2), k * 32 + i / 2 * 16 + (lane & 3) * 4)), "r"(weights[k][i]) : "memory");
    fenceAsync();
    ThreadGroup{0, WARPS, WEIGHED + group}.arrive();
  }

  // Multiplies a group's outputs.
  __device__ static __forceinline__ void scale(State& st, const float (&shrinks)[2]) {
    if (!__any_sync(~0u, shrinks[0] != 1.f || shrinks[1] != 1.f)) return;
#pragma unroll
    for (int j = 0; j < HALF * 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) st.o[j & 1][j / 2][i] *= shrinks[i / 2];
  }

  // Clears values behind `live` keys of a chunk: the memory may have anything, and 0 times NaN is NaN.
  __device__ static __forceinline__ void clear(const Shared& sh, const Ring& at, int live, int group) {
    if (live >= KEYS) return;
    syncGroup(group); // warps whose scores are still under way
#pragma unroll
    for (int b = 0; b < HALF; b++)
      for (int i = live * 8 + threadIdx.x % 128; i < KEYS * 8; i += 128)
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(valuesOf(sh, at, b, group) + i * 16), "r"(0) : "memory");
    fenceAsync();
    syncGroup(group);
  }

  // Begins to add the group's columns of a chunk's values, multiplied by weights: the group's own, or the weights that the other group
  // has handed over.
  template <bool OWN> __device__ static __forceinline__ void add(const Shared& sh, State& st, const u32 (&weights)[4][4], const Ring& at, int group, int lane) {
    const auto multiply = [&](auto& to, int b) { // from block b on
      const u64 first = columnOperand(valuesOf(sh, at, b, group), BLOCK), left = rowOperand(sh.weights);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) {
        const u64 v = behind(first, k * 2048);
        if constexpr (!OWN) addColumns<Math>(to, behind(left, k * 32), v);
        else Wgmma<sizeof(to) / 16 * 8>::template registers<Math>(to, weights[k], v);
      }
      wgmmaCommit();
    };
    if constexpr (PRECISE) { // added by an instruction that rounds: products truncate
#pragma unroll
      for (int b = 0; b < HALF; b++) {
        float sum[8][4];
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.f;
        pinned(sum);
        multiply(sum, b);
        wgmmaWait<0>();
        pinned(sum);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) st.o[b / (HALF / 2)][b % (HALF / 2) * 8 + j][i] += sum[j][i];
      }
    } else {
      pinned(st.o[0]), pinned(st.o[1]);
      multiply(st.o[0], 0);
      multiply(st.o[1], HALF / 2);
    }
  }
  // Ends the addition, MORE commits of products after it, and gives back the chunk's units.
  template <int MORE> __device__ static __forceinline__ void added(const Shared& sh, State& st, const Ring& at, int group, int lane) {
    constexpr int MINE = HALF / 2; // units
    if constexpr (MINE > 1 && !PRECISE) {
      wgmmaWait<MORE + 1>();
      pinned(st.o[0]);
      release(sh.empty, at.slot(group * MINE), lane);
    }
    if constexpr (!PRECISE) {
      wgmmaWait<MORE>();
      pinned(st.o[0]), pinned(st.o[1]);
    }
#pragma unroll
    for (int u = MINE > 1 && !PRECISE; u < MINE; u++) release(sh.empty, at.slot(group * MINE + u), lane);
  }

  // Begins to add the values of a chunk whose weights the other group makes.
  __device__ static __forceinline__ void take(const Shared& sh, State& st, const Ring& at, int live, bool idle, int group, int lane) {
    const u32 none[4][4] = {};
    ThreadGroup{0, WARPS, WEIGHED + (group ^ 1)}.sync();
    if (!idle) {
      float shrinks[2];
#pragma unroll
      for (int e = 0; e < 2; e++) shrinks[e] = sh.shrink[(group ^ 1) * ROWS + rowOf(e % EACH, lane)];
#pragma unroll
      for (int e = 0; e < EACH; e++) st.l[e] *= shrinks[e];
      scale(st, shrinks);
    }
    clear(sh, at, live, group);
    add<false>(sh, st, none, at, group, lane);
  }

  // The chunks of an output tile's part. n: the number of its first one.
  __device__ static __forceinline__ void chunks(const Params& p, const Place& w, const Shared& sh, State& st, int n, int first, int group, int lane) {
    int all = w.s.keys; // keys that every row sees
    if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * Place::ROWS + first) + 1;
    const bool idle = !PRECISE && rowOf(0, 0) >= w.rows(p) - first; // the warp has no rows of queries
    const auto at = [&](int c) { return Ring{(u32)(n + c - w.chunk)}; };
    const auto taken = [&](int c, int live) {
      take(sh, st, at(c), live, idle, group, lane);
      added<0>(sh, st, at(c), group, lane);
    };
#pragma unroll 1
    for (int c = w.chunk + ((n & 1) != group); c < w.end; c += 2) {
      float s[8][4];
#pragma unroll
      for (int j = 0; j < 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
      scores<-1, EARLY>(sh, at(c), s);
      if constexpr (PRECISE) {
        wgmmaWait<0>();
        pinned(s);
        if (c > w.chunk) taken(c - 1, KEYS);
        scores<EARLY, UNITS>(sh, at(c), s);
      } else {
        if (c > w.chunk) {
          take(sh, st, at(c - 1), KEYS, idle, group, lane);
          scores<EARLY, EARLY + 1>(sh, at(c), s);
          added<1>(sh, st, at(c - 1), group, lane);
        } else {
          scores<EARLY, EARLY + 1>(sh, at(c), s);
        }
        scores<EARLY + 1, UNITS>(sh, at(c), s);
      }
      wgmmaWait<0>();
      pinned(s);
      release(sh.emptyRests, at(c).rest(), lane); // no other product reads this block
      u32 weights[4][4] = {};
      float shrinks[2] = {1.f, 1.f};
      if (!idle) weigh(p, w, sh, st, s, weights, shrinks, first, c * KEYS, (c + 1) * KEYS > all, group, lane);
      syncGroup(group); // all warps have read the last weights
      hand(sh, weights, idle, group, lane);
      if (!idle) scale(st, shrinks);
      clear(sh, at(c), w.s.keys - c * KEYS, group);
      add<true>(sh, st, weights, at(c), group, lane);
      added<0>(sh, st, at(c), group, lane);
    }
    if (((n + w.end - w.chunk) & 1) == group) taken(w.end - 1, w.s.keys - (w.end - 1) * KEYS); // the other group's chunk is the last one
  }

  // Writes a pass's rows of an output tile, or of a part of one. `largest` has the rows' largest scores. The outputs go through the
  // memory of the queries, half of a group's columns at a time.
  static constexpr int PART = HALF * 32, STRIDE = 2 * PART + 8; // half a group's columns; floats between rows there, of these beside the other group's
  static_assert(ROWS * STRIDE * 4 <= QUERIES, "the outputs do not fit into the memory of the queries");
  __device__ static __forceinline__ void leave(const Params& p, const typename R::Tile& tile, const Shared& sh, State& st, const float* largest, int slot, int first, int group, int lane) {
    const int warp = threadIdx.x / 32;
    const ThreadGroup workers{0, WARPS, READY};
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      float l = st.l[e];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      if ((lane & 3) == 0 && rowOf(e, lane) < ROWS) sh.sums[group * ROWS + rowOf(e, lane)] = l;
    }
    const int rows = max(min(tile.rows - first, ROWS), 0), part = warp % 2; // a warp has a part's columns of each fourth row
    const float* const from = sh.outputs + part * PART + lane * 4;
    workers.sync(); // the queries, too
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half > 0) workers.sync();
#pragma unroll
      for (int j = 0; j < HALF * 4; j++)
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const float* const o = st.o[half][j];
          const float2 two = PRECISE ? make_float2(o[0] + o[2], o[1] + o[3]) : make_float2(o[2 * e], o[2 * e + 1]);
          if (rowOf(e, lane) < ROWS) *(float2*)(sh.outputs + rowOf(e, lane) * STRIDE + group * PART + j * 8 + (lane & 3) * 2) = two;
        }
      workers.sync();
      const int c = part * (D / 2) + half * PART + lane * 4;
#pragma unroll 4
      for (int r = lane * 4 < PART ? warp / 2 : rows; r < rows; r += WARPS / 2) {
        const float4 o = *(const float4*)(from + r * STRIDE);
        const float l = sh.sums[r] + sh.sums[ROWS + r];
        const typename R::Destination to(p, tile, slot, first + r, c, nullptr);
        if (slot < 0) {
          R::store(p, to, o, largest[r], l);
        } else {
          __stcg((float4*)to.to, o);
          if (to.statistics != nullptr) __stcg((float2*)to.statistics, make_float2(largest[r], l));
        }
      }
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
    const Shared sh(memory);
    if (threadIdx.x == 0) {
      prefetchMap(&a.map);
      for (int s = 0; s < SLOTS; s++) barrierInit(sh.full + s * 8, 1), barrierInit(sh.empty + s * 8, 4);
      for (int s = 0; s < RESTS; s++) barrierInit(sh.fullRests + s * 8, 1), barrierInit(sh.emptyRests + s * 8, 4);
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
    const ThreadGroup workers{(int)threadIdx.x, WARPS, READY};
    const int group = warp / 4;
    const int times = passes(p);
    int n = 0; // chunks of the block before
    const typename R::Tile begin(p, range);
    State st;
#pragma unroll 1
    for (int pass = 0; pass < times; pass++) {
      const int first = pass * ROWS;
      Place w;
      w.begin(p, range);
      bool more = true;
#pragma unroll 1
      while (more) {
        workers.sync(); // the last output tile's outputs and statistics
        loadQueries(p, w, sh, first, warp, lane);
        if (threadIdx.x < 2 * ROWS) sh.largest[threadIdx.x] = -LEAN_INF;
        st.empty();
        fenceAsync();
        workers.sync();
        chunks(p, w, sh, st, n, first, group, lane);
        n += w.end - w.chunk;
        const Place done = w;
        more = w.next(p);
        const typename R::Tile tile(p, done);
        leave(p, tile, sh, st, sh.largest + (n - 1 & 1) * ROWS, R::slotOf(done), first, group, lane);
        if (pass < times - 1) continue;
        if (together && R::slotOf(done) >= 0) Merging::publish(a.meet.tagged, workers, R::slotOf(done), run);
        if (done.endsParts()) together ? Merging::mergeTogether(p, a.meet.tagged, workers, shares, begin, tile, sh.reduce, run, lane) : Merging::settle(p, workers, shares, begin, tile, sh.reduce, lane);
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
