package hf

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestTorchWeights reads files that torch wrote, in all its layouts.
func TestTorchWeights(t *testing.T) {
	_, weights, values := tiny(t)
	for _, c := range []struct {
		file  string
		dtype dtype
	}{
		{"f32.bin", f32}, {"f16.bin", f16}, {"bf16.bin", bf16}, {"protocol4.bin", f32},
		{"f16-old.bin", f16}, {"bf16-old.bin", bf16},
	} {
		data := readTestdata(t, c.file)
		entries, err := parseTorch(c.file, data)
		if err != nil {
			t.Error(err)
			continue
		}
		sound(t, data, entries)
		if len(entries) != len(weights) {
			t.Errorf("%s: %d tensors, want %d", c.file, len(entries), len(weights))
		}
		for _, e := range entries {
			want := values[canonical(e.name)]
			if e.dtype != c.dtype || e.stride != nil || !slices.Equal(e.float32s(), want) {
				t.Errorf("%s: %s is %s %v, want %s %v", c.file, e.name, e.dtype, e.float32s(), c.dtype, want)
			}
		}
	}
}

// TestTorchViews reads transposed, sliced and strided tensors of one storage.
func TestTorchViews(t *testing.T) {
	at := func(f func(i, j int) int, rows, cols int) []float32 {
		var v []float32
		for i := range rows {
			for j := range cols {
				v = append(v, float32(f(i, j)))
			}
		}
		return v
	}
	row := func(i, j int) int { return j }
	var half []float32 // (2, 3, 4) permuted to (4, 2, 3)
	for k := range 4 {
		for i := range 2 {
			for j := range 3 {
				half = append(half, float32(12*i+4*j+k))
			}
		}
	}
	want := map[string]struct {
		dtype  dtype
		shape  []int
		values []float32
	}{
		"transposed": {f32, []int{6, 4}, at(func(i, j int) int { return 6*j + i }, 6, 4)},
		"part":       {f32, []int{2, 3}, at(func(i, j int) int { return 6*(i+1) + j + 2 }, 2, 3)},
		"last":       {f32, []int{4}, []float32{20, 21, 22, 23}},
		"scalar":     {f32, []int{}, []float32{7}},
		"steps":      {f32, []int{5}, []float32{1, 6, 11, 16, 21}},
		"parameter":  {f32, []int{2, 3}, at(row, 1, 6)},
		"half":       {f16, []int{4, 2, 3}, half},
		"bfloat":     {bf16, []int{12, 2}, at(func(i, j int) int { return 12*j + i }, 12, 2)},
		"one":        {f32, []int{4, 1}, []float32{3, 9, 15, 21}},
		"empty":      {f32, []int{0, 3}, nil},
		"long":       {"I64", []int{3}, nil},
		"bool":       {"BOOL", []int{2}, nil},
		"double":     {"F64", []int{24}, nil},
	}
	for _, file := range []string{"views.bin", "views-old.bin"} {
		data := readTestdata(t, file)
		entries, err := parseTorch(file, data)
		if err != nil {
			t.Error(err)
			continue
		}
		sound(t, data, entries)
		if len(entries) != len(want) {
			t.Errorf("%s: %d tensors, want %d", file, len(entries), len(want))
		}
		for _, e := range entries {
			w := want[e.name]
			if e.dtype != w.dtype || !slices.Equal(e.shape, w.shape) {
				t.Errorf("%s: %s is %s %v, want %s %v", file, e.name, e.dtype, e.shape, w.dtype, w.shape)
			} else if e.dtype.widens() && !slices.Equal(e.float32s(), w.values) {
				t.Errorf("%s: %s is %v, want %v", file, e.name, e.float32s(), w.values)
			}
		}
	}
}

