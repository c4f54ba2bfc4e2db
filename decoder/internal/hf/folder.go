package hf

import (
	"errors"
	"io/fs"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/files"

	"gorgonia.org/tensor"
)

const (
	maxConfig = 16 << 20
	maxIndex  = 32 << 20

	maxTensors = 1 << 16 // in a file: 40 times the number of tensors of the largest OPT model
)

// Folder is an open Hugging Face folder. Its methods are safe for concurrent use.
type Folder struct {
	dir     string // folder's name in errors
	in      store
	weights map[string]entry // by canonical name
	copies  []entry          // tensors that are not in the file that the index names for them
	files   []*file
	size    int64 // total bytes of the tensors

	mu     sync.RWMutex // held for reading while a weight is read
	closed bool
}

// Open opens a folder. [Folder.OpenWeights] opens the weight files.
func Open(dir string) (*Folder, error) {
	return openStore(dir, osStore{textStore{files.Dir(dir)}})
}

// OpenFS is like Open, for the root of a file system, such as an embedded one. Each file is read whole, once. name
// stands for the folder in errors.
func OpenFS(name string, fsys fs.FS) (*Folder, error) {
	return openStore(name, fsStore{textStore{files.FS(name, fsys)}, fsys})
}

func openStore(dir string, in store) (*Folder, error) {
	if _, err := in.names(); err != nil {
		return nil, err
	}
	return &Folder{dir: dir, in: in, weights: map[string]entry{}}, nil
}

