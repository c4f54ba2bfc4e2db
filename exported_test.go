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
	"hash/fnv"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/nocopy"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

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

// go vet sees a copy of what must not be copied.
func TestCopiesAreSeen(t *testing.T) {
	var locks func(reflect.Type) bool
	locks = func(of reflect.Type) bool {
		if of.Kind() != reflect.Struct {
			return false
		}
		locker := reflect.TypeFor[sync.Locker]()
		if reflect.PointerTo(of).Implements(locker) && !of.Implements(locker) {
			return true
		}
		for i := range of.NumField() {
			if locks(of.Field(i).Type) {
				return true
			}
		}
		return false
	}
	for _, of := range exported[:8] {
		if want := of != reflect.TypeFor[la.Layer](); locks(of) != want {
			t.Errorf("go vet sees a copy of a %v: %t", of, !want)
		}
	}
}

// A copy of a struct that is used by its pointer is refused by every method that returns an error and wherever it is an
// argument, does nothing in the other methods, and harms neither the original nor others.
func TestCopiesAreRefused(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 4})
	seq := graphtest.NewStored(t, cache).Seq
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	x, err := gpu.NewTensor(tensor.Float32, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	recording, err := gpu.Record(func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	dense := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(make([]float32, 6)))
	g := G.NewGraph()
	arguments := []any{dense, 1, tensor.Float32, []la.Append{{Seq: seq, Tokens: 1}}, []int{0}, func() error { return nil },
		G.NewMatrix(g, tensor.Float32, G.WithShape(2, 3), G.WithName("x")), bytes.NewReader(nil), io.Discard}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, la.ErrState) || !strings.Contains(err.Error(), "copy") {
			t.Errorf("%s that is a copy: %v", what, err)
		}
	}
	copies := map[reflect.Type]any{}
	copyOf := func(original any) any {
		c := reflect.New(reflect.TypeOf(original).Elem())
		c.Elem().Set(reflect.ValueOf(original).Elem())
		copies[c.Type().Elem()] = c.Interface()
		return c.Interface()
	}
	for _, original := range []any{cache, seq, step, gpu, x, recording} {
		refusals := 0
		for name, call := range methodsOf(copyOf(original), arguments) {
			if fails, err := call(); fails {
				refusals++
				refused(fmt.Sprintf("%s of a %T", name, original), err)
			}
		}
		if refusals == 0 {
			t.Errorf("a copied %T is never refused", original)
		}
	}
	for _, of := range exported {
		marked := false
		for in := of; !marked && in.Kind() == reflect.Struct; in = in.Field(0).Type { // a public type may be another one's home
			mark, _ := in.FieldByName("mark")
			if marked = mark.Type == reflect.TypeFor[nocopy.Mark](); in.NumField() != 1 {
				break
			}
		}
		if marked != (copies[of] != nil) {
			t.Errorf("%v has a mark: %t; it is in this test: %t", of, marked, !marked)
		}
	}

	copied := func(of any) any { return copies[reflect.TypeOf(of).Elem()] }
	gpuCopy, xCopy := copied(gpu).(*device.GPU), copied(x).(*device.Tensor)
	input := G.NewMatrix(g, tensor.Float32, G.WithShape(2, 1), G.WithName("q"))
	for name, err := range map[string]error{
		"an append's sequence": step.Set([]la.Append{{Seq: copied(seq).(*la.Sequence), Tokens: 1}}),
		"a cache's device":     second(la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, Pages: 1, Device: gpuCopy})),
		"a step's layer":       second(la.CachedAttention(input, input, input, copied(step).(*la.Step).Layer(0))),
		"a node's GPU":         second(device.ToGPU(input, gpuCopy)),
		"a source":             x.CopyFrom(xCopy),
		"a query":              la.Attend(la.Args{Q: xCopy, K: x, V: x, Out: x}),
		"a key":                la.Attend(la.Args{Q: x, K: xCopy, V: x, Out: x}),
		"a state":              la.Merge(la.State{Out: x, LSE: x}, la.State{Out: xCopy, LSE: x}),
	} {
		refused(name, err)
	}

	for name, err := range map[string]error{
		"Set": step.Set([]la.Append{{Seq: seq, Tokens: 1}}), "Replay": recording.Replay(), "CopyFrom": x.CopyFrom(dense), "Memory": second(gpu.Memory()),
	} {
		if err != nil {
			t.Errorf("%s of the original, behind calls on a copy: %v", name, err)
		}
	}
	if n := cache.Stats().Sequences; n != 1 {
		t.Errorf("%d sequences", n)
	}
	for _, err := range []error{step.Rollback(), seq.Release(), recording.Close(), x.Free(), cache.Close()} {
		if err != nil {
			t.Error(err)
		}
	}
}

// methodsOf is all exported methods of x, to be called with the first of the arguments that fits. A call says whether the
// method can return an error, and which one it has returned.
func methodsOf(x any, arguments []any) iter.Seq2[string, func() (fails bool, err error)] {
	fitting := func(of reflect.Type) reflect.Value {
		for _, a := range arguments {
			if v := reflect.ValueOf(a); v.Type().AssignableTo(of) {
				return v
			}
		}
		return reflect.Zero(of)
	}
	return func(yield func(string, func() (bool, error)) bool) {
		v := reflect.ValueOf(x)
		for i := range v.NumMethod() {
			name, method := v.Type().Method(i).Name, v.Method(i)
			if name == "Format" { // it needs a printer
				continue
			}
			call := func() (fails bool, err error) {
				var in []reflect.Value
				for at := range method.Type().NumIn() {
					if !method.Type().IsVariadic() || at < method.Type().NumIn()-1 {
						in = append(in, fitting(method.Type().In(at)))
					}
				}
				for _, out := range method.Call(in) {
					if out.Type() == reflect.TypeFor[error]() {
						fails = true
						err, _ = out.Interface().(error)
					}
				}
				return fails, err
			}
			if !yield(name, call) {
				return
			}
		}
	}
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
		"nn.WithUnitOffset": nn.WithUnitOffset(),
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
