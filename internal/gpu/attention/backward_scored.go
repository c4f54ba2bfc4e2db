package attention

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/dropout"
	"gorgonia.org/leanattention/internal/gpu"
)

// Gradients of attention with more than a causal mask (kernels/attn_backward_variant.cuh): the kernels of another unit, with
// more parameters, and a launch each for the gradients of a bias and of sinks.

const backwardScoredUnit, backwardWideUnit, backwardAgainUnit = "backward_variant", "backward_wide", "backward_again"

// backwardScoredFeatures are the features that need the kernels with scores.
const backwardScoredFeatures = attn.Window | attn.SinkTokens | attn.Cap | attn.SlopesOfHeads | attn.AddedBias | attn.Sinks | attn.Dropout

// backwardManyFeatures are the features of backwardScoredFeatures that the kernels of warp groups for masks and ALiBi lack.
const backwardManyFeatures = attn.Cap | attn.AddedBias | attn.Dropout

// backwardScores is struct BackwardScores.
type backwardScores struct {
	slopes, sinks, bias, biasGrad, sinkGrad, sinkTerms uint64 // addresses
	biasSequence, biasHead, biasRow                    int64
	cap, reciprocal, biasFactor                        float32
	window, sinkTokens                                 int32
	seedLow, seedHigh, below                           uint32
	factor                                             float32
	rows                                               int32
}

// backwardScoredParams is struct BackwardScoredParams.
type backwardScoredParams struct {
	backwardParams
	score backwardScores
}

// loadScored loads the kernels with scores.
func (b *Backward) loadScored() error {
	unit := backwardScoredUnit
	if b.kernel.wide {
		unit = backwardWideUnit
	}
	m, err := gpu.Module(b.engine.dev, unit)
	if err != nil {
		return err
	}
	e, element := b.engine, gpu.Name(b.kv)
	if b.rowsFunction, err = m.Function(fmt.Sprintf("backward_scored_rows_%s_%d", element, b.kernel.rowsOfRows())); err != nil {
		return err
	}
	if b.kernel.groups {
		err = b.loadGroups(backwardHopperScoredUnit, "backward_hopper_scored")
	} else if b.shape.Variant == nil {
		b.function, err = gpu.WithShared(m, fmt.Sprintf("backward_scored_%s_%d", element, b.kernel.dim))
	}
	if err != nil {
		return err
	}
	if b.shape.Sinks {
		if b.sinksFunction, err = m.Function("backward_sinks"); err != nil {
			return err
		}
	}
	if b.shape.Bias != (attn.Bias{}) && b.shape.Variant == nil {
		name := "backward_bias"
		if b.kernel.groups {
			if m, err = gpu.Module(e.dev, backwardAgainUnit); err != nil {
				return err
			}
			name = "backward_again"
		}
		if b.biasFunction, err = gpu.WithShared(m, fmt.Sprintf("%s_%s_%d", name, element, b.kernel.dim)); err != nil {
			return err
		}
	}
	return err
}

// checkScores returns an error if the operands of score changes do not fit.
func (b *Backward) checkScores(op string, o *BackwardOperands) error {
	s := &b.shape
	for _, x := range []struct {
		name     string
		of       *gpu.Memory
		there    bool // the problem has it
		n        int
		dtype    attn.DType
		optional bool
	}{
		{"bias", &o.Bias, s.Bias != (attn.Bias{}), s.Bias.Size(), b.kv, false},
		{"the gradient of bias", &o.DBias, s.Bias != (attn.Bias{}), s.Bias.Size(), b.kv, true},
		{"sinks", &o.Sinks, s.Score.Sinks, s.Heads, attn.Float32, false},
		{"the gradient of sinks", &o.DSinks, s.Score.Sinks, s.Heads, attn.Float32, true},
	} {
		switch {
		case x.of.Buffer == nil && (x.optional || !x.there):
			continue
		case !x.there:
			return gpu.Errorf(op, attn.ErrShape, "%s of a problem without", x.name)
		case x.of.DType != x.dtype:
			return gpu.Errorf(op, attn.ErrDType, "%s is %v; it must be %v", x.name, x.of.DType, x.dtype)
		}
		if err := x.of.CheckLoose(op, x.name, x.n); err != nil {
			return err
		}
	}
	return nil
}

