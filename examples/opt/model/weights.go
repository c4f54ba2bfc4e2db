package model

import (
	"errors"

	"gorgonia.org/leanattention/examples/opt/hf"

	"gorgonia.org/tensor"
)

// ErrConfig is a value of [Options], or a use of a [Decoder], outside what the
// model and the options allow.
var ErrConfig = errors.New("model: out of range")

// Source is where weights come from: an *hf.Folder.
type Source interface {
	Config() hf.Config
	Float32(name string, shape ...int) (*tensor.Dense, error)
}

// Weights is a model's parameters. Graphs take them in as inputs, without a
// copy, so the source has to outlive the decoders made of them. They are never
// written.
type Weights struct {
	config  hf.Config
	tensors map[string]*tensor.Dense
}

// Load takes all weights of a model from a source.
func Load(from Source) (*Weights, error) {
	w := &Weights{config: from.Config(), tensors: map[string]*tensor.Dense{}}
	for p := range w.config.Weights() {
		t, err := from.Float32(p.Name, p.Shape...)
		if err != nil {
			return nil, err
		}
		w.tensors[p.Name] = t
	}
	return w, nil
}

// Config is the model's configuration.
func (w *Weights) Config() hf.Config { return w.config }

// Bytes is the size of the weights in memory.
func (w *Weights) Bytes() (n int64) {
	for _, t := range w.tensors {
		n += int64(t.MemSize())
	}
	return n
}
