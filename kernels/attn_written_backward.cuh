// Gradients of attention with the Variant that a user has written: see attn_written.cuh, which has the decode kernels. A generated unit has
// an Expression with the derivatives, too:
//
//	linear        whether the derivative of `score` by the score is 1
//	unnormalised  whether weights are not divided by their sum: then p is the exponential of the score, and D is 0
//	slope         that derivative, of the same arguments as `score`
//	PARTIALS      the number of elements of tensors with a derivative of `score`
//	partials      calls f(n, tensor, index, derivative) for each of them
//	lineOf(n)     which scores of a head have the element of number n: a WrittenLine
//
// With x the score that the expressions get, gradients of x are dS = p (dO v - D) slope(x), and the gradient of an element of a tensor is the
// sum of p (dO v - D) times the element's derivative over all scores that read the element.
//
// Sums of an element have no order: each of them is a sum of integers, which are the terms times a power of two. A launch before finds the
// largest term of each element. 2^60 over the number of scores, times the largest term, bounds each integer, so the error of a sum is less than
// that of a sum of floats while there are at most 2^37 scores.
//
// On 9.0, where all scores of a line of a head have one element (of a key, a query, a distance, or of the head), floats of the line are added
// first, in a fixed order. Few sums then go to memory, and each goes to an integer for its exponents: no launch before finds the largest.
#pragma once
#include "attn_backward_variant.cuh"
#include "attn_expression.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "attn_backward_again.cuh"
#endif

constexpr int WRITTEN_GRADIENTS = 5; // of tensors, and of the bias
constexpr int WRITTEN_BEGINS = 6;
static_assert(WRITTEN_GRADIENTS == WRITTEN_TENSORS + 1 && WRITTEN_BEGINS == WRITTEN_GRADIENTS + 1, "each has a beginning, and the last one an end");

struct WrittenGradients {
  u64* sums;                    // of all elements that have gradients, zero before; WRITTEN_PLACES for each element of tensors in `lines`
  u32* largest;                 // of the elements of other tensors, bits of floats, zero before
  u32* factor;                  // bits of the largest weight times slope, zero before
  void* out[WRITTEN_GRADIENTS]; // of the type of queries; null: not wanted
  int begin[WRITTEN_BEGINS];    // of each tensor the number of its first sum
  int lines;                    // bits of tensors whose elements belong to lines
  int shift;                    // terms of at most 1 have integers of at most 2^shift
  float bound;                  // on slopes, if `factor` is not made; 0: made
};

struct WrittenBackwardParams {
  BackwardParams p;
  BackwardScores score;
  WrittenParams written;
  WrittenGradients gradients;
};
__device__ __forceinline__ const WrittenGradients& gradientsOf(const BackwardParams& p) { return *(const WrittenGradients*)(&writtenOf(p) + 1); }

// The scores of a head that have one element of a tensor. The numbers are those of internal/variant.
enum WrittenLine { WRITTEN_ANY, WRITTEN_HEAD, WRITTEN_KEY, WRITTEN_QUERY, WRITTEN_DISTANCE };
// Integers of an element of a line: 8 exponents each, and the last one counts what is not finite.
constexpr int WRITTEN_PLACES = 33;

// A score of a row and a key.
struct WrittenScore {
  float weight;  // times 2^lift; 0 of keys that the row does not see
  float before;  // what the expressions got
  float changed; // slope of the expression; of a weight of 0 anything
  float slope;   // the derivative by the product, over the scale
};

