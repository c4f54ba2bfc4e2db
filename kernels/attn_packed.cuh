// Decode with rows of keys and values that are no whole column blocks of 128 bytes. The copy engine takes as long for a part of a column
// block as for all of it, but not for contiguous memory: the keys of a page lie one behind the other. So they come as they are, and a row
// in shared memory begins where the one before ends.
#pragma once
#include "attn_lean.cuh"

// The Format F, with rows that lie so.
template <class F> struct Packed : F {};

// D is a multiple of 16, and no multiple of 64: then no more than four rows of a matrix are in the same banks. Chunks of wide rows have
// more keys than in other Formats, since they are smaller.
template <class F, int D_, class V_> struct Shape<Packed<F>, D_, false, false, V_> : Shape<F, D_, false, false, V_> {
  using T = Packed<F>;
  using Rows = Shape<F, D_, false, false, V_>;
  static constexpr int KEYS = Rows::KEYS < 32 ? 32 : Rows::KEYS;
  using Place = Walk<KEYS, V_>;
  static constexpr int ROW = D_ * F::Store::bytes; // bytes
  static constexpr int BLOCK = KEYS * ROW;         // a chunk's keys, or values
  static constexpr int BLOCKS = 1, SLOT = 2 * BLOCK;
};

// As the operands of other Formats.
template <class F, int D, class V> struct ChunkOperands<Shape<Packed<F>, D, false, false, V>, true> {
  static constexpr int ROW = Shape<Packed<F>, D, false, false, V>::ROW;
  __device__ static __forceinline__ void keysRight(u32 (&b)[4], u32 keys, int n, int k, int lane) {
    const u32 row = (lane & 7) + (lane >> 4) * 8, half = ((lane >> 3) & 1) * 16;
    loadMatrix(b, keys + (row + n * 8) * ROW + k * 32 + half);
  }
  __device__ static __forceinline__ void keysLeft(u32 (&a)[4], u32 keys, int i, int k, int lane) {
    const u32 row = lane & 15, half = (lane >> 4) * 16;
    loadMatrix(a, keys + (row + i * 16) * ROW + k * 32 + half);
  }
  __device__ static __forceinline__ void valuesRight(u32 (&b)[4], u32 values, int n, int k, int lane) {
    const u32 row = lane & 15, half = (lane >> 4) * 16;
    loadMatrixTransposed(b, values + (row + k * 8) * ROW + n * 16 + half);
  }
  __device__ static __forceinline__ void valuesLeft(u32 (&a)[4], u32 values, int n, int i, int lane) {
    const u32 row = (lane & 7) + (lane >> 4) * 8, side = ((lane >> 3) & 1) * 16;
    loadMatrixTransposed(a, values + (row + i * 16) * ROW + n * 32 + side);
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// `bytes` from memory on, a multiple of 16.
__device__ __forceinline__ void copyBytes(u32 dst, const void* from, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst), "l"(from), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}

template <class F, int D, class V> struct Ring<Shape<Packed<F>, D, false, false, V>> : Shape<Packed<F>, D, false, false, V> {
  using S = Shape<Packed<F>, D, false, false, V>;
  using Others = Ring<typename S::Rows>;
  using Place = typename S::Place;
  using S::KEYS, S::ROW, S::SLOT;
  static constexpr int PACE = (64 << 10) / SLOT, MANY = 160; // as those of other Formats

  __device__ static __forceinline__ void openSlot(u32 full, u32 empty, int slot) { Others::openSlot(full, empty, slot); }

  // As that of other Formats. What is behind the last key of a sequence is not copied.
  __device__ static __forceinline__ void produce(const Params& p, Place at, const TensorMap* map, u32 ring, u32 full, u32 empty, int first, int slot, u32 parity, int lane, int wholeTiles, int, bool) {
    const char* const memory = (const char*)((const TensorMap*)&p - map > 1 ? p.keys : p.values); // the maps lie in front of p
    const u64 policy = p.streamed ? readOnce() : readAgain();
    const int box = p.box, boxes = KEYS >> (31 - __clz(box)), pageRows = p.pageRows, pageTokens = p.pageTokens, slots = p.slots;
    const int pace = min(at.left + wholeTiles > MANY ? PACE + PACE / 2 : PACE, slots);
    const bool paged = p.pages != nullptr;
    int skip = first;
    bool waited = false, again = false; // again: the ring has been filled once
    do {
      const int head = at.head * p.headRows, old = p.early ? at.s.keys - at.s.queries : 0;
      int c = at.chunk + skip, n = 0, in = c * KEYS, page = at.s.pages;
      typename Others::Pages pages;
      if (paged && c < at.end) {
        n = in / pageTokens, in -= n * pageTokens;
        pages.open(p, at.s, n, lane);
        page = pages.get(n);
      }
#pragma unroll 1
      for (; c < at.end; c += 2) {
        const u32 bar = full + slot * 8, to = ring + slot * SLOT;
        const int live = min(at.s.keys - c * KEYS, KEYS), before = slot - pace;
        if (before >= 0) barrierWait(full + before * 8, parity ^ 1);
        else if (again) barrierWait(full + (before + slots) * 8, parity);
        barrierWait(empty + slot * 8, parity);
        __syncwarp(); // no lane is a round ahead of another
        if (elected()) barrierExpect(bar, live * ROW);
        if (!waited && (c + 1) * KEYS > old) waitForEarlier(), waited = true;
#pragma unroll 1
        for (int b = 0; b < boxes; b++) {
          const char* const from = memory + (long long)(page * pageRows + head + in) * ROW;
          const int rows = min(live - b * box, box);
          if (rows > 0 && elected()) copyBytes(to + b * box * ROW, from, rows * ROW, bar, policy);
          if ((in += box) >= pageTokens && paged) {
            in = 0;
            page = pages.at(p, at.s, ++n, lane);
          }
        }
        in += KEYS; // the other warp's
        if (paged && in >= pageTokens) {
          do in -= pageTokens, n++;
          while (in >= pageTokens);
          page = pages.at(p, at.s, n, lane);
        }
        if ((slot += 2) >= slots) slot -= slots, parity ^= 1, again = true;
      }
      skip = c - at.end; // 0 or 1, or what a short part leaves
    } while (at.next(p));
    if (!waited) waitForEarlier();
  }
};

// Values behind the live ones, as Attention::clearBehind.
template <class S> __device__ __forceinline__ void clearRows(u32 slot, int live, int lane) {
  for (int i = live * S::ROW + lane * 16; i < S::BLOCK; i += 512) asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(slot + S::BLOCK + i), "r"(0) : "memory");
}
#define PACKED_ATTENTION(name, T, D) \
  template <> __device__ __forceinline__ void Attention<Shape<Packed<T>, D>>::clearBehind(u32 slot, int live, int lane) { clearRows<Shape<Packed<T>, D>>(slot, live, lane); } \
  ATTENTION(name, Packed<T>, D)
#else // there the others take what it is for
#define PACKED_ATTENTION(name, ...) extern "C" __global__ void name(const __grid_constant__ LaunchParams p) {}
#endif
