// Package graphtest builds Gorgonia graphs for tests: problems of the reference (package reftest) as tensors,
// graphs with attention nodes, decoders on a cache, and attention as users write it with Gorgonia's own ops.
// It uses the public API only.
package graphtest
