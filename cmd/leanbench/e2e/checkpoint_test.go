package e2e

import (
	"math"
	"path/filepath"
	"testing"

	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/model"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// smallShape is a model that is made and run in no time.
func smallShape() hf.Config {
	c := optShape(2, 32, 4)
	c.VocabSize, c.MaxPositions = 320, 40
	return c
}

// TestCheckpoint: the folder is what it says, in every type and layout.
func TestCheckpoint(t *testing.T) {
	post := smallShape() // as OPT-350m
	post.WordEmbedProjDim, post.DoLayerNormBefore = 16, false
	for name, config := range map[string]hf.Config{"pre": smallShape(), "post": post} {
		first := map[string][]float32{}
		for _, s := range measure.Storages {
			dir := filepath.Join(t.TempDir(), "model")
			if err := writeCheckpoint(dir, config, s, 5); err != nil {
				t.Fatal(err)
			}
			folder, err := hf.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer folder.Close()
			if folder.Config() != config {
				t.Errorf("%s: %+v, want %+v", name, folder.Config(), config)
			}
			for w := range config.Weights() {
				x, err := folder.Float32(w.Name, w.Shape...)
				if err != nil {
					t.Fatal(err)
				}
				got := x.Float32s()
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
			if got := tokens.Decode(ids); err != nil || got != text || tokens.VocabSize() != config.VocabSize {
				t.Errorf("%s: %q of a vocabulary of %d", name, got, tokens.VocabSize())
			}
			if _, err := model.Load(folder); err != nil {
				t.Error(err)
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
		for w := range optShapes[name].Weights() {
			n += float64(elements(w.Shape))
		}
		if math.Abs(n/want-1) > 0.01 {
			t.Errorf("%s has %v weights", name, n)
		}
	}
}
