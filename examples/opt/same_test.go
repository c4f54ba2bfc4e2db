package main

import (
	"bytes"
	"encoding/binary"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Every flag is one that ranks must have alike, or one that may differ: a new flag has to be put into one of these two lists. Each
// of them has two command lines that differ in the flag.
func TestSameFlags(t *testing.T) {
	const prompt = "-prompt a "
	alike := map[string][2]string{
		"i":            {prompt, "-i"},
		"stride":       {"-perplexity f -stride 1", "-perplexity f -stride 2"},
		"special":      {prompt, prompt + "-special"},
		"n":            {prompt, prompt + "-n 2"},
		"n-samples":    {prompt + "-temperature 1 -seed 1", prompt + "-temperature 1 -seed 1 -n-samples 2"},
		"stop":         {prompt + "-stop a", prompt + "-stop b"},
		"temperature":  {prompt + "-seed 1 -temperature 1", prompt + "-seed 1 -temperature 0.5"},
		"top-k":        {prompt + "-seed 1 -top-k 1", prompt + "-seed 1 -top-k 2"},
		"top-p":        {prompt + "-seed 1 -top-p 0.1", prompt + "-seed 1 -top-p 0.2"},
		"seed":         {prompt + "-seed 1", prompt + "-seed 2"},
		"attn":         {prompt, prompt + "-attn fixed"},
		"linear":       {prompt, prompt + "-linear stock"},
		"weights":      {prompt, prompt + "-weights f16"},
		"cache":        {prompt, prompt + "-cache f16"},
		"shard":        {prompt + "-device gpu:0,1", prompt + "-device gpu:0,1 -shard heads"},
		"draft":        {prompt, prompt + "-draft ngram"},
		"draft-tokens": {prompt + "-draft ngram", prompt + "-draft ngram -draft-tokens 2"},
		"workers":      {prompt, prompt + "-workers 1"},
		"chunk":        {prompt, prompt + "-chunk 1"},
		"mixed":        {prompt, prompt + "-mixed"},
		"logprobs":     {prompt + "-json", prompt + "-json -logprobs 1"},
	}
	differ := map[string][2]string{
		"model":        {prompt, prompt + "-model d"},
		"prompt":       {prompt, "-prompt b"},
		"prompts":      {"-prompts f", "-prompts g"},
		"perplexity":   {"-perplexity f", "-perplexity g"},
		"prompt-cache": {prompt, prompt + "-prompt-cache f"},
		"device":       {prompt, prompt + "-device gpu:1"},
		"stats":        {prompt, prompt + "-stats"},
		"json":         {prompt, prompt + "-json"},
	}
	newFlags(new(options), new(named)).VisitAll(func(f *flag.Flag) {
		both, compared := alike[f.Name]
		other, free := differ[f.Name]
		if compared == free {
			t.Errorf("-%s: is it to be alike on all ranks, or may it differ? The lists of this test have it neither or both", f.Name)
			return
		}
		if free {
			both = other
		}
		var lists [2][]string
		for i, line := range both {
			o, err := parse(strings.Fields(line), io.Discard)
			if err != nil {
				t.Errorf("%s: %v", line, err)
				return
			}
			lists[i] = o.flags
		}
		var names []string
		for _, line := range slices.Concat(lists[0], lists[1]) {
			if !slices.Contains(lists[0], line) || !slices.Contains(lists[1], line) {
				name, _, _ := strings.Cut(line, " ")
				names = append(names, name)
			}
		}
		switch want := []string{"-" + f.Name, "-" + f.Name}; {
		case free && names != nil:
			t.Errorf("-%s may differ, and %q do", f.Name, names)
		case compared && !slices.Equal(names, want):
			t.Errorf("-%s is %q in one and %q in the other, and %q differ", f.Name, both[0], both[1], names)
		}
	})
	// A temperature that is not given counts as what it is.
	a, err := parse([]string{"-prompt", "a", "-seed", "1", "-top-k", "2"}, io.Discard)
	b, e := parse([]string{"-prompt", "a", "-seed", "1", "-top-k", "2", "-temperature", "1.0"}, io.Discard)
	if err != nil || e != nil || !slices.Equal(a.flags, b.flags) {
		t.Errorf("%q, %q; %v, %v", a.flags, b.flags, err, e)
	}
}

// copyModel copies a model's folder, and changes one of its files.
func copyModel(t *testing.T, from, name string, change func(data []byte) []byte) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	if name == "" {
		return dir
	}
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), change(bytes.Clone(data)), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// flipped is a change of one bit of a safetensors file's data, near a part of it.
func flipped(part float64) func([]byte) []byte {
	return func(data []byte) []byte {
		header := 8 + int(binary.LittleEndian.Uint64(data))
		data[header+int(part*float64(len(data)-header-1))] ^= 1
		return data
	}
}

