// Package bpe is the byte-level byte-pair encoding of GPT-2 and OPT, read from
// vocab.json and merges.txt as Hugging Face folders have them.
//
// A text is cut into words (nextWord), each word into its bytes, and
// neighbouring symbols of a word are merged, the pair that stands first in
// merges.txt first, until no more pair is in it. Every byte has a token, so
// every text can be encoded, and decoding gives the same bytes back.
//
// OPT begins every text with </s>, and Encode does so. A text that contains the
// name of a special token, say "</s>", is encoded letter by letter: a prompt
// cannot smuggle in an end of text. transformers would make it the token.
package bpe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// ErrFormat is wrapped by the errors of vocabularies and merges that contradict
// themselves, each other or their format.
var ErrFormat = errors.New("malformed file")

// endOfText is OPT's first token of every text, and its last.
const endOfText = "</s>"

var special = map[string]bool{"<s>": true, "<pad>": true, endOfText: true, "<unk>": true, "<mask>": true}

// Tokenizer turns texts into ids and back. It may be used by several goroutines.
type Tokenizer struct {
	ids    map[string]int
	tokens map[int]string
	bytes  [256]int // the token of each byte
	merges map[pair]merged
	eos    int
	size   int
}

type pair struct{ left, right int }

type merged struct{ rank, id int }

// Load reads vocab.json and merges.txt of a folder.
func Load(dir string) (*Tokenizer, error) {
	var files [2][]byte
	for i, name := range [...]string{"vocab.json", "merges.txt"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, fmt.Errorf("bpe: %w", err)
		}
		files[i] = data
	}
	return parse(filepath.Join(dir, "vocab.json"), files[0], filepath.Join(dir, "merges.txt"), files[1])
}

// New reads a vocabulary, a JSON object of tokens and ids, and merges, a line
// for each with two tokens and a space between them.
func New(vocab, merges io.Reader) (*Tokenizer, error) {
	v, err := io.ReadAll(vocab)
	if err != nil {
		return nil, fmt.Errorf("bpe: vocabulary: %w", err)
	}
	m, err := io.ReadAll(merges)
	if err != nil {
		return nil, fmt.Errorf("bpe: merges: %w", err)
	}
	return parse("vocabulary", v, "merges", m)
}

func parse(vocabName string, vocab []byte, mergesName string, merges []byte) (*Tokenizer, error) {
	t := &Tokenizer{tokens: map[int]string{}, merges: map[pair]merged{}}
	if err := json.Unmarshal(vocab, &t.ids); err != nil {
		return nil, fail(vocabName, "not a JSON object of tokens and ids: %v", err)
	}
	for token, id := range t.ids {
		if id < 0 || id > math.MaxInt32 {
			return nil, fail(vocabName, "token %.60q has id %d", token, id)
		}
		if other, ok := t.tokens[id]; ok {
			return nil, fail(vocabName, "tokens %.60q and %.60q both have id %d", min(token, other), max(token, other), id)
		}
		t.tokens[id] = token
		t.size = max(t.size, id+1)
	}
	for b, c := range charOf {
		id, ok := t.ids[string(c)]
		if !ok {
			return nil, fail(vocabName, "no token %q for byte 0x%02x", c, b)
		}
		t.bytes[b] = id
	}
	var ok bool
	if t.eos, ok = t.ids[endOfText]; !ok {
		return nil, fail(vocabName, "no token %q", endOfText)
	}

	for number, line := range bytes.Split(merges, []byte("\n")) {
		text := strings.TrimSuffix(string(line), "\r")
		if text == "" || strings.HasPrefix(text, "#version") {
			continue
		}
		left, right, _ := strings.Cut(text, " ")
		l, ok1 := t.ids[left]
		r, ok2 := t.ids[right]
		m, ok3 := t.ids[left+right]
		if !ok1 || !ok2 || !ok3 {
			return nil, fail(mergesName, "line %d: %.120q does not merge two tokens of the vocabulary into a third", number+1, text)
		}
		if _, ok := t.merges[pair{l, r}]; ok {
			return nil, fail(mergesName, "line %d: %.120q is there a second time", number+1, text)
		}
		t.merges[pair{l, r}] = merged{len(t.merges), m}
	}
	return t, nil
}

func fail(file, format string, args ...any) error {
	return fmt.Errorf("bpe: %s: %s: %w", file, fmt.Sprintf(format, args...), ErrFormat)
}

// Encode returns </s> and then the ids of the text.
func (t *Tokenizer) Encode(text string) []int {
	return t.encode([]int{t.eos}, text)
}

// EncodeText returns the ids of the text alone, for one that continues another.
func (t *Tokenizer) EncodeText(text string) []int {
	return t.encode([]int{}, text)
}

func (t *Tokenizer) encode(ids []int, text string) []int {
	e := encoder{t: t, ids: ids, words: map[string][]int{}}
	for text != "" {
		n := nextWord(text)
		e.word(text[:n])
		text = text[n:]
	}
	return e.ids
}

// VocabSize returns one more than the highest id.
func (t *Tokenizer) VocabSize() int { return t.size }

// ID returns the id of a token as vocab.json spells it.
func (t *Tokenizer) ID(token string) (id int, ok bool) {
	id, ok = t.ids[token]
	return id, ok
}

// Token returns the token of an id as vocab.json spells it.
func (t *Tokenizer) Token(id int) (token string, ok bool) {
	token, ok = t.tokens[id]
	return token, ok
}

// EOS returns the id of </s>, which begins and ends a text.
func (t *Tokenizer) EOS() int { return t.eos }
