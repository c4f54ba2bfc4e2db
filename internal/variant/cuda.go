package variant

import (
	"fmt"
	"math"
	"strings"
)

// Printed is a Program as CUDA C++, for kernels/attn_written.cuh.
type Printed struct {
	// Text is a struct Expression, as attn_written.cuh describes it. Its functions have neither loops nor preprocessing directives. Programs that differ in the numbers
	// of Params alone have one Text.
	Text string
	// Numbers are the constants that depend on Params, as bits of float32 and int32.
	Numbers []uint32
	// Reads reports whether the expressions read elements of tensors.
	Reads bool
}

// printer prints nodes, each as a constant of its own.
type printer struct {
	p       *Program
	loads   []string
	out     strings.Builder
	names   map[int]string // of nodes that this function has printed
	places  map[place]int  // in numbers
	numbers []uint32
	printed int // nodes, in all functions
	reads   bool
}

// place is a number that follows from Params: the value of a node, or its reciprocal.
type place struct {
	node       int
	reciprocal bool
}

// The number of nodes from which on a kernel has few copies of the code, and of nodes with derivatives.
const large, largeGradient = 12, 48

// Functions of CUDA and of attn_expression.cuh for operations with one or two arguments.
var (
	printedUnary = map[Op]string{
		ToInt: "__float2int_rd", Abs: "absolute", Exp: "exponential", Log: "logf", Sqrt: "sqrtf", Tanh: "tanh_", Sigmoid: "sigmoid", Softplus: "softplus",
		ToFloat: "(float)", Not: "!",
	}
	printedBinary = map[Op]string{
		Add: "sum", Subtract: "difference", Multiply: "product", Min: "least", Max: "largest", Quotient: "divided", Remainder: "remaining",
	}
	printedBetween = map[Op]string{Divide: "/", Less: "<", LessEqual: "<=", Equal: "==", And: "&&", Or: "||"}
	printedNames   = map[Op]string{Score: "score", Query: "query", Key: "key", Head: "head", Sequence: "sequence"}
	printedKinds   = [...]string{Float: "float", Int: "int", Bool: "bool"}
)

// CUDA prints the Program. loads are functions of (address, index) that load an element of each tensor. flags are further constants of the
// struct.
func (p *Program) CUDA(loads []string, flags string) Printed {
	return (&printer{p: p, loads: loads, places: map[place]int{}}).expression(flags, "", large)
}

// GradientCUDA is CUDA with the derivatives, as kernels/attn_written_backward.cuh describes them.
func (p *Program) GradientCUDA(loads []string, flags string) Printed {
	w := &printer{p: p, loads: loads, places: map[place]int{}}
	return w.expression(fmt.Sprintf("%s, linear = %t, unnormalised = %t", flags, p.Linear(), p.Unnormalised), w.function("float slope", p.Slope)+w.partials(), largeGradient)
}

// expression prints the struct, with further functions. many is the number of nodes that are large.
func (w *printer) expression(flags, further string, many int) Printed {
	p := w.p
	functions := w.function("float score", p.Score)
	judges := false
	if p.Visible >= 0 {
		functions += w.function("bool sees", p.Visible)
		judges = p.Nodes[p.Visible].Needs&NeedsScore != 0
	} else {
		functions += printedFunction("bool sees", "", "true")
	}
	text := fmt.Sprintf("struct Expression {\n  static constexpr bool %s, scores = %t, hides = %t, judges = %t, reads = %t, large = %t;\n%s};\n",
		flags, p.ChangesScores(), p.Visible >= 0, judges, w.reads, w.printed >= many, functions+further)
	return Printed{Text: text, Numbers: w.numbers, Reads: w.reads}
}

// function prints a function with the value of node i.
func (w *printer) function(name string, i int) string {
	w.names = map[int]string{}
	w.out.Reset()
	value := w.value(i)
	return printedFunction(name, w.out.String(), value)
}

const printedArguments = "const WrittenParams& p, float score, int query, int key, int head, int sequence"

func printedFunction(name, body, value string) string {
	return fmt.Sprintf("  __device__ static __forceinline__ %s(%s) {\n%s    return %s;\n  }\n", name, printedArguments, body, value)
}

