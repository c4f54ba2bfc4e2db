package tokenizer

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// normalizer changes a text before it is cut into words. moved says that the beginning of the text was removed: then no
// piece of it is a first one.
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
			// A part of the first character is not removed if all of it is not.
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

// form is a normal form as Hugging Face's tokenizers have it, of Unicode 9: characters that are not in Unicode 9 stay
// as they are and where they are. Characters since Go's version of Unicode are the same in both.
func form(f norm.Form) normalizer {
	return always(func(text string) string {
		if f == norm.NFC && isASCII(text) {
			return text
		}
		var b strings.Builder
		done := 0 // of text
		put := func(end int) {
			if done < end {
				b.WriteString(f.String(text[done:end]))
			}
		}
		marks := 0 // in a row, before i
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
				// From the beginning of a character before the marks to their end.
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

// combining are the characters that can have a combining class.
var combining = func() *class {
	s, _ := category("M")
	return newClass(s)
}()

// longRun is how many combining characters in a row package norm does not get: it puts a character of its own into a run
// of 30, and a character can be several marks.
const longRun = 7

// longForm is f for a text with many marks in a row. It begins at a boundary of f, and so does what is behind it.
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
		starter, last := -1, -1 // the last starter, and the last character that was kept behind it
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

// compose returns the character that two characters of a normal form are in NFC.
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

// replace replaces each match.
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

// lower is the lower case of each character by itself.
func lower(text string) string {
	if !strings.ContainsRune(text, 'İ') {
		return strings.Map(toLower, text)
	}
	return strings.Map(toLower, strings.ReplaceAll(text, "İ", "i\u0307"))
}

// toLower is the lower case of Unicode 17.
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

// stripAccents removes the combining marks of Unicode 9.
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
