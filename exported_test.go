package leanattention_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// exported are the package's types with methods, but for those that are aliases.
var exported = []reflect.Type{
	reflect.TypeFor[la.Cache](), reflect.TypeFor[la.Sequence](), reflect.TypeFor[la.Step](), reflect.TypeFor[la.Layer](),
	reflect.TypeFor[device.GPU](), reflect.TypeFor[device.Tensor](), reflect.TypeFor[device.Recording](), reflect.TypeFor[rewrite.Fused](),
	reflect.TypeFor[la.CacheConfig](),
	reflect.TypeFor[la.Shard](), reflect.TypeFor[la.Scales](), reflect.TypeFor[la.Schedule](), reflect.TypeFor[la.Option](),
	reflect.TypeFor[rope.Config](), reflect.TypeFor[rope.Linear](), reflect.TypeFor[rope.Llama3](), reflect.TypeFor[rope.YaRN](),
}

// No method of any exported type panics on its zero value, on nil, or on arguments
// that are zero values.
func TestMethodsOfZeroValues(t *testing.T) {
	known := map[string]bool{}
	for _, of := range exported {
		known[of.Name()] = true
		for _, zero := range []reflect.Value{reflect.Zero(reflect.PointerTo(of)), reflect.New(of)} {
			for i := range zero.NumMethod() {
				method := reflect.PointerTo(of).Method(i)
				_, byValue := of.MethodByName(method.Name)
				if zero.IsNil() && (byValue || isPromoted(of, method.Name)) {
					continue // Go itself panics: there is no value to call it on
				}
				t.Run(fmt.Sprintf("%s of %v, nil %t", method.Name, of, zero.IsNil()), func(t *testing.T) {
					defer func() {
						if r := recover(); r != nil {
							t.Errorf("panic: %v", r)
						}
					}()
					var in []reflect.Value
					for at := range zero.Method(i).Type().NumIn() {
						arg := zero.Method(i).Type().In(at)
						if arg == reflect.TypeFor[fmt.State]() {
							_ = fmt.Sprintf("%v %+v", zero.Interface(), zero.Interface())
							return
						}
						if method.Type.IsVariadic() && at == zero.Method(i).Type().NumIn()-1 {
							break
						}
						in = append(in, reflect.Zero(arg))
					}
					for _, out := range zero.Method(i).Call(in) {
						if err, ok := out.Interface().(error); ok && errors.Is(err, la.ErrInternal) {
							t.Error(err)
						}
					}
				})
			}
		}
	}
	sources, err := parser.ParseDir(token.NewFileSet(), ".", func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range sources["leanattention"].Files {
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv == nil || !f.Name.IsExported() {
				continue
			}
			of := f.Recv.List[0].Type
			if star, ok := of.(*ast.StarExpr); ok {
				of = star.X
			}
			if id, ok := of.(*ast.Ident); ok && id.IsExported() && !known[id.Name] {
				t.Errorf("%s has methods and is not in this test", id.Name)
			}
		}
	}
}

// isPromoted says whether the first field of a struct is embedded and has the method.
func isPromoted(of reflect.Type, method string) bool {
	if of.Kind() != reflect.Struct || of.NumField() == 0 || !of.Field(0).Anonymous {
		return false
	}
	_, has := reflect.PointerTo(of.Field(0).Type).MethodByName(method)
	return has
}

