package tokenizer

import (
	"math"
	"unicode/utf8"
)

// byteBPE is a BPE whose initial symbols are the bytes of a word.
type byteBPE struct {
	*vocabulary
}

func (b byteBPE) encode(e *encoder, word string) bool {
	if b.ignoreMerges {
		if id, ok := b.whole(word); ok {
			return e.add(id)
		}
	}
	if !b.begin(e, word) {
		e.over = true
		return false
	}
	e.merge(word, &b.merges)
	for i := int32(0); i < int32(len(e.symbols)); i = e.symbols[i].next {
		b.emit(e, e.symbols[i].id)
	}
	return e.add()
}

// begin sets the symbols to the bytes of a word. begin reports whether the tokens can fit in e.most: a token has at most
// longest symbols.
func (b byteBPE) begin(e *encoder, word string) bool {
	if b.complete && len(word)/b.longest > e.most-len(e.ids) {
		return false
	}
	room := math.MaxInt
	if left := e.most - len(e.ids); left < math.MaxInt/b.longest-1 {
		room = (left + 1) * b.longest
	}
	e.reset(min(len(word), room))
	fused := false
	for i := range len(word) {
		id := b.bytes[word[i]]
		if id >= 0 {
			fused = false
		} else {
			if b.unk < 0 {
				e.lost = word[i : i+1]
				continue
			}
			if fused && b.fuseUnk {
				continue
			}
			id, fused = b.unk, true
		}
		if len(e.symbols) == room {
			return false
		}
		e.push(int32(id), i, i+1)
	}
	return true
}

// emit appends the id of a symbol. For a phantom symbol, emit appends the ids of the tokens that spell the symbol.
func (v *vocabulary) emit(e *encoder, id int32) {
	if parts, ok := v.parts[id]; ok {
		for _, p := range parts {
			if p >= 0 {
				e.ids = append(e.ids, int(p))
			} else {
				e.lost = v.phantoms[id]
			}
		}
		return
	}
	e.ids = append(e.ids, int(id))
}

// charBPE is a BPE whose initial symbols are characters. A character without a token becomes the tokens of its bytes, or
// the unknown token.
type charBPE struct {
	*vocabulary
	byteTokens *[256]int32 // ids of <0x00> to <0xFF>; -1: none
}

func (b charBPE) encode(e *encoder, word string) bool {
	if b.ignoreMerges && len(word) <= b.longest*utf8.UTFMax {
		if id, ok := b.ids[word]; ok && !b.beyond(id) {
			return e.add(id)
		}
	}
	e.reset(len(word))
	unknown := 0 // pending unknown tokens
	at := 0
	flush := func() {
		for ; unknown > 0; unknown-- {
			e.push(int32(b.unk), at, at)
		}
	}
	for at < len(word) {
		_, size := utf8.DecodeRuneInString(word[at:])
		c := word[at : at+size]
		id, ok := b.ids[c]
		switch {
		case ok && !b.beyond(id):
			flush()
			e.push(int32(id), at, at+size)
		case b.byteTokens != nil && b.allBytes(c):
			// Hugging Face's tokenizers put a pending unknown token after the byte tokens.
			for i := range len(c) {
				e.push(b.byteTokens[c[i]], at+i, at+i+1)
			}
		case b.unk < 0:
			e.lost = c
		case unknown == 0 || !b.fuseUnk:
			if unknown > 0 {
				flush()
			}
			unknown = 1
		}
		at += size
	}
	flush()
	e.merge(word, &b.merges)
	for i := int32(0); i < int32(len(e.symbols)); i = e.symbols[i].next {
		b.emit(e, e.symbols[i].id)
	}
	return e.add()
}

// allBytes reports whether each byte of c has a token.
func (b charBPE) allBytes(c string) bool {
	for i := range len(c) {
		if b.byteTokens[c[i]] < 0 {
			return false
		}
	}
	return true
}

// rankBPE is the BPE of tiktoken. A pair can be merged if the text of the pair is a token. The pair whose token has the
// lowest number is merged first. Every byte is a token.
type rankBPE struct {
	textPairs
}

func (b *rankBPE) encode(e *encoder, word string) bool {
	if m, ok := b.tokens[word]; ok {
		return e.add(int(m.id))
	}
	if len(word)/b.longest > e.most-len(e.ids) {
		e.over = true
		return false
	}
	e.reset(len(word))
	for i := range len(word) {
		e.push(b.tokens[word[i:i+1]].id, i, i+1)
	}
	e.merge(word, &b.textPairs)
	for i := int32(0); i < int32(len(e.symbols)); i = e.symbols[i].next {
		e.ids = append(e.ids, int(e.symbols[i].id))
	}
	return e.add()
}
