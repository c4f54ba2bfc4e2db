package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// settings is the content of tokenizer_config.json, special_tokens_map.json and added_tokens.json.
type settings struct {
	file             string // path of tokenizer_config.json; empty: no such file
	class            string // tokenizer_class
	own              bool   // the class makes its own pre-tokenizer
	addBOS           bool
	addEOS           bool
	saysBOS, saysEOS bool // add_bos_token and add_eos_token are present
	prefixSpace      *bool
	splitSpecial     bool
	named            map[string]addedToken // special tokens by key, such as "eos_token"
	extra            []addedToken          // special tokens that names has no key for
	added            []addedToken          // added tokens with ids
	addedFile        string
	addedFromDecoder bool
}

// names are the keys of special tokens, in the order in which transformers adds the special tokens to the vocabulary.
var names = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// byGPT2 are the keys for which transformers' GPT2Tokenizer has a default.
var byGPT2 = map[string]bool{"bos_token": true, "eos_token": true, "unk_token": true}

// ownClasses are the tokenizer classes that make a pre-tokenizer of their own, from add_prefix_space. All other classes use
// tokenizer.json unchanged. In transformers 5 further classes, such as LlamaTokenizer, make a pre-tokenizer of their own.
// This package reads tokenizer.json for such a class, because the models were trained with tokenizer.json.
var ownClasses = []string{"", "GPT2Tokenizer", "GPT2TokenizerFast"}

// makesOwn reports whether the class is named and makes a pre-tokenizer of its own.
func (s *settings) makesOwn() bool { return s.own && s.class != "" }

// pairClasses are the tokenizer classes of vocab.json and merges.txt without tokenizer.json.
var pairClasses = append([]string{"PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"}, ownClasses...)

// irrelevant are the keys of tokenizer_config.json that do not affect Encode and Decode: keys for paths, batches, chats and
// other tasks.
var irrelevant = []string{
	"__type", "auto_map_class", "backend", "chat_template", "clean_up_tokenization_spaces", "device_map", "from_slow", "full_tokenizer_file",
	"fix_mistral_regex", "is_fast", "is_local", "legacy", "local_files_only", "max_len", "max_length", "merges_file", "model_input_names",
	"model_max_length", "name_or_path", "sp_model_kwargs", "spaces_between_special_tokens", "use_default_system_prompt", "model_specific_special_tokens",
	"chat_template_format", "response_schema", "response_template", "tool_parser_type", "processor_config", "image_seq_len", "max_pixels", "min_pixels", "pad_to_multiple_of", "pad_token_type_id", "padding", "padding_side", "processor_class",
	"return_attention_mask", "return_tensors", "return_token_type_ids", "special_tokens_map_file", "stride", "subfolder", "tokenizer_file",
	"transformers_version", "trim_offsets", "truncation", "truncation_side", "truncation_strategy", "use_fast", "verbose", "vocab_file",
}

func readSettings(dir files.Folder) (settings, error) {
	s := settings{own: true, named: map[string]addedToken{}}
	if dir.Exists("tokenizer_config.json") {
		s.file = dir.Path("tokenizer_config.json")
		fields, err := readObject(dir, "tokenizer_config.json")
		if err != nil {
			return s, err
		}
		if err := s.config(fields); err != nil {
			return s, err
		}
	}
	// As in transformers, added_tokens_decoder replaces the older files special_tokens_map.json and added_tokens.json.
	if s.addedFromDecoder {
		return s, nil
	}
	if dir.Exists("special_tokens_map.json") {
		fields, err := readObject(dir, "special_tokens_map.json")
		if err != nil {
			return s, err
		}
		for _, key := range slices.Sorted(maps.Keys(fields)) {
			if known, err := s.special(dir.Path("special_tokens_map.json"), key, fields[key]); err != nil {
				return s, err
			} else if !known {
				return s, refuse(dir.Path("special_tokens_map.json"), "%s is not a key of it that is known", quote(key))
			}
		}
	}
	// tokenizer.json has added tokens of its own.
	if dir.Exists("added_tokens.json") && !dir.Exists("tokenizer.json") {
		return s, s.addedTokens(dir)
	}
	return s, nil
}

func readObject(dir files.Folder, name string) (map[string]json.RawMessage, error) {
	data, err := readFile(dir, name, maxConfig)
	if err != nil {
		return nil, err
	}
	var fields map[string]json.RawMessage
	if err := cmp.Or(configLimits.Check(data), json.Unmarshal(data, &fields)); err != nil || fields == nil {
		return nil, fail(dir.Path(name), "not a JSON object: %v", cmp.Or(err, error(errNull)))
	}
	return fields, nil
}

type constError string

func (e constError) Error() string { return string(e) }

const errNull constError = "null"

