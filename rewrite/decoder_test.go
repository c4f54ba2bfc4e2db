package rewrite_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const (
	opsLayers, opsHeads, opsDim, opsWidth, opsVocab = 3, 4, 8, 32, 61

	opsConfig = `{"model_type":"opt","vocab_size":61,"hidden_size":32,"word_embed_proj_dim":32,"ffn_dim":48,"num_hidden_layers":3,
		"num_attention_heads":4,"max_position_embeddings":40,"do_layer_norm_before":true,"activation_function":"relu"}`
)

// seededWeights has random weights, the same ones for the same name.
type seededWeights uint64

func (s seededWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	h := fnv.New64a()
	h.Write([]byte(name))
	rng := rand.New(rand.NewPCG(uint64(s), h.Sum64()))
	data := make([]float32, tensor.Shape(shape).TotalSize())
	for i := range data {
		data[i] = float32(rng.NormFloat64() * 1.5 / math.Sqrt(float64(shape[len(shape)-1])))
		if strings.HasSuffix(name, "norm.weight") {
			data[i]++
		}
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data)), nil
}

// opsDecoder writes a decoder of OPT's family with Gorgonia's own nodes, as its users first write one. Embeddings and norms are
// nodes of package nn.
type opsDecoder struct {
	t       *testing.T
	g       *G.ExprGraph
	weights seededWeights
	batch   int
	tokens  int // of each text
	mask    *G.Node
}

func (d *opsDecoder) must(n *G.Node, err error) *G.Node {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
	return n
}

func (d *opsDecoder) input(name string, v *tensor.Dense) *G.Node {
	return G.NewTensor(d.g, v.Dtype(), v.Dims(), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
}

func (d *opsDecoder) weight(name string, shape ...int) *G.Node {
	v, _ := d.weights.Tensor("decoder."+name, shape...)
	return d.input(name, v)
}

// linear returns x wᵀ + bias.
func (d *opsDecoder) linear(x *G.Node, name string, out int) *G.Node {
	y := d.must(G.BatchedMatMul(x, d.weight(name+".weight", out, x.Shape()[1]), false, true))
	bias, _ := d.weights.Tensor("decoder."+name+".bias", out)
	row := d.input(name+".bias", tensor.New(tensor.WithShape(1, out), tensor.WithBacking(bias.Data())))
	return d.must(G.BroadcastAdd(y, row, nil, []byte{0}))
}

func (d *opsDecoder) norm(x *G.Node, name string) *G.Node {
	return d.must(nn.LayerNorm(x, d.weight(name+".weight", opsWidth), d.weight(name+".bias", opsWidth), 1e-5))
}

// heads returns rows (B T, H d) as (B H, T, d).
func (d *opsDecoder) heads(x *G.Node) *G.Node {
	x = d.must(G.Reshape(x, tensor.Shape{d.batch, d.tokens, opsHeads, opsDim}))
	x = d.must(G.Transpose(x, 0, 2, 1, 3))
	return d.must(G.Reshape(x, tensor.Shape{d.batch * opsHeads, d.tokens, opsDim}))
}

// attention returns softmax(q kᵀ / sqrt(d) + causal) v of heads.
func (d *opsDecoder) attention(q, k, v *G.Node) *G.Node {
	scores := d.must(G.BatchedMatMul(q, k, false, true))
	scores = d.must(G.HadamardDiv(scores, G.NewConstant(float32(math.Sqrt(opsDim)), G.WithName("scale"))))
	scores = d.must(G.BroadcastAdd(scores, d.mask, nil, []byte{0}))
	return d.must(G.BatchedMatMul(d.must(G.SoftMax(scores, 2)), v))
}

// standard is attention with the node of la.Default.
func (d *opsDecoder) standard(q, k, v *G.Node) *G.Node {
	for _, x := range []**G.Node{&q, &k, &v} {
		*x = d.must(G.Reshape(*x, tensor.Shape{d.batch, opsHeads, d.tokens, opsDim}))
	}
	return d.must(la.Default(q, k, v, la.WithCausal()))
}

// logits returns the logits of all tokens of the texts, which have one length.
func (d *opsDecoder) logits(texts [][]int, attend func(q, k, v *G.Node) *G.Node) *G.Node {
	d.batch, d.tokens = len(texts), len(texts[0])
	var ids, positions []int
	for _, text := range texts {
		for i, id := range text {
			ids, positions = append(ids, id), append(positions, i+2)
		}
	}
	mask := make([]float32, d.tokens*d.tokens)
	for i := range mask {
		if i%d.tokens > i/d.tokens {
			mask[i] = -1e30
		}
	}
	d.mask = d.g.AddNode(G.NewConstant(tensor.New(tensor.WithShape(1, d.tokens, d.tokens), tensor.WithBacking(mask)), G.WithName("causal")))
	vector := func(name string, x []int) *G.Node {
		return d.input(name, tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)))
	}
	table := d.weight("embed_tokens.weight", opsVocab, opsWidth)
	h := d.must(nn.Embedding(table, vector("tokens", ids), nil))
	h = d.must(G.Add(h, d.must(nn.Embedding(d.weight("embed_positions.weight", 42, opsWidth), vector("positions", positions), nil))))
	for i := range opsLayers {
		name := fmt.Sprintf("layers.%d.", i)
		x := d.norm(h, name+"self_attn_layer_norm")
		var qkv []*G.Node
		for _, p := range []string{"q_proj", "k_proj", "v_proj"} {
			qkv = append(qkv, d.heads(d.linear(x, name+"self_attn."+p, opsWidth)))
		}
		o := d.must(G.Reshape(attend(qkv[0], qkv[1], qkv[2]), tensor.Shape{d.batch, opsHeads, d.tokens, opsDim}))
		o = d.must(G.Reshape(d.must(G.Transpose(o, 0, 2, 1, 3)), tensor.Shape{d.batch * d.tokens, opsWidth}))
		h = d.must(G.Add(h, d.linear(o, name+"self_attn.out_proj", opsWidth)))
		x = d.must(G.Rectify(d.linear(d.norm(h, name+"final_layer_norm"), name+"fc1", 48)))
		h = d.must(G.Add(h, d.linear(x, name+"fc2", opsWidth)))
	}
	return d.must(G.BatchedMatMul(d.norm(h, "final_layer_norm"), table, false, true))
}

