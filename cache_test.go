package leanattention

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/graph"

	"gorgonia.org/leanattention/internal/memory"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/script"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

var smallCache = CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 4, ValueDim: 3, PageSize: 4, Pages: 12}

// NewCache refuses what no computer has, and what this one has not, instead of letting
// make panic or the system end the process.
func TestNewCacheBeyondMemory(t *testing.T) {
	for _, c := range []struct {
		config CacheConfig
		want   error
	}{
		{CacheConfig{Layers: 1, KVHeads: 1 << 20, HeadDim: 1 << 20, PageSize: 1 << 9, Pages: 1}, ErrOutOfMemory},
		{CacheConfig{Layers: 1 << 30, KVHeads: 1 << 30, HeadDim: 1 << 30, PageSize: 1 << 30, Pages: 1 << 30}, ErrShape},
		{CacheConfig{Layers: math.MaxInt32, KVHeads: 1, HeadDim: math.MaxInt32, PageSize: 1, Pages: 1}, ErrShape},
		{CacheConfig{Layers: 12, KVHeads: 12, HeadDim: 64, PageSize: 64, Pages: 580_000}, ErrOutOfMemory}, // 2.7 TB
		{CacheConfig{Layers: math.MaxInt32, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 1}, ErrOutOfMemory},
	} {
		if math.MaxInt == math.MaxInt32 { // no address has so many
			c.want = ErrShape
		}
		if c.want == ErrOutOfMemory {
			if f, known := memory.Now(); !known || f.Total > 1<<37 {
				continue
			}
		}
		if _, err := NewCache(c.config); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.config, err, c.want)
		}
	}
}

// A cache takes what is free, to the byte, and what CacheConfig.Bytes says.
func TestNewCacheFree(t *testing.T) {
	config := smallCache
	bytes, err := config.Bytes()
	noError(t, err)
	if want := int64(3 * 12 * 2 * 4 * (4 + 3) * 4); bytes != want {
		t.Errorf("%d bytes, want %d", bytes, want)
	}
	var free int64
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{Bytes: free, Total: 1 << 20, Of: "a test"}, true })()
	free = bytes + 8*12 + 64*3 // what says who has which page
	c, err := NewCache(config)
	noError(t, err)
	if got := c.bytes; got != bytes {
		t.Errorf("%d bytes, and Bytes said %d", got, bytes)
	}
	free--
	_, err = NewCache(config)
	if !errors.Is(err, ErrOutOfMemory) {
		t.Fatal(err)
	}
	for _, text := range []string{"NewCache: 8352 bytes for 3 layers of 12 pages of 4 tokens, 2 KV heads of 4 and 3, float32, in host memory", "8351 of 1048576 bytes of a test are free"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{}, false })() // a system that does not tell
	_, err = NewCache(config)
	noError(t, err)

	config.DType = Float16
	if half, err := config.Bytes(); err != nil || half != bytes/2 {
		t.Errorf("float16: %d bytes, %v", half, err)
	}
	config.DType = tensor.Float64
	if _, err := config.Bytes(); !errors.Is(err, ErrDType) || !strings.Contains(err.Error(), "CacheConfig.Bytes") {
		t.Error(err)
	}
	if _, err := (CacheConfig{}).Bytes(); !errors.Is(err, ErrShape) {
		t.Error(err)
	}
}

