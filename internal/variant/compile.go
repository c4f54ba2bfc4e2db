package variant

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"strconv"
)

// builder makes the nodes of a Program. Equal nodes are one.
type builder struct {
	p      *Program
	params map[string]float64
	names  map[string]int // index of a tensor
	same   map[Node]int

	text  string // of the expression
	what  string // "Score" or "Visible"
	most  int    // nodes
	depth int
	err   error
}

var variables = map[string]struct {
	op    Op
	kind  Kind
	needs Needs
}{
	"score": {Score, Float, NeedsScore}, "query": {Query, Int, NeedsQuery}, "key": {Key, Int, NeedsKey},
	"head": {Head, Int, NeedsHead}, "sequence": {Sequence, Int, NeedsSequence},
}

const infinity = "inf"

// compile makes a Program.
func compile(s *Source) (*Program, error) {
	b := &builder{p: &Program{Tensors: s.Tensors, Visible: -1, Unnormalised: s.Unnormalised}, params: s.Params, names: map[string]int{}, same: map[Node]int{}, most: maxNodes}
	if len(s.Tensors) > MaxTensors {
		return nil, fmt.Errorf("%d tensors; %d are the most", len(s.Tensors), MaxTensors)
	}
	used := map[string]bool{}
	for i, t := range s.Tensors {
		if err := b.name("tensor", t.Name, used); err != nil {
			return nil, err
		}
		if t.Rank < 1 || t.Rank > maxRank {
			return nil, fmt.Errorf("tensor %s has %d axes; 1 to %d are possible", t.Name, t.Rank, maxRank)
		}
		b.names[t.Name] = i
	}
	for name, x := range s.Params {
		if err := b.name("parameter", name, used); err != nil {
			return nil, err
		}
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return nil, fmt.Errorf("parameter %s is %v, not finite", name, x)
		}
	}
	b.p.Score = b.root("Score", s.Score, Float, b.variable("score"))
	if s.Visible != "" {
		b.p.Visible = b.root("Visible", s.Visible, Bool, 0)
	}
	if b.err != nil {
		return nil, b.err
	}
	read := make([]bool, len(s.Tensors))
	for i := range b.p.Nodes {
		if n := &b.p.Nodes[i]; n.Op == Element {
			read[n.Tensor] = true
		}
	}
	for i, t := range s.Tensors {
		if !read[i] {
			return nil, fmt.Errorf("no expression reads the tensor %s", t.Name)
		}
	}
	b.what, b.text, b.most = "the derivatives of Score", "", maxDerived
	b.p.Slope = b.derivative(b.p.Score, b.variable("score"))
	for i := range b.p.Nodes {
		if n := &b.p.Nodes[i]; n.Op == Element && n.Kind == Float {
			if by := b.derivative(b.p.Score, i); !b.is(by, 0) {
				b.p.Partials = append(b.p.Partials, Partial{Element: i, By: by})
			}
		}
	}
	return b.p, b.err
}

// name checks the name of a tensor or of a parameter.
func (b *builder) name(what, name string, used map[string]bool) error {
	_, isVariable := variables[name]
	_, isFunction := functions[name]
	switch {
	case !token.IsIdentifier(name) || len(name) > 64:
		return fmt.Errorf("%s %q: the name is no Go identifier of at most 64 bytes", what, name)
	case isVariable || isFunction || name == infinity || name == "true" || name == "false":
		return fmt.Errorf("%s %s: expressions have that name already", what, name)
	case used[name]:
		return fmt.Errorf("%s %s: the name is given twice", what, name)
	}
	used[name] = true
	return nil
}

// root compiles an expression to a value of a kind.
func (b *builder) root(what, text string, kind Kind, empty int) int {
	if text == "" {
		return empty
	}
	if b.what, b.text = what, text; b.err != nil {
		return 0
	}
	if len(text) > maxText {
		b.err = fmt.Errorf("%s has %d bytes; %d are the most", what, len(text), maxText)
		return 0
	}
	e, err := parser.ParseExpr(text)
	if err != nil {
		b.err = fmt.Errorf("%s %q: %v", what, text, err)
		return 0
	}
	i := b.expression(e)
	if b.err != nil {
		return 0
	}
	if kind == Float {
		return b.toFloat(i)
	}
	if got := b.p.Nodes[i].Kind; got != kind {
		b.fail(e, "a %v; %s must be a %v", got, what, kind)
	}
	return i
}

