// Decode attention to latents of E4M3: keys whose first 512 elements are the values, in groups of 128 that share a scale, and whose other
// 64 elements are bfloat16. Compute capability 9.0 alone.
//
// Warp groups, chunks, ranges of LeanTiles and partials are as in attn_latent.cuh. A third warp group brings keys: the group loads keys to
// registers, makes float16 of E4M3, which is exact, and stores keys as the blocks that both products read. The parts of a chunk are the
// groups. The values of the owner's columns come first, where the owner is the warp group that makes the chunk's weights.
//
//   - Scores: before the products with a group are added, the sums so far are multiplied by a factor that makes them sums of that group's scale.
//   - Weights are multiplied by the key's scale, once for each group. A running power of two, which no scale exceeds, keeps weights in the
//     range of float16. Outputs are multiplied by the power when they leave.
#pragma once
#include "attn_latent.cuh"
#include "attn_latent_products.cuh"

struct LatentNarrowParams {
  Params p;
  MeetParams meet;
  const void* rest;    // elements behind the values, in bfloat16
  const float* scales; // of groups of values, a key's side by side
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Brings 128 bytes into the L2 cache.
__device__ __forceinline__ void fetchLine(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }

struct LatentNarrow {
  using Math = MmaF16;
  // States leave without the lift of float16: they may have values that float16 has not.
  using Base = Latent<AsBF16, 576, 512, false>;
  using R = Base::R;
  using Place = Base::Place;
  static constexpr int WARPS = Base::WARPS, KEYS = Base::KEYS, ROWS = Base::ROWS, KEY_DIM = Base::KEY_DIM, D = Base::D, BLOCK = KEYS * 128;
  static constexpr int BLOCKS = KEY_DIM / 64, QUERIES = BLOCKS * ROWS * 128, WEIGHTS = ROWS * 128; // bytes of all queries, and of a chunk's weights
  static constexpr int GROUPS = 4, REST = GROUPS, PARTS = GROUPS + 1; // of a chunk: groups, and the elements behind the values
  static constexpr int EARLY = 4;                                     // groups of a chunk whose products come before the last chunk's values
  static constexpr int SLOT = BLOCKS * BLOCK;                         // bytes of a chunk in the ring of two, that of each warp group
  enum : int { READY = Base::READY, BEGUN = Base::BEGUN, WEIGHED = Base::WEIGHED };
  enum : int { LOOKER = 0, COUNTER = 1 }; // warps of the group that brings keys

  struct Shared : Base::Shared {
    float* scales; // by slot and place in the order of groups, of each key: the factor that makes sums sums of the next group's scale; last, the scale
    int4* exponents; // by slot: of the powers of two that no scale of a warp's keys exceeds
    __device__ __forceinline__ Shared(char* memory) : Base::Shared(memory) {
      ring = sharedAddress(memory), query = ring + 2 * SLOT, weights = query + QUERIES;
      outputs = (float*)(memory + 2 * SLOT), sums = (float*)(memory + 2 * SLOT + QUERIES);
      scales = (float*)(memory + 2 * SLOT + QUERIES + WEIGHTS);
      largest = scales + 2 * GROUPS * KEYS, shrink = largest + ROWS, factor = shrink + ROWS;
      exponents = (int4*)(factor + ROWS);
      reduce.last = (int*)(exponents + 2);
      begun = sharedAddress(reduce.last + 4), full = begun + 16, empty = full + 2 * PARTS * 8;
    }
    __device__ __forceinline__ u32 fullOf(int slot, int part) const { return full + (slot * PARTS + part) * 8; }
    __device__ __forceinline__ u32 emptyOf(int slot, int part) const { return empty + (slot * PARTS + part) * 8; }
  };
  // The group at place k of the order of the chunks in a slot. A warp group's own are at places 0 and 1, the other's at 2 and 3.
  __device__ static __forceinline__ int groupAt(int slot, int k) { return k ^ slot * 2; }

