package leanattention

import (
	"fmt"
	"math"

	"gorgonia.org/leanattention/rope"

	"gorgonia.org/leanattention/internal/errs"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/lean"

	G "gorgonia.org/gorgonia"
)

// An Option sets one parameter of attention. Each entry point lists the options that it takes.
//
// Errors: [ErrUnsupported] for an option that the entry point does not take or support; [ErrOption] for a value out of range,
// and for an option that is given twice.
type Option struct {
	kind     optionKind
	scale    float64
	n        int
	schedule Schedule
	node     *G.Node
	slopes   attn.Slopes
	rotary   rope.Config
	variant  *Variant
}

// optionKind is a bit for each option, so that a set of options is a mask.
type optionKind uint32

const (
	optScale optionKind = 1 << iota
	optCausal
	optLengths
	optSchedule
	optTileTokens
	optWorkers
	optWindow
	optSoftCap
	optALiBi
	optBias
	optMixed
	optDropout
	optSinks
	optSinkTokens
	optRotary
	optInvariant
	optQueryLengths
	optQueriesAtEnd
	optVariant
)

// ofScores are the options that change scores or masks without an operand.
const ofScores = optScale | optCausal | optWindow | optSinkTokens | optSoftCap | optALiBi | optMixed

func (k optionKind) String() string {
	switch k {
	case optScale:
		return "WithScale"
	case optCausal:
		return "WithCausal"
	case optLengths:
		return "WithLengths"
	case optSchedule:
		return "WithSchedule"
	case optTileTokens:
		return "WithTileTokens"
	case optWorkers:
		return "WithWorkers"
	case optWindow:
		return "WithWindow"
	case optSoftCap:
		return "WithSoftCap"
	case optALiBi:
		return "WithALiBi"
	case optBias:
		return "WithBias"
	case optMixed:
		return "WithMixedPrecision"
	case optDropout:
		return "WithDropout"
	case optSinks:
		return "WithSinks"
	case optSinkTokens:
		return "WithSinkTokens"
	case optRotary:
		return "WithRotary"
	case optInvariant:
		return "WithBatchInvariance"
	case optQueryLengths:
		return "WithQueryLengths"
	case optQueriesAtEnd:
		return "WithQueriesAtEnd"
	case optVariant:
		return "WithVariant"
	}
	return "the zero Option"
}

// takers names the functions that take an option, and the alternatives of other functions.
func (k optionKind) takers() string {
	switch k {
	case optLengths:
		return "it is for Attention; Attend has Args.Lengths, a cache knows the lengths, and Default has none"
	case optQueryLengths:
		return "it is for Attention; Attend has Args.QueryLengths, a step knows the queries of each sequence, and Default has none"
	case optQueriesAtEnd:
		return "it is for Attention and Attend; the queries of a step are the last tokens anyway, and Default has no lengths"
	case optBias:
		return "it is for Attention and Default; Attend has Args.Bias, and a cache has none"
	case optDropout:
		return "it is for Attention and Attend; Default and a cache have no dropout"
	case optSinks:
		return "it is for Attention and CachedAttention; Attend has Args.Sinks, and Default has none"
	case optVariant:
		return "it is for Attention, CachedAttention and Attend"
	case optRotary:
		return "it is for CachedAttention; elsewhere turn q and k before, by Rotary of package nn"
	case optSchedule, optTileTokens, optWorkers, optInvariant:
		return "it is for Attention, CachedAttention and Attend; Gorgonia's nodes have no LeanTiles"
	}
	return "it is for all attention"
}

// WithScale sets the factor of the scores q.k. The default is 1/sqrt(d). Any finite number is valid, including 0 and negative
// numbers.
//
// Scores must be finite in the type of the arithmetic: float32, or float64 for q of float64. That holds for scale*q, its products
// with k, and their sums. Scores whose difference is below their rounding may count as equal. On a GPU the products and sums must be
// finite before the scale, too, and with k of [BFloat16] the elements of a float32 q must be below 3.39e38.
func WithScale(scale float64) Option { return Option{kind: optScale, scale: scale} }

// WithCausal hides the keys after a query's position. Positions are aligned to the end of the keys: query i of Nq, over N live
// keys, sees keys j with j <= N - Nq + i. A query before the first key (Nq > N) sees none: its output is 0, and its
// log-sum-exp -Inf. For a batch that is padded at its right, see [WithQueryLengths].
func WithCausal() Option { return Option{kind: optCausal} }