// The scores of a query head of a sequence.
template <class E, class Store> struct WrittenHead {
  const BackwardParams& p;
  const BackwardSeq& s;
  const int seq, head; // head: of the sequence
  float alibi;
  __device__ __forceinline__ WrittenHead(const BackwardParams& p, const BackwardSeq& s, int seq, int head) : p(p), s(s), seq(seq), head(head), alibi(0.f) {
    if (E::changes && scoreOf(p).slopes != nullptr) alibi = scoreOf(p).slopes[head];
  }
  __device__ __forceinline__ int behind() const { return s.keys - s.queries; }
  __device__ __forceinline__ int end(int row) const { return p.causal ? min(s.keys, behind() + row + 1) : s.keys; }
  // Whether some of `rows` rows does not see some of `keys` keys, without the expression.
  __device__ __forceinline__ bool masked(int row, int rows, int key, int keys) const {
    return key + keys > end(row) || key < firstKey(scoreOf(p), behind() + row + rows - 1);
  }
  __device__ __forceinline__ bool hides(int row, int key) const {
    return key >= end(row) || key < firstKey(scoreOf(p), behind() + row) && key >= scoreOf(p).sinkTokens;
  }

  // The score of a product x. A row that is none has the log-sum-exp +Inf.
  __device__ __forceinline__ WrittenScore of(float x, int row, int key, float lse, float lift, bool some) const {
    const BackwardScores& score = scoreOf(p);
    const WrittenParams& written = writtenOf(p);
    const bool dead = some && hides(row, key);
    if constexpr (E::reads || E::changes) row = min(row, s.queries - 1), key = min(key, s.keys - 1); // others are masked
    const int place = behind() + row;
    x *= p.scale;
    float slope = 1.f;
    if constexpr (E::changes) {
      if (score.cap != 0.f) {
        const float y = tanh_(x * score.reciprocal);
        x = score.cap * y, slope = __fmaf_rn(-y, y, 1.f);
      }
      x = __fmaf_rn(alibi, (float)(key - place), x);
      if (score.bias != nullptr) x = __fmaf_rn(Store::load(score.bias, seq * score.biasSequence + head * score.biasHead + row * score.biasRow + key), score.biasFactor, x);
    }
    WrittenScore y;
    y.before = x;
    if constexpr (E::scores) x = E::score(written, y.before, place, key, head, seq);
    y.weight = exp2_(__fmaf_rn(E::unnormalised ? x : notPositive(x - lse), 1.4426950408889634f, lift));
    if (dead || E::unnormalised && lse == LEAN_INF) y.weight = 0.f;
    if constexpr (E::hides) {
      if (!E::sees(written, y.before, place, key, head, seq)) y.weight = 0.f;
    }
    y.changed = E::linear ? 1.f : E::slope(written, y.before, place, key, head, seq);
    y.slope = slope * y.changed;
    return y;
  }
};

// Turns products x of a warp, in B's layout, into weights times slopes, and into operands the weights. A lane has keys key and key+8, and rows
// first, first+1, first+8, ... `logs` has the log-sum-exps of the rows. Long expressions are there once for a quarter of the rows.
template <class B, class E, class Head>
__device__ __forceinline__ void weighWritten(u32 (&w)[B::ROWS / 16][4], float (&x)[B::ROWS / 8][4], const Head& of, int first, int key, u32 logs, bool some) {
  constexpr int TURNS = E::large ? 4 : 1, EIGHTS = B::ROWS / 8, N = EIGHTS / TURNS;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; turn++) {
    float slopes[N][4];
    u32 weights[N][2];
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int at = (turn * N + j) * 8;
      float lse[4];
      B::loadFour(lse, logs + (at + threadIdx.x % 4 * 2) * 8);
      float weight[4];
#pragma unroll
      for (int h = 0; h < 4; h++) {
        const WrittenScore y = of.of(x[j][h], first + at + h % 2, key + h / 2 * 8, lse[h % 2 * 2], B::Math::lift, some);
        weight[h] = y.weight;
        slopes[j][h] = E::linear && !E::changes || y.weight == 0.f ? y.weight : y.weight * y.slope;
      }
#pragma unroll
      for (int h = 0; h < 2; h++) weights[j][h] = B::Operand::pack(weight[2 * h], weight[2 * h + 1]);
    }
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
#pragma unroll
      for (int h = 0; h < 4; h++) x[j][h] = j + N < EIGHTS ? x[j + N][h] : slopes[j + N - EIGHTS][h];
#pragma unroll
      for (int h = 0; h < 2; h++) w[j / 2][j % 2 * 2 + h] = j + N < EIGHTS ? w[(j + N) / 2][(j + N) % 2 * 2 + h] : weights[j + N - EIGHTS][h];
    }
  }
}

