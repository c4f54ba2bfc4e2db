// Entry points of linear layers whose weights have 8 or 4 bits, for compute capability 9.0: narrow_hopper_<elements>_<columns of operands>, and
// the launch behind those of many columns, narrow_hopper_merge_<columns>. Unit narrow has the launch ahead of them.
//
// Needed by: models whose weights have 8 or 4 bits on a GPU of 9.0.
#include "gemm_narrow_groups.cuh"
#include "gemm_narrow_integers.cuh"

#define ELEMENTS(elements, D)                     \
  NARROW_MANY(narrow_hopper_##elements##_32, D, 4) \
  NARROW_MANY(narrow_hopper_##elements##_64, D, 8)

ELEMENTS(int8, NarrowInt8)
ELEMENTS(e4m3, NarrowE4M3)
ELEMENTS(int4, NarrowInt4)
NARROW_FEW(narrow_hopper_int8_8, HalfFew<NarrowInt8, 1>)
NARROW_FEW(narrow_hopper_int8_16, HalfFew<NarrowInt8, 2>)
NARROW_FEW(narrow_hopper_e4m3_8, HalfFew<HopperE4M3, 1>)
NARROW_FEW(narrow_hopper_e4m3_16, HalfFew<HopperE4M3, 2>)
NARROW_FEW(narrow_hopper_int4_8, HalfFew<NarrowInt4, 1>)
NARROW_FEW(narrow_hopper_int4_16, HalfFew<NarrowInt4, 2>)
NARROW_FEW(narrow_hopper_integers_int8_8, IntegerFew<NarrowInt8, 1>)
NARROW_FEW(narrow_hopper_integers_int8_16, IntegerFew<NarrowInt8, 2>)
NARROW_FEW(narrow_hopper_integers_int4_8, IntegerFew<NarrowInt4, 1>)
NARROW_FEW(narrow_hopper_integers_int4_16, IntegerFew<NarrowInt4, 2>)
NARROW_MERGE(narrow_hopper_merge_32, 4)
NARROW_MERGE(narrow_hopper_merge_64, 8)
