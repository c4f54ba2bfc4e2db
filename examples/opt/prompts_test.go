package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/reftest"
)

// Texts are the same when tokens are computed some steps before they are looked
// at, whatever their lengths and wherever they end.
func TestAhead(t *testing.T) {
	for _, n := range []string{"1", "2", "7", "8", "9", "40"} {
		var texts [2]string
		for i := range texts {
			o, err := parse([]string{"-prompt", "Once upon a time", "-prompt", "The girl went to the next village. The girl asked", "-n", n}, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			o.ahead = i == 1
			var out bytes.Buffer
			if err := o.readPrompts(nil); err != nil {
				t.Fatal(err)
			}
			if err := generate(context.Background(), o, &out, io.Discard); err != nil {
				t.Fatal(err)
			}
			texts[i] = out.String()
		}
		if texts[0] != texts[1] || texts[0] == "" {
			t.Errorf("-n %s: %q, want %q", n, texts[1], texts[0])
		}
	}
}

// A file's lines are prompts.
func TestPromptsFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "prompts")
	if err := os.WriteFile(name, []byte("first\n\n second \r\nthird"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := parse([]string{"-prompt", "zeroth", "-prompts", name}, io.Discard)
	if err == nil {
		err = o.readPrompts(nil)
	}
	if err != nil || !slices.Equal(o.prompts, []string{"zeroth", "first", " second ", "third"}) {
		t.Errorf("%q, %v", o.prompts, err)
	}
	if status, _, log := command(t, "-prompts", os.DevNull); status != 1 || !strings.Contains(log, "-prompts") {
		t.Errorf("no prompts: status %d, %s", status, log)
	}
}

// A text does not depend on how long the prompts beside it are: sequences whose
// prompts are short begin while others read theirs.
func TestLongPromptBeside(t *testing.T) {
	long := strings.Repeat("Once upon a time there was a girl who went to the next village. ", 12)
	text := func(prompts ...string) string {
		args := []string{"-n", "30"}
		for _, p := range prompts {
			args = append(args, "-prompt", p)
		}
		o, err := parse(args, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if err := o.readPrompts(nil); err != nil {
			t.Fatal(err)
		}
		var out, errs bytes.Buffer
		if err := generate(context.Background(), o, &out, &errs); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(errs.String(), "\nprompt: ") || strings.Count(errs.String(), "prompt: ") != 1 {
			t.Errorf("progress: %q", errs.String())
		}
		return out.String()
	}
	short := "Once upon a time"
	alone, beside := text(short), text(short, long)
	if _, body, ok := strings.Cut(beside, "\n"); !ok || !strings.HasPrefix(body, alone) || alone == "" {
		t.Errorf("%q beside a long prompt, %q alone", beside, alone)
	}
}

// What prompts begin with is read once, and the texts are those of prompts that are read each for itself.
func TestSharedBeginnings(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 400 })
	rng := reftest.Rand(t)
	begin := strings.Repeat("All of them begin so. ", 7) // 155 tokens with the one before it, and three pages
	for _, c := range []struct {
		prompts []string
		shared  []int
	}{
		{[]string{begin + "a", begin + "b c", "All of"}, []int{0, 155, 0}},
		{[]string{begin, begin, begin + "x"}, []int{0, 154, 155}},
		{[]string{"All of them begin alike", begin + "one", "x", begin + "other", begin + "o"}, []int{0, 19, 0, 156, 155}},
		{[]string{begin + "x", begin[:15], begin[:16], begin[:17]}, []int{0, 0, 16, 17}},
	} {
		all := [][]string{{}, {"-chunk", "9"}, {"-temperature", "0.6", "-seed", "3"}, {"-draft", "ngram"}, {"-n", "1"}}
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, flags := range all[:reftest.Cases(t, 2, len(all))] {
			args := slices.Concat([]string{"-model", dir, "-n", "25"}, flags)
			all := slices.Clone(args)
			for _, p := range c.prompts {
				all = append(all, "-prompt", p)
			}
			got, want, shared := jsonOf(t, all...), jsonOf(t, append(slices.Clone(all), "-attn", "default")...), 0
			for i, x := range got.Texts {
				w := want.Texts[i]
				if !slices.Equal(x.Tokens, w.Tokens) || x.Reason != w.Reason || x.Shared != c.shared[i] || w.Shared != 0 {
					t.Errorf("%v, text %d shares %d: %q, want %q, %d", flags, i, x.Shared, x.Text, w.Text, c.shared[i])
				}
				shared += x.Shared
			}
			// Some of the texts' tokens are read beside prompts.
			if s, w := got.Stats, want.Stats; s.Prefill.Tokens+s.Decode.Tokens != w.Prefill.Tokens+w.Decode.Tokens-shared {
				t.Errorf("%v: %+v, %+v, and without sharing %d tokens %+v, %+v", flags, s.Prefill, s.Decode, shared, w.Prefill, w.Decode)
			}
		}
	}
}

// -n-samples makes the texts of a prompt that is given so many times, and reads it once.
func TestSamples(t *testing.T) {
	dir := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 400 })
	file := filepath.Join(t.TempDir(), "cache")
	for _, prompt := range []string{"A prompt that is long enough to share", "ab"} {
		for _, flags := range [][]string{nil, {"-prompt-cache", file}, {"-prompt-cache", file}, {"-attn", "default"}, {"-draft", "ngram"}, {"-top-k", "5"}, {"-logprobs", "1"}} {
			args := append([]string{"-model", dir, "-n", "30", "-temperature", "0.9", "-seed", "11", "-prompt", prompt}, flags...)
			got := jsonOf(t, append(slices.Clone(args), "-n-samples", "4")...)
			if len(flags) > 0 && flags[0] == "-prompt-cache" {
				args = args[:len(args)-2]
			}
			for range 3 {
				args = append(args, "-prompt", prompt)
			}
			want := jsonOf(t, args...)
			if len(got.Texts) != 4 {
				t.Fatalf("%v: %d texts", flags, len(got.Texts))
			}
			for i, x := range got.Texts {
				if !slices.Equal(x.Tokens, want.Texts[i].Tokens) || x.Prompt != prompt {
					t.Errorf("%v, text %d of %q: %q, want %q", flags, i, x.Prompt, x.Text, want.Texts[i].Text)
				}
				for _, y := range got.Texts[:i] {
					if slices.Equal(x.Tokens, y.Tokens) {
						t.Errorf("%v: two texts are one: %q", flags, x.Text)
					}
				}
			}
		}
	}
	status, out, _ := command(t, "-model", dir, "-prompt", "ab", "-prompt", "cd", "-n", "3", "-n-samples", "2", "-temperature", "1", "-seed", "1")
	if status != 0 || strings.Count(out, "] ab\n") != 2 || !strings.Contains(out, "[2] ab\n") || !strings.Contains(out, "[4] cd\n") {
		t.Errorf("status %d, %q", status, out)
	}
}

// On a terminal the line that tells how far the prompts are is not written into a
// text that has begun.
func TestProgressRests(t *testing.T) {
	var out strings.Builder
	p := progress{w: &out, what: "prompt", total: 9, live: true, began: time.Now()}
	p.show(3, true)
	p.rest()
	out.WriteString("a text ")
	p.show(3, false)
	p.show(3, true)
	out.WriteString("goes on\n")
	p.end()
	p.end()
	if got, want := out.String(), "\rprompt: 3 of 9 tokens\na text goes on\n\rprompt: 9 of 9 tokens in 0.00 s\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
