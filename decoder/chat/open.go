package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
)

// Limits of the files that Open reads: the bytes of a file, and the number of templates.
const (
	maxFile      = 32 << 20
	maxTemplates = 100
)

// Open reads the chat templates and the special tokens of a Hugging Face folder. Open adds the special tokens to the Tokens of
// opts. The templates are in the first of these places that has one:
//
//  1. chat_template.jinja is the template "default", and additional_chat_templates/NAME.jinja is the template NAME.
//  2. The field chat_template of tokenizer_config.json is a text, or a list of names and templates.
//  3. The field chat_template of chat_template.json has the same format.
//
// For a folder without a template, Open returns [ErrNoTemplate]. For a GGUF file, pass the value of tokenizer.chat_template to
// [New] under the name "default".
func Open(dir string, opts Options) (*Templates, error) {
	var config map[string]json.RawMessage
	if err := readJSON(filepath.Join(dir, "tokenizer_config.json"), &config); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	templates, err := find(dir, config)
	if err != nil {
		return nil, err
	}
	if len(templates) == 0 {
		return nil, fmt.Errorf("%w in %s: neither chat_template.jinja nor chat_template in tokenizer_config.json", ErrNoTemplate, quote(dir))
	}
	tokens := specialTokens(config)
	var others map[string]json.RawMessage
	if err := readJSON(filepath.Join(dir, "special_tokens_map.json"), &others); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	all := specialTokens(others)
	maps.Copy(all, tokens)
	maps.Copy(all, opts.Tokens)
	opts.Tokens = all
	return New(templates, opts)
}

// find returns the templates of a folder by name.
func find(dir string, config map[string]json.RawMessage) (map[string]string, error) {
	templates := map[string]string{}
	text, err := readFile(filepath.Join(dir, "chat_template.jinja"))
	if err == nil {
		templates["default"] = string(text)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	more, err := filepath.Glob(filepath.Join(escapeGlob(dir), "additional_chat_templates", "*.jinja"))
	if err != nil {
		return nil, err
	}
	if len(more) > maxTemplates {
		return nil, fmt.Errorf("%w: %d templates in %s, at most %d are read", ErrFormat, len(more), quote(dir), maxTemplates)
	}
	for _, path := range more {
		if text, err = readFile(path); err != nil {
			return nil, err
		}
		templates[strings.TrimSuffix(filepath.Base(path), ".jinja")] = string(text)
	}
	if len(templates) > 0 {
		return templates, nil
	}
	if data, ok := config["chat_template"]; ok && string(data) != "null" {
		return parseTemplates(data)
	}
	var file map[string]json.RawMessage
	if err := readJSON(filepath.Join(dir, "chat_template.json"), &file); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if data, ok := file["chat_template"]; ok {
		return parseTemplates(data)
	}
	return nil, fmt.Errorf("%w: chat_template.json in %s has no chat_template", ErrFormat, quote(dir))
}

// parseTemplates decodes a template, or a list of names and templates.
func parseTemplates(data json.RawMessage) (map[string]string, error) {
	var text string
	if json.Unmarshal(data, &text) == nil {
		return map[string]string{"default": text}, nil
	}
	var list []struct{ Name, Template *string }
	if err := json.Unmarshal(data, &list); err != nil {
		return nil, fmt.Errorf("%w: chat_template is neither a text nor a list of names and templates: %w", ErrFormat, err)
	}
	if len(list) > maxTemplates {
		return nil, fmt.Errorf("%w: chat_template has %d templates, at most %d are read", ErrFormat, len(list), maxTemplates)
	}
	templates := map[string]string{}
	for i, t := range list {
		if t.Name == nil || t.Template == nil {
			return nil, fmt.Errorf("%w: entry %d of chat_template has no name or no template", ErrFormat, i)
		}
		if _, ok := templates[*t.Name]; ok {
			return nil, fmt.Errorf("%w: chat_template has two templates %s", ErrFormat, quote(*t.Name))
		}
		templates[*t.Name] = *t.Template
	}
	return templates, nil
}

// specialTokens returns the fields NAME_token. Such a field is a text, or an object with the text in the field content.
func specialTokens(config map[string]json.RawMessage) map[string]string {
	tokens := map[string]string{}
	for name, data := range config {
		var text *string
		var object struct{ Content *string }
		switch {
		case !strings.HasSuffix(name, "_token"): // fields such as add_bos_token have no text
		case json.Unmarshal(data, &text) == nil && text != nil:
			tokens[name] = *text
		case json.Unmarshal(data, &object) == nil && object.Content != nil:
			tokens[name] = *object.Content
		}
	}
	return tokens
}

func readJSON(path string, to any) error {
	data, err := readFile(path)
	if err == nil {
		if err = json.Unmarshal(data, to); err != nil {
			err = fmt.Errorf("%w: %s: %w", ErrFormat, quote(path), err)
		}
	}
	return err
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%w: %s has more than %d bytes", ErrFormat, quote(path), maxFile)
	}
	return data, err
}

// escapeGlob returns a glob pattern that matches only s.
func escapeGlob(s string) string {
	if filepath.Separator == '\\' {
		return s // filepath.Match has no escapes on Windows
	}
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}
