package nn

import (
	"fmt"
	"hash"
	"slices"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/operand"

	"github.com/chewxy/hm"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A LinearOption changes one thing of a [Linear]. An option that is given twice is ErrOption, and
// so are two activations and two norms.
type LinearOption struct {
	activation attn.Activation
	gate       bool // the activation is of a gate
	residual   *G.Node
	norm       *normOption
	mixed      bool
}

type normOption struct {
	gamma, beta *G.Node
	eps         float64
	rms, offset bool
	twice       bool // WithUnitOffset is given twice
}

// WithReLU makes negative outputs 0, behind the bias and before the residual. NaN stays NaN.
// A layer takes at most one of WithReLU, [WithGELU], [WithGELUTanh] and [WithSiLU].
func WithReLU() LinearOption { return LinearOption{activation: attn.ReLU} }

// WithGELU makes outputs v into v/2 (1 + erf(v/sqrt(2))), behind the bias and before the
// residual, as [GELU] does.
func WithGELU() LinearOption { return LinearOption{activation: attn.GELU} }

// WithGELUTanh is WithGELU with the approximation by tanh, as [GELUTanh] has it.
func WithGELUTanh() LinearOption { return LinearOption{activation: attn.GELUTanh} }

// WithSiLU makes outputs v into v / (1 + exp(-v)), behind the bias and before the residual, as
// [SiLU] does.
func WithSiLU() LinearOption { return LinearOption{activation: attn.SiLU} }

// WithResidual adds r, of the output's shape and type, to the output.
func WithResidual(r *G.Node) LinearOption { return LinearOption{residual: r} }

// WithNorm has the layer read [LayerNorm](x, gamma, beta, eps) instead of x. On a
// GPU that is one launch less where rows are few.
func WithNorm(gamma, beta *G.Node, eps float64) LinearOption {
	return LinearOption{norm: &normOption{gamma: gamma, beta: beta, eps: eps}}
}

// WithRMSNorm has the layer read [RMSNorm](x, gamma, nil, eps, opts...) instead of x. A layer takes at most
// one of WithRMSNorm and [WithNorm]. On a GPU the norm is part of the same launches.
func WithRMSNorm(gamma *G.Node, eps float64, opts ...NormOption) LinearOption {
	n := &normOption{gamma: gamma, eps: eps, rms: true}
	for _, o := range opts {
		n.twice = n.twice || n.offset && o.unitOffset
		n.offset = n.offset || o.unitOffset
	}
	return LinearOption{norm: n}
}

// option is the name of the option that makes n.
func (n *normOption) option() string {
	if n.rms {
		return "WithRMSNorm"
	}
	return "WithNorm"
}

// activationOption is the name of the option of an activation.
func activationOption(a attn.Activation) string {
	return [...]string{attn.ReLU: "WithReLU", attn.GELU: "WithGELU", attn.GELUTanh: "WithGELUTanh", attn.SiLU: "WithSiLU"}[a]
}

// WithMixedPrecision lets the layer round x (its norm, under [WithNorm]) to the type of w
// where that is faster: products are of 16-bit numbers, and sums in float32. That is what
// most software does with 16-bit weights. The error grows from 2^-18 of a product to 2^-11
// with leanattention.Float16, and from 2^-15 to 2^-8 with leanattention.BFloat16, whatever the number of rows:
// an element of x w^T is off by no more than that part of the sum of |x| |w|. Rows of any magnitude are
// scaled by a power of two first with Float16. On a GPU of compute capability 9.0 and newer it is so from 17
// rows on: prompts and steps of as many sequences have half the products and operands; fewer
// rows wait for the weights alone, and keep float32's accuracy. A CPU with AMX computes a third of the products of many rows with leanattention.BFloat16, three
// of five with Float16; other CPUs, and few rows, compute as without.
func WithMixedPrecision() LinearOption { return LinearOption{mixed: true} }

// Linear is a fully connected layer:
//
//	y = f(x w^T + b) + residual
//
// with x of shape (rows, in), w (out, in), as checkpoints store it, b (out), and
// y and residual (rows, out). b may be nil for none; f is the activation of [WithReLU],
// [WithGELU], [WithGELUTanh] or [WithSiLU], and f(v) = v without; residual is 0 without
// [WithResidual]; under [WithNorm] or [WithRMSNorm] x is normalised first.
//
// x, b, residual and y are float32, and w is float32, leanattention.Float16 or
// leanattention.BFloat16: sums are in float32 whatever w is stored in. Or all of them are
// float64, which is the slow way.
//
// Weights are read from memory once for a block of up to 512 rows, at the
// memory's speed if rows are few, as they are in decoding. A row's result has
// the same bits whatever the other rows are. Many rows add products in another
// order than few: from 40 (bfloat16), 64 (float32) or 96 (float16) on with AVX2,
// from 96 with AVX-512 and from 32 to 96 with AMX. AMX splits operands into numbers of 16 bits,
// which loses less than 2^-21 of a product, and takes for 0 what is not normal.
// w is best an input with its values in row-major order: of any other, such as
// the transpose of a node, a copy is made at each run.
//
// It computes on a GPU where each of its inputs is a [device.Tensor], of float32 with
// weights of any of the three types; a row of w must then have a multiple of 16
// bytes. There 16 rows read the weights once; operands are split in two parts
// for the tensor cores, so that no more than 2^-18 of a product is lost (2^-15
// with bfloat16; see [WithMixedPrecision]), infinities become NaN, and the order of sums depends on the
// number of rows and the GPU. Where many rows are a GEMM the tensor core cuts off what it adds, too: up to 2^-27 of the
// largest sum on its way, for each column and part.
//
// Of several GPUs ([device.Open]) each computes some columns of y where w comes from
// [device.GPU.UploadSharded] on axis 0, the output features; b may be sharded so as well. If the other inputs are on
// all GPUs ([device.GPU.UploadReplicated]; a residual sharded by columns), y is sharded by columns; else y is whole, on the first GPU.
// Where w is sharded on axis 1, the input features, x may be sharded so, too, and y, on all GPUs, is
//
//	y = x_0 w_0^T + x_1 w_1^T + ... + b + residual
//
// with the columns x_i and w_i of GPU i, added in this order (b and residual to the first product), in float32. A norm, an
// activation, and other sharded inputs, are ErrUnsupported.
//
// Gradients of all inputs are available on both of Gorgonia's machines, in host memory; they can
// not be differentiated once more. They need w of x's type: with one of 16 bits, asking for
// one is ErrUnsupported.
//
// Errors: ErrShape, ErrDType, ErrGraph (nil x or w, other graphs), ErrOption.
func Linear(x, w, b *G.Node, opts ...LinearOption) (y *G.Node, err error) {
	const name = "Linear"
	defer errs.RecoverTo(prefix+name, &err)
	var bs []*G.Node
	if b != nil {
		bs = []*G.Node{b}
	}
	op, children, err := newLinear(name, x, []*G.Node{w}, bs, opts)
	if err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+name, op, children...)
}