// scores returns the kernels' parameters. The slopes are in the workspace behind the lengths.
func (b *Backward) scores(o *BackwardOperands) (p backwardScores) {
	s, w := &b.shape, &o.Workspace
	if s.Window < s.Keys { // a larger window hides nothing
		p.window, p.sinkTokens = int32(s.Window), int32(min(s.SinkTokens, s.Keys))
	}
	if s.Window == 0 {
		p.sinkTokens = 0
	}
	if s.Cap != 0 {
		p.cap, p.reciprocal = float32(s.Cap), float32(1/s.Cap)
	}
	if s.Slopes != "" {
		p.slopes = w.Address() + uint64(s.Batch)*8
	}
	if s.Bias != (attn.Bias{}) {
		p.bias, p.biasGrad, p.biasFactor = o.Bias.Address(), o.DBias.AddressOr0(), float32(s.Bias.Factor())
		p.biasSequence, p.biasHead, p.biasRow = biasStrides(&s.Bias)
	}
	if s.Score.Sinks {
		p.sinks = o.Sinks.Address()
		if o.DSinks.Buffer != nil {
			p.sinkGrad, p.sinkTerms = o.DSinks.Address(), w.Address()+uint64(b.terms)
		}
	}
	p.factor, p.rows = 1, int32(b.blocks*b.kernel.rows)
	if rule := dropout.Of(s.Dropout, o.Seed); !rule.None() && o.DOut.Buffer != nil { // the log-sum-exp has no dropout
		p.seedLow, p.seedHigh, p.below, p.factor = uint32(rule.Seed), uint32(rule.Seed>>32), uint32(rule.Below), float32(1/rule.Keep())
	}
	return p
}

// slopes returns the slopes of query heads.
func (b *Backward) slopes() (all []float32) {
	for h := range b.shape.Slopes.Len() {
		all = append(all, float32(b.shape.Slopes.Of(h)))
	}
	return all
}

// againRows is the number of rows of a query block of the kernels of warp groups that compute scores once more (kernels/attn_backward_again.cuh).
const againRows = 128

// againShared returns the bytes of shared memory of such a kernel, which has `own` bytes beside the ring.
func (k *backwardKernel) againShared(own int) int {
	return k.againStages()*(2*againRows*k.dim*2+againRows*8+16) + own
}

// againStages returns the pairs of tiles in the ring of such a kernel.
func (k *backwardKernel) againStages() int {
	if k.dim > 64 {
		return 3
	}
	return 5
}

// scoredLaunches returns the launches behind the gradients of q, k and v.
func (b *Backward) scoredLaunches(o *BackwardOperands) (all []backwardLaunch) {
	s, k := &b.shape, b.kernel
	if o.DBias.Buffer != nil && b.written == nil {
		pieces, rows := attn.Product(attn.Ceil(s.Keys, k.keys()), s.Bias.Heads, s.Bias.Sequences), k.rows
		if k.groups {
			rows = againRows
		}
		if s.Bias.Queries != 1 {
			pieces *= attn.Ceil(s.Queries, rows)
		}
		grid := cuda.Grid{Blocks: [3]int{pieces}, Threads: [3]int{k.warps * 32}, Shared: 2*k.keys()*k.dim*2 + 2*rows*k.dim*2 + rows*8}
		switch {
		case k.wide:
			grid.Shared = k.shared()
		case k.groups:
			grid.Shared = k.againShared(0)
		}
		all = append(all, backwardLaunch{b.biasFunction, grid, k.rows})
	}
	if o.DSinks.Buffer != nil {
		all = append(all, backwardLaunch{b.sinksFunction, cuda.Grid{Blocks: [3]int{s.Heads}, Threads: [3]int{backwardRowsThreads}}, k.rows})
	}
	return all
}

// Attention with dropout itself (kernels/attn_dropout.cuh).

const dropoutUnit = "dropout"

const dropoutRows, dropoutKeys = 128, 64 // of a thread block, and of a step

// dropoutParams is struct DropoutParams.
type dropoutParams struct {
	backwardParams
	score backwardScores
	out   uint64
	lse   uint64 // 0: not wanted
}

// DropoutOperands is the memory of attention with dropout, in the layout of [attn.Gradient]. LSE is optional.
type DropoutOperands struct {
	Q, K, V, Bias, Sinks, Out, LSE gpu.Memory
	Workspace                      gpu.Bytes // begins with Table, which is all that is used
	Seed                           int64
}

