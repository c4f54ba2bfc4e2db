package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/examples/opt/model"
	"gorgonia.org/leanattention/examples/opt/sample"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
)

// oracle tells how tokens follow a prompt: the distributions that a plain forward pass of the model has.
type oracle struct {
	t       *testing.T
	decoder *model.Decoder
	prompt  []int
	config  sample.Config
	known   map[beginning][]float64
}

// beginning is up to so many tokens, behind which there are zeros: a token is counted from 1 here.
type beginning [4]int

func beginningOf(tokens []int) (b beginning) {
	for i, id := range tokens {
		b[i] = id + 1
	}
	return b
}

// after is the distribution behind the prompt and some tokens.
func (o *oracle) after(tokens []int) []float64 {
	key := beginningOf(tokens)
	if p, ok := o.known[key]; ok {
		return p
	}
	if err := o.decoder.Truncate(0, 0); err != nil {
		o.t.Fatal(err)
	}
	if err := o.decoder.Prefill(context.Background(), [][]int{slices.Concat(o.prompt, tokens)}, nil); err != nil {
		o.t.Fatal(err)
	}
	o.known[key] = distribution(o.decoder.Logits(0), o.config)
	return o.known[key]
}

// distribution is what sample.Config describes, computed by sorting.
func distribution(logits []float32, c sample.Config) []float64 {
	order := make([]int, len(logits))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(logits[b], logits[a]) })
	if c.TopK > 0 {
		order = order[:min(c.TopK, len(order))]
	}
	p, total := make([]float64, len(logits)), 0.0
	for _, i := range order {
		p[i] = math.Exp(float64(logits[i]-logits[order[0]]) / c.Temperature)
		total += p[i]
	}
	sum, n := 0.0, 0
	for n < len(order) && (n == 0 || c.TopP == 0 || c.TopP == 1 || sum < c.TopP*total) {
		sum += p[order[n]]
		n++
	}
	for _, i := range order[n:] {
		p[i] = 0
	}
	for i := range p {
		p[i] /= sum
	}
	return p
}

func likeliest(p []float64) int { return slices.Index(p, slices.Max(p)) }

// chiSquare compares texts of a few tokens with the distributions behind each of their beginnings, by Pearson's test. It
// returns the sum over all beginnings that are frequent, and its degrees of freedom.
func (o *oracle) chiSquare(texts [][]int) (chi float64, freedom int) {
	behind, tokens := map[beginning]map[int]int{}, map[beginning][]int{}
	for _, text := range texts {
		for n := range text {
			key := beginningOf(text[:n])
			if behind[key] == nil {
				behind[key], tokens[key] = map[int]int{}, text[:n]
			}
			behind[key][text[n]]++
		}
	}
	for key, counts := range behind {
		n := 0
		for _, c := range counts {
			n += c
		}
		if n < 100 {
			continue
		}
		rest, expectedRest := 0, 0.0 // of tokens that are rare
		cell := func(count int, expected float64) {
			chi += (float64(count) - expected) * (float64(count) - expected) / expected
			freedom++
		}
		for id, p := range o.after(tokens[key]) {
			switch e := p * float64(n); {
			case p == 0 && counts[id] > 0:
				o.t.Fatalf("token %d behind %v came %d times, and its probability is 0", id, tokens[key], counts[id])
			case p == 0:
			case e < 10:
				rest, expectedRest = rest+counts[id], expectedRest+e
			default:
				cell(counts[id], e)
			}
		}
		if expectedRest >= 10 {
			cell(rest, expectedRest)
		}
		freedom--
	}
	return chi, freedom
}

// fits says whether that may be chance: five deviations are not.
func fits(chi float64, freedom int) bool {
	return freedom > 10 && chi < float64(freedom)+5*math.Sqrt(2*float64(freedom))
}

