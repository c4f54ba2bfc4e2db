package tokenizer

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder/internal/files"
)

// edited is a golden folder with one value of one file changed. The elements of the path
// are keys. The value fs.ErrNotExist removes the key.
func edited(t testing.TB, g *goldenFolders, folder, file string, path []string, value any) string {
	return g.write(t, g.named(t, folder), func(name string, fields map[string]any) {
		if name != file {
			return
		}
		for _, key := range path[:len(path)-1] {
			fields = fields[key].(map[string]any)
		}
		if key := path[len(path)-1]; value == fs.ErrNotExist {
			delete(fields, key)
		} else {
			fields[key] = value
		}
	})
}

// TestRefused checks that an unsupported setting is an error that names the setting.
func TestRefused(t *testing.T) {
	g := readGolden(t)
	object := func(kv ...any) map[string]any {
		m := map[string]any{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i].(string)] = kv[i+1]
		}
		return m
	}
	const js, config = "tokenizer.json", "tokenizer_config.json"
	added := func(id int, content string) []any {
		return []any{object("id", id, "content", content, "special", false)}
	}
	for _, c := range []struct {
		file  string
		path  string
		value any
		kind  error
		word  string
	}{
		{js, "normalizer", object("type", "NFC"), ErrUnsupported, "NFC"},
		{js, "normalizer", object("type", "Lowercase"), ErrUnsupported, "Lowercase"},
		{js, "model type", "Unigram", ErrFormat, "unknown field"},
		{js, "model type", "WordPiece", ErrUnsupported, "WordPiece"},
		{js, "model dropout", 0.1, ErrUnsupported, "dropout 0.1"},
		{js, "model continuing_subword_prefix", "##", ErrUnsupported, "continuing_subword_prefix"},
		{js, "model end_of_word_suffix", "</w>", ErrUnsupported, "end_of_word_suffix"},
		{js, "model cleverness", true, ErrFormat, "cleverness"},
		{js, "model vocab", fs.ErrNotExist, ErrFormat, "no vocab"},
		{js, "model merges", []any{"a"}, ErrFormat, "merge"},
		{js, "model merges", []any{[]any{"a", "b", "c"}}, ErrFormat, "merge"},
		{js, "model merges", []any{"a a a"}, ErrFormat, "merge"},
		{js, "model merges", []any{[]any{"zz", "z"}}, ErrFormat, "does not merge"},
		{js, "model", fs.ErrNotExist, ErrUnsupported, "no model"},
		{js, "pre_tokenizer", nil, ErrUnsupported, "pre_tokenizer"},
		{js, "pre_tokenizer", object("type", "Metaspace", "replacement", "_"), ErrUnsupported, "tokenizer_class"},
		{js, "pre_tokenizer", object("type", "Metaspace", "replacement", "__"), ErrFormat, "Metaspace"},
		{js, "pre_tokenizer", object("type", "Metaspace", "replacement", "_", "prepend_scheme", "last"), ErrUnsupported, "last"},
		{js, "pre_tokenizer", object("type", "Whitespace"), ErrUnsupported, "Whitespace"},
		{js, "pre_tokenizer", object("type", "Sequence", "pretokenizers", []any{}), ErrUnsupported, "tokenizer_class"},
		{js, "pre_tokenizer", object("type", "Sequence", "pretokenizers", []any{object("type", "Digits", "individual_digits", true)}), ErrUnsupported, "tokenizer_class"},
		{js, "pre_tokenizer", object("type", "Sequence", "pretokenizers", []any{object("type", "Split", "pattern", object("Regex", "(?<=a)b"), "behavior", "Isolated", "invert", false), object("type", "ByteLevel")}), ErrUnsupported, "Split"},
		{js, "pre_tokenizer", object("type", "Sequence", "pretokenizers", []any{object("type", "Split", "pattern", object("String", "a"), "behavior", "MergedWithNobody", "invert", false), object("type", "ByteLevel")}), ErrUnsupported, "MergedWithNobody"},
		{js, "pre_tokenizer add_suffix_space", true, ErrFormat, "add_suffix_space"},
		{js, "post_processor", object("type", "RobertaProcessing"), ErrUnsupported, "RobertaProcessing"},
		{js, "post_processor single", []any{}, ErrFormat, "0 texts"},
		{js, "post_processor special_tokens", object(), ErrFormat, "</s>"},
		{js, "decoder", nil, ErrUnsupported, "decoder"},
		{js, "decoder type", "WordPiece", ErrUnsupported, "WordPiece"},
		{js, "decoder", object("type", "Sequence", "decoders", []any{object("type", "Fuse"), object("type", "ByteFallback")}), ErrUnsupported, "order"},
		{js, "wonders", true, ErrFormat, "wonders"},
		{js, "added_tokens", added(7, "<x>"), ErrFormat, "has id 7"},
		{js, "added_tokens", added(7, strings.Repeat("x", 2000)), ErrFormat, "2000 bytes"},
		{config, "add_prefix_space", "yes", ErrFormat, "add_prefix_space"},
		{config, "do_lower_case", true, ErrUnsupported, "do_lower_case"},
		{config, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", true, ErrUnsupported, "corrupt"},
		{config, "image_token", 3, ErrFormat, "image_token"},
		{config, "errors", "ignore", ErrUnsupported, "errors"},
		{config, "bos_token", 3, ErrFormat, "bos_token"},
		{config, "added_tokens_decoder", object("1", object("content", "<pad>", "special", true)), ErrFormat, "</s>"},
		{config, "added_tokens_decoder", object("x", object("content", "<pad>")), ErrFormat, `"x"`},
	} {
		tok, err := Load(edited(t, &g, "saved by 5", c.file, strings.Fields(c.path), c.value))
		if tok != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), c.file) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s of %s is %v: %v, want %v with %q", c.path, c.file, c.value, err, c.kind, c.word)
		}
	}
	for _, c := range []struct {
		folder, file, path string
		value              any
		kind               error
		word               string
	}{
		{"no bos", config, "add_eos_token", true, ErrUnsupported, "add_eos_token"},
		{"no bos", config, "tokenizer_class", "LlamaTokenizer", ErrUnsupported, "LlamaTokenizer"},
		{"no bos", config, "added_tokens_decoder", object("400", object("content", "<x>")), ErrFormat, "has id 400"},
		{"added_tokens.json", "added_tokens.json", "<x>", 400, ErrFormat, "has id 400"},
		{"special_tokens_map.json", "special_tokens_map.json", "shoe_token", 3, ErrFormat, "shoe_token"},
		{"special_tokens_map.json", "special_tokens_map.json", "bos_token", object("content", "</s>", "lstrip", true), ErrFormat, "another"},
		{"json 0", config, "add_prefix_space", true, ErrUnsupported, "add_prefix_space"},
	} {
		tok, err := Load(edited(t, &g, c.folder, c.file, strings.Fields(c.path), c.value))
		if tok != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s of %s is %v: %v, want %v with %q", c.path, c.file, c.value, err, c.kind, c.word)
		}
	}
	// A setting that does not affect ids or text is no error, regardless of the value.
	for _, c := range []struct {
		path  string
		value any
	}{
		{"clean_up_tokenization_spaces", true}, {"model_max_length", 5}, {"do_lower_case", false}, {"anything", nil}, {"chat_template", "{{x}}"}, {"add_eos_token", true},
	} {
		if _, err := Load(edited(t, &g, "saved by 5", config, strings.Fields(c.path), c.value)); err != nil {
			t.Errorf("%s is %v: %v", c.path, c.value, err)
		}
	}
}