// WithMixedPrecision allows rounding q, and the weights of the softmax, to the type of the keys, if that is faster. Products are
// then of 16-bit numbers; sums and the softmax stay float32. Most software computes like that. Without the option q and the weights are
// split in two parts, which keeps the accuracy of float32.
//
//   - GPU: elements of q beyond the range of the keys' type become infinite. Attention of many query rows has half the products.
//   - CPU with tile registers (AMX): prompts have a third of the products with bfloat16, and three fifths with float16.
//   - Elsewhere the option has no effect.
func WithMixedPrecision() Option { return Option{kind: optMixed} }

// WithWindow limits a query to the last left keys up to its own position, which counts: query i of Nq, over N live keys, sees
// keys j with j > N - Nq + i - left (positions as in [WithCausal]). It does not hide keys after the position: a decoder also takes
// WithCausal. left is at least 1, and may exceed the number of keys. The schedule has no LeanTiles outside all windows, so the
// cost is that of the keys in the window.
//
// Under the build tag cuda, nodes of [Attention] with a window, a soft cap, slopes, a bias, sinks or batch invariance stay on the
// CPU.
func WithWindow(left int) Option { return Option{kind: optWindow, n: left} }

// WithSinkTokens makes the first n keys visible beside those of the window ([WithWindow]). Many models attend strongly to the first
// tokens of a text, and fail when a window hides them: StreamingLLM (Xiao et al., Efficient Streaming Language Models with
// Attention Sinks, arXiv:2309.17453) keeps 4.
//
//   - n is 0 for none; n > 0 without a window is [ErrOption].
//   - Keys between the first n and the window are in no LeanTile, and are not read.
//   - Gradients are [ErrUnsupported].
//   - On a cache with a [CacheConfig].Window, n is the cache's SinkTokens.
//   - Positions are those in the sequence. StreamingLLM instead renumbers the kept tokens; a model that needs that rotates q and k
//     accordingly, without [WithRotary].
func WithSinkTokens(n int) Option { return Option{kind: optSinkTokens, n: n} }

// WithSoftCap bounds scores: a score s becomes
//
//	limit * tanh(s / limit),  s = scale * q[b,h,i].k[b,h',j]
//
// for a finite limit > 0. The CPU computes the tanh in float64, one score at a time: a decode step takes a quarter longer, and a
// prompt two to three times as long. A GPU computes the tanh in float32.
func WithSoftCap(limit float64) Option { return Option{kind: optSoftCap, scale: limit} }

// WithALiBi adds to the scores of query head h a term that is linear in the distance of key j from the query's position:
//
//	slopes[h] * (j - (N - Nq + i))
//
// for query i of Nq over N live keys, after a soft cap. slopes has a finite number for each query head. Positive slopes reduce the
// weight of distant keys (Press et al., arXiv:2108.12409). The option copies slopes. They are constants, without a gradient.
func WithALiBi(slopes []float64) Option {
	return Option{kind: optALiBi, slopes: attn.NewSlopes(slopes)}
}

// WithBias adds numbers to the scores, after all other changes:
//
//	s_j = scale * q[b,h,i].k[b,h',j] + factor * bias[b,h,i,j]
//
// The operands and limits:
//
//   - bias is (B, H, Nq, Nk), or without B if q is, of q's element type. Each size but the last may be 1 for shared numbers. On a
//     GPU it is a [device.Tensor].
//   - factor is the optional scale, finite and not 0; without it, 1.
//   - A bias of -Inf hides a key: its weight is 0. A query without visible keys has the output 0 and the log-sum-exp -Inf. Hidden
//     keys are read, so NaN in them shows; [WithLengths], [WithWindow] and [WithCausal] hide keys without reading them.
//   - +Inf and NaN make the outputs NaN. Numbers for keys that a mask hides are not read.
//   - The gradient is the sum over all scores that share a number, and takes a pass of its own. A constant of Gorgonia's has none.
func WithBias(bias *G.Node, scale ...float64) Option {
	o := Option{kind: optBias, node: bias, scale: 1}
	switch len(scale) {
	case 0:
	case 1:
		o.scale = scale[0]
	default:
		o.scale = math.NaN()
	}
	return o
}

