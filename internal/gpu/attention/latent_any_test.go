//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// latentShapes are widths of keys and of values in them.
var latentShapes = [][2]int{{24, 16}, {576, 512}, {72, 64}, {320, 256}, {40, 8}, {136, 128}, {208, 136}, {64, 56}}

// anyLatent draws a shape of number i with masks and score changes that the fast kernel does not have.
func anyLatent(rng *rand.Rand, i, longest int) reftest.Shape {
	d := latentShapes[i%len(latentShapes)]
	heads := []int{16, 1, 40, 5, 128, 20, 64, 3}[i/3%8]
	s := reftest.Shape{Heads: heads, KVHeads: 1, Dim: d[0], ValueDim: d[1], Mask: attn.Mask{Causal: rng.IntN(3) > 0}}
	if i%5 == 4 {
		s.Heads, s.KVHeads = 2*min(heads, 20), 2
	}
	s.Queries, s.Keys = []int{1}, []int{20 + rng.IntN(30)}
	for range enginetest.Pick(rng, 0, 1, 2, 4) {
		s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 2, 3, 4, 8, 11))
		s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 15, 16, 17, 63, 64, 65, 129, rng.IntN(longest)))
		if s.Dim > 400 { // the emulator takes long
			last := len(s.Queries) - 1
			s.Queries[last] = min(s.Queries[last], 1+64/s.Heads)
		}
	}
	switch i % 4 {
	case 0:
		s = reftest.RandomScoreMods(rng, s)
	case 1:
		s.Causal = true
		s = reftest.RandomSinkTokens(rng, s)
	case 2:
		s.Causal = true
		s = reftest.RandomTrees(rng, s)
	}
	if i%7 == 3 {
		s = reftest.RandomBias(rng, s, slices.Max(s.Keys)+1+rng.IntN(9))
	}
	return s
}

// testLatentAny runs random problems of all types, widths, masks, score changes, pages and schedules.
func testLatentAny(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	ran := map[string]int{}
	for i := range n {
		s := anyLatent(rng, i, longest)
		o := options{kv: gpu.Types[i%3], dense: rng.IntN(4) == 0, mixed: rng.IntN(5) == 0 && i%3 < 2, shape: &s}
		m.runLatent(t, rng, plan, i, o, ran)
	}
	noError(t, plan.Close())
	for _, k := range []string{"latent_any_f16", "latent_any_bf16", "latent_any_f32"} {
		if ran[k] == 0 && n > 8 {
			t.Errorf("no problem went to %s, but to %v", k, ran)
		}
	}
}

// testLatentAnyBits: the bits of a problem are the same on every run. Several thread blocks have parts of an output tile, of which one
// adds the sinks.
func testLatentAnyBits(t *testing.T, m *machine, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	shape := reftest.Shape{Heads: 40, KVHeads: 1, Dim: 72, ValueDim: 64, Queries: []int{1, 3, 0, 2}, Keys: []int{longest, longest / 2, 9, 31}, Mask: attn.Mask{Causal: true, Window: longest - 9}}
	for range shape.Heads {
		shape.Sinks = append(shape.Sinks, float64(float32(rng.NormFloat64())))
	}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.BFloat16})
	p.geometry.Policy = lean.Policy{Kind: lean.FixedSplit, Splits: 3}
	var first []byte
	for range 3 {
		m.Poison(t, &p.o)
		m.run(t, plan, p)
		p.check(t)
		if out := enginetest.Read(t, &p.o); first == nil {
			first = out
		} else if !bytes.Equal(out, first) {
			t.Error("another run has other bits")
		}
	}
	p.close(t)
	noError(t, plan.Close())
}

