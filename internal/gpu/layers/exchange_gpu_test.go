package layers

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/kernels"
)

// exchangeGPUs is an exchange of some GPUs.
type exchangeGPUs struct {
	x       *Exchange
	devs    []*enginetest.Device
	engines []*Engine
	forks   []*cuda.Event // of the first GPU, and one of each other that comes back to it
}

// allFew is as many floats for all operations.
func allFew(n int) fewFloats { return fewFloats{n, n, n} }

func exchangeOf(t testing.TB, devs []*enginetest.Device, limit time.Duration) *exchangeGPUs {
	t.Helper()
	r := &exchangeGPUs{devs: devs}
	for _, m := range devs {
		r.engines = append(r.engines, &Engine{dev: m.Dev, info: m.Dev.Info()})
		e, err := m.Dev.NewEvent(false)
		noError(t, err)
		r.forks = append(r.forks, e)
	}
	r.renew(t, limit)
	return r
}

// renew makes another exchange.
func (r *exchangeGPUs) renew(t testing.TB, limit time.Duration) {
	t.Helper()
	if r.x != nil {
		noError(t, r.x.Close())
	}
	x, err := NewExchange(r.engines, limit)
	if errors.Is(err, kernels.ErrNoImage) || errors.Is(err, cuda.ErrNoPeerAccess) {
		t.Skip(err)
	}
	noError(t, err)
	r.x = x
}

func (r *exchangeGPUs) settle(t testing.TB) {
	t.Helper()
	for _, m := range r.devs {
		m.Settle(t)
	}
	noError(t, r.x.Failed())
}

// poison has inboxes full of NaN, with numbers of rounds that are far away, and has so many rounds behind it.
func (r *exchangeGPUs) poison(t testing.TB, rng *rand.Rand, rounds uint32) {
	t.Helper()
	words := make([]uint64, (r.x.Bytes()-exchangeInbox)/8)
	for i := range words {
		words[i] = uint64(1<<30+rng.Uint32N(1<<30))<<32 | uint64(math.Float32bits(float32(math.NaN())))
	}
	for _, b := range r.x.memory {
		noError(t, b.Upload(exchangeInbox, gpu.BytesOf(words)))
		noError(t, b.Upload(0, binary.LittleEndian.AppendUint32(nil, rounds)))
	}
}

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

