package nn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/cpu/norm"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// An Option changes a linear layer or a norm. An option that a function does not take is ErrUnsupported, and an option that is
// given twice is ErrOption.
type Option struct {
	name       string // "": no option
	activation Activation
	residual   *G.Node
	norm       *normOption
	products   []tensor.Dtype // of WithMixedPrecision
}

const (
	optionActivation = "WithActivation"
	optionResidual   = "WithResidual"
	optionNorm       = "WithNorm"
	optionRMSNorm    = "WithRMSNorm"
	optionMixed      = "WithMixedPrecision"
	optionInvariant  = "WithBatchInvariance"
	optionQuantised  = "WithQuantisedRows"
	optionUnitOffset = "WithUnitOffset"
)

type normOption struct {
	gamma, beta *G.Node
	eps         float64
	rms         bool
	opts        []Option
}

// WithActivation has a linear layer apply f to its output, after the bias and before the residual, as [Activate] does.
func WithActivation(f Activation) Option { return Option{name: optionActivation, activation: f} }

// WithResidual has a linear layer add r, of the output's shape and type.
func WithResidual(r *G.Node) Option { return Option{name: optionResidual, residual: r} }

// WithNorm has a linear layer read [LayerNorm](x, gamma, beta, eps) in place of x. A layer takes at most one of WithNorm and
// [WithRMSNorm]. On a GPU, the norm of few rows is part of the layer's launch.
func WithNorm(gamma, beta *G.Node, eps float64) Option {
	return Option{name: optionNorm, norm: &normOption{gamma: gamma, beta: beta, eps: eps}}
}

// WithRMSNorm has a linear layer read [RMSNorm](x, gamma, nil, eps, opts...) in place of x. A layer takes at most one of
// [WithNorm] and WithRMSNorm. On a GPU, the norm is part of the layer's launches.
func WithRMSNorm(gamma *G.Node, eps float64, opts ...Option) Option {
	return Option{name: optionRMSNorm, norm: &normOption{gamma: gamma, eps: eps, rms: true, opts: opts}}
}

// WithMixedPrecision lets a linear layer round x, or its norm, to the type of w where products of 16-bit numbers are faster. Sums
// stay float32.
//
//   - With w of float32 and an argument, leanattention.BFloat16 or leanattention.Float16, GPUs round x and w to that type, and operands of
//     the layer's gradients, too: mixed precision of training. Weights and gradients stay float32. Numbers of w, and of x in the
//     gradient of w, that exceed float16 become infinite. Rows of w that have no multiple of 8 elements, and CPUs, round nothing.
//     Several GPUs are ErrUnsupported.
//   - Error of an element of x w^T, relative to the sum of |x| |w|: 2^-11 with leanattention.Float16 (2^-18 without the option),
//     2^-8 with leanattention.BFloat16 (2^-15 without). The number of rows changes neither.
//   - With Float16, each row of x is first scaled by a power of two, so no magnitude overflows.
//   - GPUs of compute capability 9.0 and newer round from 17 rows on. With w of 8 or 4 bits, all GPUs round from 5 rows on. Fewer rows
//     keep float32's accuracy at the same speed.
//   - CPUs with AMX round where rows are many: a third of the products with BFloat16, three of five with Float16. Other CPUs and
//     few rows compute as without the option.
//   - With w of [Rounded] or [Quantised], but for E4M3, CPUs round x to 8 bits: a block of 32 elements of a row has one scale. The
//     error is at most 1/254 of the largest |x| of each block times the sum of its |w|. Integers are summed exactly. An x that is not
//     finite makes NaN.
func WithMixedPrecision(of ...tensor.Dtype) Option { return Option{name: optionMixed, products: of} }

// WithBatchInvariance gives a row of a linear layer the same bits whatever the number of rows of x. Without the option, the order of sums
// depends on that number. A layer of a prompt takes longer. The option is for the CPU: with inputs on a GPU, the layer is ErrUnsupported
// when run. Gradients are those without the option.
func WithBatchInvariance() Option { return Option{name: optionInvariant} }

