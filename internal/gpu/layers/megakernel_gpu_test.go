package layers

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/choose"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// stack is the layers of a decode step, as nodes would queue them: of each block
// q, k and v, attention, its projection, and two layers behind each other, with
// residuals and norms.
type stack struct {
	m       *machine
	d       *Engine
	plan    *attention.Plan
	rows    int
	x       gpu.Memory
	front   []*Gather // one, or two of which the second one adds
	ops     []stackOp
	back    *Samples // nil: none
	kv      attn.DType
	outs    []gpu.Memory // of all layers, in order
	cache   []gpu.Memory
	all     []*cuda.Buffer
	bytes   int                     // of weights, keys and values
	set     func(t testing.TB)      // builds the plan, as each step does
	problem attn.Problem            // of attention
	group   int                     // columns of a group of the last packed weights
	numbers map[*Linear][][]float64 // of packed weights of each part, if they matter
	sizes   map[*Linear][][]float64 // the magnitudes that they are sums of
}

// stackOp is a linear layer, or attention.
type stackOp struct {
	linear     *Linear
	operands   attention.Operands
	newK, newV gpu.Memory
	rotated    gpu.Memory // queries, if there is a rotary embedding
}

type stackShape struct {
	rows, blocks, heads, kvHeads, dim, inner, vocabulary, pageTokens int
	keys                                                             []int // of each row's sequence; 0: it has none
	kv                                                               attn.DType
	linear                                                           bool          // no attention: what comes after it reads q
	tables                                                           int           // that x is gathered from: 0, 1 or 2
	choose                                                           bool          // tokens, of logits
	nobody                                                           bool          // the last row's id is not in the table
	gelu                                                             bool          // instead of ReLU
	round                                                            bool          // layers may round x
	llama                                                            bool          // blocks of Llama's shape: norms by the root mean square, gated units, a rotary embedding
	packed                                                           weight.Format // of weights of blocks, if they have 8 or 4 bits
	packedHead                                                       bool          // the head's, too
}

