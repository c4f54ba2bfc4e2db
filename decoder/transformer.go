package decoder

import (
	"fmt"
	"iter"

	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
)

// transformer is the [Network] of all families. A family is a configuration of it:
//
//	h = embedding of the tokens, scaled                     + embedding of their positions (OPT)
//	for each layer:
//		q, k, v = projections of the norm of h              (DeepSeek, MiniCPM 3: by latent vectors)
//		q, k = norms of q and k                             (Qwen 3, Gemma 3: of each head; OLMo 2: of all heads)
//		q, k = q and k, rotated by the positions            (all but OPT)
//		h = h + projection of attention(q, k, v)            (Gemma 2 and 3, OLMo 2: the norm of the projection; Granite, MiniCPM 3: scaled)
//		m = down projection of f(gate) * up of the norm of h  (OPT: of f(up))
//		h = h + m                                           (as for attention)
//	logits = projection of the norm of h                    (Granite: scaled; Gemma 2: bounded)
type transformer struct {
	sizes Sizes
	names names

	width, inner, heads int
	embedding           int // width of the token embedding; OPT-350m projects to and from width

	norm      normKind
	eps       float64
	preNorms  bool // norms before attention and MLP
	postNorms bool // norms of the results of attention and MLP, before they are added
	sumNorms  bool // norms after the sums (OPT-350m)
	headNorms bool // norms of each head of q and k
	fullNorms bool // norms of all heads of q and k together

	rotary    []rope.Config // of each layer; nil: none
	positions int           // rows of the table of positions; 0: none
	offset    int           // row of the first position

	activation nn.Activation
	gated      bool
	fusedQKV   bool // the file has q, k and v as one tensor
	fusedGate  bool // the file has gate and up as one tensor

	latent *latent // nil: queries, keys and values are projections

	qkvBias, outBias, mlpBias bool
	tied                      bool // the head is the token embedding

	embeddingScale, residualScale, logitScale float64 // 0: 1
	scale                                     float64 // of scores; 0: 1/sqrt(HeadDim)
	scoreCap                                  float64 // 0: none
}

// normKind is a kind of norm.
type normKind uint8

const (
	rmsNorm     normKind = iota
	unitRMSNorm          // multiplies by 1 + weight
	layerNorm            // with weight and bias
	plainNorm            // a layer norm without weight and bias
)

// names are the names of weights in checkpoints, without ".weight" and ".bias". Names of layers follow the prefix.
type names struct {
	embedding, positions, in, out, last, head string
	layer                                     string // a format with the number
	q, k, v, qkv, o, qNorm, kNorm             string
	gate, up, gateUp, down                    string
	attention, afterAttention, mlp, afterMLP  string // norms
}

// llamaNames are the names of Llama and of the families that follow it.
var llamaNames = names{
	embedding: "embed_tokens", last: "norm", head: "lm_head", layer: "layers.%d.",
	q: "self_attn.q_proj", k: "self_attn.k_proj", v: "self_attn.v_proj", qkv: "self_attn.qkv_proj", o: "self_attn.o_proj",
	qNorm: "self_attn.q_norm", kNorm: "self_attn.k_norm",
	gate: "mlp.gate_proj", up: "mlp.up_proj", gateUp: "mlp.gate_up_proj", down: "mlp.down_proj",
	attention: "input_layernorm", mlp: "post_attention_layernorm",
}

// projection is a linear layer of a network.
type projection struct {
	name    string
	out, in int
	bias    bool
	split   Split // of the weight
}

// split returns the split of a weight with parts that GPUs and processes share.
func (t *transformer) split(axis Axis, parts int) Split {
	if !t.fullNorms {
		return Split{axis, parts}
	}
	return Split{Axis: ByRows} // a norm needs the queries, or the keys, of all heads
}

// featureBlock is the number of features of the MLP that are not split further.
const featureBlock = 16

// blocks returns the parts of the MLP's inner features.
func (t *transformer) blocks() int {
	if t.inner%featureBlock != 0 {
		return 1
	}
	return t.inner / featureBlock
}

