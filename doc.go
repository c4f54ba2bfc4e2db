// Package leanattention is exact attention for Gorgonia graphs, built for the
// decode phase of transformer models.
package leanattention
