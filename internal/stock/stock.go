// Package stock tells Gorgonia's own ops apart, which are not exported: by the names
// of their types. Names and fields are those of v0.9.18, and tests of Fuse hold
// them to it. It is all that this module knows of Gorgonia's inside.
package stock

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Kind is what an op of Gorgonia does, as far as Fuse cares.
type Kind int

const (
	Other Kind = iota
	Input
	Constant
	Statement // G.Read and G.Set, which have no value
	Product   // of two stacks of matrices
	SoftMax
	LogSoftMax
	SoftMaxGradient
	Reshape
	Transpose
	Add
	Sub
	Mul
	Div
	Repeat
	Exp
	Inverse
	Pure // elementwise and the like
	Size
	Sum
	Max
	Dropout
	Slice
	Whole // a Slice that cuts nothing off
	Concat
)

// Plain says that an op of this kind has a value that depends on those of its inputs
// alone, so that it may be computed ahead where they are constant.
func (k Kind) Plain() bool {
	switch k {
	case Reshape, Transpose, Add, Sub, Mul, Div, Repeat, Exp, Inverse, Pure, Sum, Max:
		return true
	}
	return false
}

// Op describes the op of a node.
type Op struct {
	Kind           Kind
	TransA, TransB bool    // of a product
	Axis           int     // of a SoftMax, where -1 is the default one, a Repeat, a size, a Slice or a Concat
	From, To       int     // of a Slice
	Pattern        []int   // of a transpose
	Along          []int   // the axes that a Sum or Max goes along
	Idle           bool    // of a Dropout: its value is its input's
	Probability    float64 // of a Dropout: that it drops a number
}

// Of is the op of n.
func Of(n *G.Node) Op {
	op := n.Op()
	if op == nil {
		return Op{Kind: Input}
	}
	v := reflect.Indirect(reflect.ValueOf(op))
	if v.Type().PkgPath() != "gorgonia.org/gorgonia" {
		return Op{}
	}
	switch v.Type().Name() {
	case "constantScalar", "constantTensor":
		return Op{Kind: Constant}
	case "readOp", "letOp":
		return Op{Kind: Statement}
	case "linAlgBinOp":
		return productOf(op.String())
	case "softmaxOp":
		if !v.FieldByName("isLog").Bool() {
			return Op{Kind: SoftMax, Axis: int(v.FieldByName("axis").Int())}
		}
		return Op{Kind: LogSoftMax}
	case "softmaxDiffOp":
		return Op{Kind: SoftMaxGradient}
	case "reshapeOp":
		return Op{Kind: Reshape}
	case "transposeOp":
		return Op{Kind: Transpose, Pattern: ints(v.FieldByName("pattern"))}
	case "elemBinOp":
		return Op{Kind: binaryKind(op.String())}
	case "elemUnaryOp":
		return Op{Kind: unaryKind(op.String())}
	case "repeatOp":
		return Op{Kind: Repeat, Axis: int(v.FieldByName("along").Int())}
	case "sizeOp":
		return Op{Kind: Size, Axis: int(v.FieldByName("axis").Int())}
	case "sumOp":
		return Op{Kind: Sum, Along: ints(v.FieldByName("along"))}
	case "maxOp":
		return Op{Kind: Max, Along: ints(v.FieldByName("along"))}
	case "sliceOp":
		switch s := op.(interface{ IsSlice() tensor.Slice }).IsSlice(); {
		case s == nil:
			return Op{Kind: Whole}
		case s.Step() <= 1:
			return Op{Kind: Slice, Axis: int(v.FieldByName("along").Int()), From: s.Start(), To: s.End()}
		}
	case "concatOp":
		return Op{Kind: Concat, Axis: int(v.FieldByName("axis").Int())}
	case "dropoutOp":
		p := v.FieldByName("probability").Float()
		return Op{Kind: Dropout, Probability: p, Idle: p == 0 || !v.FieldByName("isTraining").Bool()}
	}
	return Op{}
}

func ints(v reflect.Value) (x []int) {
	for i := range v.Len() {
		x = append(x, int(v.Index(i).Int()))
	}
	return x
}

// productOf reads "Aᵀ ××× Bᵀ", a BatchedMatMul, or the same with one cross, the
// Mul of two matrices. A vector would be a small b.
func productOf(s string) Op {
	switch strings.ReplaceAll(s, "ᵀ", "") {
	case "A × B", "A ××× B":
		return Op{Kind: Product, TransA: strings.HasPrefix(s, "Aᵀ"), TransB: strings.HasSuffix(s, "Bᵀ")}
	}
	return Op{}
}

func unaryKind(s string) Kind {
	switch s {
	case "exp":
		return Exp
	case "inv":
		return Inverse
	}
	return Pure
}

func binaryKind(s string) Kind {
	sign, _, _ := strings.Cut(s, " ")
	switch sign {
	case "+":
		return Add
	case "-":
		return Sub
	case "⊙":
		return Mul
	case "÷":
		return Div
	}
	return Pure
}

// ChildrenOf is the inputs of n. Gorgonia's own way to them, From of the graph,
// goes through a cache that is wrong after RemoveNode, which Gorgonia itself
// calls when it makes a Log1p.
func ChildrenOf(n *G.Node) []*G.Node {
	f := reflect.ValueOf(n).Elem().FieldByName("children")
	nodes := make([]*G.Node, f.Len())
	for i := range nodes {
		nodes[i] = (*G.Node)(f.Index(i).UnsafePointer())
	}
	return nodes
}

// SetDeriv makes grad the gradient of n, as Gorgonia's Backpropagate does: Deriv of n and DerivOf of grad return the other node then.
// Gorgonia's Backpropagate cannot be called for this, since Backpropagate panics at a graph that has a gradient of SoftMax.
func SetDeriv(n, grad *G.Node) {
	set := func(of *G.Node, field string, to any) {
		f := reflect.ValueOf(of).Elem().FieldByName(field)
		reflect.NewAt(f.Type(), f.Addr().UnsafePointer()).Elem().Set(reflect.ValueOf(to))
	}
	set(n, "deriv", grad)
	set(grad, "derivOf", append(slices.Clone(grad.DerivOf()), n))
}

// NameOf is the name that n was given, or nothing. Name makes one up.
func NameOf(n *G.Node) string {
	return reflect.ValueOf(n).Elem().FieldByName("name").String()
}

// TypeOf is a type equal to n's, which Gorgonia may recycle with the node.
func TypeOf(n *G.Node) G.NodeConsOpt {
	if t, ok := n.Type().(*G.TensorType); ok {
		return G.WithType(&G.TensorType{Dims: t.Dims, Of: t.Of})
	}
	return G.WithType(n.Type())
}

// SoftMaxAxis is the axis that a SoftMax of a tensor of some shape goes along.
func (o Op) SoftMaxAxis(shape tensor.Shape) int {
	switch {
	case o.Axis != -1:
		return o.Axis
	case shape.IsVector() && !shape.IsRowVec(): // (n) and (n, 1)
		return 0
	}
	return shape.Dims() - 1
}

// Describe is a node in a report.
func Describe(n *G.Node) string {
	what := fmt.Sprint(n.Op())
	if n.Op() == nil {
		what = "input"
	}
	if name := NameOf(n); name != "" && Of(n).Kind != Constant {
		what += fmt.Sprintf(" %q", name)
	}
	return fmt.Sprintf("node %d (%s)", n.ID(), what)
}
