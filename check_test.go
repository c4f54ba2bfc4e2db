package leanattention_test

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"

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
