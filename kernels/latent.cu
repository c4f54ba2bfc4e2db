// Entry points of decode attention to keys that hold the values: latent_<element>, and _precise for queries and outputs of
// more bits than keys.
//
// Needed by: caches with ValuesInKeys, as multi-head latent attention has them.
#include "attn_latent.cuh"

#define LATENT_TYPE(name, T) \
  LATENT_ATTENTION(name, T, 576, 512, false) \
  LATENT_ATTENTION(name##_precise, T, 576, 512, true)

LATENT_TYPE(latent_f16, AsF16)
LATENT_TYPE(latent_bf16, AsBF16)
