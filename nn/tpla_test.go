package nn_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// weights are the latent weights of the case.
func (c *mlaCase) weights(t *testing.T, dtype tensor.Dtype) *nn.LatentWeights {
	t.Helper()
	of := func(name string) *tensor.Dense {
		if c.x[name] == nil {
			return nil
		}
		return graphtest.TensorOf(dtype, c.x[name], c.shapes()[name]...)
	}
	key, value, err := nn.SplitKVUp(of("up"), c.heads, c.nope)
	if err != nil {
		t.Fatal(err)
	}
	return &nn.LatentWeights{Heads: c.heads, Down: of("down"), DownBias: of("down bias"), Norm: of("norm"), Key: key, Value: value}
}

// with is the case with other latent weights.
func (c *mlaCase) with(w *nn.LatentWeights) *mlaCase {
	d := *c
	d.latents, d.latent = w, w.Norm.Shape()[0]
	return &d
}

// run runs the graph of a case.
func (c *mlaCase) run(t *testing.T, dtype tensor.Dtype, expanded bool) []float64 {
	t.Helper()
	g, _, y := c.graph(t, dtype, expanded)
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(err)
	}
	return mlaFloats(y.Value())
}

// newTPLACase is a case with a latent size that is a power of two, and calibration data of a text of its own.
func newTPLACase(t *testing.T, rng *rand.Rand, i int) (c *mlaCase, of *nn.TPLA) {
	c = newMLACase(rng, i)
	c.latent = 4 << rng.IntN(3)
	for _, name := range []string{"down", "down bias", "norm", "up"} {
		if shape, ok := c.shapes()[name]; ok {
			c.x[name] = make([]float64, tensor.Shape(shape).TotalSize())
			for j := range c.x[name] {
				c.x[name][j] = float64(float32(rng.NormFloat64()))
			}
		}
	}
	of = &nn.TPLA{Shards: 2 << (i % 2), Seed: rng.Uint64()}
	if i%3 > 0 {
		of.PCA = i%3 == 1
		tokens := 1 + rng.IntN(3*c.latent)
		of.Latents = graphtest.TensorOf(tensor.Float64, normals(rng, tokens*(c.latent+c.rope)), tokens, c.latent+c.rope)
		if i%4 > 1 {
			of.Queries = graphtest.TensorOf(tensor.Float32, normals(rng, tokens*c.heads*(c.nope+c.rope)), tokens, c.heads*(c.nope+c.rope))
		}
	}
	return c, of
}

func normals(rng *rand.Rand, n int) []float64 {
	x := make([]float64, n)
	for i := range x {
		x[i] = rng.NormFloat64()
	}
	return x
}

func (c *mlaCase) slice(t *testing.T, of *nn.TPLA, dtype tensor.Dtype) (whole *mlaCase, shards []*mlaCase) {
	t.Helper()
	w, parts, err := of.Slice(c.weights(t, dtype))
	if err != nil {
		t.Fatalf("%+v: %v", c, err)
	}
	for _, p := range parts {
		shards = append(shards, c.with(p))
	}
	return c.with(w), shards
}

func near(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d elements, want %d", what, len(got), len(want))
	}
	for i, w := range want {
		if !(math.Abs(got[i]-w) <= tolerance*(1+math.Abs(w))) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, got[i], w)
		}
	}
}

// sum is the sum of all shards' attention.
func sumOf(t *testing.T, shards []*mlaCase, dtype tensor.Dtype) (y []float64) {
	t.Helper()
	for _, s := range shards {
		part := s.run(t, dtype, false)
		if y == nil {
			y = make([]float64, len(part))
		}
		for i, v := range part {
			y[i] += v
		}
	}
	return y
}

// TestTPLAWhole: rotated weights are the same MLA (proposition 1), in both forms, with Hadamard's matrix and with eigenvectors.
func TestTPLAWhole(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 48 {
		c, of := newTPLACase(t, rng, i)
		want := c.want()
		for dtype, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-11, tensor.Float32: 1e-3} {
			whole, _ := c.slice(t, of, dtype)
			for _, v := range mlaFloats(whole.latents.Norm) {
				if v != 1 {
					t.Fatalf("norm %v", whole.latents.Norm)
				}
			}
			for _, expanded := range []bool{false, true} {
				near(t, "rotated", whole.run(t, dtype, expanded), want, tolerance)
			}
		}
	}
}

