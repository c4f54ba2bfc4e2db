// The operands that the warps of the megakernel (megakernel.cuh) multiply weights by: columns of x, and of
// gamma and beta, for the tensor core, in shared memory.
#pragma once
#include "copy.cuh"
#include "megakernel_layers.cuh"
#include "tagged.cuh"

// Returns the bits of the largest magnitude of a warp's floats. Magnitudes are in the order of their bits.
template <int N> __device__ __forceinline__ u32 topOf(const float2 (&v)[N]) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < N; i++) top = max(top, max(__float_as_uint(v[i].x) & 0x7fffffffu, __float_as_uint(v[i].y) & 0x7fffffffu));
  return __reduce_max_sync(~0u, top);
}

// PACKS: of packed weights, whose minima may need sums of x. Operands of two steps are side by side, as a lane takes them.
// INTEGERS: operands are digits, which DigitOperands makes.
template <class Math, bool PACKS = false, bool INTEGERS = false> struct DecodeOperands {
  static_assert(Math::Operand::bytes == 2, "numbers are made of two parts of 16 bits");

  using Of = typename Either<INTEGERS, DigitOperands, DecodeOperands>::type; // has `put`

  // What the elements of a row that a warp has at once are scaled by, where the type
  // has few exponents: `up` before they are operands, `down` behind the product.
  struct Scale {
    float up, down;
    template <int N> __device__ __forceinline__ Scale(const float2 (&v)[N]) {
      up = down = 1.f;
      if constexpr (Math::narrow) {
        const int e = exponentOf(__uint_as_float(topOf(v)));
        up = powerOf(-e), down = powerOf(e);
      }
    }
  };

  // The operands of 64 elements of a row, half a box, of which each lane has two: at
  // `to`, DECODE_STRIDE floats for both halves. 16-bit types take two parts of an
  // element. The 16 elements of a step are 64 bytes: what lanes 0 to 3 take of the
  // leading parts, and then of the others.
  __device__ static __forceinline__ void put(float* to, int half, float2 v, const Scale& scale, int lane, bool sums) {
    v.x *= scale.up, v.y *= scale.up;
    if (PACKS && sums) { // of 32 elements
      float sum = v.x + v.y;
#pragma unroll
      for (int i = 8; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
      if (lane % 16 == 0) to[DECODE_SUMS + half * 2 + lane / 16] = sum;
    }
    // The i-th pair of a step's eight: lane i%4 takes it, as its first or second word.
    const int i = lane & 7;
    u32* const at = (u32*)to + half * 64 + (PACKS ? (lane >> 4) * 32 + (i & 3) * 4 + (lane >> 3 & 1) * 2 : (lane >> 3) * 16 + (i & 3) * 2) + (i >> 2);
    const u32 lead = Math::pack(v.x, v.y);
    at[0] = lead, at[PACKS ? 16 : 8] = Math::pack(v.x - Math::low(lead), v.y - Math::high(lead));
    if (Math::narrow && half == 0 && lane == 0) to[DECODE_COLUMNS] = scale.down;
  }

  // What a warp learns of its columns of x, if there is a norm: c, and sums of d and of its squares; of a norm by the
  // root mean square c is 0, and the sum is not needed.
  template <int ROWS> struct Moments { float near[ROWS], sum[ROWS], squares[ROWS]; };

  // A warp's columns of gamma and beta as right operands, behind those of x, which
  // are there at `raw` and in beta's place.
  template <int ROWS> __device__ static __forceinline__ void prepareNorm(float* x, const float* raw, bool gamma, bool beta, int mine, int lane, bool sums = false) {
#pragma unroll 1
    for (int j = 0; j < mine; j++) {
      float* const to = x + (j * (ROWS + 2) + ROWS) * DECODE_STRIDE;
      float2 v[2][2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        v[0][h] = gamma ? *(const float2*)(raw + j * DECODE_COLUMNS + h * 64 + lane * 2) : make_float2(1.f, 1.f);
        v[1][h] = beta ? *(const float2*)(to + DECODE_STRIDE + h * 64 + lane * 2) : make_float2(0.f, 0.f);
      }
      const Scale scales[2] = {v[0], v[1]};
      __syncwarp(); // all lanes have read
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) put(to + i * DECODE_STRIDE, h, v[i][h], scales[i], lane, sums);
    }
  }

  // Boxes of a warp whose columns of x are waited for together: the products of one such
  // batch are made before the next one is looked at.
  static __device__ constexpr int together(int rows) { return rows <= 2 ? 2 : 1; }

  // A warp's columns of x, from `column` on, as right operands at `x`: DECODE_STRIDE
  // floats of each row for a box. Those of box j and the next ones, together() of them.
  //
  // All other thread blocks wait for this one here, and its few instructions wait
  // for each other: their number is what counts. `meanwhile` is what can be done while
  // tagged words of x are on their way for the first time.
  template <int ROWS, bool NORM, bool LLAMA, class F> __device__ static __forceinline__ void prepare(float* x, const float* raw, bool gamma, float offset, const u64* tagged, const float* plain, int in, int column, Moments<ROWS>& moments, u32 run, int j, int mine, int lane, const F& meanwhile, bool sums = false) {
    constexpr int BOXES = together(ROWS), STRIDE = (ROWS + (NORM && !LLAMA ? 2 : 0)) * DECODE_STRIDE;
    const int from = column + j * DECODE_COLUMNS + lane * 2;
    float2 v[ROWS][BOXES * 2] = {}; // of each row, halves of boxes
    const auto place = [&](int m, int i) { return m * in + from + i / 2 * DECODE_COLUMNS + i % 2 * 64; };
    if (tagged != nullptr) {
      bool first = j == 0;
      // One word first, if there are many: as long as that is not there, nothing else is
      // asked for. Of later boxes it is most likely all there.
      if (ROWS > 1 && j == 0 && mine > 1) {
        Tagged2 word;
        do {
          word.load(tagged + from);
          if (first) meanwhile();
          first = false;
        } while (__any_sync(~0u, !word.there(run)));
      }
      Tagged2 words[ROWS][BOXES * 2] = {};
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int i = 0; i < BOXES * 2; i++)
          if (j + i / 2 < mine) {
#pragma unroll
            for (int m = 0; m < ROWS; m++) words[m][i].load(tagged + place(m, i));
          }
        if (first) meanwhile();
        first = false;
#pragma unroll
        for (int i = 0; i < BOXES * 2; i++)
          if (j + i / 2 < mine) {
#pragma unroll
            for (int m = 0; m < ROWS; m++) missing |= !words[m][i].there(run);
          }
      } while (__any_sync(~0u, missing));
#pragma unroll
      for (int i = 0; i < BOXES * 2; i++)
#pragma unroll
        for (int m = 0; m < ROWS; m++) v[m][i] = words[m][i].floats(); // zeros where there is no box
    } else {
#pragma unroll
      for (int i = 0; i < BOXES * 2; i++)
        if (j + i / 2 < mine) {
#pragma unroll
          for (int m = 0; m < ROWS; m++) v[m][i] = *(const float2*)(plain + place(m, i));
        }
    }
    if constexpr (NORM) {
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        if (!LLAMA && j == 0) moments.near[m] = __shfl_sync(~0u, v[m][0].x, 0);
#pragma unroll
        for (int i = 0; i < BOXES * 2; i++) {
          if (j + i / 2 >= mine) break;
          float2 d = v[m][i];
          if (!LLAMA) d.x -= moments.near[m], d.y -= moments.near[m], moments.sum[m] += d.x + d.y;
          moments.squares[m] += d.x * d.x + d.y * d.y;
          if (gamma) {
            const float2 f = *(const float2*)(raw + (j + i / 2) * DECODE_COLUMNS + i % 2 * 64 + lane * 2);
            d.x *= LLAMA ? f.x + offset : f.x, d.y *= LLAMA ? f.y + offset : f.y;
          }
          v[m][i] = d;
        }
      }
    }
    const auto put = [&](int m) {
      const typename Of::Scale scale(v[m]);
#pragma unroll
      for (int i = 0; i < BOXES * 2; i++) {
        if (j + i / 2 >= mine) break;
        Of::put(x + (j + i / 2) * STRIDE + m * DECODE_STRIDE, i % 2, v[m][i], scale, lane, sums);
      }
    };
    put(0);
#pragma unroll
    for (int m = 1; m < ROWS; m++) put(m); // NVRTC 12.4 does not unroll a loop over both rows of digits
    __syncwarp();
  }
};
