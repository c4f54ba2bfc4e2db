package hf

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestSafetensors(t *testing.T) {
	var f tensorFile
	f.add("b", f32, []int{2, 3}, []float32{1, 2, 3, 4, 5, 6})
	f.add("empty", f32, []int{0, 7}, nil)
	f.add("a", f16, []int{2}, []float32{0.5, -65504})
	f.add("scalar", bf16, nil, []float32{-3})
	f.add("also empty", f16, []int{3, 0}, nil)
	for skew := range 8 {
		data := f.bytes(skew)
		entries, err := parseSafetensors("x.safetensors", data)
		if err != nil {
			t.Fatal(err)
		}
		sound(t, data, entries)
		got := map[string]string{}
		for _, e := range entries {
			got[e.name] = fmt.Sprint(e.dtype, e.shape, e.float32s())
		}
		for name, want := range map[string]string{
			"b": "F32[2 3] [1 2 3 4 5 6]", "empty": "F32[0 7] []", "a": "F16[2] [0.5 -65504]",
			"scalar": "BF16[] [-3]", "also empty": "F16[3 0] []",
		} {
			if got[name] != want {
				t.Errorf("data %d bytes past a multiple of 8: %s is %q, want %q", skew, name, got[name], want)
			}
		}
		if len(entries) != 5 {
			t.Errorf("%d tensors, want 5", len(entries))
		}
	}
	if e, err := parseSafetensors("x", rawSafetensors("{}", nil)); err != nil || len(e) != 0 {
		t.Errorf("a file without tensors: %v, %v", e, err)
	}
	if e, err := parseSafetensors("x", rawSafetensors("{\"__metadata__\":{\"a\":\"b\"}} \n\t ", nil)); err != nil || len(e) != 0 {
		t.Errorf("a file with metadata alone: %v, %v", e, err)
	}
}

// TestOtherTypes checks that a file may have tensors of types that no decoder uses.
func TestOtherTypes(t *testing.T) {
	for d, size := range elementBytes {
		var f tensorFile
		f.data = make([]byte, 6*size)
		f.raw("x", d, []int{3, 2}, 0, 6*size)
		if e, err := parseSafetensors("x", f.bytes(0)); err != nil || len(e) != 1 || e[0].dtype != d {
			t.Errorf("%s: %v, %v", d, e, err)
		}
		f.raw("x", d, []int{3, 3}, 0, 6*size)
		_, err := parseSafetensors("x", f.bytes(0))
		refused(t, string(d)+" of another size", err, ErrFormat, string(d), "[3 3]")
	}
}

