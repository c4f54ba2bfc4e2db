package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Decode returns the text of ids. Special tokens have none ([Tokenizer.Special]). Ids outside the vocabulary and invalid
// UTF-8 give U+FFFD.
func (t *Tokenizer) Decode(ids []int) string {
	d := t.NewDecoder()
	var text strings.Builder
	for _, id := range ids {
		text.WriteString(d.Add(id))
	}
	text.WriteString(d.Flush())
	return text.String()
}

// Decoder turns ids into text one by one. A character may span several tokens: its bytes are held back until it is
// complete. The results of Add and Flush, joined, are the result of Decode.
type Decoder struct {
	// Special gives special tokens their text.
	Special bool

	t     *Tokenizer
	held  []byte // less than one character
	bytes []byte // of byte tokens in a row, of which it is not yet known whether they are valid
	begun bool   // a token had its turn
	cut   int    // characters that were cut at the beginning of the text
	text  bool   // something is behind the beginning
	tail  string // characters that may be cut at the end of the text
}

// NewDecoder returns a Decoder for the beginning of a text.
func (t *Tokenizer) NewDecoder() *Decoder { return &Decoder{t: t} }

// spelling is how tokens become text.
type spelling struct {
	kind         spellingKind
	replace      []replacement  // in each token, in order; spellParts
	byteTokens   bool           // tokens <0x0A> are bytes; spellParts
	strip        byte           // the character that is cut at the ends; 0: none
	start, stop  int            // how many
	each         bool           // at the ends of each token, not of the text
	meta         string         // spellMeta: the character for a space
	metaPrefix   bool           // spellMeta: it is removed from the first token
	bytes        map[int]byte   // spellPieces, spellRaw: byte tokens
	firstSpace   bool           // spellPieces: a space at the beginning of the text is left out
	firstSpaces  bool           // spellPieces: and so are more of them, one a token
	unkText      string         // spellPieces: of the unknown token
	literal      map[int]bool   // spellPieces: tokens whose text is the token
	raw          map[int]string // spellRaw: the bytes of tokens that are not their text
	specialBreak bool           // an incomplete character ends before a special token
}

type spellingKind uint8

const (
	spellBytes  spellingKind = iota // characters of a token stand for bytes (ByteLevel)
	spellParts                      // Hugging Face's decoders for a BPE with byte tokens
	spellMeta                       // Metaspace
	spellPieces                     // SentencePiece's own decoder
	spellRaw                        // tokens are bytes
)

type replacement struct {
	pattern *pattern // nil: from
	from    string
	by      string
}

// Add returns the text that the next id completes, which may be empty.
func (d *Decoder) Add(id int) string {
	token, ok := d.t.tokens[id]
	if !ok {
		return d.end() + d.put(string(utf8.RuneError))
	}
	if d.t.special[id] && !d.Special {
		if d.t.spelling.specialBreak {
			return d.end()
		}
		return ""
	}
	added, isAdded := d.t.texts[id]
	first := !d.begun
	d.begun = true
	s := &d.t.spelling
	switch s.kind {
	case spellBytes:
		if isAdded {
			d.held = append(d.held, added...)
		} else {
			d.held = appendToken(d.held, token)
		}
		return d.take(false)
	case spellMeta:
		if first && s.metaPrefix {
			return strings.ReplaceAll(token, s.meta, "")
		}
		return strings.ReplaceAll(token, s.meta, " ")
	case spellRaw:
		return d.addRaw(id, token)
	case spellPieces:
		return d.addPiece(id, token)
	}
	return d.addPart(token)
}

// addPart is Add for spellParts.
func (d *Decoder) addPart(token string) string {
	s := &d.t.spelling
	for _, r := range s.replace {
		if r.pattern == nil {
			token = strings.ReplaceAll(token, r.from, r.by)
		} else if changed, _, err := replace(r.pattern.scan, r.by)(token); err == nil {
			token = changed
		}
	}
	if s.byteTokens {
		if b, ok := byteToken(token); ok {
			d.bytes = append(d.bytes, b)
			return ""
		}
	}
	text := d.endBytes()
	if s.strip != 0 && s.each {
		token = cutStart(token, s.strip, s.start)
		token = cutStop(token, s.strip, s.stop)
	}
	return text + d.put(token)
}

// endBytes ends byte tokens in a row: they are valid UTF-8, or U+FFFD each.
func (d *Decoder) endBytes() string {
	if len(d.bytes) == 0 {
		return ""
	}
	text := string(d.bytes)
	if !utf8.Valid(d.bytes) {
		text = strings.Repeat(string(utf8.RuneError), len(d.bytes))
	}
	d.bytes = d.bytes[:0]
	return d.put(text)
}

