// Entry points of plain decode attention for heads whose rows are no whole column blocks, with keys of float16: packed_f16_<head dim>.
//
// No images for: sm_80, sm_86, sm_89.
//
// Needed by: decode of models with such heads in float16 on GPUs of 9.0.
#include "attn_packed.cuh"

PACKED_HEADS(packed_f16, AsF16)
