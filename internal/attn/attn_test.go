package attn

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestSumProducts(t *testing.T) {
	for _, c := range []struct {
		got, want int
	}{
		{sumProducts(1, 2, 3, 4, 5, 6, 7), 69},
		{sumProducts(0, math.MaxInt, 1, 0, 0, 0, 0), math.MaxInt},
		{sumProducts(1, math.MaxInt, 1, 0, 0, 0, 0), math.MaxInt},
		{sumProducts(0, math.MaxInt, math.MaxInt, 0, 0, 0, 0), math.MaxInt},
		{sumProducts(0, math.MaxInt/2+1, math.MaxInt/2+1, math.MaxInt/2+1, math.MaxInt/2+1, 0, 0), math.MaxInt},
		{sumProducts(5, 0, math.MaxInt, math.MaxInt, 0, 0, 0), 5},
	} {
		if c.got != c.want {
			t.Errorf("got %d, want %d", c.got, c.want)
		}
	}
}

func TestNames(t *testing.T) {
	for x, want := range map[fmt.Stringer]string{
		NoActivation: "none", ReLU: "relu", GELU: "gelu", GELUTanh: "gelu tanh", SiLU: "silu", Activation(7): "Activation(7)",
		Float32: "float32", BFloat16: "bfloat16", DType(9): "DType(9)",
	} {
		if got := x.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// sees is the definition of a mask, key by key.
func sees(m Mask, queries, keys, i, j int) bool {
	p := keys - queries + i
	return !(m.Causal && j > p) && !(m.Window != 0 && p-j >= m.Window && j >= m.SinkTokens)
}

func TestKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := Mask{
			Causal: rapid.Bool().Draw(t, "causal"), Window: rapid.SampledFrom([]int{0, 0, 1, 2, 5, 9, math.MaxInt}).Draw(t, "window"),
			SinkTokens: rapid.SampledFrom([]int{0, 0, 1, 2, 4, 7, math.MaxInt}).Draw(t, "sink tokens"),
		}
		queries, keys := rapid.IntRange(1, 12).Draw(t, "queries"), rapid.IntRange(0, 12).Draw(t, "keys")
		before := [2]int{}
		for i := range queries {
			first, end := m.Keys(queries, keys, i)
			if first > end || first < before[0] || end < before[1] || end > keys {
				t.Fatalf("position %d sees [%d, %d) of %d, the one before from %d to %d", i, first, end, keys, before[0], before[1])
			}
			before = [2]int{first, end}
			for j := range keys {
				if got := first <= j && j < end || j < m.SinkKeys(first); got != sees(m, queries, keys, i, j) {
					t.Fatalf("%+v: position %d of %d sees [%d, %d) of %d keys: %d is wrong", m, i, queries, first, end, keys, j)
				}
			}
			if n := m.SinkKeys(first); n > 0 && n >= first || n < 0 {
				t.Fatalf("%+v: position %d sees %d keys in front, and [%d, %d)", m, i, n, first, end)
			}
		}
		first, end := m.Range(queries, keys, 0, queries)
		for j := range keys {
			any := false
			for i := range queries {
				any = any || sees(m, queries, keys, i, j)
			}
			if any && (j < first || j >= end) && j >= m.SinkKeys(first) {
				t.Fatalf("some position sees key %d, which is not in [%d, %d)", j, first, end)
			}
		}
	})
}

// A token of a tree sees its parents and theirs, and stands as deep as there are such; and ranges are what
// bits are.
func TestTree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, MaxTree).Draw(t, "tokens")
		parents := make([]int, n)
		for i := range parents {
			parents[i] = rapid.IntRange(-1, i-1).Draw(t, "parent")
		}
		tree, err := TreeOf(parents)
		if err != nil {
			t.Fatal(err)
		}
		if err := tree.Check(n); err != nil {
			t.Fatal(err)
		}
		chain := true
		for i := range parents {
			chain = chain && parents[i] == i-1
			line := map[int]bool{}
			for at := i; at >= 0; at = parents[at] {
				line[at] = true
			}
			if tree.Depth(i) != len(line)-1 {
				t.Fatalf("token %d is at depth %d, want %d", i, tree.Depth(i), len(line)-1)
			}
			for j := range parents {
				if tree.Sees(i, j) != line[j] {
					t.Fatalf("parents %v: token %d sees %d: %t", parents, i, j, !line[j])
				}
			}
			first := rapid.IntRange(0, n).Draw(t, "first")
			end := rapid.IntRange(first, n).Draw(t, "end")
			last := -1
			for from, to := range tree.Runs(i, first, end) {
				if from <= last || to <= from || from < first || to > end {
					t.Fatalf("a range [%d, %d) behind %d, of [%d, %d)", from, to, last, first, end)
				}
				for last = from; last < to; last++ {
					if !line[last] {
						t.Fatalf("range [%d, %d) has %d, which token %d does not see", from, to, last, i)
					}
					delete(line, last)
				}
			}
			for j := range line {
				if j >= first && j < end {
					t.Fatalf("no range has %d", j)
				}
			}
		}
		if tree.Chain() != chain {
			t.Fatalf("parents %v: a chain: %t", parents, tree.Chain())
		}
	})
	for _, parents := range [][]int{{0}, {-2}, {-1, 1}, make([]int, MaxTree+1)} {
		if tree, err := TreeOf(parents); err == nil {
			t.Errorf("parents %v: %v", parents, tree)
		}
	}
}

