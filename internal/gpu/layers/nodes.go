package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// nodesUnit is the module with the kernels of nodes that touch each element once.
const nodesUnit = "nodes"

// Constants of the kernels (kernels/nodes.cuh).
const (
	nodeThreads = 256
	nodeNarrow  = 1024
	nodeEach    = 4
	nodePairs   = 128
	nodeStates  = 32
)

// nodeKernels are loaded at first use.
type nodeKernels struct {
	rmsNorm, rotary, elements, move, merge *cuda.Function
}

// nodes returns the kernels. d.mu is held.
func (d *Engine) nodes() (*nodeKernels, error) {
	if d.nodeKernels != nil {
		return d.nodeKernels, nil
	}
	k := new(nodeKernels)
	if err := d.functions(nodesUnit, map[string]**cuda.Function{"node_rms_norm": &k.rmsNorm, "node_rotary": &k.rotary, "node_elements": &k.elements, "node_move": &k.move, "node_merge": &k.merge}); err != nil {
		return nil, err
	}
	d.nodeKernels = k
	return k, nil
}

// functions loads kernels of a unit. The first use of kernels may be within a capture.
func (d *Engine) functions(unit string, all map[string]**cuda.Function) error {
	return d.dev.Relaxed(func() error {
		m, err := gpu.Module(d.dev, unit)
		if err != nil {
			return err
		}
		for name, f := range all {
			if *f, err = m.Function(name); err != nil {
				return err
			}
		}
		return nil
	})
}

// launchNode queues a kernel of the unit, with one struct of parameters.
func launchNode[P any](d *Engine, s *cuda.Stream, kernel func(*nodeKernels) *cuda.Function, blocks int, p *P, memory ...gpu.Memory) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	k, err := d.nodes()
	if err != nil {
		return err
	}
	return queueNode(d, s, kernel(k), blocks, p, memory...)
}

// queueNode queues a kernel whose thread blocks have nodeThreads threads. d.mu is held.
func queueNode[P any](d *Engine, s *cuda.Stream, kernel *cuda.Function, blocks int, p *P, memory ...gpu.Memory) error {
	d.args.Reset()
	cuda.Struct(&d.args, p)
	d.hold(memory...)
	return kernel.Launch(s, cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{nodeThreads}, Overlap: d.overlap(), Waits: true}, &d.args)
}

// RMSNorm is the operands of
//
//	Y = X/sqrt(mean(X^2) + Eps)*Gamma + Residual
//
// of rows of N elements of float32; with UnitOffset the factor is 1+Gamma. Gamma and Residual may have no buffer. Y
// may be X or Residual.
type RMSNorm struct {
	Rows, N               int
	Eps                   float64
	UnitOffset            bool
	X, Gamma, Residual, Y gpu.Memory
}

// rmsNormParams is struct RMSNormParams.
type rmsNormParams struct {
	x, gamma, residual, y uint64
	rows, n               int32
	eps, offset           float32
}

// RMSNorm queues an RMSNorm.
func (d *Engine) RMSNorm(s *cuda.Stream, o *RMSNorm) error {
	const op = "rms norm"
	if o.Rows < 1 || o.N < 1 || max(o.Rows, o.N) > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.N)
	}
	if !(o.Eps >= 0) || math.IsInf(o.Eps, 1) {
		return gpu.Errorf(op, attn.ErrShape, "eps is %v", o.Eps)
	}
	all := o.Rows * o.N
	if err := o.X.CheckFloats(op, "x", all); err != nil {
		return err
	}
	if err := o.Gamma.CheckOptional(op, "gamma", o.N); err != nil {
		return err
	}
	if err := o.Residual.CheckOptional(op, "the residual", all); err != nil {
		return err
	}
	if err := o.Y.CheckFloats(op, "y", all); err != nil {
		return err
	}
	p := rmsNormParams{x: o.X.Address(), gamma: o.Gamma.AddressOr0(), residual: o.Residual.AddressOr0(), y: o.Y.Address(), rows: int32(o.Rows), n: int32(o.N), eps: float32(o.Eps)}
	if o.UnitOffset {
		p.offset = 1
	}
	blocks := o.Rows
	if o.N <= nodeNarrow {
		blocks = attn.Ceil(o.Rows, nodeThreads/32)
	}
	return launchNode(d, s, func(k *nodeKernels) *cuda.Function { return k.rmsNorm }, blocks, &p, o.X, o.Gamma, o.Residual, o.Y)
}