// WithDropout drops weights after the softmax, and scales the others:
//
//	out[b,h,i] = sum_j z_j p_j v[b,h',j],  z_j = 0 with probability p, else 1/(1-p)
//
// for 0 <= p < 1, rounded to a multiple of 2^-16. The log-sum-exp is that without dropout. Gradients use the z of the same run. It
// is for [Attention] and [Attend] in host memory, and for Attention on a GPU that has its gradients. For Attend seed is nil, and
// [Args] has the seed.
//
// seed is a scalar of int, int64 or int32, which gorgonia.Let sets from a number:
//
//	seed := gorgonia.NewScalar(g, tensor.Int, gorgonia.WithName("seed"))
//	gorgonia.Let(seed, step)
//
// Seeds and weights:
//
//   - Equal seeds drop the same weights, so each step and each layer needs another seed.
//   - A seed of 0 drops nothing: one graph serves training and inference. The seed has no gradient.
//   - z follows from the seed and from b, h, i and j alone: from number j mod 8 of 16 bits of Philox4x32-7 (Salmon et al., Parallel random
//     numbers: as easy as 1, 2, 3, 2011) with the counter (j/8, i, h, b) and the seed as key. A weight is dropped if the number is
//     below p 2^16. So every run, CPU, GPU, schedule and number of workers drops the same weights, and the backward pass computes z
//     again (FlashAttention, Dao et al., arXiv:2205.14135, appendix B.3).
//   - A dropped value is multiplied by 0, so NaN stays NaN.
func WithDropout(p float64, seed *G.Node) Option {
	return Option{kind: optDropout, scale: p, node: seed}
}

// WithSinks gives each query head an attention sink: a learned score in the softmax of all queries of the head, without a value.
// With z = sinks[h], the weights of head h are
//
//	p_j = exp(s_j) / (exp(z) + sum_i exp(s_i))
//
// and the log-sum-exp is log(exp(z) + sum_i exp(s_i)). So the weights of the keys sum to less than 1. A query that sees no key has
// the output 0 and the log-sum-exp z (gpt-oss, arXiv:2508.10925; a sink of 0 is the "off by one" softmax).
//
//   - sinks is a vector of H numbers: float32, or float64 if q is float64. It is where q is: in host memory or on the GPU.
//   - [WithScale], [WithSoftCap], [WithALiBi] and [WithBias] do not change a sink.
//   - -Inf is no sink. +Inf and NaN make the head's outputs NaN.
//   - On a GPU, with keys of [Float16], a weight below 2^-39 of the sink's may be 0.
//   - In [Attention] the gradient is the sum over all queries of the head. A constant of Gorgonia's has none.
func WithSinks(sinks *G.Node) Option { return Option{kind: optSinks, node: sinks} }

// WithRotary applies a rotary embedding (RoPE) to q and k in [CachedAttention]. The result is that of nn.Rotary before the node:
//
//	q = Rotary(q, positions),  k = Rotary(k, positions)
//
// with the formula of [rope.Config], at [Step.Positions]. v is unchanged. The cache stores rotated keys, rounded to its type.
//
//   - config.HeadDim is the cache's, or 0. Layers may have different embeddings.
//   - The CPU rotates queries on reading and keys on storing, in the precision of q. All layers of a step share cosines and sines.
//   - A GPU rotates in the launch that stores the keys. A layer with WithRotary is not part of a recording's single launch.
//   - The cache of Gorgonia's CUDA machine (tag cuda) has no kernel for it: [ErrUnsupported].
func WithRotary(config rope.Config) Option { return Option{kind: optRotary, rotary: config} }

// WithLengths sets the number of live keys of each sequence: a vector of B int, int32 or int64, each in [0, Nk]. The graph is built
// for the capacity Nk and the lengths are data, so one decode graph serves every step. Keys and values at or after a length are
// never read.
//
// Masks and [WithALiBi] count positions from the end of the live keys. A batch that is padded at its right has padded queries, too:
// [WithQueryLengths] sets their number. A run is [ErrLength] if
//
//   - lengths differ, and one is above 0 and below Nq, and
//   - a query's position matters ([WithCausal], [WithWindow], [WithALiBi]), and
//   - neither WithQueryLengths nor [WithQueriesAtEnd] is given.
func WithLengths(lengths *G.Node) Option { return Option{kind: optLengths, node: lengths} }

