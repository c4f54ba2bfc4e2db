// What the GPUs of a group sum, gather and merge, within kernels that run on all of them at the same
// time. Each has memory that the others write to:
//
//	ExchangeState, flags [stage][member][block], inboxes [parity of the round][member][word]
//
// Few elements travel as words of a float and the round's number (the tag) into the inboxes: who
// reads a word knows by the tag whether the float is there. Many are read from where they lie and
// written to where they belong, between flags of each block: one that says that the kernel has
// begun, and one that all has been written.
//
// Two inboxes, in turn, are enough. A GPU stores words of round r+2 when it has ended round r+1,
// for which it needed words or flags of r+1 of every other; who had sent those had ended round r, and with
// it had read its inbox of r, which is that of r+2. So each round is one in which all hear of all.
#pragma once
#include "attn_state.cuh"
#include "exchange_group.cuh"

struct AllReduceParams {
  ExchangeGroup group;
  const float* x[EXCHANGE_MEMBERS]; // of each member, in its memory
  float* y[EXCHANGE_MEMBERS];
  const float *bias, *residual;     // of this one; may be null
  long long count;                  // elements that a member gets
  int n;                            // of a row of x
  int own;                          // of a row of y, if each member gets columns of its own, a multiple of four
};

constexpr int EXCHANGE_LISTS = 3; // gathered by one launch, at most
static_assert(EXCHANGE_MEMBERS + 1 == 9, "members of GatherList");
struct GatherList {
  const float* x;              // of this member: rows of its columns
  float* y[EXCHANGE_MEMBERS];  // of all columns; null where nobody wants them
  int first[9];                // columns of each member, and behind the last one
  int fours;                   // of the lists before it
};
struct AllGatherParams {
  ExchangeGroup group;
  GatherList list[EXCHANGE_LISTS];
  int lists, rows, onlyFirst; // onlyFirst: they are for member 0 alone
};

// States of attention to parts of the keys, normalised: an output and a log-sum-exp of each row and head. Members are in groups of
// `places`: each group has some heads, in order and evenly, and a member the states of these for its part.
struct MergeStatesParams {
  ExchangeGroup group;
  const float *out[EXCHANGE_MEMBERS], *lse[EXCHANGE_MEMBERS]; // of each member, in its memory: of all rows and heads, those of its group filled in
  const float *ownOut, *ownLse;  // of one more part, which all members have; may be null
  void* y;                       // of this one: rows of all heads
  float* yLse;                   // may be null
  int rows, heads, dim, kind, places;
  int own; // heads of y, if each member gets its heads alone: then there is one group; 0: y has all
};

// The words of four floats of a member.
struct TaggedFloats {
  u64 w[4];
  __device__ __forceinline__ void load(const ExchangeGroup& g, const u64* at) { // of the first two
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1}, [%2];" : "=l"(w[0]), "=l"(w[1]) : "l"(at) : "memory");
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1}, [%2];" : "=l"(w[2]), "=l"(w[3]) : "l"(at + g.capacity / 2) : "memory");
  }
  __device__ __forceinline__ bool there(u32 tag) const {
    return (u32)(w[0] >> 32) == tag && (u32)(w[1] >> 32) == tag && (u32)(w[2] >> 32) == tag && (u32)(w[3] >> 32) == tag;
  }
  __device__ __forceinline__ float4 floats() const {
    return make_float4(__uint_as_float((u32)w[0]), __uint_as_float((u32)w[1]), __uint_as_float((u32)w[2]), __uint_as_float((u32)w[3]));
  }
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Elements 4 i, ... of some, of which the last ones may be missing.
__device__ __forceinline__ float4 loadFour(const float* from, long long i, long long count) {
  const long long at = 4 * i;
  if (at + 4 <= count) return *(const float4*)(from + at);
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (at < count) v.x = from[at];
  if (at + 1 < count) v.y = from[at + 1];
  if (at + 2 < count) v.z = from[at + 2];
  return v;
}
__device__ __forceinline__ void storeFour(float* to, long long i, long long count, float4 v) {
  const long long at = 4 * i;
  if (at + 4 <= count) {
    *(float4*)(to + at) = v;
    return;
  }
  if (at < count) to[at] = v.x;
  if (at + 1 < count) to[at + 1] = v.y;
  if (at + 2 < count) to[at + 2] = v.z;
}

__device__ __forceinline__ long long remainder(long long a, int n) { return a >> 32 == 0 ? (long long)((u32)a % (u32)n) : a % n; }