// The Variant for products of single warps. E is an Expression.
template <class E> struct BackwardWritten : BackwardScored {
  template <class B> struct Scores {
    static_assert(B::TILES == 1, "a warp has 16 keys");
    using Numbers = float[1][B::ROWS / 8][4];
    const WrittenHead<E, typename B::Format::Store> of;
    const int row, mine;
    u32 logs;
    __device__ __forceinline__ Scores(const BackwardParams& p, const BackwardSeq& s, int seq, int head, int row, int mine) : of(p, s, seq, head), row(row), mine(mine) {}
    __device__ __forceinline__ bool masked() const { return of.masked(row, B::ROWS, mine, B::MINE); }
    __device__ __forceinline__ int key() const { return mine + threadIdx.x % 32 / 4; }
    __device__ __forceinline__ int first() const { return row + threadIdx.x % 4 * 2; }
    __device__ __forceinline__ void weigh(Numbers&, u32 at, float) { logs = at; }
    __device__ __forceinline__ void keep(u32 (&w)[1][B::ROWS / 16][4], Numbers& x) const { weighWritten<B, E>(w[0], x[0], of, first(), key(), logs, masked()); }
    __device__ __forceinline__ void drop(Numbers&) const {}
    __device__ __forceinline__ void chain(Numbers&) const {}
  };
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The Variant for products of warp groups. Long expressions run while no product does: see HopperPlain.
template <class E> struct HopperWritten : HopperMasked {
  static constexpr bool many = E::large;
  __device__ static __forceinline__ void copy(const BackwardParams&, char*) {}
  template <class B> struct Changes {
    const WrittenHead<E, typename B::Format::Store> of;
    const int row, mine;
    __device__ __forceinline__ Changes(const BackwardParams& p, const BackwardSeq& s, int kvHead, int head, int row, int mine)
        : of(p, s, kvHead / p.kvHeads, head % (p.kvHeads * p.group)), row(row), mine(mine) {}
    template <class At> __device__ __forceinline__ void weigh(u32 (&w)[B::ROWS / 16][4], float (&x)[B::ROWS / 8][4], u32 logs, const At&) const {
      weighWritten<B, E>(w, x, of, row + threadIdx.x % 4 * 2, mine + threadIdx.x % 32 / 4, logs, of.masked(row, B::ROWS, mine, B::MINE));
    }
    __device__ __forceinline__ void drop(float (&)[B::ROWS / 8][4]) const {}
    template <class At> __device__ __forceinline__ void chain(float (&)[B::ROWS / 8][4], const At&) const {}
  };
};
#endif

// What a thread block does that computes the scores of a key block once more.
enum WrittenPass {
  WRITTEN_FACTOR,  // finds the largest weight times slope
  WRITTEN_LARGEST, // finds the largest term of each element
  WRITTEN_SUMS,    // adds the terms
};

template <class B, class E, int PASS> struct WrittenTerms {
  static constexpr int KEYS = B::KEYS, ROWS = B::ROWS;
  using Numbers = float[1][ROWS / 8][4];

  // Terms of one of the partial derivatives. A lane has those of an element while the element stays the same.
  struct Lane {
    int have = -1;
    float largest, low, high; // the largest term, or what terms are multiplied by
    u64 sum;
    __device__ __forceinline__ void flush(const WrittenGradients& to) const {
      if (have < 0) return;
      if constexpr (PASS == WRITTEN_LARGEST) atomicMax(to.largest + have, __float_as_uint(largest));
      else atomicAdd((unsigned long long*)to.sums + have, (unsigned long long)sum);
    }
    __device__ __forceinline__ void add(const WrittenGradients& to, int element, float term) {
      if (element != have) {
        flush(to);
        have = element, largest = 0.f, sum = 0;
        if constexpr (PASS == WRITTEN_SUMS) {
          const int shift = shiftOf(to, element);
          low = powerOf2(shift / 2), high = powerOf2(shift - shift / 2);
        }
      }
      if constexpr (PASS == WRITTEN_LARGEST) {
        const u32 bits = max(__float_as_uint(largest), __float_as_uint(fabsf(term))); // NaN is more than all others
        largest = __uint_as_float(bits);
      } else {
        sum += (u64)__float2ll_rn(term * low * high);
      }
    }
  };
  // log2 of what the terms of an element are multiplied by.
  __device__ static __forceinline__ int shiftOf(const WrittenGradients& to, int element) { return to.shift + 126 - (int)(to.largest[element] >> 23); }

  __device__ static __forceinline__ void run(const BackwardParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const WrittenGradients& to = gradientsOf(p);
    const u32 keys = sharedAddress(memory), values = keys + B::KEY, stage = values + B::KEY;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, heads = p.kvHeads * p.group;
    const u32 left = swizzled(lane % 16, lane / 16 * 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
    const int keyBlocks = (p.keys + KEYS - 1) / KEYS, kvHead = blockIdx.x / keyBlocks, key = blockIdx.x % keyBlocks * KEYS, mine = key + warp * B::MINE;
    const int seq = kvHead / p.kvHeads;
    const BackwardSeq s(p, seq);
    const int behind = s.keys - s.queries;
    int end = key < s.keys ? (s.queries + ROWS - 1) / ROWS : 0;
    const int begin = min(max(s.first, p.causal ? key - behind : 0) / ROWS, end);
    end = BackwardScored::endOf<B>(p, behind, key, begin, end);
    if (begin == end) return;
    const long long first = (long long)kvHead * p.keys * p.dim;
    B::template copyRows<KEYS>(p, keys, p.k, first, key, BackwardScored::hidden(p, s), s.keys);
    if (PASS != WRITTEN_FACTOR) B::template copyRows<KEYS>(p, values, p.v, first, key, BackwardScored::hidden(p, s), s.keys);
    float most = 0.f;
    Lane lanes[E::PARTIALS + 1];
#pragma unroll 1
    for (int step = 0; step < (end - begin) * p.group; step++) {
      const int all = kvHead * p.group + step / (end - begin), i = begin + step % (end - begin), row = i * ROWS; // all: the head, of all sequences
      const long long at = (long long)all * p.queries * p.dim;
      __syncthreads(); // all warps have read
      B::template copyRows<ROWS>(p, stage, p.q, at, row, s.first, s.queries);
      if (PASS != WRITTEN_FACTOR) B::template copyRows<ROWS>(p, stage + B::ROW, p.outGrad, at, row, s.first, s.queries);
      if (threadIdx.x < ROWS / 2) copy16(stage + 2 * B::ROW + threadIdx.x * 16, p.rows + ((long long)all * p.blocks + i) * ROWS + threadIdx.x * 2, true);
      copyCommit();
      copyWait<0>();
      __syncthreads();
      const typename BackwardWritten<E>::template Scores<B> scores(p, s, seq, all % heads, row, mine);
      const bool some = scores.masked();
      Numbers x, y;
      B::multiply(x, keys + warp * (B::MINE * 128) + left, stage + right);
      if (PASS != WRITTEN_FACTOR) B::multiply(y, values + warp * (B::MINE * 128) + left, stage + B::ROW + right);
      // There is code for the rows of a turn, whose products move to the front.
      constexpr int TURNS = E::large ? ROWS / 8 : 2, N = ROWS / 8 / TURNS;
#pragma unroll 1
      for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
          const int j = turn * N + n;
          float of[4];
          B::loadFour(of, stage + 2 * B::ROW + (j * 8 + lane % 4 * 2) * 8);
#pragma unroll
          for (int h = 0; h < 4; h++) {
            const int r = scores.first() + j * 8 + h % 2, k = scores.key() + h / 2 * 8;
            const WrittenScore z = scores.of.of(x[0][n][h], r, k, of[h % 2 * 2], 0.f, some);
            if (z.weight == 0.f) continue;
            if constexpr (PASS == WRITTEN_FACTOR) {
              most = __uint_as_float(max(__float_as_uint(most), __float_as_uint(fabsf(z.weight * z.slope)))); // NaN is more than all others
            } else {
              const float ds = z.weight * (y[0][n][h] - of[h % 2 * 2 + 1]);
              E::partials(writtenOf(p), z.before, behind + r, k, all % heads, seq, [&](int i, int tensor, int index, float by) {
                if (to.out[tensor] != nullptr && !(to.lines >> tensor & 1)) lanes[i].add(to, to.begin[tensor] + index, ds * by);
              });
              if constexpr (E::changes) {
                const BackwardScores& score = scoreOf(p);
                if (to.out[WRITTEN_TENSORS] != nullptr)
                  lanes[E::PARTIALS].add(to, to.begin[WRITTEN_TENSORS] + (int)(seq * score.biasSequence + all % heads * score.biasHead + r * score.biasRow + k), ds * z.changed * score.biasFactor);
              }
            }
          }
        }
#pragma unroll
        for (int n = 0; n + N < ROWS / 8; n++)
#pragma unroll
          for (int h = 0; h < 4; h++) {
            x[0][n][h] = x[0][n + N][h];
            if constexpr (PASS != WRITTEN_FACTOR) y[0][n][h] = y[0][n + N][h];
          }
      }
    }
    if constexpr (PASS == WRITTEN_FACTOR) atomicMax(to.factor, __float_as_uint(most));
    if constexpr (PASS != WRITTEN_FACTOR) {
#pragma unroll
      for (int n = 0; n <= E::PARTIALS; n++) lanes[n].flush(to);
    }
  }

};

