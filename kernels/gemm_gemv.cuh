// A GEMV: linear layers of few rows, as decoding has them:
//
//	y = f(norm(x) W^T + b) + residual,   f(v) = v, max(v, 0) or gelu(v)
//
// or with GATES any f, and gated linear units:
//
//	y = f(norm(x) W0^T + b0) (norm(x) W1^T + b1) + residual
//
// The weights are most of what a step reads, so the kernel is built around their
// stream, which begins before the launch ahead has ended. W has tiles of 32 rows
// (columns of y); its column blocks of 128 bytes are shared by the warps of a
// cluster of thread blocks, so that a block needs only its slice of x, which
// stays in shared memory for all tiles. Every warp has a ring of its own, which
// from sm_90 on the copy engine fills; before, there are no clusters, and its
// lanes copy. The sums of warps and blocks are added in their order: bits do not
// vary from run to run. Of a gated unit tiles of the gate and of what it is for come in turn:
// who finishes an element of the one has that of the other next, and keeps it until then.
#pragma once
#include "cluster.cuh"
#include "gemm_activation.cuh"

constexpr int GEMV_ROWS = 16, GEMV_WARPS = 8, LINEAR_PARTS = 3;
constexpr int GEMV_TILE = 32; // rows of W

// Norms of x, as the host has them: (x - mean)/sqrt(variance + eps) gamma + beta, or with the root
// mean square x/sqrt(mean(x^2) + eps) (gamma + offset). The second is the first about a mean of 0.
enum : int { NO_NORM = 0, LAYER_NORM = 1, RMS_NORM = 2 };

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
  int norm;   // how the rows of x are normalised
  int activation;
  int early; // the weights, gamma and beta may be read before the launch before this one has ended
  float eps, offset; // of the norm; offset is added to gamma
};

__device__ __forceinline__ float sumOfWarp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// What is added to an element of the output. It is asked for long before it is
// needed: a bias comes from memory.
struct Addend { float bias, residual; };
__device__ __forceinline__ Addend addend(const LinearParams& p, int part, int m, int n, bool last = true) {
  Addend a = {0.f, 0.f};
  if (n >= p.out[part]) return a;
  if (p.b[part] != nullptr) a.bias = p.b[part][n];
  if (last && p.residual != nullptr) a.residual = p.residual[(long long)m * p.out[part] + n];
  return a;
}
__device__ __forceinline__ float finished(const LinearParams& p, float v, float bias, float residual) {
  v += bias;
  return activated(p.activation, v) + residual;
}
__device__ __forceinline__ void finish(const LinearParams& p, int part, int m, int n, float v, const Addend& a) {
  if (n < p.out[part]) p.y[part][(long long)m * p.out[part] + n] = finished(p, v, a.bias, a.residual);
}

// The exponent of what rows are scaled by where the type has few exponents.
__device__ __forceinline__ int exponentOf(float top) { return max((int)((__float_as_uint(top) >> 23) & 255) - 127 - 8, -118); }
__device__ __forceinline__ float powerOf(int e) { return __int_as_float((127 + e) << 23); }

// Left operands, of weights that lie in shared memory as T's Store has them: here of those that
// are operands as they are. Weights of another Store are unpacked by a specialisation.
template <class T> struct WeightOperands {
  static_assert(T::ready, "elements of this Store are not unpacked to operands of this Math yet");
  __device__ static __forceinline__ void load(u32 (&w)[4], u32 addr) { loadMatrix(w, addr); }
};

