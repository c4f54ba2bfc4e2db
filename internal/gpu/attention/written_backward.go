package attention

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sync"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/variant"
)

// Gradients of attention with a user's variant (kernels/attn_written_backward.cuh): the kernels with scores, whose main one is printed and
// compiled at run time, and launches for the gradients of tensors and of a bias.

// writtenGradients is struct WrittenGradients.
type writtenGradients struct {
	sums, largest, factor uint64 // addresses
	out                   [variant.MaxTensors + 1]uint64
	begin                 [variant.MaxTensors + 2]int32
	lines, shift          int32
	bound                 float32
}

// writtenBackwardParams is struct WrittenBackwardParams.
type writtenBackwardParams struct {
	backwardParams
	score     backwardScores
	written   writtenParams
	gradients writtenGradients
}

// writtenBackward is the part of a [Backward] for variants.
type writtenBackward struct {
	// Functions: the main one; with bounds, the one that multiplies bounds; with factors, the one that finds the factor; if the variant is
	// Unnormalised, at last that of rows.
	main    printedKernel
	terms   printedKernel // functions: results, largest terms, sums; without a kernel no bias and no tensor without lines has a gradient
	ofLines printedKernel // functions: results, and the sums of lines of each of across, or of heads and keys; without a kernel no tensor with lines has a gradient
	lines   int32         // bits of tensors whose elements belong to lines (variant.Line)
	across  []int         // partial derivatives whose lines are queries or distances; those of heads and keys are with the first one
	bound   float32       // on derivatives of scores: if more than writtenFlat, float16 has a launch that multiplies bounds; 0: a launch finds the bound
	bounds  bool
	begin   [variant.MaxTensors + 2]int32
	offsets struct{ sums, largest, factor int64 } // in the workspace
}

// Parts of a printed unit of gradients, which are lines of no table.
var writtenMain, writtenBounded, writtenFactored, writtenTerms, writtenLines = new(kernel), new(kernel), new(kernel), new(kernel), new(kernel)

const (
	writtenWarps = 8 // of the kernels that compute scores once more
	// writtenSteep is the most that a bound on derivatives of scores from intervals may be. Larger ones are measured: float16 would lose bits.
	writtenSteep = 4
	// writtenFlat is the largest bound for which no product overflows float16 without the launch that multiplies bounds: 2^16 over 2^15, and
	// a weight of an Unnormalised variant may be e^0.5.
	writtenFlat = 1.1
	// writtenScores is the most scores that integers have the sums of.
	writtenScores = 1 << 37
	// writtenPlaces is the number of integers for an element of a line (WRITTEN_PLACES), and writtenMost the most of a tensor.
	writtenPlaces, writtenMost = 33, 1 << 25
)

// writtenRows returns the rows of a query block of the kernels that compute scores once more.
func (k *backwardKernel) writtenRows() int { return 64 * 64 / k.dim }

// reducedGradient returns s with the mask Causal in place of the condition key <= query of its variant.
func reducedGradient(s *attn.Gradient) attn.Gradient {
	own := *s
	if own.Variant != nil {
		if rest, ok := own.Variant.WithoutCausal(); ok {
			own.Causal, own.Variant = true, rest
		}
	}
	return own
}

// canWritten returns an error if no GPU computes the gradients of s with its variant.
func canWritten(op string, s *attn.Gradient) error {
	v := s.Variant
	if v == nil {
		return nil
	}
	refuse := func(format string, args ...any) error {
		return gpu.Errorf(op, attn.ErrUnsupported, canBackward.Name+": "+format, args...)
	}
	switch {
	case s.Dropout != 0:
		return refuse("a dropout of %v beside a variant", s.Dropout)
	case s.SinkTokens != 0:
		return refuse("%d sink tokens beside a variant: Visible can show first tokens", s.SinkTokens)
	case int64(attn.Product(s.Batch, s.Heads, s.Queries, s.Keys)) > writtenScores:
		return refuse("a variant, with %d scores: kernels have at most 2^37", attn.Product(s.Batch, s.Heads, s.Queries, s.Keys))
	}
	elements := s.Bias.Size()
	for _, shape := range s.DTensors {
		elements += elementsOf(shape)
	}
	if elements > math.MaxInt32 {
		return refuse("gradients of %d elements of a variant's tensors and of a bias: kernels have at most 2^31", elements)
	}
	return nil
}

// elementsOf returns the number of elements of a shape; 0 for none.
func elementsOf(shape []int) int {
	if shape == nil {
		return 0
	}
	return attn.Product(shape...)
}

