// Products of warp groups (wgmma), which compute capability 9.0 has and newer ones have not:
// the four warps of a group multiply operands that lie in shared memory, or the left one in
// their registers, while the warps do something else.
#pragma once
#include "copy.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// An instruction names all registers of its sums d, 64 x N: four of each lane for each 8
// columns. So does its text, and behind them come the operands.
#define WGMMA_SUMS1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define WGMMA_SUMS2(j) WGMMA_SUMS1(j), WGMMA_SUMS1(j + 1)
#define WGMMA_SUMS4(j) WGMMA_SUMS2(j), WGMMA_SUMS2(j + 2)
#define WGMMA_SUMS8(j) WGMMA_SUMS4(j), WGMMA_SUMS4(j + 4)
#define WGMMA_SUMS16(j) WGMMA_SUMS8(j), WGMMA_SUMS8(j + 8)
#define WGMMA_SUMS32(j) WGMMA_SUMS16(j), WGMMA_SUMS16(j + 16)
#define WGMMA_NAMES2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES4 WGMMA_NAMES2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES8 WGMMA_NAMES4 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES16 WGMMA_NAMES8 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES32 WGMMA_NAMES16 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_SHARED(N, TYPES, NAMES, SUMS, A, B, MORE, COLUMNS) \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" MORE ", 0;\n" \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPES " {" NAMES "}, %" A ", %" B ", p, 1, 1, " COLUMNS ";}" \
               : SUMS(0) : "l"(a), "l"(b), "r"(more))
#define WGMMA_REGISTERS(N, TYPES, NAMES, SUMS, A0, A1, A2, A3, B, MORE) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPES " {" NAMES "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", %" MORE ", 1, 1, 1;" \
               : SUMS(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(more))
#define WGMMA(N, SUMS, NAMES, I0, I1, I2, I3, I4, I5) \
  template <> struct Wgmma<N> { \
    /* d += a b: a is 64 x 16 and b N x 16, both in shared memory; without `more` d begins with 0. */ \
    template <class Math> __device__ static __forceinline__ void shared(float (&d)[N / 8][4], u64 a, u64 b, int more) { \
      if constexpr (same<typename Math::Operand, Float16>) { \
        WGMMA_SHARED(#N, "f16.f16", NAMES, SUMS, I0, I1, I2, "0, 0"); \
      } else { \
        static_assert(same<typename Math::Operand, BFloat16>, "there is no such product"); \
        WGMMA_SHARED(#N, "bf16.bf16", NAMES, SUMS, I0, I1, I2, "0, 0"); \
      } \
    } \
    /* The same of a, 16 x 64, and b, 16 x N. */ \
    template <class Math> __device__ static __forceinline__ void columns(float (&d)[N / 8][4], u64 a, u64 b) { \
      const int more = 1; \
      if constexpr (same<typename Math::Operand, Float16>) { \
        WGMMA_SHARED(#N, "f16.f16", NAMES, SUMS, I0, I1, I2, "1, 1"); \
      } else { \
        static_assert(same<typename Math::Operand, BFloat16>, "there is no such product"); \
        WGMMA_SHARED(#N, "bf16.bf16", NAMES, SUMS, I0, I1, I2, "1, 1"); \
      } \
    } \
    /* The same of a, 64 x 16, in registers and b, 16 x N. */ \
    template <class Math, int more = 1> __device__ static __forceinline__ void registers(float (&d)[N / 8][4], const u32 (&a)[4], u64 b) { \
      if constexpr (same<typename Math::Operand, Float16>) { \
        WGMMA_REGISTERS(#N, "f16.f16", NAMES, SUMS, I0, I1, I2, I3, I4, I5); \
      } else { \
        static_assert(same<typename Math::Operand, BFloat16>, "there is no such product"); \
        WGMMA_REGISTERS(#N, "bf16.bf16", NAMES, SUMS, I0, I1, I2, I3, I4, I5); \
      } \
    } \
  }
template <int N> struct Wgmma;
WGMMA(16, WGMMA_SUMS2, WGMMA_NAMES2, "8", "9", "10", "11", "12", "13");
WGMMA(32, WGMMA_SUMS4, WGMMA_NAMES4, "16", "17", "18", "19", "20", "21");
WGMMA(64, WGMMA_SUMS8, WGMMA_NAMES8, "32", "33", "34", "35", "36", "37");
WGMMA(128, WGMMA_SUMS16, WGMMA_NAMES16, "64", "65", "66", "67", "68", "69");
WGMMA(256, WGMMA_SUMS32, WGMMA_NAMES32, "128", "129", "130", "131", "132", "133");

__device__ __forceinline__ void wgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all but the last MORE committed groups of products.
template <int MORE> __device__ __forceinline__ void wgmmaWait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MORE) : "memory"); }
// d is in use: the compiler moves nothing of it across.
template <int N> __device__ __forceinline__ void pinned(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// Matrix descriptors of an operand whose rows of 128 bytes are swizzled: of one whose rows
// are those of d (or its columns), and of one whose rows are what is summed over, of which 64
// columns more are `next` bytes on.
__device__ __forceinline__ u64 rowOperand(u32 at) { return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
__device__ __forceinline__ u64 columnOperand(u32 at, u32 next) { return (u64)((at & 0x3ffff) >> 4) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }
#endif
