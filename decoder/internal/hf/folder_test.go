package hf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// TestFolder opens the decoder of testdata in each form that a folder can have.
func TestFolder(t *testing.T) {
	config, weights, values := tiny(t)
	forms := map[string]map[string][]byte{
		"old f16.bin":  {"pytorch_model.bin": readTestdata(t, "f16-old.bin")},
		"old bf16.bin": {"pytorch_model.bin": readTestdata(t, "bf16-old.bin")},
		"protocol 4":   {"pytorch_model.bin": readTestdata(t, "protocol4.bin")},
		"shards.bin":   {},
		"both":         {"pytorch_model.bin": []byte("not looked at"), "model.safetensors": tinySafetensors(t, f32, "", 0)},
	}
	for _, name := range []string{"pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"} {
		forms["shards.bin"][name] = readTestdata(t, name)
	}
	for _, d := range []dtype{f32, f16, bf16} {
		forms[string(d)+".bin"] = map[string][]byte{"pytorch_model.bin": readTestdata(t, strings.ToLower(string(d))+".bin")}
		for _, prefix := range []string{"", "model."} {
			for _, skew := range []int{0, 1, 2, 4} {
				forms[fmt.Sprintf("%s safetensors, prefix %q, skew %d", d, prefix, skew)] =
					map[string][]byte{"model.safetensors": tinySafetensors(t, d, prefix, skew)}
			}
		}
		var parts [2]tensorFile
		index := `{"weight_map": {"decoder.attn.bias": "a.safetensors"`
		for i, w := range weights {
			parts[i%2].add(w.Name, d, w.Shape, values[w.Name])
			index += fmt.Sprintf(`, %q: "%c.safetensors"`, w.Name, 'a'+i%2)
		}
		parts[0].add("decoder.attn.bias", f32, []int{1}, []float32{1})
		// b.safetensors also has a copy of a weight of a.safetensors.
		parts[1].add(weights[0].Name, d, weights[0].Shape, values[weights[0].Name])
		forms[string(d)+" shards of safetensors"] = map[string][]byte{
			"model.safetensors.index.json": []byte(index + "}}"), "a.safetensors": parts[0].bytes(0), "b.safetensors": parts[1].bytes(3),
		}
	}
	for form, files := range forms {
		files["config.json"] = config
		f, err := openModel(folder(t, files))
		if err != nil {
			t.Errorf("%s: %v", form, err)
			continue
		}
		if !f.tied {
			t.Errorf("%s: the head is not tied", form)
		}
		for _, w := range weights {
			if !f.Has(w.Name) {
				t.Errorf("%s: %s is not there", form, w.Name)
			}
			x, err := f.Float32(w.Name, w.Shape...)
			if err != nil {
				t.Errorf("%s: %v", form, err)
				continue
			}
			if !x.Shape().Eq(tensor.Shape(w.Shape)) || x.Dtype() != tensor.Float32 || !slices.Equal(x.Data().([]float32), values[w.Name]) {
				t.Errorf("%s: %s is %v %v, want %v %v", form, w.Name, x.Shape(), x.Data(), w.Shape, values[w.Name])
			}
			stored, err := f.Tensor(w.Name, w.Shape...)
			if err != nil {
				t.Errorf("%s: %v", form, err)
				continue
			}
			kind, got := widened(stored)
			e, _ := f.entry(w.Name)
			if kind != e.dtype || !stored.Shape().Eq(tensor.Shape(w.Shape)) || !slices.Equal(got, values[w.Name]) {
				t.Errorf("%s: %s is stored as %v %v %v, want %v %v %v", form, w.Name, kind, stored.Shape(), got, e.dtype, w.Shape, values[w.Name])
			}
		}
		// The folder has no head, so the head is the embedding.
		head, err := f.Float32("lm_head.weight", 11, 4)
		if err != nil || !slices.Equal(head.Data().([]float32), values["decoder.embed_tokens.weight"]) {
			t.Errorf("%s: head %v, %v", form, head, err)
		}
		if err := f.Close(); err != nil {
			t.Errorf("%s: %v", form, err)
		}
	}
}

