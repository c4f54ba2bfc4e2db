package attention

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// Tests of launches that are queued together.

// testManyLaunches: launches of several layers overlap, and each reads the results of earlier launches.
func testManyLaunches(t *testing.T, m *machine, n int) {
	rng := reftest.Rand(t)
	shape := reftest.Shape{Heads: 8, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1, 1, 3}, Keys: []int{500, 77, 1300}, Mask: attn.Mask{Causal: true}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float16, dense: true})
	plan := m.engine.NewPlan()
	m.run(t, plan, p)
	first := enginetest.Read(t, &p.o)
	// The output of a launch is the query of the next, with q = out of the first.
	a := *p.operands()
	a.Q, a.Out = p.o, m.Put(t, enginetest.Poisoned(p.o.Len, p.out), p.out)
	noError(t, plan.Run(m.Stream, &a))
	m.Settle(t)
	want := enginetest.Read(t, &a.Out)
	for i := range n {
		m.Poison(t, &p.o)
		m.Poison(t, &a.Out)
		noError(t, plan.Run(m.Stream, p.operands()))
		noError(t, plan.Run(m.Stream, &a))
		m.Settle(t)
		if !bytes.Equal(enginetest.Read(t, &p.o), first) || !bytes.Equal(enginetest.Read(t, &a.Out), want) {
			t.Fatalf("round %d: a launch did not wait for the one before it", i)
		}
	}
	noError(t, a.Out.Buffer.Close())
	p.close(t)
	noError(t, plan.Close())
}

// steps are the problems of a decoding graph, in the same memory: lengths and pages change at every step, some
// sequences are missing, and one may have a chunk of a prompt.
type steps struct {
	all   []*problem
	bytes [][7][]byte
}

func (m *machine) steps(t testing.TB, rng *rand.Rand, n, sequences, chunk, longest int, kv attn.DType) *steps {
	t.Helper()
	same := &decode{pageTokens: enginetest.Pick(rng, 1, 8, 16, 24, 100), rows: 3*sequences + 2 + chunk}
	same.pages = sequences*attn.Ceil(longest+max(chunk, 1), same.pageTokens) + 3
	heads, dim := enginetest.Pick(rng, 1, 3, 8), headDims[rng.IntN(4)]
	return m.stepsOf(t, n, func(int) *problem {
		shape := reftest.Shape{Heads: 2 * heads, KVHeads: 2, Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: true}}
		for j := range sequences {
			queries := min(rng.IntN(5), 1)
			switch {
			case chunk == 0:
			case j == 0:
				queries = chunk
			case j == 1:
				queries = 1 // there is always one sequence
			}
			shape.Queries = append(shape.Queries, queries)
			shape.Keys = append(shape.Keys, queries+rng.IntN(longest))
		}
		return m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: kv, decode: same})
	})
}

// stepsOf returns n problems of one size in the memory of the first.
func (m *machine) stepsOf(t testing.TB, n int, problemOf func(i int) *problem) *steps {
	t.Helper()
	s := &steps{}
	for i := range n {
		p := problemOf(i)
		var b [7][]byte
		for j, x := range p.memories() {
			b[j] = enginetest.Read(t, x)
		}
		if i > 0 {
			p.close(t)
			for j, x := range s.all[0].memories() {
				*p.memories()[j] = *x
			}
		}
		s.all, s.bytes = append(s.all, p), append(s.bytes, b)
	}
	return s
}

// load copies step i's numbers to the memory.
func (s *steps) load(t testing.TB, i int) {
	t.Helper()
	for j, x := range s.all[i].memories() {
		noError(t, x.Buffer.Upload(x.Offset, s.bytes[i][j]))
	}
}

func (p *problem) memories() [7]*gpu.Memory {
	return [7]*gpu.Memory{&p.q, &p.k, &p.v, &p.newK, &p.newV, &p.o, &p.lse}
}

// replay captures the launches of a plan that has run the first step, and replays them for all steps. It checks each
// step and then calls each, which may be nil.
func (m *machine) replay(t *testing.T, plan *Plan, s *steps, each func(i int, p *problem)) {
	t.Helper()
	first, generation := s.all[0], plan.Generation()
	launch := m.Capture(t, func() error {
		if err := plan.Append(m.Stream, attn.InPlanes(first.k, first.v), first.newK, first.newV); err != nil {
			return err
		}
		return plan.Run(m.Stream, first.operands())
	})
	for i, p := range s.all {
		s.load(t, i)
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		plan.spoil(t)
		noError(t, plan.Upload(m.Stream))
		if plan.Generation() != generation {
			t.Fatalf("step %d of %v, forks %v: the plan has another form: %+v", i, p, p.forks, plan.form)
		}
		noError(t, launch())
		m.Settle(t)
		if p.check(t); t.Failed() {
			t.Fatalf("step %d: %v, forks %v", i, p, p.forks)
		}
		if each != nil {
			each(i, p)
		}
	}
}

