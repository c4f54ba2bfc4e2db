package leanattention

import (
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// backward computes the gradients of checked tensors into the vector packed.
func (op *gradOp) backward(name string, t *tensors, packed *tensor.Dense) error {
	s := cpu.BackwardShape{
		Batch: op.batch, Heads: op.heads, KVHeads: op.kvHeads, Queries: op.queries, Keys: op.keys,
		Dim: op.dim, ValueDim: op.valueDim,
		Scale: op.scaleFor(op.dim), Mask: op.mask, Score: op.score, Workers: op.workers,
	}
	if l := t[roleLengths]; l != nil {
		var err error
		if s.Lengths, err = readLengths(name, make([]int, 0, op.batch), l, op.keys); err != nil {
			return err
		}
	}
	var err error
	if op.query == tensor.Float32 {
		err = backwardDense[float32](&s, t, op.parts(), packed)
	} else {
		err = backwardDense[float64](&s, t, op.parts(), packed)
	}
	if err != nil {
		return engineError(name, "backward", err)
	}
	return nil
}

// backwardDense computes those gradients that parts has: of the output if there is one,
// else of the log-sum-exp.
func backwardDense[F lean.Float](s *cpu.BackwardShape, t *tensors, parts []gradPart, packed *tensor.Dense) error {
	elements := func(of role) []F {
		if t[of] == nil {
			return nil
		}
		return dense.Elements[F](t[of])
	}
	o := cpu.BackwardOperands[F]{
		Q: elements(roleQ), K: elements(roleK), V: elements(roleV), Bias: elements(roleBias),
		Out: elements(roleOut), LSE: elements(roleLSE),
	}
	if t[roleOut] != nil {
		o.DOut = elements(roleGrad)
	} else {
		o.DLSE = elements(roleGrad)
	}
	to := dense.Backing[F](packed)
	of := [roles]*[]F{roleQ: &o.DQ, roleK: &o.DK, roleV: &o.DV, roleBias: &o.DBias}
	for _, p := range parts {
		n := p.shape.TotalSize()
		*of[p.of] = to[:n:n]
		to = to[n:]
	}
	return cpu.Backward(cpu.Default(), s, &o)
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op *attentionOp) DoDiff(_ G.ExecutionContext, in G.Nodes, out *G.Node) (err error) {
	const name = "Attention.DoDiff"
	defer recoverTo(name, &err)
	if err := op.differentiable(name, len(in)); err != nil {
		return err
	}
	grad, err := gradOf(name, out)
	if err != nil {
		return err
	}
	values := valuesOf(in)
	lse, err := op.logSumExp(name, values)
	if err != nil {
		return err
	}
	return op.gradient(false, 0).addTo(name, in, append(values, out.Value(), lse, grad))
}

// DoDiff adds the gradients to those of the inputs (lisp machine).
func (op *lseOp) DoDiff(_ G.ExecutionContext, in G.Nodes, lse *G.Node) (err error) {
	name := op.of + ".DoDiff"
	defer recoverTo(name, &err)
	a := op.attention
	if a == nil {
		return errorf(op.of, ErrUnsupported, "gradient of the log-sum-exp")
	}
	if err := a.differentiable(name, len(in)); err != nil {
		return err
	}
	grad, err := gradOf(name, lse)
	if err != nil {
		return err
	}
	return a.gradient(true, 0).addTo(name, in, append(valuesOf(in[1:]), lse.Value(), grad))
}

func valuesOf(in G.Nodes) []G.Value {
	values := make([]G.Value, 0, len(in)+3)
	for _, n := range in {
		values = append(values, n.Value())
	}
	return values
}

// gradOf is the gradient that has come to a node.
func gradOf(name string, n *G.Node) (G.Value, error) {
	grad, err := n.Grad()
	if err != nil {
		return nil, errorf(name, ErrGraph, "%v", err)
	}
	return grad, nil
}

// logSumExp computes the log-sum-exp again: the lisp machine has nodes of the
// graph only, and the one of the log-sum-exp may be missing. It is used for one
// run, so this is once.
func (op *attentionOp) logSumExp(name string, in []G.Value) (lse *tensor.Dense, err error) {
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	t, err := op.read(name, r, in)
	if err != nil {
		return nil, err
	}
	out := tensor.New(tensor.Of(op.query), tensor.WithShape(op.outShape()...))
	lse = tensor.New(tensor.Of(op.query), tensor.WithShape(op.lseShape()...))
	return lse, r.attend(name, &op.problem, &op.config, t[roleQ], t[roleK], t[roleV], t[roleBias], out, lse)
}

// addTo adds the gradients for values to those of the nodes in.
func (op *gradOp) addTo(name string, in G.Nodes, values []G.Value) error {
	packed, err := op.Do(values...)
	if err != nil {
		return err
	}
	from := 0
	for _, p := range op.parts() {
		part, err := (&partOp{of: p.of, total: op.total(), from: from, shape: p.shape}).Do(packed)
		if err != nil {
			return err
		}
		from += p.shape.TotalSize()
		sum, err := gradOf(name, in[p.input])
		if err != nil {
			return err
		}
		if _, err = tensor.Add(sum, part, tensor.UseUnsafe()); err != nil {
			return errorf(name, ErrGraph, "the gradient of %v: %v", p.of, err)
		}
	}
	return nil
}
