package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// variantCase is a variant of the gallery with a dense batch.
type variantCase struct {
	*reftest.Case
	source               variant.Source
	batch, queries, keys int
	q, k, v              *tensor.Dense
	tensors              map[string]*tensor.Dense
}

// newVariantCase makes a case with sequences of one length.
func newVariantCase(rng *rand.Rand, i int) *variantCase {
	return newVariantCaseOf(rng, i, 1+rng.IntN(20), 1+rng.IntN(20))
}

// newVariantCaseOf is newVariantCase with keys and values of these widths.
func newVariantCaseOf(rng *rand.Rand, i, dim, valueDim int) *variantCase {
	c := &variantCase{batch: 1 + rng.IntN(3), queries: 1 + rng.IntN(40), keys: 1 + rng.IntN(90), source: reftest.Gallery[i].Source}
	s := reftest.Shape{KVHeads: 1 + rng.IntN(2), Dim: dim, ValueDim: valueDim}
	s.Heads = s.KVHeads * (1 + rng.IntN(3))
	for range c.batch {
		s.Queries, s.Keys = append(s.Queries, c.queries), append(s.Keys, c.keys)
	}
	s = s.Varied(rng, i)
	c.Case = reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	dense := func(x []float64, heads, n, d int) *tensor.Dense {
		y := make([]float32, len(x))
		for b := range c.batch {
			for h := range heads {
				for t := range n {
					for j := range d {
						y[((b*heads+h)*n+t)*d+j] = float32(x[((b*n+t)*heads+h)*d+j])
					}
				}
			}
		}
		return tensor.New(tensor.WithShape(c.batch, heads, n, d), tensor.WithBacking(y))
	}
	c.q, c.k, c.v = dense(c.Q, s.Heads, c.queries, s.Dim), dense(c.K, s.KVHeads, c.keys, s.Dim), dense(c.V, s.KVHeads, c.keys, s.ValueDim)
	c.tensors = map[string]*tensor.Dense{}
	for i, d := range s.Variant.Tensors {
		of := &s.Tensors[i]
		var backing any = reftest.Convert[float32](of.F64)
		if d.Int {
			ints := make([]int, of.Len())
			for k := range ints {
				ints[k] = int(of.I32[k])
			}
			backing = ints
		}
		c.tensors[d.Name] = tensor.New(tensor.WithShape(of.Shape...), tensor.WithBacking(backing))
	}
	return c
}

// option returns the variant with these nodes.
func (c *variantCase) option(nodes map[string]*G.Node) la.Option {
	return la.WithVariant(la.Variant{Score: c.source.Score, Visible: c.source.Visible, Params: c.params(), Tensors: nodes, Unnormalised: c.source.Unnormalised})
}

func (c *variantCase) params() map[string]float64 { return c.Variant.Params }

// check compares an output (batch, heads, queries, dv) with the reference.
func (c *variantCase) check(out *tensor.Dense, rowMajor bool) error {
	want := c.Reference(reftest.Precision{Acc: reftest.Float32})
	got := out.Data().([]float32)
	for b := range c.batch {
		for h := range c.Heads {
			for t := range c.queries {
				for j := range c.ValueDim {
					at := ((b*c.queries+t)*c.Heads+h)*c.ValueDim + j
					x := float64(got[((b*c.Heads+h)*c.queries+t)*c.ValueDim+j])
					if rowMajor {
						x = float64(got[at])
					}
					if math.Abs(x-want.O[at]) > want.OBound[at] {
						return fmt.Errorf("%v: out[%d %d %d %d] is %v, want %v within %v", c.Shape, b, h, t, j, x, want.O[at], want.OBound[at])
					}
				}
			}
		}
	}
	return nil
}

func (c *variantCase) inputs(g *G.ExprGraph) (q, k, v *G.Node, tensors map[string]*G.Node) {
	q, k, v = G.NodeFromAny(g, c.q, G.WithName("q")), G.NodeFromAny(g, c.k, G.WithName("k")), G.NodeFromAny(g, c.v, G.WithName("v"))
	for name, t := range c.tensors {
		if tensors == nil {
			tensors = map[string]*G.Node{}
		}
		tensors[name] = G.NodeFromAny(g, t, G.WithName(name))
	}
	return q, k, v, tensors
}

