// Package llama builds decoders of Llama's shape: the models Llama 2 and 3, Mistral, Qwen 2 and
// 3, and the many that have copied them. It is the example of how such a graph is made of the nodes of package
// nn, and is short enough to be copied. Weights have their names in transformers' checkpoints.
//
//	h = embedding of the tokens
//	for each layer:
//		q, k, v = projections of the RMS norm of h        (Qwen 2: with biases)
//		q, k = RMS norms of each head of q and k          (Qwen 3)
//		q, k = q and k, turned by the tokens' positions
//		h = h + output projection of the attention of q to all keys and values so far
//		g, u = projections of the RMS norm of h
//		h = h + down projection of silu(g)*u
//	logits = projection of the RMS norm of h
//
// Its tests compare logits and texts with transformers, on the CPU and on a GPU.
package llama
