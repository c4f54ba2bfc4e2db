package attention

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// trial is an attention problem that may be too large for host memory, or for a reference of all its rows.
type trial struct {
	reftest.Shape
	kv           attn.DType // of all operands
	page         int        // tokens; 0: a sequence is one page
	spare        int        // pages without a sequence
	policy       lean.Policy
	workers      int
	append       bool    // the last keys of a sequence are appended
	size         float64 // of keys and values; 0: 1
	atol, rtol   float64 // of outputs, if tighter than the derived bound
	lseTolerance float64 // absolute, if tighter than the derived bound
}

func (r trial) String() string {
	lengths := fmt.Sprintf("q%v_k%v", r.Queries, r.Keys)
	if n := len(r.Keys); n > 4 {
		lengths = fmt.Sprintf("b%d_q%d..%d_k%d..%d", n, r.Queries[0], r.Queries[n-1], r.Keys[0], r.Keys[n-1])
	}
	causal := ""
	if r.Causal {
		causal = "_causal"
	}
	dims := fmt.Sprint(r.Dim)
	if r.latent() {
		dims = fmt.Sprintf("%d/%d", r.Dim, r.ValueDim)
	}
	return fmt.Sprintf("%v_h%d/%d_d%s_%s_p%d_%v%d%s", r.kv, r.Heads, r.KVHeads, dims, lengths, r.page, r.policy.Kind, r.policy.Splits, causal)
}

// latent reports whether the values are the first elements of their keys.
func (r *trial) latent() bool { return r.ValueDim != r.Dim }

// window is the length of the numbers that all rows come from. A row of keys, of values or of queries is a stretch of
// them. The row's number gives the beginning of its stretch.
const window = 1 << 16

// numbers has the numbers of rows, as stored and as float64.
type numbers struct {
	stored []byte
	real   []float64
}

func draw(rng *rand.Rand, d attn.DType, size float64) numbers {
	n := numbers{stored: make([]byte, window*d.Size()), real: make([]float64, window)}
	for i := range n.real {
		enginetest.Put(n.stored, i, d, size*rng.NormFloat64())
		n.real[i] = enginetest.Get(n.stored, i, d)
	}
	return n
}

// stretch returns the beginning of row number r of a kind.
func (r *setup) stretch(row, kind int) int {
	x := (uint64(row)*4 + uint64(kind) + r.seed) * 0x9e3779b97f4a7c15
	x = (x ^ x>>29) * 0xbf58476d1ce4e5b9
	return int((x ^ x>>32) % uint64(window-r.Dim))
}

// setup is a trial in a machine's memory.
type setup struct {
	trial
	m          *machine
	seed       uint64
	kvNumbers  numbers
	qNumbers   [2]numbers // of even heads, and of odd heads, which are peaked
	geometry   attn.Problem
	seqs       []attn.Sequence
	owner      [][2]int // of each page: its sequence, or -1, and its first token
	rows       int      // of queries
	k, v, q    gpu.Memory
	o, lse     gpu.Memory
	newK, newV gpu.Memory
	plan       *Plan
}

// cost returns about the work of a trial: products of queries and keys.
func (r *trial) cost() (n int) {
	for i, q := range r.Queries {
		n += (q + 1) * r.Keys[i] * r.Heads * r.Dim
	}
	return n
}

