//go:build cuda

package leanattention

import (
	"fmt"
	"runtime"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/attention"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Built with the tag cuda, Gorgonia's tape machine computes on a GPU. It asks an
// op's type alone whether a node runs there: if it has CUDADo, the machine copies
// the node's inputs to its GPU, hands it memory for the output, and calls that
// method instead of Do. So an op is put into a wrapper with the method, or is
// not, when its node is made.
//
// The wrappers compute with the engine of any other GPU, in the machine's
// context: see cuda_machine.go. What follows only says what is an operand.

// machineAttention is [Attention] on Gorgonia's machine.
type machineAttention struct{ *attentionOp }

// placeAttention puts attention on the machine where there are kernels for it.
// Everything else stays on the CPU, as stock ops without kernels do. So does
// what gets tensors of a GPU that the user has opened: it computes there.
func placeAttention(op *attentionOp, q, k, v *G.Node) G.Op {
	g := op.problem.geometry(&op.config)
	modified := op.mask.Window != 0 || op.score != attn.Score{} || op.hasSeed() // has not been tried there
	if !isDeviceQueryType(op.query) || modified || attention.HasKernel(&g) != nil {
		return op
	}
	seen := make(map[int64]bool)
	if getsDeviceTensors(q, seen) || getsDeviceTensors(k, seen) || getsDeviceTensors(v, seen) {
		return op
	}
	return &machineAttention{op}
}

// getsDeviceTensors says whether a node's values are [DeviceTensor]s, as far as
// the graph shows: one comes from an input that has such a value now, or from
// ToDevice, and passes through every op but ToHost.
func getsDeviceTensors(n *G.Node, seen map[int64]bool) bool {
	if seen[n.ID()] {
		return false
	}
	seen[n.ID()] = true
	switch n.Op().(type) {
	case *toDeviceOp:
		return true
	case *toHostOp:
		return false
	}
	if placeOf(n.Value()) != nil {
		return true
	}
	for children := n.Graph().From(n.ID()); children.Next(); {
		if child, ok := children.Node().(*G.Node); ok && getsDeviceTensors(child, seen) {
			return true
		}
	}
	return false
}

// CallsExtern and ReturnsPtr are what the machine goes by when it gives memory
// for the output.
func (*machineAttention) CallsExtern() bool { return true }
func (*machineAttention) ReturnsPtr() bool  { return true }

// CUDADo queues the work and returns prealloc.
func (op *machineAttention) CUDADo(ext G.External, dev G.Device, prealloc G.Value, in ...G.Value) (out G.Value, err error) {
	const name = "Attention"
	defer recoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, ErrShape, "%d inputs; it has %d", len(in), op.Arity())
	}
	m, err := machineOf(name, ext, dev)
	if err != nil {
		return nil, err
	}
	p := &op.problem
	values, to, err := m.borrowAll(name, prealloc, operand{"out", p.outShape(), p.query}, in[:3],
		operand{"q", p.dims(p.dim), p.query}, operand{"k", p.keyShape(p.dim), p.storage}, operand{"v", p.keyShape(p.valueDim), p.storage})
	if err != nil {
		return nil, err
	}
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	r.allLive(p)
	if op.hasLengths() {
		if r.lengths, err = m.readLengths(name, r.lengths[:0], in[3], p); err != nil {
			return nil, err
		}
	}
	_, lse, err := op.doDevice(name, r, m.gpu, values, furtherThere{}, to)
	if err != nil {
		return nil, err
	}
	op.logs().put(prealloc, lse)
	return prealloc, nil
}

// DoDiff is refused: the lisp machine would have the values on the GPU, and the
// gradient is computed on the CPU. The tape machine copies them.
func (op *machineAttention) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf("Attention.DoDiff", ErrUnsupported, "gradient on the lisp machine under the build tag cuda")
}

// machineCached is [CachedAttention] on a cache that is on Gorgonia's machine.
type machineCached struct{ *cachedOp }

// placeCached puts the op where its cache is.
func placeCached(op *cachedOp) G.Op {
	if _, ok := op.step.cache.store.(*machinePages); ok {
		return &machineCached{op}
	}
	return op
}

func (*machineCached) CallsExtern() bool { return true }
func (*machineCached) ReturnsPtr() bool  { return true }

