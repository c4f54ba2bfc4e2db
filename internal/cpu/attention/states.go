package attention

import (
	"fmt"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/lean"
)

// States has the states of rows that attended to a part of the keys: the outputs, row by row, and their log-sum-exps.
type States[F lean.Float] struct{ Out, LSE []F }

// MergeStates writes to dst the states of the union of the keys of all parts, which must be disjoint. For each row:
//
//	m   = max_i LSE_i
//	L   = sum_i exp(LSE_i-m)
//	Out = sum_i exp(LSE_i-m)/L Out_i
//	LSE = m + ln L
//
// This is f(x, y) of section IV-A of LeanAttention for normalised states.
//
//   - A log-sum-exp of -Inf is a state of no keys, whose Out_i is not read. If all are, Out is 0 and LSE is -Inf.
//   - Sums are in the order of the parts, so the bits are the same on every run.
//   - A single part is copied.
//   - NaN and +Inf make the row NaN.
//
// Out has rows of dim elements. dst may be the first part, and must not overlap any other. Errors wrap ErrShape, before
// anything is written, or ErrPanic.
func MergeStates[F lean.Float](e *cpu.Engine, dst States[F], dim int, parts ...States[F]) error {
	const op = "merge"
	if dim < 1 || len(parts) == 0 {
		return attn.Errorf(op, attn.ErrShape, "%d states of rows of %d elements", len(parts), dim)
	}
	rows := len(dst.LSE)
	check := func(name string, s States[F]) error {
		if len(s.LSE) != rows || len(s.Out) != rows*dim {
			return attn.Errorf(op, attn.ErrShape, "%s has %d log-sum-exps and outputs of %d elements, want %d and %d", name, len(s.LSE), len(s.Out), rows, rows*dim)
		}
		return nil
	}
	if err := check("the union", dst); err != nil {
		return err
	}
	for i, s := range parts {
		if err := check(fmt.Sprintf("state %d", i), s); err != nil {
			return err
		}
	}
	m := &merging[F]{dst: dst, dim: dim, parts: parts}
	m.workers = max(1, min(cpu.ThreadsFor(float64(rows)*float64(dim)*float64(len(parts))*cpu.ElementNanos), rows))
	return e.Run(m, m.workers)
}

// merging is one call of MergeStates.
type merging[F lean.Float] struct {
	dst          States[F]
	dim, workers int
	parts        []States[F]
}

// Work merges a worker's share of the rows.
func (m *merging[F]) Work(worker, _ int) {
	rows := len(m.dst.LSE)
	states := make([]lean.Normalized[F], len(m.parts))
	for r := rows * worker / m.workers; r < rows*(worker+1)/m.workers; r++ {
		at, end := r*m.dim, (r+1)*m.dim
		for i, s := range m.parts {
			states[i] = lean.Normalized[F]{O: s.Out[at:end], LSE: s.LSE[r]}
		}
		m.dst.LSE[r] = lean.MergeNormalized(m.dst.Out[at:end], states)
	}
}
