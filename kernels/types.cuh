// Element types: how elements lie in memory (a Store), and what tensor cores multiply (a Math).
// A kernel takes both, as a Format, for its keys and values or its weights: so elements of a
// new type in memory are a Store more, and what multiplies them may be there already.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define LEAN_INF __int_as_float(0x7f800000)

// A tensor's element type where it is a matter of run time: queries, outputs and new keys are
// read and written once, so a branch costs nothing. See withStore. The numbers are the host's
// (DType of internal/attn), whose 1, float64, no kernel takes.
enum : int { F32 = 0, F16 = 2, BF16 = 3 };

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

// A Store has `type`, `bytes` of an Element, and `scaled`: whether there are scales beside the
// elements, which none has yet. load and its like are float32 numbers of elements number i, i+1,
// ... of p, where i is a multiple of how many; store and its like write them.

struct Float32 {
  using Element = float;
  static constexpr int type = F32, bytes = 4;
  static constexpr bool scaled = false;
  __device__ static __forceinline__ float load(const void* p, long long i) { return ((const float*)p)[i]; }
  __device__ static __forceinline__ float2 load2(const void* p, long long i) { return *(const float2*)((const float*)p + i); }
  __device__ static __forceinline__ float4 load4(const void* p, long long i) { return *(const float4*)((const float*)p + i); }
  __device__ static __forceinline__ void store(void* p, long long i, float x) { ((float*)p)[i] = x; }
  __device__ static __forceinline__ void store2(void* p, long long i, float2 x) { *(float2*)((float*)p + i) = x; }
  __device__ static __forceinline__ void store4(void* p, long long i, float4 x) { *(float4*)((float*)p + i) = x; }
};

// What types of 16 bits have in common. S packs two numbers into a register, and has them back.
template <class S> struct Stored16 {
  using Element = u16;
  static constexpr int bytes = 2;
  static constexpr bool scaled = false;
  __device__ static __forceinline__ uint2 pack4(float4 x) { return make_uint2(S::pack(x.x, x.y), S::pack(x.z, x.w)); }
  __device__ static __forceinline__ float load(const void* p, long long i) { return S::low(((const u16*)p)[i]); }
  __device__ static __forceinline__ float2 load2(const void* p, long long i) {
    const u32 x = *(const u32*)((const u16*)p + i);
    return make_float2(S::low(x), S::high(x));
  }
  __device__ static __forceinline__ float4 load4(const void* p, long long i) {
    const uint2 x = *(const uint2*)((const u16*)p + i);
    return make_float4(S::low(x.x), S::high(x.x), S::low(x.y), S::high(x.y));
  }
  __device__ static __forceinline__ void store(void* p, long long i, float x) { ((u16*)p)[i] = (u16)S::pack(x, 0.f); }
  __device__ static __forceinline__ void store2(void* p, long long i, float2 x) { *(u32*)((u16*)p + i) = S::pack(x.x, x.y); }
  __device__ static __forceinline__ void store4(void* p, long long i, float4 x) { *(uint2*)((u16*)p + i) = pack4(x); }
};

struct Float16 : Stored16<Float16> {
  static constexpr int type = F16;
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
};

struct BFloat16 : Stored16<BFloat16> {
  static constexpr int type = BF16;
  __device__ static __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  __device__ static __forceinline__ float low(u32 x) { return __uint_as_float(x << 16); }
  __device__ static __forceinline__ float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
};

// f of the Store of a type that is known at run time alone. A type that is not here stops the
// launch: nothing takes it for another one.
template <class F> __device__ __forceinline__ auto withStore(int type, const F& f) {
  if (type == F32) return f(Float32{});
  if (type == F16) return f(Float16{});
  if (type != BF16) __trap();
  return f(BFloat16{});
}
// Bytes of an element, 0 of a type that is not here: what is then loaded or stored stops the launch.
__device__ __forceinline__ int bytesOf(int type) { return type == F32 ? Float32::bytes : type == F16 || type == BF16 ? Stored16<Float16>::bytes : 0; }
__device__ __forceinline__ float loadAs(const void* p, long long i, int type) {
  return withStore(type, [&](auto s) { return decltype(s)::load(p, i); });
}
__device__ __forceinline__ void storeAs(void* p, long long i, int type, float x) {
  withStore(type, [&](auto s) { decltype(s)::store(p, i, x); });
}

// A Math has products of one tile of 16 rows (queries, or probabilities) by 8 columns in
// float32, `depth` columns of the left operand at a time. Operands are elements as the Store
// `Operand` has them. Where a number has more bits than the tensor core takes, it is given as
// a sum of two parts, so that no more than 2^-21 (float16, float32) or 2^-16 (bfloat16) of it
// is lost: parts of 16 bits are made of it (pack, low and high of the Operand), and numbers of
// float32, where Math is `wide`, are taken apart by `lead` and `rest` when they are used.

struct MmaF16 : Float16 {
  using Operand = Float16;
  static constexpr bool wide = false;
  static constexpr bool narrow = true; // has few exponents
  static constexpr float lift = 15;    // log2 of what weights are multiplied by: 2^15 is the largest power of two there is
  static constexpr int depth = 16;
  __device__ static __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct MmaBF16 : BFloat16 {
  using Operand = BFloat16;
  static constexpr bool wide = false;
  static constexpr bool narrow = false;
  static constexpr float lift = 0;
  static constexpr int depth = 16;
  __device__ static __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct MmaTF32 {
  using Operand = Float32;
  static constexpr bool wide = true;
  static constexpr bool narrow = false;
  static constexpr float lift = 0;
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

// A or B.
template <bool, class A, class B> struct Either {
  using type = A;
};
template <class A, class B> struct Either<false, A, B> {
  using type = B;
};

template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

// Elements as Store_ has them in memory, multiplied by Math_. Those that are here are
// operands as they are.
template <class Store_, class Math_> struct Format {
  using Store = Store_;
  using Math = Math_;
  static constexpr bool ready = same<Store, typename Math::Operand>;
  static_assert(!Store::scaled, "nothing applies scales yet");
};
using AsF16 = Format<Float16, MmaF16>;
using AsBF16 = Format<BFloat16, MmaBF16>;
using AsF32 = Format<Float32, MmaTF32>;

// f over the values of all threads of a block of eight warps, for all of them. `scratch`
// has a float for each warp; what was in it has been read.
template <class F> __device__ __forceinline__ float foldBlock(float v, float (&scratch)[8], F f) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) v = f(v, __shfl_xor_sync(~0u, v, i));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = scratch[0];
#pragma unroll
  for (int i = 1; i < 8; i++) v = f(v, scratch[i]);
  return v;
}
