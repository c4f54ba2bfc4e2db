package page

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNames compares the exported names of the public packages with those of testdata/names-before.txt by the table "Old and new
// names" of CHANGELOG.md. A row is about a name with its fields and methods. Each old name is there still or has a row, each new
// name is old or in a row, and each row names what was there and what is there.
func TestNames(t *testing.T) {
	const top = "../../.."
	before, now := map[string]bool{}, map[string]bool{}
	for _, name := range strings.Fields(Read(t, "testdata/names-before.txt")) {
		before[strings.Replace(name, "leanattention.", "", 1)] = true
	}
	for _, pattern := range []string{"*.go", "*/*.go"} {
		files, err := filepath.Glob(filepath.Join(top, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			exported(t, filepath.Dir(file), file, now)
		}
	}
	_, table, found := strings.Cut(Read(t, filepath.Join(top, "CHANGELOG.md")), "\n### Old and new names\n")
	if table, _, found = strings.Cut(table, "\n### "); !found {
		t.Fatal("CHANGELOG.md has no section of old and new names")
	}
	renamed, added := map[string]string{}, map[string]bool{} // old and new names of rows
	for _, row := range regexp.MustCompile("(?m)^\\| (`[^|]*`|new) \\| ([^|]*) \\|").FindAllStringSubmatch(table, -1) {
		news := regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1)
		if len(news) == 0 && row[1] == "new" {
			t.Errorf("this row has no name: %s", row[0])
		}
		for _, n := range news {
			if added[n[1]] = true; !now[n[1]] {
				t.Errorf("%s of the table is not there", n[1])
			}
		}
		if row[1] == "new" {
			continue
		}
		for old := range strings.SplitSeq(strings.ReplaceAll(row[1], "`", ""), ", ") {
			if renamed[old] = ""; len(news) == 1 {
				renamed[old] = news[0][1]
			}
			if !before[old] || now[old] {
				t.Errorf("%s of the table is no name of before, or is there still", old)
			}
		}
	}
	for _, old := range slices.Sorted(maps.Keys(before)) {
		name, member, isMember := cutMember(old)
		to, moved := renamed[name]
		if _, alone := renamed[old]; now[old] || alone || moved && (!isMember || to == "" || now[to+"."+member]) {
			continue
		}
		t.Errorf("%s is gone, and CHANGELOG.md does not say where", old)
	}
	const newPackage = "decoder." // CHANGELOG.md names it as a whole
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if strings.HasPrefix(name, newPackage) {
			continue
		}
		if whole, member, _ := cutMember(name); !before[name] && !added[name] && !added[whole] && member != "Internal" {
			t.Errorf("%s is new, and not in CHANGELOG.md", name)
		}
	}
}

// cutMember divides T.Member, or package.T.Member. Names of the root have no package.
func cutMember(name string) (whole, member string, ok bool) {
	first, _, _ := strings.Cut(name, ".")
	i := strings.LastIndex(name, ".")
	if i < 0 || !ast.IsExported(first) && i == len(first) {
		return name, "", false
	}
	return name[:i], name[i+1:], true
}

// exported adds the exported names of a file: declarations, methods of exported types, fields of structs, methods of interfaces.
func exported(t *testing.T, dir, file string, to map[string]bool) {
	if strings.HasSuffix(file, "_test.go") {
		return
	}
	tree, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	prefix := filepath.Base(dir) + "."
	if tree.Name.Name == "leanattention" {
		prefix = ""
	}
	if tree.Name.Name == "main" {
		return
	}
	ast.FileExports(tree)
	for _, d := range tree.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			name := d.Name.Name
			if d.Recv != nil {
				of := d.Recv.List[0].Type
				if star, ok := of.(*ast.StarExpr); ok {
					of = star.X
				}
				id, ok := of.(*ast.Ident)
				if !ok || !id.IsExported() {
					continue
				}
				name = id.Name + "." + name
			}
			to[prefix+name] = true
		case *ast.GenDecl:
			for _, s := range d.Specs {
				switch s := s.(type) {
				case *ast.ValueSpec:
					for _, id := range s.Names {
						to[prefix+id.Name] = true
					}
				case *ast.TypeSpec:
					to[prefix+s.Name.Name] = true
					ast.Inspect(s.Type, func(n ast.Node) bool {
						if f, ok := n.(*ast.Field); ok {
							for _, id := range f.Names {
								to[prefix+s.Name.Name+"."+id.Name] = true
							}
						}
						_, isFunc := n.(*ast.FuncType)
						return !isFunc
					})
				}
			}
		}
	}
}
