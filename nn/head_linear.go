package nn

import (
	"fmt"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/attn"
	cpulinear "gorgonia.org/leanattention/internal/cpu/linear"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/weight"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// HeadLinear is a linear layer by heads: each head has a matrix of its own. For head h
//
//	y[:, h] = x[:, h] w[h]^T
//
// The contract:
//
//   - Shapes: x (rows, heads*in), w (heads*out, in), y (rows, heads*out). Head h has rows [h*out, (h+1)*out) of w.
//   - Options: [WithMixedPrecision], [WithBatchInvariance].
//   - Types and accuracy: those of [Linear]. On GPUs: whole weights, or weights sharded on axis 0 if heads divide evenly; then y is sharded on
//     axis 1, and x may be.
//   - Launches on a GPU: one for up to 256 rows, weights of 16 bits and heads in multiples of 4 elements; otherwise one for each head, and two.
//   - Gradients: of both, in host memory, on both of Gorgonia's machines, if w has the type of x; otherwise ErrUnsupported. No
//     second derivative.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil nodes, other graphs), ErrOption, ErrUnsupported.
//
// [MLA] has such layers.
func HeadLinear(x, w *G.Node, heads int, opts ...Option) (y *G.Node, err error) {
	return newHeadLinear(headLinear{name: "HeadLinear", heads: heads}, x, w, opts)
}

// newHeadLinear makes a node of a rule whose other fields are set.
func newHeadLinear(r headLinear, x, w *G.Node, opts []Option) (y *G.Node, err error) {
	defer errs.RecoverTo(prefix+r.name, &err)
	if x == nil || w == nil {
		return nil, errorf(r.name, errs.ErrGraph, "x or w is nil")
	}
	if r.w, err = weightFormat(r.name, x, w); err != nil {
		return nil, err
	}
	for _, o := range opts {
		var to *bool
		switch o.name {
		case "":
			continue
		case optionMixed:
			if to = &r.mixed; len(o.products) > 0 {
				return nil, errorf(r.name, errs.ErrUnsupported, "option %s(%v), want the option without a type", optionMixed, o.products[0])
			}
		case optionInvariant:
			to = &r.invariant
		default:
			return nil, errorf(r.name, errs.ErrUnsupported, "option %s, want %s, %s or none", o.name, optionMixed, optionInvariant)
		}
		if *to {
			return nil, errorf(r.name, errs.ErrOption, "option %s is given twice", o.name)
		}
		*to = true
	}
	r.x = x.Dtype()
	return newNode(r, x, w)
}

// headLinear is the rule of HeadLinear, and of the keys of [MLA.Expanded].
//
// With keys, the layers are transposed, and all heads have the same x of latent vectors with elements behind:
//
//	y[:, h] = [x[:, :latent] w[h], x[:, latent:]]
//
// Then x is (rows, latent+rest), w (heads*latent, in), and y (rows, heads*(in+rest)).
type headLinear struct {
	name             string // in errors
	x                tensor.Dtype
	w                weight.Format
	heads            int
	rest             bool // the elements of a head of x from in on stand unchanged behind those of y
	keys             bool
	mixed, invariant bool
}

func (r headLinear) title() string { return r.name }

func (r headLinear) String() string {
	return fmt.Sprintf("HeadLinear{x %v, w %v, heads %d, rest %v, keys %v, mixed precision %v, batch invariance %v}", r.x, r.w, r.heads, r.rest, r.keys, r.mixed, r.invariant)
}

func (r headLinear) arguments() []argument {
	args := alike(2, r.x, "x", "w", "y")
	args[1].dtype, args[1].weights = operand.WeightType(r.w), true
	return args
}

// headSizes are the sizes of a linear layer by heads. Head h of a row of x begins at xHead*h, and that of y at yHead*h.
type headSizes struct {
	rows, in, out, rest      int
	xRow, xHead, yRow, yHead int
}

// sizes returns the sizes of a layer. With keys, in is that of the layer: the elements of a latent vector.
func (r headLinear) sizes(shapes []tensor.Shape) (s headSizes, err error) {
	x, w := shapes[0], shapes[1]
	if r.heads < 1 || w[0]%r.heads != 0 {
		return s, errorf(r.name, errs.ErrShape, "w has shape %v, want a number of rows that is a multiple of %d heads", w, r.heads)
	}
	s = headSizes{rows: x[0], in: w[1], out: w[0] / r.heads, xRow: x[1]}
	each := x[1] / r.heads // elements of a head of x
	if s.xHead = each; r.keys {
		s.in, s.out, each, s.xHead = s.out, s.in, x[1], 0
	}
	if each < s.in || !r.rest && each != s.in || !r.keys && x[1]%r.heads != 0 {
		return s, errorf(r.name, errs.ErrShape, "x has shape %v, want %d elements for each of %d heads with w of shape %v", x, s.in, r.heads, w)
	}
	s.rest = each - s.in
	s.yHead = s.out + s.rest
	s.yRow = r.heads * s.yHead
	return s, nil
}

func (r headLinear) shape(in []tensor.Shape) (tensor.Shape, error) {
	s, err := r.sizes(in)
	if err != nil {
		return nil, err
	}
	return tensor.Shape{s.rows, s.yRow}, nil
}

func (r headLinear) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	if r.x == tensor.Float64 {
		return headsForward[float64](r, in, shape)
	}
	return headsForward[float32](r, in, shape)
}

