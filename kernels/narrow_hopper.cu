// Entry points of linear layers whose weights have 8 or 4 bits, for compute capability 9.0: narrow_hopper_<elements>_<columns of operands>, and
// the launch behind those of many columns, narrow_hopper_merge_<columns>. Unit narrow has the launch ahead of them.
//
// Needed by: models whose weights have 8 or 4 bits on a GPU of 9.0.
#include "gemm_narrow_few.cuh"
#include "gemm_narrow_groups.cuh"

#define ELEMENTS(elements, D)                     \
  NARROW_FEW(narrow_hopper_##elements##_8, D, 1)  \
  NARROW_FEW(narrow_hopper_##elements##_16, D, 2) \
  NARROW_MANY(narrow_hopper_##elements##_32, D, 4) \
  NARROW_MANY(narrow_hopper_##elements##_64, D, 8)

ELEMENTS(int8, NarrowInt8)
ELEMENTS(e4m3, NarrowE4M3)
ELEMENTS(int4, NarrowInt4)
NARROW_MERGE(narrow_hopper_merge_32, 4)
NARROW_MERGE(narrow_hopper_merge_64, 8)
