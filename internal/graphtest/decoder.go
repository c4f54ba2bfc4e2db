package graphtest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Place is the location of a test's caches and operands. The zero value is the host.
type Place struct {
	GPU   *device.GPU
	Real  bool // a real GPU: kernels for some head dims only, and tensor cores that round their operands
	There bool // q, k, v and the outputs are on the GPU, too
	Used  bool // a run has the rows that the step assigns to sequences, and no other rows

	ScoreMods reftest.Shape   // window, soft cap, slopes and sinks of decoders
	Layers    []reftest.Shape // per layer, if layers differ; also Causal and Scale

	Rotary *rope.Config // rotary embedding of q and k of decoders; nil: none
}

func (p Place) String() string {
	if p.GPU == nil {
		return "host"
	}
	return fmt.Sprintf("%v, operands there %v", p.GPU, p.There)
}

// Queries returns the element types of q.
func (p Place) Queries() []tensor.Dtype {
	if p.GPU == nil {
		return []tensor.Dtype{tensor.Float32, tensor.Float64}
	}
	return []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
}

// Precision returns the precision of attention with queries and outputs of type query, and keys and values of
// type kv.
func (p Place) Precision(query, kv tensor.Dtype) reftest.Precision {
	if query == tensor.Float64 {
		return reftest.Precision{Acc: reftest.Float64}
	}
	r := reftest.Precision{Acc: reftest.Float32, Out: Format(query)}
	switch {
	case !p.Real || kv == tensor.Float32:
	case query == kv: // tensor cores take weights in the keys' type
		r.P = Format(kv)
	case kv == la.BFloat16: // queries and weights are each a sum of two numbers
		r.P, r.Query = reftest.Float16, 0x1p-16
	case kv == la.Float16: // two parts with float16's exponents
		r.Least = 0x1p-39
	case kv == la.E4M3 || kv == tensor.Int8: // the same, relative to the largest scale of the values
		r.Least = 0x1p-35
	case kv == la.Q4: // queries, which are mixed, and weights of one part if that suffices
		if r.Least = 0x1p-35; query != tensor.Float32 {
			r.P, r.Query = reftest.Float16, 0x1p-11
		}
	}
	if p.GPU != nil && p.Rotary != nil { // a rotated key or query may round to a neighbour of the expected number
		r.Query = max(r.Query, 2*Format(kv).Unit(), 2*Format(query).Unit(), 0x1p-20)
	}
	return r
}

// Decoder is a graph with one CachedAttention node per layer of a cache. Tests set its inputs freely.
type Decoder struct {
	Place
	Cache                *la.Cache
	Step                 *la.Step
	Heads                int
	Query                tensor.Dtype
	causal               bool
	VM                   G.VM
	Q, K, V              []*G.Node // one per layer; no V if values are parts of keys
	OutValues, LSEValues []G.Value
}

// NewCache makes a cache, or ends the test.
func NewCache(t testing.TB, c la.CacheConfig) *la.Cache {
	t.Helper()
	cache, err := la.NewCache(c)
	if err != nil {
		t.Fatal(err)
	}
	return cache
}

// NewDecoder makes the graph of a decoder on a cache in host memory.
func NewDecoder(t testing.TB, c *la.Cache, tokens, heads int, query tensor.Dtype, causal bool, opts ...la.Option) *Decoder {
	t.Helper()
	return NewDecoderAt(t, Place{}, c, tokens, heads, query, causal, opts...)
}