// TestNulls checks that a null or absent value is an error, and does not count as 0, false or
// an empty text.
func TestNulls(t *testing.T) {
	g := readGolden(t)
	type object = map[string]any
	type list = []any
	const js, config = "tokenizer.json", "tokenizer_config.json"
	level := object{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	special := func(ids any) object { return object{"</s>": object{"id": "</s>", "ids": ids, "tokens": list{"</s>"}}} }
	for _, c := range []struct {
		folder, file, path string
		value              any
		word               string // text that the error must contain; empty: no error
	}{
		{"saved by 5", js, "added_tokens", list{object{"id": nil, "content": "<x>"}}, "null"},
		{"saved by 5", js, "added_tokens", list{object{"id": 300, "content": "<x>", "special": nil}}, "null"},
		{"saved by 5", js, "added_tokens", list{object{"content": "<s>"}}, "no id"},
		{"saved by 5", js, "added_tokens", list{object{"id": 300}}, "no content"},
		{"saved by 5", js, "added_tokens", list{nil}, "null"},
		{"saved by 5", js, "added_tokens", object{}, "added_tokens"},
		{"saved by 5", js, "model merges", list{list{"a", nil}}, "null"},
		{"saved by 5", js, "model merges", list{nil}, "null"},
		{"saved by 5", js, "model merges", nil, "no merges"},
		{"saved by 5", js, "model vocab", object{"a": 0, "b": nil}, "null"},
		{"saved by 5", js, "model vocab", nil, "no vocab"},
		{"saved by 5", js, "model fuse_unk", nil, "fuse_unk is null"},
		{"saved by 5", js, "model type", nil, "type is null"},
		{"saved by 5", js, "model unk_token", nil, ""},
		{"saved by 5", js, "model dropout", nil, ""},
		{"saved by 5", js, "model dropout", 0.0, ""},
		{"saved by 5", js, "model unk_token", "<none>", ""}, // every byte has a token
		{"saved by 5", js, "model byte_fallback", true, ""},
		{"no bos", config, "added_tokens_decoder", object{"-1": object{"content": "<x>"}}, `"-1"`},
		{"saved by 5", js, "version", nil, "version is null"},
		{"saved by 5", js, "truncation", nil, ""},
		{"saved by 5", js, "Model", object{}, `unknown field "Model"`},
		{"saved by 5", js, "model VOCAB", object{}, `unknown field "VOCAB"`},
		{"saved by 5", js, "decoder x", 1, `unknown field "x"`},
		{"saved by 5", js, "decoder add_prefix_space", "no", "decoder"},
		{"saved by 5", js, "post_processor special_tokens", special(list{nil}), "null"},
		{"saved by 5", js, "post_processor special_tokens", special(list{}), "not explained"},
		{"saved by 5", js, "post_processor special_tokens", special(nil), "null"},
		{"saved by 5", js, "post_processor special_tokens", special(list{2}), ""},
		{"saved by 5", js, "post_processor special_tokens", special(list{299}), ""},
		{"saved by 5", js, "post_processor special_tokens", special(list{9999}), "9999"},
		{"saved by 5", js, "post_processor", object{"type": "ByteLevel", "y": 1}, `unknown field "y"`},
		{"saved by 5", js, "pre_tokenizer add_prefix_space", fs.ErrNotExist, "without add_prefix_space"},
		{"saved by 5", js, "pre_tokenizer add_prefix_space", nil, "null"},
		{"saved by 5", js, "pre_tokenizer use_regex", fs.ErrNotExist, ""},
		{"json 0", js, "pre_tokenizer", object{"type": "Sequence", "pretokenizers": list{object{"type": "Digits"}, level}}, "without individual_digits"},
		{"json 0", js, "pre_tokenizer", object{"type": "Sequence", "pretokenizers": list{object{"type": "Digits", "individual_digits": false}, level}}, ""},
		{"json 0", js, "pre_tokenizer", object{"type": "Sequence", "pretokenizers": list{nil, level}}, "null"},
		{"saved by 5", config, "additional_special_tokens", list{nil}, "null"},
		{"saved by 5", config, "additional_special_tokens", nil, ""},
		{"saved by 5", config, "extra_special_tokens", object{"x": nil}, "null"},
		{"saved by 5", config, "bos_token", object{"content": nil}, "null"},
		{"saved by 5", config, "bos_token", object{"content": "</s>", "lstrip": nil}, "null"},
		{"saved by 5", config, "bos_token", object{"lstrip": true}, "no token"},
		{"no bos", config, "added_tokens_decoder", object{"1": nil}, "null"},
		{"no bos", config, "added_tokens_decoder", object{"1": object{"content": "<pad>", "special": nil}}, "null"},
		{"no bos", config, "added_tokens_decoder", object{"1": object{"special": true}}, "without text"},
		{"no bos", config, "add_bos_token", nil, ""},
		{"added_tokens.json", "added_tokens.json", "<new>", nil, "null"},
	} {
		tok, err := Load(edited(t, &g, c.folder, c.file, strings.Fields(c.path), c.value))
		if c.word == "" {
			if err != nil {
				t.Errorf("%s of %s is %v: %v", c.path, c.file, c.value, err)
			}
			continue
		}
		if tok != nil || !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), c.file) {
			t.Errorf("%s of %s is %v: %v, want %q", c.path, c.file, c.value, err, c.word)
		}
	}
}

