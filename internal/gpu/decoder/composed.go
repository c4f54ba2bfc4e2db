package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Linear layers with a norm before, or an activation or a gate behind, that their launches don't
// know: these are launches of their own.

func (o *Linear) normApart() bool { return o.Norm != nil && o.Norm.RMS }

// composed says whether a Linear is several launches, one of which is the layer's.
func (d *Engine) composed(o *Linear) (bool, error) {
	if o.normApart() {
		return true, nil
	}
	return d.activationApart(o)
}

// inner is the layer without what is apart, and how many float32 of the scratch that takes: the norm of
// x, and behind it a gate and what it is for. The layer has the rest of the scratch.
func (d *Engine) inner(o *Linear) (in *Linear, apart int, err error) {
	in = new(*o)
	take := func(n int) gpu.Memory { // the next of the scratch, which is a multiple of 16 bytes
		m := o.Scratch
		m.Offset += int64(apart) * 4
		m.Len = n
		apart += attn.Ceil(n, 4) * 4
		return m
	}
	if o.normApart() {
		in.Norm, in.X = nil, take(o.Rows*o.In)
	}
	gates, err := d.activationApart(o)
	if err != nil {
		return nil, 0, err
	}
	if gates {
		in.Activation, in.Residual, in.Gate = attn.NoActivation, gpu.Memory{}, false
		if o.Gate {
			in.Parts = append([]LinearPart(nil), o.Parts...)
			for i := range in.Parts {
				in.Parts[i].Y = take(o.Rows * o.Parts[i].Out)
			}
		}
	}
	in.Scratch.Offset += int64(apart) * 4
	in.Scratch.Len -= apart
	return in, apart, nil
}

// compose queues a composed Linear, which was checked.
func (d *Engine) compose(s *cuda.Stream, o *Linear) error {
	gates, err := d.activationApart(o)
	if err != nil {
		return err
	}
	if y := &o.Parts[0]; gates && !o.Gate && o.Residual.Buffer != nil {
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
	in, _, err := d.inner(o)
	if err != nil {
		return err
	}
	if o.normApart() {
		n := o.Norm
		if err := d.RMSNorm(s, &RMSNorm{Rows: o.Rows, N: o.In, Eps: n.Eps, UnitOffset: n.UnitOffset, X: o.X, Gamma: n.Gamma, Y: in.X}); err != nil {
			return err
		}
	}
	if err := d.Linear(s, in); err != nil || !gates {
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
