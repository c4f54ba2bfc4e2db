// Package jsonschema keeps a text that a model writes within a JSON schema, by telling which tokens may come next.
//
//	vocabulary := jsonschema.NewVocabulary(model.Tokenizer(), model.Ends())
//	schema, err := vocabulary.Compile([]byte(`{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}`))
//	...
//	text, err := engine.Start(ctx, decoder.Request{Prompt: prompt, Constraint: schema.Constrain()})
//
// A text that ends by a token of the vocabulary's ends is JSON that satisfies the schema. A text that ends for another reason, such as its
// number of tokens, is the beginning of such JSON. No text comes to a point from which the vocabulary has no way to the end.
//
// # Keywords
//
//	type                        a name or a list of names
//	properties, required        members are in the order of properties; members that are not required may be left out
//	additionalProperties        a schema or a boolean; members behind those of properties
//	items, minItems, maxItems
//	enum, const                 beside type alone
//	anyOf                       without other keywords
//	$ref                        "#" or a JSON pointer within the document, without other keywords; may be recursive
//	$defs, definitions
//	title, description, default, examples, deprecated, readOnly, writeOnly, $comment, $schema, $id (of the document)
//	                            without effect
//
// Any other keyword is [ErrUnsupported], and the error names the keyword and its place.
//
// # Language
//
// The texts are a part of those that satisfy the schema:
//
//   - One space may follow a colon and a comma. There is no other white space.
//   - Without additionalProperties, an object has the members of properties and required alone. An object without properties has any members.
//   - Without type, properties, required and additionalProperties stand for objects, and items, minItems and maxItems for arrays.
//   - Numbers have at most 16 digits before the point and 16 behind, and exponents at most 2. Numbers of type integer have no point.
//   - Names of members that properties does not have are without escapes, if there are properties.
//   - Strings have no single surrogates. Values of enum and const, and names of properties, have one spelling each.
//   - Values are nested at most 64 deep.
//   - A text that may follow more than 512 alternatives at a time follows the first ones.
package jsonschema
