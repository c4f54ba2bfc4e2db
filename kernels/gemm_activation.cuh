// What a linear layer makes of its sums.
#pragma once

enum : int { NO_ACTIVATION = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4 }; // as the host has them

// Beside an activation: of the layer's two parts the first is a gate, f(gate) up. Only what is
// compiled with GATES knows it, and an activation behind GELU.
enum : int { GATED = 64 };

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

// v times the sigmoid of u. What the exponential is off by where u is large does not matter there.
__device__ __forceinline__ float bySigmoid(float v, float u) { return v / (1.f + exp2_(-1.44269504f * u)); }

__device__ __forceinline__ float activatedAny(int activation, float v) {
  if (activation == SILU) return bySigmoid(v, v);
  // (1 + tanh(u))/2 is the sigmoid of 2u, and u is sqrt(2/pi) (v + 0.044715 v^3).
  if (activation == GELU_TANH) return bySigmoid(v, v * (1.59576912f + 0.0713548163f * v * v));
  return activated(activation, v);
}
