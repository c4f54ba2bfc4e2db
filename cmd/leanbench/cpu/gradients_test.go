package cpu

import (
	"math"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestMeasureGradients: PyTorch's times become its speed and our ratio to it.
func TestMeasureGradients(t *testing.T) {
	w, err := measure.Start(measuretest.Command(t, "well"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	b, _ := testBench(t)
	for _, s := range []stepShape{
		{"f64", 2, 30, 30, 8, true, true, measure.AtLeast(1e-9)}, {"f32", 2, 1, 40, 8, false, false, measure.AtLeast(1e9)},
	} {
		if err := b.measureGradients(w, s); err != nil {
			t.Fatal(err)
		}
		if f := b.report.Find(s.String(), "PyTorch", measure.StepMillis); f == nil || !measuretest.Near(f.Value, 1) {
			t.Errorf("PyTorch: %+v", f)
		}
		if f := b.report.Find(s.String(), "PyTorch", measure.Products); f == nil || !measuretest.Near(f.Value, s.products()/1e-3) {
			t.Errorf("PyTorch: %+v", f)
		}
		f := b.report.Find(s.String(), "lean", measure.OverTorch)
		if f == nil || f.Bar == nil || f.Bar.Met != (s.store == "f64") {
			t.Errorf("lean: %+v", f)
		}
	}
	for _, want := range []string{"shape 2 30 30 8 f64 true true", "shape 2 1 40 8 f32 false false"} {
		if !strings.Contains(w.Stderr.Text(), want) {
			t.Errorf("the worker was not asked for %q:%s", want, w.Stderr.Text())
		}
	}
}

// TestGradientCases: the shapes and bars are those that were asked for, with names of their own.
func TestGradientCases(t *testing.T) {
	names := map[string]bool{}
	for _, c := range gradientCases() {
		want := 1.0
		if c.store == "f32" && c.backward {
			want = 1.2
		}
		if *c.faster.Least != want || c.heads != 12 || c.dim != 64 || c.queries != c.keys && (c.queries != 1 || c.backward || c.causal) {
			t.Errorf("%+v", c)
		}
		names[c.String()] = true
	}
	if len(names) != 18 {
		t.Errorf("%d cases", len(names))
	}
	if got, want := (stepShape{heads: 2, queries: 3, keys: 3, dim: 4, causal: true, backward: true}).products(), 2*7*2*6*4/1e9; math.Abs(got-want) > 1e-12 {
		t.Errorf("%v products, want %v", got, want)
	}
}
