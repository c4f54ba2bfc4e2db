package e2e

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// smallShape is a model that is made and run in no time.
func smallShape() shape {
	s := newOPT("tiny", 2, 32, 4)
	s.fields["vocab_size"], s.fields["max_position_embeddings"] = 320, 40
	return s
}

// readCheckpoint returns the weights of a folder by their names in the network.
func readCheckpoint(t *testing.T, dir string) map[string][]float32 {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	n := binary.LittleEndian.Uint64(data)
	header := map[string]json.RawMessage{}
	if err := json.Unmarshal(data[8:8+n], &header); err != nil {
		t.Fatal(err)
	}
	all := map[string][]float32{}
	for name, raw := range header {
		var x struct {
			DType   string
			Offsets [2]int `json:"data_offsets"`
		}
		if err := json.Unmarshal(raw, &x); err != nil {
			t.Fatal(err)
		}
		var numbers []float32
		for of := data[8+int(n):][x.Offsets[0]:x.Offsets[1]]; len(of) > 0; {
			switch x.DType {
			case "F32":
				numbers, of = append(numbers, math.Float32frombits(binary.LittleEndian.Uint32(of))), of[4:]
			case "F16":
				numbers, of = append(numbers, half.Float16(binary.LittleEndian.Uint16(of)).Float32()), of[2:]
			default:
				numbers, of = append(numbers, half.BFloat16(binary.LittleEndian.Uint16(of)).Float32()), of[2:]
			}
		}
		all[strings.TrimPrefix(name, "model.")] = numbers
	}
	return all
}

// TestCheckpoint: the folder is what it says, in every type and layout.
func TestCheckpoint(t *testing.T) {
	post := smallShape() // as OPT-350m
	post.fields["word_embed_proj_dim"], post.fields["do_layer_norm_before"] = 16, false
	for name, config := range map[string]shape{"pre": smallShape(), "post": post} {
		network, err := config.network()
		if err != nil {
			t.Fatal(err)
		}
		first := map[string][]float32{}
		for _, s := range measure.Storages {
			dir := filepath.Join(t.TempDir(), "model")
			if err := writeCheckpoint(dir, config, s, 5); err != nil {
				t.Fatal(err)
			}
			model, err := lean.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer model.Close()
			if !reflect.DeepEqual(model.Network(), network) {
				t.Errorf("%s: %+v, want %+v", name, model.Network(), network)
			}
			weights := readCheckpoint(t, dir)
			for w := range network.Weights() {
				if w.From.Name != "" {
					continue
				}
				got := weights[w.Name]
				if len(got) != elements(w.Shape) {
					t.Fatalf("%s has %d elements of %v", w.Name, len(got), w.Shape)
				}
				if s == measure.StoreF32 {
					first[w.Name] = got
				}
				for i, want := range first[w.Name] {
					// bfloat16 has 8 bits, and float16 ends at 2^-24.
					if math.Abs(float64(got[i]-want)) > math.Abs(float64(want))/256+1e-7 {
						t.Fatalf("%s %s: %s[%d] is %v, in f32 %v", name, s.Name, w.Name, i, got[i], want)
					}
				}
			}
			tokens, err := tokenizer.Load(dir)
			if err != nil {
				t.Fatal(err)
			}
			text := "A story, é\n"
			ids, err := tokens.Encode(text, tokenizer.Options{Bare: true})
			if got := tokens.Decode(ids); err != nil || got != text || tokens.VocabSize() != network.Sizes().Vocab {
				t.Errorf("%s: %q of a vocabulary of %d", name, got, tokens.VocabSize())
			}
		}
		squares, n := 0.0, 0.0
		for _, v := range first["decoder.layers.1.fc1.weight"] {
			squares, n = squares+float64(v)*float64(v), n+1
		}
		if deviation := math.Sqrt(squares / n); math.Abs(deviation/weightScale-1) > 0.1 {
			t.Errorf("%s: weights have a standard deviation of %v", name, deviation)
		}
	}
}

// TestShapes: the sizes that the models are called by.
func TestShapes(t *testing.T) {
	for name, want := range map[string]float64{"125m": 125e6, "350m": 331e6, "1.3b": 1.316e9, "2.7b": 2.65e9, "6.7b": 6.66e9} {
		n := 0.0
		network, err := optShapes[name].network()
		if err != nil {
			t.Fatal(err)
		}
		for w := range network.Weights() {
			if w.From.Name == "" {
				n += float64(elements(w.Shape))
			}
		}
		if math.Abs(n/want-1) > 0.01 {
			t.Errorf("%s has %v weights", name, n)
		}
	}
}
