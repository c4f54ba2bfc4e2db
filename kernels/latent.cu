// Entry points of decode attention to keys that hold the values: latent_<element>, _precise for queries and outputs of more bits than
// keys, and _16 for output tiles of up to 16 rows; with keys as rows of products, latent_e4m3_<rows> for output tiles of up to so many.
//
// Needed by: caches with ValuesInKeys, as multi-head latent attention has them.
#include "attn_latent_columns.cuh"

#define LATENT_TYPE(name, T) \
  LATENT_ATTENTION(name, T, 576, 512, false) \
  LATENT_ATTENTION(name##_precise, T, 576, 512, true) \
  LATENT_ATTENTION(name##_16, T, 576, 512, false, 16)

LATENT_TYPE(latent_f16, AsF16)
LATENT_TYPE(latent_bf16, AsBF16)
LATENT_COLUMNS(latent_e4m3_16, 16)
LATENT_COLUMNS(latent_e4m3_32, 32)