// bounds returns the ranges of a variant's variables.
func writtenBounds(s *attn.Gradient) *variant.Bounds {
	first, keys := 0, 1
	for b := range s.Batch {
		if live := s.Live(b); live > 0 && s.QueriesOf(b) > 0 {
			first, keys = min(first, s.Position(b, 0)), max(keys, live)
		}
	}
	return &variant.Bounds{
		Query: variant.Between(first, keys-1), Key: variant.Between(0, keys-1), Head: variant.Between(0, s.Heads-1), Sequence: variant.Between(0, s.Batch-1),
	}
}

// loadWritten compiles the kernels for the variant.
func (b *Backward) loadWritten(op string) error {
	s, w := &b.shape, &writtenBackward{bound: 1}
	b.written = w
	scratch, bounds := make([]variant.Interval, len(s.Variant.Nodes)), writtenBounds(s)
	bounds.Finite = true // without finite scores there are no gradients
	if b.kv == attn.Float16 && s.Variant.Unnormalised {
		if r := s.Variant.Range(s.Variant.Score, bounds, scratch); !(r.Hi <= .5) {
			return gpu.Errorf(op, attn.ErrUnsupported, "%s: a variant that is Unnormalised, in float16: intervals do not show that Score is at most 0, so a weight may be too large; use bfloat16", canBackward.Name)
		}
	}
	if b.kv == attn.Float16 && !s.Variant.Linear() {
		r := s.Variant.Range(s.Variant.Slope, bounds, scratch)
		steep := max(math.Abs(r.Lo), math.Abs(r.Hi))
		if w.bound = float32(steep); !(steep <= writtenSteep) {
			w.bound = 0
		}
		w.bounds = !(steep <= writtenFlat)
	}
	w.layLines(s, b.kernel)
	others := s.Bias.Size() > 0
	for i, shape := range s.DTensors {
		others = others || shape != nil && w.lines>>i&1 == 0
	}
	line := writtenMain
	switch {
	case w.bounds && w.bound == 0:
		line = writtenFactored
	case w.bounds:
		line = writtenBounded
	}
	type part struct {
		line *kernel
		to   *printedKernel
	}
	made := []part{{line, &w.main}}
	if others {
		made = append(made, part{writtenTerms, &w.terms})
	}
	if w.lines != 0 {
		made = append(made, part{writtenLines, &w.ofLines})
	}
	failed := make([]error, len(made))
	var work sync.WaitGroup
	for i, m := range made {
		work.Go(func() { *m.to, failed[i] = b.printBackward(op, m.line) })
	}
	work.Wait()
	if i := slices.IndexFunc(failed, func(err error) bool { return err != nil }); i >= 0 {
		return failed[i]
	}
	b.function = w.main.functions[0]
	if s.Variant.Unnormalised {
		b.rowsFunction = w.main.functions[len(w.main.functions)-1]
	}
	return nil
}

// linesShared returns the bytes of shared memory of sums of queries or distances, beside the ring (WrittenLines::BYTES).
func (k *backwardKernel) linesShared() int {
	rows := 64
	if k.dim > 64 {
		rows = 32
	}
	return 128*(rows+8)*4 + 256/rows*256*4
}

// layLines finds the tensors whose elements belong to lines, and the first sum of each tensor and of the bias.
func (w *writtenBackward) layLines(s *attn.Gradient, k *backwardKernel) {
	any := make([]bool, variant.MaxTensors)
	for n, partial := range s.Variant.Partials {
		line, tensor := s.Variant.LineOf(partial), s.Variant.Nodes[partial.Element].Tensor
		any[tensor] = any[tensor] || line == variant.AnyLine
		if line == variant.QueryLine || line == variant.DistanceLine {
			w.across = append(w.across, n)
		}
	}
	at := 0
	for i := range w.begin {
		w.begin[i] = int32(at)
		switch {
		case i < len(s.DTensors) && s.DTensors[i] != nil:
			n := elementsOf(s.DTensors[i])
			if k.groups && !any[i] && n*writtenPlaces <= writtenMost {
				w.lines |= 1 << i
				n *= writtenPlaces
			}
			at += n
		case i == variant.MaxTensors:
			at += s.Bias.Size()
		}
	}
}