// TestScript: caches, sequences and steps, command by command. What sequences hold, and what layers compute, is compared
// with attention over dense rows after each command. What is refused changes nothing, and Rollback restores all,
// to the order of the pool's free list.
//
//	cache pages N size N rows N [layers N] [heads N] [kvheads N] [type NAME]    a new cache, and a step of rows
//	new NAME, fork NAME OF, truncate NAME N, release NAME                       sequences
//	keep NAME FROM INDEX ...
//	need NAME N ...                                                             Cache.Need
//	chunks ROWS NAME N ...                                                      Chunks, and what Set says of each
//	add NAME N ...                                                              a whole step
//	set NAME N ...                                                              its parts; run can fail before a layer
//	run [fail LAYER]
//	commit
//	rollback
//	step HOW NAME N ...                                                         Step.Run, whose function ends so
//	rows                                                                        Step.Positions and Step.Last
//	show                                                                        the pages of all sequences
func TestScript(t *testing.T) {
	rng := reftest.Rand(t)
	var c *Cache
	var s *stepGraph
	var contexts map[string]*testContext
	var open []testAppend    // of the step that is set
	var fresh [][]*testToken // what they got in the last run, if that came to its end
	var before books         // when it was set
	types := map[string]tensor.Dtype{"float32": tensor.Float32, "float16": Float16, "bfloat16": BFloat16}
	close := func() {
		if s != nil {
			s.close()
		}
	}
	defer func() { close() }()
	appends := func(words []string) (list []testAppend) {
		for i := 0; i+1 < len(words); i += 2 {
			n, err := strconv.Atoi(words[i+1])
			x := contexts[words[i]]
			if words[i] == "none" {
				x = new(testContext)
			}
			if err != nil || x == nil {
				t.Fatalf("%q: %v", words, err)
			}
			list = append(list, testAppend{x, n})
		}
		return list
	}
	plain := func(list []testAppend) (a []Append) {
		for _, x := range list {
			a = append(a, Append{Seq: x.seq, Tokens: x.n})
		}
		return a
	}
	saves := func() map[string][]byte {
		saved := map[string][]byte{}
		for name, x := range contexts {
			var file bytes.Buffer
			if _, err := x.seq.WriteTo(&file); err != nil && !errors.Is(err, ErrState) { // a part of an open step
				t.Error(err)
			}
			saved[name] = file.Bytes()
		}
		return saved
	}
	do := func(words []string) (text string, err error) {
		number := func(i int) int {
			n, err := strconv.Atoi(words[i])
			if err != nil {
				t.Fatalf("%q: %v", words, err)
			}
			return n
		}
		switch words[0] {
		case "cache":
			close()
			config, rows, heads := CacheConfig{Layers: 3, KVHeads: 2, HeadDim: 4, ValueDim: 3}, 0, 4
			for i := 1; i < len(words); i += 2 {
				if words[i] == "type" {
					config.DType = types[words[i+1]]
					continue
				}
				*map[string]*int{"pages": &config.Pages, "size": &config.PageSize, "rows": &rows, "layers": &config.Layers, "heads": &heads, "kvheads": &config.KVHeads}[words[i]] = number(i + 1)
			}
			c = newTestCache(t, config)
			s, contexts, open = newStepGraph(t, c, rows, heads, tensor.Float32, WithCausal()), map[string]*testContext{}, nil
		case "new":
			contexts[words[1]] = &testContext{seq: newTestSequence(t, c)}
		case "fork":
			var f *Sequence
			if f, err = contexts[words[2]].seq.Fork(); err == nil {
				contexts[words[1]] = &testContext{f, slices.Clone(contexts[words[2]].tokens)}
			}
		case "truncate":
			x := contexts[words[1]]
			if err = x.seq.Truncate(number(2)); err == nil {
				x.tokens = x.tokens[:number(2):number(2)]
			}
		case "release":
			if err = contexts[words[1]].seq.Release(); err == nil {
				delete(contexts, words[1])
			}
		case "keep":
			x, from := contexts[words[1]], number(2)
			var path []int
			for i := range words[3:] {
				path = append(path, number(3+i))
			}
			if err = x.seq.Keep(from, path); err == nil {
				tokens := x.tokens[:from:from]
				for _, i := range path {
					tokens = append(tokens, x.tokens[from+i])
				}
				x.tokens = tokens
			}
		case "need":
			var n int
			if n, err = c.Need(plain(appends(words[1:]))); err == nil {
				text = fmt.Sprintf("%d pages", n)
			}
		case "chunks":
			todo, steps := plain(appends(words[2:])), 0
			done := make([]int, len(todo))
			for chunk, of := range Chunks(number(1), todo) {
				var line []string
				for i, a := range chunk {
					from := done[of[i]]
					done[of[i]] += a.Tokens
					line = append(line, fmt.Sprintf("%s [%d, %d)", words[2+2*of[i]], from, done[of[i]]))
				}
				if err := s.step.Set(chunk); err != nil {
					line = append(line, err.Error())
				} else {
					noError(t, s.step.Rollback())
				}
				text += strings.Join(line, ", ") + "\n"
				if steps++; steps > 9 {
					t.Fatalf("%q: no end", words)
				}
			}
			if steps == 0 {
				text = "no step"
			}
		case "add":
			s.advance(t, rng, appends(words[1:])...)
		case "set":
			was := booksOf(c)
			if err = set(s, appends(words[1:])...); err == nil {
				open, fresh, before = appends(words[1:]), nil, was
				text = fmt.Sprintf("%d pages taken", len(was.free)-len(booksOf(c).free))
			}
		case "run":
			failAt := 0
			if len(words) > 1 {
				failAt = number(2)
			}
			if fresh, err = s.attempt(rng, failAt, open...); errors.Is(err, errFault) {
				err = errFault // without Gorgonia's registers
			}
		case "commit":
			if err = s.step.Commit(); err == nil {
				for i, x := range open {
					x.tokens = append(x.tokens, fresh[i]...)
				}
				open = nil
			}
		case "rollback":
			reserved := booksOf(c)
			if err = s.step.Rollback(); err == nil {
				if after := booksOf(c); !after.equal(before) || len(open) > 0 && reserved.equal(before) {
					t.Errorf("rolled back: %+v, before %+v; with the step %+v", after, before, reserved)
				}
				open = nil
			}
		case "step":
			list, was, saved := appends(words[2:]), booksOf(c), saves()
			var inside []string
			var panicked any
			var ended bool
			f := func() (err error) {
				if fresh, err = s.attempt(rng, map[string]int{"fault": 1, "ignored": 1}[words[1]], list...); words[1] == "ignored" {
					return nil
				}
				switch words[1] {
				case "error":
					return fmt.Errorf("behind the last layer: %w", errFault)
				case "panic":
					panic(errFault)
				case "goexit":
					runtime.Goexit()
				case "nested":
					for _, e := range []error{s.step.Set(plain(list)), s.step.Run(plain(list), func() error { return nil }), s.step.Commit(), s.step.Rollback()} {
						inside = append(inside, e.Error())
					}
				}
				return err
			}
			switch words[1] {
			case "idle":
				f = func() error { return nil }
			case "none":
				f = nil
			}
			err, panicked, ended = outcome(func() error { return s.step.Run(plain(list), f) })
			if text = strings.Join(inside, "\n"); panicked != nil {
				text = fmt.Sprintf("panic: %v", panicked)
			} else if ended {
				text = "the goroutine has ended"
			}
			noError(t, c.Check())
			if err == nil && panicked == nil && !ended {
				for i, x := range list {
					x.tokens = append(x.tokens, fresh[i]...)
				}
				break
			}
			if errors.Is(err, errFault) && words[1] == "fault" {
				err = errFault // without Gorgonia's registers
			}
			if after := booksOf(c); !after.equal(was) || !maps.EqualFunc(saves(), saved, bytes.Equal) || len(open) == 0 && (s.step.open || s.step.managed || s.step.Last() != nil) {
				t.Errorf("%q left %+v, before %+v; or other tokens; or an open step: %v", words, after, was, s.step)
			}
		case "rows":
			positions, last := s.step.Positions(), s.step.Last()
			text = fmt.Sprintf("positions %v, last %v", positions, last)
			if positions == nil && last == nil {
				text = "none"
			}
			if len(positions)+len(last) > 0 { // they are the caller's
				positions[0] = 99
				last = append(last[:0], 99)
			}
		case "show":
			st := c.Stats()
			text = fmt.Sprintf("%d pages free, %d shared", st.FreePages, st.Shared)
			for _, name := range slices.Sorted(maps.Keys(contexts)) {
				q := contexts[name].seq
				text += fmt.Sprintf("\n%s: %d tokens in pages %v", name, q.Len(), q.table.Pages)
			}
		default:
			t.Fatalf("no command %q", words[0])
		}
		return text, err
	}
	script.Run(t, "testdata/cache.txt", func(words []string) (string, error) {
		var was books
		var slabs []byte
		if c != nil {
			was, slabs = booksOf(c), Slabs(c)
		}
		text, err := do(words)
		if err != nil && words[0] != "run" && words[0] != "step" && (!booksOf(c).equal(was) || !bytes.Equal(Slabs(c), slabs)) {
			t.Errorf("%q was refused, and left %+v, before %+v", words, booksOf(c), was)
		}
		for name, x := range contexts {
			if err := x.seq.checkTokens(x.tokens); err != nil {
				t.Errorf("behind %q: %s: %v", words, name, err)
			}
		}
		return text, err
	})
}

