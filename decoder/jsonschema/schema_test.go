package jsonschema

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/reftest"
)

const endToken = 3

// randomVocabulary returns tokens of which some have several bytes. Without complete, most bytes of other characters than ASCII have no
// token of their own.
func randomVocabulary(rng *rand.Rand, complete bool) (tokens [][]byte) {
	tokens = [][]byte{nil, []byte(" "), nil, []byte("</s>")}
	for b := range 256 {
		if complete || b < 0x80 && b >= ' ' || b == 0xc3 {
			tokens = append(tokens, []byte{byte(b)})
		}
	}
	pieces := []string{`"`, `":`, `": `, `,`, `, "`, `{"`, `}`, `}}`, `]`, `[`, `[]`, "a", "b", "ab", "c", "na", "me", "é", "è", "日", "本", "日本", "🙂", "\xe6", "\xe6\x97", "\xa5", " ", "\\", `\"`, `\u`, "00", "D8",
		"true", "null", "fal", "se", "1", "0", ".", "e", "-", "red", "gr", "x y", "\n", "further"}
	for range 300 {
		var token []byte
		for range 1 + rng.IntN(4) {
			token = append(token, pieces[rng.IntN(len(pieces))]...)
		}
		tokens = append(tokens, token)
	}
	for _, p := range pieces {
		if complete || len(p) > 1 {
			tokens = append(tokens, []byte(p))
		}
	}
	return tokens
}

func has(mask []uint64, id int) bool { return mask[id/64]>>(id%64)&1 == 1 }

// decode decodes JSON with numbers as they are spelled.
func decode(t testing.TB, text string) (x any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&x); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return x
}

// satisfies is what JSON schema says, written apart from the package.
func satisfies(root, schema, x any) bool {
	if b, ok := schema.(bool); ok {
		return b
	}
	s := schema.(map[string]any)
	if ref, ok := s["$ref"]; ok {
		to := root
		for _, part := range strings.Split(ref.(string), "/")[1:] {
			to = to.(map[string]any)[strings.NewReplacer("~1", "/", "~0", "~").Replace(part)]
		}
		return satisfies(root, to, x)
	}
	equal := func(a, b any) bool {
		p, _ := json.Marshal(a)
		q, _ := json.Marshal(b)
		return bytes.Equal(p, q)
	}
	if c, ok := s["const"]; ok && !equal(c, x) {
		return false
	}
	if list, ok := s["enum"]; ok && !slices.ContainsFunc(list.([]any), func(v any) bool { return equal(v, x) }) {
		return false
	}
	if list, ok := s["anyOf"]; ok && !slices.ContainsFunc(list.([]any), func(v any) bool { return satisfies(root, v, x) }) {
		return false
	}
	is := func(name any) bool {
		switch x := x.(type) {
		case nil:
			return name == "null"
		case bool:
			return name == "boolean"
		case string:
			return name == "string"
		case json.Number:
			f, err := x.Float64()
			return err == nil && (name == "number" || name == "integer" && f == math.Trunc(f))
		case []any:
			return name == "array"
		}
		return name == "object"
	}
	switch kind := s["type"].(type) {
	case string:
		if !is(kind) {
			return false
		}
	case []any:
		if !slices.ContainsFunc(kind, is) {
			return false
		}
	}
	switch x := x.(type) {
	case []any:
		for bound, sign := range map[string]int{"minItems": 1, "maxItems": -1} {
			if n, ok := s[bound]; ok {
				if n, _ := n.(json.Number).Int64(); (len(x)-int(n))*sign < 0 {
					return false
				}
			}
		}
		items, ok := s["items"]
		return !ok || !slices.ContainsFunc(x, func(v any) bool { return !satisfies(root, items, v) })
	case map[string]any:
		if list, ok := s["required"]; ok && slices.ContainsFunc(list.([]any), func(name any) bool { _, ok := x[name.(string)]; return !ok }) {
			return false
		}
		properties, _ := s["properties"].(map[string]any)
		for name, v := range x {
			of, ok := properties[name]
			if !ok {
				of, ok = s["additionalProperties"]
			}
			if ok && !satisfies(root, of, v) {
				return false
			}
		}
	}
	return true
}

