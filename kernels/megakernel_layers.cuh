// Arguments of the megakernel (megakernel.cuh), which the host writes: those of the
// launch, and the descriptor of each layer, in memory.
#pragma once
#include "megakernel_attention.cuh"
#include "exchange_group.cuh"
#include "decode_rows.cuh"
#include "rotary.cuh"

constexpr int DECODE_WARPS = 8, DECODE_ROWS = 4;
constexpr int DECODE_TILE = 16;           // rows of W
constexpr int DECODE_BOX = 4096;          // bytes: 256 of each row of a tile
constexpr int DECODE_COLUMNS = 128;       // elements of a row in it
constexpr int DECODE_GROUP = 8;           // tiles x rows (gamma and beta are some too) whose sums meet at once
constexpr int DECODE_FIXED = 14336;       // bytes of what each block has, see Megakernel::Fixed
constexpr int DECODE_FIXED_PAIRS = 21504; // the same of a block of a pair
constexpr int DECODE_STRIDE = 144;        // floats of a box's columns of a row: operands, and a factor of their products
constexpr int DECODE_SUMS = DECODE_COLUMNS + 4; // of them: sums of 32 elements each, of layers with packed weights that have minima

// What a warp has to know of a norm to ask for its columns of gamma and beta.
struct DecodeAffine {
  const float *gamma, *beta; // may be null
  int place, boxes, most;    // as that layer has them; no boxes: there is no norm
};

// The GPUs that have such a launch at the same time, where a layer's y is the sum of what all make of it: who finishes an
// element stores it in the memory of all others, as a tagged float, and waits for theirs in its own. On all GPUs the same
// thread finishes an element, after the same ones, so none waits for one that waits for it.
struct DecodeExchange {
  static constexpr int AT_ONCE = 3; // others that are asked at the same time: more of them would spill registers

  const ExchangeGroup* group;
  const u64* from;           // what comes: members x stride elements
  u64* to[EXCHANGE_MEMBERS]; // where the others have this one's
  int members, me, stride;   // members 0: the layer is this GPU's alone

  __device__ __forceinline__ float sum(long long i, u32 run, float v) const {
#pragma unroll 1
    for (int m = 0; m < members; m++)
      if (m != me) asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to[m] + i), "l"(taggedOf(run, v)) : "memory");
    float all = me == 0 ? v : 0.f;
#pragma unroll 1
    for (int first = 0; first < members - 1; first += AT_ONCE) { // of the others, in the order of the GPUs: all get the same bits
      const u64* at[AT_ONCE];
      u32 value[AT_ONCE], tag[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        const int other = min(first + j, members - 2);
        at[j] = from + (long long)(other + (other >= me)) * stride + i;
      }
      const auto look = [&]() {
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          asm volatile("{ .reg .b64 word; ld.relaxed.sys.global.b64 word, [%2]; mov.b64 {%0,%1}, word; }" : "=r"(value[j]), "=r"(tag[j]) : "l"(at[j]) : "memory");
        int missing = -1;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (tag[j] != run) missing = min(first + j, members - 2);
        return missing;
      };
      int missing = look();
      if (missing >= 0)
        for (Exchange round(*group, run); missing >= 0 && round.more(missing + (missing >= me));) missing = look();
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
        if (first + j < members - 1) {
          const float x = __uint_as_float(value[j]);
          all = first + j == 0 && me > 0 ? x : all + x;
          if (first + j + 1 == me) all += v;
        }
    }
    return all;
  }
};

