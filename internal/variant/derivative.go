package variant

// derivative returns the node of the derivative of node i, a float, by the score. done has those that are known.
func (b *builder) derivative(i int, done map[int]int) int {
	if d, ok := done[i]; ok {
		return d
	}
	d := b.slope(i, done)
	done[i] = d
	return d
}

func (b *builder) slope(i int, done map[int]int) int {
	n := b.p.Nodes[i]
	if n.Needs&NeedsScore == 0 || n.Kind != Float || b.err != nil {
		return b.constant(0, Float, "0")
	}
	of := func(k int) int { return b.derivative(n.Args[k], done) }
	one := func() int { return b.constant(1, Float, "1") }
	x, y := n.Args[0], n.Args[1]
	switch n.Op {
	case Score:
		return one()
	case Add:
		return b.sum(Add, of(0), of(1))
	case Subtract:
		return b.sum(Subtract, of(0), of(1))
	case Negate:
		return b.sum(Subtract, b.constant(0, Float, "0"), of(0))
	case Multiply:
		return b.sum(Add, b.product(of(0), y), b.product(x, of(1)))
	case Divide: // x'/y - (x/y) y'/y
		return b.sum(Subtract, b.quotient(of(0), y), b.quotient(b.product(i, of(1)), y))
	case Min:
		return b.where(b.fold(Node{Op: LessEqual, Kind: Bool, Args: [4]int{x, y}}), of(0), of(1))
	case Max:
		return b.where(b.fold(Node{Op: LessEqual, Kind: Bool, Args: [4]int{y, x}}), of(0), of(1))
	case Abs:
		down := b.sum(Subtract, b.constant(0, Float, "0"), of(0))
		return b.where(b.fold(Node{Op: LessEqual, Kind: Bool, Args: [4]int{b.constant(0, Float, "0"), x}}), of(0), down)
	case Exp:
		return b.product(i, of(0))
	case Log:
		return b.quotient(of(0), x)
	case Sqrt:
		return b.quotient(b.product(b.constant(0.5, Float, "0.5"), of(0)), i)
	case Tanh:
		return b.product(b.sum(Subtract, one(), b.product(i, i)), of(0))
	case Sigmoid:
		return b.product(b.product(i, b.sum(Subtract, one(), i)), of(0))
	case Softplus:
		return b.product(b.fold(Node{Op: Sigmoid, Kind: Float, Args: [4]int{x}}), of(0))
	case Where:
		return b.where(x, b.derivative(n.Args[1], done), b.derivative(n.Args[2], done))
	}
	return b.constant(0, Float, "0")
}

// is reports whether node i is a constant.
func (b *builder) is(i int, x float64) bool {
	n := &b.p.Nodes[i]
	return n.Op == Constant && n.Value == x
}

// sum returns the sum or the difference of floats.
func (b *builder) sum(op Op, x, y int) int {
	switch {
	case b.is(y, 0):
		return x
	case b.is(x, 0) && op == Add:
		return y
	case b.is(x, 0):
		return b.fold(Node{Op: Negate, Kind: Float, Args: [4]int{y}})
	}
	return b.fold(Node{Op: op, Kind: Float, Args: [4]int{x, y}})
}

func (b *builder) product(x, y int) int {
	switch {
	case b.is(x, 0), b.is(y, 1):
		return x
	case b.is(y, 0), b.is(x, 1):
		return y
	}
	return b.fold(Node{Op: Multiply, Kind: Float, Args: [4]int{x, y}})
}

func (b *builder) quotient(x, y int) int {
	if b.is(x, 0) || b.is(y, 1) {
		return x
	}
	return b.fold(Node{Op: Divide, Kind: Float, Args: [4]int{x, y}})
}

func (b *builder) where(c, x, y int) int {
	if x == y {
		return x
	}
	return b.fold(Node{Op: Where, Kind: Float, Args: [4]int{c, x, y}})
}
