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

// An Option changes one thing of an attention. Each entry point lists the options that it takes.
//
// Errors: [ErrUnsupported] for an option that the entry point does not take or cannot honour;
// [ErrOption] for a value outside its range, and for an option that is given twice.
type Option struct {
	kind     optionKind
	scale    float64
	n        int
	schedule Schedule
	node     *G.Node
	slopes   attn.Slopes
	rotary   rope.Config
}

// optionKind is one bit for each option, so that a set of them is a mask.
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
)

// ofScores are the options that say which scores the softmax is of, whatever has them.
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
	}
	return "the zero Option"
}

// takers says which functions take an option, and what others have in its place.
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
	case optRotary:
		return "it is for CachedAttention; elsewhere turn q and k before, by Rotary of package nn"
	case optSchedule, optTileTokens, optWorkers, optInvariant:
		return "it is for Attention, CachedAttention and Attend; Gorgonia's nodes have no LeanTiles"
	}
	return "it is for all attention"
}

// WithScale sets the factor on the scores q.k; without it, it is 1/sqrt(d).
// Any finite number is right, negative ones and 0 included.
//
// A score may be any finite number of the type that is computed in, float32, or
// float64 for q of float64: scale*q, its products with k and their sums must be
// finite, and the weights, the log-sum-exp and the gradients are those of the
// formula. Scores that differ by less than their rounding may be taken for the
// same. On a GPU the products and their sums must be finite before the scale, too,
// and with k of [BFloat16] elements of a float32 q are below 3.39e38.
func WithScale(scale float64) Option { return Option{kind: optScale, scale: scale} }

// WithCausal lets a query see no key after its own position. Positions are
// aligned to the end of the keys: query i of Nq, over N live keys, sees keys j
// with j <= N - Nq + i. A query that comes before the first key (Nq > N) sees
// none: its output is 0 and its log-sum-exp -Inf. With [WithLengths], see
// [WithQueryLengths] for a batch that is padded at its right.
func WithCausal() Option { return Option{kind: optCausal} }

// WithMixedPrecision lets q, and the weights of the softmax, be rounded to the type of the
// keys where that is faster: products are of 16-bit numbers, sums and the softmax in float32.
// That is what most software computes. Without it they are in two parts, and float32's
// accuracy stays. On a GPU elements of q beyond the range of the keys' type become infinite, and
// attention of many query rows has half the products. On a CPU with tile registers (AMX) prompts have
// a third of them with bfloat16, and three of five with float16, which keeps more of q. All else computes as without.
func WithMixedPrecision() Option { return Option{kind: optMixed} }

// WithWindow lets a query see no more than the last left keys up to its own
// position, which is one of them: with positions as [WithCausal] has them, query i
// of Nq, over N live keys, sees keys j with j > N - Nq + i - left. It says
// nothing of the keys after the position; a decoder takes WithCausal too. left is at
// least 1, and may be more than there are. LeanTiles that are in nobody's window
// are not in the schedule, and their keys and values are not read: a window
// costs what its keys cost.
//
// Under the build tag cuda nodes of [Attention] with a window, a soft cap, slopes, a bias, sinks or
// batch invariance stay on the CPU.
func WithWindow(left int) Option { return Option{kind: optWindow, n: left} }

// WithSinkTokens lets a query see the first n keys besides those of its window, which [WithWindow]
// gives. Many models give the first tokens of a text much of their attention, whatever they are, and fail when a
// window leaves them behind: StreamingLLM (Xiao et al., Efficient Streaming Language Models with
// Attention Sinks, arXiv:2309.17453), which keeps 4. 0 is none; more than 0 without a window is [ErrOption].
// Keys between the first ones and the window are in no LeanTile and are not read.
//
// It has no gradient: that is [ErrUnsupported]. On a cache with a
// [CacheConfig].Window it says the number that the cache has, as SinkTokens.
//
// Positions are those of the sequence: scores of sink tokens are what q and k, with whatever position they have been
// turned by ([WithRotary]), give. StreamingLLM numbers the tokens that are kept anew, so that no distance is larger than
// a model has learnt: who wants that turns keys and queries accordingly.
func WithSinkTokens(n int) Option { return Option{kind: optSinkTokens, n: n} }