// set makes a field of any kind something else than nothing.
func set(t *testing.T, v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(3)
	case reflect.Float64:
		v.SetFloat(2)
	case reflect.String:
		v.SetString("12345678")
	case reflect.Struct:
		set(t, v.Field(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
	default:
		t.Fatalf("a field is a %v: tell this test how to set it", v.Kind())
	}
}

// Each field of Mask and Score is a feature of its own, and one that no line knows of is refused by whoever can do
// all that is known.
func TestFeatures(t *testing.T) {
	plain := Problem{Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 4, PageTokens: 1, Scale: 1}
	if f := plain.Features(); f != 0 {
		t.Errorf("a plain problem asks for %b", f)
	}
	seen := Feature(0)
	for _, name := range []string{"Mask", "Score"} {
		n := reflect.TypeFor[Problem]()
		field, _ := n.FieldByName(name)
		for i := range field.Type.NumField() {
			p := plain
			set(t, reflect.ValueOf(&p).Elem().FieldByName(name).Field(i))
			f := p.Features()
			if f == 0 || f&(f-1) != 0 || f&seen != 0 || f == unknown {
				t.Errorf("%s.%s asks for %b; it must be a feature of its own", name, field.Type.Field(i).Name, f)
			}
			seen |= f
			all := Can{Name: "a test", Features: ^Feature(0) &^ f, KV: []DType{Float32}}
			if err := all.Do("op", &p); !errors.Is(err, ErrUnsupported) {
				t.Errorf("%s.%s: %v", name, field.Type.Field(i).Name, err)
			}
			all.Features |= f
			if err := all.Do("op", &p); err != nil {
				t.Errorf("%s.%s: %v", name, field.Type.Field(i).Name, err)
			}
		}
	}
	texts := map[string]bool{}
	for f := Feature(1); f < behindScore; f <<= 1 {
		texts[f.text(&plain)] = true
	}
	if n := bits.Len32(uint32(behindScore)) - 1; len(texts) != n {
		t.Errorf("%d features have %d texts", n, len(texts))
	}
}

func TestCan(t *testing.T) {
	can := Can{Name: "the path", Features: Causal | SetWorkers, KV: []DType{Float16}}
	good := Problem{Dim: 2, ValueDim: 2, Mask: Mask{Causal: true}, Pages: Separate(Float16, 2, 2, PageStrides{}, PageStrides{}), Workers: 3}
	if err := can.Do("op", &good); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(p *Problem){
		"a window of 7 keys":                               func(p *Problem) { p.Window = 7 },
		"a soft cap of 2":                                  func(p *Problem) { p.Cap = 2 },
		"values of 4 elements and keys of 2":               func(p *Problem) { p.ValueDim = 4 },
		"values that are parts of their keys":              func(p *Problem) { p.Pages.Value.Plane = 0 },
		"keys of 2 planes":                                 func(p *Problem) { p.Pages.KeyPlanes = 2 },
		"keys and values of different types":               func(p *Problem) { p.Pages.Planes[1].DType = Float32 },
		"float16 with a scale for each token and head":     func(p *Problem) { p.Pages.Planes[1].Scales = ScalesByToken },
		"unfused attention":                                func(p *Problem) { p.Unfused = true },
		"keys and values are bfloat16; it takes [float16]": func(p *Problem) { p.Pages = p.Pages.As(BFloat16) },
	} {
		p := good
		change(&p)
		if err := can.Do("op", &p); err == nil || !strings.Contains(err.Error(), "op: the path: "+want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
