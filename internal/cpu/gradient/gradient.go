// Package gradient computes the gradients of attention on the CPU.
package gradient

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"
)

// Shape is the problem that Run solves.
type Shape = attn.Gradient

// Operands are the buffers of Run. Q, K, V, Out and LSE are the operands and results of the forward pass. DOut and
// DLSE are the gradients of a cost with respect to its results. Run writes the gradients with respect to its operands
// to DQ, DK and DV. DOut may be nil, for 0; then V, Out and DV are not used. DLSE may be nil, for 0.
type Operands[F lean.Float] struct {
	Q, K, V, Out, LSE, DOut, DLSE []F
	DQ, DK, DV                    []F
	Bias, DBias                   []F              // as the shape's; DBias may be nil: not wanted
	Tensors                       []variant.Tensor // of the Variant
	DTensors                      [][]F            // as Tensors; an element may be nil, and DTensors too
	Sinks, DSinks                 []F              // one for each query head, if the shape has Sinks; DSinks may be nil
	Seed                          int64            // the seed of the forward pass's Dropout
}

// Run computes the gradients of attention. With p_ij = e^(s_ij - lse_i) for the keys j that query i sees, and 0 for
// all others:
//
//	D_i   = dO_i . O_i - dLSE_i
//	dS_ij = p_ij (z_ij dO_i . v_j - D_i)
//	dq_i  = Scale sum_j dS_ij k_j
//	dk_j  = Scale sum_i dS_ij q_i
//	dv_j  = sum_i z_ij p_ij dO_i
//	dBias = sum dS_ij, over all that share a number of the bias, times its factor
//	dSink = -sum e^(sink-lse_i) D_i, over all queries of a query head, those too that see no key
//
// The sums over i run over all query heads of a KV head. s_ij, with SoftCap, Slopes and Bias, and lse_i, of which a
// sink is a part, are those of the forward pass. With a variant dS is multiplied by its derivative for all but the tensors. With a soft cap dS has the factor 1-t*t for dq and dk, where t is
// the tanh in s. z_ij is the factor of dropout: 0 or 1/(1-Dropout), and 1 without dropout.
//
// Run is algorithm 4 of FlashAttention (Dao et al., arXiv:2205.14135): p, and z from the seed, are computed again,
// block by block, so that memory never holds Queries x Keys elements. Beside the operands Run uses some blocks for
// each worker. If the batch has fewer KV heads than minUnits, Run also uses up to minUnits copies of a KV head's DQ,
// or of its DK and DV if that is less.
//
// Keys and values beyond a length are not read, and their gradients are 0. A query that sees no key has gradients of
// 0. Sums have one order, which follows from the shape, the lengths and the kernels in use: the result has the same
// bits on every run, for any number of workers and threads.
//
// Everything is checked before anything is written. The error wraps ErrShape, ErrTier, or ErrPanic; after ErrPanic
// the gradients are undefined. DQ, DK and DV overlap none of the others.
func Run[F lean.Float](e *cpu.Engine, s *Shape, o *Operands[F]) error {
	if unsafe.Sizeof(F(0)) == 4 {
		return backward(e, &backward32, s, (*Operands[float32])(unsafe.Pointer(o)))
	}
	return backward(e, &backward64, s, (*Operands[float64])(unsafe.Pointer(o)))
}

// canBackward has the features of gradients on a CPU. A problem with another feature is refused.
var canBackward = attn.Can{
	Name:     "gradients on the CPU",
	Features: attn.Causal | attn.Window | attn.Cap | attn.SlopesOfHeads | attn.AddedBias | attn.Sinks | attn.Dropout | attn.Varied,
	KV:       []attn.DType{attn.Float32, attn.Float64},
}

// Can returns the error of a mask and score modifications that gradients do not support.
func Can(m attn.Mask, s attn.Score) error {
	return canBackward.Do("backward", &attn.Problem{Mask: m, Score: s})
}

// The memory of finished backward passes. Training steps run one after the other, so the memory of the passes that
// ran at once is kept.
var (
	backward32 cpu.Spare[backwardRun[float32]]
	backward64 cpu.Spare[backwardRun[float64]]
)

func backward[F cpu.Real](e *cpu.Engine, free *cpu.Spare[backwardRun[F]], s *Shape, o *Operands[F]) error {
	if err := cpu.CheckTier(); err != nil {
		return err
	}
	if err := s.Check("backward"); err != nil {
		return err
	}
	if err := Can(s.Mask, s.Score); err != nil {
		return err
	}
	if err := o.check(s); err != nil {
		return err
	}
	run := free.Get()
	if err := run.run(e, s, o); err != nil {
		return err // the state of its workers is unknown: the run is not reused
	}
	run.forget()
	free.Put(run)
	return nil
}

// check returns the error of an o that does not have the sizes of s.
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
	if err := o.checkTensors(s); err != nil {
		return attn.Errorf(op, attn.ErrShape, "%v", err)
	}
	if n := len(o.Sinks); s.Sinks && n != s.Heads || !s.Sinks && o.Sinks != nil || o.DSinks != nil && len(o.DSinks) != n {
		return attn.Errorf(op, attn.ErrShape, "%d sinks and gradients for %d of them, %d query heads, sinks: %t", n, len(o.DSinks), s.Heads, s.Sinks)
	}
	return nil
}
