package tokenizer

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

// hostile is a tokenizer folder with a file that is meant to take much more memory or time than the file size justifies.
type hostile struct {
	what  string
	files map[string]string
	word  string // text that the error must contain; empty: no error
}

// hostiles returns hostile folders. The largest file has about size bytes.
func hostiles(t testing.TB, size int) []hostile {
	v, m := pairFiles(t, "a b")
	const level = `{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}`
	model := fmt.Sprintf(`{"type":"BPE","vocab":%s,"merges":["a b"]}`, v)
	tokenizer := func(part, value string) map[string]string {
		parts := map[string]string{"version": `"1.0"`, "added_tokens": "[]", "pre_tokenizer": level, "post_processor": "null", "decoder": level, "model": model}
		parts[part] = value
		var all []string
		for key, value := range parts {
			all = append(all, fmt.Sprintf("%q: %s", key, value))
		}
		return map[string]string{"tokenizer.json": "{" + strings.Join(all, ",") + "}"}
	}
	list := func(n int, item string) string {
		return "[" + strings.TrimSuffix(strings.Repeat(item+",", n), ",") + "]"
	}
	sequence := func(n int, item string) string {
		return `{"type":"Sequence","pretokenizers":` + strings.TrimSuffix(list(n, item), "]") + "," + level + "]}"
	}
	template := func(ids, steps int) string {
		return `{"type":"TemplateProcessing","pair":[],"single":` + strings.TrimSuffix(list(steps, `{"SpecialToken":{"id":"</s>","type_id":0}}`), "]") +
			`,{"Sequence":{"id":"A","type_id":0}}],"special_tokens":{"</s>":{"id":"</s>","tokens":[],"ids":` + list(ids, "2") + `}}}`
	}
	numbered := func(format string, most int) string { // returns numbered items, about most bytes
		var b strings.Builder
		for i := 0; b.Len() < most; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	pair := func(file, text string) map[string]string {
		files := map[string]string{"vocab.json": v, "merges.txt": m, "tokenizer_config.json": `{"bos_token":"</s>","eos_token":"</s>","unk_token":"</s>"}`}
		files[file] = text
		return files
	}
	config := min(size, maxConfig-100)
	split := `{"type":"Split","pattern":{"String":"ab"},"behavior":"Isolated","invert":false}`
	digits := `{"type":"Digits","individual_digits":true}`
	return []hostile{
		{"a template whose ids multiply", tokenizer("post_processor", template(size/8, size/160)), "post_processor: more than"},
		{"a template whose ids multiply, as short as a good one", tokenizer("post_processor", template(1000, 300)), "more than 1024 tokens"},
		{"the longest template", tokenizer("post_processor", template(32, 32)), ""},
		{"a template of one more token", tokenizer("post_processor", template(205, 5)), "more than 1024 tokens"},
		{"a template of one more token before and behind", tokenizer("post_processor", strings.Replace(template(205, 2), `"type_id":0}}],`, `"type_id":0}}`+
			strings.Repeat(`,{"SpecialToken":{"id":"</s>","type_id":0}}`, 3)+"],", 1)), "more than 1024 tokens"},
		{"two templates", tokenizer("post_processor", `{"type":"Sequence","processors":[`+template(1, 1)+","+template(1, 1)+"]}"), "two templates"},
		{"many Digits", tokenizer("pre_tokenizer", sequence(size/24, `{"type":"Digits"}`)), "pre_tokenizer: more than"},
		{"many Splits", tokenizer("pre_tokenizer", sequence(size/100, split)), "pre_tokenizer: "},
		{"too many Splits by one", tokenizer("pre_tokenizer", sequence(maxCuts, split)), "a Sequence of 33"},
		{"as many Splits as there may be", tokenizer("pre_tokenizer", sequence(maxCuts-1, split)), ""},
		{"as many Digits as there may be", tokenizer("pre_tokenizer", sequence(maxCuts-1, digits)), ""},
		{"nested pre-tokenizers", tokenizer("pre_tokenizer", strings.Repeat(`{"type":"Sequence","pretokenizers":[`, size/50)+level+strings.Repeat("]}", size/50)), "nested"},
		{"pre-tokenizers nested twice", tokenizer("pre_tokenizer", sequence(1, sequence(1, split))), "Sequence"},
		{"a nested normalizer", tokenizer("normalizer", strings.Repeat(`{"a":[`, size/8)+strings.Repeat("]}", size/8)), "nested"},
		{"a nested decoder", tokenizer("decoder", strings.Repeat("[", size/2)+strings.Repeat("]", size/2)), "nested"},
		{"a nested model", tokenizer("model", strings.Repeat("[", size/2)+strings.Repeat("]", size/2)), "nested"},
		{"many empty added tokens", tokenizer("added_tokens", list(size/3, "{}")), "added_tokens: "},
		{"added tokens", tokenizer("added_tokens", "["+numbered(`{"id":%d,"content":"x"},`, min(size, 4<<20))+"]"), "added token"},
		{"many empty merges", tokenizer("model", fmt.Sprintf(`{"type":"BPE","vocab":%s,"merges":%s}`, v, list(size/3, "[]"))), "merge"},
		{"merges that repeat", tokenizer("model", fmt.Sprintf(`{"type":"BPE","vocab":%s,"merges":%s}`, v, list(size/6, `"a b"`))), "merge"},
		{"a vocabulary that repeats", tokenizer("model", `{"type":"BPE","merges":["a b"],"vocab":{`+strings.TrimSuffix(strings.Repeat(`"":0,`, size/5), ",")+"}}"), "m"},
		{"a key of the model that repeats", tokenizer("model", `{"type":"BPE"`+strings.Repeat(`,"merges":[]`, size/12)+"}"), `"merges" is there twice`},
		{"a large vocab.json", pair("vocab.json", "{"+numbered(`"%d":0,`, size)+"}"), "both have id 0"},
		{"a nested vocab.json", pair("vocab.json", strings.Repeat("[", size)), "nested"},
		{"large merges.txt", pair("merges.txt", strings.Repeat("a b\n", size/4)), "second time"},
		{"merges.txt of one line", pair("merges.txt", strings.Repeat("a ", size/2)), "does not merge"},
		{"a nested tokenizer_config.json", pair("tokenizer_config.json", `{"x":`+strings.Repeat("[", config)), "nested"},
		{"many keys of tokenizer_config.json", pair("tokenizer_config.json", "{"+numbered(`"%d":0,`, config)+"}"), "tokenizer_config.json: "},
		{"many special tokens", pair("tokenizer_config.json", `{"additional_special_tokens":[`+numbered(`"x%d",`, config)+"]}"), "more than 65536 values"},
		{"as many special tokens as there may be", pair("tokenizer_config.json", `{"additional_special_tokens":[`+numbered(`"x%d",`, min(size, 400<<10))+"]}"), ""},
		{"many added tokens", pair("added_tokens.json", "{"+numbered(`"x%d":0,`, config)+"}"), "added token"},
		{"many added and special tokens", map[string]string{"vocab.json": v, "merges.txt": m, "added_tokens.json": "{" + numbered(`"x%d":0,`, config) + "}",
			"special_tokens_map.json": `{"additional_special_tokens":[` + numbered(`"x%d",`, min(size, 400<<10)) + "]}"}, "added token"},
		{"a nested special_tokens_map.json", pair("special_tokens_map.json", `{"eos_token":`+strings.Repeat(`{"x":`, config/8)), "nested"},
	}
}

// bounded loads a hostile folder, and encodes a prompt if there is a tokenizer. bounded returns the allocated bytes and the
// elapsed time.
func (h *hostile) bounded(t testing.TB, prompt string) (bytes uint64, took time.Duration) {
	dir := fstest.MapFS{}
	for name, text := range h.files {
		dir[name] = &fstest.MapFile{Data: []byte(text)}
	}
	began := time.Now()
	bytes = allocated(func() {
		tok, err := LoadFS("x", dir)
		switch {
		case err != nil:
			if tok != nil || h.word == "" || !strings.Contains(err.Error(), h.word) || !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) || len(err.Error()) > 2000 {
				t.Errorf("%s: %.2000v, want %q", h.what, err, h.word)
			}
		case h.word != "":
			t.Errorf("%s: no error, want %q", h.what, h.word)
		default:
			for _, special := range []bool{false, true} {
				if _, err := tok.Encode(prompt, Options{AtMost: 2048, Special: special}); err != nil && !errors.Is(err, ErrTooLong) {
					t.Errorf("%s: %v", h.what, err)
				}
			}
		}
	})
	return bytes, time.Since(began)
}

// TestBounds checks that loading and encoding take memory and time in proportion to the size of the file.
func TestBounds(t *testing.T) {
	prompt := strings.Repeat("ab1. ab  ", 1600/9)
	for _, h := range hostiles(t, 1<<20) {
		size := 0
		for _, text := range h.files {
			size += len(text)
		}
		bytes, took := h.bounded(t, prompt)
		t.Logf("%s: %d KB, %d KB allocated, %v", h.what, size>>10, bytes>>10, took)
		if bytes > uint64(80*size)+64<<20 || took > 20*time.Second {
			t.Errorf("%s: a file of %d KB took %d KB of memory and %v", h.what, size>>10, bytes>>10, took)
		}
	}
}
