// Linear layers of up to 16 columns of operands whose weights are integers, for compute capability 9.0: gemm_narrow_few.cuh with digits
// (digits.cuh). The elements of a row's slice of x share a power of two.
#pragma once
#include "digits.cuh"
#include "gemm_narrow_few.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Other is a kernel with its own `addPart`, or void.
template <class D, int NT, class Other = void> struct IntegerFew : NarrowFew<typename Either<same<Other, void>, IntegerFew<D, NT>, Other>::type, D, NT> {
  using Base = NarrowFew<typename Either<same<Other, void>, IntegerFew<D, NT>, Other>::type, D, NT>;
  using Base::Base;
  using typename Base::Tile;
  using Base::p, Base::lane, Base::warp, Base::g, Base::q, Base::ranks, Base::rank, Base::firstUnit, Base::deep, Base::factors, Base::pairs;
  using Base::x, Base::zeros, Base::sums, Base::parts, Base::tops, Base::got;
  using Base::STRIPS, Base::ROWS, Base::JOBS, Base::LOG_JOBS, Base::JOB;
  using Base::elements, Base::planeBytes, Base::store1;
  static constexpr int OPERAND = 32, HIGH = D::zeros ? 16 : 1;
  __device__ static __forceinline__ bool makesSums(const NarrowParams& p) { return D::zeros || p.kind == MINIMA; }
  __device__ static __forceinline__ int pairsOf(const NarrowParams& p) { return p.rows; } // lanes q and q+1 have a row's sums
  __device__ static __forceinline__ int each(const NarrowParams&) { return 2; }
  float acc[STRIPS][NT][2]; // sums of rows g and g+8 (times HIGH), of two operands: the second operand's digit counts 256 times
  int part[STRIPS][NT][4];
  u32 columnAt[NT], columnStep[NT]; // address of the lane's operand of 64 columns, and distance to the next 64 columns
  u32 sumAt[NT];                    // address of the lane's sums of x

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < STRIPS * NT * 2; i++) (&acc[0][0][0])[i] = 0.f;
#pragma unroll
    for (int i = 0; i < STRIPS * NT * 4; i++) (&part[0][0][0])[i] = 0;
  }

  // Makes operands of the block's slice of x. A lane's 16 bytes of 64 columns are side by side. Sums of x belong to the columns that share a zero
  // or a minimum: a unit's, or 32. A sum counts the digits of two operands, and the second operand's digits 256 times.
  __device__ __forceinline__ void operands() {
    float v[FEW_TOGETHER][8];
    this->findTops(v);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const bool has = n * 8 + g < p.columns;
      columnAt[n] = (has ? x + (n * 8 + g) * 64 : zeros) + q * 16, columnStep[n] = has ? p.columns * 64 : 0;
      sumAt[n] = sums + (min(n * 8 + 2 * q, p.columns - 2)) * 2;
    }
    syncWarps(FEW_WARPS);
    const int unit = D::K32 == 1 << p.shift ? p.shift : 0; // log2 of 32 columns of a sum
    this->eachPiece(v, [&](const float (&e)[8], int row, int i) {
      const float2 up = powersOf(-digitExponent(__float_as_uint(loadShared(tops + row * 4))));
      u32 n[8];
#pragma unroll
      for (int k = 0; k < 8; k++) n[k] = digitsOf(e[k], up);
      u32 w[2][DIGITS];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u32 a = n[h * 4], b = n[h * 4 + 2], c = n[h * 4 + 1], d = n[h * 4 + 3];
        const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140), AB = __byte_perm(a, b, 0x7362), CD = __byte_perm(c, d, 0x7362);
        w[h][0] = __byte_perm(ab, cd, 0x5410), w[h][1] = __byte_perm(ab, cd, 0x7632);
        w[h][2] = __byte_perm(AB, CD, 0x5410), w[h][3] = __byte_perm(AB, CD, 0x7632);
      }
      const u32 to = x + (i / 2 * p.columns + row * DIGITS) * 64 + q * 16 + i % 2 * 8;
      if (i < deep)