// WithQueryLengths sets the number of queries of each sequence: a vector of B int, int32 or int64, each in [0, Nq]. The first rows
// of q are a sequence's queries, and the other rows are padding:
//
//   - Query i of a sequence with n queries and N live keys has the position N - n + i.
//   - The output of a row of padding is 0, and its log-sum-exp is -Inf, or with [WithSinks] the sink of its head.
//   - The gradient of a row of padding is 0, and the row adds to no other gradient.
//
// For self-attention on a batch that is padded at its right, one node gives both lengths:
//
//	out, err := Attention(q, k, v, WithCausal(), WithLengths(n), WithQueryLengths(n))
//
// If a query's position matters, lengths of queries below Nq need [WithLengths], too: [ErrLength] in a run. Under the build tag cuda
// a node with WithQueryLengths stays on the CPU.
func WithQueryLengths(lengths *G.Node) Option {
	return Option{kind: optQueryLengths, node: lengths}
}

// WithQueriesAtEnd states that the Nq queries of every sequence are its last keys, as in a decode step: query i has the position
// N - Nq + i, with N from [WithLengths]. The option changes no result. It prevents the [ErrLength] of WithLengths for lengths that
// look like those of a padded batch.
func WithQueriesAtEnd() Option { return Option{kind: optQueriesAtEnd} }

// WithSchedule sets how LeanTiles are distributed to workers. The default is [StreamK]. Results are equal up to rounding.
//
// The bits of an output tile that one worker computes do not depend on the batch. With [PerHead], or one worker, that holds for
// all output tiles. The cuts of StreamK and [FixedSplit] depend on the batch; [WithBatchInvariance] gives the same bits with any
// schedule.
func WithSchedule(s Schedule) Option { return Option{kind: optSchedule, schedule: s} }

// WithTileTokens sets the number of keys of a LeanTile. 0, the default, lets the engine choose. Results are equal up to rounding.
func WithTileTokens(n int) Option { return Option{kind: optTileTokens, n: n} }

// WithWorkers sets the number of workers that share the LeanTiles. 0, the default, lets the engine choose: on a CPU fewer than
// runtime.GOMAXPROCS for a small step, and up to four for each thread otherwise. A given number gives the same bits on every run and
// machine, whatever the number of threads.
func WithWorkers(n int) Option { return Option{kind: optWorkers, n: n} }

// WithBatchInvariance makes the bits of a row, output and log-sum-exp, depend only on its query and on the keys and values that it
// sees, with their positions. The bits do not depend on
//
//   - other sequences, and the number of queries of a call: a prompt in chunks has the bits of the whole, and so has a draft that
//     is verified in one step
//   - the schedule, workers, capacity, pages, shared prefixes and recordings
//
// They do depend on the options, element types, [WithTileTokens], the number of query heads of a KV head, and the machine
// (instruction set, compute capability).
//
// LeanTiles then begin at multiples of their size in the sequence, 1024 tokens by default. Each LeanTile is one state, and states
// merge in the order of the sequence. The cost: schedules distribute whole LeanTiles, prompts are slower, and shared prefixes are
// read for each sequence (docs/lab/cpu.md, docs/lab/attention.md). On a CPU, a token of a tree ([Append.Parents]) has the bits of its
// path alone.
//
// [ErrUnsupported]: with [WithDropout]; with LeanTiles of more than 4096 tokens; with [Unfused]; with [WithSinkTokens] on a GPU; in
// gradients; on a cache with a [CacheConfig].Window.
//
// The option concerns attention alone. In package nn, norms, activations, gates, embeddings and rotary embeddings have this property
// always, and nn.Linear on a CPU up to the number of rows that its documentation states.
func WithBatchInvariance() Option { return Option{kind: optInvariant} }

// A Schedule says where the list of LeanTiles is cut into the workers' shares. The zero value is [StreamK]. Schedules are
// compared by ==.
type Schedule struct {
	kind   scheduleKind
	splits int // of fixedSplit
}

type scheduleKind uint8

const (
	streamK scheduleKind = iota
	fixedSplit
	unfused
)

var (
	// StreamK gives every worker the same number of LeanTiles, one more or
	// less, across heads and sequences: LeanAttention.
	StreamK = Schedule{}

	// PerHead gives whole output tiles to workers: FlashAttention-2. It is FixedSplit(1).
	PerHead = FixedSplit(1)

	// Unfused computes all scores, then their softmax, then the weighted sum of the values, one after the other, as
	// Gorgonia's own nodes do. It is a baseline for measurements.
	//
	//   - The scores are in memory: 4 bytes for each query, query head and key.
	//   - It is for GPUs. Elsewhere it is [ErrUnsupported]: [Default] has such nodes.
	Unfused = Schedule{kind: unfused}
)

