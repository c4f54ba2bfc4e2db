package hf

import (
	"archive/zip"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

// The fuzz targets check that a parser returns no value with an error, and that later steps work on every value without
// an error.

func FuzzSafetensorsHeader(f *testing.F) {
	f.Add([]byte("{}"), []byte{})
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}} `), make([]byte, 10))
	f.Add([]byte(`{"__metadata__":{"format":"pt"},"a":{"dtype":"F16","shape":[0,3],"data_offsets":[0,0]}}`), []byte{})
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,8]}}`), make([]byte, 8))
	f.Add([]byte(`{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,18446744073709551615]}}`), []byte{})
	f.Add([]byte(`{"a":{"dtype":"F32","shape":[-1],"data_offsets":[8,0]},"a":[`), make([]byte, 8))
	whole := tinySafetensors(f, f16, "model.", 0)
	f.Add(whole[8:], whole[:0])
	f.Fuzz(func(t *testing.T, header, data []byte) {
		for _, file := range [][]byte{rawSafetensors(string(header), data), header} {
			if entries, err := parseSafetensors("x", file); err == nil {
				sound(t, file, entries)
			} else if entries != nil {
				t.Fatal("tensors and an error")
			}
		}
	})
}

func FuzzIndex(f *testing.F) {
	for _, s := range []string{
		`{"metadata":{"total_size":1},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}`,
		`{"weight_map":{"a":"../../x"}}`, `{"weight_map":{"a":"/etc/passwd"}}`, `{"weight_map":{"a":"a/../b","":""}}`, `{"weight_map":{"a":"C:\\x"}}`, `{"weight_map":[`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		index, err := parseIndex("x", data)
		if err != nil {
			return
		}
		for name, shard := range index {
			if path := filepath.Join("dir", shard); filepath.Dir(path) != "dir" || filepath.Base(path) != shard || strings.ContainsRune(shard, os.PathSeparator) {
				t.Fatalf("shard %q is not a file of the folder", shard)
			}
			if c := canonical(name); canonical(c) != c {
				t.Fatalf("name %q becomes %q and then %q", name, c, canonical(c))
			}
		}
	})
}

