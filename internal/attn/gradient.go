package attn

import "math"

// Gradient is a batch of attentions on dense, row-major tensors whose gradients are computed:
//
//	Q, DQ     (Batch, Heads, Queries, Dim)        Out, DOut (Batch, Heads, Queries, ValueDim)
//	K, DK     (Batch, KVHeads, Keys, Dim)         V, DV     (Batch, KVHeads, Keys, ValueDim)
//	LSE, DLSE (Batch, Heads, Queries)
type Gradient struct {
	Batch, Heads, KVHeads int // head h reads KV head h/(Heads/KVHeads)
	Queries, Keys         int // of every sequence; Keys is the capacity
	Dim, ValueDim         int
	Lengths               []int   // live keys of each sequence; nil: Keys
	QueryLengths          []int   // queries of each sequence; nil: Queries. Rows after them have no gradient
	Scale                 float64 // factor of q.k
	Mask
	Score
	Workers  int     // logical workers; 0 chooses. The result does not depend on the number
	DTensors [][]int // for GPUs: of each tensor of the Variant whose gradient is wanted the shape; nil: not wanted
}

// Check returns an error for a problem that no engine can compute.
func (s *Gradient) Check(op string) error {
	switch {
	case s.Batch < 1 || s.Queries < 1 || s.Keys < 1:
		return Errorf(op, ErrShape, "a batch of %d with %d queries and %d keys", s.Batch, s.Queries, s.Keys)
	case s.KVHeads < 1 || s.Heads < 1 || s.Heads%s.KVHeads != 0:
		return Errorf(op, ErrShape, "%d query heads for %d KV heads", s.Heads, s.KVHeads)
	case s.Dim < 1 || s.ValueDim < 1:
		return Errorf(op, ErrShape, "head dim %d, value dim %d", s.Dim, s.ValueDim)
	case s.Workers < 0:
		return Errorf(op, ErrShape, "%d workers", s.Workers)
	case math.IsNaN(s.Scale) || math.IsInf(s.Scale, 0):
		return Errorf(op, ErrShape, "scale %v", s.Scale)
	case s.Lengths != nil && len(s.Lengths) != s.Batch:
		return Errorf(op, ErrShape, "%d lengths for a batch of %d", len(s.Lengths), s.Batch)
	case s.QueryLengths != nil && len(s.QueryLengths) != s.Batch:
		return Errorf(op, ErrShape, "%d query lengths for a batch of %d", len(s.QueryLengths), s.Batch)
	}
	for b, n := range s.Lengths {
		if n < 0 || n > s.Keys {
			return Errorf(op, ErrShape, "length %d is %d, outside [0, %d]", b, n, s.Keys)
		}
	}
	for b, n := range s.QueryLengths {
		if n < 0 || n > s.Queries {
			return Errorf(op, ErrShape, "query length %d is %d, outside [0, %d]", b, n, s.Queries)
		}
	}
	if err := s.Mask.Check(op); err != nil {
		return err
	}
	if err := s.Score.Check(op, s.Heads); err != nil {
		return err
	}
	if b := s.Bias; b != (Bias{}) && (b.Sequences != 1 && b.Sequences != s.Batch || b.Queries != 1 && b.Queries != s.Queries || b.Keys != s.Keys) {
		return Errorf(op, ErrShape, "a bias of %d sequences, %d queries and %d keys for %d, %d and %d",
			b.Sequences, b.Queries, b.Keys, s.Batch, s.Queries, s.Keys)
	}
	return nil
}

// Group returns how many query heads read a KV head.
func (s *Gradient) Group() int { return s.Heads / s.KVHeads }

// Rows returns the number of query rows of a KV head: those of all heads of its group, one head after the other, as
// in memory.
func (s *Gradient) Rows() int { return s.Group() * s.Queries }

// Live returns the live keys of sequence b.
func (s *Gradient) Live(b int) int {
	if s.Lengths == nil {
		return s.Keys
	}
	return s.Lengths[b]
}

// QueriesOf returns the queries of sequence b.
func (s *Gradient) QueriesOf(b int) int {
	if s.QueryLengths == nil {
		return s.Queries
	}
	return s.QueryLengths[b]
}

// Position returns the position of a row of a KV head among the live keys of sequence b.
func (s *Gradient) Position(b, row int) int {
	return Position(s.QueriesOf(b), s.Live(b), row%s.Queries)
}

// Visible returns the live keys [first, end) that a row of a KV head of sequence b sees: none after its queries.
func (s *Gradient) Visible(b, row int) (first, end int) {
	n, i := s.QueriesOf(b), row%s.Queries
	if i >= n {
		return 0, 0
	}
	return s.Mask.Keys(n, s.Live(b), i)
}
