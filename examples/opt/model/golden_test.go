package model

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// The golden files are made by ../testdata/golden.py, which says what is in them.
const testdata = "../testdata"

type goldenLogits struct {
	Name, Model, File string
	IDs, Positions    [][]int
	Vocab, Chunk      int
}

type golden struct {
	Logits []goldenLogits
	Greedy []struct {
		Prompt, Text string
		IDs, Next    []int
	}
	Tokens []goldenTokens
}

// goldenTokens is the greedy continuation of a prompt by a model without a tokenizer.
type goldenTokens struct {
	Model     string
	IDs, Next []int
}

func readJSON(t *testing.T, name string, v any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(testdata, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, v); err != nil {
		t.Fatal(err)
	}
}

func readGolden(t *testing.T) (g golden) {
	t.Helper()
	readJSON(t, "golden.json", &g)
	if len(g.Logits) == 0 || len(g.Greedy) == 0 || len(g.Tokens) == 0 {
		t.Fatal("golden.json has no cases")
	}
	return g
}

func openModel(t *testing.T, folder string, weights tensor.Dtype) *Weights {
	t.Helper()
	dir := filepath.Join(testdata, folder)
	if !strings.HasPrefix(folder, "..") {
		dir = filepath.Join(testdata, "checkpoints", folder)
		if _, err := os.Stat(dir); os.IsNotExist(err) {
			t.Skip("the module that a proxy serves has no random checkpoints: the repository has them")
		}
	}
	f, err := hf.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	w, err := LoadAs(f, weights)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func shipped(t *testing.T) (*Weights, *tokenizer.Tokenizer) {
	t.Helper()
	tokenizer, err := tokenizer.Load("../tiny")
	if err != nil {
		t.Fatal(err)
	}
	return openModel(t, "../tiny", tensor.Dtype{}), tokenizer
}

// TestGoldenLogits compares the logits of every position with transformers',
// which computes in float32 with the weights as they are stored.
func TestGoldenLogits(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range readGolden(t).Logits {
		w := openModel(t, c.Model, tensor.Dtype{})
		for name, kind := range attentions {
			chunks := slices.Compact([]int{0, c.Chunk, 7})
			if !reftest.Every(t) && (kind.Attention != Lean || kind.Linear != LeanLinear) {
				i := rng.IntN(min(2, len(chunks))) // one of the large ones, another in every run: what is not ours is slow
				chunks = chunks[i : i+1]
			}
			for _, chunk := range chunks {
				if !reftest.Every(t) && kind.Attention == Fused && chunk > 0 && chunk < c.Chunk {
					continue // a run computes the whole text anew, and of a long one there are many
				}
				t.Run(fmt.Sprintf("%s/%s/chunk %d", c.Name, name, chunk), func(t *testing.T) {
					if worst := c.worst(t, w, Options{Chunk: chunk, Attention: kind.Attention, Linear: kind.Linear}); !(worst <= 1e-4) {
						t.Errorf("a logit is off by %.1e", worst)
					}
				})
			}
		}
	}
}

// TestGoldenRounded: how far the logits, which are up to 20, move when the
// weights are rounded. The bounds are four times what was measured. Most of the
// models were stored in float16, which loses nothing.
func TestGoldenRounded(t *testing.T) {
	for _, c := range readGolden(t).Logits {
		for name, kind := range map[string]struct {
			dtype tensor.Dtype
			bound float64
		}{"f32": {tensor.Float32, 1e-4}, "f16": {la.Float16, 0.01}, "bf16": {la.BFloat16, 0.25}} {
			t.Run(c.Name+"/"+name, func(t *testing.T) {
				worst := c.worst(t, openModel(t, c.Model, kind.dtype), Options{})
				t.Logf("at most %.1e off", worst)
				if !(worst <= kind.bound) {
					t.Errorf("a logit is off by %.1e, more than %v", worst, kind.bound)
				}
			})
		}
	}
}

// worst is the largest difference of the logits to the golden ones.
func (c *goldenLogits) worst(t *testing.T, w *Weights, o Options) (worst float64) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(testdata, c.File))
	if err != nil {
		t.Fatal(err)
	}
	want := make([]float32, len(raw)/4)
	if _, err := binary.Decode(raw, binary.LittleEndian, want); err != nil {
		t.Fatal(err)
	}
	for _, ids := range c.IDs {
		o.Capacity = append(o.Capacity, len(ids))
	}
	o.AllLogits = true
	d := newDecoder(t, w, o)
	if err := d.Prefill(context.Background(), c.IDs, nil); err != nil {
		t.Fatal(err)
	}
	for i, positions := range c.Positions {
		got := d.PromptLogits(i)
		for _, p := range positions {
			for j, v := range got[p*c.Vocab : (p+1)*c.Vocab] {
				diff := math.Abs(float64(v) - float64(want[j]))
				if diff != diff {
					t.Fatalf("sequence %d, position %d, logit %d: %v, want %v", i, p, j, v, want[j])
				}
				worst = max(worst, diff)
			}
			want = want[c.Vocab:]
		}
	}
	if len(want) > 0 {
		t.Errorf("%d logits were not compared", len(want))
	}
	return worst
}