// TestBounds checks that reading a file takes memory and time proportional to the file's size, for any contents.
func TestBounds(t *testing.T) {
	const size = 1 << 19
	config := readTestdata(t, "config.json")
	repeat := func(item string) string { return strings.TrimSuffix(strings.Repeat(item, size/len(item)), ",") }
	numbered := func(format string) string {
		var b strings.Builder
		for i := 0; b.Len() < size; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	index := func(s string) map[string]string {
		return map[string]string{"config.json": string(config), "model.safetensors.index.json": s, "a": string(rawSafetensors("{}", nil))}
	}
	safetensors := func(header string) map[string]string {
		return map[string]string{"config.json": string(config), "model.safetensors": string(rawSafetensors(header, nil))}
	}
	pickle := func(s string) map[string]string {
		return map[string]string{"config.json": string(config), "pytorch_model.bin": string(archive(t, record{"a/data.pkl", s}, record{"a/data/0", "0123456789abcdef"}))}
	}
	many := make([]record, 10000)
	for i := range many {
		many[i].name = fmt.Sprint(i)
	}
	view := tensorOf(storageID("FloatStorage", "0", 4), 0, tupleOf(4), tupleOf(1)) + "q\x00"
	views := func() string {
		var b strings.Builder
		for i := range maxTensors {
			b.WriteString(op("\x8c\x05", fmt.Sprintf("%05d", i%100000), "h\x00"))
		}
		return b.String()
	}
	for what, files := range map[string]map[string]string{
		"an index of many weights":        index(`{"weight_map":{` + numbered(`"%d":"a",`) + "}}"),
		"an index of many shards":         index(`{"weight_map":{` + numbered(`"%d":"a",`) + "," + numbered(`"x%[1]d":"x%[1]d",`) + "}}"),
		"a deep index":                    index(`{"weight_map":` + repeat(`{"a":`)),
		"a header of many tensors":        safetensors("{" + numbered(`"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},`) + "}"),
		"a header of many dimensions":     safetensors(`{"a":{"dtype":"U8","shape":[` + repeat("0,") + `],"data_offsets":[0,0]}}`),
		"a header of a deep value":        safetensors(`{"a":` + repeat("[")),
		"a header of many metadata":       safetensors(`{"__metadata__":{` + numbered(`"%d":"",`) + "}}"),
		"a pickle of empty values":        pickle("\x80\x02(" + repeat(")") + "t."),
		"a pickle of marks":               pickle("\x80\x02" + repeat("(")),
		"a pickle of tuples in tuples":    pickle("\x80\x02)" + repeat("\x85") + "."),
		"a pickle of tuples that double":  pickle("\x80\x02)" + repeat("q\x00h\x00\x86") + "."),
		"a pickle of lists in themselves": pickle("\x80\x02]q\x00" + repeat("h\x00a") + "."),
		"a pickle that remembers":         pickle("\x80\x04N" + repeat("\x94") + "."),
		"many names for one tensor":       pickle("\x80\x02}(X\x01\x00\x00\x00a" + view + views() + "u."),
		"an archive of many records":      {"config.json": string(config), "pytorch_model.bin": string(archive(t, many...))},
	} {
		total, dir := 0, fstest.MapFS{}
		for name, text := range files {
			dir[name] = &fstest.MapFile{Data: []byte(text)}
			total += len(text)
		}
		began := time.Now()
		var err error
		bytes := allocated(func() { _, err = openModelFS("x", dir) })
		if took := time.Since(began); err == nil || len(err.Error()) > 3000 || bytes > uint64(80*total)+64<<20 || took > 20*time.Second {
			t.Errorf("%s, %d KB: %d KB allocated in %v: %.3000v", what, total>>10, bytes>>10, took, err)
		} else {
			t.Logf("%s, %d KB: %d KB allocated in %v: %.200v", what, total>>10, bytes>>10, took, err)
		}
	}
}

// TestDirectory checks that the size of an archive's directory is bounded, and that the size of its records is not.
func TestDirectory(t *testing.T) {
	var file bytes.Buffer
	w := zip.NewWriter(&file)
	comment := strings.Repeat("x", 60000)
	for i := range maxDirectory/60000 + 1 {
		if _, err := w.CreateRaw(&zip.FileHeader{Name: fmt.Sprint(i), Comment: comment}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := parseTorch("x.bin", file.Bytes())
	refused(t, "a long directory", err, ErrFormat, "directory has more than 16777216 bytes")
	good := archive(t, record{"a/data.pkl", stateDict(tensorOf(storageID("FloatStorage", "0", 4<<20), 0, tupleOf(4<<20), tupleOf(1)))}, record{"a/data/0", strings.Repeat("0123456789abcdef", 1<<20)})
	if e, err := parseTorch("x", good); err != nil || len(e) != 1 || len(e[0].data) != 16<<20 {
		t.Errorf("a long record: %d tensors, %v", len(e), err)
	}
}

// FuzzTorch reads whole files. FuzzPickle reads pickles for which all storages exist.
func FuzzTorch(f *testing.F) {
	files, err := filepath.Glob("testdata/*.bin")
	if err != nil || len(files) < 10 {
		f.Fatal(files, err)
	}
	for _, name := range files {
		f.Add(readTestdata(f, filepath.Base(name)))
	}
	f.Add(archive(f, record{"a/data.pkl", "\x80\x02cos\nsystem\n."}))
	f.Fuzz(func(t *testing.T, data []byte) {
		if entries, err := parseTorch("x", data); err == nil {
			sound(t, data, entries)
		} else if entries != nil {
			t.Fatal("tensors and an error")
		}
	})
}

func FuzzPickle(f *testing.F) {
	float4 := storageID("FloatStorage", "0", 4)
	for _, p := range []string{
		stateDict(tensorOf(float4, 1, tupleOf(3), tupleOf(1))),
		stateDict(tensorOf(float4, 0, tupleOf(2, 2), tupleOf(1, 2))),
		stateDict(tensorOf(float4, 0, tupleOf(1<<60), tupleOf(0))),
		stateDict("ctorch._utils\n_rebuild_parameter\n(" + tensorOf(float4, 0, ")", ")") + "\x89NtR"),
		op("\x80\x02cos\nsystem\n(", text("true"), "tR."),
		"\x80\x02](K\x01(K\x02K\x03tK\x04\x85e\x94Na.",
		"\x80\x02]q\x00h\x00ah\x00R.",
		"\x80\x04\x8d\x00\x00\x00\x00\x00\x00\x00\x80.",
	} {
		f.Add([]byte(p))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<16 {
			return
		}
		held := make([]byte, 64)
		value, n, err := unpickle(data, func(id pyTuple) (*storage, error) {
			s, err := newStorage(id)
			if err == nil {
				s.count = min(s.count, len(held)/elementBytes[s.dtype])
				s.data = held[:s.bytes()]
			}
			return s, err
		})
		if err != nil {
			return
		}
		if n < 1 || n > len(data) {
			t.Fatalf("a pickle of %d bytes in %d", n, len(data))
		}
		_ = describe(value)
		dict, _ := value.(pyDict)
		for _, x := range dict {
			if v, ok := x.(*view); ok {
				if e, err := v.entry(); err == nil {
					sound(t, held, []entry{e})
				}
			}
		}
	})
}