func headsForward[F float](r headLinear, in []G.Value, shape tensor.Shape) (G.Value, error) {
	s, err := r.sizes(shapesOf(in))
	if err != nil {
		return nil, err
	}
	x, err := elements[F](r.name, "x", in[0], in[0].Shape())
	if err != nil {
		return nil, err
	}
	w, err := weights(r.name, "w", in[1])
	if err != nil {
		return nil, err
	}
	if r.keys {
		if w, err = r.transposed(w, &s); err != nil {
			return nil, err
		}
	}
	t, y := output[F](shape)
	if err := runLinears(layersOf(r, &s, x, y, w)); err != nil {
		return nil, err
	}
	if s.rest > 0 {
		eachRow(s.rows, s.yRow, func(i int) {
			for h := range r.heads {
				copy(y[i*s.yRow+h*s.yHead+s.out:][:s.rest], x[i*s.xRow+h*s.xHead+s.in:])
			}
		})
	}
	return t, nil
}

// layersOf returns the layer of each head.
func layersOf[F float](r headLinear, s *headSizes, x, y []F, w weight.Matrix) []cpulinear.Operands[F] {
	all := make([]cpulinear.Operands[F], r.heads)
	for h := range all {
		all[h] = cpulinear.Operands[F]{
			Rows: s.rows, In: s.in, Out: s.out, X: x[h*s.xHead:], XRow: s.xRow, Y: y[h*s.yHead:], YRow: s.yRow,
			W: w.Rows(h*s.out, s.out, s.in), RoundX: r.mixed, AnyRows: r.invariant,
		}
	}
	return all
}

func (r headLinear) onHost() string { return linear{invariant: r.invariant}.onHost() }

// transposed returns the transposed matrices of heads, in the format of w.
func (r headLinear) transposed(w weight.Matrix, s *headSizes) (t weight.Matrix, err error) {
	t = weight.Matrix{Format: w.Format, Len: w.Len}
	if w.Scales == nil {
		switch w.Format.Bytes() {
		case 2:
			t.Ptr = transposedHeads[uint16](&w, r.heads, s.in, s.out)
		case 4:
			t.Ptr = transposedHeads[uint32](&w, r.heads, s.in, s.out)
		case 8:
			t.Ptr = transposedHeads[uint64](&w, r.heads, s.in, s.out)
		}
	}
	if t.Ptr == nil {
		return t, errorf(r.name, errs.ErrUnsupported, "w is of %v, and is transposed: want float32, float64, float16 or bfloat16", w.Format)
	}
	return t, nil
}

func transposedHeads[T any](w *weight.Matrix, heads, rows, columns int) unsafe.Pointer {
	x, y := unsafe.Slice((*T)(w.Ptr), w.Len), dense.Make[T](w.Len)
	n := rows * columns
	eachRow(heads, n, func(h int) { transpose(y[h*n:][:n], x[h*n:][:n], 0, rows, rows, columns, columns) })
	return unsafe.Pointer(unsafe.SliceData(y))
}

// A gradient needs weights of the type of x.
func (r headLinear) graphGradients(in []*G.Node, dy *G.Node) ([]*G.Node, error) {
	return headGradients(inGraph, r, in, dy)
}

func (r headLinear) valueGradients(in []G.Value, dy G.Value) ([]G.Value, error) {
	return headGradients(atOnce, r, in, dy)
}

func headGradients[T any](do step[T], r headLinear, in []T, dy T) ([]T, error) {
	if operand.WeightType(r.w) != r.x {
		return nil, errorf(r.name, errs.ErrUnsupported, "gradient with w of %v and x of %v, want one type for both, float32 or float64", r.w, r.x)
	}
	return gradients(do, r, in, dy)
}

// gradient is, with the layers' matrices W, dx[:, h] = dy[:, h] W[h] and dW[h] = dy[:, h]^T x[:, h]. Heads with the same x add up.
func (r headLinear) gradient(i int, in []G.Value, dy G.Value) (G.Value, error) {
	if r.x == tensor.Float64 {
		return headsBackward[float64](r, i, in, dy)
	}
	return headsBackward[float32](r, i, in, dy)
}