// Writes the gradients of all elements.
template <class Store> __device__ __forceinline__ void finishWritten(const BackwardParams& p) {
  const WrittenGradients& to = gradientsOf(p);
  for (int tensor = 0; tensor < WRITTEN_GRADIENTS; tensor++) {
    if (to.out[tensor] == nullptr) continue;
    const bool lines = to.lines >> tensor & 1;
    const int n = (to.begin[tensor + 1] - to.begin[tensor]) / (lines ? WRITTEN_PLACES : 1);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
      const long long* const at = (const long long*)to.sums + to.begin[tensor] + (long long)i * (lines ? WRITTEN_PLACES : 1);
      float sum = 0.f;
      bool finite = true;
      if (lines) {
#pragma unroll 1
        for (int k = 0; k < WRITTEN_PLACES - 1; k++) {
          const int e = 8 * k - 149;
          sum += __ll2float_rn(at[k]) * powerOf2(e / 2) * powerOf2(e - e / 2);
        }
        finite = at[WRITTEN_PLACES - 1] == 0;
      } else {
        const u32 largest = to.largest[to.begin[tensor] + i];
        const int e = (int)(largest >> 23) - to.shift - 126;
        sum = __ll2float_rn(*at) * powerOf2(e / 2) * powerOf2(e - e / 2), finite = largest < 0x7f800000;
      }
      Store::store(to.out[tensor], i, finite ? sum : __uint_as_float(0x7fffffff));
    }
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The Job of BackwardAgain that adds the terms of lines (variant.Line). An item is a key block of a KV head.
//
//   N     the partial derivative whose lines are queries or distances; -1: none. Terms of ROWS rows go through shared memory, where a
//         thread adds the terms of one line and of PART keys.
//   FEW   whether each lane also adds the terms of all partial derivatives whose lines are heads or keys.
template <class E, int D, int N, bool FEW> struct WrittenLines {
  static constexpr bool across = N >= 0, distance = across && E::lineOf(N) == WRITTEN_DISTANCE;
  static constexpr int KEYS = 128, ROWS = D > 64 ? 32 : 64, PITCH = ROWS + 8, PARTS = 256 / ROWS, PART = KEYS / PARTS, WINDOW = 256;
  static constexpr int BYTES = across ? KEYS * PITCH * 4 + PARTS * WINDOW * 4 : 0;
  static constexpr bool BOTH = true; // there are registers for the products of both halves

  template <class B> __device__ static __forceinline__ typename B::Walk walk(const BackwardParams& p) { // with a causal mask, those with the most rows first
    const int kvHead = blockIdx.x % (p.batch * p.kvHeads), head = kvHead % p.kvHeads * p.group, seq = kvHead / p.kvHeads;
    return typename B::Walk(p, seq, seq + 1, head, head + p.group, blockIdx.x / (p.batch * p.kvHeads) * KEYS, 0, 0x7fffffff);
  }

  float* const numbers;           // of each key: the terms of ROWS rows
  float* const parts;             // PARTS times the sums of lines, which are distances or queries' places, modulo WINDOW
  float sums[E::PARTIALS + 1][2]; // of the lane's two keys, or of the head
  int seq, head, mine, begins;    // of the sums: sequence, head (-1: there are no sums), the lane's first key, the block's first key
  int behind, keys, low, high;    // behind, keys: of the sequence; lines [low, high) have sums
  __device__ __forceinline__ WrittenLines(char* memory) : numbers((float*)memory), parts(numbers + KEYS * PITCH), head(-1) {
    if constexpr (across)
      for (int i = threadIdx.x - 128; i < PARTS * WINDOW; i += 256) parts[i] = 0.f;
  }
  __device__ static __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

  // Adds x to the integers of an element. An x has 24 bits, and an element gets at most 2^31 of them, so no integer overflows.
  __device__ static __forceinline__ void add(u64* sums, float x) {
    const u32 bits = __float_as_uint(x), e = bits >> 23 & 255, shift = max(e, 1u) - 1;
    if ((bits & 0x7fffffff) == 0) return;
    long long by = (long long)(bits & 0x7fffff | (e > 0 ? 0x800000 : 0)) << shift % 8;
    if (bits >> 31) by = -by;
    if (e == 255) by = 1;
    atomicAdd((unsigned long long*)sums + (e == 255 ? WRITTEN_PLACES - 1 : shift / 8), (unsigned long long)by);
  }
  // Adds each lane's x to the element that partial derivative n has for a query's place and a key. If all lanes have one element, the sum
  // of their x is added once.
  __device__ __forceinline__ void addWarp(const BackwardParams& p, int n, float x, int place, int key, bool there) const {
    const WrittenGradients& to = gradientsOf(p);
    long long element = -1;
    E::partials(writtenOf(p), 0.f, place, key, head, seq, [&](int i, int tensor, int index, float) {
      if (i == n && wanted(p, tensor)) element = to.begin[tensor] + (long long)index * WRITTEN_PLACES;
    });
    if (!there) element = -1;
    if (__all_sync(~0u, element == __shfl_sync(~0u, element, 0))) {
      x = sumOfWarp(x);
      if (threadIdx.x % 32 != 0) return;
    }
    if (element >= 0) add(to.sums + element, x);
  }
  __device__ static __forceinline__ bool wanted(const BackwardParams& p, int tensor) { return gradientsOf(p).out[tensor] != nullptr && gradientsOf(p).lines >> tensor & 1; }

  // Adds the `count` lowest lines, whose sums are complete. All threads have met before.
  __device__ __forceinline__ void flush(const BackwardParams& p, int count) {
    if constexpr (!across) return;
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    count = min(count, high - low);
#pragma unroll 1
    for (int i = warp * 32; i < count; i += 256) {
      const bool there = i + lane < count;
      const int line = low + i + lane;
      float x = 0.f;
#pragma unroll
      for (int k = 0; k < PARTS; k++) {
        float& y = parts[k * WINDOW + (line & WINDOW - 1)];
        if (there) x += y, y = 0.f;
      }
      // An existing query and key of the line. Lines without one have no sums.
      if constexpr (distance) {
        const int away = min(max(line, behind - keys + 1), keys - 1), key = max(behind - away, 0);
        addWarp(p, N, x, key + away, key, there);
      } else {
        addWarp(p, N, x, min(line, keys - 1), 0, there);
      }
    }
    low += count;
  }
  // Adds the sums of the present head.
  __device__ __forceinline__ void leave(const BackwardParams& p) {
    if (head < 0) return;
    flush(p, WINDOW);
    if constexpr (FEW) {
      const int lane = threadIdx.x % 32, key = mine + lane / 4;
#pragma unroll
      for (int n = 0; n < E::PARTIALS; n++) {
        if (E::lineOf(n) == WRITTEN_HEAD) addWarp(p, n, sums[n][0], keys - 1, 0, true);
        if (E::lineOf(n) == WRITTEN_KEY) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float x = sums[n][h];
            x += __shfl_xor_sync(~0u, x, 1), x += __shfl_xor_sync(~0u, x, 2);
            addWarp(p, n, x, keys - 1, min(key + h * 8, keys - 1), lane % 4 == 0 && key + h * 8 < keys);
          }
        }
      }
    }
  }

  template <class B> __device__ __forceinline__ void begin(const BackwardParams&, int) {}
  template <class B> __device__ __forceinline__ void end(const BackwardParams& p) { leave(p); }

  template <class B, class Walk> __device__ __forceinline__ void take(const BackwardParams& p, const Walk& w, int row, typename B::Numbers& x, typename B::Numbers& y, u32 logs, int of) {
    if (head != w.head) {
      leave(p);
      seq = w.seq, head = w.head, mine = of, begins = w.key, behind = w.s.keys - w.s.queries, keys = w.s.keys;
      low = high = behind + row - (distance ? begins + KEYS - 1 : 0);
#pragma unroll
      for (int n = 0; n <= E::PARTIALS; n++) sums[n][0] = sums[n][1] = 0.f;
    }
    const int lane = threadIdx.x % 32, key = mine + lane / 4;
    const WrittenHead<E, typename B::Format::Store> scores(p, w.s, seq, head);
    const bool some = scores.masked(row, B::ROWS, mine, B::MINE);
    // There is code for the rows of a turn, whose products move to the front.
    constexpr int TURNS = E::large ? 8 : 2, EIGHTS = 8 / TURNS;
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
      for (int n = 0; n < EIGHTS; n++) {
        const int j = turn * EIGHTS + n;
        float statistics[4], terms[4];
        B::loadFour(statistics, logs + (j * 8 + lane % 4 * 2) * 8);
#pragma unroll
        for (int h = 0; h < 4; h++) {
          terms[h] = 0.f;
          const int r = row + j * 8 + lane % 4 * 2 + h % 2, k = key + h / 2 * 8;
          const WrittenScore z = scores.of(x[n][h], r, k, statistics[h % 2 * 2], 0.f, some);
          const float ds = z.weight * (y[n][h] - statistics[h % 2 * 2 + 1]);
          const bool none = z.weight == 0.f; // perhaps there is no such row or key
          E::partials(writtenOf(p), z.before, behind + min(r, w.s.queries - 1), min(k, keys - 1), head, seq, [&](int i, int, int, float by) {
            const float term = none ? 0.f : ds * by;
            if (i == N) terms[h] = term;
            else if (FEW && E::lineOf(i) == WRITTEN_HEAD) sums[i][0] += term;
            else if (FEW && E::lineOf(i) == WRITTEN_KEY) sums[i][h / 2] += term;
          });
        }
        if constexpr (across) {
          float* const at = numbers + (key - begins) * PITCH + j % (ROWS / 8) * 8 + lane % 4 * 2;
          *(float2*)at = make_float2(terms[0], terms[1]), *(float2*)(at + 8 * PITCH) = make_float2(terms[2], terms[3]);
        }
      }
      if (across && (turn + 1) * EIGHTS % (ROWS / 8) == 0) addLines(behind + row + turn * EIGHTS / (ROWS / 8) * ROWS);
#pragma unroll
      for (int n = 0; n + EIGHTS < 8; n++)
#pragma unroll
        for (int h = 0; h < 4; h++) x[n][h] = x[n + EIGHTS][h], y[n][h] = y[n + EIGHTS][h];
    }
  }
  // Adds the numbers of ROWS rows, the first of which is at a place.
  __device__ __forceinline__ void addLines(int place) {
    const int thread = threadIdx.x - 128, line = thread % ROWS, part = thread / ROWS;
    meet();
    float a = 0.f, b = 0.f;
    const int turn = (part * PART + line) / ROWS; // how often a diagonal of the keys before has begun with the first row again
#pragma unroll
    for (int n = 0; n < PART; n++) {
      const int k = part * PART + n, r = distance ? k + line : line;
      const float x = numbers[k * PITCH + r % ROWS];
      if (!distance || r / ROWS == turn) a += x;
      else b += x;
    }
    float* const to = parts + part * WINDOW;
    if constexpr (distance) {
      const int away = place - begins + line - turn * ROWS;
      to[away & WINDOW - 1] += a, to[away - ROWS & WINDOW - 1] += b;
      high = place - begins + ROWS;
    } else {
      to[place + line & WINDOW - 1] = a;
      high = place + ROWS;
    }
    meet();
  }
};
#endif

