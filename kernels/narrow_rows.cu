// Entry points of linear layers of 129 rows and more whose weights have 8 or 4 bits, for compute capability 9.0. With rows of x of 8 bits:
// narrow_rows_<elements>_<rows of x of a tile>, narrow_rows_<elements>_gated for gated units, and narrow_rows_operands_<elements>, the launch
// ahead. With rows of x of float16: narrow_rows_f16_<elements>_<rows of x of a tile>. Behind <elements> is the least number of columns of a
// scale, if scales have groups of columns.
//
// Needed by: prompts with weights of 8 and 4 bits on GPUs of 9.0.
// No images for: sm_86, sm_89.
#include "gemm_narrow_rows.cuh"

#define ELEMENTS(elements, D)                         \
  NARROW_ROWS(narrow_rows_##elements##_256, D, 256, false) \
  NARROW_ROWS(narrow_rows_##elements##_128, D, 128, false) \
  NARROW_ROWS(narrow_rows_##elements##_gated, D, 128, true) \
  NARROW_ROW_OPERANDS(narrow_rows_operands_##elements, D)
#define HALVES(name, D, FLUSH)                                             \
  NARROW_ROWS(narrow_rows_f16_##name##_256, RowsF16<D COMMA FLUSH>, 256, false) \
  NARROW_ROWS(narrow_rows_f16_##name##_128, RowsF16<D COMMA FLUSH>, 128, false)
#define COMMA ,

ELEMENTS(int8, RowsInt8)
ELEMENTS(e4m3, RowsE4M3)
HALVES(int8, NarrowInt8, 0)
HALVES(int8_32, NarrowInt8, 2)
HALVES(e4m3, NarrowE4M3, 0)
HALVES(e4m3_64, NarrowE4M3, 1)
HALVES(int4_64, NarrowInt4, 1)
HALVES(int4_32, NarrowInt4, 2)
