package gpu

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"gorgonia.org/leanattention/device"

	"gorgonia.org/leanattention/cmd/leanbench/measure"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

const (
	tableChain = "A chain of linear layers with float16 weights, by output and by input features in turn on several GPUs, recorded"

	chainLayers = 64
)

// chainCase is a chain of layers of as many features as they read, by output features and by input features in turn: behind
// two of them rows*features float32 are summed.
type chainCase struct {
	rows, features, layers int
	beyond                 float64 // microseconds that a sum may take two GPUs beyond half of one GPU's time; 0: nobody says
}

var chainCases = []chainCase{{1, 2048, chainLayers, 1.5}, {16, 2048, chainLayers, 0}, {1, 4096, chainLayers, 0}}

func (c chainCase) String() string {
	return fmt.Sprintf("exchange of %d KB, %d x %d", c.rows*c.features*4>>10, c.rows, c.features)
}

// measureChain has all numbers of GPUs take turns. On one of them the layers may be one launch.
func (s *scaling) measureChain(c chainCase, gpus []*device.GPU) (err error) {
	var contenders []measure.Contender
	for _, g := range gpus {
		r, err := newChainStep(c, g)
		defer func() { err = errors.Join(err, r.close()) }()
		if err != nil {
			return err
		}
		contenders = append(contenders, measure.Contender{Name: gpusName(len(g.Members())), Run: replays(r.gpu, r.recording)})
	}
	all, err := measure.Alternate(s.pace, contenders)
	if err != nil {
		return err
	}
	layer := func(i int) float64 { return 1e6 * all[i].Median() / float64(c.layers) }
	for i, x := range all {
		row := s.report.Row(tableChain, c.String(), contenders[i].Name)
		row.Add(measure.LayerMicros, layer(i), nil)
		if i == 0 {
			continue
		}
		n := len(gpus[i].Members())
		row.Add(measure.OverOneGPU, x.Faster(all[0]), nil)
		row.Add(measure.BeyondShare, 2*(layer(i)-layer(0)/float64(n)), measure.Only(n == 2 && c.beyond > 0, measure.AtMost(c.beyond)))
	}
	return nil
}

// chainStep is a recorded chain.
type chainStep struct {
	gpu       *device.GPU
	tensors   []*device.Tensor
	vm        G.VM
	recording *device.Recording
}

func newChainStep(c chainCase, gpu *device.GPU) (r *chainStep, err error) {
	r = &chainStep{gpu: gpu}
	const replicated = -1
	there := func(x *tensor.Dense, axis int) (d *device.Tensor, err error) {
		if axis == replicated {
			d, err = gpu.UploadReplicated(x)
		} else {
			d, err = gpu.UploadSharded(x, axis)
		}
		if err == nil {
			r.tensors = append(r.tensors, d)
		}
		return d, err
	}
	g := G.NewGraph()
	node := func(name string, d *device.Tensor) *G.Node {
		return G.NewMatrix(g, d.Dtype(), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
	}
	x, err := there(tensor.New(tensor.WithShape(c.rows, c.features), tensor.WithBacking(randomFloats(c.rows*c.features))), replicated)
	if err != nil {
		return r, err
	}
	// Each layer has memory of its own for the same numbers, which leave what they multiply about as large as it is.
	block := randomFloats(c.features * c.features)
	scale := float32(math.Sqrt(3 / float64(c.features)))
	for i := range block {
		block[i] *= scale
	}
	short := make([]la.F16, len(block))
	half.EncodeFloat16(short, block)
	weights := tensor.New(tensor.WithShape(c.features, c.features), tensor.WithBacking(short))
	h := node("x", x)
	for i := range c.layers {
		axis := i % 2
		if c.features%(8*len(gpu.Members())) != 0 { // rows of parts have no multiple of 16 bytes
			axis = 0
		}
		w, err := there(weights, axis)
		if err != nil {
			return r, err
		}
		if h, err = nn.Linear(h, node(fmt.Sprint("w", i), w), nil); err != nil {
			return r, err
		}
	}
	r.vm = G.NewTapeMachine(g)
	if err := r.vm.RunAll(); err != nil { // nodes have their memory
		return r, err
	}
	r.vm.Reset()
	r.recording, err = gpu.Record(r.vm.RunAll)
	r.vm.Reset()
	return r, err
}

func (r *chainStep) close() (err error) {
	if r.recording != nil {
		err = r.recording.Close()
	}
	if r.vm != nil {
		err = errors.Join(err, r.vm.Close())
	}
	for _, d := range r.tensors {
		err = errors.Join(err, d.Free())
	}
	return err
}

// randomFloats are n numbers in [-1, 1), the same ones each time.
func randomFloats(n int) []float32 {
	rng, x := rand.New(rand.NewPCG(1, 2)), make([]float32, n)
	for i := range x {
		x[i] = 2*rng.Float32() - 1
	}
	return x
}
