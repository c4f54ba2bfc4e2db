package enginetest

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// field is one of a C struct.
type field struct {
	name         string
	offset, size uintptr
}

// module is the folder of this Go module.
func module(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("tests do not run in the module's folder")
		}
		dir = filepath.Dir(dir)
	}
}

// sources are a file of the module, by its path from there, and the kernels' headers behind
// it, without comments.
func sources(t testing.TB, file string) string {
	t.Helper()
	root := module(t)
	headers, err := filepath.Glob(filepath.Join(root, "kernels", "*.cuh"))
	if err != nil || len(headers) == 0 {
		t.Fatalf("no headers of kernels: %v", err)
	}
	var all strings.Builder
	for _, name := range append([]string{filepath.Join(root, file)}, headers...) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(text)
	}
	s := regexp.MustCompile(`(?s)#ifdef TRACING.*?#endif`).ReplaceAllString(all.String(), "")
	return regexp.MustCompile(`//[^\n]*`).ReplaceAllString(s, "")
}

// layout is the size and the alignment of a C type, and its fields, if it is a struct.
type layout struct {
	size, align uintptr
	fields      []field
}

// layoutOf finds a type in sources.
func layoutOf(t testing.TB, src, name string) (l layout) {
	t.Helper()
	if n := map[string]uintptr{"char": 1, "u16": 2, "int": 4, "u32": 4, "float": 4, "u64": 8, "double": 8, "long long": 8}[name]; n > 0 {
		return layout{size: n, align: n}
	}
	body := regexp.MustCompile(`(?s)struct (?:alignas\((\d+)\) )?` + name + ` (?:: (\w+) )?\{(.*?)\};`).FindStringSubmatch(src)
	if body == nil {
		t.Fatalf("there is no struct %s", name)
	}
	l.align = 1
	if body[1] != "" {
		n, err := strconv.Atoi(body[1])
		if err != nil {
			t.Fatalf("struct %s: alignment %s", name, body[1])
		}
		l.align = uintptr(n)
	}
	if body[2] != "" { // the base struct is an anonymous field here
		l.add(t, src, body[2], "p")
	}
	fields, _, _ := strings.Cut(body[3], "__device__") // functions follow fields
	for line := range strings.SplitSeq(fields, ";") {
		line = strings.TrimSpace(strings.NewReplacer("const ", "", "struct ", "", "uint64_t", "u64").Replace(line))
		if line == "" || strings.HasPrefix(line, "static ") { // constants take no room
			continue
		}
		m := regexp.MustCompile(`(?s)^(long long|void|\w+)(.*)$`).FindStringSubmatch(line)
		for name := range strings.SplitSeq(m[2], ",") {
			l.add(t, src, m[1], strings.TrimSpace(name))
		}
	}
	l.size = (l.size + l.align - 1) &^ (l.align - 1)
	return l
}

// add appends a field: a name, with a * before it, or a length behind it.
func (l *layout) add(t testing.TB, src, kind, name string) {
	t.Helper()
	n := uintptr(1)
	if m := regexp.MustCompile(`^(\*? *\w+)\[(\w+)\]$`).FindStringSubmatch(name); m != nil {
		length := m[2]
		if constant := regexp.MustCompile(`\b` + length + ` = (\d+)[,;]`).FindStringSubmatch(src); constant != nil {
			length = constant[1]
		}
		i, err := strconv.Atoi(length)
		if err != nil {
			t.Fatalf("%s %s: how many are these?", kind, name)
		}
		name, n = m[1], uintptr(i)
	}
	var of layout
	if strings.HasPrefix(name, "*") {
		of, name = layout{size: 8, align: 8}, strings.TrimSpace(name[1:])
	} else {
		of = layoutOf(t, src, kind)
	}
	if !regexp.MustCompile(`^\w+$`).MatchString(name) {
		t.Fatalf("what is %q of type %s?", name, kind)
	}
	at := (l.size + of.align - 1) &^ (of.align - 1)
	l.fields = append(l.fields, field{name, at, n * of.size})
	l.size, l.align = at+n*of.size, max(l.align, of.align)
}

// SameStruct says where a Go struct differs from one of a C file. Names with _ are as Go has
// them there.
func SameStruct(t testing.TB, file, name string, here any) {
	t.Helper()
	l, of := layoutOf(t, sources(t, file), name), reflect.TypeOf(here)
	if of.Size() != l.size {
		t.Errorf("%s has %d bytes, here %d", name, l.size, of.Size())
	}
	n := 0
	for i := range of.NumField() {
		f := of.Field(i)
		if f.Name == "_" {
			continue
		}
		if n >= len(l.fields) {
			t.Errorf("%s: has no %s", name, f.Name)
			continue
		}
		want := l.fields[n]
		want.name = regexp.MustCompile(`_\w`).ReplaceAllStringFunc(want.name, func(s string) string { return strings.ToUpper(s[1:]) })
		n++
		if f.Anonymous { // "p" in C
			f.Name = "p"
		}
		f.Name = strings.ToLower(f.Name[:1]) + f.Name[1:]
		if f.Name == "dtype" { // type is no name in Go
			f.Name = "type"
		}
		if f.Name != want.name || f.Offset != want.offset || f.Type.Size() != want.size {
			t.Errorf("%s: %+v, here %s at %d, %d bytes", name, want, f.Name, f.Offset, f.Type.Size())
		}
	}
	if n != len(l.fields) {
		t.Errorf("%s: %d fields, here %d", name, len(l.fields), n)
	}
}

// Says holds a source of the kernels against lines that somebody relies on. Its spaces and
// comments do not count.
func Says(t testing.TB, file string, lines ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(module(t), "kernels", file))
	if err != nil {
		t.Fatal(err)
	}
	s := regexp.MustCompile(`//[^\n]*`).ReplaceAllString(string(text), "")
	s = strings.Join(strings.Fields(s), " ")
	for _, line := range lines {
		if !strings.Contains(s, line) {
			t.Errorf("%s has no %q any more", file, line)
		}
	}
}