// formula computes the sum of the shards' attention from rotated weights, by the formulas of TPLA. The norm of part j is that of the whole
// vectors for rows before prefix, and its own for the others. Latent vectors are rounded to the type of a cache.
func (c *mlaCase) formula(t *testing.T, alpha, mu []float64, prefix int, storage tensor.Dtype) []float64 {
	t.Helper()
	w := c.latents
	down, key, value := mlaFloats(w.Down), mlaFloats(w.Key), mlaFloats(w.Value)
	bias := make([]float64, c.latent+c.rope)
	if w.DownBias != nil {
		bias = mlaFloats(w.DownBias)
	}
	part := c.latent / len(alpha)
	var latents, turned [][]float64
	y := make([]float64, c.rows*c.heads*c.value)
	for row := range c.rows {
		x, r, q := c.project(row, down, bias)
		whole := 0.0
		for _, v := range x {
			whole += v * v / float64(c.latent)
		}
		n := slices.Clone(x)
		for j, a := range alpha {
			own := 0.0
			for _, v := range x[j*part:][:part] {
				own += v * v / float64(part)
			}
			// The length of the whole vector is about alpha times that of the part.
			mean := own * a / float64(len(alpha))
			if row < prefix {
				mean = whole
			}
			for k := range part {
				if n[j*part+k] = x[j*part+k] / math.Sqrt(mean+mlaEps); row >= prefix && math.IsInf(a, 1) {
					n[j*part+k] = 0
				}
			}
		}
		if storage == la.BFloat16 {
			for _, x := range [][]float64{n, r} {
				for k, v := range x {
					x[k] = float64(half.BFromFloat64(v).Float32())
				}
			}
		}
		latents, turned = append(latents, n), append(turned, r)
		for h := range c.heads {
			qh := q[h*(c.nope+c.rope):][:c.nope+c.rope]
			for j, m := range mu {
				o, total := make([]float64, part), 0.0
				absorbed := make([]float64, part)
				for e := range absorbed {
					for i, v := range qh[:c.nope] {
						absorbed[e] += m * v * key[(h*c.latent+j*part+e)*c.nope+i]
					}
				}
				scores := make([]float64, row+1)
				for k := range scores {
					score := 0.0
					for e, v := range absorbed {
						score += v * latents[k][j*part+e]
					}
					for i, v := range qh[c.nope:] {
						score += v * turned[k][i]
					}
					scores[k] = c.scale * score
				}
				for k, s := range scores {
					p := math.Exp(s - slices.Max(scores))
					total += p
					for e := range o {
						o[e] += p * latents[k][j*part+e]
					}
				}
				for v := range c.value {
					for e := range o {
						y[(row*c.heads+h)*c.value+v] += o[e] / total * value[(h*c.value+v)*c.latent+j*part+e]
					}
				}
			}
		}
	}
	return y
}

// TestTPLAShards: the sum of the shards' attention is that of the formulas, in float64 and float32.
func TestTPLAShards(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 48 {
		c, of := newTPLACase(t, rng, i)
		if i%5 == 0 { // factors of the caller
			of.Alpha, of.Mu = make([]float64, of.Shards), make([]float64, of.Shards)
			for j := range of.Alpha {
				of.Alpha[j], of.Mu[j] = 0.5+3*rng.Float64(), rng.NormFloat64()
			}
		}
		for dtype, tolerance := range map[tensor.Dtype]float64{tensor.Float64: 1e-10, tensor.Float32: 2e-3} {
			whole, shards := c.slice(t, of, dtype)
			if whole.latents.Alpha != 0 || whole.latents.Mu != 0 {
				t.Errorf("whole weights have factors %v and %v", whole.latents.Alpha, whole.latents.Mu)
			}
			alpha, mu := factors(shards)
			if of.Alpha != nil && (!slices.Equal(alpha, of.Alpha) || !slices.Equal(mu, of.Mu)) {
				t.Errorf("factors %v, %v, want %v, %v", alpha, mu, of.Alpha, of.Mu)
			}
			if slices.Max(mu) > 20 {
				continue // exponentials of other size
			}
			near(t, "sum of shards", sumOf(t, shards, dtype), whole.formula(t, alpha, mu, 0, dtype), tolerance)
		}
	}
}

