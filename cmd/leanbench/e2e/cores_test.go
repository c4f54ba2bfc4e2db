package e2e

import (
	"bytes"
	"flag"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestOnCores: prompts and steps with some numbers of threads, beside transformers in two types.
func TestOnCores(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	defer func(f func(string) (*measure.Worker, error)) { startCoresWorker = f }(startCoresWorker)
	defer func(c shape, steps [][2]int, n int) { optShapes["125m"], coreSteps, ceilingBytes = c, steps, n }(optShapes["125m"], coreSteps, ceilingBytes)
	var workers []*measure.Worker
	startCoresWorker = func(string) (*measure.Worker, error) {
		w, err := measure.Start(measuretest.Command(t, "opt"))
		workers = append(workers, w)
		return w, err
	}
	c := newOPT("125m", 2, 64, 2)
	c.fields["vocab_size"], c.fields["max_position_embeddings"] = 100, 200
	optShapes["125m"], coreSteps, ceilingBytes = c, [][2]int{{1, 9}, {2, 5}}, 1<<16
	name, out := filepath.Join(t.TempDir(), "cores.json"), new(bytes.Buffer)
	o := coresOptions{Options: &measure.Options{JSON: name}, python: "python", shape: "125m", threads: "1,2", prompts: "1x12,2x30"}
	if err := o.run(out, io.Discard); err != nil {
		t.Fatal(err)
	}
	r, err := measure.Load(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		is, name string
		metric   measure.Metric
	}{
		{"1 x 12 tokens", "lean f32", measure.OverHF}, {"2 x 30 tokens", "lean bf16, mixed precision", measure.OverHF16},
		{"b1, behind 9 tokens", "lean f16", measure.Share}, {"b2, behind 5 tokens", "lean bf16", measure.OverHF16},
		{"b1, behind 9 tokens", measure.ReadCeiling, measure.Speed}, {"b2, behind 5 tokens", "transformers bf16", measure.Tokens},
	} {
		if f := r.Find(c.is, c.name, c.metric); f == nil || !(f.Value > 0) {
			t.Errorf("%s, %s: %+v", c.is, c.name, f)
		}
	}
	if f := r.Find("b2, behind 5 tokens", "transformers f32", measure.Tokens); f == nil || !measuretest.Near(f.Value, 2/40e-3) {
		t.Errorf("transformers: %+v", f)
	}
	for i, dtype := range []string{"float32", "bfloat16"} {
		for _, want := range []string{"model " + dtype + ` {"_remove_final_layer_norm":false,`, `"max_position_embeddings":200,`, "threads 1", "threads 2", "read eager 2 5 "} {
			if !strings.Contains(workers[i].Stderr.Text(), want) {
				t.Errorf("worker %d was not asked for %q:%s", i, want, workers[i].Stderr.Text())
			}
		}
	}
	if text := out.String(); !strings.Contains(text, "Steps of OPT-125m, 2 threads") {
		t.Error(text)
	}

	o = coresOptions{Options: &measure.Options{JSON: name, Quick: true}, shape: "125m", threads: "1", batches: "3"}
	if err := o.run(io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if r, err = measure.Load(name); err != nil {
		t.Fatal(err)
	}
	for _, f := range r.Figures {
		if f.Case != "b3, behind 5 tokens" {
			t.Errorf("only steps of three sequences were asked for: %+v", f)
		}
	}
}

// TestOnCoresAsked: what can't be is refused, and nothing is written.
func TestOnCoresAsked(t *testing.T) {
	for _, o := range []coresOptions{
		{threads: "0", shape: "125m", prompts: "1x4"}, {threads: "1", shape: "125m,1.3b", prompts: "1x4"},
		{threads: "1", shape: "125m", prompts: "4"}, {threads: "1", shape: "125m", batches: "0"}, {threads: "1000000", shape: "125m", prompts: "1x4"},
	} {
		name := filepath.Join(t.TempDir(), "x.json")
		o.Options = &measure.Options{JSON: name}
		if err := o.run(io.Discard, io.Discard); err == nil {
			t.Errorf("%+v", o)
		}
		if _, err := os.Stat(name); err == nil {
			t.Errorf("%+v wrote figures", o)
		}
	}
}

// TestOnCoresFlags: a flag that says nothing with -threads is refused, by name.
func TestOnCoresFlags(t *testing.T) {
	for _, wrong := range []string{"-workers=1", "-device=gpu", "-contexts=3", "-dir=x"} {
		flags := flag.NewFlagSet("", flag.ContinueOnError)
		run := measureDecoders(flags)
		if err := flags.Parse([]string{"-threads", "1", wrong}); err != nil {
			t.Fatal(err)
		}
		name, _, _ := strings.Cut(wrong, "=")
		if err := run(io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}