// source returns the text of a part of the expression.
func (b *builder) source(e ast.Node) string {
	from, to := int(e.Pos())-1, int(e.End())-1
	if from < 0 || to > len(b.text) || from > to {
		return b.text
	}
	return b.text[from:to]
}

// fail keeps the first error, which names a part of the expression.
func (b *builder) fail(e ast.Node, format string, args ...any) int {
	if b.err == nil {
		b.err = fmt.Errorf("%s: %s: %s", b.what, b.source(e), fmt.Sprintf(format, args...))
	}
	return 0
}

// node returns the index of a node, a new one if there is none like n.
func (b *builder) node(n Node) int {
	text := n.text
	n.text = ""
	if i, ok := b.same[n]; ok {
		return i
	}
	if len(b.p.Nodes) >= b.most {
		if b.err == nil {
			b.err = fmt.Errorf("%s: more than %d operations", b.what, b.most)
		}
		return 0
	}
	for _, arg := range n.Arguments(b.p) {
		n.Needs |= b.p.Nodes[arg].Needs
	}
	key := n
	key.Needs = 0
	if len(n.Arguments(b.p)) == 0 {
		key.Needs = n.Needs
	}
	n.text = text
	b.p.Nodes = append(b.p.Nodes, n)
	b.same[key] = len(b.p.Nodes) - 1
	return len(b.p.Nodes) - 1
}

func (b *builder) variable(name string) int {
	v := variables[name]
	return b.node(Node{Op: v.op, Kind: v.kind, Needs: v.needs, text: name})
}

func (b *builder) constant(x float64, kind Kind, text string) int {
	return b.node(Node{Op: Constant, Kind: kind, Value: x, text: text})
}

// number returns a constant: an int if it is one of 32 bits. param is the name of a parameter, or empty.
func (b *builder) number(x float64, text, param string) int {
	n := Node{Op: Constant, Kind: Float, Value: x, Param: param, text: text}
	if x == math.Trunc(x) && math.Abs(x) <= math.MaxInt32 {
		n.Kind, n.Value = Int, x+0 // no -0
	}
	return b.node(n)
}

func (b *builder) toFloat(i int) int {
	switch n := &b.p.Nodes[i]; {
	case n.Kind == Float:
		return i
	case n.Op == Constant:
		return b.node(Node{Op: Constant, Kind: Float, Value: n.Value, Param: n.Param, text: n.text})
	default:
		return b.node(Node{Op: ToFloat, Kind: Float, Args: [4]int{i}, text: n.text})
	}
}

// expression compiles a part of an expression.
func (b *builder) expression(e ast.Expr) int {
	if b.err != nil {
		return 0
	}
	if b.depth++; b.depth > maxDepth {
		return b.fail(e, "nested deeper than %d", maxDepth)
	}
	defer func() { b.depth-- }()
	switch e := e.(type) {
	case *ast.ParenExpr:
		return b.expression(e.X)
	case *ast.BasicLit:
		if e.Kind == token.INT || e.Kind == token.FLOAT {
			x, err := strconv.ParseFloat(e.Value, 64)
			if v, other := strconv.ParseInt(e.Value, 0, 64); other == nil {
				x, err = float64(v), nil
			}
			if err != nil || math.IsInf(x, 0) {
				return b.fail(e, "no number that a float holds")
			}
			if e.Kind == token.FLOAT {
				return b.constant(x, Float, e.Value)
			}
			return b.number(x, e.Value, "")
		}
		return b.fail(e, "no number")
	case *ast.Ident:
		return b.identifier(e)
	case *ast.UnaryExpr:
		return b.unary(e)
	case *ast.BinaryExpr:
		return b.binary(e)
	case *ast.CallExpr:
		return b.call(e)
	case *ast.IndexExpr:
		return b.element(e)
	}
	return b.fail(e, "expressions have numbers, variables, operators, functions and elements of tensors alone")
}

