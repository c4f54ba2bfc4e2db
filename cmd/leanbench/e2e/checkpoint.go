package e2e

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// optShapes are the published sizes of OPT.
var optShapes = map[string]hf.Config{
	"125m": optShape(12, 768, 12),
	"350m": func() hf.Config {
		c := optShape(24, 1024, 16)
		c.WordEmbedProjDim, c.DoLayerNormBefore = 512, false
		return c
	}(),
	"1.3b": optShape(24, 2048, 32),
	"2.7b": optShape(32, 2560, 32),
	"6.7b": optShape(32, 4096, 32),
}

func optShape(layers, hidden, heads int) hf.Config {
	return hf.Config{
		ModelType: "opt", Activation: "relu",
		VocabSize: 50272, HiddenSize: hidden, WordEmbedProjDim: hidden, FFNDim: 4 * hidden,
		Layers: layers, Heads: heads, MaxPositions: 2048,
		DoLayerNormBefore: true, EnableBias: true, LayerNormElementwiseAffine: true, TieWordEmbeddings: true,
		BOS: 2, EOS: 2, Pad: 1,
	}
}

// makeCheckpoint writes a checkpoint in Hugging Face's format with random weights.
func makeCheckpoint(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	names := slices.Sorted(maps.Keys(optShapes))
	shape := flags.String("shape", "125m", "`size` of OPT: "+strings.Join(names, ", "))
	element := flags.String("dtype", "f32", "element `type` of the weights: f32, f16 or bf16")
	dir := flags.String("o", "", "`folder` to write; it is made if it is not there")
	seed := flags.Uint64("seed", 0, "`number` that chooses the weights, the same ones for each type within rounding")
	return func(_, _ io.Writer) error {
		config, ok := optShapes[*shape]
		if !ok {
			return fmt.Errorf("-shape %q is none of %s", *shape, strings.Join(names, ", "))
		}
		i := slices.IndexFunc(measure.Storages, func(s measure.Storage) bool { return s.Name == *element })
		if i < 0 {
			return fmt.Errorf("-dtype %q is none of f32, f16, bf16", *element)
		}
		if *dir == "" {
			return errors.New("-o is needed: the folder to write")
		}
		return writeCheckpoint(*dir, config, measure.Storages[i], *seed)
	}
}

// writeCheckpoint writes a checkpoint. config.json comes last, so a folder with a config.json is complete.
func writeCheckpoint(dir string, c hf.Config, s measure.Storage, seed uint64) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	if err := writeWeights(filepath.Join(dir, "model.safetensors"), c, s, seed); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "merges.txt"), []byte("#version: 0.2\n"), 0o666); err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		value any
	}{
		{"vocab.json", vocabulary(c.VocabSize)},
		{"tokenizer_config.json", map[string]any{
			"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true,
			"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
		}},
		{"config.json", configJSON(c, s)},
	} {
		data, err := json.MarshalIndent(f.value, "", " ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, f.name), append(data, '\n'), 0o666); err != nil {
			return err
		}
	}
	return nil
}

// configJSON returns the fields of config.json as transformers names them.
func configJSON(c hf.Config, s measure.Storage) map[string]any {
	return map[string]any{
		"model_type": c.ModelType, "architectures": []string{"OPTForCausalLM"}, "activation_function": c.Activation,
		"vocab_size": c.VocabSize, "hidden_size": c.HiddenSize, "word_embed_proj_dim": c.WordEmbedProjDim,
		"ffn_dim": c.FFNDim, "num_hidden_layers": c.Layers, "num_attention_heads": c.Heads,
		"max_position_embeddings": c.MaxPositions, "do_layer_norm_before": c.DoLayerNormBefore,
		"_remove_final_layer_norm": c.RemoveFinalLayerNorm, "enable_bias": c.EnableBias,
		"layer_norm_elementwise_affine": c.LayerNormElementwiseAffine, "tie_word_embeddings": c.TieWordEmbeddings,
		"bos_token_id": c.BOS, "eos_token_id": c.EOS, "pad_token_id": c.Pad,
		"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "init_std": weightScale,
		"dtype": map[string]string{"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[s.Name],
	}
}

// vocabulary returns a vocabulary of the given size: the special tokens, a token per byte in GPT-2's
// spelling, and for all other IDs tokens that never occur in a tokenized text.
func vocabulary(size int) map[string]int {
	v := map[string]int{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
	other := rune(0x100) // stands for the next unprintable byte
	for b := range rune(256) {
		c := b
		if b < '!' || b > '~' && b < '¡' || b == 0xad {
			c, other = other, other+1
		}
		v[string(c)] = len(v)
	}
	for len(v) < size {
		v[fmt.Sprintf("<%d>", len(v))] = len(v)
	}
	return v
}

// weightScale is the standard deviation of weights and biases. OPT's initialization uses the same value.
const weightScale = 0.02

// writeWeights writes a safetensors file tensor by tensor.
func writeWeights(name string, c hf.Config, s measure.Storage, seed uint64) (err error) {
	type place struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	end := 0
	for w := range c.Weights() {
		begin := end
		end += elements(w.Shape) * s.Size
		header["model."+w.Name] = place{strings.ToUpper(s.Name), w.Shape, [2]int{begin, end}}
	}
	head, err := json.Marshal(header)
	if err != nil {
		return err
	}
	for len(head)%8 != 0 {
		head = append(head, ' ') // aligns the data
	}

	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// Linux caches a file in pieces of the size of the writes. Large pieces make later reads from the cache
	// faster.
	out := bufio.NewWriterSize(f, 4<<20)
	out.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(head)))) // Flush returns the first error
	out.Write(head)
	rng := rand.New(rand.NewPCG(seed, 0))
	var b []byte
	for w := range c.Weights() {
		norm := strings.HasSuffix(w.Name, "layer_norm.weight")
		for range elements(w.Shape) {
			v := float32(weightScale * rng.NormFloat64())
			if norm {
				v++
			}
			switch s {
			case measure.StoreF32:
				b = binary.LittleEndian.AppendUint32(b[:0], math.Float32bits(v))
			case measure.StoreF16:
				b = binary.LittleEndian.AppendUint16(b[:0], uint16(half.FromFloat32(v)))
			default:
				b = binary.LittleEndian.AppendUint16(b[:0], uint16(half.BFromFloat32(v)))
			}
			out.Write(b)
		}
	}
	return out.Flush()
}

func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}