// TestTPLAOneHalf: if latent vectors have no second half, the first shard is exact and the second one gives zeros.
func TestTPLAOneHalf(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 20 {
		c, of := newTPLACase(t, rng, 3*i+1) // by eigenvectors
		of.Shards, of.Queries, of.Mu = 2, nil, []float64{1, 1}
		// Vectors have rank latent/2.
		half := c.latent / 2
		mix := normals(rng, c.latent*half)
		low := func(columns int, row func(i int) []float64) {
			x := normals(rng, half*columns)
			for i := range c.latent {
				to := row(i)
				clear(to)
				for k := range half {
					for j := range to {
						to[j] += mix[i*half+k] * x[k*columns+j]
					}
				}
			}
		}
		low(c.width, func(i int) []float64 { return c.x["down"][i*c.width:][:c.width] })
		if b := c.x["down bias"]; b != nil {
			low(1, func(i int) []float64 { return b[i:][:1] })
		}
		const tokens = 40
		columns := make([]float64, c.latent*tokens)
		low(tokens, func(i int) []float64 { return columns[i*tokens:][:tokens] })
		latents := normals(rng, tokens*(c.latent+c.rope))
		for i := range tokens {
			for k := range c.latent {
				latents[i*(c.latent+c.rope)+k] = columns[k*tokens+i]
			}
		}
		of.Latents = graphtest.TensorOf(tensor.Float64, latents, tokens, c.latent+c.rope)
		_, shards := c.slice(t, of, tensor.Float64)
		if a := shards[0].latents.Alpha; math.Abs(a-1) > 1e-12 || !math.IsInf(shards[1].latents.Alpha, 1) {
			t.Fatalf("factors %v and %v", a, shards[1].latents.Alpha)
		}
		near(t, "first shard", shards[0].run(t, tensor.Float64, false), c.want(), 1e-9)
		for _, v := range shards[1].run(t, tensor.Float64, false) {
			if v != 0 {
				t.Fatalf("the second shard has %v", v)
			}
		}
	}
}

// lowRank is calibration data of a random model: latent vectors of a decaying spectrum, which queries look for.
func lowRank(rng *rand.Rand, heads, nope, rope, latent, tokens int) (*nn.LatentWeights, *nn.TPLA) {
	of := func(x []float64, shape ...int) *tensor.Dense { return graphtest.TensorOf(tensor.Float64, x, shape...) }
	scaled := func(n int, by float64) []float64 {
		x := normals(rng, n)
		for i := range x {
			x[i] *= by
		}
		return x
	}
	w := &nn.LatentWeights{
		Heads: heads, Down: of(scaled((latent+rope)*3, 1), latent+rope, 3), Norm: of(slices.Repeat([]float64{1}, latent), latent),
		Key: of(scaled(heads*latent*nope, 1/math.Sqrt(float64(latent))), heads*latent, nope), Value: of(scaled(heads*nope*latent, 1/math.Sqrt(float64(latent))), heads*nope, latent),
	}
	mix, latents := normals(rng, latent*latent), scaled(tokens*(latent+rope), 1)
	for i := range tokens {
		z := normals(rng, latent)
		for k := range latent {
			v := 0.0
			for e := range z {
				v += mix[k*latent+e] * z[e] * math.Exp(-6*float64(e)/float64(latent))
			}
			latents[i*(latent+rope)+k] = v
		}
	}
	return w, &nn.TPLA{Latents: of(latents, tokens, latent+rope), Queries: of(scaled(tokens*heads*(nope+rope), 1), tokens, heads*(nope+rope))}
}