// FixedSplit cuts the keys of every output tile into the same number of
// splits: FlashDecoding. Fewer than 1 are [ErrOption] in the call that takes the option.
func FixedSplit(splits int) Schedule { return Schedule{kind: fixedSplit, splits: splits} }

// String returns the name that the schedule has here, such as "FixedSplit(8)".
func (s Schedule) String() string {
	switch {
	case s.kind == streamK:
		return "StreamK"
	case s.kind == unfused:
		return "Unfused"
	case s.splits == 1:
		return "PerHead"
	}
	return fmt.Sprintf("FixedSplit(%d)", s.splits)
}

func (s Schedule) policy() lean.Policy {
	switch {
	case s.kind != fixedSplit:
		return lean.Policy{}
	case s.splits == 1:
		return lean.Policy{Kind: lean.PerHead}
	}
	return lean.Policy{Kind: lean.FixedSplit, Splits: s.splits}
}

// config is the parameters of a list of options.
type config struct {
	given        optionKind
	scale        float64
	lengths      *G.Node
	queryLengths *G.Node
	schedule     Schedule
	tileTokens   int
	workers      int
	mask         attn.Mask
	score        attn.Score // its bias is what the node's numbers are for, once that is checked
	biasNode     *G.Node
	biasScale    float64
	seed         *G.Node
	sinksNode    *G.Node
	variantOf    *Variant // nil: none, or score has it
	mixed        bool
	rotaryOf     *rope.Config // nil: none
	rotary       attn.Rotary  // that it is for the heads of a cache
	invariant    bool
	measures     bool // of a GPU's run: entropies or attention mass are asked for
}

// maxTileTokens is the most tokens of a LeanTile, which bounds the scratch memory of a worker.
const maxTileTokens = 1 << 16

// maxWorkers is the most workers, which bounds the number of partials.
const maxWorkers = 1 << 12

func newConfig(op string, allowed optionKind, opts []Option) (c config, err error) {
	for i := range opts {
		o := &opts[i]
		if o.kind == 0 {
			return c, errs.Errorf(op, ErrUnsupported, "%v", o.kind)
		}
		if o.kind&allowed != o.kind {
			return c, errs.Errorf(op, ErrUnsupported, "option %v: %s", o.kind, o.kind.takers())
		}
		if c.given&o.kind != 0 {
			return c, errs.Errorf(op, ErrOption, "option %v is given twice", o.kind)
		}
		c.given |= o.kind
		switch o.kind {
		case optScale:
			if math.IsNaN(o.scale) || math.IsInf(o.scale, 0) {
				return c, errs.Errorf(op, ErrOption, "WithScale(%v) is not finite", o.scale)
			}
			c.scale = o.scale
		case optCausal:
			c.mask.Causal = true
		case optMixed:
			c.mixed = true
		case optInvariant:
			c.invariant = true
		case optLengths:
			if o.node == nil {
				return c, errs.Errorf(op, ErrOption, "WithLengths(nil)")
			}
			c.lengths = o.node
		case optQueryLengths:
			if o.node == nil {
				return c, errs.Errorf(op, ErrOption, "WithQueryLengths(nil)")
			}
			c.queryLengths = o.node
		case optBias:
			if o.node == nil {
				return c, errs.Errorf(op, ErrOption, "WithBias(nil)")
			}
			if o.scale == 0 || math.IsNaN(o.scale) || math.IsInf(o.scale, 0) {
				return c, errs.Errorf(op, ErrOption, "WithBias: scale must be one number, finite and not 0")
			}
			c.biasNode, c.biasScale = o.node, o.scale
		case optDropout:
			if !isDropout(o.scale) {
				return c, errs.Errorf(op, ErrOption, "WithDropout(%v) is outside [0, 1)", o.scale)
			}
			c.score.Dropout, c.seed = o.scale, o.node
		case optSinks:
			if o.node == nil {
				return c, errs.Errorf(op, ErrOption, "WithSinks(nil)")
			}
			c.sinksNode, c.score.Sinks = o.node, true
		case optSchedule:
			if s := o.schedule; s.kind == fixedSplit && s.splits < 1 {
				return c, errs.Errorf(op, ErrOption, "WithSchedule(%v): at least one split is needed", s)
			}
			c.schedule = o.schedule
		case optTileTokens:
			if o.n < 0 || o.n > maxTileTokens {
				return c, errs.Errorf(op, ErrOption, "WithTileTokens(%d) is outside [0, %d]", o.n, maxTileTokens)
			}
			c.tileTokens = o.n
		case optWorkers:
			if o.n < 0 || o.n > maxWorkers {
				return c, errs.Errorf(op, ErrOption, "WithWorkers(%d) is outside [0, %d]", o.n, maxWorkers)
			}
			c.workers = o.n
		case optWindow:
			if o.n < 1 {
				return c, errs.Errorf(op, ErrOption, "WithWindow(%d) is less than 1", o.n)
			}
			c.mask.Window = o.n
		case optSinkTokens:
			if o.n < 0 || o.n > maxWindow {
				return c, errs.Errorf(op, ErrOption, "WithSinkTokens(%d) is outside [0, %d]", o.n, maxWindow)
			}
			c.mask.SinkTokens = o.n
		case optRotary:
			c.rotaryOf = &o.rotary
		case optVariant:
			c.variantOf = o.variant
		case optSoftCap:
			if !(o.scale > 0) || math.IsInf(o.scale, 0) {
				return c, errs.Errorf(op, ErrOption, "WithSoftCap(%v) is not a finite number above 0", o.scale)
			}
			c.score.Cap = o.scale
		case optALiBi:
			for h := range o.slopes.Len() {
				if x := o.slopes.Of(h); math.IsNaN(x) || math.IsInf(x, 0) {
					return c, errs.Errorf(op, ErrOption, "WithALiBi: the slope of head %d is %v, not finite", h, x)
				}
			}
			c.score.Slopes = o.slopes
		}
	}
	if n := c.mask.SinkTokens; n > 0 && c.mask.Window == 0 {
		return c, errs.Errorf(op, ErrOption, "WithSinkTokens(%d) without WithWindow: all keys are seen", n)
	}
	if err := c.invariantFits(op); err != nil {
		return c, err
	}
	return c, nil
}

