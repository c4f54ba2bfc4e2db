package nn

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu/vector"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// CrossEntropy is the loss of a language model: for each row the negative log-probability of its target, a token, by the softmax of the
// logits
//
//	logits  = x w^T + b
//	loss[i] = log(sum over j of exp(logits[i,j])) - logits[i,targets[i]]
//
// Logits are computed in pieces of rows, in the forward and in the backward pass: at most 2^24 of them (on a GPU 2^27), or those of 64
// rows, are in memory. The sum of the loss, divided by the number of rows that count, is the mean.
//
//   - Shapes: x (rows, width), w (vocabulary, width), b (vocabulary) or nil, targets (rows), loss (rows).
//   - Types: x, w, b and loss float32 or float64, all alike; targets int or int32. On a GPU: float32 and int32. Exponentials of float32 are
//     within 2 units in the last place, on a GPU 4. Sums are float64, on a GPU float32.
//   - A target of -1 is a row that does not count: its loss and its gradients are 0. A target outside [-1, vocabulary) is ErrLength when
//     the graph runs, before anything is written. On a GPU, such a target makes loss and gradients NaN, since the host does not read
//     targets there.
//   - Options: [WithMixedPrecision] with a type, for products on a GPU.
//   - Gradients: of x, w and b, computed together, in host memory on both of Gorgonia's machines, on a GPU on the tape machine. No second
//     derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil nodes, other graphs).
func CrossEntropy(x, w, b, targets *G.Node, opts ...Option) (loss *G.Node, err error) {
	const name = "CrossEntropy"
	defer errs.RecoverTo(prefix+name, &err)
	if err := checkFloats(name, "x", x); err != nil {
		return nil, err
	}
	if w == nil || targets == nil {
		return nil, errorf(name, errs.ErrGraph, "w or targets is nil")
	}
	if d := targets.Dtype(); d != tensor.Int && d != tensor.Int32 {
		return nil, errorf(name, errs.ErrDType, "%s is of %v, want int or int32", called("targets", targets), d)
	}
	op := crossEntropy{dtype: x.Dtype(), targets: targets.Dtype(), bias: b != nil}
	for _, o := range opts {
		switch {
		case o.name == "":
			continue
		case o.name != optionMixed || len(o.products) == 0:
			return nil, errorf(name, errs.ErrUnsupported, "option %s, want %s with a type or none", o.name, optionMixed)
		case op.products != 0:
			return nil, errorf(name, errs.ErrOption, "option %s is given twice", o.name)
		}
		f, _ := operand.WeightFormat(x.Dtype())
		if op.products, err = o.productsOf(name, f); err != nil {
			return nil, err
		}
	}
	children := []*G.Node{x, w, targets}
	if op.bias {
		children = append(children, b)
	}
	return newNode(op, children...)
}

// crossEntropy is the rule of CrossEntropy. Its inputs are x, w, targets and, if there is one, the bias.
type crossEntropy struct {
	dtype, targets tensor.Dtype
	bias           bool
	products       attn.DType // of rounded numbers; 0: as operands are
}

func (op crossEntropy) title() string { return "CrossEntropy" }
func (op crossEntropy) String() string {
	s := fmt.Sprintf("CrossEntropy{%v, targets %v, bias %t", op.dtype, op.targets, op.bias)
	if op.products != 0 {
		s += fmt.Sprintf(", products of %v", op.products)
	}
	return s + "}"
}

func (op crossEntropy) inputs() []argument {
	in := []argument{{name: "x", rank: 2, dtype: op.dtype}, {name: "w", rank: 2, dtype: op.dtype}, {name: "targets", rank: 1, dtype: op.targets, data: true}}
	if op.bias {
		in = append(in, argument{name: "b", rank: 1, dtype: op.dtype})
	}
	return in
}

func (op crossEntropy) arguments() []argument {
	return append(op.inputs(), argument{name: "loss", rank: 1, dtype: op.dtype})
}

func (op crossEntropy) shape(in []tensor.Shape) (tensor.Shape, error) {
	x, w, targets := in[0], in[1], in[2]
	switch {
	case w[1] != x[1]:
		return nil, errorf(op.title(), errs.ErrShape, "w has shape %v, want (vocabulary, %d) for x of shape %v", w, x[1], x)
	case targets[0] != x[0]:
		return nil, errorf(op.title(), errs.ErrShape, "targets has shape %v, want (%d) for x of shape %v", targets, x[0], x)
	case op.bias && in[3][0] != w[0]:
		return nil, errorf(op.title(), errs.ErrShape, "b has shape %v, want (%d) for w of shape %v", in[3], w[0], w)
	}
	return tensor.Shape{x[0]}, nil
}