// walk writes a text of random tokens, and compares masks with the steps of each token. It returns the text, and whether the text ended.
func walk(t testing.TB, rng *rand.Rand, s *Schema, tokens [][]byte, most int) (text string, ended bool) {
	t.Helper()
	c := s.Constrain()
	for n := range most {
		mask := c.Allowed()
		var ids, closing []int
		for id := range tokens {
			if has(mask, id) {
				ids = append(ids, id)
				if bytes.ContainsAny(tokens[id], `"]},`) {
					closing = append(closing, id)
				}
			}
		}
		if n%8 == 0 {
			for id, token := range tokens {
				at := c.at
				for _, b := range token {
					at = s.step(at, b)
				}
				want := at.spelled && at != dead && len(token) > 0
				if id == endToken {
					want = c.at.complete
				}
				if has(mask, id) != want {
					t.Fatalf("behind %q token %q is %v", text, token, !want)
				}
			}
		}
		if len(ids) == 0 {
			t.Fatalf("no token behind %q", text)
		}
		if has(mask, endToken) && (rng.IntN(2) == 0 || len(ids) == 1) {
			return text, true
		}
		if len(closing) > 0 && (n > most/2 || rng.IntN(3) == 0) {
			ids = closing
		}
		id := ids[rng.IntN(len(ids))]
		if id == endToken {
			return text, true
		}
		text += string(tokens[id])
		c.Accept(id)
	}
	return text, false
}

// TestTexts: texts of random tokens that end satisfy their schemas, and no text has no next token.
func TestTexts(t *testing.T) {
	rng := reftest.Rand(t)
	ended, cut, without, unspelled := 0, 0, 0, 0
	for i := range reftest.Cases(t, 60, 4000) {
		tokens := randomVocabulary(rng, i%2 == 0)
		v := newVocabulary(tokens, []int{endToken})
		text := reftest.Schema(rng)
		s, err := v.Compile([]byte(text))
		switch {
		case errors.Is(err, ErrSchema):
			without++
			continue
		case errors.Is(err, ErrUnsupported) && !v.complete:
			unspelled++
			continue
		case err != nil:
			t.Fatalf("%s: %v", text, err)
		}
		root := decode(t, text)
		for range 3 {
			said, end := walk(t, rng, s, tokens, 120)
			if !end {
				cut++
				continue
			}
			ended++
			if x := decode(t, said); !satisfies(root, root, x) {
				t.Fatalf("%s: %q", text, said)
			}
		}
	}
	t.Logf("%d texts ended, %d were cut, %d schemas have no value, %d cannot be spelled", ended, cut, without, unspelled)
	if all := reftest.Cases(t, 60, 4000); ended < all || without > all/3 || unspelled > all/2 {
		t.Errorf("%d texts ended, %d were cut, %d schemas have no value, %d cannot be spelled", ended, cut, without, unspelled)
	}
}

// sayer writes random values of a schema.
type sayer struct {
	rng  *rand.Rand
	root *value
}

func (r *sayer) space() string { return []string{"", " "}[r.rng.IntN(2)] }

func (r *sayer) anything(depth int) string {
	switch n := r.rng.IntN(7); {
	case n == 0 && depth > 0:
		return "[" + r.anything(depth-1) + "," + r.space() + r.anything(depth-1) + "]"
	case n == 1 && depth > 0:
		return `{"k\u00e9\n":` + r.space() + r.anything(depth-1) + "}"
	case n == 2:
		return []string{"null", "true", "false", "[]", "{}"}[r.rng.IntN(5)]
	case n == 3:
		return []string{"0", "-0", "-12.50e-7", "1E+10", "9007199254740993", "0.1"}[r.rng.IntN(6)]
	}
	return []string{`""`, `"é\"\\\/\b\f\n\r\t"`, `"\uD83D\uDE42\u20aC\ud7ff\uEEEE"`, `"🙂 日本 ` + "\x7f" + `"`}[r.rng.IntN(4)]
}