// WithSoftCap keeps scores within bounds: a score s becomes
//
//	limit * tanh(s / limit),  s = scale * q[b,h,i].k[b,h',j]
//
// for a finite limit > 0. On the CPU the tanh is of float64, one score after the other: a decode
// step takes a quarter longer, a prompt two to three times as long. On a GPU it is of
// float32.
func WithSoftCap(limit float64) Option { return Option{kind: optSoftCap, scale: limit} }

// WithALiBi adds to the scores of query head h a term that is linear in the
// distance of key j from the query's position,
//
//	slopes[h] * (j - (N - Nq + i))
//
// for query i of Nq over N live keys; after the soft cap, if there is one. There is
// one slope for each query head, any finite number, positive ones for keys that
// count the less the further back they are (Press et al., arXiv:2108.12409). The
// option keeps a copy of slopes. They are constants: they have no gradient.
func WithALiBi(slopes []float64) Option {
	return Option{kind: optALiBi, slopes: attn.NewSlopes(slopes)}
}

// WithBias adds numbers to the scores, after all else that changes them:
//
//	s_j = scale * q[b,h,i].k[b,h',j] + bias[b,h,i,j]
//
// bias is (B, H, Nq, Nk), or without B if q is, of q's element type; each size but
// the last may be 1, for numbers that all share. A number of -Inf hides a key: its
// weight is 0, and a query all of whose keys are hidden has the output 0 and the
// log-sum-exp -Inf. Hidden keys are read nevertheless, and NaN in their values
// shows; [WithLengths], [WithWindow] and [WithCausal] are for keys that need not be
// read. A bias of +Inf or NaN makes NaN of the outputs that it is for. Numbers for
// keys that a query does not see are not read.
//
// The bias has a gradient, the sum over all that share a number, unless it is a
// constant of Gorgonia's. It takes a pass over the scores of its own. On a GPU the bias is a
// [device.Tensor] as q is.
//
// scale is one number, or none for 1. It multiplies the bias, and is finite and not 0.
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

// WithDropout drops weights behind the softmax, and makes up for it by the others:
//
//	out[b,h,i] = sum_j z_j p_j v[b,h',j],  z_j = 0 with probability p, else 1/(1-p)
//
// for 0 <= p < 1, which is rounded to a multiple of 2^-32. The log-sum-exp is that of the
// scores, without dropout. Gradients are those of what was dropped in the same run.
//
// seed is a scalar of int, int64 or int32, which gorgonia.Let takes from a plain number:
//
//	seed := gorgonia.NewScalar(g, tensor.Int, gorgonia.WithName("seed"))
//	gorgonia.Let(seed, step)
//
// Give it another value for each step, and a node of its own to each layer, or different values:
// equal seeds drop the same. A seed of 0 drops nothing, and computes as without the option, so one
// graph serves training and, with 0, inference. The seed has no gradient.
//
// z of key j for query i of head h of sequence b follows from the seed and b, h, i and j alone: it is
// number j mod 4 of Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3,
// 2011) of the counter (j/4, i, h, b), with the seed as the key, and the weight is dropped where that number is less than
// p 2^32. So the same weights are dropped on every run, by every CPU and schedule, and by any number of
// workers; and the backward pass makes the numbers again, and keeps none (FlashAttention, Dao et al.,
// arXiv:2205.14135, appendix B.3). A dropped value is multiplied by 0: NaN stays NaN.
//
// It is for [Attention] and [Attend], in host memory. For Attend seed is nil, and [Args] has the seed.
func WithDropout(p float64, seed *G.Node) Option {
	return Option{kind: optDropout, scale: p, node: seed}
}

// WithSinks gives each query head an attention sink: a learned score more in the softmax of all
// its queries, which has no value. With z = sinks[h] the weights of head h are
//
//	p_j = exp(s_j) / (exp(z) + sum_i exp(s_i))
//
// and the log-sum-exp is log(exp(z) + sum_i exp(s_i)): the weights of the keys sum to less than 1, and
// a query that sees no key has the output 0 and the log-sum-exp z (gpt-oss, arXiv:2508.10925; a sink
// of 0 is the "off by one" softmax). A sink is a natural logarithm as scores are behind all that
// changes them: neither [WithScale] nor [WithSoftCap], [WithALiBi] or [WithBias] changes it. -Inf is no
// sink. +Inf or NaN makes NaN of the head's outputs.
//
// On a GPU a key whose weight is below 2^-39 of the sink's may have none, where keys are [Float16].
//
// sinks is a vector of H numbers of the type of the log-sum-exp: float32, or float64 where q is. It is
// where q is: in host memory, or a [device.Tensor]. In [Attention] it has a gradient, the sum over
// all queries of its head, unless it is a constant of Gorgonia's.
func WithSinks(sinks *G.Node) Option { return Option{kind: optSinks, node: sinks} }

