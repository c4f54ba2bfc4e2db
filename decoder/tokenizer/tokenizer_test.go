package tokenizer

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func readJSON(t *testing.T, path string, dst any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, dst); err != nil {
		t.Fatal(err)
	}
}

// TestOPT compares with ids of OPT's published vocabulary, if a copy of the
// vocabulary is next to the repository.
func TestOPT(t *testing.T) {
	dir := filepath.FromSlash("../../../../shared/data/opt-tokenizer")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("no copy of OPT's vocabulary: %v", err)
	}
	tok, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	var golden []struct {
		Text string
		IDs  []int
	}
	readJSON(t, filepath.Join(dir, "golden.json"), &golden)
	if len(golden) == 0 {
		t.Fatal("golden.json is empty")
	}
	for _, g := range golden {
		if ids := encode(tok, g.Text, Options{Bare: true}); !slices.Equal(ids, g.IDs) {
			t.Errorf("%q: ids %v, want %v", g.Text, ids, g.IDs)
		}
		if ids := encode(tok, g.Text, Options{}); !slices.Equal(ids, append([]int{2}, g.IDs...)) {
			t.Errorf("%q: ids %v do not begin with </s>", g.Text, ids)
		}
		if text := tok.Decode(g.IDs); text != g.Text {
			t.Errorf("decoded %q, want %q", text, g.Text)
		}
	}
	if tok.VocabSize() != 50265 || tok.EOS() != 2 {
		t.Errorf("size %d and EOS %d, want 50265 and 2", tok.VocabSize(), tok.EOS())
	}
	// Quadratic merging would take minutes.
	if ids := encode(tok, strings.Repeat("a", 1<<20), Options{Bare: true}); !slices.Equal(ids, slices.Repeat([]int{44172}, 1<<18)) {
		t.Errorf("a megabyte of one letter is %d ids, not 2^18 times aaaa", len(ids))
	}
}

func TestSplit(t *testing.T) {
	var golden [][2]json.RawMessage
	readJSON(t, "testdata/split.json", &golden)
	for _, g := range golden {
		var text string
		var want []string
		if err := errors.Join(json.Unmarshal(g[0], &text), json.Unmarshal(g[1], &want)); err != nil {
			t.Fatal(err)
		}
		if got := words(text); !slices.Equal(got, want) {
			t.Errorf("%q: words %q, want %q", text, got, want)
		}
	}
}

func TestDecodeBytes(t *testing.T) {
	tok := small(t)
	var golden [][2]string
	readJSON(t, "testdata/utf8.json", &golden)
	for _, g := range golden {
		raw, err := hex.DecodeString(g[0])
		if err != nil {
			t.Fatal(err)
		}
		var ids []int
		for _, b := range raw {
			ids = append(ids, tok.bytes[b])
		}
		if text := tok.Decode(ids); text != g[1] {
			t.Errorf("% x: %q, want %q", raw, text, g[1])
		}
	}
}

func TestSmallVocabulary(t *testing.T) {
	tok := small(t, "a b", "Ġ ab", "ab c", "Ġab c", "Ã ©")
	id := func(token string) int {
		t.Helper()
		i, ok := tok.ID(token)
		if back, ok2 := tok.Token(i); !ok || !ok2 || back != token {
			t.Fatalf("token %q has id %d (%v), and that token %q", token, i, ok, back)
		}
		return i
	}
	for _, c := range []struct {
		text string
		want []int
	}{
		{"", []int{2}},
		{"abc", []int{2, id("abc")}},
		{"abc abc", []int{2, id("abc"), id("Ġabc")}},
		{"ab  ab", []int{2, id("ab"), id("Ġ"), id("Ġab")}},
		{"é\n", []int{2, id("Ã©"), id("Ċ")}},
		{"</s>", []int{2, id("<"), id("/"), id("s"), id(">")}},
	} {
		ids := encode(tok, c.text, Options{})
		if !slices.Equal(ids, c.want) {
			t.Errorf("%q: ids %v, want %v", c.text, ids, c.want)
		}
		if text := tok.Decode(ids); text != c.text {
			t.Errorf("%q: decoded %q", c.text, text)
		}
	}
	if got, want := tok.VocabSize(), 4+256+5; got != want {
		t.Errorf("size %d, want %d", got, want)
	}
	if _, ok := tok.ID("abcd"); ok {
		t.Error("a token that is not there has an id")
	}
	if _, ok := tok.Token(tok.VocabSize()); ok {
		t.Error("an id that is not there has a token")
	}
	for _, c := range []struct {
		ids  []int
		want string
	}{
		{[]int{0, 1, 2, 3}, "<s><unk>"},
		{[]int{id("a"), -1, 1 << 30, id("b")}, "a\ufffd\ufffdb"},
		{[]int{id("Ã"), 1 << 30}, "\ufffd\ufffd"},
		{[]int{id("Ã"), 2, id("©")}, "é"},
	} {
		if text := tok.Decode(c.ids); text != c.want {
			t.Errorf("%v: decoded %q, want %q", c.ids, text, c.want)
		}
	}
}