// say returns a value; ok is false if there is none of the depth.
func (r *sayer) say(s *value, depth int) (text string, ok bool) {
	if depth < 0 || s.kind == 'f' {
		return "", false
	}
	if s.kind == 't' {
		return r.anything(depth), true
	}
	if ref := s.member("$ref"); ref != nil {
		name := strings.NewReplacer("~1", "/", "~0", "~").Replace(strings.TrimPrefix(ref.text, "#/$defs/"))
		return r.say(r.root.member("$defs").member(name), depth-1)
	}
	if all := s.member("anyOf"); all != nil {
		return r.say(all.values[r.rng.IntN(len(all.values))], depth-1)
	}
	if c := s.member("const"); c != nil {
		s = &value{keys: []string{"enum"}, values: []*value{{values: []*value{c}}}}
	}
	if all := s.member("enum"); all != nil {
		var b strings.Builder
		all.values[r.rng.IntN(len(all.values))].write(&b)
		return b.String(), true
	}
	kind := s.member("type")
	if kind.kind == '[' {
		kind = kind.values[r.rng.IntN(len(kind.values))]
	}
	switch kind.text {
	case "string":
		return []string{`""`, `"a\\"`, `"\ud83d\ude42é"`}[r.rng.IntN(3)], true
	case "integer":
		return strconv.Itoa(r.rng.IntN(2001) - 1000), true
	case "number":
		return []string{"1.5", "-0", "17", "3e2"}[r.rng.IntN(4)], true
	case "boolean":
		return "false", true
	case "null":
		return "null", true
	case "array":
		count := func(key string, otherwise int) int {
			if v := s.member(key); v != nil {
				n, _ := strconv.Atoi(v.text)
				return n
			}
			return otherwise
		}
		least := count("minItems", 0)
		most := count("maxItems", least+2)
		var parts []string
		for range least + r.rng.IntN(most-least+1) {
			part, ok := r.say(s.member("items"), depth-1)
			if !ok && len(parts) >= least {
				break
			}
			if !ok {
				return "", false
			}
			parts = append(parts, part)
		}
		return "[" + strings.Join(parts, ","+r.space()) + "]", true
	}
	var parts []string
	properties := s.member("properties")
	required := func(name string) bool {
		return slices.ContainsFunc(s.member("required").values, func(v *value) bool { return v.text == name })
	}
	for i, name := range properties.keys {
		if !required(name) && r.rng.IntN(2) == 0 {
			continue
		}
		part, ok := r.say(properties.values[i], depth-1)
		if !ok && required(name) {
			return "", false
		}
		if ok {
			parts = append(parts, quote(name)+":"+r.space()+part)
		}
	}
	more := s.member("additionalProperties")
	others := more
	if others == nil {
		others = &value{kind: 't'}
	}
	if required("further") {
		part, ok := r.say(others, depth-1)
		if !ok {
			return "", false
		}
		parts = append(parts, `"further":`+r.space()+part)
	}
	if more != nil {
		for _, name := range []string{"abcd", "n", "nê", "日", "🙃", "z"} {
			if part, ok := r.say(more, depth-1); ok && r.rng.IntN(3) == 0 {
				parts = append(parts, quote(name)+":"+r.space()+part)
			}
		}
	}
	return "{" + strings.Join(parts, ","+r.space()) + "}", true
}

