//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// narrowProblem is a problem with keys and values of 8 bits.
type narrowProblem struct {
	*problem
	kind   attn.Scales
	eight  reftest.Eight
	scales [2]gpu.Memory
	want   [2][]byte // keys and values after the append
	wants  [2][]byte // their scales
}

// eightOf returns the type that the reference has for a type of keys and values, and its NaN.
func eightOf(kv attn.DType) (reftest.Eight, byte) {
	if kv == attn.E4M3 {
		return reftest.E4M3, 0x7f
	}
	return reftest.Int8, 0x80
}

// bitsOf returns the element of a type that is a number.
func bitsOf(kv attn.DType, x float64) byte {
	if kv == attn.E4M3 {
		return byte(half.E4M3FromFloat64(x))
	}
	return byte(half.Int8FromFloat64(x))
}

// newNarrow draws numbers and a layout, and copies them to the machine. Elements and scales that must not be read are NaN.
func (m *machine) newNarrow(t testing.TB, rng *rand.Rand, in reftest.Inputs, shape reftest.Shape, kv attn.DType, kind attn.Scales, page int) *narrowProblem {
	t.Helper()
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	query, newType := enginetest.Pick(rng, types...), enginetest.Pick(rng, types...)
	n := &narrowProblem{problem: &problem{rng: rng, kv: kv, query: query, out: enginetest.Pick(rng, types...), pageTokens: page}, kind: kind}
	p := n.problem
	p.Case = reftest.New(rng, shape, in, enginetest.Format(query), reftest.Float16)
	var nan byte
	n.eight, nan = eightOf(kv)

	p.geometry = attn.Problem{Heads: p.Heads, KVHeads: p.KVHeads, Dim: p.Dim, ValueDim: p.Dim, Scale: p.Scale, Mask: p.Mask, Score: attn.Score{Cap: p.SoftCap, Slopes: attn.NewSlopes(p.Slopes)}, PageTokens: page}
	p.putSinks(m, t)
	g := &p.geometry
	g.Pages = attn.Separate(kv, p.Dim, p.Dim, attn.PageStrides{}, attn.PageStrides{}).Packed(p.KVHeads, page)
	for i := range 2 {
		g.Pages.Planes[i].Scales = kind
	}
	g.Query, g.Out, g.LSE = attn.PackedRows(p.Heads, p.Dim), attn.PackedRows(p.Heads, p.Dim), attn.PackedRows(p.Heads, 1)
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
	pages := len(free)

	d := p.Dim
	q := enginetest.Poisoned(p.rows*p.Heads*d, query)
	var fresh, pool, scales [2][]byte
	count := g.Pages.Planes[0].ScaleLen(pages, p.KVHeads, page)
	for i := range 2 {
		fresh[i] = enginetest.Poisoned(p.rows*p.KVHeads*d, newType)
		n.want[i] = bytes.Repeat([]byte{nan}, pages*p.KVHeads*page*d)
		n.wants[i] = enginetest.Poisoned(count, attn.Float32)
		pool[i], scales[i] = slices.Clone(n.want[i]), slices.Clone(n.wants[i])
	}
	heads := make([]float64, 2*p.KVHeads) // scales of heads
	for i := range heads {
		heads[i] = float64(float32(math.Exp(rng.NormFloat64()) / n.eight.Most() * 4))
	}
	for i := range p.seqs {
		s := &p.seqs[i]
		for range attn.Ceil(s.Keys, page) {
			s.Pages, free = append(s.Pages, int32(free[0])), free[1:]
		}
		for h := range p.KVHeads {
			var ofPage [2]float64
			for j := range s.Keys {
				for which, row := range [][]float64{p.Key(i, j, h), p.Value(i, j, h)} {
					spreadRow(rng, row, newType)
					var scale float64
					switch kind {
					case attn.ScalesByHead:
						scale = heads[which*p.KVHeads+h]
					case attn.ScalesByPage:
						if j%page == 0 {
							ofPage[which] = n.eight.PageScale(row)
						}
						scale = ofPage[which]
					default:
						scale = n.eight.Scale(row)
					}
					if first := p.First(i, 0); p.Queries[i] > 0 && j >= p.SinkKeys(i, 0) && j < first { // elements and scales that no query sees are NaN
						if kind == attn.ScalesByPage && first < min(j-j%page+page, s.Keys) { // later tokens have this one
							at := g.Pages.Planes[which].ScaleOf(int(s.Pages[j/page]), h, 0, p.KVHeads, page)
							enginetest.Put(n.wants[which], at, attn.Float32, scale)
							enginetest.Put(scales[which], at, attn.Float32, scale)
						}
						continue
					}
					at := int(s.Pages[j/page])
					of := g.Pages.Planes[which].ScaleOf(at, h, j%page, p.KVHeads, page)
					at = at*g.Pages.Planes[which].At.Page + h*g.Pages.Planes[which].At.Head + j%page*d
					token := j - (s.Keys - s.Queries)
					for c, x := range row {
						if p.append && token >= 0 {
							enginetest.Put(fresh[which], ((s.Row+token)*p.KVHeads+h)*d+c, newType, x)
						}
						x = n.eight.Round(reftest.Float32.Round(x / scale))
						n.want[which][at+c] = bitsOf(kv, x)
						row[c] = x * scale
					}
					enginetest.Put(n.wants[which], of, attn.Float32, scale)
					if p.append && token >= 0 {
						if kind == attn.ScalesByHead { // of the cache
							enginetest.Put(scales[which], of, attn.Float32, scale)
						}
						continue
					}
					copy(pool[which][at:], n.want[which][at:at+d])
					enginetest.Put(scales[which], of, attn.Float32, scale)
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
	p.q, p.k, p.v = m.Put(t, q, query), n.put(m, t, pool[0]), n.put(m, t, pool[1])
	p.newK, p.newV = m.Put(t, fresh[0], newType), m.Put(t, fresh[1], newType)
	n.scales = [2]gpu.Memory{m.Put(t, scales[0], attn.Float32), m.Put(t, scales[1], attn.Float32)}
	p.o, p.lse = gpu.Memory{DType: p.out, Len: p.rows * p.Heads * d}, gpu.Memory{DType: attn.Float32, Len: p.rows * p.Heads}
	m.Poison(t, &p.o)
	m.Poison(t, &p.lse)
	return n
}

// spreadRow gives a row another magnitude now and then, zeros, or an outlier, in numbers of a type.
func spreadRow(rng *rand.Rand, row []float64, t attn.DType) {
	by := 1.0
	switch rng.IntN(12) {
	case 0:
		by = 0
	case 1:
		by = math.Ldexp(1, rng.IntN(9)-6)
	case 2:
		row[rng.IntN(len(row))] *= 40
	}
	for i := range row {
		row[i] = enginetest.Format(t).Round(row[i] * by)
	}
}

func (n *narrowProblem) put(m *machine, t testing.TB, b []byte) gpu.Memory {
	return m.Put(t, b, n.kv)
}

func (n *narrowProblem) pages() Pages {
	pages := attn.InPlanes(n.k, n.v)
	pages[0].Scales, pages[1].Scales = n.scales[0], n.scales[1]
	return pages
}

func (n *narrowProblem) operands() *Operands {
	return &Operands{Q: n.q, Out: n.o, LSE: n.lse, Pages: n.pages(), Sinks: n.sinks}
}

// run builds, uploads and runs the problem.
func (n *narrowProblem) run(t testing.TB, m *machine, plan *Plan) {
	t.Helper()
	noError(t, plan.Build(n.geometry, n.seqs, n.rows))
	plan.spoil(t)
	noError(t, plan.Upload(m.Stream))
	if n.append {
		noError(t, plan.Append(m.Stream, n.pages(), n.newK, n.newV))
	}
	noError(t, plan.Run(m.Stream, n.operands()))
	m.Settle(t)
}

// check compares the output with the reference, and what is stored with the reference's bits.
func (n *narrowProblem) check(t testing.TB) {
	t.Helper()
	least, most := math.Inf(1), 0.0 // largest elements of values
	for i := 0; i < len(n.V); i += n.Dim {
		if x := n.eight.Scale(n.V[i:][:n.Dim]); x > 0x1p-126 {
			least, most = min(least, x), max(most, x)
		}
	}
	p := n.problem
	r := p.precision()
	r.Least = 0x1p-37 * max(most/least, 1) // weights are relative to the largest scale of values
	if n.kind != attn.ScalesByToken {
		r.Least *= 256 // elements may be that much smaller than their scale allows
	}
	p.compare(t, r)
	for i, k := range [...]gpu.Memory{p.k, p.v} {
		for at, got := range enginetest.Read(t, &k) {
			if want := n.want[i][at]; got != want {
				t.Errorf("plane %d: element %d is %#x, want %#x", i, at, got, want)
				break
			}
		}
		got := enginetest.Read(t, &n.scales[i])
		for j := 0; j < len(got); j += 4 {
			x, want := binary.LittleEndian.Uint32(got[j:]), binary.LittleEndian.Uint32(n.wants[i][j:])
			if x != want {
				t.Errorf("plane %d: scale %d is %#x, want %#x", i, j/4, x, want)
				break
			}
		}
	}
}

func (n *narrowProblem) free(t testing.TB) {
	t.Helper()
	for _, m := range n.scales {
		noError(t, m.Buffer.Close())
	}
	n.close(t)
}

// testNarrow runs random problems of keys and values of 8 bits: all types, scales, pages and schedules.
func testNarrow(t *testing.T, m *machine, count, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i := range count {
		kv, kind, dim := gpu.Eights[i%2], attn.ScalesByHead+attn.Scales(i%3), []int{64, 128}[i/2%2]
		if i%8 == 7 && m.engine.hasEpilogue() {
			dim = 256
		}
		s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 1, 2), Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: rng.IntN(2) == 0}}
		s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 2, 4, 5, 8, 9)
		for range enginetest.Pick(rng, 1, 2, 3) {
			s.Queries = append(s.Queries, enginetest.Pick(rng, 0, 1, 1, 1, 1, 2, 3, 9))
			s.Keys = append(s.Keys, enginetest.Pick(rng, 0, 1, 15, 31, 63, 64, 65, 127, 129, rng.IntN(longest)))
		}
		in := enginetest.Pick(rng, reftest.Normal, reftest.Peaked, reftest.Extreme, reftest.Constant)
		p := m.newNarrow(t, rng, in, s, kv, kind, max(128/dim, 1)*enginetest.Pick(rng, 1, 3, 8, 8, 12, 32, 64, 256))
		p.randomSchedule()
		p.geometry.Unfused = false
		p.run(t, m, plan)
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs, %v: %v, schedule %+v", i, in, kind, p, p.geometry)
		}
		p.free(t)
	}
	noError(t, plan.Close())
}

