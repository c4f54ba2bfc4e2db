// Entry points of linear layers whose weights are in super-blocks: narrow_super_<elements>_<columns of operands>; and narrow_super_gather, which
// reads rows of a table. Units narrow and narrow_hopper have the launches before and behind.
//
// Needed by: models in Q4_K, Q5_K or Q6_K on a GPU.
#include "gemm_narrow_super.cuh"

// 8 columns of operands, for a decode step: by clusters, so on 9.0 alone.
NARROW_FEW(narrow_super_int4_8, SuperFew<NarrowInt4, 1>)
NARROW_FEW(narrow_super_int8_8, SuperFew<NarrowInt8, 1>)
NARROW_FEW(narrow_super_integers_int4_8, SuperIntegers<NarrowInt4, 1>)
NARROW_FEW(narrow_super_integers_int8_8, SuperIntegers<NarrowInt8, 1>)
SUPER_MANY(narrow_super_int4_32, NarrowInt4, 4)
SUPER_MANY(narrow_super_int8_32, NarrowInt8, 4)

extern "C" __global__ void __launch_bounds__(NARROW_THREADS) narrow_super_gather(const __grid_constant__ NarrowGatherParams p) { superGather(p); }
