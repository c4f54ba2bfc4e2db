// Package gradient computes the gradients of attention on the CPU.
package gradient

import (
	"math"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
)

// Shape is a batch of attentions on dense tensors, all row-major, of which the gradients are wanted:
//
//	Q, DQ     (Batch, Heads, Queries, Dim)        Out, DOut (Batch, Heads, Queries, ValueDim)
//	K, DK     (Batch, KVHeads, Keys, Dim)         V, DV     (Batch, KVHeads, Keys, ValueDim)
//	LSE, DLSE (Batch, Heads, Queries)
type Shape struct {
	Batch, Heads, KVHeads int // head h reads KV head h/(Heads/KVHeads)
	Queries, Keys         int // of every sequence; Keys is the capacity
	Dim, ValueDim         int
	Lengths               []int   // the live keys of each sequence; nil: Keys
	QueryLengths          []int   // the queries of each sequence; nil: Queries. The rows behind them leave no gradient
	Scale                 float64 // on q.k, natural
	attn.Mask
	attn.Score
	Workers int // logical workers; 0: as many as it is worth. The result does not depend on it.
}

// Operands are the buffers of Run. Q, K, V, Out and LSE are the operands and results of the
// forward pass, DOut and DLSE the gradients of a cost in its results, and DQ, DK and DV receive those in
// its operands. DOut may be nil, for 0; then V, Out and DV are not used. DLSE may be nil, for 0.
type Operands[F lean.Float] struct {
	Q, K, V, Out, LSE, DOut, DLSE []F
	DQ, DK, DV                    []F
	Bias, DBias                   []F   // as the shape's; DBias may be nil: it is not computed
	Sinks, DSinks                 []F   // of the query heads, where the shape has Sinks; DSinks may be nil, too
	Seed                          int64 // of the shape's Dropout, that of the forward pass
}

// Run computes the gradients of attention. With p_ij = e^(s_ij - lse_i) for the keys j that query i
// sees, and 0 for all others:
//
//	D_i   = dO_i . O_i - dLSE_i
//	dS_ij = p_ij (z_ij dO_i . v_j - D_i)
//	dq_i  = Scale sum_j dS_ij k_j
//	dk_j  = Scale sum_i dS_ij q_i
//	dv_j  = sum_i z_ij p_ij dO_i
//	dBias = sum dS_ij, over all that share a number of the bias, times its factor
//	dSink = -sum e^(sink-lse_i) D_i, over all queries of a query head, those too that see no key
//
// where the sums over i run over all query heads of a KV head, and s_ij, of SoftCap, Slopes and Bias, is what it
// is in the forward pass, as is lse_i, of which a sink is a part; with a soft cap dS has the factor 1-t*t for dq and dk, t
// being the tanh in s. z_ij is what dropout makes of a weight: 0 or 1/(1-Dropout), and 1 without one. It is algorithm 4 of
// FlashAttention (Dao et al., arXiv:2205.14135): p, and z from the seed, are computed again, block by block, so nothing of Queries x Keys elements is
// ever in memory. Beside the operands it uses some blocks for each worker, and, where there are fewer KV
// heads in the batch than it wants to have work for, up to minUnits copies of a KV head's DQ, or of its DK
// and DV if that is less.
//
// Keys and values beyond a length are not read, and their gradients are 0; so is all that a query leaves
// there that sees no key. Sums have one order, which follows from the shape, the lengths and the kernels in use:
// the result is the same, bit for bit, on every run and for any number of workers and threads.
//
// Everything is checked before anything is written; the error wraps ErrShape, ErrTier, or ErrPanic, with
// which the gradients are undefined. DQ, DK and DV overlap none of the others.
func Run[F lean.Float](e *cpu.Engine, s *Shape, o *Operands[F]) error {
	if unsafe.Sizeof(F(0)) == 4 {
		return backward(e, &backward32, s, (*Operands[float32])(unsafe.Pointer(o)))
	}
	return backward(e, &backward64, s, (*Operands[float64])(unsafe.Pointer(o)))
}

// canBackward is what gradients can do on a CPU. A feature of a problem that is not listed is refused.
var canBackward = attn.Can{
	Name:     "gradients on the CPU",
	Features: attn.Causal | attn.Window | attn.Cap | attn.SlopesOfHeads | attn.AddedBias | attn.Sinks | attn.Dropout,
	KV:       []attn.DType{attn.Float32, attn.Float64},
}

// Can reports what of a mask and of changes of scores gradients can't do.
func Can(m attn.Mask, s attn.Score) error {
	return canBackward.Do("backward", &attn.Problem{Mask: m, Score: s})
}

// The memory of backward passes that are over. Of training steps one comes at a time, so what is kept is
// that of the passes that ran at once.
var (
	backward32 cpu.Spare[backwardRun[float32]]
	backward64 cpu.Spare[backwardRun[float64]]
)

func backward[F cpu.Real](e *cpu.Engine, free *cpu.Spare[backwardRun[F]], s *Shape, o *Operands[F]) error {
	if err := cpu.CheckTier(); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	if err := o.check(s); err != nil {
		return err
	}
	run := free.Get()
	if err := run.run(e, s, o); err != nil {
		return err // what its workers did is not known: it is not used again
	}
	run.forget()
	free.Put(run)
	return nil
}