// printBackward compiles a part of the unit.
func (b *Backward) printBackward(op string, line *kernel) (printedKernel, error) {
	g := backwardProblem(&b.shape, b.kv)
	g.QueryType, g.Dim = b.kv, b.kernel.dim // one kernel for head dims up to that one
	key := keyOf(g, [2]any{b.kernel, line})
	if made, ok := b.engine.known(key); ok {
		return made, nil
	}
	k, format := b.kernel, formats[b.kv]
	text := g.Variant.GradientCUDA(loadsOf(g), key.flags())
	again := fmt.Sprintf("%s, %d, %d, 1, %d, 1", format, k.dim, writtenWarps, k.writtenRows())
	sum := sha256.Sum256([]byte(text.Text + again))
	name := fmt.Sprintf("backward_written_%s_%d_%s", gpu.Name(b.kv), k.dim, hex.EncodeToString(sum[:8]))
	source, names := fmt.Sprintf("#include \"attn_written_backward.cuh\"\n%s", text.Text), []string{name}
	switch {
	case line == writtenTerms:
		name += "_terms"
		source += fmt.Sprintf("WRITTEN_TERMS(%s, %s)\nWRITTEN_FINISH(%s_finish, %s)\n", name, again, name, format)
		names = []string{name + "_finish", name + "_largest", name + "_sums"}
	case line == writtenLines:
		name += "_lines"
		source += fmt.Sprintf("WRITTEN_FINISH(%s_finish, %s)\n", name, format)
		names = []string{name + "_finish"}
		few := true
		for _, n := range append(slices.Clip(b.written.across), -1)[:max(len(b.written.across), 1)] {
			names = append(names, fmt.Sprintf("%s_%d", name, len(names)))
			source += fmt.Sprintf("WRITTEN_LINES(%s, %d, %t, %s, %d, %d, %d)\n", names[len(names)-1], n, few, format, k.dim, k.againStages(), k.rows)
			few = false
		}
	case k.groups:
		source += fmt.Sprintf("WRITTEN_BACKWARD_HOPPER(%s, %s, %d, %d, %d)\n", name, format, k.dim, k.rows, k.stages)
	default:
		source += fmt.Sprintf("WRITTEN_BACKWARD(%s, %s, %d, %d, 1, %d, %d)\n", name, format, k.dim, k.warps, k.rows, k.stages)
	}
	if line == writtenBounded || line == writtenFactored {
		names = append(names, name+"_bounds")
		source += fmt.Sprintf("WRITTEN_BOUNDS(%s)\n", names[1])
	}
	if line == writtenFactored {
		names = append(names, name+"_factors")
		source += fmt.Sprintf("WRITTEN_FACTORS(%s, %s)\n", names[2], again)
	}
	if line != writtenTerms && line != writtenLines && g.Variant.Unnormalised {
		names = append(names, name+"_rows")
		source += fmt.Sprintf("WRITTEN_ROWS(%s_rows, %s, %d)\n", name, format, k.rowsOfRows())
	}
	return b.engine.compile(op, key, line, text.Numbers, source, names)
}

// layWritten lays out the memory that the variant's kernels need, from an offset of the workspace on, and returns its end.
func (b *Backward) layWritten(from int64) int64 {
	w := b.written
	if w == nil {
		return from
	}
	elements := int64(w.begin[len(w.begin)-1])
	w.offsets.sums = (from + 7) / 8 * 8
	w.offsets.largest = w.offsets.sums + 8*elements
	w.offsets.factor = w.offsets.largest
	if w.terms.kernel != nil {
		w.offsets.factor += 4 * elements
	}
	return w.offsets.factor + 4
}

// checkTensors returns an error if the variant's tensors or their gradients do not fit.
func (b *Backward) checkTensors(op string, o *BackwardOperands) error {
	s := &b.shape
	if s.Variant == nil {
		return nil
	}
	if len(o.Tensors) != len(s.Variant.Tensors) {
		return gpu.Errorf(op, attn.ErrShape, "%d tensors; the variant has %d", len(o.Tensors), len(s.Variant.Tensors))
	}
	var shapes [][]int
	for i, d := range s.Variant.Tensors {
		t := &o.Tensors[i]
		if !d.Int && t.Memory.DType != b.kv {
			return gpu.Errorf(op, attn.ErrDType, "%s is %v; it must be %v as the queries", d.Name, t.Memory.DType, b.kv)
		}
		if size := elementsOf(t.Shape); size > math.MaxInt32 {
			return gpu.Errorf(op, attn.ErrShape, "%s has shape %v: %d elements are the most on a GPU", d.Name, t.Shape, math.MaxInt32)
		} else if err := t.Memory.CheckLoose(op, d.Name, size); err != nil {
			return err
		}
		shapes = append(shapes, t.Shape)
	}
	for i, x := range o.DTensors {
		if x.Buffer == nil {
			continue
		}
		name := "the gradient of " + s.Variant.Tensors[i].Name
		if i >= len(s.DTensors) || s.Variant.Tensors[i].Int || !slices.Equal(s.DTensors[i], o.Tensors[i].Shape) || x.DType != b.kv {
			return gpu.Errorf(op, attn.ErrShape, "%s, %v of %v, was not asked for", name, x.DType, o.Tensors[i].Shape)
		}
		if err := x.CheckLoose(op, name, elementsOf(s.DTensors[i])); err != nil {
			return err
		}
	}
	if err := s.Variant.CheckIndices(shapes, writtenBounds(s)); err != nil {
		return gpu.Errorf(op, attn.ErrShape, "%v", err)
	}
	return nil
}

