package measure

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"
)

// Contender is one of the programs that a measurement compares.
type Contender struct {
	Name string
	// Run runs n steps and returns their total time.
	Run func(n int) (time.Duration, error)
	// Settle is the pause after each run. The pause is longer than the time for which the contender's idle threads
	// spin, so that spinning threads do not slow the next contender.
	Settle time.Duration
}

// Timed returns the Run of a contender that executes step in this process.
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

// turn runs the given number of steps and returns the seconds per step.
func (c *Contender) turn(steps int) (float64, error) {
	d, err := c.Run(steps)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.Name, err)
	}
	time.Sleep(c.Settle)
	// The lower bound avoids an infinite speed if the clock did not advance.
	return max(d.Seconds(), 1e-9) / float64(steps), nil
}

// fill returns the number of steps that last about as long as turn.
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
		// The first steps are slow, so steps is an underestimate. The next try runs a quarter of steps, and
		// at least twice n.
		n = int(min(max(steps/4, float64(2*n)), most))
	}
}

// Pace is the number of rounds and the length of a turn. A turn has Steps steps or, if Steps is 0, as many
// steps as last Turn.
type Pace struct {
	Rounds int
	Turn   time.Duration
	Steps  int
	Warm   bool // with Steps: the contenders need no warm-up
}

// Samples are the seconds per step of a contender, one value per round.
type Samples []float64

// Alternate runs the contenders in the order A B C A B C ..., so that changes of the machine's speed affect
// all of them. Warm-up runs that do not count come first.
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

// Median returns the median of x and sorts x. x must not be empty.
func Median(x []float64) float64 {
	slices.Sort(x)
	n := len(x)
	return (x[(n-1)/2] + x[n/2]) / 2
}

// Faster returns the speedup of s over other: the median of the ratios of the two turns of each round.
func (s Samples) Faster(other Samples) float64 {
	ratios := make([]float64, len(s))
	for i := range s {
		ratios[i] = other[i] / s[i]
	}
	return Median(ratios)
}

// Allocations returns the heap allocations per step, rounded down as testing.AllocsPerRun does. A first step
// does not count, because it may allocate buffers that later steps reuse.
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
