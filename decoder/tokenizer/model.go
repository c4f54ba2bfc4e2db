package tokenizer

import (
	"bytes"
	"math"
	"slices"
)

// pieces is the content of a SentencePiece file.
type pieces struct {
	texts  []string
	scores []float32
	types  []int32

	unigram      bool
	byteFallback bool
	bos, eos     int // -1: none
	unkText      string
	spaces       spaceRules
	charsmap     []byte
	denormalizes bool
	unknown      string // unsupported feature; empty: none
}

// parsePieces parses a SentencePiece file, which is a ModelProto. The field numbers are those of sentencepiece_model.proto.
func parsePieces(data []byte) (*pieces, error) {
	p := &pieces{bos: 1, eos: 2, unkText: " ⁇ ", unigram: true, spaces: spaceRules{prefix: true, removeExtra: true, escape: true}}
	err := protobuf(data).each(func(f field) error {
		switch f.number {
		case 1:
			return p.piece(f.data)
		case 2:
			return f.data.each(p.trainer)
		case 3:
			return f.data.each(p.normalizer)
		case 5:
			return f.data.each(func(f field) error {
				p.denormalizes = p.denormalizes || f.number == 2 && len(f.data) > 0
				return nil
			})
		}
		return nil // self tests and extensions
	})
	return p, err
}

func (p *pieces) piece(data protobuf) error {
	text, score, kind := "", float32(0), int32(typeNormal)
	err := data.each(func(f field) error {
		switch f.number {
		case 1:
			text = string(f.data)
		case 2:
			score = f.float()
		case 3:
			kind = int32(f.int())
		}
		return nil
	})
	p.texts, p.scores, p.types = append(p.texts, text), append(p.scores, score), append(p.types, kind)
	return err
}

func (p *pieces) trainer(f field) error {
	switch f.number {
	case 3:
		switch f.int() {
		case 1:
			p.unigram = true
		case 2:
			p.unigram = false
		default:
			p.unknown = "a model_type of words or characters"
		}
	case 24:
		p.spaces.suffix = f.bool()
	case 35:
		p.byteFallback = f.bool()
	case 41:
		p.bos = f.int()
	case 42:
		p.eos = f.int()
	case 44:
		p.unkText = string(f.data)
	}
	return nil
}

func (p *pieces) normalizer(f field) error {
	switch f.number {
	case 2:
		p.charsmap = f.data
	case 3:
		p.spaces.prefix = f.bool()
	case 4:
		p.spaces.removeExtra = f.bool()
	case 5:
		p.spaces.escape = f.bool()
	}
	return nil
}

// modelClasses are the tokenizer classes that use tokenizer.model unchanged. The value is the default of add_bos_token.
var modelClasses = map[string]bool{
	"LlamaTokenizer": true, "LlamaTokenizerFast": true, "CodeLlamaTokenizer": true, "CodeLlamaTokenizerFast": true, "GemmaTokenizer": true, "GemmaTokenizerFast": true,
}

// parseModel parses tokenizer.model of SentencePiece. The first setting that is present decides whether a text begins with
// BOS:
//
//   - add_bos_token of tokenizer_config.json
//   - the default of tokenizer_class (modelClasses)
//   - the type of the model: BPE begins with BOS, as in Llama and Mistral, and Unigram does not
func parseModel(file string, data []byte, s settings) (*Tokenizer, error) {
	if bytes.IndexByte(data[:min(len(data), 64)], '\n') < 0 || data[0] != '\n' {
		return nil, refuse(file, "no file of SentencePiece, but maybe one of tiktoken")
	}
	p, err := parsePieces(data)
	if err != nil {
		return nil, fail(file, "%v", err)
	}
	bos, known := modelClasses[s.class]
	if s.class == "" {
		bos, known = !p.unigram, true
	}
	switch {
	case !known:
		return nil, refuse(s.file, "tokenizer_class %s without tokenizer.json", quote(s.class))
	case s.saysBOS:
		bos = s.addBOS
	}
	t, err := p.tokenizer(file)
	if err != nil {
		return nil, err
	}
	if err := t.addTo(file, s); err != nil {
		return nil, err
	}
	if bos {
		if t.bos < 0 {
			return nil, fail(file, "no BOS, which is to be before a text")
		}
		t.before = []int{t.bos}
	}
	if s.addEOS {
		if t.eos < 0 {
			return nil, fail(file, "no EOS, which is to be behind a text")
		}
		t.after = []int{t.eos}
	}
	return t, nil
}

// addTo adds the added and special tokens of the settings.
func (t *Tokenizer) addTo(file string, s settings) error {
	control := t.added[0].tokens
	seen := map[string]bool{}
	for _, a := range control {
		seen[a.Content] = true
	}
	next := t.size
	for _, a := range append(slices.Clone(s.added), s.specials()...) {
		if seen[a.Content] || a.Content == "" {
			continue
		}
		id, ok := t.ids[a.Content]
		if !ok {
			id = next
		}
		if a.ID >= 0 && a.ID != id {
			return fail(s.file, "added token %s has id %d, and %s gives it %d", quote(a.Content), a.ID, file, id)
		}
		seen[a.Content] = true
		t.ids[a.Content], t.tokens[id] = id, a.Content
		t.spelling.literal[id] = true
		if next = max(next, id+1); a.Special {
			t.special[id] = true
		}
		a.ID = id
		control = append(control, a)
	}
	t.size = next
	t.added[0] = newMatcher(control)
	if a, ok := s.named["bos_token"]; ok {
		t.bos = t.ids[a.Content] // specials includes the token
	}
	if a, ok := s.named["eos_token"]; ok {
		t.eos = t.ids[a.Content]
	}
	return nil
}

