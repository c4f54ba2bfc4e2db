package attention

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Gradients of attention (kernels/attn_backward.cuh). A launch of rows computes D and writes the zeros of rows that see no
// key. In the launch after it, a thread block has some keys of a KV head.

const backwardUnit, backwardHopperUnit, backwardHopperScoredUnit = "backward", "backward_hopper", "backward_hopper_variant"

// backwardHopperRows is the number of rows of a query block in the launch of rows before kernels of warp groups. The kernels themselves may
// have longer query blocks.
const backwardHopperRows = 64

// backwardKernel is a line of the table: the kernels for head dims up to dim.
type backwardKernel struct {
	dim          int
	capability   versions
	warps        int
	rows, stages int  // of a query block: rows, and query blocks in shared memory
	scored       bool // it has score changes and masks (backward_scored.go)
	wide         bool // of float32
	groups       bool // it multiplies by warp groups (kernels/attn_backward_hopper.cuh)
}

var backwardTable = []backwardKernel{
	{dim: 64, capability: hopper, warps: 12, rows: 128, stages: 3, groups: true},
	{dim: 128, capability: hopper, warps: 12, rows: 64, stages: 3, groups: true},
	{dim: 64, capability: hopper, warps: 12, rows: 128, stages: 3, scored: true, groups: true},
	{dim: 128, capability: hopper, warps: 12, rows: 64, stages: 3, scored: true, groups: true},
	{dim: 64, capability: largeShared, warps: 4, rows: 32, stages: 2},
	{dim: 64, capability: smallShared, warps: 8, rows: 64, stages: 2},
	{dim: 64, capability: ampere, warps: 8, rows: 64, stages: 2, scored: true},
	{dim: 128, capability: largeShared, warps: 8, rows: 64, stages: 2},
	{dim: 128, capability: smallShared, warps: 8, rows: 32, stages: 1},
	{dim: 128, capability: largeShared, warps: 8, rows: 32, stages: 2, scored: true},
	{dim: 128, capability: smallShared, warps: 8, rows: 32, stages: 1, scored: true},
	{dim: 128, capability: ampere, warps: 4, rows: 16, stages: 1, scored: true, wide: true},
}

const backwardRowsThreads = 256

// keys returns the keys of a thread block.
func (k *backwardKernel) keys() int {
	if k.wide {
		return 64
	}
	return 128
}

// canBackward lists what the kernels support. Workers do not change gradients.
var canBackward = attn.Can{Name: "gradients and dropout on GPUs", Features: canForward.Features | attn.Varied, KV: gpu.Halves}

// canForward is canBackward of attention with dropout.
var canForward = attn.Can{Name: "gradients and dropout on GPUs", Features: attn.Causal | attn.SetWorkers | backwardScoredFeatures, KV: gpu.Halves}

// canBackwardWide is canBackward of float32.
var canBackwardWide = attn.Can{Name: "gradients of float32 on GPUs", Features: canForward.Features &^ attn.Dropout, KV: []attn.DType{attn.Float32}}

func canBackwardOf(kv attn.DType) *attn.Can {
	if kv == attn.Float32 {
		return &canBackwardWide
	}
	return &canBackward
}

// rowsOfRows returns the rows of a query block for the launch of rows.
func (k *backwardKernel) rowsOfRows() int {
	if k.groups {
		return backwardHopperRows
	}
	return k.rows
}

// shared returns the bytes of shared memory.
func (k *backwardKernel) shared() int {
	if k.wide { // rows are longer: BackwardWide
		return (2*k.keys()*(k.dim+4)+2*k.rows*(k.dim+4)+k.rows*2+k.keys()*(k.rows+8))*4 + 16
	}
	if k.groups { // BackwardHopper::SHARED
		n := 2*k.keys()*k.dim*2 + k.stages*(k.rows*k.dim*2+k.rows*8) + 2*k.rows*k.dim*2 + 2*k.keys()*k.rows*2 + 2*64*64*4 + 8*32
		if k.scored {
			n += 512
		}
		return n
	}
	return 2*k.keys()*k.dim*2 + k.keys()*128 + k.stages*(2*k.rows*k.dim*2+k.rows*8) + 16
}