// TestFuseDecoder: a whole decoder of Gorgonia's own nodes, as written, rewritten by Fuse, and with the node of la.Default has the
// log-probabilities of package decoder, of every token of several texts.
func TestFuseDecoder(t *testing.T) {
	rng := reftest.Rand(t)
	weights := seededWeights(rng.Uint64())
	network, err := decoder.ReadNetwork([]byte(opsConfig), 40)
	if err != nil {
		t.Fatal(err)
	}
	e, err := decoder.NewEngine(network, weights, decoder.Options{Exact: true})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	texts := make([][]int, 3)
	var want [][]float64
	for i := range texts {
		for range 11 {
			texts[i] = append(texts[i], rng.IntN(opsVocab))
		}
		p, err := e.LogProbs(context.Background(), texts[i])
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, p)
	}
	for _, way := range []string{"as written", "fused", "default"} {
		d := &opsDecoder{t: t, g: G.NewGraph(), weights: weights}
		attend := d.attention
		if way == "default" {
			attend = d.standard
		}
		logits, graph := d.logits(texts, attend), d.g
		if way == "fused" {
			f, err := rewrite.Fuse(logits)
			if err != nil || len(f.Matches) != opsLayers || len(f.Misses) > 0 {
				t.Fatalf("%v, %v", f, err)
			}
			graph, logits = f.Graph, f.Roots[0]
			for _, n := range graph.AllNodes() {
				if n.Op() != nil && strings.Contains(n.Op().String(), "Softmax") {
					t.Errorf("%v is left", n)
				}
			}
		}
		m := G.NewTapeMachine(graph)
		if err := m.RunAll(); err != nil {
			t.Fatalf("%s: %v", way, err)
		}
		rows := logits.Value().Data().([]float32)
		for i, text := range texts {
			for j, next := range text[1:] {
				row := rows[(i*len(text)+j)*opsVocab:][:opsVocab]
				sum := 0.0
				for _, x := range row {
					sum += math.Exp(float64(x))
				}
				if got := float64(row[next]) - math.Log(sum); !(math.Abs(got-want[i][j]) <= 1e-4) {
					t.Errorf("%s: text %d, token %d: %v, want %v", way, i, j+1, got, want[i][j])
				}
			}
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}
