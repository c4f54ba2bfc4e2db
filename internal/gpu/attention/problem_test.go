package attention

import (
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

var (
	noError   = enginetest.NoError
	wantError = enginetest.WantError
	isError   = enginetest.IsError
)

// machine is the GPU or emulator of a test.
type machine struct {
	*enginetest.Device
	engine *Engine
}

// problem is a case in a machine's memory.
type problem struct {
	*reftest.Case
	rng            *rand.Rand
	kv, query, out attn.DType
	forks          []reftest.Fork // of the sequences; nil: no shared pages
	apart          bool           // values are not in keys
	sharesAll      bool           // new tokens are shared, too, and are not appended
	dense          bool           // operands are (batch, heads, tokens, dim); otherwise rows are tokens and keys are in pages
	pageTokens     int
	geometry       attn.Problem
	seqs           []attn.Sequence
	rows           int // argument of Build
	append         bool

	q, k, v, newK, newV, o, lse gpu.Memory
	bias, sinks                 gpu.Memory // no buffer: none
	tensors                     []Tensor   // of the variant
	pool                        [2][]byte  // k and v before the append
}

// options constrain the random choices of a problem.
type options struct {
	work    int // approximate limit of query rows x keys x dim
	longest int // keys
	shape   *reftest.Shape
	kv      attn.DType
	dense   bool
	page    int  // tokens of a page; 0: any
	forks   bool // sequences share pages of `page` tokens
	decode  *decode
	scored  bool // masks other than causal, and score modifications
	apart   bool // values of another width than keys are not in keys
	mixed   bool // mixed precision: queries have values of the keys' type, and any stored type
}

// decode has the sizes that are the same at every step of a decoding graph.
type decode struct{ pageTokens, rows, pages int }

// randomShape draws sizes that kernels support.
func randomShape(rng *rand.Rand, o options) reftest.Shape {
	for {
		s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 1, 2, 3), Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
		s.Dim = enginetest.Pick(rng, headDims[:]...)
		s.ValueDim = s.Dim
		s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 20)
		for range enginetest.Pick(rng, 1, 1, 2, 3, 5, 9) {
			s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 1, 1, 2, 3, 5, 17, 33))
			s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200+rng.IntN(200), rng.IntN(o.longest)))
		}
		work := 0
		for i, q := range s.Queries {
			work += q * s.Keys[i] * s.Heads * s.Dim
		}
		if work > o.work {
			continue
		}
		if o.scored {
			if s = reftest.RandomScoreMods(rng, s); rng.IntN(3) == 0 {
				s = reftest.RandomSinkTokens(rng, s)
			}
			if rng.IntN(3) == 0 {
				s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1+rng.IntN(9))
			}
		}
		return s
	}
}

// newProblem draws numbers and a layout, and copies them to the machine. Elements that must not be read are NaN. Block
// table entries that must not be used are invalid.
func (m *machine) newProblem(t testing.TB, rng *rand.Rand, in reftest.Inputs, o options) *problem {
	t.Helper()
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	p := &problem{rng: rng, kv: o.kv, dense: o.dense, apart: o.apart}
	p.query, p.out = p.kv, p.kv
	if o.decode == nil && rng.IntN(2) == 0 {
		p.query, p.out = enginetest.Pick(rng, types...), enginetest.Pick(rng, types...)
	}
	if o.shape == nil {
		s := randomShape(rng, o)
		o.shape = &s
	}
	if o.shape.ValueDim != o.shape.Dim && !o.apart && in == reftest.Huge {
		p.out = attn.Float32 // keys are values, and exceed float16
	}
	numbers := p.query
	if o.mixed && p.query != p.kv {
		p.query, numbers = attn.Float32, p.kv
	}
	p.Case = reftest.New(rng, *o.shape, in, enginetest.Format(numbers), enginetest.Format(p.kv))
	pages := attn.Separate(p.kv, p.Dim, p.ValueDim, attn.PageStrides{}, attn.PageStrides{})
	if p.latent() {
		pages = latentPages(p.kv, p.Dim, p.ValueDim)
		p.valuesInKeys()
	}
	p.geometry = attn.Problem{
		Heads: p.Heads, KVHeads: p.KVHeads, Dim: p.Dim, ValueDim: p.ValueDim, Pages: pages, Scale: p.Scale, Mask: p.Mask, Mixed: o.mixed,
		Score: attn.Score{Cap: p.SoftCap, Slopes: attn.NewSlopes(p.Slopes)},
	}
	if o.forks {
		p.forks, p.sharesAll = p.RandomForks(rng, o.page, !p.Causal && o.decode == nil), !p.Causal && o.decode == nil
	}
	p.poisonHidden()
	p.putBias(m, t)
	p.putSinks(m, t)
	p.putTensors(m, t)
	if p.dense {
		p.layDense(m, t)
	} else {
		p.layPaged(m, t, o.page, o.decode)
	}
	p.o.DType, p.lse.DType = p.out, attn.Float32
	for _, x := range []*gpu.Memory{&p.o, &p.lse} {
		m.Poison(t, x)
	}
	return p
}