// What is printed is a line, not the memory's lists.
func TestStrings(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 8, ValueDim: 4, PageSize: 4, Pages: 1000, DType: la.Float16})
	seq, err := cache.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	step, err := cache.NewStep(3)
	if err != nil {
		t.Fatal(err)
	}
	check := func(x any, want string) {
		t.Helper()
		if got := fmt.Sprint(x); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	const config = "2 layers of 1000 pages of 4 tokens, 1 KV head of 8 and 4, Float16, in host memory"
	check(cache, "cache of "+config+": 0 tokens of 1 sequence, 1000 of 1000 pages free, 0 shared, 187.5 KiB")
	check(seq, "sequence of 0 tokens in 0 pages")
	check(step, "step of 3 rows, not set")
	check(step.Layer(1), "layer 1 of a step of 3 rows, not set")
	if err := step.Set([]la.Append{{Seq: seq, Tokens: 1}}); err != nil {
		t.Fatal(err)
	}
	check(step, "step of 3 rows, set: 1 row of 1 sequence")
	check(seq, "sequence of 0 tokens in 0 pages, part of an open step")
	check(la.WithCausal(), "WithCausal")
	check(la.Option{}, "the zero Option")
	if err := errors.Join(step.Rollback(), seq.Release()); err != nil {
		t.Fatal(err)
	}
	check(seq, "released sequence")
	if err := cache.Close(); err != nil {
		t.Fatal(err)
	}
	check(cache, "closed cache of "+config)
	check((*la.Cache)(nil), "cache that was not made by NewCache")
}

// Messages say "1 page".
func TestSingular(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 1})
	step, err := cache.NewStep(5)
	if err != nil {
		t.Fatal(err)
	}
	seq, other := graphtest.NewStored(t, cache).Seq, graphtest.NewStored(t, cache).Seq
	if err := step.Set([]la.Append{{Seq: seq, Tokens: 1}}); err != nil {
		t.Fatal(err)
	}
	second, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	wantError(t, second.Set([]la.Append{{Seq: other, Tokens: 1}}), la.ErrCacheFull, "Set", "1 page of 1 token needed, 0 of 1 free")
	wantError(t, la.Attend(la.Args{}, la.Option{}), la.ErrUnsupported, "Attend", "Attend: the zero Option")
	wantError(t, la.Attend(la.Args{}, la.WithLengths(nil)), la.ErrUnsupported, "Attend", "option WithLengths")
}

// Tensors without an element type or without elements are named, wherever they are.
func TestOddTensors(t *testing.T) {
	good := func(shape ...int) *tensor.Dense {
		return tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32))
	}
	for name, odd := range map[string]*tensor.Dense{
		"zero":     {},
		"a scalar": tensor.New(tensor.FromScalar(float32(1))),
		"of bool":  tensor.New(tensor.WithShape(1, 1, 2), tensor.Of(tensor.Bool)),
		"a string": tensor.New(tensor.WithShape(1, 1, 2), tensor.WithBacking([]string{"a", "b"})),
		"short":    good(1),
	} {
		for i, arg := range []string{"q", "k", "v", "out", "lse", "bias"} {
			args := la.Args{Q: good(1, 1, 2), K: good(1, 1, 2), V: good(1, 1, 2), Out: good(1, 1, 2), LSE: good(1, 1), Bias: good(1, 1, 1)}
			reflect.ValueOf(&args).Elem().FieldByName([]string{"Q", "K", "V", "Out", "LSE", "Bias"}[i]).Set(reflect.ValueOf(odd))
			err := la.Attend(args)
			if !errors.Is(err, la.ErrShape) && !errors.Is(err, la.ErrDType) || !strings.Contains(err.Error(), arg+" ") {
				t.Errorf("%s as %s: %v", name, arg, err)
			}
		}
	}
}