// Adapter returns the adapter of the folder: a folder of the tensors of adapter_model.safetensors, or of
// adapter_model.bin. It shares the files of f, and is closed apart.
func (f *Folder) Adapter() (a *Folder, err error) {
	a = &Folder{dir: f.dir, in: f.in, weights: map[string]entry{}}
	switch {
	case f.in.exists("adapter_model.safetensors"):
		err = a.add("adapter_model.safetensors", parseSafetensors, nil, 0)
	case f.in.exists("adapter_model.bin"):
		err = a.add("adapter_model.bin", parseTorch, nil, 0)
	default:
		err = fail(ErrMissing, f.dir, "no adapter_model.safetensors or adapter_model.bin")
	}
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// Weights returns the names and the shapes of all tensors, sorted by name.
func (f *Folder) Weights() []Weight {
	all := make([]Weight, 0, len(f.weights))
	for _, name := range slices.Sorted(maps.Keys(f.weights)) {
		all = append(all, Weight{Name: name, Shape: slices.Clone(f.weights[name].shape)})
	}
	return all
}

// OpenWeights maps the weight files, and reads the list of tensors of each file. It reads no weights.
func (f *Folder) OpenWeights() error {
	names, err := f.in.names()
	if err != nil {
		return err
	}
	return f.openWeights(names)
}

// Path returns the path of a file of the folder, for errors.
func (f *Folder) Path(name string) string { return f.in.path(name) }

// Text returns the contents of a text file of the folder, at most 16 MB. It returns nil if there is no such file.
func (f *Folder) Text(name string) ([]byte, error) {
	if !f.in.exists(name) {
		return nil, nil
	}
	return f.in.text(name, maxConfig)
}

// Files returns the names of all files of the folder.
func (f *Folder) Files() ([]string, error) { return f.in.names() }

// openWeights finds the weight files and lists their tensors. names has the names of all files of the folder.
func (f *Folder) openWeights(names []string) error {
	for _, source := range []struct {
		name  string
		parse func(string, []byte) ([]entry, error)
	}{
		{"model.safetensors", parseSafetensors},
		{"pytorch_model.bin", parseTorch},
	} {
		if f.in.exists(source.name) {
			return f.add(source.name, source.parse, nil, 0)
		}
		index := source.name + ".index.json"
		if !f.in.exists(index) {
			continue
		}
		data, err := f.in.text(index, maxIndex)
		if err != nil {
			return err
		}
		shardOf, err := parseIndex(f.in.path(index), data)
		if err != nil {
			return err
		}
		placed := map[string]int{} // number of weights of each shard
		for _, shard := range shardOf {
			placed[shard]++
		}
		shards := slices.Sorted(maps.Keys(placed))
		if err := f.allShards(index, source.name, names, shards); err != nil {
			return err
		}
		for _, shard := range shards {
			if err := f.add(shard, source.parse, shardOf, placed[shard]); err != nil {
				return err
			}
		}
		return nil
	}
	return fail(ErrMissing, f.dir, "no model.safetensors, pytorch_model.bin or index of their shards")
}

// add opens one weight file. index maps names of weights to names of files, and is nil without an index:
//
//   - All weights that the index places in this file must be present.
//   - Weights that the index places in another file are copies.
//   - Tensors outside of the index are accepted, as in transformers.
func (f *Folder) add(name string, parse func(string, []byte) ([]entry, error), index map[string]string, placed int) error {
	file, err := f.in.open(name)
	if err != nil {
		return err
	}
	f.size += int64(len(file.data))
	path := file.path
	f.files = append(f.files, file)
	var entries []entry
	if err := reading(path, func() (err error) {
		if files.IsPointer(file.data) {
			return unread(path, files.ErrPointer)
		}
		entries, err = parse(path, file.data)
		return err
	}); err != nil {
		return err
	}
	if len(entries) > maxTensors {
		return fail(ErrFormat, path, "%d tensors, more than %d", len(entries), maxTensors)
	}
	here := 0 // number of weights that the index places in this file
	for _, e := range entries {
		e.in = file
		switch shard, ok := index[e.name]; {
		case ok && shard != name:
			f.copies = append(f.copies, e)
			continue
		case ok:
			here++
		}
		weight := canonical(e.name)
		if other, ok := f.weights[weight]; ok {
			return fail(ErrFormat, path, "weights %s and %s (%s) are both %s", quote(e.name), quote(other.name), other.file, quote(weight))
		}
		f.weights[weight] = e
	}
	if here == placed {
		return nil
	}
	there := map[string]bool{}
	for _, e := range entries {
		there[e.name] = true
	}
	for weight, shard := range index {
		if shard == name && !there[weight] {
			return fail(ErrMissing, path, "weight %s, which the index places here, is not in this file", quote(weight))
		}
	}
	return nil
}

// Weight is the name and the shape of a weight of a model, and the element types that it may have, as safetensors names them; nil: F32,
// F16 and BF16.
type Weight struct {
	Name  string
	Shape []int
	Types []string
}

// Tie makes a and b one weight. If the folder has only one of them, that weight serves both names. If the folder has
// both, and the two differ, Tie returns an error.
func (f *Folder) Tie(a, b string) error {
	e, hasA := f.entry(a)
	h, hasB := f.entry(b)
	switch {
	case hasA && !hasB:
		f.weights[b] = e
	case hasB && !hasA:
		f.weights[a] = h
	case hasA && hasB:
		same, err := e.same(&h)
		if err != nil || same {
			return err
		}
		return fail(ErrFormat, h.file, "weight %s differs from %s, and tie_word_embeddings of config.json says that they are one: it has to be false for a model that uses both", quote(h.name), quote(e.name))
	}
	return nil
}

// entry returns a tensor by its canonical name. Some published OPT folders also omit the prefix "decoder.".
func (f *Folder) entry(name string) (entry, bool) {
	e, ok := f.weights[name]
	if !ok {
		e, ok = f.weights[strings.TrimPrefix(name, "decoder.")]
	}
	return e, ok
}

// maxViews is the maximum ratio of the total size of the weights to the total size of the files. The ratio is 1 if no
// tensor is a view of another tensor, and at most 2 if the head is the token embedding.
const maxViews = 8

// Check compares the folder's tensors with the weights of a model. All weights must be present, and the folder must not
// have any other tensor.
//
// Several weights may be views of the same bytes. Reading a weight copies it if it is not in row-major order or has
// another type. The total size of the weights is therefore limited to maxViews times that of the files, so that a small
// file cannot use unlimited memory.
func (f *Folder) Check(weights iter.Seq[Weight], tied ...string) error {
	var total int64
	var missing []Weight
	used := map[string]bool{}
	for _, name := range tied {
		used[name] = true
	}
	for w := range weights {
		e, err := f.find(w.Name, w.Shape)
		if errors.Is(err, ErrMissing) {
			if missing = append(missing, w); len(missing) > len(f.weights) { // config.json may claim any number of layers
				break
			}
			continue
		}
		if err != nil {
			return err
		}
		used[w.Name], used[canonical(e.name)] = true, true
		if types := w.Types; types == nil && !e.dtype.widens() || types != nil && !slices.Contains(types, string(e.dtype)) {
			if types == nil {
				types = []string{"F32, F16 or BF16"}
			}
			return fail(ErrUnsupported, e.file, "weight %s is %s, not %s", quote(e.name), e.dtype, strings.Join(types, " or "))
		}
		if total += e.bytes(); total > maxViews*f.size {
			return fail(ErrUnsupported, e.file, "weights up to %s are views of one another: they come to more than %d times the %d bytes of the files", quote(e.name), maxViews, f.size)
		}
	}
	rest, where, err := f.unused(used)
	switch {
	case err != nil:
		return err
	case missing != nil && rest != "": // the weight may have a different name in the folder
		return fail(ErrMissing, f.dir, "weight %s with shape %v is not in the folder, which has %s", quote(missing[0].Name), missing[0].Shape, rest)
	case missing != nil:
		_, err := f.find(missing[0].Name, missing[0].Shape)
		return err
	case rest != "":
		return fail(ErrUnsupported, where, "%s; they would be left out", rest)
	}
	return nil
}

func (f *Folder) find(name string, shape []int) (entry, error) {
	e, ok := f.entry(name)
	if !ok {
		return e, fail(ErrMissing, f.dir, "weight %s with shape %v is not in the folder", quote(name), shape)
	}
	if !slices.Equal(e.shape, shape) {
		return e, fail(ErrShape, e.file, "weight %s has shape %v, not %v", quote(e.name), e.shape, shape)
	}
	return e, nil
}

// Has reports whether the folder has a tensor with the given canonical name. A tied weight counts under both names.
func (f *Folder) Has(name string) bool {
	_, ok := f.entry(name)
	return ok
}

// DType returns the element type of the tensor with the given canonical name: float32, leanattention.Float16 or
// leanattention.BFloat16. It returns false if the folder has no such tensor, or a tensor of another type.
func (f *Folder) DType(name string) (tensor.Dtype, bool) {
	e, _ := f.entry(name)
	t, ok := map[dtype]tensor.Dtype{f32: tensor.Float32, f16: la.Float16, bf16: la.BFloat16}[e.dtype]
	return t, ok
}

// Stored returns the shape of the tensor with the given canonical name, and its element type as safetensors names it; "": the folder has
// no such tensor.
func (f *Folder) Stored(name string) (dtype string, shape []int) {
	e, _ := f.entry(name)
	return string(e.dtype), e.shape
}

// Bytes returns the elements of the tensor with the given canonical name and shape, of any type, as the file has them: in row-major
// order, little endian. The bytes are in dst if it is large enough. Errors are those of Tensor.
func (f *Folder) Bytes(dst []byte, name string, shape []int) ([]byte, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.closed {
		return nil, fail(ErrClosed, f.dir, "weight %s was asked for", quote(name))
	}
	e, err := f.find(name, shape)
	if err != nil {
		return nil, err
	}
	if e.stride != nil {
		return nil, fail(ErrUnsupported, e.file, "weight %s is not in row-major order", quote(e.name))
	}
	data := e.data[:e.bytes()]
	if cap(dst) < len(data) {
		dst = make([]byte, len(data))
	}
	dst = dst[:len(data)]
	if at, mapped := e.in.offset(data); mapped {
		return dst, shares(len(dst), func(from, to int) error { return e.in.readAt(dst[from:to], at+int64(from)) })
	}
	return dst, reading(e.file, func() error {
		copy(dst, data)
		return nil
	})
}

// Tensor returns the tensor with the given canonical name and shape, in its stored type: F32 as float32, F16 as
// leanattention.F16 and BF16 as leanattention.BF16. An empty shape is that of a scalar.
//
// The tensor is a copy, so that a program that changes the file does not change the tensor. The tensor of a folder from
// OpenFS may be in place, and must not be written.
//
// Errors:
//
//   - ErrMissing: the folder does not have the tensor, or the file was cut after OpenWeights.
//   - ErrShape: the tensor has another shape.
//   - ErrUnsupported: the tensor is of another type, or has no elements, which Gorgonia does not support.
//   - ErrClosed: the folder is closed.
func (f *Folder) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	return f.tensor(name, shape, func(e *entry) (any, error) { return e.load() })
}

