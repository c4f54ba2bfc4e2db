package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
	"pgregory.net/rapid"
)

// A step tells of Reset where a machine has not been reset.
func TestCommitWithoutReset(t *testing.T) {
	rng := reftest.Rand(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 4, Pages: 2})
	d := graphtest.NewDecoder(t, cache, 2, 1, tensor.Float32, true)
	s := graphtest.NewStored(t, cache)
	var u *graphtest.StepCase
	for turn := range 2 {
		u = d.Set(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 1})
		if err := d.VM.RunAll(); err != nil {
			t.Fatal(err)
		}
		if turn == 0 {
			d.Commit(t, u)
		}
	}
	wantError(t, d.Step.Commit(), la.ErrState, "Commit", "no layer has run since Set", "machine.Reset")
	d.VM.Reset()
	d.Run(t, u)
	d.Commit(t, u)
}

// Set takes a time that grows with the appends, and in steady state no memory.
func TestSetOfManySequences(t *testing.T) {
	const n = 40_000
	c := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: n + 1})
	step, err := c.NewStep(n)
	if err != nil {
		t.Fatal(err)
	}
	appends := make([]la.Append, n)
	for i := range appends {
		appends[i] = la.Append{Seq: graphtest.NewStored(t, c).Seq, Tokens: 1}
	}
	again := func() {
		if err := errors.Join(step.Set(appends), step.Rollback()); err != nil {
			t.Fatal(err)
		}
	}
	best := time.Hour
	for range 5 {
		began := time.Now()
		if err := step.Set(appends); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(began))
		if err := step.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
	if best > 300*time.Millisecond { // it took 630 when it compared each with each, and takes 5
		t.Errorf("%v for %d appends", best, n)
	}
	if !reftest.RaceEnabled {
		if allocs := testing.AllocsPerRun(5, again); allocs > 0 {
			t.Errorf("%v allocations for a Set like the one before", allocs)
		}
	}
	for _, pair := range [][2]int{{0, n - 1}, {7, 8}, {123, 30_000}} {
		twice := slices.Clone(appends)
		twice[pair[1]] = twice[pair[0]]
		if err := step.Set(twice); !errors.Is(err, la.ErrState) || !strings.Contains(err.Error(), fmt.Sprintf("appends %d and %d have the same sequence", pair[0], pair[1])) {
			t.Errorf("%v: %v", pair, err)
		}
		again() // it leaves no mark
	}
}

// Chunks: every token of every append is in one step, in order; no step has more
// rows than it may, and no row stays empty that somebody could use; single tokens
// come before the parts of prompts; and Set takes each step as it is.
func TestChunks(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, PageSize: 16, Pages: 64})
	rapid.Check(t, func(rt *rapid.T) {
		rows := rapid.IntRange(1, 12).Draw(rt, "rows")
		step, err := cache.NewStep(rows)
		if err != nil {
			rt.Fatal(err)
		}
		var todo []la.Append
		for range rapid.IntRange(0, 8).Draw(rt, "appends") {
			seq, err := cache.NewSequence()
			if err != nil {
				rt.Fatal(err)
			}
			defer seq.Release()
			n := rapid.OneOf(rapid.Just(1), rapid.IntRange(0, 40)).Draw(rt, "tokens")
			todo = append(todo, la.Append{Seq: seq, Tokens: n})
		}
		done := make([]int, len(todo))
		for appends, of := range la.Chunks(rows, todo) {
			if len(appends) != len(of) {
				rt.Fatalf("%d appends and %d indices", len(appends), len(of))
			}
			taken, left, single, cut := 0, 0, 0, 0
			for i, n := range done {
				left += todo[i].Tokens - n
				if todo[i].Tokens-n == 1 {
					single++
				}
			}
			for i, a := range appends {
				if i > 0 && of[i] <= of[i-1] {
					rt.Fatalf("out of order: %v", of)
				}
				all, from := todo[of[i]], done[of[i]]
				if a.Seq != all.Seq || a.Tokens < 1 || from+a.Tokens > all.Tokens {
					rt.Fatalf("append %v of a step is of %v, %d tokens of which are done", a, all, from)
				}
				if all.Tokens-from == 1 {
					single--
				} else {
					cut++
				}
				done[of[i]] += a.Tokens
				taken += a.Tokens
			}
			if taken != min(rows, left) || single > 0 && cut > 0 {
				rt.Fatalf("%d of %d rows taken, %d tokens left, %d single ones wait for %d", taken, rows, left, single, cut)
			}
			if err := step.Set(appends); err != nil {
				rt.Fatal(err)
			}
			if err := step.Rollback(); err != nil {
				rt.Fatal(err)
			}
		}
		for i, n := range done {
			if n != todo[i].Tokens {
				rt.Fatalf("%d of %d tokens of append %d", n, todo[i].Tokens, i)
			}
		}
	})
}