// latentPages returns the format of keys whose first elements are the values.
func latentPages(kv attn.DType, dim, value int) attn.Format {
	return attn.Format{Planes: [attn.MostPlanes]attn.Plane{{DType: kv, Dim: dim}}, KeyPlanes: 1, Value: attn.Columns{Dim: value}}
}

// latent reports whether the values are the first elements of their keys.
func (p *problem) latent() bool { return p.ValueDim != p.Dim && !p.apart }

func (p *problem) valuesInKeys() {
	for i := range p.Queries {
		for j := range p.Keys[i] {
			for h := range p.KVHeads {
				copy(p.Value(i, j, h), p.Key(i, j, h))
			}
		}
	}
}

// putBias copies the bias to the machine, with NaN for invisible keys.
func (p *problem) putBias(m *machine, t testing.TB) {
	if p.Bias.X == nil {
		return
	}
	b := &p.Bias
	p.geometry.Bias = attn.Bias{Sequences: b.Sequences, Heads: b.Heads, Queries: b.Queries, Keys: b.Keys, Scale: b.Scale}
	x := make([]byte, 4*len(b.X))
	for i, f := range p.DenseBias() {
		enginetest.Put(x, i, attn.Float32, f)
	}
	p.bias = m.Put(t, x, attn.Float32)
}

// putSinks copies the sinks to the machine, with NaN before and after them.
func (p *problem) putSinks(m *machine, t testing.TB) {
	if p.Sinks == nil {
		return
	}
	p.geometry.Sinks = true
	x := enginetest.Poisoned(p.Heads+2, attn.Float32)
	for i, f := range p.Sinks {
		enginetest.Put(x, 1+i, attn.Float32, f)
	}
	p.sinks = m.Put(t, x, attn.Float32)
	p.sinks.Offset, p.sinks.Len = p.sinks.Offset+4, p.Heads
}

// poisonHidden sets keys and values to NaN that are in no query's window and are no sink tokens.
func (p *problem) poisonHidden() {
	for i := range p.Queries {
		for j := p.SinkKeys(i, 0); j < p.First(i, 0); j++ {
			for h := range p.KVHeads {
				for _, row := range [][]float64{p.Key(i, j, h), p.Value(i, j, h)} {
					for c := range row {
						row[c] = math.NaN()
					}
				}
			}
		}
	}
}

func (p *problem) String() string {
	return fmt.Sprintf("%v kv %v q %v out %v mixed %v pages of %d dense %v append %v", p.Shape, p.kv, p.query, p.out, p.geometry.Mixed, p.pageTokens, p.dense, p.append)
}

