package attention

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Attention mass: how much of a row's weights each LeanTile has. A LeanTile's weights are summed by themselves. Until all states of the row
// are merged, the row's places in Operands.Mass have the LeanTiles' log-sum-exps of base 4.

// canWeigh has the features of attention that goes with attention mass: LeanTiles begin at multiples of their size, and weights have a sum.
var canWeigh = attn.Can{
	Name: "attention mass",
	Features: attn.Causal | canModify | attn.Sinks | attn.Rotates | attn.RotatesBehind |
		attn.OtherValueDim | attn.SeveralPlanes | attn.ValuesInKeys | attn.SeveralTypes | attn.Scaled | attn.MixedKeys | attn.OtherPolicy | attn.SetTiles | attn.SetWorkers,
	KV: canAttend.KV,
}

// CanWeigh returns an error if attention mass does not go with a problem.
func CanWeigh(op string, g *attn.Problem) error {
	if err := canWeigh.Do(op, g); err != nil {
		return err
	}
	if g.Variant != nil && g.Variant.Unnormalised {
		return attn.Errorf(op, attn.ErrUnsupported, "attention mass of a variant that is Unnormalised: its weights have no sum")
	}
	return nil
}

// checkMass returns an error if the plan can't have attention mass, or if the memory for it is too small.
func checkMass[F cpu.Real](op string, p *Plan, o *Operands[F]) error {
	if o.Mass == nil {
		return nil
	}
	g := &p.g
	if err := CanWeigh(op, g); err != nil {
		return err
	}
	if p.shares {
		return attn.Errorf(op, attn.ErrUnsupported, "attention mass with keys that sequences share")
	}
	for i := range p.seqs {
		if n := attn.Ceil(p.seqs[i].keys, g.TileTokens); n > o.Tiles {
			return attn.Errorf(op, attn.ErrShape, "sequence %d has %d LeanTiles, and attention mass has places for %d", i, n, o.Tiles)
		}
	}
	if n := g.LSE.Extent(p.rows, g.Heads, 1) * o.Tiles; len(o.Mass) < n {
		return attn.Errorf(op, attn.ErrShape, "attention mass has %d elements, the plan needs %d", len(o.Mass), n)
	}
	return nil
}

// massOf returns the places for the attention mass of a row.
func (o *Operands[F]) massOf(g *attn.Problem, row, head int) []F {
	at := (row*g.LSE.Row + head*g.LSE.Head) * o.Tiles
	return o.Mass[at : at+o.Tiles]
}

// clearMass writes log-sum-exps of no keys to Operands.Mass before any worker begins. Rows that see no key, which no worker visits, get 0.
func clearMass[F cpu.Real](p *Plan, o *Operands[F]) {
	if o.Mass == nil {
		return
	}
	for i := range p.seqs {
		s := &p.seqs[i]
		for row := s.row; row < s.row+s.queries; row++ {
			for h := range p.g.Heads {
				m := o.massOf(&p.g, row, h)
				clear(m)
				if row < s.row+s.masked {
					continue
				}
				for t := range m {
					m[t] = F(math.Inf(-1))
				}
			}
		}
	}
}

// finishMass replaces the log-sum-exps of a row's LeanTiles by the LeanTiles' shares of all weights. s is the state of all keys.
func finishMass[F cpu.Real](m []F, s *lean.State[F]) {
	if s.Empty() {
		clear(m)
		return
	}
	all := float64(s.M) + math.Log(float64(s.L))*lean.Log4E
	for t, x := range m {
		m[t] = F(math.Exp(lean.Ln4 * (float64(x) - all)))
	}
}

// massRun is a worker's scratch: maxima and sums of rows before a LeanTile.
type massRun[F cpu.Real] struct{ m, l []F }

func (r *massRun[F]) grow(rows int) {
	if len(r.m) < rows {
		r.m, r.l = make([]F, rows), make([]F, rows)
	}
}

// begin keeps the maxima and sums of a block's rows, and sets the sums to 0 for the keys of a LeanTile.
func (r *massRun[F]) begin(of *partial[F], rows int) {
	copy(r.m, of.m[:rows])
	copy(r.l, of.l[:rows])
	clear(of.l[:rows])
}

// end writes the log-sum-exps of the rows over LeanTile number `tile` of the sequence, and adds the sums that begin has kept.
func (r *massRun[F]) end(ws *workspace[F], b block, of *partial[F], tile int) {
	for i := range b.rows {
		m, l := of.m[i], of.l[i]
		if l > 0 {
			ws.ops.massOf(&ws.plan.g, b.seq.row+b.from+i/b.group, b.head0+i%b.group)[tile] = F(float64(m) + math.Log(float64(l))*lean.Log4E)
		}
		switch before := r.l[i]; {
		case before == 0:
		case m == r.m[i]:
			of.l[i] += before
		default:
			of.l[i] += before * F(math.Exp2(2*(float64(r.m[i])-float64(m))))
		}
	}
}
