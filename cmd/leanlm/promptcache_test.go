package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	story  = "Once upon a time there was a girl who lived in a small house near the big forest with her mother"
	longer = story + " and her little dog"
)

// cached runs leanlm generate with a prompt cache.
func cached(t testing.TB, file, prompt string, args ...string) (textJSON, string) {
	t.Helper()
	status, out, errs := leanlm(t, "", append([]string{"generate", "-p", prompt, "-n", "12", "-exact", "-json", "-stats", "-prompt-cache", file}, args...)...)
	var d document
	if err := json.Unmarshal([]byte(out), &d); status != 0 || err != nil {
		t.Fatalf("%d, %s, %v", status, errs, err)
	}
	return d.Texts[0], errs
}

// TestPromptCache: with a prompt cache texts are the same, and what is in the file is not computed.
func TestPromptCache(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cache")
	king := "Once upon a time there was a girl who lived in a small house near the big forest. The king slept"
	size := int64(0)
	for _, c := range []struct {
		name, prompt string
		grows        bool
		shared       func(prompt int) int
	}{
		{"none", story, true, func(int) int { return 0 }},
		{"the same", story, false, func(n int) int { return n - 1 }}, // the last one is read for what follows
		{"longer", longer, true, func(n int) int { return n - 4 }},
		{"the beginning", story, false, func(n int) int { return n - 1 }},
		{"the same again", longer, false, func(n int) int { return n - 1 }},
	} {
		var want document
		_, out, _ := leanlm(t, "", "generate", "-p", c.prompt, "-n", "12", "-exact", "-json")
		if err := json.Unmarshal([]byte(out), &want); err != nil {
			t.Fatal(err)
		}
		got, errs := cached(t, file, c.prompt)
		if got.Text != want.Texts[0].Text || got.Text == "" {
			t.Errorf("%s: %q, want %q", c.name, got.Text, want.Texts[0].Text)
		}
		if n := len(got.PromptTokens); got.Shared != c.shared(n) || n < 18 {
			t.Errorf("%s: %d of %d tokens, want %d: %s", c.name, got.Shared, n, c.shared(n), errs)
		}
		info, err := os.Stat(file)
		if err != nil || c.grows != (info.Size() > size) {
			t.Errorf("%s: %d bytes after %d, %v", c.name, info.Size(), size, err)
		}
		size = info.Size()
	}
	// A text with another end replaces the file.
	if got, _ := cached(t, file, king); got.Shared < 16 || got.Shared > len(got.PromptTokens)-3 {
		t.Errorf("%d of %d tokens", got.Shared, len(got.PromptTokens))
	}
	if got, _ := cached(t, file, king); got.Shared != len(got.PromptTokens)-1 {
		t.Errorf("%d of %d tokens", got.Shared, len(got.PromptTokens))
	}
	files, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(files) != 1 {
		t.Errorf("files are left: %v, %v", files, err)
	}
	// A prompt that was cut is not written, and the reason is told.
	cut := filepath.Join(filepath.Dir(file), "cut")
	if _, errs := cached(t, cut, longer, "-c", "20", "-keep", "2"); !strings.Contains(errs, "not written: 3 of the prompt's") {
		t.Errorf("%s", errs)
	}
	if _, err := os.Stat(cut); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

// TestPromptCacheMisfits: a file that does not fit is an error that names why, and stays as it is.
func TestPromptCacheMisfits(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cache")
	cached(t, file, story)
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	changed := func(i int) []byte {
		b := slices.Clone(good)
		b[(i+len(b))%len(b)] ^= 0x41
		return b
	}
	other := writeShipped(t)
	if err := os.WriteFile(filepath.Join(other, "tokenizer_config.json"), []byte(`{"add_bos_token":false}`), 0o666); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(other, "config.json")
	if data, err := os.ReadFile(config); err != nil || os.WriteFile(config, bytes.Replace(data, []byte("{"), []byte(`{"_name_or_path": "another",`), 1), 0o666) != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		data []byte
		want string
		more []string
	}{
		{"another model", good, `the text is of "the shipped model/config.json (`, []string{"-m", other}},
		{"weights of another type", good, `float32 weights, exact products)": other keys`, []string{"-weights", "f32"}},
		{"another cache", good, "float32", []string{"-cache", "bf16"}},
		{"a smaller context", good, "tokens, and Options.Context is 10", []string{"-c", "10", "-keep", "1"}},
		{"nothing", nil, "no saved text", nil},
		{"something else", []byte("something else altogether"), "no saved text", nil},
		{"another version", changed(8), "of version 64, and this package reads version 1", nil},
		{"a damaged name", changed(60), "damaged", nil},
		{"damaged keys", changed(-200), "ReadSequence", nil},
		{"half", good[:len(good)/2], "ReadSequence", nil},
		{"more", append(slices.Clone(good), 0), "something follows the end", nil},
	} {
		if err := os.WriteFile(file, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		status, out, errs := leanlm(t, "", append([]string{"generate", "-p", story, "-n", "3", "-exact", "-prompt-cache", file}, c.more...)...)
		if status != exitError || out != "" || !strings.Contains(errs, "leanlm: -prompt-cache "+file+": ") || !strings.Contains(errs, c.want) {
			t.Errorf("%s: status %d, %q, %s", c.name, status, out, errs)
		}
		if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, c.data) {
			t.Errorf("%s: the file is another one: %v", c.name, err)
		}
	}
	for _, name := range []string{dir, filepath.Join(dir, "none", "cache"), filepath.Join(file, "cache"), os.DevNull} {
		if status, out, errs := leanlm(t, "", "generate", "-p", story, "-prompt-cache", name); status != exitError || out != "" || !strings.Contains(errs, "-prompt-cache "+name+": ") {
			t.Errorf("%s: status %d, %q, %s", name, status, out, errs)
		}
	}
	if status, _, errs := leanlm(t, "", "generate", "-p", "a", "-p", "b", "-prompt-cache", file); status != exitUsage || !strings.Contains(errs, "-prompt-cache is for one prompt, and there are 2") {
		t.Errorf("%d, %s", status, errs)
	}
}