// CUDADo queues the work and returns prealloc.
func (op *machineCached) CUDADo(ext G.External, dev G.Device, prealloc G.Value, in ...G.Value) (out G.Value, err error) {
	const name = "CachedAttention"
	defer recoverTo(name, &err)
	if len(in) != 3 {
		return nil, errorf(name, ErrShape, "%d inputs; it has 3", len(in))
	}
	m, err := machineOf(name, ext, dev)
	if err != nil {
		return nil, err
	}
	r, c := &op.rows, &op.step.cache.config
	rows := func(name string, width int) operand {
		return operand{name, tensor.Shape{r.tokens, width}, r.query}
	}
	values, to, err := m.borrowAll(name, prealloc, rows("out", r.heads*c.ValueDim), in,
		rows("q", r.heads*c.HeadDim), rows("k", c.KVHeads*c.HeadDim), rows("v", c.KVHeads*c.ValueDim))
	if err != nil {
		return nil, err
	}
	_, lse, err := op.step.attend(name, op.layerCall(op.rows, values, to))
	if err != nil {
		return nil, err
	}
	op.lse.put(prealloc, lse)
	return prealloc, nil
}

// machineLSE is the node behind [WithLSE] where the attention is on the machine.
type machineLSE struct{ *lseOp }

// placeLSE puts the op where the attention is.
func placeLSE(op *lseOp, out *G.Node) G.Op {
	switch out.Op().(type) {
	case *machineAttention, *machineCached:
		return &machineLSE{op}
	}
	return op
}

func (*machineLSE) CallsExtern() bool { return true }
func (*machineLSE) ReturnsPtr() bool  { return true }

// CUDADo copies what the attention left to prealloc.
func (op *machineLSE) CUDADo(ext G.External, dev G.Device, prealloc G.Value, in ...G.Value) (out G.Value, err error) {
	name := op.of
	defer recoverTo(name, &err)
	if len(in) != op.Arity() {
		return nil, errorf(name, ErrShape, "%d inputs of the log-sum-exp; it has %d", len(in), op.Arity())
	}
	m, err := machineOf(name, ext, dev)
	if err != nil {
		return nil, err
	}
	from, ok := op.from.take(in[0]).(*DeviceTensor)
	if !ok {
		return nil, errorf(name, ErrState, "the log-sum-exp was asked for before the attention ran")
	}
	to, err := m.borrow(name, prealloc, operand{"lse", op.shape, op.dtype})
	if err != nil {
		return nil, err
	}
	if err := m.gpu.enter(name); err != nil {
		return nil, err
	}
	defer m.gpu.group.Leave()
	if err := to.copyFrom(from); err != nil {
		return nil, tensorError(name, "lse", err)
	}
	runtime.KeepAlive(in)
	return prealloc, nil
}

// DoDiff is refused, as [machineAttention.DoDiff] is.
func (op *machineLSE) DoDiff(G.ExecutionContext, G.Nodes, *G.Node) error {
	return errorf(op.of+".DoDiff", ErrUnsupported, "gradient on the lisp machine under the build tag cuda")
}

// checkMachine refuses what Gorgonia's machine panics at: where no node computes
// on the GPU, it takes the register that a Read does not have for one there.
func checkMachine(op string, g *G.ExprGraph) error {
	reads := ""
	for _, n := range g.AllNodes() {
		if _, ok := n.Op().(G.CUDADoer); ok {
			return nil
		}
		if fmt.Sprintf("%T", n.Op()) == "gorgonia.readOp" {
			reads = n.String()
		}
	}
	if reads == "" {
		return nil
	}
	return errorf(op, ErrGraph, "%s, and no node on Gorgonia's CUDA machine: under the build tag cuda take the values of nodes instead", reads)
}

// placePages makes the pages of a cache that is not in host memory.
func placePages(op string, c *Cache, storage attn.DType, keyElements, valueElements int) (pageStore, error) {
	if c.config.Device == machineGPU {
		return newMachinePages(op, c, storage, keyElements, valueElements)
	}
	return newDevicePages(op, &c.config, storage, keyElements, valueElements)
}

var (
	_ G.CUDADoer = (*machineAttention)(nil)
	_ G.CUDADoer = (*machineCached)(nil)
	_ G.CUDADoer = (*machineLSE)(nil)
	_ G.SDOp     = (*machineAttention)(nil)
	_ G.ADOp     = (*machineAttention)(nil)
	_ G.SDOp     = (*machineCached)(nil)
	_ G.ADOp     = (*machineCached)(nil)
	_ G.SDOp     = (*machineLSE)(nil)
	_ G.ADOp     = (*machineLSE)(nil)
)
