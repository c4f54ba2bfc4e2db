// Prefill kernels with the Variant that a user has written: see attn_written.cuh, which has the decode kernels. A generated unit
// has one WRITTEN_PREFILL.
//
// Steps of CUT_KEYS keys that no row of an output tile sees are left out: the output tile has a list of the others. Where every
// row sees every key, it is not asked which keys are hidden, and if nothing else changes scores, these steps are those of Plain.
#pragma once
#include "attn_expression.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "attn_prefill.cuh"
#else
#include "attn_prefill_mma.cuh"
#endif

struct WrittenPrefillParams {
  PrefillParams p;
  ScoreParams score;
  WrittenParams written; // tiles: steps of CUT_KEYS keys
};

// An output tile as PrefillRows has it. Steps are numbers among those of its list.
template <int KEYS, int ROWS, class Base> struct WrittenTile : Base {
  const int* list; // null: all steps
  __device__ __forceinline__ int keyOf(int c) const {
    constexpr u32 N = CUT_KEYS / KEYS;
    return list == nullptr ? c * KEYS : list[(u32)c / N] * CUT_KEYS + (u32)c % N * KEYS;
  }
  __device__ __forceinline__ void open(const PrefillParams& p, int number) {
    Base::open(p, number);
    const WrittenBlock* const block = blockOf(p, this->seq, this->first / ROWS);
    list = block == nullptr || block->begin < 0 ? nullptr : writtenOf(p).tiles + block->begin;
  }
  template <class R> __device__ __forceinline__ bool load(const PrefillParams& p, const R& range, int n) {
    if (range.begin + n >= range.end) return false;
    open(p, range.begin + n);
    return true;
  }
};

// What becomes of the scores of a lane's rows. Scores are natural ones then; if there are masks alone, they are products.
template <class E, int KEYS, int ROWS, class P, class Tile> struct WrittenScores : PrefillScores<KEYS, P, Tile> {
  using Base = PrefillScores<KEYS, P, Tile>;
  using typename Base::Each, typename Base::Step;
  SeenByAll seen;
  __device__ __forceinline__ WrittenScores(const P& p, const Tile& t, int row, int last) : Base(p, t, row, last), seen(p, E::hides, t.seq, t.first / ROWS) {}
  __device__ __forceinline__ Quiet quiet(int all) const {
    const Quiet other = Base::quiet(all);
    return {max(other.from, seen.from), min(other.to, seen.to - KEYS)};
  }
  // As Each, with code for a quarter of the scores.
  struct InTurn {
    float (&x)[KEYS / 8][4];
    template <class F> __device__ __forceinline__ void operator()(const F& f) const {
      constexpr int N = KEYS / 32;
#pragma unroll 1
      for (int turn = 0; turn < 4; turn++) {
        float first[N][4];
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) first[j][e] = f(x[j][e], e >> 1, (turn * N + j) * 8 + (e & 1));
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) x[j][e] = j + N < KEYS / 8 ? x[j + N][e] : first[j + N - KEYS / 8][e];
      }
    }
  };
  __device__ __forceinline__ void apply(float (&x)[KEYS / 8][4], const float (&by)[2], int key, const int (&limits)[2], int lane) const {
    const Each each{x};
    const typename Either<E::large, InTurn, Each>::type expressions{x};
    const ScoreParams& score = scoreOf(this->p);
    const Step rows{*this, limits};
    WrittenRow row;
    row.key = key + lane % 4 * 2, row.sequence = score.details[this->t.seq].number;
#pragma unroll
    for (int i = 0; i < 2; i++) row.head[i] = rows.head(i), row.place[i] = rows.place(i), row.limit[i] = E::reads ? limits[i] - row.key : 0;
    if (score.changes) {
      constexpr float LN4 = 1.3862943611198906f;
      const float natural[2] = {E::changes ? by[0] : by[0] * LN4, E::changes ? by[1] : by[1] * LN4};
      each([&](float s, int i, int) { return s * natural[i]; });
      if constexpr (E::changes) {
        modifyScores(score, rows, row.key, each);
        each([&](float s, int, int) { return s * LN4; });
      }
    }
    evaluate<E>(writtenOf(this->p), row, seen.has(key, KEYS), expressions);
    if constexpr (E::windows) maskScores<KEYS>(score, rows, row.key, each);
  }
};

// The Variant. E is an Expression.
template <class E> struct WrittenPrompt;
template <class T, class E, int D, int ROWS, int KEYS, bool PRECISE, bool ANY>
struct PrefillRows<T, WrittenPrompt<E>, D, ROWS, KEYS, PRECISE, ANY> : PrefillRows<T, Scored, D, ROWS, KEYS, PRECISE, ANY> {
  using Base = PrefillRows<T, Scored, D, ROWS, KEYS, PRECISE, ANY>;
  using Tile = WrittenTile<KEYS, ROWS, typename Base::Tile>;
  using Scores = WrittenScores<E, KEYS, ROWS, PrefillParams, Tile>;
  using typename Base::Softmax;
  __device__ static __forceinline__ Softmax softmaxOf(const PrefillParams& p) { return Softmax(Base::changes(p) ? Base::LOG2E : p.scale); }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WRITTEN_PREFILL(name, ...) \
  using name##_kernel = Prefill<__VA_ARGS__>; \
  extern "C" __global__ void __launch_bounds__(name##_kernel::THREADS, 1) name(const __grid_constant__ WrittenPrefillParams p) { name##_kernel::run(p.p); }
#else
#define WRITTEN_PREFILL(name, ...) \
  using name##_kernel = PrefillMma<__VA_ARGS__>; \
  extern "C" __global__ void __launch_bounds__(name##_kernel::THREADS, name##_kernel::TOGETHER) name(const __grid_constant__ WrittenPrefillParams p) { name##_kernel::run(p.p); }
#endif
