// Entry points of kernels that store new keys and values in their pages.
//
// Needed by: every decode.
#include "attn_append.cuh"
#include "attn_rotary.cuh"

extern "C" __global__ void __launch_bounds__(256) append_rows(const __grid_constant__ AppendParams p) { append(p); }

// With a rotary embedding of queries and keys on their way, in one launch.
extern "C" __global__ void __launch_bounds__(256) append_rotated(const __grid_constant__ RotaryAppendParams p) { appendTurned(p); }