// TestOwnClass checks that a class that makes its own pre-tokenizer is refused if tokenizer.json has another
// pre-tokenizer, or ignore_merges. Any other class accepts both.
func TestOwnClass(t *testing.T) {
	g := readGolden(t)
	type object = map[string]any
	level := func(regex bool) object {
		return object{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex}
	}
	for _, c := range []struct {
		path  string
		value any
		own   bool // the class makes the pre-tokenizer
	}{
		{"pre_tokenizer", level(true), true},
		{"pre_tokenizer", level(false), false},
		{"pre_tokenizer", object{"type": "Sequence", "pretokenizers": []any{level(true)}}, true},
		{"pre_tokenizer", object{"type": "Sequence", "pretokenizers": []any{object{"type": "Digits", "individual_digits": true}, level(true)}}, false},
		{"model ignore_merges", true, false},
		{"model ignore_merges", false, true},
	} {
		for folder, own := range map[string]bool{"saved by 5": true, "json 0": false} {
			tok, err := Load(edited(t, &g, folder, "tokenizer.json", strings.Fields(c.path), c.value))
			if c.own || !own {
				if err != nil {
					t.Errorf("%s: %s is %v: %v", folder, c.path, c.value, err)
				}
				continue
			}
			if tok != nil || !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "is not that of the tokenizer_class") {
				t.Errorf("%s: %s is %v: %v", folder, c.path, c.value, err)
			}
		}
	}
}

