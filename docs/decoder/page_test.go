package main

import (
	"path/filepath"
	"slices"
	"testing"

	"gorgonia.org/leanattention/docs/internal/page"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/examples/opt/tiny"
	"gorgonia.org/leanattention/nn"
)

// The code of docs/decoder.md is code of this package or of examples/llama, and its outputs are those that
// the examples are checked for.
func TestPage(t *testing.T) {
	text := page.Read(t, "../decoder.md")
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	llama, err := filepath.Glob("../../examples/llama/*.go")
	if err != nil {
		t.Fatal(err)
	}
	page.Code(t, text, append(files, llama...)...)
	page.Links(t, text, "..")
}

// The texts do not depend on how many rows a step has, nor on who else is in it.
func TestSteps(t *testing.T) {
	folder, err := hf.OpenFS("tiny", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	prompts := [][]int{{2, 300, 301, 302, 303, 304, 305}, {2, 700}, {2, 900, 901, 902}}
	generate := func(rows int, prompts ...[]int) [][]int {
		d, err := newDecoder(folder, rows, len(prompts), 256)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := d.generate(prompts, 8, -1, nn.Choice{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if s := d.cache.Stats(); s.Sequences != 0 || s.FreePages != s.Pages {
			t.Errorf("generate keeps %+v", s)
		}
		if err := d.close(); err != nil {
			t.Fatal(err)
		}
		return ids
	}
	want := generate(16, prompts...)
	for _, rows := range []int{1, 3} {
		if got := generate(rows, prompts...); !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("%d rows: %v, want %v", rows, got, want)
		}
	}
	for i, p := range prompts {
		if got := generate(4, p); !slices.Equal(got[0], want[i]) {
			t.Errorf("alone: %v, want %v", got[0], want[i])
		}
	}
}

// What cannot be is an error, and no panic.
func TestErrors(t *testing.T) {
	folder, err := hf.OpenFS("tiny", tiny.Files)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if _, err := newDecoder(folder, 0, 1, 64); err == nil {
		t.Error("a decoder of no rows")
	}
	d, err := newDecoder(folder, 2, 1, 16)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	for name, prompts := range map[string][][]int{
		"two prompts": {{2}, {2}}, "an unknown token": {{1 << 20}}, "a long prompt": {make([]int, 100)}, "an empty one": {{}},
	} {
		if _, err := d.generate(prompts, 2, -1, nn.Choice{}, 0); err == nil {
			t.Errorf("%s: no error", name)
		} else {
			t.Log(err)
		}
		if s := d.cache.Stats(); s.Sequences != 0 || s.FreePages != s.Pages {
			t.Errorf("%s: %+v is left", name, s)
		}
	}
}
