package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var sentinels = []error{
	la.ErrShape, la.ErrDType, la.ErrLength, la.ErrOption, la.ErrUnsupported,
	la.ErrCacheFull, la.ErrState, la.ErrClosed, la.ErrGraph, la.ErrOutOfMemory, la.ErrInternal,
}

// wantError checks that err wraps the one sentinel and no other, and that it
// names the operation and what was wrong with it.
func wantError(t testing.TB, err, sentinel error, op string, texts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want %q", sentinel)
		return
	}
	for _, s := range sentinels {
		if errors.Is(err, s) != (s == sentinel) {
			t.Errorf("errors.Is(%q, %q) is %t", err, s, errors.Is(err, s))
		}
	}
	for _, text := range append(texts, "leanattention: "+op+": ") {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not contain %q", err, text)
		}
	}
}

// badOptions are the option values that every taker refuses.
var badOptions = []struct {
	name string
	opt  la.Option
	want error
	text string
}{
	{"zero option", la.Option{}, la.ErrUnsupported, ": the zero Option: "},
	{"NaN scale", la.WithScale(math.NaN()), la.ErrOption, "WithScale(NaN)"},
	{"infinite scale", la.WithScale(math.Inf(-1)), la.ErrOption, "WithScale(-Inf)"},
	{"negative tile", la.WithTileTokens(-1), la.ErrOption, "WithTileTokens(-1)"},
	{"huge tile", la.WithTileTokens(1<<16 + 1), la.ErrOption, "WithTileTokens(65537)"},
	{"negative workers", la.WithWorkers(-1), la.ErrOption, "WithWorkers(-1)"},
	{"many workers", la.WithWorkers(1<<12 + 1), la.ErrOption, "WithWorkers(4097)"},
	{"no splits", la.WithSchedule(la.FixedSplit(0)), la.ErrOption, "WithSchedule(FixedSplit(0)): at least one split"},
	{"negative splits", la.WithSchedule(la.FixedSplit(-3)), la.ErrOption, "WithSchedule("},
	{"no window", la.WithWindow(0), la.ErrOption, "WithWindow(0)"},
	{"negative window", la.WithWindow(-5), la.ErrOption, "WithWindow(-5)"},
	{"negative sink tokens", la.WithSinkTokens(-1), la.ErrOption, "WithSinkTokens(-1)"},
	{"sink tokens without a window", la.WithSinkTokens(4), la.ErrOption, "WithSinkTokens(4) without WithWindow"},
	{"no soft cap", la.WithSoftCap(0), la.ErrOption, "WithSoftCap(0)"},
	{"negative soft cap", la.WithSoftCap(-1), la.ErrOption, "WithSoftCap(-1)"},
	{"NaN soft cap", la.WithSoftCap(math.NaN()), la.ErrOption, "WithSoftCap(NaN)"},
	{"infinite soft cap", la.WithSoftCap(math.Inf(1)), la.ErrOption, "WithSoftCap(+Inf)"},
	{"NaN slope", la.WithALiBi([]float64{1, math.NaN()}), la.ErrOption, "WithALiBi: the slope of head 1 is NaN"},
	{"infinite slope", la.WithALiBi([]float64{math.Inf(-1)}), la.ErrOption, "WithALiBi: the slope of head 0 is -Inf"},
	{"too many slopes", la.WithALiBi(make([]float64, 50)), la.ErrShape, "WithALiBi has 50 slopes for "},
	{"no slopes", la.WithALiBi(nil), la.ErrShape, "WithALiBi has 0 slopes for "},
}

// builder is Attention or Default.
type builder func(q, k, v *G.Node, opts ...la.Option) (*G.Node, error)

// input3 is an input of some element type and shape; nil dims make a nil node.
type input3 struct {
	of    tensor.Dtype
	shape []int
}

