package attention

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/variant"
)

// backwardCase is a case in a machine's memory, with the gradients of a cost. Rows and keys beyond lengths are NaN.
type backwardCase struct {
	*reftest.Case
	shape attn.Gradient
	kv    attn.DType
	ops   BackwardOperands
	want  *reftest.Gradients
	out   *reftest.Result
	tail  gpu.Memory // behind the workspace
}

// costs says which results a cost depends on.
type costs struct{ out, lse bool }

func (m *machine) newBackward(t testing.TB, rng *rand.Rand, s reftest.Shape, in reftest.Inputs, kv attn.DType, of costs, size float64) *backwardCase {
	t.Helper()
	format := enginetest.Format(kv)
	queries, keys := max(slices.Max(s.Queries), 1)+rng.IntN(2), max(slices.Max(s.Keys), 1)+rng.IntN(2)
	if s.Bias.X != nil {
		keys = s.Bias.Keys
		if s.Bias.Queries != 1 {
			queries = s.Bias.Queries
		}
		for i, x := range s.Bias.X {
			s.Bias.X[i] = format.Round(x)
		}
	}
	for _, x := range s.Tensors {
		for i, f := range x.F64 {
			x.F64[i] = format.Round(f)
		}
	}
	c := reftest.New(rng, s, in, format, format)
	b := &backwardCase{Case: c, kv: kv, shape: attn.Gradient{
		Batch: len(s.Keys), Heads: s.Heads, KVHeads: s.KVHeads, Queries: queries, Keys: keys, QueryLengths: s.Queries, Lengths: s.Keys,
		Dim: s.Dim, ValueDim: s.Dim, Scale: c.Scale, Mask: s.Mask,
		Score: attn.Score{Cap: s.SoftCap, Slopes: attn.NewSlopes(s.Slopes), Sinks: s.Sinks != nil, Dropout: s.Dropout, Variant: s.Variant},
	}}
	b.ops.Seed = s.Seed
	p := reftest.Precision{Acc: reftest.Float32, P: format, Out: format}
	forward := c.Reference(p)
	noisy := func(wanted bool, n int, f reftest.Format) []float64 {
		if !wanted {
			return nil
		}
		x := make([]float64, n)
		for i := range x {
			x[i] = f.Round(size * rng.NormFloat64())
		}
		return x
	}
	dO, dLSE := noisy(of.out, len(forward.O), format), noisy(of.lse, len(forward.LSE), reftest.Float32)
	b.want, b.out = c.Backward(p, forward, dO, dLSE), forward
	put := func(x []float64, d attn.DType) gpu.Memory {
		memory := make([]byte, len(x)*d.Size())
		for i, v := range x {
			enginetest.Put(memory, i, d, v)
		}
		return m.Put(t, memory, d)
	}
	rows := func(x []float64, dim int, d attn.DType) gpu.Memory { // tokens x heads to heads x tokens
		if x == nil {
			return gpu.Memory{}
		}
		other := *c
		other.Q, other.Dim = x, dim
		return put(other.DenseQ(queries), d)
	}
	o := &b.ops
	o.Q, o.K, o.LSE, o.DLSE = rows(c.Q, s.Dim, kv), put(c.DenseK(keys), kv), rows(forward.LSE, 1, attn.Float32), rows(dLSE, 1, attn.Float32)
	o.DQ, o.DK = gpu.Memory{DType: kv, Len: o.Q.Len}, gpu.Memory{DType: kv, Len: o.K.Len}
	if of.out {
		o.V, o.Out, o.DOut = put(c.DenseV(keys), kv), rows(forward.O, s.Dim, kv), rows(dO, s.Dim, kv)
		o.DV = gpu.Memory{DType: kv, Len: o.V.Len}
	}
	if s.Bias.X != nil {
		b.shape.Bias = attn.Bias{Sequences: s.Bias.Sequences, Heads: s.Bias.Heads, Queries: s.Bias.Queries, Keys: keys, Scale: s.Bias.Scale}
		o.Bias = put(c.DenseBias(), kv)
		o.DBias = gpu.Memory{DType: kv, Len: o.Bias.Len}
	}
	if s.Sinks != nil {
		o.Sinks = put(s.Sinks, attn.Float32)
		o.DSinks = gpu.Memory{DType: attn.Float32, Len: o.Sinks.Len}
	}
	b.putTensors(t, m)
	return b
}

