package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"go.uber.org/goleak"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestMain(m *testing.M) {
	reftest.PoisonOutputs()
	goleak.VerifyTestMain(cputest.EveryTier(m, cpu.BestTier(), cpu.ForceTier))
}

// verify compares attention in F with the reference, for one schedule.
func verify[F cpu.Real](rng *rand.Rand, s reftest.Shape, in reftest.Inputs, l layout, policy lean.Policy, workers, tileTokens int) error {
	c := reftest.New(rng, s, in, cputest.AccOf[F](), cputest.FormatOf[F](l.dtype))
	p := place[F](rng, c, l)
	if err := p.run(cpu.Default(), policy, workers, tileTokens); err != nil {
		return err
	}
	if err := p.check(c.Reference(reftest.Precision{Acc: cputest.AccOf[F]()})); err != nil {
		return fmt.Errorf("%v, %v, queries %v, %v, %v %d, %d workers, LeanTiles of %d: %w",
			s, in, cputest.AccOf[F](), l, policy.Kind, policy.Splits, workers, tileTokens, err)
	}
	return nil
}

func randomPolicy(rng *rand.Rand) lean.Policy {
	return lean.Policy{Kind: lean.Kind(rng.IntN(3)), Splits: 1 + rng.IntN(6)}
}

func TestRunRandom(t *testing.T) {
	rng := reftest.Rand(t)
	for range cputest.Cases(t, 30, 120) {
		verifySomehow(t, rng, reftest.RandomShape(rng), 0, 1, 5, 16, 64, 100)
	}
}

// verifySomehow verifies a shape with random numbers, layouts and schedules, and LeanTiles of one of the given sizes.
func verifySomehow(t *testing.T, rng *rand.Rand, s reftest.Shape, tiles ...int) {
	t.Helper()
	in, l := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))], randomLayout(rng)
	policy, workers, tile := randomPolicy(rng), 1+rng.IntN(8), tiles[rng.IntN(len(tiles))]
	check := verify[float32]
	if rng.IntN(3) == 0 {
		check = verify[float64]
	}
	if err := check(rng, s, in, l, policy, workers, tile); err != nil {
		t.Fatal(err)
	}
}

// Windows, sink tokens, soft caps, slopes and biases. Keys hidden from all queries, and unused biases, are NaN.
func TestRunScoreMods(t *testing.T) {
	rng := reftest.Rand(t)
	n := cputest.Cases(t, 26, 100)
	if reftest.RaceEnabled {
		n = 50
	}
	for i := range n {
		s := reftest.RandomScoreMods(rng, reftest.RandomShape(rng))
		if i%4 == 0 { // several blocks; edges overlap or not
			s = cputest.Long(t, rng, s, 200, 300)
		}
		if rng.IntN(3) == 0 {
			s = reftest.RandomSinkTokens(rng, s)
		}
		if i%2 == 0 {
			s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1+rng.IntN(3))
			s.Bias.Scale = []float64{0, 1, 0.25}[rng.IntN(3)]
		}
		verifySomehow(t, rng, s, 0, 1, 5, 16, 64, 100, math.MaxInt)
	}
}

// A window costs only its keys. A window larger than the context changes no bit.
func TestRunWindowTiles(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 4, ValueDim: 4, Queries: []int{1, 130}, Keys: []int{9000, 400}, Mask: attn.Mask{Causal: true}}
	p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
	var plan Plan
	tiles := func(window, sinks int) int64 {
		g := p.g
		g.Window, g.SinkTokens = window, sinks
		if err := plan.Build(g, p.seqs); err != nil {
			t.Fatal(err)
		}
		return plan.Tiles()
	}
	if got := tiles(1024, 0); got != 4+tiles(0, 0)-36 { // 400 keys fit
		t.Errorf("%d LeanTiles", got)
	}
	if got := tiles(1, 0); got != 1+5 {
		t.Errorf("%d LeanTiles of single keys", got)
	}
	// Keys between sink tokens and a window are in no LeanTile. The remaining keys share LeanTiles.
	if got := tiles(1, 4); got != 1+5 {
		t.Errorf("%d LeanTiles of single keys and sink tokens", got)
	}
	if got := tiles(1024, 4); got != 5+tiles(0, 0)-36 {
		t.Errorf("%d LeanTiles with sink tokens", got)
	}
	if err := p.run(cpu.Default(), lean.Policy{}, 3, 0); err != nil {
		t.Fatal(err)
	}
	want := p.bits()
	for _, window := range []int{9000, math.MaxInt} {
		p.g.Window, p.g.SinkTokens = window, window%7
		if err := p.run(cpu.Default(), lean.Policy{}, 3, 0); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(p.bits(), want) {
			t.Errorf("a window of %d changes something", window)
		}
	}
}

