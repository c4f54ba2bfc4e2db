package variant

import (
	"math"
	"testing"
)

// Of finite scores, functions with a range have bounds.
func TestFinite(t *testing.T) {
	for _, x := range []struct {
		score string
		slope bool
		most  float64
	}{{"30*tanh(score/30)", false, 30}, {"30*tanh(score/30)", true, 2}, {"-softplus(-(score - 4.5))", false, 0}, {"-softplus(-score)", true, 1}, {"score*2", true, 2}} {
		p, err := New(Source{Score: x.score})
		if err != nil {
			t.Fatal(err)
		}
		node := p.Score
		if x.slope {
			node = p.Slope
		}
		scratch := make([]Interval, len(p.Nodes))
		if r := p.Range(node, &Bounds{Finite: true}, scratch); !(r.Hi <= x.most+1e-3*math.Abs(x.most)+1e-6) {
			t.Errorf("%s, slope %t: at most %v, want %v", x.score, x.slope, r.Hi, x.most)
		}
		if r := p.Range(p.Score, &Bounds{}, scratch); !math.IsInf(r.Hi, 1) {
			t.Errorf("%s of any score: at most %v", x.score, r.Hi)
		}
	}
}
