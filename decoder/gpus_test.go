package decoder

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"

	"gorgonia.org/tensor"
)

// changed returns a golden model with other fields in its configuration.
func (m goldenModel) changed(t testing.TB, fields map[string]any) *goldenModel {
	t.Helper()
	var config map[string]any
	err := json.Unmarshal(m.Config, &config)
	for name, value := range fields {
		config[name] = value
	}
	if err == nil {
		m.Config, err = json.Marshal(config)
	}
	if err != nil {
		t.Fatal(err)
	}
	return &m
}

// severalHeads returns the golden models with two KV heads at least, for several GPUs.
func severalHeads(t testing.TB) (models []*goldenModel) {
	t.Helper()
	for _, m := range readGolden(t) {
		var config struct {
			ModelType string `json:"model_type"`
			KVHeads   int    `json:"num_key_value_heads"`
			Embedding int    `json:"word_embed_proj_dim"`
		}
		if err := json.Unmarshal(m.Config, &config); err != nil {
			t.Fatal(err)
		}
		fields := map[string]any{}
		switch {
		case config.ModelType == "opt":
			fields["num_attention_heads"], fields["hidden_size"] = 2, 128
			if config.Embedding == 64 {
				fields["word_embed_proj_dim"] = 128
			}
		case config.KVHeads == 1:
			fields["num_key_value_heads"] = 2
		}
		models = append(models, m.changed(t, fields))
		if m.Name == "llama3" || m.Name == "deepseek_v2_lite" { // features of the MLP that GPUs cannot share as heads
			fields["intermediate_size"] = 104
			uneven := m.changed(t, fields)
			uneven.Name += "_uneven"
			models = append(models, uneven)
		}
	}
	return models
}

// TestGPUsFamilies: on two GPUs, which share weights and cache, logits and greedy texts of all families are those of the CPU.
func TestGPUsFamilies(t *testing.T) {
	gpus := devicetest.OpenSome(t, 2)
	for _, m := range severalHeads(t) {
		t.Run(m.Name, func(t *testing.T) {
			if testing.Short() && !slices.Contains([]string{"llama3", "llama3_uneven", "qwen3", "olmo2", "opt", "opt_post", "gemma2", "deepseek_v3", "deepseek_v2_lite_uneven"}, m.Name) {
				t.Skip("an emulated GPU is slow")
			}
			sums, err := (&placement{gpu: gpus}).check(m.network(t))
			if err != nil || sums != (m.Name != "olmo2" && !strings.HasSuffix(m.Name, "_uneven")) {
				t.Fatalf("GPUs add partial sums: %v, %v", sums, err)
			}
			type result struct {
				logits []float32
				texts  [][]int
			}
			var all []result
			for _, o := range []Options{{}, {Device: gpus}} {
				o.Batch, o.Context, o.Exact = 4, 200, true
				e := goldenEngine(t, m, o)
				var appends []la.Append
				for _, ids := range m.Prompts {
					s, err := e.newSequence()
					if err != nil {
						t.Fatal(err)
					}
					appends = append(appends, la.Append{Seq: s, Tokens: len(ids)})
				}
				computed, err := e.run(appends, slices.Concat(m.Prompts...), false, true, nil)
				if err != nil {
					t.Fatal(err)
				}
				r := result{logits: slices.Clone(computed.logits[:len(appends)*e.network.Sizes().Vocab])}
				for _, a := range appends {
					if err := a.Seq.Release(); err != nil {
						t.Fatal(err)
					}
				}
				r.texts = [][]int{alone(t, e, Request{Prompt: m.Prompts[0], Tokens: 6, Ends: []int{}})}
				all = append(all, r)
			}
			for i, want := range all[0].logits {
				if got := all[1].logits[i]; !(math.Abs(float64(got-want)) <= 1e-4) {
					t.Fatalf("logit %d: %v, want %v", i, got, want)
				}
			}
			if !slices.EqualFunc(all[0].texts, all[1].texts, slices.Equal) {
				t.Errorf("continued with %v, want %v", all[1].texts, all[0].texts)
			}
		})
	}
}

// TestGPUsContext: two GPUs share the pages of networks with one KV head, with and without rotary embeddings, and of one with latent vectors.
func TestGPUsContext(t *testing.T) {
	gpus := devicetest.OpenSome(t, 2)
	for _, m := range readGolden(t) {
		if !slices.Contains([]string{"opt", "llama3", "deepseek_v3"}, m.Name) {
			continue
		}
		var texts [][]int
		for _, o := range []Options{{}, {Device: gpus, Shard: la.ShardContext}} {
			o.Context, o.Batch, o.Exact, o.Chunk = 200, 3, true, 40
			e := goldenEngine(t, &m, o)
			texts = append(texts, alone(t, e, Request{Prompt: m.Prompts[0], Tokens: 6, Ends: []int{}}))
			other, err := e.Start(context.Background(), Request{Prompt: m.Prompts[1], Tokens: 5, Ends: []int{}})
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, alone(t, e, Request{Prompt: slices.Concat(m.Prompts...), Tokens: 5, Ends: []int{}}))
			if _, err := ids(other); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.EqualFunc(texts[:2], texts[2:], slices.Equal) {
			t.Errorf("%s: %v, want %v", m.Name, texts[2:], texts[:2])
		}
		if m.Name == "llama3" {
			_, err := NewEngine(m.network(t), goldenWeights{&m, false, tensor.Dtype{}}, Options{Device: gpus, Context: 200, Batch: 1, Shard: la.ShardHeads})
			if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "KV head") {
				t.Errorf("heads: %v", err)
			}
		}
	}
}
