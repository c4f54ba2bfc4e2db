package decoder

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder/tokenizer"

	"pgregory.net/rapid"
)

// byteTokenizer returns a tokenizer whose token 4+b is the byte b, and whose tokens below 4 are special.
func byteTokenizer(t testing.TB) *tokenizer.Tokenizer {
	t.Helper()
	vocabulary, c := map[string]int{"<s>": 0, "<pad>": 1, "</s>": 2, "<|x|>": 3}, rune(0x100)
	for b := range 256 {
		r := rune(b)
		if b < 0x21 || b > 0x7e && b < 0xa1 || b == 0xad {
			r = c
			c++
		}
		vocabulary[string(r)] = 4 + b
	}
	data, err := json.Marshal(vocabulary)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := tokenizer.LoadFS("bytes", fstest.MapFS{
		"vocab.json":            {Data: data},
		"merges.txt":            {Data: []byte("#version: 0.2\n")},
		"tokenizer_config.json": {Data: []byte(`{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "additional_special_tokens": ["<|x|>"]}`)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// told returns the text of tokens, why the text ended, and how many tokens it used. Tokens 2 and that of "e" end it.
func told(tok *tokenizer.Tokenizer, special bool, stop []string, ids ...int) (text string, reason Reason, used int) {
	d := tok.NewDecoder()
	d.Special = special
	t := &Text{tokens: []int{0}, limit: 1 + len(ids), ends: []int{2, 4 + 'e'}, tokenizer: tok, decoder: d, special: special, stop: newStopper(stop)}
	t.more = sync.NewCond(&t.mu)
	used = t.take(ids...)
	t.end(Cancelled, nil)
	for _, token := range t.out {
		text += token.Text
	}
	return text, t.reason, used
}

// TestSpecialText: with Special a text has the names of special tokens and its end, incomplete characters do not swallow names, and
// texts of Stop are found in the text that is told.
func TestSpecialText(t *testing.T) {
	tok := byteTokenizer(t)
	const x, a, b, e1, e2 = 3, 4 + 'a', 4 + 'b', 4 + 0xc3, 4 + 0xa9 // é is e1, e2
	for _, c := range []struct {
		ids    []int
		stop   string
		text   string
		reason Reason
	}{
		{[]int{a, x, b}, "", "a<|x|>b", Length},
		{[]int{x}, "", "<|x|>", Length},
		{[]int{0, a, 1, 2, b}, "", "<s>a<pad></s>", End},
		{[]int{a, 4 + 'e', b}, "", "ae", End}, // an ordinary token
		{[]int{x, e1, e2, x}, "", "<|x|>é<|x|>", Length},
		{[]int{e1, x, e2}, "", "\uFFFD<|x|>\uFFFD", Length},
		{[]int{a, e1, 2}, "", "a\uFFFD</s>", End},
		{[]int{e1, x, e2, 2}, "\uFFFD</s>", "\uFFFD<|x|>", Stopped},
		{[]int{a, x, b}, "<|x|>", "a", Stopped},
		{[]int{a, x, b}, "a<|x|>b", "", Stopped},
		{[]int{a, x, b}, "x", "a<|", Stopped},
		{[]int{a, x, b}, "ab", "a<|x|>b", Length},
		{[]int{a, x, a, b}, "<|x|>b", "a<|x|>ab", Length},
		{[]int{a, 2}, "</s>", "a", Stopped},
		{[]int{a, b, 2}, "b</s>", "a", Stopped},
		{[]int{a, 2, b}, "</s>b", "a</s>", End},
	} {
		var stop []string
		if c.stop != "" {
			stop = []string{c.stop}
		}
		if text, reason, _ := told(tok, true, stop, c.ids...); text != c.text || reason != c.reason {
			t.Errorf("%v, stop %q: %q, %s, want %q, %s", c.ids, c.stop, text, reason, c.text, c.reason)
		}
	}
}

// TestSpecialTexts: without stop texts, Special changes neither tokens nor reason, and the text is that of the decoder. Stop texts cut
// that text where the first one is complete.
func TestSpecialTexts(t *testing.T) {
	tok := byteTokenizer(t)
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, 3), rapid.SampledFrom([]int{4 + 'a', 4 + '<', 4 + '|', 4 + 'x', 4 + 'e', 4 + 0xc3, 4 + 0xa9})), 1, 12).Draw(t, "ids")
		stop := rapid.StringOfN(rapid.RuneFrom([]rune("ax<|>é")), 1, 3, -1).Draw(t, "stop")
		_, reason, used := told(tok, false, nil, ids...)
		all, r, n := told(tok, true, nil, ids...)
		d := tok.NewDecoder()
		d.Special = true
		want := ""
		for _, id := range ids[:used] {
			want += d.Add(id)
		}
		if want += d.Flush(); all != want || r != reason || n != used || !utf8.ValidString(all) {
			t.Fatalf("%v: %q, %s after %d, want %q, %s after %d", ids, all, r, n, want, reason, used)
		}
		text, reason, _ := told(tok, true, []string{stop}, ids...)
		if before, _, found := strings.Cut(all, stop); text != before || found != (reason == Stopped) {
			t.Fatalf("%v, stop %q: %q, %s of %q", ids, stop, text, reason, all)
		}
	})
}

// TestSpecialShipped: the shipped model chooses the same tokens with Special. An engine without a tokenizer has no names.
func TestSpecialShipped(t *testing.T) {
	m := openCheckpoint(t, "../tiny")
	e := modelEngine(t, m, Options{Exact: true, Context: 64, Batch: 1})
	prompt := encode(t, m, "Once upon a time", false)
	first := alone(t, e, Request{Prompt: prompt, Tokens: 8, Ends: []int{}})
	for _, r := range []Request{{}, {Stop: []string{"</s>"}}, {Draft: 0, LogProbs: 1}} {
		r.Prompt, r.Tokens, r.Ends, r.Special = prompt, 8, []int{first[5]}, true
		text := start(t, e, r)
		var got []int
		all := ""
		for token, err := range text.Tokens() {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, token.ID)
			all += token.Text
		}
		if want := m.Tokenizer().Decode(first[:6]); !slices.Equal(got, first[:6]) || all != want || text.Reason() != End {
			t.Errorf("%v, %q, %s, want %v, %q", got, all, text.Reason(), first[:6], want)
		}
	}
	small := smallEngine(t, Options{})
	if _, err := small.Start(t.Context(), Request{Prompt: []int{1}, Special: true}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "Special is set, and the engine has no tokenizer") {
		t.Errorf("%v", err)
	}
}
