// Entry points of a decoder's nodes that touch each element once, besides those of decoder.cu,
// which are OPT's.
//
// Needed by: every decode.
#include "nodes.cuh"

#define NODE(name, Params, run) \
  extern "C" __global__ void __launch_bounds__(NODE_THREADS) name(const __grid_constant__ Params p) { run(p); }

NODE(node_rms_norm, RMSNormParams, rmsNorm)
NODE(node_rotary, RotaryParams, rotary)
NODE(node_elements, ElementsParams, elements)
NODE(node_move, MoveParams, move)
NODE(node_merge, MergeParams, mergeStates)