// Linears is up to three layers of one x, such as a decoder's queries, keys and
// values, as one node and a node for each layer's output: on a GPU that is one
// launch, and x is normalised once. ws are the weights and bs the biases, as many
// of them, or none at all. It takes the options of [Linear] but [WithResidual].
// Errors are Linear's, and ErrUnsupported for more than three.
func Linears(x *G.Node, ws, bs []*G.Node, opts ...LinearOption) (ys []*G.Node, err error) {
	const name = "Linears"
	defer errs.RecoverTo(prefix+name, &err)
	op, children, err := newLinear(name, x, ws, bs, opts)
	switch {
	case err != nil:
		return nil, err
	case op.residual:
		return nil, errorf(name, errs.ErrUnsupported, "a residual of %d layers", len(ws))
	}
	shapes := make([]tensor.Shape, len(children))
	for i, n := range children {
		shapes[i] = n.Shape()
	}
	op.joined = true
	all, err := ongpu.Apply(prefix+name, op, children...)
	if err != nil {
		return nil, err
	}
	part := linearPart{dtype: op.x}
	for _, w := range ws {
		part.all += w.Shape()[0]
	}
	for _, w := range ws {
		part.width = w.Shape()[0]
		y, err := newView(part, all)
		if err != nil {
			return nil, err
		}
		ys = append(ys, y)
		part.before += part.width
	}
	return ys, nil
}