// TestIgnoreMerges checks that a word that is a token becomes the token, for words up to the longest token.
func TestIgnoreMerges(t *testing.T) {
	g := readGolden(t)
	const long = "zqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzq"
	dir := g.write(t, g.named(t, "json 0"), func(file string, fields map[string]any) {
		if file == "tokenizer.json" {
			model := fields["model"].(map[string]any)
			vocab := maps.Clone(g.Vocab)
			vocab[long] = len(vocab)
			model["vocab"], model["ignore_merges"], fields["added_tokens"] = vocab, true, []any{}
			fields["post_processor"] = nil
		}
	})
	tok, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	id, _ := tok.ID(long)
	if ids := encode(tok, long, Options{Bare: true}); tok.longest != len(long) || !slices.Equal(ids, []int{id}) {
		t.Errorf("%v, want %d; the longest token has %d characters", ids, id, tok.longest)
	}
	if ids := encode(tok, long+"z", Options{Bare: true}); len(ids) != len(long)+1 {
		t.Errorf("of a longer word %v", ids)
	}
}

// TestAddedTokensFile checks that added_tokens.json is ignored if the folder has tokenizer.json.
func TestAddedTokensFile(t *testing.T) {
	g := readGolden(t)
	for _, folder := range []string{"json 0", "saved by 5"} {
		dir := g.write(t, g.named(t, folder), nil)
		want, err := Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, added := range []string{`{"</s>": 5}`, `{"<other>": 300, "<pad>": 1}`, `{"<x>": 400}`, `{}`, `no JSON`} {
			if err := os.WriteFile(filepath.Join(dir, "added_tokens.json"), []byte(added), 0o666); err != nil {
				t.Fatal(err)
			}
			got, err := Load(dir)
			if err != nil {
				t.Errorf("%s with %s: %v", folder, added, err)
				continue
			}
			for _, text := range []string{"ab </s> <other><pad> <x>", "aa[X]]Ⓐx"} {
				if a, b := encode(want, text, Options{Special: true}), encode(got, text, Options{Special: true}); !slices.Equal(a, b) || want.VocabSize() != got.VocabSize() {
					t.Errorf("%s with %s: %q is %v of %d, want %v of %d", folder, added, text, b, got.VocabSize(), a, want.VocabSize())
				}
			}
		}
	}
}

