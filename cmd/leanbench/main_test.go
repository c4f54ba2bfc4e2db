package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/figure"
)

func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "s.svg")
	svg := string(figure.Schedules())
	for _, c := range []struct {
		args           []string
		status         int
		stdout, stderr string // what each holds a part of; empty: nothing is printed
	}{
		{nil, 2, "", "usage: leanbench"},
		{[]string{"help"}, 0, "figure", ""},
		{[]string{"plot"}, 2, "", `unknown command "plot"`},
		{[]string{"figure", "-x"}, 2, "", "-x"},
		{[]string{"figure", "-h"}, 0, "", "-o"},
		{[]string{"figure", "here.svg"}, 2, "", `unexpected argument "here.svg"`},
		{[]string{"cpu", "-workers", "0"}, 1, "", "leanbench cpu: 0 workers on "},
		{[]string{"peers"}, 1, "", "-python is needed"},
		{[]string{"peers", "-python", "/no/such/python", "-workers", "1"}, 1, "", "/no/such/python"},
		{[]string{"e2e"}, 1, "", "-python is needed"},
		{[]string{"checkpoint", "-shape", "9t"}, 1, "", `"9t" is none of 1.3b, 125m,`},
		{[]string{"checkpoint", "-dtype", "f8"}, 1, "", `"f8" is none of f32, f16, bf16`},
		{[]string{"checkpoint"}, 1, "", "-o is needed"},
		{[]string{"figure"}, 0, svg, ""},
		{[]string{"figure", "-o", file}, 0, "", ""},
		{[]string{"figure", "-o", filepath.Join(file, "no")}, 1, "", "leanbench figure: open"},
	} {
		var stdout, stderr bytes.Buffer
		status := command.Run(commands, c.args, &stdout, &stderr)
		if status != c.status || !holds(stdout.String(), c.stdout) || !holds(stderr.String(), c.stderr) {
			t.Errorf("%q: status %d, want %d; stdout %.80q, stderr %.80q", c.args, status, c.status, stdout.String(), stderr.String())
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != svg {
		t.Errorf("-o wrote %d bytes (%v), want %d", len(got), err, len(svg))
	}
}

func holds(s, part string) bool {
	return (s == "") == (part == "") && strings.Contains(s, part)
}
