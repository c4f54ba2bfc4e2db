package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Linear layers with an activation or a gate that their kernels lack: the activation is another launch.

// inner returns the layer without its activation, and the number of float32 of the scratch for the gate and the gated
// values. The layer has the rest of the scratch.
func (o *Linear) inner() (in *Linear, apart int) {
	in = new(*o)
	r := scratch{of: o.Scratch}
	in.Activation, in.Residual, in.Gate = attn.NoActivation, gpu.Memory{}, false
	if o.Gate {
		in.Parts = append([]LinearPart(nil), o.Parts...)
		for i := range in.Parts {
			in.Parts[i].Y = r.take(o.Rows * o.Parts[i].Out)
		}
	}
	apart = r.used
	in.Scratch = r.rest()
	return in, apart
}

// compose queues a checked Linear with its activation as another launch.
func (d *Engine) compose(s *cuda.Stream, o *Linear) error {
	if y := &o.Parts[0]; !o.Gate && o.Residual.Buffer != nil {
		n := o.Rows * y.Out
		if of := spanOf(&y.Y, n); of.meets([]span{spanOf(&o.Residual, n)}) {
			return gpu.Errorf("linear", attn.ErrUnsupported, "the residual is overwritten before %v is known", o.Activation)
		}
	}
	scratch, err := d.Scratch(o)
	if err != nil {
		return err
	}
	if scratch > 0 {
		if err := o.Scratch.CheckFloats("linear", "the scratch", scratch); err != nil {
			return err
		}
	}
	in, _ := o.inner()
	if err := d.Linear(s, in); err != nil {
		return err
	}
	if o.Gate {
		return d.Elements(s, &Elements{
			N: o.Rows * o.Parts[0].Out, Activation: o.Activation, X: in.Parts[0].Y, Times: in.Parts[1].Y, Plus: o.Residual, Y: o.Parts[0].Y,
		})
	}
	for i := range o.Parts {
		p := &o.Parts[i]
		if err := d.Elements(s, &Elements{N: o.Rows * p.Out, Activation: o.Activation, X: p.Y, Plus: o.Residual, Y: p.Y}); err != nil {
			return err
		}
	}
	return nil
}
