package measure

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"
)

// Contender is one of several programs for the same work.
type Contender struct {
	Name string
	// Run does n steps and returns how long they took together.
	Run func(n int) (time.Duration, error)
	// Settle is how long its threads may go on spinning after a turn: the next
	// one has to wait for them.
	Settle time.Duration
}

// Timed makes the run of a contender that lives in this process out of a step.
func Timed(step func() error) func(int) (time.Duration, error) {
	return func(n int) (time.Duration, error) {
		began := time.Now()
		for range n {
			if err := step(); err != nil {
				return 0, err
			}
		}
		return time.Since(began), nil
	}
}

// turn returns the seconds of a step.
func (c *Contender) turn(steps int) (float64, error) {
	d, err := c.Run(steps)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.Name, err)
	}
	time.Sleep(c.Settle)
	// A clock that stood still would make a speed of infinity.
	return max(d.Seconds(), 1e-9) / float64(steps), nil
}

// fill returns how many steps fill a turn.
func (c *Contender) fill(turn time.Duration) (int, error) {
	const most = 1 << 24
	for n := 1; ; {
		s, err := c.turn(n)
		if err != nil {
			return 0, err
		}
		steps := turn.Seconds() / s
		if s*float64(n) >= turn.Seconds()/8 || n == most {
			return int(min(max(math.Round(steps), 1), most)), nil
		}
		// First steps take longer, so that there are more than it seems now.
		n = int(min(max(steps/4, float64(2*n)), most))
	}
}

// Pace is how often contenders take turns, and how long a turn is: steps, or if
// that is 0 as many steps as fill the time.
type Pace struct {
	Rounds int
	Turn   time.Duration
	Steps  int
	Warm   bool // with steps: the contenders need no turn that is not counted
}

// Samples are a contender's seconds a step, one number for each round.
type Samples []float64

// Alternate lets contenders take turns, A B C A B C ..., so that whatever
// changes the machine's speed meets all of them. Turns that are not counted come
// first.
func Alternate(p Pace, contenders []Contender) ([]Samples, error) {
	steps := make([]int, len(contenders))
	for i := range contenders {
		c, err := &contenders[i], error(nil)
		switch steps[i] = p.Steps; {
		case p.Steps == 0:
			steps[i], err = c.fill(p.Turn)
		case !p.Warm:
			_, err = c.turn(p.Steps)
		}
		if err != nil {
			return nil, err
		}
	}
	all := make([]Samples, len(contenders))
	for range p.Rounds {
		for i := range contenders {
			s, err := contenders[i].turn(steps[i])
			if err != nil {
				return nil, err
			}
			all[i] = append(all[i], s)
		}
	}
	return all, nil
}

func (s Samples) Best() float64 { return slices.Min(s) }

func (s Samples) Median() float64 { return Median(slices.Clone(s)) }

// Median sorts x, which is not empty.
func Median(x []float64) float64 {
	slices.Sort(x)
	n := len(x)
	return (x[(n-1)/2] + x[n/2]) / 2
}

// Faster is how many times as fast as other s is: the median over the rounds of
// the ratio of the two turns in it, which are neighbours.
func (s Samples) Faster(other Samples) float64 {
	ratios := make([]float64, len(s))
	for i := range s {
		ratios[i] = other[i] / s[i]
	}
	return Median(ratios)
}

// Allocations is the number of heap allocations of a step, rounded down as
// testing.AllocsPerRun does, after a step that may allocate what is kept.
func Allocations(c Contender, steps int) (float64, error) {
	if _, err := c.Run(1); err != nil {
		return 0, fmt.Errorf("%s: %w", c.Name, err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := c.Run(steps)
	runtime.ReadMemStats(&after)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.Name, err)
	}
	return float64((after.Mallocs - before.Mallocs) / uint64(steps)), nil
}
