// Two kernels for the tests of the build: one of a template, one that spills.
#include <cuda_fp16.h>
#include "tiny.cuh"

namespace {
__device__ int hidden;
}

extern "C" __global__ void tiny_scale(__half* x) { x[threadIdx.x] = scaled<2>(x[threadIdx.x]); }

extern "C" __global__ void __launch_bounds__(1024) tiny_spill(float* x) {
  __shared__ float shared[32];
  float r[80];
  for (int i = 0; i < 80; i++) r[i] = x[i * threadIdx.x];
  for (int k = 0; k < 9; k++) {
#pragma unroll
    for (int i = 0; i < 80; i++) r[i] = r[i] * r[(i + 7) % 80] + shared[k];
    shared[threadIdx.x % 32] = r[0] + hidden;
  }
  for (int i = 0; i < 80; i++) x[i * threadIdx.x] = r[i];
}
