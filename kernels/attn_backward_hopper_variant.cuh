// The Variant of attn_backward_variant.cuh for products of warp groups. A soft cap's factors of gradients wait in shared memory, where
// the lane's gradients of scores go afterwards.
#pragma once
#include "attn_backward_hopper.cuh"
#include "attn_backward_variant.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Masks and ALiBi.
struct HopperMasked : BackwardScored {
  static constexpr bool many = false;
  static constexpr int PARAMS = 0;
  __device__ static __forceinline__ const BackwardParams& paramsOf(const BackwardParams& p, char*) { return p; }
  template <class B> __device__ static __forceinline__ int before(const BackwardParams& p, int place, int block) {
    const BackwardScores& score = scoreOf(p);
    const int lowest = firstKey(score, place) / B::KEYS, sinks = min((score.sinkTokens + B::KEYS - 1) / B::KEYS, lowest);
    return block < lowest ? block : block - lowest + sinks;
  }

  // The scores of a warp in a step: a lane has keys key and key+8, and rows first, first+1, first+8, ...
  template <class B> struct Changes {
    static constexpr int ROWS = B::ROWS;
    const BackwardParams& p;
    const BackwardSeq& s;
    const int kvHead, all, row, key, first;

    __device__ __forceinline__ Changes(const BackwardParams& p, const BackwardSeq& s, int kvHead, int head, int row, int mine)
        : p(p), s(s), kvHead(kvHead), all(head), row(row), key(mine + (int)threadIdx.x % 32 / 4), first(row + (int)threadIdx.x % 4 * 2) {}
    __device__ __forceinline__ int head() const { return all % (p.kvHeads * p.group); }
    __device__ __forceinline__ int behind() const { return s.keys - s.queries; }
    // Whether some row does not see some of the warp's keys.
    __device__ __forceinline__ bool masked() const {
      const int mine = key - (int)threadIdx.x % 32 / 4;
      return mine + B::MINE > (p.causal ? min(s.keys, behind() + row + 1) : s.keys) || mine < firstKey(scoreOf(p), behind() + row + ROWS - 1);
    }
    __device__ __forceinline__ void mask(float (&x)[4], int j) const {
#pragma unroll
      for (int h = 0; h < 4; h++) {
        const int place = behind() + first + j * 8 + h % 2, k = key + h / 2 * 8;
        const bool dead = (k >= (p.causal ? min(s.keys, place + 1) : s.keys)) | ((k < firstKey(scoreOf(p), place)) & (k >= scoreOf(p).sinkTokens));
        x[h] = dead ? 0.f : x[h];
      }
    }
    // How far number h of the eight rows j is from its key.
    __device__ __forceinline__ float away(int j, int h) const { return (float)(key - behind() - first) + (float)(h / 2 * 8 - h % 2 - j * 8); }

    template <class At> __device__ __forceinline__ void weigh(u32 (&w)[ROWS / 16][4], float (&x)[ROWS / 8][4], u32 logs, const At&) const {
      const BackwardScores& score = scoreOf(p);
      const bool some = masked(), slopes = score.slopes != nullptr;
      const float by = slopes ? score.slopes[head()] : 0.f;
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        float of[4];
        B::loadFour(of, logs + (j * 8 + threadIdx.x % 4 * 2) * 8);
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] = __fmaf_rn(x[j][h], p.scale, -of[h % 2 * 2]);
        if (slopes) {
#pragma unroll
          for (int h = 0; h < 4; h++) x[j][h] = __fmaf_rn(by, away(j, h), x[j][h]);
        }
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] = exp2_(__fmaf_rn(notPositive(x[j][h]), B::LOG2E, B::Math::lift));
        if (some) mask(x[j], j);
#pragma unroll
        for (int h = 0; h < 2; h++) w[j / 2][j % 2 * 2 + h] = B::Operand::pack(x[j][2 * h], x[j][2 * h + 1]);
      }
    }
  };
};

// All there is.
struct HopperScored : HopperMasked {
  // Parameters are read where they are used, from shared memory: the compiler would keep in registers what follows from them.
  static constexpr bool many = true;
  static constexpr int PARAMS = 512;
  static_assert(sizeof(BackwardScoredParams) <= PARAMS, "there is no room");
  __device__ static __forceinline__ void copy(const BackwardParams& p, char* to) { *(BackwardScoredParams*)to = (const BackwardScoredParams&)p; }
  __device__ static __forceinline__ const BackwardParams& paramsOf(const BackwardParams&, char* copy) { return *(const BackwardParams*)copy; }

  // Numbers of [0, 1] in 16 bits: four of the exponent, and 12 of the fraction.
  __device__ static __forceinline__ u32 shortOf(float x) { return (__float_as_uint(x * 0x1p-112f) + 0x400) >> 11; }
  __device__ static __forceinline__ float longOf(u32 x) { return __uint_as_float(x << 11) * 0x1p112f; }

