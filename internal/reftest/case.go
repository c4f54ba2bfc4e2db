package reftest

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/dropout"
	"gorgonia.org/leanattention/internal/variant"
)

// Shape describes an attention problem without its numbers. Sequence s has Queries[s] query positions and
// Keys[s] keys; either may be 0. Query heads h*group to (h+1)*group-1, with group = Heads/KVHeads, share KV
// head h.
type Shape struct {
	Heads, KVHeads int
	Dim, ValueDim  int
	Queries, Keys  []int
	Scale          float64     // factor of q.k; New replaces 0 by 1/sqrt(Dim)
	attn.Mask                  // visible keys of a position
	Trees          []attn.Tree // per sequence, with Mask.Tree; nil: no tree. Trees may be shorter than the list of sequences

	SoftCap float64   // if not 0, a score s becomes SoftCap*tanh(s/SoftCap)
	Slopes  []float64 // if not nil, Slopes[head]*(j - (Keys-Queries+i)) is added to the score of key j
	Bias    Bias      // added to the scores after all other terms
	Sinks   []float64 // if not nil, Sinks[head] is an additional score without a value; -Inf: none

	Variant *variant.Program // changes scores and hides keys after all else; nil: none
	Tensors []variant.Tensor // of Variant, in float64 or int32

	Dropout float64 // probability that a weight is set to 0; the other weights are divided by 1-Dropout
	Seed    int64   // selects the dropped weights; 0: no dropout
}

// Sink returns the attention sink of a query head, -Inf where there is none.
func (s Shape) Sink(head int) float64 {
	if s.Sinks == nil {
		return math.Inf(-1)
	}
	return s.Sinks[head]
}

// Bias holds numbers that are added to scores. X has the shape (sequences, heads, queries, keys), row-major.
// Each of the first three sizes may be 1, which shares the numbers along the axis. -Inf hides a key. The zero
// Bias adds nothing.
type Bias struct {
	Sequences, Heads, Queries, Keys int
	X                               []float64
	Scale                           float64 // factor of all numbers; 0: 1
}

func (b *Bias) scale() float64 {
	if b.Scale == 0 {
		return 1
	}
	return b.Scale
}

// Row returns the index in X of the first number for a query position.
func (b *Bias) Row(seq, head, pos int) int {
	at := 0
	for _, axis := range [...][2]int{{b.Sequences, seq}, {b.Heads, head}, {b.Queries, pos}} {
		at *= axis[0]
		if axis[0] > 1 {
			at += axis[1]
		}
	}
	return at * b.Keys
}

// String returns the shape in the short form of test names.
func (s Shape) String() string {
	causal := ""
	if s.Causal {
		causal = " causal"
	}
	if s.Tree {
		causal += fmt.Sprintf(" trees %#x", s.Trees)
	}
	if s.Window != 0 {
		causal += fmt.Sprintf(" window %d", s.Window)
	}
	if s.SinkTokens != 0 {
		causal += fmt.Sprintf(" sink tokens %d", s.SinkTokens)
	}
	if s.SoftCap != 0 {
		causal += fmt.Sprintf(" cap %v", s.SoftCap)
	}
	if s.Slopes != nil {
		causal += fmt.Sprintf(" slopes %v", s.Slopes)
	}
	if s.Dropout != 0 {
		causal += fmt.Sprintf(" dropout %v of seed %d", s.Dropout, s.Seed)
	}
	if b := s.Bias; b.X != nil {
		causal += fmt.Sprintf(" bias %dx%dx%dx%d", b.Sequences, b.Heads, b.Queries, b.Keys)
	}
	if s.Sinks != nil {
		causal += fmt.Sprintf(" sinks %v", s.Sinks)
	}
	if s.Variant != nil {
		causal += fmt.Sprintf(" variant %v", s.Variant)
	}
	return fmt.Sprintf("h%d/%d d%d/%d q%v k%v%s", s.Heads, s.KVHeads, s.Dim, s.ValueDim, s.Queries, s.Keys, causal)
}

// First returns the first key of the window of position pos of sequence seq. The position sees the keys
// [First, Visible), and the sink tokens before [Shape.SinkKeys].
func (s Shape) First(seq, pos int) int {
	first, _ := s.Mask.Keys(s.Queries[seq], s.Keys[seq], pos)
	return first
}

// SinkKeys returns the end of the sink tokens that position pos of sequence seq sees outside its window.
func (s Shape) SinkKeys(seq, pos int) int { return min(s.SinkTokens, s.First(seq, pos)) }

