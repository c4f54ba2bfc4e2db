package nn

import (
	"math"
	"slices"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/choose"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/layers"
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
	// Temperature 0 is greedy: the most likely token, and of equally likely ones that with the lowest id. A negative temperature
	// or NaN is for an unassigned row, whose token is -1. With +Inf, all tokens of K have the same probability, except those with
	// a logit of -Inf.
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
	defer errs.RecoverTo(prefix+"Sample", &err)
	return newNode(sample{}, logits, choices, randoms)
}

const (
	choiceWords = int(unsafe.Sizeof(layers.Setting{}) / 4) // int32 of a row's choice
	randomWords = 2
)

// Choices returns choices of rows as a value for [Sample]: int32 of shape (rows, 6). The numbers have no meaning by themselves.
func Choices(c []Choice) *tensor.Dense {
	settings := make([]layers.Setting, len(c))
	for i, x := range c {
		// Kernels divide by the temperature, which must be finite.
		s := layers.Setting{Temperature: min(x.Temperature, math.MaxFloat64), TopP: x.TopP, TopK: int32(min(max(x.TopK, 0), math.MaxInt32))}
		if !(x.TopP > 0) { // kernels would take 0 for the smallest TopP
			s.TopP = 1
		}
		settings[i] = s
	}
	return words(settings, len(c), choiceWords)
}

// Randoms returns random numbers in [0, 1), one for each row, as a value for [Sample]: int32 of shape (rows, 2). The numbers have no
// meaning by themselves.
func Randoms(u []float64) *tensor.Dense { return words(u, len(u), randomWords) }

// words returns the memory of x as int32.
func words[T any](x []T, rows, columns int) *tensor.Dense {
	data := make([]int32, rows*columns)
	copy(data, unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(x))), len(data)))
	return tensor.New(tensor.WithShape(rows, columns), tensor.WithBacking(data))
}

// floatOf returns the float64 in two words.
func floatOf(w []int32) float64 {
	return math.Float64frombits(uint64(uint32(w[0])) | uint64(uint32(w[1]))<<32)
}

// sample is the rule of Sample.
type sample struct{}

func (sample) title() string  { return "Sample" }
func (sample) String() string { return "Sample" }

func (sample) arguments() []argument {
	return []argument{
		{name: "logits", rank: 2, dtype: tensor.Float32}, data(argument{name: "choices", rank: 2, dtype: tensor.Int32}),
		data(argument{name: "randoms", rank: 2, dtype: tensor.Int32}), data(argument{name: "ids", rank: 1, dtype: tensor.Int32}),
	}
}

func (r sample) shape(in []tensor.Shape) (tensor.Shape, error) {
	logits := in[0]
	for i, columns := range []int{choiceWords, randomWords} {
		if want := (tensor.Shape{logits[0], columns}); !slices.Equal(in[i+1], want) {
			return nil, errorf(r.title(), errs.ErrShape, "%s has shape %v, want %v for logits of shape %v", r.arguments()[i+1].name, in[i+1], want, logits)
		}
	}
	return logits[:1].Clone(), nil
}

func (r sample) compute(in []G.Value, shape tensor.Shape) (G.Value, error) {
	logits, err := elements[float32](r.title(), "logits", in[0], in[0].Shape())
	if err != nil {
		return nil, err
	}
	choices, err := elements[int32](r.title(), "choices", in[1], in[1].Shape())
	if err != nil {
		return nil, err
	}
	randoms, err := elements[int32](r.title(), "randoms", in[2], in[2].Shape())
	if err != nil {
		return nil, err
	}
	n, ids := in[0].Shape()[1], make([]int32, shape[0])
	for row := range ids {
		w := choices[row*choiceWords:]
		c := Choice{Temperature: floatOf(w), TopP: floatOf(w[2:]), TopK: int(w[4])}
		ids[row] = int32(c.Choose(logits[row*n:(row+1)*n], floatOf(randoms[row*randomWords:])))
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(ids)), nil
}

func (sample) launch(w *ongpu.Work, in []tensor.Shape, shape tensor.Shape) error {
	return queueSample(w, w.In[0].Memory, in[0][1], shape)
}

// queueSample queues the choice from logits on one GPU.
func queueSample(w *ongpu.Work, logits gpu.Memory, n int, shape tensor.Shape) error {
	return w.Sample(&layers.Samples{
		Logits: logits, Rows: shape[0], Vocab: n, Stride: n,
		Settings: gpuBytes(w.In[1].Memory), Random: gpuBytes(w.In[2].Memory), IDs: gpuBytes(w.Out),
	})
}

// place has each GPU gather all logits, since a choice depends on all of them. All GPUs choose the same.
func (sample) place(c *ongpu.Call, in []tensor.Shape, shape tensor.Shape) {
	n := in[0][1]
	c.PerGPU = func(layouts []ongpu.Layout) (*ongpu.PerGPU, error) {
		columns, ok := byColumns(layouts[0], n)
		if !ok || !layouts[1].Replicated || !layouts[2].Replicated {
			return nil, nil
		}
		return &ongpu.PerGPU{
			Layout: ongpu.Layout{Replicated: true}, Shape: shape,
			Scratch: func(int, *layers.Engine) (int, error) { return shape[0] * n, nil },
			Meet: func(x *layers.Exchange, member int, all []*ongpu.Work) error {
				o := &layers.AllGather{Rows: shape[0], Columns: columns}
				for _, w := range all {
					y := w.Scratch
					y.Len = shape[0] * n
					o.X, o.Y = append(o.X, w.In[0].Memory), append(o.Y, y)
				}
				w := all[member]
				if err := w.Do(func(s *cuda.Stream) error { return w.AllGather(s, x, o, member) }); err != nil {
					return err
				}
				return queueSample(w, o.Y[member], n, shape)
			},
		}, nil
	}
}

var (
	_ rule     = sample{}
	_ launched = sample{}
	_ placed   = sample{}
)
