// Small copies that come together, as between two runs of a captured step. Each of
// them by itself takes some 3 us, by the copy engine or a kernel; most of that is the
// beginning and the end, which all have at once here. The host's pinned memory is
// read at its address there: a thread has all that it reads on the way at once.
//
// Needed by: every decode.
#include "copy.cuh"

constexpr int COPIES_MOST = 8;
constexpr int COPIES_THREADS = 256;
constexpr int COPIES_BLOCK = 4096; // bytes of a thread block

struct Copies {
  u64 to[COPIES_MOST], from[COPIES_MOST]; // multiples of 4
  int bytes[COPIES_MOST];                 // so are these
  int blocks;                             // of each copy, as many as the largest one needs
};

// It is never launched to overlap what is before it, so it waits for nobody. What is
// behind it overlaps it only if it waits before it reads anything.
extern "C" __global__ void __launch_bounds__(COPIES_THREADS) copy_pieces(const __grid_constant__ Copies p) {
  if (threadIdx.x == 0) letNextStart();
  const int i = blockIdx.x / p.blocks;
  const int begin = blockIdx.x % p.blocks * COPIES_BLOCK, end = min(p.bytes[i], begin + COPIES_BLOCK);
  const u64 to = p.to[i], from = p.from[i];
  if ((to | from) % 16 == 0) {
    const int at = begin + threadIdx.x * 16;
    if (at + 16 <= end) {
      *(uint4*)(to + at) = *(const uint4*)(from + at);
      return;
    }
    for (int j = at; j < end; j += 4) *(u32*)(to + j) = *(const u32*)(from + j); // three at most
    return;
  }
  constexpr int EACH = COPIES_BLOCK / 4 / COPIES_THREADS;
  u32 x[EACH];
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int at = begin + (j * COPIES_THREADS + threadIdx.x) * 4;
    x[j] = at < end ? *(const u32*)(from + at) : 0;
  }
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int at = begin + (j * COPIES_THREADS + threadIdx.x) * 4;
    if (at < end) *(u32*)(to + at) = x[j];
  }
}