func headsBackward[F float](r headLinear, of int, in []G.Value, grad G.Value) (G.Value, error) {
	s, err := r.sizes(shapesOf(in))
	if err != nil {
		return nil, err
	}
	dy, err := elements[F](r.name, "the output's gradient", grad, grad.Shape())
	if err != nil {
		return nil, err
	}
	t, d := output[F](in[of].Shape())
	if of == 1 {
		x, err := elements[F](r.name, "x", in[0], in[0].Shape())
		if err != nil {
			return nil, err
		}
		n := s.in * s.out
		for h := range r.heads {
			a, b := transposed(dy[h*s.yHead:], s.rows, s.out, s.yRow), transposed(x[h*s.xHead:], s.rows, s.in, s.xRow)
			out, in := s.out, s.in
			if r.keys { // w has the transposed matrices
				a, b, out, in = b, a, in, out
			}
			if err := multiply(d[h*n:][:n], a, b, nil, out, in, s.rows); err != nil {
				return nil, err
			}
		}
		return t, nil
	}
	w, err := weights(r.name, "w", in[1])
	if err != nil {
		return nil, err
	}
	if !r.keys {
		back := s
		back.in, back.out = s.out, s.in
		if w, err = r.transposed(w, &back); err != nil {
			return nil, err
		}
	}
	clear(d)
	part := dense.Make[F](s.rows * s.in)
	for h := range r.heads {
		g := dy[h*s.yHead:]
		err := runLinear(&cpulinear.Operands[F]{Rows: s.rows, In: s.out, Out: s.in, X: g, XRow: s.yRow, Y: part, W: w.Rows(h*s.in, s.in, s.out)})
		if err != nil {
			return nil, err
		}
		for i := range s.rows {
			to := d[i*s.xRow+h*s.xHead:]
			for j, v := range part[i*s.in:][:s.in] {
				to[j] += v
			}
			for j, v := range g[i*s.yRow+s.out:][:s.rest] {
				to[s.in+j] += v
			}
		}
	}
	return t, nil
}

// headsOnGPU says where the layers of heads have their operands on a GPU. Kernels of linear layers take packed rows that begin at
// multiples of 16 bytes, so x and y of several rows are copied to scratch memory and back, head by head.
type headsOnGPU struct {
	headSizes
	heads        int
	together     bool // in one launch, in place
	packX, packY bool // a copy of x or y has the rows of each head together
	xEach, yEach int  // elements from a head to the next
	layer        int  // elements of scratch memory for a layer
}

func (r headLinear) onGPU(d *layers.Engine, shapes []tensor.Shape) (g headsOnGPU, err error) {
	g.heads = r.heads
	if g.headSizes, err = r.sizes(shapes); err != nil {
		return g, err
	}
	if g.together = g.rows <= layers.MostHeadRows && aligned(g.in) == g.in && r.w.Bytes() == 2; g.together {
		return g, nil
	}
	g.xEach, g.yEach = g.xHead, g.yHead
	if g.packX = g.rows > 1 || aligned(g.xHead) != g.xHead; g.packX {
		g.xEach = aligned(g.rows * g.in)
	}
	if g.packY = g.rows > 1 || aligned(g.yHead) != g.yHead; g.packY {
		g.yEach = aligned(g.rows * g.out)
	}
	g.layer, err = d.Scratch(r.layerOnGPU(&g))
	g.layer = aligned(g.layer)
	return g, err
}

// scratch returns the sizes of the copies of x and y.
func (g *headsOnGPU) scratch() (x, y int) {
	if g.packX {
		x = g.heads * g.xEach
	}
	if g.packY {
		y = g.heads * g.yEach
	}
	return x, y
}

// all returns the elements of all scratch memory.
func (g *headsOnGPU) all() int {
	x, y := g.scratch()
	return g.layer + x + y
}

// layerOnGPU returns the layer of a head, without memory.
func (r headLinear) layerOnGPU(g *headsOnGPU) *layers.Linear {
	stored, _ := operand.StorageType(operand.WeightType(r.w))
	return &layers.Linear{Rows: g.rows, In: g.in, RoundX: r.mixed, Parts: []layers.LinearPart{{Out: g.out, W: gpu.Memory{DType: stored}}}}
}

func (r headLinear) place(c *ongpu.Call, shapes []tensor.Shape, shape tensor.Shape) {
	c.Scratch = func(d *layers.Engine) (int, error) {
		g, err := r.onGPU(d, shapes)
		return g.all(), err
	}
	c.PerGPU = func(in []ongpu.Layout) (*ongpu.PerGPU, error) { return r.byHeads(in, shapes, shape), nil }
}

