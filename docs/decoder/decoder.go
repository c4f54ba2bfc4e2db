package main

import (
	"fmt"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// decoder is the graph of a model, and what a run of it needs.
type decoder struct {
	cache   *la.Cache
	step    *la.Step
	machine G.VM

	// Inputs of the graph. They are filled before each run.
	tokens    []int         // of each row: its token
	positions []int         // of each row: its row in the table of positions
	last      []int         // of each sequence: the row that its next token comes from
	choices   *tensor.Dense // of each sequence: how that token is chosen
	randoms   *tensor.Dense // of each sequence: a random number in [0, 1)

	next *G.Node // of each sequence: its next token
}

// newDecoder builds the graph: each run takes up to rows tokens of up to
// sequences sequences. The cache holds contextTokens tokens for all of them.
func newDecoder(folder *hf.Folder, rows, sequences, contextTokens int) (d *decoder, err error) {
	defer func() { // from G.Must
		if r := recover(); r != nil {
			err = fmt.Errorf("the decoder cannot be built: %v", r)
		}
	}()
	c := folder.Config()
	const pageSize = 16
	cache, err := la.NewCache(la.CacheConfig{
		Layers: c.Layers, KVHeads: c.Heads, HeadDim: c.HeadDim(),
		PageSize: pageSize, Pages: sequences + contextTokens/pageSize,
	})
	if err != nil {
		return nil, err
	}
	step, err := cache.NewStep(rows)
	if err != nil {
		return nil, err
	}
	d = &decoder{
		cache: cache, step: step,
		tokens: make([]int, rows), positions: make([]int, rows), last: make([]int, sequences),
		choices: nn.Choices(make([]nn.Choice, sequences)), randoms: nn.Randoms(make([]float64, sequences)),
	}

	w := &weights{folder: folder, graph: G.NewGraph()}
	used := func(input *G.Node) *G.Node { return G.Must(step.Rows(input)) } // a run computes the rows of sequences alone
	tokens, positions, last := used(w.indices("tokens", d.tokens)), used(w.indices("positions", d.positions)), used(w.indices("last", d.last))
	choices, randoms := used(w.input("choices", d.choices)), used(w.input("randoms", d.randoms))

	table := w.weight("decoder.embed_tokens.weight", c.VocabSize, c.HiddenSize)
	h := G.Must(nn.Embedding(w.weight("decoder.embed_positions.weight", c.MaxPositions+hf.PositionOffset, c.HiddenSize), positions, nil))
	h = G.Must(nn.Embedding(table, tokens, h))
	for i := range c.Layers {
		h = w.layer(h, i, c, step)
	}

	h = G.Must(nn.Embedding(h, last, nil))
	logits := G.Must(nn.Linear(h, table, nil, w.norm("decoder.final_layer_norm", c.HiddenSize)))
	d.next = G.Must(nn.Sample(logits, choices, randoms))

	if err := rewrite.Check(w.graph); err != nil {
		return nil, err
	}
	d.machine = G.NewTapeMachine(w.graph)
	return d, nil
}

// layer is one layer of the decoder: attention, then two linear layers, each on a
// normalised input and added to what came in.
func (w *weights) layer(h *G.Node, i int, c hf.Config, step *la.Step) *G.Node {
	name := fmt.Sprintf("decoder.layers.%d.", i)
	d, f := c.HiddenSize, c.FFNDim

	wq, bq := w.linear(name+"self_attn.q_proj", d, d)
	wk, bk := w.linear(name+"self_attn.k_proj", d, d)
	wv, bv := w.linear(name+"self_attn.v_proj", d, d)
	qkv, err := nn.Linears(h, []*G.Node{wq, wk, wv}, []*G.Node{bq, bk, bv}, w.norm(name+"self_attn_layer_norm", d))
	if err != nil {
		panic(err)
	}
	x := G.Must(la.CachedAttention(qkv[0], qkv[1], qkv[2], step.Layer(i), la.WithCausal()))
	out, bias := w.linear(name+"self_attn.out_proj", d, d)
	h = G.Must(nn.Linear(x, out, bias, nn.WithResidual(h)))

	up, bias := w.linear(name+"fc1", f, d)
	x = G.Must(nn.Linear(h, up, bias, w.norm(name+"final_layer_norm", d), nn.WithActivation(nn.ReLU)))
	down, bias := w.linear(name+"fc2", d, f)
	return G.Must(nn.Linear(x, down, bias, nn.WithResidual(h)))
}

func (d *decoder) close() error {
	if err := d.machine.Close(); err != nil {
		return err
	}
	return d.cache.Close()
}