// qkv returns the projections of queries, keys and values.
func (t *transformer) qkv() []projection {
	n, kv := t.heads*t.sizes.HeadDim, t.sizes.KVHeads*t.sizes.HeadDim
	heads := t.split(ByRows, t.sizes.KVHeads)
	return []projection{{t.names.q, n, t.width, t.qkvBias, heads}, {t.names.k, kv, t.width, t.qkvBias, heads}, {t.names.v, kv, t.width, t.qkvBias, heads}}
}

// output returns the projection of the attention's result.
func (t *transformer) output() projection {
	if t.latent != nil {
		return projection{t.names.o, t.width, t.heads * t.latent.value, t.outBias, t.split(ByColumns, t.heads)}
	}
	return projection{t.names.o, t.width, t.heads * t.sizes.HeadDim, t.outBias, t.split(ByColumns, t.sizes.KVHeads)}
}

// mlpIn returns the first projections of the MLP: gate and up, or up alone.
func (t *transformer) mlpIn() []projection {
	features := t.split(ByRows, t.blocks())
	up := projection{t.names.up, t.inner, t.width, t.mlpBias, features}
	if !t.gated {
		return []projection{up}
	}
	return []projection{{t.names.gate, t.inner, t.width, t.mlpBias, features}, up}
}

// mlpOut returns the last projection of the MLP.
func (t *transformer) mlpOut() projection {
	return projection{t.names.down, t.width, t.inner, t.mlpBias, t.split(ByColumns, t.blocks())}
}

// projects reports whether the token embedding has another width than the layers.
func (t *transformer) projects() bool { return t.embedding != t.width }

// Sizes returns the sizes of t.
func (t *transformer) Sizes() Sizes { return t.sizes }

// Weights yields the weights of t.
func (t *transformer) Weights() iter.Seq[Weight] {
	return func(yield func(Weight) bool) {
		more := true
		add := func(w Weight) {
			if more {
				more = yield(w)
			}
		}
		matrix := func(name string, out, in int) { add(Weight{Name: name + ".weight", Shape: []int{out, in}}) }
		norm := func(name string, n int) {
			if name == "" || t.norm == plainNorm {
				return
			}
			add(Weight{Name: name + ".weight", Shape: []int{n}})
			if t.norm == layerNorm {
				add(Weight{Name: name + ".bias", Shape: []int{n}})
			}
		}
		// linear adds projections. fused, if not "", is the one tensor that has the rows of all.
		linear := func(prefix, fused string, all ...projection) {
			rows, row := 0, 0
			for _, p := range all {
				rows += p.out
			}
			for _, p := range all {
				w := Weight{Name: prefix + p.name + ".weight", Shape: []int{p.out, p.in}, Split: p.split}
				b := Weight{Name: prefix + p.name + ".bias", Shape: []int{p.out}}
				if p.split.Axis == ByRows {
					b.Split = p.split
				}
				if fused != "" {
					w.From = Rows{prefix + fused + ".weight", row, rows}
					b.From = Rows{prefix + fused + ".bias", row, rows}
				}
				row += p.out
				add(w)
				if p.bias {
					add(b)
				}
			}
		}
		fused := func(is bool, name string) string {
			if is {
				return name
			}
			return ""
		}
		n := &t.names
		matrix(n.embedding, t.sizes.Vocab, t.embedding)
		if t.positions > 0 {
			matrix(n.positions, t.positions, t.width)
		}
		if t.projects() {
			matrix(n.in, t.width, t.embedding)
			matrix(n.out, t.embedding, t.width)
		}
		for i := 0; i < t.sizes.Layers && more; i++ {
			prefix := fmt.Sprintf(n.layer, i)
			if t.latent != nil {
				for _, w := range t.latent.weights(prefix, t) {
					add(w)
				}
			} else {
				linear(prefix, fused(t.fusedQKV, n.qkv), t.qkv()...)
			}
			linear(prefix, "", t.output())
			linear(prefix, fused(t.fusedGate, n.gateUp), t.mlpIn()...)
			linear(prefix, "", t.mlpOut())
			for _, name := range []string{n.attention, n.afterAttention, n.mlp, n.afterMLP} {
				if name != "" {
					norm(prefix+name, t.width)
				}
			}
			switch {
			case t.headNorms:
				norm(prefix+n.qNorm, t.sizes.HeadDim)
				norm(prefix+n.kNorm, t.sizes.HeadDim)
			case t.fullNorms:
				norm(prefix+n.qNorm, t.heads*t.sizes.HeadDim)
				norm(prefix+n.kNorm, t.sizes.KVHeads*t.sizes.HeadDim)
			}
		}
		norm(n.last, t.width)
		head := Weight{Name: n.head + ".weight", Shape: []int{t.sizes.Vocab, t.embedding}, Split: Split{Axis: ByRows}}
		if t.tied {
			head.From = Rows{n.embedding + ".weight", 0, t.sizes.Vocab}
		}
		add(head)
	}
}

