// A chain of layers in one launch: what a decode step does between its
// embeddings and its logits, without a launch, and without a barrier of all
// thread blocks, between two layers.
//
// There is a thread block on every multiprocessor, and all go through the same
// list of layers. Layers hand each other tagged floats (tagged.cuh): whoever needs
// an element waits until it has the number of this run. A layer's output goes to
// plain memory too, for whoever comes after the launch.
//
//	linear:     y = f(norm(x) W^T + b) + residual, for one to four rows of x
//	attention:  append and LeanAttention, as in lean.cuh
//
// The weights are most of what is read, and none of them depends on anything.
// So every warp has a ring, and asks for the weights of its next layers while it
// waits for the x of this one: memory stays busy across the ends of layers. W has
// tiles of 16 rows, which the thread blocks share out, and boxes of 256 bytes of
// its columns, which the warps of a block do.
#pragma once
#include "lean.cuh"
#include "linear.cuh"

constexpr int CHAIN_WARPS = 8, CHAIN_ROWS = 4;
constexpr int CHAIN_TILE = 16;    // rows of W
constexpr int CHAIN_BOX = 4096;   // bytes: 256 of each row of a tile
constexpr int CHAIN_GROUP = 8;    // tiles of one row of x whose sums meet at once
constexpr int CHAIN_PAD = 16;     // floats between rows of x

// One layer of x, or several of the same.
struct ChainLinear {
  const u64* tagged; // x: rows x in; null: it was there before the launch, and is
  const float* x;    // here
  const u64* residualTagged; // likewise, rows x out of part 0; both may be null
  const float* residual;
  const float *gamma, *beta;   // of the norm; may be null
  const float* b[LINEAR_PARTS]; // may be null
  float* y[LINEAR_PARTS];       // rows x out
  u64* made[LINEAR_PARTS];      // the same, tagged; may be null
  int out[LINEAR_PARTS];
  int tiles[LINEAR_PARTS]; // up to the end of each part
  int each, over;          // tiles of a thread block; one more has each of the first `over` blocks
  int in;                  // a multiple of 128
  int norm, relu;
  float eps, inverse;      // 1/in
};

struct ChainAttention {
  Params p;
  Links links;
};

enum : int { CHAIN_LINEAR = 0, CHAIN_ATTENTION = 1 };
constexpr int CHAIN_BODY = 368; // bytes of a layer without its maps

struct alignas(128) ChainLayer {
  TensorMap maps[LINEAR_PARTS]; // of W, or of keys and values
  char body[CHAIN_BODY];
  int kind;
};
static_assert(sizeof(ChainLinear) <= CHAIN_BODY && sizeof(ChainAttention) <= CHAIN_BODY && sizeof(ChainLayer) == 768, "");

// What a warp has to know of a layer to ask for its weights.
struct alignas(16) ChainFeed {
  const TensorMap* maps;
  int boxes; // in a tile
  int each, over;
  int second, third; // the first tiles of parts 1 and 2
};

struct ChainParams {
  const ChainLayer* layers;
  const ChainFeed* feeds; // of the linear ones
  const Work* work;       // of attention: the same in all layers
  const int* blind;
  u32* run;               // the number of the last run, and how many thread blocks are done
  int count, feedCount;
  int rows;   // of x
  int group;  // tiles whose sums meet at once
  int ofRows; // 65536/rows, rounded up
  int spread; // log2 of the rows that the warps share out: 2^spread >= rows
  int stages; // of a warp's ring, in boxes
  int area;   // bytes for x, or for attention
};

