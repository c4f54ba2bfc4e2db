package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeAdapter writes an adapter of the shipped model to a folder.
func writeAdapter(t testing.TB, dir string, alpha float64) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(writeShipped(t), "config.json"))
	var config struct {
		Width int `json:"hidden_size"`
		Inner int `json:"ffn_dim"`
	}
	if err == nil {
		err = json.Unmarshal(data, &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	header, numbers := map[string]any{}, []byte(nil)
	for half, shape := range map[string][2]int{"A": {1, config.Width}, "B": {config.Inner, 1}} {
		begin := len(numbers)
		for i := range shape[0] * shape[1] {
			numbers = binary.LittleEndian.AppendUint32(numbers, math.Float32bits(float32(math.Sin(float64(i*i)))/4))
		}
		header["base_model.model.model.decoder.layers.0.fc1.lora_"+half+".weight"] = map[string]any{"dtype": "F32", "shape": shape, "data_offsets": [2]int{begin, len(numbers)}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	file := append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), numbers...)
	for name, data := range map[string][]byte{
		"adapter_config.json":       fmt.Appendf(nil, `{"peft_type": "LORA", "r": 1, "lora_alpha": %v, "target_modules": ["fc1"]}`, alpha),
		"adapter_model.safetensors": file,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestLoRA: -lora merges adapters, as those beside the weights are merged.
func TestLoRA(t *testing.T) {
	one := func(args ...string) string {
		t.Helper()
		status, out, err := leanlm(t, "", append([]string{"generate", "-p", "Once upon a time", "-n", "30", "-exact"}, args...)...)
		if status != 0 {
			t.Fatalf("%v: %d: %s", args, status, err)
		}
		return out
	}
	adapter, inverse := writeAdapter(t, t.TempDir(), 2), writeAdapter(t, t.TempDir(), -2)
	plain, adapted := one(), one("-lora", adapter)
	if plain == adapted {
		t.Fatalf("%q with and without the adapter", plain)
	}
	if got := one("-m", writeAdapter(t, writeShipped(t), 2)); got != adapted {
		t.Errorf("beside the weights: %q, want %q", got, adapted)
	}
	if got := one("-lora", adapter, "--lora", inverse); got != plain {
		t.Errorf("with the inverse: %q, want %q", got, plain)
	}
	for want, dir := range map[string]string{"no such file": filepath.Join(t.TempDir(), "none"), "adapter_config.json": t.TempDir(), "is empty": ""} {
		if status, _, err := leanlm(t, "", "generate", "-p", "x", "-lora", dir); status == 0 || !strings.Contains(err, want) {
			t.Errorf("%q: %d, %s, want %s", dir, status, err, want)
		}
	}
	if status, _, err := leanlm(t, "", "generate", "-p", "x", "-m", adapter); status != exitError || !strings.Contains(err, "an adapter alone") {
		t.Errorf("an adapter as the model: %d, %s", status, err)
	}
}