  // Brings all chunks. Of each 16 keys a warp has four. A lane has 16 elements of each part of a key, one for each 16 keys: lanes 0 to 7
  // have the elements of a pair of keys, since the elements' places in shared memory are then in different banks.
  template <class Meanwhile> __device__ static __forceinline__ void produce(const LatentNarrowParams& a, const Work* range, const Shared& sh, int warp, int lane, const Meanwhile& meanwhile) {
    constexpr int STEPS = GROUPS * 4, AHEAD = STEPS / 2;
    const Params& p = a.p;
    const int mine = warp * 4 + (lane >> 4) * 2 + (lane >> 2 & 1), side = lane >> 3 & 1, column = lane & 3;
    Place at;
    at.begin(p, range);
    int chunk = at.chunk;
    bool waited = false, more = true; // more: there is a next chunk
    int found;                        // the row of the lane's key of the next chunk, a key of two lanes; behind the last key, the row of the last key
    bool live;
    const auto find = [&]() {
      if (!more) return;
      const int n = chunk * KEYS + lane % 16 / 4 * 16 + warp * 4 + lane % 4, key = min(n, at.s.keys - 1), head = at.head * p.headRows;
      live = n == key;
      if (p.pages == nullptr) {
        found = at.s.pages * p.pageRows + head + key;
      } else {
        const int page = key / p.pageTokens;
        found = p.pages[at.s.pages + page] * p.pageRows + head + key - page * p.pageTokens;
      }
const char* const value = (const char*)p.keys + (long long)found * D + lane / 16 * 256;
      fetchLine(value), fetchLine(value + 128);
      if (lane < 16) fetchLine((const char*)a.rest + (long long)found * 128);
    };
    int rows[4];
    const char* from[4];
    float4 scales;
    const auto turn = [&](int slot) { // goes to the chunk that was found, and finds the next one
      if (!waited && (chunk + 1) * KEYS > (p.early ? at.s.keys - at.s.queries : 0)) waitForEarlier(), waited = true;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        rows[k] = __shfl_sync(~0u, found, k * 4 + mine % 4);
        from[k] = (const char*)p.keys + (long long)rows[k] * D + (slot * 256 + side * 64 + column * 16);
      }
      scales = live ? __ldcg((const float4*)a.scales + found) : make_float4(0.f, 0.f, 0.f, 0.f);
      if (more && ++chunk >= at.end) more = at.next(p), chunk = at.chunk;
      find();
    };
    uint4 raw[AHEAD];
    const auto load = [&](int i) { raw[i % AHEAD] = __ldcg((const uint4*)(from[i % 4] + i / 4 * 128)); };
    find();
    turn(0);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load(i);
    meanwhile();
    const u32 to = sh.ring + side * BLOCK + mine * 128 + (column * 2 ^ mine & 7) * 16, restTo = sh.ring + SLOT - BLOCK + mine * 128 + (column + side * 4 ^ mine & 7) * 16;
    bool last = false;
#pragma unroll 1
    for (int n = 0; !last; n++) {
      const int slot = n & 1;
      const u32 parity = (n >> 1 & 1) ^ 1, values[2] = {to + slot * (SLOT + 4 * BLOCK), to + slot * (SLOT - 4 * BLOCK) + 4 * BLOCK};
      int exponent;
#pragma unroll
      for (int k = 0; k < 4; k++) from[k] -= slot * 512; // the groups at the other places
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        if (i % 4 == 0) barrierWait(sh.emptyOf(slot, groupAt(slot, i / 4)), parity);
        if (i == 0) {
          float greatest = fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w));
#pragma unroll
          for (int h = 1; h < 16; h *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, h));
          exponent = min((int)((__float_as_uint(greatest) + 0x7fffff) >> 23), 253);
          // A group of zeros, whose scale is the least, takes the scale of the group before.
          float s[4] = {slot ? scales.z : scales.x, slot ? scales.w : scales.y, slot ? scales.x : scales.z, slot ? scales.y : scales.w};
          float* const of = sh.scales + slot * GROUPS * KEYS + lane / 4 * 16 + warp * 4 + lane % 4;
          if (lane < 16) {
#pragma unroll
            for (int k = 1; k < 4; k++) {
              if (s[k] <= 0x1p-126f) s[k] = s[k - 1];
              const float r = s[k] > 0.f ? __fdividef(s[k - 1], s[k]) : 1.f;
              of[(k - 1) * KEYS] = r > 0x1p100f ? 0x1p100f : r;
            }
            of[3 * KEYS] = s[3];
          }
        }
        if (i == AHEAD) {
          barrierWait(sh.emptyOf(slot, REST), parity);
          if (lane == 0) ((int*)(sh.exponents + slot))[warp] = exponent;
#pragma unroll
          for (int k = 0; k < 4; k++) copy16(restTo + slot * SLOT + k * 16 * 128, (const char*)a.rest + (long long)rows[k] * 128 + (side * 64 + column * 16), true);
          copyCommit();
          last = !more;
          turn(slot ^ 1);
        }
        const uint4 x = raw[i % AHEAD];
        const u32 block = values[i / AHEAD] + i / 4 % 2 * 2 * BLOCK + i % 4 * 16 * 128;
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(block), "r"(halvesOf(x.x)), "r"(halvesOf(x.x >> 16)), "r"(halvesOf(x.y)), "r"(halvesOf(x.y >> 16)) : "memory");
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"((values[i / AHEAD] ^ 16) + i / 4 % 2 * 2 * BLOCK + i % 4 * 16 * 128), "r"(halvesOf(x.z)), "r"(halvesOf(x.z >> 16)), "r"(halvesOf(x.w)), "r"(halvesOf(x.w >> 16)) : "memory");
        load((i + AHEAD) % STEPS);
        if (i % 4 == 3) {
          __syncwarp();
          if (lane == 0) barrierArrive(sh.fullOf(slot, groupAt(slot, i / 4)));
        }
      }
      copyWait<0>();
      __syncwarp();
      if (lane == 0) barrierArrive(sh.fullOf(slot, REST));
    }
    if (!waited) waitForEarlier();
  }

  // Brings an output tile's queries to shared memory. A row is multiplied by a power of two that makes the row's largest element 2^8 to 2^9,
  // and its scores by the inverse.
  __device__ static __forceinline__ void loadQueries(const Params& p, const Place& w, const Shared& sh, int warp, int lane) {
    constexpr int PIECES = (KEY_DIM + 127) / 128, TOGETHER = 4; // pieces: four elements of a lane; together: rows on their way
    const int rows = w.rows(p);
#pragma unroll 1
    for (int begin = warp; begin < ROWS; begin += TOGETHER * WARPS) {
      float4 x[TOGETHER][PIECES];
      const auto load = [&](auto s) {
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
          const int r = begin + k * WARPS;
          const long long at = Base::queryOf(p, w, r < rows ? r : 0) + lane * 4;
#pragma unroll
          for (int i = 0; i < PIECES; i++) {
            x[k][i] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (r < rows && i * 128 + lane * 4 < KEY_DIM) x[k][i] = decltype(s)::load4(p.query, at + i * 128);
          }
        }
      };
      if (p.queryType == BFloat16::type) load(BFloat16());
      else if (p.queryType == Float16::type) load(Float16());
      else load(Float32());
#pragma unroll
      for (int k = 0; k < TOGETHER; k++) {
        const int r = begin + k * WARPS;
        float top = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; i++) top = fmaxf(fmaxf(top, fmaxf(fabsf(x[k][i].x), fabsf(x[k][i].y))), fmaxf(fabsf(x[k][i].z), fabsf(x[k][i].w)));
#pragma unroll
        for (int i = 1; i < 32; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        const int e = max((int)(__float_as_uint(top) >> 23) - 127 - 8, -118);
        const float up = __int_as_float((127 - e) << 23);
        if (lane == 0) sh.factor[r] = p.scale * __int_as_float((127 + e) << 23);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const int c = i * 128 + lane * 4;
          if (c >= KEY_DIM) continue;
          const float v[4] = {x[k][i].x * up, x[k][i].y * up, x[k][i].z * up, x[k][i].w * up};
          const u32 two[2] = {c < D ? Float16::pack(v[0], v[1]) : BFloat16::pack(v[0], v[1]), c < D ? Float16::pack(v[2], v[3]) : BFloat16::pack(v[2], v[3])};
          asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(sh.query + c / 64 * (64 * 128) + swizzled(r, c % 64 * 2)), "r"(two[0]), "r"(two[1]) : "memory");
        }
      }
    }
  }

  struct State : Base::State {
    int exponent; // of the power of two that no scale of the chunks so far exceeds; outputs are in units of the power
    __device__ __forceinline__ void empty() { Base::State::empty(), exponent = 1; }
    // Adds the scales of the chunk in a slot. Returns the factor of outputs.
    __device__ __forceinline__ float raise(const Shared& sh, int slot) {
      const int4 e = sh.exponents[slot];
      const int before = exponent;
      exponent = max(max(max(e.x, e.y), max(e.z, e.w)), before);
      return __int_as_float(max(127 + before - exponent, 0) << 23);
    }
  };

  // Adds the products with a block of the chunk to the chunk's scores.
  template <class Math> __device__ static __forceinline__ void products(const Shared& sh, float (&s)[8][4], int slot, int block) {
    const u64 left = rowOperand(sh.query + block * (64 * 128)), right = rowOperand(sh.ring + slot * SLOT + block * BLOCK);
#pragma unroll
    for (int k = 0; k < 4; k++) Wgmma<64>::template shared<Math>(s, behind(left, k * 32), behind(right, k * 32), 1);
  }
  // Adds the products with the groups at places [FROM, TO), and behind the last group those with the rest.
  template <int FROM, int TO> __device__ static __forceinline__ void scores(const Shared& sh, int slot, u32 parity, float (&s)[8][4], int lane) {
    const float* const scales = sh.scales + slot * GROUPS * KEYS + (lane & 3) * 2;
#pragma unroll
    for (int k = FROM; k < TO; k++) {
      const int g = groupAt(slot, k);
      barrierWait(sh.fullOf(slot, g), parity);
      float2 f[8];
#pragma unroll
      for (int j = 0; j < 8; j++) f[j] = *(const float2*)(scales + k * KEYS + j * 8);
      fenceAsync(); // for the warps that brought the part
      pinned(s);
      wgmmaFence();
      products<Math>(sh, s, slot, 2 * g);
      products<Math>(sh, s, slot, 2 * g + 1);
      wgmmaCommit();
      wgmmaWait<0>();
      pinned(s);
#pragma unroll
      for (int j = 0; j < 8; j++) s[j][0] *= f[j].x, s[j][1] *= f[j].y, s[j][2] *= f[j].x, s[j][3] *= f[j].y;
    }
    if constexpr (FROM < GROUPS && TO == GROUPS) {
      barrierWait(sh.fullOf(slot, REST), parity);
      fenceAsync();
      pinned(s);
      wgmmaFence();
      products<MmaBF16>(sh, s, slot, 2 * GROUPS);
      wgmmaCommit();
      wgmmaWait<0>();
      pinned(s);
    }
  }

  // Makes weights of the scores of a chunk whose first key is number `key`: the weights of a group's own columns as operands in registers,
  // and the weights of the other group's columns in shared memory.
  __device__ static __forceinline__ void weigh(const Params& p, const Place& w, const Shared& sh, State& st, const float (&s)[8][4], u32 (&own)[2][4][4], float (&shrinks)[2], int key, bool masked, int group, int lane) {
    const int warp = threadIdx.x / 32 % 4, t = lane & 3;
    float x[2][16];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float factor = sh.factor[Base::rowOf(e, lane)];
#pragma unroll
      for (int i = 0; i < 16; i++) x[e][i] = s[i / 2][2 * e + i % 2] * factor;
    }
    if (masked) {
      asm volatile("" ::: "memory"); // a branch
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int limit = w.s.keys - key;
        if (p.causal) limit = min(limit, limit - w.s.queries + positionOf(p, w.block * Place::ROWS + Base::rowOf(e, lane)) + 1);
#pragma unroll
        for (int i = 0; i < 16; i++)
          if (i / 2 * 8 + t * 2 + i % 2 >= limit) x[e][i] = -LEAN_INF;
      }
    }
    const float ratio = st.raise(sh, group);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = Base::rowOf(e, lane);
      const float before = sh.largest[r];
      float four[4]; // chains that take turns
