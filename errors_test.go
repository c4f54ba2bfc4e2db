package leanattention_test

import (
	"errors"
	"fmt"
	"go/scanner"
	"go/token"
	"io"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Cause takes what an op returned out of the errors of both machines, whatever they
// are wrapped in, and leaves all other errors alone.
func TestCause(t *testing.T) {
	machines := map[string]func(*G.ExprGraph) G.VM{
		"tape": func(g *G.ExprGraph) G.VM { return G.NewTapeMachine(g) },
		"lisp": func(g *G.ExprGraph) G.VM { return G.NewLispMachine(g, G.ExecuteFwdOnly()) },
	}
	for name, machine := range machines {
		g := G.NewGraph()
		rng := reftest.Rand(t)
		p := newProblem(rng, reftest.Shape{Heads: 1, KVHeads: 1, Dim: 2, ValueDim: 2, Queries: []int{1}, Keys: []int{3}}, spec{})
		q := input(g, "q", tensorOf(tensor.Float32, p.Q, 1, 1, 1, 2))
		k := input(g, "k", tensorOf(tensor.Float32, p.K, 1, 1, 3, 2))
		v := input(g, "v", tensorOf(tensor.Float32, p.V, 1, 1, 3, 2))
		lengths := input(g, "lengths", lengthsOf(tensor.Int, []int{4}))
		if _, err := la.Attention(q, k, v, la.WithLengths(lengths)); err != nil {
			t.Fatal(err)
		}
		vm := machine(g)
		err := vm.RunAll()
		if err == nil || name == "tape" && errors.Is(err, la.ErrLength) {
			t.Fatalf("%s: %v: errors of RunAll unwrap by now", name, err)
		}
		for _, wrapped := range []error{err, fmt.Errorf("step 3: %w", err), errors.Join(io.EOF, err)} {
			wantError(t, la.Cause(wrapped), la.ErrLength, "Attention", "lengths[0] is 4")
		}
		again := la.Cause(err)
		if la.Cause(again) != again {
			t.Errorf("%s: the cause of a cause is another", name)
		}
		vm.Close()
	}
	for _, err := range []error{nil, io.EOF, fmt.Errorf("x: %w", la.ErrShape)} {
		if got := la.Cause(err); got != err {
			t.Errorf("the cause of %v is %v", err, got)
		}
	}
	// An error whose Err returns itself.
	var list scanner.ErrorList
	list.Add(token.Position{}, "no more")
	if got := la.Cause(list); got.Error() != list.Error() {
		t.Errorf("%v", got)
	}
}