// TestForeignToken checks that a token with a character that stands for no byte
// is decoded to the token itself.
func TestForeignToken(t *testing.T) {
	v, m := pairFiles(t)
	v = strings.Replace(v, `"<s>":0`, `"日本":0`, 1)
	tok, err := New(strings.NewReader(v), strings.NewReader(m))
	if err != nil {
		t.Fatal(err)
	}
	if text := tok.Decode([]int{0}); text != "日本" {
		t.Errorf("decoded %q", text)
	}
}

func TestDecoderHoldsBack(t *testing.T) {
	tok := small(t)
	d := tok.NewDecoder()
	text := "é👩!"
	var out []string
	for _, id := range encode(tok, text, Options{Bare: true}) {
		out = append(out, d.Add(id))
	}
	want := []string{"", "é", "", "", "", "👩", "!"}
	if !slices.Equal(out, want) || d.Flush() != "" {
		t.Errorf("pieces %q, want %q", out, want)
	}
	d.Add(tok.bytes[0xe6])
	if end := d.Flush(); end != "\ufffd" {
		t.Errorf("an incomplete character ends as %q", end)
	}
	if end := d.Flush(); end != "" {
		t.Errorf("flushed %q twice", end)
	}
}

func TestEncodeLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		merges := drawMerges(t)
		tok := small(t, merges...)
		text := rapid.OneOf(
			rapid.String(),
			rapid.StringOfN(rapid.SampledFrom([]rune("aaabbc ''é1\n日")), 0, 200, -1),
		).Draw(t, "text")
		ids := encode(tok, text, Options{Bare: true})
		var want []int
		for _, w := range words(text) {
			want = append(want, encodeNaively(tok, w)...)
		}
		if !slices.Equal(ids, want) {
			t.Fatalf("ids %v, want %v", ids, want)
		}
		if back := tok.Decode(ids); back != text {
			t.Fatalf("decoded %q", back)
		}
		if back := tok.Decode(encode(tok, text, Options{})); back != text {
			t.Fatalf("decoded %q with </s>", back)
		}
	})
}

// TestDecoderLaws checks that Decoder and Decode give the same valid UTF-8 for any ids.
func TestDecoderLaws(t *testing.T) {
	tok := small(t, "Ã ©", "æ Ĺ", "Ĺ ¥")
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOf(rapid.IntRange(-1, tok.VocabSize())).Draw(t, "ids")
		d := tok.NewDecoder()
		var text strings.Builder
		for _, id := range ids {
			piece := d.Add(id)
			if !utf8.ValidString(piece) {
				t.Fatalf("a piece %q", piece)
			}
			text.WriteString(piece)
		}
		text.WriteString(d.Flush())
		if all := tok.Decode(ids); all != text.String() {
			t.Fatalf("in pieces %q, at once %q", text.String(), all)
		}
	})
}

// TestStaleCandidate checks that a queued pair is not merged after another merge has
// consumed the right symbol of the pair.
func TestStaleCandidate(t *testing.T) {
	tok := small(t, "b c", "a b", "bc d", "a bc")
	a, _ := tok.ID("a")
	bcd, _ := tok.ID("bcd")
	if ids := encode(tok, "abcd", Options{Bare: true}); !slices.Equal(ids, []int{a, bcd}) {
		t.Errorf("%v, want %d and %d", ids, a, bcd)
	}
}

// TestLongWord checks a word for which quadratic merging would take more than a day.
func TestLongWord(t *testing.T) {
	tok := small(t, "a a", "aa aa", "aaaa aaaa", "a b")
	text := strings.Repeat("a", 1<<20) + "ab"
	ids := encode(tok, text, Options{Bare: true})
	if want := 1<<20/8 + 1; len(ids) != want {
		t.Errorf("%d ids, want %d", len(ids), want)
	}
	if tok.Decode(ids) != text {
		t.Error("the text did not come back")
	}
	if spaces := strings.Repeat(" \n", 1<<19) + "x"; tok.Decode(encode(tok, spaces, Options{Bare: true})) != spaces {
		t.Error("the white space did not come back")
	}
}