// mostLayers is how many layers [Linears] takes.
const mostLayers = 3

func newLinear(name string, x *G.Node, ws, bs []*G.Node, opts []LinearOption) (op linear, children G.Nodes, err error) {
	if x == nil || len(ws) == 0 || slices.Contains(ws, nil) {
		return op, nil, errorf(name, errs.ErrGraph, "x or w is nil")
	}
	switch {
	case len(ws) > mostLayers:
		return op, nil, errorf(name, errs.ErrUnsupported, "%d layers, more than %d", len(ws), mostLayers)
	case len(bs) > 0 && len(bs) != len(ws):
		return op, nil, errorf(name, errs.ErrShape, "%d biases of %d layers", len(bs), len(ws))
	case slices.Contains(bs, nil):
		return op, nil, errorf(name, errs.ErrGraph, "a bias is nil")
	}
	op = linear{x: x.Dtype(), w: ws[0].Dtype(), parts: len(ws), bias: len(bs) > 0, gpu: new(ongpu.Node)}
	var residual *G.Node
	var norm *normOption
	for _, o := range opts {
		if o.activation != attn.NoActivation {
			if op.activation != attn.NoActivation {
				return op, nil, errorf(name, errs.ErrOption, "the activation is given twice, by %s and %s", activationOption(op.activation), activationOption(o.activation))
			}
			op.activation = o.activation
		}
		if o.residual != nil {
			if residual != nil {
				return op, nil, errorf(name, errs.ErrOption, "option WithResidual is given twice")
			}
			residual = o.residual
		}
		if o.norm != nil {
			if norm != nil {
				return op, nil, errorf(name, errs.ErrOption, "the norm is given twice, by %s and %s", norm.option(), o.norm.option())
			}
			if o.norm.twice {
				return op, nil, errorf(name, errs.ErrOption, "option WithUnitOffset is given twice")
			}
			norm = o.norm
		}
		if op.mixed && o.mixed {
			return op, nil, errorf(name, errs.ErrOption, "option WithMixedPrecision is given twice")
		}
		op.mixed = op.mixed || o.mixed
	}
	op.residual = residual != nil
	op.gate = slices.ContainsFunc(opts, func(o LinearOption) bool { return o.gate })
	if err := op.checkTypes(name); err != nil {
		return op, nil, err
	}
	children = append(append(G.Nodes{x}, ws...), bs...)
	if op.residual {
		children = append(children, residual)
	}
	if norm != nil {
		if err := checkEps(name, norm.eps); err != nil {
			return op, nil, err
		}
		op.norm, op.eps, op.gamma, op.beta = true, norm.eps, norm.gamma != nil, norm.beta != nil
		op.rms, op.offset = norm.rms, norm.offset
		if op.offset && !op.gamma {
			return op, nil, errorf(name, errs.ErrUnsupported, "WithUnitOffset without a gamma")
		}
		for _, n := range []*G.Node{norm.gamma, norm.beta} {
			if n != nil {
				children = append(children, n)
			}
		}
	}
	shapes := make([]tensor.Shape, len(children))
	for i, n := range children {
		if n.Graph() != x.Graph() {
			return op, nil, errorf(name, errs.ErrGraph, "%s and x are in different graphs", op.OperandName(i))
		}
		switch isW := i >= 1 && i <= op.parts; {
		case isW && n.Dtype() != op.w:
			return op, nil, errorf(name, errs.ErrDType, "%s is of %v, the first one of %v", called(op.OperandName(i), n), n.Dtype(), op.w)
		case !isW && n.Dtype() != op.x:
			return op, nil, errorf(name, errs.ErrDType, "%s is of %v, x of %v%s", called(op.OperandName(i), n), n.Dtype(), op.x, toConvert(n.Dtype(), op.x))
		}
		shapes[i] = n.Shape()
	}
	_, err = op.shape(shapes)
	return op, children, err
}

