package nn

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"

	"gorgonia.org/leanattention/internal/dense"
	"gorgonia.org/leanattention/internal/errs"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/operand"

	"gonum.org/v1/gonum/mat"
	"gorgonia.org/tensor"
)

// TPLA splits the latent vectors of an [MLA] over devices: Tensor-Parallel Latent Attention (arXiv:2508.15881). It is an approximation:
// [TPLA.Errors] measures its error. [MergeRanks] serves exact attention over several processes.
//
// Latent vectors are rotated by an orthogonal matrix and cut into Shards parts. A shard has its part of latent vectors, all rotated
// elements, all heads, and a softmax and a norm of its own. For shard j
//
//	c[j] = part j of the rotated c, normalised by itself and multiplied by sqrt(Shards/Alpha[j])
//	y[j] = attention with scores Mu[j] q[j].c[j] + (product of the rotated elements), and values c[j]
//
// The sum of all y[j] approximates [MLA.Absorbed]. [TPLA.Slice] makes a shard's weights. A shard is an MLA with these weights: its
// cache has latent/Shards + rope elements a token.
//
//   - Scale: attention of a shard needs the scale of the model, since its heads are narrower ([MLA]).
//   - One process: a node [Add] sums. Several processes: [AllReduce], before the output projection or after.
//   - Prompts: [MLA.Expanded] with the whole weights that Slice returns is exact. Part j of its normalised latent vectors may stand in the
//     cache of shard j before tokens of the shard: only the later tokens are approximate.
type TPLA struct {
	Shards int // parts of latent vectors; 0: 2

	// PCA rotates latent vectors to the eigenvectors of Latents, those with the largest eigenvalues first. Otherwise a Hadamard matrix
	// with random signs rotates them, which makes all parts alike.
	PCA  bool
	Seed uint64 // of the signs

	// Latents are calibration data, or nil: the tokens of a text as rows of x Down^T + DownBias, with rotated last elements, of shape
	// (tokens, latent+rope). Each row may have any scale in its first latent elements.
	Latents *tensor.Dense
	// Queries are the queries of the same tokens, rotated, of shape (tokens, heads*(nope+rope)), or nil.
	Queries *tensor.Dense

	// Alpha has for each shard the factor from the squared length of its part of latent vectors to that of the whole vectors. nil: the
	// reciprocal of the part's share in Latents, or Shards without Latents. +Inf: the part is always zero.
	//
	// The paper's equation 25 defines the share itself, and equation 18 needs its reciprocal.
	Alpha []float64
	// Mu has for each shard the factor of its products of queries and latent vectors. nil: with Queries, the least-squares solution for the
	// scores of each query up to a constant, which the softmax ignores; without Queries, 1. The paper takes Alpha, which may be large
	// for a part with a small share, and then has the larger error.
	Mu []float64
}

// LatentWeights are the weights of an [MLA] that make and read latent vectors, in host memory. They are float32, float64,
// leanattention.Float16 or leanattention.BFloat16. Shapes are those of MLA. DownBias may be nil.
type LatentWeights struct {
	Heads                            int
	Down, DownBias, Norm, Key, Value *tensor.Dense

	Alpha, Mu float64 // of a shard, the factors that [TPLA.Slice] has put into the weights
}

// Slice returns weights for which [MLA] is the same but for rounding, whose Norm is 1, and the weights of each shard. Products are computed in
// float64, and each weight is rounded once to its type. w remains as it is.
//
// Errors: ErrShape; ErrDType (a weight of another type or beyond its type's range); ErrOption (numbers of shards, of factors, PCA without
// Latents, Queries without Latents, factors and calibration that are not finite); ErrUnsupported (a Hadamard matrix of a latent size that is
// no power of two: set PCA).
func (t *TPLA) Slice(w *LatentWeights) (whole *LatentWeights, shards []*LatentWeights, err error) {
	const name = "TPLA.Slice"
	defer errs.RecoverTo(prefix+name, &err)
	s, err := t.slice(name, w)
	if err != nil {
		return nil, nil, err
	}
	if whole, err = s.weights(name, w, s.latent, 0, 1, 1); err != nil {
		return nil, nil, err
	}
	whole.Alpha, whole.Mu = 0, 0
	for j := range s.alpha {
		v, err := s.weights(name, w, s.part(), j*s.part(), s.alpha[j], s.mu[j])
		if err != nil {
			return nil, nil, err
		}
		shards = append(shards, v)
	}
	return whole, shards, nil
}

