package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is an added token. A text is split at added tokens before the pre-tokenizer splits the text into words.
type addedToken struct {
	ID         int    `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"` // not next to a letter, digit or _
	LStrip     bool   `json:"lstrip"`      // absorbs the white space before the token
	RStrip     bool   `json:"rstrip"`      // absorbs the white space after the token
	Normalized bool   `json:"normalized"`  // matched in the normalized text between the other added tokens
	Special    bool   `json:"special"`
}

// maxContent is the maximum length of an added token in bytes. Published added tokens have about ten bytes. The search
// takes up to one step for each byte of a token, at each byte of a text.
const maxContent = 1024

// matcher finds added tokens in a text: the leftmost match, and the longest of the matches at one position.
type matcher struct {
	tokens []addedToken // sorted by content
	first  [257]int     // index of the first token with each first byte
}

func newMatcher(tokens []addedToken) *matcher {
	m := &matcher{tokens: slices.Clone(tokens)}
	slices.SortFunc(m.tokens, func(a, b addedToken) int { return strings.Compare(a.Content, b.Content) })
	for _, t := range m.tokens {
		m.first[int(t.Content[0])+1]++
	}
	for i := range 256 {
		m.first[i+1] += m.first[i]
	}
	return m
}

// next returns the first token at or after from, and its position.
func (m *matcher) next(text string, from int) (start int, found *addedToken) {
	for start = from; start < len(text); start++ {
		lo, hi := m.first[text[start]], m.first[int(text[start])+1]
		for n := 1; lo < hi; n++ {
			// All tokens in [lo, hi) begin with the n bytes at start. A token of n bytes is the first token in the range.
			if len(m.tokens[lo].Content) == n {
				found = &m.tokens[lo]
				lo++
			}
			if start+n == len(text) {
				break
			}
			c := text[start+n]
			part := m.tokens[lo:hi]
			begin, _ := slices.BinarySearchFunc(part, int(c), func(t addedToken, c int) int { return int(t.Content[n]) - c })
			end, _ := slices.BinarySearchFunc(part, int(c)+1, func(t addedToken, c int) int { return int(t.Content[n]) - c })
			lo, hi = lo+begin, lo+end
		}
		if found != nil {
			return start, found
		}
	}
	return start, nil
}

// split splits a text at added tokens. split yields each token (with an empty text) and the text between tokens (with a nil
// token), until yield returns false. With spell, special tokens count as ordinary text.
//
// The result is that of AddedVocabulary of Hugging Face's tokenizers, even for a token that begins in the white space that
// the previous token absorbed.
func (m *matcher) split(text string, spell bool, yield func(*addedToken, string) bool) bool {
	done := 0
	space := 0 // end of the white space after a token with RStrip
	for at := 0; len(m.tokens) > 0; {
		start, token := m.next(text, at)
		if token == nil {
			break
		}
		stop := start + len(token.Content)
		at = stop
		if spell && token.Special || token.SingleWord && (endsInWord(text[:start]) || beginsWithWord(text[stop:])) {
			continue
		}
		if token.LStrip {
			start = done + len(strings.TrimRightFunc(text[done:max(done, start)], unicode.IsSpace))
		}
		if token.RStrip {
			if stop > space {
				space = len(text) - len(strings.TrimLeftFunc(text[stop:], unicode.IsSpace))
			}
			stop = space
		}
		if done < start && !yield(nil, text[done:start]) {
			return false
		}
		if !yield(token, "") {
			return false
		}
		done = stop
	}
	return done == len(text) || yield(nil, text[done:])
}

func endsInWord(text string) bool {
	r, _ := utf8.DecodeLastRuneInString(text)
	return isWord(r)
}

func beginsWithWord(text string) bool {
	r, _ := utf8.DecodeRuneInString(text)
	return isWord(r)
}