// partials prints a function with the derivatives by elements of tensors.
func (w *printer) partials() string {
	w.names = map[int]string{}
	w.out.Reset()
	var calls, lines strings.Builder
	for i, partial := range w.p.Partials {
		n := &w.p.Nodes[partial.Element]
		by := w.value(partial.By)
		fmt.Fprintf(&lines, "n == %d ? %d : ", i, w.p.LineOf(partial))
		fmt.Fprintf(&calls, "    f(%d, %d, %s, %s);\n", i, n.Tensor, w.index(n, w.arguments(n)), by)
	}
	return fmt.Sprintf("  static constexpr int PARTIALS = %d;\n  static constexpr int lineOf(int n) { return %s0; }\n  template <class F> __device__ static __forceinline__ void partials(%s, const F& f) {\n%s%s  }\n",
		len(w.p.Partials), lines.String(), printedArguments, w.out.String(), calls.String())
}

// arguments prints the arguments of a node, and returns their names.
func (w *printer) arguments(n *Node) (names []string) {
	for _, arg := range n.Arguments(w.p) {
		names = append(names, w.value(arg))
	}
	return names
}

// index returns the place of an element in its tensor.
func (w *printer) index(n *Node, args []string) string {
	index := args[0]
	for axis, arg := range args[1:] {
		index = fmt.Sprintf("(%s) * p.sizes[%d] + %s", index, maxRank*n.Tensor+axis+1, arg)
	}
	return index
}

// value prints node i and the nodes that node i depends on, and returns the name of node i's constant.
func (w *printer) value(i int) string {
	if name, ok := w.names[i]; ok {
		return name
	}
	n := &w.p.Nodes[i]
	if name, ok := printedNames[n.Op]; ok {
		return name
	}
	text := ""
	if n.Op == Constant {
		if n.Param == "" {
			return literal(n)
		}
		text = w.number(place{i, false}, n.Kind, n.Value)
	} else if text = w.quotient(n); text == "" {
		text = w.operation(n, w.arguments(n))
	}
	name := fmt.Sprintf("v%d", len(w.names))
	w.names[i] = name
	w.printed++
	fmt.Fprintf(&w.out, "    const %s %s = %s;\n", printedKinds[n.Kind], name, text)
	return name
}

// literal prints a number of the expression.
func literal(n *Node) string {
	switch n.Kind {
	case Float:
		return fmt.Sprintf("__int_as_float(0x%08x)", math.Float32bits(float32(n.Value)))
	case Bool:
		return fmt.Sprint(n.Value != 0)
	}
	return fmt.Sprintf("(%d)", int32(n.Value))
}

// number prints a constant that follows from Params: a parameter of the kernel.
func (w *printer) number(of place, kind Kind, x float64) string {
	at, there := w.places[of]
	if !there {
		bits := uint32(int32(x))
		if kind == Float {
			bits = math.Float32bits(float32(x))
		}
		at, w.places[of], w.numbers = len(w.numbers), len(w.numbers), append(w.numbers, bits)
	}
	switch kind {
	case Float:
		return fmt.Sprintf("__uint_as_float(p.numbers[%d])", at)
	case Bool:
		return fmt.Sprintf("p.numbers[%d] != 0", at)
	}
	return fmt.Sprintf("(int)p.numbers[%d]", at)
}

// quotient prints a division by a constant: a product with the reciprocal, which is many times as fast. It is empty for other divisions, and
// where the reciprocal is not a normal float32.
func (w *printer) quotient(n *Node) string {
	by := &w.p.Nodes[n.Args[1]]
	if size := math.Abs(by.Value); n.Op != Divide || by.Op != Constant || !(size > 0x1p-120 && size < 0x1p120) {
		return ""
	}
	reciprocal := ""
	if by.Param == "" {
		reciprocal = literal(&Node{Op: Constant, Kind: Float, Value: 1 / by.Value})
	} else {
		reciprocal = w.number(place{n.Args[1], true}, Float, 1/by.Value)
	}
	return "product(" + w.value(n.Args[0]) + ", " + reciprocal + ")"
}

func (w *printer) operation(n *Node, args []string) string {
	if f, ok := printedUnary[n.Op]; ok {
		return f + "(" + args[0] + ")"
	}
	if f, ok := printedBinary[n.Op]; ok {
		return f + "(" + args[0] + ", " + args[1] + ")"
	}
	if sign, ok := printedBetween[n.Op]; ok {
		return args[0] + " " + sign + " " + args[1]
	}
	switch n.Op {
	case Negate:
		if n.Kind == Int {
			return "difference(0, " + args[0] + ")"
		}
		return "-" + args[0]
	case Where:
		return args[0] + " ? " + args[1] + " : " + args[2]
	case Element:
		w.reads = true
		return fmt.Sprintf("%s(p.tensors[%d], %s)", w.loads[n.Tensor], n.Tensor, w.index(n, args))
	}
	panic(fmt.Sprintf("variant: operation %d is not printed", n.Op))
}
