// Nodes that touch each element once: norms by the root mean square, rotary embeddings,
// functions, products and sums of elements, and states that merge.
#pragma once
#include "copy.cuh"
#include "gemm_activation.cuh"
#include "rotary.cuh"

constexpr int NODE_THREADS = 256;
constexpr int NODE_NARROW = 1024; // elements of a row that a warp has; more are a block's
constexpr int NODE_EACH = 4;      // elements of a thread of `elements`

// What each of them begins with: nothing is read or written before.
__device__ __forceinline__ void beginNode() {
  waitForEarlier();
  if (threadIdx.x == 0) letNextStart();
}

struct RMSNormParams {
  const float *x, *gamma, *residual; // the last two may be null
  float* y;
  int rows, n;
  float eps, offset; // offset is added to gamma
};

// y = x / sqrt(mean(x^2) + eps) * (gamma + offset) + residual, of rows of n elements.
__device__ __forceinline__ void rmsNorm(const RMSNormParams& p) {
  __shared__ float scratch[8];
  beginNode();
  const bool narrow = p.n <= NODE_NARROW;
  const int row = narrow ? blockIdx.x * (NODE_THREADS / 32) + threadIdx.x / 32 : blockIdx.x;
  if (row >= p.rows) return; // a warp, where rows are narrow
  const int first = narrow ? threadIdx.x % 32 : threadIdx.x, step = narrow ? 32 : NODE_THREADS;
  const long long at = (long long)row * p.n;
  const float* x = p.x + at;
  float sum = 0.f;
#pragma unroll 8
  for (int i = first; i < p.n; i += step) sum += x[i] * x[i];
  if (narrow) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  } else {
    sum = foldBlock(sum, scratch, [](float a, float b) { return a + b; });
  }
  const float f = 1.f / sqrtf(sum / p.n + p.eps);
#pragma unroll 4
  for (int i = first; i < p.n; i += step) {
    float v = x[i] * f;
    if (p.gamma != nullptr) v *= p.gamma[i] + p.offset;
    if (p.residual != nullptr) v += p.residual[at + i];
    p.y[at + i] = v;
  }
}

struct RotaryParams {
  const float* x;
  const int* positions; // one for each row
  float* y;
  int heads, headDim, pairs, interleaved;
  float factor;
  int rows;
  u64 turns[ROTARY_PAIRS]; // what a pair turns by at each position, in 2^64th parts of a turn
};

// Turns the heads of a row, a thread block a row.
__device__ __forceinline__ void rotary(const RotaryParams& p) {
  __shared__ float2 turned[ROTARY_PAIRS]; // cosines and sines
  beginNode();
  const int position = p.positions[blockIdx.x];
  for (int i = threadIdx.x; i < p.pairs; i += NODE_THREADS) turned[i] = turnedBy(p.turns[i], position, p.factor);
  __syncthreads();
  const int width = p.heads * p.headDim;
  const float* x = p.x + (long long)blockIdx.x * width;
  float* y = p.y + (long long)blockIdx.x * width;
#pragma unroll 4
  for (int i = threadIdx.x; i < width; i += NODE_THREADS) {
    const int e = i % p.headDim;
    float v = x[i];
    if (e < 2 * p.pairs) {
      const bool second = p.interleaved ? e & 1 : e >= p.pairs;
      const int apart = p.interleaved ? 1 : p.pairs;
      const float2 t = turned[p.interleaved ? e / 2 : second ? e - p.pairs : e];
      v = second ? v * t.x + x[i - apart] * t.y : v * t.x - x[i + apart] * t.y;
    }
    y[i] = v;
  }
}

struct ElementsParams {
  const float *x, *times, *plus; // the last two may be null
  float* y;
  long long n;
  int timesPeriod, plusPeriod; // they begin again after so many elements; 0: they have n
  float scale;
  int activation;
};

