// Package leanattention is exact attention for Gorgonia graphs, built for the
// decode phase of transformer models, where few queries meet a long context.
//
// # Operators
//
// [Attention] is a node on tensors, in place of BatchedMatMul, SoftMax and
// BatchedMatMul ([Default] is those):
//
//	g := gorgonia.NewGraph()
//	q := gorgonia.NewTensor(g, gorgonia.Float32, 4, gorgonia.WithShape(1, 12, 1, 64), gorgonia.WithName("q"))
//	k := gorgonia.NewTensor(g, gorgonia.Float32, 4, gorgonia.WithShape(1, 12, 1024, 64), gorgonia.WithName("k"))
//	v := gorgonia.NewTensor(g, gorgonia.Float32, 4, gorgonia.WithShape(1, 12, 1024, 64), gorgonia.WithName("v"))
//	out, err := leanattention.Attention(q, k, v)
//
// [CachedAttention] is a node on a [Cache], which keeps the keys and values of
// all layers of a model for many sequences; a graph reaches it through a
// [Step]. [Attend] is the same engine without a graph. docs/decoder.md builds a
// whole decoder, step by step.
//
// [Attention] has gradients, on both of Gorgonia's machines, in memory that grows
// with the context and not with its square: it can be trained. [CachedAttention]
// is for inference, and has none.
//
// # Algorithm
//
// The result of attending to a subset of the keys is a state: the un-scaled
// output, the maximum of the scores and the sum of their exponentials. States
// merge, and merging is associative, so any split of the keys gives exact
// attention. LeanAttention (Sanovar et al., arXiv:2405.10480) cuts the keys of
// each output tile into LeanTiles and hands every worker the same number of
// them, across heads and sequences; a worker's share that ends inside an output
// tile leaves a partial state, and the last worker to arrive merges all of
// them, in worker order. So for a given number of workers and tokens a LeanTile
// every run gives the same bits; other numbers differ by rounding. With
// [WithBatchInvariance] a row has the same bits with any of them, in any batch.
//
// # GPUs
//
// [device.Open] opens an NVIDIA GPU, with the driver alone: no toolkit, no cgo. A
// [Cache] with [CacheConfig].Device keeps its pages there and computes there, in
// the same graph as before: q, k and v are copied there, and the output back.
// What is to stay there between nodes is a [device.Tensor]: [device.ToGPU] and [ToHost]
// are nodes that copy, [GPU.Upload] makes weights to bind to inputs. An op
// computes where its operands are, and refuses operands in different places.
// Package nn has the other nodes of a decoder, and [GPU.Record] keeps a run of a
// graph to be queued again as one.
//
// Under the build tag cuda, which needs cgo, [Attention] and [CachedAttention]
// are also ops of Gorgonia's own CUDA machine: docs/cuda.md.
//
// # Speculative decoding
//
// Several guesses of how a sequence goes on are one step: [Append.Parents] says which new
// token follows which, and [Step.Positions] where each stands. All graphs take it up.
//
// # Caveats
//
// Positions are counted from the end of the live keys. In a batch that is padded at its right, as in training,
// [WithQueryLengths] gives the number of queries of each sequence.
//
// Head h reads KV head h/(H/Hkv). A query that sees no key gives 0, and a
// log-sum-exp of -Inf. Scores may be as large as numbers are, which [WithScale]
// says exactly. NaN and infinities in live inputs go where arithmetic
// takes them; keys and values beyond the live length, or outside the window of all
// queries of a sequence, are never read.
//
// Axes are told apart by their place alone: q, k and v are (B, H, N, d), and a tensor
// of (B, N, H, d), as other libraries lay them out, is taken for one of N heads
// wherever its sizes fit. Transpose it before.
//
// Gorgonia's SoftMax is NaN or wrong where scores lie far apart (see [Default]). A
// comparison with it needs small scores: random q and k of a variance near 1 and the
// scale 1/sqrt(d) will do.
//
// Machines whose graphs share weights are built one after the other: NewTapeMachine
// writes to the tensors that inputs have, so two calls at the same time are a data
// race. They may run at the same time.
//
// Gorgonia identifies nodes by a 32-bit hash: give inputs names of their own,
// and call [rewrite.Check] once when a graph is complete. Its tape machine runs a
// graph as often as one likes, with Reset between runs; its lisp machine once.
// What goes wrong in a run is inside an error of the machine's: [Cause] takes it out.
//
// Several graphs may share the tensors of their weights. Make their machines one
// after the other, while none of them runs: Gorgonia's NewTapeMachine writes to the
// tensors. Once they are made they may run at the same time.
//
// The head is the second axis, (B, H, T, d). A tensor of (B, T, H, d), as other
// libraries have it, is of the same rank, and where the sizes fit nothing can tell
// that it is meant otherwise: transpose it first. The rows of [CachedAttention] are
// (T, H*d), which needs no transpose.
//
// To compare results with [Default], or with other graphs that have Gorgonia's
// SoftMax, take small scores: where a row's scores lie far below the tensor's first
// one, that SoftMax is NaN.
//
// The CPU engine has kernels in AMX, AVX-512, AVX2, NEON (for float32 and float64) and plain
// Go, and takes the best that the machine has. The environment variable
// LEANATTENTION_CPU (amx, avx512, avx2, neon or go) asks for others, for tests and
// comparisons; where they are not there, every call is [ErrOption]. The build tag
// noasm leaves the assembly out. For AMX a process asks Linux for tile registers when it starts: signal
// stacks that C code in it makes must then have the size that sysconf gives.
//
// The CPU engine's threads end by themselves when idle; nothing needs closing
// but a [Cache], and that only to have its memory back at once.
package leanattention