// WithRotary has the node turn q, and k on its way into the cache, by a rotary embedding (RoPE): q and k come as projections
// made them, and the result is that of [CachedAttention] behind a Rotary of package nn for each of the two,
//
//	q = Rotary(q, positions),  k = Rotary(k, positions)
//
// with its formula, which [rope.Config] has, at [Step.Positions]: a new token is turned by where it stands in its sequence, or,
// with [Append.Parents], by its depth, or by its [Append.Positions]. v is not turned. On the CPU queries are turned where they are read and keys
// where they are stored, in the precision of q, by cosines and sines that all layers of a step share; on a GPU one launch turns and
// stores them. Turned keys are rounded to the cache's type as others are. What is in the cache is turned already.
//
// HeadDim is the cache's, or 0. Layers may have different
// embeddings. On a GPU a layer with it is no part of a recording's single launch.
//
// It is for [CachedAttention]. The cache of a machine of Gorgonia's (tag cuda) has no kernel for it: [ErrUnsupported].
func WithRotary(config rope.Config) Option { return Option{kind: optRotary, rotary: config} }

// WithLengths gives the live keys of each sequence: a vector of B int, int32 or
// int64, each in [0, Nk]. The graph is built for the capacity Nk, and the lengths are
// data, so a decode graph is built once and run at every step. Keys and values
// at or beyond a sequence's length are never read.
//
// Masks and [WithALiBi] count positions from the end of the live keys. In a batch that is padded at its right the
// queries are padded, too: [WithQueryLengths] gives their lengths. [ErrLength] in a run reports lengths that
// differ, one of which is above 0 and below Nq, where a query's position matters ([WithCausal], [WithWindow],
// [WithALiBi]) and neither WithQueryLengths nor [WithQueriesAtEnd] is given.
func WithLengths(lengths *G.Node) Option { return Option{kind: optLengths, node: lengths} }

// WithQueryLengths gives the number of queries of each sequence: a vector of B int, int32 or int64, each in [0, Nq].
// The first rows of q are a sequence's queries, and the rows behind them are padding:
//
//   - Query i of a sequence with n queries and N live keys has the position N - n + i.
//   - The output of a row of padding is 0, and its log-sum-exp is -Inf, or the sink of its head with [WithSinks].
//   - No gradient comes from a row of padding, and its own gradient is 0.
//
// With [WithCausal], a sequence that has more queries than keys has queries that see no key, as WithCausal says.
//
// For self-attention on a batch that is padded at its right, one node gives both lengths:
//
//	out, err := Attention(q, k, v, WithCausal(), WithLengths(n), WithQueryLengths(n))
//
// Where a query's position matters, queries that end before Nq need [WithLengths], too: [ErrLength] in a run.
//
// Under the build tag cuda a node with WithQueryLengths stays on the CPU.
func WithQueryLengths(lengths *G.Node) Option {
	return Option{kind: optQueryLengths, node: lengths}
}

// WithQueriesAtEnd says that the Nq queries of every sequence are the last of its live keys, whatever their number, as in
// a decode step: query i has the position N - Nq + i, with N from [WithLengths]. It changes no result. Without it, lengths
// that look like those of a padded batch are [ErrLength].
func WithQueriesAtEnd() Option { return Option{kind: optQueriesAtEnd} }

// WithSchedule chooses how LeanTiles are handed to workers; without it, it is
// [StreamK]. The result is the same within rounding.
//
// An output tile that one worker attends to alone has the same bits whatever
// else is in the batch, and however many workers there are. With [PerHead], or
// one worker, that holds for all of them; the cuts of StreamK and [FixedSplit]
// move with the rest of the batch. [WithBatchInvariance] has the same bits with all.
func WithSchedule(s Schedule) Option { return Option{kind: optSchedule, schedule: s} }

// WithTileTokens sets the keys of a LeanTile; 0, as without the option, leaves
// the choice to the engine. The result is the same within rounding.
func WithTileTokens(n int) Option { return Option{kind: optTileTokens, n: n} }

