// Prefill by products of single warps (mma.sync), on GPUs that have no others.
// The scheme is FlashAttention-2's (Dao, arXiv:2307.08691, section 3).
//
// An output tile is a sequence, a KV head and ROWS rows: query positions x heads of the group. Each of
// WARPS warps has 16*TILES of them. Queries stay in shared memory; all threads bring keys and
// values, KEYS of them at a time, through a ring of STAGES: the keys of a step, then its values. Scores
// become weights where they are, and these are the left operand of their product with values.
// Each matrix of keys or values that a warp loads is multiplied by all its rows: with 32 of them the
// tensor cores, not the shared memory, are the limit. Two thread blocks of a multiprocessor fill each other's
// gaps: one multiplies while the other computes exponentials.
//
// The keys are walked from the last to the first: only the first steps have to mask, and with a window the last ones.
// Those in front of it are left out but for sink tokens. A warp leaves out steps of which none of its rows sees a key. Parts of output tiles are those of all such kernels.
//
// Where queries or outputs have more bits than operands of products, these are sums of two
// parts (PRECISE), and both parts are multiplied. Products of small parts have sums of their own. What values
// come to in a step is added to the output by an instruction that rounds: products cut off, which
// thousands of steps would show.
#pragma once
#include "attn_prefill_rows.cuh"

// Keys of a step and stages, where queries of two thread blocks take 64 KB: multiprocessors of 8.0 have 164 KB of shared
// memory, those of 8.6, 8.9 and 12.0 have 100.
#if __CUDA_ARCH__ == 800
#define STEP 64, 3
#else
#define STEP 32, 2
#endif

template <class T, class V, int D, int WARPS, int TILES, int KEYS, int STAGES, bool PRECISE = false, bool ANY = PRECISE>
struct PrefillMma : PrefillRows<T, V, D, WARPS * TILES * 16, KEYS, PRECISE, ANY> {
  using Rows = PrefillRows<T, V, D, WARPS * TILES * 16, KEYS, PRECISE, ANY>;
  using typename Rows::Math, typename Rows::Operand, typename Rows::Scores, typename Rows::Softmax, typename Rows::Store, typename Rows::Tile;
  using Rows::BLOCKS, Rows::PARTS, Rows::QUERY, Rows::SCORED, Rows::STAGE;
  static constexpr int ROWS = WARPS * TILES * 16; // of an output tile
  // Thread blocks of a multiprocessor. Heads of 64 leave registers for three of them where scores are not modified, and 8.0 has
  // the shared memory.
#if __CUDA_ARCH__ == 800
  static constexpr int THREADS = WARPS * 32, TOGETHER = WARPS == 4 && D == 64 && !SCORED ? 3 : 8 / WARPS;
#else
  static constexpr int THREADS = WARPS * 32, TOGETHER = 8 / WARPS;
#endif
  static constexpr int COPIED = THREADS / 8, ROUNDS = KEYS / COPIED; // rows of keys that are copied at once, and how often
  static_assert(KEYS % COPIED == 0 && ROUNDS * 4 <= 32 && STAGES >= 2);

  __device__ static __forceinline__ void run(const PrefillParams& p) {
    extern __shared__ __align__(1024) char memory[];
    const u32 query = sharedAddress(memory), ring = query + PARTS * QUERY, factors = ring + STAGES * STAGE;
    waitForEarlier();
    if (threadIdx.x == 0) letNextStart();
    const int end = p.starts[blockIdx.x + 1];
#pragma unroll 1
    for (int i = p.starts[blockIdx.x]; i < end; i++) attend(p, i, query, ring, factors);
    Rows::writeFullyMasked(p, threadIdx.x, THREADS);
  }

  // Brings keys and values of a sequence and a head.
  struct Loader {
    int keys, pages, head; // live keys; the first entry of the block table, or the page itself; the head's first row in a page
    int row;               // of the keys of a step: each lane's of number 4*warp + lane%4 + lane/4*COPIED. Behind the last key that one's