// greedy continues all prompts by n tokens.
func greedy(t *testing.T, d *Decoder, prompts [][]int, n int) [][]int {
	t.Helper()
	if err := d.Prefill(context.Background(), prompts, nil); err != nil {
		t.Fatal(err)
	}
	out, next := make([][]int, len(prompts)), make([]int, len(prompts))
	for {
		for i := range next {
			next[i] = 0
			for j, v := range d.Logits(i) {
				if v > d.Logits(i)[next[i]] {
					next[i] = j
				}
			}
			out[i] = append(out[i], next[i])
		}
		if len(out[0]) == n {
			return out
		}
		if err := d.Step(next); err != nil {
			t.Fatal(err)
		}
	}
}

// TestGoldenGreedy: 200 tokens are transformers', token for token, of each
// prompt alone and of all in a batch. Graphs of stock nodes, which compute over the whole
// capacity at every step, make some of them, and all in CI.
func TestGoldenGreedy(t *testing.T) {
	w, tokenizer := shipped(t)
	cases := readGolden(t).Greedy
	var batches [][]int // indexes of cases
	var all []int
	for i, c := range cases {
		if ids := idsOf(t, tokenizer, c.Prompt, false); !slices.Equal(ids, c.IDs) {
			t.Errorf("prompt %q is %v, want %v", c.Prompt, ids, c.IDs)
		}
		if text := tokenizer.Decode(c.Next); text != c.Text {
			t.Errorf("%v is %q, want %q", c.Next, text, c.Text)
		}
		batches, all = append(batches, []int{i}), append(all, i)
	}
	if raceDetector {
		batches = nil
	}
	// Some of the single ones, others in every run, and always all together: stock attention is slow.
	rng := reftest.Rand(t)
	rng.Shuffle(len(batches), func(i, j int) { batches[i], batches[j] = batches[j], batches[i] })
	batches = batches[:min(reftest.Cases(t, 2, 4), len(batches))]
	for name, kind := range attentions {
		for _, batch := range append(batches, all) {
			o := Options{Attention: kind.Attention, Linear: kind.Linear}
			tokens := len(cases[batch[0]].Next)
			if kind.Attention != Lean || kind.Linear != LeanLinear {
				tokens = min(tokens, reftest.Cases(t, 10, 25))
			}
			var prompts [][]int
			for _, i := range batch {
				prompts = append(prompts, cases[i].IDs)
				o.Capacity = append(o.Capacity, len(cases[i].IDs)+tokens)
			}
			got := greedy(t, newDecoder(t, w, o), prompts, tokens)
			for j, i := range batch {
				if want := cases[i].Next[:tokens]; !slices.Equal(got[j], want) {
					t.Errorf("%s, case %d in a batch of %d: %q, want %q", name, i, len(batch), tokenizer.Decode(got[j]), tokenizer.Decode(want))
				}
			}
		}
	}
}

