package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// config is what the graph needs of a config.json.
type config struct {
	Type     string          `json:"model_type"`
	Vocab    int             `json:"vocab_size"`
	Width    int             `json:"hidden_size"`
	Inner    int             `json:"intermediate_size"`
	Layers   int             `json:"num_hidden_layers"`
	Heads    int             `json:"num_attention_heads"`
	KVHeads  int             `json:"num_key_value_heads"`
	HeadDim  int             `json:"head_dim"`
	Eps      float64         `json:"rms_norm_eps"`
	Base     float64         `json:"rope_theta"`
	Scaling  json.RawMessage `json:"rope_scaling"`
	Tied     bool            `json:"tie_word_embeddings"`
	Bias     bool            `json:"attention_bias"`
	MLPBias  bool            `json:"mlp_bias"`
	Rotation struct {        // of newer files
		Type string  `json:"rope_type"`
		Base float64 `json:"rope_theta"`
	} `json:"rope_parameters"`
}

func readConfig(dir string) (c config, err error) {
	data, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err == nil {
		err = json.Unmarshal(data, &c)
	}
	if err != nil {
		return c, err
	}
	if c.Rotation.Base != 0 {
		c.Base = c.Rotation.Base
	}
	if c.KVHeads == 0 {
		c.KVHeads = c.Heads
	}
	if c.HeadDim == 0 && c.Heads > 0 {
		c.HeadDim = c.Width / c.Heads
	}
	scaled := len(c.Scaling) > 0 && string(c.Scaling) != "null" || c.Rotation.Type != "" && c.Rotation.Type != "default"
	if c.Type != "llama" || c.Bias || c.MLPBias || scaled {
		return c, fmt.Errorf("%s: model type %q, biases %v, scaled rotations %v: this example has Llama's graph without both; leanlm runs more models", dir, c.Type, c.Bias || c.MLPBias, scaled)
	}
	return c, nil
}

// model is the graph of a model, its cache, and one text.
type model struct {
	config
	weights decoder.Weights
	graph   *G.ExprGraph
	cache   *la.Cache
	step    *la.Step
	text    *la.Sequence

	tokens, last []int   // inputs of the graph: a token for each row, and the row whose next token is wanted
	next         *G.Node // the most likely next token
	machine      interface {
		G.VM
		Close() error
	}
}

const (
	pageSize = 64
	rows     = 128 // most tokens of a step: the prompt is read in pieces
)

// newModel builds the graph for a text of at most the given number of tokens.
func newModel(c config, weights decoder.Weights, tokens int) (_ *model, err error) {
	m := &model{config: c, weights: weights, graph: G.NewGraph(), tokens: make([]int, rows), last: make([]int, 1)}
	defer func() {
		if r := recover(); r != nil { // from G.Must
			err = fmt.Errorf("the graph cannot be built: %v", r)
		}
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	if m.cache, err = la.NewCache(la.CacheConfig{
		Layers: c.Layers, KVHeads: c.KVHeads, HeadDim: c.HeadDim, DType: la.Float16, PageSize: pageSize, Pages: tokens/pageSize + 1,
	}); err != nil {
		return nil, err
	}
	if m.step, err = m.cache.NewStep(rows); err != nil {
		return nil, err
	}
	if m.text, err = m.cache.NewSequence(); err != nil {
		return nil, err
	}
	// Tokens become vectors and pass the layers. The last one of a step becomes logits.
	indices := func(name string, x []int) *G.Node { // a run computes the rows alone that a step uses
		return G.Must(m.step.Rows(m.input(name, tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)))))
	}
	embedding := m.weight("embed_tokens.weight", c.Vocab, c.Width)
	h := G.Must(nn.Embedding(embedding, indices("tokens", m.tokens), nil))
	for i := range c.Layers {
		h = m.layer(i, h)
	}
	h = G.Must(nn.Embedding(h, indices("last", m.last), nil))
	head := embedding
	if !c.Tied {
		head = m.weight("lm_head.weight", c.Vocab, c.Width)
	}
	logits := G.Must(nn.Linear(h, head, nil, m.norm("norm"), nn.WithMixedPrecision()))
	m.next = G.Must(nn.ArgMax(logits))
	if err := rewrite.Check(m.graph); err != nil {
		return nil, err
	}
	if err := rewrite.ShareMemory(m.graph); err != nil {
		return nil, err
	}
	m.machine = G.NewTapeMachine(m.graph)
	return m, nil
}

