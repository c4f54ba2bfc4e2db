package template

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Characters whose upper case or title case has several characters, from Unicode's SpecialCasing. Package unicode maps one
// character to one character only. Each word is a character and its replacement.
var (
	manyUpper = many("\u00dfSS \u0149\u02bcN \u01f0J\u030c \u0390\u0399\u0308\u0301 \u03b0\u03a5\u0308\u0301 \u0587\u0535\u0552 " +
		"\u1e96H\u0331 \u1e97T\u0308 \u1e98W\u030a \u1e99Y\u030a \u1e9aA\u02be \u1f50\u03a5\u0313 " +
		"\u1f52\u03a5\u0313\u0300 \u1f54\u03a5\u0313\u0301 \u1f56\u03a5\u0313\u0342 \u1f80\u1f08\u0399 " +
		"\u1f81\u1f09\u0399 \u1f82\u1f0a\u0399 \u1f83\u1f0b\u0399 \u1f84\u1f0c\u0399 \u1f85\u1f0d\u0399 " +
		"\u1f86\u1f0e\u0399 \u1f87\u1f0f\u0399 \u1f88\u1f08\u0399 \u1f89\u1f09\u0399 \u1f8a\u1f0a\u0399 " +
		"\u1f8b\u1f0b\u0399 \u1f8c\u1f0c\u0399 \u1f8d\u1f0d\u0399 \u1f8e\u1f0e\u0399 \u1f8f\u1f0f\u0399 " +
		"\u1f90\u1f28\u0399 \u1f91\u1f29\u0399 \u1f92\u1f2a\u0399 \u1f93\u1f2b\u0399 \u1f94\u1f2c\u0399 " +
		"\u1f95\u1f2d\u0399 \u1f96\u1f2e\u0399 \u1f97\u1f2f\u0399 \u1f98\u1f28\u0399 \u1f99\u1f29\u0399 " +
		"\u1f9a\u1f2a\u0399 \u1f9b\u1f2b\u0399 \u1f9c\u1f2c\u0399 \u1f9d\u1f2d\u0399 \u1f9e\u1f2e\u0399 " +
		"\u1f9f\u1f2f\u0399 \u1fa0\u1f68\u0399 \u1fa1\u1f69\u0399 \u1fa2\u1f6a\u0399 \u1fa3\u1f6b\u0399 " +
		"\u1fa4\u1f6c\u0399 \u1fa5\u1f6d\u0399 \u1fa6\u1f6e\u0399 \u1fa7\u1f6f\u0399 \u1fa8\u1f68\u0399 " +
		"\u1fa9\u1f69\u0399 \u1faa\u1f6a\u0399 \u1fab\u1f6b\u0399 \u1fac\u1f6c\u0399 \u1fad\u1f6d\u0399 " +
		"\u1fae\u1f6e\u0399 \u1faf\u1f6f\u0399 \u1fb2\u1fba\u0399 \u1fb3\u0391\u0399 \u1fb4\u0386\u0399 " +
		"\u1fb6\u0391\u0342 \u1fb7\u0391\u0342\u0399 \u1fbc\u0391\u0399 \u1fc2\u1fca\u0399 \u1fc3\u0397\u0399 " +
		"\u1fc4\u0389\u0399 \u1fc6\u0397\u0342 \u1fc7\u0397\u0342\u0399 \u1fcc\u0397\u0399 \u1fd2\u0399\u0308\u0300 " +
		"\u1fd3\u0399\u0308\u0301 \u1fd6\u0399\u0342 \u1fd7\u0399\u0308\u0342 \u1fe2\u03a5\u0308\u0300 " +
		"\u1fe3\u03a5\u0308\u0301 \u1fe4\u03a1\u0313 \u1fe6\u03a5\u0342 \u1fe7\u03a5\u0308\u0342 \u1ff2\u1ffa\u0399 " +
		"\u1ff3\u03a9\u0399 \u1ff4\u038f\u0399 \u1ff6\u03a9\u0342 \u1ff7\u03a9\u0342\u0399 \u1ffc\u03a9\u0399 \ufb00FF " +
		"\ufb01FI \ufb02FL \ufb03FFI \ufb04FFL \ufb05ST \ufb06ST \ufb13\u0544\u0546 \ufb14\u0544\u0535 " +
		"\ufb15\u0544\u053b \ufb16\u054e\u0546 \ufb17\u0544\u053d ")
	manyTitle = many("\u00dfSs \u0149\u02bcN \u01f0J\u030c \u0390\u0399\u0308\u0301 \u03b0\u03a5\u0308\u0301 \u0587\u0535\u0582 " +
		"\u1e96H\u0331 \u1e97T\u0308 \u1e98W\u030a \u1e99Y\u030a \u1e9aA\u02be \u1f50\u03a5\u0313 " +
		"\u1f52\u03a5\u0313\u0300 \u1f54\u03a5\u0313\u0301 \u1f56\u03a5\u0313\u0342 \u1fb2\u1fba\u0345 " +
		"\u1fb4\u0386\u0345 \u1fb6\u0391\u0342 \u1fb7\u0391\u0342\u0345 \u1fc2\u1fca\u0345 \u1fc4\u0389\u0345 " +
		"\u1fc6\u0397\u0342 \u1fc7\u0397\u0342\u0345 \u1fd2\u0399\u0308\u0300 \u1fd3\u0399\u0308\u0301 " +
		"\u1fd6\u0399\u0342 \u1fd7\u0399\u0308\u0342 \u1fe2\u03a5\u0308\u0300 \u1fe3\u03a5\u0308\u0301 " +
		"\u1fe4\u03a1\u0313 \u1fe6\u03a5\u0342 \u1fe7\u03a5\u0308\u0342 \u1ff2\u1ffa\u0345 \u1ff4\u038f\u0345 " +
		"\u1ff6\u03a9\u0342 \u1ff7\u03a9\u0342\u0345 \ufb00Ff \ufb01Fi \ufb02Fl \ufb03Ffi \ufb04Ffl \ufb05St \ufb06St " +
		"\ufb13\u0544\u0576 \ufb14\u0544\u0565 \ufb15\u0544\u056b \ufb16\u054e\u0576 \ufb17\u0544\u056d ")
)