// What is added to the sum of elements 4 i, ...
struct Addends {
  float4 bias, residual;
  __device__ __forceinline__ void load(const AllReduceParams& p, long long i) {
    bias = residual = make_float4(0.f, 0.f, 0.f, 0.f);
    if (p.residual != nullptr) residual = loadFour(p.residual, i, p.count);
    if (p.bias == nullptr) return;
    if (p.n % 4 == 0) {
      bias = *(const float4*)(p.bias + remainder(4 * i, p.n));
      return;
    }
    bias.x = p.bias[remainder(4 * i, p.n)]; // also of elements that are missing: n is a row's
    bias.y = p.bias[remainder(4 * i + 1, p.n)];
    bias.z = p.bias[remainder(4 * i + 2, p.n)];
    bias.w = p.bias[remainder(4 * i + 3, p.n)];
  }
  __device__ __forceinline__ float4 to(const AllReduceParams& p, float4 sum) const {
    if (p.bias != nullptr) sum = sum + bias;
    if (p.residual != nullptr) sum = sum + residual;
    return sum;
  }
};

// With SCATTER: four columns, number i of the columns that a member gets.
__device__ __forceinline__ float4 fourOf(const AllReduceParams& p, const float* x, int member, long long i) {
  const long long at = 4 * i, column = remainder(at, p.own);
  return *(const float4*)(x + (at - column) / p.own * p.n + (long long)member * p.own + column);
}

// What each of them begins with: nothing is read or written before.
__device__ __forceinline__ void beginExchange() {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
}

// y = x_0 + x_1 + ... + bias + residual, in this order, of few elements: each member sends its own to all
// others, and adds up all. SCATTER: each member gets the sum of its columns alone, without bias and residual.
template <bool SCATTER>
__device__ __forceinline__ void allReduceFew(const AllReduceParams& p) {
  beginExchange();
  const ExchangeGroup& g = p.group;
  Exchange round(g);
  const long long fours = (p.count + 3) / 4, first = (long long)blockIdx.x * EXCHANGE_THREADS + threadIdx.x, step = (long long)gridDim.x * EXCHANGE_THREADS;
  const float* x = p.x[g.me];
#pragma unroll 1
  for (long long i = first; i < fours; i += step) {
    float4 v;
    if (!SCATTER) v = loadFour(x, i, p.count);
#pragma unroll
    for (int m = 0; m < EXCHANGE_MEMBERS; m++)
      if (m < g.members && m != g.me && !round.failed) {
        if (SCATTER) v = fourOf(p, x, m, i);
        round.send(m, i, v);
      }
  }
  round.begun();
#pragma unroll 1
  for (long long i = first; i < fours; i += step) {
    const float4 own = SCATTER ? fourOf(p, x, g.me, i) : loadFour(x, i, p.count); // y may be x: it is written below
    Addends addends;
    if (!SCATTER) addends.load(p, i);
    TaggedFloats words[EXCHANGE_MEMBERS];
    const u64* inbox = round.words(g.me, 0, 2 * i);
    int missing;
    do { // all are asked for at the same time
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m < g.members && m != g.me) words[m].load(g, inbox + m * g.capacity);
      missing = -1;
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m < g.members && m != g.me && !words[m].there(round.tag)) missing = m;
    } while (missing >= 0 && round.more(missing));
    float4 sum;
#pragma unroll
    for (int m = 0; m < EXCHANGE_MEMBERS; m++) {
      if (m >= g.members) break;
      const float4 v = m == g.me ? own : words[m].floats();
      sum = m == 0 ? v : sum + v;
    }
    storeFour(p.y[g.me], i, p.count, SCATTER ? sum : addends.to(p, sum));
  }
}