// tokensOf is the number of tokens of each append.
func tokensOf(appends []la.Append) (all []int) {
	for _, a := range appends {
		all = append(all, a.Tokens)
	}
	return all
}

// Chunks neither writes to the list that it is given nor follows what happens to it;
// what it yields may be kept; and a loop may end early, or begin again.
func TestChunksKeepsLists(t *testing.T) {
	todo := []la.Append{{Tokens: 5}, {Tokens: 1}}
	cuts := la.Chunks(4, todo)
	var lists, tokens [][]int
	for appends, of := range cuts {
		lists = append(lists, of)
		tokens = append(tokens, tokensOf(appends))
		appends[0].Tokens = 9
		todo[0].Tokens = 100
		if len(lists) == 1 {
			todo[0].Tokens = 7
		}
	}
	if want := [][]int{{0, 1}, {0}}; !slices.EqualFunc(lists, want, slices.Equal) {
		t.Errorf("%v, want %v", lists, want)
	}
	if want := [][]int{{3, 1}, {2}}; !slices.EqualFunc(tokens, want, slices.Equal) {
		t.Errorf("%v tokens, want %v", tokens, want)
	}
	todo[0].Tokens = 5
	for range 2 {
		for _, of := range cuts {
			if !slices.Equal(of, []int{0, 1}) {
				t.Errorf("%v again", of)
			}
			break
		}
	}
}

// Forks that share pages are attended to at once on a GPU, in recordings, too, whatever the following steps share.
func TestGPUForks(t *testing.T) {
	la.UseEagerEngine(t)
	testRecordedForks(t, devicetest.Open(t), 2)
}

// Sharded by heads, by context, and by both.
func TestGPUsForks(t *testing.T) {
	la.UseEagerEngine(t)
	t.Run("heads", func(t *testing.T) { testRecordedForks(t, devicetest.OpenSome(t, 2), 2) })
	t.Run("context", func(t *testing.T) { testRecordedForks(t, devicetest.OpenSome(t, 2), 1) })
	if reftest.Every(t) {
		t.Run("both", func(t *testing.T) { testRecordedForks(t, devicetest.OpenSome(t, 4), 2) })
	}
}

