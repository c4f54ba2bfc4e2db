// Package nn holds the nodes that a transformer decoder needs and that
// Gorgonia lacks or computes wrongly, as operators with the same care as the
// attention operators of package leanattention: arguments are checked before a
// node is made, hashes cover every parameter, and no panic leaves the package.
//
// So far that is [LayerNorm]. Gorgonia v0.9.18 has none; its GroupNorm with one
// group is wrong for wide rows, and a composition of stock nodes takes about
// sixteen nodes and two hundred allocations a call.
//
// Errors wrap the sentinels of package leanattention (ErrShape, ErrDType, ...).
package nn
