// Linear layers of few rows, as decoding has them:
//
//	y = f(norm(x) W^T + b) + residual,   f(v) = max(v, 0) or v
//
// The weights are most of what a step reads, so the kernel is built around their
// stream, which begins before the launch ahead has ended. W has tiles of 32 rows
// (columns of y); its column blocks of 128 bytes are shared by the warps of a
// cluster of thread blocks, so that a block needs only its slice of x, which
// stays in shared memory for all tiles. Every warp has a ring of its own, which
// from sm_90 on the copy engine fills; before, there are no clusters, and its
// lanes copy. The sums of warps and blocks are added in their order: bits do not
// vary from run to run.
#pragma once
#include "copy.cuh"

constexpr int LINEAR_ROWS = 16, LINEAR_WARPS = 8, LINEAR_PARTS = 3;
constexpr int LINEAR_TILE = 32; // rows of W

struct LinearParams {
  TensorMap maps[LINEAR_PARTS]; // of the weights, from sm_90 on; several layers of one x
  const void* w[LINEAR_PARTS];
  const float* b[LINEAR_PARTS]; // may be null
  float* y[LINEAR_PARTS];       // rows x out
  const float* x;               // rows x in
  const float* residual;        // rows x out of part 0; may be null
  const float *gamma, *beta;    // of the norm; may be null
  int out[LINEAR_PARTS];
  int tiles[LINEAR_PARTS]; // up to the end of each part
  int rows, in;
  int split;  // thread blocks of a cluster
  int stages; // of a warp's ring; 2 or 4 before sm_90
  int norm;   // the rows of x are normalised
  int relu;
  int early; // the weights may be read before the launch before this one has ended
  float eps;
};

__device__ __forceinline__ float sumOfWarp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// The sum of f(row[i]) over a row that the lanes of `sharers` warps share; `room`
// has a float for each warp. All threads of the block call it.
template <class F> __device__ __forceinline__ float sumOfRow(const float* row, int n, int member, int sharers, int first, float* room, F f) {
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
#pragma unroll 8
  for (int i = member * 32 + lane; i < n; i += sharers * 32) sum += f(row[i]);
  sum = sumOfWarp(sum);
  if (lane == 0) room[first + member] = sum;
  __syncthreads();
  sum = 0.f;
  for (int i = 0; i < sharers; i++) sum += room[first + i];
  __syncthreads();
  return sum;
}

// One element of the output.
__device__ __forceinline__ void finish(const LinearParams& p, int part, int m, int n, float v) {
  if (p.b[part] != nullptr) v += p.b[part][n];
  if (p.relu && v < 0.f) v = 0.f;
  const long long to = (long long)m * p.out[part] + n;
  if (p.residual != nullptr) v += p.residual[to];
  p.y[part][to] = v;
}

// The exponent of what rows are scaled by where the type has few exponents.
__device__ __forceinline__ int exponentOf(float top) { return max((int)((__float_as_uint(top) >> 23) & 255) - 127 - 8, -118); }
__device__ __forceinline__ float powerOf(int e) { return __int_as_float((127 + e) << 23); }

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void clusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void clusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// A float in the shared memory of another thread block of the cluster.
__device__ __forceinline__ float remote(const float* at, int rank) {
  u32 to;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(sharedAddress(at)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(to) : "memory");
  return v;
}
#else
__device__ __forceinline__ void clusterArrive() { __syncthreads(); }
__device__ __forceinline__ void clusterWait() {}
__device__ __forceinline__ float remote(const float* at, int) { return *at; }
#endif
__device__ __forceinline__ void clusterSync() { clusterArrive(), clusterWait(); }