// TestVariantPage: the gallery of docs/variants.md is that of the tests.
func TestVariantPage(t *testing.T) {
	page, err := os.ReadFile("docs/variants.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for _, m := range regexp.MustCompile("(?m)^\\| ([a-zA-Z].*?) \\| (?:`(.*?)` )?\\| (?:`(.*?)` )?\\|$").FindAllStringSubmatch(string(page), -1) {
		name, _, _ := strings.Cut(m[1], ", with")
		if name == "what" {
			continue
		}
		rows++
		found := false
		for _, e := range reftest.Gallery {
			found = found || e.Name == name && e.Score == m[2] && e.Visible == strings.ReplaceAll(m[3], "\\|", "|")
		}
		if !found {
			t.Errorf("no test has %q", m[1:])
		}
	}
	if rows != 10 {
		t.Errorf("%d rows", rows)
	}
}

// TestVariantGallery: Attention and Attend with each variant of the gallery.
func TestVariantGallery(t *testing.T) {
	rng := reftest.Rand(t)
	for i, entry := range reftest.Gallery {
		for range 3 {
			c := newVariantCase(rng, i)
			g := G.NewGraph()
			q, k, v, tensors := c.inputs(g)
			out, err := la.Attention(q, k, v, c.option(tensors))
			if err != nil {
				t.Fatalf("%s: %v", entry.Name, err)
			}
			m := G.NewTapeMachine(g)
			if err := m.RunAll(); err != nil {
				t.Fatalf("%s: %v", entry.Name, err)
			}
			m.Close()
			if err := c.check(out.Value().(*tensor.Dense), false); err != nil {
				t.Fatalf("%s: %v", entry.Name, err)
			}
			args := la.Args{Q: c.q, K: c.k, V: c.v, Out: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(c.batch, c.Heads, c.queries, c.ValueDim))}
			for name, x := range c.tensors {
				if args.Tensors == nil {
					args.Tensors = map[string]G.Value{}
				}
				args.Tensors[name] = x
			}
			if err := la.Attend(args, c.option(nil)); err != nil {
				t.Fatalf("%s: %v", entry.Name, err)
			}
			if err := c.check(args.Out.(*tensor.Dense), false); err != nil {
				t.Fatalf("Attend, %s: %v", entry.Name, err)
			}
		}
	}
}

// TestVariantCached: the sequences of a cache, in prompts of random chunks.
func TestVariantCached(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range reftest.Gallery {
		c := newVariantCase(rng, i)
		for c.queries > c.keys {
			c = newVariantCase(rng, i)
		}
		testVariantCached(t, rng, c, la.CacheConfig{DType: tensor.Float32}, nil)
	}
}

