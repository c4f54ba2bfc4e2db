// Partials of latent attention, and their merging: a partial is plain numbers, and a word beside the numbers says that the partial is complete.
#pragma once
#include "attn_reduce.cuh"

template <class R, int D> struct LatentMerge {
  // A partial of up to 64 rows would be twice as long as numbers with tags. So partials are plain, and a word of each partial has the number of
  // the launch that has completed the partial.
  __device__ static __forceinline__ void publish(u64* tagged, const ThreadGroup& workers, int slot, u32 run) {
    workers.sync();
    if (workers.thread > 0) return;
    __threadfence();
    storeTagged(tagged + slot, run, 0.f);
  }
  __device__ static __forceinline__ void await(const u64* tagged, int host, int sharers, u32 run, int lane) {
#pragma unroll 1
    for (int k = lane; k < sharers; k += 32)
      while (loadWord(tagged + 2 * (host + k) + (k == 0)) >> 32 != run) {}
    __syncwarp();
    __threadfence();
  }

  // Merges pieces of an output tile, each step-th from number `from` on: columns of a row, four for each of the lanes side by side. The
  // other lanes share out the partials, and load EACH partials together.
  template <int EACH> __device__ static __forceinline__ void mergePieces(const Params& p, const typename R::Tile& tile, int host, int sharers, int from, int step, int lane) {
    const int log = EACH < 8 ? 0 : (sharers > EACH) + (sharers > 2 * EACH) + (sharers > 4 * EACH); // of lanes for the same columns
    const int side = 32 >> log, apart = 1 << log, first = lane >> (5 - log), perRow = D / 128 << log;
#pragma unroll 1
    for (int piece = from; piece < tile.rows * perRow; piece += step) {
      const int r = piece / (D / 128) >> log, c = ((piece & (perRow - 1)) * side + (lane & (side - 1))) * 4;
      float m = -LEAN_INF, l = 0.f;
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
      const auto merge = [&](float m2, float l2, float4 o2) {
        const float top = fmaxf(m, m2);
        const Merge both(top);
        const float f = both.weight(m), f2 = both.weight(m2);
        m = top, l = l * f + l2 * f2, o.x = o.x * f + o2.x * f2, o.y = o.y * f + o2.y * f2, o.z = o.z * f + o2.z * f2, o.w = o.w * f + o2.w * f2;
      };
#pragma unroll 1
      for (int k = first; k - first < sharers; k += EACH * apart) {
        float2 s[EACH];
        float4 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          s[i] = make_float2(-LEAN_INF, 0.f), x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (k + i * apart >= sharers) continue;
          const long long at = R::placeOf(p, host, k + i * apart, r);
          s[i] = __ldcg((const float2*)R::statistics(p) + at), x[i] = __ldcg((const float4*)(p.partials + at * D + c));
        }
        float top = m;
#pragma unroll
        for (int i = 0; i < EACH; i++) top = fmaxf(top, s[i].x);
        const Merge all(top);
        const auto add = [&](float f, float l2, float4 o2) { l += f * l2, o.x += f * o2.x, o.y += f * o2.y, o.z += f * o2.z, o.w += f * o2.w; };
        const float f = all.weight(m);
        m = top, l *= f, o.x *= f, o.y *= f, o.z *= f, o.w *= f;
#pragma unroll
        for (int i = 0; i < EACH; i++) add(all.weight(s[i].x), s[i].y, x[i]);
      }
#pragma unroll 1
      for (int i = side; i < 32; i *= 2) {
        const float4 other = make_float4(__shfl_xor_sync(~0u, o.x, i), __shfl_xor_sync(~0u, o.y, i), __shfl_xor_sync(~0u, o.z, i), __shfl_xor_sync(~0u, o.w, i));
        merge(__shfl_xor_sync(~0u, m, i), __shfl_xor_sync(~0u, l, i), other);
      }
      if (first == 0) R::store(p, typename R::Destination(p, tile, -1, r, c, nullptr), o, m, l);
    }
  }
  __device__ static __forceinline__ void mergeShare(const Params& p, const typename R::Tile& tile, int host, int sharers, int from, int step, int lane) {
    if (sharers <= 2) mergePieces<2>(p, tile, host, sharers, from, step, lane);
    else mergePieces<18>(p, tile, host, sharers, from, step, lane);
  }

  // Does what Reduce::mergeTogether does.
  __device__ static __forceinline__ void mergeTogether(const Params& p, const u64* tagged, const ThreadGroup& workers, const typename R::Shares& shares, typename R::Tile tile, const typename R::Tile& last, const typename R::Shared& sh, u32 run, int lane) {
    R::LOOKED.sync();
    int host = shares.host, sharers = shares.sharers;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      const int does = sh.last[k], warp = workers.thread / 32;
      if (does != R::NOTHING_OF_IT) {
        const bool all = does == R::ALL_OF_IT;
        await(tagged, host, sharers, run, lane);
        mergeShare(p, tile, host, sharers, all ? warp : ((int)blockIdx.x - host) * workers.warps + warp, all ? workers.warps : sharers * workers.warps, lane);
      }
      tile = last, host = blockIdx.x, sharers = shares.guests;
    }
  }

  // Does what Reduce::settle does.
  __device__ static __forceinline__ void settle(const Params& p, const ThreadGroup& workers, const typename R::Shares& shares, typename R::Tile tile, const typename R::Tile& last, const typename R::Shared& sh, int lane) {
    int host = shares.host, sharers = shares.sharers;
    if (!R::arriveAll(p, workers, shares, sh)) return;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      if (sh.last[k]) mergeShare(p, tile, host, sharers, workers.thread / 32, workers.warps, lane);
      tile = last, host = blockIdx.x, sharers = shares.guests;
    }
  }
};
