// Linear layers whose weights are in super-blocks of 256 columns, as Q4_K, Q5_K and Q6_K of GGUF files, in the order of
// internal/weight/packed.go. A group of 32 columns has two bytes in the plane of scales, and a float16 of its super-block in the second
// plane:
//
//   MINIMA: a scale and a minimum, both without a sign. The second plane has the factor of scales in even groups, and that of minima in
//           odd groups.
//   RUNS:   the scales of two runs of 16 columns, with signs. The second plane has their factor.
//
// A scale is its byte times its factor, in float32. Copies, operands and sums are those of the kernels without super-blocks.
#pragma once
#include "gemm_narrow_groups.cuh"
#include "gemm_narrow_integers.cuh"

constexpr int RUNS = 3; // a kind, beside NO_SECOND, ZEROS and MINIMA

// The two factors of a row of a unit. A unit is within one super-block. The factors are those of groups 0 and 1, `step` bytes apart.
__device__ __forceinline__ u32 superFactors(u32 second, int step) { return loadShared2(second) | loadShared2(second + step) << 16; }

// The scale of run 0 or 1 of a group, and the group's minimum, from the group's two bytes.
__device__ __forceinline__ float superScale(u32 factors, u32 bytes, int run, bool runs) {
  const int v = run == 0 ? (int)(bytes & 255) : (int)(bytes >> 8);
  return Float16::low(factors) * (float)(runs ? (int)(signed char)v : (int)(bytes & 255));
}
__device__ __forceinline__ float superMinimum(u32 factors, u32 bytes) { return -(Float16::high(factors) * (float)(bytes >> 8)); }