// testLatentPrefixes: latents that sequences share are attended to once, by all kernels for latents.
func testLatentPrefixes(t *testing.T, m *machine, n, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	shared := 0
	for i := range reftest.AtLeast(n, func() bool { return shared > 0 }) {
		d := [][2]int{{72, 64}, {576, 512}, {40, 32}}[i%3]
		shape := reftest.Shape{Heads: enginetest.Pick(rng, 3, 16, 20), KVHeads: 1, Dim: d[0], ValueDim: d[1], Mask: attn.Mask{Causal: true}}
		if i%3 == 2 {
			shape.Window = 1 + rng.IntN(longest)
		}
		for range 3 {
			shape.Queries = append(shape.Queries, 1+rng.IntN(2))
			shape.Keys = append(shape.Keys, longest/2+rng.IntN(longest/2))
		}
		p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: gpu.Types[rng.IntN(3)], forks: true, page: enginetest.Pick(rng, 1, 3, 16)})
		m.run(t, plan, p)
		if plan.form.sharing.on() {
			shared++
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d: %v, forks %v", i, p, p.forks)
		}
		p.close(t)
	}
	noError(t, plan.Close())
}

// grouped is a problem whose values have scales.
type grouped struct {
	*problem
	rest, scales gpu.Memory
	want         [3][]byte  // values, scales and the rest after the append
	scale        [2]float64 // the least and the greatest of elements that are not all 0
}

// newGrouped draws numbers and a layout, and copies them to the machine. What must not be read is NaN.
func (m *machine) newGrouped(t testing.TB, rng *rand.Rand, in reftest.Inputs, shape reftest.Shape, page int, queries ...attn.DType) *grouped {
	t.Helper()
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	if queries == nil {
		queries = types
	}
	query, newType := enginetest.Pick(rng, queries...), enginetest.Pick(rng, types...)
	n := &grouped{problem: &problem{rng: rng, kv: attn.E4M3, query: query, out: enginetest.Pick(rng, query, query, attn.Float32), pageTokens: page}}
	n.scale[0] = math.Inf(1)
	p := n.problem
	p.Case = reftest.New(rng, shape, in, enginetest.Format(query), reftest.Float16)
	v, rest := p.ValueDim, p.Dim-p.ValueDim
	p.geometry = attn.Problem{
		Heads: p.Heads, KVHeads: p.KVHeads, Dim: p.Dim, ValueDim: v, Scale: p.Scale, Mask: p.Mask, PageTokens: page, Pages: groupedPages(p.Dim, v).Packed(p.KVHeads, page),
		Score: attn.Score{Cap: p.SoftCap, Slopes: attn.NewSlopes(p.Slopes)},
		Query: attn.PackedRows(p.Heads, p.Dim), Out: attn.PackedRows(p.Heads, v), LSE: attn.PackedRows(p.Heads, 1),
	}
	g := &p.geometry
	p.putBias(m, t)
	p.putSinks(m, t)
	rows, need := 0, 0
	p.append = rng.IntN(2) == 0
	for i := range p.Queries {
		rows += rng.IntN(3)
		p.seqs = append(p.seqs, attn.Sequence{Row: rows, Queries: p.Queries[i], Keys: p.Keys[i], Tree: p.TreeOf(i)})
		rows += p.Queries[i]
		need += attn.Ceil(p.Keys[i], page)
		p.append = p.append && p.Keys[i] >= p.Queries[i]
	}
	p.rows = rows + 1 + rng.IntN(3)
	free := rng.Perm(need + 1 + rng.IntN(4))
	tokens := len(free) * p.KVHeads * page
	q, fresh := enginetest.Poisoned(p.rows*p.Heads*p.Dim, query), enginetest.Poisoned(p.rows*p.KVHeads*p.Dim, newType)
	n.want = [3][]byte{bytes.Repeat([]byte{0x7f}, tokens*v), enginetest.Poisoned(tokens*v/latentGroup, attn.Float32), enginetest.Poisoned(tokens*rest, attn.BFloat16)}
	pool := [3][]byte{slices.Clone(n.want[0]), slices.Clone(n.want[1]), slices.Clone(n.want[2])}
	for i := range p.seqs {
		s := &p.seqs[i]
		for range attn.Ceil(s.Keys, page) {
			s.Pages, free = append(s.Pages, int32(free[0])), free[1:]
		}
		for h := range p.KVHeads {
			for j := range s.Keys {
				key := p.Key(i, j, h)
				spreadRow(rng, key, newType)
				at := (int(s.Pages[j/page])*p.KVHeads+h)*page + j%page // the token's number
				token := j - (s.Keys - s.Queries)
				if p.append && token >= 0 {
					for c, x := range key {
						enginetest.Put(fresh, ((s.Row+token)*p.KVHeads+h)*p.Dim+c, newType, x)
					}
				}
				for k := range v / latentGroup {
					group := key[k*latentGroup:][:latentGroup]
					scale := reftest.E4M3.Scale(group)
					if scale > 0x1p-126 {
						n.scale[0], n.scale[1] = min(n.scale[0], scale), max(n.scale[1], scale)
					}
					for c, x := range group {
						x = reftest.E4M3.Round(reftest.Float32.Round(x / scale))
						n.want[0][at*v+k*latentGroup+c], group[c] = byte(half.E4M3FromFloat64(x)), x*scale
					}
					enginetest.Put(n.want[1], at*v/latentGroup+k, attn.Float32, scale)
				}
				for c, x := range key[v:] {
					key[v+c] = reftest.BFloat16.Round(x)
					enginetest.Put(n.want[2], at*rest+c, attn.BFloat16, key[v+c])
				}
				copy(p.Value(i, j, h), key)
				if p.append && token >= 0 || !p.Sees(i, max(p.Queries[i]-1, 0), j) && j < p.First(i, 0) && j >= p.SinkKeys(i, 0) {
					continue
				}
				for k, size := range [3]int{v, 4 * v / latentGroup, 2 * rest} {
					copy(pool[k][at*size:][:size], n.want[k][at*size:])
				}
			}
		}
		for pos := range s.Queries {
			for h := range p.Heads {
				for c, x := range p.Query(i, pos, h) {
					enginetest.Put(q, (s.Row+pos)*g.Query.Row+h*g.Query.Head+c, query, x)
				}
			}
		}
	}
	if !p.append {
		n.want = [3][]byte{slices.Clone(pool[0]), slices.Clone(pool[1]), slices.Clone(pool[2])}
	} else { // what is hidden stays as it was
		for i := range p.seqs {
			s := &p.seqs[i]
			for j := p.SinkKeys(i, 0); j < p.First(i, 0) && j < s.Keys-s.Queries; j++ {
				for h := range p.KVHeads {
					at := (int(s.Pages[j/page])*p.KVHeads+h)*page + j%page
					for k, size := range [3]int{v, 4 * v / latentGroup, 2 * rest} {
						copy(n.want[k][at*size:][:size], pool[k][at*size:])
					}
				}
			}
		}
	}
	p.q, p.k, p.newK = m.Put(t, q, query), m.Put(t, pool[0], attn.E4M3), m.Put(t, fresh, newType)
	n.scales = m.Put(t, pool[1], attn.Float32)
	if rest > 0 {
		n.rest = m.Put(t, pool[2], attn.BFloat16)
	}
	p.o, p.lse = gpu.Memory{DType: p.out, Len: p.rows * p.Heads * v}, gpu.Memory{DType: attn.Float32, Len: p.rows * p.Heads}
	m.Poison(t, &p.o)
	m.Poison(t, &p.lse)
	return n
}

