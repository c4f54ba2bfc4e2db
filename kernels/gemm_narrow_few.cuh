// Linear layers whose weights have 8 or 4 bits, of up to 16 columns of operands, by clusters, in one launch (9.0). The thread blocks of a
// cluster divide the columns of W, and a block keeps operands of its slice of x in shared memory. Producer warps fill a ring. A stage has
// several jobs, one for a warp: some rows of W times a unit of columns. At the end of a tile, the warps send their sums to the blocks of the
// cluster, and each block finishes a part of the tile.
//
// Before a launch waits for the launch ahead, it fills its ring, and prefetches the weights behind those of the ring to the L2 cache.
#pragma once
#include "gemm_narrow.cuh"

constexpr int FEW_WARPS = 8;                 // that multiply; four more load
constexpr int FEW_THREADS = (FEW_WARPS + 4) * 32;
constexpr int FEW_STAGE = NARROW_CHUNKS * NARROW_STRIPS * NARROW_CHUNK; // bytes of a stage's weights
constexpr int FEW_SHARE = 64;                // rows of W that clusters share out
constexpr int FEW_ZEROS = 64;                // bytes of operands that are 0
constexpr int FEW_TOGETHER = 4;              // pieces of x, of 8 times 32 columns, that a warp loads together

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Converts E4M3 weights two at a time, by an instruction. Numbers keep their size: NarrowE4M3 makes them 2^-8 times as large. Every byte that
// is multiplied must be a weight, since 0x7f and 0xff become NaN.
struct HopperE4M3 : NarrowE4M3 {
  __device__ static __forceinline__ void two(u32& even, u32& odd, u32 w) {
    const u32 pairs = __byte_perm(w, 0, 0x3120);
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }" : "=r"(even), "=r"(odd) : "r"(pairs));
  }
  __device__ static __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int, const u32 (&)[2], u32) {
    two(a[0][0], a[0][1], w.x), two(a[0][2], a[0][3], w.y);
    two(a[1][0], a[1][1], w.z), two(a[1][2], a[1][3], w.w);
  }
};

// The factor of scales. Packed scales of E4M3 are for numbers times 2^-8.
template <class D> constexpr float factorOf = same<D, HopperE4M3> ? 0x1p-8f : 1.f;

