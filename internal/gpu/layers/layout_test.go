package layers

import (
	"testing"

	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// What is said here of launches and shared memory is still what the kernels do.
func TestLaunchesAreTheKernels(t *testing.T) {
	for file, lines := range map[string][]string{
		"megakernel_attention.cuh": {
			"((2 * block + part) * CONSUMER_WARPS + warp) * p.rows * (D + 2)",
			"sh.o = (float*)(memory + slots * S::SLOT); sh.m = (float4*)(sh.o + 2 * CONSUMER_WARPS * p.rows * S::WIDTH); sh.l = sh.m + 2 * ROWS;",
		},
		"exchange_group.cuh": {
			"constexpr int EXCHANGE_MEMBERS = 8;",
			"constexpr int EXCHANGE_THREADS = 256;",
			"constexpr int EXCHANGE_BLOCKS = 256;",
			"constexpr int EXCHANGE_FLAGS = 256;",
			"constexpr int EXCHANGE_INBOX = EXCHANGE_FLAGS + 2 * EXCHANGE_MEMBERS * EXCHANGE_BLOCKS * 4;",
		},
		"exchange.cuh": {"constexpr int EXCHANGE_LISTS = 3;"},
		"megakernel_layers.cuh": {
			"constexpr int DECODE_WARPS = 8, DECODE_ROWS = 4;",
			"constexpr int DECODE_TILE = 16;",
			"constexpr int DECODE_BOX = 4096;",
			"constexpr int DECODE_GROUP = 8;",
			"constexpr int DECODE_COLUMNS = 128;",
			"constexpr int DECODE_FIXED = 14336;",
			"constexpr int DECODE_FIXED_PAIRS = 21504;",
			"constexpr int DECODE_STRIDE = 144;",
			"constexpr int DECODE_BODY = 368;",
			"DECODE_LINEAR = 0, DECODE_ATTENTION = 1",
		},
		"megakernel.cuh": {
			"rings = memory + FIXED; area = rings + DECODE_WARPS * p.stages * DECODE_BOX; feeds = (DecodeFeed*)(area + p.area); bars = (u64*)(feeds + p.feedCount); slots = bars + DECODE_WARPS * p.stages;",
			"constexpr int COLUMNS = ROWS + (NORM && !LLAMA ? 2 : 0);", "constexpr int GROUP = SPLIT == 1 || (NORM && !LLAMA) ? DECODE_GROUP / COLUMNS : NORM ? 2 : 1;",
			"turned = (float2*)(slots + 2 * p.slots);",
			"return SPLIT == 1 ? all : (all + 1 - rank) / 2;",
			"return unit < 0 ? unit + units() : unit;",
			"workers = o.workers >> half * 8 & 255",
			"float* const x = (float*)(layout.area + o.place) + warp * most * (COLUMNS * DECODE_STRIDE + (NORM ? DECODE_COLUMNS : 0));",
		},
		"nodes.cuh": {
			"constexpr int NODE_THREADS = 256; constexpr int NODE_NARROW = 1024;",
			"constexpr int NODE_EACH = 4;",
			"constexpr int NODE_STATES = 32;",
			"const int row = narrow ? blockIdx.x * (NODE_THREADS / 32) + threadIdx.x / 32 : blockIdx.x;",
		},
		"gemm_training.cuh": {
			"constexpr int TRAINING_THREADS = 256; constexpr int TRAINING_TILE = 128;",
			"column = blockIdx.x * 32 + lane;",
		},
		"nodes_training.cuh": {"constexpr int TRAINING_EACH = 4;", "constexpr int TILE = 64;", "blockIdx.x / across * TILE, column = blockIdx.x % across * TILE"},
		"gemm_hopper.cuh": {
			"constexpr int HOPPER_THREADS = 384; constexpr int HOPPER_ROWS = 128, HOPPER_COLUMNS = 192; constexpr int HOPPER_PAIR = 2;",
			"HOPPER_STAGE = (HOPPER_ROWS + HOPPER_COLUMNS) * 128, HOPPER_STAGES = 5;",
			"constexpr int HOPPER_EACH = 4; constexpr int HOPPER_LISTS = 4;",
		},
		"nodes_rows.cuh":   {"constexpr int ROWS_COLUMNS = 128;", "constexpr int ROWS_VECTORS = 8;", "part = blockIdx.x / tiles", "+ threadIdx.x) * 8;", "(TRAINING_THREADS * TRAINING_EACH)"},
		"nodes_solver.cuh": {"constexpr int SOLVER_PIECE = 8192;"},
		"nodes_loss.cuh":   {"constexpr int LOSS_COLUMNS = 4 * TRAINING_THREADS;"},
		"gemm_activation.cuh": {
			"enum : int { NO_ACTIVATION = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4 };",
			"enum : int { GATED = 64 };",
		},
		"gated_gemm.cu": {
			"GEMM(gated_gemm_f16_128, AsF16, 2, 128) GEMM(gated_gemm_f16_256, AsF16, 2, 256) GEMM(gated_gemm_f16_128_rounded, AsF16, 1, 128) GEMM(gated_gemm_f16_256_rounded, AsF16, 1, 256)",
			"GEMM(gated_gemm_bf16_128, AsBF16, 2, 128) GEMM(gated_gemm_bf16_256, AsBF16, 2, 256) GEMM(gated_gemm_bf16_128_rounded, AsBF16, 1, 128) GEMM(gated_gemm_bf16_256_rounded, AsBF16, 1, 256)",
		},
		"gated.cu": {
			"BATCH(gated_batch_f16_8, AsF16, Float16, 8, 8, 2) BATCH(gated_batch_f16_8_wide, AsF16, Float16, 8, 16, 1) BATCH(gated_batch_f16_16, AsF16, Float16, 16, 8, 2) BATCH(gated_batch_f16_16_wide, AsF16, Float16, 16, 16, 1)",
			"BATCH(gated_batch_f16_32, AsF16, Float16, 32, 4, 2) BATCH(gated_batch_f16_32_wide, AsF16, Float16, 32, 8, 1) BATCH(gated_batch_f16_64, AsF16, Float16, 64, 4, 1) BATCH(gated_batch_f16_64_wide, AsF16, Float16, 64, 1, 1)",
			"BATCH(gated_batch_bf16_8, AsBF16, BFloat16, 8, 8, 2) BATCH(gated_batch_bf16_8_wide, AsBF16, BFloat16, 8, 16, 1) BATCH(gated_batch_bf16_16, AsBF16, BFloat16, 16, 8, 2) BATCH(gated_batch_bf16_16_wide, AsBF16, BFloat16, 16, 16, 1)",
			"BATCH(gated_batch_bf16_32, AsBF16, BFloat16, 32, 4, 2) BATCH(gated_batch_bf16_32_wide, AsBF16, BFloat16, 32, 8, 1) BATCH(gated_batch_bf16_64, AsBF16, BFloat16, 64, 4, 1) BATCH(gated_batch_bf16_64_wide, AsBF16, BFloat16, 64, 1, 1)",
		},
		"rotary.cuh": {"constexpr int ROTARY_PAIRS = 128;"},
		"gemm_tiled.cuh": {
			"constexpr int GEMM_WARPS = 8; constexpr int GEMM_THREADS = (GEMM_WARPS + 1) * 32;",
			"constexpr int GEMM_TILE = 128;",
			"constexpr int GEMM_STEP = 64;",
			"constexpr int GEMM_WIDTH = GEMM_TILE + 4;",
			"constexpr int PART = ROWS * 128; static constexpr int STAGE = GEMM_TILE * 128 + PARTS * PART;",
			"u64* bars = (u64*)(memory + p.stages * STAGE);",
		},
		"gemm_narrow.cuh": {
			"constexpr int NARROW_THREADS = 256; constexpr int NARROW_TILE = 256;",
			"constexpr int NARROW_CHUNK = 512;",
			"constexpr int NARROW_CHUNKS = 2;",
			"constexpr int NARROW_PLANE = 2048;",
			"(2 * block + (first && beginOf(block) < tile * p.units)) * (2 * NT * NARROW_THREADS)",
			"enum : int { NARROW_INT8 = 0, NARROW_E4M3 = 1, NARROW_INT4 = 2 };",
			"enum : int { NO_SECOND = 0, ZEROS = 1, MINIMA = 2 };",
		},
		"gemm_narrow_few.cuh": {
			"constexpr int FEW_WARPS = 8;",
			"constexpr int FEW_THREADS = (FEW_WARPS + 4) * 32; constexpr int FEW_STAGE = NARROW_CHUNKS * NARROW_STRIPS * NARROW_CHUNK;",
			"constexpr int FEW_SHARE = 64;",
			"constexpr int FEW_ZEROS = 64;",
			"STRIPS = NT == 1 ? 4 : 2, ROWS = STRIPS * 16;",
			"JOBS = NARROW_STRIPS / STRIPS,",
			"TEAMS = FEW_WARPS / JOBS;",
			"zeros(ring + p.stages * p.stage), x(zeros + FEW_ZEROS), sums(x + most * 64), parts(sums + (p.kind == MINIMA ? (most * 4 + 15) / 16 * 16 : 0)), tops(parts + FEW_WARPS * ROWS * 8 * pairs), downs(tops + NT * 32), full(downs + NT * 32), empty(full + p.stages * 8), got(empty + p.stages * 8), taken(got + 8)",
			"return factors * NARROW_TILE * p.factor;",
		},
		"gemm_narrow_groups.cuh": {
			"constexpr int NARROW_GROUP_WARPS = NARROW_STRIPS;",
			"constexpr int NARROW_GROUP_THREADS = (NARROW_GROUP_WARPS + 4) * 32;",
			"static constexpr int X = D::K32 * N * 64;",
			"full(ring + p.stages * p.stage + 16), empty(full + p.stages * 8)",
			"return factors * strips * 16 * p.factor;",
			"tile = blockIdx.x / (2 * NT), i = blockIdx.x % (2 * NT)",
		},
		"gemm_narrow_rows.cuh": {
			"constexpr int NARROW_ROWS_THREADS = 384;",
			"constexpr int NARROW_ROWS_STEP = 128;",
			"constexpr int NARROW_ROWS_RING = 192 << 10;",
			"STAGE = SETS * WEIGHTS + X + SCALES, STAGES = NARROW_ROWS_RING / STAGE;",
			"empty = full + STAGES * 8;",
		},
		"gemm_persistent.cuh": {
			"constexpr int PERSISTENT_THREADS = (GEMM_WARPS + 4) * 32;",
			"constexpr int PERSISTENT_ROWS = 128;",
			"constexpr int PERSISTENT_RING = 192 << 10;",
			"constexpr int PERSISTENT_CHUNK = 64;",
			"constexpr int PERSISTENT_STAGING = 16 * PERSISTENT_CHUNK * 4;",
			"constexpr int PERSISTENT_BARS = PERSISTENT_RING + GEMM_WARPS * PERSISTENT_STAGING;",
			"constexpr int X = PERSISTENT_ROWS * 128; static constexpr int STAGE = PARTS * X + COLUMNS * 128; static constexpr int STAGES = PERSISTENT_RING / STAGE;",
			"constexpr int HALF = COLUMNS / 2;",
		},
		"gemm.cu": {
			"GEMM(gemm_f16_128, AsF16, 2, 128) GEMM(gemm_f16_256, AsF16, 2, 256) GEMM(gemm_f16_128_rounded, AsF16, 1, 128) GEMM(gemm_f16_256_rounded, AsF16, 1, 256)",
			"GEMM(gemm_bf16_128, AsBF16, 2, 128) GEMM(gemm_bf16_256, AsBF16, 2, 256) GEMM(gemm_bf16_128_rounded, AsBF16, 1, 128) GEMM(gemm_bf16_256_rounded, AsBF16, 1, 256)",
		},
		"gemm_skinny.cuh": {
			"constexpr int SKINNY_TILE = 64; constexpr int SKINNY_STAGE = 2 * SKINNY_TILE * 128; constexpr int SKINNY_STAGES = 10; constexpr int SKINNY_PACE = 4; constexpr int SKINNY_FIXED = 1024; constexpr int SKINNY_WARPS = 8;",
			"return rows > 16 ? rows / 16 : 1;", "return (SKINNY_WARPS + 1 + 2 * skinnyEpilogues(rows)) * 32;",
			"constexpr int BLOCK = 64; static constexpr int X = PARTS * ROWS * 128; static constexpr int FLOATS = 2 * ROWS * 128; static constexpr bool ROUNDED = PARTS == 1; static constexpr int UNIT = 8 * ROWS; static constexpr int UNITS = SKINNY_TILE / 8; static constexpr int PARTIALS = UNITS * UNIT;",
			"constexpr int MOST = 16; static constexpr int MOMENTS = MOST * 2 * ROWS;",
			"constexpr int LANES = ROWS < 16 ? SKINNY_WARPS * 32 / ROWS : 16;",
			"constexpr bool MANY_ROWS = ROWS > 16;",
			"b.first = cluster / below, b.step = clusters / below, b.tiles = b.gated ? tiles / 2 : tiles; b.row = MANY_ROWS ? cluster % below * ROWS : 0,",
			"return most * (BLOCK / 4) <= FEW * LANES;", "return few() ? 0 : (most * (FLOATS - X) + SKINNY_STAGE - 1) / SKINNY_STAGE;",
			"b.ring = b.full + SKINNY_FIXED; b.x = memory + SKINNY_FIXED + p.stages * SKINNY_STAGE; b.partials = (float*)(b.x + b.most * X); b.mine = b.partials + 2 * PARTIALS; b.moments = b.mine; b.affine = b.moments + MOMENTS;",
		},
		"gemm_ready.cuh": {
			"constexpr int READY_ROWS = 64;", "SkinnyGemm<T, Keys, READY_ROWS, 1, GATES, 1>", "__launch_bounds__(skinnyThreads(64), 1)",
			"b.ring = b.full + SKINNY_FIXED; b.x = memory + SKINNY_FIXED + p.stages * SKINNY_STAGE; b.partials = (float*)(b.x + b.most * Base::X); b.mine = b.partials + 2 * Base::PARTIALS;",
		},
		"matrix.cu": {
			"BATCH(batch_f16_8, AsF16, Float16, 8, 8, 2) BATCH(batch_f16_8_wide, AsF16, Float16, 8, 16, 1) BATCH(batch_f16_16, AsF16, Float16, 16, 8, 2) BATCH(batch_f16_16_wide, AsF16, Float16, 16, 16, 1)",
			"BATCH(batch_f16_32, AsF16, Float16, 32, 4, 2) BATCH(batch_f16_32_wide, AsF16, Float16, 32, 8, 1) BATCH(batch_f16_64, AsF16, Float16, 64, 4, 1) BATCH(batch_f16_64_wide, AsF16, Float16, 64, 1, 1)",
			"BATCH(batch_bf16_8, AsBF16, BFloat16, 8, 8, 2) BATCH(batch_bf16_8_wide, AsBF16, BFloat16, 8, 16, 1) BATCH(batch_bf16_16, AsBF16, BFloat16, 16, 8, 2) BATCH(batch_bf16_16_wide, AsBF16, BFloat16, 16, 16, 1)",
			"BATCH(batch_bf16_32, AsBF16, BFloat16, 32, 4, 2) BATCH(batch_bf16_32_wide, AsBF16, BFloat16, 32, 8, 1) BATCH(batch_bf16_64, AsBF16, BFloat16, 64, 4, 1) BATCH(batch_bf16_64_wide, AsBF16, BFloat16, 64, 1, 1)",
		},
		"mixed.cu": {
			"SkinnyGemm<T, KEYS, ROWS, FEW, false, 1>::run(p);", "TiledGemm<T, ROWS, false, 1>::run(p);",
			"MATRIX(matrix_f16_32_rounded, AsF16, 32) MATRIX(matrix_f16_64_rounded, AsF16, 64) MATRIX(matrix_f16_128_rounded, AsF16, 128) MATRIX(matrix_bf16_32_rounded, AsBF16, 32) MATRIX(matrix_bf16_64_rounded, AsBF16, 64) MATRIX(matrix_bf16_128_rounded, AsBF16, 128)",
			"BATCH(batch_f16_32_rounded, AsF16, Float16, 32, 4, 2) BATCH(batch_f16_32_wide_rounded, AsF16, Float16, 32, 8, 1) READY(batch_f16_64_rounded, AsF16, Float16, false)",
			"BATCH(batch_bf16_32_rounded, AsBF16, BFloat16, 32, 4, 2) BATCH(batch_bf16_32_wide_rounded, AsBF16, BFloat16, 32, 8, 1) READY(batch_bf16_64_rounded, AsBF16, BFloat16, false)",
		},
		"gated_mixed.cu": {
			"SkinnyGemm<T, KEYS, ROWS, FEW, true, 1>::run(p);", "TiledGemm<T, ROWS, true, 1>::run(p);",
			"MATRIX(gated_f16_32_rounded, AsF16, 32) MATRIX(gated_f16_64_rounded, AsF16, 64) MATRIX(gated_f16_128_rounded, AsF16, 128) MATRIX(gated_bf16_32_rounded, AsBF16, 32) MATRIX(gated_bf16_64_rounded, AsBF16, 64) MATRIX(gated_bf16_128_rounded, AsBF16, 128)",
			"BATCH(gated_batch_f16_32_rounded, AsF16, Float16, 32, 4, 2) BATCH(gated_batch_f16_32_wide_rounded, AsF16, Float16, 32, 8, 1) READY(gated_batch_f16_64_rounded, AsF16, Float16, true)",
			"BATCH(gated_batch_bf16_32_rounded, AsBF16, BFloat16, 32, 4, 2) BATCH(gated_batch_bf16_32_wide_rounded, AsBF16, BFloat16, 32, 8, 1) READY(gated_batch_bf16_64_rounded, AsBF16, BFloat16, true)",
		},
		"gemm_gemv.cuh": {
			"enum : int { NO_NORM = 0, LAYER_NORM = 1, RMS_NORM = 2 };",
			"constexpr int GEMV_ROWS = 16, GEMV_WARPS = 8, LINEAR_PARTS = 3;",
			"constexpr int GEMV_TILE = 32;",
			"constexpr int WIDTH = GEMV_TILE + 4;",
			"constexpr int PAD = 16;",
			"const int stride = (all + split - 1) / split * BLOCK + PAD;",
			"float* sums = x + p.rows * stride; float* parts = sums + GEMV_WARPS * p.rows * WIDTH; float* moments = parts + 2 * p.rows * GEMV_TILE; u32* tops = (u32*)(moments + 2 * GEMV_WARPS * GEMV_ROWS); float* affine = (float*)(tops + GEMV_ROWS);",
		},
	} {
		enginetest.Says(t, file, lines...)
	}
}

// The Go structs are those of the kernels, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"kernels/megakernel_attention.cuh", "Links", links{}},
		{"kernels/megakernel_layers.cuh", "DecodeLinear", decodeLinear{}},
		{"kernels/megakernel_layers.cuh", "DecodeAttention", decodeAttention{}},
		{"kernels/megakernel_layers.cuh", "DecodeLayer", decodeLayer{}},
		{"kernels/megakernel_layers.cuh", "DecodeFeed", decodeFeed{}},
		{"kernels/megakernel_layers.cuh", "DecodeAffine", decodeAffine{}},
		{"kernels/megakernel_layers.cuh", "DecodeParams", decodeParams{}},
		{"kernels/megakernel_layers.cuh", "DecodeEnds", decodeEnds{}},
		{"kernels/megakernel_layers.cuh", "DecodeTurns", decodeTurns{}},
		{"kernels/megakernel_layers.cuh", "DecodeLaunch", decodeLaunch{}},
		{"kernels/megakernel_layers.cuh", "DecodeExchange", decodeExchange{}},
		{"kernels/exchange_group.cuh", "ExchangeGroup", exchangeGroup{}},
		{"kernels/exchange.cuh", "AllReduceParams", allReduceParams{}},
		{"kernels/exchange.cuh", "GatherList", gatherList{}},
		{"kernels/exchange.cuh", "AllGatherParams", allGatherParams{}},
		{"kernels/exchange.cuh", "MergeStatesParams", mergeStatesParams{}},
		{"kernels/exchange_argmax.cuh", "AllArgMaxParams", allArgMaxParams{}},
		{"kernels/gemm_gemv.cuh", "LinearParams", linearParams{}},
		{"kernels/gemm_narrow.cuh", "NarrowParams", narrowParams{}},
		{"kernels/gemm_narrow.cuh", "NarrowOperandParams", narrowOperandParams{}},
		{"kernels/gemm_narrow.cuh", "NarrowGatherParams", narrowGatherParams{}},
		{"kernels/gemm_narrow_rows.cuh", "NarrowRowsPart", narrowRowsPart{}},
		{"kernels/gemm_narrow_rows.cuh", "NarrowRowsParams", narrowRowsParams{}},
		{"kernels/gemm_narrow_rows.cuh", "NarrowRowOperandParams", narrowRowOperandParams{}},
		{"kernels/gemm_skinny.cuh", "SkinnyParams", skinnyParams{}},
		{"kernels/gemm_tiled.cuh", "FusedAppend", fusedAppend{}},
		{"kernels/gemm_tiled.cuh", "OperandParams", operandParams{}},
		{"kernels/gemm_tiled.cuh", "GemmParams", gemmParams{}},
		{"kernels/gemm_hopper.cuh", "HopperParams", hopperParams{}},
		{"kernels/gemm_hopper.cuh", "HopperRoundParams", hopperRoundParams{}},
		{"kernels/gemm_hopper.cuh", "HopperAddParams", hopperAddParams{}},
		{"kernels/decode_rows.cuh", "NormParams", normParams{}},
		{"kernels/decode_rows.cuh", "GatherParams", gatherParams{}},
		{"kernels/gemm_training.cuh", "TrainingParams", productParams{}},
		{"kernels/gemm_training.cuh", "TrainingSumsParams", sumsParams{}},
		{"kernels/nodes_rows.cuh", "RowsSumsParams", rowsSumsParams{}},
		{"kernels/nodes_rows.cuh", "RowsNormParams", rowsNormParams{}},
		{"kernels/nodes_rows.cuh", "RowsLayerNormParams", rowsLayerNormParams{}},
		{"kernels/nodes_rows.cuh", "RowsRoundParams", rowsRoundParams{}},
		{"kernels/nodes_rows.cuh", "RowsMoveParams", rowsMoveParams{}},
		{"kernels/nodes_training.cuh", "TrainingSlopeParams", slopeParams{}},
		{"kernels/nodes_training.cuh", "TrainingNormParams", normGradientParams{}},
		{"kernels/nodes_training.cuh", "TrainingConvertParams", convertParams{}},
		{"kernels/nodes_training.cuh", "TrainingTransposeParams", transposeParams{}},
		{"kernels/nodes_loss.cuh", "LossParams", lossParams{}},
		{"kernels/nodes_solver.cuh", "SolverWeight", solverWeight{}},
		{"kernels/nodes_solver.cuh", "SolverParams", solverParams{}},
		{"kernels/nodes_loss.cuh", "LossSumsParams", lossSumsParams{}},
		{"kernels/nodes_loss.cuh", "TableGradientParams", tableGradientParams{}},
		{"kernels/nodes.cuh", "RMSNormParams", rmsNormParams{}},
		{"kernels/nodes.cuh", "RotaryParams", rotaryParams{}},
		{"kernels/nodes.cuh", "ElementsParams", elementsParams{}},
		{"kernels/nodes.cuh", "MoveParams", moveParams{}},
		{"kernels/gemm_heads.cuh", "HeadLinearParams", headLinearParams{}},
		{"kernels/nodes.cuh", "MergeParams", mergeParams{}},
		{"kernels/sample_tokens.cuh", "SampleParams", sampleParams{}},
		{"kernels/sample_tokens.cuh", "SampleSetting", Setting{}},
	} {
		enginetest.SameStruct(t, c.file, c.name, c.here)
	}
}
