//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"

	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/rankstest"
	"gorgonia.org/leanattention/internal/reftest"
)

const rankVariable = "LEANBENCH_TEST_RANK"

// TestEmulatedModelScaling: steps of a small model have a row for each number of GPUs, and of ranks, and the same tokens. What
// there are no kernels for, or too few GPUs, is left out, with the reason.
func TestEmulatedModelScaling(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	if gpus := os.Getenv(rankVariable); gpus != "" { // this is a rank
		var ordinals []int
		for _, text := range measure.Fields(gpus) {
			n, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			ordinals = append(ordinals, n)
		}
		if err := serveRank(ordinals, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1) // as the command
		}
		return
	}
	ranked := reftest.Every(t) // ranks load kernels for some seconds
	var env []string
	if ranked {
		env = rankstest.Libraries(t, t.TempDir())
	}
	defer func(f func(...string) (*exec.Cmd, error)) { startRank = f }(startRank)
	var starts atomic.Int32
	startRank = func(args ...string) (*exec.Cmd, error) {
		starts.Add(1)
		c := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v=false")
		c.Env = append(append(os.Environ(), env...), rankVariable+"="+args[1])
		return c, nil
	}
	var gpus []*device.GPU
	for _, ordinals := range [][]int{{0}, {0, 1}, {0, 1, 2}} {
		g, err := device.Open(ordinals...)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		gpus = append(gpus, g)
	}
	of := newOPT("tiny", 1, 128, 2)
	of.fields["vocab_size"], of.fields["ffn_dim"], of.fields["max_position_embeddings"] = 70, 96, 12
	m := modelScaling{"tiny", of, 2, []modelCase{{batch: 2, context: 5, two: 1e9, ranks: 1e-9}, {batch: 1, context: 7}, {batch: 2, context: 5, prompt: true}}, false, nil}
	var errs strings.Builder
	saved := 0
	save := func() error { saved++; return nil }
	x := &gpu.Scaled{Report: &measure.Report{}, Save: save, GPUs: gpus, Ranks: []gpu.Ranks{{Size: 2, GPUs: 1}, {Size: 2, GPUs: 2}, {Size: 3, GPUs: 2}}, Rounds: 1, Match: func(is string) bool { return strings.Contains(is, "b2") }, Stdout: io.Discard, Stderr: &errs}
	if !ranked {
		x.Ranks = x.Ranks[2:]
	}
	if err := m.measure(x); err != nil {
		t.Fatal(err)
	}
	is := m.name(m.cases[0])
	over, ranks := x.Report.Find(is, "2 GPUs", measure.OverOneGPU), x.Report.Find(is, "2 ranks", measure.OverOneGPU)
	figures := 10
	if ranked {
		figures += 8
	}
	if saved != 2 || len(x.Report.Figures) != figures || x.Report.Find(is, "one GPU", measure.StepMillis) == nil || x.Report.Find(m.name(m.cases[2]), "3 GPUs", measure.PromptMillis) == nil || over == nil || over.Bar == nil || over.Bar.Met {
		t.Errorf("%+v", x.Report.Figures)
	}
	if ranked && (ranks == nil || ranks.Bar == nil || !ranks.Bar.Met || x.Report.Find(m.name(m.cases[2]), "2 ranks", measure.PromptMillis) == nil || x.Report.Find(is, "2 ranks x 2 GPUs", measure.OverOneGPU) == nil || starts.Load() != 4 || x.Report.Versions["NCCL"] != "2.28.9") {
		t.Errorf("%d starts, %+v", starts.Load(), x.Report.Figures)
	}
	const few = "3 ranks x 2 GPUs: left out: 6 GPUs are needed, and there are 4"
	if text := errs.String(); strings.Count(text, few) != 2 || strings.Count(text, "left out") != 2 || strings.Contains(text, "other tokens") || strings.Contains(text, "2 ranks: NCCL 2.28.9") != ranked {
		t.Error(text)
	}
	errs.Reset()
	x.Report = &measure.Report{}
	m.long = true // one behind the other
	defer func(f func() (float64, error)) { readSpeed = f }(readSpeed)
	readSpeed = func() (float64, error) { return 0, errors.New("no kernel") }
	x.Ranks = x.Ranks[:len(x.Ranks)-1]
	env = append(env, "LEANATTENTION_NCCL=/nowhere/libnccl.so.2")
	m.of.fields["hidden_size"], m.of.fields["word_embed_proj_dim"] = 40, 40 // heads of 20
	if err := m.measure(x); err != nil {
		t.Fatal(err)
	}
	if text := errs.String(); !strings.Contains(text, "one GPU: left out: ") || !strings.Contains(text, "3 GPUs: left out: ") || strings.Contains(text, "2 ranks: left out: rank ") != ranked || strings.Contains(text, "looked for /nowhere/libnccl.so.2") != ranked || !strings.Contains(text, "no kernel") || len(x.Report.Figures) != 0 || saved <= 2+2*len(x.GPUs) {
		t.Errorf("%d figures, %s", len(x.Report.Figures), text)
	}
}

// TestCompareScaled: what did not take turns is compared with one GPU, and with the time that one takes to read a step's bytes.
func TestCompareScaled(t *testing.T) {
	m := modelScaling{shape: "tiny", of: newOPT("tiny", 1, 128, 2), steps: 1, cases: []modelCase{{batch: 2, context: 5}, {batch: 1, context: 9}}, bytes: map[int]float64{4: 3, 2: 1}}
	bytes := stepCase{shape: m.of, batch: 2, context: 5, steps: 1}.bytes()
	x := &gpu.Scaled{Report: &measure.Report{}, Stderr: io.Discard}
	is, names := m.name(m.cases[0]), map[string]int{"one GPU": 1, "2 GPUs": 2, "2 ranks x 2 GPUs": 4}
	for name, n := range names {
		x.Report.Row(m.table(), is, name).Add(measure.StepMillis, 8/float64(n), nil)
	}
	m.compare(x, names, bytes/4e-3) // 4 ms for a step
	for name, n := range names {
		over, read := x.Report.Find(is, name, measure.OverOneGPU), x.Report.Find(is, name, measure.OverBytes)
		if (over == nil) != (n == 1) || over != nil && over.Value != float64(n) || read == nil || !measuretest.Near(read.Value, float64(n)/2) || (read.Bar == nil) != (n == 1) || n > 1 && read.Bar.Met != (n == 2) {
			t.Errorf("%s: %+v, %+v", name, over, read)
		}
	}
	x = &gpu.Scaled{Report: &measure.Report{}, Stderr: io.Discard}
	x.Report.Row(m.table(), is, "2 GPUs").Add(measure.StepMillis, 8, nil)
	if m.compare(x, names, 0); len(x.Report.Figures) != 1 { // one GPU lacks the memory, and nobody knows how fast it reads
		t.Errorf("%+v", x.Report.Figures)
	}
}
