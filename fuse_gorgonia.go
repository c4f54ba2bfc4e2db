package leanattention

import (
	"fmt"
	"reflect"
	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// This file is all that Fuse knows of Gorgonia's inside, of which the ops are
// not exported: they are told apart by the names of their types. Names and
// fields are those of v0.9.18, and tests hold them to it.

// stockKind is what an op of Gorgonia does, as far as Fuse cares.
type stockKind int

const (
	stockOther stockKind = iota
	stockInput
	stockConstant
	stockStatement // G.Read and G.Set, which have no value
	stockProduct   // of two stacks of matrices
	stockSoftMax
	stockSoftMaxGradient
	stockReshape
	stockTranspose
	stockAdd
	stockSub
	stockMul
	stockDiv
	stockRepeat
	stockPure // elementwise and the like: may be computed ahead
	stockSize
)

// stockOp describes the op of a node.
type stockOp struct {
	kind           stockKind
	transA, transB bool  // of a product
	axis           int   // of a SoftMax, where -1 is the default one, a Repeat or a size
	pattern        []int // of a transpose
}

func stockOf(n *G.Node) stockOp {
	op := n.Op()
	if op == nil {
		return stockOp{kind: stockInput}
	}
	v := reflect.Indirect(reflect.ValueOf(op))
	if v.Type().PkgPath() != "gorgonia.org/gorgonia" {
		return stockOp{}
	}
	switch v.Type().Name() {
	case "constantScalar", "constantTensor":
		return stockOp{kind: stockConstant}
	case "readOp", "letOp":
		return stockOp{kind: stockStatement}
	case "linAlgBinOp":
		return productOf(op.String())
	case "softmaxOp":
		if !v.FieldByName("isLog").Bool() {
			return stockOp{kind: stockSoftMax, axis: int(v.FieldByName("axis").Int())}
		}
	case "softmaxDiffOp":
		return stockOp{kind: stockSoftMaxGradient}
	case "reshapeOp":
		return stockOp{kind: stockReshape}
	case "transposeOp":
		f := v.FieldByName("pattern")
		s := stockOp{kind: stockTranspose}
		for i := range f.Len() {
			s.pattern = append(s.pattern, int(f.Index(i).Int()))
		}
		return s
	case "elemBinOp":
		return stockOp{kind: binaryKind(op.String())}
	case "elemUnaryOp":
		return stockOp{kind: stockPure}
	case "repeatOp":
		return stockOp{kind: stockRepeat, axis: int(v.FieldByName("along").Int())}
	case "sizeOp":
		return stockOp{kind: stockSize, axis: int(v.FieldByName("axis").Int())}
	}
	return stockOp{}
}

// productOf reads "Aᵀ ××× Bᵀ", a BatchedMatMul, or the same with one cross, the
// Mul of two matrices. A vector would be a small b.
func productOf(s string) stockOp {
	switch strings.ReplaceAll(s, "ᵀ", "") {
	case "A × B", "A ××× B":
		return stockOp{kind: stockProduct, transA: strings.HasPrefix(s, "Aᵀ"), transB: strings.HasSuffix(s, "Bᵀ")}
	}
	return stockOp{}
}

func binaryKind(s string) stockKind {
	sign, _, _ := strings.Cut(s, " ")
	switch sign {
	case "+":
		return stockAdd
	case "-":
		return stockSub
	case "⊙":
		return stockMul
	case "÷":
		return stockDiv
	}
	return stockPure
}

// childrenOf is the inputs of n. Gorgonia's own way to them, From of the graph,
// goes through a cache that is wrong after RemoveNode, which Gorgonia itself
// calls when it makes a Log1p.
func childrenOf(n *G.Node) []*G.Node {
	f := reflect.ValueOf(n).Elem().FieldByName("children")
	nodes := make([]*G.Node, f.Len())
	for i := range nodes {
		nodes[i] = (*G.Node)(f.Index(i).UnsafePointer())
	}
	return nodes
}

// nameOf is the name that n was given, or nothing. Name makes one up.
func nameOf(n *G.Node) string {
	return reflect.ValueOf(n).Elem().FieldByName("name").String()
}

// typeOf is a type equal to n's, which Gorgonia may recycle with the node.
func typeOf(n *G.Node) G.NodeConsOpt {
	if t, ok := n.Type().(*G.TensorType); ok {
		return G.WithType(&G.TensorType{Dims: t.Dims, Of: t.Of})
	}
	return G.WithType(n.Type())
}

// softMaxAxis is the axis that a SoftMax of op goes along.
func softMaxAxis(op stockOp, shape tensor.Shape) int {
	switch {
	case op.axis != -1:
		return op.axis
	case shape.IsVector() && !shape.IsRowVec(): // (n) and (n, 1)
		return 0
	}
	return shape.Dims() - 1
}

// describe is a node in a report.
func describe(n *G.Node) string {
	what := fmt.Sprint(n.Op())
	if n.Op() == nil {
		what = "input"
	}
	if name := nameOf(n); name != "" && stockOf(n).kind != stockConstant {
		what += fmt.Sprintf(" %q", name)
	}
	return fmt.Sprintf("node %d (%s)", n.ID(), what)
}
