package sample

import (
	"encoding/json"
	"math"
	"os"
	"testing"

	_ "embed"
)

//go:embed testdata/golden.json
var goldenJSON []byte

// goldenCase is a distribution computed by transformers (testdata/golden.py).
type goldenCase struct {
	Settings struct {
		Temperature       *float64
		TopK              int             `json:"top_k"`
		TopP              float64         `json:"top_p"`
		MinP              float64         `json:"min_p"`
		TypicalP          float64         `json:"typical_p"`
		RepetitionPenalty float64         `json:"repetition_penalty"`
		SequenceBias      map[int]float64 `json:"sequence_bias"`
		SuppressTokens    []int           `json:"suppress_tokens"`
	}
	Text   []int
	Logits []float32
	Kept   map[int]float64
}

// TestGolden compares the candidate tokens and the probabilities with transformers.
func TestGolden(t *testing.T) {
	files := [][]byte{goldenJSON}
	if name := os.Getenv("SAMPLE_GOLDEN"); name != "" {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, data)
	}
	for _, data := range files {
		var cases []goldenCase
		if err := json.Unmarshal(data, &cases); err != nil {
			t.Fatal(err)
		}
		for i, g := range cases {
			c := Config{Temperature: 1, TopK: g.Settings.TopK, TopP: g.Settings.TopP, MinP: g.Settings.MinP, TypicalP: g.Settings.TypicalP,
				RepetitionPenalty: g.Settings.RepetitionPenalty, LogitBias: g.Settings.SequenceBias, Forbidden: g.Settings.SuppressTokens}
			if g.Settings.Temperature != nil {
				c.Temperature = *g.Settings.Temperature
			}
			s := mustNew(t, c)
			s.Accept(g.Text...)
			got := distribution(t, s, g.Logits)
			for id, p := range got {
				if want, ok := g.Kept[id]; !ok || math.Abs(p-want) > 1e-5*want+1e-7 {
					t.Errorf("case %d, %+v: token %d has probability %v, want %v", i, c, id, p, want)
				}
			}
			for id, p := range g.Kept {
				if _, ok := got[id]; !ok && p > 1e-12 { // transformers has no minimum weight
					t.Errorf("case %d, %+v: token %d has no probability, want %v", i, c, id, p)
				}
			}
		}
		t.Logf("%d cases", len(cases))
	}
}

// distribution returns the probabilities of the tokens that s can choose.
func distribution(t testing.TB, s *Sampler, logits []float32) map[int]float64 {
	t.Helper()
	m := new(memory)
	x := s.change(m, logits)
	best := largest(x)
	if best < 0 {
		t.Fatalf("no token of %v is left", logits)
	}
	w, p := newWeights(x[best], s.config.Temperature), map[int]float64{}
	if !s.config.restricted(len(x)) {
		total := w.sum(x)
		for i, v := range x {
			if y := w.of(v); y >= leastWeight {
				p[i] = y / total
			}
		}
		return p
	}
	total := m.restrict(&s.config, x, w)
	for i, c := range m.candidates {
		if i > 0 && c.id <= m.candidates[i-1].id {
			t.Fatal("candidates are not in the order of ids")
		}
		p[int(c.id)] = c.weight / total
	}
	return p
}