// byHeads returns the work of layers whose weights are sharded by heads; nil for another layout. An x that is not sharded by heads is
// replicated and read in place.
func (r headLinear) byHeads(in []ongpu.Layout, shapes []tensor.Shape, out tensor.Shape) *ongpu.PerGPU {
	x, w := in[0], in[1]
	heads, even := w.Evenly(r.heads)
	if !even || !w.Sharded || w.Axis != 0 || r.keys {
		return nil
	}
	whole := !x.Sharded || x.Axis != 1
	of := r
	of.heads = heads
	mine := []tensor.Shape{{shapes[0][0], shapes[0][1] / w.Members}, {shapes[1][0] / w.Members, shapes[1][1]}}
	a := &ongpu.PerGPU{Layout: ongpu.Layout{Sharded: true, Axis: 1}, Shape: tensor.Shape{out[0], out[1] / w.Members}, Replicate: []bool{whole, false}}
	on := func(d *layers.Engine) (g headsOnGPU, err error) {
		if g, err = of.onGPU(d, mine); whole {
			g.xRow = shapes[0][1]
		}
		return g, err
	}
	a.Scratch = func(_ int, d *layers.Engine) (int, error) {
		g, err := on(d)
		return g.all(), err
	}
	a.Queue = func(member int, work *ongpu.Work) error {
		g, err := on(work.Engine)
		if err != nil {
			return err
		}
		if whole {
			work.In[0].Memory = ongpu.From(work.In[0].Memory, member*mine[0][1])
		}
		return of.queue(work, &g)
	}
	return a
}

func (r headLinear) launch(w *ongpu.Work, shapes []tensor.Shape, _ tensor.Shape) error {
	if r.keys {
		return gpu.Errorf("linear layers by heads", attn.ErrUnsupported, "there are no kernels for the keys of all heads: use MLA.Absorbed, or keep all inputs in host memory")
	}
	g, err := r.onGPU(w.Engine, shapes)
	if err != nil {
		return err
	}
	return r.queue(w, &g)
}

// queue queues the layers.
func (r headLinear) queue(w *ongpu.Work, g *headsOnGPU) error {
	if g.together {
		return w.HeadLinear(&layers.HeadLinear{
			Rows: g.rows, Heads: g.heads, In: g.in, Out: g.out, Rest: g.rest, XRow: g.xRow, XHead: g.xHead, YRow: g.yRow, YHead: g.yHead,
			X: w.In[0].Memory, W: w.In[1].Memory, Y: w.Out,
		})
	}
	xs, ys := g.scratch()
	x, y, layer, weights := w.In[0].Memory, w.Out, part(w.Scratch, xs+ys, g.layer), w.In[1].Memory
	if g.packX {
		x = part(w.Scratch, 0, xs)
		m := attn.Move{Dims: [3]int{1, r.heads, g.rows}, N: g.in, From: attn.Lattice{Steps: [3]int{0, g.xHead, g.xRow}}, To: attn.Lattice{Steps: [3]int{0, g.xEach, g.in}}}
		if err := w.Move(&layers.Move{Move: m, X: w.In[0].Memory, Y: x}); err != nil {
			return err
		}
	}
	if g.packY {
		y = part(w.Scratch, xs, ys)
	}
	for h := range r.heads {
		o := r.layerOnGPU(g)
		o.X, o.Scratch, o.Early = part(x, h*g.xEach, g.rows*g.in), layer, w.In[1].Fixed
		o.Parts[0].W, o.Parts[0].Y = part(weights, h*g.out*g.in, g.out*g.in), part(y, h*g.yEach, g.rows*g.out)
		// Not w.Linear: a part of x is no output of a megakernel's layer.
		if err := w.Do(func(s *cuda.Stream) error { return w.Engine.Linear(s, o) }); err != nil {
			return err
		}
	}
	if g.packY {
		m := attn.Move{Dims: [3]int{1, r.heads, g.rows}, N: g.out, From: attn.Lattice{Steps: [3]int{0, g.yEach, g.out}}, To: attn.Lattice{Steps: [3]int{0, g.yHead, g.yRow}}}
		if err := w.Move(&layers.Move{Move: m, X: y, Y: w.Out}); err != nil {
			return err
		}
	}
	if g.rest == 0 {
		return nil
	}
	m := attn.Move{Dims: [3]int{1, r.heads, g.rows}, N: g.rest, From: attn.Lattice{At: g.in, Steps: [3]int{0, g.xHead, g.xRow}}, To: attn.Lattice{At: g.out, Steps: [3]int{0, g.yHead, g.yRow}}}
	return w.Move(&layers.Move{Move: m, X: w.In[0].Memory, Y: w.Out})
}

// part returns n elements of m from element `from` on.
func part(m gpu.Memory, from, n int) gpu.Memory {
	m.Offset += int64(from * m.DType.Size())
	m.Len = n
	return m
}

var (
	_ rule      = headLinear{}
	_ launched  = headLinear{}
	_ placed    = headLinear{}
	_ derivable = headLinear{}
	_ composed  = headLinear{}
)