// badShapes are operands that fit nothing, for everything that takes dense q, k and v.
var badShapes = []struct {
	name    string
	q, k, v input3
	want    error
	texts   []string
}{
	{"q of rank 2", f32(3, 8), f32(2, 3, 5, 8), f32(2, 3, 5, 8), la.ErrShape, []string{"q has rank 2", "(3, 8)"}},
	{"q of rank 5", f32(1, 2, 3, 4, 8), f32(2, 3, 5, 8), f32(2, 3, 5, 8), la.ErrShape, []string{"q has rank 5"}},
	{"q of rank 1", f32(8), f32(2, 3, 5, 8), f32(2, 3, 5, 8), la.ErrShape, []string{"q has rank 1"}},
	{"k of rank 2", f32(2, 3, 1, 8), f32(5, 8), f32(2, 3, 5, 8), la.ErrShape, []string{"k has rank 2"}},
	{"v of rank 2", f32(2, 3, 1, 8), f32(2, 3, 5, 8), f32(5, 8), la.ErrShape, []string{"v has rank 2"}},
	{"k of another rank", f32(2, 3, 1, 8), f32(3, 5, 8), f32(3, 5, 8), la.ErrShape, []string{"k has rank 3", "q rank 4"}},
	{"v of another rank", f32(3, 1, 8), f32(3, 5, 8), f32(2, 3, 5, 8), la.ErrShape, []string{"v has rank 4", "q rank 3"}},
	{"batches", f32(2, 3, 1, 8), f32(1, 3, 5, 8), f32(2, 3, 5, 8), la.ErrShape, []string{"batch is 2 in q, 1 in k, 2 in v"}},
	{"batches of v", f32(2, 3, 1, 8), f32(2, 3, 5, 8), f32(4, 3, 5, 8), la.ErrShape, []string{"4 in v"}},
	{"heads of k and v", f32(2, 6, 1, 8), f32(2, 3, 5, 8), f32(2, 2, 5, 8), la.ErrShape, []string{"k has 3 heads and v 2"}},
	{"head group", f32(2, 13, 1, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 8), la.ErrShape, []string{"q has 13 heads", "4 heads of k"}},
	{"more KV heads", f32(2, 2, 1, 8), f32(2, 4, 5, 8), f32(2, 4, 5, 8), la.ErrShape, []string{"q has 2 heads"}},
	{"head dim", f32(2, 3, 1, 8), f32(2, 3, 5, 9), f32(2, 3, 5, 9), la.ErrShape, []string{"q has head dim 8 and k 9"}},
	{"keys", f32(2, 3, 1, 8), f32(2, 3, 5, 8), f32(2, 3, 6, 8), la.ErrShape, []string{"k has 5 keys and v 6"}},
	{"int q", input3{tensor.Int, []int{2, 3, 1, 8}}, f32(2, 3, 5, 8), f32(2, 3, 5, 8), la.ErrDType, []string{"q is int"}},
	{"float16 q", input3{la.Float16, []int{2, 3, 1, 8}}, f32(2, 3, 5, 8), f32(2, 3, 5, 8), la.ErrDType, []string{"q is Float16"}},
	{"bfloat16 q", input3{la.BFloat16, []int{2, 3, 1, 8}}, f32(2, 3, 5, 8), f32(2, 3, 5, 8), la.ErrDType, []string{"q is BFloat16"}},
	{"int k", f32(2, 3, 1, 8), input3{tensor.Int32, []int{2, 3, 5, 8}}, f32(2, 3, 5, 8), la.ErrDType, []string{"k is int32"}},
	{"v unlike k", f32(2, 3, 1, 8), f32(2, 3, 5, 8), input3{tensor.Float64, []int{2, 3, 5, 8}}, la.ErrDType, []string{"v is float64 and k is float32"}},
	{"v unlike k, 16 bits", f32(2, 3, 1, 8), input3{la.Float16, []int{2, 3, 5, 8}}, input3{la.BFloat16, []int{2, 3, 5, 8}}, la.ErrDType, []string{"v is BFloat16 and k is Float16"}},
}

func f32(shape ...int) input3 { return input3{tensor.Float32, shape} }

func (x input3) node(g *G.ExprGraph, name string) *G.Node {
	return G.NewTensor(g, x.of, len(x.shape), G.WithShape(x.shape...), G.WithName(name))
}

func (x input3) tensor() *tensor.Dense {
	return tensor.New(tensor.Of(x.of), tensor.WithShape(x.shape...))
}

// good operands, of batch 2: 6 heads over 3, 5 keys.
var goodQ, goodK, goodV = f32(2, 6, 1, 8), f32(2, 3, 5, 8), f32(2, 3, 5, 4)

// checkBuilder checks that build fails as wanted, makes no node, and adds none
// to the graph.
func checkBuilder(t *testing.T, op string, g *G.ExprGraph, build func() (*G.Node, error), want error, texts ...string) {
	t.Helper()
	before := len(g.AllNodes())
	n, err := build()
	wantError(t, err, want, op, texts...)
	if n != nil {
		t.Errorf("a node beside the error: %v", n)
	}
	if after := len(g.AllNodes()); after != before {
		t.Errorf("the graph has %d nodes more than before", after-before)
	}
}

