// Entry points of the megakernel: megakernel_<element>_<head dim>. Weights, keys and values have
// the same element type. There is an entry point for each pair of decoders whose steps are so short
// that launches cost a share of them.
//
// Needed by: every decode.
#include "megakernel.cuh"

#if __CUDA_ARCH__ >= 900
#define MEGAKERNEL(name, WEIGHTS, KEYS, D, SPLIT) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ DecodeLaunch p) { Megakernel<WEIGHTS, KEYS, D, SPLIT>::run(p); }
#else // there are launches for each layer
#define MEGAKERNEL(name, WEIGHTS, KEYS, D, SPLIT) extern "C" __global__ void name(const __grid_constant__ DecodeLaunch p) {}
#endif

MEGAKERNEL(megakernel_f16_64, AsF16, AsF16, 64, 1)
MEGAKERNEL(megakernel_f16_80, AsF16, AsF16, 80, 1)
MEGAKERNEL(megakernel_f16_128, AsF16, AsF16, 128, 1)
MEGAKERNEL(megakernel_bf16_64, AsBF16, AsBF16, 64, 1)
MEGAKERNEL(megakernel_bf16_80, AsBF16, AsBF16, 80, 1)
MEGAKERNEL(megakernel_bf16_128, AsBF16, AsBF16, 128, 1)
// Pairs of thread blocks share x: 4% to 6% less time where x takes 72 KB of a block or more, as in
// OPT-6.7b. Models with smaller heads have a smaller x, and pairs are slower.
MEGAKERNEL(megakernel_f16_128_pairs, AsF16, AsF16, 128, 2)
MEGAKERNEL(megakernel_bf16_128_pairs, AsBF16, AsBF16, 128, 2)
