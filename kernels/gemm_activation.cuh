// What a linear layer makes of its sums.
#pragma once

enum : int { NO_ACTIVATION = 0, RELU = 1, GELU = 2 }; // as the host has them

// v times the probability that a normal variable is below v, as it is commonly computed:
// where v is below -1, the sum loses digits of a small result, and 2^-24 of v is lost.
//
// It is called: code that is there but jumped over is fetched, and most models have no use
// for this.
__device__ __noinline__ float gelu(float v) { return 0.5f * v * (1.f + erff(0.70710678f * v)); }

// NaN stays NaN.
__device__ __forceinline__ float activated(int activation, float v) {
  if (activation == RELU && v < 0.f) v = 0.f;
  if (activation == GELU) v = gelu(v);
  return v;
}