// Visible returns the end of the keys that position pos of sequence seq sees.
func (s Shape) Visible(seq, pos int) int {
	_, end := s.Mask.Keys(s.Queries[seq], s.Keys[seq], pos)
	return end
}

// Sees reports whether position pos of sequence seq sees key j.
func (s Shape) Sees(seq, pos, j int) bool {
	first, end := s.Mask.Keys(s.Queries[seq], s.Keys[seq], pos)
	if j < s.SinkTokens && j < first {
		return true
	}
	if j < first || j >= end {
		return false
	}
	fresh := j - (s.Keys[seq] - s.Queries[seq])
	return fresh < 0 || s.TreeOf(seq) == nil || s.Trees[seq].Sees(pos, fresh)
}

// TreeOf returns the tree of a sequence, or nil if there is none.
func (s Shape) TreeOf(seq int) attn.Tree {
	if !s.Tree || seq >= len(s.Trees) {
		return nil
	}
	return s.Trees[seq]
}

// QueryRows and KeyRows return the total number of query positions and keys of all sequences.
func (s Shape) QueryRows() int { return sum(s.Queries) }
func (s Shape) KeyRows() int   { return sum(s.Keys) }

func sum(n []int) int {
	t := 0
	for _, x := range n {
		t += x
	}
	return t
}

// Case is an attention problem with its numbers. Rows are tokens, sequence by sequence:
//
//	Q (QueryRows, Heads, Dim)   K (KeyRows, KVHeads, Dim)   V (KeyRows, KVHeads, ValueDim)
type Case struct {
	Shape
	Q, K, V []float64

	last *last // the result of the last Reference; nil in a Case that was not made by New
}

// Query returns the query at position pos of a sequence in one head.
func (c *Case) Query(seq, pos, head int) []float64 {
	return row(c.Q, sum(c.Queries[:seq])+pos, c.Heads, head, c.Dim)
}

// Key returns key pos of a sequence in one KV head.
func (c *Case) Key(seq, pos, head int) []float64 {
	return row(c.K, sum(c.Keys[:seq])+pos, c.KVHeads, head, c.Dim)
}

// Value returns value pos of a sequence in one KV head.
func (c *Case) Value(seq, pos, head int) []float64 {
	return row(c.V, sum(c.Keys[:seq])+pos, c.KVHeads, head, c.ValueDim)
}

func row(x []float64, r, heads, head, dim int) []float64 {
	at := (r*heads + head) * dim
	return x[at : at+dim : at+dim]
}

// Inputs is a distribution of test inputs.
type Inputs uint8

const (
	// Normal draws all numbers from N(0,1). Many keys have similar weights.
	Normal Inputs = iota
	// Peaked scales the queries by 4 to 8, so that few keys matter. In each KV head it plants one key (the
	// first, the last or any) whose score for one query is about as large as the largest other score.
	Peaked
	// Extreme scales the queries until the scores are as large as the queries' format and float32
	// accumulation allow. One key gets all of the weight.
	Extreme
	// Constant makes all queries of a head equal, and all keys, and all values. The weights are equal, and
	// the output is the value.
	Constant
	// Huge makes scores up to the largest finite number, of one sign or of both, with some equal scores and
	// some ordinary scores. The sums are finite with and without the scale. Huge chooses the scale, unless
	// the shape has one.
	Huge
)

// AllInputs lists every distribution.
var AllInputs = []Inputs{Normal, Peaked, Extreme, Constant, Huge}

// String returns the distribution's name.
func (in Inputs) String() string {
	return [...]string{"normal", "peaked", "extreme", "constant", "huge"}[in]
}

// New draws a case. Queries are rounded to q, and keys and values to kv.
func New(rng *rand.Rand, s Shape, in Inputs, q, kv Format) *Case {
	given := s.Scale != 0
	if !given {
		s.Scale = 1 / math.Sqrt(float64(s.Dim))
	}
	c := &Case{
		Shape: s,
		Q:     make([]float64, s.QueryRows()*s.Heads*s.Dim),
		K:     make([]float64, s.KeyRows()*s.KVHeads*s.Dim),
		V:     make([]float64, s.KeyRows()*s.KVHeads*s.ValueDim),
		last:  new(last),
	}
	for _, x := range [][]float64{c.Q, c.K, c.V} {
		for i := range x {
			x[i] = rng.NormFloat64()
		}
	}
	switch in {
	case Peaked:
		c.plant(rng)
		scale(c.Q, 4+4*rng.Float64())
	case Extreme:
		magnitudes := []float64{1e4, 1e12, 1e30}
		if q == Float16 { // the largest float16 is 65504
			magnitudes = []float64{1e2, 1e3, 8e3}
		}
		scale(c.Q, magnitudes[rng.IntN(len(magnitudes))])
	case Constant:
		repeat(c.Q, s.Heads*s.Dim)
		repeat(c.K, s.KVHeads*s.Dim)
		repeat(c.V, s.KVHeads*s.ValueDim)
	case Huge:
		c.huge(rng, given, q, kv)
	}
	round(c.Q, q)
	round(c.K, kv)
	round(c.V, kv)
	return c
}

