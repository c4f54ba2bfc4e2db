package decoder

import (
	"fmt"
	"iter"
	"math"
	"slices"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/ranks"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Network is the graph of a decoder, as an [Engine] runs it. A Network has no state: one Network serves any number of
// graphs and engines.
type Network interface {
	// Sizes returns the sizes that an engine needs.
	Sizes() Sizes

	// Weights yields every weight of the network once.
	Weights() iter.Seq[Weight]

	// Hidden adds the nodes from token ids, a vector with an id for each row, to the hidden states of the rows, a matrix.
	Hidden(b *Builder, tokens *G.Node) *G.Node

	// Logits adds the nodes from hidden states to the logits of the same rows, a matrix with [Sizes].Vocab columns.
	Logits(b *Builder, hidden *G.Node) *G.Node
}

// Sizes are the sizes of a [Network].
type Sizes struct {
	Vocab   int // tokens of the vocabulary
	Context int // most tokens of a text; 0: any number
	Layers  int // attention layers
	KVHeads int // key and value heads of each layer
	HeadDim int // elements of a key, and of a value

	// Latent, if not 0, says that values are the first Latent elements of their keys, as in multi-head latent attention (nn.MLA).
	// Builder.Attend then takes no v. Devices: CPUs, and GPUs for multiples of 8, up to 512 elements of 576.
	Latent int

	// Windows has the number of keys that each layer sees; 0: all keys. nil: all layers see all keys.
	Windows []int

	// LogitCap bounds the logits: x becomes LogitCap * tanh(x / LogitCap). 0: no bound. The engine applies LogitCap.
	LogitCap float64
}

// window returns the largest window of all layers; 0: some layer sees all keys.
func (s *Sizes) window() int {
	if len(s.Windows) == 0 || slices.Min(s.Windows) == 0 {
		return 0
	}
	return slices.Max(s.Windows)
}

// maxLayers bounds the memory that a file's number of layers can cause.
const maxLayers = 1 << 12

// check returns the error of invalid sizes.
func (s *Sizes) check() error {
	for _, x := range []struct {
		name        string
		n, min, max int
	}{
		{"Vocab", s.Vocab, 1, math.MaxInt32}, {"Context", s.Context, 0, math.MaxInt32}, {"Layers", s.Layers, 1, maxLayers},
		{"KVHeads", s.KVHeads, 1, math.MaxInt32}, {"HeadDim", s.HeadDim, 1, math.MaxInt32}, {"Latent", s.Latent, 0, s.HeadDim},
	} {
		if x.n < x.min || x.n > x.max {
			return fmt.Errorf("decoder: Sizes.%s is %d, not in [%d, %d]: %w", x.name, x.n, x.min, x.max, ErrConfig)
		}
	}
	if s.Windows != nil && len(s.Windows) != s.Layers {
		return fmt.Errorf("decoder: Sizes.Windows has %d of %d layers: %w", len(s.Windows), s.Layers, ErrConfig)
	}
	for i, n := range s.Windows {
		if n < 0 {
			return fmt.Errorf("decoder: Sizes.Windows[%d] is %d: %w", i, n, ErrConfig)
		}
	}
	if !(s.LogitCap >= 0) || math.IsInf(s.LogitCap, 1) {
		return fmt.Errorf("decoder: Sizes.LogitCap is %v, neither 0 nor a finite number above 0: %w", s.LogitCap, ErrConfig)
	}
	return nil
}

// Weight is a weight of a [Network].
type Weight struct {
	Name  string // the name in [Builder.Weight]
	Shape []int  // a matrix of a linear layer is (out, in)

	// From is the tensor of the file that has the weight: rows Row to Row+Shape[0] of a tensor with From.Rows rows. The zero
	// value is the whole tensor with the same Name.
	From Rows

	Split Split // among several GPUs, and among ranks

	up     *kvUp // nil: consecutive rows
	latent bool  // a weight of the heads of latent attention
}

// Split says how several GPUs, and several processes, share a weight, as in Megatron-LM (arXiv:1909.08053, section 3). A layer
// whose weights are split by rows computes some output features on each GPU. The layer that follows has its weight split by
// columns, and [Builder.Partial] adds what the GPUs compute. A network without a weight that is split by columns has its matrices
// split by rows, and the first GPU has everything else.
type Split struct {
	Axis Axis

	// Parts is the number of equal parts of the axis that are not split further, such as heads. 0: GPUs split the weight
	// anywhere, and each process has the whole weight.
	Parts int
}

// Axis is an axis along which a weight is split.
type Axis uint8

const (
	Whole     Axis = iota // every GPU and every process has the whole weight
	ByRows                // by output features
	ByColumns             // by input features
)

// Rows are consecutive rows of a tensor.
type Rows struct {
	Name string // of the tensor
	Row  int    // the first row
	Rows int    // rows of the whole tensor
}

// tensor returns the name and shape of the file's tensor that has the weight.
func (w *Weight) tensor() (name string, shape []int) {
	if w.From.Name == "" {
		return w.Name, w.Shape
	}
	shape = slices.Clone(w.Shape)
	shape[0] = w.From.Rows
	if w.up != nil {
		shape[1] = w.up.latent
	}
	return w.From.Name, shape
}

// Builder adds the nodes of a [Network] to a graph. The first error ends the building: all later calls return nil, so
// that a Network need not check errors.
type Builder struct {
	graph     *G.ExprGraph
	step      *la.Step
	weights   map[string]G.Value
	inputs    map[string]*G.Node
	positions func(offset int) (*G.Node, error)
	linear    []nn.Option // of every linear layer
	quantises bool        // see Options.QuantisedRows
	quantised int         // layers that do
	ranks     *ranks.Comm // nil: one process
	attention []la.Option // of every attention
	windows   []int
	prompts   bool                                                          // the graph is for texts without cached tokens
	slice     func(g *G.ExprGraph, layer int, m *nn.MLA) ([]*nn.MLA, error) // see Options.TPLA; nil: latent vectors are whole
	err       error
}

// Err returns the first error.
func (b *Builder) Err() error { return b.err }

// Node adds what f adds, unless there was an error. Gorgonia's functions panic on some mistakes. Node returns such a panic
// as the error.
func (b *Builder) Node(f func() (*G.Node, error)) (n *G.Node) {
	if b.err != nil {
		return nil
	}
	defer func() {
		if r := recover(); r != nil {
			n, b.err = nil, fmt.Errorf("decoder: building the graph: %v", r)
		}
	}()
	n, b.err = f()
	return n
}

// Nodes is [Builder.Node] for n nodes.
func (b *Builder) Nodes(n int, f func() ([]*G.Node, error)) []*G.Node {
	nodes := make([]*G.Node, n)
	b.Node(func() (*G.Node, error) {
		all, err := f()
		copy(nodes, all)
		return nil, err
	})
	return nodes
}

// Weight returns the input with a weight's value. An unknown name is an error.
func (b *Builder) Weight(name string) *G.Node {
	return b.Node(func() (*G.Node, error) {
		if n := b.inputs[name]; n != nil {
			return n, nil
		}
		v, ok := b.weights[name]
		if !ok {
			return nil, fmt.Errorf("decoder: the network has no weight %q: %w", name, ErrConfig)
		}
		b.inputs[name] = input(b.graph, name, v)
		return b.inputs[name], nil
	})
}

// Positions returns the position of each row in its text, counted from offset, for tables of positions.
func (b *Builder) Positions(offset int) *G.Node {
	return b.Node(func() (*G.Node, error) { return b.positions(offset) })
}

// Linear returns the options of a linear layer: the given options, and those that [Options] asks for.
func (b *Builder) Linear(opts ...nn.Option) []nn.Option { return slices.Concat(opts, b.linear) }

// linearOf returns the options of linear layers with weights ws.
func (b *Builder) linearOf(ws []*G.Node, opts ...nn.Option) []nn.Option {
	all := b.Linear(opts...)
	if !b.quantises || slices.ContainsFunc(ws, func(w *G.Node) bool { return w == nil || w.Dtype() != tensor.Int8 && w.Dtype() != la.E4M3 }) {
		return all
	}
	b.quantised++
	return append(all, nn.WithQuantisedRows())
}

// Partial returns a linear layer whose weight is split by columns: the sum over all GPUs and all processes. bias and
// residual may be nil, and are added once. The options are those of nn.Linear.
func (b *Builder) Partial(x, w, bias, residual *G.Node, opts ...nn.Option) *G.Node {
	if b.ranks != nil && b.ranks.World().Rank > 0 {
		bias, residual = nil, nil
	}
	if residual != nil {
		opts = append(slices.Clone(opts), nn.WithResidual(residual))
	}
	y := b.Node(func() (*G.Node, error) { return nn.Linear(x, w, bias, b.linearOf([]*G.Node{w}, opts...)...) })
	if b.ranks != nil {
		y = b.Node(func() (*G.Node, error) { return nn.AllReduce(y, b.ranks) })
	}
	return y
}

// same returns a value that the first process has computed: GPUs of other kinds may have other bits.
func (b *Builder) same(x *G.Node) *G.Node {
	if b.ranks == nil {
		return x
	}
	return b.Node(func() (*G.Node, error) { return nn.Broadcast(x, b.ranks, 0) })
}

// Attend returns the attention of the queries of a layer, after the keys and values of the rows were appended to the
// layer's cache. The options are those of leanattention.CachedAttention. Attend adds the causal mask, the window of
// [Sizes].Windows, and the options that [Options] asks for.
func (b *Builder) Attend(layer int, q, k, v *G.Node, opts ...la.Option) *G.Node {
	return b.Node(func() (*G.Node, error) {
		return la.CachedAttention(q, k, v, b.step.Layer(layer), b.attends(layer, opts)...)
	})
}

// attends returns the options of the attention of a layer: the given options, and those that all networks have.
func (b *Builder) attends(layer int, opts []la.Option) []la.Option {
	opts = slices.Concat(opts, b.attention)
	if b.windows != nil && b.windows[layer] > 0 {
		opts = append(opts, la.WithWindow(b.windows[layer]))
	}
	return opts
}

// MLA returns the multi-head latent attention m of the rows of x, for a layer of a network with [Sizes].Latent. options are those of the
// attention, and opts those of m: see nn.MLA. MLA adds what [Builder.Attend] and [Builder.Linear] add.
//
// MLA chooses the form of m. Steps of 64 rows and more, none of whose texts has cached tokens, make the keys and values of all heads.
// Other steps, and all steps on GPUs or with [Options].BatchInvariant, read latent vectors.
func (b *Builder) MLA(layer int, m *nn.MLA, x *G.Node, options []la.Option, opts ...nn.Option) *G.Node {
	return b.Node(func() (*G.Node, error) {
		if b.slice != nil {
			return b.sliced(layer, m, x, b.attends(layer, options), b.Linear(opts...))
		}
		if b.prompts {
			return m.Expanded(x, func(q, k, v, latents *G.Node) (*G.Node, error) {
				return la.PromptAttention(q, k, v, latents, m.Heads, b.step.Layer(layer), b.attends(layer, options)...)
			}, b.Linear(opts...)...)
		}
		return m.Absorbed(x, func(q, k *G.Node) (*G.Node, error) {
			return la.CachedAttention(q, k, nil, b.step.Layer(layer), b.attends(layer, options)...)
		}, b.Linear(opts...)...)
	})
}

// input makes an input node with a value. The name distinguishes inputs of one shape.
func input(g *G.ExprGraph, name string, v G.Value) *G.Node {
	return G.NewTensor(g, v.(interface{ Dtype() tensor.Dtype }).Dtype(), len(v.Shape()), G.WithShape(v.Shape()...), G.WithName(name), G.WithValue(v))
}