// NewDecoderAt is NewDecoder for a cache in any Place.
func NewDecoderAt(t testing.TB, at Place, c *la.Cache, tokens, heads int, query tensor.Dtype, causal bool, opts ...la.Option) *Decoder {
	t.Helper()
	step, err := c.NewStep(tokens)
	if err != nil {
		t.Fatal(err)
	}
	cfg := c.Config()
	d := &Decoder{Place: at, Cache: c, Step: step, Heads: heads, Query: query, causal: causal}
	d.OutValues, d.LSEValues = make([]G.Value, cfg.Layers), make([]G.Value, cfg.Layers)
	g := G.NewGraph()
	for l := range cfg.Layers {
		matrix := func(name string, width int) *G.Node {
			return G.NewMatrix(g, query, G.WithShape(tokens, width), G.WithName(fmt.Sprint(name, l)))
		}
		d.Q = append(d.Q, matrix("q", heads*cfg.HeadDim))
		d.K = append(d.K, matrix("k", cfg.KVHeads*cfg.HeadDim))
		in := []*G.Node{d.Q[l], d.K[l]}
		if !cfg.ValuesInKeys {
			d.V = append(d.V, matrix("v", cfg.KVHeads*cfg.ValueDim))
			in = append(in, d.V[l])
		}
		if at.There {
			for i := range in {
				in[i] = Move(t, in[i], func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, at.GPU) })
			}
		}
		if at.Used {
			for i := range in {
				in[i] = Move(t, in[i], step.Rows)
			}
		}
		mods := d.Options(l)
		if sinks := d.shape(l).Sinks; sinks != nil {
			n := Input(g, fmt.Sprint("sinks", l), SinksOf(query, sinks))
			if at.There {
				n = Move(t, n, func(n *G.Node) (*G.Node, error) { return device.ToGPU(n, at.GPU) })
			}
			mods = append(mods, la.WithSinks(n))
		}
		in = append(in, nil)
		out, err := la.CachedAttention(in[0], in[1], in[2], step.Layer(l), append(slices.Clone(opts), mods...)...)
		if err != nil {
			t.Fatal(err)
		}
		lse := LogSumExp(t, out)
		if at.There {
			out, lse = Move(t, out, device.ToHost), Move(t, lse, device.ToHost)
		}
		G.Read(out, &d.OutValues[l])
		G.Read(lse, &d.LSEValues[l])
	}
	if err := rewrite.Check(g); err != nil {
		t.Fatal(err)
	}
	d.VM = NewTapeMachine(g)
	t.Cleanup(func() { d.VM.Close() })
	return d
}

// shape returns the score options of layer l.
func (d *Decoder) shape(l int) reftest.Shape {
	if d.Layers != nil {
		return d.Layers[l]
	}
	s := d.ScoreMods
	s.Causal = d.causal
	return s
}

// Options returns the options of layer l, without sinks.
func (d *Decoder) Options(l int) []la.Option {
	s := d.shape(l)
	o := scoreMods(s)
	if s.Causal {
		o = append(o, la.WithCausal())
	}
	if s.Scale != 0 {
		o = append(o, la.WithScale(s.Scale))
	}
	if d.Rotary != nil {
		o = append(o, la.WithRotary(*d.Rotary))
	}
	return o
}

// turn rotates the heads of the step's new tokens in the arithmetic of the CPU.
func (d *Decoder) turn(t testing.TB, x []float64, heads int, parts []Appended) {
	t.Helper()
	if d.Rotary == nil {
		return
	}
	c := d.turning()
	for _, p := range parts {
		for i := range p.Tokens {
			for range heads {
				Turn(t, x[:c.HeadDim], c, p.position(i), Format(d.Query))
				x = x[c.HeadDim:]
			}
		}
	}
}

// turning returns the rotary embedding of the cache's heads.
func (d *Decoder) turning() rope.Config {
	c := *d.Rotary
	c.HeadDim = d.Cache.Config().HeadDim
	return c
}

// mayRound reports whether a rotated key is so near to the middle of two numbers of 8 or 4 bits that a GPU, whose cosines have other last
// bits, may store the other one. The reference has no bound for such a key.
func (d *Decoder) mayRound(row []float64, store func([]float64)) bool {
	if c := d.Cache.Config(); d.GPU == nil || d.Rotary == nil || c.ValuesInKeys || !slices.Contains([]tensor.Dtype{la.E4M3, tensor.Int8, la.Q4}, c.DType) {
		return false
	}
	stored := slices.Clone(row)
	store(stored)
	for _, sign := range []float64{-1, 1} {
		other := slices.Clone(row)
		for block := range slices.Chunk(other, 32) {
			off := sign * 0x1p-19 * largest(block)
			for i := range block {
				block[i] += off
			}
		}
		store(other)
		for i := 0; i < len(other); i += 32 {
			block := stored[i:min(i+32, len(stored))]
			for j, x := range block {
				if math.Abs(other[i+j]-x) > 0x1p-16*largest(block) {
					return true
				}
			}
		}
	}
	return false
}