// scoredShape draws the shape of case i of random problems with masks other than causal and score modifications.
func scoredShape(rng *rand.Rand, i, dim, longest int) reftest.Shape {
	s := reftest.Shape{KVHeads: enginetest.Pick(rng, 1, 2), Dim: dim, ValueDim: dim, Mask: attn.Mask{Causal: i%4 != 0}}
	s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 2, 4, 5, 8, 9)
	for range enginetest.Pick(rng, 1, 2, 3) {
		queries := enginetest.Pick(rng, 0, 1, 1, 1, 2, 3, 9)
		s.Queries, s.Keys = append(s.Queries, queries), append(s.Keys, queries+enginetest.Pick(rng, 0, 1, 15, 64, 129, rng.IntN(longest)))
	}
	switch i / 2 % 3 {
	case 0:
		if s.Window = enginetest.Pick(rng, 1, 16, 33, 63, 64, 65, 100); rng.IntN(2) == 0 {
			s.SinkTokens = enginetest.Pick(rng, 1, 4, 16, 31, 33, 64, 70)
		}
		if rng.IntN(2) == 0 {
			s.SoftCap = 1 + 5*rng.Float64()
		}
	case 1:
		s = reftest.RandomScoreMods(rng, s)
	default:
		if s = reftest.RandomTrees(rng, s); rng.IntN(2) == 0 {
			s = reftest.RandomSinks(rng, s)
		}
	}
	return s
}

