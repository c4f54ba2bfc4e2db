package jsonschema

import (
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// builder makes the program of a schema.
type builder struct {
	*program
	root    *value
	entries map[*value]int32 // of schemas
	todo    []place          // schemas whose entries are empty
	any     int32            // rule of any value; 0: not made yet
	numbers [2]int32         // rules of numbers and of integers; 0: not made yet
}

// place is a schema and where it is.
type place struct {
	schema *value
	at     string
}

func fail(at, format string, args ...any) error {
	return fmt.Errorf("jsonschema: %s: %s: %w", at, fmt.Sprintf(format, args...), ErrSchema)
}

func refuse(at, format string, args ...any) error {
	return fmt.Errorf("jsonschema: %s: %s: %w", at, fmt.Sprintf(format, args...), ErrUnsupported)
}

// pointer returns the place of a member.
func pointer(at, key string) string {
	const most = 200
	at += "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(key)
	if len(at) > most {
		return "..." + strings.ToValidUTF8(at[len(at)-most:], "")
	}
	return at
}

func newBuilder() *builder { return &builder{program: newProgram(), entries: map[*value]int32{}} }

// document makes the rules of a document, and returns the entry of its schema.
func (b *builder) document(root *value) (int32, error) {
	b.root = root
	entry := b.schema(root, "#")
	for len(b.todo) > 0 && !b.full() {
		p := b.todo[0]
		b.todo = b.todo[1:]
		if err := b.fill(p); err != nil {
			return 0, err
		}
	}
	return entry, nil
}

// compile returns the schema of an entry. No rules are added behind it.
func (b *builder) compile(entry int32, v *Vocabulary) (*Schema, error) {
	if err := b.finish(v); err != nil {
		return nil, err
	}
	switch {
	case b.need[entry] > mostDepth:
		return nil, fail("#", "no value of at most %d levels satisfies the schema", mostDepth)
	case b.spelled[entry] > mostDepth:
		return nil, refuse("#", "the tokenizer lacks tokens of single characters, without which no value of the schema can be written")
	}
	s := &Schema{program: b.program, vocabulary: v, path: make([]*state, v.longest+1)}
	s.forget()
	c := s.closure()
	c.visit(entry, nil)
	s.start = s.intern(c)
	return s, nil
}

// schema returns the entry of a schema.
func (b *builder) schema(v *value, at string) int32 {
	entry, ok := b.entries[v]
	if !ok {
		entry = b.add(node{})
		b.entries[v] = entry
		b.todo = append(b.todo, place{v, at})
	}
	return entry
}

// keywords are the keywords of a schema that have an effect; nil: not given.
type keywords struct {
	kind, properties, required, additional, items, least, most, enum, constant, anyOf, ref *value
}

// keyword is a keyword with an effect: the kinds of its values, and where keywords have it.
type keyword struct {
	kinds string
	to    func(k *keywords) **value
}

var known = map[string]keyword{
	"type":                 {`"[`, func(k *keywords) **value { return &k.kind }},
	"properties":           {"{", func(k *keywords) **value { return &k.properties }},
	"required":             {"[", func(k *keywords) **value { return &k.required }},
	"additionalProperties": {"{tf", func(k *keywords) **value { return &k.additional }},
	"items":                {"{tf", func(k *keywords) **value { return &k.items }},
	"minItems":             {"0", func(k *keywords) **value { return &k.least }},
	"maxItems":             {"0", func(k *keywords) **value { return &k.most }},
	"enum":                 {"[", func(k *keywords) **value { return &k.enum }},
	"const":                {`{["0tfn`, func(k *keywords) **value { return &k.constant }},
	"anyOf":                {"[", func(k *keywords) **value { return &k.anyOf }},
	"$ref":                 {`"`, func(k *keywords) **value { return &k.ref }},
}

// annotations are keywords without effect, and the kinds of their values.
var annotations = map[string]string{
	"title": `"`, "description": `"`, "$comment": `"`, "$schema": `"`, "default": `{["0tfn`, "examples": "[", "deprecated": "tf", "readOnly": "tf", "writeOnly": "tf",
	"$defs": "{", "definitions": "{", "$id": `"`,
}

// read reads the keywords of a schema.
func (b *builder) read(p place) (k keywords, names []string, err error) {
	for i, key := range p.schema.keys {
		v, at := p.schema.values[i], pointer(p.at, key)
		word, ok := known[key]
		if ok {
			names = append(names, key)
		} else if word.kinds, ok = annotations[key]; !ok {
			return k, nil, refuse(at, "keyword %s", short(key))
		}
		switch {
		case key == "items" && v.kind == '[':
			return k, nil, refuse(at, "items is a list of schemas, want one schema")
		case !strings.ContainsRune(word.kinds, rune(v.kind)):
			return k, nil, fail(at, "a value of the wrong type")
		case key == "$id" && p.schema != b.root:
			return k, nil, refuse(at, "$id is at the beginning of the document alone")
		case key == "$defs" || key == "definitions":
			for j, name := range v.keys {
				b.schema(v.values[j], pointer(at, name))
			}
		case word.to != nil:
			*word.to(&k) = v
		}
	}
	return k, names, nil
}

// fill makes the rule of a schema.
func (b *builder) fill(p place) error {
	entry := b.entries[p.schema]
	to := func(ways ...int32) {
		b.size += len(ways)
		b.nodes[entry].to = ways
	}
	switch p.schema.kind {
	case 't':
		to(b.anything())
		return nil
	case 'f':
		return nil // no way leads on
	case '{':
	default:
		return fail(p.at, "a schema is an object or a boolean")
	}
	k, names, err := b.read(p)
	if err != nil {
		return err
	}
	alone := func(with ...string) error {
		for _, name := range names {
			if !slices.Contains(with, name) {
				return refuse(p.at, "keyword %s beside %s", name, with[0])
			}
		}
		return nil
	}
	switch {
	case k.ref != nil:
		if err := alone("$ref"); err != nil {
			return err
		}
		target, err := b.resolve(k.ref.text, pointer(p.at, "$ref"))
		if err != nil {
			return err
		}
		to(target)
		return nil
	case k.anyOf != nil:
		if err := alone("anyOf"); err != nil {
			return err
		}
		return b.ways(entry, k.anyOf, pointer(p.at, "anyOf"))
	}
	types, err := k.types(p.at)
	if err != nil {
		return err
	}
	if k.enum != nil || k.constant != nil {
		if k.enum == nil {
			err = alone("const", "type")
			k.enum = &value{values: []*value{k.constant}}
		} else {
			err = alone("enum", "type")
		}
		if err != nil {
			return err
		}
		to(b.enum(k.enum, types))
		return nil
	}
	// Keywords of objects and arrays are checked for each type.
	members, others, err := b.members(&k, p.at)
	if err != nil {
		return err
	}
	items := b.member(k.items, p.at, "items")
	least, most, err := k.counts(p.at)
	if err != nil {
		return err
	}
	var ways []int32
	for _, name := range types {
		var way int32
		switch name {
		case "object":
			if way, err = b.object(members, others, p.at); err != nil {
				return err
			}
		case "array":
			way = b.array(items, least, most)
		case "string":
			way = b.text(`"`, stringNode)
		case "number":
			way = b.number(0)
		case "integer":
			way = b.number(1)
		case "boolean":
			way = b.choice([]string{"false", "true"})
		case "null":
			way = b.text("null", endNode)
		}
		ways = append(ways, way)
	}
	to(ways...)
	return nil
}

// member returns the entry of the schema of a keyword; without a schema, that of any value.
func (b *builder) member(v *value, at, key string) int32 {
	if v == nil {
		return b.anything()
	}
	return b.schema(v, pointer(at, key))
}

// ways lets a node continue with one of several schemas.
func (b *builder) ways(entry int32, all *value, at string) error {
	if n := len(all.values); n == 0 {
		return fail(at, "the list is empty")
	} else if n > mostWays {
		return refuse(at, "%d schemas, more than %d", n, mostWays)
	}
	var ways []int32
	for i, v := range all.values {
		ways = append(ways, b.schema(v, pointer(at, strconv.Itoa(i))))
	}
	b.size += len(ways)
	b.nodes[entry].to = ways
	return nil
}

var allTypes = []string{"object", "array", "string", "number", "integer", "boolean", "null"}

// types returns the types of a schema.
func (k *keywords) types(at string) (types []string, err error) {
	if k.kind == nil {
		if k.properties != nil || k.required != nil || k.additional != nil {
			types = append(types, "object")
		}
		if k.items != nil || k.least != nil || k.most != nil {
			types = append(types, "array")
		}
		if types == nil {
			types = slices.Clone(allTypes)
		}
	} else {
		at = pointer(at, "type")
		list := k.kind.values
		if k.kind.kind == '"' {
			list = []*value{k.kind}
		}
		for _, v := range list {
			switch {
			case v.kind != '"':
				return nil, fail(at, "a type is no text")
			case !slices.Contains(allTypes, v.text):
				return nil, fail(at, "there is no type %s", short(v.text))
			case slices.Contains(types, v.text):
				return nil, fail(at, "type %s is given twice", v.text)
			}
			types = append(types, v.text)
		}
		if types == nil {
			return nil, fail(at, "the list is empty")
		}
	}
	if slices.Contains(types, "number") { // has the integers
		types = slices.DeleteFunc(types, func(s string) bool { return s == "integer" })
	}
	return types, nil
}

// resolve returns the entry of a schema that a reference points to.
func (b *builder) resolve(ref, at string) (int32, error) {
	path, ok := strings.CutPrefix(ref, "#")
	if !ok {
		return 0, refuse(at, "%s is outside of the document", short(ref))
	}
	path, err := url.PathUnescape(path)
	if err != nil || path != "" && path[0] != '/' {
		return 0, refuse(at, "%s is no JSON pointer", short(ref))
	}
	v, to := b.root, "#"
	parts := strings.Split(path, "/")[1:]
	for i := range parts {
		parts[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(parts[i])
	}
	for len(parts) > 0 && v != nil {
		key := parts[0]
		to = pointer(to, key)
		parts = parts[1:]
		v = v.member(key)
		switch key {
		case "items", "additionalProperties":
		case "$defs", "definitions", "properties", "anyOf":
			if v == nil || len(parts) == 0 {
				v = nil
				break
			}
			name := parts[0]
			to = pointer(to, name)
			parts = parts[1:]
			if key != "anyOf" {
				v = v.member(name)
			} else if n, err := strconv.Atoi(name); err == nil && n >= 0 && n < len(v.values) && v.kind == '[' {
				v = v.values[n]
			} else {
				v = nil
			}
		default:
			v = nil
		}
	}
	if v == nil {
		return 0, fail(at, "%s points to no schema", short(ref))
	}
	return b.schema(v, to), nil
}

// enum returns the rule of the values of a list that have one of some types.
func (b *builder) enum(list *value, types []string) int32 {
	var texts []string
	for _, v := range list.values {
		if slices.ContainsFunc(types, v.is) {
			var text strings.Builder
			v.write(&text)
			texts = append(texts, text.String())
		}
	}
	return b.choice(texts)
}

// is reports whether a value has a type.
func (v *value) is(name string) bool {
	switch v.kind {
	case '{':
		return name == "object"
	case '[':
		return name == "array"
	case '"':
		return name == "string"
	case 't', 'f':
		return name == "boolean"
	case 'n':
		return name == "null"
	}
	if name == "integer" && strings.ContainsAny(v.text, ".eE") {
		x, err := strconv.ParseFloat(v.text, 64)
		return err == nil && x == math.Trunc(x) && math.Abs(x) < 1<<53 && len(v.text) < 20
	}
	return name == "number" || name == "integer"
}

// member is a member of an object.
type member struct {
	name     string
	entry    int32
	required bool
}

// members returns the members of properties, and behind these the other ones of required. others is the entry of further members; -1:
// there are none.
func (b *builder) members(k *keywords, at string) (all []member, others int32, err error) {
	index := map[string]int{}
	if k.properties != nil {
		for i, name := range k.properties.keys {
			index[name] = i
			all = append(all, member{name: name, entry: b.schema(k.properties.values[i], pointer(pointer(at, "properties"), name))})
		}
	}
	others = b.member(k.additional, at, "additionalProperties")
	if k.required != nil {
		for _, v := range k.required.values {
			if v.kind != '"' {
				return nil, 0, fail(pointer(at, "required"), "a name is no text")
			}
			i, ok := index[v.text]
			if !ok {
				i = len(all)
				index[v.text] = i
				all = append(all, member{name: v.text, entry: others})
			}
			if all[i].required {
				return nil, 0, fail(pointer(at, "required"), "%s is given twice", short(v.text))
			}
			all[i].required = true
		}
	}
	if k.additional == nil && len(all) > 0 || k.additional != nil && k.additional.kind == 'f' {
		others = -1
	}
	return all, others, nil
}

// object returns the rule of objects.
func (b *builder) object(all []member, others int32, at string) (int32, error) {
	closing := b.text("}", endNode)
	// rest is the node behind a member, and name the node before the name of a member, of those from some index on.
	rest, name := closing, int32(-1)
	if others >= 0 {
		rest = b.add(node{to: []int32{closing}})
		rule := int32(stringNode)
		if len(all) > 0 {
			var names []string
			for _, m := range all {
				names = append(names, m.name)
			}
			rule = b.others(names)
		}
		name = b.text(`"`, b.value(rule, b.text(":", b.space(b.value(others, rest)))))
		b.nodes[rest].edges = []edge{{',', ',', b.space(name)}}
	}
	left := 0 // members that may be left out, one behind another
	for i := len(all) - 1; i >= 0 && !b.full(); i-- {
		m := all[i]
		ways := []int32{b.text(quote(m.name)+":", b.space(b.value(m.entry, rest)))}
		if left++; m.required {
			left, closing = 0, -1
		} else if name >= 0 {
			ways = append(ways, name)
		}
		if left > mostWays {
			return 0, refuse(at, "more than %d members, one behind another, may be left out: list some in required", mostWays)
		}
		name = b.add(node{to: ways})
		behind := node{edges: []edge{{',', ',', b.space(name)}}}
		if closing >= 0 {
			behind.to = []int32{closing}
		}
		rest = b.add(behind)
	}
	var first node
	for _, way := range []int32{name, closing} {
		if way >= 0 {
			first.to = append(first.to, way)
		}
	}
	return b.text("{", b.add(first)), nil
}

// counts returns minItems and maxItems; -1: no maxItems.
func (k *keywords) counts(at string) (least, most int, err error) {
	most = -1
	for _, c := range []struct {
		v    *value
		to   *int
		name string
	}{{k.least, &least, "minItems"}, {k.most, &most, "maxItems"}} {
		if c.v == nil {
			continue
		}
		n, err := strconv.ParseUint(c.v.text, 10, 62)
		if err != nil {
			return 0, 0, fail(pointer(at, c.name), "%s is no number of items", short(c.v.text))
		}
		if n > mostSize {
			return 0, 0, refuse(pointer(at, c.name), "%d is more than %d", n, mostSize)
		}
		*c.to = int(n)
	}
	return least, most, nil
}

// array returns the rule of arrays with least to most items; most -1: any number.
func (b *builder) array(items int32, least, most int) int32 {
	if most >= 0 && most < least {
		return b.add(node{}) // no way leads on
	}
	closing := edge{']', ']', endNode}
	var behind int32 // the node behind an item
	n := max(least, 1)
	if most < 0 {
		behind = b.add(node{edges: []edge{closing}})
		b.nodes[behind].edges = append(b.nodes[behind].edges, edge{',', ',', b.space(b.value(items, behind))})
	} else {
		n = most
		behind = b.add(node{edges: []edge{closing}})
	}
	for i := n - 1; i >= 1 && !b.full(); i-- { // behind item i
		x := node{edges: []edge{{',', ',', b.space(b.value(items, behind))}}}
		if i >= least {
			x.edges = append(x.edges, closing)
		}
		behind = b.add(x)
	}
	first := node{}
	if least == 0 {
		first.edges = []edge{closing}
	}
	if most != 0 {
		first.to = []int32{b.value(items, behind)}
	}
	return b.text("[", b.add(first))
}

// Digits of numbers: parsers of JSON read all of these numbers.
const (
	mostDigits   = 16
	mostExponent = 2
)

// number returns the rule of numbers, or with 1 of integers.
func (b *builder) number(integer int) int32 {
	if b.numbers[integer] > 0 {
		return b.numbers[integer]
	}
	// digits adds one to n digits before a node.
	digits := func(n int, next int32) (first int32) {
		more := next
		for range n {
			first = b.add(node{edges: []edge{{'0', '9', more}}})
			more = b.add(node{edges: []edge{{'0', '9', more}}, to: []int32{next}})
		}
		return first
	}
	end := int32(endNode)
	if integer == 0 {
		exponent := digits(mostExponent, endNode)
		exponent = b.add(node{edges: []edge{{'+', '+', exponent}, {'-', '-', exponent}}, to: []int32{exponent}})
		exponent = b.add(node{edges: []edge{{'E', 'E', exponent}, {'e', 'e', exponent}}, to: []int32{endNode}})
		fraction := digits(mostDigits, exponent)
		end = b.add(node{edges: []edge{{'.', '.', fraction}}, to: []int32{exponent}})
	}
	more := end
	for range mostDigits - 1 {
		more = b.add(node{edges: []edge{{'0', '9', more}}, to: []int32{end}})
	}
	whole := []edge{{'0', '0', end}, {'1', '9', more}}
	b.numbers[integer] = b.add(node{edges: append(whole, edge{'-', '-', b.add(node{edges: whole})})})
	return b.numbers[integer]
}

// anything returns the rule of any value.
func (b *builder) anything() int32 {
	if b.any == 0 {
		b.any = b.add(node{})
		object, _ := b.object(nil, b.any, "") // without members there is no error
		ways := []int32{object, b.array(b.any, 0, -1), b.text(`"`, stringNode), b.number(0), b.choice([]string{"false", "null", "true"})}
		b.size += len(ways)
		b.nodes[b.any].to = ways
	}
	return b.any
}