// Errors returns the relative errors of attention by shards, for the second half of the text of Latents and Queries: the root mean square
// of the differences from exact attention, over that of exact attention, of all heads' values before the output projection. scale is that
// of the scores. Each token sees itself and the tokens before it.
//
//   - norm: parts have norms of their own, and one softmax
//   - softmax: parts have the norm of the whole vectors, and a softmax each
//   - both: as shards compute a text from its beginning
//   - prefilled: as both, behind latent vectors of the first half with the norm of the whole vectors
//
// Errors: those of [TPLA.Slice]; ErrOption without Queries or with fewer than two tokens.
func (t *TPLA) Errors(w *LatentWeights, scale float64) (norm, softmax, both, prefilled float64, err error) {
	const name = "TPLA.Errors"
	defer errs.RecoverTo(prefix+name, &err)
	s, err := t.slice(name, w)
	if err != nil {
		return 0, 0, 0, 0, err
	}
	if s.queries == nil || s.tokens < 2 {
		return 0, 0, 0, 0, errorf(name, errs.ErrOption, "Queries are given: %v, of %d tokens, want Queries of two tokens or more", s.queries != nil, s.tokens)
	}
	full := make([]float64, 0, s.tokens*s.latent)
	for i := range s.tokens {
		full = append(full, s.latents[i*(s.latent+s.rope):][:s.latent]...)
	}
	own, half := s.ownNorms(s.latents), s.tokens/2
	mixed := slices.Concat(full[:half*s.latent], own[half*s.latent:])
	exact := s.attend(full, half, scale, false)
	of := func(c []float64, apart bool) float64 { return difference(s.attend(c, half, scale, apart), exact) }
	return of(own, false), of(full, true), of(own, true), of(mixed, true), nil
}

// difference returns the root mean square of x-want over that of want.
func difference(x, want []float64) float64 {
	sum := 0.0
	for i, v := range x {
		sum += (v - want[i]) * (v - want[i])
	}
	return math.Sqrt(sum / dot(want, want))
}

// attend returns the attention of all heads and of the tokens from one on to normalised latent vectors c, with one softmax or one for each
// part.
func (s *sliced) attend(c []float64, first int, scale float64, apart bool) []float64 {
	y := make([]float64, (s.tokens-first)*s.heads*s.value)
	row, part := s.latent+s.rope, s.latent
	mu := []float64{1}
	if apart {
		part, mu = s.part(), s.mu
	}
	eachRow(s.heads, s.tokens*s.tokens*s.latent, func(h int) {
		q, o, p := make([]float64, s.latent), make([]float64, s.latent), make([]float64, s.tokens)
		for i := first; i < s.tokens; i++ {
			s.absorb(q, h, i)
			turned := s.queries[(i*s.heads+h)*(s.nope+s.rope)+s.nope:][:s.rope]
			clear(o)
			for j, m := range mu {
				from, most, sum := j*part, math.Inf(-1), 0.0
				for k := range i + 1 {
					p[k] = scale * (m*dot(q[from:from+part], c[k*s.latent+from:]) + dot(turned, s.latents[k*row+s.latent:]))
					most = max(most, p[k])
				}
				for k := range i + 1 {
					p[k] = math.Exp(p[k] - most)
					sum += p[k]
				}
				for k := range i + 1 {
					for e, v := range c[k*s.latent+from:][:part] {
						o[from+e] += p[k] / sum * v
					}
				}
			}
			to := y[((i-first)*s.heads+h)*s.value:][:s.value]
			for v := range to {
				to[v] = dot(o, s.values[(h*s.value+v)*s.latent:])
			}
		}
	})
	return y
}

