package decoder

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// shippedGolden has results of transformers with the shipped model and with random OPT checkpoints: see
// testdata/opt/golden.py.
type shippedGolden struct {
	Logits []logitsCase
	Greedy []struct {
		Prompt, Text string
		IDs, Next    []int
	}
	Tokens []struct {
		Model     string
		IDs, Next []int
	}
}

type logitsCase struct {
	Name, Model, File string
	IDs, Positions    [][]int
	Vocab, Chunk      int
}

func readShipped(t testing.TB, name string, to any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "opt", name))
	if err == nil {
		err = json.Unmarshal(data, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func readShippedGolden(t testing.TB) (g shippedGolden) {
	t.Helper()
	if readShipped(t, "golden.json", &g); len(g.Logits) == 0 || len(g.Greedy) == 0 || len(g.Tokens) == 0 {
		t.Fatal("golden.json has no cases")
	}
	return g
}

// openCheckpoint opens a model of golden.json.
func openCheckpoint(t testing.TB, name string) *Model {
	t.Helper()
	var m *Model
	var err error
	vocabulary := map[string]int{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
	if name == "../tiny" {
		m, err = OpenFS("the shipped model", tiny.Files)
	} else {
		files := os.DirFS(filepath.Join("testdata", "opt", "checkpoints", name))
		if _, err := fs.Stat(files, "."); errors.Is(err, fs.ErrNotExist) {
			t.Skip("the module that a proxy serves has no random checkpoints: the repository has them")
		}
		dir := t.TempDir()
		// The checkpoints have no vocabulary: nothing is encoded.
		for id := range 92 {
			vocabulary[fmt.Sprint(id)] = 4 + id
		}
		data, e := json.Marshal(vocabulary)
		if err := errors.Join(e, os.CopyFS(dir, files), os.WriteFile(filepath.Join(dir, "vocab.json"), data, 0o666), os.WriteFile(filepath.Join(dir, "merges.txt"), nil, 0o666)); err != nil {
			t.Fatal(err)
		}
		m, err = Open(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func modelEngine(t testing.TB, m *Model, o Options) *Engine {
	t.Helper()
	e, err := m.Engine(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// worst reads the prompts of a case in pieces of at most chunk tokens, 0 for the whole prompts, and returns the largest difference
// of a logit to the logit of transformers.
func (c *logitsCase) worst(t testing.TB, m *Model, chunk int, o Options) (worst float64) {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", "opt", c.File))
	if err != nil {
		t.Fatal(err)
	}
	want := make([]float32, len(raw)/4)
	if _, err := binary.Decode(raw, binary.LittleEndian, want); err != nil {
		t.Fatal(err)
	}
	o.Batch, o.Tokens, o.Draft = len(c.IDs), 64*len(c.IDs), 0
	for _, ids := range c.IDs {
		o.Tokens, o.Context, o.Draft = o.Tokens+len(ids), max(o.Context, len(ids)), o.Draft+len(ids)
	}
	if chunk > 0 {
		o.Draft = min(o.Draft, chunk*len(c.IDs))
	}
	e := modelEngine(t, m, o)
	var seqs []*la.Sequence
	for range c.IDs {
		s, err := e.newSequence()
		if err != nil {
			t.Fatal(err)
		}
		seqs = append(seqs, s)
	}
	got, compared := map[[2]int][]float32{}, 0
	for done := false; !done; {
		done = true
		var appends []la.Append
		var tokens []int
		var places [][2]int
		for i, s := range seqs {
			rest := c.IDs[i][s.Len():]
			if chunk > 0 {
				rest = rest[:min(len(rest), chunk)]
			}
			if len(rest) == 0 {
				continue
			}
			done = false
			for j := range rest {
				places = append(places, [2]int{i, s.Len() + j})
			}
			appends, tokens = append(appends, la.Append{Seq: s, Tokens: len(rest)}), append(tokens, rest...)
		}
		if done {
			break
		}
		r, err := e.run(appends, tokens, true, true, nil)
		if err != nil {
			t.Fatal(err)
		}
		for row, place := range places {
			if slices.Contains(c.Positions[place[0]], place[1]) {
				got[place] = slices.Clone(r.logits[row*c.Vocab : (row+1)*c.Vocab])
			}
		}
	}
	for i, positions := range c.Positions {
		for _, p := range positions {
			row := got[[2]int{i, p}]
			if row == nil {
				t.Fatalf("text %d, position %d: no logits", i, p)
			}
			for j, v := range row {
				diff := math.Abs(float64(v) - float64(want[compared+j]))
				if diff != diff {
					t.Fatalf("text %d, position %d, logit %d: %v, want %v", i, p, j, v, want[compared+j])
				}
				worst = max(worst, diff)
			}
			compared += c.Vocab
		}
	}
	if compared != len(want) {
		t.Errorf("%d of %d logits were compared", compared, len(want))
	}
	for _, s := range seqs {
		if err := s.Release(); err != nil {
			t.Error(err)
		}
	}
	return worst
}

// TestShippedLogits compares the logits of folders with those of transformers, which computes in float32 with the weights as
// they are stored: of whole prompts and of prompts in pieces. With weights that are rounded to 16 bits, logits of up to 20 move
// by a fourth of the bound at most.
func TestShippedLogits(t *testing.T) {
	for _, c := range readShippedGolden(t).Logits {
		t.Run(c.Name, func(t *testing.T) {
			m := openCheckpoint(t, c.Model)
			for _, chunk := range slices.Compact([]int{0, c.Chunk, 7}) {
				if worst := c.worst(t, m, chunk, Options{Exact: true}); !(worst <= 1e-4) {
					t.Errorf("pieces of %d tokens: a logit is off by %.1e", chunk, worst)
				}
			}
			for _, kind := range []struct {
				dtype tensor.Dtype
				bound float64
			}{{tensor.Float32, 1e-4}, {la.Float16, 0.01}, {la.BFloat16, 0.25}} {
				worst := c.worst(t, m, 0, Options{Exact: true, Weights: kind.dtype})
				if !(worst <= kind.bound) {
					t.Errorf("weights of %v: a logit is off by %.1e, more than %v", kind.dtype, worst, kind.bound)
				}
			}
		})
	}
}

// TestShippedFewBits: the shipped model predicts texts of its own with weights of 8 and 4 bits nearly as well as with its own, and not
// equally well.
func TestShippedFewBits(t *testing.T) {
	m := openCheckpoint(t, "../tiny")
	surprise := func(o Options) float64 {
		e, sum, n := modelEngine(t, m, o), 0.0, 0
		for _, c := range readShippedGolden(t).Greedy {
			p, err := e.LogProbs(context.Background(), append(slices.Clone(c.IDs), c.Next...))
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range p {
				sum, n = sum-p, n+1
			}
		}
		return sum / float64(n)
	}
	want := surprise(Options{Exact: true})
	for _, c := range []struct {
		o    Options
		most float64
	}{
		{Options{Exact: true, Weights: tensor.Int8}, 0.003}, {Options{Weights: tensor.Int8}, 0.003}, {Options{Exact: true, Weights: la.E4M3}, 0.01},
		{Options{Exact: true, Weights: nn.Int4}, 0.02}, {Options{Weights: nn.Int4}, 0.02},
	} {
		if off := math.Abs(surprise(c.o) - want); off == 0 || off > c.most {
			t.Errorf("weights of %v, exact %v: the mean of -log p is off by %v of %v", c.o.Weights, c.o.Exact, off, want)
		}
	}
}

// TestGPUShippedLogits: the same on a GPU, within a bound if weights and cache have 16 bits.
func TestGPUShippedLogits(t *testing.T) { testGPUShippedLogits(t, 1) }

func TestGPUsShippedLogits(t *testing.T) { testGPUShippedLogits(t, 2) }

func testGPUShippedLogits(t *testing.T, gpus int) {
	gpu := devicetest.OpenSome(t, gpus)
	for _, c := range readShippedGolden(t).Logits {
		if testing.Short() && c.Name != "single" && (c.Name != "dim80" || gpus > 1) {
			continue // an emulated GPU is slow
		}
		t.Run(c.Name, func(t *testing.T) {
			m := openCheckpoint(t, c.Model)
			if s := m.Network().Sizes(); s.HeadDim != 64 && s.HeadDim != 80 {
				t.Skipf("no kernel for heads of %d", s.HeadDim)
			}
			for _, kind := range []struct {
				weights, cache tensor.Dtype
				bound          float64
				mixed          bool
			}{
				{tensor.Float32, tensor.Float32, 1e-4, false}, {la.Float16, la.Float16, 0.02, false}, {la.BFloat16, la.BFloat16, 0.3, false},
				{la.Float16, la.Float16, 0.05, true}, {la.BFloat16, la.BFloat16, 0.5, true},
			} {
				if testing.Short() && (kind.mixed != (gpus > 1) || kind.weights == la.BFloat16 && !kind.mixed) {
					continue
				}
				if worst := c.worst(t, m, c.Chunk, Options{Device: gpu, Weights: kind.weights, Cache: kind.cache, Exact: !kind.mixed}); !(worst <= kind.bound) {
					t.Errorf("%v, mixed %v: a logit is off by %.1e, more than %v", kind.weights, kind.mixed, worst, kind.bound)
				}
			}
		})
	}
}

// TestShippedTexts: 200 tokens of the shipped model are those of transformers, of each prompt alone and of all together, with
// weights and a cache of every type that leaves the margins, and with guesses.
func TestShippedTexts(t *testing.T) {
	all := []Options{
		{}, {Exact: true}, {Exact: true, BatchInvariant: true}, {Weights: tensor.Float32}, {Weights: la.Float16, Cache: la.Float16, Draft: 30},
		{Exact: true, Schedule: la.FixedSplit(3)}, {Exact: true, Schedule: la.PerHead}, {Exact: true, Workers: 3, Chunk: 20},
	}
	reftest.Rand(t).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	testShippedTexts(t, all[:reftest.Cases(t, 2, len(all))])
}

// TestGPUShippedTexts: the same on a GPU.
func TestGPUShippedTexts(t *testing.T) {
	gpu := devicetest.Open(t)
	testShippedTexts(t, []Options{{Device: gpu, Exact: true}, {Device: gpu, Weights: la.Float16, Cache: la.Float16, Draft: 30}})
}

// TestGPUsShippedTexts: the same on two GPUs, which share the cache in both ways.
func TestGPUsShippedTexts(t *testing.T) {
	gpus := devicetest.OpenSome(t, 2)
	testShippedTexts(t, []Options{{Device: gpus, Exact: true, Shard: la.ShardHeads}, {Device: gpus, Weights: la.Float16, Cache: la.Float16, Shard: la.ShardContext}})
}

func testShippedTexts(t *testing.T, all []Options) {
	m := openCheckpoint(t, "../tiny")
	cases := readShippedGolden(t).Greedy
	for _, o := range all {
		n, cases := len(cases[0].Next), cases
		o.Context, o.Tokens, o.Batch = 400, 1200, 4
		if o.Device != nil && testing.Short() {
			n, o.Chunk, cases = 3, 128, cases[1:] // an emulated GPU is slow
		}
		e := modelEngine(t, m, o)
		var together []Request
		for i, c := range cases {
			if ids := encode(t, m, c.Prompt, false); !slices.Equal(ids, c.IDs) {
				t.Errorf("prompt %q is %v, want %v", c.Prompt, ids, c.IDs)
			}
			if text := m.Tokenizer().Decode(c.Next); text != c.Text {
				t.Errorf("%v is %q, want %q", c.Next, text, c.Text)
			}
			r := Request{Prompt: c.IDs, Tokens: n, Ends: []int{}, Draft: min(o.Draft, 8)}
			if together = append(together, r); i > 0 && (o.Device != nil && testing.Short() || !o.Exact && i > 1) {
				continue
			}
			if got := alone(t, e, r); !slices.Equal(got, c.Next[:n]) {
				t.Errorf("%+v: %q alone: %q, want %q", o, c.Prompt, m.Tokenizer().Decode(got), c.Text)
			}
		}
		texts, err := e.StartAll(context.Background(), together...)
		if err != nil {
			t.Fatal(err)
		}
		for i, text := range texts {
			if got, err := ids(text); err != nil || !slices.Equal(got, cases[i].Next[:n]) {
				t.Errorf("%+v: %q beside others: %q, %v, want %q", o, cases[i].Prompt, m.Tokenizer().Decode(got), err, cases[i].Text)
			}
		}
	}
}

// TestCheckpointTexts: greedy texts of a checkpoint of OPT's family with GELU, and without biases, are those of transformers.
func TestCheckpointTexts(t *testing.T) {
	testCheckpointTexts(t, []Options{{Exact: true}, {Weights: tensor.Float32}, {Exact: true, Weights: la.Float16}, {Weights: la.Float16, Cache: la.Float16}})
}

func TestGPUCheckpointTexts(t *testing.T) {
	gpu := devicetest.Open(t)
	testCheckpointTexts(t, []Options{{Device: gpu, Exact: true, Weights: tensor.Float32}, {Device: gpu, Exact: true, Weights: la.Float16, Cache: la.Float16}})
}

func testCheckpointTexts(t *testing.T, all []Options) {
	cases := readShippedGolden(t).Tokens
	if all[0].Device != nil && testing.Short() {
		all = all[1:]
	}
	for _, o := range all {
		o.Batch, o.Tokens = len(cases), 500
		e := modelEngine(t, openCheckpoint(t, cases[0].Model), o)
		var texts []*Text
		for _, c := range cases {
			if c.Model != cases[0].Model {
				t.Fatalf("%s and %s", c.Model, cases[0].Model)
			}
			r := Request{Prompt: c.IDs, Tokens: len(c.Next), Ends: []int{}}
			if got := alone(t, e, r); !slices.Equal(got, c.Next) {
				t.Errorf("%+v: %v alone: %v, want %v", o, c.IDs, got, c.Next)
			}
			texts = append(texts, start(t, e, r))
		}
		for i, text := range texts {
			if got, err := ids(text); err != nil || !slices.Equal(got, cases[i].Next) {
				t.Errorf("%+v: %v beside others: %v, %v, want %v", o, cases[i].IDs, got, err, cases[i].Next)
			}
		}
	}
}

var everyQuestion = flag.Bool("recall", false, "TestRecall asks all questions of recall.json")

// TestRecall: the shipped model answers with facts that were stated once, 1,500 tokens and more before the question. The questions
// of a document share its tokens.
func TestRecall(t *testing.T) {
	var documents []struct {
		Text   string
		Tokens int
		Cases  []struct {
			Question, Answer string
			Distance         int
		}
	}
	readShipped(t, "recall.json", &documents)
	switch {
	case *everyQuestion:
	case testing.Short():
		documents = documents[:1]
	default:
		documents = documents[:reftest.Cases(t, 2, 4)]
	}
	m := openCheckpoint(t, "../tiny")
	e := modelEngine(t, m, Options{Context: m.Network().Sizes().Context})
	right, count := 0, 0
	for _, doc := range documents {
		text := encode(t, m, doc.Text, false)
		if len(text) != doc.Tokens {
			t.Fatalf("%d tokens, want %d", len(text), doc.Tokens)
		}
		for i, c := range doc.Cases {
			if c.Distance < 1500 {
				t.Errorf("a distance of %d tokens", c.Distance)
			}
			ids := encode(t, m, doc.Text+c.Question, false)
			if !slices.Equal(ids[:len(text)], text) {
				t.Fatalf("%q merges with the text before it", c.Question)
			}
			said := start(t, e, Request{Prompt: ids, Tokens: len(encode(t, m, c.Answer, true)), Ends: []int{}})
			answer, err := said.Wait()
			if err != nil || i > 0 && said.Shared() < len(text) {
				t.Errorf("%d of %d tokens were shared, %v", said.Shared(), len(text), err)
			}
			if answer == c.Answer {
				right++
			} else {
				t.Logf("%s%s, not%s", strings.TrimSpace(c.Question), answer, c.Answer)
			}
			count++
		}
	}
	if right*100 < 95*count {
		t.Errorf("%d of %d answers are right", right, count)
	}
}
