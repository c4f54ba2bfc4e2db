package variant

import "math"

// Op is the operation of a node.
type Op uint8

const (
	Constant Op = iota
	Score
	Query // position of the query among the keys
	Key
	Head
	Sequence
	Element  // of a tensor: the arguments are indices
	ToFloat  // of an int
	ToInt    // of a float, rounded down, between -2^31 and 2^31-1; NaN becomes 0
	Add      // of floats or of ints, as all from here to Max
	Subtract // a - b
	Multiply
	Min
	Max
	Divide    // of floats
	Quotient  // of ints, rounded down; the divisor is above 0
	Remainder // of ints, from 0 on; the divisor is above 0
	Negate
	Abs
	Exp
	Log
	Sqrt
	Tanh
	Sigmoid
	Softplus // log(1 + exp(x))
	Less     // of floats or of ints, as all from here to Equal
	LessEqual
	Equal
	And
	Or
	Not
	Where // the second argument if the first is true, else the third
)

// unary and binary functions have names in expressions, and so has where.
var functions = map[string]struct {
	op        Op
	arguments int
}{
	"float": {ToFloat, 1}, "floor": {ToInt, 1}, "abs": {Abs, 1}, "exp": {Exp, 1}, "log": {Log, 1}, "sqrt": {Sqrt, 1},
	"tanh": {Tanh, 1}, "sigmoid": {Sigmoid, 1}, "softplus": {Softplus, 1},
	"min": {Min, 2}, "max": {Max, 2}, "div": {Quotient, 2}, "where": {Where, 3},
}

// Node is an operation on earlier nodes.
type Node struct {
	Op     Op
	Kind   Kind
	Args   [4]int // those that Op has; of an Element its indices
	Value  float64
	Tensor int // of an Element

	// Param is not empty for a Constant that follows from parameters.
	Param string

	// Needs says what the value depends on.
	Needs Needs

	text string // in the expression, for errors
}

// Needs is a set of variables.
type Needs uint8

const (
	NeedsScore Needs = 1 << iota
	NeedsQuery
	NeedsKey
	NeedsHead
	NeedsSequence
)

// Arguments returns the indices of the node's arguments. Of an Element of a tensor of rank r these are r.
func (n *Node) Arguments(p *Program) []int {
	switch n.Op {
	case Constant, Score, Query, Key, Head, Sequence:
		return nil
	case Element:
		return n.Args[:p.Tensors[n.Tensor].Rank]
	case Add, Subtract, Multiply, Min, Max, Divide, Quotient, Remainder, Less, LessEqual, Equal, And, Or:
		return n.Args[:2]
	case Where:
		return n.Args[:3]
	}
	return n.Args[:1]
}

// At is a pair of a query and a key.
type At struct {
	Score                      float64
	Query, Key, Head, Sequence int
	Tensors                    []Tensor
}

// Values computes the values of all nodes, in float64. Ints and bools are exact. values has len(p.Nodes) elements.
func (p *Program) Values(at *At, values []float64) {
	for i := range p.Nodes {
		n := &p.Nodes[i]
		var x [4]float64
		for k, arg := range n.Arguments(p) {
			x[k] = values[arg]
		}
		switch n.Op {
		case Score:
			values[i] = at.Score
		case Query:
			values[i] = float64(at.Query)
		case Key:
			values[i] = float64(at.Key)
		case Head:
			values[i] = float64(at.Head)
		case Sequence:
			values[i] = float64(at.Sequence)
		case Element:
			t, k := &at.Tensors[n.Tensor], 0
			for axis := range p.Tensors[n.Tensor].Rank {
				k = k*t.Shape[axis] + int(x[axis])
			}
			values[i] = t.At(k)
		default:
			values[i] = n.Of(x[0], x[1], x[2])
		}
	}
}

// ScoreAt returns the changed score, in float64.
func (p *Program) ScoreAt(at *At) float64 { return p.at(p.Score, at) }

// SlopeAt returns the derivative of the changed score by the score.
func (p *Program) SlopeAt(at *At) float64 { return p.at(p.Slope, at) }

// SeesAt reports whether the query sees the key.
func (p *Program) SeesAt(at *At) bool { return p.Visible < 0 || p.at(p.Visible, at) != 0 }

func (p *Program) at(i int, at *At) float64 {
	values := make([]float64, len(p.Nodes))
	p.Values(at, values)
	return values[i]
}

// Of returns the value of an operation without variables and elements, for its arguments. Ints and bools are exact in float64.
func (n *Node) Of(a, b, c float64) float64 {
	truth := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	var y float64
	switch n.Op {
	case Constant:
		return n.Value
	case ToFloat:
		return a
	case ToInt:
		return Floor(a)
	case Add:
		y = a + b
	case Subtract:
		y = a - b
	case Multiply:
		if n.Kind == Int {
			return float64(int32(int64(a) * int64(b)))
		}
		y = a * b
	case Min:
		return min(a, b)
	case Max:
		return max(a, b)
	case Divide:
		return a / b
	case Quotient:
		return math.Floor(a / b)
	case Remainder:
		return a - b*math.Floor(a/b)
	case Negate:
		y = -a
	case Abs:
		y = math.Abs(a)
	case Exp:
		return math.Exp(a)
	case Log:
		return math.Log(a)
	case Sqrt:
		return math.Sqrt(a)
	case Tanh:
		return math.Tanh(a)
	case Sigmoid:
		return 1 / (1 + math.Exp(-a))
	case Softplus:
		return max(a, 0) + math.Log1p(math.Exp(-math.Abs(a)))
	case Less:
		return truth(a < b)
	case LessEqual:
		return truth(a <= b)
	case Equal:
		return truth(a == b)
	case And:
		return truth(a != 0 && b != 0)
	case Or:
		return truth(a != 0 || b != 0)
	case Not:
		return truth(a == 0)
	case Where:
		if a != 0 {
			return b
		}
		return c
	}
	if n.Kind == Int {
		return float64(int32(int64(y)))
	}
	return y
}

// Floor returns x rounded down to an int of 32 bits: the nearest one if there is none, and 0 for NaN.
func Floor(x float64) float64 {
	if x != x {
		return 0
	}
	return min(max(math.Floor(x), math.MinInt32), math.MaxInt32)
}
