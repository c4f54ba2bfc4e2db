// Package lean has the two ideas of LeanAttention, as integer and scalar code without CPU kernels or GPUs:
//
//   - State is the result of attending to a subset of the keys. Two states merge into one (softmax re-scaling as
//     reduction, section IV-A of the paper), so any split of the keys gives exact attention.
//   - Plan is the schedule that assigns the LeanTiles of a ragged batch to workers (sections IV-B and IV-C).
//     FlashAttention-2, FlashDecoding and stream-K are the same plan with other cuts.
//
// # Terms
//
// A LeanTile is the smallest piece of context that a worker attends to: a fixed number of keys of one KV head. An
// output tile is the rows of one block of query positions, for all query heads of the group that shares a KV head. A
// worker (the paper's CTA) owns a contiguous range of LeanTiles. The part of an output tile in that range is one Work.
// The worker with the first LeanTile of an output tile is its host block, the worker with the last LeanTile its
// finishing block. A worker with only a part of an output tile stores its State as a partial.
//
// The paper is R. Sanovar et al., "LeanAttention: Hardware-Aware Scalable
// Attention Mechanism for the Decode-Phase of Transformers".
package lean
