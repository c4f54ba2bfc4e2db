package leanattention_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// text is the operands of a sequence's tokens in one layer, and run a way in which they come.
type text struct{ q, k, v []float32 }

type textRun struct {
	pages  int   // tokens of one
	chunks []int // tokens of each step, again and again
	others int   // sequences beside it
	fork   int   // from a sequence that has so many of the tokens
	record bool

	storage tensor.Dtype // zero: Float16
}

func (r textRun) String() string {
	return fmt.Sprintf("pages of %d, chunks of %v, beside %d others, forked at %d, recorded %v", r.pages, r.chunks, r.others, r.fork, r.record)
}

const textHeads, textKVHeads, textDim = 8, 2, 64

// run returns the bits of the output and the log-sum-exp of each token.
func (x *text) run(t *testing.T, rng *rand.Rand, gpu *device.GPU, r textRun, opts ...la.Option) [][]uint64 {
	t.Helper()
	const wide, narrow = textHeads * textDim, textKVHeads * textDim
	n := len(x.q) / wide
	rows := slices.Max(r.chunks) + r.others
	if r.storage.Type == nil {
		r.storage = la.Float16
	}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: textKVHeads, HeadDim: textDim, PageSize: r.pages, DType: r.storage,
		Pages: (3*n+r.others*(n/2+8))/r.pages + 2*r.others + 8, Device: gpu})
	step, err := cache.NewStep(rows)
	noError := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%v: %v", r, err)
		}
	}
	noError(err)
	g := G.NewGraph()
	values := make([]*tensor.Dense, 3)
	there := make([]*device.Tensor, 3)
	nodes := make([]*G.Node, 3)
	for i, width := range []int{wide, narrow, narrow} {
		values[i] = tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(rows, width))
		nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]))
		noError(G.Let(nodes[i], values[i]))
		if gpu != nil {
			there[i], err = gpu.Upload(values[i])
			noError(err)
			defer there[i].Free()
			noError(G.Let(nodes[i], there[i]))
		}
	}
	out, err := la.CachedAttention(nodes[0], nodes[1], nodes[2], step.Layer(0), append(opts, la.WithCausal())...)
	noError(err)
	lse := graphtest.LogSumExp(t, out)
	var outValue, lseValue G.Value
	G.Read(out, &outValue)
	G.Read(lse, &lseValue)
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	var recording *device.Recording
	steps, records := 0, 0
	do := func(appends []la.Append, fill func(to [3][]float32)) {
		t.Helper()
		fill([3][]float32{values[0].Data().([]float32), values[1].Data().([]float32), values[2].Data().([]float32)})
		for i, d := range there {
			if d != nil {
				noError(d.CopyFrom(values[i]))
			}
		}
		noError(step.Set(appends))
		run := func() error { defer vm.Reset(); return vm.RunAll() }
		if steps++; recording != nil {
			err := recording.Replay()
			if !errors.Is(err, la.ErrState) {
				noError(err)
				noError(step.Commit())
				return
			}
			noError(recording.Close()) // the step looks different
			recording, records = nil, records+1
		}
		if r.record && steps > 1 {
			recording, err = gpu.Record(run)
			noError(err)
			noError(recording.Replay())
		} else {
			noError(run())
		}
		noError(step.Commit())
	}
	defer func() {
		if recording != nil {
			recording.Close()
		}
	}()
	sequence := func() *la.Sequence {
		s, err := cache.NewSequence()
		noError(err)
		return s
	}
	var others []*la.Sequence
	for range r.others {
		others = append(others, sequence())
	}
	noise := func(x []float32) {
		for i := range x {
			x[i] = rng.Float32() - 0.5
		}
	}
	bits := make([][]uint64, n)
	seq := sequence()
	for i, from := 0, 0; from < n; i++ {
		tokens := min(r.chunks[i%len(r.chunks)], n-from)
		if from >= r.fork && r.fork > 0 {
			r.fork = 0
			child, err := seq.Fork()
			noError(err)
			noError(seq.Release())
			seq = child
		}
		var appends []la.Append
		at := 0
		for _, s := range others {
			if s.Len() < n/2 || rng.IntN(2) == 0 {
				appends = append(appends, la.Append{Seq: s, Tokens: 1})
				at++
			}
		}
		appends = append(appends, la.Append{Seq: seq, Tokens: tokens})
		do(appends, func(to [3][]float32) {
			for i, width := range []int{wide, narrow, narrow} {
				noise(to[i])
				copy(to[i][at*width:], [][]float32{x.q, x.k, x.v}[i][from*width:(from+tokens)*width])
			}
		})
		o, l := outValue, lseValue
		if gpu != nil {
			o, l = graphtest.Download(t, o), graphtest.Download(t, l)
		}
		outs, lses := graphtest.Bits(t, o), graphtest.Bits(t, l)
		for j := range tokens {
			bits[from+j] = slices.Concat(outs[(at+j)*wide:(at+j+1)*wide], lses[(at+j)*textHeads:(at+j+1)*textHeads])
		}
		from += tokens
	}
	if r.record && records > steps/4 {
		t.Errorf("%v: of %d steps %d were not replayed", r, steps, records)
	}
	return bits
}