// testVariantCached checks a case in a cache. Inputs are on a GPU, or in host memory if there is nil.
func testVariantCached(t *testing.T, rng *rand.Rand, c *variantCase, config la.CacheConfig, there *device.GPU) {
	t.Helper()
	config.Layers, config.KVHeads, config.HeadDim, config.ValueDim, config.PageSize, config.Pages = 1, c.KVHeads, c.Dim, c.ValueDim, 1+rng.IntN(20), 300
	cache, err := la.NewCache(config)
	if err != nil {
		t.Fatal(err)
	}
	seqs := make([]*la.Sequence, c.batch)
	for b := range seqs {
		if seqs[b], err = cache.NewSequence(); err != nil {
			t.Fatal(err)
		}
	}
	move := func(n *G.Node) *G.Node {
		if there == nil {
			return n
		}
		return graphtest.Move(t, n, func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, there) })
	}
	// First all keys before the queries, by steps without the variant, and then the queries in one step.
	for _, phase := range []struct{ from, n int }{{0, c.keys - c.queries}, {c.keys - c.queries, c.queries}} {
		if phase.n == 0 {
			continue
		}
		rows := c.batch * phase.n
		step, err := cache.NewStep(rows)
		if err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		queries, keys, values := make([]float32, rows*c.Heads*c.Dim), make([]float32, rows*c.KVHeads*c.Dim), make([]float32, rows*c.KVHeads*c.ValueDim)
		for b := range c.batch {
			for j := range phase.n {
				for h := range c.KVHeads {
					copy(keys[((b*phase.n+j)*c.KVHeads+h)*c.Dim:], reftest.Convert[float32](c.Key(b, phase.from+j, h)))
					copy(values[((b*phase.n+j)*c.KVHeads+h)*c.ValueDim:], reftest.Convert[float32](c.Value(b, phase.from+j, h)))
				}
				for h := range c.Heads {
					if phase.from > 0 || c.keys == c.queries {
						copy(queries[((b*phase.n+j)*c.Heads+h)*c.Dim:], reftest.Convert[float32](c.Query(b, j, h)))
					}
				}
			}
		}
		node := func(name string, x []float32, width int) *G.Node {
			return move(G.NodeFromAny(g, tensor.New(tensor.WithShape(rows, width), tensor.WithBacking(x)), G.WithName(name)))
		}
		q, k, v := node("q", queries, c.Heads*c.Dim), node("k", keys, c.KVHeads*c.Dim), node("v", values, c.KVHeads*c.ValueDim)
		var opts []la.Option
		last := phase.from+phase.n == c.keys
		if last {
			tensors := map[string]*G.Node{}
			for name, x := range c.tensors {
				if there != nil {
					x = forGPU(x)
				}
				tensors[name] = move(G.NodeFromAny(g, x, G.WithName(name)))
			}
			opts = append(opts, c.option(tensors))
		}
		out, err := la.CachedAttention(q, k, v, step.Layer(0), opts...)
		if err != nil {
			t.Fatal(err)
		}
		if there != nil {
			out = graphtest.Move(t, out, device.ToHost)
		}
		m := G.NewTapeMachine(g)
		var appends []la.Append
		for _, s := range seqs {
			appends = append(appends, la.Append{Seq: s, Tokens: phase.n})
		}
		if err := step.Run(appends, func() error { return la.Cause(m.RunAll()) }); err != nil {
			t.Fatal(err)
		}
		if last {
			if err := c.check(out.Value().(*tensor.Dense), true); err != nil {
				t.Fatal(err)
			}
		}
		m.Close()
	}
	if err := cache.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestVariantRefused: what a variant cannot be is an error that names the part.
func TestVariantRefused(t *testing.T) {
	c := newVariantCase(rand.New(rand.NewPCG(1, 2)), 0)
	out := tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(c.batch, c.Heads, c.queries, c.ValueDim))
	args := la.Args{Q: c.q, K: c.k, V: c.v, Out: out}
	table := tensor.New(tensor.WithShape(2), tensor.WithBacking([]float32{1, 2}))
	for _, x := range []struct {
		v    la.Variant
		args func(*la.Args)
		opts []la.Option
		kind error
		text string
	}{
		{la.Variant{Score: "scor"}, nil, nil, la.ErrOption, "scor: no variable"},
		{la.Variant{Visible: "key"}, nil, nil, la.ErrOption, "must be a bool"},
		{la.Variant{Score: "table[key]"}, func(a *la.Args) { a.Tensors = map[string]G.Value{"table": table} }, nil, la.ErrShape, "table[key]: the index key is between 0 and"},
		{la.Variant{Score: "table[head%2]"}, func(a *la.Args) {
			a.Tensors = map[string]G.Value{"table": tensor.New(tensor.WithShape(2), tensor.WithBacking([]float64{1, 2}))}
		}, nil, la.ErrDType, "table is float64"},
		{la.Variant{Score: "score"}, func(a *la.Args) { a.Tensors = map[string]G.Value{"table": table} }, nil, la.ErrOption, "no expression reads the tensor table"},
		{la.Variant{Unnormalised: true}, func(a *la.Args) {
			a.LSE = tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(c.batch, c.Heads, c.queries))
		}, nil, la.ErrUnsupported, "no sum"},
		{la.Variant{Score: "score"}, func(a *la.Args) {
			a.Parents = make([][]int, c.batch)
			for b := range a.Parents {
				a.Parents[b] = make([]int, min(c.queries, 1))
				a.Parents[b][0] = -1
			}
			a.QueryLengths = make([]int, c.batch)
			for b := range a.QueryLengths {
				a.QueryLengths[b] = 1
			}
		}, []la.Option{la.WithCausal()}, la.ErrUnsupported, "tree"},
		{la.Variant{Score: "score"}, nil, []la.Option{la.WithWindow(4), la.WithSinkTokens(2)}, la.ErrUnsupported, "WithSinkTokens"},
	} {
		a := args
		if x.args != nil {
			x.args(&a)
		}
		err := la.Attend(a, append(x.opts, la.WithVariant(x.v))...)
		if !errors.Is(err, x.kind) || !strings.Contains(fmt.Sprint(err), x.text) {
			t.Errorf("%+v: %v, want %v with %q", x.v, err, x.kind, x.text)
		}
	}
}

