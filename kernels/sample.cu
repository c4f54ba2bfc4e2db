// Entry points of choosing tokens. Greedy has one of its own: it reads each logit
// once, and with half of the registers twice as many threads fit.
//
// Needed by: every decode.
#include "sample_tokens.cuh"

extern "C" __global__ void __launch_bounds__(1024) sample_greedy(const __grid_constant__ SampleParams p) { sampleGreedy(p); }
extern "C" __global__ void __launch_bounds__(1024) sample_random(const __grid_constant__ SampleParams p) { sampleRandom(p); }
