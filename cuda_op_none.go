//go:build !cuda

package leanattention

import (
	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/kvstore"
)

// Without the tag cuda, Gorgonia has no machine that computes on a GPU, and ops are not wrapped. cuda_op.go has the wrappers.

func placeAttention(op *attentionOp, _, _, _ *G.Node) G.Op { return op }
func placeCached(op *cachedOp) G.Op                        { return op }
func placeLSE(op *outputOp, _ *G.Node) G.Op                { return op }

// placePages makes the pages of a cache that is not in host memory.
func placePages(op string, _ *Cache, l *cacheLayout) (kvstore.Store, error) {
	return kvstore.NewDevice(op, &l.store, l.least())
}