// pages lays out a trial's pages in random order.
func (r *setup) pages(rng *rand.Rand) {
	tokens := r.page
	if tokens == 0 {
		tokens = 1
		for _, n := range r.Keys {
			tokens = max(tokens, n)
		}
	}
	need := r.spare + 1
	for _, n := range r.Keys {
		need += attn.Ceil(n, tokens)
	}
	if need == 2 && r.page == 0 {
		need = 1 // one long sequence: half of the memory would be unassigned
	}
	free := rng.Perm(need)
	r.owner = make([][2]int, need)
	for i := range r.owner {
		r.owner[i][0] = -1
	}
	for i, n := range r.Keys {
		r.rows++ // a row without a sequence
		s := attn.Sequence{Row: r.rows, Queries: r.Queries[i], Keys: n}
		r.rows += s.Queries
		for j := range attn.Ceil(n, tokens) {
			s.Pages = append(s.Pages, int32(free[0]))
			r.owner[free[0]] = [2]int{i, j * tokens}
			free = free[1:]
		}
		r.seqs = append(r.seqs, s)
	}
	r.rows++
	d, dv := r.Dim, r.ValueDim
	at := attn.PageStrides{Page: r.KVHeads * tokens * d, Head: tokens * d, Row: d}
	pages := attn.Separate(r.kv, d, dv, at, at)
	if r.latent() {
		pages = latentPages(r.kv, d, dv)
		pages.Planes[0].At = at
	}
	r.geometry = attn.Problem{Heads: r.Heads, KVHeads: r.KVHeads, Dim: d, ValueDim: dv, Pages: pages, PageTokens: tokens, Scale: 1 / math.Sqrt(float64(d)), Mask: attn.Mask{Causal: r.Causal},
		Policy: r.policy, Workers: r.workers, Query: attn.Strides{Row: r.Heads * d, Head: d}, Out: attn.Strides{Row: r.Heads * dv, Head: dv}, LSE: attn.Strides{Row: r.Heads, Head: 1},
	}
}

// setUp makes a trial, with NaN in memory that must not be read.
func (m *machine) setUp(t testing.TB, rng *rand.Rand, r trial) *setup {
	t.Helper()
	s := &setup{trial: r, m: m, seed: rng.Uint64(), plan: m.engine.NewPlan()}
	if s.size == 0 {
		s.size = 1
	}
	s.kvNumbers = draw(rng, s.kv, s.size)
	s.qNumbers = [2]numbers{draw(rng, s.kv, 1), draw(rng, s.kv, 5/s.size)}
	s.pages(rng)
	length := len(s.owner) * s.geometry.Pages.Planes[0].At.Page
	state, err := m.Dev.Memory()
	noError(t, err)
	if need := int64(len(s.planes()) * length * s.kv.Size()); state.Free < need+need/8 {
		t.Skipf("%d bytes for keys and values, %d of memory free", need, state.Free)
	}
	for _, x := range s.planes() {
		b, err := m.Dev.NewBuffer(int64(length * s.kv.Size()))
		noError(t, err)
		*x = gpu.Memory{Buffer: b, DType: s.kv, Len: length}
	}
	s.fill(t, 0xff)
	q := enginetest.Poisoned(s.rows*s.Heads*s.Dim, s.kv)
	width, size := s.KVHeads*s.Dim, s.kv.Size()
	fresh := [2][]byte{enginetest.Poisoned(s.rows*width, s.kv), enginetest.Poisoned(s.rows*width, s.kv)}
	for _, seq := range s.seqs {
		for i := range seq.Queries {
			row := seq.Row + i
			for h := range s.Heads {
				at := row*s.Heads + h
				from := s.stretch(at, 2) * size
				copy(q[at*s.Dim*size:(at+1)*s.Dim*size], s.qNumbers[h%2].stored[from:])
			}
			for h := range s.KVHeads {
				for kind := 0; s.append && kind < len(s.planes()); kind++ {
					at := (row*width + h*s.Dim) * size
					from := s.stretch(s.keyRow(&seq, seq.Keys-seq.Queries+i, h), kind) * size
					copy(fresh[kind][at:at+s.Dim*size], s.kvNumbers.stored[from:])
				}
			}
		}
	}
	s.q = m.Put(t, q, s.kv)
	if s.append {
		s.newK = m.Put(t, fresh[0], s.kv)
		if !s.latent() {
			s.newV = m.Put(t, fresh[1], s.kv)
		}
	}
	s.o, s.lse = gpu.Memory{DType: s.kv, Len: s.rows * s.Heads * s.ValueDim}, gpu.Memory{DType: attn.Float32, Len: s.rows * s.Heads}
	s.poisonResults(t)
	return s
}

// planes returns the memory of the planes of pages.
func (r *setup) planes() []*gpu.Memory {
	if r.latent() {
		return []*gpu.Memory{&r.k}
	}
	return []*gpu.Memory{&r.k, &r.v}
}

// inPlanes returns the same memory as operands have it.
func (r *setup) inPlanes() attn.Memory[gpu.Memory] {
	if r.latent() {
		return attn.InPlanes(r.k)
	}
	return attn.InPlanes(r.k, r.v)
}

