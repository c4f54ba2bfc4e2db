// Package nn holds the nodes that a transformer decoder needs and that
// Gorgonia lacks or computes wrongly, as operators with the same care as the
// attention operators of package leanattention: arguments are checked before a
// node is made, hashes cover every parameter, and no panic leaves the package.
//
// These are
//
//   - [Linear], with [Linears], several of one input: with a norm before, an activation behind
//     and a residual, all in one node
//   - [LayerNorm] and [RMSNorm], and [QKNorm] of each head
//   - [Rotary], which turns heads by their positions
//   - [GELU], [GELUTanh], [SiLU], and gated linear units: [GatedLinear], with the layers, and [GLU]
//   - [Embedding], the rows of a table, or of any matrix, that indices name
//   - [ArgMax] and [Sample], which choose tokens
//   - [Add], [Mul], [Scale], [Slice], [Concat], [Reshape], [SplitHeads] and [MergeHeads], for what a
//     model has besides
//
// Each computes where its inputs are, on the CPU or on a GPU, see [device.Tensor]. All
// but ArgMax and Sample have gradients, in host memory.
//
// Gorgonia v0.9.18 has no LayerNorm and no GELU; its GroupNorm with one group is wrong for wide rows,
// and a composition of stock nodes takes about sixteen nodes and two hundred
// allocations a call. Its products of matrices and its gathering of rows take no
// 16-bit weights, and its products read weights at a fraction of the memory's
// speed, which is what decoding waits for. None of its nodes takes a device tensor.
//
// Errors wrap the sentinels of package leanattention (ErrShape, ErrDType, ...).
package nn
