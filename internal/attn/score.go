package attn

import (
	"encoding/binary"
	"fmt"
	"math"

	"gorgonia.org/leanattention/internal/variant"
)

// Score says what happens to scores between the product and the softmax, and to the weights behind it. The zero Score is
// nothing.
//
// A score s of query head h at position p with key j becomes, in this order,
//
//	s = Cap tanh(s/Cap)
//	s = s + Slopes.Of(h) (j-p)
//	s = s + bias(h, p, j)
//	s = Variant(s, h, p, j)
//
// A weight, which is exp(s) by their sum, is 0 with the probability Dropout, and otherwise divided by 1-Dropout: which ones
// are 0 says package dropout, by the seed of the run. The sum is that of all, dropped or not.
//
// With Sinks an operand has a number for each query head, its attention sink: one score more in the softmax of all of
// the head's rows, which has no value. None of the above changes it, nor does the scale. With z the sink of the head,
//
//	weight of key j = e^(s_j) / (e^z + sum_i e^(s_i))
//	log-sum-exp     = ln (e^z + sum_i e^(s_i))
//
// so a row that sees no key has the output 0 and the log-sum-exp z. A sink of -Inf is none.
type Score struct {
	Cap    float64 // soft cap, if not 0
	Slopes Slopes  // of ALiBi, if not empty
	Bias   Bias    // where the numbers of an operand are, if not zero
	Sinks  bool    // query heads have sinks

	// Variant changes scores and hides keys after all else; nil: none. Its position of a query is the one among the keys. If the
	// Variant is unnormalised, weights are not divided by their sum.
	Variant *variant.Program

	Dropout float64 // in [0, 1)
}

// The features of a Score, one for each field.
const (
	Cap Feature = firstOfScore << iota
	SlopesOfHeads
	AddedBias
	Sinks // query heads have attention sinks
	Dropout
	Varied // a variant
	behindScore
)

// take makes all fields of s zero that it knows, and returns the features that they were.
func (s *Score) take() (f Feature) {
	for i, was := range [...]bool{taken(&s.Cap), taken(&s.Slopes), taken(&s.Bias), taken(&s.Sinks), taken(&s.Dropout), taken(&s.Variant)} {
		if was {
			f |= firstOfScore << i
		}
	}
	return f
}

// text tells what s has of a feature.
func (s *Score) text(f Feature) string {
	switch f {
	case Cap:
		return fmt.Sprintf("a soft cap of %v", s.Cap)
	case SlopesOfHeads:
		return "slopes of scores (ALiBi)"
	case AddedBias:
		return "a bias"
	case Sinks:
		return "attention sinks"
	case Varied:
		return "a variant"
	}
	return fmt.Sprintf("a dropout of %v", s.Dropout)
}

// Check reports what is wrong with s for so many query heads.
func (s *Score) Check(op string, heads int) error {
	if !(s.Cap >= 0) || math.IsInf(s.Cap, 0) {
		return Errorf(op, ErrShape, "a soft cap of %v", s.Cap)
	}
	if !(s.Dropout >= 0 && s.Dropout < 1) {
		return Errorf(op, ErrShape, "a dropout of %v", s.Dropout)
	}
	if err := s.Slopes.check(op, heads); err != nil {
		return err
	}
	return s.Bias.check(op, heads)
}

// Slopes are numbers, one for each query head, in a form that == compares: a Problem is looked up by it.
type Slopes string

// NewSlopes returns x as Slopes.
func NewSlopes(x []float64) Slopes {
	b := make([]byte, 0, 8*len(x))
	for _, f := range x {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(f))
	}
	return Slopes(b)
}

// String returns all slopes as text.
func (s Slopes) String() string {
	all := make([]float64, s.Len())
	for head := range all {
		all[head] = s.Of(head)
	}
	return fmt.Sprint(all)
}

// Len returns how many there are.
func (s Slopes) Len() int { return len(s) / 8 }

// Part returns n of the slopes, from one on.
func (s Slopes) Part(from, n int) Slopes { return s[8*from : 8*(from+n)] }

// Of returns the slope of a query head.
func (s Slopes) Of(head int) float64 {
	var bits uint64
	for i := range 8 {
		bits |= uint64(s[8*head+i]) << (8 * i)
	}
	return math.Float64frombits(bits)
}

// check reports slopes that are not finite, or not one for each head, if there are any.
func (s Slopes) check(op string, heads int) error {
	if s == "" {
		return nil
	}
	if len(s) != 8*heads {
		return Errorf(op, ErrShape, "%d slopes for %d query heads", s.Len(), heads)
	}
	for h := range heads {
		if x := s.Of(h); math.IsNaN(x) || math.IsInf(x, 0) {
			return Errorf(op, ErrShape, "the slope of head %d is %v", h, x)
		}
	}
	return nil
}

// Bias places numbers that are added to scores: row-major, of shape (Sequences, Heads, Queries, Keys), where each of the
// first three sizes is that of the attention, or 1 for numbers that all share. The zero Bias is none.
type Bias struct {
	Sequences, Heads, Queries, Keys int
	Scale                           float64 // on the numbers; 0: 1
}

// Factor returns the factor on the numbers.
func (b *Bias) Factor() float64 {
	if b.Scale == 0 {
		return 1
	}
	return b.Scale
}

// Row returns where the numbers of a query position begin.
func (b *Bias) Row(seq, head, pos int) int {
	if b.Sequences == 1 {
		seq = 0
	}
	if b.Heads == 1 {
		head = 0
	}
	if b.Queries == 1 {
		pos = 0
	}
	return ((seq*b.Heads+head)*b.Queries + pos) * b.Keys
}

// Size returns how many numbers there are, MaxInt if that is no int.
func (b *Bias) Size() int { return Product(b.Sequences, b.Heads, b.Queries, b.Keys) }

// check reports a bias that is not of an attention with so many heads.
func (b *Bias) check(op string, heads int) error {
	if *b == (Bias{}) {
		return nil
	}
	if b.Sequences < 1 || b.Heads != 1 && b.Heads != heads || b.Queries < 1 || b.Keys < 1 {
		return Errorf(op, ErrShape, "a bias of %d sequences, %d heads, %d queries, %d keys for %d query heads",
			b.Sequences, b.Heads, b.Queries, b.Keys, heads)
	}
	if math.IsNaN(b.Scale) || math.IsInf(b.Scale, 0) {
		return Errorf(op, ErrShape, "a bias with the factor %v", b.Scale)
	}
	return nil
}

// Covers reports whether there are numbers for a sequence's queries and keys. A sequence without keys needs none.
func (b *Bias) Covers(seq, queries, keys int) bool {
	return *b == (Bias{}) || keys == 0 || (b.Sequences == 1 || seq < b.Sequences) && (b.Queries == 1 || queries <= b.Queries) && keys <= b.Keys
}
