// Package llama builds decoders of Llama's shape: the models Llama 2 and 3, Mistral, Qwen 2 and 3, Gemma 2, and the
// many that copy them. It is the example of such a graph from the nodes of package nn, short enough to be copied.
// Weights have their names in transformers' checkpoints, and [ReadConfig] reads a config.json.
//
//	h = embedding of the tokens                           (Gemma: times the root of its width)
//	for each layer:
//		q, k, v = projections of the RMS norm of h        (Qwen 2: with biases)
//		q, k = RMS norms of each head of q and k          (Qwen 3)
//		q, k = q and k, rotated by the tokens' positions  (on their way into attention and the cache)
//		a = output projection of the attention of q to all keys and values so far
//		                                                  (Mistral: to the last ones, a window of them;
//		                                                   Gemma 2: so in every other layer, scores soft-capped)
//		h = h + a                                         (Gemma 2: the RMS norm of a)
//		g, u = projections of the RMS norm of h
//		m = down projection of silu(g)*u                  (Gemma: of gelu(g)*u)
//		h = h + m                                         (Gemma 2: the RMS norm of m)
//	logits = projection of the RMS norm of h              (Gemma 2: soft-capped)
//
// All models are one graph: the differences are fields of [Config]. The tests compare logits and texts with
// transformers, on the CPU and on a GPU. [Config.Sinks] gives attention the sinks of gpt-oss; the rest of that model,
// a mixture of experts, is not implemented, and its config.json is refused.
//
// A decoder with [Options].Greedy chooses the most likely tokens itself. On a GPU, [Decoder.Continue] then queues
// step after step and waits for the last one only.
package llama
