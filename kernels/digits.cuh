// Products of integers of 8 and 4 bits with x. An element of x is an integer of 32 bits times a power of two, which neighbours share, and is
// cut into four digits: bytes with signs. So weights need no conversion, and sums of products are exact.
//
// An operand has a digit of each column. A register has the bytes of columns 2q, 2q+8, 2q+1 and 2q+9 of 16 columns, for lanes 4g+q, as chunks
// of weights have them (gemm_narrow.cuh). A lane's 16 bytes are those of 64 columns.
#pragma once
#include "gemm_narrow.cuh"

constexpr int DIGITS = 4; // operands of an element

// The exponent of the power of two, from the bits of the largest magnitude. Integers are below 127 * 2^24, so no digit exceeds 127.
__device__ __forceinline__ int digitExponent(u32 top) { return (int)(top + 0x20000 >> 23) - 127 - 30; }
// Two factors whose product is 2^e: one float32 has no such range.
__device__ __forceinline__ float2 powersOf(int e) { return make_float2(powerOf(e / 2), powerOf(e - e / 2)); }
// The factors of sums of products, times 2^high. The first factor is NaN if the largest magnitude is infinite or NaN.
__device__ __forceinline__ float2 digitFactors(u32 top, int high) {
  float2 f = powersOf(digitExponent(top) + high);
  if (top >= 0x7f800000) f.x = __int_as_float(0x7fffffff);
  return f;
}
// The four digits of an element. up: powersOf(-digitExponent).
__device__ __forceinline__ u32 digitsOf(float v, float2 up) { return (u32)__float2int_rn(v * up.x * up.y) + 0x808080 ^ 0x808080; }

// Left operands of 32 columns, from a lane's 16 bytes of a chunk. Numbers of 4 bits of rows lane/4+8 stay 16 times as large.
__device__ __forceinline__ void integersOf(NarrowInt8, u32 (&a)[4], const uint4& w, int) {
  const u32 x = w.x ^ 0x80808080, y = w.y ^ 0x80808080, z = w.z ^ 0x80808080, v = w.w ^ 0x80808080; // 128 was added
  a[0] = __byte_perm(x, y, 0x6240), a[1] = __byte_perm(x, y, 0x7351);
  a[2] = __byte_perm(z, v, 0x6240), a[3] = __byte_perm(z, v, 0x7351);
}
__device__ __forceinline__ void integersOf(NarrowInt4, u32 (&a)[4], const uint4& w, int half) {
  const u32 x = half ? w.z : w.x, y = half ? w.w : w.y;
  a[0] = x & 0x0f0f0f0f, a[1] = x & 0xf0f0f0f0;
  a[2] = y & 0x0f0f0f0f, a[3] = y & 0xf0f0f0f0;
}

// d = a b + d, or a b with `first`. UNSIGNED: bytes of a have no signs.
template <bool UNSIGNED> __device__ __forceinline__ void multiplyIntegers(bool first, int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int c[4] = {first ? 0 : d[0], first ? 0 : d[1], first ? 0 : d[2], first ? 0 : d[3]};
#define MULTIPLY_INTEGERS(left) \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." left ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
  if constexpr (UNSIGNED) MULTIPLY_INTEGERS("u8");
  else MULTIPLY_INTEGERS("s8");
#undef MULTIPLY_INTEGERS
}