__device__ __forceinline__ uint2 loadShared8(u32 addr) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(addr) : "memory");
  return v;
}

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
template <class D, int NT> struct SuperGemm : NarrowGemm<D, NT> {
  using Base = NarrowGemm<D, NT>;
  using Base::acc;
  using Base::g;
  using Base::lane;
  using Base::p;
  using Base::part;
  using Base::q;
  using Base::ring;
  using Base::warp;
  using Base::Base;

  __device__ __forceinline__ void multiply(int slot) {
    constexpr int HALVES = D::K32 / NARROW_CHUNKS, STEP = NARROW_TILE * 2; // bytes of a group in a plane
    const bool runs = !D::zeros && p.kind == RUNS;
    u32 weights = ring + slot * p.stage + warp * (2 * NARROW_CHUNK) + lane * 16, plane = this->planes(slot) + (warp * 32 + g) * 2;
    u32 x = this->operands(slot) + g * 64 + q * 16, sums = this->operands(slot) + D::K32 * p.columns * 64 + q * 8;
    u32 less[2] = {}, factors[4];
    if constexpr (D::zeros) D::less(less, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) factors[i] = superFactors(plane + NARROW_PLANE + i * 16, STEP);
#pragma unroll 1
    for (int c = 0; c < NARROW_CHUNKS; c++) {
      const uint4 w[2] = {loadShared16(weights), loadShared16(weights + NARROW_CHUNK)};
      weights += NARROW_STRIPS * NARROW_CHUNK;
#pragma unroll 1
      for (int half = 0; half < HALVES; half++) {
        u32 a[2][2][4], bytes[4];
#pragma unroll
        for (int s = 0; s < 2; s++) D::decode(a[s], w[s], half, less, p.magic);
#pragma unroll
        for (int i = 0; i < 4; i++) bytes[i] = loadShared2(plane + i * 16);
#pragma unroll
        for (int run = 0; run < 2; run++) {
#pragma unroll
          for (int n = 0; n < NT; n++)
            if (n == 0 || n * 8 < p.columns) {
              const uint2 b = loadShared8(x + n * 512 + run * 8);
#pragma unroll
              for (int s = 0; s < 2; s++) MmaF16::mma(part[s][n], a[s][run], b.x, b.y);
            }
          if (run == 0 && !runs) continue;
          float scale[2][2];
#pragma unroll
          for (int i = 0; i < 4; i++) scale[i / 2][i % 2] = superScale(factors[i], bytes[i], run, runs);
          this->addPart(scale);
        }
        if (!runs)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float least = superMinimum(factors[i], bytes[i]);
#pragma unroll
            for (int n = 0; n < NT; n++)
              if (n == 0 || n * 8 < p.columns)
#pragma unroll
                for (int e = 0; e < 2; e++) acc[i / 2][n][i % 2 * 2 + e] += least * loadShared(sums + n * 32 + e * 4);
          }
        plane += STEP, x += p.columns * 64, sums += p.columns * 4;
      }
    }
  }

  // As NarrowGemm::run.
  __device__ static __forceinline__ void run(const NarrowParams& p) {
    extern __shared__ __align__(128) char shared[];
    SuperGemm me(p, sharedAddress(shared));
    const int begin = me.beginOf(blockIdx.x), end = me.beginOf(blockIdx.x + 1), ahead = p.stages - 1;
    if (!p.early) waitForEarlier();
    me.seek(begin);
    const int firstUnit = me.loadUnit;
    for (int i = 0; i < ahead && begin + i < end; i++) me.loadWeights(i), me.advance();
    if (p.early) waitForEarlier();
    letNextStart();
    int loaded = firstUnit;
    me.loadX = p.x + (long long)firstUnit * D::K32 * p.columns * 64 + threadIdx.x * 16;
    for (int i = 0; i < ahead; i++) {
      if (begin + i < end) {
        me.loadOperands(loaded, i);
        if (++loaded == p.units) loaded = 0;
      }
      copyCommit();
    }
    int slot = 0, next = ahead, first = begin, left = p.units - firstUnit, tile = begin / p.units;
    for (int unit = begin; unit < end; unit++) {
      switch (p.stages) {
      case 2: copyWait<0>(); break;
      case 3: copyWait<1>(); break;
      case 4: copyWait<2>(); break;
      case 5: copyWait<3>(); break;
      default: copyWait<4>();
      }
      __syncthreads();
      if (unit + ahead < end) {
        me.loadOperands(me.loadUnit, next);
        me.loadWeights(next);
        me.advance();
      }
      copyCommit();
      if (++next == p.stages) next = 0;
      me.multiply(slot);
      if (++slot == p.stages) slot = 0;
      if (--left == 0 || unit + 1 == end) {
        me.finish(tile++, first, unit + 1);
        first = unit + 1, left = p.units;
      }
    }
  }
};
#define SUPER_MANY(name, D, NT) \
  extern "C" __global__ void __launch_bounds__(NARROW_THREADS, 2) name(const __grid_constant__ NarrowParams p) { SuperGemm<D, NT>::run(p); }
