// Entry points of decode attention to keys and values of 4 bits, q4_<head dim>, and of the kernel that stores new ones so.
//
// Needed by: caches of Q4.
// No images for: sm_86, sm_89.
#include "attn_q4.cuh"
#include "attn_q4_append.cuh"

FOUR_ATTENTION(q4_64, 64)
FOUR_ATTENTION(q4_128, 128)

extern "C" __global__ void __launch_bounds__(256) append_q4(const __grid_constant__ RotaryAppendParams p) { appendFour(p); }
