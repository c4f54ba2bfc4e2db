package attn

import (
	"errors"
	"fmt"
	"math"
	"math/bits"

	"gorgonia.org/leanattention/internal/lean"
)

// Strides gives the offsets of rows of queries, outputs or log-sum-exps, in elements:
//
//	offset(row, head) = row*Row + head*Head
type Strides struct{ Row, Head int }

// PackedRows returns the strides of contiguous rows, whose heads are contiguous.
func PackedRows(heads, dim int) Strides { return Strides{Row: heads * dim, Head: dim} }

// PageStrides gives the offsets of rows of keys or values, in elements:
//
//	offset(page, head, slot) = page*Page + head*Head + slot*Row
type PageStrides struct{ Page, Head, Row int }

// Problem describes attention: all that is the same for every sequence and layer.
//
// In a dense tensor each sequence is one page, and PageTokens is the capacity.
type Problem struct {
	Heads, KVHeads int     // query heads, a multiple of the KV heads; head h reads KV head h/(Heads/KVHeads)
	Dim, ValueDim  int     // elements of a query or key row, and of a value or output row
	Pages          Format  // how keys and values are stored
	Scale          float64 // on q.k, before natural exponentials
	Mask                   // which keys a query sees
	Score                  // what happens to scores before the softmax
	Rotary         Rotary  // rotates queries and new keys; zero: none

	Query, Out, LSE Strides
	PageTokens      int

	TileTokens int         // tokens of a LeanTile; 0: the engine's choice
	Policy     lean.Policy // how LeanTiles are handed to workers
	Unfused    bool        // compute scores, softmax and weighted sum in separate steps
	Workers    int         // logical workers; 0: the engine's choice

	// Invariant means that the bits of a row depend only on its query, and on the keys and values that the query sees. They do not
	// depend on other sequences, on other rows, or on the schedule.
	Invariant bool

	// Measures asks an engine for entropies or attention mass. The CPU's needs no other plan for them.
	Measures bool

	// Mixed allows an engine to round queries and weights to the type of keys. It is no Feature, since an engine need not round.
	Mixed bool

	// QueryType is the expected type of queries and outputs. An engine may choose kernels by QueryType, and computes other types correctly,
	// so QueryType is no Feature.
	QueryType DType
}

// Group returns how many query heads read a KV head.
func (p *Problem) Group() int { return p.Heads / p.KVHeads }

// Check returns an error for a problem that no engine can compute. Errors wrap ErrShape, ErrDType or ErrUnsupported.
func (p *Problem) Check(op string) error {
	switch {
	case p.KVHeads < 1 || p.Heads < 1 || p.Heads%p.KVHeads != 0:
		return Errorf(op, ErrShape, "%d query heads for %d KV heads", p.Heads, p.KVHeads)
	case p.Dim < 1 || p.ValueDim < 1:
		return Errorf(op, ErrShape, "head dim %d, value dim %d", p.Dim, p.ValueDim)
	case p.PageTokens < 1:
		return Errorf(op, ErrShape, "pages of %d tokens", p.PageTokens)
	case p.TileTokens < 0:
		return Errorf(op, ErrShape, "LeanTiles of %d tokens", p.TileTokens)
	case p.Workers < 0:
		return Errorf(op, ErrShape, "%d workers", p.Workers)
	case math.IsNaN(p.Scale) || math.IsInf(p.Scale, 0):
		return Errorf(op, ErrShape, "scale %v", p.Scale)
	case p.Policy.Kind > lean.PerHead:
		return Errorf(op, ErrShape, "schedule %d", p.Policy.Kind)
	case p.Policy.Kind == lean.FixedSplit && p.Policy.Splits < 1:
		return Errorf(op, ErrShape, "a fixed split into %d", p.Policy.Splits)
	}
	if err := p.Pages.Check(op); err != nil {
		return err
	}
	if k, v := p.Pages.KeyDim(), p.Pages.Value.Dim; k != p.Dim || v != p.ValueDim {
		return Errorf(op, ErrShape, "head dim %d, value dim %d, and pages with keys of %d and values of %d elements", p.Dim, p.ValueDim, k, v)
	}
	if err := p.Mask.Check(op); err != nil {
		return err
	}
	if err := p.Score.Check(op, p.Heads); err != nil {
		return err
	}
	if err := p.Rotary.Check(op, p.Dim); err != nil {
		return err
	}
	if p.Tree {
		if err := p.TreeFits(); err != nil {
			return Errorf(op, ErrUnsupported, "%v", err)
		}
	}
	if err := p.InvariantFits(); err != nil {
		return Errorf(op, ErrUnsupported, "%v", err)
	}
	for _, s := range []struct {
		name string
		Strides
	}{{"query", p.Query}, {"output", p.Out}, {"log-sum-exp", p.LSE}} {
		if s.Row < 0 || s.Head < 0 {
			return Errorf(op, ErrShape, "%s strides %+v", s.name, s.Strides)
		}
	}
	return nil
}