func (op crossEntropy) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if op.dtype == tensor.Float64 {
		return crossEntropyForward[float64](op, in, shape)
	}
	return crossEntropyForward[float32](op, in, shape)
}

// classes are the operands of a loss.
type classes[F float] struct {
	op                crossEntropy
	rows, width, size int // size: of the vocabulary
	x, w, b           []F // b: nil without a bias
	targets           []int
}

func readClasses[F float](op crossEntropy, in []G.Value) (c classes[F], err error) {
	c = classes[F]{op: op, rows: in[0].Shape()[0], width: in[0].Shape()[1], size: in[1].Shape()[0]}
	if c.x, err = elements[F](op.title(), "x", in[0], in[0].Shape()); err != nil {
		return c, err
	}
	if c.w, err = elements[F](op.title(), "w", in[1], in[1].Shape()); err != nil {
		return c, err
	}
	if op.bias {
		if c.b, err = elements[F](op.title(), "b", in[3], in[3].Shape()); err != nil {
			return c, err
		}
	}
	c.targets, err = integers(op.title(), "targets", op.targets, in[2])
	for i, t := range c.targets {
		if t < -1 || t >= c.size {
			return c, errorf(op.title(), errs.ErrLength, "targets[%d] is %d, outside [-1, %d)", i, t, c.size)
		}
	}
	return c, err
}

// Limits of the logits in memory.
const (
	logitElements = 1 << 24
	logitRows     = 64
)

// pieces calls f for pieces of the rows, with their logits, which f may overwrite.
func (c *classes[F]) pieces(f func(from, to int, logits []F) error) error {
	most := min(max(logitElements/c.size, logitRows), c.rows)
	logits := dense.Make[F](most * c.size)
	for from := 0; from < c.rows; from += most {
		to := min(from+most, c.rows)
		part := logits[:(to-from)*c.size]
		o := cpulinear.Operands[F]{Rows: to - from, In: c.width, Out: c.size, X: c.x[from*c.width : to*c.width], W: matrixOf(c.w), Bias: c.b, Y: part}
		if err := runLinear(&o); err != nil {
			return err
		}
		if err := f(from, to, part); err != nil {
			return err
		}
	}
	return nil
}

// weigh replaces the logits of a row by exponentials of the differences from their maximum, and returns the maximum and the sum.
func weigh[F float](logits []F) (top F, sum float64) {
	top = slices.Max(logits)
	if math.IsInf(float64(top), 0) || top != top {
		for i, x := range logits { // NaN, or the sum of infinities
			logits[i] = F(math.Exp(float64(x) - float64(top)))
			sum += float64(logits[i])
		}
		return top, sum
	}
	const block = 512 // of sums in F
	for from := 0; from < len(logits); from += block {
		part := logits[from:min(from+block, len(logits))]
		for i, x := range part {
			part[i] = (x - top) * F(lean.Log4E)
		}
		sum += float64(vector.Exponentials(part, 0))
	}
	return top, sum
}

func crossEntropyForward[F float](op crossEntropy, in []G.Value, shape tensor.Shape) (G.Value, error) {
	c, err := readClasses[F](op, in)
	if err != nil {
		return nil, err
	}
	t, loss := output[F](shape)
	return t, c.pieces(func(from, to int, logits []F) error {
		eachRow(to-from, c.size, func(row int) {
			target := c.targets[from+row]
			if target < 0 {
				loss[from+row] = 0
				return
			}
			part := logits[row*c.size : (row+1)*c.size]
			of := float64(part[target])
			top, sum := weigh(part)
			loss[from+row] = F(float64(top) - of + math.Log(sum))
		})
		return nil
	})
}

func (op crossEntropy) graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error) {
	shapes := make([]tensor.Shape, len(in))
	for i, n := range in {
		shapes[i] = n.Shape()
	}
	return crossEntropyGradients(inGraph, op, shapes, in, dy)
}

// outputGradients makes the loss an input of the gradients, if products are rounded: with the loss, a GPU reads logits once instead of twice.
func (op crossEntropy) outputGradients(in []*G.Node, loss, dy *G.Node) ([]*G.Node, error) {
	if op.products == 0 {
		return op.graphGradients(in, dy)
	}
	shapes := make([]tensor.Shape, len(in))
	for i, n := range in {
		shapes[i] = n.Shape()
	}
	return crossEntropyGradients(inGraph, op, shapes, in, dy, loss)
}

func (op crossEntropy) valueGradients(in []G.Value, dy G.Value) ([]G.Value, error) {
	return crossEntropyGradients(atOnce, op, shapesOf(in), in, dy)
}