    __device__ __forceinline__ void look(const PrefillParams& p, int first) {
      const int key = min(first + (int)threadIdx.x / 32 * 4 + (int)threadIdx.x % 4 + (int)threadIdx.x % 32 / 4 * COPIED, keys - 1);
      if (p.pages == nullptr) {
        row = pages * p.pageRows + head + key;
      } else {
        const int page = key / p.pageTokens;
        row = p.pages[pages + page] * p.pageRows + head + key - page * p.pageTokens;
      }
    }
    // Keys or values of a step, of which look has the rows. Behind the last one there are zeros, and where `hidden` is
    // so for a key of the step.
    template <class Hidden> __device__ __forceinline__ void bring(const void* from, int first, u32 slot, const Hidden& hidden) const {
      const int r = threadIdx.x / 8, c = threadIdx.x % 8, live = keys - first - r;
      const u32 to = slot + swizzled(r, c * 16);
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const char* const source = (const char*)from + c * 16 + (long long)__shfl_sync(~0u, row, threadIdx.x % 32 / 8 + i * 4) * (D * Store::bytes);
#pragma unroll
        for (int j = 0; j < BLOCKS; j++)
          if ((j + 1) * 8 <= D / 8 || c < D / 8 - j * 8) copy16(to + i * COPIED * 128 + j * KEYS * 128, source + j * 128, i * COPIED < live && !hidden(first + r + i * COPIED));
      }
    }
  };

  __device__ static __forceinline__ void attend(const PrefillParams& p, int tile, u32 query, u32 ring, u32 factors) {
    constexpr int AHEAD = STAGES - 1; // so many keys and values are on their way while others are multiplied
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tile t;
    t.open(p, tile);
    const int first = t.first + warp * (TILES * 16); // the warp's rows
    const auto seen = [&](int row) { return p.causal ? min(t.s.keys, t.s.keys - t.s.queries + row / p.group + 1) : t.s.keys; };
    const int all = seen(first), most = seen(first + TILES * 16 - 1); // keys that every row of the warp sees, and that any does
    // Where the lane has a row of the matrices that it loads: of queries and values, and of keys.
    const u32 left = swizzled(lane % 16, lane / 16 * 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);

    __syncthreads(); // everybody has left the output tile before
    if constexpr (PRECISE) Rows::template bringParts<THREADS>(p, t, query, factors, threadIdx.x);
    else Rows::template bringQueries<THREADS>(p, t, query, threadIdx.x);
    Loader loader = {t.s.keys, t.s.pages, t.head * p.headRows, 0};
    // Whether no row sees a key: its value may be anything, and no weight of 0 makes a number of what is none.
    const auto hidden = [&](int key) {
      if constexpr (SCORED) return key >= scoreOf(p).sinkTokens && key < t.hidden;
      return false;
    };
    // Brings what is the ahead-th behind the keys of a step, a group of copies in any case: waits count these. Its rows
    // have been looked up while others were multiplied.
    const auto bring = [&](int step, int ahead, u32 slot) {
      const int of = step - ahead / 2;
      if (of >= t.begin) {
        loader.bring(ahead % 2 == 0 ? p.keys : p.values, t.keyOf(of), slot, hidden);
        if (ahead % 2 == 1 && of > t.begin) loader.look(p, t.keyOf(of - 1));
      }
      copyCommit();
    };
    if (t.begin < t.end) loader.look(p, t.keyOf(t.end - 1));
#pragma unroll
    for (int i = 0; i < AHEAD; i++) bring(t.end - 1, i, ring + i * STAGE);
    u32 slot = ring, before = ring + AHEAD * STAGE;
    // The keys of a step (0) or its values (1) are there, and others may have the place of those before.
    const auto next = [&](int step, int number) {
      copyWait<AHEAD - 1>();
      __syncthreads();
      bring(step, AHEAD + number, before);
      before = slot;
      slot = slot == ring + AHEAD * STAGE ? ring : slot + STAGE;
      return before;
    };

    float o[TILES][D / 8][4], s[TILES][KEYS / 8][4];
    u32 w[TILES][KEYS / 16][PARTS][4]; // weights as operands
    Softmax m[TILES];
    float by[TILES][2]; // that makes scores of products, where they are changed
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      m[i] = Rows::softmaxOf(p), by[i][0] = by[i][1] = p.scale;
#pragma unroll
      for (int j = 0; j < D / 8; j++) o[i][j][0] = o[i][j][1] = o[i][j][2] = o[i][j][3] = 0.f;
    }
