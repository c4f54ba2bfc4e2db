package load

import (
	"context"
	"errors"
	"strings"
	"testing"

	validator "github.com/santhosh-tekuri/jsonschema/v6"

	"gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/decoder/jsonschema"
	"gorgonia.org/leanattention/decoder/tokenizer"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestSchemas: at temperature 1, texts of random schemas that end by themselves satisfy their schemas, as another validator says.
func TestSchemas(t *testing.T) {
	m, err := decoder.OpenFS("the shipped model", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	e, err := m.Engine(decoder.Options{Context: 256, Tokens: 2048, Batch: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	rng := reftest.Rand(t)
	prompt, err := m.Tokenizer().Encode("Once upon a time", tokenizer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	vocabulary := jsonschema.NewVocabulary(m.Tokenizer(), m.Ends())
	type question struct {
		schema string
		valid  *validator.Schema
		text   *decoder.Text
	}
	var all []question
	want := reftest.Cases(t, 100, 1000)
	for len(all) < want {
		q := question{schema: reftest.Schema(rng)}
		document, err := validator.UnmarshalJSON(strings.NewReader(q.schema))
		c := validator.NewCompiler()
		err = errors.Join(err, c.AddResource("schema.json", document))
		if err == nil {
			q.valid, err = c.Compile("schema.json")
		}
		if err != nil {
			t.Fatalf("%s: %v", q.schema, err)
		}
		s, err := vocabulary.Compile([]byte(q.schema))
		if errors.Is(err, jsonschema.ErrSchema) { // no value satisfies it
			continue
		}
		if err != nil {
			t.Fatalf("%s: %v", q.schema, err)
		}
		q.text, err = e.Start(context.Background(), decoder.Request{Prompt: prompt, Tokens: 200, Constraint: s.Constrain(), Sampling: decoder.Sampling{Temperature: 1, Seed: rng.Uint64()}})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, q)
	}
	ended := 0
	for _, q := range all {
		text, err := q.text.Wait()
		if err != nil {
			t.Fatalf("%s: %q: %v", q.schema, text, err)
		}
		if q.text.Reason() != decoder.End {
			continue
		}
		ended++
		value, err := validator.UnmarshalJSON(strings.NewReader(text))
		if err == nil {
			err = q.valid.Validate(value)
		}
		if err != nil {
			t.Errorf("%s: %q: %v", q.schema, text, err)
		}
	}
	if t.Logf("%d of %d texts ended", ended, want); ended < want/2 {
		t.Errorf("%d of %d texts ended", ended, want)
	}
}
