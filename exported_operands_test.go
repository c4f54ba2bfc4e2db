package leanattention_test

import (
	"errors"
	"fmt"
	"go/types"
	"hash/fnv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// collidingNames finds two names of inputs of the given type and shape whose
// nodes have the same hash: Gorgonia's is FNV-1a with 32 bits, so among some
// hundred thousand names there are such.
func collidingNames(t *testing.T, like *G.Node) (a, b string) {
	t.Helper()
	prefix := fmt.Sprintf("%v%v", like.Type(), like.Shape())
	seen := make(map[uint32]string)
	for i := range 1 << 20 {
		name := fmt.Sprintf("layer%d.weight", i)
		h := fnv.New32a()
		h.Write([]byte(prefix + name + "\x00")) // an input has no children
		if other, ok := seen[h.Sum32()]; ok {
			return other, name
		}
		seen[h.Sum32()] = name
	}
	t.Fatal("no two of 2^20 names have the same hash")
	return "", ""
}

// TestCheckGraph builds a graph in which two inputs really collide, and of which
// Gorgonia's tape machine really computes nonsense.
func TestCheckGraph(t *testing.T) {
	g := G.NewGraph()
	a, b := collidingNames(t, G.NewVector(G.NewGraph(), tensor.Float32, G.WithName("x"), G.WithShape(2)))
	vector := func(name string, x ...float32) *G.Node {
		return G.NewVector(g, tensor.Float32, G.WithName(name), G.WithShape(2), G.WithValue(tensor.New(tensor.WithBacking(x))))
	}
	x, y := vector(a, 5, 5), vector(b, 1, 2)
	if x == y || x.Hashcode() != y.Hashcode() {
		t.Fatalf("%q and %q have hashes %#x and %#x", a, b, x.Hashcode(), y.Hashcode())
	}
	difference := G.Must(G.Sub(x, y))
	err := rewrite.Check(g)
	if !errors.Is(err, la.ErrGraph) {
		t.Fatalf("CheckGraph says %v", err)
	}
	for _, text := range []string{a, b, fmt.Sprintf("%#x", x.Hashcode())} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not name %q", err, text)
		}
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	if got := difference.Value().Data().([]float32); got[0] == 4 && got[1] == 3 {
		t.Error("the machine tells colliding inputs apart: CheckGraph's documentation is out of date")
	}

	// With another name it is gone.
	g = G.NewGraph()
	x, y = vector(a, 5, 5), vector(b+"'", 1, 2)
	G.Must(G.Sub(x, y))
	if err := rewrite.Check(g); err != nil {
		t.Error(err)
	}

	if err := rewrite.Check(nil); !errors.Is(err, la.ErrGraph) {
		t.Errorf("a nil graph: %v", err)
	}
	if err := rewrite.Check(G.NewGraph()); err != nil {
		t.Errorf("an empty graph: %v", err)
	}
}

// An operandCase makes nodes of operands: inputs that in makes. Of those that it gives the same type
// and shape Gorgonia makes one node unless they have names.
type operandCase struct {
	build func(in func(shape ...int) *G.Node) error
	apart bool // no two operands may have one type and shape
}

