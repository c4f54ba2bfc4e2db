// The Variant of attn_backward_variant.cuh for products of warp groups. A soft cap's factors of gradients wait in shared memory, where
// the lane's gradients of scores go afterwards.
#pragma once
#include "attn_backward_hopper.cuh"
#include "attn_backward_variant.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Masks and ALiBi, and the soft cap, the bias or dropout.
enum HopperChange { HOPPER_NONE, HOPPER_CAP, HOPPER_BIAS, HOPPER_DROPOUT };
template <HopperChange CHANGE> struct HopperFew : BackwardScored {
  static constexpr bool many = false, tiles = CHANGE == HOPPER_BIAS, drops = CHANGE == HOPPER_DROPOUT;
  static constexpr int PARAMS = 0;
  __device__ static __forceinline__ const BackwardParams& paramsOf(const BackwardParams& p, char*) { return p; }
  template <class B> __device__ static __forceinline__ int before(const BackwardParams& p, int place, int block) {
    const BackwardScores& score = scoreOf(p);
    const int lowest = firstKey(score, place) / B::KEYS, sinks = min((score.sinkTokens + B::KEYS - 1) / B::KEYS, lowest);
    return block < lowest ? block : block - lowest + sinks;
  }

  // A warp copies the bias of ROWS rows and 16 keys to shared memory, 32 bytes a row, 64 rows to each KEYS * 128 bytes. The order of a row's
  // two halves changes every four rows, so that the same half of eight rows lies in different banks. Rows and eights of keys outside of the
  // sequence are 0, and a mask hides other keys outside.
  template <class B> __device__ static __forceinline__ void bring(const BackwardParams& p, const BackwardSeq& s, int kvHead, int all, int row, int key, u32 to, int lane) {
    const BackwardScores& score = scoreOf(p);
    const int head = all % (p.kvHeads * p.group), r = lane / 2, k = key + lane % 2 * 8;
    const u16* const from = (const u16*)score.bias + kvHead / p.kvHeads * score.biasSequence + head * score.biasHead + k;
    to += r * 32 + ((lane & 1) ^ (r >> 2 & 1)) * 16;
#pragma unroll
    for (int i = 0; i < B::ROWS; i += 16) {
      const bool there = row + i + r < s.queries && k < s.keys;
      copy16(to + i / 64 * (B::KEYS * 128) + i % 64 * 32, there ? from + (row + i + r) * score.biasRow : (const u16*)score.bias, there);
    }
  }

  // The scores of a warp in a step: a lane has keys key and key+8, and rows first, first+1, first+8, ...
  template <class B> struct Changes {
    static constexpr int ROWS = B::ROWS;
    const BackwardParams& p;
    const BackwardSeq& s;
    const int kvHead, all, row, key, first;
    u32 dropped[ROWS / 64]; // with dropout, of score [j][h] bit 4 (j % 8) + h % 2 * 2 + h / 2 of number j/8

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
    // Eight lanes have the same rows, and a key of each of two octets. A lane draws the numbers of an eighth of the octets, and gets the bits of
    // its keys from the others.
    __device__ __forceinline__ void draw() {
      const int lane = threadIdx.x % 32, n = lane / 4;
#pragma unroll
      for (int i = 0; i < ROWS / 64; i++) {
        u32 own = 0;
#pragma unroll
        for (int m = 0; m < 4; m++) own |= droppedOf(scoreOf(p), (key - n) / 8 + n % 2, first + i * 64 + (2 * m + n / 4) * 8 + n / 2 % 2, head(), kvHead / p.kvHeads) << 8 * m;
        dropped[i] = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) dropped[i] |= (__shfl_sync(~0u, own, k * 4 + lane % 4) >> n & 0x01010101) << k;
      }
    }
    __device__ __forceinline__ bool drops(int j, int h) const { return dropped[j / 8] >> 4 * (j % 8) + h % 2 * 2 + h / 2 & 1; }

    // dO v of weights, times 0 or 1/keep.
    __device__ __forceinline__ void drop(float (&y)[ROWS / 8][4]) const {
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
    // How far number h of the eight rows j is from its key.
    __device__ __forceinline__ float away(int j, int h) const { return (float)(key - behind() - first) + (float)(h / 2 * 8 - h % 2 - j * 8); }

    template <class At> __device__ __forceinline__ void weigh(u32 (&w)[ROWS / 16][4], float (&x)[ROWS / 8][4], u32 logs, const At& at) {
      if constexpr (CHANGE == HOPPER_DROPOUT) draw();
      const BackwardScores& score = scoreOf(p);
      const bool some = masked(), slopes = score.slopes != nullptr;
      const float by = slopes ? score.slopes[head()] : 0.f;
      const int lane = threadIdx.x % 32;
      // Where the lane has a row of the bias for loadMatrixTransposed: eight rows of both halves, and eight rows more.
      const u32 tile = at(0, 0) - swizzled(lane / 4, lane % 4 * 4) + (lane / 16 * 8 + lane % 8) * 32 + ((lane / 8 & 1) ^ (lane >> 2 & 1)) * 16;
      u32 bias[4];
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        float of[4];
        B::loadFour(of, logs + (j * 8 + threadIdx.x % 4 * 2) * 8);
        if constexpr (CHANGE == HOPPER_CAP) {
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            const float y = tanh_(x[j][h] * (p.scale * score.reciprocal)), z = tanh_(x[j][h + 1] * (p.scale * score.reciprocal));
            x[j][h] = __fmaf_rn(score.cap, y, -of[0]), x[j][h + 1] = __fmaf_rn(score.cap, z, -of[2]);
            B::storeShared(at(j, h / 2), shortsOf(__fmaf_rn(-y, y, 1.f), __fmaf_rn(-z, z, 1.f)));
          }
        } else {
          if constexpr (CHANGE == HOPPER_BIAS) {
            if (j % 2 == 0) loadMatrixTransposed(bias, tile + j / 8 * (B::KEYS * 128) + j % 8 * 256);
          }
#pragma unroll
          for (int h = 0; h < 4; h++) {
            float add = -of[h % 2 * 2];
            if constexpr (CHANGE == HOPPER_BIAS) { // first: a hidden score may exceed the log-sum-exp by Inf, and Inf - Inf would be NaN
              const u32 two = bias[j % 2 * 2 + h / 2];
              add = __fmaf_rn(h % 2 ? B::Operand::high(two) : B::Operand::low(two), score.biasFactor, add);
            }
            x[j][h] = __fmaf_rn(x[j][h], p.scale, add);
          }
        }
        if (slopes) {
#pragma unroll
          for (int h = 0; h < 4; h++) x[j][h] = __fmaf_rn(by, away(j, h), x[j][h]);
        }
#pragma unroll
        for (int h = 0; h < 4; h++) x[j][h] = exp2_(__fmaf_rn(notPositive(x[j][h]), B::LOG2E, B::Math::lift));
        if (some) mask(x[j], j);
        float kept[4] = {x[j][0], x[j][1], x[j][2], x[j][3]};
        if constexpr (CHANGE == HOPPER_DROPOUT) {
#pragma unroll
          for (int h = 0; h < 4; h++) kept[h] = this->drops(j, h) ? 0.f : kept[h];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) w[j / 2][j % 2 * 2 + h] = B::Operand::pack(kept[2 * h], kept[2 * h + 1]);
      }
      if constexpr (CHANGE == HOPPER_BIAS) __syncwarp(); // all lanes have read the bias
    }
    // Turns gradients of scores into those of products.
    template <class At> __device__ __forceinline__ void chain(float (&x)[ROWS / 8][4], const At& at) const {
      if constexpr (CHANGE == HOPPER_CAP) {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const u32 two = __float_as_uint(loadShared(at(j, h)));
            x[j][2 * h] *= longOf(two & 0xffff), x[j][2 * h + 1] *= longOf(two >> 16);
          }
      }
    }
  };

  // Numbers of [0, 1] in 16 bits: four of the exponent, and 12 of the fraction.
  __device__ static __forceinline__ u32 shortOf(float x) { return (__float_as_uint(x * 0x1p-112f) + 0x400) >> 11; }
  // Two of them in a word. Not by a shift: the assembler of NVRTC 12.4 has computed (x << 5) + 0x8000 as 0x8000 here.
  __device__ static __forceinline__ u32 shortsOf(float low, float high) { return __byte_perm(shortOf(low), shortOf(high), 0x5410); }
  __device__ static __forceinline__ float longOf(u32 x) { return __uint_as_float(x << 11) * 0x1p112f; }
};
using HopperMasked = HopperFew<HOPPER_NONE>;

