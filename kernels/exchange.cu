// Entry points of what the GPUs of a group sum, gather and merge.
//
// Needed by: groups of GPUs: what each of them has made in part is summed, gathered or merged in a kernel on all of them, in 1 to 2 us where a fork and a join of streams take 12.
#include "exchange_argmax.cuh"

#define EXCHANGE(name, Params, run) \
  extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS) name(const __grid_constant__ Params p) { run(p); }

EXCHANGE(exchange_all_reduce_few, AllReduceParams, allReduceFew<false>)
EXCHANGE(exchange_all_reduce_many, AllReduceParams, allReduceMany<false>)
EXCHANGE(exchange_reduce_scatter_few, AllReduceParams, allReduceFew<true>)
EXCHANGE(exchange_reduce_scatter_many, AllReduceParams, allReduceMany<true>)
EXCHANGE(exchange_all_gather_few, AllGatherParams, allGatherFew)
EXCHANGE(exchange_all_gather_many, AllGatherParams, allGatherMany)
EXCHANGE(exchange_merge_states_few, MergeStatesParams, mergeStatesFew)
EXCHANGE(exchange_merge_states_many, MergeStatesParams, mergeStatesMany)

// As many threads as a block of sample_greedy has at most.
extern "C" __global__ void __launch_bounds__(1024) exchange_all_arg_max(const __grid_constant__ AllArgMaxParams p) { allArgMax(p); }

// A launch that does nothing, for measurements.
extern "C" __global__ void __launch_bounds__(EXCHANGE_THREADS) exchange_nothing(const __grid_constant__ AllReduceParams p) { beginExchange(); }