// largest returns the largest magnitude of some numbers.
func largest(of []float64) (most float64) {
	for _, x := range of {
		most = max(most, math.Abs(x))
	}
	return most
}

// RandomRotary returns a rotary embedding for heads of dim elements. dim is at least 2.
func RandomRotary(rng *rand.Rand, dim int) *rope.Config {
	c := &rope.Config{Interleaved: rng.IntN(2) == 0, Base: []float64{0, 5e5, 1.5}[rng.IntN(3)]}
	if dim%2 != 0 || rng.IntN(2) == 0 {
		c.Dim = 2 * (1 + rng.IntN(dim/2))
	}
	if rng.IntN(2) == 0 || c.Last {
		c.HeadDim = dim
	}
	c.Scaling = []rope.Scaling{
		nil, rope.Linear{Factor: 4}, rope.Llama3{Factor: 8, LowFrequency: 1, HighFrequency: 4, Context: 64}, rope.YaRN{Factor: 4, Context: 64},
	}[rng.IntN(4)]
	return c
}

// Turn rotates a head at a position, in the arithmetic of float64 if of is Float64, and of float32 otherwise.
func Turn(t testing.TB, head []float64, c rope.Config, position int, of reftest.Format) {
	t.Helper()
	round := func(x float64) float64 { return float64(float32(x)) }
	if of == reftest.Float64 {
		round = func(x float64) float64 { return x }
	}
	w, m, err := c.Frequencies()
	if err != nil {
		t.Fatal(err)
	}
	if c.Last {
		head = head[c.HeadDim-2*len(w):]
	}
	for i, radians := range w {
		first, second := i, i+len(w)
		if c.Interleaved {
			first, second = 2*i, 2*i+1
		}
		s, k := math.Sincos(attn.TurningOf(radians).Angle(position))
		s, k = round(m*s), round(m*k)
		a, b := head[first], head[second]
		head[first], head[second] = round(round(a*k)-round(b*s)), round(round(b*k)+round(a*s))
	}
}