// testNarrowScores runs random problems with masks other than causal and score modifications: windows over pages of all sizes, sink
// tokens, trees, sinks, soft caps and slopes.
func testNarrowScores(t *testing.T, m *machine, count, longest int) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for i := range count {
		kv, kind, dim := gpu.Eights[i%2], attn.ScalesByHead+attn.Scales(i%3), []int{64, 128}[i/2%2]
		if i%4 == 3 && m.engine.hasEpilogue() {
			dim = 256
		}
		s := scoredShape(rng, i, dim, longest)
		in := enginetest.Pick(rng, reftest.Normal, reftest.Peaked, reftest.Extreme, reftest.Constant)
		p := m.newNarrow(t, rng, in, s, kv, kind, max(128/dim, 1)*enginetest.Pick(rng, 1, 3, 8, 8, 12, 32, 64, 256))
		p.randomSchedule()
		p.geometry.Unfused = false
		p.run(t, m, plan)
		if !plan.form.kernel.scored {
			t.Fatalf("%v goes to %v", p, plan.form.kernel.entries)
		}
		p.check(t)
		if t.Failed() {
			t.Fatalf("case %d, %v inputs, %v: %v, schedule %+v", i, in, kind, p, p.geometry)
		}
		p.free(t)
	}
	noError(t, plan.Close())
}

