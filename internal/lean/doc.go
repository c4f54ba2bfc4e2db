// Package lean holds the two ideas that LeanAttention is made of, in pure
// integer and scalar code that knows neither CPU kernels nor GPUs:
//
//   - State, the result of attending to any subset of the keys. Two states
//     merge into one (softmax re-scaling as reduction, section IV-A of the
//     paper), so any split of the keys gives exact attention.
//   - Plan, the schedule that hands the LeanTiles of a ragged batch to workers
//     (sections IV-B and IV-C). FlashAttention-2, FlashDecoding and stream-K
//     are the same plan with other cut points.
//
// # Terms
//
// A LeanTile is the smallest piece of context that a worker attends to: a fixed
// number of keys of one KV head. An output tile is what one run over a context
// produces: the rows of one block of query positions, for all query heads of
// the group that shares a KV head. A worker (the paper's CTA) owns a contiguous
// range of LeanTiles; the part of an output tile that lies in its range is one
// Work. The worker with the first LeanTile of an output tile is the tile's host
// block, the one with the last is the finishing block. A worker that holds only
// a part of an output tile stores its State as a partial.
//
// The paper is R. Sanovar et al., "LeanAttention: Hardware-Aware Scalable
// Attention Mechanism for the Decode-Phase of Transformers".
package lean
