package nn

import (
	"os"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

func TestMain(m *testing.M) {
	reftest.PoisonOutputs()
	os.Exit(m.Run())
}
