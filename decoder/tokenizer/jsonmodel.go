package tokenizer

import (
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The models of tokenizer.json.

type bpeJSON struct {
	Type         string          `json:"type"`
	Dropout      *float64        `json:"dropout"`
	Unk          *string         `json:"unk_token"`
	Prefix       *string         `json:"continuing_subword_prefix"`
	Suffix       *string         `json:"end_of_word_suffix"`
	FuseUnk      bool            `json:"fuse_unk"`
	ByteFallback bool            `json:"byte_fallback"`
	IgnoreMerges bool            `json:"ignore_merges"`
	Vocab        json.RawMessage `json:"vocab"`
	Merges       json.RawMessage `json:"merges"`
}

// mergeJSON is a merge, written as "a b" in old files and as ["a", "b"] in new files.
type mergeJSON struct{ left, right string }

// parseMerges parses a list of merges, which must be valid JSON. For half a million merges, encoding/json takes ten times
// as long.
func parseMerges(data []byte) ([]mergeJSON, error) {
	at := 0
	next := func() byte { // returns the next character that is no white space or comma; 0: the end
		for at < len(data) && strings.IndexByte(" \t\r\n,", data[at]) >= 0 {
			at++
		}
		if at == len(data) {
			return 0
		}
		return data[at]
	}
	text := func() (string, error) {
		begin, plain := at, true
		for at++; at < len(data) && data[at] != '"'; at++ {
			if data[at] == '\\' {
				plain = false
				at++
			}
		}
		at++
		if raw := data[begin:min(at, len(data))]; !plain || !utf8.Valid(raw) {
			var s string
			err := json.Unmarshal(raw, &s)
			return s, err
		}
		return string(data[begin+1 : at-1]), nil
	}
	if next() != '[' {
		return nil, constError("merges that are no list")
	}
	at++
	var all []mergeJSON
	for {
		begin := at
		wrong := func() error { return constError("a merge of " + quote(string(data[begin:min(len(data), begin+80)]))) }
		var m mergeJSON
		var err error
		switch next() {
		case ']':
			return all, nil
		case '"':
			var s string
			if s, err = text(); err != nil {
				return nil, err
			}
			var ok bool
			if m.left, m.right, ok = strings.Cut(s, " "); !ok || strings.Contains(m.right, " ") {
				return nil, wrong()
			}
		case '[':
			at++
			for _, s := range []*string{&m.left, &m.right} {
				if next() != '"' {
					return nil, wrong()
				}
				if *s, err = text(); err != nil {
					return nil, err
				}
			}
			if next() != ']' {
				return nil, wrong()
			}
			at++
		default:
			return nil, wrong()
		}
		all = append(all, m)
	}
}

// readModel reads the model of tokenizer.json: the vocabulary and the merges or scores.
func (t *Tokenizer) readModel(file string, raw json.RawMessage) error {
	p, err := parsePart(file, "model", raw)
	if err != nil {
		return err
	}
	switch p.Type {
	case "", "BPE": // files of old versions have no type
		return t.readBPE(file, raw)
	case "Unigram":
		return t.readUnigram(file, raw)
	}
	return refuse(file, "a model %s, neither BPE nor Unigram", quote(p.Type))
}

func (t *Tokenizer) readBPE(file string, raw json.RawMessage) error {
	var m bpeJSON
	if err := strict(raw, tokenizerLimits, &m); err != nil {
		return fail(file, "model: %v", err)
	}
	switch {
	case m.Dropout != nil && *m.Dropout != 0:
		return refuse(file, "model: dropout %v, which makes tokens random", *m.Dropout)
	case m.Prefix != nil && *m.Prefix != "":
		return refuse(file, "model: continuing_subword_prefix %s", quote(*m.Prefix))
	case m.Suffix != nil && *m.Suffix != "":
		return refuse(file, "model: end_of_word_suffix %s", quote(*m.Suffix))
	case null(m.Vocab):
		return fail(file, "model: no vocab")
	case null(m.Merges):
		return fail(file, "model: no merges")
	}
	var vocab map[string]int
	if err := cmp.Or(vocabLimits.Check(m.Vocab), json.Unmarshal(m.Vocab, &vocab)); err != nil {
		return fail(file, "model: vocab: %v", err)
	}
	if err := vocabLimits.Check(m.Merges); err != nil {
		return fail(file, "model: merges: %v", err)
	}
	merges, err := parseMerges(m.Merges)
	if err != nil {
		return fail(file, "model: merges: %v", err)
	}
	if err := t.addTokens(file, vocab); err != nil {
		return err
	}
	for i, merge := range merges {
		if wrong := t.addMerge(merge.left, merge.right); wrong != "" {
			return fail(file, "merge %d, of %.60q and %.60q, %s", i, merge.left, merge.right, wrong)
		}
	}
	t.fuseUnk, t.ignoreMerges = m.FuseUnk, m.IgnoreMerges
	if m.Unk != nil {
		if id, ok := t.ids[*m.Unk]; ok {
			t.unk = id
		}
	}
	// For a ByteLevel pre-tokenizer, toBytes replaces the model with a byteBPE.
	chars := charBPE{vocabulary: &t.vocabulary}
	if m.ByteFallback {
		chars.byteTokens, _ = t.byteTokens()
	}
	t.model = chars
	if m.Unk != nil && t.unk < 0 && !t.complete {
		return fail(file, "model: unk_token %s is not in the vocabulary", quote(*m.Unk))
	}
	return nil
}

// toBytes replaces a charBPE of tokenizer.json with a byteBPE.
func (t *Tokenizer) toBytes(file string) error {
	chars, ok := t.model.(charBPE)
	if !ok {
		return refuse(file, "pre_tokenizer: ByteLevel with a model that is no BPE")
	}
	if chars.byteTokens != nil && !t.complete {
		return refuse(file, "model: byte_fallback with a vocabulary that lacks bytes")
	}
	t.model = byteBPE{&t.vocabulary}
	return nil
}

// pieceJSON is a token and its score.
type pieceJSON struct {
	text  string
	score float64
}

func (p *pieceJSON) UnmarshalJSON(data []byte) error {
	var two []json.RawMessage
	if err := json.Unmarshal(data, &two); err != nil {
		return err
	}
	if len(two) != 2 {
		return constError("a token of " + quote(string(data)))
	}
	var number json.Number
	if err := cmp.Or(json.Unmarshal(two[0], &p.text), json.Unmarshal(two[1], &number)); err != nil {
		return err
	}
	var err error
	p.score, err = rustFloat(string(number))
	return err
}

// rustFloat parses a JSON number as Rust's serde_json does. Hugging Face's tokenizers reads scores with serde_json.
//
// serde_json accumulates the digits that fit in a uint64, and then multiplies or divides once by a power of ten. The result
// can differ from the nearest float64 in the last bit. The last bit decides between segmentations with nearly equal sums.
func rustFloat(text string) (float64, error) {
	if _, err := strconv.ParseFloat(text, 64); err != nil {
		return 0, err
	}
	rest, negative := strings.CutPrefix(text, "-")
	mantissa, exponentText, _ := strings.Cut(strings.ToLower(rest), "e")
	whole, fraction, _ := strings.Cut(mantissa, ".")
	significand, exponent, full := uint64(0), 0, false
	for i, c := range []byte(whole + fraction) {
		digit := uint64(c - '0')
		full = full || significand > (math.MaxUint64-digit)/10
		switch {
		case !full:
			significand = significand*10 + digit
			if i >= len(whole) {
				exponent--
			}
		case i < len(whole):
			exponent++
		}
	}
	if exponentText != "" {
		e, err := strconv.Atoi(exponentText)
		if err != nil {
			return 0, err
		}
		exponent += e
	}
	f := float64(significand)
	for f != 0 && exponent < -308 {
		f /= 1e308
		exponent += 308
	}
	switch {
	case f == 0:
	case exponent < 0:
		f /= math.Pow10(-exponent)
	default:
		f *= math.Pow10(exponent)
	}
	if negative {
		f = -f
	}
	return f, nil
}

func (t *Tokenizer) readUnigram(file string, raw json.RawMessage) error {
	var m struct {
		Type         string          `json:"type"`
		Unk          *int            `json:"unk_id"`
		Vocab        json.RawMessage `json:"vocab"`
		ByteFallback bool            `json:"byte_fallback"`
	}
	if err := strict(raw, tokenizerLimits, &m); err != nil {
		return fail(file, "model: %v", err)
	}
	if null(m.Vocab) {
		return fail(file, "model: no vocab")
	}
	var vocab []pieceJSON
	if err := cmp.Or(unigramLimits.Check(m.Vocab), json.Unmarshal(m.Vocab, &vocab)); err != nil {
		return fail(file, "model: vocab: %v", err)
	}
	ids := make(map[string]int, len(vocab))
	u := &unigram{scores: make([]float64, len(vocab)), unk: -1}
	keys := make([]trieKey, 0, len(vocab))
	for id, p := range vocab {
		if other, ok := ids[p.text]; ok {
			return fail(file, "model: token %s has ids %d and %d", quote(p.text), other, id)
		}
		if p.text == "" || math.IsInf(p.score, 0) {
			return fail(file, "model: token %d is %s with score %v", id, quote(p.text), p.score)
		}
		ids[p.text], u.scores[id] = id, p.score
		keys = append(keys, trieKey{p.text, int32(id)})
	}
	if err := t.addTokens(file, ids); err != nil {
		return err
	}
	if m.Unk != nil {
		if *m.Unk < 0 || *m.Unk >= len(vocab) {
			return fail(file, "model: unk_id is %d, and there are %d tokens", *m.Unk, len(vocab))
		}
		u.unk = *m.Unk
		t.unk = u.unk
	}
	var err error
	if u.tokens, err = newTokenTrie(file, keys); err != nil {
		return err
	}
	u.unkScore, u.names = lowest(u.scores), maps.Clone(ids)
	if m.ByteFallback {
		all, n := t.byteTokens()
		switch {
		case n == 256:
			u.byteTokens = all
		case n > 0:
			return refuse(file, "model: byte_fallback with a vocabulary that lacks %d bytes", 256-n)
		}
	}
	t.model = u
	return nil
}
