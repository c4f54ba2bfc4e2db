package decoder

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"unsafe"

	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/internal/gguf"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/decoder/internal/mapped"
	"gorgonia.org/leanattention/decoder/tokenizer"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// ggufFile is the weights of a GGUF file.
type ggufFile struct {
	file    *gguf.File
	path    string
	weights map[string]*gguf.Tensor // by canonical name
}

// openGGUF opens a GGUF file, and returns its config.json.
func openGGUF(path string) (f *ggufFile, config []byte, err error) {
	file, err := gguf.Open(path)
	if err != nil {
		return nil, nil, err
	}
	f = &ggufFile{file: file, path: path, weights: map[string]*gguf.Tensor{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	fields, err := file.Config()
	if err != nil {
		return nil, nil, err
	}
	if config, err = json.Marshal(fields); err != nil {
		return nil, nil, fmt.Errorf("decoder: %s: %w", path, err)
	}
	weights, err := file.Weights()
	if err != nil {
		return nil, nil, err
	}
	for name, t := range weights {
		f.weights[strings.TrimPrefix(name, "model.")] = t
	}
	return f, config, nil
}

// Check compares the file's tensors with the weights of a model: all of them must be present, and no other. A file has no
// second tensor for a tied weight.
func (f *ggufFile) Check(weights iter.Seq[hf.Weight], _ ...string) error {
	left := maps.Clone(f.weights)
	for w := range weights {
		t := f.weights[w.Name]
		switch {
		case t == nil:
			return fmt.Errorf("decoder: %s: weight %.200q with shape %v: %w", f.path, w.Name, w.Shape, ErrMissing)
		case !slices.Equal(t.Shape(), w.Shape):
			return fmt.Errorf("decoder: %s: tensor %.200q has shape %v, not %v: %w", f.path, t.Name(), t.Shape(), w.Shape, ErrFormat)
		}
		delete(left, w.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(left)) {
		return fmt.Errorf("decoder: %s: %d tensors that the model does not use, such as %.200q: %w", f.path, len(left), left[name].Name(), ErrUnsupported)
	}
	return nil
}

// Tensor returns a weight in its stored type. A type with fewer than 16 bits a number is widened to float16, and to float32
// where a number does not fit float16.
func (f *ggufFile) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	rows := 1
	if len(shape) > 0 {
		rows = shape[0]
	}
	return f.rowsAs(name, tensor.Dtype{}, shape, 0, rows)
}

// rowsAs is Tensor for the rows from to to of a weight, in another type.
func (f *ggufFile) rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error) {
	t := f.weights[name]
	if t == nil || !slices.Equal(t.Shape(), shape) {
		return nil, fmt.Errorf("decoder: %s: weight %.200q with shape %v: %w", f.path, name, shape, ErrMissing)
	}
	if as == (tensor.Dtype{}) {
		as = f.stored(name)
	}
	data, err := widened(t, as, from, to)
	if errors.Is(err, gguf.ErrRange) && t.Type() != gguf.F16 && as == la.Float16 {
		data, err = widened(t, tensor.Float32, from, to)
	}
	if err != nil {
		return nil, err
	}
	part := slices.Clone(shape)
	part[0] = to - from
	return tensor.New(tensor.WithShape(part...), tensor.WithBacking(data)), nil
}

// blocks returns rows of a weight as the file has them.
func (f *ggufFile) blocks(name string, shape []int, from, to int) (*nn.Quantised, error) {
	t := f.weights[name]
	if t == nil || !slices.Equal(t.Shape(), shape) {
		return nil, fmt.Errorf("decoder: %s: weight %.200q with shape %v: %w", f.path, name, shape, ErrMissing)
	}
	if f.blockRow(name) == 0 {
		return nil, nil
	}
	data, err := t.Blocks(from, to)
	if err != nil {
		return nil, err
	}
	return &nn.Quantised{Format: t.Type().String(), Rows: to - from, Columns: shape[1], Data: data}, nil
}

// blockRow returns the bytes of a row of a weight that blocks returns.
func (f *ggufFile) blockRow(name string) int {
	if t := f.weights[name]; t != nil && t.HasBlocks() && slices.Contains(inBlocks, t.Type()) {
		return t.RowBytes()
	}
	return 0
}

// inBlocks are the types that nn.Quantised takes.
var inBlocks = []gguf.Type{gguf.Q8_0, gguf.Q4_0, gguf.Q4_1, gguf.Q5_0, gguf.Q5_1, gguf.Q4_K, gguf.Q5_K, gguf.Q6_K}

func (f *ggufFile) loaded() {}

func (f *ggufFile) hold() (func() error, error) { return f.file.Hold() }

func (f *ggufFile) float32s(dst []float32, name string, shape []int, from, to int) error {
	t := f.weights[name]
	if t == nil || !slices.Equal(t.Shape(), shape) {
		return fmt.Errorf("decoder: %s: weight %.200q with shape %v: %w", f.path, name, shape, ErrMissing)
	}
	return t.Float32(dst, from, to)
}

// stored returns the type that a weight is widened to.
func (f *ggufFile) stored(name string) tensor.Dtype {
	switch f.weights[name].Type() {
	case gguf.F32:
		return tensor.Float32
	case gguf.BF16:
		return la.BFloat16
	}
	return la.Float16
}

// widened returns a copy of the numbers of rows of a tensor, as a slice of a type. A copy stays valid if another program cuts the file. A vector is one row of a file, and its elements are rows
// here.
func widened(t *gguf.Tensor, as tensor.Dtype, from, to int) (data any, err error) {
	columns, begin, end, first := t.Columns(), from, to, 0
	size := (to - from) * columns // of the rows that are decoded
	if len(t.Shape()) == 1 {
		columns, begin, end, first, size = 1, 0, t.Rows(), from, t.Rows()*t.Columns()
	}
	n := (to - from) * columns
	switch as {
	case tensor.Float32:
		dst := fresh[float32](size)
		return dst[first:][:n], t.Float32(dst, begin, end)
	case la.Float16:
		dst := fresh[la.F16](size)
		return dst[first:][:n], t.Float16(as16[uint16](dst), begin, end)
	case la.BFloat16:
		dst := fresh[la.BF16](size)
		return dst[first:][:n], t.BFloat16(as16[uint16](dst), begin, end)
	}
	return nil, fmt.Errorf("elements as %v: %w", as, ErrUnsupported)
}

// fresh returns memory for n numbers of a weight, in pages of 2 MiB if the system has them: a fault for each 4 KiB takes as long as
// decoding.
func fresh[T any](n int) []T {
	x := make([]T, n)
	mapped.LargePages(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), n*int(unsafe.Sizeof(*new(T)))))
	return x
}