// One layer of x, or several of the same, or a gated unit: that has the tiles of one part, and who has a tile of
// the gate has the same one of what it is for.
struct DecodeLinear {
  const u64* tagged; // x: rows x in; null: it was there before the launch, and is
  const float* x;    // here
  const u64* residualTagged; // likewise, rows x out of part 0; both may be null
  const float* residual;
  const float *gamma, *beta;   // of the norm; may be null
  const float* b[LINEAR_PARTS]; // may be null
  float* y[LINEAR_PARTS];       // rows x out
  u64* made[LINEAR_PARTS];      // the same, tagged; null: no layer of the launch reads it
  int out[LINEAR_PARTS];
  int tiles[LINEAR_PARTS]; // up to the end of each part
  int shift;               // the thread block that has tile 0; the next one has tile 1, and so on, round and round
  int each, rest;          // tiles that all blocks have, and how many blocks have one more
  int woven;               // see Megakernel::tileAt
  int in, most;            // a multiple of DECODE_COLUMNS; boxes of a tile that a warp has, the first ones
  int place;               // of x in the area, in bytes
  int ready;               // the layer before has asked for gamma and beta
  int norm, activation;
  float eps, inverse;      // 1/in
  float offset;            // as LinearParams has it
  int workers;             // warps that have boxes: of a block, or of a pair's first one, and (<< 8) of its second
  DecodeAffine next;        // of the layer behind, if this one asks for it
  DecodeExchange exchange;  // of a layer without a norm
};

struct DecodeAttention {
  Params p;
  Links links;
};

enum : int { DECODE_LINEAR = 0, DECODE_ATTENTION = 1, DECODE_FOUR = 2, DECODE_EIGHT = 3, DECODE_E4M3 = 4 }; // the last three: linear, with packed weights
constexpr int DECODE_BODY = 368; // bytes of a layer without its maps

struct alignas(128) DecodeLayer {
  TensorMap maps[LINEAR_PARTS]; // of W, or of keys and values
  char body[DECODE_BODY];
  int kind;
};
static_assert(sizeof(DecodeLinear) <= DECODE_BODY && sizeof(DecodeAttention) <= DECODE_BODY && sizeof(DecodeLayer) == 768, "");

// What a warp has to know of a layer to ask for its weights.
struct alignas(16) DecodeFeed {
  const TensorMap* maps;
  u16 boxes, most; // in a tile, and of them a warp's
  int tiles, shift;
  int second, third; // the first tiles of parts 1 and 2; third 0: a gated unit, whose parts' tiles come in turn
  int woven;         // see tileAt
};

struct DecodeParams {
  const DecodeLayer* layers;
  const DecodeFeed* feeds; // of the linear ones
  const Work* work;       // of attention: the same in all layers
  const int* masked;
  u32* run;               // the number of the last run, and how many thread blocks are done
  int count, feedCount;
  int rows;   // of x
  int stages; // of a warp's ring, in boxes
  int area;   // bytes that x and attention have in turn
  int slots;  // of attention's ring
  u32 slotsInverse; // see RingState
};

// What a launch does before its first layer, and behind its last one.
struct DecodeEnds {
  GatherParams gather;   // the embedding gather: rows of tables that layers read; without a y there are none
  u64* gathered;         // the sum, or y where there is no second table: tagged
  const float* logits;   // what the last layer makes: rows x vocabulary
  int* ids;              // the most likely token of each row, see sampleGreedy; null: nobody asks
  int vocabulary;
  int shift, each, rest; // of that layer
};

// The rotary embedding of all attention: pair i is elements i and D/2+i of a head of D.
struct DecodeTurns {
  const long long* positions; // of each row; null: there is none
  float factor;
  u64 turns[64];
};

struct DecodeLaunch {
  DecodeParams p;
  DecodeEnds ends;
  DecodeTurns turns; // of what is compiled with LLAMA alone
};

// Types for packed weights: megakernel_packed.cuh has the definitions, and comes before megakernel.cuh in units of packed weights.
struct DigitOperands;
#if __CUDA_ARCH__ >= 900
struct DecodePackedFeed;
struct DecodePacked;
struct PackedFour;
struct PackedEight;
struct IntegerFour;
struct IntegerEight;
template <class W> struct PackedBlocks;
template <class W> struct IntegerBlocks;
template <class W> __device__ __forceinline__ bool needsSums(const DecodeLinear&) { return false; }
template <class W> constexpr bool integers = same<W, IntegerFour> || same<W, IntegerEight>; // whether operands of x are digits (digits.cuh)

// In place of PackedBlocks, for layers of 16-bit weights.
struct NoBlocks {
  template <class... A> __device__ __forceinline__ NoBlocks(A...) {}
};
#endif