#pragma unroll
        for (int k = 0; k < DIGITS; k++) asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + k * 64), "r"(w[0][k]), "r"(w[1][k]) : "memory");
      if (!makesSums(p)) return;
#pragma unroll
      for (int k = 0; k < DIGITS; k += 2) {
        int sum = sumOf(w[0][k], w[1][k]) + sumOf(w[0][k + 1], w[1][k + 1]) * 65536; // two sums, each below 2^15
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (unit > 0) sum += __shfl_xor_sync(~0u, sum, 4);
        if (unit > 1) sum += __shfl_xor_sync(~0u, sum, 8);
        if (q > 0 || i >= deep || (i & (1 << unit) - 1) > 0) continue;
        const int low = (short)sum;
        store1(sums + ((i >> unit) * p.columns + row * DIGITS + k) * 2, __int_as_float(low + (sum - low >> 16) * 256));
      }
    });
  }
  // Returns the sum of eight signed bytes.
  __device__ static __forceinline__ int sumOf(u32 a, u32 b) { return __dp4a((int)a, 0x01010101, __dp4a((int)b, 0x01010101, 0)); }

  // Adds the products of a job with unit `unit` of the slice. FLUSH: a group has FLUSH times 32 columns; 0: a row is one group.
  template <int FLUSH> __device__ __forceinline__ void multiply(const Tile& t, u32 from, int unit, int piece, int i) {
    constexpr int CHUNKS = NARROW_CHUNKS * 2 / D::K32; // of 64 columns
    const int chunks = p.chunks - (firstUnit + unit) * NARROW_CHUNKS;
    const int there = FLUSH == 1 ? p.groups - 1 - (firstUnit + unit) * factors : 0; // the unit's last group
    const u32 weights = from + i * t.of * JOB + piece * (STRIPS * NARROW_CHUNK) + lane * 16, next = chunks == 1 ? 0 : t.of * STRIPS * NARROW_CHUNK;
    const u32 plane = from + FEW_STAGE + i * factors * t.of * ROWS * 2 + (piece * ROWS + lane / 8 * 8) * 2;
    u32 scale[STRIPS / 2][4], second[STRIPS / 2][4];
    if constexpr (FLUSH > 1) loadFactors(scale, second, plane);
#pragma unroll(FLUSH == 1 ? 1 : 2)
    for (int c = 0; c < D::K32 / 2; c++) { // 64 columns each. x is 0 where a group or a chunk is missing
      uint4 w[CHUNKS][STRIPS], b[NT];
#pragma unroll
      for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int s = 0; s < STRIPS; s++) w[k][s] = loadShared16(weights + (c * CHUNKS + k) * next + s * NARROW_CHUNK);
#pragma unroll
      for (int n = 0; n < NT; n++) b[n] = loadShared16(columnAt[n] + (unit * (D::K32 / 2) + c) * columnStep[n]);
      if constexpr (FLUSH == 1) loadFactors(scale, second, plane + min(2 * c + lane % 2 >> p.shift, there) * t.of * ROWS * 2);
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
          u32 a[4];
          integersOf(D(), a, w[half * (CHUNKS - 1)][s], half);
#pragma unroll
          for (int n = 0; n < NT; n++) multiplyIntegers<D::zeros>(FLUSH == 1 || FLUSH > 1 && c + half == 0, part[s][n], a, half ? b[n].z : b[n].x, half ? b[n].w : b[n].y);
        }
        if constexpr (FLUSH == 1) this->me().template addPart<true>(scale, second, half, unit * D::K32 + 2 * c + half);
      }
    }
    if constexpr (FLUSH > 1) this->me().template addPart<false>(scale, second, 0, unit);
  }

  // Loads scales, and zeros or minima, of rows g and g+8 of the strips. A register has those of two groups. Lanes of even numbers bring the
  // address of the first group, and other lanes that of the second group.
  __device__ __forceinline__ void loadFactors(u32 (&scale)[STRIPS / 2][4], u32 (&second)[STRIPS / 2][4], u32 at) const {
#pragma unroll
    for (int s = 0; s < STRIPS / 2; s++) loadMatrixTransposed(scale[s], at + s * 64);
    if (p.kind != NO_SECOND) {
#pragma unroll
      for (int s = 0; s < STRIPS / 2; s++) loadMatrixTransposed(second[s], at + planeBytes() + s * 64);
    } else {
#pragma unroll
      for (int s = 0; s < STRIPS * 2; s++) second[s / 4][s % 4] = p.zero * 0x10001;
    }
  }

  // Returns the sum of x of number `of`, of the lane's two operands.
  __device__ __forceinline__ int sumOfX(int n, int of) const { return __float_as_int(loadShared(sumAt[n] + of * p.columns * 2)); }

  // Adds the sums of a group times the group's scale. high: which group of a register. of: the number of the sum of x. RUNS: minima may exist.
  template <bool RUNS> __device__ __forceinline__ void addPart(const u32 (&scales)[STRIPS / 2][4], const u32 (&second)[STRIPS / 2][4], int high, int of) {
    if (RUNS && p.kind == MINIMA) {
      float sum[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) sum[n] = (float)sumOfX(n, of);
#pragma unroll
      for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float scale = halfOf(scales[s / 2][s % 2 * 2 + i], high), least = halfOf(second[s / 2][s % 2 * 2 + i], high) * (float)(i ? HIGH : 1);
#pragma unroll
          for (int n = 0; n < NT; n++) acc[s][n][i] += scale * digitSum(part[s][n], i) + least * sum[n];
        }
      return;
    }
    int less[NT][2] = {};
    if constexpr (D::zeros) {
#pragma unroll
      for (int n = 0; n < NT; n++) less[n][0] = -sumOfX(n, of), less[n][1] = less[n][0] * HIGH;
    }
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 zeros = second[s / 2][s % 2 * 2 + i];
        const float scale = halfOf(scales[s / 2][s % 2 * 2 + i], high);
        const int zero = high ? zeros >> 16 : zeros & 0xffff;