// BackwardRows where weights are not divided by their sum. The log-sum-exps are memory of any numbers.
template <class Format, int ROWS> __device__ __forceinline__ void rowsUnnormalised(const BackwardParams& p) {
  BackwardRows<Format, ROWS, BackwardScored>::run(p);
  const int heads = p.kvHeads * p.group, padded = p.blocks * ROWS;
  const long long warp = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (warp >= (long long)p.batch * heads * padded || threadIdx.x % 32 != 0) return;
  const int row = warp % padded;
  const BackwardSeq s(p, warp / padded / heads);
  p.rows[warp] = make_float2(row >= s.first && row < s.queries ? 0.f : LEAN_INF, 0.f);
}

// Bounds of gradients (BackwardBound) hold for slopes of at most 1: a thread for each KV head multiplies them.
__device__ __forceinline__ void boundWritten(const BackwardParams& p) {
  const int kvHead = blockIdx.x * blockDim.x + threadIdx.x;
  if (kvHead >= p.batch * p.kvHeads) return;
  const WrittenGradients& to = gradientsOf(p);
  const float bound = to.bound != 0.f ? to.bound : __uint_as_float(*to.factor);
  u32* const at = BackwardBound(p, kvHead).at;
  for (int i = 0; i < 2; i++) at[i] = __float_as_uint(__uint_as_float(at[i]) * bound);
}