// newStack makes one. rng nil: the numbers do not matter.
func newStack(t testing.TB, m *machine, d *Engine, rng *rand.Rand, sh stackShape) *stack {
	s := &stack{m: m, d: d, plan: m.engine.NewPlan(), rows: sh.rows, kv: sh.kv}
	keep := func(x gpu.Memory) gpu.Memory {
		s.all = append(s.all, x.Buffer)
		return x
	}
	random := func(d attn.DType, n int, scale float64) gpu.Memory {
		if rng != nil {
			return keep(m.random(t, rng, d, n, scale).Memory)
		}
		b, err := m.Dev.NewBuffer(int64(n * d.Size()))
		noError(t, err)
		noError(t, b.Set(0, 0x11, b.Len()))
		return keep(gpu.Memory{Buffer: b, DType: d, Len: n})
	}
	out := func(n int) gpu.Memory {
		y := keep(m.empty(t, n))
		s.outs = append(s.outs, y)
		return y
	}
	hidden, kvWidth := sh.heads*sh.dim, sh.kvHeads*sh.dim
	var seqs []attn.Sequence
	pages := 0
	for row, keys := range sh.keys {
		if keys == 0 {
			continue
		}
		q := attn.Sequence{Row: row, Queries: 1, Keys: keys}
		for range attn.Ceil(keys, sh.pageTokens) {
			q.Pages = append(q.Pages, int32(pages))
			pages++
		}
		seqs = append(seqs, q)
		s.bytes += 2 * keys * kvWidth * sh.kv.Size() * sh.blocks
	}
	if rng != nil {
		names := rng.Perm(pages)
		for i := range seqs {
			for j := range seqs[i].Pages {
				seqs[i].Pages[j] = int32(names[seqs[i].Pages[j]])
			}
		}
	}
	key := attn.PageStrides{Page: sh.pageTokens * kvWidth, Head: sh.pageTokens * sh.dim, Row: sh.dim}
	g := attn.Problem{
		Heads: sh.heads, KVHeads: sh.kvHeads, Dim: sh.dim, ValueDim: sh.dim, Pages: attn.Separate(sh.kv, sh.dim, sh.dim, key, key), Scale: 1 / math.Sqrt(float64(sh.dim)), Mask: attn.Mask{Causal: true},
		PageTokens: sh.pageTokens,
		Query:      attn.Strides{Row: hidden, Head: sh.dim}, Out: attn.Strides{Row: hidden, Head: sh.dim},
	}
	if sh.llama {
		radians := make([]float64, sh.dim/2)
		for i := range radians {
			radians[i] = math.Pow(1e4, -2*float64(i)/float64(sh.dim))
		}
		g.Rotary = attn.Rotary{HeadDim: sh.dim, Factor: 1.25, Turns: attn.TurningsOf(radians)}
	}
	s.problem = g
	s.set = func(t testing.TB) {
		t.Helper()
		noError(t, s.plan.Build(g, seqs, sh.rows))
		noError(t, s.plan.Upload(m.Stream))
	}
	s.set(t)

	var x, none gpu.Memory
	s.numbers, s.sizes = map[*Linear][][]float64{}, map[*Linear][][]float64{}
	packs := func(o *Linear, f weight.Format, out int) LinearPart {
		if rng == nil {
			p, err := weight.Packing(&weight.Matrix{Format: f, Len: out * o.In}, o.In)
			noError(t, err)
			s.bytes += p.Bytes
			return LinearPart{Packed: &p, W: random(attn.Float32, p.Bytes/4, 1)}
		}
		w, size := narrowMatrix(rng, f, out, o.In, false)
		for len(o.Parts) > 0 && w.Group != s.group { // all parts have the same
			w, size = narrowMatrix(rng, f, out, o.In, false)
		}
		s.group = w.Group
		p, memory := m.pack(t, &w, o.In)
		s.numbers[o], s.sizes[o] = append(s.numbers[o], narrowNumbers(&w, o.In)), append(s.sizes[o], size)
		return LinearPart{Packed: p, W: keep(memory)}
	}
	head := false
	linear := func(x gpu.Memory, in int, norm bool, f attn.Activation, residual gpu.Memory, outs ...int) []gpu.Memory {
		dense := sh.packed == 0 || head && !sh.packedHead
		weights := func(o *Linear, n int) LinearPart {
			if !dense {
				return packs(o, sh.packed, n)
			}
			s.bytes += n * in * sh.kv.Size()
			return LinearPart{W: random(sh.kv, n*in, 1/math.Sqrt(float64(in)))}
		}
		o := &Linear{Rows: sh.rows, In: in, X: x, Activation: f, Residual: residual, Early: true, RoundX: sh.round}
		if norm {
			o.Norm = &Norm{Gamma: random(attn.Float32, in, 1), Eps: 1e-5, RMS: sh.llama, UnitOffset: sh.llama && len(s.ops)%2 == 0}
			if !sh.llama {
				o.Norm.Beta = random(attn.Float32, in, 0.1)
			}
		}
		var ys []gpu.Memory
		for _, n := range outs {
			p := weights(o, n)
			p.B, p.Y, p.Out = random(attn.Float32, n, 0.1), out(sh.rows*n), n
			o.Parts = append(o.Parts, p)
			ys = append(ys, p.Y)
		}
		if o.Gate = sh.llama && f != attn.NoActivation; o.Gate {
			n := outs[0]
			o.Parts[0].B = none
			p := weights(o, n)
			p.Out = n
			if !dense && n%narrowTile == 0 { // halves of one matrix
				p = packs(o, sh.packed, 2*n)
				s.bytes -= 2 * o.Parts[0].Packed.Bytes // instead of these
				if all := s.numbers[o]; all != nil {
					sizes := s.sizes[o]
					s.numbers[o], s.sizes[o] = [][]float64{all[2][:n*in], all[2][n*in:]}, [][]float64{sizes[2][:n*in], sizes[2][n*in:]}
				}
				o.Parts[0].W, o.Parts[0].Packed = p.W, p.Packed
				p.Out, p.First = n, n
			}
			o.Parts = append(o.Parts, p)
		}
		scratch, err := d.Scratch(o)
		noError(t, err)
		if scratch > 0 {
			o.Scratch = keep(m.empty(t, scratch))
		}
		s.ops = append(s.ops, stackOp{linear: o})
		return ys
	}
	for i := range sh.tables {
		const rows = 9
		ids := make([]int32, sh.rows)
		if rng != nil {
			for j := range ids {
				ids[j] = rng.Int32N(rows)
			}
		}
		if sh.nobody {
			ids[len(ids)-1] = rows
		}
		kind := sh.kv
		if i == 1 {
			kind = attn.Float32
		}
		s.front = append(s.front, &Gather{Rows: sh.rows, N: hidden, TableRows: rows, Table: random(kind, rows*hidden, 1), IDs: keep(m.Put(t, gpu.BytesOf(ids), attn.Float32)), Residual: x, Y: out(sh.rows * hidden)})
		x = s.front[i].Y
	}
	if sh.tables == 0 {
		x = random(attn.Float32, sh.rows*hidden, 1)
	}
	s.x = x
	activation := attn.ReLU
	switch {
	case sh.llama && !sh.gelu:
		activation = attn.SiLU
	case sh.llama:
		activation = attn.GELUTanh
	case sh.gelu:
		activation = attn.GELU
	}
	for range sh.blocks {
		qkv := linear(x, hidden, true, attn.NoActivation, none, hidden, kvWidth, kvWidth)
		a := qkv[0]
		n := max(pages, 1) * sh.pageTokens * kvWidth
		if !sh.linear {
			k, v := random(sh.kv, n, 1), random(sh.kv, n, 1)
			s.cache = append(s.cache, k, v)
			a = out(sh.rows * hidden)
			op := stackOp{operands: attention.Operands{Q: qkv[0], Out: a, Pages: attn.InPlanes(k, v)}, newK: qkv[1], newV: qkv[2]}
			if sh.llama {
				op.rotated = keep(m.empty(t, sh.rows*hidden))
			}
			s.ops = append(s.ops, op)
		}
		x = linear(a, hidden, false, attn.NoActivation, x, hidden)[0]
		h := linear(x, hidden, true, activation, none, sh.inner)[0]
		x = linear(h, sh.inner, false, attn.NoActivation, x, hidden)[0]
	}
	if head = true; sh.vocabulary > 0 {
		logits := linear(x, hidden, true, attn.NoActivation, none, sh.vocabulary)[0]
		if sh.choose {
			ids := keep(m.empty(t, sh.rows))
			s.back = &Samples{Logits: logits, Rows: sh.rows, Vocab: sh.vocabulary, Stride: sh.vocabulary, IDs: gpu.Bytes{Buffer: ids.Buffer, Offset: ids.Offset}}
		}
	}
	return s
}

