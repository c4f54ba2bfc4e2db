// Entry points of chains of layers: chain_<element>_<head dim>, the element that
// of weights, keys and values. There is one for each pair that decoders have
// whose steps are short enough for launches to show.
#include "chain.cuh"

#if __CUDA_ARCH__ >= 900
#define CHAIN(name, T, D, SPLIT) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ ChainLaunch p) { Chain<T, D, SPLIT>::run(p); }
#else // there are launches for each layer
#define CHAIN(name, T, D, SPLIT) extern "C" __global__ void name(const __grid_constant__ ChainLaunch p) {}
#endif

CHAIN(chain_f16_64, Half, 64, 1)
CHAIN(chain_f16_80, Half, 80, 1)
CHAIN(chain_f16_128, Half, 128, 1)
CHAIN(chain_bf16_64, Brain, 64, 1)
CHAIN(chain_bf16_80, Brain, 80, 1)
CHAIN(chain_bf16_128, Brain, 128, 1)
// Of pairs of thread blocks: 4% to 6% less for x that takes one block 72 KB and more, as
// OPT-6.7b has it. Models whose heads are smaller have less x, and are slower so.
CHAIN(chain_f16_128_pairs, Half, 128, 2)
CHAIN(chain_bf16_128_pairs, Brain, 128, 2)
