package tokenizer

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"
	"unicode"
	"unicode/utf8"

	"gorgonia.org/leanattention/internal/reftest"
)

// readGzip reads a golden file of testdata/kinds.py.
func readGzip(t testing.TB, name string, dst any) {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(z).Decode(dst); err != nil {
		t.Fatal(err)
	}
}

// kindRows is a small tokenizer with the results of the reference program for texts.
type kindRows struct {
	Name, File string
	Data       []byte
	Rows       []realRow
}

func readKinds(t testing.TB) []kindRows {
	t.Helper()
	var all []kindRows
	readGzip(t, "kinds.json.gz", &all)
	if len(all) < 18 {
		t.Fatalf("%d kinds", len(all))
	}
	return all
}

func (k *kindRows) load(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := LoadFS(k.Name, fstest.MapFS{k.File: {Data: k.Data}})
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// TestKinds compares small tokenizers of every kind with the reference programs.
func TestKinds(t *testing.T) {
	for _, k := range readKinds(t) {
		tok := k.load(t)
		wrong := 0
		differ := func(format string, args ...any) {
			if wrong++; wrong <= 3 {
				t.Errorf(format, args...)
			}
		}
		for _, r := range k.Rows {
			for _, c := range []struct {
				want []int
				o    Options
			}{{r.I, Options{Special: true}}, {r.S, Options{}}} {
				if c.want == nil {
					continue
				}
				got, err := tok.Encode(r.T, c.o)
				if err != nil && !errors.Is(err, ErrNoToken) || !slices.Equal(got, c.want) {
					differ("%s: %+v of %+q:\n got %v\nwant %v, %v", k.Name, c.o, r.T, got, c.want, err)
				}
				c.o.Bare = true
				bare, err := tok.Encode(r.T, c.o)
				if err != nil && !errors.Is(err, ErrNoToken) || !slices.Equal(bare, got[len(tok.before):len(got)-len(tok.after)]) {
					differ("%s: %+v of %+q: %v of %v, %v", k.Name, c.o, r.T, bare, got, err)
				}
				// With a limit, the ids are the same, or Encode returns an error.
				for _, most := range []int{len(got), len(got) - 1} {
					c.o.Bare, c.o.AtMost = false, most
					if most == 0 {
						c.o.AtMost = -1
					}
					some, err := tok.Encode(r.T, c.o)
					if most < len(got) != errors.Is(err, ErrTooLong) || most == len(got) && !slices.Equal(some, got) {
						if len(got) > 0 {
							differ("%s: %+v of %+q: %v, %v", k.Name, c.o, r.T, some, err)
						}
					}
				}
			}
			if r.D == nil {
				continue
			}
			ids := slices.Concat(r.R, r.I)
			if r.I == nil {
				ids = slices.Concat(r.R, r.S)
			}
			if slices.ContainsFunc(ids, func(id int) bool { _, ok := tok.Token(id); return !ok }) {
				continue // this package writes U+FFFD, and the reference omits the character
			}
			if got := tok.Decode(ids); got != *r.D {
				differ("%s: text of %v:\n got %+q\nwant %+q", k.Name, ids, got, *r.D)
			}
		}
		if wrong > 0 {
			t.Errorf("%s: %d of %d rows differ", k.Name, wrong, len(k.Rows))
		}
	}
}

// TestStreams checks, for every kind of tokenizer and any ids, that a Decoder returns final text in valid UTF-8.
func TestStreams(t *testing.T) {
	rng := rand.New(rand.NewPCG(61, 0))
	for _, k := range readKinds(t) {
		tok := k.load(t)
		for range 300 {
			ids := make([]int, rng.IntN(12))
			for i := range ids {
				ids[i] = rng.IntN(tok.VocabSize()+4) - 2
			}
			for _, special := range []bool{false, true} {
				d := tok.NewDecoder()
				d.Special = special
				var text strings.Builder
				for _, id := range ids {
					part := d.Add(id)
					if !utf8.ValidString(part) {
						t.Fatalf("%s: %v: %q", k.Name, ids, part)
					}
					text.WriteString(part)
				}
				text.WriteString(d.Flush())
				if got := tok.Decode(ids); !special && got != text.String() {
					t.Fatalf("%s: %v is %q, and %q at once", k.Name, ids, text.String(), got)
				}
				if special && len(ids) == 1 {
					if name, ok := tok.Special(ids[0]); ok && text.String() != name {
						t.Errorf("%s: special token %q is shown as %q", k.Name, name, text.String())
					}
				}
			}
		}
	}
}

// ggufOf returns the vocabulary of a GGUF file for a kind, as converters write it.
func ggufOf(t testing.TB, k *kindRows, tok *Tokenizer) (GGUF, bool) {
	g := GGUF{TokenIDs: map[string]int64{}}
	yes, no := true, false
	for id := range tok.VocabSize() {
		token := tok.tokens[id]
		kind := int32(typeNormal)
		if _, byteName := byteToken(token); byteName && k.File == "tokenizer.model" {
			kind = typeByte
		}
		if tok.special[id] {
			kind = typeControl
		} else if slices.ContainsFunc(tok.added[0].tokens, func(a addedToken) bool { return a.ID == id }) {
			kind = typeUserDefined
		}
		g.Tokens, g.Types = append(g.Tokens, token), append(g.Types, kind)
	}
	switch k.Name {
	case "llama 3", "gpt-4o":
		g.Model, g.Pre = "gpt2", map[string]string{"llama 3": "llama-bpe", "gpt-4o": "gpt-4o"}[k.Name]
		var j struct {
			Model struct {
				Merges [][2]string
			}
		}
		if err := json.Unmarshal(k.Data, &j); err != nil {
			t.Fatal(err)
		}
		for _, m := range j.Model.Merges {
			g.Merges = append(g.Merges, m[0]+" "+m[1])
		}
		if len(tok.before) > 0 {
			g.TokenIDs["bos_token_id"] = int64(tok.before[0])
		}
		g.AddBOS = &no
		if len(tok.before) > 0 {
			g.AddBOS = &yes
		}
	case "spm unigram":
		p, err := parsePieces(k.Data)
		if err != nil {
			t.Fatal(err)
		}
		g.Model, g.Scores, g.Types, g.PrecompiledCharsmap = "t5", p.scores, p.types, p.charsmap
		g.AddSpacePrefix, g.RemoveExtraWhitespaces, g.AddEOS = &yes, &yes, &no
		g.TokenIDs["unknown_token_id"] = int64(tok.unk)
	case "spm bpe with bytes":
		p, err := parsePieces(k.Data)
		if err != nil {
			t.Fatal(err)
		}
		g.Model, g.Scores, g.Types, g.AddSpacePrefix, g.AddBOS = "llama", p.scores, p.types, &no, &yes
		g.TokenIDs["bos_token_id"] = int64(tok.bos)
	default:
		return g, false
	}
	return g, true
}

// TestGGUF checks that the vocabulary of a GGUF file gives the ids of the original file.
func TestGGUF(t *testing.T) {
	tried := 0
	for _, k := range readKinds(t) {
		tok := k.load(t)
		g, ok := ggufOf(t, &k, tok)
		if !ok {
			continue
		}
		tried++
		made, err := NewGGUF(g)
		if err != nil {
			t.Errorf("%s: %v", k.Name, err)
			continue
		}
		wrong := 0
		for _, r := range k.Rows {
			if r.S == nil || g.Model == "t5" && strings.Contains(r.T, underline) {
				continue // llama.cpp removes no space that was a ▁ in the text
			}
			if got, err := made.Encode(r.T, Options{}); err != nil && !errors.Is(err, ErrNoToken) || !slices.Equal(got, r.S) {
				if wrong++; wrong < 4 {
					t.Errorf("%s: %+q:\n got %v\nwant %v, %v", k.Name, r.T, got, r.S, err)
				}
			}
		}
		if made.VocabSize() != tok.VocabSize() || made.BOS() != tok.BOS() && len(tok.before) > 0 {
			t.Errorf("%s: %d tokens, BOS %d", k.Name, made.VocabSize(), made.BOS())
		}
		if k.Name == "llama 3" {
			if end, _ := made.ID("</s>"); !slices.Contains(made.Ends(), end) {
				t.Errorf("%s ends with %v, and </s> is %d", k.Name, made.Ends(), end)
			}
		}
		for what, edit := range map[string]func(*GGUF){
			"model \"x\"": func(g *GGUF) { g.Model = "x" }, "0 tokens": func(g *GGUF) { g.Tokens = nil }, "token_type": func(g *GGUF) { g.Types = g.Types[1:] },
			"is of token_type 9": func(g *GGUF) { g.Types = slices.Clone(g.Types); g.Types[5] = 9 },
			"are both":           func(g *GGUF) { g.Tokens = slices.Clone(g.Tokens); g.Tokens[5] = g.Tokens[6] },
			"bos_token_id":       func(g *GGUF) { g.TokenIDs = map[string]int64{"bos_token_id": 1 << 40} },
			"scores":             func(g *GGUF) { g.Scores = []float32{1} },
		} {
			bad := g
			bad.TokenIDs = maps.Clone(g.TokenIDs)
			edit(&bad)
			if tok, err := NewGGUF(bad); tok != nil || err == nil || !strings.Contains(err.Error(), what) || !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
				t.Errorf("%s: %v, want %q", k.Name, err, what)
			}
		}
	}
	if tried != 4 {
		t.Errorf("%d kinds tried", tried)
	}
	for name := range preTokenizers {
		if _, err := NewGGUF(GGUF{Model: "gpt2", Pre: name, Tokens: []string{"a"}}); err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("pre %q: %v", name, err)
		}
	}
}

