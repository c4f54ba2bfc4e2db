//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func emulatedExchange(t testing.TB, members int, limit time.Duration) (*exchangeGPUs, *fakedriver.Library) {
	t.Helper()
	devs, lib := enginetest.EmulatedGroup(t, members, 5, 5)
	return exchangeOf(t, devs, limit), lib
}

func TestEmulatedExchange(t *testing.T) {
	for _, members := range []int{2, 3, 4, 8} {
		t.Run(fmt.Sprint(members), func(t *testing.T) {
			r, _ := emulatedExchange(t, members, 0)
			testExchange(t, r, reftest.Cases(t, 1, 6), reftest.Cases(t, 1500/members/members, 12000/members))
			testExchangeChain(t, r, reftest.Cases(t, 3, 30), 3000/members/members)
		})
	}
}

func TestEmulatedExchangeFails(t *testing.T) {
	r, _ := emulatedExchange(t, 3, 0)
	testExchangeFails(t, r, 100*time.Millisecond)
}

// A launch that fails on one GPU alone: the others end, and the error names that GPU. Behind Realign all go on, and where it
// fails the group is lost.
func TestEmulatedExchangeLaunchFails(t *testing.T) {
	const members = 3
	r, lib := emulatedExchange(t, members, 100*time.Millisecond)
	rng := reftest.Rand(t)
	few := r.x.few
	many := func(o *exchanged) *exchanged {
		queue := o.queue
		o.queue = func(m int) error {
			r.x.few = fewFloats{}
			defer func() { r.x.few = few }()
			return queue(m)
		}
		return o
	}
	finish := func() error {
		for _, m := range r.devs {
			m.Settle(t)
		}
		return nil
	}
	launch := "cuLaunchKernel"
	if r.engines[0].overlap() {
		launch = "cuLaunchKernelEx"
	}
	for i, o := range []*exchanged{r.reduction(t, rng, 2, 30, 0), many(r.reduction(t, rng, 2, 30, 0)), r.gathering(t, rng, 2, 30), r.choosing(t, rng, 2, 30)} {
		for range 1 + rng.IntN(2) {
			onAll(t, rng, members, []*exchanged{o})
		}
		r.settle(t)
		o.check()
		lost := i % members
		lib.State().FailOn(lost, launch, 2)
		for m := range members {
			if err := o.queue(m); (m == lost) != errors.Is(err, cuda.ErrOutOfMemory) {
				t.Errorf("member %d: %v", m, err)
			}
		}
		lib.State().FailIn("", 0)
		if rng.IntN(2) == 0 {
			noError(t, finish())
			wantError(t, "a launch that fails", r.x.Failed(), ErrNoAnswer, fmt.Sprintf("GPU %d did not answer", lost))
		}
		noError(t, r.x.Realign(finish))
		noError(t, r.x.Failed())
		o.again(rng)
		onAll(t, rng, members, []*exchanged{o, o, o})
		r.settle(t)
		o.check()
		o.close()
	}
	lost := errors.New("a GPU is lost")
	for range 2 {
		if err := r.x.Realign(func() error { return lost }); !errors.Is(err, lost) || !errors.Is(err, ErrNoAnswer) || r.x.Failed() != err {
			t.Errorf("%v, and then %v", err, r.x.Failed())
		}
	}
	noError(t, r.x.Close())
}

// Whatever call of the driver fails, nothing of an exchange is left.
func TestEmulatedExchangeFaults(t *testing.T) {
	r, lib := emulatedExchange(t, 2, 0)
	noError(t, r.x.Close())
	live, calls := lib.Live(), int64(0)
	for done := false; !done; calls++ {
		at := lib.State().Calls + calls + 1
		lib.State().FailAt, lib.State().FailWith = at, 2
		x, err := NewExchange(r.engines, 0)
		done = lib.State().Calls < at
		lib.State().FailAt = 0
		if err == nil {
			noError(t, x.Close())
		} else if x != nil || !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("call %d: %v", calls, err)
		}
		if n := lib.Live(); n != live {
			t.Fatalf("call %d, %v: %d objects, %d before", calls, err, n, live)
		}
	}
	if calls < 10 {
		t.Errorf("%d calls", calls)
	}
}

