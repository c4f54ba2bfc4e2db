package leanattention_test

import (
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestFuseHiddenRow: what a query gets all of whose keys a mask hides. A finite number
// shifts all scores alike, which is as if there were no mask, but for the digits that
// it costs; behind -Inf there is nothing, which Gorgonia has as NaN.
func TestFuseHiddenRow(t *testing.T) {
	rng := reftest.Rand(t)
	const hiddenRow = 1
	for _, c := range []struct {
		hide float64
		unit map[tensor.Dtype]float64
	}{
		{-1e4, map[tensor.Dtype]float64{tensor.Float32: 1e-2, tensor.Float64: 1e-10}},
		{-1e9, map[tensor.Dtype]float64{tensor.Float32: 1, tensor.Float64: 1e-5}},
		{math.Inf(-1), nil},
	} {
		for _, constant := range []bool{false, true} {
			for _, dtype := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				w := newWriter(t, rng, dtype)
				m := make([]float64, 2*3*5)
				for at := range m {
					if at/5%3 == hiddenRow {
						m[at] = c.hide
					}
				}
				q, k, v := w.qkv()
				mask := input(w.g, "mask", tensorOf(dtype, m, 2, 3, 5))
				if constant {
					mask = w.constant("a mask", m, 2, 3, 5)
				}
				o := w.bmm(w.byHand(w.add(w.bmm(q, k, false, true), mask), 2, true), v)
				f, err := la.Fuse(o)
				if err != nil || len(f.Matches) != 1 || f.Matches[0].Bias != mask {
					t.Fatal(f, err)
				}
				want, got := outputs(t, w.g, read(o))[0], outputs(t, f.Graph, read(f.Roots...))[0]
				for row := range 2 * 3 {
					from, to := row*6, row*6+6
					unit := map[tensor.Dtype]float64{tensor.Float32: 2e-5, tensor.Float64: 1e-12}[dtype]
					switch {
					case row%3 != hiddenRow:
					case c.unit == nil:
						for i, x := range want[from:to] {
							if !math.IsNaN(x) {
								t.Errorf("Gorgonia has %v for a hidden row: the documentation of Fuse is wrong", x)
							}
							want[from+i] = 0
						}
					case dtype == tensor.Float32 && c.hide == -1e9: // all digits are gone: the mean of the values
						for i := range 6 {
							mean := 0.0
							for j := range 5 {
								mean += floats(t, v.Value())[(row/3*5+j)*6+i] / 5
							}
							if math.Abs(want[from+i]-mean) > 1e-5 {
								t.Fatalf("Gorgonia has %v, not the mean %v", want[from+i], mean)
							}
						}
					default:
						unit = c.unit[dtype]
					}
					if err := within(got[from:to], want[from:to], unit); err != nil {
						t.Errorf("%v, mask of %v, row %d: %v", dtype, c.hide, row, err)
					}
				}
			}
		}
	}
}

// TestFuseMaskShapes: masks of the shapes that people add, as an input or made of one
// by arithmetic, are biases of that shape.
func TestFuseMaskShapes(t *testing.T) {
	rng := reftest.Rand(t)
	for _, shape := range []tensor.Shape{{5, 5}, {1, 5, 5}, {2, 5, 5}, {2, 1, 5}, {1, 1, 5}, {5}} {
		for _, hide := range []float64{-1e9, -1e4, math.Inf(-1)} {
			for _, made := range []bool{false, true} {
				if made && math.IsInf(hide, 0) {
					continue // 0 times that is NaN
				}
				w := newWriter(t, rng, tensor.Float32)
				q, k, v := w.input("q", 2, 5, 4), w.input("k", 2, 5, 4), w.input("v", 2, 5, 4)
				var mask *G.Node
				if made {
					mask = w.times(w.must(G.Sub(w.number(1), w.shown("shown", shape...))), w.number(hide))
				} else {
					mask = w.hidden("hidden", hide, shape...)
				}
				var along []byte
				s := w.times(w.bmm(q, k, false, true), w.scalar("scale", 0.5))
				for i := range 3 {
					if at := i - 3 + len(shape); at < 0 || shape[at] != s.Shape()[i] {
						along = append(along, byte(i))
					}
				}
				if along == nil {
					s = w.add(s, mask)
				} else {
					s = w.must(G.BroadcastAdd(s, mask, nil, along))
				}
				o := w.bmm(w.softmax(s, 2), v)
				f := w.fuse(one(o), read(o))
				if len(f.Matches) != 1 || f.Matches[0].Bias == nil || f.Matches[0].Bias.Shape().TotalSize() != shape.TotalSize() {
					t.Errorf("a mask of %v, %v: %v", shape, hide, f)
				}
			}
		}
	}
}

// TestFuseDropout: a Dropout is left out where it is the identity, which it is for
// probability 0 and behind a machine for evaluation, and stays where it drops.
func TestFuseDropout(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range []struct {
		p        float64
		evaluate bool
		fused    bool
	}{{0, false, true}, {0, true, true}, {0.5, false, false}, {0.5, true, true}} {
		w := newWriter(t, rng, tensor.Float64)
		o := w.behind(func(p *G.Node) *G.Node { return w.must(G.Dropout(p, c.p)) })
		if c.evaluate {
			vm := G.NewTapeMachine(w.g, G.EvalMode())
			if err := vm.Close(); err != nil {
				t.Fatal(err)
			}
		}
		f, err := la.Fuse(o)
		if err != nil || len(f.Matches)+len(f.Misses) != 1 {
			t.Fatal(f, err)
		}
		if !c.fused {
			if len(f.Misses) != 1 || !strings.Contains(f.String(), "Dropout") || !strings.Contains(f.String(), "EvalMode") || count(f.Graph, "Dropout") != 1 {
				t.Errorf("%v: %v", c, f)
			}
			continue
		}
		if len(f.Matches) != 1 || len(f.Matches[0].Dropouts) != 1 || !strings.Contains(f.String(), "without node 5 (Dropout{") || count(f.Graph, "Dropout") != 0 {
			t.Errorf("%v: %v", c, f)
		}
		reads := read(o)
		vm := G.NewTapeMachine(w.g, G.EvalMode())
		again(t, vm)
		want := floats(t, *reads[0])
		if err := near(outputs(t, f.Graph, read(f.Roots...))[0], want, w.dtype); err != nil {
			t.Error(err)
		}
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