template <class T> struct Linear {
  static constexpr int BLOCK = 128 / T::bytes;       // elements of a column block
  static constexpr int STAGE = LINEAR_TILE * 128;    // bytes of a tile's column block
  static constexpr int NT = LINEAR_TILE / 16;        // products side by side
  static constexpr int WIDTH = LINEAR_TILE + 4;      // floats between rows of a warp's sums
  static constexpr int PAD = 16;                     // floats between rows of x
  static constexpr bool WIDE = T::bytes == 4;

  // A warp's way through its column blocks: those of a tile, then of the next.
  struct Stream {
    int tile, part, block, first;
    __device__ __forceinline__ void begin(const LinearParams& p, int mine, int t0, int t1, int first_) {
      tile = mine > 0 ? t0 : t1, part = 0, block = 0, first = first_;
      while (part < LINEAR_PARTS - 1 && tile >= p.tiles[part]) part++;
    }
    __device__ __forceinline__ int row(const LinearParams& p) const { return (tile - (part > 0 ? p.tiles[part - 1] : 0)) * LINEAR_TILE; }
    __device__ __forceinline__ int column() const { return (first + block * LINEAR_WARPS) * BLOCK; }
    __device__ __forceinline__ void next(const LinearParams& p, int mine) {
      if (++block < mine) return;
      block = 0;
      if (++tile >= p.tiles[part] && part < LINEAR_PARTS - 1) part++;
    }
  };

  __device__ static __forceinline__ void run(const LinearParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = p.split, rank = blockIdx.x % split, cluster = blockIdx.x / split, clusters = gridDim.x / split;
    const int all = (p.in + BLOCK - 1) / BLOCK, b0 = rank * all / split, blocks = (rank + 1) * all / split - b0;
    const int mine = (blocks - warp + LINEAR_WARPS - 1) / LINEAR_WARPS; // column blocks of this warp
    const int tiles = p.tiles[LINEAR_PARTS - 1];
    const int t0 = (int)((long long)cluster * tiles / clusters), t1 = (int)((long long)(cluster + 1) * tiles / clusters);

    const int stride = (all + split - 1) / split * BLOCK + PAD;
    float* x = (float*)(memory + LINEAR_WARPS * p.stages * STAGE);
    float* sums = x + p.rows * stride;                                   // of each warp: rows x WIDTH
    float* parts = sums + LINEAR_WARPS * p.rows * WIDTH;                 // of the block, two times: rows x LINEAR_TILE
    float* room = parts + 2 * p.rows * LINEAR_TILE;                      // of each warp
    float* moments = room + LINEAR_WARPS;                                // of each row
    u32* tops = (u32*)(moments + 2 * LINEAR_ROWS);                       // of each row, its largest magnitude
    float* affine = (float*)(tops + LINEAR_ROWS);                        // gamma and beta, if there is a norm
#if __CUDA_ARCH__ >= 900
    const u32 full = sharedAddress(affine + (p.norm ? 2 * stride : 0)) + warp * p.stages * 8; // a barrier for each slot of the ring
    const u64 policy = readOnce();
#else
    const u32 full = 0;
#endif

    // The warp's ring: its column blocks of all tiles, one behind the other.
    const u32 ring = sharedAddress(memory) + warp * p.stages * STAGE;
    Stream to;
    to.begin(p, mine, t0, t1, b0 + warp);
    auto copy = [&](int slot) {
      if (to.tile < t1) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
          barrierExpect(full + slot * 8, STAGE);
          copyBox(ring + slot * STAGE, &p.maps[to.part], to.column(), to.row(p), 0, full + slot * 8, policy);
        }
#else
        const int at = lane % 8 * 16, row = to.row(p), element = to.column() + at / T::bytes;
#pragma unroll
        for (int r = lane / 8; r < LINEAR_TILE; r += 4) {
          const bool there = row + r < p.out[to.part] && element < p.in;
          copy16(ring + slot * STAGE + swizzled(r, at), (const char*)p.w[to.part] + (there ? ((long long)(row + r) * p.in + element) * T::bytes : 0), there);
        }
#endif
        to.next(p, mine);
      }
#if __CUDA_ARCH__ < 900
      copyCommit();
#endif
    };
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(full + s * 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
    if (p.early)
      for (int s = 0; s < p.stages; s++) copy(s);
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    if (!p.early)
      for (int s = 0; s < p.stages; s++) copy(s);

    // The slice of x; zeros behind its end.
    if (threadIdx.x < LINEAR_ROWS) tops[threadIdx.x] = 0;
    const int from = b0 * BLOCK, width = blocks * BLOCK, live = min(width, p.in - from);
    auto fetch = [&](float* to, const float* src, int rows) {
      for (int i = threadIdx.x; i < rows * (width / 4); i += LINEAR_WARPS * 32) {
        const int m = i / (width / 4), c = i % (width / 4) * 4;
        copy16(sharedAddress(to + m * stride + c), src + (long long)m * p.in + from + (c < live ? c : 0), c < live);
      }
    };
    fetch(x, p.x, p.rows);
    if (p.norm && p.gamma != nullptr) fetch(affine, p.gamma, 1);
    if (p.norm && p.beta != nullptr) fetch(affine + stride, p.beta, 1);
    copyCommit();
    copyWait<0>();
    __syncthreads();
    if (p.norm) normalise(p, x, stride, live, rank, split, room, moments, affine, warp, lane);

    if constexpr (T::narrow) largest(p, x, stride, width, tops, warp, lane);
    toOperands(p, x, stride, width, tops);
    __syncthreads();
    if (p.rows > 8) {
      allTiles<2>(p, x, stride, sums, parts, tops, ring, full, copy, mine, t0, t1, rank, split, warp, lane);
    } else {
      allTiles<1>(p, x, stride, sums, parts, tops, ring, full, copy, mine, t0, t1, rank, split, warp, lane);
    }
  }

  // The tiles, with HALVES times 8 rows of x as right operands.
  template <int HALVES, class Copy> __device__ static __forceinline__ void allTiles(const LinearParams& p, const float* x, int stride, float* sums, float* parts, const u32* tops, u32 ring, u32 full, Copy& copy, int mine, int t0, int t1, int rank, int split, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float down[HALVES][2]; // what the sums of rows 2t and 2t+1 of x are multiplied by
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int k = 0; k < 2; k++) down[h][k] = T::narrow ? powerOf(exponentOf(__uint_as_float(tops[h * 8 + 2 * t + k]))) : 1.f;
    Columns before = {0, 0, 0};
    int slot = 0, of = 0; // of this tile
    u32 parity = 0;
    while (of < LINEAR_PARTS - 1 && t0 >= p.tiles[of]) of++;
