// The element types of keys and values, and the tensor core products on them.
//
// A product is on one tile of 16 rows (queries, or probabilities) by 8 columns
// in float32: mma.sync m16n8k16 for 16-bit elements, m16n8k8 in TF32 for
// float32. Where an operand has more bits than the tensor core takes, it is
// given as a sum of two parts, so that no more than 2^-21 (float16, float32) or
// 2^-16 (bfloat16) of it is lost.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define LEAN_INF __int_as_float(0x7f800000)

// A tensor's element type where it is a matter of run time: queries, outputs
// and new keys are read and written once, so a branch costs nothing.
enum : int { F32 = 0, F16 = 1, BF16 = 2 };

__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Float16 {
  static constexpr int type = F16;
  static constexpr bool narrow = true; // has few exponents
  static constexpr float lift = 15;    // log2 of what weights are multiplied by: 2^15 is the largest power of two there is
  static constexpr int bytes = 2;
  static constexpr int depth = 16; // of a product: columns of the left operand
  __device__ static __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  __device__ static __forceinline__ float low(u32 x) {
    float y;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
    return y;
  }
  __device__ static __forceinline__ float high(u32 x) {
    float y;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
    return y;
  }
  __device__ static __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct BFloat16 {
  static constexpr int type = BF16;
  static constexpr bool narrow = false;
  static constexpr float lift = 0;
  static constexpr int bytes = 2;
  static constexpr int depth = 16;
  __device__ static __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  __device__ static __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
  __device__ static __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
  __device__ static __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct Float32 {
  static constexpr int type = F32;
  static constexpr bool narrow = false;
  static constexpr float lift = 0;
  static constexpr int bytes = 4;
  static constexpr int depth = 8;
  // The leading 10 bits of the fraction, which is what the tensor core looks at.
  __device__ static __forceinline__ u32 lead(float x) { return __float_as_uint(x) & 0xffffe000u; }
  __device__ static __forceinline__ u32 rest(float x) {
    return __float_as_uint(x - __uint_as_float(__float_as_uint(x) & 0xffffe000u));
  }
  __device__ static __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

__device__ __forceinline__ float loadAs(const void* p, long long i, int type) {
  if (type == F32) return ((const float*)p)[i];
  u32 x = ((const u16*)p)[i];
  return type == F16 ? Float16::low(x) : BFloat16::low(x);
}

__device__ __forceinline__ void storeAs(void* p, long long i, int type, float x) {
  if (type == F32) {
    ((float*)p)[i] = x;
  } else {
    ((u16*)p)[i] = (u16)(type == F16 ? Float16::pack(x, 0.f) : BFloat16::pack(x, 0.f));
  }
}

// f over the values of all threads of a block of eight warps, for all of them. `room`
// has a float for each warp; what was in it has been read.
template <class F> __device__ __forceinline__ float foldBlock(float v, float (&room)[8], F f) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v = f(v, __shfl_xor_sync(~0u, v, i));
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  v = room[0];
#pragma unroll
  for (int i = 1; i < 8; i++) v = f(v, room[i]);
  return v;
}
