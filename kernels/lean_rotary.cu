// New tokens whose queries and keys a rotary embedding turns on their way, in one launch.
//
// Needed by: layers with rotary embeddings: queries and new keys are turned by the launch that stores these.
#include "attn_rotary.cuh"

extern "C" __global__ void __launch_bounds__(256) lean_append_turned(const __grid_constant__ RotaryAppendParams p) { appendTurned(p); }
