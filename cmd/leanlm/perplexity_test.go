package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"

	"pgregory.net/rapid"
)

// goldenPerplexity has the results of transformers with the shipped model: see testdata/perplexity.py.
type goldenPerplexity struct {
	Text, Stride, Half, Tokens, Scored int
	Perplexity                         float64
}

// long reports whether a text takes a second or more.
func (c goldenPerplexity) long() bool { return c.Text == 0 || c.Text > 1000 }

// TestPerplexity: the perplexity of a book that the shipped model was not trained on is that of transformers, with windows side
// by side and with windows that overlap.
func TestPerplexity(t *testing.T) {
	const testdata = "testdata/"
	book, err := os.ReadFile(testdata + "held-out.txt")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(testdata + "perplexity.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []goldenPerplexity
	if err := json.Unmarshal(data, &cases); err != nil || len(cases) == 0 {
		t.Fatal(len(cases), err)
	}
	var long []goldenPerplexity
	overlap, half := false, false
	for _, c := range cases {
		overlap, half = overlap || c.Stride > 0 && c.Stride < 2048, half || c.Half > 0
		if c.long() {
			long = append(long, c)
		}
	}
	if !overlap || !half || len(long) < 2 {
		t.Errorf("%d long texts, windows that overlap: %t, halves: %t", len(long), overlap, half)
	}
	if !reftest.Every(t) { // one of the long texts
		chosen := long[reftest.Rand(t).IntN(len(long))]
		cases = slices.DeleteFunc(cases, func(c goldenPerplexity) bool { return c.long() && c != chosen })
	}
	for _, c := range cases {
		text := string(book)
		if c.Text > 0 {
			text = text[:c.Text]
		}
		window := 2048
		args := []string{"perplexity", "-f", "-", "-exact", "-stride", fmt.Sprint(c.Stride)}
		if c.Half > 0 {
			window = c.Half
			args = append(args, "-half", "-c", fmt.Sprint(c.Half))
		}
		status, out, errs := leanlm(t, text, args...)
		var value float64
		var scored, tokens, count int
		if _, err := fmt.Sscanf(out, "perplexity %f of %d of %d tokens, in %d windows", &value, &scored, &tokens, &count); err != nil || status != 0 {
			t.Fatalf("%+v: status %d, %q, %v; %s", c, status, out, err, errs)
		}
		if !(math.Abs(value-c.Perplexity) <= 1e-4) || scored != c.Scored || tokens != c.Tokens {
			t.Errorf("%+v: %s", c, out)
		}
		if c.long() {
			continue
		}
		_, out, _ = leanlm(t, text, append(args, "-json")...)
		var r perplexityJSON
		if err := json.Unmarshal([]byte(out), &r); err != nil || math.Abs(r.Value-value) > 1e-6 || r.Tokens != scored || r.Of != tokens || r.Windows != count || r.Window != window || r.Half != (c.Half > 0) || !r.Complete {
			t.Errorf("%+v: %s, %v", c, out, err)
		}
	}
}

// TestPerplexityOrder: a text that the model wrote is more likely than its words in reverse, and than in short windows.
func TestPerplexityOrder(t *testing.T) {
	_, text, _ := leanlm(t, "", "generate", "-p", "Once upon a time", "-n", "60")
	words := strings.Fields("Once upon a time" + text)
	value := func(text string, args ...string) (p float64) {
		t.Helper()
		status, out, errs := leanlm(t, text, append([]string{"perplexity", "-f", "-"}, args...)...)
		if _, err := fmt.Sscanf(out, "perplexity %f", &p); status != 0 || err != nil {
			t.Fatalf("%d, %s, %s", status, out, errs)
		}
		return p
	}
	all := strings.Join(words, " ")
	right, short, overlapping := value(all), value(all, "-c", "20"), value(all, "-c", "20", "-stride", "5")
	slices.Reverse(words)
	if wrong := value(strings.Join(words, " ")); !(right < overlapping && overlapping < short && short < wrong && right < 5 && wrong > 100) {
		t.Errorf("%v, in windows %v, in windows that overlap %v, in reverse %v", right, short, overlapping, wrong)
	}
}

// TestWindows: each token but the first is predicted once, and windows are full as long as the text is.
func TestWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 12).Draw(t, "size")
		stride := rapid.IntRange(1, size).Draw(t, "stride")
		tokens := rapid.IntRange(0, 50).Draw(t, "tokens")
		predicted := make([]int, tokens)
		for _, w := range windows(tokens, size, stride) {
			if w.begin%stride != 0 || w.end-w.begin > size || w.end != tokens && w.end != w.begin+size || w.first <= w.begin {
				t.Fatalf("window %+v", w)
			}
			for i := w.first; i < w.end; i++ {
				predicted[i]++
			}
		}
		for i, n := range predicted {
			want := 1
			if i == 0 || stride == size && i%size == 0 {
				want = 0
			}
			if n != want {
				t.Fatalf("token %d is predicted %d times, want %d", i, n, want)
			}
		}
	})
}