// outcome is what a call returns or panics with, or that it ends its goroutine.
func outcome(call func() error) (err error, panicked any, ended bool) {
	done := make(chan struct{})
	ended = true
	go func() {
		defer close(done)
		defer func() {
			if panicked = recover(); panicked != nil {
				ended = false
			}
		}()
		err = call()
		ended = false
	}()
	<-done
	return err, panicked, ended
}

// A step may be set before its graph is built.
func TestGraphBuiltAfterSet(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 2, PageSize: 2, Pages: 2})
	step, err := c.NewStep(1)
	noError(t, err)
	seq := newTestSequence(t, c)
	noError(t, step.Set([]Append{{Seq: seq, Tokens: 1}}))
	g := G.NewGraph()
	x := func(name string, v ...float32) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(1, 2), G.WithName(name),
			G.WithValue(tensor.New(tensor.WithShape(1, 2), tensor.WithBacking(v))))
	}
	out, err := CachedAttention(x("q", 1, 1), x("k", 1, 2), x("v", 3, 4), step.Layer(0))
	noError(t, err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	noError(t, m.RunAll(), step.Commit())
	if got := float64s(out.Value()); got[0] != 3 || got[1] != 4 {
		t.Fatalf("got %v, want the value of the only token", got)
	}
}

// In steady state Set, Commit and Run allocate nothing, whatever mix they are given.
func TestStepDoesNotAllocate(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 4, Pages: 64})
	s := newStepGraph(t, c, 16, 4, tensor.Float32, WithCausal())
	defer s.close()
	var sequences []*Sequence
	var appends []Append
	for i := range 5 {
		sequences = append(sequences, newTestSequence(t, c))
		appends = append(appends, Append{Seq: sequences[i], Tokens: 1 + i%3})
	}
	in := make([]layerInput, 2)
	rng := reftest.Rand(t)
	for l := range in {
		in[l] = s.draw(rng, l, nil)
	}
	var inSteps uint64
	var before, after runtime.MemStats
	counted := func(f func() error) {
		runtime.ReadMemStats(&before)
		err := f()
		runtime.ReadMemStats(&after)
		inSteps += after.Mallocs - before.Mallocs
		noError(t, err)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that nobody else allocates
	const steps = 400
	for i := range 2 * steps {
		if i == steps { // grown by now
			inSteps = 0
		}
		counted(func() error { return s.step.Set(appends) })
		noError(t, s.runLayer(0, in[0]), s.runLayer(1, in[1]))
		counted(s.step.Commit)
		if i%3 == 0 {
			counted(func() error { return s.step.Set(appends) })
			counted(s.step.Rollback)
			counted(func() error {
				if err := s.step.Run(appends, func() error { return errFault }); err != errFault {
					return err
				}
				return s.step.Run(nil, func() error { return nil })
			})
		}
		for _, q := range sequences { // the contexts wax and wane
			if q.Len() > 30 {
				noError(t, q.Truncate(i%17))
			}
		}
	}
	if inSteps > steps/20 { // the runtime itself allocates now and then
		t.Errorf("%d allocations in %d steps", inSteps, steps)
	}
}