// testGraph: launches that were captured once serve every later step.
func testGraph(t *testing.T, m *machine, n, chunk, longest, kinds int) {
	rng := reftest.Rand(t)
	all := []struct {
		kv      attn.DType
		unfused bool
	}{{attn.Float16, false}, {attn.BFloat16, false}, {attn.Float32, false}, {attn.Float16, true}}
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	for _, c := range all[:kinds] {
		const sequences = 5
		s := m.steps(t, rng, n, sequences, chunk, longest, c.kv)
		for _, p := range s.all {
			p.geometry.Unfused = c.unfused
		}
		first := s.all[0]
		plan := m.engine.NewPlan()
		noError(t, plan.Reserve(Capacity{Sequences: sequences, Rows: first.rows, Queries: max(chunk, 1), Pages: sequences * attn.Ceil(longest+max(chunk, 1), first.pageTokens)}))
		s.load(t, 0)
		m.run(t, plan, first)
		if both := chunk > 0 && c.kv != attn.Float32 && !c.unfused && m.runsBeside(); both != plan.form.both {
			t.Errorf("keys of %v, unfused %v: decode kernels and for many: %v", c.kv, c.unfused, !both)
		}
		m.replay(t, plan, s, nil)
		first.close(t)
		noError(t, plan.Close())
	}
}

// testRuns: launches whose blocks merge together have a number, which wraps around. Words of that age are not taken for
// new words.
func testRuns(t *testing.T, m *machine, keys int) {
	rng := reftest.Rand(t)
	shape := reftest.Shape{Heads: 6, KVHeads: 1, Dim: 64, ValueDim: 64, Queries: []int{1, 1}, Keys: []int{keys, keys / 3}, Mask: attn.Mask{Causal: true}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float16})
	plan := m.engine.NewPlan()
	// With three thread blocks, one of which shares nothing, and with four: the fourth block has words that the three
	// never write.
	workers := []int{3, 4}
	p.geometry.Policy = lean.Policy{Kind: lean.FixedSplit, Splits: 2}
	var want [2][]byte
	for i := range workers {
		p.geometry.Workers = workers[i]
		m.run(t, plan, p)
		p.check(t)
		want[i] = enginetest.Read(t, &p.o)
		if m.engine.hasEpilogue() && !slices.ContainsFunc(plan.works.data, func(w work) bool { return w.wholeSeq == together }) {
			t.Fatalf("no blocks merge together: %+v", plan.works.data)
		}
	}
	for i, launches := range []int{3, 5} { // the last three numbers, and then from 2 on
		p.geometry.Workers = workers[i]
		noError(t, plan.Build(p.geometry, p.seqs, p.rows))
		noError(t, plan.Upload(m.Stream))
		if i == 0 && m.engine.hasEpilogue() {
			const last = 1<<32 - 1 // two numbers before it are not used
			blocks := m.engine.blocks
			runs := make([]uint32, 3*blocks) // each block's launch number; then the counts of begun blocks: 0
			for i := range blocks {
				runs[i] = last - 5
			}
			words := make([]uint64, plan.memory.tagged.Len()/8)
			for i := range words {
				words[i] = 2<<32 | uint64(rng.Uint32())
			}
			noError(t, plan.memory.runs.Upload(0, gpu.BytesOf(runs)))
			noError(t, plan.memory.tagged.Upload(0, gpu.BytesOf(words)))
		}
		for range launches {
			m.Poison(t, &p.o)
			noError(t, plan.Run(m.Stream, p.operands()))
			m.Settle(t)
			if !bytes.Equal(enginetest.Read(t, &p.o), want[i]) {
				t.Fatalf("%d thread blocks have another result", workers[i])
			}
		}
	}
	p.close(t)
	noError(t, plan.Close())
}