// WithQuantisedRows has a linear layer quantise rows of x, or of its norm, to the type of w, tensor.Int8 or leanattention.E4M3, if there are 65
// rows or more. Tensor cores then take half the time of 16-bit products. Fewer rows are as without the option.
//
//   - A row has one scale: its largest magnitude / 127, or / 448 of E4M3. Its numbers are those nearest to the elements / scale, ties to
//     even. A row below 2^-80 is 0; a row with a number that is not finite makes NaN.
//   - The error of an element of x w^T is at most the sum of |w| times half a scale, or with E4M3 the sum of |x| |w| / 16, and more where
//     numbers of E4M3 are subnormal. One large element costs all others of its row precision.
//   - INT8: sums of products are exact integers. y is ((sum, as float32) * scale of w's row) * scale of x's row, then b, in float32: CPUs and
//     GPUs have the same bits. E4M3: float32 sums; GPUs add 128 columns at a time with about 13 bits.
//   - GPUs: compute capability 9.0. Others are ErrUnsupported when run. CPUs compute the same numbers with kernels of float32: INT8 takes two
//     to four times as long as without the option.
//   - With w sharded over several GPUs on axis 1, a scale is that of a GPU's columns.
//   - Other types of w, and WithBatchInvariance, are ErrUnsupported.
func WithQuantisedRows() Option { return Option{name: optionQuantised} }

// Linear is a fully connected layer:
//
//	y = f(x w^T + b) + residual
//
// Without options, f is the identity and residual is 0.
//
//   - Shapes: x (rows, in), w (out, in) as in checkpoints, b (out) or nil, y and residual (rows, out).
//   - Options: [WithActivation] for f, [WithResidual], [WithNorm] or [WithRMSNorm] for a norm of x, [WithMixedPrecision],
//     [WithBatchInvariance], [WithQuantisedRows].
//   - Types: x, b, residual and y float32 with w float32, leanattention.Float16 or leanattention.BFloat16, and sums in float32, and
//     also with w of [Rounded] or [Quantised]; or all float64, which is slow and on the CPU alone.
//   - Gradients: of all inputs, if w has the type of x, in host memory on both of Gorgonia's machines, on a GPU on the tape machine.
//     With w of 16 bits or fewer, a gradient is ErrUnsupported. No second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil x or w, other graphs), ErrOption, ErrUnsupported.
//
// On the CPU:
//
//   - A block of up to 512 rows reads the weights once. Few rows, as in decoding, take the time of that reading.
//   - A row's bits do not depend on the other rows. Without WithBatchInvariance, many rows sum in another order than few: from 40 rows (bfloat16), 64 (float32)
//     or 96 (float16) with AVX2, from 96 with AVX-512, from 32 to 96 with AMX.
//   - AMX splits operands into 16-bit numbers: less than 2^-21 of a product is lost, and subnormal numbers count as 0.
//   - w in row-major order is read in place. Each run copies any other w, such as a transposed one.
//
// On a GPU, all inputs are a [device.Tensor]:
//
//   - x is float32, and a row of w has a multiple of 16 bytes.
//   - w of [Rounded] or [Quantised] is from [device.GPU.UploadWeight]. Its numbers without scales are exact in float16, and x has two
//     parts of float16, or one with WithMixedPrecision from 5 rows on. A launch reads w for up to 32 rows, or 64 of one part; half as
//     many with Q4_K, Q5_K and Q6_K. From 129 rows on, GPUs of 9.0 read w once for 128 or 256 rows, if w has neither minima nor an order
//     of columns.
//   - Tensor cores multiply operands in two parts: at most 2^-18 of a product is lost, 2^-15 with bfloat16, and infinities become
//     NaN. In a GEMM of many rows, tensor cores also truncate sums: up to 2^-27 of the largest partial sum for each column and part.
//   - The order of sums depends on the number of rows and on the GPU.
//
// On several GPUs ([device.Open]):
//
//   - w from [device.GPU.UploadSharded] or [device.GPU.UploadWeightSharded] on axis 0, output features: each GPU computes columns of y. b may be sharded so too. If the
//     other inputs are replicated ([device.GPU.UploadReplicated]) and a residual is sharded by columns, y is sharded by columns.
//     Otherwise y is whole, on GPU 0.
//   - w sharded on axis 1, input features: y = x_0 w_0^T + x_1 w_1^T + ... + b + residual, in this order, in float32, replicated. x may
//     be sharded on axis 1. A norm, an activation and other sharded inputs are ErrUnsupported.
func Linear(x, w, b *G.Node, opts ...Option) (y *G.Node, err error) {
	const name = "Linear"
	defer errs.RecoverTo(prefix+name, &err)
	var bs []*G.Node
	if b != nil {
		bs = []*G.Node{b}
	}
	op, children, err := newLinear(name, x, []*G.Node{w}, bs, 0, opts)
	if err != nil {
		return nil, err
	}
	return newNode(op, children...)
}