// TestWhiteSpaceTaken checks that tokens of white space that absorb the white space around them take time
// in proportion to the text.
func TestWhiteSpaceTaken(t *testing.T) {
	const n = 1 << 19
	for _, token := range []addedToken{
		{ID: 1, Content: " ", LStrip: true}, {ID: 1, Content: " ", RStrip: true}, {ID: 1, Content: " ", LStrip: true, RStrip: true},
	} {
		m := newMatcher([]addedToken{token, {ID: 2, Content: "\t"}, {ID: 3, Content: "\n", LStrip: true}})
		for _, text := range []string{strings.Repeat(" ", n), strings.Repeat(" \t", n/2), strings.Repeat("  \n", n/3), strings.Repeat("\r", n) + " "} {
			began, found := time.Now(), 0
			m.split(text, false, func(a *addedToken, _ string) bool {
				if a != nil {
					found++
				}
				return true
			})
			if want := strings.Count(text, " ") + strings.Count(text, "\t") + strings.Count(text, "\n"); found != want || time.Since(began) > 10*time.Second {
				t.Errorf("%+v: %d tokens of %d in %q..., in %v", token, found, want, text[:3], time.Since(began))
			}
		}
	}
}

// TestBothForms checks that tokenizer.json takes precedence over vocab.json.
func TestBothForms(t *testing.T) {
	g := readGolden(t)
	dir := g.write(t, g.named(t, "template rules"), nil)
	for name, text := range map[string]string{"vocab.json": `{"a": 0}`, "merges.txt": "no merge\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	tok, err := Load(dir)
	if err != nil || len(tok.ids) < len(g.Vocab) {
		t.Errorf("%d tokens, %v", len(tok.ids), err)
	}
}

// TestMissingBytes checks that a byte that the vocabulary lacks becomes the unknown token of the
// folder. Without an unknown token, a text with such a byte is an error.
func TestMissingBytes(t *testing.T) {
	v, m := pairFiles(t, "a b")
	v = strings.Replace(v, `"x":`, `"xx":`, 1)
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	write("vocab.json", v)
	write("merges.txt", m)
	tok, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := tok.Encode("ab", Options{AtMost: 9}); err != nil || len(ids) != 2 {
		t.Errorf("a text that needs no such byte: %v, %v", ids, err)
	}
	if ids, err := tok.Encode("abxab", Options{AtMost: 9}); len(ids) != 3 || !errors.Is(err, ErrNoToken) || !strings.Contains(err.Error(), `"x"`) {
		t.Errorf("a text that needs one: %v, %v", ids, err)
	}
	ab, _ := tok.ID("ab")
	if ids := encode(tok, "axbxab", Options{Bare: true}); len(ids) != 2 || ids[0] != ab || ids[1] != ab { // as in transformers
		t.Errorf("without an unknown token: %v", ids)
	}
	write("tokenizer_config.json", `{"unk_token": "<unk>", "bos_token": "</s>", "eos_token": "</s>"}`)
	if tok, err = Load(dir); err != nil {
		t.Fatal(err)
	}
	if ids, err := tok.Encode("abxxab", Options{AtMost: 4}); err != nil || len(ids) != 4 || ids[1] != 3 || ids[2] != 3 {
		t.Errorf("with an unknown token: %v, %v", ids, err)
	}
}

// TestTooLong checks that the work for a text with too many tokens does not grow with the text.
func TestTooLong(t *testing.T) {
	tok := small(t, "a a", "aa aa", "aaaa aaaa")
	g := readGolden(t)
	strips, err := Load(edited(t, &g, "no bos", "tokenizer_config.json", []string{"mask_token"},
		map[string]any{"content": "<mask>", "lstrip": true, "rstrip": true}))
	if err != nil {
		t.Fatal(err)
	}
	lacks, err := Load(g.write(t, g.named(t, "bytes lacking 1"), nil))
	if err != nil {
		t.Fatal(err)
	}
	const long = 4 << 20
	for name, tok := range map[string]*Tokenizer{"plain": tok, "with a token that takes white space": strips, "with fused bytes": lacks} {
		for _, text := range []string{strings.Repeat("a", long), strings.Repeat("a ", long/2), strings.Repeat("<", long)} {
			if bytes := allocated(func() {
				if ids, err := tok.Encode(text, Options{AtMost: 2048, Special: true}); ids != nil || !errors.Is(err, ErrTooLong) {
					t.Errorf("%s: %.9q...: %d ids, %v", name, text, len(ids), err)
				}
			}); bytes > 4<<20 {
				t.Errorf("%s: %.9q...: %d bytes for an error", name, text, bytes)
			}
		}
	}
	// White space that a token absorbs adds no tokens. Bytes that become one unknown
	// token count as one token.
	if ids, err := strips.Encode(strings.Repeat(" ", long)+"<mask>"+strings.Repeat("\n", long), Options{AtMost: 1, Special: true}); err != nil || len(ids) != 1 {
		t.Errorf("a token in white space: %d ids, %v", len(ids), err)
	}
	missing := ""
	for b := range byte(0x80) {
		if b > ' ' && lacks.bytes[b] < 0 && kindAt(string(rune(b)), 0) == other {
			missing = string(rune(b))
		}
	}
	if ids, err := lacks.Encode(strings.Repeat(missing, long), Options{AtMost: 2, Special: true}); err != nil || len(ids) != 2 || missing == "" {
		t.Errorf("unknown bytes %q: %d ids, %v", missing, len(ids), err)
	}
	// The text has exactly the maximum number of tokens.
	if ids, err := tok.Encode(strings.Repeat("a", 8*2048), Options{AtMost: 2048, Bare: true, Special: true}); err != nil || len(ids) != 2048 {
		t.Errorf("%d ids, %v", len(ids), err)
	}
	if ids, err := tok.Encode(strings.Repeat("a", 8*2047), Options{AtMost: 2048, Special: true}); err != nil || len(ids) != 2048 {
		t.Errorf("%d ids, %v", len(ids), err)
	}
}

// allocated returns the bytes that f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestIrregularFiles checks that irregular files and too large files are errors.
func TestIrregularFiles(t *testing.T) {
	g := readGolden(t)
	for _, c := range []struct{ folder, file string }{
		{"no bos", "vocab.json"}, {"no bos", "merges.txt"}, {"no bos", "tokenizer_config.json"}, {"no bos", "tokenizer.json"},
		{"added_tokens.json", "added_tokens.json"}, {"special_tokens_map.json", "special_tokens_map.json"},
	} {
		name := filepath.Join(g.write(t, g.named(t, c.folder), nil), c.file)
		if err := os.RemoveAll(name); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/dev/zero", name); err != nil {
			t.Skip(err)
		}
		if tok, err := Load(filepath.Dir(name)); tok != nil || !errors.Is(err, files.ErrIrregular) && !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is a device: %v", c.file, err)
		}
		f, err := os.Create(name + ".sparse")
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Truncate(20<<30), f.Close(), os.Rename(name+".sparse", name)); err != nil {
			t.Skip(err)
		}
		if tok, err := Load(filepath.Dir(name)); tok != nil || !errors.Is(err, files.ErrTooLong) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s has 20 GB: %v", c.file, err)
		}
	}
}

