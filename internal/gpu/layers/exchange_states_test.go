package layers

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// partsOf is random states of one part of the keys: some are of no key, and in others one key is all.
type partsOf struct{ out, lse []float32 }

func (p *partsOf) draw(rng *rand.Rand, dim int) {
	randoms(rng, p.out, math.Pow(10, float64(rng.IntN(5)-2)))
	spread := enginetest.Pick(rng, 0, 1, 30, 1e4)
	for i := range p.lse {
		p.lse[i] = float32(rng.NormFloat64() * spread)
		if rng.IntN(4) == 0 {
			p.lse[i] = float32(math.Inf(-1))
			clear(p.out[i*dim:][:dim])
		}
	}
}

// merging is a random merging of states.
func (r *exchangeGPUs) merging(t testing.TB, rng *rand.Rand, rows, dim, most int) *exchanged {
	t.Helper()
	members := len(r.devs)
	places := 1 + rng.IntN(members)
	scatter := rng.IntN(3) == 0
	if scatter {
		places = members
	}
	for members%places != 0 {
		places--
	}
	groups := members / places
	each := 1 + rng.IntN(max(most/rows/dim/groups, 1)) // heads of a group
	o := &PartStates{Rows: rows, Heads: groups * each, Dim: dim, Places: places}
	if scatter {
		o.Scatter, o.Heads = true, attn.Ceil(each, members)*members
		each = o.Heads
	}
	states := rows * o.Heads
	count, merged := states*dim, states
	if o.Scatter {
		merged /= members
	}
	all := make([]partsOf, members+1) // that which all have is the last
	for i := range all {
		all[i] = partsOf{make([]float32, count), make([]float32, states)}
	}
	own, logs, kind := rng.IntN(2) == 0, rng.IntN(3) > 0, enginetest.Pick(rng, attn.Float32, attn.Float16, attn.BFloat16)
	held := make([][]gpu.Memory, members)
	const slack = 12
	for m := range members {
		put := func(to *[]gpu.Memory, n int) {
			*to = append(*to, r.put(t, m, make([]float32, n)))
			held[m] = append(held[m], (*to)[m])
		}
		poison := func(to *[]gpu.Memory, n int, d attn.DType) {
			y := gpu.Memory{DType: d, Len: n + slack}
			r.devs[m].Poison(t, &y)
			*to, held[m] = append(*to, y), append(held[m], y)
		}
		put(&o.Out, count)
		put(&o.LSE, states)
		if own {
			put(&o.Own, count)
			put(&o.OwnLSE, states)
		}
		poison(&o.Y, merged*dim, kind)
		if logs {
			poison(&o.YLSE, merged, attn.Float32)
		}
	}
	e := &exchanged{kind: fmt.Sprintf("merge, scatter %v", o.Scatter), most: merged * (dim + 2), what: fmt.Sprintf("%d GPUs, %d places: merge of %d rows of %d heads of %d, scatter %v, own %v, lse %v, %v, at most %v elements as words", members, places, rows, o.Heads, dim, o.Scatter, own, logs, kind, r.x.few)}
	e.queue = func(m int) error { return r.x.MergeParts(r.devs[m].Stream, o, m) }
	e.draw = func(rng *rand.Rand) {
		for i := range all {
			all[i].draw(rng, dim)
		}
	}
	has := func(m, at int) bool { return m/places == at%o.Heads/each }
	e.fill = func() {
		for m := range members {
			upload := func(to *gpu.Memory, x []float32) { noError(t, to.Buffer.Upload(to.Offset, gpu.BytesOf(x))) }
			x := partsOf{slices.Clone(all[m].out), slices.Clone(all[m].lse)}
			for at := range states {
				if !has(m, at) { // nobody reads it
					x.lse[at] = float32(math.NaN())
					for i := range dim {
						x.out[at*dim+i] = float32(math.NaN())
					}
				}
			}
			upload(&o.Out[m], x.out)
			upload(&o.LSE[m], x.lse)
			if own {
				upload(&o.Own[m], all[members].out)
				upload(&o.OwnLSE[m], all[members].lse)
			}
			r.devs[m].Poison(t, &o.Y[m])
			if logs {
				r.devs[m].Poison(t, &o.YLSE[m])
			}
		}
	}
	e.check = func() []byte {
		t.Helper()
		y := enginetest.Read(t, &o.Y[0])
		var lse []byte
		if logs {
			lse = enginetest.Read(t, &o.YLSE[0])
		}
		if o.Scatter {
			read := func(list []gpu.Memory, n, size int) []byte { // of all members, each with n elements of a row
				var parts [][]byte
				for m := range list {
					parts = append(parts, enginetest.Read(t, &list[m]))
				}
				for m, part := range parts {
					if !bytes.Equal(part[rows*n*size:], parts[0][rows*n*size:]) {
						t.Fatalf("%s: member %d writes behind its results", e.what, m)
					}
				}
				return together(parts, rows, n*size, parts[0][rows*n*size:])
			}
			y = read(o.Y, o.Heads/members*dim, kind.Size())
			if logs {
				lse = read(o.YLSE, o.Heads/members, 4)
			}
		}
		for m := 0; m < members && !o.Scatter; m++ {
			if !bytes.Equal(y, enginetest.Read(t, &o.Y[m])) || logs && !bytes.Equal(lse, enginetest.Read(t, &o.YLSE[m])) {
				t.Fatalf("%s: members 0 and %d have other bits", e.what, m)
			}
		}
		for at := range states {
			var of []int
			top := math.Inf(-1)
			for m := range all {
				if m < members && has(m, at) || m == members && own {
					of, top = append(of, m), max(top, float64(all[m].lse[at]))
				}
			}
			weights, sum := make([]float64, len(of)), 0.0
			for i, m := range of {
				if !math.IsInf(top, -1) {
					weights[i] = math.Exp(float64(all[m].lse[at]) - top)
				}
				sum += weights[i]
			}
			want := top + math.Log(sum)
			if math.IsInf(top, -1) {
				sum, want = 1, top
			}
			if logs {
				if got := enginetest.Get(lse, at, attn.Float32); got != want && !(math.Abs(got-want) <= 1e-6*(2+math.Abs(want))) {
					t.Fatalf("%s: log-sum-exp %d: %v, want %v", e.what, at, got, want)
				}
			}
			for c := range dim {
				value, size := 0.0, 0.0
				for i, m := range of {
					if weights[i] == 0 {
						continue
					}
					x := float64(all[m].out[at*dim+c]) * weights[i] / sum
					// A weight is as wrong as the difference of log-sum-exps is rounded.
					value, size = value+x, size+math.Abs(x)*(16+2*math.Abs(float64(all[m].lse[at])-top))
				}
				bound := size*math.Pow(2, -24) + 1e-34 // numbers below the normal ones are none
				switch kind {
				case attn.Float16:
					bound += math.Abs(value)*math.Pow(2, -11) + math.Pow(2, -25)
				case attn.BFloat16:
					bound += math.Abs(value) * math.Pow(2, -8)
				}
				if got := enginetest.Get(y, at*dim+c, kind); !(math.Abs(got-value) <= bound) {
					t.Fatalf("%s: column %d of state %d: %v, want %v to %v", e.what, c, at, got, value, bound)
				}
			}
		}
		if !bytes.Equal(y[kind.Size()*count:], enginetest.Poisoned(slack, kind)) || logs && !bytes.Equal(lse[4*states:], enginetest.Poisoned(slack, attn.Float32)) {
			t.Fatalf("%s: it writes behind y", e.what)
		}
		return append(y, lse...)
	}
	e.close = closing(t, held)
	e.again(rng)
	return e
}

// TestFewOfMembers: an inbox holds what a member sends as words, and the more members there are the less that is.
func TestFewOfMembers(t *testing.T) {
	before := allFew(exchangeFew / 4)
	for members := 2; members <= exchangeMembers; members++ {
		few := fewOfMembers(members)
		for i, of := range [][2]int{{few.reduce, before.reduce}, {few.gather, before.gather}, {few.merge, before.merge}} {
			if of[0] < 1 || of[0] > of[1] {
				t.Errorf("operation %d: %d members send %d floats, one less %d", i, members, of[0], of[1])
			}
		}
		before = few
	}
	if two := fewOfMembers(2); two != allFew(exchangeFew/4) {
		t.Errorf("two send %v floats", two)
	}
}
