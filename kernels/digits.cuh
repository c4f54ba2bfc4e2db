// Products of x with weights that are integers of 8 or 4 bits. An element of x becomes an integer of 32 bits times a power of two, and the
// integer becomes four digits: signed bytes. Neighbouring elements share the power of two. Weights need no conversion, and sums are exact.
//
// Each of the four operands of an element has one digit of every column. Lane 4g+q holds columns in the order of a chunk of weights
// (gemm_narrow.cuh): a register has columns 2q, 2q+8, 2q+1 and 2q+9 of 16 columns, and four registers have 64 columns.
#pragma once
#include "gemm_narrow.cuh"

constexpr int DIGITS = 4; // operands of an element

// Returns the exponent of the power of two that elements share. top: the bits of the largest magnitude. Integers stay below 127 * 2^24, so no
// digit exceeds 127.
__device__ __forceinline__ int digitExponent(u32 top) { return (int)(top + 0x20000 >> 23) - 127 - 30; }
// Returns two factors whose product is 2^e. One float32 could be too small or too large.
__device__ __forceinline__ float2 powersOf(int e) { return make_float2(powerOf(e / 2), powerOf(e - e / 2)); }
// Returns two factors that turn sums of products back to the size of x, times 2^high. The first factor is NaN if x has an infinity or NaN.
__device__ __forceinline__ float2 digitFactors(u32 top, int high) {
  float2 f = powersOf(digitExponent(top) + high);
  if (top >= 0x7f800000) f.x = __int_as_float(0x7fffffff);
  return f;
}
// Returns the four digits of element v, the lowest one first. up: powersOf(-digitExponent(top)).
__device__ __forceinline__ u32 digitsOf(float v, float2 up) { return (u32)__float2int_rn(v * up.x * up.y) + 0x808080 ^ 0x808080; }

// Makes left operands of 32 columns from a lane's 16 bytes of a chunk. Weights of 4 bits of rows lane/4+8 stay in the upper halves of bytes, so
// sums of these rows are 16 times too large.
__device__ __forceinline__ void integersOf(NarrowInt8, u32 (&a)[4], const uint4& w, int) {
  const u32 x = w.x ^ 0x80808080, y = w.y ^ 0x80808080, z = w.z ^ 0x80808080, v = w.w ^ 0x80808080; // weights are stored with 128 added
  a[0] = __byte_perm(x, y, 0x6240), a[1] = __byte_perm(x, y, 0x7351);
  a[2] = __byte_perm(z, v, 0x6240), a[3] = __byte_perm(z, v, 0x7351);
}
__device__ __forceinline__ void integersOf(NarrowInt4, u32 (&a)[4], const uint4& w, int half) {
  const u32 x = half ? w.z : w.x, y = half ? w.w : w.y;
  a[0] = x & 0x0f0f0f0f, a[1] = x & 0xf0f0f0f0;
  a[2] = y & 0x0f0f0f0f, a[3] = y & 0xf0f0f0f0;
}

// Computes d = a b if `first`, or else d = a b + d. UNSIGNED: a has unsigned bytes.
template <bool UNSIGNED> __device__ __forceinline__ void multiplyIntegers(bool first, int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int c[4] = {first ? 0 : d[0], first ? 0 : d[1], first ? 0 : d[2], first ? 0 : d[3]};
#define MULTIPLY_INTEGERS(left) \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." left ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
  if constexpr (UNSIGNED) MULTIPLY_INTEGERS("u8");
  else MULTIPLY_INTEGERS("s8");
#undef MULTIPLY_INTEGERS
}

// Returns the low or the high float16 of a register.
__device__ __forceinline__ float halfOf(u32 pair, int high) { return high ? Float16::high(pair) : Float16::low(pair); }

// Returns the sum of row lane/4 (r = 0) or lane/4+8 (r = 1), from a lane's sums of two operands: the second operand's digit counts 256 times.
// less: what zeros of weights add.
__device__ __forceinline__ float digitSum(const int (&part)[4], int r, int less = 0) { return (float)(part[2 * r] + part[2 * r + 1] * 256 + less); }
