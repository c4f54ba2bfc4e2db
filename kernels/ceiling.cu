// What a GPU's memory gives to kernels that do nothing but read, with bulk copies and as
// many bytes in flight as attention has.
//
// Needed by: measurements: what the memory gives to kernels that do nothing but read.
#include "copy.cuh"

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copyBulk(u32 dst, const char* src, int bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
#endif

// The read ceiling: memory in one piece.
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
    copyBulk(ring + s * p.piece, p.from + next * p.piece, p.piece, bar + s * 8, policy);
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

// The same of keys and values in pages: a piece is what a page has of a KV head. The
// list of all pieces, in attention's order sequence -> KV head -> page, is cut into equal
// ranges, two for each thread block. Of a range one warp reads the keys and another the
// values, and has a ring of its own.
struct PageSeq {
  int first; // its first entry of the block table
  int pages;
};

struct PageRange {
  int seq, head, page; // of the first piece
  int pieces;
  PageSeq first; // sequence number seq
};

struct PagesParams {
  const char *keys, *values;
  const int* table;
  const PageSeq* seqs;
  const PageRange* ranges;
  u32* sink; // a word for each thread
  long long pageBytes;
  int piece; // bytes
  int heads; // KV heads
  int together; // pieces of a slot: a power of two
  int slots;    // of a warp's ring, at most 4
};

constexpr int PAGES_WARPS = 4;

extern "C" __global__ void __launch_bounds__(PAGES_WARPS * 32, 1) read_pages(const __grid_constant__ PagesParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) char memory[];
  constexpr int MOST_SLOTS = 4;
  __shared__ alignas(8) u64 bars[PAGES_WARPS * MOST_SLOTS];
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const PageRange range = p.ranges[blockIdx.x * 2 + warp / 2];
  const char* const from = warp % 2 ? p.values : p.keys;
  const int slotBytes = p.together * p.piece, step = slotBytes / 32;
  const char* const ring = memory + warp * p.slots * slotBytes;
  const u32 full = sharedAddress(bars + warp * MOST_SLOTS);
  const u64 policy = readOnce();

  // Pieces are looked up 32 at a time, one a lane, across the ends of heads and sequences;
  // the block table's entries of the next 32 are on their way.
  PageSeq s = range.first;
  int seq = range.seq, head = range.head, page = range.page + lane, index = lane;
  int entry = 0, entryHead = 0;
  long long place = 0;
  const auto lookUp = [&] {
    place = entry * p.pageBytes + entryHead * p.piece;
    if (index < range.pieces) {
      while (page >= s.pages) {
        page -= s.pages;
        if (++head == p.heads) head = 0, s = p.seqs[++seq];
      }
      entry = p.table[s.first + page], entryHead = head;
    }
    index += 32, page += 32;
  };
  lookUp();
  if (lane == 0) {
    for (int i = 0; i < MOST_SLOTS; i++) barrierInit(full + i * 8, 1);
    opened();
  }
  __syncwarp();
  lookUp();

  int next = 0;
  const auto fill = [&](int slot) {
    const int n = min(p.together, range.pieces - next);
    if (n <= 0) return;
    const u32 to = sharedAddress(ring) + slot * slotBytes, bar = full + slot * 8;
    if (elected()) barrierExpect(bar, n * p.piece);
    // Four together: one by one, small pieces are asked for later than they could come.
#pragma unroll 1
    for (int i = 0; i < n; i += 4) {
      long long at[4];
#pragma unroll
      for (int j = 0; j < 4; j++) at[j] = __shfl_sync(~0u, place, (next + j) & 31);
      if (elected()) {
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (i + j < n) copyBulk(to + (i + j) * p.piece, from + at[j], p.piece, bar, policy);
      }
      next += min(4, n - i);
      if ((next & 31) == 0) lookUp();
    }
  };
#pragma unroll 1
  for (int i = 0; i < p.slots; i++) fill(i);
  // Words of every piece, whose sum tells what was read.
  u32 sum = 0, parity = 0;
  int slot = 0;
#pragma unroll 1
  for (int done = 0; done < range.pieces; done += p.together) {
    barrierWait(full + slot * 8, parity);
    if (lane * step < min(p.together, range.pieces - done) * p.piece) sum += *(const u32*)(ring + slot * slotBytes + lane * step);
    __syncwarp();
    fill(slot);
    if (++slot == p.slots) slot = 0, parity ^= 1;
  }
  p.sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
#endif
}