// Linears is up to three [Linear] layers of one x, such as queries, keys and values, with a node for each output. x is normalised
// once, and on a GPU the layers are one launch.
//
//   - ws are the weights, and bs as many biases, or none. All ws have one type, unless one of them is of [Rounded] or [Quantised].
//   - Options: those of Linear but [WithResidual], which all layers have.
//   - Errors: those of Linear; ErrUnsupported for more than three layers or a residual.
//
// Gorgonia's lisp machine refuses a graph in which no node uses one of the outputs.
func Linears(x *G.Node, ws, bs []*G.Node, opts ...Option) (ys []*G.Node, err error) {
	const name = "Linears"
	defer errs.RecoverTo(prefix+name, &err)
	op, children, err := newLinear(name, x, ws, bs, 0, opts)
	switch {
	case err != nil:
		return nil, err
	case op.residual:
		return nil, errorf(name, errs.ErrUnsupported, "option %s of %d layers: add the residual to one output", optionResidual, len(ws))
	}
	op.joined = true
	all, err := newNode(op, children...)
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

// mostLayers is the most layers of [Linears].
const mostLayers = 3

// newLinear returns the rule of linear layers, and its inputs. gate is 0, or the activation of a gate.
func newLinear(name string, x *G.Node, ws, bs []*G.Node, gate Activation, opts []Option) (op linear, children G.Nodes, err error) {
	if x == nil || len(ws) == 0 || slices.Contains(ws, nil) {
		return op, nil, errorf(name, errs.ErrGraph, "x or w is nil")
	}
	switch {
	case len(ws) > mostLayers:
		return op, nil, errorf(name, errs.ErrUnsupported, "%d layers, want at most %d", len(ws), mostLayers)
	case len(bs) > 0 && len(bs) != len(ws):
		return op, nil, errorf(name, errs.ErrShape, "%d biases, want %d, one for each layer, or none", len(bs), len(ws))
	case slices.Contains(bs, nil):
		return op, nil, errorf(name, errs.ErrGraph, "a bias is nil")
	}
	of, err := weightFormat(name, x, ws[0])
	if err != nil {
		return op, nil, err
	}
	op = linear{x: x.Dtype(), w: of, parts: len(ws), bias: len(bs) > 0, gate: gate != 0, activation: gate.function()}
	for i, w := range ws[1:] {
		// Weights of GPUs have one format. An error of another is made with the node.
		op.rest[i] = of
		if other, err := weightFormat(name, x, w); err == nil && (other.Kernels() == "" || of.Kernels() == "") {
			op.rest[i] = other
		}
	}
	in := layerOperands[*G.Node]{x: x, w: ws, b: bs}
	var norm *normOption
	var activation Activation
	given := map[string]bool{}
	for _, o := range opts {
		if given[o.name] && o.name != optionActivation {
			return op, nil, errorf(name, errs.ErrOption, "option %s is given twice", o.name)
		}
		switch o.name {
		case "":
			continue
		case optionActivation:
			if err := o.activation.check(name); err != nil {
				return op, nil, err
			}
			if op.gate {
				return op, nil, errorf(name, errs.ErrUnsupported, "option %s(%v), and the activation is the gate's: leave the option out", o.name, o.activation)
			}
			if given[o.name] {
				return op, nil, errorf(name, errs.ErrOption, "option %s is given twice, with %v and %v", o.name, activation, o.activation)
			}
			activation, op.activation = o.activation, o.activation.function()
		case optionResidual:
			if o.residual != nil {
				op.residual, in.residual = true, &o.residual
			}
		case optionNorm, optionRMSNorm:
			if norm != nil {
				return op, nil, errorf(name, errs.ErrOption, "the norm is given twice, by %s and %s", optionNorm, optionRMSNorm)
			}
			norm = o.norm
		case optionMixed:
			op.mixed = true
			if op.products, err = o.productsOf(name, op.formats()...); err != nil {
				return op, nil, err
			}
		case optionInvariant:
			op.invariant = true
		case optionQuantised:
			op.quantised = true
		default:
			return op, nil, errorf(name, errs.ErrUnsupported, "option %s of a linear layer: pass it to %s", o.name, optionRMSNorm)
		}
		given[o.name] = true
	}
	if err := op.checkQuantised(name); err != nil {
		return op, nil, err
	}
	if norm != nil {
		if err := checkEps(name, norm.eps); err != nil {
			return op, nil, err
		}
		op.norm, op.eps, op.rms = true, norm.eps, norm.rms
		if norm.gamma != nil {
			op.gamma, in.gamma = true, &norm.gamma
		}
		if norm.beta != nil {
			op.beta, in.beta = true, &norm.beta
		}
		if op.offset, err = unitOffset(name, norm.opts, op.gamma); err != nil {
			return op, nil, err
		}
	}
	return op, in.list(), nil
}

// checkQuantised returns an error if rows cannot be quantised.
func (op *linear) checkQuantised(name string) error {
	if !op.quantised {
		return nil
	}
	for _, f := range op.formats() {
		if !weight.QuantisesRows(f) {
			return errorf(name, errs.ErrUnsupported, "option %s with w of %v, want %s, or leave the option out", optionQuantised, f, weight.Names(weight.QuantisesRows))
		}
	}
	if op.invariant {
		return errorf(name, errs.ErrUnsupported, "options %s and %s: the number of rows says whether rows are quantised", optionQuantised, optionInvariant)
	}
	return nil
}

// productsOf returns the type that [WithMixedPrecision] names, or 0.
func (o *Option) productsOf(name string, of ...weight.Format) (attn.DType, error) {
	switch {
	case len(o.products) == 0:
		return 0, nil
	case len(o.products) > 1:
		return 0, errorf(name, errs.ErrOption, "option %s with %d types, want one or none", optionMixed, len(o.products))
	}
	to, ok := operand.StorageType(o.products[0])
	if !ok || to != attn.Float16 && to != attn.BFloat16 {
		return 0, errorf(name, errs.ErrDType, "option %s(%v), want leanattention.BFloat16 or leanattention.Float16", optionMixed, o.products[0])
	}
	for _, f := range of {
		if f != weight.Float32 {
			return 0, errorf(name, errs.ErrUnsupported, "option %s(%v) with w of %v, want w of float32, or the option without a type", optionMixed, o.products[0], f)
		}
	}
	return to, nil
}

// weightFormat returns the format of w, which x is multiplied with.
func weightFormat(name string, x, w *G.Node) (weight.Format, error) {
	of, ok := operand.WeightFormat(w.Dtype())
	if ok && x.Dtype() == operand.SumType(of) {
		return of, nil
	}
	fits := func(f weight.Format) bool { return operand.SumType(f) == x.Dtype() }
	if weight.Names(fits) == "" {
		return 0, errorf(name, errs.ErrDType, "%s is of %v, want float32 or float64%s", called("x", x), x.Dtype(), toConvert(x.Dtype(), tensor.Float32))
	}
	return 0, errorf(name, errs.ErrDType, "%s is of %v and x of %v, want w of %s", called("w", w), w.Dtype(), x.Dtype(), weight.Names(fits))
}

// linear is the rule of linear layers of one x. Its inputs are [layerOperands].
type linear struct {
	x                 tensor.Dtype // of all inputs except weights
	w                 weight.Format
	rest              [mostLayers - 1]weight.Format // of the weights behind the first
	parts             int                           // weights: one for each layer, or one for both layers of a gate
	joined            bool                          // the output is one vector, layer after layer
	bias, residual    bool
	activation        attn.Activation
	gate              bool // y = f(first layer) * second layer; one weight has both layers as halves
	norm, gamma, beta bool
	rms, offset       bool // the norm is an RMSNorm; with 1+gamma
	eps               float64
	mixed, invariant  bool
	quantised         bool       // rows of x are
	products          attn.DType // of rounded numbers, with w of float32; 0: as operands are
}

// layerOperands has the operands of linear layers by name. T is what stands for an operand: a node, a value, a shape or memory. The
// order of an op's inputs is in list and named alone.
type layerOperands[T any] struct {
	x                     T
	w, b                  []T // of each layer; b may be empty
	residual, gamma, beta *T  // nil: none
}

// list returns the operands in the order of the op's inputs.
func (o *layerOperands[T]) list() []T {
	list := append(append([]T{o.x}, o.w...), o.b...)
	for _, p := range [...]*T{o.residual, o.gamma, o.beta} {
		if p != nil {
			list = append(list, *p)
		}
	}
	return list
}

// named returns the operands in a list of the op's inputs. Slices and pointers refer to the list.
func named[T any](op linear, list []T) (o layerOperands[T]) {
	take := func(n int) []T {
		taken := list[:n:n]
		list = list[n:]
		return taken
	}
	maybe := func(there bool) *T {
		if !there {
			return nil
		}
		return &take(1)[0]
	}
	o.x, o.w = take(1)[0], take(op.parts)
	if op.bias {
		o.b = take(op.parts)
	}
	o.residual, o.gamma, o.beta = maybe(op.residual), maybe(op.gamma), maybe(op.beta)
	return o
}

// Names of operands in errors, for one layer and for several.
var (
	oneLayer   = layerOperands[string]{x: "x", w: []string{"w"}, b: []string{"b"}}
	manyLayers = layerOperands[string]{x: "x", w: []string{"w[0]", "w[1]", "w[2]"}, b: []string{"b[0]", "b[1]", "b[2]"}}

	residualName, gammaName, betaName = "residual", "gamma", "beta"
)

// names returns the names of the operands in errors.
func (op linear) names() layerOperands[string] {
	o := manyLayers
	if op.parts == 1 {
		o = oneLayer
	}
	o.w, o.b = o.w[:op.parts], o.b[:op.parts*count(op.bias)]
	maybe := func(there bool, name *string) *string {
		if !there {
			return nil
		}
		return name
	}
	o.residual, o.gamma, o.beta = maybe(op.residual, &residualName), maybe(op.gamma, &gammaName), maybe(op.beta, &betaName)
	return o
}

func (op linear) arguments() []argument {
	names := op.names()
	args := append(alike(2, op.x, names.list()...), argument{name: "y", rank: op.rank(), dtype: op.x})
	in := named(op, args[:len(args)-1])
	for i := range in.w {
		in.w[i].dtype, in.w[i].weights, in.w[i].packed = operand.WeightType(op.formats()[i]), true, true
	}
	for i := range in.b {
		in.b[i].rank = 1
	}
	for _, p := range [...]*argument{in.gamma, in.beta} {
		if p != nil {
			p.rank = 1
		}
	}
	return args
}

// formats returns the formats of the weights.
func (op linear) formats() []weight.Format {
	return append([]weight.Format{op.w}, op.rest[:op.parts-1]...)
}

// rank returns the rank of the output.
func (op linear) rank() int {
	if op.joined {
		return 1
	}
	return 2
}

func (op linear) shape(list []tensor.Shape) (tensor.Shape, error) {
	name, in := op.title(), named(op, list)
	total := 0
	for i, w := range in.w {
		if w[1] != in.x[1] {
			return nil, errorf(name, errs.ErrShape, "x has shape %v and %s %v, want the same second axis", in.x, op.names().w[i], w)
		}
		total += in.x[0] * w[0]
	}
	out := tensor.Shape{in.x[0], in.w[0][0]}
	switch {
	case !op.gate:
	case op.parts == 1 && out[1]%2 != 0:
		return nil, errorf(name, errs.ErrShape, "w has shape %v, want an even number of rows, half of them for the gate", in.w[0])
	case op.parts == 1:
		out[1] /= 2
	case in.w[1][0] != out[1]:
		return nil, errorf(name, errs.ErrShape, "w[0], of the gate, has shape %v and w[1] %v, want the same shape", in.w[0], in.w[1])
	}
	wrong := func(what string, s, want tensor.Shape) error {
		return errorf(name, errs.ErrShape, "%s has shape %v, want %v for x of shape %v and w of %v", what, s, want, in.x, in.w[0])
	}
	names := op.names()
	for i, b := range in.b {
		if want := in.w[i][:1]; !slices.Equal(b, want) {
			return nil, wrong(names.b[i], b, want)
		}
	}
	if r := in.residual; r != nil && !slices.Equal(*r, out) {
		return nil, wrong(*names.residual, *r, out)
	}
	if p := in.gamma; p != nil && !slices.Equal(*p, in.x[1:]) {
		return nil, wrong(*names.gamma, *p, in.x[1:])
	}
	if p := in.beta; p != nil && !slices.Equal(*p, in.x[1:]) {
		return nil, wrong(*names.beta, *p, in.x[1:])
	}
	if op.joined {
		return tensor.Shape{total}, nil
	}
	return out, nil
}

func (op linear) String() string {
	s := fmt.Sprintf("Linear{x %v, w %v, bias %v, residual %v, activation %v", op.x, op.w, op.bias, op.residual, op.activation)
	if others := op.formats()[1:]; slices.ContainsFunc(others, func(f weight.Format) bool { return f != op.w }) {
		s += fmt.Sprintf(", then w %v", others)
	}
	if op.joined || op.gate {
		s += fmt.Sprintf(", layers %d, gate %v", op.parts, op.gate)
	}
	if op.mixed {
		s += ", mixed precision"
		if op.products != 0 {
			s += fmt.Sprintf(" of %v", op.products)
		}
	}
	if op.invariant {
		s += ", batch invariance"
	}
	if op.quantised {
		s += ", quantised rows"
	}
	if op.norm {
		s += fmt.Sprintf(", norm eps %v, gamma %v, beta %v", op.eps, op.gamma, op.beta)
	}
	if op.rms {
		s += fmt.Sprintf(", by the root mean square, 1+gamma %v", op.offset)
	}
	return s + "}"
}

func (op linear) onHost() string {
	if op.invariant {
		return optionInvariant
	}
	return ""
}

func (op linear) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if op.x == tensor.Float64 {
		return linearForward[float64](op, in, shape)
	}
	return linearForward[float32](op, in, shape)
}