// TestTPLAErrors: slicing the norm costs less than slicing the softmax, and that less than both; a prefix with whole norms costs about as
// much as none; and fitted factors cost less than the reciprocal shares.
func TestTPLAErrors(t *testing.T) {
	rng := reftest.Rand(t)
	for _, pca := range []bool{false, true} {
		w, of := lowRank(rng, 6, 12, 4, 32, 80)
		of.PCA, of.Seed = pca, 7
		scale := 1 / math.Sqrt(16)
		norm, softmax, both, prefilled, err := of.Errors(w, scale)
		_, shards, e := of.Slice(w)
		if err != nil || e != nil {
			t.Fatal(err, e)
		}
		t.Logf("PCA %v: norm %.4f, softmax %.4f, both %.4f, prefilled %.4f; factors %.3f %.3f, %.3f %.3f", pca, norm, softmax, both, prefilled,
			shards[0].Alpha, shards[1].Alpha, shards[0].Mu, shards[1].Mu)
		// By Hadamard's matrix the softmax makes almost all of the error.
		slack := map[bool]float64{true: 1, false: 0.95}[pca]
		if !(0 < norm && norm < softmax && slack*softmax < both && prefilled < 1.1*both) {
			t.Errorf("PCA %v: norm %v, softmax %v, both %v, prefilled %v", pca, norm, softmax, both, prefilled)
		}
		reciprocal := *of
		for _, s := range shards {
			reciprocal.Mu = append(reciprocal.Mu, s.Alpha)
		}
		_, _, worse, _, err := reciprocal.Errors(w, scale)
		t.Logf("reciprocal shares: both %.4f", worse)
		if err != nil || !(both < worse) {
			t.Errorf("PCA %v: fitted %v, by reciprocal shares %v, %v", pca, both, worse, err)
		}
	}
}

// TestTPLAFactors: Alpha is the reciprocal of a part's share in the squares of normalised latent vectors, and Mu the least-squares solution
// for scores less their mean over the keys of a query.
func TestTPLAFactors(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 12 {
		const heads, nope, rope, latent, tokens = 3, 4, 2, 8, 17
		w, of := lowRank(rng, heads, nope, rope, latent, tokens)
		of.PCA, of.Shards, of.Seed = i%2 == 0, 2<<(i%4/2), rng.Uint64()
		// Down is the identity, so that rotated it is the rotation.
		w.Down = graphtest.TensorOf(tensor.Float64, make([]float64, (latent+rope)*latent), latent+rope, latent)
		for k := range latent {
			w.Down.Data().([]float64)[k*latent+k] = 1
		}
		whole, shards, err := of.Slice(w)
		if err != nil {
			t.Fatal(err)
		}
		part := latent / of.Shards
		turn, key := mlaFloats(whole.Down), mlaFloats(whole.Key)
		c, all := make([][]float64, tokens), make([]float64, of.Shards)
		for i := range c {
			x, sum := mlaFloats(of.Latents)[i*(latent+rope):][:latent], 0.0
			for _, v := range x {
				sum += v * v / latent
			}
			for k := range latent {
				v := 0.0
				for e := range latent {
					v += turn[k*latent+e] * x[e] / math.Sqrt(sum)
				}
				c[i] = append(c[i], v)
				all[k/part] += v * v / (latent * tokens)
			}
		}
		for j, s := range shards {
			if math.Abs(s.Alpha*all[j]-1) > 1e-10 {
				t.Errorf("Alpha %v, and the share is %v", s.Alpha, all[j])
			}
			var products, squares float64
			for h := range heads {
				for i := range tokens {
					q := mlaFloats(of.Queries)[(i*heads+h)*(nope+rope):][:nope]
					var full, own []float64
					for _, x := range c[:i+1] {
						f, o, sum := 0.0, 0.0, 0.0
						for k, v := range x {
							product := 0.0
							for e, u := range q {
								product += v * u * key[(h*latent+k)*nope+e]
							}
							if f += product; k/part == j {
								o += product
								sum += v * v / float64(part)
							}
						}
						full, own = append(full, f), append(own, o*math.Sqrt(float64(of.Shards)/s.Alpha)/math.Sqrt(sum))
					}
					mean := func(x []float64) (m float64) {
						for _, v := range x {
							m += v / float64(len(x))
						}
						return m
					}
					mf, mo := mean(full), mean(own)
					for k := range own {
						products += (own[k] - mo) * (full[k] - mf)
						squares += (own[k] - mo) * (own[k] - mo)
					}
				}
			}
			if want := products / squares; math.Abs(s.Mu-want) > 1e-9*(1+math.Abs(want)) {
				t.Errorf("Mu %v, want %v", s.Mu, want)
			}
		}
	}
}

