package nn

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/errs"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func sumPartsCases(rng *rand.Rand) (cases []opCase) {
	for i := range 5 {
		rows, parts, n := 1+rng.IntN(4), 1+rng.IntN(4), 1+rng.IntN(9)
		if i == 4 {
			rows, parts, n = 2+rng.IntN(2), 3+rng.IntN(6), 150+rng.IntN(200)
		}
		cases = append(cases, opCase{
			name: fmt.Sprintf("SumParts of %d rows of %d parts of %d", rows, parts, n), shape: tensor.Shape{rows, n}, size: 4,
			inputs: []opInput{randomInput(rng, "x", rows, parts*n)},
			build:  func(in []*G.Node) (*G.Node, error) { return SumParts(in[0], parts) },
			want: func(in [][]float64) []float64 {
				y := make([]float64, rows*n)
				for i, v := range in[0] {
					y[i/(parts*n)*n+i%n] += v
				}
				return y
			},
		})
	}
	return cases
}

func TestSumPartsRefused(t *testing.T) {
	g := G.NewGraph()
	for _, c := range []struct {
		shape []int
		parts int
	}{{[]int{2, 6}, 4}, {[]int{2, 6}, 0}, {[]int{2, 6}, -2}, {[]int{6}, 2}, {[]int{2, 2, 6}, 2}} {
		x := G.NewTensor(g, tensor.Float32, len(c.shape), G.WithShape(c.shape...), G.WithName("x"))
		_, err := SumParts(x, c.parts)
		if !errors.Is(err, errs.ErrShape) || !strings.Contains(err.Error(), "x has shape") {
			t.Errorf("%d parts of %v: %v", c.parts, c.shape, err)
		}
	}
	if _, err := SumParts(nil, 2); !errors.Is(err, errs.ErrGraph) {
		t.Error(err)
	}
}
