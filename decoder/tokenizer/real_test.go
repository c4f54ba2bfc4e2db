package tokenizer

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// realRow is a row of golden.jsonl, which testdata/real.py writes.
type realRow struct {
	T string  // a text
	I []int   // ids with Options.Special
	S []int   // ids of the zero Options
	B []int   // ids with Options.Bare
	R []int   // random ids
	D *string // the text of I, S or R
}

// TestReal compares the tokenizers that testdata/real.py gathers with the reference programs.
func TestReal(t *testing.T) {
	dir := os.Getenv("LEANATTENTION_TOKENIZERS")
	if dir == "" {
		t.Skip("LEANATTENTION_TOKENIZERS is not the folder that testdata/real.py has made")
	}
	folders, err := filepath.Glob(filepath.Join(dir, "*", "golden.jsonl"))
	if err != nil || len(folders) == 0 {
		t.Fatalf("%s: %d folders, %v", dir, len(folders), err)
	}
	for _, rows := range folders {
		folder := filepath.Dir(rows)
		t.Run(filepath.Base(folder), func(t *testing.T) {
			began := cpuTime()
			tok, err := openReal(folder)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("loaded in %v", cpuTime()-began)
			f, err := os.Open(rows)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			compareRows(t, tok, bufio.NewReaderSize(f, 1<<20))
			measureReal(t, tok)
		})
	}
}

func openReal(folder string) (*Tokenizer, error) {
	data, err := os.ReadFile(filepath.Join(folder, "gguf.json"))
	if err != nil {
		return Load(folder)
	}
	var g GGUF
	if err := json.Unmarshal(data, &g); err != nil {
		return nil, err
	}
	return NewGGUF(g)
}

// compareRows compares a tokenizer with rows of golden.jsonl.
func compareRows(t *testing.T, tok *Tokenizer, rows *bufio.Reader) {
	counts, wrong := [4]int{}, [4]int{}
	differ := func(kind int, format string, args ...any) {
		if wrong[kind]++; wrong[kind] <= 5 {
			t.Errorf(format, args...)
		}
	}
	d := json.NewDecoder(rows)
	for d.More() {
		var r realRow
		if err := d.Decode(&r); err != nil {
			t.Fatal(err)
		}
		for kind, c := range []struct {
			want []int
			o    Options
		}{{r.I, Options{Special: true}}, {r.S, Options{}}, {r.B, Options{Bare: true}}} {
			if c.want == nil {
				continue
			}
			counts[kind]++
			if got, err := tok.Encode(r.T, c.o); err != nil || !slices.Equal(got, c.want) {
				differ(kind, "%+v of %+q:\n got %v\nwant %v, %v", c.o, r.T, got, c.want, err)
			}
		}
		if r.D == nil {
			continue
		}
		ids := slices.Concat(r.R, r.I)
		if r.I == nil {
			ids = slices.Concat(r.R, r.S)
		}
		counts[3]++
		if got := tok.Decode(ids); got != *r.D {
			differ(3, "text of %v:\n got %+q\nwant %+q", ids, got, *r.D)
		}
	}
	t.Logf("with special tokens %d, spelled out %d, alone %d, decoded %d; wrong %v", counts[0], counts[1], counts[2], counts[3], wrong)
}

// measureReal encodes a megabyte of each kind.
func measureReal(t *testing.T, tok *Tokenizer) {
	for _, c := range []struct{ what, part string }{
		{"a letter", "a"}, {"spaces", " "}, {"line ends", "\n"}, {"a word", "abcdefghij"}, {"digits", "1234567890"}, {"capitals", "ABC"}, {"Chinese", "中文字符"}, {"rare", "\U0001f9a6"},
		{"marks", "a\u0301"}, {"punctuation", "!?./"}, {"spaces and line ends", " \t\n "}, {"spaces and a letter", strings.Repeat(" ", 100) + "x"},
		{"English", "The quick brown fox doesn't jump over the lazy dog, 1234 times.\n"}, {"brackets", "<|"},
	} {
		text := strings.Repeat(c.part, 1<<20/len(c.part))
		began := cpuTime()
		ids, err := tok.Encode(text, Options{Special: true})
		mid := cpuTime()
		back := tok.Decode(ids)
		took := mid - began
		t.Logf("1 MB of %s: %d tokens in %v, text in %v (%d bytes)", c.what, len(ids), took, cpuTime()-mid, len(back))
		if err != nil || took > time.Second {
			t.Errorf("1 MB of %s: %v, %v", c.what, took, err)
		}
	}
}
