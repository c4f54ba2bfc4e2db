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
		{[]string{"rank", "-gpus", "0,x"}, 1, "", `-gpus: "x" is no number`},
		{[]string{"paper", "-device", "tpu"}, 1, "", `-device "tpu" is neither gpu nor cpu`},
		{[]string{"paper", "-h"}, 0, "", "  7b        heads (GPU, CPU)\n"},
		{[]string{"paper", "-quick", "2"}, 1, "", `figure "2" is none of 3, 7a,`},
		{[]string{"figure"}, 0, svg, ""},
		{[]string{"figure", "-o", file}, 0, "", ""},
		{[]string{"figure", "-o", filepath.Join(file, "no")}, 1, "", "leanbench figure: open"},
		{[]string{"training"}, 1, "", "-from is needed"},
		{[]string{"training", "-from", filepath.Join(file, "no")}, 1, "", "leanbench training: open"},
		{[]string{"training", "-from", "main.go"}, 1, "", "-from main.go: 0 rows of losses"},
		{[]string{"training", "-from", "figure/testdata/train.txt"}, 0, "Loss, nats a character", ""},
		{[]string{"training", "-from", "figure/testdata/train.txt", "-o", filepath.Join(file, "no")}, 1, "", "leanbench training: open"},
		{[]string{"schedule"}, 0, "4 bbbb", ""},
		{[]string{"schedule", "-svg", filepath.Join(file, "no")}, 1, "LeanTiles", "leanbench schedule: open"},
		{[]string{"schedule", "-json", filepath.Join(file, "no")}, 1, "LeanTiles", "leanbench schedule: open"},
		{[]string{"schedule", "-dim", "264"}, 0, "flashinfer", "gpu is left out: gpu: schedule: head dim 264"},
		{[]string{"schedule", "-dim", "264", "-policy", "gpu"}, 1, "", "-policy gpu: gpu: schedule: head dim 264"},
		{[]string{"schedule", "-dtype", "f64", "-policy", "stream-k"}, 0, "5280 B", ""},
		{[]string{"schedule", "-dtype", "f8"}, 1, "", `-dtype "f8" is none of f32, f64, f16, bf16`},
		{[]string{"schedule", "-heads", "0"}, 1, "", "-heads 0: it must be from 1 to"},
		{[]string{"schedule", "-kv-heads", "3"}, 1, "", "-kv-heads 3: it must be from 1 to 2"},
		{[]string{"schedule", "-heads", "5", "-kv-heads", "2"}, 1, "", "-kv-heads 2: -heads 5 is no multiple"},
		{[]string{"schedule", "-dim", "-1"}, 1, "", "-dim -1: it must be"},
		{[]string{"schedule", "-ctx", "0"}, 1, "", "-ctx 0: it must be"},
		{[]string{"schedule", "-batch", "0"}, 1, "", "-batch 0: it must be"},
		{[]string{"schedule", "-batch", "40000"}, 1, "", "-kv-heads 2, 40000 sequences: 80000 output tiles"},
		{[]string{"schedule", "-workers", "5000"}, 1, "", "-workers 5000: it must be from 1 to 4096"},
		{[]string{"schedule", "-tile", "0"}, 1, "", "-tile 0: it must be"},
		{[]string{"schedule", "-lengths", "5,-1"}, 1, "", `-lengths "5,-1": "-1" is no number of tokens`},
		{[]string{"schedule", "-lengths", "0,0"}, 1, "", `-lengths "0,0": no context has tokens`},
		{[]string{"schedule", "-lengths", "5", "-ctx", "7"}, 1, "", "-ctx and -lengths 5: give one"},
		{[]string{"schedule", "-policy", "flash"}, 1, "", `-policy "flash": "flash" is none of per-head`},
		{[]string{"schedule", "-policy", "stream-k:2"}, 1, "", `"stream-k:2" is none of`},
		{[]string{"schedule", "-policy", "fixed-split:0"}, 1, "", `"0" is no number of splits`},
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
