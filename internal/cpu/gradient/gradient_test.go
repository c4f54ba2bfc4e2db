package gradient

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// backwardCase is a backward pass, its operands and what must come out. Whatever must not be read is NaN.
type backwardCase[F cpu.Real] struct {
	*reftest.Case
	shape Shape
	ops   Operands[F]
	want  *reftest.Gradients
}

// what a cost's gradient is in.
type outputs uint8

const (
	ofOut outputs = 1 << iota
	ofLSE
	ofBoth = ofOut | ofLSE
)

func (o outputs) String() string { return [...]string{"", "out", "lse", "both"}[o] }

// newBackward makes a case, with as many rows as the longest sequence has queries. A capacity of 0 is the most
// keys of a sequence.
func newBackward[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs, of outputs, capacity int) *backwardCase[F] {
	format := cputest.AccOf[F]()
	c := reftest.New(rng, s, in, format, format)
	if capacity == 0 {
		capacity = max(slices.Max(s.Keys), 1)
	}
	b := &backwardCase[F]{Case: c, shape: Shape{
		Batch: len(s.Keys), Heads: s.Heads, KVHeads: s.KVHeads, Queries: slices.Max(s.Queries), QueryLengths: s.Queries, Keys: capacity,
		Dim: s.Dim, ValueDim: s.ValueDim, Lengths: s.Keys, Scale: c.Scale, Mask: s.Mask,
		Score: attn.Score{Cap: s.SoftCap, Slopes: attn.NewSlopes(s.Slopes), Bias: cputest.BiasOf(s.Bias), Sinks: s.Sinks != nil, Dropout: s.Dropout, Variant: s.Variant},
	}}
	p := reftest.Precision{Acc: format}
	forward := c.Reference(p)
	dO, dLSE := noisy(rng, len(forward.O), format), noisy(rng, len(forward.LSE), format)
	if of&ofOut == 0 {
		dO = nil
	}
	if of&ofLSE == 0 {
		dLSE = nil
	}
	b.want = c.Backward(p, forward, dO, dLSE)
	rows := func(x []float64, dim int) []F { // tokens x heads to heads x tokens
		if x == nil {
			return nil
		}
		other := *c
		other.Q, other.Dim = x, dim
		return reftest.Convert[F](other.DenseQ(slices.Max(s.Queries)))
	}
	b.ops = Operands[F]{
		Q: rows(c.Q, s.Dim), K: reftest.Convert[F](c.DenseK(capacity)), V: reftest.Convert[F](c.DenseV(capacity)),
		Out: rows(forward.O, s.ValueDim), LSE: rows(forward.LSE, 1), DOut: rows(dO, s.ValueDim), DLSE: rows(dLSE, 1),
	}
	b.ops.Seed, b.ops.Tensors = s.Seed, cputest.TensorsOf[F](s.Tensors)
	for _, t := range s.Tensors {
		var d []F
		if !t.Int() {
			d = make([]F, t.Len())
		}
		b.ops.DTensors = append(b.ops.DTensors, d)
	}
	b.ops.DQ, b.ops.DK, b.ops.DV = make([]F, len(b.ops.Q)), make([]F, len(b.ops.K)), make([]F, len(b.ops.V))
	if s.Bias.X != nil {
		b.ops.Bias, b.ops.DBias = reftest.Convert[F](s.DenseBias()), make([]F, len(s.Bias.X))
	}
	if s.Sinks != nil {
		b.ops.Sinks, b.ops.DSinks = reftest.Convert[F](s.Sinks), make([]F, s.Heads)
	}
	if dO == nil {
		b.ops.V, b.ops.Out, b.ops.DV = nil, nil, nil
	}
	b.poison()
	return b
}

// noisy is n numbers of N(0,1), of a format.
func noisy(rng *rand.Rand, n int, f reftest.Format) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = f.Round(rng.NormFloat64())
	}
	return x
}

func (b *backwardCase[F]) poison() {
	for _, x := range [][]F{b.ops.DQ, b.ops.DK, b.ops.DV, b.ops.DBias, b.ops.DSinks} {
		reftest.Poison(x)
	}
	for _, x := range b.ops.DTensors {
		reftest.Poison(x)
	}
}