func TestBadInputBuilders(t *testing.T) {
	for op, build := range map[string]builder{"Attention": la.Attention, "Default": la.Default} {
		bad := func(name string, want error, texts []string, f func(g *G.ExprGraph) func() (*G.Node, error)) {
			t.Run(op+"/"+name, func(t *testing.T) {
				g := G.NewGraph()
				checkBuilder(t, op, g, f(g), want, texts...)
			})
		}
		for _, c := range badShapes {
			bad(c.name, c.want, c.texts, func(g *G.ExprGraph) func() (*G.Node, error) {
				q, k, v := c.q.node(g, "q"), c.k.node(g, "k"), c.v.node(g, "v")
				return func() (*G.Node, error) { return build(q, k, v) }
			})
		}
		// with builds on good operands, of which f may replace some.
		with := func(name string, want error, texts []string, f func(g *G.ExprGraph, x *[3]*G.Node) []la.Option) {
			bad(name, want, texts, func(g *G.ExprGraph) func() (*G.Node, error) {
				x := [3]*G.Node{goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v")}
				opts := f(g, &x)
				return func() (*G.Node, error) { return build(x[0], x[1], x[2], opts...) }
			})
		}
		for i, name := range []string{"q", "k", "v"} {
			with("nil "+name, la.ErrGraph, []string{name + " is nil"}, func(_ *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = nil
				return nil
			})
			with("node without type as "+name, la.ErrDType, []string{name + " has no element type"}, func(g *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = G.NewUniqueNode(G.In(g), G.WithName("untyped"))
				return nil
			})
			with("empty node as "+name, la.ErrDType, []string{name + " has no element type"}, func(_ *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = new(G.Node)
				return nil
			})
			with(name+" of another graph", la.ErrGraph, []string{"is in another graph than q"}, func(_ *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = []input3{goodQ, goodK, goodV}[i].node(G.NewGraph(), name)
				return nil
			})
			with("scalar "+name, la.ErrShape, []string{name + " has rank 0"}, func(g *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = G.NewScalar(g, tensor.Float32, G.WithName("scalar"))
				return nil
			})
			with("empty axis of "+name, la.ErrShape, []string{name + " has size 0 on axis 2"}, func(g *G.ExprGraph, x *[3]*G.Node) []la.Option {
				x[i] = f32(2, 6, 0, 8).node(g, "empty")
				return nil
			})
		}
		for _, o := range badOptions {
			want, texts := o.want, []string{o.text}
			if op == "Default" && o.want == la.ErrOption && (strings.Contains(o.text, "Tile") || strings.Contains(o.text, "Workers") || strings.Contains(o.text, "Schedule")) {
				want, texts = la.ErrUnsupported, []string{o.text[:strings.Index(o.text, "(")]} // it takes no such option at all
			}
			with(o.name, want, texts, func(*G.ExprGraph, *[3]*G.Node) []la.Option { return []la.Option{o.opt} })
		}
	}

	// Numbers that are added to the scores, of (2, 6, 1, 5).
	for op, build := range map[string]builder{"Attention": la.Attention, "Default": la.Default} {
		for _, c := range []struct {
			name string
			bias func(g *G.ExprGraph) *G.Node
			want error
			text string
		}{
			{"nil bias", func(*G.ExprGraph) *G.Node { return nil }, la.ErrOption, "WithBias(nil)"},
			{"bias of rank 3", func(g *G.ExprGraph) *G.Node { return f32(6, 1, 5).node(g, "bias") }, la.ErrShape, "bias has shape (6, 1, 5); it must be (2, 6, 1, 5)"},
			{"scalar bias", func(g *G.ExprGraph) *G.Node { return G.NewScalar(g, tensor.Float32, G.WithName("bias")) }, la.ErrShape, "bias has shape ()"},
			{"bias of a KV head", func(g *G.ExprGraph) *G.Node { return f32(2, 3, 1, 5).node(g, "bias") }, la.ErrShape, "bias has shape (2, 3, 1, 5)"},
			{"bias of more sequences", func(g *G.ExprGraph) *G.Node { return f32(3, 1, 1, 5).node(g, "bias") }, la.ErrShape, "bias has shape (3, 1, 1, 5)"},
			{"bias of more queries", func(g *G.ExprGraph) *G.Node { return f32(1, 1, 2, 5).node(g, "bias") }, la.ErrShape, "bias has shape (1, 1, 2, 5)"},
			{"bias of one key", func(g *G.ExprGraph) *G.Node { return f32(2, 6, 1, 1).node(g, "bias") }, la.ErrShape, "bias has shape (2, 6, 1, 1)"},
			{"float64 bias", func(g *G.ExprGraph) *G.Node { return input3{tensor.Float64, []int{2, 6, 1, 5}}.node(g, "bias") }, la.ErrDType, "bias is float64 and q is float32"},
			{"bias of another graph", func(*G.ExprGraph) *G.Node { return f32(2, 6, 1, 5).node(G.NewGraph(), "bias") }, la.ErrGraph, "bias is in another graph than q"},
			{"bias without type", func(g *G.ExprGraph) *G.Node { return G.NewUniqueNode(G.In(g), G.WithName("untyped")) }, la.ErrDType, "bias has no element type"},
		} {
			t.Run(op+"/"+c.name, func(t *testing.T) {
				g := G.NewGraph()
				q, k, v, opt := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), la.WithBias(c.bias(g))
				checkBuilder(t, op, g, func() (*G.Node, error) { return build(q, k, v, opt) }, c.want, c.text)
			})
		}
	}

	attention := func(name string, want error, text string, f func(g *G.ExprGraph) la.Option) {
		t.Run("Attention/"+name, func(t *testing.T) {
			g := G.NewGraph()
			q, k, v, opt := goodQ.node(g, "q"), goodK.node(g, "k"), goodV.node(g, "v"), f(g)
			checkBuilder(t, "Attention", g, func() (*G.Node, error) { return la.Attention(q, k, v, opt) }, want, text)
		})
	}
	for _, scale := range [][]float64{{0}, {math.NaN()}, {math.Inf(1)}, {1, 1}} {
		attention(fmt.Sprint("bias scaled by ", scale), la.ErrOption, "WithBias: scale must be one number", func(g *G.ExprGraph) la.Option {
			return la.WithBias(f32(2, 6, 1, 5).node(g, "bias"), scale...)
		})
	}
	lengths := func(of tensor.Dtype, shape ...int) func(*G.ExprGraph) la.Option {
		return func(g *G.ExprGraph) la.Option { return la.WithLengths(input3{of, shape}.node(g, "lengths")) }
	}
	attention("nil lengths", la.ErrOption, "WithLengths(nil)", func(*G.ExprGraph) la.Option { return la.WithLengths(nil) })
	attention("float lengths", la.ErrDType, "lengths is float32", lengths(tensor.Float32, 2))
	attention("uint8 lengths", la.ErrDType, "lengths is uint8", lengths(tensor.Uint8, 2))
	attention("too few lengths", la.ErrShape, "lengths has shape (1)", lengths(tensor.Int, 1))
	attention("too many lengths", la.ErrShape, "lengths has shape (3)", lengths(tensor.Int, 3))
	attention("matrix of lengths", la.ErrShape, "lengths has shape (2, 1)", lengths(tensor.Int, 2, 1))
	attention("scalar length", la.ErrShape, "lengths has shape ()", func(g *G.ExprGraph) la.Option {
		return la.WithLengths(G.NewScalar(g, tensor.Int, G.WithName("lengths")))
	})
	attention("lengths of another graph", la.ErrGraph, "lengths is in another graph than q", func(*G.ExprGraph) la.Option {
		return lengths(tensor.Int, 2)(G.NewGraph())
	})
	attention("lengths without type", la.ErrDType, "lengths has no element type", func(g *G.ExprGraph) la.Option {
		return la.WithLengths(G.NewUniqueNode(G.In(g), G.WithName("untyped")))
	})

	queries := func(of tensor.Dtype, shape ...int) func(*G.ExprGraph) la.Option {
		return func(g *G.ExprGraph) la.Option {
			return la.WithQueryLengths(input3{of, shape}.node(g, "query lengths"))
		}
	}
	attention("nil query lengths", la.ErrOption, "WithQueryLengths(nil)", func(*G.ExprGraph) la.Option { return la.WithQueryLengths(nil) })
	attention("float query lengths", la.ErrDType, "query lengths is float64", queries(tensor.Float64, 2))
	attention("too few query lengths", la.ErrShape, "query lengths has shape (1)", queries(tensor.Int, 1))
	attention("query lengths of another graph", la.ErrGraph, "query lengths is in another graph than q", func(*G.ExprGraph) la.Option {
		return queries(tensor.Int, 2)(G.NewGraph())
	})

	def := func(name string, want error, text string, q, k, v input3, opt la.Option) {
		t.Run("Default/"+name, func(t *testing.T) {
			g := G.NewGraph()
			nodes := [3]*G.Node{q.node(g, "q"), k.node(g, "k"), v.node(g, "v")}
			checkBuilder(t, "Default", g, func() (*G.Node, error) { return la.Default(nodes[0], nodes[1], nodes[2], opt) }, want, text)
		})
	}
	g := G.NewGraph()
	def("lengths", la.ErrUnsupported, "WithLengths", goodQ, goodK, goodV, lengths(tensor.Int, 2)(g))
	def("query lengths", la.ErrUnsupported, "WithQueryLengths", goodQ, goodK, goodV, queries(tensor.Int, 2)(g))
	def("queries at the end", la.ErrUnsupported, "WithQueriesAtEnd", goodQ, goodK, goodV, la.WithQueriesAtEnd())
	def("schedule", la.ErrUnsupported, "WithSchedule", goodQ, goodK, goodV, la.WithSchedule(la.StreamK))
	def("tile", la.ErrUnsupported, "WithTileTokens", goodQ, goodK, goodV, la.WithTileTokens(0))
	def("workers", la.ErrUnsupported, "WithWorkers", goodQ, goodK, goodV, la.WithWorkers(1))
	def("blind rows", la.ErrUnsupported, "6 queries over 5 keys", f32(2, 6, 6, 8), goodK, goodV, la.WithCausal())
	half := func(x input3) input3 { return input3{la.Float16, x.shape} }
	def("float16 keys", la.ErrDType, "k is Float16 and q is float32", goodQ, half(goodK), half(goodV), la.WithScale(1))
	double := func(x input3) input3 { return input3{tensor.Float64, x.shape} }
	def("float64 keys", la.ErrDType, "k is float64 and q is float32", goodQ, double(goodK), double(goodV), la.WithScale(1))
}