// The bits of a token are the same in whatever way its sequence comes: as a whole, in chunks, with others, from a fork, in pages
// of any size.
func testTexts(t *testing.T, gpu *device.GPU, n int, ways []textRun) {
	rng := reftest.Rand(t)
	x := new(text)
	for range n * textHeads * textDim {
		x.q = append(x.q, 4*(rng.Float32()-0.5))
	}
	for range n * textKVHeads * textDim {
		x.k, x.v = append(x.k, 4*(rng.Float32()-0.5)), append(x.v, rng.Float32()-0.5)
	}
	for name, opts := range map[string][]la.Option{
		"causal":         {},
		"window":         {la.WithWindow(n / 3)},
		"cap and slopes": {la.WithSoftCap(3), la.WithALiBi([]float64{.1, .05, .02, .01, .005, .002, .001, 0})},
	} {
		for _, invariant := range []bool{true, false} {
			opts := append(slices.Clip(opts), la.WithTileTokens(64))
			if invariant {
				opts = append(opts, la.WithBatchInvariance())
			}
			want := x.run(t, rng, gpu, ways[0], opts...)
			differ := 0
			for _, way := range ways[1:] {
				for i, bits := range x.run(t, rng, gpu, way, opts...) {
					if !slices.Equal(bits, want[i]) {
						if differ++; invariant {
							t.Fatalf("%s: token %d has other bits: %v, and %v", name, i, way, ways[0])
						}
					}
				}
			}
			if !invariant && differ == 0 {
				t.Errorf("%s: bits are the same without batch invariance, too", name)
			}
		}
	}
}

func TestBatchInvariance(t *testing.T) {
	n := reftest.Cases(t, 150, 1100)
	testTexts(t, nil, n, []textRun{
		{pages: 16, chunks: []int{n}},
		{pages: 16, chunks: []int{1}},
		{pages: 5, chunks: []int{7}, others: 3},
		{pages: 64, chunks: []int{64, 1, 2, 3, 4}, others: 63},
		{pages: 1, chunks: []int{n/2 + 1}, fork: n / 2},
	})
}

// Where recordings differ in nothing but lengths they are replayed.
func TestGPUBatchInvariance(t *testing.T) {
	gpu := devicetest.Open(t)
	n := reftest.Cases(t, 16, 200)
	testTexts(t, gpu, n, []textRun{
		{pages: 16, chunks: []int{n}},
		{pages: 16, chunks: []int{1}, record: true},
		{pages: 8, chunks: []int{7, 1, 2, 3, 4}, others: 3, fork: n / 2},
	})
}

// What can't be invariant says so.
func TestBatchInvarianceRefused(t *testing.T) {
	rng := reftest.Rand(t)
	p := graphtest.NewProblem(rng, reftest.Shape{Heads: 2, KVHeads: 1, Dim: 8, ValueDim: 8, Queries: []int{1}, Keys: []int{4}}, graphtest.Spec{QueryType: tensor.Float32, KVType: tensor.Float32})
	attend := func(opts ...la.Option) error { return la.Attend(p.Args(), append(opts, la.WithBatchInvariance())...) }
	wantError(t, attend(la.WithSchedule(la.Unfused)), la.ErrUnsupported, "Attend", "batch invariance and unfused attention")
	wantError(t, attend(la.WithTileTokens(5000)), la.ErrUnsupported, "Attend", "batch invariance and LeanTiles of 5000 tokens: 4096 are the most")
	wantError(t, attend(la.WithDropout(0.5, nil)), la.ErrUnsupported, "Attend", "batch invariance and a dropout of 0.5")

	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 8, Pages: 4, Window: 20})
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(1, 8), G.WithName("x"))
	_, err = la.CachedAttention(x, x, x, step.Layer(0), la.WithWindow(20), la.WithBatchInvariance())
	wantError(t, err, la.ErrUnsupported, "CachedAttention", "WithBatchInvariance, on a cache that gives pages back (Window 20)")

	built := p.Attention(t, la.WithBatchInvariance())
	_, err = G.Grad(G.Must(G.Sum(built.Out)), built.Q)
	if err == nil || !strings.Contains(err.Error(), "gradient with batch invariance") {
		t.Errorf("a gradient: %v", err)
	}
}
