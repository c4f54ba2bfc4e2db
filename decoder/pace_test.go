package decoder

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
)

// timedRunner is a runner of which a step takes a time for its weights and a time for each row.
type timedRunner struct {
	runner
	step, row time.Duration
	clock     *atomic.Int64
	slowest   *atomic.Int64 // time of a step with one token of a text
	reading   *atomic.Int64 // time of all steps with rows of prompts
}

func (r timedRunner) run(appends []la.Append, tokens []int, all, logits bool, draws []draw) (results, error) {
	took := r.step + time.Duration(len(tokens))*r.row
	r.clock.Add(int64(took))
	prompts := time.Duration(0)
	for _, a := range appends {
		if a.Tokens > 1 {
			prompts = took
		} else {
			r.slowest.Store(max(r.slowest.Load(), int64(took)))
		}
	}
	r.reading.Add(int64(prompts))
	return r.runner.run(appends, tokens, all, logits, draws)
}

// never is a source of random numbers with which a faultyRunner has no faults.
type never struct{}

func (never) Uint64() uint64 { return 0xb504f333f9de6484 }

// TestStepsTogether: steps that are queued together take at most two milliseconds, unless one step alone takes longer.
func TestStepsTogether(t *testing.T) {
	for step, want := range map[time.Duration]int{10 * time.Millisecond: 1, 700 * time.Microsecond: 2, 10 * time.Microsecond: 5} {
		e := smallEngine(t, Options{Context: 200})
		r := newGPURunner(e, step, 0)
		x, err := e.Start(context.Background(), Request{Prompt: []int{1, 2, 3}, Tokens: 150, Ends: []int{}})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, err := range x.Tokens() {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
		e.work.Wait()
		if got := r.most; got != want || n != 150 {
			t.Errorf("steps of %v: %d are queued together, want %d; %d tokens", step, got, want, n)
		}
	}
}

// TestGap: while a long prompt is read, no text waits longer than Gap usual steps, and the prompt takes at most twice the time that it
// takes alone.
func TestGap(t *testing.T) {
	for _, c := range []struct{ step, row time.Duration }{{10 * time.Millisecond, 100 * time.Microsecond}, {time.Millisecond, time.Millisecond / 4}, {40 * time.Millisecond, 10 * time.Microsecond}} {
		for _, gap := range []float64{0, 3} {
			t.Run(fmt.Sprint(c, gap), func(t *testing.T) {
				e := smallEngine(t, Options{Context: 3000, Tokens: 20000, Batch: 9, Chunk: 500, Gap: gap})
				var clock, slowest, reading atomic.Int64
				e.scheduler.runner = timedRunner{e.scheduler.runner, c.step, c.row, &clock, &slowest, &reading}
				e.scheduler.now = func() time.Time { return time.Unix(0, clock.Load()) }
				start := func(prompt, tokens int) *Text {
					ids := make([]int, prompt)
					for i := range ids {
						ids[i] = (i + prompt) % 13
					}
					x, err := e.Start(context.Background(), Request{Prompt: ids, Tokens: tokens, Ends: []int{}})
					if err != nil {
						t.Fatal(err)
					}
					return x
				}
				next := func(x *Text) {
					for _, err := range x.Tokens() {
						if err != nil {
							t.Fatal(err)
						}
						break
					}
				}
				next(start(2000, 1))
				alone := reading.Load()
				var others []*Text
				for i := range 8 {
					others = append(others, start(i+1, 2000))
				}
				for range 30 {
					for _, x := range others {
						next(x)
					}
				}
				slowest.Store(0)
				reading.Store(0)
				next(start(1999, 1))
				beside := reading.Load()
				usual := c.step + 8*c.row
				longest := float64(slowest.Load()) / float64(usual)
				if gap == 0 && longest < 4 && c.row*500 > 4*usual {
					t.Errorf("%v: without a bound the longest step is %.1f usual ones", c, longest)
				}
				if gap > 0 && (longest > gap || float64(beside) > 2*float64(alone)) {
					t.Errorf("%v: the longest step is %.1f usual ones, and the prompt takes %.1f times as long as alone", c, longest, float64(beside)/float64(alone))
				}
			})
		}
	}
}

// TestGapOfMany: when many texts begin beside one, the bound follows their growing number: no step takes longer than Gap usual ones of so many
// texts, and their prompts are read in few steps.
func TestGapOfMany(t *testing.T) {
	const texts, prompt, gap = 32, 90, 3
	for _, c := range []struct {
		step, row time.Duration
		steps     int // at most
	}{{5 * time.Millisecond, time.Millisecond, 100}, {10 * time.Millisecond, 400 * time.Microsecond, 50}, {time.Millisecond, time.Millisecond, 200}} {
		p := pace{most: gap}
		for range 20 {
			p.took(1, 0, c.step+c.row)
		}
		steps, singles := 0, 1
		for left := (texts - 1) * prompt; left > 0; steps++ {
			n := min(p.rows(singles, 384), left)
			took, usual := c.step+time.Duration(n+singles)*c.row, c.step+time.Duration(singles)*c.row
			if n > firstRows && took > gap*usual {
				t.Errorf("%v: a step of %d texts and %d rows takes %v, and without the rows %v", c, singles, n, took, usual)
			}
			p.took(singles, n, took)
			left -= n
			singles = texts - (left+prompt-1)/prompt
		}
		if steps > c.steps {
			t.Errorf("%v: the prompts take %d steps", c, steps)
		}
	}
}

// TestPace: the bound is in [fewestRows, limit], whatever times are told.
func TestPace(t *testing.T) {
	p := pace{most: 3}
	for i, d := range []time.Duration{time.Second, 0, time.Nanosecond, time.Hour, math.MaxInt64, 1, time.Millisecond, time.Millisecond} {
		p.took(i%3, i%4, d)
		if n := p.rows(2, 100); n < fewestRows || n > 98 {
			t.Errorf("%d rows after %v: %+v", n, d, p)
		}
		if n := p.rows(0, 100); n != 100 {
			t.Errorf("%d rows of prompts alone", n)
		}
	}
}
