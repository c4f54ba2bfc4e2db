package tokenizer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// vocabulary is the tokens and merges of a tokenizer.
type vocabulary struct {
	ids          map[string]int
	tokens       map[int]string
	bytes        [256]int // the token of each byte; -1: none
	complete     bool     // every byte has a token
	merges       idPairs
	longest      int // characters of the longest token
	unk          int // unknown token; -1: none
	fuseUnk      bool
	ignoreMerges bool           // a word that is a token becomes the token without merging
	texts        map[int]string // texts of added tokens that are not in the model's vocabulary

	// Merges of GGUF files can have parts and results that are no tokens. Such phantom symbols have ids from phantom on.
	parts     map[int32][]int32 // tokens that spell a phantom symbol; -1: none
	phantoms  map[int32]string
	phantomID map[string]int32
}

// phantom is greater than every token id.
const phantom = math.MaxInt32 / 2

// addTokens resets v to the tokens of ids. v keeps ids.
func (v *vocabulary) addTokens(file string, ids map[string]int) error {
	*v = vocabulary{ids: ids, tokens: make(map[int]string, len(ids)), unk: -1, complete: true, longest: 1}
	if len(ids) == 0 {
		return fail(file, "no tokens")
	}
	for token, id := range ids {
		if id < 0 || id >= phantom {
			return fail(file, "token %s has id %d", quote(token), id)
		}
		if other, ok := v.tokens[id]; ok {
			return fail(file, "tokens %s and %s both have id %d", quote(min(token, other)), quote(max(token, other)), id)
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

// beyond reports whether id is an added token that is not in the model's vocabulary.
func (v *vocabulary) beyond(id int) bool {
	_, ok := v.texts[id]
	return ok
}

// addMerge adds the next merge. addMerge returns a description of the error, or "".
func (v *vocabulary) addMerge(left, right string) string {
	l, ok1 := v.ids[left]
	r, ok2 := v.ids[right]
	m, ok3 := v.ids[left+right]
	if !ok1 || !ok2 || !ok3 {
		return "does not merge two tokens of the vocabulary into a third"
	}
	return v.putMerge(int32(l), int32(r), int32(m))
}

func (v *vocabulary) putMerge(l, r, m int32) string {
	if !v.merges.add(l, r, merged{int32(v.merges.n), m}, max(v.merges.n, 1<<10)) {
		return "is there a second time"
	}
	return ""
}

// byteTokens returns the ids of the tokens <0x00> to <0xFF>, -1 for absent tokens, and the number of present tokens.
func (v *vocabulary) byteTokens() (all *[256]int32, n int) {
	all = new([256]int32)
	for b := range all {
		id, ok := v.ids[byteName(b)]
		if !ok {
			id = -1
		} else {
			n++
		}
		all[b] = int32(id)
	}
	return all, n
}

const hexDigits = "0123456789ABCDEF"

// byteName returns the spelling of a byte token in SentencePiece.
func byteName(b int) string { return "<0x" + hexDigits[b>>4:b>>4+1] + hexDigits[b&15:b&15+1] + ">" }

// whole returns the token that equals a word.
func (v *vocabulary) whole(word string) (id int, ok bool) {
	if len(word) > v.longest {
		return 0, false
	}
	var token strings.Builder
	for i := range len(word) {
		token.WriteRune(charOf[word[i]])
	}
	id, ok = v.ids[token.String()]
	return id, ok && !v.beyond(id)
}

// parsePair parses vocab.json and merges.txt.
func parsePair(vocabName string, vocab []byte, mergesName string, merges []byte, s settings) (*Tokenizer, error) {
	if !slices.Contains(pairClasses, s.class) {
		return nil, refuse(s.file, "tokenizer_class %s without tokenizer.json", quote(s.class))
	}
	t := &Tokenizer{}
	t.model = byteBPE{&t.vocabulary}
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
	t.words.gpt2 = true
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
		if t.bos < 0 {
			t.bos = id
		}
	}
	return t, nil
}