// check reports what is wrong with s itself.
func (s *Shape) check() error {
	const op = "backward"
	switch {
	case s.Batch < 1 || s.Queries < 1 || s.Keys < 1:
		return attn.Errorf(op, attn.ErrShape, "a batch of %d with %d queries and %d keys", s.Batch, s.Queries, s.Keys)
	case s.KVHeads < 1 || s.Heads < 1 || s.Heads%s.KVHeads != 0:
		return attn.Errorf(op, attn.ErrShape, "%d query heads for %d KV heads", s.Heads, s.KVHeads)
	case s.Dim < 1 || s.ValueDim < 1:
		return attn.Errorf(op, attn.ErrShape, "head dim %d, value dim %d", s.Dim, s.ValueDim)
	case s.Workers < 0:
		return attn.Errorf(op, attn.ErrShape, "%d workers", s.Workers)
	case math.IsNaN(s.Scale) || math.IsInf(s.Scale, 0):
		return attn.Errorf(op, attn.ErrShape, "scale %v", s.Scale)
	case s.Lengths != nil && len(s.Lengths) != s.Batch:
		return attn.Errorf(op, attn.ErrShape, "%d lengths for a batch of %d", len(s.Lengths), s.Batch)
	case s.QueryLengths != nil && len(s.QueryLengths) != s.Batch:
		return attn.Errorf(op, attn.ErrShape, "%d query lengths for a batch of %d", len(s.QueryLengths), s.Batch)
	}
	for b, n := range s.Lengths {
		if n < 0 || n > s.Keys {
			return attn.Errorf(op, attn.ErrShape, "length %d is %d, outside [0, %d]", b, n, s.Keys)
		}
	}
	for b, n := range s.QueryLengths {
		if n < 0 || n > s.Queries {
			return attn.Errorf(op, attn.ErrShape, "query length %d is %d, outside [0, %d]", b, n, s.Queries)
		}
	}
	if err := s.Mask.Check(op); err != nil {
		return err
	}
	if err := s.Score.Check(op, s.Heads); err != nil {
		return err
	}
	if err := Can(s.Mask, s.Score); err != nil {
		return err
	}
	if b := s.Bias; b != (attn.Bias{}) && (b.Sequences != 1 && b.Sequences != s.Batch || b.Queries != 1 && b.Queries != s.Queries || b.Keys != s.Keys) {
		return attn.Errorf(op, attn.ErrShape, "a bias of %d sequences, %d queries and %d keys for %d, %d and %d",
			b.Sequences, b.Queries, b.Keys, s.Batch, s.Queries, s.Keys)
	}
	return nil
}

// check reports whether o has the sizes of s.
func (o *Operands[F]) check(s *Shape) error {
	const op = "backward"
	for _, b := range []struct {
		name             string
		of               []F
		heads, rows, dim int
		absent           bool
	}{
		{"Q", o.Q, s.Heads, s.Queries, s.Dim, false},
		{"K", o.K, s.KVHeads, s.Keys, s.Dim, false},
		{"V", o.V, s.KVHeads, s.Keys, s.ValueDim, o.DOut == nil},
		{"Out", o.Out, s.Heads, s.Queries, s.ValueDim, o.DOut == nil},
		{"LSE", o.LSE, s.Heads, s.Queries, 1, false},
		{"DOut", o.DOut, s.Heads, s.Queries, s.ValueDim, o.DOut == nil},
		{"DLSE", o.DLSE, s.Heads, s.Queries, 1, o.DLSE == nil},
		{"DQ", o.DQ, s.Heads, s.Queries, s.Dim, false},
		{"DK", o.DK, s.KVHeads, s.Keys, s.Dim, false},
		{"DV", o.DV, s.KVHeads, s.Keys, s.ValueDim, o.DOut == nil},
	} {
		want := attn.Product(s.Batch, b.heads, b.rows, b.dim)
		if !b.absent && len(b.of) != want {
			return attn.Errorf(op, attn.ErrShape, "%s has %d elements, want %d", b.name, len(b.of), want)
		}
	}
	if n := s.Bias.Size(); len(o.Bias) != n || o.DBias != nil && len(o.DBias) != n {
		return attn.Errorf(op, attn.ErrShape, "Bias has %d elements and DBias %d, want %d", len(o.Bias), len(o.DBias), n)
	}
	if n := len(o.Sinks); s.Sinks && n != s.Heads || !s.Sinks && o.Sinks != nil || o.DSinks != nil && len(o.DSinks) != n {
		return attn.Errorf(op, attn.ErrShape, "%d sinks and gradients for %d of them, %d query heads, sinks: %t", n, len(o.DSinks), s.Heads, s.Sinks)
	}
	return nil
}

func (s *Shape) group() int { return s.Heads / s.KVHeads }

// rows is the number of query rows of a KV head: those of all heads of its group, one head's behind the
// other's, as they lie in memory.
func (s *Shape) rows() int { return s.group() * s.Queries }

// live returns the live keys of sequence b.
func (s *Shape) live(b int) int {
	if s.Lengths == nil {
		return s.Keys
	}
	return s.Lengths[b]
}

// queries returns the queries of sequence b.
func (s *Shape) queries(b int) int {
	if s.QueryLengths == nil {
		return s.Queries
	}
	return s.QueryLengths[b]
}

// position returns the place of a row of a KV head among the live keys of sequence b.
func (s *Shape) position(b, row int) int {
	return attn.Position(s.queries(b), s.live(b), row%s.Queries)
}

// visible returns the live keys [first, end) that a row of a KV head of sequence b sees: none behind its queries.
func (s *Shape) visible(b, row int) (first, end int) {
	n, i := s.queries(b), row%s.Queries
	if i >= n {
		return 0, 0
	}
	return s.Mask.Keys(n, s.live(b), i)
}
