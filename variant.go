package leanattention

import (
	"maps"
	"slices"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"
	"gorgonia.org/leanattention/internal/variant"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Variant is attention of one's own: a change of scores, a mask, or both, as Go expressions. For instance
//
//	Variant{Score: "cap*tanh(score/cap)", Params: map[string]float64{"cap": 30}}
//	Variant{Score: "score + table[head][min(abs(query-key), 31)]", Tensors: map[string]*gorgonia.Node{"table": table}}
//	Variant{Visible: "key <= query && doc[sequence][key] == doc[sequence][query]", Tensors: ...}
//
// Variables of an expression:
//
//	score      the score of a query and a key, after the scale and all other options; a float
//	query      the position of the query among the keys of its sequence, as in [WithCausal]; an int, as all that follow
//	key        the index of the key in its sequence
//	head       the query head
//	sequence   the index of the sequence in the batch, or of the append in the step
//
// Beside these an expression has the names of Params and Tensors, inf, true and false, numbers, parentheses, and
//
//   - - *           of ints or of floats; an int beside a float becomes a float
//     x / y           a float
//     x % y           of ints, from 0 on; y is a number or a parameter above 0
//     div(x, y)       the quotient of ints, rounded down; y as above
//     < <= > >= == != && || !
//     where(b, x, y)  x if b is true, else y
//     min(x, y), max(x, y), abs(x), floor(x), float(x), exp(x), log(x), sqrt(x), tanh(x), sigmoid(x)
//     softplus(x)     log(1 + exp(x))
//     name[i][j]      an element of a tensor
//
// Ints have 32 bits. An index of a tensor must be in range for every query and key, which is checked before a run: min and max limit an
// index. An expression has at most 4096 bytes, and both together 256 operations.
type Variant struct {
	// Score is what a score becomes. "" is the score itself.
	Score string
	// Visible says whether a query sees a key that no other option hides. "" is true. The schedule has no LeanTiles of keys that no
	// query sees, if that follows from positions, heads and Params. LeanTiles that are hidden by Tensors alone are skipped in the run.
	// Other hidden keys are read, so NaN in them shows.
	Visible string
	// Params are numbers. One without a fraction is an int.
	Params map[string]float64
	// Tensors are nodes of floats, of q's element type, or of ints (int, int32 or int64), of rank 1 to 4: at most 4. [Attend] has
	// values in place of nodes, in [Args].
	Tensors map[string]*G.Node
	// Unnormalised means that the weight of a key is exp(score), and not that over the sum of all weights. Sigmoid attention is
	// Variant{Score: "-softplus(-score)", Unnormalised: true}. There is no log-sum-exp then.
	Unnormalised bool
}

// WithVariant changes scores and hides keys by a [Variant], after all other options.
//
//   - Trees ([Append.Parents]), [WithSinkTokens], and a cache with a [CacheConfig].Window: [ErrUnsupported].
//   - Unnormalised with [WithSinks] or [LogSumExp]: ErrUnsupported.
//   - Prefixes that sequences share are read for each sequence.
//   - On one GPU the variant is compiled by NVRTC 12.4 to 13, which is looked for where the environment variable LEANATTENTION_NVRTC
//     says, on the loader's path and in Python environments; without it ErrUnsupported. Several GPUs: ErrUnsupported.
//   - Errors: [ErrOption] for an expression, with the part of the expression that is wrong; in a run [ErrShape] for tensors that are
//     too small.
func WithVariant(v Variant) Option { return Option{kind: optVariant, variant: &v} }

// setVariant compiles the variant of the options, with tensors of these names in their order.
func (c *config) setVariant(op string, tensors []variant.Declared) error {
	v := c.variantOf
	if v == nil {
		if len(tensors) > 0 {
			return errs.Errorf(op, ErrOption, "tensor %s without WithVariant", tensors[0].Name)
		}
		return nil
	}
	c.variantOf = nil
	p, err := variant.New(variant.Source{Score: v.Score, Visible: v.Visible, Params: v.Params, Tensors: tensors, Unnormalised: v.Unnormalised})
	if err != nil {
		return errs.Errorf(op, ErrOption, "WithVariant: %v", err)
	}
	switch c.score.Variant = p; {
	case c.mask.SinkTokens > 0:
		return errs.Errorf(op, ErrUnsupported, "WithVariant and WithSinkTokens: write the sink tokens in Variant.Visible")
	case p.Unnormalised && c.score.Sinks:
		return errs.Errorf(op, ErrUnsupported, "WithSinks and a Variant that is Unnormalised: there is no sum of weights")
	}
	return nil
}

// variantNodes compiles the variant of a node's options, and returns its tensors in the order of the program.
func (c *config) variantNodes(op string, q *G.Node, query tensor.Dtype) (nodes G.Nodes, err error) {
	if c.variantOf == nil {
		return nil, nil
	}
	var tensors []variant.Declared
	for _, name := range slices.Sorted(maps.Keys(c.variantOf.Tensors)) {
		n := c.variantOf.Tensors[name]
		o, err := operand.OfNode(op, name, n)
		if err != nil {
			return nil, err
		}
		if err = sameGraph(op, name, n, q); err != nil {
			return nil, err
		}
		d, err := declared(op, o, query)
		if err != nil {
			return nil, err
		}
		tensors, nodes = append(tensors, d), append(nodes, n)
	}
	return nodes, c.setVariant(op, tensors)
}

// declared describes a tensor of a variant.
func declared(op string, o operand.Operand, query tensor.Dtype) (d variant.Declared, err error) {
	switch d = (variant.Declared{Name: o.Name, Rank: len(o.Shape)}); o.DType {
	case query:
	case tensor.Int, tensor.Int32, tensor.Int64:
		d.Int = true
	default:
		return d, errs.Errorf(op, ErrDType, "%s is %v; it must be %v as q, or int, int32 or int64", o.Name, o.DType, query)
	}
	return d, nil
}

// variantTensor returns the elements of a tensor of a variant, which the engine compares with the variant.
func variantTensor(t *tensor.Dense) (of variant.Tensor) {
	of.Shape = t.Shape()
	switch t.Dtype() {
	case tensor.Float32:
		of.F32 = dense.Elements[float32](t)
	case tensor.Float64:
		of.F64 = dense.Elements[float64](t)
	case tensor.Int32:
		of.I32 = dense.Elements[int32](t)
	case tensor.Int64:
		of.I64 = dense.Elements[int64](t)
	case tensor.Int:
		of.SetInts(dense.Elements[int](t))
	}
	return of
}

// readTensor checks the value of a variant's tensor i.
func (c *config) readTensor(op string, i int, v G.Value, query tensor.Dtype) (*tensor.Dense, error) {
	want := c.score.Variant.Tensors[i]
	t, err := ongpu.Dense(op, want.Name, v)
	if err != nil {
		return nil, err
	}
	got, err := declared(op, operand.OfTensor(want.Name, t), query)
	if err == nil && got != want {
		err = errs.Errorf(op, ErrShape, "%s is %v %v, not what the graph was built for", want.Name, t.Dtype(), t.Shape())
	}
	return t, err
}

// readTensors compiles the variant of a call of Attend, and sets its tensors in t.
func (c *config) readTensors(op string, t *tensors, values map[string]G.Value, logs bool, query tensor.Dtype) error {
	if len(values) > variant.MaxTensors {
		return errs.Errorf(op, ErrOption, "%d tensors; %d are the most", len(values), variant.MaxTensors)
	}
	var all []variant.Declared
	for i, name := range slices.Sorted(maps.Keys(values)) {
		x, err := ongpu.Dense(op, name, values[name])
		if err != nil {
			return err
		}
		d, err := declared(op, operand.OfTensor(name, x), query)
		if err != nil {
			return err
		}
		t[roleTensor+role(i)], all = x, append(all, d)
	}
	if err := c.setVariant(op, all); err != nil {
		return err
	}
	return c.hasSums(op, logs)
}

// tensorsThere compiles the variant of a call of Attend on a GPU, and returns its tensors in the order of the program.
func (c *config) tensorsThere(op string, gpu *ongpu.GPU, a *Args, query tensor.Dtype) (there []*ongpu.Tensor, err error) {
	values := a.Tensors
	if len(values) > variant.MaxTensors {
		return nil, errs.Errorf(op, ErrOption, "%d tensors; %d are the most", len(values), variant.MaxTensors)
	}
	var all []variant.Declared
	for _, name := range slices.Sorted(maps.Keys(values)) {
		t, d, err := tensorThere(op, name, gpu, values[name], query)
		if err != nil {
			return nil, err
		}
		there, all = append(there, t), append(all, d)
	}
	if err = c.setVariant(op, all); err == nil {
		err = c.hasSums(op, a.LSE != nil)
	}
	return there, err
}

// hasSums returns an error if a call of Attend wants the log-sum-exp of a variant that has none.
func (c *config) hasSums(op string, logs bool) error {
	if v := c.score.Variant; v != nil && v.Unnormalised && logs {
		return errs.Errorf(op, ErrUnsupported, "Args.LSE and a Variant that is Unnormalised: its weights have no sum")
	}
	return nil
}

// tensorThere checks a tensor of a variant that must be on a GPU.
func tensorThere(op, name string, gpu *ongpu.GPU, v G.Value, query tensor.Dtype) (t *ongpu.Tensor, d variant.Declared, err error) {
	t, ok := ongpu.Of(v)
	if !ok || t == nil || t.GPU != gpu {
		return nil, d, errs.Errorf(op, ErrUnsupported, "q is on %v and %s %s: they must be in one place", gpu, name, ongpu.InPlace(ongpu.PlaceOf(v), gpu))
	}
	if err := t.NotWhole(); err != nil {
		return nil, d, ongpu.TensorError(op, name, err)
	}
	d, err = declared(op, t.Operand(name), query)
	return t, d, err
}

// readThere checks the values of a variant's tensors in a run on a GPU.
func (c *config) readThere(op string, gpu *ongpu.GPU, in []G.Value, query tensor.Dtype) (there []*ongpu.Tensor, err error) {
	for i, v := range in {
		want := c.score.Variant.Tensors[i]
		t, got, err := tensorThere(op, want.Name, gpu, v, query)
		if err != nil {
			return nil, err
		}
		if got != want {
			return nil, errs.Errorf(op, ErrShape, "%s is %v %v, not what the graph was built for", want.Name, t.DType, t.Shape)
		}
		there = append(there, t)
	}
	return there, nil
}

// tensorTypes are the types of a variant's tensors in the graph.
func (c *config) tensorTypes() (types []hm.Type) {
	if p := c.score.Variant; p != nil {
		for i, d := range p.Tensors {
			types = append(types, G.TensorType{Dims: d.Rank, Of: hm.TypeVariable('w' + rune(i))})
		}
	}
	return types
}

// hasPartial reports whether scores have a derivative by tensor i of the variant.
func (c *config) hasPartial(i int) bool {
	p := c.score.Variant
	return p != nil && slices.ContainsFunc(p.Partials, func(x variant.Partial) bool { return p.Nodes[x.Element].Tensor == i })
}

// variantTensors returns the tensors of a variant in t.
func variantTensors(p *variant.Program, t *tensors) (all []variant.Tensor) {
	if p == nil {
		return nil
	}
	for i := range p.Tensors {
		all = append(all, variantTensor(t[roleTensor+role(i)]))
	}
	return all
}
