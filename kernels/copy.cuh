// Copies from global to shared memory that run beside the arithmetic.
//
// A chunk is a few keys (or values) of one head. It lies in shared memory as
// column blocks of 128 bytes:
//
//	byte (block, row, column) at block*rows*128 + row*128 + (column ^ (row%8)*16)
//
// This is the 128-byte swizzle of Hopper's copy engine; it makes the eight rows
// that a matrix load reads together fall into different banks. Where there is
// no such engine (before sm_90) threads copy 16 bytes each to the same places.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u32 sharedAddress(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 swizzled(u32 row, u32 column) { return row * 128 + (column ^ ((row & 7) << 4)); }

__device__ __forceinline__ void loadMatrix(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

__device__ __forceinline__ void loadMatrixTransposed(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

__device__ __forceinline__ float loadShared(u32 addr) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(addr) : "memory");
  return x;
}

// An 8x8 matrix of 16-bit elements, a row for each four lanes, transposed.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// 16 bytes; zeros where there is nothing to read.
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}
// 4 or 8 bytes.
template <int BYTES> __device__ __forceinline__ void copyFew(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(sharedAddress(dst)), "l"(src), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copyCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copyWait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// How long the L2 cache keeps what is read.
__device__ __forceinline__ u64 readOnce() {
  u64 p;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
__device__ __forceinline__ u64 readAgain() {
  u64 p;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
  return p;
}

#if __CUDA_ARCH__ >= 900
// A tensor map: what the copy engine knows of an array. The driver makes it.
struct alignas(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ void barrierInit(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// What a thread did to shared memory comes before what the copy engine and warp groups do
// to it later. That goes for loads, too: one that was issued has not looked yet, and without
// this the copy engine can overtake it (docs/lab/megakernel.md).
__device__ __forceinline__ void fenceAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What a thread does that has made barriers, before others learn of it.
__device__ __forceinline__ void opened() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fenceAsync();
}
__device__ __forceinline__ void barrierExpect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrierArrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Gives back a stage that all lanes of a warp have read. `empty` counts warps.
__device__ __forceinline__ void releaseStage(u32 empty, int lane) {
  fenceAsync();
  __syncwarp();
  if (lane == 0) barrierArrive(empty);
}
__device__ __forceinline__ void barrierWait(u32 bar, u32 parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done: }" ::"r"(bar), "r"(parity) : "memory");
}
// One lane of a warp, all of whose lanes ask. The compiler knows that it is one: what a
// lane that it knows nothing of gives to the copy engine takes a loop over lanes.
__device__ __forceinline__ bool elected() {
  u32 is;
  asm volatile("{.reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p; }" : "=r"(is)::"memory");
  return is != 0;
}
__device__ __forceinline__ void prefetchMap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// A box of the array that a map describes, from (x, y, z) on: 128 bytes of rows
// y, y+1, ... and so for column blocks z, z+1, ...
__device__ __forceinline__ void copyBox(u32 dst, const TensorMap* map, int x, int y, int z, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar), "l"(policy) : "memory");
}
// Brings memory into the L2 cache, multiples of 16 bytes.
__device__ __forceinline__ void fetchAhead(const void* from, int bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory"); }
// Launches may overlap: a kernel starts before the one before it has ended, and
// waits where it needs what that one has written, which is until that has ended. Where
// it lets the next one start after that, no more than two overlap. A launch of a batch's
// linear layers does so before: what the next one does before its own wait depends on
// nothing that is queued (gemm_skinny.cuh).
__device__ __forceinline__ void waitForEarlier() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void letNextStart() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
struct alignas(64) TensorMap { u64 opaque[16]; };
__device__ __forceinline__ void waitForEarlier() {}
__device__ __forceinline__ void letNextStart() {}
#endif

// A stage of a ring, and the parity of its phase: how often the ring has gone round.
struct PipelineState {
  int index = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Four warps, the first of which is a multiple of four, change how many registers they may use.
template <int N> __device__ __forceinline__ void moreRegisters() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void fewerRegisters() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
#else // nothing
template <int N> __device__ __forceinline__ void moreRegisters() {}
template <int N> __device__ __forceinline__ void fewerRegisters() {}
#endif

// Warps of a block that work together, and their named barrier. Consumers are the first
// ones, and have barrier 1.
struct ThreadGroup {
  int thread, warps, barrier; // thread: number of this one among theirs
  __device__ __forceinline__ int threads() const { return warps * 32; }
  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(warps * 32) : "memory"); }
  __device__ __forceinline__ void arrive() const { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(warps * 32) : "memory"); } // and does not wait
};
__device__ __forceinline__ void syncWarps(int warps) { ThreadGroup{0, warps, 1}.sync(); }