func (n *grouped) pages() (to Pages) {
	to[0].Data, to[0].Scales, to[1].Data = n.k, n.scales, n.rest
	return to
}

func (n *grouped) run(t testing.TB, m *machine, plan *Plan) {
	t.Helper()
	noError(t, plan.Build(n.geometry, n.seqs, n.rows))
	plan.spoil(t)
	noError(t, plan.Upload(m.Stream))
	if n.append {
		noError(t, plan.Append(m.Stream, n.pages(), n.newK, gpu.Memory{}))
	}
	o := n.operands()
	o.Pages = n.pages()
	noError(t, plan.Run(m.Stream, o))
	m.Settle(t)
}

// check compares the output with the reference, and what is stored with the bits of the reference.
func (n *grouped) check(t testing.TB) {
	t.Helper()
	p := n.problem
	r := reftest.Precision{Acc: reftest.Float32, P: reftest.Float16, Query: 0x1p-16} // two parts of bfloat16
	if p.query == attn.BFloat16 && p.out == attn.BFloat16 {
		r.P, r.Query = reftest.BFloat16, 0
	}
	if p.out != attn.Float32 {
		r.Out = enginetest.Format(p.out)
	}
	if roundsQueries(&p.geometry, p.kv) && n.scale[1] > 0 { // weights of float16, 2^15 times as large, and scales beside twice the greatest
		r.Least = 0x1p-39 * n.scale[1] / n.scale[0]
	}
	p.compare(t, r)
	for i, x := range [...]gpu.Memory{p.k, n.scales, n.rest} {
		if x.Buffer != nil && n.want[i] != nil && !bytes.Equal(enginetest.Read(t, &x), n.want[i]) {
			t.Errorf("slab %d has other bytes than the CPU engine's", i)
		}
	}
}