// linear is the operator: children x, the weights, then the biases, the residual,
// gamma and beta where present. It holds nothing but the memory of its value on
// GPUs.
type linear struct {
	graph.Plain
	x, w              tensor.Dtype // of the inputs; the others have x's
	parts             int
	joined            bool // the outputs are one vector, one part behind the other
	bias, residual    bool
	activation        attn.Activation
	gate              bool // f(first layer) times second layer; of one weight, its halves
	norm, gamma, beta bool
	rms, offset       bool // the norm is an RMSNorm, and its weights are 1+gamma
	eps               float64
	mixed             bool
	gpu               *ongpu.Node
}

// OperandName makes it a [graph.Named].
func (op linear) OperandName(i int) string {
	of := func(name string, i int) string {
		if op.parts == 1 {
			return name
		}
		return fmt.Sprintf("%s[%d]", name, i)
	}
	if i == 0 {
		return "x"
	}
	if i--; i < op.parts {
		return of("w", i)
	}
	if i -= op.parts; op.bias {
		if i < op.parts {
			return of("b", i)
		}
		i -= op.parts
	}
	if op.residual {
		if i == 0 {
			return "residual"
		}
		i--
	}
	if op.gamma && i == 0 {
		return "gamma"
	}
	return "beta"
}

func (op linear) checkTypes(name string) error {
	switch {
	case op.x == tensor.Float32 && isWeight(op.w):
		return nil
	case op.x == tensor.Float64 && op.w == tensor.Float64:
		return nil
	}
	return errorf(name, errs.ErrDType,
		"x is of %v and w of %v, want float32 and one of float32, Float16, BFloat16, or float64 and float64", op.x, op.w)
}

// shape checks the inputs' shapes and returns the output's.
func (op linear) shape(in []tensor.Shape) (tensor.Shape, error) {
	name := op.title()
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrShape, "%d inputs, want %d", len(in), op.Arity())
	}
	ws := in[1 : 1+op.parts]
	for i, s := range in[:1+op.parts] {
		if len(s) != 2 || s[0] < 1 || s[1] < 1 {
			return nil, errorf(name, errs.ErrShape, "%s has shape %v, want rank 2 and no empty axis", op.OperandName(i), s)
		}
		if s[1] != in[0][1] {
			return nil, errorf(name, errs.ErrShape, "x has shape %v and %s %v, want the same second axis", in[0], op.OperandName(i), s)
		}
	}
	i := 1 + op.parts
	check := func(want tensor.Shape) error {
		if s := in[i]; !slices.Equal(s, want) {
			return errorf(name, errs.ErrShape, "%s has shape %v, want %v for x of shape %v and w of %v", op.OperandName(i), s, want, in[0], ws[0])
		}
		i++
		return nil
	}
	total := 0
	for _, w := range ws {
		total += in[0][0] * w[0]
	}
	out := tensor.Shape{in[0][0], ws[0][0]}
	switch {
	case !op.gate:
	case op.parts == 1 && out[1]%2 != 0:
		return nil, errorf(name, errs.ErrShape, "w has shape %v, want an even number of rows: half of them are the gate's", ws[0])
	case op.parts == 1:
		out[1] /= 2
	case ws[1][0] != out[1]:
		return nil, errorf(name, errs.ErrShape, "w[0], the gate's, has shape %v and w[1] %v, want the same", ws[0], ws[1])
	}
	if op.bias {
		for _, w := range ws {
			if err := check(w[:1]); err != nil {
				return nil, err
			}
		}
	}
	if op.residual {
		if err := check(out); err != nil {
			return nil, err
		}
	}
	for range count(op.gamma) + count(op.beta) {
		if err := check(in[0][1:]); err != nil {
			return nil, err
		}
	}
	if op.joined {
		return tensor.Shape{total}, nil
	}
	return out, nil
}

// OnGPU makes it an [ongpu.Op].
func (op linear) OnGPU() *ongpu.Node { return op.gpu }