// layDense lays out the operands as Attend does: capacities larger than the lengths, one page a sequence.
func (p *problem) layDense(m *machine, t testing.TB) {
	queries, keys := 1, 1
	for i := range p.Queries {
		queries, keys = max(queries, p.Queries[i]), max(keys, p.Keys[i])
	}
	keys += p.rng.IntN(40)
	p.pageTokens = keys
	d, n := p.Dim, len(p.Queries)
	g := &p.geometry
	g.PageTokens = keys
	g.Query, g.LSE = attn.Strides{Row: d, Head: queries * d}, attn.Strides{Row: 1, Head: queries}
	g.Out = attn.Strides{Row: p.ValueDim, Head: queries * p.ValueDim}
	g.Pages = g.Pages.Packed(p.KVHeads, keys)
	encode := func(x []float64, to attn.DType) []byte {
		b := make([]byte, len(x)*to.Size())
		for i, f := range x {
			if math.IsNaN(f) {
				copy(b[i*to.Size():], enginetest.Poisoned(1, to))
			} else {
				enginetest.Put(b, i, to, f)
			}
		}
		return b
	}
	p.q = m.Put(t, encode(p.DenseQ(queries), p.query), p.query)
	p.k = m.Put(t, encode(p.DenseK(keys), p.kv), p.kv)
	p.v = m.Put(t, encode(p.DenseV(keys), p.kv), p.kv)
	for i := range n {
		p.seqs = append(p.seqs, attn.Sequence{Row: i * p.Heads * queries, Queries: p.Queries[i], Keys: p.Keys[i], Pages: []int32{int32(i)}, Tree: p.TreeOf(i)})
	}
	p.o.Len, p.lse.Len = n*p.Heads*queries*p.ValueDim, n*p.Heads*queries
}

// layPaged lays out the operands as a cache does: pages in random places, rows without a sequence between sequences,
// and new tokens to append.
func (p *problem) layPaged(m *machine, t testing.TB, page int, same *decode) {
	rng, d := p.rng, p.Dim
	p.pageTokens = enginetest.Pick(rng, 1, 2, 3, 5, 8, 16, 16, 24, 32, 48, 64, 128)
	if page > 0 {
		p.pageTokens = page
	}
	p.append = (rng.IntN(2) == 0 || same != nil) && !p.sharesAll
	if same != nil {
		p.pageTokens = same.pageTokens
	}
	g := &p.geometry
	g.PageTokens = p.pageTokens
	need, rows := 0, 0
	starts := make([]int, len(p.Queries))
	order := rng.Perm(len(p.Queries))
	for _, i := range order {
		rows += rng.IntN(3)
		starts[i] = rows
		rows += p.Queries[i]
		need += attn.Ceil(p.Keys[i], p.pageTokens)
		p.append = p.append && p.Keys[i] >= p.Queries[i]
	}
	p.rows = rows + rng.IntN(3)
	pages := need + 1 + rng.IntN(4)
	if same != nil {
		p.rows, pages = same.rows, same.pages
	}
	g.Query, g.LSE = attn.Strides{Row: p.Heads * d, Head: d}, attn.Strides{Row: p.Heads, Head: 1}
	g.Out = attn.Strides{Row: p.Heads * p.ValueDim, Head: p.ValueDim}
	g.Pages = g.Pages.Packed(p.KVHeads, p.pageTokens)

	free := rng.Perm(pages)
	q := enginetest.Poisoned(p.rows*p.Heads*d, p.query)
	newType := enginetest.Pick(rng, p.kv, attn.Float32)
	if same != nil {
		newType = p.kv
	}
	widths := [2]int{d, d}
	if p.apart {
		widths[1] = p.ValueDim
	}
	var fresh [2][]byte
	for i, width := range widths {
		fresh[i], p.pool[i] = enginetest.Poisoned(p.rows*p.KVHeads*width, newType), enginetest.Poisoned(pages*p.KVHeads*p.pageTokens*width, p.kv)
	}
	for i := range p.Queries {
		s := attn.Sequence{Row: starts[i], Queries: p.Queries[i], Keys: p.Keys[i], Tree: p.TreeOf(i)}
		if p.forks != nil {
			s.Pages = p.forkedPages(i)
		}
		for range attn.Ceil(s.Keys, p.pageTokens) - len(s.Pages) {
			s.Pages = append(s.Pages, int32(free[0]))
			free = free[1:]
		}
		for h := range p.KVHeads {
			for j := range s.Keys {
				if p.forks != nil && j < p.forks[i].Pages*p.pageTokens && j >= p.SinkKeys(i, 0) && j < p.First(i, 0) {
					continue // hidden from this sequence, for which it is NaN, and visible to the previous one
				}
				for which, row := range [][]float64{p.Key(i, j, h), p.Value(i, j, h)} {
					to, at, kind := p.pool[which], ((int(s.Pages[j/p.pageTokens])*p.KVHeads+h)*p.pageTokens+j%p.pageTokens)*widths[which], p.kv
					if token := j - (s.Keys - s.Queries); p.append && token >= 0 {
						to, at, kind = fresh[which], ((s.Row+token)*p.KVHeads+h)*widths[which], newType
					}
					for c, x := range row {
						enginetest.Put(to, at+c, kind, x)
					}
				}
			}
		}
		for range rng.IntN(3) {
			s.Pages = append(s.Pages, 2147480000)
		}
		for pos := range s.Queries {
			for h := range p.Heads {
				for c, x := range p.Query(i, pos, h) {
					enginetest.Put(q, (s.Row+pos)*g.Query.Row+h*g.Query.Head+c, p.query, x)
				}
			}
		}
		p.seqs = append(p.seqs, s)
	}
	if p.rows == 0 {
		q, fresh = enginetest.Poisoned(1, p.query), [2][]byte{enginetest.Poisoned(1, newType), enginetest.Poisoned(1, newType)}
	}
	p.q, p.k, p.v = m.Put(t, q, p.query), m.Put(t, p.pool[0], p.kv), m.Put(t, p.pool[1], p.kv)
	p.newK, p.newV = m.Put(t, fresh[0], newType), m.Put(t, fresh[1], newType)
	p.o.Len, p.lse.Len = p.rows*p.Heads*p.ValueDim, p.rows*p.Heads
}