// testNarrowNaN: a NaN among the elements of a value makes its column NaN, and one among those of a key its rows.
func testNarrowNaN(t *testing.T, m *machine) {
	rng := reftest.Rand(t)
	plan := m.engine.NewPlan()
	for _, kv := range gpu.Eights {
		_, nan := eightOf(kv)
		for which := range 2 {
			s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1}, Keys: []int{100}}
			p := m.newNarrow(t, rng, reftest.Normal, s, kv, attn.ScalesByHead, 16)
			for p.append {
				p.free(t)
				p = m.newNarrow(t, rng, reftest.Normal, s, kv, attn.ScalesByHead, 16)
			}
			at := p.geometry.Pages.Planes[0].At
			key, column := rng.IntN(100), rng.IntN(64)
			i := int(p.seqs[0].Pages[key/16])*at.Page + at.Head + key%16*64 + column
			x := [2]gpu.Memory{p.k, p.v}[which]
			noError(t, x.Buffer.Upload(x.Offset+int64(i), []byte{nan}))
			p.run(t, m, plan)
			out := enginetest.Read(t, &p.o)
			for h := range 4 {
				for c := range 64 {
					bad := h >= 2 && (which == 0 || c == column)
					if got := enginetest.Get(out, p.seqs[0].Row*4*64+h*64+c, p.out); math.IsNaN(got) != bad {
						t.Fatalf("%v, plane %d, key %d, column %d: head %d, column %d is %v", kv, which, key, column, h, c, got)
					}
				}
			}
			p.free(t)
		}
	}
	noError(t, plan.Close())
}

// narrow checks a launch of a decode kernel for 8 bits.
func (k *launches) narrow(l *enginetest.Launch) {
	t, hopper := k.t, k.e.info.Capability >= 90
	a := (*narrowParams)(unsafe.Pointer(&l.Arg[0]))
	var dim int
	fmt.Sscan(l.Kernel[strings.LastIndex(l.Kernel, "_")+1:], &dim)
	chunk, pitch, ring := 32, 128, 128<<10
	if hopper {
		chunk, pitch, ring = 64, dim, 192<<10
	}
	threads := map[bool]int{false: int(a.warps) * 32, true: int(a.warps)*32 + 4*32}[hopper]
	if k.e.info.Capability == 90 {
		threads = 4 * 4 * 32
	}
	scales := ring / (2 * chunk * pitch) * 2 * chunk * 4
	slots, rest := int(a.Slots), scales+int(a.buffers)*(int(a.warps*a.Rows)*(dim+8)*4+2*16*16)
	switch {
	case l.Threads != threads || l.Blocks != k.e.info.Multiprocessors:
		t.Errorf("%d blocks of %d threads for %d warps", l.Blocks, l.Threads, a.warps)
	case slots < 4 || slots%int(a.warps) != 0 || slots*2*chunk*4 > scales || hopper && slots%2 != 0 || k.e.info.Capability == 90 && slots%4 != 0 || !hopper && slots/int(a.warps) > 6:
		t.Errorf("%d slots for %d warps", slots, a.warps)
	case l.Shared < slots*(2*chunk*pitch+16)+rest+6*8 || l.Shared > k.e.info.SharedPerBlockMost:
		t.Errorf("%d bytes of shared memory for %d slots and %d bytes", l.Shared, slots, rest)
	case chunk%int(a.box) != 0 || int(a.box)*dim%128 != 0 || a.pages != 0 && a.pageTokens%a.box != 0:
		t.Errorf("boxes of %d, chunks of %d, pages of %d", a.box, chunk, a.pageTokens)
	case a.narrow.keyScales == 0 || a.narrow.valueScales == 0 || (a.narrow.keyScales|a.narrow.valueScales)%4 != 0 || a.narrow.scales < 1 || a.narrow.scales > 3:
		t.Errorf("scales: %+v", a.narrow)
	}
	for i, m := range []cuda.TensorMap{a.keyMap, a.valueMap} {
		if want := [...]uint64{a.keys, a.values}[i]; hopper && (m[0] != want || m[1] != 1 || m[2] != 64 || m[4] != 1 || m[5] != 128 || m[7] != 64 || m[8] != uint64(int(a.box)*dim/128) || m[9] != 1) {
			t.Errorf("map %v of rows of %d bytes, boxes of %d", m, dim, a.box)
		}
	}
	decode := decodeLaunch{t, &params{Params: a.Params, prefetched: a.prefetched}, dim, attn.Int8, chunk}
	for b := range l.Blocks {
		if a.prefetched != 0 {
			decode.checkPrefetch(b)
		}
	}
}

