package attention

import (
	"fmt"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// shape.go mirrors the current kernels.
func TestShapeIsTheKernels(t *testing.T) {
	for file, lines := range map[string][]string{
		"attn_work.cuh": {
			"constexpr int ROWS = 16;",
			"constexpr int TOGETHER = -1;",
			"constexpr int PREFETCHED_ENTRIES = 16;", // prefetchedEntries
			"constexpr int CONSUMER_WARPS = 4; constexpr int PRODUCER_WARPS = 4;",
			"#ifdef __CUDA_ARCH_FEAT_SM90_ALL constexpr int EPILOGUE_WARPS = 4; #else constexpr int EPILOGUE_WARPS = 0; #endif",
		},
		"attn_reduce.cuh": {
			"constexpr int STATES = CONSUMER_WARPS;",
			"float* o; float4* m; float4* l; int* last;",
			"HELPED = 8,", // leastMany
		},
		"attn_ring.cuh": {
			"#if __CUDA_ARCH__ >= 900 static constexpr int MORE = LINKED ? 1 : 2; #else static constexpr int MORE = 1; #endif static constexpr int KEYS",
			"constexpr int KEYS = D * Store::bytes <= 128 ? 2 * MORE * Math::depth : D * Store::bytes <= 256 ? MORE * Math::depth : Math::depth;",
			"constexpr int BLOCK = KEYS * 128;",
			"const bool paging = S::PAGED && (!SCORED || paged);", "MANY = paging ? 160 / BLOCKS : 160;", // testManyTiles
			"constexpr int BLOCKS = (D * Store::bytes + 127) / 128;",
			"constexpr int SLOT = 2 * BLOCKS * BLOCK;",
			"constexpr int WIDTH = D + 8;",
			"constexpr bool SHARED_QUERY = D * Math::Operand::bytes > 256;",
			"constexpr int STEPS = D / Math::depth;",
			"constexpr int QUERY = SHARED_QUERY ? STEPS * 32 * 16 * (Math::wide ? 1 : 2) : 0;",
		},
		"attn_lean.cuh": {
			"constexpr int MOST = 8; static constexpr bool EARLY = S::BLOCKS == 1;", // TestConfigure
			"u64* bars = (u64*)(memory + slots * S::SLOT); u64* bufferBars = bars + 2 * slots; char* rest = (char*)(bufferBars + 6); typename R::Shared sh; sh.warps = warps, sh.buffers = p.buffers; sh.last = (int*)(bufferBars + 4); " +
				"sh.o = (float*)(rest + S::QUERY); sh.m = (float4*)(sh.o + sh.buffers * warps * p.rows * S::WIDTH); sh.l = sh.m + sh.buffers * ROWS;",
		},
		"attn_row.cuh": {
			fmt.Sprintf("constexpr int TOGETHER = %d;", rowChunks), "constexpr int PARTS = 8;", "constexpr int QUERY = PARTS * D * 2;", "constexpr int WEIGHTS = KEYS * PARTS * 2;",
			"constexpr int OPERANDS = QUERY + 2 * TOGETHER * WEIGHTS + 2 * WARPS * 4;",
			"char* const operands = memory + p.slots * SLOT;", "u64* const bars = (u64*)(operands + OPERANDS); u64* const bufferBars = bars + 2 * p.slots;",
			"sh.last = (int*)(bufferBars + 4); sh.o = (float*)(bufferBars + 6); sh.m = (float4*)(sh.o + sh.buffers * WARPS * p.rows * S::WIDTH); sh.l = sh.m + sh.buffers * ROWS;",
		},
		"attn_narrow_tile.cuh": {
			"#if __CUDA_ARCH__ >= 900 static constexpr int KEYS = 64, PITCH = D, RING = 192 << 10; #else static constexpr int KEYS = 32, PITCH = 128, RING = 128 << 10; #endif",
			"constexpr int SLOT = 2 * BLOCKS * BLOCK; static constexpr int SCALES = 2 * KEYS * 4; static constexpr int QUERY = RING / SLOT * SCALES;",
		},
		"attn_q4.cuh": {
			"constexpr int ROW = 256, BYTES = LOOKED_UP ? 256 * ROW : 0;", "RING = FourBits::LOOKED_UP ? (D > 128 ? 144 : 80) << 10 : 128 << 10; static constexpr int BLOCKS = 1, BLOCK = KEYS * PITCH, SLOT = 2 * BLOCK, SCALES = 0, QUERY = FourBits::BYTES;",
		},
		"attn_latent_any.cuh": { // latentAnyConfig
			"KEYS = 16; using Place", "ROWS = 32", "D = APART ? 256 : 512, WIDTH = D;", "MOST_DIM = APART ? 256 : 576;", "constexpr int LATENT_GROUP = 128;", "enum : int { FRONT = 1024 };",
			"slot = WIDENED ? KEYS * a.value + blocksOf(a.dim - a.value) * BLOCK + KEYS * GROUPS * 4 : (blocksOf(a.dim) + (APART ? blocksOf(a.value) : 0)) * BLOCK; char* at = ring + a.stages * slot; " +
				"operands = sharedAddress(at); if (WIDENED) at += blocksOf(a.value) * BLOCK; parts = (float*)at, weights = parts + PARTS / 4;",
			"PITCH = KEYS + 8;", "PARTS = WARPS * ROWS * PITCH * 4, WEIGHTS = ROWS * PITCH * 4;", "pitch = a.value + 8; float* const rows = (float*)sh.ring;",
		},
		"attn_narrow.cuh": {"constexpr int SHARERS = APART ? 2 : 1, CONSUMERS = SHARERS * CONSUMER_WARPS;", "enum : int { SCALES_BY_HEAD = 1, SCALES_BY_PAGE = 2, SCALES_BY_TOKEN = 3 };"}, // attn.Scales
		"lean.cu": {
			"HOPPER_ATTENTION(lean_f16_128_many, AsF16, 128, true) HOPPER_ATTENTION(lean_bf16_128_many, AsBF16, 128, true)",
			"HOPPER_ATTENTION(lean_f16_64_paged, AsF16, 64, false, true) HOPPER_ATTENTION(lean_bf16_64_paged, AsBF16, 64, false, true)",
			"ROW_ATTENTION(lean_f16_64_row, AsF16, false) ROW_ATTENTION(lean_bf16_64_row, AsBF16, false) ROW_ATTENTION(lean_f16_64_row_paged, AsF16, true) ROW_ATTENTION(lean_bf16_64_row_paged, AsBF16, true)",
		},
		"attn_backward.cuh": {
			"MINE = TILES * 16, KEYS = WARPS * MINE,", "static constexpr int KEY = KEYS * D * 2, ROW = ROWS * D * 2, SLOPE = KEYS * 128; static constexpr int STAGE = 2 * ROW + ROWS * 8; static constexpr int SHARED = 2 * KEY + SLOPE + STAGES * STAGE + 16;",
		},
		"backward.cu": {
			"#if __CUDA_ARCH__ == 800 #define HEADS_64 2, 64, 4, 2, 32, 2 #define HEADS_128 1, 128, 8, 1, 64, 2 #else #define HEADS_64 1, 64, 8, 1, 64, 2 #define HEADS_128 1, 128, 8, 1, 32, 1 #endif", // backwardTable
		},
		"attn_backward_hopper.cuh": {
			"KEYS = 128, THREADS = 384,", "KEY = KEYS * D * 2, ROW = ROWS * D * 2, SLOPE = KEYS * ROWS * 2, SUM = 64 * 64 * 4;",
			"STATISTICS = ROWS * 8;", "SHARED = 2 * KEY + Q_STAGES * (ROW + STATISTICS) + O_STAGES * ROW + 2 * SLOPE + 2 * SUM + 8 * 32 + V::PARAMS;", "O_STAGES = 2,",
		},
		"backward_hopper.cu":               {"#define HEADS_64 64, 128, 3 #define HEADS_128 128, 64, 3"}, // backwardTable
		"backward_hopper_variant.cu":       {"#define HEADS_64 64, 128, 3 #define HEADS_128 128, 64, 3"},
		"attn_spread.cuh":                  {fmt.Sprintf("constexpr int SPREAD_THREADS = %d;", spreadThreads)},
		"attn_backward_hopper_variant.cuh": {"PARAMS = 512;"},
		"attn_prefill_rows.cuh": {
			"constexpr int PARTS = PRECISE ? 2 : 1; static constexpr int BLOCKS = (D * Store::bytes + 127) / 128; static constexpr int QUERY = ROWS * BLOCKS * 128; " +
				"static constexpr int FACTORS = PRECISE ? ROWS * 4 : 0; static constexpr int STAGE = KEYS * BLOCKS * 128;",
			"constexpr int APART = ROWS * 2, SLOT = (D / 8 + 1) * APART;", // partBytes
			"p.partials + (long long)(2 * (host + part) + (part == 0)) * SLOT",
			"p.counters + host * (ROWS / 16)", // partCounters
		},
		"attn_prefill_variant.cuh": {fmt.Sprintf("constexpr int CUT_KEYS = %d;", cutKeys)},
		"attn_prefill.cuh": {
			"constexpr int ROWS = GROUPS * 64; static constexpr int PLACES = D <= 128 ? 2 : 1;",
			"constexpr int THREADS = (GROUPS + 1) * 128;",
		},
		"attn_prefill_mma.cuh": {
			"#if __CUDA_ARCH__ == 800 #define STEP 64, 3 #else #define STEP 32, 2 #endif",
			"constexpr int ROWS = WARPS * TILES * 16; #if __CUDA_ARCH__ == 800 static constexpr int THREADS = WARPS * 32, TOGETHER = WARPS == 4 && D == 64 && !SCORED ? 3 : 8 / WARPS; #else static constexpr int THREADS = WARPS * 32, TOGETHER = 8 / WARPS; #endif", // tile.blocks
			"ring = query + PARTS * QUERY, factors = ring + STAGES * STAGE;",
		},
		"prefill.cu":         prefillSource(prefillUnit),
		"prefill_variant.cu": prefillSource(prefillVariantUnit),
	} {
		enginetest.Says(t, file, lines...)
	}
}

// prefillSource returns the prefill kernels that a unit's source lists: all head dims of each Format.
func prefillSource(unit string) (lines []string) {
	step := func(k *kernel) string { return fmt.Sprintf("%d, %d", k.tile.keys, k.tile.stages) }
	steps := map[string]string{} // by entry, on the GPUs listed first
	for _, k := range prefillLines() {
		if k.unit != unit {
			continue
		}
		shape := fmt.Sprint(k.tile.rows / 64)
		if k.tile.warps > 0 {
			shape = fmt.Sprintf("%d, %d", k.tile.warps, k.tile.rows/k.tile.warps/16)
		}
		format := map[attn.DType]string{attn.Float16: "AsF16", attn.BFloat16: "AsBF16"}[k.kv]
		for _, entry := range k.entries {
			is := step(&k)
			if k.capability == largeShared {
				steps[entry] = is
				continue
			}
			if first, ok := steps[entry]; ok && k.capability == smallShared && first != is {
				is = "STEP"
			}
			more := ", false, true"
			switch {
			case k.exact && k.value > 0:
				more = fmt.Sprintf(", false, false, %d", k.value)
			case k.exact && k.unit == prefillUnit && k.dims[0] == 64:
				more = ", false, false, 64, true"
			case k.exact:
				more = ""
			case !k.same():
				more = ", true"
			}
			name, end, _ := strings.Cut(entry, fmt.Sprintf("_%d", k.dims[0]))
			lines = append(lines, fmt.Sprintf("HEAD_DIMS(%s, %s)", name, format))
			lines = append(lines, fmt.Sprintf("PREFILL(name##_%d%s, T, %d, %s, %s%s)", k.dims[0], end, k.dims[0], shape, is, more))
		}
	}
	return lines
}

// The Go structs equal the kernels' structs, field by field.
func TestStructs(t *testing.T) {
	for _, c := range []struct {
		file, name string
		here       any
	}{
		{"kernels/attn_work.cuh", "Seq", sequence{}},
		{"kernels/attn_work.cuh", "Work", work{}},
		{"kernels/attn_work.cuh", "Params", Params{}},
		{"kernels/attn_work.cuh", "MeetParams", meetParams{}},
		{"kernels/attn_work.cuh", "LaunchParams", params{}},
		{"kernels/attn_variant.cuh", "ScoredLaunchParams", scoredParams{}},
		{"kernels/attn_measured.cuh", "MeasureParams", measureParams{}},
		{"kernels/attn_measured.cuh", "MeasuredLaunchParams", measuredParams{}},
		{"kernels/attn_measured.cuh", "MeasuredRowsParams", measuredRows{}},
		{"kernels/attn_written.cuh", "WrittenLaunchParams", writtenLaunch{}},
		{"kernels/attn_expression.cuh", "WrittenParams", writtenParams{}},
		{"kernels/attn_expression.cuh", "WrittenBlock", writtenBlock{}},
		{"kernels/attn_written_prefill.cuh", "WrittenPrefillParams", writtenPrefill{}},
		{"kernels/attn_written.cuh", "RestoreParams", restoreParams{}},
		{"kernels/attn_variant.cuh", "ScoreParams", scoreParams{}},
		{"kernels/attn_variant.cuh", "SeqDetail", seqDetail{}},
		{"kernels/attn_append.cuh", "AppendParams", appendParams{}},
		{"kernels/attn_backward.cuh", "BackwardParams", backwardParams{}},
		{"kernels/attn_backward_variant.cuh", "BackwardScores", backwardScores{}},
		{"kernels/attn_backward_variant.cuh", "BackwardScoredParams", backwardScoredParams{}},
		{"kernels/attn_written_backward.cuh", "WrittenGradients", writtenGradients{}},
		{"kernels/attn_written_backward.cuh", "WrittenBackwardParams", writtenBackwardParams{}},
		{"kernels/attn_dropout.cuh", "DropoutParams", dropoutParams{}},
		{"kernels/attn_narrow.cuh", "NarrowParams", narrowScales{}},
		{"kernels/attn_narrow.cuh", "NarrowLaunchParams", narrowParams{}},
		{"kernels/attn_narrow_variant.cuh", "NarrowScoredParams", narrowScoredParams{}},
		{"kernels/attn_narrow_append.cuh", "NarrowAppendParams", narrowAppend{}},
		{"kernels/attn_latent_any.cuh", "LatentAnyParams", latentAnyParams{}},
		{"kernels/attn_latent_columns.cuh", "LatentColumnsParams", latentColumnsParams{}},
		{"kernels/attn_latent_narrow.cuh", "LatentNarrowParams", latentNarrowParams{}},
		{"kernels/attn_latent_append.cuh", "LatentAppendParams", latentAppend{}},
		{"kernels/attn_prefix.cuh", "PrefixGatherParams", prefixGatherParams{}},
		{"kernels/attn_prefix.cuh", "PrefixMergeParams", prefixMergeParams{}},
		{"kernels/attn_rotary.cuh", "RotaryAppendParams", rotaryParams{}},
		{"kernels/attn_spread.cuh", "Spread", columns{}},
		{"kernels/attn_spread.cuh", "SpreadParams", spreadParams{}},
		{"kernels/attn_unfused.cuh", "UnfusedParams", unfusedParams{}},
		{"kernels/attn_prefill_rows.cuh", "PrefillTile", prefillTile{}},
		{"kernels/attn_prefill_rows.cuh", "PrefillParams", prefillParams{}},
		{"kernels/attn_prefill_rows.cuh", "ScoredPrefillParams", scoredPrefillParams{}},
		{"internal/cuda/fakedriver/testdata/machine.c", "work", work{}}, // a driver stub that computes: tag cuda
	} {
		enginetest.SameStruct(t, c.file, c.name, c.here)
	}
}
