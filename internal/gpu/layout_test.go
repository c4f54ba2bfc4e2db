package gpu

import (
	"errors"
	"io/fs"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// field is one of a C struct.
type field struct {
	name         string
	offset, size uintptr
}

// cStruct reads a struct of a header: its fields, its size and its alignment.
func cStruct(t *testing.T, file, name string) (fields []field, size uintptr) {
	t.Helper()
	text, err := os.ReadFile("../../kernels/" + file)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("no kernels here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	src := regexp.MustCompile(`(?s)#ifdef TRACING.*?#endif`).ReplaceAllString(string(text), "")
	src = regexp.MustCompile(`//[^\n]*`).ReplaceAllString(src, "")
	body := regexp.MustCompile(`(?s)struct (?:alignas\((\d+)\) )?` + name + ` \{(.*?)\n\};`).FindStringSubmatch(src)
	if body == nil {
		t.Fatalf("%s has no struct %s", file, name)
	}
	align := uintptr(1)
	if body[1] == "16" {
		align = 16
	}
	types := map[string][2]uintptr{ // size, alignment
		"int": {4, 4}, "u32": {4, 4}, "float": {4, 4}, "long long": {8, 8}, "TensorMap": {128, 64}, "Seq": {16, 16},
	}
	at := uintptr(0)
	for line := range strings.SplitSeq(body[2], ";") {
		line = strings.TrimSpace(strings.ReplaceAll(line, "const ", ""))
		if line == "" {
			continue
		}
		m := regexp.MustCompile(`(?s)^(long long|void|\w+)(.*)$`).FindStringSubmatch(line)
		for name := range strings.SplitSeq(m[2], ",") {
			layout, ok := types[m[1]]
			name = strings.TrimSpace(name)
			if strings.HasPrefix(name, "*") {
				layout, ok, name = [2]uintptr{8, 8}, true, strings.TrimSpace(name[1:])
			}
			if !ok || !regexp.MustCompile(`^\w+$`).MatchString(name) {
				t.Fatalf("%s: struct %s: what is %q of %q?", file, name, name, line)
			}
			at = (at + layout[1] - 1) &^ (layout[1] - 1)
			fields = append(fields, field{name, at, layout[0]})
			at += layout[0]
			align = max(align, layout[1])
		}
	}
	return fields, (at + align - 1) &^ (align - 1)
}

// The Go structs are those of the kernels, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"work.cuh", "Seq", sequence{}},
		{"work.cuh", "Work", work{}},
		{"work.cuh", "Params", params{}},
		{"append.cuh", "AppendParams", appendParams{}},
	} {
		fields, size := cStruct(t, c.file, c.name)
		here := reflect.TypeOf(c.here)
		if here.Size() != size {
			t.Errorf("%s has %d bytes, here %d", c.name, size, here.Size())
		}
		n := 0
		for i := range here.NumField() {
			f := here.Field(i)
			if f.Name == "_" {
				continue
			}
			if n >= len(fields) {
				t.Errorf("%s: has no %s", c.name, f.Name)
				continue
			}
			want := fields[n]
			n++
			if f.Name == "dtype" { // type is no name in Go
				f.Name = "type"
			}
			if f.Name != want.name || f.Offset != want.offset || f.Type.Size() != want.size {
				t.Errorf("%s: %+v, here %s at %d, %d bytes", c.name, want, f.Name, f.Offset, f.Type.Size())
			}
		}
		if n != len(fields) {
			t.Errorf("%s: %d fields, here %d", c.name, len(fields), n)
		}
	}
}
