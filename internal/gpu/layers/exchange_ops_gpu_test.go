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

// allFew is as many floats for all operations.
func allFew(n int) fewFloats { return fewFloats{n, n, n} }

// exchanged is an operation, and how to see whether it was done.
type exchanged struct {
	what, kind string
	most       int // elements that a member sends
	queue      func(member int) error
	draw       func(rng *rand.Rand) // other numbers
	fill       func()               // puts them where they are read from, and NaN into y
	check      func() []byte        // y of the first member
	close      func()
}

func (e *exchanged) again(rng *rand.Rand) {
	e.draw(rng)
	e.fill()
}

// put is an operand of a member.
func (r *exchangeGPUs) put(t testing.TB, member int, x []float32) gpu.Memory {
	t.Helper()
	return r.devs[member].Put(t, gpu.BytesOf(x), attn.Float32)
}

func randoms(rng *rand.Rand, x []float32, scale float64) {
	for i := range x {
		x[i] = float32(rng.NormFloat64() * scale)
	}
}

// reduction is a random all-reduce. in says what y is: 1 x, 2 the residual, else neither.
func (r *exchangeGPUs) reduction(t testing.TB, rng *rand.Rand, rows, n, in int) *exchanged {
	t.Helper()
	members := len(r.devs)
	o := &AllReduce{Rows: rows, N: n}
	withBias, withResidual := rng.IntN(2) == 0, rng.IntN(2) == 0
	if rng.IntN(3) == 0 {
		o.Scatter, withBias, withResidual, in = true, false, false, 0
		n = attn.Ceil(n, 4*members) * 4 * members
		o.N = n
	}
	count := rows * n
	own := count // elements of y
	if o.Scatter {
		own /= members
	}
	xs, bias, residual := make([][]float32, members), make([]float32, n), make([]float32, count)
	held := make([][]gpu.Memory, members)
	const slack = 12 // behind y, which stays as it is
	for m := range members {
		xs[m] = make([]float32, count)
		keep := func(x gpu.Memory) gpu.Memory { held[m] = append(held[m], x); return x }
		o.X = append(o.X, keep(r.put(t, m, slices.Concat(xs[m], make([]float32, slack)))))
		switch {
		case withBias:
			o.B = append(o.B, keep(r.put(t, m, bias)))
		case in == 3:
			o.B = append(o.B, gpu.Memory{})
		}
		if withResidual {
			o.Residual = append(o.Residual, keep(r.put(t, m, slices.Concat(residual, make([]float32, slack)))))
		}
		switch {
		case in == 1:
			o.Y = append(o.Y, o.X[m])
		case in == 2 && withResidual:
			o.Y = append(o.Y, o.Residual[m])
		default:
			o.Y = append(o.Y, keep(gpu.Memory{DType: attn.Float32, Len: own + slack}))
			held[m][len(held[m])-1].Buffer = nil
			r.devs[m].Poison(t, &o.Y[m])
			held[m][len(held[m])-1] = o.Y[m]
		}
	}
	e := &exchanged{kind: fmt.Sprintf("all-reduce, scatter %v", o.Scatter), most: own, what: fmt.Sprintf("%d GPUs: all-reduce of %d x %d, scatter %v, bias %v, residual %v, in place %d, at most %v elements as words", members, rows, n, o.Scatter, withBias, withResidual, in, r.x.few)}
	e.queue = func(m int) error { return r.engines[m].AllReduce(r.devs[m].Stream, r.x, o, m) }
	e.draw = func(rng *rand.Rand) {
		scale := math.Pow(10, float64(rng.IntN(5)-2))
		randoms(rng, bias, 1)
		randoms(rng, residual, scale)
		for m := range members {
			randoms(rng, xs[m], scale)
		}
	}
	e.fill = func() {
		for m := range members {
			tail := enginetest.Poisoned(slack, attn.Float32)
			fill := func(x *gpu.Memory, v []float32) {
				noError(t, x.Buffer.Upload(x.Offset, append(bytes.Clone(gpu.BytesOf(v)), tail...)))
			}
			r.devs[m].Poison(t, &o.Y[m])
			fill(&o.X[m], xs[m])
			if withBias {
				noError(t, o.B[m].Buffer.Upload(o.B[m].Offset, gpu.BytesOf(bias)))
			}
			if withResidual {
				fill(&o.Residual[m], residual)
			}
		}
	}
	e.check = func() []byte {
		t.Helper()
		first := enginetest.Read(t, &o.Y[0])
		if o.Scatter {
			var parts [][]byte
			for m := range members {
				y := enginetest.Read(t, &o.Y[m])
				if !bytes.Equal(y[4*own:], enginetest.Poisoned(slack, attn.Float32)) {
					t.Fatalf("%s: member %d writes behind y", e.what, m)
				}
				parts = append(parts, y)
			}
			first = together(parts, rows, 4*n/members, first[4*own:])
		}
		for m := 1; m < members && !o.Scatter; m++ {
			if !bytes.Equal(first, enginetest.Read(t, &o.Y[m])) {
				t.Fatalf("%s: members 0 and %d have other bits", e.what, m)
			}
		}
		for i := range count {
			want, size := 0.0, 0.0
			add := func(v float32) { want += float64(v); size += math.Abs(float64(v)) }
			for m := range members {
				add(xs[m][i])
			}
			if withBias {
				add(bias[i%n])
			}
			if withResidual {
				add(residual[i])
			}
			if got := enginetest.Get(first, i, attn.Float32); !(math.Abs(got-want) <= size*float64(members+2)*math.Pow(2, -24)) {
				t.Fatalf("%s: element %d: %v, want %v", e.what, i, got, want)
			}
		}
		if !bytes.Equal(first[4*count:], enginetest.Poisoned(slack, attn.Float32)) {
			t.Fatalf("%s: it writes behind y", e.what)
		}
		return first
	}
	e.close = closing(t, held)
	e.again(rng)
	return e
}

