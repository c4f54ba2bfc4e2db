//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"bytes"
	"fmt"
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
	"gorgonia.org/leanattention/internal/reftest"
)

// fourProblem is a problem with keys and values of 4 bits.
type fourProblem struct {
	*problem
	want [2][]byte // keys and values after the append
}

// poisonedFour returns elements whose scale is NaN.
func poisonedFour(n int) []byte {
	nan := half.Q4{16: 0xc0, 17: 0x7f}
	return bytes.Repeat(nan[:], n)
}

// newFour draws numbers and a layout, and copies them to the machine. Elements that must not be read have NaN.
func (m *machine) newFour(t testing.TB, rng *rand.Rand, in reftest.Inputs, shape reftest.Shape, page int) *fourProblem {
	t.Helper()
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	query, newType := enginetest.Pick(rng, types...), enginetest.Pick(rng, types...)
	n := &fourProblem{problem: &problem{rng: rng, kv: attn.Q4, query: query, out: enginetest.Pick(rng, types...), pageTokens: page}}
	p := n.problem
	p.Case = reftest.New(rng, shape, in, enginetest.Format(query), enginetest.Format(newType))
	d := p.Dim
	p.geometry = attn.Problem{Heads: p.Heads, KVHeads: p.KVHeads, Dim: d, ValueDim: d, Scale: p.Scale, Mask: p.Mask, Score: attn.Score{Cap: p.SoftCap, Slopes: attn.NewSlopes(p.Slopes)}, PageTokens: page}
	p.putSinks(m, t)
	if rng.IntN(3) == 0 {
		p.forks = p.RandomForks(rng, page, false)
	}
	g := &p.geometry
	g.Pages = attn.Separate(attn.Q4, d, d, attn.PageStrides{}, attn.PageStrides{}).Packed(p.KVHeads, page)
	g.Pages.Planes[0].Mixed = true
	g.Query, g.Out, g.LSE = attn.PackedRows(p.Heads, d), attn.PackedRows(p.Heads, d), attn.PackedRows(p.Heads, 1)
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
	elements := g.Pages.Key().Elements()

	q := enginetest.Poisoned(p.rows*p.Heads*d, query)
	var fresh, pool [2][]byte
	there := [2]map[int][]float64{{}, {}} // rows by their place
	for i := range 2 {
		fresh[i] = enginetest.Poisoned(p.rows*p.KVHeads*d, newType)
		n.want[i] = poisonedFour(len(free) * p.KVHeads * page * elements)
		pool[i] = slices.Clone(n.want[i])
	}
	for i := range p.seqs {
		s := &p.seqs[i]
		if p.forks != nil {
			s.Pages = p.forkedPages(i)
		}
		for range attn.Ceil(s.Keys, page) - len(s.Pages) {
			s.Pages, free = append(s.Pages, int32(free[0])), free[1:]
		}
		for h := range p.KVHeads {
			for j := range s.Keys {
				if p.Queries[i] > 0 && j >= p.SinkKeys(i, 0) && j < p.First(i, 0) {
					continue // no query sees the key
				}
				for which, row := range [][]float64{p.Key(i, j, h), p.Value(i, j, h)} {
					at := g.Pages.Planes[which].At.Offset(int(s.Pages[j/page]), h, j%page) * 18
					if before := there[which][at]; before != nil { // of a sequence that shares the page
						copy(row, before)
						continue
					}
					there[which][at] = row
					spreadRow(rng, row, newType)
					token := j - (s.Keys - s.Queries)
					if p.append && token >= 0 {
						for c, x := range row {
							enginetest.Put(fresh[which], ((s.Row+token)*p.KVHeads+h)*d+c, newType, x)
						}
					}
					copy(n.want[which][at:], reftest.StoreQ4(row, which == 0, reftest.Float32))
					if !p.append || token < 0 {
						copy(pool[which][at:], n.want[which][at:][:18*elements])
					}
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
	reftest.MixQ4(p.Q, reftest.Float64) // as keys are
	for i := range p.Q {
		p.Q[i] /= half.Q4Columns
	}
	p.q, p.k, p.v = m.Put(t, q, query), m.Put(t, pool[0], attn.Q4), m.Put(t, pool[1], attn.Q4)
	p.newK, p.newV = m.Put(t, fresh[0], newType), m.Put(t, fresh[1], newType)
	p.o, p.lse = gpu.Memory{DType: p.out, Len: p.rows * p.Heads * d}, gpu.Memory{DType: attn.Float32, Len: p.rows * p.Heads}
	m.Poison(t, &p.o)
	m.Poison(t, &p.lse)
	return n
}

// check compares the output with the reference, and what is stored with the reference's bits.
func (n *fourProblem) check(t testing.TB) {
	t.Helper()
	least, most := math.Inf(1), 0.0 // scales of values
	for i := 0; i < len(n.V); i += half.Q4Columns {
		x := 0.0
		for _, v := range n.V[i:][:half.Q4Columns] {
			x = max(x, math.Abs(v))
		}
		if x > 0x1p-110 {
			least, most = min(least, x), max(most, x)
		}
	}
	r := n.precision()
	r.Least = 0x1p-37 * max(most/least, 1)                                   // weights are relative to the largest scale of values
	if r.Query = 0x1p-21; n.query != attn.Float32 && n.out != attn.Float32 { // of mixed queries and of weights the first of two parts
		r.Query, r.P = 0x1p-11, reftest.Float16
	}
	n.compare(t, r)
	for i, k := range [...]gpu.Memory{n.k, n.v} {
		if got := enginetest.Read(t, &k); !bytes.Equal(got, n.want[i]) {
			for at := 0; at < len(got); at += 18 {
				if !bytes.Equal(got[at:][:18], n.want[i][at:][:18]) {
					t.Errorf("plane %d: element %d is %x, want %x", i, at/18, got[at:][:18], n.want[i][at:][:18])
					return
				}
			}
		}
	}
}

// testFour runs random problems of keys and values of 4 bits: all types of queries, pages and schedules. scored: with masks and score
// modifications.
func testFour(t *testing.T, m *machine, count, longest int, scored bool) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	shared := 0
	enough := func() bool { return shared > 0 || count < 60 || m.engine.blocks > 16 && longest < 1000 } // large GPUs share no short prefixes
	for i := range reftest.AtLeast(count, enough) {
		dim := []int{64, 128}[i%2]
		if i%8 == 3 && m.engine.hasEpilogue() {
			dim = 256
		}
		s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 1, 2), Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
		s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 2, 4, 5, 8, 9)
		for range enginetest.Pick(rng, 1, 2, 3) {
			s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 1, 1, 2, 3, 9))
			s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 15, 31, 63, 64, 65, 127, 129, rng.IntN(longest)))
		}
		if scored {
			s = scoredShape(rng, i, dim, longest)
		}
		in := enginetest.Pick(rng, reftest.Normal, reftest.Peaked, reftest.Extreme, reftest.Constant)
		row := dim / half.Q4Columns * 18
		p := m.newFour(t, rng, in, s, 16/(row&-row)*enginetest.Pick(rng, 1, 3, 4, 4, 6, 16, 32, 128))
		if p.forks == nil { // a schedule of one's own shares no prefixes
			p.randomSchedule()
			p.geometry.Unfused = false
		}
		m.run(t, plan, p.problem)
		if plan.form.kernel.scored != (scored || dim > 128) {
			t.Fatalf("%v goes to %v", p, plan.form.kernel.entries)
		}
		if plan.form.sharing.on() && (!scored || len(plan.cuts.data) > 0) {
			shared++
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs: %v, schedule %+v", i, in, p, p.geometry)
		}
		p.close(t)
	}
	if !enough() {
		t.Error("no problem has prefixes, or none has those that a window cuts")
	}
	noError(t, plan.Close())
}