// sliced is a rotated MLA in float64.
type sliced struct {
	mlaSizes
	heads, width     int
	down, bias       []float64 // bias: nil, there is none
	keys, values     []float64
	turn             []float64 // the columns of the rotation, as rows
	alpha, mu        []float64
	tokens           int
	latents, queries []float64 // of calibration: latent vectors, rotated and normalised, with rope elements behind them
}

func (s *sliced) part() int { return s.latent / len(s.alpha) }

// slice rotates w and computes the factors of shards.
func (t *TPLA) slice(name string, w *LatentWeights) (s *sliced, err error) {
	if t == nil || w == nil {
		return nil, errorf(name, errs.ErrGraph, "the TPLA or the weights are nil")
	}
	s = &sliced{heads: w.Heads}
	var norm []float64
	for _, x := range []struct {
		name string
		t    *tensor.Dense
		rank int
		to   *[]float64
		may  bool // be nil
	}{
		{"Down", w.Down, 2, &s.down, false}, {"DownBias", w.DownBias, 1, &s.bias, true}, {"Norm", w.Norm, 1, &norm, false},
		{"Key", w.Key, 2, &s.keys, false}, {"Value", w.Value, 2, &s.values, false},
		{"Latents", t.Latents, 2, &s.latents, true}, {"Queries", t.Queries, 2, &s.queries, true},
	} {
		if *x.to, err = wide(name, x.name, x.t, x.rank, x.may); err != nil {
			return nil, err
		}
	}
	down, key, value := w.Down.Shape(), w.Key.Shape(), w.Value.Shape()
	s.latent, s.width, s.nope = len(norm), down[1], key[1]
	s.rope = down[0] - s.latent
	shards := t.Shards
	if shards == 0 {
		shards = 2
	}
	switch {
	case w.Heads < 1:
		return nil, errorf(name, errs.ErrShape, "Heads is %d, want at least 1", w.Heads)
	case s.rope < 0 || s.bias != nil && len(s.bias) != down[0]:
		return nil, errorf(name, errs.ErrShape, "Down has shape %v, with Norm of %d elements and DownBias of %d", down, s.latent, len(s.bias))
	case key[0] != w.Heads*s.latent:
		return nil, errorf(name, errs.ErrShape, "Key has shape %v, want (%d*%d, nope)", key, w.Heads, s.latent)
	case value[1] != s.latent || value[0]%w.Heads != 0:
		return nil, errorf(name, errs.ErrShape, "Value has shape %v, want (%d*value, %d)", value, w.Heads, s.latent)
	case shards < 2 || s.latent%shards != 0:
		return nil, errorf(name, errs.ErrOption, "Shards is %d, want 2 or more that divide the %d elements of a latent vector", shards, s.latent)
	case t.Latents == nil && (t.PCA || t.Queries != nil):
		return nil, errorf(name, errs.ErrOption, "PCA is %v and Queries are given: %v, without Latents", t.PCA, t.Queries != nil)
	case !t.PCA && bits.OnesCount(uint(s.latent)) != 1:
		return nil, errorf(name, errs.ErrUnsupported, "a Hadamard matrix of %d elements, which is no power of two: set PCA, with Latents", s.latent)
	case t.Latents != nil && t.Latents.Shape()[1] != down[0]:
		return nil, errorf(name, errs.ErrShape, "Latents have shape %v, want (tokens, %d)", t.Latents.Shape(), down[0])
	case t.Queries != nil && !t.Queries.Shape().Eq(tensor.Shape{t.Latents.Shape()[0], w.Heads * (s.nope + s.rope)}):
		return nil, errorf(name, errs.ErrShape, "Queries have shape %v, want (%d, %d*(%d+%d))", t.Queries.Shape(), t.Latents.Shape()[0], w.Heads, s.nope, s.rope)
	}
	s.value = value[0] / w.Heads
	for _, x := range [][]float64{s.latents, s.queries} {
		if i := slices.IndexFunc(x, func(v float64) bool { return math.IsNaN(v - v) }); i >= 0 {
			return nil, errorf(name, errs.ErrOption, "element %d of calibration data is %v", i, x[i])
		}
	}
	if t.Latents != nil {
		s.tokens = t.Latents.Shape()[0]
		s.normalise()
	}
	if t.PCA {
		if s.turn, err = s.eigenvectors(name); err != nil {
			return nil, err
		}
	} else {
		s.turn = hadamard(s.latent, t.Seed)
	}
	if err := s.rotate(norm); err != nil {
		return nil, err
	}
	s.alpha, s.mu = slices.Clone(t.Alpha), slices.Clone(t.Mu)
	if s.alpha == nil {
		s.shares(shards)
	}
	if len(s.alpha) != shards || slices.ContainsFunc(s.alpha, func(a float64) bool { return !(a > 0) }) {
		return nil, errorf(name, errs.ErrOption, "Alpha is %v, want %d positive numbers", s.alpha, shards)
	}
	if s.mu == nil {
		s.fit()
	}
	if len(s.mu) != shards || slices.ContainsFunc(s.mu, func(m float64) bool { return math.IsNaN(m - m) }) {
		return nil, errorf(name, errs.ErrOption, "Mu is %v, want %d finite numbers", s.mu, shards)
	}
	return s, nil
}

