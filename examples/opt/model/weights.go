package model

import (
	"errors"
	"fmt"
	"maps"
	"sync"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/ranks"

	"gorgonia.org/tensor"
)

// ErrConfig is returned for an option, or a use of a [Decoder], outside what the model and the options allow.
var ErrConfig = errors.New("model: out of range")

// Source is a source of weights: an *hf.Folder.
type Source interface {
	Config() hf.Config

	// Tensor returns a weight in its stored type: float32, leanattention.Float16 or leanattention.BFloat16. The
	// weight is not written.
	Tensor(name string, shape ...int) (*tensor.Dense, error)
}

// Weights is a model's parameters. Graphs take them as inputs without a copy, so the source must outlive the
// decoders. Weights are never written.
type Weights struct {
	config  hf.Config
	world   ranks.World // the rank whose part the weights are; a Size of 0: the whole model
	tensors map[string]*tensor.Dense

	widening sync.Mutex
	wide     *Weights // see widened

	gpus struct {
		sync.Mutex
		of map[*device.GPU]*gpuWeights
	}
}

// Load loads all weights of a model from a source. Matrices keep their stored type. Vectors (biases, and weights of
// layer norms) become float32: they are a thousandth of the model, and are added to float32.
func Load(from Source) (*Weights, error) { return LoadAs(from, tensor.Dtype{}) }

// LoadAs is Load with all matrices in one type, float32, leanattention.Float16 or leanattention.BFloat16; the zero
// Dtype keeps the stored type. A shorter type halves the bytes that decode reads, and rounds to nearest. A number
// that float16 can't represent, and an activation that is neither "relu" nor "gelu", are ErrConfig.
func LoadAs(from Source, matrices tensor.Dtype) (*Weights, error) {
	return LoadPart(from, matrices, ranks.World{})
}

// LoadPart is LoadAs for one rank's part, for decoders with [Options].Ranks. The other ranks' parts are not read.
// More ranks than heads are ErrConfig.
func LoadPart(from Source, matrices tensor.Dtype, world ranks.World) (*Weights, error) {
	w := &Weights{config: from.Config(), world: world, tensors: map[string]*tensor.Dense{}}
	if err := checkWorld(w.config, world); err != nil {
		return nil, err
	}
	if _, ok := activations[w.config.Activation]; !ok {
		return nil, fmt.Errorf("%w: activation %q", ErrConfig, w.config.Activation)
	}
	for p := range w.config.Weights() {
		t, err := from.Tensor(p.Name, p.Shape...)
		if err != nil {
			return nil, err
		}
		if c := cutOf(w.config, world, p.Name, p.Shape); !c.none {
			w.tensors[p.Name] = c.of(t)
		}
	}
	if err := w.convert(func(t *tensor.Dense) tensor.Dtype { return loadedAs(t, matrices) }); err != nil {
		return nil, err
	}
	return w, nil
}

// loadedAs returns the type that LoadAs gives a tensor: vectors are float32.
func loadedAs(t *tensor.Dense, matrices tensor.Dtype) tensor.Dtype {
	switch {
	case t.Dims() == 1:
		return tensor.Float32
	case matrices == tensor.Dtype{}:
		return t.Dtype()
	}
	return matrices
}

// widened returns the same weights in float32, which Gorgonia's own nodes need, and keeps them for later calls.
func (w *Weights) widened() (*Weights, error) {
	w.widening.Lock()
	defer w.widening.Unlock()
	if w.wide == nil {
		wide := &Weights{config: w.config, tensors: maps.Clone(w.tensors)}
		if err := wide.convert(func(*tensor.Dense) tensor.Dtype { return tensor.Float32 }); err != nil {
			return nil, err
		}
		w.wide = wide
	}
	return w.wide, nil
}

// Config returns the model's configuration.
func (w *Weights) Config() hf.Config { return w.config }

// Bytes returns the size of the weights in memory.
func (w *Weights) Bytes() (n int64) {
	for _, t := range w.tensors {
		n += int64(t.MemSize())
	}
	return n
}
