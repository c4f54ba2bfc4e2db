package decoder

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"

	"gorgonia.org/leanattention/decoder/internal/gguf"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/nn"

	blasimpl "gonum.org/v1/gonum/blas/gonum"
	"gorgonia.org/tensor"
)

// Adapt merges a LoRA adapter into the weights of the engines that are made after Adapt. path is a folder of Hugging Face's peft,
// with adapter_config.json and the tensors in adapter_model.safetensors or adapter_model.bin, or a GGUF file with an adapter.
// Several adapters are added up. [Open] itself merges an adapter that lies beside the weights of a folder.
//
// A weight W of shape (out, in) becomes W + s B A, in float32, and is rounded once to the type of the engine's weights. The scale
// s is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
//
// Errors:
//
//   - ErrUnsupported: an adapter that is not LoRA of linear layers alone, such as one with use_dora, biases or whole modules; a
//     field of adapter_config.json that is not known; a tensor that no weight of the network takes.
//   - ErrFormat: tensors whose shapes do not fit each other, the configuration or the network.
//   - ErrMissing: no such file, or a pair with one tensor.
//
// Adapt must not be called while an engine is made.
func (m *Model) Adapt(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("decoder: %w: %w", err, ErrMissing)
	}
	if !info.IsDir() {
		return fileError(m.adaptGGUF(path))
	}
	f, err := hf.Open(path)
	if err != nil {
		return fileError(err)
	}
	return fileError(m.adapt(f))
}

// delta is what an adapter adds to a tensor: scale * B A.
type delta struct {
	scale float32
	rank  int
	// a and b read rows of A, of shape (rank, in), and of B, of shape (out, rank).
	a, b func(from, to int) ([]float32, error)
}

// factor is one of the two tensors of a delta.
type factor struct {
	name  string
	shape []int
	read  func(from, to int) ([]float32, error)
}

// adapt adds the adapter of a folder.
func (m *Model) adapt(from *hf.Folder) error {
	data, err := from.Text(adapterFile)
	if err == nil && data == nil {
		err = fmt.Errorf("decoder: %s: %w", from.Path(adapterFile), ErrMissing)
	}
	if err != nil {
		return err
	}
	config, err := readAdapterConfig(from.Path(adapterFile), data)
	if err != nil {
		return err
	}
	adapter, err := from.Adapter()
	if err != nil {
		return err
	}
	f := folder{adapter}
	factors := map[string]*[2]factor{} // by module
	var rest []string
	for _, w := range f.Weights() {
		module, i := "", -1
		if name, ok := strings.CutPrefix(w.Name, "base_model.model."); ok {
			for k, suffix := range []string{".lora_A.weight", ".lora_B.weight"} {
				if s, ok := strings.CutSuffix(name, suffix); ok {
					module, i = s, k
				}
			}
		}
		if i < 0 {
			rest = append(rest, w.Name)
			continue
		}
		if factors[module] == nil {
			factors[module] = new([2]factor)
		}
		factors[module][i] = factor{w.Name, w.Shape, func(from, to int) ([]float32, error) { return f.floats(w, from, to) }}
	}
	if n := config.work(); n > mostWork/max(1, len(factors)) {
		return errors.Join(fmt.Errorf("decoder: %s: regular expressions of %d bytes for %d modules: list the modules: %w", config.file, n, len(factors), ErrUnsupported), f.Close())
	}
	deltas, err := m.deltasOf(from.Path(""), factors, rest, func(module string) string {
		return strings.TrimPrefix(module, "model.") + ".weight"
	}, func(module string, rank int) (float64, error) {
		if !config.targeted(module) {
			return 0, fmt.Errorf("decoder: %s: the file has tensors of module %.200q, which target_modules, exclude_modules and layers_to_transform leave out: %w", config.file, module, ErrFormat)
		}
		return config.scale(module, rank)
	})
	if err != nil {
		return errors.Join(err, f.Close())
	}
	m.addDeltas(deltas, f.Close)
	return nil
}

