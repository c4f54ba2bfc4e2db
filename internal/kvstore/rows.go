package kvstore

import (
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/tensor"
)

// Rows is the geometry of attention on a cache: q (tokens, heads*dim),
// k (tokens, kvHeads*dim), v (tokens, kvHeads*valueDim) -> out (tokens, heads*valueDim).
type Rows struct {
	Tokens, Heads int
	Query         tensor.Dtype
}

func (r *Rows) outShape(valueDim int) tensor.Shape {
	return tensor.Shape{r.Tokens, r.Heads * valueDim}
}

func (r *Rows) LSEShape() tensor.Shape { return tensor.Shape{r.Tokens, r.Heads} }

// MassShape is the shape of attention mass with places for n LeanTiles of a row.
func (r *Rows) MassShape(n int) tensor.Shape { return tensor.Shape{r.Tokens, r.Heads, n} }

func (r *Rows) LSEType() tensor.Dtype { return operand.LSEType(r.Query) }
