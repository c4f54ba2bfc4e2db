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
	for _, args := range [][]string{{"-prompts", name + ".gone"}, {"-prompts", os.DevNull}} {
		if status, _, log := command(t, args...); status != 1 || !strings.Contains(log, "-prompts") {
			t.Errorf("%v: status %d, %s", args, status, log)
		}
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
