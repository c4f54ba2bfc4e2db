// Mutate draws small faults in this module's code and runs the tests of each one's package, to find what no test holds.
//
//	go run ./.ci/mutate -seed 1 -n 100
//
// It changes no file: go test -overlay compiles the fault. A fault that does not compile is drawn again. Each line of the output
// is a fault and its end: the test that failed, or SURVIVED.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// target is files of a package and the tests that are to find a fault in them.
type target struct {
	files string // a pattern
	tests string // a pattern; of the root, whose tests take minutes, those that the files are for
}

const cacheTests = `^(Test|Example)\w*(Cache|Script|Step|Sequence|Fork|Truncate|Window|Chunk|Page|Tree|Prefix|Sav|Read|Write|Digest|Needs|Check|BadInput|Option|Unnamed|Copied|Group|Context|Device|ZeroValue)`

var targets = []target{
	{"attend.go", `^(Test|Example)\w*(Attend|Merge|State|Digest|Feature|BadInput|Panic|Score|Sink|Unnamed)`},
	{"cache.go", cacheTests}, {"step.go", cacheTests}, {"sequence_io.go", cacheTests},
	{"internal/pages/*.go", "."},
	{"nn/*.go", "."},
	{"decoder/tokenizer/*.go", "."}, {"decoder/internal/gguf/*.go", "."}, {"decoder/internal/mapped/*.go", "."},
	{"decoder/internal/hf/*.go", "."},
	{"internal/rendezvous/*.go", "."},
}

// fault replaces a part of a file.
type fault struct {
	target
	file     string
	from, to int // bytes of the file
	line     int
	text     string // in place of them
	what     string
}

func main() {
	log.SetFlags(0)
	seed := flag.Uint64("seed", 1, "of the drawing")
	n := flag.Int("n", 100, "how many faults that compile")
	limit := flag.Duration("limit", time.Minute, "for the tests of one fault")
	match := flag.String("files", ".", "draws from files whose names match this pattern alone")
	flag.Parse()
	names, err := regexp.Compile(*match)
	if err != nil {
		log.Fatal(err)
	}
	var all []fault
	for _, t := range targets {
		files, err := filepath.Glob(t.files)
		if err != nil || len(files) == 0 {
			log.Fatalf("no files %s: run this at the module's root: %v", t.files, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") || !names.MatchString(file) {
				continue
			}
			found, err := faults(t, file)
			if err != nil {
				log.Fatal(err)
			}
			all = append(all, found...)
		}
	}
	rng := rand.New(rand.NewPCG(*seed, 0))
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	fmt.Printf("%d faults to draw from\n", len(all))
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	took := make(map[string]time.Duration) // of tests without a fault
	survived, drawn := 0, 0
	for i := range all {
		f := &all[i]
		if drawn == *n {
			break
		}
		binary, err := f.compile(dir)
		if err != nil {
			continue
		}
		drawn++
		key := filepath.Dir(f.file) + f.tests
		if _, ok := took[key]; !ok {
			none := &fault{target: f.target, file: f.file}
			good, err := none.compile(dir)
			if err != nil {
				log.Fatal(err)
			}
			begin := time.Now()
			if end := none.run(good, 10**limit); end != "" {
				log.Fatalf("the tests of %s fail without a fault: %s", f.file, end)
			}
			took[key] = time.Since(begin)
			fmt.Printf("the tests of %s take %.0f s\n", f.file, took[key].Seconds())
		}
		end := f.run(binary, *limit)
		switch {
		case end == "":
			end = "SURVIVED"
		case end == late && took[key] > *limit/2:
			end = "SURVIVED: not found in time"
		default:
			end = "killed: " + end
		}
		if strings.HasPrefix(end, "SURVIVED") {
			survived++
		}
		fmt.Printf("%d %s:%d: %s: %s\n", drawn, f.file, f.line, f.what, end)
	}
	fmt.Printf("%d of %d survived\n", survived, drawn)
}