  template <class B> struct Changes : HopperMasked::Changes<B> {
    using Masked = HopperMasked::Changes<B>;
    using Numbers = float[B::ROWS / 8][4];
    using Masked::ROWS, Masked::p, Masked::s, Masked::kvHead, Masked::key, Masked::first, Masked::Masked;
    u32 dropped[ROWS / 64][4]; // with dropout, of score [j][h] bit 4 (j % 8) of number [j/8][h]

    // Turns products into weights times 2^lift, and into operands those that are kept. `logs` has the log-sum-exps of the rows.
    template <class At> __device__ __forceinline__ void weigh(u32 (&w)[ROWS / 16][4], Numbers& x, u32 logs, const At& at) {
      const BackwardScores& score = scoreOf(p);
      const bool some = this->masked();
      const float by = score.slopes == nullptr ? 0.f : score.slopes[this->head()], scale = p.scale;
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] *= scale;
        if (score.cap != 0.f) {
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            const float y = tanh_(x[j][h] * score.reciprocal), z = tanh_(x[j][h + 1] * score.reciprocal);
            x[j][h] = score.cap * y, x[j][h + 1] = score.cap * z;
            B::storeShared(at(j, h / 2), shortOf(__fmaf_rn(-y, y, 1.f)) | shortOf(__fmaf_rn(-z, z, 1.f)) << 16);
          }
        }
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] = __fmaf_rn(by, this->away(j, h), x[j][h]);
      }
      if (score.bias != nullptr) {
        const long long begin = kvHead / p.kvHeads * score.biasSequence + this->head() * score.biasHead;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
          for (int h = 0; h < 4; h++) {
            const int r = min(first + j * 8 + h % 2, s.queries - 1), k = min(key + h / 2 * 8, s.keys - 1); // others are masked
            x[j][h] = __fmaf_rn(B::Format::Store::load(score.bias, begin + r * score.biasRow + k), score.biasFactor, x[j][h]);
          }
      }
      if (score.below != 0) draw();
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        float of[4];
        B::loadFour(of, logs + (j * 8 + threadIdx.x % 4 * 2) * 8);
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] = exp2_(__fmaf_rn(notPositive(x[j][h] - of[h % 2 * 2]), B::LOG2E, B::Math::lift));
        if (some) this->mask(x[j], j);
        float kept[4] = {x[j][0], x[j][1], x[j][2], x[j][3]};
        if (score.below != 0) {
#pragma unroll
          for (int h = 0; h < 4; h++) kept[h] = drops(j, h) ? 0.f : kept[h];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) w[j / 2][j % 2 * 2 + h] = B::Operand::pack(kept[2 * h], kept[2 * h + 1]);
      }
    }

    // Four lanes have the four keys of a quad, and the same rows. Each of them draws the numbers of every fourth score.
    __device__ __forceinline__ void draw() {
      const int lane = threadIdx.x % 32, number = lane / 4 % 4;
#pragma unroll
      for (int i = 0; i < ROWS / 64; i++) {
        u32 mine = 0;
#pragma unroll 2
        for (int j = 0; j < 8; j++) mine |= droppedOf(scoreOf(p), (key - lane / 4 + number / 2 * 8) / 4 + lane / 16, first + i * 64 + j * 8 + number % 2, this->head(), kvHead / p.kvHeads) << 4 * j;
#pragma unroll
        for (int h = 0; h < 4; h++) dropped[i][h] = __shfl_sync(~0u, mine, lane & ~12 | h << 2) >> number;
      }
    }
    __device__ __forceinline__ bool drops(int j, int h) const { return dropped[j / 8][h] >> 4 * (j % 8) & 1; }

    // dO v of weights, times 0 or 1/keep.
    __device__ __forceinline__ void drop(Numbers& y) const {
      if (scoreOf(p).below == 0) return;
      const float factor = scoreOf(p).factor;
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
        for (int h = 0; h < 4; h++) {
          const float z = y[j][h] * factor;
          y[j][h] = drops(j, h) ? 0.f : z;
        }
    }
    // Turns gradients of scores into those of products.
    template <class At> __device__ __forceinline__ void chain(Numbers& x, const At& at) const {
      if (scoreOf(p).cap == 0.f) return;
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const u32 two = __float_as_uint(loadShared(at(j, h)));
          x[j][2 * h] *= longOf(two & 0xffff), x[j][2 * h + 1] *= longOf(two >> 16);
        }
    }
  };
};
#define BACKWARD_HOPPER_SCORED(name, ...) \
  extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ BackwardScoredParams p) { BackwardHopper<__VA_ARGS__>::run(p.p); }
#define BACKWARD_SUMS_SCORED(name, ...) \
  extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ BackwardScoredParams p) { BackwardHopper<__VA_ARGS__>::writeSums(p.p); }
#else
#define BACKWARD_HOPPER_SCORED(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ BackwardScoredParams p) {}
#define BACKWARD_SUMS_SCORED(name, ...) \
  extern "C" __global__ void name(const __grid_constant__ BackwardScoredParams p) {}
#endif