// operandCases are all functions that make a node of several operands, and all options with an operand.
func operandCases(t *testing.T) map[string]operandCase {
	second := func(_ *G.Node, err error) error { return err }
	seconds := func(_ []*G.Node, err error) error { return err }
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	latent, err := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, ValuesInKeys: true, Pages: 1}).NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	type in = func(shape ...int) *G.Node
	typed := func(of tensor.Dtype, like *G.Node, name string, shape ...int) *G.Node {
		return G.NewTensor(like.Graph(), of, len(shape), G.WithShape(shape...), G.WithName(name))
	}
	linear := func(of func(in in) nn.Option) operandCase {
		return operandCase{build: func(in in) error { return second(nn.Linear(in(4, 4), in(4, 4), nil, of(in))) }}
	}
	two := func(f func(a, b *G.Node) (*G.Node, error)) operandCase {
		return operandCase{build: func(in in) error { return second(f(in(2, 3), in(2, 3))) }}
	}
	return map[string]operandCase{
		"Attention": {build: func(in in) error { return second(la.Attention(in(1, 3, 4), in(1, 3, 4), in(1, 3, 4))) }},
		"Default":   {build: func(in in) error { return second(la.Default(in(1, 3, 4), in(1, 3, 4), in(1, 3, 4))) }},
		"CachedAttention": {build: func(in in) error {
			return second(la.CachedAttention(in(2, 4), in(2, 4), in(2, 4), step.Layer(0)))
		}},
		"PromptAttention": {build: func(in in) error {
			return second(la.PromptAttention(in(2, 4), in(2, 4), in(2, 4), in(2, 4), 1, latent.Layer(0)))
		}},
		"WithBias": {build: func(in in) error {
			k := in(1, 4, 4)
			return second(la.Attention(typed(k.Dtype(), k, "own q", 1, 4, 4), k, typed(k.Dtype(), k, "own v", 1, 4, 4), la.WithBias(in(1, 4, 4))))
		}},
		"WithSinks": {build: func(in in) error {
			k := in(1, 3, 4)
			return second(la.Attention(typed(k.Dtype(), k, "own q", 1, 3, 4), k, typed(k.Dtype(), k, "own v", 1, 3, 4), la.WithSinks(in(1))))
		}, apart: true},
		"WithLengths": {build: func(in in) error {
			k := in(1, 3, 4)
			return second(la.Attention(k, typed(k.Dtype(), k, "own k", 1, 3, 4), typed(k.Dtype(), k, "own v", 1, 3, 4), la.WithLengths(typed(tensor.Int, k, "", 1))))
		}, apart: true},
		"WithQueryLengths": {build: func(in in) error {
			k := in(1, 3, 4)
			n := typed(tensor.Int, k, "", 1)
			return second(la.Attention(k, typed(k.Dtype(), k, "own k", 1, 3, 4), typed(k.Dtype(), k, "own v", 1, 3, 4), la.WithLengths(typed(tensor.Int, k, "own lengths", 1)), la.WithQueryLengths(n)))
		}, apart: true},
		"WithDropout": {build: func(in in) error {
			k := in(1, 3, 4)
			return second(la.Attention(k, typed(k.Dtype(), k, "own k", 1, 3, 4), typed(k.Dtype(), k, "own v", 1, 3, 4), la.WithDropout(0.5, typed(tensor.Int, k, ""))))
		}, apart: true},

		"nn.Add": two(nn.Add), "nn.Mul": two(nn.Mul),
		"nn.GLU":        two(func(a, b *G.Node) (*G.Node, error) { return nn.GLU(a, b, nn.SiLU) }),
		"nn.Concat":     two(func(a, b *G.Node) (*G.Node, error) { return nn.Concat(0, a, b) }),
		"nn.Linear":     {build: func(in in) error { return second(nn.Linear(in(4, 4), in(4, 4), in(4))) }},
		"nn.HeadLinear": two(func(a, b *G.Node) (*G.Node, error) { return nn.HeadLinear(a, b, 1) }),
		"nn.Recompute": {build: func(in in) error {
			x := in(2, 3)
			y, err := nn.Add(x, typed(x.Dtype(), x, "own", 2, 3))
			if err != nil {
				return err
			}
			return second(nn.Recompute(x, y))
		}, apart: true},
		"nn.CrossEntropy": {build: func(in in) error {
			x := in(4, 4)
			return second(nn.CrossEntropy(x, in(4, 4), in(4), typed(tensor.Int, x, "targets", 4)))
		}},
		"nn.Embedding": {build: func(in in) error {
			return second(nn.Embedding(in(2, 4), typed(tensor.Int, in(2, 4), "ids", 2), in(2, 4)))
		}},
		"nn.Linears": {build: func(in in) error {
			return seconds(nn.Linears(in(3, 4), []*G.Node{in(5, 4), in(5, 4)}, []*G.Node{in(5), in(5)}))
		}},
		"nn.GatedLinear": {build: func(in in) error {
			return second(nn.GatedLinear(in(3, 4), []*G.Node{in(5, 4), in(5, 4)}, nil, nn.SiLU))
		}},
		"nn.LayerNorm": {build: func(in in) error { return second(nn.LayerNorm(in(3, 4), in(4), in(4), 1)) }},
		"nn.RMSNorm":   {build: func(in in) error { return second(nn.RMSNorm(in(3, 4), in(4), in(3, 4), 1)) }},
		"nn.QKNorm":    {build: func(in in) error { return second(nn.QKNorm(in(4), in(4), 1)) }},
		"nn.MergeRanks": {build: func(in in) error {
			comm, err := ranks.Join(t.Context(), nil, ranks.World{Size: 1})
			if err != nil {
				return err
			}
			_, err = nn.MergeRanks(in(2, 4), in(2, 4), comm)
			return errors.Join(err, comm.Close())
		}},
		"nn.MergeStates": {build: func(in in) error {
			_, _, err := nn.MergeStates([]*G.Node{in(3, 4), in(3, 4)}, []*G.Node{in(3), in(3)})
			return err
		}},
		"nn.Rotary": {build: func(in in) error {
			x := in(2, 4)
			return second(nn.Rotary(x, typed(tensor.Int, x, "", 2), rope.Config{HeadDim: 4}))
		}, apart: true},
		"nn.Sample": {build: func(in in) error {
			x := in(2, 4)
			choices, randoms := nn.Choices(make([]nn.Choice, 2)).Shape(), nn.Randoms(make([]float64, 2)).Shape()
			return second(nn.Sample(x, typed(tensor.Int32, x, "", choices...), typed(tensor.Int32, x, "", randoms...)))
		}, apart: true},
		"nn.WithResidual": linear(func(in in) nn.Option { return nn.WithResidual(in(4, 4)) }),
		"nn.WithNorm": {build: func(in in) error {
			return second(nn.Linear(in(3, 4), in(5, 4), nil, nn.WithNorm(in(4), in(4), 1)))
		}},
		"nn.WithRMSNorm": {build: func(in in) error {
			return second(nn.Linear(in(3, 4), in(4, 4), in(4), nn.WithRMSNorm(in(4), 1)))
		}},
	}
}

