package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is a token beside the vocabulary: the text is searched for added tokens before it is cut into words.
type addedToken struct {
	ID         int    `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"` // not beside a letter, digit or _
	LStrip     bool   `json:"lstrip"`      // takes the white space before the token
	RStrip     bool   `json:"rstrip"`      // takes the white space after the token
	Normalized bool   `json:"normalized"`  // searched where no other added token was found
	Special    bool   `json:"special"`
}

// maxContent is the longest accepted added token. Published tokens have some ten bytes, and the search takes as many
// steps at each byte of a text.
const maxContent = 1024

// matcher finds added tokens in a text: the leftmost, and the longest of those at one position.
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
			// All tokens in [lo, hi) begin with the n bytes at start, and a token of n bytes is the first of them.
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

// split cuts a text at its added tokens. It yields each token (with an empty text) and the text between tokens (with
// a nil token), until yield returns false. With spell special tokens are text. split equals AddedVocabulary of
// Hugging Face's tokenizers, also for a token that begins in the white space that the token before it has taken.
func (m *matcher) split(text string, spell bool, yield func(*addedToken, string) bool) bool {
	done := 0
	space := 0 // end of the white space that a token has taken after it
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
