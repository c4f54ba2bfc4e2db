// Entry points of the single-launch decoder for blocks of Llama's shape, with norms by the root mean square, gated
// units and rotary embeddings: chain_llama_<element>_<head dim>, as chain.cu has the others.
//
// Needed by: decoders of Llama's shape: what they have more would make the others' kernels slower.
#include "decode_step.cuh"

#if __CUDA_ARCH__ >= 900
#define CHAIN(name, WEIGHTS, KEYS, D, SPLIT) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ DecodeLaunch p) { DecodeStep<WEIGHTS, KEYS, D, SPLIT, true>::run(p); }
#else // there are launches for each layer
#define CHAIN(name, WEIGHTS, KEYS, D, SPLIT) extern "C" __global__ void name(const __grid_constant__ DecodeLaunch p) {}
#endif

CHAIN(chain_llama_f16_64, AsF16, AsF16, 64, 1)
CHAIN(chain_llama_f16_128, AsF16, AsF16, 128, 1)
CHAIN(chain_llama_bf16_64, AsBF16, AsBF16, 64, 1)
CHAIN(chain_llama_bf16_128, AsBF16, AsBF16, 128, 1)
CHAIN(chain_llama_f16_128_pairs, AsF16, AsF16, 128, 2)
CHAIN(chain_llama_bf16_128_pairs, AsBF16, AsBF16, 128, 2)
