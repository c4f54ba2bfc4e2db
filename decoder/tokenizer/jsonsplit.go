package tokenizer

import (
	"encoding/json"
	"strings"
	"unicode"
)

// preTokenizer sets t.words from the pre-tokenizer of tokenizer.json.
func (t *Tokenizer) preTokenizer(file string, raw json.RawMessage, s settings) error {
	if null(raw) {
		return t.checkPrefix(file, s)
	}
	all, err := parts(file, "pre_tokenizer", "pretokenizers", raw)
	if err != nil {
		return err
	}
	if len(all) > maxCuts {
		return refuse(file, "pre_tokenizer: a Sequence of %d, more than %d", len(all), maxCuts)
	}
	byteLevel := false
	for i, p := range all {
		var c cut
		switch p.Type {
		case "ByteLevel":
			if i < len(all)-1 {
				return refuse(file, "pre_tokenizer: ByteLevel, which is number %d of %d; ByteLevel must be the last", i+1, len(all))
			}
			byteLevel = true
			err = t.byteLevel(file, p.raw, s, len(all) == 1)
		case "Split":
			c, err = t.splitCut(file, p.raw)
		case "Digits":
			c, err = digitsCut(file, p.raw)
		case "Punctuation":
			c, err = t.punctuationCut(file, p.raw)
		case "Metaspace":
			c, err = t.metaspaceCut(file, p.raw)
		case "WhitespaceSplit":
			t.words.removes = true
			c = cutAt(removed, false, find(runes(unicode.IsSpace)))
		default:
			err = refuse(file, "pre_tokenizer: %s, which is not known", quote(p.Type))
		}
		if err != nil {
			return err
		}
		if c != nil {
			t.words.cuts = append(t.words.cuts, c)
		}
	}
	if !byteLevel {
		return t.checkPrefix(file, s)
	}
	return nil
}

// checkPrefix returns an error if tokenizer_class makes a pre-tokenizer of its own. checkPrefix is for a tokenizer.json
// without the pre-tokenizer ByteLevel.
func (t *Tokenizer) checkPrefix(file string, s settings) error {
	if s.makesOwn() {
		return refuse(file, "the pre_tokenizer is not that of the tokenizer_class of %s", s.file)
	}
	return nil
}

// byteLevelJSON is ByteLevel as a pre-tokenizer, post-processor or decoder.
type byteLevelJSON struct {
	Type        string `json:"type"`
	PrefixSpace *bool  `json:"add_prefix_space"`
	TrimOffsets bool   `json:"trim_offsets"` // moves no token
	UseRegex    bool   `json:"use_regex"`
}

func (t *Tokenizer) byteLevel(file string, raw json.RawMessage, s settings, alone bool) error {
	b := byteLevelJSON{UseRegex: true}
	if err := strict(raw, partLimits, &b); err != nil {
		return fail(file, "pre_tokenizer: ByteLevel: %v", err)
	}
	if b.PrefixSpace == nil {
		return fail(file, "pre_tokenizer: ByteLevel without add_prefix_space")
	}
	t.words.prefixSpace, t.words.gpt2 = *b.PrefixSpace, b.UseRegex
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
	return t.toBytes(file)
}

func (t *Tokenizer) behaviour(file, what, name string) (behaviour, error) {
	b, ok := behaviours[name]
	if !ok {
		return 0, refuse(file, "pre_tokenizer: %s with behavior %s", what, quote(name))
	}
	t.words.removes = t.words.removes || b == removed
	return b, nil
}

func (t *Tokenizer) splitCut(file string, raw json.RawMessage) (cut, error) {
	var p struct {
		Type     string      `json:"type"`
		Pattern  patternJSON `json:"pattern"`
		Behavior string      `json:"behavior"`
		Invert   bool        `json:"invert"`
	}
	if err := strict(raw, partLimits, &p); err != nil {
		return nil, fail(file, "pre_tokenizer: Split: %v", err)
	}
	f, err := p.Pattern.finder(file, "pre_tokenizer: Split")
	if err != nil {
		return nil, err
	}
	b, err := t.behaviour(file, "Split", p.Behavior)
	return cutAt(b, p.Invert, f), err
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
	return cutAt(b, false, find(runes(isNumeric))), nil
}

func (t *Tokenizer) punctuationCut(file string, raw json.RawMessage) (cut, error) {
	p := struct {
		Type     string `json:"type"`
		Behavior string `json:"behavior"`
	}{Behavior: "Isolated"}
	if err := strict(raw, partLimits, &p); err != nil {
		return nil, fail(file, "pre_tokenizer: Punctuation: %v", err)
	}
	b, err := t.behaviour(file, "Punctuation", p.Behavior)
	return cutAt(b, false, find(runes(isPunctuation))), err
}

// metaspaceJSON is Metaspace as a pre-tokenizer or decoder.
type metaspaceJSON struct {
	Type        string  `json:"type"`
	Replacement string  `json:"replacement"`
	StrRep      *string `json:"str_rep"`          // old versions: must equal Replacement
	PrefixSpace *bool   `json:"add_prefix_space"` // old versions: false means prepend_scheme "never"
	Scheme      *string `json:"prepend_scheme"`
	Split       *bool   `json:"split"`
}

// parseMetaspace parses Metaspace. scheme is "always", "first" or "never".
func parseMetaspace(file, what string, raw json.RawMessage) (m metaspaceJSON, scheme string, err error) {
	if err := strict(raw, partLimits, &m); err != nil {
		return m, "", fail(file, "%s: Metaspace: %v", what, err)
	}
	scheme = "always"
	switch {
	case m.Scheme != nil:
		scheme = *m.Scheme
		if m.PrefixSpace != nil && *m.PrefixSpace == (scheme == "never") {
			return m, "", fail(file, "%s: Metaspace with prepend_scheme %s and add_prefix_space %v", what, quote(scheme), *m.PrefixSpace)
		}
	case m.PrefixSpace != nil && !*m.PrefixSpace:
		scheme = "never"
	}
	if len([]rune(m.Replacement)) != 1 || m.StrRep != nil && *m.StrRep != m.Replacement {
		return m, "", fail(file, "%s: Metaspace with the replacement %s", what, quote(m.Replacement))
	}
	if !strings.Contains(" always first never ", " "+scheme+" ") {
		return m, "", refuse(file, "%s: Metaspace with prepend_scheme %s", what, quote(scheme))
	}
	return m, scheme, nil
}

func (t *Tokenizer) metaspaceCut(file string, raw json.RawMessage) (cut, error) {
	m, scheme, err := parseMetaspace(file, "pre_tokenizer", raw)
	if err != nil {
		return nil, err
	}
	t.words.removes = true
	c := &metaspace{replacement: m.Replacement, always: scheme == "always", first: scheme == "first", split: m.Split == nil || *m.Split}
	return c.cut, nil
}
