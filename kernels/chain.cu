// Entry points of chains of layers: chain_<element>_<head dim>, the element that
// of weights, keys and values. There is one for each pair that decoders have
// whose steps are short enough for launches to show.
#include "chain.cuh"

#if __CUDA_ARCH__ >= 900
#define CHAIN(name, T, D) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ ChainParams p) { Chain<T, D>::run(p); }
#else // there are launches for each layer
#define CHAIN(name, T, D) extern "C" __global__ void name(const __grid_constant__ ChainParams p) {}
#endif

CHAIN(chain_f16_64, Half, 64)
CHAIN(chain_f16_80, Half, 80)
CHAIN(chain_f16_128, Half, 128)
CHAIN(chain_bf16_64, Brain, 64)
CHAIN(chain_bf16_80, Brain, 80)
CHAIN(chain_bf16_128, Brain, 128)
