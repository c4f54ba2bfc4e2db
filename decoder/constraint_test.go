package decoder

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/decoder/jsonschema"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestConstraint: texts with schemas that share a cache for few of them, with guesses, have the tokens that they have alone, and are JSON.
func TestConstraint(t *testing.T) {
	m, err := OpenFS("the shipped model", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	rng := reftest.Rand(t)
	v := jsonschema.NewVocabulary(m.Tokenizer(), m.Ends())
	var requests []Request
	var schemas []*jsonschema.Schema
	for range reftest.Cases(t, 12, 200) {
		s, err := v.Compile([]byte(reftest.Schema(rng)))
		if errors.Is(err, jsonschema.ErrSchema) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, temperature := range []float64{0, 1} {
			r := Request{Prompt: encode(t, m, "Once upon a time", false), Tokens: 60, Draft: 2 * rng.IntN(2), LogProbs: rng.IntN(2), Sampling: Sampling{Temperature: temperature, Seed: rng.Uint64(), TopP: 0.99}}
			if rng.IntN(2) == 0 {
				quote, _ := m.Tokenizer().ID(`"`)
				r.Sampling.RepetitionPenalty, r.Sampling.LogitBias = 1.1, map[int]float64{quote: 4}
			}
			requests, schemas = append(requests, r), append(schemas, s)
		}
	}
	run := func(o Options, together bool) (all []string) {
		o.Context, o.Exact = 128, true
		e, err := m.Engine(o)
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		var texts []*Text
		for i, r := range requests {
			r.Constraint, r.Draft = schemas[i].Constrain(), min(r.Draft, o.Draft)
			text, err := e.Start(context.Background(), r)
			if err != nil {
				t.Fatal(err)
			}
			if texts = append(texts, text); !together {
				_, _ = text.Wait() // the next text begins behind the end of this one
			}
		}
		for i, text := range texts {
			if _, err := text.Wait(); err != nil {
				t.Error(err)
			}
			said := m.Tokenizer().Decode(text.tokens[len(requests[i].Prompt):])
			if all = append(all, said); text.Reason() == End && !json.Valid([]byte(said)) || text.Reason() != End && text.Reason() != Length {
				t.Errorf("%q ended by %q", said, text.Reason())
			}
		}
		if together && e.stats.Preempted == 0 {
			t.Errorf("%+v", e.stats)
		}
		return all
	}
	want := run(Options{Batch: 1}, false)
	if got := run(Options{Batch: 8, Tokens: 200, Draft: 2}, true); !slices.Equal(got, want) {
		t.Errorf("together %q\nalone %q", got, want)
	}
	cut := slices.DeleteFunc(slices.Clone(want), func(s string) bool { return json.Valid([]byte(s)) })
	if len(cut) > len(want)*3/4 {
		t.Errorf("%d of %d texts are no JSON", len(cut), len(want))
	}
	e, err := m.Engine(Options{Context: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	r := requests[0]
	r.Constraint, r.Ends, r.Draft = schemas[0].Constrain(), []int{}, 0
	if _, err := e.Start(context.Background(), r); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "no token ends the text") {
		t.Errorf("without a token that ends the text: %v", err)
	}
}