// Layers have one plan where all that a schedule or a kernel depends on is equal, and
// each its own where anything differs.
func TestPlansOfLayers(t *testing.T) {
	cfg := smallCache
	cfg.Layers = 40
	c := newTestCache(t, cfg)
	step, err := c.NewStep(3)
	noError(t, err)
	g := G.NewGraph()
	layer := 0
	add := func(heads int, opts ...Option) {
		t.Helper()
		var in [3]*G.Node
		for i, width := range [...]int{heads * cfg.HeadDim, cfg.KVHeads * cfg.HeadDim, cfg.KVHeads * cfg.ValueDim} {
			in[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(3, width), G.WithName(fmt.Sprint("qkv"[i], heads, layer)))
		}
		_, err := CachedAttention(in[0], in[1], in[2], step.Layer(layer), opts...)
		noError(t, err)
		layer++
	}
	options := [][]Option{
		nil, {WithCausal()}, {WithScale(1)}, {WithScale(2)}, {WithWindow(3)}, {WithWindow(4)}, {WithSoftCap(1)}, {WithSoftCap(2)},
		{WithALiBi([]float64{1, 2, 3, 4})}, {WithALiBi([]float64{1, 2, 3, 5})}, {WithSchedule(PerHead)}, {WithSchedule(FixedSplit(2))}, {WithSchedule(FixedSplit(3))},
		{WithTileTokens(1)}, {WithTileTokens(2)}, {WithWorkers(1)}, {WithWorkers(2)}, {WithCausal(), WithWorkers(1)},
	}
	for range 2 {
		for _, o := range options {
			add(4, o...)
		}
		if n := len(step.plans); n != len(options) {
			t.Fatalf("%d plans for %d kinds of layers", n, len(options))
		}
	}
	add(2)
	add(2)
	if n := len(step.plans); n != len(options)+1 {
		t.Errorf("%d plans after layers of two heads", n)
	}
}

