// Entry point of decode attention to keys that hold the values, of E4M3, for many rows of queries.
//
// Needed by: caches with ValuesInKeys of E4M3, on GPUs of 9.0.
#include "attn_latent_narrow.cuh"

LATENT_NARROW(latent_e4m3)