// plant puts a key parallel to one of the queries into every KV head of every sequence. n keys of N(0,1) have
// scores of N(0, |q|*scale), and the largest score is about sqrt(2 ln n)*|q|*scale. The planted key gets this
// score.
func (c *Case) plant(rng *rand.Rand) {
	for s, queries := range c.Queries {
		for h := range c.KVHeads {
			if queries == 0 {
				continue
			}
			pos := rng.IntN(queries)
			first := c.First(s, pos)
			n := c.Visible(s, pos) - first
			if n <= 0 {
				continue
			}
			group := c.Heads / c.KVHeads
			q := c.Query(s, pos, h*group+rng.IntN(group))
			k := c.Key(s, first+[]int{0, n - 1, rng.IntN(n)}[rng.IntN(3)], h)
			norm := 0.0
			for _, x := range q {
				norm += x * x
			}
			f := math.Sqrt(2*math.Log(float64(n)+1)) / math.Sqrt(norm)
			for i, x := range q {
				k[i] = f * x
			}
		}
	}
}

// huge draws queries and keys for [Huge].
func (c *Case) huge(rng *rand.Rand, scaled bool, q, kv Format) {
	used := []int{1, c.Dim}[rng.IntN(2)] // elements that are not 0
	sums := Float32
	if q == Float64 {
		sums = q
	}
	most := 0.98 * sums.Largest() / float64(used)
	if scaled {
		most /= max(c.Scale, 1)
	}
	k := min(math.Sqrt(most), 0.9*kv.Largest())
	x := min(most/k, 0.9*q.Largest())
	if !scaled {
		c.Scale = most / k / x // 1, unless that exceeds the range of the formats
	}
	draw := func(row []float64, size float64) {
		for i := range row {
			row[i] = 0
			if i < used {
				row[i] = size * (0.7 + 0.3*rng.Float64())
			}
		}
	}
	for at := 0; at < len(c.Q); at += c.Dim {
		draw(c.Q[at:at+c.Dim], x)
	}
	signs := [][]float64{{1}, {-1}, {1, -1}, {-1, -1, -1, 1 / most}, {1 / most, -1}}[rng.IntN(5)]
	step := c.KVHeads * c.Dim
	for at := 0; at < len(c.K); at += c.Dim {
		draw(c.K[at:at+c.Dim], k*signs[rng.IntN(len(signs))])
		if at >= step && rng.IntN(4) == 0 {
			copy(c.K[at:at+c.Dim], c.K[at-step:])
		}
	}
}

func scale(x []float64, f float64) {
	for i := range x {
		x[i] *= f
	}
}

// repeat copies the first n elements of x over all following elements.
func repeat(x []float64, n int) {
	for i := n; i < len(x); i++ {
		x[i] = x[i-n]
	}
}

func round(x []float64, f Format) {
	for i := range x {
		x[i] = f.Round(x[i])
	}
}

// RandomScoreMods gives s at least one of a window, a soft cap, slopes and sinks.
func RandomScoreMods(rng *rand.Rand, s Shape) Shape {
	which := 1 + rng.IntN(3)
	if which&1 != 0 {
		s = RandomWindowCapSlopes(rng, s)
	}
	if which&2 != 0 {
		s = RandomSinks(rng, s)
	}
	return s
}

// RandomSinks gives s sinks. Some may be missing, and some may be so large that the keys have almost no
// weight. All sinks are float32 numbers.
func RandomSinks(rng *rand.Rand, s Shape) Shape {
	s.Sinks = make([]float64, s.Heads)
	spread := []float64{1, 1, 4, 30, 1e4}[rng.IntN(5)]
	for h := range s.Sinks {
		s.Sinks[h] = float64(float32(spread * rng.NormFloat64()))
		if rng.IntN(6) == 0 {
			s.Sinks[h] = math.Inf(-1)
		}
	}
	return s
}

