package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What -model names is told where it is no folder of an OPT model, and which way leads on.
func TestExplain(t *testing.T) {
	dir := writeModel(t, nil)
	t.Chdir(t.TempDir())
	write := func(name, data string) string {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o777), os.WriteFile(name, []byte(data), 0o666)); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for _, c := range []struct {
		name string
		want []string
	}{
		{"facebook/opt-125m", []string{"-model facebook/opt-125m: there is no such folder here", "https://huggingface.co/facebook/opt-125m"}},
		{"none", []string{"none: no such file"}},
		{write("x.gguf", "GGUF\x03\x00\x00\x00"), []string{"-model x.gguf: it is a GGUF file", "a folder that has config.json"}},
		{write("anything", "GGUF\x03\x00\x00\x00"), []string{"it is a GGUF file"}},
		{write("w.safetensors", "\x08\x00\x00\x00\x00\x00\x00\x00{}      "), []string{"-model w.safetensors: it is a file of weights, and -model takes a folder"}},
		{filepath.Join(dir, "model.safetensors"), []string{"it is a file of weights", "here that is -model " + dir}},
		{filepath.Join(dir, "config.json"), []string{"it is a JSON file", "here that is -model " + dir}},
		{write("empty", ""), []string{"-model empty: it is a file"}},
		{os.DevNull, []string{"neither a folder nor a regular file"}},
		{filepath.Dir(write("llama/config.json", `{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
			"num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 256, "rope_theta": 10000, "max_position_embeddings": 128}`)), []string{`model_type "llama" is not "opt"`, "for this one there is the Go package gorgonia.org/leanattention/examples/llama"}},
		{filepath.Dir(write("gpt2/config.json", `{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}`)), []string{`model_type "gpt2"`, "opt decodes OPT models, such as"}},
		{filepath.Dir(write("ggufs/m\x1b.gguf", "GGUF")), []string{"config.json", `it has "m\x1b.gguf"`}},
		{filepath.Dir(filepath.Dir(filepath.Dir(write("hub[1]/snapshots/abc/config.json", "{}")))), []string{"-model " + filepath.Join("hub[1]", "snapshots", "abc")}},
		{filepath.Dir(filepath.Dir(write("parent/opt-125m/config.json", "{}"))), []string{"try -model " + filepath.Join("parent", "opt-125m")}},
		{filepath.Dir(write("broken/config.json", "{")), []string{filepath.Join("broken", "config.json")}},
	} {
		status, out, log := command(t, "-prompt", "a", "-model", c.name)
		if status != 1 || out != "" {
			t.Errorf("%s: status %d, %q", c.name, status, out)
		}
		for _, want := range c.want {
			if !strings.Contains(log, want) {
				t.Errorf("%s: no %q in %s", c.name, want, log)
			}
		}
		obeyed(t, log)
	}
}
