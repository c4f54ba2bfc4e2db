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

	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// makeCheckpoint writes a checkpoint in Hugging Face's format with random weights.
func makeCheckpoint(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	names := slices.Sorted(maps.Keys(optShapes))
	name := flags.String("shape", "125m", "`size` of OPT: "+strings.Join(names, ", "))
	element := flags.String("dtype", "f32", "element `type` of the weights: f32, f16 or bf16")
	dir := flags.String("o", "", "`folder` to write; it is made if it is not there")
	seed := flags.Uint64("seed", 0, "`number` that chooses the weights, the same ones for each type within rounding")
	return func(_, _ io.Writer) error {
		config, ok := optShapes[*name]
		if !ok {
			return fmt.Errorf("-shape %q is none of %s", *name, strings.Join(names, ", "))
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
func writeCheckpoint(dir string, c shape, s measure.Storage, seed uint64) error {
	n, err := c.network()
	if err != nil {
		return err
	}
	config := maps.Clone(c.fields)
	config["dtype"] = map[string]string{"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[s.Name]
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	if err := writeWeights(filepath.Join(dir, "model.safetensors"), n, s, seed); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "merges.txt"), []byte("#version: 0.2\n"), 0o666); err != nil {
		return err
	}
	for _, f := range []struct {
		name  string
		value any
	}{
		{"vocab.json", vocabulary(n.Sizes().Vocab)},
		{"tokenizer_config.json", map[string]any{
			"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true,
			"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
		}},
		{"config.json", config},
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
func writeWeights(name string, n lean.Network, s measure.Storage, seed uint64) (err error) {
	type place struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	end := 0
	for w := range n.Weights() {
		if w.From.Name != "" { // the head is the token embedding
			continue
		}
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
	for w := range n.Weights() {
		if w.From.Name != "" {
			continue
		}
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
