package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
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
	if err != nil || !slices.Equal(o.prompts, []string{"zeroth", "first", " second ", "third"}) {
		t.Errorf("%q, %v", o.prompts, err)
	}
	for _, args := range [][]string{{"-prompts", name + ".gone"}, {"-prompts", os.DevNull}} {
		if _, err := parse(args, io.Discard); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}