// TreeFits returns an error if p has features that exclude trees.
func (p *Problem) TreeFits() error {
	// The position of a token of a tree follows from its depth, and not from the index of its key. Features that read the distance
	// between a query and a key would use the index.
	switch {
	case !p.Causal:
		return errors.New("a tree without a causal mask")
	case p.Window != 0:
		return fmt.Errorf("a tree and a window of %d keys", p.Window)
	case p.Slopes != "":
		return errors.New("a tree and slopes of scores (ALiBi)")
	case p.Variant != nil:
		return errors.New("a tree and a variant")
	}
	return nil
}

// MaxInvariantTile is the most tokens of a LeanTile with batch invariance. Such a LeanTile is one sum.
const MaxInvariantTile = 4096

// InvariantFits returns an error if p has features that exclude batch invariance.
func (p *Problem) InvariantFits() error {
	switch {
	case !p.Invariant:
		return nil
	case p.Dropout != 0: // the dropped weights depend on the number of a sequence and of a query
		return fmt.Errorf("batch invariance and a dropout of %v", p.Dropout)
	case p.Unfused:
		return errors.New("batch invariance and unfused attention")
	case p.TileTokens > MaxInvariantTile:
		return fmt.Errorf("batch invariance and LeanTiles of %d tokens: %d are the most", p.TileTokens, MaxInvariantTile)
	}
	return nil
}

// Check returns an error for negative strides.
func (s PageStrides) Check(op, name string) error {
	if s.Page < 0 || s.Head < 0 || s.Row < 0 {
		return Errorf(op, ErrShape, "%s strides %+v", name, s)
	}
	return nil
}

// Offset returns the offset of a row.
func (s PageStrides) Offset(page, head, slot int) int { return page*s.Page + head*s.Head + slot*s.Row }

// Extent returns the number of elements from the first to the last of rows [0, rows), with heads heads of dim elements; MaxInt if the number is
// no int.
func (s Strides) Extent(rows, heads, dim int) int {
	if rows == 0 {
		return 0
	}
	return sumProducts(dim, rows-1, s.Row, heads-1, s.Head, 0, 0)
}

// Extent returns the number of elements from the first to the last of pages [0, pages), with heads heads and slots slots of dim elements; MaxInt
// if the number is no int.
func (s PageStrides) Extent(pages, heads, slots, dim int) int {
	if pages == 0 {
		return 0
	}
	return sumProducts(dim, pages-1, s.Page, heads-1, s.Head, slots-1, s.Row)
}

// sumProducts returns n + a*b + c*d + e*f for arguments >= 0, and MaxInt if that does not fit.
func sumProducts(n, a, b, c, d, e, f int) int {
	sum := uint64(n)
	for _, p := range [3][2]int{{a, b}, {c, d}, {e, f}} {
		hi, lo := bits.Mul64(uint64(p[0]), uint64(p[1]))
		var carry uint64
		sum, carry = bits.Add64(sum, lo, 0)
		if hi != 0 || carry != 0 || sum > math.MaxInt {
			return math.MaxInt
		}
	}
	return int(sum)
}

// Product returns the product of numbers >= 0, and MaxInt if that does not fit.
func Product(ns ...int) int {
	p := 1
	for _, n := range ns {
		p = sumProducts(0, p, n, 0, 0, 0, 0)
	}
	return p
}

// Reduced returns g with the mask Causal in place of the condition key <= query of its Variant. Attention is the same.
func (g Problem) Reduced() Problem {
	if g.Variant == nil {
		return g
	}
	if rest, ok := g.Variant.WithoutCausal(); ok {
		g.Causal, g.Variant = true, rest
	}
	return g
}
