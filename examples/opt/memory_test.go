package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
)

// emptyModel is a folder whose weights are float16 zeros, of which a file system with holes keeps nothing.
func emptyModel(t *testing.T, change func(config map[string]any)) string {
	t.Helper()
	config := map[string]any{}
	dir := writeModel(t, func(c map[string]any) { config = c })
	change(config)
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o666); err != nil {
		t.Fatal(err)
	}
	number := func(name string) int { return config[name].(int) }
	weights := hf.Config{
		VocabSize: number("vocab_size"), HiddenSize: number("hidden_size"), WordEmbedProjDim: number("hidden_size"), FFNDim: number("ffn_dim"),
		Layers: number("num_hidden_layers"), Heads: number("num_attention_heads"), MaxPositions: number("max_position_embeddings"),
		DoLayerNormBefore: true, EnableBias: true, LayerNormElementwiseAffine: true,
	}
	header, end := map[string]any{}, int64(0)
	for w := range weights.Weights() {
		size := int64(2)
		for _, n := range w.Shape {
			size *= int64(n)
		}
		header[w.Name] = map[string]any{"dtype": "F16", "shape": w.Shape, "data_offsets": []int64{end, end + size}}
		end += size
	}
	h, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "model.safetensors")
	if err := os.WriteFile(path, append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 8+int64(len(h))+end); err != nil {
		t.Skip(err)
	}
	return dir
}

// What a process may not take is an error of the command: Go would end it with a dump of all goroutines.
func TestMemoryLimit(t *testing.T) {
	if testing.Short() || runtime.GOOS != "linux" || runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("the limits are those of Linux with addresses of 64 bits")
	}
	prompts := filepath.Join(t.TempDir(), "prompts")
	var lines strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&lines, "Once upon a time there was number %d\n", i)
	}
	if err := os.WriteFile(prompts, []byte(lines.String()), 0o666); err != nil {
		t.Fatal(err)
	}
	large := emptyModel(t, func(c map[string]any) { c["hidden_size"], c["ffn_dim"], c["num_hidden_layers"] = 2048, 8192, 8 })
	long := emptyModel(t, func(c map[string]any) { c["hidden_size"], c["max_position_embeddings"] = 8, 16_000_100 })
	for name, c := range map[string]struct {
		limit string // of ulimit
		args  []string
		want  string // in the message; "": none
	}{
		"prompts":             {"-v 8000000", []string{"-prompts", prompts, "-n", "4"}, "rows of 20000 sequences"},
		"prompts, data":       {"-d 6000000", []string{"-prompts", prompts, "-n", "4"}, "ulimit -d"},
		"prompts of Gorgonia": {"-v 6000000", []string{"-prompts", prompts, "-n", "4", "-attn", "default"}, "ulimit -v"},
		"weights":             {"-v 3500000", []string{"-model", large, "-prompt", "a", "-n", "1", "-weights", "f32"}, "MB of converted weights"},
		"tokens":              {"-v 3000000", []string{"-model", long, "-prompt", "a", "-n", "16000000"}, "MB of cache"},
		"enough":              {"-v 5000000", []string{"-prompt", "a", "-n", "2"}, ""},
	} {
		c.args = append([]string{"-c", "ulimit " + c.limit + ` && exec "$0" "$@"`, os.Args[0]}, c.args...)
		command := exec.Command("sh", c.args...)
		command.Env = append(os.Environ(), asCommand+"=1")
		out, err := command.CombinedOutput()
		text := string(out)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v\n%.3000s", name, err, text)
		case c.want != "" && (err == nil || command.ProcessState.ExitCode() != 1 || strings.Contains(text, "goroutine ") ||
			!strings.Contains(text, c.want) || !strings.Contains(text, la.ErrOutOfMemory.Error()) || !strings.Contains(text, "(ulimit ")):
			t.Errorf("%s: %v\n%.3000s", name, err, text)
		}
	}
}
