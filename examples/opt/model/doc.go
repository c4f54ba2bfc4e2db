// Package model is OPT's decoder as a Gorgonia graph.
//
// Zhang et al., "OPT: Open Pre-trained Transformer Language Models",
// arXiv:2205.01068. All published sizes have one form, with h the rows of
// tokens, LN the layer norm, f the ReLU and every projection with a bias:
//
//	h = E[token] + P[position+2]
//	for each layer:
//	    h = h + Out(attention(Query(LN1(h)), Key(LN1(h)), Value(LN1(h))))
//	    h = h + FC2(f(FC1(LN2(h))))
//	logits = LN(h) Eᵀ
//
// but OPT-350m, which normalises after each sum instead of before each branch,
// has no last layer norm, and whose narrower embedding is projected into the
// layers' width and back. Other models have this architecture too: Galactica
// (Taylor et al., arXiv:2211.09085) has the GELU as f, no biases, and layer norms
// without weights.
//
// [Weights] holds a model's parameters, matrices in the type that they are
// stored in or that one asks for ([LoadAs]): decoding waits for them, so half
// the bytes are half the time. All sums are in float32. A [Decoder] continues a
// batch of sequences with it, by two graphs that share the weights and the
// cache: one with many rows for the prompts, which are cut into chunks, and one
// with a row a sequence for what follows. As long as some read their prompts, the
// others' tokens are rows of the first graph too ([Decoder.Mix]). Both are built
// once and run again and again; token ids and positions are written into the
// graphs' inputs in place.
// The attention node is either leanattention's on its paged cache, or the
// composition of Gorgonia's own nodes over tensors of a fixed capacity that it
// replaces; nothing else differs. A third one has no cache: its graphs are of
// Gorgonia's nodes over the whole text at every step, and leanattention.Fuse
// puts its attention into them.
package model
