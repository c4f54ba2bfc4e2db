package tokenizer

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Types of SentencePiece's pieces and of GGUF's tokens.
const (
	typeNormal      = 1
	typeUnknown     = 2
	typeControl     = 3
	typeUserDefined = 4
	typeUnused      = 5
	typeByte        = 6
)

// pieceBPE is SentencePiece's BPE. A pair can be merged if the text of the pair is a token. The pair whose token has the
// highest score is merged first.
type pieceBPE struct {
	textPairs
	ids        map[string]int // ids of all tokens
	unk        int            // -1: none
	byteTokens *[256]int32    // byte tokens, -1 for absent ones; nil: a symbol without a token becomes unk
	whole      *trie          // user-defined tokens, which are initial symbols and are not merged; nil: none
	unused     map[int]bool   // tokens that are split again after merging; nil: none
}

// scoredPairs returns the pairs of tokens, ranked by descending score. scoredPairs sorts tokens.
func scoredPairs(tokens []scored) textPairs {
	slices.SortFunc(tokens, func(a, b scored) int { return cmp.Compare(b.score, a.score) })
	p := textPairs{tokens: make(map[string]merged, len(tokens))}
	rank := int32(0)
	for i, t := range tokens {
		if i > 0 && t.score != tokens[i-1].score {
			rank++
		}
		p.tokens[t.text] = merged{rank, t.id}
		p.longest = max(p.longest, len(t.text))
	}
	return p
}

type scored struct {
	text  string
	id    int32
	score float32
}

func (b *pieceBPE) encode(e *encoder, word string) bool {
	e.reset(utf8.RuneCountInString(word))
	for at := 0; at < len(word); {
		if b.whole != nil {
			if _, n := b.whole.longest(word[at:]); n > 0 {
				e.push(frozen, at, at+n)
				at += n
				continue
			}
		}
		_, size := utf8.DecodeRuneInString(word[at:])
		e.push(none32, at, at+size)
		at += size
	}
	var apart map[string]int // for the text of an unused token, the length of the left part
	if b.unused != nil {
		apart = map[string]int{}
		e.merge(word, &recorder{b, apart})
	} else {
		e.merge(word, &b.textPairs)
	}
	unknown := false // the previous symbol was unknown
	for i := int32(0); i < int32(len(e.symbols)); i = e.symbols[i].next {
		unknown = b.emit(e, word[e.symbols[i].begin:e.symbols[i].end], apart, unknown)
	}
	return e.add()
}

// recorder is a pairs that records the parts of unused tokens.
type recorder struct {
	*pieceBPE
	apart map[string]int
}

func (r *recorder) pair(word string, left, right *symbol) (merged, bool) {
	m, ok := r.textPairs.pair(word, left, right)
	if ok && r.unused[int(m.id)] {
		r.apart[word[left.begin:right.end]] = int(left.end - left.begin)
	}
	return m, ok
}

// emit appends the tokens of a symbol, and reports whether the symbol is unknown.
func (b *pieceBPE) emit(e *encoder, text string, apart map[string]int, unknown bool) bool {
	id, ok := b.ids[text]
	if n, has := apart[text]; ok && has && b.unused[id] {
		unknown = b.emit(e, text[:n], apart, unknown)
		return b.emit(e, text[n:], apart, unknown)
	}
	switch {
	case ok && id != b.unk:
		e.ids = append(e.ids, id)
		return false
	case b.byteTokens != nil:
		for i := range len(text) {
			if id := b.byteTokens[text[i]]; id >= 0 {
				e.ids = append(e.ids, int(id))
			} else {
				e.lost = text
			}
		}
	case b.unk < 0:
		e.lost = text
	case !unknown:
		e.ids = append(e.ids, b.unk)
	}
	return true
}

// spaceRules is the configuration of SentencePiece's normalizer.
type spaceRules struct {
	chars       *charsmap // nil: none
	whole       *trie     // user-defined tokens, which are not normalized; nil: none
	prefix      bool      // add a space before the text (add_dummy_prefix)
	suffix      bool      // add the space after the text instead (treat_whitespace_as_suffix)
	removeExtra bool      // remove spaces at both ends, and all but one of consecutive spaces
	escape      bool      // replace spaces with underline
}

// normalize is SentencePiece's normalizer.
func (r *spaceRules) normalize(text string) string {
	space := " "
	if r.escape {
		space = underline
	}
	at := 0
	if r.removeExtra {
		for at < len(text) {
			by, n := r.next(text[at:])
			if by != " " {
				break
			}
			at += n
		}
	}
	if at == len(text) {
		return ""
	}
	var b strings.Builder
	b.Grow(len(text) + len(text)/4 + 8)
	if r.prefix && !r.suffix {
		b.WriteString(space)
	}
	after := r.removeExtra // the previous character was a space, and further spaces are removed
	for at < len(text) {
		by, n := r.next(text[at:])
		at += n
		for after && strings.HasPrefix(by, " ") {
			by = by[1:]
		}
		if by != "" {
			if r.escape && strings.Contains(by, " ") {
				b.WriteString(strings.ReplaceAll(by, " ", underline))
			} else {
				b.WriteString(by)
			}
			after = strings.HasSuffix(by, " ")
		}
		after = after && r.removeExtra
	}
	result := b.String()
	if r.removeExtra {
		for strings.HasSuffix(result, space) {
			result = strings.TrimSuffix(result, space)
		}
	}
	if r.prefix && r.suffix {
		result += space
	}
	return result
}

// next returns the replacement by of the first n bytes of a text.
func (r *spaceRules) next(text string) (by string, n int) {
	if r.whole != nil {
		if _, n := r.whole.longest(text); n > 0 {
			return text[:n], n
		}
	}
	if r.chars != nil {
		if by, n := r.chars.prefix(text, false); n > 0 {
			return string(by), n
		}
	}
	c, size := utf8.DecodeRuneInString(text)
	if c == utf8.RuneError && size == 1 {
		return string(utf8.RuneError), 1
	}
	return text[:size], size
}

// float64s converts scores to float64.
func float64s(scores []float32) []float64 {
	wide := make([]float64, len(scores))
	for i, s := range scores {
		wide[i] = float64(s)
	}
	return wide
}

func finite(scores []float32) bool {
	return !slices.ContainsFunc(scores, func(s float32) bool { return math.IsNaN(float64(s)) || math.IsInf(float64(s), 0) })
}
