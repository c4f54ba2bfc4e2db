// Attention as a layer of the megakernel (megakernel.cuh): the append of a step's
// new keys and values, and LeanAttention to them and those before, as attn_lean.cuh has it,
// with these changes.
// Queries and new tokens are made by layers of the same launch, and waited for as tagged
// floats. Sequences have one new token each, so all rows of an output tile see all of its
// keys. Where thread blocks share an output tile, its host waits for what the others
// have: all of them run at the same time, so waiting is safe, and it needs no atomic.
//
// Everybody waits for the last output, so the way there is short: each consumer warp
// hands its own state to the host, as it is in its registers. Warps that have copied all
// that the block reads merge what comes, in the order of the blocks and of their warps.
// Who computed them need not meet for that.
#pragma once
#include "attn_reduce.cuh"
#include "attn_ring.cuh"
#include "attn_tile.cuh"

// What attention has besides as a layer of the megakernel: q and the new
// tokens' k and v are made by layers of the same launch, and the output is read there.
struct Links {
  const u64 *query, *newKeys, *newValues; // tagged: as query lies, and rows x KV heads x dim
  u64* out;                               // tagged: as out lies
  const int* slots;                       // of each row, the row of keys of head 0 that it becomes; -1: none
  u64* partials;                          // tagged: 2*blocks*CONSUMER_WARPS of (rows, D+2), the same for all layers
  int layer, layers;                      // this one, of how many
};

// Where attention's ring is. It goes on from one layer to the next: its barriers are made once.
struct RingState {
  u64* bars;   // a full and an empty one for each slot
  u32 before;  // chunks that the layers before have put through the ring
  u32 inverse; // 2^32/slots, rounded up
  // Where chunk number `chunk` of all is there, and how often the ring went round before.
  __device__ __forceinline__ int slotOf(u32 chunk, int slots, u32& round) const {
    round = __umulhi(chunk, inverse);
    return (int)(chunk - round * slots);
  }
};

