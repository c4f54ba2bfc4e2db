package decoder

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder/chat"
	"gorgonia.org/leanattention/decoder/internal/gguf"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// Model is an open model: its network, its tokenizer and its weights, which stay in the files until an engine needs them.
type Model struct {
	network   Network
	file      string // name of config.json, for errors
	config    []byte // its content
	files     source
	dir       string // the folder; "": a file, or a file system
	tokenizer *tokenizer.Tokenizer
	texts     generation
	deltas    map[string][]delta // of the adapters, by the tensor of the files
	adapters  []func() error     // close the files of the adapters
}

// source is the files of a model.
type source interface {
	Weights
	widener
	// float32s decodes rows of a weight into dst.
	float32s(dst []float32, name string, shape []int, from, to int) error
	// blocks returns rows of a matrix in fewer than 16 bits, as the files have them; nil: the files have them otherwise, or rows are
	// to be changed.
	blocks(name string, shape []int, from, to int) (*nn.Quantised, error)
	// blockRow returns the bytes of a row that blocks returns; 0: it returns nil.
	blockRow(name string) int
	// hold keeps what blocks returned valid until release, also after Close.
	hold() (release func() error, err error)
	// Check compares the tensors of the files with the weights of a model: all of them must be present, and no other. A tied
	// weight may be missing.
	Check(weights iter.Seq[hf.Weight], tied ...string) error
	// loaded lets go of memory that reading needs.
	loaded()
	// stored returns the type that Tensor returns for a weight.
	stored(name string) tensor.Dtype
	Close() error
}

// Open opens a model: a GGUF file, or a Hugging Face folder with config.json, generation_config.json, the weights in safetensors
// or PyTorch's files, quantised by GPTQ, by AWQ, in FP8 or not, and the tokenizer. An adapter that lies beside the weights is merged as by [Model.Adapt]. Open checks that the files have every weight of the network, and no other. Close the
// model after use.
func Open(path string) (*Model, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("decoder: %w: %w", err, ErrMissing)
	}
	if !info.IsDir() {
		return newGGUF(path)
	}
	f, err := hf.Open(path)
	if err != nil {
		return nil, fileError(err)
	}
	m, err := open(folder{f}, func() (*tokenizer.Tokenizer, error) { return tokenizer.Load(path) })
	if err == nil {
		m.dir = path
	}
	return m, err
}

// OpenFS is [Open] for the root folder of a file system, such as an embedded one. name stands for the folder in errors.
func OpenFS(name string, fsys fs.FS) (*Model, error) {
	f, err := hf.OpenFS(name, fsys)
	if err != nil {
		return nil, fileError(err)
	}
	return open(folder{f}, func() (*tokenizer.Tokenizer, error) { return tokenizer.LoadFS(name, fsys) })
}

func newGGUF(path string) (m *Model, err error) {
	f, config, err := openGGUF(path)
	if err != nil {
		return nil, fileError(err)
	}
	m = &Model{files: f}
	defer func() {
		if err != nil {
			err = errors.Join(fileError(err), m.Close())
			m = nil
		}
	}()
	c, err := m.read(path, config)
	if err != nil {
		return m, err
	}
	vocab := m.network.Sizes().Vocab
	if m.texts, err = readGeneration(c, path, nil, vocab); err != nil {
		return m, err
	}
	if m.texts.sampling, err = f.sampling(vocab, m.texts.sampling); err != nil {
		return m, err
	}
	m.tokenizer, err = f.tokenizer()
	return m, err
}

// read reads the network of a config.json, and compares its weights with the files.
func (m *Model) read(file string, data []byte) (c *Config, err error) {
	m.file, m.config = file, data
	if m.network, c, err = readNetwork(file, data, 0); err != nil {
		return nil, err
	}
	var tied []string
	if t, ok := m.network.(*transformer); ok && t.tied {
		tied = []string{t.names.embedding + ".weight", t.names.head + ".weight"}
	}
	if folder, ok := m.files.(folder); ok { // after the configuration: a file of another model needs no other complaint
		if err := folder.OpenWeights(); err != nil {
			return nil, err
		}
		if tied != nil {
			if err := folder.Tie(tied[0], tied[1]); err != nil {
				return nil, err
			}
		}
		if c.packing != nil {
			m.files = newPacked(folder, c.packing)
		}
	}
	return c, m.files.Check(tensors(m.network), tied...)
}

