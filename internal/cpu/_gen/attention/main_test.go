package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestGenerated(t *testing.T) {
	dir := t.TempDir()
	if err := write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{assembly, declarations, assembly64, declarations64, assemblyGradient, declarationsGradient} {
		want, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what this program writes: run go -C internal/cpu/_gen run ./attention", name)
		}
		if n := functions[name]; n > 0 {
			check(t, string(want), n)
		}
	}
}

// functions is how many there are in each file.
var functions = map[string]int{assembly: 64, assembly64: 36, assemblyGradient: 12}

var (
	high   = regexp.MustCompile(`\b[XYZ](1[6-9]|2[0-9]|3[01])\b|\b[ZK][0-9]`)
	vector = regexp.MustCompile(`\b[XYZ][0-9]`)
)

// check holds the assembly to what the allocator of registers does not know: the AVX2 kernels use no
// register of AVX-512; nothing that touches vectors is of SSE, which would wait for the upper halves of
// registers; and Go code, which is of SSE, gets these back clear, and without tiles that threads would have to save.
func check(t *testing.T, text string, n int) {
	functions := strings.Split(text, "\nTEXT ")[1:]
	if len(functions) != n {
		t.Errorf("%d functions, want %d", len(functions), n)
	}
	for _, f := range functions {
		name, _, _ := strings.Cut(f, "(")
		clear, tiles := false, false
		for _, line := range strings.Split(f, "\n") {
			line = strings.TrimSpace(line)
			if _, comment, ok := strings.Cut(line, " // "); ok && strings.HasPrefix(line, "BYTE") {
				tiles = !strings.HasPrefix(comment, "TILERELEASE")
			}
			switch {
			case strings.HasSuffix(name, "AVX2") && high.MatchString(line):
				t.Errorf("%s has %q", name, line)
			case vector.MatchString(line):
				if clear = false; !strings.HasPrefix(line, "V") {
					t.Errorf("%s has %q, which is of SSE", name, line)
				}
			case line == "VZEROUPPER":
				clear = true
			case line == "RET" && !clear:
				t.Errorf("%s returns with vectors in use", name)
			case line == "RET" && tiles:
				t.Errorf("%s returns with tiles in use", name)
			}
		}
	}
}