// config reads the keys of tokenizer_config.json.
func (s *settings) config(fields map[string]json.RawMessage) error {
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		raw := fields[key]
		if string(raw) == "null" || slices.Contains(irrelevant, key) {
			continue
		}
		if known, err := s.special(s.file, key, raw); err != nil {
			return err
		} else if known {
			continue
		}
		var err error
		switch key {
		case "tokenizer_class":
			if err = s.decode(key, raw, &s.class); err == nil {
				s.own = slices.Contains(ownClasses, s.class)
			}
		case "add_bos_token":
			s.saysBOS = true
			err = s.decode(key, raw, &s.addBOS)
		case "add_eos_token":
			s.saysEOS = true
			err = s.decode(key, raw, &s.addEOS)
		case "add_prefix_space":
			err = s.decode(key, raw, &s.prefixSpace)
		case "split_special_tokens":
			err = s.decode(key, raw, &s.splitSpecial)
		case "added_tokens_decoder":
			err = s.decoder(raw)
		case "errors":
			if string(raw) != `"replace"` {
				return refuse(s.file, `errors is %s, and only "replace" is known`, quote(string(raw)))
			}
		case "init_inputs":
			if string(bytes.ReplaceAll(raw, []byte(" "), nil)) != "[]" {
				return refuse(s.file, "init_inputs is %s, not []", quote(string(raw)))
			}
		default:
			if string(raw) != "false" { // false disables an unknown feature
				return refuse(s.file, "%s is not a key of it that is known", quote(key))
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *settings) decode(key string, raw json.RawMessage, dst any) error {
	if err := json.Unmarshal(raw, dst); err != nil {
		return fail(s.file, "%s is %s: %v", key, quote(string(raw)), err)
	}
	return nil
}

// special parses the value of a key for special tokens. known reports whether key is such a key.
func (s *settings) special(file, key string, raw json.RawMessage) (known bool, err error) {
	switch {
	case slices.Contains(names, key):
		if string(raw) == "null" {
			return true, nil
		}
		t, err := parseSpecial(file, key, raw)
		if err == nil && s.named == nil {
			s.named = map[string]addedToken{}
		}
		if err == nil {
			s.named[key] = t
		}
		return true, err
	case key == "additional_special_tokens" || key == "extra_special_tokens":
		if err := specialLimits.Check(raw); err != nil {
			return true, fail(file, "%s: %v", key, err)
		}
		var list []json.RawMessage
		if json.Unmarshal(raw, &list) != nil {
			var byName map[string]json.RawMessage
			if err := json.Unmarshal(raw, &byName); err != nil {
				return true, fail(file, "%s is neither a list nor an object of tokens", key)
			}
			for _, name := range slices.Sorted(maps.Keys(byName)) {
				list = append(list, byName[name])
			}
		}
		for _, raw := range list {
			t, err := parseSpecial(file, key, raw)
			if err != nil {
				return true, err
			}
			s.extra = append(s.extra, t)
		}
		return true, nil
	case strings.HasSuffix(key, "_token") && !strings.HasPrefix(key, "add_"): // a key of a certain model, such as "image_token"
		t, err := parseSpecial(file, key, raw)
		if err == nil {
			s.extra = append(s.extra, t)
		}
		return true, err
	}
	return false, nil
}

// parseSpecial parses a special token, which is a string or an object with the keys of an added token.
func parseSpecial(file, key string, raw json.RawMessage) (addedToken, error) {
	t := addedToken{ID: -1, Special: true}
	if err := specialLimits.Check(raw); err != nil {
		return t, fail(file, "%s: %v", key, err)
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		t.Content = text
	} else if err := json.Unmarshal(raw, &t); err != nil || t.Content == "" {
		return t, fail(file, "%s is %s, which is no token", key, quote(string(raw)))
	}
	t.ID, t.Special = -1, true
	return t, checkContent(file, t.Content)
}

func checkContent(file, content string) error {
	if len(content) > maxContent {
		return fail(file, "an added token of %d bytes, more than %d: %s", len(content), maxContent, quote(content))
	}
	return nil
}

// decoder parses added_tokens_decoder, which maps ids to added tokens.
func (s *settings) decoder(raw json.RawMessage) error {
	if err := specialLimits.Check(raw); err != nil {
		return fail(s.file, "added_tokens_decoder: %v", err)
	}
	var byID map[string]addedToken
	if err := s.decode("added_tokens_decoder", raw, &byID); err != nil {
		return err
	}
	s.addedFile, s.addedFromDecoder = s.file, true
	for key, t := range byID {
		id, err := strconv.Atoi(key)
		if err != nil || id < 0 {
			return fail(s.file, "added_tokens_decoder has id %s", quote(key))
		}
		t.ID = id
		if err := checkContent(s.file, t.Content); err != nil {
			return err
		}
		s.added = append(s.added, t)
	}
	slices.SortFunc(s.added, func(a, b addedToken) int { return a.ID - b.ID })
	return nil
}

// addedTokens reads added_tokens.json, which maps the texts of added tokens to ids.
func (s *settings) addedTokens(dir files.Folder) error {
	data, err := readFile(dir, "added_tokens.json", maxConfig)
	if err != nil {
		return err
	}
	s.addedFile = dir.Path("added_tokens.json")
	var ids map[string]int
	if err := cmp.Or(vocabLimits.Check(data), json.Unmarshal(data, &ids)); err != nil {
		return fail(s.addedFile, "not a JSON object of tokens and ids: %v", err)
	}
	special := map[string]bool{}
	for _, t := range s.specials() {
		special[t.Content] = true
	}
	for content, id := range ids {
		if id < 0 {
			return fail(s.addedFile, "token %s has id %d", quote(content), id)
		}
		if err := checkContent(s.addedFile, content); err != nil {
			return err
		}
		s.added = append(s.added, addedToken{ID: id, Content: content, Special: special[content], Normalized: !special[content]})
	}
	slices.SortFunc(s.added, func(a, b addedToken) int { return cmp.Compare(a.ID, b.ID) })
	return nil
}

// specials returns the special tokens in the order of adding.
func (s *settings) specials() []addedToken {
	var all []addedToken
	for _, name := range names {
		t, ok := s.named[name]
		if !ok && s.file != "" && s.own && byGPT2[name] {
			t, ok = addedToken{ID: -1, Content: "<|endoftext|>", Special: true}, true
		}
		if ok {
			all = append(all, t)
		}
	}
	return append(all, s.extra...)
}