#if __CUDA_ARCH__ >= 900
template <class T, int D> struct Chain {
  using L = Lean<T, D, true>;

  // What is in shared memory behind the rings.
  struct Room {
    char* area;        // x of a linear layer, or all that attention has
    float* sums;       // twice: tiles x warps x rows x CHAIN_TILE
    float2* moments;   // of each warp's part of a row: mean and sum of squares
    char* bodies;      // of this layer and the next, in turn
    char* step;        // of attention: this block's Work, and how many rows see no key
    u64* words;        // of each thread that finishes elements: what it adds, the residual
    float* biases;     // and the bias
    u64* bars;
    ChainFeed* feeds;
    __device__ __forceinline__ Room(char* memory, const ChainParams& p) {
      area = memory + CHAIN_WARPS * p.stages * CHAIN_BOX;
      sums = (float*)(area + p.area);
      moments = (float2*)(sums + 2 * CHAIN_GROUP * CHAIN_WARPS * CHAIN_TILE);
      bodies = (char*)(moments + CHAIN_WARPS);
      step = bodies + 2 * (CHAIN_BODY + 16);
      words = (u64*)(step + 64);
      biases = (float*)(words + CHAIN_GROUP * CHAIN_TILE);
      feeds = (ChainFeed*)(biases + CHAIN_GROUP * CHAIN_TILE);
      bars = (u64*)(feeds + p.feedCount);
    }
  };

  // A warp's way through the boxes of its block's tiles: every eighth.
  struct Walk {
    int tile, end, box, boxes;
    __device__ __forceinline__ void begin(int each, int over, int boxes_, int warp) {
      const int block = blockIdx.x;
      tile = block * each + min(block, over), end = tile + each + (block < over), boxes = boxes_, box = warp;
      settle();
    }
    __device__ __forceinline__ void next() {
      box += CHAIN_WARPS;
      if (box >= boxes) settle();
    }
    __device__ __forceinline__ void settle() {
      while (box >= boxes && tile < end) box -= boxes, tile++;
    }
  };

  // The asking side of a warp's ring, which is layers ahead of the computing one.
  struct Feed {
    Walk at;
    const TensorMap* maps;
    int second, third; // the first tiles of parts 1 and 2
    int layer;         // whose boxes come after those of `at`

    // To the next layer that has boxes for this warp.
    __device__ __forceinline__ void open(const ChainParams& p, const Room& room, int warp) {
      while (at.tile >= at.end && layer < p.feedCount) {
        const ChainFeed& f = room.feeds[layer++];
        maps = f.maps, second = f.second, third = f.third;
        at.begin(f.each, f.over, f.boxes, warp);
      }
    }
    // Asks for the warp's next box, if there is one.
    __device__ __forceinline__ void issue(const ChainParams& p, const Room& room, u32 to, u32 bar, u64 policy, int warp, int lane) {
      if (at.tile >= at.end) return;
      if (lane == 0) {
        const int part = (at.tile >= second) + (at.tile >= third), first = part == 0 ? 0 : part == 1 ? second : third;
        barrierExpect(bar, CHAIN_BOX);
        copyBox(to, maps + part, 0, (at.tile - first) * CHAIN_TILE, at.box * 2, bar, policy);
      }
      at.next();
      if (at.tile >= at.end) open(p, room, warp);
    }
  };

  struct Ring {
    u32 memory, full;
    int slot, stages;
    u32 parity;
    u64 policy;
  };

  // x as right operands in shared memory, of its norm if that is wanted. Where the
  // type has few exponents, each 64 elements are scaled by a power of two; 16-bit
  // types take two parts of an element. The 16 elements of a step are 64 bytes:
  // what lanes 0 to 3 take of the leading parts, and then of the others. A row has
  // two to eight warps to itself, which share its pieces of 64 elements out. Behind
  // x lie gamma and beta, if there is a norm, and what the products of each piece
  // are multiplied by.
  //
  // All other thread blocks wait for this one here, and its few instructions wait
  // for each other: their number is what counts.
  __device__ static __forceinline__ void prepare(const ChainParams& p, const ChainLinear& o, const Room& room, u32 run, int warp, int lane) {
    const int stride = o.in + CHAIN_PAD, pieces = o.in / 64;
    const int sharers = CHAIN_WARPS >> p.spread, m = warp >> (3 - p.spread), member = warp & (sharers - 1);
    float* const x = (float*)room.area;
    float *const gamma = x + p.rows * stride, *const beta = gamma + stride, *const down = gamma + (o.norm ? 2 * stride : 0) + m * pieces;
    float* const row = x + m * stride;
    const bool works = m < p.rows;
    if (o.norm) {
#pragma unroll 1
      for (int i = threadIdx.x * 2; i < o.in; i += CHAIN_WARPS * 64) {
        if (o.gamma != nullptr) copyFew<8>(gamma + i, o.gamma + i);
        if (o.beta != nullptr) copyFew<8>(beta + i, o.beta + i);
      }
      copyCommit();
    }
    if (works) {
      float sum = 0.f;
      const int mine = m * o.in + lane * 2;
      // One word first, if there are many: as long as that is not there, nothing else is asked for.
      if (o.tagged != nullptr && pieces > 4 * sharers) {
        float a, b;
        while (__any_sync(~0u, !loadTagged2(o.tagged + mine + member * 64, run, a, b))) {}
      }
      const auto some = [&](auto count, int piece) {
        constexpr int N = decltype(count)::value;
        float2 v[N] = {};
        if (o.tagged != nullptr) {
          bool late;
          do {
            late = false;
#pragma unroll
            for (int j = 0; j < N; j++)
              if (piece + j * sharers < pieces) late |= !loadTagged2(o.tagged + mine + (piece + j * sharers) * 64, run, v[j].x, v[j].y);
          } while (__any_sync(~0u, late));
        } else {
#pragma unroll
          for (int j = 0; j < N; j++)
            if (piece + j * sharers < pieces) v[j] = *(const float2*)(o.x + mine + (piece + j * sharers) * 64);
        }
        if (o.norm) {
#pragma unroll
          for (int j = 0; j < N; j++)
            if (piece + j * sharers < pieces) *(float2*)(row + (piece + j * sharers) * 64 + lane * 2) = v[j], sum += v[j].x + v[j].y;
        } else {
          put<N>(row, down, piece, pieces, sharers, v, lane);
        }
      };
      int piece = member;
#pragma unroll 1
      for (; piece + 4 * sharers < pieces; piece += 8 * sharers) some(Number<8>(), piece);
      if (piece < pieces) some(Number<4>(), piece);
      if (o.norm) {
        const float mean = __fdividef(sumOfWarp(sum), (float)max(countOf(pieces, member, p.spread), 1));
        float squares = 0.f;
#pragma unroll 2
        for (int i = member * 64 + lane * 2; i < o.in; i += sharers * 64) {
          const float2 v = *(const float2*)(row + i);
          squares += (v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean);
        }
        squares = sumOfWarp(squares);
        if (lane == 0) room.moments[warp] = make_float2(mean, squares);
      }
    }
    if (o.norm) {
      copyWait<0>();
      __syncthreads();
      if (works) {
        // Means and sums of squares of the warps merge into the row's.
        float2 part[CHAIN_WARPS];
        float middle = 0.f, squares = 0.f;
#pragma unroll
        for (int k = 0; k < CHAIN_WARPS; k++)
          if (k < sharers) part[k] = room.moments[warp - member + k], middle += part[k].x * countOf(pieces, k, p.spread);
        middle *= o.inverse;
#pragma unroll
        for (int k = 0; k < CHAIN_WARPS; k++)
          if (k < sharers) squares += part[k].y + (part[k].x - middle) * (part[k].x - middle) * countOf(pieces, k, p.spread);
        const float f = rsqrtf(squares * o.inverse + o.eps);
        const auto some = [&](int piece) {
          float2 v[2] = {};
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int i = (piece + j * sharers) * 64 + lane * 2;
            if (i >= o.in) break;
            v[j] = *(const float2*)(row + i);
            v[j].x = (v[j].x - middle) * f, v[j].y = (v[j].y - middle) * f;
            if (o.gamma != nullptr) {
              const float2 g = *(const float2*)(gamma + i);
              v[j].x *= g.x, v[j].y *= g.y;
            }
            if (o.beta != nullptr) {
              const float2 b = *(const float2*)(beta + i);
              v[j].x += b.x, v[j].y += b.y;
            }
          }
          __syncwarp();
          put<2>(row, down, piece, pieces, sharers, v, lane);
        };
#pragma unroll 1
        for (int piece = member; piece < pieces; piece += 2 * sharers) some(piece);
      }
    }
    __syncthreads();
  }
  // The elements of a row that a warp has.
  __device__ static __forceinline__ int countOf(int pieces, int member, int spread) { return ((pieces - member + (CHAIN_WARPS >> spread) - 1) >> (3 - spread)) * 64; }

  template <int N> struct Number { static constexpr int value = N; };

  // Operands of up to N pieces of a row, of which each lane has two elements; between
  // them are those of the other sharers.
  template <int N> __device__ static __forceinline__ void put(float* row, float* down, int piece, int pieces, int sharers, float2 (&v)[N], int lane) {
    if constexpr (T::narrow) {
      float top[N];
#pragma unroll
      for (int j = 0; j < N; j++) top[j] = fmaxf(fabsf(v[j].x), fabsf(v[j].y));
#pragma unroll
      for (int i = 16; i > 0; i /= 2)
#pragma unroll
        for (int j = 0; j < N; j++) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], i));