// normalise divides latent vectors by their root mean squares. Zeros remain.
func (s *sliced) normalise() {
	for i := range s.tokens {
		c := s.latents[i*(s.latent+s.rope):][:s.latent]
		if r := rms(c); r > 0 {
			for k := range c {
				c[k] /= r
			}
		}
	}
}

func rms(x []float64) float64 { return math.Sqrt(dot(x, x) / float64(len(x))) }

func dot(x, y []float64) (sum float64) {
	for i, v := range x {
		sum += v * y[i]
	}
	return sum
}

// hadamard returns Sylvester's matrix of n rows, divided by sqrt(n), with columns of random signs.
func hadamard(n int, seed uint64) []float64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	h, one := make([]float64, n*n), 1/math.Sqrt(float64(n))
	for i := range n {
		sign := one * float64(1-2*int(rng.Uint64()>>63))
		for k := range n {
			h[k*n+i] = sign * float64(1-2*(bits.OnesCount(uint(i&k))&1))
		}
	}
	return h
}

// eigenvectors returns those of the second moments of the latent vectors, the largest eigenvalue first.
func (s *sliced) eigenvectors(name string) ([]float64, error) {
	n, row := s.latent, s.latent+s.rope
	columns := transposed(s.latents, s.tokens, n, row)
	moments := make([]float64, n*n)
	if err := multiply(moments, columns, columns, nil, n, n, s.tokens); err != nil {
		return nil, err
	}
	var of mat.EigenSym
	if !of.Factorize(mat.NewSymDense(n, moments), true) {
		return nil, errorf(name, errs.ErrOption, "the eigenvectors of the second moments of Latents do not converge")
	}
	var vectors mat.Dense
	of.VectorsTo(&vectors) // columns, the smallest eigenvalue first
	turn := make([]float64, 0, n*n)
	for k := n - 1; k >= 0; k-- {
		turn = append(turn, mat.Col(nil, k, &vectors)...)
	}
	return turn, nil
}

// rotate folds norm into the weights, and rotates weights and calibration data.
func (s *sliced) rotate(norm []float64) error {
	n, row := s.latent, s.latent+s.rope
	turned := func(to, x []float64, columns int) error {
		y := make([]float64, n*columns)
		err := multiply(y, s.turn, transposed(x, n, columns, columns), nil, n, columns, n)
		copy(to, y)
		return err
	}
	if err := turned(s.down, s.down[:n*s.width], s.width); err != nil {
		return err
	}
	if s.bias != nil {
		if err := turned(s.bias, s.bias[:n], 1); err != nil {
			return err
		}
	}
	for i := range s.keys {
		s.keys[i] *= norm[i/s.nope%n]
	}
	for k := range slices.Chunk(s.keys, n*s.nope) {
		if err := turned(k, k, s.nope); err != nil {
			return err
		}
	}
	for i := range s.values {
		s.values[i] *= norm[i%n]
	}
	value := make([]float64, len(s.values))
	if err := multiply(value, s.values, s.turn, nil, len(value)/n, n, n); err != nil {
		return err
	}
	s.values = value
	for i := range s.tokens {
		c := s.latents[i*row:][:n]
		if err := turned(c, c, 1); err != nil {
			return err
		}
	}
	return nil
}