// narrowAppend checks a launch that stores new keys and values of 8 bits.
func (k *launches) narrowAppend(l *enginetest.Launch) {
	a := (*narrowAppend)(unsafe.Pointer(&l.Arg[0]))
	of := &a.rotary.Append
	if a.rotary.each < 1 || l.Blocks%int(a.rotary.each) != 0 || l.Threads != appendThreads || of.dim%4 != 0 || of.dim > 256 || a.keyScales == 0 || a.valueScales == 0 || a.pageTokens < 1 ||
		of.headRows != a.pageTokens || of.slots == 0 || of.keys == 0 || of.values == 0 {
		k.t.Errorf("%d blocks of %d threads: %+v", l.Blocks, l.Threads, a)
	}
}

// Launches for 8 bits suit each kind of GPU for which kernels differ.
func TestLaunchesNarrow(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			rng, plan := reftest.Rand(t), m.engine.NewPlan()
			for i := range 12 {
				dim := 64 << (i % 2)
				s := reftest.Shape{KVHeads: 1 + i%2, Dim: dim, ValueDim: dim, Queries: []int{1, 0, 1 + rng.IntN(9)}, Keys: []int{100 + rng.IntN(300), 5, 9 + rng.IntN(90)}, Mask: attn.Mask{Causal: true}}
				s.Heads = s.KVHeads * enginetest.Pick(rng, 1, 4, 8, 20)
				p := m.newNarrow(t, rng, reftest.Normal, s, gpu.Eights[rng.IntN(2)], attn.ScalesByHead+attn.Scales(i%3), enginetest.Pick(rng, 2, 16, 48, 64, 512))
				p.run(t, m, plan)
				if t.Failed() {
					t.Fatalf("case %d: %v", i, p)
				}
				p.free(t)
			}
			noError(t, plan.Close())
		})
	}
}

// Bad memory is refused without a launch, and no launch with other work is offered keys of 8 bits.
func TestNarrowMemory(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	rng := reftest.Rand(t)
	s := reftest.Shape{Heads: 4, KVHeads: 2, Dim: 64, ValueDim: 64, Queries: []int{1}, Keys: []int{100}}
	p := m.newNarrow(t, rng, reftest.Normal, s, attn.E4M3, attn.ScalesByToken, 16)
	plan := m.engine.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	noError(t, plan.Upload(m.Stream))
	bad := p.pages()
	bad[1].Scales.Len = 3
	wantError(t, "scales", plan.Append(m.Stream, bad, p.newK, p.newV), attn.ErrShape, "the scales of v")
	bad = p.pages()
	bad[0].Scales.DType = attn.BFloat16
	wantError(t, "scales", plan.Run(m.Stream, &Operands{Q: p.q, Out: p.o, LSE: p.lse, Pages: bad}), attn.ErrDType, "the scales of k")
	wantError(t, "new", plan.Append(m.Stream, p.pages(), p.k, p.v), attn.ErrDType, "the new k is e4m3")
	o := p.operands()
	o.Q = p.k
	wantError(t, "q", plan.Run(m.Stream, o), attn.ErrDType, "q is e4m3")
	if plan.FuseAppend(p.pages(), func(*Appending) bool { return true }) || plan.FuseAttention(p.operands(), func(*Attending) bool { return true }) {
		t.Error("a launch was offered to do what it does not know of")
	}
	m.Settle(t)
	if strings.Contains(lib.Log(), "kernel") {
		t.Error("a kernel was launched")
	}
	p.free(t)
	noError(t, plan.Close())
}