// What kernels for float16 operands and for digits share, for NT blocks of eight columns of operands. The kernel, Me, has:
//
//   OPERAND     bytes of 32 columns of an operand
//   makesSums   whether operands have sums, in the memory behind the operands
//   pairsOf     pairs of sums that a warp sends for each row of W
//   each        sums that a warp sends for each row of x
//   operands    makes operands of the block's slice of x
//   clear       sets the sums of a tile to 0
//   multiply    adds the products of a job
//   send        sends the sums of a warp
template <class Me, class D, int NT> struct NarrowFew {
  static constexpr int STRIPS = NT == 1 ? 4 : 2, ROWS = STRIPS * 16; // of a job. More sums would leave no registers for the next launch's blocks.
  static constexpr int JOBS = NARROW_STRIPS / STRIPS, LOG_JOBS = JOBS == 4 ? 2 : 3, JOB = FEW_STAGE / JOBS; // of a stage; bytes
  static constexpr int TEAMS = FEW_WARPS / JOBS; // teams of warps, which take stages in turn
  const NarrowParams& p;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), g = lane / 4, q = lane % 4;
  const int ranks = 31 - __clz(p.ranks); // log2 of a cluster's blocks
  const int rank = blockIdx.x & (p.ranks - 1), cluster = blockIdx.x >> ranks, clusters = gridDim.x >> ranks;
  const int shares = (p.out + FEW_SHARE - 1) / FEW_SHARE, begin = (int)((long long)cluster * shares / clusters) * (FEW_SHARE / ROWS), end = (int)((long long)(cluster + 1) * shares / clusters) * (FEW_SHARE / ROWS);
  const int firstUnit = rank * p.units >> ranks, units = ((rank + 1) * p.units >> ranks) - firstUnit, deep = units * D::K32;
  const int factors = p.group == 0 ? 0 : D::K32 >> p.shift; // groups of a unit
  const int pairs = Me::pairsOf(p);
  const int most = (p.units + p.ranks - 1 >> ranks) * D::K32 * p.columns; // operands of 32 columns of a block
  const u32 ring, zeros, x, sums, parts, tops, downs, full, empty, got, taken; // in shared memory

  __device__ __forceinline__ NarrowFew(const NarrowParams& p, u32 ring)
      : p(p), ring(ring), zeros(ring + p.stages * p.stage), x(zeros + FEW_ZEROS), sums(x + most * Me::OPERAND), parts(sums + (Me::makesSums(p) ? (most * 4 + 15) / 16 * 16 : 0)),
        tops(parts + FEW_WARPS * ROWS * 8 * pairs), downs(tops + NT * 32), full(downs + NT * 32), empty(full + p.stages * 8), got(empty + p.stages * 8), taken(got + 8) {}

  __device__ __forceinline__ Me& me() { return static_cast<Me&>(*this); }

  // A tile has a power of two of the cluster's pieces, ROWS rows each, within 256 rows. Its stages have JOBS jobs.
  struct Tile {
    int log, of, units, stages; // log: log2 of the pieces
    int strips, there, sub; // of the 256 rows; of the tile; before the tile
  };
  __device__ __forceinline__ Tile tileOf(int first) const {
    Tile t;
    const int left = min(end - first, JOBS - first % JOBS);
    t.log = 31 - __clz(left);
    t.of = 1 << t.log;
    t.units = JOBS >> t.log;
    t.stages = units + t.units - 1 >> LOG_JOBS - t.log;
    t.strips = min(NARROW_STRIPS, (p.out - first / JOBS * NARROW_TILE + 15) / 16);
    t.sub = first % JOBS * STRIPS;
    t.there = min(t.of * STRIPS, t.strips - t.sub);
    return t;
  }
  __device__ __forceinline__ int planeBytes() const { return factors * NARROW_TILE * p.factor; }

  // The copies of every fourth stage, from number `which` on: a warp alone would be slower than memory. A parity tells only two rounds of a
  // slot apart. So a warp waits for slots of its own stages alone, and a ring has four stages or more: no warp is two rounds ahead of or
  // behind a slot. AHEAD: copies of the stages behind those of a full ring, to the L2 cache.
  template <bool AHEAD> __device__ __forceinline__ void copyStages(int which, int from, int to, int last) const {
    const u64 policy = readOnce();
    const int each = max(1, p.group / D::K32); // units of a group
    int slot = 0, stage = 0;
    u32 parity = 1;
#pragma unroll 1
    for (int first = begin; first < end && stage < to;) {
      const Tile t = tileOf(first);
      const bool whole = t.there == t.strips && t.there == t.of * STRIPS; // copies are contiguous
      const int chunk = t.strips * NARROW_CHUNK, bytes = t.there * NARROW_CHUNK, plane = t.strips * 16 * p.factor, rows = t.there * 16 * p.factor, high = t.of * ROWS * p.factor;
      int group = firstUnit / each * factors, turn = firstUnit % each, unit = firstUnit;
      const char* w = p.w + (long long)(first / JOBS) * p.chunks * (NARROW_STRIPS * NARROW_CHUNK) + (long long)firstUnit * NARROW_CHUNKS * chunk + t.sub * NARROW_CHUNK;
      long long at = (long long)(first / JOBS) * NARROW_TILE * p.groups * p.factor + (long long)group * plane + t.sub * 16 * p.factor;
#pragma unroll 1
      for (int s = 0; s < t.stages && stage < to; s++, stage++) {
        const bool mine = stage % 4 == which && stage >= from;
        if constexpr (!AHEAD) {
          if (stage == p.stages) {
            if (p.ahead > 0) copyStages<true>(which, p.stages, p.stages + p.ahead, 0);
            waitForEarlier();
          }
          if (stage == last) letNextStart();
          if (mine && stage >= p.stages) barrierWait(empty + slot * 8, parity);
        }
        const u32 bar = full + slot * 8;
        u32 weights = ring + slot * p.stage, scales = weights + FEW_STAGE;
        int all = 0;
#pragma unroll 1
        for (int i = 0; i < t.units && unit < firstUnit + units; i++, unit++) {
          const int chunks = min(NARROW_CHUNKS, p.chunks - unit * NARROW_CHUNKS), groups = min(factors, p.groups - group);
          all += chunks * bytes + (p.kind == NO_SECOND ? 1 : 2) * groups * rows;
          if (!mine) {
          } else if (AHEAD) {
            if (whole) fetchAhead(w, chunks * bytes);
            else
#pragma unroll 1
              for (int c = 0; c < chunks; c++) fetchAhead(w + c * chunk, bytes);
          } else if (whole) {
            copyBulk(weights, w, chunks * bytes, bar, policy);
            if (groups > 0) copyBulk(scales, p.scales + at, groups * rows, bar, policy);
            if (p.kind != NO_SECOND) copyBulk(scales + planeBytes(), p.second + at, groups * rows, bar, policy);
          } else {
#pragma unroll 1
            for (int c = 0; c < chunks; c++) copyBulk(weights + c * t.of * (STRIPS * NARROW_CHUNK), w + c * chunk, bytes, bar, policy);
#pragma unroll 1
            for (int k = 0; k < groups; k++) {
              copyBulk(scales + k * high, p.scales + at + k * plane, rows, bar, policy);
              if (p.kind != NO_SECOND) copyBulk(scales + planeBytes() + k * high, p.second + at + k * plane, rows, bar, policy);
            }
          }
          weights += t.of * JOB, scales += factors * high, w += NARROW_CHUNKS * chunk;
          if (++turn == each) turn = 0, group += factors, at += factors * plane;
        }
        if (!AHEAD && mine) barrierExpect(bar, all);
        if (++slot == p.stages) slot = 0, parity ^= 1;
      }
      first += t.of;
    }
  }

  __device__ __forceinline__ void produce(int which) const {
    int stages = 0;
    for (int first = begin; first < end;) {
      const Tile t = tileOf(first);
      stages += t.stages, first += t.of;
    }
    if (!p.early) waitForEarlier();
    copyStages<false>(which, 0, stages, max(stages - p.late, p.stages));
    waitForEarlier();
    letNextStart();
  }

  // Lane q's elements of 32 columns of a row of x, number i of the slice.
  __device__ __forceinline__ void elements(float (&v)[8], int row, int i) const {
    const float* const from = (const float*)p.x + (long long)row * p.in;
    const int first = (firstUnit * D::K32 + i) * 32 + 2 * q;
    if (p.order == nullptr && p.in % 2 == 0) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int k = first + j * 8;
        float2 pair = make_float2(0.f, 0.f);
        if (i < deep && k < p.in) pair = *(const float2*)(from + k);
        v[2 * j] = pair.x, v[2 * j + 1] = pair.y;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int k = first + j / 2 * 8 + j % 2;
      v[j] = i < deep && k < p.in ? from[p.order != nullptr ? p.order[k] : k] : 0.f;
    }
  }

  // A piece of the block's slice of x is 8 times 32 columns of a row, and a lane has eight elements of the piece. A pass of a warp takes
  // FEW_TOGETHER pieces. Elements behind the last piece are 0.
  __device__ __forceinline__ int wide() const { return (deep + 7) / 8; } // pieces of a row
  __device__ __forceinline__ void loadPieces(float (&v)[FEW_TOGETHER][8], int first) const {
#pragma unroll
    for (int j = 0; j < FEW_TOGETHER; j++) {
      const int of = first + j * FEW_WARPS;
      elements(v[j], min(of / wide(), p.rows - 1), of < wide() * p.rows ? of % wide() * 8 + g : deep);
    }
  }

  // Finds the largest magnitude of each row of the block's slice of x. v keeps the elements of the warp's last pass.
  __device__ __forceinline__ void findTops(float (&v)[FEW_TOGETHER][8]) const {
    const int all = wide() * p.rows;
#pragma unroll 1
    for (int first = warp; first < all; first += FEW_WARPS * FEW_TOGETHER) {
      loadPieces(v, first);
#pragma unroll
      for (int j = 0; j < FEW_TOGETHER; j++) {
        const int of = first + j * FEW_WARPS;
        u32 top = 0; // NaN has more bits than every number
#pragma unroll
        for (int k = 0; k < 8; k++) top = max(top, __float_as_uint(v[j][k]) & 0x7fffffff);
        top = __reduce_max_sync(~0u, top);
        if (lane == 0 && of < all) raise(tops + of / wide() * 4, __uint_as_float(top));
      }
    }
  }

  // Calls make(elements, row, i) for the warp's pieces, behind findTops. i: the lane's 32 columns of the slice.
  template <class F> __device__ __forceinline__ void eachPiece(float (&v)[FEW_TOGETHER][8], const F& make) const {
    const int all = wide() * p.rows;
    const bool one = all <= FEW_WARPS * FEW_TOGETHER; // v has all elements
#pragma unroll 1
    for (int first = warp; first < all; first += FEW_WARPS * FEW_TOGETHER) {
      if (!one) loadPieces(v, first);
#pragma unroll
      for (int j = 0; j < FEW_TOGETHER; j++) {
        const int of = first + j * FEW_WARPS;
        if (of >= all) break;
        make(v[j], of / wide(), of % wide() * 8 + g);
      }
    }
  }
  __device__ static __forceinline__ void raise(u32 at, float v) { // floats of no sign are in the order of their bits
    u32 before;
    asm volatile("atom.shared.max.u32 %0, [%1], %2;" : "=r"(before) : "r"(at), "r"(__float_as_uint(v)) : "memory");
  }
  __device__ static __forceinline__ void store1(u32 at, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory"); }

  // The numbers that an output of the block's part of a tile needs besides sums.
  struct Output {
    int at, o, row;
    float scale, bias, residual;
  };
  __device__ __forceinline__ Output output(int i, int first, int log) const {
    Output a;
    const int eight = p.rows == 1 ? i : i / p.rows, slot = eight / 8, h = (slot << ranks) + rank;
    a.row = i - eight * p.rows;
    a.o = first * ROWS + h * 8 + eight % 8;
    a.at = slot * (FEW_WARPS >> log << ranks) * 8 + eight % 8;
    a.scale = 1.f, a.bias = a.residual = 0.f;
    if (slot >= 2 * STRIPS << log >> ranks || a.o >= p.out) {
      a.o = p.out;
      return a;
    }
    if (p.group == 0) a.scale = ((const float*)p.scales)[a.o] * factorOf<D>;
    if (p.bias != nullptr) a.bias = p.bias[a.o];
    if (p.residual != nullptr) a.residual = p.residual[(long long)a.row * p.out + a.o];
    return a;
  }
  __device__ __forceinline__ void finish(const Output& a, int log) const {
    if (a.o >= p.out) return;
    const int sources = FEW_WARPS >> log << ranks, each = Me::each(p);
    float v = 0.f;
#pragma unroll 4
    for (int k = 0; k < sources; k++) {
      const u32 at = parts + (a.at + k * 8) * pairs * 8 + a.row * each * 4;
      v += loadShared(at);
      if (each == 2) v += loadShared(at + 4);
    }
    v = activated(p.activation, v * a.scale + a.bias) + a.residual;
    if (a.o < p.split) p.y[(long long)a.row * p.split + a.o] = v;
    else p.y2[(long long)a.row * (p.out - p.split) + a.o - p.split] = v;
  }

  template <int FLUSH> __device__ __forceinline__ void consume() {
    int slot = warp / JOBS, next = slot; // the warp's next stage, from the beginning of the tile
    u32 parity = 0, tiles = 0;
    const int job = warp % JOBS;
    while (slot >= p.stages) slot -= p.stages, parity ^= 1;
#pragma unroll 1
    for (int first = begin; first < end; tiles++) {
      const Tile t = tileOf(first);
      me().clear();
#pragma unroll 1
      for (; next < t.stages; next += TEAMS) {
        barrierWait(full + slot * 8, parity);
        const int i = job >> t.log, unit = (next << LOG_JOBS - t.log) + i;
        if (unit < units) me().template multiply<FLUSH>(t, ring + slot * p.stage, unit, job & t.of - 1, i);
        releaseStage(empty + slot * 8, lane);
        for (slot += TEAMS; slot >= p.stages; slot -= p.stages) parity ^= 1;
      }
      next -= t.stages;
      if (tiles > 0 && ranks > 0) barrierWait(taken, (tiles - 1) & 1);
      if (threadIdx.x == 0 && ranks > 0) barrierExpect(got, FEW_WARPS * ROWS * 8 * pairs);
      me().template send<FLUSH == 0>(t.log);
      const int all = (2 * STRIPS << t.log >> ranks) * 8 * p.rows;
      const Output a = output(threadIdx.x, first, t.log);
      if (ranks > 0) barrierWait(got, tiles & 1);
      else syncWarps(FEW_WARPS); // a block without a cluster sends nothing
      finish(a, t.log);
#pragma unroll 1
      for (int i = threadIdx.x + FEW_WARPS * 32; i < all; i += FEW_WARPS * 32) finish(output(i, first, t.log), t.log);
      first += t.of;
      if (first == end) break;
      syncWarps(FEW_WARPS); // the sums are read
      if (ranks > 0 && threadIdx.x < p.ranks) barrierArriveRemote(remoteAddress(taken, threadIdx.x));
    }
  }

  // The products of all tiles.
  __device__ __forceinline__ void products() {
    if constexpr (!D::zeros) // integers of 4 bits have groups
      if (p.group == 0) return consume<0>();
    if constexpr (!same<D, NarrowInt8>) // INT8 has a scale for a row, or for 32 columns
      if (D::K32 == 1 << p.shift) return consume<D::K32>();
    consume<1>();
  }

  __device__ static __forceinline__ void run(const NarrowParams& p) {
    extern __shared__ __align__(128) char shared[];
    Me me(p, sharedAddress(shared));
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(me.full + s * 8, 1), barrierInit(me.empty + s * 8, JOBS);
      barrierInit(me.got, 1), barrierInit(me.taken, p.ranks);
      opened();
    }
    if (threadIdx.x < NT * 8) store1(me.tops + threadIdx.x * 4, 0.f);
    if (threadIdx.x < FEW_ZEROS / 4) store1(me.zeros + threadIdx.x * 4, 0.f);
    __syncthreads();
    if (me.ranks > 0) clusterArrive(); // in a launch without clusters the wait would be one of all warps, also of producers that wait for consumers
    if (me.warp >= FEW_WARPS) {
      fewerRegisters<48>();
      if (elected()) me.produce(me.warp - FEW_WARPS);
      __syncwarp();
      if (me.ranks > 0) clusterWait();
      return;
    }
    moreRegisters<96>(); // two blocks share a multiprocessor: of this launch and the next
    waitForEarlier();
    me.operands();
    if (me.ranks > 0) clusterWait(); // the barriers of the other blocks are there
    syncWarps(FEW_WARPS);
    me.products();
  }
};