// TestAccepted: random values of a schema can be written in any tokens.
func TestAccepted(t *testing.T) {
	rng := reftest.Rand(t)
	said := 0
	for range reftest.Cases(t, 60, 4000) {
		tokens := randomVocabulary(rng, true)
		v := newVocabulary(tokens, []int{endToken})
		text := reftest.Schema(rng)
		s, err := v.Compile([]byte(text))
		if errors.Is(err, ErrSchema) {
			continue
		}
		root, e := parse([]byte(text))
		if err = errors.Join(err, e); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			r := sayer{rng, root}
			want, ok := r.say(root, 12)
			if !ok {
				continue
			}
			said++
			c := s.Constrain()
			for rest := want; rest != ""; {
				var ids []int
				for id, token := range tokens {
					if id != endToken && len(token) > 0 && strings.HasPrefix(rest, string(token)) {
						ids = append(ids, id)
					}
				}
				id := ids[rng.IntN(len(ids))]
				if !has(c.Allowed(), id) {
					t.Fatalf("%s: in %q, token %q before %q is not allowed", text, want, tokens[id], rest)
				}
				c.Accept(id)
				rest = rest[len(tokens[id]):]
			}
			if !has(c.Allowed(), endToken) {
				t.Fatalf("%s: %q cannot end", text, want)
			}
		}
	}
	if all := reftest.Cases(t, 60, 4000); said < all {
		t.Errorf("%d values", said)
	}
}

func TestRefused(t *testing.T) {
	v := newVocabulary(randomVocabulary(rand.New(rand.NewPCG(1, 2)), true), []int{endToken})
	for _, c := range []struct {
		schema string
		want   error
		text   string
	}{
		{`{"type": "string", "pattern": "a"}`, ErrUnsupported, `#/pattern: keyword "pattern"`},
		{`{"properties": {"a/b": {"minimum": 3}}}`, ErrUnsupported, `#/properties/a~1b/minimum: keyword "minimum"`},
		{`{"$defs": {"x": {"oneOf": []}}}`, ErrUnsupported, `#/$defs/x/oneOf`},
		{`{"anyOf": [{"type": "string"}, {"not": {}}]}`, ErrUnsupported, `#/anyOf/1/not`},
		{`{"type": "string", "properties": {"a": {"format": "date"}}}`, ErrUnsupported, `#/properties/a/format`},
		{`{"anyOf": [true], "type": "object"}`, ErrUnsupported, "keyword type beside anyOf"},
		{`{"$ref": "#", "items": true}`, ErrUnsupported, "keyword items beside $ref"},
		{`{"enum": [1], "minItems": 1}`, ErrUnsupported, "keyword minItems beside enum"},
		{`{"enum": [1], "const": 1}`, ErrUnsupported, "keyword const beside enum"},
		{`{"items": [{}]}`, ErrUnsupported, "#/items: items is a list"},
		{`{"$ref": "other.json"}`, ErrUnsupported, `"other.json" is outside`},
		{`{"$ref": "#name"}`, ErrUnsupported, "no JSON pointer"},
		{`{"items": {"$id": "x"}}`, ErrUnsupported, "#/items/$id"},
		{`{"maxItems": 1000000000}`, ErrUnsupported, "#/maxItems: 1000000000 is more than"},
		{`{"$ref": "#/$defs/none"}`, ErrSchema, "points to no schema"},
		{`{"$ref": "#/properties"}`, ErrSchema, "points to no schema"},
		{`{"$ref": "#/type", "title": "x"}`, ErrSchema, "points to no schema"},
		{`{"anyOf": [{"$ref": "#/anyOf/01x"}]}`, ErrSchema, "points to no schema"},
		{`{"$ref": "#"}`, ErrSchema, "no value"},
		{`{"anyOf": [{"$ref": "#"}, {"items": {"$ref": "#"}, "minItems": 1}]}`, ErrSchema, "no value"},
		{`false`, ErrSchema, "no value"},
		{`{"type": "array", "minItems": 3, "maxItems": 2}`, ErrSchema, "no value"},
		{`{"type": "string", "enum": [1, 2]}`, ErrSchema, "no value"},
		{`{"required": ["a"], "additionalProperties": false}`, ErrSchema, "no value"},
		{`{"type": "text"}`, ErrSchema, `#/type: there is no type "text"`},
		{`{"type": ["string", "string"]}`, ErrSchema, "twice"},
		{`{"type": []}`, ErrSchema, "empty"},
		{`{"type": [1]}`, ErrSchema, "no text"},
		{`{"type": 1}`, ErrSchema, "#/type: a value of the wrong type"},
		{`{"minItems": 1.5}`, ErrSchema, "1.5"},
		{`{"minItems": -1}`, ErrSchema, "-1"},
		{`{"required": ["a", "a"]}`, ErrSchema, "twice"},
		{`{"required": [3]}`, ErrSchema, "no text"},
		{`{"anyOf": []}`, ErrSchema, "empty"},
		{`{"title": 3}`, ErrSchema, "#/title"},
		{`{"properties": {"a": 3}}`, ErrSchema, "#/properties/a: a schema is an object or a boolean"},
		{`{"type": "string", "type": "null"}`, ErrSchema, `two members have the name "type"`},
		{`{} {}`, ErrSchema, "something follows"},
		{`{"type"`, ErrSchema, "no JSON"},
		{``, ErrSchema, "no JSON"},
		{`3`, ErrSchema, "a schema is an object or a boolean"},
		{strings.Repeat(`{"items":`, 200) + "{}" + strings.Repeat("}", 200), ErrUnsupported, "nested more than 128"},
		{strings.Repeat(`{"minItems": 1, "items":`, 100) + "{}" + strings.Repeat("}", 100), ErrSchema, "no value of at most 64 levels"},
		{`{"title": "` + strings.Repeat("x", mostBytes) + `"}`, ErrUnsupported, "bytes, more than"},
	} {
		_, err := v.Compile([]byte(c.schema))
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%.100s: %v", c.schema, err)
		}
	}
	few := newVocabulary([][]byte{[]byte("{"), []byte("}"), []byte(`"`), nil}, []int{endToken})
	if _, err := few.Compile([]byte(`{"type": "object"}`)); err != nil {
		t.Error(err)
	}
	if _, err := few.Compile([]byte(`{"type": "array"}`)); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "tokens of single characters") {
		t.Errorf("tokens without brackets: %v", err)
	}
}

