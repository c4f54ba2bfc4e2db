package sample

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// leastWeight is the minimum probability of a candidate, relative to the probability of the most likely token.
const leastWeight = 0x1p-44

// candidate is a token that no step has removed.
type candidate struct {
	id     int32
	key    float32 // sort key, in descending order
	weight float64 // probability relative to the most likely token
}

type candidates []candidate

// before reports whether a comes before b. Among equal keys, the lower id comes first.
func (a candidate) before(b candidate) bool {
	return a.key > b.key || a.key == b.key && a.id < b.id
}

// weights computes probabilities relative to the most likely token. The most likely token has weight 1, so sums neither overflow
// nor underflow at any temperature.
type weights struct {
	most, scale float64
}

func newWeights(most float32, temperature float64) weights {
	return weights{float64(most), min(math.Log2E/temperature, math.MaxFloat64)}
}

// powers[i] is the bit pattern of 2^(i/powerSteps).
var powers = func() (bits [powerSteps]uint64) {
	for i := range bits {
		bits[i] = math.Float64bits(math.Exp2(float64(i) / powerSteps))
	}
	return bits
}()

// powerSteps is the number of powers. With 1024 of them the error of a series of degree 3 is below 1e-15, and the table of 8 KB fits in the
// first-level cache.
const (
	powerBits  = 10
	powerSteps = 1 << powerBits
)

// of returns exp((x-most)/temperature) with a relative error below 1e-12, or 0 below 2^-1000. of is faster than math.Exp. The
// exponent of 2 is n/powerSteps + r/ln 2: the table powers gives the factor 2^(n/powerSteps), and a series gives the factor exp(r).
func (w weights) of(x float32) float64 {
	y := (float64(x) - w.most) * w.scale
	if !(y >= -1000) {
		return 0
	}
	n := int(y*powerSteps - 0.5)
	r := (y - float64(n)*(1.0/powerSteps)) * math.Ln2
	return math.Float64frombits(powers[n&(powerSteps-1)]+uint64(n>>powerBits)<<52) * (1 + r*(1+r*(1.0/2+r*(1.0/6))))
}

// sum returns the sum of the weights of at least leastWeight, added in the order of ids.
func (w weights) sum(logits []float32) float64 { return w.add(0, logits) }

// add returns total plus the sum of the weights of at least leastWeight, added in the order of ids.
func (w weights) add(total float64, logits []float32) float64 {
	for _, x := range logits {
		if y := w.of(x); y >= leastWeight {
			total += y
		}
	}
	return total
}

// pick returns the first token, in the order of ids, at which sum and the weights exceed x. ok is false if no token is: then id is the last
// token with a weight.
func (w weights) pick(sum float64, logits []float32, x float64) (id int, ok bool) {
	for i, logit := range logits {
		if y := w.of(logit); y >= leastWeight {
			id = i
			if sum += y; sum > x {
				return id, true
			}
		}
	}
	return id, false
}

// drawPart is the number of logits between two sums that draw remembers.
const drawPart = 512

// draw returns the first token, in the order of ids, at which the sum of weights exceeds u times the sum of all, 0 <= u < 1.
func (m *memory) draw(w weights, logits []float32, u float64) int {
	m.sums = m.sums[:0]
	total := 0.0
	for at := 0; at < len(logits); at += drawPart {
		m.sums = append(m.sums, total)
		total = w.add(total, logits[at:min(at+drawPart, len(logits))])
	}
	x, i := total*u, 0
	for i+1 < len(m.sums) && m.sums[i+1] <= x {
		i++
	}
	id, ok := w.pick(m.sums[i], logits[i*drawPart:min((i+1)*drawPart, len(logits))], x)
	if !ok { // rounding leaves the sum of all <= x
		id, _ = w.pick(0, logits, x)
		return id
	}
	return i*drawPart + id
}

// floor returns a logit that is lower than every logit with at least the given weight.
func (w weights) floor(weight float64) float32 {
	x := w.most + math.Log2(weight)/w.scale
	return math.Nextafter32(float32(x-1e-6*math.Abs(w.most)-1e-6*math.Abs(x)-1e-30), float32(math.Inf(-1)))
}

// restricted reports whether TopK, TopP, MinP or TypicalP can remove one of n tokens.
func (c *Config) restricted(n int) bool {
	return c.TopK > 0 && c.TopK < n || c.TopP > 0 && c.TopP < 1 || c.MinP > 0 || c.TypicalP > 0 && c.TypicalP < 1
}

// restrict sets m.candidates to the tokens that TopK, TopP, MinP and TypicalP keep, with weights, in the order of ids. restrict
// returns the sum of the weights.
func (m *memory) restrict(c *Config, logits []float32, w weights) (total float64) {
	topK, topP := c.TopK > 0 && c.TopK < len(logits), c.TopP > 0 && c.TopP < 1
	least := leastWeight
	switch {
	case !topP:
		least = max(least, c.MinP)
	case !topK:
		// The total probability of all tokens below this weight is at most half of 1-TopP. TopP would remove these tokens, so
		// collect skips them.
		total = w.sum(logits)
		least = max(least, (1-c.TopP)*total/float64(2*len(logits)))
	}
	m.collect(logits, w.floor(least), c.TopK)
	collected := m.weigh(w, least)
	if topP {
		if topK {
			total = collected
		}
		_, total = m.keep(math.MaxInt, c.TopP*total)
		if c.MinP > 0 {
			total = m.atLeast(c.MinP)
		}
	} else {
		total = collected
	}
	if c.TypicalP > 0 && c.TypicalP < 1 {
		m.typical(w, total)
		_, total = m.keep(math.MaxInt, c.TypicalP*total)
	}
	return total
}

