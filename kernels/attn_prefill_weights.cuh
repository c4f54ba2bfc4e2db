// The softmax of prefill kernels of warp groups (attn_prefill.cuh).
#pragma once
#include "attn_prefill_rows.cuh"

// Quotients by the number of query heads of a KV head.
struct HeadGroups {
  u32 by, inverse; // inverse: 2^32/by, rounded down
  __device__ __forceinline__ explicit HeadGroups(int group) : by(group), inverse(~0u / group) {}
  __device__ __forceinline__ u32 operator()(u32 x) const {
    const u32 q = __umulhi(x, inverse); // the quotient, or one less
    return q + ((q + 1) * by <= x);
  }
};

// PrefillRows::Softmax with weights relative to a score of the row, the reference. R is a PrefillRows, EVERY says whether each step needs
// `shrink`.
//
// With TOGETHER, the references of both rows are their largest scores, in each step. Otherwise a row keeps the largest score of some step as
// the reference until a score is larger by more than SLACK (to base 2), so outputs are rarely multiplied. SLACK is 0 for weights of float16,
// which would overflow. The maximum of the second row is computed beside the exponentials of the first row.
template <class R, int KEYS, bool EVERY, bool TOGETHER> struct PrefillWeights : R::Softmax {
  using Softmax = typename R::Softmax;
  using Math = typename R::Math;
  using Softmax::base, Softmax::scale, Softmax::shrink, Softmax::sum, Softmax::top; // top: the reference. base: top*scale - Math::lift, or -Math::lift
  static constexpr float SLACK = Math::narrow ? 0.f : 8.f;
  float limit[2]; // a larger score becomes the reference
  bool changed;   // whether outputs have to be multiplied by shrink, in any row of the warp

  PrefillWeights() = default;
  __device__ __forceinline__ explicit PrefillWeights(const Softmax& m) : Softmax(m) {
#pragma unroll
    for (int h = 0; h < 2; h++) limit[h] = -LEAN_INF, base[h] = -Math::lift;
  }

  // The weights of a step's scores s.
  __device__ __forceinline__ void weigh(float (&s)[KEYS / 8][4]) {
    if constexpr (TOGETHER) {
      weighRows(s);
    } else {
      changed = false, shrink[0] = shrink[1] = 1.f;
      weighRow<0>(s);
      weighRow<1>(s);
    }
  }
  __device__ __forceinline__ void weighRows(float (&s)[KEYS / 8][4]) {
    changed = true;
    const float references[2] = {fmaxf(top[0], largest<0>(s)), fmaxf(top[1], largest<1>(s))};
    float minus[2] = {refer<0>(references[0]), refer<1>(references[1])}, more[2] = {0.f, 0.f};
    if (__any_sync(~0u, fmaxf(fabsf(minus[0] - Math::lift), fabsf(minus[1] - Math::lift)) > Softmax::LARGE)) minus[0] = takeOff<0>(s, references[0]), minus[1] = takeOff<1>(s, references[1]);
    exponentials<0>(s, minus[0], more[0]), exponentials<1>(s, minus[1], more[1]);
#pragma unroll
    for (int h = 0; h < 2; h++) top[h] = references[h], sum[h] = sum[h] * shrink[h] + more[h];
  }
  template <int h> __device__ __forceinline__ void weighRow(float (&s)[KEYS / 8][4]) {
    const float most = largest<h>(s);
    float minus = -base[h], more = 0.f;
    if (__any_sync(~0u, most > limit[h])) {
      changed = true;
      const float reference = most > limit[h] ? fmaxf(top[h], most) : top[h];
      minus = refer<h>(reference);
      const bool large = __any_sync(~0u, fabsf(minus - Math::lift) > Softmax::LARGE);
      if (large) minus = takeOff<h>(s, reference), base[h] = fmaxf(base[h], -0x1.fffffep127f); // a step whose scores are all hidden keeps base: -Inf + Inf would be NaN
      top[h] = reference, sum[h] *= shrink[h];
      limit[h] = large || reference == -LEAN_INF ? -LEAN_INF : reference + __fdividef(SLACK, scale[h]);
    }
    exponentials<h>(s, minus, more);
    sum[h] += more;
  }

  // Prepares row h for another reference, and returns what is added to scores.
  template <int h> __device__ __forceinline__ float refer(float reference) {
    const float minus = Math::lift - (reference == -LEAN_INF ? 0.f : reference * scale[h]); // no score yet: -Inf - -Inf would be NaN
    shrink[h] = exp2_(top[h] == -LEAN_INF ? -LEAN_INF : base[h] + minus);
    base[h] = -minus;
    return minus;
  }
  // The same where rounding the product of the reference would change a weight: the reference is subtracted before scores
  // are multiplied.
  template <int h> __device__ __forceinline__ float takeOff(float (&s)[KEYS / 8][4], float reference) {
    const float off = reference == -LEAN_INF ? 0.f : reference;
    shrink[h] = exp2_((top[h] - off) * scale[h]);
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) s[j][2 * h] -= off, s[j][2 * h + 1] -= off;
    return Math::lift;
  }
  // The largest score of row h.
  template <int h> __device__ static __forceinline__ float largest(const float (&s)[KEYS / 8][4]) {
    float most = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int j = 1; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }
  // The weights of row h, and their sum.
  template <int h> __device__ __forceinline__ void exponentials(float (&s)[KEYS / 8][4], float minus, float& more) const {
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; e++) more += s[j][e] = exp2_(__fmaf_rn(s[j][e], scale[h], minus));
  }
};