// check compares the gradients with the reference; those of keys beyond a length are 0.
func (b *backwardCase[F]) check() error {
	s := &b.shape
	for _, x := range []struct {
		name             string
		got              []F
		want, bound      []float64
		heads, rows, dim int
		live             []int
	}{
		{"dq", b.ops.DQ, b.want.DQ, b.want.DQBound, s.Heads, s.Queries, s.Dim, b.Queries},
		{"dk", b.ops.DK, b.want.DK, b.want.DKBound, s.KVHeads, s.Keys, s.Dim, b.Keys},
		{"dv", b.ops.DV, b.want.DV, b.want.DVBound, s.KVHeads, s.Keys, s.ValueDim, b.Keys},
	} {
		if x.got == nil {
			continue
		}
		var got []F
		for seq, live := range x.live {
			for pos := range x.rows {
				for h := range x.heads {
					row := piece(x.got, (seq*x.heads+h)*x.rows+pos, x.dim)
					if pos < live {
						got = append(got, row...)
					} else if slices.ContainsFunc(row, func(f F) bool { return f != 0 }) {
						return fmt.Errorf("%s of sequence %d at %d, beyond its length, is %v", x.name, seq, pos, row)
					}
				}
			}
		}
		if err := reftest.Compare(got, x.want, x.bound, len(got)/x.heads/x.dim, x.heads, x.dim); err != nil {
			return fmt.Errorf("%s: %w", x.name, err)
		}
	}
	if of := b.Bias; of.X != nil {
		if err := reftest.Compare(b.ops.DBias, b.want.DBias, b.want.DBiasBound, of.Sequences, of.Heads, of.Queries, of.Keys); err != nil {
			return fmt.Errorf("dBias: %w", err)
		}
	}
	if err := reftest.Compare(b.ops.DSinks, b.want.DSinks, b.want.DSinksBound, len(b.Sinks)); err != nil {
		return fmt.Errorf("dSinks: %w", err)
	}
	for i, d := range b.ops.DTensors {
		if d == nil {
			continue
		}
		if err := reftest.Compare(d, b.want.DTensors[i], b.want.DTensorsBound[i], len(d)); err != nil {
			return fmt.Errorf("d%s: %w", s.Variant.Tensors[i].Name, err)
		}
	}
	return nil
}

func verifyBackward[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs, of outputs, capacity, workers int) error {
	b := newBackward[F](rng, s, in, of, capacity)
	b.shape.Workers = workers
	err := Run(cpu.Default(), &b.shape, &b.ops)
	if err == nil {
		err = b.check()
	}
	if err != nil {
		return fmt.Errorf("%v, %v, %v, gradient of %v, capacity %d, %d workers: %w", s, in, cputest.AccOf[F](), of, capacity, workers, err)
	}
	return nil
}

func TestBackwardGradRandom(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 30, 150)
	if reftest.RaceEnabled {
		n = 10
	}
	for range n {
		verifyBackwardSomehow(t, rng, reftest.RandomShape(rng), false)
	}
}

// verifyBackwardSomehow differentiates a shape, with as many queries in each sequence as the first has, at least one, or
// fewer in some, with random numbers and, if told, a random bias.
func verifyBackwardSomehow(t *testing.T, rng *rand.Rand, s reftest.Shape, biased bool) {
	t.Helper()
	queries := max(s.Queries[0], 1)
	for i := range s.Queries {
		s.Queries[i] = queries
	}
	in, of := reftest.AllInputs[rng.IntN(4)], outputs(1+rng.IntN(3))
	capacity, workers := max(slices.Max(s.Keys)+rng.IntN(3), 1), rng.IntN(5)
	if biased {
		s = reftest.RandomBias(rng, s, capacity)
		s.Bias.Scale = []float64{0, 1, 0.25}[rng.IntN(3)]
	}
	if rng.IntN(2) == 0 {
		for i := range s.Queries[1:] {
			s.Queries[1+i] = rng.IntN(queries + 1)
		}
	}
	check := verifyBackward[float32]
	if rng.IntN(3) == 0 {
		check = verifyBackward[float64]
	}
	if err := check(rng, s, in, of, capacity, workers); err != nil {
		t.Fatal(err)
	}
}