func testRecordedForks(t *testing.T, gpu *device.GPU, kvHeads int) {
	rng := reftest.Rand(t)
	const heads, dim, rows, prompt = 4, 64, 6, 70
	opts := []la.Option{la.WithCausal()}
	if len(gpu.Members()) <= kvHeads { // those by context know none of these
		switch rng.IntN(4) {
		case 0:
			opts = append(opts, la.WithRotary(rope.Config{}))
		case 1:
			opts = append(opts, la.WithWindow(prompt-10*rng.IntN(2))) // hides keys of more and more sequences
			if rng.IntN(2) == 0 {
				opts = append(opts, la.WithSinkTokens(3))
			}
		case 2:
			opts = append(opts, la.WithALiBi([]float64{0.5, 0.25, 0.01, -0.1}))
		}
	}
	here, there := newForkedDecoder(t, nil, heads, kvHeads, dim, rows, opts), newForkedDecoder(t, gpu, heads, kvHeads, dim, rows, opts)
	decoders := []*forkedDecoder{here, there}
	random := func() (in [3][]float64) {
		c := reftest.New(rng, reftest.Shape{Heads: heads, KVHeads: kvHeads, Dim: dim, ValueDim: dim, Queries: []int{rows}, Keys: []int{rows}}, reftest.Normal, reftest.Float32, reftest.Float16)
		return [3][]float64{c.Q, c.K, c.V}
	}
	// A step of some sequences, each of which gets tokens.
	turn := func(tokens map[int]int, how func(d *forkedDecoder) error) {
		t.Helper()
		in := random()
		for _, d := range decoders {
			d.set(t, tokens, in)
			do := how
			if d == here {
				do = (*forkedDecoder).run
			}
			if err := do(d); err != nil {
				t.Fatal(err)
			}
			if err := d.step.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		if err := reftest.Compare(there.result(t), here.result(t), slices.Repeat([]float64{2e-3}, rows*heads*dim), rows, heads*dim); err != nil {
			t.Fatalf("%v: %v", tokens, err)
		}
	}
	fork := func(i, of int) {
		t.Helper()
		for _, d := range decoders {
			d.fork(t, i, of)
		}
	}
	for done := 0; done < prompt; done += rows {
		turn(map[int]int{0: min(rows, prompt-done)}, (*forkedDecoder).run)
	}
	for i := 1; i < rows; i++ {
		fork(i, 0)
	}
	all := func() map[int]int {
		m := map[int]int{}
		for i := range rows {
			m[i] = 1
		}
		return m
	}
	turn(all(), (*forkedDecoder).run)
	if kernels := la.KernelsOf(there.step); !slices.Contains(kernels, "prefix_merge") {
		t.Errorf("forks are attended to by %v", kernels)
	}
	var recording *device.Recording
	turn(all(), func(d *forkedDecoder) (err error) {
		if recording, err = gpu.Record(d.run); err == nil {
			err = recording.Replay()
		}
		return err
	})
	replay := func(*forkedDecoder) error { return recording.Replay() }
	for i := range 24 {
		tokens := all()
		for j := range rows {
			if rng.IntN(4) == 0 {
				delete(tokens, j)
			}
		}
		if len(tokens) == 0 || i == 7 {
			tokens = map[int]int{2: 1} // nobody shares anything
		}
		turn(tokens, replay)
		fork(1+rng.IntN(rows-1), rng.IntN(rows))
	}
	if err := recording.Close(); err != nil {
		t.Fatal(err)
	}
}

// forkedDecoder is a layer on a cache, on the host or on a GPU.
type forkedDecoder struct {
	cache  *la.Cache
	step   *la.Step
	gpu    *device.GPU
	seqs   []*la.Sequence
	in     [3]*device.Tensor
	nodes  [3]*G.Node
	widths [3]int
	out    G.Value
	vm     G.VM
}

func newForkedDecoder(t *testing.T, gpu *device.GPU, heads, kvHeads, dim, rows int, opts []la.Option) *forkedDecoder {
	d := &forkedDecoder{gpu: gpu, widths: [3]int{heads * dim, kvHeads * dim, kvHeads * dim}, seqs: make([]*la.Sequence, rows)}
	d.cache = graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: kvHeads, HeadDim: dim, DType: la.Float16, PageSize: 16, Pages: 80, Device: gpu})
	var err error
	if d.step, err = d.cache.NewStep(rows); err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	for i, width := range d.widths {
		var v G.Value = graphtest.TensorOf(tensor.Float32, make([]float64, rows*width), rows, width)
		if gpu != nil {
			d.in[i] = graphtest.Upload(t, gpu, v.(*tensor.Dense))
			v = d.in[i]
		}
		d.nodes[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]), G.WithValue(v))
	}
	node, err := la.CachedAttention(d.nodes[0], d.nodes[1], d.nodes[2], d.step.Layer(0), opts...)
	if err != nil {
		t.Fatal(err)
	}
	G.Read(node, &d.out)
	d.vm = graphtest.NewTapeMachine(g)
	t.Cleanup(func() { d.vm.Close() })
	if d.seqs[0], err = d.cache.NewSequence(); err != nil {
		t.Fatal(err)
	}
	return d
}

