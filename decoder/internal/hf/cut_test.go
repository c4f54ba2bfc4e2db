package hf

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// cut truncates a file of a folder. Other systems than Linux do not cut mapped files.
func cut(t *testing.T, dir, name string, to int64) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("only Linux cuts a mapped file")
	}
	if err := os.Truncate(filepath.Join(dir, name), to); err != nil {
		t.Fatal(err)
	}
}

// TestCut checks that a mapped file that is cut is an error of every later read, and that tensors that were read before
// keep their elements.
func TestCut(t *testing.T) {
	config, weights, values := tiny(t)
	plain := tinySafetensors(t, f32, "", 0)
	for name, data := range map[string][]byte{
		"model.safetensors": plain,
		"pytorch_model.bin": torchFile(t, weights, values),
	} {
		dir := folder(t, map[string][]byte{"config.json": config, name: data})
		f, err := openModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		w := weights[0]
		before, err := f.Tensor(w.Name, w.Shape...)
		if err != nil {
			t.Fatal(err)
		}
		cut(t, dir, name, 0)
		if !slices.Equal(before.Float32s(), values[w.Name]) {
			t.Errorf("%s: a tensor changed with its file", name)
		}
		_, err = f.Tensor(w.Name, w.Shape...)
		refused(t, name, err, ErrMissing, name, "cut")
		_, err = f.Rows(w.Name, w.Shape, 1, 2)
		refused(t, name+", rows", err, ErrMissing, name, "cut")
		refused(t, name+", parts", f.Each(w.Name, w.Shape, 0, 1, func(int, any) error { return nil }), ErrMissing, name, "cut")
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestCutCopies checks the comparison of two tensors in a file that is cut, and the list of tensors of such a file.
func TestCutCopies(t *testing.T) {
	_, weights, values := tiny(t)
	long := slices.Repeat([]float32{1}, 1<<15) // 128 KB: the cut page is in the tensor
	var f tensorFile
	for _, w := range weights {
		f.add(w.Name, f32, w.Shape, values[w.Name])
	}
	f.add("a", f32, []int{1 << 15}, long)
	f.add("b", f32, []int{1 << 15}, long)
	dir := folder(t, map[string][]byte{"model.safetensors": f.bytes(0)})
	open, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := open.OpenWeights(); err != nil {
		t.Fatal(err)
	}
	if err := open.Tie("a", "b"); err != nil {
		t.Fatal(err)
	}
	file := open.files[0]
	cut(t, dir, "model.safetensors", 0)
	refused(t, "two tensors", open.Tie("a", "b"), ErrMissing, "cut")
	err = reading(file.path, func() error {
		_, err := parseSafetensors(file.path, file.data)
		return err
	})
	refused(t, "the header", err, ErrMissing, "cut")
}

// TestRows checks parts of tensors of all types and forms against the whole tensors.
func TestRows(t *testing.T) {
	config, weights, values := tiny(t)
	files := map[string]map[string][]byte{"torch": {"pytorch_model.bin": torchFile(t, weights, values)}}
	for _, d := range []dtype{f32, f16, bf16} {
		files[string(d)] = map[string][]byte{"model.safetensors": tinySafetensors(t, d, "", 1)}
	}
	for form, files := range files {
		files["config.json"] = config
		f, err := openModel(folder(t, files))
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range weights {
			whole, err := f.Float32(w.Name, w.Shape...)
			if err != nil {
				t.Fatal(err)
			}
			row := size(w.Shape[1:])
			for from := range w.Shape[0] {
				for to := from + 1; to <= w.Shape[0]; to++ {
					part, err := f.Rows(w.Name, w.Shape, from, to)
					if err != nil {
						t.Fatal(err)
					}
					if n := part.Shape()[0]; n != to-from || !slices.Equal(part.Shape()[1:], tensor.Shape(w.Shape[1:])) {
						t.Fatalf("%s: rows %d to %d of %s have shape %v", form, from, to, w.Name, part.Shape())
					}
					if !slices.Equal(wide(part.Data()), whole.Float32s()[from*row:to*row]) {
						t.Fatalf("%s: rows %d to %d of %s: %v", form, from, to, w.Name, part.Data())
					}
					parts := make([]float32, (to-from)*row)
					if err := f.Each(w.Name, w.Shape, from, to, func(at int, part any) error {
						copy(parts[at:], wide(part))
						return nil
					}); err != nil || !slices.Equal(parts, whole.Float32s()[from*row:to*row]) {
						t.Fatalf("%s: parts of rows %d to %d of %s: %v, error %v", form, from, to, w.Name, parts, err)
					}
				}
			}
			for _, bad := range [][2]int{{-1, 1}, {1, 1}, {2, 1}, {0, w.Shape[0] + 1}} {
				_, err := f.Rows(w.Name, w.Shape, bad[0], bad[1])
				refused(t, form, err, ErrShape, w.Name)
				refused(t, form, f.Each(w.Name, w.Shape, bad[0], bad[1], nil), ErrShape, w.Name)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	strided, err := parseTorch("x", readTestdata(t, "views.bin"))
	if err != nil {
		t.Fatal(err)
	}
	some := 0
	for _, e := range strided {
		if !e.dtype.widens() || len(e.shape) == 0 || slices.Contains(e.shape, 0) {
			continue
		}
		whole, row := e.float32s(), size(e.shape[1:])
		for from := range e.shape[0] {
			for to := from + 1; to <= e.shape[0]; to++ {
				part := e.rows(from, to)
				if got, err := part.load(); err != nil || !slices.Equal(wide(got), whole[from*row:to*row]) {
					t.Errorf("%s, stride %v: rows %d to %d are %v, error %v", e.name, e.stride, from, to, got, err)
				}
				if e.stride != nil {
					some++
				}
			}
		}
	}
	if some == 0 {
		t.Error("no strided tensor")
	}
}

// wide returns elements as float32.
func wide(data any) (all []float32) {
	switch s := data.(type) {
	case []float32:
		return s
	case []la.F16:
		for _, x := range s {
			all = append(all, x.Float32())
		}
	case []la.BF16:
		for _, x := range s {
			all = append(all, x.Float32())
		}
	}
	return all
}

// TestEach checks the parts of a tensor that several goroutines read, and that an error of one ends the others.
func TestEach(t *testing.T) {
	const rows, columns = 300, 5003 // some parts, which end within rows
	data := make([]float32, rows*columns)
	for i := range data {
		data[i] = float32(i % 2039)
	}
	for _, d := range []dtype{f32, f16, bf16} {
		var file tensorFile
		if d == bf16 {
			for i := range data {
				data[i] = float32(i % 251)
			}
		}
		file.add("w", d, []int{rows, columns}, data)
		f, err := Open(folder(t, map[string][]byte{"model.safetensors": file.bytes(2)}))
		if err == nil {
			err = f.OpenWeights()
		}
		if err != nil {
			t.Fatal(err)
		}
		const from, to = 7, 299
		got := make([]float32, (to-from)*columns)
		var mu sync.Mutex
		parts := 0
		if err := f.Each("w", []int{rows, columns}, from, to, func(at int, part any) error {
			n := copy(got[at:], wide(part))
			mu.Lock()
			defer mu.Unlock()
			if parts++; n == 0 {
				return errors.New("an empty part")
			}
			return nil
		}); err != nil || parts < 2 || !slices.Equal(got, data[from*columns:to*columns]) {
			t.Errorf("%s: %d parts, error %v", d, parts, err)
		}
		own := errors.New("own")
		if err := f.Each("w", []int{rows, columns}, from, to, func(int, any) error { return own }); err != own {
			t.Errorf("%s: error %v", d, err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		refused(t, "after Close", f.Each("w", []int{rows, columns}, from, to, nil), ErrClosed, "w")
	}
}
