package nn

import (
	"hash"
	"math"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"

	"github.com/chewxy/hm"
	"gorgonia.org/leanattention/internal/choose"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/decoder"
	"gorgonia.org/leanattention/internal/graph"
	"gorgonia.org/leanattention/internal/ongpu"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Choice says how a token is chosen from a row of logits x:
//
//	p[i] = exp(x[i]/Temperature) / sum over j in K of exp(x[j]/Temperature)
//
// for each token i in K, and p[i] = 0 for the other tokens. K has all tokens; then the TopK most likely of them; then the smallest
// set of the most likely ones whose probabilities, among those that TopK left, sum to TopP or more. Of equally likely tokens, the
// lower id is first. The result is the first token for which the sum of probabilities, in the order of ids, exceeds a random
// number u in [0, 1).
type Choice struct {
	// Temperature 0 is greedy: the most likely token, and of equals the lowest
	// id. A negative one, or NaN, is for an unassigned row: its token is -1. With +Inf
	// all tokens of K have the same probability, but for those with a logit of -Inf.
	Temperature float64
	TopK        int     // 0 or less: all tokens
	TopP        float64 // 0 or less, 1 or more, and NaN: all tokens
}

// Choose returns the token for a row of logits and a random number u in [0, 1). The token is -1 if a logit is NaN or +Inf, or if all
// logits are -Inf.
func (c Choice) Choose(logits []float32, u float64) int {
	m := chooseMemory.Get().(*choose.Memory)
	defer chooseMemory.Put(m)
	return m.Token(logits, c.Temperature, c.TopK, c.TopP, u)
}

var chooseMemory = sync.Pool{New: func() any { return new(choose.Memory) }}

// Sample returns the token chosen from each row of logits, as [Choice.Choose] does.
//
//   - logits: (rows, n), float32. choices: a value from [Choices]. randoms: a value from [Randoms]. Both have as many rows, are data,
//     and may change from run to run. The result: (rows), int32; -1 where no token can be chosen.
//   - On a GPU: rows of at most 2^19 elements; probabilities are right to 1e-9 of themselves. Settings out of range are no error
//     there, since the host does not read them.
//   - Several GPUs choose the same tokens if logits are sharded on axis 1, and choices and randoms are replicated.
//   - Gradients: ErrUnsupported.
//   - Errors: ErrShape, ErrDType, ErrGraph (nil inputs, other graphs).
func Sample(logits, choices, randoms *G.Node) (y *G.Node, err error) {
	const name = "Sample"
	defer errs.RecoverTo(prefix+name, &err)
	op := sample{inference: "Sample", gpu: new(ongpu.Node)}
	shapes := make([]tensor.Shape, len(sampleInputs))
	for i, n := range []*G.Node{logits, choices, randoms} {
		switch {
		case n == nil:
			return nil, errorf(name, errs.ErrGraph, "%s is nil", sampleInputs[i])
		case n.Graph() != logits.Graph():
			return nil, errorf(name, errs.ErrGraph, "%s and logits are in different graphs", sampleInputs[i])
		case n.Dtype() != sampleType(i):
			return nil, errorf(name, errs.ErrDType, "%s is of %v, want %v", sampleInputs[i], n.Dtype(), sampleType(i))
		}
		shapes[i] = n.Shape()
	}
	if _, err := op.shape(shapes); err != nil {
		return nil, err
	}
	return ongpu.Apply(prefix+name, op, logits, choices, randoms)
}

const (
	choiceWords = int(unsafe.Sizeof(decoder.Setting{}) / 4) // int32 that a row's choice has
	randomWords = 2
)

// Choices returns choices of rows as a value for [Sample]: int32 of shape (rows, 6). The numbers have no meaning by themselves.
func Choices(c []Choice) *tensor.Dense {
	settings := make([]decoder.Setting, len(c))
	for i, x := range c {
		// The kernels divide by the temperature, and know no infinite one.
		s := decoder.Setting{Temperature: min(x.Temperature, math.MaxFloat64), TopP: x.TopP, TopK: int32(min(max(x.TopK, 0), math.MaxInt32))}
		if !(x.TopP > 0) { // the kernels would take it for the smallest number there is
			s.TopP = 1
		}
		settings[i] = s
	}
	return words(settings, len(c), choiceWords)
}

// Randoms returns random numbers in [0, 1), one for each row, as a value for [Sample]: int32 of shape (rows, 2). The numbers have no
// meaning by themselves.
func Randoms(u []float64) *tensor.Dense { return words(u, len(u), randomWords) }

// words is the memory of x as int32.
func words[T any](x []T, rows, columns int) *tensor.Dense {
	data := make([]int32, rows*columns)
	copy(data, unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(x))), len(data)))
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(data))
}

// floatOf is the float64 in two words.
func floatOf(w []int32) float64 {
	return math.Float64frombits(uint64(uint32(w[0])) | uint64(uint32(w[1]))<<32)
}

var sampleInputs = [...]string{"logits", "choices", "randoms"}

func sampleType(i int) tensor.Dtype {
	if i == 0 {
		return tensor.Float32
	}
	return tensor.Int32
}

type sample struct {
	graph.Plain
	inference
	gpu *ongpu.Node
}

