package tokenizer

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"
)

// charsmap is SentencePiece's precompiled_charsmap, a map from texts to replacements. The encoding has three parts:
//
//   - four bytes: the length of the double array in bytes
//   - a double-array trie of darts-clone, whose values are offsets of replacements
//   - the replacements, each terminated by a zero byte
type charsmap struct {
	array  []uint32
	values []byte
}

func parseCharsmap(data []byte) (*charsmap, error) {
	if len(data) == 0 {
		return nil, nil
	}
	if len(data) < 4 {
		return nil, fmt.Errorf("a precompiled_charsmap of %d bytes", len(data))
	}
	n := binary.LittleEndian.Uint32(data)
	data = data[4:]
	if uint64(n) > uint64(len(data)) || n%4 != 0 || n == 0 {
		return nil, fmt.Errorf("a precompiled_charsmap of %d bytes whose array has %d", len(data)+4, n)
	}
	m := &charsmap{values: data[n:], array: make([]uint32, n/4)}
	for i := range m.array {
		m.array[i] = binary.LittleEndian.Uint32(data[4*i:])
	}
	if len(m.values) > 0 && m.values[len(m.values)-1] != 0 {
		return nil, fmt.Errorf("a precompiled_charsmap without a zero byte at its end")
	}
	for value := range bytes.SplitSeq(m.values, []byte{0}) {
		if len(value) > maxContent {
			return nil, fmt.Errorf("a precompiled_charsmap with a replacement of %d bytes, more than %d", len(value), maxContent)
		}
	}
	return m, nil
}

// prefix returns the replacement of the longest prefix of text that has a replacement. With shortest, prefix returns the
// replacement of the shortest such prefix. n is the length of the prefix, or 0 if no prefix has a replacement.
func (m *charsmap) prefix(text string, shortest bool) (by []byte, n int) {
	value := uint32(0)
	offset := func(unit uint32) uint32 { return unit >> 10 << (unit & (1 << 9) >> 6) }
	at := offset(m.array[0])
	for i := 0; i < len(text); i++ {
		c := uint32(text[i])
		at ^= c
		if c == 0 || uint64(at) >= uint64(len(m.array)) {
			break
		}
		unit := m.array[at]
		if unit&(1<<31|0xff) != c {
			break
		}
		at ^= offset(unit)
		if unit>>8&1 == 0 {
			continue
		}
		if uint64(at) >= uint64(len(m.array)) {
			break
		}
		value, n = m.array[at]&(1<<31-1), i+1
		if shortest {
			break
		}
	}
	if n == 0 || uint64(value) >= uint64(len(m.values)) {
		return nil, 0
	}
	by = m.values[value:]
	return by[:bytes.IndexByte(by, 0)], n
}

// normalize is the normalizer Precompiled of Hugging Face's tokenizers. A grapheme cluster of up to five bytes is replaced
// whole by the replacement of the shortest prefix of the cluster, if there is one. Otherwise the characters of the cluster
// are replaced one by one.
func (m *charsmap) normalize(text string) string {
	var b strings.Builder
	b.Grow(len(text))
	for text != "" {
		n := clusterLen(text)
		if n < 6 {
			if by, ok := m.prefix(text[:n], true); ok > 0 {
				b.Write(by)
				text = text[n:]
				continue
			}
		}
		for cluster := text[:n]; cluster != ""; {
			_, size := utf8.DecodeRuneInString(cluster)
			if by, ok := m.prefix(cluster[:size], true); ok > 0 {
				b.Write(by)
			} else {
				b.WriteString(cluster[:size])
			}
			cluster = cluster[size:]
		}
		text = text[n:]
	}
	return b.String()
}

// clusterLen returns the length in bytes of the first extended grapheme cluster of a text (UAX 29). For a cluster of six
// bytes or more, clusterLen returns some number from six on. clusterLen omits the rules that only affect clusters of six
// bytes or more (flags, emoji and Hangul).
func clusterLen(text string) int {
	r, n := utf8.DecodeRuneInString(text)
	if r < 0x300 && n < len(text) && text[n] < utf8.RuneSelf && r != '\r' {
		return n
	}
	if r == '\r' && strings.HasPrefix(text[n:], "\n") {
		return n + 1
	}
	if clusterControl.has(r) {
		return n
	}
	for clusterPrepend.has(r) && n < len(text) {
		next, size := utf8.DecodeRuneInString(text[n:])
		if clusterControl.has(next) {
			return n
		}
		r = next
		n += size
	}
	for n < len(text) {
		next, size := utf8.DecodeRuneInString(text[n:])
		if !clusterExtend.has(next) {
			break
		}
		n += size
	}
	return n
}

// Character classes of grapheme clusters, of Unicode 16.
var clusterControl, clusterPrepend, clusterExtend = func() (control, prepend, extend *class) {
	kind := func(names ...string) set {
		var s set
		for _, name := range names {
			c, _ := category(name)
			s = s.union(c)
		}
		return s
	}
	p := set{
		{0x600, 0x605}, {0x6dd, 0x6dd}, {0x70f, 0x70f}, {0x890, 0x891}, {0x8e2, 0x8e2}, {0xd4e, 0xd4e}, {0x110bd, 0x110bd}, {0x110cd, 0x110cd},
		{0x111c2, 0x111c3}, {0x113d1, 0x113d1}, {0x1193f, 0x1193f}, {0x11941, 0x11941}, {0x11a3a, 0x11a3a}, {0x11a84, 0x11a89}, {0x11d46, 0x11d46}, {0x11f02, 0x11f02},
	}
	joiners := set{{0x200c, 0x200d}}
	notMarks := set{
		{0x102b, 0x102c}, {0x1038, 0x1038}, {0x1062, 0x1064}, {0x1067, 0x106d}, {0x1083, 0x1083}, {0x1087, 0x108c}, {0x108f, 0x108f},
		{0x109a, 0x109c}, {0x1a61, 0x1a61}, {0x1a63, 0x1a64}, {0xaa7b, 0xaa7b}, {0xaa7d, 0xaa7d}, {0x11720, 0x11721},
	}
	tags := set{{0xe0020, 0xe007f}}
	e := kind("Mn", "Me").union(kind("Mc").intersect(notMarks.negate()), joiners, tags, set{{0xe33, 0xe33}, {0xeb3, 0xeb3}, {0xff9e, 0xff9f}, {0x1f3fb, 0x1f3ff}})
	unassigned := set{{0x2065, 0x2065}, {0xfff0, 0xfff8}, {0xe0000, 0xe0000}, {0xe0002, 0xe001f}, {0xe0080, 0xe00ff}, {0xe01f0, 0xe0fff}}
	c := kind("Zl", "Zp", "Cc", "Cf").union(unassigned).intersect(p.union(joiners, tags).negate())
	return newClass(c), newClass(p), newClass(e)
}()
