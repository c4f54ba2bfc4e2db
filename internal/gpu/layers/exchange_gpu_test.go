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

// testExchange: random operations one behind the other, queued by the host in any order and not waited for; then the same
// recorded, as branches of one graph, and replayed with other numbers.
func testExchange(t *testing.T, r *exchangeGPUs, cases, most int) {
	rng := reftest.Rand(t)
	seen, kinds := map[string]bool{}, 12
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
