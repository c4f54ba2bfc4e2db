// Entry points of decode attention to half of DeepSeek's latents, as each of two GPUs has with TPLA (arXiv:2508.15881): latent_part_<element>.
//
// Needed by: caches with ValuesInKeys of 256 elements, and 64 behind them, on GPUs of 9.0.
#include "attn_latent.cuh"

LATENT_ATTENTION(latent_part_f16, AsF16, 320, 256, false)
LATENT_ATTENTION(latent_part_bf16, AsBF16, 320, 256, false)
