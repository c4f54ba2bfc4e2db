package decoder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/rope"

	"gorgonia.org/tensor"
)

// Configurations as models with latent attention were published with them, the second one without experts.
const (
	publishedMiniCPM3 = `{"architectures": ["MiniCPM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
		"auto_map": {"AutoConfig": "configuration_minicpm.MiniCPM3Config"}, "bos_token_id": 1, "eos_token_id": [2, 73440],
		"hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.1, "intermediate_size": 6400, "max_position_embeddings": 32768,
		"model_type": "minicpm3", "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40, "q_lora_rank": 768,
		"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
		"rope_scaling": {"type": "longrope", "long_factor": [1, 2], "short_factor": [1, 3], "original_max_position_embeddings": 32768},
		"torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 73448, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}`
	publishedV2Lite = `{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
		"bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
		"initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
		"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
		"num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1,
		"q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
		"rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
			"original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
		"seq_aux": true, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "use_cache": true,
		"v_head_dim": 128, "vocab_size": 102400}`
)

// TestLatentConfigs: published configurations give the sizes, scales and rotary embeddings that they say, and experts are refused
// by name.
func TestLatentConfigs(t *testing.T) {
	factors := func(first float64) []float64 { return slices.Repeat([]float64{first}, 16) }
	long := strings.NewReplacer("[1, 2]", strings.ReplaceAll(fmt.Sprint(factors(2)), " ", ","), "[1, 3]", strings.ReplaceAll(fmt.Sprint(factors(3)), " ", ",")).Replace(publishedMiniCPM3)
	m := 0.1*0.707*math.Log(40) + 1
	for _, c := range []struct {
		file   string
		sizes  Sizes
		latent latent
		rotary rope.Config
		scales [4]float64 // of scores, embedding, residuals and logits
		tied   bool
	}{
		{
			long, Sizes{Vocab: 73448, Context: 32768, Layers: 62, KVHeads: 1, HeadDim: 288, Latent: 256}, latent{rank: 768, width: 256, nope: 64, rope: 32, value: 64},
			rope.Config{HeadDim: 288, Dim: 32, Last: true, Base: 10000, Scaling: rope.LongRoPE{Factors: factors(3), Attention: 1}},
			[4]float64{1 / math.Sqrt(96), 12, 1.4 / math.Sqrt(62), 0.1}, true,
		},
		{
			strings.Replace(publishedV2Lite, `"first_k_dense_replace": 1`, `"first_k_dense_replace": 27`, 1),
			Sizes{Vocab: 102400, Context: 163840, Layers: 27, KVHeads: 1, HeadDim: 576, Latent: 512}, latent{width: 512, nope: 128, rope: 64, value: 128},
			rope.Config{HeadDim: 576, Dim: 64, Last: true, Interleaved: true, Base: 10000, Scaling: rope.YaRN{Factor: 40, Context: 4096, BetaFast: 32, BetaSlow: 1, MScale: 0.707, MScaleAllDim: 0.707}},
			[4]float64{m * m / math.Sqrt(192)}, false,
		},
		{
			strings.Replace(publishedV2Lite, `"n_routed_experts": 64`, `"n_routed_experts": null`, 1),
			Sizes{Vocab: 102400, Context: 163840, Layers: 27, KVHeads: 1, HeadDim: 576, Latent: 512}, latent{width: 512, nope: 128, rope: 64, value: 128},
			rope.Config{HeadDim: 576, Dim: 64, Last: true, Interleaved: true, Base: 10000, Scaling: rope.YaRN{Factor: 40, Context: 4096, BetaFast: 32, BetaSlow: 1, MScale: 0.707, MScaleAllDim: 0.707}},
			[4]float64{m * m / math.Sqrt(192)}, false,
		},
	} {
		n, _, err := readNetwork("config.json", []byte(c.file), 0)
		if err != nil {
			t.Errorf("%s: %v", c.file, err)
			continue
		}
		x := n.(*transformer)
		if !reflect.DeepEqual(x.sizes, c.sizes) || *x.latent != c.latent || x.tied != c.tied {
			t.Errorf("%s:\n%+v, %+v", c.file, x.sizes, *x.latent)
		}
		if len(x.rotary) != c.sizes.Layers || !reflect.DeepEqual(x.rotary[0], c.rotary) {
			t.Errorf("%s: rotary %+v, want %+v", c.file, x.rotary[0], c.rotary)
		}
		for i, got := range []float64{x.scale, x.embeddingScale, x.residualScale, x.logitScale} {
			if math.Abs(got-c.scales[i]) > 1e-12 {
				t.Errorf("%s: scale %d is %v, want %v", c.file, i, got, c.scales[i])
			}
		}
	}
	v3 := strings.NewReplacer("deepseek_v2", "deepseek_v3", "DeepseekV2", "DeepseekV3").Replace(publishedV2Lite)
	for _, c := range []struct {
		file, old, new string
		kind           error
		text           string
	}{
		{publishedV2Lite, "", "", ErrUnsupported, "first_k_dense_replace is 1, and num_hidden_layers 27: the other layers have experts"},
		{publishedV2Lite, `"first_k_dense_replace": 1, `, "", ErrUnsupported, "first_k_dense_replace is 0, and num_hidden_layers 27: the other layers have experts"},
		{v3, `"first_k_dense_replace": 1, `, "", ErrUnsupported, "first_k_dense_replace is 3, and num_hidden_layers 27: the other layers have experts"},
		{v3, `"first_k_dense_replace": 1`, `"first_k_dense_replace": 99, "rope_interleave": 1`, ErrFormat, "rope_interleave"},
		{long, `"num_key_value_heads": 40`, `"num_key_value_heads": 8`, ErrUnsupported, "num_key_value_heads is 8, and num_attention_heads 40"},
		{long, `"qk_rope_head_dim": 32`, `"qk_rope_head_dim": 31`, ErrFormat, "qk_rope_head_dim is 31, which is odd"},
		{long, `"qk_nope_head_dim": 64`, `"qk_nope_head_dim": 0`, ErrFormat, "qk_nope_head_dim is 0"},
		{long, `"kv_lora_rank": 256`, `"kv_lora_rank": null`, nil, ""}, // the default
		{long, `"use_cache": true`, `"partial_rotary_factor": 0.5`, ErrUnsupported, "partial_rotary_factor"},
		{long, `"use_cache": true`, `"n_routed_experts": 4`, ErrUnsupported, "n_routed_experts"},
		{long, `"scale_depth": 1.4`, `"scale_depth": -1`, ErrFormat, "scale_depth is -1"},
		{long, `"scale_depth": 1.4`, `"scale_depth": null`, nil, ""},
		{long, `"model_type": "minicpm3"`, `"model_type": "kimi_linear"`, ErrUnsupported, "kimi_linear"},
		{v3, `"model_type": "deepseek_v3"`, `"model_type": "kimi_k2", "quantization_config": {"quant_method": "fp8"}`, ErrUnsupported, "the other layers have experts"},
		{long, `"use_cache": true`, `"quantization_config": {"quant_method": "exl2"}`, ErrUnsupported, "quantized"},
	} {
		file := strings.Replace(c.file, c.old, c.new, 1)
		if c.old != "" && file == c.file {
			t.Fatalf("%q is not in the file", c.old)
		}
		_, _, err := readNetwork("config.json", []byte(file), 0)
		if !errors.Is(err, c.kind) || err != nil && !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s for %s: %v, want %v with %q", c.new, c.old, err, c.kind, c.text)
		}
	}
}

