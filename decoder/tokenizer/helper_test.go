package tokenizer

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"pgregory.net/rapid"
)

// fataler is the common interface of tests, fuzz targets and property tests.
type fataler interface{ Fatal(...any) }

// pairFiles returns vocab.json and merges.txt. The vocabulary has the special tokens,
// the bytes, and the results of the merges, in this order.
func pairFiles(t fataler, merges ...string) (vocab, lines string) {
	ids := map[string]int{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
	add := func(token string) {
		if _, ok := ids[token]; !ok {
			ids[token] = len(ids)
		}
	}
	for _, c := range charOf {
		add(string(c))
	}
	for _, m := range merges {
		add(strings.Replace(m, " ", "", 1))
	}
	var data strings.Builder
	enc := json.NewEncoder(&data)
	enc.SetEscapeHTML(false) // so that tests can find <s>
	if err := enc.Encode(ids); err != nil {
		t.Fatal(err)
	}
	return data.String(), "#version: 0.2\n" + strings.Join(merges, "\n") + "\n"
}

func small(t fataler, merges ...string) *Tokenizer {
	v, m := pairFiles(t, merges...)
	tok, err := New(strings.NewReader(v), strings.NewReader(m))
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// drawMerges draws merges as training produces them: each merges two existing
// tokens into a new token.
func drawMerges(t *rapid.T) []string {
	tokens := []string{"a", "b", "c", "Ġ", "Ã", "©", "'", "1"}
	have := map[string]bool{}
	var merges []string
	for range rapid.IntRange(0, 40).Draw(t, "merges") {
		left := rapid.SampledFrom(tokens).Draw(t, "left")
		right := rapid.SampledFrom(tokens).Draw(t, "right")
		if len(left)+len(right) < 40 && !have[left+right] {
			have[left+right] = true
			tokens = append(tokens, left+right)
			merges = append(merges, left+" "+right)
		}
	}
	return merges
}

// encodeNaively is GPT-2's own algorithm: find the pair of the lowest rank,
// merge all occurrences from left to right, and repeat.
func encodeNaively(tok *Tokenizer, word string) []int {
	var ids []int
	for i := range len(word) {
		ids = append(ids, int(tok.bytes[word[i]]))
	}
	for {
		best, found := merged{}, uint64(0)
		ok := false
		for i := 0; i+1 < len(ids); i++ {
			l, r := int32(ids[i]), int32(ids[i+1])
			if m, is := tok.merges.get(l, r); is && (!ok || m.rank < best.rank) {
				best, found, ok = m, pairKey(l, r), true
			}
		}
		if !ok {
			return ids
		}
		var next []int
		for i := 0; i < len(ids); i++ {
			if i+1 < len(ids) && pairKey(int32(ids[i]), int32(ids[i+1])) == found {
				next = append(next, int(best.id))
				i++
			} else {
				next = append(next, ids[i])
			}
		}
		ids = next
	}
}

func words(text string) []string {
	w := []string{}
	for text != "" {
		n := nextWord(text)
		if n < 1 || n > len(text) {
			panic(fmt.Sprintf("a word of %d bytes in a text of %d", n, len(text)))
		}
		w, text = append(w, text[:n]), text[n:]
	}
	return w
}

// encode calls Encode and ignores the error for a byte without a token.
func encode(tok *Tokenizer, text string, o Options) []int {
	ids, err := tok.Encode(text, o)
	if err != nil && !errors.Is(err, ErrNoToken) {
		panic(err)
	}
	return ids
}