// Rotary is the operands of a rotary embedding: X and Y are of float32, Rows x Heads*HeadDim. Positions has an int32
// for each row. Y is not X.
type Rotary struct {
	attn.Rotary
	Rows, Heads int
	X, Y        gpu.Memory
	Positions   gpu.Bytes
}

// rotaryParams is struct RotaryParams.
type rotaryParams struct {
	x, positions, y                    uint64
	heads, headDim, pairs, interleaved int32
	factor                             float32
	rows                               int32
	turns                              [nodePairs]attn.Turning
}

// Rotary queues a Rotary. Errors wrap attn.ErrUnsupported if no kernel rotates so many elements of a head.
func (d *Engine) Rotary(s *cuda.Stream, o *Rotary) error {
	const op = "rotary"
	pairs := o.Turns.Len()
	switch {
	case o.Rows < 1 || o.Heads < 1 || o.HeadDim < 2*pairs || pairs < 1 || o.Rows > math.MaxInt32 || int64(o.Heads)*int64(o.HeadDim) > math.MaxInt32:
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d heads of %d elements, %d pairs", o.Rows, o.Heads, o.HeadDim, pairs)
	case o.First > 0:
		return gpu.Errorf(op, attn.ErrUnsupported, "the elements of a head from %d on are rotated (Last); there are kernels for the first ones", o.First)
	case pairs > nodePairs:
		return gpu.Errorf(op, attn.ErrUnsupported, "%d elements of a head are rotated; there are kernels for %d", 2*pairs, 2*nodePairs)
	}
	all := o.Rows * o.Heads * o.HeadDim
	if err := o.X.CheckFloats(op, "x", all); err != nil {
		return err
	}
	if err := o.Y.CheckFloats(op, "y", all); err != nil {
		return err
	}
	if err := o.Positions.Check(op, "the positions", o.Rows, 4); err != nil {
		return err
	}
	p := rotaryParams{
		x: o.X.Address(), positions: o.Positions.Address(), y: o.Y.Address(), heads: int32(o.Heads), headDim: int32(o.HeadDim),
		pairs: int32(pairs), factor: float32(o.Factor), rows: int32(o.Rows),
	}
	if o.Interleaved {
		p.interleaved = 1
	}
	for i := range pairs {
		p.turns[i] = o.Turns.Of(i)
	}
	return launchNode(d, s, func(k *nodeKernels) *cuda.Function { return k.rotary }, o.Rows, &p, o.X, o.Y, gpu.Memory{Buffer: o.Positions.Buffer})
}

// Elements is the operands of
//
//	Y = Scale*f(X)*Times + Plus,   f the Activation
//
// of N elements of float32. Times and Plus may have no buffer, and repeat after a period of elements, unless the
// period is 0. Y may be any operand without a period.
type Elements struct {
	N                       int
	Scale                   float64 // 0: 1
	Activation              attn.Activation
	X, Times, Plus, Y       gpu.Memory
	TimesPeriod, PlusPeriod int
}

// elementsParams is struct ElementsParams.
type elementsParams struct {
	x, times, plus, y       uint64
	n                       int64
	timesPeriod, plusPeriod int32
	scale                   float32
	activation              int32
}