func (n *grouped) free(t testing.TB) {
	t.Helper()
	noError(t, n.scales.Buffer.Close())
	if n.rest.Buffer != nil {
		noError(t, n.rest.Buffer.Close())
	}
	n.close(t)
}

// testLatentGrouped runs random problems of values with scales.
func testLatentGrouped(t *testing.T, m *machine, count, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i := range count {
		s := anyLatent(rng, i, longest)
		d := [][2]int{{136, 128}, {400, 384}, {128, 128}, {576, 512}, {320, 256}}[i%5]
		if s.Dim, s.ValueDim = d[0], d[1]; s.Dim > 300 {
			s.Heads = s.KVHeads * min(s.Heads/s.KVHeads, 20)
			if s.Slopes != nil || s.Sinks != nil || s.Bias.X != nil {
				s.Slopes, s.Sinks, s.Bias = nil, nil, reftest.Shape{}.Bias
			}
		}
		in := enginetest.Pick(rng, reftest.Normal, reftest.Peaked, reftest.Extreme, reftest.Constant)
		p := m.newGrouped(t, rng, in, s, enginetest.Pick(rng, 1, 3, 8, 12, 16, 64))
		p.randomSchedule()
		p.geometry.Unfused = false
		p.run(t, m, plan)
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, schedule %+v", i, in, p, p.geometry)
		}
		if k := plan.Kernels(); !slices.Equal(k, []string{"latent_any_e4m3"}) {
			t.Fatalf("%v ran", k)
		}
		p.free(t)
	}
	noError(t, plan.Close())
}

// testLatentFar: pages that begin behind 4 GiB. Nobody touches the memory before them.
func testLatentFar(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	far := func(x *gpu.Memory, before int64) {
		content := enginetest.Read(t, x)
		noError(t, x.Buffer.Close())
		b, err := m.Dev.NewBuffer(before + int64(len(content)))
		noError(t, err)
		noError(t, b.Upload(before, content))
		*x = gpu.Memory{Buffer: b, DType: x.DType, Len: int(b.Len()) / x.DType.Size()}
	}
	shift := func(p *problem, plane int) (pages int64) { // so many that the rows of the plane have 4 GiB
		x := &p.geometry.Pages.Planes[plane]
		pages = 4<<30/int64(x.At.Page*x.DType.Size()) + 1
		for i := range p.seqs {
			for j := range p.seqs[i].Pages {
				if page := &p.seqs[i].Pages[j]; *page < 1<<20 { // others are no pages
					*page += int32(pages)
				}
			}
		}
		return pages
	}
	plan := m.engine.NewPlan()
	shape := reftest.Shape{Heads: 17, KVHeads: 1, Dim: 144, ValueDim: 128, Queries: []int{1, 2}, Keys: []int{130, 40}, Mask: attn.Mask{Causal: true, Window: 60, SinkTokens: 5}}
	p := m.newProblem(t, rng, reftest.Normal, options{shape: &shape, kv: attn.Float32, page: 64})
	if !p.dense {
		far(&p.k, shift(p, 0)*int64(p.geometry.Pages.Planes[0].At.Page)*4)
	}
	m.run(t, plan, p)
	p.check(t)
	p.close(t)
	n := m.newGrouped(t, rng, reftest.Normal, shape, 64)
	before := shift(n.problem, 0)
	tokens := before * 64
	far(&n.k, tokens*128)
	far(&n.scales, tokens*4)
	far(&n.rest, tokens*16*2)
	n.want = [3][]byte{} // what is stored elsewhere is compared
	n.run(t, m, plan)
	n.check(t)
	n.free(t)
	noError(t, plan.Close())
}