// TestVariantGradients: gradients of q, k, v and of tensors, through a graph.
func TestVariantGradients(t *testing.T) {
	rng := reftest.Rand(t)
	for i, entry := range reftest.Gallery {
		c := newVariantCase(rng, i)
		g := G.NewGraph()
		q, k, v, tensors := c.inputs(g)
		out, err := la.Attention(q, k, v, c.option(tensors))
		if err != nil {
			t.Fatal(err)
		}
		dO := make([]float64, len(c.Q)/c.Dim*c.ValueDim) // by token, head and element
		by := make([]float32, len(dO))
		for b := range c.batch {
			for n := range c.queries {
				for h := range c.Heads {
					for j := range c.ValueDim {
						x := float32(rng.NormFloat64())
						dO[((b*c.queries+n)*c.Heads+h)*c.ValueDim+j] = float64(x)
						by[((b*c.Heads+h)*c.queries+n)*c.ValueDim+j] = x
					}
				}
			}
		}
		weights := G.NewConstant(tensor.New(tensor.WithShape(c.batch, c.Heads, c.queries, c.ValueDim), tensor.WithBacking(by)))
		cost := G.Must(G.Sum(G.Must(G.HadamardProd(out, weights))))
		wrt := G.Nodes{q, k, v}
		var learned []int
		for n, d := range c.Variant.Tensors {
			if !d.Int {
				learned, wrt = append(learned, n), append(wrt, tensors[d.Name])
			}
		}
		grads, err := G.Grad(cost, wrt...)
		if err != nil {
			t.Fatalf("%s: %v", entry.Name, err)
		}
		m := G.NewTapeMachine(g)
		if err := m.RunAll(); err != nil {
			t.Fatalf("%s: %v", entry.Name, err)
		}
		p := reftest.Precision{Acc: reftest.Float32}
		want := c.Backward(p, c.Reference(p), dO, nil)
		tokens := func(x G.Value, heads, n, d int) (y []float64) {
			of := x.(*tensor.Dense).Data().([]float32)
			for b := range c.batch {
				for at := range n {
					for h := range heads {
						for j := range d {
							y = append(y, float64(of[((b*heads+h)*n+at)*d+j]))
						}
					}
				}
			}
			return y
		}
		for n, x := range []struct{ got, want, bound []float64 }{
			{tokens(grads[0].Value(), c.Heads, c.queries, c.Dim), want.DQ, want.DQBound},
			{tokens(grads[1].Value(), c.KVHeads, c.keys, c.Dim), want.DK, want.DKBound},
			{tokens(grads[2].Value(), c.KVHeads, c.keys, c.ValueDim), want.DV, want.DVBound},
		} {
			if err := reftest.Compare(x.got, x.want, x.bound, len(x.got)); err != nil {
				t.Fatalf("%s: gradient %d: %v", entry.Name, n, err)
			}
		}
		for n, of := range learned {
			got := grads[3+n].Value().(*tensor.Dense).Data().([]float32)
			if err := reftest.Compare(got, want.DTensors[of], want.DTensorsBound[of], len(got)); err != nil {
				t.Fatalf("%s: gradient of %s: %v", entry.Name, c.Variant.Tensors[of].Name, err)
			}
		}
		m.Close()
	}
}