// invariantFits returns an error for options that exclude batch invariance.
func (c *config) invariantFits(op string) error {
	if p := c.attention(1); p.InvariantFits() != nil {
		return errs.Errorf(op, ErrUnsupported, "%v", p.InvariantFits())
	}
	return nil
}

// needsPositions names the first option for which positions of queries matter; "" for none.
func (c *config) needsPositions() string {
	switch {
	case c.mask.Causal:
		return "WithCausal"
	case c.mask.Window != 0:
		return "WithWindow"
	case c.score.Slopes != "":
		return "WithALiBi"
	case c.score.Variant.Positions():
		return "WithVariant"
	}
	return ""
}

// isDropout reports whether p is a valid probability of dropout.
func isDropout(p float64) bool { return p >= 0 && p < 1 }

// checkHeads checks the options that depend on the number of query heads.
func (c *config) checkHeads(op string, heads int) error {
	if n := c.score.Slopes.Len(); c.given&optALiBi != 0 && n != heads {
		return errs.Errorf(op, ErrShape, "WithALiBi has %d slopes for %d query heads", n, heads)
	}
	return nil
}

// setRotary computes the rotation of heads of d elements.
func (c *config) setRotary(op string, d int) error {
	if c.rotaryOf == nil {
		return nil
	}
	of := *c.rotaryOf
	if c.rotaryOf = nil; of.HeadDim == 0 {
		of.HeadDim = d
	}
	op += ": WithRotary"
	w, m, err := of.Frequencies()
	if err != nil {
		return errs.Within(op, err)
	}
	if of.HeadDim != d {
		return errs.Errorf(op, ErrShape, "HeadDim is %d, and the cache has heads of %d", of.HeadDim, d)
	}
	c.rotary = attn.RotaryOf(d, w, m, of.Interleaved, of.Last)
	return nil
}

// attention returns a problem with the options, for heads of d elements.
func (c *config) attention(d int) attn.Problem {
	return attn.Problem{
		Scale: c.scaleFor(d), Mask: c.mask, Score: c.score, Rotary: c.rotary,
		TileTokens: c.tileTokens, Policy: c.schedule.policy(), Unfused: c.schedule.kind == unfused, Workers: c.workers,
		Invariant: c.invariant, Measures: c.measures, Mixed: c.mixed,
	}
}

// scaleFor returns the factor of scores for head dim d.
func (c *config) scaleFor(d int) float64 {
	if c.given&optScale != 0 {
		return c.scale
	}
	return 1 / math.Sqrt(float64(d))
}
