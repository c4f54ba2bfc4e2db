// Entry point of decode attention to keys that hold the values, of E4M3, for output tiles of up to 64 rows. Unit latent has kernels for up to
// 32 rows.
//
// Needed by: caches with ValuesInKeys of E4M3, on GPUs of 9.0.
#include "attn_latent_narrow.cuh"

LATENT_NARROW(latent_e4m3)
