// Package leanattention is exact attention for Gorgonia graphs, built for the decode phase of transformer models, where few queries
// attend to a long context.
//
// # Operators
//
// [Attention] is a node on tensors. It replaces BatchedMatMul, SoftMax and BatchedMatMul, which [Default] builds:
//
//	g := gorgonia.NewGraph()
//	q := gorgonia.NewTensor(g, gorgonia.Float32, 4, gorgonia.WithShape(1, 12, 1, 64), gorgonia.WithName("q"))
//	k := gorgonia.NewTensor(g, gorgonia.Float32, 4, gorgonia.WithShape(1, 12, 1024, 64), gorgonia.WithName("k"))
//	v := gorgonia.NewTensor(g, gorgonia.Float32, 4, gorgonia.WithShape(1, 12, 1024, 64), gorgonia.WithName("v"))
//	out, err := leanattention.Attention(q, k, v)
//
// [CachedAttention] is a node on a [Cache], which stores the keys and values of all layers of a model for many sequences. A graph
// refers to a cache through a [Step]. [Attend] is the same engine without a graph. docs/decoder.md builds a decoder step by step.
//
// [Attention] has gradients on both of Gorgonia's machines. Their memory grows linearly with the context. [CachedAttention] is for
// inference, and has no gradients.
//
// [WithVariant] changes scores and hides keys by expressions of one's own: docs/variants.md has a gallery.
//
// # Algorithm
//
// Attention to a part of the keys gives a state: the unscaled output, the maximum of the scores, and the sum of their exponentials.
// States merge, and merging is associative, so any split of the keys gives exact attention. LeanAttention (Sanovar et al.,
// arXiv:2405.10480) cuts the keys of each output tile into LeanTiles, and gives every worker the same number of LeanTiles, across heads and
// sequences. A worker whose share ends inside an output tile leaves a partial state. The last worker to arrive merges the partial states,
// in the order of the workers. So every run gives the same bits, for a number of workers and a LeanTile size; other numbers differ
// by rounding. [WithBatchInvariance] gives a row the same bits for any number, in any batch.
//
// # GPUs
//
// [device.Open] opens an NVIDIA GPU. It needs the driver alone: no toolkit, no cgo.
//
//   - A [Cache] with [CacheConfig].Device stores its pages on the GPU, and its nodes compute there, in the same graph: q, k and v
//     are copied to the GPU, and the output back.
//   - A [device.Tensor] stays on the GPU between nodes. [device.ToGPU] and [device.ToHost] are nodes that copy. [device.GPU.Upload]
//     uploads weights.
//   - An op computes where its operands are, and returns an error for operands in different places.
//   - Package nn has the other nodes of a decoder. [device.GPU.Record] records the run of a graph, to queue the run again as one.
//
// Under the build tag cuda, which needs cgo, [Attention] and [CachedAttention] are also ops of Gorgonia's own CUDA machine:
// docs/cuda.md.
//
// # Speculative decoding
//
// A step can hold several guesses of how a sequence continues: [Append.Parents] says which token each new token follows, and
// [Step.Positions] has the positions.
//
// # Caveats
//
//   - Positions count from the end of the live keys. In a batch that is padded at its right, as in training, [WithQueryLengths] gives
//     the number of queries of each sequence.
//   - Head h reads KV head h/(H/Hkv). A query that sees no key gives 0 and a log-sum-exp of -Inf.
//   - Scores may be any finite numbers, as [WithScale] says. NaN and infinities in live inputs propagate. Keys and values after the live
//     length, or outside all windows, are never read.
//   - q, k and v are (B, H, N, d). A tensor of (B, N, H, d), as other libraries have, has the same rank, and is taken for one of N
//     heads if its sizes fit: transpose it first. Rows of [CachedAttention] are (T, H*d), and need no transpose.
//   - Gorgonia's SoftMax is NaN for a row whose scores are far below the tensor's first score (see [Default]). A comparison with it needs
//     small scores: random q and k of variance 1, and the scale 1/sqrt(d).
//   - Several graphs can share the tensors of their weights. Make their machines one after the other, while none of them runs:
//     NewTapeMachine writes to the tensors. The machines may then run at the same time.
//   - Gorgonia identifies nodes by a 32-bit hash. Give inputs names, and call rewrite.Check once on a complete graph.
//   - Gorgonia's tape machine runs a graph any number of times, with Reset between runs; its lisp machine once. [Cause] returns the error
//     of an op from the error of a machine.
//
// # CPU kernels
//
// The CPU engine has kernels in AMX, AVX-512, AVX2, NEON and plain Go, and uses the best that the machine has. The environment variable
// LEANATTENTION_CPU (amx, avx512, avx2, neon or go) selects other kernels. Without them in the machine, every call is [ErrOption]. The
// build tag noasm leaves the assembly out. With AMX, a process asks Linux for tile registers at its start; signal stacks that C code makes
// must then have the size that sysconf returns. With NEON, norms and activations are plain Go.
//
// The threads of the CPU engine end when idle. Only a [Cache] has to be closed, to free its memory at once.
package leanattention
