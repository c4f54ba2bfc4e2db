package decoder

import (
	"os/exec"
	"strings"
	"testing"
)

// TestImports: this package is made of public packages, so that a user can write the same decoder. Internal packages of the
// module are not imported, except its own.
func TestImports(t *testing.T) {
	const module = "gorgonia.org/leanattention/"
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}}: {{join .Imports " "}}`, "./...").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) < 3 {
		t.Fatalf("%q", lines)
	}
	for _, line := range lines {
		name, imports, _ := strings.Cut(line, ": ")
		for _, path := range strings.Fields(imports) {
			if rest, ok := strings.CutPrefix(path, module); ok && !strings.HasPrefix(rest, "decoder/") && (strings.Contains(rest, "internal/") || strings.Contains(rest, "examples/")) {
				t.Errorf("%s imports %s", name, path)
			}
		}
	}
}
