//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/emulated/system"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestEmulatedScale measures small shapes on emulated GPUs, by heads and by context: each number of them has a row,
// and figures are kept.
func TestEmulatedScale(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	file := filepath.Join(t.TempDir(), "scale.json")
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	var out, errs bytes.Buffer
	run := measureScaleOf(flags, &scaling{table: tableScale, pace: measure.Pace{Rounds: 1, Steps: 1}, cases: []scaleCase{
		{Shape: EvenShape(1, 2, 2, 70, 64), two: 100, more: 100}, {Shape: EvenShape(2, 4, 4, 40, 64)}, {Shape: EvenShape(1, 1, 1, 1<<30, 64)}, {Shape: EvenShape(1, 1, 1, 99, 64)},
		{Shape: EvenShape(1, 8, 1, 40, 64)}, // a page, which two GPUs can't share
	}})
	if err := flags.Parse([]string{"-json", file, "-match", "x (70|40|1073741824) x"}); err != nil {
		t.Fatal(err)
	}
	if err := run(&out, &errs); err != nil {
		t.Fatal(err)
	}
	report, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]int{}
	for _, f := range report.Figures {
		if f.Value <= 0 {
			t.Errorf("%+v", f)
		}
		if f.Metric == measure.OverOneGPU {
			rows[f.Contender]++
			if missed := f.Bar != nil && !f.Bar.Met; missed != strings.Contains(f.Case, " 70 ") {
				t.Errorf("%+v: bar %+v", f, f.Bar)
			}
		}
	}
	if fmt.Sprint(rows) != "map[2 GPUs:2 4 GPUs:2]" || len(report.Figures) != 2*2+4*3+2 {
		t.Errorf("%v, %d figures", rows, len(report.Figures))
	}
	if strings.Count(errs.String(), "left out") != 5 || !strings.Contains(out.String(), "| 2 GPUs |") {
		t.Errorf("%s\n%s", errs.String(), out.String())
	}
}

// TestEmulatedByContext: a cache is dealt out as its case says, which one of a single page can't be.
func TestEmulatedByContext(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	gpu, err := device.Open(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer gpu.Close()
	c := &scaleCase{Shape: EvenShape(1, 4, 4, 41, 64), context: true}
	if r, err := newScaleStep(c, gpu); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "sharded by context") {
		t.Errorf("%v, %v", r, err)
	}
	if c.String() != "b1, 4 heads x 41 x 64, by context" {
		t.Error(c)
	}
}