// TestHalves: windows of -half are full and side by side, and the tokens after the one in the middle are predicted.
func TestHalves(t *testing.T) {
	for _, c := range []struct {
		tokens, size int
		want         []window
	}{
		{0, 4, nil},
		{3, 4, nil},
		{4, 4, []window{{0, 3, 4}}},
		{11, 4, []window{{0, 3, 4}, {4, 7, 8}}},
		{10, 5, []window{{0, 3, 5}, {5, 8, 10}}},
		{9, 3, []window{{0, 2, 3}, {3, 5, 6}, {6, 8, 9}}},
		{8, 2, nil},
		{8, 1, nil},
	} {
		if got := halves(c.tokens, c.size); !slices.Equal(got, c.want) {
			t.Errorf("%d tokens in windows of %d: %v, want %v", c.tokens, c.size, got, c.want)
		}
	}
	text := strings.Repeat("Once upon a time ", 20)
	for _, c := range []struct {
		args       []string
		status     int
		out, wrong string
	}{
		{[]string{"-c", "20"}, 0, "of 77 of 82 tokens, in 5 windows of up to 20\n", ""},
		{[]string{"-c", "20", "-chunks", "3"}, 0, "of 57 of 82 tokens, in 3 windows of up to 20\n", ""},
		{[]string{"-c", "20", "-half"}, 0, "of 36 of 82 tokens, in 4 windows of up to 20\n", ""},
		{[]string{"-c", "20", "-half", "-chunks", "3"}, 0, "of 27 of 82 tokens, in 3 windows of up to 20\n", ""},
		{[]string{"-c", "20", "-half", "-chunks", "9"}, 0, "of 36 of 82 tokens, in 4 windows of up to 20\n", ""},
		{[]string{"-half"}, exitError, "", "the text has 82 tokens, and -half needs the 2048 of a window"},
		{[]string{"-half", "-c", "2"}, exitError, "", "-c is 2, and -half needs 3"},
		{[]string{"-half", "-stride", "3"}, exitUsage, "", "-stride is for windows that overlap"},
		{[]string{"-chunks", "-1"}, exitUsage, "", "-chunks is -1"},
	} {
		status, out, errs := leanlm(t, text, append([]string{"perplexity", "-f", "-"}, c.args...)...)
		if status != c.status || !strings.HasSuffix(out, c.out) || !strings.Contains(errs, c.wrong) {
			t.Errorf("%v: %d, %q, %s", c.args, status, out, errs)
		}
	}
}

// countdown is a context that is done after some calls of Err.
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

// TestPerplexityInterrupt: an interrupt tells the perplexity so far.
func TestPerplexityInterrupt(t *testing.T) {
	text := strings.Repeat("Once upon a time ", 50)
	for calls, want := range map[int]string{0: "", 4: ", interrupted\n"} {
		var out, errs bytes.Buffer
		ctx := &countdown{context.Background(), calls}
		status := run(ctx, []string{"perplexity", "-f", "-", "-c", "20"}, streams{strings.NewReader(text), &out, &errs})
		if status != exitInterrupted || !strings.HasSuffix(out.String(), want) || want == "" && out.Len() > 0 {
			t.Errorf("%d: status %d, %q, %s", calls, status, &out, &errs)
		}
	}
}