// A sink of -Inf changes no bit. For a row without visible keys the sink has all weight.
func TestRunSinks(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{
		Heads: 4, KVHeads: 2, Dim: 24, ValueDim: 16, Queries: []int{3, 70, 2, 1}, Keys: []int{50, 60, 0, 900}, Mask: attn.Mask{Causal: true, Window: 40},
	}
	p := place[float32](rng, reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32), layout{dtype: attn.Float32, page: 16})
	if err := p.run(cpu.Default(), lean.Policy{}, 3, 16); err != nil {
		t.Fatal(err)
	}
	want := p.bits()
	inf := float32(math.Inf(-1))
	p.g.Sinks, p.ops.Sinks = true, []float32{inf, inf, inf, inf}
	if err := p.run(cpu.Default(), lean.Policy{}, 3, 16); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(p.bits(), want) {
		t.Error("sinks of -Inf change something")
	}
	sinks := []float64{1.25, -3e38, 3e38, 0}
	p.ops.Sinks = reftest.Convert[float32](sinks)
	if err := p.run(cpu.Default(), lean.Policy{}, 3, 16); err != nil {
		t.Fatal(err)
	}
	for h, z := range sinks {
		for seq, rows := range map[int]int{1: 10, 2: 2} { // rows without visible keys
			for i := range rows {
				row := p.seqs[seq].Row + i
				if got := p.ops.LSE[row*p.g.LSE.Row+h]; got != float32(z) {
					t.Errorf("sequence %d, row %d, head %d: the log-sum-exp is %v, the sink %v", seq, i, h, got, z)
				}
				for _, x := range p.ops.Out[row*p.g.Out.Row+h*p.g.Out.Head:][:s.ValueDim] {
					if x != 0 {
						t.Errorf("sequence %d, row %d, head %d: an output of %v", seq, i, h, x)
					}
				}
			}
		}
	}
	row := p.seqs[3].Row
	for _, x := range p.ops.Out[row*p.g.Out.Row+2*p.g.Out.Head:][:s.ValueDim] {
		if x != 0 {
			t.Errorf("beside a sink of 3e38 keys leave %v", x)
		}
	}
}

func TestSlopes(t *testing.T) {
	x := []float64{0, -1.5, math.MaxFloat64, math.SmallestNonzeroFloat64}
	s := attn.NewSlopes(x)
	for h, f := range x {
		if s.Of(h) != f {
			t.Errorf("slope %d is %v, want %v", h, s.Of(h), f)
		}
	}
	if s.Len() != 4 || s != attn.NewSlopes(x) || s == attn.NewSlopes(x[:3]) || attn.NewSlopes(nil) != "" {
		t.Error("slopes are not what they were made of")
	}
}

