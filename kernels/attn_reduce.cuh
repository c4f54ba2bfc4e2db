// The epilogue of an output tile: the states of a thread block's warps become one,
// and the partials of several blocks become the output.
#pragma once
#include "attn_work.cuh"

// MANY: of kernels for output tiles of more than eight rows. A Shape has MERGE_WARPS, the warps that
// merge output tiles together, and IN_FLIGHT, the partials that a lane has on their way then.
template <class S, bool MANY = false> struct Reduce {
  using Place = typename S::Place;
  enum : int { ROWS = Place::ROWS };
  static constexpr int D = S::D, WIDTH = S::WIDTH;
  static constexpr int STATES = CONSUMER_WARPS;
  static constexpr int FEW = 4; // partials that a warp merges in registers

  // What a thread block keeps in shared memory beside the ring.
  struct Shared {
    int warps, buffers;
    float* o;  // states of a buffer: (warps, rows, WIDTH)
    float4* m; // of each row, one for each state
    float4* l;
    int* last; // of the two output tiles that a block shares: what it does of them; and a Rest
    // The number of part i's buffer, and how often it was used before.
    __device__ __forceinline__ int buffer(int i) const { return buffers > 1 ? i & 1 : 0; }
    __device__ __forceinline__ int round(int i) const { return buffers > 1 ? i >> 1 : i; }
    // That buffer.
    __device__ __forceinline__ Shared of(int i, int rows) const {
      Shared s = *this;
      const int n = buffer(i);
      s.o += n * (warps * rows * WIDTH), s.m += n * ROWS, s.l += n * ROWS;
      return s;
    }
  };

  static __device__ __forceinline__ float* statistics(const Params& p) { return p.partials + (long long)2 * gridDim.x * p.rows * D; }

  // Which output tile it is.
  struct Tile {
    int row, head, block, rows; // row: the first of its sequence
    __device__ __forceinline__ Tile(const Params& p, const Place& w) : row(w.s.row), head(w.head), block(w.block), rows(w.rows(p)) {}
    // The first one of a block.
    __device__ __forceinline__ Tile(const Params& p, const Work* w) : row(w->first.row), head(w->head), block(w->block), rows(min(w->first.queries * p.group - block * ROWS, ROWS)) {}
  };

  // Who has parts of a block's first output tile, and of its last one: from block `host` on
  // so many if the block has not begun it, and guests if the block hosts it. 0: nobody else has.
  // Epilogue warps know that from the beginning: asked for when it is needed, it has
  // everybody wait for the memory.
  struct Shares {
    int host, sharers, guests;
    __device__ __forceinline__ explicit Shares(const Work& w) : host(w.host), sharers(w.tile > 0 ? w.sharers : 0), guests(w.guests) {}
  };

  // Where four elements go, and with a row's first four the row's statistics: into the
  // output, whose statistics are its log-sum-exp, or into a slot of the partials.
  struct Destination {
    char* to;
    float* statistics; // null: none
    // Columns c to c+3 of row r. tagged: the words of partials that are merged together.
    __device__ __forceinline__ Destination(const Params& p, const Tile& tile, int slot, int r, int c, u64* tagged) {
      if (slot < 0) {
        const int i = tile.block * ROWS + r, n = positionOf(p, i), h = tile.head * p.group + i - n * p.group;
        const long long row = tile.row + n;
        to = (char*)p.out + (row * p.outRow + h * p.outHead + c) * bytesOf(p.outType);
        statistics = p.lse != nullptr && c == 0 ? p.lse + row * p.lseRow + h * p.lseHead : nullptr;
      } else {
        const long long at = (long long)slot * p.rows + r;
        u64* const word = tagged + at * (D + 2);
        to = tagged != nullptr ? (char*)(word + c) : (char*)(p.partials + at * D + c);
        statistics = c > 0 ? nullptr : tagged != nullptr ? (float*)(word + D) : Reduce::statistics(p) + at * 2;
      }
    }
  };

  // Some pairs of columns, from there on.
  template <int PAIRS> __device__ static __forceinline__ void store(const Params& p, const Destination& destination, const float2 (&o)[PAIRS], float m, float l) {
    const float f = __fdividef(1.f, l);
    float2 v[PAIRS] = {}; // not 0 times what other rows' NaN have made
    if (l != 0.f)
#pragma unroll
      for (int k = 0; k < PAIRS; k++) v[k] = make_float2(o[k].x * f, o[k].y * f);
    withStore(p.outType, [&](auto s) {
#pragma unroll
      for (int k = 0; k < PAIRS; k++) decltype(s)::store2(destination.to, 2 * k, v[k]);
    });
    if (destination.statistics != nullptr) *destination.statistics = l == 0.f ? -LEAN_INF : logSum(m, log2_(l) - S::Math::lift);
  }
  __device__ static __forceinline__ void store(const Params& p, const Destination& destination, float4 o, float m, float l) { store(p, destination, {make_float2(o.x, o.y), make_float2(o.z, o.w)}, m, l); }

  // What a thread combines next: four columns of a row. Finding out where they go takes
  // longer than combining them, so whoever waits for the states does that before.
  struct Item {
    int i, r, c;
    Destination destination;
    // The first of a thread: the warps take turns where there is work for few of them.
    __device__ __forceinline__ Item(const Params& p, const ThreadGroup& workers, const Tile& tile, int slot, int turn, u64* tagged) : Item(p, tile, slot, (workers.thread + turn * 32) % workers.threads(), tagged) {}
    __device__ __forceinline__ Item(const Params& p, const Tile& tile, int slot, int i, u64* tagged) : i(i), r(i / (D / 4)), c(i % (D / 4) * 4), destination(p, tile, slot, r, c, tagged) {}
  };

  // Four columns of row r, from c on, of a partial whose words are tagged: the states of a
  // buffer, of `warps` warps and so many rows each, merged as combine does it.
  struct Columns {
    float4 o;
    float m, l;
    __device__ __forceinline__ Columns(const Shared& sh, int buffer, int warps, int rows, int r, int c) {
      const float4 m4 = sh.m[buffer * ROWS + r], l4 = sh.l[buffer * ROWS + r];
      float4 x[STATES];
#pragma unroll
      for (int k = 0; k < STATES; k++) x[k] = *(const float4*)(sh.o + ((buffer * warps + min(k, warps - 1)) * rows + r) * WIDTH + c);
      mergeStates(m4, l4, x, m, l, o);
    }
    // statistics: null where they are somebody else's.
    __device__ __forceinline__ void tell(u64* to, float* statistics, u32 run) const {
      storeTagged2(to, run, o.x, o.y), storeTagged2(to + 2, run, o.z, o.w);
      if (statistics != nullptr) storeTagged2((u64*)statistics, run, m, l);
    }
  };

  // Where epilogue warps have whole rows of a partial that blocks merge together: rows r,
  // r + step, ... before `end`; those of row 0 go to `tagged`. Two rows at a time: one takes some
  // 100 instructions, most of them one behind the other, and finding out where the next one
  // goes took as many again. A kernel of its own, since launches of few rows and a few us take
  // up to 4% longer with it.
  static_assert(!MANY || EPILOGUE_WARPS > 0 && D == 128 && S::Store::bytes == 2, "a warp has a row of 32 times four columns; others were not measured");
  __device__ static __forceinline__ void combineRows(const Shared& sh, int buffer, int warps, int rows, u64* tagged, u32 run, int r, int step, int end, int c) {
#pragma unroll 1
    for (; r < end; r += 2 * step) {
      const int next = min(r + step, end - 1);
      const Columns a(sh, buffer, warps, rows, r, c), b(sh, buffer, warps, rows, next, c);
      u64 *const to = tagged + r * (D + 2), *const then = tagged + next * (D + 2);
      a.tell(to + c, c == 0 ? (float*)(to + D) : nullptr, run);
      if (r + step < end) b.tell(then + c, c == 0 ? (float*)(then + D) : nullptr, run);
    }
  }

  // Merges the states of each of the first `rows` rows, and puts the result into the
  // output, or into a slot of the partials. `item` is the thread's first. tagged: words with
  // run: of partials that are merged together; null: of others.
  __device__ static __forceinline__ void combine(const Params& p, const ThreadGroup& workers, const Tile& tile, const Shared& sh, int slot, Item item, u64* tagged, u32 run, int rows) {
    if (MANY && tagged != nullptr && slot >= 0 && rows > workers.warps) {
      combineRows(sh, 0, sh.warps, p.rows, tagged + (long long)slot * p.rows * (D + 2), run, item.r, workers.warps, rows, item.c);
      return;
    }
    for (int i = item.i; i < rows * (D / 4); i += workers.threads()) {
      if (i != item.i) item = Item(p, tile, slot, i, tagged);
      const float4 m = sh.m[item.r], l = sh.l[item.r];
      // All states are on their way together. One that no warp has is read as the last one,
      // and weighs nothing; where there are epilogue warps there are all of them.
      float4 x[STATES];
#pragma unroll
      for (int k = 0; k < STATES; k++) {
        x[k] = *(const float4*)(sh.o + (min(k, sh.warps - 1) * p.rows + item.r) * WIDTH + item.c);
        if (EPILOGUE_WARPS == 0 && k >= sh.warps) x[k] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
      float top, sum;
      float4 o;
      mergeStates(m, l, x, top, sum, o);
      if (slot < 0) {
        store(p, item.destination, o, top, sum);
      } else if (tagged != nullptr) {
        u64* const to = (u64*)item.destination.to;
        storeTagged2(to, run, o.x, o.y), storeTagged2(to + 2, run, o.z, o.w);
        if (item.destination.statistics != nullptr) storeTagged2((u64*)item.destination.statistics, run, top, sum);
      } else {
        __stcg((float4*)item.destination.to, o);
        if (item.destination.statistics != nullptr) __stcg((float2*)item.destination.statistics, make_float2(top, sum));
      }
    }
  }

  // What of a block's last partial is left to the consumer warps, which have nothing else
  // to do then: its rows from HELPED on, if blocks merge them together.
  // Epilogue warps say so, and which states and words these are: consumers would have to
  // keep it in registers all the time.
  enum : int { HELPED = 8, LEFT_OVER = 8 }; // rows, and the named barrier behind which it is known
  struct Rest {
    int which; // slot, rows, buffer, parity of the buffer's barrier; 0: nothing
    u32 run;
    __device__ __forceinline__ int parity() const { return which & 1; }
    __device__ __forceinline__ int buffer() const { return which >> 1 & 1; }
    __device__ __forceinline__ int rows() const { return which >> 2 & 31; }
    __device__ __forceinline__ int slot() const { return which >> 7; }
  };
  static __device__ __forceinline__ void leaveRest(const Params& p, const ThreadGroup& workers, const Shared& sh, bool some, int slot, int rows, int part, u32 run) {
    if (workers.thread == 0) *(Rest*)(sh.last + 2) = Rest{some ? slot << 7 | rows << 2 | sh.buffer(part) << 1 | (sh.round(part) & 1) : 0, run};
    __syncwarp();
    ThreadGroup{0, workers.warps + p.warps, LEFT_OVER}.arrive();
  }
#if __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ void combineRest(const Params& p, const Shared& sh, u64* tagged, u64* bufferBars) {
    int rows = p.rows, warps = p.warps;
    ThreadGroup{0, EPILOGUE_WARPS + warps, LEFT_OVER}.sync();
    const Rest rest = *(const Rest*)(sh.last + 2);
    if (rest.which == 0) return;
    barrierWait(sharedAddress(bufferBars) + rest.buffer() * 8, rest.parity());
    __syncwarp();
    // Else the compiler finds places out at the beginning, for epilogue warps too, and
    // then has no registers but uniform ones for the walk: up to 3% slower, whoever helps.
    asm volatile("" : "+r"(rows), "+r"(warps));
    combineRows(sh, rest.buffer(), warps, rows, tagged + (long long)rest.slot() * rows * (D + 2), rest.run, HELPED + (int)threadIdx.x / 32, warps, rest.rows(), threadIdx.x % 32 * 4);
  }
#endif

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
  __device__ static __forceinline__ void gather(const Params& p, const ThreadGroup& workers, const Shared& sh, int rows, int host, int sharers) {
    constexpr int EACH = (D / 4 + 31) / 32, BATCH = (EPILOGUE_WARPS > 0 ? 8 : 16) / EACH; // partials that are on their way together: epilogue warps have registers for so many
    const int warp = workers.thread / 32, lane = workers.thread % 32;
    for (int task = warp; task < p.rows * sh.warps; task += workers.warps) {
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
        const Merge merge(next);
        const float f0 = merge.weight(top), f = merge.weight(x.x), fl = f * x.y;
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

  // The output of an output tile that few thread blocks share: a warp has whole rows, and
  // all partials of one on their way together. Of their m and l a lane has one.
  static __device__ __forceinline__ void mergeFew(const Params& p, const ThreadGroup& workers, const Tile& tile, int host, int sharers) {
    constexpr int EACH = (D / 4 + 31) / 32;
    const int lane = workers.thread % 32;
#pragma unroll 1
    for (int r = workers.thread / 32; r < tile.rows; r += workers.warps) {
      const auto place = [&](int b) { return placeOf(p, host, min(b, sharers - 1), r); };
      const float2 x = __ldcg((const float2*)statistics(p) + place(lane % FEW));
      float4 y[FEW][EACH];
#pragma unroll
      for (int b = 0; b < FEW; b++)
#pragma unroll
        for (int e = 0; e < EACH; e++) y[b][e] = __ldcg((const float4*)(p.partials + place(b) * D + min((lane + 32 * e) * 4, D - 4)));
      float top = x.x; // those that are not there are the last one's
#pragma unroll
      for (int i = 1; i < FEW; i *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
      const float f = lane % FEW < sharers ? Merge(top).weight(x.x) : 0.f;
      float l = lane % FEW < sharers ? f * x.y : 0.f;
#pragma unroll
      for (int i = 1; i < FEW; i *= 2) l += __shfl_xor_sync(~0u, l, i);
      float4 o[EACH];
#pragma unroll
      for (int e = 0; e < EACH; e++) o[e] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int b = 0; b < FEW; b++) {
        const bool there = b < sharers; // nothing jumps over what it loads: the compiler would load it there
        const float g = __shfl_sync(~0u, f, b);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          const float4 v = y[b][e];
          o[e].x += there ? g * v.x : 0.f, o[e].y += there ? g * v.y : 0.f, o[e].z += there ? g * v.z : 0.f, o[e].w += there ? g * v.w : 0.f;
        }
      }
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const int c = (lane + 32 * e) * 4;
        if (c < D) store(p, Destination(p, tile, -1, r, c, nullptr), o[e], top, l);
      }
    }
  }

  // Makes the states empty that no warp has.
  __device__ static __forceinline__ void clear(const Shared& sh) {
    for (int k = sh.warps; k < STATES; k++) {
      for (int r = threadIdx.x; r < sh.buffers * ROWS; r += sh.warps * 32) ((float*)(sh.m + r))[k] = -LEAN_INF, ((float*)(sh.l + r))[k] = 0.f;
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

  // Counts in both output tiles that a block may share. sh.last says then which of them are complete. False: it shares none.
  static __device__ __forceinline__ bool arriveAll(const Params& p, const ThreadGroup& workers, const Shares& shares, const Shared& sh) {
    const int host = shares.host, sharers = shares.sharers, guests = shares.guests;
    if (sharers == 0 && guests == 0) return false;
    workers.sync();
    if (workers.thread == 0) {
      u32 before[2] = {0, 0};
      if (sharers > 0) before[0] = arrive(p.counters + host);
      if (guests > 0) before[1] = arrive(p.counters + blockIdx.x);
      const bool complete[2] = {sharers > 0 && before[0] == (u32)sharers - 1, guests > 0 && before[1] == (u32)guests - 1};
      sh.last[0] = complete[0], sh.last[1] = complete[1];
      if (complete[0]) p.counters[host] = 0;
      if (complete[1]) p.counters[blockIdx.x] = 0;
    }
    workers.sync();
    return true;
  }

  // When all of a block's partials are written: tells those that share their
  // output tiles, and merges what is complete. tile and last are the output tiles of the
  // first part and the last one that the block may share, and the states of `sh` are not
  // needed any more.
  __device__ static __forceinline__ void settle(const Params& p, const ThreadGroup& workers, const Shares& shares, Tile tile, const Tile& last, const Shared& sh) {
    int host = shares.host, sharers = shares.sharers;
    const int guests = shares.guests;
    if (!arriveAll(p, workers, shares, sh)) return;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      const bool complete = sh.last[k];
      if (complete && sharers <= FEW) {
        mergeFew(p, workers, tile, host, sharers);
      } else if (complete) {
        gather(p, workers, sh, tile.rows, host, sharers);
        workers.sync();
        combine(p, workers, tile, sh, -1, Item(p, workers, tile, -1, 0, nullptr), nullptr, 0, tile.rows);
        workers.sync();
      }
      tile = last, host = blockIdx.x, sharers = guests;
    }
  }

  // An attention state of a row, of which a lane has two columns.
  struct Row {
    float m, l;
    float2 o;
    __device__ __forceinline__ void merge(float m2, float l2, float2 o2) {
      const float top = fmaxf(m, m2);
      const Merge both(top);
      const float f = both.weight(m), f2 = both.weight(m2);
      m = top, l = l * f + l2 * f2, o.x = o.x * f + o2.x * f2, o.y = o.y * f + o2.y * f2;
    }
    // Merges states number k, k + apart, ... of `count`, up to EACH of them, when they
    // have come. All are on their way together: what is not there is read as the last one,
    // and not used. at(i) is where the words of state i are, D and then m and l; c is the
    // lane's first column.
    template <int EACH, class At> __device__ __forceinline__ void gather(u32 run, int k, int apart, int count, int c, At at) {
      float m2[EACH], l2[EACH];
      float2 o2[EACH];
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
          const u64* const tagged = at(min(k + i * apart, count - 1));
          missing |= !loadTagged2(tagged + D, run, m2[i], l2[i]);
          missing |= !loadTagged2(tagged + c, run, o2[i].x, o2[i].y);
        }
      } while (__any_sync(~0u, missing));
      float top = m;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (k + i * apart >= count) m2[i] = -LEAN_INF, l2[i] = 0.f, o2[i] = make_float2(0.f, 0.f);
        top = fmaxf(top, m2[i]);
      }
      merge(top, 0.f, make_float2(0.f, 0.f));
      const Merge all(top);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const float f = all.weight(m2[i]);
        l += f * l2[i], o.x += f * o2[i].x, o.y += f * o2[i].y;
      }
    }
    // Merges what another lane has of the same columns.
    __device__ __forceinline__ void mergeLane(int other) { merge(__shfl_xor_sync(~0u, m, other), __shfl_xor_sync(~0u, l, other), make_float2(__shfl_xor_sync(~0u, o.x, other), __shfl_xor_sync(~0u, o.y, other))); }
  };

  // What a block does of an output tile that it shares. From LOOKS on it is not known yet:
  // who has begun says the first or the second of two counts.
  enum : int { NOTHING_OF_IT, ITS_PART, ALL_OF_IT, LOOKS };
  static constexpr u32 LEFT = 1 << 16; // in a count of who has begun: somebody has left

  // The blocks that share an output tile may merge it together, each some columns of some
  // rows, as soon as what the others have of these is there: partials are LL protocol words,
  // and nobody counts. That takes less than half of the time that a last one to arrive
  // needs, which has to know that it is the last one, and then has to do everything.
  // Waiting is safe if all of them have begun. So everybody says that it has; who has
  // looked for the others long enough leaves its part to the last one to begin, which
  // knows of it then, since both are said in one word.
  //
  // The number of this launch among those of a plan whose blocks merge together, by which
  // words are known. Every block counts by itself. It is even and odd in turn, like the
  // two counts of who has begun, of which each launch puts the other one's back. The last
  // number of all is greater than that of no launch, which is greater than the others.
  static constexpr u32 LAST_RUN = 0xffffffff, NO_RUN = 0xfffffffe;
  __device__ static __forceinline__ u32 nextRun(const MeetParams& m) {
    const u32 before = *(volatile u32*)(m.runs + blockIdx.x);
    return before == LAST_RUN ? 2 : before == NO_RUN - 2 ? LAST_RUN : before + 1;
  }
  // Of the blocks' threads, those of one warp do this.
  __device__ static __forceinline__ void count(const MeetParams& m, u32 run) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      m.runs[blockIdx.x] = run;
      m.runs[gridDim.x * (2 - (run & 1)) + blockIdx.x] = 0;
    }
    if (run < LAST_RUN) return;
    // Numbers come again: no word may be as old as that. This launch's stay.
    for (int i = blockIdx.x * 32 + lane; i < m.count; i += gridDim.x * 32) atomicMax(m.tagged + i, (u64)NO_RUN << 32);
  }

  // Says that this block has begun, and finds out what it does of each of the two output
  // tiles that it may share, or leaves that to a producer warp (look). Returns what the
  // words of this launch are tagged with.
  __device__ static __forceinline__ u32 begin(const MeetParams& m, const ThreadGroup& workers, const Shares& shares, const Shared& sh) {
    const u32 run = nextRun(m);
    workers.sync();
    if (workers.thread / 32 > 0) return run;
    count(m, run);
    if (workers.thread == 0) {
      u32* const begun = m.runs + gridDim.x * (1 + (run & 1));
      const u32 sharers = shares.sharers, guests = shares.guests;
      u32 before[2] = {0, 0};
      if (sharers > 0) before[0] = atomicAdd(begun + shares.host, 1);
      if (guests > 0) before[1] = atomicAdd(begun + blockIdx.x, 1);
      const auto doesOf = [&](u32 all, u32 before) -> int {
        if (all == 0) return NOTHING_OF_IT;
        if ((before + 1) % LEFT < all) return LOOKS + (run & 1);
        return before < LEFT ? ITS_PART : ALL_OF_IT; // the last one to begin
      };
      sh.last[0] = doesOf(sharers, before[0]), sh.last[1] = doesOf(guests, before[1]);
    }
    __syncwarp();
    LOOKING.arrive();
    return run;
  }

  // A producer warp looks whether all have begun, when it has nothing to do any more, so that
  // epilogue warps have the answer when they need it. One of them tells it of what, and all
  // of them wait for it.
  static constexpr ThreadGroup LOOKING{0, 2, 6}, LOOKED{0, S::MERGE_WARPS + 1, 7};
  __device__ static __forceinline__ void look(const MeetParams& m, const Shares& shares, const Shared& sh, int lane) {
    constexpr int MOST = 64;
    LOOKING.sync();
    if (lane == 0) {
#pragma unroll 1
      for (int k = 0; k < 2; k++) {
        const int does = sh.last[k];
        if (does < LOOKS) continue;
        u32* const word = m.runs + gridDim.x * (1 + does - LOOKS) + (k == 0 ? shares.host : (int)blockIdx.x);
        const u32 all = k == 0 ? shares.sharers : shares.guests;
        u32 now = 0;
#pragma unroll 1
        for (int i = 0; i < MOST && now % LEFT < all; i++) now = *(volatile u32*)word;
        if (now % LEFT < all) now = atomicAdd(word, LEFT);
        sh.last[k] = now % LEFT < all ? NOTHING_OF_IT : ITS_PART;
      }
    }
    __syncwarp();
    LOOKED.arrive();
  }

  // The same of a block that shares nothing: its launches count like those of the others.
  __device__ static __forceinline__ void pass(const MeetParams& m) {
    const u32 run = nextRun(m);
    __syncwarp();
    count(m, run);
  }

  // When all of a block's partials are written: merges what begin has found out. tile and
  // last are the output tiles of the first part and the last one that the block may share.
  __device__ static __forceinline__ void mergeTogether(const Params& p, const u64* tagged, const ThreadGroup& workers, const Shares& shares, Tile tile, const Tile& last, const Shared& sh, u32 run) {
    LOOKED.sync();
    int host = shares.host, sharers = shares.sharers;
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      const int does = sh.last[k];
      if (does != NOTHING_OF_IT) {
        const int from = (does == ALL_OF_IT ? 0 : (int)blockIdx.x - host) * workers.warps + workers.thread / 32, step = (does == ALL_OF_IT ? 1 : sharers) * workers.warps;
        mergeColumns(p, tagged, tile, run, host, sharers, from, step);
      }
      tile = last, host = blockIdx.x, sharers = shares.guests;
    }
  }

  // Merges every so many of the pieces of an output tile. A piece is some columns of a row,
  // two for each of the lanes side by side, so many that the other lanes, which share out
  // the partials, have IN_FLIGHT of them each: all are on their way together.
  static __device__ __forceinline__ void mergeColumns(const Params& p, const u64* tagged, const Tile& tile, u32 run, int host, int sharers, int from, int step) {
    constexpr int EACH = S::IN_FLIGHT, PAIRS = D / 2;
    const int log = max(5 - (32 - __clz((sharers - 1) / EACH)), 0), side = 1 << log, apart = 32 >> log;
    const int lane = threadIdx.x % 32, first = lane >> log, perRow = (PAIRS + side - 1) >> log, pieces = tile.rows * perRow;
    const float perPiece = __fdividef(1.f, (float)perRow);
#pragma unroll 1
    for (int piece = from; piece < pieces; piece += step) {
      const int r = (int)(((float)piece + 0.5f) * perPiece), pair = ((piece - r * perRow) << log) + (lane & (side - 1)), c = min(pair, PAIRS - 1) * 2;
      const Destination destination(p, tile, -1, r, c, nullptr);
      Row row = {-LEAN_INF, 0.f, {0.f, 0.f}};
#pragma unroll 1
      for (int k = first; k - first < sharers; k += EACH * apart)
        row.template gather<EACH>(run, k, apart, sharers, c, [&](int i) { return tagged + (long long)placeOf(p, host, i, r) * (D + 2); });
#pragma unroll 1
      for (int i = side; i < 32; i *= 2) row.mergeLane(i);
      if (first == 0 && pair < PAIRS) store(p, destination, {row.o}, row.m, row.l);
    }
  }

  // Fully masked rows. sink: as writeFullyMasked has it.
  template <class... Sink> __device__ static __forceinline__ void writeFullyMasked(const Params& p, int masked, const Sink&... sink) {
    ::writeFullyMasked(p, masked, D, p.lse, threadIdx.x, p.warps * 32, [&](long long at) { storeAs(p.out, at, p.outType, 0.f); }, sink...);
  }
};