#pragma unroll
        for (int n = 0; n < NT; n++) acc[s][n][i] += scale * digitSum(part[s][n], i, zero * less[n][i]);
      }
  }

  // Sends the sums of the warp, as HalfFew does. Lanes q and q+1 have the four operands of a row of x.
  template <bool ROW> __device__ __forceinline__ void send(int log) {
    const int job = warp % JOBS, sources = FEW_WARPS >> log << ranks, source = ((warp / JOBS << LOG_JOBS - log) + (job >> log) << ranks) + rank;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int of = n * 2 + q / 2;
      const float2 down = digitFactors(__float_as_uint(loadShared(tops + min(of, p.rows - 1) * 4)), q % 2 * 16);
#pragma unroll
      for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int eight = ((job & (1 << log) - 1) * STRIPS + s) * 2 + i, to = eight & (p.ranks - 1);
          const float all = (i ? 1.f / HIGH : 1.f) * (ROW ? (float)part[s][n][2 * i] + (float)part[s][n][2 * i + 1] * 256.f : acc[s][n][i]);
          const float sum = all * down.x * down.y, more = __shfl_down_sync(~0u, sum, 1);
          if (q % 2 > 0 || of >= p.rows) continue;
          const u32 at = parts + ((((eight >> ranks) * sources + source) * 8 + g) * pairs + of) * 8;
          if (ranks > 0) send2(remoteAddress(at, to), remoteAddress(got, to), sum, more);
          else store1(at, sum), store1(at + 4, more);
        }
    }
  }
};
#endif