func TestRunDims(t *testing.T) {
	rng := reftest.Rand(t)
	for d := 1; d <= 256; d += 1 + d/64*rng.IntN(5) {
		s := reftest.Shape{
			Heads: 2, KVHeads: 1, Dim: d, ValueDim: d, Queries: []int{1}, Keys: []int{1 + rng.IntN(60)},
		}
		if d%3 == 0 {
			s.ValueDim = 1 + rng.IntN(256)
		}
		l := randomLayout(rng)
		if err := verify[float32](rng, s, reftest.Normal, l, lean.Policy{}, 2, 16); err != nil {
			t.Fatal(err)
		}
		if err := verify[float64](rng, s, reftest.Peaked, l, lean.Policy{}, 2, 16); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRunGroups(t *testing.T) {
	rng := reftest.Rand(t)
	for _, group := range []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 71, 300} {
		for _, queries := range []int{1, 3} {
			s := reftest.Shape{
				Heads: 2 * group, KVHeads: 2, Dim: 24, ValueDim: 16,
				Queries: []int{queries, 1}, Keys: []int{90, 33}, Mask: attn.Mask{Causal: true},
			}
			if err := verify[float32](rng, s, reftest.Normal, randomLayout(rng), lean.Policy{}, 3, 32); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Prefill: several blocks of query positions, whose last LeanTiles cross the diagonal.
func TestRunPrefill(t *testing.T) {
	rng := reftest.Rand(t)
	for _, causal := range []bool{true, false} {
		for _, n := range []struct{ queries, keys int }{
			{64, 64}, {65, 65}, {129, 200}, {70, 71},
			{200, 60}, // 140 positions have no visible key: whole blocks, and a part of one
			{100, 0},
		} {
			for group := 1; group <= 3; group++ {
				s := reftest.Shape{
					Heads: 2 * group, KVHeads: 2, Dim: 16, ValueDim: 8,
					Queries: []int{n.queries, 1}, Keys: []int{n.keys, 40}, Mask: attn.Mask{Causal: causal},
				}
				l := randomLayout(rng)
				if err := verify[float32](rng, s, reftest.Peaked, l, randomPolicy(rng), 1+rng.IntN(8), 64); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestRunEmptySequences(t *testing.T) {
	rng := reftest.Rand(t)
	for _, s := range []reftest.Shape{
		{Queries: []int{0}, Keys: []int{0}},
		{Queries: []int{0, 0}, Keys: []int{10, 0}},
		{Queries: []int{1}, Keys: []int{0}},
		{Queries: []int{0, 1, 0, 2, 1}, Keys: []int{5, 0, 0, 9, 40}},
		{},
	} {
		s.Heads, s.KVHeads, s.Dim, s.ValueDim, s.Causal = 4, 2, 8, 8, true
		for workers := 1; workers < 5; workers++ {
			if err := verify[float32](rng, s, reftest.Normal, randomLayout(rng), randomPolicy(rng), workers, 4); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// All schedules agree with the reference within its bound. Each schedule has the same bits on every run and for any
// number of threads.
func TestRunSchedules(t *testing.T) {
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape { return s })
}

func TestRunSchedulesScoreMods(t *testing.T) {
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape {
		s.Window, s.SoftCap, s.Slopes = 24, 20, []float64{1, 0.5, 0.25, 0.125, 0, -0.01}
		return s
	})
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape { return reftest.RandomBias(reftest.Rand(t), s, 200) })
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape {
		s.SoftCap = 3
		return s
	})
	testRunSchedules(t, func(s reftest.Shape) reftest.Shape {
		s.Sinks = []float64{1, 60, math.Inf(-1), -3, 0.5, 20} // some exceed the largest score
		return s
	})
}

func testRunSchedules(t *testing.T, change func(reftest.Shape) reftest.Shape) {
	rng := reftest.Rand(t)
	s := change(reftest.Shape{
		Heads: 6, KVHeads: 2, Dim: 20, ValueDim: 20, Mask: attn.Mask{Causal: true},
		Queries: []int{1, 1, 20, 1, 2}, Keys: []int{200, 3, 35, 0, 130},
	})
	c := reftest.New(rng, s, reftest.Peaked, reftest.Float32, reftest.Float16)
	p := place[float32](rng, c, layout{dtype: attn.Float16, page: 16})
	want := c.Reference(reftest.Precision{Acc: reftest.Float32})
	for _, policy := range []lean.Policy{{}, {Kind: lean.FixedSplit, Splits: 3}, {Kind: lean.PerHead}} {
		for workers := 1; workers <= 8; workers++ {
			for _, tile := range []int{1, 16, 50} {
				var first []uint64
				for _, procs := range []int{4, 1, 2} {
					cputest.SetProcs(t, procs)
					if err := p.run(cpu.Default(), policy, workers, tile); err != nil {
						t.Fatal(err)
					}
					if first == nil {
						if err := p.check(want); err != nil {
							t.Fatalf("%v, %d workers, LeanTiles of %d: %v", policy.Kind, workers, tile, err)
						}
						first = p.bits()
					} else if !slices.Equal(first, p.bits()) {
						t.Fatalf("%v, %d workers, LeanTiles of %d: another result on repeat", policy.Kind, workers, tile)
					}
				}
			}
		}
	}
}

// Contexts so long that the sums over them are a source of error.
func TestRunLongContext(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 1, KVHeads: 1, Dim: 3, ValueDim: 3, Queries: []int{1}, Keys: []int{100_001}}
	for _, in := range []reftest.Inputs{reftest.Normal, reftest.Constant} {
		for _, d := range []attn.DType{attn.Float32, attn.BFloat16} {
			if err := verify[float32](rng, s, in, layout{dtype: d, page: 4096}, lean.Policy{}, 3, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Slopes and biases apply to the right key if keys come in four streams: quarters of a long page, which exceed a call,
// quarters of short pages, and four pages together.
func TestRunLongScoreMods(t *testing.T) {
	t.Run("float32", testRunLongScoreMods[float32])
	t.Run("float64", testRunLongScoreMods[float64])
}

func testRunLongScoreMods[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	for i, page := range []int{100_000, 4096, 1030, 128, 16, 5, 1} {
		rows, dim := 1+rng.IntN(9), 8*(1+rng.IntN(2))
		keys := rows + rng.IntN(3*keysOfCall(2*rows))
		s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: dim, ValueDim: dim, Queries: []int{rows}, Keys: []int{keys}, Mask: attn.Mask{Causal: true}}
		if i%2 == 0 {
			s.Window = 1 + rng.IntN(keys)
		}
		s.Slopes = []float64{8 * rng.Float64() / float64(keys), -1e-4}
		s = reftest.RandomBias(rng, s, keys+2)
		for range 2 {
			d := cputest.Floats[rng.IntN(len(cputest.Floats))]
			if err := verify[F](rng, s, reftest.Normal, layout{dtype: d, page: page}, randomPolicy(rng), 1+rng.IntN(3), rng.IntN(2)*100_000); err != nil {
				t.Fatal(err)
			}
			s.Bias = reftest.Bias{}
		}
	}
}

// NaN and infinities in visible keys and values reach a query's output. Those of later positions do not.
func TestRunNaNInLiveKeys(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 5, ValueDim: 5, Queries: []int{20}, Keys: []int{90}, Mask: attn.Mask{Causal: true}}
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		for _, where := range []string{"key", "value"} {
			const at = 80 // visible from position 10 on
			c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
			if where == "key" {
				c.Key(0, at, 0)[2] = bad
			} else {
				c.Value(0, at, 0)[2] = bad
			}
			p := place[float32](rng, c, randomLayout(rng))
			if err := p.run(cpu.Default(), lean.Policy{}, 3, 16); err != nil {
				t.Fatal(err)
			}
			for i := range 20 {
				for h := range 2 {
					row := p.ops.Out[(p.seqs[0].Row+i)*p.g.Out.Row+h*p.g.Out.Head:][:5]
					finite := true
					for _, x := range row {
						finite = finite && !math.IsNaN(float64(x)) && !math.IsInf(float64(x), 0)
					}
					if i < 10 && !finite {
						t.Fatalf("%v in a %s reaches position %d, which does not see it: %v", bad, where, i, row)
					}
					// An infinite key has the score -Inf for some queries, and then no weight.
					if i >= 10 && finite && (where == "value" || bad != bad) {
						t.Fatalf("%v in a %s does not reach position %d: %v", bad, where, i, row)
					}
				}
			}
		}
	}
}

// Keys with a score of -Inf have no weight, like invisible keys, in any order.
func TestRunScoresOfMinusInf(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 1, KVHeads: 1, Dim: 2, ValueDim: 2, Queries: []int{1}, Keys: []int{40}}
	for _, live := range [][2]int{{0, 0}, {0, 4}, {36, 40}, {17, 18}} {
		c := reftest.New(rng, s, reftest.Constant, reftest.Float32, reftest.Float32)
		c.Q[0], c.Q[1] = 1, 1
		for i := range c.K {
			c.K[i] = math.Inf(-1)
			if i/2 >= live[0] && i/2 < live[1] {
				c.K[i] = 0
			}
		}
		p := place[float32](rng, c, layout{dtype: attn.Float32, page: 16})
		// 1, 2 or 4 equal values: their mean is exact.
		want, wantLSE := float32(c.V[0]), float32(math.Log(float64(live[1]-live[0])))
		if live[0] == live[1] {
			want = 0
		}
		for workers := 1; workers < 6; workers++ {
			if err := p.run(cpu.Default(), lean.Policy{}, workers, 8); err != nil {
				t.Fatal(err)
			}
			out := p.ops.Out[p.seqs[0].Row*p.g.Out.Row]
			if lse := p.ops.LSE[p.seqs[0].Row*p.g.LSE.Row]; out != want || lse != wantLSE {
				t.Fatalf("keys %v live, %d workers: out %v, lse %v, want %v, %v", live, workers, out, lse, want, wantLSE)
			}
		}
	}
}

func TestRunWithoutLSE(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{3, 1}, Keys: []int{1, 50}, Mask: attn.Mask{Causal: true}}
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	p := place[float32](rng, c, layout{dtype: attn.Float32, page: 16})
	p.ops.LSE = nil
	if err := p.run(cpu.Default(), lean.Policy{}, 3, 8); err != nil {
		t.Fatal(err)
	}
	if err := p.check(c.Reference(reftest.Precision{Acc: reftest.Float32})); err != nil {
		t.Fatal(err)
	}
}

// celsius is a named float type.
type celsius float32

func TestRunNamedFloat(t *testing.T) {
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 1, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{1}, Keys: []int{50}}
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	p := place[float32](rng, c, layout{dtype: attn.Float32, page: 16})
	var plan Plan
	if err := plan.Build(p.g, p.seqs); err != nil {
		t.Fatal(err)
	}
	o := Operands[celsius]{
		Q: make([]celsius, len(p.ops.Q)), Out: make([]celsius, len(p.ops.Out)),
		Pages: p.ops.Pages,
	}
	for i, x := range p.ops.Q {
		o.Q[i] = celsius(x)
	}
	if err := Run(cpu.Default(), &plan, &o); err != nil {
		t.Fatal(err)
	}
	if err := Run(cpu.Default(), &plan, &p.ops); err != nil {
		t.Fatal(err)
	}
	at := p.seqs[0].Row * p.g.Out.Row
	for i, x := range o.Out[at : at+8] {
		if float32(x) != p.ops.Out[at+i] {
			t.Fatalf("element %d: %v as celsius, %v as float32", i, x, p.ops.Out[at+i])
		}
	}
}

// One plan and one engine serve concurrent callers.
func TestRunConcurrently(t *testing.T) {
	rng := reftest.Rand(t)
	cputest.SetProcs(t, 4)
	s := reftest.Shape{
		Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Mask: attn.Mask{Causal: true},
		Queries: []int{1, 5}, Keys: []int{300, 60},
	}
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	p := place[float32](rng, c, layout{dtype: attn.Float32, page: 16})
	var e cpu.Engine
	defer e.Close()
	if err := p.run(&e, lean.Policy{}, 5, 16); err != nil {
		t.Fatal(err)
	}
	want := p.bits()
	g := p.g
	g.Workers, g.TileTokens = 5, 16
	var plan Plan
	if err := plan.Build(g, p.seqs); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 6 {
		mine := &problem[float32]{c: c, g: p.g, seqs: p.seqs, ops: p.ops}
		mine.ops.Out, mine.ops.LSE = slices.Clone(p.ops.Out), slices.Clone(p.ops.LSE)
		wg.Go(func() {
			for range 50 {
				mine.forget()
				if err := Run(&e, &plan, &mine.ops); err != nil {
					t.Error(err)
				}
				if !slices.Equal(want, mine.bits()) {
					t.Error("another result beside other runs")
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestRunAfterClose(t *testing.T) {
	defer goleak.VerifyNone(t)
	rng := reftest.Rand(t)
	cputest.SetProcs(t, 3)
	s := reftest.Shape{Heads: 2, KVHeads: 2, Dim: 8, ValueDim: 8, Queries: []int{1}, Keys: []int{200}}
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	p := place[float32](rng, c, layout{dtype: attn.Float32, page: 64})
	want := c.Reference(reftest.Precision{Acc: reftest.Float32})
	var e cpu.Engine
	for range 3 {
		if err := p.run(&e, lean.Policy{}, 3, 16); err != nil {
			t.Fatal(err)
		}
		if err := p.check(want); err != nil {
			t.Fatal(err)
		}
		e.Close()
	}
}

// A kernel that panics causes an error, without an effect on the pool or a workspace.
func TestRunSurvivesPanic(t *testing.T) {
	rng := reftest.Rand(t)
	cputest.SetProcs(t, 3)
	s := reftest.Shape{Heads: 2, KVHeads: 2, Dim: 8, ValueDim: 8, Queries: []int{1}, Keys: []int{300}}
	c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
	p := place[float32](rng, c, layout{dtype: attn.Float32, page: 64})
	want := c.Reference(reftest.Precision{Acc: reftest.Float32})
	var e cpu.Engine
	defer e.Close()

	good := kernels32[cpu.InUse()][attn.Float32]
	defer func() { kernels32[cpu.InUse()][attn.Float32] = good }()
	for i := range 10 {
		var calls counter
		kernels32[cpu.InUse()][attn.Float32] = func(tl *tile) {
			if calls.Add(1) == int32(i+1) {
				panic("kernel")
			}
			good(tl)
		}
		if err := p.run(&e, lean.Policy{}, 3, 16); err == nil {
			t.Fatal("no error")
		}
		kernels32[cpu.InUse()][attn.Float32] = good
		if err := p.run(&e, lean.Policy{}, 3, 16); err != nil {
			t.Fatal(err)
		}
		if err := p.check(want); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBuildAndRunDoNotAllocate(t *testing.T) {
	cputest.SetProcs(t, 3)
	changed := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{3, 1}, Keys: []int{300, 80}, SoftCap: 2, Slopes: []float64{1, 2, 3, 4}}
	for _, s := range []reftest.Shape{
		{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{1, 1}, Keys: []int{300, 80}},
		reftest.RandomBias(reftest.Rand(t), changed, 300),
		{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 16, Queries: []int{100, 1, 9}, Keys: []int{100, 80, 4}, Mask: attn.Mask{Causal: true}},
	} {
		rng := reftest.Rand(t)
		for _, d := range cputest.Floats {
			testAllocations[float32](t, rng, s, d)
			testAllocations[float64](t, rng, s, d)
		}
	}
}

func testAllocations[F cpu.Real](t *testing.T, rng *rand.Rand, s reftest.Shape, d attn.DType) {
	c := reftest.New(rng, s, reftest.Normal, cputest.AccOf[F](), cputest.FormatOf[F](d))
	p := place[F](rng, c, layout{dtype: d, page: 16})
	g := p.g
	g.TileTokens, g.Workers = 32, 5
	var e cpu.Engine
	defer e.Close()
	var plan Plan
	if n := cputest.Allocations(20, func() {
		if err := plan.Build(g, p.seqs); err != nil {
			t.Error(err)
		}
		if err := Run(&e, &plan, &p.ops); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v, queries of %v, %v: %v allocations in 20 steps", s, cputest.AccOf[F](), d, n)
	}
}

// The workspace depends on workers, threads, rows and dims, not on lengths.
func TestWorkspaceDoesNotGrowWithLength(t *testing.T) {
	size := func(keys int) int {
		mem := make([]float32, keys*4)
		g := attn.Problem{
			Heads: 1, KVHeads: 1, Dim: 4, ValueDim: 4, Query: attn.Strides{Row: 4, Head: 4}, Out: attn.Strides{Row: 4, Head: 4},
			Pages: attn.Separate(attn.Float32, 4, 4, attn.PageStrides{Row: 4}, attn.PageStrides{Row: 4}), PageTokens: keys, Scale: 1, Workers: 2,
		}
		var plan Plan
		if err := plan.Build(g, []attn.Sequence{{Queries: 1, Keys: keys, Pages: []int32{0}}}); err != nil {
			t.Fatal(err)
		}
		plan.threads = 2 // short contexts would use one
		kv := cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(&mem[0]), Len: len(mem)}
		var e cpu.Engine
		defer e.Close()
		if err := Run(&e, &plan, &Operands[float32]{Q: make([]float32, 4), Out: make([]float32, 4), Pages: attn.InPlanes(kv, kv)}); err != nil {
			t.Fatal(err)
		}
		ws := cpu.Own[spares[float32]](&e).runs.Get()
		return len(ws.values) + len(ws.threads)*len(ws.threads[0].values)
	}
	if a, b := size(1000), size(300_000); a != b {
		t.Errorf("%d elements for 1000 keys, %d for 300000", a, b)
	}
}
