package leanattention

import (
	"errors"
	"runtime"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/device"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/kernels"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func init() { ongpu.Compute, ongpu.Part = computeOnGPU, partOnGPU }

// newDecoder is a variable for tests.
var newDecoder = decoder.New

// layers is the GPU's kernels for a decoder's other layers, loaded when they are
// first needed. The GPU is entered.
func (g *GPU) layers(op string) (*decoder.Engine, error) {
	g.decoder.Lock()
	defer g.decoder.Unlock()
	if g.decoder.kernels == nil {
		d, err := newDecoder(g.dev)
		if errors.Is(err, kernels.ErrNoImage) {
			return nil, errorf(op, ErrUnsupported, "on %v: %v", g, err)
		}
		if err != nil {
			return nil, gpuError(op, err)
		}
		g.decoder.kernels = d
	}
	return g.decoder.kernels, nil
}

// computeOnGPU is [ongpu.Compute].
func computeOnGPU(c *ongpu.Call) (out G.Value, err error) {
	g, err := samePlace(c.Op, c.Names, c.In)
	if err != nil {
		return nil, err
	}
	if g == nil {
		return nil, errorf(c.Op, ErrUnsupported, "%s is in %s", c.Names[0], hostName)
	}
	if err := g.enter(c.Op); err != nil {
		return nil, err
	}
	defer g.group.Leave()
	layers, err := g.layers(c.Op)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(c.In)
	err = g.queue.Submit(func(sub *device.Submission) error {
		w := &ongpu.Work{Engine: layers, Submission: sub}
		var in []*DeviceTensor
		for i, v := range c.In {
			d := v.(*DeviceTensor)
			m, err := d.useAs(sub, c.Names[i])
			if err != nil {
				return err
			}
			in = append(in, d)
			w.In = append(w.In, ongpu.Operand{Memory: m, Fixed: sub.Fixed(d.memory)})
		}
		result, err := g.nodeValue(sub, c.Node, c.DType, c.Shape, in...)
		if err != nil {
			return err
		}
		if w.Out, err = result.use(sub); err != nil {
			return err
		}
		if c.Scratch != nil {
			n, err := c.Scratch(layers)
			if err != nil {
				return err
			}
			if n > 0 {
				s, free, err := g.scratch(sub, c.Node, n)
				if err != nil {
					return err
				}
				defer free()
				if w.Scratch, err = s.use(sub); err != nil {
					return err
				}
			}
		}
		out = result
		if err := c.Queue(w); err != nil {
			return err
		}
		return haveRead(sub, in...)
	})
	switch {
	case err == nil:
		return out, nil
	case errors.Is(err, attn.ErrShape), errors.Is(err, attn.ErrUnsupported): // right, but no kernel can do it
		return nil, errorf(c.Op, ErrUnsupported, "on %v: %v", g, err)
	case errors.Is(err, device.ErrShared):
		return nil, errorf(c.Op, ErrUnsupported, "on %v: %v", g, err)
	case errors.Is(err, attn.ErrDType):
		return nil, errorf(c.Op, ErrDType, "on %v: %v", g, err)
	}
	return nil, deviceEngineError(c.Op, "queue", err)
}

// partOnGPU is [ongpu.Part].
func partOnGPU(op string, whole G.Value, from int, shape tensor.Shape) (G.Value, error) {
	d, ok := whole.(*DeviceTensor)
	if !ok {
		return nil, errorf(op, ErrUnsupported, "x is a %T", whole)
	}
	if err := d.enter(op); err != nil {
		return nil, err
	}
	d.gpu.group.Leave()
	size := shape.TotalSize()
	if from < 0 || size < 1 || from > d.Size()-size {
		return nil, errorf(op, ErrShape, "elements [%d, %d) of %d", from, from+size, d.Size())
	}
	return d.part(from, shape.Clone()), nil
}
