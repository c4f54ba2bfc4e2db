package page

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// given are the values that blocks use and do not make.
const given = `import (
	"context"
	"fmt"
	"runtime"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"
	"gorgonia.org/leanattention/rewrite"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var (
	ctx                          context.Context
	config                       la.CacheConfig
	step                         *la.Step
	g                            *G.ExprGraph
	machine                      G.VM
	q, k, v, n, x, wPart, output *G.Node
	embeddings, wUp, wDown       *tensor.Dense
	value                        G.Value
	i, rows                      int

	machineGPU func() *device.GPU // la.MachineGPU, which the tag cuda has
)
`

// TestBlocks compiles the Go blocks of the pages whose code is in no file: each is the body of a function. Blocks of
// docs/decoder.md and docs/external-op.md are code of packages, which tests of those pages compare.
func TestBlocks(t *testing.T) {
	if testing.Short() {
		t.Skip("runs go build")
	}
	const top = "../../.."
	var pages []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/lab/*.md", "kernels/*.md"} {
		some, err := filepath.Glob(filepath.Join(top, pattern))
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, some...)
	}
	code, blocks := strings.Builder{}, 0
	code.WriteString("package main\n\n" + given + "\nfunc main() {}\n")
	imports := regexp.MustCompile(`(?ms)^import \(.*?^\)\n`)
	for _, page := range pages {
		if base := filepath.Base(page); base == "decoder.md" || base == "external-op.md" {
			continue
		}
		for _, m := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(Read(t, page), -1) {
			blocks++
			body := strings.ReplaceAll(imports.ReplaceAllString(m[1], ""), "la.MachineGPU()", "machineGPU()")
			fmt.Fprintf(&code, "\n// %s\nfunc block%d() {\n%s%s}\n", page, blocks, body, used(t, page, body))
		}
	}
	if blocks < 6 {
		t.Errorf("only %d blocks were found", blocks)
	}
	name := filepath.Join(t.TempDir(), "blocks.go")
	if err := os.WriteFile(name, []byte(code.String()), 0o666); err != nil {
		t.Fatal(err)
	}
	build := exec.Command("go", "build", "-o", os.DevNull, name)
	build.Dir = top
	if out, err := build.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, out, code.String())
	}
}

// used is a line that uses the variables that a block makes and may leave alone.
func used(t *testing.T, page, code string) string {
	file, err := parser.ParseFile(token.NewFileSet(), "block.go", "package p\nfunc f() {\n"+code+"}\n", 0)
	if err != nil {
		t.Errorf("%s: %v", page, err)
		return ""
	}
	line := ""
	for _, s := range file.Decls[0].(*ast.FuncDecl).Body.List {
		if s, ok := s.(*ast.AssignStmt); ok && s.Tok == token.DEFINE {
			for _, e := range s.Lhs {
				line += "_ = " + e.(*ast.Ident).Name + "\n"
			}
		}
	}
	return line
}