func (op linear) Arity() int {
	n := 1 + op.parts + count(op.residual) + count(op.gamma) + count(op.beta)
	if op.bias {
		n += op.parts
	}
	return n
}

func (op linear) Type() hm.Type {
	ts := []hm.Type{tensorOf(2, op.x)}
	for range op.parts {
		ts = append(ts, tensorOf(2, op.w))
	}
	if op.bias {
		for range op.parts {
			ts = append(ts, tensorOf(1, op.x))
		}
	}
	if op.residual {
		ts = append(ts, tensorOf(2, op.x))
	}
	for range count(op.gamma) + count(op.beta) {
		ts = append(ts, tensorOf(1, op.x))
	}
	rank := 2
	if op.joined {
		rank = 1
	}
	return hm.NewFnType(append(ts, tensorOf(rank, op.x))...)
}

func (op linear) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return op.shape(shapes)
}

func (op linear) String() string {
	s := fmt.Sprintf("Linear{x %v, w %v, bias %v, residual %v, activation %v", op.x, op.w, op.bias, op.residual, op.activation)
	if op.joined || op.gate {
		s += fmt.Sprintf(", layers %d, gate %v", op.parts, op.gate)
	}
	if op.mixed {
		s += ", mixed precision"
	}
	if op.norm {
		s += fmt.Sprintf(", norm eps %v, gamma %v, beta %v", op.eps, op.gamma, op.beta)
	}
	if op.rms {
		s += fmt.Sprintf(", by the root mean square, 1+gamma %v", op.offset)
	}
	return s + "}"
}
func (op linear) WriteHash(h hash.Hash) { fmt.Fprint(h, op.String()) }
func (op linear) Hashcode() uint32      { return graph.Hashcode(op) }

