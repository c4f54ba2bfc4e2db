package gguf

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
)

func mustParse(t testing.TB, data []byte) *File {
	t.Helper()
	f, err := Parse("test.gguf", data)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestRoundTrip(t *testing.T) {
	for _, version := range []uint32{2, 3} {
		for _, alignment := range []int{0, 1, 8, 64, 1 << 20} {
			c := sound(version, alignment)
			f, err := Open(save(t, []string{"m.gguf"}, c.encode()))
			if err != nil {
				t.Fatal(err)
			}
			if f.Version() != int(version) {
				t.Errorf("version %d, want %d", f.Version(), version)
			}
			for _, p := range allKinds {
				if got, err := f.Metadata().Any(p.key); err != nil || !reflect.DeepEqual(got, p.value) {
					t.Errorf("%s: %#v, %v, want %#v", p.key, got, err, p.value)
				}
			}
			for i, got := range f.Tensors() {
				want := c.tensors[i]
				var shape []uint64
				for _, n := range got.Shape() {
					shape = append(shape, uint64(n))
				}
				if got.Name() != want.name || got.Type() != want.typ || !slices.Equal(shape, want.shape) || got.Bytes() != len(want.data) {
					t.Errorf("tensor %d is %s, %v, %v, %d bytes", i, got.Name(), got.Type(), got.Shape(), got.Bytes())
				}
			}
			embd, err := f.Tensor("token_embd.weight")
			if err != nil {
				t.Fatal(err)
			}
			got := make([]float32, 4)
			if err := embd.Float32(got, 1, 3); err != nil || !slices.Equal(got, []float32{3, 4, 5, 6}) {
				t.Errorf("rows 1 and 2: %v, %v", got, err)
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestGetters(t *testing.T) {
	m := mustParse(t, sound(3, 0).encode()).Metadata()
	for _, c := range []struct {
		get  any
		key  string
		want any // a value or an error
	}{
		{m.Int, "a.uint8", 200}, {m.Int, "a.int8", -100}, {m.Int, "a.uint16", 60000}, {m.Int, "a.int16", -30000}, {m.Int, "a.int32", int(-2e9)},
		{m.Int, "a.uint64", ErrRange}, {m.Int, "a.float32", ErrType}, {m.Int, "a.bool", ErrType}, {m.Int, "s.int32", ErrType}, {m.Int, "none", ErrMissing},
		{m.Float64, "a.float32", float64(float32(0.1))}, {m.Float64, "a.float64", 0.1}, {m.Float64, "a.int8", ErrType}, {m.Float64, "none", ErrMissing},
		{m.Bool, "a.bool", true}, {m.Bool, "a.false", false}, {m.Bool, "a.uint8", ErrType},
		{m.String, "a.string", "grüße"}, {m.String, "a.empty", ""}, {m.String, "s.string", ErrType},
		{m.Ints, "s.uint8", []int{1, 255}}, {m.Ints, "s.int16", []int{-1, 1}}, {m.Ints, "s.empty", []int{}}, {m.Ints, "s.uint64", ErrRange},
		{m.Ints, "s.float32", ErrType}, {m.Ints, "a.int8", ErrType},
		{m.Float32s, "s.float32", []float32{1, -0.5}}, {m.Float32s, "s.float64", ErrType}, {m.Float32s, "a.float32", ErrType},
		{m.Bools, "s.bool", []bool{true, false}}, {m.Bools, "s.uint8", ErrType},
		{m.Strings, "s.string", []string{"a", "", "ß"}}, {m.Strings, "s.nested", ErrType}, {m.Strings, "a.string", ErrType},
	} {
		r := reflect.ValueOf(c.get).Call([]reflect.Value{reflect.ValueOf(c.key)})
		got, err := r[0].Interface(), r[1].Interface()
		if want, ok := c.want.(error); ok {
			if e, _ := err.(error); !errors.Is(e, want) || !r[0].IsZero() {
				t.Errorf("%s: %v, %v, want %v", c.key, got, err, want)
			}
		} else if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, %v, want %v", c.key, got, err, c.want)
		}
	}
	for key, want := range map[string]int64{"a.uint32": 4e9, "a.int64": math.MinInt64} {
		n, err := m.Int(key)
		if bits.UintSize == 64 && (int64(n) != want || err != nil) || bits.UintSize == 32 && !errors.Is(err, ErrRange) {
			t.Errorf("%s: %d, %v", key, n, err)
		}
	}
	_, err := m.Strings("s.int32")
	const want = `gguf: test.gguf: metadata key "s.int32" is an array of 2 int32; an array of strings is wanted: type mismatch`
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if n, err := Or(m.Int, "none", 7); n != 7 || err != nil {
		t.Errorf("Or of no key: %d, %v", n, err)
	}
	if n, err := Or(m.Int, "a.uint8", 7); n != 200 || err != nil {
		t.Errorf("Or of a key: %d, %v", n, err)
	}
	if _, err := Or(m.Int, "a.string", 7); !errors.Is(err, ErrType) {
		t.Errorf("Or of a string: %v", err)
	}
}

func TestUnread(t *testing.T) {
	m := mustParse(t, contents{version: 3, keys: []pair{{"b", int8(1)}, {"a", "x"}, {"c", int8(1)}, {"d", int8(1)}}}.encode()).Metadata()
	if got := m.Keys(); !slices.Equal(got, []string{"b", "a", "c", "d"}) {
		t.Errorf("keys %v", got)
	}
	_, _ = m.Int("a") // a value of another type: the key still counts as read
	_, _ = m.Int("c")
	if kind, _, _, ok := m.Kind("b"); kind != Int8 || !ok || !m.Has("d") || m.Has("e") {
		t.Error("Kind or Has")
	}
	if got := m.Unread(); !slices.Equal(got, []string{"b", "d"}) {
		t.Errorf("unread keys %v", got)
	}
	m = mustParse(t, contents{version: 3, alignment: 64, keys: []pair{{"b", int8(1)}}}.encode()).Metadata()
	if got := m.Unread(); !slices.Equal(got, []string{"b"}) {
		t.Errorf("unread keys %v", got)
	}
}

func f32Tensor(name string, at int64) written {
	return written{name: name, shape: []uint64{2}, typ: F32, data: floats(1, 2), at: at}
}

func TestErrors(t *testing.T) {
	one := func(t written) contents { return contents{version: 3, tensors: []written{t}} }
	key := func(key string, v any) contents { return contents{version: 3, keys: []pair{{key, v}}} }
	wide := ErrFormat // the error for a number that int can hold and the data cannot
	if bits.UintSize == 32 {
		wide = ErrUnsupported
	}
	deep := any([]uint8{1})
	for range 9 {
		deep = []any{deep}
	}
	bytesOf := func(c contents, from string, to string) []byte {
		s := strings.Replace(string(c.encode()), from, to, 1)
		return []byte(s)
	}
	for name, c := range map[string]struct {
		data []byte
		kind error
		text string
	}{
		"empty":              {nil, ErrFormat, `begins with ""`},
		"other":              {[]byte("PK\x03\x04......"), ErrFormat, `begins with "PK\x03\x04"`},
		"pointer":            {[]byte("version https://git-lfs.github.com/spec/v1\n"), ErrMissing, "git lfs pull"},
		"old":                {[]byte("tjgg\x03\x00\x00\x00"), ErrUnsupported, "older than GGUF"},
		"short":              {[]byte("GGUF\x03\x00"), ErrFormat, "the version at byte 4 would have 4 bytes, and the file has 2 more"},
		"version 1":          {contents{version: 1}.encode(), ErrUnsupported, "version 1; versions 2 and 3"},
		"version 4":          {contents{version: 4}.encode(), ErrUnsupported, "version 4; versions 2 and 3"},
		"big endian":         {contents{version: 3 << 24}.encode(), ErrUnsupported, "big endian (version 3)"},
		"key count":          {contents{version: 3, keyCount: 1 << 60}.encode(), ErrFormat, "1152921504606846976 metadata keys are claimed"},
		"many keys":          {append(contents{version: 3, keyCount: 1 << 17}.encode(), make([]byte, 1<<21)...), ErrUnsupported, "at most 65536 are read"},
		"tensor count":       {contents{version: 3, tensorCount: 1 << 60}.encode(), ErrFormat, "1152921504606846976 tensors are claimed"},
		"many tensors":       {append(contents{version: 3, tensorCount: 1 << 18}.encode(), make([]byte, 1<<23)...), ErrUnsupported, "at most 131072 are read"},
		"key twice":          {contents{version: 3, keys: []pair{{"a", "x"}, {"a", "x"}}}.encode(), ErrFormat, `key "a" is there twice`},
		"empty key":          {key("", "x").encode(), ErrFormat, "metadata key 0 is empty"},
		"key with space":     {key("a b", "x").encode(), ErrFormat, `key "a b" is not of visible ASCII`},
		"long key":           {key(strings.Repeat("a", 1<<16), "x").encode(), ErrFormat, "has 65536 bytes, more than 65535"},
		"string":             {bytesOf(key("a", "xyz"), "\x03\x00\x00\x00\x00\x00\x00\x00xyz", "\xff\xff\xff\x7f\x00\x00\x00\x00xyz"), ErrFormat, "and the file has 3 more"},
		"string over int":    {bytesOf(key("a", "xyz"), "\x03\x00\x00\x00\x00\x00\x00\x00xyz", "\xff\xff\xff\xff\xff\xff\xff\xffxyz"), ErrFormat, "has 18446744073709551615 bytes, more than"},
		"kind":               {bytesOf(key("abc", uint8(7)), "abc\x00", "abc\x0d"), ErrFormat, `key "abc" has a value of unknown kind 13`},
		"elements' kind":     {bytesOf(key("abc", []uint8{7}), "abc\x09\x00\x00\x00\x00", "abc\x09\x00\x00\x00\x0d"), ErrFormat, `key "abc" has an array of unknown kind 13`},
		"array":              {bytesOf(key("abc", []int32{7}), "abc\x09\x00\x00\x00\x05\x00\x00\x00\x01", "abc\x09\x00\x00\x00\x05\x00\x00\x00\x02"), ErrFormat, "an array of 2 int32, more than the 4 bytes"},
		"array of strings":   {bytesOf(key("abc", []string{"q"}), "abc\x09\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00", "abc\x09\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x10"), ErrFormat, "an array of 1152921504606846977 string"},
		"bool":               {bytesOf(key("abc", true), "abc\x07\x00\x00\x00\x01", "abc\x07\x00\x00\x00\x02"), ErrFormat, `key "abc" has a bool of 2`},
		"bools":              {bytesOf(key("abc", []bool{true}), "\x01\x00\x00\x00\x00\x00\x00\x00\x01", "\x01\x00\x00\x00\x00\x00\x00\x00\x03"), ErrFormat, "a bool of 3 in its array"},
		"depth":              {key("abc", deep).encode(), ErrUnsupported, "arrays in more than 8 arrays"},
		"alignment 0":        {key(alignmentKey, uint32(0)).encode(), ErrFormat, "is 0; a power of two up to 1048576"},
		"alignment 24":       {key(alignmentKey, uint32(24)).encode(), ErrFormat, "is 24; a power of two"},
		"alignment 2^21":     {key(alignmentKey, uint32(1<<21)).encode(), ErrFormat, "is 2097152; a power of two"},
		"alignment -8":       {key(alignmentKey, int32(-8)).encode(), ErrFormat, "is -8; a power of two"},
		"alignment 2^63":     {key(alignmentKey, uint64(1<<63)).encode(), ErrRange, "more than an int"},
		"alignment text":     {key(alignmentKey, "32").encode(), ErrType, "is string; an integer is wanted"},
		"tensor twice":       {contents{version: 3, tensors: []written{f32Tensor("a", 0), f32Tensor("a", 0)}}.encode(), ErrFormat, `tensor "a" is there twice`},
		"unnamed tensor":     {one(f32Tensor("", 0)).encode(), ErrFormat, `tensor 0 has the name "", which is empty`},
		"name not UTF-8":     {one(f32Tensor("a\xff", 0)).encode(), ErrFormat, `tensor 0 has the name "a\xff", which is empty or not UTF-8`},
		"long name":          {one(f32Tensor(strings.Repeat("a", 65), 0)).encode(), ErrFormat, "has 65 bytes, more than 64"},
		"5 dimensions":       {one(written{name: "a", shape: []uint64{1, 1, 1, 1, 1}}).encode(), ErrFormat, `tensor "a" has 5 dimensions`},
		"2^31 dimensions":    {bytesOf(one(written{name: "abc", shape: []uint64{2}, data: make([]byte, 8)}), "abc\x01\x00\x00\x00", "abc\x00\x00\x00\x80"), ErrFormat, `tensor "abc" has 2147483648 dimensions`},
		"number of a part":   {contents{version: 3, keys: []pair{{keyPart, "0"}}}.encode(), ErrType, `"split.no" is string`},
		"no elements":        {one(written{name: "a", shape: []uint64{2, 0}}).encode(), ErrFormat, "dimension 0 of 2 is 0"},
		"product":            {one(written{name: "a", shape: []uint64{1 << 63, 2}}).encode(), ErrFormat, "too many"},
		"product over 2^60":  {one(written{name: "a", shape: []uint64{1 << 31, 1 << 30}}).encode(), ErrFormat, "too many"},
		"product, 32 bits":   {one(written{name: "a", shape: []uint64{1 << 20, 1 << 20}}).encode(), wide, `tensor "a"`},
		"blocks":             {one(written{name: "a", shape: []uint64{2, 48}, typ: Q8_0}).encode(), ErrFormat, "rows of 48 elements, and Q8_0 has blocks of 32"},
		"offset":             {one(f32Tensor("a", 4)).encode(), ErrFormat, "no multiple of the alignment 32"},
		"offset behind":      {one(f32Tensor("a", 64)).encode(), ErrFormat, "8 bytes at byte 64 of the data, and the data have 8"},
		"offset at 2^63":     {one(f32Tensor("a", math.MaxInt64-31)).encode(), ErrFormat, "at byte 9223372036854775776 of the data"},
		"cut":                {one(written{name: "a", shape: []uint64{3}, typ: F32, data: floats(1, 2)}).encode(), ErrFormat, "12 bytes at byte 0 of the data, and the data have 8"},
		"no data":            {one(f32Tensor("a", 0)).encode()[:60], ErrFormat, "the data would begin at byte 64, and the file has 60"},
		"overlap":            {contents{version: 3, tensors: []written{{name: "a", shape: []uint64{16}, typ: F32, data: make([]byte, 64)}, f32Tensor("b", 32)}}.encode(), ErrFormat, `tensors "a" and "b" overlap`},
		"split, not by path": {contents{version: 3, keys: []pair{{keyPart, uint16(0)}, {keyParts, uint16(2)}}}.encode(), ErrFormat, "does not end with -00001-of-00002.gguf"},
	} {
		f, err := Parse("test.gguf", c.data)
		if f != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q and %q", name, err, c.text, c.kind)
		}
	}
}

// Every type that is not decoded, and every earlier format, is an error that names it.
func TestTypes(t *testing.T) {
	for _, magic := range []string{"tjgg", "fmgg", "lmgg", "algg"} { // ggjt, ggmf, ggml and ggla as numbers
		if _, err := Parse("test.gguf", []byte(magic)); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "older than GGUF") {
			t.Errorf("%s: %v", magic, err)
		}
	}
	for typ := range Type(64) {
		_, err := Parse("test.gguf", contents{version: 3, tensors: []written{{name: "blk.0", shape: []uint64{256}, typ: typ, data: make([]byte, 2048)}}}.encode())
		if _, ok := layouts[typ]; ok {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		want := fmt.Sprintf("tensor \"blk.0\" has type %v;", typ)
		if typ > 41 {
			want = fmt.Sprintf("tensor \"blk.0\" has type type %d;", typ)
		}
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("type %d: %v, want %q", typ, err, want)
		}
	}
	if MXFP4 := Type(39); MXFP4.String() != "MXFP4" || Q4_K.String() != "Q4_K" {
		t.Error("names of types")
	}
}

func splitFiles(n int, change func(i int, c *contents)) (names []string, files [][]byte) {
	for i := range n {
		c := contents{version: 3, keys: []pair{{keyPart, uint16(i)}, {keyParts, uint16(n)}, {keyTensors, int32(n)}},
			tensors: []written{{name: fmt.Sprint("t", i), shape: []uint64{2}, typ: F32, data: floats(float32(i), 1)}}}
		if i == 0 {
			c.keys = append(c.keys, pair{"general.architecture", "llama"})
		}
		if change != nil {
			change(i, &c)
		}
		names, files = append(names, fmt.Sprintf("m-%05d-of-%05d.gguf", i+1, n)), append(files, c.encode())
	}
	return names, files
}

func TestSplit(t *testing.T) {
	names, files := splitFiles(3, func(i int, c *contents) {
		if i == 1 {
			c.alignment = 64
		}
	})
	f, err := Open(save(t, names, files...))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := f.Paths(); len(got) != 3 || filepath.Base(got[2]) != "m-00003-of-00003.gguf" {
		t.Errorf("paths %v", got)
	}
	for i, tensor := range f.Tensors() {
		got := make([]float32, 2)
		if err := tensor.Float32(got, 0, 1); err != nil || tensor.Name() != fmt.Sprint("t", i) || got[0] != float32(i) {
			t.Errorf("tensor %d is %s, %v, %v", i, tensor.Name(), got, err)
		}
	}
	if got := f.Metadata().Unread(); !slices.Equal(got, []string{"general.architecture"}) {
		t.Errorf("unread keys %v", got)
	}
	// A file that was merged from parts has the number of parts 0.
	merged := mustParse(t, contents{version: 3, keys: []pair{{keyPart, uint16(0)}, {keyParts, uint16(0)}, {keyTensors, int32(5)}}}.encode())
	if left := merged.Metadata().Unread(); len(left) != 0 {
		t.Errorf("unread keys %v", left)
	}
}

func TestSplitErrors(t *testing.T) {
	set := func(c *contents, key string, v any) {
		for i := range c.keys {
			if c.keys[i].key == key {
				c.keys[i].value = v
				return
			}
		}
		c.keys = append(c.keys, pair{key, v})
	}
	drop := func(c *contents, key string) {
		c.keys = slices.DeleteFunc(c.keys, func(p pair) bool { return p.key == key })
	}
	for name, c := range map[string]struct {
		change func(i int, c *contents)
		kind   error
		text   string
	}{
		"part twice":    {func(i int, c *contents) { set(c, keyPart, uint16(min(i, 1))) }, ErrFormat, "split.no is 1; 2 is wanted"},
		"another model": {func(i int, c *contents) { set(c, keyParts, uint16(3+i/2)) }, ErrFormat, `"split.count" differs from the first part's`},
		"total":         {func(i int, c *contents) { set(c, keyTensors, int32(4)) }, ErrFormat, "split.tensors.count is 4, and the 3 files have 3 tensors"},
		"tensor twice":  {func(i int, c *contents) { c.tensors[0].name = "t" }, ErrFormat, `00002-of-00003.gguf: tensor "t" is there twice`},
		"key in part 2": {func(i int, c *contents) { set(c, fmt.Sprint("x", i), "y") }, ErrUnsupported, `metadata key "x1" is not in the first part`},
		"no number":     {func(i int, c *contents) { drop(c, keyPart) }, ErrMissing, `metadata key "split.no"`},
		"no count": {func(i int, c *contents) {
			if i > 0 {
				drop(c, keyParts)
			}
		}, ErrMissing, `metadata key "split.count"`},
		"version":           {func(i int, c *contents) { c.version = uint32(3 - i/2) }, ErrFormat, "version 2, and the first part has 3"},
		"count as text":     {func(i int, c *contents) { set(c, keyParts, "3") }, ErrType, `"split.count" is string`},
		"number of 3 parts": {func(i int, c *contents) { set(c, keyPart, uint16(3)) }, ErrFormat, "split.no is 3 of 3 files"},
		"65536 parts":       {func(i int, c *contents) { set(c, keyParts, uint32(100000)) }, ErrFormat, "split.count is 100000"},
	} {
		names, files := splitFiles(3, c.change)
		f, err := Open(save(t, names, files...))
		if f != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q and %q", name, err, c.text, c.kind)
		}
	}
	names, files := splitFiles(3, nil)
	first := save(t, names, files...)
	if _, err := Open(filepath.Join(filepath.Dir(first), names[1])); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "part 2 of 3: open the first, m-00001-of-00003.gguf") {
		t.Errorf("the second part: %v", err)
	}
	if _, err := Parse(names[0], files[0]); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "open the model by its path") {
		t.Errorf("the first part in memory: %v", err)
	}
	if err := os.Remove(filepath.Join(filepath.Dir(first), names[2])); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(first); !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), "part 3 of 3: gguf: "+filepath.Join(filepath.Dir(first), names[2])) {
		t.Errorf("without the third part: %v", err)
	}
	renamed := filepath.Join(filepath.Dir(first), "m.gguf")
	if err := os.Rename(first, renamed); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(renamed); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "does not end with -00001-of-00003.gguf") {
		t.Errorf("under another name: %v", err)
	}
}

