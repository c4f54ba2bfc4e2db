// Package decoder computes a decoder's layers on a GPU, attention excepted: linear
// layers ([Linear]), layer norms ([Norm]), rows of embedding tables ([Gather]), nodes that touch
// each element once ([RMSNorm], [Rotary], [Elements], [Move]) and the choice of tokens ([Sampler]). An [Engine] queues each by itself. A [Megakernel] puts the
// layers of a whole step into one launch, attention included: a single-launch decoder. A
// [Projection] puts the storing of new keys and values into the launch that makes them.
// Package attention offers both what they need of a plan.
//
// # Choosing tokens
//
// A [Sampler] chooses a token from each row of logits, greedily or with a
// temperature, top-k and top-p, so that only ids leave the GPU:
//
//	sampler.Run(stream, &Samples{...})         one launch
//
// It may be captured: settings and random numbers are in memory of the GPU, and read by
// each launch. The same of them give the same tokens, bit for bit.
package decoder
