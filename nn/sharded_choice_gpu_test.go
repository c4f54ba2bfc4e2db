package nn_test

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// A head with sharded weights, and the choice of tokens by it.
func TestGPUsHead(t *testing.T) {
	gpu, rng := devicetest.OpenSome(t, 2), reftest.Rand(t)
	for _, rows := range []int{1, 5} {
		p := newPlaces(t, rng, gpu)
		x, w := p.let(p.random(tensor.Float32, 1, rows, 64)), p.letSharded(p.random(la.Float16, 1, 503, 64))
		var chosen [2]*G.Node
		for j := range p.g {
			logits, err := nn.Linear(x[j], w[j], nil)
			if err == nil {
				chosen[j], err = nn.ArgMax(logits)
			}
			if err == nil && j == 1 {
				err = rewrite.ShareMemory(p.g[1])
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		p.compare("head", 0, chosen)
	}
}

// Tokens of logits that each GPU has columns of are those that one GPU chooses of all columns, bit by bit: the most likely ones,
// and drawn ones. All GPUs know them: a sum of what each makes of its columns is right.
func TestGPUsChoice(t *testing.T) {
	for _, members := range []int{2, 3, 4} {
		t.Run(fmt.Sprint(members), func(t *testing.T) { testChoice(t, members) })
	}
}

func testChoice(t *testing.T, members int) {
	gpu, rng := devicetest.OpenSome(t, members), reftest.Rand(t)
	inf := float32(math.Inf(1))
	for range reftest.Cases(t, 2, 20) {
		rows, n, width := 1+rng.IntN(3), members*(1+rng.IntN(40)), 8*members
		draw := func() (logits, choices, randoms *tensor.Dense) {
			x, c, u := make([]float32, rows*n), make([]nn.Choice, rows), make([]float64, rows)
			for row := range rows {
				of := x[row*n : (row+1)*n]
				for i := range of {
					of[i] = float32(rng.NormFloat64() * 3)
				}
				switch rng.IntN(6) {
				case 0: // equals on all GPUs
					for i := range of {
						of[i] = float32(rng.IntN(3))
					}
				case 1: // the greatest twice
					of[rng.IntN(n)], of[rng.IntN(n)] = 100, 100
				case 2: // nothing can be chosen
					of[rng.IntN(n)] = []float32{inf, float32(math.NaN())}[rng.IntN(2)]
				case 3: // one can
					for i := range of {
						of[i] = -inf
					}
					of[rng.IntN(n)] = -5
				}
				c[row] = nn.Choice{Temperature: []float64{0, 0.5, 1, 2}[rng.IntN(4)], TopK: rng.IntN(2) * (1 + rng.IntN(n)), TopP: []float64{0, 0.3, 0.9, 1}[rng.IntN(4)]}
				u[row] = rng.Float64()
			}
			return tensor.New(tensor.WithShape(rows, n), tensor.WithBacking(x)), nn.Choices(c), nn.Randoms(u)
		}
		small := func(shape ...int) *tensor.Dense { // sums of these are exact
			x := make([]float32, tensor.Shape(shape).TotalSize())
			for i := range x {
				x[i] = float32(rng.IntN(7) - 3)
			}
			return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(x))
		}
		logits, choices, randoms := draw()
		table, w := small(n, width), small(4, width)
		var inputs [2][3]*device.Tensor
		var nodes [2][]*G.Node
		var machines [2]G.VM
		var replay [2]func() error
		for j := range nodes { // the first GPU alone, and all
			g := G.NewGraph()
			put := func(name string, x *tensor.Dense, at func(*tensor.Dense) (*device.Tensor, error)) (*G.Node, *device.Tensor) {
				t.Helper()
				if j == 0 {
					at = func(x *tensor.Dense) (*device.Tensor, error) { return gpu.Upload(x) }
				}
				d, err := at(x)
				if err != nil {
					t.Fatal(err)
				}
				return G.NewMatrix(g, x.Dtype(), G.WithShape(x.Shape()...), G.WithName(name), G.WithValue(d)), d
			}
			all := func(x *tensor.Dense) (*device.Tensor, error) { return gpu.UploadReplicated(x) }
			columns := func(x *tensor.Dense) (*device.Tensor, error) { return gpu.UploadSharded(x, 1) }
			x, there := put("logits", logits, columns)
			c, cThere := put("choices", choices, all)
			u, uThere := put("randoms", randoms, all)
			rowsOf, _ := put("table", table, all)
			weights, _ := put("w", w, columns)
			inputs[j] = [3]*device.Tensor{there, cThere, uThere}
			greedy, err := nn.ArgMax(x)
			if err != nil {
				t.Fatal(err)
			}
			drawn, err := nn.Sample(x, c, u)
			if err != nil {
				t.Fatal(err)
			}
			nodes[j] = []*G.Node{greedy, drawn}
			for _, ids := range nodes[j][:2] {
				h, err := nn.Embedding(rowsOf, ids, nil)
				if err == nil {
					h, err = nn.Linear(h, weights, nil)
				}
				if err != nil {
					t.Fatal(err)
				}
				nodes[j] = append(nodes[j], h)
			}
			machines[j] = G.NewTapeMachine(g)
			defer machines[j].Close()
			replay[j] = func() error { defer machines[j].Reset(); return machines[j].RunAll() }
		}
		for turn := range 4 {
			for j := range nodes {
				if turn == 2 {
					r, err := gpu.Record(replay[j])
					if err != nil {
						t.Fatal(err)
					}
					defer r.Close()
					replay[j] = r.Replay
				}
				if err := replay[j](); err != nil {
					t.Fatal(err)
				}
			}
			for i := range nodes[0] {
				var got [2]string
				for j := range got {
					d, err := nodes[j][i].Value().(*device.Tensor).Download()
					if err != nil {
						t.Fatal(err)
					}
					got[j] = fmt.Sprint(d.Data())
				}
				if got[0] != got[1] {
					t.Fatalf("turn %d, %d x %d, %v: %s on %d GPUs, %s on one, of %v", turn, rows, n, nodes[0][i].Op(), got[1], members, got[0], logits)
				}
			}
			logits, choices, randoms = draw()
			for _, in := range inputs {
				if err := errors.Join(in[0].CopyFrom(logits), in[1].CopyFrom(choices), in[2].CopyFrom(randoms)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}
