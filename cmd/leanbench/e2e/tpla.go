package e2e

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"

	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/tensor"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

const (
	perplexity measure.Metric = "perplexity"
	ofExact    measure.Metric = "of exact attention's"

	tplaLoss   = "Perplexity of a model with latent attention in parts"
	tplaErrors = "Relative error of attention's outputs, mean of the layers"
)

// tplaFlags are the flags of the command tpla.
type tplaFlags struct {
	*measure.Options
	model, text     string
	context, tokens int
	shards          int
}

// measureTPLA measures the error of TPLA with a trained model.
func measureTPLA(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	f := &tplaFlags{Options: measure.Flags(flags)}
	flags.StringVar(&f.model, "model", "", "`folder` of a model with latent attention, with latents.f32 and queries.f32, as e2e/mla.py writes it")
	flags.StringVar(&f.text, "text", "", "`file` with a text that the model was not trained on; default: held-out.txt of the folder")
	flags.IntVar(&f.context, "c", 1024, "`tokens` of a window; windows are side by side")
	flags.IntVar(&f.tokens, "tokens", 65536, "most `tokens` of the text")
	flags.IntVar(&f.shards, "shards", 2, "`parts` of latent vectors")
	return func(stdout, stderr io.Writer) (err error) {
		if f.model == "" {
			return errors.New("-model is needed: a folder that e2e/mla.py writes")
		}
		if f.text == "" {
			f.text = filepath.Join(f.model, "held-out.txt")
		}
		machine, err := measure.ThisMachine(f.Workers)
		if err != nil {
			return err
		}
		r := &measure.Report{Command: "tpla", Machine: machine, Figures: []measure.Figure{}}
		m, err := lean.Open(f.model)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.Close()) }()
		if err := f.measure(m, r); err != nil {
			return err
		}
		r.WriteHead(stdout)
		r.WriteTable(stdout, tplaLoss)
		r.WriteTable(stdout, tplaErrors)
		return r.Save(f.JSON)
	}
}

// measure adds the figures of all ways to split latent vectors.
func (f *tplaFlags) measure(m *lean.Model, r *measure.Report) error {
	text, err := os.ReadFile(f.text)
	if err != nil {
		return err
	}
	ids, err := m.Tokenizer().Encode(string(text), tokenizer.Options{})
	if err != nil {
		return err
	}
	ids = ids[:min(len(ids), f.tokens)]
	l, err := f.latents(m)
	if err != nil {
		return err
	}
	r.Notes = append(r.Notes, fmt.Sprintf("%d tokens in windows of %d; %d parts; calibration: %d tokens", len(ids), f.context, f.shards, l.tokens))
	exact, err := f.perplexity(m, ids, lean.Options{})
	if err != nil {
		return err
	}
	r.Row(tplaLoss, "exact", "lean").Add(perplexity, exact, nil)
	for _, way := range []struct {
		name          string
		pca, measured bool
	}{{"Hadamard", false, false}, {"Hadamard, calibrated", false, true}, {"PCA, calibrated", true, true}} {
		of := func(layer int) *nn.TPLA {
			t := &nn.TPLA{Shards: f.shards, PCA: way.pca, Seed: uint64(layer)}
			if way.measured {
				t.Latents, t.Queries = l.latents[layer], l.queries[layer]
			}
			return t
		}
		loss, err := f.perplexity(m, ids, lean.Options{TPLA: of})
		if err != nil {
			return err
		}
		row := r.Row(tplaLoss, way.name, "lean")
		row.Add(perplexity, loss, nil)
		row.Add(ofExact, loss/exact, nil)
		if !way.measured {
			continue
		}
		if err := l.errors(way.name, of, r); err != nil {
			return err
		}
	}
	return nil
}

// perplexity returns the perplexity of a text in windows side by side.
func (f *tplaFlags) perplexity(m *lean.Model, ids []int, o lean.Options) (_ float64, err error) {
	o.Context, o.Exact, o.Weights, o.Cache = f.context, true, tensor.Float32, tensor.Float32
	e, err := m.Engine(o)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	sum, n := 0.0, 0
	for from := 0; from+1 < len(ids); from += f.context {
		p, err := e.LogProbs(context.Background(), ids[from:min(from+f.context, len(ids))])
		if err != nil {
			return 0, err
		}
		for _, x := range p {
			sum -= x
		}
		n += len(p)
	}
	return math.Exp(sum / float64(n)), nil
}

