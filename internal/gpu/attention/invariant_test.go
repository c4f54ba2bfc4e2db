package attention

import (
	"bytes"
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// chunk is query positions [from, to) of a sequence.
type chunk struct{ seq, from, to int }

// chunked returns the sequences of a step with these chunks only. Keys after a chunk's last position are missing.
func (p *problem) chunked(chunks []chunk) (seqs []attn.Sequence) {
	for _, c := range chunks {
		s := p.seqs[c.seq]
		s.Row += c.from
		s.Keys -= s.Queries - c.to
		s.Queries = c.to - c.from
		seqs = append(seqs, s)
	}
	return seqs
}

// randomChunks cuts some of the sequences' queries into chunks and distributes the chunks over steps.
func (p *problem) randomChunks() (steps [][]chunk) {
	size := enginetest.Pick(p.rng, 1, 2, 3, 4, 7, 64)
	steps = make([][]chunk, 1+p.rng.IntN(3))
	for _, i := range p.rng.Perm(len(p.Queries)) {
		for from := max(p.Queries[i]-p.Keys[i], 0); from < p.Queries[i]; from += size {
			n := p.rng.IntN(len(steps))
			steps[n] = append(steps[n], chunk{i, from, min(from+size, p.Queries[i])})
		}
	}
	return steps
}

// results has the output of the last run.
type results struct{ out, lse []byte }

func (p *problem) results(t testing.TB) results {
	return results{enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)}
}

// row returns the bits of a row in all heads.
func (r *results) row(p *problem, seq, pos int) (bits []byte) {
	g, size, row := &p.geometry, p.out.Size(), p.seqs[seq].Row+pos
	for h := range p.Heads {
		at := row*g.Out.Row + h*g.Out.Head
		bits = append(bits, r.out[at*size:(at+p.Dim)*size]...)
		at = row*g.LSE.Row + h*g.LSE.Head
		bits = append(bits, r.lse[4*at:4*at+4]...)
	}
	return bits
}

// again returns p with the same numbers in another layout.
func (p *problem) again(m *machine, t testing.TB, dense bool, page int) *problem {
	q := *p
	q.seqs, q.pool, q.dense, q.rows, q.append = nil, [2][]byte{}, dense, 0, false
	q.newK, q.newV = gpu.Memory{}, gpu.Memory{}
	if q.dense {
		q.layDense(m, t)
	} else {
		q.layPaged(m, t, page, nil)
	}
	for _, x := range []*gpu.Memory{&q.o, &q.lse} {
		x.Buffer = nil
		m.Poison(t, x)
	}
	return &q
}

// testInvariant: the bits of a row are the same in any step and batch, in chunks of any size, with any schedule and
// pages. Without batch invariance some differ.
func testInvariant(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	plan := m.engine.NewPlan()
	differ := 0
	for i := range reftest.AtLeast(n, func() bool { return differ > 0 }) {
		s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: enginetest.Pick(rng, headDims...), Mask: attn.Mask{Causal: true}}
		s.ValueDim, s.Heads = s.Dim, s.KVHeads*enginetest.Pick(rng, 1, 1, 2, 4, 5, 8)
		for range enginetest.Pick(rng, 1, 2, 3, 4) {
			q := enginetest.Pick(rng, 1, 1, 2, 3, 4, 9)
			s.Queries, s.Keys = append(s.Queries, q), append(s.Keys, q+enginetest.Pick(rng, 0, rng.IntN(100), rng.IntN(longest)))
		}
		if rng.IntN(3) > 0 {
			s = reftest.RandomScoreMods(rng, s)
			s.Causal, s.SinkTokens = true, 0
		}
		p := m.newProblem(t, rng, enginetest.Pick(rng, reftest.Normal, reftest.Peaked), options{kv: types[i%3], shape: &s, dense: rng.IntN(3) == 0})
		other := p.again(m, t, !p.dense, enginetest.Pick(rng, 1, 16, 24, 64))
		tile := enginetest.Pick(rng, 0, 0, 64, 512)
		var all []chunk
		for i, q := range p.Queries {
			all = append(all, chunk{i, 0, q})
		}
		run := func(p *problem, chunks []chunk, invariant bool) results {
			p.randomSchedule()
			p.geometry.Unfused, p.geometry.Invariant, p.geometry.TileTokens = false, invariant, tile
			m.Poison(t, &p.o)
			m.Poison(t, &p.lse)
			noError(t, plan.Build(p.geometry, p.chunked(chunks), p.rows))
			if invariant != (plan.form.kernel.needs&attn.BatchInvariance != 0) {
				t.Fatalf("%v goes to %v", p, plan.form.kernel.entries)
			}
			plan.spoil(t)
			noError(t, plan.Upload(m.Stream))
			if p.append { // in the first run; later the new tokens are in their pages
				noError(t, plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV))
				p.append = false
			}
			noError(t, plan.Run(m.Stream, p.operands()))
			m.Settle(t)
			return p.results(t)
		}
	compare:
		for _, invariant := range []bool{true, false} {
			first := run(p, all, invariant)
			p.check(t)
			if t.Failed() {
				t.Fatalf("invariant %v, LeanTiles of %d, schedule %+v", invariant, tile, p.geometry)
			}
			for n, chunks := range append(append(p.randomChunks(), other.randomChunks()...), all) {
				q := []*problem{p, other}[n%2]
				if n < 2 && other.append { // all keys must be present
					run(other, all, invariant)
				}
				r := run(q, chunks, invariant)
				for _, c := range chunks {
					for pos := c.from; pos < c.to; pos++ {
						if bytes.Equal(r.row(q, c.seq, pos), first.row(p, c.seq, pos)) {
							continue
						}
						if invariant {
							t.Fatalf("%v: query %d of sequence %d has other bits in %v, schedule %+v, LeanTiles of %d", q, pos, c.seq, chunks, q.geometry, tile)
						}
						differ++
						break compare
					}
				}
			}
		}
		other.bias, other.sinks = p.bias, p.sinks
		other.bias.Buffer, other.sinks.Buffer = nil, nil
		other.close(t)
		p.close(t)
	}
	if differ == 0 {
		t.Error("bits are the same without batch invariance, too")
	}
	noError(t, plan.Close())
}

