package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/devicetest"
)

// With a prompt cache texts are the same, and only what is not in it is read.
func TestPromptCache(t *testing.T) { testPromptCache(t) }

func TestGPUPromptCache(t *testing.T) {
	devicetest.Open(t)
	testPromptCache(t, "-device", "gpu")
}

func testPromptCache(t *testing.T, flags ...string) {
	file := filepath.Join(t.TempDir(), "cache")
	const prompt = "Once upon a time there was a girl"
	n := "12"
	if testing.Short() { // an emulated GPU is slow
		n = "2"
	}
	for _, c := range []struct {
		name, prompt        string
		cached, read, holds int // tokens
	}{
		{"none", prompt, 0, 9, 9},
		{"the same", prompt, 8, 1, 9}, // the last one is read for what follows
		{"longer", prompt + " who went", 9, 2, 11},
		{"the beginning", prompt, 8, 1, 11},
		{"the same again", prompt + " who went", 10, 1, 11},
		{"another end", "Once upon a time the king", 5, 2, 7},
		{"another text", "In the morning", 1, 3, 4},
	} {
		want := jsonOf(t, append([]string{"-prompt", c.prompt, "-n", n}, flags...)...)
		got := jsonOf(t, append([]string{"-prompt", c.prompt, "-n", n, "-prompt-cache", file}, flags...)...)
		x := got.Texts[0]
		if x.Text != want.Texts[0].Text || x.Text == "" || !slices.Equal(x.PromptTokens, want.Texts[0].PromptTokens) {
			t.Errorf("%s: %q, want %q", c.name, x.Text, want.Texts[0].Text)
		}
		if x.Cached != c.cached || got.Stats.Prefill.Tokens != c.read || want.Stats.Prefill.Tokens != len(x.PromptTokens) {
			t.Errorf("%s: %d tokens from the file and %d read, want %d and %d", c.name, x.Cached, got.Stats.Prefill.Tokens, c.cached, c.read)
		}
		if h := readHead(t, file); len(h.tokens) != c.holds {
			t.Errorf("%s: the file has %d tokens, want %d", c.name, len(h.tokens), c.holds)
		}
	}
	files, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(files) != 1 {
		t.Errorf("files are left: %v, %v", files, err)
	}
}

