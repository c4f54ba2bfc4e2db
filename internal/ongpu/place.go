package ongpu

import (
	G "gorgonia.org/gorgonia"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/tensor"
)

// Dense returns v as a tensor in memory that this process can read.
func Dense(op, name string, v G.Value) (*tensor.Dense, error) {
	t, ok := v.(*tensor.Dense)
	at := PlaceOf(v)
	switch {
	case v == nil || ok && t == nil:
		return nil, errs.Errorf(op, errs.ErrShape, "%s is nil", name)
	case at != nil:
		return nil, errs.Errorf(op, errs.ErrUnsupported, "%s is on %v; it must be in %s", name, at, errs.Host)
	case !ok:
		return nil, errs.Errorf(op, errs.ErrUnsupported, "%s is a %T; it must be a *tensor.Dense", name, v)
	case !t.IsNativelyAccessible():
		return nil, errs.Errorf(op, errs.ErrUnsupported, "%s lies in memory that Go cannot read", name)
	case t.Dtype() == tensor.Dtype{}:
		return nil, errs.Errorf(op, errs.ErrDType, "%s has no element type: it is an empty tensor", name)
	case t.DataSize() == 0:
		return nil, errs.Errorf(op, errs.ErrShape, "%s has no elements, shape %v", name, t.Shape())
	case t.IsMasked():
		return nil, errs.Errorf(op, errs.ErrUnsupported, "%s is a masked tensor", name)
	}
	return t, nil
}

// OtherName returns the name of b in a text with a: one GPU can be opened twice.
func OtherName(b, a *GPU) string {
	if b.String() == a.String() {
		return b.String() + ", opened a second time"
	}
	return b.String()
}

// InPlace returns "in host memory" or "on GPU 0 (name)", in a text with GPU other.
func InPlace(g, other *GPU) string {
	if g == nil {
		return "in " + errs.Host
	}
	if g == other {
		return "on " + g.String()
	}
	return "on " + OtherName(g, other)
}

// PlaceOf returns the GPU of a value, nil for the host.
func PlaceOf(v G.Value) *GPU {
	if d, ok := Of(v); ok && d != nil {
		return d.GPU
	}
	return nil
}

// SamePlace returns the GPU of all values of an op, nil for the host. Values in different memories are an error.
func SamePlace(op string, names []string, in []G.Value) (*GPU, error) {
	first := PlaceOf(in[0])
	for i, v := range in {
		if v == nil {
			return nil, errs.Errorf(op, errs.ErrShape, "%s is nil", names[i])
		}
		if d, ok := Of(v); ok && d.problem("") != "" {
			return nil, errs.Errorf(op, errs.ErrState, "%s", d.problem(names[i]))
		}
		if at := PlaceOf(v); at != first {
			return nil, errs.Errorf(op, errs.ErrUnsupported, "%s is %s and %s %s: they must be in one place", names[0], InPlace(first, first), names[i], InPlace(at, first))
		}
	}
	return first, nil
}

// public is a tensor of package device.
type public interface{ Internal() *Tensor }

// Of returns the tensor on a GPU that v is. ok is false for other values. The tensor may be nil.
func Of(v any) (d *Tensor, ok bool) {
	if p, ok := v.(public); ok {
		return p.Internal(), true
	}
	return nil, false
}

// Must returns the tensor on a GPU that v is known to be.
func Must(v any) *Tensor { return v.(public).Internal() }

// Alike reports whether the same members have the same parts of two values. Values that are not on GPUs, or nil, are alike.
func Alike(v, w G.Value) bool {
	of := func(v G.Value) (l Layout) {
		if d, ok := Of(v); ok && d != nil {
			l = d.layout()
		}
		return l
	}
	return of(v) == of(w)
}