// TestEmulatedScaling: other commands' shapes have FlashDecoding's schedule in turn, on the same keys.
func TestEmulatedScaling(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	w, err := measure.Start(measuretest.Command(t, "gpu"))
	if err != nil {
		t.Fatal(err)
	}
	report := &measure.Report{}
	b := &Bench{Report: report, Stderr: io.Discard, peers: &gpuPeers{worker: w, size: 7, note: func(string, ...any) {}}}
	asked := map[int]int{}
	s, err := b.OpenScaling("T", measure.Pace{Rounds: 1, Steps: 1}, func(shape Shape, gpus int) int {
		asked[gpus]++
		return gpus
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	if s.Most() != 4 {
		t.Errorf("%d GPUs", s.Most())
	}
	if err := s.Measure(EvenShape(1, 2, 2, 70, 64), "two heads"); err != nil {
		t.Fatal(err)
	}
	if err := s.Measure(EvenShape(1, 1, 1, 1<<30, 64), "huge"); err != nil || report.HasCase("T", "huge") {
		t.Error(err)
	}
	if fmt.Sprint(asked) != "map[1:1 2:1]" {
		t.Errorf("splits of %v", asked)
	}
	for _, name := range []string{"one GPU", "one GPU, fixed split", "2 GPUs", "2 GPUs, fixed split"} {
		if f := report.Find("two heads", name, measure.LayerMicros); f == nil || f.Table != "T" {
			t.Errorf("%s: %+v", name, f)
		}
	}
	if f := report.Find("two heads", "2 GPUs", measure.OverFixed); f == nil || !(f.Value > 0) {
		t.Errorf("%+v", f)
	}
	// The fake takes a millisecond for whatever a GPU has.
	for _, name := range []string{"one GPU", "2 GPUs"} {
		flash, over, ours := report.Find("two heads", name+flashSuffix, measure.LayerMicros), report.Find("two heads", name, measure.OverFlash), report.Find("two heads", name, measure.LayerMicros)
		if flash == nil || over == nil || !measuretest.Near(flash.Value, 1000) || !measuretest.Near(over.Value, 1000/ours.Value) || over.Bar != nil {
			t.Errorf("%s: %+v, %+v", name, flash, over)
		}
	}
	if err := w.Close(); err != nil { // all that it says is there
		t.Error(err)
	}
	if text := w.Stderr.Text(); !strings.Contains(text, "sdpa 2 2 64 ") || !strings.Contains(text, "sdpa 1 1 64 ") || !strings.HasSuffix(strings.TrimSpace(text), "arena 7") {
		t.Error(text)
	}
}

// TestShare: what each of several GPUs has, and what it should take.
func TestShare(t *testing.T) {
	for _, c := range []struct {
		s    Shape
		gpus int
		want string
	}{
		{EvenShape(4, 256, 256, 1024, 64), 8, "b4, 32 heads x 1024 x 64"}, {EvenShape(1, 64, 8, 99, 128), 4, "b1, 16/2 heads x 99 x 128"},
		{EvenShape(2, 8, 1, 1001, 64), 2, "b2, 8/1 heads x 501 x 64"}, {EvenShape(2, 8, 1, 1001, 64), 1, "b2, 8/1 heads x 1001 x 64"},
	} {
		if got := (&scaleCase{Shape: c.s}).share(c.gpus).String(); got != c.want {
			t.Errorf("%v on %d: %s, want %s", c.s, c.gpus, got, c.want)
		}
	}
	if got := (&scaleCase{Shape: EvenShape(1, 8, 8, 64, 64), context: true}).share(4).String(); got != "b1, 8 heads x 16 x 64" {
		t.Error(got)
	}
	for gpus, want := range map[int]float64{2: 1.9, 4: 3.6, 8: 7.2} {
		if b := (&scaleCase{two: 1.9, more: 0.9}).bar(gpus); b == nil || !measuretest.Near(*b.Least, want) {
			t.Errorf("%d GPUs: %+v, want %v", gpus, b, want)
		}
		if b := new(scaleCase).bar(gpus); b != nil {
			t.Errorf("%d GPUs: %+v", gpus, b)
		}
	}
}

// TestEmulatedChain: a chain of layers has a row for each number of GPUs, with what an exchange takes; other parts of
// the command come behind.
func TestEmulatedChain(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	file := filepath.Join(t.TempDir(), "scale.json")
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	parts := 0
	run := measureScaleOf(flags, &scaling{table: tableScale, pace: measure.Pace{Rounds: 1, Steps: 1}, chains: []chainCase{{2, 96, 3, 1e-9}, {1, 999, 1, 0}},
		more: []func(*Scaled) error{func(x *Scaled) error {
			parts++
			if len(x.GPUs) != 2 || x.Name(x.GPUs[1]) != "3 GPUs" || !x.Quick || x.Match("a 999") || !x.Match("2 x 96") || x.Rounds != 1 {
				t.Errorf("%+v", x)
			}
			return nil
		}}})
	if err := flags.Parse([]string{"-json", file, "-match", "2 x", "-quick", "-gpus", "3"}); err != nil {
		t.Fatal(err)
	}
	if err := run(io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	report, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	one, three := report.Find(chainCase{2, 96, 3, 0}.String(), "one GPU", measure.LayerMicros), report.Find(chainCase{2, 96, 3, 0}.String(), "3 GPUs", measure.BeyondShare)
	if parts != 1 || len(report.Figures) != 4 || one == nil || three == nil || one.Table != tableChain || three.Bar != nil {
		t.Errorf("%d parts, %+v", parts, report.Figures)
	}
}

// What is no number of GPUs, and more than there are, is refused.
func TestScaleRefuses(t *testing.T) {
	for _, text := range []string{"", "1", "2,x", "0"} {
		flags := flag.NewFlagSet("scale", flag.ContinueOnError)
		flags.SetOutput(io.Discard)
		Scale()(flags)
		if err := flags.Parse([]string{"-gpus", text}); err == nil {
			t.Errorf("-gpus %q was taken", text)
		}
	}
	for _, text := range []string{"", "1", "2,x", "2x", "2x0", "x2", "0x2"} {
		flags := flag.NewFlagSet("scale", flag.ContinueOnError)
		flags.SetOutput(io.Discard)
		Scale()(flags)
		if err := flags.Parse([]string{"-ranks", text}); err == nil {
			t.Errorf("-ranks %q was taken", text)
		}
	}
	if all, err := ranksOf("2,3x4"); err != nil || fmt.Sprint(all) != "[2 ranks 3 ranks x 4 GPUs]" {
		t.Errorf("%v, %v", all, err)
	}
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	flags := flag.NewFlagSet("scale", flag.ContinueOnError)
	run := Scale()(flags)
	if err := flags.Parse([]string{"-gpus", "5"}); err != nil {
		t.Fatal(err)
	}
	if err := run(io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), "no GPU 4, there are 4") {
		t.Errorf("five of four GPUs: %v", err)
	}
}
