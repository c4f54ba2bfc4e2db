package externalop

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gorgonia.org/leanattention/docs/internal/page"
)

// TestPage: the code of docs/external-op.md is code of this package, every test
// that it names is where it says, and it names every test of this package.
func TestPage(t *testing.T) {
	text := page.Read(t, "../external-op.md")
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	page.Code(t, text, files...)
	page.Links(t, text, "..")

	var code strings.Builder
	for _, name := range files {
		code.WriteString(page.Read(t, name))
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile(`\[((?:Test|Example|Benchmark)\w+)\]\(([^)]+)\)`).FindAllStringSubmatch(text, -1) {
		named[m[1]] = true
		if !strings.Contains(page.Read(t, filepath.Join("..", m[2])), "\nfunc "+m[1]+"(") {
			t.Errorf("%s has no %s", m[2], m[1])
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^func ((?:Test|Example|Benchmark)\w+)\(`).FindAllStringSubmatch(code.String(), -1) {
		if !named[m[1]] && m[1] != "TestPage" {
			t.Errorf("the page does not name %s", m[1])
		}
	}
}
