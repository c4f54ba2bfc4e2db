// Entry points of linear layers by heads: heads_<element of the weights>.
//
// Needed by: models with latent attention.
#include "gemm_heads.cuh"

HEAD_LINEAR(heads_f16, Float16)
HEAD_LINEAR(heads_bf16, BFloat16)
