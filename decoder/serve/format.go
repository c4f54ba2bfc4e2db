package serve

import (
	"encoding/json"
	"fmt"
	"sync"

	"gorgonia.org/leanattention/decoder/jsonschema"
)

// mostSchemas is the most compiled schemas that are kept for later requests.
const mostSchemas = 8

// formats compiles the schemas of response_format and of calls.
type formats struct {
	vocabulary func() *jsonschema.Vocabulary // made at first use

	mu   sync.Mutex
	kept []format // the one that was used last comes last
}

type format struct {
	text   string
	schema *jsonschema.Schema
}

func (s *Server) newFormats() formats {
	return formats{vocabulary: sync.OnceValue(func() *jsonschema.Vocabulary {
		return jsonschema.NewVocabulary(s.model.Tokenizer(), s.ends, s.model.Sampling().Forbidden...)
	})}
}

// compile returns a compiled schema.
func (f *formats) compile(text string) (*jsonschema.Schema, error) {
	return f.keep(text, func(v *jsonschema.Vocabulary) (*jsonschema.Schema, error) { return v.Compile([]byte(text)) })
}

// compileCall returns the compiled schema of a call of a function.
func (f *formats) compileCall(functions []jsonschema.Function) (*jsonschema.Schema, error) {
	text := "calls" // no schema
	for _, g := range functions {
		text += fmt.Sprintf(" %q %d %s", g.Name, len(g.Parameters), g.Parameters)
	}
	return f.keep(text, func(v *jsonschema.Vocabulary) (*jsonschema.Schema, error) { return v.CompileCall(functions) })
}

// keep returns the schema of a text, and compiles the schema if none is kept.
func (f *formats) keep(text string, compile func(*jsonschema.Vocabulary) (*jsonschema.Schema, error)) (*jsonschema.Schema, error) {
	f.mu.Lock()
	for i, k := range f.kept {
		if k.text == text {
			f.kept = append(append(f.kept[:i:i], f.kept[i+1:]...), k)
			f.mu.Unlock()
			return k.schema, nil
		}
	}
	f.mu.Unlock()
	schema, err := compile(f.vocabulary())
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kept = append(f.kept, format{text, schema})
	f.kept = f.kept[max(0, len(f.kept)-mostSchemas):]
	return schema, nil
}

// readFormat reads response_format. The schema is nil for texts.
func (s *Server) readFormat(raw json.RawMessage) (schema *jsonschema.Schema, err error) {
	const at = "response_format"
	kind, name := "", ""
	var described, text json.RawMessage
	err = members{
		"type":        into(&kind),
		"json_schema": func(raw json.RawMessage) error { described = raw; return nil },
	}.read(raw, at)
	if err != nil {
		return nil, err
	}
	if (kind == "json_schema") != (described != nil) {
		return nil, wrong(at+".json_schema", "the field is for type json_schema, which needs it")
	}
	switch kind {
	case "text":
		return nil, nil
	case "json_object":
		return s.formats.compile(`{"type": "object"}`)
	case "json_schema":
	default:
		return nil, wrong(at+".type", "%q is none of text, json_object, json_schema", short(kind))
	}
	err = members{
		"name":        into(&name),
		"description": ignored[string](),
		"strict":      ignored[bool](),
		"schema":      func(raw json.RawMessage) error { text = raw; return nil },
	}.read(described, at+".json_schema")
	switch {
	case err != nil:
		return nil, err
	case name == "":
		return nil, wrong(at+".json_schema.name", "the field is missing")
	case text == nil:
		return nil, wrong(at+".json_schema.schema", "the field is missing")
	}
	if schema, err = s.formats.compile(string(text)); err != nil {
		return nil, wrong(at+".json_schema.schema", "%v", err)
	}
	return schema, nil
}
