// The megakernel runs all layers of a decode step in one launch, from the embeddings to
// the logits and the chosen tokens. No barrier of all thread blocks lies between two layers.
//
// Each multiprocessor has one thread block, and all blocks go through the same
// list of layers. Layers pass LL protocol words (tagged.cuh): a reader polls
// an element until the element has the number of this run. A layer also stores its
// output in plain memory, for launches that follow.
//
//	linear:     y = f(norm(x) W^T + b) + residual, for one to four rows of x; f as in gemm_activation.cuh
//	attention:  append and LeanAttention, see megakernel_attention.cuh
//
// y may be the sum of what several GPUs make of it, each with such a launch at the same time: see DecodeExchange.
//
// The weights are most of what is read, and none of them depends on anything.
// So every warp has a ring, and asks for the weights of its next layers while it
// waits for the x of this one: memory stays busy across the ends of layers. W has
// tiles of 16 rows, which the thread blocks share out, and boxes of 256 bytes of
// its columns, which the warps of a block share out: a warp needs only its own columns of
// x, and the warps of a block meet once a layer, when they add their sums up. Where x is
// large, two blocks share a tile's columns, so that each makes operands of half of x.
//
// A norm is put in then, too. With d = x - c, c near the mean of x,
//
//	norm(x) W^T = ((gamma d) W^T - (mean(x) - c) gamma W^T) / deviation(x) + beta W^T
//
// so gamma and beta are multiplied as if they were rows of x, which costs nothing
// where the tensor core has columns left. A norm by the root mean square needs neither, since it only scales the
// rows of gamma x.
#pragma once
#include "megakernel_layers.cuh"
#include "megakernel_operands.cuh"
#include "sample_argmax.cuh"

