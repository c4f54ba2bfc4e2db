// Decode with rows of keys and values that are no whole column blocks of 128 bytes. The copy engine takes as long for a part of a column
// block as for a whole one, but not for contiguous memory, and the keys of a page are contiguous. So pieces of pages are copied as they
// are, and a row in shared memory begins where the row before ends.
#pragma once
#include "attn_lean.cuh"

// The Format F, with such rows.
template <class F> struct Packed : F {};

// D is no multiple of 64: then no more than four rows of a matrix are in the same banks. Where D is no multiple of 16, half of the last
// operand has no elements: zeros in queries and keys, and any numbers in values, whose sums are not stored. Chunks of wide rows have more
// keys than in other Formats, since the rows are smaller.
template <class F, int D_, class V_> struct Shape<Packed<F>, D_, false, false, V_> : Shape<F, D_, false, false, V_> {
  using T = Packed<F>;
  using Rows = Shape<F, D_, false, false, V_>;
  static constexpr int KEYS = Rows::KEYS < 32 ? 32 : Rows::KEYS;
  using Place = Walk<KEYS, V_>;
  static constexpr int ROW = D_ * F::Store::bytes; // bytes
  static constexpr int BLOCK = KEYS * ROW;         // a chunk's keys, or values
  static constexpr int BLOCKS = 1, SLOT = 2 * BLOCK;
  static constexpr int STEPS = (D_ + 15) / 16, TILES = 2 * STEPS, QUERY = Rows::SHARED_QUERY ? STEPS * 1024 : 0;
  static_assert(D_ % 16 == 0 || D_ % 8 == 0 && Rows::SHARED_QUERY, "fetchRows alone leaves out elements that are not there");
};

// The operands of other Formats, from such rows.
template <class F, int D, class V> struct ChunkOperands<Shape<Packed<F>, D, false, false, V>, true> {
  static constexpr int ROW = Shape<Packed<F>, D, false, false, V>::ROW;
  // Reports whether the operand that begins at an element has eight elements alone.
  __device__ static __forceinline__ constexpr bool endsAfter8(int element) { return element + 8 == D; }
  __device__ static __forceinline__ void keysRight(u32 (&b)[4], u32 keys, int n, int k, int lane) {
    const u32 row = (lane & 7) + (lane >> 4) * 8, half = endsAfter8(k * 16) ? 0 : ((lane >> 3) & 1) * 16;
    loadMatrix(b, keys + (row + n * 8) * ROW + k * 32 + half);
    if (endsAfter8(k * 16)) b[1] = b[3] = 0;
  }
  __device__ static __forceinline__ void keysLeft(u32 (&a)[4], u32 keys, int i, int k, int lane) {
    const u32 row = lane & 15, half = (lane >> 4) * 16;
    loadMatrix(a, keys + (row + i * 16) * ROW + k * 32 + half);
  }
  __device__ static __forceinline__ void valuesRight(u32 (&b)[4], u32 values, int n, int k, int lane) {
    const u32 row = lane & 15, half = endsAfter8(n * 8) ? 0 : (lane >> 4) * 16;
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
  static constexpr int PACE = Others::even((64 << 10) / SLOT), MANY = 160; // as in other Formats

  __device__ static __forceinline__ void openSlot(u32 full, u32 empty, int slot) { Others::openSlot(full, empty, slot); }

  // As produce of other Formats. Nothing behind the last key of a sequence is copied.
  __device__ static __forceinline__ void produce(const Params& p, Place at, const TensorMap* map, u32 ring, u32 full, u32 empty, int first, int slot, u32 parity, int lane, int wholeTiles, int, bool) {
    const char* const memory = (const char*)((const TensorMap*)&p - map > 1 ? p.keys : p.values); // the maps lie in front of p
    const u64 policy = p.streamed ? readOnce() : readAgain();
    const int box = p.box, boxes = KEYS >> (31 - __clz(box)), pageRows = p.pageRows, pageTokens = p.pageTokens, slots = p.slots;
    const int pace = min(at.left + wholeTiles > MANY ? Others::even((64 << 10) / SLOT * 3 / 2) : PACE, slots);
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
        in += KEYS; // the other warp's chunk
        if (paged && in >= pageTokens) {
          do in -= pageTokens, n++;
          while (in >= pageTokens);
          page = pages.at(p, at.s, n, lane);
        }
        if ((slot += 2) >= slots) slot -= slots, parity ^= 1, again = true;
      }
      skip = c - at.end; // 0 or 1, or more behind a short part
    } while (at.next(p));
    if (!waited) waitForEarlier();
  }
};

// Clears values behind the live ones, as Attention::clearBehind does.
template <class S> __device__ __forceinline__ void clearRows(u32 slot, int live, int lane) {
  for (int i = live * S::ROW + lane * 16; i < S::BLOCK; i += 512) asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(slot + S::BLOCK + i), "r"(0) : "memory");
}

// Loads queries as Attention::fetch does, with zeros where an operand has no elements.
template <class S, class Query> __device__ __forceinline__ void fetchRows(const void* q, const long long (&at)[2], int t, float (&x)[S::STEPS][8]) {
#pragma unroll
  for (int s = 0; s < S::STEPS; s++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int from = s * 16 + (j >> 1) * 8;
      const float2 v = from < S::D ? Query::load2(q, at[j & 1] + from + 2 * t) : make_float2(0.f, 0.f);
      x[s][2 * j] = v.x, x[s][2 * j + 1] = v.y;
    }
}

#define PACKED_ATTENTION(name, T, D) \
  template <> __device__ __forceinline__ void Attention<Shape<Packed<T>, D>>::clearBehind(u32 slot, int live, int lane) { clearRows<Shape<Packed<T>, D>>(slot, live, lane); } \
  template <> template <class Query> __device__ __forceinline__ void Attention<Shape<Packed<T>, D>>::fetch(const void* q, const long long (&at)[2], int t, float (&x)[STEPS][EACH]) { fetchRows<Shape<Packed<T>, D>, Query>(q, at, t, x); } \
  ATTENTION(name, Packed<T>, D)
#else // on other GPUs other kernels read such heads
#define PACKED_ATTENTION(name, ...) extern "C" __global__ void name(const __grid_constant__ LaunchParams p) {}
#endif

// Kernels of larger head dims read such heads, too, at 0.5 to 0.94 of this speed, and with a launch before and one after (attn_spread.cuh).
// Heads of 216, 240 and 248 elements fit no larger kernel: unit any reads them at 0.28 of this speed.
#define PACKED_HEADS(name, T)          \
  PACKED_ATTENTION(name##_32, T, 32)   \
  PACKED_ATTENTION(name##_48, T, 48)   \
  PACKED_ATTENTION(name##_80, T, 80)   \
  PACKED_ATTENTION(name##_112, T, 112) \
  PACKED_ATTENTION(name##_144, T, 144) \
  PACKED_ATTENTION(name##_160, T, 160) \
  PACKED_ATTENTION(name##_176, T, 176) \
  HOPPER_ATTENTION(name##_192, T, 192) /* three column blocks */ \
  PACKED_ATTENTION(name##_208, T, 208) \
  PACKED_ATTENTION(name##_216, T, 216) \
  PACKED_ATTENTION(name##_224, T, 224) \
  PACKED_ATTENTION(name##_240, T, 240) \
  PACKED_ATTENTION(name##_248, T, 248)
