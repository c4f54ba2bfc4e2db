// Entry points of the megakernel for weights of 8 and 4 bits and blocks of Llama's shape: megakernel_packed_llama_<element>_<head dim>. The element is
// that of keys and values, and of layers whose weights have 16 bits.
//
// Needed by: models whose weights have 8 or 4 bits on a GPU of 9.0.
// No images for: sm_80, sm_86, sm_89, compute_90.
#include "megakernel_packed.cuh"
#include "megakernel.cuh"

#if __CUDA_ARCH__ >= 900
#define MEGAKERNEL(name, FORMAT, D) \
  extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ DecodeLaunch p) { Megakernel<FORMAT, FORMAT, D, 1, true, true>::run(p); }
#else // there are launches for each layer
#define MEGAKERNEL(name, FORMAT, D) extern "C" __global__ void name(const __grid_constant__ DecodeLaunch p) {}
#endif

MEGAKERNEL(megakernel_packed_llama_f16_64, AsF16, 64)
MEGAKERNEL(megakernel_packed_llama_f16_128, AsF16, 128)
MEGAKERNEL(megakernel_packed_llama_bf16_64, AsBF16, 64)
MEGAKERNEL(megakernel_packed_llama_bf16_128, AsBF16, 128)
