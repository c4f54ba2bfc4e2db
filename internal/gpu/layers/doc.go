// Package layers computes a decoder's layers on a GPU, except attention:
//
//   - linear layers ([Linear])
//   - layer norms ([Norm])
//   - rows of embedding tables ([Gather])
//   - nodes that touch each element once ([RMSNorm], [Rotary], [Elements], [Move])
//   - the choice of tokens ([Sampler])
//
// An [Engine] queues each layer as a launch. A [Megakernel] does the layers of a whole
// step in one launch, attention included. A [Projection] adds the storing of new keys and values to the launch that
// makes them. Package attention exports the parts of a plan that both need.
//
// # Choosing tokens
//
// A [Sampler] chooses a token from each row of logits, greedily or with a temperature, top-k and top-p, so that only
// ids leave the GPU:
//
//	sampler.Run(stream, &Samples{...})         one launch
//
// The launch may be captured: each launch reads settings and random numbers from memory of the GPU. Equal settings
// and random numbers give equal tokens, bit for bit.
package layers
