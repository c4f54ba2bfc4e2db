package cpu

import (
	"flag"
	"io"
	"runtime"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestMeasurePrompts: PyTorch's times become its speed and our ratio to it, of mixed precision where keys have 16 bits.
func TestMeasurePrompts(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	w, err := measure.Start(measuretest.Command(t, "well"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	b, out := testBench(t)
	cases := []stepShape{
		{store: "bf16", heads: 2, queries: 40, keys: 40, dim: 32, causal: true, faster: measure.AtLeast(1e-9)},
		{store: "f32", heads: 2, queries: 30, keys: 30, dim: 8, causal: true, faster: measure.AtLeast(1e9)},
	}
	if err := b.prompts(w, []int{1, 2}, cases); err != nil {
		t.Fatal(err)
	}
	for _, s := range cases {
		if f := b.report.Find(s.String(), NameTorch, measure.Products); f == nil || !measuretest.Near(f.Value, s.products()/1e-3) {
			t.Errorf("PyTorch: %+v", f)
		}
		exact, mixed := b.report.Find(s.String(), nameLean, measure.OverTorch), b.report.Find(s.String(), nameMixed, measure.OverTorch)
		if half := s.store == "bf16"; half && (mixed == nil || mixed.Bar == nil || !mixed.Bar.Met || exact.Bar != nil) || !half && (mixed != nil || exact.Bar.Met) {
			t.Errorf("%v: %+v, mixed %+v", s, exact, mixed)
		}
	}
	for _, want := range []string{"threads 1", "threads 2", "shape 2 40 40 32 bf16 true false"} {
		if !strings.Contains(w.Stderr.Text(), want) {
			t.Errorf("the worker was not asked for %q:%s", want, w.Stderr.Text())
		}
	}
	for _, n := range []int{1, 2} {
		if !strings.Contains(out.String(), tablePrompts(n)) {
			t.Errorf("there is no table of %d threads", n)
		}
	}
}

// TestPromptCases: the shapes and bars are those that were asked for, and numbers of threads are checked.
func TestPromptCases(t *testing.T) {
	names := map[string]bool{}
	for _, c := range promptCases(false) {
		if (c.faster == nil) != (c.store == "f16") || !c.causal || c.queries != c.keys {
			t.Errorf("%+v", c)
		}
		names[c.String()] = true
	}
	if len(names) != 36 {
		t.Errorf("%d cases", len(names))
	}
	for _, wrong := range []string{"0", "x", "1,-1", "100000"} {
		o := measure.Flags(flag.NewFlagSet("", flag.ContinueOnError))
		if err := measurePrompts(o, wrong, "", "", io.Discard, io.Discard); err == nil {
			t.Errorf("-threads %q was taken", wrong)
		}
	}
	for _, wrong := range [][]string{{"-threads", "1"}, {"-python", "x"}} {
		flags := flag.NewFlagSet("", flag.ContinueOnError)
		run := measureCPU(flags)
		if err := flags.Parse(wrong); err != nil {
			t.Fatal(err)
		}
		if err := run(io.Discard, io.Discard); err == nil {
			t.Errorf("%v without -prompts was taken", wrong)
		}
	}
}