// Multiplies x as parts of float16 with weights that become float16 in registers. Other is a kernel with its own `multiply`, or void.
template <class D, int NT, class Other = void> struct HalfFew : NarrowFew<typename Either<same<Other, void>, HalfFew<D, NT>, Other>::type, D, NT> {
  using Base = NarrowFew<typename Either<same<Other, void>, HalfFew<D, NT>, Other>::type, D, NT>;
  using Base::Base;
  using typename Base::Tile;
  using Base::p, Base::lane, Base::warp, Base::g, Base::q, Base::ranks, Base::rank, Base::firstUnit, Base::deep, Base::factors, Base::pairs;
  using Base::x, Base::zeros, Base::sums, Base::parts, Base::tops, Base::downs, Base::got;
  using Base::STRIPS, Base::ROWS, Base::JOBS, Base::LOG_JOBS, Base::JOB;
  using Base::elements, Base::planeBytes, Base::store1;
  static constexpr int OPERAND = 64;
  __device__ static __forceinline__ bool makesSums(const NarrowParams& p) { return p.kind == MINIMA; }
  __device__ static __forceinline__ int pairsOf(const NarrowParams& p) { return (p.columns + 1) / 2; }
  __device__ static __forceinline__ int each(const NarrowParams& p) { return p.parts; }
  float acc[STRIPS][NT][4], part[STRIPS][NT][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < STRIPS * NT * 4; i++) (&acc[0][0][0])[i] = 0.f, (&part[0][0][0])[i] = 0.f;
  }

  // Makes operands of the block's slice of x, times a power of two that brings the largest magnitude of a row's slice near 2^8.
  __device__ __forceinline__ void operands() {
    float v[FEW_TOGETHER][8];
    this->findTops(v);
    syncWarps(FEW_WARPS);
    if (threadIdx.x < p.columns) store1(downs + threadIdx.x * 4, powerOf(exponentOf(loadShared(tops + threadIdx.x / p.parts * 4))));
    this->eachPiece(v, [&](float (&e)[8], int row, int i) {
      const float up = powerOf(-exponentOf(loadShared(tops + row * 4)));
#pragma unroll
      for (int k = 0; k < 8; k++) e[k] *= up;
#pragma unroll 1
      for (int k = 0; k < p.parts; k++) {
        u32 w[4];
        float sum = 0.f;
#pragma unroll
        for (int l = 0; l < 4; l++) {
          w[l] = Float16::pack(e[2 * l], e[2 * l + 1]);
          const float a = Float16::low(w[l]), b = Float16::high(w[l]);
          sum += a + b, e[2 * l] -= a, e[2 * l + 1] -= b;
        }
        if (p.kind == MINIMA) {
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
        }
        if (i >= deep) continue;
        const int at = i * p.columns + row * p.parts + k;
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(x + at * 64 + q * 16), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        if (q == 0 && p.kind == MINIMA) store1(sums + at * 4, sum);
      }
    });
  }

  // MmaF16::mma in the order of the source.
  __device__ static __forceinline__ void multiplyAdd(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  // The products of a job with unit `unit` of the slice. FLUSH: a group ends after so many times 32 columns; 0: it is the row.
  template <int FLUSH> __device__ __forceinline__ void multiply(const Tile& t, u32 from, int unit, int piece, int i) {
    const int chunks = p.chunks - (firstUnit + unit) * NARROW_CHUNKS;
    const int there = FLUSH == 1 ? p.groups - 1 - (firstUnit + unit) * factors : 0; // the unit's last group
    const u32 plane = from + FEW_STAGE + i * factors * t.of * ROWS * p.factor, second = plane + planeBytes();
    const u32 weights = from + i * t.of * JOB + piece * (STRIPS * NARROW_CHUNK) + lane * 16;
    const int row = piece * ROWS + g;
    u32 at[NT], step[NT], less[STRIPS][2] = {};
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
      if constexpr (D::zeros) D::less(less[s], p.zero, p.zero);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const bool has = n * 8 + g < p.columns;
      at[n] = has ? x + (unit * D::K32 * p.columns + n * 8 + g) * 64 + q * 16 : zeros + q * 16;
      step[n] = has ? p.columns * 64 : 0;
    }
    constexpr int HALVES = D::K32 / NARROW_CHUNKS;
    if constexpr (FLUSH != 0) {
#pragma unroll
      for (int i = 0; i < STRIPS * NT * 4; i++) (&part[0][0][0])[i] = 0.f;
      if constexpr (D::zeros && FLUSH != 1)
        if (p.kind == ZEROS) loadZeros(less, second, row);
    }
#pragma unroll 1
    for (int c = 0; c < NARROW_CHUNKS; c++) { // short code: warps are at different places of it
      uint4 w[STRIPS];
#pragma unroll
      for (int s = 0; s < STRIPS; s++) w[s] = loadShared16(weights + s * NARROW_CHUNK + (chunks == 1 ? 0 : c * t.of * STRIPS * NARROW_CHUNK));
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int K = c * HALVES + half, group = min(K >> p.shift, there) * t.of * ROWS; // columns without a group, or a chunk, are 0
        if constexpr (D::zeros && FLUSH == 1)
          if (p.kind == ZEROS) loadZeros(less, second + group * 2, row);
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) b[n] = loadShared16(at[n]), at[n] += step[n];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          __syncwarp(); // else the compiler puts products that wait for each other side by side
#pragma unroll
          for (int s = 0; s < STRIPS; s++) {
            u32 a[2][4];
            D::decode(a, w[s], half, less[s], p.magic);
#pragma unroll
            for (int n = 0; n < NT; n++) multiplyAdd(part[s][n], a[i], i ? b[n].z : b[n].x, i ? b[n].w : b[n].y);
          }
        }
        if constexpr (FLUSH == 1) {
          addPart(plane, group, row);
          if (p.kind == MINIMA) addMinima(second, group, row, sums + (unit * D::K32 + K) * p.columns * 4);
        }
      }
    }
    if constexpr (FLUSH > 1) addPart(plane, 0, row);
  }

  __device__ __forceinline__ void loadZeros(u32 (&less)[STRIPS][2], u32 from, int row) const {
#pragma unroll
    for (int s = 0; s < STRIPS; s++) D::less(less[s], loadShared2(from + row * 2 + s * 32), loadShared2(from + row * 2 + s * 32 + 16));
  }

  // Adds the sums of a group times its scale.
  __device__ __forceinline__ void addPart(u32 plane, int group, int row) {
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float scale = loadFactor(plane, group + row + s * 16 + i * 8, p.factor) * factorOf<D>;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 2 * i; e < 2 * i + 2; e++) acc[s][n][e] += scale * part[s][n][e], part[s][n][e] = 0.f;
      }
  }

  // Adds the minima of 32 columns times the sums of x.
  __device__ __forceinline__ void addMinima(u32 second, int group, int row, u32 of) {
    float sum[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = n * 8 + 2 * q + e;
        sum[n][e] = column < p.columns ? loadShared(of + column * 4) : 0.f;
      }
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float least = loadFactor(second, group + row + s * 16 + i * 8, p.factor);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) acc[s][n][2 * i + e] += least * sum[n][e];
      }
  }

  // Sends the warp's sums to the blocks that finish them. Eight rows of a tile go to one block: rows g, or g+8, of a strip.
  template <bool ROW> __device__ __forceinline__ void send(int log) {
    const int job = warp % JOBS, sources = FEW_WARPS >> log << ranks, source = ((warp / JOBS << LOG_JOBS - log) + (job >> log) << ranks) + rank;
    float down[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = n * 8 + 2 * q + e;
        down[n][e] = column < p.columns ? loadShared(downs + column * 4) : 0.f;
      }
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int eight = ((job & (1 << log) - 1) * STRIPS + s) * 2 + i, to = eight & (p.ranks - 1);
        const u32 place = parts + (((eight >> ranks) * sources + source) * 8 + g) * pairs * 8;
        u32 at = place, bar = got;
        if (ranks > 0) at = remoteAddress(place, to), bar = remoteAddress(got, to);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const float a = ROW ? part[s][n][2 * i] : acc[s][n][2 * i], b = ROW ? part[s][n][2 * i + 1] : acc[s][n][2 * i + 1];
          if (n * 4 + q >= pairs) continue;
          if (ranks > 0) send2(at + (n * 4 + q) * 8, bar, a * down[n][0], b * down[n][1]);
          else store1(at + (n * 4 + q) * 8, a * down[n][0]), store1(at + (n * 4 + q) * 8 + 4, b * down[n][1]);
        }
      }
  }
};
#define NARROW_FEW(name, ...) \
  extern "C" __global__ void __launch_bounds__(FEW_THREADS, 2) name(const __grid_constant__ NarrowParams p) { __VA_ARGS__::run(p); }
#else
#define NARROW_FEW(name, ...) extern "C" __global__ void name(const __grid_constant__ NarrowParams p) {}
#endif