// shares sets alpha.
func (s *sliced) shares(shards int) {
	s.alpha = make([]float64, shards)
	sums, all := make([]float64, shards), 0.0
	for i := range s.tokens {
		for j := range sums {
			c := s.latents[i*(s.latent+s.rope)+j*s.part():][:s.part()]
			sums[j] += dot(c, c)
		}
	}
	for _, v := range sums {
		all += v
	}
	for j, v := range sums {
		if s.alpha[j] = all / v; all == 0 {
			s.alpha[j] = float64(shards)
		}
		// The rotation leaves the size of rounding in a part of zeros.
		if v < all*0x1p-80 {
			s.alpha[j] = math.Inf(1)
		}
	}
}

// factor returns what multiplies the normalised part of a shard.
func (s *sliced) factor(alpha float64) float64 { return math.Sqrt(float64(len(s.alpha)) / alpha) }

// fit sets mu.
func (s *sliced) fit() {
	s.mu = slices.Repeat([]float64{1}, len(s.alpha))
	if s.queries == nil {
		return
	}
	own := s.ownNorms(s.latents)
	products, squares := make([]float64, len(s.mu)*s.heads), make([]float64, len(s.mu)*s.heads)
	eachRow(s.heads, s.tokens*s.tokens*s.latent, func(h int) {
		q := make([]float64, s.latent)
		scores, want := make([]float64, s.tokens), make([]float64, s.tokens)
		for i := range s.tokens {
			s.absorb(q, h, i)
			mean := 0.0
			for k := range i + 1 {
				want[k] = dot(q, s.latents[k*(s.latent+s.rope):])
				mean += want[k] / float64(i+1)
			}
			for j := range s.mu {
				from, to := j*s.part(), (j+1)*s.part()
				centre := 0.0
				for k := range i + 1 {
					scores[k] = dot(q[from:to], own[k*s.latent+from:])
					centre += scores[k] / float64(i+1)
				}
				for k, v := range scores[:i+1] {
					products[h*len(s.mu)+j] += (v - centre) * (want[k] - mean)
					squares[h*len(s.mu)+j] += (v - centre) * (v - centre)
				}
			}
		}
	})
	for j := range s.mu {
		p, v := 0.0, 0.0
		for h := range s.heads {
			p, v = p+products[h*len(s.mu)+j], v+squares[h*len(s.mu)+j]
		}
		if v > 0 {
			s.mu[j] = p / v
		}
	}
}

// absorb writes the query of head h and token i, multiplied by the keys' weights, to q.
func (s *sliced) absorb(q []float64, h, i int) {
	of := s.queries[(i*s.heads+h)*(s.nope+s.rope):][:s.nope]
	for k := range q {
		q[k] = dot(of, s.keys[(h*s.latent+k)*s.nope:])
	}
}

// ownNorms returns latent vectors whose parts are normalised by themselves, without rope elements.
func (s *sliced) ownNorms(latents []float64) []float64 {
	all := make([]float64, 0, s.tokens*s.latent)
	for i := range s.tokens {
		c := latents[i*(s.latent+s.rope):][:s.latent]
		for j, a := range s.alpha {
			part := c[j*s.part():][:s.part()]
			f := s.factor(a)
			r := rms(part)
			for _, v := range part {
				if r > 0 {
					v *= f / r
				}
				all = append(all, v)
			}
		}
	}
	return all
}

