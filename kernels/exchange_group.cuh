// How the GPUs of a group know of each other in kernels that run on all of them at the same time, and how long one waits for
// another (exchange.cuh, megakernel.cuh).
#pragma once
#include "copy.cuh"

constexpr int EXCHANGE_MEMBERS = 8;
constexpr int EXCHANGE_THREADS = 256;
constexpr int EXCHANGE_BLOCKS = 256;     // at most
constexpr int EXCHANGE_LOOKS = 32;       // how often a thread looks for what it awaits before it looks at the time
constexpr int EXCHANGE_FLAGS = 256;      // where the flags begin, in bytes
constexpr int EXCHANGE_INBOX = EXCHANGE_FLAGS + 2 * EXCHANGE_MEMBERS * EXCHANGE_BLOCKS * 4; // and the inboxes

struct ExchangeState {
  u32 round;  // that has begun last
  u32 begun;  // blocks that have begun the next one
  u32 failed; // not 0: somebody did not answer, and nobody waits any more
};

// What all exchanges of a group have in common.
struct ExchangeGroup {
  char* memory[EXCHANGE_MEMBERS]; // of each member
  u64* status;                    // of this one, in the host's memory: who did not answer, + 1, and in which round
  long long limit;                // of each wait, in nanoseconds
  long long capacity;             // words of an inbox
  int members, me;
};

__device__ __forceinline__ u32 loadRelaxed(const u32* at) {
  u32 x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
__device__ __forceinline__ void storeRelaxed(u32* at, u32 x) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }
__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// A round of a group, as one thread sees it.
struct Exchange {
  const ExchangeGroup& g;
  u32 tag;
  bool failed; // waits for nothing, and writes nothing to others
  int looks = 0;
  u64 since = 0; // it waits

  __device__ __forceinline__ ExchangeState* state(int member) const { return (ExchangeState*)g.memory[member]; }
  // The flag that a block of a member has in another's memory.
  __device__ __forceinline__ u32* flag(int in, int stage, int of, int block) const {
    return (u32*)(g.memory[in] + EXCHANGE_FLAGS) + (stage * EXCHANGE_MEMBERS + of) * EXCHANGE_BLOCKS + block;
  }
  // The words that a member has in another's memory, from one on. Fours of floats have their first two words in the first half of
  // an inbox, and the others in the second: so what a warp stores at once lies side by side, which is what links carry best.
  __device__ __forceinline__ u64* words(int in, int of, long long at) const {
    return (u64*)(g.memory[in] + EXCHANGE_INBOX) + ((tag & 1) * EXCHANGE_MEMBERS + of) * g.capacity + at;
  }

  // The one behind the last, which has ended. 0 is what there is in memory that nobody has written;
  // from the last number on it is 2, of the same parity.
  __device__ __forceinline__ Exchange(const ExchangeGroup& group) : g(group) {
    tag = loadRelaxed(&state(g.me)->round) + 1;
    if (tag == 0) tag = 2;
    failed = loadRelaxed(&state(g.me)->failed) != 0;
  }

  // One of a launch that all members make together, whose number they have.
  __device__ __forceinline__ Exchange(const ExchangeGroup& group, u32 number) : g(group), tag(number) { failed = loadRelaxed(&state(g.me)->failed) != 0; }

  // All threads of the block call it, when they have the tag: the last block moves the round on.
  __device__ __forceinline__ void begun() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(&state(g.me)->begun), "r"(gridDim.x - 1) : "memory");
    if (before == gridDim.x - 1) storeRelaxed(&state(g.me)->round, tag);
  }

  // more says whether to look again for what a member has to send.
  __device__ __forceinline__ bool more(int member) {
    if (failed) return false;
    if (++looks % EXCHANGE_LOOKS != 0) return true;
    failed = loadRelaxed(&state(g.me)->failed) != 0; // others say so
    if (failed) return false;
    const u64 now = nanoseconds();
    if (since == 0) since = now | 1;
    if ((long long)(now - since) < g.limit) return true;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(g.status), "l"((u64)(member + 1) << 32 | tag) : "memory");
#pragma unroll 1
    for (int m = 0; m < g.members; m++) storeRelaxed(&state(m)->failed, 1);
    failed = true;
    return false;
  }

  // Four floats for another member, who has them as its four number i.
  __device__ __forceinline__ void send(int to, long long i, float4 x) const {
    u64* w = words(to, g.me, 2 * i);
    const u64 t = (u64)tag << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1,%2};" ::"l"(w), "l"(t | __float_as_uint(x.x)), "l"(t | __float_as_uint(x.y)) : "memory");
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1,%2};" ::"l"(w + g.capacity / 2), "l"(t | __float_as_uint(x.z)), "l"(t | __float_as_uint(x.w)) : "memory");
  }

  // Says to all others how far the block is. What it has written is seen by who knows.
  __device__ __forceinline__ void tell(int stage) {
    __syncthreads();
    const int m = threadIdx.x;
    if (m < g.members && m != g.me && !failed)
      asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(m, stage, g.me, blockIdx.x)), "r"(tag) : "memory");
  }
  // Waits until the same block of all others is there. It says so to all threads; `lost` is 0 before the first one.
  __device__ __forceinline__ bool await(int stage, int& lost) {
    const int m = threadIdx.x;
    if (m < g.members && m != g.me) {
      const u32* at = flag(g.me, stage, m, blockIdx.x);
      for (;;) {
        u32 x;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
        if (x == tag) break;
        if (!more(m)) {
          lost = 1;
          break;
        }
      }
    }
    __syncthreads();
    return *(volatile int*)&lost == 0;
  }
};