// T is the Format of the weights. With GATES the activation is any, and the layers may be a gated unit.
template <class T, bool GATES = false> struct Gemv {
  using Store = typename T::Store;
  using Math = typename T::Math;
  static constexpr int BLOCK = 128 / Store::bytes;   // elements of a column block
  static constexpr int STAGE = GEMV_TILE * 128;    // bytes of a tile's column block
  static constexpr int NT = GEMV_TILE / 16;        // products side by side
  static constexpr int WIDTH = GEMV_TILE + 4;      // floats between rows of a warp's sums
  static constexpr int PAD = 16;                     // floats between rows of x
  static constexpr bool WIDE = Math::wide;

  __device__ static __forceinline__ bool gated(const LinearParams& p) { return GATES && (p.activation & GATED); }

  // A warp's way through its column blocks: those of a tile, then of the next.
  struct Stream {
    int tile, part, block, first;
    __device__ __forceinline__ void begin(const LinearParams& p, int mine, int t0, int t1, int first_) {
      tile = mine > 0 ? t0 : t1, part = 0, block = 0, first = first_;
      if (gated(p)) return;
      while (part < LINEAR_PARTS - 1 && tile >= p.tiles[part]) part++;
    }
    __device__ __forceinline__ int row(const LinearParams& p) const { return gated(p) ? tile / 2 * GEMV_TILE : (tile - (part > 0 ? p.tiles[part - 1] : 0)) * GEMV_TILE; }
    __device__ __forceinline__ int column() const { return (first + block * GEMV_WARPS) * BLOCK; }
    __device__ __forceinline__ void next(const LinearParams& p, int mine) {
      if (++block < mine) return;
      block = 0;
      if (gated(p)) {
        tile++, part ^= 1;
        return;
      }
      if (++tile >= p.tiles[part] && part < LINEAR_PARTS - 1) part++;
    }
  };

  __device__ static __forceinline__ void run(const LinearParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int split = p.split, rank = blockIdx.x % split, cluster = blockIdx.x / split, clusters = gridDim.x / split;
    const int all = (p.in + BLOCK - 1) / BLOCK, b0 = rank * all / split, blocks = (rank + 1) * all / split - b0;
    const int mine = (blocks - warp + GEMV_WARPS - 1) / GEMV_WARPS; // column blocks of this warp
    const int together = gated(p) ? 2 : 1, tiles = p.tiles[LINEAR_PARTS - 1] / together; // a gate's tile goes with that of what it is for
    const int t0 = (int)((long long)cluster * tiles / clusters) * together, t1 = (int)((long long)(cluster + 1) * tiles / clusters) * together;

    const int stride = (all + split - 1) / split * BLOCK + PAD;
    float* x = (float*)(memory + GEMV_WARPS * p.stages * STAGE);
    float* sums = x + p.rows * stride;                                   // of each warp: rows x WIDTH
    float* parts = sums + GEMV_WARPS * p.rows * WIDTH;                 // of the block, two times: rows x GEMV_TILE
    float* moments = parts + 2 * p.rows * GEMV_TILE;                   // of each warp's part of each row
    u32* tops = (u32*)(moments + 2 * GEMV_WARPS * GEMV_ROWS);        // of each row, its largest magnitude
    float* affine = (float*)(tops + GEMV_ROWS);                        // gamma and beta, if there is a norm
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
        const int at = lane % 8 * 16, row = to.row(p), element = to.column() + at / Store::bytes;
#pragma unroll
        for (int r = lane / 8; r < GEMV_TILE; r += 4) {
          const bool there = row + r < p.out[to.part] && element < p.in;
          copy16(ring + slot * STAGE + swizzled(r, at), (const char*)p.w[to.part] + (there ? ((long long)(row + r) * p.in + element) * Store::bytes : 0), there);
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
      opened();
    }
    __syncwarp();
#endif
    // The slice of x; zeros behind its end.
    const int from = b0 * BLOCK, width = blocks * BLOCK, live = min(width, p.in - from);
    auto fetch = [&](float* to, const float* src, int rows) {
      for (int m = 0; m < rows; m++)
        for (int c = threadIdx.x * 4; c < width; c += GEMV_WARPS * 128)
          copy16(sharedAddress(to + m * stride + c), src + (long long)m * p.in + from + (c < live ? c : 0), c < live);
    };
    auto fetchAffine = [&]() {
      if (p.norm && p.gamma != nullptr) fetch(affine, p.gamma, 1);
      if (p.norm && p.beta != nullptr) fetch(affine + stride, p.beta, 1);
    };
    if (threadIdx.x < GEMV_ROWS) tops[threadIdx.x] = 0;
    if (p.early) {
      for (int s = 0; s < p.stages; s++) copy(s);
      fetchAffine();
    }
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    if (!p.early)
      for (int s = 0; s < p.stages; s++) copy(s);

    fetch(x, p.x, p.rows);
    if (!p.early) fetchAffine();
    copyCommit();
    copyWait<0>();
    __syncthreads();
    prepare(p, x, stride, width, live, rank, split, moments, tops, affine, warp, lane);
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
      for (int k = 0; k < 2; k++) down[h][k] = Math::narrow ? powerOf(exponentOf(__uint_as_float(tops[h * 8 + 2 * t + k]))) : 1.f;
    constexpr int MINE = (HALVES * 8 * GEMV_TILE + GEMV_WARPS * 32 - 1) / (GEMV_WARPS * 32); // elements of a tile that a thread finishes
    Addend more[MINE], moreBefore = {0.f, 0.f};
    int partBefore = 0, firstBefore = 0;
    int slot = 0, of = 0; // of this tile
    u32 parity = 0;
    float gates[MINE] = {}; // of a gated unit, until the rest of it is there
    while (!gated(p) && of < LINEAR_PARTS - 1 && t0 >= p.tiles[of]) of++;
#pragma unroll 1
    for (int now = t0; now < t1; now++) {
      if (gated(p)) {
        of = now & 1;
      } else if (now >= p.tiles[of] && of < LINEAR_PARTS - 1) {
        of++;
      }
      const int first = gated(p) ? now / 2 * GEMV_TILE : (now - (of > 0 ? p.tiles[of - 1] : 0)) * GEMV_TILE;
      // Without a cluster a thread finishes elements threadIdx.x, threadIdx.x + 256, ...; with one, one at most.
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        const int i = split > 1 ? threadIdx.x * split + rank : threadIdx.x + j * GEMV_WARPS * 32;
        if (i < p.rows * GEMV_TILE && (split == 1 || j == 0)) more[j] = addend(p, of, i / GEMV_TILE, first + i % GEMV_TILE, !gated(p) || of == 1);
      }
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
        multiply<HALVES>(p, acc, x + (warp + b * GEMV_WARPS) * BLOCK, stride, ring + slot * STAGE, lane);
#if __CUDA_ARCH__ >= 900
        fenceAsync();
#endif
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
      // Of a cluster's blocks each adds up its part of the tile before: what it
      // waited for has come in the meantime.
      if (split > 1 && now > t0) {
        clusterWait();
        reduceCluster(p, parts + (~now & 1) * p.rows * GEMV_TILE, rank, split, partBefore, firstBefore, moreBefore, gates[0]);
      }
      float* mineToo = parts + (now & 1) * p.rows * GEMV_TILE;
#pragma unroll
      for (int j = 0; j < MINE; j++) {
        const int i = threadIdx.x + j * GEMV_WARPS * 32, m = i / GEMV_TILE, c = i % GEMV_TILE;
        if (i >= p.rows * GEMV_TILE) break;
        float v = 0.f;
#pragma unroll
        for (int k = 0; k < GEMV_WARPS; k++) v += sums[(k * p.rows + m) * WIDTH + c];
        if (split > 1) {
          mineToo[i] = v;
        } else {
          end(p, of, m, first + c, v, more[j], gates[j]);
        }
      }
      partBefore = of, firstBefore = first, moreBefore = more[0];
      if (split > 1) clusterArrive();
      __syncthreads(); // the sums are read
    }
    if (split > 1) {
      if (t1 > t0) {
        clusterWait();
        reduceCluster(p, parts + (~t1 & 1) * p.rows * GEMV_TILE, rank, split, partBefore, firstBefore, moreBefore, gates[0]);
      }
      clusterSync(); // others may still read this block's memory
    }
  }

  // Adds up the sums of a cluster's blocks: of the tile's elements the one that is
  // this thread's.
  __device__ static __forceinline__ void reduceCluster(const LinearParams& p, const float* sums, int rank, int split, int part, int first, const Addend& more, float& gate) {
    const int i = threadIdx.x * split + rank;
    if (i >= p.rows * GEMV_TILE) return;
    float v[8], sum = 0.f;
#pragma unroll
    for (int r = 0; r < 8; r++) v[r] = r < split ? remote(sums + i, r) : 0.f;
#pragma unroll
    for (int r = 0; r < 8; r++) sum += v[r];
    end(p, part, i / GEMV_TILE, first + i % GEMV_TILE, sum, more, gate);
  }

  // finish, but for a gate, which is kept until the rest of its unit is there.
  __device__ static __forceinline__ void end(const LinearParams& p, int part, int m, int n, float v, const Addend& a, float& gate) {
    if constexpr (!GATES) {
      finish(p, part, m, n, v, a);
    } else {
      v += a.bias;
      if (!gated(p)) {
        v = activatedAny(p.activation, v);
      } else if (part == 0) {
        gate = v;
        return;
      } else {
        v *= activatedAny(p.activation ^ GATED, gate), part = 0;
      }
      if (n < p.out[part]) p.y[part][(long long)m * p.out[part] + n] = v + a.residual;
    }
  }

  // Warps that share a row.
  __device__ static __forceinline__ int sharersOf(int rows) { return rows > 4 ? 1 : rows > 2 ? 2 : rows > 1 ? 4 : 8; }

  // Adds the products of a tile's column block, the left operand, with x's. They are added
  // up from zero: the tensor core cuts off what it adds, so that what is added to a large
  // number loses more, again and again.
  template <int HALVES> __device__ static __forceinline__ void multiply(const LinearParams& p, float (&all)[HALVES][NT][4], const float* x, int stride, u32 slot, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float acc[HALVES][NT][4] = {};
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
          WeightOperands<T>::load(w, slot + swizzled(row + n * 16, k * 32 + half));
#pragma unroll
          for (int h = 0; h < HALVES; h++) {
            Math::mma(acc[h][n], w, v[h].x, v[h].y);
            Math::mma(acc[h][n], w, v[h].z, v[h].w);
          }
        }
      } else {
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
          for (int n = 0; n < NT; n++) {
            u32 w[4], lead[4], rest[4];
            WeightOperands<T>::load(w, slot + swizzled(row + n * 16, k * 64 + s * 32 + half));
#pragma unroll
            for (int j = 0; j < 4; j++) lead[j] = Math::lead(__uint_as_float(w[j])), rest[j] = Math::rest(__uint_as_float(w[j]));
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
              const float a = __uint_as_float(s ? v[h].z : v[h].x), b = __uint_as_float(s ? v[h].w : v[h].y);
              Math::mma(acc[h][n], lead, Math::lead(a), Math::lead(b));
              Math::mma(acc[h][n], rest, Math::lead(a), Math::lead(b));
              Math::mma(acc[h][n], lead, Math::rest(a), Math::rest(b));
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < HALVES * NT * 4; i++) all[i / (NT * 4)][i / 4 % NT][i % 4] += acc[i / (NT * 4)][i / 4 % NT][i % 4];
  }

  // Makes right operands of x in shared memory, in place, of its norm if that
  // is wanted. One to eight whole warps share a row, in parts of 16 elements: 4
  // lanes find their operands of them together. 16-bit types take two parts of an
  // element, which are scaled by powers of two where the type has few exponents;
  // float32 is taken apart when it is used.
  __device__ static __forceinline__ void prepare(const LinearParams& p, float* x, int stride, int width, int live, int rank, int split, float* moments, u32* tops, const float* affine, int warp, int lane) {
    const int sharers = sharersOf(p.rows), groups = GEMV_WARPS / sharers, group = warp / sharers, member = warp % sharers;
    const int rounds = (p.rows + groups - 1) / groups;
    const int s0 = member * (width / 16) / sharers, s1 = (member + 1) * (width / 16) / sharers;
    const int c0 = min(s0 * 16, live), c1 = min(s1 * 16, live);
    if (p.norm) {
      for (int r = 0; r < rounds; r++) {
        const int m = group + r * groups;
        if (m >= p.rows) break;
        const float* row = x + m * stride;
        float mean = 0.f, squares = 0.f;
        if (p.norm == LAYER_NORM) {
          float sum = 0.f;
#pragma unroll 4
          for (int i = c0 + lane * 4; i < c1; i += 128) {
            const float4 v = *(const float4*)(row + i);
            sum += (v.x + v.y) + (v.z + v.w);
          }
          mean = sumOfWarp(sum) / max(c1 - c0, 1);
        }
#pragma unroll 4
        for (int i = c0 + lane * 4; i < c1; i += 128) {
          const float4 v = *(const float4*)(row + i);
          squares += ((v.x - mean) * (v.x - mean) + (v.y - mean) * (v.y - mean)) + ((v.z - mean) * (v.z - mean) + (v.w - mean) * (v.w - mean));
        }
        squares = sumOfWarp(squares);
        if (lane == 0) *(float2*)(moments + (m * GEMV_WARPS + member) * 2) = make_float2(mean, squares);
      }
      split > 1 ? clusterSync() : __syncthreads();
      // Means and sums of squares of parts merge into the row's. No block ends
      // before the others have read its own: the tiles have meetings.
      const int all = (p.in + BLOCK - 1) / BLOCK;
      float count[2]; // of the elements of parts lane and lane + 32
      int of[2], by[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int j = lane + 32 * k;
        of[k] = j / sharers, by[k] = j % sharers, count[k] = 0.f;
        if (of[k] < split) {
          const int begin = of[k] * all / split * BLOCK, its = (of[k] + 1) * all / split * BLOCK - begin, there = min(its, p.in - begin);
          count[k] = min((by[k] + 1) * (its / 16) / sharers * 16, there) - min(by[k] * (its / 16) / sharers * 16, there);
        }
      }
      for (int r = 0; r < rounds; r++) {
        const int m = group + r * groups;
        if (m >= p.rows) break;
        float mean[2], squares[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float* at = moments + (m * GEMV_WARPS + by[k]) * 2;
          mean[k] = of[k] < split ? remote(at, of[k]) : 0.f, squares[k] = of[k] < split ? remote(at + 1, of[k]) : 0.f;
        }
        const float middle = sumOfWarp(count[0] * mean[0] + count[1] * mean[1]) / p.in;
        const float d0 = mean[0] - middle, d1 = mean[1] - middle;
        const float f = 1.f / sqrtf(sumOfWarp(squares[0] + count[0] * d0 * d0 + squares[1] + count[1] * d1 * d1) / p.in + p.eps);
        float* row = x + m * stride;
#pragma unroll 2
        for (int i = c0 + lane * 4; i < c1; i += 128) {
          float4 v = *(const float4*)(row + i);
          v.x = (v.x - middle) * f, v.y = (v.y - middle) * f, v.z = (v.z - middle) * f, v.w = (v.w - middle) * f;
          if (p.gamma != nullptr) {
            const float4 g = *(const float4*)(affine + i);
            v.x *= g.x + p.offset, v.y *= g.y + p.offset, v.z *= g.z + p.offset, v.w *= g.w + p.offset;
          }
          if (p.beta != nullptr) {
            const float4 b = *(const float4*)(affine + stride + i);
            v.x += b.x, v.y += b.y, v.z += b.z, v.w += b.w;
          }
          *(float4*)(row + i) = v;
        }
      }
      __syncwarp();
    }
    if constexpr (Math::narrow) {
      for (int r = 0; r < rounds; r++) {
        const int m = group + r * groups;
        if (m >= p.rows) break;
        float top = 0.f;
#pragma unroll 4
        for (int i = c0 + lane * 4; i < c1; i += 128) {
          const float4 v = *(const float4*)(x + m * stride + i);
          top = fmaxf(fmaxf(fmaxf(top, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        if (lane == 0) atomicMax(tops + m, __float_as_uint(top)); // floats of no sign are in the order of their bits
      }
      sharers > 1 ? __syncthreads() : __syncwarp();
    }
    for (int r = 0; r < rounds; r++) {
      const int m = group + r * groups;
      if (m >= p.rows) break;
      const float up = Math::narrow ? powerOf(-exponentOf(__uint_as_float(((volatile u32*)tops)[m]))) : 1.f;
      constexpr int BATCH = 4;
#pragma unroll 1
      for (int s = s0; s < s1; s += 8 * BATCH) {
        uint4 v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
          if (s + 8 * j + lane / 4 < s1) v[j] = operandOf(x + m * stride + (s + 8 * j + lane / 4) * 16, lane % 4, up);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < BATCH; j++)
          if (s + 8 * j + lane / 4 < s1) *(uint4*)(x + m * stride + (s + 8 * j + lane / 4) * 16 + lane % 4 * 4) = v[j];
      }
    }
  }

  // Lane t's operands of 16 elements.
  __device__ static __forceinline__ uint4 operandOf(const float* at, int t, float up) {
    uint4 v;
    if constexpr (WIDE) {
      v = make_uint4(__float_as_uint(at[t]), __float_as_uint(at[t + 4]), __float_as_uint(at[t + 8]), __float_as_uint(at[t + 12]));
    } else {
      float2 a = *(const float2*)(at + 2 * t), b = *(const float2*)(at + 2 * t + 8);
      if constexpr (Math::narrow) a.x *= up, a.y *= up, b.x *= up, b.y *= up;
      v.x = Math::pack(a.x, a.y), v.y = Math::pack(b.x, b.y);
      v.z = Math::pack(a.x - Math::low(v.x), a.y - Math::high(v.x)), v.w = Math::pack(b.x - Math::low(v.y), b.y - Math::high(v.y));
    }
    return v;
  }
};
