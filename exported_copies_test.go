package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"reflect"
	"strings"
	"sync"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/nocopy"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

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
