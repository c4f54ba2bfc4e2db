package layers

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUSolver(t *testing.T) {
	m, d := realDecoder(t)
	testSolver(t, m, d, 40)
}

// newSolver makes weights of random numbers, and the memory of a step.
func (m *machine) newSolver(t testing.TB, random func(n int) gpu.Memory, moments, added bool, sizes ...int) *Solver {
	o := &Solver{Rule: SolverRule{Moments: moments}}
	for _, n := range sizes {
		w := SolverWeight{N: n, W: random(n), G: random(n)}
		if moments {
			w.M, w.V = random(n), random(n)
		}
		if added {
			w.A = random(n)
		}
		o.Weights = append(o.Weights, w)
	}
	o.Table, o.Sums = m.Put(t, o.Bytes(), attn.Float32), m.empty(t, 2*(o.Pieces()+1))
	return o
}

func (o *Solver) close(t testing.TB) {
	list := []gpu.Memory{o.Table, o.Sums}
	for _, w := range o.Weights {
		list = append(list, w.W, w.G, w.A, w.M, w.V)
	}
	for _, x := range list {
		if x.Buffer != nil {
			noError(t, x.Buffer.Close())
		}
	}
}

// testSolver: squares and updates of weights of any size, with and without moments, against float64.
func testSolver(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		numbers := map[uint64][]float64{}
		random := func(n int) gpu.Memory {
			x := m.random(t, rng, attn.Float32, n, 1)
			numbers[x.Address()] = x.x
			return x.Memory
		}
		var sizes []int
		for range 1 + rng.IntN(5) {
			sizes = append(sizes, enginetest.Pick(rng, 1, 255, 257, SolverPiece-1, SolverPiece, SolverPiece+1, 1+rng.IntN(3*SolverPiece)))
		}
		o := m.newSolver(t, random, i%2 == 0, i%4 < 2, sizes...)
		for j := range o.Weights { // variances are not negative
			if v := &o.Weights[j].V; v.Buffer != nil {
				x := numbers[v.Address()]
				data := make([]byte, 4*len(x))
				for k := range x {
					x[k] = math.Abs(x[k])
					enginetest.Put(data, k, attn.Float32, x[k])
				}
				noError(t, v.Buffer.Upload(v.Offset, data))
			}
		}
		f := func() float32 { return 0.05 + rng.Float32() }
		o.Rule.Scale, o.Rule.Beta1, o.Rule.Rest1, o.Rule.Beta2, o.Rule.Rest2 = f(), f(), f(), f(), f()
		o.Rule.Correct1, o.Rule.Correct2, o.Rule.Epsilon, o.Rule.Rate, o.Rule.Decay = f(), f(), f(), f(), f()
		noError(t, d.SolverSquares(m.Stream, o))
		noError(t, d.SolverUpdate(m.Stream, o))
		m.Settle(t)
		sums := enginetest.Read(t, &o.Sums)
		r, all := &o.Rule, 0.0
		for _, w := range o.Weights {
			g := slices.Clone(numbers[w.G.Address()])
			if w.A.Buffer != nil {
				for k, a := range numbers[w.A.Address()] {
					g[k] = float64(float32(a) + float32(g[k]))
				}
			}
			for from := 0; from < w.N; from += SolverPiece {
				want := 0.0
				for _, x := range g[from:min(from+SolverPiece, w.N)] {
					want += x * x
				}
				all += want
				got := math.Float64frombits(binary.LittleEndian.Uint64(sums))
				if sums = sums[8:]; !(math.Abs(got-want) <= 1e-12*want) {
					t.Fatalf("sizes %v: the sum of squares is %v, want %v", sizes, got, want)
				}
			}
			results := map[string][]byte{"w": enginetest.Read(t, &w.W)}
			if r.Moments {
				results["m"], results["v"] = enginetest.Read(t, &w.M), enginetest.Read(t, &w.V)
			}
			for k := range w.N {
				u := float64(r.Scale) * g[k]
				want := map[string]float64{}
				if r.Moments {
					mean := float64(r.Beta1)*numbers[w.M.Address()][k] + float64(r.Rest1)*u
					variance := float64(r.Beta2)*numbers[w.V.Address()][k] + float64(r.Rest2)*u*u
					want["m"], want["v"] = mean, variance
					u = float64(r.Correct1) * mean / (math.Sqrt(float64(r.Correct2)*variance) + float64(r.Epsilon))
				}
				x := numbers[w.W.Address()][k]
				want["w"] = x - float64(r.Rate)*(u+float64(r.Decay)*x)
				for name, want := range want {
					if got := enginetest.Get(results[name], k, attn.Float32); !(math.Abs(got-want) <= 1e-5*(1+math.Abs(want))) {
						t.Fatalf("sizes %v, %+v: %s[%d] is %v, want %v", sizes, o.Rule, name, k, got, want)
					}
				}
			}
		}
		if got := math.Float64frombits(binary.LittleEndian.Uint64(sums)); !(math.Abs(got-all) <= 1e-12*all) {
			t.Fatalf("sizes %v: the sum of all squares is %v, want %v", sizes, got, all)
		}
		// Sums, of which nothing before is read in the first.
		for j := range o.Weights {
			if w := &o.Weights[j]; w.A.Buffer == nil {
				w.A = m.empty(t, w.N)
			}
		}
		noError(t, o.Table.Buffer.Upload(o.Table.Offset, o.Bytes()))
		for runs := 1; runs <= 2; runs++ {
			noError(t, d.SolverAdd(m.Stream, o, runs == 1))
			m.Settle(t)
			for _, w := range o.Weights {
				got := enginetest.Read(t, &w.A)
				for k, g := range numbers[w.G.Address()] {
					if x := enginetest.Get(got, k, attn.Float32); x != float64(runs)*float64(float32(g)) {
						t.Fatalf("sizes %v: the sum of %d times %v is %v", sizes, runs, g, x)
					}
				}
			}
		}
		o.close(t)
	}
	o := m.newSolver(t, func(n int) gpu.Memory { return m.random(t, rng, attn.Float32, n, 1).Memory }, true, false, 8, 9)
	for _, c := range []struct {
		change  func(*Solver)
		is      error
		because string
	}{
		{func(o *Solver) { o.Weights = nil }, attn.ErrShape, "0 weights"},
		{func(o *Solver) { o.Weights[1].N = 0 }, attn.ErrShape, "weight 1 has 0 elements"},
		{func(o *Solver) { o.Weights[1].N = 10 }, attn.ErrShape, "a weight has 9 elements of 10"},
		{func(o *Solver) { o.Weights[0].G.DType = attn.Float16 }, attn.ErrDType, "its gradient is float16"},
		{func(o *Solver) { o.Weights[0].V = gpu.Memory{} }, attn.ErrShape, "its variance has no buffer"},
		{func(o *Solver) { o.Table.Len-- }, attn.ErrShape, "the table has 27 elements of 28"},
	} {
		bad := *o
		bad.Weights = append([]SolverWeight{}, o.Weights...)
		c.change(&bad)
		wantError(t, c.because, d.SolverUpdate(m.Stream, &bad), c.is, c.because)
	}
	bad := *o
	bad.Sums.Len--
	wantError(t, "short sums", d.SolverSquares(m.Stream, &bad), attn.ErrShape, "the sums has 5 elements of 6")
	wantError(t, "no sums", d.SolverAdd(m.Stream, o, true), attn.ErrShape, "its sum has no buffer")
	o.close(t)
}

