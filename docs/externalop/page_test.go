package externalop

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPage: the code of docs/external-op.md is code of this package, every test
// that it names is where it says, and it names every test of this package.
func TestPage(t *testing.T) {
	page, err := os.ReadFile("../external-op.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, name := range files {
		code.WriteString(read(t, name))
	}

	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	all := squeeze(code.String())
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	if len(blocks) == 0 {
		t.Error("the page has no code")
	}
	for _, b := range blocks {
		for part := range strings.SplitSeq(b[1], "\n\n") {
			if !strings.Contains(all, squeeze(part)) {
				t.Errorf("this code is in no file of the package:\n%s", part)
			}
		}
	}

	for _, m := range regexp.MustCompile(`\]\(([^):]+)\)`).FindAllStringSubmatch(string(page), -1) {
		if _, err := os.Stat(filepath.Join("..", m[1])); err != nil {
			t.Errorf("the page links to what is not there: %v", err)
		}
	}

	named := map[string]bool{}
	for _, m := range regexp.MustCompile(`\[((?:Test|Example|Benchmark)\w+)\]\(([^)]+)\)`).FindAllStringSubmatch(string(page), -1) {
		named[m[1]] = true
		if !strings.Contains(read(t, filepath.Join("..", m[2])), "\nfunc "+m[1]+"(") {
			t.Errorf("%s has no %s", m[2], m[1])
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Example|Benchmark)\w+)\(`).FindAllStringSubmatch(code.String(), -1) {
		if !named[m[1]] && m[1] != "TestPage" {
			t.Errorf("the page does not name %s", m[1])
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Error(err)
	}
	return string(text)
}
