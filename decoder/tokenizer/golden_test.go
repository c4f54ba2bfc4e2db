package tokenizer

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
)

type goldenFolder struct {
	Name  string
	Files map[string]json.RawMessage
	Rows  [][3]json.RawMessage // text, ids, ids with special tokens spelled out
}

type goldenFolders struct {
	Vocab   map[string]int
	Merges  [][2]string
	Folders []goldenFolder
}

func readGolden(t *testing.T) goldenFolders {
	t.Helper()
	var g goldenFolders
	readJSON(t, "testdata/folders.json", &g)
	if len(g.Folders) < 30 {
		t.Fatalf("%d folders", len(g.Folders))
	}
	return g
}

// write writes a golden folder. edit may change each object of a file.
func (g *goldenFolders) write(t testing.TB, folder goldenFolder, edit func(file string, fields map[string]any)) string {
	t.Helper()
	dir := t.TempDir()
	for name, raw := range folder.Files {
		var fields map[string]any
		err := json.Unmarshal(raw, &fields)
		if err != nil {
			t.Fatal(err)
		}
		switch name {
		case "vocab.json":
			raw, err = json.Marshal(g.Vocab)
		case "merges.txt":
			lines := "#version: 0.2\n"
			for _, m := range g.Merges {
				lines += m[0] + " " + m[1] + "\n"
			}
			raw = []byte(lines)
		case "tokenizer.json":
			if model := fields["model"].(map[string]any); model["vocab"] == nil {
				model["vocab"], model["merges"] = g.Vocab, g.Merges
			}
			fallthrough
		default:
			if edit != nil {
				edit(name, fields)
			}
			raw, err = json.Marshal(fields)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func (g *goldenFolders) named(t testing.TB, name string) goldenFolder {
	t.Helper()
	i := slices.IndexFunc(g.Folders, func(f goldenFolder) bool { return f.Name == name })
	if i < 0 {
		t.Fatalf("no golden folder %q", name)
	}
	return g.Folders[i]
}

// TestFolders compares ids and texts with transformers' AutoTokenizer, for every form of folder.
func TestFolders(t *testing.T) {
	g := readGolden(t)
	texts := 0
	for _, folder := range g.Folders {
		tok, err := Load(g.write(t, folder, nil))
		if err != nil {
			t.Errorf("%s: %v", folder.Name, err)
			continue
		}
		for _, row := range folder.Rows {
			var text string
			var want, spelled []int
			for i, dst := range []any{&text, &want, &spelled} {
				if err := json.Unmarshal(row[i], dst); err != nil {
					t.Fatal(err)
				}
			}
			texts++
			if got := encode(tok, text, Options{Special: true}); !slices.Equal(got, want) {
				t.Errorf("%s: %q: ids %v, want %v", folder.Name, text, got, want)
			}
			if got := encode(tok, text, Options{}); !slices.Equal(got, spelled) {
				t.Errorf("%s: %q spelled out: ids %v, want %v", folder.Name, text, got, spelled)
			}
			inner := spelled[len(tok.before) : len(spelled)-len(tok.after)]
			if got := encode(tok, text, Options{Bare: true}); !slices.Equal(got, inner) {
				t.Errorf("%s: %q alone: ids %v, want %v", folder.Name, text, got, inner)
			}
			for _, most := range []int{len(want) - 1, len(want)} {
				if most < 0 {
					continue
				}
				o := Options{AtMost: most, Special: true}
				if most == 0 {
					o.AtMost = -1
				}
				got, err := tok.Encode(text, o)
				if ok := most == len(want); ok != (err == nil) || ok && !slices.Equal(got, want) {
					t.Errorf("%s: %q in %d tokens: %v, %v", folder.Name, text, most, got, err)
				}
			}
		}
	}
	t.Logf("%d texts", texts)
}

// TestAddedTokensText checks that an added token is decoded to the text of the token, unless the token is special.
func TestAddedTokensText(t *testing.T) {
	g := readGolden(t)
	tok, err := Load(g.write(t, g.named(t, "added_tokens.json"), nil))
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"<new>", "x<new> foo bar aab", "é <t> ² <new><new>"} {
		if got := tok.Decode(encode(tok, text, Options{})); got != text {
			t.Errorf("%q came back as %q", text, got)
		}
	}
	new1, ok := tok.ID("<new>")
	if name, known := tok.Token(new1); !ok || !known || name != "<new>" || new1 != len(g.Vocab) || tok.VocabSize() != new1+5 {
		t.Errorf("<new> has id %d (%v), that is %q, of %d", new1, ok, name, tok.VocabSize())
	}
	if got := tok.Decode(encode(tok, "a<t1>b</s>", Options{Special: true})); got != "ab" {
		t.Errorf("special tokens have the text %q", got)
	}
}

// TestCharacters compares the class of every character with Hugging Face's tokenizers. With a Go version whose Unicode is
// later than 16, characters that Unicode 16 leaves unassigned may be letters and numbers.
func TestCharacters(t *testing.T) {
	var runs [][2]any
	readJSON(t, "testdata/classes.json", &runs)
	later := unicode.Version > "16"
	wrong := 0
	for i, run := range runs {
		begin, end := rune(run[0].(float64)), rune(0x110000)
		if i+1 < len(runs) {
			end = rune(runs[i+1][0].(float64))
		}
		for r := begin; r < end; r++ {
			if r >= 0xd800 && r < 0xe000 {
				continue
			}
			var got strings.Builder
			got.WriteString(map[kind]string{letter: "L", number: "N", space: "S"}[kindAt(string(r), 0)])
			for _, c := range []struct {
				is   bool
				name string
			}{{isNumeric(r), "D"}, {isPunctuation(r), "P"}, {isWord(r), "W"}} {
				if c.is {
					got.WriteString(c.name)
				}
			}
			if want := run[1].(string); got.String() != want && (want != "" || !later || r < 0x300) {
				if wrong++; wrong < 20 {
					t.Errorf("%U is %q, want %q", r, got.String(), want)
				}
			}
		}
	}
}