// BenchmarkGPUSolver measures a step of 125M weights, in GB/s of bytes read and written.
func BenchmarkGPUSolver(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	sizes := []int{50257 * 768, 1024 * 768}
	for range 12 {
		sizes = append(sizes, 768, 768, 768*2304, 2304, 768*768, 768, 768, 768, 768*3072, 3072, 768*3072, 768)
	}
	o := m.newSolver(b, func(n int) gpu.Memory { return m.filled(b, rng, attn.Float32, n, 1) }, true, false, sizes...)
	o.Rule = SolverRule{Moments: true, Scale: 1, Beta1: 0.9, Rest1: 0.1, Beta2: 0.99, Rest2: 0.01, Correct1: 1, Correct2: 1, Epsilon: 1, Rate: 1e-4}
	n := 0
	for _, size := range sizes {
		n += size
	}
	for _, c := range []struct {
		name  string
		bytes int
		run   func() error
	}{{"squares", 4, func() error { return d.SolverSquares(m.Stream, o) }}, {"update", 28, func() error { return d.SolverUpdate(m.Stream, o) }}} {
		b.Run(fmt.Sprintf("%dM/%s", n/1e6, c.name), func(b *testing.B) {
			took := m.median(b, 11, c.run).Seconds()
			b.ReportMetric(took*1e6, "us")
			b.ReportMetric(float64(c.bytes)*float64(n)/took/1e9, "GB/s")
			b.ReportMetric(0, "ns/op")
		})
	}
	o.close(b)
}
