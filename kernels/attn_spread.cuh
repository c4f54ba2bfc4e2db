// Queries and outputs of heads whose width no kernel has. Kernels of a larger width read rows of keys and values that the
// copy engine spreads over column blocks (Spread says how). Queries are spread in the same way before, and outputs are
// gathered after.
#pragma once
#include "attn_work.cuh"
#include "copy.cuh"

// How a row of `dim` elements lies in a row of a kernel's width: column block i, of `block` elements, begins with element
// i*step and has `taken` elements. Zeros follow. An element that two blocks have counts in the first of them. All numbers
// are multiples of 4.
struct Spread {
  int dim, block, taken, step;
};

struct SpreadParams {
  const void* from;
  void* to;
  const Seq* seqs; // null: all rows are written, else those of `sequences` sequences
  long long fromRow, fromHead, toRow, toHead; // strides, in elements
  Spread spread;
  int rows, heads, width; // width: of the kernel
  int sequences;
  int bytes; // of an element: 2 or 4
};

constexpr int SPREAD_THREADS = 256;

// Whether a row is one of the sequences'. All lanes of a warp ask together.
__device__ __forceinline__ bool isOfSequence(const SpreadParams& p, int row) {
  if (p.seqs == nullptr) return true;
  bool mine = false;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < p.sequences; i += 32) mine = mine || (row >= p.seqs[i].row && row < p.seqs[i].row + p.seqs[i].queries);
  return __any_sync(~0u, mine);
}

// Four elements that begin with number i; outside of a row: zeros.
template <class Four> __device__ __forceinline__ Four spreadFrom(const Spread& s, const void* row, int i) {
  const int b = i / s.block, x = i - b * s.block, e = b * s.step + x;
  const bool there = x < s.taken && e < s.dim && (b == 0 || x >= s.taken - s.step);
  Four zeros = {};
  return there ? *(const Four*)((const char*)row + (long long)e * (sizeof(Four) / 4)) : zeros;
}

template <class Four> __device__ __forceinline__ void spreadRows(const SpreadParams& p) {
  const int each = p.width / 4, all = p.heads * each;
#pragma unroll 1
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (!isOfSequence(p, row)) continue;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += SPREAD_THREADS) {
      const int head = i / each, at = (i - head * each) * 4;
      const char* from = (const char*)p.from + (row * p.fromRow + head * p.fromHead) * (long long)(sizeof(Four) / 4);
      *(Four*)((char*)p.to + (row * p.toRow + head * p.toHead + at) * (long long)(sizeof(Four) / 4)) = spreadFrom<Four>(p.spread, from, at);
    }
  }
}

template <class Four> __device__ __forceinline__ void gatherRows(const SpreadParams& p) {
  const int each = p.spread.dim / 4, all = p.heads * each;
#pragma unroll 1
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
    if (!isOfSequence(p, row)) continue;
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += SPREAD_THREADS) {
      const int head = i / each, e = (i - head * each) * 4;
      const int b = e < p.spread.taken ? 0 : (e - p.spread.taken) / p.spread.step + 1, at = b * p.spread.block + e - b * p.spread.step;
      const char* from = (const char*)p.from + (row * p.fromRow + head * p.fromHead + at) * (long long)(sizeof(Four) / 4);
      *(Four*)((char*)p.to + (row * p.toRow + head * p.toHead + e) * (long long)(sizeof(Four) / 4)) = *(const Four*)from;
    }
  }
}