#else
template <class D, int NT> struct SuperFew : HalfFew<D, NT, SuperFew<D, NT>> {
  using Base = HalfFew<D, NT, SuperFew<D, NT>>;
  using Base::Base;
  using Base::p, Base::lane, Base::warp, Base::g, Base::q, Base::acc, Base::part;
  using Base::STRIPS, Base::ROWS, Base::JOB;

  __device__ __forceinline__ void products() { this->template consume<1>(); }

  // The products of a job with unit `unit` of the slice.
  template <int FLUSH> __device__ __forceinline__ void multiply(const typename Base::Tile& t, u32 from, int unit, int piece, int i) {
    constexpr int HALVES = D::K32 / NARROW_CHUNKS;
    const bool runs = !D::zeros && p.kind == RUNS;
    const int step = t.of * ROWS * 2; // bytes of a group in a plane
    u32 plane = from + FEW_STAGE + i * this->factors * step + (piece * ROWS + g) * 2, sums = this->sums + unit * D::K32 * p.columns * 4;
    u32 weights = from + i * t.of * JOB + piece * (STRIPS * NARROW_CHUNK) + lane * 16;
    u32 at[NT], next[NT], less[2] = {}, factors[STRIPS][2];
    if constexpr (D::zeros) D::less(less, 0, 0);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const bool has = n * 8 + g < p.columns;
      at[n] = has ? this->x + (unit * D::K32 * p.columns + n * 8 + g) * 64 + q * 16 : this->zeros + q * 16;
      next[n] = has ? p.columns * 64 : 0;
    }
#pragma unroll
    for (int i = 0; i < STRIPS * NT * 4; i++) (&part[0][0][0])[i] = 0.f;
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) factors[s][i] = superFactors(plane + this->planeBytes() + s * 32 + i * 16, step);
#pragma unroll 1
    for (int c = 0; c < NARROW_CHUNKS; c++) {
      uint4 w[STRIPS];
#pragma unroll
      for (int s = 0; s < STRIPS; s++) w[s] = loadShared16(weights + s * NARROW_CHUNK);
      weights += t.of * STRIPS * NARROW_CHUNK;
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        uint4 b[NT];
        u32 bytes[STRIPS][2];
#pragma unroll
        for (int n = 0; n < NT; n++) b[n] = loadShared16(at[n]), at[n] += next[n];
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
          for (int i = 0; i < 2; i++) bytes[s][i] = loadShared2(plane + s * 32 + i * 16);
#pragma unroll
        for (int run = 0; run < 2; run++) {
          __syncwarp(); // else the compiler puts products that wait for each other side by side
#pragma unroll
          for (int s = 0; s < STRIPS; s++) {
            u32 a[2][4];
            D::decode(a, w[s], half, less, p.magic);
#pragma unroll
            for (int n = 0; n < NT; n++) Base::multiplyAdd(part[s][n], a[run], run ? b[n].z : b[n].x, run ? b[n].w : b[n].y);
          }
          if (run == 0 && !runs) continue;
#pragma unroll
          for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const float scale = superScale(factors[s][e / 2], bytes[s][e / 2], run, runs);
#pragma unroll
              for (int n = 0; n < NT; n++) acc[s][n][e] += scale * part[s][n][e], part[s][n][e] = 0.f;
            }
        }
        if (!runs) addMinima(factors, bytes, sums);
        plane += step, sums += p.columns * 4;
      }
    }
  }

  // Adds the minima of 32 columns times the sums of x.
  __device__ __forceinline__ void addMinima(const u32 (&factors)[STRIPS][2], const u32 (&bytes)[STRIPS][2], u32 of) {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = n * 8 + 2 * q + e;
        const float sum = column < p.columns ? loadShared(of + column * 4) : 0.f;
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
          for (int i = 0; i < 2; i++) acc[s][n][2 * i + e] += superMinimum(factors[s][i], bytes[s][i]) * sum;
      }
  }
};

// Multiplies digits of x with integers of groups that have minima. Scales of two runs (Q6_K) would take two products instead of one, and save no
// time.
template <class D, int NT> struct SuperIntegers : IntegerFew<D, NT, SuperIntegers<D, NT>> {
  using Base = IntegerFew<D, NT, SuperIntegers<D, NT>>;
  using Base::Base;
  using Base::acc, Base::part, Base::STRIPS, Base::HIGH;

  __device__ __forceinline__ void products() { this->template consume<1>(); }

  // As IntegerFew::addPart. A register has the bytes of two groups, or the factors of a super-block.
  template <bool RUNS> __device__ __forceinline__ void addPart(const u32 (&bytes)[STRIPS / 2][4], const u32 (&factors)[STRIPS / 2][4], int high, int of) {
    float sum[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) sum[n] = (float)this->sumOfX(n, of);
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 f = factors[s / 2][s % 2 * 2 + i], two = bytes[s / 2][s % 2 * 2 + i] >> high * 16 & 0xffff;
        const float scale = superScale(f, two, 0, false), least = superMinimum(f, two) * (float)(i ? HIGH : 1);
#pragma unroll
        for (int n = 0; n < NT; n++) acc[s][n][i] += scale * digitSum(part[s][n], i) + least * sum[n];
      }
  }
};