func TestClosed(t *testing.T) {
	f, err := Open(save(t, []string{"m.gguf"}, sound(3, 0).encode()))
	if err != nil {
		t.Fatal(err)
	}
	tensor := f.Tensors()[0]
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); !errors.Is(err, ErrClosed) {
		t.Errorf("Close again: %v", err)
	}
	if err := tensor.Float32(make([]float32, 6), 0, 3); !errors.Is(err, ErrClosed) {
		t.Errorf("rows: %v", err)
	}
	if _, err := f.Metadata().Strings("s.string"); !errors.Is(err, ErrClosed) {
		t.Errorf("metadata: %v", err)
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(filepath.Join(dir, "none.gguf")); !errors.Is(err, ErrMissing) {
		t.Errorf("no file: %v", err)
	}
	if _, err := Open(dir); !errors.Is(err, ErrFormat) {
		t.Errorf("a folder: %v", err)
	}
	if _, err := Open(save(t, []string{"e.gguf"}, nil)); !errors.Is(err, ErrFormat) {
		t.Errorf("an empty file: %v", err)
	}
}

// Reading a file that was truncated while open returns an error, and does not fault.
func TestCut(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux cuts a mapped file")
	}
	c := contents{version: 3, tensors: []written{{name: "a", shape: []uint64{1024, 256}, typ: F32, data: make([]byte, 1<<20)}}}
	name := save(t, []string{"m.gguf"}, c.encode())
	f, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Truncate(name, 8192); err != nil {
		t.Fatal(err)
	}
	if err := f.Tensors()[0].Float32(make([]float32, 1<<18), 0, 1024); !errors.Is(err, ErrMissing) {
		t.Errorf("a cut file: %v", err)
	}
}
