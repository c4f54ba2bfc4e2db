package nn

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// randomShared is a graph of random nodes of rows x width elements, of which each reads some before it, whole or a part, once or twice.
type randomShared struct {
	g      *G.ExprGraph
	inputs G.Nodes
	nodes  G.Nodes // behind the inputs
}

// newRandomShared draws the same graph for the same rng.
func newRandomShared(t *testing.T, rng *rand.Rand, rows, width int) *randomShared {
	r := &randomShared{g: G.NewGraph()}
	for i := range 2 {
		r.inputs = append(r.inputs, G.NewMatrix(r.g, tensor.Float32, G.WithShape(rows, width), G.WithName(fmt.Sprint("x", i))))
	}
	w := G.NewMatrix(r.g, tensor.Float32, G.WithShape(width, width), G.WithName("w"))
	gamma := G.NewVector(r.g, tensor.Float32, G.WithShape(width), G.WithName("gamma"))
	r.inputs = append(r.inputs, w, gamma)
	all := append(G.Nodes{}, r.inputs[:2]...)
	pick := func() *G.Node { return all[max(0, len(all)-1-rng.IntN(4))] }
	for range 6 + rng.IntN(20) {
		var n *G.Node
		var err error
		switch a, b := pick(), pick(); rng.IntN(10) {
		case 0:
			n, err = Add(a, b)
		case 1:
			n, err = Mul(a, b)
		case 2:
			n, err = Activate(a, GELU)
		case 3:
			n, err = Linear(a, w, nil, WithResidual(b))
		case 4:
			var parts []*G.Node
			if parts, err = Linears(a, []*G.Node{w, w}, nil, WithNorm(gamma, nil, 1e-5)); err == nil {
				n, err = Add(parts[0], parts[1])
			}
		case 5:
			n, err = LayerNorm(a, gamma, nil, 1e-5)
		case 6:
			var x, y *G.Node
			if x, err = Slice(a, 1, 0, 2); err == nil {
				if y, err = Slice(b, 1, 2, width); err == nil {
					n, err = Concat(1, x, y)
				}
			}
		case 7:
			if n, err = Reshape(a, width, rows); err == nil {
				n, err = Reshape(n, rows, width)
			}
		case 8:
			n, err = G.Tanh(a)
		case 9:
			n, err = Scale(a, 0.5)
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	r.nodes = all[2:]
	return r
}

func (r *randomShared) let(t *testing.T, rng *rand.Rand) {
	for _, n := range r.inputs {
		x := make([]float64, n.Shape().TotalSize())
		for i := range x {
			x[i] = rng.NormFloat64()
		}
		graphtest.Let(t, n, graphtest.TensorOf(tensor.Float32, x, n.Shape()...))
	}
}

// TestShareMemory: nodes whose memory is handed on give the bits that they give otherwise, run by run, wherever somebody may
// look; what is handed on was written over.
func TestShareMemory(t *testing.T) {
	handedOn := 0
	for i := range 60 {
		rng := reftest.Rand(t)
		rows, width := 8, 6
		if i%12 == 0 { // large enough to be recycled, and not only poisoned
			rows, width = 260, 256
		}
		graph, numbers := rng.Uint64(), rng.Uint64()
		plain, shared := newRandomShared(t, rand.New(rand.NewPCG(1, graph)), rows, width), newRandomShared(t, rand.New(rand.NewPCG(1, graph)), rows, width)
		kept := rng.IntN(len(shared.nodes))
		if err := rewrite.ShareMemory(shared.g, shared.nodes[kept]); err != nil {
			t.Fatal(err)
		}
		one, two := graphtest.NewTapeMachine(plain.g), graphtest.NewTapeMachine(shared.g)
		for run := range 3 {
			plain.let(t, rand.New(rand.NewPCG(uint64(run), numbers)))
			shared.let(t, rand.New(rand.NewPCG(uint64(run), numbers)))
			graphtest.Again(t, one)
			graphtest.Again(t, two)
			for i, n := range shared.nodes {
				got, want := graphtest.Floats(t, n.Value()), graphtest.Floats(t, plain.nodes[i].Value())
				stays := ongpu.SharedBy(n) == nil
				if i == kept && !stays {
					t.Errorf("%v is kept, and may be written over", n)
				}
				if !stays {
					if math.IsNaN(got[0]) {
						handedOn++
					}
					continue
				}
				for j := range want {
					if math.Float64bits(got[j]) != math.Float64bits(want[j]) {
						t.Fatalf("run %d: %v: element %d is %v, want %v", run, n, j, got[j], want[j])
					}
				}
			}
		}
		if err := errors.Join(one.Close(), two.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if handedOn == 0 {
		t.Error("no memory was handed on")
	}
}

// TestSharedEnds: nothing can be built on a value that is handed on, and there are no gradients behind it.
func TestSharedEnds(t *testing.T) {
	made := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	build := func() (x, a, part, b, sum *G.Node) {
		g := G.NewGraph()
		x = G.NewMatrix(g, tensor.Float32, G.WithShape(3, 4), G.WithName("x"), G.WithValue(graphtest.TensorOf(tensor.Float32, make([]float64, 12), 3, 4)))
		a = made(Activate(x, GELU))
		part = made(Reshape(a, 4, 3))
		b = made(Activate(part, GELU))
		sum = made(G.Sum(b))
		if err := rewrite.ShareMemory(g); err != nil {
			t.Fatal(err)
		}
		return x, a, part, b, sum
	}
	x, a, part, b, sum := build()
	made(Activate(b, SiLU)) // whose value stays, as one of Gorgonia's own nodes reads it
	_, first := Activate(a, SiLU)
	_, second := Activate(part, SiLU)
	for what, err := range map[string]error{"a node": first, "a node of a part": second} {
		if !errors.Is(err, la.ErrGraph) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, grad := G.Grad(sum, x)
	_, _, _, _, sum = build()
	lisp := G.NewLispMachine(sum.Graph())
	defer lisp.Close()
	for what, err := range map[string]error{"a gradient": grad, "a lisp machine": lisp.RunAll()} {
		if err == nil || !strings.Contains(err.Error(), "ShareMemory was called") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
