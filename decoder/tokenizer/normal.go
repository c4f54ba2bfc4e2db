package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer changes a text before the pre-tokenizer splits the text into words. moved reports whether the beginning of
// the text was removed. If moved is true, no piece of the text counts as the first piece.
type normalizer func(text string) (result string, moved bool, err error)

// chain applies normalizers in order.
func chain(all []normalizer) normalizer {
	var chained normalizer
	chained = func(text string) (string, bool, error) {
		original, moved := text, false
		for _, n := range all {
			result, m, err := n(text)
			if err != nil {
				return "", false, err
			}
			text, moved = result, moved || m
		}
		if moved {
			// The beginning counts as removed only if the whole first character was removed.
			if _, size := utf8.DecodeRuneInString(original); size < len(original) {
				first, _, err := chained(original[:size])
				moved = err != nil || first == ""
			}
		}
		return text, moved, nil
	}
	return chained
}

func always(f func(string) string) normalizer {
	return func(text string) (string, bool, error) { return f(text), false, nil }
}

// forms are Unicode's normal forms.
var forms = map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}

// form returns the normalizer of a normal form of Unicode 9, the version of Hugging Face's tokenizers. Characters that are
// not in Unicode 9 are neither changed nor moved. Package norm and Hugging Face's tokenizers both leave characters newer
// than Go's version of Unicode unchanged.
func form(f norm.Form) normalizer {
	return always(func(text string) string {
		if f == norm.NFC && isASCII(text) {
			return text
		}
		var b strings.Builder
		done := 0 // text[:done] is in b
		put := func(end int) {
			if done < end {
				b.WriteString(f.String(text[done:end]))
			}
		}
		marks := 0 // consecutive marks before i
		for i := 0; i < len(text); {
			r, size := utf8.DecodeRuneInString(text[i:])
			i += size
			switch {
			case r < 0x300:
				marks = 0
			case since9.has(r):
				put(i - size)
				b.WriteString(text[i-size : i])
				done, marks = i, 0
			case !combining.has(r):
				marks = 0
			default:
				if marks++; marks < longRun {
					continue
				}
				// The range for longForm goes from a boundary before the marks to the end of the marks.
				begin := i
				for begin > done {
					_, size := utf8.DecodeLastRuneInString(text[:begin])
					begin -= size
					if f.PropertiesString(text[begin:]).BoundaryBefore() {
						break
					}
				}
				for i < len(text) {
					r, size := utf8.DecodeRuneInString(text[i:])
					if !combining.has(r) || since9.has(r) {
						break
					}
					i += size
				}
				put(begin)
				b.WriteString(longForm(f, text[begin:i]))
				done, marks = i, 0
			}
		}
		if done == 0 {
			return f.String(text)
		}
		put(len(text))
		return b.String()
	})
}

func isASCII(text string) bool {
	for i := range len(text) {
		if text[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// combining is the class of the characters that can have a nonzero combining class.
var combining = func() *class {
	s, _ := category("M")
	return newClass(s)
}()

// longRun is the number of consecutive combining characters from which longForm replaces package norm. Package norm
// inserts U+034F into a run of 30 combining characters, and a character can decompose into several.
const longRun = 7

// longForm returns f of a text with many consecutive marks. The text must begin and end at a boundary of f.
func longForm(f norm.Form, text string) string {
	parts := norm.NFD
	if f == norm.NFKC || f == norm.NFKD {
		parts = norm.NFKD
	}
	type char struct {
		r   rune
		ccc uint8
	}
	var all []char
	for i, r := range text {
		size := utf8.RuneLen(r)
		for _, r := range parts.String(text[i:min(len(text), i+size)]) {
			all = append(all, char{r, norm.NFD.PropertiesString(string(r)).CCC()})
		}
	}
	for i := 0; i < len(all); {
		n := 1
		if all[i].ccc > 0 {
			for i+n < len(all) && all[i+n].ccc > 0 {
				n++
			}
			slices.SortStableFunc(all[i:i+n], func(a, b char) int { return int(a.ccc) - int(b.ccc) })
		}
		i += n
	}
	if f == norm.NFC || f == norm.NFKC {
		starter, last := -1, -1 // indices in kept of the last starter and of the last character
		kept := all[:0]
		for _, c := range all {
			if starter >= 0 && (last == starter || kept[last].ccc > 0 && kept[last].ccc < c.ccc) {
				if r, ok := compose(kept[starter].r, c.r); ok {
					kept[starter].r = r
					continue
				}
			}
			last = len(kept)
			if c.ccc == 0 {
				starter = last
			}
			kept = append(kept, c)
		}
		all = kept
	}
	var b strings.Builder
	for _, c := range all {
		b.WriteRune(c.r)
	}
	return b.String()
}

// compose returns the character that two characters compose to in NFC, and whether there is one.
func compose(a, b rune) (rune, bool) {
	s := norm.NFC.String(string([]rune{a, b}))
	r, size := utf8.DecodeRuneInString(s)
	return r, size == len(s)
}

func prepend(prefix string) normalizer {
	return always(func(text string) string {
		if text == "" {
			return ""
		}
		return prefix + text
	})
}

// replace returns a normalizer that replaces each match.
func replace(matches finder, by string) normalizer {
	return func(text string) (string, bool, error) {
		var b strings.Builder
		done, moved := 0, false
		err := matches(text, func(start, end int) bool {
			moved = moved || by == "" && b.Len() == 0 && start == done
			b.WriteString(text[done:start])
			b.WriteString(by)
			done = end
			return true
		})
		if done == 0 {
			return text, false, err
		}
		b.WriteString(text[done:])
		return b.String(), moved, err
	}
}

func strip(left, right bool) normalizer {
	return func(text string) (string, bool, error) {
		moved := false
		if left {
			n := len(text)
			text = strings.TrimLeftFunc(text, unicode.IsSpace)
			moved = len(text) < n
		}
		if right {
			text = strings.TrimRightFunc(text, unicode.IsSpace)
		}
		return text, moved, nil
	}
}

// lower maps each character to lower case, regardless of context.
func lower(text string) string {
	if !strings.ContainsRune(text, 'İ') {
		return strings.Map(toLower, text)
	}
	return strings.Map(toLower, strings.ReplaceAll(text, "İ", "i\u0307"))
}

// toLower returns the lower case of a character in Unicode 17.
func toLower(r rune) rune {
	switch {
	case r < utf8.RuneSelf:
	case r == 0x1c89, r == 0xa7da, r == 0xa7cc, r == 0xa7ce, r == 0xa7d2, r == 0xa7d4:
		return r + 1
	case r == 0xa7cb:
		return 0x264
	case r == 0xa7dc:
		return 0x19b
	case r >= 0x10d50 && r <= 0x10d65:
		return r + 0x20
	case r >= 0x16ea0 && r <= 0x16eb8:
		return r + 0x1b
	}
	return unicode.ToLower(r)
}

// stripAccents is a normalizer that removes the combining marks of Unicode 9.
func stripAccents(text string) (string, bool, error) {
	first, moved := true, false
	result := strings.Map(func(r rune) rune {
		if r >= 0x300 && (unicode.Is(unicode.M, r) && !since9.has(r) || r == 0x1cf2 || r == 0x1cf3) {
			moved = moved || first
			return -1
		}
		first = false
		return r
	}, text)
	return result, moved, nil
}