func open(files folder, load func() (*tokenizer.Tokenizer, error)) (m *Model, err error) {
	m = &Model{files: files}
	defer func() {
		if err != nil {
			err = errors.Join(fileError(err), m.Close())
			m = nil
		}
	}()
	names, err := files.Files()
	if err != nil {
		return m, err
	}
	adapted := slices.Contains(names, adapterFile)
	for _, name := range names {
		switch known := name == "adapter_model.safetensors" || name == "adapter_model.bin"; {
		case name == adapterFile || !strings.HasPrefix(name, "adapter_"):
		case !known:
			return m, fmt.Errorf("decoder: %s: a file of an adapter, which would be left out: move it to another folder: %w", files.Path(name), ErrUnsupported)
		case !adapted:
			return m, fmt.Errorf("decoder: %s: the tensors of an adapter without its %s: %w", files.Path(name), adapterFile, ErrMissing)
		}
	}
	const file = "config.json"
	data, err := files.Text(file)
	if err == nil && data == nil {
		if err = fmt.Errorf("decoder: %s: %w", files.Path(file), ErrMissing); adapted {
			err = fmt.Errorf("%w: the folder has an adapter alone: open the model, and add the adapter by Model.Adapt, or by -lora of leanlm", err)
		}
	}
	if err != nil {
		return m, err
	}
	c, err := m.read(files.Path(file), data)
	if err != nil {
		return m, err
	}
	if data, err = files.Text(generationFile); err != nil {
		return m, err
	}
	if m.texts, err = readGeneration(c, files.Path(generationFile), data, m.network.Sizes().Vocab); err != nil {
		return m, err
	}
	if adapted {
		if err := m.adapt(files.Folder); err != nil {
			return m, err
		}
	}
	m.tokenizer, err = load()
	return m, err
}

// tensors yields the tensors of files that have the weights of a network.
func tensors(n Network) iter.Seq[hf.Weight] {
	return func(yield func(hf.Weight) bool) {
		seen := map[string]bool{}
		for w := range n.Weights() {
			name, shape := w.tensor()
			if seen[name] { // several weights are rows of one tensor
				continue
			}
			seen[name] = true
			if !yield(hf.Weight{Name: name, Shape: shape}) {
				return
			}
		}
	}
}

// fileError turns an error of packages hf and gguf into one of this package.
func fileError(err error) error {
	if err == nil {
		return nil
	}
	for _, x := range []struct{ from, to error }{
		{hf.ErrFormat, ErrFormat}, {hf.ErrShape, ErrFormat}, {hf.ErrUnsupported, ErrUnsupported}, {hf.ErrMissing, ErrMissing}, {hf.ErrClosed, ErrClosed},
		{gguf.ErrFormat, ErrFormat}, {gguf.ErrType, ErrFormat}, {gguf.ErrRange, ErrFormat}, {gguf.ErrUnsupported, ErrUnsupported}, {gguf.ErrMissing, ErrMissing}, {gguf.ErrClosed, ErrClosed},
	} {
		if errors.Is(err, x.from) {
			return &translated{err, x.to}
		}
	}
	return err
}

// translated is an error of another package with a kind of this one.
type translated struct {
	error
	kind error
}

func (t *translated) Unwrap() []error { return []error{t.error, t.kind} }

// ids reads a token, or a list of tokens; nil: the field is absent or null.
func (c *Config) ids(name string, vocab int) (ids []int) {
	raw, ok := c.raw(name)
	if !ok || string(raw) == "null" {
		return nil
	}
	if json.Unmarshal(raw, &ids) != nil {
		ids = make([]int, 1)
		if err := json.Unmarshal(raw, &ids[0]); err != nil {
			c.fail(ErrFormat, "%s is %q, neither a token nor a list of tokens", name, short(raw))
			return nil
		}
	}
	for _, id := range ids {
		if id < 0 || id >= vocab {
			c.fail(ErrFormat, "%s has %d, not in [0, %d) of the vocabulary", name, id, vocab)
			return nil
		}
	}
	return ids
}

