package nn

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"pgregory.net/rapid"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

func seeded(t testing.TB) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// reference is the layer norm of one row with 300 bits.
func reference(x, gamma, beta []float64, eps float64) []float64 {
	num := func(v float64) *big.Float { return new(big.Float).SetPrec(300).SetFloat64(v) }
	n := num(float64(len(x)))
	mean, variance := num(0), num(0)
	for _, v := range x {
		mean.Add(mean, num(v))
	}
	mean.Quo(mean, n)
	d := make([]*big.Float, len(x))
	for i, v := range x {
		d[i] = num(0).Sub(num(v), mean)
		variance.Add(variance, num(0).Mul(d[i], d[i]))
	}
	variance.Quo(variance, n)
	std := num(0).Sqrt(num(0).Add(variance, num(eps)))
	y := make([]float64, len(x))
	for i := range x {
		v := num(0).Quo(d[i], std)
		if gamma != nil {
			v.Mul(v, num(gamma[i]))
		}
		if beta != nil {
			v.Add(v, num(beta[i]))
		}
		y[i], _ = v.Float64()
	}
	return y
}

func toFloat64[F float](x []F) []float64 {
	if x == nil {
		return nil
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// check compares every row of y with the reference. The bound is the rounding
// of the result and of the statistics; a common offset of a row costs what it
// costs to represent the row's differences, which is exact, so it is not in it.
func check[F float](t *testing.T, y, x, gamma, beta []F, n int, eps float64) {
	t.Helper()
	unit := math.Nextafter(1, 2) - 1
	var f F
	if _, ok := any(f).(float32); ok {
		unit = float64(math.Nextafter32(1, 2) - 1)
	}
	if len(y) != len(x) {
		t.Fatalf("%d elements, want %d", len(y), len(x))
	}
	for at := 0; at < len(x); at += n {
		row := toFloat64(x[at : at+n])
		want := reference(row, toFloat64(gamma), toFloat64(beta), eps)
		largest := 0.0
		for _, v := range row {
			largest = max(largest, math.Abs(v))
		}
		spread := 0.0 // the normalised row's factor 1/std, from the reference
		if plain := reference(row, nil, nil, eps); n > 1 {
			for i := range plain {
				for j := range plain[:i] {
					if d := row[i] - row[j]; d != 0 {
						spread = max(spread, math.Abs((plain[i]-plain[j])/d))
					}
					if j > 3 {
						break
					}
				}
			}
		}
		for i := range want {
			g, b := 1.0, 0.0
			if gamma != nil {
				g = math.Abs(float64(gamma[i]))
			}
			if beta != nil {
				b = math.Abs(float64(beta[i]))
			}
			// Rounding of the result, of gamma's and beta's terms, and in
			// float64 of the mean (relative to the largest element).
			bound := unit*(math.Abs(want[i])+b) + 0x1p-50*g*(math.Abs(want[i])+b+largest*spread+1)
			if diff := math.Abs(float64(y[at+i]) - want[i]); !(diff <= bound) {
				t.Fatalf("row %d element %d of %d: %v, want %v, off by %.3g > %.3g", at/n, i, n, y[at+i], want[i], diff, bound)
			}
		}
	}
}

func fill[F float](rng *rand.Rand, x []F, offset, scale float64) {
	for i := range x {
		x[i] = F(offset + scale*rng.NormFloat64())
	}
}

// problem is a graph with one LayerNorm whose inputs can be filled anew.
type problem[F float] struct {
	x, gamma, beta []F
	g              *G.ExprGraph
	nodes          G.Nodes // x, gamma, beta; absent ones nil
	y              *G.Node
	out            G.Value
}

func newProblem[F float](t testing.TB, shape tensor.Shape, withGamma, withBeta bool, eps float64) *problem[F] {
	t.Helper()
	p := &problem[F]{g: G.NewGraph(), nodes: make(G.Nodes, 3)}
	n := shape[len(shape)-1]
	input := func(name string, s tensor.Shape) (*G.Node, []F) {
		data := make([]F, s.TotalSize())
		v := tensor.New(tensor.WithShape(s...), tensor.WithBacking(data))
		return G.NewTensor(p.g, v.Dtype(), len(s), G.WithShape(s...), G.WithName(name), G.WithValue(v)), data
	}
	p.nodes[0], p.x = input("x", shape)
	if withGamma {
		p.nodes[1], p.gamma = input("gamma", tensor.Shape{n})
	}
	if withBeta {
		p.nodes[2], p.beta = input("beta", tensor.Shape{n})
	}
	var err error
	if p.y, err = LayerNorm(p.nodes[0], p.nodes[1], p.nodes[2], eps); err != nil {
		t.Fatal(err)
	}
	if !p.y.Shape().Eq(shape) || p.y.Dtype() != p.nodes[0].Dtype() {
		t.Fatalf("node of shape %v and type %v, want %v and %v", p.y.Shape(), p.y.Dtype(), shape, p.nodes[0].Dtype())
	}
	G.Read(p.y, &p.out)
	return p
}

func (p *problem[F]) fill(rng *rand.Rand, offset, scale float64) {
	fill(rng, p.x, offset, scale)
	fill(rng, p.gamma, 1, 0.5)
	fill(rng, p.beta, 0, 0.5)
}

func testReference[F float](t *testing.T) {
	rng := seeded(t)
	shapes := []tensor.Shape{{1}, {2}, {7}, {64}, {1, 1}, {1, 5}, {3, 1}, {2, 3}, {4, 80}, {5, 255}, {2, 768}, {3, 1025}, {2, 3, 33}, {2, 1, 3, 8}}
	for i, shape := range shapes {
		for affine := range 4 {
			p := newProblem[F](t, shape, affine&1 != 0, affine&2 != 0, 1e-5)
			vm := G.NewTapeMachine(p.g)
			for run := range 3 {
				p.fill(rng, [...]float64{0, 1000, -3}[run], [...]float64{1, 2, 1e-3}[(run+i)%3])
				before := append([]F(nil), p.x...)
				if err := vm.RunAll(); err != nil {
					t.Fatalf("shape %v: %v", shape, err)
				}
				check(t, p.out.Data().([]F), p.x, p.gamma, p.beta, shape[len(shape)-1], 1e-5)
				for j := range before {
					if p.x[j] != before[j] {
						t.Fatalf("shape %v: the input was written", shape)
					}
				}
				vm.Reset()
			}
			vm.Close()

			p.fill(rng, 1, 1)
			lisp := G.NewLispMachine(p.g, G.ExecuteFwdOnly())
			if err := lisp.RunAll(); err != nil {
				t.Fatalf("lisp machine, shape %v: %v", shape, err)
			}
			check(t, p.y.Value().Data().([]F), p.x, p.gamma, p.beta, shape[len(shape)-1], 1e-5)
			lisp.Close()
		}
	}
}

func TestLayerNormReference(t *testing.T) {
	t.Run("float32", testReference[float32])
	t.Run("float64", testReference[float64])
}

// TestLayerNormOffset: 768 elements of 1e6 +- 1e-1 have a variance that the
// textbook formula mean(x^2) - mean(x)^2 loses in float32.
func TestLayerNormOffset(t *testing.T) {
	rng := seeded(t)
	p := newProblem[float32](t, tensor.Shape{4, 768}, true, true, 1e-5)
	p.fill(rng, 1e6, 1)
	vm := G.NewTapeMachine(p.g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	check(t, p.out.Data().([]float32), p.x, p.gamma, p.beta, 768, 1e-5)
}

// TestLayerNormRows: a row does not see its neighbours, and NaN stays in its row.
func TestLayerNormRows(t *testing.T) {
	rng := seeded(t)
	for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		p := newProblem[float64](t, tensor.Shape{3, 40}, true, true, 1e-5)
		p.fill(rng, 0, 1)
		p.x[40+17] = bad
		vm := G.NewTapeMachine(p.g)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		y := p.out.Data().([]float64)
		for i, v := range y {
			if math.IsNaN(v) != (i/40 == 1) {
				t.Fatalf("%v in row 1: element %d is %v", bad, i, v)
			}
		}
		check(t, y[:40], p.x[:40], p.gamma, p.beta, 40, 1e-5)
		check(t, y[80:], p.x[80:], p.gamma, p.beta, 40, 1e-5)
		vm.Close()
	}
}

// TestLayerNormEps: a row of equal elements is beta with a positive eps, NaN with 0.
func TestLayerNormEps(t *testing.T) {
	for _, eps := range []float64{1e-5, 0} {
		p := newProblem[float32](t, tensor.Shape{2, 9}, false, true, eps)
		for i := range p.x {
			p.x[i] = 0.1
		}
		for i := range p.beta {
			p.beta[i] = float32(i)
		}
		vm := G.NewTapeMachine(p.g)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		for i, v := range p.out.Data().([]float32) {
			if eps == 0 && v == v || eps > 0 && math.Abs(float64(v)-float64(i%9)) > 1e-9 {
				t.Errorf("eps %v: element %d is %v", eps, i, v)
			}
		}
		vm.Close()
	}
}

// TestLayerNormViews: transposed, sliced and column-major inputs.
func TestLayerNormViews(t *testing.T) {
	rng := seeded(t)
	base := make([]float64, 6*10)
	fill(rng, base, 2, 3)
	at := func(i, j int) float64 { return base[i*10+j] }
	dense := func() *tensor.Dense {
		return tensor.New(tensor.WithShape(6, 10), tensor.WithBacking(append([]float64(nil), base...)))
	}
	transposed := dense()
	if err := transposed.T(); err != nil {
		t.Fatal(err)
	}
	slice := func(s ...tensor.Slice) *tensor.Dense {
		v, err := dense().Slice(s...)
		if err != nil {
			t.Fatal(err)
		}
		return v.(*tensor.Dense)
	}
	colMajor := tensor.New(tensor.WithShape(6, 10), tensor.AsFortran(nil), tensor.Of(tensor.Float64))
	for i := range 6 {
		for j := range 10 {
			if err := colMajor.SetAt(at(i, j), i, j); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name string
		x    *tensor.Dense
		rows int
		n    int
		at   func(i, j int) float64
	}{
		{"plain", dense(), 6, 10, at},
		{"transposed", transposed, 10, 6, func(i, j int) float64 { return at(j, i) }},
		{"columns 2:7", slice(nil, G.S(2, 7)), 6, 5, func(i, j int) float64 { return at(i, j+2) }},
		{"rows 1:4", slice(G.S(1, 4)), 3, 10, func(i, j int) float64 { return at(i+1, j) }},
		{"column 3", slice(nil, G.S(3)), 1, 6, func(_, j int) float64 { return at(j, 3) }},
		{"column-major", colMajor, 6, 10, at},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := make([]float64, 0, 60)
			for i := range c.rows {
				for j := range c.n {
					x = append(x, c.at(i, j))
				}
			}
			op := opOf(layerNorm{rank: c.x.Dims(), dtype: tensor.Float64, eps: 1e-5})
			v, err := op.Do(c.x)
			if err != nil {
				t.Fatal(err)
			}
			check(t, v.Data().([]float64), x, nil, nil, c.n, 1e-5)
		})
	}
}

// TestLayerNormInPlaceNeighbours: nodes that Gorgonia runs in place behind a
// LayerNorm harm neither the input nor a second reader.
func TestLayerNormInPlaceNeighbours(t *testing.T) {
	rng := seeded(t)
	p := newProblem[float64](t, tensor.Shape{2, 6}, true, true, 1e-5)
	doubled := G.Must(G.Add(p.y, p.y))
	sum := G.Must(G.Add(doubled, p.nodes[0]))
	var got G.Value
	G.Read(sum, &got)
	vm := G.NewTapeMachine(p.g)
	defer vm.Close()
	for range 3 {
		p.fill(rng, 0, 1)
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		for i, v := range got.Data().([]float64) {
			row := i / 6 * 6
			want := 2*reference(p.x[row:row+6], p.gamma, p.beta, 1e-5)[i%6] + p.x[i]
			if math.Abs(v-want) > 1e-12 {
				t.Fatalf("element %d is %v, want %v", i, v, want)
			}
		}
		vm.Reset()
	}
}

// TestLayerNormCores: the split over cores changes no bit.
func TestLayerNormCores(t *testing.T) {
	rng := seeded(t)
	const rows, n = 515, 777 // worth several threads: TestThreadsFor of internal/cpu has it
	p := newProblem[float32](t, tensor.Shape{rows, n}, true, true, 1e-5)
	p.fill(rng, 0, 1)
	vm := G.NewTapeMachine(p.g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	y, want := p.out.Data().([]float32), make([]float32, n)
	for row := range rows {
		normalise(want, p.x[row*n:(row+1)*n], p.gamma, p.beta, 1e-5)
		for i := range want {
			if y[row*n+i] != want[i] {
				t.Fatalf("row %d element %d: %v, want %v", row, i, y[row*n+i], want[i])
			}
		}
	}
	defer func() {
		if r := recover(); fmt.Sprint(r) != "row 300" {
			t.Errorf("a panic in a row came out as %v", r)
		}
	}()
	eachRow(rows, n, func(row int) {
		if row == 300 {
			panic("row 300")
		}
	})
}

// TestLayerNormHash: Gorgonia merges nodes of equal hash and equal children, so
// every parameter has to be in it.
func TestLayerNormHash(t *testing.T) {
	ops := []G.Op{}
	for _, rank := range []int{1, 2} {
		for _, eps := range []float64{0, 1e-5, math.Nextafter(1e-5, 1)} {
			for affine := range 4 {
				norm := opOf(layerNorm{rank: rank, dtype: tensor.Float32, eps: eps, gamma: affine&1 != 0, beta: affine&2 != 0})
				ops = append(ops, norm)
				for of := range norm.Arity() {
					ops = append(ops, gradient{d: norm.rule.(derivable), of: of})
				}
			}
		}
	}
	seen := map[uint32]G.Op{}
	for _, op := range ops {
		if other, ok := seen[op.Hashcode()]; ok {
			t.Errorf("%v and %v have the same hash", op, other)
		}
		seen[op.Hashcode()] = op
	}

	rng := seeded(t)
	g := G.NewGraph()
	x := G.NewMatrix(g, G.Float64, G.WithShape(2, 5), G.WithName("x"), G.WithInit(G.Gaussian(0, 1)))
	v := G.NewVector(g, G.Float64, G.WithShape(5), G.WithName("v"), G.WithInit(G.Gaussian(0, 1)))
	type call struct {
		gamma, beta *G.Node
		eps         float64
	}
	calls := []call{{v, nil, 1e-5}, {nil, v, 1e-5}, {nil, nil, 1e-5}, {v, v, 1e-5}, {v, nil, 1e-2}}
	rng.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	out := make([]G.Value, len(calls))
	for i, c := range calls {
		G.Read(G.Must(LayerNorm(x, c.gamma, c.beta, c.eps)), &out[i])
	}
	vm := G.NewTapeMachine(g)
	defer vm.Close()
	if err := vm.RunAll(); err != nil {
		t.Fatal(err)
	}
	data := func(n *G.Node) []float64 {
		if n == nil {
			return nil
		}
		return n.Value().Data().([]float64)
	}
	for i, c := range calls {
		check(t, out[i].Data().([]float64), data(x), data(c.gamma), data(c.beta), 5, c.eps)
	}
}

func TestLayerNormWrongArguments(t *testing.T) {
	g, other := G.NewGraph(), G.NewGraph()
	x := G.NewMatrix(g, G.Float32, G.WithShape(2, 3), G.WithName("x"))
	v := G.NewVector(g, G.Float32, G.WithShape(3), G.WithName("v"))
	for _, c := range []struct {
		name           string
		x, gamma, beta *G.Node
		eps            float64
		want           error
	}{
		{"nil x", nil, v, v, 1e-5, la.ErrGraph},
		{"scalar x", G.NewScalar(g, G.Float32, G.WithName("s")), nil, nil, 1e-5, la.ErrShape},
		{"int x", G.NewMatrix(g, G.Int, G.WithShape(2, 3), G.WithName("i")), nil, nil, 1e-5, la.ErrDType},
		{"float16 x", G.NewMatrix(g, la.Float16, G.WithShape(2, 3), G.WithName("h")), nil, nil, 1e-5, la.ErrDType},
		{"short gamma", x, G.NewVector(g, G.Float32, G.WithShape(2), G.WithName("v2")), v, 1e-5, la.ErrShape},
		{"long beta", x, v, G.NewVector(g, G.Float32, G.WithShape(4), G.WithName("v4")), 1e-5, la.ErrShape},
		{"gamma of rank 2", x, G.NewMatrix(g, G.Float32, G.WithShape(1, 3), G.WithName("m")), v, 1e-5, la.ErrShape},
		{"scalar beta", x, v, G.NewScalar(g, G.Float32, G.WithName("s2")), 1e-5, la.ErrShape},
		{"float64 gamma", x, G.NewVector(g, G.Float64, G.WithShape(3), G.WithName("d")), v, 1e-5, la.ErrDType},
		{"float64 beta", x, v, G.NewVector(g, G.Float64, G.WithShape(3), G.WithName("d2")), 1e-5, la.ErrDType},
		{"gamma of another graph", x, G.NewVector(other, G.Float32, G.WithShape(3), G.WithName("v")), v, 1e-5, la.ErrGraph},
		{"negative eps", x, v, v, -1e-9, la.ErrOption},
		{"NaN eps", x, v, v, math.NaN(), la.ErrOption},
		{"infinite eps", x, v, v, math.Inf(1), la.ErrOption},
	} {
		nodes := len(g.AllNodes())
		y, err := LayerNorm(c.x, c.gamma, c.beta, c.eps)
		if y != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v and error %v, want %v", c.name, y, err, c.want)
		}
		if got := len(g.AllNodes()); got != nodes {
			t.Errorf("%s: the graph grew from %d to %d nodes", c.name, nodes, got)
		}
	}
}

// TestLayerNormWrongValues: what Gorgonia does not check when a graph runs.
func TestLayerNormWrongValues(t *testing.T) {
	f32 := func(s ...int) *tensor.Dense { return tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(s...)) }
	f64 := func(s ...int) *tensor.Dense { return tensor.New(tensor.Of(tensor.Float64), tensor.WithShape(s...)) }
	op := opOf(layerNorm{rank: 2, dtype: tensor.Float32, eps: 1e-5, gamma: true, beta: true})
	for _, c := range []struct {
		name string
		in   []G.Value
		want error
	}{
		{"too few", []G.Value{f32(2, 3), f32(3)}, la.ErrGraph},
		{"too many", []G.Value{f32(2, 3), f32(3), f32(3), f32(3)}, la.ErrGraph},
		{"rank of x", []G.Value{f32(2, 1, 3), f32(3), f32(3)}, la.ErrShape},
		{"type of x", []G.Value{tensor.New(tensor.Of(tensor.Int), tensor.WithShape(2, 3)), f32(3), f32(3)}, la.ErrDType},
		{"shape of gamma", []G.Value{f32(2, 3), f32(2), f32(3)}, la.ErrShape},
		{"shape of beta", []G.Value{f32(2, 3), f32(3), f32(1, 3)}, la.ErrShape},
		{"type of gamma", []G.Value{f32(2, 3), f64(3), f32(3)}, la.ErrDType},
		{"type of beta", []G.Value{f64(2, 3), f64(3), f32(3)}, la.ErrDType},
		{"scalar", []G.Value{G.NewF32(1), f32(3), f32(3)}, la.ErrShape},
		{"nil", []G.Value{nil, nil, nil}, la.ErrInternal},
	} {
		if y, err := op.Do(c.in...); y != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v and error %v, want %v", c.name, y, err, c.want)
		}
		if c.name == "too many" {
			continue
		}
		for of := range op.Arity() {
			in := append(append([]G.Value{}, c.in...), f32(2, 3))
			if y, err := (gradient{d: op.rule.(derivable), of: of}).Do(in...); y != nil || !errors.Is(err, c.want) {
				t.Errorf("gradient of %v, %s: %v and error %v, want %v", of, c.name, y, err, c.want)
			}
		}
	}
	in := []G.Value{f32(2, 3), f32(3), f32(3), f32(3, 2)}
	if _, err := (gradient{d: op.rule.(derivable)}).Do(in...); !errors.Is(err, la.ErrShape) {
		t.Errorf("gradient of another shape: error %v", err)
	}
}

