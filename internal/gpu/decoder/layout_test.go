package decoder

import (
	"testing"

	"gorgonia.org/leanattention/internal/gpu/testgpu"
)

// What is said here of launches and shared memory is still what the kernels do.
func TestLaunchesAreTheKernels(t *testing.T) {
	for file, lines := range map[string][]string{
		"linked.cuh": {
			"((2 * block + part) * COMPUTERS + warp) * p.rows * (D + 2)",
			"sh.o = (float*)(memory + slots * S::SLOT); sh.m = (float4*)(sh.o + 2 * COMPUTERS * p.rows * S::WIDTH); sh.l = sh.m + 2 * ROWS;",
		},
		"layers.cuh": {
			"constexpr int CHAIN_WARPS = 8, CHAIN_ROWS = 4;",
			"constexpr int CHAIN_TILE = 16;",
			"constexpr int CHAIN_BOX = 4096;",
			"constexpr int CHAIN_GROUP = 8;",
			"constexpr int CHAIN_COLUMNS = 128;",
			"constexpr int CHAIN_FIXED = 14336;",
			"constexpr int CHAIN_FIXED_PAIRS = 21504;",
			"constexpr int CHAIN_STRIDE = 144;",
			"constexpr int CHAIN_BODY = 368;",
			"CHAIN_LINEAR = 0, CHAIN_ATTENTION = 1",
		},
		"chain.cuh": {
			"rings = memory + FIXED; area = rings + CHAIN_WARPS * p.stages * CHAIN_BOX; feeds = (ChainFeed*)(area + p.area); bars = (u64*)(feeds + p.feedCount); slots = bars + CHAIN_WARPS * p.stages;",
			"constexpr int COLUMNS = ROWS + (NORM ? 2 : 0);", "constexpr int GROUP = !NORM && SPLIT > 1 ? 1 : CHAIN_GROUP / COLUMNS;",
			"return SPLIT == 1 ? all : (all + 1 - rank) / 2;",
			"return unit < 0 ? unit + units() : unit;",
			"workers = o.workers >> half * 8 & 255",
			"float* const x = (float*)(room.area + o.place) + warp * most * (COLUMNS * CHAIN_STRIDE + (NORM ? CHAIN_COLUMNS : 0));",
		},
		"matrix.cuh": {
			"constexpr int MATRIX_WARPS = 8; constexpr int MATRIX_THREADS = (MATRIX_WARPS + 1) * 32;",
			"constexpr int MATRIX_TILE = 128;",
			"constexpr int MATRIX_STEP = 64;",
			"constexpr int MATRIX_WIDTH = MATRIX_TILE + 4;",
			"constexpr int PART = ROWS * 128; static constexpr int STAGE = MATRIX_TILE * 128 + 2 * PART;",
			"u64* bars = (u64*)(memory + p.stages * STAGE);",
		},
		"batch.cuh": {
			"constexpr int BATCH_TILE = 64; constexpr int BATCH_STAGE = 2 * BATCH_TILE * 128; constexpr int BATCH_STAGES = 10; constexpr int BATCH_PACE = 4; constexpr int BATCH_FIXED = 1024; constexpr int BATCH_WARPS = 8; constexpr int BATCH_THREADS = (BATCH_WARPS + 3) * 32;",
			"constexpr int BLOCK = 64; static constexpr int X = 2 * ROWS * 128; static constexpr int UNIT = 8 * ROWS; static constexpr int UNITS = BATCH_TILE / 8; static constexpr int PARTIALS = UNITS * UNIT;",
			"constexpr int MOST = 16; static constexpr int MOMENTS = MOST * 2 * ROWS;",
			"constexpr int LANES = BATCH_WARPS * 32 / ROWS;",
			"return most * (BLOCK / 4) <= FEW * LANES;",
			"b.ring = b.full + BATCH_FIXED; b.x = memory + BATCH_FIXED + p.stages * BATCH_STAGE; b.partials = (float*)(b.x + b.most * X); b.mine = b.partials + 2 * PARTIALS; b.moments = b.mine; b.affine = b.moments + MOMENTS;",
		},
		"matrix.cu": {
			"BATCH(batch_f16_8, Half, 8, 8, 2) BATCH(batch_f16_8_wide, Half, 8, 16, 1) BATCH(batch_f16_16, Half, 16, 8, 2) BATCH(batch_f16_16_wide, Half, 16, 16, 1)",
			"BATCH(batch_bf16_8, Brain, 8, 8, 2) BATCH(batch_bf16_8_wide, Brain, 8, 16, 1) BATCH(batch_bf16_16, Brain, 16, 8, 2) BATCH(batch_bf16_16_wide, Brain, 16, 16, 1)",
		},
		"linear.cuh": {
			"constexpr int LINEAR_ROWS = 16, LINEAR_WARPS = 8, LINEAR_PARTS = 3;",
			"constexpr int LINEAR_TILE = 32;",
			"constexpr int WIDTH = LINEAR_TILE + 4;",
			"constexpr int PAD = 16;",
			"const int stride = (all + split - 1) / split * BLOCK + PAD;",
			"float* sums = x + p.rows * stride; float* parts = sums + LINEAR_WARPS * p.rows * WIDTH; float* moments = parts + 2 * p.rows * LINEAR_TILE; u32* tops = (u32*)(moments + 2 * LINEAR_WARPS * LINEAR_ROWS); float* affine = (float*)(tops + LINEAR_ROWS);",
		},
	} {
		testgpu.Says(t, file, lines...)
	}
}

// The Go structs are those of the kernels, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"kernels/linked.cuh", "Links", links{}},
		{"kernels/layers.cuh", "ChainLinear", chainLinear{}},
		{"kernels/layers.cuh", "ChainAttention", chainAttention{}},
		{"kernels/layers.cuh", "ChainLayer", chainLayer{}},
		{"kernels/layers.cuh", "ChainFeed", chainFeed{}},
		{"kernels/layers.cuh", "ChainAffine", chainAffine{}},
		{"kernels/layers.cuh", "ChainParams", chainParams{}},
		{"kernels/layers.cuh", "ChainEnds", chainEnds{}},
		{"kernels/layers.cuh", "ChainLaunch", chainLaunch{}},
		{"kernels/linear.cuh", "LinearParams", linearParams{}},
		{"kernels/batch.cuh", "BatchParams", batchParams{}},
		{"kernels/batch.cuh", "BatchKeep", batchKeep{}},
		{"kernels/matrix.cuh", "OperandParams", operandParams{}},
		{"kernels/matrix.cuh", "MatrixParams", matrixParams{}},
		{"kernels/rows.cuh", "NormParams", normParams{}},
		{"kernels/rows.cuh", "GatherParams", gatherParams{}},
		{"kernels/sample.cuh", "SampleParams", sampleParams{}},
		{"kernels/sample.cuh", "SampleSetting", Setting{}},
	} {
		testgpu.SameStruct(t, c.file, c.name, c.here)
	}
}