#if __CUDA_ARCH__ >= 900
// SPLIT 2: the thread blocks are pairs, clusters of two. A tile is a pair's: each block
// has half of its columns, and so half of x, and finishes every second tile of a group.
// What the other one's warps have for it they store to its shared memory. All warps
// of both meet where a block's alone do else, at a barrier that each block has: a warp
// arrives there and here when it is done with its sums, and those that the other block
// sends count as bytes that the barrier waits for. So nobody waits for stores of its own
// to arrive, as a barrier of the cluster would have it.
//
// Weights and Keys are Formats, Keys that of keys and values. LLAMA: norms are by the root mean square, layers with
// one may be a gated unit, and attention may have a rotary embedding. PACKED: weights of a layer may also have 8 or 4 bits, of one or two
// rows of x (megakernel_packed.cuh).
template <class Weights, class Keys, int D, int SPLIT, bool LLAMA = false, bool PACKED = false> struct Megakernel {
  using L = DecodeAttend<Keys, D, LLAMA>;
  using Fed = typename Either<PACKED, DecodePackedFeed, DecodeFeed>::type;
  static_assert(!PACKED || SPLIT == 1, "pairs have weights of 16 bits");
  static_assert(DECODE_COLUMNS * Weights::Store::bytes * DECODE_TILE == DECODE_BOX, "a box is so many columns");
  static constexpr int WORKERS = SPLIT * DECODE_WARPS;
  static constexpr int FIXED = SPLIT == 1 ? DECODE_FIXED : DECODE_FIXED_PAIRS;
  // Attention to large heads takes all registers: what a warp hands on is in shared
  // memory meanwhile, or it would be in a stack frame.
  static constexpr bool KEEP = D > 80;

  // What is in shared memory. The places that are known here come first.
  struct Fixed {
    float sums[2][DECODE_GROUP * WORKERS * DECODE_TILE];   // of a meeting and the next: tiles x warps x rows x DECODE_TILE
    float4 moments[2][DECODE_ROWS * WORKERS];              // of a norm and the next, of each row and warp: c, mean, sum of squares and number of its elements
    struct {
      char body[DECODE_BODY];
      int kind, rest[3];
    } layers[3];                                           // this one, the one before and the next, in turn
    DecodeParams params;                                   // for those that are called: nearer than where the launch has them
    Work work;                                             // of attention: this block's
    typename L::Place place;                               // where that begins
    int masked;                                            // fully masked rows: how many
    u32 before;                                            // see RingState
    u64 residuals[DECODE_WARPS * 32 / SPLIT];              // tagged: of each thread that finishes elements what it adds; while there is attention, see KEEP
    float biases[DECODE_WARPS * 32 / SPLIT];               // and the bias
    u64 pairBars[2];                                       // of pairs: the barriers of a meeting and the next
    int turns;                                             // whether attention has a rotary embedding
  };
  static_assert(sizeof(Fixed) <= FIXED, "");
  struct Layout {
    Fixed* fixed;
    char* rings;      // of the warps
    char* area;       // each warp's columns of x; what attention has
    Fed* feeds;
    u64* bars;        // of the warps' rings
    u64* slots;       // of attention's ring
    float2* turned;   // cosines and sines of each row's pairs; there if attention has a rotary embedding
    __device__ __forceinline__ Layout(char* memory, const DecodeParams& p) {
      fixed = (Fixed*)memory;
      rings = memory + FIXED;
      area = rings + DECODE_WARPS * p.stages * DECODE_BOX;
      feeds = (Fed*)(area + p.area);
      bars = (u64*)(feeds + p.feedCount);
      slots = bars + DECODE_WARPS * p.stages;
      turned = (float2*)(slots + 2 * p.slots);
    }
    // Of packed weights, the scales of a slot of a warp's ring.
    __device__ __forceinline__ u32 scales(const DecodeParams& p, int warp, int slot) const {
      if constexpr (PACKED) {
        const u32 end = sharedAddress(turned + (LLAMA ? DECODE_ROWS * D / 2 : 0));
        return (end + 127) / 128 * 128 + (warp * p.stages + slot) * feeds->pitch;
      }
      return 0;
    }
  };

  // How many blocks or pairs there are.
  __device__ static __forceinline__ int units() { return gridDim.x / SPLIT; }
  __device__ static __forceinline__ int rankOf() { return SPLIT == 1 ? 0 : blockIdx.x % SPLIT; }
  // Which of a layer's tiles is number i of the order in which they are made. Where
  // `woven` is not 0, each warp of the layer that reads them has so many boxes of
  // columns: the first boxes of all warps are made first, then the second ones, so that
  // nobody waits for the last of them alone.
  __device__ static __forceinline__ int tileAt(int i, int woven) {
    constexpr int EACH = DECODE_COLUMNS / DECODE_TILE; // tiles in a box's columns
    return woven == 0 ? i : ((i / EACH % WORKERS) * woven + i / (EACH * WORKERS)) * EACH + i % EACH;
  }
  // The first of a block's or pair's tiles; the others are units() apart: so at any time
  // the blocks read what lies side by side.
  __device__ static __forceinline__ int firstTile(int shift) {
    const int unit = (int)(blockIdx.x / SPLIT) - shift;
    return unit < 0 ? unit + units() : unit;
  }
  // Of a tile's boxes, those of the pair's block `rank`: how many, and the first.
  __device__ static __forceinline__ int boxesOf(int all, int rank) { return SPLIT == 1 ? all : (all + 1 - rank) / 2; }
  __device__ static __forceinline__ int firstBox(int all, int rank) { return SPLIT == 1 || rank == 0 ? 0 : (all + 1) / 2; }

  // The producing side of a warp's ring, which is layers ahead of the consuming one. A
  // warp's boxes of a tile lie side by side, since memory gives more of what does.
  // Where the next box is, is in registers before it can be asked for: the products of the
  // one before wait meanwhile.
  struct Feed {
    const TensorMap* map;  // of the next box, and
    int row, column, left; // its first row, its first block of 128 bytes, and how many there are with it in the tile
    int tile, end;         // that tile, and how many there are; of a gated unit twice as many, of both parts in turn
    int layer;             // behind this one

    __device__ static __forceinline__ int gated(const DecodeFeed& f) { return LLAMA && f.third == 0; }
    // To the warp's boxes of that tile, or of the next layer that has some.
    __device__ __forceinline__ void open(const DecodeParams& p, const Layout& layout, int warp) {
      while (tile >= end) {
        if (layer == p.feedCount) return;
        const Fed& f = layout.feeds[layer++];
        tile = firstTile(f.shift) << gated(f), end = warp * f.most < boxesOf(f.boxes, rankOf()) ? f.tiles << gated(f) : 0;
      }
      const Fed& f = layout.feeds[layer - 1];
      const bool second = tile >= f.second, third = tile >= f.third;
      if (gated(f)) {
        map = f.maps + (tile & 1), row = tileAt(tile >> 1, f.woven) * DECODE_TILE;
      } else {
        map = f.maps + second + third, row = (tileAt(tile, f.woven) - (third ? f.third : second ? f.second : 0)) * DECODE_TILE;
      }
      column = (firstBox(f.boxes, rankOf()) + warp * f.most) * 2, left = min(boxesOf(f.boxes, rankOf()) - warp * f.most, f.most);
      if constexpr (PACKED)
        if (f.deep > 0) f.enter(map, row, gated(f) ? tile & 1 : second + third);
    }
    // Asks for the warp's next box, if there is one.
    __device__ __forceinline__ void issue(const DecodeParams& p, const Layout& layout, u32 to, u32 bar, u64 policy, int warp, int slot) {
      if (tile >= end) return;
      int boxes = 1;
      if constexpr (PACKED) boxes = layout.feeds[layer - 1].deep;
      if (PACKED && boxes > 0) {
        if constexpr (PACKED) {
          if (elected()) layout.feeds[layer - 1].copy(map, row, column / 2, to, layout.scales(p, warp, slot), bar, policy);
        }
      } else {
        if (elected()) {
          barrierExpect(bar, DECODE_BOX);
          copyBox(to, map, 0, row, column, bar, policy);
        }
        boxes = 1;
      }
      column += 2 * boxes, left -= boxes;
      if (left > 0) return;
      tile += !gated(layout.feeds[layer - 1]) ? units() : tile & 1 ? 2 * units() - 1 : 1;
      open(p, layout, warp);
    }
  };

  struct Ring {
    u32 memory, full;
    int slot;
    u32 parity;
  };

  // Asks for a warp's columns of gamma and beta: gamma behind the operands, beta where
  // its own will be.
  template <int ROWS> __device__ static __forceinline__ void ask(const Layout& layout, const DecodeAffine& a, int warp, int lane) {
    constexpr int COLUMNS = ROWS + (LLAMA ? 0 : 2);
    const int mine = min(boxesOf(a.boxes, rankOf()) - warp * a.most, a.most), begin = firstBox(a.boxes, rankOf()) + warp * a.most;
    float* const x = (float*)(layout.area + a.place) + warp * a.most * (COLUMNS * DECODE_STRIDE + DECODE_COLUMNS);
    float* const raw = x + a.most * COLUMNS * DECODE_STRIDE;
#pragma unroll 1
    for (int j = 0; j < mine; j++) {
      const int column = (begin + j) * DECODE_COLUMNS + lane * 4;
      if (a.gamma != nullptr) copy16(sharedAddress(raw + j * DECODE_COLUMNS + lane * 4), a.gamma + column, true);
      if (!LLAMA && a.beta != nullptr) copy16(sharedAddress(x + (j * COLUMNS + ROWS + 1) * DECODE_STRIDE + lane * 4), a.beta + column, true);
    }
  }

  // Two and two, so that few additions wait for each other.
  __device__ static __forceinline__ float sumOf(const float (&v)[DECODE_WARPS]) {
    static_assert(DECODE_WARPS == 8, "");
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
  // What two lanes have, each of one block of a pair.
  __device__ static __forceinline__ float ofBoth(float v) { return SPLIT == 1 ? v : v + __shfl_xor_sync(~0u, v, DECODE_TILE); }

  // The barrier at which a pair's warps meet.
  struct PairBarrier {
    u32 here, other, parity; // barriers, of this block and of the other one
    __device__ __forceinline__ PairBarrier(const Layout& layout, int syncs, int rank) {
      if constexpr (SPLIT > 1) here = sharedAddress(&layout.fixed->pairBars[syncs & 1]), other = remoteAddress(here, 1 - rank), parity = syncs >> 1 & 1;
    }
    // Where the other block has what is at `at` here.
    __device__ __forceinline__ u32 there(const void* at) const { return sharedAddress(at) + (other - here); }
    // Nobody is told what the other block sends before it has finished what it was sent
    // two meetings ago, to the same place.
    __device__ __forceinline__ void sync(int bytes, int warp, int lane) const {
      __syncwarp();
      if (lane == 0) {
        barrierArriveRemote(other);
        if (warp == 0) {
          barrierExpect(here, bytes);
        } else {
          barrierArrive(here);
        }
      }
      barrierWait(here, parity);
    }
  };

  // What a warp hands on from linear layer to linear layer.
  struct WarpState {
    Ring ring;
    Feed feed;
    int syncs; // meetings so far, and the bit MOMENTS
    int owed; // the box of the ring that is used up and not yet asked for again; -1: none
  };
  static_assert(sizeof(WarpState) * DECODE_WARPS <= sizeof(Fixed::residuals), "");
  static constexpr int MOMENTS = 1 << 30; // which moments are the next norm's
  // Asks for the box that is owed to the ring.
  __device__ static __forceinline__ void refill(const DecodeParams& p, const Layout& layout, WarpState& state, int warp) {
    if (state.owed >= 0) state.feed.issue(p, layout, state.ring.memory + state.owed * DECODE_BOX, state.ring.full + state.owed * 8, readOnce(), warp, state.owed);
    state.owed = -1;
  }

  // Layers are calls, so that what they keep in registers is in nobody's way. `at` is
  // where the body is. W is Weights, or decoders of packed weights.
  template <int ROWS, bool NORM, class W = Weights> __device__ static __noinline__ WarpState linear(int at, u32 run, WarpState state) {
    extern __shared__ __align__(1024) char memory[];
    const DecodeParams& p = ((Fixed*)memory)->params;
    const Layout layout(memory, p);
    constexpr bool PACKS = !same<W, Weights>;
    using Math = typename W::Math;
    constexpr bool INTEGERS = PACKS && integers<W>;
    static_assert(!INTEGERS || LLAMA, "digits of gamma and beta would be more operands");
    using Columns = DecodeOperands<Math, PACKS, INTEGERS>;
    const auto& o = *(const typename Either<PACKS, DecodePacked, DecodeLinear>::type*)layout.fixed->layers[at].body;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    Ring& ring = state.ring;
    Feed& feed = state.feed;
    int& syncs = state.syncs;
    // What is needed when x is there is brought to registers before.
    constexpr int COLUMNS = ROWS + (NORM && !LLAMA ? 2 : 0);
    // Tiles of a group, of each block. Those of pairs could be more without a norm, but
    // the next layer begins with what it is told of first.
    constexpr int GROUP = SPLIT == 1 || (NORM && !LLAMA) ? DECODE_GROUP / COLUMNS : NORM ? 2 : 1;
    static_assert(!(LLAMA && NORM) || GROUP % 2 == 0, "both parts of a gated unit are of one group");
    const int gated = LLAMA && NORM ? o.activation / GATED : 0;
    const int rank = rankOf(), boxes = o.in / DECODE_COLUMNS, most = o.most;
    const int tile0 = firstTile(o.shift), tiles = (o.each + (tile0 < o.rest)) << gated; // the block's or pair's
    const int mine = tiles > 0 ? min(boxesOf(boxes, rank) - warp * most, most) : 0; // 0 or less: none
    const int begin = firstBox(boxes, rank) + warp * most;
    float* const x = (float*)(layout.area + o.place) + warp * most * (COLUMNS * DECODE_STRIDE + (NORM ? DECODE_COLUMNS : 0));
    float* const raw = x + most * COLUMNS * DECODE_STRIDE;
    float4* const shared = layout.fixed->moments[syncs / MOMENTS];
    typename Columns::template Moments<ROWS> moments = {};

    // The element that a thread finishes: of tile `k` of a group, row `m` of x. The
    // last warps do, if they have no boxes. Else the warps take turns: who finishes asks
    // for its next boxes later than the others do, and would be the one that is waited
    // for again and again. Of a pair two lanes finish one, one for each block's warps: `half`.
    constexpr int LANES = 32 / SPLIT;
    const int last = (o.workers >> rank * 8 & 255) < DECODE_WARPS ? DECODE_WARPS - 1 : syncs & (DECODE_WARPS - 1);
    const int half = lane / LANES, epilogueElement = ((last - warp) & (DECODE_WARPS - 1)) * LANES + lane % LANES;
    const int c = epilogueElement % DECODE_TILE, k = epilogueElement / (DECODE_TILE * ROWS), m = epilogueElement / DECODE_TILE % ROWS;
    // Warps that have boxes: those that it adds up the sums of, and the other block's.
    const int workers = o.workers >> half * 8 & 255, others = SPLIT == 1 || tiles == 0 ? 0 : o.workers >> (1 - rank) * 8 & 255;
    const float inverse = o.inverse, eps = o.eps, least = o.activation == RELU ? 0.f : -LEAN_INF;
    const bool smooth = o.activation == GELU;
    // It is asked what is added to it before it is needed: a bias comes from memory.
    // That comes to shared memory: a register that is waited for is waited for at the
    // end of a loop.
    u64* const word = layout.fixed->residuals + warp * LANES + lane % LANES;
    float* const bias = layout.fixed->biases + warp * LANES + lane % LANES;
    bool finishes, tilted;
    float* y;
    u64* made;
    const u64* residualTagged;
    const float* residual;
    const auto element = [&](int first) {
      const int tile = tileAt(tile0 + ((first >> gated) + k * SPLIT + rank) * units(), o.woven), part = (tile >= o.tiles[0]) + (tile >= o.tiles[1]), n = (tile - (part > 0 ? o.tiles[part - 1] : 0)) * DECODE_TILE + c;
      finishes = half == 0 && (k * SPLIT + rank) << gated < min(GROUP * SPLIT, tiles - first) && n < o.out[part];
      if (!finishes) return;
      const long long place = (long long)m * o.out[part] + n;
      y = o.y[part] + place;
      made = o.made[part] == nullptr ? nullptr : o.made[part] + place;
      residualTagged = o.residualTagged == nullptr ? nullptr : o.residualTagged + place;
      residual = o.residual == nullptr ? nullptr : o.residual + place;
      tilted = o.b[part] != nullptr;
      if (tilted) copyFew<4>(bias, o.b[part] + n);
      if (residualTagged != nullptr) copyFew<8>(word, residualTagged);
    };
    // Gamma and beta come a way through memory that is busy: the layer before has asked
    // for them, if it could. What is asked for from here on need not be there yet.
    if (NORM && !o.ready) {
      const DecodeAffine own = {o.gamma, o.beta, o.place, boxes, most};
      if (mine > 0) ask<ROWS>(layout, own, warp, lane);
      copyCommit();
      copyWait<0>();
    }
    if (tiles > 0) element(0);
    copyCommit();
    const u64* const tagged = o.tagged;
    const float* const plain = o.x;
    const bool gamma = o.gamma != nullptr;
    const int in = o.in;
    const float offset = LLAMA && NORM ? o.offset : 0.f;
    if (NORM && mine > 0) {
      const bool beta = o.beta != nullptr;
      copyWait<2>(); // all but the next layer's body, and what is added to elements
      __syncwarp();
      if constexpr (!LLAMA) Columns::template prepareNorm<ROWS>(x, raw, gamma, beta, mine, lane, needsSums<W>(o));
    }
    int prepared = 0; // boxes whose columns of x are operands

    // When a box is used up, its slot is free: the copy of another box begins when the warp waits for its next box, maybe in the next layer.
    const int stages = p.stages;
    int& owed = state.owed;
    const auto meanwhile = [&]() {
      refill(p, layout, state, warp);
      if (o.next.boxes > 0) ask<ROWS>(layout, o.next, warp, lane);
      copyCommit();
    };
    if (mine <= 0 || tagged == nullptr) meanwhile();
    const int g = lane >> 2, t = lane & 3;
    const float* const operands = x + (g & 3) * DECODE_STRIDE + ((g >> 2) * 8 + t * 2) * (PACKS ? 2 : 1); // columns 0 to 3: the leading parts of rows, 4 to 7 the others
    const auto factor = [&](int q, int e) { return x + min(q * 4 + (t & 1) * 2 + e, COLUMNS - 1) * DECODE_STRIDE + DECODE_COLUMNS; }; // of row 2t+e; those that are not there count as the last
    const u32 row = (lane & 7) + ((lane >> 3) & 1) * 8, column = (lane >> 4) * 16;
    const u32 scales = layout.scales(p, warp, 0);
    typename Either<INTEGERS, IntegerBlocks<W>, typename Either<PACKS, PackedBlocks<W>, NoBlocks>::type>::type blocks(o, scales, PACKED ? layout.scales(p, warp, 1) - scales : 0, lane);
    int first = 0;
    do { // once, if there is no tile
      const int now = min(GROUP * SPLIT, tiles - first);
      float* const sums = layout.fixed->sums[syncs & 1];
      const PairBarrier pair(layout, syncs, rank);
      syncs++;
      if (first != 0) {
        element(first);
        copyCommit();
      }
#pragma unroll 1
      for (int i = 0; i < now && mine > 0; i++) {
        constexpr int PRODUCTS = (COLUMNS + 3) / 4; // of four rows each
        float sum[PRODUCTS][4] = {};
#pragma unroll 1
        for (int j = 0; j < mine; j++) {
          if (j == prepared) { // in the first tile
            Columns::template prepare<ROWS, NORM, LLAMA>(x, raw, gamma, offset, tagged, plain, in, begin * DECODE_COLUMNS, moments, run, j, mine, lane, meanwhile, needsSums<W>(o));
            prepared += Columns::together(ROWS);
          }
          const u32 slot = ring.memory + ring.slot * DECODE_BOX;
          // Everything is asked for before anything is used.
          using Operand = typename Either<PACKS, uint4, uint2>::type;
          Operand v[PRODUCTS][PACKS ? 4 : 8];
          u32 w[8][4];
          float f[PRODUCTS][2];
#pragma unroll
          for (int q = 0; q < PRODUCTS; q++) {
            const bool there = q * 4 + (g & 3) < COLUMNS;
#pragma unroll
            for (int s = 0; s < (PACKS ? 4 : 8); s++) v[q][s] = there ? *(const Operand*)(operands + j * (COLUMNS * DECODE_STRIDE) + q * 4 * DECODE_STRIDE + s * (PACKS ? 32 : 16)) : Operand{};
#pragma unroll
            for (int e = 0; e < 2; e++) f[q][e] = Math::narrow ? factor(q, e)[j * (COLUMNS * DECODE_STRIDE)] : 1.f;
          }
          if constexpr (PACKS) {
            if (blocks.begins()) {
              refill(p, layout, state, warp);
              barrierWait(ring.full + ring.slot * 8, ring.parity);
            }
            static_assert(PRODUCTS == 1, "gamma and beta, and at most two rows");
            if constexpr (INTEGERS) j += blocks.multiply(sum[0], slot, ring.slot, x + j * (COLUMNS * DECODE_STRIDE), COLUMNS, min(mine, prepared) - j);
            else blocks.multiply(sum[0], v[0], f[0], slot, ring.slot, x + j * (COLUMNS * DECODE_STRIDE), COLUMNS);
            if (!blocks.next(j + 1 == mine)) continue;
          } else {
            refill(p, layout, state, warp);
            barrierWait(ring.full + ring.slot * 8, ring.parity);
#pragma unroll
            for (int s = 0; s < 8; s++) WeightOperands<Weights>::load(w[s], slot + s / 4 * (DECODE_BOX / 2) + swizzled(row, s % 4 * 32 + column));
#pragma unroll
            for (int q = 0; q < PRODUCTS; q++) {
              float acc[4][4] = {};
#pragma unroll
              for (int s = 0; s < 8; s++) Math::mma(acc[s & 3], w[s], v[q][s].x, v[q][s].y);
#pragma unroll
              for (int e = 0; e < 4; e++) sum[q][e] += ((acc[0][e] + acc[1][e]) + (acc[2][e] + acc[3][e])) * f[q][e & 1];
            }
          }
          // No fence: the warp multiplies the next box before the copy engine overwrites this box. A fence costs OPT-125m 2% of a step.
          __syncwarp();
          owed = ring.slot;
          if (++ring.slot == stages) ring.slot = 0, ring.parity ^= 1;
        }
        const int of = i >> gated, at = (of / SPLIT << gated) + (i & gated); // the block that finishes the tile, and the tile's number in the group
        const auto hand = [&](int r, float2 all) { // hands over sums of row r of x, for rows g and g+8 of W
          float* const to = sums + ((at * WORKERS + rank * DECODE_WARPS + warp) * COLUMNS + r) * DECODE_TILE + g * 2;
          if (of % SPLIT == rank) *(float2*)to = all;
          else send2(pair.there(to), pair.other, all.x, all.y);
        };
        if constexpr (INTEGERS) {
          const float high = t & 1 ? 65536.f : 1.f; // of digits 2 and 3
          float2 all = make_float2(sum[0][0] * high, sum[0][1] * (high / W::HIGH));
          all.x += __shfl_xor_sync(~0u, all.x, 1), all.y += __shfl_xor_sync(~0u, all.y, 1);
          if (t % 2 == 0 && t / 2 < COLUMNS) hand(t / 2, all);
        } else {
#pragma unroll
          for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
            for (int e = 0; e < 2; e++) { // columns 2t and 2t+1 are leading parts in lanes 0 and 1, others in lanes 2 and 3
              const float2 all = make_float2(sum[q][e] + __shfl_xor_sync(~0u, sum[q][e], 2), sum[q][e + 2] + __shfl_xor_sync(~0u, sum[q][e + 2], 2));
              if (t < 2 && 4 * q + 2 * t + e < COLUMNS) hand(4 * q + 2 * t + e, all);
            }
        }
      }
      if (NORM && first == 0 && mine > 0) {
#pragma unroll
        for (int i = 16; i > 0; i /= 2)
#pragma unroll
          for (int m = 0; m < ROWS; m++) moments.sum[m] += __shfl_xor_sync(~0u, moments.sum[m], i), moments.squares[m] += __shfl_xor_sync(~0u, moments.squares[m], i);
        if (lane == 0) {
          const float count = (float)(mine * DECODE_COLUMNS);
#pragma unroll
          for (int m = 0; m < ROWS; m++) {
            const float mean = LLAMA ? 0.f : __fdividef(moments.sum[m], count);
            float4* const to = shared + m * WORKERS + rank * DECODE_WARPS + warp;
            const float4 v = make_float4(moments.near[m], moments.near[m] + mean, moments.squares[m] - mean * moments.sum[m], count);
            *to = v;
            if constexpr (SPLIT > 1) send4(pair.there(to), pair.other, v);
          }
        }
      }
      // The next layer's body, too, but not yet its gamma and beta.
      if (first == 0) {
        copyWait<1>();
      } else {
        copyWait<0>();
      }
      if constexpr (SPLIT == 1) {
        __syncthreads();
      } else {
        pair.sync(others * ((((now >> gated) + 1 - rank) / 2 << gated) * (COLUMNS * DECODE_TILE * 4) + (NORM && first == 0 ? ROWS * 16 : 0)), warp, lane);
      }
      // Of a pair all lanes of a warp add up, two together.
      if (first < tiles && (SPLIT == 1 ? finishes : (k * SPLIT + rank) << gated < now)) {
        const float* const from = sums + ((k << gated) * WORKERS + half * DECODE_WARPS) * (COLUMNS * DECODE_TILE) + m * DECODE_TILE + c % 8 * 2 + c / 8;
        const bool ends = SPLIT == 1 || finishes;
        const float add = ends && tilted ? *bias : 0.f;
        u64 other = ends && residualTagged != nullptr ? *word : 0;
        float s[DECODE_WARPS];
#pragma unroll
        for (int w = 0; w < DECODE_WARPS; w++) s[w] = w < workers ? from[w * (COLUMNS * DECODE_TILE)] : 0.f;
        float v;
        if constexpr (!NORM) {
          v = ofBoth(sumOf(s)) + add;
        } else if constexpr (LLAMA) {
          float part[DECODE_WARPS];
#pragma unroll
          for (int w = 0; w < DECODE_WARPS; w++) part[w] = w < workers ? shared[m * WORKERS + half * DECODE_WARPS + w].z : 0.f;
          const float f = rsqrtf(ofBoth(sumOf(part)) * inverse + eps);
          v = ofBoth(sumOf(s)) * f + add;
          if (gated) {
#pragma unroll
            for (int w = 0; w < DECODE_WARPS; w++) s[w] = w < workers ? from[(WORKERS + w) * (COLUMNS * DECODE_TILE)] : 0.f;
            v = activatedAny(o.activation & ~GATED, v) * (ofBoth(sumOf(s)) * f);
          }
        } else {
          // Means and sums of squares of the warps' columns merge into the row's.
          float4 of[DECODE_WARPS];
          float part[DECODE_WARPS], slope[DECODE_WARPS], behind[DECODE_WARPS];
#pragma unroll
          for (int w = 0; w < DECODE_WARPS; w++) {
            of[w] = w < workers ? shared[m * WORKERS + half * DECODE_WARPS + w] : make_float4(0.f, 0.f, 0.f, 0.f);
            slope[w] = w < workers ? from[(w * COLUMNS + ROWS - m) * DECODE_TILE] : 0.f;
            behind[w] = w < workers ? from[(w * COLUMNS + ROWS + 1 - m) * DECODE_TILE] : 0.f;
            part[w] = of[w].y * of[w].w;
          }
          const float mean = ofBoth(sumOf(part)) * inverse;
#pragma unroll
          for (int w = 0; w < DECODE_WARPS; w++) {
            part[w] = of[w].z + (of[w].y - mean) * (of[w].y - mean) * of[w].w;
            s[w] -= (mean - of[w].x) * slope[w];
          }
          v = ofBoth(sumOf(s)) * rsqrtf(ofBoth(sumOf(part)) * inverse + eps) + (ofBoth(sumOf(behind)) + add);
        }
        if (ends) {
          v = v < least ? least : v; // NaN stays
          if (smooth) v = gelu(v);
          if (residualTagged != nullptr) {
            while ((u32)(other >> 32) != run) other = loadWord(residualTagged); // most likely it was there
            v += __uint_as_float((u32)other);
          } else if (residual != nullptr) {
            v += *residual;
          }
          if (!NORM && o.exchange.members > 0) v = o.exchange.sum(y - o.y[0], run, v);
          if (made != nullptr) storeTagged(made, run, v);
          *y = v;
        }
      }
      if constexpr (!NORM) __syncwarp(); // who waits for another GPU is not left behind: what follows is of whole warps
      first += GROUP * SPLIT;
    } while (first < tiles);
    if (NORM) syncs ^= MOMENTS;
    return state;
  }

  // Returns how many chunks it has put through the ring.
  template <bool FEW> __device__ static __noinline__ int attention(int at, int layer, u32 run) {
    extern __shared__ __align__(1024) char memory[];
    Fixed& fixed = *(Fixed*)memory;
    const DecodeParams& p = fixed.params;
    const Layout layout(memory, p);
    const DecodeAttention& o = *(const DecodeAttention*)fixed.layers[at].body;
    const RingState ringState = {layout.slots, fixed.before, p.slotsInverse};
    const float2* const turned = LLAMA && fixed.turns ? layout.turned : nullptr;
    return L::template run<FEW>(o.p, o.links, p.layers[layer].maps, layout.area, &fixed.work, fixed.place, fixed.masked, ringState, run, turned);
  }

  template <int ROWS, bool NORM> __device__ static __forceinline__ WarpState linearOf(int at, int kind, u32 run, const WarpState& state) {
    if constexpr (PACKED) {
      if (kind == DECODE_FOUR) return linear<ROWS, NORM, typename Either<LLAMA, IntegerFour, PackedFour>::type>(at, run, state);
      if (kind == DECODE_EIGHT) return linear<ROWS, NORM, typename Either<LLAMA, IntegerEight, PackedEight>::type>(at, run, state);
      if (kind == DECODE_E4M3) return linear<ROWS, NORM, PackedEight>(at, run, state);
    }
    return linear<ROWS, NORM>(at, run, state);
  }

  template <int ROWS> __device__ static __forceinline__ void layers(const DecodeParams& p, const Layout& layout, u32 number, WarpState state) {
    int at = 0; // of the bodies
#pragma unroll 1
    for (int layer = 0; layer < p.count; layer++) {
      const auto& body = layout.fixed->layers[at];
      const int now = at;
      if (++at == 3) at = 0;
      bring(p, layout, at, layer + 1);
      if (body.kind == DECODE_ATTENTION) {
        if (threadIdx.x == 0 && layout.fixed->place.work == nullptr) layout.fixed->place.begin(((const DecodeAttention*)body.body)->p, &layout.fixed->work); // in the first one
        refill(p, layout, state, threadIdx.x / 32);
        fenceAsync(); // the copy engine writes where x was
        __syncthreads();
        WarpState& kept = ((WarpState*)layout.fixed->residuals)[threadIdx.x / 32]; // nobody has residuals now
        if (KEEP && threadIdx.x % 32 == 0) kept = state;
        __syncwarp();
        const int passed = L::few(((const DecodeAttention*)body.body)->p) ? attention<true>(now, layer, number) : attention<false>(now, layer, number);
        if (KEEP) state = kept;
        copyWait<0>(); // the next layer's body
        __syncthreads();
        if (threadIdx.x == 0) layout.fixed->before += passed;
      } else if (((const DecodeLinear*)body.body)->norm) {
        state = linearOf<ROWS, true>(now, body.kind, number, state);
      } else {
        state = linearOf<ROWS, false>(now, body.kind, number, state);
      }
    }
  }
  // Asks for what a layer is. A warp near the end does, not the first: where few have
  // boxes these are the first ones, and the last one finishes.
  __device__ static __forceinline__ void bring(const DecodeParams& p, const Layout& layout, int at, int layer) {
    const int i = threadIdx.x - (DECODE_WARPS - 2) * 32;
    if (layer < p.count && i >= 0 && i < (int)sizeof(layout.fixed->layers[0]) / 16) copy16(sharedAddress(&layout.fixed->layers[at]) + i * 16, p.layers[layer].body + i * 16, true);
    copyCommit();
  }

  // The embedding gather: rows of tables that a launch begins with. A lane has two elements, and as many
  // thread blocks as possible have some: a row is there after two ways to memory.
  __device__ static __forceinline__ void gather(const DecodeEnds& ends, int rows, u32 run, int warp, int lane) {
    const GatherParams& g = ends.gather;
#pragma unroll 1
    for (int i = ((warp * gridDim.x + blockIdx.x) * 32 + lane) * 2; i < rows * g.n; i += gridDim.x * (DECODE_WARPS * 64)) {
      const int m = i / g.n, c = i - m * g.n;
      const TableRow row(g.table, g.ids, m, g.n, g.rows, g.type), other(g.second, g.secondIDs, m, g.n, g.secondRows, g.secondType);
      float2 v = make_float2(row[c], row[c + 1]), w = make_float2(0.f, 0.f);
      if (g.second != nullptr) w = make_float2(other[c], other[c + 1]);
      *(float2*)(g.y + i) = v;
      v.x += w.x, v.y += w.y;
      storeTagged2(ends.gathered + i, run, v.x, v.y);
      if (g.second != nullptr) *(float2*)(g.sum + i) = v;
    }
  }

  // Where the most likely token of each row is looked for, behind the number of the run.
  __device__ static __forceinline__ u64* likely(const DecodeParams& p) { return (u64*)p.run + 2; }
  // Has all blocks know the best of the logits that this one has finished itself.
  __device__ static __forceinline__ void choose(const DecodeParams& p, const DecodeEnds& ends, const Layout& layout, int warp, int lane) {
    constexpr int EACH = 4; // logits of a lane that are on their way at once
    const int rank = rankOf(), tile0 = firstTile(ends.shift), tiles = ends.each + (tile0 < ends.rest);
    const int mine = (tiles + SPLIT - 1 - rank) / SPLIT * DECODE_TILE; // of a pair each block finishes every second tile
#pragma unroll 1
    for (int m = 0; m < p.rows; m++) {
      const float* const logits = ends.logits + (long long)m * ends.vocabulary;
      u64 best = 0;
#pragma unroll 1
      for (int from = threadIdx.x; from < mine; from += EACH * DECODE_WARPS * 32) {
        int n[EACH];
        float x[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) { // what is not there is read as the last one
          const int i = min(from + j * (DECODE_WARPS * 32), mine - 1);
          n[j] = min((tile0 + (i / DECODE_TILE * SPLIT + rank) * units()) * DECODE_TILE + i % DECODE_TILE, ends.vocabulary - 1);
          x[j] = __ldcg(logits + n[j]);
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) best = max(best, tokenOf(keyOf(x[j]), n[j]));
      }
      best = warpBest(best);
      if (lane == 0) layout.fixed->residuals[m * DECODE_WARPS + warp] = best;
    }
    __syncthreads();
    if (threadIdx.x < p.rows) {
      u64 best = 0;
#pragma unroll
      for (int w = 0; w < DECODE_WARPS; w++) best = max(best, layout.fixed->residuals[threadIdx.x * DECODE_WARPS + w]);
      atomicMax(likely(p) + threadIdx.x, best);
    }
    __syncthreads();
  }

  __device__ static __forceinline__ void run(const DecodeLaunch& launch) {
    const DecodeParams& p = launch.p;
    const DecodeEnds& ends = launch.ends;
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Layout layout(memory, p);
    WarpState state;
    Ring& ring = state.ring;
    Feed& feed = state.feed;
    ring.memory = sharedAddress(layout.rings) + warp * p.stages * DECODE_BOX, ring.full = sharedAddress(layout.bars) + warp * p.stages * 8;
    ring.slot = 0, ring.parity = 0, state.syncs = 0, state.owed = -1;
    for (int i = threadIdx.x; i < (int)sizeof(Fed) / 16 * p.feedCount; i += DECODE_WARPS * 32) copy16(sharedAddress(layout.feeds) + i * 16, (const char*)p.feeds + i * 16, true);
    if (p.work != nullptr) {
      if (threadIdx.x < sizeof(Work) / 16) copy16(sharedAddress(&layout.fixed->work) + threadIdx.x * 16, (const char*)(p.work + blockIdx.x) + threadIdx.x * 16, true);
      if (threadIdx.x == 32) layout.fixed->masked = *p.masked, layout.fixed->before = 0, layout.fixed->place.work = nullptr;
      const u32 full = sharedAddress(layout.slots);
      for (int s = threadIdx.x; s < p.slots; s += DECODE_WARPS * 32) ::Ring<typename L::S>::openSlot(full, full + p.slots * 8, s);
    }
    if (threadIdx.x == 64) layout.fixed->params = p;
    if constexpr (LLAMA) {
      const DecodeTurns& r = launch.turns;
      if (threadIdx.x == 65) layout.fixed->turns = r.positions != nullptr;
      static_assert(D / 2 <= sizeof(DecodeTurns::turns) / 8, "");
      if (r.positions != nullptr)
        for (int i = threadIdx.x; i < p.rows * (D / 2); i += DECODE_WARPS * 32) layout.turned[i] = turnedBy(r.turns[i % (D / 2)], r.positions[i / (D / 2)], r.factor);
    }
    bring(p, layout, 0, 0);
    if (lane < p.stages) barrierInit(ring.full + lane * 8, 1);
    if (SPLIT > 1 && threadIdx.x >= 96 && threadIdx.x < 98) barrierInit(sharedAddress(&layout.fixed->pairBars[threadIdx.x - 96]), WORKERS);
    opened();
    if constexpr (SPLIT > 1) {
      __syncwarp();
      clusterArrive();
    }
    const u32 number = *(volatile u32*)p.run + 1;
    copyWait<0>();
    __syncthreads();
    feed = {};
    feed.open(p, layout, warp);
    for (int s = 0; s < p.stages; s++) feed.issue(p, layout, ring.memory + s * DECODE_BOX, ring.full + s * 8, readOnce(), warp, s);

    if (ends.gather.y != nullptr) gather(ends, p.rows, number, warp, lane);
    if constexpr (SPLIT > 1) clusterWait(); // the other block has its barriers
    if constexpr (PACKED) {
      if (p.rows == 1) layers<1>(p, layout, number, state);
      else layers<2>(p, layout, number, state);
    } else {
      switch (p.rows) {
        case 1: layers<1>(p, layout, number, state); break;
        case 2: layers<2>(p, layout, number, state); break;
        case 3: layers<3>(p, layout, number, state); break;
        default: layers<4>(p, layout, number, state);
      }
    }
    __syncthreads();
    if (ends.ids != nullptr) choose(p, ends, layout, warp, lane);
    if (threadIdx.x == 0) {
      u32 before;
      asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p.run + 1), "r"(gridDim.x - 1) : "memory");
      if (before == gridDim.x - 1) {
        *p.run = number;
        for (int m = 0; ends.ids != nullptr && m < p.rows; m++) ends.ids[m] = idOf(atomicExch(likely(p) + m, 0)); // for the next run
      }
    }
  }
};
#endif