// TestBERT checks that words become the longest tokens from left to right.
func TestBERT(t *testing.T) {
	tok, err := NewGGUF(GGUF{
		Model: "bert", Tokens: []string{"[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁fox", "es", "▁,", "▁中", "▁resume", "▁f"}, Types: []int32{3, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1},
		TokenIDs: map[string]int64{"cls_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	if ids := encode(tok, "The  foxes,中 Résumé xyz fox\x00 [SEP]", Options{Special: true}); !slices.Equal(ids, []int{2, 4, 5, 6, 7, 8, 9, 1, 5, 3, 3}) {
		t.Errorf("%v", ids)
	}
	if text := tok.Decode([]int{2, 4, 5, 6, 7, 3}); text != "the foxes ," {
		t.Errorf("%q", text)
	}
}

// TestPatterns compares the patterns of pre-tokenizers with Oniguruma.
func TestPatterns(t *testing.T) {
	sources := map[string]bool{}
	for _, p := range preTokenizers {
		for _, source := range p.patterns {
			sources[source] = true
		}
	}
	for _, source := range []string{
		llama3Words, ` {2,}`, `a|ab|b+c?`, `(?:a|B)*+c|\S`, `[^\W\d_]+|\d{2}|\d`, `(?i)ſ|k+|É`, `\bx|\B.`, `^\s+|\s+$|\w+`, `\A.|.\z`, `(?>a+|b)c|[a-c]`, `[[a-z]&&[^aeiou]]+|[\x{1F600}-\x{1F64F}\u3042]`,
		`(?=[a-z])\w{1,3}|(?!a)[A-Z]++`, `\p{Han}+|\p{Hangul}+|\P{L}+|\p{^Lu}`, `(?:\r\n|\n|\r)+|[ \t]+(?=\n)|(?:x=)?[0-9]{1,2}`, `(a|b)(c|d)?|.`,
	} {
		sources[source] = true
	}
	if name := os.Getenv("LEANATTENTION_PATTERNS"); name != "" { // for testdata/kinds.py
		data, err := json.Marshal(slices.Sorted(maps.Keys(sources)))
		if err == nil {
			err = os.WriteFile(name, data, 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	var golden map[string][][2]json.RawMessage
	readGzip(t, "patterns.json.gz", &golden)
	for source := range sources {
		rows := golden[source]
		if len(rows) < 50 {
			t.Errorf("%d golden texts of %s", len(rows), source)
			continue
		}
		p, err := compilePattern(source)
		if err != nil {
			t.Error(err)
			continue
		}
		c := cutAt(isolated, false, p.scan)
		wrong := 0
		for _, row := range rows {
			var text string
			var want []string
			if err := errors.Join(json.Unmarshal(row[0], &text), json.Unmarshal(row[1], &want)); err != nil {
				t.Fatal(err)
			}
			got := []string{}
			e := &encoder{}
			if text != "" {
				c(e, piece{text: text}, func(p piece) bool { got = append(got, p.text); return true })
			}
			if !slices.Equal(got, want) || e.err != nil {
				if wrong++; wrong < 4 {
					t.Errorf("%s\n%q:\n got %q\nwant %q, %v", source, text, got, want, e.err)
				}
			}
		}
	}
	for source, word := range map[string]string{
		"": "empty", "a*": "empty", "(?<=a)b": "(?<", "a+?": "as little", `\1`: `\1`, "(a": "unclosed", "a)": "unopened", "[a": "unclosed", "[]a]": "empty set", "*a": "repeats nothing", `\p{Klingon}`: "Klingon",
		"[[:alpha:]]": "POSIX", "a{3,2}": "repetitions", "a{1": "unclosed", "(?:a?)*b": "can be empty", "[z-a]": "range", `a\`: `\`, `\x{110000}`: "no character", "\xff": "UTF-8", strings.Repeat("(", 99): "nested",
		"(?:(?:a{999}b){999}c){999}": "instructions", strings.Repeat("a", 5000): "5000 bytes", "(?m:a)": "(?m",
	} {
		if p, err := compilePattern(source); p != nil || err == nil || !strings.Contains(err.Error(), word) || len(err.Error()) > 500 {
			t.Errorf("%.50q: %.500v, want %q", source, err, word)
		}
	}
}

// TestSteps checks that a pattern with exponential backtracking is an error within bounded time.
func TestSteps(t *testing.T) {
	for _, source := range []string{`(?:a+)+b`, `(?:a|aa)+b`, `(?:(?:a|b)+c?)+d`, `[a ]+x`} {
		p, err := compilePattern(source)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		err = p.scan(strings.Repeat("a", 20000), func(int, int) bool { return true })
		if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "steps") || took > 10*time.Second {
			t.Errorf("%s: %v in %v", source, err, took)
		}
	}
}

// TestCategories compares the general category of every character with Oniguruma. With a Go version whose Unicode is later
// than 16, characters that Unicode 16 leaves unassigned may have a category.
func TestCategories(t *testing.T) {
	var runs [][2]any
	readGzip(t, "categories.json.gz", &runs)
	sets := map[string]*class{}
	for name := range unicode.Categories {
		if s, ok := category(name); ok && len(name) == 2 && name != "Cs" && name != "LC" {
			sets[name] = newClass(s)
		}
	}
	if len(sets) != 28 {
		t.Errorf("%d categories", len(sets))
	}
	later, wrong := unicode.Version > "16", 0
	for i, run := range runs {
		begin, end := rune(run[0].(float64)), rune(unicode.MaxRune+1)
		if i+1 < len(runs) {
			end = rune(runs[i+1][0].(float64))
		}
		for r := begin; r < end; r++ {
			if r >= 0xd800 && r < 0xe000 {
				continue
			}
			want := run[1].(string)
			if want == "" && later {
				continue
			}
			for name, c := range sets {
				if c.has(r) != (name == want) {
					if wrong++; wrong < 10 {
						t.Errorf("%U is %s: %v, and %q in Oniguruma", r, name, c.has(r), want)
					}
				}
			}
		}
	}
}

// TestSpeed checks that encoding a megabyte takes about a second at most, even if the text is one word.
func TestSpeed(t *testing.T) {
	if testing.Short() {
		t.Skip("a megabyte in every kind")
	}
	rng := reftest.Rand(t)
	for _, k := range readKinds(t) {
		tok := k.load(t)
		parts := []string{"a", " ", "\n", "the quick ", "1", "\U0001f9a6", "e\u0301"}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		for _, part := range parts[:reftest.Cases(t, 3, len(parts))] {
			text := strings.Repeat(part, 1<<18/len(part)) // a quarter of a megabyte
			began := cpuTime()
			if _, err := tok.Encode(text, Options{Special: true}); err != nil && !errors.Is(err, ErrNoToken) {
				t.Errorf("%s: %q: %v", k.Name, part, err)
			}
			if took := cpuTime() - began; took > 2*time.Second { // the machine may be busy, and the race detector on
				t.Errorf("%s: a quarter of a megabyte of %q took %v", k.Name, part, took)
			}
		}
	}
}

func addKinds(f *testing.F, file string) {
	for _, k := range readKinds(f) {
		if k.File == file {
			f.Add(k.Data, "Hello <x> \n é▁")
		}
	}
}

// try encodes and decodes with the tokenizer of a hostile file, if the file loads.
func try(t *testing.T, tok *Tokenizer, err error, text string) {
	if err != nil {
		if tok != nil || len(err.Error()) > 4000 || !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
			t.Fatal(err)
		}
		return
	}
	if len(text) > 1<<12 {
		text = text[:1<<12]
	}
	for _, o := range []Options{{}, {Special: true, Bare: true}, {AtMost: 3}} {
		ids, err := tok.Encode(text, o)
		if err != nil && !errors.Is(err, ErrNoToken) && !errors.Is(err, ErrTooLong) && !errors.Is(err, ErrUnsupported) {
			t.Fatal(err)
		}
		for _, id := range ids {
			if _, ok := tok.Token(id); !ok {
				t.Fatalf("id %d of %q is no token", id, text)
			}
		}
		if s := tok.Decode(ids); !utf8.ValidString(s) {
			t.Fatalf("%q is decoded to %q", text, s)
		}
	}
}

func FuzzModel(f *testing.F) {
	addKinds(f, "tokenizer.model")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		tok, err := parseModel("x", data, settings{})
		try(t, tok, err, text)
	})
}

func FuzzTekken(f *testing.F) {
	addKinds(f, "tekken.json")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		tok, err := parseTekken("x", data, settings{})
		try(t, tok, err, text)
	})
}

func FuzzKinds(f *testing.F) {
	addKinds(f, "tokenizer.json")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		tok, err := parseJSON("x", data, settings{})
		try(t, tok, err, text)
	})
}

func FuzzGGUF(f *testing.F) {
	for _, k := range readKinds(f) {
		if g, ok := ggufOf(f, &k, k.load(f)); ok {
			data, err := json.Marshal(g)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data, "Hello <x> \n é▁")
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		var g GGUF
		if json.NewDecoder(bytes.NewReader(data)).Decode(&g) == nil {
			tok, err := NewGGUF(g)
			try(t, tok, err, text)
		}
	})
}

func FuzzPattern(f *testing.F) {
	for _, p := range preTokenizers {
		for _, source := range p.patterns {
			f.Add(source, "Hello, y'all! 12345\n\n  é日本")
		}
	}
	f.Fuzz(func(t *testing.T, source, text string) {
		p, err := compilePattern(source)
		if err != nil {
			return
		}
		done := 0
		_ = p.scan(text, func(start, end int) bool { // ignores the error of a text that takes too many steps
			if start < done || end <= start || end > len(text) {
				t.Fatalf("%q in %q: %d to %d after %d", source, text, start, end, done)
			}
			done = end
			return true
		})
	})
}