// launches queues every layer by itself.
func (s *stack) launches() error { return s.launchesOf(true, true) }

// launchesOf queues linear layers, or attention, or both.
func (s *stack) launchesOf(linear, attention bool) error {
	return s.between(func() error { return s.layersOf(linear, attention) })
}

// between queues what there is before and behind the layers too.
func (s *stack) between(layers func() error) error {
	for _, o := range s.front {
		if err := s.d.Gather(s.m.Stream, o); err != nil {
			return err
		}
	}
	if err := layers(); err != nil {
		return err
	}
	if s.back == nil {
		return nil
	}
	return s.d.Sampler.Run(s.m.Stream, s.back)
}

func (s *stack) layersOf(linear, attention bool) error {
	for i := range s.ops {
		o := &s.ops[i]
		if o.linear != nil && !linear || o.linear == nil && !attention {
			continue
		}
		if o.linear != nil {
			if err := s.d.Linear(s.m.Stream, o.linear); err != nil {
				return err
			}
			continue
		}
		if err := s.attend(o); err != nil {
			return err
		}
	}
	return nil
}

// attend queues the launches of attention.
func (s *stack) attend(o *stackOp) error {
	p := &o.operands
	if o.rotated.Buffer == nil {
		if err := s.plan.Append(s.m.Stream, p.Pages, o.newK, o.newV); err != nil {
			return err
		}
		return s.plan.Run(s.m.Stream, p)
	}
	if err := s.plan.AppendRotated(s.m.Stream, p.Pages, o.newK, o.newV, p.Q, o.rotated, 0); err != nil {
		return err
	}
	rotated := *p
	rotated.Q = o.rotated
	return s.plan.Run(s.m.Stream, &rotated)
}

