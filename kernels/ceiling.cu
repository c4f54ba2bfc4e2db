// The read ceiling: what a GPU's memory gives to a kernel that does nothing but
// read, with the same bulk copies and as many bytes in flight.
#include "copy.cuh"

struct CeilingParams {
  const char* from;
  long long bytes; // a multiple of `piece`
  int piece;       // bytes of a copy
  int stages;
  u32* sink;
};

extern "C" __global__ void __launch_bounds__(32, 1) read_ceiling(const __grid_constant__ CeilingParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) char memory[];
  __shared__ alignas(8) u64 bars[32];
  if (threadIdx.x != 0) return;
  const u32 ring = sharedAddress(memory), bar = sharedAddress(bars);
  for (int s = 0; s < p.stages; s++) barrierInit(bar + s * 8, 1);
  opened();
  const long long n = p.bytes / p.piece, begin = n * blockIdx.x / gridDim.x, end = n * (blockIdx.x + 1) / gridDim.x;
  const u64 policy = readOnce();
  long long next = begin;
  auto issue = [&](int s) {
    if (next >= end) return;
    barrierExpect(bar + s * 8, p.piece);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(ring + s * p.piece),
                 "l"(p.from + next * p.piece), "r"(p.piece), "r"(bar + s * 8), "l"(policy) : "memory");
    next++;
  };
  for (int s = 0; s < p.stages; s++) issue(s);
  u32 sum = 0;
  int s = 0, parity = 0;
  for (long long i = begin; i < end; i++) {
    barrierWait(bar + s * 8, parity);
    sum ^= *(const u32*)(memory + s * p.piece);
    issue(s);
    if (++s == p.stages) s = 0, parity ^= 1;
  }
  if (sum == 0x12345678) *p.sink = sum; // keeps the reads
#endif
}