// testTokens continues the golden prompts of each model, alone and all in a batch, with
// the tokens that the decoder chooses or those of the largest logits.
func testTokens(t *testing.T, weights tensor.Dtype, o Options) {
	t.Helper()
	models := map[string][]goldenTokens{}
	for _, c := range readGolden(t).Tokens {
		models[c.Model] = append(models[c.Model], c)
	}
	for model, cases := range models {
		w := openModel(t, model, weights)
		batches := [][]goldenTokens{cases}
		for i := range cases {
			batches = append(batches, cases[i:i+1])
		}
		for _, batch := range batches {
			o := o
			var prompts [][]int
			for _, c := range batch {
				prompts = append(prompts, c.IDs)
				o.Capacity = append(o.Capacity, len(c.IDs)+len(c.Next))
			}
			next := greedy
			if o.Greedy {
				next = choose
			}
			for i, got := range next(t, newDecoder(t, w, o), prompts, len(batch[0].Next)) {
				if want := batch[i].Next; !slices.Equal(got, want) {
					t.Errorf("%s, %v, %+v, prompt %v in a batch of %d: %v, want %v", model, weights, o, batch[i].IDs, len(batch), got, want)
				}
			}
		}
	}
}

// TestGoldenTokens: in every kind of graph, and with weights of every type that leaves
// the golden tokens' margins.
func TestGoldenTokens(t *testing.T) {
	for _, kind := range attentions {
		testTokens(t, tensor.Dtype{}, Options{Attention: kind.Attention, Linear: kind.Linear})
	}
	for _, weights := range []tensor.Dtype{tensor.Float32, la.Float16} {
		testTokens(t, weights, Options{Greedy: true})
		testTokens(t, weights, Options{Cache: la.Float16})
	}
}

var everyCase = flag.Bool("recall", false, "TestRecall asks all questions of recall.json")

// TestRecall: the shipped model answers with facts that were stated once, 1,500
// tokens and more before the question.
func TestRecall(t *testing.T) {
	w, tokenizer := shipped(t)
	var documents []struct {
		Text   string
		Tokens int
		Cases  []struct {
			Question, Answer string
			Distance         int
		}
	}
	readJSON(t, "recall.json", &documents)
	switch {
	case *everyCase:
	case raceDetector:
		t.Skip("thousands of tokens, and nothing runs at once that TestDecoder does not run")
	case testing.Short():
		documents = documents[:1]
	default:
		documents = documents[:reftest.Cases(t, 2, 4)]
	}
	right, count := 0, 0
	d := newDecoder(t, w, Options{Capacity: []int{w.Config().MaxPositions}})
	for _, doc := range documents {
		text := idsOf(t, tokenizer, doc.Text, false)
		if len(text) != doc.Tokens {
			t.Fatalf("%d tokens, want %d", len(text), doc.Tokens)
		}
		if err := d.Truncate(0, 0); err != nil {
			t.Fatal(err)
		}
		if err := d.Prefill(context.Background(), [][]int{text}, nil); err != nil {
			t.Fatal(err)
		}
		for _, c := range doc.Cases {
			if c.Distance < 1500 {
				t.Errorf("a distance of %d tokens", c.Distance)
			}
			ids := idsOf(t, tokenizer, doc.Text+c.Question, false)
			if !slices.Equal(ids[:len(text)], text) {
				t.Fatalf("%q merges with the text before it", c.Question)
			}
			got := greedy(t, d, [][]int{ids[len(text):]}, len(idsOf(t, tokenizer, c.Answer, true)))
			if answer := tokenizer.Decode(got[0]); answer == c.Answer {
				right++
			} else {
				t.Logf("%s%s, not%s", strings.TrimSpace(c.Question), answer, c.Answer)
			}
			count++
			if err := d.Truncate(0, len(text)); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Logf("%d of %d", right, count)
	if right*100 < 95*count {
		t.Errorf("%d of %d answers are right", right, count)
	}
}

// idsOf returns the ids of a text, with the tokens around it unless it is bare.
func idsOf(t testing.TB, tokens *tokenizer.Tokenizer, text string, bare bool) []int {
	t.Helper()
	ids, err := tokens.Encode(text, tokenizer.Options{Bare: bare})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}
