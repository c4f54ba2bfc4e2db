// Entry points of decode attention to keys and values of 8 bits with scales: narrow_<element>_<head dim>; and of the
// kernel that stores new keys and values so.
//
// Needed by: caches of E4M3 and int8.
// No images for: sm_86.
#include "attn_narrow.cuh"
#include "attn_narrow_append.cuh"

NARROW_ATTENTION(narrow_e4m3_64, Float8, 64)
NARROW_ATTENTION(narrow_e4m3_128, Float8, 128)
NARROW_ATTENTION(narrow_int8_64, Integer8, 64)
NARROW_ATTENTION(narrow_int8_128, Integer8, 128)

extern "C" __global__ void __launch_bounds__(256) append_narrow(const __grid_constant__ NarrowAppendParams p) { appendNarrow(p); }