// latentModel is the latent attention of all layers of a model, and what a text makes of it.
type latentModel struct {
	Heads  int `json:"num_attention_heads"`
	Latent int `json:"kv_lora_rank"`
	Nope   int `json:"qk_nope_head_dim"`
	Rope   int `json:"qk_rope_head_dim"`
	Value  int `json:"v_head_dim"`
	Width  int `json:"hidden_size"`
	Layers int `json:"num_hidden_layers"`

	weights          []*nn.LatentWeights
	tokens           int
	latents, queries []*tensor.Dense // of a layer
}

// latents reads a model's folder.
func (f *tplaFlags) latents(m *lean.Model) (*latentModel, error) {
	l := new(latentModel)
	config, err := os.ReadFile(filepath.Join(f.model, "config.json"))
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(config, l); err != nil {
		return nil, err
	}
	if sizes := m.Network().Sizes(); sizes.Latent == 0 || sizes.Latent != l.Latent || l.Layers < 1 {
		return nil, fmt.Errorf("%s: latent vectors have %d elements, and kv_lora_rank is %d: want a model with latent attention", f.model, sizes.Latent, l.Latent)
	}
	for layer := range l.Layers {
		tensorOf := func(name string, shape ...int) (*tensor.Dense, error) {
			return m.Weights().Tensor(fmt.Sprintf("layers.%d.self_attn.%s.weight", layer, name), shape...)
		}
		w := &nn.LatentWeights{Heads: l.Heads}
		if w.Down, err = tensorOf("kv_a_proj_with_mqa", l.Latent+l.Rope, l.Width); err != nil {
			return nil, err
		}
		if w.Norm, err = tensorOf("kv_a_layernorm", l.Latent); err != nil {
			return nil, err
		}
		up, err := tensorOf("kv_b_proj", l.Heads*(l.Nope+l.Value), l.Latent)
		if err != nil {
			return nil, err
		}
		if w.Key, w.Value, err = nn.SplitKVUp(up, l.Heads, l.Nope); err != nil {
			return nil, err
		}
		l.weights = append(l.weights, w)
	}
	if l.latents, err = l.read(filepath.Join(f.model, "latents.f32"), l.Latent+l.Rope); err != nil {
		return nil, err
	}
	l.queries, err = l.read(filepath.Join(f.model, "queries.f32"), l.Heads*(l.Nope+l.Rope))
	return l, err
}

// read returns the matrices of all layers in a file, with rows of width elements.
func (l *latentModel) read(name string, width int) (all []*tensor.Dense, err error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	l.tokens = len(data) / (4 * width * l.Layers)
	if l.tokens < 2 || len(data) != 4*width*l.Layers*l.tokens {
		return nil, fmt.Errorf("%s has %d bytes, want two rows or more of %d float32 for each of %d layers", name, len(data), width, l.Layers)
	}
	for range l.Layers {
		x := make([]float32, l.tokens*width)
		if _, err := binary.Decode(data, binary.LittleEndian, x); err != nil {
			return nil, err
		}
		data = data[4*len(x):]
		all = append(all, tensor.New(tensor.WithShape(l.tokens, width), tensor.WithBacking(x)))
	}
	return all, nil
}

// errors adds the errors of attention by itself, the mean of all layers.
func (l *latentModel) errors(name string, of func(layer int) *nn.TPLA, r *measure.Report) error {
	var sums [4]float64
	for layer, w := range l.weights {
		norm, softmax, both, prefilled, err := of(layer).Errors(w, 1/math.Sqrt(float64(l.Nope+l.Rope)))
		if err != nil {
			return err
		}
		for i, x := range []float64{norm, softmax, both, prefilled} {
			sums[i] += x / float64(l.Layers)
		}
	}
	row := r.Row(tplaErrors, name, "lean")
	for i, of := range []measure.Metric{"norms of parts", "softmax of parts", "both", "both, behind an exact prompt"} {
		row.Add(of, sums[i], nil)
	}
	return nil
}