// results are the gradients' memory.
func (b *backwardCase) results() []*gpu.Memory {
	all := []*gpu.Memory{&b.ops.DQ, &b.ops.DK}
	if b.ops.DOut.Buffer != nil {
		all = append(all, &b.ops.DV)
	}
	for _, x := range []*gpu.Memory{&b.ops.DBias, &b.ops.DSinks} {
		if x.Len > 0 {
			all = append(all, x)
		}
	}
	for i := range b.ops.DTensors {
		if x := &b.ops.DTensors[i]; x.Len > 0 {
			all = append(all, x)
		}
	}
	return all
}

// run computes the gradients over poisoned results and a poisoned workspace, and returns their bytes.
func (m *machine) runBackward(t testing.TB, b *backwardCase) (all []byte) {
	t.Helper()
	w, err := m.engine.NewBackward(&b.shape, b.kv)
	noError(t, err)
	for _, x := range b.results() {
		m.Poison(t, x)
	}
	const after = 64
	workspace := bytes.Repeat([]byte{0xff}, int(w.Bytes())+after)
	copy(workspace, w.Table())
	if b.tail.Buffer == nil {
		b.tail = m.Put(t, workspace, attn.Float16)
	} else {
		noError(t, b.tail.Buffer.Upload(b.tail.Offset, workspace))
	}
	b.ops.Workspace = gpu.Bytes{Buffer: b.tail.Buffer, Offset: b.tail.Offset}
	noError(t, w.Run(m.Stream, &b.ops))
	m.Settle(t)
	if tail := enginetest.Read(t, &b.tail)[w.Bytes():]; !bytes.Equal(tail, workspace[w.Bytes():]) {
		t.Fatalf("%v: memory behind the workspace has changed", b)
	}
	for _, x := range b.results() {
		all = append(all, enginetest.Read(t, x)...)
	}
	return all
}

func (b *backwardCase) String() string {
	return fmt.Sprintf("%v of %v, capacity %d and %d", b.Shape, b.kv, b.shape.Queries, b.shape.Keys)
}

// check compares the gradients with the reference. Those beyond lengths are 0.
func (b *backwardCase) check(t testing.TB) {
	t.Helper()
	s := &b.shape
	for i, x := range []struct {
		name        string
		want, bound []float64
		heads, rows int
		live        []int
	}{
		{"dq", b.want.DQ, b.want.DQBound, s.Heads, s.Queries, b.Queries},
		{"dk", b.want.DK, b.want.DKBound, s.KVHeads, s.Keys, b.Keys},
		{"dv", b.want.DV, b.want.DVBound, s.KVHeads, s.Keys, b.Keys},
	} {
		if x.name == "dv" && b.ops.DOut.Buffer == nil {
			continue
		}
		memory := enginetest.Read(t, b.results()[i])
		var got []float64
		for seq, live := range x.live {
			for pos := range x.rows {
				for h := range x.heads {
					for c := range s.Dim {
						v := enginetest.Get(memory, ((seq*x.heads+h)*x.rows+pos)*s.Dim+c, b.kv)
						if pos < live {
							got = append(got, v)
						} else if v != 0 {
							t.Fatalf("%v: %s of sequence %d at %d, beyond its length, is %v", b, x.name, seq, pos, v)
						}
					}
				}
			}
		}
		if err := reftest.Compare(got, x.want, x.bound, len(got)/x.heads/s.Dim, x.heads, s.Dim); err != nil {
			t.Errorf("%v: %s: %v", b, x.name, err)
		}
	}
	for _, x := range []struct {
		name        string
		of          *gpu.Memory
		want, bound []float64
	}{{"dbias", &b.ops.DBias, b.want.DBias, b.want.DBiasBound}, {"dsinks", &b.ops.DSinks, b.want.DSinks, b.want.DSinksBound}} {
		if x.of.Len == 0 {
			continue
		}
		memory, got := enginetest.Read(t, x.of), make([]float64, len(x.want))
		for i := range got {
			got[i] = enginetest.Get(memory, i, x.of.DType)
		}
		if err := reftest.Compare(got, x.want, x.bound, 1, 1, len(got)); err != nil {
			t.Errorf("%v: %s of %+v: %v", b, x.name, s.Bias, err)
		}
	}
	b.checkTensors(t)
}

