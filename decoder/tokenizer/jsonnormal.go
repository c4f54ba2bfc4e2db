package tokenizer

import (
	"encoding/base64"
	"encoding/json"
)

// patternJSON is the pattern of Split and Replace: a string or a regular expression.
type patternJSON map[string]string

// finder returns the finder of a pattern.
func (p patternJSON) finder(file, what string) (finder, error) {
	if text, ok := p["String"]; ok && len(p) == 1 && text != "" {
		return find(occurrences(text)), nil
	}
	if source, ok := p["Regex"]; ok && len(p) == 1 {
		c, err := compilePattern(source)
		if err != nil {
			return nil, refuse(file, "%s: %v", what, err)
		}
		return c.scan, nil
	}
	return nil, refuse(file, "%s at %.120q", what, p)
}

// parseNormalizer reads the normalizer of tokenizer.json.
func parseNormalizer(file string, raw json.RawMessage) (normalizer, error) {
	if null(raw) {
		return nil, nil
	}
	all, err := parts(file, "normalizer", "normalizers", raw)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	if len(all) > maxCuts {
		return nil, refuse(file, "normalizer: a Sequence of %d, more than %d", len(all), maxCuts)
	}
	var chained []normalizer
	for _, p := range all {
		n, err := parseNormal(file, p)
		if err != nil {
			return nil, err
		}
		chained = append(chained, n)
	}
	return chain(chained), nil
}

func parseNormal(file string, p part) (normalizer, error) {
	what := "normalizer: " + quote(p.Type)
	read := func(dst any) error {
		if err := strict(p.raw, partLimits, dst); err != nil {
			return fail(file, "%s: %v", what, err)
		}
		return nil
	}
	none := func() error { // reads an object that has only a type
		var j struct {
			Type string `json:"type"`
		}
		return read(&j)
	}
	short := func(text string) error {
		if len(text) > maxContent {
			return refuse(file, "%s: a text of %d bytes, more than %d", what, len(text), maxContent)
		}
		return nil
	}
	switch p.Type {
	case "NFC", "NFD", "NFKC", "NFKD":
		return form(forms[p.Type]), none()
	case "Lowercase":
		return always(lower), none()
	case "StripAccents":
		return stripAccents, none()
	case "Strip":
		var j struct {
			Type  string `json:"type"`
			Left  bool   `json:"strip_left"`
			Right bool   `json:"strip_right"`
		}
		err := read(&j)
		return strip(j.Left, j.Right), err
	case "Prepend":
		var j struct {
			Type string `json:"type"`
			Text string `json:"prepend"`
		}
		if err := read(&j); err != nil {
			return nil, err
		}
		return prepend(j.Text), short(j.Text)
	case "Replace":
		var j struct {
			Type    string      `json:"type"`
			Pattern patternJSON `json:"pattern"`
			Content string      `json:"content"`
		}
		if err := read(&j); err != nil {
			return nil, err
		}
		f, err := j.Pattern.finder(file, what)
		if err != nil {
			return nil, err
		}
		return replace(f, j.Content), short(j.Content)
	case "Precompiled":
		var j struct {
			Type  string  `json:"type"`
			Chars *string `json:"precompiled_charsmap"`
		}
		if err := read(&j); err != nil {
			return nil, err
		}
		if j.Chars == nil || *j.Chars == "" {
			return always(func(text string) string { return text }), nil
		}
		data, err := base64.StdEncoding.DecodeString(*j.Chars)
		if err != nil {
			return nil, fail(file, "%s: precompiled_charsmap: %v", what, err)
		}
		m, err := parseCharsmap(data)
		if err != nil {
			return nil, fail(file, "%s: %v", what, err)
		}
		return always(m.normalize), nil
	}
	return nil, refuse(file, "%s, which is not known", what)
}