// y = scale * f(x) * times + plus.
__device__ __forceinline__ void elements(const ElementsParams& p) {
  beginNode();
  const long long first = ((long long)blockIdx.x * NODE_THREADS + threadIdx.x) * NODE_EACH;
  const int most = (int)(p.n - first < NODE_EACH ? p.n - first : NODE_EACH);
  if (most <= 0) return;
  // Four at a time, where they lie together everywhere; all memory begins at a multiple of 16 bytes.
  const bool together = most == NODE_EACH && (p.timesPeriod | p.plusPeriod) % NODE_EACH == 0;
  const auto load = [&](float (&v)[NODE_EACH], const float* from, int period) {
    const long long at = period == 0 ? first : first % period;
    if (together) {
      *(float4*)v = *(const float4*)(from + at);
      return;
    }
#pragma unroll
    for (int i = 0; i < NODE_EACH; i++) {
      if (i < most) v[i] = from[period == 0 ? first + i : (first + i) % period];
    }
  };
  alignas(16) float x[NODE_EACH] = {}, times[NODE_EACH] = {}, plus[NODE_EACH] = {};
  load(x, p.x, 0);
  if (p.times != nullptr) load(times, p.times, p.timesPeriod);
  if (p.plus != nullptr) load(plus, p.plus, p.plusPeriod);
#pragma unroll
  for (int i = 0; i < NODE_EACH; i++) {
    x[i] = activatedAny(p.activation, x[i]) * p.scale;
    if (p.times != nullptr) x[i] *= times[i];
    if (p.plus != nullptr) x[i] += plus[i];
  }
  if (together) {
    *(float4*)(p.y + first) = *(const float4*)x;
    return;
  }
#pragma unroll
  for (int i = 0; i < NODE_EACH; i++) {
    if (i < most) p.y[first + i] = x[i];
  }
}

// Elements of four axes, the last of which lies together in both places.
struct MoveParams {
  const float* x;
  float* y;
  long long from[3], to[3]; // distances along the other axes
  long long count;          // elements
  int second, third, n;     // lengths of the axes behind the first
};

// y takes elements of x.
__device__ __forceinline__ void move(const MoveParams& p) {
  beginNode();
  const long long first = (long long)blockIdx.x * (NODE_THREADS * NODE_EACH) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < NODE_EACH; i++) {
    const long long at = first + i * NODE_THREADS;
    if (at >= p.count) return;
    const int e = (int)(at % p.n);
    long long row = at / p.n;
    const int c = (int)(row % p.third);
    row /= p.third;
    const int b = (int)(row % p.second);
    const long long a = row / p.second;
    p.y[a * p.to[0] + b * p.to[1] + c * p.to[2] + e] = p.x[a * p.from[0] + b * p.from[1] + c * p.from[2] + e];
  }
}

constexpr int NODE_STATES = 32; // of attention, that a launch merges at most

struct MergeParams {
  const float* outs[NODE_STATES]; // rows of dim elements, of each state; null where out is
  const float* lses[NODE_STATES]; // a number for each row
  void* out;                      // of any type that tensors have; out or lse may be null
  float* lse;
  long long count;                // elements of an output; without outputs, rows
  int dim, states, outType;       // without outputs dim is 1
};

// The state of the keys of all states, which are normalised:
//
//	lse = ln sum e^lse_i,   out = sum e^(lse_i - lse) out_i
//
// in the order of the states. One of no key has lse_i = -Inf, and its output is not read. out may be
// the first state's, if it is of float32.
__device__ __forceinline__ void mergeStates(const MergeParams& p) {
  constexpr float LOG2E = 1.4426950408889634f, NATURAL = 0.6931471805599453f;
  beginNode();
  const long long first = (long long)blockIdx.x * (NODE_THREADS * NODE_EACH) + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < NODE_EACH; i++) {
    const long long at = first + i * NODE_THREADS;
    if (at >= p.count) return;
    const long long row = at / p.dim;
    float top = -LEAN_INF, sum = 0.f, v = 0.f;
    for (int s = 0; s < p.states; s++) top = fmaxf(top, p.lses[s][row]);
    const float base = top == -LEAN_INF ? 0.f : top; // all may be of no key
    for (int s = 0; s < p.states; s++) {
      const float lse = p.lses[s][row];
      if (lse == -LEAN_INF) continue;
      const float w = exp2_((lse - base) * LOG2E); // NaN where lse is NaN or +Inf
      sum += w;
      if (p.out != nullptr) v = __fmaf_rn(w, p.outs[s][at], v);
    }
    if (p.out != nullptr) storeAs(p.out, at, p.outType, sum == 0.f ? 0.f : v / sum);
    if (p.lse != nullptr && at == row * p.dim) p.lse[row] = sum == 0.f ? -LEAN_INF : __fmaf_rn(log2_(sum), NATURAL, base);
  }
}