// tokenizer returns a tokenizer for the pieces.
func (p *pieces) tokenizer(file string) (*Tokenizer, error) {
	switch {
	case p.unknown != "":
		return nil, refuse(file, "%s", p.unknown)
	case p.denormalizes:
		return nil, refuse(file, "a denormalizer")
	case len(p.texts) == 0:
		return nil, fail(file, "no tokens")
	case !finite(p.scores):
		return nil, fail(file, "a score that is no number")
	}
	t := &Tokenizer{vocabulary: vocabulary{ids: make(map[string]int, len(p.texts)), tokens: make(map[int]string, len(p.texts)), unk: -1}}
	t.special, t.size, t.bos, t.eos = map[int]bool{}, len(p.texts), -1, -1
	t.spelling = spelling{
		kind: spellPieces, bytes: map[int]byte{}, unkText: p.unkText, literal: map[int]bool{},
		firstSpace: p.spaces.prefix || p.spaces.removeExtra, firstSpaces: p.spaces.removeExtra,
	}
	var byteTokens [256]int32
	nBytes := 0
	var control []addedToken
	var keys, whole []trieKey
	var inModel []scored
	unused := map[int]bool{}
	low := float32(math.Inf(1))
	for id, text := range p.texts {
		if other, ok := t.ids[text]; ok || text == "" {
			return nil, fail(file, "token %d is %s, and so is token %d", id, quote(text), other)
		}
		t.ids[text], t.tokens[id] = id, text
		switch p.types[id] {
		case typeNormal, typeUserDefined, typeUnused:
			keys = append(keys, trieKey{text, int32(id)})
			inModel = append(inModel, scored{text, int32(id), p.scores[id]})
			if p.types[id] == typeUnused {
				unused[id] = true
				keys = keys[:len(keys)-1]
			}
			if p.types[id] == typeUserDefined {
				whole = append(whole, trieKey{text, int32(id)})
			}
			if p.types[id] == typeNormal {
				low = min(low, p.scores[id])
			}
		case typeUnknown:
			if t.unk >= 0 {
				return nil, fail(file, "tokens %d and %d are both the unknown one", t.unk, id)
			}
			t.unk = id
		case typeControl:
			if err := checkContent(file, text); err != nil {
				return nil, err
			}
			t.special[id] = true
			t.spelling.literal[id] = true
			control = append(control, addedToken{ID: id, Content: text, Special: true})
		case typeByte:
			b, ok := byteToken(text)
			if !ok {
				return nil, fail(file, "token %d is %s, which is no byte", id, quote(text))
			}
			byteTokens[b] = int32(id)
			t.spelling.bytes[id] = b
			nBytes++
		default:
			return nil, refuse(file, "token %d, %s, is of type %d", id, quote(text), p.types[id])
		}
	}
	if t.unk < 0 {
		return nil, fail(file, "no unknown token")
	}
	if p.byteFallback && nBytes != 256 {
		return nil, fail(file, "byte_fallback with %d tokens for bytes", nBytes)
	}
	chars, err := parseCharsmap(p.charsmap)
	if err != nil {
		return nil, fail(file, "%v", err)
	}
	p.spaces.chars = chars
	if len(whole) > 0 {
		if p.spaces.whole, err = newTokenTrie(file, whole); err != nil {
			return nil, err
		}
	}
	t.normal = always(p.spaces.normalize)
	bytes := &byteTokens
	if !p.byteFallback {
		bytes = nil
	}
	if p.unigram {
		tokens, err := newTokenTrie(file, keys)
		if err != nil {
			return nil, err
		}
		u := &unigram{tokens: tokens, scores: float64s(p.scores), unk: t.unk, byteTokens: bytes, single: true}
		u.unkScore = float64(low - unkPenalty)
		for id, kind := range p.types {
			if kind == typeUserDefined {
				u.scores[id] = float64(float32(0.1 * float64(len(p.texts[id])-1))) // as in SentencePiece since 0.2.2
			}
		}
		t.model = u
	} else {
		b := &pieceBPE{textPairs: scoredPairs(inModel), ids: t.ids, unk: t.unk, byteTokens: bytes, whole: p.spaces.whole}
		if len(unused) > 0 {
			b.unused = unused
		}
		t.model = b
	}
	t.added = [2]*matcher{newMatcher(control), newMatcher(nil)}
	if p.bos >= 0 && p.bos < t.size {
		t.bos = p.bos
	}
	if p.eos >= 0 && p.eos < t.size {
		t.eos = p.eos
	}
	return t, nil
}