// testInvariantGraph: a captured launch gives each step's rows the bits that they have alone, for any lengths.
func testInvariantGraph(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	const sequences = 4
	s := m.steps(t, rng, n, sequences, 0, longest, attn.Float16)
	first := s.all[0]
	for _, p := range s.all {
		p.geometry.Invariant = true
	}
	plan, alone := m.engine.NewPlan(), m.engine.NewPlan()
	noError(t, plan.Reserve(Capacity{Sequences: sequences, Rows: first.rows, Queries: 1, Pages: sequences * attn.Ceil(longest+1, first.pageTokens)}))
	s.load(t, 0)
	m.run(t, plan, first)
	m.replay(t, plan, s, func(i int, p *problem) {
		got := p.results(t)
		for j, queries := range p.Queries {
			for pos := range queries {
				noError(t, alone.Build(p.geometry, p.chunked([]chunk{{j, pos, pos + 1}}), p.rows))
				noError(t, alone.Upload(m.Stream))
				noError(t, alone.Run(m.Stream, p.operands()))
				m.Settle(t)
				if r := p.results(t); !bytes.Equal(r.row(p, j, pos), got.row(p, j, pos)) {
					t.Fatalf("step %d: sequence %d has other bits than alone: %v", i, j, p)
				}
			}
		}
	})
	first.close(t)
	noError(t, plan.Close())
	noError(t, alone.Close())
}

// testInvariantBatches: all rows of the first four sequences of a batch have the bits that they have in a batch of
// four, with LeanTiles of 2048 tokens, as in another library's test. `most` bounds the work of a trial.
func testInvariantBatches(t *testing.T, m *machine, lengths []int, most int) {
	rng := reftest.Rand(t)
	compared, differ := 0, 0
	for i, keys := range lengths {
		ran := 0
		for _, n := range []int{5, 12} {
			for _, group := range []int{1, 4, 8} {
				for _, dim := range []int{128, 256} {
					r := batch([]attn.DType{attn.Float16, attn.BFloat16}[i%2], n, 4*group, 4, dim, 1, keys, []int{1, 8, 16}[i%3])
					if r.cost() > most || m.Few(t) && ran > 0 && rng.IntN(2) == 0 {
						continue
					}
					ran++
					s := m.setUp(t, rng, r)
					for _, tile := range []int{2048, 0} {
						for _, invariant := range []bool{true, false} {
							s.geometry.Invariant, s.geometry.TileTokens = invariant, tile
							out, lse := s.run(t, s.seqs)
							s.check(t, rng, out, lse)
							few, fewLSE := s.run(t, s.seqs[:4])
							compared++
							for i, q := range s.seqs[:4] {
								row, size := q.Row*r.Heads, dim*s.kv.Size()
								if end := row + r.Heads; bytes.Equal(out[row*size:end*size], few[row*size:end*size]) && bytes.Equal(lse[row*4:end*4], fewLSE[row*4:end*4]) {
									continue
								}
								if differ++; invariant {
									t.Fatalf("%v: sequence %d has other bits in a batch of 4, LeanTiles of %d", r, i, tile)
								}
							}
						}
					}
					s.close(t)
				}
			}
		}
	}
	if compared == 0 || most == math.MaxInt && differ == 0 { // small trials may have whole output tiles in any batch
		t.Errorf("%d batches were compared, %d rows differ without batch invariance", compared, differ)
	}
}