// TestBadInputValues: what only shows when the graph runs, or when an op is
// called with values that are not its nodes'.
func TestBadInputValues(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range []struct {
		lengths []int
		text    string
	}{
		{[]int{-1, 3}, "lengths[0] is -1"}, {[]int{3, 41}, "lengths[1] is 41, outside [0, 40]"}, {[]int{math.MaxInt, 0}, "lengths[0] is"}, {[]int{0, math.MinInt}, "lengths[1] is"},
	} {
		for _, of := range []tensor.Dtype{tensor.Int, tensor.Int32, tensor.Int64} {
			if of == tensor.Int32 && (c.lengths[0] > 99 || c.lengths[1] < -99) {
				continue
			}
			p := graphtest.NewProblem(rng, dense(2, 1, 4, 4, 1, 40, 3), graphtest.Spec{Capacity: 40})
			g := p.Graph()
			g.Lengths = graphtest.Input(g.G, "lengths", graphtest.LengthsOf(of, c.lengths))
			var err error
			if g.Out, err = la.Attention(g.Q, g.K, g.V, la.WithLengths(g.Lengths)); err != nil {
				t.Fatal(err)
			}
			g.LSE = graphtest.LogSumExp(t, g.Out)
			g.Read(t)
			vm := G.NewTapeMachine(g.G)
			wantError(t, la.Cause(vm.RunAll()), la.ErrLength, "Attention", c.text)
			if g.OutValue != nil || g.LSEValue != nil {
				t.Error("a failed run left a value")
			}
			// The machine is as good as before.
			vm.Reset()
			graphtest.Let(t, g.Lengths, graphtest.LengthsOf(of, p.Keys))
			graphtest.Again(t, vm)
			p.Check(t, p.Reference(p.Precision(0)), g.OutValue, g.LSEValue)
			vm.Close()
		}
	}

	p := graphtest.NewProblem(rng, dense(2, 1, 4, 4, 1, 40, 3), graphtest.Spec{Capacity: 40})
	g := p.Attention(t)
	l := graphtest.LengthsOf(tensor.Int, p.Keys)
	op, outputOp := g.Out.Op(), g.LSE.Op()
	scalar := G.NewF32(1)
	for _, c := range []struct {
		name string
		in   []G.Value
		want error
		text string
	}{
		{"none", nil, la.ErrShape, "0 inputs"},
		{"three of four", []G.Value{p.InQ, p.InK, p.InV}, la.ErrShape, "3 inputs"},
		{"nil q", []G.Value{nil, p.InK, p.InV, l}, la.ErrShape, "q is nil"},
		{"nil tensor k", []G.Value{p.InQ, (*tensor.Dense)(nil), p.InV, l}, la.ErrShape, "k is nil"},
		{"scalar v", []G.Value{p.InQ, p.InK, scalar, l}, la.ErrUnsupported, "v is a *gorgonia.F32"},
		{"nil lengths", []G.Value{p.InQ, p.InK, p.InV, nil}, la.ErrShape, "lengths is nil"},
		{"float lengths", []G.Value{p.InQ, p.InK, p.InV, p.InQ}, la.ErrDType, "lengths is float32"},
		{"one length", []G.Value{p.InQ, p.InK, p.InV, graphtest.LengthsOf(tensor.Int, []int{1})}, la.ErrShape, "lengths has shape (1)"},
		{"other q", []G.Value{f32(2, 4, 1, 4).tensor(), p.InK, p.InV, l}, la.ErrShape, "not what the graph was built for"},
		{"other dtype", []G.Value{input3{tensor.Float64, p.InQ.Shape()}.tensor(), p.InK, p.InV, l}, la.ErrShape, "not what the graph was built for"},
		{"inconsistent", []G.Value{p.InQ, p.InK, f32(2, 1, 39, 4).tensor(), l}, la.ErrShape, "k has 40 keys and v 39"},
	} {
		out, err := op.Do(c.in...)
		wantError(t, err, c.want, "Attention", c.text)
		if out != nil {
			t.Errorf("%s: a value beside the error", c.name)
		}
	}
	biasNode := graphtest.Input(g.G, "bias", f32(1, 2, 1, 40).tensor())
	n, err := la.Attention(g.Q, g.K, g.V, la.WithBias(biasNode), la.WithLengths(g.Lengths))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		bias G.Value
		want error
		text string
	}{
		{nil, la.ErrShape, "bias is nil"},
		{scalar, la.ErrUnsupported, "bias is a *gorgonia.F32"},
		{f32(2, 2, 1, 40).tensor(), la.ErrShape, "bias (2, 2, 1, 40) is not what the graph was built for"},
		{f32(1, 2, 1, 39).tensor(), la.ErrShape, "bias has shape (1, 2, 1, 39)"},
		{input3{tensor.Float64, []int{1, 2, 1, 40}}.tensor(), la.ErrDType, "bias is float64"},
	} {
		out, err := n.Op().Do(p.InQ, p.InK, p.InV, l, c.bias)
		wantError(t, err, c.want, "Attention", c.text)
		if out != nil {
			t.Errorf("bias %v: a value beside the error", c.bias)
		}
	}
	for _, in := range [][]G.Value{nil, {nil}, {p.InQ}, {scalar}, {p.InQ, p.InQ}} {
		_, err := outputOp.Do(in...)
		wantError(t, err, la.ErrState, "Attention", "log-sum-exp")
	}
}