// latentModels returns the golden models with latent attention.
func latentModels(t testing.TB) (models []goldenModel) {
	for _, m := range readGolden(t) {
		if m.latent(t) {
			models = append(models, m)
		}
	}
	if len(models) < 4 {
		t.Fatalf("%d models", len(models))
	}
	return models
}

// TestLatentEngine: texts of models with latent attention are those of one text alone: in batches with chunks of any size, with guesses,
// forked, with caches and weights of 16 bits, and batch-invariant.
func TestLatentEngine(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2)) // the same in all runs: two tokens may be as likely up to rounding
	for _, m := range latentModels(t) {
		for i, o := range []Options{
			{}, {BatchInvariant: true}, {Cache: la.BFloat16}, {Cache: la.Float16, Weights: la.Float16}, {Weights: la.BFloat16, Exact: true, Schedule: la.FixedSplit(2)},
		} {
			t.Run(fmt.Sprint(m.Name, i), func(t *testing.T) {
				prompts := make([][]int, 4)
				for i := range prompts {
					prompts[i] = slices.Clone(m.Prompts[0][:1+rng.IntN(len(m.Prompts[0]))])
					for range rng.IntN(60) {
						prompts[i] = append(prompts[i], rng.IntN(64))
					}
				}
				var want [][]int
				for _, chunk := range []int{0, 4 + rng.IntN(20)} {
					if chunk > 0 { // in the other form from the first token on
						expandFrom(t, 1)
					}
					o := o
					o.Context, o.Batch, o.Chunk, o.Draft = 200, 4, chunk, 5
					e := goldenEngine(t, &m, o)
					defer e.Close()
					var texts []*Text
					for i, p := range prompts {
						text, err := e.Start(context.Background(), Request{Prompt: p, Tokens: 12, Draft: 4 * (i % 2), Ends: []int{}})
						if err != nil {
							t.Fatal(err)
						}
						texts = append(texts, text)
					}
					var all [][]int
					for _, text := range texts {
						var said []int
						for token, err := range text.Tokens() {
							if err != nil {
								t.Fatal(err)
							}
							said = append(said, token.ID)
						}
						all = append(all, said)
					}
					for i, p := range prompts { // a beginning that ended texts have is shared
						all = append(all, alone(t, e, Request{Prompt: append(slices.Clone(p), all[i][:4]...), Tokens: 8, Ends: []int{}}))
						if tokens := all[len(all)-1]; !slices.Equal(tokens, all[i][4:]) && o.Cache == (tensor.Dtype{}) {
							t.Errorf("text %d goes on with %v, want %v", i, tokens, all[i][4:])
						}
					}
					if want == nil {
						want = all
					} else if o.Cache == (tensor.Dtype{}) && !slices.EqualFunc(all, want, slices.Equal) {
						t.Errorf("chunks of %d: %v, want %v", chunk, all, want)
					}
				}
			})
		}
	}
}