// FuzzTokenizerJSON checks that any files are an error or give a usable tokenizer: ids
// below VocabSize, at most AtMost ids, and valid UTF-8.
func FuzzTokenizerJSON(f *testing.F) {
	var g goldenFolders
	data, err := os.ReadFile("testdata/folders.json")
	if err == nil {
		err = json.Unmarshal(data, &g)
	}
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range []string{"saved by 5", "template around", "both 1", "json 2", "Galactica's kind 0", "Galactica's kind 3", "bytes lacking 1", "nothing said", "added_tokens.json"} {
		dir := g.write(f, g.named(f, name), nil)
		read := func(file string) string {
			data, _ := os.ReadFile(filepath.Join(dir, file))
			return string(data)
		}
		f.Add(read("tokenizer.json"), read("tokenizer_config.json"), read("added_tokens.json"), "ab <new> SPLIT1a1 </s>\xff日本")
	}
	f.Fuzz(func(t *testing.T, tokenizer, config, added, text string) {
		v, m := pairFiles(t, "a b", "Ġ ab")
		dir := fstest.MapFS{"vocab.json": {Data: []byte(v)}, "merges.txt": {Data: []byte(m)}}
		for name, data := range map[string]string{"tokenizer.json": tokenizer, "tokenizer_config.json": config, "added_tokens.json": added} {
			if data != "" {
				dir[name] = &fstest.MapFile{Data: []byte(data)}
			}
		}
		usable(t, dir, text)
	})
}