// TestBadInputPositions: where queries are is said, wherever it matters and lengths look like those of a padded batch.
func TestBadInputPositions(t *testing.T) {
	rng := reftest.Rand(t)
	const rows = 8
	causal, window, slopes, atEnd := la.WithCausal(), la.WithWindow(3), la.WithALiBi([]float64{1, 0.5}), la.WithQueriesAtEnd()
	for _, c := range []struct {
		lengths, queries []int
		opts             []la.Option
		text             string // of the error; "": none
	}{
		{[]int{8, 5}, nil, []la.Option{causal}, "lengths differ, sequence 1 has 5 keys and 8 queries, and WithCausal"},
		{[]int{3, 9}, nil, []la.Option{window}, "lengths differ, sequence 0 has 3 keys and 8 queries, and WithWindow"},
		{[]int{8, 1}, nil, []la.Option{slopes}, "lengths differ, sequence 1 has 1 key and 8 queries, and WithALiBi"},
		{[]int{0, 7}, nil, []la.Option{causal}, "lengths differ, sequence 1 has 7 keys"},
		{[]int{5, 4}, nil, []la.Option{causal, la.WithSoftCap(2)}, "lengths differ, sequence 0 has 5 keys"},
		{[]int{8, 5}, nil, nil, ""},
		{[]int{8, 5}, nil, []la.Option{causal, atEnd}, ""},
		{[]int{8, 5}, []int{8, 5}, []la.Option{causal}, ""},
		{[]int{8, 5}, []int{8, 8}, []la.Option{causal}, ""},
		{[]int{8, 5}, []int{0, 3}, []la.Option{causal, atEnd}, ""},
		{[]int{8, 0}, nil, []la.Option{causal}, ""},
		{[]int{9, 8}, nil, []la.Option{causal}, ""},
		{[]int{5, 5}, nil, []la.Option{causal}, ""},
		{nil, nil, []la.Option{causal}, ""},
		{nil, []int{8, 0}, []la.Option{causal}, ""},
		{nil, []int{8, 5}, nil, ""},
		{nil, []int{8, 5}, []la.Option{causal, atEnd}, ""},
		{nil, []int{8, 5}, []la.Option{causal}, "sequence 1 has 5 queries of 8 and all 9 keys, and WithCausal"},
		{nil, []int{1, 0}, []la.Option{window}, "sequence 0 has 1 queries of 8 and all 9 keys, and WithWindow"},
	} {
		s := dense(2, 1, 4, 4, rows, 9, 9)
		x := graphtest.Spec{Rows: rows, Capacity: 9}
		if c.lengths != nil {
			s.Keys = c.lengths
		}
		if c.queries != nil {
			s.Queries = c.queries
		}
		p := graphtest.NewProblem(rng, s, x)
		ways := func(keys, queries string) []string {
			if c.queries != nil {
				return []string{c.text, "(" + keys + ")", "(WithQueriesAtEnd)"}
			}
			return []string{c.text, "(" + queries + ")", "(WithQueriesAtEnd)"}
		}
		check := func(op string, err error, texts []string, written bool) {
			t.Helper()
			switch {
			case c.text != "":
				wantError(t, err, la.ErrLength, op, texts...)
				if written {
					t.Errorf("%s of lengths %v, queries %v: a result beside the error", op, c.lengths, c.queries)
				}
			case err != nil:
				t.Errorf("%s of lengths %v, queries %v: %v", op, c.lengths, c.queries, err)
			}
		}
		a := p.Args()
		a.Lengths, a.QueryLengths = c.lengths, c.queries
		err := la.Attend(a, c.opts...)
		check("Attend", err, ways("Args.Lengths", "Args.QueryLengths"), !graphtest.AllNaN(t, a.Out) || !graphtest.AllNaN(t, a.LSE))

		g := p.Graph()
		opts := slices.Clone(c.opts)
		if c.lengths != nil {
			opts = append(opts, la.WithLengths(graphtest.Input(g.G, "lengths", graphtest.LengthsOf(tensor.Int64, c.lengths))))
		}
		if c.queries != nil {
			opts = append(opts, la.WithQueryLengths(graphtest.Input(g.G, "query lengths", graphtest.LengthsOf(tensor.Int32, c.queries))))
		}
		if g.Out, err = la.Attention(g.Q, g.K, g.V, opts...); err != nil {
			t.Fatal(err)
		}
		g.LSE = graphtest.LogSumExp(t, g.Out)
		g.Read(t)
		vm := G.NewTapeMachine(g.G)
		check("Attention", la.Cause(vm.RunAll()), ways("WithLengths", "WithQueryLengths"), g.OutValue != nil || g.LSEValue != nil)
		if err := vm.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestBadInputAttend(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, dense(6, 3, 8, 4, 2, 5, 3), graphtest.Spec{Capacity: 5})
	type change func(a *la.Args)
	bad := func(name string, want error, text string, f change, opts ...la.Option) {
		t.Run(name, func(t *testing.T) {
			a := p.Args()
			out, lse := a.Out, a.LSE
			f(&a)
			wantError(t, la.Attend(a, opts...), want, "Attend", text)
			if !graphtest.AllNaN(t, out) || !graphtest.AllNaN(t, lse) {
				t.Error("something was written before the error")
			}
		})
	}
	for _, c := range badShapes {
		bad(c.name, c.want, c.texts[0], func(a *la.Args) { a.Q, a.K, a.V = c.q.tensor(), c.k.tensor(), c.v.tensor() })
	}
	for _, o := range badOptions {
		bad(o.name, o.want, o.text, func(*la.Args) {}, o.opt)
	}
	bad("WithLengths", la.ErrUnsupported, "WithLengths", func(*la.Args) {}, la.WithLengths(nil))
	bad("WithQueryLengths", la.ErrUnsupported, "WithQueryLengths", func(*la.Args) {}, la.WithQueryLengths(nil))
	bad("one query length", la.ErrShape, "1 query length for a batch of 2", func(a *la.Args) { a.QueryLengths = []int{1} })
	bad("many queries", la.ErrLength, "query lengths[1] is 3, outside [0, 2]", func(a *la.Args) { a.QueryLengths = []int{1, 3} })
	bad("negative queries", la.ErrLength, "query lengths[0] is -1, outside [0, 2]", func(a *la.Args) { a.QueryLengths = []int{-1, 2} })
	bad("tree of all rows", la.ErrShape, "sequence 0: 2 parents of 1 token", func(a *la.Args) {
		a.QueryLengths, a.Parents = []int{1, 2}, [][]int{{-1, 0}, nil}
	}, la.WithCausal())
	bad("WithBias", la.ErrUnsupported, "WithBias", func(*la.Args) {}, la.WithBias(nil))
	bad("WithRotary", la.ErrUnsupported, "WithRotary", func(*la.Args) {}, la.WithRotary(rope.Config{HeadDim: 8}))
	bad("WithSinks", la.ErrUnsupported, "WithSinks", func(*la.Args) {}, la.WithSinks(nil))

	for name, set := range map[string]func(*la.Args, G.Value){
		"q": func(a *la.Args, v G.Value) { a.Q = v }, "k": func(a *la.Args, v G.Value) { a.K = v }, "v": func(a *la.Args, v G.Value) { a.V = v },
		"out": func(a *la.Args, v G.Value) { a.Out = v }, "lse": func(a *la.Args, v G.Value) { a.LSE = v },
	} {
		if name != "lse" { // which may be nil
			bad("nil "+name, la.ErrShape, name+" is nil", func(a *la.Args) { set(a, nil) })
		}
		bad("nil tensor "+name, la.ErrShape, name+" is nil", func(a *la.Args) { set(a, (*tensor.Dense)(nil)) })
		bad("scalar "+name, la.ErrUnsupported, name+" is a *gorgonia.F32", func(a *la.Args) { set(a, G.NewF32(1)) })
		masked := f32(2, 6, 2, 8).tensor()
		masked.ResetMask(false)
		bad("masked "+name, la.ErrUnsupported, name+" is a masked tensor", func(a *la.Args) { set(a, masked) })
	}

	bad("dtype of out", la.ErrDType, "out is float64 and q is float32", func(a *la.Args) { a.Out = input3{tensor.Float64, []int{2, 6, 2, 4}}.tensor() })
	bad("dtype of lse", la.ErrDType, "lse is Float16 and q is float32", func(a *la.Args) { a.LSE = input3{la.Float16, []int{2, 6, 2}}.tensor() })
	bad("shape of out", la.ErrShape, "out has shape (2, 6, 2, 8); it must be (2, 6, 2, 4)", func(a *la.Args) { a.Out = f32(2, 6, 2, 8).tensor() })
	bad("rank of out", la.ErrShape, "out has shape (12, 2, 4)", func(a *la.Args) { a.Out = f32(12, 2, 4).tensor() })
	bad("shape of lse", la.ErrShape, "lse has shape (2, 6, 2, 1); it must be (2, 6, 2)", func(a *la.Args) { a.LSE = f32(2, 6, 2, 1).tensor() })
	bad("transposed out", la.ErrUnsupported, "out is not row-major", func(a *la.Args) { a.Out = transposed(t, a.Out.(*tensor.Dense)) })
	bad("sliced out", la.ErrUnsupported, "out is not row-major", func(a *la.Args) { a.Out = sliced(t, a.Out.(*tensor.Dense), 3) })
	bad("transposed lse", la.ErrUnsupported, "lse is not row-major", func(a *la.Args) {
		x := f32(6, 2, 2).tensor()
		if err := x.T(1, 0, 2); err != nil {
			t.Fatal(err)
		}
		a.LSE = x
	})

	bad("nil tensor bias", la.ErrShape, "bias is nil", func(a *la.Args) { a.Bias = (*tensor.Dense)(nil) })
	bad("scalar bias", la.ErrUnsupported, "bias is a *gorgonia.F32", func(a *la.Args) { a.Bias = G.NewF32(1) })
	bad("shape of the bias", la.ErrShape, "bias has shape (2, 6, 5); it must be (2, 6, 2, 5)", func(a *la.Args) { a.Bias = f32(2, 6, 5).tensor() })
	bad("dtype of the bias", la.ErrDType, "bias is Float16 and q is float32", func(a *la.Args) { a.Bias = input3{la.Float16, []int{2, 6, 2, 5}}.tensor() })
	bad("nil tensor sinks", la.ErrShape, "sinks is nil", func(a *la.Args) { a.Sinks = (*tensor.Dense)(nil) })
	bad("scalar sinks", la.ErrUnsupported, "sinks is a *gorgonia.F32", func(a *la.Args) { a.Sinks = G.NewF32(1) })
	bad("shape of the sinks", la.ErrShape, "sinks has shape (3); it must be (6)", func(a *la.Args) { a.Sinks = f32(3).tensor() })
	bad("dtype of the sinks", la.ErrDType, "sinks is float64; for a q of float32", func(a *la.Args) { a.Sinks = input3{tensor.Float64, []int{6}}.tensor() })
	bad("no lengths", la.ErrShape, "0 lengths for a batch of 2", func(a *la.Args) { a.Lengths = []int{} })
	bad("three lengths", la.ErrShape, "3 lengths for a batch of 2", func(a *la.Args) { a.Lengths = []int{1, 1, 1} })
	bad("negative length", la.ErrLength, "lengths[1] is -1", func(a *la.Args) { a.Lengths = []int{1, -1} })
	bad("long length", la.ErrLength, "lengths[0] is 6, outside [0, 5]", func(a *la.Args) { a.Lengths = []int{6, 0} })

	// A result may share memory with nothing else.
	memory := make([]float32, 1000)
	reftest.Poison(memory)
	in := func(from int, shape ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(memory[from:from+tensor.Shape(shape).TotalSize()]))
	}
	bad("out in q", la.ErrUnsupported, "out shares memory", func(a *la.Args) { a.Q, a.Out = in(0, 2, 6, 2, 8), in(191, 2, 6, 2, 4) })
	bad("out in k", la.ErrUnsupported, "out shares memory", func(a *la.Args) { a.K, a.Out = in(95, 2, 3, 5, 8), in(0, 2, 6, 2, 4) })
	bad("out in v", la.ErrUnsupported, "out shares memory", func(a *la.Args) { a.V, a.Out = in(10, 2, 3, 5, 4), in(0, 2, 6, 2, 4) })
	bad("out in the bias", la.ErrUnsupported, "out shares memory", func(a *la.Args) { a.Bias, a.Out = in(90, 2, 6, 2, 5), in(0, 2, 6, 2, 4) })
	bad("lse in the bias", la.ErrUnsupported, "lse shares memory", func(a *la.Args) { a.Bias, a.LSE = in(20, 1, 1, 2, 5), in(0, 2, 6, 2) })
	bad("out in the sinks", la.ErrUnsupported, "out shares memory", func(a *la.Args) { a.Sinks, a.Out = in(90, 6), in(0, 2, 6, 2, 4) })
	bad("lse in the sinks", la.ErrUnsupported, "lse shares memory", func(a *la.Args) { a.Sinks, a.LSE = in(23, 6), in(0, 2, 6, 2) })
	bad("lse in q", la.ErrUnsupported, "lse shares memory", func(a *la.Args) { a.Q, a.LSE = in(0, 2, 6, 2, 8), in(5, 2, 6, 2) })
	bad("lse in out", la.ErrUnsupported, "shares memory", func(a *la.Args) { a.Out, a.LSE = in(0, 2, 6, 2, 4), in(95, 2, 6, 2) })
	if i := slices.IndexFunc(memory, func(f float32) bool { return f == f }); i >= 0 {
		t.Errorf("element %d of the shared memory was written", i)
	}
	// Neighbours are no overlap.
	a := p.Args()
	a.Out, a.LSE = in(0, 2, 6, 2, 4), in(96, 2, 6, 2)
	if err := la.Attend(a); err != nil {
		t.Error(err)
	}
}
