// Entry points of the single-launch decoder: chain_<element>_<head dim>, the element that
// of weights, keys and values. There is one for each pair that decoders have
// whose steps are short enough for launches to show.
//
// Needed by: every decode.
#include "decode_step.cuh"

#if __CUDA_ARCH__ >= 900
#define CHAIN(name, WEIGHTS, KEYS, D, SPLIT) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ DecodeLaunch p) { DecodeStep<WEIGHTS, KEYS, D, SPLIT>::run(p); }
#else // there are launches for each layer
#define CHAIN(name, WEIGHTS, KEYS, D, SPLIT) extern "C" __global__ void name(const __grid_constant__ DecodeLaunch p) {}
#endif

CHAIN(chain_f16_64, AsF16, AsF16, 64, 1)
CHAIN(chain_f16_80, AsF16, AsF16, 80, 1)
CHAIN(chain_f16_128, AsF16, AsF16, 128, 1)
CHAIN(chain_bf16_64, AsBF16, AsBF16, 64, 1)
CHAIN(chain_bf16_80, AsBF16, AsBF16, 80, 1)
CHAIN(chain_bf16_128, AsBF16, AsBF16, 128, 1)
// Of pairs of thread blocks: 4% to 6% less for x that takes one block 72 KB and more, as
// OPT-6.7b has it. Models whose heads are smaller have less x, and are slower so.
CHAIN(chain_f16_128_pairs, AsF16, AsF16, 128, 2)
CHAIN(chain_bf16_128_pairs, AsBF16, AsBF16, 128, 2)
