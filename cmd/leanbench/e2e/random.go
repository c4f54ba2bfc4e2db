package e2e

import (
	"hash/fnv"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"

	la "gorgonia.org/leanattention"
	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/half"

	"gorgonia.org/tensor"
)

// randomWeights are float16 weights, scaled like OPT's initial weights. All matrices are slices of one block
// that is little larger than the largest matrix, so that 13 GB of weights are made in about a second.
// Matrices start at different offsets of the block, so hardly any two have the same rows.
type randomWeights struct{ block []la.F16 }

// randomSlack is the number of elements by which the block exceeds the largest matrix. It limits the offset
// of a matrix.
const randomSlack = 1 << 22

// newRandomWeights returns the weights of a network.
func newRandomWeights(n lean.Network) randomWeights {
	most := 0
	for w := range n.Weights() {
		most = max(most, elements(w.Shape))
	}
	return randomWeights{randomBlock(most + randomSlack)}
}

// randomBlock returns n normally distributed numbers, generated on all cores.
func randomBlock(n int) []la.F16 {
	// Generating a normal number takes ten times as long as picking one from a table.
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

func (m randomWeights) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	n := elements(shape)
	// The offset depends on the name only, so weights do not depend on the order of calls.
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