// TestBombs: schemas that are built to take memory and time are refused, or take little.
func TestBombs(t *testing.T) {
	many := func(n int, f func(i int) string) string {
		var all []string
		for i := range n {
			all = append(all, f(i))
		}
		return strings.Join(all, ", ")
	}
	twice := func(i int) string {
		return fmt.Sprintf(`"d%d": {"anyOf": [{"properties": {"a": {"$ref": "#/$defs/d%d"}}, "required": ["a"]}, {"properties": {"a": {"$ref": "#/$defs/d%d"}, "b": {}}, "required": ["a"]}]}`, i, i+1, i+1)
	}
	schemas := map[string]string{
		"doubling":   `{"$ref": "#/$defs/d0", "$defs": {` + many(40, twice) + `, "d40": {"type": "null"}}}`,
		"recursive":  `{"anyOf": [{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"properties": {"a": {"$ref": "#"}, "b": {}}, "required": ["a"]}, {"properties": {"a": {"$ref": "#"}, "c": {}}, "required": ["a"]}, {"type": "array", "items": {"$ref": "#"}}]}`,
		"enum":       `{"enum": [` + many(10000, func(i int) string { return fmt.Sprintf(`"%d"`, i*7919) }) + `]}`,
		"properties": `{"properties": {` + many(256, func(i int) string { return fmt.Sprintf(`"p%d": {"type": "string"}`, i) }) + `}, "additionalProperties": {"type": "string"}}`,
		"items":      `{"type": "array", "items": {"type": "array", "items": {}, "minItems": 5000}, "minItems": 5000, "maxItems": 10000}`,
		"chain":      `{"$ref": "#/$defs/r0", "$defs": {` + many(2000, func(i int) string { return fmt.Sprintf(`"r%d": {"$ref": "#/$defs/r%d"}`, i, i+1) }) + `, "r2000": {"type": "string"}}}`,
		"strings":    `{"anyOf": [` + many(256, func(i int) string { return fmt.Sprintf(`{"properties": {"a": {"type": "string"}, "b%d": {}}}`, i) }) + `]}`,
		"anything":   `{}`,
		"name":       `{"properties": {"` + strings.Repeat("n", 4000) + `": {}}, "additionalProperties": true}`,
		"refused 1":  `{"properties": {` + many(257, func(i int) string { return fmt.Sprintf(`"p%d": {}`, i) }) + `}}`,
		"refused 2":  `{"anyOf": [` + many(257, func(int) string { return "{}" }) + `]}`,
		"refused 3":  `{"type": "array", "minItems": 200000}`,
		"refused 4":  `{"enum": ["` + strings.Repeat("n", 300000) + `"]}`,
		"refused 5":  `{"properties": {"` + strings.Repeat("n", 300000) + `": {}}, "additionalProperties": true}`,
	}
	rng := reftest.Rand(t)
	tokens := randomVocabulary(rng, true)
	v := newVocabulary(tokens, []int{endToken})
	for name, schema := range schemas {
		began := time.Now()
		s, err := v.Compile([]byte(schema))
		if refused := strings.HasPrefix(name, "refused"); refused {
			if !errors.Is(err, ErrUnsupported) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		text, _ := walk(t, rng, s, tokens, 60)
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("%s: %v for %q", name, took, text)
		}
		if s.size > 2*mostStateSize || len(s.states) > mostStates || s.program.size > 2*mostSize {
			t.Errorf("%s: %d states of size %d, a program of size %d", name, len(s.states), s.size, s.program.size)
		}
		t.Logf("%s: %v", name, time.Since(began))
	}
}