// Inputs without names that have one type and shape are one node. No function takes one as two of its operands,
// and each says what to do. With names the same call is right, and so is one named input as several operands.
func TestNamelessOperands(t *testing.T) {
	cases := operandCases(t)
	for name := range withOperands(t) {
		if _, ok := cases[name]; !ok {
			t.Errorf("%s takes several operands and is not in this test", name)
		}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			input := func(g *G.ExprGraph, name func(shape []int) string) func(shape ...int) *G.Node {
				return func(shape ...int) *G.Node {
					return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name(shape)))
				}
			}
			g := G.NewGraph()
			err := c.build(input(g, func([]int) string { return "" }))
			if c.apart && err != nil {
				t.Error(err)
			}
			if !c.apart && (!errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), " are one node, an input without a name: ") || !strings.Contains(err.Error(), "gorgonia.WithName")) {
				t.Errorf("without names: %v", err)
			}
			if err := rewrite.Check(g); !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "no name") {
				t.Errorf("CheckGraph: %v", err)
			}
			count := 0
			if err := c.build(input(G.NewGraph(), func([]int) string { count++; return fmt.Sprint("x", count) })); err != nil {
				t.Errorf("with a name for each: %v", err)
			}
			if err := c.build(input(G.NewGraph(), func(shape []int) string { return fmt.Sprint("x", shape) })); err != nil {
				t.Errorf("with a named input as several operands: %v", err)
			}
		})
	}
}

// withOperands are the exported functions of this package and of nn that make a node of several nodes, and the
// options with a node.
func withOperands(t *testing.T) map[string]bool {
	found := map[string]bool{}
	for name, f := range exportedFunctions(t) {
		nodes := 0
		for _, p := range f.Type.Params.List {
			switch of := types.ExprString(p.Type); of {
			case "*G.Node":
				nodes += len(p.Names)
			case "[]*G.Node", "...*G.Node":
				nodes += 2
			}
		}
		if of := types.ExprString(f.Type.Results.List[0].Type); nodes > 1 && strings.HasSuffix(of, "*G.Node") || nodes > 0 && strings.HasSuffix(of, "Option") {
			found[name] = true
		}
	}
	return found
}