// layer is attention, and a gated feed-forward network. Each reads the norm of its input, and is added to the input.
func (m *model) layer(i int, h *G.Node) *G.Node {
	name := fmt.Sprintf("layers.%d.", i)
	q, kv := m.Heads*m.HeadDim, m.KVHeads*m.HeadDim
	qkv, err := nn.Linears(h, []*G.Node{
		m.weight(name+"self_attn.q_proj.weight", q, m.Width), m.weight(name+"self_attn.k_proj.weight", kv, m.Width), m.weight(name+"self_attn.v_proj.weight", kv, m.Width),
	}, nil, m.norm(name+"input_layernorm"), nn.WithMixedPrecision())
	if err != nil {
		panic(err)
	}
	rotary := la.WithRotary(rope.Config{HeadDim: m.HeadDim, Base: m.Base}) // by the tokens' positions in the text
	x := G.Must(la.CachedAttention(qkv[0], qkv[1], qkv[2], m.step.Layer(i), la.WithCausal(), rotary))
	h = m.add(h, x, name+"self_attn.o_proj.weight", q)

	gate, up := m.weight(name+"mlp.gate_proj.weight", m.Inner, m.Width), m.weight(name+"mlp.up_proj.weight", m.Inner, m.Width)
	x = G.Must(nn.GatedLinear(h, []*G.Node{gate, up}, nil, nn.SiLU, m.norm(name+"post_attention_layernorm"), nn.WithMixedPrecision()))
	return m.add(h, x, name+"mlp.down_proj.weight", m.Inner)
}

// add returns h plus a projection of x.
func (m *model) add(h, x *G.Node, name string, in int) *G.Node {
	return G.Must(nn.Linear(x, m.weight(name, m.Width, in), nil, nn.WithResidual(h), nn.WithMixedPrecision()))
}

// norm is the option of a layer that reads the RMS norm of its input.
func (m *model) norm(name string) nn.Option {
	return nn.WithRMSNorm(m.weight(name+".weight", m.Width), m.Eps)
}

// weight is an input with the value of a weight. Matrices may have 16 bits.
func (m *model) weight(name string, shape ...int) *G.Node {
	t, err := m.weights.Tensor(name, shape...)
	if err != nil {
		panic(err)
	}
	return m.input(name, t)
}

// input is an input with a value. Gorgonia merges inputs of one name, type and shape.
func (m *model) input(name string, t *tensor.Dense) *G.Node {
	return G.NewTensor(m.graph, t.Dtype(), t.Dims(), G.WithShape(t.Shape()...), G.WithName(name), G.WithValue(t))
}

// append appends tokens to the text, and returns the most likely next token.
func (m *model) append(ids []int) (next int, err error) {
	for len(ids) > 0 && err == nil {
		n := min(len(ids), rows)
		err = m.step.Run([]la.Append{{Seq: m.text, Tokens: n}}, func() error {
			copy(m.tokens, ids[:n])
			copy(m.last, m.step.Last())
			defer m.machine.Reset()
			if err := la.Cause(m.machine.RunAll()); err != nil {
				return err
			}
			if next = int(m.next.Value().Data().([]int32)[0]); next < 0 {
				return errors.New("the logits have no largest one")
			}
			return nil
		})
		ids = ids[n:]
	}
	return next, err
}

func (m *model) close() (err error) {
	if m.machine != nil {
		err = m.machine.Close()
	}
	if m.cache != nil {
		err = errors.Join(err, m.cache.Close())
	}
	return err
}