// compile makes the test binary of the fault's package with it.
func (f *fault) compile(dir string) (binary string, err error) {
	src, err := os.ReadFile(f.file)
	if err != nil {
		return "", err
	}
	changed, overlay := filepath.Join(dir, "changed.go"), filepath.Join(dir, "overlay.json")
	src = append(append(bytes.Clone(src[:f.from]), f.text...), src[f.to:]...)
	if err := os.WriteFile(changed, src, 0o600); err != nil {
		return "", err
	}
	path, err := filepath.Abs(f.file)
	if err != nil {
		return "", err
	}
	list, err := json.Marshal(map[string]any{"Replace": map[string]string{path: changed}})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, list, 0o600); err != nil {
		return "", err
	}
	binary = filepath.Join(dir, "fault.test")
	if f.what == "" {
		binary = filepath.Join(dir, "good.test")
	}
	return binary, exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay, "-o", binary, "./"+filepath.Dir(f.file)).Run()
}

const late = "ran out of time"

var (
	failed  = regexp.MustCompile(`--- FAIL: (\S+)`)
	running = regexp.MustCompile(`(?m)^\S+\.(Test\w+)`)
)

// run says how the tests failed, or "". A fault may ask for any amount of memory: it gets 16 GB of addresses.
func (f *fault) run(binary string, limit time.Duration) string {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c := exec.CommandContext(ctx, "sh", "-c", `ulimit -v 16000000; exec "$@"`, "sh", binary, "-test.failfast", "-test.short=false", "-test.run", f.tests)
	c.Dir = filepath.Dir(f.file)
	c.WaitDelay = time.Second
	out, err := c.CombinedOutput()
	switch at := failed.FindSubmatch(out); {
	case err == nil:
		return ""
	case at != nil:
		return string(at[1])
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return late
	}
	end, _, _ := strings.Cut(string(out), "\n")
	if at := running.FindSubmatch(out); at != nil {
		return string(at[1]) + ": " + end
	}
	return end
}

var swapped = map[token.Token]token.Token{
	token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR, token.EQL: token.NEQ, token.NEQ: token.EQL,
	token.ADD: token.SUB, token.SUB: token.ADD, token.LAND: token.LOR, token.LOR: token.LAND,
}

// faults are those of a file.
func faults(t target, file string) (list []fault, err error) {
	src, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	add := func(from, to token.Pos, text, what string) {
		at := set.Position(from)
		list = append(list, fault{t, file, at.Offset, set.Position(to).Offset, at.Line, text, what})
	}
	of := func(n ast.Node) string { return string(src[set.Position(n.Pos()).Offset:set.Position(n.End()).Offset]) }
	negate := func(cond ast.Expr) {
		if cond != nil {
			add(cond.Pos(), cond.End(), "!("+of(cond)+")", "not ("+of(cond)+")")
		}
	}
	remove := func(n ast.Node) { add(n.Pos(), n.End(), "", "without "+firstLine(of(n))) }
	statements := func(list []ast.Stmt) {
		for _, s := range list {
			switch s := s.(type) {
			case *ast.ExprStmt, *ast.IncDecStmt:
				remove(s)
			case *ast.AssignStmt:
				if s.Tok != token.DEFINE {
					remove(s)
				}
			}
		}
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.IfStmt:
			negate(n.Cond)
			if len(n.Body.List) > 0 && n.Else == nil {
				if _, ok := n.Body.List[len(n.Body.List)-1].(*ast.ReturnStmt); ok {
					add(n.Body.Lbrace+1, n.Body.Rbrace, "", "without what follows if "+of(n.Cond))
				}
			}
		case *ast.ForStmt:
			negate(n.Cond)
		case *ast.CaseClause:
			statements(n.Body)
		case *ast.CommClause:
			statements(n.Body)
		case *ast.BlockStmt:
			statements(n.List)
		case *ast.BinaryExpr:
			if other, ok := swapped[n.Op]; ok {
				add(n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), other.String(), firstLine(of(n))+" with "+other.String())
			}
		case *ast.BasicLit:
			if n.Kind == token.INT {
				for _, by := range []string{"+1", "-1"} {
					add(n.Pos(), n.End(), "("+n.Value+by+")", n.Value+by+" for "+n.Value+" in "+lineOf(src, set.Position(n.Pos()).Offset))
				}
			}
		}
		return true
	})
	return list, nil
}

func firstLine(s string) string {
	line, rest, more := strings.Cut(s, "\n")
	if more {
		return line + " ... (" + strconv.Itoa(strings.Count(rest, "\n")+1) + " lines more)"
	}
	return line
}

// lineOf is the line around a byte of a file.
func lineOf(src []byte, at int) string {
	begin := bytes.LastIndexByte(src[:at], '\n') + 1
	line, _, _ := bytes.Cut(src[begin:], []byte("\n"))
	return strings.TrimSpace(string(line))
}