// Left operands: integers of 4 bits times the bytes of their scales, which are below 1024 and so exact in float16. Sums of a unit then need
// no factor but the super-block's.
struct ScaledInt4 {
  u32 low, lessLow, high, lessHigh; // of rows lane/4 and lane/4 + 8
  __device__ __forceinline__ ScaledInt4(u32 bytes, u32 bytes8) {
    low = whole(bytes & 255);
    lessLow = fma2(low, 0xe400e400, 0); // -1024
    const u32 scale = whole(bytes8 & 255);
    high = fma2(scale, 0x2c002c00, 0);     // 1/16
    lessHigh = fma2(scale, 0xd400d400, 0); // -64
  }
  __device__ static __forceinline__ u32 whole(u32 n) { return fma2(0x64006400 | n << 16 | n, 0x3c003c00, 0xe400e400); }
  __device__ __forceinline__ void decode(u32 (&a)[4], u32 w, u32 magic) const {
    a[0] = fma2((w & 0x000f000f) | magic, low, lessLow);
    a[1] = fma2((w & 0x00f000f0) | magic, high, lessHigh);
    a[2] = fma2((w >> 8 & 0x000f000f) | magic, low, lessLow);
    a[3] = fma2((w >> 8 & 0x00f000f0) | magic, high, lessHigh);
  }
  __device__ __forceinline__ void decode(u32 (&a)[2][4], const uint4& w, int half, u32 magic) const {
    decode(a[0], half ? w.z : w.x, magic);
    decode(a[1], half ? w.w : w.y, magic);
  }
};

template <class D, int N> struct SuperGroups : NarrowGroups<D, N> {
  using Base = NarrowGroups<D, N>;
  using Base::acc;
  using Base::g;
  using Base::lane;
  using Base::p;
  using Base::part;
  using Base::q;
  using Base::ring;
  using Base::warp;
  using Base::Base;

  // The products of a unit.
  __device__ __forceinline__ void multiply(int slot, int strips) {
    constexpr int HALVES = D::K32 / NARROW_CHUNKS;
    const bool runs = !D::zeros && p.kind == RUNS;
    const int of = min(warp, strips - 1), step = strips * 32; // step: bytes of a group in a plane
    const u32 x = ring + slot * p.stage, weights = this->weightsOf(slot), scales = weights + NARROW_WEIGHTS, second = scales + this->planeBytes(NARROW_STRIPS), sums = second + this->planeBytes(NARROW_STRIPS) + q * 8;
    const u32 plane = scales + (of * 16 + g) * 2, none[2] = {};
    u32 factors[2];
#pragma unroll
    for (int i = 0; i < 2; i++) factors[i] = superFactors(second + (of * 16 + g) * 2 + i * 16, step);
    uint4 w;
    u32 a[2][2][4], bytes[2];
#pragma unroll
    for (int K = 0; K < D::K32; K++) {
      if (K % HALVES == 0) w = loadShared16(weights + (K / HALVES * strips + of) * NARROW_CHUNK + lane * 16);
#pragma unroll
      for (int i = 0; i < 2; i++) bytes[i] = loadShared2(plane + K * step + i * 16);
      if (D::zeros && K >= 2) wgmmaWait<1>();
      if constexpr (D::zeros) ScaledInt4(bytes[0], bytes[1]).decode(a[K % 2], w, K % HALVES, p.magic);
      else D::decode(a[K % 2], w, K % HALVES, none, p.magic);
      wgmmaFence();
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const u64 b = rowOperand(x + K / 2 * (N * 128) + K % 2 * 64 + k * 32);
        if (D::zeros && K == 0 && k == 0) multiplyRows<0>(part[0], a[K % 2][k], b);
        else multiplyRows<1>(part[0], a[K % 2][k], b);
        if (D::zeros || k == 0 && !runs) continue;
        wgmmaCommit();
        wgmmaWait<0>();
        pinned(part[0]);
        addScaled(factors, bytes, k, runs);
        if (k == 0) wgmmaFence();
      }
      if (D::zeros) wgmmaCommit();
      if (runs) continue;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float least = superMinimum(factors[i], bytes[i]);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) acc[0][n][2 * i + e] += least * loadShared(sums + K * N * 4 + n * 32 + e * 4);
      }
    }
    if (!D::zeros) return;
    wgmmaWait<0>();
    pinned(part[0]);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) acc[0][n][e] += Float16::low(factors[e / 2]) * part[0][n][e];
  }

  // Adds the sums of a run, or of a group, times its scale.
  __device__ __forceinline__ void addScaled(const u32 (&factors)[2], const u32 (&bytes)[2], int run, bool runs) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float scale = superScale(factors[i], bytes[i], run, runs);
