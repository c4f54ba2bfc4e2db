package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Gradients of layers with products of 16 bits. One launch rounds the gradient of the output for all products, and sums the rows for the
// gradients of biases. The norm in front of the layers is computed again as an operand of products.
//
//	rounded = the gradient of the output in 16 bits, and sums over parts of its rows
//	dx      = rounded w,   dw = rounded^T norm(x),   db = sums of the sums

// roundedGradients returns the gradients of norm(x) or x, of w and of b. With f, dys is the gradient of f(before), and before the
// layers' output. linearGradientsThrough says when there are several dys.
func roundedGradients[T any](do step[T], op linear, in layerOperands[T], dys []T, f attn.Activation, before ...T) (grads layerOperands[T], err error) {
	inner := op.inner().normedAs(op)
	widths := make([]int, op.parts)
	for i := range widths {
		widths[i] = shapeOf(in.w[i])[0]
	}
	base := roundedOf{once{op.title()}, inner, shapeOf(in.x)[1], widths}
	apply := func(r rule, in ...T) (y T) {
		if err == nil {
			y, err = do(node{newOperator(r), new(ongpu.Node)}, in...)
		}
		return y
	}
	rounded := apply(roundedDY{base, f, len(dys) > 1}, append(slices.Clone(dys), before...)...)
	grads.x = apply(roundedX{base}, append(append([]T{}, in.w...), rounded)...)
	ofX := layerOperands[T]{x: in.x, gamma: in.gamma, beta: in.beta}
	dw := apply(roundedW{base}, append(ofX.list(), rounded)...)
	for i, n := range widths {
		part := vectorPart{once: base.once, at: base.at(i), to: tensor.Shape{n, base.in}, dtype: op.x}
		if err != nil {
			return grads, err
		}
		w, e := do(view{newOperator(part)}, dw)
		grads.w, err = append(grads.w, w), e
		if op.bias {
			grads.b = append(grads.b, apply(roundedB{base, i}, rounded))
		}
	}
	return grads, err
}

// roundedOf is the common part of the rules of these gradients. The rounded gradient is a matrix with as many columns as the layers together.
// The first rows have sums over parts of the rows, layer by layer. The other rows have the gradient of the output, layer by layer; on a GPU,
// they have the result of [layers.Rounding].
type roundedOf struct {
	once
	of     linear // without activation, gate and residual
	in     int
	widths []int // of the layers
}

func (r roundedOf) title() string  { return r.op + " gradient" }
func (r roundedOf) String() string { return fmt.Sprintf("of %v, %d to %v", r.of, r.in, r.widths) }

func (r roundedOf) all() (all int) {
	for _, n := range r.widths {
		all += n
	}
	return all
}

// rowsOf returns the rows of the gradient that a rounded one has.
func (r roundedOf) rowsOf(rounded tensor.Shape) (int, error) {
	for rows := rounded[0] - 1; rows > 0; rows-- {
		if n := rows + layers.SumParts(rows); n == rounded[0] {
			return rows, nil
		} else if n < rounded[0] {
			break
		}
	}
	return 0, errorf(r.title(), errs.ErrShape, "the rounded gradient has shape %v", rounded)
}

func (r roundedOf) argument() argument {
	return argument{name: "the rounded gradient", rank: 2, dtype: r.of.x}
}

// at returns the place of the gradient of layer i's weights in the vector of all such gradients; without a layer i, the vector's length.
func (r roundedOf) at(i int) (at int) {
	for _, n := range r.widths[:i] {
		at += aligned(n * r.in)
	}
	return at
}

// sums returns the sums over parts of the rows of a layer's gradient.
func (r roundedOf) sums(i, rows int, m gpu.Memory) gpu.Memory {
	parts, before := layers.SumParts(rows), 0
	for _, w := range r.widths[:i] {
		before += w
	}
	m.Offset, m.Len = m.Offset+4*int64(parts*before), parts*r.widths[i]
	return m
}

// elements returns the gradient of each layer in host memory.
func (r roundedOf) elements(rounded G.Value) (rows int, dy [][]float32, err error) {
	shape := rounded.Shape()
	if rows, err = r.rowsOf(shape); err != nil {
		return 0, nil, err
	}
	all, err := elements[float32](r.title(), "the rounded gradient", rounded, shape)
	if err != nil {
		return 0, nil, err
	}
	all = all[layers.SumParts(rows)*r.all():]
	for _, n := range r.widths {
		dy, all = append(dy, all[:rows*n]), all[rows*n:]
	}
	return rows, dy, nil
}

// products returns the products, for a GPU's engine. m is the memory of the rounded gradient.
func (r roundedOf) products(rows int, m gpu.Memory) layers.RoundedProducts {
	at := layers.SumParts(rows) * r.all()
	m.Offset, m.Len = m.Offset+4*int64(at), rows*r.all()
	return layers.RoundedProducts{Rows: rows, In: r.in, Outs: r.widths, Products: r.of.products, DY: m}
}