// TestTorchRefused reads torch files that do not contain a dictionary of tensors, or whose tensors repeat elements.
func TestTorchRefused(t *testing.T) {
	for _, c := range []struct {
		file string
		kind error
		word string
	}{
		{"repeated.bin", ErrFormat, "more elements than its storage"},
		{"nested.bin", ErrFormat, `"decoder" is a dictionary of 1, not a tensor`},
		{"list.bin", ErrFormat, "a list of 1, not a dictionary"},
		{"module.bin", ErrFormat, `class "torch.nn.modules.linear.Linear" has no place`},
		{"script.bin", ErrUnsupported, "TorchScript"},
	} {
		entries, err := parseTorch(c.file, readTestdata(t, c.file))
		refused(t, c.file, err, c.kind, c.word, c.file)
		if entries != nil {
			t.Errorf("%s: tensors and an error", c.file)
		}
	}
}

// TestPickleExecutesNothing checks that pickles that would execute code are errors.
func TestPickleExecutesNothing(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	command := "touch " + victim
	for what, pickle := range map[string]string{
		"os.system":                      op("\x80\x02cos\nsystem\n(", text(command), "tR."),
		"posix.system":                   op("\x80\x02cposix\nsystem\n", text(command), "\x85R."),
		"nt.system":                      op("\x80\x02cnt\nsystem\n", text(command), "\x85R."),
		"builtins.eval":                  op("\x80\x02cbuiltins\neval\n", text("__import__('os').system('"+command+"')"), "\x85R."),
		"__builtin__.exec":               op("\x80\x02c__builtin__\nexec\n", text("import os"), "\x85R."),
		"subprocess.Popen":               op("\x80\x04", text("subprocess"), text("Popen"), "\x93", text(command), "\x85R."),
		"torch.load":                     op("\x80\x02ctorch\nload\n", text(victim), "\x85R."),
		"torch.hub.load":                 op("\x80\x02ctorch.hub\nload\n", text(victim), "\x85R."),
		"torch.storage._load_from_bytes": op("\x80\x02ctorch.storage\n_load_from_bytes\n", text(""), "\x85R."),
	} {
		for layout, data := range map[string][]byte{
			"zip": archive(t, record{"archive/data.pkl", pickle}),
			"old": []byte(oldHead(t) + pickle),
		} {
			_, err := parseTorch("x.bin", data)
			refused(t, what+" in "+layout, err, ErrFormat, `class "`+what+`" has no place`, "x.bin")
		}
	}
	// The unpickler does not support the other instructions that create objects.
	for _, pickle := range []string{"(ios\nsystem\n.", "\x80\x02(cos\nsystem\no.", "\x80\x02}}\x92.", "\x80\x02)\x81.", "\x80\x02\x82\x01.", "\x80\x05\x97."} {
		if _, _, err := unpickle([]byte(pickle), noStorage); err == nil {
			t.Errorf("%q was read", pickle)
		}
	}
	if _, err := os.Stat(victim); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%q was executed: %v", command, err)
	}
}

func noStorage(pyTuple) (*storage, error) { return nil, errors.New("a storage") }