func TestEmulatedLatentAny(t *testing.T) {
	m := emulatedGPU(t, 4)
	testLatentAny(t, m, reftest.Cases(t, 12, 60), 150)
	testLatentAnyBits(t, m, 200)
	testLatentGrouped(t, m, reftest.Cases(t, 5, 20), 120)
	testLatentPrefixes(t, m, reftest.Cases(t, 3, 8), 100)
	m.engine.info.SharedPerBlockMost = 101376 // of 8.6, 8.9 and 12.0
	testLatentAny(t, m, reftest.Cases(t, 4, 12), 120)
	testLatentGrouped(t, m, reftest.Cases(t, 1, 4), 120)
}

func TestGPULatentAny(t *testing.T) {
	m := realGPU(t)
	testLatentAny(t, m, enginetest.OrShort(400, 60), 9000)
	testLatentAnyBits(t, m, 9000)
	testLatentGrouped(t, m, enginetest.OrShort(200, 40), 5000)
	testLatentPrefixes(t, m, enginetest.OrShort(60, 12), 2000)
	testLatentFar(t, m)
}

// latentAny checks a launch of a kernel for keys that hold the values.
func (k *launches) latentAny(l *enginetest.Launch) {
	a := (*latentAnyParams)(unsafe.Pointer(&l.Arg[0]))
	kv := map[string]attn.DType{"f16": attn.Float16, "bf16": attn.BFloat16, "f32": attn.Float32, "e4m3": attn.E4M3}[l.Kernel[strings.LastIndex(l.Kernel, "_")+1:]]
	apart := strings.HasPrefix(l.Kernel, "any_")
	c, ok := k.e.latentAnyConfig(kv, int(a.dim), int(a.value), apart)
	switch {
	case !ok || l.Threads != 256 || l.Blocks != k.e.info.Multiprocessors || l.Shared != c.shared || int(a.stages) != c.slots || a.stages < 1 || a.stages > 6 || l.Shared > k.e.info.SharedPerBlockMost:
		k.t.Errorf("%d blocks of %d threads, %d bytes of shared memory, %d stages: %+v", l.Blocks, l.Threads, l.Shared, a.stages, c)
	case a.dim%8 != 0 || a.value%8 != 0 || a.dim > latentDim || a.value > latentValue || a.Rows < 1 || a.Rows > latentAnyRows || 1<<a.tileShift*latentAnyKeys < defaultTile:
		k.t.Errorf("keys of %d, values of %d, %d rows, LeanTiles of 2^%d chunks", a.dim, a.value, a.Rows, a.tileShift)
	case (kv == attn.E4M3) != (a.scales != 0) || (a.rest != 0) != (kv == attn.E4M3 && a.dim > a.value) || (a.values != a.keys) != apart:
		k.t.Errorf("planes %#x %#x %#x", a.keys, a.rest, a.scales)
	case a.keys%16 != 0 || a.rest%16 != 0 || a.scales%4 != 0 || a.partials%16 != 0 || a.Work%16 != 0 || a.seqs%16 != 0:
		k.t.Error("an address is no multiple of 16")
	}
}

// Launches suit each kind of GPU for which kernels differ.
func TestLaunchesLatentAny(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			rng, plan := reftest.Rand(t), m.engine.NewPlan()
			for i := range 16 {
				s := anyLatent(rng, i, 300)
				if i%4 == 3 {
					s.Dim, s.ValueDim = 576>>(i/4%2), 512>>(i/4%2)
					g := m.newGrouped(t, rng, reftest.Normal, s, 16)
					g.run(t, m, plan)
					g.free(t)
					continue
				}
				s.Window = 50 // the fast kernel has none
				if s.Tree {
					s.Window = 0
				}
				s.Causal = true
				p := m.newProblem(t, rng, reftest.Normal, options{kv: gpu.Types[i%3], shape: &s})
				m.run(t, plan, p)
				p.close(t)
			}
			noError(t, plan.Close())
		})
	}
}