// backwardParams is struct BackwardParams.
type backwardParams struct {
	q, k, v, out, outGrad, lse, lseGrad, dq, dk, dv           uint64 // addresses
	lengths, counters, rows, sums                             uint64
	batch, kvHeads, group, queries, keys, dim, blocks, causal int32
	scale                                                     float32
	_                                                         [4]byte
}

// Backward is a batch of attentions whose gradients are computed. Its workspace begins with a table.
type Backward struct {
	engine                             *Engine
	shape                              attn.Gradient
	kv                                 attn.DType
	kernel                             *backwardKernel
	rowsFunction, function             *cuda.Function
	sumsFunction                       *cuda.Function // writes dq
	biased                             *cuda.Function // function of a bias that begins at a multiple of 16 bytes; nil: the same
	biasFunction, sinksFunction        *cuda.Function
	written                            *writtenBackward // with a variant
	blocks                             int              // query blocks of a head
	counters, rows, terms, sums, bytes int64
}

// backwardLaunch is a launch of a function.
type backwardLaunch struct {
	*cuda.Function
	cuda.Grid
	rows int // of a query block
}

// BackwardOperands is the memory of a [Backward], in the layout of [attn.Gradient]. LSE and DLSE are float32. DOut without a
// buffer means 0, and so does DLSE. Without DOut, V, Out and DV are unused. A bias has the type of Q, sinks are float32, tensors are those of
// the variant, and the gradients of all these are optional.
type BackwardOperands struct {
	Q, K, V, Out, LSE, DOut, DLSE gpu.Memory
	DQ, DK, DV                    gpu.Memory
	Bias, DBias, Sinks, DSinks    gpu.Memory
	Tensors                       []Tensor
	DTensors                      []gpu.Memory // as Tensors
	Seed                          int64        // the seed of the forward pass's Dropout
	Workspace                     gpu.Bytes    // Bytes long; begins with Table
}

// CanBackward returns an error if no GPU computes the gradients of s with operands of type kv. Errors wrap attn.ErrShape,
// attn.ErrDType and attn.ErrUnsupported.
func CanBackward(op string, s *attn.Gradient, kv attn.DType) error {
	if err := s.Check(op); err != nil {
		return err
	}
	if err := canBackwardOf(kv).Do(op, backwardProblem(s, kv)); err != nil {
		return err
	}
	most := backwardTable[len(backwardTable)-1].dim
	switch rows := attn.Product(s.Batch, s.Heads, s.Queries+64); {
	case s.Dim%8 != 0 || s.Dim > most:
		return gpu.Errorf(op, attn.ErrUnsupported, "%s: head dim %d: kernels have multiples of 8 up to %d", canBackward.Name, s.Dim, most)
	case rows > math.MaxInt32/2 || attn.Product(s.Batch, s.KVHeads, s.Keys) > math.MaxInt32/2:
		return gpu.Errorf(op, attn.ErrUnsupported, "%s: a batch of %d with %d heads, %d queries and %d keys: kernels have at most 2^30 rows", canBackward.Name, s.Batch, s.Heads, s.Queries, s.Keys)
	}
	if err := canWritten(op, s); err != nil {
		return err
	}
	return canScores(op, s)
}

func backwardProblem(s *attn.Gradient, kv attn.DType) *attn.Problem {
	return &attn.Problem{
		Heads: s.Heads, KVHeads: s.KVHeads, Dim: s.Dim, ValueDim: s.ValueDim, Mask: s.Mask, Score: s.Score, Workers: s.Workers,
		Pages: attn.Separate(kv, s.Dim, s.ValueDim, attn.PageStrides{}, attn.PageStrides{}),
	}
}