func TestBadSafetensors(t *testing.T) {
	entry := func(dtype, shape, offsets string) string {
		return fmt.Sprintf(`{"dtype":%s,"shape":%s,"data_offsets":%s}`, dtype, shape, offsets)
	}
	eight := make([]byte, 8)
	for _, c := range []struct {
		what, header string
		data         []byte
		kind         error
		words        []string
	}{
		{"no JSON", "x", nil, ErrFormat, []string{"not a JSON object"}},
		{"a list", "[]", nil, ErrFormat, []string{"not a JSON object"}},
		{"nothing", "", nil, ErrFormat, []string{"not a JSON object"}},
		{"cut short", `{"a":`, nil, ErrFormat, []string{`tensor "a"`}},
		{"cut after a tensor", `{"a":` + entry(`"F32"`, "[2]", "[0,8]"), eight, ErrFormat, []string{"header"}},
		{"key without quotes", `{"b":` + entry(`"F32"`, "[2]", "[0,8]") + `, a:1}`, eight, ErrFormat, []string{"header"}},
		{"two objects", `{}{}`, nil, ErrFormat, []string{"followed by 2 bytes"}},
		{"number for a tensor", `{"a":3}`, nil, ErrFormat, []string{`tensor "a"`}},
		{"metadata that is no text", `{"__metadata__":{"a":1}}`, nil, ErrFormat, []string{"__metadata__"}},
		{"same name twice", `{"a":` + entry(`"F32"`, "[2]", "[0,8]") + `,"a":` + entry(`"F32"`, "[2]", "[0,8]") + `}`, eight, ErrFormat, []string{`"a" is there twice`}},
		{"unknown type", `{"a":` + entry(`"F31"`, "[2]", "[0,8]") + `}`, eight, ErrUnsupported, []string{`"a"`, `"F31"`}},
		{"type that is no text", `{"a":` + entry(`32`, "[2]", "[0,8]") + `}`, eight, ErrFormat, []string{`tensor "a"`}},
		{"no type", `{"a":{"shape":[2],"data_offsets":[0,8]}}`, eight, ErrUnsupported, []string{`unknown dtype ""`}},
		{"no shape", `{"a":{"dtype":"F32","data_offsets":[0,8]}}`, eight, ErrFormat, []string{`"a" has no shape`}},
		{"no offsets", `{"a":{"dtype":"F32","shape":[2]}}`, eight, ErrFormat, []string{"0 data_offsets"}},
		{"three offsets", `{"a":` + entry(`"F32"`, "[2]", "[0,8,8]") + `}`, eight, ErrFormat, []string{"3 data_offsets"}},
		{"negative dimension", `{"a":` + entry(`"F32"`, "[-2]", "[0,8]") + `}`, eight, ErrFormat, []string{`tensor "a"`, "-2"}},
		{"fractional dimension", `{"a":` + entry(`"F32"`, "[2.5]", "[0,8]") + `}`, eight, ErrFormat, []string{`tensor "a"`, "2.5"}},
		{"dimension beyond 64 bits", `{"a":` + entry(`"F32"`, "[18446744073709551616]", "[0,8]") + `}`, eight, ErrFormat, []string{`tensor "a"`}},
		{"negative offset", `{"a":` + entry(`"F32"`, "[2]", "[-8,0]") + `}`, eight, ErrFormat, []string{`tensor "a"`, "-8"}},
		{"shape too small", `{"a":` + entry(`"F32"`, "[1]", "[0,8]") + `}`, eight, ErrFormat, []string{"F32 [1]", "8 bytes"}},
		{"shape too large", `{"a":` + entry(`"F32"`, "[3]", "[0,8]") + `}`, eight, ErrFormat, []string{"F32 [3]", "8 bytes"}},
		{"half an element", `{"a":` + entry(`"F32"`, "[1]", "[0,6]") + `}`, eight, ErrFormat, []string{"6 bytes"}},
		{"2^60 elements", `{"a":` + entry(`"F32"`, "[1152921504606846976]", "[0,8]") + `}`, eight, ErrFormat, []string{"[1152921504606846976]"}},
		// 2^32 * 2^32 * 2 is 2 modulo 2^64.
		{"product that wraps to 2", `{"a":` + entry(`"F32"`, "[4294967296,4294967297,2]", "[0,8]") + `}`, eight, ErrFormat, []string{"does not fill"}},
		{"product that wraps to 0", `{"a":` + entry(`"F32"`, "[4294967296,4294967296]", "[0,0]") + `}`, nil, ErrFormat, []string{"does not fill"}},
		{"zero hides an overflow", `{"a":` + entry(`"F32"`, "[4294967296,4294967296,0]", "[0,0]") + `}`, nil, ErrFormat, []string{"does not fill"}},
		{"zero beside a dimension beyond int", `{"a":` + entry(`"F32"`, "[0,18446744073709551615]", "[0,0]") + `}`, nil, ErrFormat, []string{"does not fill"}},
		{"backwards", `{"a":` + entry(`"F32"`, "[2]", "[8,0]") + `}`, eight, ErrFormat, []string{"[8, 0)"}},
		{"beyond the file", `{"a":` + entry(`"F32"`, "[2]", "[4,12]") + `}`, eight, ErrFormat, []string{"[4, 12) of 8 bytes"}},
		{"far beyond the file", `{"a":` + entry(`"F32"`, "[2]", "[18446744073709551608,18446744073709551615]") + `}`, eight, ErrFormat, []string{"of 8 bytes"}},
		{"overlap", `{"a":` + entry(`"U8"`, "[5]", "[0,5]") + `,"b":` + entry(`"U8"`, "[4]", "[4,8]") + `}`, eight, ErrFormat, []string{`"a" and "b" overlap`}},
		{"same place", `{"a":` + entry(`"F32"`, "[2]", "[0,8]") + `,"b":` + entry(`"F32"`, "[2]", "[0,8]") + `}`, eight, ErrFormat, []string{"overlap"}},
		{"gap", `{"a":` + entry(`"U8"`, "[3]", "[0,3]") + `,"b":` + entry(`"U8"`, "[4]", "[4,8]") + `}`, eight, ErrFormat, []string{`1 byte before tensor "b"`}},
		{"gap at the beginning", `{"b":` + entry(`"U8"`, "[4]", "[4,8]") + `}`, eight, ErrFormat, []string{`4 bytes before tensor "b"`}},
		{"rest", `{"a":` + entry(`"U8"`, "[3]", "[0,3]") + `}`, eight, ErrFormat, []string{"last 5 bytes"}},
		// The Rust and Python readers refuse a null. encoding/json leaves the Go value unchanged.
		{"offset that is null", `{"a":` + entry(`"F32"`, "[2]", "[null,8]") + `}`, eight, ErrFormat, []string{"null"}},
		{"offsets that are null", `{"a":` + entry(`"F32"`, "[0]", "[null,null]") + `}`, nil, ErrFormat, []string{"null"}},
		{"dimension that is null", `{"a":` + entry(`"F32"`, "[null]", "[0,0]") + `}`, nil, ErrFormat, []string{"null"}},
		{"shape that is null", `{"a":` + entry(`"F32"`, "null", "[0,4]") + `}`, eight[:4], ErrFormat, []string{"null"}},
		{"type that is null", `{"a":` + entry(`null`, "[2]", "[0,8]") + `}`, eight, ErrFormat, []string{"null"}},
		{"tensor that is null", `{"a":null}`, nil, ErrFormat, []string{"null"}},
		{"metadata that is null", `{"__metadata__":null}`, nil, ErrFormat, []string{"null"}},
		{"metadata with null", `{"__metadata__":{"a":null}}`, nil, ErrFormat, []string{"null"}},
		{"key in capitals", `{"a":{"dtype":"F32","Shape":[2],"data_offsets":[0,8]}}`, eight, ErrFormat, []string{`"Shape"`}},
		{"key in both", `{"a":{"dtype":"F32","shape":[2],"SHAPE":[1,2],"data_offsets":[0,8]}}`, eight, ErrFormat, []string{`"SHAPE"`}},
		{"key twice", `{"a":{"dtype":"F32","shape":[2],"shape":[1,2],"data_offsets":[0,8]}}`, eight, ErrFormat, []string{`"shape"`, "twice"}},
		{"key that is not known", `{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"scale":2}}`, eight, ErrFormat, []string{`"scale"`}},
		{"key without value", `{"a":{"dtype":"F32","shape":}}`, eight, ErrFormat, []string{`tensor "a"`}},
		{"nested", strings.Repeat(`{"a":`, 4), nil, ErrFormat, []string{"nested"}},
		{"long name", `{"` + strings.Repeat("n", 1<<16) + `":1}`, nil, ErrFormat, []string{"nnn\"... (65536 bytes)"}},
		{"many dimensions", `{"a":` + entry(`"F32"`, "["+strings.Repeat("1,", 9999)+"1]", "[0,8]") + `}`, eight, ErrFormat, []string{"10000 dimensions"}},
	} {
		entries, err := parseSafetensors("dir/x.safetensors", rawSafetensors(c.header, c.data))
		refused(t, c.what, err, c.kind, append(c.words, "dir/x.safetensors")...)
		if entries != nil {
			t.Errorf("%s: tensors and an error", c.what)
		}
		if err != nil && len(err.Error()) > 1000 {
			t.Errorf("%s: a sentence of %d bytes", c.what, len(err.Error()))
		}
	}
}

