package reftest

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
)

// schemaNames are names of members.
var schemaNames = []string{"a", "b", "ab", "abc", "name", "né", "nè", "x y", `q"u`, `back\slash`, "", "日本", "a\nb", "🙂"}

// Schema returns a random JSON schema of the keywords that package jsonschema of the decoder knows. No value may satisfy the schema.
func Schema(rng *rand.Rand) string {
	s := schema(rng, 3, false)
	var defs []string
	for _, name := range []string{"A", "B/~", "C"} {
		defs = append(defs, quoted(name)+": "+schema(rng, 2, false))
	}
	body, ok := strings.CutPrefix(s, "{")
	if !ok {
		return s
	}
	if body != "}" {
		body = ", " + body
	}
	return `{"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "random", "$defs": {` + strings.Join(defs, ", ") + "}" + body
}

func quoted(s string) string {
	b, _ := json.Marshal(s) // strings marshal
	return string(b)
}

// names returns some different names.
func names(rng *rand.Rand, most int) (all []string) {
	for _, i := range rng.Perm(len(schemaNames))[:rng.IntN(most+1)] {
		all = append(all, schemaNames[i])
	}
	return all
}

// schema returns a schema of some depth. within reports that the schema is within an object or an array: elsewhere a reference could lead to
// itself.
func schema(rng *rand.Rand, depth int, within bool) string {
	leaf := []string{`"string"`, `"integer"`, `"number"`, `"boolean"`, `"null"`, `["string", "null"]`, `["number", "boolean", "integer"]`}
	kind := rng.IntN(12)
	if depth == 0 {
		kind = rng.IntN(5)
	}
	if kind == 5 && !within {
		kind = 8
	}
	switch kind {
	case 0, 1:
		return `{"type": ` + leaf[rng.IntN(len(leaf))] + `, "description": "a leaf"}`
	case 2:
		return fmt.Sprintf(`{"enum": [%s, %d, null, %s, [1, {"b": true}], %s]}`, quoted(schemaNames[rng.IntN(len(schemaNames))]), rng.IntN(200), quoted("a\"b\\c\u00e9\n"), quoted(schemaNames[rng.IntN(len(schemaNames))]+"x"))
	case 3:
		return `{"type": "string", "enum": ["red", "green", "gré", "re"]}`
	case 4:
		return `{"const": {"k": [1.5, "v"], "l": {}}}`
	case 5:
		return `{"$ref": "#/$defs/` + []string{"A", "B~1~0", "C"}[rng.IntN(3)] + `"}`
	case 6:
		var all []string
		for range 1 + rng.IntN(3) {
			all = append(all, schema(rng, depth-1, within))
		}
		return `{"anyOf": [` + strings.Join(all, ", ") + "]}"
	case 7, 8:
		s := `{"type": "array", "items": ` + schema(rng, depth-1, true)
		least := rng.IntN(3)
		if rng.IntN(2) == 0 {
			s += fmt.Sprintf(`, "minItems": %d`, least)
		}
		if rng.IntN(2) == 0 {
			s += fmt.Sprintf(`, "maxItems": %d`, least+rng.IntN(3))
		}
		return s + "}"
	}
	var members, required []string
	for _, name := range names(rng, 4) {
		members = append(members, quoted(name)+": "+schema(rng, depth-1, true))
		if rng.IntN(2) == 0 {
			required = append(required, quoted(name))
		}
	}
	if rng.IntN(8) == 0 {
		required = append(required, `"further"`)
	}
	s := `{"type": "object", "properties": {` + strings.Join(members, ", ") + `}, "required": [` + strings.Join(required, ", ") + "]"
	switch rng.IntN(4) {
	case 0:
		s += `, "additionalProperties": ` + schema(rng, depth-1, true)
	case 1:
		s += `, "additionalProperties": false`
	case 2:
		s += `, "additionalProperties": true`
	}
	return s + "}"
}