// The same of many: member i adds up slice i, and writes it for all.
template <bool SCATTER>
__device__ __forceinline__ void allReduceMany(const AllReduceParams& p) {
  __shared__ int lost;
  if (threadIdx.x == 0) lost = 0;
  beginExchange();
  const ExchangeGroup& g = p.group;
  Exchange round(g);
  round.tell(0); // x is there, since what made it is ahead of the kernel, and y may be written
  round.begun();
  if (!round.await(0, lost)) return;
  constexpr int EACH = 2;
  const long long fours = (p.count + 3) / 4, step = (long long)gridDim.x * EXCHANGE_THREADS;
  const long long begin = SCATTER ? 0 : fours * g.me / g.members, end = SCATTER ? fours : fours * (g.me + 1) / g.members;
#pragma unroll 1
  for (long long i = begin + (long long)blockIdx.x * EXCHANGE_THREADS + threadIdx.x; i < end; i += EACH * step) {
    float4 v[EACH][EXCHANGE_MEMBERS]; // all are asked for at the same time
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m < g.members && i + j * step < end) v[j][m] = SCATTER ? fourOf(p, p.x[m], g.me, i + j * step) : loadFour(p.x[m], i + j * step, p.count);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const long long at = i + j * step;
      if (at >= end) break;
      Addends addends;
      if (!SCATTER) addends.load(p, at);
      float4 sum = v[j][0];
#pragma unroll
      for (int m = 1; m < EXCHANGE_MEMBERS; m++)
        if (m < g.members) sum = sum + v[j][m];
      if (SCATTER) {
        storeFour(p.y[g.me], at, p.count, sum);
        continue;
      }
      const float4 y = addends.to(p, sum);
      for (int m = 0; m < g.members; m++) storeFour(p.y[m], at, p.count, y);
    }
  }
  round.tell(1);
  round.await(1, lost);
}

// Elements 4 i, ... of a member's columns, at their place among all.
__device__ __forceinline__ void placeFour(const AllGatherParams& p, const GatherList& list, float* y, int of, long long i, float4 v) {
  const int begin = list.first[of], n = list.first[of + 1] - begin, all = list.first[p.group.members];
  const long long count = (long long)p.rows * n, at = 4 * i;
  if ((n | begin | all) % 4 == 0) {
    const long long column = remainder(at, n);
    *(float4*)(y + (at - column) / n * all + begin + column) = v;
    return;
  }
  const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (at + j >= count) break;
    const long long column = remainder(at + j, n);
    y[(at + j - column) / n * all + begin + column] = x[j];
  }
}

// y is the columns of all members side by side, of few elements.
__device__ __forceinline__ void allGatherFew(const AllGatherParams& p) {
  beginExchange();
  const ExchangeGroup& g = p.group;
  Exchange round(g);
  const long long first = (long long)blockIdx.x * EXCHANGE_THREADS + threadIdx.x, step = (long long)gridDim.x * EXCHANGE_THREADS;
  const bool wanted = !p.onlyFirst || g.me == 0;
  // Fours are counted through all lists, and through all members: a thread has as few of them as may be, and waits as rarely.
  long long i = first;
  for (int l = 0; l < p.lists; l++) {
    const GatherList& list = p.list[l];
    const long long mine = (long long)p.rows * (list.first[g.me + 1] - list.first[g.me]), fours = (mine + 3) / 4;
#pragma unroll 1
    for (; i < fours; i += step) {
      const float4 v = loadFour(list.x, i, mine);
      for (int m = 0; m < (p.onlyFirst ? 1 : g.members); m++)
        if (m != g.me && !round.failed) round.send(m, list.fours + i, v);
      if (wanted) placeFour(p, list, list.y[g.me], g.me, i, v);
    }
    i -= fours;
  }
  // Those who get nothing send words to each other nevertheless, and get some of the first one: nobody may
  // end a round that not all have begun.
  const int other = (int)threadIdx.x;
  const bool tokens = blockIdx.x == 0 && p.onlyFirst && other < g.members && other != g.me;
  if (tokens && other > 0 && !round.failed) round.send(other, 0, make_float4(0.f, 0.f, 0.f, 0.f));
  round.begun();
  if (!wanted) {
    TaggedFloats words;
    if (tokens)
      do words.load(g, round.words(g.me, other, 0));
      while (!words.there(round.tag) && round.more(other));
    return;
  }
  i = first;
  for (int l = 0; l < p.lists; l++) {
    const GatherList& list = p.list[l];
    for (int m = 0; m < g.members; m++) {
      if (m == g.me) continue;
      const long long fours = ((long long)p.rows * (list.first[m + 1] - list.first[m]) + 3) / 4;
#pragma unroll 1
      for (; i < fours; i += step) {
        TaggedFloats words;
        do words.load(g, round.words(g.me, m, 2 * (list.fours + i)));
        while (!words.there(round.tag) && round.more(m));
        placeFour(p, list, list.y[g.me], m, i, words.floats());
      }
      i -= fours;
    }
  }
}

