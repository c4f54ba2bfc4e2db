package ongpu

import (
	"errors"
	"runtime"
	"slices"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/queue"
	"gorgonia.org/leanattention/kernels"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Devices returns the members' devices and their group, which stays open until leave is called.
func (g *GPU) Devices(op string) (devs []*cuda.Device, group *queue.Group, leave func(), err error) {
	if err := g.Enter(op); err != nil {
		return nil, nil, nil, err
	}
	for _, m := range g.Members {
		devs = append(devs, m.Dev)
	}
	return devs, g.Group, g.Group.Leave, nil
}

// NewDecoder is a variable for tests.
var NewDecoder = layers.New

// Layers returns the GPU's kernels for a decoder's other layers, loaded at first use. The GPU is entered.
func (g *GPU) Layers(op string) (*layers.Engine, error) {
	g.decoder.Lock()
	defer g.decoder.Unlock()
	if g.decoder.kernels == nil {
		d, err := NewDecoder(g.Dev)
		if errors.Is(err, kernels.ErrNoImage) {
			return nil, errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
		}
		if err != nil {
			return nil, Error(op, err)
		}
		g.decoder.kernels = d
	}
	return g.decoder.kernels, nil
}

// Compute runs a call on the GPU of its inputs and returns its value.
func Compute(c *Call) (out G.Value, err error) {
	g, err := SamePlace(c.Op, c.Names, c.In)
	if err != nil {
		return nil, err
	}
	if g == nil {
		return nil, errs.Errorf(c.Op, errs.ErrUnsupported, "%s is in %s", c.Names[0], errs.Host)
	}
	if err := g.Enter(c.Op); err != nil {
		return nil, err
	}
	defer g.Group.Leave()
	defer runtime.KeepAlive(c.In)
	a, err := g.perGPU(c)
	if err != nil {
		return nil, err
	}
	if a != nil {
		return g.computePerGPU(c, a)
	}
	if slices.ContainsFunc(c.In, isMade) {
		whole := *c
		free, err := g.gatherInputs(&whole)
		defer free()
		if err != nil {
			return nil, g.computeError(c.Op, err)
		}
		c = &whole
	}
	if c.Spread != nil && slices.ContainsFunc(c.In, isSharded) {
		return g.computeSharded(c)
	}
	layers, err := g.Layers(c.Op)
	if err != nil {
		return nil, err
	}
	err = g.Queue.Submit(func(sub *queue.Submission) error {
		w := &Work{Engine: layers, Submission: sub}
		in, result, err := g.operandsOf(sub, c, w, (*Tensor).wholeOperand)
		if err != nil {
			return err
		}
		if c.Scratch != nil {
			n, err := c.Scratch(layers)
			if err != nil {
				return err
			}
			if n > 0 {
				s, free, err := g.Scratch(sub, c.Node, &c.Node.On(g.Group, 0).Rest, tensor.Float32, tensor.Shape{n})
				if err != nil {
					return err
				}
				defer free()
				if w.Scratch, err = s.Use(sub); err != nil {
					return err
				}
			}
		}
		out = result.Value()
		if err := c.Queue(w); err != nil {
			return err
		}
		return HaveRead(sub, in...)
	})
	if err := g.computeError(c.Op, err); err != nil {
		return nil, err
	}
	return out, nil
}

// operandsOf stores the memory of a call's inputs and of its value in w.
func (g *GPU) operandsOf(sub *queue.Submission, c *Call, w *Work, operand func(*Tensor, *queue.Submission, string) (Operand, error)) (in []*Tensor, result *Tensor, err error) {
	for i, v := range c.In {
		d := Must(v)
		o, err := operand(d, sub, c.Names[i])
		if err != nil {
			return nil, nil, err
		}
		w.In = append(w.In, o)
		if d.Shards == nil {
			in = append(in, d)
		}
	}
	if result, err = g.NodeValue(sub, c.Node, c.DType, c.Shape, in...); err != nil {
		return nil, nil, err
	}
	w.Out, err = result.Use(sub)
	return in, result, err
}

// wholeOperand returns an input of work that takes no sharded inputs.
func (d *Tensor) wholeOperand(sub *queue.Submission, name string) (Operand, error) {
	m, err := d.UseAs(sub, name)
	return Operand{Memory: m, Fixed: err == nil && sub.Fixed(d.Memory), Packed: d.Packed}, err
}

// computeError returns the error of a node's work as its user sees it.
func (g *GPU) computeError(op string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // a valid request without a kernel
		return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
	case errors.Is(err, queue.ErrShared):
		return errs.Errorf(op, errs.ErrUnsupported, "on %v: %v", g, err)
	case errors.Is(err, attn.ErrDType):
		return errs.Errorf(op, errs.ErrDType, "on %v: %v", g, err)
	}
	return EngineError(op, "queue", err)
}