func (p *problem) operands() *Operands {
	o := &Operands{Q: p.q, Out: p.o, LSE: p.lse, Pages: attn.InPlanes(p.k, p.v), Bias: p.bias, Sinks: p.sinks}
	copy(o.Tensors[:], p.tensors)
	return o
}

// queue queues the work of a built plan.
func (m *machine) queue(t testing.TB, plan *Plan, p *problem) {
	t.Helper()
	if p.append {
		noError(t, plan.Append(m.Stream, attn.InPlanes(p.k, p.v), p.newK, p.newV))
	}
	noError(t, plan.Run(m.Stream, p.operands()))
}

// run builds, uploads and runs a problem.
func (m *machine) run(t testing.TB, plan *Plan, p *problem) {
	t.Helper()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	plan.spoil(t)
	noError(t, plan.Upload(m.Stream))
	m.queue(t, plan, p)
	m.Settle(t)
}

// spoil fills the workspace with NaN.
func (p *Plan) spoil(t testing.TB) {
	t.Helper()
	noError(t, p.memory.partials.Set(0, 0xff, p.memory.partials.Len()))
	if parts := p.memory.parts; parts != nil { // without the counters
		counters := p.engine.counterBytes()
		noError(t, parts.Set(counters, 0xff, parts.Len()-counters))
	}
	if states := p.memory.states; states != nil {
		noError(t, states.Set(0, 0xff, states.Len()))
	}
	if tagged := p.memory.tagged; tagged != nil { // a launch number that no launch has
		noError(t, tagged.Set(0, 0xfe, tagged.Len()))
	}
}

