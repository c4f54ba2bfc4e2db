// The end of an output tile: the states of a thread block's warps become one,
// and the partials of several blocks become the output.
#pragma once
#include "work.cuh"

template <class S> struct Reduce {
  using Place = typename S::Place;
  static constexpr int D = S::D, WIDTH = S::WIDTH;
  static constexpr int STATES = COMPUTERS;

  // What a thread block keeps in shared memory beside the ring.
  struct Shared {
    int warps, rooms;
    float* o; // states of a room: (warps, rows, WIDTH)
    float4* m; // of each row, one for each state
    float4* l;
    int* last; // of the two output tiles that a block shares: the rows of one that is complete, else 0
    // The number of part i's room, and how often it was used before.
    __device__ __forceinline__ int room(int i) const { return rooms > 1 ? i & 1 : 0; }
    __device__ __forceinline__ int round(int i) const { return rooms > 1 ? i >> 1 : i; }
    // That room.
    __device__ __forceinline__ Shared of(int i, int rows) const {
      Shared s = *this;
      const int n = room(i);
      s.o += n * (warps * rows * WIDTH), s.m += n * ROWS, s.l += n * ROWS;
      return s;
    }
  };

  static __device__ __forceinline__ float* statistics(const Params& p) { return p.partials + (long long)2 * gridDim.x * p.rows * D; }

  // Where four elements go, and with a row's first four the row's statistics: in the
  // output, whose statistics are its log-sum-exp, or in a slot of the partials.
  struct Spot {
    char* to;
    float* statistics; // null: none
    // Columns c to c+3 of row r.
    __device__ __forceinline__ Spot(const Params& p, const Place& w, int slot, int r, int c) {
      if (slot < 0) {
        const int i = w.block * ROWS + r, n = positionOf(p, i), h = w.head * p.group + i - n * p.group;
        const long long row = w.s.row + n;
        to = (char*)p.out + (row * p.outRow + h * p.outHead + c) * (p.outType == F32 ? 4 : 2);
        statistics = p.lse != nullptr && c == 0 ? p.lse + row * p.lseRow + h * p.lseHead : nullptr;
      } else {
        const long long at = (long long)slot * p.rows + r;
        to = (char*)(p.partials + at * D + c), statistics = c == 0 ? Reduce::statistics(p) + at * 2 : nullptr;
      }
    }
  };

  __device__ static __forceinline__ void store(const Params& p, const Spot& spot, float4 o, float m, float l) {
    const float f = __fdividef(1.f, l);
    o = l == 0.f ? make_float4(0.f, 0.f, 0.f, 0.f) : make_float4(o.x * f, o.y * f, o.z * f, o.w * f); // not 0 times what other rows' NaN have made
    if (p.outType == F32) {
      *(float2*)spot.to = make_float2(o.x, o.y), *(float2*)(spot.to + 8) = make_float2(o.z, o.w);
    } else {
      u32* const to = (u32*)spot.to;
      to[0] = p.outType == F16 ? Half::pack(o.x, o.y) : Brain::pack(o.x, o.y);
      to[1] = p.outType == F16 ? Half::pack(o.z, o.w) : Brain::pack(o.z, o.w);
    }
    if (spot.statistics != nullptr) *spot.statistics = l == 0.f ? -LEAN_INF : (m - S::T::lift + log2_(l)) * 0.69314718055994531f;
  }

  // What a thread combines next: four columns of a row. Finding out where they go takes
  // longer than combining them, so whoever waits for the states does that before.
  struct Item {
    int i, r, c;
    Spot spot;
    // The first of a thread: the warps take turns where there is work for few of them.
    __device__ __forceinline__ Item(const Params& p, const Crew& crew, const Place& w, int slot, int turn) : Item(p, w, slot, (crew.thread + turn * 32) % crew.threads()) {}
    __device__ __forceinline__ Item(const Params& p, const Place& w, int slot, int i) : i(i), r(i / (D / 4)), c(i % (D / 4) * 4), spot(p, w, slot, r, c) {}
  };

  // Merges the states of each row, in their order, and puts the result into the
  // output, or into a slot of the partials. `item` is the thread's first.
  __device__ static __forceinline__ void combine(const Params& p, const Crew& crew, const Place& w, const Shared& sh, int rows, int slot, Item item) {
    for (int i = item.i; i < rows * (D / 4); i += crew.threads()) {
      if (i != item.i) item = Item(p, w, slot, i);
      const float4 m = sh.m[item.r], l = sh.l[item.r];
      const float top = fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w));
      const float base = top == -LEAN_INF ? 0.f : top; // no NaN from -Inf - -Inf
      const float f[STATES] = {exp2_(m.x - base), exp2_(m.y - base), exp2_(m.z - base), exp2_(m.w - base)};
      const float sum = f[0] * l.x + f[1] * l.y + f[2] * l.z + f[3] * l.w;
      float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int k = 0; k < STATES; k++) {
        if (k >= sh.warps) break;
        const float4 x = *(const float4*)(sh.o + (k * p.rows + item.r) * WIDTH + item.c);
        o.x += f[k] * x.x, o.y += f[k] * x.y, o.z += f[k] * x.z, o.w += f[k] * x.w;
      }
      if (slot < 0) {
        store(p, item.spot, o, top, sum);
      } else {
        __stcg((float4*)item.spot.to, o);
        if (item.spot.statistics != nullptr) __stcg((float2*)item.spot.statistics, make_float2(top, sum));
      }
    }
  }

  // What of an output tile's partials is task number `task`: those of row r from
  // begin to end, which become state `part` of the row.
  __device__ static __forceinline__ void shareOut(const Params& p, int task, int sharers, int& part, int& r, int& begin, int& end) {
    part = (task >= p.rows) + (task >= 2 * p.rows) + (task >= 3 * p.rows), r = task - part * p.rows;
    const bool some = (part >> p.parts) == 0;
    begin = some ? part * sharers >> p.parts : 0, end = some ? (part + 1) * sharers >> p.parts : 0;
  }

  // Which of all partials' rows row r of number k of an output tile's partials is: the
  // host's own part is its last, everybody else's their first. What reads several of them
  // reads the last one for those that are not there: a load under a condition is a
  // detour for each, and nobody has read this code before.
  static __device__ __forceinline__ int placeOf(const Params& p, int host, int k, int r) { return (2 * (host + k) + (k == 0)) * p.rows + r; }

  // Reads the partials of an output tile's rows as states in shared memory, 2^parts of
  // each: where rows are fewer than warps, several warps share a row's. The
  // other states are empty.
  __device__ static __forceinline__ void gather(const Params& p, const Crew& crew, const Shared& sh, int rows, int host, int sharers) {
    constexpr int EACH = (D / 4 + 31) / 32, BATCH = 16 / EACH; // partials that are on their way together
    const int warp = crew.thread / 32, lane = crew.thread % 32;
    for (int task = warp; task < p.rows * sh.warps; task += crew.warps) {
      int part, r, begin, end;
      shareOut(p, task, sharers, part, r, begin, end);
      if (r >= rows) continue; // the output tile has fewer than others
      float top = -LEAN_INF, l = 0.f;
      float4 o[EACH];
#pragma unroll
      for (int e = 0; e < EACH; e++) o[e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int j = begin; j < end; j += BATCH) {
        const bool mine = j + lane < end && lane < BATCH;
        float2 x = __ldcg((const float2*)statistics(p) + placeOf(p, host, min(j + lane, end - 1), r));
        float4 y[BATCH][EACH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const float* from = p.partials + placeOf(p, host, min(j + b, end - 1), r) * D;
#pragma unroll
          for (int e = 0; e < EACH; e++) {
            const int c = (lane + 32 * e) * 4;
            y[b][e] = __ldcg((const float4*)(from + (c < D ? c : 0)));
          }
        }
        if (!mine) x = make_float2(-LEAN_INF, 0.f);
        float next = fmaxf(top, x.x);
#pragma unroll
        for (int k = 16; k > 0; k /= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, k));
        const float base = next == -LEAN_INF ? 0.f : next, f0 = exp2_(top - base), f = exp2_(x.x - base), fl = f * x.y;
        top = next;
        l *= f0;
#pragma unroll
        for (int e = 0; e < EACH; e++) o[e].x *= f0, o[e].y *= f0, o[e].z *= f0, o[e].w *= f0;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const float g = __shfl_sync(~0u, f, b);
          l += __shfl_sync(~0u, fl, b);
          if (j + b >= end) continue;
#pragma unroll
          for (int e = 0; e < EACH; e++) o[e].x += g * y[b][e].x, o[e].y += g * y[b][e].y, o[e].z += g * y[b][e].z, o[e].w += g * y[b][e].w;
        }
      }
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int c = (lane + 32 * e) * 4;
        if (c < D) *(float4*)(sh.o + (part * p.rows + r) * WIDTH + c) = o[e];
      }
      if (lane == 0) ((float*)(sh.m + r))[part] = top, ((float*)(sh.l + r))[part] = l;
    }
  }

  // The output of an output tile that few thread blocks share: a warp has whole rows,
  // MANY of them and up to FEW partials of each on their way together. Of the m and l of
  // these a lane has one.
  template <int MANY, int FEW> __device__ static __forceinline__ void mergeFew(const Params& p, const Crew& crew, const Place& w, int rows, int host, int sharers) {
    static_assert(FEW == 4 && MANY * FEW <= 32, "");
    constexpr int EACH = (D / 4 + 31) / 32;
    const int lane = crew.thread % 32;
#pragma unroll 1
    for (int r0 = crew.thread / 32; r0 < rows; r0 += crew.warps * MANY) {
      const auto place = [&](int k, int b) { return placeOf(p, host, min(b, sharers - 1), min(r0 + k * crew.warps, rows - 1)); };
      const float2 x = __ldcg((const float2*)statistics(p) + place(lane / FEW, lane % FEW));
      float4 y[MANY][FEW][EACH];
#pragma unroll
      for (int k = 0; k < MANY; k++)
#pragma unroll
        for (int b = 0; b < FEW; b++)
#pragma unroll
          for (int e = 0; e < EACH; e++) y[k][b][e] = __ldcg((const float4*)(p.partials + place(k, b) * D + min((lane + 32 * e) * 4, D - 4)));
      float top = x.x; // those that are not there are the last one's
#pragma unroll
      for (int i = 1; i < FEW; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      const float f = lane % FEW < sharers ? exp2_(x.x - (top == -LEAN_INF ? 0.f : top)) : 0.f;
      float l = lane % FEW < sharers ? f * x.y : 0.f;
#pragma unroll
      for (int i = 1; i < FEW; i *= 2) l += __shfl_xor_sync(~0u, l, i);
#pragma unroll
      for (int k = 0; k < MANY; k++) {
        const float rowTop = __shfl_sync(~0u, top, k * FEW), rowL = __shfl_sync(~0u, l, k * FEW);
        float4 o[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) o[e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int b = 0; b < FEW; b++) {
          const bool there = b < sharers; // nothing jumps over what it loads: the compiler would load it there
          const float g = __shfl_sync(~0u, f, k * FEW + b);
#pragma unroll
          for (int e = 0; e < EACH; e++) {
            const float4 v = y[k][b][e];
            o[e].x += there ? g * v.x : 0.f, o[e].y += there ? g * v.y : 0.f, o[e].z += there ? g * v.z : 0.f, o[e].w += there ? g * v.w : 0.f;
          }
        }
        const int r = r0 + k * crew.warps;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int c = (lane + 32 * e) * 4;
          if (c < D && r < rows) store(p, Spot(p, w, -1, r, c), o[e], rowTop, rowL);
        }
      }
    }
  }

  // Makes the states empty that no warp has.
  __device__ static __forceinline__ void clear(const Shared& sh) {
    for (int k = sh.warps; k < STATES; k++) {
      for (int r = threadIdx.x; r < sh.rooms * ROWS; r += sh.warps * 32) ((float*)(sh.m + r))[k] = -LEAN_INF, ((float*)(sh.l + r))[k] = 0.f;
    }
  }

  // Where a part of an output tile goes: -1 to the output, if it is all of it,
  // else to a slot of the partials. A block leaves at most two partials.
  __device__ static __forceinline__ int slotOf(const Place& w) { return w.take == w.tiles ? -1 : 2 * (int)blockIdx.x + (w.tile == 0); }

  // Counts. It releases what the block has written, and acquires what the others have.
  __device__ static __forceinline__ u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
  }

  // When all of a block's partials are written: tells those that share their
  // output tiles, and merges what is complete. `last` is the last part that the block
  // may share, and the states of `sh` are not needed any more.
  __device__ static __forceinline__ void settle(const Params& p, const Crew& crew, const Work* range, const Place& last, const Shared& sh) {
    const Work work = *range;
    Place w;
    w.begin(p, range);
    const bool head = w.tile > 0, tail = last.tile == 0 && last.take < last.tiles;
    if (!head && !tail) return;
    crew.sync();
    if (crew.thread == 0) {
      u32 before[2] = {0, 0};
      if (head) before[0] = arrive(p.counters + work.host);
      if (tail) before[1] = arrive(p.counters + blockIdx.x);
      const bool complete[2] = {head && before[0] == (u32)work.sharers - 1, tail && before[1] == (u32)work.guests - 1};
      sh.last[0] = complete[0] ? w.rows(p) : 0, sh.last[1] = complete[1] ? last.rows(p) : 0;
      if (complete[0]) p.counters[work.host] = 0;
      if (complete[1]) p.counters[blockIdx.x] = 0;
    }
    crew.sync();
    int host = work.host, sharers = work.sharers;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      constexpr int MANY = FINISHERS == 0 ? 1 : D > 128 ? 2 : 4, FEW = 4; // who computes has operands in registers
      const int rows = sh.last[k];
      if (MANY > 1 && rows > crew.warps && sharers <= FEW) {
        mergeFew<MANY, FEW>(p, crew, w, rows, host, sharers);
      } else if (rows > 0 && sharers <= FEW) {
        mergeFew<1, FEW>(p, crew, w, rows, host, sharers);
      } else if (rows > 0) {
        gather(p, crew, sh, rows, host, sharers);
        crew.sync();
        combine(p, crew, w, sh, rows, -1, Item(p, crew, w, -1, 0));
        crew.sync();
      }
      w = last, host = blockIdx.x, sharers = work.guests;
    }
  }

  // Rows that see no key.
  __device__ static __forceinline__ void writeBlind(const Params& p, int blinds) {
    const int heads = p.heads * p.group;
    for (int b = blockIdx.x; b < blinds; b += gridDim.x) {
      long long row = p.blind[1 + b];
      for (int i = threadIdx.x; i < heads * D; i += p.warps * 32) {
        const long long at = row * p.outRow + i / D * p.outHead + i % D;
        storeAs(p.out, at, p.outType, 0.f);
      }
      if (p.lse != nullptr)
        for (int h = threadIdx.x; h < heads; h += p.warps * 32) p.lse[row * p.lseRow + h * p.lseHead] = -LEAN_INF;
    }
  }
};