// replaced is a change of a text in a file.
func replaced(old, new string) func([]byte) []byte {
	return func(data []byte) []byte {
		if !bytes.Contains(data, []byte(old)) {
			panic(old)
		}
		return bytes.Replace(data, []byte(old), []byte(new), 1)
	}
}

// What decides about the text is compared, and where it comes from is not.
func TestSameContents(t *testing.T) {
	dir := writeModel(t, nil)
	text := filepath.Join(t.TempDir(), "text")
	long := strings.Repeat("a long text ", 100)
	if err := os.WriteFile(text, []byte("Once\n\n"+long+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	list := func(args ...string) []string {
		t.Helper()
		o, err := parsed(args)
		if err != nil {
			t.Fatal(err)
		}
		if o.perplexity != "" {
			if o.text, err = readBounded(o.perplexity, nil, maxText); err != nil {
				t.Fatal(err)
			}
		}
		l, err := load(o, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		l.options.world.Size = 2
		all, err := l.same()
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	type change struct {
		what string // the beginning of the line that differs; empty: none does
		args []string
	}
	once := []string{"-prompt", "Once", "-prompt", long}
	with := func(dir string, args ...string) []string { return append([]string{"-model", dir}, args...) }
	copied := func(name string, change func([]byte) []byte) []string {
		return with(copyModel(t, dir, name, change), once...)
	}
	changes := []change{
		{"", with(dir, once...)},
		{"", with(dir, "-prompts", text)},
		{"", copied("", nil)},
		{"prompt 1: Once", with(dir, "-prompt", "Omce", "-prompt", long)},
		{"prompt 2: a long text a long text ", with(dir, "-prompt", "Once", "-prompt", long[:len(long)-1]+"!")},
		{"prompt 2: a long text a long text ", with(dir, "-prompt", "Once")},
		{"model's Activation: gelu", copied("config.json", replaced(`{`, `{"activation_function":"gelu",`))},
		{"model's end of text: [3]", copied("config.json", replaced(`"eos_token_id":2`, `"eos_token_id":3`))},
		{"tokenizer: ", copied("vocab.json", replaced(`"a":`, `"a" :`))},
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		changes = append(changes, change{"weight ", copied("model.safetensors", flipped(rng.Float64()))})
	}
	changes = append(changes, change{"weight ", copied("model.safetensors", flipped(1))}, change{"weight ", copied("model.safetensors", flipped(0))})
	base := list(changes[0].args...)
	for _, c := range changes {
		got := list(c.args...)
		var differ []string
		for _, line := range slices.Concat(got, base) {
			if !slices.Contains(base, line) || !slices.Contains(got, line) {
				differ = append(differ, line)
			}
		}
		ok := (c.what == "") == (len(differ) == 0)
		if c.what != "" {
			ok = ok && len(differ) <= 4 && slices.ContainsFunc(differ, func(line string) bool { return strings.HasPrefix(line, c.what) })
		}
		if !ok {
			t.Errorf("%.60q: %q, want %q", c.args, differ, c.what)
		}
	}
	a, b := list(with(dir, "-perplexity", text)...), list(with(dir, "-perplexity", filepath.Join(dir, "config.json"))...)
	if slices.Equal(a, b) || !slices.ContainsFunc(a, func(line string) bool { return strings.HasPrefix(line, "text of -perplexity: Once") }) {
		t.Errorf("texts of -perplexity: %.300q, %.300q", a, b)
	}
}
