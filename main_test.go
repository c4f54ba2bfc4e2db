package leanattention

import (
	"testing"

	"go.uber.org/goleak"
)

// No test may leave a goroutine behind: the engine's helpers end by themselves,
// and so do Gorgonia's machines when they are closed, but for a lisp machine
// whose run failed, as one that asks for a gradient does, and those that compute
// on a GPU by themselves.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("gorgonia.org/gorgonia.(*lispMachine).runall"),
		goleak.IgnoreTopFunction("gorgonia.org/gorgonia.(*ExternMetadata).collectWork")) // under the tag cuda
}
