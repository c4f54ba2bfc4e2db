package e2e

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	lean "gorgonia.org/leanattention/decoder"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// latentFolder writes a small model with latent attention and random weights, and random calibration data of some tokens.
func latentFolder(t *testing.T, tokens int) (dir string) {
	t.Helper()
	const layers, heads, latent, nope, rope, value = 2, 4, 32, 8, 4, 8
	rng := rand.New(rand.NewPCG(1, 2))
	config, err := json.Marshal(map[string]any{
		"model_type": "deepseek_v3", "architectures": []string{"DeepseekV3ForCausalLM"}, "vocab_size": 320, "hidden_size": 32,
		"intermediate_size": 48, "num_hidden_layers": layers, "first_k_dense_replace": layers, "num_attention_heads": heads,
		"num_key_value_heads": heads, "q_lora_rank": 24, "kv_lora_rank": latent, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
		"v_head_dim": value, "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
		"tie_word_embeddings": false,
	})
	if err != nil {
		t.Fatal(err)
	}
	n, err := lean.ReadNetwork(config, 0)
	if err != nil {
		t.Fatal(err)
	}
	header, data := map[string]any{}, []byte(nil)
	numbers := func(n int, mean, scale float64) (b []byte) {
		for range n {
			b, _ = binary.Append(b, binary.LittleEndian, float32(mean+scale*rng.NormFloat64())) // a float32 has a size
		}
		return b
	}
	for w := range n.Weights() {
		name, shape := w.Name, w.Shape
		if w.From.Name != "" {
			name, shape = w.From.Name, []int{w.From.Rows, latent}
		}
		if name != "lm_head.weight" {
			name = "model." + name
		}
		if header[name] != nil {
			continue
		}
		mean := 0.0
		if strings.Contains(name, "norm") {
			mean = 1
		}
		begin := len(data)
		data = append(data, numbers(elements(shape), mean, 0.2)...)
		header[name] = map[string]any{"dtype": "F32", "shape": shape, "data_offsets": [2]int{begin, len(data)}}
	}
	head, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	vocab, err := json.Marshal(vocabulary(320))
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	for name, data := range map[string][]byte{
		"config.json": config, "model.safetensors": append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...), data...),
		"vocab.json": vocab, "merges.txt": []byte("#version: 0.2\n"), "tokenizer_config.json": []byte(`{"tokenizer_class": "GPT2Tokenizer"}`),
		"held-out.txt": bytes.Repeat([]byte("latent vectors, "), 12), "latents.f32": numbers(layers*tokens*(latent+rope), 0, 1),
		"queries.f32": numbers(layers*tokens*heads*(nope+rope), 0, 1),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestTPLA: all figures are there, approximations differ from exact attention, and files that do not belong together are refused.
func TestTPLA(t *testing.T) {
	dir := latentFolder(t, 40)
	m, err := lean.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	f := &tplaFlags{Options: &measure.Options{}, model: dir, text: filepath.Join(dir, "held-out.txt"), context: 64, tokens: 150, shards: 2}
	r := &measure.Report{}
	if err := f.measure(m, r); err != nil {
		t.Fatal(err)
	}
	exact := r.Find("exact", "lean", perplexity)
	if exact == nil || !(exact.Value > 1) {
		t.Fatalf("exact: %+v", exact)
	}
	for _, name := range []string{"Hadamard", "Hadamard, calibrated", "PCA, calibrated"} {
		if x := r.Find(name, "lean", ofExact); x == nil || !(x.Value > 0.5 && x.Value < 2) || x.Value == 1 {
			t.Errorf("%s: %+v", name, x)
		}
		if name == "Hadamard" {
			continue
		}
		both, behind := r.Find(name, "lean", "both"), r.Find(name, "lean", "both, behind an exact prompt")
		if both == nil || behind == nil || !(0 < behind.Value && behind.Value < both.Value && both.Value < 2) {
			t.Errorf("%s: errors %+v, %+v", name, both, behind)
		}
	}
	if err := os.Truncate(filepath.Join(dir, "queries.f32"), 1000); err != nil {
		t.Fatal(err)
	}
	if err := f.measure(m, &measure.Report{}); err == nil || !strings.Contains(err.Error(), "queries.f32 has 1000 bytes") {
		t.Errorf("queries of 1000 bytes: %v", err)
	}
}
