// Entry points of attention with dropout: dropout_<element>_<head dim>, for head dims up to that one.
//
// Needed by: training: attention with dropout on a GPU.
#include "attn_dropout.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DROPOUT(name, T, D, TOGETHER) \
  extern "C" __global__ void __launch_bounds__(384, 1) name(const __grid_constant__ DropoutParams p) { DropoutHopper<T, D>::run(p.p); }
#else // thread blocks on a multiprocessor: with heads of 64 they share it
#define DROPOUT(name, T, D, TOGETHER) \
  extern "C" __global__ void __launch_bounds__(256, TOGETHER) name(const __grid_constant__ DropoutParams p) { Dropout<T, D>::run(p.p); }
#endif

DROPOUT(dropout_f16_64, AsF16, 64, 2)
DROPOUT(dropout_f16_128, AsF16, 128, 1)
DROPOUT(dropout_bf16_64, AsBF16, 64, 2)
DROPOUT(dropout_bf16_128, AsBF16, 128, 1)
