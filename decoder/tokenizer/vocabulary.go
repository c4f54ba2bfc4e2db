package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"strings"
	"unicode/utf8"
)

// vocabulary is the tokens and the merges.
type vocabulary struct {
	ids          map[string]int
	tokens       map[int]string
	bytes        [256]int // the token of each byte; -1: none
	complete     bool     // all have one
	merges       map[pair]merged
	longest      int // characters of the longest token
	unk          int // stands for bytes without a token; -1: none
	fuseUnk      bool
	ignoreMerges bool // a word that is a token is that token
}

type pair struct{ left, right int }

type merged struct{ rank, id int }

// addTokens takes over the tokens of a vocabulary.
func (v *vocabulary) addTokens(file string, ids map[string]int) error {
	*v = vocabulary{ids: ids, tokens: make(map[int]string, len(ids)), merges: map[pair]merged{}, unk: -1, complete: true, longest: 1}
	if len(ids) == 0 {
		return fail(file, "no tokens")
	}
	for token, id := range ids {
		if id < 0 || id >= math.MaxInt32 {
			return fail(file, "token %.60q has id %d", token, id)
		}
		if other, ok := v.tokens[id]; ok {
			return fail(file, "tokens %.60q and %.60q both have id %d", min(token, other), max(token, other), id)
		}
		v.tokens[id] = token
		v.longest = max(v.longest, utf8.RuneCountInString(token))
	}
	for b, c := range charOf {
		id, ok := ids[string(c)]
		if !ok {
			id, v.complete = -1, false
		}
		v.bytes[b] = id
	}
	return nil
}

// addMerge adds the next merge, and says what is wrong with it.
func (v *vocabulary) addMerge(left, right string) string {
	l, ok1 := v.ids[left]
	r, ok2 := v.ids[right]
	m, ok3 := v.ids[left+right]
	if !ok1 || !ok2 || !ok3 {
		return "does not merge two tokens of the vocabulary into a third"
	}
	if _, ok := v.merges[pair{l, r}]; ok {
		return "is there a second time"
	}
	v.merges[pair{l, r}] = merged{len(v.merges), m}
	return ""
}

// whole returns the token that is a whole word.
func (v *vocabulary) whole(word string) (id int, ok bool) {
	if len(word) > v.longest {
		return 0, false
	}
	var token strings.Builder
	for i := range len(word) {
		token.WriteRune(charOf[word[i]])
	}
	id, ok = v.ids[token.String()]
	return id, ok
}

// parsePair reads vocab.json and merges.txt.
func parsePair(vocabName string, vocab []byte, mergesName string, merges []byte, s settings) (*Tokenizer, error) {
	t := &Tokenizer{}
	var ids map[string]int
	if err := cmp.Or(vocabLimits.Check(vocab), json.Unmarshal(vocab, &ids)); err != nil {
		return nil, fail(vocabName, "not a JSON object of tokens and ids: %v", err)
	}
	if err := t.addTokens(vocabName, ids); err != nil {
		return nil, err
	}
	number := 0
	for line := range bytes.SplitSeq(merges, []byte("\n")) {
		number++
		text := strings.TrimSuffix(string(line), "\r")
		if text == "" || strings.HasPrefix(text, "#version") {
			continue
		}
		left, right, _ := strings.Cut(text, " ")
		if wrong := t.addMerge(left, right); wrong != "" {
			return nil, fail(mergesName, "line %d: %.120q %s", number, text, wrong)
		}
	}
	if err := t.finish(vocabName, nil, s); err != nil {
		return nil, err
	}
	if s.prefixSpace != nil {
		t.words.prefixSpace = *s.prefixSpace
	}
	if s.addEOS {
		return nil, refuse(s.file, "add_eos_token is true, which versions of transformers take differently")
	}
	first, ok := endOfText, true
	if s.file != "" {
		first, ok = s.bos(), s.addBOS
	}
	if ok {
		id, known := t.ids[first]
		if !known {
			return nil, fail(vocabName, "no token %q, which begins every text", first)
		}
		t.before = []int{id}
	}
	return t, nil
}
