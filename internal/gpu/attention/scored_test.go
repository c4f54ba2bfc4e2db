//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// Every sequence has its own bias number and its own tree, in any order of rows, and with any number of sequences of
// equal length.
func TestPlanDetails(t *testing.T) {
	rng := reftest.Rand(t)
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	plan := m.engine.NewPlan()
	for range 30 {
		n := 1 + rng.IntN(12)
		g := paged(4, 2, 64)
		g.Pages.Planes[0].DType, g.Bias = attn.Float16, attn.Bias{Sequences: n, Heads: 1, Queries: 3, Keys: 40}
		g.Causal, g.Tree = true, true
		seqs, rows := make([]attn.Sequence, n), 0
		numberOf := map[int32]int32{} // by rows
		for page, i := range rng.Perm(n) {
			q := rng.IntN(4)
			seqs[i] = attn.Sequence{Row: rows, Queries: q, Keys: enginetest.Pick(rng, 3, 7, 16), Pages: []int32{int32(page)}}
			if rng.IntN(2) == 0 && q > 0 {
				seqs[i].Tree = reftest.RandomTree(rng, q)
			}
			if q > 0 {
				numberOf[int32(rows)] = int32(i)
			}
			rows += q
		}
		noError(t, plan.Build(g, seqs, 0))
		if len(plan.seqs.data) != len(numberOf) || len(plan.details.data) != len(plan.seqs.data) {
			t.Fatalf("%d of %d sequences, %d details", len(plan.seqs.data), len(numberOf), len(plan.details.data))
		}
		for i, s := range plan.seqs.data {
			d := plan.details.data[i]
			if d.number != numberOf[s.row] {
				t.Fatalf("rows from %d on are of sequence %d: %+v", s.row, numberOf[s.row], d)
			}
			tree := seqs[d.number].Tree
			if tree == nil && d.tree != -1 || tree != nil && !slices.Equal(plan.trees.data[d.tree:][:len(tree)], tree) {
				t.Fatalf("sequence %d has the tree %#x: %+v of %#x", d.number, tree, d, plan.trees.data)
			}
		}
	}
	noError(t, plan.Close())
}

// Run refuses missing sinks, sinks of another type, and sinks for fewer heads.
func TestRunRefusesSinks(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	p.geometry.Sinks = true
	plan := m.engine.NewPlan()
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	noError(t, plan.Upload(m.Stream))
	sinks := m.Put(t, enginetest.Poisoned(p.Heads, attn.Float32), attn.Float32)
	for _, c := range []struct {
		spoil func(o *Operands)
		err   error
		text  string
	}{
		{func(o *Operands) { o.Sinks.Buffer = nil }, attn.ErrShape, "sinks has no buffer"},
		{func(o *Operands) { o.Sinks.DType = attn.BFloat16 }, attn.ErrDType, "sinks are bfloat16"},
		{func(o *Operands) { o.Sinks.Len-- }, attn.ErrShape, "sinks has"},
		{func(o *Operands) { o.Sinks.Offset += 2 }, attn.ErrShape, "of a buffer of"},
	} {
		o := p.operands()
		o.Sinks = sinks
		c.spoil(o)
		wantError(t, c.text, plan.Run(m.Stream, o), c.err, c.text)
	}
	m.Settle(t)
	if strings.Contains(lib.Log(), "kernel") {
		t.Error("a kernel was launched")
	}
	noError(t, sinks.Buffer.Close())
	noError(t, plan.Close())
	p.close(t)
}
