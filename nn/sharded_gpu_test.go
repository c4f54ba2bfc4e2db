package nn_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// letSharded is let of what is dealt out over the GPUs by its first axis.
func (p *places) letSharded(x *tensor.Dense) (in [2]*G.Node) {
	p.t.Helper()
	there, err := p.gpu.UploadSharded(x, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	return p.letThere(x, there)
}

// poison leaves NaN in memory that all GPUs hand out next.
func poison(t *testing.T, gpu *device.GPU) {
	t.Helper()
	for n := 64; n <= 1<<15; n *= 2 {
		x := make([]float32, n*len(gpu.Members()))
		for i := range x {
			x[i] = float32(math.NaN())
		}
		d, err := gpu.UploadSharded(tensor.New(tensor.WithShape(len(x)), tensor.WithBacking(x)), 0)
		if err == nil {
			err = d.Free()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// bits is what nodes hold on the GPU.
func bits(t *testing.T, nodes ...[2]*G.Node) (all []uint32) {
	t.Helper()
	for _, n := range nodes {
		d, err := n[1].Value().(*device.Tensor).Download()
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range d.Data().([]float32) {
			all = append(all, math.Float32bits(x))
		}
	}
	return all
}

// Linear layers whose weights are dealt out over two GPUs and more make what they make on the CPU, with all of
// their options, for one row and many: the same bits again, and in a recording.
func TestGPUsLinear(t *testing.T) {
	for _, members := range []int{2, 3, 4} {
		t.Run(fmt.Sprint(members), func(t *testing.T) { testShardedLinear(t, members) })
	}
}

func testShardedLinear(t *testing.T, members int) {
	gpu, rng := devicetest.OpenSome(t, members), reftest.Rand(t)
	types := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	cases := []int{1, 1, 1, 2, 5, 9, 33}
	if reftest.Every(t) {
		cases = append(slices.Repeat([]int{1, 3, 8, 16, 17, 40, 64, 100}, 6), 130, 150, 260)
	}
	for i, rows := range cases {
		p := newPlaces(t, rng, gpu)
		w := types[rng.IntN(3)]
		atol := 2e-4
		if w == la.BFloat16 {
			atol = 2e-3
		}
		width := 8 * (1 + rng.IntN(40))
		outs := []int{4 * (1 + rng.IntN(50)), 4 * (1 + rng.IntN(50)), 4 * (1 + rng.IntN(50))}[:1+rng.IntN(3)]
		bias, whole, affine := rng.IntN(3) > 0, rng.IntN(2) == 0, rng.IntN(2) == 0
		norm, activation := rng.IntN(3), rng.IntN(5)
		x, residual := p.let(p.random(tensor.Float32, 1, rows, width)), p.let(p.random(tensor.Float32, 1, rows, outs[0]))
		gamma, beta := p.let(p.random(tensor.Float32, 1, width)), p.let(p.random(tensor.Float32, 1, width))
		var ws, bs [2][]*G.Node
		for _, out := range outs {
			let := p.letSharded
			a := let(p.random(w, 1/math.Sqrt(float64(width)), out, width))
			if whole {
				let = p.let
			}
			b := let(p.random(tensor.Float32, 1, out))
			for j := range ws {
				ws[j] = append(ws[j], a[j])
				if bias {
					bs[j] = append(bs[j], b[j])
				}
			}
		}
		up, beside := p.letSharded(p.random(w, 1/math.Sqrt(float64(width)), outs[0], width)), p.let(p.random(tensor.Float32, 1, outs[0]))
		var nodes [][2]*G.Node
		for j := range p.g {
			var opts []nn.Option
			var g, b *G.Node
			if affine {
				g, b = gamma[j], beta[j]
			}
			switch norm {
			case 1:
				opts = append(opts, nn.WithNorm(g, b, 1e-5))
			case 2:
				opts = append(opts, nn.WithRMSNorm(g, 1e-5))
			}
			gated := append(slices.Clone(opts), nn.WithResidual(residual[j]))
			opts = append(opts, []nn.Option{{}, nn.WithActivation(nn.ReLU), nn.WithActivation(nn.GELU), nn.WithActivation(nn.SiLU), nn.WithActivation(nn.GELUTanh)}[activation])
			ys, err := nn.Linears(x[j], ws[j], bs[j], opts...)
			if err != nil {
				t.Fatal(err)
			}
			var first *G.Node
			if bias {
				first = bs[j][0]
			}
			y, err := nn.Linear(x[j], ws[j][0], first, append(opts, nn.WithResidual(residual[j]))...)
			if err != nil {
				t.Fatal(err)
			}
			var biases []*G.Node
			if bias {
				biases = []*G.Node{bs[j][0], beside[j]}
			}
			unit, err := nn.GatedLinear(x[j], []*G.Node{ws[j][0], up[j]}, biases, nn.SiLU, gated...)
			if err != nil {
				t.Fatal(err)
			}
			for k, y := range append(ys, y, unit) {
				if len(nodes) <= k {
					nodes = append(nodes, [2]*G.Node{})
				}
				nodes[k][j] = y
			}
		}
		what := fmt.Sprintf("case %d, w %v, %d x %d x %v, bias %v (whole %v), norm %d, activation %d", i, w, rows, width, outs, bias, whole, norm, activation)
		poison(t, gpu)
		p.compare(what, atol, nodes...)
		first := bits(t, nodes...)
		m := G.NewTapeMachine(p.g[1])
		defer m.Close()
		recording, err := gpu.Record(m.RunAll)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		m.Reset()
		for range 2 {
			if err := recording.Replay(); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(bits(t, nodes...), first) {
				t.Errorf("%s: other bits in a recording", what)
			}
		}
		if err := recording.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// placement is where several GPUs have an input.
type placement int

const (
	onFirst placement = iota
	onAll
	byRows
	byColumns
)

// letAs is let of what is placed otherwise.
func (p *places) letAs(x *tensor.Dense, at placement) (in [2]*G.Node) {
	p.t.Helper()
	upload := map[placement]func() (*device.Tensor, error){
		onFirst:   func() (*device.Tensor, error) { return p.gpu.Upload(x) },
		onAll:     func() (*device.Tensor, error) { return p.gpu.UploadReplicated(x) },
		byRows:    func() (*device.Tensor, error) { return p.gpu.UploadSharded(x, 0) },
		byColumns: func() (*device.Tensor, error) { return p.gpu.UploadSharded(x, 1) },
	}
	there, err := upload[at]()
	if err != nil {
		p.t.Fatal(err)
	}
	return p.letThere(x, there)
}

// A feed-forward part, and what leads to it and from it, in every placement of its inputs: all on all GPUs, so that
// they compute in per-GPU mode, or some on the first alone.
func TestGPUsPerGPU(t *testing.T) {
	for _, members := range []int{2, 3, 4} {
		t.Run(fmt.Sprint(members), func(t *testing.T) { testPerGPU(t, members) })
	}
}

func testPerGPU(t *testing.T, members int) {
	gpu, rng := devicetest.OpenSome(t, members), reftest.Rand(t)
	types := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	cases := []int{1, 1, 2, 5, 33}
	if testing.Short() { // all inputs on all GPUs, and some on the first alone
		cases = []int{1, 2}
	}
	if reftest.Every(t) {
		cases = append(slices.Repeat([]int{1, 2, 3, 8, 16, 17, 40}, 6), 64, 130)
	}
	for i, rows := range cases {
		p := newPlaces(t, rng, gpu)
		everywhere := i%2 == 0
		at := func(best placement) placement {
			if best == onFirst || !everywhere && rng.IntN(4) == 0 {
				return onFirst
			}
			return best
		}
		w := types[rng.IntN(3)]
		atol := 1e-3
		if w == la.BFloat16 {
			atol = 1e-2
		}
		weightAt := func(at placement, out, in int) [2]*G.Node {
			return p.letAs(p.random(w, 1/math.Sqrt(float64(in)), out, in), at)
		}
		weight := func(best placement, out, in int) [2]*G.Node { return weightAt(at(best), out, in) }
		vector := func(n int) [2]*G.Node { return p.letAs(p.random(tensor.Float32, 1, n), at(onAll)) }
		d, inner := 8*members*(1+rng.IntN(6)), 8*members*(1+rng.IntN(8))
		ids := make([]int32, rows)
		for i := range ids {
			ids[i] = rng.Int32N(19)
		}
		index := p.letAs(tensor.New(tensor.WithShape(rows), tensor.WithBacking(ids)), at(onAll))
		table := p.letAs(p.random(tensor.Float32, 1, 19, d), at(onAll))
		gates, both := at(byRows), at(byRows) // weights of one node are in one way
		gamma, beta, b0, b1, b2 := vector(d), vector(d), vector(inner), vector(inner), vector(d)
		if gates == byRows && rng.IntN(2) == 0 {
			b0 = p.letAs(p.random(tensor.Float32, 1, inner), byRows)
		}
		gate, up, down := weightAt(gates, inner, d), weightAt(gates, inner, d), weight(byColumns, d, inner)
		square := weight(byColumns, d, d)
		q, k, o := weightAt(both, d, d), weightAt(both, inner, d), weight(byColumns, d, inner)
		head := weight(byRows, 8*members+rng.IntN(3), d)
		perHead := members
		if d%(16*members) == 0 {
			perHead *= 2
		}
		byHead, after := weight(byRows, perHead*8, d/perHead), weight(byColumns, d, perHead*8)
		biases, elementwise, heads, small := rng.IntN(2) == 0, rng.IntN(3) == 0, rng.IntN(2) == 0 || testing.Short(), vector(8)
		var nodes [][2]*G.Node
		for j := range p.g {
			all := []*G.Node{}
			keep := func(n *G.Node, err error) *G.Node {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, n)
				return n
			}
			x := keep(nn.Embedding(table[j], index[j], nil))
			qk, err := nn.Linears(x, []*G.Node{q[j], k[j]}, nil, nn.WithRMSNorm(gamma[j], 1e-5))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, qk...)
			keep(nn.SumParts(qk[1], members)) // of which each GPU has one, or may have
			h := qk[1]
			if heads { // of each GPU's own
				h = keep(nn.QKNorm(h, small[j], 1e-5))
			}
			if elementwise { // of parts that each GPU has
				h = keep(nn.Activate(h, nn.SiLU))
			}
			x = keep(nn.Linear(h, o[j], nil, nn.WithResidual(x)))
			y := []*G.Node{x, qk[0]}[(i/2+members)%2] // of all, and of each GPU's own
			y = keep(nn.HeadLinear(y, byHead[j], perHead))
			x = keep(nn.Linear(y, after[j], nil, nn.WithResidual(x)))
			x = keep(nn.Linear(x, square[j], b2[j], nn.WithResidual(qk[0]))) // of columns of what all have
			bs := []*G.Node{b0[j], b1[j]}
			if !biases {
				bs = nil
			}
			h = keep(nn.GatedLinear(x, []*G.Node{gate[j], up[j]}, bs, nn.SiLU, nn.WithNorm(gamma[j], beta[j], 1e-5)))
			if rng.IntN(2) == 0 && j == 1 { // a view
				h = keep(nn.Reshape(keep(nn.Reshape(h, rows, members, inner/members)), rows, inner))
			} else {
				all = append(all, h, h)
			}
			x = keep(nn.Linear(h, down[j], b2[j], nn.WithResidual(x)))
			logits := keep(nn.Linear(x, head[j], nil))
			keep(nn.ArgMax(logits))
			for k, n := range all {
				if len(nodes) <= k {
					nodes = append(nodes, [2]*G.Node{n, n})
				}
				nodes[k][j] = n
			}
		}
		nodes = slices.DeleteFunc(nodes, func(n [2]*G.Node) bool {
			return !slices.Equal(n[0].Shape(), n[1].Shape()) || n[0].Dtype() != tensor.Float32
		})
		what := fmt.Sprintf("case %d, w %v, %d rows, %d, %d, everywhere %v", i, w, rows, d, inner, everywhere)
		poison(t, gpu)
		for k, n := range nodes {
			p.compare(fmt.Sprintf("%s: %v", what, n[1].Op()), atol, nodes[k])
		}
		m := G.NewTapeMachine(p.g[1])
		defer m.Close()
		recording, err := gpu.Record(m.RunAll)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		m.Reset()
		for range 3 {
			if err := recording.Replay(); err != nil {
				t.Fatal(err)
			}
		}
		p.check(what+", recorded", atol, nodes...)
		if err := recording.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Layers that one launch of each GPU does, which sum within it.
func TestGPUsSingleLaunch(t *testing.T) {
	for _, members := range []int{2, 3} {
		t.Run(fmt.Sprint(members), func(t *testing.T) { testSingleLaunch(t, members) })
	}
}

func testSingleLaunch(t *testing.T, members int) {
	gpu, rng := devicetest.OpenSome(t, members), reftest.Rand(t)
	cases := []int{1, 2}
	if reftest.Every(t) || os.Getenv("LEANATTENTION_GPU") == "" {
		cases = slices.Repeat([]int{1, 1, 2, 2, 3, 4}, 4)
	}
	for i, rows := range cases {
		p := newPlaces(t, rng, gpu)
		w := []tensor.Dtype{la.Float16, la.BFloat16}[rng.IntN(2)]
		atol := 2e-3
		if w == la.BFloat16 {
			atol = 2e-2
		}
		d, inner := 128*members, 128*members*(1+rng.IntN(2))
		if wide := reftest.Every(t) || os.Getenv("LEANATTENTION_GPU") == ""; wide && i%2 == 1 { // pairs of thread blocks, each with columns of both
			d, inner = 4096, 512*members*(1+rng.IntN(2))
		}
		vector := func(n int) [2]*G.Node { return p.letAs(p.random(tensor.Float32, 1, n), onAll) }
		weight := func(at placement, out, in int) [2]*G.Node {
			return p.letAs(p.random(w, 1/math.Sqrt(float64(in)), out, in), at)
		}
		llama := rng.IntN(2) == 0
		x, gamma, beta := p.letAs(p.random(tensor.Float32, 1, rows, d), onAll), vector(d), vector(d)
		b0, b1 := vector(inner), vector(d)
		var nodes [][2]*G.Node
		h := x
		for range 3 {
			gate, up, down := weight(byRows, inner, d), weight(byRows, inner, d), weight(byColumns, d, inner)
			var y [2]*G.Node
			for j := range p.g {
				var err error
				if llama {
					y[j], err = nn.GatedLinear(h[j], []*G.Node{gate[j], up[j]}, nil, nn.SiLU, nn.WithRMSNorm(gamma[j], 1e-5))
				} else {
					y[j], err = nn.Linear(h[j], up[j], b0[j], nn.WithActivation(nn.ReLU), nn.WithNorm(gamma[j], beta[j], 1e-5))
				}
				if err == nil {
					y[j], err = nn.Linear(y[j], down[j], b1[j], nn.WithResidual(h[j]))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			h = y
			nodes = append(nodes, y)
		}
		what := fmt.Sprintf("case %d, w %v, %d rows, %d, %d, llama %v", i, w, rows, d, inner, llama)
		p.compare(what, atol, nodes...)
		m := G.NewTapeMachine(p.g[1])
		defer m.Close()
		recording, err := gpu.Record(m.RunAll)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		m.Reset()
		var first []uint32
		for range 3 {
			poison(t, gpu)
			if err := recording.Replay(); err != nil {
				t.Fatal(err)
			}
			p.check(what+", recorded", atol, nodes...)
			now := bits(t, nodes...)
			if first != nil && !slices.Equal(now, first) {
				t.Errorf("%s: other bits", what)
			}
			first = now
		}
		if err := recording.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A call of the driver that fails while two GPUs do their parts of a graph is an error that names one of them, and the graph can run again: then
// it has the bits that it had before, also where a GPU was left waiting for a sum that the other one was not given.
func TestGPUsFaults(t *testing.T) {
	lib := system.Failing(t)
	gpu, err := device.Open(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer gpu.Close()
	rng := reftest.Rand(t)
	const rows, d, inner, vocab = 2, 64, 128, 30
	p := newPlaces(t, rng, gpu)
	weight := func(at placement, out, in int) *G.Node {
		return p.letAs(p.random(la.Float16, 1/math.Sqrt(float64(in)), out, in), at)[1]
	}
	x := p.letAs(p.random(tensor.Float32, 1, rows, d), onAll)[1]
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	h := must(nn.Linear(x, weight(byRows, inner, d), nil, nn.WithActivation(nn.ReLU)))
	sums := must(nn.SumParts(h, 2))
	y := must(nn.Linear(h, weight(byColumns, d, inner), nil, nn.WithResidual(x)))
	logits := must(nn.Linear(y, weight(byRows, vocab, d), nil))
	chosen := must(nn.ArgMax(logits))
	vm := G.NewTapeMachine(p.g[1])
	defer vm.Close()
	run := func() (all string, err error) {
		defer vm.Reset()
		if err := vm.RunAll(); err != nil {
			return "", la.Cause(err)
		}
		for _, n := range []*G.Node{sums, y, logits, chosen} {
			v, err := n.Value().(*device.Tensor).Download()
			if err != nil {
				return "", err
			}
			all += fmt.Sprint(v.Data())
		}
		return all, nil
	}
	var want string
	var calls int64
	for range 2 {
		calls = lib.State().Calls
		if want, err = run(); err != nil {
			t.Fatal(err)
		}
		calls = lib.State().Calls - calls
	}
	failed := map[string]bool{}
	every := int64(1)
	if !reftest.Every(t) {
		every = 7
	}
	for call := 1 + rng.Int64N(every); call <= calls; call += every {
		at := lib.State().Calls + call
		lib.State().FailAt, lib.State().FailWith = at, 2
		_, err := run()
		lib.State().FailAt = 0
		if err == nil && lib.State().Calls < at {
			break // a run polls more or less often, and frees garbage or not
		}
		what := lib.State().Failed()
		failed[what] = true
		harmless := what == "cuCtxPopCurrent_v2" || strings.HasPrefix(what, "cuMemFree") // of garbage, on a goroutine of its own
		if err != nil && (!errors.Is(err, la.ErrOutOfMemory) || errors.Is(err, la.ErrNoAnswer) || !strings.Contains(err.Error(), "GPU ")) || err == nil && !harmless {
			t.Errorf("call %d of %d, %s, failed: %v", call, calls, what, err)
		}
		if got, err := run(); err != nil || got != want {
			t.Fatalf("behind call %d of %d, %s, which failed: %v, %s, want %s", call, calls, what, err, got, want)
		}
	}
	if reftest.Every(t) && (!failed["cuLaunchKernelEx"] && !failed["cuLaunchKernel"] || !failed["cuStreamWaitEvent"]) {
		t.Errorf("%v failed", failed)
	}
}

// What can't be sharded, or is sharded otherwise, is named.
func TestGPUsRefuse(t *testing.T) {
	gpu := devicetest.OpenSome(t, 2)
	upload := func(axis int, shape ...int) *device.Tensor {
		t.Helper()
		x := tensor.New(tensor.WithShape(shape...), tensor.Of(tensor.Float32))
		d, err := gpu.Upload(x)
		if axis >= 0 {
			d, err = gpu.UploadSharded(x, axis)
		}
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	const whole = -1
	other, err := device.Open(0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	elsewhere, err := other.UploadSharded(tensor.New(tensor.WithShape(8, 16), tensor.Of(tensor.Float32)), 0)
	if err != nil {
		t.Fatal(err)
	}
	w, x := upload(0, 8, 16), upload(whole, 2, 16)
	b, gamma, residual := upload(whole, 8), upload(whole, 16), upload(whole, 2, 8)
	for _, c := range []struct {
		w, x, b, gamma, residual *device.Tensor
		text                     string
	}{
		{upload(1, 8, 16), x, b, gamma, residual, "w is sharded on axis 1, by input features, and no GPU has all of x for a norm"},
		{w, upload(0, 2, 16), b, gamma, residual, "x is sharded"},
		{w, x, b, upload(0, 16), residual, "gamma is sharded"},
		{w, x, b, gamma, upload(0, 2, 8), "residual is sharded"},
		{upload(whole, 8, 16), x, upload(0, 8), gamma, residual, "w is whole, and another weight is sharded"},
		{elsewhere, x, b, gamma, residual, "they must be in one place"},
		{w, x, b, gamma, residual, ""},
	} {
		g := G.NewGraph()
		in := func(name string, d *device.Tensor) *G.Node {
			return G.NewTensor(g, tensor.Float32, d.Shape().Dims(), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
		}
		y, err := nn.Linear(in("x", c.x), in("w", c.w), in("b", c.b), nn.WithNorm(in("gamma", c.gamma), nil, 0), nn.WithResidual(in("residual", c.residual)))
		if err != nil {
			t.Fatal(err)
		}
		m := G.NewTapeMachine(g)
		err = la.Cause(m.RunAll())
		if c.text == "" && err != nil || c.text != "" && (!errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%q: %v, value %v", c.text, err, y.Value())
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	// By input features there is one layer, and nothing behind the sum but its bias and residual.
	for _, c := range []struct {
		w    *device.Tensor
		opts []nn.Option
		text string
	}{
		{upload(1, 8, 16), []nn.Option{nn.WithActivation(nn.ReLU)}, "relu would be of partial sums"},
		{upload(1, 8, 12), nil, "w of shape (8, 12) is sharded on axis 1 over 2 GPUs, want a multiple of 16 bytes of a row for each"},
	} {
		g := G.NewGraph()
		in := func(name string, d *device.Tensor) *G.Node {
			return G.NewMatrix(g, tensor.Float32, G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
		}
		if _, err := nn.Linear(in("x", upload(whole, 2, c.w.Shape()[1])), in("w", c.w), nil, c.opts...); err != nil {
			t.Fatal(err)
		}
		m := G.NewTapeMachine(g)
		if err := la.Cause(m.RunAll()); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%q: %v", c.text, err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	// A gate and its other layer in one weight are dealt out in the wrong places.
	g := G.NewGraph()
	in := func(name string, d *device.Tensor) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
	}
	if _, err := nn.GatedLinear(in("x", x), []*G.Node{in("w", w)}, nil, nn.SiLU); err != nil {
		t.Fatal(err)
	}
	both := G.NewTapeMachine(g)
	defer both.Close()
	if err := la.Cause(both.RunAll()); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "the weights of both layers") {
		t.Errorf("one weight: %v", err)
	}
	// Nothing else takes sharded weights.
	table := upload(0, 8, 16)
	ids, err := gpu.Upload(tensor.New(tensor.WithShape(2), tensor.WithBacking([]int32{1, 2})))
	if err != nil {
		t.Fatal(err)
	}
	g = G.NewGraph()
	_, err = nn.Embedding(G.NewMatrix(g, tensor.Float32, G.WithShape(8, 16), G.WithName("table"), G.WithValue(table)),
		G.NewVector(g, tensor.Int32, G.WithShape(2), G.WithName("ids"), G.WithValue(ids)), nil)
	if err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := la.Cause(m.RunAll()); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "table is sharded on axis 0") {
		t.Errorf("an embedding: %v", err)
	}
}