// expandFrom makes keys and values of all heads for steps of n rows and more.
func expandFrom(t testing.TB, n int) {
	before := leastExpanded
	t.Cleanup(func() { leastExpanded = before })
	leastExpanded = n
}

// TestLatentExpanded: prompts whose keys and values of all heads are made have transformers' logits within 1e-4, and go on with latent
// vectors. Steps with another text take latent vectors alone.
func TestLatentExpanded(t *testing.T) {
	expandFrom(t, 1)
	for _, m := range latentModels(t) {
		e := goldenEngine(t, &m, Options{Context: 256, Batch: 4, Exact: true})
		vocab := e.network.Sizes().Vocab
		want := readRows(t, m.File, vocab)
		var appends []la.Append
		var last []int // row of want
		for _, ids := range m.Prompts {
			s, err := e.newSequence()
			if err != nil {
				t.Fatal(err)
			}
			defer s.Release()
			appends = append(appends, la.Append{Seq: s, Tokens: len(ids)})
			last = append(last, len(ids))
		}
		check := func(what string, logits []float32, rows []int) {
			t.Helper()
			at := 0
			for i, row := range rows {
				at += row
				for j, w := range want[at-1] {
					if got := logits[i*vocab+j]; !(math.Abs(float64(got-w)) <= 1e-4) {
						t.Fatalf("%s, %s: text %d, logit %d: %v, want %v", m.Name, what, i, j, got, w)
					}
				}
			}
		}
		r, err := e.run(appends, slices.Concat(m.Prompts...), false, true, nil)
		if err != nil {
			t.Fatal(err)
		}
		check("together", r.logits, last)
		expanded := e.prompts.step.AttentionTime()
		if expanded == 0 {
			t.Errorf("%s: a prompt took latent vectors", m.Name)
		}
		for i, n := range m.Next[:5] { // text 0 goes on
			r, err := e.run([]la.Append{{Seq: appends[0].Seq, Tokens: 1}}, []int{n}, false, true, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := slices.Index(r.logits[:vocab], slices.Max(r.logits[:vocab])); got != m.Next[i+1] {
				t.Errorf("%s: token %d is %d, want %d", m.Name, i+1, got, m.Next[i+1])
			}
		}
		s, err := e.newSequence()
		if err != nil {
			t.Fatal(err)
		}
		defer s.Release()
		beside := []la.Append{{Seq: s, Tokens: len(m.Prompts[0])}, {Seq: appends[1].Seq, Tokens: 2}}
		if r, err = e.run(beside, append(slices.Clone(m.Prompts[0]), 1, 2), false, true, nil); err != nil {
			t.Fatal(err)
		}
		check("beside a text with tokens", r.logits, []int{len(m.Prompts[0])})
		if e.prompts.step.AttentionTime() != expanded {
			t.Errorf("%s: another step has expanded keys", m.Name)
		}
		invariant := goldenEngine(t, &m, Options{Context: 256, Batch: 4, BatchInvariant: true})
		if invariant.prompts != nil {
			t.Errorf("%s: two forms with batch invariance", m.Name)
		}
	}
}

// TestLatentBytes: the cache of a model has latent vectors alone.
func TestLatentBytes(t *testing.T) {
	m := latentModels(t)[0]
	e := goldenEngine(t, &m, Options{Context: 256, Batch: 1, Cache: la.Float16})
	if n, err := e.cache.Config().Bytes(); err != nil || n != 2*256*(24+8)*2 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestGPULatent: steps of models with latent vectors of 512 and 64 elements are those of the CPU.
func TestGPULatent(t *testing.T) { testGPULatent(t, devicetest.Open(t)) }

// TestGPUsLatent: the same on two GPUs, each of which has all latent vectors and some of the heads.
func TestGPUsLatent(t *testing.T) { testGPULatent(t, devicetest.OpenSome(t, 2)) }

func testGPULatent(t *testing.T, gpu *device.GPU) {
	for i, m := range latentModels(t) {
		if i > 0 && testing.Short() {
			break
		}
		fields := map[string]any{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 24, "num_hidden_layers": 2, "q_lora_rank": []any{24, 24, nil, 24, 40}[i%5]}
		if m.Name == "minicpm3" { // its factors are those of another qk_rope_head_dim
			fields["rope_parameters"], fields["rope_scaling"] = nil, nil
		}
		n := m.changed(t, fields).network(t)
		o := Options{Device: gpu, Cache: []tensor.Dtype{la.Float16, la.BFloat16, la.E4M3, tensor.Float32}[i%4], Weights: []tensor.Dtype{la.BFloat16, {}, la.Float16}[i%3]}
		t.Run(m.Name, func(t *testing.T) {
			stepsAgainstCPU(t, func(o Options) (*Engine, error) { return NewEngine(n, fanWeights{}, o) }, o, 3, 4, 0.02)
		})
	}
}

// TestGPULatentRefused: a latent vector of a size without kernels.
func TestGPULatentRefused(t *testing.T) {
	n := latentModels(t)[0].changed(t, map[string]any{"kv_lora_rank": 20}).network(t)
	testLatentRefused(t, devicetest.Open(t), n, la.ErrUnsupported, "latent attention of 20 and 8 elements on a GPU: use the CPU", Options{})
}

// TestGPUsLatentRefused: fewer heads than GPUs.
func TestGPUsLatentRefused(t *testing.T) {
	m := latentModels(t)[0]
	one := m.changed(t, map[string]any{"num_attention_heads": 1, "num_key_value_heads": 1})
	testLatentRefused(t, devicetest.OpenSome(t, 2), one.network(t), la.ErrUnsupported, "1 query head on", Options{})
}

func testLatentRefused(t *testing.T, gpu *device.GPU, n Network, kind error, text string, o Options) {
	o.Device, o.Context, o.Cache = gpu, 100, la.Float16
	_, err := NewEngine(n, fanWeights{}, o)
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		t.Error(err)
	}
}

// TestLatentWeights: the parts of a tensor with keys and values are those of its rows, for all heads and for some.
func TestLatentWeights(t *testing.T) {
	m := latentModels(t)[0]
	n := m.network(t).(*transformer)
	from := goldenWeights{&m, false, tensor.Dtype{}}
	l := n.latent
	raw, err := from.Tensor("layers.1."+latentUp+".weight", n.heads*(l.nope+l.value), l.width)
	if err != nil {
		t.Fatal(err)
	}
	at := func(row, column int) float32 { return raw.Data().([]float32)[row*l.width+column] }
	checked := 0
	for w := range n.Weights() {
		if w.up == nil || !strings.HasPrefix(w.Name, "layers.1.") {
			continue
		}
		rows := w.Shape[0] / n.heads
		for _, heads := range [][2]int{{0, n.heads}, {1, 2}} {
			got, err := part(from, &w, tensor.Dtype{}, heads[0]*rows, heads[1]*rows)
			if err != nil {
				t.Fatal(err)
			}
			x := got.Data().([]float32)
			for i := range x {
				h, r, c := heads[0]+i/(rows*w.Shape[1]), i/w.Shape[1]%rows, i%w.Shape[1]
				if r += l.nope; strings.HasSuffix(w.Name, latentKey) { // keys are transposed
					r, c = c, r-l.nope
				}
				if want := at(h*(l.nope+l.value)+r, c); x[i] != want {
					t.Fatalf("%s, heads from %d on: element %d is %v", w.Name, heads[0], i, x[i])
				}
				checked++
			}
		}
		if _, err := part(from, &w, tensor.Dtype{}, 1, rows); !errors.Is(err, ErrConfig) {
			t.Errorf("rows of no whole heads: %v", err)
		}
	}
	if checked == 0 {
		t.Error("no weights")
	}
}

// latent reports whether a model has latent attention.
func (m *goldenModel) latent(t testing.TB) bool {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(m.Config, &fields); err != nil {
		t.Fatal(err)
	}
	return fields["kv_lora_rank"] != nil
}

// adaptedWeights adds an adapter to one weight of a golden model.
type adaptedWeights struct {
	goldenWeights
	name string
	a, b []float32 // (rank, in) and (out, rank)
	rank int
}

func (w adaptedWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	t, err := w.goldenWeights.Tensor(name, shape...)
	if err != nil || name != w.name {
		return t, err
	}
	x := t.Data().([]float32)
	for i := range x {
		for r := range w.rank {
			x[i] += w.b[i/shape[1]*w.rank+r] * w.a[r*shape[1]+i%shape[1]]
		}
	}
	return t, nil
}

// TestLatentAdapter: an adapter of the matrix of keys and values changes both parts of the matrix.
func TestLatentAdapter(t *testing.T) {
	const rank, name = 2, "layers.1." + latentUp + ".weight"
	m := goldenModelOf(t, "deepseek_v3")
	golden := m.files.(goldenSource).goldenWeights
	n := m.network.(*transformer)
	out, in := n.heads*(n.latent.nope+n.latent.value), n.latent.width
	a, b := goldenValues("a", rank*in), goldenValues("b", out*rank)
	rows := func(x []float32, columns int) func(from, to int) ([]float32, error) {
		return func(from, to int) ([]float32, error) { return x[from*columns : to*columns], nil }
	}
	m.addDeltas(map[string]delta{name: {1, rank, rows(a, in), rows(b, rank)}}, func() error { return nil })
	logits := func(e *Engine, err error) []float32 {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		s, err := e.newSequence()
		if err != nil {
			t.Fatal(err)
		}
		prompt := golden.Prompts[0]
		r, err := e.run([]la.Append{{Seq: s, Tokens: len(prompt)}}, prompt, false, true, nil)
		if err != nil {
			t.Fatal(err)
		}
		return slices.Clone(r.logits[:64])
	}
	o := Options{Context: 100}
	got, want := logits(m.Engine(o)), logits(NewEngine(m.network, adaptedWeights{golden, name, a, b, rank}, o))
	plain := logits(NewEngine(m.network, golden, o))
	changed := float32(0)
	for i := range want {
		if d := got[i] - want[i]; d > 1e-4 || -d > 1e-4 {
			t.Fatalf("logit %d is %v, want %v", i, got[i], want[i])
		}
		changed = max(changed, want[i]-plain[i], plain[i]-want[i])
	}
	if changed < 0.01 {
		t.Errorf("the adapter changes logits by %v", changed)
	}
}