// FuzzCompile: no schema panics, takes long, or leads to a text without a next token.
func FuzzCompile(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		f.Add(reftest.Schema(rng), uint64(1))
	}
	f.Add(`{"anyOf": [{"$ref": "#"}, {"type": ["object", "null"], "required": ["a"], "additionalProperties": {"$ref": "#/anyOf/1"}}]}`, uint64(2))
	tokens := randomVocabulary(rng, false)
	v := newVocabulary(tokens, []int{endToken})
	f.Fuzz(func(t *testing.T, schema string, seed uint64) {
		began := time.Now()
		s, err := v.Compile([]byte(schema))
		if err != nil {
			if !errors.Is(err, ErrSchema) && !errors.Is(err, ErrUnsupported) {
				t.Error(err)
			}
			return
		}
		if said, ended := walk(t, rand.New(rand.NewPCG(seed, 0)), s, tokens, 40); ended && !json.Valid([]byte(said)) {
			t.Errorf("%q", said)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%v", took)
		}
	})
}

// TestConcurrent: texts of one schema in several goroutines have the masks that they have alone.
func TestConcurrent(t *testing.T) {
	tokens := randomVocabulary(rand.New(rand.NewPCG(1, 2)), true)
	v := newVocabulary(tokens, []int{endToken})
	compiled := func() *Schema {
		s, err := v.Compile([]byte(`{"properties": {"a": {}, "b": {"type": "string"}}, "additionalProperties": {"type": "array", "items": {"$ref": "#"}}}`))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	text := func(s *Schema, seed uint64) (masks [][]uint64) {
		rng := rand.New(rand.NewPCG(seed, 0))
		c := s.Constrain()
		for range 60 {
			mask := c.Allowed()
			masks = append(masks, mask)
			if id := rng.IntN(len(tokens)); has(mask, id) {
				c.Accept(id)
			}
		}
		return masks
	}
	shared := compiled()
	var texts sync.WaitGroup
	for i := range uint64(6) {
		texts.Go(func() {
			if got, want := text(shared, i), text(compiled(), i); !reflect.DeepEqual(got, want) {
				t.Errorf("text %d has other masks", i)
			}
		})
	}
	texts.Wait()
}