// operands has the inputs of linear layers in host memory.
type operands[F float] struct {
	x, gamma, beta []F
	parts          []cpulinear.Operands[F]
}

// readLinear reads the inputs for the CPU engine. Outputs are not set.
func readLinear[F float](op linear, list []G.Value) (o operands[F], err error) {
	title, in, names := op.title(), named(op, list), op.names()
	read := func(to *[]F, v *G.Value, name *string) {
		if v != nil && err == nil {
			*to, err = elements[F](title, *name, *v, (*v).Shape())
		}
	}
	read(&o.x, &in.x, &names.x)
	o.parts = make([]cpulinear.Operands[F], op.parts)
	for i := range o.parts {
		p := &o.parts[i]
		s := in.w[i].Shape()
		p.Rows, p.In, p.Out, p.Activation, p.X = in.x.Shape()[0], s[1], s[0], op.activation, o.x
		p.RoundX, p.AnyRows, p.QuantiseX = op.mixed, op.invariant, op.quantised
		if err == nil {
			p.W, err = weights(title, names.w[i], in.w[i])
		}
		if op.bias {
			read(&p.Bias, &in.b[i], &names.b[i])
		}
	}
	if err == nil && op.gate && op.parts == 1 {
		o.parts = halves(o.parts[0])
	}
	read(&o.parts[0].Residual, in.residual, names.residual)
	read(&o.gamma, in.gamma, names.gamma)
	read(&o.beta, in.beta, names.beta)
	return o, err
}