// precision returns the precision of the kernels. If queries or outputs have another type than keys, queries and
// weights are sums of two parts. float32 always has two parts. Only the parts of bfloat16 have fewer bits than float32
// sums keep.
func (p *problem) precision() reftest.Precision {
	r := reftest.Precision{Acc: reftest.Float32}
	precise := (p.query != p.kv || p.out != p.kv) && !p.geometry.Mixed
	switch {
	case p.kv == attn.BFloat16 && precise:
		r.P, r.Query = reftest.Float16, 0x1p-16 // kernels/types.cuh
	case p.kv != attn.Float32 && !precise:
		r.P = enginetest.Format(p.kv)
	case p.kv == attn.Float16:
		r.Least = 0x1p-39 // two parts of float16, lifted by 15 binary places (kernels/types.cuh)
	}
	if p.out != attn.Float32 {
		r.Out = enginetest.Format(p.out)
	}
	return r
}

// check compares the output of a run with the reference.
func (p *problem) check(t testing.TB) {
	t.Helper()
	p.compare(t, p.precision())
}

// compare is check for kernels of another precision.
func (p *problem) compare(t testing.TB, of reftest.Precision) {
	t.Helper()
	ref := p.Reference(of)
	out, lse := enginetest.Read(t, &p.o), enginetest.Read(t, &p.lse)
	g := &p.geometry
	p.checkOutputs(t, ref, out)
	if err := ref.CompareLSE(func(seq, pos, head int) float64 {
		return enginetest.Get(lse, (p.seqs[seq].Row+pos)*g.LSE.Row+head*g.LSE.Head, attn.Float32)
	}); err != nil {
		t.Errorf("%v: log-sum-exp: %v", p, err)
	}
	p.checkOtherRows(t, out, lse)
}

// checkOutputs compares the outputs of sequences with the reference.
func (p *problem) checkOutputs(t testing.TB, ref *reftest.Result, out []byte) {
	t.Helper()
	g := &p.geometry
	if err := ref.CompareO(func(seq, pos, head, i int) float64 {
		return enginetest.Get(out, (p.seqs[seq].Row+pos)*g.Out.Row+head*g.Out.Head+i, p.out)
	}); err != nil {
		t.Errorf("%v: output: %v", p, err)
	}
}

// checkOtherRows checks rows without a sequence. They equal rows without visible keys if Build's rows include them, and
// are unchanged otherwise.
func (p *problem) checkOtherRows(t testing.TB, out, lse []byte) {
	t.Helper()
	g := &p.geometry
	mine := make([]bool, p.lse.Len)
	for i, s := range p.seqs {
		for pos := range p.Queries[i] {
			for h := range p.Heads {
				mine[(s.Row+pos)*g.LSE.Row+h*g.LSE.Head] = true
			}
		}
	}
	for i, m := range mine {
		if m {
			continue
		}
		for c := range p.ValueDim {
			x := enginetest.Get(out, i*p.ValueDim+c, p.out) // both have the same layout
			if p.rows > 0 && x != 0 || p.rows == 0 && !math.IsNaN(x) {
				t.Fatalf("%v: row %d of no sequence is %v", p, i, x)
			}
		}
		if x := enginetest.Get(lse, i, attn.Float32); p.rows > 0 && x != p.Sink(i%p.Heads) || p.rows == 0 && !math.IsNaN(x) {
			t.Fatalf("%v: log-sum-exp %d of no sequence is %v", p, i, x)
		}
	}
}

// close frees the memory of newProblem.
func (p *problem) close(t testing.TB) {
	t.Helper()
	for _, m := range []*gpu.Memory{&p.q, &p.k, &p.v, &p.newK, &p.newV, &p.o, &p.lse, &p.bias, &p.sinks} {
		if m.Buffer != nil {
			noError(t, m.Buffer.Close())
		}
	}
	for i := range p.tensors {
		noError(t, p.tensors[i].Memory.Buffer.Close())
	}
}

// forkedPages returns the pages that sequence i shares with the sequence that it was forked from.
func (p *problem) forkedPages(i int) []int32 {
	f := p.forks[i]
	if f.Pages == 0 {
		return nil
	}
	return slices.Clone(p.seqs[f.Of].Pages[:f.Pages])
}
