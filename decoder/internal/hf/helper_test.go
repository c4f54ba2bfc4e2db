package hf

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// readTestdata returns the contents of a file of testdata.
func readTestdata(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// folder writes files into a new folder, and returns the folder's path.
func folder(t testing.TB, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// element returns element i of the n-th weight of testdata, as testdata/make.py defines it.
func element(n, i int) float32 { return float32((31*n+7*i)%255-127) / 8 }

// tiny returns the decoder of testdata: its config.json, its weights sorted by name, and the values of each weight.
func tiny(t testing.TB) (config []byte, weights []Weight, values map[string][]float32) {
	t.Helper()
	config = readTestdata(t, "config.json")
	weights = slices.SortedFunc(slices.Values(optWeights), func(a, b Weight) int { return strings.Compare(a.Name, b.Name) })
	values = map[string][]float32{}
	for n, w := range weights {
		v := make([]float32, size(w.Shape))
		for i := range v {
			v[i] = element(n, i)
		}
		values[w.Name] = v
	}
	return config, weights, values
}

// optWeights are the weights of the decoder of testdata, an OPT with a tied head.
var optWeights = func() (all []Weight) {
	add := func(name string, shape ...int) { all = append(all, Weight{Name: name, Shape: shape}) }
	linear := func(name string, out, in int) {
		add(name+".weight", out, in)
		add(name+".bias", out)
	}
	add(embedding, 11, 4)
	add("decoder.embed_positions.weight", 8, 8)
	add("decoder.project_in.weight", 8, 4)
	add("decoder.project_out.weight", 4, 8)
	const layer = "decoder.layers.0."
	for _, p := range []string{"q_proj", "k_proj", "v_proj", "out_proj"} {
		linear(layer+"self_attn."+p, 8, 8)
	}
	linear(layer+"fc1", 12, 8)
	linear(layer+"fc2", 8, 12)
	for _, n := range []string{"self_attn_layer_norm", "final_layer_norm"} {
		add(layer+n+".weight", 8)
		add(layer+n+".bias", 8)
	}
	return all
}()

const (
	embedding = "decoder.embed_tokens.weight"
	head      = "lm_head.weight"
)

// model is a folder that has the weights of testdata's decoder, and no others.
type model struct {
	*Folder
	tied bool
}

func openModel(dir string) (*model, error) { return checked(Open(dir)) }

func openModelFS(name string, fsys fs.FS) (*model, error) { return checked(OpenFS(name, fsys)) }

// checked ties and checks the weights of a folder, as package decoder does.
func checked(f *Folder, err error) (*model, error) {
	if err != nil {
		return nil, err
	}
	m := &model{f, true}
	weights := optWeights
	data, err := f.Text("config.json")
	if err == nil {
		err = f.OpenWeights()
	}
	if err == nil && strings.Contains(string(data), `"tie_word_embeddings": false`) {
		m.tied, weights = false, append(slices.Clone(weights), Weight{Name: head, Shape: []int{11, 4}})
	}
	if err == nil && m.tied {
		err = f.Tie(embedding, head)
	}
	if err == nil && m.tied {
		err = f.Check(slices.Values(weights), embedding, head)
	} else if err == nil {
		err = f.Check(slices.Values(weights))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return m, nil
}

// Float32 is like Tensor, and converts the elements to float32.
func (m *model) Float32(name string, shape ...int) (*tensor.Dense, error) {
	return m.tensor(name, shape, func(e *entry) (any, error) { return e.float32s(), nil })
}

func size(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

func asF16(f float32) uint16  { return uint16(half.FromFloat32(f)) }
func asBF16(f float32) uint16 { return uint16(half.BFromFloat32(f)) }

// tensorFile collects tensors and writes them as a safetensors file.
type tensorFile struct {
	header map[string]any
	data   []byte
}

func (f *tensorFile) add(name string, d dtype, shape []int, v []float32) {
	begin := len(f.data)
	for _, x := range v {
		switch d {
		case f32:
			f.data = binary.LittleEndian.AppendUint32(f.data, math.Float32bits(x))
		case f16:
			f.data = binary.LittleEndian.AppendUint16(f.data, asF16(x))
		case bf16:
			f.data = binary.LittleEndian.AppendUint16(f.data, asBF16(x))
		default:
			panic("a test writes " + d)
		}
	}
	f.raw(name, d, shape, begin, len(f.data))
}

func (f *tensorFile) raw(name string, d dtype, shape []int, begin, end int) {
	if f.header == nil {
		f.header = map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	}
	f.header[name] = map[string]any{"dtype": d, "shape": append([]int{}, shape...), "data_offsets": [2]int{begin, end}}
}

// bytes returns the file. The data begins skew bytes after a multiple of eight.
func (f *tensorFile) bytes(skew int) []byte {
	header, err := json.Marshal(f.header)
	if err != nil {
		panic(err)
	}
	for len(header)%8 != skew {
		header = append(header, ' ')
	}
	return rawSafetensors(string(header), f.data)
}

func rawSafetensors(header string, data []byte) []byte {
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	return append(append(file, header...), data...)
}

// tinySafetensors returns the decoder of testdata as the contents of a model.safetensors.
func tinySafetensors(t testing.TB, d dtype, prefix string, skew int) []byte {
	_, weights, values := tiny(t)
	var f tensorFile
	for _, w := range weights {
		f.add(prefix+w.Name, d, w.Shape, values[w.Name])
	}
	return f.bytes(skew)
}

// record is one file of an archive.
type record struct {
	name string
	data string
}

// archive returns a zip file of uncompressed records, as torch writes it.
func archive(t testing.TB, records ...record) []byte {
	t.Helper()
	var file bytes.Buffer
	w := zip.NewWriter(&file)
	for _, r := range records {
		f, err := w.CreateHeader(&zip.FileHeader{Name: r.name, Method: zip.Store})
		if err == nil {
			_, err = f.Write([]byte(r.data))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

// refused checks that err is one sentence of this package, wraps kind and contains the words.
func refused(t testing.TB, what string, err, kind error, words ...string) {
	t.Helper()
	switch {
	case err == nil:
		t.Errorf("%s: no error, want %v", what, kind)
	case !errors.Is(err, kind):
		t.Errorf("%s: error %q does not wrap %q", what, err, kind)
	case strings.Contains(err.Error(), "\n") || !strings.HasPrefix(err.Error(), "decoder: "):
		t.Errorf("%s: error %q is not one sentence of this package", what, err)
	default:
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: error %q says nothing of %q", what, err, w)
			}
		}
	}
}

// allocated returns the bytes that f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// sound checks a list of tensors from a parser. Each tensor must lie in the file, have the number of elements of its
// shape, and be readable.
func sound(t testing.TB, data []byte, entries []entry) {
	t.Helper()
	for _, e := range entries {
		n, bytes := size(e.shape), elementBytes[e.dtype]
		if len(e.data) > len(data) || n*bytes > len(data) {
			t.Fatalf("%q: %d elements in %d bytes, of a file of %d", e.name, n, len(e.data), len(data))
		}
		if e.stride == nil && n*bytes != len(e.data) {
			t.Fatalf("%q: shape %v in %d bytes", e.name, e.shape, len(e.data))
		}
		if !e.dtype.widens() {
			continue
		}
		if v := e.float32s(); len(v) != n {
			t.Fatalf("%q: %d values for shape %v", e.name, len(v), e.shape)
		}
	}
}

// op assembles a pickle. Strings are copied. A text or a number becomes an instruction that pushes it.
func op(parts ...any) string {
	var p strings.Builder
	for _, x := range parts {
		switch x := x.(type) {
		case string:
			p.WriteString(x)
		case text:
			fmt.Fprintf(&p, "X%s%s", binary.LittleEndian.AppendUint32(nil, uint32(len(x))), string(x))
		case int64:
			p.WriteString("\x8a\x08")
			p.Write(binary.LittleEndian.AppendUint64(nil, uint64(x)))
		case int:
			p.WriteString(op(int64(x)))
		default:
			panic(fmt.Sprintf("a test assembles %T", x))
		}
	}
	return p.String()
}

// text is a string that an instruction of a pickle pushes.
type text string

// storageID returns instructions that push a storage. tensorOf returns instructions that push a tensor of a storage.
func storageID(class, key string, count int64) string {
	return op("(", text("storage"), "ctorch\n"+class+"\n", text(key), text("cpu"), count, "tQ")
}

func tensorOf(storage string, offset int64, shape, stride string) string {
	return op("ctorch._utils\n_rebuild_tensor_v2\n(", storage, offset, shape, stride, "\x89ccollections\nOrderedDict\n)RtR")
}

// tupleOf returns instructions that push a tuple of integers.
func tupleOf(n ...int64) string {
	p := "("
	for _, x := range n {
		p += op(x)
	}
	return p + "t"
}

// stateDict returns a pickle of a dictionary with one entry.
func stateDict(value string) string { return op("\x80\x02}", text("w"), value, "s.") }

// torchFile returns the file that torch.save writes for a dictionary of float32 tensors.
func torchFile(t testing.TB, weights []Weight, values map[string][]float32) []byte {
	t.Helper()
	pickle, records := "\x80\x02}(", []record{{}}
	for i, w := range weights {
		shape, stride, n := make([]int64, len(w.Shape)), make([]int64, len(w.Shape)), int64(1)
		for d := len(stride) - 1; d >= 0; d-- {
			shape[d], stride[d] = int64(w.Shape[d]), n
			n *= shape[d]
		}
		data := ""
		for _, v := range values[w.Name] {
			data += string(binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)))
		}
		key := fmt.Sprint(i)
		pickle += op(text(w.Name), tensorOf(storageID("FloatStorage", key, n), 0, tupleOf(shape...), tupleOf(stride...)))
		records = append(records, record{"a/data/" + key, data})
	}
	records[0] = record{"a/data.pkl", pickle + "u."}
	return archive(t, records...)
}
