package e2e

import (
	"hash/fnv"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// randomWeights are weights in float16, scaled as OPT's are
// before training. All matrices are parts of one block of numbers that is little
// larger than the largest of them, so that 13 GB of weights are there in about a
// second. They begin anywhere in it: hardly two have the same rows.
type randomWeights struct{ block []la.F16 }

// randomModel is a model.Source of them.
type randomModel struct {
	randomWeights
	config hf.Config
}

// randomSlack is how many numbers longer the block is than the largest matrix,
// and so where a matrix may begin.
const randomSlack = 1 << 22

func newRandomModel(c hf.Config) *randomModel {
	most := 0
	for w := range c.Weights() {
		most = max(most, elements(w.Shape))
	}
	return &randomModel{newRandomWeights(most), c}
}

// newRandomWeights has so many elements in the largest matrix.
func newRandomWeights(most int) randomWeights { return randomWeights{randomBlock(most + randomSlack)} }

// randomBlock is n normally distributed numbers, made on all cores.
func randomBlock(n int) []la.F16 {
	// A generator takes ten times as long for a normal number as for picking one.
	var table [1 << 16]la.F16
	rng := rand.New(rand.NewPCG(0, 0))
	for i := range table {
		table[i] = half.FromFloat32(float32(weightScale * rng.NormFloat64()))
	}
	block, workers := make([]la.F16, n), runtime.GOMAXPROCS(0)
	var wait sync.WaitGroup
	for w := range workers {
		wait.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(w)))
			for part := block[w*n/workers : (w+1)*n/workers]; len(part) > 0; {
				r := rng.Uint64()
				for i := range min(4, len(part)) {
					part[i] = table[r>>(16*i)&0xffff]
				}
				part = part[min(4, len(part)):]
			}
		})
	}
	wait.Wait()
	return block
}

func (m *randomModel) Config() hf.Config { return m.config }

func (m randomWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	n := elements(shape)
	// The name decides, so that weights do not depend on who asks for them when.
	h := fnv.New64a()
	io.WriteString(h, name)
	at := int(h.Sum64() % (randomSlack / 8) * 8) // aligned as in a file
	part := m.block[at : at+n : at+n]
	if len(shape) > 1 {
		return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(part)), nil
	}
	vector := make([]float32, n)
	half.DecodeFloat16(vector, part)
	if strings.HasSuffix(name, "norm.weight") {
		for i := range vector {
			vector[i]++
		}
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(vector)), nil
}
