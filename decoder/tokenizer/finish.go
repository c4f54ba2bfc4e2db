package tokenizer

import (
	"maps"
	"slices"
)

// bos returns the token that Encode puts before a text if add_bos_token is true.
func (s *settings) bos() string {
	if t, ok := s.named["bos_token"]; ok {
		return t.Content
	}
	return "<|endoftext|>" // as in transformers' GPT2Tokenizer
}

// finish adds the added tokens to a vocabulary, and then the special tokens that are no added tokens. The added tokens are
// those of tokenizer.json if added is not nil, and those of the settings otherwise.
func (t *Tokenizer) finish(file string, added []addedToken, s settings) error {
	opt := added == nil && s.file == "" && len(s.named)+len(s.extra) == 0 // without settings, the vocabulary is read as OPT's
	if added == nil {
		file, added = s.addedFile, s.added
	} else if err := s.agree(file, added); err != nil {
		return err
	}
	t.special, t.texts, t.splitSpecial = map[int]bool{}, map[int]string{}, s.splitSpecial
	base, next := len(t.ids), len(t.ids)
	var byPlace [2][]addedToken
	seen := map[string]bool{}
	add := func(a addedToken, anyID bool) error {
		id, known := t.ids[a.Content]
		if !known {
			id = next
			if other, ok := t.tokens[id]; ok {
				return fail(file, "added token %s would have id %d, which %s has", quote(a.Content), id, quote(other))
			}
		}
		switch {
		case a.Content == "":
			return fail(file, "an added token without text")
		case seen[a.Content]:
			return fail(file, "added token %s is there twice", quote(a.Content))
		case !anyID && a.ID != id:
			return fail(file, "added token %s has id %d, and transformers gives it %d", quote(a.Content), a.ID, id)
		case id >= phantom:
			return fail(file, "added token %s has id %d", quote(a.Content), id)
		}
		seen[a.Content] = true
		if !known {
			t.ids[a.Content], t.tokens[id], t.texts[id] = id, a.Content, a.Content
		}
		next = max(next, id+1, base)
		a.ID = id
		if a.Special {
			t.special[id] = true
		}
		place := 0
		if a.Normalized {
			place = 1
		}
		byPlace[place] = append(byPlace[place], a)
		return nil
	}
	specials, special := s.specials(), map[string]bool{}
	for _, a := range specials {
		special[a.Content] = true
	}
	for _, a := range added {
		a.Special = a.Special || special[a.Content]
		if err := add(a, false); err != nil {
			return err
		}
	}
	named := map[string]addedToken{}
	for _, a := range specials {
		other, again := named[a.Content]
		switch {
		case a.Content == "" || seen[a.Content] && !again:
		case !again:
			if err := add(a, true); err != nil {
				return err
			}
			named[a.Content] = a
		case a.SingleWord != other.SingleWord || a.LStrip != other.LStrip || a.RStrip != other.RStrip:
			// Some versions of transformers use the first value, and others the last value.
			return fail(s.file, "special token %s is %+v under one key and %+v under another", quote(a.Content), other, a)
		}
	}
	if t.normal != nil {
		for i := range byPlace[1] {
			text, _, err := t.normal(byPlace[1][i].Content)
			if err != nil {
				return refuse(file, "added token %s: %v", quote(byPlace[1][i].Content), err)
			}
			byPlace[1][i].Content = text
		}
		known := map[string]bool{"": true}
		byPlace[1] = slices.DeleteFunc(byPlace[1], func(a addedToken) bool {
			again := known[a.Content]
			known[a.Content] = true
			return again
		})
	}
	t.added = [2]*matcher{newMatcher(byPlace[0]), newMatcher(byPlace[1])}

	if unk, ok := s.named["unk_token"]; ok && t.unk < 0 {
		if id, ok := t.ids[unk.Content]; ok {
			t.unk, t.fuseUnk = id, false
		}
	}
	if opt {
		for _, token := range []string{endOfText, "<pad>"} { // the special tokens in OPT's tokenizer_config.json
			if id, ok := t.ids[token]; ok {
				t.special[id] = true
			}
		}
	}
	t.bos, t.eos = -1, -1
	if a, ok := s.named["bos_token"]; ok {
		if id, ok := t.ids[a.Content]; ok {
			t.bos = id
		}
	}
	eos := endOfText
	if a, ok := s.named["eos_token"]; ok {
		eos = a.Content
	}
	if id, ok := t.ids[eos]; ok {
		t.eos = id
	}
	for id := range t.tokens {
		t.size = max(t.size, id+1)
	}
	return nil
}

// measure sets t.widest to the largest number of bytes of text in one token. The number is unbounded, and t.widest stays 0,
// if added tokens absorb white space, if text is normalized or removed, or if bytes without a token are omitted or fused.
func (t *Tokenizer) measure() {
	widest := t.longest
	for _, m := range t.added {
		for _, a := range m.tokens {
			if a.LStrip || a.RStrip {
				return
			}
			widest = max(widest, len(a.Content))
		}
	}
	if _, bytes := t.model.(byteBPE); bytes && t.complete && !t.words.removes && t.normal == nil {
		t.widest = widest
	}
}

// agree returns an error if added_tokens_decoder is present and differs from the added tokens of tokenizer.json. Some
// versions of transformers read one of the two, and some the other.
func (s *settings) agree(file string, added []addedToken) error {
	if !s.addedFromDecoder {
		return nil
	}
	byText := map[string]addedToken{}
	for _, a := range added {
		byText[a.Content] = a
	}
	for _, a := range s.added {
		b, ok := byText[a.Content]
		if !ok {
			return fail(s.addedFile, "added token %s is not in %s", quote(a.Content), file)
		}
		if a != b {
			return fail(s.addedFile, "added token %s is %+v, and %s has %+v", quote(a.Content), a, file, b)
		}
		delete(byText, a.Content)
	}
	if len(byText) > 0 {
		return fail(file, "added token %s is not in added_tokens_decoder of %s", quote(slices.Min(slices.Collect(maps.Keys(byText)))), s.addedFile)
	}
	return nil
}
