package tokenizer

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// tekkenTokens are the special tokens of a file of version 7 or lower that lists none.
var tekkenTokens = strings.Fields(`<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]`)

// tekkenOthers are the keys of a file that do not affect Encode and Decode.
var tekkenOthers = map[string]bool{"image": true, "multimodal": true, "audio": true, "model_settings_builder": true, "version": true, "type": true}

// parseTekken parses tekken.json. The special tokens have the lowest ids. The id of any other token is the number of
// special tokens plus the rank. A text begins with <s>.
func parseTekken(file string, data []byte, _ settings) (*Tokenizer, error) {
	var fields map[string]json.RawMessage
	if err := cmp.Or(tokenizerLimits.Check(data), json.Unmarshal(data, &fields)); err != nil {
		return nil, fail(file, "not a JSON object: %v", err)
	}
	var config struct {
		Pattern string `json:"pattern"`
		Vocab   int    `json:"num_vocab_tokens"`
		Size    int    `json:"default_vocab_size"`
		Special int    `json:"default_num_special_tokens"`
		Version string `json:"version"`
	}
	var vocab []struct {
		Rank  int     `json:"rank"`
		Bytes string  `json:"token_bytes"`
		Str   *string `json:"token_str"`
	}
	var specials []struct {
		Rank    int    `json:"rank"`
		Str     string `json:"token_str"`
		Control bool   `json:"is_control"`
	}
	for key, raw := range fields {
		var err error
		switch key {
		case "config":
			err = strict(raw, partLimits, &config)
		case "vocab":
			err = json.Unmarshal(raw, &vocab)
		case "special_tokens":
			err = json.Unmarshal(raw, &specials)
		default:
			if !tekkenOthers[key] {
				return nil, refuse(file, "%s is not a key of it that is known", quote(key))
			}
		}
		if err != nil {
			return nil, fail(file, "%s: %v", key, err)
		}
	}
	version, err := strconv.Atoi(strings.TrimPrefix(config.Version, "v"))
	if err != nil || !strings.HasPrefix(config.Version, "v") {
		return nil, refuse(file, "config: version %s", quote(config.Version))
	}
	inner := config.Size - config.Special
	if config.Special < 0 || config.Special > 1<<16 || inner < 256 || inner > len(vocab) {
		return nil, fail(file, "config: %d tokens of which %d are special, and the vocabulary has %d", config.Size, config.Special, len(vocab))
	}
	names := make([]string, config.Special)
	for i := range names {
		names[i] = fmt.Sprintf("<SPECIAL_%d>", i)
	}
	switch {
	case null(fields["special_tokens"]) && version > 7:
		return nil, fail(file, "no special_tokens in version %s", quote(config.Version))
	case null(fields["special_tokens"]):
		copy(names, tekkenTokens)
	}
	for i, s := range specials {
		if s.Rank != i || i >= len(names) || s.Str == "" {
			return nil, fail(file, "special token %d is %s with rank %d, and there are %d", i, quote(s.Str), s.Rank, len(names))
		}
		if err := checkContent(file, s.Str); err != nil {
			return nil, err
		}
		names[i] = s.Str
	}

	t := &Tokenizer{vocabulary: vocabulary{ids: map[string]int{}, tokens: make(map[int]string, config.Size), unk: -1}}
	t.special, t.size = map[int]bool{}, config.Size
	var added []addedToken
	for id, name := range names {
		if other, ok := t.ids[name]; ok {
			return nil, fail(file, "special tokens %d and %d are both %s", other, id, quote(name))
		}
		t.ids[name], t.tokens[id], t.special[id] = id, name, true
		added = append(added, addedToken{ID: id, Content: name, Special: true})
	}
	t.added = [2]*matcher{newMatcher(added), newMatcher(nil)}
	model := &rankBPE{textPairs{tokens: make(map[string]merged, inner)}}
	for i, v := range vocab[:inner] {
		text, err := base64.StdEncoding.DecodeString(v.Bytes)
		switch {
		case err != nil || len(text) == 0 || len(text) > maxContent:
			return nil, fail(file, "vocab: token %d is %s", i, quote(v.Bytes))
		case v.Rank != i || i < 256 && string(text) != string([]byte{byte(i)}):
			return nil, fail(file, "vocab: token %d is %q with rank %d", i, text, v.Rank)
		}
		s, id := string(text), config.Special+i
		if _, ok := model.tokens[s]; ok {
			return nil, fail(file, "vocab: token %d is %q, which is there twice", i, s)
		}
		model.tokens[s] = merged{int32(i), int32(id)}
		model.longest = max(model.longest, len(s))
		t.tokens[id] = s
		if _, ok := t.ids[s]; !ok {
			t.ids[s] = id
		}
	}
	t.model = model
	p, err := compilePattern(config.Pattern)
	if err != nil {
		return nil, refuse(file, "config: %v", err)
	}
	t.words.cuts = []cut{cutAt(removed, true, p.scan)}
	t.spelling = spelling{kind: spellRaw, specialBreak: true}
	t.bos, t.eos = -1, -1
	if id, ok := t.ids["<s>"]; ok && t.special[id] {
		t.bos, t.before = id, []int{id}
	}
	if id, ok := t.ids["</s>"]; ok && t.special[id] {
		t.eos = id
	}
	return t, nil
}