// Windows, soft caps, slopes and biases. What a window keeps from all queries is NaN, and its gradients are 0.
func TestBackwardGradScoreMods(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 16, 60)
	if reftest.RaceEnabled {
		n = 20
	}
	for i := range n {
		s := reftest.RandomScoreMods(rng, reftest.RandomShape(rng))
		if i%5 == 0 {
			s = cputest.Long(t, rng, s, 300, 600)
		}
		verifyBackwardSomehow(t, rng, s, i%2 == 0)
	}
}

// Sizes around those of blocks, panels, and chunks of keys.
func TestBackwardGradSizes(t *testing.T) {
	rng := reftest.Rand(t)
	for i, causal := range []bool{false, true} {
		for j, x := range []struct{ heads, kvHeads, queries, keys int }{
			{1, 1, 1, 1}, {1, 1, 63, 127}, {2, 1, 64, 128}, {1, 1, 65, 129}, {3, 3, 1, 1000}, {1, 1, 130, 1025},
			{4, 1, 40, 300}, {6, 2, 5, 257}, {1, 1, 200, 60}, {70, 1, 1, 140}, {2, 2, 128, 128}, {2, 1, 70, 700},
			{8, 1, 100, 140}, {3, 1, 300, 20}, {16, 2, 30, 50}, {90, 1, 5, 64}, {1, 1, 127, 63}, {1, 1, 129, 65}, {2, 1, 193, 260}, {1, 1, 256, 256},
		} {
			if reftest.RaceEnabled && j%6 != i || !reftest.Every(t) && rng.IntN(4) >= cputest.Cases(t, 1, 4) {
				continue
			}
			s := reftest.Shape{
				Heads: x.heads, KVHeads: x.kvHeads, Dim: 16 + rng.IntN(3)*8, ValueDim: 8 + rng.IntN(20), Mask: attn.Mask{Causal: causal},
				Queries: []int{x.queries, x.queries}, Keys: []int{x.keys, rng.IntN(x.keys + 1)},
			}
			if err := verifyBackward[float32](rng, s, reftest.Peaked, ofBoth, 0, 0); err != nil {
				t.Error(err)
			}
			if err := verifyBackward[float64](rng, s, reftest.Normal, ofOut, 0, 3); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestBackwardGradDims(t *testing.T) {
	rng := reftest.Rand(t)
	most := 260
	if reftest.RaceEnabled {
		most = 20
	}
	for d := 1; d <= most; d += 1 + d/16*rng.IntN(5) {
		s := reftest.Shape{
			Heads: 2, KVHeads: 1, Dim: d, ValueDim: 1 + rng.IntN(260), Queries: []int{9}, Keys: []int{70}, Mask: attn.Mask{Causal: true},
		}
		if d%3 > 0 {
			s.ValueDim = d
		}
		if err := verifyBackward[float32](rng, s, reftest.Normal, ofOut, 0, 2); err != nil {
			t.Fatal(err)
		}
		if err := verifyBackward[float64](rng, s, reftest.Normal, ofOut, 0, 2); err != nil {
			t.Fatal(err)
		}
	}
}

// Scores so large that their rounding is more than a unit: one key takes all, and the gradient of its value
// is that of the output. Bounds say nothing there, so this looks at what is exact.
func TestBackwardGradExtreme(t *testing.T) {
	rng := reftest.Rand(t)
	t.Run("float32", func(t *testing.T) { testBackwardExtreme[float32](t, rng, []float64{1e3, 1e5, 1e7, 1e12, 1e30}) })
	t.Run("float64", func(t *testing.T) { testBackwardExtreme[float64](t, rng, []float64{1e3, 1e12, 1e16, 1e100}) })
}

func testBackwardExtreme[F cpu.Real](t *testing.T, rng *rand.Rand, magnitudes []float64) {
	for _, magnitude := range magnitudes {
		s := reftest.Shape{Heads: 2, KVHeads: 2, Dim: 32, ValueDim: 24, Queries: []int{20}, Keys: []int{300}}
		b := newBackward[F](rng, s, reftest.Normal, ofOut, 0)
		p := reftest.Precision{Acc: cputest.AccOf[F]()}
		for i := range b.Q {
			b.Q[i] = p.Acc.Round(b.Q[i] * magnitude)
		}
		forward := b.Reference(p)
		for h := range s.Heads {
			for i := range s.Queries[0] {
				at := h*s.Queries[0] + i
				for j, x := range b.Query(0, i, h) {
					b.ops.Q[at*s.Dim+j] = F(x)
				}
				b.ops.LSE[at] = F(forward.LSE[i*s.Heads+h])
				for j := range s.ValueDim {
					b.ops.Out[at*s.ValueDim+j] = F(forward.O[(i*s.Heads+h)*s.ValueDim+j])
				}
			}
		}
		if err := Run(cpu.Default(), &b.shape, &b.ops); err != nil {
			t.Fatal(err)
		}
		for _, x := range [][]F{b.ops.DQ, b.ops.DK, b.ops.DV} {
			if slices.ContainsFunc(x, func(f F) bool { return math.IsNaN(float64(f)) }) {
				t.Fatalf("scores of %g: a gradient is NaN", magnitude)
			}
		}
		// Weights sum to 1, so the sum of dv over the keys is that of dO over the queries.
		for h := range s.Heads {
			for j := range s.ValueDim {
				var got, want, abs float64
				for key := range s.Keys[0] {
					got += float64(b.ops.DV[(h*s.Keys[0]+key)*s.ValueDim+j])
				}
				for i := range s.Queries[0] {
					x := float64(b.ops.DOut[(h*s.Queries[0]+i)*s.ValueDim+j])
					want, abs = want+x, abs+math.Abs(x)
				}
				if math.Abs(got-want) > 1e-3*abs {
					t.Fatalf("scores of %g: dv of head %d sums to %v at %d, dO to %v", magnitude, h, got, j, want)
				}
			}
		}
	}
}

// TestBackwardGradWorkers: the same bits with any number of workers, for nil lengths as for full ones, and
// after others have used the memory.
func TestBackwardGradWorkers(t *testing.T) {
	t.Run("float32", testBackwardWorkers[float32])
	t.Run("float64", testBackwardWorkers[float64])
}

func testBackwardWorkers[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	for _, s := range []reftest.Shape{
		{Heads: 2, KVHeads: 1, Dim: 24, ValueDim: 16, Queries: []int{70}, Keys: []int{500}, Mask: attn.Mask{Causal: true}},
		{Heads: 4, KVHeads: 1, Dim: 24, ValueDim: 16, Queries: []int{90}, Keys: []int{150}, Mask: attn.Mask{Causal: true}},
		{Heads: 6, KVHeads: 3, Dim: 8, ValueDim: 40, Queries: []int{33, 33, 33}, Keys: []int{140, 140, 140}},
		reftest.RandomBias(rng, reftest.Shape{Heads: 4, KVHeads: 2, Dim: 8, ValueDim: 8, Queries: []int{90, 90}, Keys: []int{300, 300}}, 300),
		{Heads: 4, KVHeads: 2, Dim: 8, ValueDim: 8, Queries: []int{90, 90}, Keys: []int{300, 300}, Sinks: []float64{1, 5, math.Inf(-1), -2}},
	} {
		b := newBackward[F](rng, s, reftest.Normal, ofBoth, 0)
		var first []F
		for _, workers := range []int{1, 2, 3, 16, 0} {
			for _, lengths := range [][]int{s.Keys, nil} {
				b.poison()
				b.shape.Workers, b.shape.Lengths = workers, lengths
				if err := Run(cpu.Default(), &b.shape, &b.ops); err != nil {
					t.Fatal(err)
				}
				all := slices.Concat(b.ops.DQ, b.ops.DK, b.ops.DV, b.ops.DBias, b.ops.DSinks)
				if first == nil {
					first = all
				} else if !slices.Equal(all, first) {
					t.Fatalf("%v: %d workers, lengths %v, give other bits", s, workers, lengths)
				}
			}
			if err := verifyBackward[F](rng, reftest.Shape{
				Heads: 1, KVHeads: 1, Dim: 20, ValueDim: 20, Queries: []int{80}, Keys: []int{200},
			}, reftest.Normal, ofOut, 0, workers); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestBackwardGradErrors(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 2, Queries: []int{3, 3}, Keys: []int{5, 4}}
	for name, change := range map[string]func(b *backwardCase[float32]){
		"no batch":   func(b *backwardCase[float32]) { b.shape.Batch = 0 },
		"no queries": func(b *backwardCase[float32]) { b.shape.Queries = 0 },
		"heads":      func(b *backwardCase[float32]) { b.shape.KVHeads = 3 },
		"dim":        func(b *backwardCase[float32]) { b.shape.Dim = -1 },
		"workers":    func(b *backwardCase[float32]) { b.shape.Workers = -1 },
		"scale":      func(b *backwardCase[float32]) { b.shape.Scale = math.Inf(1) },
		"soft cap":   func(b *backwardCase[float32]) { b.shape.Cap = math.NaN() },
		"window":     func(b *backwardCase[float32]) { b.shape.Window = -1 },
		"slopes":     func(b *backwardCase[float32]) { b.shape.Slopes = attn.NewSlopes([]float64{1}) },
		"bias": func(b *backwardCase[float32]) {
			b.shape.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 5, Scale: 1}
		},
		"bias of others": func(b *backwardCase[float32]) {
			b.shape.Bias, b.ops.Bias = attn.Bias{Sequences: 3, Heads: 1, Queries: 1, Keys: 5, Scale: 1}, make([]float32, 15)
		},
		"bias of heads": func(b *backwardCase[float32]) {
			b.shape.Bias, b.ops.Bias = attn.Bias{Sequences: 1, Heads: 2, Queries: 1, Keys: 5, Scale: 1}, make([]float32, 10)
		},
		"bias of keys": func(b *backwardCase[float32]) {
			b.shape.Bias, b.ops.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 6, Scale: 1}, make([]float32, 6)
		},
		"bias of NaN": func(b *backwardCase[float32]) {
			b.shape.Bias, b.ops.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 5, Scale: math.NaN()}, make([]float32, 5)
		},
		"dBias": func(b *backwardCase[float32]) {
			b.shape.Bias, b.ops.Bias, b.ops.DBias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 5, Scale: 1}, make([]float32, 5), make([]float32, 4)
		},
		"no sinks": func(b *backwardCase[float32]) { b.shape.Sinks = true },
		"too few sinks": func(b *backwardCase[float32]) {
			b.shape.Sinks, b.ops.Sinks = true, make([]float32, 3)
		},
		"sinks of nobody": func(b *backwardCase[float32]) { b.ops.Sinks = make([]float32, 4) },
		"dSinks": func(b *backwardCase[float32]) {
			b.shape.Sinks, b.ops.Sinks, b.ops.DSinks = true, make([]float32, 4), make([]float32, 3)
		},
		"infinite slope":  func(b *backwardCase[float32]) { b.shape.Slopes = attn.NewSlopes([]float64{1, 2, math.Inf(1), 3}) },
		"lengths":         func(b *backwardCase[float32]) { b.shape.Lengths = []int{1} },
		"query lengths":   func(b *backwardCase[float32]) { b.shape.QueryLengths = []int{1} },
		"many queries":    func(b *backwardCase[float32]) { b.shape.QueryLengths = []int{3, 4} },
		"minus queries":   func(b *backwardCase[float32]) { b.shape.QueryLengths = []int{3, -1} },
		"negative length": func(b *backwardCase[float32]) { b.shape.Lengths = []int{1, -1} },
		"length":          func(b *backwardCase[float32]) { b.shape.Lengths = []int{1, 6} },
		"huge": func(b *backwardCase[float32]) {
			b.shape.Batch, b.shape.Lengths, b.shape.QueryLengths = math.MaxInt/2, nil, nil
		},
		"q":    func(b *backwardCase[float32]) { b.ops.Q = b.ops.Q[1:] },
		"k":    func(b *backwardCase[float32]) { b.ops.K = nil },
		"v":    func(b *backwardCase[float32]) { b.ops.V = nil },
		"out":  func(b *backwardCase[float32]) { b.ops.Out = b.ops.Out[1:] },
		"lse":  func(b *backwardCase[float32]) { b.ops.LSE = nil },
		"dOut": func(b *backwardCase[float32]) { b.ops.DOut = b.ops.DOut[1:] },
		"dLSE": func(b *backwardCase[float32]) { b.ops.DLSE = b.ops.DLSE[1:] },
		"dq":   func(b *backwardCase[float32]) { b.ops.DQ = b.ops.DQ[1:] },
		"dk":   func(b *backwardCase[float32]) { b.ops.DK = b.ops.DK[1:] },
		"dv":   func(b *backwardCase[float32]) { b.ops.DV = nil },
	} {
		b := newBackward[float32](rng, s, reftest.Normal, ofBoth, 0)
		change(b)
		if err := Run(cpu.Default(), &b.shape, &b.ops); !errors.Is(err, attn.ErrShape) {
			t.Errorf("%s: %v", name, err)
		}
		if slices.ContainsFunc(slices.Concat(b.ops.DQ, b.ops.DK, b.ops.DV), func(f float32) bool { return f == f }) {
			t.Errorf("%s: something was written", name)
		}
	}
	for _, p := range []float64{-0.1, 1, 1.5, math.NaN(), math.Inf(1)} {
		b := newBackward[float32](rng, s, reftest.Normal, ofBoth, 0)
		b.shape.Dropout, b.ops.Seed = p, 1
		if err, want := Run(cpu.Default(), &b.shape, &b.ops), fmt.Sprintf("a dropout of %v", p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", p, err)
		}
	}
	defer cpu.ForceTier("sse")()
	b := newBackward[float32](rng, s, reftest.Normal, ofBoth, 0)
	if err := Run(cpu.Default(), &b.shape, &b.ops); !errors.Is(err, attn.ErrTier) {
		t.Errorf("without kernels: %v", err)
	}
}

func TestBackwardGradAllocates(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	rng := reftest.Rand(t)
	b := newBackward[float32](rng, reftest.RandomBias(rng, reftest.Shape{
		Heads: 2, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{70}, Keys: []int{600}, Slopes: []float64{1, 2},
	}, 600), reftest.Normal, ofBoth, 0)
	var e cpu.Engine
	defer e.Close()
	b.shape.Workers = 1 // helpers come and go
	if n := testing.AllocsPerRun(20, func() {
		if err := Run(&e, &b.shape, &b.ops); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// What is not a number stays where it comes from: in the rows of its own KV head, and out of the memory
// that the next pass finds.
func TestBackwardGradNaN(t *testing.T) {
	t.Run("float32", testBackwardNaN[float32])
	t.Run("float64", testBackwardNaN[float64])
}

func testBackwardNaN[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 2, Dim: 8, ValueDim: 8, Queries: []int{64}, Keys: []int{128}}
	b := newBackward[F](rng, s, reftest.Normal, ofBoth, 0)
	b.shape.Workers = 1
	for _, x := range [][]F{b.ops.Q, b.ops.K, b.ops.V, b.ops.LSE, b.ops.DOut} {
		reftest.Poison(x[len(x)/2:]) // the head that comes last
	}
	if err := Run(cpu.Default(), &b.shape, &b.ops); err != nil {
		t.Fatal(err)
	}
	for _, x := range [][]F{b.ops.DQ, b.ops.DK, b.ops.DV} {
		for i, f := range x {
			if nan := f != f; nan != (i >= len(x)/2) {
				t.Fatalf("element %d of %d is %v", i, len(x), f)
			}
		}
	}
	for _, in := range reftest.AllInputs {
		s := s
		s.Queries, s.Keys = []int{1 + rng.IntN(7)}, []int{1 + rng.IntN(9)}
		if err := verifyBackward[F](rng, s, in, ofBoth, 0, 1); err != nil {
			t.Error(err)
		}
	}
}

// A row all of whose scores are -Inf has no weights, as one that sees no key.
func TestBackwardGradNoWeights(t *testing.T) {
	t.Run("float32", testBackwardNoWeights[float32])
	t.Run("float64", testBackwardNoWeights[float64])
}

func testBackwardNoWeights[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 1, KVHeads: 1, Dim: 4, ValueDim: 3, Queries: []int{6}, Keys: []int{20}}
	b := newBackward[F](rng, s, reftest.Normal, ofBoth, 0)
	for j := range s.Keys[0] {
		b.ops.K[j*s.Dim] = -1
	}
	for i := range s.Queries[0] { // what the rows have to do with one another is only that they are in a block
		clear(b.ops.Q[i*s.Dim : (i+1)*s.Dim])
		b.ops.LSE[i] = F(math.Log(20))
	}
	const row = 2
	b.ops.Q[row*s.Dim], b.ops.LSE[row] = F(math.Inf(1)), F(math.Inf(-1))
	if err := Run(cpu.Default(), &b.shape, &b.ops); err != nil {
		t.Fatal(err)
	}
	for i, f := range slices.Concat(b.ops.DQ, b.ops.DK, b.ops.DV) {
		if f != f || i/s.Dim == row && f != 0 {
			t.Fatalf("element %d is %v", i, f)
		}
	}
}