// weights reads a weight in host memory.
func weights(title, name string, v G.Value) (weight.Matrix, error) {
	w, err := operand.WeightOf(prefix+title, name, v)
	if err != nil {
		return weight.Matrix{}, err
	}
	return w.Host(prefix+title, name)
}

// linearForward runs the layers into one new tensor.
func linearForward[F float](op linear, in []G.Value, shape tensor.Shape) (G.Value, error) {
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
	t, y := output[F](shape)
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

// runLinears computes several layers.
func runLinears[F float](all []cpulinear.Operands[F]) error {
	return engineError("Linear", cpulinear.RunAll(cpu.Default(), all))
}

// linearPart is the rule of the output of one layer of [Linears]: a part of the joined vector, without a copy. No other node reads
// the vector.
type linearPart struct {
	before, width, all int // columns: of the layers before, of this layer, and of all layers
	dtype              tensor.Dtype
}

func (r linearPart) title() string { return "Linears" }
func (r linearPart) String() string {
	return fmt.Sprintf("LinearPart{columns [%d, %d) of %d, %v}", r.before, r.before+r.width, r.all, r.dtype)
}

func (r linearPart) arguments() []argument {
	return []argument{{name: "the layers' output", rank: 1, dtype: r.dtype}, {name: "y", rank: 2, dtype: r.dtype}}
}

// shape follows the vector: a run may have fewer rows than the graph.
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
		return partOf[float64](r, in[0], from, shape)
	}
	return partOf[float32](r, in[0], from, shape)
}

// gradient is dy in the part, and 0 elsewhere.
func (r linearPart) gradient(_ int, in []G.Value, dy G.Value) (G.Value, error) {
	from := r.from(in[0].Shape())
	if r.dtype == tensor.Float64 {
		return amongZeros[float64](r.title(), in[0].Shape(), from, dy)
	}
	return amongZeros[float32](r.title(), in[0].Shape(), from, dy)
}

// partOf returns elements of the input of a rule, from one element on, as a tensor without a copy.
func partOf[F float](r signature, v G.Value, from int, shape tensor.Shape) (G.Value, error) {
	all, err := elements[F](r.title(), r.arguments()[0].name, v, v.Shape())
	if err != nil {
		return nil, err
	}
	to := from + shape.TotalSize()
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(all[from:to:to])), nil
}

var (
	_ rule     = linear{}
	_ launched = linear{}
	_ placed   = linear{}
	_ composed = linear{}
)