#define WRITTEN_KERNEL(name, THREADS, ...) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ WrittenBackwardParams p) { __VA_ARGS__; }
// Arguments behind D: those of Backward.
#define WRITTEN_BACKWARD(name, T, D, ...) WRITTEN_KERNEL(name, 256, Backward<T, D, __VA_ARGS__, BackwardWritten<Expression>>::run(p.p))
// Arguments behind D: those of BackwardHopper.
#define WRITTEN_BACKWARD_HOPPER(name, T, D, ...) WRITTEN_KERNEL(name, 384, BackwardHopper<T, D, __VA_ARGS__, HopperWritten<Expression>>::run(p.p))
// Arguments are those of Backward.
#define WRITTEN_FACTORS(name, ...) WRITTEN_KERNEL(name, 256, WrittenTerms<Backward<__VA_ARGS__, BackwardWritten<Expression>>, Expression, WRITTEN_FACTOR>::run(p.p))
#define WRITTEN_ROWS(name, T, ROWS) WRITTEN_KERNEL(name, 256, rowsUnnormalised<T, ROWS>(p.p))
#define WRITTEN_BOUNDS(name) WRITTEN_KERNEL(name, 256, boundWritten(p.p))
#define WRITTEN_TERMS(name, ...)                                                                                                                 \
  WRITTEN_KERNEL(name##_largest, 256, WrittenTerms<Backward<__VA_ARGS__, BackwardWritten<Expression>>, Expression, WRITTEN_LARGEST>::run(p.p)) \
  WRITTEN_KERNEL(name##_sums, 256, WrittenTerms<Backward<__VA_ARGS__, BackwardWritten<Expression>>, Expression, WRITTEN_SUMS>::run(p.p))
#define WRITTEN_FINISH(name, T) WRITTEN_KERNEL(name, 256, finishWritten<typename T::Store>(p.p))
// Arguments behind the name: the partial derivative, whether there are those of heads and keys, and the arguments of BackwardAgain.
#define WRITTEN_LINES(name, N, FEW, T, D, ...) WRITTEN_KERNEL(name, 384, BackwardAgain<T, D, __VA_ARGS__, WrittenLines<Expression, D, N, FEW>>::run(p.p))