// The same of many: each member writes its columns for all.
__device__ __forceinline__ void allGatherMany(const AllGatherParams& p) {
  __shared__ int lost;
  if (threadIdx.x == 0) lost = 0;
  beginExchange();
  const ExchangeGroup& g = p.group;
  Exchange round(g);
  round.tell(0); // y may be written
  round.begun();
  if (!round.await(0, lost)) return;
  const long long first = (long long)blockIdx.x * EXCHANGE_THREADS + threadIdx.x, step = (long long)gridDim.x * EXCHANGE_THREADS;
  for (int l = 0; l < p.lists; l++) {
    const GatherList& list = p.list[l];
    const long long mine = (long long)p.rows * (list.first[g.me + 1] - list.first[g.me]);
#pragma unroll 1
    for (long long i = first; 4 * i < mine; i += step) {
      const float4 v = loadFour(list.x, i, mine);
      for (int m = 0; m < (p.onlyFirst ? 1 : g.members); m++) placeFour(p, list, list.y[m], g.me, i, v);
    }
  }
  round.tell(1);
  round.await(1, lost);
}

// The states that merge to four columns of a row and head: of each member, and the one that all have. Who has none of it has a
// log-sum-exp of -Inf and zeros.
template <int MEMBERS>
struct StatesOfFour {
  static constexpr int ALL = MEMBERS + 1;
  float lse[ALL];
  float4 out[ALL];

  __device__ __forceinline__ StatesOfFour() {
#pragma unroll
    for (int m = 0; m < ALL; m++) lse[m] = -LEAN_INF, out[m] = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  //	LSE = ln sum e^LSE_i,   O = sum e^(LSE_i - LSE) O_i
  //
  // in the order of the members, with what all have last. All members compute it alike.
  __device__ __forceinline__ void merge(const MergeStatesParams& p, int at, int column) const {
    constexpr float LOG2E = 1.4426950408889634f;
    float top = lse[0];
#pragma unroll
    for (int m = 1; m < ALL; m++) top = fmaxf(top, lse[m]);
    const float base = top == -LEAN_INF ? 0.f : top;
    float sum = 0.f;
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int m = 0; m < ALL; m++) {
      const float w = exp2_(__fmul_rn(__fadd_rn(lse[m], -base), LOG2E));
      sum = __fadd_rn(sum, w);
      o = make_float4(__fmaf_rn(w, out[m].x, o.x), __fmaf_rn(w, out[m].y, o.y), __fmaf_rn(w, out[m].z, o.z), __fmaf_rn(w, out[m].w, o.w));
    }
    const float f = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    o = make_float4(__fmul_rn(o.x, f), __fmul_rn(o.y, f), __fmul_rn(o.z, f), __fmul_rn(o.w, f));
    withStore(p.kind, [&](auto s) { decltype(s)::store4(p.y, (long long)at * p.dim + column, o); });
    if (column == 0 && p.yLse != nullptr) p.yLse[at] = sum == 0.f ? -LEAN_INF : finite(__fmaf_rn(log2_(sum), LN2, base));
  }
};

// The place of four columns that a member merges: a row and head, and the members with states of this row and head.
struct FourOfStates {
  int at;         // row * heads + head
  int to;         // row * heads of y + head in y
  int column;     // the first of the four
  int begin, end; // members
  __device__ __forceinline__ FourOfStates(const MergeStatesParams& p, int member, int i) {
    const int fours = p.dim / 4, groups = p.group.members / p.places;
    at = to = i / fours;
    column = (i - to * fours) * 4;
    if (p.own) {
      const int row = to / p.own;
      at = row * p.heads + member * p.own + to - row * p.own;
    }
    begin = at % p.heads / (p.heads / groups) * p.places;
    end = begin + p.places;
  }
  __device__ __forceinline__ float4 load(const MergeStatesParams& p, const float* out) const { return *(const float4*)(out + (long long)at * p.dim + column); }

  template <int MEMBERS>
  __device__ __forceinline__ void merge(const MergeStatesParams& p, const StatesOfFour<MEMBERS>& states) const { states.merge(p, to, column); }
};

// The fours that a member merges.
__device__ __forceinline__ int foursOf(const MergeStatesParams& p) { return p.rows * (p.own ? p.own : p.heads) * (p.dim / 4); }