// Move returns the node of a copy to or from a GPU.
func Move(t testing.TB, n *G.Node, to func(*G.Node) (*G.Node, error)) *G.Node {
	t.Helper()
	m, err := to(n)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Stored is a sequence and its expected content of the cache: per layer (tokens, KVHeads, dim), rounded as in
// the cache.
type Stored struct {
	Seq  *la.Sequence
	K, V [][]float64

	scales [2][][]float64 // per layer, of keys and of values: those of the pages that new tokens have begun, with ScalesByPage
}

// NewStored returns an empty sequence.
func NewStored(t testing.TB, c *la.Cache) *Stored {
	t.Helper()
	seq, err := c.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	n := c.Config().Layers
	return &Stored{Seq: seq, K: make([][]float64, n), V: make([][]float64, n)}
}

// Fork returns a fork of the sequence with a copy of the expected content.
func (s *Stored) Fork(t testing.TB) *Stored {
	t.Helper()
	seq, err := s.Seq.Fork()
	if err != nil {
		t.Fatal(err)
	}
	f := &Stored{Seq: seq}
	for l := range s.K {
		f.K, f.V = append(f.K, slices.Clone(s.K[l])), append(f.V, slices.Clone(s.V[l]))
	}
	for i := range s.scales {
		for _, x := range s.scales[i] {
			f.scales[i] = append(f.scales[i], slices.Clone(x))
		}
	}
	return f
}

// Truncate truncates the sequence and its expected content.
func (s *Stored) Truncate(t testing.TB, n int) {
	t.Helper()
	before := s.Seq.Len()
	if err := s.Seq.Truncate(n); err != nil {
		t.Fatal(err)
	}
	for l := range s.K {
		if before > 0 {
			s.K[l], s.V[l] = s.K[l][:len(s.K[l])/before*n], s.V[l][:len(s.V[l])/before*n]
		}
	}
}

// Appended is a number of new tokens of a sequence in a step.
type Appended struct {
	To     *Stored
	Tokens int
	Tree   attn.Tree // nil: a chain
}

// position returns the position of token i in its sequence.
func (p *Appended) position(i int) int {
	if p.Tree != nil {
		i = p.Tree.Depth(i)
	}
	return p.To.Seq.Len() + i
}

// StepCase is one step: the reference's cases of all layers, and the new tokens of the sequences.
type StepCase struct {
	Cases []*reftest.Case
	rows  int
	parts []Appended
}

// Set starts a step and binds inputs to the graph.
func (d *Decoder) Set(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...Appended) *StepCase {
	t.Helper()
	if err := d.Step.Set(appendsOf(parts)); err != nil {
		t.Fatal(err)
	}
	return d.Draw(t, rng, in, parts...)
}

func appendsOf(parts []Appended) (all []la.Append) {
	for _, p := range parts {
		all = append(all, la.Append{Seq: p.To.Seq, Tokens: p.Tokens, Parents: reftest.Parents(p.Tree)})
	}
	return all
}

// Draw binds inputs to the graph: new keys and values in the query's type, and NaN in unassigned rows.
func (d *Decoder) Draw(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...Appended) *StepCase {
	t.Helper()
	cfg := d.Cache.Config()
	u := &StepCase{parts: parts}
	for l := range d.Q {
		s := d.shape(l)
		s.Heads, s.KVHeads, s.Dim, s.ValueDim = d.Heads, cfg.KVHeads, cfg.HeadDim, cfg.ValueDim
		for _, p := range parts {
			s.Queries = append(s.Queries, p.Tokens)
			s.Keys = append(s.Keys, p.To.Seq.Len()+p.Tokens)
			s.Tree, s.Trees = s.Tree || p.Tree != nil, append(s.Trees, p.Tree)
		}
		u.rows = s.QueryRows()
		c := reftest.New(rng, s, in, Format(d.Query), Format(d.Query))
		q := slices.Clone(c.Q)
		if d.turn(t, c.Q, d.Heads, parts); d.mixes(l) {
			reftest.MixQ4(c.Q, reftest.Float64) // keys are mixed
			for i := range c.Q {
				c.Q[i] /= 32
			}
		}
		k := d.history(t, rng, c.K, l, 0, parts, func(s *Stored) []float64 { return s.K[l] })
		Let(t, d.Q[l], d.rows(q, d.Heads*cfg.HeadDim))
		Let(t, d.K[l], d.rows(k, cfg.KVHeads*cfg.HeadDim))
		if cfg.ValuesInKeys {
			for i := range len(c.V) / cfg.ValueDim {
				copy(c.V[i*cfg.ValueDim:][:cfg.ValueDim], c.K[i*cfg.HeadDim:])
			}
		} else {
			v := d.history(t, rng, c.V, l, 1, parts, func(s *Stored) []float64 { return s.V[l] })
			Let(t, d.V[l], d.rows(v, cfg.KVHeads*cfg.ValueDim))
		}
		u.Cases = append(u.Cases, c)
	}
	return u
}

// history writes the cache's content into the rows of earlier tokens, and rotates and rounds the rows of new
// tokens as the cache does. It returns the new rows as they were before. what is 0 for keys and 1 for values.
func (d *Decoder) history(t testing.TB, rng *rand.Rand, all []float64, layer, what int, parts []Appended, old func(*Stored) []float64) (fresh []float64) {
	c := d.Cache.Config()
	dim := []int{c.HeadDim, c.ValueDim}[what]
	width := c.KVHeads * dim
	for _, p := range parts {
		n := copy(all, old(p.To))
		x := all[n : n+p.Tokens*width]
		fresh = append(fresh, x...)
		if what == 0 {
			d.turn(t, x, c.KVHeads, []Appended{p})
		}
		for i := range len(x) / dim {
			row, token, head := x[i*dim:][:dim], p.To.Seq.Len()+i/c.KVHeads, i%c.KVHeads
			scale := func(row []float64, e reftest.Eight) float64 {
				switch c.Scales {
				case la.ScalesByHead:
					if given := [][]float32{c.KeyScales, c.ValueScales}[what]; given != nil {
						return float64(given[layer*c.KVHeads+head])
					}
					return 1
				case la.ScalesByPage:
					of := p.To.pageScale(what, layer, token/c.PageSize*c.KVHeads+head)
					if token%c.PageSize == 0 {
						*of = e.PageScale(row)
					}
					return *of
				}
				return e.Scale(row)
			}
			store := func(row []float64) {
				d.store(row, layer, what == 0, func(e reftest.Eight) float64 { return scale(row, e) })
			}
			if what == 0 {
				given := fresh[len(fresh)-len(x):][i*dim:][:dim]
				for d.mayRound(row, store) {
					for j := range given {
						given[j] = Format(d.Query).Round(given[j] * (1 + rng.Float64()/8))
					}
					copy(row, given)
					Turn(t, row, d.turning(), p.position(i/c.KVHeads), Format(d.Query))
				}
			}
			store(row)
		}
		all = all[n+len(x):]
	}
	return fresh
}

// pageScale returns where the scale of a page and head is noted.
func (s *Stored) pageScale(what, layer, at int) *float64 {
	for len(s.scales[what]) <= layer {
		s.scales[what] = append(s.scales[what], nil)
	}
	x := &s.scales[what][layer]
	for len(*x) <= at {
		*x = append(*x, math.NaN())
	}
	return &(*x)[at]
}

// mixes reports whether a layer's keys are mixed.
func (d *Decoder) mixes(layer int) bool {
	c := d.Cache.Config()
	return c.DType == la.Q4 && layer >= c.EdgeLayers && layer < c.Layers-c.EdgeLayers
}

// store rounds a key or a value of a head as the cache does. scale returns the scale of the row.
func (d *Decoder) store(row []float64, layer int, key bool, scale func(reftest.Eight) float64) {
	c := d.Cache.Config()
	e := map[tensor.Dtype]reftest.Eight{la.E4M3: reftest.E4M3, tensor.Int8: reftest.Int8}[c.DType]
	f, acc := Format(c.DType), Format(d.Query)
	if d.GPU != nil {
		acc = reftest.Float32
	}
	switch {
	case layer < c.EdgeLayers || layer >= c.Layers-c.EdgeLayers:
		f = reftest.BFloat16
	case d.mixes(layer):
		reftest.StoreQ4(row, key, acc)
		return
	case e == reftest.NoEight:
	case c.ValuesInKeys:
		f = reftest.BFloat16
		for row = row[:]; len(row) > c.HeadDim-c.ValueDim; row = row[128:] {
			e.Store(row[:128], e.Scale(row[:128]), acc)
		}
	default:
		e.Store(row, scale(e), acc)
		return
	}
	for i, x := range row {
		row[i] = f.Round(x)
	}
}

// rows returns x as rows of the step. Missing rows are NaN.
func (d *Decoder) rows(x []float64, width int) *tensor.Dense {
	for len(x) < d.Step.Tokens()*width {
		x = append(x, math.NaN())
	}
	return TensorOf(d.Query, x, d.Step.Tokens(), width)
}

// Run runs the graph and compares every layer with the reference.
func (d *Decoder) Run(t testing.TB, u *StepCase) {
	t.Helper()
	if d.Used { // Read would copy into values of other shapes
		clear(d.OutValues)
		clear(d.LSEValues)
	}
	Again(t, d.VM)
	d.checkRows(t, u)
	for l, c := range u.Cases {
		kv := d.Cache.Config().DType
		if kv == la.E4M3 && d.Cache.Config().ValuesInKeys {
			kv = la.BFloat16 // what kernels make of it
		}
		want := c.Reference(d.Precision(d.Query, kv))
		if err := d.Compare(t, l, u, want); err != nil {
			t.Fatalf("layer %d, %v: %v", l, c.Shape, err)
		}
	}
}

// checkRows checks the positions and last rows that the step reports.
func (d *Decoder) checkRows(t testing.TB, u *StepCase) {
	t.Helper()
	var positions, last []int
	for _, p := range u.parts {
		for i := range p.Tokens {
			positions = append(positions, p.position(i))
		}
		last = append(last, len(positions)-1)
	}
	positions = append(positions, make([]int, d.Step.Tokens()-len(positions))...)
	if p, l := d.Step.Positions(), d.Step.Last(); !slices.Equal(p, positions) || !slices.Equal(l, last) {
		t.Fatalf("positions %v, last rows %v; want %v, %v", p, l, positions, last)
	}
}

// Compare compares a layer with the reference.
func (d *Decoder) Compare(t testing.TB, layer int, u *StepCase, want *reftest.Result) error {
	t.Helper()
	dv, rows := d.Cache.Config().ValueDim, d.Step.Tokens()
	if d.Used {
		rows = max(1, u.rows)
	}
	if got, want := d.OutValues[layer].Shape(), (tensor.Shape{rows, d.Heads * dv}); !got.Eq(want) {
		return fmt.Errorf("output has shape %v, want %v", got, want)
	}
	if got, want := d.LSEValues[layer].Shape(), (tensor.Shape{rows, d.Heads}); !got.Eq(want) {
		return fmt.Errorf("log-sum-exp has shape %v, want %v", got, want)
	}
	out, lse := Floats(t, d.OutValues[layer]), Floats(t, d.LSEValues[layer])
	first := make([]int, len(u.parts)+1)
	for i, p := range u.parts {
		first[i+1] = first[i] + p.Tokens
	}
	if err := want.CompareO(func(s, pos, h, i int) float64 { return out[((first[s]+pos)*d.Heads+h)*dv+i] }); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	if err := want.CompareLSE(func(s, pos, h int) float64 { return lse[(first[s]+pos)*d.Heads+h] }); err != nil {
		return fmt.Errorf("log-sum-exp: %w", err)
	}
	if i := slices.IndexFunc(out[u.rows*d.Heads*dv:], func(f float64) bool { return f != 0 }); i >= 0 {
		return fmt.Errorf("rows of nobody: element %d is not 0", i)
	}
	for i, x := range lse[u.rows*d.Heads:] {
		if sink := want.Sink(i % d.Heads); x != sink {
			return fmt.Errorf("rows of nobody: log-sum-exp %d is %v, want %v", i, x, sink)
		}
	}
	return nil
}

// Commit commits the step and updates the expected content of the cache.
func (d *Decoder) Commit(t testing.TB, u *StepCase) {
	t.Helper()
	if err := d.Step.Commit(); err != nil {
		t.Fatal(err)
	}
	d.note(u)
}

// note adds a step's tokens to the expected content of the cache.
func (d *Decoder) note(u *StepCase) {
	cfg := d.Cache.Config()
	for l, c := range u.Cases {
		at := 0
		for i, p := range u.parts {
			n := c.Keys[i]
			wk, wv := cfg.KVHeads*cfg.HeadDim, cfg.KVHeads*cfg.ValueDim
			p.To.K[l] = slices.Clone(c.K[at*wk : (at+n)*wk])
			p.To.V[l] = slices.Clone(c.V[at*wv : (at+n)*wv])
			at += n
		}
	}
}

// Do runs and commits a whole step.
func (d *Decoder) Do(t testing.TB, rng *rand.Rand, in reftest.Inputs, parts ...Appended) {
	t.Helper()
	var u *StepCase
	err := d.Step.Run(appendsOf(parts), func() error {
		u = d.Draw(t, rng, in, parts...)
		d.Run(t, u)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	d.note(u)
}

// Bits returns the bits of all outputs.
func (d *Decoder) Bits(t testing.TB) []uint64 {
	t.Helper()
	var all []uint64
	for l := range d.OutValues {
		all = append(append(all, Bits(t, d.OutValues[l])...), Bits(t, d.LSEValues[l])...)
	}
	return all
}

// Schedule returns a schedule that the Place supports. turn selects the schedule.
func (at Place) Schedule(turn int) la.Schedule {
	if at.Real && turn%4 == 3 {
		return la.Unfused
	}
	return Schedules[turn%4%3]
}

// HasKernel reports whether a GPU supports a shape.
func (p Place) HasKernel(s reftest.Shape) bool {
	return !p.Real || s.Dim == s.ValueDim && slices.Contains([]int{64, 80, 96, 128, 256}, s.Dim)
}

// Schedules holds one schedule of each kind.
var Schedules = []la.Schedule{la.StreamK, la.FixedSplit(3), la.PerHead}