// TestTPLARefused: what does not fit is an error with its name and value.
func TestTPLARefused(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range []struct {
		change func(w *nn.LatentWeights, of *nn.TPLA)
		kind   error
		text   string
	}{
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.Heads = 0 }, la.ErrShape, "Heads is 0"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.Heads = 5 }, la.ErrShape, "Key has shape (32, 3)"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.Key = nil }, la.ErrUnsupported, "Key is no tensor"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.Down = w.Norm }, la.ErrShape, "Down has shape (8), want rank 2"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.DownBias = w.Norm }, la.ErrShape, "DownBias of 8"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.Value = w.Key }, la.ErrShape, "Value has shape (32, 3)"},
		{func(w *nn.LatentWeights, of *nn.TPLA) {
			w.Value = tensor.New(tensor.WithShape(12, 8), tensor.Of(tensor.Int))
		}, la.ErrDType, "Value is of int"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Shards = 3 }, la.ErrOption, "Shards is 3"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Shards = 1 }, la.ErrOption, "Shards is 1"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Shards = -2 }, la.ErrOption, "Shards is -2"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Latents = nil }, la.ErrOption, "without Latents"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Latents = w.Key }, la.ErrShape, "Latents have shape (32, 3), want (tokens, 10)"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Queries = w.Key }, la.ErrShape, "Queries have shape (32, 3)"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Queries.Data().([]float64)[3] = math.NaN() }, la.ErrOption, "element 3 of calibration data is NaN"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Alpha = []float64{1, 0} }, la.ErrOption, "Alpha is [1 0]"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Alpha = []float64{1, math.NaN()} }, la.ErrOption, "Alpha is [1 NaN]"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Mu = []float64{1, math.Inf(1)} }, la.ErrOption, "Mu is [1 +Inf]"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { of.Mu = []float64{1, 1, 1} }, la.ErrOption, "Mu is [1 1 1]"},
		{func(w *nn.LatentWeights, of *nn.TPLA) { w.Down.Data().([]float64)[0] = math.Inf(1) }, la.ErrDType, "of Down becomes"},
		{func(w *nn.LatentWeights, of *nn.TPLA) {
			w.Value = graphtest.TensorOf(la.Float16, slices.Repeat([]float64{65504}, 96), 12, 8)
		}, la.ErrDType, "of Value becomes"},
		{func(w *nn.LatentWeights, of *nn.TPLA) {
			of.PCA, w.Norm = false, graphtest.TensorOf(tensor.Float64, normals(rng, 6), 6)
			w.Down, w.Key, w.Value = graphtest.TensorOf(tensor.Float64, normals(rng, 16), 8, 2), graphtest.TensorOf(tensor.Float64, normals(rng, 72), 24, 3), graphtest.TensorOf(tensor.Float64, normals(rng, 24), 4, 6)
		}, la.ErrUnsupported, "Hadamard matrix of 6 elements"},
	} {
		w, of := lowRank(rng, 4, 3, 2, 8, 5)
		of.PCA = true
		c.change(w, of)
		if _, _, err := of.Slice(w); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "TPLA.Slice") {
			t.Errorf("%q: %v", c.text, err)
		}
	}
	w, of := lowRank(rng, 4, 3, 2, 8, 5)
	of.Queries = nil
	if _, _, _, _, err := of.Errors(w, 1); !errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), "Queries are given: false") {
		t.Error(err)
	}
	if _, _, err := of.Slice(nil); !errors.Is(err, la.ErrGraph) {
		t.Error(err)
	}
	if _, _, err := (*nn.TPLA)(nil).Slice(w); !errors.Is(err, la.ErrGraph) {
		t.Error(err)
	}
}