// Elements queues an Elements.
func (d *Engine) Elements(s *cuda.Stream, o *Elements) error {
	const op = "elements"
	switch {
	case o.N < 1 || min(o.TimesPeriod, o.PlusPeriod) < 0 || max(o.TimesPeriod, o.PlusPeriod) > math.MaxInt32:
		return gpu.Errorf(op, attn.ErrShape, "%d elements, periods of %d and %d", o.N, o.TimesPeriod, o.PlusPeriod)
	case o.Activation >= attn.Activations:
		return gpu.Errorf(op, attn.ErrShape, "the activation is %v", o.Activation)
	}
	blocks := attn.Ceil(o.N, nodeThreads*nodeEach)
	if blocks > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrUnsupported, "%d elements", o.N)
	}
	if err := o.X.CheckFloats(op, "x", o.N); err != nil {
		return err
	}
	for _, m := range []struct {
		of     *gpu.Memory
		name   string
		period int
	}{{&o.Times, "the factors", o.TimesPeriod}, {&o.Plus, "what is added", o.PlusPeriod}} {
		n := o.N
		if m.period > 0 {
			n = m.period
		}
		if err := m.of.CheckOptional(op, m.name, n); err != nil {
			return err
		}
	}
	if err := o.Y.CheckFloats(op, "y", o.N); err != nil {
		return err
	}
	p := elementsParams{
		x: o.X.Address(), times: o.Times.AddressOr0(), plus: o.Plus.AddressOr0(), y: o.Y.Address(), n: int64(o.N),
		timesPeriod: int32(o.TimesPeriod), plusPeriod: int32(o.PlusPeriod), scale: float32(o.Scale), activation: int32(o.Activation),
	}
	if o.Scale == 0 {
		p.scale = 1
	}
	return launchNode(d, s, func(k *nodeKernels) *cuda.Function { return k.elements }, blocks, &p, o.X, o.Times, o.Plus, o.Y)
}

// Move is the operands of copying elements of X to Y, by an [attn.Move]. Both have one type, or X has 16 bits and Y is float32.
type Move struct {
	attn.Move
	X, Y gpu.Memory
}

// moveParams is struct MoveParams.
type moveParams struct {
	x, y             uint64
	from, to         [3]int64
	count            int64
	second, third, n int32
	_                [4]byte
}

// Move queues a Move.
func (d *Engine) Move(s *cuda.Stream, o *Move) error {
	const op = "move"
	count := o.Count()
	if count < 1 || max(o.Dims[1], o.Dims[2], o.N) > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrShape, "axes of %v and %d elements", o.Dims, o.N)
	}
	blocks := attn.Ceil(count, nodeThreads*nodeEach)
	if blocks > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrUnsupported, "%d elements", count)
	}
	if min(o.From.At, o.To.At) < 0 {
		return gpu.Errorf(op, attn.ErrShape, "from element %d to %d", o.From.At, o.To.At)
	}
	if err := o.X.CheckLoose(op, "x", o.Extent(&o.From)); err != nil {
		return err
	}
	if err := o.Y.CheckLoose(op, "y", o.Extent(&o.To)); err != nil {
		return err
	}
	if o.X.DType != o.Y.DType && (o.X.DType.Size() != 2 || o.Y.DType != attn.Float32) {
		return gpu.Errorf(op, attn.ErrDType, "x is %v, and y %v", o.X.DType, o.Y.DType)
	}
	if queued, err := d.queueUnits(s, o); queued || err != nil {
		return err
	}
	p := moveParams{
		x: o.X.Address() + uint64(o.From.At)*4, y: o.Y.Address() + uint64(o.To.At)*4, count: int64(count),
		second: int32(o.Dims[1]), third: int32(o.Dims[2]), n: int32(o.N),
	}
	for i := range p.from {
		p.from[i], p.to[i] = int64(o.From.Steps[i]), int64(o.To.Steps[i])
	}
	return launchNode(d, s, func(k *nodeKernels) *cuda.Function { return k.move }, blocks, &p, o.X, o.Y)
}
