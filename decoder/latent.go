package decoder

import (
	"fmt"
	"math"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// latent is the multi-head latent attention of all layers: see nn.MLA. It replaces the projections of queries, keys and values.
type latent struct {
	rank              int // of queries; 0: one projection makes them
	width             int // elements of a latent vector
	nope, rope, value int // elements of a head: of queries and keys without and with rotation, and of values
	bias              bool
}

const (
	latentEps = 1e-6 // of the norms in latent attention, whatever rms_norm_eps is

	queryDown, queryNorm, queryUp, queryAll = "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.q_proj"
	latentDown, latentNorm, latentUp        = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj"
	latentKey, latentValue                  = latentUp + ".key", latentUp + ".value" // both parts of latentUp
)

// readLatent reads the fields of models with latent attention. rank, width, nope and rotated are the defaults of q_lora_rank,
// kv_lora_rank, qk_nope_head_dim and qk_rope_head_dim.
func readLatent(c *Config, eps float64, rank, width, nope, rotated int) *transformer {
	t := readGated(c, 1, eps, "hidden_act")
	if t.sizes.KVHeads != t.heads {
		c.fail(ErrUnsupported, "num_key_value_heads is %d, and num_attention_heads %d: with latent attention both are the same", t.sizes.KVHeads, t.heads)
	}
	l := &latent{
		width: c.Size("kv_lora_rank", width), nope: c.Size("qk_nope_head_dim", nope), rope: c.Size("qk_rope_head_dim", rotated),
		bias: c.Flag("attention_bias", false),
	}
	if !c.null("q_lora_rank") {
		l.rank = c.Size("q_lora_rank", rank)
	}
	l.value = c.Size("v_head_dim", max(1, t.width/t.heads))
	c.ignore("qk_head_dim") // the sum of nope and rope
	r := c.rotary(l.rope)
	if r.Dim != 0 {
		c.fail(ErrUnsupported, "partial_rotary_factor with latent attention: qk_rope_head_dim says what is rotated")
	}
	if l.rope%2 != 0 {
		c.Errorf("qk_rope_head_dim is %d, which is odd", l.rope)
	}
	t.scale = 1 / math.Sqrt(float64(l.nope)+float64(l.rope))
	if y, ok := r.Scaling.(rope.YaRN); ok && c.err == nil {
		t.scale *= y.ScoreScale()
	}
	t.latent, t.outBias = l, l.bias
	t.sizes.KVHeads, t.sizes.HeadDim, t.sizes.Latent = 1, l.width+l.rope, l.width
	r.HeadDim, r.Dim, r.Last = t.sizes.HeadDim, l.rope, true
	t.rotate(r)
	return t
}

// readMiniCPM3 reads the fields of MiniCPM 3.
func readMiniCPM3(c *Config) *transformer {
	t := readLatent(c, 1e-5, 768, 256, 64, 32)
	t.tied = c.Flag("tie_word_embeddings", true)
	t.mlpBias = c.Flag("mlp_bias", false)
	t.embeddingScale, t.residualScale, t.logitScale = c.Positive("scale_emb", 12), 1, 1
	if !c.null("scale_depth") {
		t.residualScale = c.Positive("scale_depth", 1.4) / math.Sqrt(float64(t.sizes.Layers))
	}
	if !c.null("dim_model_base") {
		t.logitScale = float64(c.Size("dim_model_base", 256)) / float64(t.width)
	}
	return t
}

// null reads a field that is present and null.
func (c *Config) null(name string) bool {
	raw, ok := c.raw(name)
	if ok = ok && string(raw) == "null"; ok {
		c.ignore(name)
	}
	return ok
}

// dense refuses a model with layers of experts. first is the default of first_k_dense_replace, the number of layers without.
func (t *transformer) dense(c *Config, first int) {
	none := c.null("n_routed_experts")
	c.Read("first_k_dense_replace", &first)
	if first < t.sizes.Layers && !none {
		c.fail(ErrUnsupported, "first_k_dense_replace is %d, and num_hidden_layers %d: the other layers have experts, which are not supported", first, t.sizes.Layers)
	}
	c.ignore("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq", "n_group", "topk_group", "topk_method",
		"scoring_func", "norm_topk_prob", "routed_scaling_factor", "aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "router_aux_loss_coef",
		"num_nextn_predict_layers") // of experts, and of layers that guess more tokens
}

func readDeepSeekV2(c *Config) *transformer {
	t := readLatent(c, 1e-6, 1536, 512, 128, 64)
	t.dense(c, 0)
	t.interleave()
	t.mlpBias = c.Flag("mlp_bias", false)
	return t
}

func readDeepSeekV3(c *Config) *transformer {
	t := readYoutu(c)
	t.tied = c.Flag("tie_word_embeddings", false)
	t.dense(c, 3)
	return t
}

// readYoutu reads the fields of Youtu-LLM, which has the attention of DeepSeek V3.
func readYoutu(c *Config) *transformer {
	t := readLatent(c, 1e-6, 1536, 512, 128, 64)
	t.tied = c.Flag("tie_word_embeddings", true)
	if c.Flag("rope_interleave", true) {
		t.interleave()
	}
	c.ignore("embedding_initializer_range") // of training
	return t
}

// interleave makes rotary embeddings turn elements 2i and 2i+1 together.
func (t *transformer) interleave() {
	for i := range t.rotary {
		t.rotary[i].Interleaved = true
	}
}

// weights returns the weights of latent attention of a layer, but for the output projection.
func (l *latent) weights(prefix string, t *transformer) (all []Weight) {
	heads := Split{ByRows, t.heads}
	add := func(name string, split Split, shape ...int) {
		all = append(all, Weight{Name: prefix + name, Shape: shape, Split: split, latent: split == heads})
	}
	in, name := t.width, queryAll
	if l.rank > 0 {
		add(queryDown+".weight", Split{}, l.rank, t.width)
		if l.bias {
			add(queryDown+".bias", Split{}, l.rank)
		}
		add(queryNorm+".weight", Split{}, l.rank)
		in, name = l.rank, queryUp
	}
	add(name+".weight", heads, t.heads*(l.nope+l.rope), in)
	add(latentDown+".weight", Split{}, l.width+l.rope, t.width)
	if l.bias {
		add(latentDown+".bias", Split{}, l.width+l.rope)
	}
	add(latentNorm+".weight", Split{}, l.width)
	up := kvUp{heads: t.heads, nope: l.nope, latent: l.width}
	rows := Rows{Name: prefix + latentUp + ".weight", Rows: t.heads * (l.nope + l.value)}
	add(latentKey, heads, t.heads*l.width, l.nope)
	all[len(all)-1].From, all[len(all)-1].up = rows, &up
	add(latentValue, heads, t.heads*l.value, l.width)
	rows.Row = l.nope
	all[len(all)-1].From, all[len(all)-1].up = rows, &up
	return all
}

// kvUp says that a weight is the keys' or the values' part of the tensor that makes both from latent vectors. The part is made when
// the weight is loaded: see nn.SplitKVUp. Row of [Rows] is 0 for keys, and nope for values.
type kvUp struct{ heads, nope, latent int }

// part returns the part of some rows of a weight: those of whole heads.
func (up *kvUp) part(from Weights, w *Weight, as tensor.Dtype, first, rows int) (*tensor.Dense, error) {
	each, of := w.Shape[0]/up.heads, w.From.Rows/up.heads
	if first%each != 0 || rows%each != 0 {
		return nil, fmt.Errorf("decoder: weight %s: rows [%d, %d) are not those of whole heads, of %d rows: %w", w.Name, first, first+rows, each, ErrConfig)
	}
	heads := rows / each
	all := Weight{Name: w.Name, Shape: []int{heads * of, up.latent}, From: Rows{w.From.Name, first / each * of, w.From.Rows}}
	t, err := part(from, &all, as, 0, heads*of)
	if err != nil {
		return nil, err
	}
	key, value, err := nn.SplitKVUp(t, heads, up.nope)
	if err != nil {
		return nil, fmt.Errorf("decoder: weight %s: %w", w.Name, err)
	}
	if w.From.Row == 0 {
		return key, nil
	}
	return value, nil
}

// latentAttention is attention with latent vectors as keys.
func (t *transformer) latentAttention(b *Builder, i int, prefix string, h *G.Node, opts []nn.Option) *G.Node {
	l := t.latent
	heads := t.heads
	if b.ranks != nil && b.slice == nil {
		from, to := b.ranks.World().Part(heads)
		heads = to - from
	}
	m := &nn.MLA{
		Heads: heads, Eps: latentEps, Down: b.Weight(prefix + latentDown + ".weight"), Norm: b.Weight(prefix + latentNorm + ".weight"),
		Key: b.Weight(prefix + latentKey), Value: b.Weight(prefix + latentValue),
	}
	if l.rank > 0 {
		m.QueryDown, m.QueryNorm, m.Query = b.Weight(prefix+queryDown+".weight"), b.Weight(prefix+queryNorm+".weight"), b.Weight(prefix+queryUp+".weight")
	} else {
		m.Query = b.Weight(prefix + queryAll + ".weight")
	}
	if l.bias {
		m.DownBias = b.Weight(prefix + latentDown + ".bias")
		if l.rank > 0 {
			m.QueryBias = b.Weight(prefix + queryDown + ".bias")
		}
	}
	return b.MLA(i, m, h, t.attends(i), opts...)
}

// attends returns the options of the attention of a layer.
func (t *transformer) attends(i int) (options []la.Option) {
	if t.rotary != nil {
		r := t.rotary[i]
		if t.latent != nil {
			r.HeadDim = 0 // that of the cache, which may have parts of latent vectors
		}
		options = append(options, la.WithRotary(r))
	}
	if t.scale > 0 {
		options = append(options, la.WithScale(t.scale))
	}
	if t.scoreCap > 0 {
		options = append(options, la.WithSoftCap(t.scoreCap))
	}
	return options
}
