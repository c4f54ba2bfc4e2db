// Entry points of linear layers whose weights have 8 or 4 bits: narrow_<elements>_<columns of operands>, for half as many rows if x is in
// two parts; narrow_operands, which makes the operands; narrow_gather, which reads rows of a table.
//
// Needed by: models whose weights have 8 or 4 bits on a GPU.
#include "gemm_narrow.cuh"

// A kernel of 8 columns for a decode step; more columns than a launch has would be products of zeros. Unit narrow_hopper has those for 9.0.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define NARROW(name, D, NT, BLOCKS) extern "C" __global__ void name(const __grid_constant__ NarrowParams p) {}
#else
#define NARROW(name, D, NT, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(NARROW_THREADS, BLOCKS) name(const __grid_constant__ NarrowParams p) { NarrowGemm<D, NT>::run(p); }
#endif

NARROW(narrow_int8_8, NarrowInt8, 1, 2)
NARROW(narrow_int8_16, NarrowInt8, 2, 2)
NARROW(narrow_int8_32, NarrowInt8, 4, 2)
NARROW(narrow_int8_64, NarrowInt8, 8, 1)
NARROW(narrow_e4m3_8, NarrowE4M3, 1, 2)
NARROW(narrow_e4m3_16, NarrowE4M3, 2, 2)
NARROW(narrow_e4m3_32, NarrowE4M3, 4, 2)
NARROW(narrow_e4m3_64, NarrowE4M3, 8, 1)
NARROW(narrow_int4_8, NarrowInt4, 1, 2)
NARROW(narrow_int4_16, NarrowInt4, 2, 2)
NARROW(narrow_int4_32, NarrowInt4, 4, 2)
NARROW(narrow_int4_64, NarrowInt4, 8, 1)

extern "C" __global__ void __launch_bounds__(NARROW_THREADS) narrow_operands(const __grid_constant__ NarrowOperandParams p) { narrowOperands(p); }
extern "C" __global__ void __launch_bounds__(NARROW_THREADS) narrow_gather(const __grid_constant__ NarrowGatherParams p) { narrowGather(p); }
