package reftest

import (
	"flag"
	"os"
	"testing"

	tensors "gorgonia.org/leanattention/internal/dense"
)

// PoisonOutputs is for a TestMain: memory that has whatever values has NaN from then on, of small tensors too, and so has memory that
// others take over. It says nothing of the time that anything takes, so not where benchmarks run.
func PoisonOutputs() {
	flag.Parse()
	tensors.Poison = flag.Lookup("test.bench").Value.String() == ""
}

// Main is a TestMain that does no more than that.
func Main(m *testing.M) {
	PoisonOutputs()
	os.Exit(m.Run())
}
