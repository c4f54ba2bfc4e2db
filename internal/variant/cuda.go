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
	places  map[int]int    // of nodes, in numbers
	numbers []uint32
	printed int // nodes, in all functions
	reads   bool
}

// large is the number of nodes from which on a kernel has few copies of the code.
const large = 12

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
	w := &printer{p: p, loads: loads, places: map[int]int{}}
	functions := w.function("float score", p.Score)
	judges := false
	if p.Visible >= 0 {
		functions += w.function("bool sees", p.Visible)
		judges = p.Nodes[p.Visible].Needs&NeedsScore != 0
	} else {
		functions += printedFunction("bool sees", "", "true")
	}
	text := fmt.Sprintf("struct Expression {\n  static constexpr bool %s, scores = %t, hides = %t, judges = %t, reads = %t, large = %t;\n%s};\n",
		flags, p.ChangesScores(), p.Visible >= 0, judges, w.reads, w.printed >= large, functions)
	return Printed{Text: text, Numbers: w.numbers, Reads: w.reads}
}

// function prints a function with the value of node i.
func (w *printer) function(name string, i int) string {
	w.names = map[int]string{}
	w.out.Reset()
	value := w.value(i)
	return printedFunction(name, w.out.String(), value)
}

func printedFunction(name, body, value string) string {
	return fmt.Sprintf("  __device__ static __forceinline__ %s(const WrittenParams& p, float score, int query, int key, int head, int sequence) {\n%s    return %s;\n  }\n", name, body, value)
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
		text = w.number(i, n)
	} else {
		var args []string
		for _, arg := range n.Arguments(w.p) {
			args = append(args, w.value(arg))
		}
		text = w.operation(n, args)
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

// number prints node i, a constant that follows from Params: a parameter of the kernel.
func (w *printer) number(i int, n *Node) string {
	at, there := w.places[i]
	if !there {
		bits := uint32(int32(n.Value))
		if n.Kind == Float {
			bits = math.Float32bits(float32(n.Value))
		}
		at, w.places[i], w.numbers = len(w.numbers), len(w.numbers), append(w.numbers, bits)
	}
	switch n.Kind {
	case Float:
		return fmt.Sprintf("__uint_as_float(p.numbers[%d])", at)
	case Bool:
		return fmt.Sprintf("p.numbers[%d] != 0", at)
	}
	return fmt.Sprintf("(int)p.numbers[%d]", at)
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
		index := args[0]
		for axis, arg := range args[1:] {
			index = fmt.Sprintf("(%s) * p.sizes[%d] + %s", index, maxRank*n.Tensor+axis+1, arg)
		}
		return fmt.Sprintf("%s(p.tensors[%d], %s)", w.loads[n.Tensor], n.Tensor, index)
	}
	panic(fmt.Sprintf("variant: operation %d is not printed", n.Op))
}