#pragma unroll
      for (int i = 0; i < 16; i++) four[i % 4] = i < 4 ? x[e][i] : fmaxf(four[i % 4], x[e][i]);
      float top = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(fmaxf(top, before), __shfl_xor_sync(~0u, top, 2));
      const float shrink = Merge(top).weight(before);
      if (t == 0) sh.largest[r] = top, sh.shrink[r] = shrink;
      const RowWeights<Math> of(top);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        x[e][i] = of.of(x[e][i]);
        four[i % 4] = i < 4 ? x[e][i] : four[i % 4] + x[e][i];
      }
      st.l[e] = st.l[e] * shrink + ((four[0] + four[1]) + (four[2] + four[3]));
      shrinks[e] = shrink * ratio;
    }
    Base::syncGroup(group); // all warps have the scores, and have read the last weights
    const float down = __int_as_float((254 - st.exponent) << 23);
    const float* const scales = sh.scales + group * GROUPS * KEYS + t * 2;
    const u32 row = swizzled(warp * 16 + (lane >> 2), t * 4), places[2] = {sh.weights, sh.ring + group * SLOT + SLOT - BLOCK};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float2 f = make_float2(down, down);
#pragma unroll
      for (int k = 3; k >= 0; k--) {
        const float2 by = *(const float2*)(scales + k * KEYS + j * 8);
        f.x *= by.x, f.y *= by.y;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const u32 two = Float16::pack(x[e][2 * j] * f.x, x[e][2 * j + 1] * f.y);
          if (k < 2) own[k][j / 2][j % 2 * 2 + e] = two;
          else asm volatile("st.shared.b32 [%0], %1;" ::"r"(places[k - 2] + e * 8 * 128 + (row ^ j * 16)), "r"(two) : "memory");
        }
      }
    }
    fenceAsync();
    ThreadGroup{0, WARPS, WEIGHED + group}.arrive();
  }

  // Adds the group's columns of the values in a slot, multiplied by weights.
  template <class Multiply> __device__ static __forceinline__ void add(const Shared& sh, State& st, int slot, int group, int lane, const Multiply& multiply) {
    const u32 values = sh.ring + slot * SLOT + group * 4 * BLOCK;
    pinned(st.o[0]), pinned(st.o[1]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u64 first = columnOperand(values + i * 2 * BLOCK, BLOCK);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) multiply(st.o[i], i, k, behind(first, k * 2048));
      wgmmaCommit();
    }
    wgmmaWait<1>();
    pinned(st.o[0]);
    if (lane == 0) barrierArrive(sh.emptyOf(slot, group * 2));
    wgmmaWait<0>();
    pinned(st.o[1]);
    if (lane == 0) barrierArrive(sh.emptyOf(slot, group * 2 + 1));
  }

  // Adds the values of the chunk whose weights the other group makes.
  __device__ static __forceinline__ void take(const Shared& sh, State& st, int group, int lane) {
    const int slot = group ^ 1;
    ThreadGroup{0, WARPS, WEIGHED + slot}.sync();
    fenceAsync(); // for the warps that brought values
    float shrinks[2];
    const float ratio = st.raise(sh, slot);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      shrinks[e] = sh.shrink[Base::rowOf(e, lane)];
      st.l[e] *= shrinks[e], shrinks[e] *= ratio;
    }
    Base::scale(st, shrinks);
    const u64 left[2] = {rowOperand(sh.weights), rowOperand(sh.ring + slot * SLOT + SLOT - BLOCK)};
    add(sh, st, slot, group, lane, [&](auto& to, int i, int k, u64 v) { addColumns<Math>(to, behind(left[i], k * 32), v); });
    if (lane == 0) barrierArrive(sh.emptyOf(slot, REST));
  }

  // Computes the chunks of an output tile's part. n: the number of the first chunk.
  __device__ static __forceinline__ void chunks(const Params& p, const Place& w, const Shared& sh, State& st, int n, int group, int lane) {
    int all = w.s.keys; // keys that every row sees
    if (p.causal) all = w.s.keys - w.s.queries + positionOf(p, w.block * Place::ROWS) + 1;
#pragma unroll 1
    for (int c = w.chunk + ((n & 1) != group); c < w.end; c += 2) {
      const u32 parity = n + c - w.chunk >> 1 & 1;
      float s[8][4];
#pragma unroll
      for (int j = 0; j < 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
      scores<0, EARLY>(sh, group, parity, s, lane);
      if (c > w.chunk) take(sh, st, group, lane);
      scores<EARLY, GROUPS>(sh, group, parity, s, lane);
      u32 own[2][4][4];
      float shrinks[2];
      weigh(p, w, sh, st, s, own, shrinks, c * KEYS, (c + 1) * KEYS > all, group, lane);
      Base::scale(st, shrinks);
      add(sh, st, group, group, lane, [&](auto& to, int i, int k, u64 v) { Wgmma<128>::template registers<Math>(to, own[i][k], v); });
    }
    if ((n + w.end - w.chunk - 1 & 1) != group) take(sh, st, group, lane); // the other group's chunk is the last one
  }

  __device__ static __forceinline__ void run(const LatentNarrowParams& a) {
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
      for (int i = 0; i < 2 * PARTS; i++) barrierInit(sh.full + i * 8, 4), barrierInit(sh.empty + i * 8, 4);
      barrierInit(sh.begun, WARPS);
      opened();
    }
    __syncthreads();
    const typename R::Shares shares(*range);
    if (bytesOf(p.queryType) == 0) __trap(); // here, since a trap in a branch costs registers
    if (warp >= WARPS) {
      fewerRegisters<72>();
      produce(a, range, sh, warp - WARPS, lane, [&]() {
        if (warp != WARPS + COUNTER || !together) return;
        waitForEarlier();
        barrierWait(sh.begun, 0); // all have read the launch's number
        R::begin(a.meet, ThreadGroup{lane, 1, BEGUN}, shares, sh.reduce);
      });
      if (together && warp == WARPS + LOOKER) R::look(a.meet, shares, sh.reduce, lane);
      return;
    }
    moreRegisters<216>();
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    const u32 run = together ? R::nextRun(a.meet) : 0;
    __syncwarp();
    if (lane == 0) barrierArrive(sh.begun); // the COUNTER warp goes on then
    const ThreadGroup workers{(int)threadIdx.x, WARPS, READY};
    const int group = warp / 4;
    int n = 0; // chunks of the output tiles before
    const typename R::Tile begin(p, range);
    State st;
    Place w;
    w.begin(p, range);
    bool more = true;
#pragma unroll 1
    while (more) {
      workers.sync(); // the last output tile's outputs and statistics
      loadQueries(p, w, sh, warp, lane);
      if (threadIdx.x < ROWS) sh.largest[threadIdx.x] = -LEAN_INF;
      st.empty();
      fenceAsync();
      workers.sync();
      chunks(p, w, sh, st, n, group, lane);
      n += w.end - w.chunk;
      const Place done = w;
      more = w.next(p);
      const typename R::Tile tile(p, done);
      const float lifted = 0x1p-15f, power = __int_as_float(st.exponent << 23);
      static_assert(Math::lift == 15, "lifted undoes the lift");
#pragma unroll
      for (int e = 0; e < 2; e++) st.l[e] *= lifted;
#pragma unroll
      for (int j = 0; j < 32; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) st.o[j / 16][j % 16][i] *= lifted, st.o[j / 16][j % 16][i] *= power;
      workers.sync(); // weights have been used: sums are there
      Base::leave(p, tile, sh, st, sh.largest, R::slotOf(done), 0, group, lane);
      if (together && R::slotOf(done) >= 0) Base::Merging::publish(a.meet.tagged, workers, R::slotOf(done), run);
      if (done.endsParts()) together ? Base::Merging::mergeTogether(p, a.meet.tagged, workers, shares, begin, tile, sh.reduce, run, lane) : Base::Merging::settle(p, workers, shares, begin, tile, sh.reduce, lane);
    }
    R::writeFullyMasked(p, *p.masked);
  }
};
#define LATENT_NARROW(name) \
  extern "C" __global__ void __launch_bounds__(12 * 32, 1) name(const __grid_constant__ LatentNarrowParams p) { LatentNarrow::run(p); }
#else // other GPUs have no products of warp groups
#define LATENT_NARROW(name) \
  extern "C" __global__ void name(const __grid_constant__ LatentNarrowParams p) {}
#endif