// TestLayerNormLaws: with eps 0 the row's offset and positive scale fall out,
// and the result has mean 0 and mean square 1.
func TestLayerNormLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := rapid.SliceOfN(rapid.Float64Range(-100, 100), 2, 50).Draw(t, "x")
		a, b := rapid.Float64Range(0.5, 8).Draw(t, "a"), rapid.Float64Range(-50, 50).Draw(t, "b")
		lo, hi := x[0], x[0]
		for _, v := range x {
			lo, hi = min(lo, v), max(hi, v)
		}
		if hi-lo < 1e-3 {
			t.Skip("no spread")
		}
		y, z, moved := make([]float64, len(x)), make([]float64, len(x)), make([]float64, len(x))
		for i, v := range x {
			moved[i] = a*v + b
		}
		normalise(y, x, nil, nil, 0)
		normalise(z, moved, nil, nil, 0)
		mean, square := 0.0, 0.0
		for i := range y {
			mean, square = mean+y[i], square+y[i]*y[i]
			if math.Abs(y[i]-z[i]) > 1e-8 {
				t.Fatalf("element %d: %v, and %v after %v*x+%v", i, y[i], z[i], a, b)
			}
		}
		n := float64(len(x))
		if math.Abs(mean/n) > 1e-9 || math.Abs(square/n-1) > 1e-9 {
			t.Fatalf("mean %v and mean square %v", mean/n, square/n)
		}
	})
}

func BenchmarkLayerNorm(b *testing.B) {
	for _, shape := range []tensor.Shape{{1, 768}, {128, 768}, {1024, 768}} {
		b.Run(fmt.Sprintf("%dx%d", shape[0], shape[1]), func(b *testing.B) {
			x := tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32))
			fill(rand.New(rand.NewPCG(1, 1)), x.Float32s(), 0, 1)
			v := tensor.New(tensor.WithShape(shape[1]), tensor.Of(tensor.Float32))
			op := opOf(layerNorm{rank: 2, dtype: tensor.Float32, eps: 1e-5, gamma: true, beta: true})
			b.SetBytes(int64(8 * shape.TotalSize()))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := op.Do(x, v, v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestLayerNormNames: errors and other messages call each input what the caller calls it.
func TestLayerNormNames(t *testing.T) {
	for want, r := range map[string]layerNorm{"x": {}, "x gamma": {gamma: true}, "x beta": {beta: true}, "x gamma beta": {gamma: true, beta: true}} {
		op := opOf(r)
		var names []string
		for i := range op.Arity() {
			names = append(names, op.OperandName(i))
		}
		if got := strings.Join(names, " "); got != want {
			t.Errorf("inputs %q, want %q", got, want)
		}
	}
}
