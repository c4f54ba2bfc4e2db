package serve

import (
	"encoding/json"
	"fmt"
	"testing"

	"gorgonia.org/leanattention/decoder"
)

// TestFormat: answers with response_format are JSON of the schema, as a whole and as a stream, for all choices.
func TestFormat(t *testing.T) {
	r := newServer(t, Options{}, decoder.Options{Batch: 4, Draft: 2})
	type person struct {
		Name *string  `json:"name"`
		Kind string   `json:"kind"`
		Tags []string `json:"tags"`
	}
	const schema = `{"type": "object", "properties": {"kind": {"enum": ["king", "queen"]}, "name": {"type": ["string", "null"]},
		"tags": {"type": "array", "items": {"const": "old"}, "maxItems": 2}}, "required": ["kind", "tags"], "additionalProperties": false}`
	ended := 0
	for seed := range 6 {
		format := `{"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": ` + schema + `}}`
		if seed == 0 {
			format = `{"type": "json_object"}`
		}
		body := fmt.Sprintf(`{"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 60, "temperature": 1, "seed": %d, "n": 3, "logprobs": true, "response_format": %s`, 7*seed, format)
		var c chatCompletion
		r.post("/v1/chat/completions", body+"}", &c)
		streamed := make([]string, 3)
		for _, e := range r.events("/v1/chat/completions", body+`, "stream": true}`) {
			if e != "[DONE]" {
				var c chatCompletion
				strict(t, e, &c)
				if x := c.Choices[0]; x.Delta.Content != nil {
					streamed[x.Index] += *x.Delta.Content
				}
			}
		}
		for i, x := range c.Choices {
			text := *x.Message.Content
			if streamed[i] != text || text[0] != '{' {
				t.Errorf("%q, streamed %q", text, streamed[i])
			}
			if *x.FinishReason != "stop" {
				continue
			}
			ended++
			if seed == 0 {
				if !json.Valid([]byte(text)) {
					t.Errorf("%q", text)
				}
				continue
			}
			var p person
			if strict(t, text, &p); p.Kind != "king" && p.Kind != "queen" || p.Tags == nil || len(p.Tags) > 2 || len(p.Tags) > 0 && p.Tags[0] != "old" {
				t.Errorf("%q", text)
			}
		}
	}
	if ended < 6 {
		t.Errorf("%d answers ended", ended)
	}
	for i := range 2 * mostSchemas {
		if _, err := r.formats.compile(fmt.Sprintf(`{"const": %d}`, i)); err != nil {
			t.Error(err)
		}
	}
	last := fmt.Sprintf(`{"const": %d}`, 2*mostSchemas-1)
	if again, err := r.formats.compile(last); err != nil || again != r.formats.kept[mostSchemas-1].schema || len(r.formats.kept) != mostSchemas {
		t.Errorf("%d schemas are kept, %v", len(r.formats.kept), err)
	}
}
