package decoder

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Linear layers with a norm before, or an activation behind, that their launches don't know: these
// are launches of their own.

// fusedActivations are those that launches of linear layers know (kernels/gemm_activation.cuh).
const fusedActivations = attn.GELU + 1

func (o *Linear) normApart() bool       { return o.Norm != nil && o.Norm.RMS }
func (o *Linear) activationApart() bool { return o.Activation >= fusedActivations }

// composed says whether a Linear is several launches, one of which is the layer's.
func (o *Linear) composed() bool { return o.normApart() || o.activationApart() }

// apart is how many float32 of the scratch the norm of x takes, a multiple of 16 bytes.
func (o *Linear) apart() int {
	if !o.normApart() {
		return 0
	}
	return attn.Ceil(o.Rows*o.In, 4) * 4
}

// inner is the layer without what is apart. It has the rest of the scratch.
func (o *Linear) inner() *Linear {
	in := *o
	if n := o.apart(); n > 0 {
		in.Norm, in.X = nil, o.Scratch
		in.Scratch.Offset += int64(n) * 4
		in.Scratch.Len -= n
	}
	if o.activationApart() {
		in.Activation, in.Residual = attn.NoActivation, gpu.Memory{}
	}
	return &in
}

// compose queues a composed Linear, which was checked.
func (d *Engine) compose(s *cuda.Stream, o *Linear) error {
	if y := &o.Parts[0]; o.activationApart() && o.Residual.Buffer != nil {
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
	if o.normApart() {
		n := o.Norm
		if err := d.RMSNorm(s, &RMSNorm{Rows: o.Rows, N: o.In, Eps: n.Eps, UnitOffset: n.UnitOffset, X: o.X, Gamma: n.Gamma, Y: o.Scratch}); err != nil {
			return err
		}
	}
	if err := d.Linear(s, o.inner()); err != nil {
		return err
	}
	if !o.activationApart() {
		return nil
	}
	for i := range o.Parts {
		p := &o.Parts[i]
		if err := d.Elements(s, &Elements{N: o.Rows * p.Out, Activation: o.Activation, X: p.Y, Plus: o.Residual, Y: p.Y}); err != nil {
			return err
		}
	}
	return nil
}
