package jsonschema

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// largeVocabulary returns n tokens: bytes, and random words, punctuation and characters as byte-level tokenizers have them.
func largeVocabulary(n int) [][]byte {
	rng := rand.New(rand.NewPCG(1, 1))
	tokens := [][]byte{nil, nil, nil, nil}
	for b := range 256 {
		tokens = append(tokens, []byte{byte(b)})
	}
	seen := map[string]bool{}
	for len(tokens) < n {
		var token []byte
		switch kind := rng.IntN(20); {
		case kind == 0: // code
			for range 1 + rng.IntN(4) {
				token = append(token, `{}[]":,.;()<>=-+*/\ _'`[rng.IntN(22)])
			}
		case kind < 4:
			for range 1 + rng.IntN(4) {
				token = append(token, string(rune(0xc0+rng.IntN(0x3000)))...)
			}
			token = token[:1+rng.IntN(len(token))]
		default:
			if rng.IntN(2) == 0 {
				token = append(token, ' ')
			}
			for range 2 + rng.IntN(8) {
				token = append(token, "etaoinshrdlucmfwypvbgkjqxz"[min(25, int(rng.ExpFloat64()*7))])
			}
		}
		if !seen[string(token)] {
			seen[string(token)] = true
			tokens = append(tokens, token)
		}
	}
	return tokens
}

// BenchmarkMasks measures the masks of a text: of the first text of a schema, and of later ones.
func BenchmarkMasks(b *testing.B) {
	const schema = `{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
		"address": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "number"}}, "required": ["street"], "additionalProperties": false}}, "required": ["name", "age"]}`
	const text = `{"name": "Lady \u00e9 of 日本", "age": 42, "tags": ["red","blue"], "address": {"street": "a long street in town", "number": -1.5e3}}`
	for _, n := range []int{49152, 128256} {
		tokens := largeVocabulary(n)
		v := newVocabulary(tokens, []int{endToken})
		b.Run(fmt.Sprintf("vocabulary/%d", n), func(b *testing.B) {
			for b.Loop() {
				newVocabulary(tokens, []int{endToken})
			}
		})
		run := func(b *testing.B, s *Schema) {
			c := s.Constrain()
			for i := range len(text) {
				c.Allowed()
				c.at = s.step(c.at, text[i])
			}
			c.Allowed()
			if !c.at.complete {
				b.Fatal("the text is not complete")
			}
		}
		for _, first := range []bool{true, false} {
			b.Run(fmt.Sprintf("first=%v/%d", first, n), func(b *testing.B) {
				s, err := v.Compile([]byte(schema))
				for b.Loop() {
					if first {
						s, err = v.Compile([]byte(schema))
					}
					if err != nil {
						b.Fatal(err)
					}
					run(b, s)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*(len(text)+1)), "ns/mask")
			})
		}
		b.Run(fmt.Sprintf("json_object/%d", n), func(b *testing.B) {
			for b.Loop() {
				s, err := v.Compile([]byte(`{"type": "object"}`))
				if err != nil {
					b.Fatal(err)
				}
				run(b, s)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*(len(text)+1)), "ns/mask")
		})
		b.Run(fmt.Sprintf("others/%d", n), func(b *testing.B) { // names that properties does not have
			for b.Loop() {
				s, err := v.Compile([]byte(`{"properties": {"name": {"type": "string"}}, "additionalProperties": {"type": "string"}}`))
				if err != nil {
					b.Fatal(err)
				}
				c := s.Constrain()
				for _, x := range []byte(`{"n`) {
					c.at = s.step(c.at, x)
					c.Allowed()
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*3), "ns/mask")
		})
	}
}
