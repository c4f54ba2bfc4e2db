package vector

import (
	"testing"

	"go.uber.org/goleak"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestMain(m *testing.M) {
	reftest.PoisonOutputs()
	goleak.VerifyTestMain(cputest.EveryTier(m, cpu.BestTier(), cpu.ForceTier))
}
