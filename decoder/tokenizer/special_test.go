package tokenizer

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestSpecial checks that the files of the folder determine the special tokens, regardless
// of the names of the tokens.
func TestSpecial(t *testing.T) {
	g := readGolden(t)
	type object = map[string]any
	token := func(id int, content string, special bool) object {
		return object{"id": id, "content": content, "special": special, "normalized": false}
	}
	const js, config, list = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
	for _, c := range []struct {
		what         string
		folder, file string
		key          string
		value        any
		hidden       []string // special tokens, out of the tokens below
	}{
		{"as published", "as published", config, "errors", "replace", []string{"<pad>", "</s>"}},
		{"unk_token of vocab.json", "no bos", config, "unk_token", "<unk>", []string{"<pad>", "</s>", "<unk>"}},
		{"unk_token of tokenizer.json", "saved by 5", config, "unk_token", "<unk>", []string{"<pad>", "</s>", "<unk>"}},
		{"no pad_token", "no bos", config, "pad_token", fs.ErrNotExist, []string{"</s>"}},
		{"a byte as pad_token", "no bos", config, "pad_token", "1", []string{"</s>", "1"}},
		{"additional_special_tokens", "no bos", config, "additional_special_tokens", []any{"1", "<s>"}, []string{"<s>", "<pad>", "</s>", "1"}},
		{"additional_special_tokens of tokenizer.json's", "saved by 5", config, "additional_special_tokens", []any{"1", "<s>"}, []string{"<s>", "<pad>", "</s>", "1"}},
		{"extra_special_tokens", "no bos", config, "extra_special_tokens", object{"x": "1"}, []string{"<pad>", "</s>", "1"}},
		{"special_tokens_map.json", "special_tokens_map.json", list, "mask_token", "1", []string{"</s>", "1"}}, // <t1> is its pad_token
		{"special in tokenizer.json", "json 0", js, "added_tokens", []any{token(1, "<pad>", true), token(53, "1", true)}, []string{"<pad>", "</s>", "1"}},
		{"not special in tokenizer.json", "json 0", js, "added_tokens", []any{token(0, "<s>", false), token(53, "1", false)}, []string{"<pad>", "</s>"}},
		{"eos_token that is not special in tokenizer.json", "json 0", js, "added_tokens", []any{token(2, "</s>", false)}, []string{"<pad>", "</s>"}},
		{"special in added_tokens_decoder", "no bos", config, "added_tokens_decoder", object{"53": token(53, "1", true), "0": token(0, "<s>", false)}, []string{"<pad>", "</s>", "1"}},
		{"eos_token that is not special in added_tokens_decoder", "no bos", config, "added_tokens_decoder", object{"2": token(2, "</s>", false)}, []string{"<pad>", "</s>"}},
	} {
		tok, err := Load(edited(t, &g, c.folder, c.file, []string{c.key}, c.value))
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		var hidden []string
		for _, name := range []string{"<s>", "<pad>", "</s>", "<unk>", "<mask>", "1"} {
			id, ok := tok.ID(name)
			if !ok {
				continue
			}
			text := tok.Decode([]int{id})
			token, special := tok.Special(id)
			if text != "" && text != name || special != (text == "") || special && token != name {
				t.Errorf("%s: %s is %q, special %v %q", c.what, name, text, special, token)
			}
			if text == "" {
				hidden = append(hidden, name)
			}
			// Encode without Options.Special encodes the names of special tokens as ordinary
			// text. The ordinary text of a one-letter name is the token itself.
			if special && len(name) > 1 && slices.Contains(encode(tok, name, Options{Bare: true}), id) {
				t.Errorf("%s: a text can have the special token %s", c.what, name)
			}
			if ids := encode(tok, name, Options{Special: true}); special && !slices.Contains(ids[len(tok.before):], id) {
				t.Errorf("%s: %s is %v, without its id", c.what, name, ids)
			}
		}
		if !slices.Equal(hidden, c.hidden) {
			t.Errorf("%s: %q are hidden, want %q", c.what, hidden, c.hidden)
		}
	}

	// A folder without settings is read as OPT's.
	dir := t.TempDir()
	v, m := pairFiles(t)
	for name, text := range map[string]string{"vocab.json": v, "merges.txt": m} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	hidden := func() (all []int) {
		t.Helper()
		tok, err := Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		for id := range tok.VocabSize() {
			if tok.Decode([]int{id}) == "" {
				all = append(all, id)
			}
		}
		return all
	}
	if got := hidden(); !slices.Equal(got, []int{1, 2}) {
		t.Errorf("without settings %v are hidden", got)
	}
	data, err := json.Marshal(map[string]string{"eos_token": "<s>"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, list), data, 0o666); err != nil {
		t.Fatal(err)
	}
	if got := hidden(); !slices.Equal(got, []int{0}) {
		t.Errorf("with %s %v are hidden", data, got)
	}
	if token, ok := (&Tokenizer{}).Special(2); ok || token != "" {
		t.Errorf("of nothing %q is special", token)
	}
}

// TestEOS checks that EOS is the eos_token of the folder, or </s> if there is no eos_token. With
// neither token in the vocabulary, EOS is -1.
func TestEOS(t *testing.T) {
	for _, c := range []struct {
		last, settings string // the token of id 2, and keys of tokenizer_config.json
		want           int
	}{
		{"<eos>", ``, -1},
		{"<eos>", `, "eos_token": "<eos>"`, 2},
		{"<eos>", `, "eos_token": "<s>"`, 0},
		{"</s>", ``, 2},
		{"</s>", `, "eos_token": "<pad>"`, 1},
	} {
		dir := t.TempDir()
		v, m := pairFiles(t)
		for name, text := range map[string]string{
			"vocab.json": strings.Replace(v, "</s>", c.last, 1), "merges.txt": m,
			"tokenizer_config.json": `{"tokenizer_class": "GPT2Tokenizer", "add_bos_token": false` + c.settings + `}`,
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
		}
		tok, err := Load(dir)
		if err != nil {
			t.Fatalf("%s%s: %v", c.last, c.settings, err)
		}
		if got := tok.EOS(); got != c.want {
			t.Errorf("%s%s: texts end with %d, want %d", c.last, c.settings, got, c.want)
		}
	}
}