// megakernel takes all layers.
func (s *stack) megakernel(t testing.TB) *Megakernel {
	c := s.d.NewMegakernel()
	if c == nil {
		t.Skip("no megakernels on this GPU")
	}
	if len(s.front) > 0 {
		g := s.d.NewGathers(s.front[0])
		for _, o := range s.front[1:] {
			if !g.Then(o) {
				t.Fatal("a second table was not taken")
			}
		}
		if !c.Gather(g) {
			t.Fatal("rows of tables were not taken")
		}
	}
	for i := range s.ops {
		o := &s.ops[i]
		var taken bool
		if o.linear != nil {
			taken = c.Linear(o.linear)
		} else {
			taken = c.Attend(s.plan, &o.operands, o.newK, o.newV, o.rotated)
		}
		if !taken {
			t.Fatalf("layer %d was not taken", i)
		}
	}
	if s.back != nil && !c.Choose(s.back) {
		t.Fatal("the choice was not taken")
	}
	return c
}

// projected queues the layers of a batch as a recording does: the launches that make new
// keys and values store them.
func (s *stack) projected(t testing.TB) error {
	return s.between(func() error { return s.layersProjected(t) })
}

func (s *stack) layersProjected(t testing.TB) error {
	for i := range s.ops {
		o := &s.ops[i]
		if o.linear == nil {
			queue := func() error { return s.plan.Run(s.m.Stream, &o.operands) }
			if o.rotated.Buffer != nil {
				queue = func() error { return s.attend(o) }
			}
			if err := queue(); err != nil {
				return err
			}
			continue
		}
		p := s.d.NewProjection(o.linear)
		if (p == nil) != (len(o.linear.Parts) == 1 || o.linear.Gate) {
			t.Fatalf("layer %d has %d parts, and is a projection: %v", i, len(o.linear.Parts), p != nil)
		}
		if p == nil {
			if err := s.d.Linear(s.m.Stream, o.linear); err != nil {
				return err
			}
			continue
		}
		if next := &s.ops[i+1]; next.linear == nil && p.Append(s.plan, next.operands.Pages, next.newK, next.newV) == (next.rotated.Buffer != nil) {
			t.Fatalf("the append of layer %d was not taken", i)
		}
		if err := p.Queue(s.m.Stream); err != nil {
			return err
		}
	}
	return nil
}

// captured makes a graph of the megakernel, or of a batch's launches, which is none.
func (s *stack) captured(t testing.TB) (c *Megakernel, g *cuda.Graph) {
	queue := func() error { return s.projected(t) }
	if s.rows <= s.d.megakernelRows(weight.Dense(s.kv)) {
		c = s.megakernel(t)
		queue = func() error { return c.Queue(s.m.Stream) }
	}
	g, err := s.m.Stream.Capture(queue)
	noError(t, err)
	if c != nil {
		noError(t, c.Upload())
		s.set(t)
	}
	return c, g
}

func (s *stack) close(t testing.TB) {
	noError(t, s.plan.Close())
	for _, b := range s.all {
		noError(t, b.Close())
	}
}

func (s *stack) poison(t testing.TB) {
	for i := range s.outs {
		noError(t, s.outs[i].Buffer.Set(0, 0xff, s.outs[i].Buffer.Len()))
	}
	if s.back != nil {
		noError(t, s.back.IDs.Buffer.Set(0, 0xaa, s.back.IDs.Buffer.Len()))
	}
}

func TestGPUMegakernel(t *testing.T) {
	m, d := realDecoder(t)
	testMegakernel(t, m, d, enginetest.OrShort(24, 8), 5000, 8192, false, false)
}

func TestGPUMegakernelLinear(t *testing.T) {
	m, d := realDecoder(t)
	testMegakernel(t, m, d, enginetest.OrShort(24, 8), 5000, 8192, true, false)
}

// Blocks of Llama's shape.
func TestGPUMegakernelLlama(t *testing.T) {
	m, d := realDecoder(t)
	testMegakernel(t, m, d, enginetest.OrShort(24, 8), 5000, 8192, false, true)
	testMegakernel(t, m, d, enginetest.OrShort(8, 4), 5000, 8192, true, true)
}