// NewBackward checks s, and loads the kernels. Errors: those of [CanBackward], and the driver's.
func (e *Engine) NewBackward(s *attn.Gradient, kv attn.DType) (*Backward, error) {
	const op = "backward"
	if e.closed.Load() {
		return nil, gpu.Errorf(op, cuda.ErrClosed, "the engine")
	}
	if err := CanBackward(op, s, kv); err != nil {
		return nil, err
	}
	reduced := reducedGradient(s)
	s = &reduced
	wide := kv == attn.Float32
	scored := wide || backwardProblem(s, kv).Features()&(backwardScoredFeatures|attn.Varied) != 0
	i := slices.IndexFunc(backwardTable, func(k backwardKernel) bool {
		return k.scored == scored && k.wide == wide && s.Dim <= k.dim && k.capability.have(e.info.Capability)
	})
	if i < 0 {
		return nil, gpu.Errorf(op, attn.ErrUnsupported, "%s of compute capability %d", canBackward.Name, e.info.Capability)
	}
	b := &Backward{engine: e, shape: *s, kv: kv, kernel: &backwardTable[i]}
	k := b.kernel
	if need := k.shared(); need > e.info.SharedPerBlockMost {
		return nil, gpu.Errorf(op, attn.ErrUnsupported, "%s: head dim %d needs %d bytes of shared memory; the GPU has %d", canBackward.Name, s.Dim, need, e.info.SharedPerBlockMost)
	}
	if err := b.load(); err != nil {
		return nil, err
	}
	if s.Variant != nil {
		if err := b.loadWritten(op); err != nil {
			return nil, err
		}
	}
	b.blocks = attn.Ceil(s.Queries, k.rows)
	queryBlocks := int64(s.Batch) * int64(s.Heads) * int64(b.blocks)
	align := func(n int64) int64 { return (n + 255) / 256 * 256 }
	b.counters = align(int64(len(b.Table())))
	adders := queryBlocks // counters: kernels of warp groups have one for each half of a query block
	if k.groups {
		adders *= 2
	}
	b.rows = align(b.layWritten(b.counters + 4*(1+3*int64(s.Batch)*int64(s.KVHeads)+adders)))
	b.terms = align(b.rows + queryBlocks*int64(k.rows)*8)
	b.sums = b.terms
	if s.Score.Sinks {
		b.sums = align(b.terms + queryBlocks*int64(k.rows)*4)
	}
	b.bytes = b.sums
	if k.groups || s.Keys > k.keys() { // with one key block, dq needs no sums
		b.bytes += queryBlocks * int64(k.rows) * int64(k.dim) * 4
	}
	return b, nil
}

func (b *Backward) load() (err error) {
	e := b.engine
	e.loading.Lock()
	defer e.loading.Unlock()
	if b.kernel.scored {
		return b.loadScored()
	}
	m, err := gpu.Module(e.dev, backwardUnit)
	if err != nil {
		return err
	}
	if b.rowsFunction, err = m.Function(fmt.Sprintf("backward_rows_%s_%d", gpu.Name(b.kv), b.kernel.rowsOfRows())); err != nil {
		return err
	}
	if b.kernel.groups {
		return b.loadGroups(backwardHopperUnit, "backward_hopper")
	}
	b.function, err = gpu.WithShared(m, fmt.Sprintf("backward_%s_%d", gpu.Name(b.kv), b.kernel.dim))
	return err
}

// loadGroups loads the kernels of warp groups from a module. name is the prefix of the entry that writes dq, and of the main entry. With
// masks and ALiBi, and at most a soft cap or a bias besides, there are faster main entries.
func (b *Backward) loadGroups(unit, name string) error {
	e := b.engine
	m, err := gpu.Module(e.dev, unit)
	if err != nil {
		return err
	}
	if b.sumsFunction, err = m.Function(fmt.Sprintf("%s_sums_%s_%d", name, gpu.Name(b.kv), b.kernel.dim)); err != nil {
		return err
	}
	function := func(name string) (*cuda.Function, error) {
		return gpu.WithShared(m, fmt.Sprintf("%s_%s_%d", name, gpu.Name(b.kv), b.kernel.dim))
	}
	if b.kernel.scored {
		switch backwardProblem(&b.shape, b.kv).Features() & backwardManyFeatures {
		case 0:
			name = "backward_hopper_masked"
		case attn.Cap:
			name = "backward_hopper_capped"
		case attn.Dropout:
			name = "backward_hopper_dropped"
		case attn.AddedBias:
			if b.shape.Keys%8 == 0 && b.shape.Variant == nil {
				if b.biased, err = function("backward_hopper_biased"); err != nil {
					return err
				}
			}
		}
	}
	b.function, err = function(name)
	return err
}