// decoding runs steps of a case in a cache for each shard: prompt tokens by the whole weights, if there are any, each shard with its heads,
// and the others by the shards, one after the other. The result is the sum of the shards' attention.
func (c *mlaCase) decoding(t *testing.T, whole *mlaCase, shards []*mlaCase, storage tensor.Dtype, prompt int) (y []float64) {
	t.Helper()
	part := shards[0].latent
	caches, seqs := make([]*la.Cache, len(shards)), make([]*la.Sequence, len(shards))
	for j := range shards {
		caches[j] = graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: part + c.rope, ValueDim: part, ValuesInKeys: true, DType: storage, PageSize: 8, Pages: c.rows/8 + 2})
		var err error
		if seqs[j], err = caches[j].NewSequence(); err != nil {
			t.Fatal(err)
		}
	}
	options := []la.Option{la.WithCausal(), la.WithScale(c.scale)}
	if c.rotate {
		options = append(options, la.WithRotary(rope.Config{HeadDim: part + c.rope, Dim: c.rope, Last: true, Interleaved: c.interleaved}))
	}
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	run := func(rows int, build func(g *G.ExprGraph, steps []*la.Step) *G.Node) {
		t.Helper()
		g, steps := G.NewGraph(), make([]*la.Step, len(shards))
		for j := range steps {
			var err error
			if steps[j], err = caches[j].NewStep(rows); err != nil {
				t.Fatal(err)
			}
			if err := steps[j].Set([]la.Append{{Seq: seqs[j], Tokens: rows}}); err != nil {
				t.Fatal(err)
			}
		}
		out := build(g, steps)
		m := G.NewTapeMachine(g)
		defer m.Close()
		if err := m.RunAll(); err != nil {
			t.Fatal(err)
		}
		for _, s := range steps {
			if err := s.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		y = append(y, mlaFloats(out.Value())...)
	}
	if prompt > 0 {
		run(prompt, func(g *G.ExprGraph, steps []*la.Step) *G.Node {
			m, in := whole.nodes(t, g, tensor.Float32, 0, prompt)
			return must(m.Expanded(in["x"], func(q, k, v, latents *G.Node) (*G.Node, error) {
				var outs []*G.Node
				for j, s := range steps {
					of := func(x *G.Node) *G.Node {
						each := x.Shape()[1] / c.heads
						return must(nn.Slice(x, 1, j*c.heads/len(shards)*each, (j+1)*c.heads/len(shards)*each))
					}
					own := must(nn.Slice(latents, 1, j*part, (j+1)*part))
					if c.rope > 0 {
						own = must(nn.Concat(1, own, must(nn.Slice(latents, 1, whole.latent, whole.latent+c.rope))))
					}
					outs = append(outs, must(la.PromptAttention(of(q), of(k), of(v), own, c.heads/len(shards), s.Layer(0), options...)))
				}
				return nn.Concat(1, outs...)
			}, nn.WithRMSNorm(in["gamma"], mlaEps)))
		})
	}
	for row := prompt; row < c.rows; row++ {
		run(1, func(g *G.ExprGraph, steps []*la.Step) (sum *G.Node) {
			for j, s := range shards {
				m, in := s.nodes(t, g, tensor.Float32, row, 1)
				out := must(m.Absorbed(in["x"], func(q, k *G.Node) (*G.Node, error) {
					return la.CachedAttention(q, k, nil, steps[j].Layer(0), options...)
				}, nn.WithRMSNorm(in["gamma"], mlaEps)))
				if sum == nil {
					sum = out
				} else {
					sum = must(nn.Add(sum, out))
				}
			}
			return sum
		})
	}
	return y
}

