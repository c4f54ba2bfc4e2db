package leanattention_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// Arrows between packages go down: what each group of packages may not import. A package is named by its folder, "." is the
// root, and "gorgonia" is Gorgonia and its tensors.
var arrows = []struct {
	of   []string // these packages, and those below them
	not  []string
	save []string // but for these, and for tests
}{
	{of: []string{"device", "rope", "nn", "ranks", "internal", "kernels"}, not: []string{".", "rewrite"}, save: []string{"internal/graphtest", "internal/rankstest", "internal/devicetest"}},
	{of: []string{"device", "rope", "internal"}, not: []string{"nn"}, save: []string{"internal/graphtest", "internal/rankstest", "internal/devicetest"}},
	{of: []string{"internal"}, not: []string{"device", "rope", "ranks"}, save: []string{"internal/graphtest", "internal/rankstest", "internal/devicetest"}},
	{of: []string{"."}, not: []string{"rewrite", "nn", "ranks"}},
	{of: []string{"internal/cpu"}, not: []string{"internal/gpu", "internal/cuda", "internal/queue", "gorgonia"}},
	{of: []string{"internal/gpu", "internal/cuda", "internal/queue"}, not: []string{"internal/cpu", "gorgonia"}, save: []string{"internal/gpu/enginetest"}},
	{of: []string{"internal/attn", "internal/lean", "internal/pages", "internal/weight"}, not: []string{"internal/cpu", "internal/gpu", "internal/cuda", "gorgonia"}},
	{of: []string{"internal/ongpu", "internal/operand", "internal/errs"}, not: []string{"internal/kvstore"}},
}

func TestArrows(t *testing.T) {
	const module = "gorgonia.org/leanattention"
	below := func(pkg string, of []string) bool {
		for _, o := range of {
			if pkg == o || o != "." && strings.HasPrefix(pkg, o+"/") {
				return true
			}
		}
		return false
	}
	seen := 0
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		pkg := filepath.ToSlash(filepath.Dir(path))
		if d.IsDir() {
			if name := d.Name(); path != "." && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range f.Imports {
			to, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			switch {
			case to == module:
				to = "."
			case strings.HasPrefix(to, module+"/"):
				to = strings.TrimPrefix(to, module+"/")
			case to == "gorgonia.org/gorgonia" || to == "gorgonia.org/tensor":
				to = "gorgonia"
			default:
				continue
			}
			seen++
			for _, a := range arrows {
				if below(pkg, a.of) && !below(pkg, a.save) && below(to, a.not) {
					t.Errorf("%s imports %s: arrows go down", path, to)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 100 {
		t.Errorf("only %d imports were seen", seen)
	}
}