// together returns rows of the members' parts side by side, and what comes after them.
func together(parts [][]byte, rows, each int, tail []byte) (all []byte) {
	for row := range rows {
		for _, part := range parts {
			all = append(all, part[row*each:][:each]...)
		}
	}
	return append(all, tail...)
}

func closing(t testing.TB, held [][]gpu.Memory) func() {
	return func() {
		t.Helper()
		for _, list := range held {
			for _, x := range list {
				noError(t, x.Buffer.Close())
			}
		}
	}
}

// gathering is some random all-gathers of one launch.
func (r *exchangeGPUs) gathering(t testing.TB, rng *rand.Rand, rows, columns int) *exchanged {
	t.Helper()
	members, onlyFirst := len(r.devs), rng.IntN(3) == 0
	var lists []*AllGather
	xs, held := make([][][]float32, members), make([][]gpu.Memory, members)
	const slack = 12
	sent, step := 0, enginetest.Pick(rng, 1, 4)
	what := fmt.Sprintf("%d GPUs: all-gather of %d rows, first alone %v, at most %v elements as words", members, rows, onlyFirst, r.x.few)
	for range 1 + rng.IntN(exchangeLists) {
		o := &AllGather{Rows: rows, OnlyFirst: onlyFirst}
		total := 0
		for range members {
			n := step * (1 + rng.IntN(max(2*columns/members/step, 1)))
			o.Columns = append(o.Columns, n)
			total += n
		}
		for m, n := range o.Columns {
			xs[m] = append(xs[m], make([]float32, rows*n))
			o.X = append(o.X, r.put(t, m, make([]float32, rows*n)))
			held[m] = append(held[m], o.X[m])
			y := gpu.Memory{DType: attn.Float32, Len: rows*total + slack}
			if m == 0 || !onlyFirst {
				r.devs[m].Poison(t, &y)
				o.Y = append(o.Y, y)
				held[m] = append(held[m], y)
			}
		}
		lists = append(lists, o)
		sent += attn.Ceil(rows*slices.Max(o.Columns), 4) * 4
		what += fmt.Sprintf(", %v", o.Columns)
	}
	e := &exchanged{kind: fmt.Sprintf("all-gather, first alone %v", onlyFirst), most: sent, what: what}
	e.queue = func(m int) error { return r.x.AllGathers(r.devs[m].Stream, lists, m) }
	e.draw = func(rng *rand.Rand) {
		for m := range members {
			for _, x := range xs[m] {
				randoms(rng, x, 1)
			}
		}
	}
	e.fill = func() {
		for i, o := range lists {
			for m := range members {
				noError(t, o.X[m].Buffer.Upload(o.X[m].Offset, gpu.BytesOf(xs[m][i])))
				if m < len(o.Y) {
					r.devs[m].Poison(t, &o.Y[m])
				}
			}
		}
	}
	e.check = func() (all []byte) {
		t.Helper()
		for i, o := range lists {
			total := 0
			for _, n := range o.Columns {
				total += n
			}
			for m := range o.Y {
				y := enginetest.Read(t, &o.Y[m])
				for row := range rows {
					at := row * total
					for of, n := range o.Columns {
						if !bytes.Equal(y[4*at:4*(at+n)], gpu.BytesOf(xs[of][i][row*n:(row+1)*n])) {
							t.Fatalf("%s: number %d: member %d, row %d: the columns of member %d are others", e.what, i, m, row, of)
						}
						at += n
					}
				}
				if !bytes.Equal(y[4*rows*total:], enginetest.Poisoned(slack, attn.Float32)) {
					t.Fatalf("%s: number %d: it writes behind y", e.what, i)
				}
				if m == 0 {
					all = append(all, y...)
				}
			}
		}
		return all
	}
	e.close = closing(t, held)
	e.again(rng)
	return e
}

