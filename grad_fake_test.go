//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"errors"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestGradDevice: on a GPU there are no gradients, which a run says, with or
// without a log-sum-exp; what is not differentiated runs there.
func TestGradDevice(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	rng := reftest.Rand(t)
	for name, opts := range map[string][]la.Option{"lse": {la.WithLSE(new(*G.Node))}, "no lse": nil} {
		p := newProblem(rng, dense(2, 1, 64, 64, 3, 9), spec{})
		for _, differentiated := range []bool{false, true} {
			g := p.graph()
			out, err := la.Attention(g.q, g.k, g.v, opts...)
			if err != nil {
				t.Fatal(err)
			}
			if differentiated {
				if _, err := G.Grad(G.Must(G.Sum(out)), g.q, g.k, g.v); err != nil {
					t.Fatal(err)
				}
			}
			var there []G.Value
			for _, x := range []*tensor.Dense{p.q, p.k, p.v} {
				d, err := gpu.Upload(x)
				if err != nil {
					t.Fatal(err)
				}
				there = append(there, d)
			}
			v, err := out.Op().Do(there...)
			if !differentiated {
				if err != nil || v == nil {
					t.Errorf("%s: %v, %v", name, v, err)
				}
				continue
			}
			if name == "lse" && err == nil { // the output is right: the gradient's own node refuses
				for _, n := range g.g.AllNodes() {
					if n.Op() != nil && n.Op().String() == "LeanAttentionGradient" {
						_, err = n.Op().Do(append(there, v, v, v)...)
					}
				}
			}
			if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "radient") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