// y is the states of all members merged, of few elements: each sends its own to all others.
__device__ __forceinline__ void mergeStatesFew(const MergeStatesParams& p) {
  beginExchange();
  const ExchangeGroup& g = p.group;
  Exchange round(g);
  const int fours = foursOf(p), lses = 2 * fours; // words of log-sum-exps are behind those of outputs
  const int first = blockIdx.x * EXCHANGE_THREADS + threadIdx.x, step = gridDim.x * EXCHANGE_THREADS;
  const float *out = p.out[g.me], *lse = p.lse[g.me];
#pragma unroll 1
  for (int i = first; i < fours; i += step) {
    FourOfStates four(p, g.me, i); // the same for all members, unless each gets its heads
    if (g.me < four.begin || g.me >= four.end) continue;
    float4 v = four.load(p, out);
    float l = lse[four.at];
    for (int m = 0; m < g.members; m++) {
      if (m == g.me || round.failed) continue;
      if (p.own) {
        four = FourOfStates(p, m, i);
        v = four.load(p, out);
        l = lse[four.at];
      }
      round.send(m, i, v);
      if (four.column == 0)
        asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(round.words(m, g.me, lses + four.to)), "l"((u64)round.tag << 32 | __float_as_uint(l)) : "memory");
    }
  }
  round.begun();
#pragma unroll 1
  for (int i = first; i < fours; i += step) {
    const FourOfStates four(p, g.me, i);
    StatesOfFour<EXCHANGE_MEMBERS> all;
    if (p.ownOut != nullptr) all.out[EXCHANGE_MEMBERS] = four.load(p, p.ownOut), all.lse[EXCHANGE_MEMBERS] = p.ownLse[four.at];
    TaggedFloats words[EXCHANGE_MEMBERS];
    u64 tagged[EXCHANGE_MEMBERS];
    const u64 *outs = round.words(g.me, 0, 2 * i), *logs = round.words(g.me, 0, lses + four.to);
    int missing;
    do { // all are asked for at the same time
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m >= four.begin && m < four.end && m != g.me) {
          words[m].load(g, outs + m * g.capacity);
          asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(tagged[m]) : "l"(logs + m * g.capacity) : "memory");
        }
      missing = -1;
#pragma unroll
      for (int m = 0; m < EXCHANGE_MEMBERS; m++)
        if (m >= four.begin && m < four.end && m != g.me && !(words[m].there(round.tag) && (u32)(tagged[m] >> 32) == round.tag)) missing = m;
    } while (missing >= 0 && round.more(missing));
#pragma unroll
    for (int m = 0; m < EXCHANGE_MEMBERS; m++) {
      if (m < four.begin || m >= four.end) continue;
      all.out[m] = m == g.me ? four.load(p, out) : words[m].floats();
      all.lse[m] = m == g.me ? lse[four.at] : __uint_as_float((u32)tagged[m]);
    }
    four.merge(p, all);
  }
}

// Merges many states of at most MEMBERS members. EACH fours are loaded at the same time: a load from another GPU takes a microsecond or two.
template <int MEMBERS, int EACH>
__device__ __forceinline__ void mergeFours(const MergeStatesParams& p) {
  const int fours = foursOf(p), step = gridDim.x * EXCHANGE_THREADS; // the host checks that an int holds fours and some steps more
#pragma unroll 1
  for (int i = blockIdx.x * EXCHANGE_THREADS + threadIdx.x; i < fours; i += EACH * step) {
    StatesOfFour<MEMBERS> all[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (i + j * step >= fours) break;
      const FourOfStates four(p, p.group.me, i + j * step);
      if (p.ownOut != nullptr) all[j].out[MEMBERS] = four.load(p, p.ownOut), all[j].lse[MEMBERS] = p.ownLse[four.at];
#pragma unroll
      for (int m = 0; m < MEMBERS; m++)
        if (m >= four.begin && m < four.end) all[j].out[m] = four.load(p, p.out[m]), all[j].lse[m] = p.lse[m][four.at];
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (i + j * step >= fours) break;
      FourOfStates(p, p.group.me, i + j * step).merge(p, all[j]);
    }
  }
}

// The same of many: each member reads the others' where they lie.
__device__ __forceinline__ void mergeStatesMany(const MergeStatesParams& p) {
  __shared__ int lost;
  if (threadIdx.x == 0) lost = 0;
  beginExchange();
  Exchange round(p.group);
  round.tell(0); // this one's are there, since what made them is ahead of the kernel
  round.begun();
  if (!round.await(0, lost)) return;
  if (p.group.members == 2)
    mergeFours<2, 4>(p);
  else
    mergeFours<EXCHANGE_MEMBERS, 1>(p);
  round.tell(1); // who knows that may write its own again
  round.await(1, lost);
}