#pragma unroll
      for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++) acc[0][n][e] += scale * part[0][n][e], part[0][n][e] = 0.f;
    }
  }

  // As NarrowGroups::run and consume.
  __device__ static __forceinline__ void run(const NarrowParams& p) {
    extern __shared__ __align__(1024) char aligned[];
    SuperGroups me(p, sharedAddress(aligned));
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; s++) barrierInit(me.full + s * 8, 1), barrierInit(me.empty + s * 8, NARROW_GROUP_WARPS);
      opened();
    }
    __syncthreads();
    const int begin = me.beginOf(blockIdx.x), end = me.beginOf(blockIdx.x + 1);
    if (me.warp >= NARROW_GROUP_WARPS) {
      fewerRegisters<32>();
      if (elected()) me.produce(begin, end, me.warp - NARROW_GROUP_WARPS);
      return;
    }
    moreRegisters<112>();
    waitForEarlier();
    int slot = 0, first = begin, tile = begin / p.units, left = p.units - (begin - tile * p.units);
    u32 parity = 0;
    me.clear();
#pragma unroll 1
    for (int unit = begin; unit < end; unit++) {
      barrierWait(me.full + slot * 8, parity);
      me.multiply(slot, me.stripsOf(tile));
      releaseStage(me.empty + slot * 8, me.lane);
      if (++slot == p.stages) slot = 0, parity ^= 1;
      if (--left == 0 || unit + 1 == end) {
        me.template finish<true>(tile++, first, unit + 1);
        first = unit + 1, left = p.units;
      }
    }
  }
};
#define SUPER_MANY(name, D, NT) \
  extern "C" __global__ void __launch_bounds__(NARROW_GROUP_THREADS, 1) name(const __grid_constant__ NarrowParams p) { SuperGroups<D, NT * 8>::run(p); }
#endif

// narrowGather for super-blocks, which have no order of columns.
__device__ __forceinline__ void superGather(const NarrowGatherParams& p) {
  waitForEarlier();
  letNextStart();
  const int id = p.ids[blockIdx.x];
  const bool there = id >= 0 && id < p.out, runs = p.kind == RUNS;
  const int row = there ? id : 0, tile = row / NARROW_TILE, r = row % NARROW_TILE;
  const int strips = min(NARROW_STRIPS, (p.out - tile * NARROW_TILE + 15) / 16), width = p.format == NARROW_INT4 ? 64 : 32;
  const char* const w = p.w + (long long)tile * p.chunks * (NARROW_STRIPS * NARROW_CHUNK) + r / 16 * NARROW_CHUNK + r % 8 * 64;
  for (int i = threadIdx.x; i < p.n; i += NARROW_THREADS) {
    const int k = i % 16, of = i % width / 16, high = r % 16 / 8, group = i / 32;
    const unsigned char* const at = (const unsigned char*)w + (long long)(i / width) * strips * NARROW_CHUNK + k % 8 / 2 * 16;
    const auto place = [&](int group) { return (long long)tile * NARROW_TILE * p.groups + (long long)group * strips * 16 + r; };
    int v;
    if (p.format == NARROW_INT4) v = *(const u32*)(at + of * 4) >> ((k / 8 * 2 + high + k % 2 * 4) * 4) & 15;
    else v = (int)at[of * 8 + k / 8 * 4 + high + k % 2 * 2] - 128;
    const u32 bytes = ((const u16*)p.scales)[place(group)], factors = ((const u16*)p.second)[place(group & ~1)] | (u32)((const u16*)p.second)[place(group | 1)] << 16;
    float y = __fmul_rn((float)v, superScale(factors, bytes, i / 16 % 2, runs));
    if (!runs) y = __fadd_rn(y, superMinimum(factors, bytes));
    const long long to = (long long)blockIdx.x * p.n + (p.order != nullptr ? p.order[i] : i);
    if (!there) y = __int_as_float(0x7fffffff);
    p.y[to] = p.residual != nullptr ? y + p.residual[to] : y;
  }
}