func many(words string) map[rune]string {
	m := map[rune]string{}
	for w := range strings.FieldsSeq(words) {
		c, n := utf8.DecodeRuneInString(w)
		m[c] = w[n:]
	}
	return m
}

// mapped replaces each character by its entry in table, or else by the result of f.
func mapped(s string, table map[rune]string, f func(rune) rune) string {
	var b strings.Builder
	for _, c := range s {
		writeCase(&b, c, table, f)
	}
	return b.String()
}

func writeCase(b *strings.Builder, c rune, table map[rune]string, f func(rune) rune) {
	if t, ok := table[c]; ok {
		b.WriteString(t)
	} else {
		b.WriteRune(f(c))
	}
}

func upper(s string) string { return mapped(s, manyUpper, unicode.ToUpper) }

// lower implements Python's str.lower. A capital sigma at the end of a word becomes a final sigma.
func lower(s string) string {
	runes := []rune(s)
	var b strings.Builder
	for i := range runes {
		lowerAt(&b, runes, i)
	}
	return b.String()
}

func lowerAt(b *strings.Builder, runes []rune, i int) {
	switch c := runes[i]; c {
	case '\u0130':
		b.WriteString("i\u0307")
	case '\u03a3':
		before, after := i-1, i+1
		for before >= 0 && ignorable(runes[before]) {
			before--
		}
		for after < len(runes) && ignorable(runes[after]) {
			after++
		}
		if before >= 0 && cased(runes[before]) && (after == len(runes) || !cased(runes[after])) {
			b.WriteRune('\u03c2')
		} else {
			b.WriteRune('\u03c3')
		}
	default:
		b.WriteRune(unicode.ToLower(c))
	}
}

func isUpperRune(c rune) bool { return unicode.IsUpper(c) || unicode.Is(unicode.Other_Uppercase, c) }

func isLowerRune(c rune) bool { return unicode.IsLower(c) || unicode.Is(unicode.Other_Lowercase, c) }

func cased(c rune) bool { return isUpperRune(c) || isLowerRune(c) || unicode.IsTitle(c) }

// ignorable reports whether c has Unicode's property Case_Ignorable.
func ignorable(c rune) bool {
	return unicode.In(c, unicode.Mn, unicode.Me, unicode.Cf, unicode.Lm, unicode.Sk) ||
		strings.ContainsRune("'.:\u00b7\u0387\u055f\u05f4\u2018\u2019\u2024\u2027\ufe13\ufe52\ufe55\uff07\uff0e\uff1a", c)
}

// title implements Python's str.title. A letter after a cased letter becomes lower case. Any other letter becomes title case.
func title(s string) string {
	return titled(s, func(runes []rune, i int) bool { return i == 0 || !cased(runes[i-1]) })
}

// titleWords implements Jinja's filter title. Words begin only after white space, hyphens and opening brackets. The first
// letter of a word becomes upper case.
func titleWords(s string) string {
	var b strings.Builder
	for s != "" {
		n := strings.IndexFunc(s, func(c rune) bool { return !between(c) })
		if n < 0 {
			n = len(s)
		}
		b.WriteString(s[:n])
		s = s[n:]
		n = strings.IndexFunc(s, between)
		if n < 0 {
			n = len(s)
		}
		for i, c := range s[:n] {
			if i > 0 {
				b.WriteString(lower(s[i:n]))
				break
			}
			writeCase(&b, c, manyUpper, unicode.ToUpper)
		}
		s = s[n:]
	}
	return b.String()
}

func between(c rune) bool { return strings.ContainsRune("-({[<", c) || isSpace(c) }

// capitalize implements Python's str.capitalize. The first character becomes title case, and the others become lower case.
func capitalize(s string) string {
	return titled(s, func(_ []rune, i int) bool { return i == 0 })
}

func titled(s string, large func(runes []rune, i int) bool) string {
	runes := []rune(s)
	var b strings.Builder
	for i, c := range runes {
		if large(runes, i) {
			writeCase(&b, c, manyTitle, unicode.ToTitle)
		} else {
			lowerAt(&b, runes, i)
		}
	}
	return b.String()
}

func swapcase(s string) string {
	runes := []rune(s)
	var b strings.Builder
	for i, c := range runes {
		switch {
		case isUpperRune(c):
			lowerAt(&b, runes, i)
		case isLowerRune(c):
			writeCase(&b, c, manyUpper, unicode.ToUpper)
		default:
			b.WriteRune(c)
		}
	}
	return b.String()
}

// isUpper reports whether s has an upper case character and no other cased character.
func isUpper(s string) bool {
	return strings.ContainsFunc(s, isUpperRune) && !strings.ContainsFunc(s, func(c rune) bool { return isLowerRune(c) || unicode.IsTitle(c) })
}

// isLower reports whether s has a lower case character and no other cased character.
func isLower(s string) bool {
	return strings.ContainsFunc(s, isLowerRune) && !strings.ContainsFunc(s, func(c rune) bool { return isUpperRune(c) || unicode.IsTitle(c) })
}
