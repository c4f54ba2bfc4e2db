package leanattention

import (
	"errors"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/queue"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// doOnGPU is Do for operands on a GPU. Lengths and the seed are in host memory.
func (op *gradOp) doOnGPU(name string, g *ongpu.GPU, in []G.Value) (G.Value, error) {
	s := op.problemThere()
	b, err := g.Backward(name, s, op.query)
	if err != nil {
		return nil, err // before lengths are read: the error names an option rather than an input of the option
	}
	var there [roles]*ongpu.Tensor
	var host tensors
	var seed int64
	for i, w := range op.inputs() {
		var err error
		switch w.of {
		case roleSeed:
			if seed, err = readSeed(name, in[i]); err != nil {
				return nil, err
			}
			continue
		case roleLengths, roleQueryLengths:
			if host[w.of], err = ongpu.Dense(name, w.Name, in[i]); err != nil {
				return nil, err
			}
			if err := checkLengths(name, operand.OfTensor(w.Name, host[w.of]), op.batch); err != nil {
				return nil, err
			}
			continue
		}
		if w.of.ofVariant() {
			if there[w.of], err = op.readThereAs(name, g, int(w.of-roleTensor), in[i], w.Shape); err != nil {
				return nil, err
			}
			continue
		}
		if _, err := ongpu.SamePlace(name, []string{"q", w.Name}, []G.Value{in[0], in[i]}); err != nil {
			return nil, err
		}
		d := ongpu.Must(in[i])
		if !slices.Equal(d.Shape, w.Shape) || d.DType != w.DType {
			return nil, errs.Errorf(name, ErrShape, "%s is %v %v; it must be %v %v", w.Name, d.DType, d.Shape, w.DType, w.Shape)
		}
		there[w.of] = d
	}
	if b, err = op.withLengths(name, g, b, s, &host); err != nil {
		return nil, err
	}
	return op.queue(name, g, b, &there, in, seed)
}

// problemThere returns the problem of a GPU's engine.
func (op *gradOp) problemThere() *attn.Gradient {
	s := gradientProblem(&op.problem, &op.config)
	for i := range op.tensors() {
		var shape []int
		if op.ofTensors[i] {
			shape = op.tensorShapes[i]
		}
		s.DTensors = append(s.DTensors, shape)
	}
	return s
}

// readThereAs checks the value of a variant's tensor i in a run on a GPU, which has the shape of the graph's node.
func (op *gradOp) readThereAs(name string, g *ongpu.GPU, i int, v G.Value, shape tensor.Shape) (*ongpu.Tensor, error) {
	want := op.score.Variant.Tensors[i]
	t, got, err := tensorThere(name, want.Name, g, v, op.query)
	if err == nil && (got != want || !slices.Equal(t.Shape, shape)) {
		err = errs.Errorf(name, ErrShape, "%s is %v %v, not what the graph was built for", want.Name, t.DType, t.Shape)
	}
	return t, err
}

// withLengths returns b, which is made of s, with the lengths of a run.
func (op *problem) withLengths(name string, g *ongpu.GPU, b *attention.Backward, s *attn.Gradient, host *tensors) (*attention.Backward, error) {
	if host[roleLengths] == nil && host[roleQueryLengths] == nil {
		return b, nil
	}
	if err := op.setLengths(name, s, host); err != nil {
		return nil, err
	}
	return g.Backward(name, s, op.query)
}

// queue queues the gradients of checked operands, and returns their vector.
func (op *gradOp) queue(name string, g *ongpu.GPU, b *attention.Backward, there *[roles]*ongpu.Tensor, in []G.Value, seed int64) (packed G.Value, err error) {
	err = withTable(name, "gradients of attention", op.config.fixed(), g, b.Table(), b.Bytes(), in, func(sub *queue.Submission, w gpu.Bytes) error {
		o := attention.BackwardOperands{Workspace: w, Seed: seed}
		ofOut, ofLSE := &o.DOut, &o.DLSE
		if op.ofLSE {
			ofOut = ofLSE
		}
		to := [roles]*gpu.Memory{
			roleQ: &o.Q, roleK: &o.K, roleV: &o.V, roleOut: &o.Out, roleLSE: &o.LSE, roleGrad: ofOut, roleBias: &o.Bias, roleSinks: &o.Sinks,
		}
		o.Tensors, o.DTensors = make([]attention.Tensor, op.tensors()), make([]gpu.Memory, op.tensors())
		for i := range o.Tensors {
			to[roleTensor+role(i)], o.Tensors[i].Shape = &o.Tensors[i].Memory, there[roleTensor+role(i)].Shape
		}
		used, err := useThere(sub, there, to)
		if err != nil {
			return err
		}
		result, err := g.NodeValue(sub, &op.memory, op.query, tensor.Shape{op.total()}, used...)
		if err != nil {
			return err
		}
		all, err := result.Use(sub)
		if err != nil {
			return err
		}
		for _, p := range op.parts() {
			m := gpu.Memory{Buffer: all.Buffer, Offset: all.Offset + int64(p.from*all.DType.Size()), DType: all.DType, Len: p.shape.TotalSize()}
			if p.wide {
				m.DType = attn.Float32
			}
			if p.of.ofVariant() {
				o.DTensors[p.of-roleTensor] = m
				continue
			}
			*map[role]*gpu.Memory{roleQ: &o.DQ, roleK: &o.DK, roleV: &o.DV, roleBias: &o.DBias, roleSinks: &o.DSinks}[p.of] = m
		}
		packed = result.Value()
		if err := sub.Do(func(s *cuda.Stream) error { return b.Run(s, &o) }); err != nil {
			return err
		}
		return ongpu.HaveRead(sub, used...)
	})
	return packed, err
}

// useThere stores the memory of tensors in what `to` has for their roles, and returns the tensors.
func useThere(sub *queue.Submission, there *[roles]*ongpu.Tensor, to [roles]*gpu.Memory) (used []*ongpu.Tensor, err error) {
	for of, d := range there {
		if d == nil || to[of] == nil {
			continue
		}
		if *to[of], err = d.UseAs(sub, role(of).String()); err != nil {
			return nil, err
		}
		used = append(used, d)
	}
	return used, nil
}

// withTable calls f with a workspace of some bytes that begins with a table. f queues work on it. fixed: a recording may have the work, since
// all runs have this table.
func withTable(name, what string, fixed bool, g *ongpu.GPU, table []byte, size int64, in []G.Value, f func(*queue.Submission, gpu.Bytes) error) error {
	if err := g.Enter(name); err != nil {
		return err
	}
	defer g.Group.Leave()
	defer runtime.KeepAlive(in)
	if g.Group.Recording() {
		if !fixed { // each replay would have the lengths and the seed of this run
			return errs.Errorf(name, ErrUnsupported, "%s with lengths or dropout in a recording", what)
		}
		w, err := g.RecordedTable(name, table, size)
		if err != nil {
			return err
		}
		if err := g.Queue.Submit(func(sub *queue.Submission) error { return f(sub, w) }); err != nil {
			return ongpu.EngineError(name, what, err)
		}
		return nil
	}
	pinned, err := g.Queue.TakePinned(len(table))
	if err != nil {
		return ongpu.EngineError(name, what, err)
	}
	defer g.Queue.GivePinned(pinned)
	copy(pinned.Bytes, table)
	err = g.Queue.Submit(func(sub *queue.Submission) (failed error) {
		workspace, err := g.Wrap(sub, tensor.Float32, tensor.Shape{attn.Ceil(int(size), 4)}, sub.Alloc)
		if err != nil {
			return err
		}
		defer func() { failed = errors.Join(failed, sub.Free(workspace.Memory)) }()
		w, err := workspace.Use(sub)
		if err != nil {
			return err
		}
		if err := sub.Upload(w.Buffer, w.Offset, pinned, 0, len(table)); err != nil {
			return err
		}
		if err := sub.Mark(pinned); err != nil {
			return err
		}
		return f(sub, gpu.Bytes{Buffer: w.Buffer, Offset: w.Offset})
	})
	if err != nil {
		return ongpu.EngineError(name, what, err)
	}
	return nil
}

// dropOnGPU is doDevice of an attention with dropout, for lengths in r. Gradients compute the dropped weights again from the seed.
func (op *attentionOp) dropOnGPU(name string, r *denseRun, g *ongpu.GPU, in []G.Value, further furtherThere) (out, lse *ongpu.Tensor, err error) {
	whole := op.geometry(&op.config)
	if err := attention.CanForward(name, &whole); err != nil {
		return nil, nil, errs.Errorf(name, ErrUnsupported, "on %v: %v", g, err)
	}
	if err := r.checkAligned(name, &op.problem, &op.config); err != nil {
		return nil, nil, err
	}
	s := gradientProblem(&op.problem, &op.config)
	b, err := g.Backward(name, s, op.query)
	if err != nil {
		return nil, nil, err
	}
	there := [roles]*ongpu.Tensor{roleBias: further.bias, roleSinks: further.sinks}
	var host tensors
	var seed int64
	for i, of := range op.inputs() {
		switch of {
		case roleSeed:
			seed, err = readSeed(name, in[i])
		case roleLengths, roleQueryLengths:
			host[of], err = ongpu.Dense(name, of.String(), in[i])
		case roleQ, roleK, roleV:
			there[of] = ongpu.Must(in[i])
		}
		if err != nil {
			return nil, nil, err
		}
	}
	if b, err = op.withLengths(name, g, b, s, &host); err != nil {
		return nil, nil, err
	}
	err = withTable(name, "attention", op.config.fixed(), g, b.Table(), int64(len(b.Table())), in, func(sub *queue.Submission, w gpu.Bytes) error {
		o := attention.DropoutOperands{Workspace: w, Seed: seed}
		if _, err := useThere(sub, &there, [roles]*gpu.Memory{roleQ: &o.Q, roleK: &o.K, roleV: &o.V, roleBias: &o.Bias, roleSinks: &o.Sinks}); err != nil {
			return err
		}
		qkv := ongpu.QKVOf(in[:3])
		var err error
		if out, o.Out, err = qkv.ResultIn(sub, nil, &op.memory, op.query, op.outShape()); err != nil {
			return err
		}
		if op.logs() != nil {
			if lse, o.LSE, err = qkv.LogSumExp(sub, &op.memory, operand.LSEType(op.query), op.lseShape()); err != nil {
				return err
			}
		}
		return sub.Do(func(s *cuda.Stream) error { return b.Forward(s, &o) })
	})
	return out, lse, err
}