// as16 returns the same numbers of 16 bits as another type.
func as16[T, F ~uint16](s []F) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(s))), len(s))
}

// Close closes the file.
func (f *ggufFile) Close() error { return f.file.Close() }

// tokenizer returns the tokenizer of the file's vocabulary.
func (f *ggufFile) tokenizer() (*tokenizer.Tokenizer, error) {
	m := f.file.Metadata()
	const prefix = "tokenizer.ggml."
	g := tokenizer.GGUF{TokenIDs: map[string]int64{}}
	var errs []error
	note := func(err error) { errs = append(errs, err) }
	var err error
	g.Model, err = m.String(prefix + "model")
	note(err)
	g.Tokens, err = m.Strings(prefix + "tokens")
	note(err)
	text := func(key string, to *string) {
		if m.Has(key) {
			*to, err = m.String(key)
			note(err)
		}
	}
	flag := func(key string, to **bool) {
		if m.Has(prefix + key) {
			b, err := m.Bool(prefix + key)
			note(err)
			*to = &b
		}
	}
	text(prefix+"pre", &g.Pre)
	text("general.name", &g.Name)
	flag("add_bos_token", &g.AddBOS)
	flag("add_eos_token", &g.AddEOS)
	flag("add_space_prefix", &g.AddSpacePrefix)
	flag("remove_extra_whitespaces", &g.RemoveExtraWhitespaces)
	if m.Has(prefix + "scores") {
		g.Scores, err = m.Float32s(prefix + "scores")
		note(err)
	}
	if m.Has(prefix + "merges") {
		g.Merges, err = m.Strings(prefix + "merges")
		note(err)
	}
	if m.Has(prefix + "token_type") {
		types, err := m.Ints(prefix + "token_type")
		note(err)
		for _, x := range types {
			g.Types = append(g.Types, int32(x))
		}
	}
	if m.Has(prefix + "precompiled_charsmap") {
		bytes, err := m.Ints(prefix + "precompiled_charsmap")
		note(err)
		for _, x := range bytes {
			g.PrecompiledCharsmap = append(g.PrecompiledCharsmap, byte(x))
		}
	}
	for _, key := range m.Keys() {
		if name, ok := strings.CutPrefix(key, prefix); ok && strings.HasSuffix(name, "_token_id") {
			id, err := m.Int(key)
			note(err)
			g.TokenIDs[name] = int64(id)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	t, err := tokenizer.NewGGUF(g)
	if err != nil {
		return nil, fmt.Errorf("decoder: %s: %w", f.path, err)
	}
	return t, nil
}

// templates returns the chat templates of the file by their names.
func (f *ggufFile) templates() (map[string]string, error) {
	const key = "tokenizer.chat_template"
	m, all := f.file.Metadata(), map[string]string{}
	for _, k := range m.Keys() {
		name, named := strings.CutPrefix(k, key+".")
		switch {
		case k == key:
			name = "default"
		case !named:
			continue
		}
		text, err := m.String(k)
		if err != nil {
			return nil, err
		}
		all[name] = text
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("decoder: %s: metadata key %q: %w", f.path, key, chat.ErrNoTemplate)
	}
	return all, nil
}