// choosing is a random choice of the most likely token of rows of logits, as one GPU chooses that has all of a row.
func (r *exchangeGPUs) choosing(t testing.TB, rng *rand.Rand, rows, columns int) *exchanged {
	t.Helper()
	members := len(r.devs)
	o := &AllArgMax{Rows: rows}
	total := 0
	for range members {
		n := 1 + rng.IntN(max(min(2*columns, MostVocab)/members-1, 1))
		o.Columns = append(o.Columns, n)
		total += n
	}
	xs, logits, held := make([][]float32, members), make([][]float32, rows), make([][]gpu.Memory, members)
	for m, n := range o.Columns {
		xs[m] = make([]float32, rows*n)
		ids := r.devs[m].Put(t, make([]byte, 4*rows+2*guard), attn.Float32)
		o.X = append(o.X, r.put(t, m, xs[m]))
		o.IDs = append(o.IDs, gpu.Bytes{Buffer: ids.Buffer, Offset: ids.Offset + guard})
		held[m] = []gpu.Memory{o.X[m], ids}
	}
	e := &exchanged{kind: "all-argmax", what: fmt.Sprintf("%d GPUs: all-argmax of %d x %v", members, rows, o.Columns)}
	e.queue = func(m int) error { return r.engines[m].AllArgMax(r.devs[m].Stream, r.x, o, m) }
	e.draw = func(rng *rand.Rand) {
		for row := range logits {
			x := sampleLogits(rng, total)
			switch rng.IntN(6) {
			case 0: // the greatest twice
				x[rng.IntN(total)], x[rng.IntN(total)] = math.MaxFloat32, math.MaxFloat32
			case 1: // one, at any member's first or last column
				of, at := rng.IntN(members), 0
				for _, n := range o.Columns[:of] {
					at += n
				}
				x[at+rng.IntN(2)*(o.Columns[of]-1)] = math.MaxFloat32
			}
			logits[row] = x
			at := 0
			for m, n := range o.Columns {
				at += copy(xs[m][row*n:(row+1)*n], x[at:])
			}
		}
	}
	e.fill = func() {
		for m := range members {
			noError(t, o.X[m].Buffer.Upload(o.X[m].Offset, gpu.BytesOf(xs[m])))
			noError(t, o.IDs[m].Buffer.Upload(o.IDs[m].Offset-guard, bytes.Repeat([]byte{0xaa}, 4*rows+2*guard)))
		}
	}
	e.check = func() []byte {
		t.Helper()
		var first []int32
		for m := range members {
			ids := (&samples{Samples: Samples{Rows: rows, IDs: o.IDs[m]}}).ids(t)
			for row, id := range ids {
				if want, _ := sampleReference(logits[row], Setting{}, 0); id != want {
					t.Fatalf("%s: row %d: member %d has token %d, want %d", e.what, row, m, id, want)
				}
			}
			first = ids
		}
		return gpu.BytesOf(first)
	}
	e.close = closing(t, held)
	e.again(rng)
	return e
}

// some is random operations, of few elements and of many; with choose one of them, at least, is the choice of tokens.
func (r *exchangeGPUs) some(t testing.TB, rng *rand.Rand, most, n int, choose bool) (ops []*exchanged) {
	t.Helper()
	real := most >= 1<<16
	at := -1
	if choose {
		at = rng.IntN(n)
	}
	kinds := rng.Perm(3)
	for i := range n {
		rows := min(enginetest.Pick(rng, 1, 1, 2, 3, 16, 33), most)
		columns := min(enginetest.Pick(rng, 1, 3, 4, 5, 64, 77, 4*(1+rng.IntN(64)), 1+rng.IntN(most)), max(most/rows, 1))
		r.x.few = allFew(enginetest.Pick(rng, exchangeFew/4, exchangeFew/4, 0, 100))
		few := r.x.few
		var op *exchanged
		switch {
		case i == at || real && rng.IntN(4) == 0:
			if !real { // thousands of threads for each row, and an emulator is slow
				rows = min(rows, 1+rng.IntN(2))
			}
			op = r.choosing(t, rng, rows, columns)
		case kinds[i%3] == 0:
			op = r.gathering(t, rng, rows, columns)
		case kinds[i%3] == 1: // more work than the others
			op = r.merging(t, rng, min(rows, 3), 4*(1+rng.IntN(16)), most/4)
		default:
			op = r.reduction(t, rng, rows, columns, rng.IntN(4))
		}
		queue := op.queue
		op.queue = func(m int) error { r.x.few = few; return queue(m) }
		if op.most > few.reduce {
			op.kind += " of many"
		}
		ops = append(ops, op)
	}
	return ops
}