// A feature that kernels for 8 bits lack is refused by name.
func TestNarrowRefused(t *testing.T) {
	g := attn.Problem{Heads: 8, KVHeads: 2, Dim: 64, ValueDim: 64, Scale: 1, PageTokens: 16, Query: attn.PackedRows(8, 64), Out: attn.PackedRows(8, 64), LSE: attn.PackedRows(8, 1)}
	g.Pages = attn.Separate(attn.E4M3, 64, 64, attn.PageStrides{}, attn.PageStrides{}).Packed(2, 16)
	g.Pages.Planes[0].Scales, g.Pages.Planes[1].Scales = attn.ScalesByToken, attn.ScalesByToken
	noError(t, HasKernel(&g))
	for text, change := range map[string]func(*attn.Problem){
		"a bias":                       func(g *attn.Problem) { g.Bias = attn.Bias{Sequences: 1, Heads: 1, Queries: 1, Keys: 9} },
		"batch invariance":             func(g *attn.Problem) { g.Invariant = true },
		"unfused attention":            func(g *attn.Problem) { g.Unfused = true },
		"head dim 80 is not supported": func(g *attn.Problem) { *g = narrowDim(*g, 80) },
		"pages of 3 tokens":            func(g *attn.Problem) { g.PageTokens = 3; *g = narrowDim(*g, 64) },
		"they must be alike":           func(g *attn.Problem) { g.Pages.Planes[1].DType = attn.Int8 },
		"must be contiguous":           func(g *attn.Problem) { g.Pages.Planes[0].At.Page *= 2; g.Pages.Planes[1].At.Page *= 2 },
		"scales for groups of columns": func(g *attn.Problem) {
			for i := range 2 {
				g.Pages.Planes[i].Scales, g.Pages.Planes[i].Group = attn.ScalesByGroup, 32
			}
		},
	} {
		of := g
		change(&of)
		wantError(t, text, HasKernel(&of), attn.ErrUnsupported, text)
	}
}

// narrowDim returns g with another head dim.
func narrowDim(g attn.Problem, dim int) attn.Problem {
	scales := g.Pages.Planes[0].Scales
	g.Dim, g.ValueDim, g.Query, g.Out = dim, dim, attn.PackedRows(g.Heads, dim), attn.PackedRows(g.Heads, dim)
	g.Pages = attn.Separate(g.Pages.Planes[0].DType, dim, dim, attn.PageStrides{}, attn.PageStrides{}).Packed(g.KVHeads, g.PageTokens)
	g.Pages.Planes[0].Scales, g.Pages.Planes[1].Scales = scales, scales
	return g
}

func TestGPUNarrow(t *testing.T) {
	m := realGPU(t)
	testNarrow(t, m, enginetest.OrShort(400, 60), enginetest.OrShort(5000, 500))
	testNarrowScores(t, m, enginetest.OrShort(300, 60), enginetest.OrShort(5000, 500))
	testNarrowNaN(t, m)
	testNarrowRotary(t, m, enginetest.OrShort(40, 12))
}

