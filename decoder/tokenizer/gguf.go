package tokenizer

import (
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// GGUF is the vocabulary of a GGUF file. The comment of a field is the key in the file, without the prefix tokenizer.ggml.
// The field of an absent key is nil or empty.
type GGUF struct {
	Model  string // model: gpt2, gemma4, llama, t5 or bert
	Pre    string // pre
	Tokens []string
	Scores []float32 // scores
	Types  []int32   // token_type
	Merges []string  // merges

	// TokenIDs maps the keys that end in _token_id, such as "bos_token_id" and "eot_token_id", to their values.
	TokenIDs map[string]int64

	AddBOS                 *bool  // add_bos_token
	AddEOS                 *bool  // add_eos_token
	AddSpacePrefix         *bool  // add_space_prefix
	RemoveExtraWhitespaces *bool  // remove_extra_whitespaces
	PrecompiledCharsmap    []byte // precompiled_charsmap

	// Name is the value of general.name. If Name contains Phi-3, special tokens absorb the white space after them.
	Name string
}

// ggufName is the name of the file in errors.
const ggufName = "GGUF"

// NewGGUF returns the tokenizer of a GGUF file. The tokenizer may keep the slices of g. Errors name keys of the file
// without the prefix tokenizer.ggml.
//
// Encode returns the ids of llama.cpp. Options.Special corresponds to parse_special, and Options.Bare to the negation of
// add_special.
func NewGGUF(g GGUF) (*Tokenizer, error) {
	switch n := len(g.Tokens); {
	case n == 0 || n >= phantom:
		return nil, fail(ggufName, "%d tokens", n)
	case g.Types != nil && len(g.Types) != n:
		return nil, fail(ggufName, "%d tokens and %d values of token_type", n, len(g.Types))
	case g.Scores != nil && len(g.Scores) != n:
		return nil, fail(ggufName, "%d tokens and %d scores", n, len(g.Scores))
	case !finite(g.Scores):
		return nil, fail(ggufName, "a score that is no number")
	}
	if g.Types == nil {
		g.Types = slices.Repeat([]int32{typeNormal}, len(g.Tokens))
	}
	t := &Tokenizer{vocabulary: vocabulary{ids: make(map[string]int, len(g.Tokens)), tokens: make(map[int]string, len(g.Tokens)), unk: -1, longest: 1}}
	t.size, t.special = len(g.Tokens), map[int]bool{}
	for id, text := range g.Tokens {
		if other, ok := t.ids[text]; ok && text != "" {
			return nil, fail(ggufName, "tokens %d and %d are both %s", other, id, quote(text))
		}
		if text != "" { // an empty token never occurs in a text
			t.ids[text] = id
		}
		t.tokens[id] = text
		t.longest = max(t.longest, utf8.RuneCountInString(text))
	}
	if err := g.types(t); err != nil {
		return nil, err
	}
	var err error
	switch g.Model {
	case "gpt2", "gemma4":
		err = g.bpe(t)
	case "llama":
		err = g.llama(t)
	case "t5":
		err = g.t5(t)
	case "bert":
		err = g.bert(t)
	default:
		err = refuse(ggufName, "model %s", quote(g.Model))
	}
	if err != nil {
		return nil, err
	}
	t.measure()
	return t, nil
}

// types sets the added tokens, the special tokens and the spelling from the token types.
func (g *GGUF) types(t *Tokenizer) error {
	t.spelling = spelling{literal: map[int]bool{}, bytes: map[int]byte{}}
	rstrip := strings.Contains(strings.ToLower(g.Name), "phi-3") || strings.Contains(strings.ToLower(g.Name), "phi3")
	var added []addedToken
	g.ends(t)
	for id, kind := range g.Types {
		text := g.Tokens[id]
		switch kind {
		case 0, typeNormal, typeUnused:
		case typeControl, typeUnknown, typeUserDefined:
			if err := checkContent(ggufName, text); err != nil {
				return err
			}
			t.spelling.literal[id] = true
			a := addedToken{ID: id, Content: text, Special: kind != typeUserDefined}
			a.RStrip = rstrip && text != "<unk>" && text != "<s>" && text != "<|endoftext|>"
			if a.Special {
				t.special[id] = true
			}
			if text != "" {
				added = append(added, a)
			}
		case typeByte:
			b, ok := byteToken(text)
			if !ok {
				return fail(ggufName, "token %d is %s, which is no byte", id, quote(text))
			}
			t.spelling.bytes[id] = b
		default:
			return refuse(ggufName, "token %d, %s, is of token_type %d", id, quote(text), kind)
		}
	}
	t.added = [2]*matcher{newMatcher(added), newMatcher(nil)}
	return nil
}

// endNames are the names of tokens that end a turn or a message, in files without a key for such tokens.
var endNames = []string{
	"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
	"<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
}

// ends finds the tokens that end a generated text by their names, and sets their type to control.
func (g *GGUF) ends(t *Tokenizer) {
	g.Types = slices.Clone(g.Types)
	has := func(name string) bool { _, ok := t.ids[name]; return ok }
	for _, name := range endNames {
		id, ok := t.ids[name]
		switch {
		case !ok:
		case name == "<|end|>" && has("<|return|>") && has("<|call|>"): // gpt-oss: the token ends a message, not the text
			g.Types[id] = typeUserDefined
		case name == "</s>" && has("<|tool_response>"): // Gemma 4: the token is ordinary text
			g.Types[id] = typeNormal
		default:
			g.Types[id] = typeControl
			t.ends = append(t.ends, id)
		}
	}
	for _, name := range []string{"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"} { // gpt-oss
		if id, ok := t.ids[name]; ok {
			g.Types[id] = typeUserDefined
		}
	}
}

// tokenID returns the id of a key. Without the key, tokenID returns otherwise if otherwise is a token, and -1 if not.
func (g *GGUF) tokenID(key string, otherwise int) (int, error) {
	id, ok := g.TokenIDs[key]
	switch {
	case !ok && otherwise < len(g.Tokens):
		return otherwise, nil
	case !ok:
		return -1, nil
	case id < 0 || id >= int64(len(g.Tokens)):
		return -1, fail(ggufName, "%s is %d, and there are %d tokens", key, id, len(g.Tokens))
	}
	return int(id), nil
}

// around sets BOS, EOS, the end tokens, and the tokens before and after a text.
func (g *GGUF) around(t *Tokenizer, bos, eos int, addBOS, addEOS bool) error {
	var err error
	if t.bos, err = g.tokenID("bos_token_id", bos); err != nil {
		return err
	}
	if t.eos, err = g.tokenID("eos_token_id", eos); err != nil {
		return err
	}
	for _, key := range []string{"eos_token_id", "eot_token_id", "eom_token_id"} {
		id, err := g.tokenID(key, -1)
		if key == "eos_token_id" {
			id = t.eos
		}
		if err != nil {
			return err
		}
		if id >= 0 && !slices.Contains(t.ends, id) {
			t.ends = append(t.ends, id)
		}
	}
	slices.Sort(t.ends)
	if g.AddBOS != nil {
		addBOS = *g.AddBOS
	}
	if g.AddEOS != nil {
		addEOS = *g.AddEOS
	}
	if addBOS {
		if t.bos < 0 {
			return fail(ggufName, "add_bos_token without bos_token_id")
		}
		t.before = []int{t.bos}
	}
	if addEOS {
		if t.eos < 0 {
			return fail(ggufName, "add_eos_token without eos_token_id")
		}
		t.after = []int{t.eos}
	}
	return nil
}

// bpe sets the model of gpt2 or gemma4.
func (g *GGUF) bpe(t *Tokenizer) error {
	name := g.Pre
	otherwise := 11 // gpt2: default of BOS and EOS
	if g.Model == "gemma4" {
		name, otherwise = "gemma4", -1
	}
	pre, ok := preTokenizers[name]
	if !ok {
		return refuse(ggufName, "pre %s", quote(g.Pre))
	}
	for b, c := range charOf {
		id, ok := t.ids[string(c)]
		if !ok {
			id = -1
		}
		t.bytes[b] = id
	}
	t.complete = !slices.Contains(t.bytes[:], -1)
	for _, p := range pre.patterns {
		c, err := compilePattern(p)
		if err != nil {
			return refuse(ggufName, "pre %s: %v", quote(name), err)
		}
		t.words.cuts = append(t.words.cuts, cutAt(isolated, false, c.scan))
	}
	t.ignoreMerges = pre.ignoreMerges
	byteTokens, _ := t.byteTokens()
	spell := func(text string) (ids []int32) { // returns the tokens of the bytes of a text that is no token
		if pre.noBytes {
			for i := range len(text) {
				ids = append(ids, byteTokens[text[i]])
			}
			return ids
		}
		for _, r := range text {
			b, ok := byteOf[r]
			if !ok || t.bytes[b] < 0 {
				ids = append(ids, -1)
			} else {
				ids = append(ids, int32(t.bytes[b]))
			}
		}
		return ids
	}
	t.parts, t.phantoms, t.phantomID = map[int32][]int32{}, map[int32]string{}, map[string]int32{}
	for i, m := range g.Merges {
		space := -1
		if m != "" {
			space = strings.IndexByte(m[1:], ' ') + 1
		}
		if space <= 0 || space == len(m)-1 {
			return fail(ggufName, "merge %d is %s, not two tokens with a space between them", i, quote(m))
		}
		left, right := m[:space], m[space+1:]
		if wrong := t.putMerge(t.symbol(left, spell), t.symbol(right, spell), t.symbol(left+right, spell)); wrong != "" {
			return fail(ggufName, "merge %d, %s, %s", i, quote(m), wrong)
		}
	}
	for b, c := range charOf {
		if id, ok := t.phantomID[string(c)]; ok && t.bytes[b] < 0 {
			t.bytes[b] = int(id)
		}
	}
	if pre.noBytes {
		// llama.cpp splits at line feeds, because no merge has one. A run of line feeds is then one token, if the
		// vocabulary has that token.
		t.normal = always(func(text string) string { return strings.ReplaceAll(text, " ", underline) })
		t.words.cuts = append(t.words.cuts, cutAt(isolated, false, newlines.scan))
		t.model = lineBPE{charBPE{vocabulary: &t.vocabulary, byteTokens: byteTokens}}
		t.spelling.kind = spellPieces
	} else {
		t.model = byteBPE{&t.vocabulary}
		t.spelling.kind = spellBytes
		// Literal tokens are decoded to their own spelling.
		t.texts = map[int]string{}
		for id := range t.spelling.literal {
			t.texts[id] = g.Tokens[id]
		}
	}
	return g.around(t, otherwise, otherwise, pre.bos || pre.noBytes, false)
}

var newlines = func() *pattern {
	p, err := compilePattern(`\n+`)
	if err != nil {
		panic(err)
	}
	return p
}()

// symbol returns the id of a part or result of a merge. For a text that is no token, symbol returns a phantom id.
func (v *vocabulary) symbol(text string, spell func(string) []int32) int32 {
	if id, ok := v.ids[text]; ok {
		return int32(id)
	}
	id, ok := v.phantomID[text]
	if !ok {
		id = phantom + int32(len(v.phantoms))
		v.phantomID[text], v.phantoms[id], v.parts[id] = id, text, spell(text)
	}
	return id
}

// lineBPE is a charBPE in which a word of line feeds is one token, if the vocabulary has that token.
type lineBPE struct{ charBPE }

func (b lineBPE) encode(e *encoder, word string) bool {
	if word[0] == '\n' && len(word) <= b.longest {
		if id, ok := b.ids[word]; ok {
			return e.add(id)
		}
	}
	return b.charBPE.encode(e, word)
}

// llama sets the model of llama: SentencePiece's BPE.
func (g *GGUF) llama(t *Tokenizer) error {
	if g.Scores == nil {
		return fail(ggufName, "model llama without scores")
	}
	tokens := make([]scored, 0, len(g.Tokens))
	for id, text := range g.Tokens {
		if text != "" {
			tokens = append(tokens, scored{text, int32(id), g.Scores[id]})
		}
	}
	byteTokens, _ := t.byteTokens()
	for b, id := range byteTokens {
		if other, ok := t.ids[string([]byte{byte(b)})]; id < 0 && ok {
			byteTokens[b] = int32(other)
		}
	}
	prefix := g.AddSpacePrefix == nil || *g.AddSpacePrefix
	var err error
	if t.unk, err = g.tokenID("unknown_token_id", 0); err != nil {
		return err
	}
	model := &pieceBPE{textPairs: scoredPairs(tokens), ids: t.ids, unk: -1, byteTokens: byteTokens}
	t.model = model
	t.normal = always(func(text string) string {
		if prefix {
			text = " " + text
		}
		return strings.ReplaceAll(text, " ", underline)
	})
	t.spelling.kind, t.spelling.firstSpace = spellPieces, prefix
	return g.around(t, 1, 2, true, false)
}

// t5 sets the model of t5: SentencePiece's Unigram.
func (g *GGUF) t5(t *Tokenizer) error {
	if g.Scores == nil {
		return fail(ggufName, "model t5 without scores")
	}
	var err error
	if t.unk, err = g.tokenID("unknown_token_id", 2); err != nil {
		return err
	}
	u := &unigram{scores: float64s(g.Scores), unk: t.unk}
	var keys, whole []trieKey
	var normal []float64
	for id, text := range g.Tokens {
		if text == "" {
			continue
		}
		switch g.Types[id] {
		case typeNormal:
			normal = append(normal, u.scores[id])
		case typeUserDefined:
			u.scores[id] = 0
			whole = append(whole, trieKey{text, int32(id)})
		case typeUnused:
		default:
			continue
		}
		keys = append(keys, trieKey{text, int32(id)})
	}
	if u.tokens, err = newTokenTrie(ggufName, keys); err != nil {
		return err
	}
	u.unkScore = lowest(normal)
	t.model = u
	chars, err := parseCharsmap(g.PrecompiledCharsmap)
	if err != nil {
		return fail(ggufName, "%v", err)
	}
	rules := &ggufSpaces{spaceRules{chars: chars, prefix: g.AddSpacePrefix != nil && *g.AddSpacePrefix, removeExtra: g.RemoveExtraWhitespaces != nil && *g.RemoveExtraWhitespaces}}
	if len(whole) > 0 {
		if rules.whole, err = newTokenTrie(ggufName, whole); err != nil {
			return err
		}
	}
	t.normal = always(rules.normalize)
	t.spelling.kind, t.spelling.firstSpace, t.spelling.firstSpaces = spellPieces, rules.prefix || rules.removeExtra, rules.removeExtra
	return g.around(t, -1, 1, false, true)
}

// ggufSpaces are the spaceRules of llama.cpp. If removeExtra is true, spaces at the end of a text are removed. The prefix
// is put before the first character that is not a space.
type ggufSpaces struct{ spaceRules }

func (r *ggufSpaces) normalize(text string) string {
	var b strings.Builder
	prefixed, inWord := false, false
	for at := 0; at < len(text); {
		by, n := r.next(text[at:])
		at += n
		for i := range len(by) {
			switch {
			case by[i] == ' ':
				inWord = false
				if !r.removeExtra {
					b.WriteString(underline)
				}
				continue
			case !inWord:
				inWord = true
				if r.prefix && !prefixed || r.removeExtra {
					b.WriteString(underline)
					prefixed = true
				}
			}
			b.WriteByte(by[i])
		}
	}
	return b.String()
}

// bert sets the model of bert: WordPiece.
func (g *GGUF) bert(t *Tokenizer) error {
	cls, err := g.tokenID("cls_token_id", 101)
	if err != nil {
		return err
	}
	if err := g.around(t, cls, -1, true, false); err != nil {
		return err
	}
	sep, err := g.tokenID("seperator_token_id", 102) // the key is misspelled in GGUF files
	if err != nil {
		return err
	}
	if t.unk, err = g.tokenID("unknown_token_id", 100); err != nil {
		return err
	}
	if sep < 0 || t.unk < 0 {
		return fail(ggufName, "model bert without seperator_token_id or unknown_token_id")
	}
	t.after = []int{sep}
	m := &wordPiece{ids: maps.Clone(t.ids), unk: t.unk}
	for text := range m.ids {
		m.longest = max(m.longest, len(text))
	}
	t.model = m
	t.normal = always(bertNormal)
	t.words.removes = true
	t.words.cuts = []cut{cutAt(removed, false, find(runes(unicode.IsSpace)))}
	t.spelling.kind, t.spelling.firstSpace = spellPieces, true
	return nil
}

// bertNormal is BERT's normalizer of uncased models. bertNormal converts letters to lower case, removes marks and control
// characters, and puts spaces around punctuation and Chinese characters.
func bertNormal(text string) string {
	var b strings.Builder
	for _, r := range forms["NFD"].String(text) {
		switch {
		case unicode.IsSpace(r):
			b.WriteByte(' ')
		case r == 0 || r == utf8.RuneError || unicode.Is(unicode.C, r) || unicode.Is(unicode.M, r):
		case unicode.IsPunct(r) || r < 0x7f && unicode.IsSymbol(r) || unicode.Is(chinese, r):
			b.WriteByte(' ')
			b.WriteRune(toLower(r))
			b.WriteByte(' ')
		default:
			b.WriteRune(toLower(r))
		}
	}
	return b.String()
}

// chinese are the characters that BERT treats as Chinese.
var chinese = &unicode.RangeTable{
	R16: []unicode.Range16{{0x3400, 0x4dbf, 1}, {0x4e00, 0x9fff, 1}, {0xf900, 0xfaff, 1}},
	R32: []unicode.Range32{{0x20000, 0x2a6df, 1}, {0x2a700, 0x2b81f, 1}, {0x2b920, 0x2ceaf, 1}, {0x2f800, 0x2fa1f, 1}},
}

// wordPiece is the WordPiece model. From left to right, encode takes the longest token that is a prefix of the rest of the
// word. Tokens at the beginning of a word begin with ▁.
type wordPiece struct {
	ids     map[string]int
	unk     int
	longest int
}

func (m *wordPiece) encode(e *encoder, word string) bool {
	begin := len(e.ids)
	for rest := underline + word; rest != ""; {
		n := min(len(rest), m.longest)
		id, ok := 0, false
		for ; n > 0; n-- {
			if id, ok = m.ids[rest[:n]]; ok {
				break
			}
		}
		if !ok {
			e.ids = append(e.ids[:begin], m.unk)
			break
		}
		e.ids = append(e.ids, id)
		rest = rest[n:]
	}
	return e.add()
}