func (b *backwardCase) close(t testing.TB) {
	t.Helper()
	o := &b.ops
	for _, x := range []*gpu.Memory{&o.Q, &o.K, &o.V, &o.Out, &o.LSE, &o.DOut, &o.DLSE, &o.DQ, &o.DK, &o.DV, &o.Bias, &o.DBias, &o.Sinks, &o.DSinks, &b.tail} {
		if x.Buffer != nil {
			noError(t, x.Buffer.Close())
		}
	}
	b.closeTensors(t)
}

// backwardShape draws a shape that takes some work at most.
func backwardShape(rng *rand.Rand, work, longest int) (s reftest.Shape) {
	s = reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 1, 2), Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
	s.Dim = enginetest.Pick(rng, 64, 128, 128, 64, 8, 40, 72, 96)
	s.ValueDim, s.Heads = s.Dim, s.KVHeads*enginetest.Pick(rng, 1, 1, 2, 3)
	s.Scale = enginetest.Pick(rng, 0, 0, 0, .3, -.2, 0.)
	for s.Queries == nil {
		total := 0
		for range enginetest.Pick(rng, 1, 1, 2, 3) {
			s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 17, 31, 32, 33, 63, 64, 65, 129, rng.IntN(longest)))
			s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 15, 16, 17, 64, 127, 128, 129, 257, rng.IntN(longest)))
			total += (s.Queries[len(s.Queries)-1] + 64) * (s.Keys[len(s.Keys)-1] + 128) * s.Heads
		}
		if total > work {
			s.Queries, s.Keys = nil, nil
		}
	}
	return s
}

// backwardOptions are what kernels with scores take.
var backwardOptions = []struct {
	name string
	set  func(rng *rand.Rand, s reftest.Shape) reftest.Shape
}{
	{"window", func(rng *rand.Rand, s reftest.Shape) reftest.Shape {
		s.Window = enginetest.Pick(rng, 1, 2, 16, 33, 1+rng.IntN(150), math.MaxInt)
		return s
	}},
	{"sink tokens", reftest.RandomSinkTokens},
	{"cap", func(rng *rand.Rand, s reftest.Shape) reftest.Shape {
		s.SoftCap = enginetest.Pick(rng, 0.01, 1, 3, 30, 1e6)
		return s
	}},
	{"slopes", func(rng *rand.Rand, s reftest.Shape) reftest.Shape {
		s.Slopes = make([]float64, s.Heads)
		for h := range s.Slopes {
			s.Slopes[h] = enginetest.Pick(rng, 1., 1, 1, -1, 0) * math.Exp2(-8*rng.Float64())
		}
		return s
	}},
	{"bias", func(rng *rand.Rand, s reftest.Shape) reftest.Shape {
		capacity := max(slices.Max(s.Keys), 1) + rng.IntN(2)
		if rng.IntN(2) == 0 { // rows of 16 bytes have a kernel of their own
			capacity = (capacity + 7) / 8 * 8
		}
		s = reftest.RandomBias(rng, s, capacity)
		s.Bias.Scale = enginetest.Pick(rng, 0, 0, .5, 2)
		return s
	}},
	{"sinks", reftest.RandomSinks},
	{"dropout", reftest.RandomDropout},
}