// Bytes returns the size of the workspace.
func (b *Backward) Bytes() int64 { return b.bytes }

// Table returns the beginning of the workspace: queries and keys of each sequence, and slopes.
func (b *Backward) Table() []byte {
	table := make([]int32, 0, 2*b.shape.Batch)
	for i := range b.shape.Batch {
		table = append(table, int32(b.shape.QueriesOf(i)), int32(b.shape.Live(i)))
	}
	return append(gpu.BytesOf(table), gpu.BytesOf(b.slopes())...)
}

// check returns an error if the operands do not fit.
func (b *Backward) check(o *BackwardOperands) error {
	const op = "backward"
	s, out := &b.shape, o.DOut.Buffer != nil
	for _, x := range []struct {
		name   string
		of     *gpu.Memory
		n      int
		unused bool
	}{
		{"q", &o.Q, attn.Product(s.Batch, s.Heads, s.Queries, s.Dim), false},
		{"k", &o.K, attn.Product(s.Batch, s.KVHeads, s.Keys, s.Dim), false},
		{"v", &o.V, attn.Product(s.Batch, s.KVHeads, s.Keys, s.Dim), !out},
		{"out", &o.Out, attn.Product(s.Batch, s.Heads, s.Queries, s.Dim), !out},
		{"the gradient of out", &o.DOut, attn.Product(s.Batch, s.Heads, s.Queries, s.Dim), !out},
		{"dq", &o.DQ, attn.Product(s.Batch, s.Heads, s.Queries, s.Dim), false},
		{"dk", &o.DK, attn.Product(s.Batch, s.KVHeads, s.Keys, s.Dim), false},
		{"dv", &o.DV, attn.Product(s.Batch, s.KVHeads, s.Keys, s.Dim), !out},
	} {
		if x.unused {
			if x.of.Buffer != nil {
				return gpu.Errorf(op, attn.ErrShape, "%s without a gradient of out", x.name)
			}
			continue
		}
		if x.of.DType != b.kv {
			return gpu.Errorf(op, attn.ErrDType, "%s is %v; it must be %v", x.name, x.of.DType, b.kv)
		}
		if err := x.of.Check(op, x.name, x.n); err != nil {
			return err
		}
	}
	rows := attn.Product(s.Batch, s.Heads, s.Queries)
	if s.Variant == nil || !s.Variant.Unnormalised {
		if err := o.LSE.CheckFloats(op, "lse", rows); err != nil {
			return err
		}
	} else if !out || o.DLSE.Buffer != nil {
		return gpu.Errorf(op, attn.ErrUnsupported, "the gradient of a log-sum-exp of a variant that is Unnormalised")
	}
	if err := o.DLSE.CheckOptional(op, "the gradient of lse", rows); err != nil {
		return err
	}
	if err := b.checkScores(op, o); err != nil {
		return err
	}
	if err := b.checkTensors(op, o); err != nil {
		return err
	}
	return o.Workspace.Check(op, "the workspace", int(b.bytes), 1)
}

// problem returns the parameters without operands.
func (b *Backward) problem(w *gpu.Bytes) backwardParams {
	s := &b.shape
	p := backwardParams{
		lengths: w.Address(), counters: w.Address() + uint64(b.counters), rows: w.Address() + uint64(b.rows), sums: w.Address() + uint64(b.sums),
		batch: int32(s.Batch), kvHeads: int32(s.KVHeads), group: int32(s.Group()), queries: int32(s.Queries), keys: int32(s.Keys),
		dim: int32(s.Dim), blocks: int32(b.blocks), scale: float32(s.Scale),
	}
	if s.Causal {
		p.causal = 1
	}
	return p
}