// Everything, in any combination.
struct HopperScored : HopperMasked {
  // Parameters are read where they are used, from shared memory: the compiler would keep in registers what follows from them.
  static constexpr bool many = true, drops = true;
  static constexpr int PARAMS = 512;
  static_assert(sizeof(BackwardScoredParams) <= PARAMS, "there is no room");
  __device__ static __forceinline__ void copy(const BackwardParams& p, char* to) { *(BackwardScoredParams*)to = (const BackwardScoredParams&)p; }
  __device__ static __forceinline__ const BackwardParams& paramsOf(const BackwardParams&, char* copy) { return *(const BackwardParams*)copy; }

  template <class B> struct Changes : HopperMasked::Changes<B> {
    using Masked = HopperMasked::Changes<B>;
    using Numbers = float[B::ROWS / 8][4];
    using Masked::ROWS, Masked::p, Masked::s, Masked::kvHead, Masked::key, Masked::first, Masked::Masked;
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
            B::storeShared(at(j, h / 2), shortsOf(__fmaf_rn(-y, y, 1.f), __fmaf_rn(-z, z, 1.f)));
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
      if (score.below != 0) this->draw();
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
          for (int h = 0; h < 4; h++) kept[h] = this->drops(j, h) ? 0.f : kept[h];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) w[j / 2][j % 2 * 2 + h] = B::Operand::pack(kept[2 * h], kept[2 * h + 1]);
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
