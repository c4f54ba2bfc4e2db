// Entry points of the launches before and after attention with heads whose width no kernel has.
//
// Needed by: attention with such heads on GPUs of 9.0 and newer.
#include "attn_spread.cuh"

extern "C" __global__ void __launch_bounds__(SPREAD_THREADS) spread_rows(const __grid_constant__ SpreadParams p) {
  p.bytes == 2 ? spreadRows<uint2>(p) : spreadRows<float4>(p);
}

extern "C" __global__ void __launch_bounds__(SPREAD_THREADS) gather_rows(const __grid_constant__ SpreadParams p) {
  p.bytes == 2 ? gatherRows<uint2>(p) : gatherRows<float4>(p);
}
