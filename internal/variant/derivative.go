package variant

// deriver makes the derivatives of nodes by one node.
type deriver struct {
	*builder
	by    int
	done  map[int]int  // derivatives
	needs map[int]bool // whether a node depends on by
}

// derivative returns the node of the derivative of node i, a float, by a node.
func (b *builder) derivative(i, by int) int {
	return (&deriver{b, by, map[int]int{}, map[int]bool{}}).of(i)
}

func (d *deriver) depends(i int) bool {
	if i == d.by {
		return true
	}
	is, ok := d.needs[i]
	if ok {
		return is
	}
	for _, arg := range d.p.Nodes[i].Arguments(d.p) {
		is = is || d.depends(arg)
	}
	d.needs[i] = is
	return is
}

func (d *deriver) zero() int { return d.constant(0, Float, "0") }
func (d *deriver) one() int  { return d.constant(1, Float, "1") }

// of returns the derivative of node i.
func (d *deriver) of(i int) int {
	if y, ok := d.done[i]; ok {
		return y
	}
	y := d.slope(i)
	d.done[i] = y
	return y
}

func (d *deriver) slope(i int) int {
	if i == d.by {
		return d.one()
	}
	n := d.p.Nodes[i]
	if n.Kind != Float || d.err != nil || !d.depends(i) {
		return d.zero()
	}
	of := func(k int) int { return d.of(n.Args[k]) }
	x, y := n.Args[0], n.Args[1]
	switch n.Op {
	case Add:
		return d.sum(Add, of(0), of(1))
	case Subtract:
		return d.sum(Subtract, of(0), of(1))
	case Negate:
		return d.sum(Subtract, d.zero(), of(0))
	case Multiply:
		return d.sum(Add, d.product(of(0), y), d.product(x, of(1)))
	case Divide: // x'/y - (x/y) y'/y
		return d.sum(Subtract, d.quotient(of(0), y), d.quotient(d.product(i, of(1)), y))
	case Min:
		return d.where(d.fold(Node{Op: LessEqual, Kind: Bool, Args: [4]int{x, y}}), of(0), of(1))
	case Max:
		return d.where(d.fold(Node{Op: LessEqual, Kind: Bool, Args: [4]int{y, x}}), of(0), of(1))
	case Abs:
		down := d.sum(Subtract, d.zero(), of(0))
		return d.where(d.fold(Node{Op: LessEqual, Kind: Bool, Args: [4]int{d.zero(), x}}), of(0), down)
	case Exp:
		return d.product(i, of(0))
	case Log:
		return d.quotient(of(0), x)
	case Sqrt:
		return d.quotient(d.product(d.constant(0.5, Float, "0.5"), of(0)), i)
	case Tanh:
		return d.product(d.sum(Subtract, d.one(), d.product(i, i)), of(0))
	case Sigmoid:
		return d.product(d.product(i, d.sum(Subtract, d.one(), i)), of(0))
	case Softplus:
		return d.product(d.fold(Node{Op: Sigmoid, Kind: Float, Args: [4]int{x}}), of(0))
	case Where:
		return d.where(x, of(1), of(2))
	}
	return d.zero()
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