// testBackwardScores runs every option alone and with every other, n of the pairs.
func testBackwardScores(t *testing.T, m *machine, n, work, longest int) {
	rng := reftest.Rand(t)
	var pairs [][2]int
	for i := range backwardOptions {
		for j := range i + 1 {
			pairs = append(pairs, [2]int{i, j})
		}
	}
	rng.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
	for i := range n {
		pair := pairs[i%len(pairs)]
		s := backwardShape(rng, work, longest)
		for _, option := range slices.Compact(pair[:]) {
			s = backwardOptions[option].set(rng, s)
		}
		if i >= len(pairs) && i%4 == 0 { // all but few
			for _, option := range backwardOptions {
				if rng.IntN(4) > 0 {
					s = option.set(rng, s)
				}
			}
		}
		m.testBackwardCase(t, rng, s, gpu.Halves[rng.IntN(2)])
	}
	// A bias of -Inf hides scores that exceed the log-sum-exp by more than the largest float32 number.
	for i := range 4 {
		opposed := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64 << (i / 2), Queries: []int{20}, Keys: []int{24}}
		opposed.ValueDim = opposed.Dim
		opposed = reftest.RandomBias(rng, opposed, 24)
		for j := range opposed.Bias.X {
			if rng.IntN(10) > 0 {
				opposed.Bias.X[j] = math.Inf(-1)
			}
		}
		b := m.newBackward(t, rng, opposed, reftest.Huge, gpu.Halves[i%2], costs{out: true}, 1)
		for slices.Max(b.K) < 1 || slices.Min(b.K) > -1 {
			b.close(t)
			b = m.newBackward(t, rng, opposed, reftest.Huge, gpu.Halves[i%2], costs{out: true}, 1)
		}
		m.runBackward(t, b)
		b.check(t)
		b.close(t)
	}
	// Kept weights of float16 have the factor 1000.
	few := reftest.Shape{Heads: 8, KVHeads: 8, Dim: 64, ValueDim: 64, Queries: []int{300}, Keys: []int{2}, Dropout: .999, Seed: rng.Int64() | 1}
	b := m.newBackward(t, rng, few, reftest.Normal, attn.Float16, costs{out: true}, 1)
	m.runBackward(t, b)
	b.check(t)
	b.close(t)
}

// testBackwardWide runs gradients of float32, with the options that they have.
func testBackwardWide(t *testing.T, m *machine, n, work, longest int) {
	rng := reftest.Rand(t)
	for i := range n {
		s := backwardShape(rng, work, longest)
		for _, option := range backwardOptions {
			if option.name != "dropout" && rng.IntN(3) == 0 && i > 0 {
				s = option.set(rng, s)
			}
		}
		m.testBackwardCase(t, rng, s, attn.Float32)
	}
	s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 72, ValueDim: 72, Queries: []int{longest}, Keys: []int{longest + 20}}
	s.Causal, s.Window, s.SinkTokens = true, longest/3, 2
	m.testBackwardRuns(t, rng, s, attn.Float32, 3)
}

// testBackwardCase runs a shape twice, with random numbers.
func (m *machine) testBackwardCase(t *testing.T, rng *rand.Rand, s reftest.Shape, kv attn.DType) {
	t.Helper()
	in := enginetest.Pick(rng, reftest.Normal, reftest.Normal, reftest.Peaked, reftest.Constant, reftest.Extreme, reftest.Huge)
	of := enginetest.Pick(rng, costs{out: true}, costs{out: true}, costs{lse: true}, costs{out: true, lse: true})
	if s.Variant != nil && s.Variant.Unnormalised {
		of = costs{out: true}
	}
	b := m.newBackward(t, rng, s, in, kv, of, enginetest.Pick(rng, 1, 1e-3, 50))
	first := m.runBackward(t, b)
	if b.check(t); t.Failed() {
		t.Fatalf("%v inputs, %+v", in, of)
	}
	if of.out && kv != attn.Float32 && s.Variant == nil {
		m.testDropout(t, b)
	}
	if again := m.runBackward(t, b); !bytes.Equal(again, first) {
		t.Fatalf("%v: other bits in the second run", b)
	}
	b.close(t)
}

