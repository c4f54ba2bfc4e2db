// Package page checks the pages of docs: what they show is code that tests run, and
// what they link to is there.
package page

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Read is the text of a file.
func Read(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Error(err)
	}
	return string(text)
}

// Code has every part of the page's go blocks (parts are divided by empty lines) in one of
// the files, and every text block in a comment of one: the output of an example. White
// space does not matter.
func Code(t testing.TB, page string, files ...string) {
	t.Helper()
	var code strings.Builder
	for _, name := range files {
		code.WriteString(Read(t, name) + "\n")
	}
	contains(t, page, "go", "code", squeeze(code.String()))
	contains(t, page, "text", "output", squeeze(strings.ReplaceAll(code.String(), "//", "")))
}

func contains(t testing.TB, page, language, what, all string) {
	t.Helper()
	blocks := regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(page, -1)
	if len(blocks) == 0 && language == "go" {
		t.Error("the page has no code")
	}
	for _, b := range blocks {
		for part := range strings.SplitSeq(b[1], "\n\n") {
			if !strings.Contains(all, squeeze(part)) {
				t.Errorf("this %s is in no file:\n%s", what, part)
			}
		}
	}
}

func squeeze(s string) string { return strings.Join(strings.Fields(s), " ") }

// Links has every file that the page links to: paths are from dir, where the page is.
func Links(t testing.TB, page, dir string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`\]\(([^):]+)\)`).FindAllStringSubmatch(page, -1) {
		if _, err := os.Stat(filepath.Join(dir, m[1])); err != nil {
			t.Errorf("the page links to what is not there: %v", err)
		}
	}
}
