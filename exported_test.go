package leanattention_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"reflect"
	"strings"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// exported are the package's types with methods, but for those that are aliases.
var exported = []reflect.Type{
	reflect.TypeFor[la.Cache](), reflect.TypeFor[la.Sequence](), reflect.TypeFor[la.Step](), reflect.TypeFor[la.Layer](),
	reflect.TypeFor[la.GPU](), reflect.TypeFor[la.DeviceTensor](), reflect.TypeFor[la.Recording](), reflect.TypeFor[la.Fused](),
	reflect.TypeFor[la.CacheConfig](), reflect.TypeFor[la.CacheStats](), reflect.TypeFor[la.StepStats](),
	reflect.TypeFor[la.GPUInfo](), reflect.TypeFor[la.GPUMemory](), reflect.TypeFor[la.Schedule](), reflect.TypeFor[la.Option](),
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
				if _, byValue := of.MethodByName(method.Name); byValue && zero.IsNil() {
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

// A copy of a sequence is refused everywhere, and harms neither the sequence nor others.
func TestCopyOfSequence(t *testing.T) {
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 4})
	seq := newStored(t, cache).seq
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	copied := reflect.New(reflect.TypeFor[la.Sequence]())
	copied.Elem().Set(reflect.ValueOf(seq).Elem())
	c := copied.Interface().(*la.Sequence)
	for op, err := range map[string]error{
		"Release": c.Release(), "Truncate": c.Truncate(0), "Fork": second(c.Fork()),
		"Set": step.Set([]la.Append{{Seq: c, Tokens: 1}}),
	} {
		wantError(t, err, la.ErrState, op, "copy")
	}
	if err := seq.Release(); err != nil {
		t.Fatal(err)
	}
	wantError(t, seq.Release(), la.ErrClosed, "Release", "released")
	wantError(t, c.Release(), la.ErrState, "Release", "copy")
	if n := cache.Stats().Sequences; n != 0 {
		t.Errorf("%d sequences", n)
	}
}

// What is printed is a line, not the memory's lists.
func TestStrings(t *testing.T) {
	cache := newCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 8, ValueDim: 4, PageSize: 4, Pages: 1000, DType: la.Float16})
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
	check(cache.Config(), config)
	check(cache, "cache of "+config+": 0 tokens of 1 sequence, 1000 of 1000 pages free, 0 shared, 187.5 KiB in host memory")
	check(seq, "sequence of 0 tokens in 0 pages")
	check(step, "step of 3 rows, not set")
	check(step.Layer(1), "layer 1 of a step of 3 rows, not set")
	if err := step.Set([]la.Append{{Seq: seq, Tokens: 1}}); err != nil {
		t.Fatal(err)
	}
	check(step, "step of 3 rows, set: 1 row of 1 sequence")
	check(seq, "sequence of 0 tokens in 0 pages, part of an open step")
	check(step.Stats(), "0 runs of layers, 0s in them")
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
	check(la.GPUMemory{Free: 1, Total: 3 << 30, Used: 1023}, "1 byte of 3.0 GiB free, 1023 bytes used here, 0 bytes pinned")
}

// Messages say "1 page".
func TestSingular(t *testing.T) {
	cache := newCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 1})
	step, err := cache.NewStep(5)
	if err != nil {
		t.Fatal(err)
	}
	seq, other := newStored(t, cache).seq, newStored(t, cache).seq
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
