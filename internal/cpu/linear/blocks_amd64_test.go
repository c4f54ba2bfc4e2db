//go:build gc && !noasm

package linear

import (
	"testing"

	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/weight"
)

func init() {
	stripOrder = func() []func(*interleaveArgs) {
		if cpu.InUse() < cpu.TierAVX512 || linearTiers[cpu.InUse()].blocks.row[weight.Int8] == nil {
			return nil
		}
		return []func(*interleaveArgs){stripXAVX512, stripWAVX512}
	}
}

// TestBlocksWithoutVNNI: processors that have AVX-512 without VNNI compute with the kernels for AVX2.
func TestBlocksWithoutVNNI(t *testing.T) {
	was := linearTiers[cpu.InUse()]
	if cpu.InUse() < cpu.TierAVX512 || was.blocks == &blocksWithoutVNNI {
		t.Skip("this tier has no AVX-512, or the other tests have run with the kernels for AVX2")
	}
	own := *was
	own.blocks = &blocksWithoutVNNI
	linearTiers[cpu.InUse()] = &own
	defer func() { linearTiers[cpu.InUse()] = was }()
	for name, test := range map[string]func(*testing.T){
		"exact": TestBlocksExact, "rounded": TestBlocksRounded, "any x": TestBlocksRound, "alone": TestBlocksAlone, "odd": TestBlocksOdd, "together": TestBlocksTogether,
	} {
		t.Run(name, test)
	}
}
