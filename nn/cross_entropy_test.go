package nn

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// crossEntropyCases are losses of some rows, of which some do not count.
func crossEntropyCases(rng *rand.Rand) (cases []opCase) {
	for i := range 4 {
		rows, width, size := 1+rng.IntN(9), 1+rng.IntN(12), 1+rng.IntN(20)
		x, w, b := randomInput(rng, "x", rows, width), randomInput(rng, "w", size, width), randomInput(rng, "b", size)
		targets := opInput{name: "targets", shape: tensor.Shape{rows}, ids: make([]int, rows)}
		for r := range targets.ids {
			targets.ids[r] = rng.IntN(size+1) - 1
		}
		c := opCase{name: "CrossEntropy", inputs: []opInput{x, w, targets}, shape: tensor.Shape{rows}, size: 40}
		if i%2 == 0 {
			c.inputs = append(c.inputs, b)
		}
		c.build = func(in []*G.Node) (*G.Node, error) {
			if len(in) == 4 {
				return CrossEntropy(in[0], in[1], in[3], in[2])
			}
			return CrossEntropy(in[0], in[1], nil, in[2])
		}
		c.want = func(in [][]float64) []float64 {
			loss := make([]float64, rows)
			for r, target := range targets.ids {
				if target < 0 {
					continue
				}
				sum, of := 0.0, 0.0
				for j := range size {
					logit := 0.0
					for k := range width {
						logit += in[0][r*width+k] * in[1][j*width+k]
					}
					if len(in) == 4 {
						logit += in[3][j]
					}
					sum += math.Exp(logit)
					if j == target {
						of = logit
					}
				}
				loss[r] = math.Log(sum) - of
			}
			return loss
		}
		cases = append(cases, c)
	}
	return cases
}

// TestCrossEntropyPieces: loss and gradients of sizes that take several pieces, with extreme logits, against float64.
func TestCrossEntropyPieces(t *testing.T) {
	rng := reftest.Rand(t)
	const rows, width, size = 70, 8, logitElements/logitRows + 100
	random := func(n int, scale float64) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(rng.NormFloat64() * scale)
		}
		return x
	}
	x, w, b := random(rows*width, 3), random(size*width, 1), random(size, 1)
	b[7] = 1000 // nearly all of the probability of each row
	targets, g := make([]int, rows), random(rows, 1)
	for i := range targets {
		targets[i] = []int{-1, 7, rng.IntN(size), rng.IntN(size)}[rng.IntN(4)]
	}
	op := crossEntropy{dtype: tensor.Float32, targets: tensor.Int, bias: true}
	of := func(x any, shape ...int) G.Value {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	in := []G.Value{of(x, rows, width), of(w, size, width), of(targets, rows), of(b, size)}
	y, err := opOf(op).Do(in...)
	if err != nil {
		t.Fatal(err)
	}
	loss := y.Data().([]float32)
	grads, err := op.valueGradients(in, of(g, rows))
	if err != nil {
		t.Fatal(err)
	}
	dx, dw, db := make([]float64, len(x)), make([]float64, len(w)), make([]float64, len(b))
	dwAbs := make([]float64, len(w))
	logits := make([]float64, size)
	for r := range rows {
		if targets[r] < 0 {
			if loss[r] != 0 {
				t.Errorf("loss of row %d, which does not count, is %v", r, loss[r])
			}
			continue
		}
		top, sum := math.Inf(-1), 0.0
		for j := range logits {
			logits[j] = float64(b[j])
			for k := range width {
				logits[j] += float64(x[r*width+k]) * float64(w[j*width+k])
			}
			top = max(top, logits[j])
		}
		for _, s := range logits {
			sum += math.Exp(s - top)
		}
		if want := top + math.Log(sum) - logits[targets[r]]; math.Abs(float64(loss[r])-want) > 2e-4 {
			t.Errorf("loss of row %d is %v, want %v", r, loss[r], want)
		}
		for j, s := range logits {
			d := math.Exp(s-top) / sum
			if j == targets[r] {
				d--
			}
			d *= float64(g[r])
			db[j] += d
			for k := range width {
				dx[r*width+k] += d * float64(w[j*width+k])
				dw[j*width+k] += d * float64(x[r*width+k])
				dwAbs[j*width+k] += math.Abs(d * float64(x[r*width+k]))
			}
		}
	}
	for _, c := range []struct {
		name      string
		got       G.Value
		want, abs []float64
	}{{"dx", grads[0], dx, nil}, {"dw", grads[1], dw, dwAbs}, {"db", grads[3], db, nil}} {
		for i, got := range c.got.Data().([]float32) {
			bound := 2e-3
			if c.abs != nil {
				bound = 1e-3*c.abs[i] + 1e-6
			}
			if math.Abs(float64(got)-c.want[i]) > bound {
				t.Fatalf("%s[%d] is %v, want %v", c.name, i, got, c.want[i])
			}
		}
	}
}

// TestCrossEntropyRefused: wrong shapes, types and targets.
func TestCrossEntropyRefused(t *testing.T) {
	g := G.NewGraph()
	node := func(name string, of tensor.Dtype, shape ...int) *G.Node {
		return G.NewTensor(g, of, len(shape), G.WithShape(shape...), G.WithName(name))
	}
	x, w, b := node("x", tensor.Float32, 3, 4), node("w", tensor.Float32, 5, 4), node("b", tensor.Float32, 5)
	targets := node("targets", tensor.Int, 3)
	for _, c := range []struct {
		x, w, b, targets *G.Node
		want             error
	}{
		{x, node("w2", tensor.Float32, 5, 3), b, targets, errs.ErrShape},
		{x, w, node("b2", tensor.Float32, 4), targets, errs.ErrShape},
		{x, w, b, node("t2", tensor.Int, 4), errs.ErrShape},
		{x, w, b, node("t3", tensor.Float32, 3), errs.ErrDType},
		{node("x2", tensor.Float64, 3, 4), w, b, targets, errs.ErrDType},
		{x, nil, b, targets, errs.ErrGraph},
		{nil, w, b, targets, errs.ErrGraph},
	} {
		if _, err := CrossEntropy(c.x, c.w, c.b, c.targets); !errors.Is(err, c.want) {
			t.Errorf("%v, want %v", err, c.want)
		}
	}
	op := opOf(crossEntropy{dtype: tensor.Float32, targets: tensor.Int})
	of := func(x any, shape ...int) G.Value {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
	}
	for _, target := range []int{-2, 5} {
		_, err := op.Do(of(make([]float32, 12), 3, 4), of(make([]float32, 20), 5, 4), of([]int{0, target, 1}, 3))
		if !errors.Is(err, errs.ErrLength) {
			t.Errorf("target %d: %v", target, err)
		}
	}
}
