package leanattention_test

import (
	"fmt"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The gradients of a cost through attention: one head, one query, two keys.
func ExampleAttention_gradient() {
	g := G.NewGraph()
	node := func(name string, x ...float64) *G.Node {
		v := tensor.New(tensor.WithShape(1, len(x)/2, 2), tensor.WithBacking(x))
		return G.NewTensor(g, G.Float64, 3, G.WithName(name), G.WithShape(v.Shape()...), G.WithValue(v))
	}
	q, k, v := node("q", 0, 0), node("k", 0, 0, 2, 4), node("v", 1, 1, 3, 5)

	out, err := la.Attention(q, k, v, la.WithScale(1))
	if err != nil {
		fmt.Println(err)
		return
	}
	grads, err := G.Grad(G.Must(G.Sum(out)), q, k, v)
	if err != nil {
		fmt.Println(err)
		return
	}
	machine := G.NewTapeMachine(g)
	defer machine.Close()
	if err := machine.RunAll(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("out", out.Value().Data())
	for i, name := range []string{"dq", "dk", "dv"} {
		fmt.Println(name, grads[i].Value().Data())
	}
	// Output:
	// out [2 3]
	// dq [3 6]
	// dk [0 0 0 0]
	// dv [0.5 0.5 0.5 0.5]
}
