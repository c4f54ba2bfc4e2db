package decoder

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
)

// gpuRunner is a runner with a GPU that computes queued steps one after another, while the host goes on. Time passes only in calls.
type gpuRunner struct {
	faultyRunner
	step, row, queue time.Duration // of a step, of each row beyond one for a text, and of the host for a step
	clock            time.Duration
	busy             time.Duration // when the GPU has computed all queued steps
	idle             time.Duration // of the GPU between queued steps
	event            func()        // at a time
	at               time.Duration
	read             time.Duration // when a prompt was read
	most             int           // steps of a call of ahead, after the first calls
}

// newGPURunner is the runner of an engine from now on.
func newGPURunner(e *Engine, step, row time.Duration) *gpuRunner {
	r := &gpuRunner{faultyRunner: newFaultyRunner(e, rand.New(never{}), new(int)), step: step, row: row, queue: min(20*time.Microsecond, step/10)}
	s := &e.scheduler
	s.runner, s.sleep, s.now = r, r.sleep, func() time.Time { return time.Unix(0, int64(r.clock)) }
	return r
}

// until lets time pass.
func (r *gpuRunner) until(t time.Duration) {
	if event := r.event; event != nil && t >= r.at {
		r.clock, r.event = max(r.clock, r.at), nil
		event()
	}
	r.clock = max(r.clock, t)
}

func (r *gpuRunner) sleep(d time.Duration) { r.until(r.clock + d) }

func (r *gpuRunner) run(appends []la.Append, tokens []int, all, logits bool, draws []draw) (results, error) {
	r.until(max(r.clock, r.busy) + r.step + time.Duration(len(tokens)-len(appends))*r.row)
	r.busy = r.clock
	for _, a := range appends {
		if a.Tokens > 1 {
			r.read = r.clock
		}
	}
	return r.faultyRunner.run(appends, tokens, all, logits, draws)
}

func (r *gpuRunner) ahead(appends []la.Append, tokens []int, steps int, draws []draw) (func() ([]int, error), error) {
	r.until(r.clock + time.Duration(steps)*r.queue)
	if r.clock > r.busy && tokens == nil {
		r.idle += r.clock - r.busy
	}
	r.busy = max(r.busy, r.clock) + time.Duration(steps)*r.step
	end := r.busy
	wait, err := r.faultyRunner.ahead(appends, tokens, steps, draws)
	if *r.calls > 10 {
		r.most = max(r.most, steps)
	}
	return func() ([]int, error) {
		r.until(end)
		return wait()
	}, err
}

// TestHold: a text that joins beside another, or after it was cancelled, waits for no step but the one that the GPU computes, unless that is
// almost done. The GPU is never idle.
func TestHold(t *testing.T) {
	const own = 16
	beginning := make([]int, 100)
	for i := range beginning {
		beginning[i] = i * i % 13
	}
	for _, cancelled := range []bool{false, true} {
		for _, c := range []struct {
			step  time.Duration
			phase float64 // of a step, when the text joins
			waits float64 // steps until the text is read, at most
		}{{4 * time.Millisecond, 0, 1}, {4 * time.Millisecond, 0.5, 0.5}, {4 * time.Millisecond, 0.9, 0.1}, {4 * time.Millisecond, 0.99, 1.01}, {20 * time.Millisecond, 0.97, 0.03}} {
			e := smallEngine(t, Options{Context: 1000, Tokens: 4000, Chunk: 200, Exact: true, Gap: 3})
			r := newGPURunner(e, c.step, c.step/40)
			ctx, cancel := context.WithCancel(context.Background())
			second := make(chan *Text, 1)
			// The event is when the GPU has computed the prompt and 300 steps. Queuing the first of them takes the host some time.
			r.at = r.step + 99*r.row + time.Duration((300+c.phase)*float64(c.step)) + r.queue
			r.event = func() {
				if cancelled {
					cancel()
				}
				x, err := e.Start(context.Background(), Request{Prompt: append(beginning[:100:100], make([]int, own)...), Tokens: 1, Ends: []int{}})
				if err != nil {
					t.Error(err)
				}
				second <- x
			}
			first, err := e.Start(ctx, Request{Prompt: beginning, Tokens: 400, Ends: []int{}})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := ids(<-second); err != nil {
				t.Fatal(err)
			}
			if _, err := ids(first); err != nil {
				t.Fatal(err)
			}
			e.work.Wait()
			took := float64(r.read-r.at)/float64(c.step) - float64(r.step+own*r.row)/float64(c.step)
			if took > c.waits+0.02 || took < 0 {
				t.Errorf("cancelled %v, %v, phase %v: the text waits for %.2f steps, want at most %v", cancelled, c.step, c.phase, took, c.waits)
			}
			if r.idle > 0 {
				t.Errorf("%v, phase %v: the GPU is idle for %v", c.step, c.phase, r.idle)
			}
			if shared := e.Stats().SharedTokens; shared != len(beginning) {
				t.Errorf("%d tokens are shared", shared)
			}
			cancel()
		}
	}
}

// TestPaceDrift: times that vary do not change the bound of prompts' rows in the long run.
func TestPaceDrift(t *testing.T) {
	p := pace{most: 3}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		p.rows(1, 2048)
		p.took(1, 0, time.Duration((1+0.03*rng.NormFloat64())*float64(4*time.Millisecond)))
	}
	if n := p.rows(1, 2048); n < firstRows*3/4 || n > firstRows*4/3 {
		t.Errorf("%d rows, at first %d", n, firstRows)
	}
}
