package hf

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Nothing of what a parser refuses comes back, and nothing that it accepts can
// make a later step go wrong.

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

func FuzzConfig(f *testing.F) {
	f.Add([]byte("{}"))
	f.Add(readTestdata(f, "config.json"))
	f.Add([]byte(`{"hidden_size":1e3,"num_attention_heads":-1,"eos_token_id":[2],"pad_token_id":null,"model_type":"gpt2"}`))
	f.Add([]byte(`{"num_hidden_layers":2147483645,"max_position_embeddings":2147483645,"vocab_size":9223372036854775808}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseConfig("x", data)
		if err != nil {
			if c != (Config{}) {
				t.Fatal("a configuration and an error")
			}
			return
		}
		if c.HeadDim()*c.Heads != c.HiddenSize || c.HeadDim() < 1 || max(c.BOS, c.EOS, c.Pad) >= c.VocabSize || min(c.BOS, c.EOS, c.Pad) < -1 {
			t.Fatalf("%+v", c)
		}
		n := 0
		for w := range c.Weights() {
			for _, d := range w.Shape {
				if d < 1 {
					t.Fatalf("%s has shape %v", w.Name, w.Shape)
				}
			}
			if n++; n == 100 {
				break
			}
		}
	})
}

// FuzzTorch reads whole files; FuzzPickle reads pickles, whose storages are all
// there.
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