func (b *builder) identifier(e *ast.Ident) int {
	if _, ok := variables[e.Name]; ok {
		return b.variable(e.Name)
	}
	switch e.Name {
	case infinity:
		return b.constant(math.Inf(1), Float, infinity)
	case "true":
		return b.constant(1, Bool, e.Name)
	case "false":
		return b.constant(0, Bool, e.Name)
	}
	if x, ok := b.params[e.Name]; ok {
		return b.number(x, e.Name, e.Name)
	}
	if _, ok := b.names[e.Name]; ok {
		return b.fail(e, "a tensor without indices")
	}
	if _, ok := functions[e.Name]; ok {
		return b.fail(e, "a function without arguments")
	}
	return b.fail(e, "no variable, parameter or tensor of this name")
}

func (b *builder) unary(e *ast.UnaryExpr) int {
	x := b.expression(e.X)
	if b.err != nil {
		return 0
	}
	kind := b.p.Nodes[x].Kind
	switch {
	case e.Op == token.NOT && kind == Bool:
		return b.fold(Node{Op: Not, Kind: Bool, Args: [4]int{x}, text: b.source(e)})
	case e.Op == token.ADD && kind != Bool:
		return x
	case e.Op == token.SUB && kind != Bool:
		return b.fold(Node{Op: Negate, Kind: kind, Args: [4]int{x}, text: b.source(e)})
	}
	return b.fail(e, "no operation %v of a %v", e.Op, kind)
}

// operators are the binary operators. Those that compare with their arguments exchanged have swap, and those that negate the result have not.
var operators = map[token.Token]struct {
	op        Op
	swap, not bool
}{
	token.ADD: {op: Add}, token.SUB: {op: Subtract}, token.MUL: {op: Multiply}, token.QUO: {op: Divide}, token.REM: {op: Remainder},
	token.LSS: {op: Less}, token.GTR: {op: Less, swap: true}, token.LEQ: {op: LessEqual}, token.GEQ: {op: LessEqual, swap: true},
	token.EQL: {op: Equal}, token.NEQ: {op: Equal, not: true}, token.LAND: {op: And}, token.LOR: {op: Or},
}

func (b *builder) binary(e *ast.BinaryExpr) int {
	x, y := b.expression(e.X), b.expression(e.Y)
	if b.err != nil {
		return 0
	}
	o, ok := operators[e.Op]
	if !ok {
		return b.fail(e, "no operation %v", e.Op)
	}
	if o.swap {
		x, y = y, x
	}
	i := b.operation(e, o.op, x, y)
	if o.not && b.err == nil {
		return b.fold(Node{Op: Not, Kind: Bool, Args: [4]int{i}, text: b.source(e)})
	}
	return i
}

// operation returns a node of two arguments of one kind.
func (b *builder) operation(e ast.Expr, op Op, x, y int) int {
	kind, other := b.p.Nodes[x].Kind, b.p.Nodes[y].Kind
	logical := op == And || op == Or
	if (kind == Bool) != logical || (other == Bool) != logical {
		return b.fail(e, "no operation of a %v and a %v", kind, other)
	}
	result := kind
	switch op {
	case Divide:
		x, y, result = b.toFloat(x), b.toFloat(y), Float
	case Quotient, Remainder:
		if kind != Int || other != Int {
			return b.fail(e, "of a %v and a %v: both must be ints", kind, other)
		}
		if n := &b.p.Nodes[y]; n.Op != Constant || n.Value < 1 {
			return b.fail(e, "the divisor must be a constant or a parameter above 0")
		}
	default:
		if !logical && (kind == Float || other == Float) {
			x, y, result = b.toFloat(x), b.toFloat(y), Float
		}
	}
	if op == Less || op == LessEqual || op == Equal {
		result = Bool
	}
	return b.fold(Node{Op: op, Kind: result, Args: [4]int{x, y}, text: b.source(e)})
}