// Part returns elements of whole, from an index on, as a value of the given shape.
func Part(op string, whole G.Value, from int, shape tensor.Shape) (G.Value, error) {
	return PartAs(op, whole, from, shape, tensor.Dtype{})
}

// PartAs is Part whose bytes are elements of another type; the zero type is that of whole. from counts elements of whole.
func PartAs(op string, whole G.Value, from int, shape tensor.Shape, as tensor.Dtype) (G.Value, error) {
	d, ok := Of(whole)
	if !ok {
		return nil, errs.Errorf(op, errs.ErrUnsupported, "x is a %T", whole)
	}
	if err := d.Enter(op); err != nil {
		return nil, err
	}
	d.GPU.Group.Leave()
	size := shape.TotalSize()
	other := as != tensor.Dtype{} && as != d.DType
	if other {
		size = size * int(as.Size()) / int(d.DType.Size())
	}
	if from < 0 || size < 1 || from > d.Size()-size {
		return nil, errs.Errorf(op, errs.ErrShape, "elements [%d, %d) of %d", from, from+size, d.Size())
	}
	if d.Made && !other {
		part, err := d.partPerGPU(from, shape)
		if err != nil {
			return nil, TensorError(op, "x", err)
		}
		return part.Value(), nil
	}
	if err := d.NotWhole(); err != nil {
		return nil, TensorError(op, "x", err)
	}
	part := d.part(from, shape.Clone())
	if other {
		part.setType(as)
	}
	return part.Value(), nil
}

// NodeValue returns a new value of a node. The inputs stay unchanged.
func (g *GPU) NodeValue(sub *queue.Submission, n *Node, t tensor.Dtype, shape tensor.Shape, inputs ...*Tensor) (*Tensor, error) {
	if n.Reads == 0 {
		return g.NextValue(sub, &n.On(g.Group, slices.Index(g.Members, g)).Value, t, shape, inputs...)
	}
	return g.Wrap(sub, t, shape, func(bytes int64) (*queue.Memory, error) { return sub.Shared(bytes, n.Reads) })
}

// Scratch allocates memory for steps before a node's value, in a slot of the node. free is called after the work is
// queued.
func (g *GPU) Scratch(sub *queue.Submission, n *Node, slot *queue.Slot, t tensor.Dtype, shape tensor.Shape) (d *Tensor, free func(), err error) {
	if !n.Shares {
		d, err = g.NextValue(sub, slot, t, shape)
		return d, func() {}, err
	}
	d, err = g.Wrap(sub, t, shape, func(bytes int64) (*queue.Memory, error) { return sub.Shared(bytes, 1) })
	return d, func() { _ = sub.Read(d.Memory) }, err
}

// HaveRead records that the reads of the inputs are queued.
func HaveRead(sub *queue.Submission, inputs ...*Tensor) error {
	for _, in := range inputs {
		if err := sub.Read(in.Memory); err != nil {
			return err
		}
	}
	return nil
}

// HaveRead calls the function [HaveRead] for each of a node's inputs on the GPU, behind queued work.
func (g *GPU) HaveRead(op string, in []G.Value) error {
	if err := g.Enter(op); err != nil {
		return err
	}
	defer g.Group.Leave()
	err := g.Queue.Submit(func(sub *queue.Submission) error {
		for _, v := range in {
			if d, ok := Of(v); ok && d != nil && d.Shards == nil {
				if err := HaveRead(sub, d); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return EngineError(op, "reads", err)
	}
	return nil
}
