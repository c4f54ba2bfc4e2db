package attention

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
)

// Keys that several sequences share (prefixes) are attended to once, by the rows of all these sequences: they are read
// once for any number of forks. The sequences' own keys have an ordinary plan. The states of both are merged row by
// row.

// prefixBytes is the least number of bytes of keys and values that a prefix must save. Cached keys are read again at no
// cost, and the two further runs then cost up to a quarter: measured on two cores with 4 MB. From 6 MB on all shapes
// gain.
const prefixBytes = 8 << 20

// prefixPlan is the part of a plan for prefixes.
type prefixPlan struct {
	plan  Plan
	found attn.Prefixes
	own   []attn.Sequence // sequences without their prefixes
	seqs  []attn.Sequence // prefixes as sequences: their rows are those of all members
	rows  []int32         // of each of these rows, the row of its queries
	shift []int32         // with slopes, of each of these rows: see attn.Prefixes.AppendShifts
}

// canShare has the features that allow prefixes. Batch invariance does not: where a prefix ends, and whether sharing
// pays, depends on other sequences.
const canShare = attn.InParts | attn.Shareable

// findPrefixes reports whether there are prefixes that pay. It then lists the prefixes, and returns the sequences' own
// keys. It writes only scratch. seqs have been checked, except their page numbers.
func (p *Plan) findPrefixes(g *attn.Problem, seqs []attn.Sequence) (own []attn.Sequence, shares bool) {
	if len(seqs) < 2 || g.Features()&^canShare != 0 {
		return seqs, false
	}
	if p.prefix == nil {
		p.prefix = new(prefixPlan)
	}
	x := p.prefix
	row, bytes := g.KVHeads*g.Pages.TokenBytes(), p.PrefixBytes
	if bytes == 0 {
		bytes = prefixBytes
	}
	x.found.Find(g, seqs, (bytes-1)/row+1, math.MaxInt)
	if len(x.found.Found) == 0 {
		return seqs, false
	}
	x.own, x.seqs = x.found.AppendOwn(x.own[:0], seqs), x.seqs[:0]
	queries := 0
	for i := range x.found.Found {
		s := x.found.Sequence(&x.found.Found[i], seqs)
		s.Row, queries = queries, queries+s.Queries
		x.seqs = append(x.seqs, s)
	}
	return x.own, true
}

// layPrefixes builds the plan of the prefixes that findPrefixes has listed.
func (p *Plan) layPrefixes(g *attn.Problem, seqs []attn.Sequence, lastPage int) {
	x := p.prefix
	x.rows, x.shift = x.rows[:0], x.shift[:0]
	for i := range x.found.Found {
		x.rows = x.found.AppendRows(x.rows, &x.found.Found[i], seqs)
		if g.Slopes != "" {
			x.shift = x.found.AppendShifts(x.shift, &x.found.Found[i], seqs)
		}
	}
	x.plan.lay(g.OfPrefixes(), x.seqs, lastPage)
}

// prefixRun is a run of a plan with prefixes.
type prefixRun[F cpu.Real] struct {
	plan    *Plan
	ops     *Operands[F]
	of      Operands[F] // of the prefixes
	own     Operands[F]
	lse     []F // of the own keys, if the caller has no LSE
	workers int
}

// runPrefixes is run for a plan with prefixes.
func runPrefixes[F cpu.Real](e *cpu.Engine, p *Plan, o *Operands[F]) error {
	runs := &cpu.Own[spares[F]](e).prefixes
	x, g := p.prefix, &p.g
	r := runs.Get()
	rows := len(x.rows)
	grown := func(s []F, n int) []F {
		if cap(s) < n {
			return dense.Make[F](n)
		}
		return s[:n]
	}
	r.of = Operands[F]{
		Q: grown(r.of.Q, rows*g.Heads*g.Dim), Out: grown(r.of.Out, rows*g.Heads*g.ValueDim), LSE: grown(r.of.LSE, rows*g.Heads),
		Pages: o.Pages,
	}
	r.plan, r.ops, r.own = p, o, *o
	if o.LSE == nil {
		r.lse = grown(r.lse, g.LSE.Extent(p.rows, g.Heads, 1))
		r.own.LSE = r.lse
	}
	if o.Entropy != nil {
		r.of.Entropy = grown(r.of.Entropy, rows*g.Heads)
	}
	if err := check(&x.plan, &r.of); err != nil {
		return err
	}
	for i, row := range x.rows {
		for h := range g.Heads {
			at := int(row)*g.Query.Row + h*g.Query.Head
			to, q := r.of.Q[(i*g.Heads+h)*g.Dim:][:g.Dim], o.Q[at:at+g.Dim]
			if p.rotation.turns() {
				turnRow(&p.rotation, int(row), to, q)
			} else {
				copy(to, q)
			}
		}
	}
	if err := runOwn(e, &x.plan, &r.of); err != nil {
		return err
	}
	if err := runOwn(e, p, &r.own); err != nil {
		return err
	}
	r.workers = min(cpu.ThreadsFor(float64(rows*g.Heads*g.ValueDim)*2*cpu.ElementNanos), g.Heads)
	if err := e.Run(r, r.workers); err != nil {
		return err
	}
	r.plan, r.ops, r.of.Pages, r.own = nil, nil, attn.Memory[cpu.Buffer]{}, Operands[F]{}
	runs.Put(r)
	return nil
}

// Work merges the states of a worker's share of the heads, prefix by prefix. A row may be in several prefixes. The
// result replaces the state of its own keys.
func (r *prefixRun[F]) Work(worker, _ int) {
	g, rows, shift := &r.plan.g, r.plan.prefix.rows, r.plan.prefix.shift
	for h := g.Heads * worker / r.workers; h < g.Heads*(worker+1)/r.workers; h++ {
		slope := 0.0
		if len(shift) > 0 {
			slope = g.Slopes.Of(h)
		}
		for i, row := range rows {
			of := r.of.LSE[i*g.Heads+h]
			if len(shift) > 0 {
				of = F(float64(of) + slope*float64(shift[i]))
			}
			at, lse := int(row)*g.Out.Row+h*g.Out.Head, &r.own.LSE[int(row)*g.LSE.Row+h*g.LSE.Head]
			out, before := r.own.Out[at:at+g.ValueDim], *lse
			*lse = lean.MergeNormalized(out, []lean.Normalized[F]{
				{O: out, LSE: *lse}, {O: r.of.Out[(i*g.Heads+h)*g.ValueDim:][:g.ValueDim], LSE: of},
			})
			if r.own.Entropy != nil {
				to := &r.own.Entropy[int(row)*g.LSE.Row+h*g.LSE.Head]
				*to = F(shareOfEntropy(float64(*to), float64(before), float64(*lse), float64(r.own.Sink(h))) + shareOfEntropy(float64(r.of.Entropy[i*g.Heads+h]), float64(of), float64(*lse), math.Inf(-1)))
			}
		}
	}
}
