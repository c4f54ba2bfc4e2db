// Entry points of plain decode attention for heads whose rows are no whole column blocks, with keys of bfloat16: packed_bf16_<head dim>.
//
// No images for: sm_80, sm_86, sm_89.
//
// Needed by: decode of models with such heads in bfloat16 on GPUs of 9.0.
#include "attn_packed.cuh"

PACKED_HEADS(packed_bf16, AsBF16)
