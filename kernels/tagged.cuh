// Floats that one thread block hands to others of the same launch, each in a word
// with the number of the run that made it: whoever reads the word knows by
// that number whether the float is there. No counter, no fence, and a single way
// through the L2 cache, where a barrier of all blocks takes three.
#pragma once
#include "types.cuh"

__device__ __forceinline__ u64 taggedOf(u32 run, float x) { return (u64)run << 32 | __float_as_uint(x); }

__device__ __forceinline__ void storeTagged(u64* at, u32 run, float x) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(taggedOf(run, x)) : "memory");
}
__device__ __forceinline__ void storeTagged2(u64* at, u32 run, float x, float y) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1,%2};" ::"l"(at), "l"(taggedOf(run, x)), "l"(taggedOf(run, y)) : "memory");
}
__device__ __forceinline__ u64 loadWord(const u64* at) {
  u64 a;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(a) : "l"(at) : "memory");
  return a;
}
// Two words that were asked for. Who looks at them waits for them.
struct Tagged2 {
  u64 a, b;
  __device__ __forceinline__ void load(const u64* at) { asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];" : "=l"(a), "=l"(b) : "l"(at) : "memory"); }
  __device__ __forceinline__ bool there(u32 run) const { return (u32)(a >> 32) == run && (u32)(b >> 32) == run; }
  __device__ __forceinline__ float2 floats() const { return make_float2(__uint_as_float((u32)a), __uint_as_float((u32)b)); }
};
// Says whether what it has read is there.
__device__ __forceinline__ bool loadTagged2(const u64* at, u32 run, float& x, float& y) {
  Tagged2 words;
  words.load(at);
  x = words.floats().x, y = words.floats().y;
  return words.there(run);
}