// newDecoding is a case of many rows, heads divisible by two, and two shards.
func newDecoding(t *testing.T, rng *rand.Rand, i int) (c, whole *mlaCase, shards []*mlaCase) {
	c, of := newTPLACase(t, rng, i)
	c.rows, c.heads, of.Shards = 3+rng.IntN(20), 2+2*rng.IntN(2), 2
	of.Queries = nil
	for name, shape := range c.shapes() {
		if c.x[name] = normals(rng, tensor.Shape(shape).TotalSize()); name == "query" {
			for j := range c.x[name] { // weights of no single key
				c.x[name][j] /= 4
			}
		}
	}
	for name := range c.x {
		for j, v := range c.x[name] {
			c.x[name][j] = float64(float32(v))
		}
	}
	whole, shards = c.slice(t, of, tensor.Float32)
	return c, whole, shards
}

// TestTPLACached: shards with a cache each are the formulas, from the beginning of a text and behind a prompt by the whole weights, which is
// exact.
func TestTPLACached(t *testing.T) {
	rng := reftest.Rand(t)
	for i := range 24 {
		c, whole, shards := newDecoding(t, rng, i)
		prompt := (i % 2) * (1 + rng.IntN(c.rows-1))
		alpha, mu := factors(shards)
		got, want := c.decoding(t, whole, shards, tensor.Float32, prompt), whole.formula(t, alpha, mu, prompt, tensor.Float32)
		exact := prompt * c.heads * c.value
		near(t, "prompt", got[:exact], c.want()[:exact], 2e-3)
		near(t, "tokens", got[exact:], want[exact:], 2e-3)
	}
}

// TestTPLARow51: 128 heads with latent vectors of 256 + 64 elements in each of two shards: the sum of the shards against float64, in
// float32 and bfloat16; and latent vectors without a second half, for which the sum is exact.
func TestTPLARow51(t *testing.T) {
	rng := reftest.Rand(t)
	rows := reftest.Cases(t, 10, 24)
	if reftest.RaceEnabled {
		rows = 3
	}
	c := &mlaCase{rows: rows, width: 24, heads: 128, nope: 8, rope: 64, latent: 512, value: 8, rotate: true, interleaved: true, scale: 1 / math.Sqrt(72), x: map[string][]float64{}}
	for name, shape := range c.shapes() {
		c.x[name] = normals(rng, tensor.Shape(shape).TotalSize())
		for j := range c.x[name] {
			c.x[name][j] /= math.Sqrt(float64(shape[len(shape)-1]))
		}
	}
	for i := range c.x["norm"] {
		c.x["norm"][i] = 1 + rng.NormFloat64()/10
	}
	for _, one := range []bool{false, true} {
		of := &nn.TPLA{Seed: rng.Uint64()}
		if one { // by eigenvectors of 256 elements alone
			clear(c.x["down"][256*c.width : 512*c.width])
			latents := normals(rng, 300*576)
			for i := range 300 {
				clear(latents[i*576+256:][:256])
			}
			of.PCA, of.Latents = true, graphtest.TensorOf(tensor.Float64, latents, 300, 576)
		}
		whole, shards := c.slice(t, of, tensor.Float32)
		alpha, mu := factors(shards)
		if one {
			near(t, "formula", whole.formula(t, alpha, mu, 0, tensor.Float32), c.want(), 1e-5) // weights are float32
		}
		for storage, tolerance := range map[tensor.Dtype][2]float64{tensor.Float32: {1e-5, 2e-5}, la.BFloat16: {1e-3, 2e-3}} {
			want := whole.formula(t, alpha, mu, 0, storage)
			got, worst := c.decoding(t, whole, shards, storage, 0), 0.0
			for i, w := range want {
				worst = max(worst, math.Abs(got[i]-w)/(tolerance[0]*math.Abs(w)+tolerance[1]))
			}
			if t.Logf("one half %v, %v: %.2f of the tolerance", one, storage, worst); !(worst <= 1) {
				t.Errorf("one half %v, %v: %v times the tolerance", one, storage, worst)
			}
		}
	}
}

func factors(shards []*mlaCase) (alpha, mu []float64) {
	for _, s := range shards {
		alpha, mu = append(alpha, s.latents.Alpha), append(mu, s.latents.Mu)
	}
	return alpha, mu
}
