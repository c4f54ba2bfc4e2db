package attention

import (
	"errors"
	"math"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

// TestFormats attends to pages of every kind of format, with all masks, score changes and trees.
func TestFormats(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range cputest.Cases(t, 40, 160) {
		s := reftest.RandomShape(rng)
		if i%2 == 0 {
			s = reftest.RandomScoreMods(rng, s)
		}
		l := randomLayout(rng)
		if l.kind = 1 + formatKind(i)%(formatKinds-1); l.dtype == attn.Float16 && l.kind >= scaledHeads {
			l.dtype = attn.BFloat16 // exact after a division by a power of two
		}
		if l.kind >= scaledHeads && i%3 > 0 {
			l.dtype = []attn.DType{attn.E4M3, attn.Int8}[i/3%2]
		}
		in := reftest.AllInputs[rng.IntN(len(reftest.AllInputs))]
		check := verify[float32]
		if i%3 == 0 {
			check = verify[float64]
		}
		if err := check(rng, s, in, l, randomPolicy(rng), 1+rng.IntN(8), []int{0, 1, 16, 100}[rng.IntN(4)]); err != nil {
			t.Fatal(err)
		}
	}
	s := reftest.Shape{Queries: []int{1, 3}, Keys: []int{3 * decodedKeys, 2*decodedKeys + 5}, Heads: 4, KVHeads: 2, Dim: 24, ValueDim: 8, Mask: attn.Mask{Causal: true}}
	for kind := plain; kind < formatKinds; kind++ {
		if err := verify[float32](rng, s, reftest.Normal, layout{dtype: attn.Float16, page: 64, kind: kind}, randomPolicy(rng), 2, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFormatsInvariant: with batch invariance the bits of a row do not depend on other rows, in every format.
func TestFormatsInvariant(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range cputest.Cases(t, 14, 40) {
		l := randomLayout(rng)
		if l.kind = 1 + formatKind(i)%(formatKinds-1); l.dtype == attn.Float16 {
			l.dtype = attn.BFloat16 // as above
		}
		if _, err := testInvariant[float32](rng, invariantShape(rng), reftest.Normal, l); err != nil {
			t.Errorf("%v: %v", l, err)
		}
	}
}

// TestAppendFormats stores new tokens in pages of every kind of format, and reads them back. Nothing else is written.
func TestAppendFormats(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range cputest.Cases(t, 30, 120) {
		s := reftest.RandomShape(rng)
		s.Queries, s.Trees = slices.Clone(s.Keys), nil // all keys are new
		l := randomLayout(rng)
		if l.kind = formatKind(i) % formatKinds; l.kind == scaledPages && l.dtype == attn.Float16 {
			l.dtype = attn.BFloat16 // a page's first token may be so small that later ones are infinite
		}
		c := reftest.New(rng, s, reftest.Normal, reftest.Float32, reftest.Float32)
		testAppendFormat(t, c, place[float32](rng, c, l), l)
	}
}

func testAppendFormat(t *testing.T, c *reftest.Case, p *problem[float32], l layout) {
	g, f := &p.g, &p.g.Pages
	row := 0
	for i := range p.seqs {
		q := &p.seqs[i]
		q.Row, q.Queries, q.Tree = row, q.Keys, nil
		row += q.Keys
	}
	clean := attn.Mask{Causal: true}
	g.Mask, g.Score = clean, attn.Score{}
	for i := range f.Planes {
		x, m := &f.Planes[i], &p.ops.Pages[i]
		for _, b := range []*cpu.Buffer{&m.Data, &m.Scales} {
			for j := range b.Len {
				cputest.Store(b.Ptr, b.DType, j, []float64{math.NaN()})
			}
		}
		if x.Scales == attn.ScalesByHead {
			for h := range c.KVHeads {
				cputest.Store(m.Scales.Ptr, attn.Float32, h, []float64{1 / float64(h+3)})
			}
		}
	}
	keys := NewRows[float32]{From: attn.PackedRows(c.KVHeads, c.Dim)}
	values := NewRows[float32]{From: attn.PackedRows(c.KVHeads, c.ValueDim)}
	for s, n := range c.Keys {
		for j := range n {
			for h := range c.KVHeads {
				for _, x := range c.Key(s, j, h) {
					keys.Rows = append(keys.Rows, float32(x))
				}
				for _, x := range c.Value(s, j, h) {
					values.Rows = append(values.Rows, float32(x))
				}
			}
		}
	}
	given := values
	if f.Value.Plane < f.KeyPlanes {
		given.Rows = nil
	}
	var plan Plan
	if err := plan.Build(*g, p.seqs); err != nil {
		t.Fatalf("%v: %v", l, err)
	}
	if given.Rows == nil && len(values.Rows) > 0 {
		if err := AppendLayer(cpu.Default(), &plan, p.seqs, &p.ops.Pages, keys, values); !errors.Is(err, attn.ErrShape) {
			t.Fatalf("%v: values that are parts of keys were taken: %v", l, err)
		}
	}
	err := AppendLayer(cpu.Default(), &plan, p.seqs, &p.ops.Pages, keys, given)
	if err != nil {
		t.Fatalf("%v: %v", l, err)
	}
	d := decoder[float32]{plan: &plan, pages: &p.ops.Pages, keys: make([]float32, c.Dim), values: make([]float32, c.ValueDim)}
	near := func(name string, got []float32, want []float64) {
		largest := 0.0
		for _, x := range want {
			largest = max(largest, math.Abs(x))
		}
		for i, x := range want {
			if diff := math.Abs(float64(got[i]) - x); !(diff <= largest/128) {
				t.Fatalf("%v: %s %v, want %v", l, name, got, want)
			}
		}
	}
	written := 0
	for s, n := range c.Keys {
		for j := range n {
			for d.head = range c.KVHeads {
				d.decode(0, 1, int(p.seqs[s].Pages[j/l.page]), j%l.page)
				k, v := d.row(0)
				near("key", unsafe.Slice((*float32)(k), c.Dim), c.Key(s, j, d.head))
				near("value", unsafe.Slice((*float32)(v), c.ValueDim), c.Value(s, j, d.head))
				written++
			}
		}
	}
	for i := range f.Planes {
		b, n := &p.ops.Pages[i].Data, 0
		for j := range b.Len {
			if !math.IsNaN(cputest.Load(b.Ptr, b.DType, j)) {
				n++
			}
		}
		if n != written*f.Planes[i].Dim {
			t.Fatalf("%v: plane %d has %d elements that were written, want %d", l, i, n, written*f.Planes[i].Dim)
		}
	}
}
