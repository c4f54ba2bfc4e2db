// Entry points of a decoder's other layers: linear_<element>, and those that
// touch each row once.
//
// Needed by: every decode.
#include "decode_rows.cuh"

// Two blocks on a multiprocessor, where shared memory allows: the next launch's
// begin to read beside this one's.
#define LINEAR(name, T) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ LinearParams p) { Gemv<T>::run(p); }

LINEAR(linear_f16, AsF16)
LINEAR(linear_bf16, AsBF16)
LINEAR(linear_f32, AsF32)

extern "C" __global__ void __launch_bounds__(256) decoder_norm(const __grid_constant__ NormParams p) { norm(p); }
extern "C" __global__ void __launch_bounds__(256) decoder_gather(const __grid_constant__ GatherParams p) { gather(p); }
