package reftest

import (
	"flag"
	"os"
	"testing"

	tensors "gorgonia.org/leanattention/internal/dense"
)

// PoisonOutputs, called from a TestMain, fills memory with undefined content with NaN: new tensors, including
// small ones, and memory that is reused. It does nothing if benchmarks run, because it would distort their
// times.
func PoisonOutputs() {
	flag.Parse()
	tensors.Poison = flag.Lookup("test.bench").Value.String() == ""
}

// Main is a TestMain that only calls PoisonOutputs.
func Main(m *testing.M) {
	PoisonOutputs()
	os.Exit(m.Run())
}
