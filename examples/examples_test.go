// Package examples tests what a reader who copies an example relies on.
package examples

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestPublic: examples import public packages alone, apart from the small model, and are short.
func TestPublic(t *testing.T) {
	const module, most = "gorgonia.org/leanattention/", 300
	for _, example := range []string{"opt", "llama", "train"} {
		files, err := filepath.Glob(example + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		lines := 0
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			lines += strings.Count(string(data), "\n")
			f, err := parser.ParseFile(token.NewFileSet(), name, data, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range f.Imports {
				path, _ := strconv.Unquote(i.Path.Value)
				if rest, ok := strings.CutPrefix(path, module); ok && rest != "examples/opt/tiny" && (strings.Contains("/"+rest, "/internal/") || strings.HasPrefix(rest, "examples/")) {
					t.Errorf("%s imports %s", name, path)
				}
			}
		}
		if lines > most {
			t.Errorf("%s has %d lines, and may have %d", example, lines, most)
		}
	}
}
