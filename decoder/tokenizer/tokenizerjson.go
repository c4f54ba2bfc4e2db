package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// tokenizerJSON is tokenizer.json of Hugging Face's tokenizers. Keys that are not
// here are refused.
type tokenizerJSON struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"` // transformers turns both off
	Padding       json.RawMessage `json:"padding"`
	AddedTokens   json.RawMessage `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

type modelJSON struct {
	Type         string          `json:"type"`
	Dropout      *float64        `json:"dropout"`
	Unk          *string         `json:"unk_token"`
	Prefix       *string         `json:"continuing_subword_prefix"`
	Suffix       *string         `json:"end_of_word_suffix"`
	FuseUnk      bool            `json:"fuse_unk"`
	ByteFallback bool            `json:"byte_fallback"`
	IgnoreMerges bool            `json:"ignore_merges"`
	Vocab        json.RawMessage `json:"vocab"`
	Merges       json.RawMessage `json:"merges"`
}

// byteLevelJSON is ByteLevel as a pre-tokenizer, post-processor or decoder.
type byteLevelJSON struct {
	Type        string `json:"type"`
	PrefixSpace *bool  `json:"add_prefix_space"`
	TrimOffsets bool   `json:"trim_offsets"` // moves no token
	UseRegex    bool   `json:"use_regex"`
}

// mergeJSON is a merge: "a b", or ["a", "b"] as it is written today.
type mergeJSON struct{ left, right string }

func (m *mergeJSON) UnmarshalJSON(data []byte) error {
	if data[0] == '[' {
		var two []string
		if err := json.Unmarshal(data, &two); err != nil {
			return err
		}
		if len(two) != 2 {
			return constError("a merge of " + string(data[:min(len(data), 80)]))
		}
		m.left, m.right = two[0], two[1]
		return nil
	}
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return err
	}
	var ok bool
	if m.left, m.right, ok = strings.Cut(text, " "); !ok || strings.Contains(m.right, " ") {
		return constError("a merge of " + quote(text))
	}
	return nil
}

// part is any of the parts of tokenizer.json that have a type.
type part struct {
	Type string `json:"type"`
	raw  json.RawMessage
}

func parseJSON(file string, data []byte, s settings) (*Tokenizer, error) {
	var j tokenizerJSON
	if err := strict(data, tokenizerLimits, &j); err != nil {
		return nil, fail(file, "not a tokenizer: %v", err)
	}
	t := &Tokenizer{}
	if err := t.model(file, j.Model); err != nil {
		return nil, err
	}
	if !null(j.Normalizer) {
		return nil, refuse(file, "a normalizer, %s", quote(string(j.Normalizer)))
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
	decoder, err := parsePart(file, "decoder", j.Decoder)
	if err != nil {
		return nil, err
	}
	if decoder.Type != "ByteLevel" {
		return nil, refuse(file, "a decoder %s, not ByteLevel", quote(decoder.Type))
	}
	if err := strict(decoder.raw, partLimits, &byteLevelJSON{}); err != nil {
		return nil, fail(file, "decoder: ByteLevel: %v", err)
	}
	return t, nil
}

// parseAdded reads added_tokens, which may not be there.
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
		ID *int `json:"id"` // in place of addedToken's
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

// strict reads a JSON object within limits into a struct: a key that the struct does not
// have, letter by letter, or that is there twice, is an error, and so is a null for a
// field that is neither a pointer nor raw.
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
		key := t.(string) // the decoder lets nothing else stand here
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

// model reads the vocabulary and the merges.
func (t *Tokenizer) model(file string, raw json.RawMessage) error {
	p, err := parsePart(file, "model", raw)
	if err != nil {
		return err
	}
	if p.Type != "" && p.Type != "BPE" { // files of old versions have no type
		return refuse(file, "a model %s, not BPE", quote(p.Type))
	}
	var m modelJSON
	if err := strict(raw, tokenizerLimits, &m); err != nil {
		return fail(file, "model: %v", err)
	}
	switch {
	case m.Dropout != nil && *m.Dropout != 0:
		return refuse(file, "model: dropout %v, which makes tokens random", *m.Dropout)
	case m.Prefix != nil && *m.Prefix != "":
		return refuse(file, "model: continuing_subword_prefix %s", quote(*m.Prefix))
	case m.Suffix != nil && *m.Suffix != "":
		return refuse(file, "model: end_of_word_suffix %s", quote(*m.Suffix))
	case null(m.Vocab):
		return fail(file, "model: no vocab")
	case null(m.Merges):
		return fail(file, "model: no merges")
	}
	var vocab map[string]int
	if err := cmp.Or(vocabLimits.Check(m.Vocab), json.Unmarshal(m.Vocab, &vocab)); err != nil {
		return fail(file, "model: vocab: %v", err)
	}
	var merges []mergeJSON
	if err := cmp.Or(vocabLimits.Check(m.Merges), json.Unmarshal(m.Merges, &merges)); err != nil {
		return fail(file, "model: merges: %v", err)
	}
	if err := t.addTokens(file, vocab); err != nil {
		return err
	}
	if m.ByteFallback && !t.complete {
		return refuse(file, "model: byte_fallback with a vocabulary that lacks bytes")
	}
	for i, merge := range merges {
		if wrong := t.addMerge(merge.left, merge.right); wrong != "" {
			return fail(file, "merge %d, of %.60q and %.60q, %s", i, merge.left, merge.right, wrong)
		}
	}
	t.fuseUnk, t.ignoreMerges = m.FuseUnk, m.IgnoreMerges
	if m.Unk != nil {
		id, ok := t.ids[*m.Unk]
		if !ok && !t.complete {
			return fail(file, "model: unk_token %s is not in the vocabulary", quote(*m.Unk))
		}
		if ok {
			t.unk = id
		}
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

// parts returns the parts of a Sequence, or the one that it is.
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

// preTokenizer reads what cuts texts into words: ByteLevel, and before it what it
// may be behind.
func (t *Tokenizer) preTokenizer(file string, raw json.RawMessage, s settings) error {
	all, err := parts(file, "pre_tokenizer", "pretokenizers", raw)
	if err != nil {
		return err
	}
	if len(all) > maxCuts {
		return refuse(file, "pre_tokenizer: a Sequence of %d, more than %d", len(all), maxCuts)
	}
	for i, p := range all {
		if last := i == len(all)-1; last != (p.Type == "ByteLevel") {
			return refuse(file, "pre_tokenizer: %s, which is number %d of %d; ByteLevel must be the last and only the last", quote(p.Type), i+1, len(all))
		}
		var c cut
		switch p.Type {
		case "ByteLevel":
			err = t.byteLevel(file, p.raw, s, len(all) == 1)
		case "Split":
			c, err = t.splitCut(file, p.raw)
		case "Digits":
			c, err = digitsCut(file, p.raw)
		case "Punctuation":
			c, err = t.punctuationCut(file, p.raw)
		default:
			err = refuse(file, "pre_tokenizer: %s", quote(p.Type))
		}
		if err != nil {
			return err
		}
		if c != nil {
			t.words.cuts = append(t.words.cuts, c)
		}
	}
	if len(all) == 0 {
		return refuse(file, "pre_tokenizer: an empty Sequence")
	}
	return nil
}

func (t *Tokenizer) byteLevel(file string, raw json.RawMessage, s settings, alone bool) error {
	b := byteLevelJSON{UseRegex: true}
	if err := strict(raw, partLimits, &b); err != nil {
		return fail(file, "pre_tokenizer: ByteLevel: %v", err)
	}
	if b.PrefixSpace == nil {
		return fail(file, "pre_tokenizer: ByteLevel without add_prefix_space")
	}
	t.words.prefixSpace, t.words.whole = *b.PrefixSpace, !b.UseRegex
	switch {
	case s.file == "":
	case s.own:
		if !alone || !b.UseRegex || t.ignoreMerges {
			return refuse(file, "the pre_tokenizer or ignore_merges is not that of the tokenizer_class of %s", s.file)
		}
		t.words.prefixSpace = s.prefixSpace != nil && *s.prefixSpace
	case s.prefixSpace != nil && *s.prefixSpace != *b.PrefixSpace:
		return refuse(s.file, "add_prefix_space is %v, and %v in %s", *s.prefixSpace, *b.PrefixSpace, file)
	}
	return nil
}

func (t *Tokenizer) behaviour(file, what, name string, inverted bool) (behaviour, error) {
	b, ok := map[string]behaviour{"Isolated": isolated, "Contiguous": contiguous, "Removed": removed}[name]
	if !ok || inverted {
		return 0, refuse(file, "pre_tokenizer: %s with behavior %s and invert %v", what, quote(name), inverted)
	}
	t.words.removes = t.words.removes || b == removed
	return b, nil
}

func (t *Tokenizer) splitCut(file string, raw json.RawMessage) (cut, error) {
	var p struct {
		Type     string            `json:"type"`
		Pattern  map[string]string `json:"pattern"`
		Behavior string            `json:"behavior"`
		Invert   bool              `json:"invert"`
	}
	if err := strict(raw, partLimits, &p); err != nil {
		return nil, fail(file, "pre_tokenizer: Split: %v", err)
	}
	text, ok := p.Pattern["String"]
	if !ok || len(p.Pattern) != 1 || text == "" {
		return nil, refuse(file, "pre_tokenizer: Split at %.120q, not at a string", p.Pattern)
	}
	b, err := t.behaviour(file, "Split", p.Behavior, p.Invert)
	return cutAt(b, occurrences(text)), err
}

func digitsCut(file string, raw json.RawMessage) (cut, error) {
	var p struct {
		Type       string `json:"type"`
		Individual *bool  `json:"individual_digits"`
	}
	if err := strict(raw, partLimits, &p); err != nil {
		return nil, fail(file, "pre_tokenizer: Digits: %v", err)
	}
	if p.Individual == nil {
		return nil, fail(file, "pre_tokenizer: Digits without individual_digits")
	}
	b := contiguous
	if *p.Individual {
		b = isolated
	}
	return cutAt(b, runes(isNumeric)), nil
}

func (t *Tokenizer) punctuationCut(file string, raw json.RawMessage) (cut, error) {
	p := struct {
		Type     string `json:"type"`
		Behavior string `json:"behavior"`
	}{Behavior: "Isolated"}
	if err := strict(raw, partLimits, &p); err != nil {
		return nil, fail(file, "pre_tokenizer: Punctuation: %v", err)
	}
	b, err := t.behaviour(file, "Punctuation", p.Behavior, false)
	return cutAt(b, runes(isPunctuation)), err
}

// postProcessor reads the template: what stands before and behind a text.
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
		case "ByteLevel": // moves offsets only
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
	if texts != 1 {
		return fail(file, "post_processor: a template with %d texts, not one", texts)
	}
	return nil
}
