package hf

import (
	"errors"
	"io/fs"
	"maps"
	"slices"
	"sync"

	"gorgonia.org/leanattention/examples/opt/files"

	"gorgonia.org/tensor"
)

const (
	embedding = "decoder.embed_tokens.weight"
	head      = "lm_head.weight"

	maxConfig = 16 << 20
	maxIndex  = 32 << 20

	maxTensors = 1 << 16 // of a file: forty times what the largest OPT has
)

// Folder is an open Hugging Face folder of an OPT model. Its methods may be
// called from several goroutines.
type Folder struct {
	dir     string // for errors
	in      store
	config  Config
	eos     []int
	weights map[string]entry // by canonical name
	copies  []entry          // tensors that the index places in another file
	files   []*file
	size    int64 // bytes of them

	mu     sync.RWMutex // held for reading while a weight is read
	closed bool
}

// Open reads config.json and the tables of contents of the weight files, and
// checks that every weight of [Config.Weights] is there with its shape and in a
// type that Tensor reads. It maps the files and reads no weight, with one
// exception: where config.json ties the head to the token embedding and the
// folder has both, Open compares the two, and two that differ are an error. Where
// the folder has only one of the two, that one serves both names.
//
// A tensor of these files that no weight of the configuration is, and an adapter
// beside them, are errors; see the package documentation.
func Open(dir string) (*Folder, error) {
	return openStore(dir, osStore{textStore{files.Dir(dir)}})
}

// OpenFS is Open for the root folder of a file system, say one that is embedded
// in the program. It reads the files whole, once. name stands for the folder in
// errors.
func OpenFS(name string, fsys fs.FS) (*Folder, error) {
	return openStore(name, fsStore{textStore{files.FS(name, fsys)}, fsys})
}