// Where the pool's numbers are wrong, which only a defect could bring about, calls say
// so and change nothing: no page goes to two sequences.
func TestWrongPool(t *testing.T) {
	for name, do := range map[string]func(*Sequence, *Step) error{
		"Fork":     func(q *Sequence, _ *Step) error { _, err := q.Fork(); return err },
		"WriteTo":  func(q *Sequence, _ *Step) error { _, err := q.WriteTo(new(bytes.Buffer)); return err },
		"Truncate": func(q *Sequence, _ *Step) error { return q.Truncate(1) },
		"Release":  func(q *Sequence, _ *Step) error { return q.Release() },
	} {
		c := newTestCache(t, smallCache)
		q := newTestSequence(t, c)
		Lengthen(q, 10)
		step, err := c.NewStep(4)
		noError(t, err, c.pool.Release(q.table.Pages[1:]))
		before := booksOf(c)
		if err := do(q, step); !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), name+": pages: page ") {
			t.Errorf("%s: %v", name, err)
		}
		if after := booksOf(c); !after.equal(before) || q.Len() != 10 {
			t.Errorf("%s: %+v, before %+v", name, after, before)
		}
		wrong(t, name, c.Check(), ErrInternal)
		noError(t, c.Close())
	}
	c := newTestCache(t, smallCache)
	defer c.Close()
	q := newTestSequence(t, c)
	step, err := c.NewStep(4)
	noError(t, err, step.Set([]Append{{Seq: q, Tokens: 4}}), c.pool.Release(step.reservations[0].Fresh()))
	if err := step.Rollback(); !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), "Rollback: pages: page 0 is free") {
		t.Error(err)
	}
	if c.pool.Free() != smallCache.Pages || step.open || q.step != nil {
		t.Errorf("%d pages free, step %v, sequence %v", c.pool.Free(), step, q)
	}
	c2 := newTestCache(t, smallCache)
	defer c2.Close()
	step, err = c2.NewStep(4)
	noError(t, err)
	err = step.Run([]Append{{Seq: newTestSequence(t, c2), Tokens: 4}}, func() error {
		noError(t, c2.pool.Release(step.reservations[0].Fresh()))
		return errFault
	})
	if !errors.Is(err, errFault) || !errors.Is(err, ErrInternal) || !strings.Contains(err.Error(), "Run: pages: page 0 is free") || step.open {
		t.Errorf("Run: %v, %v", err, step)
	}
}

// testDecoder is a decoder reduced to its attention: for each layer
//
//	h = h + CachedAttention(h Wq, h Wk, h Wv) Wo
//
// in float64 over a float32 cache.
type testDecoder struct {
	width, heads   int
	config         CacheConfig
	wq, wk, wv, wo []*tensor.Dense // by layer
}

func newTestDecoder(rng *rand.Rand, width, heads int, c CacheConfig) *testDecoder {
	d := &testDecoder{width: width, heads: heads, config: c}
	weights := func(rows, columns int) *tensor.Dense {
		x := make([]float64, rows*columns)
		for i := range x {
			x[i] = rng.NormFloat64() / math.Sqrt(float64(rows))
		}
		return newMatrix(tensor.Float64, x, rows, columns)
	}
	for range c.Layers {
		d.wq = append(d.wq, weights(width, heads*c.HeadDim))
		d.wk = append(d.wk, weights(width, c.KVHeads*c.HeadDim))
		d.wv = append(d.wv, weights(width, c.KVHeads*c.ValueDim))
		d.wo = append(d.wo, weights(heads*c.ValueDim, width))
	}
	return d
}

