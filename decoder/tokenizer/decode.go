package tokenizer

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Decode returns the text of ids. Decode omits special tokens (see [Tokenizer.Special]), and writes U+FFFD for ids outside
// the vocabulary and for invalid UTF-8.
func (t *Tokenizer) Decode(ids []int) string {
	d := t.NewDecoder()
	var text strings.Builder
	for _, id := range ids {
		text.WriteString(d.Add(id))
	}
	text.WriteString(d.Flush())
	return text.String()
}

// Decoder decodes a text one id at a time. A character may span several tokens: the Decoder holds the bytes back until the
// character is complete. The concatenated results of Add and Flush equal the result of Decode.
type Decoder struct {
	// Special includes the text of special tokens.
	Special bool

	t     *Tokenizer
	held  []byte // bytes of an incomplete character
	bytes []byte // bytes of consecutive byte tokens, not yet checked for valid UTF-8
	begun bool   // Add decoded a token
	cut   int    // number of characters cut at the beginning of the text
	text  bool   // the beginning of the text is complete
	tail  string // characters that are cut if the text ends here
}

// NewDecoder returns a Decoder that begins a new text.
func (t *Tokenizer) NewDecoder() *Decoder { return &Decoder{t: t} }

// spelling describes the conversion of tokens to text.
type spelling struct {
	kind         spellingKind
	replace      []replacement  // in each token, in order; spellParts
	byteTokens   bool           // tokens <0x0A> are bytes; spellParts
	strip        byte           // character that is cut at the ends; 0: none
	start, stop  int            // number of characters to cut at the beginning and at the end
	each         bool           // cut at the ends of each token, not of the text
	meta         string         // spellMeta: character that stands for a space
	metaPrefix   bool           // spellMeta: meta is removed from the first token
	bytes        map[int]byte   // spellPieces, spellRaw: byte tokens
	firstSpace   bool           // spellPieces: one space at the beginning of the text is omitted
	firstSpaces  bool           // spellPieces: further spaces there are omitted, too, one for each token
	unkText      string         // spellPieces: text of the unknown token
	literal      map[int]bool   // spellPieces: tokens that are decoded to their own spelling
	raw          map[int]string // spellRaw: bytes of tokens whose bytes differ from their spelling
	specialBreak bool           // a special token ends an incomplete character
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
	pattern *pattern // nil: from is replaced
	from    string
	by      string
}

// Add decodes the next id and returns the text that is now complete, which may be empty.
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
	token = s.part(token)
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

// Bytes returns the bytes that a token adds to a text behind other text. ok is false for tokens without bytes: special tokens, ids
// outside the vocabulary, and tokens whose bytes depend on the text before them.
func (t *Tokenizer) Bytes(id int) (text []byte, ok bool) {
	token, ok := t.tokens[id]
	if !ok || t.special[id] {
		return nil, false
	}
	s := &t.spelling
	switch s.kind {
	case spellBytes:
		if added, ok := t.texts[id]; ok {
			text = []byte(added)
		} else {
			text = appendToken(nil, token)
		}
	case spellMeta:
		if s.metaPrefix && strings.Contains(strings.TrimPrefix(token, s.meta), s.meta) {
			return nil, false // the first token of a text has no spaces
		}
		text = []byte(strings.ReplaceAll(token, s.meta, " "))
	case spellRaw:
		if raw, ok := s.raw[id]; ok {
			token = raw
		}
		text = []byte(token)
	case spellPieces:
		if b, ok := s.bytes[id]; ok {
			return []byte{b}, true
		}
		switch {
		case id == t.unk && s.unkText != "":
			text = []byte(s.unkText)
		case s.literal[id]:
			text = []byte(token)
		default:
			text = []byte(strings.ReplaceAll(token, underline, " "))
		}
	default:
		token = s.part(token)
		if b, ok := byteToken(token); ok && s.byteTokens {
			return []byte{b}, true
		}
		if s.strip != 0 && s.each {
			token = cutStop(cutStart(token, s.strip, s.start), s.strip, s.stop)
		}
		text = []byte(token)
	}
	return text, len(text) > 0
}

// part returns the replaced text of a token; spellParts.
func (s *spelling) part(token string) string {
	for _, r := range s.replace {
		if r.pattern == nil {
			token = strings.ReplaceAll(token, r.from, r.by)
		} else if changed, _, err := replace(r.pattern.scan, r.by)(token); err == nil {
			token = changed
		}
	}
	return token
}

// endBytes ends a run of byte tokens and returns the text. If the run is not valid UTF-8, each byte is U+FFFD.
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

// put returns text without the characters that are cut at the ends of the whole text.
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

// takePieces is take for byte tokens of SentencePiece: each byte that belongs to no valid character is U+FFFD.
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

// Flush ends the text and returns the text that was held back. An incomplete character is U+FFFD.
func (d *Decoder) Flush() string {
	text := d.end()
	d.tail = ""
	return text
}

// end returns the text that is held back, without d.tail.
func (d *Decoder) end() string {
	switch d.t.spelling.kind {
	case spellParts:
		return d.endBytes()
	case spellPieces:
		return d.takePieces(true)
	}
	return d.take(true)
}

// take returns the held text without a last, incomplete character, or with all also that character. A truncated character
// is one U+FFFD, as in Python and Rust.
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

// appendToken appends the bytes of a token. If a character of the token stands for no byte, appendToken appends the token
// itself. Merges never produce such a token.
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

// charOf maps each byte to its character in vocab.json and merges.txt, and byteOf is the inverse. As in GPT-2, printable
// characters of Latin-1 stand for themselves. Characters from U+0100 on stand for the other bytes, in order, so that no
// token has a space.
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