func TestGPUFour(t *testing.T) {
	m := realGPU(t)
	testFour(t, m, enginetest.OrShort(120, 60), enginetest.OrShort(3000, 500), false)
	testFour(t, m, enginetest.OrShort(90, 60), enginetest.OrShort(3000, 500), true)
}

// four checks launches for 4 bits.
func (k *launches) four(l *enginetest.Launch) {
	t, hopper := k.t, k.e.info.Capability >= 90
	if l.Kernel == fourEntry {
		r := (*rotaryParams)(unsafe.Pointer(&l.Arg[0]))
		if of := &r.Append; r.each < 1 || l.Blocks%int(r.each) != 0 || l.Threads != appendThreads || of.dim%half.Q4Columns != 0 || of.dim > 128 || of.slots == 0 || of.keys == 0 || of.values == 0 {
			t.Errorf("%d blocks of %d threads: %+v", l.Blocks, l.Threads, of)
		}
		return
	}
	a := (*narrowParams)(unsafe.Pointer(&l.Arg[0]))
	var dim int
	fmt.Sscan(l.Kernel[strings.LastIndex(l.Kernel, "_")+1:], &dim)
	row, chunk, table := dim/half.Q4Columns*18, 32, 0
	if hopper {
		chunk = 64
	}
	threads := map[bool]int{false: int(a.warps) * 32, true: int(a.warps)*32 + 4*32}[hopper]
	if k.e.info.Capability == 90 {
		threads, table = 4*4*32, 64<<10
	}
	slots, rest := int(a.Slots), table+int(a.buffers)*(int(a.warps*a.Rows)*(dim+8)*4+2*16*16)
	switch {
	case l.Threads != threads || l.Blocks != k.e.info.Multiprocessors:
		t.Errorf("%d blocks of %d threads for %d warps", l.Blocks, l.Threads, a.warps)
	case slots < 4 || slots > 32 || slots%int(a.warps) != 0 || hopper && slots%2 != 0 || !hopper && slots/int(a.warps) > 6:
		t.Errorf("%d slots for %d warps", slots, a.warps)
	case l.Shared < slots*(2*chunk*row+16)+rest+6*8 || l.Shared > k.e.info.SharedPerBlockMost:
		t.Errorf("%d bytes of shared memory for %d slots and %d bytes", l.Shared, slots, rest)
	case chunk%int(a.box) != 0 || int(a.box)*row%16 != 0 || a.pageTokens%a.box != 0 || (a.keys|a.values)%16 != 0:
		t.Errorf("boxes of %d, chunks of %d, pages of %d", a.box, chunk, a.pageTokens)
	}
}

