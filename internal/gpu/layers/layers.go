package layers

import (
	"math"
	"sync"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// decoderUnit is the module with the kernels of an [Engine].
const decoderUnit = "decoder"

// rowThreads is the number of threads of a block that reads a row once.
const rowThreads = 256

// Engine has the kernels of a decoder's other layers on one device. An Engine may be used by several goroutines at
// once. Its kernels are unloaded with the device.
type Engine struct {
	info        cuda.Info
	dev         *cuda.Device
	gemv        [weight.Formats]*cuda.Function
	norm        *cuda.Function
	gather      *cuda.Function
	megakernels [llamaShape + 1]*megakernels // nil: the GPU has none, or not loaded yet
	packed      [llamaShape + 1]*megakernels // the same for weights of 8 and 4 bits
	*Sampler

	gemm   [weight.Formats]*gemmKernels   // nil: the GPU, or the format, has none
	skinny [weight.Formats]*skinnyKernels // as gemm
	// Kernels of gemm and skinny that round x, without gates and with gates; nil: not loaded yet.
	rounded [weight.Formats][2]*roundedKernels
	splits  []int // allowed cluster sizes of skinny GEMMs; tests leave some out

	leftOut []int // rows of skinnyKinds that tests leave out
	copied  bool  // tests: x of 64 rows is never in registers

	persistent []persistentTile // tiles of persistent launches; tests leave some out

	leastPairs  int            // the constant, except in tests
	leastHopper int            // the constant, except in tests
	leastWide   int            // leastWideRows, except in tests
	orders      []bool         // both, except in tests: values of hopperLayout.swapped
	hopperTime  float64        // 1, except in tests: factor of the time of products of hopper.go
	slower      float64        // 1, except in tests: factor of the tiles' time
	tiled       []tiledCluster // tiledClusters, except in tests

	hopper map[attn.DType]*hopperKernels // loaded at first use

	loading       sync.Mutex    // held while kernels are loaded at first use: see persistentOf
	gated         *gatedKernels // nil: not loaded yet
	separateGates bool          // tests: gates are launches of their own

	narrow *narrowKernels                // nil: not loaded yet
	byRows map[string]*narrowRowsKernels // as narrow

	mu              sync.Mutex
	args            cuda.Args
	nodeKernels     *nodeKernels                  // nil: not loaded yet
	heads           map[attn.DType]*cuda.Function // of weights; nil: not loaded yet
	trainingKernels *trainingKernels              // nil: not loaded yet
	lossKernels     *lossKernels                  // nil: not loaded yet
	solverKernels   *solverKernels                // nil: not loaded yet
	logits          int                           // tests: the most logits in memory; 0: mostLogits
	rowsKernels     *rowsKernels                  // nil: not loaded yet
	maps            gpu.TensorMaps[linearMap]

	clusters sync.Map // by clusterKey: how many clusters can run at once
}

// clusterKey identifies a launch of clusters. kind is one of:
//
//   - -1: a GEMV
//   - -2 and less: one of skinnyKinds, wide or not
//   - an index of gemmRows, or above: kernels for a rounded x, and persistent kernels
//   - pairClusters, hopperClusters, rowsClusters
type clusterKey struct {
	format              weight.Format
	kind, split, shared int
	gates               bool // a kernel of gated.go
}

const pairClusters, hopperClusters, rowsClusters = math.MinInt, math.MinInt + 1, math.MinInt + 2

// mostSplit is the largest number of thread blocks of a cluster.
const mostSplit = 8

// clusterGrid returns a launch of clusters of `split` thread blocks.
func clusterGrid(clusters, split, threads, shared int, overlap bool) cuda.Grid {
	g := cuda.Grid{Blocks: [3]int{clusters * split}, Threads: [3]int{threads}, Shared: shared, Overlap: overlap}
	if split > 1 {
		g.Cluster = [3]int{split, 1, 1}
	}
	return g
}

// New loads the kernels. Errors: [kernels.ErrNoImage] if the GPU has none, and the driver's.
func New(dev *cuda.Device) (*Engine, error) {
	d := &Engine{dev: dev, info: dev.Info(), splits: skinnySplits[:], persistent: persistentTiles[:], tiled: tiledClusters[:], leastPairs: leastPairs, leastHopper: leastHopper, leastWide: leastWideRows, orders: []bool{false, true}, hopperTime: 1, hopper: map[attn.DType]*hopperKernels{}, slower: 1}
	m, err := gpu.Module(dev, decoderUnit)
	if err != nil {
		return nil, err
	}
	err = withKernels(func(f weight.Format) (err error) {
		d.gemv[f], err = gpu.WithShared(m, "linear_"+f.Kernels())
		return err
	})
	if err != nil {
		return nil, err
	}
	if d.norm, err = m.Function("decoder_norm"); err != nil {
		return nil, err
	}
	if d.gather, err = m.Function("decoder_gather"); err != nil {
		return nil, err
	}
	if err := d.loadMegakernels(optShape, false); err != nil {
		return nil, err
	}
	if err := d.loadGEMM(); err != nil {
		return nil, err
	}
	d.Sampler, err = NewSampler(dev)
	return d, err
}

// overlap reports whether launches may overlap.
func (d *Engine) overlap() bool { return d.info.Capability >= 90 }

// Norm is a norm of rows: a layer norm, (x - mean)/sqrt(variance + Eps)*Gamma + Beta, or with RMS the norm of
// [RMSNorm], x/sqrt(mean(x^2) + Eps)*Gamma, without Beta. With UnitOffset the factor is 1+Gamma. Gamma and Beta may
// have no buffer.
type Norm struct {
	Gamma, Beta     gpu.Memory
	Eps             float64
	RMS, UnitOffset bool
}

// kind returns the kernels' number of the norm (kernels/gemm_gemv.cuh).
func (n *Norm) kind() int32 {
	if n.RMS {
		return 2
	}
	return 1
}

// offset returns the number that is added to gamma.
func (n *Norm) offset() float32 {
	if n.UnitOffset {
		return 1
	}
	return 0
}

// clustersAtOnce returns how many clusters may run at once; g has one cluster. With one thread block for each
// multiprocessor there are no more clusters: clusters are within groups of multiprocessors, of which some are left
// over. The driver has the number.
func (d *Engine) clustersAtOnce(key clusterKey, f *cuda.Function, g cuda.Grid) (int, error) {
	all := max(d.info.Multiprocessors, 1) / key.split
	if key.split == 1 {
		return all, nil
	}
	if n, ok := d.clusters.Load(key); ok {
		return n.(int), nil
	}
	n, err := f.Clusters(g)
	if err != nil {
		return 0, err
	}
	n = min(n, all)
	d.clusters.Store(key, n)
	return n, nil
}

func (n *Norm) check(op string, in int) error {
	if !(n.Eps >= 0) || math.IsInf(n.Eps, 1) {
		return gpu.Errorf(op, attn.ErrShape, "eps is %v", n.Eps)
	}
	if n.RMS && n.Beta.Buffer != nil || n.UnitOffset && !n.RMS {
		return gpu.Errorf(op, attn.ErrShape, "beta of a norm by the root mean square, or 1+gamma of another")
	}
	if err := n.Gamma.CheckOptional(op, "gamma", in); err != nil {
		return err
	}
	return n.Beta.CheckOptional(op, "beta", in)
}

// hold makes the launch refuse closed buffers.
func (d *Engine) hold(list ...gpu.Memory) {
	for i := range list {
		if list[i].Buffer != nil {
			d.args.Hold(list[i].Buffer)
		}
	}
}

// normParams is struct NormParams.
type normParams struct {
	x, gamma, beta, y uint64
	n                 int32
	eps               float32
}

// Norm queues the norm of rows of n elements of float32. y may be x.
func (d *Engine) Norm(s *cuda.Stream, rows, n int, x, y gpu.Memory, norm *Norm) error {
	const op = "norm"
	if rows < 1 || n < 1 || rows > math.MaxInt32 || n > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", rows, n)
	}
	if err := x.CheckFloats(op, "x", rows*n); err != nil {
		return err
	}
	if err := y.CheckFloats(op, "y", rows*n); err != nil {
		return err
	}
	if err := norm.check(op, n); err != nil {
		return err
	}
	if norm.RMS {
		return d.RMSNorm(s, &RMSNorm{Rows: rows, N: n, Eps: norm.Eps, UnitOffset: norm.UnitOffset, X: x, Gamma: norm.Gamma, Y: y})
	}
	if rows >= leastNormRows && inWarps(n) {
		return d.rowsLayerNorm(s, rows, n, x, y, norm)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.args.Reset()
	p := normParams{x: x.Address(), gamma: norm.Gamma.AddressOr0(), beta: norm.Beta.AddressOr0(), y: y.Address(), n: int32(n), eps: float32(norm.Eps)}
	cuda.Struct(&d.args, &p)
	d.hold(x, y, norm.Gamma, norm.Beta)
	return d.norm.Launch(s, cuda.Grid{Blocks: [3]int{rows}, Threads: [3]int{rowThreads}, Overlap: d.overlap()}, &d.args)
}
