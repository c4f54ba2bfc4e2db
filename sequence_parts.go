package leanattention

import (
	"encoding/binary"
	"slices"
)

// chunkBytes is how much of a layer's keys or values a part has, unless one token has
// more. It is a variable for tests.
var chunkBytes = 1 << 20

// sequencePart is the keys (or values) of some tokens of a sequence in one layer, as
// pages have them and as a saved sequence has them.
type sequencePart struct {
	pageTransfer // memory is (KVHeads, tokens, dim) for each of runs

	tokens []byte // (tokens, KVHeads, dim), little endian
	runs   []int  // of consecutive tokens in one page: their number
	heads  int
	size   int // bytes of an element
	row    int // bytes of a head of a token
}

// eachPart visits all that s holds, in the order of a saved sequence. The part is good
// until visit returns.
func (s *Sequence) eachPart(visit func(*sequencePart) error) error {
	c := &s.cache.config
	storage, _ := storageType(c.DType)
	part := &sequencePart{heads: c.KVHeads, size: storage.Size()}
	var tokens, memory []byte
	for part.layer = range c.Layers {
		for _, part.values = range [...]bool{false, true} {
			part.row = c.HeadDim * part.size
			if part.values {
				part.row = c.ValueDim * part.size
			}
			most := part.tokensOf(c.PageSize)
			for from := 0; from < s.table.Tokens; from += most {
				to := min(from+most, s.table.Tokens)
				n := (to - from) * part.heads * part.row
				tokens, memory = grown(tokens, n), grown(memory, n)
				part.tokens, part.memory = tokens, memory
				part.place(s, from, to)
				if err := visit(part); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// tokensOf is how many tokens a part has: whole pages, if that is possible.
func (p *sequencePart) tokensOf(pageSize int) int {
	n := max(chunkBytes/(p.heads*p.row), 1)
	if n > pageSize {
		n -= n % pageSize
	}
	return n
}

// grown is n bytes, those of b if it has as many.
func grown(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n)
	}
	return b[:n]
}

// place finds the tokens [from, to) in the pages of s. What lies together there is one
// span, however many heads and pages it has.
func (p *sequencePart) place(s *Sequence, from, to int) {
	size := s.cache.config.PageSize
	p.spans, p.runs = p.spans[:0], p.runs[:0]
	for from < to {
		page, slot := int(s.table.Pages[from/size]), from%size
		n := min(size-slot, to-from)
		for h := range p.heads {
			next := span{at: ((page*p.heads+h)*size + slot) * p.row, n: n * p.row}
			if last := len(p.spans) - 1; last >= 0 && p.spans[last].at+p.spans[last].n == next.at {
				p.spans[last].n += next.n
				continue
			}
			p.spans = append(p.spans, next)
		}
		p.runs = append(p.runs, n)
		from += n
	}
}

// copyTokens copies between tokens and memory, to the latter if in is set.
func (p *sequencePart) copyTokens(in bool) {
	if in && !littleEndian {
		reverseElements(p.tokens, p.size)
	}
	memory, tokens := p.memory, p.tokens
	token := p.heads * p.row
	for _, n := range p.runs {
		for h := range p.heads {
			for i := range n {
				at := tokens[i*token+h*p.row:][:p.row]
				if in {
					copy(memory, at)
				} else {
					copy(at, memory)
				}
				memory = memory[p.row:]
			}
		}
		tokens = tokens[n*token:]
	}
	if !in && !littleEndian {
		reverseElements(p.tokens, p.size)
	}
}

// littleEndian says whether memory here is as a saved sequence.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

func reverseElements(b []byte, size int) {
	for ; len(b) > 0; b = b[size:] {
		slices.Reverse(b[:size])
	}
}