func TestGPUProjection(t *testing.T) {
	m, d := realDecoder(t)
	testProjection(t, m, d, enginetest.OrShort(40, 6), 5000, 8192)
}

// Contexts that go round a thread block's ring many times, and not in whole rounds.
func TestGPUMegakernelLong(t *testing.T) {
	m, d := realDecoder(t)
	rng := reftest.Rand(t)
	for i, sh := range []stackShape{
		{rows: 1, heads: 8, kvHeads: 8, dim: 64, keys: []int{33001}},
		{rows: 2, heads: 16, kvHeads: 8, dim: 128, keys: []int{17003, 3}},
		{rows: 1, heads: 32, kvHeads: 8, dim: 64, keys: []int{33001}, llama: true},
	} {
		sh.blocks, sh.inner, sh.pageTokens, sh.kv = 2, 512, 64, attn.Float16
		testSplits(t, m, d, rng, fmt.Sprintf("case %d: %+v", i, sh), sh)
	}
}

// A megakernel that is launched again and again: copies and loads meet in every way that they can.
// Where the copy engine could overtake loads of a stage that was given back, one launch of some
// thousand had other bits than the others.
func TestGPUMegakernelRepeats(t *testing.T) {
	m, d := realDecoder(t)
	rng := reftest.Rand(t)
	defer func(least int) { d.leastPairs = least }(d.leastPairs)
	launches := 20000
	if testing.Short() {
		launches = 2000
	}
	for _, pairs := range []bool{false, true} {
		for _, sh := range []stackShape{
			{rows: 1, heads: 8, kvHeads: 8, dim: 64, keys: []int{33001}},
			{rows: 2, heads: 16, kvHeads: 8, dim: 128, keys: []int{17003, 3}},
			{rows: 2, heads: 16, kvHeads: 4, dim: 128, keys: []int{17003, 3}, llama: true},
		} {
			sh.blocks, sh.inner, sh.pageTokens, sh.kv = 1, 512, 64, attn.Float16
			if d.leastPairs = math.MaxInt; pairs {
				d.leastPairs = 0
			}
			s := newStack(t, m, d, rng, sh)
			megakernel, g := s.captured(t)
			var first [][]byte
			for launch := range launches {
				noError(t, m.Stream.Launch(g))
				m.Settle(t)
				for j := range s.outs {
					got := enginetest.Read(t, &s.outs[j])
					if launch == 0 {
						first = append(first, got)
					} else if !bytes.Equal(got, first[j]) {
						t.Fatalf("%+v, pairs %v: output %d of launch %d differs from the first one's", sh, pairs, j, launch)
					}
				}
			}
			noError(t, g.Close())
			noError(t, megakernel.Close())
			s.close(t)
		}
	}
}

// testMegakernel runs random stacks, with contexts of up to so many keys, and outputs of
// attention of up to so many elements.
func testMegakernel(t *testing.T, m *machine, d *Engine, cases, longest, widest int, linear, llama bool) {
	rng := reftest.Rand(t)
	defer d.withoutSkinny()()
	shared := d.info.SharedPerBlockMost
	defer func() { d.info.SharedPerBlockMost = shared }()
	start := rng.IntN(24) // few cases are others every time
	for i := start; i < start+cases; i++ {
		d.info.SharedPerBlockMost = min(shared, enginetest.Pick(rng, 180, 205, 227)<<10) // rings of several lengths
		dim, group := decodeDims[len(decodeDims)-1-i%len(decodeDims)], enginetest.Pick(rng, 1, 1, 2, 4)
		if llama {
			dim = llamaDims[i/2%len(llamaDims)]
		}
		kvHeads := min(enginetest.Pick(rng, 1, 2, 3, 12), widest/dim/group)
		inner := []int{1, 3, 8, 16, 17, 32, 33}
		if m.Few(t) { // the largest ones seldom
			inner = slices.Concat(inner[:5], inner[:5], inner)
		}
		sh := stackShape{
			rows: 1 + i%decodeRows, blocks: enginetest.Pick(rng, 1, 2, 3), heads: group * kvHeads, kvHeads: kvHeads, dim: dim,
			inner: 128 * enginetest.Pick(rng, inner...), vocabulary: enginetest.Pick(rng, 0, 7, 777), pageTokens: enginetest.Pick(rng, 16, 64, 128),
			kv: []attn.DType{attn.Float16, attn.BFloat16}[i%2], linear: linear, llama: llama,
		}
		for sh.heads*sh.dim%128 != 0 {
			sh.kvHeads, sh.heads = 2*sh.kvHeads, 2*sh.heads
		}
		sh.gelu = ((i+1)/2+i/decodeRows)%2 == 1 // of all rows and both types in turn
		sh.tables, sh.choose = i/2%3, sh.vocabulary > 0 && rng.IntN(4) > 0
		sh.nobody = sh.tables > 0 && rng.IntN(4) == 0
		for range sh.rows {
			sh.keys = append(sh.keys, min(enginetest.Pick(rng, 0, 1, 2, 63, 64, 65, 130, 1000, 1+rng.IntN(5000)), longest))
		}
		testSplits(t, m, d, rng, fmt.Sprintf("case %d: %+v", i, sh), sh)
	}
}

