package jsonschema

import (
	"bytes"
	"cmp"
	"slices"
	"unicode/utf8"

	"gorgonia.org/leanattention/decoder/tokenizer"
)

// Vocabulary is the tokens of a tokenizer, for schemas. A Vocabulary is safe for concurrent use.
type Vocabulary struct {
	words      int // of a mask
	ends       []int
	texts      [][]byte // of tokens; nil: not used
	tree       []treeNode
	ids        []int32         // of the tree's nodes, one node behind another
	longest    int             // bytes of a token
	characters map[string]bool // tokens of one byte or of one character
	complete   bool            // each byte is a token
	strings    []stringMask    // by the nodes of strings in each program
}

// treeNode is a beginning of tokens. The nodes of a tree are in the order of their texts, each before those that it begins.
type treeNode struct {
	end   int32 // the node behind those that this node begins
	ids   int32 // index of the node's first token; the next node has that behind the last one
	depth uint16
	last  byte // of the text
}

// stringMask is the tokens that may come at a node of a string.
type stringMask struct {
	inside []uint64 // tokens that do not end the string
	exits  []int32  // nodes of the tree at which the string ends
}

// mostToken is the most bytes of a token; longer ones are not used.
const mostToken = 1 << 10

// NewVocabulary returns the vocabulary of a tokenizer. A text ends by one of the tokens ends, which have no other use. Tokens of without
// are not used. The vocabulary needs about 20 bytes for each byte of the tokens.
func NewVocabulary(t *tokenizer.Tokenizer, ends []int, without ...int) *Vocabulary {
	tokens := make([][]byte, t.VocabSize())
	for id := range tokens {
		if !slices.Contains(without, id) {
			tokens[id], _ = t.Bytes(id)
		}
	}
	return newVocabulary(tokens, ends)
}

// newVocabulary returns the vocabulary of tokens. Tokens without bytes are not used.
func newVocabulary(tokens [][]byte, ends []int) *Vocabulary {
	v := &Vocabulary{words: (len(tokens) + 63) / 64, texts: make([][]byte, len(tokens)), characters: map[string]bool{}}
	var used []int32
	for id, token := range tokens {
		if slices.Contains(ends, id) {
			v.ends = append(v.ends, id)
			continue
		}
		n := len(token)
		if n == 0 || n > mostToken {
			continue
		}
		used = append(used, int32(id))
		v.texts[id] = token
		v.longest = max(v.longest, n)
		if r, size := utf8.DecodeRune(token); n == 1 || size == n && r != utf8.RuneError {
			v.characters[string(token)] = true
		}
	}
	v.complete = true
	for b := range 256 {
		v.complete = v.complete && v.characters[string([]byte{byte(b)})]
	}
	slices.SortFunc(used, func(a, b int32) int { return cmp.Or(bytes.Compare(tokens[a], tokens[b]), cmp.Compare(a, b)) })
	v.tree = append(v.tree, treeNode{}) // the empty text
	path := []int32{0}                  // nodes of the beginnings of the last token
	var text []byte
	for _, id := range used {
		token := tokens[id]
		same := 0
		for same < len(text) && same < len(token) && text[same] == token[same] {
			same++
		}
		for _, i := range path[same+1:] {
			v.tree[i].end = int32(len(v.tree))
		}
		path = path[:same+1]
		for depth := same; depth < len(token); depth++ {
			path = append(path, int32(len(v.tree)))
			v.tree = append(v.tree, treeNode{ids: int32(len(v.ids)), depth: uint16(depth + 1), last: token[depth]})
		}
		v.ids = append(v.ids, id)
		text = token
	}
	for _, i := range path {
		v.tree[i].end = int32(len(v.tree))
	}
	v.tree = append(v.tree, treeNode{ids: int32(len(v.ids))}) // the end of the last node's tokens
	v.makeStrings()
	return v
}

// tokens returns the tokens of a node of the tree.
func (v *Vocabulary) tokens(i int32) []int32 { return v.ids[v.tree[i].ids:v.tree[i+1].ids] }

// text returns the bytes of a token.
func (v *Vocabulary) text(id int) []byte {
	if id < 0 || id >= len(v.texts) {
		return nil
	}
	return v.texts[id]
}

// makeStrings computes the masks of strings.
func (v *Vocabulary) makeStrings() {
	p := newProgram()
	_ = p.finish(v) // strings are not too large
	n := len(p.nodes)
	steps := make([][256]int16, n)
	for i := range steps {
		for b := range steps[i] {
			steps[i][b] = int16(p.nodes[i].step(byte(b)))
		}
	}
	v.strings = make([]stringMask, n)
	at := make([]int16, v.longest+1)
	for first := stringNode; first < n; first++ {
		m := &v.strings[first]
		m.inside = make([]uint64, v.words)
		at[0] = int16(first)
		for i := int32(1); i < int32(len(v.tree)-1); {
			x := &v.tree[i]
			to := steps[at[x.depth-1]][x.last]
			if to == endNode {
				m.exits = append(m.exits, i)
			}
			if to <= endNode {
				i = x.end
				continue
			}
			at[x.depth] = to
			if p.spelled[to] <= mostDepth {
				for _, id := range v.tokens(i) {
					m.inside[id/64] |= 1 << (id % 64)
				}
			}
			i++
		}
	}
}
