//go:build !nogpu && (linux || windows) && (amd64 || arm64)

package kernels

import "embed"

//go:embed modules
var modules embed.FS

// headers are those of units that are compiled at run time.
//
//go:embed attn_written.cuh attn_written_backward.cuh attn_written_prefill.cuh attn_backward.cuh attn_backward_again.cuh attn_backward_hopper.cuh attn_backward_hopper_variant.cuh attn_backward_variant.cuh attn_expression.cuh attn_lean.cuh attn_lean_variant.cuh attn_measured.cuh attn_prefill.cuh attn_prefill_mma.cuh attn_prefill_rows.cuh attn_prefill_variant.cuh attn_prefill_weights.cuh attn_reduce.cuh attn_ring.cuh attn_state.cuh attn_tile.cuh attn_variant.cuh attn_work.cuh copy.cuh tagged.cuh types.cuh wgmma.cuh
var headers embed.FS

const whyEmpty = ""