// testSplits is testStack of megakernels of blocks, and of pairs of them where there are any.
func testSplits(t *testing.T, m *machine, d *Engine, rng *rand.Rand, name string, sh stackShape) {
	defer func(least int) { d.leastPairs = least }(d.leastPairs)
	d.leastPairs = math.MaxInt
	testStack(t, m, d, rng, name, sh)
	if d.megakernels[optShape] == nil || d.megakernels[optShape].pairs[sh.kv] == nil {
		t.Log("no pairs on this GPU")
	} else if sh.dim == pairsDim || sh.linear {
		d.leastPairs = 0
		testStack(t, m, d, rng, name+", pairs", sh)
	}
}

// withoutSkinny leaves a megakernel all the rows that it can take, as on GPUs that have no
// kernels for a batch's; what it returns takes that back.
func (d *Engine) withoutSkinny() func() {
	all := d.skinny
	d.skinny = [weight.Formats]*skinnyKernels{}
	return func() { d.skinny = all }
}

// testProjection runs random stacks of a batch's rows.
func testProjection(t *testing.T, m *machine, d *Engine, cases, longest, widest int) {
	if d.skinny[attn.Float16] == nil {
		t.Skip("no kernels for the rows of a batch on this GPU")
	}
	rng := reftest.Rand(t)
	defer func(all []int) { d.splits, d.slower = all, 1 }(d.splits)
	for i := range cases {
		d.splits, d.slower = skinnySplits[:], math.Inf(1)
		rows := leastSkinny + rng.IntN(enginetest.Pick(rng, 16, 64, mostSkinny)-leastSkinny+1)
		round := i%3 == 1
		if round {
			rows = mostPrecise + 1 + rng.IntN(32)
			if rng.IntN(2) == 0 { // in tiles
				rows, d.slower = mostTogether+1+rng.IntN(mostSkinny-mostTogether), 0
			}
		}
		if i%3 == 2 { // that of the widest x; there may be one such cluster
			d.splits, rows = skinnySplits[len(skinnySplits)-1:], min(rows, mostSkinny/mostBeside)
		}
		kvHeads := enginetest.Pick(rng, 1, 2, 4, 12)
		sh := stackShape{
			rows: rows, blocks: enginetest.Pick(rng, 1, 2, 3), heads: kvHeads, kvHeads: kvHeads, dim: enginetest.Pick(rng, 64, 80, 128),
			inner: min(8*enginetest.Pick(rng, 1, 5, 16, 100, 257, 1024), widest), vocabulary: enginetest.Pick(rng, 0, 7, 777), pageTokens: enginetest.Pick(rng, 16, 64, 128),
			kv: []attn.DType{attn.Float16, attn.BFloat16}[i%2], linear: rng.IntN(2) == 0, tables: i % 3, gelu: i/2%2 == 1, llama: rng.IntN(2) == 0, round: round,
		}
		sh.choose = sh.vocabulary > 0 && i%2 == 0
		for range sh.rows {
			sh.keys = append(sh.keys, min(enginetest.Pick(rng, 0, 1, 2, 63, 64, 65, 130, 1000, 1+rng.IntN(5000)), longest))
		}
		testStack(t, m, d, rng, fmt.Sprintf("case %d: %+v", i, sh), sh)
	}
}