// widened returns the type of a tensor's elements, and the elements as float32.
func widened(t *tensor.Dense) (dtype, []float32) {
	switch s := t.Data().(type) {
	case []float32:
		return f32, s
	case []la.F16:
		v := make([]float32, len(s))
		half.DecodeFloat16(v, s)
		return f16, v
	case []la.BF16:
		v := make([]float32, len(s))
		half.DecodeBFloat16(v, s)
		return bf16, v
	}
	return "", nil
}

// TestInPlace checks that aligned data in memory is copied only for widening, that each widening copies, and that data in
// files is always copied.
func TestInPlace(t *testing.T) {
	config, _, _ := tiny(t)
	for _, c := range []struct {
		what, file   string
		data         []byte
		same, same32 bool // whether the data of Tensor and Float32 is in place
	}{
		{"F32", "model.safetensors", tinySafetensors(t, f32, "", 0), true, true},
		{"F32 four bytes on", "model.safetensors", tinySafetensors(t, f32, "", 4), true, true},
		{"F32 two bytes on", "model.safetensors", tinySafetensors(t, f32, "", 2), false, false},
		{"F16", "model.safetensors", tinySafetensors(t, f16, "", 0), true, false},
		{"BF16 two bytes on", "model.safetensors", tinySafetensors(t, bf16, "", 2), true, false},
		{"BF16 one byte on", "model.safetensors", tinySafetensors(t, bf16, "", 1), false, false},
		{"F32 of torch", "pytorch_model.bin", readTestdata(t, "f32.bin"), true, true},
		{"F16 of torch", "pytorch_model.bin", readTestdata(t, "f16.bin"), true, false},
	} {
		files := map[string][]byte{"config.json": config, c.file: c.data}
		memory := fstest.MapFS{}
		for name, data := range files {
			memory[name] = &fstest.MapFile{Data: data}
		}
		f, err := openModelFS("memory", memory)
		if err != nil {
			t.Fatal(err)
		}
		same := func(read func(name string, shape ...int) (*tensor.Dense, error)) bool {
			var at [2]uintptr
			var both [2]*tensor.Dense // keeps both tensors alive, so that their memory is not reused
			for i := range at {
				if both[i], err = read("decoder.layers.0.fc1.weight", 12, 8); err != nil {
					t.Fatal(err)
				}
				at[i] = both[i].Uintptr()
			}
			defer runtime.KeepAlive(both)
			return at[0] == at[1]
		}
		if got := same(f.Tensor); got != (c.same && littleEndian) {
			t.Errorf("%s: as stored, in place is %v", c.what, got)
		}
		if got := same(f.Float32); got != (c.same32 && littleEndian) {
			t.Errorf("%s: as float32, in place is %v", c.what, got)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if f, err = openModel(folder(t, files)); err != nil {
			t.Fatal(err)
		}
		if same(f.Tensor) {
			t.Errorf("%s: in place in the file", c.what)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestClose(t *testing.T) {
	config, _, _ := tiny(t)
	f, err := openModel(folder(t, map[string][]byte{"config.json": config, "model.safetensors": tinySafetensors(t, bf16, "", 0)}))
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			for range 50 {
				_, err := f.Float32("decoder.layers.0.fc1.weight", 12, 8)
				_, err2 := f.Tensor("decoder.layers.0.fc1.weight", 12, 8)
				if err := errors.Join(err, err2); err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			}
		})
	}
	for range 2 {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	work.Wait()
	_, err = f.Float32("decoder.layers.0.fc1.weight", 12, 8)
	refused(t, "after Close", err, ErrClosed, "decoder.layers.0.fc1.weight")
}

// TestTied checks the head for each value of tie_word_embeddings, with and without a head in the folder.
func TestTied(t *testing.T) {
	_, weights, values := tiny(t)
	other := slices.Clone(values[embedding])
	other[43]++
	for _, c := range []struct {
		what            string
		tied            bool
		embedding, head []float32
		want            bool // Config().TieWordEmbeddings
		missing         string
	}{
		{"embedding alone", true, values[embedding], nil, true, ""},
		{"head alone", true, nil, values[embedding], true, ""},
		{"both, the same", true, values[embedding], values[embedding], true, ""},
		{"both, and not the same", true, values[embedding], other, false, "lm_head.weight"},
		{"neither", true, nil, nil, false, embedding},
		{"not tied", false, values[embedding], other, false, ""},
		{"not tied and the same", false, values[embedding], values[embedding], false, ""},
		{"not tied, without head", false, values[embedding], nil, false, head},
		{"not tied, without embedding", false, nil, values[embedding], false, embedding},
	} {
		var file tensorFile
		for _, w := range weights {
			if w.Name != embedding {
				file.add(w.Name, f16, w.Shape, values[w.Name])
			}
		}
		if c.embedding != nil {
			file.add("model."+embedding, f16, []int{11, 4}, c.embedding)
		}
		if c.head != nil {
			file.add(head, f16, []int{11, 4}, c.head)
		}
		config := strings.Replace(string(readTestdata(t, "config.json")), "{", fmt.Sprintf(`{"tie_word_embeddings": %v,`, c.tied), 1)
		f, err := openModel(folder(t, map[string][]byte{"config.json": []byte(config), "model.safetensors": file.bytes(0)}))
		if c.missing != "" {
			kind := ErrMissing
			if c.embedding != nil && c.head != nil {
				kind = ErrFormat
			}
			refused(t, c.what, err, kind, c.missing)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if f.tied != c.want {
			t.Errorf("%s: tied is %v", c.what, !c.want)
		}
		for name, want := range map[string][]float32{embedding: c.embedding, head: c.head} {
			if want == nil {
				want = values[embedding]
			}
			if x, err := f.Float32(name, 11, 4); err != nil || !slices.Equal(x.Data().([]float32), want) {
				t.Errorf("%s: %s is %v, %v, want %v", c.what, name, x, err, want)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestTensorRefuses(t *testing.T) {
	config, weights, values := tiny(t)
	var file tensorFile
	for _, w := range weights {
		file.add(w.Name, f32, w.Shape, values[w.Name])
	}
	file.add("0.attn.bias", f32, nil, []float32{3})
	file.add("1.attn.bias", f16, []int{0, 2}, nil)
	file.data = append(file.data, make([]byte, 16)...)
	file.raw("2.attn.bias", "F64", []int{2}, len(file.data)-16, len(file.data))
	f, err := openModel(folder(t, map[string][]byte{"config.json": config, "model.safetensors": file.bytes(0)}))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, c := range []struct {
		name  string
		shape []int
		kind  error
		words []string
	}{
		{"decoder.layers.1.fc1.weight", []int{12, 8}, ErrMissing, []string{"decoder.layers.1.fc1.weight", "[12 8]"}},
		{"layers.0.fc1.weight", []int{12, 8}, ErrMissing, []string{"layers.0.fc1.weight"}},
		{"decoder.layers.0.fc1.weight", []int{8, 12}, ErrShape, []string{"[12 8]", "[8 12]", "model.safetensors"}},
		{"decoder.layers.0.fc1.weight", []int{96}, ErrShape, []string{"[12 8]", "[96]"}},
		{"decoder.layers.0.fc1.weight", nil, ErrShape, []string{"[12 8]", "[]"}},
		{"decoder.layers.0.fc1.weight", []int{-12, -8}, ErrShape, []string{"[-12 -8]"}},
		{"decoder.2.attn.bias", []int{2}, ErrUnsupported, []string{"F64"}},
		{"decoder.1.attn.bias", []int{0, 2}, ErrUnsupported, []string{"no elements", "[0 2]"}},
	} {
		for _, read := range []func(string, ...int) (*tensor.Dense, error){f.Tensor, f.Float32} {
			x, err := read(c.name, c.shape...)
			refused(t, c.name, err, c.kind, c.words...)
			if x != nil {
				t.Errorf("%s: a tensor and an error", c.name)
			}
		}
	}
	if x, err := f.Float32("decoder.0.attn.bias"); err != nil || !x.IsScalar() || x.Data() != any(float32(3)) {
		t.Errorf("scalar %v, %v", x, err)
	}
	if f.Has("decoder.nothing") || !f.Has("decoder.2.attn.bias") {
		t.Error("Has")
	}
}

func TestOpenRefuses(t *testing.T) {
	config, weights, values := tiny(t)
	with := func(change func(*tensorFile)) []byte {
		var file tensorFile
		for _, w := range weights {
			file.add(w.Name, f32, w.Shape, values[w.Name])
		}
		change(&file)
		return file.bytes(0)
	}
	good := with(func(*tensorFile) {})
	last := weights[len(weights)-1].Name
	index := func(shard string) []byte {
		return fmt.Appendf(nil, `{"weight_map": {%q: %q, "other": %q}}`, last, shard, shard)
	}
	type files = map[string][]byte
	for _, c := range []struct {
		what  string
		files files
		kind  error
		words []string
	}{
		{"no weights", files{"config.json": config}, ErrMissing, []string{"no model.safetensors, pytorch_model.bin"}},
		{"empty file", files{"config.json": config, "model.safetensors": nil}, ErrFormat, []string{"model.safetensors", "0 bytes"}},
		{"empty torch file", files{"config.json": config, "pytorch_model.bin": nil}, ErrFormat, []string{"pytorch_model.bin"}},
		{"cut short", files{"config.json": config, "model.safetensors": good[:len(good)-1]}, ErrFormat, []string{"model.safetensors"}},
		{"weight missing", files{"config.json": config, "model.safetensors": with(func(f *tensorFile) {
			f.header["decoder.layers.0.fc1.wheight"] = f.header["decoder.layers.0.fc1.weight"]
			delete(f.header, "decoder.layers.0.fc1.weight")
		})}, ErrMissing, []string{"decoder.layers.0.fc1.weight", "[12 8]", "1 tensor that", `"decoder.layers.0.fc1.wheight"`}},
		{"other shape", files{"config.json": config, "model.safetensors": with(func(f *tensorFile) {
			f.header[embedding].(map[string]any)["shape"] = []int{4, 11}
		})}, ErrShape, []string{"decoder.embed_tokens.weight", "[11 4]", "[4 11]", "model.safetensors"}},
		{"other type", files{"config.json": config, "model.safetensors": with(func(f *tensorFile) {
			f.header[last].(map[string]any)["dtype"] = "I32"
		})}, ErrUnsupported, []string{last, "I32"}},
		{"two names", files{"config.json": config, "model.safetensors": with(func(f *tensorFile) {
			f.add("model."+last, f32, []int{1}, []float32{1})
		})}, ErrFormat, []string{`"` + last + `"`, `"model.` + last + `"`}},
		{"bad index", files{"config.json": config, "model.safetensors.index.json": []byte("{}")}, ErrFormat, []string{"index.json"}},
		{"shard elsewhere", files{"config.json": config, "model.safetensors.index.json": index("../../x")}, ErrFormat, []string{`"../../x"`}},
		{"shard missing", files{"config.json": config, "model.safetensors.index.json": index("a.safetensors")}, ErrMissing, []string{"a.safetensors"}},
		{"weight not in its shard", files{"config.json": config, "model.safetensors.index.json": index("a.safetensors"), "a.safetensors": good},
			ErrMissing, []string{`"other"`, "a.safetensors"}},
		{"shard of pickles missing", files{"config.json": config, "pytorch_model.bin.index.json": index("a.bin")}, ErrMissing, []string{"a.bin"}},
		{"pickle that attacks", files{"config.json": config, "pytorch_model.bin": archive(t, record{"a/data.pkl", "\x80\x02cos\nsystem\n."})},
			ErrFormat, []string{`class "os.system"`, "pytorch_model.bin"}},
	} {
		f, err := openModel(folder(t, c.files))
		refused(t, c.what, err, c.kind, c.words...)
		if f != nil {
			t.Errorf("%s: a folder and an error", c.what)
		}
	}
	if _, err := openModel(filepath.Join(t.TempDir(), "nowhere")); err != nil {
		refused(t, "no folder", err, ErrMissing, "nowhere")
	} else {
		t.Error("a folder that is not there was opened")
	}
	// A folder in place of a file is an error.
	for _, name := range []string{"config.json", "model.safetensors", "model.safetensors.index.json"} {
		dir := folder(t, files{"config.json": config})
		if err := errors.Join(os.RemoveAll(filepath.Join(dir, name)), os.Mkdir(filepath.Join(dir, name), 0o777)); err != nil {
			t.Fatal(err)
		}
		_, err := openModel(dir)
		refused(t, name+" is a folder", err, ErrFormat, name, "not a regular file")
	}
}

// TestLinks opens a folder of links, which the hub's cache has.
func TestLinks(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("links need a privilege there")
	}
	config, _, _ := tiny(t)
	blobs := folder(t, map[string][]byte{"1": config, "2": tinySafetensors(t, f16, "", 0)})
	dir := t.TempDir()
	if err := errors.Join(os.Symlink(filepath.Join(blobs, "1"), filepath.Join(dir, "config.json")),
		os.Symlink(filepath.Join(blobs, "2"), filepath.Join(dir, "model.safetensors"))); err != nil {
		t.Fatal(err)
	}
	f, err := openModel(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(blobs, "2")); err != nil {
		t.Fatal(err)
	}
	_, err = openModel(dir)
	refused(t, "link to nothing", err, ErrMissing, "model.safetensors")
}

// TestOpenMemory checks that opening a folder reads the lists of tensors, and no weights.
func TestOpenMemory(t *testing.T) {
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Skip("files may be read, not mapped")
	}
	config, weights, values := tiny(t)
	var file tensorFile
	for _, w := range weights {
		file.add(w.Name, f16, w.Shape, values[w.Name])
	}
	file.data = append(file.data, make([]byte, 64<<20)...)
	file.raw("attn.bias", f16, []int{32 << 20}, len(file.data)-64<<20, len(file.data))
	dir := folder(t, map[string][]byte{"config.json": config, "model.safetensors": file.bytes(0)})
	n := allocated(func() {
		f, err := openModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	})
	if n > 1<<20 {
		t.Errorf("Open allocated %d bytes", n)
	}
}

// TestBytes: a tensor of any type is read as the file has it, and its type and shape are known.
func TestBytes(t *testing.T) {
	header := `{"a":{"dtype":"I32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[24,28]}}`
	file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	for i := range 28 {
		file = append(file, byte(i+1))
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), file, 0o666); err != nil {
		t.Fatal(err)
	}
	mapped, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	inMemory, err := OpenFS("memory", os.DirFS(dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []*Folder{mapped, inMemory} {
		if err := f.OpenWeights(); err != nil {
			t.Fatal(err)
		}
		if d, shape := f.Stored("a"); d != "I32" || !slices.Equal(shape, []int{2, 3}) {
			t.Errorf("a is %s of %v", d, shape)
		}
		if d, _ := f.Stored("c"); d != "" {
			t.Errorf("c is %s", d)
		}
		buffer := make([]byte, 30)
		for name, c := range map[string]struct {
			shape []int
			want  []byte
		}{"a": {[]int{2, 3}, file[8+len(header):][:24]}, "b": {[]int{4}, file[8+len(header)+24:]}} {
			for _, to := range [][]byte{nil, buffer} {
				got, err := f.Bytes(to, name, c.shape)
				if err != nil || !slices.Equal(got, c.want) || to != nil && &got[0] != &to[0] {
					t.Errorf("%s is %v, %v", name, got, err)
				}
			}
			if _, err := f.Bytes(nil, name, []int{24}); !errors.Is(err, ErrShape) {
				t.Errorf("%s with another shape: %v", name, err)
			}
		}
		one, two := Weight{Name: "a", Shape: []int{2, 3}, Types: []string{"I32", "U32"}}, Weight{Name: "b", Shape: []int{4}, Types: []string{"F8_E4M3"}}
		if err := f.Check(slices.Values([]Weight{one, two})); err != nil {
			t.Error(err)
		}
		two.Types = one.Types
		if err := f.Check(slices.Values([]Weight{one, two})); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "not I32 or U32") {
			t.Error(err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if _, err := f.Bytes(nil, "a", []int{2, 3}); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	}
}
