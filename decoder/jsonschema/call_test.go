package jsonschema

import (
	"errors"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// TestCalls: texts of random tokens that end are calls of a function, with arguments that satisfy the function's own document.
func TestCalls(t *testing.T) {
	rng := reftest.Rand(t)
	ended, called, cases := 0, map[string]int{}, reftest.Cases(t, 30, 2000)
	all := func() bool {
		return ended >= cases && called[`a"b`] > 0 && called["ab"] > 0 && called["any"] > 0 && called["tree"] > 0
	}
	for range reftest.AtLeast(cases, all) {
		tokens := randomVocabulary(rng, true)
		v := newVocabulary(tokens, []int{endToken})
		tree := reftest.Schema(rng)
		functions := []Function{
			{Name: `a"b`, Parameters: []byte(`{"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"], "$defs": {"x": {"enum": ["red", 1]}}}`)},
			{Name: "ab", Parameters: []byte(`{"properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"], "$defs": {"x": {"const": null}}}`)},
			{Name: "any"},
			{Name: "tree", Parameters: []byte(`{"type": "object", "properties": {"tree": ` + tree + `}, "additionalProperties": false}`)},
		}
		if strings.Contains(tree, "$ref") { // of another document
			functions = functions[:3]
		}
		s, err := v.CompileCall(functions)
		if err != nil {
			t.Fatalf("%s: %v", tree, err)
		}
		for range 3 {
			said, end := walk(t, rng, s, tokens, 120)
			if !end {
				continue
			}
			ended++
			x, ok := decode(t, said).(map[string]any)
			name, _ := x["name"].(string)
			called[name]++
			if !ok || len(x) != 2 {
				t.Fatalf("%q", said)
			}
			for _, f := range functions {
				if f.Name != name {
					continue
				}
				if f.Parameters == nil {
					f.Parameters = []byte(`{"type": "object"}`)
				}
				if root := decode(t, string(f.Parameters)); !satisfies(root, root, x["arguments"]) {
					t.Fatalf("%s: %q", f.Parameters, said)
				}
				if _, ok := x["arguments"].(map[string]any); !ok {
					t.Fatalf("%q: no object", said)
				}
			}
		}
	}
	if !all() || called[`a"b`]+called["ab"]+called["any"]+called["tree"] != ended {
		t.Errorf("%d texts ended: %v", ended, called)
	}
}

func TestCallsRefused(t *testing.T) {
	v := newVocabulary(randomVocabulary(reftest.Rand(t), true), []int{endToken})
	many := make([]Function, 1<<18)
	for i := range many {
		many[i].Name = "function"
	}
	for _, c := range []struct {
		functions []Function
		want      error
		text      string
	}{
		{nil, ErrSchema, "there are no functions"},
		{[]Function{{Name: "good"}, {Name: "bad", Parameters: []byte(`{"properties": {"a": {"pattern": "x"}}}`)}}, ErrUnsupported, `function "bad": jsonschema: #/properties/a/pattern`},
		{[]Function{{Name: "f", Parameters: []byte(`{"type": "array"}`)}}, ErrSchema, "another type than object"},
		{[]Function{{Name: "f", Parameters: []byte(`{"type": ["object", "null"]}`)}}, ErrSchema, "another type than object"},
		{[]Function{{Name: "f", Parameters: []byte(`true`)}}, ErrSchema, "parameters are no object"},
		{[]Function{{Name: "f", Parameters: []byte(`{`)}}, ErrSchema, `function "f": jsonschema: no JSON`},
		{[]Function{{Name: "f", Parameters: []byte(`{"required": ["a"], "additionalProperties": false}`)}}, ErrSchema, "no value"},
		{many, ErrUnsupported, "too large"},
	} {
		if _, err := v.CompileCall(c.functions); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%d functions: %v, want %v: %s", len(c.functions), err, c.want, c.text)
		}
	}
}