// testStack compares a megakernel with launches, and its bits in three runs. What is no megakernel
// has the bits of launches.
func testStack(t *testing.T, m *machine, d *Engine, rng *rand.Rand, name string, sh stackShape) {
	s := newStack(t, m, d, rng, sh)
	var before [][]byte
	for j := range s.cache {
		before = append(before, enginetest.Read(t, &s.cache[j]))
	}
	noError(t, s.launches())
	m.Settle(t)
	var want, wantCache [][]byte
	for j := range s.outs {
		want = append(want, enginetest.Read(t, &s.outs[j]))
	}
	for j := range s.cache {
		wantCache = append(wantCache, enginetest.Read(t, &s.cache[j]))
		noError(t, s.cache[j].Buffer.Upload(s.cache[j].Offset, before[j]))
	}
	megakernel, g := s.captured(t)
	var first [][]byte
	if megakernel == nil {
		first = want
	}
	for run := range 3 {
		s.poison(t)
		noError(t, m.Stream.Launch(g))
		m.Settle(t)
		for j := range s.outs {
			got := enginetest.Read(t, &s.outs[j])
			if run > 0 || megakernel == nil {
				if !bytes.Equal(got, first[j]) {
					t.Fatalf("%s: output %d of run %d differs from another run's", name, j, run)
				}
				continue
			}
			first = append(first, got)
			bound := 4e-3
			if sh.kv == attn.BFloat16 {
				bound = 3e-2
			}
			closeTo(t, fmt.Sprintf("%s: output %d", name, j), got, want[j], attn.Float32, bound)
		}
		s.checkChoice(t, name)
		s.checkPacked(t, name)
	}
	for j := range s.cache {
		got := enginetest.Read(t, &s.cache[j])
		if megakernel == nil && !bytes.Equal(got, wantCache[j]) {
			t.Fatalf("%s: cache %d differs from what launches store", name, j)
		}
		closeTo(t, fmt.Sprintf("%s: cache %d", name, j), got, wantCache[j], sh.kv, 3e-2)
	}
	noError(t, g.Close())
	if megakernel != nil {
		noError(t, megakernel.Close())
	}
	s.close(t)
}

// checkChoice: the ids are those of the logits that there are, and nothing else has been
// written.
func (s *stack) checkChoice(t testing.TB, name string) {
	t.Helper()
	if s.back == nil {
		return
	}
	ids := make([]byte, s.back.IDs.Buffer.Len())
	noError(t, s.back.IDs.Buffer.Download(ids, 0))
	logits := enginetest.Read(t, &s.back.Logits)
	for at := 0; at+4 <= len(ids); at += 4 {
		row, want := (at-int(s.back.IDs.Offset))/4, int32(-0x55555556)
		if at >= int(s.back.IDs.Offset) && row < s.rows {
			x := make([]float32, s.back.Vocab)
			for i := range x {
				x[i] = float32(enginetest.Get(logits, row*s.back.Vocab+i, attn.Float32))
			}
			want = int32(choose.Largest(x))
		}
		if got := int32(binary.LittleEndian.Uint32(ids[at:])); got != want {
			t.Fatalf("%s: row %d: token %d, want %d", name, row, got, want)
		}
	}
}

// closeTo compares numbers, with a bound that is a part of the largest.
func closeTo(t testing.TB, what string, got, want []byte, d attn.DType, bound float64) {
	t.Helper()
	n, top := len(want)/d.Size(), 0.0
	for i := range n {
		if x := math.Abs(enginetest.Get(want, i, d)); x > top {
			top = x
		}
	}
	for i := range n {
		if a, b := enginetest.Get(got, i, d), enginetest.Get(want, i, d); !(math.Abs(a-b) <= bound*top || math.IsNaN(a) && math.IsNaN(b)) {
			t.Fatalf("%s: element %d of %d: %v, want %v, the largest is %v", what, i, n, a, b, top)
		}
	}
}