// Templates returns the chat templates of the model. A model without one is chat.ErrNoTemplate.
func (m *Model) Templates() (*chat.Templates, error) {
	switch {
	case m.dir != "":
		return chat.Open(m.dir, chat.Options{})
	case m.tokenizer == nil:
		return nil, chat.ErrNoTemplate
	}
	f, ok := m.files.(*ggufFile)
	if !ok {
		return nil, chat.ErrNoTemplate
	}
	templates, err := f.templates()
	if err != nil {
		return nil, fileError(err)
	}
	tokens := map[string]string{}
	for name, id := range map[string]int{"bos_token": m.tokenizer.BOS(), "eos_token": m.tokenizer.EOS()} {
		if text, ok := m.tokenizer.Token(id); ok {
			tokens[name] = text
		}
	}
	return chat.New(templates, chat.Options{Tokens: tokens})
}

// ChatEnds returns the tokens that end an answer: those of [Model.Ends], and those that a template writes after an answer.
func (m *Model) ChatEnds(templates *chat.Templates) (ends []int, err error) {
	var special []string
	for id := range m.tokenizer.VocabSize() {
		if text, ok := m.tokenizer.Special(id); ok {
			special = append(special, text)
		}
	}
	names, err := templates.EndTokens(special)
	if err != nil {
		return nil, err
	}
	ends = m.Ends()
	for _, name := range names {
		if id, ok := m.tokenizer.ID(name); ok && !slices.Contains(ends, id) {
			ends = append(ends, id)
		}
	}
	return ends, nil
}

// Network returns the model's network.
func (m *Model) Network() Network { return m.network }

// Weights returns the weights in the files, with the adapters, for a graph of your own, by their names in checkpoints without
// "model.". Vectors are float32. Matrices have the type of the file. The tensors are valid until Close.
func (m *Model) Weights() Weights { return vectors{m.weights()} }

// vectors are weights whose vectors are float32.
type vectors struct{ source }

// blocks has none: a graph may have ops for numbers alone.
func (vectors) blocks(string, []int, int, int) (*nn.Quantised, error) { return nil, nil }
func (vectors) blockRow(string) int                                   { return 0 }

func (w vectors) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	if len(shape) != 1 {
		t, err := w.source.Tensor(name, shape...)
		return t, fileError(err)
	}
	t, err := w.rowsAs(name, tensor.Float32, shape, 0, shape[0])
	return t, fileError(err)
}

// Tokenizer returns the model's tokenizer.
func (m *Model) Tokenizer() *tokenizer.Tokenizer { return m.tokenizer }

// Ends returns the tokens that end a text.
func (m *Model) Ends() []int { return slices.Clone(m.texts.ends) }

// Sampling returns how the model's authors choose tokens: what generation_config.json says, or config.json if there is no such
// file. A request does so if its Sampling is this value. Without do_sample, Temperature is 0. With it, fields that the file does
// not have are those of transformers: TopK is 50. Of a GGUF file, Sampling is what the keys general.sampling.* say, with llama.cpp's
// defaults for absent keys. Without any of these keys, Temperature is 0.
//
// A file that chooses tokens in another way than [Sampling] can say, such as num_beams of 4, is an error of [Open].
func (m *Model) Sampling() Sampling {
	s := m.texts.sampling
	s.Forbidden = slices.Clone(s.Forbidden)
	return s
}

// Engine makes an engine of the model. Close the engine before the model. If the weights do not fit the memory, the error is
// ErrOutOfMemory of package leanattention, before any weight is loaded.
func (m *Model) Engine(o Options) (*Engine, error) {
	sizes := m.network.Sizes()
	if err := o.fill(&sizes); err != nil {
		return nil, err
	}
	n, _, err := readNetwork(m.file, m.config, o.Context)
	if err != nil {
		return nil, err
	}
	if err := o.checkMemory(n, m.weights().blockRow); err != nil {
		return nil, err
	}
	e, err := newEngine(n, m.weights(), m, o)
	return e, fileError(err)
}

// Close closes the files.
func (m *Model) Close() error {
	err := m.files.Close()
	for _, f := range m.adapters {
		err = errors.Join(err, f())
	}
	m.adapters = nil
	return err
}
