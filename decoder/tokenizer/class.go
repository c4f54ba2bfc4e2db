package tokenizer

import (
	"slices"
	"unicode"
)

// set is a set of characters: ranges in ascending order that neither overlap nor touch.
type set [][2]rune

const lastRune = unicode.MaxRune

// setOf returns the union of ranges in any order.
func setOf(ranges ...[2]rune) set {
	slices.SortFunc(ranges, func(a, b [2]rune) int { return int(a[0] - b[0]) })
	var s set
	for _, r := range ranges {
		if n := len(s); n > 0 && r[0] <= s[n-1][1]+1 {
			s[n-1][1] = max(s[n-1][1], r[1])
		} else {
			s = append(s, r)
		}
	}
	return s
}

func (s set) union(others ...set) set {
	return setOf(slices.Concat(append([]set{s}, others...)...)...)
}

func (s set) negate() set {
	var n set
	next := rune(0)
	for _, r := range s {
		if next < r[0] {
			n = append(n, [2]rune{next, r[0] - 1})
		}
		next = r[1] + 1
	}
	if next <= lastRune {
		n = append(n, [2]rune{next, lastRune})
	}
	return n
}

func (s set) intersect(o set) set { return s.negate().union(o.negate()).negate() }

// size returns the number of characters.
func (s set) size() int {
	n := 0
	for _, r := range s {
		n += int(r[1]-r[0]) + 1
	}
	return n
}

// fold returns s with the characters that differ from a character of s only by case.
func (s set) fold() set {
	var more [][2]rune
	for _, r := range s {
		for c := r[0]; c <= r[1]; c++ {
			for f := unicode.SimpleFold(c); f != c; f = unicode.SimpleFold(f) {
				more = append(more, [2]rune{f, f})
			}
		}
	}
	return s.union(more)
}

// fromTables returns the union of the characters of tables.
func fromTables(tables ...*unicode.RangeTable) set {
	var all [][2]rune
	add := func(lo, hi, stride rune) {
		if stride == 1 {
			all = append(all, [2]rune{lo, hi})
			return
		}
		for c := lo; c <= hi; c += stride {
			all = append(all, [2]rune{c, c})
		}
	}
	for _, t := range tables {
		for _, r := range t.R16 {
			add(rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
		for _, r := range t.R32 {
			add(rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
	}
	return setOf(all...)
}

// category returns the characters of a general category of Unicode 16. name has one or two letters.
func category(name string) (set, bool) {
	if name == "Cn" || name == "C" {
		return nil, false // no pattern in use has unassigned characters
	}
	t, ok := unicode.Categories[name]
	if !ok || len(name) > 2 {
		return nil, false
	}
	var moved, here [][2]rune
	for _, c := range since15 {
		moved = append(moved, [2]rune{c.lo, c.hi})
		if c.category == name || c.category[:1] == name {
			here = append(here, [2]rune{c.lo, c.hi})
		}
	}
	return fromTables(t).intersect(setOf(moved...).negate()).union(here), true
}

// property returns the characters of \p{name}: a general category or a script.
func property(name string) (set, bool) {
	if s, ok := category(name); ok {
		return s, true
	}
	t, ok := unicode.Scripts[name]
	if !ok {
		return nil, false
	}
	s := fromTables(t)
	if name == "Han" {
		s = s.union(set{{0x2ebf0, 0x2ee5d}}) // of Unicode 15.1
	}
	return s, true
}

var (
	spaces = fromTables(unicode.White_Space)
	digits = func() set { s, _ := category("Nd"); return s }()
	// wordRunes is \w of Unicode's regular expressions (UTS 18). In Oniguruma, \w in a set is wordRunes. Outside a set, \w
	// also has the numbers of Latin-1.
	wordRunes   = fromTables(unicode.L, unicode.Nl, unicode.Other_Alphabetic, unicode.M, unicode.Nd, unicode.Pc, newLetters, newNumbers, newMarks)
	wordNumbers = set{{0xb2, 0xb3}, {0xb9, 0xb9}, {0xbc, 0xbe}}
)

// class is a set with a membership test in constant time.
type class struct {
	ascii [2]uint64
	pages [(lastRune + 1) / 256]uint16 // for each page of 256 characters, an index into bits
	bits  [][4]uint64                  // bits[0] is empty
}

func newClass(s set) *class {
	c := &class{bits: make([][4]uint64, 1)}
	full := uint16(0)
	for _, r := range s {
		for page := r[0] >> 8; page <= r[1]>>8; page++ {
			lo, hi := max(r[0], page<<8)&0xff, min(r[1], page<<8|0xff)&0xff
			if lo == 0 && hi == 0xff {
				if full == 0 {
					full = uint16(len(c.bits))
					c.bits = append(c.bits, [4]uint64{^uint64(0), ^uint64(0), ^uint64(0), ^uint64(0)})
				}
				c.pages[page] = full
				continue
			}
			if c.pages[page] == 0 {
				c.pages[page] = uint16(len(c.bits))
				c.bits = append(c.bits, [4]uint64{})
			}
			b := &c.bits[c.pages[page]]
			for i := lo; i <= hi; i++ {
				b[i>>6] |= 1 << (i & 63)
			}
		}
	}
	c.ascii = [2]uint64(c.bits[c.pages[0]][:2])
	return c
}

func (c *class) has(r rune) bool {
	if uint32(r) < 128 {
		return c.ascii[r>>6]>>(r&63)&1 != 0
	}
	return c.bits[c.pages[r>>8]][r>>6&3]>>(r&63)&1 != 0
}
