// Entry points of decode attention to keys that hold the values: latent_<element>_<rows of an output tile>, and
// _precise for queries and outputs of more bits than keys.
//
// Needed by: caches with ValuesInKeys, as multi-head latent attention has them.
#include "attn_latent.cuh"

#define LATENT_ROWS(name, T, R) \
  LATENT_ATTENTION(name##_##R, T, 576, 512, R, false) \
  LATENT_ATTENTION(name##_##R##_precise, T, 576, 512, R, true)

#define LATENT_TYPE(name, T) \
  LATENT_ROWS(name, T, 16) \
  LATENT_ROWS(name, T, 32) \
  LATENT_ROWS(name, T, 64)

LATENT_TYPE(latent_f16, AsF16)
LATENT_TYPE(latent_bf16, AsBF16)