#pragma unroll 1
    for (int c = t.end - 1; c >= t.begin; c--) {
      const int key = t.keyOf(c);
      const bool some = key < most;
      const u32 keys = next(c, 0);
      if constexpr (PRECISE) {
        if (c == t.end - 1) {
          const u32 mine = factors + (warp * (TILES * 16) + lane / 4) * 4;
#pragma unroll
          for (int i = 0; i < TILES; i++) Rows::multiply(p, by[i], m[i].scale, loadShared(mine + i * 64), loadShared(mine + i * 64 + 32));
        }
      }
      if (some) {
        scores(s, query + warp * (TILES * 16 * 128) + left, keys + right);
        if constexpr (SCORED)
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            const int row = warp * (TILES * 16) + i * 16 + lane / 4, sees[2] = {seen(t.first + row), seen(t.first + row + 8)};
            Scores(p, t, row, row - lane / 4 + 15).apply(s[i], by[i], key, sees, lane);
          }
        if (key + KEYS > all) {
#pragma unroll
          for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int sees = seen(first + i * 16 + lane / 4 + h * 8) - key - lane % 4 * 2;
#pragma unroll
              for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                  if (j * 8 + e >= sees) s[i][j][2 * h + e] = -LEAN_INF;
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          m[i].weigh(s[i]);
#pragma unroll
          for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const float x = s[i][2 * k + e / 2][e % 2 * 2], y = s[i][2 * k + e / 2][e % 2 * 2 + 1];
              if constexpr (PRECISE) Rows::splitOf(x, y, w[i][k][0][e], w[i][k][1][e]);
              else w[i][k][0][e] = Operand::pack(x, y);
            }
        }
      }
      const u32 values = next(c, 1);
      if (some) add(o, w, m, values + left);
    }
    t.open(p, tile); // it would take registers
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int row = warp * (TILES * 16) + i * 16;
      if (Rows::merged(p, t, o[i], m[i], row * 2 + lane)) Rows::epilogue(p, t, o[i], m[i], row + lane / 4, lane);
    }
    copyWait<0>(); // queries of an output tile without keys
  }

  // Scores of a warp's rows and a step's keys.
  __device__ static __forceinline__ void scores(float (&s)[TILES][KEYS / 8][4], u32 query, u32 keys) {
    float small[PRECISE ? TILES : 1][PRECISE ? KEYS / 8 : 1][4]; // of the small parts
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[i][j][e] = 0.f;
          if constexpr (PRECISE) small[i][j][e] = 0.f;
        }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      u32 q[PARTS][TILES][4];
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < TILES; i++) loadMatrix(q[part][i], (query ^ k % 4 * 32) + part * QUERY + k / 4 * (ROWS * 128) + i * 16 * 128);
#pragma unroll
      for (int j = 0; j < KEYS / 8; j += 2) {
        u32 b[4];
        loadMatrix(b, (keys ^ k % 4 * 32) + k / 4 * (KEYS * 128) + j * 8 * 128);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          Math::mma(s[i][j], q[0][i], b[0], b[1]);
          Math::mma(s[i][j + 1], q[0][i], b[2], b[3]);
          if constexpr (PRECISE) {
            Math::mma(small[i][j], q[1][i], b[0], b[1]);
            Math::mma(small[i][j + 1], q[1][i], b[2], b[3]);
          }
        }
      }
    }
    if constexpr (PRECISE)
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) s[i][j][e] += small[i][j][e];
  }

  // Weights times values, added to what weights before those of this step have come to.
  __device__ static __forceinline__ void add(float (&o)[TILES][D / 8][4], const u32 (&w)[TILES][KEYS / 16][PARTS][4], const Softmax (&m)[TILES], u32 values) {
    const auto load = [&](u32 (&b)[4], int n, int k) { loadMatrixTransposed(b, (values ^ n % 4 * 32) + n / 4 * (KEYS * 128) + k * 16 * 128); };
    if constexpr (PRECISE) {
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
        float more[TILES][2][4] = {};
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
          u32 b[4];
          load(b, n, k);
#pragma unroll
          for (int part = 1; part >= 0; part--)
#pragma unroll
            for (int i = 0; i < TILES; i++) Math::mma(more[i][0], w[i][k][part], b[0], b[1]), Math::mma(more[i][1], w[i][k][part], b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
          for (int j = 0; j < 2; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][2 * n + j][e] = __fmaf_rn(o[i][2 * n + j][e], m[i].shrink[e / 2], more[i][j][e]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) o[i][j][e] *= m[i].shrink[e / 2];
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
          u32 b[4];
          load(b, n, k);
#pragma unroll
          for (int i = 0; i < TILES; i++) Math::mma(o[i][2 * n], w[i][k][0], b[0], b[1]), Math::mma(o[i][2 * n + 1], w[i][k][0], b[2], b[3]);
        }
      }
    }
  }
};