#if __CUDA_ARCH__ >= 900
// T is the Format of keys and values. With TURNS a rotary embedding may turn queries and new keys: `turned` has the
// cosines and sines of each row's pairs, D/2 of them, or is null.
template <class T, int D, bool TURNS = false> struct DecodeAttend {
  using Store = typename T::Store;
  static_assert(Store::bytes == 2 && T::Math::Operand::bytes == 2, "a lane appends four elements as two words, and queries are made of two parts of 16 bits");
  using S = Shape<T, D, true>;
  using A = Attention<S>;
  using R = Reduce<S>;
  using Place = typename S::Place;
  using Row = typename R::Row;
  static constexpr int KEYS = S::KEYS;

  // The keys and values of a sequence's new token for one head: lane i has elements
  // 4i to 4i+3.
  struct Fresh {
    float k[4], v[4];
    // Waits for them.
    __device__ __forceinline__ void fetch(const Params& p, const Links& links, u32 run, const Place& w, const float2* turned, int lane) {
      const long long from = ((long long)w.s.row * p.heads + w.head) * D + min(lane * 4, D - 4);
      bool missing;
      do {
        missing = !loadTagged2(links.newKeys + from, run, k[0], k[1]);
        missing |= !loadTagged2(links.newKeys + from + 2, run, k[2], k[3]);
        missing |= !loadTagged2(links.newValues + from, run, v[0], v[1]);
        missing |= !loadTagged2(links.newValues + from + 2, run, v[2], v[3]);
      } while (__any_sync(~0u, missing));
      if (!TURNS || turned == nullptr) return;
      constexpr int APART = D / 8; // lanes, of the elements of a pair
      const float sign = lane & APART ? 1.f : -1.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 t = turned[w.s.row * (D / 2) + (lane * 4 + i) % (D / 2)];
        const float other = __shfl_xor_sync(~0u, k[i], APART);
        k[i] = k[i] * t.x + sign * other * t.y;
      }
    }
    // Puts them where the copy engine has left what was in the cache before, as key
    // `row` of the chunk at `at`, and into the cache, unless `slot` is negative: a row
    // of keys there. A sequence has one block of rows, so nobody else has the chunk.
    __device__ __forceinline__ void append(const Params& p, const Place& w, int row, int slot, u32 at, int lane) const {
      const int i = lane * 4;
      if (i < D) {
        const uint2 keys = Store::pack4(make_float4(k[0], k[1], k[2], k[3])), values = Store::pack4(make_float4(v[0], v[1], v[2], v[3]));
        const u32 to = at + i * Store::bytes / 128 * S::BLOCK + swizzled(row, i * Store::bytes % 128);
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(keys.x), "r"(keys.y) : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to + S::SLOT / 2), "r"(values.x), "r"(values.y) : "memory");
        if (slot >= 0) {
          const long long place = (slot + (long long)w.head * p.headRows) * D + i;
          *(uint2*)((u16*)p.keys + place) = keys;
          *(uint2*)((u16*)p.values + place) = values;
        }
      }
      fenceAsync();
      __syncwarp();
    }
  };

  // The queries of an output tile, which are waited for. A row that is not there is computed
  // like the first, and not used.
  template <bool FEW> __device__ static __forceinline__ void load(const Params& p, const Links& links, u32 run, const Place& w, typename A::Queries& q, const float2* turned, int rows, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u64* at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) at[i] = links.query + w.s.row * p.queryRow + (w.head * p.group + (g + 8 * i < rows ? g + 8 * i : 0)) * p.queryHead + 2 * t;
    float x[S::STEPS][8];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int s = 0; s < S::STEPS; s++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (FEW && (j & 1)) { // both parts are of the same row
            x[s][2 * j] = x[s][2 * j - 2], x[s][2 * j + 1] = x[s][2 * j - 1];
          } else {
            missing |= !loadTagged2(at[j & 1] + s * 16 + (j >> 1) * 8, run, x[s][2 * j], x[s][2 * j + 1]);
          }
    } while (__any_sync(~0u, missing));
    if (TURNS && turned != nullptr) {
      constexpr int HALF = S::STEPS / 2; // a lane has both elements of a pair
#pragma unroll
      for (int s = 0; s < HALF; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4 u = *(const float4*)(turned + w.s.row * (D / 2) + s * 16 + (j >> 1) * 8 + 2 * t); // of two pairs
          const float a = x[s][2 * j], b = x[s][2 * j + 1];
          float &c = x[s + HALF][2 * j], &d = x[s + HALF][2 * j + 1];
          x[s][2 * j] = a * u.x - c * u.y, x[s][2 * j + 1] = b * u.z - d * u.w;
          c = c * u.x + a * u.y, d = d * u.z + b * u.w;
        }
    }
    A::operandsOf(p, x, q, FEW ? A::FOLDED : A::BOTH, nullptr, 0, 1, lane);
  }

  // Whether output tiles have so few rows that both parts of them are one operand: which FEW
  // is, below. (With keys and values as left operands, NARROW, steps gain 0 to 1%, and
  // those of heads of 128 are out of registers.)
  __device__ static __forceinline__ bool few(const Params& p) { return A::modeOf(p, p.rows, true) != A::BOTH; }

  // What the states of a layer are tagged with: their memory is that of all layers.
  __device__ static __forceinline__ u32 markOf(const Links& links, u32 run) { return run * links.layers + links.layer; }
  // The state that a warp leaves of row 0 of a part of an output tile. A block leaves at
  // most two parts: number 1 begins with an output tile's first LeanTile.
  __device__ static __forceinline__ u64* stateOf(const Params& p, const Links& links, int block, int part, int warp) { return links.partials + (long long)((2 * block + part) * CONSUMER_WARPS + warp) * p.rows * (D + 2); }

  // An output of row r of an output tile, columns c and c+1.
  __device__ static __forceinline__ void store(const Params& p, const Links& links, u32 run, const Place& w, int r, int c, float2 o, float l) {
    const float f = __fdividef(1.f, l);
    o = l == 0.f ? make_float2(0.f, 0.f) : make_float2(o.x * f, o.y * f); // not 0 times what other rows' NaN have made
    const long long at = w.s.row * p.outRow + (w.head * p.group + r) * p.outHead + c;
    storeTagged2(links.out + at, run, o.x, o.y);
    *(float2*)((float*)p.out + at) = o;
  }

  // What a block does that hosts an output tile which others have parts of: waits for the
  // states of all of them, and merges them. Each of the producer warps has a quarter of the
  // columns, two of them a lane, and its lanes share out the states.
  __device__ static __forceinline__ void host(const Params& p, const Links& links, const Work* range, Place w, u32 run, int quarter, int lane) {
    while (!w.endsParts()) w.next(p);
    if (w.tile > 0 || w.take == w.tiles) return;
    const int states = range->guests * CONSUMER_WARPS, rows = w.rows(p);
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
      if (states <= 16) {
        gather<16>(p, links, run, w, r, states, quarter, lane);
      } else {
        gather<48>(p, links, run, w, r, states, quarter, lane);
      }
    }
  }
  // Row r of it, up to MANY states on their way at a time. All are asked for before any is
  // looked at: one behind the other, each would be waited for.
  template <int MANY> __device__ static __forceinline__ void gather(const Params& p, const Links& links, u32 run, const Place& w, int r, int states, int quarter, int lane) {
    constexpr int COLUMNS = D / PRODUCER_WARPS, SIDE = COLUMNS <= 16 ? 8 : 16, APART = 32 / SIDE; // lanes side by side, and how many states they have at once
    constexpr int EACH = MANY / APART > 12 ? 12 : MANY / APART;
    static_assert(COLUMNS % 2 == 0 && COLUMNS <= 2 * SIDE, "");
    const int pair = lane % SIDE, c = quarter * COLUMNS + min(pair * 2, COLUMNS - 2), first = lane / SIDE;
    const u32 mark = markOf(links, run);
    Row row = {-LEAN_INF, 0.f, {0.f, 0.f}};
#pragma unroll 1
    for (int from = first; from - first < states; from += EACH * APART)
      row.template gather<EACH>(mark, from, APART, states, c, [&](int state) {
        const int other = state / CONSUMER_WARPS;
        // The host's own part is its last, everybody else's their first.
        return (const u64*)stateOf(p, links, blockIdx.x + other, other == 0, state % CONSUMER_WARPS) + r * (D + 2);
      });
#pragma unroll
    for (int i = SIDE; i < 32; i *= 2) row.mergeLane(i);
    if (first == 0 && pair * 2 < COLUMNS) store(p, links, run, w, r, c, row.o, row.l);
  }

  // The same of an output tile that is this block's alone: the states of its warps are in
  // shared memory.
  __device__ static __forceinline__ void finish(const Params& p, const Links& links, u32 run, const Place& w, const typename R::Shared& sh, int rows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (D / 2); i += CONSUMER_WARPS * 32) {
      const int r = i / (D / 2), c = i % (D / 2) * 2;
      Row row = {-LEAN_INF, 0.f, {0.f, 0.f}};
#pragma unroll
      for (int k = 0; k < CONSUMER_WARPS; k++) row.merge(((const float*)(sh.m + r))[k], ((const float*)(sh.l + r))[k], *(const float2*)(sh.o + (k * p.rows + r) * S::WIDTH + c));
      store(p, links, run, w, r, c, row.o, row.l);
    }
  }

  // Attention of the thread block's LeanTiles, `memory` being shared, at a multiple of
  // 1024 bytes. FEW: see few. Consumer warps return how many chunks have gone through the
  // ring.
  template <bool FEW> __device__ static __forceinline__ int run(const Params& p, const Links& links, const TensorMap* maps, char* memory, const Work* range, const Place& begin, int masked, const RingState& ringState, u32 run, const float2* turned = nullptr) {
    constexpr typename A::Mode MODE = FEW ? A::FOLDED : A::BOTH;
    constexpr int MINE = FEW ? 1 : 2; // rows that a lane has
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, slots = p.slots;
    const u32 ring = sharedAddress(memory), full = sharedAddress(ringState.bars), empty = full + slots * 8;
    if (range->tiles == 0) {
      if (warp < CONSUMER_WARPS) writeFullyMasked(p, links, run, masked);
      return 0;
    }
    if (warp >= CONSUMER_WARPS) {
      const int producer = warp - CONSUMER_WARPS, values = producer & 1;
      u32 turns;
      const int slot = ringState.slotOf(ringState.before + (producer >> 1), slots, turns);
      Ring<S>::produce(p, begin, maps + values, ring + values * (S::SLOT / 2), full, empty, producer >> 1, slot, ~turns & 1, lane, range->wholeTiles);
      host(p, links, range, begin, run, producer, lane);
      return 0;
    }
    typename R::Shared sh;
    sh.warps = CONSUMER_WARPS, sh.buffers = 2;
    sh.o = (float*)(memory + slots * S::SLOT);
    sh.m = (float4*)(sh.o + 2 * CONSUMER_WARPS * p.rows * S::WIDTH);
    sh.l = sh.m + 2 * ROWS;
    u32 parity;
    int slot = ringState.slotOf(ringState.before + warp, slots, parity);
    parity &= 1;
    Place w = begin;
    int turn = 0;   // of the warp that has the first chunk of this part
    int passed = 0; // chunks
    int wholes = 0; // output tiles that were this block's alone
    bool more = true;
#pragma unroll 1
    while (more) {
      const int newest = links.slots[w.s.row], rows = w.rows(p);
      typename A::Queries q;
      load<FEW>(p, links, run, w, q, turned, rows, lane);
      typename A::State st;
      st.empty();
      int first = warp - turn;
      if (first < 0) first += CONSUMER_WARPS;
#pragma unroll 1
      for (int c = w.chunk + first; c < w.end; c += CONSUMER_WARPS) {
        const u32 at = ring + slot * S::SLOT;
        const int live = w.s.keys - c * KEYS;
        Fresh fresh;
        if (live <= KEYS) fresh.fetch(p, links, run, w, turned, lane);
        barrierWait(full + slot * 8, parity);
        if (live <= KEYS) {
          A::clearBehind(at, live, lane);
          fresh.append(p, w, live - 1, newest, at, lane);
        }
        const int limit[2] = {live, live};
        A::template merge<MODE>(MODE, st, q, nullptr, at, lane, live < KEYS, limit);
        releaseStage(empty + slot * 8, lane);
        slot += CONSUMER_WARPS;
        if (slot >= slots) slot -= slots, parity ^= 1;
      }
      if (FEW) st.unfold();
      const bool whole = w.take == w.tiles;
      const typename R::Shared mine = sh.of(wholes, p.rows); // two in turn: so one meeting each is enough
      u64* const state = stateOf(p, links, blockIdx.x, w.tile == 0, first);
      const u32 mark = markOf(links, run);
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        st.l[i] += __shfl_xor_sync(~0u, st.l[i], 1);
        st.l[i] += __shfl_xor_sync(~0u, st.l[i], 2);
        const int r = (lane >> 2) + 8 * i, c = (lane & 3) * 2;
        if (r >= rows) continue;
        if (!whole) {
          u64* const to = state + r * (D + 2);
#pragma unroll
          for (int n = 0; n < S::TILES; n++) storeTagged2(to + 8 * n + c, mark, st.o[n][2 * i], st.o[n][2 * i + 1]);
          if (c == 0) storeTagged2(to + D, mark, st.m[i], st.l[i]);
        } else {
          float* const o = mine.o + (first * p.rows + r) * S::WIDTH + c;
#pragma unroll
          for (int n = 0; n < S::TILES; n++) *(float2*)(o + 8 * n) = make_float2(st.o[n][2 * i], st.o[n][2 * i + 1]);
          if (c == 0) ((float*)(mine.m + r))[first] = st.m[i], ((float*)(mine.l + r))[first] = st.l[i];
        }
      }
      if (whole) {
        syncWarps(CONSUMER_WARPS);
        finish(p, links, run, w, mine, rows);
        wholes++;
      }
      turn = (turn + w.end - w.chunk) % CONSUMER_WARPS;
      passed += w.end - w.chunk;
      more = w.next(p);
    }
    writeFullyMasked(p, links, run, masked);
    return passed;
  }

  // Fully masked rows: their zeros are tagged, too.
  __device__ static __forceinline__ void writeFullyMasked(const Params& p, const Links& links, u32 run, int masked) {
#pragma unroll 1
    for (int b = blockIdx.x; b < masked; b += gridDim.x)
      for (int i = threadIdx.x; i < p.heads * p.group * D; i += CONSUMER_WARPS * 32) {
        const long long at = (long long)p.masked[1 + b] * p.outRow + i / D * p.outHead + i % D;
        storeTagged(links.out + at, run, 0.f);
        ((float*)p.out)[at] = 0.f;
      }
  }
};
#endif
