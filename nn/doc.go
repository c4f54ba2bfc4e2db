// Package nn holds the nodes that a transformer decoder needs and that
// Gorgonia lacks or computes wrongly, as operators with the same care as the
// attention operators of package leanattention: arguments are checked before a
// node is made, hashes cover every parameter, and no panic leaves the package.
//
// These are [Embedding], [LayerNorm], [Linear] (with [Linears], several of one
// input, and with a ReLU or a GELU behind it), [ArgMax] and [Sample]; each computes
// where its inputs are, on the CPU or on a GPU, see [leanattention.DeviceTensor].
// [GELU] is a node of its own on the CPU, with a gradient. Gorgonia v0.9.18 has no
// LayerNorm and no GELU; its GroupNorm with one group is wrong for wide rows, and a
// composition of stock nodes takes about sixteen nodes and two hundred
// allocations a call. Its products of matrices and its gathering of rows take no
// 16-bit weights, and its products read weights at a fraction of the memory's
// speed, which is what decoding waits for.
//
// Errors wrap the sentinels of package leanattention (ErrShape, ErrDType, ...).
package nn
