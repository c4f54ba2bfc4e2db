package nn

import (
	"errors"
	"slices"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// testMovesOf16: SplitHeads, MergeHeads and Reshape of 16 bits move the elements that those of float32 move, back in gradients.
func testMovesOf16(t *testing.T, where func(*tensor.Dense) G.Value, read func(G.Value) *tensor.Dense) {
	rng := reftest.Rand(t)
	for i := range 8 {
		to := []tensor.Dtype{la.Float16, la.BFloat16}[i%2]
		batch, heads, n, d := 1+rng.IntN(3), 1+rng.IntN(3), 1+rng.IntN(5), []int{1, 3, 8, 16}[rng.IntN(4)]
		shape := tensor.Shape{batch, n, heads * d}
		var got [2][2][]float32 // of float32 and of 16 bits: y and dx
		var data [2][]float32   // x and dy, integers that 16 bits can have
		for k := range data {
			data[k] = make([]float32, shape.TotalSize())
			for e := range data[k] {
				data[k][e] = float32(rng.IntN(256))
			}
		}
		for of := range got {
			g := G.NewGraph()
			input := func(name string, x []float32, shape ...int) *G.Node {
				return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(where(tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x)))))
			}
			x := input("x", data[0], shape...)
			y := x
			if of == 1 {
				y = G.Must(Convert(y, to))
			}
			y = G.Must(SplitHeads(G.Must(Reshape(G.Must(Reshape(y, batch*n, heads*d)), batch, n, heads*d)), heads))
			if i%4 > 1 {
				y = G.Must(SplitHeads(G.Must(MergeHeads(y)), heads))
			}
			if of == 1 {
				y = G.Must(Convert(y, tensor.Float32))
			}
			dx, err := Backpropagate(G.Nodes{y}, G.Nodes{input("dy", data[1], y.Shape()...)}, G.Nodes{x})
			noErrors(t, err)
			m := G.NewTapeMachine(g)
			noErrors(t, la.Cause(m.RunAll()))
			for k, n := range [2]*G.Node{y, dx[0]} {
				got[of][k] = slices.Clone(read(n.Value()).Data().([]float32))
			}
			noErrors(t, m.Close())
		}
		for k, name := range [2]string{"y", "dx"} {
			if !slices.Equal(got[0][k], got[1][k]) {
				t.Fatalf("%v, shape %v, %d heads: %s is %v, of float32 %v", to, shape, heads, name, got[1][k], got[0][k])
			}
		}
		if !slices.Equal(slices.Sorted(slices.Values(got[0][0])), slices.Sorted(slices.Values(data[0]))) || slices.Equal(got[0][1], got[0][0]) && len(data[0]) > 8 {
			t.Fatalf("y %v of x %v, dx %v of dy %v", got[0][0], data[0], got[0][1], data[1])
		}
	}
}

func TestMovesOf16(t *testing.T) {
	testMovesOf16(t, func(x *tensor.Dense) G.Value { return x }, func(v G.Value) *tensor.Dense { return v.(*tensor.Dense) })
	g := G.NewGraph()
	x := G.NewTensor(g, tensor.Int32, 3, G.WithShape(1, 2, 4), G.WithName("x"))
	for name, err := range map[string]error{"SplitHeads": second(SplitHeads(x, 2)), "Reshape": second(Reshape(x, 8)), "Slice": second(Slice(G.NewMatrix(g, la.BFloat16, G.WithShape(2, 2), G.WithName("y")), 0, 0, 1))} {
		if !errors.Is(err, la.ErrDType) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func second(_ *G.Node, err error) error { return err }

func TestGPUOpsMovesOf16(t *testing.T) {
	gpu := devicetest.Open(t)
	testMovesOf16(t, func(x *tensor.Dense) G.Value {
		d, err := gpu.Upload(x)
		noErrors(t, err)
		return d
	}, func(v G.Value) *tensor.Dense {
		x, err := v.(*device.Tensor).Download()
		noErrors(t, err)
		return x
	})
}
