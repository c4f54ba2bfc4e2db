package layers

import (
	"testing"
)

func TestGPUSample(t *testing.T) { testSample(t, realGPU(t), 400, 60000) }

func TestGPUSampleLong(t *testing.T) { testSample(t, realGPU(t), 150, 300001) }

func TestGPUSampleGreedy(t *testing.T) {
	testSampleGreedy(t, realGPU(t), 6, 1, 2, 3, 5, 500, 4099, 50272, 300001)
}

func TestGPUSampleSets(t *testing.T) { testSampleSets(t, realGPU(t), 100, 5000) }

func TestGPUSampleRepeats(t *testing.T) { testSampleRepeats(t, realGPU(t), 100, 64, 50272) }

func TestGPUSampleChain(t *testing.T) { testSampleChain(t, realGPU(t), 200, 400, 5000) }

func TestGPUSampleGraph(t *testing.T) { testSampleGraph(t, realGPU(t), 50, 20001) }

// BenchmarkGPUSample is the choice of the next tokens, in GB/s of logits.
func BenchmarkGPUSample(b *testing.B) { benchmarkSample(b, realGPU(b)) }