// testDropout runs the attention itself, with its dropout if there is one.
func (m *machine) testDropout(t *testing.T, b *backwardCase) {
	t.Helper()
	w, err := m.engine.NewBackward(&b.shape, b.kv)
	noError(t, err)
	s, of := &b.shape, &b.ops
	o := DropoutOperands{Q: of.Q, K: of.K, V: of.V, Bias: of.Bias, Sinks: of.Sinks, Seed: of.Seed}
	o.Out, o.LSE = gpu.Memory{DType: b.kv, Len: of.Q.Len}, gpu.Memory{DType: attn.Float32, Len: of.LSE.Len}
	m.Poison(t, &o.Out)
	m.Poison(t, &o.LSE)
	table := m.Put(t, w.Table(), attn.Float16)
	o.Workspace = gpu.Bytes{Buffer: table.Buffer, Offset: table.Offset}
	noError(t, w.Forward(m.Stream, &o))
	m.Settle(t)
	out, lse := enginetest.Read(t, &o.Out), enginetest.Read(t, &o.LSE)
	var gotO, gotLSE []float64
	for seq, live := range b.Queries {
		for pos := range s.Queries {
			for h := range s.Heads {
				at := (seq*s.Heads+h)*s.Queries + pos
				logs := enginetest.Get(lse, at, attn.Float32)
				if pos < live {
					gotLSE = append(gotLSE, logs)
				} else if want := b.Sink(h); logs != want {
					t.Fatalf("%v: lse of sequence %d at %d, beyond its length, is %v", b, seq, pos, logs)
				}
				for c := range s.Dim {
					v := enginetest.Get(out, at*s.Dim+c, b.kv)
					if pos < live {
						gotO = append(gotO, v)
					} else if v != 0 {
						t.Fatalf("%v: out of sequence %d at %d, beyond its length, is %v", b, seq, pos, v)
					}
				}
			}
		}
	}
	if err := reftest.Compare(gotO, b.out.O, b.out.OBound, len(gotLSE)/s.Heads, s.Heads, s.Dim); err != nil {
		t.Fatalf("%v: out: %v", b, err)
	}
	if err := reftest.Compare(gotLSE, b.out.LSE, b.out.LSEBound, len(gotLSE)/s.Heads, s.Heads, 1); err != nil {
		t.Fatalf("%v: lse: %v", b, err)
	}
	for _, x := range []*gpu.Memory{&o.Out, &o.LSE, &table} {
		noError(t, x.Buffer.Close())
	}
}

// testBackward runs random problems.
func testBackward(t *testing.T, m *machine, n, work, longest int) {
	rng := reftest.Rand(t)
	for i := range n {
		kv := gpu.Halves[i%2]
		s := backwardShape(rng, work, longest)
		m.testBackwardCase(t, rng, s, kv)
	}
}

// testBackwardBits runs one problem with many key blocks many times.
func testBackwardBits(t *testing.T, m *machine, runs, tokens int) {
	rng := reftest.Rand(t)
	for i, causal := range []bool{true, false} {
		s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64 << i, ValueDim: 64 << i, Queries: []int{tokens, tokens / 3}, Keys: []int{tokens, tokens}, Mask: attn.Mask{Causal: causal}}
		m.testBackwardRuns(t, rng, s, gpu.Halves[i], runs)
	}
}

// testBackwardScoresBits is testBackwardBits with all options, a window that hides key blocks, and sink tokens in front of these.
func testBackwardScoresBits(t *testing.T, m *machine, runs, tokens int) {
	rng := reftest.Rand(t)
	for i, causal := range []bool{true, false} {
		s := reftest.Shape{Heads: 2, KVHeads: 1, Dim: 64 << i, ValueDim: 64 << i, Queries: []int{tokens, tokens / 3}, Keys: []int{tokens, tokens - 1}}
		s.Causal, s.Window, s.SinkTokens, s.SoftCap, s.Slopes, s.Sinks = causal, tokens/5, 3, 2, []float64{.01, -.002}, []float64{1, -2}
		s.Bias = reftest.Bias{Sequences: 1, Heads: 1 + i, Queries: 1, Keys: tokens, X: make([]float64, (1+i)*tokens)}
		for j := range s.Bias.X {
			s.Bias.X[j] = rng.NormFloat64()
		}
		s.Dropout, s.Seed = .2, rng.Int64()|1
		m.testBackwardRuns(t, rng, s, gpu.Halves[1-i], runs)
	}
}

// testBackwardRuns runs a shape many times.
func (m *machine) testBackwardRuns(t *testing.T, rng *rand.Rand, s reftest.Shape, kv attn.DType, runs int) {
	t.Helper()
	b := m.newBackward(t, rng, s, reftest.Normal, kv, costs{out: true}, 1)
	first := m.runBackward(t, b)
	b.check(t)
	if kv != attn.Float32 && s.Variant == nil {
		m.testDropout(t, b)
	}
	for run := range runs - 1 {
		if again := m.runBackward(t, b); !bytes.Equal(again, first) {
			t.Fatalf("%v: other bits in run %d", b, run+1)
		}
	}
	b.close(t)
}

