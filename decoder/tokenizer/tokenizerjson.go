package tokenizer

import (
	"bytes"
	"encoding/json"
	"maps"
	"reflect"
	"slices"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// tokenizerJSON is tokenizer.json of Hugging Face's tokenizers. Any other key is an error.
type tokenizerJSON struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"` // ignored, like Padding: transformers disables both
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   json.RawMessage `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

// part is an object of tokenizer.json with a type.
type part struct {
	Type string `json:"type"`
	raw  json.RawMessage
}

func parseJSON(file string, data []byte, s settings) (*Tokenizer, error) {
	var j tokenizerJSON
	var err error
	if err := strict(data, tokenizerLimits, &j); err != nil {
		return nil, fail(file, "not a tokenizer: %v", err)
	}
	t := &Tokenizer{}
	if err := t.readModel(file, j.Model); err != nil {
		return nil, err
	}
	if t.normal, err = parseNormalizer(file, j.Normalizer); err != nil {
		return nil, err
	}
	if t.normal != nil && s.makesOwn() {
		return nil, refuse(file, "a normalizer, %s, which is not that of the tokenizer_class of %s", quote(string(j.Normalizer)), s.file)
	}
	added, err := parseAdded(file, j.AddedTokens)
	if err != nil {
		return nil, err
	}
	if err := t.finish(file, added, s); err != nil {
		return nil, err
	}
	if err := t.preTokenizer(file, j.PreTokenizer, s); err != nil {
		return nil, err
	}
	if err := t.postProcessor(file, j.PostProcessor); err != nil {
		return nil, err
	}
	if err := t.decoder(file, j.Decoder); err != nil {
		return nil, err
	}
	return t, nil
}

// parseAdded parses added_tokens, which may be absent.
func parseAdded(file string, raw json.RawMessage) ([]addedToken, error) {
	added := []addedToken{}
	if null(raw) {
		return added, nil
	}
	if err := addedLimits.Check(raw); err != nil {
		return nil, fail(file, "added_tokens: %v", err)
	}
	var list []struct {
		addedToken
		ID *int `json:"id"` // hides addedToken.ID; nil: absent
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&list); err != nil {
		return nil, fail(file, "added_tokens: %v", err)
	}
	for i, a := range list {
		if a.ID == nil || a.Content == "" {
			return nil, fail(file, "added_tokens: number %d has no id or no content", i)
		}
		if err := checkContent(file, a.Content); err != nil {
			return nil, err
		}
		a.addedToken.ID = *a.ID
		added = append(added, a.addedToken)
	}
	return added, nil
}

func null(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// strict decodes a JSON object within limits into the struct that dst points to. The following are errors:
//
//   - a key that is not exactly the tag of a field
//   - a duplicate key
//   - a null for a field that is neither a pointer nor a json.RawMessage
func strict(data []byte, l files.Limits, dst any) error {
	if err := l.Check(data); err != nil {
		return err
	}
	fields, seen := map[string]reflect.Value{}, map[string]bool{}
	for v, i := reflect.ValueOf(dst).Elem(), 0; i < v.NumField(); i++ {
		fields[v.Type().Field(i).Tag.Get("json")] = v.Field(i)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return constError("not a JSON object")
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return err
		}
		key := t.(string) // the decoder guarantees a string here
		switch field, ok := fields[key]; {
		case !ok:
			return constError("unknown field " + quote(key))
		case seen[key]:
			return constError("field " + quote(key) + " is there twice")
		default:
			seen[key] = true
			var raw json.RawMessage
			if err := d.Decode(&raw); err != nil {
				return err
			}
			if field.Type() == reflect.TypeOf(raw) {
				field.SetBytes(raw)
				break
			}
			if null(raw) && field.Kind() != reflect.Pointer {
				return constError(key + " is null")
			}
			value := json.NewDecoder(bytes.NewReader(raw))
			value.DisallowUnknownFields()
			if err := value.Decode(field.Addr().Interface()); err != nil {
				return err
			}
		}
	}
	if _, err := d.Token(); err != nil {
		return err
	}
	if rest := bytes.TrimSpace(data[d.InputOffset():]); len(rest) > 0 {
		return constError("something follows it")
	}
	return nil
}

func parsePart(file, what string, raw json.RawMessage) (part, error) {
	p := part{raw: raw}
	if null(raw) {
		return p, refuse(file, "no %s", what)
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		return p, fail(file, "%s: %v", what, err)
	}
	return p, nil
}

// parts returns the parts of a Sequence. For any other part, parts returns the part itself.
func parts(file, what, key string, raw json.RawMessage) ([]part, error) {
	if err := partLimits.Check(raw); !null(raw) && err != nil {
		return nil, fail(file, "%s: %v", what, err)
	}
	p, err := parsePart(file, what, raw)
	if err != nil || p.Type != "Sequence" {
		return []part{p}, err
	}
	var fields map[string]json.RawMessage
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, fail(file, "%s: %v", what, err)
	}
	delete(fields, "type")
	if err := json.Unmarshal(fields[key], &list); err != nil || len(fields) != 1 {
		return nil, fail(file, "%s: a Sequence without %s, or with more", what, key)
	}
	all := make([]part, len(list))
	for i, raw := range list {
		if all[i], err = parsePart(file, what, raw); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// postProcessor reads the post-processor: the tokens before and after a text.
func (t *Tokenizer) postProcessor(file string, raw json.RawMessage) error {
	if null(raw) {
		return nil
	}
	all, err := parts(file, "post_processor", "processors", raw)
	if err != nil {
		return err
	}
	templates := 0
	for _, p := range all {
		switch p.Type {
		case "ByteLevel": // affects only offsets
			if err := strict(p.raw, partLimits, &byteLevelJSON{}); err != nil {
				return fail(file, "post_processor: ByteLevel: %v", err)
			}
		case "TemplateProcessing":
			if templates++; templates > 1 {
				return refuse(file, "post_processor: two templates")
			}
			if err := t.template(file, p.raw); err != nil {
				return err
			}
		default:
			return refuse(file, "post_processor: %s", quote(p.Type))
		}
	}
	return nil
}

func (t *Tokenizer) template(file string, raw json.RawMessage) error {
	type piece struct {
		ID   string `json:"id"`
		Type int    `json:"type_id"`
	}
	var p struct {
		Type   string             `json:"type"`
		Single []map[string]piece `json:"single"`
		Pair   json.RawMessage    `json:"pair"`
		Tokens map[string]struct {
			ID     string   `json:"id"`
			IDs    []int    `json:"ids"`
			Tokens []string `json:"tokens"`
		} `json:"special_tokens"`
	}
	if err := strict(raw, partLimits, &p); err != nil {
		return fail(file, "post_processor: TemplateProcessing: %v", err)
	}
	texts := 0
	for _, step := range p.Single {
		kinds := slices.Collect(maps.Keys(step))
		switch {
		case len(kinds) == 1 && kinds[0] == "Sequence" && step["Sequence"].ID == "A":
			texts++
			continue
		case len(kinds) != 1 || kinds[0] != "SpecialToken":
			return fail(file, "post_processor: a template with %.120v", step)
		}
		special, ok := p.Tokens[step["SpecialToken"].ID]
		if !ok || len(special.IDs) == 0 {
			return fail(file, "post_processor: special token %s is not explained", quote(step["SpecialToken"].ID))
		}
		if len(t.before)+len(t.after)+len(special.IDs) > maxTemplate {
			return refuse(file, "post_processor: a template of more than %d tokens", maxTemplate)
		}
		for _, id := range special.IDs {
			if _, ok := t.tokens[id]; !ok {
				return fail(file, "post_processor: special token %s has id %d, which is no token's", quote(special.ID), id)
			}
		}
		if texts == 0 {
			t.before = append(t.before, special.IDs...)
		} else {
			t.after = append(t.after, special.IDs...)
		}
	}
	if t.bos < 0 && len(t.before) > 0 {
		t.bos = t.before[0]
	}
	if texts != 1 {
		return fail(file, "post_processor: a template with %d texts, not one", texts)
	}
	return nil
}