// CanForward returns an error if [Backward.Forward] does not compute p: it has a schedule of its own.
func CanForward(op string, p *attn.Problem) error {
	if kv := p.Pages.Key().DType; kv == attn.Float32 {
		return canBackwardWide.Do(op, p)
	}
	return canForward.Do(op, p)
}

func (b *Backward) dropoutFunction(dim int) (*cuda.Function, error) {
	e := b.engine
	e.loading.Lock()
	defer e.loading.Unlock()
	m, err := gpu.Module(e.dev, dropoutUnit)
	if err != nil {
		return nil, err
	}
	return gpu.WithShared(m, fmt.Sprintf("dropout_%s_%d", gpu.Name(b.kv), dim))
}

// Forward queues the attention, with dropout or without, after the table has been copied to the workspace.
func (b *Backward) Forward(stream *cuda.Stream, o *DropoutOperands) error {
	const op = "attention with dropout"
	s, table := &b.shape, b.Table()
	for _, x := range []struct {
		name        string
		of          *gpu.Memory
		heads, rows int
	}{{"q", &o.Q, s.Heads, s.Queries}, {"k", &o.K, s.KVHeads, s.Keys}, {"v", &o.V, s.KVHeads, s.Keys}, {"out", &o.Out, s.Heads, s.Queries}} {
		if x.of.DType != b.kv {
			return gpu.Errorf(op, attn.ErrDType, "%s is %v; it must be %v", x.name, x.of.DType, b.kv)
		}
		if err := x.of.Check(op, x.name, attn.Product(s.Batch, x.heads, x.rows, s.Dim)); err != nil {
			return err
		}
	}
	if err := o.LSE.CheckOptional(op, "lse", attn.Product(s.Batch, s.Heads, s.Queries)); err != nil {
		return err
	}
	of := BackwardOperands{Bias: o.Bias, Sinks: o.Sinks, DOut: o.Out, Workspace: o.Workspace, Seed: o.Seed}
	if err := b.checkScores(op, &of); err != nil {
		return err
	}
	if err := o.Workspace.Check(op, "the workspace", len(table), 1); err != nil {
		return err
	}
	dim := 64
	if s.Dim > dim {
		dim = 128
	}
	f, err := b.dropoutFunction(dim)
	if err != nil {
		return err
	}
	blocks := attn.Ceil(s.Queries, dropoutRows)
	p := dropoutParams{backwardParams: b.problem(&o.Workspace), score: b.scores(&of), out: o.Out.Address(), lse: o.LSE.AddressOr0()}
	p.q, p.k, p.v, p.blocks = o.Q.Address(), o.K.Address(), o.V.Address(), int32(blocks)
	var args cuda.Args
	cuda.Struct(&args, &p)
	args.Hold(o.Workspace.Buffer)
	for _, m := range []*gpu.Memory{&o.Q, &o.K, &o.V, &o.Bias, &o.Sinks, &o.Out, &o.LSE} {
		if m.Buffer != nil {
			args.Hold(m.Buffer)
		}
	}
	grid := cuda.Grid{Blocks: [3]int{blocks * s.Batch * s.Heads}, Threads: [3]int{backwardRowsThreads}, Shared: dropoutRows*dim*2 + 4*dropoutKeys*dim*2}
	if b.kernel.groups { // DropoutHopper: twice the keys in a step, and barriers
		grid.Threads[0], grid.Shared = 384, dropoutRows*dim*2+8*dropoutKeys*dim*2+8*9
	}
	return f.Launch(stream, grid, &args)
}

// canScores returns an error if the soft cap or the size of the bias is out of range.
func canScores(op string, s *attn.Gradient) error {
	if s.Cap != 0 && (s.Cap < 0x1p-100 || s.Cap > 0x1p100) {
		return gpu.Errorf(op, attn.ErrUnsupported, "%s: a soft cap of %v: kernels have 2^-100 to 2^100", canBackward.Name, s.Cap)
	}
	if pieces := attn.Product(attn.Ceil(s.Keys, 64), s.Bias.Heads, s.Bias.Sequences, s.Queries); pieces > math.MaxInt32 {
		return gpu.Errorf(op, attn.ErrUnsupported, "%s: a bias of %d sequences and %d heads for %d queries and %d keys: kernels have at most 2^31 pieces", canBackward.Name, s.Bias.Sequences, s.Bias.Heads, s.Queries, s.Keys)
	}
	return nil
}