// Tokens are distributed as without drafts: each has the model's own probability behind those before it, whether it
// was guessed or not. 10^5 tokens are drawn.
func TestDraftDistribution(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["num_hidden_layers"], c["max_position_embeddings"] = 1, 32 })
	const batches, length = 250, 4
	draws := reftest.Cases(t, 12_500, 100_000) // for each of eight ways to choose tokens
	for _, flags := range [][]string{
		{"-temperature", "1", "-top-k", "5"}, {"-temperature", "0.8", "-top-p", "0.6"}, {"-temperature", "0.7"}, {"-temperature", "2", "-top-k", "12", "-top-p", "0.7"},
	} {
		for _, there := range []bool{false, true} { // tokens are chosen by the decoder, as on a GPU
			t.Run(fmt.Sprint(flags, there), func(t *testing.T) {
				o, err := parse(append([]string{"-model", dir, "-prompt", "abcab", "-seed", "1", "-n", fmt.Sprint(length), "-draft", "ngram", "-draft-tokens", "3"}, flags...), io.Discard)
				if err != nil {
					t.Fatal(err)
				}
				l, err := load(o, io.Discard)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				prompt, err := l.encode("abcab", true, 32)
				if err != nil {
					t.Fatal(err)
				}
				mo := model.Options{Draft: 3, Seed: 1, Capacity: slices.Repeat([]int{len(prompt) + length}, batches)}
				if there {
					mo.Choices = slices.Repeat([]nn.Choice{{Temperature: o.sample.Temperature, TopK: o.sample.TopK, TopP: o.sample.TopP}}, batches)
				}
				if err := l.build(mo, io.Discard); err != nil {
					t.Fatal(err)
				}
				plain, err := l.weights.NewDecoder(model.Options{Capacity: []int{len(prompt) + length}})
				if err != nil {
					t.Fatal(err)
				}
				defer plain.Close()
				truth := &oracle{t, plain, prompt, o.sample, map[beginning][]float64{}}

				// Behind each likely token the most likely ones are guessed.
				var corpus []int
				for first, p := range truth.after(nil) {
					if p < 0.01 {
						continue
					}
					text := []int{first}
					for range length - 1 {
						text = append(text, likeliest(truth.after(text)))
					}
					corpus = slices.Concat(corpus, prompt[len(prompt)-1:], text)
				}

				var texts [][]int
				for round := 0; len(texts)*length < draws; round++ {
					l.options.sample.Seed = uint64(round)
					b := l.newBatch(&mo)
					b.decoder, b.begin, b.ends = l.decoder, func() output { return silent{} }, nil
					b.line = progress{w: io.Discard}
					for i := range batches {
						if err := l.decoder.Truncate(i, min(l.decoder.Len(i), len(prompt)-1)); err != nil {
							t.Fatal(err)
						}
						s, err := l.newSequence(i, prompt, l.decoder.Len(i), length)
						if err != nil {
							t.Fatal(err)
						}
						s.lookup.text = slices.Concat(corpus, prompt)
						b.sequences = append(b.sequences, s)
					}
					if err := b.run(context.Background()); err != nil {
						t.Fatal(err)
					}
					for i := range b.sequences {
						texts = append(texts, b.sequences[i].result.tokens)
					}
				}
				s := l.decoder.Stats().Draft
				if s.Accepted < s.Tokens/20 || s.Accepted > s.Tokens*19/20 {
					t.Fatalf("%d of %d guesses were accepted", s.Accepted, s.Tokens)
				}
				chi, freedom := truth.chiSquare(texts)
				t.Logf("%d texts, %d of %d guesses accepted: chi square %.1f with %d degrees of freedom", len(texts), s.Accepted, s.Tokens, chi, freedom)
				if !fits(chi, freedom) {
					t.Errorf("chi square %.1f with %d degrees of freedom", chi, freedom)
				}

				// The test finds rules that are wrong.
				rng := rand.New(rand.NewPCG(1, 2))
				for name, wrong := range map[string]func(guess int, p []float64) int{
					"likely": func(guess int, p []float64) int {
						if p[guess] > 0.1 {
							return guess
						}
						return drawn(p, rng.Float64())
					},
					"twice": func(guess int, p []float64) int { // the acceptance of speculative sampling, and then a draw that may give the guess again
						if rng.Float64() < p[guess] {
							return guess
						}
						return drawn(p, rng.Float64())
					},
				} {
					for i := range texts {
						texts[i] = nil
						for range length {
							p := truth.after(texts[i])
							texts[i] = append(texts[i], wrong(likeliest(p), p))
						}
					}
					if chi, freedom := truth.chiSquare(texts); fits(chi, freedom) {
						t.Errorf("%s: a wrong rule fits: chi square %.1f with %d degrees of freedom", name, chi, freedom)
					}
				}
			})
		}
	}
}

// drawn is the token that a random number in [0, 1) chooses.
func drawn(p []float64, u float64) int {
	last := 0
	for i, x := range p {
		if x > 0 {
			if last = i; u < x {
				break
			}
			u -= x
		}
	}
	return last
}