func (r *setup) poisonResults(t testing.TB) {
	t.Helper()
	r.m.Poison(t, &r.o)
	r.m.Poison(t, &r.lse)
}

// keyRow returns the row of memory that holds a key.
func (r *setup) keyRow(s *attn.Sequence, token, head int) int {
	g := &r.geometry
	return (int(s.Pages[token/g.PageTokens])*r.KVHeads+head)*g.PageTokens + token%g.PageTokens
}

// image writes rows [from, to) of keys (kind 0) or values (kind 1) as they are in memory. Unassigned rows, and before
// an append the new rows, have bytes dead.
func (r *setup) image(b []byte, from, to, kind int, dead byte, appended bool) {
	bytes, tokens := r.Dim*r.kv.Size(), r.geometry.PageTokens
	for row := from; row < to; row++ {
		dst := b[(row-from)*bytes : (row-from+1)*bytes]
		page := row / (r.KVHeads * tokens)
		seq, token := r.owner[page][0], r.owner[page][1]+row%tokens
		live := seq >= 0 && token < r.Keys[seq]
		if live && r.append && !appended {
			live = token < r.Keys[seq]-r.Queries[seq]
		}
		if live {
			copy(dst, r.kvNumbers.stored[r.stretch(row, kind)*r.kv.Size():])
			continue
		}
		for i := range dst {
			dst[i] = dead
		}
	}
}

// pieces calls f with stretches of the memory's rows and their images.
func (r *setup) pieces(kind int, dead byte, appended bool, f func(offset int64, image []byte)) {
	rows, bytes := r.k.Len/r.Dim, r.Dim*r.kv.Size()
	piece := max(min(rows, 64<<20/bytes), 1)
	b := make([]byte, piece*bytes)
	for from := 0; from < rows; from += piece {
		n := min(piece, rows-from)
		each := attn.Ceil(n, runtime.GOMAXPROCS(0))
		var wg sync.WaitGroup
		for at := 0; at < n; at += each {
			wg.Go(func() {
				r.image(b[at*bytes:], from+at, from+min(at+each, n), kind, dead, appended)
			})
		}
		wg.Wait()
		f(int64(from)*int64(bytes), b[:n*bytes])
	}
}

func (r *setup) fill(t testing.TB, dead byte) {
	t.Helper()
	for kind, x := range r.planes() {
		r.pieces(kind, dead, false, func(offset int64, image []byte) {
			noError(t, x.Buffer.Upload(x.Offset+offset, image))
		})
	}
}

// checkCache checks that an append copied the new rows, and wrote nothing else.
func (r *setup) checkCache(t testing.TB) {
	t.Helper()
	for kind, x := range r.planes() {
		r.pieces(kind, 0xff, true, func(offset int64, image []byte) {
			got := make([]byte, len(image))
			noError(t, x.Buffer.Download(got, x.Offset+offset))
			if !bytes.Equal(got, image) {
				t.Errorf("the cache differs from what was appended, operand %d, in the piece from byte %d on", kind, offset)
			}
		})
	}
}

// run runs the sequences seqs, the first of the trial.
func (r *setup) run(t testing.TB, seqs []attn.Sequence) (out, lse []byte) {
	t.Helper()
	r.poisonResults(t)
	noError(t, r.plan.Build(r.geometry, seqs, r.rows))
	r.plan.spoil(t)
	noError(t, r.plan.Upload(r.m.Stream))
	if r.append {
		noError(t, r.plan.Append(r.m.Stream, r.inPlanes(), r.newK, r.newV))
	}
	noError(t, r.plan.Run(r.m.Stream, &Operands{Q: r.q, Out: r.o, LSE: r.lse, Pages: r.inPlanes()}))
	r.m.Settle(t)
	return enginetest.Read(t, &r.o), enginetest.Read(t, &r.lse)
}

// sampled is a checked row in a head.
type sampled struct{ seq, pos, head int }

// samples returns all rows, or as many as time allows.
func (r *setup) samples(rng *rand.Rand) (all []sampled) {
	const most, elements = 600, 3 << 20
	for i, n := range r.Queries {
		for pos := range n {
			if pos > 40 && pos < n-40 && pos%97 != 0 {
				continue
			}
			for h := range r.Heads {
				all = append(all, sampled{i, pos, h})
			}
		}
	}
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	total := 0
	for i, s := range all {
		total += r.Visible(s.seq, s.pos) * r.Dim
		if i >= most || i >= 3 && total > elements {
			return all[:i]
		}
	}
	return all
}