// RandomWindowCapSlopes gives s at least one of a window, a soft cap and slopes.
func RandomWindowCapSlopes(rng *rand.Rand, s Shape) Shape {
	which := 1 + rng.IntN(7)
	if which&1 != 0 {
		s.Window = []int{1, 2, 3, 16, 17, 1 + rng.IntN(100), 1 + rng.IntN(400), math.MaxInt}[rng.IntN(8)]
	}
	if which&2 != 0 {
		s.SoftCap = []float64{0.01, 1, 30, 50, 1e6}[rng.IntN(5)]
	}
	if which&4 != 0 {
		s.Slopes = make([]float64, s.Heads)
		for h := range s.Slopes {
			s.Slopes[h] = math.Exp2(-8 * rng.Float64())
			if rng.IntN(8) == 0 { // any number will do
				s.Slopes[h] = rng.NormFloat64() * []float64{0, 0.1, -1}[rng.IntN(3)]
			}
		}
	}
	return s
}

// RandomPrefixMods gives s slopes, a window that hides keys of some of its sequences, or of none, or both; and maybe sink tokens.
func RandomPrefixMods(rng *rand.Rand, s Shape) Shape {
	which := 1 + rng.IntN(3)
	if which&1 != 0 {
		s.Slopes = make([]float64, s.Heads)
		for h := range s.Slopes {
			s.Slopes[h] = math.Exp2(-8*rng.Float64()) * []float64{1, 1, 1, 0, -0.1}[rng.IntN(5)]
		}
	}
	if which&2 != 0 {
		s.Window = 1 + rng.IntN(slices.Max(s.Keys)+20)
		if rng.IntN(3) == 0 {
			s.SinkTokens = 1 + rng.IntN(40)
		}
	}
	return s
}

// RandomSinkTokens gives s sink tokens, and a window if s has none.
func RandomSinkTokens(rng *rand.Rand, s Shape) Shape {
	if s.Window == 0 {
		s.Window = []int{1, 2, 5, 16, 1 + rng.IntN(100)}[rng.IntN(5)]
	}
	s.SinkTokens = []int{1, 2, 4, 4, 7, 16, 1 + rng.IntN(300)}[rng.IntN(7)]
	return s
}

// RandomTree draws a tree of the given number of tokens: a chain, a bush, or a form between the two.
func RandomTree(rng *rand.Rand, tokens int) attn.Tree {
	parents := make([]int, tokens)
	reach := []int{1, 2, 4, tokens}[rng.IntN(4)] // maximum distance of a parent
	for i := range parents {
		parents[i] = max(i-1-rng.IntN(max(reach, 1)), -1)
		if rng.IntN(10) == 0 {
			parents[i] = rng.IntN(i+1) - 1
		}
	}
	t, err := attn.TreeOf(parents)
	if err != nil {
		panic(err)
	}
	return t
}

// Parents returns the parents of a tree's tokens, or nil for no tree.
func Parents(t attn.Tree) (parents []int) {
	for i, seen := range t {
		parents = append(parents, bits.Len64(seen&^(1<<i))-1)
	}
	return parents
}

// RandomTrees makes s a causal shape with trees, and gives most sequences a tree that fits. A sequence with a
// tree needs as many keys as queries.
func RandomTrees(rng *rand.Rand, s Shape) Shape {
	s.Causal, s.Window, s.Slopes = true, 0, nil
	s.Tree, s.Trees = true, make([]attn.Tree, len(s.Queries))
	s.Keys = slices.Clone(s.Keys)
	for i, n := range s.Queries {
		if n > attn.MaxTree || n > 0 && rng.IntN(5) == 0 {
			continue
		}
		s.Keys[i] = max(s.Keys[i], n)
		s.Trees[i] = RandomTree(rng, n)
	}
	return s
}

// RandomDropout gives s dropout.
func RandomDropout(rng *rand.Rand, s Shape) Shape {
	s.Dropout = []float64{0.1, 0.5, 0.9, rng.Float64()}[rng.IntN(4)]
	s.Seed = int64(rng.Uint64()) | 1
	return s
}

// Kept returns the factor of the weight of key j: 0 if the weight is dropped, or else the inverse of the
// probability to keep it.
func (s Shape) Kept(seq, pos, head, j int) float64 {
	r := dropout.Of(s.Dropout, s.Seed)
	if r.Drops(dropout.RowOf(seq, head, pos), j) {
		return 0
	}
	return 1 / r.Keep()
}

// drops reports whether s drops any weights.
func (s Shape) drops() bool { return !dropout.Of(s.Dropout, s.Seed).None() }