// Do returns a new tensor at each call, or on a GPU the node's own memory anew.
func (op linear) Do(in ...G.Value) (y G.Value, err error) {
	name := op.title()
	defer errs.RecoverTo(prefix+name, &err)
	defer op.gpu.Done(in, &y, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	if anyOnGPU(in) {
		return op.doGPU(in)
	}
	if op.x == tensor.Float64 {
		return linearForward[float64](op, in)
	}
	return linearForward[float32](op, in)
}

// operands is the inputs of a linear in host memory.
type operands[F float] struct {
	x, gamma, beta []F
	parts          []cpulinear.Operands[F]
	shape          tensor.Shape
}

// readLinear is the inputs as the engine takes them, without an output.
func readLinear[F float](op linear, in []G.Value) (o operands[F], err error) {
	name := op.title()
	shapes := make([]tensor.Shape, len(in))
	for i, v := range in {
		shapes[i] = v.Shape()
	}
	if o.shape, err = op.shape(shapes); err != nil {
		return o, err
	}
	at := 0
	next := func() (x []F, err error) {
		x, err = elements[F](name, op.OperandName(at), in[at], shapes[at])
		at++
		return x, err
	}
	if o.x, err = next(); err != nil {
		return o, err
	}
	o.parts = make([]cpulinear.Operands[F], op.parts)
	for i := range o.parts {
		p := &o.parts[i]
		p.Rows, p.In, p.Out, p.Activation, p.X = shapes[0][0], shapes[0][1], shapes[at][0], op.activation, o.x
		p.RoundX = op.mixed
		switch op.w {
		case tensor.Float32:
			p.W, err = weights[float32](attn.Float32, in[at])
		case tensor.Float64:
			p.W, err = weights[float64](attn.Float64, in[at])
		case operand.Float16:
			p.W, err = weights[half.Float16](attn.Float16, in[at])
		case operand.BFloat16:
			p.W, err = weights[half.BFloat16](attn.BFloat16, in[at])
		}
		if err != nil {
			return o, err
		}
		at++
	}
	if op.bias {
		for i := range o.parts {
			if o.parts[i].Bias, err = next(); err != nil {
				return o, err
			}
		}
	}
	if op.gate && op.parts == 1 {
		o.parts = halves(o.parts[0])
	}
	for _, p := range []struct {
		there bool
		to    *[]F
	}{{op.residual, &o.parts[0].Residual}, {op.gamma, &o.gamma}, {op.beta, &o.beta}} {
		if p.there {
			if *p.to, err = next(); err != nil {
				return o, err
			}
		}
	}
	return o, nil
}

// weights is the elements of w in their own type.
func weights[T any](d attn.DType, v G.Value) (cpu.Buffer, error) {
	w, err := elements[T]("Linear", "w", v, v.Shape())
	return cpu.Buffer{DType: d, Ptr: unsafe.Pointer(unsafe.SliceData(w)), Len: len(w)}, err
}

// linearForward runs the layers into one new tensor.
func linearForward[F float](op linear, in []G.Value) (G.Value, error) {
	o, err := readLinear[F](op, in)
	if err != nil {
		return nil, err
	}
	x := o.x
	if op.norm {
		n := o.parts[0].In
		if op.offset {
			o.gamma = onePlus(o.gamma)
		}
		normalised := scratch[F](len(o.x))
		defer giveBack(normalised)
		x = *normalised
		norm := norm.Norm[F]{N: n, Gamma: o.gamma, Beta: o.beta, Eps: op.eps, RMS: op.rms}
		norm.Rows(cpu.Default(), x, o.x)
	}
	t, y := output[F](o.shape)
	if op.gate {
		return t, runGated(&o, x, y)
	}
	for i := range o.parts {
		p := &o.parts[i]
		p.X, p.Y = x, y[:p.Rows*p.Out]
		y = y[len(p.Y):]
	}
	if err := runLinears(o.parts); err != nil {
		return nil, err
	}
	return t, nil
}

func runLinear[F float](o *cpulinear.Operands[F]) error {
	return engineError("Linear", cpulinear.Run(cpu.Default(), o))
}

// runLinears computes several layers of the same x.
func runLinears[F float](all []cpulinear.Operands[F]) error {
	return engineError("Linear", cpulinear.RunAll(cpu.Default(), all))
}

// linearPart is the rule of the output of one of the layers of [Linears]: elements of their
// one vector, which nobody else sees, without a copy.
type linearPart struct {
	before, width, all int // columns of the layers ahead, of this one, and of all
	dtype              tensor.Dtype
}

func (r linearPart) title() string { return "Linears" }
func (r linearPart) String() string {
	return fmt.Sprintf("LinearPart{columns [%d, %d) of %d, %v}", r.before, r.before+r.width, r.all, r.dtype)
}

func (r linearPart) arguments() []argument {
	return []argument{{name: "the layers' output", rank: 1, dtype: r.dtype}, {name: "y", rank: 2, dtype: r.dtype}}
}

// shape follows the vector's: a run may have fewer rows than the graph was built for.
func (r linearPart) shape(in []tensor.Shape) (tensor.Shape, error) {
	if in[0][0]%r.all != 0 {
		return nil, errorf("Linears", errs.ErrShape, "the layers' output has shape %v, want rows of %d elements", in[0], r.all)
	}
	return tensor.Shape{in[0][0] / r.all, r.width}, nil
}

func (r linearPart) from(in tensor.Shape) int { return in[0] / r.all * r.before }

func (r linearPart) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	from := r.from(in[0].Shape())
	if r.dtype == tensor.Float64 {
		return partOf[float64](in[0], from, shape)
	}
	return partOf[float32](in[0], from, shape)
}

// gradient is zeros, but for the part.
func (r linearPart) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	from := r.from(in[0].Shape())
	if r.dtype == tensor.Float64 {
		return amongZeros[float64](r.title(), in[0].Shape(), from, dy)
	}
	return amongZeros[float32](r.title(), in[0].Shape(), from, dy)
}

func partOf[F float](v G.Value, from int, shape tensor.Shape) (G.Value, error) {
	all, err := elements[F]("Linears", "the layers' output", v, v.Shape())
	if err != nil {
		return nil, err
	}
	to := from + shape.TotalSize()
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(all[from:to:to])), nil
}

var (
	_ G.SDOp = linear{}
	_ G.ADOp = linear{}
)
