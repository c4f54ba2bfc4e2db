// A row's attention state, as internal/lean has it: of the keys that were seen, with scores s
// of base 4 and values v,
//
//	m = max s,   l = sum 4^(s-m),   o = sum 4^(s-m) v
//
// No key: m is -Inf, l and o are 0.
#pragma once
#include "types.cuh"

// Scores are of base 4: log4(e) is less than 1, so those that are finite stay finite.
__device__ __forceinline__ float exp4_(float x) { return exp2_(x + x); }

// Merging states that have no key in common: beside `top`, the largest m of them,
//
//	l = sum weight(m_i) l_i,   o = sum weight(m_i) o_i
struct Merge {
  float base;
  __device__ __forceinline__ explicit Merge(float top) : base(top == -LEAN_INF ? 0.f : top) {} // nothing seen yet: no NaN from -Inf - -Inf
  __device__ __forceinline__ float weight(float m) const { return exp4_(m - base); }
};

// Four columns of the states that four warps have of a row, merged.
__device__ __forceinline__ void mergeStates(float4 ms, float4 ls, const float4 (&os)[4], float& m, float& l, float4& o) {
  m = fmaxf(fmaxf(ms.x, ms.y), fmaxf(ms.z, ms.w));
  const Merge merge(m);
  const float f[4] = {merge.weight(ms.x), merge.weight(ms.y), merge.weight(ms.z), merge.weight(ms.w)};
  l = f[0] * ls.x + f[1] * ls.y + f[2] * ls.z + f[3] * ls.w;
  o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int k = 0; k < 4; k++) o.x += f[k] * os[k].x, o.y += f[k] * os[k].y, o.z += f[k] * os[k].z, o.w += f[k] * os[k].w;
}

// The weights of scores beside the largest of a row: 4^(x - top), lifted as Math has it; and what
// a state is multiplied by that becomes part of it, which is not lifted. Each weight takes
// what 2^(x - top) would, one instruction or, lifted, two.
template <class Math> struct RowWeights : Merge {
  float twice, minus; // minus: -twice*base
  __device__ __forceinline__ explicit RowWeights(float top) : Merge(top) {
    // 2*base may be infinite. Numbers so large are the same or 2^103 apart, which any factor
    // makes 1 and 0.
    twice = fabsf(base) < 0x1p127f ? 2.f : 1.f;
    minus = -twice * base;
  }
  // In this order: what is lifted before base is taken off is rounded, and more than lift is infinite.
  __device__ __forceinline__ float of(float x) const {
    if constexpr (Math::lift > 0) return exp2_(__fmaf_rn(__fadd_rn(x, -base), 2.f, Math::lift));
    return exp2_(__fmaf_rn(x, twice, minus));
  }
};

// The largest number there is in place of an infinite one: -Inf is the log-sum-exp of a row
// that sees no key, and of no other, wherever rounding leads.
__device__ __forceinline__ float finite(float x) { return fabsf(x) == LEAN_INF ? copysignf(__int_as_float(0x7f7fffff), x) : x; }

constexpr float LN2 = 0.69314718055994531f;

// The natural logarithm of a sum of 4^x, by the largest x and the logarithm to base 2 of the
// sum of 4^(x - m). Finite scores have a finite one.
__device__ __forceinline__ float logSum(float m, float log2l) { return finite(__fmaf_rn(m, 1.3862943611198906f, log2l * LN2)); }