// onAll has all members do what comes in their order, in turns of the host that are random.
func onAll(t testing.TB, rng *rand.Rand, members int, ops []*exchanged) {
	t.Helper()
	next := make([]int, members)
	for left := members * len(ops); left > 0; {
		m := rng.IntN(members)
		if next[m] == len(ops) {
			continue
		}
		noError(t, ops[next[m]].queue(m))
		next[m]++
		left--
	}
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
	count := rows * n
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
			o.Y = append(o.Y, keep(gpu.Memory{DType: attn.Float32, Len: count + slack}))
			held[m][len(held[m])-1].Buffer = nil
			r.devs[m].Poison(t, &o.Y[m])
			held[m][len(held[m])-1] = o.Y[m]
		}
	}
	e := &exchanged{kind: "all-reduce", most: count, what: fmt.Sprintf("%d GPUs: all-reduce of %d x %d, bias %v, residual %v, in place %d, at most %v elements as words", members, rows, n, withBias, withResidual, in, r.x.few)}
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
		for m := 1; m < members; m++ {
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

// testExchange: random operations one behind the other, queued by the host in any order and not waited for; then the same
// recorded, as branches of one graph, and replayed with other numbers.
func testExchange(t *testing.T, r *exchangeGPUs, cases, most int) {
	rng := reftest.Rand(t)
	seen, kinds := map[string]bool{}, 8
	choose := reftest.Every(t) || most >= 1<<16 || len(r.devs) <= 3 // which takes an emulator of many GPUs long
	if choose {
		kinds++
	}
	for range reftest.AtLeast(cases, func() bool { return len(seen) == kinds }) {
		rounds := uint32(0)
		switch rng.IntN(3) {
		case 1:
			rounds = math.MaxUint32 - rng.Uint32N(4) // and begins again
		case 2:
			rounds = rng.Uint32N(1 << 28)
		}
		r.poison(t, rng, rounds)
		draw := func() []*exchanged { return r.some(t, rng, most, 3+rng.IntN(4), choose && !seen["all-argmax"]) }
		ops := draw()
		unseen := func(o *exchanged) bool { return !seen[o.kind] }
		for len(seen) > 0 && r.devs[0].Few(t) && !slices.ContainsFunc(ops, unseen) { // later cases are for kinds that are missing
			for _, o := range ops {
				o.close()
			}
			ops = draw()
		}
		for _, o := range ops {
			seen[o.kind] = true
		}
		before := make([][]byte, len(ops))
		check := func(same bool) {
			t.Helper()
			r.settle(t)
			for i, o := range ops {
				got := o.check()
				if same && !bytes.Equal(got, before[i]) {
					t.Fatalf("%s: the same numbers have other results", o.what)
				}
				before[i] = got
			}
		}
		for turn := range 2 {
			onAll(t, rng, len(r.devs), ops)
			check(turn > 0)
			for _, o := range ops {
				o.fill()
			}
		}
		graph, err := r.capture(func(m int) error {
			for _, o := range ops {
				if err := o.queue(m); err != nil {
					return err
				}
			}
			return nil
		})
		noError(t, err)
		for turn := range 3 {
			noError(t, r.devs[0].Stream.Launch(graph))
			check(turn == 0)
			for _, o := range ops {
				o.again(rng)
			}
		}
		noError(t, graph.Close())
		for _, o := range ops {
			o.close()
		}
	}
}

// testExchangeChain: what one operation makes the next one sums, in place or from one y to another, so that it is seen
// whether all of y is there when the operation ends. Sums of small whole numbers are exact.
func testExchangeChain(t *testing.T, r *exchangeGPUs, cases, most int) {
	rng := reftest.Rand(t)
	members := len(r.devs)
	for range cases {
		n, rounds := 1+rng.IntN(most), 3+rng.IntN(4)
		want := make([]float32, n)
		var o AllReduce
		o.Rows, o.N = 1, n
		held := make([][]gpu.Memory, members)
		other := make([]gpu.Memory, members)
		for m := range members {
			x := make([]float32, n)
			for i := range x {
				x[i] = float32(rng.IntN(8))
				want[i] += x[i]
			}
			o.X = append(o.X, r.put(t, m, x))
			other[m] = gpu.Memory{DType: attn.Float32, Len: n}
			r.devs[m].Poison(t, &other[m])
			held[m] = []gpu.Memory{o.X[m], other[m]}
		}
		o.Y = o.X
		for i := range rounds {
			if i > 0 {
				for j := range want {
					want[j] *= float32(members)
				}
			}
			if rng.IntN(2) == 0 {
				o.Y, other = other, o.X
			}
			r.x.few = allFew(enginetest.Pick(rng, 0, 0, exchangeFew/4))
			for _, m := range rng.Perm(members) {
				noError(t, r.engines[m].AllReduce(r.devs[m].Stream, r.x, &o, m))
			}
			o.X = o.Y
		}
		r.settle(t)
		for m := range members {
			if !bytes.Equal(enginetest.Read(t, &o.Y[m]), gpu.BytesOf(want)) {
				t.Fatalf("%d GPUs, %d elements, %d sums of sums: member %d has others", members, n, rounds, m)
			}
		}
		closing(t, held)()
	}
}

// capture makes a graph in which each member has a branch of its own.
func (r *exchangeGPUs) capture(branch func(member int) error) (*cuda.Graph, error) {
	first := r.devs[0].Stream
	return first.Capture(func() error {
		if err := first.Record(r.forks[0]); err != nil {
			return err
		}
		for m := len(r.devs) - 1; m >= 0; m-- {
			s := r.devs[m].Stream
			if m > 0 {
				if err := s.Wait(r.forks[0]); err != nil {
					return err
				}
			}
			if err := branch(m); err != nil {
				return err
			}
			if m > 0 {
				if err := s.Record(r.forks[m]); err != nil {
					return err
				}
			}
		}
		for _, e := range r.forks[1:] {
			if err := first.Wait(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// testExchangeFails: one member never comes. All others end, the error names it, and what comes later ends at once.
func testExchangeFails(t *testing.T, r *exchangeGPUs, limit time.Duration) {
	rng := reftest.Rand(t)
	members := len(r.devs)
	for i := range 7 {
		r.renew(t, limit)
		r.x.few = allFew(exchangeFew / 4)
		if i >= 3 && i < 6 {
			r.x.few = fewFloats{}
		}
		var o *exchanged
		switch {
		case i == 6:
			o = r.choosing(t, rng, 3, 40)
		case i%3 == 0:
			o = r.reduction(t, rng, 3, 40, 0)
		case i%3 == 1:
			o = r.gathering(t, rng, 3, 40)
		default:
			o = r.merging(t, rng, 3, 8, 200)
		}
		onAll(t, rng, members, []*exchanged{o, o, o})
		r.settle(t)
		o.check()
		lost := rng.IntN(members)
		for m := range members {
			if m != lost {
				noError(t, o.queue(m))
			}
		}
		begin := time.Now()
		for _, m := range r.devs {
			m.Settle(t)
		}
		err := r.x.Failed()
		wantError(t, o.what, err, ErrNoAnswer, fmt.Sprintf("GPU %d did not answer GPU", r.devs[lost].Dev.Info().Ordinal))
		wantError(t, o.what, err, ErrNoAnswer, "in round 4 within "+limit.String())
		// All of a graph ends.
		graph, err := r.capture(func(m int) error {
			for range 20 {
				if err := o.queue(m); err != nil {
					return err
				}
			}
			return nil
		})
		noError(t, err)
		noError(t, r.devs[0].Stream.Launch(graph))
		noError(t, r.devs[0].Stream.Synchronize())
		for m := range members {
			if m != lost { // also without it
				noError(t, o.queue(m))
				r.devs[m].Settle(t)
			}
		}
		if took := time.Since(begin); took > 4*limit+5*time.Second {
			t.Errorf("%s: it took %v", o.what, took)
		}
		noError(t, graph.Close())
		noError(t, r.x.Close())
		isClosed(t, r.x.Close())
		isClosed(t, r.x.Failed())
		r.x = nil
		o.close()
	}
	r.renew(t, 0)
}

func isClosed(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("%v, want %v", err, cuda.ErrClosed)
	}
}

func TestGPUsExchange(t *testing.T) {
	r := exchangeOf(t, enginetest.RealGroup(t, 2), 0)
	testExchange(t, r, enginetest.OrShort(60, 6), 1<<20)
	testExchangeChain(t, r, enginetest.OrShort(60, 6), 1<<20)
	testExchangeFails(t, r, 200*time.Millisecond)
}

// BenchmarkGPUsExchange replays recorded exchanges of two, four and eight GPUs, and as many launches that do nothing.
func BenchmarkGPUsExchange(b *testing.B) {
	for _, members := range []int{2, 4, 8} {
		b.Run(fmt.Sprintf("GPUs=%d", members), func(b *testing.B) {
			r := exchangeOf(b, enginetest.RealGroup(b, members), 0)
			for _, kib := range []int{8, 16, 64, 128, 256, 320, 448, 512, 1 << 10, 32 << 10} {
				r.benchmarks(b, kib)
			}
		})
	}
}

// benchmarks are of all operations whose operands have so many bytes.
func (r *exchangeGPUs) benchmarks(b *testing.B, kib int) {
	const rounds, dim = 64, 128
	n, members := kib<<10/4, len(r.devs)
	heads := n / (dim + 1)
	o, g := &AllReduce{Rows: 1, N: n}, &AllGather{Rows: 1, Columns: make([]int, members)}
	s := &PartStates{Rows: 1, Heads: heads, Dim: dim, Places: members}
	held := make([][]gpu.Memory, members)
	for m := range r.devs {
		g.Columns[m] = n / members
		o.X = append(o.X, r.put(b, m, make([]float32, n)))
		o.Y = append(o.Y, r.put(b, m, make([]float32, n)))
		s.LSE = append(s.LSE, r.put(b, m, make([]float32, heads)))
		held[m] = []gpu.Memory{o.X[m], o.Y[m], s.LSE[m]}
	}
	g.Y = o.Y
	part := func(l []gpu.Memory, elements int) (parts []gpu.Memory) {
		for _, m := range l {
			m.Len = elements
			parts = append(parts, m)
		}
		return parts
	}
	g.X, s.Out, s.Y = part(o.X, n/members), part(o.X, heads*dim), part(o.Y, heads*dim)
	for _, c := range []struct {
		name  string
		queue func(m int) error
	}{
		{"all-reduce", func(m int) error { return r.engines[m].AllReduce(r.devs[m].Stream, r.x, o, m) }},
		{"all-gather", func(m int) error { return r.engines[m].AllGather(r.devs[m].Stream, r.x, g, m) }},
		{"merge", func(m int) error { return r.x.MergeParts(r.devs[m].Stream, s, m) }},
	} {
		for _, way := range []string{"words", "in place"} {
			r.x.few = fewFloats{}
			if way == "words" {
				if r.x.few = allFew(exchangeFew / 4); n > exchangeFew/4 {
					continue
				}
			}
			b.Run(fmt.Sprintf("%s/%s/KiB=%d", c.name, way, kib), func(b *testing.B) { r.benchmark(b, rounds, c.queue) })
		}
	}
	b.Run(fmt.Sprintf("nothing/KiB=%d", kib), func(b *testing.B) {
		r.benchmark(b, rounds, func(m int) error {
			d := r.engines[m]
			p := allReduceParams{}
			return launchExchange(d, r.devs[m].Stream, r.x, r.x.kernels[m].nothing, d.exchangeGrid(r.x, n/4), &p, nil)
		})
	})
	closing(b, held)()
}

// benchmark replays a recording of so many rounds.
func (r *exchangeGPUs) benchmark(b *testing.B, rounds int, queue func(member int) error) {
	graph, err := r.capture(func(m int) error {
		for range rounds {
			if err := queue(m); err != nil {
				return err
			}
		}
		return nil
	})
	noError(b, err)
	s := r.devs[0].Stream
	begin, err := r.devs[0].Dev.NewEvent(true)
	noError(b, err)
	end, err := r.devs[0].Dev.NewEvent(true)
	noError(b, err)
	var times []float64
	for range 25 {
		noError(b, s.Record(begin))
		noError(b, s.Launch(graph))
		noError(b, s.Record(end))
		noError(b, s.Synchronize())
		took, err := end.Since(begin)
		noError(b, err)
		times = append(times, float64(took.Nanoseconds())/1e3/float64(rounds))
	}
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2], "us/round")
	b.ReportMetric(times[0], "us/round-least")
	b.ReportMetric(0, "ns/op")
	noError(b, r.x.Failed())
	noError(b, graph.Close())
}

// BenchmarkGPUsChoice replays recorded choices of tokens of OPT's logits, of which two GPUs have a half each: the most likely one,
// and a drawn one, which each GPU chooses of all logits; beside it the gathering of these alone.
func BenchmarkGPUsChoice(b *testing.B) {
	const rounds, vocab = 64, 50272
	r := exchangeOf(b, enginetest.RealGroup(b, 2), 0)
	for _, rows := range []int{1, 4, 16} {
		rng := rand.New(rand.NewPCG(1, 2))
		best := &AllArgMax{Rows: rows, Columns: []int{vocab / 2, vocab / 2}}
		all := &AllGather{Rows: rows, Columns: best.Columns}
		settings, numbers := slices.Repeat([]Setting{{Temperature: 1, TopP: 0.95, TopK: 50}}, rows), slices.Repeat([]float64{0.5}, rows)
		var samplers [2]*Sampler
		var drawn [2]Samples
		var held [2][]gpu.Memory
		for m := range r.devs {
			x := make([]float32, rows*vocab/2)
			randoms(rng, x, 3)
			raw := func(data []byte) gpu.Bytes {
				of := r.devs[m].Put(b, data, attn.Float32)
				held[m] = append(held[m], of)
				return gpu.Bytes{Buffer: of.Buffer, Offset: of.Offset}
			}
			best.X = append(best.X, r.put(b, m, x))
			all.Y = append(all.Y, r.put(b, m, make([]float32, rows*vocab)))
			held[m] = append(held[m], best.X[m], all.Y[m])
			best.IDs = append(best.IDs, raw(make([]byte, 4*rows)))
			var err error
			samplers[m], err = NewSampler(r.devs[m].Dev)
			noError(b, err)
			drawn[m] = Samples{Logits: all.Y[m], Rows: rows, Vocab: vocab, Stride: vocab, Settings: raw(SettingBytes(settings)), Random: raw(gpu.BytesOf(numbers)), IDs: best.IDs[m]}
		}
		all.X = best.X
		gather := func(m int) error { return r.engines[m].AllGather(r.devs[m].Stream, r.x, all, m) }
		for name, queue := range map[string]func(m int) error{
			"greedy": func(m int) error { return r.engines[m].AllArgMax(r.devs[m].Stream, r.x, best, m) },
			"gather": gather,
			"drawn":  func(m int) error { return errors.Join(gather(m), samplers[m].Run(r.devs[m].Stream, &drawn[m])) },
		} {
			b.Run(fmt.Sprintf("%s/rows=%d", name, rows), func(b *testing.B) { r.benchmark(b, rounds, queue) })
		}
		closing(b, held[:])()
	}
}
