package leanattention

import (
	"math"
	"strings"

	G "gorgonia.org/gorgonia"
)

// Default cannot have constants, which Gorgonia confuses, so its inputs say by
// their names what they are.
const (
	defaultScaleName = "leanattention.scale("
	defaultMaskName  = "leanattention.causal("
)

func madeByDefault(n *G.Node) bool {
	name := nameOf(n)
	return strings.HasPrefix(name, defaultScaleName) || strings.HasPrefix(name, defaultMaskName)
}

// hidden is the largest number that a mask may add to the score of a key that
// is not seen. In float32 exp(-104) is 0, so -10000 is -Inf unless a row's
// scores are some 9900 apart.
const hidden = -1e4

// causalQueries is the number of queries for which an additive mask, in rows of
// one number for each key, is causal: row i is query i modulo queries, and sees
// the keys j <= keys-queries+i, one at least. It is 1 for a mask that hides nothing, and 0
// for one that is not causal.
func causalQueries(mask []float64, keys int) (queries int) {
	rows := len(mask) / keys
	for i := range rows {
		if seen(mask[i*keys:(i+1)*keys]) == keys {
			queries = i + 1 // the last query of a head is the first to see all
			break
		}
	}
	if queries == 0 || queries > keys || rows%queries != 0 {
		return 0
	}
	for i := range rows {
		if seen(mask[i*keys:(i+1)*keys]) != keys-queries+i%queries+1 {
			return 0
		}
	}
	return queries
}

// seen is how many keys a row of a mask shows, if those are its first and the
// others are hidden; else it is -1.
func seen(row []float64) int {
	n := 0
	for n < len(row) && row[n] == 0 {
		n++
	}
	for _, x := range row[n:] {
		if !(x <= hidden) {
			return -1
		}
	}
	return n
}

// sumOfMasks adds y, scaled, to x. Both are blocks, of which a whole number makes
// the mask; an x that is nil is of zeros. Something added that is more than 0 is
// no mask, even if another one takes it away again: it costs the scores digits.
func sumOfMasks(x, y []float64, scale float64) []float64 {
	a, b := max(len(x), 1), len(y)
	for b != 0 {
		a, b = b, a%b
	}
	sum := make([]float64, max(len(x), 1)/a*len(y)) // as long as fits both
	for i := range sum {
		if len(x) > 0 {
			sum[i] = x[i%len(x)]
		}
		if add := y[i%len(y)]; add == 0 {
			continue
		} else if add *= scale; add <= 0 {
			sum[i] += add
		} else {
			sum[i] = math.NaN()
		}
	}
	return sum
}