// put returns text without what is cut at the ends of the whole text.
func (d *Decoder) put(text string) string {
	s := &d.t.spelling
	if s.kind != spellParts || s.strip == 0 || s.each {
		return text
	}
	for !d.text && text != "" {
		if d.cut < s.start && text[0] == s.strip {
			d.cut++
			text = text[1:]
		} else {
			d.text = true
		}
	}
	if s.stop == 0 {
		return text
	}
	text = d.tail + text
	rest := cutStop(text, s.strip, s.stop)
	d.tail = text[len(rest):]
	return rest
}

func cutStart(text string, c byte, most int) string {
	for n := 0; n < most && text != "" && text[0] == c; n++ {
		text = text[1:]
	}
	return text
}

func cutStop(text string, c byte, most int) string {
	for n := 0; n < most && text != "" && text[len(text)-1] == c; n++ {
		text = text[:len(text)-1]
	}
	return text
}

// addRaw is Add for spellRaw.
func (d *Decoder) addRaw(id int, token string) string {
	if raw, ok := d.t.spelling.raw[id]; ok {
		token = raw
	}
	d.held = append(d.held, token...)
	return d.take(false)
}

// addPiece is Add for spellPieces.
func (d *Decoder) addPiece(id int, token string) string {
	s := &d.t.spelling
	if b, ok := s.bytes[id]; ok {
		d.held = append(d.held, b)
		return d.takePieces(false)
	}
	text := d.takePieces(true)
	if id == d.t.unk && s.unkText != "" {
		d.text = true
		return text + s.unkText
	}
	if s.literal[id] {
		d.text = true
		return text + token
	}
	if s.firstSpace && !d.text {
		rest, cut := strings.CutPrefix(token, underline)
		d.text = rest != "" || cut && !s.firstSpaces
		token = rest
	}
	return text + strings.ReplaceAll(token, underline, " ")
}

// takePieces is take for byte tokens of SentencePiece, where each byte that is in no character is U+FFFD.
func (d *Decoder) takePieces(all bool) string {
	var text strings.Builder
	p := d.held
	for len(p) > 0 && (all || utf8.FullRune(p)) {
		r, size := utf8.DecodeRune(p)
		text.WriteRune(r)
		p = p[size:]
	}
	d.held = append(d.held[:0], p...)
	d.text = d.text || text.Len() > 0
	return text.String()
}

// byteToken returns the byte of a token such as <0x0A>.
func byteToken(token string) (byte, bool) {
	if len(token) != 6 || token[:3] != "<0x" || token[5] != '>' {
		return 0, false
	}
	b, err := strconv.ParseUint(token[3:5], 16, 8)
	return byte(b), err == nil
}

// Flush ends the text and returns what was held: U+FFFD for an incomplete character.
func (d *Decoder) Flush() string {
	text := d.end()
	d.tail = ""
	return text
}

// end returns what is held, but for characters that may be cut at the end.
func (d *Decoder) end() string {
	switch d.t.spelling.kind {
	case spellParts:
		return d.endBytes()
	case spellPieces:
		return d.takePieces(true)
	}
	return d.take(true)
}

// take returns the held text up to a last, incomplete character, or all of it. Each longest beginning of a character is
// one U+FFFD, as in Python and Rust.
func (d *Decoder) take(all bool) string {
	p := d.held
	if utf8.Valid(p) {
		d.held = p[:0]
		return string(p)
	}
	var text strings.Builder
	for len(p) > 0 && (all || utf8.FullRune(p)) {
		r, size := utf8.DecodeRune(p)
		if r == utf8.RuneError && size == 1 {
			for size < len(p) && !utf8.FullRune(p[:size+1]) {
				size++
			}
		}
		text.WriteRune(r)
		p = p[size:]
	}
	d.held = append(d.held[:0], p...)
	return text.String()
}

// appendToken appends the bytes of a token. A token with a character that stands for no byte, which merges never
// make, stands for itself.
func appendToken(dst []byte, token string) []byte {
	begin := len(dst)
	for _, r := range token {
		b, ok := byteOf[r]
		if !ok {
			return append(dst[:begin], token...)
		}
		dst = append(dst, b)
	}
	return dst
}

// charOf has the character for each byte in vocab.json and merges.txt, and byteOf the reverse. In GPT-2 the printable
// characters of Latin-1 stand for themselves, and the characters from U+0100 on for the other bytes in order, so that
// no token has a space.
var charOf, byteOf = func() (chars [256]rune, bytes map[rune]byte) {
	next := rune(0x100)
	bytes = map[rune]byte{}
	for b := range rune(256) {
		c := b
		if b < '!' || '~' < b && b < '¡' || b == 0xad {
			c, next = next, next+1
		}
		chars[b], bytes[c] = c, byte(b)
	}
	return
}()