// testNarrowRotary: keys stored with a rotary embedding are the rounded keys of a cache of float32.
func testNarrowRotary(t *testing.T, m *machine, count int) {
	rng := reftest.Rand(t)
	plan, wide := m.engine.NewPlan(), m.engine.NewPlan()
	for i := range count {
		kv, kind, dim := gpu.Eights[i%2], attn.ScalesByHead+attn.Scales(i%3), []int{64, 128}[i/2%2]
		s := reftest.Shape{Heads: 2 * (1 + i%2), KVHeads: 1 + i%2, Dim: dim, ValueDim: dim, Queries: []int{1, 0, 9, 4}, Keys: []int{1 + rng.IntN(50), 3, 9 + rng.IntN(20), 20 + rng.IntN(9)}, Mask: attn.Mask{Causal: true}}
		p := m.newNarrow(t, rng, reftest.Normal, s, kv, kind, (1+64/dim)*enginetest.Pick(rng, 1, 2, 5, 8))
		for !p.append {
			p.free(t)
			p = m.newNarrow(t, rng, reftest.Normal, s, kv, kind, p.pageTokens)
		}
		g := &p.geometry
		g.Rotary = randomRotary(rng, dim)
		for j := range p.seqs {
			p.seqs[j].Before = enginetest.Pick(rng, 0, rng.IntN(100), rng.IntN(1<<40))
		}
		floats := *g
		floats.Pages = attn.Separate(attn.Float32, dim, dim, attn.PageStrides{}, attn.PageStrides{}).Packed(p.KVHeads, p.pageTokens)
		k32, v32 := m.Put(t, enginetest.Poisoned(p.k.Len, attn.Float32), attn.Float32), m.Put(t, enginetest.Poisoned(p.k.Len, attn.Float32), attn.Float32)
		var rotated [2]gpu.Memory
		for j, of := range []*Plan{plan, wide} {
			rotated[j] = m.Put(t, enginetest.Poisoned(p.q.Len, p.query), p.query)
			pages, problem := p.pages(), g
			if j == 1 {
				pages, problem = attn.InPlanes(k32, v32), &floats
			}
			noError(t, of.Build(*problem, p.seqs, p.rows))
			noError(t, of.Upload(m.Stream))
			noError(t, of.AppendRotated(m.Stream, pages, p.newK, p.newV, p.q, rotated[j], 0))
		}
		o := p.operands()
		o.Q = rotated[0]
		noError(t, plan.Run(m.Stream, o))
		m.Settle(t)
		if !bytes.Equal(enginetest.Read(t, &rotated[0]), enginetest.Read(t, &rotated[1])) {
			t.Fatalf("case %d, %v: rotated queries differ from those of other pages", i, p)
		}
		for which, x := range [][2][]byte{{enginetest.Read(t, &p.k), enginetest.Read(t, &k32)}, {enginetest.Read(t, &p.v), enginetest.Read(t, &v32)}} {
			scales := enginetest.Read(t, &p.scales[which])
			plane := &g.Pages.Planes[which]
			for _, q := range p.seqs {
				for j := q.Keys - q.Queries; j < q.Keys; j++ {
					for h := range p.KVHeads {
						row := func(j int) (at int, x64 []float64) {
							at = plane.At.Offset(int(q.Pages[j/p.pageTokens]), h, j%p.pageTokens)
							for c := range dim {
								x64 = append(x64, enginetest.Get(x[1], at+c, attn.Float32))
							}
							return at, x64
						}
						at, numbers := row(j)
						scale := enginetest.Get(scales, plane.ScaleOf(int(q.Pages[j/p.pageTokens]), h, j%p.pageTokens, p.KVHeads, p.pageTokens), attn.Float32)
						want := scale
						switch first := j - j%p.pageTokens; {
						case kind == attn.ScalesByToken:
							want = p.eight.Scale(numbers)
						case kind == attn.ScalesByPage && first >= q.Keys-q.Queries:
							_, of := row(first)
							want = p.eight.PageScale(of)
						}
						if scale != want {
							t.Fatalf("case %d, %v, %v: plane %d, token %d, head %d: scale %v, want %v", i, p, kind, which, j, h, scale, want)
						}
						for c, f := range numbers {
							if got, want := x[0][at+c], bitsOf(kv, p.eight.Round(reftest.Float32.Round(f/scale))); got != want {
								t.Fatalf("case %d, %v, %v: plane %d, token %d, head %d, element %d is %#x, want %#x", i, p, kind, which, j, h, c, got, want)
							}
						}
					}
				}
			}
		}
		for _, x := range []gpu.Memory{k32, v32, rotated[0], rotated[1]} {
			noError(t, x.Buffer.Close())
		}
		p.free(t)
	}
	noError(t, plan.Close())
	noError(t, wide.Close())
}
