package layers

import (
	"math"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPUMergeStates(t *testing.T) {
	m, d := realDecoder(t)
	testMergeStates(t, m, d, 60)
}

// testMergeStates: any number of states, of which some have no key in some rows, and NaN as their outputs there.
func testMergeStates(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		rows, dim, n := enginetest.Pick(rng, 1, 2, 7, 33), enginetest.Pick(rng, 1, 3, 64, 80, 128), enginetest.Pick(rng, 1, 2, 3, 8, nodeStates, nodeStates+1, 2*nodeStates-1, 2*nodeStates, 100)
		o := States{Rows: rows, Dim: dim, Out: gpu.Memory{DType: enginetest.Pick(rng, gpu.Types...), Len: rows * dim}, LSE: m.empty(t, rows)}
		m.Poison(t, &o.Out)
		unit := enginetest.Format(o.Out.DType).Unit()
		outs, lses := make([][]float64, n), make([][]float64, n)
		free := []gpu.Memory{o.Out, o.LSE}
		put := func(x []float64) gpu.Memory {
			data := make([]byte, 4*len(x))
			for j, v := range x {
				enginetest.Put(data, j, attn.Float32, v)
				x[j] = enginetest.Get(data, j, attn.Float32)
			}
			y := m.Put(t, data, attn.Float32)
			free = append(free, y)
			return y
		}
		spread := enginetest.Pick(rng, 1, 30, 1000)
		for s := range n {
			outs[s], lses[s] = make([]float64, rows*dim), make([]float64, rows)
			for j := range outs[s] {
				outs[s][j] = rng.NormFloat64()
			}
			for row := range rows {
				if lses[s][row] = rng.NormFloat64() * float64(spread); rng.IntN(3) == 0 || row == 1 {
					lses[s][row] = math.Inf(-1) // of row 1 all
					for j := range dim {
						outs[s][row*dim+j] = math.NaN()
					}
				}
			}
			if row := rng.IntN(8); i%5 == 4 && s == n/2 && row < rows {
				lses[s][row] = enginetest.Pick(rng, math.NaN(), math.Inf(1))
			}
			o.Outs, o.LSEs = append(o.Outs, put(outs[s])), append(o.LSEs, put(lses[s]))
		}
		switch i % 4 {
		case 1:
			o.LSE = gpu.Memory{}
		case 2:
			o.Outs, o.Out, o.Dim = nil, gpu.Memory{}, 1
		}
		if k := o.Needs(); k > 0 {
			o.Scratch = m.empty(t, k)
			free = append(free, o.Scratch)
		}
		noError(t, d.MergeStates(m.Stream, &o))
		m.Settle(t)
		out, lse := enginetest.Read(t, &free[0]), enginetest.Read(t, &free[1])
		for row := range rows {
			top, sum, size := math.Inf(-1), 0.0, 0.0
			for s := range n {
				top = math.Max(top, lses[s][row])
			}
			share := func(s int) float64 {
				if math.IsInf(lses[s][row], -1) {
					return 0
				}
				return math.Exp(lses[s][row] - top)
			}
			for s := range n {
				sum += share(s)
			}
			near := func(what string, got, want, size float64) {
				if !(math.Abs(got-want) <= 4e-6*size) && !(math.IsNaN(want) && math.IsNaN(got)) && !(math.IsInf(want, -1) && math.IsInf(got, -1)) {
					t.Fatalf("%d states of %d x %d, row %d: %s is %v, want %v", n, rows, dim, row, what, got, want)
				}
			}
			if o.LSE.Buffer != nil {
				want := top + math.Log(sum)
				near("the log-sum-exp", enginetest.Get(lse, row, attn.Float32), want, 1+math.Abs(want))
			}
			for j := range dim {
				if o.Out.Buffer == nil {
					break
				}
				want := 0.0
				size = 1
				for s := range n {
					if w := share(s); w != 0 {
						want += w / sum * outs[s][row*dim+j]
						size += w / sum * math.Abs(outs[s][row*dim+j]) * (1 + math.Abs(lses[s][row]-top)/16)
					}
				}
				near("an output", enginetest.Get(out, row*dim+j, free[0].DType), want, size+unit/4e-6*math.Abs(want))
			}
		}
		for _, x := range free {
			noError(t, x.Buffer.Close())
		}
	}
	// What is wrong is refused, and nothing is queued.
	x := m.empty(t, 8)
	for name, o := range map[string]States{
		"no states":          {Rows: 2, Dim: 4, Out: x},
		"no rows":            {Dim: 4, Out: x, Outs: []gpu.Memory{x}, LSEs: []gpu.Memory{x}},
		"too few elements":   {Rows: 3, Dim: 4, Out: x, Outs: []gpu.Memory{x}, LSEs: []gpu.Memory{x}},
		"nothing to write":   {Rows: 2, Dim: 1, LSEs: []gpu.Memory{x}},
		"outputs too many":   {Rows: 2, Dim: 4, Out: x, Outs: []gpu.Memory{x, x}, LSEs: []gpu.Memory{x}},
		"no scratch":         {Rows: 2, Dim: 1, LSE: x, LSEs: make([]gpu.Memory, nodeStates+1)},
		"elements of nobody": {Rows: 2, Dim: 4, LSE: x, LSEs: []gpu.Memory{x}},
	} {
		for i := range o.LSEs {
			o.LSEs[i] = x
		}
		if err := d.MergeStates(m.Stream, &o); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	noError(t, x.Buffer.Close())
}
