package leanattention_test

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

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
	err := la.CheckGraph(g)
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
	if err := la.CheckGraph(g); err != nil {
		t.Error(err)
	}

	if err := la.CheckGraph(nil); !errors.Is(err, la.ErrGraph) {
		t.Errorf("a nil graph: %v", err)
	}
	if err := la.CheckGraph(G.NewGraph()); err != nil {
		t.Errorf("an empty graph: %v", err)
	}
}

// TestGradient: there is none yet, which is an error and not a panic, on both
// machines; a graph in which nobody differentiates through the attention is no
// trouble.
func TestGradient(t *testing.T) {
	rng := reftest.Rand(t)
	for _, name := range []string{"q", "k", "v", "lse"} {
		p := newProblem(rng, dense(2, 1, 8, 8, 2, 20, 30), spec{query: tensor.Float64})
		g := p.build(t)
		from, wrt := g.out, map[string]*G.Node{"q": g.q, "k": g.k, "v": g.v, "lse": g.q}[name]
		if name == "lse" {
			from = g.lse
		}
		cost := G.Must(G.Sum(from))
		if name == "lse" { // beside a way that has a gradient
			cost = G.Must(G.Add(cost, G.Must(G.Sum(g.q))))
		}
		_, err := G.Grad(cost, wrt)
		checkGradError(t, name, err)
	}

	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	m := func(name string) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithName(name), G.WithShape(2, 4))
	}
	q := m("q")
	out, err := la.CachedAttention(q, m("k"), m("v"), step.Layer(0))
	if err != nil {
		t.Fatal(err)
	}
	_, err = G.Grad(G.Must(G.Sum(out)), q)
	checkGradError(t, "cache", err)

	// Beside the path of a gradient the attention does not matter.
	p := newProblem(rng, dense(2, 1, 4, 4, 1, 5), spec{query: tensor.Float64})
	d := p.attention(t)
	w := input(d.g, "w", tensorOf(tensor.Float64, []float64{1, 2, 3}, 3))
	cost := G.Must(G.Sum(G.Must(G.Square(w))))
	grads, err := G.Grad(cost, w)
	if err != nil {
		t.Fatal(err)
	}
	var gradV G.Value
	G.Read(grads[0], &gradV)
	d.run(t)
	p.check(t, p.Reference(p.precision(0)), d.outV, d.lseV)
	if got := floats(t, gradV); got[0] != 2 || got[1] != 4 || got[2] != 6 {
		t.Errorf("gradient of w is %v", got)
	}
}

// checkGradError looks at the text: Gorgonia's own error around ours does not unwrap.
func checkGradError(t *testing.T, name string, err error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), "gradient") || !strings.Contains(err.Error(), la.ErrUnsupported.Error()) {
		t.Errorf("%s: Grad gives %v", name, err)
	}
}

// TestGradientLisp: the lisp machine's way.
func TestGradientLisp(t *testing.T) {
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(2, 1, 4, 4, 1, 5), spec{query: tensor.Float64})
	g := p.graph()
	var err error
	if g.out, err = la.Attention(g.q, g.k, g.v); err != nil {
		t.Fatal(err)
	}
	G.Must(G.Sum(g.out))
	vm := G.NewLispMachine(g.g)
	defer vm.Close()
	if err := vm.RunAll(); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("RunAll gives %v, not ErrUnsupported", err)
	}
}