// testPass is the decoder's graph for a number of rows.
type testPass struct {
	step *Step
	x    *G.Node
	h    G.Value
	vm   G.VM
}

func (d *testDecoder) pass(t testing.TB, c *Cache, rows int) *testPass {
	t.Helper()
	step, err := c.NewStep(rows)
	noError(t, err)
	g := G.NewGraph()
	p := &testPass{step: step, x: G.NewMatrix(g, tensor.Float64, G.WithShape(rows, d.width), G.WithName("x"))}
	h := p.x
	for l := range d.config.Layers {
		weight := func(name string, w *tensor.Dense) *G.Node {
			return G.NewMatrix(g, tensor.Float64, G.WithShape(w.Shape()...), G.WithName(fmt.Sprint(name, l)), G.WithValue(w))
		}
		times := func(x, w *G.Node) *G.Node { return G.Must(G.Mul(x, w)) }
		a, err := CachedAttention(times(h, weight("q", d.wq[l])), times(h, weight("k", d.wk[l])), times(h, weight("v", d.wv[l])),
			step.Layer(l), WithCausal())
		noError(t, err)
		h = G.Must(G.Add(h, times(a, weight("o", d.wo[l]))))
	}
	G.Read(h, &p.h)
	noError(t, graph.Check("test", g))
	p.vm = G.NewTapeMachine(g)
	return p
}

// decoderContext is a sequence with its inputs, and attention over dense rows
// of what the cache is to hold.
type decoderContext struct {
	seq  *Sequence
	x    [][]float64 // inputs that are still to come
	done int
	k, v [][]float64 // by layer
	h    []float64   // outputs that are expected, of the tokens handed out last
}

// expect adds one token to the dense rows, and its output to c.h.
func (d *testDecoder) expect(c *decoderContext, x []float64) {
	cfg := &d.config
	h := append([]float64(nil), x...)
	group := d.heads / cfg.KVHeads
	for l := range cfg.Layers {
		q := matVec(h, d.wq[l])
		for _, k := range matVec(h, d.wk[l]) {
			c.k[l] = append(c.k[l], float64(float32(k)))
		}
		for _, v := range matVec(h, d.wv[l]) {
			c.v[l] = append(c.v[l], float64(float32(v)))
		}
		n := len(c.k[l]) / (cfg.KVHeads * cfg.HeadDim)
		var out []float64
		for head := range d.heads {
			kv := head / group
			p, sum := make([]float64, n), 0.0
			for j := range p {
				for i := range cfg.HeadDim {
					p[j] += q[head*cfg.HeadDim+i] * c.k[l][(j*cfg.KVHeads+kv)*cfg.HeadDim+i]
				}
				p[j] = math.Exp(p[j] / math.Sqrt(float64(cfg.HeadDim)))
				sum += p[j]
			}
			o := make([]float64, cfg.ValueDim)
			for j := range p {
				for i := range o {
					o[i] += p[j] / sum * c.v[l][(j*cfg.KVHeads+kv)*cfg.ValueDim+i]
				}
			}
			out = append(out, o...)
		}
		for i, y := range matVec(out, d.wo[l]) {
			h[i] += y
		}
	}
	c.h = append(c.h, h...)
}

func matVec(x []float64, w *tensor.Dense) []float64 {
	columns := w.Shape()[1]
	y, data := make([]float64, columns), w.Data().([]float64)
	for i, a := range x {
		for j := range y {
			y[j] += a * data[i*columns+j]
		}
	}
	return y
}

