package leanattention_test

import (
	"slices"
	"sync"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	"gorgonia.org/tensor"
)

// results makes poisoned tensors for the results of p.
func (p *problem) results() (out, lse *tensor.Dense) {
	out = tensor.New(tensor.Of(p.query), tensor.WithShape(p.dims(p.Heads, p.Queries[0], p.ValueDim)...))
	lse = tensor.New(tensor.Of(p.query), tensor.WithShape(p.dims(p.Heads, p.Queries[0])...))
	for _, x := range []*tensor.Dense{out, lse} {
		switch m := x.Data().(type) {
		case []float32:
			reftest.Poison(m)
		case []float64:
			reftest.Poison(m)
		}
	}
	return out, lse
}

// args are the operands of p for Attend.
func (p *problem) args() la.Args {
	a := la.Args{Q: p.q, K: p.k, V: p.v, Lengths: p.Keys}
	if p.bias != nil {
		a.Bias = p.bias
	}
	out, lse := p.results()
	a.Out, a.LSE = out, lse
	return a
}

// TestAttend: the same as Attention, bit for bit, and every element of the
// results is written.
func TestAttend(t *testing.T) {
	rng := reftest.Rand(t)
	for i, types := range elementTypes {
		for j, s := range []reftest.Shape{
			dense(4, 2, 64, 64, 1, 300),
			causal(dense(6, 2, 40, 24, 3, 0, 1, 2, 100)),
			causal(dense(3, 1, 8, 8, 70, 33)),
		} {
			x := spec{inputs: reftest.AllInputs[(i+j)%4], query: types[0], kv: types[1]}
			if len(s.Keys) == 1 {
				x.rank = 3
			}
			p := newProblem(rng, s, x)
			opts := append(p.options(), la.WithSchedule(schedules[(i+j)%3]), la.WithWorkers(i), la.WithTileTokens(32))
			a := p.args()
			if err := la.Attend(a, opts...); err != nil {
				t.Fatal(err)
			}
			p.check(t, p.Reference(p.precision(0)), a.Out, a.LSE)

			g := p.attention(t, opts...)
			g.run(t)
			if !slices.Equal(bits(t, a.Out), bits(t, g.outV)) || !slices.Equal(bits(t, a.LSE), bits(t, g.lseV)) {
				t.Errorf("%v %v: other bits than Attention", types, s)
			}
			if !p.ragged() {
				b := p.args()
				b.LSE, b.Lengths = nil, nil
				if err := la.Attend(b, opts...); err != nil {
					t.Fatal(err)
				}
				if !slices.Equal(bits(t, a.Out), bits(t, b.Out)) {
					t.Errorf("%v %v: other bits without lengths and log-sum-exp", types, s)
				}
			}
		}
	}
}

// TestAttendNonContiguous: operands that are views of other tensors.
func TestAttendNonContiguous(t *testing.T) {
	rng := reftest.Rand(t)
	for _, types := range elementTypes {
		p := newProblem(rng, dense(4, 2, 12, 8, 5, 20, 33), spec{query: types[0], kv: types[1], capacity: 33})
		a := p.args()
		a.Q, a.K, a.V = transposed(t, p.q), sliced(t, p.k, 2), transposed(t, sliced(t, p.v, 1).Materialize().(*tensor.Dense))
		if err := la.Attend(a, p.options()...); err != nil {
			t.Fatal(err)
		}
		p.check(t, p.Reference(p.precision(0)), a.Out, a.LSE)
	}
}

// TestAttendAllocations: none in steady state.
func TestAttendAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool forget at random")
	}
	rng := reftest.Rand(t)
	for i, types := range elementTypes {
		s := causal(dense(8, 2, 32, 16, 2, 700, 0, 100))
		if i%2 == 1 {
			s = biased(rng, bent(s, 90, 20, 1, 2, 3, 4, 5, 6, 7, 8), 1, 8, 2)
		}
		p := newProblem(rng, s, spec{query: types[0], kv: types[1]})
		for _, schedule := range schedules {
			a := p.args()
			opts := append(p.options(), la.WithSchedule(schedule), la.WithWorkers(3), la.WithTileTokens(64))
			var err error
			if n := testing.AllocsPerRun(100, func() {
				if e := la.Attend(a, opts...); e != nil {
					err = e
				}
			}); n != 0 {
				t.Errorf("%v %v: %v allocations a call", types, schedule, n)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestAttendConcurrent: calls at the same time, on shared inputs and on other
// ones, give what they give alone.
func TestAttendConcurrent(t *testing.T) {
	rng := reftest.Rand(t)
	var problems []*problem
	var wants [][]uint64
	for i, types := range elementTypes {
		p := newProblem(rng, causal(dense(6, 2, 24, 24, 2, 150, 0, 400)), spec{query: types[0], kv: types[1]})
		a := p.args()
		if err := la.Attend(a, append(p.options(), la.WithWorkers(i))...); err != nil {
			t.Fatal(err)
		}
		p.check(t, p.Reference(p.precision(0)), a.Out, a.LSE)
		problems = append(problems, p)
		wants = append(wants, append(bits(t, a.Out), bits(t, a.LSE)...))
	}
	var wg sync.WaitGroup
	for range 2 {
		for i, p := range problems {
			a := p.args()
			wg.Go(func() {
				for range 20 {
					if err := la.Attend(a, append(p.options(), la.WithWorkers(i))...); err != nil {
						t.Error(err)
						return
					}
					if got := append(bits(t, a.Out), bits(t, a.LSE)...); !slices.Equal(got, wants[i]) {
						t.Errorf("%v: other bits than alone", elementTypes[i])
						return
					}
				}
			})
		}
	}
	wg.Wait()
}
