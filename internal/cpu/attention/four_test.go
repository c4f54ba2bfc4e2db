package attention

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestAppendFour: the bytes that are stored of keys and values in 4 bits are those of the definition in float64.
func TestAppendFour(t *testing.T) {
	for range cputest.Cases(t, 10, 60) {
		testAppendFour[float32](t)
		testAppendFour[float64](t)
	}
}

func testAppendFour[F cpu.Real](t *testing.T) {
	rng := reftest.Rand(t)
	heads, tokens, page, dim, valueDim := 1+rng.IntN(3), 1+rng.IntN(40), 1+rng.IntN(40), 32*(1+rng.IntN(5)), 32*(1+rng.IntN(5))
	f := attn.Separate(attn.Q4, dim, valueDim, attn.PageStrides{}, attn.PageStrides{}).Packed(heads, page)
	f.Planes[0].Mixed = true
	g := attn.Problem{Heads: heads, KVHeads: heads, Dim: dim, ValueDim: valueDim, Pages: f, PageTokens: page, Scale: 1}
	pages := attn.Ceil(tokens, page)
	var keep problem[F]
	var to attn.Memory[cpu.Buffer]
	for s := range f.Slabs {
		*to.At(s) = keep.buffer(s.Plane, s.DType, pages*s.PageBytes(heads, page)/s.DType.Size())
	}
	seqs := []attn.Sequence{{Queries: tokens, Keys: tokens}}
	for _, p := range rng.Perm(pages) {
		seqs[0].Pages = append(seqs[0].Pages, int32(p))
	}
	var rows [2][]F
	for range tokens * heads {
		rows[0] = append(rows[0], hardRow[F](rng, dim)...)
		rows[1] = append(rows[1], hardRow[F](rng, valueDim)...)
	}
	var plan Plan
	if err := plan.Build(g, seqs); err != nil {
		t.Fatal(err)
	}
	if err := AppendLayer(cpu.Default(), &plan, seqs, &to, NewRows[F]{rows[0], attn.PackedRows(heads, dim)}, NewRows[F]{rows[1], attn.PackedRows(heads, valueDim)}); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		p := &f.Planes[i]
		for token := range tokens {
			for h := range heads {
				var row []float64
				for _, x := range rows[i][(token*heads+h)*p.Dim:][:p.Dim] {
					row = append(row, float64(x))
				}
				was := slices.Clone(row)
				want := reftest.StoreQ4(row, i == 0, cputest.AccOf[F]())
				at := to[i].Data.At(p.At.Offset(int(seqs[0].Pages[token/page]), h, token%page))
				got := unsafe.Slice((*half.Q4)(at), p.Elements())
				for b := range got {
					if want := half.Q4(want[b*18:]); got[b] != want && got[b].Scale() == got[b].Scale() {
						t.Fatalf("plane %d: element %d of %v is %v, want %v", i, b, was, got[b], want)
					}
				}
				read := make([]F, p.Dim)
				half.DecodeQ4(read, got)
				for j, x := range read {
					if float64(x) != row[j] && (x == x || row[j] == row[j]) {
						t.Fatalf("plane %d: number %d of %v is read as %v, want %v", i, j, was, x, row[j])
					}
				}
			}
		}
	}
}

// mixQueries gives a case the queries that its mixed keys are multiplied by. Their products are those of the queries and keys before.
func mixQueries(c *reftest.Case) {
	reftest.MixQ4(c.Q, reftest.Float64)
	for i := range c.Q {
		c.Q[i] /= half.Q4Columns
	}
}

// TestFour attends to keys and values of 4 bits, in place and decoded, with few and many rows, all masks, score changes and trees. Keys
// that are not visible have NaN.
func TestFour(t *testing.T) {
	for i := range cputest.Cases(t, 24, 160) {
		if i%3 > 0 {
			testFour[float32](t, i)
		} else {
			testFour[float64](t, i)
		}
	}
}

func fourShape(rng *rand.Rand, i int) reftest.Shape {
	s := reftest.RandomShape(rng)
	if i%4 == 0 {
		s = reftest.RandomScoreMods(rng, s)
	}
	if i%2 == 1 { // sizes with kernels of their own
		rows := []int{1, 1, 2, 7, 40}[rng.IntN(5)]
		s = reftest.Shape{KVHeads: 1 + rng.IntN(2), Queries: []int{rows, 1}, Keys: []int{rows + rng.IntN(1500), 1 + rng.IntN(300)}, Mask: attn.Mask{Causal: true}}
		s.Heads = s.KVHeads * []int{1, 2, 4, 5, 8, 16, 20}[rng.IntN(7)]
	}
	s.Dim, s.ValueDim = 32*(1+rng.IntN(4)), 32*(1+rng.IntN(4))
	return s
}

func testFour[F cpu.Real](t *testing.T, i int) {
	rng := reftest.Rand(t)
	l := randomLayout(rng)
	if l.dtype = attn.Q4; i%2 == 1 {
		l.packed, l.slotMajor = true, false
	}
	in := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))]
	c := reftest.New(rng, fourShape(rng, i), in, cputest.AccOf[F](), cputest.AccOf[F]())
	p := place[F](rng, c, l)
	if unsafe.Sizeof(F(0)) == 4 && !readInPlace[F](&p.g) {
		t.Error("4 bits are not read in place")
	}
	mixQueries(c)
	if err := p.run(cpu.Default(), randomPolicy(rng), 1+rng.IntN(8), []int{0, 16, 100}[rng.IntN(3)]); err != nil {
		t.Fatal(err)
	}
	if err := p.check(c.Reference(reftest.Precision{Acc: cputest.AccOf[F]()})); err != nil {
		t.Fatalf("%v, %v, %v, %v: %v", c.Shape, in, l, cputest.AccOf[F](), err)
	}
}

// TestFourInvariant: with batch invariance the bits of a row do not depend on other rows.
func TestFourInvariant(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range cputest.Cases(t, 6, 30) {
		l := randomLayout(rng)
		l.dtype = attn.Q4
		s := invariantShape(rng)
		s.Dim, s.ValueDim = 32*(1+i%3), 32*(1+i%2)
		if _, err := testInvariant[float32](rng, s, reftest.Normal, l); err != nil {
			t.Errorf("%v: %v", l, err)
		}
	}
}

// BenchmarkFour runs steps on keys and values of 16, 8 and 4 bits in turn, and prints their speeds in keys. Pages have 64 tokens.
func BenchmarkFour(b *testing.B) {
	for _, heads := range [][3]int{{8, 8, 128}, {32, 8, 128}, {64, 8, 128}, {12, 12, 64}} {
		for _, of := range [][3]int{{1, 1, 4096}, {1, 1, 32768}, {4, 1, 4096}, {1, 64, 4096}} {
			b.Run(fmt.Sprintf("heads=%d,%d,%d/batch=%d/queries=%d/keys=%d", heads[0], heads[1], heads[2], of[0], of[1], of[2]), func(b *testing.B) {
				benchNarrow(b, []attn.DType{attn.Float16, attn.E4M3, attn.Q4}, benchmark{seqs: of[0], heads: heads[0], kvHeads: heads[1], queries: of[1], keys: of[2], dim: heads[2], page: 64})
			})
		}
	}
}
