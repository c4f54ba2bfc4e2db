// What is around attention to keys that several sequences share: rows of queries come together
// before it, states merge behind it.
//
// Needed by: caches with forks: a step whose sequences share keys has two launches more.
#include "attn_prefix.cuh"

extern "C" __global__ void __launch_bounds__(PREFIX_THREADS) prefix_gather(const __grid_constant__ PrefixGatherParams p) { prefixGather(p); }
extern "C" __global__ void __launch_bounds__(PREFIX_THREADS) prefix_merge(const __grid_constant__ PrefixMergeParams p) { prefixMerge(p); }