// Launches for 4 bits suit each kind of GPU for which kernels differ.
func TestLaunchesFour(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			rng, plan := reftest.Rand(t), m.engine.NewPlan()
			for i := range 4 {
				dim := 64 << (i % 2)
				s := reftest.Shape{KVHeads: 1 + i%2, Dim: dim, ValueDim: dim, Queries: []int{1, 0, 1 + rng.IntN(9)}, Keys: []int{100 + rng.IntN(300), 5, 9 + rng.IntN(90)}, Mask: attn.Mask{Causal: true}}
				s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 4, 8, 20)
				p := m.newFour(t, rng, reftest.Normal, s, enginetest.Pick(rng, 4, 12, 16, 48, 64, 512))
				m.run(t, plan, p.problem)
				if t.Failed() {
					t.Fatalf("case %d: %v", i, p)
				}
				p.close(t)
			}
			noError(t, plan.Close())
		})
	}
}

// A feature that kernels for 4 bits lack is refused by name.
func TestFourRefused(t *testing.T) {
	g := attn.Problem{Heads: 8, KVHeads: 2, Dim: 128, ValueDim: 128, Scale: 1, PageTokens: 16, Query: attn.PackedRows(8, 128), Out: attn.PackedRows(8, 128), LSE: attn.PackedRows(8, 1)}
	pages := func(g *attn.Problem) {
		g.Pages = attn.Separate(attn.Q4, g.Dim, g.Dim, attn.PageStrides{}, attn.PageStrides{}).Packed(2, g.PageTokens)
		g.Pages.Planes[0].Mixed = true
	}
	pages(&g)
	noError(t, HasKernel(&g))
	for text, change := range map[string]func(*attn.Problem){
		"4 bits: a bias":    func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 9} },
		"batch invariance":  func(g *attn.Problem) { g.Invariant = true },
		"unfused attention": func(g *attn.Problem) { g.Unfused = true },
		"head dim 96 is not supported: kernels have head dims [64 128 256]": func(g *attn.Problem) {
			g.Dim, g.ValueDim, g.Query, g.Out = 96, 96, attn.PackedRows(8, 96), attn.PackedRows(8, 96)
			pages(g)
		},
		"pages of 5 tokens with head dim 128 and q4": func(g *attn.Problem) { g.PageTokens = 5; pages(g) },
		"must be contiguous":                         func(g *attn.Problem) { g.Pages.Planes[0].At.Page *= 2; g.Pages.Planes[1].At.Page *= 2 },
		"values of q4, mixed: false":                 func(g *attn.Problem) { g.Pages.Planes[0].Mixed = false },
	} {
		of := g
		change(&of)
		wantError(t, text, HasKernel(&of), attn.ErrUnsupported, text)
	}
}