// reference computes sampled rows, as a case with a sequence of one row and head for each.
func (r *setup) reference(samples []sampled) *reftest.Result {
	c := &reftest.Case{Shape: reftest.Shape{Heads: 1, KVHeads: 1, Dim: r.Dim, ValueDim: r.ValueDim, Scale: r.geometry.Scale}}
	for _, x := range samples {
		c.Queries, c.Keys = append(c.Queries, 1), append(c.Keys, r.Visible(x.seq, x.pos))
	}
	keys := c.KeyRows()
	c.Q, c.K, c.V = make([]float64, len(samples)*r.Dim), make([]float64, keys*r.Dim), make([]float64, keys*r.ValueDim)
	take := func(to []float64, i, dim int, n *numbers, row, kind int) {
		at := r.stretch(row, kind)
		copy(to[i*dim:(i+1)*dim], n.real[at:])
	}
	values := len(r.planes()) - 1
	var wg sync.WaitGroup
	at := 0
	for i, x := range samples {
		first := at
		at += c.Keys[i]
		wg.Go(func() {
			s := &r.seqs[x.seq]
			take(c.Q, i, r.Dim, &r.qNumbers[x.head%2], (s.Row+x.pos)*r.Heads+x.head, 2)
			for j := range c.Keys[i] {
				row := r.keyRow(s, j, x.head/(r.Heads/r.KVHeads))
				take(c.K, first+j, r.Dim, &r.kvNumbers, row, 0)
				take(c.V, first+j, r.ValueDim, &r.kvNumbers, row, values)
			}
		})
	}
	wg.Wait()
	p := problem{kv: r.kv, query: r.kv, out: r.kv}
	ref := c.Reference(p.precision())
	for i, o := range ref.O {
		if r.atol > 0 {
			ref.OBound[i] = min(ref.OBound[i], r.atol+r.rtol*math.Abs(o))
		}
	}
	for i := range ref.LSE {
		if r.lseTolerance > 0 {
			ref.LSEBound[i] = min(ref.LSEBound[i], r.lseTolerance)
		}
	}
	return ref
}

// check compares sampled rows with the reference. Other rows must be finite, or zero if no key is visible.
func (r *setup) check(t testing.TB, rng *rand.Rand, out, lse []byte) {
	t.Helper()
	samples := r.samples(rng)
	ref := r.reference(samples)
	at := func(i int) int { return (r.seqs[samples[i].seq].Row+samples[i].pos)*r.Heads + samples[i].head }
	if err := ref.CompareO(func(i, _, _, c int) float64 { return enginetest.Get(out, at(i)*r.ValueDim+c, r.kv) }); err != nil {
		t.Errorf("output: %v", err)
	}
	if err := ref.CompareLSE(func(i, _, _ int) float64 { return enginetest.Get(lse, at(i), attn.Float32) }); err != nil {
		t.Errorf("log-sum-exp: %v", err)
	}
	sees := make([]bool, r.rows)
	for i, s := range r.seqs {
		for pos := range s.Queries {
			sees[s.Row+pos] = r.Visible(i, pos) > 0
		}
	}
	for i := range r.rows * r.Heads {
		l := enginetest.Get(lse, i, attn.Float32)
		if math.IsInf(l, -1) == sees[i/r.Heads] || math.IsNaN(l) || math.IsInf(l, 1) {
			t.Fatalf("row %d, head %d: log-sum-exp %v", i/r.Heads, i%r.Heads, l)
		}
		for c := range r.ValueDim {
			if x := enginetest.Get(out, i*r.ValueDim+c, r.kv); math.IsNaN(x-x) || !sees[i/r.Heads] && x != 0 {
				t.Fatalf("row %d, head %d: output %v", i/r.Heads, i%r.Heads, x)
			}
		}
	}
}

func (r *setup) close(t testing.TB) {
	t.Helper()
	noError(t, r.plan.Close())
	for _, x := range []*gpu.Memory{&r.k, &r.v, &r.q, &r.o, &r.lse, &r.newK, &r.newV} {
		if x.Buffer != nil {
			noError(t, x.Buffer.Close())
		}
	}
}