// roundedDY is the rule of the rounded gradient. With heads, its inputs are the gradients of the layers behind SplitHeads, in 16 bits.
type roundedDY struct {
	roundedOf
	f     attn.Activation // behind the layers
	heads bool
}

func (r roundedDY) String() string {
	return fmt.Sprintf("rounded gradient of %v, heads %t, %v", r.f, r.heads, r.roundedOf)
}

// join is the rule that joins the inputs with heads.
func (r roundedDY) join() joinParts {
	return joinParts{widths: r.widths, from: operand.BFloat16, to: r.of.x, heads: true}
}

func (r roundedDY) arguments() []argument {
	if r.heads {
		args := r.join().arguments()
		return append(args[:len(args)-1], r.argument())
	}
	args := alike(r.of.rank(), r.of.x, "the output's gradient")
	if r.f != attn.NoActivation {
		args = append(args, alike(r.of.rank(), r.of.x, "the activation's input")...)
	}
	return append(args, r.argument())
}

func (r roundedDY) shape(in []tensor.Shape) (tensor.Shape, error) {
	size := in[0].TotalSize()
	if r.heads {
		all, err := r.join().shape(in)
		if err != nil {
			return nil, err
		}
		size = all[0]
	} else if err := sameShape(r.title(), r.arguments(), in); err != nil {
		return nil, err
	}
	if size%r.all() != 0 || len(in[0]) == 2 && in[0][1] != r.all() {
		return nil, errorf(r.title(), errs.ErrShape, "the output's gradient has shape %v, want rows of %d elements", in[0], r.all())
	}
	rows := size / r.all()
	return tensor.Shape{layers.SumParts(rows) + rows, r.all()}, nil
}

func (r roundedDY) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	of, err := in[0], error(nil)
	if r.heads {
		var joined tensor.Shape
		if joined, err = r.join().shape(shapesOf(in)); err == nil {
			of, err = r.join().compute(in, joined)
		}
	} else if r.f != attn.NoActivation {
		of, err = activationGrad[float32](activation{rank: r.of.rank(), dtype: r.of.x, f: r.f}, in[1], in[0])
	}
	if err != nil {
		return nil, err
	}
	dy, err := elements[float32](r.title(), "the output's gradient", of, of.Shape())
	if err != nil {
		return nil, err
	}
	t, all := zeros[float32](shape)
	copy(all[len(all)-len(dy):], dy)
	return t, nil
}

func (r roundedDY) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	rows, at := in[0].TotalSize()/r.all(), 0
	if r.heads {
		rows = in[0][0] * in[0][2]
	}
	for i, n := range r.widths {
		of := func(m gpu.Memory) gpu.Memory {
			m.Offset, m.Len = m.Offset+4*int64(at), rows*n
			return m
		}
		o := layers.Rounding{RoundedProducts: r.products(rows, w.Out), Layer: i, Activation: r.f}
		if r.heads {
			o.X, o.Tokens, o.Dim = w.In[i].Memory, in[i][2], in[i][3]
		} else {
			o.X = of(w.In[0].Memory)
		}
		if r.f != attn.NoActivation {
			o.Before = of(w.In[1].Memory)
		}
		if r.of.bias {
			o.Sums = r.sums(i, rows, w.Out)
		}
		if err := w.Rounding(&o); err != nil {
			return err
		}
		at += rows * n
	}
	return nil
}

// roundedX is the rule of the gradient of norm(x) or x.
type roundedX struct{ roundedOf }

func (r roundedX) String() string { return "dx " + r.roundedOf.String() }
func (r roundedX) arguments() []argument {
	args := alike(2, r.of.x, r.of.names().w...)
	return append(args, r.argument(), argument{name: "dx", rank: 2, dtype: r.of.x})
}

func (r roundedX) shape(in []tensor.Shape) (tensor.Shape, error) {
	rows, err := r.rowsOf(in[len(in)-1])
	return tensor.Shape{rows, in[0][1]}, err
}

func (r roundedX) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	rows, dy, err := r.elements(in[len(in)-1])
	if err != nil {
		return nil, err
	}
	parts := make([]cpulinear.Operands[float32], len(dy))
	for i := range parts {
		w, err := elements[float32](r.title(), r.of.names().w[i], in[i], in[i].Shape())
		if err != nil {
			return nil, err
		}
		parts[i] = cpulinear.Operands[float32]{Rows: rows, In: shape[1], Out: r.widths[i], W: matrixOf(w)}
	}
	t, d := output[float32](shape)
	return t, linearGradX(d, parts, dy)
}

