// Entry points of the megakernel for blocks of Llama's shape, with norms by the root mean square, gated
// units and rotary embeddings: megakernel_llama_<element>_<head dim>.
//
// Needed by: decoders of Llama's shape: in one kernel for both shapes, the other decoders would be slower.
#include "megakernel.cuh"

#if __CUDA_ARCH__ >= 900
#define MEGAKERNEL(name, WEIGHTS, KEYS, D, SPLIT) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ DecodeLaunch p) { Megakernel<WEIGHTS, KEYS, D, SPLIT, true>::run(p); }
#else // there are launches for each layer
#define MEGAKERNEL(name, WEIGHTS, KEYS, D, SPLIT) extern "C" __global__ void name(const __grid_constant__ DecodeLaunch p) {}
#endif

MEGAKERNEL(megakernel_llama_f16_64, AsF16, AsF16, 64, 1)
MEGAKERNEL(megakernel_llama_f16_128, AsF16, AsF16, 128, 1)
MEGAKERNEL(megakernel_llama_bf16_64, AsBF16, AsBF16, 64, 1)
MEGAKERNEL(megakernel_llama_bf16_128, AsBF16, AsBF16, 128, 1)
MEGAKERNEL(megakernel_llama_f16_128_pairs, AsF16, AsF16, 128, 2)
MEGAKERNEL(megakernel_llama_bf16_128_pairs, AsBF16, AsBF16, 128, 2)