// A feature without kernels is refused by name, before anything is queued.
func TestCanBackward(t *testing.T) {
	good := attn.Gradient{Batch: 2, Heads: 4, KVHeads: 2, Queries: 9, Keys: 20, Dim: 72, ValueDim: 72, Scale: 1, Mask: attn.Mask{Causal: true}, Workers: 3}
	noError(t, CanBackward("x", &good, attn.BFloat16))
	for text, change := range map[string]func(g *attn.Gradient){
		"a tree of new tokens":                 func(g *attn.Gradient) { g.Tree = true },
		"a dropout of 0.5 beside a variant":    func(g *attn.Gradient) { g.Variant, g.Dropout = &variant.Program{}, .5 },
		"3 sink tokens beside a variant":       func(g *attn.Gradient) { g.Variant, g.Window, g.SinkTokens = &variant.Program{}, 5, 3 },
		"at most 2^37":                         func(g *attn.Gradient) { g.Variant, g.Queries, g.Keys = &variant.Program{}, 1<<18, 1<<17 },
		"at most 2^31":                         func(g *attn.Gradient) { g.Variant, g.DTensors = &variant.Program{}, [][]int{{1 << 20, 1 << 11}} },
		"a soft cap of 1e-40":                  func(g *attn.Gradient) { g.Cap = 1e-40 },
		"values of 64 elements and keys of 72": func(g *attn.Gradient) { g.ValueDim = 64 },
		"head dim 136":                         func(g *attn.Gradient) { g.Dim, g.ValueDim = 136, 136 },
		"head dim 60":                          func(g *attn.Gradient) { g.Dim, g.ValueDim = 60, 60 },
		"at most 2^30 rows":                    func(g *attn.Gradient) { g.Keys = math.MaxInt32 },
	} {
		g := good
		change(&g)
		wantError(t, text, CanBackward("x", &g, attn.Float16), attn.ErrUnsupported, text)
	}
	noError(t, CanBackward("x", &good, attn.Float32))
	wantError(t, "float64", CanBackward("x", &good, attn.Float64), attn.ErrDType, "float64")
	varied := good
	varied.Variant = &variant.Program{}
	noError(t, CanBackward("x", &varied, attn.Float16))
	wantError(t, "a variant of float32", CanBackward("x", &varied, attn.Float32), attn.ErrUnsupported, "gradients of float32 on GPUs: a variant")
	wantError(t, "attention with dropout", CanForward("x", backwardProblem(&varied, attn.Float16)), attn.ErrUnsupported, "a variant")
	dropped := good
	dropped.Dropout = .5
	wantError(t, "dropout of float32", CanBackward("x", &dropped, attn.Float32), attn.ErrUnsupported, "gradients of float32 on GPUs: a dropout of 0.5")
	good.KVHeads = 3
	wantError(t, "heads", CanBackward("x", &good, attn.Float16), attn.ErrShape, "3 KV heads")
}

func TestGPUBackward(t *testing.T) {
	testBackward(t, realGPU(t), enginetest.OrShort(400, 20), enginetest.OrShort(6e6, 1e6), enginetest.OrShort(1500, 300))
}

func TestGPUBackwardScores(t *testing.T) {
	testBackwardScores(t, realGPU(t), enginetest.OrShort(600, 40), enginetest.OrShort(6e6, 1e6), enginetest.OrShort(1500, 300))
}

func TestGPUBackwardWide(t *testing.T) {
	testBackwardWide(t, realGPU(t), enginetest.OrShort(400, 20), enginetest.OrShort(6e6, 1e6), enginetest.OrShort(1500, 300))
}

func TestGPUBackwardBits(t *testing.T) {
	testBackwardScoresBits(t, realGPU(t), enginetest.OrShort(100, 3), enginetest.OrShort(2000, 700))
	testBackwardBits(t, realGPU(t), enginetest.OrShort(100, 3), enginetest.OrShort(2000, 300))
}