// pick returns the first candidate, in the order of ids, at which the sum of weights exceeds x. In the order of ids, a small
// change of the logits seldom changes the choice.
func (m *memory) pick(x float64) int {
	sum := 0.0
	for _, c := range m.candidates {
		if sum += c.weight; sum > x {
			return int(c.id)
		}
	}
	return int(m.candidates[len(m.candidates)-1].id) // rounding left sum <= x
}

// collect sets m.candidates to the tokens with a logit above floor, in the order of ids. The keys are the logits. With k > 0,
// collect keeps the first k candidates by key.
func (m *memory) collect(logits []float32, floor float32, k int) {
	if k <= 0 || k >= len(logits) {
		k = len(logits)
	}
	// The loop collects about 2*k candidates before keep drops all but k candidates. The linear cost of a drop is so spread
	// over at least k collected candidates.
	room := 2*k + 64
	all := m.candidates[:0]
	for i, x := range logits {
		if x <= floor {
			continue
		}
		if all = append(all, candidate{id: int32(i), key: x}); len(all) == room {
			m.candidates = all
			last, _ := m.keep(k, math.Inf(1))
			floor = last.key // a later token with an equal logit has a higher id
			all = m.candidates
		}
	}
	if m.candidates = all; len(all) > k {
		m.keep(k, math.Inf(1))
	}
}

// keep keeps the shortest prefix of the sorted candidates with k candidates or with a weight sum of at least enough. keep
// returns the last kept candidate and the sum of the kept weights. The order of the kept candidates does not change.
func (m *memory) keep(k int, enough float64) (last candidate, total float64) {
	m.ranks = append(m.ranks[:0], m.candidates...)
	last = m.ranks.last(k, enough)
	kept := m.candidates[:0]
	for _, c := range m.candidates {
		if !last.before(c) {
			kept = append(kept, c)
			total += c.weight
		}
	}
	m.candidates = kept
	return last, total
}

// weigh computes the weights of the candidates and drops candidates with a weight below least. weigh returns the sum of the
// kept weights. The keys of the candidates must be logits.
func (m *memory) weigh(w weights, least float64) (total float64) {
	kept := m.candidates[:0]
	for _, c := range m.candidates {
		if c.weight = w.of(c.key); c.weight >= least {
			kept = append(kept, c)
			total += c.weight
		}
	}
	m.candidates = kept
	return total
}

// atLeast keeps the candidates with a weight of at least least, and returns the sum of the kept weights.
func (m *memory) atLeast(least float64) (total float64) {
	kept := m.candidates[:0]
	for _, c := range m.candidates {
		if c.weight >= least {
			kept = append(kept, c)
			total += c.weight
		}
	}
	m.candidates = kept
	return total
}

// typical replaces the keys of the candidates so that the most typical candidate comes first. Before the call, the keys must be
// logits. total is the sum of the weights.
//
// -log p[i] - entropy is E[log p] - log p[i], where E is the mean over p. The normalization constant of log p cancels, so typical
// uses the logarithms of the weights.
func (m *memory) typical(w weights, total float64) {
	mean := 0.0
	for _, c := range m.candidates {
		mean += c.weight / total * (float64(c.key) - w.most) * w.scale
	}
	for i, c := range m.candidates {
		m.candidates[i].key = float32(-math.Abs((float64(c.key)-w.most)*w.scale - mean))
	}
}

// last returns the last candidate of the shortest prefix of the sorted c with k candidates or with a weight sum of at least
// enough. If there is no such prefix, last returns the last candidate in the order. last reorders c.
//
// The algorithm is quickselect. A round about halves the remaining candidates. After too many rounds, last sorts the rest.
func (c candidates) last(k int, enough float64) candidate {
	for rounds := 2 * bits.Len(uint(len(c))); len(c) > 16; rounds-- {
		if rounds == 0 {
			break
		}
		pivot := c.median()
		at := 0 // c[:at] are the candidates before the pivot
		sum := 0.0
		for i, x := range c {
			if x.before(pivot) {
				c[i], c[at] = c[at], x
				at++
				sum += x.weight
			}
		}
		switch {
		case at >= k || sum >= enough && at > 0:
			c = c[:at]
		case at+1 == k || sum+pivot.weight >= enough || at+1 == len(c):
			return pivot
		default: // the rest includes the pivot as its first candidate in the order, since no two candidates are equal
			c, k, enough = c[at:], k-at, enough-sum
		}
	}
	slices.SortFunc(c, func(a, b candidate) int { return cmp.Or(cmp.Compare(b.key, a.key), cmp.Compare(a.id, b.id)) })
	for i, x := range c {
		if enough -= x.weight; i+1 >= k || enough <= 0 {
			return x
		}
	}
	return c[len(c)-1]
}

// median returns the median of three medians, each of three candidates.
func (c candidates) median() candidate {
	step := len(c) / 9
	var of [3]candidate
	for i := range of {
		of[i] = middle(c[3*i*step], c[(3*i+1)*step], c[(3*i+2)*step])
	}
	return middle(of[0], of[1], of[2])
}

func middle(a, b, c candidate) candidate {
	if b.before(a) {
		a, b = b, a
	}
	switch {
	case c.before(a):
		return a
	case c.before(b):
		return c
	}
	return b
}