func TestEmulatedExchangeRefuses(t *testing.T) {
	r, lib := emulatedExchange(t, 2, 0)
	for what, c := range map[string]struct {
		engines  []*Engine
		limit    time.Duration
		sentinel error
		text     string
	}{
		"one":        {r.engines[:1], 0, attn.ErrUnsupported, "1 GPUs"},
		"nine":       {make([]*Engine, 9), 0, attn.ErrUnsupported, "9 GPUs"},
		"one twice":  {[]*Engine{r.engines[1], r.engines[1]}, 0, attn.ErrShape, "GPU 1 is in the group twice"},
		"a negative": {r.engines, -1, attn.ErrShape, "-1ns"},
	} {
		x, err := NewExchange(c.engines, c.limit)
		wantError(t, what, err, c.sentinel, c.text)
		if x != nil {
			t.Errorf("%s: there is one", what)
		}
	}
	x := func(n int) (list []gpu.Memory) {
		for m := range r.devs {
			list = append(list, r.put(t, m, make([]float32, n)))
		}
		return list
	}
	reduce := func() *AllReduce { return &AllReduce{Rows: 2, N: 3, X: x(6), B: x(3), Residual: x(6), Y: x(6)} }
	gather := func() *AllGather { return &AllGather{Rows: 2, Columns: []int{3, 4}, X: x(8), Y: x(14)} }
	lib.Forget()
	short := func(list []gpu.Memory, m int) { list[m].Len-- }
	for _, c := range []struct {
		text     string
		sentinel error
		change   func(o *AllReduce)
	}{
		{"0 rows of 3", attn.ErrShape, func(o *AllReduce) { o.Rows = 0 }},
		{"2 rows of -1", attn.ErrShape, func(o *AllReduce) { o.N = -1 }},
		{"rows of 3", attn.ErrShape, func(o *AllReduce) { o.Rows = 1 << 61 }},
		{"x of member 1 has 5 elements of 6", attn.ErrShape, func(o *AllReduce) { short(o.X, 1) }},
		{"y of member 0 has 5 elements of 6", attn.ErrShape, func(o *AllReduce) { short(o.Y, 0) }},
		{"b of member 1 has 2 elements of 3", attn.ErrShape, func(o *AllReduce) { short(o.B, 1) }},
		{"the residual of member 1 has 5 elements of 6", attn.ErrShape, func(o *AllReduce) { short(o.Residual, 1) }},
		{"x of 1 members of 2", attn.ErrShape, func(o *AllReduce) { o.X = o.X[:1] }},
		{"y of 0 members of 2", attn.ErrShape, func(o *AllReduce) { o.Y = nil }},
		{"b of member 1 is left out", attn.ErrShape, func(o *AllReduce) { o.B[1] = gpu.Memory{} }},
		{"the residual of member 1 is left out", attn.ErrShape, func(o *AllReduce) { o.Residual[0] = gpu.Memory{} }},
		{"x of member 0 is float16", attn.ErrDType, func(o *AllReduce) { o.X[0].DType = attn.Float16 }},
		{"y of member 1 is bfloat16", attn.ErrDType, func(o *AllReduce) { o.Y[1].DType = attn.BFloat16 }},
	} {
		o := reduce()
		c.change(o)
		for m := range r.devs {
			wantError(t, c.text, r.engines[m].AllReduce(r.devs[m].Stream, r.x, o, m), c.sentinel, c.text)
		}
	}
	for _, c := range []struct {
		text     string
		sentinel error
		change   func(o *AllGather)
	}{
		{"0 rows of", attn.ErrShape, func(o *AllGather) { o.Rows = 0 }},
		{"[3] columns of 2 members", attn.ErrShape, func(o *AllGather) { o.Columns = o.Columns[:1] }},
		{"[3 0] columns", attn.ErrShape, func(o *AllGather) { o.Columns[1] = 0 }},
		{"columns", attn.ErrShape, func(o *AllGather) { o.Columns = []int{1 << 30, 1 << 30} }},
		{"x of member 1 has 7 elements of 8", attn.ErrShape, func(o *AllGather) { short(o.X, 1) }},
		{"y of member 1 has 13 elements of 14", attn.ErrShape, func(o *AllGather) { short(o.Y, 1) }},
		{"y of 1 members of 2", attn.ErrShape, func(o *AllGather) { o.Y = o.Y[:1] }},
		{"y of no member", attn.ErrShape, func(o *AllGather) { o.Y, o.OnlyFirst = nil, true }},
		{"y of member 0 has 13 elements of 14", attn.ErrShape, func(o *AllGather) { short(o.Y, 0); o.OnlyFirst = true }},
		{"x of member 0 is float16", attn.ErrDType, func(o *AllGather) { o.X[0].DType = attn.Float16 }},
	} {
		o := gather()
		c.change(o)
		for m := range r.devs {
			wantError(t, c.text, r.engines[m].AllGather(r.devs[m].Stream, r.x, o, m), c.sentinel, c.text)
		}
	}
	for _, c := range []struct {
		text  string
		lists []*AllGather
	}{
		{"0 of them", nil}, {"4 of them", []*AllGather{gather(), gather(), gather(), gather()}},
		{"2 rows, and 1", []*AllGather{gather(), {Rows: 1, Columns: []int{3, 4}}}},
		{"false, and true", []*AllGather{gather(), {Rows: 2, Columns: []int{3, 4}, OnlyFirst: true}}},
	} {
		for m := range r.devs {
			wantError(t, c.text, r.x.AllGathers(r.devs[m].Stream, c.lists, m), attn.ErrShape, c.text)
		}
	}
	merge := func() *PartStates {
		return &PartStates{Rows: 2, Heads: 3, Dim: 4, Places: 2, Out: x(24), LSE: x(6), Own: x(24), OwnLSE: x(6), Y: x(24), YLSE: x(6)}
	}
	for _, c := range []struct {
		text     string
		sentinel error
		change   func(o *PartStates)
	}{
		{"0 rows of 3 heads of 4", attn.ErrShape, func(o *PartStates) { o.Rows = 0 }},
		{"2 rows of -3 heads", attn.ErrShape, func(o *PartStates) { o.Heads = -3 }},
		{"3 heads of 6", attn.ErrShape, func(o *PartStates) { o.Dim = 6 }},
		{"rows of 3 heads", attn.ErrShape, func(o *PartStates) { o.Rows = 1 << 30 }},
		{"3 heads, and 2 members of 1 places", attn.ErrShape, func(o *PartStates) { o.Places = 1 }},
		{"2 members of 4 places", attn.ErrShape, func(o *PartStates) { o.Places = 4 }},
		{"2 members of 0 places", attn.ErrShape, func(o *PartStates) { o.Places = 0 }},
		{"out of member 1 has 23 elements of 24", attn.ErrShape, func(o *PartStates) { short(o.Out, 1) }},
		{"lse of member 0 has 5 elements of 6", attn.ErrShape, func(o *PartStates) { short(o.LSE, 0) }},
		{"own out of member 1 has 23 elements of 24", attn.ErrShape, func(o *PartStates) { short(o.Own, 1) }},
		{"own lse of member 1 has 5 elements of 6", attn.ErrShape, func(o *PartStates) { short(o.OwnLSE, 1) }},
		{"merged lse of member 0 has 5 elements of 6", attn.ErrShape, func(o *PartStates) { short(o.YLSE, 0) }},
		{"an own output without", attn.ErrShape, func(o *PartStates) { o.OwnLSE = nil }},
		{"y of 1 members of 2", attn.ErrShape, func(o *PartStates) { o.Y = o.Y[:1] }},
		{"lse of 1 members of 2", attn.ErrShape, func(o *PartStates) { o.LSE = o.LSE[:1] }},
		{"y of member 1 has 23 elements of 24", attn.ErrShape, func(o *PartStates) { short(o.Y, 1) }},
		{"y of member 0 is float64", attn.ErrDType, func(o *PartStates) { o.Y[0].DType = attn.Float64 }},
		{"out of member 0 is float16", attn.ErrDType, func(o *PartStates) { o.Out[0].DType = attn.Float16 }},
		{"lse of member 1 is bfloat16", attn.ErrDType, func(o *PartStates) { o.LSE[1].DType = attn.BFloat16 }},
	} {
		o := merge()
		c.change(o)
		for m := range r.devs {
			wantError(t, c.text, r.x.MergeParts(r.devs[m].Stream, o, m), c.sentinel, c.text)
		}
	}
	o := reduce()
	wantError(t, "a merging member too many", r.x.MergeParts(r.devs[0].Stream, merge(), 2), attn.ErrShape, "member 2 of 2")
	wantError(t, "a gathering member too few", r.x.AllGathers(r.devs[0].Stream, []*AllGather{gather()}, -1), attn.ErrShape, "member -1 of 2")
	wantError(t, "a member too many", r.engines[0].AllReduce(r.devs[0].Stream, r.x, o, 2), attn.ErrShape, "member 2 of 2")
	wantError(t, "another's engine", r.engines[0].AllReduce(r.devs[0].Stream, r.x, o, 1), attn.ErrShape, "member 1 is GPU 1")
	wantError(t, "another's stream", r.engines[0].AllReduce(r.devs[1].Stream, r.x, o, 0), cuda.ErrOtherDevice, "")
	slices.Reverse(o.X)
	wantError(t, "a closed y", func() error {
		noError(t, o.Y[1].Buffer.Close())
		return r.engines[0].AllReduce(r.devs[0].Stream, r.x, o, 0)
	}(), cuda.ErrClosed, "")
	if strings.Contains(lib.Log(), "kernel exchange_") {
		t.Errorf("something was launched:\n%s", lib.Log())
	}
	good := reduce()
	for m := range r.devs {
		noError(t, r.engines[m].AllReduce(r.devs[m].Stream, r.x, good, m))
	}
	if strings.Count(lib.Log(), "kernel exchange_") != 2 {
		t.Errorf("launches are not in the log:\n%s", lib.Log())
	}
	r.settle(t)
}
