package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const cpu = "../.." // the package that holds the others, seen from the test

// TestGenerated: what is committed is what this program writes, at every run.
func TestGenerated(t *testing.T) {
	for _, f := range families {
		for range 3 {
			files, err := generate(cpu, f)
			if err != nil {
				t.Fatal(err)
			}
			for file, want := range files {
				got, err := os.ReadFile(filepath.Join(cpu, file))
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s is not what this program writes: run go -C internal/cpu/_gen run ./linear", file)
				}
			}
		}
	}
}

var vectors = regexp.MustCompile(`\b[XYZ][0-9]+\b`)

// TestInstructions: functions that touch vectors return with their upper halves clear, those of AVX2 keep
// to its registers, and no instruction on vectors is one of SSE, which would wait for the upper halves.
func TestInstructions(t *testing.T) {
	high := regexp.MustCompile(`\b(Z[0-9]+|[XY](1[6-9]|2[0-9]|3[01])|K[0-7])\b`)
	for _, f := range families {
		files, err := generate(cpu, f)
		if err != nil {
			t.Fatal(err)
		}
		functions := strings.Split(string(files[filepath.Join(f.dir, f.name+"_amd64.s")]), "\nTEXT ")[1:]
		if len(functions) == 0 {
			t.Errorf("%s has no functions", f.name)
		}
		for _, f := range functions {
			title, body, _ := strings.Cut(f, "\n")
			returns := strings.Count(body, "\tRET\n")
			if clear := strings.Count(body, "\tVZEROUPPER\n\tRET\n"); returns == 0 || clear != returns {
				t.Errorf("%s: %d of %d returns clear the upper halves", title, clear, returns)
			}
			for _, line := range strings.Split(body, "\n") {
				op := strings.TrimSpace(line)
				if _, name, bytes := strings.Cut(op, " // "); bytes {
					op = name // of what is written as bytes
				}
				if vectors.MatchString(op) && !strings.HasPrefix(op, "V") {
					t.Errorf("%s: %s", title, op)
				}
				if strings.Contains(title, "AVX2(") && high.MatchString(op) {
					t.Errorf("%s: %s", title, op)
				}
			}
		}
	}
}

// TestMistakes: what a generator asks of the package's sources in vain is an error.
func TestMistakes(t *testing.T) {
	for _, c := range []struct{ file, source, types string }{
		{"nowhere.go", "dotF32Go", ""},
		{"dot.go", "nothingGo", ""},
		{"dot.go", "dotF32Go", ""},
		{"dot.go", "dotF32Go", "run.go"},
	} {
		_, err := generate(cpu, family{"linear", "x", func(g *gen) { g.kernel("x", avx2, c.file, c.source, c.types) }})
		if err == nil {
			t.Errorf("%+v: no error", c)
		}
	}
}