// fold returns the node, or a constant if all its arguments are constants.
func (b *builder) fold(n Node) int {
	var x [4]float64
	param := ""
	for k, arg := range n.Arguments(b.p) {
		a := &b.p.Nodes[arg]
		if a.Op != Constant {
			return b.node(n)
		}
		if x[k] = a.Value; a.Param != "" {
			param = "(" + n.text + ")"
		}
	}
	y := n.Of(x[0], x[1], x[2])
	if y != y || n.Kind != Float && n.Op != Not && math.Abs(y) > math.MaxInt32 {
		return b.node(n)
	}
	return b.node(Node{Op: Constant, Kind: n.Kind, Value: y, Param: param, text: n.text})
}

func (b *builder) call(e *ast.CallExpr) int {
	name, ok := e.Fun.(*ast.Ident)
	if !ok {
		return b.fail(e, "no function")
	}
	f, ok := functions[name.Name]
	if !ok {
		return b.fail(e, "no function of this name")
	}
	if len(e.Args) != f.arguments || e.Ellipsis != token.NoPos {
		return b.fail(e, "%d arguments; %s has %d", len(e.Args), name.Name, f.arguments)
	}
	var x [4]int
	for i, arg := range e.Args {
		x[i] = b.expression(arg)
	}
	if b.err != nil {
		return 0
	}
	kind := func(i int) Kind { return b.p.Nodes[x[i]].Kind }
	n := Node{Op: f.op, Kind: Float, Args: x, text: b.source(e)}
	switch f.op {
	case Min, Max, Quotient:
		return b.operation(e, f.op, x[0], x[1])
	case Where:
		if kind(0) != Bool {
			return b.fail(e.Args[0], "a %v; the condition must be a bool", kind(0))
		}
		switch y, z := kind(1), kind(2); {
		case y == z:
			n.Kind = y
		case y == Bool || z == Bool:
			return b.fail(e, "a %v or a %v: both must be of one kind", y, z)
		default:
			n.Args[1], n.Args[2] = b.toFloat(x[1]), b.toFloat(x[2])
		}
		return b.fold(n)
	}
	if kind(0) == Bool {
		return b.fail(e, "of a bool: where(%s, 1, 0) is a number", b.source(e.Args[0]))
	}
	switch f.op {
	case ToFloat:
		return b.toFloat(x[0])
	case ToInt:
		if kind(0) == Int {
			return x[0]
		}
		n.Kind = Int
	case Abs:
		n.Kind = kind(0)
	default:
		n.Args[0] = b.toFloat(x[0])
	}
	return b.fold(n)
}

// element compiles an element of a tensor: name[i][j].
func (b *builder) element(e *ast.IndexExpr) int {
	var indices []ast.Expr
	var x ast.Expr = e
	for {
		i, ok := x.(*ast.IndexExpr)
		if !ok {
			break
		}
		if indices = append([]ast.Expr{i.Index}, indices...); len(indices) > maxRank {
			return b.fail(e, "%d indices", len(indices))
		}
		x = i.X
	}
	name, ok := x.(*ast.Ident)
	if !ok {
		return b.fail(e, "no element of a tensor")
	}
	t, ok := b.names[name.Name]
	if !ok {
		return b.fail(e, "no tensor %s", name.Name)
	}
	d := &b.p.Tensors[t]
	if len(indices) != d.Rank {
		return b.fail(e, "%d indices; %s has %d axes", len(indices), d.Name, d.Rank)
	}
	n := Node{Op: Element, Kind: Float, Tensor: t, text: b.source(e)}
	if d.Int {
		n.Kind = Int
	}
	for k, index := range indices {
		if n.Args[k] = b.expression(index); b.err != nil {
			return 0
		}
		if kind := b.p.Nodes[n.Args[k]].Kind; kind != Int {
			return b.fail(index, "a %v; an index must be an int: floor(%s) is one", kind, b.source(index))
		}
	}
	return b.node(n)
}