// WithWorkers sets how many workers share the LeanTiles; 0, as without the
// option, is what the work is worth on a CPU: one for each thread, of which a small step takes fewer than
// runtime.GOMAXPROCS, or up to four of them, so that a thread that is held up leaves some to others. A given number of
// workers gives the same bits on every run, whatever the machine; fewer threads may carry them out.
func WithWorkers(n int) Option { return Option{kind: optWorkers, n: n} }

// WithBatchInvariance makes the bits of a row, its output and its log-sum-exp, follow from its query and
// the keys and values that it sees, with their places in the sequence, alone. They depend neither on other
// sequences nor on how many there are, nor on how many queries come together: a prompt in
// chunks of any size has the bits of the whole, and so has a draft of some tokens that is verified in one step. Nor do
// they depend on the schedule, the workers or the capacity, on pages or their size, on prefixes that sequences share, or
// on recordings. (What they do depend on: the options, the element types, [WithTileTokens], the group
// of query heads, and the machine: a CPU's instruction set, a GPU's compute capability.)
//
// It fixes the cuts in tokens: LeanTiles begin at multiples of their size in the sequence,
// 1024 tokens unless WithTileTokens says otherwise, a LeanTile is a state of its own, and the states of a row
// are merged in the order of the sequence, whoever computes them. Schedules hand out whole LeanTiles, so
// steps are as even as those are small. All numbers of rows have one order of sums: prompts are slower
// than without, and prefixes that sequences share are read by each of them; docs/lab/cpu.md and
// docs/lab/attention.md have what it costs.
//
// Of a tree ([Append.Parents]) the tokens that a row sees count as if they were the sequence: on a CPU the bits are those of
// the path alone.
//
// [ErrUnsupported]: with [WithDropout], whose numbers follow from a sequence's place in the batch; with LeanTiles of more than
// 4096 tokens; with the schedule [Unfused]; with [WithSinkTokens] on a GPU; in gradients; on a cache with a [CacheConfig].Window, where places change when pages are given back.
//
// It is about attention. Of package nn norms, activations, gates, embeddings and rotary embeddings have a row's bits from the row alone, and
// so has nn.Linear on a CPU up to the number of rows that its documentation says; with more, and on a GPU, the order of
// its sums follows from their number.
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

// config is what a list of options says.
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
	mixed        bool
	rotaryOf     *rope.Config // nil: none
	rotary       attn.Rotary  // that it is for the heads of a cache
	invariant    bool
}

// maxTileTokens bounds a LeanTile, and with it the scratch that a worker needs.
const maxTileTokens = 1 << 16

// maxWorkers bounds the workers, and with them the partials that are kept.
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

// invariantFits checks what does not go with batch invariance.
func (c *config) invariantFits(op string) error {
	if p := c.attention(1); p.InvariantFits() != nil {
		return errs.Errorf(op, ErrUnsupported, "%v", p.InvariantFits())
	}
	return nil
}

// needsPositions is the first thing of c to which a query's position matters, "" where there is none.
func (c *config) needsPositions() string {
	switch {
	case c.mask.Causal:
		return "WithCausal"
	case c.mask.Window != 0:
		return "WithWindow"
	case c.score.Slopes != "":
		return "WithALiBi"
	}
	return ""
}

// isDropout says whether weights may be dropped with probability p.
func isDropout(p float64) bool { return p >= 0 && p < 1 }

// checkHeads checks what depends on the number of query heads.
func (c *config) checkHeads(op string, heads int) error {
	if n := c.score.Slopes.Len(); c.given&optALiBi != 0 && n != heads {
		return errs.Errorf(op, ErrShape, "WithALiBi has %d slopes for %d query heads", n, heads)
	}
	return nil
}

// setRotary makes of the rotary embedding what turns heads of d elements.
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
	c.rotary = attn.Rotary{HeadDim: d, Interleaved: of.Interleaved, Factor: m, Turns: attn.TurningsOf(w)}
	return nil
}

// attention is what the options say of a problem with heads of d elements.
func (c *config) attention(d int) attn.Problem {
	return attn.Problem{
		Scale: c.scaleFor(d), Mask: c.mask, Score: c.score, Rotary: c.rotary,
		TileTokens: c.tileTokens, Policy: c.schedule.policy(), Unfused: c.schedule.kind == unfused, Workers: c.workers,
		Invariant: c.invariant, Mixed: c.mixed,
	}
}

// scaleFor is the factor on the scores at head dimension d.
func (c *config) scaleFor(d int) float64 {
	if c.given&optScale != 0 {
		return c.scale
	}
	return 1 / math.Sqrt(float64(d))
}
