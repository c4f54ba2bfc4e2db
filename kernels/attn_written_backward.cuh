// Gradients of attention with the Variant that a user has written: see attn_written.cuh, which has the decode kernels. A generated unit has
// an Expression with the derivatives, too:
//
//	linear      whether the derivative of `score` by the score is 1
//	slope       that derivative, of the same arguments as `score`
//	PARTIALS    the number of elements of tensors with a derivative of `score`
//	partials    calls f(n, tensor, index, derivative) for each of them
//
// With x the score that the expressions get, gradients of x are dS = p (dO v - D) slope(x), and the gradient of an element of a tensor is the
// sum of p (dO v - D) times the element's derivative over all scores that read the element.
//
// Sums of an element have no order: each of them is a sum of integers, which are the terms times a power of two. A launch before finds the
// largest term of each element. 2^60 over the number of scores, times the largest term, bounds each integer, so the error of a sum is less than
// that of a sum of floats while there are at most 2^37 scores.
#pragma once
#include "attn_backward_variant.cuh"
#include "attn_expression.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "attn_backward_hopper_variant.cuh"
#endif

constexpr int WRITTEN_GRADIENTS = 5; // of tensors, and of the bias
constexpr int WRITTEN_BEGINS = 6;
static_assert(WRITTEN_GRADIENTS == WRITTEN_TENSORS + 1 && WRITTEN_BEGINS == WRITTEN_GRADIENTS + 1, "each has a beginning, and the last one an end");

struct WrittenGradients {
  u64* sums;                    // of all elements that have gradients, zero before
  u32* largest;                 // of the same elements, bits of floats, zero before
  u32* factor;                  // bits of the largest weight times slope, zero before
  void* out[WRITTEN_GRADIENTS]; // of the type of queries; null: not wanted
  int begin[WRITTEN_BEGINS];    // of each tensor the number of its first element
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
    y.weight = exp2_(__fmaf_rn(notPositive(x - lse), 1.4426950408889634f, lift));
    if (dead) y.weight = 0.f;
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
                if (to.out[tensor] != nullptr) lanes[i].add(to, to.begin[tensor] + index, ds * by);
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

  // Writes the gradients of all elements.
  __device__ static __forceinline__ void finish(const BackwardParams& p) {
    const WrittenGradients& to = gradientsOf(p);
    for (int tensor = 0; tensor < WRITTEN_GRADIENTS; tensor++) {
      if (to.out[tensor] == nullptr) continue;
      for (int i = to.begin[tensor] + blockIdx.x * blockDim.x + threadIdx.x; i < to.begin[tensor + 1]; i += gridDim.x * blockDim.x) {
        const int shift = -shiftOf(to, i);
        const float sum = __ll2float_rn((long long)to.sums[i]) * powerOf2(shift / 2) * powerOf2(shift - shift / 2);
        B::Format::Store::store(to.out[tensor], i - to.begin[tensor], to.largest[i] < 0x7f800000 ? sum : __uint_as_float(0x7fffffff));
      }
    }
  }
};

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
#define WRITTEN_BOUNDS(name) WRITTEN_KERNEL(name, 256, boundWritten(p.p))
#define WRITTEN_TERMS(name, ...)                                                                                                                 \
  WRITTEN_KERNEL(name##_largest, 256, WrittenTerms<Backward<__VA_ARGS__, BackwardWritten<Expression>>, Expression, WRITTEN_LARGEST>::run(p.p)) \
  WRITTEN_KERNEL(name##_sums, 256, WrittenTerms<Backward<__VA_ARGS__, BackwardWritten<Expression>>, Expression, WRITTEN_SUMS>::run(p.p))      \
  WRITTEN_KERNEL(name##_finish, 256, WrittenTerms<Backward<__VA_ARGS__, BackwardWritten<Expression>>, Expression, WRITTEN_SUMS>::finish(p.p))
