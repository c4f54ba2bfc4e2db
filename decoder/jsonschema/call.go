package jsonschema

import (
	"fmt"
	"slices"
)

// Function is a function that a text may call. Parameters is the schema of the arguments, which are an object; nil: any object.
type Function struct {
	Name       string
	Parameters []byte
}

// CompileCall compiles the schema of a call of one of some functions: {"name": "...", "arguments": {...}}. References of Parameters are
// within Parameters. An error names the function.
func (v *Vocabulary) CompileCall(functions []Function) (*Schema, error) {
	if len(functions) == 0 {
		return nil, fail("#", "there are no functions")
	}
	b := newBuilder()
	var calls []int32
	for _, f := range functions {
		if b.full() {
			break // compile refuses the program
		}
		arguments, err := b.arguments(f.Parameters)
		if err != nil {
			return nil, fmt.Errorf("function %s: %w", short(f.Name), err)
		}
		calls = append(calls, b.text(`{"name":`, b.space(b.text(quote(f.Name)+",", b.space(b.text(`"arguments":`, b.space(b.value(arguments, b.text("}", endNode)))))))))
	}
	return b.compile(b.add(node{to: calls}), v)
}

// arguments returns the entry of the arguments of a function.
func (b *builder) arguments(parameters []byte) (int32, error) {
	if parameters == nil {
		parameters = []byte("{}")
	}
	root, err := parse(parameters)
	if err != nil {
		return 0, err
	}
	if root.kind != '{' {
		return 0, fail("#", "parameters are no object")
	}
	object := &value{kind: '"', text: "object"}
	switch kind := root.member("type"); {
	case kind != nil:
		if kind.kind != '"' || kind.text != object.text {
			return 0, fail("#/type", "parameters have another type than object")
		}
	case !slices.ContainsFunc([]string{"$ref", "anyOf", "enum", "const"}, func(key string) bool { return root.member(key) != nil }):
		root.keys, root.values = append(root.keys, "type"), append(root.values, object)
	}
	return b.document(root)
}