#pragma unroll
      for (int j = 0; j < N; j++) {
        const int e = exponentOf(top[j]);
        const float up = powerOf(-e);
        v[j].x *= up, v[j].y *= up;
        if (lane == 0 && piece + j * sharers < pieces) down[piece + j * sharers] = powerOf(e);
      }
    }
    // The i-th pair of a step's eight: lane i%4 takes it, as its first or second word.
    const int i = lane & 7;
    u32* at = (u32*)row + piece * 64 + (lane >> 3) * 16 + (i & 3) * 2 + (i >> 2);
#pragma unroll
    for (int j = 0; j < N; j++) {
      const u32 lead = T::pack(v[j].x, v[j].y), rest = T::pack(v[j].x - T::low(lead), v[j].y - T::high(lead));
      if (piece + j * sharers < pieces) at[j * sharers * 64] = lead, at[j * sharers * 64 + 8] = rest;
    }
  }

  __device__ static __forceinline__ void linear(const ChainParams& p, const ChainLinear& o, const Room& room, u32 run, Ring& ring, Feed& feed, int warp, int lane) {
    Walk at;
    at.begin(o.each, o.over, o.in / 128, warp);
    const int t1 = at.end, t0 = t1 - o.each - ((int)blockIdx.x < o.over);
    if (t0 == t1) return;

    const int rows = p.rows;
    const int g = lane >> 2, t = lane & 3;
    const int stride = o.in + CHAIN_PAD, pieces = o.in / 64;
    const float* x = (const float*)room.area + (g & 3) * stride + (g >> 2) * 8 + t * 2; // columns 0 to 3: the leading parts of rows, 4 to 7 the others
    const float* down = (const float*)room.area + (rows + (o.norm ? 2 : 0)) * stride; // of row 2t, and of row 2t+1; those that are not there count as the last
    const float *const down0 = down + min((t & 1) * 2, rows - 1) * pieces, *const down1 = down + min((t & 1) * 2 + 1, rows - 1) * pieces;
    const bool there = (g & 3) < rows;
    const u32 row = (lane & 7) + ((lane >> 3) & 1) * 8, half = (lane >> 4) * 16;
    // The element that a thread finishes: of tile `k` of a group, row `m` of x.
    const int c = threadIdx.x % CHAIN_TILE, k = threadIdx.x / CHAIN_TILE * p.ofRows >> 16, m = threadIdx.x / CHAIN_TILE - k * rows;
    u64* const word = room.words + threadIdx.x; // of the first threads
    float* const bias = room.biases + threadIdx.x;
    // It is asked what is added to it before it is needed: a bias comes from memory.
    // That comes to shared memory: a register that is waited for is waited for at the
    // end of a loop.
    int part, n;
    long long place;
    bool finishes;
    const auto element = [&](int first) {
      const int tile = first + k;
      part = (tile >= o.tiles[0]) + (tile >= o.tiles[1]), n = (tile - (part > 0 ? o.tiles[part - 1] : 0)) * CHAIN_TILE + c;
      finishes = k < min(p.group, t1 - first) && n < o.out[part];
      place = (long long)m * o.out[part] + n;
      if (!finishes) return;
      if (o.b[part] != nullptr) copyFew<4>(bias, o.b[part] + n);
      if (o.residualTagged != nullptr) copyFew<8>(word, o.residualTagged + place);
      copyCommit();
    };
    element(t0);
    prepare(p, o, room, run, warp, lane);

    // A box that is used up makes room for another, which is asked for when the next
    // one is waited for, or after the layer's last store: nobody waits for that.
    int owed = -1;
    const auto refill = [&]() {
      if (owed >= 0) feed.issue(p, room, ring.memory + owed * CHAIN_BOX, ring.full + owed * 8, ring.policy, warp, lane);
      owed = -1;
    };
    int turn = 0;
#pragma unroll 1
    for (int first = t0; first < t1; first += p.group, turn ^= 1) {
      const int now = min(p.group, t1 - first);
      float* sums = room.sums + turn * CHAIN_GROUP * CHAIN_WARPS * CHAIN_TILE;
      if (first != t0) element(first);
#pragma unroll 1
      for (int i = 0; i < now; i++) {
        float sum[4] = {};
#pragma unroll 1
        while (at.tile == first + i) {
          refill();
          const u32 slot = ring.memory + ring.slot * CHAIN_BOX;
          const float* from = x + at.box * 128;
          // Everything is asked for before anything is used.
          uint2 v[8];
          u32 w[8][4];
          float f[4] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
          for (int s = 0; s < 8; s++) v[s] = there ? *(const uint2*)(from + s * 16) : make_uint2(0, 0);
          if constexpr (T::narrow) {
            const float2 a = *(const float2*)(down0 + at.box * 2), b = *(const float2*)(down1 + at.box * 2);
            f[0] = a.x, f[1] = b.x, f[2] = a.y, f[3] = b.y;
          }
          barrierWait(ring.full + ring.slot * 8, ring.parity);
#pragma unroll
          for (int s = 0; s < 8; s++) loadMatrix(w[s], slot + s / 4 * (CHAIN_BOX / 2) + swizzled(row, s % 4 * 32 + half));
          float acc[4][4] = {};
#pragma unroll
          for (int s = 0; s < 8; s++) T::mma(acc[s & 3], w[(s & 1) * 4 + s / 2], v[(s & 1) * 4 + s / 2].x, v[(s & 1) * 4 + s / 2].y); // acc[0] and [2] are of the first 64 columns
#pragma unroll
          for (int j = 0; j < 4; j++) sum[j] += (acc[0][j] + acc[2][j]) * f[j & 1] + (acc[1][j] + acc[3][j]) * f[2 + (j & 1)];
          __syncwarp();
          owed = ring.slot;
          if (++ring.slot == ring.stages) ring.slot = 0, ring.parity ^= 1;
          at.next();
        }
        // Columns 2t and 2t+1 are leading parts in lanes 0 and 1, others in lanes 2 and 3.
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int r = 2 * t + (j & 1);
          if (t < 2 && r < rows) sums[((i * CHAIN_WARPS + warp) * rows + r) * CHAIN_TILE + g + (j >> 1) * 8] = sum[j];
        }
      }
      __syncthreads();
      if (!finishes) continue;
      float v = 0.f;
#pragma unroll
      for (int w = 0; w < CHAIN_WARPS; w++) v += sums[((k * CHAIN_WARPS + w) * rows + m) * CHAIN_TILE + c];
      copyWait<0>();
      if (o.b[part] != nullptr) v += *bias;
      if (o.relu && v < 0.f) v = 0.f;
      if (o.residualTagged != nullptr) {
        u64 other = *word; // most likely it was there
        while ((u32)(other >> 32) != run) other = loadWord(o.residualTagged + place);
        v += __uint_as_float((u32)other);
      } else if (o.residual != nullptr) {
        v += o.residual[place];
      }
      if (o.made[part] != nullptr) storeTagged(o.made[part] + place, run, v);
      o.y[part][place] = v;
    }
    refill();
  }

  // A call, so that what linear layers keep in registers is not in the way of
  // attention's loops. Offsets are into shared memory.
  __device__ static __noinline__ void attention(int body, int area, int step, const TensorMap* maps, u32 run) {
    extern __shared__ __align__(1024) char memory[];
    const ChainAttention& o = *(const ChainAttention*)(memory + body);
    const Work* work = (const Work*)(memory + step);
    L::run(o.p, maps, memory + area, work, (const int*)(work + 1), &o.links, run);
    __syncthreads();
    L::close(o.p, memory + area, *work);
  }

  __device__ static __forceinline__ void run(const ChainParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Room room(memory, p);
    Ring ring;
    ring.memory = sharedAddress(memory) + warp * p.stages * CHAIN_BOX, ring.full = sharedAddress(room.bars) + warp * p.stages * 8;
    ring.slot = 0, ring.stages = p.stages, ring.parity = 0, ring.policy = readOnce();
    for (int i = threadIdx.x; i < 2 * p.feedCount; i += CHAIN_WARPS * 32) copy16(sharedAddress(room.feeds) + i * 16, (const char*)p.feeds + i * 16, true);
    auto bodyOf = [&](int layer) { return room.bodies + layer % 2 * (CHAIN_BODY + 16); };
    auto kindOf = [&](int layer) { return *(const int*)(bodyOf(layer) + CHAIN_BODY); };
    auto bring = [&](int layer) { // its body
      constexpr int PIECES = (CHAIN_BODY + 16) / 16;
      if (layer < p.count && threadIdx.x < PIECES) copy16(sharedAddress(bodyOf(layer)) + threadIdx.x * 16, p.layers[layer].body + threadIdx.x * 16, true);
      copyCommit();
    };
    if (p.work != nullptr) {
      if (threadIdx.x < sizeof(Work) / 16) copy16(sharedAddress(room.step) + threadIdx.x * 16, (const char*)(p.work + blockIdx.x) + threadIdx.x * 16, true);
      if (threadIdx.x == 32) *(int*)(room.step + sizeof(Work)) = *p.blind;
    }
    bring(0);
    if (lane < p.stages) barrierInit(ring.full + lane * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    const u32 number = *(volatile u32*)p.run + 1;
    copyWait<0>();
    __syncthreads();
    Feed feed;
    feed.layer = 0, feed.at.tile = feed.at.end = 0;
    feed.open(p, room, warp);
    for (int s = 0; s < p.stages; s++) feed.issue(p, room, ring.memory + s * CHAIN_BOX, ring.full + s * 8, ring.policy, warp, lane);

#pragma unroll 1
    for (int layer = 0; layer < p.count; layer++) {
      copyWait<0>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the copy engine writes where x was
      __syncthreads(); // the layer before is done with its memory, and this one's body is there
      bring(layer + 1);
      const char* body = bodyOf(layer);
      if (kindOf(layer) == CHAIN_LINEAR) {
        linear(p, *(const ChainLinear*)body, room, number, ring, feed, warp, lane);
      } else {
        attention((int)(body - memory), (int)(room.area - memory), (int)(room.step - memory), p.layers[layer].maps, number);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 before;
      asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p.run + 1), "r"(gridDim.x - 1) : "memory");
      if (before == gridDim.x - 1) *p.run = number;
    }
  }
};
#endif