// do gives the next tokens of each context, as many as counts says, to the
// rows of the graph, and compares all outputs.
func (d *testDecoder) do(t testing.TB, p *testPass, contexts []*decoderContext, counts []int) {
	t.Helper()
	var appends []Append
	x := make([]float64, 0, p.step.Tokens()*d.width)
	for i, c := range contexts {
		appends = append(appends, Append{Seq: c.seq, Tokens: counts[i]})
		c.h = c.h[:0]
		for _, row := range c.x[c.done : c.done+counts[i]] {
			x = append(x, row...)
			d.expect(c, row)
		}
		c.done += counts[i]
	}
	used := len(x)
	x = x[:cap(x)]
	reftest.Poison(x[used:])
	noError(t, p.step.Set(appends), G.Let(p.x, newMatrix(tensor.Float64, x, p.step.Tokens(), d.width)),
		p.vm.RunAll(), p.step.Commit())
	p.vm.Reset()
	h := p.h.Data().([]float64)
	for i, c := range contexts {
		for j, want := range c.h {
			// What is computed twice in float64 may round to neighbours in float32.
			if diff := math.Abs(h[j] - want); !(diff <= 1e-6*(1+math.Abs(want))) {
				t.Fatalf("context %d, tokens to %d, element %d: %v, want %v", i, c.done, j, h[j], want)
			}
		}
		h = h[len(c.h):]
		if c.seq.Len() != c.done {
			t.Fatalf("context %d has %d tokens, want %d", i, c.seq.Len(), c.done)
		}
	}
}

// A decoder as one has it: a graph of 16 rows that takes prompts in chunks, and
// a graph of 4 rows that takes a token of each sequence, over one cache.
func TestPrefillAndDecodeGraphs(t *testing.T) {
	rng := reftest.Rand(t)
	config := CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 5, ValueDim: 3, PageSize: 8, Pages: 40}
	d := newTestDecoder(rng, 6, 4, config)
	cache := newTestCache(t, config)
	prefill, decode := d.pass(t, cache, 16), d.pass(t, cache, 4)
	defer prefill.vm.Close()
	defer decode.vm.Close()
	context := func(tokens int) *decoderContext {
		c := &decoderContext{seq: newTestSequence(t, cache), k: make([][]float64, 2), v: make([][]float64, 2)}
		for range tokens {
			x := make([]float64, d.width)
			for i := range x {
				x[i] = rng.NormFloat64()
			}
			c.x = append(c.x, x)
		}
		return c
	}

	prompts := []int{37, 5, 16, 1}
	var all []*decoderContext
	for _, n := range prompts {
		all = append(all, context(n+60))
	}
	for { // chunks: the rows of a run are filled with prompts in order
		var now []*decoderContext
		var counts []int
		rows := 16
		for i, c := range all {
			if n := min(prompts[i]-c.done, rows); n > 0 {
				now, counts = append(now, c), append(counts, n)
				rows -= n
			}
		}
		if now == nil {
			break
		}
		d.do(t, prefill, now, counts)
	}
	ones := []int{1, 1, 1, 1}
	for i := range 60 {
		switch i {
		case 20: // one leaves, and its pages come back
			free := cache.Stats().FreePages
			noError(t, all[1].seq.Release())
			if got := cache.Stats().FreePages; got <= free {
				t.Fatalf("%d pages free, %d before", got, free)
			}
			all = append(all[:1], all[2:]...)
		case 30: // and a new one comes, beside those that decode
			all = append(all, context(11+60))
			d.do(t, prefill, all, []int{1, 1, 1, 11})
			continue
		}
		d.do(t, decode, all, ones[:len(all)])
	}
}

// A graph that runs for thousands of steps takes no more memory and no more
// goroutines.
func TestDecodeDoesNotGrow(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 16, Pages: 64})
	s := newStepGraph(t, c, 4, 4, tensor.Float32, WithCausal())
	defer s.close()
	var appends []testAppend
	var tokens []*testToken
	for range 4 {
		appends = append(appends, testAppend{&testContext{seq: newTestSequence(t, c)}, 1})
		tokens = append(tokens, newTestTokens(1, 2)...)
	}
	in := []layerInput{s.draw(rng, 0, tokens), s.draw(rng, 1, tokens)}
	decode := func(steps int) (objects, goroutines int) {
		for range steps {
			noError(t, set(s, appends...), s.run(in, 0), s.step.Commit())
			if appends[0].seq.Len() == 200 {
				for _, a := range appends {
					noError(t, a.seq.Truncate(3))
				}
			}
		}
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapObjects), runtime.NumGoroutine()
	}
	objects, goroutines := decode(200)
	objectsAfter, goroutinesAfter := decode(1500)
	if objectsAfter > objects+300 {
		t.Errorf("%d objects after 200 steps, %d after 1700", objects, objectsAfter)
	}
	if goroutinesAfter > goroutines+runtime.GOMAXPROCS(0) {
		t.Errorf("%d goroutines after 200 steps, %d after 1700", goroutines, goroutinesAfter)
	}
	t.Logf("objects %d, %d; goroutines %d, %d", objects, objectsAfter, goroutines, goroutinesAfter)
	if n := s.step.layers; n != 2*1700 {
		t.Errorf("%d layers have run, want 3400", n)
	}
}