// TestZeroValues: what was not made by this package's functions is refused, and
// nothing panics.
func TestZeroValues(t *testing.T) {
	real, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, Pages: 1})
	if err != nil {
		t.Fatal(err)
	}
	step, err := real.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	second := func(_ any, err error) error { return err }
	for _, cache := range []*la.Cache{nil, {}} {
		for _, sequence := range []*la.Sequence{nil, {}} {
			for _, zero := range []*la.Step{nil, {}} {
				for name, err := range map[string]error{
					"NewSequence":      second(cache.NewSequence()),
					"NewStep":          second(cache.NewStep(1)),
					"Close":            cache.Close(),
					"Fork":             second(sequence.Fork()),
					"Truncate":         sequence.Truncate(0),
					"Release":          sequence.Release(),
					"Set":              zero.Set(nil),
					"Run":              zero.Run(nil, func() error { return nil }),
					"Set to that":      step.Set([]la.Append{{Seq: sequence, Tokens: 1}}),
					"Commit":           zero.Commit(),
					"Rollback":         zero.Rollback(),
					"CachedAttention":  second(la.CachedAttention(nil, nil, nil, zero.Layer(0))),
					"CachedAttention2": second(la.CachedAttention(nil, nil, nil, la.Layer{})),
				} {
					if !errors.Is(err, la.ErrState) {
						t.Errorf("%s of a zero value: %v; want %v", name, err, la.ErrState)
					}
				}
				if n := sequence.Len(); n != 0 {
					t.Errorf("a zero sequence has %d tokens", n)
				}
				if n := zero.Tokens(); n != 0 {
					t.Errorf("a zero step has %d rows", n)
				}
				if took := zero.AttentionTime(); took != 0 {
					t.Errorf("a zero step has run for %v", took)
				}
				if s := cache.Stats(); s != (la.CacheStats{}) {
					t.Errorf("a zero cache has stats %+v", s)
				}
				if c := cache.Config(); c.Layers != 0 {
					t.Errorf("a zero cache has config %+v", c)
				}
			}
		}
	}
}

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
		p := graphtest.NewProblem(rng, reftest.Shape{Heads: 1, KVHeads: 1, Dim: 2, ValueDim: 2, Queries: []int{1}, Keys: []int{3}}, graphtest.Spec{})
		q := graphtest.Input(g, "q", graphtest.TensorOf(tensor.Float32, p.Q, 1, 1, 1, 2))
		k := graphtest.Input(g, "k", graphtest.TensorOf(tensor.Float32, p.K, 1, 1, 3, 2))
		v := graphtest.Input(g, "v", graphtest.TensorOf(tensor.Float32, p.V, 1, 1, 3, 2))
		lengths := graphtest.Input(g, "lengths", graphtest.LengthsOf(tensor.Int, []int{4}))
		if _, err := la.Attention(q, k, v, la.WithLengths(lengths)); err != nil {
			t.Fatal(err)
		}
		vm := machine(g)
		err := vm.RunAll()
		if err == nil || name == "tape" && errors.Is(err, la.ErrLength) {
			t.Fatalf("%s: %v: errors of RunAll unwrap by now", name, err)
		}
		for _, wrapped := range []error{err, fmt.Errorf("step 3: %w", err), errors.Join(io.EOF, err)} {
			cause := la.Cause(wrapped)
			wantError(t, cause, la.ErrLength, "Attention", "lengths[0] is 4")
			if text := cause.Error(); !strings.HasPrefix(text, "leanattention: Attention: ") || strings.ContainsAny(text, "\n\t") {
				t.Errorf("%s: the op's own error is %q", name, text)
			}
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

// exportedFunctions are the functions of this package and of nn with a result, by their names with the package.
func exportedFunctions(t *testing.T) map[string]*ast.FuncDecl {
	t.Helper()
	found := map[string]*ast.FuncDecl{}
	for dir, prefix := range map[string]string{".": "", "nn": "nn."} {
		packages, err := parser.ParseDir(token.NewFileSet(), dir, func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range packages {
			for _, file := range p.Files {
				for _, d := range file.Decls {
					if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.IsExported() && f.Type.Results != nil {
						found[prefix+f.Name.Name] = f
					}
				}
			}
		}
	}
	return found
}

// All nodes of this package and of nn are made by internal/graph, which checks what all ops need.
func TestNodesAreMadeInOnePlace(t *testing.T) {
	for _, dir := range []string{".", "nn"} {
		err := fs.WalkDir(os.DirFS(dir), ".", func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() && path != "." {
				return cmp.Or(err, fs.SkipDir)
			}
			if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			text, err := os.ReadFile(filepath.Join(dir, path))
			if bytes.Contains(text, []byte("G.ApplyOp")) {
				t.Errorf("%s/%s calls ApplyOp", dir, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Every option of this package and of nn is refused where it is given twice, and so are two of one kind.
func TestOptionsTwice(t *testing.T) {
	g := G.NewGraph()
	in := func(of tensor.Dtype, name string, shape ...int) *G.Node {
		return G.NewTensor(g, of, len(shape), G.WithShape(shape...), G.WithName(name))
	}
	vector := in(tensor.Float32, "vector", 4)
	options := map[string]any{
		"WithScale": la.WithScale(1), "WithCausal": la.WithCausal(), "WithMixedPrecision": la.WithMixedPrecision(),
		"WithWindow": la.WithWindow(2), "WithSinkTokens": la.WithSinkTokens(0), "WithSoftCap": la.WithSoftCap(1),
		"WithALiBi": la.WithALiBi([]float64{1}), "WithBias": la.WithBias(in(tensor.Float32, "bias", 1, 3, 3)),
		"WithDropout": la.WithDropout(0, in(tensor.Int, "seed")), "WithSinks": la.WithSinks(in(tensor.Float32, "sinks", 1)),
		"WithRotary":   la.WithRotary(rope.Config{HeadDim: 4}),
		"WithVariant":  la.WithVariant(la.Variant{Score: "2*score"}),
		"WithLengths":  la.WithLengths(in(tensor.Int, "lengths", 1)),
		"WithSchedule": la.WithSchedule(la.StreamK), "WithTileTokens": la.WithTileTokens(0), "WithWorkers": la.WithWorkers(0),
		"WithBatchInvariance": la.WithBatchInvariance(), "WithQueriesAtEnd": la.WithQueriesAtEnd(),
		"WithQueryLengths": la.WithQueryLengths(in(tensor.Int, "query lengths", 1)),

		"nn.WithActivation": nn.WithActivation(nn.ReLU), "nn.WithResidual": nn.WithResidual(in(tensor.Float32, "residual", 3, 4)), "nn.WithNorm": nn.WithNorm(nil, nil, 1),
		"nn.WithRMSNorm": nn.WithRMSNorm(vector, 1), "nn.WithMixedPrecision": nn.WithMixedPrecision(), "nn.WithBatchInvariance": nn.WithBatchInvariance(),
		"nn.WithUnitOffset": nn.WithUnitOffset(), "nn.WithQuantisedRows": nn.WithQuantisedRows(),
	}
	x, w := in(tensor.Float32, "x", 3, 4), in(tensor.Float32, "w", 4, 4)
	q, k, v := in(tensor.Float32, "q", 1, 3, 4), in(tensor.Float32, "k", 1, 3, 4), in(tensor.Float32, "v", 1, 3, 4)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1})
	step, err := cache.NewStep(3)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(name, text string, err error) {
		t.Helper()
		if !errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), "given twice") {
			t.Errorf("%s twice: %v", name, err)
		}
	}
	linear := func(opts ...nn.Option) error { return second(nn.Linear(x, w, nil, opts...)) }
	for name, f := range exportedFunctions(t) {
		of := types.ExprString(f.Type.Results.List[0].Type)
		if !strings.HasSuffix(of, "Option") {
			continue
		}
		switch o := options[name].(type) {
		case la.Option:
			if name == "WithRotary" {
				refused(name, name, second(la.CachedAttention(x, x, x, step.Layer(0), o, o)))
			} else {
				refused(name, name, second(la.Attention(q, k, v, o, la.WithScale(1), o)))
			}
		case nn.Option:
			ofNorm := second(nn.RMSNorm(x, vector, nil, 1, o))
			if name == "nn.WithUnitOffset" {
				refused(name, name[3:], second(nn.RMSNorm(x, vector, nil, 1, o, o)))
				refused(name, name[3:], linear(nn.WithRMSNorm(vector, 1, o, o)))
				ofNorm = linear(o)
			} else {
				refused(name, name[3:], linear(o, o))
			}
			if !errors.Is(ofNorm, la.ErrUnsupported) || !strings.Contains(ofNorm.Error(), name[3:]) {
				t.Errorf("%s, of what does not take it: %v", name, ofNorm)
			}
		default:
			t.Errorf("%s is an option and not in this test", name)
		}
	}
	refused("two activations", "WithActivation is given twice, with ReLU and SiLU", linear(nn.WithActivation(nn.ReLU), nn.WithActivation(nn.SiLU)))
	refused("two norms", "the norm is given twice, by WithNorm and WithRMSNorm", linear(nn.WithNorm(nil, nil, 1), nn.WithRMSNorm(vector, 1)))
}

// A pointer to a scaling is one, and a nil one is refused, wherever it goes.
func TestNilScalings(t *testing.T) {
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(2, 4), G.WithName("x"))
	at := G.NewVector(g, tensor.Int, G.WithShape(2), G.WithName("at"))
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1})
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []rope.Scaling{(*rope.Linear)(nil), (*rope.Llama3)(nil), (*rope.YaRN)(nil)} {
		c := rope.Config{HeadDim: 4, Scaling: s}
		_, _, err := c.Frequencies()
		wantError(t, err, la.ErrOption, "rope.Config", "Scaling is a nil *rope.")
		wantError(t, second(nn.Rotary(x, at, c)), la.ErrOption, "rope.Config", "Scaling is a nil *rope.")
		wantError(t, second(la.CachedAttention(x, x, x, step.Layer(0), la.WithRotary(c))), la.ErrOption, "CachedAttention", "Scaling is a nil *rope.")
	}
	w, _, err := rope.Config{HeadDim: 4, Scaling: &rope.Linear{Factor: 2}}.Frequencies()
	if err != nil || w[0] != 0.5 {
		t.Errorf("%v, %v", w, err)
	}
}

