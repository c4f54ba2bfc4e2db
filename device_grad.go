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

// doOnGPU is Do for operands on a GPU. Lengths are in host memory.
func (op *gradOp) doOnGPU(name string, g *ongpu.GPU, in []G.Value) (G.Value, error) {
	s := gradientProblem(&op.problem, &op.config)
	if _, err := g.Backward(name, s, op.query); err != nil {
		return nil, err // before lengths are read: the error names an option rather than an input of the option
	}
	var there [roles]*ongpu.Tensor
	var host tensors
	for i, w := range op.inputs() {
		if w.of == roleLengths || w.of == roleQueryLengths {
			t, err := ongpu.Dense(name, w.Name, in[i])
			if err != nil {
				return nil, err
			}
			host[w.of] = t
			if err := checkLengths(name, operand.OfTensor(w.Name, t), op.batch); err != nil {
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
	if err := op.setLengths(name, s, &host); err != nil {
		return nil, err
	}
	b, err := g.Backward(name, s, op.query)
	if err != nil {
		return nil, err
	}
	return op.queue(name, g, b, &there, in)
}

// queue queues the gradients of checked operands, and returns their vector.
func (op *gradOp) queue(name string, g *ongpu.GPU, b *attention.Backward, there *[roles]*ongpu.Tensor, in []G.Value) (packed G.Value, err error) {
	if err := g.Enter(name); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	defer runtime.KeepAlive(in)
	recording := false
	_ = g.Queue.Submit(func(sub *queue.Submission) error { recording = sub.Recording(); return nil })
	if recording { // each replay would have the lengths of this run
		return nil, errs.Errorf(name, ErrUnsupported, "gradients of attention in a recording")
	}
	table := b.Table()
	pinned, err := g.Queue.TakePinned(len(table))
	if err != nil {
		return nil, ongpu.EngineError(name, "gradients", err)
	}
	defer g.Queue.GivePinned(pinned)
	copy(pinned.Bytes, table)
	err = g.Queue.Submit(func(sub *queue.Submission) (failed error) {
		var o attention.BackwardOperands
		ofOut, ofLSE := &o.DOut, &o.DLSE
		if op.ofLSE {
			ofOut = ofLSE
		}
		var used []*ongpu.Tensor
		for _, x := range [...]struct {
			of role
			to *gpu.Memory
		}{{roleQ, &o.Q}, {roleK, &o.K}, {roleV, &o.V}, {roleOut, &o.Out}, {roleLSE, &o.LSE}, {roleGrad, ofOut}, {roleBias, &o.Bias}, {roleSinks, &o.Sinks}} {
			d := there[x.of]
			if d == nil {
				continue
			}
			if *x.to, err = d.UseAs(sub, x.of.String()); err != nil {
				return err
			}
			used = append(used, d)
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
			*map[role]*gpu.Memory{roleQ: &o.DQ, roleK: &o.DK, roleV: &o.DV, roleBias: &o.DBias, roleSinks: &o.DSinks}[p.of] = m
		}
		workspace, err := g.Wrap(sub, tensor.Float32, tensor.Shape{attn.Ceil(int(b.Bytes()), 4)}, sub.Alloc)
		if err != nil {
			return err
		}
		defer func() { failed = errors.Join(failed, sub.Free(workspace.Memory)) }()
		w, err := workspace.Use(sub)
		if err != nil {
			return err
		}
		o.Workspace = gpu.Bytes{Buffer: w.Buffer, Offset: w.Offset}
		if err := sub.Upload(w.Buffer, w.Offset, pinned, 0, len(table)); err != nil {
			return err
		}
		if err := sub.Mark(pinned); err != nil {
			return err
		}
		packed = result.Value()
		return sub.Do(func(s *cuda.Stream) error { return b.Run(s, &o) })
	})
	if err != nil {
		return nil, ongpu.EngineError(name, "gradients", err)
	}
	return packed, nil
}