// deltasOf returns the deltas of the tensors of an adapter, by the tensor of the model's files. rest has the names of tensors that are
// no factor of a delta. weight returns the name of a module's weight.
func (m *Model) deltasOf(path string, factors map[string]*[2]factor, rest []string, weight func(module string) string, scale func(module string, rank int) (float64, error)) (map[string]delta, error) {
	fail := func(kind error, format string, args ...any) error {
		return fmt.Errorf("decoder: %s: %s: %w", path, fmt.Sprintf(format, args...), kind)
	}
	if len(factors)+len(rest) == 0 {
		return nil, fail(ErrFormat, "an adapter without tensors")
	}
	shapes := map[string][]int{}
	for w := range tensors(m.network) {
		shapes[w.Name] = w.Shape
	}
	embeddings, tied := []string(nil), ""
	if t, ok := m.network.(*transformer); ok {
		embeddings = []string{t.names.embedding + ".weight", t.names.positions + ".weight"}
		if t.tied {
			tied = t.names.head + ".weight"
		}
	}
	for _, module := range slices.Sorted(maps.Keys(factors)) {
		name := weight(module)
		if name == tied {
			return nil, fail(ErrUnsupported, "an adapter of the head, which is the token embedding (tie_word_embeddings): %s", mergeFirst)
		}
		if len(shapes[name]) != 2 || slices.Contains(embeddings, name) {
			for _, h := range factors[module] {
				if h.name != "" {
					rest = append(rest, h.name)
				}
			}
		}
	}
	if n := len(rest); n > 0 {
		slices.Sort(rest)
		names := make([]string, 0, 8)
		for _, name := range rest[:min(n, 8)] {
			names = append(names, fmt.Sprintf("%.200q", name))
		}
		list := strings.Join(names, ", ")
		if n > 8 {
			list += fmt.Sprintf(" and %d more", n-8)
		}
		return nil, fail(ErrUnsupported, "%d tensors of the adapter that no linear layer of the model takes: %s: the adapter may be another model's; an adapter of embeddings, biases or whole modules has to be merged first", n, list)
	}
	deltas := map[string]delta{}
	for _, module := range slices.Sorted(maps.Keys(factors)) {
		a, b, w := factors[module][0], factors[module][1], shapes[weight(module)]
		switch {
		case a.name == "" || b.name == "":
			return nil, fail(ErrMissing, "tensor %.200q has no partner", a.name+b.name)
		case len(a.shape) != 2 || len(b.shape) != 2 || a.shape[0] != b.shape[1] || a.shape[0] < 1 || b.shape[0] != w[0] || a.shape[1] != w[1]:
			return nil, fail(ErrFormat, "tensors %.200q and %.200q have shapes %.80v and %.80v; (r, %d) and (%d, r) fit the weight's %v", a.name, b.name, fmt.Sprint(a.shape), fmt.Sprint(b.shape), w[1], w[0], w)
		}
		s, err := scale(module, a.shape[0])
		if err != nil {
			return nil, err
		}
		if math.IsInf(float64(float32(s)), 0) {
			return nil, fail(ErrFormat, "module %.200q has the scale %v", module, s)
		}
		deltas[weight(module)] = delta{float32(s), a.shape[0], a.read, b.read}
	}
	return deltas, nil
}

// addDeltas adds an adapter to the model.
func (m *Model) addDeltas(deltas map[string]delta, closes func() error) {
	all := map[string][]delta{} // engines may read the map of before
	for name, d := range m.deltas {
		all[name] = slices.Clone(d)
	}
	for name, d := range deltas {
		all[name] = append(all[name], d)
	}
	m.deltas, m.adapters = all, append(m.adapters, closes)
}

// weights returns the weights with the adapters.
func (m *Model) weights() source {
	if m.deltas == nil {
		return m.files
	}
	return merged{m.files, m.deltas}
}

// merged is the weights of a model with adapters.
type merged struct {
	source
	deltas map[string][]delta
}

// Tensor returns a weight in its stored type.
func (m merged) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	rows := 1
	if len(shape) > 0 {
		rows = shape[0]
	}
	return m.rowsAs(name, tensor.Dtype{}, shape, 0, rows)
}

// A merged weight is not in blocks.
func (m merged) blocks(name string, shape []int, from, to int) (*nn.Quantised, error) {
	if len(m.deltas[name]) > 0 {
		return nil, nil
	}
	return m.source.blocks(name, shape, from, to)
}

func (m merged) float32s(dst []float32, name string, shape []int, from, to int) error {
	if err := m.source.float32s(dst, name, shape, from, to); err != nil {
		return err
	}
	for _, d := range m.deltas[name] {
		a, err := d.a(0, d.rank)
		if err != nil {
			return err
		}
		b, err := d.b(from, to)
		if err != nil {
			return err
		}
		d.add(dst, a, b)
	}
	return nil
}

func (m merged) blockRow(name string) int {
	if len(m.deltas[name]) > 0 {
		return 0
	}
	return m.source.blockRow(name)
}

// mergedAt is the number of elements that are merged at a time. sumsPool has their memory.
const mergedAt = 1 << 19

var sumsPool sync.Pool

