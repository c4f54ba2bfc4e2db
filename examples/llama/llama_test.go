package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"
)

// writeModel writes a folder with random weights, and the shipped model's tokenizer.
func writeModel(t *testing.T, change map[string]any) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"} {
		data, err := tiny.Files.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	vocab := map[string]int{}
	data, _ := tiny.Files.ReadFile("vocab.json")
	if err := json.Unmarshal(data, &vocab); err != nil {
		t.Fatal(err)
	}
	config := map[string]any{
		"model_type": "llama", "vocab_size": len(vocab), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
		"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu", "eos_token_id": 2,
	}
	for name, x := range change {
		config[name] = x
	}
	text, err := json.Marshal(config)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	network, err := decoder.ReadNetwork(text, 0)
	if err != nil {
		return dir
	}
	rng := rand.New(rand.NewPCG(1, 2))
	header, body := map[string]any{}, []byte{}
	for w := range network.Weights() {
		if w.From.Name != "" {
			continue
		}
		begin, n := len(body), 1
		for _, d := range w.Shape {
			n *= d
		}
		for range n {
			x := rng.NormFloat64() / 5
			if len(w.Shape) == 1 {
				x++
			}
			body = binary.LittleEndian.AppendUint16(body, uint16(math.Float32bits(float32(x))>>16)) // bfloat16, cut off
		}
		name := "model." + w.Name
		if w.Name == "lm_head.weight" {
			name = w.Name
		}
		header[name] = map[string]any{"dtype": "BF16", "shape": w.Shape, "data_offsets": []int{begin, len(body)}}
	}
	head, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	file := append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(head))), head...), body...)
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors"), file, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestText: the text is that of package decoder.
func TestText(t *testing.T) {
	prompt := strings.Repeat("Once upon a time there was a king. ", 20) // more tokens than a step has rows
	for _, change := range []map[string]any{nil, {"tie_word_embeddings": true}, {"head_dim": 32, "rope_theta": nil, "rope_parameters": map[string]any{"rope_type": "default", "rope_theta": 5e5}}} {
		dir := writeModel(t, change)
		var out bytes.Buffer
		if err := run(dir, prompt, 30, &out); err != nil {
			t.Fatal(err)
		}
		m, err := decoder.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		e, err := m.Engine(decoder.Options{Cache: la.Float16})
		if err != nil {
			t.Fatal(err)
		}
		ids, err := m.Tokenizer().Encode(prompt, tokenizer.Options{})
		if err != nil || len(ids) <= rows {
			t.Fatalf("%d tokens, %v", len(ids), err)
		}
		text, err := e.Start(context.Background(), decoder.Request{Prompt: ids, Tokens: 30})
		if err != nil {
			t.Fatal(err)
		}
		want, err := text.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if got := out.String(); got != prompt+want+"\n" || len(want) < 20 {
			t.Errorf("%v: %q, want %q", change, got, prompt+want+"\n")
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestErrors: what the example does not have is refused, and so are files that are not there.
func TestErrors(t *testing.T) {
	for want, dir := range map[string]string{
		"biases true":            writeModel(t, map[string]any{"attention_bias": true}),
		`model type "qwen2"`:     writeModel(t, map[string]any{"model_type": "qwen2"}),
		"scaled rotations true":  writeModel(t, map[string]any{"rope_scaling": map[string]any{"rope_type": "linear", "factor": 2.0}}),
		"no such file":           filepath.Join(t.TempDir(), "none"),
		"hidden_size is missing": writeModel(t, map[string]any{"hidden_size": nil}),
	} {
		if err := run(dir, "x", 1, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), strings.Split(want, " is missing")[0]) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
