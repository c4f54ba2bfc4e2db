package leanattention

import (
	"fmt"
	"slices"
	"sync"

	"gorgonia.org/leanattention/internal/kvstore"

	"gorgonia.org/leanattention/internal/ongpu"
	"gorgonia.org/leanattention/internal/operand"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/attention"
	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/variant"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Args are the operands of [Attend].
type Args struct {
	// Q is (batch, heads, Nq, d) or (heads, Nq, d), float32 or float64. All operands are *tensor.Dense, or all are
	// *device.Tensor.
	Q G.Value
	// K is (batch, kvHeads, Nk, d), and V (batch, kvHeads, Nk, dv), of one element type: float32, float64, [Float16] or
	// [BFloat16]. heads is a multiple of kvHeads: head h reads KV head h/(heads/kvHeads).
	K, V G.Value
	// Out is (batch, heads, Nq, dv), of Q's element type. Attend overwrites it.
	Out G.Value
	// LSE, if not nil, is (batch, heads, Nq), of Q's element type. It receives the log-sum-exp of each query ([LogSumExp]).
	LSE G.Value
	// Entropy, if not nil, is as LSE. It receives the entropy of each query's weights ([Entropy]). Parents, Segments and the options that
	// Entropy lists are [ErrUnsupported] then.
	Entropy G.Value
	// Mass, if not nil, is (batch, heads, Nq, n), of Q's element type, with n = ceil(Nk/t) for the t of [WithTileTokens]. It
	// receives the attention mass of each query: the sums of its weights p_j over the keys [i*t, (i+1)*t), for i from 0 to n-1.
	// Sinks have the rest of the weights. On a GPU, t is a multiple of 64. Parents, Segments and the options that [Mass] lists are
	// [ErrUnsupported] then.
	Mass G.Value
	// Lengths, if not nil, has the number of live keys of each sequence ([WithLengths]).
	Lengths []int
	// QueryLengths, if not nil, has the number of queries of each sequence ([WithQueryLengths]).
	QueryLengths []int
	// Bias, if not nil, is (batch, heads, Nq, Nk), of Q's element type; each size but the last may be 1. Attend adds it to the
	// scores ([WithBias]).
	Bias G.Value
	// Parents, if not nil, has the tree of each sequence, in the form of [Append.Parents], or nil for a sequence without one.
	// The tokens of a tree are the sequence's n queries and the last n of its keys, in the same order. n is Nq, or what
	// QueryLengths has; it is at most 64 and at most the number of the sequence's keys. Trees need [WithCausal].
	// [WithWindow] and [WithALiBi] are [ErrUnsupported] then.
	Parents [][]int
	// Seed says which weights [WithDropout] drops. A Seed of 0 drops none. Without WithDropout it is not used.
	Seed int64
	// Sinks, if not nil, is a vector with the attention sink of each query head ([WithSinks]), of Q's element type, or float32
	// for Q of [Float16] or [BFloat16].
	Sinks G.Value
	// Tensors are the tensors of [WithVariant], by their names in its expressions: floats of Q's element type, or ints.
	Tensors map[string]G.Value
	// Segments are keys and values that sequences share. They come before the sequences' own keys, so all queries of these
	// sequences see all of a segment.
	//
	//   - A segment is read once for all of its sequences, if that pays.
	//   - Attend attends to each segment by itself, and merges the states as [Merge] does, own keys first.
	//   - Segments go with [WithCausal], Parents, Sinks, [WithSoftCap] and every schedule but [Unfused]; anything else is
	//     [ErrUnsupported].
	Segments []Segment
}

// Segment is keys and values that several sequences of a batch share, such as a system prompt. Several segments correspond to
// FlashInfer's composable format, and several levels to its cascade (Ye et al., arXiv:2501.01005, section 3.1.2).
type Segment struct {
	// K is (kvHeads, Nk, d), and V (kvHeads, Nk, dv), of one element type. Both may have a first axis of size 1. kvHeads, d and
	// dv are those of [Args].
	K, V G.Value
	// Sequences lists the sequences of the batch that attend to the segment, each once. nil: all.
	Sequences []int
}

// Attend computes, for each sequence b, head h and query i,
//
//	out[b,h,i] = sum_j p_j v[b,h',j],  p = softmax_j(scale * q[b,h,i].k[b,h',j])
//
// over the keys j that the query sees, where h' is the KV head of h; 0 if the query sees none. It is [Attention] without a graph,
// with the same engine and results. The algorithm is LeanAttention (Sanovar et al., arXiv:2405.10480, algorithm 2).
//
//   - Options: all but [WithLengths], [WithQueryLengths], [WithBias] and [WithSinks], which are fields of Args, and
//     [WithRotary]. [WithDropout] has a nil seed: Args has the seed.
//   - Allocations: none in steady state, for row-major *tensor.Dense without segments. Other inputs are copied. Out and LSE must be
//     row-major.
//   - Concurrent calls are safe if their outputs differ.
//   - GPUs: if all operands are a [device.Tensor] of one GPU, Attend queues the work there and returns;
//     [device.Tensor.Download] waits. Q and Out are float32, [Float16] or [BFloat16], and LSE is float32. Out and LSE share no
//     tensor with another operand. Several GPUs compute if K and V are sharded by heads; otherwise the first GPU computes. Prompts
//     are fastest if Q, K, V and Out have one 16-bit type.
//
// Errors: [ErrShape], [ErrDType], [ErrLength], [ErrOption], [ErrUnsupported]; on a GPU also [ErrState] and [ErrClosed] for
// its tensors, and errors of the GPU.
func Attend(a Args, opts ...Option) (err error) {
	const op = "Attend"
	defer errs.RecoverTo(op, &err)
	c, err := newConfig(op, ofScores|optVariant|optQueriesAtEnd|optSchedule|optTileTokens|optWorkers|optInvariant|optDropout, opts)
	if err != nil {
		return err
	}
	if c.seed != nil {
		return errs.Errorf(op, ErrOption, "WithDropout(%v) has a node as the seed: give nil, and Args.Seed", c.score.Dropout)
	}
	if v := c.variantOf; v != nil && len(v.Tensors) > 0 {
		return errs.Errorf(op, ErrOption, "WithVariant has nodes as Tensors: give none, and Args.Tensors")
	}
	names := []string{"q", "k", "v", "out", "lse"}
	values := []G.Value{a.Q, a.K, a.V, a.Out, a.LSE}
	if a.LSE == nil {
		values = values[:4] // the log-sum-exp is not wanted
	}
	for i, s := range a.Segments {
		names = append(slices.Clip(names[:len(values)]), segmentName(i, "k"), segmentName(i, "v"))
		values = append(values, s.K, s.V)
	}
	first := len(values) - 2*len(a.Segments)
	for i, v := range [...]G.Value{a.Entropy, a.Mass} {
		if v != nil {
			names, values = append(slices.Clip(names[:len(values)]), (roleEntropy+role(i)).String()), append(values, v)
		}
	}
	gpu, err := ongpu.SamePlace(op, names, values)
	if err != nil {
		return err
	}
	values = values[:first]
	if gpu != nil {
		a, c := a, c // on the heap for calls on GPUs alone
		return attendDevice(op, gpu, append([]G.Value(nil), values...), &a, &c)
	}
	var t tensors
	for i, v := range values {
		if t[attendRoles[i]], err = ongpu.Dense(op, names[i], v); err != nil {
			return err
		}
	}
	p, err := newProblem(op, operand.OfTensor("q", t[roleQ]), operand.OfTensor("k", t[roleK]), operand.OfTensor("v", t[roleV]))
	if err != nil {
		return err
	}
	if err = c.checkHeads(op, p.heads); err != nil {
		return err
	}
	if a.Bias != nil {
		if t[roleBias], err = ongpu.Dense(op, "bias", a.Bias); err != nil {
			return err
		}
		if c.score.Bias, err = p.biasOf(op, operand.OfTensor("bias", t[roleBias])); err != nil {
			return err
		}
	}
	if a.Sinks != nil {
		if t[roleSinks], err = ongpu.Dense(op, "sinks", a.Sinks); err != nil {
			return err
		}
		if err = checkSinks(op, operand.OfTensor("sinks", t[roleSinks]), p.heads, p.query); err != nil {
			return err
		}
		c.score.Sinks = true
	}
	if c.variantOf != nil || len(a.Tensors) > 0 {
		if err = c.readTensors(op, &t, a.Tensors, a.LSE != nil, p.query); err != nil {
			return err
		}
	}
	if err = checkResult(op, roleOut, &t, &p, p.valueDim); err != nil {
		return err
	}
	if t[roleLSE] != nil {
		if err = checkResult(op, roleLSE, &t, &p, 0); err != nil {
			return err
		}
	}
	if a.Entropy != nil {
		if err := c.checkEntropy(op, &t, &p, &a); err != nil {
			return err
		}
	}
	if a.Mass != nil {
		if err := c.checkMass(op, &t, &p, &a); err != nil {
			return err
		}
	}
	r := denseRuns.Get().(*denseRun)
	defer denseRuns.Put(r)
	if err := r.setLengths(op, &p, &c, &a); err != nil {
		return err
	}
	if err := r.setTrees(op, &p, &c, a.Parents); err != nil {
		return err
	}
	defer r.forgetTrees()
	r.seed = a.Seed
	if len(a.Segments) > 0 {
		return r.attendSegments(op, &p, &c, &t, a.Segments)
	}
	return r.attend(op, &p, &c, &t)
}

// checkMass checks Args.Mass, and makes it a tensor of the run.
func (c *config) checkMass(op string, t *tensors, p *problem, a *Args) (err error) {
	if err := c.massGoes(op, p, a); err != nil {
		return err
	}
	if t[roleMass], err = ongpu.Dense(op, roleMass.String(), a.Mass); err != nil {
		return err
	}
	return checkResult(op, roleMass, t, p, attn.Ceil(p.keys, c.tileTokens))
}

// massGoes returns an error if Args.Mass does not go with the other arguments.
func (c *config) massGoes(op string, p *problem, a *Args) error {
	switch {
	case c.tileTokens == 0:
		return errs.Errorf(op, ErrOption, "Args.Mass without WithTileTokens, which says how many keys are summed")
	case len(a.Segments) > 0:
		return errs.Errorf(op, ErrUnsupported, "Args.Mass with %d segments", len(a.Segments))
	case a.Parents != nil:
		return errs.Errorf(op, ErrUnsupported, "Args.Mass with Parents")
	}
	g := p.geometry(c)
	if err := attention.CanWeigh(op, &g); err != nil {
		return errs.Errorf(op, ErrUnsupported, "Args.Mass: %v", err)
	}
	return nil
}

// checkEntropy checks Args.Entropy, and makes it a tensor of the run.
func (c *config) checkEntropy(op string, t *tensors, p *problem, a *Args) (err error) {
	if err := c.entropyGoes(op, p, a); err != nil {
		return err
	}
	if t[roleEntropy], err = ongpu.Dense(op, roleEntropy.String(), a.Entropy); err != nil {
		return err
	}
	return checkResult(op, roleEntropy, t, p, 0)
}

// entropyGoes returns an error if Args.Entropy does not go with the other arguments.
func (c *config) entropyGoes(op string, p *problem, a *Args) error {
	switch {
	case len(a.Segments) > 0:
		return errs.Errorf(op, ErrUnsupported, "Args.Entropy with %d segments", len(a.Segments))
	case a.Parents != nil:
		return errs.Errorf(op, ErrUnsupported, "Args.Entropy with Parents")
	}
	g := p.geometry(c)
	if err := attention.CanMeasure(op, &g); err != nil {
		return errs.Errorf(op, ErrUnsupported, "Args.Entropy: %v", err)
	}
	return nil
}

func segmentName(i int, what string) string { return fmt.Sprintf("segment %d's %s", i, what) }

// canSegment lists the features of attention with segments. All queries of a sequence see the same keys before the sequence's own.
var canSegment = attn.Can{
	Name:     "attention with segments",
	Features: attn.InParts,
	KV:       []attn.DType{attn.Float32, attn.Float64, attn.Float16, attn.BFloat16},
}

// segment returns the problem of segment i and its options: without masks and sinks.
func (p *problem) segment(op string, i int, s *Segment, k, v operand.Operand, c *config) (of problem, asked config, err error) {
	g := p.geometry(c)
	if err := canSegment.Do("attend", &g); err != nil {
		return of, asked, errs.Errorf(op, ErrUnsupported, "%v", err)
	}
	q := operand.New("q", tensor.Shape{p.heads, p.queries, p.dim}, p.query)
	if len(k.Shape) == 4 {
		q.Shape = append(tensor.Shape{1}, q.Shape...)
	}
	if of, err = problemOf(op, q, k, v, func(tensor.Dtype) bool { return true }, ""); err != nil {
		return of, asked, err
	}
	if of.kvHeads != p.kvHeads || of.valueDim != p.valueDim {
		return of, asked, errs.Errorf(op, ErrShape, "segment %d has %d heads and values of %d elements; k and v have %d and %d", i, of.kvHeads, of.valueDim, p.kvHeads, p.valueDim)
	}
	of.rank, of.batch, of.shared = p.rank, p.batch, true
	for n, b := range s.Sequences {
		if b < 0 || b >= p.batch {
			return of, asked, errs.Errorf(op, ErrShape, "segment %d is of sequence %d of a batch of %d", i, b, p.batch)
		}
		if slices.Contains(s.Sequences[:n], b) {
			return of, asked, errs.Errorf(op, ErrShape, "segment %d is twice of sequence %d", i, b)
		}
	}
	asked = *c
	asked.mask, asked.score = attn.Mask{}, attn.Score{Cap: c.score.Cap}
	return of, asked, nil
}

// setSegment sets the sequences that attend to a segment.
func (r *denseRun) setSegment(p *problem, s *Segment) {
	r.forgetTrees()
	if s.Sequences == nil {
		r.allLive(p)
		return
	}
	r.lengths = append(r.lengths[:0], make([]int, p.batch)...)
	for _, b := range s.Sequences {
		r.lengths[b] = p.keys
	}
}

// attendSegments is attend with segments: it merges the states of the own keys and of each segment.
func (r *denseRun) attendSegments(op string, p *problem, c *config, t *tensors, segments []Segment) (err error) {
	problems, asked, all := make([]problem, len(segments)), make([]config, len(segments)), make([]tensors, len(segments))
	for i := range segments {
		s, of := &segments[i], &all[i]
		*of = tensors{roleQ: t[roleQ]}
		k, v := segmentName(i, "k"), segmentName(i, "v")
		if of[roleK], err = ongpu.Dense(op, k, s.K); err != nil {
			return err
		}
		if of[roleV], err = ongpu.Dense(op, v, s.V); err != nil {
			return err
		}
		if problems[i], asked[i], err = p.segment(op, i, s, operand.OfTensor(k, of[roleK]), operand.OfTensor(v, of[roleV]), c); err != nil {
			return err
		}
		for _, to := range [...]role{roleOut, roleLSE} {
			if t[to] != nil && (overlap(t[to], of[roleK]) || overlap(t[to], of[roleV])) {
				return errs.Errorf(op, ErrUnsupported, "%v shares memory with segment %d", to, i)
			}
		}
		of[roleOut], of[roleLSE] = dense.New(p.query, p.dims(p.valueDim)...), dense.New(p.query, p.dims(0)...)
	}
	own := *t
	if own[roleLSE] == nil {
		own[roleLSE] = dense.New(p.query, p.dims(0)...)
	}
	states := [][2]*tensor.Dense{{own[roleOut], own[roleLSE]}}
	if err := r.attend(op, p, c, &own); err != nil {
		return err
	}
	for i := range segments {
		r.setSegment(&problems[i], &segments[i])
		if err := r.attend(op, &problems[i], &asked[i], &all[i]); err != nil {
			return err
		}
		states = append(states, [2]*tensor.Dense{all[i][roleOut], all[i][roleLSE]})
	}
	if p.query == tensor.Float32 {
		return mergeTensors[float32](op, own[roleOut], own[roleLSE], states)
	}
	return mergeTensors[float64](op, own[roleOut], own[roleLSE], states)
}

// attendRoles are the roles of the operands that [Args] always has, and of the log-sum-exp.
var attendRoles = [...]role{roleQ, roleK, roleV, roleOut, roleLSE}

// checkResult checks a result tensor: its shape is (batch, heads, queries, last), without the last axis if last is 0.
func checkResult(op string, of role, all *tensors, p *problem, last int) error {
	name, t := of.String(), all[of]
	if t.Dtype() != p.query {
		return errs.Errorf(op, ErrDType, "%s is %v and q is %v", name, t.Dtype(), p.query)
	}
	if !slices.Equal(t.Shape(), p.dims(last)) { // dims a second time for the text: so this one allocates nothing
		return errs.Errorf(op, ErrShape, "%s has shape %v; it must be %v", name, t.Shape(), p.dims(last))
	}
	if !dense.RowMajor(t) {
		return errs.Errorf(op, ErrUnsupported, "%s is not row-major: strides %v for shape %v", name, t.Strides(), t.Shape())
	}
	for i, o := range all {
		if o != nil && role(i) != of && overlap(t, o) {
			return errs.Errorf(op, ErrUnsupported, "%s shares memory with another operand", name)
		}
	}
	return nil
}

// denseRun is the memory of a call on dense tensors. Later calls reuse it.
type denseRun struct {
	lengths   []int      // live keys of each sequence
	queries   []int      // of each sequence, in front of rows of padding
	bits      []uint64   // of the trees
	trees     [][]uint64 // of each sequence; empty: there is none
	seed      int64      // of dropout, if there is any
	pages     []int32
	sequences []attn.Sequence
	plan      attention.Plan
	f32       attention.Operands[float32]
	f64       attention.Operands[float64]
}

var denseRuns = sync.Pool{New: func() any { return new(denseRun) }}

// setLengths copies the lengths of [Args] to r, and notes in c that there are some.
func (r *denseRun) setLengths(op string, p *problem, c *config, a *Args) (err error) {
	r.whole(p)
	for _, x := range [...]struct {
		kind     optionKind
		of       role
		lengths  []int
		capacity int
		to       *[]int
	}{{optLengths, roleLengths, a.Lengths, p.keys, &r.lengths}, {optQueryLengths, roleQueryLengths, a.QueryLengths, p.queries, &r.queries}} {
		if x.lengths == nil {
			continue
		}
		if len(x.lengths) != p.batch {
			return errs.Errorf(op, ErrShape, "%d %v for a batch of %d", len(x.lengths), x.of, p.batch)
		}
		if *x.to, err = operand.AppendLengths(op, x.of.String(), (*x.to)[:0], x.lengths, x.capacity); err != nil {
			return err
		}
		c.given |= x.kind
	}
	return nil
}

// checkAligned returns an error for lengths that look like those of a batch that is padded at its right, if positions of queries matter
// and neither option says where the queries are. Such queries would be shifted to the end of the live keys.
func (r *denseRun) checkAligned(op string, p *problem, c *config) error {
	by := c.needsPositions()
	if by == "" || c.given&optQueriesAtEnd != 0 || c.hasLengths() == c.hasQueryLengths() {
		return nil
	}
	lengths, queries := "WithLengths", "WithQueryLengths"
	if op == "Attend" {
		lengths, queries = "Args.Lengths", "Args.QueryLengths"
	}
	if c.hasQueryLengths() {
		for b, n := range r.queries {
			if n > 0 && n < p.queries {
				return errs.Errorf(op, ErrLength, "sequence %d has %d queries of %d and all %d keys, and %s depends on positions, which are aligned to the end of the keys: give the lengths of keys (%s), or say that queries are the last ones (WithQueriesAtEnd)",
					b, n, p.queries, p.keys, by, lengths)
			}
		}
		return nil
	}
	short, differ := -1, false
	for b, n := range r.lengths {
		if differ = differ || n != r.lengths[0]; short < 0 && n > 0 && n < p.queries {
			short = b
		}
	}
	if short < 0 || !differ {
		return nil
	}
	return errs.Errorf(op, ErrLength, "lengths differ, sequence %d has %d keys and %d queries, and %s depends on positions, which are aligned to the end of the keys: give the lengths of queries (%s), or say that queries are the last ones (WithQueriesAtEnd)",
		short, r.lengths[short], p.queries, by, queries)
}

// setTrees copies the trees of [Args] to r, and notes in c that there are some. The caller calls forgetTrees afterwards.
func (r *denseRun) setTrees(op string, p *problem, c *config, parents [][]int) error {
	if parents == nil {
		return nil
	}
	if len(parents) != p.batch {
		return errs.Errorf(op, ErrShape, "%d trees for a batch of %d", len(parents), p.batch)
	}
	trees := r.trees[:0]
	r.bits = r.bits[:0]
	for b, list := range parents {
		if list == nil {
			trees = append(trees, nil)
			continue
		}
		c.mask.Tree = true
		if err := attn.CheckParents(list, r.queries[b]); err != nil {
			return errs.Errorf(op, ErrShape, "sequence %d: %v", b, err)
		}
		if n := r.lengths[b]; n < r.queries[b] {
			return errs.Errorf(op, ErrLength, "sequence %d has %d keys and a tree of %d", b, n, r.queries[b])
		}
		at := len(r.bits)
		r.bits = attn.AppendTree(r.bits, list)
		trees = append(trees, r.bits[at:])
	}
	if g := c.attention(p.dim); g.Tree {
		if err := g.TreeFits(); err != nil {
			return errs.Errorf(op, ErrUnsupported, "%v", err)
		}
	}
	r.trees = trees
	return nil
}

// forgetTrees makes the sequences of later calls have no trees.
func (r *denseRun) forgetTrees() {
	r.trees = r.trees[:0]
	for i := range r.sequences {
		r.sequences[i].Tree = nil
	}
}

// whole gives every sequence all of its keys and queries.
func (r *denseRun) whole(p *problem) {
	r.allLive(p)
	r.queries = r.queries[:0]
	for range p.batch {
		r.queries = append(r.queries, p.queries)
	}
}

// allLive gives every sequence all of its keys.
func (r *denseRun) allLive(p *problem) {
	r.lengths = r.lengths[:0]
	for range p.batch {
		r.lengths = append(r.lengths, p.keys)
	}
}

// layOut sets the sequences of a problem from the lengths in r. Padding rows become sequences without keys. They come after the sequences of
// the batch, whose numbers select bias and dropout.
func (r *denseRun) layOut(op string, p *problem, c *config) error {
	if err := r.checkAligned(op, p, c); err != nil {
		return err
	}
	r.pages, r.sequences = r.pages[:0], r.sequences[:0]
	for b := range p.batch {
		if p.shared {
			b = 0
		}
		r.pages = append(r.pages, int32(b))
	}
	for b, n := range r.lengths {
		seq := attn.Sequence{Row: b * p.heads * p.queries, Queries: r.queries[b], Keys: n, Pages: r.pages[b : b+1]}
		if len(r.trees) > 0 {
			seq.Tree = r.trees[b]
		}
		r.sequences = append(r.sequences, seq)
	}
	for b, n := range r.queries {
		if n < p.queries {
			r.sequences = append(r.sequences, attn.Sequence{Row: b*p.heads*p.queries + n, Queries: p.queries - n})
		}
	}
	return nil
}

// attend runs a checked problem with the lengths and the seed in r. Bias, sinks and log-sum-exp are optional.
func (r *denseRun) attend(op string, p *problem, c *config, t *tensors) error {
	if c.schedule.kind == unfused {
		return errs.Unfused(op)
	}
	if err := r.layOut(op, p, c); err != nil {
		return err
	}
	r.plan.PrefixBytes = kvstore.PrefixBytes
	if err := r.plan.Build(p.geometry(c), r.sequences); err != nil {
		return errs.Engine(op, "plan", err)
	}
	tensors := variantTensors(c.score.Variant, t)
	err := r.plan.CheckTensors(tensors)
	if err != nil {
		return errs.Errorf(op, ErrShape, "WithVariant: %v", err)
	}
	if p.query == tensor.Float32 {
		err = attendDense(&r.plan, &r.f32, r.seed, t, tensors)
	} else {
		err = attendDense(&r.plan, &r.f64, r.seed, t, tensors)
	}
	if err != nil {
		return errs.Engine(op, "attend", err)
	}
	return nil
}

func attendDense[F lean.Float](plan *attention.Plan, o *attention.Operands[F], seed int64, t *tensors, ofVariant []variant.Tensor) error {
	*o = attention.Operands[F]{Q: dense.Elements[F](t[roleQ]), Out: dense.Backing[F](t[roleOut]), Pages: attn.InPlanes(operand.StorageBuffer(t[roleK]), operand.StorageBuffer(t[roleV])), Seed: seed}
	if bias := t[roleBias]; bias != nil {
		o.Bias = dense.Elements[F](bias)
	}
	if sinks := t[roleSinks]; sinks != nil {
		o.Sinks = dense.Elements[F](sinks)
	}
	if lse := t[roleLSE]; lse != nil {
		o.LSE = dense.Backing[F](lse)
	}
	if entropy := t[roleEntropy]; entropy != nil {
		o.Entropy = dense.Backing[F](entropy)
	}
	if mass := t[roleMass]; mass != nil {
		o.Mass, o.Tiles = dense.Backing[F](mass), mass.Shape()[mass.Dims()-1]
	}
	o.Tensors = ofVariant
	err := attention.Run(cpu.Default(), plan, o)
	*o = attention.Operands[F]{} // keep nobody's memory alive
	return err
}

// geometry describes a dense batch to the engine: sequence b is one page of
// p.keys slots, and query (b, h, i) is row b*heads*queries + i of head h.
func (p *problem) geometry(c *config) attn.Problem {
	g := c.attention(p.dim)
	g.Heads, g.KVHeads, g.Dim, g.ValueDim = p.heads, p.kvHeads, p.dim, p.valueDim
	storage, _ := operand.StorageType(p.storage) // which newProblem has checked
	g.Pages = attn.Separate(storage, p.dim, p.valueDim, attn.PageStrides{}, attn.PageStrides{}).Packed(p.kvHeads, p.keys)
	g.QueryType, _ = operand.StorageType(p.query)
	g.Query = attn.Strides{Row: p.dim, Head: p.queries * p.dim}
	g.Out = attn.Strides{Row: p.valueDim, Head: p.queries * p.valueDim}
	g.LSE = attn.Strides{Row: 1, Head: p.queries}
	g.PageTokens = p.keys
	return g
}