// writtenParams returns the parameters of the variant's kernels.
func (b *Backward) writtenParams(scored backwardScoredParams, o *BackwardOperands) *writtenBackwardParams {
	s, w := &b.shape, b.written
	p := &writtenBackwardParams{backwardParams: scored.backwardParams, score: scored.score}
	copy(p.written.numbers[:], w.main.numbers)
	for i := range o.Tensors {
		t := &o.Tensors[i]
		p.written.tensors[i] = t.Memory.Address()
		for axis, size := range t.Shape {
			p.written.sizes[i*writtenAxes+axis] = int32(size)
		}
	}
	to := o.Workspace.Address()
	p.gradients = writtenGradients{
		sums: to + uint64(w.offsets.sums), largest: to + uint64(w.offsets.largest), factor: to + uint64(w.offsets.factor), begin: w.begin, lines: w.lines, bound: w.bound,
		shift: int32(60 - bits.Len(uint(attn.Product(s.Batch, s.Heads, s.Queries, s.Keys)))),
	}
	for i, x := range o.DTensors {
		p.gradients.out[i] = x.AddressOr0()
	}
	p.gradients.out[variant.MaxTensors] = o.DBias.AddressOr0()
	return p
}

// boundLaunches returns the launches before the main one.
func (b *Backward) boundLaunches() (all []backwardLaunch) {
	w := b.written
	if w == nil || !w.bounds {
		return nil
	}
	if w.bound == 0 {
		all = append(all, b.againLaunch(w.main.functions[2]))
	}
	return append(all, backwardLaunch{w.main.functions[1], cuda.Grid{Blocks: [3]int{attn.Ceil(b.shape.Batch*b.shape.KVHeads, backwardRowsThreads)}, Threads: [3]int{backwardRowsThreads}}, b.kernel.rows})
}

// termLaunches returns the launches for the gradients of tensors and of a bias.
func (b *Backward) termLaunches(o *BackwardOperands) (all []backwardLaunch) {
	w, info := b.written, &b.engine.info
	if w == nil {
		return nil
	}
	wanted := func(tensor int) bool { return tensor < len(o.DTensors) && o.DTensors[tensor].Buffer != nil }
	others, few := o.DBias.Buffer != nil, false
	if !others && !slices.ContainsFunc(o.DTensors, func(x gpu.Memory) bool { return x.Buffer != nil }) {
		return nil
	}
	for _, partial := range b.shape.Variant.Partials {
		tensor := b.shape.Variant.Nodes[partial.Element].Tensor
		if !wanted(tensor) {
			continue
		}
		if w.lines>>tensor&1 == 0 {
			others = true
		} else if line := b.shape.Variant.LineOf(partial); line == variant.HeadLine || line == variant.KeyLine {
			few = true
		}
	}
	if others {
		all = append(all, b.againLaunch(w.terms.functions[1]), b.againLaunch(w.terms.functions[2]))
	}
	if w.lines != 0 {
		for i, f := range w.ofLines.functions[1:] {
			own := 0
			need := i == 0 && few
			if i < len(w.across) {
				tensor := b.shape.Variant.Nodes[b.shape.Variant.Partials[w.across[i]].Element].Tensor
				need, own = need || wanted(tensor) && w.lines>>tensor&1 != 0, b.kernel.linesShared()
			}
			if need {
				blocks := b.shape.Batch * b.shape.KVHeads * attn.Ceil(b.shape.Keys, b.kernel.keys())
				all = append(all, backwardLaunch{f, cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{b.kernel.warps * 32}, Shared: b.kernel.againShared(own)}, b.kernel.rows})
			}
		}
	}
	finish := w.ofLines
	if w.lines == 0 {
		finish = w.terms
	}
	elements := int(w.begin[len(w.begin)-1])
	blocks := min(attn.Ceil(elements, backwardRowsThreads), 4*info.Multiprocessors)
	return append(all, backwardLaunch{finish.functions[0], cuda.Grid{Blocks: [3]int{blocks}, Threads: [3]int{backwardRowsThreads}}, b.kernel.rows})
}

// againLaunch is the launch of a function that computes scores once more.
func (b *Backward) againLaunch(f *cuda.Function) backwardLaunch {
	s, k := &b.shape, b.kernel
	rows := k.writtenRows()
	return backwardLaunch{f, cuda.Grid{
		Blocks: [3]int{s.Batch * s.KVHeads * attn.Ceil(s.Keys, k.keys())}, Threads: [3]int{writtenWarps * 32}, Shared: 2*k.keys()*k.dim*2 + 2*rows*k.dim*2 + rows*8,
	}, rows}
}
