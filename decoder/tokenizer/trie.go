package tokenizer

import (
	"slices"
	"strings"
)

// trie finds the keys that are prefixes of a text.
type trie struct {
	nodes  []trieNode // the root is nodes[0]
	labels []byte     // labels of the nodes
	root   [256]int32 // children of the root
}

type trieNode struct {
	first    int32 // first child; the children are contiguous, sorted by label
	children int32 // number of children
	value    int32 // value of the key that ends here; -1: none
}

type trieKey struct {
	text  string
	value int32
}

// newTrie returns a trie of keys, and sorts keys. The keys must be distinct and nonempty.
func newTrie(keys []trieKey) *trie {
	slices.SortFunc(keys, func(a, b trieKey) int { return strings.Compare(a.text, b.text) })
	t := &trie{nodes: make([]trieNode, 1, 2*len(keys)+1), labels: make([]byte, 1, 2*len(keys)+1)}
	type part struct{ lo, hi, depth int32 } // keys of a node
	parts := []part{{0, int32(len(keys)), 0}}
	for n := 0; n < len(parts); n++ {
		p := parts[n]
		node := trieNode{value: -1, first: int32(len(t.nodes))}
		if p.lo < p.hi && len(keys[p.lo].text) == int(p.depth) {
			node.value = keys[p.lo].value
			p.lo++
		}
		for p.lo < p.hi {
			c := keys[p.lo].text[p.depth]
			end := p.lo + 1
			for end < p.hi && keys[end].text[p.depth] == c {
				end++
			}
			parts = append(parts, part{p.lo, end, p.depth + 1})
			t.nodes, t.labels = append(t.nodes, trieNode{}), append(t.labels, c)
			node.children++
			p.lo = end
		}
		t.nodes[n] = node
	}
	for i := range t.root {
		t.root[i] = t.search(0, byte(i))
	}
	return t
}

// maxTrie is the maximum total length of the keys of a trie in bytes. One byte of a key takes 25 bytes of memory.
const maxTrie = 16 << 20

// newTokenTrie returns a trie of the tokens of a file, or an error if the tokens exceed maxTrie.
func newTokenTrie(file string, keys []trieKey) (*trie, error) {
	size := 0
	for _, k := range keys {
		if size += len(k.text); size > maxTrie {
			return nil, refuse(file, "tokens of more than %d bytes", maxTrie)
		}
	}
	return newTrie(keys), nil
}

// step returns the child of a node for the byte c, or -1 if there is none.
func (t *trie) step(node int32, c byte) int32 {
	if node == 0 {
		return t.root[c]
	}
	return t.search(node, c)
}

func (t *trie) search(node int32, c byte) int32 {
	n := t.nodes[node]
	lo, hi := n.first, n.first+n.children
	for lo < hi {
		mid := int32(uint32(lo+hi) / 2)
		if t.labels[mid] < c {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo < n.first+n.children && t.labels[lo] == c {
		return lo
	}
	return -1
}

// longest returns the value and the length of the longest key that is a prefix of a text. n is 0 if there is none.
func (t *trie) longest(text string) (value int32, n int) {
	node := int32(0)
	for i := 0; i < len(text); i++ {
		if node = t.step(node, text[i]); node < 0 {
			break
		}
		if v := t.nodes[node].value; v >= 0 {
			value, n = v, i+1
		}
	}
	return value, n
}