func (r roundedX) launch(w *ongpu.Work, _ []tensor.Shape, shape tensor.Shape) error {
	last := len(w.In) - 1
	o := r.products(shape[0], w.In[last].Memory)
	for i := range r.widths {
		o.W = append(o.W, w.In[i].Memory)
	}
	o.DX, o.Scratch = w.Out, w.Scratch
	return w.RoundedX(&o)
}

func (r roundedX) place(c *ongpu.Call, _ []tensor.Shape, shape tensor.Shape) {
	c.Scratch = func(d *layers.Engine) (int, error) {
		o := r.products(shape[0], gpu.Memory{})
		return d.RoundedXScratch(&o)
	}
}

// roundedW is the rule of the gradients of the weights of all layers, in a vector.
type roundedW struct{ roundedOf }

func (r roundedW) String() string { return "dw " + r.roundedOf.String() }
func (r roundedW) arguments() []argument {
	args := alike(2, r.of.x, "x")
	if r.of.gamma {
		args = append(args, alike(1, r.of.x, gammaName)...)
	}
	if r.of.beta {
		args = append(args, alike(1, r.of.x, betaName)...)
	}
	return append(args, r.argument(), argument{name: "dw", rank: 1, dtype: r.of.x})
}

func (r roundedW) shape(in []tensor.Shape) (tensor.Shape, error) {
	rows, err := r.rowsOf(in[len(in)-1])
	if err == nil && in[0][0] != rows {
		err = errorf(r.title(), errs.ErrShape, "x has shape %v, and the gradient %d rows", in[0], rows)
	}
	return tensor.Shape{r.at(len(r.widths))}, err
}

func (r roundedW) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	last := len(in) - 1
	rows, dy, err := r.elements(in[last])
	if err != nil {
		return nil, err
	}
	of := in[0]
	if r.of.norm {
		if of, err = normBefore(atOnce, r.of, in[:last]); err != nil {
			return nil, err
		}
	}
	x, err := elements[float32](r.title(), "x", of, of.Shape())
	if err != nil {
		return nil, err
	}
	t, d := zeros[float32](shape)
	turned := transposed(x, rows, r.in, r.in)
	for i, out := range r.widths {
		if err := multiply(d[r.at(i):][:out*r.in], transposed(dy[i], rows, out, out), turned, nil, out, r.in, rows); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func (r roundedW) on(in []tensor.Shape, m gpu.Memory) layers.RoundedProducts {
	o := r.products(in[0][0], m)
	if r.of.norm {
		o.Norm = &layers.Norm{Eps: r.of.eps, RMS: r.of.rms, UnitOffset: r.of.offset}
	}
	return o
}

func (r roundedW) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	o := r.on(in, w.In[len(w.In)-1].Memory)
	if r.of.gamma {
		o.Norm.Gamma = w.In[1].Memory
	}
	if r.of.beta {
		o.Norm.Beta = w.In[1+count(r.of.gamma)].Memory
	}
	for i, out := range r.widths {
		m := w.Out
		m.Offset, m.Len = m.Offset+4*int64(r.at(i)), out*r.in
		o.DW = append(o.DW, m)
	}
	o.X, o.Scratch = w.In[0].Memory, w.Scratch
	return w.RoundedW(&o)
}

func (r roundedW) place(c *ongpu.Call, in []tensor.Shape, _ tensor.Shape) {
	c.Scratch = func(d *layers.Engine) (int, error) {
		o := r.on(in, gpu.Memory{})
		return d.RoundedWScratch(&o)
	}
}

// roundedB is the rule of the gradient of the bias of a layer.
type roundedB struct {
	roundedOf
	which int
}

func (r roundedB) String() string { return fmt.Sprintf("db[%d] %v", r.which, r.roundedOf) }
func (r roundedB) arguments() []argument {
	return []argument{r.argument(), {name: "db", rank: 1, dtype: r.of.x}}
}

func (r roundedB) shape(in []tensor.Shape) (tensor.Shape, error) {
	_, err := r.rowsOf(in[0])
	return tensor.Shape{r.widths[r.which]}, err
}

func (r roundedB) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	_, dy, err := r.elements(in[0])
	if err != nil {
		return nil, err
	}
	sum := make([]float64, shape[0])
	for i, v := range dy[r.which] {
		sum[i%len(sum)] += float64(v)
	}
	t, d := output[float32](shape)
	for i, s := range sum {
		d[i] = float32(s)
	}
	return t, nil
}

func (r roundedB) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	rows, err := r.rowsOf(in[0])
	if err != nil {
		return err
	}
	return w.AddParts(layers.SumParts(rows), shape[0], r.sums(r.which, rows, w.In[0].Memory), w.Out)
}

var (
	_ launched = roundedDY{}
	_ launched = roundedX{}
	_ launched = roundedW{}
	_ launched = roundedB{}
	_ placed   = roundedX{}
	_ placed   = roundedW{}
)