// weights returns the weights of n latent elements from an element on.
func (s *sliced) weights(name string, like *LatentWeights, n, from int, alpha, mu float64) (w *LatentWeights, err error) {
	w = &LatentWeights{Heads: s.heads, Alpha: alpha, Mu: mu}
	f := 1.0
	if n < s.latent {
		f = s.factor(alpha)
	}
	// The norm of c/f, times f, is the norm of c times f, with the eps of the whole vector.
	before := f
	if f == 0 {
		before = 1
	}
	down := slices.Clone(s.down[from*s.width:][:n*s.width])
	bias := []float64(nil)
	if s.bias != nil {
		bias = slices.Clone(s.bias[from:][:n])
	}
	for _, x := range [][]float64{down, bias} {
		for i := range x {
			x[i] /= before
		}
	}
	down = append(down, s.down[s.latent*s.width:]...)
	key, value := make([]float64, 0, s.heads*n*s.nope), make([]float64, 0, s.heads*s.value*n)
	for h := range s.heads {
		for _, v := range s.keys[(h*s.latent+from)*s.nope:][:n*s.nope] {
			key = append(key, mu*v)
		}
	}
	for v := range slices.Chunk(s.values, s.latent) {
		value = append(value, v[from:from+n]...)
	}
	if w.Down, err = narrow(name, "Down", like.Down.Dtype(), down, n+s.rope, s.width); err != nil {
		return nil, err
	}
	if bias != nil {
		if w.DownBias, err = narrow(name, "DownBias", like.DownBias.Dtype(), append(bias, s.bias[s.latent:]...), n+s.rope); err != nil {
			return nil, err
		}
	}
	if w.Norm, err = narrow(name, "Norm", like.Norm.Dtype(), slices.Repeat([]float64{f}, n), n); err != nil {
		return nil, err
	}
	if w.Key, err = narrow(name, "Key", like.Key.Dtype(), key, s.heads*n, s.nope); err != nil {
		return nil, err
	}
	w.Value, err = narrow(name, "Value", like.Value.Dtype(), value, s.heads*s.value, n)
	return w, err
}

// wide returns the elements of a tensor as float64, in memory of their own.
func wide(name, what string, t *tensor.Dense, rank int, may bool) ([]float64, error) {
	switch {
	case t == nil && may:
		return nil, nil
	case t == nil || !t.IsNativelyAccessible():
		return nil, errorf(name, errs.ErrUnsupported, "%s is no tensor in host memory", what)
	case len(t.Shape()) != rank || t.Shape().TotalSize() < 1:
		return nil, errorf(name, errs.ErrShape, "%s has shape %v, want rank %d", what, t.Shape(), rank)
	}
	var x []float64
	switch t.Dtype() {
	case tensor.Float64:
		x = slices.Clone(dense.Elements[float64](t))
	case tensor.Float32:
		for _, v := range dense.Elements[float32](t) {
			x = append(x, float64(v))
		}
	case operand.Float16:
		for _, v := range dense.Elements[half.Float16](t) {
			x = append(x, float64(v.Float32()))
		}
	case operand.BFloat16:
		for _, v := range dense.Elements[half.BFloat16](t) {
			x = append(x, float64(v.Float32()))
		}
	default:
		return nil, errorf(name, errs.ErrDType, "%s is of %v, want float32, float64, Float16 or BFloat16", what, t.Dtype())
	}
	return x, nil
}

// narrow rounds numbers to a type that wide reads.
func narrow(name, what string, as tensor.Dtype, x []float64, shape ...int) (*tensor.Dense, error) {
	var y any
	bad := -1
	switch as {
	case tensor.Float64:
		y, bad = rounded(x, func(v float64) (float64, float64) { return v, v })
	case tensor.Float32:
		y, bad = rounded(x, func(v float64) (float32, float64) { return float32(v), float64(float32(v)) })
	case operand.Float16:
		y, bad = rounded(x, func(v float64) (half.Float16, float64) {
			f := half.FromFloat64(v)
			return f, float64(f.Float32())
		})
	case operand.BFloat16:
		y, bad = rounded(x, func(v float64) (half.BFloat16, float64) {
			f := half.BFromFloat64(v)
			return f, float64(f.Float32())
		})
	}
	if bad >= 0 {
		return nil, errorf(name, errs.ErrDType, "element %d of %s becomes %v, which %v does not have", bad, what, x[bad], as)
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(y)), nil
}

// rounded returns rounded numbers, and the index of the first that is not finite, or -1. to returns a rounded number, and its value.
func rounded[T any](x []float64, to func(float64) (T, float64)) (y []T, bad int) {
	y, bad = make([]T, len(x)), -1
	for i, v := range x {
		var as float64
		if y[i], as = to(v); bad < 0 && math.IsNaN(as-as) {
			bad = i
		}
	}
	return y, bad
}