func (op sample) shape(in []tensor.Shape) (tensor.Shape, error) {
	const name = "Sample"
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrShape, "%d inputs, want %d", len(in), op.Arity())
	}
	if len(in[0]) != 2 || in[0][0] < 1 || in[0][1] < 1 {
		return nil, errorf(name, errs.ErrShape, "logits has shape %v, want rank 2 and no empty axis", in[0])
	}
	for i, columns := range []int{choiceWords, randomWords} {
		if want := (tensor.Shape{in[0][0], columns}); !slices.Equal(in[i+1], want) {
			return nil, errorf(name, errs.ErrShape, "%s has shape %v, want %v for logits of shape %v", sampleInputs[i+1], in[i+1], want, in[0])
		}
	}
	return tensor.Shape{in[0][0]}, nil
}

// OnGPU makes it an [ongpu.Op].
func (op sample) OnGPU() *ongpu.Node { return op.gpu }

func (op sample) Arity() int { return len(sampleInputs) }

// OperandName makes it a [graph.Named].
func (op sample) OperandName(i int) string { return sampleInputs[i] }

func (op sample) Type() hm.Type {
	return hm.NewFnType(tensorOf(2, tensor.Float32), tensorOf(2, tensor.Int32), tensorOf(2, tensor.Int32), tensorOf(1, tensor.Int32))
}

func (op sample) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	shapes, err := G.DimSizersToShapes(in)
	if err != nil {
		return nil, err
	}
	return op.shape(shapes)
}

func (op sample) String() string        { return "Sample" }
func (op sample) WriteHash(h hash.Hash) { h.Write([]byte("leanattention.nn.Sample")) }
func (op sample) Hashcode() uint32      { return graph.Hashcode(op) }

func (op sample) Do(in ...G.Value) (y G.Value, err error) {
	const name = "Sample"
	defer errs.RecoverTo(prefix+name, &err)
	defer op.gpu.Done(in, &y, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, errs.ErrGraph, "%d inputs, want %d", len(in), op.Arity())
	}
	shapes := shapesOf(in)
	shape, err := op.shape(shapes)
	if err != nil {
		return nil, err
	}
	if anyOnGPU(in) {
		return op.doGPU(in, shape)
	}
	logits, err := elements[float32](name, sampleInputs[0], in[0], shapes[0])
	if err != nil {
		return nil, err
	}
	choices, err := elements[int32](name, sampleInputs[1], in[1], shapes[1])
	if err != nil {
		return nil, err
	}
	randoms, err := elements[int32](name, sampleInputs[2], in[2], shapes[2])
	if err != nil {
		return nil, err
	}
	n, ids := shapes[0][1], make([]int32, shape[0])
	for row := range ids {
		w := choices[row*choiceWords:]
		c := Choice{Temperature: floatOf(w), TopP: floatOf(w[2:]), TopK: int(w[4])}
		ids[row] = int32(c.Choose(logits[row*n:(row+1)*n], floatOf(randoms[row*randomWords:])))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(ids)), nil
}

func (op sample) doGPU(in []G.Value, shape tensor.Shape) (G.Value, error) {
	const name = "Sample"
	what := func(i int) string { return sampleInputs[i] }
	if err := checkDTypes(name, what, in, sampleType); err != nil {
		return nil, err
	}
	n := in[0].Shape()[1]
	return ongpu.Compute(&ongpu.Call{
		Op: "nn." + name, Node: op.gpu, Names: sampleInputs[:], In: in, DType: tensor.Int32, Shape: shape,
		Queue: func(w *ongpu.Work) error {
			o := &decoder.Samples{
				Logits: w.In[0].Memory, Rows: shape[0], Vocab: n, Stride: n,
				Settings: gpuBytes(w.In[1].Memory), Random: gpuBytes(w.In[2].Memory), IDs: gpuBytes(w.Out),
			}
			return w.Sample(o)
		},
		Apart: func(in []ongpu.Layout) (*ongpu.Apart, error) {
			columns, ok := byColumns(in[0], n)
			if !ok || !in[1].Replicated || !in[2].Replicated {
				return nil, nil
			}
			// What is drawn depends on all weights: all GPUs get all logits, and choose the same.
			return &ongpu.Apart{
				Layout: ongpu.Layout{Replicated: true}, Shape: shape,
				Scratch: func(int, *decoder.Engine) (int, error) { return shape[0] * n, nil },
				Meet: func(x *decoder.Exchange, member int, all []*ongpu.Work) error {
					o := &decoder.AllGather{Rows: shape[0], Columns: columns}
					for _, w := range all {
						y := w.Scratch
						y.Len = shape[0] * n
						o.X, o.Y = append(o.X, w.In[0].Memory), append(o.Y, y)
					}
					w := all[member]
					if err := w.Do(func(s *cuda.Stream) error { return w.AllGather(s, x, o, member) }); err != nil {
						return err
					}
					return w.Sample(&decoder.Samples{
						Logits: o.Y[member], Rows: shape[0], Vocab: n, Stride: n,
						Settings: gpuBytes(w.In[1].Memory), Random: gpuBytes(w.In[2].Memory), IDs: gpuBytes(w.Out),
					})
				},
			}, nil
		},
	})
}

var (
	_ G.SDOp = sample{}
	_ G.ADOp = sample{}
)