func readHead(t *testing.T, file string) (c promptCache) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err == nil {
		err = c.readHead(bytes.NewReader(data), 2048, 2048)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A file that does not fit is an error that names why, and stays as it is.
func TestPromptCacheMisfits(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cache")
	model := writeModel(t, nil)
	args := []string{"-model", model, "-prompt", "abcdef", "-n", "3", "-prompt-cache"}
	if status, _, log := command(t, append(args, file)...); status != 0 {
		t.Fatal(log)
	}
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	other := writeModel(t, func(c map[string]any) { c["num_hidden_layers"] = 1 })
	wide := writeModel(t, func(c map[string]any) { c["max_position_embeddings"] = 4 })
	changed := func(i int) []byte {
		b := slices.Clone(good)
		b[(i+len(b))%len(b)] ^= 0x41
		return b
	}
	headed := func(change func(*promptCache)) []byte {
		var c promptCache
		r, b := bytes.NewReader(good), bytes.Buffer{}
		err := c.readHead(r, 64, 264)
		change(&c)
		if err := errors.Join(err, c.writeHead(&b)); err != nil {
			t.Fatal(err)
		}
		return append(b.Bytes(), good[len(good)-r.Len():]...)
	}
	for _, c := range []struct {
		name string
		data []byte
		want string
		more []string
	}{
		{"another model", good, fmt.Sprintf("of another model or of other weights: of %q", model+" (2 layers")[:60], []string{"-model", other}},
		{"weights of another type", good, `stored weights)", and this is`, []string{"-weights", "f16"}},
		{"another cache", good, "float32", []string{"-cache", "bf16"}},
		{"a shorter model", good, "7 tokens, more than the 4", []string{"-model", wide, "-prompt", "a"}},
		{"nothing", nil, "no prompt cache", nil},
		{"something else", []byte("something else altogether"), "no prompt cache", nil},
		{"another version", changed(8), "of version 64, and this program reads version 1", nil},
		{"a damaged head", changed(20), "damaged", nil},
		{"a damaged name", changed(50), "damaged", nil},
		{"damaged keys", changed(-200), "ReadSequence", nil},
		{"a damaged end", changed(-1), "ReadSequence", nil},
		{"the head alone", good[:100], "ends in the middle", nil},
		{"half", good[:len(good)-300], "ReadSequence", nil},
		{"more", append(slices.Clone(good), 0), "behind its end", nil},
		{"a head of more tokens", headed(func(c *promptCache) { c.tokens = slices.Repeat([]int{5}, 64) }), "the saved sequence has 7 tokens, and 64 are expected", nil},
		{"a head of one token more", headed(func(c *promptCache) { c.tokens = append(c.tokens, 5) }), "the saved sequence has 7 tokens, and 8 are expected", nil},
		{"a head of fewer tokens", headed(func(c *promptCache) { c.tokens = c.tokens[:6] }), "the saved sequence has 7 tokens, and 6 are expected", nil},
		{"a head of no tokens", headed(func(c *promptCache) { c.tokens = nil }), "the saved sequence has 7 tokens, and 0 are expected", nil},
		{"a token beyond the vocabulary", headed(func(c *promptCache) { c.tokens[0] = -1 }), "token 4294967295, and the model has", nil},
		{"a name that a terminal obeys", headed(func(c *promptCache) {
			c.model, c.fingerprint[0] = "\x1b]0;a\a\x1b[2J\u009b31m\nopt: fine\r\u202e", ^c.fingerprint[0]
		}), `of "\x1b]0;a\a\x1b[2J\u009b31m\nopt: fine\r\u202e", and`, nil},
	} {
		if err := os.WriteFile(file, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		run := append(append(slices.Clone(args), file), c.more...)
		if len(c.more) > 2 { // -prompt is given again
			run = append([]string{"-n", "3", "-prompt-cache", file}, c.more...)
		}
		status, out, log := command(t, run...)
		if status != 1 || out != "" || !strings.Contains(log, "opt: -prompt-cache "+file+": ") || !strings.Contains(log, c.want) {
			t.Errorf("%s: status %d, %q, %s", c.name, status, out, log)
		}
		obeyed(t, log)
		if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, c.data) {
			t.Errorf("%s: the file is another one: %v", c.name, err)
		}
	}
	for _, name := range []string{dir, filepath.Join(dir, "none", "cache"), filepath.Join(file, "cache"), os.DevNull} {
		if status, out, log := command(t, append(args, name)...); status != 1 || out != "" || !strings.Contains(log, "-prompt-cache "+name+": ") {
			t.Errorf("%s: status %d, %q, %s", name, status, out, log)
		}
	}
}

// A link stays a link and its target is written, and an interrupt before the prompt is read writes nothing.
func TestPromptCacheWritten(t *testing.T) {
	dir, model := t.TempDir(), writeModel(t, nil)
	file, link := filepath.Join(dir, "cache"), filepath.Join(dir, "link")
	args := []string{"-model", model, "-prompt", "abcdef", "-n", "3", "-prompt-cache", file}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if status := run(ctx, args, nil, io.Discard, io.Discard); status != 130 {
		t.Errorf("interrupted: status %d", status)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("interrupted: %v", err)
	}
	if status, _, log := command(t, args...); status != 0 {
		t.Fatal(log)
	}
	if err := os.Symlink("cache", link); err != nil {
		t.Skipf("no links: %v", err)
	}
	if status, _, log := command(t, "-model", model, "-prompt", "abcdefghi", "-n", "3", "-prompt-cache", link); status != 0 {
		t.Fatal(log)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is none: %v", err)
	}
	if n := len(readHead(t, file).tokens); n != 10 {
		t.Errorf("the file behind the link has %d tokens", n)
	}

	// The file that a link leads to need not be there, and may be behind other links.
	for _, l := range [][2]string{{"one", "later"}, {"two", "sub/up"}, {"sub/up", "../latest"}} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, "sub"), 0o777), os.Symlink(l[1], filepath.Join(dir, l[0]))); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"one": "later", "two": "latest"} {
		args[len(args)-1] = filepath.Join(dir, name)
		for range 2 {
			if status, _, log := command(t, args...); status != 0 {
				t.Fatal(log)
			}
			if info, err := os.Lstat(args[len(args)-1]); err != nil || info.Mode()&os.ModeSymlink == 0 {
				t.Errorf("%s is no link: %v", name, err)
			}
			if n := len(readHead(t, filepath.Join(dir, target)).tokens); n != 7 {
				t.Errorf("%s: %d tokens", target, n)
			}
		}
	}
	for name, to := range map[string]string{"nowhere": "none/\x1b[2Jx", "round": "round"} {
		args[len(args)-1] = filepath.Join(dir, name)
		if err := os.Symlink(to, args[len(args)-1]); err != nil {
			t.Fatal(err)
		}
		status, _, log := command(t, args...)
		if status != 1 || !strings.Contains(log, "-prompt-cache "+args[len(args)-1]) || !strings.Contains(log, printable(to)) {
			t.Errorf("%s: status %d, %s", name, status, log)
		}
		obeyed(t, log)
		if l, err := os.Readlink(args[len(args)-1]); err != nil || l != to {
			t.Errorf("%s: %q, %v", name, l, err)
		}
	}
}

// A head of any bytes is an error or what it was written as, and takes no more memory
// than a model can have tokens.
func FuzzPromptCache(f *testing.F) {
	var good bytes.Buffer
	c := promptCache{model: "a model", tokens: []int{2, 5, 9}}
	if err := c.writeHead(&good); err != nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes())
	f.Add(good.Bytes()[:50])
	f.Add(slices.Concat(good.Bytes()[:44], []byte{0xff, 0xff, 0xff, 0xff}))
	f.Fuzz(func(t *testing.T, data []byte) {
		var c promptCache
		r := bytes.NewReader(data)
		if err := c.readHead(r, 64, 300); err != nil {
			return
		}
		var again bytes.Buffer
		if err := c.writeHead(&again); err != nil || !bytes.Equal(again.Bytes(), data[:len(data)-r.Len()]) {
			t.Fatalf("%+v of %x is written as %x, %v", c, data, &again, err)
		}
	})
}
