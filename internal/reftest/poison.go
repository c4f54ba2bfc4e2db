package reftest

import (
	"flag"

	tensors "gorgonia.org/leanattention/internal/dense"
)

// PoisonOutputs is for a TestMain: memory that has whatever values has NaN from then on, of small tensors too, and so has memory that
// others take over. It says nothing of the time that anything takes, so not where benchmarks run.
func PoisonOutputs() {
	flag.Parse()
	tensors.Poison = flag.Lookup("test.bench").Value.String() == ""
}
