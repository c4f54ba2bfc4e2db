package gguf

import (
	"math"
	"strings"
)

// Adapter is a LoRA adapter: the weight W of a pair A and B becomes W + Alpha / rank * B A.
//
// Source: https://github.com/ggml-org/llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp.
type Adapter struct {
	ModelType string                // model_type of the model in config.json
	Alpha     float64               // 0: the factor of B A is 1
	Pairs     map[string][2]*Tensor // A and B by the weight's name in Hugging Face models; nil: the file does not have the tensor
}

// Adapter returns the adapter of a file, for a model with a number of heads. The rows of B are those of the Hugging Face
// model.
//
// Errors:
//
//   - ErrUnsupported: the file is no LoRA adapter, is an adapter that has effect after certain tokens only, or has a tensor that
//     is no half of a pair, or metadata of the adapter that is not known.
//   - ErrFormat: B does not have rows for the heads.
func (f *File) Adapter(heads, kvHeads int) (*Adapter, error) {
	path, m := f.parts[0].path, f.meta
	for _, want := range [][2]string{{"general.type", "adapter"}, {"adapter.type", "lora"}} {
		got, err := Or(m.String, want[0], "")
		if err != nil {
			return nil, err
		}
		if got != want[1] {
			return nil, fail(ErrUnsupported, path, "metadata key %q is %s, and that of an adapter is %q", want[0], quote(got), want[1])
		}
	}
	architecture, err := m.String("general.architecture")
	if err != nil {
		return nil, err
	}
	family, ok := families[architecture]
	if !ok {
		return nil, fail(ErrUnsupported, path, "an adapter of architecture %s", quote(architecture))
	}
	a := &Adapter{ModelType: family.modelType, Pairs: map[string][2]*Tensor{}}
	if a.Alpha, err = Or(m.Float64, "adapter.lora.alpha", 0); err != nil {
		return nil, err
	}
	if math.IsNaN(a.Alpha) || math.IsInf(a.Alpha, 0) {
		return nil, fail(ErrRange, path, "metadata key \"adapter.lora.alpha\" is %v", a.Alpha)
	}
	for _, key := range []string{"adapter.lora.task_name", "adapter.lora.prompt_prefix"} { // notes for the user
		if _, err := Or(m.String, key, ""); err != nil {
			return nil, err
		}
	}
	for _, key := range m.Unread() {
		if strings.HasPrefix(key, "adapter.") {
			return nil, fail(ErrUnsupported, path, "metadata key %s is not known", quote(key))
		}
	}
	for _, t := range f.tensors {
		half, base := 0, t.name
		if s, ok := strings.CutSuffix(t.name, ".lora_a"); ok {
			base = s
		} else if s, ok := strings.CutSuffix(t.name, ".lora_b"); ok {
			half, base = 1, s
		}
		name, undo, ok := family.rename(base)
		if base == t.name || !ok || strings.HasPrefix(base, "token_embd.") {
			return nil, fail(ErrUnsupported, t.file, "tensor %s is no half of an adapter of a linear layer of architecture %q", quote(t.name), architecture)
		}
		if half == 1 {
			switch undo {
			case pairs:
				t, err = t.halves(heads)
			case pairsKV:
				t, err = t.halves(kvHeads)
			}
			if err != nil {
				return nil, err
			}
		}
		p := a.Pairs[name]
		p[half] = t
		a.Pairs[name] = p
	}
	return a, nil
}