// testStreams runs several plans at the same time. If thread blocks merge together, blocks of one launch hold
// multiprocessors that waiting blocks of another launch need.
func testStreams(t *testing.T, m *machine, streams, launches int, o options) {
	rng := reftest.Rand(t)
	type user struct {
		machine
		plan *Plan
		p    *problem
	}
	var all []user
	for i := range streams {
		own := *m.Device // with its own stream
		u := user{machine: machine{&own, m.engine}, plan: m.engine.NewPlan()}
		if i > 0 {
			stream, err := m.Dev.NewStream()
			noError(t, err)
			u.Stream = stream
		}
		u.p = u.newProblem(t, rng, reftest.Normal, o)
		noError(t, u.plan.Build(u.p.geometry, u.p.seqs, u.p.rows))
		noError(t, u.plan.Upload(u.Stream))
		all = append(all, u)
	}
	for range launches {
		for _, u := range all {
			u.queue(t, u.plan, u.p)
		}
	}
	for i, u := range all {
		if i > 0 {
			noError(t, u.Stream.Synchronize())
			noError(t, u.Stream.Close())
		} else {
			m.Settle(t)
		}
		u.p.check(t)
		u.p.close(t)
		noError(t, u.plan.Close())
	}
}

// testManyUploads builds plans while earlier plans are still to be uploaded and run. Only a real GPU has a queue.
func testManyUploads(t *testing.T, m *machine, n int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	var p []*problem
	for range 7 {
		p = append(p, m.newProblem(t, rng, reftest.Normal, options{kv: attn.BFloat16, work: 1e7, longest: 3000}))
	}
	for i := range n {
		x := p[i%len(p)]
		noError(t, plan.Build(x.geometry, x.seqs, x.rows))
		noError(t, plan.Upload(m.Stream))
		m.queue(t, plan, x)
	}
	m.Settle(t)
	for _, x := range p {
		x.check(t)
		x.close(t)
	}
	noError(t, plan.Close())
}

// decodeStep returns a step of 64 sequences for benchmarks.
func decodeStep(t testing.TB, m *machine) *problem {
	t.Helper()
	rng := reftest.Rand(t)
	shape := reftest.Shape{Heads: 32, KVHeads: 8, Dim: 128, ValueDim: 128}
	for range 64 {
		shape.Queries, shape.Keys = append(shape.Queries, 1), append(shape.Keys, 33)
	}
	return m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float16, decode: &decode{pageTokens: 16, rows: 200, pages: 64 * 4}})
}

func benchmarkQueue(b *testing.B, m *machine) {
	p := decodeStep(b, m)
	plan := m.engine.NewPlan()
	m.run(b, plan, p)
	o := p.operands()
	noError(b, plan.Build(p.geometry, p.seqs, p.rows))
	noError(b, plan.Upload(m.Stream))
	b.Run("prepare", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := plan.arguments(o); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("run", func(b *testing.B) {
		b.ReportAllocs()
		n := 0
		for b.Loop() {
			noError(b, plan.Run(m.Stream, o))
			if n++; n%500 == 0 { // the queue is finite
				b.StopTimer()
				noError(b, m.Stream.Synchronize())
				b.StartTimer()
			}
		}
	})
	noError(b, m.Stream.Synchronize())
	noError(b, plan.Close())
	p.close(b)
}

// benchmarkBuild measures the plan of a decode step, which is built once a step for all layers.
func benchmarkBuild(b *testing.B, m *machine) {
	const heads, dim, pageTokens = 8, 128, 64
	rows := attn.PageStrides{Page: heads * pageTokens * dim, Head: pageTokens * dim, Row: dim}
	g := attn.Problem{Heads: 4 * heads, KVHeads: heads, Dim: dim, ValueDim: dim, Pages: attn.Separate(attn.Float16, dim, dim, rows, rows), PageTokens: pageTokens, Scale: 1, Mask: attn.Mask{Causal: true}}
	for _, c := range []struct{ batch, keys int }{{1, 1024}, {1, 16384}, {16, 1024}, {64, 1024}, {16, 16384}} {
		b.Run(fmt.Sprintf("b%d/%d", c.batch, c.keys), func(b *testing.B) {
			var seqs []attn.Sequence
			page := int32(0)
			for i := range c.batch {
				q := attn.Sequence{Row: i, Queries: 1, Keys: c.keys + 17*i}
				for range attn.Ceil(q.Keys, pageTokens) {
					q.Pages = append(q.Pages, page)
					page++
				}
				seqs = append(seqs, q)
			}
			plan := m.engine.NewPlan()
			b.ReportAllocs()
			for b.Loop() {
				noError(b, plan.Build(g, seqs, c.batch))
			}
			noError(b, plan.Close())
		})
	}
}