// The lisp machine, for its one run.
func TestCachedAttentionOnLispMachine(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, smallCache)
	s := newStepGraph(t, c, 3, 2, tensor.Float32, WithCausal())
	defer s.close()
	seq := newTestSequence(t, c)
	tokens := newTestTokens(2, smallCache.Layers)
	noError(t, s.step.Set([]Append{{Seq: seq, Tokens: 2}}))
	var inputs []layerInput
	for l := range smallCache.Layers {
		inputs = append(inputs, s.draw(rng, l, tokens))
		for i, n := range s.in[l] {
			noError(t, G.Let(n, inputs[l].tensors[i]))
		}
	}
	m := G.NewLispMachine(s.nodes[0].Graph(), G.ExecuteFwdOnly())
	defer m.Close()
	noError(t, m.RunAll(), s.step.Commit(), seq.checkTokens(tokens))
	for l, in := range inputs {
		noError(t, s.checkLayer(l, in.q, []stepPart{{context: tokens, n: 2}}))
	}
}

// What the limits of a process do not leave is ErrOutOfMemory, of caches and of what nodes make. Go would end the process, so
// another one does that.
func TestMemoryLimit(t *testing.T) {
	if runtime.GOOS != "linux" || math.MaxInt == math.MaxInt32 || reftest.RaceEnabled {
		t.Skip("the limits are those of Linux with addresses of 64 bits, of which the race detector takes terabytes")
	}
	const child = "LEANATTENTION_TEST_LIMIT"
	if os.Getenv(child) == "" {
		for _, limit := range []string{"-v 8000000", "-d 7000000"} {
			c := exec.Command("sh", "-c", "ulimit "+limit+` && exec "$0" -test.run '^TestMemoryLimit$' -test.v`, os.Args[0])
			c.Env = append(os.Environ(), child+"=1")
			if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("ulimit %s: %v\n%.3000s", limit, err, out)
			}
		}
		return
	}
	refused := func(err error) {
		t.Helper()
		if !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "(ulimit ") {
			t.Errorf("%v", err)
		}
	}
	config := CacheConfig{Layers: 4, KVHeads: 8, HeadDim: 128, Pages: 8192}
	_, err := NewCache(config)
	refused(err)
	if config.Pages = 2500; config.PageSize != 0 {
		t.Fatal(config)
	}
	for range 3 { // 5 GB each, which Close gives back
		c, err := NewCache(config)
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewCache(config)
		refused(err)
		noError(t, c.Close())
	}

	// q and v are small, and what they make has 6.4 GB and more.
	const n = 40_000
	input := func(g *G.ExprGraph, name string, shape ...int) *G.Node {
		return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(shape...))))
	}
	g := G.NewGraph()
	out, err := Attention(input(g, "q", 1, 1, n, 1), input(g, "k", 1, 1, 1, 1), input(g, "v", 1, 1, 1, n))
	noError(t, err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	refused(Cause(m.RunAll()))
	if out.Value() != nil {
		t.Error("there is an output")
	}
	// The same of a step, which can be rolled back.
	const rows, heads, dim = 4000, 4096, 100
	c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, ValueDim: dim, PageSize: 4, Pages: rows / 4})
	noError(t, err)
	s, err := c.NewSequence()
	noError(t, err)
	step, err := c.NewStep(rows)
	noError(t, err)
	g = G.NewGraph()
	_, err = CachedAttention(input(g, "q", rows, heads), input(g, "k", rows, 1), input(g, "v", rows, dim), step.Layer(0))
	noError(t, err)
	cached := G.NewTapeMachine(g)
	defer cached.Close()
	noError(t, step.Set([]Append{{Seq: s, Tokens: rows}}))
	refused(Cause(cached.RunAll()))
	noError(t, step.Rollback(), s.Release(), c.Close())
}