func openStore(dir string, in store) (*Folder, error) {
	f := &Folder{dir: dir, in: in, weights: map[string]entry{}}
	if err := f.open(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (f *Folder) open() error {
	names, err := f.in.names()
	if err != nil {
		return err
	}
	if err := f.noAdapter(names); err != nil {
		return err
	}
	data, err := f.in.text("config.json", maxConfig)
	if err != nil {
		return err
	}
	if f.config, err = parseConfig(f.in.path("config.json"), data); err != nil {
		return err
	}
	if err := f.generation(data); err != nil {
		return err
	}
	if err := f.openWeights(names); err != nil {
		return err
	}
	if err := f.tie(); err != nil {
		return err
	}
	return f.check()
}

// openWeights finds the weight files and lists what is in them. names are those of
// all files of the folder.
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
		placed := map[string]int{} // weights of each shard
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

// add opens one weight file. With an index (weight name to file name) all weights
// that the index places in this file, so many, must be there, and those that it places in
// another one are copies. Tensors that it does not list are taken, as transformers
// takes them.
func (f *Folder) add(name string, parse func(string, []byte) ([]entry, error), index map[string]string, placed int) error {
	file, err := f.in.open(name)
	if err != nil {
		return err
	}
	f.size += int64(len(file.data))
	path := file.path
	f.files = append(f.files, file)
	if files.IsPointer(file.data) {
		return unread(path, files.ErrPointer)
	}
	entries, err := parse(path, file.data)
	if err != nil {
		return err
	}
	if len(entries) > maxTensors {
		return fail(ErrFormat, path, "%d tensors, more than %d", len(entries), maxTensors)
	}
	here := 0 // weights that the index places here
	for _, e := range entries {
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

// tie settles what the head is; see Open.
func (f *Folder) tie() error {
	if !f.config.TieWordEmbeddings {
		return nil
	}
	e, hasEmbedding := f.weights[embedding]
	h, hasHead := f.weights[head]
	switch {
	case hasEmbedding && !hasHead:
		f.weights[head] = e
	case hasHead && !hasEmbedding:
		f.weights[embedding] = h
	case hasHead && hasEmbedding && !e.same(&h):
		return fail(ErrFormat, h.file, "weight %s differs from %s, and tie_word_embeddings of config.json says that they are one: it has to be false for a model that uses both", quote(h.name), quote(e.name))
	}
	return nil
}

// maxViews is how many times the bytes of the files the weights may come to. Where
// none is a view of another one it is 1, and 2 if the head is the token embedding.
const maxViews = 8

// check compares the folder's weights with those that its config.json describes:
// all of them must be there, and nothing else. Weights may be views of the same bytes. Whoever reads them copies those that are
// not in row-major order or of another type, so a small file could come to any size.
func (f *Folder) check() error {
	var total int64
	var missing []Weight
	used := map[string]bool{head: f.config.TieWordEmbeddings}
	for w := range f.config.Weights() {
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
		used[w.Name] = true
		if !e.dtype.widens() {
			return fail(ErrUnsupported, e.file, "weight %s is %s, not F32, F16 or BF16", quote(e.name), e.dtype)
		}
		if total += e.bytes(); total > maxViews*f.size {
			return fail(ErrUnsupported, e.file, "weights up to %s are views of one another: they come to more than %d times the %d bytes of the files", quote(e.name), maxViews, f.size)
		}
	}
	rest, where := f.unused(used)
	switch {
	case missing != nil && rest != "": // it may be there by another name
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
	e, ok := f.weights[name]
	if !ok {
		return e, fail(ErrMissing, f.dir, "weight %s with shape %v is not in the folder", quote(name), shape)
	}
	if !slices.Equal(e.shape, shape) {
		return e, fail(ErrShape, e.file, "weight %s has shape %v, not %v", quote(e.name), e.shape, shape)
	}
	return e, nil
}

// Config returns the model's configuration.
func (f *Folder) Config() Config { return f.config }

// EOS returns the ids of the tokens that end a text: eos_token_id of
// generation_config.json, and where that has none, or is not there, of config.json.
// It may be empty.
func (f *Folder) EOS() []int { return slices.Clone(f.eos) }

// Names returns the canonical names of all tensors of the folder, sorted.
func (f *Folder) Names() []string { return slices.Sorted(maps.Keys(f.weights)) }

// Has reports whether the folder has a tensor of that canonical name. A tied
// head is there.
func (f *Folder) Has(name string) bool {
	_, ok := f.weights[name]
	return ok
}

// Tensor returns the tensor of that canonical name, which must have that shape,
// in the type that it is stored in: F32 as float32, F16 as leanattention.F16 and
// BF16 as leanattention.BF16. No shape is a scalar. The data is used in place
// where the file is mapped and the data is aligned in it: such a tensor must not
// be written (that ends the process) and ends with Close. Errors are ErrMissing,
// ErrShape, ErrClosed, and ErrUnsupported for other types and for tensors
// without elements, which Gorgonia cannot hold.
func (f *Folder) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	return f.tensor(name, shape, (*entry).stored)
}

// Float32 is Tensor as float32: F16 and BF16 data is widened into new memory.
func (f *Folder) Float32(name string, shape ...int) (*tensor.Dense, error) {
	return f.tensor(name, shape, func(e *entry) any { return e.float32s() })
}

func (f *Folder) tensor(name string, shape []int, read func(*entry) any) (*tensor.Dense, error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.closed {
		return nil, fail(ErrClosed, f.dir, "weight %s was asked for", quote(name))
	}
	e, err := f.find(name, shape)
	if err != nil {
		return nil, err
	}
	if !e.dtype.widens() {
		return nil, fail(ErrUnsupported, e.file, "weight %s is %s, not F32, F16 or BF16", quote(e.name), e.dtype)
	}
	if slices.Contains(shape, 0) {
		return nil, fail(ErrUnsupported, e.file, "weight %s has no elements (shape %v)", quote(e.name), shape)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(read(&e))), nil
}

// Close unmaps the files. Tensors of the folder must not be used
// afterwards: some of them lie in the mapping. Closing twice is harmless.
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