// Hidden adds the layers.
func (t *transformer) Hidden(b *Builder, tokens *G.Node) *G.Node {
	var h *G.Node
	table := b.Weight(t.names.embedding + ".weight")
	if t.positions > 0 {
		positions, at := b.Weight(t.names.positions+".weight"), b.Positions(t.offset)
		h = b.Node(func() (*G.Node, error) { return nn.Embedding(positions, at, nil) })
	}
	switch {
	case t.projects():
		e := b.Node(func() (*G.Node, error) { return nn.Embedding(table, tokens, nil) })
		h = t.linear(b, "", projection{name: t.names.in}, e, residual(h)...)
	default:
		h = b.Node(func() (*G.Node, error) { return nn.Embedding(table, tokens, h) })
	}
	h = scaled(b, h, t.embeddingScale)
	for i := range t.sizes.Layers {
		h = t.layer(b, i, h)
	}
	return h
}

// Logits adds the head.
func (t *transformer) Logits(b *Builder, h *G.Node) *G.Node {
	var opts []nn.Option
	if t.names.last != "" {
		opts = append(opts, t.before(b, t.names.last))
	}
	if t.projects() {
		h, opts = t.linear(b, "", projection{name: t.names.out}, h, opts...), nil
	}
	w := b.Weight(t.names.head + ".weight")
	logits := b.Node(func() (*G.Node, error) { return nn.Linear(h, w, nil, b.linearOf([]*G.Node{w}, opts...)...) })
	return scaled(b, logits, t.logitScale)
}

func (t *transformer) layer(b *Builder, i int, h *G.Node) *G.Node {
	n, prefix := &t.names, fmt.Sprintf(t.names.layer, i)
	before := func(name string) []nn.Option {
		if !t.preNorms {
			return nil
		}
		return []nn.Option{t.before(b, prefix+name)}
	}
	after, afterMLP := n.afterAttention, n.afterMLP
	if t.sumNorms {
		after, afterMLP = n.attention, n.mlp
	}
	a := t.attention(b, i, prefix, h, before(n.attention))
	h = t.add(b, h, a, prefix, t.output(), after)

	var m *G.Node
	if in := t.mlpIn(); t.gated {
		ws, bs := t.parameters(b, prefix, in)
		opts := b.linearOf(ws, before(n.mlp)...)
		m = b.Node(func() (*G.Node, error) { return nn.GatedLinear(h, ws, bs, t.activation, opts...) })
	} else {
		m = t.linear(b, prefix, in[0], h, append(before(n.mlp), nn.WithActivation(t.activation))...)
	}
	return t.add(b, h, m, prefix, t.mlpOut(), afterMLP)
}

// attention returns the attention of the rows of h to the layer's keys and values.
func (t *transformer) attention(b *Builder, i int, prefix string, h *G.Node, opts []nn.Option) *G.Node {
	if t.latent != nil {
		return t.latentAttention(b, i, prefix, h, opts)
	}
	ws, bs := t.parameters(b, prefix, t.qkv())
	all := b.linearOf(ws, opts...)
	qkv := b.Nodes(3, func() ([]*G.Node, error) { return nn.Linears(h, ws, bs, all...) })
	for j, name := range []string{t.names.qNorm, t.names.kNorm} {
		switch {
		case t.headNorms:
			gamma := b.Weight(prefix + name + ".weight")
			qkv[j] = b.Node(func() (*G.Node, error) { return nn.QKNorm(qkv[j], gamma, t.eps, t.unit()...) })
		case t.fullNorms:
			qkv[j] = t.normed(b, qkv[j], prefix+name, nil)
		}
	}
	return b.Attend(i, qkv[0], qkv[1], qkv[2], t.attends(i)...)
}

