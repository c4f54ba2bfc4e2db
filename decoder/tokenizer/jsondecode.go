package tokenizer

import (
	"encoding/json"
	"unicode/utf8"
)

// decoder sets t.spelling from the decoder of tokenizer.json. The decoder must be one of:
//
//   - ByteLevel or Metaspace alone
//   - a Sequence of Replace, ByteFallback, Fuse and Strip, in this order
func (t *Tokenizer) decoder(file string, raw json.RawMessage) error {
	if null(raw) {
		return refuse(file, "no decoder")
	}
	all, err := parts(file, "decoder", "decoders", raw)
	if err != nil {
		return err
	}
	if len(all) > maxCuts {
		return refuse(file, "decoder: a Sequence of %d, more than %d", len(all), maxCuts)
	}
	s := &t.spelling
	s.kind = spellParts
	order := map[string]int{"Replace": 1, "ByteFallback": 2, "Fuse": 3, "Strip": 4}
	at, fused := 0, false
	for i, p := range all {
		what := "decoder: " + quote(p.Type)
		now, inOrder := order[p.Type]
		switch {
		case len(all) == 1 && (p.Type == "ByteLevel" || p.Type == "Metaspace"):
		case !inOrder:
			return refuse(file, "%s, which is number %d of %d", what, i+1, len(all))
		case now < at || now == at && now != 1:
			return refuse(file, "%s, which is number %d of %d and in no known order", what, i+1, len(all))
		}
		at = now
		switch p.Type {
		case "ByteLevel":
			if err := strict(p.raw, partLimits, &byteLevelJSON{}); err != nil {
				return fail(file, "%s: %v", what, err)
			}
			s.kind = spellBytes
		case "Metaspace":
			m, scheme, err := parseMetaspace(file, "decoder", p.raw)
			if err != nil {
				return err
			}
			s.kind, s.meta, s.metaPrefix = spellMeta, m.Replacement, scheme != "never"
		case "Replace":
			r, err := parseReplacement(file, what, p.raw)
			if err != nil {
				return err
			}
			s.replace = append(s.replace, r)
		case "ByteFallback", "Fuse":
			var j struct {
				Type string `json:"type"`
			}
			if err := strict(p.raw, partLimits, &j); err != nil {
				return fail(file, "%s: %v", what, err)
			}
			s.byteTokens = s.byteTokens || p.Type == "ByteFallback"
			fused = fused || p.Type == "Fuse"
		case "Strip":
			var j struct {
				Type    string `json:"type"`
				Content string `json:"content"`
				Start   int    `json:"start"`
				Stop    int    `json:"stop"`
			}
			if err := strict(p.raw, partLimits, &j); err != nil {
				return fail(file, "%s: %v", what, err)
			}
			if len(j.Content) != 1 || j.Content[0] >= utf8.RuneSelf || j.Start < 0 || j.Stop < 0 || j.Start+j.Stop > maxContent {
				return refuse(file, "%s of %s, %d and %d times", what, quote(j.Content), j.Start, j.Stop)
			}
			s.strip, s.start, s.stop, s.each = j.Content[0], j.Start, j.Stop, !fused
		}
	}
	return nil
}

func parseReplacement(file, what string, raw json.RawMessage) (replacement, error) {
	var j struct {
		Type    string      `json:"type"`
		Pattern patternJSON `json:"pattern"`
		Content string      `json:"content"`
	}
	if err := strict(raw, partLimits, &j); err != nil {
		return replacement{}, fail(file, "%s: %v", what, err)
	}
	if len(j.Content) > maxContent {
		return replacement{}, refuse(file, "%s: a text of %d bytes, more than %d", what, len(j.Content), maxContent)
	}
	if text, ok := j.Pattern["String"]; ok && len(j.Pattern) == 1 && text != "" {
		return replacement{from: text, by: j.Content}, nil
	}
	if _, err := j.Pattern.finder(file, what); err != nil {
		return replacement{}, err
	}
	p, err := compilePattern(j.Pattern["Regex"])
	return replacement{pattern: p, by: j.Content}, err
}
