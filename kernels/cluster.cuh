// What the thread blocks of a cluster tell each other through shared memory. Before sm_90 a
// block is its own cluster.
#pragma once
#include "copy.cuh"

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void clusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void clusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// clusterArrive where no memory has to be seen.
__device__ __forceinline__ void clusterArriveRelaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Where another thread block of the cluster has what is at the shared address `at` here.
__device__ __forceinline__ u32 remoteAddress(u32 at, int rank) {
  u32 to;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(at), "r"(rank));
  return to;
}
// A float, or four, from there.
__device__ __forceinline__ float remote(const float* at, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remoteAddress(sharedAddress(at), rank)) : "memory");
  return v;
}
__device__ __forceinline__ float4 remote4(const float* at, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(remoteAddress(sharedAddress(at), rank)) : "memory");
  return v;
}
// Two or four floats to another thread block of the cluster, and word of them to a
// barrier there.
__device__ __forceinline__ void send2(u32 to, u32 bar, float a, float b) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(a), "f"(b), "r"(bar) : "memory");
}
__device__ __forceinline__ void send4(u32 to, u32 bar, float4 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
}
// `bytes` from here to another thread block of the cluster, as send2 does it.
__device__ __forceinline__ void sendBlock(u32 to, u32 bar, u32 from, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from), "r"(bytes), "r"(bar) : "memory");
}
// Arrives at a barrier there.
__device__ __forceinline__ void barrierArriveRemote(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
#else
__device__ __forceinline__ void clusterArrive() { __syncthreads(); }
__device__ __forceinline__ void clusterWait() {}
__device__ __forceinline__ float remote(const float* at, int) { return *at; }
#endif
__device__ __forceinline__ void clusterSync() { clusterArrive(), clusterWait(); }