// add returns h plus the projection of x. norm is the norm of the projection, or of the sum.
func (t *transformer) add(b *Builder, h, x *G.Node, prefix string, p projection, norm string) *G.Node {
	switch {
	case t.postNorms:
		return t.normed(b, t.partial(b, prefix, p, x, nil), prefix+norm, h)
	case t.sumNorms:
		return t.normed(b, t.partial(b, prefix, p, x, h), prefix+norm, nil)
	case t.residualScale != 0 && t.residualScale != 1:
		y := scaled(b, t.partial(b, prefix, p, x, nil), t.residualScale)
		return b.Node(func() (*G.Node, error) { return nn.Add(h, y) })
	}
	return t.partial(b, prefix, p, x, h)
}

// partial adds a projection of x whose input features may be split.
func (t *transformer) partial(b *Builder, prefix string, p projection, x, residual *G.Node) *G.Node {
	ws, bs := t.parameters(b, prefix, []projection{p})
	return b.Partial(x, ws[0], append(bs, nil)[0], residual)
}

// linear adds a projection of x.
func (t *transformer) linear(b *Builder, prefix string, p projection, x *G.Node, opts ...nn.Option) *G.Node {
	ws, bs := t.parameters(b, prefix, []projection{p})
	var bias *G.Node
	if bs != nil {
		bias = bs[0]
	}
	opts = b.linearOf(ws, opts...)
	return b.Node(func() (*G.Node, error) { return nn.Linear(x, ws[0], bias, opts...) })
}

// parameters returns the weights and biases of projections. All of them have biases, or none.
func (t *transformer) parameters(b *Builder, prefix string, all []projection) (ws, bs []*G.Node) {
	for _, p := range all {
		ws = append(ws, b.Weight(prefix+p.name+".weight"))
		if p.bias {
			bs = append(bs, b.Weight(prefix+p.name+".bias"))
		}
	}
	return ws, bs
}

// before returns the option of a linear layer that reads the norm of its input.
func (t *transformer) before(b *Builder, name string) nn.Option {
	gamma, beta := t.affine(b, name)
	if t.norm == layerNorm || t.norm == plainNorm {
		return nn.WithNorm(gamma, beta, t.eps)
	}
	return nn.WithRMSNorm(gamma, t.eps, t.unit()...)
}

// normed returns the norm of x, plus the residual unless that is nil.
func (t *transformer) normed(b *Builder, x *G.Node, name string, residual *G.Node) *G.Node {
	gamma, beta := t.affine(b, name)
	return b.Node(func() (*G.Node, error) {
		if t.norm == layerNorm || t.norm == plainNorm {
			y, err := nn.LayerNorm(x, gamma, beta, t.eps)
			if err != nil || residual == nil {
				return y, err
			}
			return nn.Add(residual, y)
		}
		return nn.RMSNorm(x, gamma, residual, t.eps, t.unit()...)
	})
}

// affine returns the weight and bias of a norm. A kind of norm without them has nil.
func (t *transformer) affine(b *Builder, name string) (gamma, beta *G.Node) {
	if t.norm != plainNorm {
		gamma = b.Weight(name + ".weight")
	}
	if t.norm == layerNorm {
		beta = b.Weight(name + ".bias")
	}
	return gamma, beta
}

// unit returns the option of norms that multiply by 1 + weight.
func (t *transformer) unit() []nn.Option {
	if t.norm == unitRMSNorm {
		return []nn.Option{nn.WithUnitOffset()}
	}
	return nil
}

// residual returns the option of a linear layer that adds h, unless h is nil.
func residual(h *G.Node) []nn.Option {
	if h == nil {
		return nil
	}
	return []nn.Option{nn.WithResidual(h)}
}

// scaled returns x times a factor. 0 is no factor.
func scaled(b *Builder, x *G.Node, factor float64) *G.Node {
	if factor == 0 || factor == 1 {
		return x
	}
	return b.Node(func() (*G.Node, error) { return nn.Scale(x, factor) })
}