// TestPromptCacheWritten: a link stays a link and its target is written, and an interrupt before the prompt is read writes
// nothing.
func TestPromptCacheWritten(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "cache")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if status := run(ctx, []string{"generate", "-p", story, "-prompt-cache", file}, streams{nil, io.Discard, io.Discard}); status != exitInterrupted {
		t.Errorf("interrupted: status %d", status)
	}
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("interrupted: %v", err)
	}
	cached(t, file, story)
	if err := os.Symlink("cache", filepath.Join(dir, "link")); err != nil {
		t.Skipf("no links: %v", err)
	}
	if got, _ := cached(t, filepath.Join(dir, "link"), longer); got.Shared == 0 {
		t.Error("nothing is shared")
	}
	// The target of a link need not exist, and may be behind other links.
	for _, l := range [][2]string{{"one", "later"}, {"two", "sub/up"}, {"sub/up", "../latest"}} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, "sub"), 0o777), os.Symlink(l[1], filepath.Join(dir, l[0]))); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"link": "cache", "one": "later", "two": "latest"} {
		for range 2 {
			cached(t, filepath.Join(dir, name), longer)
			if info, err := os.Lstat(filepath.Join(dir, name)); err != nil || info.Mode()&os.ModeSymlink == 0 {
				t.Errorf("%s is no link: %v", name, err)
			}
		}
		if got, _ := cached(t, filepath.Join(dir, target), longer); got.Shared != len(got.PromptTokens)-1 {
			t.Errorf("%s: %d of %d tokens", target, got.Shared, len(got.PromptTokens))
		}
	}
	for name, to := range map[string]string{"nowhere": "none/\x1b[2Jx", "round": "round"} {
		link := filepath.Join(dir, name)
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
		status, _, errs := leanlm(t, "", "generate", "-p", story, "-prompt-cache", link)
		if status != exitError || !strings.Contains(errs, "-prompt-cache "+link) || !strings.Contains(errs, printable(to)) {
			t.Errorf("%s: status %d, %s", name, status, errs)
		}
		if l, err := os.Readlink(link); err != nil || l != to {
			t.Errorf("%s: %q, %v", name, l, err)
		}
	}
}