// set gives sequences tokens, in their order.
func (d *forkedDecoder) set(t *testing.T, tokens map[int]int, in [3][]float64) {
	t.Helper()
	var appends []la.Append
	for i, s := range d.seqs {
		if n := tokens[i]; n > 0 {
			appends = append(appends, la.Append{Seq: s, Tokens: n})
		}
	}
	if err := d.step.Set(appends); err != nil {
		t.Fatal(err)
	}
	for i, x := range in {
		v := graphtest.TensorOf(tensor.Float32, x, len(x)/d.widths[i], d.widths[i])
		var err error
		if d.gpu != nil {
			err = d.in[i].CopyFrom(v)
		} else {
			err = G.Let(d.nodes[i], v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (d *forkedDecoder) run() error {
	defer d.vm.Reset()
	return d.vm.RunAll()
}

// fork makes sequence i a fork of another one, or of itself as it was.
func (d *forkedDecoder) fork(t *testing.T, i, of int) {
	t.Helper()
	s, err := d.seqs[of].Fork()
	if err == nil && d.seqs[i] != nil {
		err = d.seqs[i].Release()
	}
	if err != nil {
		t.Fatal(err)
	}
	d.seqs[i] = s
}

func (d *forkedDecoder) result(t *testing.T) []float64 {
	t.Helper()
	if d.gpu != nil {
		return graphtest.Floats(t, graphtest.Download(t, d.out))
	}
	return graphtest.Floats(t, d.out)
}

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

// Positions that a step is given are its own, those of sequences without stay, and what is none is refused with nothing
// changed.
func TestStepPositions(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, Pages: 9})
	step, err := cache.NewStep(8)
	if err != nil {
		t.Fatal(err)
	}
	a, b := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
	before := cache.Stats()
	tooFar := math.MaxInt32
	tooFar++ // negative where an int has 32 bits
	for _, c := range []struct {
		positions []int
		want      error
		text      string
	}{
		{[]int{1, 2}, la.ErrShape, "append 1 has 2 positions for 3 tokens"},
		{[]int{}, la.ErrShape, "append 1 has 0 positions for 3 tokens"},
		{[]int{1, 2, 3, 4}, la.ErrShape, "append 1 has 4 positions for 3 tokens"},
		{[]int{1, -1, 3}, la.ErrLength, "append 1: token 1 is at position -1"},
		{[]int{1, 2, tooFar}, la.ErrLength, fmt.Sprintf("append 1: token 2 is at position %d", tooFar)},
	} {
		wantError(t, step.Set([]la.Append{{Seq: a.Seq, Tokens: 2}, {Seq: b.Seq, Tokens: 3, Positions: c.positions}}), c.want, "Set", c.text)
		if after := cache.Stats(); after != before || step.Positions() != nil {
			t.Errorf("%v: %v, before %v; positions %v", c.positions, after, before, step.Positions())
		}
	}
	given := []int{7, math.MaxInt32, 0}
	appends := []la.Append{{Seq: a.Seq, Tokens: 2}, {Seq: b.Seq, Tokens: 3, Positions: given, Parents: []int{-1, 0, 0}}}
	if err := step.Set(appends); err != nil {
		t.Fatal(err)
	}
	given[0] = 9 // the step keeps what it was given
	if got := step.Positions(); !slices.Equal(got, []int{0, 1, 7, math.MaxInt32, 0, 0, 0, 0}) {
		t.Errorf("positions %v", got)
	}
	if err := step.Rollback(); err != nil || step.Positions() != nil {
		t.Errorf("%v, positions %v", err, step.Positions())
	}
	appends[1].Positions = nil
	if err := step.Set(appends); err != nil {
		t.Fatal(err)
	}
	if got := step.Positions(); !slices.Equal(got, []int{0, 1, 0, 1, 1, 0, 0, 0}) {
		t.Errorf("positions %v", got)
	}
	if err := step.Rollback(); err != nil {
		t.Error(err)
	}

	// Chunks cuts them with their tokens, and leaves to Set what is none.
	var got []int
	for chunk := range la.Chunks(2, []la.Append{{Tokens: 5, Positions: []int{5, 4, 3, 2, 1}}}) {
		if chunk[0].Tokens != len(chunk[0].Positions) {
			t.Errorf("%v", chunk)
		}
		got = append(got, chunk[0].Positions...)
	}
	if !slices.Equal(got, []int{5, 4, 3, 2, 1}) {
		t.Errorf("%v", got)
	}
	n := 0
	for chunk := range la.Chunks(2, []la.Append{{Tokens: 5, Positions: []int{5, 4}}}) {
		if n++; len(chunk[0].Positions) != 2 || chunk[0].Tokens != 5 {
			t.Errorf("%v", chunk)
		}
	}
	if n != 1 {
		t.Errorf("%d steps", n)
	}
}