func TestBadSafetensorsLength(t *testing.T) {
	good := rawSafetensors(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}`, make([]byte, 8))
	if _, err := parseSafetensors("x", good); err != nil {
		t.Fatal(err)
	}
	for n := range good {
		_, err := parseSafetensors("x", good[:n])
		refused(t, fmt.Sprintf("%d of %d bytes", n, len(good)), err, ErrFormat)
	}
	for _, length := range []uint64{uint64(len(good)) - 7, maxHeader + 1, 1 << 60, math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64} {
		bad := slices.Clone(good)
		binary.LittleEndian.PutUint64(bad, length)
		var err error
		n := allocated(func() { _, err = parseSafetensors("x", bad) })
		refused(t, fmt.Sprintf("a header of %d bytes", length), err, ErrFormat, fmt.Sprint(length))
		if n > 1<<16 {
			t.Errorf("a header that claims %d bytes allocated %d", length, n)
		}
	}
}

// TestSafetensorsMemory checks that a claimed size allocates no memory.
func TestSafetensorsMemory(t *testing.T) {
	for _, header := range []string{
		`{"a":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}`,
		`{"a":{"dtype":"F16","shape":[0,1152921504606846976],"data_offsets":[0,0]}}`,
	} {
		n := allocated(func() {
			if e, err := parseSafetensors("x", rawSafetensors(header, nil)); err == nil {
				e[0].float32s()
			}
		})
		if n > 1<<16 {
			t.Errorf("%s allocated %d bytes", header, n)
		}
	}
}

// TestSafetensorsLaws checks that tensors read back as they were written, for any order of the tensors in header and
// data.
func TestSafetensorsLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var f tensorFile
		want := map[string]string{}
		for i := range rapid.IntRange(0, 6).Draw(t, "tensors") {
			name := fmt.Sprintf("%d%s", i, rapid.String().Draw(t, "name"))
			name = strings.ToValidUTF8(name, "?")
			d := rapid.SampledFrom([]dtype{f32, f16, bf16}).Draw(t, "type")
			shape := rapid.SliceOfN(rapid.IntRange(0, 4), 0, 4).Draw(t, "shape")
			v := make([]float32, size(shape))
			for j := range v {
				v[j] = element(i, j)
			}
			f.add(name, d, shape, v)
			want[name] = fmt.Sprint(d, shape, v)
		}
		if f.header == nil {
			f.header = map[string]any{}
		}
		entries, err := parseSafetensors("x", f.bytes(rapid.IntRange(0, 7).Draw(t, "skew")))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if got := fmt.Sprint(e.dtype, e.shape, e.float32s()); got != want[e.name] {
				t.Fatalf("%q is %s, want %s", e.name, got, want[e.name])
			}
			delete(want, e.name)
		}
		if len(want) != 0 {
			t.Fatalf("not there: %v", want)
		}
	})
}
