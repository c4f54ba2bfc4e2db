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
	here, read := func(x *tensor.Dense) G.Value { return x }, func(v G.Value) *tensor.Dense { return v.(*tensor.Dense) }
	testMovesOf16(t, here, read)
	testJoins(t, here, read)
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
	there := func(x *tensor.Dense) G.Value {
		d, err := gpu.Upload(x)
		noErrors(t, err)
		return d
	}
	read := func(v G.Value) *tensor.Dense {
		x, err := v.(*device.Tensor).Download()
		noErrors(t, err)
		return x
	}
	testMovesOf16(t, there, read)
	testJoins(t, there, read)
}

// testJoins: gradients through all parts of Linears, converted, shaped and split as attention wants them, are those of Gorgonia's own
// backpropagation, which knows no joins. A part that something else reads, or that is not split, has the gradients, too.
func testJoins(t *testing.T, where func(*tensor.Dense) G.Value, read func(G.Value) *tensor.Dense) {
	rng := reftest.Rand(t)
	for i := range 8 {
		to := []tensor.Dtype{la.Float16, la.BFloat16}[i%2]
		batch, n, heads, d := 1+rng.IntN(2), 1+rng.IntN(4), 1+rng.IntN(2), []int{4, 8}[rng.IntN(2)]
		const width = 8
		rows, out := batch*n, heads*d
		data := map[string][]float32{}
		var got [2][][]float32
		for of := range got {
			where, read := where, read
			if of == 0 { // Gorgonia's sums are not for GPUs
				where, read = func(x *tensor.Dense) G.Value { return x }, func(v G.Value) *tensor.Dense { return v.(*tensor.Dense) }
			}
			g := G.NewGraph()
			input := func(name string, shape ...int) *G.Node {
				if data[name] == nil {
					for range tensor.Shape(shape).TotalSize() {
						data[name] = append(data[name], float32(rng.IntN(9)-4)/4)
					}
				}
				x := tensor.New(tensor.WithShape(shape...), tensor.WithBacking(slices.Clone(data[name])))
				return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(where(x)))
			}
			x, ws := input("x", rows, width), G.Nodes{input("w0", out, width), input("w1", out, width)}
			parts, err := Linears(x, ws, nil)
			noErrors(t, err)
			var ys, dys G.Nodes
			for k, y := range parts {
				if i/2%3 != 1 || k == 0 {
					y = G.Must(Convert(G.Must(SplitHeads(G.Must(Reshape(G.Must(Convert(y, to)), batch, n, out)), heads)), tensor.Float32))
				}
				ys, dys = append(ys, y), append(dys, input([]string{"dy0", "dy1"}[k], y.Shape()...))
			}
			if i/2%3 == 2 {
				ys, dys = append(ys, G.Must(Scale(parts[1], 2))), append(dys, input("dy2", rows, out))
			}
			wrt := append(G.Nodes{x}, ws...)
			var grads G.Nodes
			if of == 0 {
				grads, err = G.Backpropagate(ys, dys, wrt)
			} else {
				grads, err = Backpropagate(ys, dys, wrt)
			}
			noErrors(t, err)
			joins, merges := 0, 0
			for _, n := range g.AllNodes() {
				if o, ok := n.Op().(node); ok {
					if r, ok := o.rule.(joinParts); ok {
						joins++
						merges += count(r.heads)
					}
				}
			}
			if joins != of || merges != count(of == 1 && i/2%3 == 0) {
				t.Fatalf("case %d: %d joins, %d of them with heads", i, joins, merges)
			}
			m := G.NewTapeMachine(g)
			noErrors(t, la.Cause(m.RunAll()))
			for _, dx := range grads {
				got[of] = append(got[of], slices.Clone(read(dx.Value()).Data().([]float32)))
			}
			noErrors(t, m.Close())
		}
		for k := range got[0] {
			if !slices.Equal(got[0][k], got[1][k]) {
				t.Fatalf("case %d, %v: gradient %d is %v, without joins %v", i, to, k, got[1][k], got[0][k])
			}
		}
	}
}