// Messages say what to do, name the weight, and have neither panics nor bytes in them.
func TestMessages(t *testing.T) {
	g := G.NewGraph()
	in := func(of tensor.Dtype, name string, shape ...int) *G.Node {
		return G.NewTensor(g, of, len(shape), G.WithShape(shape...), G.WithName(name))
	}
	x, w := in(tensor.Float32, "x", 3, 4), in(tensor.Float32, "w", 4, 4)
	gamma := in(la.BFloat16, "model.norm.weight", 4)
	for name, err := range map[string]error{
		"RMSNorm": second(nn.RMSNorm(x, gamma, nil, 1)), "LayerNorm": second(nn.LayerNorm(x, gamma, nil, 1)),
		"Linear": second(nn.Linear(x, w, nil, nn.WithNorm(gamma, nil, 1))), "QKNorm": second(nn.QKNorm(x, gamma, 1)),
		"Add": second(nn.Add(in(tensor.Float32, "a", 4), gamma)),
	} {
		if !errors.Is(err, la.ErrDType) || !strings.Contains(err.Error(), `"model.norm.weight", is of BFloat16`) || !strings.Contains(err.Error(), "convert its values to float32") {
			t.Errorf("%s: %v", name, err)
		}
	}
	q := in(tensor.Float32, "q", 1, 3, 4)
	wantError(t, second(la.Attention(q, q, q, la.WithRotary(rope.Config{}))), la.ErrUnsupported, "Attention", "option WithRotary: ", "Rotary of package nn")
	wantError(t, second(la.LogSumExp(nil)), la.ErrGraph, "LogSumExp", "out is nil")
	wantError(t, second(la.LogSumExp(q)), la.ErrGraph, "LogSumExp", `out is node `, `(input "q"): it must be the node of Attention or CachedAttention`)
	wantError(t, second(la.Default(q, q, q, la.WithLengths(x))), la.ErrUnsupported, "Default", "option WithLengths: it is for Attention")
	for text, of := range map[string]tensor.Dtype{"[]float32": {Type: reflect.TypeFor[[]float32]()}, "int16": tensor.Int16} {
		_, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 4, Pages: 1, DType: of})
		wantError(t, err, la.ErrDType, "NewCache", "DType is "+text)
	}
	_, err := nn.Linear(x, G.NewUniqueNode(G.In(g), G.WithName("untyped")), nil)
	if err == nil || strings.Contains(err.Error(), "PANIC") {
		t.Error(err)
	}
	if s := fmt.Sprintf("%v %+v", attn.NewSlopes([]float64{0.5, 2}), attn.TurningsOf([]float64{1})); strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) || !strings.Contains(s, "0.5 2") {
		t.Errorf("%q", s)
	}
}