func TestBadFiles(t *testing.T) {
	v, m := pairFiles(t, "a b")
	for _, c := range []struct{ name, vocab, merges, want string }{
		{"no JSON", v[1:], m, "not a JSON object"},
		{"a list", "[1]", m, "not a JSON object"},
		{"null", "null", m, "null has no place"},
		{"no tokens", "{}", m, "no tokens"},
		{"id that is null", strings.Replace(v, `"<s>":0`, `"<s>":null`, 1), m, "null has no place"},
		{"cut short", v[:len(v)/2], m, "not a JSON object"},
		{"id that is text", strings.Replace(v, `"<s>":0`, `"<s>":"0"`, 1), m, "not a JSON object"},
		{"fractional id", strings.Replace(v, `"<s>":0`, `"<s>":0.5`, 1), m, "not a JSON object"},
		{"negative id", strings.Replace(v, `"<s>":0`, `"<s>":-1`, 1), m, `"<s>" has id -1`},
		{"huge id", strings.Replace(v, `"<s>":0`, `"<s>":1152921504606846976`, 1), m, `"<s>" has id 1152921504606846976`},
		{"id whose successor is no int of 32 bits", strings.Replace(v, `"<s>":0`, `"<s>":2147483647`, 1), m, `"<s>" has id 2147483647`},
		{"id twice", strings.Replace(v, `"<s>":0`, `"<s>":1`, 1), m, `"<pad>" and "<s>" both have id 1`},
		{"no </s>", strings.Replace(v, `"</s>"`, `"<eos>"`, 1), m, `no token "</s>"`},
		{"merge of one", v, "a\n", `line 1: "a"`},
		{"merge of three", v, m + "a b c\n", `line 3: "a b c"`},
		{"merge into nothing", v, m + "b b\n", `line 3: "b b"`},
		{"merge twice", v, m + "a b\n", "second time"},
		{"merge of unknown", v, m + "ab d\n", "does not merge"},
		{"two spaces", v, "a  b\n", "does not merge"},
	} {
		tok, err := New(strings.NewReader(c.vocab), strings.NewReader(c.merges))
		if tok != nil || !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one with %q", c.name, err, c.want)
		}
	}
	if _, err := New(strings.NewReader(v), strings.NewReader("\r\n#version: 0.2\r\na b\r\n")); err != nil {
		t.Errorf("lines that end as on Windows: %v", err)
	}
	if _, err := New(broken{}, strings.NewReader(m)); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("vocabulary that cannot be read: %v", err)
	}
	if _, err := New(strings.NewReader(v), broken{}); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("merges that cannot be read: %v", err)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	v, m := pairFiles(t, "a b")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Load(dir); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "vocab.json") {
		t.Errorf("an empty folder: %v", err)
	}
	write("vocab.json", v)
	if _, err := Load(dir); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "merges.txt") {
		t.Errorf("a folder without merges: %v", err)
	}
	write("merges.txt", "a c\n")
	if _, err := Load(dir); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), filepath.Join(dir, "merges.txt")) {
		t.Errorf("bad merges: %v", err)
	}
	write("merges.txt", m)
	tok, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if text := tok.Decode(encode(tok, "abba", Options{})); text != "abba" {
		t.Errorf("decoded %q", text)
	}
}

func FuzzVocabMerges(f *testing.F) {
	v, m := pairFiles(f, "a b", "Ġ ab", "ab c")
	f.Add(v, m, "abc ab  c'll é")
	f.Add(v, "a b\na b", "ab")
	f.Add(strings.Replace(v, `"<s>":0`, `"<s>":-1`, 1), m, "")
	f.Add(`{"a": 1e9, "b": [}`, "\r\n \n", "\xff\xe6")
	f.Add(strings.Replace(v, `"Ã"`, `"ÃÃ"`, 1), m, "abc ab  cé") // without a token for the first byte of é
	f.Add(strings.Replace(v, `"b"`, `"bb"`, 1), "", "abc ab  cé")
	f.Fuzz(func(t *testing.T, vocab, merges, text string) {
		tok, err := New(strings.NewReader(vocab), strings.NewReader(merges))
		if err != nil {
			if tok != nil {
				t.Fatal("a tokenizer and an error")
			}
			return
		}
		ids := encode(tok, text, Options{})
		for _, id := range ids {
			if id < 0 || id >= tok.VocabSize() {
				t.Fatalf("id %d is not below %d", id, tok.VocabSize())
			}
		}
		// Encode omits only bytes without a token.
		want := []byte(text)
		want = slices.DeleteFunc(want, func(b byte) bool { return tok.bytes[b] < 0 })
		if back := tok.Decode(ids); utf8.Valid(want) && back != string(want) {
			t.Fatalf("%q came back as %q", text, back)
		}
		if _, err := tok.Encode(text, Options{AtMost: math.MaxInt}); errors.Is(err, ErrNoToken) != (len(want) < len(text)) || err != nil && len(want) == len(text) {
			t.Fatalf("%q has %d bytes without a token: %v", text, len(text)-len(want), err)
		}
	})
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, fs.ErrClosed }

// TestDigits checks the pre-tokenizer Digits: each digit is a piece, or a run of digits is a piece.
func TestDigits(t *testing.T) {
	const text = "a12b3é½٣"
	for individual, want := range map[bool][]string{
		true:  {"a", "1", "2", "b", "3", "é", "½", "٣"},
		false: {"a", "12", "b", "3", "é", "½٣"},
	} {
		c, err := digitsCut("tokenizer.json", fmt.Appendf(nil, `{"type":"Digits","individual_digits":%v}`, individual))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		if c(nil, piece{text: text}, func(p piece) bool { got = append(got, p.text); return true }); !slices.Equal(got, want) {
			t.Errorf("individual_digits %v: %q, want %q", individual, got, want)
		}
	}
}