// crossEntropyGradients returns the gradients: parts of one vector, since all of them need the logits.
func crossEntropyGradients[T any](do step[T], op crossEntropy, shapes []tensor.Shape, in []T, dy T, loss ...T) ([]T, error) {
	all, err := do(node{newOperator(crossEntropyGradient{once{op.title()}, op, len(loss) > 0}), new(ongpu.Node)}, append(append(slices.Clone(in), loss...), dy)...)
	if err != nil {
		return nil, err
	}
	grads := make([]T, len(in))
	places := op.places(shapes)
	for i := range in {
		from := places[i]
		if from < 0 {
			continue
		}
		r := vectorPart{once: once{op.title()}, at: from, to: shapes[i].Clone(), dtype: op.dtype}
		if grads[i], err = do(view{newOperator(r)}, all); err != nil {
			return nil, err
		}
	}
	return grads, nil
}

// places returns where the gradient of each input begins in the vector, -1 for data, and at last the vector's length. Each begins at a
// multiple of four elements, as kernels want.
func (op crossEntropy) places(shapes []tensor.Shape) (places []int) {
	at := 0
	for i, a := range op.inputs() {
		if a.data {
			places = append(places, -1)
			continue
		}
		places = append(places, at)
		at += aligned(shapes[i].TotalSize())
	}
	return append(places, at)
}

// crossEntropyGradient is the rule of the gradients of x, w and b, one after the other in a vector. With g the gradient of the loss, and p the
// softmax of the logits:
//
//	d = g (p - 1 at the target),   dx = d w,   dw = d^T x,   db = sum over rows of d
type crossEntropyGradient struct {
	once
	of    crossEntropy
	known bool // the loss is an input behind those of the loss
}

// inputs returns the number of inputs of the loss.
func (r crossEntropyGradient) inputs(all int) int { return all - 1 - count(r.known) }

// once is a rule of gradients of an op, without gradients of its own.
type once struct{ op string }

func (r once) graphGradients([]*G.Node, *G.Node) ([]*G.Node, error) {
	return nil, errorf(r.op+" gradient", errs.ErrUnsupported, "second derivative")
}

func (r once) valueGradients([]G.Value, G.Value) ([]G.Value, error) {
	return nil, errorf(r.op+" gradient", errs.ErrUnsupported, "second derivative")
}

func (r crossEntropyGradient) title() string { return "CrossEntropy gradient" }
func (r crossEntropyGradient) String() string {
	return fmt.Sprintf("gradient of %v, known %t", r.of, r.known)
}
func (r crossEntropyGradient) arguments() []argument {
	args := r.of.inputs()
	if r.known {
		args = append(args, argument{name: "the loss", rank: 1, dtype: r.of.dtype})
	}
	return append(args, argument{name: "the loss's gradient", rank: 1, dtype: r.of.dtype}, argument{name: "gradients", rank: 1, dtype: r.of.dtype})
}

func (r crossEntropyGradient) shape(in []tensor.Shape) (tensor.Shape, error) {
	own := r.inputs(len(in))
	loss, err := r.of.shape(in[:own])
	if err != nil {
		return nil, err
	}
	for i, s := range in[own:] {
		if !slices.Equal(loss, s) {
			return nil, errorf(r.title(), errs.ErrShape, "%s has shape %v, want %v", r.arguments()[own+i].name, s, loss)
		}
	}
	places := r.of.places(in[:own])
	return tensor.Shape{places[own]}, nil
}

func (r crossEntropyGradient) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.of.dtype == tensor.Float64 {
		return crossEntropyBackward[float64](r.of, in, shape)
	}
	if r.known { // CPUs do not need the loss
		in = append(slices.Clone(in[:r.inputs(len(in))]), in[len(in)-1])
	}
	return crossEntropyBackward[float32](r.of, in, shape)
}