// TestLatentAnyRefused: what no kernel takes is refused by name.
func TestLatentAnyRefused(t *testing.T) {
	for _, c := range []struct {
		text   string
		kind   error
		change func(g *attn.Problem)
	}{
		{"multiples of 8, up to 576 and 512", attn.ErrUnsupported, func(g *attn.Problem) { g.Dim, g.ValueDim = 580, 512 }},
		{"batch invariance", attn.ErrUnsupported, func(g *attn.Problem) { g.Invariant = true }},
		{"it takes", attn.ErrDType, func(g *attn.Problem) { g.Pages.Planes[0].DType = attn.Float64 }},
	} {
		g := attn.Problem{Heads: 4, KVHeads: 1, Dim: 72, ValueDim: 64, PageTokens: 16, Scale: 1}
		c.change(&g)
		of := g.Pages.Planes[0].DType
		if of == 0 {
			of = attn.Float16
		}
		g.Pages = latentPages(of, g.Dim, g.ValueDim).Packed(1, 16)
		g.Query, g.Out, g.LSE = attn.PackedRows(4, g.Dim), attn.PackedRows(4, g.ValueDim), attn.PackedRows(4, 1)
		for _, capability := range []int{80, 86, 90, 120} {
			if err := supports("op", &g, kernelsOf(capability)); !isError(err, c.kind) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%d: %v", capability, err)
			}
		}
	}
	for text, change := range map[string]func(f *attn.Format){
		"kernels take a plane of values with groups of 128": func(f *attn.Format) { f.Planes[0].Group = 64 },
		"kernels take one plane of bfloat16":                func(f *attn.Format) { f.Planes[1].DType = attn.Float16 },
		"a row must have the same number in both":           func(f *attn.Format) { f.Planes[1].At.Head += 16 },
	} {
		g := attn.Problem{Heads: 4, KVHeads: 1, Dim: 144, ValueDim: 128, PageTokens: 16, Scale: 1, Pages: groupedPages(144, 128).Packed(1, 16)}
		g.Query, g.Out, g.LSE = attn.PackedRows(4, g.Dim), attn.PackedRows(4, g.ValueDim), attn.PackedRows(4, 1)
		noError(t, supports("op", &g, kernelsOf(86)))
		change(&g.Pages)
		wantError(t, text, supports("op", &g, kernelsOf(86)), attn.ErrUnsupported, text)
	}
}

// Bad memory is refused without a launch.
func TestLatentAnyMemory(t *testing.T) {
	m, lib, _ := fakeGPU(t, 86, 5, 101376)
	shape := reftest.Shape{Heads: 4, KVHeads: 1, Dim: 144, ValueDim: 128, Queries: []int{1}, Keys: []int{100}}
	n := m.newGrouped(t, reftest.Rand(t), reftest.Normal, shape, 16)
	plan := m.engine.NewPlan()
	noError(t, plan.Build(n.geometry, n.seqs, n.rows))
	noError(t, plan.Upload(m.Stream))
	for _, c := range []struct {
		text   string
		kind   error
		change func(to *Pages)
	}{
		{"the scales of k", attn.ErrShape, func(to *Pages) { to[0].Scales.Len = 3 }},
		{"the rest of k", attn.ErrShape, func(to *Pages) { to[1].Data.Len = 9 }},
		{"the rest of k is float16", attn.ErrDType, func(to *Pages) { to[1].Data.DType = attn.Float16 }},
	} {
		o := n.operands()
		o.Pages = n.pages()
		c.change(&o.Pages)
		wantError(t, c.text, plan.Append(m.Stream, o.Pages, n.newK, gpu.Memory{}), c.kind, c.text)
		wantError(t, c.text, plan.Run(m.Stream, o), c.kind, c.text)
	}
	if m.Settle(t); strings.Contains(lib.Log(), "kernel") {
		t.Error("a kernel was launched")
	}
	n.free(t)
	noError(t, plan.Close())
}