// oldHead returns the part of a file in the older layout that precedes the value.
func oldHead(t testing.TB) string {
	data := string(readTestdata(t, "f16-old.bin"))
	rest := data
	for range 3 {
		_, n, err := unpickle([]byte(rest), noStorage)
		if err != nil {
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	return strings.TrimSuffix(data, rest)
}

func TestBadPickles(t *testing.T) {
	float4 := storageID("FloatStorage", "0", 4)
	for _, c := range []struct{ what, pickle, word string }{
		{"nothing", "", "needs 1 byte, and there are 0"},
		{"no end", "\x80\x02}", "needs 1 byte,"},
		{"no value", "\x80\x02.", "0 values and 0 marks"},
		{"two values", "\x80\x02NN.", "2 values"},
		{"a mark at the end", "\x80\x02N(.", "1 marks"},
		{"later protocol", "\x80\x06}.", "protocol 6"},
		{"unknown instruction", "\x80\x02\xff.", "instruction 0xff"},
		{"too few values", "\x80\x02N\x86.", "2 values and there are 1"},
		{"a mark in between", "\x80\x02NN(N\x86t.", "2 values and there are 1"},
		{"no mark", "\x80\x02t.", "needs a mark"},
		{"top of nothing", "\x80\x02q\x00.", "needs a value"},
		{"never stored", "\x80\x02h\x07.", "value 7 is fetched"},
		{"4 GiB of text", "\x80\x02X\xff\xff\xff\xff.", "needs 4294967295 bytes, and there are 1"},
		{"2^63 bytes of text", "\x80\x04\x8d\x00\x00\x00\x00\x00\x00\x00\x80.", "needs 9223372036854775808 bytes"},
		{"line without end", "\x80\x02ccollections", "a line has no end"},
		{"class of numbers", "\x80\x04K\x01K\x02\x93.", "a class is named by 1 and 2"},
		{"call of no class", op("\x80\x02", text("os.system"), ")R."), `the string "os.system" is called`},
		{"call without tuple", "\x80\x02ccollections\nOrderedDict\nNR.", "is called with None"},
		{"OrderedDict of something", "\x80\x02ccollections\nOrderedDict\nN\x85R.", "a tuple of 1"},
		{"tensor of nothing", "\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "does not suit"},
		{"tensor of no storage", stateDict(tensorOf("N", 0, ")", ")")), "does not suit"},
		{"parameter of no tensor", "\x80\x02ctorch._utils\n_rebuild_parameter\nNNN\x87R.", "does not suit"},
		{"storage called", "\x80\x02ctorch\nFloatStorage\n)R.", "class torch.FloatStorage is called"},
		{"storage type without elements", stateDict(storageID("UntypedStorage", "0", 4)), `class "torch.UntypedStorage"`},
		{"attributes of a number", "\x80\x02K\x05}b.", "are set on 5"},
		{"append to a tuple", "\x80\x02)Na.", "appended to a tuple"},
		{"item of a list", "\x80\x02]NNs.", "set in a list"},
		{"key without value", op("\x80\x02}(", text("a"), "u."), "keys and values, 1 in all"},
		{"key that is no text", "\x80\x02}K\x01Ns.", "a key is 1"},
		{"key twice", op("\x80\x02}(", text("a"), "N", text("a"), "Nu."), `key "a" is set twice`},
		{"list in itself", "\x80\x02]q\x00h\x00ah\x00R.", "a list of 1 is called with a list of 1"},
		{"list in itself is called", "\x80\x02]q\x00h\x00a)R.", "a list of 1 is called"},
		{"persistent id that is text", "\x80\x02U\x01aQ.", "not a tuple"},
		{"persistent id of a module", op("\x80\x02(", text("module"), "NNNNtQ."), "is not a storage's"},
		{"short persistent id", op("\x80\x02(", text("storage"), "tQ."), "a tuple of 1"},
		{"storage of no class", op("\x80\x02(", text("storage"), "N", text("0"), text("cpu"), 4, "tQ."), "a storage of None"},
		{"storage of negative size", stateDict(storageID("FloatStorage", "0", -1)), "-1 elements"},
		{"storage of 2^62 elements", stateDict(storageID("FloatStorage", "0", 1<<62)), "elements"},
		{"storage larger than its record", stateDict(storageID("FloatStorage", "0", 5)), "needs 20 bytes and its record has 16"},
		{"storage smaller than its record", stateDict(storageID("FloatStorage", "0", 3)), "needs 12 bytes"},
		{"storage that is not there", stateDict(storageID("FloatStorage", "../0", 4)), "not in the archive"},
		{"storage of two types", stateDict(op(float4, storageID("HalfStorage", "0", 8), "\x86")), "is both"},
		{"storage alone", stateDict(float4), "a storage of 4 F32, not a tensor"},
		{"beyond the storage", stateDict(tensorOf(float4, 1, tupleOf(4), tupleOf(1))), "beyond a storage of 4"},
		{"offset beyond the storage", stateDict(tensorOf(float4, 1<<61, tupleOf(1), tupleOf(1))), "beyond a storage of 4"},
		{"negative offset", stateDict(tensorOf(float4, -1, tupleOf(2), tupleOf(1))), "offset -1"},
		{"negative size", stateDict(tensorOf(float4, 0, tupleOf(-2), tupleOf(1))), "a tuple of 1"},
		{"negative stride", stateDict(tensorOf(float4, 3, tupleOf(2), tupleOf(-1))), "a tuple of 1"},
		{"size that is text", stateDict(tensorOf(float4, 0, op(text("4"), "\x85"), tupleOf(1))), "a tuple of 1"},
		{"fewer strides than sizes", stateDict(tensorOf(float4, 0, tupleOf(2, 2), tupleOf(2))), "stride a tuple of 1"},
		{"nine dimensions", stateDict(tensorOf(float4, 0, tupleOf(1, 1, 1, 1, 1, 1, 1, 1, 1), tupleOf(1, 1, 1, 1, 1, 1, 1, 1, 1))), "a tuple of 9"},
		{"2^60 elements", stateDict(tensorOf(float4, 0, tupleOf(1<<60), tupleOf(0))), "more elements than its storage of 4"},
		{"product that wraps to 4", stateDict(tensorOf(float4, 0, tupleOf(1<<32, 1<<32+1, 4), tupleOf(0, 0, 0))), "more elements than its storage"},
		{"stride that wraps to 1", stateDict(tensorOf(float4, 0, tupleOf(3, 1), tupleOf(1<<63-1, 1))), "beyond a storage"},
		{"strides whose sum wraps", stateDict(tensorOf(float4, 1<<62, tupleOf(2, 2), tupleOf(1<<62, 1<<62))), "beyond a storage"},
	} {
		data := archive(t, record{"a/data.pkl", c.pickle}, record{"a/data/0", "0123456789abcdef"})
		var entries []entry
		var err error
		n := allocated(func() { entries, err = parseTorch("x.bin", data) })
		refused(t, c.what, err, ErrFormat, c.word, "x.bin")
		if entries != nil || n > 1<<16 {
			t.Errorf("%s: %d tensors, %d bytes allocated", c.what, len(entries), n)
		}
	}
	// A correct file of the same parts is read.
	good := stateDict(tensorOf(float4, 1, tupleOf(3), tupleOf(1)))
	data := archive(t, record{"a/data.pkl", good}, record{"a/data/0", "0123456789abcdef"})
	if e, err := parseTorch("x.bin", data); err != nil || len(e) != 1 || !slices.Equal(e[0].shape, []int{3}) || string(e[0].data) != "456789abcdef" {
		t.Errorf("%v, %v", e, err)
	}
	// The stride of a dimension of size one has no effect.
	one := archive(t, record{"a/data.pkl", stateDict(tensorOf(float4, 0, tupleOf(1, 4), tupleOf(9, 1)))}, record{"a/data/0", "0123456789abcdef"})
	if e, err := parseTorch("x.bin", one); err != nil || len(e) != 1 || e[0].stride != nil {
		t.Errorf("%v, %v", e, err)
	}
	for n := range good {
		if _, _, err := unpickle([]byte(good[:n]), newStorage); err == nil {
			t.Errorf("%d of %d bytes of a pickle were read", n, len(good))
		}
	}
}

func TestPickleNumbers(t *testing.T) {
	for pickle, want := range map[string]any{
		"K\xff.": int64(255), "M\xff\xff.": int64(65535), "J\xff\xff\xff\xff.": int64(-1), "J\x00\x00\x00\x80.": int64(-1 << 31),
		"\x8a\x00.": int64(0), "\x8a\x01\xff.": int64(-1), "\x8a\x02\x00\x80.": int64(-32768), "\x8a\x02\xff\x00.": int64(255),
		"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.": int64(-1 << 63), "\x8a\x09123456789.": pyLong("123456789"),
		"G\x3f\xf8\x00\x00\x00\x00\x00\x00.": 1.5, "\x88.": true, "\x89.": false, "N.": nil,
		"U\x02ab.": "ab", "T\x02\x00\x00\x00ab.": "ab", "X\x02\x00\x00\x00ab.": "ab", "\x8c\x02ab.": "ab",
		"\x8d\x02\x00\x00\x00\x00\x00\x00\x00ab.": "ab", "\x95\x01\x00\x00\x00\x00\x00\x00\x00N.": nil,
	} {
		if v, n, err := unpickle([]byte(pickle+"rest"), noStorage); err != nil || v != want || n != len(pickle) {
			t.Errorf("%q: %v (%T), %d bytes, %v, want %v", pickle, v, v, n, err, want)
		}
	}
	v, _, err := unpickle([]byte("\x80\x02](K\x01(K\x02K\x03tK\x04\x85e\x94Na."), noStorage)
	if list, ok := v.(*pyList); err != nil || !ok || fmt.Sprint(list.items) != "[1 [2 3] [4] <nil>]" {
		t.Errorf("%v, %v", v, err)
	}
}

func TestBadArchives(t *testing.T) {
	pickle := stateDict(tensorOf(storageID("FloatStorage", "0", 4), 0, tupleOf(4), tupleOf(1)))
	float4 := record{"a/data/0", "0123456789abcdef"}
	good := archive(t, record{"a/data.pkl", pickle}, record{"a/byteorder", "little"}, float4)
	if _, err := parseTorch("x", good); err != nil {
		t.Fatal(err)
	}
	var squeezed bytes.Buffer
	w := zip.NewWriter(&squeezed)
	f, err := w.Create("a/data.pkl") // compressed
	if err == nil {
		_, err = f.Write([]byte(pickle))
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what string
		data []byte
		kind error
		word string
	}{
		{"nothing", nil, ErrFormat, "neither a zip archive nor"},
		{"text", []byte("version https://git-lfs.github.com/spec/v1\n"), ErrFormat, "neither a zip archive nor"},
		{"letters of a zip", []byte("PK\x03\x04"), ErrFormat, "zip"},
		{"no pickle", archive(t, float4), ErrFormat, `"/data.pkl" is not in the archive`},
		{"pickle in a deeper folder", archive(t, record{"a/b/data.pkl", pickle}, float4), ErrFormat, "not in the archive"},
		{"two pickles", archive(t, record{"a/data.pkl", pickle}, record{"b/data.pkl", pickle}, float4), ErrFormat, `in "a" and in "b"`},
		{"record twice", archive(t, record{"a/data.pkl", pickle}, float4, float4), ErrFormat, `"a/data/0" is there twice`},
		{"big endian", archive(t, record{"a/data.pkl", pickle}, record{"a/byteorder", "big"}, float4), ErrUnsupported, `byte order "big"`},
		{"compressed", squeezed.Bytes(), ErrFormat, "is compressed"},
		{"program", archive(t, record{"a/data.pkl", pickle}, record{"a/constants.pkl", pickle}), ErrUnsupported, "TorchScript"},
		{"long pickle", archive(t, record{"a/data.pkl", pickle + strings.Repeat(" ", maxPickle)}, float4), ErrFormat, "more than the"},
	} {
		_, err := parseTorch("x.bin", c.data)
		refused(t, c.what, err, c.kind, c.word, "x.bin")
	}
	for n := range good {
		_, err := parseTorch("x.bin", good[:n])
		refused(t, fmt.Sprintf("%d of %d bytes", n, len(good)), err, ErrFormat)
	}
	// Some of the bad files have a local header that points past the end.
	for i := range good {
		bad := slices.Clone(good)
		bad[i] ^= 0x80
		if e, err := parseTorch("x.bin", bad); err == nil {
			sound(t, bad, e)
		}
	}
}

func TestBadOldFiles(t *testing.T) {
	head := oldHead(t)
	id := op("(", text("storage"), "ctorch\nFloatStorage\n", text("7"), text("cpu"), 1, "NtQ")
	value := stateDict(tensorOf(id, 0, tupleOf(1), tupleOf(1)))
	keys := op("\x80\x02]", text("7"), "a.")
	count, one := "\x01\x00\x00\x00\x00\x00\x00\x00", "\x00\x00\x80\x3f"
	good := []byte(head + value + keys + count + one)
	if e, err := parseTorch("x", good); err != nil || len(e) != 1 || e[0].float32s()[0] != 1 {
		t.Fatal(e, err)
	}
	view := strings.Replace(value, "NtQ", op(text("8"), 0, 1, "\x87tQ"), 1)
	for _, c := range []struct {
		what, data string
		kind       error
		word       string
	}{
		{"another number", "\x80\x02\x8a\x0a0123456789.", ErrFormat, "neither a zip archive nor"},
		{"a dictionary for a number", "\x80\x02}.", ErrFormat, "neither a zip archive nor"},
		{"only a number", head[:15], ErrFormat, "version"},
		{"later version", head[:15] + "\x80\x02M\xea\x03.", ErrUnsupported, "version 1002"},
		{"big endian", strings.Replace(head, "little_endianq\x02\x88", "little_endianq\x02\x89", 1) + value, ErrUnsupported, "little-endian"},
		{"no machine", head[:15] + "\x80\x02M\xe9\x03." + "\x80\x02N." + value, ErrUnsupported, "little-endian"},
		{"machine cut short", head[:len(head)-1], ErrFormat, "facts on the machine"},
		{"no value", head, ErrFormat, "value"},
		{"no keys", head + value, ErrFormat, "keys of the storages"},
		{"keys that are no list", head + value + "\x80\x02).", ErrFormat, "the keys of 1 storages are a tuple of 0"},
		{"too few keys", head + value + "\x80\x02].", ErrFormat, "the keys of 1 storages are a list of 0"},
		{"another key", head + value + op("\x80\x02]", text("8"), "a."), ErrFormat, `the string "8" is not the key`},
		{"key that is no text", head + value + "\x80\x02]K\x07a.", ErrFormat, "7 is not the key"},
		{"view of a storage", head + view + keys, ErrFormat, "view of another"},
		{"no count", head + value + keys, ErrFormat, `ends before storage "7"`},
		{"other count", head + value + keys + "\x02" + count[1:] + one + one, ErrFormat, "has 2 elements"},
		{"count of 2^63", head + value + keys + count[:7] + "\x80" + one, ErrFormat, "9223372036854775809 elements"},
		{"too few elements", head + value + keys + count + one[:3], ErrFormat, "a rest of 3 bytes"},
	} {
		_, err := parseTorch("x.bin", []byte(c.data))
		refused(t, c.what, err, c.kind, c.word, "x.bin")
	}
	for n := range good {
		if _, err := parseTorch("x.bin", good[:n]); err == nil {
			t.Errorf("%d of %d bytes were read", n, len(good))
		}
	}
	two := op(tensorOf(id, 0, tupleOf(1), tupleOf(1)), strings.Replace(id, "Float", "Half", 1), "\x86")
	_, err := parseTorch("x.bin", []byte(head+stateDict(two)))
	refused(t, "storage of two types", err, ErrFormat, "is both")
	twice := stateDict(tensorOf(id, 0, tupleOf(1), tupleOf(1)) + strings.Replace(id, "7", "8", 1) + "\x86")
	_, err = parseTorch("x.bin", []byte(head+twice+op("\x80\x02](", text("7"), text("7"), "e.")+count+one))
	refused(t, "key twice", err, ErrFormat, `"7" is not the key of one storage`)
}