#pragma unroll 1
    for (int now = t0; now < t1; now++) {
      if (now >= p.tiles[of] && of < LINEAR_PARTS - 1) of++;
      float acc[HALVES][NT][4];
#pragma unroll
      for (int i = 0; i < HALVES * NT; i++) acc[i / NT][i % NT][0] = acc[i / NT][i % NT][1] = acc[i / NT][i % NT][2] = acc[i / NT][i % NT][3] = 0.f;
#pragma unroll 1
      for (int b = 0; b < mine; b++) {
#if __CUDA_ARCH__ >= 900
        barrierWait(full + slot * 8, parity);
#else
        p.stages == 4 ? copyWait<3>() : copyWait<1>();
        __syncwarp();
#endif
        multiply<HALVES>(p, acc, x + (warp + b * LINEAR_WARPS) * BLOCK, stride, ring + slot * STAGE, lane);
        __syncwarp();
        copy(slot);
        if (++slot == p.stages) slot = 0, parity ^= 1;
      }

      // The warps' sums, side by side.
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int row = h * 8 + 2 * t + k;
          if (row >= p.rows) continue;
          float* to = sums + (warp * p.rows + row) * WIDTH + g;
#pragma unroll
          for (int n = 0; n < 2 * NT; n++) to[8 * n] = acc[h][n / 2][n % 2 * 2 + k] * down[h][k];
        }
      __syncthreads();
      const int first = (now - (of > 0 ? p.tiles[of - 1] : 0)) * LINEAR_TILE, columns = min(LINEAR_TILE, p.out[of] - first);
      // Of a cluster's blocks each adds up its part of the tile before: what it
      // waited for has come in the meantime.
      if (split > 1 && now > t0) {
        clusterWait();
        meet(p, parts + (~now & 1) * p.rows * LINEAR_TILE, rank, split, before);
      }
      before = {of, first, columns};
      float* mineToo = parts + (now & 1) * p.rows * LINEAR_TILE;
      for (int i = threadIdx.x; i < p.rows * LINEAR_TILE; i += LINEAR_WARPS * 32) {
        const int m = i / LINEAR_TILE, c = i % LINEAR_TILE;
        float v = 0.f;
#pragma unroll
        for (int k = 0; k < LINEAR_WARPS; k++) v += sums[(k * p.rows + m) * WIDTH + c];
        if (split > 1) {
          mineToo[i] = v;
        } else if (c < columns) {
          finish(p, of, m, first + c, v);
        }
      }
      if (split > 1) clusterArrive();
      __syncthreads(); // the sums are read
    }
    if (split > 1) {
      if (t1 > t0) {
        clusterWait();
        meet(p, parts + (~t1 & 1) * p.rows * LINEAR_TILE, rank, split, before);
      }
      clusterSync(); // others may still read this block's memory
    }
  }

  // Columns of the output: those of a tile that are there.
  struct Columns { int part, first, count; };

  // Adds up the sums of a cluster's blocks: of the tile's elements those that are
  // this block's.
  __device__ static __forceinline__ void meet(const LinearParams& p, const float* sums, int rank, int split, const Columns& to) {
    for (int i = threadIdx.x * split + rank; i < p.rows * LINEAR_TILE; i += LINEAR_WARPS * 32 * split) {
      const int m = i / LINEAR_TILE, c = i % LINEAR_TILE;
      float v[8], sum = 0.f;
#pragma unroll
      for (int r = 0; r < 8; r++) v[r] = r < split ? remote(sums + i, r) : 0.f;
#pragma unroll
      for (int r = 0; r < 8; r++) sum += v[r];
      if (c < to.count) finish(p, to.part, m, to.first + c, sum);
    }
  }

  // The largest magnitude of each row's slice. Whole warps share a row.
  __device__ static __forceinline__ void largest(const LinearParams& p, const float* x, int stride, int width, u32* tops, int warp, int lane) {
    const int sharers = sharersOf(p.rows), member = warp % sharers;
    for (int m = warp / sharers; m < p.rows; m += LINEAR_WARPS / sharers) {
      float top = 0.f;
#pragma unroll 4
      for (int i = (member * 32 + lane) * 4; i < width; i += sharers * 128) {
        const float4 v = *(const float4*)(x + m * stride + i);
        top = fmaxf(fmaxf(fmaxf(top, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
      }
#pragma unroll
      for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      if (lane == 0) atomicMax(tops + m, __float_as_uint(top)); // floats of no sign are in the order of their bits
    }
    __syncthreads();
  }

  // Warps that share a row.
  __device__ static __forceinline__ int sharersOf(int rows) { return rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 ? 4 : 8; }

  // Makes right operands of x, in place: of 16 elements, 4 lanes find theirs
  // together. 16-bit types take two parts of each element, which are scaled
  // where the type has few exponents; float32 is taken apart when it is used.
  __device__ static __forceinline__ void toOperands(const LinearParams& p, float* x, int stride, int width, const u32* tops) {
    const int t = threadIdx.x % 4, steps = width / 16;
    int m = 0, step = threadIdx.x / 4; // 16 elements, of row m
    while (step >= steps && m < p.rows) step -= steps, m++;
    while (__any_sync(~0u, m < p.rows)) {
      const bool there = m < p.rows;
      float* at = x + m * stride + step * 16;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (there) {
        if constexpr (WIDE) {
          v = make_uint4(__float_as_uint(at[t]), __float_as_uint(at[t + 4]), __float_as_uint(at[t + 8]), __float_as_uint(at[t + 12]));
        } else {
          float2 a = *(const float2*)(at + 2 * t), b = *(const float2*)(at + 2 * t + 8);
          if constexpr (T::narrow) {
            const float up = powerOf(-exponentOf(__uint_as_float(tops[m])));
            a.x *= up, a.y *= up, b.x *= up, b.y *= up;
          }
          v.x = T::pack(a.x, a.y), v.y = T::pack(b.x, b.y);
          v.z = T::pack(a.x - T::low(v.x), a.y - T::high(v.x)), v.w = T::pack(b.x - T::low(v.y), b.y - T::high(v.y));
        }
      }
      __syncwarp();
      if (there) *(uint4*)(at + 4 * t) = v;
      step += LINEAR_WARPS * 8;
      while (step >= steps && m < p.rows) step -= steps, m++;
    }
  }

  // Adds the products of a tile's column block, the left operand, with x's.
  template <int HALVES> __device__ static __forceinline__ void multiply(const LinearParams& p, float (&acc)[HALVES][NT][4], const float* x, int stride, u32 slot, int lane) {
    const int g = lane >> 2, t = lane & 3;
    // Four matrices of 8 rows and 16 bytes: rows 0-7 and 8-15 of W, then the next 16 bytes of them.
    const u32 row = (lane & 7) + ((lane >> 3) & 1) * 8, half = (lane >> 4) * 16;
#pragma unroll
    for (int k = 0; k < BLOCK / 16; k++) {
      uint4 v[HALVES];
#pragma unroll
      for (int h = 0; h < HALVES; h++) v[h] = h * 8 + g < p.rows ? *(const uint4*)(x + (h * 8 + g) * stride + k * 16 + 4 * t) : make_uint4(0, 0, 0, 0);
      if constexpr (!WIDE) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
          u32 w[4];
          loadMatrix(w, slot + swizzled(row + n * 16, k * 32 + half));
#pragma unroll
          for (int h = 0; h < HALVES; h++) {
            T::mma(acc[h][n], w, v[h].x, v[h].y);
            T::mma(acc[h][n], w, v[h].z, v[h].w);
          }
        }
      } else {
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
          for (int n = 0; n < NT; n++) {
            u32 w[4], lead[4], rest[4];
            loadMatrix(w, slot + swizzled(row + n * 16, k * 64 + s * 32 + half));
#pragma unroll
            for (int j = 0; j < 4; j++) lead[j] = T::lead(__uint_as_float(w[j])), rest[j] = T::rest(__uint_as_float(w[j]));
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
              const float a = __uint_as_float(s ? v[h].z : v[h].x), b = __uint_as_float(s ? v[h].w : v[h].y);
              T::mma(acc[h][n], lead, T::lead(a), T::lead(b));
              T::mma(acc[h][n], rest, T::lead(a), T::lead(b));
              T::mma(acc[h][n], lead, T::rest(a), T::rest(b));
            }
          }
        }
      }
    }
  }

  // Layer norm of the rows in shared memory, of which every block of the cluster
  // has a slice: means and sums of squares of the slices merge into the row's.
  __device__ static __forceinline__ void normalise(const LinearParams& p, float* x, int stride, int live, int rank, int split, float* room, float* moments, const float* affine, int warp, int lane) {
    const int sharers = sharersOf(p.rows), groups = LINEAR_WARPS / sharers;
    const int group = warp / sharers, member = warp % sharers, rounds = (p.rows + groups - 1) / groups * groups;
    for (int m = group; m < rounds; m += groups) {
      const float* row = x + min(m, p.rows - 1) * stride;
      const float mean = sumOfRow(row, live, member, sharers, group * sharers, room, [](float v) { return v; }) / live;
      const float squares = sumOfRow(row, live, member, sharers, group * sharers, room, [=](float v) { return (v - mean) * (v - mean); });
      if (m < p.rows && member == 0 && lane == 0) moments[2 * m] = mean, moments[2 * m + 1] = squares;
    }
    clusterSync();
    const int all = (p.in + BLOCK - 1) / BLOCK;
    const float count = lane < split ? (float)(min((lane + 1) * all / split * BLOCK, p.in) - lane * all / split * BLOCK) : 0.f; // of lane's block
    for (int m = group; m < p.rows; m += groups) {
      const float its = lane < split ? remote(moments + 2 * m, lane) : 0.f, rest = lane < split ? remote(moments + 2 * m + 1, lane) : 0.f;
      const float mean = sumOfWarp(count * its) / p.in;
      const float squares = sumOfWarp(rest + count * (its - mean) * (its - mean));
      const float f = 1.f / sqrtf(squares / p.in + p.eps);
      float* row = x + m * stride;
#pragma unroll 4
      for (int i = member * 32 + lane; i < live; i += sharers * 32) {
        float v = (row[i] - mean) * f;
        if (p.gamma != nullptr) v *= affine[i];
        if (p.beta != nullptr) v += affine[stride + i];
        row[i] = v;
      }
    }
    __syncthreads(); // nobody's moments go before its tiles are done
  }
};