// rowsAs returns rows of a weight. A merged weight that has numbers beyond its stored type is float32, unless another type is asked
// for. Beside the result and the adapter's tensors, the memory does not depend on the number of rows.
func (m merged) rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error) {
	deltas := m.deltas[name]
	if len(deltas) == 0 {
		return m.source.rowsAs(name, as, shape, from, to)
	}
	want := as
	if want == (tensor.Dtype{}) {
		want = m.stored(name)
	}
	t, err := rowsOf(want, shape, from, to)
	if err != nil {
		return nil, fmt.Errorf("decoder: weight %s: %w", name, err)
	}
	columns := shape[1]
	block := min(to-from, max(1, mergedAt/columns))
	buffer, _ := sumsPool.Get().(*[]float32)
	if buffer == nil || len(*buffer) < block*columns {
		buffer = &[]float32{}
		*buffer = make([]float32, block*columns)
	}
	defer sumsPool.Put(buffer)
	a := make([][]float32, len(deltas))
	for i, d := range deltas {
		if a[i], err = d.a(0, d.rank); err != nil {
			return nil, err
		}
	}
	for first := from; first < to; first += block {
		last := min(first+block, to)
		sums := (*buffer)[:(last-first)*columns]
		if err := m.source.float32s(sums, name, shape, first, last); err != nil {
			return nil, err
		}
		for i, d := range deltas {
			b, err := d.b(first, last)
			if err != nil {
				return nil, err
			}
			d.add(sums, a[i], b)
		}
		switch err := convert(t.Data(), (first-from)*columns, sums); {
		case errors.Is(err, ErrConfig) && as == (tensor.Dtype{}):
			return m.rowsAs(name, tensor.Float32, shape, from, to)
		case err != nil:
			return nil, fmt.Errorf("decoder: weight %s with its adapters: %w", name, err)
		}
	}
	return t, nil
}

// add adds scale * B A to the rows of sums, for as many rows as b has.
func (d *delta) add(sums, a, b []float32) {
	rows, columns := len(b)/d.rank, len(a)/d.rank
	parts := min(runtime.GOMAXPROCS(0), max(1, len(sums)*d.rank>>16))
	var wait sync.WaitGroup
	for i := range parts {
		wait.Go(func() {
			for row := i * rows / parts; row < (i+1)*rows/parts; row++ {
				y := sums[row*columns:][:columns]
				for k, x := range b[row*d.rank:][:d.rank] { // several times as fast as Sgemm, whose blocks have 64 columns
					blasimpl.Implementation{}.Saxpy(columns, d.scale*x, a[k*columns:], 1, y, 1)
				}
			}
		})
	}
	wait.Wait()
}

// floats returns rows of a tensor as finite numbers of float32.
func (f folder) floats(w hf.Weight, from, to int) ([]float32, error) {
	s := make([]float32, (to-from)*w.Shape[1])
	if err := f.float32s(s, w.Name, w.Shape, from, to); err != nil {
		return nil, err
	}
	return finite(f.Path(""), w.Name, s)
}

// finite returns an error for a tensor of an adapter with NaN or an infinite number.
func finite(path, name string, s []float32) ([]float32, error) {
	for i, x := range s {
		if x-x != 0 {
			return nil, fmt.Errorf("decoder: %s: tensor %.200q has %v at element %d: %w", path, name, x, i, ErrFormat)
		}
	}
	return s, nil
}

// adaptGGUF adds the adapter of a GGUF file.
func (m *Model) adaptGGUF(path string) error {
	file, err := gguf.Open(path)
	if err != nil {
		return err
	}
	deltas, err := m.deltasOfGGUF(path, file)
	if err != nil {
		return errors.Join(err, file.Close())
	}
	m.addDeltas(deltas, file.Close)
	return nil
}

func (m *Model) deltasOfGGUF(path string, file *gguf.File) (map[string]delta, error) {
	t, ok := m.network.(*transformer)
	if !ok {
		return nil, fmt.Errorf("decoder: %s: adapters of GGUF files are for the families of package decoder: %w", path, ErrUnsupported)
	}
	adapter, err := file.Adapter(t.heads, t.sizes.KVHeads)
	if err != nil {
		return nil, err
	}
	var config struct {
		ModelType string `json:"model_type"`
	}
	if err := json.Unmarshal(m.config, &config); err != nil {
		return nil, fmt.Errorf("decoder: %s: %w: %w", m.file, err, ErrFormat)
	}
	if config.ModelType != adapter.ModelType && !(config.ModelType == "mistral" && adapter.ModelType == "llama") {
		return nil, fmt.Errorf("decoder: %s: an adapter of model_type %q, and the model's is %q: %w", path, adapter.ModelType, config.ModelType, ErrFormat)
	}
	factors := map[string]*[2]factor{}
	for name, pair := range adapter.Pairs {
		factors[name] = new([2]factor)
		for i, x := range pair {
			if x == nil {
				continue
			}
			factors[name][i] = factor{x.Name(), x.Shape(), func(from, to int) ([]float32, error) {
				s := make([]float32, (to-from)*x.Columns())
				if err := x.Float32(s, from, to); err != nil {
					return nil, err
				}
				return finite(path, x.Name(), s)
			}}
		}
	}
	return m.deltasOf(path, factors, nil, func(name string) string { return strings.TrimPrefix(name, "model.") }, func(_ string, rank int) (float64, error) {
		if adapter.Alpha == 0 { // as in llama.cpp
			return 1, nil
		}
		return adapter.Alpha / float64(rank), nil
	})
}