// Run queues the gradients, after the table has been copied to the workspace. The bits are the same on every run.
func (b *Backward) Run(stream *cuda.Stream, o *BackwardOperands) error {
	if err := b.check(o); err != nil {
		return err
	}
	s, k, w := &b.shape, b.kernel, &o.Workspace
	p := b.problem(w)
	p.q, p.k, p.v, p.out, p.outGrad = o.Q.Address(), o.K.Address(), o.V.AddressOr0(), o.Out.AddressOr0(), o.DOut.AddressOr0()
	p.lse, p.lseGrad, p.dq, p.dk, p.dv = o.LSE.Address(), o.DLSE.AddressOr0(), o.DQ.Address(), o.DK.Address(), o.DV.AddressOr0()
	if s.Variant != nil && s.Variant.Unnormalised { // there is no log-sum-exp: any numbers will do
		p.lse = p.out
	}
	if err := stream.Set(w.Buffer, w.Offset+b.counters, 0, b.rows-b.counters); err != nil {
		return err
	}
	warps := s.Batch * s.Heads * b.blocks * k.rows
	if b.kv == attn.Float16 { // the rows of values, too
		warps += s.Batch * s.KVHeads * s.Keys
	}
	launches := []backwardLaunch{{b.rowsFunction, cuda.Grid{Blocks: [3]int{attn.Ceil(warps, backwardRowsThreads/32)}, Threads: [3]int{backwardRowsThreads}}, k.rowsOfRows()}}
	launches = append(launches, b.boundLaunches()...)
	main := backwardLaunch{b.function, cuda.Grid{Blocks: [3]int{s.Batch * s.KVHeads * attn.Ceil(s.Keys, k.keys())}, Threads: [3]int{k.warps * 32}, Shared: k.shared()}, k.rows}
	if b.biased != nil && o.Bias.Address()%16 == 0 {
		main.Function = b.biased
	}
	if k.groups {
		main.Blocks[0], main.Overlap = min(main.Blocks[0], b.engine.info.Multiprocessors), true
	}
	if launches = append(launches, main); k.groups {
		launches = append(launches, backwardLaunch{b.sumsFunction, cuda.Grid{Blocks: [3]int{s.Batch * s.Heads * b.blocks * 2}, Threads: [3]int{128}, Overlap: true}, k.rows})
	}
	var scored backwardScoredParams
	if k.scored {
		scored = backwardScoredParams{backwardParams: p, score: b.scores(o)}
		launches = append(launches, b.scoredLaunches(o)...)
	}
	var written *writtenBackwardParams
	if b.written != nil {
		written = b.writtenParams(scored, o)
		launches = append(launches, b.termLaunches(o)...)
	}
	var args cuda.Args
	for _, x := range launches {
		args.Reset()
		p.blocks = int32(b.blocks * k.rows / x.rows)
		switch {
		case written != nil: // kernels of modules have the first of these parameters
			written.blocks = p.blocks
			cuda.Struct(&args, written)
		case k.scored:
			scored.blocks = p.blocks
			cuda.Struct(&args, &scored)
		default:
			cuda.Struct(&args, &p)
		}
		args.Hold(w.Buffer)
		for _, m := range []*gpu.Memory{&o.Q, &o.K, &o.V, &o.Out, &o.LSE, &o.DOut, &o.DLSE, &o.DQ, &o.DK, &o.DV, &o.Bias, &o.DBias, &o.Sinks, &o.DSinks} {
			if m.Buffer != nil {
				args.Hold(m.Buffer)
			}
		}
		for i := range o.Tensors {
			args.Hold(o.Tensors[i].Memory.Buffer)
		}
		for i := range o.DTensors {
			if m := &o.DTensors[i]; m.Buffer != nil {
				args.Hold(m.Buffer)
			}
		}
		if err := x.Launch(stream, x.Grid, &args); err != nil {
			return err
		}
	}
	return nil
}