func crossEntropyBackward[F float](op crossEntropy, in []G.Value, shape tensor.Shape) (G.Value, error) {
	last := len(in) - 1
	c, err := readClasses[F](op, in[:last])
	if err != nil {
		return nil, err
	}
	g, err := elements[F](op.title(), "the loss's gradient", in[last], in[last].Shape())
	if err != nil {
		return nil, err
	}
	t, all := zeros[F](shape)
	places := op.places(shapesOf(in[:last]))
	dx, dw, db := all[places[0]:][:len(c.x)], all[places[1]:][:len(c.w)], all[len(all):]
	if op.bias {
		db = all[places[3]:][:c.size]
	}
	turned := transposed(c.w, c.size, c.width, c.width)
	sums := make([]float64, len(db))
	more := []F(nil) // of a piece, to be added to dw
	return t, c.pieces(func(from, to int, d []F) error {
		eachRow(to-from, c.size, func(row int) {
			part, target := d[row*c.size:(row+1)*c.size], c.targets[from+row]
			by := float64(g[from+row])
			if target < 0 {
				clear(part)
				return
			}
			_, sum := weigh(part)
			vector.Scale(part, part, by/sum)
			part[target] -= F(by)
		})
		rows := to - from
		if err := multiply(dx[from*c.width:to*c.width], d, turned, nil, rows, c.width, c.size); err != nil {
			return err
		}
		// The first piece is written, and the others are added.
		sum := dw
		if from > 0 {
			if more == nil {
				more = dense.Make[F](len(dw))
			}
			sum = more
		}
		if err := multiply(sum, transposed(d, rows, c.size, c.size), transposed(c.x[from*c.width:to*c.width], rows, c.width, c.width), nil, c.size, c.width, rows); err != nil {
			return err
		}
		if from > 0 {
			eachPiece(len(dw), func(i, end int) { vector.Add(dw[i:end], more[i:end]) })
		}
		if op.bias {
			for row := range rows {
				for i, x := range d[row*c.size : (row+1)*c.size] {
					sums[i] += float64(x)
				}
			}
			if to == c.rows {
				for i, s := range sums {
					db[i] = F(s)
				}
			}
		}
		return nil
	})
}

// launch queues the loss.
func (op crossEntropy) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	o := op.on(w, in)
	o.Y = w.Out
	return w.Loss(o)
}

func (op crossEntropy) place(c *ongpu.Call, in []tensor.Shape, _ tensor.Shape) {
	c.Scratch = func(d *layers.Engine) (int, error) { return d.LossScratch(op.on(nil, in)) }
}

// on returns the loss for a GPU's engine, without its results. Without w, it has no memory.
func (op crossEntropy) on(w *ongpu.Work, in []tensor.Shape) *layers.Loss {
	o := &layers.Loss{Rows: in[0][0], Width: in[0][1], Vocabulary: in[1][0], Products: op.products}
	if w == nil {
		return o
	}
	o.X, o.W, o.Targets, o.Scratch = w.In[0].Memory, w.In[1].Memory, w.In[2].Memory, w.Scratch
	if op.bias {
		o.B = w.In[3].Memory
	}
	return o
}

// launch queues the gradients.
func (r crossEntropyGradient) launch(w *ongpu.Work, in []tensor.Shape, _ tensor.Shape) error {
	own := r.inputs(len(in))
	o := r.of.on(w, in)
	o.DY = w.In[len(in)-1].Memory
	if r.known {
		o.Y = w.In[own].Memory
	}
	places := r.of.places(in[:own])
	for i, to := range []*gpu.Memory{&o.DX, &o.DW, nil, &o.DB}[:own] {
		if to != nil {
			*to = w.Out
			to.Offset, to.Len = to.Offset+4*int64(places[i]), in[i].TotalSize()
		}
	}
	return w.Loss(o)
}

func (r crossEntropyGradient) place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape) {
	r.of.place(c, in, shape)
}

// vectorPart is the rule of a part of a vector as a tensor, without a copy. No other node reads that part.
type vectorPart struct {
	once
	at    int
	to    tensor.Shape
	dtype tensor.Dtype
	last  bool // the part is the rest of the vector, which may have fewer rows in a run than in the graph
}

func (r vectorPart) from(tensor.Shape) int { return r.at }

func (r vectorPart) title() string { return r.op + " gradient" }
func (r vectorPart) String() string {
	return fmt.Sprintf("Part{elements from %d on as %v, %v, last %t}", r.at, r.to, r.dtype, r.last)
}
func (r vectorPart) arguments() []argument {
	return []argument{{name: "gradients", rank: 1, dtype: r.dtype}, {name: "part", rank: len(r.to), dtype: r.dtype}}
}

func (r vectorPart) shape(in []tensor.Shape) (tensor.Shape, error) {
	if row := r.to.TotalSize() / r.to[0]; r.last && in[0][0] > r.at && (in[0][0]-r.at)%row == 0 {
		to := r.to.Clone()
		to[0] = (in[0][0] - r.at) / row
		return to, nil
	}
	if end := r.at + r.to.TotalSize(); end > in[0][0] {
		return nil, errorf(r.title(), errs.ErrShape, "gradients has shape %v, want %d elements or more", in[0], end)
	}
	return r.to.Clone(), nil
}

func (r vectorPart) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.dtype == tensor.Float64 {
		return partOf[float64](r, in[0], r.at, shape)
	}
	return partOf[float32](r, in[0], r.at, shape)
}

var (
	_ composed = crossEntropy{}
	_ launched = crossEntropy{}
	_ placed   = crossEntropy{}
	_ launched = crossEntropyGradient{}
	_ placed   = crossEntropyGradient{}
	_ window   = vectorPart{}
)
