package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/devicetest"

	"pgregory.net/rapid"
)

// goldenPerplexity is made by testdata/perplexity.py, which says what is in it.
type goldenPerplexity struct {
	Text, Stride, Tokens, Scored int
	Perplexity                   float64
}

func readPerplexities(t *testing.T) (text string, cases []goldenPerplexity) {
	t.Helper()
	book, err := os.ReadFile("testdata/held-out.txt")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("testdata/perplexity.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &cases); err != nil || len(cases) == 0 {
		t.Fatal(len(cases), err)
	}
	return string(book), cases
}

// The perplexity of a book that the shipped checkpoint was not trained on is
// transformers', whether its windows are side by side or overlap.
func TestPerplexity(t *testing.T) {
	text, cases := readPerplexities(t)
	for _, c := range cases {
		part := text
		if c.Text > 0 {
			part = text[:c.Text]
		}
		status, out, log := commandWith(t, part, "-perplexity", "-", "-stride", fmt.Sprint(c.Stride))
		var value float64
		var scored, tokens, count int
		if _, err := fmt.Sscanf(out, "perplexity %f of %d of %d tokens, in %d window", &value, &scored, &tokens, &count); err != nil || status != 0 {
			t.Fatalf("%+v: status %d, %q, %v; %s", c, status, out, err, log)
		}
		if !(math.Abs(value-c.Perplexity) <= 1e-4) || scored != c.Scored || tokens != c.Tokens {
			t.Errorf("%+v: %s", c, out)
		}
		if !strings.Contains(log, "\ntext: ") {
			t.Errorf("no progress: %s", log)
		}
	}
}

// From a file, as JSON, with the other ways to compute: the same.
func TestPerplexityWays(t *testing.T) {
	text, cases := readPerplexities(t)
	var c goldenPerplexity
	for _, c = range cases {
		if c.Text > 0 && c.Text < 1000 {
			break
		}
	}
	file := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(file, []byte(text[:c.Text]), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, flags := range [][]string{nil, {"-attn", "default"}, {"-attn", "fused"}, {"-attn", "head"}, {"-linear", "stock"}, {"-stats"}, {"-chunk", "5"}} {
		status, out, log := command(t, append([]string{"-perplexity", file, "-json"}, flags...)...)
		var report reportJSON
		if err := json.Unmarshal([]byte(out), &report); err != nil || status != 0 {
			t.Fatalf("%v: status %d, %v; %s", flags, status, err, log)
		}
		p := report.Perplexity
		if p == nil || !(math.Abs(p.Value-c.Perplexity) <= 1e-4) || p.Tokens != c.Scored || p.Of != c.Tokens || !p.Complete || p.Windows != 1 || p.Window != 2048 || p.Stride != 2048 {
			t.Errorf("%v: %s", flags, out)
		}
		if report.Stats.Seed != nil || report.Texts != nil || report.Stats.Prefill.Tokens != c.Tokens {
			t.Errorf("%v: %s", flags, out)
		}
	}
	// A cache of 16 bits is another one, and still near.
	_, out, _ := command(t, "-perplexity", file, "-cache", "bf16")
	var value float64
	if _, err := fmt.Sscanf(out, "perplexity %f", &value); err != nil || value == c.Perplexity || math.Abs(value-c.Perplexity) > 0.02 {
		t.Errorf("-cache bf16: %s", out)
	}
}

// On a GPU it is the same.
func TestGPUPerplexity(t *testing.T) {
	devicetest.Open(t)
	text, cases := readPerplexities(t)
	for _, c := range cases {
		if c.Text == 0 || c.Text > 1000 {
			continue
		}
		status, out, log := commandWith(t, text[:c.Text], "-perplexity", "-", "-device", "gpu")
		var value float64
		if _, err := fmt.Sscanf(out, "perplexity %f", &value); err != nil || status != 0 || !(math.Abs(value-c.Perplexity) <= 1e-4) {
			t.Errorf("%+v: status %d, %q, %v; %s", c, status, out, err, log)
		}
	}
}

// Each token but the first is asked for once, with as many before it as its window
// has, and windows are full as long as the text is.
func TestWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 12).Draw(t, "size")
		stride := rapid.IntRange(1, size).Draw(t, "stride")
		tokens := rapid.IntRange(0, 50).Draw(t, "tokens")
		asked := make([]int, tokens)
		for _, w := range windows(tokens, size, stride) {
			if w.begin%stride != 0 || w.end-w.begin > size || w.end != tokens && w.end != w.begin+size || w.first <= w.begin {
				t.Fatalf("window %+v", w)
			}
			for i := w.first; i < w.end; i++ {
				asked[i]++
			}
		}
		for i, n := range asked {
			want := 1
			if i == 0 || stride == size && i%size == 0 {
				want = 0
			}
			if n != want {
				t.Fatalf("token %d is asked for %d times, want %d", i, n, want)
			}
		}
	})
}

// What can't be told is an error, and an interrupt tells what was read.
func TestPerplexityErrors(t *testing.T) {
	dir := writeModel(t, nil)
	for _, c := range []struct {
		args []string
		text string
		want string
	}{
		{nil, "", "the text has 1 token "},
		{[]string{"-stride", "65"}, "abc", "-stride 65 is more than the model's 64 positions"},
		{[]string{"-stride", "-1"}, "abc", "-stride -1"},
		{[]string{"-n", "3"}, "abc", "-n has no meaning for -perplexity"},
		{[]string{"-temperature", "1"}, "abc", "-temperature has no meaning for -perplexity"},
		{[]string{"-prompt", "a"}, "abc", "-prompt has no meaning for -perplexity"},
		{[]string{"-stop", "a"}, "abc", "-stop has no meaning for -perplexity"},
	} {
		status, out, log := commandWith(t, c.text, append([]string{"-model", dir, "-perplexity", "-"}, c.args...)...)
		if status == 0 || out != "" || !strings.Contains(log, "opt: ") || !strings.Contains(log, c.want) {
			t.Errorf("%v: status %d, %q, %s", c.args, status, out, log)
		}
	}
	for _, file := range []string{"", t.TempDir(), filepath.Join(t.TempDir(), "none")} {
		if status, _, log := command(t, "-perplexity", file); status == 0 || !strings.Contains(log, "-perplexity") {
			t.Errorf("%q: status %d, %s", file, status, log)
		}
	}
}

func TestPerplexityInterrupt(t *testing.T) {
	o, err := parse([]string{"-model", writeModel(t, nil), "-perplexity", "-"}, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var out bytes.Buffer
	log := &interrupting{after: 1 << 30, cancel: cancel}
	o.text = strings.Repeat("abc", 100)
	cancel()
	if err := tellPerplexity(ctx, o, &out, log); !errors.Is(err, context.Canceled) || out.Len() != 0 {
		t.Errorf("interrupted at once: %v, %q", err, &out)
	}
	// After the first window.
	steps := &countdown{Context: context.Background(), calls: 4}
	if err := tellPerplexity(steps, o, &out, log); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
	if !strings.Contains(out.String(), " of 301 tokens, ") || !strings.HasSuffix(out.String(), ", interrupted\n") {
		t.Errorf("interrupted: %q", &out)
	}
}

// countdown is a context that is done when it has been asked so many times.
type countdown struct {
	context.Context
	calls int
}

func (c *countdown) Err() error {
	if c.calls--; c.calls < 0 {
		return context.Canceled
	}
	return nil
}
