// Package nn has the nodes of a transformer decoder that Gorgonia lacks, or computes slowly or wrongly. Attention itself is in
// package leanattention.
//
//   - [Linear], [Linears], [GatedLinear]: linear layers with norm, activation, gate and residual in one node
//   - [HeadLinear]: a matrix for each head
//   - [MLA]: multi-head latent attention, with [SplitKVUp] for its weights, and [TPLA], an approximation over several devices
//   - [LayerNorm], [RMSNorm], [QKNorm]
//   - [Rotary]: rotary embedding
//   - [Activate], [GLU]: activations and gated linear units without their layers
//   - [Embedding]: rows of a table or of another matrix
//   - [CrossEntropy]: the loss of a language model, without all logits in memory; [Backpropagate]: gradients; [AdamW], [SGD]: solvers
//   - [ArgMax], [Sample]: choice of tokens
//   - [Add], [Mul], [Scale], [Convert], [Slice], [Concat], [Reshape], [SplitHeads], [MergeHeads]: the rest of a model
//   - [MergeStates]: merging of attention over disjoint keys; [SumParts]: sums of parts, over several GPUs too
//   - [AllReduce], [Broadcast], [MergeRanks]: collectives of several processes
//
// Common to all nodes:
//
//   - A node computes on the GPU if all inputs are a [device.Tensor], and on the CPU if all are in host memory. A mix is an error.
//   - Arguments are checked when the node is made, and values before each run. No panic leaves the package.
//   - Errors wrap the sentinels of package leanattention (ErrShape, ErrDType, ...).
//   - Nodes of equal parameters and inputs are one node in Gorgonia: hashes have each parameter.
//   - Gradients are computed where the inputs are, on a GPU on the tape machine alone. On a GPU, those of [HeadLinear], [MergeStates] and [SumParts] are
//     ErrUnsupported. ArgMax, Sample and collectives have no gradients.
//   - Sequences of different lengths need no padding but in attention: the example Packed has their rows one after another, and an
//     [Embedding] before and behind attention. So it trains on packed documents, on GPUs too.
//   - On a GPU, Gorgonia can't add the gradients of a value with several readers, as of residual connections: [Backpropagate] can.
package nn