// Rows is like Tensor, for rows [from, to) of a tensor. Only these rows are read.
func (f *Folder) Rows(name string, shape []int, from, to int) (*tensor.Dense, error) {
	if err := f.rows(name, shape, from, to); err != nil {
		return nil, err
	}
	return f.tensor(name, shape, func(e *entry) (any, error) {
		rows := e.rows(from, to)
		return rows.load()
	})
}

// Each calls do for parts of rows [from, to) of a tensor, from several goroutines. A part is a []float32,
// []leanattention.F16 or []leanattention.BF16 of the elements from index at on, counted from the first of these rows. A part
// is valid until do returns, and must not be written. Errors are those of Tensor, and of do.
func (f *Folder) Each(name string, shape []int, from, to int, do func(at int, part any) error) error {
	if err := f.rows(name, shape, from, to); err != nil {
		return err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	e, err := f.readable(name, shape)
	if err != nil {
		return err
	}
	rows := e.rows(from, to)
	return rows.each(do)
}

func (f *Folder) rows(name string, shape []int, from, to int) error {
	if len(shape) == 0 || from < 0 || from >= to || to > shape[0] {
		return fail(ErrShape, f.dir, "weight %s with shape %v has no rows %d to %d", quote(name), shape, from, to)
	}
	return nil
}

// readable returns a tensor that can be read. f.mu must be held.
func (f *Folder) readable(name string, shape []int) (e entry, err error) {
	if f.closed {
		return e, fail(ErrClosed, f.dir, "weight %s was asked for", quote(name))
	}
	if e, err = f.find(name, shape); err != nil {
		return e, err
	}
	if !e.dtype.widens() {
		return e, fail(ErrUnsupported, e.file, "weight %s is %s, not F32, F16 or BF16", quote(e.name), e.dtype)
	}
	if slices.Contains(shape, 0) {
		return e, fail(ErrUnsupported, e.file, "weight %s has no elements (shape %v)", quote(e.name), shape)
	}
	return e, nil
}

// tensor returns a tensor with the elements that read returns: all elements, or those of some rows.
func (f *Folder) tensor(name string, shape []int, read func(*entry) (any, error)) (*tensor.Dense, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	e, err := f.readable(name, shape)
	if err != nil {
		return nil, err
	}
	data, err := read(&e)
	if err != nil {
		return nil, err
	}
	if len(shape) > 0 {
		row := 1
		for _, n := range shape[1:] {
			row *= n
		}
		shape = slices.Clone(shape)
		shape[0] = reflect.ValueOf(data).Len() / row
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// Close unmaps the files. A second Close does nothing.
func (f *Folder) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	var err error
	for _, file := range f.files {
		if e := file.unmap(); e != nil {
			err = errors.Join(err, fail(ErrFormat, file.path, "%v", e))
		}
	}
	f.files = nil
	return err
}