// FuzzSettings is FuzzTokenizerJSON for the settings files of vocab.json.
func FuzzSettings(f *testing.F) {
	f.Add(`{"eos_token": "</s>", "additional_special_tokens": ["<x>", {"content": "ab", "lstrip": true}]}`, `{"add_bos_token": true}`, `{"<x>": 258}`, "ab <x>")
	f.Add(`{"mask_token": null}`, `{"added_tokens_decoder": {"258": {"content": "<x>", "special": true}}}`, "", "<x>\xff")
	f.Add(`{"bos_token": {"content": null}}`, `{"extra_special_tokens": {"a": "b"}, "tokenizer_class": "GPT2Tokenizer"}`, `{"b": null}`, "")
	f.Fuzz(func(t *testing.T, special, config, added, text string) {
		v, m := pairFiles(t, "a b", "Ġ ab")
		dir := fstest.MapFS{"vocab.json": {Data: []byte(v)}, "merges.txt": {Data: []byte(m)}}
		for name, data := range map[string]string{"special_tokens_map.json": special, "tokenizer_config.json": config, "added_tokens.json": added} {
			if data != "" {
				dir[name] = &fstest.MapFile{Data: []byte(data)}
			}
		}
		usable(t, dir, text)
	})
}

// usable checks that a folder is an error or gives a usable tokenizer.
func usable(t *testing.T, dir fs.FS, text string) {
	t.Helper()
	tok, err := LoadFS("x", dir)
	if err != nil {
		if tok != nil || strings.Contains(err.Error(), "\n") {
			t.Fatalf("%v, and a tokenizer: %v", err, tok != nil)
		}
		return
	}
	all := encode(tok, text, Options{Special: true})
	for _, ids := range [][]int{all, encode(tok, text, Options{}), encode(tok, text, Options{Bare: true})} {
		for _, id := range ids {
			if id < 0 || id >= tok.VocabSize() {
				t.Fatalf("id %d is not below %d", id, tok.VocabSize())
			}
		}
		if !utf8.ValidString(tok.Decode(ids)) {
			t.Fatal("a text that is no UTF-8")
		}
	}
	if ids, err := tok.Encode(text, Options{AtMost: len(all), Special: true}); !errors.Is(err, ErrNoToken) && !slices.Equal(ids, all) {
		t.Fatalf("%v, %v, want %v", ids, err, all)
	}
	if _, err := tok.Encode(text, Options{AtMost: len(all) - 1, Special: true}); !errors.Is(err, ErrTooLong) && len(all) > 0 {
		t.Fatalf("one token too many: %v", err)
	}
}
