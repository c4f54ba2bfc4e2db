package reftest

import (
	"fmt"
	"math"
)

// Compare checks that |got - want| <= bound for every element. A NaN always fails. An infinity passes if want
// is the same infinity. The error reports the number of wrong elements, and the element that exceeds its
// bound by the largest factor, with its indexes in a row-major array of the given shape.
func Compare[T ~float32 | ~float64](got []T, want, bound []float64, shape ...int) error {
	if len(got) != len(want) || len(want) != len(bound) {
		return fmt.Errorf("%d elements, want %d with %d bounds", len(got), len(want), len(bound))
	}
	var c comparison
	for i := range want {
		c.see(float64(got[i]), want[i], bound[i], i)
	}
	return c.err(shape)
}

// CompareO checks an output in any layout. got returns element i of the output for a query position of a
// sequence in a head. Indexes in the error are (query row, head, i).
func (r *Result) CompareO(got func(seq, pos, head, i int) float64) error {
	var c comparison
	at := 0
	for s, queries := range r.Queries {
		for pos := range queries {
			for h := range r.Heads {
				for i := range r.ValueDim {
					c.see(got(s, pos, h, i), r.O[at], r.OBound[at], at)
					at++
				}
			}
		}
	}
	return c.err([]int{r.QueryRows(), r.Heads, r.ValueDim})
}

// CompareLSE is CompareO for the log-sum-exp.
func (r *Result) CompareLSE(got func(seq, pos, head int) float64) error {
	var c comparison
	at := 0
	for s, queries := range r.Queries {
		for pos := range queries {
			for h := range r.Heads {
				c.see(got(s, pos, h), r.LSE[at], r.LSEBound[at], at)
				at++
			}
		}
	}
	return c.err([]int{r.QueryRows(), r.Heads})
}

// comparison accumulates the errors.
type comparison struct {
	n, bad           int
	at               int
	got, want, bound float64
	factor           float64
}

func (c *comparison) see(got, want, bound float64, at int) {
	c.n++
	d := math.Abs(got - want)
	if got == want || d <= bound { // the difference of equal infinities is NaN
		return
	}
	factor := d / bound
	if math.IsNaN(d) {
		factor = math.Inf(1)
	}
	if c.bad == 0 || factor > c.factor {
		c.at, c.got, c.want, c.bound, c.factor = at, got, want, bound, factor
	}
	c.bad++
}

func (c *comparison) err(shape []int) error {
	if c.bad == 0 {
		return nil
	}
	index := make([]int, len(shape))
	at := c.at
	for i := len(shape) - 1; i >= 0; i-- {
		index[i] = at % shape[i]
		at /= shape[i]
	}
	return fmt.Errorf("%d of %d elements are off; worst at %v of %v: got %v, want %v, off by %.3g where %.3g is allowed (%.3g times)",
		c.bad, c.n, index, shape, c.got, c.want, math.Abs(c.got-c.want), c.bound, c.factor)
}