// DenseBias returns the numbers of the bias, with NaN for keys that no query sees.
func (s Shape) DenseBias() []float64 {
	if s.Bias.X == nil {
		return nil
	}
	x := make([]float64, len(s.Bias.X))
	for i := range x {
		x[i] = math.NaN()
	}
	for seq, queries := range s.Queries {
		for head := range s.Heads {
			for pos := range queries {
				at := s.Bias.Row(seq, head, pos)
				for j := range s.Visible(seq, pos) {
					if s.Sees(seq, pos, j) {
						x[at+j] = s.Bias.X[at+j]
					}
				}
			}
		}
	}
	return x
}

// RandomBias gives s a bias for up to capacity keys. The numbers are moderate or large. They may hide keys,
// or all keys of a query. All are float32 numbers.
func RandomBias(rng *rand.Rand, s Shape, capacity int) Shape {
	size := func(n int) int {
		if rng.IntN(2) == 0 {
			return 1
		}
		return max(n, 1)
	}
	queries := 0
	for _, n := range s.Queries {
		queries = max(queries, n)
	}
	b := Bias{Sequences: size(len(s.Keys)), Heads: size(s.Heads), Queries: size(queries), Keys: capacity}
	b.X = make([]float64, b.Sequences*b.Heads*b.Queries*b.Keys)
	spread := []float64{1, 10, 1e4}[rng.IntN(3)]
	hidden := []float64{0, 0, 0.3, 0.95}[rng.IntN(4)]
	for i := range b.X {
		b.X[i] = float64(float32(spread * rng.NormFloat64()))
		if rng.Float64() < hidden {
			b.X[i] = math.Inf(-1)
		}
	}
	if rng.IntN(3) == 0 { // one query, or all queries, see no key
		at := rng.IntN(len(b.X)/capacity) * capacity
		for i := range capacity {
			b.X[at+i] = math.Inf(-1)
		}
	}
	s.Bias = b
	return s
}

// Score returns the score of key j for a position before a variant, given the product s = Scale*q.k, and the score's
// derivative with respect to the product. off is the error bound of the product. scoreOff and derivativeOff
// are the resulting error bounds. With t = tanh(s/SoftCap), the score's error comes from the product's error
// and from the rounding of each term. The error of the derivative 1-t*t is 2 |t| times the error of t.
func (s Shape) Score(seq, pos, head, j int, product, off, u float64) (score, scoreOff, derivative, derivativeOff float64) {
	score, scoreOff, derivative = product, off, 1
	if s.SoftCap != 0 {
		t := math.Tanh(product / s.SoftCap)
		tOff := math.Max(math.Tanh((product+off)/s.SoftCap)-t, t-math.Tanh((product-off)/s.SoftCap)) + 2*u*math.Abs(t)
		score, scoreOff = s.SoftCap*t, s.SoftCap*tOff
		derivative, derivativeOff = (1-t)*(1+t), tOff*(2*math.Abs(t)+tOff)+4*u
	}
	if s.Slopes != nil {
		bias := s.Slopes[head] * float64(j-(s.Keys[seq]-s.Queries[seq]+pos))
		score += bias
		scoreOff += 4 * u * (math.Abs(bias) + math.Abs(score))
	}
	if s.Bias.X != nil {
		bias := s.Bias.X[s.Bias.Row(seq, head, pos)+j] * s.Bias.scale()
		if math.IsInf(bias, -1) {
			return bias, 0, derivative, derivativeOff
		}
		score += bias
		scoreOff += 4 * u * (math.Abs(bias) + math.Abs(score))
	}
	return score, scoreOff, derivative, derivativeOff
}

// RandomShape draws a small shape with sizes that often reveal kernel bugs: odd dimensions, unusual group
// sizes, sequences without queries or keys, more queries than keys, and lengths next to powers of two.
func RandomShape(rng *rand.Rand) Shape {
	pick := func(n ...int) int { return n[rng.IntN(len(n))] }
	s := Shape{
		KVHeads: pick(1, 1, 2, 3),
		Dim:     pick(1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 40, 59, 64, 80, 96, 128),
		Mask:    attn.Mask{Causal: rng.IntN(2) == 0},
	}
	s.Heads = s.KVHeads * pick(1, 1, 2, 3, 4, 5, 7, 8)
	s.ValueDim = s.Dim
	if rng.IntN(3) == 0 {
		s.ValueDim = pick(1, 5, 16, 24, 64, 72)
	}
	for range pick(1, 1, 2, 3, 5) {
		s.Queries = append(s.Queries, pick(0, 1, 1, 1, 1, 2, 3, 5, 17, 33))
		s.Keys = append(s.Keys, pick(0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200+rng.IntN(200)))
	}
	return s
}
